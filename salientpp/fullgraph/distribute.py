"""Training of an unchanged PyG model on a graph that is divided among several ranks. docs/how-to/full-graph.md has an example."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from salientpp.fullgraph.batch_model import BatchModel, of_loader
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.opening import local
from salientpp.fullgraph.planner import Plan, plan_for
from salientpp.fullgraph.recompute import Recompute
from salientpp.nn.trim import trimming_of
from salientpp.ranks.cooperation import Cooperation
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import suggest_arguments


class Cooperative(Protocol):
    """Interface of a loader that :func:`distribute` accepts: ranks of a host may compute its batches together."""

    cooperation: Cooperation | None


@suggest_arguments
def distribute(
    model: torch.nn.Module,
    part: LocalGraph | PartitionedGraph | Cooperative,
    layout: str | Plan = "halo",
    *,
    recompute: str | None = None,
    rows_file: str | os.PathLike[str] | None = None,
) -> DistributedModel:
    """Makes a model that computes, for the vertices of this rank, what ``model`` computes on the whole graph. Collective.

    All parameters and buffers are set to rank 0's values. Training the result trains ``model``, which can still be saved, and called on a whole graph.

    Args:
        model: a module that takes (rows of vertices, ``edge_index``, ...). Its layers are PyG's, or your own layers that derive from ``MessagePassing``.
        part: this rank's part, from :func:`salientpp.fullgraph.local`, or a partitioned graph, which is opened. The result's ``.graph`` is the part, or the
            part under a plan. ``part`` may also be a loader with ``cooperate="host"``. The result then takes ``batch.x`` and ``batch.edge_index``, and the
            ranks of a host compute each batch together, with the result of ``model`` for the whole batch in one process.
        layout: where the entries of the graph's matrix are stored, and what travels (:mod:`salientpp.fullgraph.layouts`). 'halo' supports every layer.
            'cover', '1d', '1.5d', '1.5d:c', '2d', '3d' and 'grid:RxC' need layers that compute a sum, mean or weighted sum of in-neighbours' rows. Layers
            that take a maximum can use '1d', '1.5d', '1.5d:c' and 'grid:RxC'. A plan comes from :func:`salientpp.fullgraph.plan_for`. 'auto' makes a plan
            without a memory limit, for which it calls the model with ``(part.x, part.edge_index)``.
        recompute: 'layers' computes each message-passing layer again in the backward. Between the forward and the backward, a rank then keeps only each
            layer's input rows of its own vertices. Rows of edges exist for one range of targets at a time. None keeps all.
        rows_file: with ``recompute``, a folder for a temporary file, which holds the rows of layers instead of memory. Each rank makes its own file.

    Raises:
        ValueError: a layer cannot be distributed (the text names it and the reason), or the ranks have different models. Every rank raises it.
    """
    if hasattr(part, "cooperation"):
        return _over_batches(model, part, layout, Recompute(recompute, rows_file))
    graph = local(part) if isinstance(part, PartitionedGraph) else part
    if not isinstance(graph, LocalGraph):
        raise TypeError(
            f"part must come from salientpp.fullgraph.local or salientpp.load, or be a loader with cooperate='host', got {type(part).__name__}"
        )
    if isinstance(layout, str) and layout == "auto":
        layout = plan_for(model, graph)
    given = Recompute(recompute, rows_file)
    if not isinstance(layout, Plan):
        return DistributedModel(model, graph, layout, recompute=given)
    error = None
    if graph is not (layout.graph.base or layout.graph):
        error = ValueError(
            "layout is a plan for another part; pass the part that plan_for was called with, as salientpp.fullgraph.local returned it"
        )
    return DistributedModel(model, layout.graph, "halo", f"the plan {layout.name!r}", given, error)


def _over_batches(model: torch.nn.Module, loader: Cooperative, layout: str | Plan, recompute: Recompute) -> BatchModel:
    if loader.cooperation is None:
        raise ValueError(
            f"distribute computes the batches of a loader over ranks only if the loader has cooperate='host', got a {type(loader).__name__} without it; add "
            "cooperate='host', or train the model itself, with DistributedDataParallel on several ranks"
        )
    error = None
    if layout != "halo":
        name = layout.name if isinstance(layout, Plan) else layout
        error = ValueError(f"layout must be 'halo' for a loader, whose batches differ in their edges, got {name!r}")
    elif recompute.kind is not None and isinstance(model, torch.nn.Module) and trimming_of(model) is not None:
        error = ValueError(
            f"recompute must be None for a model of salientpp.nn.trim, got {recompute.kind!r}; distribute the model without trim, or leave recompute out and "
            "choose a smaller batch_size"
        )
    return of_loader(model, loader.cooperation, recompute, error)
