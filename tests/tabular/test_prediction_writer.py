"""Laws of the writer for sampled batches: rows in any order, on any rank, and files of all ranks or of none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_hetero
from keyed import known_keys, numbers_in
from pyarrow import parquet
from torch_geometric.data import HeteroData

import salientpp
from salientpp.predictions import parquet_writer


def shop(num_customers: int = 50) -> HeteroData:
    data = HeteroData()
    data["customer"].x = torch.arange(num_customers, dtype=torch.float32)[:, None]
    data["order"].x = torch.arange(80, dtype=torch.float32)[:, None]
    generator = torch.Generator().manual_seed(0)
    ends = torch.stack([torch.randint(num_customers, (80,), generator=generator), torch.arange(80)])
    data["customer", "placed", "order"].edge_index = ends
    data["order", "rev_placed", "customer"].edge_index = ends.flip(0)
    return data


def predict(rank: int, root: str, out: str, fails_on: int = -1, only: int = -1) -> int:
    part = salientpp.load(root)
    loader = salientpp.NeighborLoader(part, [2], ("customer", "all"), batch_size=8, shuffle=True, uneven="exact")
    with salientpp.PredictionWriter(out, part, "customer") as writer:
        for batch in loader:
            customers = batch["customer"]
            seeds = slice(customers.batch_size)
            if only in (-1, rank):
                outputs = {"score": customers.x[seeds], "both": customers.x[seeds].expand(-1, 2) * 2}
                writer.write(customers.n_id[seeds], outputs)
        if rank == fails_on:
            raise ArithmeticError("a mistake of the script")
    return writer.num_rows


@pytest.fixture
def root(tmp_path: Path) -> str:
    data = shop()
    data["customer"].key_table = known_keys(tmp_path, 50)
    salientpp.partition(data, 2, tmp_path / "shop", [2], 8, seeds=("customer", "all"))
    return str(tmp_path / "shop")


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_seed_has_its_key_and_outputs(tmp_path, root, world_size):
    out = tmp_path / "scores"
    numbers = distributed.run(predict, world_size, root, str(out))
    assert sum(numbers) == 50
    assert sorted(path.name for path in out.iterdir()) == [f"part-{k:05d}.parquet" for k in range(world_size)]
    table = parquet.read_table(out)
    assert table.schema.names == ["shop", "customer_id", "score", "both"]
    found = numbers_in(table)
    assert sorted(found) == list(range(50)) and found != sorted(found)
    assert table.column("score").to_pylist() == found
    assert table.column("both").to_pylist() == [[2 * number] * 2 for number in found]


def test_a_rank_without_rows_writes_a_file_of_the_same_columns(tmp_path, root):
    distributed.run(predict, 2, root, str(tmp_path / "scores"), -1, 1)
    schemas = [parquet.read_schema(path) for path in sorted((tmp_path / "scores").iterdir())]
    assert len(schemas) == 2 and schemas[0].equals(schemas[1])


def test_a_script_that_fails_on_one_rank_leaves_no_file_on_any(tmp_path, root):
    out = tmp_path / "scores"
    failed = distributed.run(predict, 2, root, str(out), 1, may_fail=True)
    assert failed[1].kind == "ArithmeticError" and failed[1].text.startswith("a mistake of the script\n")
    assert "rank 1 could not write its predictions: ArithmeticError: a mistake of the script" in failed[0].text
    assert list(out.iterdir()) == []


def write_differently(rank: int, root: str, out: str) -> None:
    part = salientpp.load(root)
    with salientpp.PredictionWriter(out, part, "order") as writer:
        ids = part.split("all", type_="order")[:2]
        writer.write(ids, torch.ones(2, 1 + rank))


def test_different_columns_on_two_ranks_are_refused(tmp_path, root):
    failed = distributed.run(write_differently, 2, root, str(tmp_path / "scores"), may_fail=True)
    for each in failed:
        assert "rank 0 has id (int64), output (float), and rank 1 has id (int64), output (fixed_size_list" in each.text
    assert list((tmp_path / "scores").iterdir()) == []


def open_wrongly(rank: int, root: str, out: str) -> None:
    salientpp.PredictionWriter(out, salientpp.load(root), "customer" if rank else "custmer")


def test_a_mistake_on_one_rank_reaches_the_other(tmp_path, root):
    failed = distributed.run(open_wrongly, 2, root, str(tmp_path / "scores"), may_fail=True)
    text = "type_ must be one of customer, order, got 'custmer'. Did you mean customer?"
    assert all(text in each.text for each in failed), failed


def test_padding_is_left_out_and_types_of_a_graph_in_memory_have_keys(tmp_path):
    data = shop()
    data["customer"].key_table = known_keys(tmp_path, 50)
    with salientpp.PredictionWriter(tmp_path / "a", data, "customer") as writer:
        writer.write(torch.tensor([7, -1, 3], dtype=torch.int32), torch.tensor([0.5, 9.0, 0.25], requires_grad=True))
        writer.write(torch.tensor([-1]), torch.tensor([1.0]))
    table = parquet.read_table(tmp_path / "a")
    assert numbers_in(table) == [7, 3] and table.column("output").to_pylist() == [0.5, 0.25]


def test_rows_may_change_after_they_were_written(tmp_path):
    ids, rows = torch.arange(3), torch.zeros(3)
    with salientpp.PredictionWriter(tmp_path / "a", shop(), "order") as writer:
        for number in range(3):
            rows.fill_(number)
            writer.write(ids, rows)
            ids += 1
    assert parquet.read_table(tmp_path / "a").to_pydict() == {
        "id": [0, 1, 2, 1, 2, 3, 2, 3, 4],
        "output": [0.0] * 3 + [1.0] * 3 + [2.0] * 3,
    }


def test_a_table_that_was_written_in_part_never_appears(tmp_path, monkeypatch):
    data, ids, written = shop(), torch.arange(50), []
    write = parquet.ParquetWriter.write_table

    def fails_once(self: Any, table: Any, *args: Any, **options: Any) -> None:
        write(self, table, *args, **options)
        written.append(table)
        if len(written) == 1:
            raise OSError("the connection broke")

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", fails_once)
    monkeypatch.setattr(parquet_writer, "GROUP_ROWS", 10)
    text = "rows could not be written to the file of predictions before; make another writer"
    with pytest.raises(OSError, match=text), salientpp.PredictionWriter(tmp_path, data, "customer") as writer:
        for some in ids.split(10):
            with contextlib.suppress(OSError):
                writer.write(some, some)
    assert not [*tmp_path.iterdir()]


def test_no_rows_at_all_give_a_file_of_keys(tmp_path):
    with salientpp.PredictionWriter(tmp_path / "a", shop(), "order"):
        pass
    assert parquet.read_table(tmp_path / "a").to_pydict() == {"id": []}


def test_files_of_other_ranks_are_refused(tmp_path):
    (tmp_path / "part-00001.parquet").touch()
    with pytest.raises(
        ValueError, match="no files of other ranks than the 1 of this job, but it has part-00001.parquet"
    ):
        salientpp.PredictionWriter(tmp_path, shop(), "order")


WRONG: list[tuple[Any, Any, str]] = [
    (torch.arange(3), torch.ones(4), "outputs must have a row for each of the 3 ids, got 4 rows of 'output'"),
    (torch.arange(3), torch.ones(3, 2), "all calls must write the same columns, expected"),
    (torch.arange(3), {"score": torch.ones(3)}, "all calls must write the same columns, expected"),
    (torch.tensor([80]), torch.ones(1), "n_id must have ids of type 'order', from 0 to 79, got 80"),
    (torch.tensor([-2]), torch.ones(1), "n_id must have ids of type 'order', from 0 to 79, got -2"),
    (torch.ones(1), torch.ones(1), "n_id must be integers [n], got torch.float32 [1]"),
    ([1], torch.ones(1), "n_id must be integers [n], got list"),
    (torch.arange(1), [1.0], "outputs must be a tensor with a row for each vertex"),
    (torch.arange(1), torch.tensor(1.0), "outputs['output'] must be a tensor with a row for each vertex"),
]


@pytest.mark.parametrize(("n_id", "outputs", "text"), WRONG)
def test_wrong_rows_are_refused_and_others_are_written(tmp_path, n_id, outputs, text):
    with salientpp.PredictionWriter(tmp_path / "a", shop(), "order") as writer:
        writer.write(torch.arange(2), torch.ones(2))
        with pytest.raises((ValueError, TypeError)) as raised:
            writer.write(n_id, outputs)
        assert text in str(raised.value)
    assert parquet.read_table(tmp_path / "a").num_rows == 2
    with pytest.raises(RuntimeError, match="the PredictionWriter is closed"):
        writer.write(torch.arange(2), torch.ones(2))
    writer.close()


@pytest.mark.parametrize(
    ("data", "type_", "text"),
    [
        (shop(), None, "type_ must be one of customer, order, because the graph has several vertex types"),
        (random_hetero(), "x", "type_ must be one of"),
        (shop().to_homogeneous(), "order", "type_ must be None, because the graph has one vertex type, got 'order'"),
        ("shop", None, "data must be the result of salientpp.load, a Data or a HeteroData, got str"),
    ],
)
def test_wrong_graphs_are_refused(tmp_path, data, type_, text):
    with pytest.raises((ValueError, TypeError)) as raised:
        salientpp.PredictionWriter(tmp_path / "a", data, type_)
    assert text in str(raised.value) and not (tmp_path / "a").exists()


def test_an_unfinished_file_of_a_writer_that_is_dropped_is_removed(tmp_path):
    writer = salientpp.PredictionWriter(tmp_path, shop(), "order")
    assert len([*tmp_path.iterdir()]) == 1
    del writer
    assert list(tmp_path.iterdir()) == []
