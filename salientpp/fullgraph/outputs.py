"""Functions that visit the tensors in a model's output: in tuples, lists, mutable mappings (as transformers returns) and dataclasses, nested in any way."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

#: Types of values without tensors.
_PLAIN = (type(None), str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in ``value``. Unknown containers are skipped."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from tensors_of(each)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of ``value`` in which ``function`` has been applied to every tensor. ``value`` itself is unchanged.

    Raises:
        TypeError: ``value`` holds an object of an unknown container type.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, function) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(each, function) for each in value])
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = mapped(each, function)
        return copied
    if _is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, mapped(getattr(value, field.name), function))
        return copied
    raise TypeError(
        f"the model must return tensors, or tuples, lists, dicts and dataclasses of tensors, got a {type(value).__name__}"
    )


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
