"""Cache for values that are computed from tensors, so that later steps need not compute them again.

A write in place to one of the tensors discards the value. Writes through ``tensor.data`` and NumPy are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Kept:
    """Cache of computed values. The key of a value is its name, and the tensors that it was computed from."""

    def __init__(self) -> None:
        # (sources, their versions when the value was made, value). The references keep the sources alive, so that no new tensor gets the `id` of one.
        self._entries: dict[Hashable, tuple[tuple[Tensor | None, ...], list[object], Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()  # a copied model has other tensors

    def of(self, sources: Sequence[Tensor | None], what: Hashable, make: Callable[[], T]) -> T:
        """Returns ``make()``, or its earlier result for the same tensors with the same contents.

        Args:
            sources: the tensors that the value depends on.
            what: name of the value. The same tensors may have several values.
        """
        key = what, *map(id, sources)
        versions = [_version(source) for source in sources]
        entry = self._entries.get(key)
        if entry is None or entry[1] != versions:
            self._drop(key)
            # Values made in inference mode could not be used in training.
            with torch.inference_mode(False), torch.no_grad():
                entry = self._entries[key] = tuple(sources), versions, make()
        return entry[2]

    def has(self, tensor: Tensor) -> bool:
        """True if this cache holds the tensor, as a value or inside one, so that the tensor cannot change between steps."""
        return any(tensor is each for *_, value in self._entries.values() for each in _tensors_in(value))

    def _drop(self, key: Hashable) -> None:
        """Removes a value, and the values that were computed from it."""
        if key in self._entries:
            sources, _, value = self._entries.pop(key)
            gone = {*map(id, _tensors_in(value))} - {*map(id, sources)}
            for other in [other for other, (used, *_) in self._entries.items() if gone & {*map(id, used)}]:
                self._drop(other)


def _tensors_in(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _version(tensor: Tensor | None) -> object:
    if tensor is None:
        return 0
    return object() if tensor.is_inference() else tensor._version  # inference tensors have no version
