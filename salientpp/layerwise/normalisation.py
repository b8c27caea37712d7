"""Edge weights for layers that divide by degrees, in batches that lack most edges of the graph.

``GCNConv`` and similar layers weight an edge u → v with w / sqrt(d(u) d(v)). Here d is the sum of the weights of all edges into a vertex, including added
self-loops. The whole topology is on every rank, so the degrees are computed once, in this module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, LGConv, TAGConv
from torch_geometric.utils import add_remaining_self_loops

from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.store.rows import take_rows

#: Layers that normalise in ``forward``, with PyG's ``gcn_norm``, unless their ``normalize`` is False.
_NORMALISING = (GCNConv, LGConv, TAGConv)

#: Number of edges that are read at once while degrees are summed.
_CHUNK_EDGES = 2**22


@dataclass(frozen=True, eq=False)
class Edges:
    """All edges into some vertices, the targets, of a graph or of a batch.

    Attributes:
        edge_index: int64 [2, e], sources and targets as positions in the batch; targets are 0 to ``num_targets`` - 1.
        n_id: int64 [n], ids in the graph of the batch's vertices, targets first.
        weight, attr: weights and attributes of the edges, [e, ...], or None.
    """

    edge_index: Tensor
    n_id: Tensor
    num_targets: int
    weight: Tensor | None = None
    attr: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Degrees of a graph, as normalising layers count them."""

    graph: Graph
    edge_weight: Tensor | None = None  # [E] by edge id
    _known: dict[Any, Tensor] = field(default_factory=dict)

    def applied(
        self, conv: Callable[..., Tensor], edges: Edges, dtype: torch.dtype
    ) -> tuple[Callable[..., Tensor], Edges]:
        """Returns a layer and edges for it. On rows of ``dtype`` they give the targets the same rows as ``conv`` on the whole graph. ``conv`` is unchanged."""
        if not isinstance(conv, _NORMALISING) or not conv.normalize:
            return conv, edges
        adds_loops = bool(getattr(conv, "add_self_loops", False))
        # PyG uses `improved` for the weight of a loop only if edges have weights.
        loop = 2.0 if getattr(conv, "improved", False) and edges.weight is not None else 1.0
        if edges.weight is None:
            weight = torch.ones(edges.edge_index.size(1), dtype=dtype, device=edges.edge_index.device)
        else:
            weight = edges.weight if edges.weight.is_floating_point() else edges.weight.to(dtype)
        edge_index = edges.edge_index
        if adds_loops:
            edge_index, weight = add_remaining_self_loops(edge_index, weight, loop, edges.num_targets)
        factor = self._inverse_roots(adds_loops, loop, edges.n_id.device)[edges.n_id].to(weight.dtype)
        weight = factor[edge_index[0]] * weight * factor[edge_index[1]]
        plain = copy.copy(conv)  # shares the parameters
        plain.normalize = False
        return plain, dataclasses.replace(edges, edge_index=edge_index, weight=weight)

    def _inverse_roots(self, adds_loops: bool, loop: float, device: torch.device) -> Tensor:
        """Returns 1 / sqrt(degree), float64 [N], on ``device``; 0 for a degree of 0."""
        key = adds_loops, loop, device
        if key in self._known:
            return self._known[key]
        graph = self.graph
        degree = torch.zeros(graph.num_vertices, dtype=torch.float64, device="cpu")
        for first, last in runs_of_vertices(graph.indptr, _CHUNK_EDGES):
            begin, end = int(graph.indptr[first]), int(graph.indptr[last])
            targets = torch.arange(last - first, device="cpu")
            target = torch.repeat_interleave(targets, graph.indptr[first : last + 1].diff())
            edge_index = torch.stack([graph.indices[begin:end].to(torch.int64) - first, target])
            if self.edge_weight is None:
                weight = torch.ones(end - begin, dtype=torch.float64, device="cpu")
            elif graph.edge_id is None:
                weight = self.edge_weight[begin:end].to(torch.float64)
            else:
                weight = take_rows(self.edge_weight, graph.edge_id[begin:end]).to(torch.float64)
            if adds_loops:
                edge_index, weight = add_remaining_self_loops(edge_index, weight, loop, last - first)
            degree[first:last].index_add_(0, edge_index[1], weight)
        root = degree.pow_(-0.5)
        self._known[key] = root.masked_fill_(root == float("inf"), 0).to(device)
        return self._known[key]
