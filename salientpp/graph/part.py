"""Holds those edges of a graph that one host reads, if the topology is stored in parts.

A part stores the neighbour lists of the vertices that it owns. Sources in the lists are global ids, so that a list has the same contents as in the whole graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from salientpp.graph.clock import Clock
from salientpp.graph.relation import Relation


@dataclass(frozen=True, eq=False)
class PartLists:
    """Neighbour lists of one relation, for a contiguous range of its targets.

    Attributes:
        relation: the lists. ``indptr`` int64 [n + 1] begins at 0, and row i is the list of target ``first_target + i``. ``indices`` are global ids of sources.
            ``links`` is None. ``edge_id`` is None, except if the lists had to be sorted by time after they were read; it then counts from ``first_edge``.
        first_target: global id of the first target.
        first_edge: number of the first edge among all edges of the relation. The edge at position ``e`` of ``indices`` has the number
            ``first_edge + e``, or with ``edge_id`` the number ``first_edge + edge_id[e]``.
    """

    relation: Relation
    first_target: int
    first_edge: int

    @property
    def num_targets(self) -> int:
        return self.relation.indptr.numel() - 1

    @property
    def nbytes(self) -> int:
        return self.relation.nbytes


@dataclass(frozen=True, eq=False)
class PartGraph:
    """Neighbour lists of the vertices in some consecutive parts of a graph, with the sizes of the whole graph.

    Attributes:
        node_types, num_vertices: names and numbers of vertices of the whole graph's T types. A homogeneous graph has one type, named None.
        edge_types: names of the R relations.
        lists: for each relation, the lists of every part on disk that is held, in the order of the parts.
        node_time: per type the times of all its vertices on the ``clock``, int64 [N], or None.
        clock: the map from the user's times to int64; None without times.
    """

    node_types: tuple[str | None, ...]
    num_vertices: tuple[int, ...]
    edge_types: tuple[tuple[str, str, str] | None, ...]
    lists: tuple[tuple[PartLists, ...], ...]
    node_time: tuple[Tensor | None, ...]
    clock: Clock | None = None

    @property
    def num_edges(self) -> int:
        """Number of edges that are held, of all relations."""
        return sum(piece.relation.indices.numel() for pieces in self.lists for piece in pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists that are held, with their times and weights. Memory-mapped arrays count in full."""
        return sum(piece.nbytes for pieces in self.lists for piece in pieces)
