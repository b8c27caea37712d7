"""Sums over the neighbour lists of a graph. The formulas of this folder read the topology only through these sums.

The formulas are written with :meth:`ListSums.to_sources` and :meth:`ListSums.to_targets`. So they hold for a graph in the memory of this process
(:class:`WholeListSums`), and for a graph whose lists are divided among the ranks of a job (:class:`salientpp.vip.divided.DividedListSums`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.graph.relation import Relation
from salientpp.graph.typed import TypedGraph
from salientpp.processes import lazy

#: Number of columns that the kernel of sums takes.
_MOST_COLUMNS = 8


@dataclass(frozen=True, eq=False)
class ListPiece:
    """Piece of the graph's neighbour lists that is summed at once: the lists of one relation, for a range of its targets.

    Attributes:
        number: position of the relation among the graph's edge types.
        relation: the lists. Row i is the list of target ``first_target + i``.
    """

    number: int
    relation: Relation
    first_target: int = 0

    @property
    def targets(self) -> slice:
        """Global ids of the targets."""
        return slice(self.first_target, self.first_target + self.relation.indptr.numel() - 1)

    @lazy
    def degree(self) -> Tensor:
        """Lengths of the lists, int64 [n]."""
        return self.relation.indptr.diff()

    @property
    def has_weights(self) -> bool:
        return self.relation.edge_weight is not None

    def spread(self, value: Tensor) -> Tensor:
        """Converts values per list, [n], to a result of :data:`Weigh`: repeats them for each edge, [e], if the edges have weights."""
        return torch.repeat_interleave(value, self.degree) if self.has_weights else value


#: A function of the position of a piece among the pieces, and of one value per list, float64 [n]. It returns float64 [n]; if the edges of the piece have
#: weights, [e] with one value per edge. Lists must not influence each other.
Weigh: TypeAlias = Callable[[int, Tensor], Tensor]


class ListSums(ABC):
    """Sums over the neighbour lists of a graph with T vertex types and R relations.

    Attributes:
        node_types, num_vertices: names and numbers of vertices of the types. A homogeneous graph has one type, named None.
        edge_types: names of the relations.
        ends: source and target of each relation, as positions in ``node_types``.
        pieces: the lists that this process reads.
    """

    node_types: tuple[str | None, ...]
    num_vertices: tuple[int, ...]
    edge_types: tuple[tuple[str, str, str] | None, ...]
    ends: tuple[tuple[int, int], ...]
    pieces: Sequence[ListPiece]

    @staticmethod
    def of(graph: Graph | TypedGraph | ListSums) -> ListSums:
        """Returns an object that sums over a graph's lists. It shares the graph's arrays, and the transpose of a :class:`Graph`."""
        return graph if isinstance(graph, ListSums) else WholeListSums(graph)

    @abstractmethod
    def to_sources(self, value: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        """Sums over the lists that contain each vertex: ``out[u]`` is the sum of ``weigh(value[v])`` over all edges u -> v.

        Args:
            value: per type float64 [N].
            weigh: see :data:`Weigh`. It must map zeros to zeros.

        Returns:
            Per type float64 [N].
        """

    @abstractmethod
    def to_targets(self, value: Sequence[Tensor], scale: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        """Sums over the list of each vertex: ``out[v]`` is the sum of ``weigh(scale[v]) * value[u]`` over all edges u -> v.

        Args:
            value: per type float64 [N, S].
            scale: per type float64 [N].

        Returns:
            Per type float64 [N, S].
        """

    @abstractmethod
    def per_list(self, function: Callable[[ListPiece], Tensor]) -> list[Tensor]:
        """Computes one value for every list, such as its length: per relation float64 [N_target]. ``function`` returns those of a piece, [n]."""

    def zeros(self) -> list[Tensor]:
        """Returns zeros to add sums to, per type float64 [N]."""
        return [torch.zeros(size, dtype=torch.float64, device="cpu") for size in self.num_vertices]


class WholeListSums(ListSums):
    """Sums over the lists of a graph in the memory of this process."""

    def __init__(self, graph: Graph | TypedGraph) -> None:
        typed = graph if isinstance(graph, TypedGraph) else TypedGraph.of(graph)
        self.node_types, self.num_vertices, self.edge_types = typed.node_types, typed.num_vertices, typed.edge_types
        self.ends = tuple((relation.source, relation.target) for relation in typed.relations)
        self.pieces = [ListPiece(number, relation) for number, relation in enumerate(typed.relations)]
        self._plain = None if isinstance(graph, TypedGraph) else graph
        self._transposed: dict[int, tuple[Tensor, Tensor]] = {}

    def to_sources(self, value: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        total = self.zeros()
        for place, piece in enumerate(self.pieces):
            source, target = self.ends[piece.number]
            weighed = weigh(place, value[target])
            if piece.has_weights:
                total[source].index_add_(0, piece.relation.indices.to(torch.int64), weighed)
            else:
                total[source] += ops.sum_over_lists(*self._transpose(place), weighed)
        return total

    def to_targets(self, value: Sequence[Tensor], scale: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        total = [torch.zeros_like(of_type) for of_type in value]
        for place, piece in enumerate(self.pieces):
            source, target = self.ends[piece.number]
            weighed = weigh(place, scale[target])
            total[target] += sum_lists(piece, piece.relation.indices, value[source], weighed)
        return total

    def per_list(self, function: Callable[[ListPiece], Tensor]) -> list[Tensor]:
        return [function(piece) for piece in self.pieces]

    def _transpose(self, place: int) -> tuple[Tensor, Tensor]:
        if self._plain is not None:
            transposed = self._plain.transpose()
            return transposed.indptr, transposed.indices
        # Sums over the lists of sources are several times faster than additions in the order of the edges.
        if place not in self._transposed:
            relation = self.pieces[place].relation
            num_sources = self.num_vertices[relation.source]
            self._transposed[place] = transpose(relation.indptr, relation.indices, num_sources)
        return self._transposed[place]


def sum_lists(piece: ListPiece, indices: Tensor, value: Tensor, weighed: Tensor) -> Tensor:
    """Returns, for each list, the sum of ``weighed * value[u]`` over its edges, float64 [n, S].

    Args:
        indices: [e], positions in ``value`` of the sources.
        value: float64 [N, S].
        weighed: float64 [n] or [e], a result of :data:`Weigh`.
    """
    if not piece.has_weights:
        columns = value.split(_MOST_COLUMNS, 1)
        sums = [ops.sum_over_lists(piece.relation.indptr, indices, some.contiguous()) for some in columns]
        return weighed.unsqueeze(1) * torch.cat(sums, 1)
    degree = piece.degree
    target = torch.repeat_interleave(torch.arange(degree.numel(), device="cpu"), degree)
    total = torch.zeros(degree.numel(), value.size(1), dtype=torch.float64, device="cpu")
    return total.index_add_(0, target, weighed.unsqueeze(1) * value[indices.to(torch.int64)])


def transpose(indptr: Tensor, indices: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
    """Returns ``indptr`` int64 [N_source + 1] and ``indices`` [E]: for every source, the targets whose lists it is in, ascending."""
    num_targets = indptr.numel() - 1
    # The kernel takes one number of vertices for both ends, so pad to the larger.
    more = indptr[-1:].expand(max(0, num_sources - num_targets))
    out_indptr, out_indices = ops.transpose_csc(torch.cat([indptr, more]), indices)
    return out_indptr[: num_sources + 1], out_indices
