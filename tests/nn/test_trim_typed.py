"""Trimmed models on graphs with several types."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import random_hetero
from rare import rare, some_of
from torch import nn
from torch_geometric.data import HeteroData
from trimmed import WIDTH, assert_same, batch_of, compare, graph, step, within

import salientpp

SEEDS = 9


def typed_graph(seed: int = 0) -> HeteroData:
    """Makes a graph with edges into every type."""
    print(f"seed {seed}")
    data = random_hetero(150, seed=seed, paper=90, author=70, venue=20)
    data["paper", "in", "venue"].edge_index = data["venue", "prints", "paper"].edge_index.flip(0)
    draw = torch.Generator().manual_seed(seed)
    for store in data.node_stores:
        store.x = torch.randn(store.num_nodes, WIDTH, generator=draw).double()
    for store in data.edge_stores:
        store.edge_attr = torch.randn(store.num_edges, 3, generator=draw).double()
        store.edge_weight = torch.rand(store.num_edges, generator=draw).double() + 0.1
        store.pop("weight", None)
    return data


@pytest.fixture(scope="module")
def data():
    return typed_graph()


@pytest.fixture(scope="module")
def batch(data):
    return typed_batch(data)


def typed_batch(data, num_neighbors=(3, 2, 2), **options):
    return batch_of(
        data, list(num_neighbors), **{"input_nodes": ("paper", torch.arange(SEEDS)), "batch_size": SEEDS, **options}
    )


def counts(batch, name: str) -> list[int]:
    return list(itertools.accumulate(map(int, batch[name].num_sampled_nodes)))


def call(model, batch):
    return model(batch.x_dict, batch.edge_index_dict)


CONVS = {
    "SAGE": lambda: pyg.SAGEConv((-1, -1), WIDTH),
    "GAT": lambda: pyg.GATConv((-1, -1), WIDTH // 2, heads=2, add_self_loops=False),
    "GATv2": lambda: pyg.GATv2Conv((-1, -1), WIDTH // 2, heads=2, add_self_loops=False),
    "Graph": lambda: pyg.GraphConv((-1, -1), WIDTH),
    "Transformer": lambda: pyg.TransformerConv((-1, -1), WIDTH // 2, heads=2),
    "SAGE max": lambda: pyg.SAGEConv((-1, -1), WIDTH, aggr="max"),
    "SAGE of several": lambda: pyg.SAGEConv((-1, -1), WIDTH, aggr=["mean", "std"]),
    "ResGated": lambda: pyg.ResGatedGraphConv((-1, -1), WIDTH),
}


AGGREGATIONS = ("sum", "mean", "max", "cat")


class Hetero(nn.Module):
    """Layers of HeteroConv, with one layer for each relation."""

    def __init__(self, data: HeteroData, make, aggr: str, number: int, between=None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            pyg.HeteroConv({relation: make() for relation in data.edge_types}, aggr) for _ in range(number)
        )
        self.between = between or nn.Identity()

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
            if layer is not self.layers[-1]:
                x = self.between({name: rows.flatten(1).tanh() for name, rows in x.items()})
        return x["paper"]


def initialised(model, batch, call=call):
    """Initialises lazy parameters."""
    model = model.double()
    with torch.no_grad():
        call(model, batch)
    return model


def cut_rows(rows, batch, hops: int) -> bool:
    """Returns True if the outputs of single layers have only the rows of their type within this number of hops."""
    return all(number in {counts(batch, name)[min(hops, 3)] for name in batch.node_types} for number in rows)


def forms() -> Iterator[Any]:
    """Yields (layer, aggregation, number of layers). Each layer has two aggregations with three layers, and one with two; the others are rare tests."""
    for (at, conv), (place, aggr), number in itertools.product(enumerate(CONVS), enumerate(AGGREGATIONS), (2, 3)):
        form = conv, aggr, number
        is_some = (at + place) % 2 == 0 if number == 3 else (at + place) % 4 == 1
        yield from [form] if is_some else rare(form)


@pytest.mark.parametrize(("conv", "aggr", "number"), [*forms()])
def test_hetero_conv_is_trimmed_for_every_type(conv, aggr, number, data, batch):
    model = initialised(Hetero(data, CONVS[conv], aggr, number), batch)
    _, got = compare(model, batch, call, seeds=SEEDS)
    relations = len(data.edge_types)
    assert len(got.rows) == relations * number
    for k in range(number):
        assert cut_rows(got.rows[k * relations : (k + 1) * relations], batch, number - 1 - k), k


@pytest.mark.parametrize("between", ["HeteroDictLinear", "HeteroLayerNorm", "ModuleDict"])
def test_modules_of_types_between_layers_are_exact(between, data, batch):
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = {"HeteroLayerNorm": nn.LayerNorm, "ModuleDict": lambda width: nn.Linear(width, width)}[between]
            self.all = nn.ModuleDict({name: make(WIDTH) for name in data.node_types})

        def forward(self, x):
            return {name: self.all[name](rows) for name, rows in x.items()}

    module = pyg.HeteroDictLinear(WIDTH, WIDTH, data.node_types) if between == "HeteroDictLinear" else Each()
    model = initialised(Hetero(data, CONVS["SAGE"], "sum", 2, module), batch)
    _, got = compare(model, batch, call, seeds=SEEDS)
    assert cut_rows(got.rows[: len(data.edge_types)], batch, 1)


def test_normalisations_of_a_type_see_all_its_rows(data, batch):
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ModuleDict({name: nn.BatchNorm1d(WIDTH) for name in data.node_types})

        def forward(self, x):
            return {name: self.all[name](rows) for name, rows in x.items()}

    model = Hetero(data, CONVS["SAGE"], "sum", 2, Each())
    model.eval()
    initialised(model, batch).train()
    compare(model, batch, call, seeds=SEEDS)


@pytest.mark.parametrize("name", ["GraphSAGE", "GAT", "GIN"])
def test_models_of_to_hetero_are_exact(name, data, batch):
    torch.manual_seed(1)
    made = {
        "GraphSAGE": lambda: pyg.GraphSAGE((-1, -1), WIDTH, 3, 4),
        "GAT": lambda: pyg.GAT((-1, -1), WIDTH, 3, 4, heads=2, add_self_loops=False),
        "GIN": lambda: pyg.GIN(WIDTH, WIDTH, 3, 4, norm=None),
    }[name]()
    model = pyg.to_hetero(made, data.metadata())
    model.eval()
    model = initialised(model, batch)
    _, got = compare(model, batch, lambda m, b: call(m, b)["paper"], seeds=SEEDS)
    pickle.loads(pickle.dumps(salientpp.nn.trim(model)))  # its class is made by torch.fx, and has no name to load it by
    relations = len(data.edge_types)
    assert cut_rows(got.rows[-relations:], batch, 0) and cut_rows(got.rows[:relations], batch, 2)


def test_attributes_of_edges_by_relation_are_exact(data, batch):
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                pyg.HeteroConv(
                    {
                        relation: pyg.GATConv(WIDTH, WIDTH, edge_dim=3, add_self_loops=False)
                        if relation[0] == "paper"
                        else pyg.TransformerConv(WIDTH, WIDTH, edge_dim=3)
                        for relation in data.edge_types
                    }
                )
                for _ in range(2)
            )

        def forward(self, x, edges, attributes):
            for layer in self.layers:
                x = {name: rows.tanh() for name, rows in layer(x, edges, edge_attr_dict=attributes).items()}
            return x["paper"]

    _, got = compare(
        Model().double(), batch, lambda m, b: m(b.x_dict, b.edge_index_dict, b.edge_attr_dict), seeds=SEEDS
    )
    assert cut_rows(got.rows[: len(data.edge_types)], batch, 1)


def test_han_is_exact(data, batch):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(pyg.HANConv(WIDTH, WIDTH, data.metadata(), heads=2) for _ in range(2))

        def forward(self, x, edges):
            for layer in self.layers:
                x = layer(x, edges)
            return x["paper"]

    compare(Model().double(), batch, call, seeds=SEEDS)


@pytest.mark.parametrize("make", [pyg.RGCNConv, pyg.FastRGCNConv])
def test_relations_in_one_list_of_edges_are_exact(make):
    batch = batch_of(graph(4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(make(WIDTH, WIDTH, 3, num_bases=2) for _ in range(3))

        def forward(self, x, edge_index, edge_type):
            for layer in self.layers:
                x = layer(x, edge_index, edge_type).relu()
            return x

    _, got = compare(Model().double(), batch, lambda m, b: m(b.x, b.edge_index, b.edge_type))
    assert got.rows == [within(batch, hops) for hops in (2, 1, 0)]


@pytest.mark.parametrize("seed", [1, *rare(2)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_neighbors": [2]},
        {"num_neighbors": [3, 2, 2, 2]},
        {"batch_size": 1},
        {"disjoint": True},
        {"replace": True},
        {"input_nodes": ("author", torch.arange(SEEDS))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_batches_of_all_kinds_are_exact(options, seed):
    data = typed_graph(seed)
    batch = typed_batch(data, **options)
    name = options.get("input_nodes", ["paper"])[0]

    class Model(Hetero):
        def forward(self, x, edges):
            for layer in self.layers:
                x = {name: rows.tanh() for name, rows in layer(x, edges).items()}
            return x[name]

    for conv in ("SAGE", "GAT", "GATv2", "Transformer"):
        compare(
            initialised(Model(data, CONVS[conv], "sum", 2), batch), batch, call, seeds=options.get("batch_size", SEEDS)
        )


def test_a_plan_holds_for_batches_without_some_types(data):
    salientpp.nn.trim(Hetero(data, CONVS["SAGE"], "sum", 1))
    loader = salientpp.NeighborLoader(data, [2, 1], input_nodes=("paper", torch.arange(60)), batch_size=1, seed=3)
    batches = list(loader)
    model = initialised(Hetero(data, CONVS["SAGE"], "sum", 2), batches[0])
    trimmed = salientpp.nn.trim(initialised(Hetero(data, CONVS["SAGE"], "sum", 2), batches[0]))
    sizes = set()
    for batch in batches:
        sizes.add(batch["venue"].num_nodes)
        expected, got = step(model, batch, call, 1), step(trimmed, batch, call, 1)
        got.rows = got.rows[-len(expected.rows) :]
        assert_same(expected, got)
        assert cut_rows(got.rows[-len(data.edge_types) :], batch, 0)
    assert 0 in sizes and len(sizes) > 1


def normed():
    return pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))


@pytest.mark.parametrize("number", [1, 2])
def test_norms_inside_layers_see_all_targets(number, data, batch):
    """The layers get pairs of rows, of sources and of targets."""
    _, got = compare(initialised(Hetero(data, normed, "sum", number), batch), batch, call, seeds=SEEDS)
    assert cut_rows(got.rows[-len(data.edge_types) :], batch, 0), "a comparison found a difference"


@pytest.mark.parametrize("has_targets", [True, False])
def test_a_norm_inside_a_layer_sees_all_targets_of_a_pair(has_targets):
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = normed(), normed()

        def forward(self, x, edge_index):
            h = self.first((x, x), edge_index)
            return self.last((h, h if has_targets else None), edge_index)

    batch = batch_of(graph())
    _, got = compare(Pairs().double(), batch)
    assert got.rows[-1] == within(batch, 0), "a comparison found a difference"


# --- self-loops between two types ------------------------------------------------------------------------------


class Bipartite(nn.Module):
    """A layer within the targets, after one from sources of another type that adds self-loops."""

    def __init__(self, make) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = make(), pyg.SAGEConv(WIDTH, 4)

    def forward(self, x, edges):
        h = self.first((x["source"], x["target"]), edges["source", "to", "target"]).tanh()
        return self.last(h, edges["target", "near", "target"])


LOOPS = {
    "GATConv": lambda: pyg.GATConv((WIDTH, WIDTH), WIDTH),
    "GATConv with heads": lambda: pyg.GATConv((WIDTH, WIDTH), WIDTH // 2, heads=2),
    "GATv2Conv": lambda: pyg.GATv2Conv((WIDTH, WIDTH), WIDTH),
}
SOME = [("GATConv", 30), ("GATConv with heads", 300), ("GATv2Conv", 900), ("GATv2Conv", 30)]
EVERY = [*itertools.product(LOOPS, (30, 300, 900))]


@pytest.mark.parametrize(("layer", "number"), some_of(SOME, EVERY))
def test_self_loops_between_two_types_are_pygs(layer, number):
    """PyG adds an edge from the source i to the target i as far as both exist."""
    draw = torch.Generator().manual_seed(number)
    data = HeteroData()
    for name, count in [("source", number), ("target", 300)]:
        data[name].x = torch.randn(count, WIDTH, generator=draw).double()
    between = torch.stack([torch.randint(number, (900,), generator=draw), torch.randint(300, (900,), generator=draw)])
    data["source", "to", "target"].edge_index = between
    data["target", "near", "target"].edge_index = torch.randint(300, (2, 900), generator=draw)
    options = {"input_nodes": ("target", torch.arange(SEEDS)), "batch_size": SEEDS}
    batch = batch_of(data, [3, 2], **options)
    compare(Bipartite(LOOPS[layer]).double(), batch, call, seeds=SEEDS)
    for _ in range(2):  # later loaders prepare what models of the process have used
        again = batch_of(data, [3, 2], **options)
        assert torch.equal(again["target"].n_id, batch["target"].n_id)
