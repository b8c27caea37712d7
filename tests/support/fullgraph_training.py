"""A network and its training on the whole graph, in one process and on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from torch_geometric.data import Data

import salientpp
from salientpp.fullgraph import local, loss_mean

CLASSES, WIDTH = 7, 6


def data_of(num_vertices: int = 120, directed: bool = True) -> Data:
    data = random_data(num_vertices, 5 * num_vertices, directed=directed)
    draw = torch.Generator().manual_seed(1)
    data.x = torch.randn(num_vertices, WIDTH, generator=draw).double() + F.one_hot(data.y % WIDTH, WIDTH)
    data.edge_weight = torch.rand(data.num_edges, generator=draw).double() + 0.1
    return data


def network(name: str, columns: int = WIDTH, classes: int = CLASSES) -> torch.nn.Module:
    torch.manual_seed(0)
    made = {
        "sage": lambda: pyg.GraphSAGE(columns, 16, 3, classes, norm="batch_norm", jk="cat"),
        "gat": lambda: pyg.GAT(columns, 16, 3, classes, heads=2),
        "gcn": lambda: pyg.GCN(columns, 16, 2, classes),
        "weighted gcn": lambda: pyg.GCN(columns, 16, 2, classes),
        "gin": lambda: pyg.GIN(columns, 16, 2, classes),
        "sgc": lambda: pyg.SGConv(columns, classes, K=2),
        "appnp": lambda: pyg.Sequential(
            "x, edge_index",
            [(torch.nn.Linear(columns, classes), "x -> x"), (pyg.APPNP(3, 0.1), "x, edge_index -> x")],
        ),
        "max": lambda: pyg.GraphSAGE(columns, 16, 2, classes, aggr="max"),
    }
    return made[name]().double()


def train_alone(model: torch.nn.Module, data: Data, epochs: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def train(model: Any, part: Any, epochs: int, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(part.x, part.edge_index)
        mask = part.train_mask
        loss = loss_mean(F.cross_entropy(out[mask], part.y[mask], reduction="none"), part)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def classes(rank: int, root: str) -> int:
    return local(salientpp.load(root)).num_classes
