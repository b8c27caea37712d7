"""Table of facts about PyG's layers, and functions that inspect a layer.

Full-graph training, layer-wise inference, ``merge_partial`` and trimming share them. :data:`LAYERS` says which rows and edges a layer of
``torch_geometric.nn.conv`` reads. ``tests/nn/test_layers.py`` checks each fact by experiment.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn.unchanged import change_of
from salientpp.nn.undo import note, undo_noted


@dataclass(frozen=True)
class Layer:
    """Facts about one class of message-passing layers. They hold for all options of its constructor except ``flow="target_to_source"``.

    They do not cover modules inside a layer that normalise over all rows, such as the ``BatchNorm`` in ``GENConv``. Below, all edges into the first n
    vertices come from the first m vertices, and ``x`` has a row for each vertex.

    Attributes:
        linear: a message is the row of its source, or this row times ``weight``.
        weight: for a linear layer, name of the argument of ``propagate`` with a number for each edge, or None. The numbers do not depend on parameters.
        merges: for a linear layer, True if :func:`~salientpp.nn.merge_partial` accepts it as a first layer.
        pairs: names of arguments of ``forward`` that may be pairs (all of them or none). A pair has the rows of the sources [m, ...], and the first n of them
            as the rows of the targets. The layer then returns the rows of the n targets only. They equal the first n rows of the result without pairs.
            Empty if the layer takes no pairs.
        once: names of modules that the layer calls once for x, but twice for a pair.
        degrees: names of the global functions by which the layer counts degrees of sources in the edges that it is given. If it calls none,
            or if :func:`with_helpers` makes them count in all edges of the graph, then ``layer(x[:m], edges into the first n)[:n]`` equals
            ``layer(x, edges)[:n]``. A layer of several hops needs the edges and the rows of all its hops.
        needs_all: reason why all edges and rows are needed even with degrees of the whole graph; None if some can be left out.
        is_typed: True if the layer takes dictionaries of rows and of edges, by type.
        hops: number of hops of a call, or name of the layer's attribute with this number. None if the number follows from the layer's operations.
    """

    linear: bool = False
    weight: str | None = None
    merges: bool = False
    pairs: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    degrees: tuple[str, ...] = ()
    is_typed: bool = False
    hops: int | str | None = None
    needs_all: str | None = None


_X, _PLACED = ("x",), ("x", "pos")
_NORM = ("gcn_norm",)
_W = "edge_weight"

#: Layers by their names in ``torch_geometric.nn.conv``.
LAYERS: Mapping[str, Layer] = {
    "AGNNConv": Layer(),
    "ARMAConv": Layer(linear=True, weight=_W, degrees=_NORM, hops="num_layers"),
    "AntiSymmetricConv": Layer(),  # holds a GCNConv
    "APPNP": Layer(linear=True, weight=_W, degrees=_NORM),
    "CGConv": Layer(pairs=_X),
    "ClusterGCNConv": Layer(linear=True, weight=_W),  # divides by degrees of targets
    "DNAConv": Layer(degrees=_NORM),
    "EGConv": Layer(degrees=_NORM),
    "EdgeConv": Layer(pairs=_X),
    "FAConv": Layer(degrees=_NORM),
    "FastRGCNConv": Layer(pairs=_X),
    "FeaStConv": Layer(pairs=_X),
    "FiLMConv": Layer(pairs=_X),
    "GATConv": Layer(pairs=_X, once=("lin",)),
    "GATv2Conv": Layer(pairs=_X, once=("lin_l",)),
    "GCN2Conv": Layer(linear=True, weight=_W, degrees=_NORM),
    "GCNConv": Layer(linear=True, weight=_W, merges=True, degrees=_NORM),
    "GENConv": Layer(pairs=_X),
    "GINConv": Layer(linear=True, merges=True, pairs=_X),
    "GINEConv": Layer(pairs=_X),
    "GMMConv": Layer(pairs=_X),
    "GatedGraphConv": Layer(linear=True, weight=_W),
    "GeneralConv": Layer(pairs=_X),
    "GraphConv": Layer(linear=True, weight=_W, merges=True, pairs=_X),
    "HEATConv": Layer(),
    "LEConv": Layer(pairs=_X),
    "LGConv": Layer(linear=True, weight=_W, degrees=_NORM),
    "MFConv": Layer(linear=True, pairs=_X, hops=1),
    "MixHopConv": Layer(linear=True, weight=_W, degrees=_NORM),
    "NNConv": Layer(pairs=_X),
    "PDNConv": Layer(degrees=_NORM, needs_all="its degrees are sums of values that it computes from edge attributes"),
    "PNAConv": Layer(),
    "PPFConv": Layer(pairs=("x", "pos", "normal")),
    "PointGNNConv": Layer(),
    "PointNetConv": Layer(pairs=_PLACED),
    "PointTransformerConv": Layer(pairs=_PLACED),
    "RGATConv": Layer(pairs=_X),
    "RGCNConv": Layer(pairs=_X),
    "ResGatedGraphConv": Layer(pairs=_X),
    "SAGEConv": Layer(linear=True, merges=True, pairs=_X),
    "SGConv": Layer(linear=True, weight=_W, degrees=_NORM),
    "SSGConv": Layer(linear=True, weight=_W, degrees=_NORM),
    "SignedConv": Layer(linear=True, pairs=_X),
    "SimpleConv": Layer(linear=True, weight=_W),  # takes pairs unless combine_root='self_loop'
    "SuperGATConv": Layer(needs_all="it draws pairs of vertices of the whole graph in training"),
    "TAGConv": Layer(linear=True, weight=_W, degrees=_NORM),
    "TransformerConv": Layer(pairs=_X),
    "WLConvContinuous": Layer(linear=True, weight=_W, pairs=_X),
}


#: Modules of PyG that normalise over all rows of a graph.
GRAPH_NORMS = ("GraphNorm", "PairNorm", "InstanceNorm", "MeanSubtractionNorm", "GraphSizeNorm")

#: Aggregations of PyG that depend on the order of the edges into a target.
ORDERED_AGGREGATIONS = ("LSTMAggregation", "GRUAggregation")

#: Attention layers that compute the weight of each edge in ``edge_updater``, and only pass it on to ``propagate``.
EDGE_ATTENTION = (pyg.GATConv, pyg.GATv2Conv)

#: Layers for graphs with several types, which take dictionaries. Full-graph training does not support them.
TYPED_LAYERS: Mapping[str, Layer] = {"HGTConv": Layer(is_typed=True, hops=1)}


def layer_of(module: torch.nn.Module) -> Layer | None:
    """Returns the description of a PyG layer, or None for any other module, including subclasses outside PyG."""
    kind = type(module)
    is_pyg = kind.__module__.startswith("torch_geometric.nn.conv.")
    return LAYERS.get(kind.__name__) or TYPED_LAYERS.get(kind.__name__) if is_pyg else None


def name_of(module: torch.nn.Module, path: str) -> str:
    """Returns a module's name for error messages: its class, and its path in the model."""
    kind = type(module).__name__
    return f"{kind} ({path})" if path else kind


# --- linear layers ------------------------------------------------------------------------------------------

#: ``message`` method of a linear layer, which subclasses may inherit -> facts of the layer.
LINEAR_MESSAGES: Mapping[Any, Layer] = {
    MessagePassing.message: Layer(linear=True, merges=True),
    **{getattr(pyg, name).message: layer for name, layer in LAYERS.items() if layer.linear},
}


def linear_form(conv: MessagePassing) -> tuple[str | None, str] | None:
    """Describes the layer's aggregation as a sparse matrix product; None if it is not one.

    The first value names the edge weights among the arguments of ``propagate``, or is None. The second is the reduction: "sum", "mean", "max" or "min".
    """
    facts = LINEAR_MESSAGES.get(type(conv).message)
    reduction = None if facts is None else reduction_of(conv)
    return None if facts is None or reduction is None else (facts.weight, reduction)


def product_of(
    form: tuple[str | None, str] | None, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, str] | None:
    """Returns the operands of a layer's aggregation as a sparse matrix product; None if it is no such product.

    The operands are the rows of sources, the weights of the edges (or None) and the reduction.

    Args:
        form: result of :func:`linear_form` for the layer.
        given: arguments of the layer's ``propagate``.
    """
    source = pair_of(given.get("x"))[0]
    if form is None or not isinstance(source, Tensor) or not source.is_floating_point():
        return None
    return source, None if form[0] is None else given.get(form[0]), form[1]


def reduction_of(conv: MessagePassing, is_unchanged: bool = False) -> str | None:
    """Returns a layer's reduction of messages, "sum", "mean", "max" or "min", or None for anything else.

    ``is_unchanged``: the caller knows that the user has not changed the layer.
    """
    kind = type(conv)
    if kind.aggregate is not MessagePassing.aggregate or kind.update is not MessagePassing.update:
        return None
    if conv.decomposed_layers != 1 or not (is_unchanged or change_of(conv) is None):
        return None
    return _REDUCTIONS.get(type(conv.aggr_module))


_REDUCTIONS: Mapping[type, str] = {
    pyg.SumAggregation: "sum",
    pyg.MeanAggregation: "mean",
    pyg.MaxAggregation: "max",
    pyg.MinAggregation: "min",
}


# --- replacement of a layer's methods -----------------------------------------------------------------------


def source_names(conv: MessagePassing, edge_level: bool) -> list[str]:
    """Returns the sorted names of ``propagate``'s (or ``edge_updater``'s) arguments that edges look up by source."""
    names = conv._edge_user_args if edge_level else conv._user_args
    return sorted({name[:-2] for name in names if name.endswith("_j")})


class Replaced:
    """Context that replaces entries of dictionaries, given as (dictionary, key, value), and restores the old values at
    its end.

    It is a class because an abandoned generator would restore the values when it is freed, perhaps within a later call.
    """

    def __init__(self, replacements: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        self._replacements = replacements
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        note(self.restore)
        replacements, self._replacements = self._replacements, ()  # the values may hold this context
        try:
            for owner, name, value in replacements:
                self._before.append((owner, name, owner.get(name, _ABSENT)))
                owner[name] = value
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: Any) -> None:
        undo_noted(self.restore)

    def restore(self) -> None:
        """Restores the old values that are not restored yet."""
        while self._before:
            owner, name, value = self._before[-1]
            if value is _ABSENT:
                owner.pop(name, None)
            else:
                owner[name] = value
            self._before.pop()


_ABSENT = object()


def remove_hooks(module: torch.nn.Module, functions: Collection[Any]) -> None:
    """Removes those forward hooks and forward pre-hooks of a module that are among ``functions``."""
    tables = [value for name, value in vars(module).items() if name.startswith("_forward_") and isinstance(value, dict)]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in functions]:
            for table in tables:
                table.pop(number, None)


def uncached(own: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields replacements that switch off a layer's cache (``cached=True``), which may hold another graph's values. ``own``: the layer's attributes."""
    for name, kept in [*own.items()]:
        if (name == "cached" and kept is True) or (name.startswith("_cached_") and kept is not None):
            yield own, name, False if name == "cached" else None


def with_helpers(module: torch.nn.Module, helpers: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Copies the module's methods that call global functions named in ``helpers``; the copies call ``helpers``.

    Returns the copies by name. PyG's functions stay unchanged for everything else in the process.
    """
    found: dict[str, Callable[..., Any]] = {}
    kind = cast(Any, type(module))
    for _, name, method, called in _callers(kind, frozenset(helpers)):
        if getattr(kind, name) is not method:  # a subclass overrides it
            continue
        ours = {each: helpers[each] for each in called}
        copy = types.FunctionType(
            method.__code__, {**method.__globals__, **ours}, name, method.__defaults__, method.__closure__
        )
        copy.__kwdefaults__ = method.__kwdefaults__
        found[name] = types.MethodType(copy, module)
    return found


def overridden_callers(kind: type, names: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the methods of PyG that call functions in ``names``, but that the subclass ``kind`` overrides, as (method, PyG's class)."""
    return [
        (name, base.__name__)
        for base, name, _, _ in _callers(cast(Any, kind), frozenset(names))
        if getattr(kind, name) is not vars(base)[name]
    ]


def _callers(kind: Any, names: frozenset[str]) -> list[tuple[Any, str, types.FunctionType, list[str]]]:
    """Returns PyG's methods that call functions in ``names``: class, name, method, names of the functions."""
    found = _known_callers(kind, names)
    if any(vars(base).get(name) is not method for base, name, method, _ in found):  # a class was changed
        _known_callers.cache_clear()
        found = _known_callers(kind, names)
    return found


@functools.cache
def _known_callers(kind: Any, names: frozenset[str]) -> list[tuple[Any, str, types.FunctionType, list[str]]]:
    found: dict[str, tuple[Any, str, types.FunctionType, list[str]]] = {}
    for base in kind.__mro__:
        if base is MessagePassing or not base.__module__.startswith("torch_geometric.nn."):
            continue
        for name, method in vars(base).items():
            if isinstance(method, types.FunctionType) and name not in found and name != "__init__":
                called = [each for each in method.__code__.co_names if each in names and each in method.__globals__]
                if called:
                    found[name] = (base, name, method, called)
    return list(found.values())


def pair_of(value: Any) -> tuple[Any, Any]:
    """Splits an argument of ``propagate`` into the values of sources and of targets."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)
