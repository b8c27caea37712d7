"""Graphs from keyed tables, against an oracle in plain Python on random databases, and every rule of a description by itself."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import rare

from salientpp import cli
from salientpp.datasets import convert, load_dataset
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.tabular import staging
from salientpp.datasets.tabular.description import read_description
from salientpp.datasets.tabular.rows import plain_memory
from salientpp.datasets.tabular.staging import staged_tables
from salientpp.progress import Progress
from salientpp.store.keys import canonical_keys, key_hash

ROOT = Path(__file__).parents[2]
PLAIN = Options(deduplicate=False, dtype={}, finite=False)
EPOCH = datetime.datetime(1970, 1, 1)


def small(source, root: Path, working: int) -> Path:
    """Converts with ``working`` bytes for arrays. Few bytes make many buckets and runs."""
    budget = Budget(0, working)
    with staged_tables(read_description(source), root, budget, Progress()) as staged:
        return write_converted(staged.source, root, budget, PLAIN)


def contents(root: Path) -> dict[str, Any]:
    """Digests of the files of a converted graph. In the manifest, the description and what identifies the files of tables are left out."""
    found: dict[str, Any] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir() if path.suffix != ".json"
    }
    manifest = json.loads((root / "manifest.json").read_text())
    for each in manifest["tables"]["tables"].values():
        del each["from"]
    del manifest["checksum"], manifest["tables"]["description"], manifest["tables"]["folder"], manifest["source"]
    return {**found, "manifest": manifest}


def edges_of(data, relation) -> list[tuple]:
    """Returns (source, target) of each edge in the order of the lists."""
    adj_t = data[relation].adj_t
    counts = adj_t.crow_indices().diff()
    targets = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return list(zip(adj_t.col_indices().tolist(), targets.tolist()))


def keys_of(data, type_: str) -> list[tuple]:
    """Returns the key of each vertex of a type."""
    rows = data[type_].key_table.rows(range(data[type_].num_nodes))
    return [tuple(row.values()) for row in rows.to_pylist()]


def write_parquet(folder: Path, name: str, rows: dict[str, list] | pd.DataFrame, types: dict | None = None) -> str:
    table = pa.table(rows) if types is None else pa.table(rows, schema=pa.schema(types))
    pq.write_table(table, folder / f"{name}.parquet")
    return f"{name}.parquet"


# --- random databases -------------------------------------------------------------------------------------

#: Kind of key -> values, and the Arrow types that hold them equally.
KEYS = {
    "number": (st.integers(-3, 9), [pa.int64(), pa.int32(), pa.int8()]),
    "text": (st.text("abé", max_size=3), [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
    "day": (st.dates(datetime.date(1969, 12, 28), datetime.date(1970, 1, 5)), [pa.date32(), pa.date64()]),
    "bytes": (st.binary(min_size=2, max_size=2), [pa.binary(2)]),
}

#: Kind of attribute -> (values, Arrow type, if values may be null).
ATTRIBUTES = {
    "float": (st.integers(-3, 3).map(lambda n: n / 2), pa.float32(), True),
    "int": (st.integers(-3, 3), pa.int16(), False),
    "wide": (st.integers(0, 2**32 - 1), pa.uint32(), False),
    "bool": (st.booleans(), pa.bool_(), False),
    "text": (st.sampled_from(["north", "south", "", "é"]), pa.string(), True),
    "moment": (st.integers(-5, 5).map(lambda n: EPOCH + datetime.timedelta(seconds=n)), pa.timestamp("ms"), False),
    "fraction": (
        st.integers(-5, 5).map(lambda n: EPOCH + datetime.timedelta(microseconds=n)),
        pa.timestamp("ns"),
        False,
    ),
    "list": (st.lists(st.integers(0, 3), min_size=2, max_size=2), pa.list_(pa.int32()), False),
}


#: Word in a column of splits -> split.
SPLIT_OF = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass
class Entry:
    """Tables of one type or relation: ``rows`` of values by column, the types of columns, and the entry of the description."""

    keys: dict[str, tuple[str, ...]]  # use -> columns
    types: dict[str, pa.DataType]
    kinds: dict[str, str]  # attribute column -> kind
    rows: list[dict[str, Any]]
    described: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, name: str, shuffle: random.Random | None, parts: int) -> dict[str, Any]:
        """Writes the rows, in another order if ``shuffle`` is given, to several files. Returns the entry of the description."""
        rows = list(self.rows)
        if shuffle is not None:
            shuffle.shuffle(rows)
        schema = pa.schema(self.types)
        for part in range(parts):
            columns = {column: [row[column] for row in rows[part::parts]] for column in self.types}
            table = pa.table(
                {
                    n: pa.array(columns[n]).cast(t) if "dict" in str(t) else pa.array(columns[n], t)
                    for n, t in self.types.items()
                },
                schema,
            )
            pq.write_table(table, folder / f"{name}-{part}.parquet")
        return {"table": str(folder / f"{name}-*.parquet"), **self.described}


@st.composite
def attributes(draw, lists: bool) -> tuple[dict[str, str], dict[str, pa.DataType], st.SearchStrategy]:
    names = draw(
        st.lists(st.sampled_from([name for name in ATTRIBUTES if lists or name != "list"]), unique=True, max_size=3)
    )
    kinds = {f"a_{name}": name for name in names}
    values = {
        column: st.none() | ATTRIBUTES[kind][0] if ATTRIBUTES[kind][2] else ATTRIBUTES[kind][0]
        for column, kind in kinds.items()
    }
    return kinds, {column: ATTRIBUTES[kind][1] for column, kind in kinds.items()}, st.fixed_dictionaries(values)


@st.composite
def node_entries(draw) -> tuple[Entry, tuple[str, ...], list[tuple]]:
    """Returns the entry, the kinds of its key columns, and its keys."""
    kinds = tuple(draw(st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=2)))
    key = tuple(f"k{number}" for number in range(len(kinds)))
    given_keys = draw(st.lists(st.tuples(*(KEYS[kind][0] for kind in kinds)), unique=True, max_size=8))
    of_attributes, types, values = draw(attributes(lists=True))
    types = {**{name: draw(st.sampled_from(KEYS[kind][1])) for name, kind in zip(key, kinds)}, **types}
    entry = Entry({"key": key}, types, of_attributes, [])
    repeats = draw(st.lists(st.sampled_from(given_keys), max_size=3)) if given_keys else []
    nulls = draw(st.integers(0, 2))
    entry.described = {"key": list(key)}
    if draw(st.booleans()):
        types["part"] = pa.string()
        entry.described["split"] = "part"
    for each in [*given_keys, *repeats, *[(None,) * len(key)] * nulls]:
        row = {**dict(zip(key, each)), **draw(values)}
        if "part" in types:
            row["part"] = draw(st.sampled_from([*SPLIT_OF, "other", None]))
        entry.rows.append(row)
    if repeats or draw(st.booleans()):
        entry.described["duplicates"] = "drop"
    if nulls or draw(st.booleans()):
        entry.described["null_keys"] = "drop"
    return entry, kinds, given_keys


@st.composite
def databases(draw) -> tuple[dict[str, Entry], dict[tuple[str, str, str], Entry]]:
    drawn = {f"t{number}": draw(node_entries()) for number in range(draw(st.integers(1, 2)))}
    if not any(keys for _, _, keys in drawn.values()):
        entry, kinds, keys = drawn["t0"]
        keys.append(tuple(draw(KEYS[kind][0]) for kind in kinds))
        values = {column: draw(ATTRIBUTES[kind][0]) for column, kind in entry.kinds.items()}
        entry.rows.append({**dict(zip(entry.keys["key"], keys[0])), **values, "part": None})
    edges = {}
    for number in range(draw(st.integers(0, 2))):
        ends = [draw(st.sampled_from(list(drawn))) for _ in range(2)]
        of_attributes, types, values = draw(attributes(lists=False))
        columns: dict[str, tuple[str, ...]] = {}
        policies = {"dangling": "error", "null_keys": "error"}
        rows: list[dict[str, Any]] = [draw(values) for _ in range(draw(st.integers(0, 10)))]
        for use, type_ in zip(("source", "target"), ends):
            _, kinds, keys = drawn[type_]
            columns[use] = tuple(f"{use[0]}{at}" for at in range(len(kinds)))
            types |= {name: draw(st.sampled_from(KEYS[kind][1])) for name, kind in zip(columns[use], kinds)}
            known = st.sampled_from(keys) if keys else st.nothing()
            other = st.tuples(*(KEYS[kind][0] for kind in kinds))
            for row in rows:
                key = draw(known | known | other | st.just((None,) * len(kinds)))
                if None in key:
                    policies["null_keys"] = "drop"
                elif key not in keys:
                    policies["dangling"] = "drop"
                row |= dict(zip(columns[use], key))
        entry = Entry(columns, types, of_attributes, rows)
        entry.described = {use: list(names) for use, names in columns.items()}
        if policies["dangling"] == "drop" and not any(drawn[end][0].kinds for end in ends) and draw(st.booleans()):
            policies["dangling"] = "add"  # vertices of types without attributes, which may not be null
        entry.described |= {**policies, "reverse": draw(st.booleans())}
        edges[ends[0], f"r{number}", ends[1]] = entry
    return {type_: entry for type_, (entry, _, _) in drawn.items()}, edges


# --- the oracle -------------------------------------------------------------------------------------------


def smallest(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    return min(rows, key=lambda row: [(row[column] is None, row[column]) for column in columns])


def ids_of_keys(keys: set[tuple], types: list[pa.DataType]) -> dict[tuple, int]:
    """Numbers keys in the order of their hashes."""
    if not keys:
        return {}
    listed = list(keys)
    arrays = canonical_keys(
        [pa.array([key[at] for key in listed]).cast(type_) for at, type_ in enumerate(types)], "keys"
    )
    hashed = sorted(zip(key_hash(arrays).tolist(), listed))
    assert len({hash_ for hash_, _ in hashed}) == len(listed)
    return {key: number for number, (_, key) in enumerate(hashed)}


def expected_column(entry: Entry, column: str, rows: list[dict], all_rows: list[dict], unit: int) -> list:
    """Returns the encoded values of a column; a missing float is None."""
    values, kind = [row[column] for row in rows], entry.kinds[column]
    if kind == "text":
        counted = [row for row in all_rows if "part" not in entry.types or row["part"] == "train"]
        categories = sorted({row[column] for row in counted} - {None})
        return [categories.index(value) if value in categories else -1 for value in values]
    if kind in ("moment", "fraction"):
        return [(value - EPOCH) // datetime.timedelta(microseconds=1) // unit for value in values]
    return values


def stored_column(values: torch.Tensor) -> list:
    found = values.tolist()
    return [None if isinstance(value, float) and math.isnan(value) else value for value in found]


def check_against_oracle(root: Path, nodes: dict[str, Entry], edges: dict[tuple, Entry]) -> None:
    data = load_dataset(f"converted:{root}")
    tables = [*nodes.values(), *edges.values()]
    kept: dict[str, dict[tuple, dict]] = {}
    for type_, entry in nodes.items():
        columns = sorted({*entry.kinds, *({"part"} & set(entry.types))})
        by_key: dict[tuple, list[dict]] = {}
        for row in entry.rows:
            key = tuple(row[name] for name in entry.keys["key"])
            if None not in key:
                by_key.setdefault(key, []).append(row)
        kept[type_] = {key: smallest(rows, columns) for key, rows in by_key.items()}
    for (source, _, target), entry in edges.items():
        for row in entry.rows if entry.described["dangling"] == "add" else ():
            ends = [tuple(row[name] for name in entry.keys[use]) for use in ("source", "target")]
            if not any(None in key for key in ends):
                for type_, key in zip((source, target), ends):
                    empty = dict.fromkeys(nodes[type_].types)
                    kept[type_].setdefault(key, {**empty, **dict(zip(nodes[type_].keys["key"], key))})
    ids = {
        type_: ids_of_keys(set(kept[type_]), [entry.types[name] for name in entry.keys["key"]])
        for type_, entry in nodes.items()
    }
    of_edges: dict[tuple, list] = {}
    for relation, entry in edges.items():
        found = []
        for row in entry.rows:
            source, target = (
                ids[type_].get(tuple(row[name] for name in entry.keys[use]))
                for type_, use in zip(relation[::2], ("source", "target"))
            )
            if source is not None and target is not None:
                found.append((source, target, row))
        of_edges[relation] = found
    stored_rows = {id(entry): list(kept[type_].values()) for type_, entry in nodes.items()}
    stored_rows |= {id(edges[relation]): [row for *_, row in found] for relation, found in of_edges.items()}
    moments = [
        row[c]
        for e in tables
        for c, kind in e.kinds.items()
        if kind in ("moment", "fraction")
        for row in stored_rows[id(e)]
    ]
    unit = 1 if any(moment.microsecond for moment in moments) else 1_000_000

    for type_, entry in nodes.items():
        order = sorted(kept[type_], key=ids[type_].__getitem__)
        rows = [kept[type_][key] for key in order]
        assert data[type_].num_nodes == len(order)
        assert keys_of(data, type_) == order
        for column in entry.kinds:
            assert stored_column(data[type_][column]) == expected_column(entry, column, rows, rows, unit)
        for split in ("train", "val", "test") if "part" in entry.types else ():
            assert data[type_][f"{split}_mask"].tolist() == [SPLIT_OF.get(row["part"]) == split for row in rows]
    for relation, entry in edges.items():
        rows = [row for *_, row in of_edges[relation]]
        columns = {column: expected_column(entry, column, rows, rows, unit) for column in entry.kinds}
        ends = [(source, target) for source, target, _ in of_edges[relation]]
        check_edges(data, relation, ends, columns)
        reverse = (relation[2], f"rev_{relation[1]}", relation[0])
        assert (reverse in data.edge_types) == entry.described["reverse"]
        if entry.described["reverse"]:
            check_edges(data, reverse, [(target, source) for source, target in ends], columns)


def check_edges(data, relation, ends: list[tuple], columns: dict[str, list]) -> None:
    found = list(zip(edges_of(data, relation), *(stored_column(data[relation][name]) for name in columns)))
    assert sorted(found, key=repr) == sorted(zip(ends, *columns.values()), key=repr)
    assert [end[::-1] for end, *_ in found] == sorted(end[::-1] for end in ends)


@settings(max_examples=min(200, settings.default.max_examples))
@given(
    database=databases(),
    seed=st.integers(0, 2**16),
    parts=st.integers(1, 3),
    working=st.sampled_from([2**12, 2**15, 2**24]),
)
def test_a_random_database_gives_the_graph_of_the_oracle_bit_for_bit_in_any_order(
    tmp_path, database, seed, parts, working
):
    nodes, edges = database
    roots = []
    for number, (shuffle, files, bytes_) in enumerate([(None, 1, 2**24), (random.Random(seed), parts, working)]):
        folder = tmp_path / f"tables-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        described = {
            "nodes": {type_: entry.write(folder, type_, shuffle, files) for type_, entry in nodes.items()},
            "edges": {name: entry.write(folder, f"edges-{name[1]}", shuffle, files) for name, entry in edges.items()},
        }
        roots.append(tmp_path / f"graph-{number}")
        shutil.rmtree(roots[-1], ignore_errors=True)
        small(described, roots[-1], bytes_)
    check_against_oracle(roots[0], nodes, edges)
    assert contents(roots[0]) == contents(roots[1])


# --- a shop -----------------------------------------------------------------------------------------------

CUSTOMERS = {
    "customer_id": ["C1", "C2", "C3", "C4"],
    "age": [20.0, 40.0, None, 60.0],
    "visits": [1, 2, 3, 4],
    "region": ["south", "north", None, "west"],
    "created": [EPOCH + datetime.timedelta(days=day) for day in range(4)],
    "churned": [True, False, None, False],
    "split": ["train", "train", "val", None],
    "email": ["a", "b", "c", "d"],
}
ORDERS = {
    "order_id": [10, 11, 12],
    "customer_id": ["C1", "C1", "C3"],
    "amount": [1.5, 2.5, 3.5],
    "ordered_at": [datetime.datetime(2026, 1, day) for day in (1, 2, 3)],
}


def shop(folder: Path, customer: dict | None = None, placed: dict | None = None) -> dict[str, Any]:
    """Writes the tables of a shop. Returns the description, with further entries of the type and of the relation."""
    return {
        "nodes": {
            "customer": {
                "table": str(folder / write_parquet(folder, "customers", CUSTOMERS)),
                "key": "customer_id",
                "drop": ["email"],
                "fill": {"churned": False},
                **(customer or {}),
            },
            "order": {
                "table": str(folder / write_parquet(folder, "orders", ORDERS)),
                "key": "order_id",
                "drop": ["customer_id", "ordered_at"],
            },
        },
        "edges": {
            "customer,placed,order": {
                "table": str(folder / "orders.parquet"),
                "source": "customer_id",
                "target": "order_id",
                **(placed or {}),
            }
        },
    }


def by_key(data, type_: str, name: str) -> dict:
    return {
        key if len(key) > 1 else key[0]: value for key, value in zip(keys_of(data, type_), data[type_][name].tolist())
    }


def converted(source, root: Path, **options):
    return load_dataset(f"converted:{convert(source, root, **options)}")


def test_a_toml_file_describes_a_shop_and_the_command_converts_it(tmp_path, capsys):
    shop(tmp_path)
    (tmp_path / "shop.toml").write_text(
        """
        [nodes.customer]
        table = "customers.parquet"
        key = "customer_id"
        time = "created"
        label = "churned"
        split = "split"
        x = ["age", "visits"]
        drop = ["email"]

        [nodes.order]
        table = ["orders.parquet"]
        key = ["order_id"]
        drop = ["customer_id", "ordered_at"]

        [edges."customer,placed,order"]
        table = "orders.parquet"
        source = "customer_id"
        target = "order_id"
        time = "ordered_at"
        """
    )
    root, report = tmp_path / "shop", tmp_path / "report.json"
    arguments = ["convert", f"tables:{tmp_path / 'shop.toml'}", str(root), "--memory", "4GB", "--report", str(report)]
    assert cli.main(arguments) == 0
    data = load_dataset(f"converted:{root}")
    assert data.edge_types == [("customer", "placed", "order"), ("order", "rev_placed", "customer")]
    assert sorted(data["customer"].keys()) == sorted(
        ["num_nodes", "key_table", "region", "time", "train_mask", "val_mask", "test_mask", "x", "y"]
    )
    assert by_key(data, "customer", "y") == {"C1": 1, "C2": 0, "C3": -1, "C4": 0}
    assert by_key(data, "customer", "time") == {f"C{day + 1}": day * 86_400 for day in range(4)}
    assert by_key(data, "customer", "region") == {
        "C1": 1,
        "C2": 0,
        "C3": -1,
        "C4": -1,
    }  # "west" is not in the training split
    # Mean and deviation of the training rows: 30 and 10, 1.5 and 0.5.
    assert by_key(data, "customer", "x") == {"C1": [-1, -1], "C2": [1, 1], "C3": [0, 3], "C4": [3, 5]}
    assert by_key(data, "customer", "train_mask") == {"C1": True, "C2": True, "C3": False, "C4": False}
    assert by_key(data, "order", "amount") == {10: 1.5, 11: 2.5, 12: 3.5}
    customers, orders = (
        dict(zip(range(4), (key for (key,) in keys_of(data, type_)))) for type_ in ("customer", "order")
    )
    placed = edges_of(data, ("customer", "placed", "order"))
    assert sorted((customers[source], orders[target]) for source, target in placed) == [
        ("C1", 10),
        ("C1", 11),
        ("C3", 12),
    ]
    seconds = [int((ORDERS["ordered_at"][orders[target] - 10] - EPOCH).total_seconds()) for _, target in placed]
    assert data["customer", "placed", "order"].time.tolist() == seconds
    written = json.loads(report.read_text())
    assert written["time_unit"] == "second"
    assert written["nodes"]["customer"]["vertices"] == 4 and written["nodes"]["customer"]["columns"]["region"] == {
        "attribute": "region",
        "kind": "category",
        "categories": 2,
    }
    assert written["edges"]["customer,placed,order"]["edges"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "customers.parquet",
        "orders.parquet",
        "report.json",
        "shop",
        "shop.toml",
    ]


def test_objects_of_other_libraries_are_tables(tmp_path):
    frames = pd.DataFrame(CUSTOMERS), pa.table(ORDERS)
    described = {
        "nodes": {
            "customer": {"table": frames[0], "key": "customer_id", "drop": ["churned"]},
            "order": {"table": frames[1], "key": "order_id"},
        },
        "edges": {("customer", "placed", "order"): {"table": frames[1], "source": "customer_id", "target": "order_id"}},
    }
    stream = {**described, "edges": {}}
    stream["nodes"] = {"order": {"table": frames[1].to_reader(), "key": "order_id"}}
    data = converted(described, tmp_path / "shop")
    assert by_key(data, "order", "amount") == {10: 1.5, 11: 2.5, 12: 3.5}
    assert by_key(converted(stream, tmp_path / "stream"), "order", "amount") == {10: 1.5, 11: 2.5, 12: 3.5}


def test_an_edge_table_that_holds_vertices_gives_edges_their_time_only(tmp_path):
    data = converted(shop(tmp_path, placed={"time": "ordered_at"}), tmp_path / "shop")
    assert sorted(data["customer", "placed", "order"].keys()) == ["adj_t", "time"]
    assert "amount" in data["order"]


def test_missing_ends_are_added_dropped_or_refused(tmp_path):
    orders = {**ORDERS, "customer_id": ["C1", "C9", None]}
    described = shop(tmp_path)
    described["nodes"]["customer"] |= {"fill": {"churned": False, "visits": 0, "created": EPOCH}}
    write_parquet(tmp_path, "orders", orders)
    placed = described["edges"]["customer,placed,order"]
    with pytest.raises(ValueError, match="1 row has no value in 'customer_id' or 'order_id'"):
        convert(described, tmp_path / "refused")
    placed["null_keys"] = "drop"
    with pytest.raises(ValueError, match="C9"):
        convert(described, tmp_path / "refused")
    placed["dangling"] = "drop"
    report = tmp_path / "report.json"
    assert (
        converted(described, tmp_path / "dropped", report=report)["customer", "placed", "order"].adj_t.values().numel()
        == 1
    )
    found = json.loads(report.read_text())["edges"]["customer,placed,order"]
    assert (found["dangling_sources"]["count"], found["dangling_targets"]["count"], found["null_keys"]["count"]) == (
        1,
        0,
        1,
    )
    assert "C9" in found["dangling_sources"]["examples"][0]
    placed["dangling"] = "add"
    data = converted(described, tmp_path / "added", report=report)
    assert by_key(data, "customer", "visits") == {"C1": 1, "C2": 2, "C3": 3, "C4": 4, "C9": 0}
    assert math.isnan(by_key(data, "customer", "age")["C9"])
    assert json.loads(report.read_text())["nodes"]["customer"]["added"] == 1


def added_to_an_empty_table(folder: Path, *tables: pa.Table) -> dict[str, Any]:
    (folder / "v.csv").write_text("id\n")  # its column has no type
    added = {"source": "a", "target": "b", "dangling": "add"}
    edges = {f"v,r{number},v": {"table": table, **added} for number, table in enumerate(tables)}
    return {"nodes": {"v": {"table": str(folder / "v.csv"), "key": "id"}}, "edges": edges}


def test_a_relation_without_rows_does_not_hide_the_keys_of_another_one(tmp_path):
    nothing = pa.table({"a": pa.nulls(0), "b": pa.nulls(0)})
    described = added_to_an_empty_table(tmp_path, nothing, pa.table({"a": [1, 2], "b": [2, 3]}))
    data = converted(described, tmp_path / "graph")
    assert sorted(keys_of(data, "v")) == [(1,), (2,), (3,)]
    assert data["v", "r1", "v"].adj_t.values().numel() == 2


def test_keys_of_relations_whose_types_differ_say_what_to_cast(tmp_path):
    table = pa.table({"a": pa.array([1]), "b": pa.array([2**63 + 5], pa.uint64())})
    with pytest.raises(
        ValueError, match=r"nodes.v: edges name a key .* int64, cannot hold.*id=9223372036854775813.*cast"
    ):
        convert(added_to_an_empty_table(tmp_path, table), tmp_path / "graph")


def test_a_row_that_is_dropped_for_a_null_in_a_dictionary_adds_no_vertex(tmp_path):
    ends = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["x", None]))
    described = {
        "nodes": {
            "v": {"table": pa.table({"id": [1, 2]}), "key": "id"},
            "w": {"table": pa.table({"id": ["x"]}), "key": "id"},
        },
        "edges": {
            "v,r,w": {
                "table": pa.table({"a": [1, 7, 2], "b": ends}),
                "source": "a",
                "target": "b",
                "dangling": "add",
                "null_keys": "drop",
            }
        },
    }
    assert sorted(keys_of(converted(described, tmp_path / "graph"), "v")) == [(1,), (2,)]


def test_times_are_microseconds_if_one_has_a_fraction_of_a_second(tmp_path):
    described = shop(tmp_path, customer={"time": "created"}, placed={"time": "ordered_at"})
    late = {**ORDERS, "ordered_at": [datetime.datetime(2026, 1, 1, 0, 0, 0, 1)] * 3}
    write_parquet(tmp_path, "orders", late)
    data = converted(described, tmp_path / "shop")
    assert by_key(data, "customer", "time")["C2"] == 86_400_000_000
    assert set(data["customer", "placed", "order"].time.tolist()) == {1_767_225_600_000_001}


@pytest.mark.parametrize(
    ("customer", "placed", "text"),
    [
        ({"key": "custmer_id"}, {}, r"key .*custmer_id.*Did you mean customer_id"),
        ({"labl": "churned"}, {}, r"\[nodes.customer\] has no entry 'labl'.*Did you mean label"),
        ({"time": "region"}, {}, "time must name a column of timestamps, dates or integers, got 'region'"),
        ({"split": "age"}, {}, "split must name a column of texts"),
        ({"x": ["region"]}, {}, "x must name columns with a number a row, got 'region'"),
        ({"label": "region", "split": "region"}, {}, "'region' is both label and split"),
        ({"duplicates": "first"}, {}, 'duplicates must be "error" or "drop", got \'first\''),
        (
            {"fill": {}},
            {},
            r"nodes.customer: column 'churned' of bool has no value.*fill.*customer customer_id='C3'",
        ),
        ({"fill": {"churned": "no"}}, {}, "fill must have a value of bool for 'churned', got 'no'"),
        ({"fill": {"visits": 10**30}}, {}, "fill must have a value of int64 for 'visits', got 1000000"),
        ({"fill": {"visits": 0.5}}, {}, "fill must have a value of int64 for 'visits', got 0.5"),
        ({"drop": ["emial"]}, {}, "drop must name columns.*'emial'.*Did you mean email"),
        ({}, {"source": ["customer_id", "order_id"]}, "source must name 1 columns, as many as the key of customer"),
        ({}, {"dangling": "ignore"}, 'dangling must be "error" or "drop" or "add"'),
        ({"time": "visits"}, {"time": "ordered_at"}, "has timestamps as time, and .* has numbers"),
    ],
)
def test_a_wrong_description_says_what_to_change(tmp_path, customer, placed, text):
    with pytest.raises(ValueError, match=text):
        convert(shop(tmp_path, customer, placed), tmp_path / "shop")
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize("name", ["a\0", "\ud800", "a\nb", "\x1b[31m"])
def test_names_have_no_control_characters(tmp_path, name):
    entry = {"table": write_parquet(tmp_path, "v", {"id": [1]}), "key": "id"}
    with pytest.raises(ValueError, match="nodes must be named by words without a comma and control characters, got"):
        convert({"nodes": {name: entry}}, tmp_path / "graph")
    edges = {f"v,{name}x,v": {"table": "v.parquet", "source": "id", "target": "id"}}
    with pytest.raises(ValueError, match="edges must be named by words without control characters, got 'v,"):
        convert({"nodes": {"v": entry}, "edges": edges}, tmp_path / "graph")


def test_a_mistake_in_the_first_table_leaves_no_hidden_folder(tmp_path):
    """The next run could go on only with finished steps."""
    with pytest.raises(ValueError, match="1 row has the key of another row"):
        convert({"nodes": {"v": {"table": pa.table({"id": [1, 1]}), "key": "id"}}}, tmp_path / "graph")
    assert not any(tmp_path.iterdir())


def test_a_relation_between_unknown_types_suggests_one(tmp_path):
    described = shop(tmp_path)
    described["edges"]["custmer,placed,order"] = described["edges"].pop("customer,placed,order")
    with pytest.raises(ValueError, match=r"custmer.*Did you mean customer"):
        convert(described, tmp_path / "shop")


def test_a_stopped_conversion_goes_on_and_reads_no_table_again(tmp_path, monkeypatch):
    described = shop(tmp_path)
    expected = contents(convert(described, tmp_path / "whole"))
    reads = []
    original = staging.PlannedTable.batches

    def counted(self, columns, most_rows):
        reads.append(self.plan.title)
        return original(self, columns, most_rows)

    def fails(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(staging.PlannedTable, "batches", counted)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging, "join_edges", fails)
        convert(described, tmp_path / "shop")
    assert {*reads} == {"nodes.customer", "nodes.order"}
    reads.clear()
    assert contents(convert(described, tmp_path / "shop")) == expected
    assert {*reads} == {"edges.customer,placed,order"}
    assert not (tmp_path / ".shop.staged").exists()


def test_staged_work_of_other_tables_is_not_used(tmp_path, monkeypatch):
    described = shop(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging, "join_edges", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(described, tmp_path / "shop")
    write_parquet(tmp_path, "customers", {**CUSTOMERS, "visits": [5, 6, 7, 8]})
    data = converted(described, tmp_path / "shop")
    assert by_key(data, "customer", "visits") == {"C1": 5, "C2": 6, "C3": 7, "C4": 8}


@pytest.mark.parametrize("when", ["the graph is complete", "the description changed"])
def test_a_run_that_is_killed_while_it_removes_staged_work_does_not_harm_the_next_one(tmp_path, monkeypatch, when):
    described = shop(tmp_path)
    expected = contents(convert(described, tmp_path / "whole"))
    rmtree = shutil.rmtree

    def killed(path, *arguments, **named):
        for name in ("staged.json", "keys.arrow") if any(Path(path).rglob("keys.arrow")) else ():
            for file in Path(path).rglob(name):
                file.unlink()
                raise KeyboardInterrupt
        rmtree(path, *arguments, **named)

    if when == "the description changed":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(staging, "join_edges", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            convert(described, tmp_path / "shop")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        other = {**described, "edges": {}}
        convert(described if "graph" in when else other, tmp_path / "shop")
    assert contents(convert(described, tmp_path / "shop", overwrite=True)) == expected
    assert not (tmp_path / ".shop.staged").exists()


def test_a_step_that_read_a_changed_table_is_not_used_once_the_table_is_restored(tmp_path, monkeypatch):
    described = shop(tmp_path)
    expected = contents(convert(described, tmp_path / "whole"))
    table = tmp_path / "customers.parquet"
    before, times = table.read_bytes(), table.stat()
    original = staging.number_vertices

    def changes(planned, *arguments, **named):
        if planned.plan.title == "nodes.customer":
            write_parquet(tmp_path, "customers", {**CUSTOMERS, "visits": [5, 6, 7, 8]})
        return original(planned, *arguments, **named)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"customers.parquet changed while it was read"),
    ):
        patch.setattr(staging, "number_vertices", changes)
        convert(described, tmp_path / "shop")
    table.write_bytes(before)
    os.utime(table, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert contents(convert(described, tmp_path / "shop")) == expected


def test_staged_work_of_a_description_in_another_folder_is_not_used(tmp_path, monkeypatch):
    for name, value in ("monday", 1), ("tuesday", 2):  # archives may give all files one time
        folder = tmp_path / name
        folder.mkdir()
        write_parquet(folder, "v", {"id": [1], "value": [value]})
        os.utime(folder / "v.parquet", ns=(0, 0))
        (folder / "v.toml").write_text('[nodes.v]\ntable = "v.parquet"\nkey = "id"\n')
    assert len({(tmp_path / name / "v.parquet").stat().st_size for name in ("monday", "tuesday")}) == 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.chdir(tmp_path / "monday")
        patch.setattr(staging, "examine_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert("tables:v.toml", tmp_path / "graph")
    monkeypatch.chdir(tmp_path / "tuesday")
    assert by_key(converted("tables:v.toml", tmp_path / "graph"), "v", "value") == {1: 2}


@pytest.mark.parametrize("type_", [pa.float32(), pa.float64()])
def test_nan_of_any_sign_is_larger_than_numbers_when_duplicates_are_dropped(tmp_path, type_):
    values = [math.nan, -math.nan, math.inf]  # processors compute 0 / 0 with either sign
    for number in range(3):
        column = pa.array(np.array(values[number:] + values[:number]), type_)
        table = pa.table({"id": [1, 1, 1], "value": column})
        described = {"nodes": {"v": {"table": table, "key": "id", "duplicates": "drop"}}}
        assert by_key(converted(described, tmp_path / str(number)), "v", "value") == {1: math.inf}


def test_labels_of_every_kind(tmp_path):
    for number, (values, expected) in enumerate(
        [
            (["b", "a", None, "b"], [1, 0, -1, 1]),
            ([3, 0, None, 1], [3, 0, -1, 1]),
            ([0.5, 1.5, 2.5, -1.0], [0.5, 1.5, 2.5, -1.0]),
            ([True, False, True, None], [1, 0, 1, -1]),
        ]
    ):
        table = pa.table({"id": list(range(4)), "label": values})
        data = converted({"nodes": {"v": {"table": table, "key": "id", "label": "label"}}}, tmp_path / str(number))
        assert by_key(data, "v", "y") == dict(enumerate(expected))


@pytest.mark.parametrize("value", [0.1, 0.7, 19.99, 1e6 + 0.1])
def test_a_constant_column_of_x_is_0_whatever_the_rounding_of_its_mean(tmp_path, value):
    # A sum of equal floats is rounded: 3 * 0.1 / 3 is not 0.1.
    for rows in (3, 7, 100):
        split = ["train"] * rows + ["val"]
        table = pa.table({"id": range(rows + 1), "a": [value] * rows + [value + 1], "split": split})
        described = {"nodes": {"v": {"table": table, "key": "id", "x": ["a"], "split": "split"}}}
        data = converted(described, tmp_path / str(rows))
        assert by_key(data, "v", "x") == {**{row: [0] for row in range(rows)}, rows: [1]}


def test_other_words_than_splits_give_a_warning_with_their_numbers(tmp_path):
    words = ["train", "valid", "validation", "dev", "dev", "Test", None, "test"]
    table = pa.table({"id": range(8), "split": words})
    report = tmp_path / "report.json"
    with pytest.warns(
        UserWarning,
        match=r"nodes.v: 3 rows have other words in the column 'split' of the split than train, val \(or valid, validation\) and test: 'Test' \(1\), "
        r"'dev' \(2\); such rows are in no split. Write one of these words, or none",
    ) as warned:
        data = converted(
            {"nodes": {"v": {"table": table, "key": "id", "split": "split"}}}, tmp_path / "v", report=report
        )
    assert any(each.filename == __file__ for each in warned)
    assert by_key(data, "v", "val_mask") == {row: row in (1, 2) for row in range(8)}
    assert by_key(data, "v", "test_mask") == {row: row == 7 for row in range(8)}
    assert json.loads(report.read_text())["nodes"]["v"]["split"] == {
        "column": "split",
        "rows": {"train": 1, "val": 2, "test": 1},
        "other_rows": 3,
        "others": {"Test": 1, "dev": 2},
    }


def test_the_first_other_words_are_counted_in_any_order_of_rows(tmp_path):
    words = [word for word in "ABCDEFGH" for _ in range(3)] + ["train"]
    shown = "'A' (3), 'B' (3), 'C' (3), 'D' (3), 'E' (3) and more"
    for number, order in enumerate([words, words[::-1]]):
        table = pa.table({"id": range(25), "split": order})
        described = {"nodes": {"v": {"table": table, "key": "id", "split": "split"}}}
        with pytest.warns(UserWarning, match=f"24 rows have .*{re.escape(shown)}; such"):
            small(described, tmp_path / str(number), 2**12)


def test_a_split_without_training_rows_gives_a_warning(tmp_path):
    table = pa.table({"id": [1, 2, 3], "region": ["a", "b", "c"], "split": ["TRAIN", "valid", None]})
    with pytest.warns(UserWarning, match="nodes.v: no row has 'train' in the column 'split' of the split") as warned:
        data = converted({"nodes": {"v": {"table": table, "key": "id", "split": "split"}}}, tmp_path / "v")
    assert by_key(data, "v", "region") == {1: -1, 2: -1, 3: -1}
    assert any(each.filename == __file__ for each in warned if "no row has 'train'" in str(each.message))


def test_infinity_is_no_part_of_x_in_any_split(tmp_path):
    table = pa.table({"id": [1, 2, 3], "a": [1.0, 2.0, -math.inf], "split": ["train", "train", "val"]})
    with pytest.raises(ValueError, match="'a' must be finite to become part of x, got infinity.*v id=3"):
        convert({"nodes": {"v": {"table": table, "key": "id", "x": ["a"], "split": "split"}}}, tmp_path / "v")


def test_numbers_whose_squares_are_no_floats_are_no_part_of_x(tmp_path):
    table = pa.table({"id": [1, 2, 3], "a": [1.0, -sys.float_info.max, 2.0]})
    with pytest.raises(ValueError, match=r"'a' must be at most 1e\+140 in size to become part of x, got -1.79.*v id=2"):
        convert({"nodes": {"v": {"table": table, "key": "id", "x": ["a"]}}}, tmp_path / "v")


def test_negative_labels_and_missing_ones_are_refused(tmp_path):
    table = pa.table({"id": [1, 2], "label": [-1, None]})
    with pytest.raises(ValueError, match="negative labels and rows without one"):
        convert({"nodes": {"v": {"table": table, "key": "id", "label": "label"}}}, tmp_path / "v")


def test_columns_that_cannot_be_attributes_are_left_out_with_a_warning(tmp_path):
    table = pa.table({"id": [1, 2], "where": [{"a": 1}, {"a": 2}], "clock": pa.array([1, 2], pa.time32("s"))})
    with pytest.warns(UserWarning, match=r"nodes.v: columns are left out \(clock: .*; where: struct"):
        data = converted({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "v")
    assert sorted(data["v"].keys()) == ["key_table", "num_nodes"]


@pytest.mark.parametrize("name", ["num_nodes", "key_table", "a/b", "n_id", "batch"])
def test_an_attribute_with_a_name_that_stands_for_something_else_is_refused_before_rows_are_read(tmp_path, name):
    table = pa.table({"id": [1, 1], name: [1, 2]})  # with a repeated key, which is found later
    with pytest.raises(
        ValueError, match=f"'{name}' (of 'v' )?cannot (have this name|become an attribute of this name)"
    ):
        convert({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "v")
    assert not [*tmp_path.iterdir()]


def test_a_missing_list_of_integers_has_no_advice_to_fill_it(tmp_path):
    table = pa.table({"id": [1, 2], "pair": [[1, 2], None]})
    with pytest.raises(ValueError, match=r"'pair' of large_list<.*> has no value in a row; name it in drop \(v id=2\)"):
        convert({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "v")


def test_too_many_texts_are_no_categories(tmp_path, monkeypatch):
    monkeypatch.setattr("salientpp.datasets.tabular.encodings.MOST_CATEGORIES", 3)
    described = shop(tmp_path, customer={"drop": ["region"]})
    with pytest.raises(ValueError, match="column 'email' must have at most 3 different texts"):
        convert(described, tmp_path / "shop")


def test_too_many_bytes_of_texts_are_no_categories(tmp_path, monkeypatch):
    monkeypatch.setattr("salientpp.datasets.tabular.encodings.MOST_CATEGORY_BYTES", 3)
    table = pa.table({"id": [1, 2], "text": ["é", "è"]})  # two bytes each
    with pytest.raises(ValueError, match="column 'text' must have at most .* different texts, of 3 bytes in all"):
        convert({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "v")


def test_tables_must_be_converted_before_they_are_loaded_or_partitioned(tmp_path):
    (tmp_path / "shop.toml").write_text("")
    for name in (f"tables:{tmp_path / 'shop.toml'}", str(tmp_path / "shop.toml")):
        with pytest.raises(
            ValueError, match=r"must be converted first, with `salientpp convert tables:.*shop.toml graph`"
        ):
            load_dataset(name)


def test_other_sources_have_no_report_and_tables_no_direction(tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="report is only for tables"):
        convert(f"edges:{tmp_path / 'edges.npy'}", tmp_path / "graph", report=tmp_path / "report.json")
    with pytest.raises(ValueError, match="undirected is not for tables"):
        convert(shop(tmp_path), tmp_path / "shop", undirected=True)


def test_a_directory_that_cannot_be_written_is_refused_before_rows_are_read(tmp_path):
    table = pa.table({"id": [1, 1]})  # a repeated key, which is found later
    described = {"nodes": {"v": {"table": table, "key": "id"}}}
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "own").write_text("")
    with pytest.raises(ValueError, match="file exists and is not a directory"):
        convert(described, tmp_path / "file")
    with pytest.raises(ValueError, match="full exists and is not empty"):
        convert(described, tmp_path / "full")
    graph = convert({"nodes": {"v": {"table": pa.table({"id": [1]}), "key": "id"}}}, tmp_path / "graph")
    (graph / "own").write_text("")
    with pytest.raises(ValueError, match="graph also holds own"):
        convert(described, graph, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "graph"]


def test_a_complete_graph_is_replaced_only_with_overwrite(tmp_path):
    described = shop(tmp_path)
    convert(described, tmp_path / "shop")
    with pytest.raises(ValueError, match=r"differs from the one that wrote it: finite was false, is true. Pass overw"):
        convert(described, tmp_path / "shop", finite=True)
    expected = contents(tmp_path / "shop")
    assert contents(convert(described, tmp_path / "shop", overwrite=True)) == expected


def check_resident_memory(folder: Path, described: dict[str, Any]) -> None:
    """Converts in a process of its own, with 64 MB for arrays and allocators."""
    program = """
import json
import sys
from pathlib import Path
import pyarrow, pyarrow.compute, pyarrow.dataset, pyarrow.parquet
from salientpp.datasets import convert
def kilobytes(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
asked = (kilobytes("VmRSS") + 64 * 1024) * 1024
Path("/proc/self/clear_refs").write_text("5")
convert(json.loads(sys.argv[1]), "graph", memory=asked)
print(kilobytes("VmHWM") * 1024, asked)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(described)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak, asked = map(int, done.stdout.split())
    print(f"{peak:,} bytes resident of {asked:,}")
    assert peak <= asked, f"{peak:,} bytes resident, expected at most {asked:,}"


def test_the_allocator_of_pyarrow_comes_back_after_the_last_of_several_conversions():
    before, contexts = pa.default_memory_pool().backend_name, [plain_memory() for _ in range(3)]
    for context in contexts:
        context.__enter__()
    for context in (contexts[0], contexts[2], contexts[1]):  # threads end in any order
        assert pa.default_memory_pool().backend_name == "system"
        context.__exit__(None, None, None)
    assert pa.default_memory_pool().backend_name == before


def test_resident_memory_stays_below_the_limit(tmp_path):
    # One copy of the keys of all edges takes 80 MB.
    rng = np.random.default_rng(0)
    keys = pa.array([f"customer {number:07d}" for number in range(100_000)])
    ends = [keys.take(pa.array(rng.integers(0, 100_000, 2_000_000))) for _ in range(2)]
    pq.write_table(pa.table({"id": keys, "age": rng.random(100_000)}), tmp_path / "v.parquet")
    pq.write_table(pa.table({"a": ends[0], "b": ends[1], "w": rng.random(2_000_000)}), tmp_path / "e.parquet")
    described = {
        "nodes": {"v": {"table": "v.parquet", "key": "id"}},
        "edges": {"v,e,v": {"table": "e.parquet", "source": "a", "target": "b"}},
    }
    check_resident_memory(tmp_path, described)


@pytest.mark.parametrize(("kind", "rows_of_a_key"), [("texts", 10), ("lists", 1), *rare(("texts", 1), ("lists", 10))])
def test_long_values_keep_resident_memory_below_the_limit(tmp_path, kind, rows_of_a_key):
    rows, entries = 50_000, 1024  # 4 KB a row, 200 MB in all
    few = {
        "texts": pa.array([f"{number:02d}" * 2 * entries for number in range(50)]),
        "lists": pa.FixedSizeListArray.from_arrays(
            pa.array(np.random.default_rng(0).random(50 * entries, np.float32)), entries
        ),
    }[kind]
    with pq.ParquetWriter(tmp_path / "v.parquet", pa.schema([("id", pa.int64()), ("long", few.type)])) as writer:
        ids = np.arange(rows) // rows_of_a_key
        writer.write_table(pa.table({"id": ids, "long": pa.chunked_array([few] * (rows // 50))}), 10_000)
    check_resident_memory(tmp_path, {"nodes": {"v": {"table": "v.parquet", "key": "id", "duplicates": "drop"}}})
