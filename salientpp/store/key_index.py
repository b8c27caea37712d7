"""Looks up keys among sorted keys that are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

#: Places that are tried one after the other, before a binary search finds the place of a hash.
_TRIES = 4

_CELLS_AT_ONCE = 2**16


class KeyIndex:
    """Finds positions of keys. Hashes choose the candidates, and the keys themselves are compared, so a result is exact.

    Attributes:
        hashes: :func:`~salientpp.store.keys.key_hash` of each key, uint64 [N], ascending.
        keys: canonical columns [N] of the keys, in the same order, without nulls.
    """

    def __init__(self, hashes: np.ndarray, keys: Sequence[pa.Array]) -> None:
        self.hashes, self.keys = hashes, list(keys)
        self._first = int(hashes[0]) if len(hashes) else 0
        span = int(hashes[-1]) - self._first if len(hashes) else 0
        # One or two cells for each hash. A cell has the position of the first hash that is not below it.
        self._shift = max(0, span.bit_length() - len(hashes).bit_length())
        self._cells = np.empty((span >> self._shift) + 1, dtype=np.int32 if len(hashes) < 2**31 else np.int64)
        for begin in range(0, len(self._cells), _CELLS_AT_ONCE):
            part = self._cells[begin : begin + _CELLS_AT_ONCE]
            cells = np.arange(begin, begin + len(part), dtype=np.uint64) << np.uint64(self._shift)
            part[:] = np.searchsorted(hashes, cells + np.uint64(self._first))

    @staticmethod
    def bytes_per_key() -> int:
        """Returns the bytes that an index needs for each key, in addition to the keys themselves."""
        return 24

    def find(self, hashes: np.ndarray, keys: Sequence[pa.Array]) -> np.ndarray:
        """Returns the position of each key, int64 [n], or -1 if the index does not have it.

        Args:
            hashes: hash of each key, uint64 [n].
            keys: columns [n] of the types of the index's keys, without nulls.
        """
        if not len(self.hashes):
            return np.full(len(hashes), -1, dtype=np.int64)
        found = self._places(hashes)
        wrong = np.flatnonzero(self._differs(found, hashes, keys, None))
        candidates = found[wrong]
        found[wrong] = -1
        while wrong.size:  # hashes of different keys may be equal: those keys are neighbours in the index
            candidates += 1
            may_match = candidates < len(self.hashes)
            may_match[may_match] = self.hashes[candidates[may_match]] == hashes[wrong[may_match]]
            wrong, candidates = wrong[may_match], candidates[may_match]
            differs = self._differs(candidates, hashes, keys, wrong)
            found[wrong[~differs]] = candidates[~differs]
            wrong, candidates = wrong[differs], candidates[differs]
        return found

    def _places(self, hashes: np.ndarray) -> np.ndarray:
        """Returns the position of the first hash that is not below each hash, int64 [n]; the last position if there is none."""
        below = hashes < np.uint64(self._first)
        cell = (hashes - np.uint64(self._first)) >> np.uint64(self._shift)
        beyond = cell >= np.uint64(len(self._cells))
        cell = np.where(below | beyond, np.uint64(0), cell).astype(np.int64)
        places = self._cells[cell].astype(np.int64)
        last = len(self.hashes) - 1
        for _ in range(_TRIES):
            later = (self.hashes[places] < hashes) & (places < last)
            if not later.any():
                return places
            places += later
        rest = np.flatnonzero(self.hashes[places] < hashes)
        places[rest] = np.minimum(np.searchsorted(self.hashes, hashes[rest]), last)
        return places

    def _differs(
        self, places: np.ndarray, hashes: np.ndarray, keys: Sequence[pa.Array], rows: np.ndarray | None
    ) -> np.ndarray:
        """Returns True, bool [n], where the key at a place is not the key of a row. ``rows`` int64 [n] chooses the rows; None takes all."""
        import pyarrow as pa
        import pyarrow.compute as pc

        differs = self.hashes[places] != (hashes if rows is None else hashes[rows])
        same = np.flatnonzero(~differs)
        if not same.size:
            return differs
        at, of = pa.array(places[same]), pa.array(same if rows is None else rows[same])
        is_all = rows is None and same.size == len(hashes)
        for own, other in zip(self.keys, keys):
            equal = pc.equal(own.take(at), other if is_all else other.take(of))
            differs[same] |= ~equal.to_numpy(zero_copy_only=False)
        return differs
