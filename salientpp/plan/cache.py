"""Which remote rows should a part keep a copy of?

A policy scores every vertex for one part; the cache plan takes the remote vertices with the highest scores, as many
as the replication factor α allows: ``floor(α N / K)`` rows per part. Policies are pure functions in one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.ids import first_outside
from salientpp.plan.accesses import count_accesses, shuffled_batches
from salientpp.plan.arguments import as_real
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.vip import inclusion_probability

#: More than any number of parts; α N stays a number.
_LARGEST_ALPHA = 1e9


@dataclass(frozen=True, eq=False)
class Workload:
    """What one part's batches are made from.

    Attributes:
        graph: N vertices.
        book: who owns what.
        part_id: the part whose cache is planned.
        seeds: int64 global ids that the part's batches start from.
        num_neighbors: fanouts, nearest the seeds first.
        batch_size: seeds per batch.
        replace: neighbours are drawn with replacement.
        vip: float32 [N], the inclusion probabilities of this workload if they are known, for instance stored with the graph. Whoever ranks
            by them must take the same ones: computed under another numbering they differ in rounding, and so do the ranks of near ties.
    """

    graph: Graph
    book: PartitionBook
    part_id: int
    seeds: Tensor
    num_neighbors: Sequence[int]
    batch_size: int
    replace: bool = False
    vip: Tensor | None = None


def score_vip(workload: Workload) -> Tensor:
    """The vertex inclusion probability, as our sampler expands (``expand='frontier'``)."""
    if workload.vip is not None:
        return workload.vip
    return inclusion_probability(
        workload.graph, workload.seeds, workload.num_neighbors, workload.batch_size, replace=workload.replace
    )


def score_vip_hop(workload: Workload) -> Tensor:
    """The vertex inclusion probability of the paper's Proposition 1 (``expand='hop'``)."""
    return inclusion_probability(
        workload.graph,
        workload.seeds,
        workload.num_neighbors,
        workload.batch_size,
        expand="hop",
        replace=workload.replace,
    )


def score_degree(workload: Workload) -> Tensor:
    """The degree (how many vertices aggregate from v), for v within L hops of the part's seeds; else 0.

    The ``degree`` policy of SALIENT++, section 3.2.
    """
    graph = workload.graph
    # With all neighbours drawn, a vertex has a positive inclusion probability just when it is within reach.
    reach = inclusion_probability(
        graph, workload.seeds, [-1] * len(workload.num_neighbors), max(1, workload.batch_size)
    )
    degree = graph.transpose().in_degree().to(torch.float32)
    return torch.where(reach > 0, degree, torch.zeros(()))


def score_random(workload: Workload) -> Tensor:
    """A random order of all vertices, the same in every run and different for every part."""
    return ops.permutation(workload.graph.num_vertices, workload.part_id).to(torch.float32) + 1


def score_halo(workload: Workload) -> Tensor:
    """The 1-hop halo of the part: how many of the part's edges come from v; 0 outside the halo.

    The ``1-hop halo`` policy of SALIENT++, section 3.2, keeps all such v; under a budget those with most edges first.
    """
    begin, end = workload.book.range_of(workload.part_id)
    first, last = (int(workload.graph.indptr[v]) for v in (begin, end))
    sources = workload.graph.indices[first:last].long()
    if first_outside(sources, workload.graph.num_vertices) is not None:
        # Of a file that was altered after it was validated: counting would take memory for as many vertices as it names.
        raise RuntimeError(f"indices is corrupt: it must hold ids in [0, {workload.graph.num_vertices})")
    return torch.bincount(sources, minlength=workload.graph.num_vertices).to(torch.float32)


def score_wpr(workload: Workload) -> Tensor:
    """Weighted reverse PageRank: 5 iterations of ``s <- (1 - 0.85) r + 0.85 sum_{v lists u} s(v) / d(v)``, where r is
    uniform on the part's seeds and d(v) the in-degree.

    Min et al., Graph neural network training and data tiering (KDD 2022); as a policy in SALIENT++, section 3.2.
    """
    damping, iterations = 0.85, 5
    graph = workload.graph
    restart = torch.zeros(graph.num_vertices, dtype=torch.float64)
    restart[workload.seeds] = 1 / max(1, workload.seeds.numel())
    degree = graph.in_degree().clamp(min=1).to(torch.float64)
    rank = restart
    for _ in range(iterations):
        rank = (1 - damping) * restart + damping * _spread(graph, rank / degree)
    return rank.to(torch.float32)


def score_paths(workload: Workload) -> Tensor:
    """The number of paths of length 1 to L from the part's seeds to v, in floating point.

    The ``#paths`` policy of SALIENT++, section 3.2.
    """
    ending = torch.zeros(workload.graph.num_vertices, dtype=torch.float64)
    ending[workload.seeds] = 1
    total = torch.zeros_like(ending)
    for _ in workload.num_neighbors:
        ending = _spread(workload.graph, ending)
        total += ending
    return (total / total.max().clamp(min=1)).to(torch.float32)  # scaled: the counts outgrow float32


def score_simulation(workload: Workload) -> Tensor:
    """In how many batches of 2 simulated epochs v occurs; the epochs are not those of any training run.

    The ``simulation`` policy of SALIENT++, section 3.2.
    """
    batches = shuffled_batches(workload.seeds, workload.batch_size, workload.part_id, epochs=2)
    return count_accesses(workload.graph, batches, workload.num_neighbors, replace=workload.replace).to(torch.float32)


def _spread(graph: Graph, value: Tensor) -> Tensor:
    """float64 [N]: for every u the sum of ``value`` over the vertices that list u, as often as they do."""
    transposed = graph.transpose()
    return ops.sum_over_lists(transposed.indptr, transposed.indices, value)


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


#: A policy by name, or a function that scores the vertices of a workload: float [N], the higher the sooner cached, 0 never.
Policy = (
    Literal["degree", "halo", "paths", "random", "simulation", "vip", "vip-hop", "wpr"] | Callable[[Workload], Tensor]
)


def check_policy(policy: Policy) -> None:
    """Raise ValueError if it is neither a function nor a name in ``POLICIES``."""
    if not callable(policy) and not (isinstance(policy, str) and policy in POLICIES):
        raise ValueError(
            f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}; or pass a function of a Workload"
        )


def score(policy: Policy, workload: Workload) -> Tensor:
    """The scores float [N] of a policy; zeros where nothing is drawn, since a batch of its seeds alone needs no remote row.

    Raises:
        ValueError: no such policy, or its scores are not one number for every vertex.
    """
    check_policy(policy)
    if not len(workload.num_neighbors):
        return torch.zeros(workload.graph.num_vertices)
    if not callable(policy):
        return POLICIES[policy](workload)
    scores = policy(workload)
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"policy must return a tensor of scores [{workload.graph.num_vertices}], got {type(scores).__name__}"
        )
    if scores.shape != (workload.graph.num_vertices,):
        raise ValueError(
            f"policy must return scores of shape [{workload.graph.num_vertices}], got {list(scores.shape)}"
        )
    if scores.dtype.is_complex:
        raise ValueError(f"policy must return real scores, got {scores.dtype}")
    scores = scores.detach().cpu()
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.to(torch.float64)


def check_replication_factor(replication_factor: float) -> float:
    """α as a float.

    Raises:
        ValueError: it is negative, not a finite number, or beyond all sense (K caches everything).
    """
    number = as_real(replication_factor)
    if number is None or number < 0:
        raise ValueError(
            f"replication_factor must be >= 0 (cached rows per part over N / K), got {replication_factor!r}"
        )
    if number > _LARGEST_ALPHA:
        raise ValueError(
            f"replication_factor must be at most {_LARGEST_ALPHA:g} (with the number of parts all rows are cached), got {number:g}"
        )
    return number


def cache_capacity(replication_factor: float, book: PartitionBook) -> int:
    """Rows per part: ``floor(α N / K)``.

    Raises:
        ValueError: as :func:`check_replication_factor`.
    """
    alpha = check_replication_factor(replication_factor)
    # Rounded first: 0.29 * 100 is a little less than 29 in floating point.
    return math.floor(round(alpha * book.num_vertices / book.num_parts, 6))


def plan_cache(scores: Tensor, book: PartitionBook, part_id: int, replication_factor: float) -> Tensor:
    """The remote vertices to cache for a part.

    Args:
        scores: float [N]; a vertex that scores 0 is never cached.
        replication_factor: α >= 0; ``floor(α N / K)`` rows at most.

    Returns:
        Ascending global ids, int64. Among equal scores the lower id wins, so every rank of a part agrees.
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
        return torch.empty(0, dtype=torch.int64)
    threshold = np.partition(remote, remote.size - capacity)[remote.size - capacity]
    chosen = remote > threshold
    ties = np.flatnonzero(remote == threshold)[: capacity - int(np.count_nonzero(chosen))]
    chosen[ties] = True
    return torch.from_numpy(np.flatnonzero(chosen))


def expected_remote_rows(probability: Tensor, book: PartitionBook, part_id: int, cached: Tensor) -> float:
    """Rows that a batch of a part fetches on average: the sum of the probabilities of remote, uncached vertices.

    Args:
        probability: float [N], inclusion probabilities of the part.
        cached: int64 global ids.

    From two hops on the probabilities are too high (see :mod:`salientpp.plan.vip`), and so is the sum.
    """
    begin, end = book.range_of(part_id)
    total = probability.sum(dtype=torch.float64) - probability[begin:end].sum(dtype=torch.float64)
    return float(total - probability[cached].sum(dtype=torch.float64))
