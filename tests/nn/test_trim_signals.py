"""A handler of a signal may raise at any line of a trimmed call. The next call then works, and gives the plain model's results."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode
from trimmed import WIDTH, assert_same, batch_of, graph, step

import salientpp
from salientpp.nn import undo
from salientpp.nn.layers import Replaced


class Preempted(BaseException):
    """Exception of a handler."""


class Signal:
    """Context that counts the lines which Python runs within it, and raises at the line of a number."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines, self.place = at, 0, ""

    def __enter__(self) -> Signal:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self._before)

    def _trace(self, frame, event, _):
        if frame.f_code is Signal.__exit__.__code__:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise Preempted
        return self._trace


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convs = nn.ModuleList([pyg.GCNConv(WIDTH, 4), pyg.SAGEConv(4, 4), pyg.GATConv(4, 4, dropout=dropout)])
        self.norm = nn.BatchNorm1d(4)
        self.double()

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.norm(x[:13])  # the seeds of a batch


@pytest.fixture(scope="module")
def data():
    return graph(num_vertices=80, num_edges=160)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data, [2, 2, 2])


def interrupted(model, batch, at: int) -> str:
    """Calls a model, and raises at a line. Returns the line's place, or "" if the call has fewer lines."""
    signal = Signal(at)
    try:
        with signal:
            model(batch.x, batch.edge_index)
    except Preempted:
        pass
    return signal.place


def left(model, is_trimmed: bool) -> list[str]:
    """Names everything that a call has left in a model and in this thread."""
    names = [
        f"{name} {attribute}"
        for name, module in model.named_modules()
        for attribute in ("forward", "propagate", "edge_updater")
        if attribute in vars(module)
    ]
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    hooks = [
        f"{name} hooks"
        for name, module in model.named_modules()
        if len(module._forward_hooks) != (is_trimmed and module is model)
    ]
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    follows = [] if torch._C._is_torch_function_enabled() else ["functions of torch are not followed"]
    return [*names, *map(str, modes), *hooks, *follows, *([] if saved is None else ["hooks of saved tensors"])]


def moments(lines: int, number: int) -> list[int]:
    return [1 + k * lines // number for k in range(number)]


def check_next(model, plain, data, batch, number: int, place: str) -> None:
    """Asserts that the next call gives what the plain model gives: a trimmed call, one on another graph, or one of the untrimmed model."""
    kind = ("trimmed", "another graph", "untrimmed")[number % 3]
    if kind == "untrimmed":
        salientpp.nn.untrim(model)
    given, seeds = (data, 13) if kind == "another graph" else (batch, batch.batch_size)
    model.load_state_dict(
        plain.state_dict()
    )  # Python goes on after an exception in ``__del__``, so that the call may have ended
    try:
        assert torch.is_grad_enabled() and model.training == plain.training
        got = step(model, given, seeds=seeds)
        assert_same(step(copy.deepcopy(plain), given, seeds=seeds), got)
        assert left(model, is_trimmed=kind != "untrimmed") == []
        assert model.convs[2].dropout == plain.convs[2].dropout
    except Exception as error:
        raise AssertionError(f"after a signal at {place}, {kind}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("training", [False, True])
def test_a_signal_at_any_line_of_a_call_harms_no_later_call(training, data, batch):
    plain = Net(0.0 if training else 0.25).train(training)
    known = salientpp.nn.trim(copy.deepcopy(plain))
    known(batch.x, batch.edge_index)
    with Signal() as signal:
        known(batch.x, batch.edge_index)
    for number, at in enumerate(moments(signal.lines, 60)):
        if number % 3 == 0:
            salientpp.nn.trim(known)  # it was untrimmed
            known(batch.x, batch.edge_index)
            known.load_state_dict(plain.state_dict())
        place = interrupted(known, batch, at)
        check_next(known, plain, data, batch, number, place)


@pytest.mark.parametrize("training", [False, True])
def test_a_signal_at_any_line_of_a_first_call_harms_no_later_call(training, data, batch):
    plain = Net(0.0 if training else 0.25).train(training)
    with Signal() as signal:
        salientpp.nn.trim(copy.deepcopy(plain))(batch.x, batch.edge_index)
    for number, at in enumerate(moments(signal.lines, 18)):
        model = salientpp.nn.trim(copy.deepcopy(plain))
        place = interrupted(model, batch, at)
        check_next(model, plain, data, batch, number, place)


class _Operations(undo.Noted, TorchDispatchMode):
    pass


class _Functions(undo.Noted, TorchFunctionMode):
    pass


def nested(values: dict[str, int]) -> None:
    """Makes changes within changes, as a rehearsal of a trimmed call does."""
    undo.begin(sys._getframe())
    try:
        with (
            Replaced([(values, "a", 1)]),
            _Operations(),
            _Functions(),
            Replaced([(values, "a", 2), (values, "b", 2)]),
            _Operations(),
            _Functions(),
            Replaced([(values, "a", 3)]),
        ):
            pass
    finally:
        undo.end()


def test_a_signal_at_any_line_of_nested_changes_leaves_none():
    values, flags = {"a": 0}, dict(vars(_python_dispatch))
    with Signal() as signal:
        nested(values)
    assert signal.lines > 200
    wrong = []
    for at in range(1, signal.lines + 1):
        signal = Signal(at)
        with pytest.raises(Preempted), signal:
            nested(values)
        assert not undo.is_running()  # as the next call does
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        changed = [name for name, value in vars(_python_dispatch).items() if flags[name] is not value]
        if modes or changed or values != {"a": 0}:
            wrong.append((signal.place, modes, changed, dict(values)))
            values.clear()
            values["a"] = 0
            vars(_python_dispatch).update(flags)
            while _get_current_dispatch_mode_stack():
                _pop_mode()
            while _get_current_function_mode_stack():
                torch._C._pop_torch_function_stack()
    assert wrong == []
