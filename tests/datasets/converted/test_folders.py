"""Laws of folders of arrays: a converted folder equals the graph of the same arrays in memory, for every layout and memory limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_folders import IGB_SIZES, write_igb, write_mag240m
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToUndirected

import salientpp
from salientpp.datasets import convert, load_dataset
from salientpp.datasets.converted import layouts
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.sources import open_source
from salientpp.graph.csc import Graph

ROOT = Path(__file__).parents[3]


def converted(source: str, root: Path, working: int = 2**21, undirected=None, **options) -> Data | HeteroData:
    given = Options(**{"deduplicate": False, "dtype": {}, "finite": False, **options})
    write_converted(open_source(source, Path("data"), undirected), root, Budget(0, working), given)
    return load_dataset(f"converted:{root}")


def lists_of(store, size: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Returns the neighbour lists of a relation, with the sources of each list in their order."""
    if "adj_t" in store:
        return store.adj_t.crow_indices().tolist(), store.adj_t.col_indices().tolist()
    source, target = store.edge_index
    order = target.argsort(stable=True)
    return torch.bincount(target, minlength=size[1]).cumsum(0).tolist(), source[order].tolist()


def assert_same(got: HeteroData, expected: HeteroData) -> None:
    assert set(got.node_types) == set(expected.node_types) and set(got.edge_types) == set(expected.edge_types)
    for type_ in expected.node_types:
        one, other = got[type_], expected[type_]
        assert one.num_nodes == other.num_nodes and set(one.keys()) == {*other.keys(), "num_nodes"}, type_
        for name in set(other.keys()) - {"num_nodes"}:
            assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), (type_, name)
    for relation in expected.edge_types:
        size = expected[relation[0]].num_nodes, expected[relation[2]].num_nodes
        (indptr, indices), (ends, sources) = lists_of(got[relation], size), lists_of(expected[relation], size)
        assert (indptr[1:], indices) == (ends, sources), relation


# --- MAG240M ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("working", [30_000, 10**8])
@pytest.mark.filterwarnings("error:.*unlabelled.*")
def test_mag240m_converts_with_the_splits_of_ogb(tmp_path, working):
    expected = write_mag240m(tmp_path / "raw")
    assert_same(converted(f"mag240m:{tmp_path / 'raw'}", tmp_path / "c", working), expected)


def test_mag240m_converts_from_its_processed_folder_and_with_a_test_set_that_is_split_already(tmp_path):
    expected = write_mag240m(tmp_path / "raw")
    splits = {"train": "train", "valid": "val", "test-whole": "test", "test-dev": "test_dev"}
    splits["test-challenge"] = "test_challenge"
    ids = {name: expected["paper"][f"{of}_mask"].nonzero().flatten().numpy() for name, of in splits.items()}
    torch.save(ids, tmp_path / "raw" / "split_dict.pt")
    assert_same(converted(f"mag240m:{tmp_path / 'raw' / 'processed'}", tmp_path / "c"), expected)


def test_features_of_authors_are_converted_if_their_file_exists(tmp_path):
    expected = write_mag240m(tmp_path / "raw")
    x = np.random.default_rng(0).standard_normal((70, 24)).astype(np.float16)
    (tmp_path / "raw" / "processed" / "author").mkdir()
    np.save(tmp_path / "raw" / "processed" / "author" / "node_feat.npy", x)
    expected["author"].x = torch.from_numpy(x)
    assert_same(converted(f"mag240m:{tmp_path / 'raw'}", tmp_path / "c"), expected)


@pytest.mark.parametrize("working", [30_000, 10**8])
def test_undirected_adds_the_relations_of_to_undirected(tmp_path, working):
    expected = ToUndirected()(write_mag240m(tmp_path / "raw"))
    got = converted(f"mag240m:{tmp_path / 'raw'}", tmp_path / "c", working, undirected=True)
    assert ("paper", "rev_writes", "author") in got.edge_types
    # ToUndirected sorts the pairs of a relation within one type, as the conversion does.
    assert_same(got, expected)


def test_a_homogeneous_graph_has_papers_and_citations_only(tmp_path):
    expected = write_mag240m(tmp_path / "raw")
    got = converted(f"mag240m:{tmp_path / 'raw'},homogeneous=true", tmp_path / "c")
    assert isinstance(got, Data) and torch.equal(got.x, expected["paper"].x)
    plain = Data(edge_index=expected["paper", "cites", "paper"].edge_index, num_nodes=300)
    one, other = Graph.from_data(got), Graph.from_data(plain)
    assert torch.equal(one.indptr, other.indptr) and torch.equal(one.indices.long(), other.indices.long())


def test_a_converted_folder_partitions_like_the_graph_in_memory(tmp_path):
    expected = write_mag240m(tmp_path / "raw")
    got = converted(f"mag240m:{tmp_path / 'raw'}", tmp_path / "c")
    manifests = [
        salientpp.partition(data, 2, tmp_path / name, [3, 2], 16, method="random").manifest
        for name, data in (("p", got), ("q", expected))
    ]
    assert manifests[0] == manifests[1]


# --- IGB --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [None, "19", "2983"])
@pytest.mark.parametrize("full", [False, True])
def test_igb_converts_with_the_splits_of_its_loader(tmp_path, classes, full):
    expected = write_igb(tmp_path / "raw", full=full)
    other = expected["paper"].y_2983
    del expected["paper"].y_2983
    if classes == "2983":
        expected["paper"].y = other
    given = "" if classes is None else f",classes={classes}"
    assert_same(converted(f"igb:{tmp_path / 'raw'}{given}", tmp_path / "c", 2**21), expected)


def test_a_homogeneous_igb_graph_converts(tmp_path):
    expected = write_igb(tmp_path / "raw")
    got = converted(f"igb:{tmp_path / 'raw'},homogeneous=true", tmp_path / "c", undirected=True)
    assert isinstance(got, Data) and torch.equal(got.x, expected["paper"].x) and torch.equal(got.y, expected["paper"].y)
    cites = expected["paper", "cites", "paper"].edge_index
    both = torch.cat([cites, cites.flip(0)], 1).unique(dim=1)
    order = both[1].argsort(stable=True)
    assert torch.equal(got.adj_t.col_indices().long(), both[0][order])


def test_only_labelled_papers_of_the_largest_igb_graph_are_in_splits(tmp_path, monkeypatch):
    write_igb(tmp_path / "raw", full=True)
    monkeypatch.setattr(layouts, "_IGB_FULL", IGB_SIZES["paper"])
    monkeypatch.setattr(layouts, "_IGB_LABELLED", {"19": 150, "2983": 100})
    for classes, bounds in (("19", (90, 120, 150)), ("2983", (60, 80, 100))):
        paper = converted(f"igb:{tmp_path / 'raw'},classes={classes}", tmp_path / classes)["paper"]
        ends = [paper[f"{split}_mask"].nonzero().flatten().tolist() for split in ("train", "val", "test")]
        assert (
            sum(ends, []) == list(range(bounds[2])) and [len(each) for each in ends] == np.diff((0, *bounds)).tolist()
        )


# --- folders in general -----------------------------------------------------------------------------------


def write_folder(root: Path, parquet: bool = False) -> HeteroData:
    """Writes a folder of users and items. The number of users stands in num_nodes.json, and that of tags is to be counted."""
    rng = np.random.default_rng(1)
    data = HeteroData()
    data["item"].x, data["item"].y = torch.from_numpy(rng.standard_normal((40, 3))), torch.arange(40) % 3
    data["item"].price, data["item"].train_mask = torch.arange(40.0), torch.arange(40) % 2 == 0
    data["item"].val_mask = torch.arange(40) == 7
    data["user"].num_nodes, data["tag"].num_nodes = 50, 6
    edges = {
        ("item", "has", "tag"): np.stack([rng.integers(0, 40, 90), np.arange(90) % 6]),
        ("user", "buys", "item"): np.stack([rng.integers(0, 50, 300), rng.integers(0, 40, 300)]),
    }
    item = root / "item"
    item.mkdir(parents=True)
    for number, piece in enumerate(np.array_split(data["item"].x.numpy(), 12)):
        np.save(item / f"x-{number}.npy", piece)
    np.save(item / "node_label.npy", data["item"].y.numpy().astype(np.int32))
    np.save(item / "price.npy", data["item"].price.numpy())
    np.save(item / "train_mask.npy", data["item"].train_mask.numpy())
    np.save(item / "val.npy", np.array([7]))
    for relation, pairs in edges.items():
        folder = root / "__".join(relation)
        folder.mkdir()
        np.save(folder / "edge_index.npy", pairs)
        data[relation].edge_index = torch.from_numpy(pairs)
    (root / "num_nodes.json").write_text(json.dumps({"user": 50}))
    return data


@pytest.mark.parametrize("working", [30_000, 10**8])
def test_a_folder_of_typed_arrays_converts(tmp_path, working):
    expected = write_folder(tmp_path / "raw")
    assert_same(converted(f"npy:{tmp_path / 'raw'}", tmp_path / "c", working), expected)


def test_the_vertices_of_each_type_without_rows_are_counted(tmp_path):
    expected = write_folder(tmp_path / "raw")
    (tmp_path / "raw" / "num_nodes.json").unlink()
    expected["user"].num_nodes = int(expected["user", "buys", "item"].edge_index[0].max()) + 1
    assert_same(converted(f"npy:{tmp_path / 'raw'}", tmp_path / "c"), expected)


def test_edge_columns_of_a_folder_are_left_out_with_a_warning(tmp_path):
    expected = write_folder(tmp_path / "raw")
    np.save(tmp_path / "raw" / "user__buys__item" / "time.npy", np.arange(300))
    with pytest.warns(UserWarning, match="user__buys__item/time.npy of npy:.* left out"):
        assert_same(converted(f"npy:{tmp_path / 'raw'}", tmp_path / "c"), expected)


def test_parquet_files_in_a_folder_equal_arrays(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected = write_folder(tmp_path / "raw")
    for path in sorted((tmp_path / "raw" / "item").glob("*.npy")):
        path.unlink()
    item, order = expected["item"], np.random.default_rng(0).permutation(40)
    table = {"id": order, **{name: item[name].numpy()[order] for name in ("y", "price", "train_mask")}}
    table["val"] = item.val_mask.numpy()[order]
    table |= {f"x_{at}": item.x.numpy()[order, at] for at in range(3)}
    parquet.write_table(pyarrow.table(table), tmp_path / "raw" / "item" / "nodes.parquet", row_group_size=7)
    folder = tmp_path / "raw" / "user__buys__item"
    source, target = np.load(folder / "edge_index.npy")
    (folder / "edge_index.npy").unlink()
    parquet.write_table(pyarrow.table({"src": source, "dst": target}), folder / "edge_index.parquet")
    assert_same(converted(f"npy:{tmp_path / 'raw'}", tmp_path / "c"), expected)


def test_a_folder_with_one_type_may_be_homogeneous(tmp_path):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 30, (2, 100))
    for name, array in (("page/x.npy", np.ones((30, 2))), ("page__links__page/edge_index.npy", edges)):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "raw" / name, array)
    got = converted(f"npy:{tmp_path / 'raw'},homogeneous=true", tmp_path / "c")
    assert isinstance(got, Data) and got.num_nodes == 30 and got.adj_t.col_indices().numel() == 100


def test_resident_memory_stays_below_the_limit(tmp_path):
    # 96 MB of rows and 75 MB of edges, with 64 MB for arrays and allocators.
    rng = np.random.default_rng(0)
    papers, authors = 200_000, 50_000
    root = tmp_path / "raw" / "processed"
    for name in ("paper", "paper___cites___paper", "author___writes___paper", "author___affiliated_with___institution"):
        (root / name).mkdir(parents=True)
    np.save(root / "paper" / "node_feat.npy", rng.integers(0, 9, (papers, 240)).astype(np.float16))
    np.save(root / "paper" / "node_label.npy", np.zeros(papers))
    np.save(root / "paper___cites___paper" / "edge_index.npy", rng.integers(0, papers, (2, 4_500_000)))
    writes = np.stack([rng.integers(0, authors, 200_000), rng.integers(0, papers, 200_000)])
    np.save(root / "author___writes___paper" / "edge_index.npy", writes)
    works = np.stack([np.arange(authors), np.arange(authors) % 100])
    np.save(root / "author___affiliated_with___institution" / "edge_index.npy", works)
    torch.save({"paper": papers, "author": authors, "institution": 100, "num_classes": 1}, tmp_path / "raw" / "meta.pt")
    order = rng.permutation(papers)
    torch.save(
        dict(zip(("train", "valid", "test"), np.split(order, [10**5, 15 * 10**4]))), tmp_path / "raw/split_dict.pt"
    )
    program = """
import sys
from pathlib import Path
from salientpp.datasets import convert
def kilobytes(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
asked = (kilobytes("VmRSS") + 64 * 1024) * 1024
Path("/proc/self/clear_refs").write_text("5")
convert(sys.argv[1], sys.argv[2], memory=asked, undirected=True)
print(kilobytes("VmHWM") * 1024, asked)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, f"mag240m:{tmp_path / 'raw'}", str(tmp_path / "c")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak, asked = map(int, done.stdout.split())
    assert peak <= asked, f"{peak:,} bytes resident, expected at most {asked:,}"


# --- mistakes ---------------------------------------------------------------------------------------------


def _without(name: str):
    return lambda raw: (raw / name).unlink()


def _saved(name: str, value: object):
    def write(raw: Path) -> None:
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pt"):
            torch.save(value, raw / name)
        else:
            np.save(raw / name, value)

    return write


def _header_lost(raw: Path) -> None:
    (raw / "processed" / "paper" / "node_feat.npy").write_bytes(b"\1" * 5000)


_CITES, _PAPER = "processed/paper___cites___paper/edge_index.npy", "processed/paper/"
_BAD = np.zeros((2, 50), np.int64)
_BAD[0, 31] = 300
MISTAKES = {
    "no meta.pt": ("mag240m", _without("meta.pt"), r"meta\.pt: no such file"),
    "no splits": ("mag240m", _without("split_dict.pt"), r"split_dict\.pt: no such file"),
    "no edges": ("mag240m", _without(_CITES), r"paper___cites___paper must have edge_index\.npy or .* got nothing"),
    "an incomplete meta.pt": (
        "mag240m",
        _saved("meta.pt", {"paper": 3}),
        r"meta\.pt must have the number of author, ins",
    ),
    "another meta.pt": (
        "mag240m",
        _saved("meta.pt", [3]),
        r"meta\.pt must map each type to its number of vertices, got",
    ),
    "a missing split": (
        "mag240m",
        _saved("split_dict.pt", {"train": np.arange(3)}),
        r"split_dict\.pt must have the splits train, valid, .*; valid, test-whole.* missing; got train",
    ),
    "a split out of range": (
        "mag240m",
        _saved("split_dict.pt", {"train": np.arange(3), "valid": np.array([1, 300]), "test": np.arange(5)}),
        r"split_dict\.pt: valid\[1\]: the split 'val' must hold vertex ids in \[0, 300\), got 300",
    ),
    "rows missing": (
        "mag240m",
        _saved(_PAPER + "node_feat.npy", np.zeros((299, 4), np.float16)),
        r"node_feat\.npy\[299\]: x must have 300 rows, one per vertex, but ends after 299",
    ),
    "three ends": (
        "mag240m",
        _saved(_CITES, np.zeros((3, 9), np.int64)),
        r"must have shape \[2, E\] or \[E, 2\], got \[3, 9\]",
    ),
    "an id out of range": (
        "mag240m",
        _saved(_CITES, _BAD),
        r"\[:, 31\]: the source must be a vertex id in \[0, 300\), got 300",
    ),
    "labels that are no classes": (
        "mag240m",
        _saved(_PAPER + "node_label.npy", np.full(300, 0.5)),
        r"node_label\.npy\[0\]: y must hold whole numbers \(nan for an unlabelled vertex\), got 0\.5",
    ),
    "rows cut short": (
        "igb",
        _header_lost,
        r"has no header of numpy, so it must have rows of float32 \[1024\], but has 904 bytes after row 1",
    ),
    "another number of classes": ("igb,classes=20", None, r"classes must be 19 or 2983, got '20'"),
    "another parameter": (
        "igb,class=19",
        None,
        r"has no parameter 'class'; it has homogeneous, classes. Did you mean classes\?",
    ),
    "no truth value": ("npy,homogeneous=yes", None, r"homogeneous must be true or false, got 'yes'"),
    "several types": (
        "npy,homogeneous=true",
        None,
        r"homogeneous=true needs one type of vertices and one relation, got item, tag, user",
    ),
    "a damaged num_nodes.json": (
        "npy",
        lambda raw: (raw / "num_nodes.json").write_text('{"user": "50"}'),
        r"num_nodes\.json must .*map each type to its number of vertices",
    ),
    "a name of two parts": (
        "npy",
        _saved("user__item/edge_index.npy", _BAD),
        r"the name of .*user__item must be SOURCE__RELATION__TARGET, got 2 parts",
    ),
    "an attribute twice": (
        "npy",
        _saved("item/y.npy", np.zeros(40)),
        r"item has y twice, the second time in y; leave out one",
    ),
    "too few vertices stated": (
        "npy",
        lambda raw: (raw / "num_nodes.json").write_text('{"user": 3}'),
        r"the source must be a vertex id in \[0, 3\), got",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_file_and_place(tmp_path, name):
    source, change, words = MISTAKES[name]
    layout, comma, rest = source.partition(",")
    {"mag240m": write_mag240m, "igb": write_igb, "npy": write_folder}[layout](tmp_path / "raw")
    if change:
        change(tmp_path / "raw")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        converted(f"{layout}:{tmp_path / 'raw'}{comma}{rest}", tmp_path / "c")


def test_a_folder_without_relations_is_refused(tmp_path):
    (tmp_path / "raw" / "paper").mkdir(parents=True)
    with pytest.raises(ValueError, match="must have folders SOURCE__RELATION__TARGET with edge_index.npy, got paper"):
        convert(f"npy:{tmp_path / 'raw'}", tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="is not a directory; expected one with a folder for each type"):
        convert(f"mag240m:{tmp_path / 'no'}", tmp_path / "c")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    write_mag240m(tmp_path / "raw")
    torch.save({"train": Path("x")}, tmp_path / "raw" / "split_dict.pt")
    with pytest.raises(ValueError, match=r"split_dict\.pt: expected arrays of vertex ids, but it needs pathlib"):
        converted(f"mag240m:{tmp_path / 'raw'}", tmp_path / "c")
