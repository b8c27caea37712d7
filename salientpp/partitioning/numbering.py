"""Gives vertices new ids, so that each part owns one contiguous range of ids.

In the order 'vip', the vertices of a part descend by the part's own inclusion probability, with seeds counted; ties keep the user's order. In the order
'original', all vertices of a part keep the user's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.inclusion import add_seeds, inclusion_probability

#: Relabelling works on runs of about this many edges, so that its memory is bounded.
_EDGES_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class Numbering:
    """New ids of N vertices in K parts.

    Attributes:
        order: int64 [N], the old id of every new id.
        book: the range of new ids that each part owns.
    """

    order: Tensor
    book: PartitionBook

    def new_id(self) -> Tensor:
        """Returns the new id of every old id, int64 [N]."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.numel(), device="cpu")
        return inverse


@dataclass(frozen=True, eq=False)
class VipNumbering(Numbering):
    """New ids of vertices, and the inclusion probabilities of the vertices in the order of these ids.

    Attributes:
        vip: float32 [K, N], inclusion probabilities of each part's batches, seeds not counted.
    """

    vip: Tensor


def number_vertices(
    graph: Graph,
    assigned: PartitionAssignment,
    seeds: Tensor | None,
    num_neighbors: Sequence[int],
    batch_size: int,
    *,
    order: str = "vip",
    vip: Tensor | None = None,
) -> VipNumbering:
    """Numbers the vertices by the inclusion probabilities of a workload.

    Args:
        seeds: int64 ids that batches start from, in any part; None: all vertices.
        vip: float32 [K, N], memory for the probabilities; None: allocate it.
    """
    seeds = torch.arange(graph.num_vertices, device="cpu") if seeds is None else seeds
    seed_sets = [seeds[assigned.assignment[seeds] == part_id] for part_id in range(assigned.num_parts)]
    vip = inclusion_probability(graph, seed_sets, num_neighbors, batch_size, out=vip)
    with_seeds = (add_seeds(vip[part_id], own_seeds, batch_size) for part_id, own_seeds in enumerate(seed_sets))
    return number_by(assigned.assignment, vip, with_seeds, order)


def number_by(assignment: Tensor, vip: Tensor, with_seeds: Iterable[Tensor], order: str) -> VipNumbering:
    """Numbers vertices part by part, and inside a part in the order ``order``.

    Args:
        vip: float32 [K, N] by old id, seeds not counted. The tensor is put into the new order in place, because it takes the most memory here.
        with_seeds: for each part float32 [N] by old id, the probabilities with seeds counted. One tensor is held at a time.
    """
    pieces = []
    for part_id, probability in enumerate(with_seeds):
        own = (assignment == part_id).nonzero().flatten()
        if order == "vip":
            own = own[torch.sort(probability[own], descending=True, stable=True).indices]
        pieces.append(own)
    old_id = torch.cat(pieces)
    sizes = torch.tensor([0, *(piece.numel() for piece in pieces)], device="cpu")
    for row in vip:
        row.copy_(row[old_id])
    return VipNumbering(old_id, PartitionBook(sizes.cumsum(0)), vip)


def relabeled_edges(
    lists: Graph | Relation, targets: Numbering, sources: Numbering | None = None
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """Renumbers the ends of edges and puts the neighbour lists into the new order, piece by piece, so that memory is bounded.

    Args:
        lists: neighbour lists of the vertices that ``targets`` numbers.
        sources: the numbering of the vertices in the lists; None: the same as ``targets``.

    Returns:
        ``indptr`` int64 [N + 1], and an iterator over pieces of the edges in the new order: their positions in
        ``lists.indices``, and their sources under new ids (dtype of ``lists.indices``).
    """
    degree = lists.indptr.diff()[targets.order]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), degree.cumsum(0)])
    new_id = (targets if sources is None else sources).new_id().to(lists.indices.dtype)

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for first, last in runs_of_vertices(indptr, _EDGES_AT_ONCE):
            start = lists.indptr[targets.order[first:last]] - (indptr[first:last] - indptr[first])
            position = torch.repeat_interleave(start, degree[first:last])
            position += torch.arange(position.numel(), device="cpu")
            yield position, new_id[lists.indices[position].long()]

    return indptr, pieces()


def relabel(graph: Graph, numbering: Numbering) -> Graph:
    """Returns the graph under new ids, in memory."""
    indptr, pieces = relabeled_edges(graph, numbering)
    return Graph.trusted(indptr, torch.cat([graph.indices[:0], *(sources for _, sources in pieces)]))
