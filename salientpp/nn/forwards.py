"""Forward passes of three PyG layers, reordered so that they cost less if sources outnumber targets. Results equal PyG's up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from salientpp.nn.dense_products import add_products
from salientpp.nn.unchanged import is_plain


def _is_autocast(x: Tensor) -> bool:
    """Returns True under autocast. Reordered products then give other results, because torch rounds each to 16 bits."""
    return torch.is_autocast_enabled(x.device.type)


def has_plain_map(conv: Any, x: Tensor) -> bool:
    """Returns True if :func:`gcn` can replace the forward of a GCNConv, or :func:`gat` that of a GATConv without edge attributes."""
    return is_plain(conv.lin) and conv.lin.bias is None and not _is_autocast(x)


def gcn(conv: Any, x: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes GCNConv with the linear map after the sums, (A x) W instead of A (x W). This is cheaper because targets are fewer than sources.

    Args:
        x: [S, F].
        sums: function that adds up rows of sources [S, F] to rows of targets [T, F].
    """
    return add_products(conv.bias, (sums(x), conv.lin.weight))


def can_add_in_place(conv: Any, x: tuple[Tensor, Tensor]) -> bool:
    """Returns True if :func:`sage` can replace the forward of a SAGEConv."""
    if not conv.root_weight or conv.project:
        return False
    right = conv.lin_r
    return is_plain(conv.lin_l) and is_plain(right) and right.bias is None and not _is_autocast(x[0])


def sage(conv: Any, x: tuple[Tensor, Tensor], means: Callable[[tuple[Tensor, Tensor]], Tensor]) -> Tensor:
    """Computes SAGEConv without a table for the sum of its two products.

    Args:
        x: rows of sources [S, F] and of targets [T, F'].
        means: function from ``x`` to the means of the sources' rows for each target, [T, F].
    """
    out = add_products(conv.lin_l.bias, (means(x), conv.lin_l.weight), (x[1], conv.lin_r.weight))
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def gat(conv: Any, x: tuple[Tensor, Tensor], attend: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]) -> Tensor:
    """Computes GATConv with scores from its inputs, x (W a) instead of (x W) a. Targets then need no product with W.

    Args:
        x: rows of sources [S, F] and of targets [T, F].
        attend: function of rows of sources [S, H, C] and of a pair, scores of sources [S, H] and of targets [T, H]. It returns rows of targets [T, H, C].
    """
    heads, columns = conv.heads, conv.out_channels
    weight = conv.lin.weight.view(heads, columns, -1)
    by_source, by_target = ((weight * att.view(heads, columns, 1)).sum(1).t() for att in (conv.att_src, conv.att_dst))
    rows = add_products(None, (x[0], conv.lin.weight)).view(-1, heads, columns)
    out = attend(rows, (x[0] @ by_source, x[1] @ by_target))
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(x[1])
    return out if conv.bias is None else out + conv.bias
