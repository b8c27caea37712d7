"""Table of models that a recorder may misread: each trimmed step equals the plain model's, or an error says what is wrong."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from trimmed import WIDTH, Between, TwoLayers, assert_same, batch_of, compare, graph, leaves, step

import salientpp


@pytest.fixture(scope="module")
def batch():
    return batch_of(graph(3))


def between(module=None, before=lambda m, h, e: h, **attributes):
    """Returns a model of two layers, with ``before`` called on the rows between them."""

    def function(m, x, e):
        return m.last(before(m, m.first(x, e), e), e)

    model = Between(function)
    model.extra = module
    for name, value in attributes.items():
        setattr(model, name, value)
    return model.double()


def use(m, h, e):
    out = m.extra(h)
    return out[0] if isinstance(out, tuple) else out


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True, **options)


class Normalised(torch.autograd.Function):
    """Keeps rows, and subtracts the mean of their gradients."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def hooked(m, h, e):
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda grad: grad / grad.abs().mean())
    return h


def penalised(m, h, e):
    if not h.requires_grad:
        return h
    (grad,) = torch.autograd.grad(h.sin().sum(), h, retain_graph=True)
    return h + grad


def gradient_of_input(m, x, e):
    if not torch.is_grad_enabled():
        return m.last(x, e)
    x = x.detach().requires_grad_()
    h = m.first(x, e)
    (grad,) = torch.autograd.grad(h, x, torch.ones_like(h), retain_graph=True)
    return m.last(h + grad, e)


class MyAttention(nn.MultiheadAttention):
    def forward(self, rows):
        rows = rows - rows.mean(0)
        return super().forward(rows, rows, rows, need_weights=False)[0]


# --- modules that keep rows apart for some arguments only ---------------------------------------------------------

ROW_WISE = {
    "attention of two dimensions": lambda: between(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, h, e: m.extra(h, h, h)[0]
    ),
    "attention, keywords": lambda: between(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, h, e: m.extra(query=h, key=h, value=h)[0]
    ),
    "attention over a dimension of one": lambda: between(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, h, e: m.extra(*[h[None]] * 3)[0][0]
    ),
    "attention of rows without batch_first": lambda: between(
        nn.MultiheadAttention(WIDTH, 2), lambda m, h, e: m.extra(*[h[:, None]] * 3)[0][:, 0]
    ),
    "attention with a mask": lambda: between(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda m, h, e: m.extra(*[h.unsqueeze(1).expand(-1, 2, -1)] * 3, attn_mask=torch.eye(2).bool())[0][:, 0],
    ),
    "encoder": lambda: between(nn.TransformerEncoder(encoder_layer(), 2), use),
    "encoder layer": lambda: between(encoder_layer(), use),
    "encoder layer over a dimension of one": lambda: between(encoder_layer(), lambda m, h, e: m.extra(h[None])[0]),
    "encoder layer in evaluation": lambda: between(encoder_layer(), use).eval(),
    "encoder layer of rows": lambda: between(encoder_layer(), lambda m, h, e: m.extra(h[:, None])[:, 0]),
    "decoder layer": lambda: between(
        nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), lambda m, h, e: m.extra(h, h)
    ),
    "gru": lambda: between(nn.GRU(WIDTH, WIDTH, batch_first=True), use),
    "lstm": lambda: between(nn.LSTM(WIDTH, WIDTH, batch_first=True), use),
    "rnn": lambda: between(nn.RNN(WIDTH, WIDTH, batch_first=True), use),
    "gru over a dimension of one": lambda: between(
        nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, h, e: m.extra(h[None])[0][0]
    ),
    "gru with states": lambda: between(
        nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, h, e: m.extra(h[:, None], h[None])[0][:, 0]
    ),
    "subclass of attention": lambda: between(
        MyAttention(WIDTH, 2, batch_first=True), lambda m, h, e: m.extra(h[:, None])[:, 0]
    ),
    "cell over a column": lambda: between(nn.Identity(), lambda m, h, e: h * m.cell(h.sum(0), h.mean(0))),
    "attention inside a layer": lambda: between(
        pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), encoder_layer())), lambda m, h, e: m.extra(h, e)
    ),
    "attention of edges inside a layer": lambda: between(
        pyg.EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), encoder_layer())), lambda m, h, e: m.extra(h, e)
    ),
}

# --- numbers of rows -------------------------------------------------------------------------------------------------


def filled(m, h, e):
    return h + torch.full((h.size(0), 1), 1 / h.size(0), dtype=h.dtype)


COUNTS = {
    "GraphSizeNorm": lambda: between(pyg.GraphSizeNorm(), use),
    "size": lambda: between(before=lambda m, h, e: h / h.size(0)),
    "size of a negative dimension": lambda: between(before=lambda m, h, e: h / h.size(-2)),
    "shape": lambda: between(before=lambda m, h, e: h / h.shape[0]),
    "unpacked shape": lambda: between(before=lambda m, h, e: (lambda n, c: h / n)(*h.shape)),
    "size of all": lambda: between(before=lambda m, h, e: h / h.size()[0]),
    "len": lambda: between(before=lambda m, h, e: h / len(h) ** 0.5),
    "log": lambda: between(before=lambda m, h, e: h * math.log(h.size(0))),
    "sqrt": lambda: between(before=lambda m, h, e: h * math.sqrt(h.shape[0])),
    "numpy": lambda: between(before=lambda m, h, e: h / float(np.sqrt(h.size(0)))),
    "numel": lambda: between(before=lambda m, h, e: h * (h.numel() / 500)),
    "linspace": lambda: between(before=lambda m, h, e: h + torch.linspace(0, 1, h.size(0), dtype=h.dtype)[:, None]),
    "arange over its length": lambda: between(
        before=lambda m, h, e: h + (torch.arange(h.size(0)) / h.size(0))[:, None]
    ),
    "reversed arange": lambda: between(before=lambda m, h, e: h + torch.arange(h.size(0) - 1, -1, -1)[:, None] / 99),
    "ones, summed": lambda: between(before=lambda m, h, e: h / h.new_ones(h.size(0)).sum()),
    "zeros, counted": lambda: between(
        before=lambda m, h, e: h / (torch.zeros(h.size(0), 2, dtype=h.dtype) + 1).sum(0)[0]
    ),
    "ones_like, summed": lambda: between(before=lambda m, h, e: h / torch.ones_like(h).sum(0)),
    "ones_like, accumulated": lambda: between(before=lambda m, h, e: h + torch.ones_like(h).cumsum(0).flip(0) / 99),
    "tensor of the number": lambda: between(before=lambda m, h, e: h / torch.tensor(h.size(0), dtype=h.dtype)),
    "filled": lambda: between(before=filled),
    "comparison": lambda: between(before=lambda m, h, e: h * 2 if h.size(0) > 60 else h),
    "remainder": lambda: between(before=lambda m, h, e: h * (1 + h.size(0) % 7)),
    "inside a layer": lambda: between(
        pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), pyg.GraphSizeNorm())), lambda m, h, e: m.extra(h, e)
    ),
    "in the gradient": lambda: between(before=lambda m, h, e: h.detach() + (h - h.detach()) / h.size(0)),
}

# --- gradients and hooks ---------------------------------------------------------------------------------------------


def centred(m, args, out):
    return out - out.mean(0)


def with_hook(register, function):
    model = between()
    getattr(model, register)(function)
    return model


def backward_hook(module, grads, _):
    return tuple(None if grad is None else grad - grad.mean(0) for grad in grads)


def lin_with_backward_hook():
    model = between(nn.Linear(WIDTH, WIDTH), use)
    model.extra.register_full_backward_hook(backward_hook)
    return model


CALLED = {
    "asks for gradients": lambda: between(before=lambda m, h, e: h - h.mean(0) if torch.is_grad_enabled() else h),
    "asks for no gradients": lambda: between(before=lambda m, h, e: h if torch.is_grad_enabled() else h - h.mean(0)),
    "asks rows": lambda: between(before=lambda m, h, e: h - h.mean(0) if h.requires_grad else h),
    "own forward hook": lambda: with_hook("register_forward_hook", centred),
    "own pre-hook": lambda: with_hook(
        "register_forward_pre_hook", lambda m, args: (args[0] - args[0].mean(0), args[1])
    ),
    "hook on rows": lambda: between(before=hooked),
    "function of the user's": lambda: between(before=lambda m, h, e: Normalised.apply(h)),
    "function at the end": lambda: Between(lambda m, x, e: Normalised.apply(m.last(m.first(x, e), e))).double(),
    "gradient inside": lambda: between(before=penalised),
    "gradient of a layer inside": lambda: Between(gradient_of_input).double(),
    "backward hook of a module": lin_with_backward_hook,
    "retained gradient": lambda: between(before=lambda m, h, e: (h.requires_grad and h.retain_grad(), h)[1]),
}


def comparing(asks, batch):
    """Runs a model that asks a question of its rows, plain and trimmed without checks, in the trimmed one's second call.

    Returns the results of both for the seeds, and the number of rows that the trimmed one has between its layers.
    """
    between = []

    def run(m, x, e):
        h = m.first(x, e)
        between.append(h)
        return m.last(h if asks(m, x, h) else -h, e)

    model = Between(run).double()
    model.number = batch.num_nodes
    trimmed = salientpp.nn.trim(copy.deepcopy(model), check=False)
    trimmed(batch.x, batch.edge_index)  # records the plan
    found = [each(batch.x, batch.edge_index)[: batch.batch_size] for each in (model, trimmed)]
    return *found, between[-1].size(0)


@pytest.mark.parametrize(
    "asks",
    [
        lambda m, x, h: h.size(0) == x.size(0),
        lambda m, x, h: h.shape == x.shape,
        lambda m, x, h: x.shape == h.shape,  # torch.Size compares first
        lambda m, x, h: h.shape in [torch.Size([m.number, WIDTH])],
        lambda m, x, h: torch.Size([m.number, WIDTH]) != h[:, :].shape[:],
        lambda m, x, h: h.is_same_size(x),
        lambda m, x, h: h.size(0) == m.number,
        lambda m, x, h: 2 * h.size(0) - x.size(0) == h.size(0),
        lambda m, x, h: bool(h.size(0) != 13),
    ],
)
def test_numbers_of_rows_that_are_compared_for_equality_need_all_rows_also_without_checks(asks, batch):
    plain, trimmed, rows = comparing(asks, batch)
    torch.testing.assert_close(trimmed, plain)
    assert rows == batch.num_nodes


@pytest.mark.parametrize(
    "asks",
    [
        lambda m, x, h: h.size(0) == h.relu().size(0),
        lambda m, x, h: h.shape == (2 * h).shape,
        lambda m, x, h: h.size(0) != 0,
    ],
)
def test_comparisons_that_hold_for_any_number_of_rows_leave_a_model_trimmed(asks, batch):
    plain, trimmed, rows = comparing(asks, batch)
    torch.testing.assert_close(trimmed, plain)
    assert rows < batch.num_nodes


@pytest.mark.parametrize("name", [*ROW_WISE, *COUNTS, *CALLED])
def test_a_trimmed_step_equals_the_plain_models(name, batch):
    model = (ROW_WISE | COUNTS | CALLED)[name]()
    compare(model, batch)
    with torch.no_grad():
        assert_same(step(model, batch), step(salientpp.nn.trim(copy.deepcopy(model)), batch))


def test_hooks_that_are_added_later_are_part_of_the_model(batch):
    model = between()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    for each in (model, trimmed):
        each.register_forward_hook(centred)
    assert_same(step(model, batch), step(trimmed, batch))


def test_hooks_of_all_modules_are_part_of_the_model(batch):
    model = between()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    hook = register_module_forward_hook(lambda m, args, out: centred(m, args, out) if isinstance(m, Between) else None)
    try:
        assert_same(step(model, batch), step(trimmed, batch))
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", ["of the model", "before other hooks", "of all modules"])
def test_a_hook_that_changes_arguments_runs_once_in_each_call(kind, batch):
    """A model that calls other operations repeats its call."""
    odd = []
    plain = TwoLayers(lambda m, h: centred(m, (), h) if len(odd) % 2 else h).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))

    def hook(m, args):
        return (args[0] * 2, *args[1:]) if isinstance(m, TwoLayers) else None

    if kind == "of all modules":
        hooks = [register_module_forward_pre_hook(hook)]
    else:
        hooks = [each.register_forward_pre_hook(hook, prepend=kind != "of the model") for each in (plain, trimmed)]
    try:
        for _ in range(4):
            assert_same(step(plain, batch), step(trimmed, batch))
            odd.append(None)
    finally:
        for each in hooks:
            each.remove()


class CallsItself(TwoLayers):
    def forward(self, x, edge_index, depth=2):
        h = self(x, edge_index, depth - 1).relu() if depth else x
        return (self.first if depth else self.last)(self.between(self, h), edge_index)


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_may_call_itself(trained, batch):
    odd = []
    plain = CallsItself(lambda m, h: centred(m, (), h) if len(odd) % 2 else h.sin()).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    with torch.set_grad_enabled(trained):
        for _ in range(4):
            expected, got = step(plain, batch), step(trimmed, batch)
            assert_same(expected, got)
            assert got.num_out < expected.num_out or odd
            odd.append(None)


# --- effects of a call -----------------------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.number, self.last = 0, None

    def update(self, value) -> None:
        self.number += 1
        self.last = value


def counts(m, h, e):
    m.steps += 1
    return h


def averages(m, h, e):
    m.average = 0.9 * m.average + 0.1 * h.mean().item()
    return h


def assigns(m, h, e):
    m.ema = 0.9 * m.ema + h.detach().mean(0)
    return h + m.ema


def in_place(m, h, e):
    m.ema.mul_(0.9).add_(h.detach().mean(0))
    return h + m.ema


def through_data(m, h, e):
    m.scale.data.mul_(0.5)
    return h * m.scale


def appends(m, h, e):
    m.history.append(float(h.sum()))
    m.table["n"] = m.table.get("n", 0) + 1
    m.recent.append(len(m.history))
    return h


def measures(m, h, e):
    m.meter.update(h.detach().sum())
    m.space.count += 1
    return h


def draws(m, h, e):
    return h * torch.rand(1, generator=m.generator, dtype=h.dtype) * m.numpy.random() * m.random.random()


def accumulates(m, h, e):
    if h.requires_grad:
        m.gate.sum().backward()
    return h


def writes_input(m, x, e):
    x.detach().mul_(2)
    return m.last(m.first(x, e), e)


def flags(m):
    return {
        "steps": getattr(m, "steps", None),
        "average": getattr(m, "average", None),
        "history": getattr(m, "history", None),
        "table": getattr(m, "table", None),
        "recent": getattr(m, "recent", None),
        "meter": vars(m.meter) if hasattr(m, "meter") else None,
        "space": vars(m.space) if hasattr(m, "space") else None,
    }


def with_buffer(before):
    model = between(before=before)
    model.register_buffer("ema", torch.ones(WIDTH, dtype=torch.float64))
    return model


EFFECTS = {
    "counter": lambda: between(before=counts, steps=0),
    "average": lambda: between(before=averages, average=1.0),
    "assigned buffer": lambda: with_buffer(assigns),
    "buffer in place": lambda: with_buffer(in_place),
    "parameter through data": lambda: between(before=through_data),
    "containers": lambda: between(before=appends, history=[], table={}, recent=deque(maxlen=3)),
    "objects": lambda: between(before=measures, meter=Meter(), space=SimpleNamespace(count=0)),
    "generators": lambda: between(
        before=draws,
        generator=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(1),
        random=random.Random(1),
    ),
    "gradients": lambda: between(before=accumulates),
    "input": lambda: Between(writes_input).double(),
    "input, by a module": lambda: Between(
        lambda m, x, e: m.last(m.first(F.relu(x.detach(), inplace=True), e), e)
    ).double(),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", EFFECTS)
def test_a_first_call_has_the_effects_of_one_call(name, raises, batch):
    results = []
    for trims in (False, True):
        model, given = EFFECTS[name](), copy.deepcopy(batch)
        dict(leaves(given))
        if trims:
            salientpp.nn.trim(model)
        if raises:
            model.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(given.x, given.edge_index)
            out = torch.zeros(1)
        else:
            out = model(given.x, given.edge_index)[:13]
        state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        results.append((out.detach(), given.x.detach(), state, model.gate.grad, flags(model)))
    for expected, got in zip(*[(*each[:2], *each[2].values()) for each in results]):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert results[0][3] is None or torch.equal(results[0][3], results[1][3])
    assert repr(results[0][4]) == repr(results[1][4]) or name in ("average", "objects", "containers")
    torch.testing.assert_close(results[0][4], results[1][4], rtol=1e-9, atol=1e-9)


def doubles(m, x, e):
    x.mul_(2)
    return m.last(m.first(x, e), e)


def scales(m, x, e):
    x.mul_(m.scale)
    return m.last(m.first(x, e), e)


def hooks_rows(m, x, e):
    if x.requires_grad:
        x.register_hook(lambda grad: 2 * grad)
        x.retain_grad()
    return m.last(m.first(x, e), e)


def hooks_parameter(m, x, e):
    m.scale.register_hook(lambda grad: 2 * grad)
    return m.last(m.first(x * m.scale, e), e)


def writes_parameter(m, x, e):
    with torch.no_grad():
        m.scale.add_(0.1)
    return m.last(m.first(x * m.scale, e), e)


#: What a forward does to tensors of its caller, and whether the rows of the caller have a history.
OF_THE_CALLER = {
    "write to rows with a history": (doubles, "computed"),
    "write to rows": (doubles, "plain"),
    "write of a parameter to rows": (scales, "plain"),
    "write of a parameter to rows with a history": (scales, "computed"),
    "hook on rows": (hooks_rows, "leaf"),
    "hook on rows with a history": (hooks_rows, "computed"),
    "hook on a parameter": (hooks_parameter, "leaf"),
    "write to a parameter": (writes_parameter, "leaf"),
}


@pytest.mark.parametrize("name", OF_THE_CALLER)
def test_a_first_call_changes_no_history_of_the_callers_tensors(name, batch):
    forward, kind = OF_THE_CALLER[name]
    results = []
    for trims in (False, True):
        model = Between(forward).double()
        if kind == "leaf":  # torch lets no such model write to its arguments
            model.register_full_backward_hook(lambda *_: None)
        if trims:
            salientpp.nn.trim(model)
        leaf = batch.x.detach().clone().requires_grad_(kind != "plain")
        x = leaf * 1 if kind == "computed" else leaf
        out = model(x, batch.edge_index)[:13]
        out.square().sum().backward()
        grads = [each.grad for each in (leaf, *model.parameters()) if each.is_leaf]
        results.append([out, x, *grads, *model.parameters()])
    for expected, got in zip(*results):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


class OfBatch(nn.Module):
    """Model that writes to the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin, self.first, self.last = nn.Linear(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH)

    def forward(self, batch):
        batch.x = self.lin(batch.x)
        batch.h = self.first(batch.x, batch.edge_index).relu()
        return self.last(batch.h, batch.edge_index)


def test_a_model_may_write_to_its_batch(batch):
    _, got = compare(OfBatch().double(), batch, lambda model, batch: model(batch))
    assert got.rows[-1] == 13 and got.rows[-2] < batch.num_nodes


def test_lazily_made_modules_are_made_once(batch):
    def made(m, h, e):
        if m.extra is None:
            m.extra = nn.Linear(WIDTH, WIDTH).double()
        return m.extra(h)

    steps = []
    for trims in (False, True):
        model = between(before=made)
        if trims:
            salientpp.nn.trim(model)
        torch.manual_seed(3)
        steps += [step(model, batch), step(model, batch)]
    assert_same(steps[0], steps[2])
    assert_same(steps[1], steps[3])
