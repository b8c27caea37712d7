"""Laws of how models may be written and used in full-graph training: each use equals one process, or raises a clear error.

The rows of the table run one after the other on two ranks. A row is a function that gets a :class:`Way` and returns tensors. It runs once on the whole
graph in one process and once over ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from rare import rare
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from salientpp.fullgraph import distribute, local, loss_mean

N, WIDTH, HIDDEN, CLASSES = 60, 5, 6, 3


def graph() -> Data:
    draw = torch.Generator().manual_seed(7)
    edge_index = torch.randint(N, (2, 240), generator=draw)
    return Data(
        edge_index=edge_index,
        x=torch.randn(N, WIDTH, generator=draw).double(),
        y=torch.randint(CLASSES, (N,), generator=draw),
        edge_weight=torch.rand(240, generator=draw).double() + 0.1,
        edge_attr=torch.rand(240, 2, generator=draw).double(),
    )


class Way:
    """Way in which a row is computed: on the whole graph in one process, or over ranks.

    Args:
        is_alone: True in one process.
        kept: True if a rank keeps the input rows of its halo, by a plan.
        recompute: the argument of ``distribute``.
    """

    def __init__(self, is_alone: bool, kept: bool = False, recompute: str | None = None) -> None:
        data = graph()
        self.recompute = recompute
        self.is_alone = is_alone
        self.g: Any = data if is_alone else local(data, offsets=[0, 22, N])
        if kept and not is_alone:
            self.g = self.g.planned(self.g.outer, torch.zeros_like(self.g.outer))

    def wrap(self, module: torch.nn.Module) -> Any:
        module = module.double()
        return module if self.is_alone else distribute(module, self.g, recompute=self.recompute)

    def mean(self, losses: Tensor) -> Tensor:
        return losses.mean() if self.is_alone else loss_mean(losses, self.g)

    def loss(self, out: Tensor) -> Tensor:
        return self.mean(F.cross_entropy(out, self.g.y, reduction="none"))

    def own(self, rows: Tensor) -> Tensor:
        """Returns the rows of the vertices of rank 0 or 1, given the whole graph's rows."""
        if not self.is_alone:
            return rows
        return rows[:22] if torch.distributed.get_rank() == 0 else rows[22:]


def gradients(module: torch.nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


class Net(torch.nn.Module):
    """Layer, and a head that ``head`` computes from the module, which may hold its parameters elsewhere."""

    def __init__(
        self, head: Callable[[Net, Tensor], Any] | None = None, hold: Callable[[Net], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = pyg.SAGEConv(WIDTH, HIDDEN)
        self.lin = torch.nn.Linear(HIDDEN, CLASSES)
        self.held = None if hold is None else hold(self)
        self.head = head or (lambda net, h: net.lin(h))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.head(self, self.conv(x, edge_index).relu())


def trained(way: Way, module: torch.nn.Module, *more: Any) -> list[Tensor | None]:
    model = way.wrap(module)
    out = model(way.g.x, way.g.edge_index, *more)
    way.loss(out).backward()
    return [way.own(out), *gradients(module)]


# --- parameters that are kept elsewhere ---------------------------------------------------------------------


def in_list(way: Way) -> Any:
    return trained(way, Net(lambda net, h: F.linear(h, net.held[0], net.held[1]), lambda net: [*net.lin.parameters()]))


def in_nested_dict(way: Way) -> Any:
    return trained(way, Net(lambda net, h: h @ net.held["a"]["w"].t(), lambda net: {"a": {"w": net.lin.weight}}))


def in_tuple_of_stacked(way: Way) -> Any:
    return trained(
        way, Net(lambda net, h: F.linear(h, torch.stack(net.held).sum(0)), lambda net: (net.lin.weight, net.lin.weight))
    )


def in_closure(way: Way) -> Any:
    net = Net()
    weight, bias = net.lin.weight, net.lin.bias
    net.head = lambda _, h: h.matmul(weight.T).add(bias)
    return trained(way, net)


def as_another_attribute(way: Way) -> Any:
    net = Net(lambda net, h: F.linear(h, net.conv.__dict__["other"]) + net.lin.bias)
    net.conv.__dict__["other"] = net.lin.weight
    return trained(way, net)


def tied(way: Way) -> Any:
    net = Net(lambda net, h: net.lin(net.second(h)))
    net.second = torch.nn.Linear(HIDDEN, HIDDEN)
    net.third = torch.nn.Linear(HIDDEN, HIDDEN)
    net.third.weight = net.second.weight
    net.head = lambda net, h: net.lin(net.third(net.second(h)))
    return trained(way, net)


def with_weight_norm(way: Way) -> Any:
    net = Net()
    parametrizations.weight_norm(net.lin)
    return trained(way, net)


def in_a_parameter_list(way: Way) -> Any:
    net = Net(lambda net, h: h @ net.several[0] @ net.several[1])
    net.several = torch.nn.ParameterList([torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN, CLASSES)])
    return trained(way, net)


def in_an_lstm(way: Way) -> Any:
    net = Net(lambda net, h: net.lin(net.lstm(h.unsqueeze(1))[0].squeeze(1)))
    net.lstm = torch.nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    return trained(way, net)


def in_a_gru(way: Way) -> Any:
    net = Net(lambda net, h: net.lin(net.gru(h.unsqueeze(1))[0].squeeze(1)))
    net.gru = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=False)
    return trained(way, net)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def in_a_function_of_autograd(way: Way) -> Any:
    return trained(way, Net(lambda net, h: F.linear(h, Tripled.apply(net.lin.weight))))


def from_a_list_in_a_function_of_autograd(way: Way) -> Any:
    return trained(way, Net(lambda net, h: F.linear(h, Tripled.apply(net.held[0])), lambda net: [net.lin.weight]))


def replaced_in_a_call(way: Way) -> Any:
    net = Net()
    model = way.wrap(net)
    weight = (net.lin.weight.detach() * 2).requires_grad_()
    named = {("lin.weight" if way.is_alone else "module.lin.weight"): weight}
    out = torch.func.functional_call(model, named, (way.g.x, way.g.edge_index))
    way.loss(out).backward()
    return [way.own(out), weight.grad, *gradients(net)]


def encoded_outside(way: Way) -> Any:
    net = Net()
    net.encoder = torch.nn.Linear(WIDTH, WIDTH)
    model = way.wrap(net)
    way.loss(model(net.encoder(way.g.x), way.g.edge_index)).backward()
    return gradients(net)


def checkpointed(way: Way) -> Any:
    return trained(way, Net(lambda net, h: checkpoint(net.lin, h, use_reentrant=False)))


def checkpointed_again(way: Way) -> Any:
    return trained(way, Net(lambda net, h: checkpoint(net.lin, h, use_reentrant=True)))


# --- gradients that exist or not ----------------------------------------------------------------------------


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = pyg.GCNConv(WIDTH, HIDDEN)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor, edge_index: Tensor, number: int) -> Tensor:
        return self.heads[number](self.conv(x, edge_index))


def with_an_idle_head(way: Way) -> Any:
    found = trained(way, Heads(), 0)
    assert found[-1] is None and found[-3] is not None
    return found


def with_idle_heads_under_adam(way: Way) -> Any:
    """Momentum and weight decay move a parameter whose gradient is zero, but not one without a gradient."""
    net = Heads()
    model = way.wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3)
    for number in (0, 0, 1, 1, 0):
        optimizer.zero_grad()
        way.loss(model(way.g.x, way.g.edge_index, number)).backward()
        optimizer.step()
    return [*net.parameters()]


def with_a_head_for_some_vertices(way: Way) -> Any:
    """The other head is for vertices that only the second rank has, so the first rank does not call it."""
    net = Heads()
    model = way.wrap(net)
    g = way.g
    place = torch.arange(N)[:, None].double() if way.is_alone else g.n_id[:, None].double()

    def forward(x: Tensor, edge_index: Tensor, number: int) -> Tensor:
        h = net.conv(x, edge_index)
        out = net.heads[0](h)
        is_late = place[:, 0] >= 40
        if is_late.any():
            out = torch.where(is_late[:, None], net.heads[1](h), out)
        return out

    net.forward = forward
    out = model(g.x, g.edge_index, 0)
    way.loss(out).backward()
    return [way.own(out), *gradients(net)]


def frozen_and_trained_again(way: Way) -> Any:
    net = Net()
    model = way.wrap(net)
    net.lin.weight.requires_grad_(False)
    way.loss(model(way.g.x, way.g.edge_index)).backward()
    before = [None if grad is None else grad.clone() for grad in gradients(net)]
    net.lin.weight.requires_grad_(True)
    way.loss(model(way.g.x, way.g.edge_index)).backward()
    return [*before, *gradients(net)]


def accumulated_over_two_calls(way: Way) -> Any:
    net = Heads()
    model = way.wrap(net)
    first, second = (model(way.g.x, way.g.edge_index, number) for number in (0, 1))
    way.loss(second).backward()
    way.loss(first).backward()
    return gradients(net)


def two_calls_in_one_loss(way: Way) -> Any:
    net = Net(lambda net, h: F.linear(h, net.held[0]), lambda net: [net.lin.weight])
    model = way.wrap(net)
    (way.loss(model(way.g.x, way.g.edge_index)) + way.loss(model(-way.g.x, way.g.edge_index))).backward()
    return gradients(net)


def with_a_penalty(way: Way) -> Any:
    """A loss term that depends only on parameters is equal on every rank, and must count once."""
    net = Net()
    model = way.wrap(net)
    loss = way.loss(model(way.g.x, way.g.edge_index)) + 0.1 * sum(p.square().sum() for p in net.parameters())
    loss.backward()
    return gradients(net)


def asked_of_autograd(way: Way) -> Any:
    net = Heads()
    model = way.wrap(net)
    loss = way.loss(model(way.g.x, way.g.edge_index, 1))
    return list(torch.autograd.grad(loss, [*net.parameters()], allow_unused=True))


def around_ddp(way: Way) -> Any:
    net = Heads()
    model = way.wrap(net)
    if not way.is_alone:
        model = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        net.zero_grad()
        way.loss(model(way.g.x, way.g.edge_index, 0)).backward()
    return gradients(net)[:-2]  # DDP gives an idle parameter zeros


def of_the_input(way: Way) -> Any:
    net = Net()
    model = way.wrap(net)
    x = way.g.x.clone().requires_grad_()
    way.loss(model(x, way.g.edge_index)).backward()
    return [way.own(x.grad)]


# --- tensors that change ------------------------------------------------------------------------------------


class Weighted(torch.nn.Module):
    def __init__(self, conv: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = {
            "GraphConv": lambda: pyg.GraphConv(WIDTH, CLASSES),
            "GCNConv": lambda: pyg.GCNConv(WIDTH, CLASSES),
            "TAGConv": lambda: pyg.TAGConv(WIDTH, CLASSES, K=2),
        }
        self.conv = made[conv]()

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight)


def after(change: Callable[[Any], None], conv: str) -> Callable[[Way], Any]:
    """Compares outputs and gradients before and after a change of the graph, twice."""

    def row(way: Way) -> Any:
        net = Weighted(conv)
        model = way.wrap(net)
        found = []
        for turn in range(3):
            if turn:
                change(way.g)
            net.zero_grad()
            out = model(way.g.x, way.g.edge_index, way.g.edge_weight)
            way.loss(out).backward()
            found += [way.own(out), *gradients(net)]
        return found

    return row


def doubled(g: Any) -> None:
    g.edge_weight.mul_(2).add_(0.3)


def replaced(g: Any) -> None:
    g.edge_weight = g.edge_weight * 2 + 0.3


def turned_into_loops(g: Any) -> None:
    source, target = g.edge_index
    source.copy_(target)


def with_learned_edges(way: Way) -> Any:
    net = Weighted("GCNConv")
    model = way.wrap(net)
    weight = way.g.edge_weight.clone().requires_grad_()
    out = model(way.g.x, way.g.edge_index, weight)
    way.loss(out).backward()
    order = torch.zeros(240, dtype=torch.float64)
    ids = torch.arange(240) if way.is_alone else way.g.e_id
    order[ids] = weight.grad
    if not way.is_alone:  # the gradient of an edge is complete on the rank that has the edge
        order = way.g.ranks.sum_up(order, "test")
    return [way.own(out), order]


def asked_to_learn_later(way: Way) -> Any:
    net = Weighted("GraphConv")
    model = way.wrap(net)
    way.loss(model(way.g.x, way.g.edge_index, way.g.edge_weight)).backward()
    way.g.edge_weight.requires_grad_()
    way.loss(model(way.g.x, way.g.edge_index, way.g.edge_weight)).backward()
    return [way.g.edge_weight.grad.sum() if way.is_alone else way.g.ranks.sum_up(way.g.edge_weight.grad.sum(), "test")]


def with_attributes_in_place(way: Way) -> Any:
    torch.manual_seed(3)
    net = pyg.GATConv(WIDTH, CLASSES, edge_dim=2)
    model = way.wrap(net)
    found = []
    for _ in range(2):
        found.append(way.own(model(way.g.x, way.g.edge_index, way.g.edge_attr)))
        way.g.edge_attr.mul_(3)
    return found


def evaluated_first(way: Way) -> Any:
    net = Weighted("TAGConv")
    model = way.wrap(net)
    with torch.inference_mode():
        out = model(way.g.x, way.g.edge_index, way.g.edge_weight)
    return [way.own(out), *trained_again(way, model, net)]


def trained_again(way: Way, model: Any, net: torch.nn.Module) -> list[Tensor | None]:
    way.loss(model(way.g.x, way.g.edge_index, way.g.edge_weight)).backward()
    return gradients(net)


def rows_in_place(way: Way) -> Any:
    net = Net()
    model = way.wrap(net)
    found = []
    for _ in range(2):
        net.zero_grad()
        out = model(way.g.x, way.g.edge_index)
        way.loss(out).backward()
        found += [way.own(out), *gradients(net)]
        way.g.x.mul_(2)
    return found


def learned_rows(way: Way) -> Any:
    net = Net()
    model = way.wrap(net)
    way.g.x.requires_grad_()
    for _ in range(2):
        way.loss(model(way.g.x, way.g.edge_index)).backward()
    return [way.own(way.g.x.grad), *gradients(net)]


def without_bias(way: Way) -> Any:
    norm = torch.nn.BatchNorm1d(CLASSES)
    norm.bias = None
    net = Net(lambda net, h: net.norm(net.lin(h)))
    net.norm = norm
    return [*trained(way, net), norm.running_mean, norm.running_var]


# --- outputs of models --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    rows: Tensor
    more: Any


@dataclasses.dataclass(frozen=True)
class Result:
    rows: Tensor
    width: int
    more: Any = None


class Output(collections.OrderedDict):
    """Output as in transformers: a dict whose items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def returned(make: Callable[[Tensor], Any], take: Callable[[Any], list[Any]]) -> Callable[[Way], Any]:
    """Makes a row. ``take`` finds the tensors of vertices in the output of a model that ends in ``make``."""

    def row(way: Way) -> Any:
        net = Net(lambda net, h: make(net.lin(h)))
        out = way.wrap(net)(way.g.x, way.g.edge_index)
        assert type(out) is type(make(torch.zeros(1, CLASSES)))
        rows = take(out)
        way.loss(rows[0]).backward()
        return [*map(way.own, rows), *gradients(net)]

    return row


def with_hidden_as_output(rows: Tensor) -> Output:
    made = Output()
    made["rows"] = rows
    made["number"] = 3
    return made


Row = Callable[[Way], Any]

#: Name -> (row, True if under a plan, text of the error or None).
TABLE: dict[str, tuple[Row, bool, str | None]] = {
    "a parameter in a list": (in_list, False, None),
    "a parameter in a dict of dicts": (in_nested_dict, False, None),
    "parameters in a tuple, stacked": (in_tuple_of_stacked, False, None),
    "a parameter in a closure": (in_closure, False, None),
    "a parameter as an attribute of another module": (as_another_attribute, False, None),
    "tied weights": (tied, False, None),
    "weight_norm": (with_weight_norm, False, None),
    "a ParameterList": (in_a_parameter_list, False, None),
    "an LSTM": (in_an_lstm, False, None),
    "a GRU": (in_a_gru, False, None),
    "a function of autograd": (in_a_function_of_autograd, False, None),
    "a list in a function of autograd": (from_a_list_in_a_function_of_autograd, False, "lin.weight"),
    "functional_call": (replaced_in_a_call, False, None),
    "rows that a part of the model encoded before": (encoded_outside, False, "encoder.weight"),
    "a checkpoint": (checkpointed, False, None),
    "a reentrant checkpoint": (checkpointed_again, False, "use_reentrant=False"),
    "an idle head": (with_an_idle_head, False, None),
    "idle heads under AdamW": (with_idle_heads_under_adam, False, None),
    "a head that one rank does not call": (with_a_head_for_some_vertices, False, None),
    "frozen, then trained again": (frozen_and_trained_again, False, None),
    "gradients of two calls": (accumulated_over_two_calls, False, None),
    "two calls in one loss": (two_calls_in_one_loss, False, None),
    "a penalty of the parameters": (with_a_penalty, False, None),
    "torch.autograd.grad": (asked_of_autograd, False, None),
    "DDP around a model with an idle head": (around_ddp, False, None),
    "the gradient of the input": (of_the_input, False, None),
    "weights in place, GraphConv": (after(doubled, "GraphConv"), False, None),
    "weights in place, GCNConv": (after(doubled, "GCNConv"), False, None),
    "weights in place, TAGConv": (after(doubled, "TAGConv"), False, None),
    "weights replaced, GCNConv": (after(replaced, "GCNConv"), False, None),
    "edges in place, GraphConv": (after(turned_into_loops, "GraphConv"), False, None),
    "edges in place, GCNConv": (after(turned_into_loops, "GCNConv"), False, None),
    "weights in place under a plan": (after(doubled, "GCNConv"), True, None),
    "learned weights of edges": (with_learned_edges, False, None),
    "weights of edges that are learned later": (asked_to_learn_later, False, None),
    "attributes of edges in place": (with_attributes_in_place, False, None),
    "evaluation in inference mode, then training": (evaluated_first, False, None),
    "rows in place under a plan": (rows_in_place, True, None),
    "learned rows under a plan": (learned_rows, True, None),
    "batch normalisation without a bias": (without_bias, False, None),
    "a tensor under a plan": (returned(lambda rows: rows, lambda out: [out]), True, None),
    "a dict under a plan": (returned(lambda rows: {"rows": rows}, lambda out: [out["rows"]]), True, None),
    "a defaultdict under a plan": (
        returned(lambda rows: collections.defaultdict(list, {"a": [rows]}), lambda out: out["a"]), True, None,
    ),
    "a list of tuples under a plan": (
        returned(lambda rows: [(rows, None, "name"), 3], lambda out: [out[0][0]]), True, None,
    ),
    "a NamedTuple under a plan": (
        returned(lambda rows: Pair(rows, {"h": rows * 2}), lambda out: [out.rows, out.more["h"]]), True, None,
    ),
    "a dataclass under a plan": (
        returned(lambda rows: Result(rows, 3, [rows + 1]), lambda out: [out.rows, *out.more]), True, None,
    ),
    "an output of transformers under a plan": (
        returned(with_hidden_as_output, lambda out: [out["rows"], out.rows]), True, None,
    ),
    "an object under a plan": (
        returned(lambda rows: types.SimpleNamespace(rows=rows), lambda out: [out.rows]), True, "SimpleNamespace",
    ),
    "a set under a plan": (returned(lambda rows: {rows}, lambda out: [*out]), True, "a set"),
    "vertices in the second dimension under a plan": (
        returned(lambda rows: rows.t(), lambda out: [out.t()]), True, "first dimension",
    ),
}  # fmt: skip


def differences(rank: int, recompute: str | None, names: list[str]) -> list[str]:
    """Lists results over ranks that are neither those of one process nor the error that the table names."""
    wrong = []
    for name in names:
        row, is_planned, words = TABLE[name]
        expected = row(Way(True))
        try:
            found = row(Way(False, is_planned, recompute))
        except Exception as error:
            if words is None or words not in str(error):
                wrong.append(f"{name}: rank {rank}: {type(error).__name__}: {error}")
            continue
        if words is not None:
            wrong.append(f"{name}: rank {rank}: not refused")
        for place, (a, b) in enumerate(zip(expected, found, strict=True)):
            if (a is None) != (b is None):
                wrong.append(f"{name}: rank {rank}: value {place} is {a} alone and {b} over ranks")
            elif a is not None and (a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-9)):
                off = float((a - b).abs().max()) if a.shape == b.shape else f"{[*a.shape]} and {[*b.shape]}"
                wrong.append(f"{name}: rank {rank}: value {place} is off by {off}")
    return wrong


@pytest.mark.parametrize(
    ("recompute", "names"),
    [(None, [*TABLE]), ("layers", [*TABLE][::3]), *rare(("layers", [*TABLE]))],
    ids=lambda value: f"{len(value)} uses" if isinstance(value, list) else str(value),
)
def test_each_use_equals_one_process_or_raises_a_clear_error(recompute, names):
    wrong = distributed.run(differences, 2, recompute, names)
    assert sum(wrong, []) == []
