"""How probable is it that a batch needs vertex v?

The vertex inclusion probability (VIP) of v for a part is the probability that a mini-batch whose seeds are drawn
from the part's seed set T contains v after L hops of neighbour sampling. It decides which remote rows a part
caches, in what order its own rows are kept on the device, and how vertices are numbered inside a part.

After Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152), Proposition 1. With batch size B and
``p_0 = min(1, B / |T|)`` on T, at hop h

    p_h(u) = 1 - prod_{v lists u} (1 - t_h(v) x_{h-1}(v)),      t_h(v) = min(1, f_h / d(v)),

where d(v) is the in-degree of v and t_h the chance that v, once expanded, draws one given neighbour (with
replacement ``1 - (1 - 1/d)^f``). Two readings of a hop:

* ``expand='hop'``, the paper's: every vertex may be expanded at every hop, x = p, and the inclusion probability
  is ``1 - prod_{h>=1} (1 - p_h)``.
* ``expand='frontier'``, the default and what PyG's and our sampler do: hop h expands the vertices first found
  at hop h - 1, so x = q with ``q_0 = p_0``, ``q_h(u) = p_h(u) (1 - sum_{j<h} q_j(u))``, and the inclusion
  probability is ``sum_{h>=1} q_h``.

At one hop the formula takes nothing but the seeds as independent (a shuffled epoch draws them without replacement, which is nearly
that). From two hops on it takes events as independent that share vertices, and on most graphs overestimates; its ranking, which is what
a cache needs, stays near the best.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph import Graph


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    """``fanouts`` as a list of ints, each >= 1 or -1 for all neighbours.

    Raises:
        ValueError: an entry is 0, below -1 or no integer, or there is none.
    """
    if isinstance(fanouts, (str, bytes)) or not isinstance(fanouts, Sequence):
        raise ValueError(f"num_neighbors must be a list of integers, one per hop, got {fanouts!r}")
    checked = []
    for hop, fanout in enumerate(fanouts):
        whole = isinstance(fanout, numbers.Real) and not isinstance(fanout, bool) and float(fanout).is_integer()
        if not whole or not (fanout == -1 or fanout >= 1):
            raise ValueError(
                f"num_neighbors[{hop}] must be an integer >= 1, or -1 for all neighbours, got {fanout!r}; "
                "to sample fewer hops, make the list shorter"
            )
        checked.append(int(fanout))
    if not checked:
        raise ValueError("num_neighbors must have one entry per hop, got an empty list")
    return checked


def inclusion_probability(
    graph: Graph,
    seeds: Tensor | Sequence[Tensor],
    num_neighbors: Sequence[int],
    batch_size: int,
    *,
    include_seeds: bool = False,
    expand: str = "frontier",
    replace: bool = False,
) -> Tensor:
    """Vertex inclusion probabilities of one seed set, or of several in one sweep over the edges.

    Args:
        graph: N vertices; directed graphs are right, and the transpose is made (once) for the sweep.
        seeds: int64 [T] global ids, or a list of K such tensors; an empty one gives zeros.
        num_neighbors: fanouts, nearest the seeds first; -1 takes all neighbours.
        batch_size: seeds per batch.
        include_seeds: count being a seed as inclusion too (the order of a device's own rows needs it; what a
            cache holds does not, since remote vertices are never seeds).
        expand: 'frontier' or 'hop', see above.
        replace: neighbours are drawn with replacement.

    Returns:
        float32 [N], or [K, N] for a list of seed sets; small values keep their relative precision.

    Raises:
        ValueError: a seed out of range, a fanout that is 0, ``batch_size`` < 1, an unknown ``expand``.
    """
    if expand not in ("frontier", "hop"):
        raise ValueError(f"expand must be 'frontier' or 'hop', got {expand!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, got {batch_size}")
    fanouts = check_fanouts(num_neighbors)
    seed_sets = [seeds] if isinstance(seeds, Tensor) else list(seeds)
    for k, seed_set in enumerate(seed_sets):
        if seed_set.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"seeds must be integer ids, got {seed_set.dtype} in seed set {k}; of a mask take mask.nonzero()")
    seed_sets = [seed_set.to(torch.int64).flatten() for seed_set in seed_sets]
    for k, seed_set in enumerate(seed_sets):
        bad = (seed_set < 0) | (seed_set >= graph.num_vertices)
        if bad.any():
            at = int(bad.nonzero()[0])
            raise ValueError(
                f"seeds must be in [0, {graph.num_vertices}), got {int(seed_set[at])} at position {at} of seed set {k}"
            )
    sizes = torch.tensor([0, *(seed_set.numel() for seed_set in seed_sets)])
    transposed = graph.transpose()
    probability = ops.inclusion_probability(
        graph.indptr,
        transposed.indptr,
        transposed.indices,
        torch.cat(seed_sets) if seed_sets else torch.empty(0, dtype=torch.int64),
        sizes.cumsum(0),
        fanouts,
        batch_size,
        frontier=expand == "frontier",
        include_seeds=include_seeds,
        replace=replace,
    )
    return probability[0] if isinstance(seeds, Tensor) else probability


def add_seeds(probability: Tensor, seeds: Tensor, batch_size: int) -> Tensor:
    """Inclusion probabilities with the term h = 0: what ``include_seeds=True`` gives, from what was computed without.

    Args:
        probability: float [N].
        seeds: int64 [T] positions in ``probability``.
        batch_size: seeds per batch.

    Returns:
        A new tensor [N] of the same dtype.
    """
    heat = probability.clone()
    if seeds.numel():
        heat[seeds] = (heat[seeds] + min(1.0, batch_size / seeds.numel())).clamp(max=1.0)
    return heat


def draw_weights(
    graph: Graph, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, *, mean: float = 10.0, most: int = 1000
) -> Tensor:
    """Edge weights for a partitioner: how often per step the target of an edge is expected to draw its source.

    With ``q_h`` the frontier probabilities above, ``w(u -> v) = sum_h t_h(v) q_{h-1}(v)``, so cutting heavy edges is what makes
    rows travel.

    Args:
        seeds, num_neighbors, batch_size: of a step of all ranks together.
        mean, most: the weights are scaled to this mean, rounded and clamped to [1, most], since partitioners take integers.

    Returns:
        int64 [E], in the order of ``graph.indices``.
    """
    fanouts = check_fanouts(num_neighbors)
    degree = graph.in_degree().clamp(min=1).to(torch.float64)
    reached = torch.zeros(graph.num_vertices, dtype=torch.float64)  # sum of q_j over j < hop
    draws = torch.zeros_like(reached)
    for hop, fanout in enumerate(fanouts):
        if hop == 0:
            until = torch.zeros_like(reached)
            until[seeds] = min(1.0, batch_size / max(1, seeds.numel()))
        else:
            until = inclusion_probability(graph, seeds, fanouts[:hop], batch_size, include_seeds=True).double()
        chance = torch.ones_like(degree) if fanout < 0 else (fanout / degree).clamp(max=1.0)
        draws += chance * (until - reached).clamp(min=0.0)
        reached = until
    per_edge = torch.repeat_interleave(draws, graph.in_degree())
    scale = mean / per_edge.mean().clamp(min=1e-30) if per_edge.numel() else 1.0
    return (per_edge * scale).round().clamp(1, most).to(torch.int64)
