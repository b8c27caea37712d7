"""Trimmed models whose layers are called again in the backward, that serve several loaders, or whose layers get unusual arguments."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import random_hetero
from torch import nn
from trimmed import WIDTH, assert_same, batch_of, call_x, compare, graph, loader, step, within

import salientpp


@pytest.fixture(scope="module")
def data():
    return graph(9)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def test_reversible_layers_are_exact(batch):
    torch.manual_seed(1)
    model = Layers(
        pyg.SAGEConv(WIDTH, 8),
        pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2),
        pyg.GroupAddRev(pyg.GCNConv(4, 4), num_groups=2),
        pyg.GATConv(8, 4),
    )
    _, got = compare(model.double(), batch)
    assert got.rows[0] == batch.num_nodes and got.rows[-1] == batch.batch_size


@pytest.mark.parametrize("block", ["res+", "res", "dense", "plain"])
def test_deep_layers_are_exact(block, batch):
    torch.manual_seed(1)
    width = 2 * WIDTH if block == "dense" else WIDTH
    model = Layers(
        pyg.SAGEConv(WIDTH, WIDTH),
        pyg.DeepGCNLayer(pyg.GENConv(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), block=block),
        pyg.GATConv(width, 4),
    )
    compare(model.double(), batch)


def test_deep_layers_with_checkpoints_are_exact(batch):
    torch.manual_seed(1)
    layer = pyg.DeepGCNLayer(pyg.SAGEConv(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), ckpt_grad=True)
    model = Layers(pyg.SAGEConv(WIDTH, WIDTH), layer, pyg.GATConv(WIDTH, 4)).double()
    compare(model, batch)


def test_a_pyg_sequential_is_exact(batch):
    torch.manual_seed(1)
    model = pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(WIDTH, 8), "x, edge_index -> a"),
            nn.ReLU(inplace=True),
            (pyg.SAGEConv(8, 8), "a, edge_index -> b"),
            (lambda a, b: [a, b], "a, b -> both"),
            (pyg.JumpingKnowledge("cat", 8, 2), "both -> c"),
            (pyg.GATConv(16, 4), "c, edge_index -> d"),
        ],
    )
    _, got = compare(model.double(), batch)
    assert got.rows == [within(batch, hops) for hops in (2, 1, 0)]


def test_targets_may_be_given_as_none(batch):
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = pyg.SAGEConv(WIDTH, 8, root_weight=False), pyg.GATv2Conv(8, 4)

        def forward(self, x, e):
            return self.last(self.first((x, None), e).relu(), e)

    compare(Pairs().double(), batch)


def test_layers_with_rows_of_sources_and_of_targets_are_exact(batch):
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.lin = nn.Linear(WIDTH, 8)
            self.layers = nn.ModuleList(
                [pyg.GATConv((8, WIDTH), 4, heads=2), pyg.SAGEConv((8, WIDTH), 8), pyg.GraphConv((8, 8), 4)]
            )

        def forward(self, x, e):
            h = self.layers[0]((self.lin(x), x), e)
            k = self.layers[1]((h, x), e)
            return self.layers[2]((k, h), e)

    _, got = compare(Pairs().double(), batch)
    assert got.rows[-1] == batch.batch_size


@pytest.mark.parametrize("kind", [pyg.GCN, pyg.GAT])
def test_one_model_may_serve_several_loaders(kind, data):
    torch.manual_seed(1)
    model = kind(WIDTH, 8, 3, 4).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    links = salientpp.LinkNeighborLoader(
        data, [3, 2], edge_label_index=data.edge_index[:, :9], neg_sampling_ratio=1.0, batch_size=9, seed=1
    )
    loaders = [
        loader(data),
        loader(data, [2]),
        links,
        loader(data, [2] * 5, batch_size=3),
        loader(data, [-1, -1, -1], disjoint=True),
    ]
    for _ in range(2):
        for each in loaders:
            given = next(iter(each))
            seeds = within(given, 0)
            expected, got = step(model, given, call_x, seeds), step(trimmed, given, call_x, seeds)
            assert_same(expected, got)
            assert got.num_out == seeds


def test_a_model_may_use_some_of_the_types_and_relations():
    data = random_hetero(150)
    draw = torch.Generator().manual_seed(1)
    for store in data.node_stores:
        store.x = torch.randn(store.num_nodes, WIDTH, generator=draw).double()
    batch = batch_of(data, [3, 2, 2], input_nodes=("paper", torch.arange(7)), batch_size=7)
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.cites = nn.ModuleList([pyg.GCNConv(WIDTH, WIDTH), pyg.GATConv(WIDTH, WIDTH)])
            self.writes = pyg.SAGEConv((WIDTH, WIDTH), WIDTH)

        def forward(self, papers, authors, cites, writes):
            h = self.writes((authors, papers), writes).relu()
            for layer in self.cites:
                h = layer(h, cites) + h
            return h

    call = lambda m, b: m(b["paper"].x, b["author"].x, b[cites].edge_index, b[writes].edge_index)  # noqa: E731
    _, got = compare(Some().double(), batch, call, seeds=7)
    assert got.num_out < batch["paper"].num_nodes
    compare(
        pyg.HeteroConv({cites: pyg.SAGEConv(WIDTH, 4)}).double(),
        batch,
        lambda m, b: m({"paper": b["paper"].x}, {cites: b[cites].edge_index})["paper"],
        seeds=7,
    )
