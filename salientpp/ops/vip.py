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
    """Computes vertex inclusion probabilities of K seed sets, float32 [K, N]; see :mod:`salientpp.vip.inclusion`.

    Args:
        indptr: int64 [N + 1], the in-lists; their lengths are the in-degrees.
        out_indptr, out_indices: the transposed graph.
        seeds: int64, the K seed sets one after another; ``seed_offsets`` int64 [K + 1] holds their bounds.
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
    """Sums values over lists: ``out[v]`` is the sum of ``value[u]`` over the u in ``indices[indptr[v]:indptr[v + 1]]``.

    ``value`` and the result are float32 or float64, [N] or [N, W] with up to 8 columns.
    """
    return operators.sum_over_lists(indptr, indices, value)
