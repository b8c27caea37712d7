"""Plans of a trimmed model, when they were made, and what must stay as it was for them to hold."""

from __future__ import annotations

import operator
import random
import weakref
from typing import Any

import numpy as np
import torch

from salientpp.nn.rules import tensors_of
from salientpp.nn.trace import Call, Plan

#: Number of different orders of operations that one plan may serve.
MAX_ORDERS = 8

#: Attributes of modules that are no part of their configuration.
_PLAIN = (bool, int, float, str, type(None))


class Planned:
    """Plan for calls with one combination of modes and arguments.

    Attributes:
        plan: rows that each layer needs. None if the model must run as the plain one.
        functions: orders of torch's functions between layers for which the plan holds. None if any order will do.
        written: names of the buffers and parameters that a call writes to.
        draws: True if a call draws from the generators of Python or numpy.
        calls: number of calls.
        error: text of the exception that recording ended with, if it did.
    """

    error = ""

    def __init__(
        self,
        plan: Plan | None,
        functions: set[tuple[str, ...]] | None = None,
        written: tuple[str, ...] = (),
        draws: bool = False,
    ) -> None:
        self.plan, self.functions, self.written, self.draws = plan, functions, written, draws
        self.calls = 0

    @property
    def is_due(self) -> bool:
        """True if the next call is to be checked: its number is a power of four."""
        number = self.calls + 1
        return number > 1 and number & (number - 1) == 0 and number.bit_length() % 2 == 1

    def join(self, plan: Plan, functions: tuple[str, ...]) -> None:
        """Makes the plan hold for another order of functions too."""
        if self.plan is None or self.functions is None:
            return
        same = [call.layer for call in plan] == [call.layer for call in self.plan]
        if not same or len(self.functions) >= MAX_ORDERS:
            self.plan, self.functions = None, None
            return
        self.functions.add(functions)
        self.plan = [most(calls) for calls in zip(self.plan, plan, strict=True)]


def most(calls: tuple[Call, ...]) -> Call:
    """Returns a call for which the needed rows of all ``calls`` are needed."""
    return Call(
        calls[0].layer,
        max(call.out_hops for call in calls),
        max(call.in_hops for call in calls),
        any(call.is_whole for call in calls),
    )


class Attributes:
    """Plain attributes of a model's modules, and its buffers and hooks, as they were before a call. Comparing them takes some microseconds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._changes: dict[tuple[int, str], int] = {}
        self._read()

    def _read(self) -> None:
        model = self._model()
        assert model is not None  # it is being called
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self._own = [vars(module) for module in self.modules]
        self._names = [
            [name for name, value in own.items() if isinstance(value, _PLAIN) and name != "training"]
            for own in self._own
        ]
        self._getters = [operator.itemgetter(*names, "_forward_hooks", "_backward_hooks") for names in self._names]
        self._known = self._now()

    @property
    def modes(self) -> tuple[bool, ...]:
        """Modes of all modules: True in training."""
        return tuple([module.training for module in self.modules])

    def _now(self) -> list[Any]:
        return [
            (
                len(own),
                getter(own),
                tuple(own["_modules"].values()),
                len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]) + len(own["_backward_hooks"]),
                own["_buffers"] and [value is None for value in own["_buffers"].values()],
            )
            for own, getter in zip(self._own, self._getters)
        ]

    def is_changed(self, calls: int) -> bool:
        """Returns True if something is not as it was at the last call, except ``training``, and except attributes that change all the time."""
        try:
            now = self._now()
            if now == self._known:
                return False
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or became a tensor or an array
            now = []
        before = self._known
        names = list(self._names)
        are_plain = all(isinstance(value, _PLAIN) for each, a in zip(names, now) for value in a[1][: len(each)])
        if not are_plain or len(now) != len(before) or any(a[0] != b[0] or a[2:] != b[2:] for a, b in zip(now, before)):
            self._read()
            return True
        self._known = now
        found = [
            (k, name)
            for k, (a, b) in enumerate(zip(now, before))
            if a[1] != b[1]
            for name, old, new in zip(names[k], b[1], a[1])
            if old != new
        ]
        for each in found:
            self._changes[each] = self._changes.get(each, 0) + 1
        return any(self._changes[each] <= 4 + calls // 500 for each in found)

    def restore(self) -> None:
        """Sets the plain attributes to what they were before the call."""
        for own, names, value in zip(self._own, self._names, self._known):
            for name, before in zip(names, value[1]):
                own[name] = before


class Before:
    """State of a model before a call, with which the call can be made again: random number generators, what the call writes to, and versions of arguments."""

    def __init__(self, model: torch.nn.Module, planned: Planned, attributes: Attributes, given: Any) -> None:
        self._attributes = attributes
        tensors = [*tensors_of(given), *attributes.parameters]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if planned.written:
            named = [*model.named_buffers(), *model.named_parameters()]
            self._copies = [(value, value.detach().clone()) for name, value in named if name in planned.written]
            copied = {id(value) for value, _ in self._copies}
            tensors = [tensor for tensor in tensors if id(tensor) not in copied]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._buffers = [(own["_buffers"], dict(own["_buffers"])) for own in attributes._own if own["_buffers"]]
        self._torch = torch.get_rng_state()
        self._others = (random.getstate(), np.random.get_state()) if planned.draws else None

    @torch.no_grad()
    def restore(self) -> bool:
        """Restores the state. Returns False if the call has written to its arguments or parameters, which cannot be undone."""
        if any(tensor._version != version for tensor, version in self._versions):
            return False
        self._attributes.restore()
        for buffers, before in self._buffers:
            buffers.update(before)
        for value, copy in self._copies:
            value.copy_(copy)
        torch.set_rng_state(self._torch)
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
        return True
