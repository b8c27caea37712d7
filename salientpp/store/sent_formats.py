"""Reads the user's ``send_as``: the formats in which rows of vertex and edge attributes travel between ranks.

Rows of vertices are encoded by the engine. Rows of edges travel with the neighbour lists, so only those of a topology in parts travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from salientpp.store.directory.description import PARTS, EdgeColumn, EdgeName
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import Column, EncodedRows, Narrow, NarrowRows, read_formats
from salientpp.store.rows import RowSource


def read_send_as(
    part: PartitionedGraph, send_as: Any, known: Mapping[Column, tuple[torch.dtype, Sequence[int]]]
) -> tuple[dict[Column, Narrow], dict[EdgeColumn, Narrow]]:
    """Reads the user's ``send_as``. Returns the encodings of vertex attributes, and those of edge attributes.

    Args:
        known: dtype and row shape of the vertex attributes.

    Raises:
        TypeError, ValueError: as :func:`read_formats`; or a named edge attribute does not travel, or is stored encoded.
    """
    of_edges: Any = {
        (edges.name, name): (getattr(torch, entry["dtype"]), entry["row_shape"])
        for edges in part.description.edge_types
        for name, entry in edges.attributes.items()
    }
    # The names of vertex types are strings, and those of edge types are triples. A homogeneous graph has every name once.
    found: Any = read_formats("send_as", send_as, {**of_edges, **known}, "node or edge attributes")
    sent = {column: narrow for column, narrow in found.items() if column not in known}
    for type_, name in sent:
        words = name if type_ is None else str((type_, name))
        stored = part.description.edges(type_).narrow(name)
        if stored is not None:
            raise ValueError(
                f"send_as names the edge attribute {words!r}, which {part.root} stores and sends as {stored.format}; leave it out of send_as"
            )
        if part.topology != PARTS:
            raise ValueError(
                f"send_as names the edge attribute {words!r}, but every rank has the edge attributes of {part.root}, so they do not travel; leave it out, or "
                "partition with topology='parts'"
            )
    return {column: narrow for column, narrow in found.items() if column in known}, sent


def as_stored(rows: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """Returns sources of the rows as they are stored and sent: rows that are stored encoded are not decoded."""
    return {name: values.encoded if isinstance(values, NarrowRows) else values for name, values in rows.items()}


def encoded(rows: Mapping[str, RowSource], type_: EdgeName, sent: Mapping[EdgeColumn, Narrow]) -> dict[str, RowSource]:
    """Returns the attributes of an edge type as they are sent: those that ``sent`` names are encoded when taken."""
    return {
        name: EncodedRows(values, sent[type_, name]) if (type_, name) in sent else values
        for name, values in rows.items()
    }


def decoded(rows: Mapping[str, RowSource], type_: EdgeName, sent: Mapping[EdgeColumn, Narrow]) -> dict[str, RowSource]:
    """Returns an edge type's attributes with the values that receivers get: those that ``sent`` names are encoded and decoded."""
    return {
        name: NarrowRows(values, sent[type_, name]) if (type_, name) in sent else values
        for name, values in encoded(rows, type_, sent).items()
    }
