"""A graph and models of one layer, with which tests of layers over ranks compare outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyg_layers import Case, with_columns
from torch import Tensor
from torch.nn import Linear
from torch_geometric.data import Data

F, H = 6, 12  # columns of x and of a layer's output
N = 41


def graph() -> Data:
    """Makes a directed graph with self-loops, repeated edges and vertices without edges."""
    draw = torch.Generator().manual_seed(5)
    source = (torch.rand(170, generator=draw).square() * N).long()
    target = torch.randint(N - 2, (170,), generator=draw)
    edge_index = torch.stack([source, target])
    edge_index[:, :5] = edge_index[:1, :5]
    edge_index[:, 5:9] = edge_index[:, 9:13]
    data = with_columns(edge_index, N, F, draw)
    # Rank 0, and the last of four ranks, have no such vertices.
    data.train_mask = (torch.rand(N, generator=draw) < 0.5) & (torch.arange(N) >= 8) & (torch.arange(N) < 30)
    return data


class Called(torch.nn.Module):
    """Layer with its way of being called, after a layer on single rows, so that gradients travel between ranks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = Linear(F, F)
        self.conv = case.make(F, H)
        self.case = case
        self.double()

    def forward(self, x: Tensor, g: Any) -> Tensor:
        return self.case.call(self.conv, self.before(x), g)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def differences(pairs: Mapping[str, tuple[Tensor, Tensor]], name: str, rank: int, size: int) -> list[str]:
    """Describes the pairs of a layer's tensors that differ by more than 1e-10, or in their shapes."""
    wrong = []
    for what, (a, b) in pairs.items():
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-10, atol=1e-10):
            off = float((a - b).abs().max()) if a.shape == b.shape else f"{a.shape} {b.shape}"
            wrong.append(f"{name}: {what} is off by {off} on rank {rank} of {size}")
    return wrong
