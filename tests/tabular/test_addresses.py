"""Tables and predictions open addresses in one way, and show no secrets of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from table_packages import package

from salientpp.addresses import is_address, is_remote, open_place, reason_of, without_password
from salientpp.datasets.tabular.doors import open_table
from salientpp.predictions.destination import folder_at
from salientpp.predictions.parquet_writer import new_parquet

pa, fs, parquet = package("pyarrow"), package("pyarrow.fs"), package("pyarrow.parquet")


@pytest.mark.parametrize(
    "address, shown",
    [
        ("s3://me:secret@b/a?secret_key=secret", "s3://b/a"),
        ("s3://me:se/secret@b/a", "s3://b/a"),  # slashes of passwords must be quoted, and often are not
        ("s3://me:se?secret@b/a", "s3://b/a"),
        ("s3://me:secret@secret@b/a", "s3://b/a"),
        ("https://token@host:8080/a@1/b:2@3", "https://host:8080/a@1/b:2@3"),
        ("hdfs://host:8020/a:b/c@d", "hdfs://host:8020/a:b/c@d"),
        ("s3://b/a@b", "s3://b/a@b"),
        ("http://host:80?token=secret@b", "http://host:80"),
        ("/a:b@c?d", "/a:b@c?d"),
    ],
)
def test_an_address_is_shown_without_secrets(address, shown):
    assert without_password(address) == shown
    assert reason_of(ValueError(f"cannot parse '{address}' at all")) == f"cannot parse '{shown}' at all"


def test_an_address_has_a_scheme():
    addresses = ["s3://b/a", "S3://b", "salientpp://host:1", "file:///a", "memory://a"]
    assert all(map(is_address, addresses)) and not any(map(is_address, ["/a", "a://b"[1:], Path("s3://b"), None]))
    assert [*filter(is_remote, addresses)] == ["s3://b/a", "S3://b", "memory://a"]


@pytest.mark.parametrize(
    "address", ["memory://rows/my%20rows", "MEMORY://rows/a b", "file://{}/a%20b", "FILE://{}/c", "{}/what?"]
)
def test_predictions_at_an_address_are_a_table_at_the_same_address(tmp_path, address):
    package("fsspec")
    address = address.format(tmp_path)
    table = pa.table({"id": range(5)})
    folder = folder_at(address)
    folder.prepare()
    with new_parquet(folder, "part-00000.parquet") as file:
        file.append(table)
        file.finish(table.schema)
    read = open_table([address], tmp_path, "t")
    assert [row for each in read.batches(["id"], 10) for row in each.batch.column("id").to_pylist()] == [*range(5)]
    assert not any("secret" in facts["address"] for facts in read.facts())


@pytest.mark.parametrize("fails", ["info", "find", "_open", "read"])
def test_errors_of_any_type_that_packages_raise_name_the_table_and_the_address(monkeypatch, fails):
    fsspec, memory = package("fsspec"), package("fsspec.implementations.memory").MemoryFileSystem

    class Odd(Exception):
        """Error of a package, such as botocore's, that is no OSError."""

    def odd(*_, **__):
        raise Odd("the token s3://me:secret@b is stale")

    class Stale(memory):
        protocol = "stale"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return f"/{path.removeprefix('stale://').strip('/')}"

    fsspec.register_implementation("stale", Stale, clobber=True)
    with Stale().open("/t/a.parquet", "wb") as file:
        parquet.write_table(pa.table({"id": range(5)}), file)
    table = open_table(["stale://t/*.parquet"], Path(), "nodes.v")
    monkeypatch.setattr(Stale if fails != "read" else type(Stale().open("/t/a.parquet")), fails, odd)
    words = r"nodes.v: stale://.*t/.* cannot be read \(the token s3://b is stale\); check the connection"
    with pytest.raises(OSError, match=words):
        open_table(["stale://t/*.parquet"], Path(), "nodes.v")
    if fails != "find":
        with pytest.raises(OSError, match=words):
            for _ in table.batches(["id"], 2):
                pass
            table.check_unchanged()


def test_a_name_that_is_not_utf_8_is_refused_only_if_it_must_be_read(tmp_path):
    parquet.write_table(pa.table({"id": range(5)}), tmp_path / "a.parquet")
    (tmp_path / os.fsdecode(b"\xff.parquet")).touch()
    assert open_table(["a.parquet"], tmp_path, "t").num_rows == 5
    with pytest.raises(ValueError, match=r"t: \*.parquet, or a name in its folder, is not UTF-8 \(.*\); rename it"):
        open_table(["*.parquet"], tmp_path, "t")
    with pytest.raises(FileNotFoundError, match=r"t: b.parquet: no such file or folder"):
        open_table(["b.parquet"], tmp_path, "t")


@pytest.mark.parametrize(
    "address, root, path, shown",
    [
        ("s3://bucket/a b/c%20d/", "bucket", "bucket/a b/c%20d", "s3://bucket/a b/c%20d"),
        ("S3://bucket", "bucket", "bucket", "s3://bucket"),
        ("abfs://box@host/a/*.csv", "box/", "box/a/*.csv", "abfs://box/a/*.csv"),
        ("hdfs://me@host:8020/a/b", "/", "/a/b", "hdfs://host:8020/a/b"),
        ("hdfs://host", "/", "/", "hdfs://host/"),
    ],
)
def test_paths_stay_as_they_stand_in_an_address(monkeypatch, address, root, path, shown):
    """``root`` is the path that pyarrow returns for the address of the whole file system."""
    asked: list[str] = []
    stand_in: Any = SimpleNamespace(from_uri=lambda uri: (asked.append(uri), root))
    monkeypatch.setattr(fs, "FileSystem", stand_in)
    place = open_place(address, Path(), "t")
    assert (place.path, place.name()) == (path, shown)
    assert "%20" not in asked[0] and " " not in asked[0]
