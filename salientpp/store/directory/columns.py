"""Reads attributes and splits of vertices and edges from the files of a dataset directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from salientpp.store.directory.description import Description, EdgeType, VertexType, words_of_type
from salientpp.store.directory.files import Arrays
from salientpp.store.narrow import NarrowRows
from salientpp.store.rows import JoinedRows, TensorRows
from salientpp.suggestions import did_you_mean

#: Rows in files.
StoredRows = TensorRows | JoinedRows | NarrowRows


def named_vertices(arrays: Arrays, description: Description, type_: str | None) -> VertexType:
    """Returns the description of a vertex type. ValueError, which lists the types, if there is none of this name."""
    for vertices in description.node_types:
        if vertices.name == type_:
            return vertices
    known = ", ".join(repr(vertices.name) for vertices in description.node_types)
    raise ValueError(f"type_ must be a node type of {arrays.root} ({known}), got {type_!r}")


def vertex_column(arrays: Arrays, vertices: VertexType, name: str, part_id: int) -> Tensor:
    """Returns the rows [n, ...] of an attribute for one part on disk. Rows that are stored encoded stay encoded."""
    return _column(arrays, vertices, name, part_id)


def edge_column(arrays: Arrays, edges: EdgeType, name: str, piece: int) -> Tensor:
    """Returns the rows [e, ...] in one file of an edge attribute, in the order of the neighbour lists. Encoded rows stay encoded."""
    return _column(arrays, edges, name, piece)


def _column(arrays: Arrays, type_: VertexType | EdgeType, name: str, number: int) -> Tensor:
    return arrays.open(type_.rows_file(name, number), _stored_dtype(type_, name))


def _stored_dtype(type_: VertexType | EdgeType, name: str) -> str:
    return type_.attributes[name]["dtype"] if type_.narrow(name) is None else "uint8"


def stored_rows(type_: VertexType | EdgeType, name: str, pieces: Sequence[Tensor]) -> StoredRows:
    """Returns a source with the rows of all ``pieces``, in order. It decodes encoded rows when they are taken."""
    rows = TensorRows(pieces[0]) if len(pieces) == 1 else JoinedRows(pieces)
    narrow = type_.narrow(name)
    return rows if narrow is None else NarrowRows(rows, narrow)


def whole(rows: StoredRows) -> Tensor:
    """Returns all rows [n, ...]: memory-mapped if one file holds them unencoded, otherwise decoded or concatenated in memory."""
    return rows.tensor if isinstance(rows, TensorRows) else rows.whole()


def vertex_rows(arrays: Arrays, vertices: VertexType, name: str, stored: Sequence[int]) -> StoredRows:
    """Returns a node attribute's rows for several parts on disk, one part after the other.

    Encoded rows are decoded when taken. Replicated types give all rows.
    """
    parts = range(1) if vertices.replicated else stored
    pieces = [vertex_column(arrays, vertices, name, part) for part in parts]
    return stored_rows(vertices, name, pieces or [no_rows(arrays, vertices, name)])


def no_rows(arrays: Arrays, type_: VertexType | EdgeType, name: str) -> Tensor:
    """Returns an attribute's rows [0, ...] for a rank that holds no part. Their dtype and shape are known from the manifest, and no file is opened."""
    shape = arrays.files[type_.rows_file(name, 0)]["shape"]
    return torch.empty((0, *shape[1:]), dtype=getattr(torch, _stored_dtype(type_, name)), device="cpu")


def take(arrays: Arrays, vertices: VertexType, name: str, n_id: Tensor) -> Any:
    """Returns a node attribute's rows [n, ...], or a table, for global ids int64 [n] of any parts."""
    if name in vertices.frames:
        table = vertices.tables[name]
        rows_of = {column: take(arrays, vertices, column, n_id) for column in table.columns}
        return table.put_together(rows_of, n_id.numel())
    if name not in vertices.attributes:
        known = ", ".join([*vertices.attributes, *vertices.frames]) or "none"
        raise ValueError(f"{arrays.root} has the node attributes {known}{words_of_type(vertices.name)}, got {name!r}")
    n_id, book = n_id.cpu(), vertices.row_book
    owner = book.owner(n_id)
    rows: Tensor | None = None
    for part_id in owner.unique().tolist() or [0]:
        own, at = vertex_column(arrays, vertices, name, part_id), owner == part_id
        rows = own.new_empty((n_id.numel(), *own.shape[1:])) if rows is None else rows
        rows[at] = own[n_id[at] - book.range_of(part_id)[0]]
    assert rows is not None  # the loop runs at least once
    narrow = vertices.narrow(name)
    return rows if narrow is None else narrow.decode(rows)


def vertex_split(arrays: Arrays, vertices: VertexType, name: str, stored: Sequence[int]) -> Tensor:
    """Returns the vertices of a split (or 'all') that consecutive parts ``stored`` own: ascending global ids, int64."""
    if name == "all" and stored:
        return torch.arange(vertices.offsets[stored[0]], vertices.offsets[stored[-1] + 1], device="cpu")
    return _read_split(arrays, vertices, name, stored)


def edge_split(arrays: Arrays, edges: EdgeType, name: str, stored: Sequence[int], all_edges: tuple[int, int]) -> Tensor:
    """Returns the edges of a split (or 'all') into the parts ``stored``, as ascending positions in the neighbour lists, int64.

    Args:
        all_edges: (first, end): the edges into these parts have the positions ``first`` to ``end - 1``.
    """
    if name == "all":
        return torch.arange(*all_edges, device="cpu")
    return _read_split(arrays, edges, name, stored)


def _read_split(arrays: Arrays, type_: VertexType | EdgeType, name: str, stored: Sequence[int]) -> Tensor:
    if not stored and (name == "all" or name in type_.splits):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if name not in type_.splits:
        known = ", ".join(repr(split) for split in [*type_.splits, "all"])
        words = words_of_type(type_.name) or (" of edges" if isinstance(type_, EdgeType) else "")
        raise ValueError(f"{arrays.root} has the splits {known}{words}, got {name!r}{did_you_mean(name, type_.splits)}")
    first, *others = (arrays.open(type_.split_file(name, part)) for part in stored)
    return torch.cat([first, *others]) if others else first
