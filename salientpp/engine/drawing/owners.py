"""Chooses the rank of a host that computes each vertex, if the host's ranks compute batches together.

Ranks of a host are numbered from 0 to R - 1 and called places here. A good map gives every place the same expected rows and edges of a batch, and cuts few
of the expected edges, because rows travel along edges between places. Two kinds:

* ``'vip'``: METIS divides the graph. Vertices weigh their expected rows and edges, and edges the expected number of times that a batch draws them. This is
  the splitting of GSplit (Polisetty et al., MLSys 2025, arXiv:2303.13775) with probabilities from the formula of VIP instead of counts of drawn batches.
* ``'rows'``: a vertex of a part that only one rank of the host serves belongs to this rank. Vertices of other hosts go to the place to which most of their
  expected edges lead, as long as the place has room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.partitioning.assign import assign_parts
from salientpp.ranks.comm import Comm
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.vip.inclusion import edge_weights_of, expected_draws, inclusion_probability

#: Kind of map from vertices to the ranks of a host that compute them, see above.
SplitBy = Literal["vip", "rows"]

#: Largest excess of a place over the mean of the expected rows, and of the expected edges.
TOLERANCE = 0.05

#: Total of the weights that a partitioner gets: its integers represent each share of a vertex to nine digits.
_TOTAL_WEIGHT = 2**30

#: Passes over the edges that move vertices of other hosts to the places of their neighbours.
_PASSES = 3


@dataclass(frozen=True, eq=False)
class Expected:
    """Expected contents of a batch of the host.

    Attributes:
        rows: float64 [N], probability that the batch has the vertex.
        draws: float64 [N], expected number of times that the batch draws one given edge into the vertex.
        edges: float64 [N], expected number of drawn edges into the vertex.
    """

    rows: Tensor
    draws: Tensor
    edges: Tensor

    @classmethod
    def of(
        cls, graph: Graph, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False
    ) -> Expected:
        """Computes the expectations for batches of ``batch_size`` of the host's ``seeds`` int64 [T]; see :mod:`salientpp.vip.inclusion`."""
        rows = inclusion_probability(graph, seeds, num_neighbors, batch_size, include_seeds=True, replace=replace)
        draws = expected_draws(graph, seeds, num_neighbors, batch_size, replace=replace)
        return cls(rows.double(), draws, draws * graph.in_degree())

    @property
    def load(self) -> Tensor:
        """Load of each vertex, float64 [N]: its fraction of all expected rows plus that of all expected edges."""
        return sum(
            (value / value.sum().clamp(min=1e-30) for value in (self.rows, self.edges)), torch.zeros_like(self.rows)
        )


def make_owners(
    split_by: SplitBy, graph: Graph, book: PartitionBook, placement: Placement, expected: Expected, seed: int = 0
) -> Tensor:
    """Returns, for each vertex, the number on the host of the rank that computes it, int8 or int16 [N]. All ranks of the host get the same map.

    Args:
        placement: placement of one of the host's ranks, with the hosts' numbers of ranks.
        seed: seed of METIS, >= 0.

    Raises:
        ImportError, PartitionerError: as for method 'metis' of :func:`~salientpp.partitioning.assign.assign_parts`.
    """
    places = len(placement.ranks_of_host)
    served = served_places(book, placement)
    if split_by == "rows" and bool((served >= 0).any()):
        owners = owners_by_rows(graph, served, places, expected)
    else:
        owners = owners_by_vip(graph, places, expected, seed)
    return owners.to(torch.int8 if places <= 127 else torch.int16)


def served_places(book: PartitionBook, placement: Placement) -> Tensor:
    """Returns, for each vertex, the number on the host of the rank that serves its part, int64 [N]. -1: another host does, or several ranks do."""
    served = torch.full((book.num_vertices,), -1, dtype=torch.int64, device="cpu")
    ranks = placement.ranks_of_host
    parts = [placement.parts_of(rank) for rank in range(placement.world_size)]
    for place, rank in enumerate(ranks):
        if parts.count(parts[rank]) == 1:
            begin, end = book.range_of(parts[rank].start)[0], book.range_of(parts[rank].stop - 1)[1]
            served[begin:end] = place
    return served


def owners_by_vip(graph: Graph, places: int, expected: Expected, seed: int = 0) -> Tensor:
    """Returns the place of each vertex by METIS, int64 [N]. Expected rows and edges of the places differ from their means by at most :data:`TOLERANCE`, if the
    weights of single vertices allow it."""
    if places == 1 or graph.num_vertices <= places:
        return torch.arange(graph.num_vertices, device="cpu") % places
    return assign_parts(
        graph,
        places,
        loads={"rows": _as_integers(expected.rows), "edges": _as_integers(expected.edges)},
        edge_weights=edge_weights_of(graph, expected.draws),
        vertex_weights=_as_integers(expected.load).clamp(min=1),
        tolerance=TOLERANCE,
        seed=seed,
    ).assignment


def _as_integers(load: Tensor) -> Tensor:
    return (load * (_TOTAL_WEIGHT / load.sum().clamp(min=1e-30))).round().to(torch.int64)


def owners_by_rows(graph: Graph, served: Tensor, places: int, expected: Expected) -> Tensor:
    """Returns the place of each vertex, int64 [N]: the place in ``served``.

    Other vertices get the place with most of their expected edges, among places with room. A place has room until its
    load is ``1 + TOLERANCE`` times the mean. Loads are the sums of :attr:`Expected.load`.

    Args:
        served: int64 [N], a place or -1.
    """
    free = (served < 0).nonzero().view(-1)
    load, owners = expected.load, served.clone()
    if not free.numel():
        return owners
    fixed = torch.zeros(places, dtype=torch.float64, device="cpu").index_add_(0, served[served >= 0], load[served >= 0])
    room = ((1.0 + TOLERANCE) * load.sum() / places - fixed).clamp(min=0.0)
    for _ in range(_PASSES):
        owners[free] = _fill(_pulls(graph, owners, places, expected.draws)[free], load[free], room.clone())
    return owners


def _pulls(graph: Graph, owners: Tensor, places: int, draws: Tensor) -> Tensor:
    """Returns, for each vertex and place, the expected edges between the vertex and the vertices of the place, float64 [N, places]."""
    out = graph.transpose()
    pulls = torch.empty((graph.num_vertices, places), dtype=torch.float64, device="cpu")
    for place in range(places):
        there = (owners == place).double()
        sources = draws * ops.sum_over_lists(graph.indptr, graph.indices, there)
        pulls[:, place] = sources + ops.sum_over_lists(out.indptr, out.indices, there * draws)
    return pulls


def _fill(pulls: Tensor, load: Tensor, room: Tensor) -> Tensor:
    """Assigns each vertex to the place with room that pulls it most.

    Vertices that would lose most at their second-best place come first.

    Args:
        pulls: float64 [n, places]; changed.
        load: float64 [n].
        room: float64 [places]; changed.

    Returns:
        int64 [n]. Vertices that fit nowhere go where the room is largest.
    """
    places = room.numel()
    chosen = torch.full((pulls.size(0),), -1, dtype=torch.int64, device="cpu")
    left = torch.arange(pulls.size(0), device="cpu")
    for _ in range(places):
        # Without a pull, the place with the most room attracts.
        pull = pulls[left] + 1e-12 * room
        best, at = pull.topk(min(2, places), dim=1)
        order = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True)
        refused = []
        for place in range(places):
            wanted = left[order[at[order, 0] == place]]
            fits = load[wanted].cumsum(0) <= room[place]
            chosen[wanted[fits]] = place
            room[place] -= load[wanted[fits]].sum()
            refused.append(wanted[~fits])
            if refused[-1].numel():
                pulls[:, place] = -torch.inf
        left = torch.cat(refused)
        if not left.numel():
            break
    chosen[left] = room.argmax()
    return chosen


def shared_owners(host: Comm, num_vertices: int, make: Callable[[], Tensor]) -> Tensor:
    """Returns the map of :func:`make_owners`, which the host's first rank makes for all its ranks, in memory that they share. Collective among them.

    Args:
        make: calls :func:`make_owners`.

    Raises:
        ValueError: the first rank could not make the map.
        CannotShare: some rank cannot map the memory of another.
    """
    if host.size == 1:
        return make()
    with host.patient(), host.together("divide the vertices among the ranks of its host"):  # may take minutes
        owners = make() if host.rank == 0 else None
    dtype = torch.int8 if host.size <= 127 else torch.int16
    (shared,) = shared_tensors(host, [((num_vertices,), dtype)])
    if owners is not None:
        shared.copy_(owners)
    host.gather_facts({})  # the map is complete
    return shared
