"""Laws of full-graph training, layer by layer: on any number of ranks, outputs and all gradients are those of one process with the whole graph.

The table of layers is complete: every class of ``torch_geometric.nn.conv`` either is compared here or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.utils import degree

from salientpp.fullgraph import distribute, local, loss_mean
from salientpp.fullgraph.layers import REFUSED, WORKS, refusals

F, H, D, R = 6, 4, 3, 3  # columns of x, of a layer's output, of an edge's attributes; types of edges
N = 41

#: Very uneven blocks, with empty ones; on several ranks some have no training vertices.
OFFSETS = {1: [0, N], 2: [0, 7, N], 3: [0, 0, 30, N], 4: [0, 3, 3, 30, N]}


def graph() -> Data:
    """Directed, with self-loops, repeated edges and vertices without edges."""
    draw = torch.Generator().manual_seed(5)
    source = (torch.rand(170, generator=draw).square() * N).long()
    target = torch.randint(N - 2, (170,), generator=draw)
    edge_index = torch.stack([source, target])
    edge_index[:, :5] = edge_index[:1, :5]
    edge_index[:, 5:9] = edge_index[:, 9:13]
    normal = torch.randn(N, 3, generator=draw).double()
    return Data(
        edge_index=edge_index,
        x=torch.randn(N, F, generator=draw).double(),
        x_0=torch.randn(N, F, generator=draw).double(),
        pos=torch.randn(N, 3, generator=draw).double(),
        normal=normal / normal.norm(dim=1, keepdim=True),
        node_type=torch.randint(2, (N,), generator=draw),
        edge_attr=torch.rand(170, D, generator=draw).double(),
        edge_weight=torch.rand(170, generator=draw).double() + 0.1,
        edge_type=torch.randint(R, (170,), generator=draw),
        # None on rank 0, and on the last rank of four.
        train_mask=(torch.rand(N, generator=draw) < 0.5) & (torch.arange(N) >= 8) & (torch.arange(N) < 30),
    )


def plain(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index)


def weighted(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index, g.edge_weight)


def attributed(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index, g.edge_attr)


def typed(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index, g.edge_type)


def first_rows(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.x_0, g.edge_index)


def placed(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.pos, g.edge_index)


def ends(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.pos, g.normal, g.edge_index)


def halves(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index[:, g.edge_type == 0], g.edge_index[:, g.edge_type != 0])


def layered(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(torch.stack([x, x.sin()], 1), g.edge_index)


def heterogeneous(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index, g.node_type, g.edge_type, g.edge_attr)


def both(conv: torch.nn.Module, x: Tensor, g: Any) -> Tensor:
    return conv(x, g.edge_index, g.edge_type, g.edge_attr)


def mlp(columns: int, out: int = H) -> Sequential:
    return Sequential(Linear(columns, 8), ReLU(), Linear(8, out))


def in_degrees() -> Tensor:
    return torch.bincount(degree(graph().edge_index[1], N).long())


Call = Callable[[torch.nn.Module, Tensor, Any], Tensor]

#: Name -> (layer, how it is called); a layer stands here once for each way that it has of looking at other vertices.
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], Call]] = {
    "AGNNConv": (lambda: pyg.AGNNConv(), plain),
    "ARMAConv": (lambda: pyg.ARMAConv(F, H, num_stacks=2, num_layers=2), weighted),
    "AntiSymmetricConv": (lambda: pyg.AntiSymmetricConv(F, num_iters=2), plain),
    "APPNP": (lambda: pyg.APPNP(3, 0.1), plain),
    "APPNP weighted": (lambda: pyg.APPNP(2, 0.1, add_self_loops=False), weighted),
    "CGConv": (lambda: pyg.CGConv(F, D), attributed),
    "ClusterGCNConv": (lambda: pyg.ClusterGCNConv(F, H, diag_lambda=0.5), plain),
    "DNAConv": (lambda: pyg.DNAConv(F, heads=2), layered),
    "EGConv": (lambda: pyg.EGConv(F, 8, ["symnorm", "max"]), plain),
    "EGConv mean": (lambda: pyg.EGConv(F, 8, ["mean", "std"]), plain),
    "EdgeConv": (lambda: pyg.EdgeConv(mlp(2 * F)), plain),
    "FAConv": (lambda: pyg.FAConv(F), first_rows),
    "FastRGCNConv": (lambda: pyg.FastRGCNConv(F, H, R), typed),
    "FeaStConv": (lambda: pyg.FeaStConv(F, H, heads=2), plain),
    "FiLMConv": (lambda: pyg.FiLMConv(F, H, R), typed),
    "GATConv": (lambda: pyg.GATConv(F, H, heads=2, residual=True), plain),
    "GATConv with attributes": (lambda: pyg.GATConv(F, H, edge_dim=D), attributed),
    "GATv2Conv": (lambda: pyg.GATv2Conv(F, H, heads=2, share_weights=True), plain),
    "GATv2Conv with attributes": (lambda: pyg.GATv2Conv(F, H, edge_dim=D, concat=False), attributed),
    "GCN2Conv": (lambda: pyg.GCN2Conv(F, 0.2), first_rows),
    "GCNConv": (lambda: pyg.GCNConv(F, H), plain),
    "GCNConv weighted": (lambda: pyg.GCNConv(F, H, improved=True), weighted),
    "GCNConv without normalisation": (lambda: pyg.GCNConv(F, H, normalize=False), weighted),
    "GCNConv cached": (lambda: pyg.GCNConv(F, H, cached=True), plain),
    "GENConv": (lambda: pyg.GENConv(F, H, edge_dim=D), attributed),
    "GINConv": (lambda: pyg.GINConv(mlp(F), train_eps=True), plain),
    "GINEConv": (lambda: pyg.GINEConv(mlp(F), edge_dim=D), attributed),
    "GMMConv": (lambda: pyg.GMMConv(F, H, D, 2), attributed),
    "GMMConv separate": (lambda: pyg.GMMConv(F, H, D, 2, separate_gaussians=True), attributed),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(8, 2), weighted),
    "GeneralConv": (lambda: pyg.GeneralConv(F, H, in_edge_channels=D, attention=True), attributed),
    "GraphConv": (lambda: pyg.GraphConv(F, H), weighted),
    "GraphConv mean": (lambda: pyg.GraphConv(F, H, aggr="mean"), weighted),
    "GraphConv max": (lambda: pyg.GraphConv(F, H, aggr="max"), plain),
    "HEATConv": (lambda: pyg.HEATConv(F, H, 2, R, 3, D, 4), heterogeneous),
    "LEConv": (lambda: pyg.LEConv(F, H), weighted),
    "LGConv": (lambda: pyg.LGConv(), weighted),
    "MFConv": (lambda: pyg.MFConv(F, H, 4), plain),
    "MixHopConv": (lambda: pyg.MixHopConv(F, H, [0, 1, 2]), plain),
    "NNConv": (lambda: pyg.NNConv(F, H, mlp(D, F * H)), attributed),
    "PDNConv": (lambda: pyg.PDNConv(F, H, D, 5), attributed),
    "PNAConv": (lambda: pyg.PNAConv(F, H, ["mean", "max", "std"], ["identity", "amplification"], in_degrees(), edge_dim=D), attributed),
    "PPFConv": (lambda: pyg.PPFConv(mlp(F + 4), mlp(H)), ends),
    "PointGNNConv": (lambda: pyg.PointGNNConv(mlp(F, 3), mlp(F + 3), mlp(H, F)), placed),
    "PointNetConv": (lambda: pyg.PointNetConv(mlp(F + 3), mlp(H)), placed),
    "PointTransformerConv": (lambda: pyg.PointTransformerConv(F, H), placed),
    "RGATConv": (lambda: pyg.RGATConv(F, H, R, edge_dim=D), both),
    "RGCNConv": (lambda: pyg.RGCNConv(F, H, R), typed),
    "RGCNConv of blocks": (lambda: pyg.RGCNConv(F, 6, R, num_blocks=2, aggr="sum"), typed),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(F, H, edge_dim=D), attributed),
    "SAGEConv": (lambda: pyg.SAGEConv(F, H), plain),
    "SAGEConv max, projected": (lambda: pyg.SAGEConv(F, H, "max", project=True, normalize=True), plain),
    "SAGEConv of several": (lambda: pyg.SAGEConv(F, H, ["mean", "max", "softmax"]), plain),
    "SAGEConv median": (lambda: pyg.SAGEConv(F, H, "median"), plain),
    "SAGEConv of more": (lambda: pyg.SAGEConv(F, H, ["std", "powermean", "mul", "median"]), plain),
    "SGConv": (lambda: pyg.SGConv(F, H, K=2), plain),
    "SSGConv": (lambda: pyg.SSGConv(F, H, 0.1, K=2), plain),
    "SignedConv": (lambda: pyg.SignedConv(F, H, True), halves),
    "SimpleConv": (lambda: pyg.SimpleConv(), weighted),
    "SimpleConv with loops": (lambda: pyg.SimpleConv("mean", "self_loop"), plain),
    "SuperGATConv": (lambda: pyg.SuperGATConv(F, H, heads=2).eval(), plain),
    "TAGConv": (lambda: pyg.TAGConv(F, H, K=2), weighted),
    "TransformerConv": (lambda: pyg.TransformerConv(F, H, heads=2, beta=True, edge_dim=D), attributed),
    "WLConvContinuous": (lambda: pyg.WLConvContinuous(), weighted),
}  # fmt: skip


class Called(torch.nn.Module):
    """A layer with its way of being called, twice over rows of one width where it gives these, so that gradients pass between ranks."""

    def __init__(self, make: Callable[[], torch.nn.Module], call: Call) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = Linear(F, F)
        self.conv = make()
        self.call = call
        self.double()

    def forward(self, x: Tensor, g: Any) -> Tensor:
        return self.call(self.conv, self.before(x), g)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def compare(rank: int, size: int, names: list[str]) -> list[str]:
    """What differs from one process with the whole graph, in words."""
    torch_geometric.backend.use_segment_matmul = False  # some builds of pyg-lib lack it
    data, wrong = graph(), []
    part = local(data, offsets=OFFSETS[size])
    begin, end = OFFSETS[size][rank : rank + 2]
    for name in names:
        make, call = LAYERS[name]
        try:
            whole = Called(make, call)
            whole.conv.train(whole.conv.training)
            x = data.x.clone().requires_grad_()
            expected = whole(x, data)
            target = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64).view(expected[0].shape)
            (expected[data.train_mask] - target).square().flatten(1).sum(1).mean().backward()
            torch.manual_seed(rank)  # other values on other ranks, but for rank 0's
            mine = Called(make, call)
            if rank:
                with torch.no_grad():
                    for parameter in mine.parameters():
                        parameter.add_(1)
            model = distribute(mine, part)
            own = part.x.clone().requires_grad_()
            out = model(own, part)
            losses = (out[part.train_mask] - target).square().flatten(1).sum(1)
            loss_mean(losses, part).backward()
            of = slice(end - begin)  # a rank without vertices has a row all the same
            pairs = {"output": (expected[begin:end], out[of]), "input": (x.grad[begin:end], own.grad[of])}
            found = gradients(mine)
            pairs.update({key: (value, found[key]) for key, value in gradients(whole).items()})
            for what, (a, b) in pairs.items():
                if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-10, atol=1e-10):
                    off = float((a - b).abs().max()) if a.shape == b.shape else f"{a.shape} {b.shape}"
                    wrong.append(f"{name}: {what} is off by {off} on rank {rank} of {size}")
        except Exception as error:
            if type(error).__name__ == "RankFailure":
                raise
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            raise RuntimeError("; ".join(wrong)) from error
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_layer_gives_what_it_gives_on_the_whole_graph(size):
    wrong = distributed.run(compare, size, size, sorted(LAYERS))
    assert [words for each in wrong for words in each] == []


def test_every_layer_of_pyg_is_compared_or_refused():
    known = {name.split()[0] for name in LAYERS}
    assert known == set(WORKS)
    assert set(pyg.conv.classes) - {"MessagePassing"} == known | set(REFUSED)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pyg.ChebConv(F, H, 2), "ChebConv rescales by the largest weight"),
        (lambda: Sequential(Linear(F, F), pyg.GraphNorm(F)), r"GraphNorm \(1\) looks at all vertices"),
        (lambda: pyg.LayerNorm(F), "LayerNorm looks at all vertices of the graph at once; mode='node' does not"),
        (lambda: pyg.SAGEConv(-1, H), "has parameters without a shape"),
        (lambda: pyg.SAGEConv(F, H, "lstm"), "depends on the order of the edges"),
        (lambda: pyg.SAGEConv(F, H, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: pyg.SuperGATConv(F, H), "it works in evaluation"),
        (lambda: pyg.SumAggregation(), "SumAggregation looks at all vertices of the graph at once, as a layer"),
    ],
)
def test_what_looks_further_is_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        distribute(make(), local(graph()))


def test_norms_of_single_rows_and_of_batches_are_not_refused():
    model = Sequential(pyg.LayerNorm(F, mode="node"), pyg.BatchNorm(F), torch.nn.LayerNorm(F))
    assert list(refusals(model)) == []
