"""Laws of a topology that is stored in parts: it holds what the whole form holds, and reading one part opens no file of another part's edges."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import BATCH_SIZE, FANOUTS, contents, edit_manifest, forge_checksums
from forked_python import python
from graphs import random_data, random_hetero
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import NeighborLoader
from salientpp.graph.part import PartGraph
from salientpp.graph.typed import TypedGraph
from salientpp.store.directory.files import DatasetError
from salientpp.store.rows import JoinedRows, TensorRows, take_rows

ROOT = Path(__file__).parents[3]
CITES = ("paper", "cites", "paper")


def hetero(seed: int = 0) -> HeteroData:
    """Returns a graph in which one type has no vertices, and one relation no edges."""
    data = random_hetero(seed=seed)
    data["paper"].train_mask = torch.arange(60) % 3 == 0
    data["nobody"].num_nodes = 0
    data["nobody", "reads", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def one_type() -> Data:
    data = random_data(60, 300, directed=True, edge_attributes=True)
    data.age, data.when, data.weight = torch.arange(60) % 9, torch.arange(300) % 11, torch.rand(300)
    data.half = torch.rand(300).bfloat16()
    return data


def in_both_forms(
    tmp_path: Path, data: Data | HeteroData, num_parts: int, **options: Any
) -> tuple[salientpp.PartitionedGraph, salientpp.PartitionedGraph]:
    for topology in ("whole", "parts"):
        root = tmp_path / topology
        salientpp.partition(data, num_parts, root, FANOUTS, BATCH_SIZE, topology=topology, **options)
    whole, parts = (salientpp.load(tmp_path / topology, verify="full") for topology in ("whole", "parts"))
    return whole, parts


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def assert_equal_graphs(a: PartGraph, b: PartGraph) -> None:
    assert (a.node_types, a.num_vertices, a.edge_types) == (b.node_types, b.num_vertices, b.edge_types)
    assert all(map(same, a.node_time, b.node_time)) and (a.clock is None) == (b.clock is None)
    for pieces, others in zip(a.lists, b.lists, strict=True):
        for piece, other in zip(pieces, others, strict=True):
            assert (piece.first_target, piece.first_edge) == (other.first_target, other.first_edge)
            for name, value in vars(piece.relation).items():
                theirs = getattr(other.relation, name)
                assert same(value, theirs) if isinstance(value, Tensor) else value == theirs, name


def assert_joined(pieces: tuple[PartGraph, ...], whole: TypedGraph) -> None:
    """Checks that the lists of all parts, one after the other, equal the lists of the whole graph."""
    for number, relation in enumerate(whole.relations):
        lists = [piece for graph in pieces for piece in graph.lists[number]]
        ends = [piece.relation.indptr + piece.first_edge for piece in lists]
        assert all(int(piece.relation.indptr[0]) == 0 for piece in lists)
        assert torch.equal(torch.cat([ends[0][:1], *(end[1:] for end in ends)]), relation.indptr)
        for name in ("indices", "edge_weight", "edge_time", "source_time"):
            value = getattr(relation, name)
            each = [getattr(piece.relation, name) for piece in lists]
            assert torch.equal(torch.cat(each), value) if value is not None else not any(x is not None for x in each)
        if relation.edge_id is not None:
            numbers = [
                piece.first_edge + (torch.arange(piece.relation.indices.numel()) if edge_id is None else edge_id)
                for piece, edge_id in ((piece, piece.relation.edge_id) for piece in lists)
            ]
            assert torch.equal(torch.cat(numbers), relation.edge_id.long())
    for piece in pieces:
        assert all(map(same, piece.node_time, whole.node_time))


TIMES = [(None, None), (None, "time"), (None, "edge_time"), ("time", "time"), ("edge_time", "edge_time")]


@pytest.mark.parametrize(
    ("num_parts", "stored", "asked"),
    [
        *((3, *TIMES[0]), (1, *TIMES[1]), (3, *TIMES[2]), (8, *TIMES[3]), (3, *TIMES[4])),
        *rare(*((3, *times) for times in (TIMES[1], TIMES[3]))),
        *rare(*((1, *times) for times in (TIMES[0], *TIMES[2:]))),
        *rare(*((8, *times) for times in (*TIMES[:3], TIMES[4]))),
    ],
)
def test_both_forms_hold_the_same_graph_of_several_types(tmp_path, num_parts, stored, asked):
    cites = {CITES: {"train": torch.arange(0, 300, 7)}}
    options = {"time_attr": stored, "replicate": ("venue", "author"), "edge_split": cites}
    whole, parts = in_both_forms(tmp_path, hetero(1), num_parts, **options)
    assert (whole.topology, parts.topology) == ("whole", "parts") and parts.manifest["version"] == 4
    assert "topology='parts'" in repr(parts)
    for name in whole.edge_types:
        assert all(map(same, whole.lists[name], parts.lists[name]))
        rows, divided = whole.edge_rows_by_type()[name], parts.edge_rows_by_type()[name]
        assert rows.keys() == divided.keys() and all(same(rows[column], divided[column]) for column in rows)
    graphs = tuple(parts.part_graph(asked, "weight", part_id) for part_id in range(num_parts))
    for part_id, graph in enumerate(graphs):
        assert_equal_graphs(graph, whole.part_graph(asked, "weight", part_id))
        for name in whole.edge_types:
            for split in ("all", "train") if name == CITES else ("all",):
                assert same(whole.edge_split(split, part_id, name), parts.edge_split(split, part_id, name))
    assert_joined(graphs, whole.typed_graph(asked, "weight"))
    assert_joined(graphs, parts.typed_graph(asked, "weight"))


@pytest.mark.parametrize("options", [{}, {"time_attr": "age"}, {"time_attr": "when"}, {"store_as": {"x": "int8"}}])
def test_both_forms_hold_the_same_graph_of_one_type(tmp_path, options):
    if "store_as" in options:
        data = one_type()
        data.x = torch.rand(60, 32)
    else:
        data = one_type()
    whole, parts = in_both_forms(tmp_path, data, 4, **options)
    assert all(map(same, whole.lists[None], parts.lists[None]))
    assert same(whole.graph.indices, parts.graph.indices) and torch.equal(whole.book.offsets, parts.book.offsets)
    for part_id in range(4):
        time = options.get("time_attr")
        assert_equal_graphs(parts.part_graph(time, "weight", part_id), whole.part_graph(time, "weight", part_id))
        assert same(whole.vip(part_id), parts.vip(part_id))
        for name, rows in whole.node_rows(part_id).items():
            assert same(rows, parts.node_rows(part_id)[name])
    for name, rows in whole.edge_rows().items():
        assert same(rows, parts.edge_rows()[name]), name


@pytest.mark.parametrize("times", [[3.0, -3.0, 1.0], [2**62, -(2**62) - 1, 0]])
def test_lists_are_sorted_by_times_that_lie_far_apart(tmp_path, times):
    data = Data(edge_index=torch.tensor([[1, 2, 3], [0, 0, 0]]), when=torch.tensor(times), num_nodes=4)
    data.train_mask = torch.arange(4) == 0
    for part in in_both_forms(tmp_path, data, 1):
        loader = NeighborLoader(part, [-1], "train", time_attr="when", input_time=torch.tensor([0]), columns=())
        (batch,) = loader
        assert batch.when.tolist() == [time for time in sorted(times) if time <= 0]


def test_a_view_of_joined_parts_has_a_piece_for_each_part_on_disk(tmp_path):
    whole, parts = (part.joined([0, 1, 4], None) for part in in_both_forms(tmp_path, hetero(), 4))
    graph = parts.part_graph(part_id=1)
    assert [len(pieces) for pieces in graph.lists] == [3] * len(parts.edge_types)
    assert_equal_graphs(graph, whole.part_graph(part_id=1))
    assert_joined((parts.part_graph(part_id=0), graph), whole.typed_graph())
    every = whole.edge_rows_by_type()
    for part in (whole, parts):
        for name, own in part.part_edge_rows(1).items():
            end = part.num_edges if name is None else part.description.edges(name).num_edges
            assert own.rows.keys() == every[name].keys()
            for column, rows in own.rows.items():
                assert isinstance(rows, JoinedRows) and rows.shape[0] == end - own.first_edge
                assert same(take_rows(rows, torch.arange(rows.shape[0])), every[name][column][own.first_edge :])
    assert all(isinstance(rows, TensorRows) for own in parts.part_edge_rows(0).values() for rows in own.rows.values())
    for name in whole.edge_types:
        assert same(whole.edge_split("all", 1, name), parts.edge_split("all", 1, name))
    assert same(whole.vip(1, "paper"), parts.vip(1, "paper")), "probabilities of joined parts"


_OPENED = """
import sys
opened = set()
sys.addaudithook(lambda event, arguments: opened.add(str(arguments[0])) if event == "open" else None)
import salientpp
root, part_id, time_attr = sys.argv[1], int(sys.argv[2]), sys.argv[3]
part = salientpp.load(root, part_id=part_id)
part.part_graph(time_attr, "weight")
for name, rows in part.part_edge_rows().items():
    part.edge_split("all", type_=name)
part.edge_split("train", type_=("paper", "cites", "paper"))
part.split("train", type_="paper"), part.rows(), part.vip(type_="paper")
repr(part)
print("\\n".join(sorted(path[len(root) + 1:] for path in opened if path.startswith(root))))
"""


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
def test_opening_a_part_opens_no_file_of_another_part(tmp_path, time_attr):
    cites = {CITES: {"train": torch.arange(0, 300, 7)}}
    root = tmp_path / "d"
    salientpp.partition(hetero(), 3, root, FANOUTS, BATCH_SIZE, topology="parts", time_attr=time_attr, edge_split=cites)
    done = subprocess.run(
        [python(), "-c", _OPENED, str(root), "1", time_attr], cwd=ROOT, capture_output=True, text=True, check=True
    )
    opened = set(done.stdout.split())
    folders = {name.partition("/")[0] for name in opened if "/" in name}
    assert folders == {"part-00001"}, opened
    lists = {f"part-00001/e{number}.{name}.npy" for number in range(5) for name in ("indptr", "indices")}
    assert lists <= opened


def test_a_copy_of_one_part_has_no_other_parts_lists(tmp_path):
    whole, parts = in_both_forms(tmp_path, hetero(), 3, time_attr="edge_time")
    copy = salientpp.copy_to_disk(parts.root, tmp_path / "disk", parts=[1])
    files = contents(copy)
    expected = {
        name: data for name, data in contents(parts.root).items() if "/" not in name or name.startswith("part-00001/")
    }
    assert {**files, "parts.json": b""} == {**expected, "parts.json": b""}
    part = salientpp.load(copy, part_id=1, verify="full")
    assert_equal_graphs(part.part_graph("edge_time", "weight"), whole.part_graph("edge_time", "weight", 1))
    assert torch.equal(part.edge_split("all", type_=CITES), whole.edge_split("all", 1, CITES))
    refused = [
        lambda: part.lists,
        lambda: part.typed_graph(),
        lambda: part.edge_rows_by_type(),
        lambda: part.part_graph(part_id=2),
        lambda: part.part_edge_rows(0),
    ]
    for call in refused:
        with pytest.raises(DatasetError, match=r"is a copy without part [02]; its parts are 1; copy that part too"):
            call()
    assert salientpp.copy_to_disk(parts.root, tmp_path / "disk", parts=[0, 2]) == copy
    assert all(map(same, salientpp.load(copy).lists[CITES], whole.lists[CITES]))


def test_times_of_edges_of_two_kinds_are_refused_in_parts(tmp_path):
    data = hetero()
    data[CITES].edge_time = data[CITES].edge_time.float() + 0.5
    text = r"times of edges in parts must be integers in all edge types, or .* 'edge_time' is .*float32 of \('paper', 'cites', 'paper'\)"
    with pytest.raises(ValueError, match=text):
        salientpp.partition(data, 2, tmp_path / "d", FANOUTS, 8, time_attr="edge_time", topology="parts")
    assert list(tmp_path.iterdir()) == []
    for part in in_both_forms(tmp_path, data, 2):
        with pytest.raises(ValueError, match=text):
            part.part_graph("edge_time", part_id=0)
        assert part.typed_graph("edge_time").clock is not None


@pytest.mark.parametrize(
    ("time_attr", "weight_attr", "text"),
    [
        ("tiem", None, "The time attribute 'tiem' is neither"),
        (None, "x", "weight_attr must name an edge attribute, but no edges have an attribute 'x'"),
        (None, "negative", r"the weight of the edges into part \d must be finite and >= 0, got -1"),
        ("x", None, r"time_attr='x' of the vertices must be a tensor of shape \[60\], got \[60, "),
        ("edge_attr", None, r"the time of the edges into part \d must be a tensor of shape \[\d+\], got \[\d+, "),
    ],
)
def test_a_wrong_attribute_of_a_part_is_refused(tmp_path, time_attr, weight_attr, text):
    data = one_type()
    data.negative = -torch.ones(300)
    for part in in_both_forms(tmp_path, data, 2):
        with pytest.raises(ValueError, match=text):
            part.part_graph(time_attr, weight_attr, part_id=0)


def test_the_form_must_be_known(tmp_path):
    with pytest.raises(ValueError, match="topology must be 'whole' or 'parts', got 'part'"):
        salientpp.partition(one_type(), 2, tmp_path / "d", FANOUTS, BATCH_SIZE, topology="part")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.pop("topology"), "field topology is missing, expected 'parts'"),
        (lambda m: m.update(topology="whole"), "topology must be 'parts', got 'whole'"),
        (lambda m: m["edge_types"][1].pop("edge_offsets"), r"field edge_types\[1\].edge_offsets is missing"),
        (
            lambda m: m["edge_types"][1].update(edge_offsets=[0, 301, 300]),
            r"edge_types\[1\].edge_offsets must ascend from 0 to num_edges, 300, in num_parts \+ 1 = 3 numbers",
        ),
        (
            lambda m: m["edge_types"][1]["edge_offsets"].__setitem__(1, 1),
            r"files\['part-00000/e1.indices.npy'\] must be <i4 or <i8 \[1\], got",
        ),
        (
            lambda m: m["edge_types"][2]["splits"].update(train=[300, 0]),
            r"edge_types\[2\].splits\['train'\] must have one number .* at most the number of edges of the part",
        ),
        (lambda m: m.update(version=3), "files must have 'e0.edge_edge_attr.npy', but it is missing"),
    ],
)
def test_an_error_names_the_invalid_field(tmp_path, change, text):
    cites = {CITES: {"train": torch.arange(0, 300, 7)}}
    root = tmp_path / "d"
    salientpp.partition(hetero(), 2, root, FANOUTS, BATCH_SIZE, topology="parts", edge_split=cites)
    edit_manifest(root, change, checksum=True)
    with pytest.raises(DatasetError, match=f"does not describe a dataset directory: {text}"):
        salientpp.load(root)


def test_a_changed_list_is_found(tmp_path):
    root = tmp_path / "d"
    salientpp.partition(one_type(), 2, root, FANOUTS, BATCH_SIZE, topology="parts")
    name = "part-00001/e0.indices.npy"
    part = salientpp.load(root, part_id=0)
    raw = bytearray((root / name).read_bytes())
    raw[-1] = 127  # a source far beyond the last vertex
    (root / name).write_bytes(raw)
    salientpp.load(root, part_id=0)
    for call in (lambda: salientpp.load(root, part_id=1), lambda: part.part_graph(part_id=1)):
        with pytest.raises(DatasetError, match=f"{name} was altered"):
            call()
    forge_checksums(root, name)
    with pytest.raises(DatasetError, match=f"copy part-00001/e0.indptr.npy and {name} again"):
        salientpp.load(root, verify="full")


def test_the_manifest_lists_the_first_edge_of_every_part(tmp_path):
    whole, parts = in_both_forms(tmp_path, hetero(), 3)
    manifest = json.loads((parts.root / "manifest.json").read_text())
    for entry in manifest["edge_types"]:
        name = tuple(entry["name"])
        offsets = whole.books[name[2]].offsets
        assert entry["edge_offsets"] == whole.lists[name][0][offsets].tolist()
