"""Models that choose, draw and keep things, and hold layers of the user's: exact, or refused in words."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
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


# --- layers of the user's -------------------------------------------------------------------------------------


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
def test_layers_of_the_users_get_all_rows(kind, batch):
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


# --- what models keep and draw ---------------------------------------------------------------------------------


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
    """Nor from the generators of Python and numpy."""

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


# --- what differs from batch to batch --------------------------------------------------------------------------


def test_arguments_that_choose_have_their_own_plans(batch):
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


def test_numbers_of_rows_that_do_not_fit_are_an_error_in_words(batch):
    def function(m, x, e):
        return torch.einsum("nc,nc->n", m.last(m.second(m.first(x, e), e), e), x)

    model = salientpp.nn.trim(Between(function).double())
    with pytest.raises(
        RuntimeError,
        match=r"einsum of Between was given 13 and \d+ rows of one batch.*leave it out for this model",
    ):
        step(model, batch)


def test_a_model_that_calls_other_layers_in_a_later_batch_is_refused_in_words(data):
    calls = []

    def function(m, x, e):
        calls.append(None)
        return m.first(x, e) if len(calls) <= 2 else m.second(x, e)

    model = salientpp.nn.trim(Between(function).double())
    batches = list(loader(data, batch_size=5))
    step(model, batches[0])
    with pytest.raises(
        RuntimeError, match=r"called layer 'second' where it called 'first' before.*leave salientpp.nn.trim out"
    ):
        step(model, batches[1])
