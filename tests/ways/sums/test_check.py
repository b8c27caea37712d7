"""Laws of the check of merged models: it refuses a model that would differ from the plain one, and it has no effect of its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, GATConv, GraphConv, MessagePassing, SAGEConv
from torch_geometric.utils import trim_to_layer

from salientpp import NeighborLoader
from salientpp.nn import merge_check, merge_partial
from salientpp.testing.steps import graph, summed


class Centred(GraphConv):
    """Layer of the user's, which changes the sums of all vertices."""

    def update(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Net(nn.Module):
    def __init__(self, first: MessagePassing, second: MessagePassing, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change, self.epoch = first, second, change, 0
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.change(self, self.first(x, edge_index)), edge_index)


def net(
    second: MessagePassing | None = None,
    change: Callable[[Any, Tensor], Tensor] = lambda model, h: h.relu(),
    first: Callable[[int, int], MessagePassing] = SAGEConv,
) -> Net:
    torch.manual_seed(0)
    return Net(first(6, 6), second or SAGEConv(6, 4), change)


def hooked(conv: MessagePassing, register: Callable[[Any], Any]) -> MessagePassing:
    register(conv)
    return conv


def with_gradients(hook: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def change(model: Any, h: Tensor) -> Tensor:
        h = h * 1
        h.register_hook(hook)
        return h

    return change


def _by_number(model: Any, h: Tensor) -> Tensor:
    return h / h.size(0)


REFUSED: dict[str, Callable[[], Net]] = {
    "number of rows": lambda: net(change=lambda model, h: h / h.size(0) ** 0.5),
    "positions": lambda: net(change=lambda model, h: h + torch.linspace(0, 1, h.size(0))[:, None]),
    "update of the first layer": lambda: net(first=Centred),
    "update of the second layer": lambda: net(Centred(6, 4)),
    "module on edges": lambda: net(EdgeConv(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)))),
    "hook over attention": lambda: net(hooked(GATConv(6, 4), lambda conv: conv.lin.register_forward_hook(lambda _, args, out: out - out.mean(0)))),
    "gradients": lambda: net(change=with_gradients(lambda gradient: gradient - gradient.mean(0))),
}  # fmt: skip

KEPT: dict[str, Callable[[], Net]] = {
    "layers": net,
    "maximum": lambda: net(SAGEConv(6, 4, aggr="max")),
    "attention": lambda: net(GATConv(6, 2, heads=2)),
    "dropout": lambda: net(change=lambda model, h: nn.functional.dropout(h, 0.5, model.training)),
    "gradients by row": lambda: net(change=with_gradients(lambda gradient: 2 * gradient)),
}  # fmt: skip


def batches(number: int = 1) -> list[Any]:
    data = graph()
    loader = NeighborLoader(data, [3, 5], input_nodes=torch.arange(60), batch_size=6, seed=0)
    return [summed(batch, data, k, "mean", None) for k, batch in enumerate(itertools.islice(loader, number))]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_differ_over_sums_is_refused(name):
    model, (batch,) = merge_partial(REFUSED[name]()), batches()
    with pytest.raises(RuntimeError, match="Net over a batch with sums would differ from the plain model, by "):
        model(batch.x, batch.edge_index)


@pytest.mark.parametrize("name", KEPT)
def test_the_check_has_no_effect_of_its_own(name):
    checked, (batch,) = merge_partial(KEPT[name]()), batches()
    alone = merge_partial(copy.deepcopy(checked), check=False)
    outs = []
    for model in (checked, alone):
        torch.manual_seed(1)
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        out.sum().backward()
        outs.append([out, torch.rand(1), *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *outs))


def test_a_change_between_calls_is_checked():
    model = merge_partial(net(change=lambda model, h: h - h.size(0) / 10 if model.epoch > 4 else h))
    *first, last = batches(4)
    for batch in first:
        model(batch.x, batch.edge_index)
    model.epoch = 5
    with pytest.raises(RuntimeError, match="would differ from the plain model"):
        model(last.x, last.edge_index)


def test_calls_are_checked_at_powers_of_four(monkeypatch):
    model, found, original = merge_partial(net()), [], merge_check._fault
    monkeypatch.setattr(merge_check, "_fault", lambda *args: found.append(calls[0]) or original(*args))
    calls = [0]
    for batch in batches(3) * 6:
        calls[0] += 1
        model(batch.x, batch.edge_index)
    assert found == [1, 4, 16]
    found.clear()
    merge_partial(model, check=False)(batch.x, batch.edge_index)
    model.eval()(batch.x, batch.edge_index)
    assert found == []


def test_a_checked_model_is_freed():
    model, (batch,) = merge_partial(net()), batches()
    model(batch.x, batch.edge_index)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_refused_model_and_its_copies_are_refused_again():
    model, (batch,) = merge_partial(net(change=_by_number)), batches()
    for each in (model, model, copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="would differ from the plain model"):
            each(batch.x, batch.edge_index)


class Returning(Net):
    """Model that returns its arguments too."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return {"out": super().forward(x, edge_index), "given": [x, edge_index[:, :]]}


def test_a_model_may_return_its_arguments():
    for change in (_by_number, lambda model, h: h.relu()):
        model, (batch,) = merge_partial(Returning(SAGEConv(6, 6), SAGEConv(6, 4), change)), batches()
        with pytest.raises(RuntimeError, match="would differ") if change is _by_number else contextlib.nullcontext():
            model(batch.x, batch.edge_index)


@pytest.mark.parametrize("change", [lambda model, h: h.relu(), _by_number], ids=["kept", "refused"])
def test_a_model_that_trims_itself_is_compared(change, recwarn):
    class Trimming(Net):
        def forward(self, x: Tensor, edge_index: Tensor, *numbers: list[int]) -> Tensor:  # type: ignore[override]
            h = self.change(self, self.first(x, edge_index))
            h, edge_index, _ = trim_to_layer(1, *numbers, h, edge_index)
            return self.second(h, edge_index)

    model, (batch,) = merge_partial(Trimming(SAGEConv(6, 6), SAGEConv(6, 4), change)), batches()
    counts = [*batch.num_sampled_nodes[:-1]], [*batch.num_sampled_edges[:-1]]
    numbers = [[*each, total - sum(each)] for each, total in zip(counts, (len(batch.n_id), len(batch.e_id)))]
    with pytest.raises(RuntimeError, match="would differ") if change is _by_number else contextlib.nullcontext():
        model(batch.x, batch.edge_index, *numbers)
    assert not [each for each in recwarn if "merge_partial" in str(each.message)]
