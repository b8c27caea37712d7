"""Keys of vertices in the tables of the user: the columns that name the rows of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

#: Column of the ids in the user's data, for vertices without keys.
ID = "id"


@dataclass(frozen=True, eq=False)
class VertexKeys:
    """Keys of the vertices of one type.

    Attributes:
        read: ids int64 [n] -> table with n rows of the key columns.
        num_vertices: number of vertices of the type. Ids are below it.
        type_: name of the vertex type; None in a graph with one type.
    """

    read: Callable[[Tensor], pa.Table]
    num_vertices: int
    type_: str | None

    @property
    def schema(self) -> pa.Schema:
        """Key columns: names and Arrow types."""
        return self.read(torch.empty(0, dtype=torch.int64, device="cpu")).schema.remove_metadata()

    @property
    def in_words(self) -> str:
        return "the graph" if self.type_ is None else f"type {self.type_!r}"

    def check(self, n_id: Tensor, name: str = "n_id", advice: str = "pass batch.n_id of the seeds") -> None:
        """Raises ValueError if an id is outside the type. ``name`` is the argument, and ``advice`` what to do."""
        wrong = (n_id < 0) | (n_id >= self.num_vertices)
        if bool(wrong.any()):
            raise ValueError(
                f"{name} must have ids of {self.in_words}, from 0 to {self.num_vertices - 1}, got {int(n_id[wrong][0])}; {advice}"
            )


def keys_of(data: PartitionedGraph | Data | HeteroData, type_: str | None = None) -> VertexKeys:
    """Returns the keys of a vertex type. For a type without keys, these are the ids in the user's data, in the column ``id``.

    Raises:
        TypeError: ``data`` is not a graph.
        ValueError: ``type_`` is not a vertex type of the graph, or is missing.
        ImportError: pyarrow is missing.
    """
    _check_pyarrow()
    if isinstance(data, PartitionedGraph):
        type_ = _checked_type(type_, data.node_types if data.is_hetero else [])
        return VertexKeys(_stored_reader(data.whole, type_), data.books[type_].num_vertices, type_)
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(
            f"data must be the result of salientpp.load, a Data or a HeteroData, got {type(data).__name__}; pass the graph that the batches come from"
        )
    type_ = _checked_type(type_, data.node_types if isinstance(data, HeteroData) else [])
    store: Any = data if type_ is None else data[type_]
    key_table, number = store.get("key_table"), int(store.num_nodes)
    if key_table is None:
        return VertexKeys(_ids, number, type_)
    if key_table.num_rows != number:
        raise ValueError(
            f"key_table must have a row for each of the {number} vertices, got {key_table.num_rows}; pass the graph as it was loaded, not a part of it"
        )
    return VertexKeys(key_table.rows, number, type_)


def _stored_reader(whole: PartitionedGraph, type_: str | None) -> Callable[[Tensor], pa.Table]:
    """Returns the function that reads the keys, or the ids in the user's data, of vertices of a directory."""
    if whole.description.vertices(type_).keys is None:
        return lambda n_id: _ids(whole.original_id(n_id, type_))
    return lambda n_id: whole.keys_of(n_id, type_)


def _ids(ids: Tensor) -> pa.Table:
    import pyarrow as pa

    return pa.table({ID: pa.array(ids.cpu().numpy())})


def _checked_type(type_: str | None, types: Sequence[Any]) -> str | None:
    if type_ is None and types:
        raise ValueError(f"type_ must be one of {', '.join(types)}, because the graph has several vertex types")
    if type_ is not None and type_ not in types:
        known = f"must be one of {', '.join(types)}" if types else "must be None, because the graph has one vertex type"
        raise ValueError(f"type_ {known}, got {type_!r}{did_you_mean(type_, types)}")
    return type_


def _check_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'Parquet files are written with the "pyarrow" package, which is not installed: pip install salientpp[tables]'
        ) from error
