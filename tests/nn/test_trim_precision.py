"""Law of trimmed models under autocast: outputs and gradients are as close to those of float64 as the plain model's are."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from trimmed import WIDTH, batch_of, graph

import salientpp

LAYERS = {
    "GATConv": lambda o: pyg.GATConv(WIDTH, o // 2, heads=2),
    "GATConv of one head": lambda o: pyg.GATConv(WIDTH, o),
    "GATv2Conv": lambda o: pyg.GATv2Conv(WIDTH, o // 2, heads=2),
    "TransformerConv": lambda o: pyg.TransformerConv(WIDTH, o // 2, heads=2),
    "GCNConv": lambda o: pyg.GCNConv(WIDTH, o),
    "GCNConv without normalisation": lambda o: pyg.GCNConv(WIDTH, o, normalize=False),
    "SAGEConv": lambda o: pyg.SAGEConv(WIDTH, o),
    "SAGEConv max": lambda o: pyg.SAGEConv(WIDTH, o, "max"),
    "GraphConv": lambda o: pyg.GraphConv(WIDTH, o),
    "GINConv": lambda o: pyg.GINConv(pyg.Linear(WIDTH, o)),
}


class Network(nn.Module):
    def __init__(self, layer: str, columns: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LAYERS[layer](WIDTH), LAYERS[layer](columns)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x, edge_index).tanh(), edge_index)


def step(model: nn.Module, batch, kind: torch.dtype | None) -> dict[str, Tensor]:
    x = batch.x.detach().clone().to(torch.float64 if kind is None else torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
        out = model(x, batch.edge_index)[: batch.batch_size]
    out = out.to(x.dtype)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(x.dtype)
    ((out * weight).sum() + (out.square() * weight.sin()).sum()).backward()
    return {"out": out.detach(), "x": x.grad, **{name: value.grad for name, value in model.named_parameters()}}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [2, 4 * WIDTH])
@pytest.mark.parametrize("layer", LAYERS)
def test_autocast_costs_no_more_precision_than_in_the_plain_model(layer, columns, kind):
    batch = batch_of(graph(1, num_edges=3000), [8, 6])
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(5):
        torch.manual_seed(seed)
        model = Network(layer, columns)
        right = step(copy.deepcopy(model).double(), batch, None)
        plain = step(copy.deepcopy(model), batch, kind)
        trimmed = step(salientpp.nn.trim(copy.deepcopy(model)), batch, kind)
        for name, value in right.items():
            of = [float((found[name].double() - value).norm() / (1e-3 + value.norm())) for found in (plain, trimmed)]
            errors.setdefault(name, []).append((of[0], of[1]))
    for name, pairs in errors.items():
        plain, trimmed = map(statistics.median, zip(*pairs))
        assert trimmed < 1.6 * plain + torch.finfo(kind).eps / 2, (
            f"{name}: {trimmed} where the plain model's error is {plain}"
        )
