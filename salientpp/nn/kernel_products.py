"""Computes the products of :mod:`salientpp.nn.products` with compiled kernels, on the CPU. That module checks the arguments.

A backward visits the edges grouped by source, so it needs no atomic additions. The gradient of a product is another product, because each is linear
in its rows and weights. So gradients of any order come from the same kernels. Only second gradients of extremes, softmax and additive scores are
composed of several products. Each product saves its own arguments for the backward, never copies of them, because copies have no graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.sampling.edge_lists import EdgeLists

#: Attribute that marks a gradient which a product has just made. Nothing else refers to it, so it may be changed in place.
_OURS = "_salientpp_made"


def _indptr(lists: EdgeLists, num_targets: int) -> Tensor:
    return lists.indptr[: num_targets + 1]


def _divided(grad: Tensor, lists: EdgeLists, num_targets: int) -> Tensor:
    """Turns the gradient of means into that of sums: divides each target's gradient by its number of edges."""
    sizes = lists.sizes(num_targets).clamp_(min=1)
    return grad / sizes.view(-1, *[1] * (grad.dim() - 1))


def _padded(rows: Tensor, count: int) -> Tensor:
    """Extends a gradient of the first rows to ``count`` rows. The other rows get zeros, because the product did not use them."""
    if rows.size(0) == count:
        return rows
    out = rows.new_zeros(count, *rows.shape[1:])
    out[: rows.size(0)] = rows
    return out


def _placed_by_source(lists: EdgeLists, num_sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the edges of the first ``num_sources`` sources, grouped by source as in :attr:`EdgeLists.by_source`."""
    indptr, target, place = lists.by_source
    return indptr[: num_sources + 1], target, place


def _run(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls ``function``, which computes a gradient. Autograd follows it only if second derivatives are wanted."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_Unused(), *args)


class _Unused:
    """Stand-in for autograd's context where no gradient is needed."""

    needs_input_grad = (False,) * 8

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Does nothing."""


class SumOfSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, weight: Tensor | None, num_targets: int, mean: bool) -> Tensor:
        ctx.given = lists, num_targets, mean, x.size(0)
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        x, weight = x.contiguous(), None if weight is None else weight.contiguous()
        return ops.sum_listed_rows(_indptr(lists, num_targets), lists.source, None, x, weight, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, mean, num_sources = ctx.given
        x, weight = ctx.saved_tensors
        grad = (_divided(grad, lists, num_targets) if mean else grad).contiguous()  # for both products
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_x = _run(SumOfTargets, lists, grad, weight, num_sources)
            if not torch.is_grad_enabled():
                setattr(grad_x, _OURS, True)
        if ctx.needs_input_grad[2]:
            grad_weight = _dot(lists, grad, x, num_targets, weight)
        return None, grad_x, grad_weight, None, None


class SumOfTargets(torch.autograd.Function):
    """Sums, for each source, the rows of its targets [T', ...] times edge weights. It is the backward of :class:`SumOfSources`."""

    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, rows: Tensor, weight: Tensor | None, num_sources: int) -> Tensor:
        ctx.given = lists, rows.size(0)
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, weight)
        rows, weight = rows.contiguous(), None if weight is None else weight.contiguous()
        indptr, target, place = _placed_by_source(lists, num_sources)
        return ops.sum_listed_rows(indptr, target, None if weight is None else place, rows, weight, prefix=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        rows, weight = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_rows = _run(SumOfSources, lists, grad, weight, num_targets, False)
        if ctx.needs_input_grad[2]:
            grad_weight = _dot(lists, rows, grad, num_targets, weight)
        return None, grad_rows, grad_weight, None


def _dot(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int, weight: Tensor) -> Tensor:
    """Returns the gradient of edge weights [E'] or [E', H], from rows of targets [T', ...] and of sources [S', ...]."""
    if weight.dim() == 2 and source_rows.dim() == 3:
        return _run(DotEdges, lists, target_rows, source_rows, num_targets)
    heads = weight.size(1) if weight.dim() == 2 else 1
    columns = math.prod(source_rows.shape[1:]) // max(1, heads)
    rows = (each.reshape(each.size(0), heads, columns) for each in (target_rows, source_rows))
    return _run(DotEdges, lists, *rows, num_targets).reshape(weight.shape)


class WithFirstRows(torch.autograd.Function):
    """Returns a table and its first rows. The backward adds up both gradients, in place if a product just made one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.given = x.shape, number
        return x.view_as(x), x[:number]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, first: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, number = ctx.given
        if first is None:
            return grad, None
        if grad is None:
            grad = first.new_zeros(shape)
        elif torch.is_grad_enabled() or not grad.__dict__.pop(_OURS, False):
            grad = grad.clone()
        grad[:number] += first
        return grad, None


class Extreme(torch.autograd.Function):
    """Maximum or minimum by target of source rows [S', ...], or of edge values [E', ...] if ``of_edges``."""

    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int, largest: bool, of_edges: bool) -> Tensor:
        x = x.contiguous()
        ctx.given = lists, num_targets, None if of_edges else lists.source
        out = ops.extreme_listed_rows(_indptr(lists, num_targets), ctx.given[2], x, largest)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, source = ctx.given
        x, out = ctx.saved_tensors
        indptr = _indptr(lists, num_targets)
        if torch.is_grad_enabled():
            values = x if source is None else TakeSources.apply(lists, x, num_targets)
            passed = _passed(lists, values, out, grad, num_targets)
            passed = passed if source is None else SumOfPlaces.apply(lists, passed, x.size(0))
        else:
            share = ops.share_ties(indptr, source, x, out, grad.contiguous())
            if source is None:
                passed = ops.pass_ties_to_entries(indptr, x, out, share)
            else:
                by_source, target, _ = _placed_by_source(lists, x.size(0))
                passed = ops.pass_ties(by_source, target, x, out, share)
        return None, passed, None, None, None


def _passed(lists: EdgeLists, values: Tensor, out: Tensor, grad: Tensor, num_targets: int) -> Tensor:
    """Returns the gradient [E', ...] of ``values`` from the gradient ``grad`` of their extremes ``out``; differentiable in ``grad``."""
    with torch.no_grad():
        is_extreme = (values == TakeTargets.apply(lists, out, num_targets)).to(values.dtype)
        ties = SumOfEdges.apply(lists, is_extreme, num_targets, False)
        ties += (
            out == 0
        )  # torch's scatter_reduce counts the zero that it begins with as a tie, also if the result leaves it out
        share = is_extreme / TakeTargets.apply(lists, ties, num_targets).clamp_(min=1)
    return TakeTargets.apply(lists, grad, num_targets) * share


class TakeSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
        ctx.given = lists, x.size(0)
        num_places = lists.num_places(num_targets)
        out = x.new_empty(num_places, *x.shape[1:])
        ops.gather_rows(x.contiguous(), lists.source[:num_places], out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_sources = ctx.given
        return None, _run(SumOfPlaces, lists, grad, num_sources), None


class SumOfPlaces(torch.autograd.Function):
    """Sums, for each source, the values [E', ...] of its edges."""

    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, values: Tensor, num_sources: int) -> Tensor:
        ctx.given = lists, values.size(0)
        indptr, _, place = _placed_by_source(lists, num_sources)
        return ops.sum_listed_rows(indptr, place, None, values.contiguous(), None, prefix=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_places = ctx.given
        return None, grad.index_select(0, lists.source[:num_places]), None


class TakeTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
        ctx.given = lists, num_targets, x.size(0)
        return ops.spread_rows(_indptr(lists, num_targets), x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, count = ctx.given
        return None, _padded(_run(SumOfEdges, lists, grad, num_targets, False), count), None


class SumOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, values: Tensor, num_targets: int, mean: bool) -> Tensor:
        ctx.given = lists, num_targets, mean
        return ops.sum_listed_rows(_indptr(lists, num_targets), None, None, values.contiguous(), None, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, mean = ctx.given
        grad = _divided(grad, lists, num_targets) if mean else grad
        return None, _run(TakeTargets, lists, grad, num_targets), None, None


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, scores: Tensor, num_targets: int) -> Tensor:
        out = ops.softmax_of_lists(_indptr(lists, num_targets), scores.contiguous())
        ctx.given = lists, num_targets
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        (out,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = out * grad
            sums = SumOfEdges.apply(lists, product, num_targets, False)
            return None, product - out * TakeTargets.apply(lists, sums, num_targets), None
        return None, ops.softmax_of_lists_backward(_indptr(lists, num_targets), out, grad.contiguous()), None


class DotEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> Tensor:
        ctx.given = lists, num_targets
        ctx.save_for_backward(target_rows, source_rows)
        target_rows, source_rows = target_rows.contiguous(), source_rows.contiguous()
        heads = source_rows.size(1)
        return ops.dot_listed_rows(_indptr(lists, num_targets), lists.source, target_rows, source_rows, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets = ctx.given
        target_rows, source_rows = ctx.saved_tensors
        grad, grad_target, grad_source = grad.contiguous(), None, None
        if ctx.needs_input_grad[1]:
            sums = _run(SumOfSources, lists, source_rows, grad, num_targets, False)
            grad_target = _padded(sums, target_rows.size(0))
        if ctx.needs_input_grad[2]:
            grad_source = _run(SumOfTargets, lists, target_rows[:num_targets], grad, source_rows.size(0))
        return None, grad_target, grad_source, None


class AdditiveScores(torch.autograd.Function):
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
        ctx.given = lists, num_targets, negative_slope
        ctx.save_for_backward(target_rows, source_rows, att)
        rows = target_rows.contiguous(), source_rows.contiguous(), att.contiguous()
        return ops.additive_scores(_indptr(lists, num_targets), lists.source, *rows, negative_slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, slope = ctx.given
        target_rows, source_rows, att = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                None,
                *_additive_gradients(lists, target_rows, source_rows, att, slope, num_targets, grad),
                None,
                None,
            )
        target_rows, source_rows, att, grad = (each.contiguous() for each in (target_rows, source_rows, att, grad))
        grad_target = grad_source = grad_att = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
            sums, grad_att = ops.additive_scores_by_target(
                _indptr(lists, num_targets), lists.source, target_rows, source_rows, att, slope, grad
            )
            grad_target = _padded(sums, target_rows.size(0))
        if ctx.needs_input_grad[2]:
            indptr, target, place = _placed_by_source(lists, source_rows.size(0))
            grad_source = ops.additive_scores_by_source(
                indptr, target, place, target_rows[:num_targets], source_rows, att, slope, grad
            )
        return None, grad_target, grad_source, grad_att, None, None


def _additive_gradients(
    lists: EdgeLists,
    target_rows: Tensor,
    source_rows: Tensor,
    att: Tensor,
    slope: float,
    num_targets: int,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the differentiable gradients of :func:`additive_scores`. It stores one row per edge."""
    sums = TakeTargets.apply(lists, target_rows, num_targets) + TakeSources.apply(lists, source_rows, num_targets)
    slopes = torch.where(sums.detach() > 0, sums.new_ones(()), sums.new_full((), slope))
    factor = slopes * grad.unsqueeze(-1)
    by_edge = factor * att
    by_target = _padded(SumOfEdges.apply(lists, by_edge, num_targets, False), target_rows.size(0))
    return by_target, SumOfPlaces.apply(lists, by_edge, source_rows.size(0)), (factor * sums).sum(0)
