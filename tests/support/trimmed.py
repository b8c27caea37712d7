"""Compares a model trimmed by ``salientpp.nn.trim`` with the plain model, on the same batch."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn as pyg
from pyg_layers import with_columns
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

import salientpp

WIDTH = 6
FANOUTS = [4, 3, 2]
#: Attributes of a batch whose gradients are compared, where present.
LEARNT = ("x", "x_0", "pos", "edge_attr", "edge_weight")


def graph(seed: int = 0, num_vertices: int = 300, num_edges: int = 700) -> Data:
    """Graph with repeated edges, self-loops and, at the end, isolated vertices.

    It has few edges, so that batches end before they reach the whole graph.
    """
    print(f"seed {seed}")
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(num_vertices - 20, (2, num_edges), generator=draw)
    ends[0, :20] = ends[1, :20]
    ends[:, 20:60] = ends[:, 60:100]
    data = with_columns(ends, num_vertices, WIDTH, draw)
    data.y = torch.randint(3, (num_vertices,), generator=draw)
    data.time = torch.randint(10, (num_vertices,), generator=draw)
    return data


def seeds_of(data: Data) -> Tensor:
    """Seeds, the last of which is isolated."""
    return torch.cat([torch.arange(10, 22), torch.tensor([data.num_nodes - 1])])


def loader(data: Any, num_neighbors: Any = None, **options: Any) -> Any:
    options = {"input_nodes": seeds_of(data), "batch_size": 13, **options} if isinstance(data, Data) else options
    options = {"seed": 5, **options}
    return salientpp.NeighborLoader(data, num_neighbors or FANOUTS, **options)


def batch_of(data: Any, num_neighbors: Any = None, **options: Any) -> Any:
    """The first batch of a loader, drawn while a model of this process is trimmed."""
    salientpp.nn.trim(torch.nn.ModuleList([pyg.SimpleConv()]))  # MessagePassing() changes its own class
    return next(iter(loader(data, num_neighbors, **options)))


def within(batch: Any, hops: int) -> int:
    """Number of vertices of a batch within ``hops`` hops of the seeds."""
    counts = list(itertools.accumulate(map(int, batch.num_sampled_nodes)))
    return counts[min(hops, len(counts) - 1)]


@dataclass
class Step:
    """Result of a training step.

    It holds the seeds' rows, gradients and buffers by name, and the number of rows of each layer's output in call order.
    """

    out: Tensor
    tensors: dict[str, Tensor | None]
    rows: list[Any] = field(default_factory=list)
    num_out: int = 0


Call = Callable[[torch.nn.Module, Any], Tensor]


def call_x(model: torch.nn.Module, batch: Any) -> Tensor:
    return model(batch.x, batch.edge_index)


def leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for number, store in enumerate(batch.stores):
        for name in LEARNT:
            if name in store:
                store[name] = store[name].detach().clone().requires_grad_()
                yield f"{number} {name}", store[name]


def step(model: torch.nn.Module, batch: Any, call: Call = call_x, seeds: int | None = None) -> Step:
    """Runs a forward and a backward pass."""
    batch = copy.copy(batch)
    learnt = dict(leaves(batch))
    rows: list[Any] = []
    hooks = [module.register_forward_hook(lambda _, __, out: rows.append(_rows(out))) for module in layers_of(model)]
    try:
        whole = call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    out = whole[: batch.batch_size if seeds is None else seeds]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = (out * weight).sum() + (out.square() * weight.sin()).sum()
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    tensors = {name: value.grad for name, value in [*model.named_parameters(), *learnt.items()]}
    tensors |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return Step(out.detach(), tensors, rows, whole.size(0))


def layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Message-passing layers that are not inside another one."""
    if isinstance(module, MessagePassing):
        yield module
    else:
        for child in module.children():
            yield from layers_of(child)


def _rows(out: Any) -> Any:
    if isinstance(out, dict):
        return {name: value.size(0) for name, value in out.items()}
    return out.size(0) if isinstance(out, Tensor) else _rows(out[0])


def compare(
    model: torch.nn.Module, batch: Any, call: Call = call_x, *, seeds: int | None = None, **options: Any
) -> tuple[Step, Step]:
    """Steps of the plain and of the trimmed model; asserts that seeds' rows, gradients and buffers are the same."""
    plain, trimmed = model, salientpp.nn.trim(copy.deepcopy(model), **options)
    expected, got = step(plain, batch, call, seeds), step(trimmed, batch, call, seeds)
    got.rows = got.rows[len(got.rows) - len(expected.rows) :]  # drops the rows of the pass that finds the plan
    assert_same(expected, got)
    return expected, got


def assert_same(expected: Step, got: Step, tolerance: float = 1e-10) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(got.out, expected.out, **close)
    assert expected.tensors.keys() == got.tensors.keys()
    for name, value in expected.tensors.items():
        other = got.tensors[name]
        if value is None or other is None:  # an optimizer skips parameters without a gradient
            assert value is None and other is None, f"{name}: {value} in the plain model, {other} in the trimmed one"
        else:
            torch.testing.assert_close(other, value, msg=lambda text, name=name: f"{name}: {text}", **close)


class Between(nn.Module):
    """Three layers, and a function that calls them."""

    def __init__(self, function: Callable[[Between, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.first, self.second = pyg.SAGEConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH)
        self.last = pyg.GATConv(WIDTH, WIDTH)
        self.same = pyg.GraphConv(WIDTH, WIDTH)
        self.lin, self.mixed = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.lstm_cell = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(1, WIDTH))
        self.gate = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(self, x, edge_index)


class TwoLayers(nn.Module):
    """Two layers, and a function of the model, the rows between them and further arguments."""

    def __init__(self, between: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = pyg.SAGEConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH)
        self.between = between
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, edge_index: Tensor, *given: Any) -> Any:
        return self.last(self.between(self, self.first(x, edge_index), *given), edge_index)


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


def by_chance(m: nn.Module, h: Tensor) -> Tensor:
    return centred(h) if random.random() < 0.5 else h


def network(norm: str | None = None) -> nn.Module:
    """A GCN of three layers."""
    torch.manual_seed(1)
    return pyg.GCN(WIDTH, 8, 3, 4, norm=norm).double()
