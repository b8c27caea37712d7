"""Trimmed models with control flow, random draws, stored values and users' own layers: results are exact, or a clear error is raised."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import degree
from trimmed import WIDTH, Between, assert_same, batch_of, compare, graph, loader, step

import salientpp


@pytest.fixture(scope="module")
def data():
    return graph(3)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


def skip(m, x, e):
    h = m.first(x, e).relu()
    h = h + m.second(h, e)
    return h + m.last(h, e)


# --- users' own layers ----------------------------------------------------------------------------------------


class Mine(MessagePassing):
    def __init__(self, columns: int, out: int) -> None:
        super().__init__("mean")
        self.lin = nn.Linear(columns, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x)) + x

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.exp()


class ByDegree(Mine):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        root = degree(edge_index[0], x.size(0), x.dtype).clamp(min=1).rsqrt()
        return self.lin(self.propagate(edge_index, x=x * root.view(-1, 1)))


class Inherited(pyg.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sin()


@pytest.mark.parametrize("kind", [Mine, ByDegree, Inherited])
def test_users_own_layers_get_all_rows(kind, batch):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([pyg.SAGEConv(WIDTH, WIDTH), kind(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, WIDTH)])

        def forward(self, x, edge_index):
            for layer in self.layers:
                x = layer(x, edge_index).tanh()
            return x

    _, got = compare(Model().double(), batch)
    assert got.rows == [batch.num_nodes, batch.num_nodes, batch.batch_size]


def test_layers_with_hooks_are_exact(batch):
    model = Between(skip).double()
    model.first.register_message_forward_hook(lambda *given: given[-1] * 2)
    model.second.register_propagate_forward_hook(lambda *given: given[-1] * 2)
    expected = step(model, batch)
    assert_same(expected, step(salientpp.nn.trim(model), batch))


# --- arguments and outputs of models -----------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    rows: Tensor


def returned_object(m, x, e):
    return Output(m.last(m.second(m.first(x, e), e), e))


def returned_batch(m, x, e):
    return Data(h=m.last(m.second(m.first(x, e), e), e))


def kept_aside(m, x, e):
    m.kept = m.last(m.second(m.first(x, e), e), e)
    return {"nothing": 0}


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (returned_object, lambda model, out: out.rows),
        (returned_batch, lambda model, out: out.h),
        (kept_aside, lambda model, out: model.kept),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_rows_of_seeds_are_right_in_any_output(function, read, batch):
    compare(Between(function).double(), batch, lambda model, batch: read(model, model(batch.x, batch.edge_index)))


def test_a_model_may_add_vertices(batch):
    """A row for each vertex of the batch, and one more."""

    def function(m, x, e):
        x = torch.cat([x, m.scale.to(x.dtype)])
        h = m.first(x, e).relu()
        h = h + h[-1]
        h = m.second(h, e)
        return m.last(h + h[-1:].exp(), e)[:-1]

    compare(Between(function).double(), batch)


@pytest.mark.parametrize(
    "reads", [lambda h: h[torch.arange(h.size(0) - 1, -1, -1)], lambda h: h.flip(0), lambda h: h - h.mean(0)]
)
def test_a_first_batch_of_only_seeds_makes_no_plan_for_other_batches(reads, data):
    model = Between(lambda m, x, e: m.last(reads(m.first(x, e)), e)).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    batches = list(loader(data, input_nodes=torch.tensor([*range(282, 290), *range(8)]), batch_size=4))
    assert [batch.num_nodes == batch.batch_size for batch in batches] == [True, True, False, False]
    for batch in batches:
        assert_same(step(model, batch), step(trimmed, batch))


def test_masks_of_all_vertices_are_cut_to_the_rows(batch):
    def function(m, x, e):
        h = m.first(x, e).masked_fill(x > 1, 0.5)
        h = torch.where((x[:, :1] > 0), m.second(h, e), 0.1)
        h = h.masked_fill_((x < -1).any(1, keepdim=True), 2.0)
        return m.last(h * (x.sum(1) > 0).unsqueeze(-1), e)

    _, got = compare(Between(function).double(), batch)
    assert got.rows[-1] == batch.batch_size and got.rows[0] < batch.num_nodes


def test_one_list_of_edges_may_be_given_twice(batch):
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = pyg.SignedConv(WIDTH, WIDTH, True), pyg.SignedConv(WIDTH, WIDTH, False)

        def forward(self, x, e):
            return self.last(self.first(x, e, e).tanh(), e, e)

    compare(Signed().double(), batch)


def test_edges_may_be_used_against_their_direction(batch):
    class Against(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = pyg.SAGEConv(WIDTH, WIDTH, flow="target_to_source"), pyg.GCNConv(WIDTH, WIDTH)

        def forward(self, x, e):
            return self.last(self.first(self.last(x, e.flip(0)), e), e)

    compare(Against().double(), batch)


# --- stored values and random draws ----------------------------------------------------------------------------


def test_lazy_layers_begin_as_in_the_plain_model(batch):
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.lin = pyg.SAGEConv(-1, 8), nn.LazyBatchNorm1d(), nn.LazyLinear(8)
            self.last = pyg.GATConv(-1, 4)

        def forward(self, x, edge_index):
            return self.last(self.lin(self.norm(self.first(x, edge_index))).relu(), edge_index)

    steps = []
    for trims in (False, True):
        torch.manual_seed(2)
        model = Lazy().double()
        if trims:
            salientpp.nn.trim(model)
        torch.manual_seed(3)
        for _ in range(2):
            got = step(model, batch)
            steps.append(got)
    assert_same(steps[0], steps[2])
    assert_same(steps[1], steps[3])
    assert steps[3].num_out == batch.batch_size


def test_the_first_pass_draws_nothing(batch):
    """The generators of Python and numpy stay unused too."""

    def function(m, x, e):
        h = m.first(x, e) * random.random() * np.random.rand()
        return m.last(F.dropout(h, 0.5, training=False) * torch.rand(1, dtype=h.dtype), e)

    steps = []
    for trims in (False, True):
        model = Between(function).double()
        if trims:
            salientpp.nn.trim(model)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        steps.append(step(model, batch))
        steps[-1].tensors["next"] = torch.tensor([random.random(), np.random.rand(), float(torch.rand(1))])
    assert_same(*steps)


# --- differences between batches -------------------------------------------------------------------------------


def test_each_value_of_a_models_arguments_has_its_own_plan(batch):
    class Chooses(Between):
        def forward(self, x, edge_index, centred=False, kind="a"):
            h = self.first(x, edge_index)
            h = h - h.mean(0) if centred else h
            return self.last(h, edge_index) if kind == "a" else self.last(h.flip(0), edge_index)

    model = Chooses(skip).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    for options in ({}, {"centred": True}, {"kind": "b"}, {"centred": False}):
        call = lambda model, batch, options=options: model(batch.x, batch.edge_index, **options)  # noqa: E731
        assert_same(step(model, batch, call), step(trimmed, batch, call))


def test_numbers_of_rows_that_do_not_fit_raise_a_clear_error(batch):
    later = []

    def function(m, x, e):
        h = m.last(m.second(m.first(x, e), e), e)
        return torch.einsum("nc,nc->n", h, x) if later else h

    model = salientpp.nn.trim(Between(function).double())
    step(model, batch)
    later.append(True)
    words = r"einsum of Between was given tensors with 13 and \d+ rows of one batch.*do not use salientpp.nn.trim on this model"
    with pytest.raises(RuntimeError, match=words):
        step(model, batch)
    model = Between(function).double()
    with pytest.warns(RuntimeWarning, match=words + ".*it runs untrimmed"):
        compare(model, batch)


def test_a_model_that_calls_other_layers_later_raises_a_clear_error(data):
    later = []

    def function(m, x, e):
        return m.second(x, e) if later else m.first(x, e)

    model = salientpp.nn.trim(Between(function).double())
    batches = list(loader(data, batch_size=5))
    step(model, batches[0])
    later.append(True)
    with pytest.raises(
        RuntimeError, match=r"called layer 'second', where it called 'first' before.*do not use salientpp.nn.trim"
    ):
        step(model, batches[1])
