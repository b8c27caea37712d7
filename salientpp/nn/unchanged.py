"""Decides whether a message-passing layer still computes what its class computes.

Trimming, ``merge_partial``, full-graph training and inference replace code of PyG by faster code. The results are equal only if nobody has changed the
layer: by a method on the instance or on PyG's class, by a hook, or by another aggregation.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_geometric.nn  # noqa: F401 (defines the classes)
from torch.nn.modules import module as torch_module
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils._device import DeviceContext
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense import Linear

#: Names of PyG's own dictionaries of hooks.
HOOKS = tuple(
    f"_{kind}_forward{side}_hooks"
    for kind in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for side in ("_pre", "")
)
_hooks_of = operator.itemgetter(*HOOKS)
_hooks_of_part = operator.itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Classes of parameters without operations of their own.
_PARAMETERS = frozenset([torch.Tensor, Parameter, UninitializedParameter, type(None)])

#: Methods whose replacement changes no result of a layer.
_HARMLESS = frozenset(["reset_parameters", "jittable", "explain_message", "extra_repr"])
#: Methods that PyG replaces by code that it generates for each class.
_GENERATED = frozenset(["propagate", "edge_updater", "collect", "edge_collect"])


class _Functions:
    """Remembers the functions of a class or a file, to find out later whether one was replaced."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self._owner, self._names = owner, names
        self._read: Callable[[Any], Any] = operator.attrgetter("__name__", *names)  # a tuple even for one name
        self._known = self._read(owner)

    def replaced(self) -> str | None:
        """Returns the name of a function that was replaced since this object was made; None if there is none."""
        try:
            now = self._read(self._owner)
        except AttributeError:
            now = None
        if now == self._known:
            return None
        known = zip(self._names, self._known[1:], strict=True)
        return next((name for name, function in known if getattr(self._owner, name, None) is not function), None)


def _functions_of(kind: type) -> tuple[_Functions, _Functions]:
    """Returns the methods of a class of PyG, and PyG's functions that its file calls."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("torch_geometric.")]
    names = {name for base in bases for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    methods = [name for name in sorted(names - _HARMLESS - _GENERATED) if not name.startswith(("__", "register_"))]
    file = sys.modules[kind.__module__]
    called = [
        name
        for name, value in vars(file).items()
        if isinstance(value, types.FunctionType) and value.__module__.startswith("torch_geometric.")
    ]
    return _Functions(kind, methods), _Functions(file, called)


def _classes(base: Any) -> Iterator[type]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("torch_geometric."):
            yield from _classes(kind)


#: Class of PyG -> the functions that it computed with when this module was imported.
_LAYERS = {kind: _functions_of(kind) for kind in _classes(MessagePassing)}
_AGGREGATIONS = {kind: _functions_of(kind) for kind in _classes(Aggregation)}
_CALLS = torch.nn.Module.__call__, Aggregation.__call__
_LINEAR = Linear.forward
_PROPAGATE, _EDGE_UPDATER = MessagePassing.propagate, MessagePassing.edge_updater


def change_of(conv: MessagePassing, with_hooks: bool = True) -> str | None:
    """Returns what the user has changed in how a layer passes messages, as a predicate such as "has explain=True"; None if nothing.

    It reads the layer's methods, PyG's hooks, its aggregation, and hooks for all modules. It does not look at the code of subclasses outside PyG, and not at
    other modules inside the layer (see :func:`change_inside`). Without ``with_hooks`` it ignores hooks of PyG and ``explain``.
    """
    kind: Any = type(conv)
    own = vars(conv)
    if not _names(kind).isdisjoint(own):
        for name in _names(kind) & own.keys():
            if not _is_own(conv, name, own[name]):
                return f"has its own {name}() on the instance"
    if with_hooks:
        if any(_hooks_of(own)):
            return f"has a hook of PyG ({next(name for name in HOOKS if own[name]).strip('_')})"
        if conv.explain:
            return "has explain=True"
    if (changed := _replaced_in(_LAYERS.get(kind) or _LAYERS[MessagePassing])) is not None:
        return f"has another {changed}() than PyG, whose function was replaced"
    if not (_is_generated(kind, kind.propagate, _PROPAGATE) and _is_generated(kind, kind.edge_updater, _EDGE_UPDATER)):
        return "has its own propagate() or edge_updater()"
    if has_global_hooks():
        return "runs while a hook for all modules is registered (such as register_module_forward_hook)"
    aggregation = own["_modules"].get("aggr_module")
    if aggregation is not None:
        for part in _modules_in(aggregation):
            if (
                isinstance(part, Aggregation)
                and (changed := _replaced_in(_AGGREGATIONS.get(type(part), ()))) is not None
            ):
                return f"has another {changed}() in its aggregation than PyG, whose function was replaced"
            if (what := _change_of_part(part)) is not None:
                return f"has {what} on its aggregation ({type(part).__name__})"
    return None


def change_inside(conv: MessagePassing) -> str | None:
    """Returns a change that :func:`change_of` does not see, of a parameter's class or of a module inside the layer, as a predicate; None if there is none."""
    if (what := subclass_in(conv)) is not None:
        return what
    for part in _modules_in(conv)[1:]:
        if (what := subclass_in(part)) is not None:
            return f"{what} on a module inside it ({type(part).__name__})"
        if (what := _change_of_part(part)) is not None:
            return f"has {what} on a module inside it ({type(part).__name__})"
        if isinstance(part, Aggregation) and type(part) not in _AGGREGATIONS:
            return f"has an aggregation outside PyG ({type(part).__name__})"
    return None


def is_plain(linear: Any) -> bool:
    """Returns True if a module is PyG's linear map without changes, so that its weight and bias describe it completely."""
    is_own = type(linear) is Linear and Linear.forward is _LINEAR
    return is_own and _change_of_part(linear) is None and subclass_in(linear) is None


def has_global_hooks() -> bool:
    """Returns True if hooks for all modules are registered, or the call of modules was replaced."""
    return torch_module._has_any_global_hook() or (torch.nn.Module.__call__, Aggregation.__call__) != _CALLS


def has_other_modes() -> bool:
    """Returns True if a torch function mode that may change results is active. Modes of devices and of this package do not count."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext and not _is_ours(mode) for mode in modes)


def subclass_in(part: torch.nn.Module) -> str | None:
    """Reports, as a predicate, a parameter of the module itself whose class may replace torch's operations; None if there is none."""
    for value in vars(part)["_parameters"].values():
        # A class that only handles dispatched operations, such as DTensor, sees those of this package too.
        if type(value) not in _PARAMETERS and type(value).__torch_function__ is not Parameter.__torch_function__:
            return f"has a parameter of the class {type(value).__name__}"
    return None


def _change_of_part(part: torch.nn.Module) -> str | None:
    own = vars(part)
    if any(_hooks_of_part(own)):
        return "a hook"
    if "forward" in own and not _is_own(part, "forward", own["forward"]):
        return "its own forward()"
    return None


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    """Returns the names of all methods of a layer's class, except those that cannot change how the layer passes messages."""
    bases = kind.__mro__[: kind.__mro__.index(MessagePassing) + 1]
    found = {name for base in bases for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    return frozenset(name for name in found if not name.startswith(("__", "register_"))) - _HARMLESS


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("salientpp.")


def _is_own(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Returns True if an attribute of a module is the method of its class, or a method that this package puts in its place during a call."""
    if isinstance(value, functools.partial):  # ours, with the original method among its arguments
        functions = [each for each in value.args if callable(each) and not isinstance(each, torch.nn.Module)]
        return _is_ours(value.func) and all(_is_own(module, name, each) for each in functions)
    if _is_ours(value):
        return True
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return False
    kind, code = type(module), value.__func__.__code__
    known = [getattr(kind, each, None) for each in (name, f"_orig_{name}", f"_jinja_{name}")]
    return any(code is getattr(each, "__code__", None) for each in known)


def _replaced_in(functions: tuple[_Functions, ...]) -> str | None:
    """Returns the name of a function of PyG that was replaced since import; None if there is none."""
    for each in functions:
        if (name := each.replaced()) is not None:
            return name
    return None


def _modules_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a module and the modules inside it, some microseconds faster than ``modules()``."""
    found = [module]
    for each in found:
        if inner := vars(each)["_modules"]:
            found += [part for part in inner.values() if part is not None and part not in found]
    return found


def _is_generated(kind: Any, function: Any, original: Any) -> bool:
    """Returns True if PyG defines a method: in ``MessagePassing``, or in code that PyG generates for a class."""
    return function is original or getattr(function, "__module__", "") in _generated_files(kind, original.__name__)


@functools.cache
def _generated_files(kind: Any, name: str) -> frozenset[str]:
    return frozenset(f"{base.__module__}_{base.__name__}_{name}" for base in kind.__mro__)
