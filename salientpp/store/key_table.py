"""Keys of vertices in a file: the columns by which the user's tables name the rows of a vertex type, in the order of the vertices' numbers.

The file has the Arrow IPC format. It is memory-mapped, so that looking up some keys reads only these.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from salientpp.files import first_line, what_to_do
from salientpp.ids import as_tensor, first_outside
from salientpp.processes import lazy
from salientpp.store.keys import canonical_keys

if TYPE_CHECKING:
    import pyarrow as pa

#: Number of rows of a batch in a file that :func:`write_key_file` writes.
KEYS_PER_BATCH = 2**16

#: Number of keys that are read at a time where all are read.
_ROWS_AT_ONCE = 2**20


def arrow() -> Any:
    """Returns the module ``pyarrow``. Raises ImportError, which says how to install it."""
    try:
        import pyarrow
        import pyarrow.compute  # an attribute of the module once it is imported
    except ImportError as error:
        raise ImportError(
            'keys of tables are read and written with the "pyarrow" package, which is not installed: pip install salientpp[tables]'
        ) from error
    return pyarrow


class KeyTable:
    """Keys of one vertex type: row i has the key of vertex i.

    The file is opened at the first use. A copy in another process opens its own.

    Attributes:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # the file is opened later

    @lazy
    def map(self) -> mmap.mmap | None:
        """Memory map of the file. None: the file is empty, and so not valid."""
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return None
        except OSError as error:
            raise OSError(
                error.errno,
                f"the keys {self.path} cannot be read ({error.strerror or error}); {what_to_do(error, 'copy the file again')}",
            ) from None

    @lazy
    def _batches(self) -> list[pa.RecordBatch]:
        """All batches of the file. Their columns are views of the memory map."""
        pyarrow, mapped = arrow(), self.map or b""
        try:
            reader = pyarrow.ipc.open_file(pyarrow.py_buffer(mapped))
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            self.__dict__["schema"] = reader.schema
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            raise ValueError(
                f"{self.path} is damaged, or not a file of keys ({first_line(error)}); copy it again"
            ) from None
        return batches

    @lazy
    def schema(self) -> pa.Schema:
        """Names and Arrow types of the key columns."""
        _ = self._batches  # sets this attribute
        return self.__dict__["schema"]

    @lazy
    def _starts(self) -> np.ndarray:
        """First row of each batch, then the number of all rows: int64."""
        return np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def names(self) -> list[str]:
        """Names of the key columns."""
        return list(self.schema.names)

    def described(self) -> list[dict[str, str]]:
        """Returns name and Arrow type of each key column, as JSON."""
        return [{"name": field.name, "type": str(field.type)} for field in self.schema]

    def rows(self, ids: Tensor | np.ndarray | Sequence[int]) -> pa.Table:
        """Reads the keys of some vertices: a table with one row for each id, in the order of the ids.

        Args:
            ids: vertex ids, integers [n]. The id -1 of padding gives a row of nulls.

        Raises:
            ValueError: another id is not in ``[0, num_rows)``, or the file is damaged.
            ImportError: pyarrow is not installed.
        """
        pyarrow = arrow()
        at = flat_ids(ids, self.num_rows, f"ids of {self.path.name}")

        def rows_of(number: int, inside: np.ndarray) -> pa.Table:
            return pyarrow.Table.from_batches([self._batches[number].take(pyarrow.array(inside))])

        return gathered(at, self._starts, rows_of, self.schema)

    def batches(self, most_rows: int = _ROWS_AT_ONCE) -> Iterator[pa.RecordBatch]:
        """Yields all keys in the order of the vertices, at most ``most_rows`` at a time."""
        for batch in self._batches:
            for first in range(0, batch.num_rows, most_rows):
                yield batch.slice(first, most_rows)

    def release(self) -> None:
        """Lets the system drop the pages that were read. Later calls read them again."""
        if self.map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyTable) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyTable, (self.path,)

    def __repr__(self) -> str:
        try:
            what = f", {', '.join(self.names)}, num_rows={self.num_rows}"
        except (OSError, ValueError, ImportError):
            what = ""
        return f"KeyTable({str(self.path)!r}{what})"


def flat_ids(ids: Any, size: int, name: str) -> np.ndarray:
    """Returns ids as int64 [n]. Raises ValueError unless all are integers in ``[0, size)``, or -1 for padding."""
    given = as_tensor(ids, f"{name} must be integers").detach().cpu()
    if given.numel() and (given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex):
        raise ValueError(f"{name} must be integers, got {given.dtype}")
    flat = given.to(torch.int64).flatten()
    at = first_outside(flat, size, begin=-1)
    if at is not None:
        raise ValueError(f"{name} must be in [0, {size}), or -1 for padding, got {int(flat[at])} at position {at}")
    return flat.numpy()


def gathered(
    ids: np.ndarray, starts: np.ndarray, rows_of: Callable[[int, np.ndarray], pa.Table], schema: pa.Schema
) -> pa.Table:
    """Takes rows out of consecutive pieces of a table. Each piece that has some of the rows is read once.

    Args:
        ids: numbers of the rows in the whole table, int64 [n]; -1 gives a row of nulls.
        starts: number of the first row of each piece, then the number of all rows: int64.
        rows_of: takes the number of a piece, and ascending numbers of rows in it. Returns these rows.
        schema: the schema of the rows.
    """
    pyarrow = arrow()
    order = np.argsort(ids, kind="stable")
    ascending = ids[order]
    ends = np.searchsorted(ascending, starts)
    pieces = [
        rows_of(number, ascending[first:last] - starts[number])
        for number, (first, last) in enumerate(pairwise(ends.tolist()))
        if last > first
    ]
    # The ids of padding come first in ascending order, and no piece has them.
    place = np.empty(ids.size, dtype=np.int64)
    place[order] = np.arange(ids.size, dtype=np.int64) - ends[0]
    found = pyarrow.concat_tables([schema.empty_table(), *pieces]).combine_chunks()
    return found.take(pyarrow.array(place, mask=ids < 0))


def write_key_file(file: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Writes keys to an open binary file. Returns the number of rows.

    The file depends on the rows only, not on how ``batches`` divides them: its own batches have :data:`KEYS_PER_BATCH` rows.
    """
    pyarrow, num_rows = arrow(), 0
    schema = pyarrow.schema([pyarrow.field(field.name, field.type) for field in schema])  # without metadata
    with pyarrow.ipc.new_file(file, schema) as writer:
        for batch in _of_equal_size(batches, schema):
            writer.write_batch(batch)
            num_rows += batch.num_rows
    return num_rows


def check_key_types(schema: pa.Schema, what: str) -> None:
    """Raises ValueError, which begins with ``what``, unless names are distinct, and the types of the columns are those in which keys are stored."""
    pyarrow = arrow()
    if len(set(schema.names)) < len(schema.names):
        raise ValueError(f"{what}: key columns must have distinct names, got {', '.join(schema.names)}; rename one")
    stored = [column.type for column in canonical_keys([pyarrow.array([], field.type) for field in schema], what)]
    if not stored or stored != schema.types:
        expected, got = (", ".join(map(str, types)) or "none" for types in (stored, schema.types))
        raise ValueError(
            f"{what}: key columns must have the types in which keys are stored ({expected}), got {got}; convert the tables again"
        )


def _of_equal_size(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        first = 0
        while first < batch.num_rows:
            piece = batch.slice(first, KEYS_PER_BATCH - rows)
            held.append(piece)
            first, rows = first + piece.num_rows, rows + piece.num_rows
            if rows == KEYS_PER_BATCH:
                yield _joined(held, schema)
                held, rows = [], 0
    if held:
        yield _joined(held, schema)


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Returns some batches as one, whose buffers have exactly its rows and no bitmap of nulls."""
    pyarrow = arrow()
    columns = [
        pyarrow.concat_arrays([pyarrow.array([], field.type), *(batch.column(number) for batch in batches)])
        for number, field in enumerate(schema)
    ]
    for field, column in zip(schema, columns):
        if column.null_count:
            raise ValueError(f"the key column {field.name!r} must have no nulls, got {column.null_count}")
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)
