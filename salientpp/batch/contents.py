"""Records the contents of a ``Data`` at one moment, to detect later changes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import TensorFrame

from salientpp.store.fetch import Column
from salientpp.store.frames import tensors_of


class Contents:
    """Snapshot of the attributes of a ``Data`` or ``HeteroData``, by which a loader notices later changes.

    For each tensor it records the memory and the number of writes so far. torch counts in-place writes
    (``Tensor._version``), except writes through ``.data`` or numpy.

    Args:
        data: the object. Another thread may set and delete its attributes at the same time.
        former: earlier contents. The new contents learn from them which of the unchanged attributes belong to vertices and which to edges.
        changed: attributes, as (type, name), whose values in the new contents are unknown, and not those of the object.

    Attributes:
        whole: a shallow copy of the object at that moment, for threads to read.
    """

    def __init__(
        self, data: Data | HeteroData, former: Contents | None = None, changed: Collection[Column] = ()
    ) -> None:
        self._data = data
        self.whole = _copy_of(data)
        _keep_kinds(self.whole, None if former is None else former.whole)
        #: (type, name) -> (value, state that tells whether the value was written to)
        self._entries: dict[Column, tuple[object, object]] = {
            (store._key, name): (_OTHER, None) if (store._key, name) in changed else (value, _state_of(value))
            for store in self.whole.stores
            for name, value in store._mapping.items()
        }
        # Holding the storage keeps its memory from being reused for another tensor, which would look the same.
        self._memory = {
            column: value.untyped_storage()
            for column, (value, _) in self._entries.items()
            if isinstance(value, Tensor) and value.layout == torch.strided
        }

    def __reduce__(self) -> tuple[type[Contents], tuple[Any, ...]]:
        # A copy has other memory, so its state must be read again. Rows that a loader has taken from attributes are older than what the user wrote since.
        now = Contents(self._data)
        changed = [column for column in now._entries if not (now.has_same(column, self) or now._moved(column, self))]
        return Contents, (self._data, None, changed)

    def is_current(self) -> bool:
        """True if the object still has these contents."""
        entries = iter(self._entries.items())
        for store in self._data.stores:
            key = store._key
            for name, value in dict(store._mapping).items():
                column, (former, state) = next(entries, _NO_ENTRY)
                if value is not former or column != (key, name) or _state_of(value) != state:
                    return False
        return next(entries, None) is None

    def equals(self, other: Contents | None) -> bool:
        if self is other or other is None:
            return self is other
        if len(self._entries) != len(other._entries):
            return False
        return all(
            a == b and value is former and state == former_state
            for (a, (value, state)), (b, (former, former_state)) in zip(self._entries.items(), other._entries.items())
        )

    def value(self, column: Column) -> object:
        """Returns the value of an attribute, or None if it does not exist."""
        return self._entries.get(column, (None,))[0]

    def has_same(self, column: Column, other: Contents | None) -> bool:
        """True if both contents have the same object as this attribute, and it was not written to in between."""
        if other is None:
            return False
        ours, theirs = self._entries.get(column), other._entries.get(column)
        return ours is not None and theirs is not None and ours[0] is theirs[0] and ours[1] == theirs[1]

    def changed_edges(self, then: Contents) -> list[Any]:
        """Returns the types whose edges differ from those of ``then``. None stands for the edges of a homogeneous graph."""
        return list(
            dict.fromkeys(
                column[0]
                for column in [*self._entries, *then._entries]
                if column[1] in ("edge_index", "adj_t")
                and not (self.has_same(column, then) or self._moved(column, then))
                and not _is_equal(self.value(column), then.value(column))
            )
        )

    def _moved(self, column: Column, then: Contents) -> bool:
        """True if torch has moved an attribute's tensor to other memory, as when it sends one to another process."""
        ours, theirs = (each._memory.get(column) for each in (self, then))
        if ours is None or theirs is None or ours._cdata != theirs._cdata:
            return False
        (value, state), (former, former_state) = self._entries[column], then._entries[column]
        same = isinstance(state, tuple) and isinstance(former_state, tuple) and state[0] == former_state[0]
        return same and value is former


_OTHER = object()  #: a value that no attribute has
_NO_ENTRY: tuple[Column | None, tuple[object, object]] = (None, (None, None))


def _copy_of(data: Data | HeteroData) -> Data | HeteroData:
    """Returns a shallow copy of an object that another thread may write to at the same time."""
    for _ in range(10):
        try:
            return copy.copy(data)
        except RuntimeError:  # PyG iterates over dictionaries, and another thread has added an entry meanwhile
            pass
    return copy.copy(data)


def _keep_kinds(data: Data | HeteroData, former: Data | HeteroData | None) -> None:
    """Copies to ``data`` what PyG found out from ``former``: which attributes belong to vertices, and which to edges.

    PyG decides by sizes, which it infers from the attributes. It could not do so after a training loop has deleted ``x``.
    """
    known: dict[Any, BaseStorage] = {} if former is None else {store._key: store for store in former.stores}
    for store in data.stores:
        # Set now, because PyG would add it while another thread copies the storage.
        kinds = store._cached_attr = defaultdict(set)
        before = known.get(store._key, BaseStorage())
        for kind, names in dict(before.__dict__.get("_cached_attr", {})).items():
            kinds[kind] = {name for name in set(names) if store.get(name) is before.get(name)}


def _state_of(value: Any) -> object:
    try:
        return (value._version, value.data_ptr(), value.requires_grad)
    except (AttributeError, RuntimeError):  # not a tensor, or a tensor without memory or version counter
        return _state_of_other(value)


def _state_of_other(value: Any) -> object:
    if isinstance(value, TensorFrame):
        return tuple(map(_state_of, tensors_of(value)))
    if not isinstance(value, Tensor):
        values = value.storage._value if is_sparse_tensor(value) else None
        return None if values is None else _state_of(values)
    if value.layout == torch.strided:  # created in inference mode
        return (value.data_ptr(), value.requires_grad)
    values = value.values() if value.layout != torch.sparse_coo or value.is_coalesced() else value._values()
    return tuple(None if each.is_inference() else each._version for each in (value, values))


def is_sparse_tensor(value: Any) -> bool:
    """True if the value is torch-sparse's ``SparseTensor``. torch-sparse need not be installed."""
    return not isinstance(value, Tensor) and hasattr(value, "storage") and hasattr(value, "csr")


def _is_equal(ours: object, theirs: object) -> bool:
    """True if both values hold the same edges, also if one is a copy of the other or is on another device."""
    if ours is theirs or not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    is_alike = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return ours.layout == theirs.layout == torch.strided and is_alike and torch.equal(ours.cpu(), theirs.cpu())
