"""Reads edges and rows from Parquet files in batches.

Only the schema and the totals of each row group are read from a file's footer. If the footer is damaged, pyarrow would abort the process when it is asked
for the metadata of a column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.datasets.arrays import check_file, unreadable
from salientpp.datasets.converted.column_names import UNKNOWN, Ends, ends_of, is_id
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, RowPiece, Rows, counted
from salientpp.files import first_line

#: Bytes of the read buffer. Without it, pyarrow reads a whole column of a row group at once.
_BUFFER = 2**18

#: Writers end a page, and a dictionary, at about this many bytes. A reader holds one of each for every column.
_PAGE = 2**20

#: Number of first rows in which :class:`_Key` looks for a key.
_FEW = 1024

#: Name of a column in which pandas stores an index that has no name.
_INDEX = re.compile(r"__index_level_\d+__")


class ParquetFiles:
    """Reader of several Parquet files as one table. All have the same columns, possibly in another order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ImportError(
                f'{paths[0]} is read with the "pyarrow" package, which is not installed: pip install salientpp[parquet]'
            ) from error
        self.paths, self._parquet = paths, parquet
        self._release = pyarrow.default_memory_pool().release_unused  # pyarrow keeps freed memory otherwise
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.row_bytes = 1
        self._groups: list[tuple[int, int]] = []  # bytes and columns of each row group
        for path in paths:
            check_file(path)
            try:
                names, about = parquet.read_schema(path).names, parquet.read_metadata(path)
            except Exception as error:  # pyarrow has many types of errors
                raise ValueError(f"{path}: damaged, or not a Parquet file ({first_line(error)})") from error
            twice = [name for name, times in Counter(names).items() if times > 1]
            if twice:
                raise ValueError(f"{path} has several columns called {twice[0]!r}; rename them")
            if self.names and sorted(names) != sorted(self.names):
                raise ValueError(f"{path} must have the columns {', '.join(self.names)}, got {', '.join(names)}")
            self.names = self.names or names
            self.sizes.append(about.num_rows)
            for group in map(about.row_group, range(about.num_row_groups)):
                size = group.total_byte_size
                self._groups.append((size, group.num_columns))
                self.row_bytes = max(self.row_bytes, 2 * size // max(1, group.num_rows))

    def held_bytes(self, columns: int) -> int:
        """Returns the bytes of buffers that pyarrow holds while it reads ``columns`` columns, in addition to the batches."""
        widths = [(size, min(columns, of_group)) for size, of_group in self._groups]
        return max((min(_BUFFER * width, size) + 2 * min(_PAGE * width, size) for size, width in widths), default=0)

    def tables(
        self, columns: Sequence[str], most_bytes: int, row_bytes: int = 1
    ) -> Iterator[tuple[Path, int, int, Any]]:
        """Yields batches: (file, first row's number in the file, number of rows read so far in all files, batch).

        A batch has as many rows as ``most_bytes`` holds, at least one. A row counts as ``row_bytes``, or as 16 bytes for each number in its file's first
        row if that is more.
        """
        for path, before in zip(self.paths, accumulate(self.sizes, initial=0)):
            first = 0
            try:
                with self._parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
                    head = next(file.iter_batches(1, columns=list(columns), use_threads=False), None)
                    numbers = sum(len(_numbers(column)) for column in head.columns) if head else 1
                    most = max(1, most_bytes // max(row_bytes, 16 * numbers))
                    for batch in file.iter_batches(most, columns=list(columns), use_threads=False):
                        yield path, first, before + first + batch.num_rows, batch
                        first += batch.num_rows
                self._release()
            except Exception as error:  # pyarrow has many types of errors
                if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                    raise unreadable(f"{path}, after row {first}:", error) from error
                raise ValueError(f"{path}: damaged after row {first} ({first_line(error)}); copy it again") from error


def parquet_edges(paths: Sequence[Path], ends: Ends = UNKNOWN) -> EdgeSource:
    """Returns edges from the columns of sources and targets, which :func:`ends_of` finds by name. Other columns are left out."""
    files = ParquetFiles(paths)
    columns = ends_of(files.names, str(paths[0]), ends)

    def pieces(most: int) -> Iterator[EdgePiece]:
        for path, first, done, batch in files.tables(columns, 16 * len(columns) * most):
            source, target = (_column(path, first, name, batch.column(name)) for name in columns)
            for name, ids in zip(columns, (source, target)):
                if ids.dtype.kind not in "iu" or ids.ndim > 1:
                    raise ValueError(
                        f"{path}: column {name!r} must hold integers, got {batch.column(name).type}; cast it to int64"
                    )
            yield EdgePiece(source, target, counted(f"{path}, row ", first), done)

    left_out = tuple(name for name in files.names if name not in columns)
    return EdgeSource(pieces, sum(files.sizes), sum(files.sizes), left_out=left_out)


def parquet_rows(paths: Sequence[Path], columns: Sequence[str] | None = None, ids: str | None = None) -> Rows:
    """Returns the rows of one attribute. Each row has the values of its columns in order, or the list in a single column; all lists have one length.

    ``columns`` names the columns to read; None reads all. ``ids`` names the column with the row numbers, see ``RowPiece.at``. If ``columns`` is None,
    :func:`id_column` finds that column.
    """
    files = ParquetFiles(paths)
    is_table = columns is not None
    if not is_table and len(files.names) > 1:
        ids = id_column(files.names, paths[0])
    names = [name for name in files.names if name != ids] if columns is None else columns
    wanted = [*names, *([ids] if ids else [])]

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        width = None
        keys = {name: _Key(sum(files.sizes)) for name in names} if ids is None and len(files.names) > 1 else {}
        for path, first, done, batch in files.tables(wanted, most_bytes, files.row_bytes):
            by_name = {name: _column(path, first, name, batch.column(name)) for name in names}
            for name, key in keys.items():
                key.add(by_name[name])
            values = _joined(path, first, by_name)
            if width not in (None, values.shape[1:]):
                raise ValueError(
                    f"{path}, row {first}: rows must have {list(width or ())} entries, got {list(values.shape[1:])}"
                )
            width = values.shape[1:]
            rows = torch.from_numpy(np.require(values, requirements=["C", "W"]))
            at = _column(path, first, ids, batch.column(ids)) if ids else None
            yield RowPiece(rows, counted(f"{path}, row ", first), done, at)
        if width is None:
            yield RowPiece(torch.empty(0, device="cpu"), counted(f"{paths[-1]}, row ", 0), 0)
        for name, key in keys.items():
            # As an attribute of its own, a key does no harm if it is in the order of the rows.
            if key.is_one and not (is_table and key.ascends):
                raise ValueError(
                    f"{paths[0]}: column {name!r} has a different integer in each row, like a key; name it id if it holds the vertices of the rows. If it does "
                    "not, add a column id, leave this one out, or cast it to floating point"
                )

    return Rows(pieces, sum(files.sizes), sum(files.sizes), held_bytes=files.held_bytes(len(wanted)))


class _Key:
    """Finds out, piece by piece, if a column may hold ids of its rows: its integers ascend, or are consecutive in any order.

    Attributes:
        ascends: True if each number is larger than the number before it.
        is_one: True if the numbers so far may be such ids. Their count, range, sum and sum of squares decide, so memory holds no ids.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self.is_one, self.ascends = num_rows, num_rows > 1, True
        self._number = self._sum = self._squares = 0
        self._least = self._largest = self._last = 0

    def add(self, values: np.ndarray) -> None:
        """Takes the values of further rows."""
        self.is_one &= values.dtype.kind in "iu" and values.ndim == 1
        for part in values[:_FEW], values[_FEW:]:  # a few rows tell it of most columns
            if self.is_one and len(part):
                self._add(part)

    def _add(self, values: np.ndarray) -> None:
        ascends = bool((values[1:] > values[:-1]).all())
        ends = (values[0], values[-1]) if ascends else (values.min(), values.max())
        least, largest = map(int, ends)
        if self._number:
            ascends &= int(values[0]) > self._last
            least, largest = min(least, self._least), max(largest, self._largest)
        self.ascends &= ascends
        self._number, self._last = self._number + len(values), int(values[-1])
        self._least, self._largest = least, largest
        # Values that do not ascend are no consecutive integers if some come twice, or if there are more integers between them than rows.
        may_be_consecutive = self._number <= largest - least + 1 <= self._num_rows
        self.is_one = self.ascends or may_be_consecutive
        if not may_be_consecutive:  # nor with further values, so the sums are of no use
            return
        modular = values.astype(np.uint64)  # sums are modulo 2^64
        self._sum, self._squares = self._sum + int(modular.sum()), self._squares + int((modular * modular).sum())
        if not self.ascends and self._number == self._num_rows:
            n, a = self._number, least
            total, squares = n * a + n * (n - 1) // 2, n * a * a + a * n * (n - 1) + (n - 1) * n * (2 * n - 1) // 6
            self.is_one = (self._sum - total) % 2**64 == (self._squares - squares) % 2**64 == 0


def id_column(names: Sequence[str], path: Path) -> str | None:
    """Returns the name of the column with the vertex ids, or None. Raises ValueError if several columns may be it, or if pandas stored an index."""
    found = [name for name in names if is_id(name)]
    if len(found) > 1:
        raise ValueError(f"{path}: the columns {' and '.join(found)} may both hold the vertex ids; keep or rename one")
    for name in names:
        if _INDEX.fullmatch(name):
            raise ValueError(
                f"{path}: pandas stored an index as column {name!r}; name it id if it holds vertex ids (index.name = 'id'), or write with index=False"
            )
    return found[0] if found else None


def _joined(path: Path, first: int, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the columns of one attribute as one array [n, columns]. Raises ValueError if their common dtype would round an integer."""
    arrays = list(columns.values())
    if len(arrays) == 1:
        return arrays[0]
    dtype = np.result_type(*arrays)
    for name, values in columns.items():
        if values.shape != arrays[0].shape:
            raise ValueError(
                f"{path}: columns {next(iter(columns))} and {name} must hold equally many numbers in each row; leave one out, or use lists alone"
            )
        if dtype.kind == "f" and values.dtype.kind in "iu":
            most = 2 ** (np.finfo(dtype).nmant + 1)
            large = (values > most) | (values < -most) if values.dtype.kind == "i" else values > most
            if large.any():
                row = int(large.reshape(len(large), -1).any(axis=1).argmax())
                raise ValueError(
                    f"{path}, row {first + row}: column {name!r} has integers that {dtype} would round, and other columns of the attribute hold {dtype}; "
                    "write the columns with one type, or as separate attributes"
                )
    return np.stack(arrays, axis=1)


def _column(path: Path, first: int, name: str, column: Any) -> np.ndarray:
    """Returns a column of numbers as [n], or a column of lists as [n, width]."""
    if hasattr(column, "dictionary_decode"):  # a column of categories
        column = column.dictionary_decode()
    if column.null_count:
        at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(f"{path}, row {first + at}: column {name!r} has no value; fill it")
    numbers = _numbers(column)
    if not _is_number(numbers.type):
        raise ValueError(
            f"{path}: column {name!r} must hold numbers, got {column.type}; cast it to numbers, or leave it out of the file"
        )
    lengths = None
    if hasattr(column, "value_lengths"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            at = int((lengths != lengths[0]).argmax())
            raise ValueError(
                f"{path}, row {first + at}: column {name!r} must hold {int(lengths[0])} numbers in each row, got {int(lengths[at])}"
            )
    if numbers.null_count:
        at = int(np.argmax(numbers.is_null().to_numpy(zero_copy_only=False)))
        row = at if lengths is None else at // int(lengths[0])
        raise ValueError(f"{path}, row {first + row}: column {name!r} has a list in which a value is missing; fill it")
    values = numbers.to_numpy(zero_copy_only=False)
    return values if lengths is None else values.reshape(len(lengths), int(lengths[0]) if len(lengths) else -1)


def _numbers(column: Any) -> Any:
    """Returns the values of an Arrow column. The lists of a column of lists are joined into one."""
    return column.flatten() if hasattr(column, "value_lengths") else column


def _is_number(type_: Any) -> bool:
    from pyarrow import types

    return types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_)
