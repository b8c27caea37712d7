"""Computes the products of :mod:`salientpp.nn.products` with compiled kernels, on the CPU. That module checks the arguments.

A backward visits the edges grouped by source, so it needs no atomic additions. The gradient of a product is another product, because each is linear
in its rows and weights. So gradients of any order come from the same kernels. Second gradients have two exceptions: extremes and softmax combine several
products, and additive scores use torch's operations. Each product saves its own arguments for the backward, never copies of them, because autograd could not
differentiate through copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.nn import composed_products as composed
from salientpp.sampling.edge_lists import EdgeLists

#: Attribute that marks a gradient which a product has just made. Nothing else refers to it, so it may be changed in place.
_OURS = "_salientpp_made"

RowFunction = Callable[[Tensor], Tensor]


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


# --- linear functions -------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Applies a linear function to rows. The caller also gives its transpose, with which the backward computes the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: RowFunction, transpose: RowFunction) -> Tensor:
        ctx.given = transpose, function
        return function(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _run(_Linear, grad, *ctx.given), None, None


def _along_sources(lists: EdgeLists, num_targets: int, num_sources: int) -> tuple[RowFunction, RowFunction]:
    """Returns a function that gives each edge the row of its source, [S', ...] to [E', ...], and its transpose, which sums values of edges by source."""
    source = lists.source[: lists.num_places(num_targets)]

    def take(x: Tensor) -> Tensor:
        out = x.new_empty(source.numel(), *x.shape[1:])
        ops.gather_rows(x.contiguous(), source, out)
        return out

    def add(values: Tensor) -> Tensor:
        indptr, _, place = _placed_by_source(lists, num_sources)
        return ops.sum_listed_rows(indptr, place, None, values.contiguous(), None, prefix=True)

    return take, add


def _along_targets(
    lists: EdgeLists, num_targets: int, count: int, mean: bool = False
) -> tuple[RowFunction, RowFunction]:
    """Returns a function that gives each edge the row of its target, [count, ...] to [E', ...], and its transpose, which sums values of edges by target.

    With ``mean``, the transpose averages the values, and the first function divides the rows by the degrees of the targets.
    """
    indptr = _indptr(lists, num_targets)

    def take(x: Tensor) -> Tensor:
        return ops.spread_rows(indptr, (_divided(x, lists, num_targets) if mean else x).contiguous())

    def add(values: Tensor) -> Tensor:
        return _padded(ops.sum_listed_rows(indptr, None, None, values.contiguous(), None, mean), count)

    return take, add


def take_sources(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    return _Linear.apply(x, *_along_sources(lists, num_targets, x.size(0)))


def take_targets(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    return _Linear.apply(x, *_along_targets(lists, num_targets, x.size(0)))


def reduce_edges(lists: EdgeLists, values: Tensor, num_targets: int, reduction: str) -> Tensor:
    if reduction in ("max", "min"):
        return _Extreme.apply(lists, values, num_targets, reduction == "max", True)
    take, add = _along_targets(lists, num_targets, num_targets, reduction == "mean")
    return _Linear.apply(values, add, take)


# --- products ---------------------------------------------------------------------------------------------------


def reduce_sources(lists: EdgeLists, x: Tensor, num_targets: int, reduction: str, weight: Tensor | None) -> Tensor:
    if reduction in ("max", "min"):
        return _Extreme.apply(lists, x, num_targets, reduction == "max", False)
    return _Sum.apply(lists, x, weight, num_targets, reduction == "mean", False)


class _Sum(torch.autograd.Function):
    """Sums rows times weights of edges, over the sources of each target; with ``back``, over the targets of each source.

    The backward of either sum computes the gradient of its rows as the other sum.
    """

    @staticmethod
    def forward(
        ctx: Any, lists: EdgeLists, rows: Tensor, weight: Tensor | None, number: int, mean: bool, back: bool
    ) -> Tensor:
        ctx.given = lists, number, mean, back, rows.size(0)
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, weight)
        rows, weight = rows.contiguous(), None if weight is None else weight.contiguous()
        if not back:
            return ops.sum_listed_rows(_indptr(lists, number), lists.source, None, rows, weight, mean)
        indptr, target, place = _placed_by_source(lists, number)
        return ops.sum_listed_rows(indptr, target, None if weight is None else place, rows, weight, prefix=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, number, mean, back, count = ctx.given
        rows, weight = ctx.saved_tensors
        grad = (_divided(grad, lists, number) if mean else grad).contiguous()  # for both products
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_rows = _run(_Sum, lists, grad, weight, count, False, not back)
            if not torch.is_grad_enabled():
                setattr(grad_rows, _OURS, True)
        if ctx.needs_input_grad[2]:
            of_targets, of_sources = (rows, grad) if back else (grad, rows)
            grad_weight = _dot(lists, of_targets, of_sources, count if back else number, weight)
        return None, grad_rows, grad_weight, None, None, None


def _dot(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int, weight: Tensor) -> Tensor:
    """Returns the gradient of edge weights [E'] or [E', H], from rows of targets [T', ...] and of sources [S', ...]."""
    if weight.dim() == 2 and source_rows.dim() == 3:
        return _run(_DotEdges, lists, target_rows, source_rows, num_targets)
    heads = weight.size(1) if weight.dim() == 2 else 1
    columns = math.prod(source_rows.shape[1:]) // max(1, heads)
    rows = (each.reshape(each.size(0), heads, columns) for each in (target_rows, source_rows))
    return _run(_DotEdges, lists, *rows, num_targets).reshape(weight.shape)


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


class _Extreme(torch.autograd.Function):
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
            take, add = _along_sources(lists, num_targets, x.size(0))
            passed = _passed(lists, x if source is None else take(x.detach()), out, grad, num_targets)
            passed = passed if source is None else _Linear.apply(passed, add, take)
        else:
            share = ops.share_ties(indptr, source, x, out, grad.contiguous())
            if source is None:
                passed = ops.pass_ties_to_entries(indptr, x, out, share)
            else:
                by_source, target, _ = _placed_by_source(lists, x.size(0))
                passed = ops.pass_ties(by_source, target, x, out, share)
        return None, passed, None, None, None


def _passed(lists: EdgeLists, values: Tensor, out: Tensor, grad: Tensor, num_targets: int) -> Tensor:
    """Passes the gradient ``grad`` of the extremes ``out`` back to the edges' ``values``. Returns [E', ...], differentiable in ``grad``."""
    with torch.no_grad():
        is_extreme = (values == take_targets(lists, out, num_targets)).to(values.dtype)
        ties = reduce_edges(lists, is_extreme, num_targets, "sum")
        # torch's scatter_reduce counts the zero that it begins with as a tie, also if the result leaves it out.
        ties += out == 0
        share = is_extreme / take_targets(lists, ties, num_targets).clamp_(min=1)
    return take_targets(lists, grad, num_targets) * share


class _Softmax(torch.autograd.Function):
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
            sums = reduce_edges(lists, product, num_targets, "sum")
            return None, product - out * take_targets(lists, sums, num_targets), None
        return None, ops.softmax_of_lists_backward(_indptr(lists, num_targets), out, grad.contiguous()), None


class _DotEdges(torch.autograd.Function):
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
            sums = _run(_Sum, lists, source_rows, grad, num_targets, False, False)
            grad_target = _padded(sums, target_rows.size(0))
        if ctx.needs_input_grad[2]:
            grad_source = _run(_Sum, lists, target_rows[:num_targets], grad, source_rows.size(0), False, True)
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
        ctx.given = lists, num_targets, negative_slope
        ctx.save_for_backward(target_rows, source_rows, att)
        rows = target_rows.contiguous(), source_rows.contiguous(), att.contiguous()
        return ops.additive_scores(_indptr(lists, num_targets), lists.source, *rows, negative_slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lists, num_targets, slope = ctx.given
        if torch.is_grad_enabled():  # the gradients are differentiated too
            # As views, none of the tensors is computed from another one.
            given = [each.view_as(each) for each in ctx.saved_tensors]
            wanted = [each for each in given if each.requires_grad]
            out = composed.additive_scores(lists, given[0], given[1], given[2], slope, num_targets)
            found = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, grad, create_graph=True)))
            return None, *(found.get(id(each)) for each in given), None, None
        target_rows, source_rows, att, grad = (each.contiguous() for each in (*ctx.saved_tensors, grad))
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


softmax_by_target, dot_edges, additive_scores = _Softmax.apply, _DotEdges.apply, _AdditiveScores.apply
