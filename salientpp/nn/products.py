"""Provides the products of message passing: gathers, reductions, softmax and scores over edges that are grouped by target.

Each product is differentiable any number of times.

All functions take a batch's :class:`EdgeLists` and ``num_targets``. They use the first ``num_targets`` targets, and thus the first E' edges. In shapes, T' is
``num_targets`` and S' is the number of rows of x, which has a row for each source that is used. No function makes one row per edge, unless such
rows are its result.

On the CPU, :mod:`salientpp.nn.kernel_products` gathers and reduces in one pass. Rows of float16 and bfloat16 are added up in float32. On other devices,
:mod:`salientpp.nn.composed_products` computes the same with torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from salientpp.nn import composed_products as composed
from salientpp.nn import kernel_products as kernels
from salientpp.sampling.edge_lists import EdgeLists

_KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REDUCTIONS = ("sum", "mean", "max", "min")


def reduce_sources(
    lists: EdgeLists, x: Tensor, num_targets: int, reduction: str, weight: Tensor | None = None
) -> Tensor:
    """Reduces the rows of each target's sources, times the weights of the edges.

    Args:
        lists: the edges.
        x: rows of the sources [S', ...], S' <= num_sources.
        num_targets: number of targets, T'.
        reduction: "sum", "mean" (over the number of edges), "max" or "min". Equal extremes share their gradient as in ``torch.scatter_reduce``.
        weight: weights of the edges [E'], or [E', H] for an x of [S', H, ...]; only for "sum" and "mean".

    Returns:
        [T', ...], zeros for a target without edges. Its dtype is x's, or the promoted dtype of x and weight.

    Raises:
        ValueError: a shape or the reduction is wrong, or "max" or "min" is given a weight.
        RuntimeError: x has no row for the source of an edge that is used.
    """
    num_places = _check(lists, num_targets)
    _check_reduction(reduction)
    _check_sources(lists, x, "x")
    if weight is None:
        return _form(x).reduce_sources(lists, x, num_targets, reduction, None)
    if reduction in ("max", "min"):
        raise ValueError(
            f"reduction {reduction!r} takes no weight; multiply take_sources() by it and use reduce_edges()"
        )
    _check_rows(weight, num_places, "weight", "edges that are used", exact=True)
    if weight.dim() > 2 or (weight.dim() == 2 and (x.dim() < 2 or weight.size(1) != x.size(1))):
        raise ValueError(
            f"weight must have shape [E'], or [E', H] for an x of [S', H, ...], got {list(weight.shape)} and {list(x.shape)}"
        )
    x, weight = _promoted(x, weight)
    return _form(x).reduce_sources(lists, x, num_targets, reduction, weight)


def with_first_rows(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Returns x [S', ...] and its first rows [number, ...]. The backward adds both gradients without a table of zeros."""
    return kernels.WithFirstRows.apply(x, number)


def take_sources(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    """Returns, as [E', ...], the row of each edge's source in x [S', ...]."""
    _check(lists, num_targets)
    _check_sources(lists, x, "x")
    return _form(x).take_sources(lists, x, num_targets)


def take_targets(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    """Returns, as [E', ...], the row of each edge's target in x [T' or more, ...]."""
    _check(lists, num_targets)
    _check_rows(x, num_targets, "x", "targets")
    return _form(x).take_targets(lists, x, num_targets)


def reduce_edges(lists: EdgeLists, values: Tensor, num_targets: int, reduction: str) -> Tensor:
    """Reduces the values of each target's edges, [E', ...], to [T', ...], as :func:`reduce_sources` does."""
    _check_rows(values, _check(lists, num_targets), "values", "edges that are used", exact=True)
    _check_reduction(reduction)
    return _form(values).reduce_edges(lists, values, num_targets, reduction)


def softmax_by_target(lists: EdgeLists, scores: Tensor, num_targets: int) -> Tensor:
    """Returns the softmax of scores [E', ...] over the edges of each target, as :func:`torch_geometric.utils.softmax` does."""
    _check_rows(scores, _check(lists, num_targets), "scores", "edges that are used", exact=True)
    return _form(scores).softmax_by_target(lists, scores, num_targets)


def dot_edges(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> Tensor:
    """Returns, for each edge, the inner products [E', H] of the row of its target [T' or more, H, C] and the row of its source [S', H, C]."""
    _check(lists, num_targets)
    _check_pair(lists, target_rows, source_rows, num_targets)
    target_rows, source_rows = _promoted(target_rows, source_rows)
    return _form(source_rows).dot_edges(lists, target_rows, source_rows, num_targets)


def additive_scores(
    lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, att: Tensor, negative_slope: float, num_targets: int
) -> Tensor:
    """Returns GATv2's scores [E', H]: the sum over c of ``att[h, c] * leaky_relu(target_rows[t, h, c] + source_rows[s, h, c])``.

    Rows are [T' or more, H, C] and [S', H, C], ``att`` is [H, C]. The backward computes sums of two rows again instead of storing them.
    """
    _check(lists, num_targets)
    _check_pair(lists, target_rows, source_rows, num_targets)
    if att.shape != source_rows.shape[1:]:
        raise ValueError(
            f"att must have the shape of a row of source_rows, {list(source_rows.shape[1:])}, got {list(att.shape)}"
        )
    target_rows, source_rows, att = _promoted(target_rows, source_rows, att)
    return _form(source_rows).additive_scores(lists, target_rows, source_rows, att, negative_slope, num_targets)


# --- checks -----------------------------------------------------------------------------------------------------


def _form(x: Tensor) -> Any:
    """Returns the module that computes with x: compiled kernels, or torch's operations."""
    return kernels if x.device.type == "cpu" and x.dtype in _KERNEL_DTYPES else composed


def _check(lists: EdgeLists, num_targets: int) -> int:
    """Checks ``num_targets`` and returns the number of edges into these targets."""
    if not 0 <= num_targets <= lists.num_targets:
        raise ValueError(
            f"num_targets must be in [0, {lists.num_targets}], the number of targets of the edges, got {num_targets}"
        )
    return lists.num_places(num_targets)


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")


def _check_rows(x: Tensor, least: int, name: str, of_what: str, exact: bool = False) -> None:
    if x.dim() == 0 or x.size(0) < least or (exact and x.size(0) != least):
        raise ValueError(
            f"{name} must have {'' if exact else 'at least '}{least} rows, one for each of the {of_what}, got shape {list(x.shape)}"
        )


def _check_sources(lists: EdgeLists, x: Tensor, name: str) -> None:
    if x.dim() == 0 or x.size(0) > lists.num_sources:
        raise ValueError(
            f"{name} must have at most {lists.num_sources} rows, one for each source of the edges, got shape {list(x.shape)}"
        )


def _check_pair(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> None:
    _check_sources(lists, source_rows, "source_rows")
    _check_rows(target_rows, num_targets, "target_rows", "targets")
    if source_rows.dim() != 3 or target_rows.dim() != 3 or source_rows.shape[1:] != target_rows.shape[1:]:
        raise ValueError(
            "target_rows and source_rows must have shapes [T', H, C] and [S', H, C], got "
            f"{list(target_rows.shape)} and {list(source_rows.shape)}"
        )


def _promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)
