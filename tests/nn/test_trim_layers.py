"""Laws of PyG's layers in a trimmed model: seeds get the same rows and gradients, and only the rows that they need are computed."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch_geometric.nn as pyg
from graphs import random_hetero
from pyg_layers import CASES, Case, with_columns
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from trimmed import WIDTH, assert_same, batch_of, compare, graph, loader, step, within

import salientpp
from salientpp.nn.layers import layer_of

#: Layers that hold another layer for each hop; this is cut separately.
OF_OTHERS = {"AntiSymmetricConv"}
#: Layers with normalisations over all rows.
WITH_NORMS = {"GENConv"}
#: Layers whose operations do not show that they keep rows apart. Layers before them give all rows.
WHOLE = {"RGCNConv of blocks"}


@pytest.fixture(scope="module")
def data():
    return graph(1)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


class Layers(torch.nn.Module):
    """Layers of one kind, with a relu between them."""

    def __init__(self, case: Case, number: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        widths = [WIDTH] * (number + 1) if case.keeps_width or "x_0" in case.rows else [WIDTH] + [2 * WIDTH] * number
        self.case = case
        self.layers = torch.nn.ModuleList(case.make(i, o) for i, o in itertools.pairwise(widths))

    def forward(self, x: Tensor, data: Data) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.case.call(layer, x if number == 0 else x.relu(), data)
        return x


def call_batch(model: torch.nn.Module, batch: Data) -> Tensor:
    return model(batch.x, batch)


def is_cut(name: str) -> bool:
    layer = CASES[name].make(WIDTH, 2 * WIDTH)
    facts = layer_of(layer)
    return (facts is None or facts.needs_all is None) and not CASES[name].signed and not getattr(layer, "cached", False)


def expected_rows(name: str, number: int, batch, training: bool) -> list[int]:
    """Returns the number of rows of each layer's output, given the hops that the layers after it reach."""
    if not is_cut(name):
        return [batch.num_nodes] * number
    if name in WHOLE or (name in WITH_NORMS and training):
        return [batch.num_nodes] * (number - 1) + [batch.batch_size]
    hops = CASES[name].hops
    if name in OF_OTHERS:
        number, hops = number * hops, 1
    return [within(batch, hops * (number - 1 - k)) for k in range(number)]


def check(name: str, number: int, batch, training: bool) -> None:
    model = Layers(CASES[name], number).double().train(training)
    _, got = compare(model, batch, call_batch)
    assert got.rows == expected_rows(name, number, batch, training)


@pytest.mark.parametrize(
    ("number", "training"),
    [(3, True), (2, False), *rare((2, True), (3, False))],
    ids=lambda value: {True: "training", False: "evaluation"}[value] if isinstance(value, bool) else str(value),
)
@pytest.mark.parametrize("name", CASES)
def test_seeds_and_gradients_equal_the_plain_model(name, number, training, batch):
    assert within(batch, 1) < within(batch, 2) < within(batch, 3) == batch.num_nodes
    check(name, number, batch, training)


BATCHES = {
    "fewer hops": {"num_neighbors": [3]},
    "more hops": {"num_neighbors": [3, 2, 2, 2]},
    "all neighbours": {"num_neighbors": [-1, -1]},
    "one seed": {"batch_size": 1},
    "no edges": {"input_nodes": torch.arange(282, 290)},
    "with replacement": {"replace": True},
    "disjoint": {"disjoint": True},
}


@pytest.fixture(scope="module")
def batches(data):
    return {name: batch_of(data, **options) for name, options in BATCHES.items()}


def pairs():
    """Yields each layer with each kind of batch. Of the kinds with edges two are no rare tests, and consecutive layers have different ones."""
    kinds = [kind for kind in BATCHES if kind != "no edges"]
    for at, name in enumerate(CASES):
        some = {"no edges", kinds[at % 6], kinds[(at + 1 + at // 6 % 5) % 6]}
        for kind in BATCHES:
            if kind == "no edges" and ("median" in name or "more" in name):
                continue  # PyG's layer fails
            yield from [(name, kind)] if kind in some else rare((name, kind))


@pytest.mark.parametrize(("name", "kind"), list(pairs()))
def test_batches_may_have_any_number_of_hops_seeds_and_edges(name, kind, batches):
    batch = batches[kind]
    assert batch.num_edges or kind == "no edges"
    check(name, 2, batch, True)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_may_have_as_many_edges_as_vertices(name):
    """The graph is a ring of 20 vertices. The 4 seeds are as far apart as possible."""
    ring = torch.arange(20)
    data = with_columns(torch.stack([ring, (ring + 1) % 20]), 20, WIDTH, torch.Generator().manual_seed(4))
    batch = batch_of(data, [1] * 5, input_nodes=torch.tensor([0, 5, 10, 15]), batch_size=4)
    assert batch.num_nodes == batch.num_edges == 20
    check(name, 2, batch, True)


def test_a_plan_holds_for_all_batches(data):
    model = Layers(CASES["GATConv"], 2).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    rows = set()
    for batch in loader(data, batch_size=4):
        expected, got = (step(each, batch, call_batch) for each in (model, trimmed))
        assert_same(expected, got)
        assert got.rows[-2:] == [within(batch, 1), batch.batch_size]
        rows.add(tuple(got.rows[-2:]))
    assert len(rows) > 2


# --- several types -------------------------------------------------------------------------------------------


def typed_graph() -> HeteroData:
    data = random_hetero(200)
    data["paper", "printed by", "venue"].edge_index = data["venue", "prints", "paper"].edge_index.flip(0)
    draw = torch.Generator().manual_seed(4)
    for store in data.node_stores:
        store.x = torch.randn(store.num_nodes, WIDTH, generator=draw).double()
    return data


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("number", [2, 3])
def test_hgt_gives_the_seeds_what_the_plain_model_gives_them(number, training):
    data = typed_graph()

    class Typed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = torch.nn.ModuleList(
                pyg.HGTConv(WIDTH, WIDTH, data.metadata(), heads=2) for _ in range(number)
            )

        def forward(self, x, edges):
            for layer in self.layers:
                x = {name: rows.relu() for name, rows in layer(x, edges).items() if rows is not None}
            return x["paper"]

    batch = batch_of(data, [3, 2, 2], input_nodes=("paper", torch.arange(9)), batch_size=9)
    _, got = compare(Typed().double().train(training), batch, lambda m, b: m(b.x_dict, b.edge_index_dict), seeds=9)
    counts = list(itertools.accumulate(map(int, batch["paper"].num_sampled_nodes)))
    assert counts[0] < counts[1] < counts[2]
    assert [rows["paper"] for rows in got.rows] == [counts[number - 1 - k] for k in range(number)]
