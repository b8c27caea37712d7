"""Reads edges and rows from Parquet files in batches.

Of a file's footer, only the schema and the totals of each row group are read. Asked for the metadata of a column, pyarrow would abort the process if the
footer is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.datasets.arrays import check_file, first_line, unreadable
from salientpp.datasets.converted.pieces import EdgePiece, Edges, RowPiece, Rows, counted

#: Without a buffer pyarrow reads a whole column of a row group at once.
_BUFFER = 2**18

#: Writers end a page, and a dictionary, at about this many bytes. A reader holds one of each for every column.
_PAGE = 2**20

_ENDS = (("source", "target"), ("src", "dst"))


class ParquetFiles:
    """Parquet files with the same columns."""

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
            if self.names and names != self.names:
                raise ValueError(f"{path} must have the columns {', '.join(self.names)}, got {', '.join(names)}")
            self.names = names
            self.sizes.append(about.num_rows)
            for group in map(about.row_group, range(about.num_row_groups)):
                size = group.total_byte_size
                self._groups.append((size, group.num_columns))
                self.row_bytes = max(self.row_bytes, 2 * size // max(1, group.num_rows))

    def held_bytes(self, columns: int) -> int:
        """Returns the bytes of memory of a reader of ``columns`` columns, without its batches."""
        widths = [(size, min(columns, of_group)) for size, of_group in self._groups]
        return max((min(_BUFFER * width, size) + 2 * min(_PAGE * width, size) for size, width in widths), default=0)

    def tables(
        self, columns: Sequence[str], most_bytes: int, row_bytes: int = 1
    ) -> Iterator[tuple[Path, int, int, Any]]:
        """Yields batches as (file, number of the batch's first row in the file, rows of all files up to the batch's end, batch).

        A row is taken to need ``row_bytes`` of memory, or 16 bytes for each number in the first row of its file if that is more.
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


def parquet_edges(paths: Sequence[Path]) -> Edges:
    """Returns the edges of two columns: source and target, src and dst, or the only two columns."""
    files = ParquetFiles(paths)
    columns = next((ends for ends in _ENDS if set(ends) <= set(files.names)), tuple(files.names))
    if len(columns) != 2:
        raise ValueError(
            f"{paths[0]} must have columns source and target, columns src and dst, or exactly two columns, got {', '.join(files.names)}"
        )

    def pieces(most: int) -> Iterator[EdgePiece]:
        for path, first, done, batch in files.tables(columns, 16 * len(columns) * most):
            source, target = (_column(path, first, name, batch.column(name)) for name in columns)
            for name, ids in zip(columns, (source, target)):
                if ids.dtype.kind not in "iu":
                    raise ValueError(f"{path}: column {name!r} must hold integers, got {ids.dtype}")
            yield EdgePiece(source, target, counted(f"{path}, row ", first), done)

    return Edges(pieces, sum(files.sizes), sum(files.sizes))


def parquet_rows(paths: Sequence[Path], columns: Sequence[str] | None = None, ids: str | None = None) -> Rows:
    """Returns rows. The entries of a row are its columns in order, or the list in a single column. All lists must have the same length.

    ``columns`` names the columns to read; None reads all. ``ids`` names a column with the row numbers, see ``RowPiece.at``.
    """
    files = ParquetFiles(paths)
    names = files.names if columns is None else columns
    wanted = [*names, *([ids] if ids else [])]

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        width = None
        for path, first, done, batch in files.tables(wanted, most_bytes, files.row_bytes):
            arrays = [_column(path, first, name, batch.column(name)) for name in names]
            values = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
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

    return Rows(pieces, sum(files.sizes), sum(files.sizes), held_bytes=files.held_bytes(len(wanted)))


def _column(path: Path, first: int, name: str, column: Any) -> np.ndarray:
    """Returns a column of numbers as [n], or a column of lists as [n, width]."""
    if column.null_count:
        at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(f"{path}, row {first + at}: column {name!r} has no value; fill it")
    values = _numbers(column).to_numpy(zero_copy_only=False)
    if hasattr(column, "value_lengths"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            at = int((lengths != lengths[0]).argmax())
            raise ValueError(
                f"{path}, row {first + at}: column {name!r} must hold {int(lengths[0])} numbers in each row, got {int(lengths[at])}"
            )
        values = values.reshape(len(lengths), -1)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: column {name!r} must hold numbers, got {column.type}")
    return values


def _numbers(column: Any) -> Any:
    """Returns the entries of a column; for a column of lists, the entries of all lists together."""
    return column.flatten() if hasattr(column, "value_lengths") else column
