"""PyG's quantile aggregation, corrected for targets without edges.

For a target without edges, ``QuantileAggregation`` (and so ``aggr="median"``) reads an entry before the target's place. This read fails if the first
targets have no edges, or if there are fewer than two edges. Whole graphs are rarely like this, but batches and parts often are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn.aggr import QuantileAggregation


def corrected(module: torch.nn.Module) -> Callable[..., Tensor] | None:
    """Returns the function to call instead of ``module.forward``; None if ``module`` needs no correction."""
    if isinstance(module, QuantileAggregation) and type(module).forward is QuantileAggregation.forward:
        return functools.partial(_aggregate, module)
    return None


def _aggregate(
    module: QuantileAggregation,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
) -> Tensor:
    forward = functools.partial(QuantileAggregation.forward, module)
    if index is None or (index.numel() > 1 and int(index.min()) == 0):
        return forward(x, index, ptr, dim_size, dim)
    # Put a target with two edges before all others, and drop its quantile afterwards.
    shape = [*x.shape]
    shape[dim] = 2
    x = torch.cat([x.new_zeros(shape), x], dim)
    index = torch.cat([index.new_zeros(2), index + 1])
    out = forward(x, index, None, None if dim_size is None else dim_size + 1, dim)
    return out.narrow(dim, 1, out.size(dim) - 1)
