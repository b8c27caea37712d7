"""Laws of converted graphs with keys: they hold the keys and the attributes of edges, whatever the memory and the batches of the keys' file."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from directories import contents
from keyed_graphs import (
    CONTAINS,
    PLACED,
    PLAIN,
    REVERSE,
    as_rows,
    converted,
    edges_of,
    keyed,
    rows_of,
    source_of,
    taken,
    write_keys,
)
from torch_geometric.data import HeteroData

from salientpp import NeighborLoader, Progress
from salientpp.cli import main
from salientpp.datasets import load_dataset
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import write_converted
from salientpp.datasets.converted.directory import read_converted
from salientpp.datasets.converted.pieces import Source, Vertices
from salientpp.store.directory.origin import table_origin
from salientpp.store.key_table import KEYS_PER_BATCH, KeyTable, write_key_file


@pytest.fixture(scope="module")
def graph():
    return keyed()


@pytest.fixture(scope="module")
def root(graph, tmp_path_factory) -> Path:
    return converted(graph, tmp_path_factory.mktemp("converted") / "shop")


def test_a_converted_graph_has_keys_and_attributes_of_edges(graph, root):
    data = load_dataset(f"converted:{root}", verify=True)
    for relation, ends in graph.edges.items():
        adj_t = data[relation].adj_t
        target = torch.repeat_interleave(adj_t.crow_indices().diff())
        assert np.array_equal(torch.stack([adj_t.col_indices().long(), target]).numpy(), ends)
        for name, rows in graph.columns[relation].items():
            assert torch.equal(data[relation][name], rows) and data[relation][name].dtype == rows.dtype
            assert data[relation].is_edge_attr(name)
    for type_, table in graph.keys.items():
        assert data[type_].key_table.rows(range(table.num_rows)).equals(table)
        assert list(data[type_].key_table.batches(7))[1].num_rows == 7
    assert "key_table" not in data["thing"]


def test_the_manifest_has_version_3_columns_keys_and_the_origin(root):
    manifest = read_converted(root)
    assert manifest["version"] == 3
    assert {tuple(each["name"]): each["columns"] for each in manifest["edge_types"]} == {
        PLACED: ["time", "amount"],
        REVERSE: ["time", "amount"],
        CONTAINS: [],
    }
    assert [each["keys"] for each in manifest["node_types"]] == [
        [{"name": "customer_id", "type": "large_string"}],
        [{"name": "shop", "type": "int64"}, {"name": "code", "type": "large_string"}],
        None,
    ]
    options = {"deduplicate": False, "dtype": {}, "finite": False, "encode_as": None}
    files = [{"address": "customers.parquet", "size": 2_000_000}]
    assert manifest["tables"] == {"tables": {"nodes.customer": {"from": files}}, "options": options}
    assert table_origin(root) == manifest["tables"]


def test_a_graph_without_keys_keeps_its_version(tmp_path):
    source = Source("plain", {None: Vertices(5)}, {None: edges_of(np.array([[0, 1], [1, 2]]), {})})
    root = write_converted(source, tmp_path / "plain", Budget(0, 2**20), PLAIN)
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["version"] == 1 and "tables" not in manifest
    assert manifest["node_types"][0].keys() == {"name", "num_vertices", "columns"}
    assert manifest["edge_types"][0].keys() == {"name", "num_edges"}


@pytest.mark.parametrize("working, rows_per_batch", [(3000, 50), (2**22, 1), (20_000, 140), (700, 13)])
def test_the_result_depends_neither_on_memory_nor_on_the_batches_of_keys(
    graph, root, tmp_path, working, rows_per_batch
):
    other = converted(graph, tmp_path / "shop", working, rows_per_batch)
    assert contents(other) == contents(root)


def test_compressed_keys_give_the_same_file(graph, root, tmp_path):
    source = source_of(graph, tmp_path / "keys")
    for type_, table in graph.keys.items():
        write_keys(tmp_path / "keys" / f"{type_}.arrow", table, 33, "zstd")
    other = write_converted(source, tmp_path / "shop", Budget(0, 2**20), PLAIN)
    assert contents(other) == contents(root)


def test_batches_of_a_file_have_a_fixed_size(tmp_path):
    table = pa.table({"k": pa.array(np.arange(KEYS_PER_BATCH + 5))})
    sources = [table.to_batches(max_chunksize=most) for most in (10**9, 40_000)]
    written = []
    for number, batches in enumerate(sources):
        with (tmp_path / f"{number}.arrow").open("wb") as file:
            assert write_key_file(file, table.schema, batches) == table.num_rows
        written.append((tmp_path / f"{number}.arrow").read_bytes())
    assert written[0] == written[1]
    found = KeyTable(tmp_path / "0.arrow")
    assert [batch.num_rows for batch in found.batches()] == [KEYS_PER_BATCH, 5]
    ids = np.random.default_rng(0).integers(-1, found.num_rows, 1000)
    assert found.rows(ids)["k"].to_pylist() == [None if each < 0 else each for each in ids]


class Stopped(Exception):
    pass


class StopsAt(Progress):
    """Stops a conversion at the beginning of its step number ``step``."""

    def __init__(self, step: int) -> None:
        self.left = step

    def begin(self, *args, **kwargs) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped


def test_a_stopped_conversion_continues(graph, root, tmp_path):
    stops = 0
    while True:
        try:
            converted(graph, tmp_path / "shop", progress=StopsAt(1))  # each run finishes a step
            break
        except Stopped:
            stops += 1
    assert stops > 10 and contents(tmp_path / "shop") == contents(root)


def test_a_graph_with_keys_is_replaced_by_overwrite(graph, root, tmp_path):
    converted(keyed(5), tmp_path / "shop")
    converted(graph, tmp_path / "shop", overwrite=True)
    assert contents(tmp_path / "shop") == contents(root)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"deduplicate": True}, "have attributes .time, amount., so deduplicate is not possible"),
        ({"dtype": {"amount": "fp16", "time": "fp16"}}, "time cannot be stored as fp16, since it holds torch.int64"),
    ],
)
def test_options_that_do_not_fit_attributes_of_edges_are_refused(graph, tmp_path, change, words):
    source = source_of(graph, tmp_path / "keys")
    with pytest.raises(ValueError, match=words):
        write_converted(source, tmp_path / "shop", Budget(0, 2**20), dataclasses.replace(PLAIN, **change))


def test_attributes_of_edges_can_have_another_dtype(graph, tmp_path):
    source = source_of(graph, tmp_path / "keys")
    options = dataclasses.replace(PLAIN, dtype={"amount": "bf16"})
    data = load_dataset(f"converted:{write_converted(source, tmp_path / 'shop', Budget(0, 2**20), options)}")
    assert torch.equal(data[PLACED].amount, graph.columns[PLACED]["amount"].bfloat16())


@pytest.mark.parametrize("name", ["undirected", "both_directions"])
def test_edges_with_attributes_are_not_doubled(graph, tmp_path, name):
    with pytest.raises(ValueError, match="have attributes .* since each edge keeps its row"):
        write_converted(source_of(graph, tmp_path / "k", **{name: True}), tmp_path / "shop", Budget(0, 2**20), PLAIN)


@pytest.mark.parametrize("working", [700, 2**22])
def test_edges_that_do_not_ascend_are_refused(graph, tmp_path, working):
    ends = graph.edges[PLACED].copy()
    ends[1, 250] = ends[1, 249] - 1
    source = source_of(graph, tmp_path / "keys")
    source = dataclasses.replace(source, edges={PLACED: edges_of(ends, graph.columns[PLACED])})
    with pytest.raises(ValueError, match="edges customer placed order must ascend by target, but edge 250 has"):
        write_converted(source, tmp_path / "shop", Budget(0, working), PLAIN)


@pytest.mark.parametrize("number, words", [(399, "has? .*but ends after 399"), (401, "one per edge, but has more")])
def test_every_edge_needs_a_row(graph, tmp_path, number, words):
    columns = {"time": torch.zeros(number)}
    source = source_of(graph, tmp_path / "keys")
    source = dataclasses.replace(source, edges={PLACED: edges_of(graph.edges[PLACED], columns)})
    with pytest.raises(ValueError, match="time must have 400 rows, one per edge"):
        write_converted(source, tmp_path / "shop", Budget(0, 2**20), PLAIN)


@pytest.mark.parametrize("name", ["adj_t", "indices", "n_id", "a/b", "", "x" * 201])
def test_names_that_no_attribute_of_edges_can_have_are_refused(graph, tmp_path, name):
    source = source_of(graph, tmp_path / "keys")
    edges = edges_of(graph.edges[PLACED], {name: torch.zeros(400)})
    with pytest.raises(ValueError, match="cannot have this name"):
        write_converted(dataclasses.replace(source, edges={PLACED: edges}), tmp_path / "g", Budget(0, 2**20), PLAIN)


@pytest.mark.parametrize(
    "table, words",
    [
        (pa.table({"k": pa.array(["a", None, "b"], pa.large_string())}), "key column 'k' must have no nulls, got 1"),
        (pa.table({"k": pa.array(["a", "b"], pa.large_string())}), "must have a row per vertex, expected 3, got 2"),
        (pa.table({"k": pa.array(["a", "b", "c"])}), r"types in which keys are stored \(large_string\), got string"),
        (pa.table([[1], [2]], names=["k", "k"]), "key columns must have distinct names, got k, k"),
        (pa.table({"k": pa.array([1.5, 2.0, 3.0])}), "a key must hold .*, got double"),
    ],
)
def test_keys_that_cannot_be_stored_are_refused(tmp_path, table, words):
    keys = write_keys(tmp_path / "keys.arrow", table)
    source = Source("tables:t", {"a": Vertices(3, keys=keys)}, {})
    with pytest.raises(ValueError, match=words):
        write_converted(source, tmp_path / "g", Budget(0, 2**20), PLAIN)


def test_a_damaged_file_of_keys_is_refused(tmp_path):
    (tmp_path / "keys.arrow").write_bytes(b"ARROW1\0\0 nothing")
    source = Source("tables:t", {"a": Vertices(3, keys=tmp_path / "keys.arrow")}, {})
    with pytest.raises(ValueError, match="keys.arrow is damaged, or not an Arrow file"):
        write_converted(source, tmp_path / "g", Budget(0, 2**20), PLAIN)


def test_a_homogeneous_graph_has_keys_and_named_attributes(tmp_path):
    table = pa.table({"id": pa.array([30, 10, 20])})
    keys = write_keys(tmp_path / "keys.arrow", table)
    ends = np.array([[0, 2, 1], [0, 1, 2]])
    vertices = {None: Vertices(3, {"x": rows_of(torch.zeros(3, 1))}, keys=keys)}
    source = Source("tables:t", vertices, {None: edges_of(ends, {"edge_time": torch.tensor([5, 6, 7])})})
    data = load_dataset(f"converted:{write_converted(source, tmp_path / 'g', Budget(0, 2**20), PLAIN)}")
    assert data.edge_time.tolist() == [5, 6, 7] and as_rows(data.key_table.rows([2, 0])) == [(20,), (30,)]
    source = dataclasses.replace(source, edges={None: edges_of(ends, {"time": torch.tensor([5, 6, 7])})})
    with pytest.raises(ValueError, match="'time' cannot have this name, .* rename it, with 'edge' in the new name"):
        write_converted(source, tmp_path / "h", Budget(0, 2**20), PLAIN)


def test_empty_types_and_relations_convert(tmp_path):
    table = pa.table({"k": pa.array([], pa.large_string())})
    keys = write_keys(tmp_path / "keys.arrow", table)
    empty = {"time": torch.zeros(0, dtype=torch.int64)}
    vertices = {"a": Vertices(0, keys=keys), "b": Vertices(2)}
    source = Source("tables:t", vertices, {("a", "to", "b"): edges_of(np.zeros((2, 0), dtype=np.int64), empty)})
    data = load_dataset(f"converted:{write_converted(source, tmp_path / 'g', Budget(0, 2**20), PLAIN)}")
    assert data["a"].key_table.rows([]).num_rows == 0 and data["a", "to", "b"].time.tolist() == []
    assert data["a"].key_table.rows([-1])["k"].to_pylist() == [None]


# --- key tables -------------------------------------------------------------------------------------------


def test_a_key_table_gives_any_rows_in_the_order_of_the_ids(graph, root):
    keys, table = KeyTable(root / "n1.keys.arrow"), graph.keys["order"]
    for ids in ([3, 0, 3, 139, -1, 7], [], [-1], np.array([5, 4], dtype=np.int32), torch.tensor([[1, 2]])):
        flat = np.asarray(ids, dtype=np.int64).flatten().tolist()
        assert as_rows(keys.rows(ids)) == taken(table, flat)
    assert keys.names == ["shop", "code"] and keys.num_rows == 140 and keys.schema == table.schema


@pytest.mark.parametrize(
    "ids, words",
    [([0, 140], r"must be in \[0, 140\), or -1 for padding, got 140 at position 1"), ([-2], "got -2"), ([0.5], "integers, got torch.float32")],
)  # fmt: skip
def test_ids_without_keys_are_refused(root, ids, words):
    with pytest.raises(ValueError, match=words):
        KeyTable(root / "n1.keys.arrow").rows(ids)


def test_a_key_table_is_copied_by_its_path(root):
    keys = KeyTable(root / "n1.keys.arrow")
    assert keys.rows([1]).num_rows == 1
    for other in (pickle.loads(pickle.dumps(keys)), copy.copy(keys), copy.deepcopy(keys)):
        assert other == keys and hash(other) == hash(keys) and other.rows([1]).equals(keys.rows([1]))
    assert len(pickle.dumps(keys)) < 500
    assert repr(keys) == f"KeyTable({str(root / 'n1.keys.arrow')!r}, shop, code, num_rows=140)"
    assert repr(KeyTable("nothing.arrow")).endswith("nothing.arrow')")


def test_a_damaged_or_missing_key_table_says_so(tmp_path):
    (tmp_path / "empty.arrow").touch()
    for name, words in (("empty", "is damaged, or not a file of keys"), ("none", "cannot be read .No such file")):
        with pytest.raises((ValueError, OSError), match=words):
            KeyTable(tmp_path / f"{name}.arrow").rows([0])


def test_a_graph_with_keys_opens_without_pyarrow(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    data = load_dataset(f"converted:{root}")
    assert data[PLACED].time.numel() == 400 and "KeyTable" in repr(data["customer"].key_table)
    with pytest.raises(ImportError, match=r"pip install salientpp\[tables\]"):
        data["customer"].key_table.rows([0])


def test_altered_keys_are_found(graph, tmp_path):
    root = converted(graph, tmp_path / "shop")
    path = root / "n0.keys.arrow"
    path.write_bytes(path.read_bytes().replace(b"customer", b"consumer", 1))
    with pytest.raises(ValueError, match=r"n0.keys.arrow was altered: .* convert again"):
        load_dataset(f"converted:{root}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_graph_with_keys_are_those_without(root, num_workers):
    def batches(data: HeteroData):
        torch.manual_seed(1)
        options = {"num_neighbors": [3, 2], "batch_size": 16, "input_nodes": "customer", "num_workers": num_workers}
        return list(NeighborLoader(data, **options))

    data, without = (load_dataset(f"converted:{root}") for _ in range(2))
    for type_ in ("customer", "order"):
        del without[type_].key_table
    for batch, other in zip(batches(data), batches(without), strict=True):
        for type_ in data.node_types:
            assert torch.equal(batch[type_].n_id, other[type_].n_id) and torch.equal(batch[type_].x, other[type_].x)
        for relation in data.edge_types:
            for part in ("crow_indices", "col_indices"):
                assert torch.equal(*(getattr(each[relation].adj_t, part)() for each in (batch, other)))
        for name, rows in data[PLACED].items():
            if name != "adj_t":
                assert torch.equal(batch[PLACED][name], rows[batch[PLACED].e_id])
        keys = batch["order"].key_table.rows(batch["order"].n_id)
        assert keys.equals(data["order"].key_table.rows(batch["order"].n_id))


def test_info_shows_keys_and_attributes_of_edges(root, capsys):
    assert main(["info", str(root)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "keys of customer customer_id large_string" in out and "keys of order shop int64, code large_string" in out
    assert "400; time int64, amount float32 [2]" in out
