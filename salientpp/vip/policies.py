"""Plans which remote rows a part caches, by the scores of a cache policy.

A policy scores every vertex for one part. The cache plan takes the remote vertices with the highest scores, up to
``floor(α N / K)`` rows per part, where α is the replication factor. Policies are pure functions in two tables, for one vertex type and for several.

Over several vertex types, the budget is in bytes: ``α / K`` times the bytes of all rows that may travel. Vertices are then ranked by score per byte,
so wide rows of one type compete with narrow rows of another. With one type, the budgets in rows and in bytes give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.arguments import as_real
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.ids import first_outside
from salientpp.ranks.partition_book import PartitionBook
from salientpp.suggestions import did_you_mean
from salientpp.vip.accesses import count_accesses, shuffled_batches
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability
from salientpp.vip.list_sums import ListSums
from salientpp.vip.names import PolicyName

#: Larger than any number of parts, and small enough that α N stays finite.
_LARGEST_ALPHA = 1e9


@dataclass(frozen=True, eq=False)
class Workload:
    """Describes the batches of one part, as the input from which a policy computes scores.

    Attributes:
        graph: N vertices; or their lists, which may be divided among ranks (:class:`~salientpp.vip.divided.DividedListSums`). Then all ranks compute the
            scores of their own workloads together, and :attr:`lists` gives the sums that a policy may use.
        book: the partition book, which has the owners of the vertices.
        part_id: the part whose cache is planned.
        seeds: int64 global ids that the part's batches start from.
        num_neighbors: fanouts, nearest the seeds first.
        batch_size: seeds per batch.
        replace: True if neighbours are drawn with replacement.
        vip: float32 [N], the inclusion probabilities of this workload if known, for instance stored with the graph. All ranks that plan a cache with them
            must use the same array: values that are computed under another numbering are rounded differently, so nearly equal scores may change places.
    """

    graph: Graph | ListSums
    book: PartitionBook
    part_id: int
    seeds: Tensor
    num_neighbors: Sequence[int]
    batch_size: int
    replace: bool = False
    vip: Tensor | None = None

    @property
    def num_vertices(self) -> int:
        return self.book.num_vertices

    @property
    def lists(self) -> ListSums:
        """Sums over the neighbour lists of ``graph``."""
        return ListSums.of(self.graph)


def score_vip(workload: Workload) -> Tensor:
    """Scores v by its vertex inclusion probability, with the expansion of our sampler (``expand='frontier'``)."""
    return _vip(workload, "frontier") if workload.vip is None else workload.vip


def score_vip_hop(workload: Workload) -> Tensor:
    """Scores v by the vertex inclusion probability of the paper's Proposition 1 (``expand='hop'``)."""
    return _vip(workload, "hop")


def _vip(of: Workload, expand: str) -> Tensor:
    return inclusion_probability(of.graph, of.seeds, of.num_neighbors, of.batch_size, expand=expand, replace=of.replace)


def score_degree(workload: Workload) -> Tensor:
    """Scores v by its degree, the number of vertices that aggregate from v, if v is within L hops of the part's seeds; else 0.

    The ``degree`` policy of SALIENT++, section 3.2.
    """
    # If all neighbours are drawn, a vertex has a positive inclusion probability exactly if it is within reach.
    reach = inclusion_probability(
        workload.graph, workload.seeds, [-1] * len(workload.num_neighbors), max(1, workload.batch_size)
    )
    graph = workload.graph
    degree = _readers(graph)[0] if isinstance(graph, ListSums) else graph.transpose().in_degree()
    return torch.where(reach > 0, degree.to(torch.float32), torch.zeros((), device="cpu"))


def score_random(workload: Workload) -> Tensor:
    """Scores vertices in a random order, the same in every run and different for every part."""
    return ops.permutation(workload.num_vertices, workload.part_id).to(torch.float32) + 1


def score_halo(workload: Workload) -> Tensor:
    """Scores v by the number of the part's edges that come from v; 0 outside the part's 1-hop halo.

    The ``1-hop halo`` policy of SALIENT++, section 3.2, keeps the whole halo. If the cache is smaller than the halo, it has the vertices with most of
    these edges.
    """
    graph = workload.graph
    if isinstance(graph, ListSums):
        targets = torch.zeros(workload.num_vertices, dtype=torch.float64, device="cpu")
        targets[slice(*workload.book.range_of(workload.part_id))] = 1
        return _spread(graph, targets).to(torch.float32)
    first, last = (int(graph.indptr[v]) for v in workload.book.range_of(workload.part_id))
    sources = graph.indices[first:last].long()
    if first_outside(sources, graph.num_vertices) is not None:
        # The file was changed after its validation. Counting would take memory for as many vertices as the largest id.
        raise RuntimeError(f"indices is corrupt: it must hold ids in [0, {graph.num_vertices})")
    return torch.bincount(sources, minlength=graph.num_vertices).to(torch.float32)


def score_wpr(workload: Workload) -> Tensor:
    """Scores by weighted reverse PageRank: 5 iterations of ``s <- (1 - 0.85) r + 0.85 sum_{v lists u} s(v) / d(v)``.

    r is uniform on the part's seeds, and d(v) is the in-degree.

    Min et al., Graph neural network training and data tiering (KDD 2022); as a policy in SALIENT++, section 3.2.
    """
    damping, iterations = 0.85, 5
    lists = workload.lists
    restart = torch.zeros(workload.num_vertices, dtype=torch.float64, device="cpu")
    restart[workload.seeds] = 1 / max(1, workload.seeds.numel())
    rank = restart
    for _ in range(iterations):
        rank = (1 - damping) * restart + damping * _spread(lists, rank, mean=True)
    return rank.to(torch.float32)


def score_paths(workload: Workload) -> Tensor:
    """Scores v by the number of paths of length 1 to L from the part's seeds to v, in floating point.

    The ``#paths`` policy of SALIENT++, section 3.2.
    """
    lists = workload.lists
    ending = torch.zeros(workload.num_vertices, dtype=torch.float64, device="cpu")
    ending[workload.seeds] = 1
    total = torch.zeros_like(ending)
    for _ in workload.num_neighbors:
        ending = _spread(lists, ending)
        total += ending
    return (total / total.max().clamp(min=1)).to(torch.float32)  # scaled, because the counts exceed float32


def score_simulation(workload: Workload) -> Tensor:
    """Scores v by the number of batches of 2 simulated epochs that contain v. No training run has these epochs.

    The ``simulation`` policy of SALIENT++, section 3.2.
    """
    if isinstance(workload.graph, ListSums):
        raise ValueError(
            "policy 'simulation' samples batches in one process, which needs the whole topology, and this topology is stored in parts; use policy='vip'"
        )
    batches = shuffled_batches(workload.seeds, workload.batch_size, workload.part_id, epochs=2)
    return count_accesses(workload.graph, batches, workload.num_neighbors, replace=workload.replace).to(torch.float32)


def _spread(lists: ListSums, value: Tensor, mean: bool = False) -> Tensor:
    """Sums ``value`` [N] over the vertices that draw from each u: float64 [N]. A repeated edge counts each time.

    Args:
        mean: divide each value by the length of its vertex's list.
    """

    def weigh(place: int, of_targets: Tensor) -> Tensor:
        piece = lists.pieces[place]
        return piece.spread(of_targets / piece.degree.clamp(min=1) if mean else of_targets)

    return lists.to_sources([value], weigh)[0]


def _readers(lists: ListSums) -> list[Tensor]:
    """Returns the number of vertices that aggregate from each vertex, once per edge: per type float64 [N]."""
    ones = [torch.ones_like(of_type) for of_type in lists.zeros()]
    return lists.to_sources(ones, lambda place, of_targets: lists.pieces[place].spread(of_targets))


#: The function of each name in :data:`~salientpp.vip.names.PolicyName`.
POLICIES: dict[str, Callable[[Workload], Tensor]] = {
    "degree": score_degree,
    "halo": score_halo,
    "paths": score_paths,
    "random": score_random,
    "simulation": score_simulation,
    "vip": score_vip,
    "vip-hop": score_vip_hop,
    "wpr": score_wpr,
}


#: A policy by name, or a function from a workload to the scores of its vertices, float [N]. Vertices with the highest scores are cached first. A vertex with
#: score 0 is never cached.
Policy = PolicyName | Callable[[Workload], Tensor]


def check_policy(policy: Policy) -> None:
    """Raises ValueError if the policy is neither a function nor a name in ``POLICIES``."""
    if not callable(policy) and not (isinstance(policy, str) and policy in POLICIES):
        raise ValueError(
            f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}; or pass a function of a Workload{did_you_mean(policy, POLICIES)}"
        )


def score(policy: Policy, workload: Workload) -> Tensor:
    """Returns the scores of a policy, float [N]. Without hops all scores are zero: a batch then has only seeds of the part, and needs no remote row.

    Raises:
        ValueError: the policy does not exist, or its scores are not one real number per vertex.
    """
    check_policy(policy)
    size = workload.num_vertices
    if not len(workload.num_neighbors):
        return torch.zeros(size, device="cpu")
    if not callable(policy):
        return POLICIES[policy](workload)
    scores = policy(workload)
    if not isinstance(scores, Tensor):
        raise ValueError(f"policy must return a tensor of scores [{size}], got {type(scores).__name__}")
    if scores.shape != (size,):
        raise ValueError(f"policy must return scores of shape [{size}], got {list(scores.shape)}")
    if scores.dtype.is_complex:
        raise ValueError(f"policy must return real scores, got {scores.dtype}")
    scores = scores.detach().cpu()
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.to(torch.float64)


#: Policies with probabilities as scores.
PROBABILITIES = ("vip", "vip-hop")


def add_scores(policy: Policy, pool: Tensor, scores: Tensor) -> None:
    """Adds one rank's scores to the scores of its host, in place.

    A host's cache serves all its ranks. So a vertex counts by the probability that the next batch of any of them needs it,
    ``p_host(u) = 1 - prod_ranks (1 - p_rank(u))``. Scores that are not probabilities are added up.

    Args:
        pool: float64 [N], the scores of the host; zeros before the first rank is added.
        scores: float [N], of the rank.
    """
    # 1 - (1 - a)(1 - b) written as a sum, so that small numbers keep their precision.
    pool += scores.to(torch.float64) * (1 - pool) if policy in PROBABILITIES else scores.to(torch.float64)


# --- several vertex types, weights, seeds that are edges ----------------------------------------------


@dataclass(frozen=True, eq=False)
class TypedWorkload:
    """Describes the batches of one part, as input of a policy, if there are several vertex types, edge weights, or edges as seeds.

    Attributes:
        graph: the topology, or lists as in a :class:`Workload`.
        part_id: the part whose cache is planned.
        start: per vertex type with seeds, the probability that a batch has each vertex among its seeds: a function of the number of vertices, see
            :func:`salientpp.vip.inclusion.uniform_start` and :func:`~salientpp.vip.inclusion.link_start`.
        fanouts: one list per relation of the graph.
        replace: True if neighbours are drawn with replacement.
        vip: per vertex type float32 [N], the inclusion probabilities of this workload if they are known.
    """

    graph: TypedGraph | ListSums
    part_id: int
    start: Mapping[str | None, Callable[[int], Tensor]]
    fanouts: Sequence[Sequence[int]]
    replace: bool = False
    vip: Mapping[str | None, Tensor] | None = None


def _typed_vip(of: TypedWorkload, expand: str = "frontier") -> Mapping[str | None, Tensor]:
    if of.vip is not None and expand == "frontier":
        return of.vip
    return typed_inclusion_probability(of.graph, of.start, of.fanouts, expand=expand, replace=of.replace)


def _typed_degree(workload: TypedWorkload) -> Mapping[str | None, Tensor]:
    """Scores v by the number of vertices that aggregate from v over all relations, also if v is out of reach of the seeds."""
    graph = workload.graph
    if isinstance(graph, ListSums):
        return {type_: of_type.to(torch.float32) for type_, of_type in zip(graph.node_types, _readers(graph))}
    degree = [torch.zeros(size, dtype=torch.float32, device="cpu") for size in graph.num_vertices]
    for relation in graph.relations:
        found = torch.bincount(relation.indices.long(), minlength=graph.num_vertices[relation.source])
        degree[relation.source] += found.to(torch.float32)
    return dict(zip(graph.node_types, degree))


def _typed_random(workload: TypedWorkload) -> Mapping[str | None, Tensor]:
    graph = workload.graph
    return {
        type_: ops.permutation(size, ops.join_key(workload.part_id, place)).to(torch.float32) + 1
        for place, (type_, size) in enumerate(zip(graph.node_types, graph.num_vertices))
    }


#: The policies of :data:`POLICIES` that support several vertex types.
TYPED_POLICIES: dict[str, Callable[[TypedWorkload], Mapping[str | None, Tensor]]] = {
    "degree": _typed_degree,
    "random": _typed_random,
    "vip": _typed_vip,
    "vip-hop": partial(_typed_vip, expand="hop"),
}


def score_types(policy: str | Callable[[Any], Any], workload: TypedWorkload) -> dict[str | None, Tensor]:
    """Returns the scores of a policy for several vertex types, per type float [N]. Without hops all scores are zero.

    Args:
        policy: a name in :data:`TYPED_POLICIES`, or a function from a :class:`TypedWorkload` to such scores, which may leave out types.

    Raises:
        ValueError: the policy does not exist for several types, or its scores are not one real number per vertex.
    """
    graph = workload.graph
    sizes = dict(zip(graph.node_types, graph.num_vertices))
    if not any(len(fanouts) for fanouts in workload.fanouts):
        return {type_: torch.zeros(size, device="cpu") for type_, size in sizes.items()}
    if not callable(policy) and policy not in TYPED_POLICIES:
        raise ValueError(
            f"policy must be one of {', '.join(sorted(TYPED_POLICIES))} for several vertex types, weighted edges or seeds that are edges, "
            f"got {policy!r}; or pass a function of a TypedWorkload{did_you_mean(policy, TYPED_POLICIES)}"
        )
    scores = policy(workload) if callable(policy) else TYPED_POLICIES[policy](workload)
    if not isinstance(scores, Mapping) or not set(scores) <= set(sizes):
        got = sorted(map(str, scores)) if isinstance(scores, Mapping) else type(scores).__name__
        raise ValueError(f"policy must return a mapping of vertex types to scores, expected {list(sizes)}, got {got}")
    for type_, of_type in scores.items():
        if not isinstance(of_type, Tensor) or of_type.shape != (sizes[type_],) or of_type.dtype.is_complex:
            got = f"{of_type.dtype} {list(of_type.shape)}" if isinstance(of_type, Tensor) else type(of_type).__name__
            raise ValueError(f"policy must return real scores of shape [{sizes[type_]}] for {type_!r}, got {got}")
    return {type_: scores.get(type_, torch.zeros(size, device="cpu")).detach().cpu() for type_, size in sizes.items()}


def plan_caches(
    scores: Mapping[str | None, Tensor],
    books: Mapping[str | None, PartitionBook],
    row_bytes: Mapping[str | None, int],
    part_id: int,
    replication_factor: float,
) -> dict[str | None, Tensor]:
    """Selects the remote vertices that a part caches, over all types whose rows may travel.

    Args:
        scores: per vertex type float [N], see :func:`plan_cache`.
        books, row_bytes: partition book and bytes of a row for each type whose rows may travel.
        replication_factor: α >= 0; the cache holds at most ``α / K`` times the bytes of all rows of these types.

    Returns:
        Per type the ascending global ids of the selected vertices, int64. Among equal scores per byte, the first type in ``books`` wins, then the lower id.
    """
    if len(books) == 1:
        ((type_, book),) = books.items()
        return {type_: plan_cache(scores[type_], book, part_id, replication_factor)}
    remote = {}
    for type_, book in books.items():
        begin, end = book.range_of(part_id)
        of_type = scores[type_].to(torch.float64)
        if bool(of_type.isnan().any()):
            raise ValueError(f"scores must be numbers, got nan at {type_!r} vertex {int(of_type.isnan().nonzero()[0])}")
        useful = of_type > 0
        useful[begin:end] = False
        remote[type_] = torch.where(useful, of_type, -1.0)
    return densest(remote, row_bytes, cache_bytes(replication_factor, books, row_bytes))


def cache_bytes(
    replication_factor: float, books: Mapping[str | None, PartitionBook], row_bytes: Mapping[str | None, int]
) -> int:
    """Returns the bytes of rows that a part may cache: ``floor(α / K · Σ N · row bytes)`` over the types whose rows may travel."""
    alpha = check_replication_factor(replication_factor)
    total = sum(book.num_vertices * row_bytes[type_] for type_, book in books.items())
    num_parts = next((book.num_parts for book in books.values()), 1)
    # Round first: 0.29 * 100 is slightly less than 29 in floating point.
    return math.floor(round(alpha * total / num_parts, 6))


def densest(
    scores: Mapping[str | None, Tensor], row_bytes: Mapping[str | None, int], num_bytes: int
) -> dict[str | None, Tensor]:
    """Selects the rows with the highest scores per byte that fit into ``num_bytes``. Never selects rows with negative scores.

    If a row does not fit into the bytes that are left, it is skipped, and the next rows are tried.

    Args:
        row_bytes: per type the bytes of a row.

    Returns:
        Per type the selected positions, ascending int64.
    """
    types = list(scores)
    useful = [(scores[type_] >= 0).nonzero().flatten() for type_ in types]
    width = torch.cat([torch.full_like(ids, max(1, row_bytes[type_])) for type_, ids in zip(types, useful)])
    density = torch.cat([scores[type_][ids].to(torch.float64) for type_, ids in zip(types, useful)]) / width
    order = torch.sort(density, descending=True, stable=True).indices
    chosen = torch.zeros(order.numel(), dtype=torch.bool, device="cpu")
    for _ in types:  # after a row that does not fit, only rows of narrower types are left
        taken = width[order].cumsum(0)
        number = int((taken <= num_bytes).sum())
        chosen[order[:number]] = True
        num_bytes -= int(taken[number - 1]) if number else 0
        rest = order[number:]
        order = rest[width[rest] <= num_bytes]  # without the row that did not fit
    masks = chosen.split([ids.numel() for ids in useful])
    return {type_: ids[mask] for type_, ids, mask in zip(types, useful, masks)}


def check_replication_factor(replication_factor: float) -> float:
    """Returns α as a float; ValueError if it is negative, not finite, or absurdly large (α = K already caches everything)."""
    number = as_real(replication_factor)
    if number is None or number < 0:
        raise ValueError(
            f"replication_factor must be >= 0 (cached rows of a part, divided by the mean number of rows of a part), got {replication_factor!r}"
        )
    if number > _LARGEST_ALPHA:
        raise ValueError(
            f"replication_factor must be at most {_LARGEST_ALPHA:g} (the number of parts is enough to cache all rows), got {number:g}"
        )
    return number


def cache_capacity(replication_factor: float, book: PartitionBook) -> int:
    """Returns the number of rows that a part may cache: ``floor(α N / K)``."""
    return cache_bytes(replication_factor, {None: book}, {None: 1})


def plan_cache(scores: Tensor, book: PartitionBook, part_id: int, replication_factor: float) -> Tensor:
    """Selects the remote vertices that a part caches.

    Args:
        scores: float [N]; a vertex with score 0 is never cached.
        part_id: the part whose cache is planned. Its own vertices are not selected.
        replication_factor: α >= 0; at most ``floor(α N / K)`` rows are cached.

    Returns:
        The ascending global ids of the selected vertices, int64. Among equal scores the lower id wins, so all ranks of a part agree.
    """
    capacity = cache_capacity(replication_factor, book)
    if scores.shape != (book.num_vertices,):
        raise ValueError(f"scores must have shape [{book.num_vertices}], got {list(scores.shape)}")
    if bool(scores.isnan().any()):
        raise ValueError(f"scores must be numbers, got nan at vertex {int(scores.isnan().nonzero()[0])}")
    begin, end = book.range_of(part_id)
    remote = scores.numpy(force=True).copy()
    remote[begin:end] = 0
    capacity = min(capacity, int(np.count_nonzero(remote > 0)))
    if capacity == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    threshold = np.partition(remote, remote.size - capacity)[remote.size - capacity]
    chosen = remote > threshold
    ties = np.flatnonzero(remote == threshold)[: capacity - int(np.count_nonzero(chosen))]
    chosen[ties] = True
    return torch.from_numpy(np.flatnonzero(chosen))
