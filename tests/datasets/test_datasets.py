"""Laws of `salientpp.datasets`: inputs are checked with clear errors, and graphs always have the same form.

The tests write OGB folders in the format of the published archives, so nothing is downloaded.
Real graphs (.npz) are read from the folder that SALIENTPP_TEST_DATA names.
"""

import errno
import gzip
import inspect
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_python import python
from odd_values import ODD_VALUES
from peers import real_graph
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.utils import is_undirected, to_undirected

from salientpp import datasets
from salientpp.datasets import convert, load_dataset, ogb, synthetic
from salientpp.datasets.generated import power_law_weights
from salientpp.graph.csc import Graph
from salientpp.partitioning.undirected import symmetric_closure

# A small directed graph with a reciprocal pair 0-1, a self-loop at 2, and an isolated vertex 4.
EDGES = np.array([[0, 1, 0, 2, 3], [1, 0, 2, 2, 0]])
BOTH_DIRECTIONS = {(0, 1), (1, 0), (0, 2), (2, 0), (2, 2), (3, 0), (0, 3)}


def edge_list(data):
    return list(zip(*data.edge_index.tolist()))


def small_arrays(**changes):
    arrays = {
        "edge_index": EDGES,
        "x": np.arange(10, dtype=np.float32).reshape(5, 2),
        "y": np.array([2, 0, 1, -1, 1]),
        "train_idx": np.array([0, 4]),
        "val_idx": np.array([1]),
        "test_idx": np.array([2]),
    }
    arrays.update(changes)
    return {key: value for key, value in arrays.items() if value is not None}


@pytest.fixture
def npz(tmp_path):
    def write(**changes):
        np.savez(tmp_path / "graph.npz", **small_arrays(**changes))
        return f"npz:{tmp_path / 'graph.npz'}"

    return write


def assert_looks_as_promised(data):
    num_vertices = data.num_nodes
    assert data.edge_index.dtype == torch.int64 and data.edge_index.shape[0] == 2
    assert data.edge_index.is_contiguous()
    assert data.y.dtype == torch.int64 and len(data.y) == num_vertices
    assert int(data.y.min()) >= -1
    for mask in (data.train_mask, data.val_mask, data.test_mask):
        assert mask.dtype == torch.bool and mask.shape == (num_vertices,)
        assert not (mask & (data.y.view(num_vertices, -1) < 0).all(dim=1)).any()
    data.validate(raise_on_error=True)


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset, suggestion",
    [
        ("sythetic", "Did you mean synthetic or synthetic-mag?"),
        ("synthetics:seed=1", "Did you mean synthetic or synthetic-mag?"),
        ("products", "Did you mean ogbn-products?"),
        ("some/graph.npz", 'Did you mean "npz:some/graph.npz"?'),
        (Path("graph.npz"), 'Did you mean "npz:graph.npz"?'),
        ("npz:", "got 'npz:'"),
        ("", "got ''"),
        (object(), "got an object of type object"),
        (None, "got an object of type NoneType"),
    ],
)
def test_an_unknown_dataset_is_refused_with_the_accepted_forms(dataset, suggestion):
    with pytest.raises(ValueError) as error:
        load_dataset(dataset)
    assert suggestion in str(error.value)
    for accepted in ("Data object", "npz:FILE", "synthetic", "ogbn-arxiv"):
        assert accepted in str(error.value)


def test_a_name_can_carry_parameters():
    by_name = load_dataset("synthetic:num_vertices=500, average_degree=6,seed=3")
    by_keyword = load_dataset("synthetic", num_vertices=500, average_degree=6, seed=3)
    direct = synthetic(num_vertices=500, average_degree=6, seed=3)
    for data in (by_name, by_keyword):
        assert torch.equal(data.edge_index, direct.edge_index) and torch.equal(data.x, direct.x)


@pytest.mark.parametrize(
    "dataset, parameters, words",
    [
        ("synthetic:num_vertexes=10", {}, "synthetic has no parameter 'num_vertexes'; it has num_vertices, average"),
        ("synthetic:num_vertexes=10", {}, "Did you mean num_vertices"),
        ("synthetic:num_vertices", {}, "expected key=value after the colon, separated by commas, got 'num_vertices'"),
        ("synthetic:seed=one", {}, "seed must be a number, true, false or none, got 'one'"),
        ("synthetic:seed=1", {"seed": 2}, "parameter seed is given twice"),
        ("synthetic:seed=1,seed=2", {}, "parameter seed is given twice"),
        ("npz:graph.npz", {"seed": 2}, "npz:graph.npz has no parameter 'seed'; it has undirected"),
        ("npz:graph.npz", {"undirected": "yes"}, "undirected must be True, False or None, got 'yes'"),
        ("ogbn-arxiv:seed=2", {}, "ogbn-arxiv has no parameter 'seed'; it has undirected, download"),
        (
            Data(edge_index=torch.zeros(2, 0, dtype=torch.long)),
            {"seed": 2},
            "a Data object takes no parameters, got seed",
        ),
    ],
)
def test_a_wrong_parameter_is_refused(dataset, parameters, words):
    with pytest.raises(ValueError) as error:
        load_dataset(dataset, **parameters)
    assert words in str(error.value)


def test_importing_the_module_does_not_import_ogb():
    code = "import sys, salientpp.datasets; sys.exit(any(m.split('.')[0] == 'ogb' for m in sys.modules))"
    root = Path(datasets.__file__).parents[2]
    assert subprocess.run([python(), "-c", code], cwd=root).returncode == 0


# --- Data objects -----------------------------------------------------------------------------------------


def small_data(**changes):
    attributes = {
        "x": torch.zeros(5, 2),
        "edge_index": torch.from_numpy(EDGES),
        "y": torch.zeros(5, dtype=torch.long),
        "train_mask": torch.tensor([True, False, False, False, False]),
    }
    attributes.update(changes)
    return Data(**{key: value for key, value in attributes.items() if value is not None})


def test_a_valid_data_object_is_returned_as_the_same_object():
    for data in (
        small_data(),
        small_data(x=None, y=None, train_mask=None, num_nodes=5),
        small_data(x=torch.zeros(5, 2, dtype=torch.float16), edge_index=torch.from_numpy(EDGES).int()),
        small_data(x=torch.zeros(5, 2, dtype=torch.int64)),
        small_data(edge_index=torch.zeros(2, 0, dtype=torch.long)),
        small_data(edge_index=None, adj_t=torch.eye(5).to_sparse()),
        synthetic(num_vertices=100, average_degree=4),
    ):
        before = data.clone()
        assert load_dataset(data) is data
        assert data.keys() == before.keys()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"edge_index": None}, "expected edge_index or adj_t, got only "),
        ({"edge_index": torch.zeros(3, 7, dtype=torch.long)}, "edge_index must have shape [2, E], got [3, 7]"),
        ({"edge_index": torch.zeros(2, 7)}, "edge_index must hold integers, got float32 [2, 7]"),
        ({"edge_index": EDGES}, "edge_index must be a tensor, got a ndarray"),
        ({"edge_index": torch.tensor([[0], [5]])}, "edge_index must hold vertex ids in [0, 5), got 5"),
        ({"edge_index": torch.tensor([[-2], [4]])}, "edge_index must hold vertex ids in [0, 5), got -2"),
        ({"x": torch.zeros(4, 2), "num_nodes": 5}, "x must have one row per vertex, expected 5 rows, got [4, 2]"),
        ({"x": torch.tensor([[0.0], [1], [2], [np.nan], [4]])}, "x must be finite, got nan or infinity in row 3"),
        ({"x": torch.full((5, 2), np.inf, dtype=torch.float16)}, "x must be finite, got nan or infinity in row 0"),
        ({"train_mask": torch.tensor([0, 1])}, "train_mask must be bool [5], got int64 [2]"),
        ({"val_mask": torch.zeros(5, 10, dtype=torch.bool)}, "val_mask must be bool [5], got bool [5, 10]"),
        ({"test_mask": [0, 1]}, "test_mask must be bool [5], got a list"),
        ({"edge_index": None, "adj_t": torch.eye(4).to_sparse()}, "adj_t must have shape [5, 5], got [4, 4]"),
    ],
)
def test_an_error_about_a_data_object_names_the_array(changes, words):
    with pytest.raises(ValueError) as error:
        load_dataset(small_data(**changes))
    assert str(error.value).startswith("Data object: ") and words in str(error.value)


def test_finiteness_is_checked_in_every_block_of_rows():
    x = torch.zeros(70_000, 512, dtype=torch.float16)  # more than two blocks
    x[69_999, 511] = float("nan")
    data = Data(x=x, edge_index=torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="in row 69999"):
        load_dataset(data)


# --- .npz -------------------------------------------------------------------------------------------------


def test_an_npz_file_is_loaded_as_stored(npz):
    data = load_dataset(npz())
    assert_looks_as_promised(data)
    assert edge_list(data) == list(zip(*EDGES.tolist()))
    assert data.num_nodes == 5 and data.y.tolist() == [2, 0, 1, -1, 1]
    assert torch.equal(data.x, torch.arange(10.0).view(5, 2))
    assert data.train_mask.tolist() == [True, False, False, False, True]
    assert data.val_mask.nonzero().tolist() == [[1]] and data.test_mask.nonzero().tolist() == [[2]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_features_keep_their_stored_dtype(npz, dtype):
    assert load_dataset(npz(x=np.ones((5, 2), dtype))).x.numpy().dtype == dtype


def test_unlabelled_vertices_are_in_no_split(npz):
    with pytest.warns(UserWarning, match="train_idx: 2 of 5 vertices are left out, because their label y is -1"):
        data = load_dataset(npz(y=np.array([-1, 0, -1, 1, 1]), train_idx=np.arange(5), test_idx=np.empty(0)))
    assert data.y.tolist() == [-1, 0, -1, 1, 1]
    assert data.train_mask.tolist() == [False, True, False, True, True]
    assert not data.test_mask.any()


@pytest.mark.parametrize("y", [[-1, 1, -1, 1, 1], [-20, 0, -7, 1, 1], [-1, -1, -1, -1, -1]])
@pytest.mark.filterwarnings("error")
def test_labels_that_are_values_stay_in_their_splits(npz, y):
    data = load_dataset(npz(y=np.array(y), train_idx=np.arange(5), test_idx=np.empty(0)))
    assert data.y.tolist() == y
    assert data.train_mask.all() and not data.test_mask.any()


def test_an_undirected_file_loads_with_both_directions_and_single_self_loops(npz):
    undirected = npz(edge_index=EDGES.astype(np.int32), directed=np.array(False))
    data = load_dataset(undirected)
    assert_looks_as_promised(data)
    assert edge_list(data) == sorted(BOTH_DIRECTIONS)
    assert edge_list(load_dataset(undirected, undirected=False)) == list(zip(*EDGES.tolist()))


def test_a_directed_file_is_symmetrised_on_request(npz):
    assert edge_list(load_dataset(npz(), undirected=True)) == sorted(BOTH_DIRECTIONS)
    assert edge_list(load_dataset(npz(directed=True), undirected=None)) == list(zip(*EDGES.tolist()))


def test_symmetrising_gives_the_same_edges_as_pyg(tmp_path):
    rng = np.random.default_rng(5)
    for num_vertices, num_edges in ((1, 0), (1, 3), (50, 1), (50, 2000), (3000, 20_000)):
        edges = rng.integers(num_vertices, size=(2, num_edges))
        ours = symmetric_closure(*edges, num_vertices)
        assert np.array_equal(ours, to_undirected(torch.from_numpy(edges), num_nodes=num_vertices).numpy())


def test_symmetrising_a_graph_of_billions_of_vertices_keeps_their_ids():
    edges = np.array([[4_999_999_999, 7, 7, 0], [3, 4_999_999_999, 7, 3]])
    pairs = {tuple(pair) for pair in (*edges.T.tolist(), *edges[::-1].T.tolist())}
    assert symmetric_closure(*edges, 5_000_000_000).T.tolist() == [list(pair) for pair in sorted(pairs)]
    assert symmetric_closure(*edges[:, 2:], 5_000_000_000).T.tolist() == [[0, 3], [3, 0], [7, 7]]


def test_an_archive_with_other_keys_is_read_with_a_warning(npz):
    dataset = npz(edge_weight=np.ones(5), class_names=np.array(["a", "b"]))
    with pytest.warns(
        UserWarning, match="edge_weight, class_names of npz:.* left out: the archive may have edge_index, x"
    ):
        load_dataset(dataset)


def test_num_nodes_is_checked_against_the_features(npz):
    assert load_dataset(npz(num_nodes=np.int64(5))).num_nodes == 5
    with pytest.raises(ValueError, match="expected 6 rows, got \\[5, 2\\]"):
        load_dataset(npz(num_nodes=np.int64(6)))


@pytest.mark.parametrize(
    "left_out", [("x",), ("y",), ("train_idx", "val_idx", "test_idx"), ("x", "train_idx", "val_idx", "test_idx")]
)
def test_a_graph_needs_no_features_labels_or_splits(npz, left_out):
    whole, data = load_dataset(npz()), load_dataset(npz(**dict.fromkeys(left_out)))
    assert data.num_nodes == whole.num_nodes and torch.equal(data.edge_index, whole.edge_index)
    gone = {name.replace("_idx", "_mask") for name in left_out}
    assert set(whole.keys()) - set(data.keys()) == gone
    kept = set(data.keys()) - {"num_nodes"} - ({"train_mask", "val_mask", "test_mask"} if "y" in left_out else set())
    assert all(torch.equal(data[name], whole[name]) for name in kept)


def test_without_features_and_labels_num_nodes_must_be_given(npz):
    everything = dict.fromkeys(["x", "y", "train_idx", "val_idx", "test_idx"])
    assert load_dataset(npz(**everything, num_nodes=np.int64(9))).num_nodes == 9
    with pytest.raises(
        ValueError, match="the number of vertices is unknown: give num_nodes, x or y; the archive holds edge_index"
    ):
        load_dataset(npz(**everything))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"edge_index": None, "val_idx": None},
            "missing edge_index, val_idx; the archive holds x, y, train_idx, test_idx",
        ),
        ({"edge_index": np.zeros((3, 7), int)}, "edge_index must have shape [2, E], got [3, 7]"),
        ({"edge_index": EDGES.astype(float)}, "edge_index must hold integers, got dtype float64"),
        ({"edge_index": EDGES + 2}, "edge_index must hold vertex ids in [0, 5), got 5"),
        ({"edge_index": EDGES - 1}, "edge_index must hold vertex ids in [0, 5), got -1"),
        ({"edge_index": EDGES.astype(object)}, "edge_index cannot be read (Object arrays cannot be loaded"),
        ({"x": np.zeros(5)}, "x must have shape [N, F], got [5]"),
        ({"x": np.zeros((5, 2), int)}, "x must hold float16, float32 or float64, got dtype int64"),
        ({"x": np.full((5, 2), np.nan, np.float16)}, "x must be finite, got nan or infinity in row 0"),
        ({"y": np.zeros(4, int)}, "y must have shape [N] with N = 5, got [4]"),
        ({"y": np.zeros((5, 1), int)}, "y must have shape [N], got [5, 1]"),
        ({"y": np.zeros(5)}, "y must hold integers (-1 for an unlabelled vertex), got dtype float64"),
        ({"train_idx": np.array([5])}, "train_idx must hold vertex ids in [0, 5), got 5"),
        ({"train_idx": np.array([0, 1, 1, 0, 0])}, "train_idx must hold each vertex id once, got one again; if it has"),
        ({"val_idx": np.array([[1]])}, "val_idx must be a list of vertex ids, shape [*], got [1, 1]"),
        ({"test_idx": np.array([True] * 5)}, "test_idx must hold integers, got dtype bool"),
        ({"directed": np.array([True, False])}, "directed must be one true or false, got bool [2]"),
        ({"num_nodes": np.array(5.0)}, "num_nodes must be one integer, got float64 []"),
    ],
)
def test_an_error_about_an_npz_file_names_file_and_key(npz, changes, words):
    dataset = npz(**changes)
    with pytest.raises(ValueError) as error:
        load_dataset(dataset)
    assert str(error.value).startswith(f"{dataset.removeprefix('npz:')}: {words}")


def test_a_file_that_is_not_an_archive_is_refused(tmp_path):
    file = tmp_path / "graph.npz"
    with pytest.raises(FileNotFoundError, match="graph.npz: no such file"):
        load_dataset(f"npz:{file}")
    file.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match="graph.npz: not an .npz archive"):
        load_dataset(f"npz:{file}")
    file.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ValueError, match="graph.npz: not an .npz archive"):
        load_dataset(f"npz:{file}")
    with open(file, "wb") as stream:
        np.save(stream, EDGES)
    with pytest.raises(ValueError, match="not an .npz archive but a single array"):
        load_dataset(f"npz:{file}")


@pytest.mark.parametrize(
    "file, num_vertices, num_edges, num_features, dtype, splits",
    [
        ("debian_full", 101_291, 730_927, 128, torch.float16, (30_436, 13_190, 19_455)),
        ("facebook_pages", 22_470, 341_825, 128, torch.float16, (13_482, 4_494, 4_494)),
        ("tolokers", 11_758, 1_038_000, 10, torch.float32, (5_879, 2_939, 2_940)),
    ],
)
def test_real_graphs_load_with_their_published_sizes(file, num_vertices, num_edges, num_features, dtype, splits):
    data = load_dataset(f"npz:{real_graph(file)}")
    assert_looks_as_promised(data)
    assert (data.num_nodes, data.num_edges) == (num_vertices, num_edges)
    assert data.x.shape == (num_vertices, num_features) and data.x.dtype == dtype
    assert tuple(int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")) == splits
    assert is_undirected(data.edge_index) == (file != "debian_full")


@pytest.mark.parametrize("source", ["npz", "pyg"])
@pytest.mark.parametrize(
    ("code", "words"), [(errno.EMFILE, "raise the limit"), (errno.ENOMEM, "lacks memory"), (errno.EIO, "")]
)
def test_an_error_of_the_operating_system_says_what_the_machine_lacks(npz, tmp_path, monkeypatch, source, code, words):
    def fail(*arguments, **named):
        raise OSError(code, os.strerror(code))

    dataset = npz()
    torch.save(small_data(), tmp_path / "g.pt")
    monkeypatch.setattr(np if source == "npz" else torch, "load", fail)
    with pytest.raises(ValueError, match=rf"cannot be read \({os.strerror(code)}\).*{words}") as raised:
        load_dataset(dataset if source == "npz" else f"pyg:{tmp_path / 'g.pt'}")
    assert "copy it again" not in str(raised.value)


def damaged(contents: bytes, rng: random.Random) -> bytes:
    """Returns contents that are cut off or have changed bytes."""
    data = bytearray(contents)
    if rng.random() < 0.2:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), 0, 255, 128])
    return bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["npz", "npz compressed", "pyg", "pyg legacy", "pyg dict", "pyg adj_t"])
def test_a_damaged_file_gives_a_graph_or_an_error_naming_it(tmp_path, kind, num_cases=100):
    file = tmp_path / "graph"
    data = small_data(adj_t=torch.eye(5).to_sparse_csr(), edge_index=None) if kind == "pyg adj_t" else small_data()
    with file.open("wb") as out:
        if kind.startswith("npz"):
            (np.savez_compressed if "compressed" in kind else np.savez)(
                out, **small_arrays(num_nodes=np.int64(5), directed=np.array(False))
            )
        else:
            torch.save(
                data.to_dict() if kind == "pyg dict" else data, out, _use_new_zipfile_serialization=kind != "pyg legacy"
            )
    whole, dataset = file.read_bytes(), f"{kind.split()[0]}:{file}"
    assert load_dataset(dataset).num_nodes == 5
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    refused = 0
    for case in range(num_cases):
        file.write_bytes(damaged(whole, rng))
        try:
            loaded = load_dataset(dataset)
        except ValueError as error:
            assert str(error).startswith(f"{file}: "), (seed, case)
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}") from error
        else:
            assert isinstance(loaded, Data) and load_dataset(loaded) is loaded
    assert refused


@pytest.mark.parametrize("prefix", ["npz", "pyg"])
def test_a_directory_or_pipe_is_refused_without_blocking(tmp_path, prefix):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, words in (
        ("nowhere", "no such file"),
        ("", "a directory; expected a file"),
        ("pipe", "a device or a pipe; expected a file"),
        ("empty", "not a"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            load_dataset(f"{prefix}:{tmp_path / name}")


def test_numbers_beyond_int64_are_refused(npz):
    for key in ("y", "train_idx", "edge_index"):
        array = np.abs(small_arrays()[key]).astype(np.uint64)
        array[..., 0] = 2**63 + 5
        with pytest.raises(ValueError, match=rf"{key} must hold numbers below 2\^63, got 9223372036854775813"):
            load_dataset(npz(**{key: array}))


# --- PyG's own files --------------------------------------------------------------------------------------


@pytest.fixture
def pt(tmp_path):
    def write(stored, **options):
        torch.save(stored, tmp_path / "graph.pt", **options)
        return f"pyg:{tmp_path / 'graph.pt'}"

    return write


class OfTheUser:
    """A class that torch.load does not know."""


class RunsCode:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


def test_every_form_that_pyg_writes_is_read(pt, tmp_path):
    data = small_data()
    InMemoryDataset.save([data], str(tmp_path / "processed.pt"))
    # `(data, None)` below is the form of PyG before 2.4.
    forms = [pt(data), f"pyg:{tmp_path / 'processed.pt'}"]
    loaded = [load_dataset(form) for form in forms]
    loaded += [
        load_dataset(pt(data.to_dict())),
        load_dataset(pt((data, None))),
        load_dataset(pt(data, _use_new_zipfile_serialization=False)),
    ]
    for read in loaded:
        assert isinstance(read, Data) and set(read.keys()) == set(data.keys())
        assert all(torch.equal(read[key], data[key]) for key in data.keys())


def test_a_graph_of_several_types_is_read_and_every_type_is_checked(pt, tmp_path):
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.zeros(3, 2), 4
    data["a", "to", "b"].edge_index = torch.tensor([[0, 2], [3, 1]])
    InMemoryDataset.save([data], str(tmp_path / "processed.pt"))
    for form in (data, pt(data), pt(data.to_dict()), pt((data, None)), f"pyg:{tmp_path / 'processed.pt'}"):
        read = load_dataset(form)
        assert isinstance(read, HeteroData) and read.node_types == ["a", "b"] and read["b"].num_nodes == 4
        assert torch.equal(read["a", "to", "b"].edge_index, data["a", "to", "b"].edge_index)
    changes = [
        (
            lambda d: d["a", "to", "b"].edge_index.fill_(3),
            r"edge_index\[0\] of \('a', 'to', 'b'\) must hold vertex ids in \[0, 3\), got 3",
        ),
        (lambda d: d["a"].x.fill_(torch.nan), "'a': x must be finite, got nan or infinity in row 0"),
        (
            lambda d: d["b"].__setattr__("train_mask", torch.ones(3)),
            r"'b': train_mask must be bool \[4\], got float32 \[3\]",
        ),
        (
            lambda d: d["a", "to", "b"].__setattr__("edge_index", torch.ones(2, 2)),
            r"\('a', 'to', 'b'\): edge_index must hold integers",
        ),
        (
            lambda d: d["a", "to", "c"].__setattr__("edge_index", torch.zeros(2, 1).long()),
            "must join node types .a, b., got 'c'",
        ),
    ]
    for change, words in changes:
        wrong = data.clone()
        change(wrong)
        for form in (wrong, pt(wrong)):
            with pytest.raises(ValueError, match=words):
                load_dataset(form)


def test_a_sparse_adjacency_in_a_file_is_read(pt):
    typing = pytest.importorskip("torch_sparse")
    adj_t = typing.SparseTensor(row=torch.tensor([0, 1]), col=torch.tensor([1, 2]), sparse_sizes=(5, 5))
    assert load_dataset(pt(small_data(edge_index=None, adj_t=adj_t))).adj_t.nnz() == 2


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_would_run_code_is_refused_before_it_runs(pt, tmp_path, legacy):
    for stored in (RunsCode(tmp_path / "ran"), small_data(extra=RunsCode(tmp_path / "ran"))):
        dataset = pt(stored, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(
            ValueError,
            match=r"graph.pt: not read, since it holds more than tensors .*mkdir.* weights_only=False.*python:MODULE:FUNCTION",
        ):
            load_dataset(dataset)
    for protocol in range(6):
        (tmp_path / "raw.pt").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran"), protocol=protocol))
        with pytest.raises(ValueError, match="raw.pt: (not read, since|damaged, or not a file that torch.save wrote)"):
            load_dataset(f"pyg:{tmp_path / 'raw.pt'}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_the_advice_for_a_file_with_other_classes_works(pt, tmp_path):
    with pytest.raises(ValueError) as error:
        load_dataset(pt(small_data(extra=OfTheUser())))
    assert f"({OfTheUser.__module__}.OfTheUser)" in str(error.value)
    advice = re.search("in Python: (.*?)[.] Or", str(error.value))[1].replace(
        "'new.pt'", repr(str(tmp_path / "new.pt"))
    )
    exec(advice, {"torch": torch})
    assert set(load_dataset(f"pyg:{tmp_path / 'new.pt'}").keys()) == set(small_data().keys())


@pytest.mark.parametrize(
    "stored, words",
    [
        ([1, 2], "expected a torch_geometric Data or HeteroData, got a list"),
        (torch.zeros(3), r"expected a torch_geometric Data or HeteroData, got float32 \[3\]"),
        ({1: torch.zeros(3)}, "expected the attributes of a Data by name"),
        ({}, "expected edge_index or adj_t, got only nothing"),
        (HeteroData(), "expected at least one node type, got none"),
        ({"_global_store": {}, "a": {3: 4}}, "expected the attributes of a HeteroData by type and name"),
        ({"_global_store": {}, ("a", "b"): {}}, "expected the attributes of a HeteroData by type and name"),
        ((Data(), {"x": torch.tensor([0, 1, 2])}), "expected one graph, got a dataset of several"),
        (small_data(x=torch.full((5, 2), np.nan)), "x must be finite, got nan or infinity in row 0"),
        (
            small_data(edge_index=torch.ones(2, 3, dtype=torch.int16)),
            r"edge_index must be int64 or int32, got int16 \[2, 3\]",
        ),
        (
            small_data(edge_index=torch.ones(2, 3, dtype=torch.long).to_sparse()),
            "edge_index must be dense and have values",
        ),
        (small_data(edge_index=None, adj_t=[1]), "adj_t must be a sparse matrix, got a list"),
    ],
)
def test_a_file_without_exactly_one_valid_graph_is_refused(pt, stored, words):
    with pytest.raises(ValueError, match=f"graph.pt: .*{words}"):
        load_dataset(pt(stored))


def test_features_with_any_strides_are_checked():
    x = torch.zeros(3, 4, 5).permute(2, 0, 1)
    assert load_dataset(small_data(x=x)).x is x
    x[4, 2, 3] = np.nan
    with pytest.raises(ValueError, match="in row 4"):
        load_dataset(small_data(x=x))


# --- functions of users -----------------------------------------------------------------------------------

MODULE = """
import sys, torch
from torch_geometric.data import Data, HeteroData

print("printed while importing")

def make():
    print("printed by make")
    return Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)

def inner():
    raise LookupError("no such table\\nmore of it")

def fails():
    return inner()

def leaves():
    sys.exit("enough")

def asks(path):
    return None

def nothing():
    pass

def hetero():
    return HeteroData()

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns the name of a module. Each test has a different name, since Python imports a module only once."""
    name = f"graph_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_user_function_returns_the_graph_and_prints_to_stderr(module, capsys):
    before = list(sys.path)
    data = load_dataset(f"python:{module}:make")
    assert data.num_nodes == 2 and data.edge_index.tolist() == [[0, 1], [1, 0]]
    out, err = capsys.readouterr()
    assert out == "" and err == "printed while importing\nprinted by make\n"
    assert sys.path == before


@pytest.mark.parametrize(
    "function, words",
    [
        (
            "fails",
            r"fails\(\) raised LookupError: no such table \(.*graph_.*\.py, line 12, in inner, called from .*, line 15, in fails\)",
        ),
        ("leaves", r"leaves\(\) raised SystemExit: enough \(.*line 18, in leaves\)"),
        ("asks", r"asks\(\) raised TypeError: asks\(\) missing 1 required positional argument: 'path'"),
        ("nothing", "expected a torch_geometric Data or HeteroData, got a NoneType"),
        ("hetero", "expected at least one node type, got none"),
        ("number", "has no function 'number'; it has asks, fails, hetero, inner, leaves, make, nothing"),
        ("mak", "has no function 'mak'.*Did you mean make"),
    ],
)
def test_an_error_of_a_user_function_names_its_place(module, function, words):
    with pytest.raises(ValueError, match=f"^python:{module}:{function}: .*{words}"):
        load_dataset(f"python:{module}:{function}")


def test_an_error_of_a_user_module_names_its_place(module, tmp_path):
    (tmp_path / "broken_graph.py").write_text("x = 1\nx.y\n")
    (tmp_path / "unfinished_graph.py").write_text("def f(:\n")
    with pytest.raises(
        ValueError, match=r"importing broken_graph raised AttributeError: .* \(.*broken_graph.py, line 2, in <module>\)"
    ):
        load_dataset("python:broken_graph:f")
    with pytest.raises(
        ValueError, match=r"importing unfinished_graph raised SyntaxError: .*\(unfinished_graph.py, line 1\)"
    ):
        load_dataset("python:unfinished_graph:f")
    with pytest.raises(
        ValueError, match="importing no_such_graph raised ModuleNotFoundError: No module named 'no_such_graph'"
    ):
        load_dataset("python:no_such_graph:f")
    for wrong in ("graph", "graph.py:make", "graph:make:more", "graph:", ":make", "../graph:make"):
        with pytest.raises(ValueError, match="expected python:MODULE:FUNCTION such as|has no|No module named"):
            load_dataset(f"python:{wrong}")


# --- OGB --------------------------------------------------------------------------------------------------


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(str(value) for value in np.atleast_1d(row)) + "\n" for row in rows)


def write_ogb_folder(folder, *, split, node_feat=True, label_columns=1, edge_feat=False, node_year=False):
    """Writes a raw OGB dataset in text form, with the five vertices and the edges of this file."""
    rng = np.random.default_rng(0)
    raw = folder / "raw"
    write_csv(raw / "edge.csv.gz", EDGES.T)
    write_csv(raw / "num-node-list.csv.gz", [5])
    write_csv(raw / "num-edge-list.csv.gz", [5])
    write_csv(raw / "node-label.csv.gz", rng.integers(2, size=(5, label_columns)))
    if node_feat:
        write_csv(raw / "node-feat.csv.gz", np.arange(10).reshape(5, 2) / 4)
    if edge_feat:
        write_csv(raw / "edge-feat.csv.gz", np.arange(10).reshape(5, 2) / 4)
    if node_year:
        write_csv(raw / "node_year.csv.gz", 2010 + np.arange(5))
    write_splits(folder, split)


def write_splits(folder, split):
    for part, ids in (("train", [0, 4]), ("valid", [1]), ("test", [2])):
        write_csv(folder / "split" / split / f"{part}.csv.gz", ids)
    (folder / "RELEASE_v1.txt").touch()
    (folder / "processed").mkdir()  # the published archives hold this empty folder


def write_papers(folder):
    """Writes a raw OGB dataset in the binary form of ogbn-papers100M. Vertex 3 has no label."""
    (folder / "raw").mkdir(parents=True)
    np.savez(
        folder / "raw" / "data.npz",
        edge_index=EDGES,
        node_feat=np.arange(10, dtype=np.float32).reshape(5, 2),
        node_year=2010 + np.arange(5).reshape(5, 1),
        num_nodes_list=np.array([5]),
        num_edges_list=np.array([5]),
    )
    labels = np.array([[2], [0], [171], [np.nan], [1]], dtype=np.float32)
    np.savez(folder / "raw" / "node-label.npz", node_label=labels)
    write_splits(folder, "time")


@pytest.fixture
def never_asks(monkeypatch):
    pytest.importorskip("ogb")

    def ask(*_):
        raise AssertionError("standard input was read")

    monkeypatch.setattr("builtins.input", ask)


@pytest.fixture
def ogb_root(tmp_path, never_asks):
    write_ogb_folder(tmp_path / "ogbn_arxiv", split="time", node_year=True)
    write_ogb_folder(tmp_path / "ogbn_products", split="sales_ranking")
    write_papers(tmp_path / "ogbn_papers100M")
    return tmp_path


def test_an_ogb_dataset_in_text_form_is_loaded(ogb_root):
    data = load_dataset("ogbn-arxiv", root=ogb_root)
    assert_looks_as_promised(data)
    assert edge_list(data) == list(zip(*EDGES.tolist()))  # arxiv is directed
    assert data.x.dtype == torch.float32 and data.x[4].tolist() == [2.0, 2.25]
    assert data.y.shape == (5,)
    assert data.train_mask.nonzero().flatten().tolist() == [0, 4]
    assert data.node_year.flatten().tolist() == [2010, 2011, 2012, 2013, 2014]


def test_an_ogb_dataset_in_binary_form_is_loaded(ogb_root):
    data = load_dataset("ogbn-papers100M", root=str(ogb_root))
    assert_looks_as_promised(data)
    assert edge_list(data) == list(zip(*EDGES.tolist()))
    assert data.y.tolist() == [2, 0, 171, -1, 1]
    assert torch.equal(data.x, torch.arange(10.0).view(5, 2))
    assert data.val_mask.nonzero().tolist() == [[1]]


def test_undirected_overrides_the_definition_of_an_ogb_dataset(ogb_root):
    stored = list(zip(*EDGES.tolist()))
    assert edge_list(load_dataset("ogbn-papers100M:undirected=true", root=ogb_root)) == sorted(BOTH_DIRECTIONS)
    assert edge_list(load_dataset("ogbn-arxiv", root=ogb_root, undirected=True)) == sorted(BOTH_DIRECTIONS)
    # ogbn-products is undirected and stored with each edge once. ogb's reader adds the inverse edges.
    with_inverse = sorted(stored + [(target, source) for source, target in stored])
    for undirected in (None, True):
        assert sorted(edge_list(load_dataset("ogbn-products", root=ogb_root, undirected=undirected))) == with_inverse
    assert edge_list(load_dataset("ogbn-products", root=ogb_root, undirected=False)) == stored


def test_a_multi_label_ogb_dataset_keeps_labels_and_edge_attributes(tmp_path, never_asks):
    folder = tmp_path / "ogbn_proteins"
    write_ogb_folder(folder, split="species", node_feat=False, label_columns=112, edge_feat=True)
    write_csv(folder / "raw" / "species.csv.gz", np.arange(5))
    data = load_dataset("ogbn-proteins", root=tmp_path)
    assert data.get("x") is None and data.y.shape == (5, 112)
    assert data.edge_attr.shape == (10, 2) and data.num_edges == 10
    assert data.node_species.flatten().tolist() == [0, 1, 2, 3, 4]


def test_arrays_equal_the_loader_of_ogb_with_and_without_its_cache(ogb_root):
    from ogb.nodeproppred import NodePropPredDataset

    for name in ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M"):
        files = sorted(ogb_root.rglob("*"))
        first = load_dataset(name, root=ogb_root)
        assert sorted(ogb_root.rglob("*")) == files, "loading writes nothing"

        theirs = NodePropPredDataset(name, root=str(ogb_root))  # writes its pickled cache
        assert (ogb_root / name.replace("-", "_") / "processed" / "data_processed").exists()
        graph, labels = theirs[0]
        second = load_dataset(name, root=ogb_root)
        for data in (first, second):
            assert np.array_equal(data.edge_index.numpy(), graph["edge_index"])
            assert np.array_equal(data.x.numpy(), graph["node_feat"])
            assert np.array_equal(data.y.numpy(), np.nan_to_num(labels[:, 0], nan=-1))
            for ours, part in (("train", "train"), ("val", "valid"), ("test", "test")):
                assert np.array_equal(data[f"{ours}_mask"].nonzero().flatten(), theirs.get_idx_split()[part])


@pytest.mark.parametrize("undirected", [None, True, False])
@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products", "ogbn-papers100M"])
def test_converting_and_loading_an_ogb_dataset_give_the_same_graph(ogb_root, tmp_path, name, undirected):
    given = {} if undirected is None else {"undirected": undirected}
    expected = load_dataset(name, root=ogb_root, **given)
    convert(name, tmp_path / "c", data=ogb_root, memory="8GB", **given)
    converted = load_dataset(f"converted:{tmp_path / 'c'}")
    assert set(converted.keys()) - {"adj_t"} == set(expected.keys()) - {"edge_index"}
    for key in set(expected.keys()) - {"edge_index", "num_nodes"}:
        assert converted[key].dtype == expected[key].dtype and torch.equal(converted[key], expected[key]), key
    graphs = [Graph.from_data(data) for data in (converted, expected)]
    assert torch.equal(graphs[0].indptr, graphs[1].indptr) and torch.equal(graphs[0].indices, graphs[1].indices)


def test_nothing_is_printed_on_standard_output(ogb_root, capsys):
    load_dataset("ogbn-arxiv", root=ogb_root)
    assert capsys.readouterr().out == ""


def test_an_error_about_a_missing_ogb_dataset_says_what_to_do(tmp_path, never_asks):
    with pytest.raises(FileNotFoundError) as error:
        load_dataset("ogbn-products", root=tmp_path)
    for words in ("ogbn-products is not in", "ogbn_products", "Pass download=True", "http", "products.zip"):
        assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_incomplete_ogb_folder_is_never_overwritten(ogb_root):
    (ogb_root / "ogbn_arxiv" / "raw" / "edge.csv.gz").unlink()
    (ogb_root / "ogbn_arxiv" / "split" / "time" / "valid.csv.gz").unlink()
    for download in (False, True):
        with pytest.raises(FileNotFoundError, match="lacks raw/edge.csv.gz, split/time/valid.csv.gz"):
            load_dataset("ogbn-arxiv", root=ogb_root, download=download)
    assert (ogb_root / "ogbn_arxiv" / "raw" / "node-feat.csv.gz").exists()


def test_a_folder_of_another_release_is_refused(ogb_root):
    (ogb_root / "ogbn_arxiv" / "RELEASE_v1.txt").rename(ogb_root / "ogbn_arxiv" / "RELEASE_v0.txt")
    with pytest.raises(ValueError, match="another version: expected RELEASE_v1.txt, got RELEASE_v0.txt"):
        load_dataset("ogbn-arxiv", root=ogb_root)


def test_download_fetches_and_unpacks_a_dataset(ogb_root, tmp_path, monkeypatch):
    published, root = tmp_path / "published", tmp_path / "data"
    shutil.copytree(ogb_root / "ogbn_arxiv", published / "arxiv")
    shutil.make_archive(str(published / "arxiv"), "zip", published, "arxiv")
    meta = {**ogb.ogb_meta("ogbn-arxiv"), "url": (published / "arxiv.zip").as_uri()}
    monkeypatch.setattr(ogb, "ogb_meta", lambda name: meta)
    data = load_dataset("ogbn-arxiv:download=true", root=root)
    assert edge_list(data) == list(zip(*EDGES.tolist()))
    assert [path.name for path in root.iterdir()] == ["ogbn_arxiv"]
    assert load_dataset("ogbn-arxiv", root=root).num_nodes == 5


def test_a_download_removes_and_overwrites_nothing_that_was_there(ogb_root, tmp_path, monkeypatch):
    published, root = tmp_path / "published", tmp_path / "data"
    shutil.copytree(ogb_root / "ogbn_arxiv", published / "arxiv")
    shutil.make_archive(str(published / "arxiv"), "zip", published, "arxiv")
    meta = {**ogb.ogb_meta("ogbn-arxiv"), "url": (published / "arxiv.zip").as_uri()}
    monkeypatch.setattr(ogb, "ogb_meta", lambda name: meta)
    (root / "arxiv").mkdir(parents=True)
    (root / "arxiv" / "mine.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"the archive would be unpacked over .*data/arxiv; rename this to .*ogbn_arxiv"
    ):
        load_dataset("ogbn-arxiv:download=true", root=root)
    assert (root / "arxiv" / "mine.txt").read_text() == "mine"
    (root / "arxiv").rename(root / "other")
    shutil.copy(published / "arxiv.zip", root)
    load_dataset("ogbn-arxiv:download=true", root=root)
    assert sorted(path.name for path in root.iterdir()) == ["arxiv.zip", "ogbn_arxiv", "other"]


def test_unknown_and_heterogeneous_ogb_names_are_refused(tmp_path, never_asks):
    with pytest.raises(ValueError, match="ogbn-product is not .* Did you mean ogbn-products"):
        load_dataset("ogbn-product", root=tmp_path)
    with pytest.raises(ValueError, match="ogbn-mag has several types of vertices; only homogeneous"):
        load_dataset("ogbn-mag", root=tmp_path)


def test_a_missing_ogb_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(ImportError, match='ogbn-arxiv is read with the "ogb" package.* pip install salientpp\\[ogb\\]'):
        load_dataset("ogbn-arxiv", root=tmp_path)


# --- generated graphs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated():
    return synthetic(num_vertices=20_000, average_degree=20, num_classes=8, num_features=32, seed=1)


def test_a_generated_graph_is_simple_and_undirected(generated):
    assert_looks_as_promised(generated)
    assert generated.is_coalesced()  # sorted, no pair twice
    assert is_undirected(generated.edge_index)
    assert not generated.has_self_loops()
    assert generated.x.dtype == torch.float32 and generated.x.shape == (20_000, 32)


@pytest.mark.parametrize("num_vertices, average_degree", [(2, 1), (100, 5), (1000, 3.5), (3000, 40)])
def test_the_number_of_edges_is_exactly_as_requested(num_vertices, average_degree):
    data = synthetic(num_vertices=num_vertices, average_degree=average_degree, num_classes=2)
    assert data.num_edges == 2 * round(num_vertices * average_degree / 2)
    assert data.is_coalesced() and not data.has_self_loops()


def test_degrees_have_a_power_law_tail(generated):
    degree = np.sort(np.bincount(generated.edge_index[1].numpy(), minlength=20_000))[::-1]
    assert degree[0] > 15 * degree.mean()
    assert degree[0] < 20_000 / 20
    assert np.median(degree) < 0.75 * degree.mean()
    # Hill's estimate of the exponent from the largest 2 %. The exponent is 2.5, and the cap makes the end steeper.
    largest = degree[:400]
    assert 2.2 < 1 + 1 / np.log(largest / largest[-1]).mean() < 3.3


def test_expected_degrees_follow_the_exponent():
    weights = power_law_weights(np.random.default_rng(0), 200_000, mean=20, exponent=2.5, cap=2000)
    assert weights.mean() == pytest.approx(20, rel=1e-6) and weights.max() <= 2000
    # The share of larger weights falls as w^-1.5, a factor of 10^-1.5 per decade.
    ratio = (weights > 300).mean() / (weights > 30).mean()
    assert ratio == pytest.approx(10**-1.5, rel=0.1)


def test_the_same_seed_gives_the_same_arrays_and_another_seed_another_graph():
    first, again, other = (synthetic(num_vertices=2000, seed=seed) for seed in (7, 7, 8))
    assert first.keys() == again.keys()
    for key in first.keys():
        value = first[key]
        assert torch.equal(value, again[key]) if isinstance(value, torch.Tensor) else value == again[key]
    assert not torch.equal(first.edge_index, other.edge_index)


def test_parameters_of_features_labels_and_splits_do_not_change_the_graph():
    plain = synthetic(num_vertices=2000)
    changed = synthetic(num_vertices=2000, num_features=3, signal=2, label_noise=0.5, train_fraction=0.5)
    assert torch.equal(plain.edge_index, changed.edge_index)


def test_the_share_of_edges_within_a_class_is_the_homophily():
    for homophily in (0.2, 0.5, 0.8, 1.0):
        data = synthetic(num_vertices=20_000, num_classes=8, homophily=homophily, label_noise=0.0)
        source, target = data.edge_index
        measured = float((data.y[source] == data.y[target]).double().mean())
        by_chance = (1 - homophily) * float((np.bincount(data.y) / 20_000) @ (np.bincount(data.y) / 20_000))
        # The share is a little smaller: repeated pairs are drawn again, and most of them are local.
        assert homophily + by_chance - 0.06 < measured <= homophily + by_chance + 0.02


def ridge_accuracy(data, x):
    """Returns the test accuracy of a ridge regression on the one-hot labels of training vertices."""
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    train, test = x[data.train_mask], x[data.test_mask]
    targets = torch.nn.functional.one_hot(data.y[data.train_mask]).double()
    weights = torch.linalg.solve(train.T @ train + 10 * torch.eye(train.size(1)), train.T @ targets)
    return float(((test @ weights).argmax(1) == data.y[data.test_mask]).double().mean())


def neighbour_mean(data, x):
    total = x.clone().index_add_(0, data.edge_index[1], x[data.edge_index[0]])
    return total / (1 + torch.bincount(data.edge_index[1], minlength=data.num_nodes)).unsqueeze(1)


def test_neighbours_tell_the_label_far_better_than_a_vertex_alone(generated):
    one_hop = neighbour_mean(generated, generated.x)
    two_hops = neighbour_mean(generated, one_hop)
    alone, near, far = (ridge_accuracy(generated, x) for x in (generated.x, one_hop, two_hops))
    most_frequent = float(np.bincount(generated.y).max()) / 20_000
    assert alone > most_frequent + 0.05, "features help to tell the class"
    assert near > alone + 0.2 and far > near + 0.02, (alone, near, far)
    assert 0.8 < far < 0.95, "label noise limits the accuracy"


def test_ids_carry_no_locality(generated):
    distance = (generated.edge_index[0] - generated.edge_index[1]).abs().double().mean()
    assert float(distance) == pytest.approx(20_000 / 3, rel=0.02)
    halves = generated.y[:10_000].bincount() - generated.y[10_000:].bincount()
    assert int(halves.abs().max()) < 400


def test_a_partitioner_finds_the_communities(generated):
    pymetis = pytest.importorskip("pymetis")
    source, target = generated.edge_index.numpy()
    starts = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=20_000))])
    _, owner = pymetis.part_graph(4, pymetis.CSRAdjacency(adj_starts=starts, adjacent=target))
    owner = np.array(owner)
    assert (owner[source] != owner[target]).mean() < 0.75 / 2  # random parts cut three quarters


def test_splits_are_disjoint_and_have_the_requested_sizes():
    data = synthetic(num_vertices=1003)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(0).max() == 1
    assert masks.sum(1).tolist() == [80, 40, 201]
    everything = synthetic(num_vertices=1003, train_fraction=0.7, val_fraction=0.1, test_fraction=0.2)
    assert int(everything.train_mask.sum() + everything.val_mask.sum() + everything.test_mask.sum()) == 1003


def test_every_class_has_vertices():
    for num_vertices, num_classes in ((12, 12), (500, 40), (5000, 3)):
        data = synthetic(num_vertices=num_vertices, average_degree=2, num_classes=num_classes, label_noise=0)
        assert len(data.y.unique()) == num_classes


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_vertices": 1}, "num_vertices must be an integer >= 2, got 1"),
        ({"num_vertices": 1e5}, "num_vertices must be an integer >= 2, got 100000.0"),
        ({"num_classes": 0}, "num_classes must be an integer >= 1, got 0"),
        (
            {"num_vertices": 10, "num_classes": 11, "average_degree": 2},
            "num_classes must be <= num_vertices = 10, got 11",
        ),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"homophily": 1.5}, "homophily must be in [0, 1], got 1.5"),
        ({"label_noise": float("nan")}, "label_noise must be in [0, 1], got nan"),
        ({"train_fraction": 0.9}, "train_fraction + val_fraction + test_fraction must be <= 1, got 1.14"),
        ({"exponent": 2}, "exponent must be > 2, got 2"),
        ({"average_degree": 0}, "average_degree must be in (0, num_vertices - 1 = 99999], got 0"),
        ({"signal": -1}, "signal must be finite and >= 0, got -1"),
        ({"degree_cap": 10}, "degree_cap must be > average_degree = 20.0, got 10"),
        ({"num_vertices": 100, "homophily": 1, "locality": 1, "average_degree": 60}, "could place only "),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError) as error:
        synthetic(**arguments)
    assert words in str(error.value)


# --- synthetic, from the command line -----------------------------------------------------------------------


@pytest.mark.parametrize("key", list(inspect.signature(synthetic).parameters))
def test_an_odd_parameter_gives_a_graph_or_an_error_that_names_it(key):
    sizes = {"num_vertices": 60, "average_degree": 4, "num_features": 2, "community_size": 20}
    refused = 0
    for value in ODD_VALUES:
        try:
            assert_looks_as_promised(synthetic(**{**sizes, key: value}))
        except ValueError as error:
            assert key in str(error) or "GB of memory" in str(error) or "distinct edges" in str(error), (value, error)
            refused += 1
    assert refused >= 5


@pytest.mark.parametrize("num_vertices", [2, 3, 10, 12, 20, 21, 40, 41, 100])
def test_the_defaults_fit_small_graphs(num_vertices):
    for seed in range(5):
        data = synthetic(num_vertices=num_vertices, seed=seed)
        assert_looks_as_promised(data)
        assert int(data.y.max()) < min(12, num_vertices)
        assert abs(data.num_edges / num_vertices - min(20, max(1, (num_vertices - 1) / 2))) < 1


def test_a_graph_larger_than_memory_is_refused_before_it_is_generated():
    with pytest.raises(
        ValueError, match=r"need at least [\d,]+ GB of memory, and this machine has \d+ GB; ask for a smaller graph"
    ):
        synthetic(num_vertices=2**31)
    with pytest.raises(ValueError, match="num_vertices must be at most 3037000499, got 4294967296"):
        load_dataset("synthetic:num_vertices=4294967296")


@pytest.mark.parametrize(
    "file", ["raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz", "split/time/train.csv.gz"]
)
@pytest.mark.parametrize("contents", [b"no gzip", b"\x1f\x8b\x08\x00cut off", gzip.compress(b"a,b\nc\n", mtime=0)])
def test_an_error_about_a_damaged_ogb_file_names_the_folder(tmp_path, file, contents):
    write_ogb_folder(tmp_path / "ogbn_arxiv", split="time", node_year=True)
    assert load_dataset("ogbn-arxiv", root=tmp_path).num_nodes == 5
    (tmp_path / "ogbn_arxiv" / file).write_bytes(contents)
    with pytest.raises(ValueError, match=f"{tmp_path / 'ogbn_arxiv'}"):
        load_dataset("ogbn-arxiv", root=tmp_path)
