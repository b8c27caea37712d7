"""Provides the products of :mod:`salientpp.nn.products` with torch's own operations, for any device and dtype.

Shapes and arguments are the same as in that module, which checks them. Floats of 16 bits are added up in float32. A sum or mean of floats with at
most one weight per edge is a sparse matrix product, whose backward uses the edges grouped by source. Autograd differentiates all other products, which
store one value per edge and column.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from salientpp.sampling.edge_lists import EdgeLists


def reduce_sources(lists: EdgeLists, x: Tensor, num_targets: int, reduction: str, weight: Tensor | None) -> Tensor:
    per_head = weight is not None and weight.dim() == 2
    if reduction in ("max", "min") or per_head or not x.is_floating_point():
        messages = take_sources(lists, x, num_targets)
        if weight is not None:
            messages = _wide(messages) * weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim()))
        out = reduce_edges(lists, messages, num_targets, reduction)
        return out.to(x.dtype) if x.is_floating_point() else out
    wide = _wide(x)
    flat = wide.reshape(x.size(0), math.prod(x.shape[1:]))
    out = _SparseSum.apply(lists, flat, None if weight is None else weight.to(wide.dtype), num_targets)
    if reduction == "mean":
        out = out / _counts(lists, num_targets, out)
    return out.reshape(num_targets, *x.shape[1:]).to(x.dtype)


def take_sources(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    return x.index_select(0, lists.source[: lists.num_places(num_targets)])


def take_targets(lists: EdgeLists, x: Tensor, num_targets: int) -> Tensor:
    return x.index_select(0, lists.targets(num_targets))


def reduce_edges(lists: EdgeLists, values: Tensor, num_targets: int, reduction: str) -> Tensor:
    target, shape = lists.targets(num_targets), (num_targets, *values.shape[1:])
    if reduction in ("max", "min"):
        where = target.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
        return values.new_zeros(shape).scatter_reduce(0, where, values, f"a{reduction}", include_self=False)
    wide = _wide(values)
    out = wide.new_zeros(shape).index_add(0, target, wide)
    if reduction == "mean":
        out = out / _counts(lists, num_targets, out)
    return out.to(values.dtype) if values.is_floating_point() else out


def softmax_by_target(lists: EdgeLists, scores: Tensor, num_targets: int) -> Tensor:
    wide, target = _wide(scores), lists.targets(num_targets)
    most = reduce_edges(lists, wide.detach(), num_targets, "max")
    out = (wide - most.index_select(0, target)).exp()
    total = reduce_edges(lists, out, num_targets, "sum") + 1e-16
    return (out / total.index_select(0, target)).to(scores.dtype)


def dot_edges(lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, num_targets: int) -> Tensor:
    source, target = take_sources(lists, source_rows, num_targets), take_targets(lists, target_rows, num_targets)
    return (_wide(source) * _wide(target)).sum(-1).to(source_rows.dtype)


def additive_scores(
    lists: EdgeLists, target_rows: Tensor, source_rows: Tensor, att: Tensor, negative_slope: float, num_targets: int
) -> Tensor:
    source, target = take_sources(lists, source_rows, num_targets), take_targets(lists, target_rows, num_targets)
    joined = torch.nn.functional.leaky_relu(_wide(source) + _wide(target), negative_slope)
    return (joined * _wide(att)).sum(-1).to(source_rows.dtype)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _counts(lists: EdgeLists, num_targets: int, out: Tensor) -> Tensor:
    return lists.sizes(num_targets).clamp(min=1).reshape(-1, *[1] * (out.dim() - 1))


class _SparseSum(torch.autograd.Function):
    """Sums of rows [S', F] times weights [E'], computed as products of CSR matrices and rows."""

    @staticmethod
    def forward(ctx: Any, lists: EdgeLists, x: Tensor, weight: Tensor | None, num_targets: int) -> Tensor:
        ctx.lists, ctx.num_targets, ctx.num_sources = lists, num_targets, x.size(0)
        ctx.save_for_backward(x if weight is not None else None, weight)
        source = lists.source[: lists.num_places(num_targets)]
        values = x.new_ones(source.numel()) if weight is None else weight
        return _product(lists.indptr[: num_targets + 1], source, values, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        lists, num_targets, num_sources = ctx.lists, ctx.num_targets, ctx.num_sources
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # the gradient is differentiated too
                rows = take_targets(lists, grad, num_targets)
                rows = rows if weight is None else rows * weight.unsqueeze(-1)
                source = lists.source[: lists.num_places(num_targets)]
                grad_x = rows.new_zeros(num_sources, rows.size(1)).index_add(0, source, rows)
            else:
                indptr, target, place = _by_source(lists, num_targets, num_sources)
                values = grad.new_ones(target.numel()) if weight is None else weight.index_select(0, place)
                grad_x = _product(indptr, target, values, grad.contiguous())
        if ctx.needs_input_grad[2]:
            rows = take_sources(lists, x, num_targets)
            grad_weight = (rows * take_targets(lists, grad, num_targets)).sum(-1)
        return None, grad_x, grad_weight, None


def _by_source(lists: EdgeLists, num_targets: int, num_sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups the edges into the first ``num_targets`` targets by source, for a backward. Returns the same three tensors as :attr:`EdgeLists.by_source`."""
    indptr, target, place = lists.by_source
    if (num_targets, num_sources) == (lists.num_targets, lists.num_sources):
        return indptr, target, place
    kept, number = target < num_targets, lists.num_places(num_targets)
    before = torch.zeros(kept.numel() + 1, dtype=torch.int64, device=kept.device)
    torch.cumsum(kept, 0, out=before[1:])
    # A mask would make the host wait for the number of kept edges, which it knows. The others are written to one place at the end, which is cut off.
    to = torch.where(kept, before[:-1], number)
    target, place = (array.new_empty(number + 1).scatter_(0, to, array)[:number] for array in (target, place))
    # The kept edges use only the first sources, so the lists end there.
    return before[indptr[: num_sources + 1]], target, place


def _product(indptr: Tensor, index: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    return multiplied(csr(indptr, index.long(), values, (indptr.numel() - 1, rows.size(0))), rows)


def csr(indptr: Tensor, index: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns a CSR matrix on the device of its ``values``. ``indptr`` and ``index`` are not checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSR is in beta
        return torch.sparse_csr_tensor(indptr, index, values, shape, check_invariants=False, device=values.device)


def multiplied(matrix: Tensor, rows: Tensor) -> Tensor:
    """Returns ``matrix @ rows`` for a CSR matrix, also if either is empty. Rows are converted to the matrix's dtype."""
    if not matrix.values().numel() or not rows.numel():
        return rows.new_zeros((matrix.size(0), rows.size(1)), dtype=matrix.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return matrix @ rows.to(matrix.dtype)
