"""Laws of link splits: a converted dataset has the arrays of each split, under the names that loaders use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rare import rare
from raw_links import SPLIT, N, write_ogbl

from salientpp import LinkNeighborLoader, cli
from salientpp.datasets import load_dataset, load_link_splits
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.sources import open_source
from salientpp.graph.csc import Graph
from salientpp.store.directory.manifest import manifest_checksum

pytest.importorskip("ogb")
ROOT = Path(__file__).parents[3]
OGB = {"train": "train", "val": "valid", "test": "test"}


def small(name: str, folder: Path, root: Path, working: int = 2**20, undirected=None) -> Path:
    return write_converted(open_source(name, folder, undirected), root, Budget(0, working), Options(False, {}, False))


@pytest.mark.parametrize("form", ["numpy", "tensors", "old"])
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_splits_have_the_arrays_of_ogb(tmp_path, name, form):
    given = write_ogbl(tmp_path, name, form)
    small(name, tmp_path, tmp_path / "c")
    splits = load_link_splits(f"converted:{tmp_path / 'c'}", verify=True)
    assert list(splits) == list(OGB)
    for split, of_ogb in OGB.items():
        got, arrays = splits[split], dict(given[of_ogb])
        ends = [arrays.pop(key) for key in ("source_node", "target_node", "head", "tail") if key in arrays]
        edges = np.stack(ends) if ends else arrays.pop("edge").T
        assert got.edge_label_index.dtype == torch.int64 and np.array_equal(got.edge_label_index.numpy(), edges)
        negatives = arrays.pop("edge_neg", None)
        assert (got.negatives is None) == (negatives is None)
        assert negatives is None or np.array_equal(got.negatives.numpy(), negatives.T)
        assert set(got.columns) == set(arrays)
        for key, array in arrays.items():
            assert np.array_equal(got.columns[key].numpy(), array), key


def test_the_graph_has_the_training_edges_in_ogbs_directions_and_the_columns_of_vertices(tmp_path):
    for name, doubles in (("ogbl-citation2", False), ("ogbl-ppa", True)):
        given = write_ogbl(tmp_path, name)["train"]
        edges = given["edge"] if doubles else np.stack([given["source_node"], given["target_node"]], 1)
        both = np.stack([edges, edges[:, ::-1]], 1).reshape(-1, 2) if doubles else edges
        data = load_dataset(f"converted:{small(name, tmp_path, tmp_path / name)}")
        graph = Graph.from_data(data)
        order = both[:, 1].argsort(kind="stable")
        assert data.num_nodes == N and data.x.shape == (N, 6)
        assert np.array_equal(graph.indices.numpy(), both[order, 0])
        assert graph.indptr.tolist() == np.concatenate([[0], np.bincount(both[:, 1], minlength=N).cumsum()]).tolist()
    assert "y" not in data and load_dataset(f"converted:{tmp_path / 'ogbl-citation2'}").node_year.shape == (N, 1)


def test_a_link_loader_takes_a_split_by_its_name(tmp_path):
    write_ogbl(tmp_path, "ogbl-ddi")
    root = small("ogbl-ddi", tmp_path, tmp_path / "c")
    data, splits = load_dataset(f"converted:{root}"), load_link_splits(root)
    data.x = torch.arange(N).float().view(-1, 1)
    edges, label = splits["val"].labelled()
    assert label.tolist() == [1.0] * 40 + [0.0] * 60
    seen = []
    for batch in LinkNeighborLoader(data, [4, 2], edges, label, batch_size=32):
        assert torch.equal(batch.x.flatten().long(), batch.n_id)
        seen.append(torch.cat([batch.n_id[batch.edge_label_index], batch.edge_label.long().view(1, -1)]))
    assert torch.equal(torch.cat(seen, 1), torch.cat([edges, label.long().view(1, -1)]))
    with pytest.raises(ValueError, match="no given negative edges; use edge_label_index, and let the loader draw"):
        splits["train"].labelled()
    loader = LinkNeighborLoader(data, [4], splits["train"].edge_label_index, neg_sampling="binary", batch_size=400)
    batch = next(iter(loader))
    assert torch.equal(batch.n_id[batch.edge_label_index[:, :400]], splits["train"].edge_label_index)


def test_memory_and_interruptions_do_not_change_link_splits(tmp_path, monkeypatch):
    from salientpp.store.directory.journal import Journal

    write_ogbl(tmp_path, "ogbl-citation2")
    sums = []
    for working in (60_000, 10**8):
        root = small("ogbl-citation2", tmp_path, tmp_path / str(working), working)
        sums.append(
            {name: each["sha256"] for name, each in json.loads((root / "manifest.json").read_text())["files"].items()}
        )
    assert sums[0] == sums[1] and "l.test.target_node_neg.npy" in sums[0]
    note = Journal.note

    def stops(self, step, *arguments):
        if step == "l.val":
            raise KeyboardInterrupt
        return note(self, step, *arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal, "note", stops)
        small("ogbl-citation2", tmp_path, tmp_path / "stopped")
    root = small("ogbl-citation2", tmp_path, tmp_path / "stopped")
    assert sums[0] == {
        n: each["sha256"] for n, each in json.loads((root / "manifest.json").read_text())["files"].items()
    }


@pytest.mark.parametrize("form", ["tensors", *rare("numpy")])
def test_resident_memory_stays_below_the_limit(tmp_path, form):
    # 72 MB of edges, or 32 MB. Mapped tensors need 40 MB for pieces; pickled arrays need three times their size in addition.
    write_ogbl(tmp_path, "ogbl-ppa")
    edges = np.random.default_rng(0).integers(0, N, (4_500_000 if form == "tensors" else 2_000_000, 2))
    train = {"edge": torch.from_numpy(edges) if form == "tensors" else edges}
    torch.save(train, tmp_path / "ogbl_ppa" / "split" / "throughput" / "train.pt")
    program = """
import sys
from pathlib import Path
from salientpp.datasets import convert
def kilobytes(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
asked = (kilobytes("VmRSS") + int(sys.argv[3]) * 1024) * 1024
Path("/proc/self/clear_refs").write_text("5")
convert("ogbl-ppa", sys.argv[2], data=sys.argv[1], memory=asked)
print(kilobytes("VmHWM") * 1024, asked)
"""

    def run(megabytes: int, root: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(tmp_path), str(root), str(megabytes)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    if form == "numpy":
        refused = run(64, tmp_path / "a")
        assert "reading the arrays of" in refused.stderr and "give at least" in refused.stderr
    done = run(64 if form == "tensors" else 200, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    peak, asked = map(int, done.stdout.split())
    assert peak <= asked, f"{peak:,} bytes resident, expected at most {asked:,}"
    assert np.array_equal(load_link_splits(tmp_path / "c")["train"].edge_label_index.numpy(), edges.T)


_EDGE = np.zeros((5, 2), np.int64)
MISTAKES = {
    "no edges": ({"weight": np.zeros(5)}, r"valid\.pt must have the key edge, .*; got weight"),
    "no dictionary": (torch.zeros(3), r"valid\.pt: expected a dictionary of arrays, got float32 \[3\]"),
    "text": (
        {"edge": _EDGE, "head_type": ["a"] * 5},
        r"valid\.pt: head_type must be an array with a row per edge, got a list",
    ),
    "three ends": (
        {"edge": np.zeros((5, 3), np.int64)},
        r"valid\.pt: edge\[0\]: edge must have shape \[M, 2\], got int64 \[5, 3\]",
    ),
    "ids that are no integers": ({"edge": _EDGE / 2}, r"edge must hold vertex ids, got float64 \[5, 2\]"),
    "an id out of range": (
        {"edge": _EDGE, "edge_neg": np.array([[0, 1], [2, N]])},
        rf"valid\.pt: edge_neg\[1\]: edge_neg must hold vertex ids in \[0, {N}\), got {N}",
    ),
    "a column with a slash": ({"edge": _EDGE, "a/b": np.zeros(5)}, r"the column 'a/b' cannot have this name"),
    "rows missing": ({"edge": _EDGE, "year": np.zeros(4)}, r"valid\.pt: year must have 5 rows, one per edge, got 4"),
    "targets missing": (
        {"source_node": np.zeros(5, np.int64), "target_node": np.zeros(4, np.int64)},
        r"valid\.pt: source_node\[0\]: expected as many targets as sources, got 5 sources and 4 targets",
    ),
    "code": ({"edge": Path("x")}, r"valid\.pt: expected a dictionary of arrays, but it needs pathlib"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_mistakes_in_splits_are_named_with_file_and_place(tmp_path, name):
    value, words = MISTAKES[name]
    write_ogbl(tmp_path, "ogbl-collab")
    torch.save(value, tmp_path / "ogbl_collab" / "split" / "time" / "valid.pt")
    with pytest.raises(ValueError, match=words):
        small("ogbl-collab", tmp_path, tmp_path / "c")


def test_incomplete_and_unknown_datasets_are_refused(tmp_path):
    write_ogbl(tmp_path, "ogbl-ppa")
    (tmp_path / "ogbl_ppa" / "split" / "throughput" / "test.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ogbl_ppa lacks split/throughput/test\.pt"):
        open_source("ogbl-ppa", tmp_path, None)
    with pytest.raises(ValueError, match="ogbl-pda is not a link-prediction dataset of .* Did you mean ogbl-ppa"):
        open_source("ogbl-pda", tmp_path, None)
    with pytest.raises(ValueError, match="ogbl-biokg has several types of vertices"):
        open_source("ogbl-biokg", tmp_path, None)


def test_a_graph_without_link_splits_says_so_and_keeps_format_version_1(tmp_path):
    np.savez(tmp_path / "g.npz", edge_index=np.zeros((2, 3), np.int64), num_nodes=4)
    root = small(f"npz:{tmp_path / 'g.npz'}", tmp_path, tmp_path / "c")
    assert json.loads((root / "manifest.json").read_text())["version"] == 1
    with pytest.raises(ValueError, match=r"has no link splits; expected the conversion of .*, got npz:"):
        load_link_splits(root)


def test_altered_link_splits_are_refused(tmp_path):
    write_ogbl(tmp_path, "ogbl-ppa")
    root = small("ogbl-ppa", tmp_path, tmp_path / "c")
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest.pop("version") == 2 and manifest.pop("checksum")
    manifest["link_splits"][1]["columns"]["edge"] += 1
    body = {"version": 2, **manifest}
    (root / "manifest.json").write_text(json.dumps({**body, "checksum": manifest_checksum(body)}))
    with pytest.raises(ValueError, match="does not describe a converted graph"):
        load_link_splits(root)


def test_the_command_shows_link_splits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    write_ogbl(tmp_path, "ogbl-citation2")
    assert cli.main(["convert", "ogbl-citation2", str(tmp_path / "c"), "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "link split val" in out and "40 edges; target_node_neg int64 [10]" in out
    assert "link split train" in out and "400 edges" in out
