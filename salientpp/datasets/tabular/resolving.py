"""Replaces the keys of edges' ends by the numbers of their vertices.

If memory holds the keys of all vertices at both ends, batches of edges are looked up as they come. Otherwise edges are spread into buckets, ranges of the
hash of their key. The vertices of a range have consecutive numbers. So for each bucket, the keys of its vertices are loaded, and the edges of the bucket are
looked up in batches. Edges are never collected by key, and a key may have any number of edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salientpp.datasets.tabular.numbering import KEY_ROWS, NumberedVertices
from salientpp.datasets.tabular.rows import gathered, return_memory
from salientpp.datasets.tabular.sorting import MOST_BUCKETS, Buckets
from salientpp.store.key_index import KeyIndex

if TYPE_CHECKING:
    import pyarrow as pa

#: Divisors of the memory: for the indexes of all keys, and for an index of some keys. Then for edges that are spread, and that are looked up, at a time.
_ALL_INDEXED, _INDEXED, _SPREAD, _LOOKED_UP = 2.5, 6, 16, 32

#: Bytes of edges that are looked up at a time, at most. Batches of more bytes are cut, which copies nothing; small ones are joined.
_MOST_BYTES = 2**22

#: Takes the keys (columns [n]) and hashes of rows without a vertex.
Unknown = Callable[[Sequence[Any], np.ndarray], object]


class Indexes:
    """Indexes of all keys of vertex types, if memory holds them together. Ends with the same vertices share one.

    Attributes:
        fit: False if memory does not hold them.
    """

    def __init__(self, vertices: Sequence[NumberedVertices], working: int) -> None:
        each = {of.keys.path: _index_bytes(of, of.num_vertices) for of in vertices}
        self.fit = sum(each.values()) * _ALL_INDEXED <= working
        self._made: dict[Path, KeyIndex] = {}

    def of(self, vertices: NumberedVertices, begin: int, end: int) -> KeyIndex:
        """Returns an index of the keys of vertices [begin, end). It stays only if they are all vertices of their type."""
        if not self.fit:
            return _index(vertices, begin, end)
        path = vertices.keys.path
        if path not in self._made:
            self._made[path] = _index(vertices, 0, vertices.num_vertices)
            return_memory()  # keys were in memory twice while they were loaded
        return self._made[path]

    def while_reading(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches, then frees the indexes."""
        yield from batches
        self._made.clear()
        return_memory()


def _index(vertices: NumberedVertices, begin: int, end: int) -> KeyIndex:
    keys = vertices.keys.slice(begin, end, KEY_ROWS)
    return KeyIndex(_hashes(vertices)[begin:end], keys.columns)


def _index_bytes(vertices: NumberedVertices, num_keys: int) -> int:
    of_key = vertices.keys.path.stat().st_size / max(1, vertices.num_vertices)
    return int(num_keys * (KeyIndex.BYTES_PER_KEY + of_key))


def _hashes(vertices: NumberedVertices) -> np.ndarray:
    # Mapped again for each use, so that pages of former uses do not count as memory of the process.
    return np.load(vertices.hashes, mmap_mode="r")


@dataclass(frozen=True)
class Resolving:
    """Looks up one end of edges.

    Attributes:
        vertices: the type of vertices at this end.
        hash_name, key_names: columns of the edges with the hash and the key of this end, of the types of ``vertices.keys``.
        id_name: column with the vertex numbers, int64, that takes their place as the first column.
        unknown: takes the edges that ``vertices`` lacks. They are left out.
        indexes: gives the indexes of both ends.
        scratch: folder for files of buckets.
        working: bytes of memory for arrays.
    """

    vertices: NumberedVertices
    hash_name: str
    key_names: Sequence[str]
    id_name: str
    unknown: Unknown
    indexes: Indexes
    scratch: Path
    working: int
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        """Returns the schema of resolved edges, for that of the edges before."""
        import pyarrow as pa

        gone = {self.hash_name, *self.key_names}
        return pa.schema([pa.field(self.id_name, pa.int64()), *(of for of in schema if of.name not in gone)])

    def resolve(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yields the edges whose key is known, in any order, with the number of the vertex instead of hash and key."""
        return self._resolve(batches, schema, 0, self.vertices.num_vertices)

    def _resolve(self, batches: Iterable[Any], schema: pa.Schema, begin: int, end: int) -> Iterator[Any]:
        """Resolves edges whose vertices are in [begin, end), if they have one."""
        needed = 0 if self.indexes.fit else _index_bytes(self.vertices, end - begin)
        starts, bounds = self._divided(begin, end, int(min(MOST_BUCKETS, -(-needed * _INDEXED // self.working))))
        if not bounds.size:
            yield from self._look_up(batches, schema, begin, end)
            return
        buckets = Buckets(self.scratch / f"{self.id_name}-{next(self._serial)}.runs", schema, len(starts) - 1)
        for batch in gathered(batches, schema, self.working // _SPREAD):
            of = np.searchsorted(bounds, batch.column(self.hash_name).to_numpy(), side="right")
            buckets.add(batch, of.astype(np.uint16))
        buckets.finish()
        for number, (low, high) in enumerate(itertools.pairwise(starts)):
            if buckets.sizes[number]:
                yield from self._resolve(buckets.read(number, number + 1), schema, low, high)
        buckets.remove()

    def _divided(self, begin: int, end: int, num_parts: int) -> tuple[list[int], np.ndarray]:
        """Divides vertices into about ``num_parts`` ranges. Vertices with equal hashes stay together.

        Returns:
            The first vertex of each range and ``end``, and the smallest hash of each range except the first, uint64.
        """
        if num_parts <= 1:
            return [begin, end], np.empty(0, dtype=np.uint64)
        hashes = _hashes(self.vertices)[begin:end]
        bounds = np.unique(hashes[[(end - begin) * number // num_parts for number in range(1, num_parts)]])
        # The places of few vertices may all have the first hash. The last hash then still divides them.
        bounds = bounds if bounds[-1] > hashes[0] else hashes[-1:]
        bounds = bounds[bounds > hashes[0]]
        return [begin, *(begin + np.searchsorted(hashes, bounds)).tolist(), end], np.array(bounds)

    def _look_up(self, batches: Iterable[Any], schema: pa.Schema, begin: int, end: int) -> Iterator[Any]:
        import pyarrow as pa

        index = self.indexes.of(self.vertices, begin, end)
        after = self.schema_after(schema)
        for batch in gathered(batches, schema, min(_MOST_BYTES, self.working // _LOOKED_UP)):
            wanted = [batch.column(name) for name in self.key_names]
            found = index.find(batch.column(self.hash_name).to_numpy(), wanted)
            is_unknown = found < 0
            ids = pa.array(found + begin)
            arrays = [ids, *(batch.column(name) for name in after.names[1:])]
            resolved = pa.RecordBatch.from_arrays(arrays, schema=after)
            if is_unknown.any():
                lacking = batch.filter(pa.array(is_unknown))
                lacked = [lacking.column(name) for name in self.key_names]
                self.unknown(lacked, lacking.column(self.hash_name).to_numpy())
                resolved = resolved.filter(pa.array(~is_unknown))
            if resolved.num_rows:
                yield resolved
