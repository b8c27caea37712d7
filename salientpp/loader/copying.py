"""Copies of loaders as ``copy.copy`` makes them: a copy has threads, locks, buffers and statistics of its own, and shares tensors and the user's objects.

A copy goes through :mod:`pickle`, so that each class says once, with ``__getstate__`` or ``__reduce__``, which of its values belong to one object.
Shared objects do not enter the bytes.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from types import FunctionType, MethodType, NoneType
from typing import Any

from torch_geometric.sampler import BaseSampler

from salientpp.sampling.topology import Topology

#: Types of plain values, and of objects that may hold values of the loader. Objects of other types are shared, except those of this package.
_COPIED = (
    NoneType, bool, int, float, complex, str, bytes, range, slice, list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, deque
)  # fmt: skip


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.shared: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """Returns an index into ``shared`` for an object that the copy shares, or None for an object to copy. :mod:`pickle` calls it."""
        if not _is_shared(value):
            return None
        self.shared.append(value)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> Any:
        return self._shared[place]


def _is_shared(value: Any) -> bool:
    owner = value.__self__ if isinstance(value, MethodType) else value
    if isinstance(owner, (type, FunctionType, BaseSampler, Topology)):
        return True
    return type(owner) not in _COPIED and type(owner).__module__.partition(".")[0] != "salientpp"


def copied(state: Any) -> Any:
    """Returns a copy of ``state``. Tensors, samplers and the user's objects are not copied; the copy refers to the same ones."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    file.seek(0)
    return _Unpickler(file, pickler.shared).load()
