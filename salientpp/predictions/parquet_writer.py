"""One Parquet file of predictions, written in row groups of bounded size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from salientpp.predictions.destination import Folder
from salientpp.predictions.outputs import column
from salientpp.predictions.table_keys import VertexKeys

if TYPE_CHECKING:
    import pyarrow as pa

#: Most bytes of outputs in a row group, and most rows.
GROUP_BYTES = 2**25
GROUP_ROWS = 2**17


def rows_of_group(outputs: Mapping[str, Tensor]) -> int:
    """Returns the number of rows of a row group with these outputs."""
    row_bytes = sum(rows[:1].nbytes for rows in outputs.values())
    return max(1, min(GROUP_ROWS, GROUP_BYTES // max(1, row_bytes)))


def table_of(keys: VertexKeys, n_id: Tensor, outputs: Mapping[str, Tensor]) -> pa.Table:
    """Returns the keys of vertices and their outputs as one table. ``n_id`` [n] int64; outputs [n, ...] on the CPU."""
    table = keys.read(n_id).replace_schema_metadata(None)
    for name, rows in outputs.items():
        table = table.append_column(name, column(rows))
    return table


@contextlib.contextmanager
def new_parquet(folder: Folder, name: str) -> Iterator[ParquetOutput]:
    """Yields a new Parquet file, which appears at the end of the ``with`` block. If the block raises, nothing changes."""
    with folder.new_file(name) as file:
        yield ParquetOutput(folder, name, file)


class ParquetOutput:
    """Parquet file that tables are appended to. :meth:`finish` completes it."""

    def __init__(self, folder: Folder, name: str, file: Any) -> None:
        self._folder, self._name, self._file = folder, name, file
        self._writer: Any = None

    @property
    def schema(self) -> pa.Schema | None:
        """Columns of the tables; None before the first."""
        return None if self._writer is None else self._writer.schema

    def append(self, table: pa.Table) -> None:
        """Appends a table as one row group. All tables of a file have the same columns. OSError if the file cannot be written."""
        from pyarrow import parquet

        with self._folder.naming(self._name):
            if self._writer is None:
                self._writer = parquet.ParquetWriter(self._file, table.schema)
            if table.num_rows:
                self._writer.write_table(table, row_group_size=table.num_rows)

    def finish(self, schema: pa.Schema) -> None:
        """Writes the footer and closes the file. A file without tables gets the columns of ``schema``.

        An object store, or a disk that is full, may refuse the bytes only when the file is closed. The other ranks must hear of it before any file appears.
        """
        if self._writer is None:
            self.append(schema.empty_table())
        with self._folder.naming(self._name):
            self._writer.close()
            self._file.close()
