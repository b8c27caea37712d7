"""How does a layer of PyG's add sums that other machines have made to those that it makes itself?

A loader with ``partial_aggregation`` leaves neighbours out of its batches and gives their sums, means or maxima instead. The model stays as it is; one call of
:func:`merge_partial` on its first layer makes that layer add them where it aggregates. What it gives, and its gradients, are those of the whole batch,
up to rounding.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

#: Layers whose messages are the rows of their sources, times an edge's weight if there is one.
_LINEAR = (SAGEConv, GINConv, GraphConv, GCNConv, MessagePassing)

#: Which of the loader's reductions an aggregation can go on with.
_REDUCTIONS: dict[type, tuple[str, ...]] = {
    SumAggregation: ("sum", "mean"),
    MeanAggregation: ("sum", "mean"),
    MaxAggregation: ("max",),
}

_WHY_NOT = {
    "LSTMAggregation": "which depends on the order of the messages",
    "GRUAggregation": "which depends on the order of the messages",
    "StdAggregation": "which needs squares, and those were not summed",
    "VarAggregation": "which needs squares, and those were not summed",
    "SoftmaxAggregation": "which weighs each message by all others",
    "MultiAggregation": "and one reduction cannot stand for several",
}


class PartialMerge:
    """What :func:`merge_partial` gives; nobody need keep it.

    Args:
        conv: the layer.
    """

    def __init__(self, conv: MessagePassing) -> None:
        self._name = type(conv).__name__
        _check(conv, self._name)
        self._takes_weight = "edge_weight" in inspect.signature(type(conv).message).parameters
        self._linear: Callable[[Tensor], Tensor] | None = conv.lin if isinstance(conv, GCNConv) else None
        self._given: Any = None  # a batch for the next call
        self._paused = False
        self._partial: Any = None  # of the call under way
        self._x: Tensor | None = None
        # What rows in the sums were multiplied by, and its version.
        self._weight: tuple[Tensor, int] | None = None
        self._merged = False
        self._handles = [
            conv.register_forward_pre_hook(self._begin, with_kwargs=True),
            conv.register_forward_hook(self._end, always_call=True),
            conv.register_propagate_forward_pre_hook(self._check_messages),
            conv.register_aggregate_forward_hook(self._merge),
        ]

    def give(self, batch: Any) -> None:
        """Name the batch of the layer's next call, where its ``edge_index`` is no longer the very tensor that the loader gave, as after ``batch.to(...)``."""
        self._given = batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this the layer takes whole graphs and batches of other loaders."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remove(self) -> None:
        """Leave the layer as it was."""
        for handle in self._handles:
            handle.remove()

    # --- hooks --------------------------------------------------------------------------------------------

    def _begin(self, conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._partial, self._merged, given, self._given = None, False, self._given, None
        if self._paused:
            return
        edge_index = args[1] if len(args) > 1 else kwargs.get("edge_index")
        x = args[0] if args else kwargs.get("x")
        x = x[0] if isinstance(x, (tuple, list)) else x
        if given is not None:
            partial, weight = getattr(given, "partial", None), None
            rows: Any = (given.x, given.x._version)
            if partial is not None and partial.weight is not None:
                weight = (given[partial.weight], given[partial.weight]._version)
        else:
            partial, rows, weight = getattr(edge_index, "salientpp_partial", (None, None, None))
        if partial is None:
            raise RuntimeError(
                f"{self._name} merges partial sums, and was given edges that no loader with partial_aggregation gave, or a copy of such; after batch.to(...) "
                "call give(batch) on what merge_partial returned, and for whole graphs and other loaders use its paused()"
            )
        if x is None or not _is(x, rows):
            raise RuntimeError(
                f"{self._name} merges partial sums of the batch's x, and was given another x: whatever is done to x before the first layer (dropout, scaling) "
                "is not done to the rows in the sums; do it to the stored rows, or leave partial_aggregation out"
            )
        served = _REDUCTIONS[type(conv.aggr_module)]
        if partial.reduction not in served:
            raise ValueError(
                f"{self._name} aggregates with {type(conv.aggr_module).__name__}, which goes on with partial_aggregation={' or '.join(map(repr, served))}, "
                f"got {partial.reduction!r}"
            )
        self._partial, self._x, self._weight = partial, x, weight

    def _check_messages(self, conv: MessagePassing, inputs: tuple[Any, Any, dict[str, Any]]) -> None:
        if self._partial is None:
            return
        x = inputs[2].get("x")
        x = x[0] if isinstance(x, (tuple, list)) else x
        if self._linear is None and x is not self._x:
            raise ValueError(
                f"{self._name} sends other rows than the x it is given, and a sum of rows cannot stand for those; leave partial_aggregation out"
            )
        weight = inputs[2].get("edge_weight") if self._takes_weight else None
        if self._weight is None:
            if weight is not None:
                raise ValueError(
                    f"{self._name} was given edge_weight, and partial sums are without weights; pass the loader partial_weight=, the name of these weights, or "
                    "leave edge_weight out"
                )
            return
        name = self._partial.weight
        if weight is None:
            why = "was given none" if self._takes_weight else "takes none"
            raise ValueError(
                f"{self._name} {why} of the edge_weight that rows in the sums were multiplied by; pass batch.{name}, or leave the loader's partial_weight out"
            )
        if weight.requires_grad:
            raise ValueError(
                f"{self._name} was given an edge_weight that requires a gradient, and none reaches the weights of edges that sums have replaced; detach it, or "
                "leave the loader's partial_aggregation out"
            )
        if not _is(weight, self._weight):
            raise RuntimeError(
                f"{self._name} merges sums of rows times the batch's {name}, and was given another edge_weight: what is done to weights is not done to those "
                "in the sums; do it to the stored ones, or leave partial_aggregation out"
            )

    def _merge(self, conv: MessagePassing, inputs: tuple[dict[str, Any]], out: Tensor) -> Tensor | None:
        partial = self._partial
        if partial is None:
            return None
        self._merged = True
        if not partial.target.numel():
            return None
        value = partial.value if self._linear is None else self._linear(partial.value)
        merge = _MERGES[type(conv.aggr_module)]
        return merge(out, inputs[0]["index"], partial.target, value.to(out.dtype), partial.count, partial.reduction)

    def _end(self, conv: MessagePassing, args: tuple[Any, ...], out: Any) -> None:
        was, self._partial, self._x, self._weight = self._partial, None, None, None
        # Where the layer raised there is no output, and nothing to say.
        if was is not None and out is not None and not self._merged:
            raise RuntimeError(
                f"{self._name} did not aggregate by PyG's aggregate(), where partial sums are merged; pass edge_index as a plain tensor"
            )


def merge_partial(conv: MessagePassing) -> PartialMerge:
    """Let a layer add the partial sums of its batches, ``batch.partial``, to what it aggregates.

    Call it once, on the first layer of a model with at most as many layers as ``num_neighbors`` has hops, for batches of a
    :class:`~salientpp.NeighborLoader` with ``partial_aggregation``. The layer finds the sums by the ``edge_index`` of the batch, which it must be given as it
    is, with ``x`` as it is. With the loader's ``partial_weight="w"`` a layer that takes ``edge_weight`` must be given ``batch.w``, as it is too; it gets no
    gradient. Later layers need no call: what they give for vertices that sums belong to is not what the whole batch would, and does not
    reach the seeds.

    Args:
        conv: a :class:`~torch_geometric.nn.SAGEConv` (mean, sum, max), :class:`~torch_geometric.nn.GINConv`, :class:`~torch_geometric.nn.GraphConv`,
            :class:`~torch_geometric.nn.GCNConv` with ``normalize=False``, or a ``MessagePassing`` of yours whose messages are the rows of ``x``.

    Raises:
        ValueError: sums cannot stand for what this layer does with its messages, and why.
    """
    return PartialMerge(conv)


def _is(value: Tensor, given: tuple[Tensor, int]) -> bool:
    """Whether this is that tensor, not written to since; a column may stand for a vector."""
    tensor, version = given
    is_there = value.data_ptr() == tensor.data_ptr() and value.dtype == tensor.dtype and value._version == version
    return is_there and value.shape[:1] == tensor.shape[:1] and value.numel() == tensor.numel()


def _check(conv: Any, name: str) -> None:
    if not isinstance(conv, MessagePassing):
        raise ValueError(f"merge_partial takes a layer of PyG's MessagePassing, the model's first, got {name}")
    own = next((known for known in _LINEAR if type(conv).message is known.message), None)
    if own is None:
        why = "weighs them by attention" if hasattr(conv, "heads") else "has a message() of its own"
        raise ValueError(
            f"merge_partial: {name} {why}, so its messages are not known to be the rows of their sources, and a sum of rows cannot stand for them"
        )
    if getattr(conv, "project", False):
        raise ValueError(
            f"merge_partial: {name} with project=True sends relu(lin(x_j)), which is not linear in x_j; make it without project"
        )
    if own is GCNConv and not (isinstance(conv, GCNConv) and type(conv).forward is GCNConv.forward):
        raise ValueError(f"merge_partial: {name} sends messages as a GCNConv does, and has a forward() of its own")
    if own is GCNConv and conv.normalize:
        raise ValueError(
            f"merge_partial: {name} normalises by the degrees of the batch, of which sums have no edges; make it with normalize=False"
        )
    aggregation = type(conv.aggr_module)
    if aggregation not in _REDUCTIONS or type(conv).aggregate is not MessagePassing.aggregate:
        kind = aggregation.__name__ if aggregation not in _REDUCTIONS else "an aggregate() of its own"
        raise ValueError(
            f"merge_partial: {name} aggregates with {kind}, {_WHY_NOT.get(kind, 'which is no plain sum, mean or maximum')}"
        )
    if own is GCNConv and aggregation is MaxAggregation:
        raise ValueError(
            f"merge_partial: {name} takes the maximum of lin(x_j), which does not follow from that of x_j; use a sum or mean"
        )
    if conv.flow != "source_to_target" or conv.decomposed_layers != 1 or conv.node_dim not in (-2, 0):
        raise ValueError(
            f"merge_partial: {name} must have flow='source_to_target', decomposed_layers=1 and node_dim=-2, got {conv.flow!r}, "
            f"{conv.decomposed_layers} and {conv.node_dim}"
        )


# --- out [n, F] of the batch's own edges, into index [e]; the others' value [m, F] of count [m] neighbours of target [m] ----


def _sums(value: Tensor, count: Tensor, reduction: str) -> Tensor:
    return value if reduction == "sum" else value * count.to(value.dtype).unsqueeze(-1)


def _merge_sum(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    return out.index_add(0, target, _sums(value, count, reduction))


def _merge_mean(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    own, others = torch.zeros(2, out.size(0), 1, dtype=wide, device=out.device)
    own.index_add_(0, index, own.new_ones(index.numel(), 1))
    others.index_add_(0, target, count.to(wide).unsqueeze(-1))
    total = (own + others).clamp_(min=1)
    # A vertex without sums keeps its mean to the last bit.
    kept = torch.where(others > 0, own / total, 1).to(out.dtype)
    share = (count.to(wide).unsqueeze(-1) if reduction == "mean" else 1) / total[target]
    return (out * kept).index_add(0, target, value * share.to(out.dtype))


def _merge_max(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    # Where nothing was aggregated PyG has zeros.
    empty = torch.ones(out.size(0), 1, dtype=torch.bool, device=out.device).index_fill_(0, index, False)
    summed = torch.zeros_like(empty).index_fill_(0, target, True)
    least = out.masked_fill(empty & summed, -torch.inf)
    return least.scatter_reduce(0, target.unsqueeze(-1).expand_as(value), value, "amax")


_MERGES: dict[type, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]] = {
    SumAggregation: _merge_sum,
    MeanAggregation: _merge_mean,
    MaxAggregation: _merge_max,
}
