"""Laws of full-graph training when one rank does something else: every rank raises a clear error, or the result equals that of one process.

Each mistake trains on its own part, all in the same processes, because ranks survive it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from rare import rare
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp.fullgraph import DistAdjacency, accuracy, distribute, local, loss_mean

NUMBER, WIDTH, CLASSES, STEPS = 60, 6, 5, 3


def data_of() -> Data:
    data = random_data(NUMBER, 4 * NUMBER, directed=True)
    draw = torch.Generator().manual_seed(1)
    data.x = torch.randn(NUMBER, WIDTH, generator=draw).double()
    data.y = torch.arange(NUMBER) % CLASSES
    data.train_mask = torch.arange(NUMBER) % 2 == 0
    return data


class Net(torch.nn.Module):
    """Model with two layers, batch normalisation, and two heads. ``during`` runs between the layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = pyg.SAGEConv(WIDTH, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.second = pyg.GCNConv(width, CLASSES)
        self.conv_head = pyg.SAGEConv(width, CLASSES)
        self.linear_head = torch.nn.Linear(width, CLASSES)
        self.during: Callable[[Tensor], Tensor] = lambda x: x
        self.head, self.skips = "none", False

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.during(self.norm(self.first(x, edge_index)).relu())
        out = x[:, :CLASSES] if self.skips else self.second(x, edge_index)
        if self.head == "conv":
            return out + self.conv_head(x, edge_index)
        return out + self.linear_head(x) if self.head == "linear" else out


class Step:
    """Training step in pieces that a mistake replaces. ``number`` counts from 0; ``part`` and ``model`` are this rank's."""

    def __init__(self, rank: int, layout: str) -> None:
        self.rank = rank
        self.part = local(data_of(), timeout=distributed.NEVER)
        self.module = Net().double()
        self.model = distribute(self.module, self.part, layout)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)
        self.x, self.edge_index, self.number = self.part.x, self.part.edge_index, 0

    def forward(self) -> Tensor:
        return self.model(self.x, self.edge_index)

    def losses(self, out: Tensor) -> Tensor:
        mask = self.part.train_mask
        return F.cross_entropy(out[mask], self.part.y[mask], reduction="none")

    def loss(self, out: Tensor) -> Tensor:
        return loss_mean(self.losses(out), self.part)

    def run(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.forward())
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


# --- mistakes -----------------------------------------------------------------------------------------------
# Each mistake is called on every rank before each step. ``here`` is True at the rank and step at which it happens.

ROW = "rows of float64 [*, 6]"
MISTAKES: dict[str, tuple[Callable[[Step, bool], Any], str | None]] = {}


def mistake(says: str | None) -> Callable[[Callable[[Step, bool], Any]], Callable[[Step, bool], Any]]:
    """Registers a mistake. ``says`` is part of each rank's error, or None if the result is right."""

    def add(function: Callable[[Step, bool], Any]) -> Callable[[Step, bool], Any]:
        MISTAKES[function.__name__] = function, says
        return function

    return add


@mistake(
    "module model (Net) is in training mode on rank 0 and in evaluation mode on rank 1; module first (SAGEConv) is"
)
def eval_on_one(step: Step, here: bool) -> None:
    if here:
        step.model.eval()


@mistake("module norm (BatchNorm1d) is in training mode on rank 0 and in evaluation mode on rank 1")
def one_module_in_evaluation_on_one(step: Step, here: bool) -> None:
    if here:
        step.module.norm.eval()


@mistake(
    "parameter first.lin_l.weight is float64 [8, 6] and trained on rank 0 and float64 [8, 6] and frozen (requires_grad=False) on rank 1"
)
def a_frozen_parameter_on_one(step: Step, here: bool) -> None:
    if here:
        step.module.first.lin_l.weight.requires_grad_(False)


@mistake(
    "the next step is loss_mean (float64 [2]) in call 2 of the model on rank 0 and exchange 6 (layer 1, SAGEConv: "
)
def one_forward_more_on_one(step: Step, here: bool) -> None:
    if here:
        step.forward()


@mistake(
    "parameter first.lin_l.weight is float64 [8, 6] and trained on rank 0 and float64 [9, 6] and trained on rank 1"
)
def another_width_on_one(step: Step, here: bool) -> None:
    if here:
        other = Net(9).double()
        for name in ("first", "norm", "second"):
            setattr(step.module, name, getattr(other, name))


@mistake("module third (SAGEConv) is absent on rank 0 and in training mode on rank 1")
def one_layer_more_on_one(step: Step, here: bool) -> None:
    if here:
        step.module.third = pyg.SAGEConv(8, 8).double()
        step.module.during = lambda x: step.module.third(x, step.edge_index)


@mistake(f"the model's first argument is {ROW} without a gradient on rank 0 and {ROW} with a gradient on rank 1")
def rows_with_a_gradient_on_one(step: Step, here: bool) -> None:
    if here:
        step.x = step.x.clone().requires_grad_()


@mistake(f"the model's first argument is {ROW} without a gradient on rank 0 and rows of float32 [*, 6] without a")
def rows_of_another_dtype_on_one(step: Step, here: bool) -> None:
    if here:
        step.x = step.x.float()


@mistake(f"the model's first argument is {ROW} without a gradient on rank 0 and rows of float64 [*, 5] without a")
def narrower_rows_on_one(step: Step, here: bool) -> None:
    if here:
        step.x = step.x[:, 1:]


@mistake("autocast is disabled on rank 0 and bfloat16 on rank 1")
def autocast_on_one(step: Step, here: bool) -> None:
    if here:
        with torch.autocast("cpu", torch.bfloat16):
            step.run()


@mistake("grad mode is enabled on rank 0 and disabled on rank 1")
def no_grad_on_one(step: Step, here: bool) -> None:
    if here:
        with torch.no_grad():
            step.forward()


@mistake(
    "the next step is the gradient of exchange 5 (layer 2, GCNConv: rows of float64 [*, 5] with a gradient), float64 in"
)
def backward_left_out_on_one(step: Step, here: bool) -> None:
    if here:
        step.loss(step.forward())
        step.forward()


@mistake(
    "the next step is loss_mean (float64 [2]) in call 2 of the model on rank 0 and exchange 6 (layer 3, SAGEConv: "
)
def a_second_head_with_a_layer_on_one(step: Step, here: bool) -> None:
    if here:
        step.module.head = "conv"


@mistake(None)
def a_second_head_without_a_layer_on_one(step: Step, here: bool) -> None:
    step.module.head = "linear" if step.rank else "none"


@mistake("LookupError: the user's mistake")
def an_error_in_the_model_on_one(step: Step, here: bool) -> None:
    def fail(x: Tensor) -> Tensor:
        raise LookupError("the user's mistake")

    if here:
        step.module.during = fail


@mistake("the next step is loss_mean (float64 [2]) in call 2 of the model on rank 0 and exchange 6 (")
def an_error_in_the_loss_on_one_that_goes_on(step: Step, here: bool) -> None:
    if here:
        try:
            F.cross_entropy(step.forward(), torch.full((1,), -5))
        except ValueError:
            step.forward()


@mistake("on rank 0 and accuracy (float64 [2]) in call 1 of the model on rank 1")
def the_loop_left_early_by_one(step: Step, here: bool) -> None:
    if here:
        accuracy(step.part.y, step.part.y, step.part)


@mistake("on rank 0 and num_classes (1 number) in call 1 of the model on rank 1")
def num_classes_asked_for_on_one(step: Step, here: bool) -> None:
    if here:
        _ = step.part.num_classes


@mistake("on rank 0 and distribute in call 1 of the model on rank 1")
def a_second_model_on_one(step: Step, here: bool) -> None:
    if here:
        distribute(Net().double(), step.part)


@mistake("in call 3 of the model on rank 0 and the gradient of exchange 5 (layer 2, GCNConv: ")
def a_second_backward_on_one(step: Step, here: bool) -> None:
    if here:
        loss = step.loss(step.forward())
        loss.backward(retain_graph=True)
        loss.backward()


@mistake("loss_mean (float64 [2])")
def a_second_loss_on_one(step: Step, here: bool) -> None:
    if here:
        out = step.forward()
        step.loss(out)
        step.loss(out).backward()


@mistake("loss_mean (float32 [2])")
def a_loss_of_another_dtype_on_one(step: Step, here: bool) -> None:
    if here:
        step.losses = lambda out: Step.losses(step, out).float()  # type: ignore[method-assign]


@mistake("(normalisation: rows of float64 [*] without a gradient)")
def other_edges_on_one(step: Step, here: bool) -> None:
    if here:
        step.edge_index = step.edge_index[:, 1:].clone()


@mistake(
    "the next step is exchange 5 (layer 2, GCNConv: rows of float64 [*, 5] with a gradient) in call 2 of the model on rank 0 and loss_mean"
)
def a_layer_that_one_skips(step: Step, here: bool) -> None:
    step.module.skips = here


@mistake("the gradient of exchange")
def losses_backward_in_another_order_on_one(step: Step, here: bool) -> None:
    if step.number == 1:
        losses = [step.loss(step.forward()), step.loss(step.forward())]
        for loss in reversed(losses) if here else losses:
            loss.backward()


@mistake("the distributed model that is called is number 2 on rank 0 and number 1")
def two_models_in_another_order_on_one(step: Step, here: bool) -> None:
    if step.number == 1:
        other = distribute(Net().double(), step.part, step.model.layout)
        for model in (step.model, other) if here else (other, step.model):
            model(step.x, step.edge_index)


@mistake("MaxAggregation")
def another_aggregation_on_one(step: Step, here: bool) -> None:
    if here:
        step.module.first.aggr_module = pyg.MaxAggregation()


@mistake("on rank 0 and to lay out a matrix (2 numbers) in call 1 of the model on rank 1")
def a_matrix_laid_out_on_one(step: Step, here: bool) -> None:
    if here:
        DistAdjacency(step.part, "1d")


#: Other layouts refuse these on every rank, with a different error.
HALO_ALONE = {"other_edges_on_one", "another_aggregation_on_one"}


# --- the table ----------------------------------------------------------------------------------------------


def said_of(rank: int, name: str, layout: str) -> str:
    """Returns this rank's error, or the losses of its steps."""
    step = Step(rank, layout)
    mistaken, losses = MISTAKES[name][0], []
    try:
        for step.number in range(STEPS):
            mistaken(step, rank == 1 and step.number == 1)
            losses.append(step.run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"losses {losses}"


def said_of_all(rank: int, names: list[str], layout: str) -> dict[str, str]:
    return {name: said_of(rank, name, layout) for name in names}


def alone(name: str) -> list[float]:
    """Returns the losses of one process, for a mistake that changes nothing."""
    data, net, losses = data_of(), Net().double(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    on_rank_1 = (torch.arange(NUMBER) >= NUMBER // 2)[:, None]
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = net.norm(net.first(data.x, data.edge_index)).relu()
        out = net.second(x, data.edge_index) + torch.where(on_rank_1, net.linear_head(x), 0)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


IN_ALL = [name for name in MISTAKES if name not in HALO_ALONE]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("halo", [*MISTAKES]),
        ("cover", IN_ALL[::3]),
        ("1d", IN_ALL[1::3]),
        *rare(("cover", IN_ALL), ("1d", IN_ALL)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} mistakes",
)
def test_every_rank_names_what_one_rank_does_differently(layout, names):
    wrong = []
    for rank, said in enumerate(distributed.run(said_of_all, 2, names, layout)):
        for name in names:
            says = MISTAKES[name][1]
            if says is None:
                found = [float(each) for each in re.findall(r"-?\d+\.\d+", said[name])]
                if found != pytest.approx(alone(name), abs=1e-6):
                    wrong.append(f"{name} on rank {rank}: {said[name]}")
            elif says not in said[name]:
                wrong.append(f"{name} on rank {rank}: {said[name]}")
    assert not wrong, "\n".join(wrong)


def leaves(rank: int, raises: bool) -> None:
    step = Step(rank, "halo")
    for _ in range(STEPS - rank):
        step.run()
    if raises and rank == 1:
        step.forward()
        raise LookupError("the user's mistake in the loss")


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_leaves_the_loop_and_ends_is_named(raises):
    first, second = distributed.run(leaves, 2, raises, may_fail=True)
    assert second.kind == "LookupError" if raises else second is None
    assert first.kind == "RankFailure" and "rank 1 went away" in first.text


def named(rank: int) -> str:
    return said_of(rank, "eval_on_one", "halo")


def test_an_error_lists_the_ranks_of_each_value():
    for said in distributed.run(named, 4):
        assert "is in training mode on ranks 0, 2, 3 and in evaluation mode on rank 1; module first" in said


def goes_on(rank: int) -> list[float]:
    """Returns the losses of steps after a mistake that all ranks have caught."""
    step = Step(rank, "halo")
    with pytest.raises(ValueError, match="the next step is loss_mean"):
        if rank:
            step.forward()
        step.run()
    return [step.run() for _ in range(STEPS)]


def test_ranks_that_catch_such_an_error_can_continue():
    first, second = distributed.run(goes_on, 2)
    assert first == second and first[-1] < first[0]


# --- no collective without an agreement ---------------------------------------------------------------------

COLLECTIVES = {"all_to_all", "gather_numbers", "gather_facts", "together", "begin"}
AGREEMENTS = {"agree", "agree_to_exchange", "propose"}

#: Functions that start a collective on which the ranks have agreed elsewhere.
AGREED_ELSEWHERE = {
    "begin": "its callers agree",
    "begin_agreed": "whoever names the exchange has agreed",
    "propose": "is the agreement",
    "difference": "all ranks know that they differ",
    "_opened": "all ranks have just met",
    "_from_rank_0": "_agree has agreed",
    "_send": "its callers have made a route",
}


def calls_of(function: ast.AST) -> list[tuple[str, str]]:
    """Returns (owner, name) of each method that a function calls, in the order of lines."""
    found = [each for each in ast.walk(function) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return [(ast.unparse(call.func.value).split(".")[-1], call.func.attr) for call in found]


def test_every_collective_is_agreed_on_first():
    without = []
    for path in sorted((Path(salientpp.__file__).parent / "fullgraph").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in AGREED_ELSEWHERE:
                continue
            has_agreed = False
            for owner, name in calls_of(function):
                has_agreed |= name in AGREEMENTS or (owner != "comm" and name == "gather_numbers")
                if name in COLLECTIVES and not has_agreed:
                    without.append(f"{path.name}, {function.name}: {owner}.{name}")
    assert without == []
