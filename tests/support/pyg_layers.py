"""PyG's message-passing layers, each with the tensors that it is called with; tests compare all of them.

``CASES[name].make(i, o).double()`` is a layer from ``i`` to ``o`` columns, both multiples of six; with ``keeps_width`` the
output has ``i`` columns. ``CASES[name].call(layer, x, data)`` calls the layer on a graph that has the columns of
:func:`with_columns`, or on a batch of such a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

EDGE_COLUMNS, EDGE_TYPES, VERTEX_TYPES = 3, 3, 2
D, R = EDGE_COLUMNS, EDGE_TYPES


def with_columns(edge_index: Tensor, num_vertices: int, width: int, draw: torch.Generator) -> Data:
    """A graph with all tensors that the layers take.

    These are float64 x and x_0 [n, width], pos and normal [n, 3], edge_attr [e, D], positive edge_weight [e], and types.
    """
    number = edge_index.size(1)
    normal = torch.randn(num_vertices, 3, generator=draw).double()
    return Data(
        edge_index=edge_index,
        x=torch.randn(num_vertices, width, generator=draw).double(),
        x_0=torch.randn(num_vertices, width, generator=draw).double(),
        pos=torch.randn(num_vertices, 3, generator=draw).double(),
        normal=normal / normal.norm(dim=1, keepdim=True),
        node_type=torch.randint(VERTEX_TYPES, (num_vertices,), generator=draw),
        edge_attr=torch.rand(number, EDGE_COLUMNS, generator=draw).double(),
        edge_weight=torch.rand(number, generator=draw).double() + 0.1,
        edge_type=torch.randint(EDGE_TYPES, (number,), generator=draw),
    )


@dataclass(frozen=True)
class Case:
    """A layer and how it is called.

    Attributes:
        make: function from the columns of the input and of the output to a layer.
        rows: names of arguments with a row for each vertex, beside ``x``.
        edges: names of arguments with a row for each edge.
        hops: number of edges between an output row and the furthest row that it depends on.
        keeps_width: the output has as many columns as the input.
        signed: takes two lists of edges instead of one: those of type 0 and the others.
        stacked: takes several rows for each vertex, [n, 2, columns].
    """

    make: Callable[[int, int], nn.Module]
    rows: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    hops: int = 1
    keeps_width: bool = False
    signed: bool = False
    stacked: bool = False

    def extra(self, data: Any) -> dict[str, Any]:
        """Keyword arguments of the layer beside ``x`` and its edges."""
        return {name: getattr(data, name) for name in (*self.rows, *self.edges)}

    def call(self, layer: nn.Module, x: Any, data: Any) -> Tensor:
        """The layer's output for rows ``x``, or a pair of rows of sources and rows of targets."""
        if self.signed:
            first = data.edge_type == 0
            return layer(x, data.edge_index[:, first], data.edge_index[:, ~first])
        if self.stacked:
            x = tuple(map(_stack, x)) if isinstance(x, tuple) else _stack(x)
        return layer(x, edge_index=data.edge_index, **self.extra(data))


def _stack(rows: Tensor) -> Tensor:
    return torch.stack([rows, rows.sin()], 1)


def mlp(columns: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(columns, 8), nn.ReLU(), nn.Linear(8, out))


def _pna(i: int, o: int) -> nn.Module:
    histogram = torch.tensor([3, 4, 9, 12, 8, 4, 1])
    return pyg.PNAConv(i, o, ["mean", "max", "std"], ["identity", "amplification"], histogram, edge_dim=D)


W, A, T = ("edge_weight",), ("edge_attr",), ("edge_type",)

#: Name -> case. A layer has one case for each way in which it uses other vertices. The first word is the layer's class.
CASES: dict[str, Case] = {
    "AGNNConv": Case(lambda i, o: pyg.AGNNConv(), keeps_width=True),
    "ARMAConv": Case(lambda i, o: pyg.ARMAConv(i, o, num_stacks=2, num_layers=2), edges=W, hops=2),
    "AntiSymmetricConv": Case(lambda i, o: pyg.AntiSymmetricConv(i, num_iters=2), hops=2, keeps_width=True),
    "APPNP": Case(lambda i, o: pyg.APPNP(3, 0.1), hops=3, keeps_width=True),
    "APPNP weighted": Case(lambda i, o: pyg.APPNP(2, 0.1, add_self_loops=False), edges=W, hops=2, keeps_width=True),
    "CGConv": Case(lambda i, o: pyg.CGConv(i, D), edges=A, keeps_width=True),
    "ClusterGCNConv": Case(lambda i, o: pyg.ClusterGCNConv(i, o, diag_lambda=0.5)),
    "DNAConv": Case(lambda i, o: pyg.DNAConv(i, heads=2), stacked=True, keeps_width=True),
    "EGConv": Case(lambda i, o: pyg.EGConv(i, o, ["symnorm", "max"], num_heads=2)),
    "EGConv mean": Case(lambda i, o: pyg.EGConv(i, o, ["mean", "std"], num_heads=2)),
    "EdgeConv": Case(lambda i, o: pyg.EdgeConv(mlp(2 * i, o))),
    "FAConv": Case(lambda i, o: pyg.FAConv(i), rows=("x_0",), keeps_width=True),
    "FastRGCNConv": Case(lambda i, o: pyg.FastRGCNConv(i, o, R), edges=T),
    "FeaStConv": Case(lambda i, o: pyg.FeaStConv(i, o, heads=2)),
    "FiLMConv": Case(lambda i, o: pyg.FiLMConv(i, o, R), edges=T),
    "GATConv": Case(lambda i, o: pyg.GATConv(i, o // 2, heads=2, residual=True)),
    "GATConv with attributes": Case(lambda i, o: pyg.GATConv(i, o, edge_dim=D), edges=A),
    "GATv2Conv": Case(lambda i, o: pyg.GATv2Conv(i, o // 2, heads=2, share_weights=True)),
    "GATv2Conv with attributes": Case(lambda i, o: pyg.GATv2Conv(i, o, edge_dim=D, concat=False), edges=A),
    "GCN2Conv": Case(lambda i, o: pyg.GCN2Conv(i, 0.2), rows=("x_0",), keeps_width=True),
    "GCNConv": Case(lambda i, o: pyg.GCNConv(i, o)),
    "GCNConv weighted": Case(lambda i, o: pyg.GCNConv(i, o, improved=True), edges=W),
    "GCNConv without normalisation": Case(lambda i, o: pyg.GCNConv(i, o, normalize=False), edges=W),
    "GCNConv cached": Case(lambda i, o: pyg.GCNConv(i, o, cached=True)),
    "GENConv": Case(lambda i, o: pyg.GENConv(i, o, edge_dim=D), edges=A),
    "GINConv": Case(lambda i, o: pyg.GINConv(mlp(i, o), train_eps=True)),
    "GINEConv": Case(lambda i, o: pyg.GINEConv(mlp(i, o), edge_dim=D), edges=A),
    "GMMConv": Case(lambda i, o: pyg.GMMConv(i, o, D, 2), edges=A),
    "GMMConv separate": Case(lambda i, o: pyg.GMMConv(i, o, D, 2, separate_gaussians=True), edges=A),
    "GatedGraphConv": Case(lambda i, o: pyg.GatedGraphConv(o, 2), edges=W, hops=2),
    "GeneralConv": Case(lambda i, o: pyg.GeneralConv(i, o, in_edge_channels=D, attention=True), edges=A),
    "GraphConv": Case(lambda i, o: pyg.GraphConv(i, o), edges=W),
    "GraphConv mean": Case(lambda i, o: pyg.GraphConv(i, o, aggr="mean"), edges=W),
    "GraphConv max": Case(lambda i, o: pyg.GraphConv(i, o, aggr="max")),
    "HEATConv": Case(lambda i, o: pyg.HEATConv(i, o, VERTEX_TYPES, R, 3, D, 4), rows=("node_type",), edges=T + A),
    "LEConv": Case(lambda i, o: pyg.LEConv(i, o), edges=W),
    "LGConv": Case(lambda i, o: pyg.LGConv(), edges=W, keeps_width=True),
    "MFConv": Case(lambda i, o: pyg.MFConv(i, o, 4)),
    "MixHopConv": Case(lambda i, o: pyg.MixHopConv(i, o // 3, [0, 1, 2]), hops=2),
    "NNConv": Case(lambda i, o: pyg.NNConv(i, o, mlp(D, i * o)), edges=A),
    "PDNConv": Case(lambda i, o: pyg.PDNConv(i, o, D, 5), edges=A),
    "PNAConv": Case(_pna, edges=A),
    "PPFConv": Case(lambda i, o: pyg.PPFConv(mlp(i + 4, o), mlp(o, o)), rows=("pos", "normal")),
    "PointGNNConv": Case(lambda i, o: pyg.PointGNNConv(mlp(i, 3), mlp(i + 3, o), mlp(o, i)), rows=("pos",), keeps_width=True),
    "PointNetConv": Case(lambda i, o: pyg.PointNetConv(mlp(i + 3, o), mlp(o, o)), rows=("pos",)),
    "PointTransformerConv": Case(lambda i, o: pyg.PointTransformerConv(i, o), rows=("pos",)),
    "RGATConv": Case(lambda i, o: pyg.RGATConv(i, o, R, edge_dim=D), edges=T + A),
    "RGCNConv": Case(lambda i, o: pyg.RGCNConv(i, o, R), edges=T),
    "RGCNConv of blocks": Case(lambda i, o: pyg.RGCNConv(i, o, R, num_blocks=2, aggr="sum"), edges=T),
    "ResGatedGraphConv": Case(lambda i, o: pyg.ResGatedGraphConv(i, o, edge_dim=D), edges=A),
    "SAGEConv": Case(lambda i, o: pyg.SAGEConv(i, o)),
    "SAGEConv max, projected": Case(lambda i, o: pyg.SAGEConv(i, o, "max", project=True, normalize=True)),
    "SAGEConv of several": Case(lambda i, o: pyg.SAGEConv(i, o, ["mean", "max", "softmax"])),
    "SAGEConv median": Case(lambda i, o: pyg.SAGEConv(i, o, "median")),
    "SAGEConv of more": Case(lambda i, o: pyg.SAGEConv(i, o, ["std", "powermean", "mul", "median"])),
    "SGConv": Case(lambda i, o: pyg.SGConv(i, o, K=2), hops=2),
    "SSGConv": Case(lambda i, o: pyg.SSGConv(i, o, 0.1, K=2), hops=2),
    "SignedConv": Case(lambda i, o: pyg.SignedConv(i, o // 2, True), signed=True),
    "SignedConv second": Case(lambda i, o: pyg.SignedConv(i // 2, o // 2, False), signed=True),
    "SimpleConv": Case(lambda i, o: pyg.SimpleConv(), edges=W, keeps_width=True),
    "SimpleConv with loops": Case(lambda i, o: pyg.SimpleConv("mean", "self_loop"), keeps_width=True),
    "SuperGATConv": Case(lambda i, o: pyg.SuperGATConv(i, o // 2, heads=2).eval()),
    "TAGConv": Case(lambda i, o: pyg.TAGConv(i, o, K=2), edges=W, hops=2),
    "TransformerConv": Case(lambda i, o: pyg.TransformerConv(i, o // 2, heads=2, beta=True, edge_dim=D), edges=A),
    "WLConvContinuous": Case(lambda i, o: pyg.WLConvContinuous(), edges=W, keeps_width=True),
}  # fmt: skip


NAMES = sorted(CASES)


def words_of(value: Any) -> str:
    """Id of a test's parameter, which may be a list of layers."""
    if isinstance(value, list):
        return "all layers" if value == NAMES else f"{value[0]} and others"
    return str(value)
