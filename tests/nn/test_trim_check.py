"""Trimmed models that change after their first call: the change is noticed in the step itself, or by a comparison with the plain model."""

from __future__ import annotations

import copy
import pickle
import random
import re
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from rare import rare
from torch import nn
from torch_geometric.data import Data
from trimmed import WIDTH, TwoLayers, assert_same, batch_of, by_chance, centred, graph, loader, network, step, within

import salientpp
from salientpp.nn import check


@pytest.fixture(scope="module")
def data():
    return graph(3)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


def by_epoch(m, h):
    return centred(h) if m.epoch > 1 else h


def by_step(m, h):
    m.epoch += 1
    return centred(h) if m.epoch > 2 else h


def by_argument(m, h, epoch):
    return centred(h) if epoch > 1 else h


def by_numpy(m, h):
    return centred(h) if np.random.rand() < 0.5 else h


def by_torch(m, h):
    return centred(h) if torch.rand(()) < 0.5 else h


def by_size(m, h):
    return centred(h) if m.number % 2 else h


def through_norm(m, h):
    return m.norm(h) if m.norm is not None else h


def through_dim(m, h):
    return h.softmax(m.dim)


def through_table(m, h):
    return centred(h) if m.table["on"] else h


def through_average(m, h):
    m.average = 0.9 * m.average + 0.1 * float(len(h) > 0)
    m.count += 1
    return centred(h) if m.count > 3 else h


def epochs(m, k):
    m.epoch = k


def norm_on(m, k):
    m.norm = nn.BatchNorm1d(WIDTH).double() if k == 2 else m.norm


def statistics_off(m, k):
    if k == 2:
        m.norm.running_mean = m.norm.running_var = None


def dims(m, k):
    m.dim = 0 if k > 1 else 1


def tables(m, k):
    m.table["on"] = k > 1


def sizes(m, k):
    m.number = k


def replaces(m, k):
    if k == 2:
        m.between = lambda m, h: centred(h)


def hooks(m, k):
    if k == 2:
        m.first.register_forward_hook(lambda _, __, out: centred(out))


def method(m, k):
    if k == 2:
        m.forward = lambda x, e: m.last(centred(m.first(x, e)), e)


def nothing(m, k):
    pass


def plain_norm():
    return nn.BatchNorm1d(WIDTH)


def through_mean(m, h):
    h, m.mean = h - m.mean, h.detach().mean(0)
    return h


CHANGES = {
    "an attribute": (lambda: TwoLayers(by_epoch, epoch=0), epochs, ()),
    "a counter in the forward": (lambda: TwoLayers(by_step, epoch=0), nothing, ()),
    "a counter beside others": (lambda: TwoLayers(through_average, average=0.0, count=0), nothing, ()),
    "an argument": (lambda: TwoLayers(by_argument), nothing, (lambda k: k,)),
    "a float argument": (lambda: TwoLayers(by_argument), nothing, (float,)),
    "a tensor argument": (lambda: TwoLayers(by_argument), nothing, (torch.tensor,)),
    "chance": (lambda: TwoLayers(by_chance), nothing, ()),
    "chance of numpy": (lambda: TwoLayers(by_numpy), nothing, ()),
    "chance of torch": (lambda: TwoLayers(by_torch), nothing, ()),
    "a number that changes back": (lambda: TwoLayers(by_size, number=0), sizes, ()),
    "a number that becomes a tensor": (lambda: TwoLayers(through_mean, mean=0), nothing, ()),
    "a norm that is switched on": (lambda: TwoLayers(through_norm, norm=None), norm_on, ()),
    "statistics set to None": (lambda: TwoLayers(through_norm, norm=plain_norm()).eval(), statistics_off, ()),
    "a dimension": (lambda: TwoLayers(through_dim, dim=1), dims, ()),
    "a dictionary": (lambda: TwoLayers(through_table, table={"on": False}), tables, ()),
    "a function that is replaced": (lambda: TwoLayers(lambda m, h: h), replaces, ()),
    "a hook on a layer": (lambda: TwoLayers(lambda m, h: h), hooks, ()),
}


NAMES = [*CHANGES]


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        *((name, True) for name in NAMES),
        *((name, False) for name in NAMES[::3]),
        *rare(*((name, False) for at, name in enumerate(NAMES) if at % 3)),
    ],
)
def test_a_model_that_changes_is_exact_in_every_step(name, trained, data):
    make, change, given = CHANGES[name]
    plain = make().double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    batches = list(loader(data, batch_size=5))
    for k in range(6):
        steps = []
        for model in (plain, trimmed):
            change(model, k)
            random.seed(k), np.random.seed(k), torch.manual_seed(k)
            with torch.set_grad_enabled(trained):
                call = lambda m, b, k=k: m(b.x, b.edge_index, *[each(k) for each in given])  # noqa: E731
                steps.append(step(model, batches[k % len(batches)], call))
        assert_same(*steps)
        assert getattr(plain, "epoch", 0) == getattr(trimmed, "epoch", 0)


def test_a_step_number_as_argument_makes_no_plan_for_each(batch):
    plain = TwoLayers(by_argument).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for k in range(-60, 4):
        call = lambda m, b, k=k: m(b.x, b.edge_index, k)  # noqa: E731
        assert_same(step(plain, batch, call), step(trimmed, batch, call))


def test_many_orders_of_operations_end_untrimmed_with_a_warning(batch):
    def varied(m, h):
        for _ in range(int(torch.randint(40, ()))):
            h = h.sin()
        return h

    plain = TwoLayers(varied).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    with pytest.warns(RuntimeWarning, match="calls other operations between its layers from batch to batch"):
        for k in range(40):
            steps = []
            for model in (plain, trimmed):
                torch.manual_seed(k)
                steps.append(step(model, batch))
            assert_same(*steps)


def test_a_call_that_wrote_to_its_input_is_not_repeated(batch):
    later = []

    def forward(m, h):
        return centred(h) if later else h

    class Writes(TwoLayers):
        def forward(self, x, edge_index):
            return super().forward(x.mul_(1.5), edge_index)

    model = salientpp.nn.trim(Writes(forward).double())
    model(batch.x.clone(), batch.edge_index)
    later.append(True)
    with pytest.raises(
        RuntimeError, match=r"called other operations than before \(.*mean\), and wrote to its arguments or parameters"
    ):
        model(batch.x.clone(), batch.edge_index)


# --- comparisons with the plain model ------------------------------------------------------------------------------


def hidden(m, h):
    return h * m.scale[0] ** len(h)


def test_a_difference_at_the_first_call_needs_no_warning_if_rules_explain_it(batch):
    plain = TwoLayers(hidden, scale=[1.01]).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = step(salientpp.nn.trim(copy.deepcopy(plain)), batch)
    assert_same(step(plain, batch), got)


def test_a_difference_that_begins_later_is_found_and_named(batch):
    plain = TwoLayers(hidden, scale=[1.0]).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    step(trimmed, batch)
    plain.scale[0] = trimmed.scale[0] = 1.01
    with pytest.warns(
        RuntimeWarning, match=r"trimmed TwoLayers differed.*in call 4 .*the cause is in layer 'first'.*check=False"
    ):
        steps = [step(trimmed, batch) for _ in range(3)]
    assert (steps[1].out - steps[2].out).abs().max() > 0.1, "between two comparisons nobody looks"
    for _ in range(3):
        assert_same(step(plain, batch), step(trimmed, batch))


@dataclass(slots=True)
class Slots:
    rows: Any


class Cycle:
    def __init__(self, rows) -> None:
        self.rows, self.owner = rows, self


OUTPUTS = {
    "data class with slots": Slots,
    "object that holds itself": Cycle,
    "named tuple": namedtuple("Rows", "rows"),
    "batch": lambda h: Data(x=h),
    "complex": lambda h: h * (1 + 1j),
    "tiny": lambda h: h * 1e-200,
    "huge": lambda h: h * 1e200,
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_difference_is_found_in_any_output(kind, batch):
    class Returns(TwoLayers):
        def forward(self, x, edge_index):
            return OUTPUTS[kind](super().forward(x, edge_index))

    trimmed = salientpp.nn.trim(Returns(hidden, scale=[1.0]).double())
    x = batch.x.double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            trimmed(x, batch.edge_index)
    trimmed.scale[0] = 1.01
    with pytest.warns(RuntimeWarning, match=r"trimmed Returns differed.*in call 4"):
        trimmed(x, batch.edge_index)


@pytest.mark.parametrize("call", [1, 4])
def test_a_model_that_cannot_be_compared_runs_untrimmed_with_a_warning(call, batch, monkeypatch):
    plain = TwoLayers(hidden, scale=[1.0]).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for _ in range(call - 1):
        step(trimmed, batch)

    def fails(*_):
        raise RuntimeError("no memory for a comparison")

    monkeypatch.setattr(check, "differences_of", fails)
    plain.scale[0] = trimmed.scale[0] = 1.01
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(5):
            assert_same(step(plain, batch), step(trimmed, batch))
    found = [str(each.message) for each in warned if each.category is RuntimeWarning]
    assert len(found) == 1
    assert re.search(
        r"could not be .*compared .*\(RuntimeError: no memory for a comparison\).*untrimmed; results are right",
        found[0],
    )


def test_a_model_that_differs_with_all_rows_too_runs_untrimmed(batch, monkeypatch):
    monkeypatch.setattr(
        check.CheckedCall, "_fault", lambda _, plan, expected, evaluates: check.Fault(1.0, evaluates, expected)
    )
    trimmed = salientpp.nn.trim(TwoLayers(lambda m, h: h.sin()).double())
    with pytest.warns(
        RuntimeWarning, match="in its first call .*the model now runs untrimmed, so that results are right"
    ):
        got = step(trimmed, batch)
    assert got.num_out == batch.num_nodes


def test_a_plan_stays_if_the_plain_model_needs_too_much_memory(batch, monkeypatch):
    trimmed = salientpp.nn.trim(TwoLayers(lambda m, h: h.sin()).double())
    rows = step(trimmed, batch).rows
    call = check.CheckedCall.call

    def fails(self, context=None, *given, **options):
        if context is None:
            raise torch.OutOfMemoryError("no memory")
        return call(self, context, *given, **options)

    monkeypatch.setattr(check.CheckedCall, "call", fails)
    with pytest.warns(RuntimeWarning, match="call 4 of trimmed TwoLayers was not compared with the plain model"):
        for _ in range(4):
            got = step(trimmed, batch)
    assert got.rows == rows[-2:]


def test_a_warning_that_is_an_error_leaves_a_model_that_can_be_called(batch):
    plain = TwoLayers(hidden, scale=[1.0]).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for _ in range(3):
        step(trimmed, batch)
    plain.scale[0] = trimmed.scale[0] = 1.01
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="trimmed TwoLayers differed"):
            step(trimmed, batch)
    assert "forward" not in vars(trimmed.first)
    assert_same(step(plain, batch), step(trimmed, batch))


def test_without_checks_no_call_is_compared(batch):
    plain = TwoLayers(lambda m, h: h.sin()).double()
    calls = []
    plain.register_forward_hook(lambda *_: calls.append(None))
    trimmed = salientpp.nn.trim(copy.deepcopy(plain), check=False)
    for number in range(1, 6):
        calls.clear()
        assert_same(step(plain, batch), step(trimmed, batch))
        assert len(calls) == (3 if number == 1 else 2)  # one of the plain model


def test_unknown_uses_of_numbers_need_all_rows_without_checks(batch):
    plain = TwoLayers(hidden, scale=[1.01]).double()
    got = step(salientpp.nn.trim(copy.deepcopy(plain), check=False), batch)
    assert_same(step(plain, batch), got)


@pytest.mark.parametrize("kind", ["dropout", "noise", "attention"])
def test_random_numbers_are_no_difference(kind, batch):
    torch.manual_seed(1)
    if kind == "attention":
        model = pyg.GAT(WIDTH, 8, 3, 4, heads=2, dropout=0.5)
    else:
        model = TwoLayers(lambda m, h: F.dropout(h, 0.5, m.training) if kind == "dropout" else h + torch.randn_like(h))
    trimmed = salientpp.nn.trim(model.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            got = step(trimmed, batch)
    assert got.rows[-1] == within(batch, 0) and got.rows[-2] == within(batch, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pyg.GraphSAGE, pyg.GCN, pyg.GAT, pyg.GIN])
def test_rounding_is_no_difference(kind, dtype, data):
    torch.manual_seed(1)
    model = salientpp.nn.trim(kind(WIDTH, 8, 3, 4, norm="batch_norm").to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for batch in list(loader(data, batch_size=5, drop_last=True)) * 2:
            out = model(batch.x.to(dtype), batch.edge_index)
    assert out.isfinite().all()


def test_copies_know_how_often_they_were_called(batch):
    model = salientpp.nn.trim(network())
    step(model, batch)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(step(network(), batch), step(copied, batch))


@pytest.mark.parametrize(("precision", "eps"), [("highest", 2.0**-23), ("high", 2.0**-10), ("medium", 2.0**-7)])
def test_results_are_as_precise_as_matrix_products(precision, eps):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert check._eps(torch.ones(1)) == eps
        assert check._eps(torch.ones(1, dtype=torch.float64)) == 2.0**-52
    finally:
        torch.set_float32_matmul_precision(before)
