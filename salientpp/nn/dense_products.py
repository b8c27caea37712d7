"""Adds up products of rows with the weights of linear maps, and computes them with the faster of the two libraries that torch has for CPUs.

torch multiplies matrices of float32 with MKL, which does not use AVX-512 on CPUs of AMD. It computes convolutions with oneDNN, which does, and a product of
rows with weights is a convolution with kernels of one pixel.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of a product [T, F] and weights [C, F].
Factors = tuple[Tensor, Tensor]

#: Number of multiplications from which a convolution saves more time than its call takes.
_LEAST = 1 << 27


def add_products(bias: Tensor | None, *factors: Factors) -> Tensor:
    """Returns the sum of ``rows @ weight.t()`` over all ``factors``, plus ``bias`` [C]: [T, C], without a table for each product."""
    if all(_is_faster_as_convolution(*each) for each in factors):
        return _Products.apply(bias, *(each for pair in factors for each in pair))
    (rows, weight), *others = factors
    out = F.linear(rows, weight, bias)
    for rows, weight in others:
        out = out.addmm_(rows, weight.t())
    return out


@functools.cache
def _has_faster_convolutions() -> bool:
    """True if oneDNN uses wider vectors on this CPU than MKL."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _is_faster_as_convolution(rows: Tensor, weight: Tensor) -> bool:
    if rows.dim() != 2 or rows.size(0) * weight.numel() < _LEAST or torch.get_num_threads() == 1:
        return False  # with one thread, torch does not use oneDNN
    if not _has_faster_convolutions() or not rows.is_contiguous() or not weight.is_contiguous():
        return False
    if any(each.dtype != torch.float32 or each.device.type != "cpu" for each in (rows, weight)):
        return False
    # The user may allow fewer bits in one of the two.
    library: Any = torch.backends.mkldnn
    precisions = {each.fp32_precision for each in (library.conv, library.matmul)}
    return bool(library.enabled) and (len(precisions) == 1 or precisions == {"none", "ieee"})  # "none" is "ieee" too


def _convolution(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``rows @ weight.t() + bias``. The rows are the pixels of one image, with a channel for each column."""
    image = rows.view(1, rows.size(0), 1, rows.size(1)).permute(0, 3, 1, 2)
    out = F.conv2d(image, weight.reshape(*weight.shape, 1, 1), bias)
    return out.permute(0, 2, 3, 1).reshape(rows.size(0), weight.size(0))


class _Products(torch.autograd.Function):
    """:func:`add_products` by convolutions. Gradients of weights stay products of matrices: as convolutions they were not faster in every call."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, *factors: Tensor) -> Tensor:
        needs = ctx.needs_input_grad[1:]
        # The gradient of the rows needs the weights, and that of the weights needs the rows.
        ctx.save_for_backward(*(each if needs[number ^ 1] else None for number, each in enumerate(factors)))
        out = _convolution(factors[0], factors[1], bias)
        for rows, weight in zip(factors[2::2], factors[3::2], strict=True):
            out += _convolution(rows, weight)
        # A view of the convolution's image could not be written to by the model.
        return out.new_empty(0).set_(out.untyped_storage(), 0, out.shape, out.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        found = [grad.sum(0) if ctx.needs_input_grad[0] else None]
        saved = ctx.saved_tensors  # each access unpacks all of them, and a checkpoint refuses a second one
        for number, needed in enumerate(ctx.needs_input_grad[1:]):
            other = saved[number ^ 1]
            if not needed:
                found.append(None)
            elif number % 2:
                found.append(grad.t() @ other)
            else:
                found.append(_convolution(grad, other.t()))
        return tuple(found)
