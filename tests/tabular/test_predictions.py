"""Laws of predictions in Parquet files: each row has the key of its vertex, and files appear completely or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pyarrow as pa
import pytest
import torch
import torch_geometric.nn as gnn
from graphs import random_data
from keyed import known_keys, numbers_in
from pyarrow import fs, parquet
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp.predictions import destination, parquet_writer

PARTS, WIDTH = 4, 2


def graph() -> Data:
    data = random_data(num_vertices=60, num_edges=300, directed=True)
    data.x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return data


def model(width: int = WIDTH) -> gnn.GraphSAGE:
    torch.manual_seed(0)
    return gnn.GraphSAGE(3, 4, 2, width).eval()


@torch.no_grad()
def expected(width: int = WIDTH) -> Tensor:
    data = graph()
    return model(width)(data.x, data.edge_index)


def parts_in(root: Path, has_keys: bool = True, **options: Any) -> Path:
    """Partitions the graph into parts of different sizes. One is empty."""
    data = graph()
    if has_keys:
        data.key_table = known_keys(root.parent, 60)
    assignment = torch.tensor([0, 1, 3]).repeat_interleave(torch.tensor([30, 20, 10]))
    split = {"train": torch.arange(60)}
    salientpp.partition(data, PARTS, root, [-1], 32, method=assignment, split=split, **options)
    return root


def infer(rank: int, root: str, out: str, file_bytes: int = 0) -> None:
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    salientpp.inference(model(), salientpp.load(root), out=out)


def in_order(table: pa.Table, numbers: list[int]) -> Tensor:
    """Returns the outputs in the order of the vertices, each of which has one row."""
    assert sorted(numbers) == list(range(60))
    rows = torch.tensor(table.column("output").to_pylist())
    return rows[torch.tensor(numbers).argsort()]


@pytest.mark.parametrize(("topology", "world_sizes"), [("whole", (4, 2, 3, 1)), ("parts", (2,))])
def test_each_part_has_its_file_of_keys_and_outputs_on_any_number_of_ranks(tmp_path, topology, world_sizes):
    root, out = parts_in(tmp_path / "graph", topology=topology), tmp_path / "predictions.parquet"
    for world_size in world_sizes:  # into the same folder
        distributed.run(infer, world_size, str(root), str(out))
        assert sorted(path.name for path in out.iterdir()) == [f"part-{k:05d}.parquet" for k in range(PARTS)]
        table = parquet.read_table(out)
        assert table.schema.names == ["shop", "customer_id", "output"]
        assert table.schema.field("output").type == pa.list_(pa.float32(), WIDTH)
        assert table.column("shop").to_pylist() == [number % 3 for number in numbers_in(table)]
        assert torch.allclose(in_order(table, numbers_in(table)), expected(), atol=1e-6)
        assert parquet.read_metadata(out / "part-00002.parquet").num_rows == 0, "a part without vertices"


def test_vertices_without_keys_have_their_ids_in_the_data(tmp_path):
    root, out = parts_in(tmp_path / "graph", has_keys=False), tmp_path / "predictions.parquet"
    distributed.run(infer, 2, str(root), str(out))
    table = parquet.read_table(out)
    assert table.schema.names == ["id", "output"]
    assert torch.allclose(in_order(table, table.column("id").to_pylist()), expected(), atol=1e-6)


@pytest.mark.parametrize("out", ["rows.parquet", "memory://bucket/rows"])
def test_a_graph_in_memory_has_one_file(tmp_path, monkeypatch, out):
    import fsspec

    monkeypatch.chdir(tmp_path)
    data = graph()
    data.key_table = known_keys(tmp_path, 60)
    salientpp.inference(model(1), data, out=out)
    files = fsspec.core.url_to_fs(out)[0]
    with files.open(f"{out}/part-00000.parquet") as file:
        table = parquet.read_table(file)
    assert [name.rpartition("/")[2] for name in files.find(out)] == ["part-00000.parquet"]
    assert table.schema.field("output").type == pa.float32(), "rows of one number"
    assert numbers_in(table) == list(range(60))
    assert torch.allclose(in_order(table, numbers_in(table)), expected(1).flatten(), atol=1e-6)


def test_row_groups_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_writer, "GROUP_ROWS", 7)
    salientpp.inference(model(), graph(), out=tmp_path / "a.parquet")
    with salientpp.PredictionWriter(tmp_path / "b.parquet", graph()) as writer:
        for ids in torch.arange(60).split(16):
            writer.write(ids, expected()[ids])
    for folder in "a.parquet", "b.parquet":
        about = parquet.read_metadata(tmp_path / folder / "part-00000.parquet")
        assert [about.row_group(index).num_rows for index in range(about.num_row_groups)] == [7] * 8 + [4]
        table = parquet.read_table(tmp_path / folder)
        assert torch.allclose(in_order(table, table.column("id").to_pylist()), expected(), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "bool", "uint8"])
def test_outputs_keep_their_dtype_and_shape(tmp_path, dtype):
    steps = [gnn.SAGEConv(3, 2), lambda x: torch.stack([x, x + 1, x * 9], 2).abs().to(getattr(torch, dtype))]
    rows = salientpp.inference(steps, graph(), out=tmp_path / "a.parquet")
    assert rows.shape == (60, 2, 3)
    assert parquet.read_table(tmp_path / "a.parquet").column("output").to_pylist() == rows.tolist()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: x.bfloat16(), "rows of torch.bfloat16 cannot be a column of a table (output)"),
        (lambda x: x.to(torch.complex64), "rows of torch.complex64 cannot be a column"),
        (lambda x: x[:, :0], "rows of output must have at least one number each, got the shape [0, 0]"),
    ],
)
def test_outputs_that_are_no_column_are_refused_before_the_work(tmp_path, step, text):
    with pytest.raises(ValueError) as raised:
        salientpp.inference([gnn.SAGEConv(3, 2), step], graph(), out=tmp_path / "a.parquet")
    assert text in str(raised.value) and not (tmp_path / "a.parquet").exists()


def test_a_key_column_called_output_keeps_its_name(tmp_path):
    data = graph()
    data.key_table = known_keys(tmp_path, 60, ("output", "output_"))
    salientpp.inference(model(), data, out=tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").schema.names == ["output", "output_", "output__"]
    with pytest.raises(ValueError, match="a key column is called 'output' already; choose another name"):
        salientpp.PredictionWriter(tmp_path / "b.parquet", data).write(torch.arange(2), {"output": torch.ones(2)})


def test_keys_of_another_graph_are_refused(tmp_path):
    data = graph()
    data.key_table = known_keys(tmp_path, 61)
    with pytest.raises(ValueError, match="key_table must have a row for each of the 60 vertices, got 61"):
        salientpp.inference(model(), data, out=tmp_path / "a.parquet")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def infer_on_full_disk(rank: int, root: str, out: str) -> None:
    infer(rank, root, out, file_bytes=600 if rank == 1 else 0)


def test_a_rank_that_cannot_write_leaves_the_files_of_an_earlier_call_on_every_rank(tmp_path):
    root, out = parts_in(tmp_path / "graph"), tmp_path / "rows.parquet"
    distributed.run(infer, 2, str(root), str(out))
    before = contents(out)
    failed = distributed.run(infer_on_full_disk, 2, str(root), str(out), may_fail=True)
    words = ".parquet cannot be written (File too large); choose another place"
    assert all(words in each.text for each in failed), failed
    assert contents(out) == before, "neither a changed file nor a temporary one"


def test_files_of_other_parts_are_refused(tmp_path):
    root, out = parts_in(tmp_path / "graph"), tmp_path / "rows.parquet"
    out.mkdir()
    (out / "part-00004.parquet").touch()
    (out / "part-00004.npy").touch()
    for failed in distributed.run(infer, 2, str(root), str(out), may_fail=True):
        assert f"the folder {out} must have no files of other parts than the 4 of this graph, but it has" in failed.text
    assert len(contents(out)) == 2


# --- addresses ----------------------------------------------------------------------------------------------


class _Bucket:
    """Registers the scheme ``bucket://``: folders on this disk, with an error if a name has the word 'full'."""

    @staticmethod
    def register(root: str) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        class Bucket(DirFileSystem):
            protocol = "bucket"

            def __init__(self, **options: Any) -> None:
                super().__init__(path=root, fs=LocalFileSystem(auto_mkdir=True), **options)

            @classmethod
            def _strip_protocol(cls, path: Any) -> Any:
                return path.removeprefix("bucket://") if isinstance(path, str) else path

            def mv(self, source: str, target: str, **options: Any) -> None:
                if os.path.exists(f"{root}/denied") and target.endswith("00001.parquet"):
                    raise PermissionError("AccessDenied")
                super().mv(source, target, **options)

        fsspec.register_implementation("bucket", Bucket, clobber=True)


def infer_at_address(rank: int, root: str, folder: str, out: str) -> None:
    _Bucket.register(folder)
    infer(rank, root, out)


def test_ranks_write_to_an_address(tmp_path):
    root, store = parts_in(tmp_path / "graph"), tmp_path / "store"
    store.mkdir()
    distributed.run(infer_at_address, 2, str(root), str(store), "bucket://predictions/today")
    out = store / "predictions" / "today"
    assert sorted(path.name for path in out.iterdir()) == [f"part-{k:05d}.parquet" for k in range(PARTS)]
    table = parquet.read_table(out)
    assert torch.allclose(in_order(table, numbers_in(table)), expected(), atol=1e-6)
    (out / "part-00001.parquet").write_bytes(b"of an earlier call")
    (store / "denied").touch()
    failed = distributed.run(infer_at_address, 2, str(root), str(store), "bucket://predictions/today", may_fail=True)
    words = "bucket://predictions/today/part-00001.parquet cannot be written (AccessDenied); choose another place"
    assert all(words in each.text for each in failed), failed
    assert (out / "part-00001.parquet").read_bytes() == b"of an earlier call"
    assert len([*out.iterdir()]) == PARTS, "no temporary file stays"


def test_a_bucket_of_s3_gets_whole_files(monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    for name in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED":
        monkeypatch.setenv(name, "true")
    monkeypatch.setattr(destination, "_MOST_COPIED", 3000)  # the second file is copied by this process
    server.start()
    try:
        options = f"endpoint_override=127.0.0.1:{server.get_host_and_port()[1]}&scheme=http&region=us-east-1"
        files, _ = fs.FileSystem.from_uri(f"s3://bucket?{options}&allow_bucket_creation=true")
        files.create_dir("bucket")
        for width in 1, 20:
            rows = salientpp.inference(model(width), graph(), out=f"s3://bucket/some/rows?{options}")
            assert [each.base_name for each in files.get_file_info(fs.FileSelector("bucket/some/rows"))] == [
                "part-00000.parquet"
            ]
            table = parquet.read_table("bucket/some/rows", filesystem=files)
            assert torch.equal(torch.tensor(table.column("output").to_pylist()), rows.squeeze(1))
        with pytest.raises(ValueError, match=r"s3://none/rows cannot be written \(.*NO_SUCH_BUCKET"):
            salientpp.inference(model(), graph(), out=f"s3://none/rows?{options}")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("memory://", "memory:// must name a folder, such as s3://bucket/folder"),
        ("nowhere://a/b", "out: nowhere://a/b has the unknown scheme nowhere://"),
        ("https://127.0.0.1:1/a", "https://127.0.0.1:1/a"),
    ],
)
def test_an_address_that_cannot_be_written_is_refused_before_the_work(address, text):
    with pytest.raises((ValueError, ImportError)) as raised:
        salientpp.inference(model(), graph(), out=address)
    assert text in str(raised.value)


def test_an_address_of_a_file_is_a_folder_on_this_disk(tmp_path):
    salientpp.inference(model(), graph(), out=f"file://{tmp_path}/my%20rows")
    assert (tmp_path / "my rows" / "part-00000.parquet").is_file()
    salientpp.inference(model(), graph(), out=f"file://{tmp_path}/what?#1.parquet")
    assert (tmp_path / "what?#1.parquet" / "part-00000.parquet").is_file()
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize(
    "address",
    [
        "nowhere://me:secret@a/b",
        "s3://me:secret@a/b?endpoint_override=http://127.0.0.1:1&region=us-east-1",
        "s3://me:se/secret@a/b?region=us-east-1",
    ],
)
def test_errors_do_not_show_passwords(address):
    with pytest.raises((ValueError, ImportError)) as raised:
        salientpp.inference(model(), graph(), out=address)
    assert "//a/b" in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_that_cannot_be_closed_fails_before_it_has_its_name(tmp_path, monkeypatch):
    """An object store may refuse a file when it is closed. Every rank closes its file before any rank gives its file the name."""
    folder = destination.LocalFolder(tmp_path)

    class Refused(io.BytesIO):
        def close(self) -> None:
            raise OSError("refused")

    monkeypatch.setattr(folder, "_open", lambda temporary: Refused())
    with pytest.raises(OSError, match=r"/a cannot be written \(refused\)"), parquet_writer.new_parquet(folder, "a") as file:  # fmt: skip
        file.finish(pa.schema([("id", pa.int64())]))
        raise AssertionError("the file was taken for complete")


def test_a_large_object_that_cannot_be_copied_leaves_no_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "temporary").write_bytes(b"12345")

    class Broken:
        """File system of S3 whose connection breaks after a part of the file."""

        type_name = "s3"

        def __getattr__(self, name: str) -> Any:
            return getattr(fs.LocalFileSystem(), name)

        @contextlib.contextmanager
        def open_input_stream(self, path: str) -> Iterator[Any]:
            pieces = [b"123"]
            yield SimpleNamespace(read=lambda size: pieces.pop())

    monkeypatch.setattr(destination, "_MOST_COPIED", 1)
    folder = destination.RemoteFolder.__new__(destination.RemoteFolder)
    folder.name, folder._files, folder._path = "s3://a", Broken(), str(tmp_path)
    with pytest.raises(IndexError):
        folder._rename("temporary", "final")
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


def test_without_pyarrow_an_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install salientpp\[tables\]"):
        salientpp.inference(model(), graph(), out=tmp_path / "a.parquet")
    assert salientpp.inference(model(), graph(), out=tmp_path / "a").shape == (60, WIDTH)
