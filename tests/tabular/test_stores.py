"""Laws of tables in object stores, against a server of S3 on this machine: the same rows as on the disk, and errors that name the table and the file."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from object_store import Store
from table_packages import package

from salientpp.datasets import convert, load_dataset
from salientpp.datasets.tabular import staging
from salientpp.datasets.tabular.doors import Table, open_table

pa, parquet = package("pyarrow"), package("pyarrow.parquet")

N = 5000
TABLE = pa.table({"id": [f"key {i}" for i in range(N)], "v": range(N)})


@pytest.fixture
def store(bucket, tmp_path) -> Store:
    for number in range(3):
        part = TABLE.slice(number * 2000, 2000)
        parquet.write_table(part, tmp_path / "part.parquet", row_group_size=500, compression="none")
        bucket.put(f"orders/part-{number}.parquet", tmp_path / "part.parquet")
    return bucket


def table_of(store: Store, address: str, what: str = "nodes.t") -> Table:
    return open_table([store.at(address)], Path(), what)


def keys_of(table: Table) -> list[str]:
    return [key for each in table.batches(["id"], 300) for key in each.batch.column("id").to_pylist()]


@pytest.mark.parametrize("address", ["shop/orders/*.parquet", "shop/orders", "shop/orders/", "shop/**/part-*.parquet"])
def test_files_of_a_bucket_are_a_table(store, address):
    table = table_of(store, address)
    assert keys_of(table) == TABLE["id"].to_pylist() and table.num_rows == N
    assert [facts["address"] for facts in table.facts()] == [f"s3://shop/orders/part-{i}.parquet" for i in range(3)]
    assert all(facts["etag"] and facts["modified"] for facts in table.facts())
    table.check_unchanged()


def test_text_of_a_bucket_is_a_table(store, tmp_path):
    (tmp_path / "t.csv").write_text("id,v\n" + "".join(f"{i},x\n" for i in range(100)))
    store.put("t.csv", tmp_path / "t.csv")
    assert keys_of(table_of(store, "shop/t.csv")) == list(range(100))


def test_options_of_the_environment_are_used(store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{store.proxy.address}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert open_table(["s3://shop/orders/"], Path(), "t").num_rows == N


def test_a_broken_connection_is_an_error_and_a_second_pass_works(store):
    table = table_of(store, "shop/orders/*.parquet")
    store.proxy.breaks = "part-1.parquet"
    found = []
    with pytest.raises(
        OSError, match=r"nodes.t: s3://shop/orders/part-1.parquet after row 0 cannot be read \(.*; check the connection"
    ):
        for each in table.batches(["id"], 300):
            found += each.batch.column("id").to_pylist()
    assert found == TABLE["id"].to_pylist()[:2000] and store.proxy.broken
    store.proxy.breaks = ""
    assert keys_of(table) == TABLE["id"].to_pylist()
    table.check_unchanged()


def test_a_conversion_whose_connection_breaks_goes_on_and_repeats_no_finished_step(store, tmp_path, monkeypatch):
    edges = pa.table({"a": TABLE["id"], "b": TABLE["id"].take(pa.array(range(N - 1, -1, -1)))})
    parquet.write_table(edges, tmp_path / "e.parquet", row_group_size=500, compression="none")
    store.put("links/e.parquet", tmp_path / "e.parquet")
    relation = {"table": f"s3://shop/links/*.parquet{store.query}", "source": "a", "target": "b"}
    nodes = {"v": {"table": f"s3://shop/orders/*.parquet{store.query}", "key": "id"}}
    described = {"nodes": nodes, "edges": {"v,to,v": relation}}
    read, reads, join = staging.PlannedTable.batches, list[str](), staging.join_edges

    def counted(self, columns, most_rows):
        reads.append(self.plan.title)
        return read(self, columns, most_rows)

    def broken(*arguments, **named):
        store.proxy.breaks = "links/e.parquet"
        return join(*arguments, **named)

    monkeypatch.setattr(staging.PlannedTable, "batches", counted)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"edges.v,to,v: s3://shop/links/e.parquet after"):
        patch.setattr(staging, "join_edges", broken)
        convert(described, tmp_path / "graph")
    assert {*reads} == {"nodes.v", "edges.v,to,v"} and not (tmp_path / "graph").exists()
    store.proxy.breaks = ""
    reads.clear()
    data: Any = load_dataset(f"converted:{convert(described, tmp_path / 'graph')}")
    assert {*reads} == {"edges.v,to,v"}
    assert data["v"].num_nodes == data["v", "to", "v"].adj_t.values().numel() == N


def test_permission_that_is_taken_away_is_an_error_with_the_file(store):
    table = table_of(store, "shop/orders/*.parquet")
    store.proxy.forbids = "part-1"
    with pytest.raises(PermissionError, match=r"nodes.t: no permission to read s3://shop/orders/part-1.parquet"):
        keys_of(table)
    with pytest.raises(PermissionError, match=r"nodes.t: no permission to read s3://shop/orders/part-1.parquet"):
        table.check_unchanged()


def test_a_connection_that_breaks_at_the_start_is_an_error(store):
    store.proxy.breaks = "part-1.parquet"
    with pytest.raises(OSError, match=r"nodes.t: s3://shop/orders/part-1.parquet cannot be read"):
        table_of(store, "shop/orders/*.parquet")
    store.proxy.breaks = ""
    assert keys_of(table_of(store, "shop/orders/*.parquet")) == TABLE["id"].to_pylist()


def test_a_server_that_is_gone_is_an_error(store):
    table = table_of(store, "shop/orders/*.parquet")
    store.proxy.close()
    with pytest.raises(OSError, match=r"nodes.t: s3://shop/orders/part-0.parquet.* cannot be read"):
        keys_of(table)
    with pytest.raises(OSError, match=r"nodes.t: s3://shop/orders/part-0.parquet cannot be read"):
        table.check_unchanged()
    with pytest.raises(OSError, match=r"nodes.t: s3://shop/orders/\*.parquet cannot be read"):
        table_of(store, "shop/orders/*.parquet")


@pytest.mark.parametrize(
    "forbidden, address", [("part-1", "shop/orders/part-1.parquet"), ("shop", "shop/orders/*.parquet")]
)
def test_a_file_without_permission_is_named(store, forbidden, address):
    store.proxy.forbids = forbidden
    with pytest.raises(PermissionError) as caught:
        table_of(store, address)
    text = str(caught.value)
    assert text.startswith(f"nodes.t: no permission to read s3://{address} (") and "check the credentials" in text


def test_a_missing_file_of_a_bucket_is_named(store):
    with pytest.raises(
        FileNotFoundError, match=r"nodes.t: s3://shop/orders/part-9.parquet: no such file or folder. Did you mean part-"
    ):
        table_of(store, "shop/orders/part-9.parquet")
    with pytest.raises(
        FileNotFoundError,
        match=r"nodes.t: no file matches s3://shop/orders/\*.csv; the folder s3://shop/orders has part-0",
    ):
        table_of(store, "shop/orders/*.csv")
    with pytest.raises(OSError, match=r"nodes.t: .*s3://nobucket"):
        table_of(store, "nobucket/orders/*.csv")


def test_a_file_of_a_bucket_that_changes_is_noticed(store, tmp_path):
    table = table_of(store, "shop/orders/*.parquet")
    parquet.write_table(TABLE.slice(0, 2000), tmp_path / "other.parquet", row_group_size=500, compression="none")
    store.put("orders/part-1.parquet", tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"nodes.t: s3://shop/orders/part-1.parquet changed while it was read"):
        table.check_unchanged()


def test_errors_and_facts_have_no_passwords(store):
    address = f"s3://user:secret@shop/orders/part-9.parquet{store.query}"
    with pytest.raises(OSError) as caught:
        open_table([address], Path(), "t")
    assert "secret" not in str(caught.value) and "s3://shop/orders/part-9.parquet" in str(caught.value)
    table = open_table([address.replace("part-9", "part-1")], Path(), "t")
    assert "secret" not in str(table.facts()) and table.facts()[0]["address"] == "s3://shop/orders/part-1.parquet"


def test_files_of_a_web_server_are_a_table(store):
    package("aiohttp")
    store.client.put_object_acl(Bucket="shop", Key="orders/part-0.parquet", ACL="public-read")
    address = f"http://{store.proxy.address}/shop/orders/part-0.parquet?token=secret"
    table = open_table([address], Path(), "t")
    assert keys_of(table) == TABLE["id"].to_pylist()[:2000] and "secret" not in str(table.facts())
    table.check_unchanged()
    store.proxy.forbids = "part-0"
    with pytest.raises(OSError, match=r"t: http://.*part-0.parquet") as caught:
        keys_of(table)
    assert "secret" not in str(caught.value)


def test_a_file_of_a_web_server_that_changed_is_found_out(tmp_path):
    package("aiohttp")
    (tmp_path / "t.csv").write_text("id\n1\n")
    os.utime(tmp_path / "t.csv", (1e9, 1e9))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/t.csv"
            table = open_table([address], tmp_path, "t")
            table.check_unchanged()
            assert open_table([address], tmp_path, "t").facts() == table.facts()
            (tmp_path / "t.csv").write_text("id\n2\n")
            with pytest.raises(ValueError, match="t.csv changed while it was read: its etag was"):
                table.check_unchanged()
            assert open_table([address], tmp_path, "t").facts() != table.facts()
        finally:
            server.shutdown()
