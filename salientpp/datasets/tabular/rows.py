"""Files of table rows that a later step reads in order, and batches of rows in memory.

The files are uncompressed Arrow IPC files. They are read without a memory map, so that their pages do not count as memory of the process.
"""

from __future__ import annotations

import bisect
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from salientpp.store.directory.journal import says_what_to_do
from salientpp.store.keys import decoded, decoded_type

if TYPE_CHECKING:
    import pyarrow as pa

#: Most rows of a batch in a file. Readers hold one batch.
ROWS_OF_A_BATCH = 2**16

#: Rows whose length says how many rows to read at a time.
_ROWS_TO_LOOK_AT = 2**10

#: Dropped rows that a report shows.
MOST_EXAMPLES = 5


class _Readable(Protocol):
    """A table of any kind."""

    @property
    def schema(self) -> pa.Schema: ...

    def batches(self, columns: Sequence[str], most_rows: int) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Dropped:
    """Rows that a policy dropped: their number, and texts that show the key or the place of at most five."""

    count: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowFile:
    """File of rows with named columns. A file without columns gives no batches, whatever ``num_rows`` is."""

    path: Path
    num_rows: int

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            return pa.ipc.open_file(file).schema

    def batches(self, names: Sequence[str] | None = None, most_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields all rows in order, in batches of at most ``most_rows``, with the columns ``names``. None reads all columns in batches as in the file."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            reader = _open(file, names)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch = batch if names is None else batch.select(list(names))
                for begin in range(0, batch.num_rows, most_rows or max(1, batch.num_rows)):
                    yield batch.slice(begin, most_rows)

    def slice(self, begin: int, end: int, rows_of_a_batch: int) -> pa.RecordBatch:
        """Returns rows [begin, end) of a file whose batches all have ``rows_of_a_batch`` rows, except the last one."""
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            reader = _open(file, None)
            numbers = range(begin // rows_of_a_batch, -(-end // rows_of_a_batch))
            batch = joined([reader.get_batch(number) for number in numbers], reader.schema)
        return batch.slice(begin - numbers.start * rows_of_a_batch, end - begin)


@dataclass(frozen=True)
class RowsInMemory:
    """Rows in memory that are read like those of a :class:`RowFile`."""

    held: Sequence[pa.RecordBatch]

    @property
    def num_rows(self) -> int:
        """Number of rows of all batches."""
        return sum(batch.num_rows for batch in self.held)

    def batches(self, names: Sequence[str], most_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields all rows in order, in batches of at most ``most_rows``, with the columns ``names``."""
        for batch in self.held:
            for begin in range(0, batch.num_rows, most_rows or max(1, batch.num_rows)):
                yield batch.select(list(names)).slice(begin, most_rows)


def _open(file: Any, names: Sequence[str] | None) -> Any:
    import pyarrow as pa

    if names is None:
        return pa.ipc.open_file(file)
    schema = pa.ipc.open_file(file).schema
    fields = [schema.get_field_index(name) for name in names]
    file.seek(0)
    return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))


class RowWriter:
    """Writes a :class:`RowFile`. Its batches have ``rows_of_a_batch`` rows, except the last one, so equal rows give equal bytes.

    If ``most_bytes`` is given, batches with as many bytes end earlier.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        rows_of_a_batch: int = ROWS_OF_A_BATCH,
        most_bytes: int | None = None,
    ) -> None:
        import pyarrow as pa

        self.path, self.schema, self._most, self._most_bytes = path, schema, rows_of_a_batch, most_bytes
        self._waiting: list[Any] = []
        self._num_waiting = self._bytes_waiting = self.num_rows = 0
        with says_what_to_do(path):
            self._file = pa.OSFile(str(path), "wb")
            self._writer = pa.ipc.new_file(self._file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows with the columns of the schema."""
        self.num_rows += batch.num_rows
        if not self.schema.names:
            return
        while batch.num_rows:
            taken = batch.slice(0, self._most - self._num_waiting)
            self._waiting.append(taken)
            self._num_waiting += taken.num_rows
            self._bytes_waiting += taken.nbytes
            batch = batch.slice(taken.num_rows)
            if self._num_waiting == self._most or (self._most_bytes and self._bytes_waiting >= self._most_bytes):
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            with says_what_to_do(self.path):
                # A slice of other arrays would be written with other lengths of buffers. An empty batch more makes new arrays of the rows.
                self._writer.write_batch(joined([self._waiting[0].slice(0, 0), *self._waiting], self.schema))
        self._waiting, self._num_waiting, self._bytes_waiting = [], 0, 0

    def finish(self) -> RowFile:
        """Writes the remaining rows and returns the file. It may not be on the disk yet."""
        self._flush()
        with says_what_to_do(self.path):
            self._writer.close()
            self._file.close()
        return RowFile(self.path, self.num_rows)


# --- batches in memory ------------------------------------------------------------------------------------


def joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Returns the rows of all batches as one batch."""
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    columns = [
        pa.concat_arrays([batch.column(number) for batch in batches]) if batches else pa.array([], type=field.type)
        for number, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def portions(batches: Iterable[pa.RecordBatch], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cuts batches into ones of about ``most_bytes`` bytes at most, and of at least one row. Empty batches are left out."""
    for batch in batches:
        if batch.nbytes <= most_bytes:
            if batch.num_rows:
                yield batch
            continue
        rows = max(1, batch.num_rows * most_bytes // batch.nbytes)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


def gathered(batches: Iterable[pa.RecordBatch], schema: pa.Schema, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Joins consecutive batches into ones of about ``most_bytes`` bytes; the last may be smaller."""
    waiting: list[pa.RecordBatch] = []
    num_bytes = 0
    for batch in portions(batches, most_bytes):
        if waiting and num_bytes + batch.nbytes > most_bytes:
            together = joined(waiting, schema)
            waiting, num_bytes = [], 0  # first, so that the caller's memory holds the rows once
            yield together
            del together
        waiting.append(batch)
        num_bytes += batch.nbytes
    if waiting:
        yield joined(waiting, schema)


def rows_to_read(table: _Readable, names: Sequence[str], working: int) -> int:
    """Returns how many rows of a table to read at a time, so that they take a small part of ``working`` bytes. The first rows say how long values are."""
    width = sum(_width(table.schema.field(name).type) for name in names)
    most_rows = _rows_of(width, working)
    first = next(iter(table.batches(names, min(_ROWS_TO_LOOK_AT, most_rows))), None)
    if first is not None:
        found = sum(plain_column(column).nbytes for column in first.batch.columns) // max(1, first.batch.num_rows)
        most_rows = min(most_rows, _rows_of(found, working))
    return most_rows


def _rows_of(width: int, working: int) -> int:
    return int(np.clip(working // (64 * max(1, width)), 64, 2**17))


def _width(type_: Any) -> int:
    """Returns the bytes of a value, or a guess if values differ in length."""
    if hasattr(type_, "list_size") and type_.list_size > 0:
        return type_.list_size * _width(type_.value_type)
    try:
        return -(-type_.bit_width // 8)
    except ValueError:
        return 64


def plain_column(column: pa.Array) -> pa.Array:
    """Returns a column without dictionaries, run lengths, views and extensions, and with offsets of 64 bits, so that columns of any size can be joined."""
    column = decoded(column)
    type_ = plain_type(column.type)
    return column if column.type == type_ else column.cast(type_)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Returns the type of :func:`plain_column`'s result for a column of type ``type_``."""
    import pyarrow as pa
    from pyarrow import types

    type_ = decoded_type(type_)
    if types.is_string(type_) or type_ == getattr(pa, "string_view", pa.null)():
        return pa.large_string()
    if types.is_binary(type_) or type_ == getattr(pa, "binary_view", pa.null)():
        return pa.large_binary()
    if types.is_list(type_) or types.is_large_list(type_):
        return pa.large_list(plain_type(type_.value_type))
    return type_


def first_unfit(column: pa.Array, cast: Callable[[Any], object]) -> int:
    """Returns the first row whose value lets ``cast`` raise ValueError. The column has such a row."""
    import pyarrow as pa

    def fails(length: int) -> bool:
        try:
            # A copy, because pyarrow casts all numbers of a slice of lists.
            cast(pa.concat_arrays([column.slice(0, length), column.slice(0, 0)]))
        except ValueError:
            return True
        return False

    return bisect.bisect_left(range(1, len(column)), True, key=fails)


def kept_column(column: pa.Array) -> pa.Array:
    """Returns a column in the form in which files of rows keep it: plain, and with one NaN."""
    return _without_odd_nan(plain_column(column))


def _without_odd_nan(column: pa.Array) -> pa.Array:
    """Returns a column of floats in which every NaN has the same bits, so that it is one value. Returns other columns unchanged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_floating(column.type) or pa.types.is_float16(column.type):
        return column
    is_nan = pc.is_nan(column)
    return pc.if_else(is_nan, pa.scalar(float("nan"), column.type), column) if pc.any(is_nan).as_py() else column


def return_memory() -> None:
    """Returns freed memory to the system, which pyarrow keeps for later arrays of its own. Arrays of numpy may then take it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


#: Allocators of pyarrow that the contexts of :func:`plain_memory` found, in all threads. The first one comes back with the last context.
_found = list[Any]()
_changing = threading.Lock()


@contextlib.contextmanager
def plain_memory() -> Iterator[None]:
    """Context in which Arrow's arrays come from the C library's allocator. That of pyarrow keeps more freed memory, and not the same amount in each run.

    The whole process has one such allocator, so contexts of several threads share the change.
    """
    import pyarrow as pa

    with _changing:
        _found.append(pa.default_memory_pool())
        pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        with _changing:
            if len(_found) == 1:
                pa.set_memory_pool(_found[0])
            _found.pop()


@contextlib.contextmanager
def scratch_folder(work: Path) -> Iterator[Path]:
    """Makes an empty folder in ``work`` for a ``with`` block, and removes it with its files at the end. A folder that a killed run left is emptied.

    At the end, pyarrow also returns the memory that it keeps for later arrays.
    """
    folder = work / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        return_memory()
