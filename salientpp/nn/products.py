"""Provides the products of message passing over edges that are grouped by target. Each is differentiable once.

All functions take the lists of a batch and ``num_targets``. They use the first ``num_targets`` targets, and thus the first E' edges. In shapes, T' is
``num_targets`` and S' is the number of rows of x, which has a row for each source that is used. No function makes one row per edge, unless such
rows are its result.

On the CPU, kernels gather and reduce in one pass. Their backward runs over the lists by source, so it needs no atomics. Rows of float16 and bfloat16
are added up in float32. On other devices, :mod:`salientpp.nn.composed_products` computes the same with torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from salientpp import ops
from salientpp.nn import composed_products as composed
from salientpp.sampling.edge_lists import EdgeLists

_KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Attribute of a gradient that a product has just made and to which nothing else refers.
_OURS = "_salientpp_made"
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
        if not _has_kernel(x):
            return composed.reduce_sources(lists, x, num_targets, reduction, None)
        if reduction in ("max", "min"):
            return _ExtremeOfSources.apply(lists, x, num_targets, reduction == "max")
        return _SumOfSources.apply(lists, x, None, num_targets, reduction == "mean")
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
    if not _has_kernel(x):
        return composed.reduce_sources(lists, x, num_targets, reduction, weight)
    return _SumOfSources.apply(lists, x, weight, num_targets, reduction == "mean")


def with_first_rows(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Returns x [S', ...] and its first rows [number, ...]. The gradient of both is made without a table of zeros."""
    return _WithFirstRows.apply(x, number)


def take_sources(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    """Returns, as [E', ...], the row of each edge's source in x [S', ...]."""
    _check(lists, num_targets)
    _check_sources(lists, x, "x")
    return (_TakeSources.apply if _has_kernel(x) else composed.take_sources)(lists, x, num_targets)


def take_targets(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    """Returns, as [E', ...], the row of each edge's target in x [T' or more, ...]."""
    _check(lists, num_targets)
    _check_rows(x, num_targets, "x", "targets")
    return (_TakeTargets.apply if _has_kernel(x) else composed.take_targets)(lists, x, num_targets)


def reduce_edges(lists: EdgeLists, values: Tensor, num_targets: int, reduction: str) -> Tensor:
    """Reduces the values of each target's edges, [E', ...], to [T', ...], as :func:`reduce_sources` does."""
    _check_rows(values, _check(lists, num_targets), "values", "edges that are used", exact=True)
    _check_reduction(reduction)
    if not _has_kernel(values):
        return composed.reduce_edges(lists, values, num_targets, reduction)
    if reduction in ("max", "min"):
        return _ExtremeOfEdges.apply(lists, values, num_targets, reduction == "max")
    return _SumOfEdges.apply(lists, values, num_targets, reduction == "mean")


def softmax_by_target(lists: EdgeLists, scores: Tensor, num_targets: int) -> Tensor:
    """Returns the softmax of scores [E', ...] over the edges of each target, as :func:`torch_geometric.utils.softmax` does."""
    _check_rows(scores, _check(lists, num_targets), "scores", "edges that are used", exact=True)
    return (_Softmax.apply if _has_kernel(scores) else composed.softmax_by_target)(lists, scores, num_targets)


def dot_edges(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> Tensor:
    """Returns, for each edge, the inner products [E', H] of the row of its target [T' or more, H, C] and the row of its source [S', H, C]."""
    _check(lists, num_targets)
    _check_pair(lists, target_rows, source_rows, num_targets)
    target_rows, source_rows = _promoted(target_rows, source_rows)
    apply = _DotEdges.apply if _has_kernel(source_rows) else composed.dot_edges
    return apply(lists, target_rows, source_rows, num_targets)


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
    apply = _AdditiveScores.apply if _has_kernel(source_rows) else composed.additive_scores
    return apply(lists, target_rows, source_rows, att, negative_slope, num_targets)


# --- checks -----------------------------------------------------------------------------------------------------


def _has_kernel(x: Tensor) -> bool:
    """Returns True if the kernels support x. If not, torch's operations compute the product. Only this function decides it."""
    return x.device.type == "cpu" and x.dtype in _KERNEL_DTYPES


def _check(lists: EdgeLists, num_targets: int) -> int:
    """Returns the number of edges that are used."""
    if not 0 <= num_targets <= lists.num_targets:
        raise ValueError(
            f"num_targets must be in [0, {lists.num_targets}], the targets of the lists, got {num_targets}"
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
            f"{name} must have at most {lists.num_sources} rows, one for each source of the lists, got shape {list(x.shape)}"
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


# --- kernels and their gradients --------------------------------------------------------------------------------


def _indptr(lists: EdgeLists, num_targets: int) -> Tensor:
    return lists.indptr[: num_targets + 1]


def _divided(grad: Tensor, lists: EdgeLists, num_targets: int) -> Tensor:
    """Returns the gradient of sums, given the gradient of means."""
    sizes = lists.sizes(num_targets).clamp_(min=1)
    return grad / sizes.view(-1, *[1] * (grad.dim() - 1))


def _padded(rows: Tensor, count: int) -> Tensor:
    """Returns the gradient of ``count`` rows, given the gradient of the first rows. The others were not used and get zeros."""
    if rows.size(0) == count:
        return rows
    out = rows.new_zeros(count, *rows.shape[1:])
    out[: rows.size(0)] = rows
    return out


def _sum_by_source(lists: EdgeLists, num_sources: int, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sums the rows of targets [T', ...], times the weights of the edges, over the lists by source."""
    indptr, target, place = lists.by_source
    places = None if weight is None else place
    return ops.sum_listed_rows(indptr[: num_sources + 1], target, places, rows, weight, prefix=True)


class _SumOfSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, weight: Tensor | None, num_targets: int, mean: bool) -> Tensor:
        x, weight = x.contiguous(), None if weight is None else weight.contiguous()
        ctx.given = lists, num_targets, mean, x.size(0)
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        return ops.sum_listed_rows(_indptr(lists, num_targets), lists.source, None, x, weight, mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, mean, num_sources = ctx.given
        x, weight = ctx.saved_tensors
        grad = (_divided(grad, lists, num_targets) if mean else grad).contiguous()
        grad_x = _sum_by_source(lists, num_sources, grad, weight) if ctx.needs_input_grad[1] else None
        if grad_x is not None:
            setattr(grad_x, _OURS, True)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            heads = weight.size(1) if weight.dim() == 2 else 1
            grad_weight = _dot(lists, grad, x, num_targets, heads).view(weight.shape)
        return None, grad_x, grad_weight, None, None


class _WithFirstRows(torch.autograd.Function):
    """Table of rows, and its first rows. Backward adds the second gradient to the first, in place if a product of this module has just made the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.given = x.shape, number
        return x.view_as(x), x[:number]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, first: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, number = ctx.given
        if first is None:
            return grad, None
        if grad is None:
            grad = first.new_zeros(shape)
        elif not grad.__dict__.pop(_OURS, False):
            grad = grad.clone()
        grad[:number] += first
        return grad, None


class _ExtremeOfSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int, largest: bool) -> Tensor:
        x = x.contiguous()
        out = ops.extreme_listed_rows(_indptr(lists, num_targets), lists.source, x, largest)
        ctx.given = lists, num_targets
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        x, out = ctx.saved_tensors
        share = ops.share_ties(_indptr(lists, num_targets), lists.source, x, out, grad.contiguous())
        indptr, target, _ = lists.by_source
        return None, ops.pass_ties(indptr[: x.size(0) + 1], target, x, out, share), None, None


class _TakeSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
        ctx.given = lists, x.size(0)
        num_places = lists.num_places(num_targets)
        out = x.new_empty(num_places, *x.shape[1:])
        ops.gather_rows(x.contiguous(), lists.source[:num_places], out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_sources = ctx.given
        indptr, _, place = lists.by_source
        grad_x = ops.sum_listed_rows(indptr[: num_sources + 1], place, None, grad.contiguous(), None, prefix=True)
        return None, grad_x, None


class _TakeTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
        ctx.given = lists, num_targets, x.size(0)
        return ops.spread_rows(_indptr(lists, num_targets), x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, count = ctx.given
        sums = ops.sum_listed_rows(_indptr(lists, num_targets), None, None, grad.contiguous(), None)
        return None, _padded(sums, count), None


class _SumOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, values: Tensor, num_targets: int, mean: bool) -> Tensor:
        ctx.given = lists, num_targets, mean
        return ops.sum_listed_rows(_indptr(lists, num_targets), None, None, values.contiguous(), None, mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, mean = ctx.given
        grad = _divided(grad, lists, num_targets) if mean else grad
        return None, ops.spread_rows(_indptr(lists, num_targets), grad.contiguous()), None, None


class _ExtremeOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, values: Tensor, num_targets: int, largest: bool) -> Tensor:
        values = values.contiguous()
        out = ops.extreme_listed_rows(_indptr(lists, num_targets), None, values, largest)
        ctx.given = lists, num_targets
        ctx.save_for_backward(values, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        values, out = ctx.saved_tensors
        indptr = _indptr(lists, num_targets)
        share = ops.share_ties(indptr, None, values, out, grad.contiguous())
        return None, ops.pass_ties_to_entries(indptr, values, out, share), None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, scores: Tensor, num_targets: int) -> Tensor:
        out = ops.softmax_of_lists(_indptr(lists, num_targets), scores.contiguous())
        ctx.given = lists, num_targets
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        (out,) = ctx.saved_tensors
        return None, ops.softmax_of_lists_backward(_indptr(lists, num_targets), out, grad.contiguous()), None


def _dot(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int, heads: int) -> Tensor:
    return ops.dot_listed_rows(_indptr(lists, num_targets), lists.source, target_rows, source_rows, heads)


class _DotEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> Tensor:
        target_rows, source_rows = target_rows.contiguous(), source_rows.contiguous()
        ctx.given = lists, num_targets
        ctx.save_for_backward(target_rows, source_rows)
        return _dot(lists, target_rows, source_rows, num_targets, source_rows.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        target_rows, source_rows = ctx.saved_tensors
        grad, grad_target, grad_source = grad.contiguous(), None, None
        if ctx.needs_input_grad[1]:
            sums = ops.sum_listed_rows(_indptr(lists, num_targets), lists.source, None, source_rows, grad)
            grad_target = _padded(sums, target_rows.size(0))
        if ctx.needs_input_grad[2]:
            grad_source = _sum_by_source(lists, source_rows.size(0), target_rows[:num_targets], grad)
        return None, grad_target, grad_source, None


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lists: EdgeLists,
        target_rows: Tensor,
        source_rows: Tensor,
        att: Tensor,
        negative_slope: float,
        num_targets: int,
    ) -> Tensor:
        rows = target_rows.contiguous(), source_rows.contiguous(), att.contiguous()
        ctx.given = lists, num_targets, negative_slope
        ctx.save_for_backward(*rows)
        return ops.additive_scores(_indptr(lists, num_targets), lists.source, *rows, negative_slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, slope = ctx.given
        target_rows, source_rows, att = ctx.saved_tensors
        grad, grad_target, grad_source, grad_att = grad.contiguous(), None, None, None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
            sums, grad_att = ops.additive_scores_by_target(
                _indptr(lists, num_targets), lists.source, target_rows, source_rows, att, slope, grad
            )
            grad_target = _padded(sums, target_rows.size(0))
        if ctx.needs_input_grad[2]:
            indptr, target, place = lists.by_source
            grad_source = ops.additive_scores_by_source(
                indptr[: source_rows.size(0) + 1],
                target,
                place,
                target_rows[:num_targets],
                source_rows,
                att,
                slope,
                grad,
            )
        return None, grad_target, grad_source, grad_att, None, None
