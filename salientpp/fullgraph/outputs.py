"""Functions over the tensors in what a model returns: tensors in tuples, lists, mutable mappings (as of transformers) and dataclasses, nested in any way."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

#: Values without tensors.
_PLAIN = (type(None), str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``. Objects that are no known container are skipped."""
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
    """A copy of ``value`` in which every tensor is replaced by ``function`` of it. ``value`` itself stays as it is.

    Raises:
        TypeError: ``value`` holds an object that is no known container.
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
