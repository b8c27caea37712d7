"""A store of what was computed from tensors, valid for as long as these tensors stay as they are.

Matrices and normalised weights are computed once for all steps. A tensor that was written in place since has another version, and what was computed from
it is computed anew. ``tensor.data`` and NumPy write past the version: such a change is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Entry:
    """What was computed.

    Attributes:
        sources: the tensors that it was computed from. They are held, so no other tensor gets the ``id`` of one.
        versions: of ``sources``, when it was computed.
        value: it.
    """

    sources: tuple[Tensor | None, ...]
    versions: list[object]
    value: Any


class Kept:
    """Values by the tensors that they were computed from."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()  # copies of the tensors are other tensors

    def of(self, sources: Sequence[Tensor | None], what: Hashable, make: Callable[[], T]) -> T:
        """``make()``, or what it returned before for the same tensors with the same contents.

        Args:
            sources: the tensors that the value depends on.
            what: tells values of the same tensors apart.
        """
        key = what, *map(id, sources)
        versions = [_version(source) for source in sources]
        entry = self._entries.get(key)
        if entry is None or entry.versions != versions:
            self._drop(key)
            # Values of inference mode could not be used in training.
            with torch.inference_mode(False), torch.no_grad():
                entry = _Entry(tuple(sources), versions, make())
            self._entries[key] = entry
        return entry.value

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the values, or of those in a tuple."""
        return any(tensor is each for entry in self._entries.values() for each in _tensors_in(entry.value))

    def _drop(self, key: Hashable) -> None:
        """Forget a value, and all that was computed from it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            gone = {*map(id, _tensors_in(entry.value))} - {*map(id, entry.sources)}
            for other in [other for other, each in self._entries.items() if gone & set(map(id, each.sources))]:
                self._drop(other)


def _tensors_in(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _version(tensor: Tensor | None) -> object:
    if tensor is None:
        return 0
    return object() if tensor.is_inference() else tensor._version  # inference tensors have no version
