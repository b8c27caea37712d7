"""Finds the PyG modules of a model that cannot be distributed over ranks, with the reasons.

A PyG layer computes row by row, with two exceptions. First, ``propagate`` and ``edge_updater`` look up rows by the
edges' sources. For these, the rows of the halo are appended to the rank's own. Second, functions that normalise by
degrees (``gcn_norm``) look up degrees of sources. A copy of the layer's method then calls a version that asks the
owners. The layers of :data:`salientpp.nn.layers.LAYERS` read other vertices in these two cases only, unless they are
refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn.layers import GRAPH_NORMS, ORDERED_AGGREGATIONS, layer_of, name_of, overridden_callers
from salientpp.nn.unchanged import change_of, subclass_in

_WHOLE = "looks at all vertices of the graph at once"
_NEIGHBOURS = "computes its edges from the rows of all vertices"
_TYPED = "is for graphs of several types; convert the data with to_homogeneous()"
_CUDA = "needs its own graph format, which has no halo"

#: Functions of PyG that a rank replaces, because they count vertices or their degrees.
HELPERS = ("gcn_norm", "add_self_loops", "add_remaining_self_loops")

#: Layers of ``torch_geometric.nn.conv`` that are refused -> reason.
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
    "WLConv": "numbers colours in their order of appearance over the whole graph",
    "HGTConv": _TYPED,
    "HANConv": _TYPED,
    "HeteroConv": _TYPED,
    "GPSConv": f"{_WHOLE} (attention)",
    "MeshCNNConv": "depends on the order of the edges, which it reads in groups of four",
    "SplineConv": "needs a kernel that looks up rows itself (pyg-lib's or torch-spline-conv's), which was not tested",
}

#: Other modules that are refused -> reason.
_REFUSED_MODULES: Mapping[str, str] = {
    **dict.fromkeys(GRAPH_NORMS, _WHOLE),
    **dict.fromkeys(["HeteroBatchNorm", "HeteroLayerNorm"], _TYPED),
    **dict.fromkeys(["TopKPooling", "SAGPooling", "EdgePooling", "ASAPooling", "PANPooling", "MemPooling"], _WHOLE),
}

#: Forwards of batch normalisation that a rank replaces.
_FORWARDS = torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward


def refusals(model: torch.nn.Module) -> Iterator[str]:
    """Yields a text for each module that keeps a model from being distributed: its name, and the reason."""
    inside: set[int] = set()  # modules of a message-passing layer, which see only the edges into one vertex at a time
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MessagePassing):
            inside.update(map(id, module.modules()))
        reason = _reason(module, kind, id(module) in inside)
        if reason is not None:
            yield f"{name_of(module, path)} {reason}"


def _pyg_classes(kind: type) -> list[str]:
    """Returns the names of a class and its bases, as far as they belong to PyG."""
    return [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch_geometric.")]


def _reason(module: torch.nn.Module, kind: str, is_inside: bool) -> str | None:
    is_pyg = type(module).__module__.startswith("torch_geometric.")
    is_compiled = kind == "OptimizedModule" or module._compiled_call_impl is not None
    if is_compiled and any(isinstance(each, MessagePassing) for each in module.modules()):
        return "is compiled, and compiled layers cannot exchange rows; distribute the model without torch.compile"
    if kind in REFUSED and type(module).__module__.startswith("torch_geometric.nn.conv"):
        return REFUSED[kind]
    for base in _pyg_classes(type(module)):
        if base in _REFUSED_MODULES:
            return _REFUSED_MODULES[base]
        if base == "LayerNorm" and getattr(module, "mode", "node") != "node":
            return f"{_WHOLE}; mode='node' does not"
    if isinstance(module, _BatchNorm) and (type(module).forward not in _FORWARDS or "forward" in vars(module)):
        return "has a forward() of its own, which would normalise the rows of one rank only; call a torch.nn.BatchNorm1d inside another module instead"
    if kind in ORDERED_AGGREGATIONS and is_pyg:
        return "depends on the order of the edges into a vertex, which a partition does not keep"
    if is_pyg and ".aggr." in type(module).__module__ and not is_inside:
        return f"{_WHOLE} if used outside a message-passing layer"
    if isinstance(module, MessagePassing):
        if module.flow != "source_to_target":
            return "has flow='target_to_source', but a rank has only the edges into its vertices, not the edges out of them; reverse the edges instead"
        if is_pyg and ".conv." in type(module).__module__ and layer_of(module) is None:
            return "was not tested"
        for method, base in overridden_callers(type(module), HELPERS):
            return (
                f"overrides {method}() of {base}, which looks up vertices of other ranks; derive the layer from MessagePassing, or call a {base} inside "
                "another module"
            )
        if layer_of(module) is not None and (changed := change_of(module)) is not None:
            return f"{changed}, which may read more vertices than a rank has; undo it, or put the code into a subclass of the layer"
        if kind == "SuperGATConv" and module.training:
            return "draws pairs of vertices of the whole graph in training; it works in evaluation (call eval())"
    if (changed := subclass_in(module)) is not None:
        return f"{changed}, which may have operations of its own; use torch.nn.Parameter"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            return "has parameters without a shape (in_channels=-1); set their sizes, or call the model once on a small graph before it is distributed"
    return None
