"""Laws of everyday use of trimmed models: copies, files, wrappers, errors, threads, memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import threading
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.func import functional_call
from trimmed import WIDTH, assert_same, batch_of, call_x, compare, graph, loader, network, step, within

import salientpp


@pytest.fixture(scope="module")
def data():
    return graph(6)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


def rows_of(model: nn.Module, batch, call=call_x) -> list[int]:
    return step(model, batch, call).rows[-3:]


def trimmed_rows(batch) -> list[int]:
    return [within(batch, hops) for hops in (2, 1, 0)]


# --- names, copies and files -----------------------------------------------------------------------------------


def test_names_and_values_of_the_model_are_unchanged(batch):
    model = network("batch_norm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [name for name, _ in model.named_modules()]
    trimmed = salientpp.nn.trim(model)
    assert trimmed is model and type(model) is pyg.GCN
    for _ in range(2):
        assert list(model.state_dict()) == list(before) and [name for name, _ in model.named_modules()] == modules
        network("batch_norm").load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(before, strict=True)
        assert repr(model) == f"{network('batch_norm')!r}, trimmed by salientpp.nn.trim"
        step(model, batch)


def in_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), in_file])
def test_copies_of_a_model_are_trimmed(copied, has_run, batch):
    model = salientpp.nn.trim(network())
    if has_run:
        step(model, batch)
    other = copied(model)
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.5)
    plain = network()
    plain.load_state_dict(other.state_dict())
    for each in (other, model):
        got = step(each, batch)
        assert got.rows[-3:] == trimmed_rows(batch)
        assert_same(step(plain if each is other else network(), batch), got)


def test_trimming_twice_is_trimming_once(batch):
    model = salientpp.nn.trim(salientpp.nn.trim(network("batch_norm")), norms="needed rows")
    assert rows_of(model, batch) == trimmed_rows(batch)
    assert rows_of(salientpp.nn.trim(model), batch)[:2] == [batch.num_nodes] * 2
    assert len(step(model, batch).rows) == 3


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.head = inner, pyg.SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.head(self.inner(x, edge_index).relu(), edge_index)


def test_a_part_of_a_model_may_be_trimmed(batch):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.inner, self.head = network(), nn.Linear(4, 2)

        def forward(self, x, edge_index):
            return self.head(self.inner(x, edge_index))

    model = Head().double()
    expected = step(model, batch)
    salientpp.nn.trim(model.inner)
    got = step(model, batch)
    assert_same(expected, got)
    assert got.rows[-3:] == trimmed_rows(batch)


def test_trimmed_models_may_hold_trimmed_models(batch):
    expected = step(Holds(network()).double(), batch)
    model = salientpp.nn.trim(Holds(salientpp.nn.trim(network())).double())
    got = step(model, batch)
    assert_same(expected, got)
    assert got.rows[-4:] == [within(batch, hops) for hops in (3, 2, 1, 0)]
    alone = step(model.inner, batch)
    assert_same(step(network(), batch), alone)
    assert alone.rows[-3:] == trimmed_rows(batch)


def test_a_layer_that_needs_rows_which_were_cut_raises_an_error(batch):
    """Only the part is trimmed, although a layer follows it."""
    model = Holds(salientpp.nn.trim(network())).double()
    with pytest.raises((RuntimeError, IndexError), match=r"rows|indices|index"):
        step(model, batch)


def test_alternating_models_are_exact(batch):
    first, second = network(), network()
    with torch.no_grad():
        for value in second.parameters():
            value.mul_(2)
    expected = [step(model, batch) for model in (first, second)]
    salientpp.nn.trim(first), salientpp.nn.trim(second)
    for _ in range(2):
        for model, each in zip((first, second), expected):
            assert_same(each, step(model, batch))


def test_wrappers_of_trimmed_models_are_exact(batch):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = salientpp.nn.trim(network())

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    compare(Wrapped(), batch)
    swa = torch.optim.swa_utils.AveragedModel(salientpp.nn.trim(network()))
    got = step(swa, batch)
    assert got.rows[-3:] == trimmed_rows(batch)
    torch.testing.assert_close(got.out, step(network(), batch).out, rtol=1e-10, atol=1e-10)


def test_a_functional_call_is_exact(batch):
    model, given = network(), {name: value.detach() * 1.5 for name, value in network().named_parameters()}
    for value in given.values():
        value.requires_grad_()
    gradients = []
    for each in (model, salientpp.nn.trim(copy.deepcopy(model))):
        out = functional_call(each, given, (batch.x, batch.edge_index))[: batch.batch_size]
        gradients.append((out, *torch.autograd.grad(out.sin().sum(), list(given.values()))))
    for expected, got in zip(*gradients):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_frozen_parts_and_gradients_that_add_up(batch):
    model = network()
    model.convs[0].requires_grad_(False)
    compare(model, batch)
    grads = []
    for each in (model, salientpp.nn.trim(copy.deepcopy(model))):
        each.zero_grad()
        for _ in range(2):
            each(batch.x, batch.edge_index)[:13].square().sum().backward()
        grads.append([value.grad for value in each.parameters() if value.grad is not None])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


# --- errors and interrupts -------------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.error, self.at = network(), None, 0

    def forward(self, x, edge_index):
        for number, conv in enumerate(self.inner.convs):
            x = conv(x, edge_index).relu()
            if self.error is not None and number == self.at:
                raise self.error
        return x


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("has_run", [False, True])
def test_an_error_inside_a_model_leaves_it_as_it_was(error, has_run, data, batch):
    plain, model = Fails(), salientpp.nn.trim(Fails())
    other = salientpp.nn.trim(network())
    if has_run:
        step(model, batch)
    model.error = error
    with pytest.raises(type(error)):
        model(batch.x, batch.edge_index)
    model.error = None
    assert_same(step(network(), batch), step(other, batch))
    torch.testing.assert_close(model(data.x, data.edge_index), plain(data.x, data.edge_index), rtol=1e-10, atol=1e-10)
    assert_same(step(plain, batch), step(model, batch))
    assert "forward" not in vars(model.inner.convs[0])
    left = model.inner.convs[0](data.x, data.edge_index)
    torch.testing.assert_close(left, plain.inner.convs[0](data.x, data.edge_index), rtol=1e-10, atol=1e-10)
    assert (torch.ones(3) + 1).sum() == 6


# --- threads ---------------------------------------------------------------------------------------------------


def run_in_threads(*functions) -> list:
    results: list = [None] * len(functions)

    def call(number: int) -> None:
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_models_in_two_threads_are_independent(data):
    salientpp.nn.trim(network())
    batches = list(loader(data, batch_size=3))
    plain = [step(network(), batch) for batch in batches]
    models = [salientpp.nn.trim(network()) for _ in range(2)]
    results = run_in_threads(*[lambda model=model: [step(model, batch) for batch in batches] for model in models])
    for steps in results:
        for expected, got in zip(plain, steps):
            assert_same(expected, got)


@pytest.mark.parametrize("kind", [pyg.ARMAConv, pyg.FiLMConv, pyg.ResGatedGraphConv])
def test_models_in_two_threads_may_share_an_activation_of_pyg(kind, batch):
    """Its default instance belongs to all layers of the class. The first call of one model ends while that of the other runs."""

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([kind(WIDTH, WIDTH), kind(WIDTH, 4)]).double()
            self.meet: Any = lambda: None

        def forward(self, x, edge_index):
            self.meet()
            return self.layers[1](self.layers[0](x, edge_index), edge_index)

    entered, left, results = threading.Event(), threading.Event(), []
    first, second = salientpp.nn.trim(Meets()), salientpp.nn.trim(Meets())
    thread = threading.Thread(target=lambda: results.append(step(second, batch)))
    first.meet = lambda: (thread.ident or thread.start(), entered.wait(60))
    second.meet = lambda: (entered.set(), left.wait(60))
    results.append(step(first, batch))
    left.set()
    thread.join()
    for got in results:
        assert_same(step(Meets(), batch), got)
    assert not any("forward" in vars(module) for module in first.modules())


def test_a_second_thread_raises_a_clear_error(batch):
    begun, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x, edge_index):
            out = self.inner(x, edge_index)
            if not torch.is_grad_enabled():
                return out
            begun.set()
            done.wait(60)
            return out

    model = salientpp.nn.trim(Waits())

    def other():
        begun.wait(60)
        try:
            return model(batch.x, batch.edge_index)
        finally:
            done.set()

    first, second = run_in_threads(lambda: model(batch.x, batch.edge_index), other)
    assert (
        isinstance(second, RuntimeError)
        and "another thread runs it" in str(second)
        and "give each thread its own copy" in str(second)
    )
    torch.testing.assert_close(first[:13], network()(batch.x, batch.edge_index)[:13], rtol=1e-10, atol=1e-10)
    begun.set(), done.set()
    assert run_in_threads(lambda: model(batch.x, batch.edge_index).size(0)) == [13]


# --- memory ----------------------------------------------------------------------------------------------------


def test_no_model_keeps_a_batch(data, request):
    model = salientpp.nn.trim(network("batch_norm"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    references = []
    gc.collect()
    gc.disable()  # memory must be freed without it
    request.addfinalizer(gc.enable)
    for training in (True, False, True):
        model.train(training)
        for batch in loader(data, batch_size=4, drop_last=True):
            references += [weakref.ref(batch), weakref.ref(batch.edge_index.untyped_storage()), weakref.ref(batch.x)]
            out = model(batch.x, batch.edge_index)
            if training:
                optimizer.zero_grad()
                out[: batch.batch_size].sum().backward()
                optimizer.step()
            references.append(weakref.ref(out))
        del batch, out
        assert not any(reference() is not None for reference in references)


# --- arguments in objects --------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    edge_index: torch.Tensor
    cache: Any = dataclasses.field(init=False)  # without a value

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        setattr(self, name, value)


class OfObject(nn.Module):
    """Writes to its argument, an object whose writes a rehearsal cannot undo."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.first, self.second = nn.Linear(WIDTH, 6), pyg.SAGEConv(6, 6), pyg.SAGEConv(6, 6)

    def forward(self, given: Any) -> torch.Tensor:
        given["x"] = self.lin(given["x"])
        return self.second(self.first(given["x"], given["edge_index"]).relu(), given["edge_index"])


@pytest.mark.parametrize("kind", [Slots, lambda x, edge_index: UserDict(x=x, edge_index=edge_index)])
def test_arguments_in_objects_are_written_once(batch, kind):
    plain = OfObject()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    x = torch.rand(batch.num_nodes, WIDTH)
    for _ in range(3):
        expected, got = (model(kind(x, batch.edge_index))[: batch.batch_size] for model in (plain, trimmed))
        torch.testing.assert_close(got, expected)


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(WIDTH, 6), pyg.SAGEConv(6, 6)

    def forward(self, given: Any) -> torch.Tensor:
        return self.second(self.first(given.x, given.edge_index).relu(), given.edge_index)


def test_an_unset_field_of_an_object_in_the_batch_does_not_matter(batch):
    batch = copy.copy(batch)
    batch.meta = Slots(batch.x, batch.edge_index)
    plain = OfBatch().double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for _ in range(2):
        torch.testing.assert_close(trimmed(batch)[: batch.batch_size], plain(batch)[: batch.batch_size])
