"""Checks that a model over a batch with sums computes what the plain model computes.

The batch lacks the rows that its sums replace: they are on other ranks. Without these sums, it is a smaller batch,
whose rows are all here. From it, the check makes a second batch, in which new sums replace half of the vertices that
sampling found last. The seeds' outputs and all gradients must agree between both batches. So a rank can check alone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salientpp.containers import tensors_of
from salientpp.nn.check import CheckedCall, Fault, Results
from salientpp.nn.planned import Attributes, is_power_of_four
from salientpp.nn.rehearsal import key_of_storage
from salientpp.ways.sums.marked import EDGE_WEIGHTS, EDGES, ROWS, Delivered, Marked, mark, marked_in, unmarked

#: Largest number of combinations of modes and plain arguments whose calls are counted separately.
_MAX_KINDS = 8

_PLAIN = (bool, int, float, str, type(None))


#: Attribute of a model: its _State. The state refers to the model, so a table of all models would keep it alive.
_ATTRIBUTE = "_salientpp_merged"


class _State:
    """Remembers what decides whether a model must be checked again: its attributes, and the number of calls.

    Calls are counted for each combination of modes and plain arguments.
    """

    attributes: Attributes

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self.warned = False

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model counts its own calls


_running = threading.local()


def check_model(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares a model with the plain one before a call on a batch with sums, if that is due. A forward pre-hook.

    A check is due at calls 1, 4, 16, 64, ... of each combination of modes and plain arguments, and after an attribute, a
    hook or a module has changed.

    Raises:
        RuntimeError: the seeds' outputs or the gradients differ beyond rounding.
    """
    if torch.compiler.is_compiling():
        return
    given = list(marked_in([args, kwargs]))
    x = next((each for each in given if each.role == ROWS and each.level == 0 and each.is_given), None)
    edges = next((each for each in given if each.role == EDGES and each.is_given), None)
    if x is None or edges is None or getattr(_running, "checks", False):
        return
    state: _State | None = vars(model).get(_ATTRIBUTE)
    if state is None or not state.attributes.are_of(model):  # a copy may share it
        state = _State()
        setattr(model, _ATTRIBUTE, state)
        state.attributes = Attributes(model)
    elif state.attributes.is_changed(sum(state.calls.values())):
        state.calls.clear()
    values = tuple((type(each), each) for each in (*args, *kwargs.values()) if isinstance(each, _PLAIN))
    kind = state.attributes.modes, torch.is_grad_enabled(), values if len(state.calls) < _MAX_KINDS else None
    number = state.calls[kind] + 1
    if not is_power_of_four(number):
        state.calls[kind] = number
        return
    weight = next((each.plain() for each in given if each.role == EDGE_WEIGHTS), None)
    halves = _Halves.of(edges, x.plain(), weight)
    if halves is None:  # this batch has no rows that can be summed
        return
    state.calls[kind] = number
    _running.checks = True
    try:
        fault = _fault(model, halves, args, kwargs)
    except RuntimeWarning:  # the caller makes errors of warnings
        raise
    except Exception as error:  # the call that follows may raise it too
        if not state.warned:
            state.warned = True
            warnings.warn(
                f"merge_partial could not compare {type(model).__name__} with the plain model: {type(error).__name__}: "
                f"{error}",
                stacklevel=2,
            )
        return
    finally:
        _running.checks = False
    if fault is not None:
        state.calls[kind] = number - 1  # a caller that goes on is told again
        where = " in evaluation mode" if fault.evaluates else ""
        raise RuntimeError(
            f"{type(model).__name__} over a batch with sums would differ from the plain model{where}, by {fault.size:.2g} of an output or a gradient. A "
            "layer, a hook or code between layers depends on several rows, on their number or on all messages of a vertex. The batch lacks the rows that sums "
            "replace. Compute each row separately, or leave the loader's partial_aggregation out. merge_partial(model, check=False) turns this check off"
        )


def _fault(model: torch.nn.Module, halves: _Halves, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fault | None:
    hops: Any = types.SimpleNamespace(num_nodes={None: [halves.delivered.seeds, halves.number]})
    plain, merged = (
        (tuple(map(change, args)), {name: change(each) for name, each in kwargs.items()})
        for change in (unmarked, halves.merged)
    )
    run: Any = lambda plan: contextlib.nullcontext()  # noqa: E731
    return _Both(model, hops, *plain, run, _Trial(model, hops, *merged, run)).fault_of([])


@dataclass
class _Trial(CheckedCall):
    """Calls a model for a comparison. Its results leave out tensors that the model returns as it got them."""

    def results(self, effects: Any, out: Any, draws: int) -> Results:
        (seeds, _) = self.hops.num_nodes[None]
        given = {key_of_storage(each) for each in tensors_of([effects.args, effects.kwargs])}
        return super().results(effects, _computed(out, given, seeds), draws)


@dataclass
class _Both(_Trial):
    """Lets :class:`CheckedCall` compare a batch with all rows with the same batch with sums.

    A call without a ``context`` gets all rows. A call with a ``context``, which would be the trimmed one, gets the sums.
    """

    other: CheckedCall

    def call(self, context: Any = None, *more: Any, **named: Any) -> Results:
        return super().call(None, *more, **named) if context is None else self.other.call(None, *more, **named)


def _computed(value: Any, given: set[Any], seeds: int) -> Any:
    """Prepares an output for a comparison: makes its tensors plain, and removes those whose storages are in ``given``, the caller's."""
    if isinstance(value, Tensor):
        if key_of_storage(value) in given:
            return None
        return value.plain()[:seeds] if isinstance(value, Marked) else value
    if isinstance(value, dict):
        return {name: _computed(each, given, seeds) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_computed(each, given, seeds) for each in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return {name: _computed(each, given, seeds) for name, each in vars(value).items()}
    return value


# --- the smaller batch --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Halves:
    """Two versions of one batch that must give equal results: with all rows, and with sums instead of some rows.

    Attributes:
        delivered: facts about the batch as it came, and its sums, which neither version has.
        marked: facts about the second version, and its sums.
        keeps_vertex, keeps_edge: masks [number], [e] of the vertices and edges that the second version keeps.
    """

    delivered: Delivered
    marked: Delivered
    keeps_vertex: Tensor
    keeps_edge: Tensor

    @property
    def number(self) -> int:
        return self.keeps_vertex.numel()

    @classmethod
    def of(cls, edges: Marked, x: Tensor, weight: Tensor | None) -> _Halves | None:
        """Makes both versions from rows ``x`` [number, ...] and weights [e] of edges; None if no rows can be summed."""
        delivered, plain = edges.delivered, edges.plain()
        earlier = ([0, *delivered.edges_to])[len(delivered.edges_to) - 1]
        known = [plain[1].new_tensor([delivered.seeds]), plain[1] + 1, plain[0, :earlier] + 1]
        keeps = torch.ones(delivered.num_nodes, dtype=torch.bool, device=plain.device)
        keeps[int(torch.cat(known).max()) :: 2] = False  # of the vertices that were found last
        keeps_edge = keeps[plain[0]]
        if bool(keeps_edge.all()):
            return None
        partial, reduction = delivered.partial, delivered.partial.reduction
        source, target = plain[:, ~keeps_edge]
        rows = x[source]
        if weight is not None:
            rows = rows * weight[~keeps_edge].view(-1, *[1] * (x.dim() - 1)).to(rows.dtype)
        targets, group, count = target.unique(return_inverse=True, return_counts=True)
        index = group.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        value = rows.new_zeros((targets.numel(), *rows.shape[1:]))
        value = value.scatter_reduce(0, index, rows, "amax" if reduction == "max" else reduction, include_self=False)
        sums = type(partial)(targets, value, count, reduction, partial.weight)
        ends = tuple([int(keeps_edge[:end].sum()) for end in delivered.edges_to])
        marked = replace(delivered, partial=sums, num_nodes=int(keeps.sum()), edges_to=ends)
        return cls(delivered, marked, keeps, keeps_edge)

    def merged(self, value: Any) -> Any:
        """Returns a model's argument for the version with sums: without the rows that sums replace."""
        if isinstance(value, Marked):
            rows = self._cut(value.plain(), value.role)
            return mark(rows, self.marked, value.role, value.level, given=value.is_given)
        if isinstance(value, Tensor):
            role = {self.number: ROWS, self.keeps_edge.numel(): EDGE_WEIGHTS}.get(value.size(0) if value.dim() else -1)
            return value if role is None else self._cut(value, role)
        return self._numbers_left(value) or _mapped(self.merged, value)

    def _numbers_left(self, value: Any) -> Any:
        """Adapts a list of the batch's numbers of vertices or edges per hop to the version with sums. None for other values."""
        if type(value) not in (list, tuple) or any(type(each) is not int for each in value):
            return None
        if [*itertools.accumulate(value)] == [*self.delivered.edges_to]:
            mask = self.keeps_edge
        elif len(value) == self.delivered.hops + 1 and sum(value) == self.number and min(value) >= 0:
            mask = self.keeps_vertex
        else:
            return None
        return type(value)(int(each.sum()) for each in mask.split(list(value)))

    def _cut(self, value: Tensor, role: str) -> Tensor:
        if role == ROWS:
            return value[self.keeps_vertex]
        if role == EDGE_WEIGHTS:
            return value[self.keeps_edge]
        places = self.keeps_vertex.cumsum(0) - 1
        return places[value[:, self.keeps_edge]]


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: function(each) for name, each in value.items()}
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
