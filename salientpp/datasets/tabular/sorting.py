"""Sorts rows that memory does not hold.

Rows are spread into **buckets**, ranges of a word that compares like the column which decides first. Each portion of rows is sorted by bucket and appended
to a file, one record batch for a bucket. Buckets are then read in ascending order, as many at a time as memory holds, and sorted in memory. A bucket that is
too large alone is spread again: by finer ranges, and where all its words are equal, by the next word or column. Rows that are equal in all columns need no
order. So no distribution of values needs more memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salientpp.datasets.tabular.order import CONTINUES, order_columns, sorted_positions, word_at
from salientpp.datasets.tabular.rows import gathered, joined, return_memory
from salientpp.store.directory.journal import says_what_to_do

if TYPE_CHECKING:
    import pyarrow as pa

#: Buckets of one pass. With more, the batches of a file would be too short to be read fast.
MOST_BUCKETS = 256

#: Divisors of the memory: for the rows that are spread at a time, and for those that are sorted at a time. Both need copies and arrays of positions.
_SPREAD, _SORTED = 12, 10


class Buckets:
    """File of rows by bucket.

    Attributes:
        sizes: bytes in each bucket, int64 [B].
        least, most: smallest and largest word in each bucket, uint64 [B].
    """

    def __init__(self, path: Path, schema: pa.Schema, num_buckets: int) -> None:
        import pyarrow as pa

        self.path, self.schema = path, schema
        self.sizes = np.zeros(num_buckets, dtype=np.int64)
        self.least = np.full(num_buckets, 2**64 - 1, dtype=np.uint64)
        self.most = np.zeros(num_buckets, dtype=np.uint64)
        self._numbers: list[list[int]] = [[] for _ in range(num_buckets)]
        self._count = 0
        with says_what_to_do(path):
            self._file = pa.OSFile(str(path), "wb")
            self._writer = pa.ipc.new_file(self._file, schema)

    def add(self, batch: pa.RecordBatch, bucket: np.ndarray, words: np.ndarray | None = None) -> None:
        """Appends the rows of a batch. ``bucket`` uint16 [n] has the bucket of each row, and ``words`` uint64 [n] the word that decides."""
        import pyarrow as pa

        order = np.argsort(bucket, kind="stable")  # a radix sort, since buckets have 16 bits
        batch = batch.take(pa.array(order))
        counts = np.bincount(bucket, minlength=len(self.sizes))
        ends = np.cumsum(counts)
        in_order = None if words is None else words[order]
        for number in np.flatnonzero(counts):
            begin, end = int(ends[number] - counts[number]), int(ends[number])
            part = batch.slice(begin, end - begin)
            with says_what_to_do(self.path):
                self._writer.write_batch(part)
            self.sizes[number] += part.nbytes
            self._numbers[number].append(self._count)
            self._count += 1
            if in_order is not None:
                self.least[number] = min(self.least[number], in_order[begin:end].min())
                self.most[number] = max(self.most[number], in_order[begin:end].max())

    def finish(self) -> None:
        """Ends the file. It can be read then."""
        with says_what_to_do(self.path):
            self._writer.close()
            self._file.close()

    def read(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of buckets [first, last), in batches as they were written."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            reader = pa.ipc.open_file(file)
            for number in sorted(itertools.chain.from_iterable(self._numbers[first:last])):
                yield reader.get_batch(number)

    def remove(self) -> None:
        """Removes the file."""
        self.path.unlink()


@dataclass(frozen=True)
class Sorting:
    """The order of rows, and the means to sort them.

    Attributes:
        leading: names of one or two columns without nulls, of type uint64 or int64 >= 0, that decide first.
        rest: names of the columns that decide next, of any type.
        scratch: folder for files of buckets.
        working: bytes of memory for arrays.
    """

    schema: pa.Schema
    leading: Sequence[str]
    rest: Sequence[str]
    scratch: Path
    working: int
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def sort(self, batches: Iterable[pa.RecordBatch], largest: int = 2**64 - 1) -> Iterator[pa.RecordBatch]:
        """Yields all rows in order. ``largest`` is an upper bound of the first column."""
        portions = gathered(batches, self.schema, self.working // _SPREAD)
        first = next(portions, None)
        if first is None:
            return
        second = next(portions, None)
        if second is None:
            yield self._in_memory(first)
            return
        waiting = [second, first]  # popped, so that they are not held longer than others
        del first, second
        begun = (waiting.pop() for _ in range(2))
        yield from self._spread(itertools.chain(begun, portions), _Level(self), 0, largest)

    def _in_memory(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        return_memory()  # of the pieces that were joined
        leading = [batch.column(name).to_numpy() for name in self.leading]
        order = sorted_positions(leading, [batch.column(name) for name in self.rest])
        return_memory()
        return batch.take(pa.array(order))

    def _spread(
        self, batches: Iterable[pa.RecordBatch], level: _Level, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        """Yields rows in order, whose word at a level is in [low, high]."""
        shift = max(0, (high - low + 1).bit_length() - MOST_BUCKETS.bit_length() + 1)
        num_buckets = ((high - low) >> shift) + 1
        buckets = Buckets(self.scratch / f"{next(self._serial)}.runs", self.schema, num_buckets)
        for batch in batches:
            words = level.words(batch)
            buckets.add(batch, ((words - np.uint64(low)) >> np.uint64(shift)).astype(np.uint16), words)
        buckets.finish()
        return_memory()
        first, capacity = 0, self.working // _SORTED
        while first < num_buckets:
            last, size = first + 1, int(buckets.sizes[first])
            while last < num_buckets and size + int(buckets.sizes[last]) <= capacity:
                size += int(buckets.sizes[last])
                last += 1
            if 0 < size <= capacity:
                yield self._in_memory(joined(list(buckets.read(first, last)), self.schema))
            elif size:
                bounds = int(buckets.least[first]), int(buckets.most[first])
                yield from self._spread_again(_Again(buckets, first, self), level, *bounds)
            first = last
        buckets.remove()

    def _spread_again(self, again: _Again, level: _Level | None, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a bucket that memory does not hold. The bucket is read several times."""
        while level is not None and low == high:
            level = level.after(low, again)
            if level is not None:
                low, high = level.bounds(again)
        if level is None:
            yield from again()
        else:
            yield from self._spread(again(), level, low, high)


@dataclass(frozen=True)
class _Again:
    """Reads a bucket, each time from its beginning, in portions for spreading."""

    buckets: Buckets
    bucket: int
    sorting: Sorting

    def __call__(self) -> Iterator[pa.RecordBatch]:
        batches = self.buckets.read(self.bucket, self.bucket + 1)
        return gathered(batches, self.sorting.schema, self.sorting.working // _SPREAD)


@dataclass(frozen=True)
class _Level:
    """The word that decides between rows that all earlier words leave equal.

    Attributes:
        column: number of the column among the leading columns and the rest.
        part, step: which of the ``order_columns`` of a column that is not a leading one, and which word of it.
    """

    sorting: Sorting
    column: int = 0
    part: int = 0
    step: int = 0

    @property
    def _name(self) -> str:
        return [*self.sorting.leading, *self.sorting.rest][self.column]

    @property
    def _is_leading(self) -> bool:
        return self.column < len(self.sorting.leading)

    def words(self, batch: pa.RecordBatch) -> np.ndarray:
        """Returns the word of each row, uint64 [n]."""
        column = batch.column(self._name)
        if self._is_leading:
            return column.to_numpy().view(np.uint64)
        return word_at(order_columns(column)[self.part], self.step)

    def bounds(self, again: Callable[[], Iterator[pa.RecordBatch]]) -> tuple[int, int]:
        """Returns the smallest and the largest word of the rows."""
        extremes = [(words.min(), words.max()) for words in map(self.words, again())]
        return int(min(least for least, _ in extremes)), int(max(most for _, most in extremes))

    def after(self, word: int, again: Callable[[], Iterator[pa.RecordBatch]]) -> _Level | None:
        """Returns the next level for rows that all have this ``word``, or None if the rows are equal."""
        if not self._is_leading:
            # A null ends its column. A number has one word after the first, and a binary value as many as it is long.
            is_number = self._is_number(again)
            is_last = word == 1 if self.step == 0 else is_number or word % 256 < CONTINUES
            if not is_last and (self.step > 1 or not self._is_constant(again)):
                return _Level(self.sorting, self.column, self.part, self.step + 1)
            if self.part + 1 < self._num_parts(again):
                return _Level(self.sorting, self.column, self.part + 1)
        following = self.column + 1
        names = [*self.sorting.leading, *self.sorting.rest]
        while following < len(names):
            level = _Level(self.sorting, following)
            if level._is_leading or level._num_parts(again):
                return level
            following += 1
        return None

    def _parts(self, batch: Any) -> list[Any]:
        return order_columns(batch.column(self._name))

    def _num_parts(self, again: Callable[[], Iterator[Any]]) -> int:
        return len(self._parts(next(again()).slice(0, 1)))

    def _is_number(self, again: Callable[[], Iterator[Any]]) -> bool:
        import pyarrow as pa

        return pa.types.is_uint64(self._parts(next(again()).slice(0, 1))[self.part].type)

    def _is_constant(self, again: Callable[[], Iterator[Any]]) -> bool:
        """True if all rows have one value, so that long equal texts are not read word by word."""
        import pyarrow.compute as pc

        first = None
        for batch in again():
            column = self._parts(batch)[self.part]
            first = column[0] if first is None else first
            if not pc.all(pc.equal(column, first), skip_nulls=False, min_count=0).as_py():
                return False
        return True
