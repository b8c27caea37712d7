"""A small graph with keys of vertices and attributes of edges, as tables give it: a source to convert, and what the result must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, RowPiece, Rows, Source, Split, Vertices, counted

PLACED, REVERSE, CONTAINS = (
    ("customer", "placed", "order"),
    ("order", "rev_placed", "customer"),
    ("order", "contains", "thing"),
)
SIZES = {"customer": 90, "order": 140, "thing": 12}
PLAIN = Options(deduplicate=False, dtype={}, finite=False)


@dataclass
class Keyed:
    """Contents of a converted graph.

    Attributes:
        keys: per type with keys, the key columns.
        edges: per relation, the ends int64 [2, E], sorted by target.
        columns: per relation, the attributes of its edges.
    """

    keys: dict[str, pa.Table]
    edges: dict[tuple[str, str, str], np.ndarray]
    columns: dict[tuple[str, str, str], dict[str, Tensor]]


def keyed(seed: int = 0) -> Keyed:
    """Draws a graph. A customer has a text as key, an order a number and a text; things have none."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    names = [f"customer {'x' * (number % 5)}{number}" for number in rng.permutation(SIZES["customer"])]
    order = rng.permutation(SIZES["order"])
    keys = {
        "customer": pa.table({"customer_id": pa.array(names, pa.large_string())}),
        "order": pa.table(
            {"shop": pa.array(order % 7 - 3, pa.int64()), "code": pa.array([f"{each // 7}é" for each in order], pa.large_string())}
        ),
    }  # fmt: skip
    edges, columns = {}, {}
    for relation, number in ((PLACED, 400), (REVERSE, 400), (CONTAINS, 70)):
        ends = np.stack([rng.integers(0, SIZES[relation[end]], number) for end in (0, 2)])
        edges[relation] = ends[:, np.lexsort(ends)]
        columns[relation] = (
            {}
            if relation == CONTAINS
            else {"time": torch.from_numpy(rng.integers(0, 10**9, number)), "amount": torch.from_numpy(rng.random((number, 2), np.float32))}
        )  # fmt: skip
    return Keyed(keys, edges, columns)


def write_keys(path: Path, table: pa.Table, rows_per_batch: int = 50, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def rows_of(values: Tensor) -> Rows:
    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, values[:1].nbytes))
        for first in range(0, max(1, len(values)), most):
            some = values[first : first + most]
            yield RowPiece(some, counted("row ", first), first + len(some))

    return Rows(pieces, len(values), len(values))


def edges_of(ends: np.ndarray, columns: dict[str, Tensor], ascends: bool = True) -> EdgeSource:
    def pieces(most: int) -> Iterator[EdgePiece]:
        for first in range(0, ends.shape[1], most):
            source, target = ends[:, first : first + most]
            yield EdgePiece(source, target, counted("edge ", first), first + source.size)

    number = ends.shape[1]
    return EdgeSource(pieces, number, number, columns={name: rows_of(rows) for name, rows in columns.items()}, ascends=ascends)  # fmt: skip


def source_of(graph: Keyed, folder: Path, rows_per_batch: int = 50, **more: Any) -> Source:
    """Returns a source of the graph. Its files of keys have batches of ``rows_per_batch`` rows."""
    folder.mkdir(exist_ok=True)
    train = Split(rows_of(torch.arange(60)))
    vertices = {}
    for type_, size in SIZES.items():
        keys = None
        if type_ in graph.keys:
            keys = write_keys(folder / f"{type_}.arrow", graph.keys[type_], rows_per_batch)
        x = torch.arange(size * 3, dtype=torch.float32).view(size, 3)
        vertices[type_] = Vertices(size, {"x": rows_of(x)}, {"train": train} if type_ == "customer" else {}, keys=keys)
    edges = {relation: edges_of(ends, graph.columns[relation]) for relation, ends in graph.edges.items()}
    origin = {"tables": {"nodes.customer": {"from": [{"address": "customers.parquet", "size": 2_000_000}]}}}
    return Source("tables:shop.toml", vertices, edges, origin=origin, **more)


def converted(graph: Keyed, root: Path, working: int = 2**22, rows_per_batch: int = 50, **more: Any) -> Path:
    """Converts the graph with ``working`` bytes for arrays."""
    source = source_of(graph, root.parent / f"{root.name} keys", rows_per_batch)
    return write_converted(source, root, Budget(0, working), PLAIN, **more)


def as_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table, in order."""
    return list(zip(*(column.to_pylist() for column in table.columns)))


def taken(table: pa.Table, ids: Sequence[int]) -> list[tuple[Any, ...]]:
    """Some rows of a table; -1 is a row of nulls."""
    rows = as_rows(table)
    return [rows[each] if each >= 0 else (None,) * table.num_columns for each in ids]
