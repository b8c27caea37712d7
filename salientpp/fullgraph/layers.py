"""Layers of PyG that work over ranks, layers that are refused, and what runs in a layer's place.

A PyG layer computes row by row but for two kinds of places. ``propagate`` and ``edge_updater`` look up rows by the edges' sources: there the halo's rows are
put behind the rank's own. Functions that normalise by degrees (``gcn_norm``) look up degrees of sources: a copy of the layer's method runs with one that asks
the owners. Layers that look at other vertices in another way are refused by name, with the reason. Nothing of this is left on a layer after ``forward``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.conv import MessagePassing

_WHOLE = "looks at all vertices of the graph at once"
_NEIGHBOURS = "makes its edges itself, from the rows of all vertices"
_TYPED = "is for graphs of several types; convert the data with to_homogeneous()"
_CUDA = "needs a graph format of its own, which names no halo"

#: Layers of ``torch_geometric.nn.conv`` that are refused, and why.
REFUSED: Mapping[str, str] = {
    "ChebConv": "rescales by the largest weight of the whole graph and divides by degrees of outgoing edges, which lie on other ranks",
    "GravNetConv": _NEIGHBOURS,
    "DynamicEdgeConv": _NEIGHBOURS,
    "XConv": _NEIGHBOURS,
    "CuGraphSAGEConv": _CUDA,
    "CuGraphGATConv": _CUDA,
    "CuGraphRGCNConv": _CUDA,
    "FusedGATConv": _CUDA,
    "HypergraphConv": "passes rows along edges in both directions, and the edges that leave a vertex lie on other ranks",
    "DirGNNConv": "passes rows along edges in both directions, and the edges that leave a vertex lie on other ranks",
    "PANConv": "multiplies the adjacency matrix by itself",
    "WLConv": "numbers colours in the order in which it meets them, over the whole graph",
    "HGTConv": _TYPED,
    "HANConv": _TYPED,
    "HeteroConv": _TYPED,
    "GPSConv": f"{_WHOLE} (attention)",
    "MeshCNNConv": "depends on the order of the edges, four by four",
    "SplineConv": "needs a kernel that names rows by itself (pyg-lib's or torch-spline-conv's), which was not tried",
}

#: Other modules that are refused.
_REFUSED_MODULES: Mapping[str, str] = {
    **dict.fromkeys(["GraphNorm", "PairNorm", "InstanceNorm", "MeanSubtraction", "GraphSizeNorm"], _WHOLE),
    **dict.fromkeys(["HeteroBatchNorm", "HeteroLayerNorm"], _TYPED),
    **dict.fromkeys(["TopKPooling", "SAGPooling", "EdgePooling", "ASAPooling", "PANPooling", "MemPooling"], _WHOLE),
}

#: Layers of ``torch_geometric.nn.conv`` that work; a test compares each with itself on the whole graph.
WORKS = (
    "AGNNConv", "ARMAConv", "AntiSymmetricConv", "APPNP", "CGConv", "ClusterGCNConv", "DNAConv", "EGConv", "EdgeConv", "FAConv", "FastRGCNConv", "FeaStConv",
    "FiLMConv", "GATConv", "GATv2Conv", "GCN2Conv", "GCNConv", "GENConv", "GINConv", "GINEConv", "GMMConv", "GatedGraphConv", "GeneralConv", "GraphConv",
    "HEATConv", "LEConv", "LGConv", "MFConv", "MixHopConv", "NNConv", "PDNConv", "PNAConv", "PPFConv", "PointGNNConv", "PointNetConv",
    "PointTransformerConv", "RGATConv", "RGCNConv", "ResGatedGraphConv", "SAGEConv", "SGConv", "SSGConv", "SignedConv", "SimpleConv", "SuperGATConv",
    "TAGConv", "TransformerConv", "WLConvContinuous",
)  # fmt: skip


def name_of(module: torch.nn.Module, path: str) -> str:
    """What errors call a module: its class, and its place in the model."""
    kind = type(module).__name__
    return f"{kind} ({path})" if path else kind


def refusals(model: torch.nn.Module) -> Iterator[str]:
    """The modules of a model that cannot be distributed, each with the reason."""
    inside: set[int] = set()  # what belongs to a message-passing layer looks at the edges into one vertex at a time
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MessagePassing):
            inside.update(map(id, module.modules()))
        reason = _reason(module, kind, id(module) in inside)
        if reason is not None:
            yield f"{name_of(module, path)} {reason}"


def _reason(module: torch.nn.Module, kind: str, is_inside: bool) -> str | None:
    is_pyg = type(module).__module__.startswith("torch_geometric.")
    if kind in REFUSED and type(module).__module__.startswith("torch_geometric.nn.conv"):
        return REFUSED[kind]
    if kind in _REFUSED_MODULES and is_pyg:
        return _REFUSED_MODULES[kind]
    if is_pyg and kind == "LayerNorm" and getattr(module, "mode", "node") != "node":
        return f"{_WHOLE}; mode='node' does not"
    if kind in ("LSTMAggregation", "GRUAggregation") and is_pyg:
        return "depends on the order of the edges into a vertex, which a partition does not keep"
    if is_pyg and ".aggr." in type(module).__module__ and not is_inside:
        return f"{_WHOLE}, as a layer of its own"
    if isinstance(module, MessagePassing):
        if module.flow != "source_to_target":
            return "has flow='target_to_source', and a rank has the edges that lead to its vertices, not those that leave them; turn the edges round instead"
        if is_pyg and ".conv." in type(module).__module__ and kind not in WORKS:
            return "was not tried"
        if kind == "SuperGATConv" and module.training:
            return "draws pairs of vertices of the whole graph in training; it works in evaluation (call eval())"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            return "has parameters without a shape (in_channels=-1); give their sizes, or call the model once on a small graph before it is distributed"
    return None


# --- linear layers ------------------------------------------------------------------------------------------

#: Messages that are the source's row -> None, or that times a weight -> the weight's name among the arguments of ``propagate``.
_LINEAR_MESSAGES: Mapping[Any, str | None] = {
    **dict.fromkeys(kind.message for kind in (MessagePassing, pyg.GINConv, pyg.SAGEConv, pyg.SignedConv)),
    **dict.fromkeys(
        (
            kind.message
            for kind in (
                pyg.GCNConv, pyg.SGConv, pyg.SSGConv, pyg.APPNP, pyg.LGConv, pyg.TAGConv, pyg.ARMAConv, pyg.GCN2Conv,
                pyg.MixHopConv, pyg.ClusterGCNConv, pyg.GraphConv, pyg.SimpleConv, pyg.GatedGraphConv,
            )
        ),
        "edge_weight",
    ),
}  # fmt: skip


def linear_form(conv: MessagePassing) -> tuple[str | None, str] | None:
    """The layer's aggregation as a sparse product: the name of the edges' weights among the arguments of ``propagate`` or None, and 'sum', 'mean' or 'max'.

    None where it is no such product.
    """
    kind = type(conv)
    if kind.message not in _LINEAR_MESSAGES or kind.aggregate is not MessagePassing.aggregate:
        return None
    if kind.update is not MessagePassing.update or conv.explain:
        return None
    hooks = (conv._message_forward_pre_hooks, conv._message_forward_hooks, conv._aggregate_forward_pre_hooks)
    if any(hooks) or conv._aggregate_forward_hooks or conv.decomposed_layers != 1:
        return None
    reduce = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max"}.get(
        type(conv.aggr_module).__name__
    )
    return None if reduce is None else (_LINEAR_MESSAGES[kind.message], reduce)


# --- what runs in a layer's place ---------------------------------------------------------------------------


def source_names(conv: MessagePassing, edge_level: bool) -> list[str]:
    """The arguments of ``propagate`` (or of ``edge_updater``) that the layer looks up by the edges' sources, sorted: all ranks exchange them in one order."""
    names = conv._edge_user_args if edge_level else conv._user_args
    return sorted({name[:-2] for name in names if name.endswith("_j")})


def with_helpers(module: torch.nn.Module, helpers: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The module's methods that call one of some global functions, as copies that call ``helpers`` instead, by name.

    PyG's functions stay as they are for everything else in the process.
    """
    found: dict[str, Callable[..., Any]] = {}
    for kind in type(module).__mro__:
        if kind is MessagePassing or not kind.__module__.startswith("torch_geometric.nn."):
            continue
        for name, method in vars(kind).items():
            if isinstance(method, types.FunctionType) and name not in found and name != "__init__":
                called = {each: helpers[each] for each in method.__code__.co_names if each in helpers}
                called = {each: mine for each, mine in called.items() if each in method.__globals__}
                if called:
                    copy = types.FunctionType(
                        method.__code__, {**method.__globals__, **called}, name, method.__defaults__, method.__closure__
                    )
                    copy.__kwdefaults__ = method.__kwdefaults__
                    found[name] = types.MethodType(copy, module)
    return found


def pair_of(value: Any) -> tuple[Any, Any]:
    """(of sources, of targets) of an argument of ``propagate``."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)
