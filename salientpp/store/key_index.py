"""Looks up keys among sorted keys that are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.store.keys import value_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_HASHES_AT_ONCE = 2**16


class KeyIndex:
    """Finds positions of keys. Hashes choose the candidates, and the keys themselves are compared, so a result is exact.

    Args:
        hashes: :func:`~salientpp.store.keys.key_hash` of each key, uint64 [N], ascending. They are only read here.
        keys: canonical columns [N] of the keys, in the same order, without nulls.
    """

    #: Bytes that an index needs for each key, in addition to the keys themselves.
    BYTES_PER_KEY = 8

    def __init__(self, hashes: np.ndarray, keys: Sequence[pa.Array]) -> None:
        self._num_keys = len(hashes)
        self._columns, self._offsets = _tensors([_of_one_width(column) for column in keys] if len(hashes) else [])
        self._first = hashes[0] if len(hashes) else np.uint64(0)
        span = int(hashes[-1] - self._first) if len(hashes) else 0
        # Between half a cell and two cells for each hash.
        self._shift = max(0, span.bit_length() - len(hashes).bit_length())
        shift = np.uint64(self._shift)
        counts = np.zeros((span >> self._shift) + 2, dtype=np.int32 if len(hashes) < 2**31 else np.int64)
        for begin in range(0, len(hashes), _HASHES_AT_ONCE):
            cell = ((hashes[begin : begin + _HASHES_AT_ONCE] - self._first) >> shift).astype(np.int64)
            counts[cell[0] + 1 : cell[-1] + 2] += np.bincount(cell - cell[0]).astype(counts.dtype)
        self._cells = torch.from_numpy(np.cumsum(counts, out=counts))

    def find(self, hashes: np.ndarray, keys: Sequence[pa.Array]) -> np.ndarray:
        """Returns the position of each key, int64 [n], or -1 if the index does not have it.

        Args:
            hashes: hash of each key, uint64 [n].
            keys: columns [n] of the types of the index's keys, without nulls.
        """
        if not self._num_keys or not len(hashes):
            return np.full(len(hashes), -1, dtype=np.int64)
        wanted, offsets = _tensors([value_bytes(column) for column in keys])
        found = ops.find_keys(
            _tensor(hashes),
            self._cells,
            int(self._first.view(np.int64)),
            self._shift,
            self._columns,
            self._offsets,
            wanted,
            offsets,
            self._num_keys,
        )
        return found.numpy()


def _tensors(columns: Sequence[tuple[np.ndarray, np.ndarray | None]]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the columns of keys as :func:`salientpp.ops.find_keys` takes them: their bytes, and where their values begin."""
    return [_tensor(data) for data, _ in columns], [None if ends is None else _tensor(ends) for _, ends in columns]


def _of_one_width(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the same as :func:`~salientpp.store.keys.value_bytes`, but without offsets if all values are equally long."""
    data, ends = value_bytes(column)
    if ends is None or not (np.diff(ends) == ends[1] - ends[0]).all():
        return data, ends
    return data[ends[0] : ends[-1]].reshape(len(column), -1), None


def _tensor(values: np.ndarray) -> Tensor:
    """Returns a view of an array that nobody writes, as a tensor. torch warns of arrays that cannot be written."""
    import pyarrow as pa

    flat = np.ascontiguousarray(values)
    kind = pa.uint8() if flat.dtype == np.uint8 else pa.int64()
    array = pa.Array.from_buffers(kind, flat.size, [None, pa.py_buffer(flat)])
    return torch.from_dlpack(array).view(flat.shape)
