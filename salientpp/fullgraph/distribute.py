"""Training of an unchanged PyG model on a graph that is divided among several ranks. docs/how-to/full-graph.md has an example."""

from __future__ import annotations

import torch

from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.opening import local
from salientpp.fullgraph.planner import Plan, plan_for
from salientpp.store.directory.opened import PartitionedGraph


def distribute(
    model: torch.nn.Module, part: LocalGraph | PartitionedGraph, layout: str | Plan = "halo"
) -> DistributedModel:
    """Makes a model that computes, for the vertices of this rank, what ``model`` computes on the whole graph. Collective.

    All parameters and buffers are set to rank 0's values. Training the result trains ``model``, which can still be saved, and called on a whole graph.

    Args:
        model: a module that takes (rows of vertices, ``edge_index``, ...). Its layers are PyG's, or your own layers that derive from ``MessagePassing``.
        part: this rank's part, from :func:`salientpp.fullgraph.local`, or a partitioned graph, which is opened. The result's ``.graph`` is the part, or the
            part under a plan.
        layout: where the entries of the graph's matrix are stored, and what travels (:mod:`salientpp.fullgraph.layouts`). 'halo' supports every layer. 'cover',
            '1d', '1.5d', '1.5d:c', '2d', '3d' and 'grid:RxC' need layers that compute a sum, mean or weighted sum of in-neighbours' rows. Layers that take
            a maximum can use '1d', '1.5d', '1.5d:c' and 'grid:RxC'. A plan comes from :func:`salientpp.fullgraph.plan_for`. 'auto' makes a plan without
            a limit of memory; the model is then called with ``(part.x, part.edge_index)``.

    Raises:
        ValueError: a layer cannot be distributed (the text names it and the reason), or the ranks have different models. Every rank raises it.
    """
    graph = local(part) if isinstance(part, PartitionedGraph) else part
    if not isinstance(graph, LocalGraph):
        raise TypeError(f"part must come from salientpp.fullgraph.local or salientpp.load, got {type(part).__name__}")
    if layout == "auto":
        layout = plan_for(model, graph)
    if not isinstance(layout, Plan):
        return DistributedModel(model, graph, layout)
    if graph is not (layout.graph.base or layout.graph):
        raise ValueError(
            "layout is a plan for another part; pass the part that plan_for was called with, as salientpp.fullgraph.local returned it"
        )
    return DistributedModel(model, layout.graph, layout.layout, f"the plan {layout.name!r}")
