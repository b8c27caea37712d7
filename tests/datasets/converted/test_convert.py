"""Laws of conversion: a converted graph equals its source sorted in memory, for every memory limit and any number of interruptions."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_python import python
from rare import rare
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import NeighborLoader, cli, ops
from salientpp.datasets import convert, load_dataset, synthetic
from salientpp.datasets.converted import buckets, budget
from salientpp.datasets.converted.budget import Budget, read_bytes
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.sources import open_source
from salientpp.graph.csc import Graph
from salientpp.store.directory.manifest import manifest_checksum

ROOT = Path(__file__).parents[3]
N = 300
SPLITS = ("train", "val", "test")


def hubs_and_repeats(seed: int, num_edges: int = 4000, num_vertices: int = N) -> np.ndarray:
    """Returns int64 [2, E] with loops, repeated edges, vertices without edges, and a third of all edges into vertex 7."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    edges = rng.integers(0, num_vertices, (2, num_edges))
    edges[1, rng.random(num_edges) < 1 / 3] = 7
    edges[edges == 9] = 8
    return edges


def small(source: str, root: Path, working: int, undirected=None, data=Path("data"), **options) -> Path:
    """Converts with ``working`` bytes for arrays. Few bytes make many runs, and hubs that are spread again."""
    given = Options(**{"deduplicate": False, "dtype": {}, "finite": False, **options})
    return write_converted(open_source(source, data, undirected), root, Budget(0, working), given)


def lists(data: Data) -> tuple[list[int], list[int]]:
    graph = Graph.from_data(data)
    return graph.indptr.tolist(), graph.indices.tolist()


def lists_of(edges: np.ndarray, num_vertices: int = N) -> tuple[list[int], list[int]]:
    indptr, indices, _ = ops.csc_from_coo(*torch.from_numpy(edges), num_vertices)
    return indptr.tolist(), indices.tolist()


def write_npz(path: Path, seed: int = 0, **more) -> Path:
    rng = np.random.default_rng(seed)
    order = rng.permutation(N)
    arrays = {
        "edge_index": hubs_and_repeats(seed),
        "x": rng.standard_normal((N, 5)).astype(np.float32),
        "y": rng.integers(-1, 4, N),
        "train_idx": order[:100],
        "val_idx": order[100:150],
        "test_idx": order[150:],
    }
    np.savez(path, **{**arrays, **more})
    return path


def sha256s(root: Path) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in json.loads((root / "manifest.json").read_text())["files"].items()}


def assert_same(converted: Data, other: Data) -> None:
    assert lists(converted) == lists(other)
    assert converted.num_nodes == other.num_nodes
    for name in set(other.keys()) - {"edge_index", "adj_t", "num_nodes"}:
        assert converted[name].dtype == other[name].dtype and torch.equal(converted[name], other[name]), name


# --- sorting outside memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 3, 50, 1000, 10**6])
@pytest.mark.parametrize("order", ["read", "source", "once"])
def test_any_capacity_gives_the_order(tmp_path, capacity, order):
    edges = hubs_and_repeats(1, 1500)
    source, target = edges.astype(np.uint64)
    words = target << np.uint64(32) | source
    runs = buckets.spread(np.array_split(words, 7), tmp_path / "runs", 0, N << 32, 13, 32)
    got = list(buckets.in_order(runs, capacity, order, tmp_path))
    assert max(piece.size for piece in got) <= capacity
    stable = words[np.argsort(target, kind="stable")]
    expected = {"read": stable, "source": np.sort(words), "once": np.unique(words)}[order]
    assert np.array_equal(np.concatenate(got), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "files of buckets that were spread again are deleted"


@pytest.mark.parametrize("working", [20_000, 100_000, 10**8])
@pytest.mark.parametrize("undirected", [None, False, True])
@pytest.mark.parametrize("directed", [True, False])
def test_converting_and_loading_an_npz_file_give_the_same_graph(tmp_path, working, undirected, directed):
    source = f"npz:{write_npz(tmp_path / 'g.npz', seed=working, directed=np.array(directed))}"
    small(source, tmp_path / "c", working, undirected)
    assert_same(load_dataset(f"converted:{tmp_path / 'c'}"), load_dataset(source, undirected=undirected))


def test_deduplicate_stores_each_pair_once(tmp_path):
    file = write_npz(tmp_path / "g.npz")
    small(f"npz:{file}", tmp_path / "c", 20_000, deduplicate=True)
    once = np.ascontiguousarray(np.unique(np.load(file)["edge_index"], axis=1))
    assert lists(load_dataset(f"converted:{tmp_path / 'c'}")) == lists_of(once)


def test_a_converted_graph_gives_the_same_batches_and_directories(tmp_path):
    made = synthetic(num_vertices=2000, num_features=8)
    edges = made.edge_index[:, torch.from_numpy(np.random.default_rng(3).permutation(made.num_edges))]
    splits = {f"{split}_idx": made[f"{split}_mask"].nonzero().flatten().numpy() for split in SPLITS}
    np.savez(tmp_path / "g.npz", edge_index=edges.numpy(), x=made.x.numpy(), y=made.y.numpy(), **splits)
    small(f"npz:{tmp_path / 'g.npz'}", tmp_path / "c", 200_000)
    converted, memory = (load_dataset(name) for name in (f"converted:{tmp_path / 'c'}", f"npz:{tmp_path / 'g.npz'}"))
    loaders = [
        NeighborLoader(data, [5, 3], data.train_mask, batch_size=64, shuffle=True, seed=2)
        for data in (converted, memory)
    ]
    for one, other in zip(*loaders, strict=True):
        for name in ("n_id", "x", "y", "input_id"):
            assert torch.equal(one[name], other[name]), name
        ends = torch.stack([one.adj_t.to_sparse_coo().indices()[1], one.adj_t.to_sparse_coo().indices()[0]])
        assert torch.equal(ends[:, torch.argsort(ends[0] * 10**6 + ends[1])], _by_ends(other.edge_index))
    parts = [salientpp.partition(data, 2, tmp_path / name) for name, data in (("p", converted), ("q", memory))]
    assert parts[0].manifest == parts[1].manifest


def _by_ends(edges: torch.Tensor) -> torch.Tensor:
    return edges[:, torch.argsort(edges[0] * 10**6 + edges[1])]


# --- sources ----------------------------------------------------------------------------------------------


def _write_text(folder: Path, name: str, table: np.ndarray, line: str = "%d\t%d", comment: str = "") -> None:
    text = comment + "".join(f"{line % tuple(row)}\n" for row in table)
    opened = gzip.open(folder / name, "wt") if name.endswith(".gz") else (folder / name).open("w")
    with opened as file:
        file.write(text)


def _write_parquet(folder: Path, name: str, groups: int = 700, **columns: np.ndarray) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), folder / name, row_group_size=groups)


FORMS = {
    "text": lambda folder, edges: _write_text(folder, "e.tsv", edges.T, comment="# source, target\n\n"),
    "csv in gzip": lambda folder, edges: _write_text(folder, "e.csv.gz", edges.T, "%d,%d"),
    "npy [2, E]": lambda folder, edges: np.save(folder / "e.npy", edges.astype(np.int32)),
    "npy [E, 2]": lambda folder, edges: np.save(folder / "e.npy", np.ascontiguousarray(edges.T)),
    "npy in column order": lambda folder, edges: np.save(folder / "e.npy", np.asfortranarray(edges)),
    "npy of other byte order": lambda folder, edges: np.save(folder / "e.npy", edges.astype(">i8")),
    "npy shards": lambda folder, edges: [
        np.save(folder / f"e{number}.npy", shard) for number, shard in enumerate(np.array_split(edges, 12, axis=1))
    ],
    "text shards": lambda folder, edges: [
        _write_text(folder, f"e-{number}.txt", shard.T, "%d %d")
        for number, shard in enumerate(np.array_split(edges, 11, axis=1))
    ],
    "parquet": lambda folder, edges: _write_parquet(
        folder, "e.parquet", weight=edges[0] * 2.5, dst=edges[1], src=edges[0]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_vertices", [None, N + 5])
def test_edge_files_of_every_kind_convert(tmp_path, form, num_vertices):
    edges = hubs_and_repeats(5)
    FORMS[form](tmp_path, edges)
    given = "" if num_vertices is None else f",num_vertices={num_vertices}"
    small(f"edges:{tmp_path}/e*.*{given}", tmp_path / "c", 50_000)
    num_vertices = num_vertices or int(edges.max()) + 1
    data = load_dataset(f"converted:{tmp_path / 'c'}")
    assert data.num_nodes == num_vertices and lists(data) == lists_of(edges, num_vertices)


@pytest.mark.parametrize("kind", ["npy", "csv.gz", "parquet"])
def test_files_of_attributes_and_splits_convert(tmp_path, kind):
    edges, rng = hubs_and_repeats(6), np.random.default_rng(0)
    x, y, train = rng.standard_normal((N, 3)).astype(np.float32), rng.integers(-1, 3, N), rng.permutation(N)[:50]
    np.save(tmp_path / "e.npy", edges)
    for name, rows in (("x", x), ("y", y[:, None]), ("train", train[:, None])):
        if kind == "npy":
            np.save(tmp_path / f"{name}.npy", rows)
        elif kind == "parquet":
            _write_parquet(tmp_path, f"{name}.parquet", **{f"column{at}": column for at, column in enumerate(rows.T)})
        else:
            _write_text(tmp_path, f"{name}.csv.gz", rows, ",".join(["%.9g" if name == "x" else "%d"] * rows.shape[1]))
    files = ",".join(f"{name}={tmp_path}/{name}.{kind}" for name in ("x", "y", "train"))
    small(f"edges:{tmp_path}/e.npy,{files}", tmp_path / "c", 30_000)
    data = load_dataset(f"converted:{tmp_path / 'c'}")
    assert np.array_equal(data.x.numpy(), x) and np.array_equal(data.y.numpy(), y)
    mask = np.zeros(N, dtype=bool)
    mask[train] = True
    assert np.array_equal(data.train_mask.numpy(), mask & (y >= 0))


def test_a_data_object_that_torch_saved_converts_without_edge_attributes(tmp_path):
    data = synthetic(num_vertices=N, num_features=6, average_degree=8.0)
    data.year, data.edge_attr = torch.arange(N).float(), torch.ones(data.num_edges)
    torch.save(data, tmp_path / "g.pt")
    with pytest.warns(UserWarning, match="edge_attr of pyg:.* left out"):
        small(f"pyg:{tmp_path / 'g.pt'}", tmp_path / "c", 30_000, dtype={"x": "bf16"})
    del data.edge_attr
    data.x = data.x.bfloat16()
    assert_same(load_dataset(f"converted:{tmp_path / 'c'}"), data)


COLUMNS = {
    "float64": torch.arange(N).double() / 7 - 20,
    "float32": torch.arange(N).float() / 7 - 20,
    "float16": torch.arange(N).half() / 7 - 20,
    "bfloat16": torch.arange(N).bfloat16() / 7 - 20,
    "not a number": torch.full((N,), torch.nan),
    "a column of real numbers": torch.arange(N).view(N, 1) / 7,
    "several real numbers": torch.arange(3 * N).view(N, 3) / 7,
    "bool": torch.arange(N) % 3 == 0,
    "complex": torch.complex(torch.arange(N).float(), torch.ones(N)),
    "uint8": torch.arange(N).to(torch.uint8),
    "int8": (torch.arange(N) % 5).to(torch.int8),
    "int32": torch.arange(N, dtype=torch.int32) - 30,
    "classes, some unlabelled": torch.arange(N) % 5 - 1,
    "-1 and 1": torch.arange(N) % 2 * 2 - 1,
    "several classes": torch.arange(3 * N).view(N, 3) % 5 - 1,
}


@pytest.mark.parametrize("name", ["y", "x", "more"])
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.filterwarnings("error")
def test_attributes_that_torch_saved_keep_dtype_shape_and_values(tmp_path, name, kind):
    data = Data(edge_index=torch.from_numpy(hubs_and_repeats(2)), num_nodes=N, train_mask=torch.arange(N) % 2 == 0)
    data[name] = COLUMNS[kind]
    torch.save(data, tmp_path / "g.pt")
    small(f"pyg:{tmp_path / 'g.pt'}", tmp_path / "c", 30_000)
    converted = load_dataset(f"converted:{tmp_path / 'c'}")
    assert converted[name].dtype == data[name].dtype and converted[name].shape == data[name].shape
    assert torch.equal(converted[name].nan_to_num(), data[name].nan_to_num())
    assert torch.equal(converted.train_mask, data.train_mask)


@pytest.mark.parametrize("kind", ["npy", "parquet"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int32, np.uint16])
@pytest.mark.filterwarnings("error")
def test_real_labels_in_files_stay_real_and_integers_become_int64(tmp_path, kind, dtype):
    y = (np.arange(N) / (7 if np.issubdtype(dtype, np.floating) else 1)).astype(dtype)
    np.save(tmp_path / "e.npy", hubs_and_repeats(6))
    if kind == "npy":
        np.save(tmp_path / "y.npy", y)
    else:
        _write_parquet(tmp_path, "y.parquet", y=y)
    np.save(tmp_path / "train.npy", np.arange(50))
    small(f"edges:{tmp_path}/e.npy,y={tmp_path}/y.{kind},train={tmp_path}/train.npy", tmp_path / "c", 30_000)
    data = load_dataset(f"converted:{tmp_path / 'c'}")
    assert data.y.numpy().dtype == (dtype if np.issubdtype(dtype, np.floating) else np.int64)
    assert np.array_equal(data.y.numpy(), y) and int(data.train_mask.sum()) == 50


@pytest.mark.parametrize("y", [np.arange(N) % 2 * 2 - 1, np.arange(N) - 20])
@pytest.mark.filterwarnings("error")
def test_negative_labels_that_are_values_stay_in_their_splits(tmp_path, y):
    source = f"npz:{write_npz(tmp_path / 'g.npz', y=y)}"
    small(source, tmp_path / "c", 30_000)
    converted = load_dataset(f"converted:{tmp_path / 'c'}")
    assert_same(converted, load_dataset(source))
    assert np.array_equal(converted.y.numpy(), y)
    assert [int(converted[f"{split}_mask"].sum()) for split in SPLITS] == [100, 50, 150]


def test_an_npz_file_with_real_labels_is_refused(tmp_path):
    source = f"npz:{write_npz(tmp_path / 'g.npz', y=np.arange(N) / 7)}"
    for load in (lambda: load_dataset(source), lambda: small(source, tmp_path / "c", 30_000)):
        with pytest.raises(ValueError, match="y must (hold|be) integers"):
            load()


def test_a_graph_with_several_types_converts(tmp_path):
    rng = np.random.default_rng(4)
    data = HeteroData()
    data["paper"].x, data["paper"].train_mask = torch.randn(N, 4), torch.rand(N) < 0.5
    data["author"].num_nodes = 70
    writes = np.stack([rng.integers(0, 70, 900), rng.integers(0, N, 900)])
    data["author", "writes", "paper"].edge_index = torch.from_numpy(writes)
    data["paper", "cites", "paper"].edge_index = torch.from_numpy(hubs_and_repeats(8))
    torch.save(data, tmp_path / "g.pt")
    small(f"pyg:{tmp_path / 'g.pt'}", tmp_path / "c", 30_000)
    converted = load_dataset(f"converted:{tmp_path / 'c'}")
    assert converted.node_types == data.node_types and converted.edge_types == data.edge_types
    parts = [
        salientpp.partition(graph, 2, tmp_path / name, [3, 2], 16, method="random")
        for name, graph in (("p", converted), ("q", data))
    ]
    assert parts[0].manifest == parts[1].manifest


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet, lists", *rare("npy", "parquet", "parquet, one group")])
def test_resident_memory_stays_below_the_limit(tmp_path, kind):
    # 72 MB of edges and 96 MB of rows, with 64 MB for arrays and allocators. Pages of files do not count, since files are not mapped.
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 200_000, (2, 4_500_000))
    x = rng.standard_normal((200_000, 120), dtype=np.float32)
    if kind == "npy":
        np.save(tmp_path / "e.npy", edges)
    else:
        groups = 100_000 if kind == "parquet" else 4_500_000
        _write_parquet(tmp_path, "e.parquet", groups=groups, source=edges[0], target=edges[1])
    if kind == "parquet, lists":
        pyarrow = pytest.importorskip("pyarrow")
        lists = pyarrow.ListArray.from_arrays(np.arange(0, x.size + 1, 120, dtype=np.int32), x.ravel())
        _write_parquet(tmp_path, "x.parquet", groups=200_000, x=lists)
    else:
        np.save(tmp_path / "x.npy", x)
    del x
    program = """
import sys
from pathlib import Path
from salientpp.datasets import convert
def kilobytes(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
asked = (kilobytes("VmRSS") + 64 * 1024) * 1024
Path("/proc/self/clear_refs").write_text("5")
convert(sys.argv[1], sys.argv[2], memory=asked, undirected=True, dtype={"x": "fp16"})
print(kilobytes("VmHWM") * 1024, asked)
"""
    rows = "parquet" if "lists" in kind else "npy"
    source = f"edges:{tmp_path}/e.{kind.split(',')[0]},x={tmp_path}/x.{rows}"
    done = subprocess.run(
        [sys.executable, "-c", program, source, str(tmp_path / "c")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, asked = map(int, done.stdout.split())
    assert peak <= asked, f"{peak:,} bytes resident, expected at most {asked:,}"


def test_parquet_with_too_many_columns_for_the_memory_is_refused_before_reading(tmp_path):
    np.save(tmp_path / "e.npy", hubs_and_repeats(0))
    rows = np.random.default_rng(0).standard_normal((200, 40_000))
    _write_parquet(tmp_path, "x.parquet", groups=40_000, **{f"c{at}": column for at, column in enumerate(rows)})
    source = f"edges:{tmp_path}/e.npy,x={tmp_path}/x.parquet"
    with pytest.raises(ValueError, match=r"reading all columns of x at once needs \d+\.\d MB .* give at least \d+MB"):
        small(source, tmp_path / "c", 50_000_000)
    small(source, tmp_path / "c", 400_000_000)
    assert np.array_equal(load_dataset(f"converted:{tmp_path / 'c'}").x.numpy(), rows.T)


def test_an_error_about_too_little_memory_says_how_much_is_needed(tmp_path, monkeypatch):
    source = f"npz:{write_npz(tmp_path / 'g.npz')}"
    with pytest.raises(ValueError, match=r"memory=20MB is too little: Python and torch take .* give at least \d+MB"):
        convert(source, tmp_path / "c", memory="20MB")
    with pytest.raises(
        ValueError,
        match=r"the mask of 'train' \(a byte per vertex, and as much for ids\) needs .* MB .* give at least \d+MB",
    ):
        small(source, tmp_path / "c", 500)
    for resident in (3 * 10**8, 2_345_678_901):  # three and four digits in megabytes
        monkeypatch.setattr(budget, "_resident_bytes", lambda resident=resident: resident)
        with pytest.raises(ValueError, match="is too little") as refused:
            Budget.of("20MB")
        enough = str(refused.value).split("give at least ")[1]
        assert Budget.of(enough).working >= budget._LEAST
    for wrong in ("much", "0GB", -1, True, 1.5, None):
        with pytest.raises(ValueError, match="memory must be a number of bytes such as 4GB"):
            read_bytes(wrong)
    assert [read_bytes(text) for text in ("4GB", "512MiB", "1.5 g", 7)] == [4 * 10**9, 2**29, 15 * 10**8, 7]


# --- interruptions ---------------------------------------------------------------------------------------

_STOPPED = """
import resource, signal, sys
sys.path.insert(0, "tests/support")
from pathlib import Path
from killed import killed_at
from salientpp.datasets.converted import files
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.sources import open_source
from salientpp.store.directory import journal

source, root, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def run():
    write_converted(open_source(source, Path(), True), root, Budget(0, 2_000_000), Options(False, {}, False))

points = [(journal.Journal, "note", 1, False), (files._File, "write", 5, True), (journal.Journal, "note", 2, True), (journal.os, "replace", 3, True),
          (files._File, "write", 3, True), (journal.Journal, "drop", 1, False), (journal.Journal, "finish", 1, False)]
for point in points[:count]:
    killed_at(*point, run)
    assert not (root / "manifest.json").exists()
    print(len(journal._read(root / "journal.jsonl")[1]))
run()
"""


def test_a_conversion_killed_many_times_writes_the_same_bytes(tmp_path):
    source = f"npz:{write_npz(tmp_path / 'g.npz')}"
    (tmp_path / "a").mkdir()
    done = subprocess.run(
        [python(), "-c", _STOPPED, source, str(tmp_path / "a" / "c"), "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = list(map(int, done.stdout.split()))
    assert steps == [0, 1, 3, 4, 4, 7, 6], "each run continues the previous one"
    small(source, tmp_path / "b", 3_000_000, True)
    assert sha256s(tmp_path / "a" / "c") == sha256s(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(
        [*sha256s(tmp_path / "b"), "manifest.json"]
    )


def begun(source: str, root: Path, monkeypatch, steps: int = 2) -> None:
    """Runs a conversion that stops after ``steps`` steps."""
    from salientpp.store.directory.journal import Journal

    with monkeypatch.context() as patched:
        note, left = Journal.note, [steps]

        def stops(self, *arguments):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return note(self, *arguments)

        patched.setattr(Journal, "note", stops)
        with pytest.raises(KeyboardInterrupt):
            small(source, root, 3_000_000)


def test_an_unfinished_conversion_cannot_be_loaded_or_continued_with_other_arguments(tmp_path, monkeypatch):
    source, root = f"npz:{write_npz(tmp_path / 'g.npz')}", tmp_path / "c"
    begun(source, root, monkeypatch)
    with pytest.raises(ValueError, match="is an unfinished conversion; repeat its `salientpp convert`"):
        load_dataset(f"converted:{root}")
    with pytest.raises(ValueError, match=r'begun by another conversion: dtype was \{\}, is \{"x": "fp16"\}'):
        small(source, root, 3_000_000, dtype={"x": "fp16"})
    other = f"npz:{write_npz(tmp_path / 'h.npz', seed=1)}"
    with pytest.raises(ValueError, match=r"source was .*g\.npz.* is .*h\.npz"):
        small(other, root, 3_000_000)
    os.utime(tmp_path / "g.npz", (1, 1))
    with pytest.raises(ValueError, match="the source files have other names, sizes or times"):
        small(source, root, 3_000_000)
    write_converted(
        open_source(other, tmp_path, None), root, Budget(0, 3_000_000), Options(False, {}, False), overwrite=True
    )
    assert_same(load_dataset(f"converted:{root}"), load_dataset(other))


def test_a_step_with_an_altered_file_is_repeated(tmp_path, monkeypatch):
    source, root = f"npz:{write_npz(tmp_path / 'g.npz')}", tmp_path / "c"
    begun(source, root, monkeypatch)
    array = np.load(root / "n0.x.npy")
    np.save(root / "n0.x.npy", array + 1)
    small(source, root, 3_000_000)
    assert_same(load_dataset(f"converted:{root}"), load_dataset(source))


def test_existing_files_are_not_replaced(tmp_path):
    source, root = f"npz:{write_npz(tmp_path / 'g.npz')}", tmp_path / "c"
    small(source, root, 3_000_000)
    before = sha256s(root)
    with pytest.raises(ValueError, match="exists; pass --overwrite to replace it"):
        small(source, root, 3_000_000)
    assert sha256s(root) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    for taken, words in ((tmp_path / "mine", "is not empty"), (tmp_path / "file", "is not a directory")):
        with pytest.raises(ValueError, match=words):
            small(source, taken, 3_000_000)


def test_a_directory_that_another_process_writes_is_refused(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    root = tmp_path / "c"
    root.mkdir()
    held = os.open(root, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is writing"):
        small(f"npz:{write_npz(tmp_path / 'g.npz')}", root, 3_000_000)
    os.close(held)


_FULL = (
    _STOPPED[: _STOPPED.index("points =")]
    + """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (count, resource.RLIM_INFINITY))
try:
    run()
except OSError as error:
    print(error)
else:
    raise SystemExit("it fits")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run()
"""
)


def test_a_conversion_continues_after_a_full_disk(tmp_path):
    source, root = f"npz:{write_npz(tmp_path / 'g.npz')}", tmp_path / "c"
    done = subprocess.run([python(), "-c", _FULL, source, str(root), "20000"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be written (File too large); make room" in done.stdout and "repeat the same command" in done.stdout
    small(source, tmp_path / "b", 3_000_000, True)
    assert sha256s(root) == sha256s(tmp_path / "b")


# --- bad input --------------------------------------------------------------------------------------------


def _cut(path: Path, keep: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * keep))


def _edges_text(*lines: str):
    def write(folder: Path) -> str:
        (folder / "e.tsv").write_text("".join(f"{line}\n" for line in lines))
        return f"edges:{folder}/e.tsv,num_vertices=10"

    return write


def _cut_npy(folder: Path) -> str:
    np.save(folder / "e.npy", hubs_and_repeats(0))
    _cut(folder / "e.npy", 0.5)
    return f"edges:{folder}/e.npy,num_vertices={N}"


def _cut_gz(folder: Path) -> str:
    _write_text(folder, "e.tsv.gz", hubs_and_repeats(0).T)
    _cut(folder / "e.tsv.gz", 0.5)
    return f"edges:{folder}/e.tsv.gz,num_vertices={N}"


def _cut_npz(folder: Path) -> str:
    _cut(write_npz(folder / "g.npz"), 0.9)
    return f"npz:{folder}/g.npz"


def _damaged_npz(folder: Path) -> str:
    write_npz(folder / "g.npz")
    with zipfile.ZipFile(folder / "g.npz") as archive:
        at = archive.getinfo("x.npy").header_offset
    with (folder / "g.npz").open("r+b") as file:
        file.seek(at + 2000)
        file.write(b"\xff" * 8)
    return f"npz:{folder}/g.npz"


def _cut_parquet(folder: Path) -> str:
    edges = hubs_and_repeats(0)
    _write_parquet(folder, "e.parquet", source=edges[0], target=edges[1])
    _cut(folder / "e.parquet", 0.5)
    return f"edges:{folder}/e.parquet,num_vertices={N}"


def _edges_npy(value: int, dtype=np.int64):
    def write(folder: Path) -> str:
        edges = hubs_and_repeats(0).astype(dtype)
        edges[0, 1234] = value
        np.save(folder / "e.npy", edges)
        return f"edges:{folder}/e.npy,num_vertices={N}"

    return write


def _x(rows: np.ndarray, **options):
    def write(folder: Path) -> str:
        np.save(folder / "e.npy", hubs_and_repeats(0))
        np.save(folder / "x.npy", rows)
        return f"edges:{folder}/e.npy,x={folder}/x.npy,num_vertices={N}"

    return write


def _x_text(*lines: str):
    def write(folder: Path) -> str:
        np.save(folder / "e.npy", np.zeros((2, 1), np.int64))
        (folder / "x.csv").write_text("".join(f"{line}\n" for line in lines))
        return f"edges:{folder}/e.npy,x={folder}/x.csv"

    return write


def _splits(ids: np.ndarray):
    def write(folder: Path) -> str:
        return f"npz:{write_npz(folder / 'g.npz', train_idx=ids)}"

    return write


_NAN = np.zeros((N, 3), np.float32)
_NAN[17, 1] = np.nan
_LARGE = np.zeros((N, 3), np.float32)
_LARGE[21, 2] = 1e9
MISTAKES = {
    "no number": (
        _edges_text("1 2", "# c", "3 x"),
        r"e\.tsv, line 3: expected 2 integers, got '3 x'; correct the line",
    ),
    "no integer": (_edges_text("1 2", "3 4.5"), r"e\.tsv, line 2: expected 2 integers, got '3 4\.5'"),
    "three numbers": (_edges_text("1 2", "3 4 5", "6"), r"e\.tsv, line 2: expected 2 integers, got '3 4 5'"),
    "one number, then three": (_edges_text("1", "3 4 5"), r"e\.tsv, line 1: expected 2 integers"),
    "a large id in text": (
        _edges_text("1 2", "", "3 10"),
        r"e\.tsv, line 3: the target must be a vertex id in \[0, 10\), got 10",
    ),
    "a negative id in text": (_edges_text("1 2", "-3 1"), r"e\.tsv, line 2: the source must be .* got -3"),
    "an id beyond int64": (
        _edges_text("99999999999999999999999 1"),
        r"line 1: expected 2 integers in \[-2\^63, 2\^63\)",
    ),
    "a negative id": (_edges_npy(-1), r"e\.npy\[:, 1234\]: the source must be a vertex id in \[0, 300\), got -1"),
    "a large id": (_edges_npy(N), r"e\.npy\[:, 1234\]: the source must be a vertex id in \[0, 300\), got 300"),
    "a huge id": (_edges_npy(2**64 - 1, np.uint64), r"\[:, 1234\]: the source must be .* got 18446744073709551615"),
    "edges of floats": (_edges_npy(1, np.float32), r"e\.npy must hold integers, got dtype float32"),
    "a file cut short": (_cut_npy, r"e\.npy must have 64128 bytes for int64 \[2, 4000\], but ends at byte 32064"),
    "a stream cut short": (_cut_gz, r"e\.tsv\.gz is damaged or ends in the middle, after line \d+ and \d+ bytes"),
    "an archive cut short": (_cut_npz, r"g\.npz: not an \.npz archive"),
    "an archive that was altered": (_damaged_npz, r"g\.npz: x cannot be read \(Bad CRC-32"),
    "Parquet cut short": (_cut_parquet, r"e\.parquet: damaged, or not a Parquet file"),
    "rows missing": (_x(_NAN[:200]), r"x\.npy\[200\]: x must have 300 rows, one per vertex, but ends after 200"),
    "rows too many": (_x(np.zeros((301, 2))), r"x\.npy\[300\]: x must have 300 rows, one per vertex, but has more"),
    "rows that differ": (_x_text("1,2", "3,4", "5"), r"x\.csv, line 3: expected 2 numbers, got '5'"),
    "an id of a split": (
        _splits(np.array([3, N])),
        r"train_idx\[1\]: the split 'train' must hold vertex ids in \[0, 300\), got 300",
    ),
    "a negative id of a split": (_splits(np.array([-3, 1])), r"train_idx\[0\]: .* got -3"),
    "an unknown suffix": (
        lambda folder: f"edges:{write_npz(folder / 'g.npz')}",
        r"the name of .* must end in .* \.npy or \.parquet",
    ),
    "no such file": (lambda folder: f"edges:{folder}/no*.npy", r"no file matches"),
    "another parameter": (lambda folder: f"edges:{folder}/e.npy,z=1", r"has no parameter 'z'; it has x, y, train"),
    "an unknown source": (lambda folder: "eges:x", r"source must be .* Did you mean edges\?"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("working", [20_000, 3_000_000])
def test_bad_input_is_named_with_file_and_place_and_leaves_no_graph(tmp_path, name, working):
    write, words = MISTAKES[name]
    if "split" in name and working < 2**20:
        working = 2**21
    source = write(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        small(source, tmp_path / "c", working)
    with pytest.raises(ValueError):
        load_dataset(f"converted:{tmp_path / 'c'}")


def test_values_that_do_not_fit_a_dtype_are_refused(tmp_path):
    source = _x(_NAN)(tmp_path)
    with pytest.raises(ValueError, match=r"x\.npy\[17\]: x must be finite, got nan or infinity"):
        small(source, tmp_path / "c", 3_000_000, finite=True)
    small(source, tmp_path / "d", 3_000_000, dtype={"x": "fp16"})
    assert load_dataset(f"converted:{tmp_path / 'd'}").x.isnan().sum() == 1
    source = _x(_LARGE)(tmp_path)
    with pytest.raises(ValueError, match=r"x\.npy\[21\]: x cannot be stored as fp16, since 1e\+09 is too large"):
        small(source, tmp_path / "e", 3_000_000, dtype={"x": "fp16"})
    with pytest.raises(ValueError, match="dtype: .* has no attribute 'y'.*it has x"):
        convert(source, tmp_path / "f", dtype={"y": "fp16"})
    with pytest.raises(ValueError, match=r"dtype of 'x' must be one of fp64, .* got 'int3'"):
        convert(source, tmp_path / "f", dtype={"x": "int3"})


def test_an_altered_directory_is_refused(tmp_path):
    source, root = f"npz:{write_npz(tmp_path / 'g.npz')}", tmp_path / "c"
    small(source, root, 3_000_000)
    with (root / "e0.indices.npy").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x01")
    with pytest.raises(ValueError, match=r"e0\.indices\.npy was altered: .* convert again"):
        load_dataset(f"converted:{root}")
    manifest = json.loads((root / "manifest.json").read_text())
    for change, words in (
        ({"version": 4}, "has format version 4, this salientpp reads versions 1, 2 and 3"),
        ({"source": "other"}, "was altered"),
        ({"format": "salientpp-dataset"}, "does not describe a converted graph"),
    ):
        (root / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ValueError, match=words):
            load_dataset(f"converted:{root}")
    del manifest["checksum"]
    for forged in (
        {"files": {}},
        {"node_types": []},
        {"node_types": [{**manifest["node_types"][0], "num_vertices": N + 1}]},
        {"edge_types": [{"name": ["a", "b", "c"], "num_edges": 4000}]},
        {"edge_types": [{"name": None}]},
        {"files": {**manifest["files"], "../x.npy": manifest["files"]["n0.y.npy"]}},
    ):
        body = {**manifest, **forged}
        (root / "manifest.json").write_text(json.dumps({**body, "checksum": manifest_checksum(body)}))
        with pytest.raises(ValueError, match="does not describe a converted graph"):
            load_dataset(f"converted:{root}")
    with pytest.raises(ValueError, match="is not a converted graph: it has no manifest.json"):
        load_dataset(f"converted:{tmp_path}")


# --- the command ------------------------------------------------------------------------------------------


def test_other_commands_take_the_graph_that_convert_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file, root = write_npz(tmp_path / "g.npz"), tmp_path / "c"
    assert cli.main(["convert", f"npz:{file}", str(root), "--undirected", "--dtype", "x=fp16"]) == 0
    out = capsys.readouterr().out
    assert "300; x float16 [5], y int64, train_mask bool" in out and f"converted:{root}" in out
    name = f"converted:{root}"
    assert load_dataset(name).x.dtype == torch.float16
    assert (
        cli.main(
            ["partition", name, str(tmp_path / "p"), "--parts", "2", "--num-neighbors", "3,2", "--batch-size", "16"]
        )
        == 0
    )
    assert (
        cli.main(["analyze", name, "--parts", "2", "--predict-only", "--num-neighbors", "3,2", "--batch-size", "16"])
        == 0
    )
    capsys.readouterr()
    assert cli.main(["partition", str(root), str(tmp_path / "q"), "--parts", "2"]) == 2
    said = capsys.readouterr().err
    assert "is a converted graph" in said and f"salientpp partition converted:{root} {tmp_path / 'q'} --parts 2" in said
    assert cli.main(["convert", f"npz:{file}", str(root)]) == 2
    assert "exists; pass --overwrite" in capsys.readouterr().err
    assert cli.main(["convert", f"npz:{file}", str(root), "--overwrite"]) == 0
    shutil.rmtree(tmp_path / "p")


def test_ctrl_c_prints_how_to_continue(tmp_path, capsys, monkeypatch):
    from salientpp import datasets

    def stopped(*arguments, **named):
        raise KeyboardInterrupt  # a real signal is ignored if a shell runs the tests in the background

    monkeypatch.setattr(datasets, "convert", stopped)
    assert cli.main(["convert", "npz:x", str(tmp_path / "c")]) == 130
    assert "interrupted; the same command goes on after the last finished step" in capsys.readouterr().err
