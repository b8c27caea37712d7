"""Computes the inclusion probabilities of batches whose vertices share their random numbers, and of blocks of such batches.

With ``shared_draws='batch'``, every vertex u has one number r in a batch, uniform on [0, 1]. An expanded vertex v draws u if r is among the f
smallest of its d(v) neighbours' numbers. So given r, v draws u with probability

    g_h(v, r) = P(Binomial(d(v) - 1, r) <= f_h - 1),        whose mean over r is min(1, f_h / d(v)),

and the hops of :mod:`salientpp.vip.inclusion` become

    p_h(u | r) = 1 - prod_{v lists u} (1 - q_{h-1}(v) g_h(v, r)),
    q_h(u | r) = p_h(u | r) (1 - sum_{j<h} q_j(u | r)),             q_h(u) = int_0^1 q_h(u | r) dr.

A vertex v with a list that is too long to be shared draws u with probability f / d(v) for every r. The integral is a sum over a few values of r:
Gauss-Legendre quadrature after the substitution r = s^2, because for long lists ``g`` changes only at small r. Parallel edges count as edges to
separate vertices.

**Blocks.** Suppose that fanouts do not grow from hop to hop and no list is too long. Then the draws of v at a smaller fanout are part of its draws at a
larger one. So a block of b batches with the same numbers needs the same rows as one batch of all its seeds. Without shared numbers, a block is modelled
as a batch of all its seeds that may expand every vertex at every hop ('hop' in :mod:`salientpp.vip.inclusion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.ids import check_range
from salientpp.vip.inclusion import (
    check_batch_size,
    check_fanouts,
    inclusion_probability,
    uniform_draw_probability,
    uniform_start,
)
from salientpp.vip.list_sums import ListSums

#: Length of the longest neighbour list from which draws are shared. csrc/sampling/shared_draw.h has the same number.
MOST_NEIGHBORS = 1000

#: Number of values of r. The mean of ``g`` is then within 1 % of f / d for all shared lists (fanouts 1 to 500; within 0.2 % up to 15).
_NUM_NODES = 32


def shared_inclusion_probability(
    graph: Graph | ListSums,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    batch_size: int,
    *,
    include_seeds: bool = False,
) -> Tensor:
    """Computes the vertex inclusion probabilities of batches with ``shared_draws='batch'``.

    Args:
        graph, seeds, num_neighbors, batch_size, include_seeds: as in :func:`salientpp.vip.inclusion.inclusion_probability`, for one seed set.

    Returns:
        float32 [N].

    Raises:
        ValueError: a seed is out of range, a fanout is below -1, or ``batch_size`` < 1.
    """
    batch_size, fanouts = check_batch_size(batch_size), check_fanouts(num_neighbors)
    lists = ListSums.of(graph)
    check_range(seeds, lists.num_vertices[0], "seeds must be")
    nodes, weights = _quadrature()
    first = uniform_start(seeds, batch_size)(lists.num_vertices[0])
    expanded = first  # q of the hop before
    reached = [first.clone() for _ in nodes]  # sum of q given r
    for fanout in fanouts:
        found = torch.zeros_like(first)
        for given_r, r, weight in zip(reached, nodes.tolist(), weights.tolist()):
            (none,) = lists.to_sources([expanded], partial(_log_none, lists, fanout, r))
            new = -torch.expm1(none) * (1.0 - given_r).clamp(min=0.0)
            given_r += new
            found += weight * new
        expanded = found
    total = torch.zeros_like(first)
    for given_r, weight in zip(reached, weights.tolist()):
        total += weight * given_r
    return (total if include_seeds else total - first).clamp(0.0, 1.0).to(torch.float32)


def _log_none(lists: ListSums, fanout: int, r: float, place: int, expanded: Tensor) -> Tensor:
    """Returns log(1 - P), [n]. P is the probability that a target is expanded and draws a neighbour whose random number in the batch is ``r``.

    Args:
        place: position of the piece with the targets in ``lists.pieces``.
        expanded: the probability [n] that each target is expanded.
    """
    return torch.log1p(-(expanded * _draw_probability(lists.pieces[place].degree, fanout, r)).clamp(max=1.0))


def block_probability(
    graph: Graph | ListSums,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    batch_size: int,
    draw_block: int,
    shared_draws: Literal["batch"] | None = None,
    *,
    include_seeds: bool = False,
) -> Tensor:
    """Computes the probability that a block of consecutive batches, which make the same draws, needs each row.

    The sum of these probabilities is the expected number of distinct rows of a block.

    Args:
        draw_block, shared_draws: as in :class:`salientpp.NeighborLoader`.
        graph, seeds, num_neighbors, batch_size, include_seeds: as in :func:`shared_inclusion_probability`.

    Returns:
        float32 [N].

    Raises:
        ValueError: as in :func:`shared_inclusion_probability`, or ``draw_block`` < 1.
    """
    if draw_block < 1:
        raise ValueError(
            f"draw_block must be an integer >= 1 (consecutive batches that share draws), got {draw_block!r}"
        )
    of_block = check_batch_size(batch_size) * draw_block
    if shared_draws is not None:
        return shared_inclusion_probability(graph, seeds, num_neighbors, of_block, include_seeds=include_seeds)
    expand = "frontier" if draw_block == 1 else "hop"
    return inclusion_probability(graph, seeds, num_neighbors, of_block, include_seeds=include_seeds, expand=expand)


@cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Returns the values of r in (0, 1) at which the module's integral over r is evaluated, and their weights, float64 [_NUM_NODES]."""
    # Golub and Welsch: the nodes are the eigenvalues of the Jacobi matrix of the Legendre polynomials.
    k = torch.arange(1, _NUM_NODES, dtype=torch.float64, device="cpu")
    beside = k / torch.sqrt(4.0 * k * k - 1.0)
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    s, weight = (values + 1.0) / 2.0, vectors[0] ** 2
    return s**2, 2.0 * s * weight


def _draw_probability(degree: Tensor, fanout: int, r: float) -> Tensor:
    """Returns, for each degree, the probability that an expanded vertex draws a neighbour with random number ``r``."""
    alone = uniform_draw_probability(degree, fanout, False)
    if fanout <= 0 or fanout >= MOST_NEIGHBORS:
        return alone
    others = torch.arange(MOST_NEIGHBORS, dtype=torch.float64, device="cpu").view(-1, 1)  # degree - 1
    smaller = torch.arange(fanout, dtype=torch.float64, device="cpu")
    log_ways = torch.lgamma(others + 1) - torch.lgamma(smaller + 1) - torch.lgamma((others - smaller).clamp(min=0) + 1)
    log_chance = (
        log_ways
        + smaller * torch.log(torch.tensor(r, device="cpu").double())
        + (others - smaller) * torch.log1p(torch.tensor(-r, device="cpu").double())
    )
    table = torch.where(smaller <= others, torch.exp(log_chance), 0.0).sum(1).clamp(max=1.0)
    shared = (degree > fanout) & (degree <= MOST_NEIGHBORS)
    return torch.where(shared, table[(degree - 1).clamp(0, MOST_NEIGHBORS - 1)], alone)
