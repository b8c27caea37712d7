"""Visits the values in containers: lists, tuples, sets, mappings, slices and instances of dataclasses, nested in any way.

Objects of PyG, such as a batch, are not containers here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import Tensor

Kind = TypeVar("Kind")

#: Types of the most frequent values that are no containers, which are recognised faster than others.
_SIMPLE = frozenset([Tensor, int, float, bool, str, type(None)])


def leaves(value: Any) -> Iterator[Any]:
    """Yields every value inside a container, or ``value`` itself if it is none."""
    if type(value) in _SIMPLE or isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def found(value: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yields the :func:`leaves` of a type."""
    return (each for each in leaves(value) if isinstance(each, kind))


def tensors_of(value: Any) -> Iterator[Tensor]:
    return found(value, Tensor)


def mapped(value: Any, function: Callable[[Any], Any], as_tuples: tuple[type, ...] = ()) -> Any:
    """Returns a copy of the containers, with ``function`` applied to every leaf. Sets count as leaves. ``value`` itself is unchanged.

    Args:
        as_tuples: types of tuples that become plain tuples. Other containers keep their types.
    """
    if type(value) in _SIMPLE or isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(each, function, as_tuples) for each in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return tuple(items) if isinstance(value, as_tuples) else type(value)(items)
    if type(value) is dict:
        return {name: mapped(each, function, as_tuples) for name, each in value.items()}
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for name, each in value.items():
            copied[name] = mapped(each, function, as_tuples)
        return copied
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    if _is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, mapped(getattr(value, field.name), function, as_tuples))
        return copied
    return function(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
