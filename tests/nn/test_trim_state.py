"""Effects of a trimmed call happen once, also if it is repeated or recorded; and what a model may branch on makes a plan of its own."""

from __future__ import annotations

import copy
import enum
import gc
import random
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from trimmed import WIDTH, TwoLayers, assert_same, batch_of, by_chance, graph, loader, step, within

import salientpp


@pytest.fixture(scope="module")
def batches():
    data = graph(3)
    batch_of(data)
    return list(loader(data, batch_size=5))


def assert_exact(plain, batches, change=None, call=None, **options):
    """Asserts that plain and trimmed models give the same in six steps. Returns the trimmed model and its last step."""
    plain = plain.double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain), **options)
    for k in range(6):
        steps = []
        for model in (plain, trimmed):
            if change is not None:
                change(model, k)
            random.seed(k)
            given = call or (lambda m, b, k: m(b.x, b.edge_index))
            steps.append(step(model, batches[k % len(batches)], lambda m, b, given=given, k=k: given(m, b, k)))
        assert_same(*steps)
    return trimmed, steps[1]


# --- effects of a call that is repeated ----------------------------------------------------------------------------


def append(m):
    m.state.append(1)
    return len(m.state)


def count(m):
    m.state["n"] = m.state.get("n", 0) + 1
    return m.state["n"]


def meter(m):
    m.state.n += 1
    return m.state.n


def add(m):
    m.state.add_(1)
    return m.state[0]


def replace(m):
    m.state = m.state + 1
    return m.state[0]


def create(m):
    m.made = [*getattr(m, "made", []), 1]
    return len(m.made)


@pytest.mark.parametrize(
    ("state", "effect"),
    [
        ([], append),
        ({}, count),
        (SimpleNamespace(n=0), meter),
        (torch.zeros(2), add),
        (torch.zeros(2), replace),
        (None, create),
    ],
    ids=["list", "dict", "object", "tensor", "other tensor", "new attribute"],
)
def test_attributes_change_once_in_a_repeated_call(state, effect, batches):
    assert_exact(TwoLayers(lambda m, h: by_chance(m, h * int(effect(m))), state=state), batches)


@pytest.mark.parametrize("trained", [True, False])
def test_statistics_of_a_norm_change_once_in_a_repeated_call(trained, batches):
    model = TwoLayers(lambda m, h: m.norm(h) if random.random() < 0.5 else h, norm=nn.BatchNorm1d(WIDTH))
    with torch.set_grad_enabled(trained):
        assert_exact(model, batches)


class OfBatch(TwoLayers):
    def forward(self, batch):
        batch.x = batch.x * 2
        return super().forward(batch.x, batch.edge_index)


class OfList(TwoLayers):
    def forward(self, x, edge_index, given):
        given.append(1)
        return super().forward(x * len(given), edge_index)


@pytest.mark.parametrize("kind", [OfBatch, OfList])
def test_arguments_change_once_in_a_repeated_call(kind, batches):
    def call(m, b, k):
        return m(copy.copy(b)) if kind is OfBatch else m(b.x, b.edge_index, [])

    assert_exact(kind(by_chance), batches, call=call)


def test_a_large_tensor_that_a_repeated_call_wrote_to_is_an_error(batches):
    def between(m, h):
        m.state.add_(1)
        return by_chance(m, h)

    with pytest.raises(RuntimeError, match="and wrote to its arguments or parameters"):
        assert_exact(TwoLayers(between, state=torch.zeros(1 << 13)), batches)


# --- plans ---------------------------------------------------------------------------------------------------------


class Dimension(enum.Enum):
    ROWS = 0
    COLUMNS = 1


def soft(m, h, given):
    while not isinstance(given, (int, np.integer)):
        given = given.value if isinstance(given, Dimension) else given["dim"] if isinstance(given, dict) else given[0]
    return h.softmax(int(given))


FORMS = {
    "tuple": lambda dim: (dim,),
    "numpy": np.int64,
    "enum": Dimension,
    "tuple of tuples": lambda dim: ((dim,), "rows"),
    "list": lambda dim: [dim],
    "dict": lambda dim: {"dim": dim},
}


@pytest.mark.parametrize("form", FORMS)
def test_choices_among_the_arguments_get_their_own_plans(form, batches):
    assert_exact(TwoLayers(soft), batches, call=lambda m, b, k: m(b.x, b.edge_index, FORMS[form](int(k < 2))))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("list", "dict")])
def test_choices_among_the_attributes_are_noticed(form, batches):
    def change(m, k):
        m.dim = FORMS[form](int(k < 2))

    assert_exact(TwoLayers(lambda m, h: soft(m, h, m.dim)), batches, change)


def test_sizes_in_a_list_make_no_plans(batches):
    model = salientpp.nn.trim(TwoLayers(lambda m, h, sizes: h.relu()).double())
    calls = []
    model.between = lambda m, h, sizes: (calls.append(None), h.relu())[1]
    for k in range(20, 40):
        step(model, batches[0], lambda m, b, k=k: m(b.x, b.edge_index, [k, 2 * k]))
    assert len(calls) < 40


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


def test_replaced_parameters_are_noticed_and_freed(batches):
    class WithoutInput(TwoLayers):
        def forward(self, x, edge_index):
            return super().forward(x.detach(), edge_index)

    def change(m, k):
        for part in m.modules() if k == 2 else ():
            for name, value in part._parameters.items():
                if value is not None:
                    part._parameters[name] = nn.Parameter(value.detach().clone())

    model = WithoutInput(lambda m, h: Centred.apply(h)).requires_grad_(False)
    trimmed, _ = assert_exact(model, batches, change)
    old = weakref.ref(trimmed.first.lin_l.weight)
    trimmed.first.lin_l.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    gc.collect()
    assert old() is None


def test_a_shallow_copy_has_its_own_plans(batches):
    plain = TwoLayers(lambda m, h: h.softmax(m.dim), dim=1).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    step(trimmed, batches[0])
    copied = copy.copy(trimmed)
    copied.dim = 0
    expected = copy.copy(plain)
    expected.dim = 0
    del trimmed
    gc.collect()
    for dim in (0, 1):
        expected.dim = copied.dim = dim
        with torch.no_grad():
            assert_same(step(expected, batches[0]), step(copied, batches[0]))


# --- rehearsals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_any_buffer_can_be_recorded(kind, batches):
    model = TwoLayers(lambda m, h: h.relu())
    buffer = torch.eye(3).to_sparse() if kind == "sparse" else torch.empty(3, device="meta")
    model.register_buffer("other", buffer)
    trimmed = salientpp.nn.trim(model.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            batch = batches[0]
            rows = []
            hook = trimmed.last.register_forward_hook(lambda _, __, out, rows=rows: rows.append(out.size(0)))
            trimmed(batch.x.double(), batch.edge_index)
            hook.remove()
    assert rows[-1] >= within(batch, 0)


def test_a_generator_outside_the_model_is_as_after_one_call(batches):
    draw = torch.Generator()
    plain = TwoLayers(lambda m, h: h + 0 * torch.rand(3, generator=draw).sum()).double()
    states = []
    for model in (plain, salientpp.nn.trim(copy.deepcopy(plain))):
        draw.manual_seed(1)
        step(model, batches[0])
        states.append(draw.get_state())
    assert torch.equal(*states)
