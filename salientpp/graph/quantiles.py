"""PyG's quantile aggregation, corrected for targets without edges.

``QuantileAggregation`` (and so ``aggr="median"``) looks for the quantile of a target without edges in front of the target's place. That fails where the
first targets have no edges, or where there are no two edges. A whole graph hardly ever looks so, but batches and parts of it do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn.aggr import QuantileAggregation


def corrected(module: torch.nn.Module) -> Callable[..., Tensor] | None:
    """What to call in the place of ``module.forward``; None: ``module`` needs no correction."""
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
    # A target with two edges goes in front of all others, and its quantile is taken off again.
    shape = [*x.shape]
    shape[dim] = 2
    x = torch.cat([x.new_zeros(shape), x], dim)
    index = torch.cat([index.new_zeros(2), index + 1])
    out = forward(x, index, None, None if dim_size is None else dim_size + 1, dim)
    return out.narrow(dim, 1, out.size(dim) - 1)
