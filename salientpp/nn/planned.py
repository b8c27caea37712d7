"""Plans of a trimmed model, and the conditions under which they hold."""

from __future__ import annotations

import enum
import operator
import random
import weakref
from typing import Any

import numpy as np
import torch
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn.record import may_be_replaced
from salientpp.nn.rehearsal import State
from salientpp.nn.trace import Call, TrimPlan

#: Number of different orders of operations that one plan may serve.
MAX_ORDERS = 8

#: Classes of attributes that are compared before each call, also in tuples.
_PLAIN = (bool, int, float, str, type(None), enum.Enum, np.number, np.bool_)

#: Attributes that every module has.
_OF_MODULES = frozenset(vars(torch.nn.Module()))

_tables_of = operator.itemgetter(
    "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)

#: A tensor with more elements is not copied before each call. The first limit is for tensors that no call has written to so far, the second for others.
_MAX_UNWRITTEN, _MAX_WRITTEN = 1 << 12, 1 << 20

#: Number of objects in attributes and arguments whose contents are kept before each call.
_MAX_OBJECTS = 256


def is_power_of_four(number: int) -> bool:
    """True for 1, 4, 16, 64, ...: calls with these numbers are compared with the plain model."""
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


class Planned:
    """Plan for the calls that have the same modes and arguments.

    Attributes:
        plan: rows that each layer needs. None if the model must run as the plain one.
        functions: sequences of torch's functions between layers for which the plan holds. None if it holds for any.
        written: names of the buffers and parameters that a call writes to.
        draws: True if a call draws from the generators of Python or numpy.
        calls: number of calls.
        error: text of the exception that recording ended with, if it did.
    """

    error = ""

    def __init__(
        self,
        plan: TrimPlan | None,
        functions: set[tuple[str, ...]] | None = None,
        written: tuple[str, ...] = (),
        draws: bool = False,
    ) -> None:
        self.plan, self.functions, self.written, self.draws = plan, functions, written, draws
        self.calls = 0

    @property
    def is_due(self) -> bool:
        """True if the next call must be compared with the plain model. The first comparison is part of making the plan."""
        return self.calls > 0 and is_power_of_four(self.calls + 1)

    def join(self, plan: TrimPlan, functions: tuple[str, ...]) -> None:
        """Extends this plan, so that it also holds for a call with the rows of ``plan`` and with other ``functions`` between the layers."""
        if self.plan is None or self.functions is None:
            return
        same = [call.layer for call in plan] == [call.layer for call in self.plan]
        if not same or len(self.functions) >= MAX_ORDERS:
            self.plan, self.functions = None, None
            return
        self.functions.add(functions)
        self.plan = [most(calls) for calls in zip(self.plan, plan, strict=True)]


def most(calls: tuple[Call, ...]) -> Call:
    """Combines plans of one layer's call: the result gets every row that at least one of ``calls`` needs."""
    return Call(
        calls[0].layer,
        max(call.out_hops for call in calls),
        max(call.in_hops for call in calls),
        any(call.is_whole for call in calls),
    )


class Attributes:
    """Remembers a model's attributes, buffers and hooks, to find out before a later call whether they have changed. That takes microseconds.

    Attributes:
        modules: all modules of the model.
        layers: the message-passing layers among them.
        replaced: paths and modules whose forward a trimmed call may replace.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._changes: dict[tuple[int, str], int] = {}
        self._read()

    def _read(self) -> None:
        model = self._model()
        assert model is not None  # it is being called
        self.modules = list(model.modules())
        self.layers = [module for module in self.modules if isinstance(module, MessagePassing)]
        self.replaced = [(path, module) for path, module in model.named_modules() if may_be_replaced(module)]
        self._own = [vars(module) for module in self.modules]
        homes = ("torch.", "torch_geometric.", "salientpp.")
        self._users = [vars(each) for each in self.modules if not type(each).__module__.startswith(homes)]
        self._names = [
            [name for name, value in own.items() if _is_plain(value) and name != "training"] for own in self._own
        ]
        self._getters = [operator.itemgetter(*names, "_forward_hooks", "_backward_hooks") for names in self._names]
        self._known = self._now()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The present parameters of all modules."""
        return [each for own in self._own for each in own["_parameters"].values() if each is not None]

    @property
    def others(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Attributes of each module of a user's class: all of them, and a copy of those that ``torch.nn.Module`` itself does not have."""
        return [(own, {name: own[name] for name in own.keys() - _OF_MODULES}) for own in self._users]

    def are_of(self, model: torch.nn.Module) -> bool:
        """True if this object was made for ``model``, not for a copy of it."""
        return self._model() is model

    @property
    def modes(self) -> tuple[bool, ...]:
        """``training`` of each module, in the order of ``modules``."""
        return tuple([module.training for module in self.modules])

    def _now(self) -> list[Any]:
        return [
            (
                len(own),
                getter(own),
                modules and tuple(modules.items()),
                any(hooks) and [len(each) for each in hooks],
                buffers and [value is None for value in buffers.values()],
                type(module),
            )
            for module, own, getter in zip(self.modules, self._own, self._getters)
            for modules, buffers, *hooks in (_tables_of(own),)
        ]

    def is_changed(self, calls: int) -> bool:
        """True if the model changed since the last call. ``training`` and attributes that often change do not count."""
        try:
            now = self._now()
            if now == self._known:
                return False
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or became a tensor or an array
            now = []
        before = self._known
        names = list(self._names)
        are_plain = all(_is_plain(value) for each, a in zip(names, now) for value in a[1][: len(each)])
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


class Before:
    """State of a model before a call, so that the call can be repeated.

    It holds the states of random number generators, the buffers, and the contents of attributes and arguments. It does not copy large
    tensors. Their version counters tell whether the call has written to them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        planned: Planned,
        attributes: Attributes,
        parameters: list[torch.nn.Parameter],
        given: tuple[Any, ...],
    ) -> None:
        self._attributes = attributes
        self._others = attributes.others
        states = State(given, _MAX_OBJECTS), State([copied for _, copied in self._others], _MAX_OBJECTS)
        self._states = states
        self._buffers = [(own["_buffers"], dict(own["_buffers"])) for own in attributes._own if own["_buffers"]]
        buffers = [value for _, before in self._buffers for value in before.values() if value is not None]
        own = states[1].tensors | {id(value): value for value in buffers}
        small = {key for key, value in own.items() if value.numel() <= _MAX_UNWRITTEN} - states[0].tensors.keys()
        if planned.written:
            named = [*model.named_buffers(), *model.named_parameters()]
            written = [value for name, value in named if name in planned.written]
            small |= {id(value) for value in written if value.numel() <= _MAX_WRITTEN}
        tensors = states[0].tensors | own | {id(value): value for value in parameters}
        self._copies = [(value, value.detach().clone()) for key, value in tensors.items() if key in small]
        self._versions = [
            (value, value._version) for key, value in tensors.items() if key not in small and not value.is_inference()
        ]
        self._torch = torch.get_rng_state()
        self._generators = (random.getstate(), np.random.get_state()) if planned.draws else None

    @torch.no_grad()
    def restore(self) -> bool:
        """Restores the state. Returns False if the call has had effects that cannot be undone."""
        if any(value._version != version for value, version in self._versions):
            return False
        if not all(state.can_restore for state in self._states):
            return False
        self._attributes.restore()
        for state in self._states:
            state.restore()
        for own, before in self._others:
            for name in own.keys() - _OF_MODULES - before.keys():
                del own[name]
            own.update(before)
        for buffers, before in self._buffers:
            buffers.update(before)
        for value, copy in self._copies:
            value.copy_(copy)
        torch.set_rng_state(self._torch)
        if self._generators is not None:
            random.setstate(self._generators[0])
            np.random.set_state(self._generators[1])
        return True
