"""Laws of keys in dataset directories: each vertex has its key, and each key its vertex, whatever the parts and the host's files."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
from pathlib import Path

import distributed
import hypothesis.strategies as st
import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from directories import contents, edit_manifest
from hypothesis import given, settings
from keyed_graphs import SIZES, as_rows, converted, keyed, taken, write_keys
from storage_hosts import TOKEN, serving
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import NeighborLoader
from salientpp.cli import main
from salientpp.datasets import load_dataset
from salientpp.store.directory import stored_keys, type_files
from salientpp.store.directory.files import DatasetError
from salientpp.store.key_table import KeyTable

KEYED = ("customer", "order")
FANOUTS, BATCH = [3, 2], 16


@pytest.fixture(scope="module")
def graph():
    return keyed()


@pytest.fixture(scope="module")
def shop(graph, tmp_path_factory) -> Path:
    return converted(graph, tmp_path_factory.mktemp("converted") / "shop")


def partitioned(shop: Path, root: Path, num_parts: int = 3, **options) -> salientpp.PartitionedGraph:
    data = load_dataset(f"converted:{shop}")
    given = {"method": "random", "replicate": [], **options}
    return salientpp.partition(data, num_parts, root, FANOUTS, BATCH, **given)


@pytest.fixture(scope="module")
def root(shop, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "shop-3"
    partitioned(shop, path)
    return path


def assert_keys_are_those_of(part: salientpp.PartitionedGraph, graph) -> None:
    for type_ in KEYED:
        ids = torch.randperm(SIZES[type_], generator=torch.Generator().manual_seed(3))
        ids = torch.cat([ids, torch.tensor([-1]), ids[:5]])
        keys = part.keys_of(ids, type_)
        original = part.original_id(ids, type_).tolist()
        assert keys.column_names == graph.keys[type_].column_names
        assert as_rows(keys) == taken(graph.keys[type_], original)
        assert torch.equal(part.ids_of(keys, type_), ids)


@pytest.mark.parametrize("topology", ["whole", "parts"])
@pytest.mark.parametrize(
    "num_parts, options", [(1, {}), (3, {}), (5, {"order": "original"}), (2, {"replicate": ["order"]}), (3, {"replicate": [*SIZES]})]
)  # fmt: skip
def test_each_vertex_has_its_key_and_each_key_its_vertex(graph, shop, tmp_path, num_parts, options, topology):
    part = partitioned(shop, tmp_path / "parts", num_parts, topology=topology, **options)
    assert_keys_are_those_of(part, graph)
    assert_keys_are_those_of(salientpp.load(tmp_path / "parts", part_id=0, verify="full"), graph)
    own = part.split("all", num_parts - 1, "customer")
    assert part.keys_of(own, "customer").num_rows == own.numel()


def test_more_parts_than_vertices_have_keys(graph, shop, tmp_path):
    assert_keys_are_those_of(partitioned(shop, tmp_path / "parts", 200), graph)
    salientpp.load(tmp_path / "parts", part_id=0, verify="full")


def test_joined_parts_have_the_keys_of_the_parts_on_disk(graph, root):
    whole = salientpp.load(root)
    for view in (
        whole.joined((0, 2, 3), 0),
        whole.joined((0, 1, 3), 1),
        copy.copy(whole),
        pickle.loads(pickle.dumps(whole)),
    ):
        assert_keys_are_those_of(view, graph)


def test_unknown_keys_and_keys_with_nulls_have_no_vertex(root):
    part = salientpp.load(root)
    keys = part.keys_of(torch.tensor([4, 9]), "order").to_pylist()
    columns = {
        "shop": [keys[0]["shop"], 99, None, keys[1]["shop"]],
        "code": [keys[0]["code"], "1é", "1é", keys[1]["code"]],
    }
    assert part.ids_of(columns, "order").tolist() == [4, -1, -1, 9]
    assert part.ids_of({"shop": [None, None], "code": [None, None]}, "order").tolist() == [-1, -1]
    assert part.ids_of(["nobody", None, ""], "customer").tolist() == [-1] * 3
    assert part.ids_of({"shop": [], "code": []}, "order").tolist() == []
    assert part.ids_of([], "customer").dtype == torch.int64
    # Equal columns of two keys do not make a key.
    mixed = {"shop": [keys[0]["shop"]], "code": [keys[1]["code"]]}
    if keys[0] != keys[1]:
        found = part.ids_of(mixed, "order").tolist()[0]
        assert found == -1 or part.keys_of(torch.tensor([found]), "order").to_pylist()[0] == {
            "shop": keys[0]["shop"], "code": keys[1]["code"]
        }  # fmt: skip


def test_keys_come_in_many_forms(root):
    part = salientpp.load(root)
    ids = torch.tensor([3, 50, 7, 7])
    table = part.keys_of(ids, "customer")
    values = table["customer_id"].to_pylist()
    several = pa.chunked_array([pa.array(values[:1]), pa.array(values[1:])])
    for keys in (
        table, table.append_column("more", pa.array([0.5] * 4)), table.to_batches()[0], pandas.DataFrame({"more": 1.5, "customer_id": values}),
        {"customer_id": values, "ragged": [1]}, values, tuple(values), np.array(values), np.array(values, dtype=object), pandas.Series(values),
        pa.array(values),        several, table["customer_id"], pa.array(values).dictionary_encode(), pa.array(values, pa.large_string()),
        pa.table({"customer_id": pa.chunked_array([pa.array([each]).dictionary_encode() for each in values])}),
        pa.RecordBatchReader.from_batches(table.schema, table.to_batches()),
    ):  # fmt: skip
        assert torch.equal(part.ids_of(keys, "customer"), ids), type(keys)
    orders = part.keys_of(ids, "order")
    narrow = orders.set_column(0, "shop", orders["shop"].cast(pa.int8()))
    assert torch.equal(part.ids_of(narrow, "order"), ids)
    assert torch.equal(
        part.ids_of({"code": orders["code"], "shop": torch.tensor(orders["shop"].to_pylist()).numpy()}, "order"), ids
    )


@pytest.mark.parametrize(
    "keys, type_, words",
    [
        ({"customer": ["a"]}, "customer", "expected one column 'customer_id', got none among customer. Did you mean customer.$"),
        (["a", "b"], "order", "a key has several columns, got one; pass a table with the columns shop, code"),
        ({"shop": [1, 2], "code": ["a"]}, "order", "these cannot be read as keys"),
        ({"shop": ["a"], "code": ["a"]}, "order", "must have the same type, got large_string here and int64"),
        ([1.5], "customer", "a key must hold .* got double"),
        ([object()], "customer", "these cannot be read as keys"),
        (5, "customer", "these cannot be read as keys"),
        ("ann", "customer", "cannot be read as keys .a single value; put it into a list"),
        (["a"], "thing", "stores no keys of 'thing'; these types have keys: 'customer', 'order'"),
        (["a"], None, "type_ must be a node type of .* .'customer', 'order', 'thing'., got None"),
        (pa.table([[1], [2], ["a"]], names=["shop", "shop", "code"]), "order", "expected one column 'shop', got 2 among"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_read_are_refused(root, keys, type_, words):
    with pytest.raises(ValueError, match=words):
        salientpp.load(root).ids_of(keys, type_)


@pytest.mark.parametrize(
    "ids, type_, words",
    [
        ([0, 90], "customer", r"n_id of 'customer' must be in \[0, 90\), or -1 for padding, got 90 at position 1"),
        ([0.5], "customer", "must be integers"),
        ([0], "thing", "stores no keys of 'thing'"),
        ([0], "things", "type_ must be a node type"),
    ],
)
def test_ids_without_keys_are_refused(root, ids, type_, words):
    with pytest.raises(ValueError, match=words):
        salientpp.load(root).keys_of(torch.tensor(ids), type_)


def test_different_keys_with_one_hash_are_told_apart(graph, shop, tmp_path, monkeypatch):
    def few(columns):
        return np.array([len(str(row)) % 3 for row in zip(*(each.to_pylist() for each in columns))], dtype=np.uint64)

    for module in (stored_keys, type_files):
        monkeypatch.setattr(module, "key_hash", few)
    part = partitioned(shop, tmp_path / "parts")
    assert_keys_are_those_of(part, graph)
    assert part.ids_of(["customer unknown", "b"], "customer").tolist() == [-1, -1]
    salientpp.load(tmp_path / "parts", verify="full")


@pytest.mark.parametrize("num_at_once", [1, 7])
def test_many_keys_are_looked_up_in_pieces(graph, root, monkeypatch, num_at_once):
    monkeypatch.setattr(stored_keys, "_KEYS_AT_ONCE", num_at_once)
    assert_keys_are_those_of(salientpp.load(root), graph)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 1000), st.booleans(), st.sampled_from([2, 5, 1000]))
def test_any_keys_are_found(tmp_path_factory, num_parts, seed, replicated, most):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    table = pa.table(
        {
            "a": pa.array(rng.permutation(size) - 7),
            "b": pa.array([str(each) for each in rng.integers(0, 3, size)], pa.large_string()),
        }
    )
    folder = tmp_path_factory.mktemp("any")
    data = HeteroData()
    data["paper"].x = torch.zeros(size, 1)
    data["paper", "cites", "paper"].edge_index = torch.from_numpy(rng.integers(0, size, (2, 50)))
    data["paper"].key_table = KeyTable(write_keys(folder / "keys.arrow", table, most))
    method = {"paper": torch.from_numpy(rng.integers(0, num_parts, size))}  # some parts may be empty
    options = {"method": method, "replicate": ["paper"] if replicated else []}
    part = salientpp.partition(data, num_parts, folder / "parts", [2], 4, **options)
    wanted = pa.table({"a": pa.array(rng.integers(-9, 60, 40)), "b": [str(each) for each in rng.integers(0, 4, 40)]})
    known = {row: number for number, row in enumerate(as_rows(table))}
    expected = [known.get(row, -1) for row in as_rows(wanted)]
    assert part.original_id(part.ids_of(wanted, "paper"), "paper").tolist() == expected
    shutil.rmtree(folder)


def test_vertices_of_batches_have_keys(graph, shop, tmp_path):
    part = partitioned(shop, tmp_path / "one", 1)
    loader = NeighborLoader(part, num_neighbors=[3, 2], batch_size=16, input_nodes=("customer", "train"))
    batches = list(loader)
    assert len(batches) == 4
    for batch in batches:
        for type_ in KEYED:
            n_id = batch[type_].n_id
            keys = part.keys_of(n_id, type_)
            assert as_rows(keys) == taken(graph.keys[type_], part.original_id(n_id, type_).tolist())
            assert torch.equal(part.ids_of(keys, type_), n_id)


def test_a_directory_says_what_to_use_instead_of_key_table(root):
    with pytest.raises(AttributeError, match=r"part.keys_of\(n_id, type\) has the keys of vertices"):
        _ = salientpp.load(root).key_table


# --- directories ------------------------------------------------------------------------------------------


def test_the_manifest_has_version_6_and_names_the_key_columns(root, capsys):
    manifest = json.loads((root / "manifest.json").read_text())
    assert (manifest["version"], manifest["topology"]) == (6, "whole")
    assert [each["keys"] for each in manifest["node_types"]] == [
        [{"name": "customer_id", "type": "large_string"}],
        [{"name": "shop", "type": "int64"}, {"name": "code", "type": "large_string"}],
        None,
    ]
    assert main(["info", str(root), "--verify"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "format version 6" in out and "keys of order shop int64, code large_string" in out
    assert "keys shop, code" in repr(salientpp.load(root))


def test_a_graph_without_keys_keeps_its_version(shop, tmp_path):
    data = load_dataset(f"converted:{shop}")
    for type_ in KEYED:
        del data[type_].key_table
    part = salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH, method="random")
    assert part.manifest["version"] == 2 and "keys" not in part.manifest["node_types"][0]
    with pytest.raises(
        ValueError, match="stores no keys of 'order'; graphs that `salientpp convert tables:FILE` writes"
    ):
        part.keys_of(torch.tensor([0]), "order")


def test_integers_above_2_63_are_found_in_lists(tmp_path):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3, x=torch.ones(3, 1))
    values = [2**63, 2**64 - 1, 5]
    data.key_table = KeyTable(write_keys(tmp_path / "keys.arrow", pa.table({"id": pa.array(values, pa.uint64())})))
    salientpp.partition(data, 1, tmp_path / "graph", FANOUTS, BATCH)
    part = salientpp.load(tmp_path / "graph")
    for keys in values, {"id": values}:
        assert part.original_id(part.ids_of(keys)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="these cannot be read as keys"):
        part.ids_of([2**64])


def test_a_homogeneous_graph_stores_keys(tmp_path):
    table = pa.table({"id": pa.array([30, 10, 20, 50])})
    data = Data(x=torch.zeros(4, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    data.key_table = KeyTable(write_keys(tmp_path / "keys.arrow", table))
    part = salientpp.partition(data, 2, tmp_path / "parts", [2], 2, seeds="all", method="random")
    assert part.original_id(part.ids_of([50, 11, 10])).tolist() == [3, -1, 1]
    assert as_rows(part.keys_of(torch.arange(4))) == taken(table, part.original_id(torch.arange(4)).tolist())
    assert part.manifest["version"] == 6


@pytest.mark.parametrize(
    "table, words",
    [
        (pa.table({"k": pa.array([1, 2, 3])}), r"data\['customer'\].key_table must have one row per vertex, expected 90, got 3"),
        (pa.table({"k": pa.array(range(90), pa.int32())}), r"key_table: key columns must have the types in which keys are stored \(int64\), got int32"),
        (pa.table({"k": pa.array([None, *range(89)])}), "the key column 'k' must have no nulls, got 1"),
    ],
)  # fmt: skip
def test_key_tables_that_cannot_be_stored_are_refused(shop, tmp_path, table, words):
    data = load_dataset(f"converted:{shop}")
    data["customer"].key_table = KeyTable(write_keys(tmp_path / "keys.arrow", table))
    with pytest.raises(ValueError, match=words):
        salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH, method="random")


@pytest.mark.parametrize("replicate", [[], ["customer"]])
def test_a_rewritten_directory_has_the_bytes_of_a_partitioned_one(shop, tmp_path, replicate):
    for topology in ("whole", "parts"):
        partitioned(shop, tmp_path / topology, topology=topology, replicate=replicate)
    salientpp.rewrite_topology(tmp_path / "whole", tmp_path / "to parts", "parts")
    salientpp.rewrite_topology(tmp_path / "parts", tmp_path / "to whole", "whole")
    assert contents(tmp_path / "to parts") == contents(tmp_path / "parts")
    assert contents(tmp_path / "to whole") == contents(tmp_path / "whole")


class Stopped(Exception):
    pass


def test_a_stopped_partition_continues_with_its_keys(shop, root, tmp_path, monkeypatch):
    stop, write = 0, type_files.write_key_file

    def stopping(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped
        return write(*args)

    monkeypatch.setattr(type_files, "write_key_file", stopping)
    while True:
        left = stop
        try:
            partitioned(shop, tmp_path / "parts")
            break
        except Stopped:
            stop = 1
    assert contents(tmp_path / "parts") == contents(root)


def test_a_partition_of_other_keys_does_not_continue(shop, tmp_path, monkeypatch):
    def stopping(*args):
        raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(type_files, "write_key_file", stopping)
        partitioned(shop, tmp_path / "parts")
    other = shutil.copyfile(shop / "n0.keys.arrow", tmp_path / "n0.keys.arrow")  # the same keys, with another time
    data = load_dataset(f"converted:{shop}")
    data["customer"].key_table = KeyTable(other)
    with pytest.raises(ValueError, match="was begun by another partition: .*keys was"):
        salientpp.partition(data, 3, tmp_path / "parts", FANOUTS, BATCH, method="random", replicate=[])


def test_overwrite_replaces_a_directory_with_keys(shop, root, tmp_path):
    partitioned(shop, tmp_path / "parts", 2)
    partitioned(shop, tmp_path / "parts", overwrite=True)
    assert contents(tmp_path / "parts") == contents(root)
    (tmp_path / "parts" / "part-00000" / "mine.arrow").touch()
    with pytest.raises(ValueError, match="also holds part-00000/mine.arrow"):
        partitioned(shop, tmp_path / "parts", overwrite=True)


@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_a_copy_has_the_keys_of_its_parts(graph, shop, tmp_path, topology):
    whole = partitioned(shop, tmp_path / "shop", topology=topology)
    copied = salientpp.copy_to_disk(tmp_path / "shop", tmp_path / "local", parts=[1])
    assert not (copied / "part-00000").exists()
    part = salientpp.load(copied, part_id=1)
    own, others = part.split("all", 1, "customer"), whole.split("all", 2, "customer")
    keys = part.keys_of(own, "customer")
    assert as_rows(keys) == taken(graph.keys["customer"], part.original_id(own, "customer").tolist())
    assert torch.equal(part.ids_of(keys, "customer"), own)
    assert part.ids_of(["nobody"], "customer").tolist() == [-1]
    words = "is a copy without part 2; its parts are 1; copy that part too, or open the original directory"
    with pytest.raises(DatasetError, match=words):
        part.keys_of(others, "customer")
    with pytest.raises(DatasetError, match=words):
        part.ids_of(whole.keys_of(others, "customer"), "customer")
    salientpp.copy_to_disk(tmp_path / "shop", tmp_path / "local", parts=[0, 2])
    assert contents(copied).keys() - {"parts.json"} == contents(tmp_path / "shop").keys()
    assert_keys_are_those_of(salientpp.load(copied, part_id=1, verify="full"), graph)


def test_a_missing_or_altered_file_of_keys_is_named(root, tmp_path):
    shutil.copytree(root, tmp_path / "shop")
    path = tmp_path / "shop" / "part-00002" / "n0.keys.arrow"
    part = salientpp.load(tmp_path / "shop")
    path.rename(tmp_path / "away.arrow")
    with pytest.raises(
        DatasetError, match=r"part-00002/n0.keys.arrow cannot be read .* copy it again, or partition again"
    ):
        part.keys_of(part.split("all", 2, "customer"), "customer")
    path.write_bytes((tmp_path / "away.arrow").read_bytes().replace(b"customer x", b"customer y", 1))
    with pytest.raises(DatasetError, match=r"part-00002/n0.keys.arrow was altered"):
        salientpp.load(tmp_path / "shop")


def test_a_file_that_is_cut_short_while_it_is_mapped_is_found(root, tmp_path):
    shutil.copytree(root, tmp_path / "shop")
    part = salientpp.load(tmp_path / "shop")
    part.keys_of(torch.arange(90), "customer")
    part.check_sizes()
    with (tmp_path / "shop" / "part-00001" / "n0.keys.arrow").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DatasetError, match="n0.keys.arrow was cut short"):
        part.check_sizes()


def test_a_full_check_compares_index_and_keys(root, tmp_path):
    names = {"n0.key_hashes.npy": -1, "n0.key_ids.npy": 0}
    for name, at in names.items():
        shutil.copytree(root, tmp_path / name)
        array = np.load(tmp_path / name / name)
        array[at] = array[at - 1]
        np.save(tmp_path / name / name, array)
        update_checksums(tmp_path / name, name)
        salientpp.load(tmp_path / name)
        with pytest.raises(DatasetError, match="n0.key_hashes.npy must hold the hashes of the keys"):
            salientpp.load(tmp_path / name, verify="full")


def update_checksums(root: Path, name: str) -> None:
    from salientpp.store.directory.files import describe_file

    entry = describe_file(root / name)
    edit_manifest(root, lambda manifest: manifest["files"][name].update(entry), checksum=True)


@pytest.mark.parametrize(
    "keys, words",
    [
        ([], r"node_types\[0\].keys must be null, or a list of at least one column"),
        ([{"name": "a"}], r"node_types\[0\].keys must be null"),
        ([{"name": "a", "type": "int64"}] * 2, r"node_types\[0\].keys must be null"),
        ("customer_id", r"node_types\[0\].keys must be null"),
        (None, "files must have only files of the graph, got 'n0.key_hashes.npy'"),
    ],
)
def test_forged_keys_are_refused(root, tmp_path, keys, words):
    shutil.copytree(root, tmp_path / "shop")
    edit_manifest(tmp_path / "shop", lambda manifest: manifest["node_types"][0].update(keys=keys), checksum=True)
    with pytest.raises(DatasetError, match=words):
        salientpp.load(tmp_path / "shop")


def test_a_manifest_that_forges_the_number_of_keys_is_refused(root, tmp_path):
    shutil.copytree(root, tmp_path / "shop")
    name = "part-00000/n0.keys.arrow"
    edit_manifest(tmp_path / "shop", lambda manifest: manifest["files"][name].update(shape=[1]), checksum=True)
    with pytest.raises(DatasetError, match="n0.keys.arrow'. must be arrow"):
        salientpp.load(tmp_path / "shop")


# --- storage hosts ----------------------------------------------------------------------------------------


def keys_of_seeds(rank: int, address: str) -> list[tuple]:
    os.environ["SALIENTPP_TOKEN"] = TOKEN  # ranks are forked from a server that started before the test
    part = salientpp.load(address)
    seeds = part.split("train", type_="customer")
    keys = part.keys_of(seeds, "customer")
    assert torch.equal(part.ids_of(keys, "customer"), seeds) and part.ids_of(["nobody"], "customer").tolist() == [-1]
    return as_rows(keys)


def test_a_process_and_ranks_without_the_directory_get_keys_from_storage_hosts(graph, shop, tmp_path, monkeypatch):
    part = partitioned(shop, tmp_path / "two", 2)
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    with serving(tmp_path / "two", 2, tmp_path) as hosts:
        stored = salientpp.load(hosts.address)
        assert_keys_are_those_of(stored, graph)
        stored.check_sizes()
        del stored
        gc.collect()
        found = distributed.run(keys_of_seeds, 2, hosts.address)
    for rank in range(2):
        original = part.original_id(part.split("train", rank, "customer"), "customer").tolist()
        assert found[rank] == taken(graph.keys["customer"], original) and original
