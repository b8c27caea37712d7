"""Operators that compute inclusion probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from salientpp.ops.library import operators


def inclusion_probability(
    indptr: Tensor,
    out_indptr: Tensor,
    out_indices: Tensor,
    seeds: Tensor,
    seed_offsets: Tensor,
    fanouts: Sequence[int],
    batch_size: int,
    *,
    frontier: bool,
    include_seeds: bool,
    replace: bool,
) -> Tensor:
    """Vertex inclusion probabilities of K seed sets, float32 [K, N]; see :mod:`salientpp.vip.inclusion`.

    Args:
        indptr: int64 [N + 1], in-lists (their lengths are the degrees that vertices draw from).
        out_indptr, out_indices: the transposed graph.
        seeds: int64, the K seed sets one after the other; ``seed_offsets`` int64 [K + 1] bounds them.
        fanouts: one entry per hop, -1 for all neighbours.
    """
    return operators.inclusion_probability(
        indptr,
        out_indptr,
        out_indices,
        seeds,
        seed_offsets,
        list(fanouts),
        batch_size,
        frontier,
        include_seeds,
        replace,
    )


def sum_over_lists(indptr: Tensor, indices: Tensor, value: Tensor) -> Tensor:
    """``out[v]`` = the sum of ``value`` over ``indices[indptr[v]:indptr[v + 1]]``; float32 or float64, [N] or up to 8 columns, [N, W], as ``value``."""
    return operators.sum_over_lists(indptr, indices, value)
