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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from salientpp.nn.rules import tensors_of


@contextmanager
def rehearsal(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Rehearsal]:
    """Context in which a model may be called with these arguments. Its effects are undone afterwards.

    These are writes to tensors by operations of torch, to attributes of modules, to lists and dictionaries in attributes, to batches, and to generators.
    Files, global variables and objects of other libraries are not covered.
    """
    state = _State(model, args, kwargs)
    devices = {value.device for value in tensors_of([args, kwargs]) if value.device.type != "cpu"}
    forked = torch.random.fork_rng(devices, device_type=next(iter(devices)).type if devices else "cpu")
    others, undo = (random.getstate(), np.random.get_state()), _Undo()
    try:
        # The caller may save tensors in its own way, for example within a checkpoint. This call's tensors are not part of that.
        with forked, torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _same), undo:
            yield Rehearsal(model, others)
    finally:
        torch.clear_autocast_cache()  # it may hold values that belong to this call
        random.setstate(others[0])
        np.random.set_state(others[1])
        undo.restore()
        state.restore()


class Rehearsal:
    """Effects that a call has had so far, before they are undone."""

    def __init__(self, model: torch.nn.Module, others: Any) -> None:
        self._others = others
        self._model = model
        self._buffers = {name: (value, value.clone()) for name, value in model.named_buffers()}

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that were written to."""
        now = dict(self._model.named_buffers())
        return tuple(
            name
            for name, (value, before) in self._buffers.items()
            if now.get(name) is value and not torch.equal(value, before)
        )

    @property
    def draws(self) -> bool:
        """True if numbers were drawn from the generators of Python or numpy."""
        now = random.getstate(), np.random.get_state()
        return now[0] != self._others[0] or any(map(np.any, map(np.not_equal, now[1], self._others[1])))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _State:
    """Contents of a model's attributes and arguments: of dictionaries, lists, sets and generators, and which tensors they hold."""

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # by id: object and its contents
        self._tensors: list[tuple[Tensor, bool, Any]] = []  # with requires_grad and grad
        for module in model.modules():
            self._keep(module)
        self._keep([args, kwargs])
        # Some operations write to running statistics without declaring it.
        self._buffers = [(value, value.clone()) for value in model.buffers()]

    def _keep(self, value: Any) -> None:
        if value is None or isinstance(value, (int, float, str)) or id(value) in self._kept:
            return
        if isinstance(value, Tensor):
            if value.is_leaf:
                self._tensors.append((value, value.requires_grad, value.grad))
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
        for tensor, requires_grad, grad in self._tensors:
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
        for value, before in self._buffers:
            if not torch.equal(value, before):
                value.copy_(before)


def _has_state(value: Any) -> bool:
    """Returns True for objects whose attributes are restored: batches, data classes, and objects of the user's own classes, such as meters."""
    if not hasattr(value, "__dict__") or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    is_data = isinstance(value, (BaseData, BaseStorage, types.SimpleNamespace)) or is_dataclass(value)
    return is_data or _is_users(type(value).__module__)


@functools.cache
def _is_users(module: str) -> bool:
    """Returns True if a Python module belongs neither to Python nor to an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return module == "__main__" or (file is not None and not file.startswith((*places, str(Path(__file__).parents[1]))))


def _are_same(now: Any, before: Any) -> bool:
    """Returns True if two lists or tuples have the same objects."""
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


class _Undo(TorchDispatchMode):
    """Copies each memory that torch writes to before the first write, unless it was allocated in this context."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[StorageWeakRef, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._new: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the functions that this method calls are none of the model's
            return self._dispatch(func, args, kwargs or {})

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

    def restore(self) -> None:
        for storage, before in self._before.values():
            if storage.nbytes() == before.nbytes():
                storage.copy_(before)
        self._before.clear()


@functools.cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Returns the arguments that an operation writes to: positions, and names."""
    found = [(k, each.name) for k, each in enumerate(func._schema.arguments) if is_written(each)]
    return [k for k, _ in found], [name for _, name in found]


def is_written(argument: Any) -> bool:
    """Returns True if an operation writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def key_of_storage(tensor: Tensor) -> Any:
    """Identifies a storage, also after it is freed. All tensors that are not strided share one key."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None
