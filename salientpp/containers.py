"""Visits the values in containers, nested to any depth, such as the tensors among the arguments of a model.

Lists, tuples, dictionaries and slices count as containers. With ``objects``, sets, other mappings and instances of dataclasses count too, but slices do not.
Objects of PyG, such as a batch, are never containers.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import Tensor

Kind = TypeVar("Kind")


def leaves(value: Any, objects: bool = False) -> Iterator[Any]:
    """Yields every value inside a container, or ``value`` itself if it is not a container."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each, objects)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each, objects)
    elif isinstance(value, slice) and not objects:
        yield from (value.start, value.stop, value.step)
    elif objects and not isinstance(value, Tensor):
        yield from _leaves_of_object(value)
    else:
        yield value


def _leaves_of_object(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from leaves([*value.values()], True)
    elif isinstance(value, (set, frozenset)):
        yield from leaves([*value], True)
    elif _is_dataclass(value):
        yield from leaves([getattr(value, name) for name in _fields(value)], True)
    else:
        yield value


def found(value: Any, kind: type[Kind], objects: bool = False) -> Iterator[Kind]:
    """Yields the :func:`leaves` of type ``kind``."""
    return (each for each in leaves(value, objects) if isinstance(each, kind))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in lists, tuples, dictionaries and slices."""
    return found(value, Tensor)


def mapped(value: Any, function: Callable[[Any], Any], as_tuples: tuple[type, ...] = (), objects: bool = False) -> Any:
    """Returns a copy of the containers, with ``function`` applied to every leaf. Sets count as leaves.

    Args:
        as_tuples: types of tuples that become plain tuples. Other tuples and lists keep their types, and dictionaries become plain ones.
    """

    def of(each: Any) -> Any:
        return mapped(each, function, as_tuples, objects)

    if isinstance(value, (list, tuple)) and not isinstance(value, enum.Enum):
        items = list(map(of, value))
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return tuple(items) if isinstance(value, as_tuples) else type(value)(items)
    if isinstance(value, dict) and (not objects or type(value) is dict):
        return {name: of(each) for name, each in value.items()}
    if isinstance(value, slice) and not objects:
        return slice(*map(function, (value.start, value.stop, value.step)))
    if objects and isinstance(value, MutableMapping):
        copied: Any = copy.copy(value)
        for name, each in value.items():
            copied[name] = of(each)
        return copied
    if objects and _is_dataclass(value):
        copied = copy.copy(value)
        for name in _fields(value):
            object.__setattr__(copied, name, of(getattr(value, name)))
        return copied
    return function(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[str]:
    """Returns the names of a dataclass's fields that have a value."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
