"""Computes the expected sizes of batches, and how much each seed adds to them, so that a loader can forecast sizes.

With ``q_h`` the frontier probabilities of :mod:`salientpp.vip.inclusion`, a batch is expected to have

    sum_{h>=0} sum_v q_h(v)                          vertices, and
    sum_{h>=1} sum_v q_{h-1}(v) k_h(v)               edges,             k_h(v) = min(d(v), f_h),

summed by vertex type and by relation. From two hops on, the first sum is too large, as the probabilities are. So it predicts no size by itself. Its derivative
by ``p_0(s)`` tells how much more a batch is expected to have if s is one of its seeds. The sum of these derivatives over the seeds of a batch is closely
correlated with the batch's size, and its distribution is known. :mod:`salientpp.loader.forecast` uses it as a control variate.

One sweep in reverse order of the hops gives the derivatives by all ``p_0`` (reverse accumulation: Griewank and Walther, Evaluating Derivatives, 2nd edition,
section 3.2). It costs about as much as the forward sweep. With ``a_h(u)`` the derivative by ``q_h(u)``, the derivative by ``q_{h-1}(v)`` gets

    t_h(v) / (1 - t_h(v) q_{h-1}(v)) sum_{u in v's list} a_h(u) (1 - sum_{j<h} q_j(u)) (1 - p_h(u)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from salientpp.graph.typed import TypedGraph
from salientpp.vip.inclusion import Start, TypedHops, start_of_types
from salientpp.vip.list_sums import ListSums

#: Smallest probability to divide by. It is reached only if a vertex is certain, and the dividend is then zero.
_SMALLEST = 1e-12


@dataclass(frozen=True, eq=False)
class ExpectedSizes:
    """Expected numbers of vertices and edges of a batch.

    Attributes:
        names: names of the S sizes: the vertex types of the graph, then its edge types.
        mean: float64 [S].
        by_seed: by vertex type float64 [N, S], the derivative of ``mean`` by the probability that the vertex is a seed.
    """

    names: Sequence[Any]
    mean: Tensor
    by_seed: dict[str | None, Tensor]


def expected_sizes(
    graph: TypedGraph | ListSums, start: Start, fanouts: Sequence[Sequence[int]], *, replace: bool = False
) -> ExpectedSizes:
    """Computes the expected sizes of a batch and their derivatives, by the formulas of the module.

    Args:
        start, fanouts, replace: as in :func:`salientpp.vip.inclusion.typed_inclusion_probabilities`.
    """
    hops = TypedHops(graph, fanouts, replace)
    expanded = [start_of_types(graph, start)]  # q of each hop
    reached = [list(expanded[0])]  # sum of q up to each hop
    drawn = []  # p of each hop
    for hop in range(hops.num_hops):
        drawn.append(hops.reach(hop, expanded[-1]))
        expanded.append([p * (1.0 - sum_q).clamp(min=0.0) for p, sum_q in zip(drawn[-1], reached[-1])])
        reached.append([sum_q + q for sum_q, q in zip(reached[-1], expanded[-1])])
    worth = _worth(hops.lists, fanouts, replace)
    mean = torch.zeros(len(graph.node_types) + len(graph.edge_types), dtype=torch.float64, device="cpu")
    for hop, of_hop in enumerate(expanded):
        by_q = worth(hop)
        mean += sum(q @ of_type for q, of_type in zip(of_hop, by_q))
    by_sum = [torch.zeros_like(of_type) for of_type in by_q]
    for hop in reversed(range(hops.num_hops)):
        by_q = [a + more for a, more in zip(by_q, by_sum)]
        unreached = [(1.0 - sum_q).clamp(min=0.0) for sum_q in reached[hop]]
        by_edge = [a * (free * (1.0 - p)).unsqueeze(1) for a, free, p in zip(by_q, unreached, drawn[hop])]
        by_sum = [more - a * p.unsqueeze(1) for more, a, p in zip(by_sum, by_q, drawn[hop])]
        back = hops.lists.to_targets(by_edge, expanded[hop], partial(_share, hops, hop))
        by_q = [a + more for a, more in zip(worth(hop), back)]
    by_seed = [a + more for a, more in zip(by_q, by_sum)]
    return ExpectedSizes([*graph.node_types, *graph.edge_types], mean, dict(zip(graph.node_types, by_seed)))


def _worth(lists: ListSums, fanouts: Sequence[Sequence[int]], replace: bool) -> Callable[[int], list[Tensor]]:
    """Returns a function of a hop, which tells how much each of the S sizes grows if the hop finds a vertex: per vertex type float64 [N, S].

    The numbers of vertices grow by the vertex itself, those of edges by the edges that the next hop draws into it.
    """
    degree = lists.per_list(lambda piece: piece.degree.to(torch.float64))
    num_types = len(lists.node_types)

    def of_hop(hop: int) -> list[Tensor]:
        width = num_types + len(lists.edge_types)
        worth = [torch.zeros(size, width, dtype=torch.float64, device="cpu") for size in lists.num_vertices]
        for type_ in range(num_types):
            worth[type_][:, type_] = 1.0
        for number, ((_, target), of_relation) in enumerate(zip(lists.ends, fanouts)):
            if hop < len(of_relation):
                worth[target][:, num_types + number] = _num_draws(degree[number], of_relation[hop], replace)
        return worth

    return of_hop


def _num_draws(degree: Tensor, fanout: int, replace: bool) -> Tensor:
    """Returns the number of neighbours that each target draws, float64 [N_target].

    ``degree``: number of neighbours that it has.
    """
    if fanout < 0:
        return degree
    return torch.where(degree > 0, float(fanout), 0.0) if replace else degree.clamp(max=float(fanout))


def _share(hops: TypedHops, hop: int, place: int, expanded: Tensor) -> Tensor:
    """Returns ``t / (1 - t q)``, the factor before the sum in the module's last formula, float64 [n] or [e]. q is ``expanded``."""
    chance, draws = hops.draws(hop, place, expanded)
    return chance / (1.0 - draws).clamp(min=_SMALLEST)
