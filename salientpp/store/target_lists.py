"""Gives full-graph training and layer-wise inference the edges into a range of vertices, with their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.store.directory.description import EdgeName
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.rows import JoinedRows, RowSource, TensorRows, take_rows


@dataclass(frozen=True, eq=False)
class Edges:
    """Result of :meth:`TargetLists.into`: the edges into some vertices, grouped by vertex, in the order of the neighbour lists.

    Attributes:
        source: int64 [e], global ids.
        target: int64 [e], for each edge the position of its target among these vertices.
        e_id: int64 [e], ids of the edges.
        row: int64 [e], for each edge the number of its row in ``columns``.
        columns: attribute name -> rows of the edges.
    """

    source: Tensor
    target: Tensor
    e_id: Tensor
    row: Tensor
    columns: Mapping[str, RowSource]

    def rows(self, name: str) -> Tensor:
        """Returns the rows [e, ...] of an attribute of these edges."""
        return take_rows(self.columns[name], self.row)


@dataclass(frozen=True, eq=False)
class TargetLists:
    """Neighbour lists of consecutive vertices (those of a part, or all), with the attributes of their edges. One edge type.

    Attributes:
        indptr: int64 [n + 1], from 0.
        indices: [e], global ids of the sources.
        columns: name -> rows of the edges.
        num_edges: number of all edges of this type in the graph.
        first_target: global id of the first vertex.
        first_edge: id of the edge with the row 0 in ``columns``.
        edge_id: int64 [e], for each edge the number of its row in ``columns``. None: 0 to e - 1.
        is_whole: True if every rank has the lists of all vertices.
    """

    indptr: Tensor
    indices: RowSource
    columns: Mapping[str, RowSource]
    num_edges: int
    first_target: int = 0
    first_edge: int = 0
    edge_id: Tensor | None = None
    is_whole: bool = False

    @classmethod
    def of_graph(cls, graph: Graph, columns: Mapping[str, Tensor], keeps_ids: bool = True) -> TargetLists:
        """Returns the lists of all vertices of a graph.

        Args:
            columns: name -> rows [E, ...] in the order of edge ids.
            keeps_ids: False if the caller reads no ids or rows of edges. Then ``graph.edge_id`` is not read, which can
                be slow.
        """
        rows = {name: TensorRows(value) for name, value in columns.items()}
        edge_id = graph.edge_id if keeps_ids else None
        return cls(graph.indptr, TensorRows(graph.indices), rows, graph.num_edges, edge_id=edge_id, is_whole=True)

    @classmethod
    def of_part(cls, view: PartitionedGraph, part_id: int, type_: EdgeName = None) -> TargetLists:
        """Returns the lists of the vertices that a part owns, for edges of one type. Reads no list of another part."""
        number = view.edge_types.index(type_)
        pieces = view.part_graph(part_id=part_id).lists[number]
        rows = view.part_edge_rows(part_id)[type_]
        sizes = [piece.relation.indices.numel() for piece in pieces]
        ends = torch.tensor(sizes, device="cpu").cumsum(0).tolist()
        starts = [piece.relation.indptr[:-1] + end - size for piece, end, size in zip(pieces, ends, sizes)]
        indices = [piece.relation.indices for piece in pieces]
        return cls(
            torch.cat([*starts, torch.tensor(ends[-1:], device="cpu")]),
            TensorRows(indices[0]) if len(indices) == 1 else JoinedRows(indices),
            rows.rows,
            view.description.edges(type_).num_edges,
            pieces[0].first_target,
            rows.first_edge,
        )

    def into(self, targets: Tensor) -> Edges:
        """Returns the edges into the vertices ``targets``, global ids int64 [m], which must have lists here."""
        target, position = positions_of(self.indptr, targets - self.first_target)
        row = position if self.edge_id is None else self.edge_id[position]
        source = take_rows(self.indices, position).to(torch.int64)
        return Edges(source, target, row + self.first_edge, row, self.columns)

    def degrees(self, targets: Tensor) -> Tensor:
        """Returns the number of edges into each of the vertices ``targets``, int64 [m]."""
        place = targets - self.first_target
        return self.indptr[place + 1] - self.indptr[place]


def positions_of(indptr: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Finds all entries of some lists, which ``indptr`` delimits. Returns two vectors, int64 [e], with an element for each entry.

    Args:
        place: numbers of the lists, int64 [m].

    Returns:
        The index in ``place`` of the entry's list, and the entry's position, between ``indptr[list]`` and ``indptr[list + 1] - 1``.
    """
    first = indptr[place]
    counts = indptr[place + 1] - first
    which = torch.repeat_interleave(torch.arange(place.numel(), device="cpu"), counts)
    start = torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
    return which, start + torch.arange(which.numel(), device="cpu")
