"""Laws of tables of Delta and Iceberg: the version at the time of opening is read, without deleted rows, in every pass."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from table_packages import package

from salientpp.datasets import convert, load_dataset
from salientpp.datasets.tabular.doors import Table, facts_of, open_table

pa = package("pyarrow")
TABLE = pa.table({"id": [f"key {i}" for i in range(100)], "v": pa.array(range(100), pa.int64())})


def keys_of(table: Table) -> list[str]:
    found = [each for batch in table.batches(["v", "id"], 7) for each in batch.batch.to_pylist()]
    assert all(row["id"] == f"key {row['v']}" for row in found)
    return sorted((row["id"] for row in found), key=lambda key: int(key[4:]))


def test_a_delta_table_is_read_at_its_version(tmp_path):
    deltalake = package("deltalake")
    deltalake.write_deltalake(tmp_path / "t", TABLE.slice(0, 60))
    deltalake.write_deltalake(tmp_path / "t", TABLE.slice(60), mode="append")
    deltalake.DeltaTable(tmp_path / "t").delete("v >= 90")
    table = open_table(["delta:t"], tmp_path, "nodes.t")
    (facts,) = table.facts()
    assert facts_of(["delta:t"], tmp_path, "nodes.t") == [facts]
    assert (facts["address"], facts["version"]) == ("delta:t", 2)
    assert table.num_rows == 90 and table.names == ("id", "v")
    deltalake.write_deltalake(tmp_path / "t", TABLE.slice(90), mode="append")
    for _ in range(2):
        assert keys_of(table) == TABLE["id"].to_pylist()[:90]
    table.check_unchanged()
    assert open_table([f"delta:{tmp_path}/t"], tmp_path, "nodes.t").num_rows == 100
    each = next(table.batches(["id"], 7))
    assert each.where(3).startswith("delta:t version 2, ") and each.where(3).endswith(".parquet, row 3")


def test_a_delta_table_that_is_made_again_has_other_facts(tmp_path):
    deltalake = package("deltalake")
    facts = []
    for rows in TABLE.slice(0, 60), TABLE.slice(40):
        deltalake.write_deltalake(tmp_path / "t", rows)
        facts.append(open_table(["delta:t"], tmp_path, "nodes.t"))
        shutil.rmtree(tmp_path / "t")
    assert facts[0].facts() != facts[1].facts()


def test_partition_columns_of_delta_are_columns(tmp_path):
    deltalake = package("deltalake")
    table = TABLE.append_column("half", pa.array([i // 50 for i in range(100)], pa.int64()))
    deltalake.write_deltalake(tmp_path / "t", table, partition_by=["half"])
    opened = open_table(["delta:t"], tmp_path, "nodes.t")
    rows = [row for each in opened.batches(["half", "v"], 9) for row in each.batch.to_pylist()]
    assert sorted((row["v"], row["half"]) for row in rows) == [(i, i // 50) for i in range(100)]


def test_a_wrong_delta_table_is_an_error(tmp_path):
    deltalake = package("deltalake")
    (tmp_path / "empty").mkdir()
    for address in ("delta:none", "delta:empty"):
        with pytest.raises(FileNotFoundError, match=f"nodes.t: {address}: no such file"):
            open_table([address], tmp_path, "nodes.t")
    deltalake.write_deltalake(tmp_path / "t", TABLE)
    table = open_table(["delta:t"], tmp_path, "nodes.t")
    for path in (tmp_path / "t").glob("*.parquet"):
        path.unlink()
    with pytest.raises(OSError, match=r"nodes.t: delta:t version 0, .*, after row 0: no such file"):
        keys_of(table)


@pytest.fixture
def iceberg(tmp_path, monkeypatch) -> Iterator[Any]:
    package("pyiceberg")
    catalogs = package("pyiceberg.catalog.sql")
    (tmp_path / "warehouse").mkdir()
    catalog = catalogs.SqlCatalog(
        "local", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    # pyiceberg reads its settings when it is imported.
    monkeypatch.setattr("pyiceberg.catalog.load_catalog", {"local": catalog}.__getitem__)
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", TABLE.schema)
    table.append(TABLE)
    yield table


def test_an_iceberg_table_is_read_at_its_snapshot(tmp_path, iceberg):
    iceberg.delete("v >= 90")
    folder = iceberg.location().removeprefix("file://")
    metadata = iceberg.metadata_location.removeprefix("file://")
    addresses = [f"iceberg:{folder}", f"iceberg:{metadata}", f"iceberg:file://{metadata}"]
    tables = [open_table([address], tmp_path, "nodes.t") for address in addresses]
    snapshot = iceberg.current_snapshot().snapshot_id
    iceberg.append(TABLE.slice(90))
    for address, table in zip(addresses, tables):
        assert table.facts() == [{"address": address, "snapshot": snapshot, "schema": 0}]
        assert table.names == ("id", "v")
        for _ in range(2):
            assert keys_of(table) == TABLE["id"].to_pylist()[:90]
        table.check_unchanged()
    # The newest metadata of the folder, and the catalog, have the rows that were added.
    for address in (f"iceberg:{folder}", "iceberg:local/shop.orders"):
        assert keys_of(open_table([address], tmp_path, "nodes.t")) == TABLE["id"].to_pylist()


def test_an_iceberg_table_has_the_columns_of_now(tmp_path, iceberg):
    before = facts_of(["iceberg:local/shop.orders"], tmp_path, "nodes.t")
    with iceberg.update_schema() as schema:
        schema.rename_column("v", "w")
    assert facts_of(["iceberg:local/shop.orders"], tmp_path, "nodes.t") != before
    with iceberg.update_schema() as schema:
        schema.rename_column("id", "v")
    table = open_table(["iceberg:local/shop.orders"], tmp_path, "nodes.t")
    rows = [row for each in table.batches(table.names, 7) for row in each.batch.to_pylist()]
    assert sorted(row["w"] for row in rows) == TABLE["v"].to_pylist()
    assert all(row["v"] == f"key {row['w']}" for row in rows)


def test_a_wrong_iceberg_table_is_an_error(tmp_path, iceberg):
    for address in ("none", "none/metadata/v1.metadata.json", "local/shop.none"):
        with pytest.raises(FileNotFoundError, match=f"nodes.t: iceberg:{address}: no such file"):
            open_table([f"iceberg:{address}"], tmp_path, "nodes.t")
    table = open_table(["iceberg:local/shop.orders"], tmp_path, "nodes.t")
    shutil.rmtree(tmp_path / "warehouse")
    with pytest.raises(OSError, match=r"nodes.t: iceberg:local/shop.orders snapshot \d+, after row 0: no such file"):
        keys_of(table)


@pytest.mark.parametrize("kind, name", [("delta", "deltalake"), ("iceberg", "pyiceberg.catalog")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind, name):
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=rf"nodes.t: {kind}:t is read with the '{name.partition('.')[0]}' package"):
        open_table([f"{kind}:t"], tmp_path, "nodes.t")


def test_a_query_of_deltalake_is_a_table_and_a_table_of_it_is_written_as_an_address(tmp_path):
    deltalake = package("deltalake")
    deltalake.write_deltalake(tmp_path / "t", TABLE)
    opened = deltalake.DeltaTable(tmp_path / "t")
    query = deltalake.QueryBuilder().register("t", opened).execute("select id, v from t where v >= 90 order by v")
    convert({"nodes": {"n": {"table": query, "key": "id"}}}, tmp_path / "graph")
    data = load_dataset(f"converted:{tmp_path / 'graph'}")
    assert sorted(data["n"].v.tolist()) == list(range(90, len(TABLE)))
    with pytest.raises(ValueError, match=r"got .*DeltaTable; write delta:ADDRESS, or pass its to_pyarrow_table\(\)"):
        convert({"nodes": {"n": {"table": opened, "key": "id"}}}, tmp_path / "other")
