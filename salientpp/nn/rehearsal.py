"""Calls of a model that leave no trace: attributes, buffers, inputs and random number generators are afterwards as they were.

Recording and checking a trimmed model call it more often than the training loop does. Such a call must have no effect of its own, even if it raises.
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from salientpp.containers import tensors_of
from salientpp.nn.undo import NotedDispatch, note, undo_noted


@contextmanager
def rehearsal(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Rehearsal]:
    """Opens a context in which a model may be called with these arguments. Its end undoes the effects of the call.

    It undoes writes to tensors by operations of torch, to attributes of modules, to lists and dictionaries in attributes, to batches, and to random
    number generators. Files, global variables, iterators and objects of other libraries are not covered.

    Call the model with the ``args`` and ``kwargs`` of the result. Their tensors have the same values as the caller's, but histories and hooks of their own.
    Batches, lists and dictionaries among them are the caller's own objects. They get the caller's tensors back afterwards.
    """
    state = State([*model.modules(), args, kwargs])
    others, undo = (random.getstate(), np.random.get_state()), _Undo()

    def restore() -> None:
        torch.clear_autocast_cache()  # it may hold values that belong to this call
        random.setstate(others[0])
        np.random.set_state(others[1])
        undo.restore()
        state.restore()

    note(restore)
    try:
        with same_draws([args, kwargs]), _OwnTensors(), undo:
            yield Rehearsal(model, others, undo, args, kwargs)
    finally:
        undo_noted(restore)


def same_draws(value: Any) -> AbstractContextManager[None]:
    """Restores, at the end of the context, torch's generators of random numbers of the CPU, and of the device of tensors in ``value``."""
    devices = {each.device for each in tensors_of(value) if each.device.type != "cpu"}
    return torch.random.fork_rng(devices, device_type=next(iter(devices)).type if devices else "cpu")


class Rehearsal:
    """Trial call of a model whose effects are undone. It holds the arguments of the call, and records what the call has written.

    Attributes:
        args, kwargs: arguments to call the model with.
        inputs: floating-point tensors among them.
        leaves: tensors that ``inputs`` are computed from. Their gradients equal the gradients of the caller's tensors.
    """

    def __init__(
        self, model: torch.nn.Module, others: Any, undo: _Undo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._others, self._undo = others, undo
        self._model = model
        stand_ins = _StandIns()
        self.args, self.kwargs = stand_ins.of(args), stand_ins.of(dict(kwargs))
        self.inputs = [given for given, _ in stand_ins.made.values()]
        self.leaves = [leaf for _, leaf in stand_ins.made.values()]

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the buffers and parameters that were written to."""
        named = [*self._model.named_buffers(), *self._model.named_parameters()]
        return tuple(name for name, value in named if self._undo.has_kept(value))

    @property
    def draws(self) -> bool:
        """True if the call drew from the generators of Python or numpy."""
        now = random.getstate(), np.random.get_state()
        return now[0] != self._others[0] or any(map(np.any, map(np.not_equal, now[1], self._others[1])))


class _OwnTensors:
    """Bypasses the caller's ``saved_tensors_hooks`` inside the context, so that a trial call does not run them."""

    def __enter__(self) -> None:
        note(self._remove)
        torch._C._autograd._push_saved_tensors_default_hooks(Tensor.detach, _same)

    def __exit__(self, *_: Any) -> None:
        undo_noted(self._remove)

    def _remove(self) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[1] is _same:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _StandIns:
    """Replaces the caller's floating-point tensors, so that a call cannot change their hooks or history."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the caller's tensor: tensor, and its leaf
        self._seen: set[int] = set()

    def of(self, value: Any) -> Any:
        """Replaces the tensors in a value by stand-ins, and returns it. Containers stay the same objects, except tuples."""
        if isinstance(value, Tensor):
            return self._tensor(value) if value.is_floating_point() or value.is_complex() else value
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if id(value) in self._seen:
            return value
        if isinstance(value, (dict, list)):
            self._seen.add(id(value))
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                other = self.of(each)
                if other is not each:
                    value[key] = other
        elif not isinstance(value, torch.nn.Module) and _has_state(value):
            self._seen.add(id(value))
            self.of(vars(value))
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        if id(value) not in self.made:
            given = leaf = value
            if type(value) is Tensor and value.layout == torch.strided:
                # An inference tensor needs no gradient. Other tensors keep what they need, even within inference mode.
                with torch.inference_mode(value.is_inference()), torch.enable_grad():
                    given = leaf = value.data.requires_grad_(value.requires_grad)
                    if not value.is_leaf:  # unlike a leaf, it may be written to
                        given = leaf.clone()
            self.made[id(value)] = given, leaf
        return self.made[id(value)][0]


#: Attributes of tensors with the hooks on their gradients.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class State:
    """Remembers the contents of attributes and arguments (dictionaries, lists, sets, generators, tensors) to restore
    them.

    Args:
        values: modules, objects and containers to begin with.
        limit: number of objects, and of elements of a container, beyond which only the lengths of containers are known.

    Attributes:
        tensors: all tensors found, by their ids.
    """

    def __init__(self, values: Iterable[Any], limit: int = sys.maxsize) -> None:
        self._limit = limit
        self._kept: dict[int, tuple[Any, Any]] = {}  # by id: object and its contents
        self._lengths: list[tuple[Any, int]] = []
        self.tensors: dict[int, Tensor] = {}
        self._leaves: list[tuple[Tensor, bool, Any, dict[str, dict[Any, Any]]]] = []  # requires_grad, grad, hooks
        for value in values:
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if value is None or isinstance(value, (int, float, str)) or id(value) in self._kept:
            return
        if isinstance(value, Tensor):
            if value.is_leaf and id(value) not in self.tensors:
                hooks = {name: dict(getattr(value, name) or ()) for name in _HOOKS}
                self._leaves.append((value, value.requires_grad, value.grad, hooks))
            self.tensors[id(value)] = value
        elif isinstance(value, (dict, list, set, deque)) and max(len(value), len(self._kept)) > self._limit:
            self._lengths.append((value, len(value)))
        elif isinstance(value, dict):
            self._kept[id(value)] = value, dict(value)
            for each in list(value.values()):
                self._keep(each)
        elif isinstance(value, (list, set, deque)):
            self._kept[id(value)] = value, list(value)
            for each in list(value):
                self._keep(each)
        elif isinstance(value, tuple):
            for each in value:
                self._keep(each)
        elif isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
            self._kept[id(value)] = value, _generator_state(value)
        elif isinstance(value, torch.nn.Module) or _has_state(value):
            self._kept[id(value)] = value, None
            self._keep(vars(value))

    @property
    def can_restore(self) -> bool:
        """True unless a container that is too large to be remembered has changed its length."""
        return all(len(value) == length for value, length in self._lengths)

    @torch.no_grad()
    def restore(self) -> None:
        for value, before in self._kept.values():
            if isinstance(value, dict):
                if not _are_same(list(value.items()), list(before.items())):
                    for name in [name for name in value if name not in before]:
                        del value[name]
                    value.update(before)
            elif isinstance(value, (list, set, deque)):
                if not _are_same(list(value), before):
                    value.clear()
                    value.update(before) if isinstance(value, set) else value.extend(before)
            elif before is not None:
                _set_generator_state(value, before)
        for tensor, requires_grad, grad, hooks in self._leaves:
            for name, before in hooks.items():
                now = getattr(tensor, name) or {}
                for key in now.keys() - before.keys():
                    del now[key]
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad


def _has_state(value: Any) -> bool:
    """Returns True for objects whose attributes are restored: batches, data classes, the user's objects."""
    if not hasattr(value, "__dict__") or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    is_data = isinstance(value, (BaseData, BaseStorage, types.SimpleNamespace)) or is_dataclass(value)
    return is_data or _is_users(type(value).__module__)


@functools.cache
def _is_users(module: str) -> bool:
    """Returns True if a Python module is the user's: neither of Python nor of an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return module == "__main__" or (file is not None and not file.startswith((*places, str(Path(__file__).parents[1]))))


def _are_same(now: Any, before: Any) -> bool:
    """True if two values are the same object, or are lists or tuples of the same objects."""
    if now is before:
        return True
    is_deep = type(now) is type(before) and isinstance(now, (list, tuple)) and len(now) == len(before)
    return is_deep and all(map(_are_same, now, before))


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else value.bit_generator.state


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.bit_generator.state = state


class _Undo(NotedDispatch):
    """Copies memory before torch first writes to it, to restore it. Memory that the call allocates is exempt."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[StorageWeakRef, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._new: set[StorageWeakRef] = set()

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        positions, names = _written(func)
        for value in [*(args[k] for k in positions if k < len(args)), *(kwargs.get(name) for name in names)]:
            for tensor in tensors_of(value):
                self._keep(tensor)
        out = func(*args, **kwargs)
        given = {key_of_storage(tensor) for tensor in tensors_of([args, kwargs])}
        self._new |= {key_of_storage(tensor) for tensor in tensors_of(out)} - given
        return out

    def _keep(self, tensor: Tensor) -> None:
        key = key_of_storage(tensor)
        if key is not None and key not in self._new and key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()

    def has_kept(self, tensor: Tensor) -> bool:
        """Returns True if the tensor's memory was copied, because a write reached it."""
        return key_of_storage(tensor) in self._before

    def restore(self) -> None:
        for storage, before in self._before.values():
            if storage.nbytes() == before.nbytes():
                storage.copy_(before)
        self._before.clear()


#: Arguments that normalisations write to, although their schemas do not say so.
_STATISTICS = ("running_mean", "running_var")


@functools.cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Returns which arguments an operation writes to, as positions and as names."""
    arguments = enumerate(func._schema.arguments)
    found = [(k, each.name) for k, each in arguments if is_written(each) or each.name in _STATISTICS]
    return [k for k, _ in found], [name for _, name in found]


def is_written(argument: Any) -> bool:
    """Returns True if an operation writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def key_of_storage(tensor: Tensor) -> Any:
    """Identifies a storage, also after it is freed. All tensors that are not strided share one key."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None
