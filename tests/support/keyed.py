"""Keys for graphs of tests: objects with the methods of a key table, and directories that know the keys of their vertices."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from salientpp.store.directory.description import VertexType
from salientpp.store.directory.opened import PartitionedGraph

#: Names of the key columns.
COLUMNS = ("shop", "customer_id")


def key_rows(ids: Tensor, columns: tuple[str, ...] = COLUMNS) -> pa.Table:
    """Keys of two columns: vertex i is customer ``c<i>`` of shop i % 3."""
    numbers = ids.tolist()
    return pa.table(
        {columns[0]: pa.array([i % 3 for i in numbers], pa.int32()), columns[1]: pa.array([f"c{i}" for i in numbers])}
    )


class KnownKeys:
    """Key table in memory."""

    def __init__(self, num_rows: int, columns: tuple[str, ...] = COLUMNS) -> None:
        self.num_rows, self._columns = num_rows, columns

    def rows(self, ids: Tensor) -> pa.Table:
        return key_rows(torch.as_tensor(ids), self._columns)


def give_keys(types: tuple[str | None, ...] = (None,)) -> None:
    """Makes all directories in this process have keys for these types. Call it in the process of a rank."""

    def keys_of(part: PartitionedGraph, n_id: Tensor, type_: str | None = None) -> pa.Table:
        return key_rows(part.original_id(n_id, type_))

    def keys(type_: VertexType) -> Any:
        return [{"name": name} for name in COLUMNS] if type_.name in types else None

    PartitionedGraph.keys_of = keys_of
    VertexType.keys = property(keys)


def numbers_in(table: pa.Table, name: str = "customer_id") -> list[int]:
    """Vertices of the rows, from their keys."""
    return [int(key[1:]) for key in table.column(name).to_pylist()]
