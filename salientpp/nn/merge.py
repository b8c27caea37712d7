"""PyG layers that add sums from other machines to their own aggregation.

A loader with ``partial_aggregation`` leaves neighbours out of its batches and gives their sums, means or maxima instead. :func:`merge_partial` makes the first
layers of a model add them when they aggregate. Outputs and gradients equal those of the whole batch, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from salientpp.nn.layers import EDGE_ATTENTION, LINEAR_MESSAGES, ORDERED_AGGREGATIONS, remove_hooks
from salientpp.nn.merge_check import check_model
from salientpp.nn.unchanged import HOOKS, change_of, is_plain
from salientpp.suggestions import suggest_arguments
from salientpp.ways.sums.marked import (
    EDGE_WEIGHTS,
    EDGES,
    ROWS,
    Delivered,
    Marked,
    leave_to_python,
    mark,
    marked_in,
    unmarked,
)

#: Reductions of the loader that an aggregation can continue.
_REDUCTIONS: dict[type, tuple[str, ...]] = {
    SumAggregation: ("sum", "mean"),
    MeanAggregation: ("sum", "mean"),
    MaxAggregation: ("max",),
}

#: Aggregation -> reason why it cannot continue a sum.
_WHY_NOT = {
    **dict.fromkeys(ORDERED_AGGREGATIONS, "which depends on the order of the messages"),
    **dict.fromkeys(("StdAggregation", "VarAggregation"), "which needs sums of squares, and the batch has none"),
    "SoftmaxAggregation": "which weights each message by all others",
    "MultiAggregation": "and one reduction cannot replace several",
}

#: Attribute of a layer: the _Call of its running propagate().
_CALL = "_salientpp_call"
#: Attribute of a layer: the _Call of its running forward(), if this forward() was given plain tensors instead of marked ones.
_OPENED = "_salientpp_opened"
#: Attribute of a layer: True if its running forward() was given x as the loader gave it.
_HAS_X = "_salientpp_has_x"
#: Method of a layer that runs outside compiled code while the layer has marked arguments.
_PROPAGATE = "propagate"

_Inputs = tuple[Any, Any, dict[str, Any]]
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass
class _Call:
    """Tells a running ``propagate`` how to treat the sums of its batch.

    Attributes:
        delivered: the sums of the batch, and what they replace.
        level: number of layers from ``x`` to the rows that the call returns, this layer included.
        merges: True if the call belongs to a first layer.
        merged: True if the call has added the sums.
    """

    delivered: Delivered
    level: int
    merges: bool
    merged: bool = False


@suggest_arguments
def merge_partial(model: Model, *, check: bool = True) -> Model:
    """Lets a model train on batches with sums: its first layers add ``batch.partial`` to their aggregation.

    Call it on the whole model. It may be called again, and the model may be copied and pickled. The model takes batches of a
    :class:`~salientpp.NeighborLoader` with ``partial_aggregation``, and any other batch or graph as before. A first layer is one that is given ``batch.x``; a
    model can have several. If the loader's ``partial_aggregation`` has the weight "w", first layers must be given ``batch.w`` as ``edge_weight``. This
    weight gets no gradient.

    The outputs of the seeds, ``out[:batch.batch_size]``, and their gradients equal those of the whole batch. A model that would give other results raises at
    its first forward, or when it is checked. A check computes a smaller batch twice (:mod:`salientpp.nn.merge_check`). It runs at calls 1, 4, 16, 64, ..., and
    after a module or a plain attribute has changed. ``x``, ``edge_index`` and the weights of a batch refuse operations that would give wrong results.

    Args:
        model: a model with at most as many consecutive layers as ``num_neighbors`` has hops. First layers can be
            :class:`~torch_geometric.nn.SAGEConv` (mean, sum, max), :class:`~torch_geometric.nn.GINConv`, :class:`~torch_geometric.nn.GraphConv`,
            :class:`~torch_geometric.nn.GCNConv` with ``normalize=False``, or your own ``MessagePassing`` whose messages are the rows of ``x``.
        check: False turns the check off.

    Returns:
        The model.

    Raises:
        ValueError: no layer of the model can be a first layer; the message says why.
    """
    layers = [module for module in model.modules() if isinstance(module, MessagePassing)]
    if not layers:
        raise ValueError(f"merge_partial needs a model with layers of PyG's MessagePassing, got {type(model).__name__}")
    reasons = [_why_not(layer) for layer in layers]
    if all(reasons):
        raise ValueError(f"merge_partial: {reasons[0]}")
    leave_to_python()
    for layer in layers:
        if _before_propagate in layer._propagate_forward_pre_hooks.values():
            continue
        layer.register_forward_pre_hook(_before_forward, with_kwargs=True)
        layer.register_forward_hook(_after_forward, always_call=True)
        layer.register_propagate_forward_pre_hook(_before_propagate)
        layer.register_aggregate_forward_hook(_merge)
        layer.register_propagate_forward_hook(_after_propagate)
        for name in (_CALL, _OPENED, _HAS_X):
            setattr(layer, name, None)
    remove_hooks(model, [check_model])
    if check:
        model.register_forward_pre_hook(check_model, with_kwargs=True)
    return model


# --- hooks: module-level functions, so that copies of a layer keep them ----------------------------------------


def _before_forward(conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for name in (_CALL, _OPENED):
        setattr(conv, name, None)
    setattr(conv, _HAS_X, False)
    given = list(marked_in([args, kwargs]))
    return _open(conv, args, kwargs, given) if given else None


@torch.compiler.disable(
    reason="a batch with sums is computed outside compiled code; leave fullgraph=True or partial_aggregation out"
)
def _open(conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Marked]) -> Any:
    """Prepares a layer's forward() on a batch with sums.

    ``given`` are the arguments of the class :class:`Marked`, which tell that they belong to the batch. Returns all arguments as plain tensors if the
    layer needs them so, else None.
    """
    setattr(conv, _HAS_X, any(each.role == ROWS and each.level == 0 and each.is_given for each in given))
    if _PROPAGATE not in vars(conv):
        setattr(conv, _PROPAGATE, functools.partial(_run_eagerly, conv.propagate))
    edges = next((each for each in given if each.role == EDGES), None)
    # The forward of these layers works on each edge separately. It may add and remove loops, and gets plain tensors.
    if edges is None or type(conv).forward not in [known.forward for known in EDGE_ATTENTION]:
        return None
    named = dict(enumerate(args)) | kwargs
    setattr(conv, _OPENED, _call_on(conv, edges, named))
    return unmarked(args), unmarked(kwargs)


def _after_forward(conv: MessagePassing, args: Any, out: Any) -> Any:
    opened: _Call | None = getattr(conv, _OPENED, None)
    for name in (_CALL, _OPENED, _HAS_X):
        setattr(conv, name, None)
    if getattr(vars(conv).get(_PROPAGATE), "func", None) is _run_eagerly:
        delattr(conv, _PROPAGATE)
    # The output is None if the layer raised.
    return None if opened is None or out is None else _marked(conv, out, opened)


@torch.compiler.disable
def _run_eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function in Python even under torch.compile, because PyG calls no hooks in compiled code."""
    return function(*args, **kwargs)


def _before_propagate(conv: MessagePassing, inputs: _Inputs) -> _Inputs | None:
    edge_index, size, kwargs = inputs
    setattr(conv, _CALL, None)
    if not isinstance(edge_index, Marked):
        return None
    call = _call_on(conv, edge_index, kwargs)
    asked = conv.inspector.get_flat_param_names(["message", "aggregate", "update"])
    lacking = [name for name in asked if name.startswith(("edge_index", "adj_t"))]
    if lacking:
        raise ValueError(
            f"{type(conv).__name__} reads {lacking[0]} in its messages, but {lacking[0]} lacks the edges that sums replace; leave partial_aggregation out"
        )
    setattr(conv, _CALL, call)
    return edge_index.plain(), size, unmarked(kwargs)


def _call_on(conv: MessagePassing, edges: Marked, given: dict[Any, Any]) -> _Call:
    """Decides how a layer treats a batch's sums. Raises an error if its outputs at the seeds would be wrong."""
    name = type(conv).__name__
    _check_unchanged(conv)
    marked = list(marked_in(given))
    rows = [each for each in marked if each.role == ROWS]
    if not rows or any(each.delivered is not edges.delivered for each in marked):
        raise RuntimeError(
            f"{name} was given the edges of a batch with sums, but rows that are neither the batch's x nor computed from it. "
            "Such rows do not exist for the vertices that sums replace; leave the loader's partial_aggregation out"
        )
    sources = [each for each in marked_in([_source(value) for value in given.values()]) if each.role == ROWS]
    merges = any(each.level == 0 for each in sources)
    level = max([1, *(each.level + 1 for each in sources), *(each.level for each in rows)])
    if merges:
        _check_first(conv, edges, given)
    elif level > edges.delivered.hops:
        raise ValueError(
            f"{name} is layer {level} of a model, but the batch has sums of {edges.delivered.hops} hops; its outputs at the seeds need rows that sums "
            "replace; give num_neighbors as many hops as the model has layers, or leave partial_aggregation out"
        )
    if conv.flow != "source_to_target" or conv.decomposed_layers != 1:
        raise ValueError(
            f"{name} must have flow='source_to_target' and decomposed_layers=1 on batches with sums, got {conv.flow!r} and {conv.decomposed_layers}"
        )
    return _Call(edges.delivered, level, merges)


def _merge(conv: MessagePassing, inputs: tuple[dict[str, Any]], out: Tensor) -> Tensor | None:
    call: _Call | None = getattr(conv, _CALL, None)
    if call is None or not call.merges:
        return None
    call.merged, partial = True, call.delivered.partial
    if not partial.target.numel():
        return None
    value, target, count = (each.to(out.device) for each in (partial.value, partial.target, partial.count))
    if isinstance(conv, GCNConv):
        value = conv.lin(value)
    merge = _MERGES[type(conv.aggr_module)]
    return merge(out, inputs[0]["index"], target, value.to(out.dtype), count, partial.reduction)


def _after_propagate(conv: MessagePassing, inputs: _Inputs, out: Any) -> Any:
    call: _Call | None = getattr(conv, _CALL, None)
    if call is None:
        return None
    setattr(conv, _CALL, None)
    name = type(conv).__name__
    if call.merges and not call.merged:
        raise RuntimeError(
            f"{name} did not call PyG's aggregate(), where sums are merged; pass batch.edge_index to it unchanged"
        )
    return _marked(conv, out, call)


def _marked(conv: MessagePassing, out: Any, call: _Call) -> Marked:
    if not isinstance(out, Tensor) or not out.dim() or out.size(0) > call.delivered.num_nodes:
        raise RuntimeError(
            f"{type(conv).__name__} must return a tensor with a row for each vertex of a batch with sums, got {type(out).__name__}"
        )
    return mark(out, call.delivered, ROWS, call.level)


# --- checks -----------------------------------------------------------------------------------------------------


def _source(value: Any) -> Any:
    """Returns the rows of sources, given an argument that may be a pair (rows of sources, rows of targets)."""
    return value[0] if isinstance(value, (tuple, list)) and value else value


def _check_unchanged(conv: MessagePassing) -> None:
    own = (_before_propagate, _after_propagate, _merge)
    for name in HOOKS:
        if any(hook not in own for hook in getattr(conv, name).values()):
            raise RuntimeError(
                f"{type(conv).__name__} has a PyG hook ({name.strip('_')}) on a batch with sums, where the hook would see only some messages; remove it, "
                "or use batches without partial_aggregation"
            )
    if conv.explain:
        raise RuntimeError(
            f"{type(conv).__name__} has explain=True on a batch with sums, but no mask reaches the edges that sums replace; use batches without "
            "partial_aggregation"
        )
    if (changed := change_of(conv, with_hooks=False)) is not None:
        raise RuntimeError(
            f"{type(conv).__name__} {changed}, but on a batch with sums (partial_aggregation), changed code and hooks would see only some messages; undo the "
            "change, put the code into a subclass of the layer, or use batches without partial_aggregation"
        )


def _check_first(conv: MessagePassing, edges: Marked, kwargs: dict[str, Any]) -> None:
    name, partial = type(conv).__name__, edges.delivered.partial
    if why := _why_not(conv):
        raise ValueError(
            f"on a batch with sums, a layer that is given x must be able to merge sums; {why}; leave partial_aggregation out"
        )
    if not edges.is_given:
        raise RuntimeError(
            f"{name} merges sums, but was given an edge_index that was cut or written to; pass batch.edge_index to it unchanged"
        )
    x = _source(kwargs.get("x"))
    is_x = (
        isinstance(x, Marked)
        and x.level == 0
        and (getattr(conv, _HAS_X, False) if isinstance(conv, GCNConv) else x.is_given)
    )
    if not is_x:
        raise RuntimeError(
            f"{name} merges sums of the batch's x, but was given another x; a change before the first layer (dropout, scaling, another dtype) does not "
            "apply to the rows in the sums; change the stored rows, or leave partial_aggregation out"
        )
    if not isinstance(conv, GCNConv) and x.requires_grad:
        raise ValueError(
            f"{name} was given an x that requires a gradient, but the rows in sums would get no gradient; detach x, or leave partial_aggregation out"
        )
    served = _REDUCTIONS[type(conv.aggr_module)]
    if partial.reduction not in served:
        raise ValueError(
            f"{name} aggregates with {type(conv.aggr_module).__name__}, which needs partial_aggregation={' or '.join(map(repr, served))}, "
            f"got {partial.reduction!r}"
        )
    _check_weight(conv, name, partial.weight, kwargs)


def _check_weight(conv: MessagePassing, name: str, expected: str | None, kwargs: dict[str, Any]) -> None:
    takes = LINEAR_MESSAGES[type(conv).message].weight is not None
    weight = kwargs.get("edge_weight") if takes else None
    if expected is None:
        if weight is not None:
            raise ValueError(
                f"{name} was given edge_weight, but the partial sums have no weights; pass the name of the edge attribute to the loader "
                "as partial_aggregation={'weight': ...}, or leave edge_weight out"
            )
        return
    if weight is None:
        why = "was given no edge_weight" if takes else "takes no edge_weight"
        raise ValueError(
            f"{name} {why}, but rows in the sums were multiplied by batch.{expected}; pass batch.{expected} as edge_weight, or leave the loader's 'weight' out"
        )
    if weight.requires_grad:
        raise ValueError(
            f"{name} was given an edge_weight that requires a gradient, but the weights of edges that sums replace would get no gradient; detach edge_weight, "
            "or leave the loader's partial_aggregation out"
        )
    if not (isinstance(weight, Marked) and weight.role == EDGE_WEIGHTS and weight.is_given):
        raise RuntimeError(
            f"{name} merges sums that are weighted by the batch's {expected}, but was given another edge_weight; edge weights changed after loading do not "
            "apply to rows that arrived as sums; change the stored weights, or leave partial_aggregation out"
        )


def _why_not(conv: MessagePassing) -> str | None:
    """Returns the reason why a sum cannot replace this layer's messages; None if it can."""
    name = type(conv).__name__
    message = type(conv).message
    if message not in LINEAR_MESSAGES or not LINEAR_MESSAGES[message].merges:
        why = "weights its messages by attention" if hasattr(conv, "heads") else "has its own message()"
        return f"{name} {why}, so its messages are not known to be the rows of their sources, and a sum of rows cannot replace them"
    if getattr(conv, "project", False):
        return f"{name} with project=True sends relu(lin(x_j)), which is not linear in x_j; make it without project"
    if (changed := change_of(conv, with_hooks=False)) is not None:
        return f"{name} {changed}, so a sum of rows may not replace its messages"
    is_gcn = message is GCNConv.message
    if is_gcn and not (isinstance(conv, GCNConv) and type(conv).forward is GCNConv.forward):
        return f"{name} sends messages as a GCNConv does, but has its own forward()"
    if is_gcn and not (is_plain(conv.lin) and conv.lin.bias is None):
        return f"{name} has another lin than PyG's own map (a module of another class, a bias, a hook), to which sums of its inputs cannot be given"
    if is_gcn and conv.normalize:
        return f"{name} normalises by the degrees of the batch, which lacks the edges in sums; make it with normalize=False"
    aggregation = type(conv.aggr_module)
    if aggregation not in _REDUCTIONS or type(conv).aggregate is not MessagePassing.aggregate:
        kind = aggregation.__name__ if aggregation not in _REDUCTIONS else "its own aggregate()"
        return f"{name} aggregates with {kind}, {_WHY_NOT.get(kind, 'which is not a plain sum, mean or maximum')}"
    if is_gcn and aggregation is MaxAggregation:
        return f"{name} takes the maximum of lin(x_j), which does not follow from the maximum of x_j; use a sum or mean"
    if conv.flow != "source_to_target" or conv.decomposed_layers != 1 or conv.node_dim not in (-2, 0):
        return (
            f"{name} must have flow='source_to_target', decomposed_layers=1 and node_dim=-2, got {conv.flow!r}, "
            f"{conv.decomposed_layers} and {conv.node_dim}"
        )
    return None


# --- merges -----------------------------------------------------------------------------------------------------
#
# out [n, F] is the aggregate of the batch's own edges, whose targets are index [e]. value [m, F] is the aggregate of the other neighbours of the vertices
# target [m]. count [m] is the number of these neighbours.


def _merge_sum(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    return out.index_add(0, target, value if reduction == "sum" else value * count.to(value.dtype).unsqueeze(-1))


def _merge_mean(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    own, others = torch.zeros(2, out.size(0), 1, dtype=wide, device=out.device)
    own.index_add_(0, index, own.new_ones(index.numel(), 1))
    others.index_add_(0, target, count.to(wide).unsqueeze(-1))
    total = (own + others).clamp_(min=1)
    # This keeps the mean of a vertex without sums exactly as it is.
    kept = torch.where(others > 0, own / total, 1).to(out.dtype)
    share = (count.to(wide).unsqueeze(-1) if reduction == "mean" else 1) / total[target]
    return (out * kept).index_add(0, target, value * share.to(out.dtype))


def _merge_max(out: Tensor, index: Tensor, target: Tensor, value: Tensor, count: Tensor, reduction: str) -> Tensor:
    # PyG gives zeros if nothing was aggregated.
    empty = torch.ones(out.size(0), 1, dtype=torch.bool, device=out.device).index_fill_(0, index, False)
    summed = torch.zeros_like(empty).index_fill_(0, target, True)
    least = out.masked_fill(empty & summed, -torch.inf)
    return least.scatter_reduce(0, target.unsqueeze(-1).expand_as(value), value, "amax")


_MERGES: dict[type, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]] = {
    SumAggregation: _merge_sum,
    MeanAggregation: _merge_mean,
    MaxAggregation: _merge_max,
}
