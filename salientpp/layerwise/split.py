"""Layers as three steps: rows that sources send, sums of these rows, and rows of the targets.

A layer of PyG whose aggregation is a sum or a mean splits into

    m_s = message(x_s),    a_t = sum over the edges (s, t) of m_s,    out_t = finish(x_t, a_t).

The sums may be added up source by source, in any order. So the rows of sources can be read once, in the order of the file. A layer that divides by
degrees, GCNConv, multiplies m_s by 1 / sqrt(d_s) and a_t by 1 / sqrt(d_t) (Kipf and Welling, 2017). No edge then needs a weight of its own.

A trial compares the three steps with the layer itself. Layers with edge weights, hooks or code of the user's are not split.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp import ops
from salientpp.layerwise.normalisation import Kind, Normalisation, kind_of, normalises
from salientpp.nn.layers import layer_of, linear_form, pair_of
from salientpp.nn.unchanged import change_inside, change_of, is_plain

#: Dtypes of rows that are added up without rounding between two blocks of sources.
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Split:
    """A layer in three steps.

    Attributes:
        conv: the layer without normalisation.
        before, after: as in :class:`~salientpp.layerwise.layers.Layer`.
        pairs: ``conv`` gets two tensors, the rows of sources and of targets.
        is_mean: sums are divided by the number of edges into the target.
        kind: the kind of degrees that the layer divides by; None: it divides by none.
        sums_first: ``conv`` is applied to the sums. If False, its linear map is applied to the rows of sources before these are summed.
        projection: a linear map without a bias, applied to rows of sources before they are sent. ``conv`` then lacks this map. None: there is none.
    """

    conv: MessagePassing
    before: Sequence[Callable[[Tensor], Tensor]]
    after: Sequence[Callable[[Tensor], Tensor]]
    pairs: bool
    is_mean: bool
    kind: Kind | None
    sums_first: bool
    projection: Callable[[Tensor], Tensor] | None = None

    @property
    def sends_messages(self) -> bool:
        """True if the owners of sources compute the messages and send them, False if they send rows and the receiver computes the messages."""
        return self.projection is not None or not (self.pairs or self.sums_first)

    def keeps(self, x: Tensor) -> bool:
        """True if the messages of sources, before any division by degrees, are simply their rows ``x`` [n, ...]."""
        return (
            not self.before
            and self.projection is None
            and (self.sums_first or self.messages(x[:1]).data_ptr() == x.data_ptr())
        )

    def messages(self, x: Tensor) -> Tensor:
        """Returns the rows [n, ...] that sources with the rows ``x`` [n, ...] send, before they are divided by degrees."""
        x = self._prepared(x)
        if self.projection is not None:
            return self.projection(x)
        if self.sums_first:
            return x
        sent: list[Tensor] = []

        def propagate(_: Any, **given: Any) -> Tensor:
            sent.append(pair_of(given["x"])[0])
            raise _Enough

        try:
            self._called(propagate, (x, x[:0]) if self.pairs else x)
        except _Enough:
            return sent[0]
        raise TypeError(f"{type(self.conv).__name__} must call propagate()")

    def finish(self, x: Tensor, sums: Tensor) -> Tensor:
        """Returns the next rows [n, ...] of targets with the rows ``x`` [n, ...] and the sums [n, ...]. It may write to ``sums``."""
        if self.sums_first:
            rows = self._called(lambda _, **given: given["x"], sums)
        else:
            x = self._prepared(x)
            rows = self._called(lambda _, **given: sums, (x, x) if self.pairs else x)
        for function in self.after:
            rows = function(rows)
        return rows

    def _prepared(self, x: Tensor) -> Tensor:
        if self.before:
            x = x.clone()  # functions may work in place
        for function in self.before:
            x = function(x)
        return x

    def _called(self, propagate: Callable[..., Tensor], x: Any) -> Tensor:
        conv: Any = copy.copy(self.conv)  # shares the parameters
        vars(conv)["propagate"] = propagate
        return conv(x, torch.empty((2, 0), dtype=torch.int64, device="cpu"))


class _Enough(Exception):
    """Raised inside a layer's forward to end it, once the layer's messages are known."""


def forms_of(layer: Any, num_columns: int, has_weights: bool) -> list[Split]:
    """Proposes splits of a layer into three steps, the cheapest first. The caller must try whether they give the layer's rows.

    Args:
        layer: a :class:`~salientpp.layerwise.layers.Layer`.
        num_columns: number of columns of the layer's input. If the output has fewer, a linear map is applied before the sums.
        has_weights: edges have weights or attributes that the layer takes.
    """
    conv = layer.conv
    if has_weights or not isinstance(conv, MessagePassing) or layer_of(conv) is None or _has_hooks(conv):
        return []
    if change_of(conv) is not None or change_inside(conv) is not None:
        return []
    form = linear_form(conv)
    if form is None or form[1] not in ("sum", "mean"):
        return []
    kind = kind_of(conv, False) if normalises(conv) else None
    if kind is not None:
        if form[1] != "sum":
            return []
        conv = copy.copy(conv)
        conv.normalize = False
    orders = [False]
    linear = getattr(conv, "lin", None)
    if not layer.pairs and (linear is None or is_plain(linear)):
        orders = [True, False] if num_columns <= getattr(conv, "out_channels", num_columns) else [False, True]
    forms = [Split(conv, layer.before, layer.after, layer.pairs, form[1] == "mean", kind, order) for order in orders]
    return [*_projected(forms, num_columns), *forms]


def _projected(forms: Sequence[Split], num_columns: int) -> list[Split]:
    """Makes a split whose sources send W x instead of x, which has fewer columns. It is equal, since W (sum of x_s) = sum of (W x_s).

    W is a linear map that the layer applies to sums. The result is empty if the layer has no such map, or if W x has as many columns as x or more.
    """
    split = forms[0]
    name = _LINEAR.get(type(split.conv).__name__)
    linear: Any = getattr(split.conv, name) if name is not None else None
    if not is_plain(linear) or linear.weight.size(0) >= num_columns:
        return []
    if getattr(split.conv, "project", False):
        return []
    conv = copy.copy(split.conv)
    vars(conv)["_modules"] = {**vars(conv)["_modules"], name: _Bias(linear.bias)}
    return [dataclasses.replace(split, conv=conv, projection=functools.partial(F.linear, weight=linear.weight))]


#: Layers that apply a linear map to the sums -> its name.
_LINEAR = {"SAGEConv": "lin_l", "GraphConv": "lin_rel"}


class _Bias(torch.nn.Module):
    """Adds only the bias of a linear map, whose product is computed elsewhere."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias


def _has_hooks(conv: torch.nn.Module) -> bool:
    return any(hooks for name, hooks in vars(conv).items() if name.endswith("_hooks")) or "forward" in vars(conv)


def on_graph(split: Split, x: Tensor, indptr: Tensor, indices: Tensor, normalisation: Normalisation) -> Tensor:
    """Computes the next rows of all vertices of a small graph from their rows ``x`` [n, ...]."""
    messages, roots = split.messages(x), None
    if split.kind is not None:
        roots = normalisation.roots(split.kind, normalisation.halo)
        messages = scaled(messages, roots)
    sums = ops.sum_listed_rows(indptr, indices, None, messages, None)
    every = torch.arange(x.size(0), device="cpu")
    return split.finish(x, completed(split, sums, messages, every, indptr, indices, roots))


def completed(
    split: Split,
    sums: Tensor,
    messages: Tensor | None,
    place: Tensor,
    indptr: Tensor,
    indices: Tensor,
    roots: Tensor | None,
) -> Tensor:
    """Turns sums [n, ...] of targets, in place, into what the layer aggregates: adds self-loops, divides by numbers of edges or by degrees.

    Args:
        messages: rows [n, ...] that the targets themselves send, divided by degrees; None if ``split`` adds no self-loops.
        place: int64 [n], places of the targets among the sources.
        indptr: int64 [n + 1], the targets' lists in ``indices``, which holds places of sources.
        roots: 1 / sqrt(degree) of the vertex at each place; None if ``split`` does not divide by degrees.
    """
    if split.is_mean:
        counts = (indptr[1:] - indptr[:-1]).clamp_(min=1).to(sums.dtype)
        sums.div_(counts.view(-1, *[1] * (sums.dim() - 1)))
    if split.kind is None or roots is None:
        return sums
    if split.kind.adds_loops:
        assert messages is not None
        target = torch.repeat_interleave(torch.arange(place.numel(), device="cpu"), indptr[1:] - indptr[:-1])
        is_loop = indices[int(indptr[0]) : int(indptr[-1])] == place[target]
        found = torch.bincount(target[is_loop], minlength=place.numel())
        missing = (1 - found).to(sums.dtype)  # a vertex has one loop, however many the graph has
        sums.addcmul_(messages, missing.view(-1, *[1] * (sums.dim() - 1)))
    return sums.mul_(roots[place].to(sums.dtype).view(-1, *[1] * (sums.dim() - 1)))


def scaled(messages: Tensor, roots: Tensor) -> Tensor:
    """Returns messages [n, ...] times ``roots`` [n], as a new tensor."""
    return messages * roots.to(messages.dtype).view(-1, *[1] * (messages.dim() - 1))


def can_add(rows: Tensor) -> bool:
    """Returns True if rows of this dtype and device can be added up by the kernel without rounding between blocks."""
    return rows.dtype in _DTYPES and rows.device.type == "cpu" and rows.dim() >= 2
