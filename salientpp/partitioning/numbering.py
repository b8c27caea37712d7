"""How are vertices numbered?

Part p owns one contiguous range of ids, and inside a part ids descend by the part's own inclusion probability, seeds
counted, so that a prefix of a part is its hottest rows. Among equal probabilities the user's order stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment, assign_parts, check_num_parts
from salientpp.partitioning.balance import loads_and_limits
from salientpp.partitioning.kaminpar import has_kaminpar
from salientpp.partitioning.refine import refine_by_vip
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.inclusion import add_seeds, draw_weights, inclusion_probability

#: What finds the parts, by name.
METHODS = ("auto", "metis-vip", "metis", "kaminpar-vip", "kaminpar", "random")
#: At the end of a method's name: what it found is then refined.
REFINED = "-refined"
#: METIS does not get larger graphs whole, so 'auto' leaves them to KaMinPar.
MOST_EDGES_OF_METIS = 2**26

#: Relabelling works on runs of about this many edges, so that its memory is bounded.
_EDGES_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class Numbering:
    """New ids of N vertices in K parts.

    Attributes:
        order: int64 [N], the old id of every new one.
        book: which new ids each part owns.
    """

    order: Tensor
    book: PartitionBook

    def part_of_old(self) -> Tensor:
        """int64 [N], the part of every old id."""
        part = torch.empty_like(self.order)
        part[self.order] = torch.repeat_interleave(
            torch.arange(self.book.num_parts, device="cpu"), self.book.offsets.diff()
        )
        return part

    def new_id(self) -> Tensor:
        """int64 [N], the new id of every old one."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.numel(), device="cpu")
        return inverse


@dataclass(frozen=True, eq=False)
class Layout(Numbering):
    """A numbering, and what it is by.

    Attributes:
        vip: float32 [K, N] by new id, what each part's batches need, seeds not counted.
    """

    vip: Tensor


def choose_method(method: Any, num_edges: int) -> Any:
    """What 'auto' is for a graph of so many edges, here: 'kaminpar-vip' if it is large and KaMinPar installed, else 'metis-vip'. Others are what they are."""
    if not isinstance(method, str) or method.removesuffix(REFINED) != "auto":
        return method
    is_large = num_edges > MOST_EDGES_OF_METIS
    return method.replace("auto", "kaminpar-vip" if is_large and has_kaminpar() else "metis-vip")


def assign_for(
    graph: Graph,
    num_parts: int,
    *,
    method: str | Tensor,
    splits: Mapping[str, Tensor],
    seeds: Tensor | None,
    num_neighbors: Sequence[int],
    batch_size: int,
    tolerance: float = 0.05,
    seed: int = 0,
) -> PartitionAssignment:
    """:func:`~salientpp.partitioning.assign.assign_parts` for a workload: knows 'auto', 'metis-vip' and 'kaminpar-vip' too.

    Args:
        method: 'metis-vip' is METIS with the edge weights of :func:`~salientpp.vip.inclusion.draw_weights`, for the steps of K ranks,
            'kaminpar-vip' is KaMinPar with them, 'auto' one of the two by :func:`choose_method`; the rest as in ``assign_parts``. With '-refined' behind it,
            what a method found is improved by :func:`~salientpp.partitioning.refine.refine_by_vip`.
        seeds: int64 ids that batches start from; None: all vertices.
    """
    check_num_parts(num_parts)
    weights = None
    seeds = torch.arange(graph.num_vertices, device="cpu") if seeds is None else seeds
    method = choose_method(method, graph.num_edges)
    refined = isinstance(method, str) and method.endswith(REFINED)
    if isinstance(method, str):
        method = method.removesuffix(REFINED)
    if isinstance(method, str) and method in ("metis-vip", "kaminpar-vip"):
        # A graph of its own, so that its transpose is not kept while METIS wants the memory.
        own = Graph.trusted(graph.indptr, graph.indices)
        weights = draw_weights(own, seeds, num_neighbors, batch_size * num_parts)
        del own
        method = method.removesuffix("-vip")
    found = assign_parts(
        graph, num_parts, method=method, seed_sets=splits, edge_weights=weights, tolerance=tolerance, seed=seed
    )
    if not refined:
        return found
    del weights
    loads, limits = loads_and_limits(graph, num_parts, splits, tolerance)
    assignment = refine_by_vip(
        Graph.trusted(graph.indptr, graph.indices), found.assignment, num_parts, seeds=seeds, num_neighbors=num_neighbors, batch_size=batch_size,
        weights=loads, limits=limits,
    )  # fmt: skip
    return assign_parts(graph, num_parts, method=assignment, seed_sets=splits)


def lay_out(
    graph: Graph,
    assigned: PartitionAssignment,
    seeds: Tensor | None,
    num_neighbors: Sequence[int],
    batch_size: int,
    vip: Tensor | None = None,
) -> Layout:
    """Number the vertices for a workload.

    Args:
        assigned: the part of every vertex.
        seeds: int64 ids that batches start from, in any part; None: all vertices.
        num_neighbors, batch_size: of the batches.
        vip: float32 [K, N], where the layout's probabilities are to lie; None: in memory.
    """
    seeds = torch.arange(graph.num_vertices, device="cpu") if seeds is None else seeds
    seed_sets = [seeds[assigned.assignment[seeds] == part_id] for part_id in range(assigned.num_parts)]
    vip = inclusion_probability(graph, seed_sets, num_neighbors, batch_size, out=vip)
    with_seeds = (add_seeds(vip[part_id], own_seeds, batch_size) for part_id, own_seeds in enumerate(seed_sets))
    return number_by(assigned.assignment, vip, with_seeds)


def number_by(assignment: Tensor, vip: Tensor, with_seeds: Iterable[Tensor]) -> Layout:
    """Number vertices by their part, and inside a part by what its batches need.

    Args:
        assignment: int64 [N], the part of every vertex.
        vip: float32 [K, N] by old id, seeds not counted. It is put into the new order in place: K rows are what takes most memory here.
        with_seeds: K tensors float32 [N], the same with seeds; ids inside a part descend by it. One is held at a time.
    """
    pieces = []
    for part_id, probability in enumerate(with_seeds):
        own = (assignment == part_id).nonzero().flatten()
        pieces.append(own[torch.sort(probability[own], descending=True, stable=True).indices])
    order = torch.cat(pieces)
    sizes = torch.tensor([0, *(piece.numel() for piece in pieces)], device="cpu")
    for row in vip:
        row.copy_(row[order])
    return Layout(order, PartitionBook(sizes.cumsum(0)), vip)


def relabeled_edges(
    lists: Graph | Relation, targets: Numbering, sources: Numbering | None = None
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """Edges under new ids, piece by piece.

    Args:
        lists: neighbour lists of the vertices that ``targets`` numbers.
        sources: the numbering of the vertices in the lists; None: the same.

    Returns:
        ``indptr`` int64 [N + 1], and an iterator over pieces of the edges in new order: where they were in
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


def relabel(graph: Graph, layout: Numbering) -> Graph:
    """The graph under new ids, in memory."""
    indptr, pieces = relabeled_edges(graph, layout)
    return Graph.trusted(indptr, torch.cat([graph.indices[:0], *(sources for _, sources in pieces)]))
