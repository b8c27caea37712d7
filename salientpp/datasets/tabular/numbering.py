"""Numbers the vertices of a type by the keys in its table.

Vertices are in ascending order of the hash of their key, then of the key. So the numbers depend on the set of keys only, and vertices whose hashes lie in a
range have consecutive numbers. Tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salientpp.datasets.converted.files import ArrayWriter, written
from salientpp.datasets.tabular.keyed import (
    KeyedTable,
    KeyExamples,
    NullKeys,
    Policy,
    has_null,
    key_text,
    key_types,
    keys_of,
    places_of,
    rows_that_have,
)
from salientpp.datasets.tabular.rows import (
    Dropped,
    RowFile,
    RowWriter,
    kept_column,
    plain_type,
    rows_to_read,
    scratch_folder,
)
from salientpp.datasets.tabular.sorting import Sorting
from salientpp.store.keys import adapt_keys, key_hash

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of each batch of a file of keys, except the last one. So the place of a vertex in the file follows from its number.
KEY_ROWS = 2**14


@dataclass(frozen=True)
class NumberedVertices:
    """The vertices of a type, in the order of their numbers.

    Attributes:
        keys: key columns of canonical types, in batches of :data:`KEY_ROWS` rows.
        hashes: .npy file with the hash of each key, uint64 [N], ascending.
        columns: the other columns of the table.
        duplicates: rows that have the key of another row.
        null_keys: rows without a key.
        num_added: vertices that the table lacks.
    """

    num_vertices: int
    keys: RowFile
    hashes: Path
    columns: RowFile
    duplicates: Dropped
    null_keys: Dropped
    num_added: int


def number_vertices(
    table: KeyedTable,
    key: Sequence[str],
    columns: Sequence[str],
    work: Path,
    working: int,
    *,
    what: str,
    duplicates: Policy = "error",
    null_keys: Policy = "error",
    added: Sequence[RowFile] = (),
) -> NumberedVertices:
    """Numbers the rows of a table by key, and writes keys and columns in the order of the numbers.

    Args:
        key: names of the columns that together identify a row.
        columns: names of the columns to write.
        work: existing folder for the results and, meanwhile, for other files. It serves this table only.
        working: bytes of memory for arrays.
        what: begins the texts of errors, such as ``nodes.customer``.
        duplicates: ``drop`` keeps the smallest row of each key. Rows are compared by their columns, one after the other.
        null_keys: what to do with rows without a key.
        added: keys that become vertices too, if the table lacks them. Their columns are null. Keys may come several times.

    Raises:
        ValueError: a column cannot be a key, or rows lack a key or share one and the policy is ``error``.
    """
    numbering = _Numbering(table, tuple(key), tuple(columns), working, what, tuple(added))
    nulls = NullKeys(key)
    repeated = KeyExamples.of(key)
    with scratch_folder(work) as scratch:
        sorting = Sorting(numbering.schema, ["hash"], numbering.rest, scratch, working)
        batches = sorting.sort(numbering.batches(nulls))
        keys_file, columns_file, num_added = numbering.write(batches, work, repeated)
    null_rows = nulls.settled(null_keys, what)
    dropped = repeated.dropped()
    if dropped.count and duplicates == "error":
        most_rows = rows_to_read(table, key, working)
        places = places_of(table, key, numbering.types, repeated, most_rows, what, most_places=2)
        raise ValueError(
            f"{what}: {rows_that_have(dropped.count)} the key of another row, for example {places}; name further columns in key, remove the rows, or set "
            'duplicates = "drop"'
        )
    return NumberedVertices(
        keys_file.num_rows, keys_file, work / "hashes.npy", columns_file, dropped, null_rows, num_added
    )


class _Numbering:
    """Names of the columns while rows are sorted: ``hash``, ``key 0`` ..., ``added`` (1 for rows that the table lacks) and ``column 0`` ..."""

    def __init__(
        self,
        table: KeyedTable,
        key: tuple[str, ...],
        columns: tuple[str, ...],
        working: int,
        what: str,
        added: tuple[RowFile, ...],
    ) -> None:
        import pyarrow as pa

        self._table, self._key_names, self._columns = table, key, columns
        self._working, self._what, self._added = working, what, added
        self.types = key_types(table, key, what)
        for file in added:  # an empty table may have no types
            self.types = [of if pa.types.is_null(type_) else type_ for type_, of in zip(self.types, file.schema.types)]
        self._key_fields = [pa.field(f"key {number}", type_) for number, type_ in enumerate(self.types)]
        plain = [plain_type(table.schema.field(name).type) for name in columns]
        self._column_fields = [pa.field(f"column {number}", type_) for number, type_ in enumerate(plain)]
        added_field = pa.field("added", pa.uint8())
        self.schema = pa.schema([pa.field("hash", pa.uint64()), *self._key_fields, added_field, *self._column_fields])
        self.rest = self.schema.names[1:]

    def batches(self, nulls: NullKeys) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the table that have a key, then the added keys."""
        import pyarrow as pa

        names = tuple(dict.fromkeys((*self._key_names, *self._columns)))
        most_rows = rows_to_read(self._table, names, self._working)
        for piece in self._table.batches(names, most_rows):
            keys, _ = adapt_keys(keys_of(piece, self._key_names, self._what), self.types, self._what)
            columns = [kept_column(piece.batch.column(name)) for name in self._columns]
            is_null = has_null(keys, piece.batch.num_rows)
            nulls.add(is_null, piece.where)
            yield self._batch(keys, columns, is_null, 0)
        for file in self._added:
            for batch in file.batches(most_rows=most_rows):
                keys, unlike = adapt_keys(batch.columns, self.types, self._what)
                if unlike is not None:
                    at = int(unlike.argmax())
                    raise ValueError(
                        f"{self._what}: edges name a key that the type of other keys, {', '.join(map(str, self.types))}, cannot hold, for example "
                        f"{key_text(self._key_names, batch.columns, at)}; cast the keys in the tables of all edges to one type"
                    )
                nothing = [pa.nulls(batch.num_rows, field.type) for field in self._column_fields]
                yield self._batch(keys, nothing, has_null(keys, batch.num_rows), 1)

    def _batch(self, keys: list[Any], columns: list[Any], is_null: np.ndarray, added: int) -> Any:
        import pyarrow as pa

        marks = np.full(len(is_null), added, dtype=np.uint8)
        arrays = [pa.array(key_hash(keys)), *keys, pa.array(marks), *columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return batch.filter(pa.array(~is_null)) if is_null.any() else batch

    def write(
        self, batches: Iterator[pa.RecordBatch], work: Path, repeated: KeyExamples
    ) -> tuple[RowFile, RowFile, int]:
        """Writes the first row of each key. Returns the files of keys and columns, and the number of vertices that the table lacks.

        ``batches`` have the rows in order. ``repeated`` takes the other rows, except those of added keys.
        """
        import pyarrow as pa

        named = zip(self._key_names, self._key_fields)
        keys = RowWriter(work / "keys.arrow", pa.schema([field.with_name(name) for name, field in named]), KEY_ROWS)
        named = zip(self._columns, self._column_fields)
        schema = pa.schema([field.with_name(name) for name, field in named])
        columns = RowWriter(work / "columns.arrow", schema, most_bytes=self._working // 16)
        num_added = 0
        before = None
        with written(work / "hashes.npy", to_disk=False) as file:
            hashes = ArrayWriter(file, torch.uint64, ())
            for batch in batches:
                is_first = self._is_first(batch, before)
                before = batch.slice(batch.num_rows - 1)
                if not is_first.all():
                    again = pa.array(~is_first & (batch.column("added").to_numpy() == 0))
                    repeated.add(self._keys(batch.filter(again)))
                    batch = batch.filter(pa.array(is_first))
                num_added += int(np.count_nonzero(batch.column("added").to_numpy()))
                hashes.write(batch.column("hash").to_numpy())
                keys.write(pa.RecordBatch.from_arrays(self._keys(batch), names=list(self._key_names)))
                rows = [batch.column(field.name) for field in self._column_fields]
                columns.write(pa.RecordBatch.from_arrays(rows, names=list(self._columns)))
            hashes.finish()
        return keys.finish(), columns.finish(), num_added

    def _keys(self, batch: Any) -> list[Any]:
        return [batch.column(field.name) for field in self._key_fields]

    def _is_first(self, batch: Any, before: Any | None) -> np.ndarray:
        """Returns True, bool [n], for rows whose key is not that of the row before. ``before`` is the last row of the batch before."""
        import pyarrow as pa
        import pyarrow.compute as pc

        hashes = batch.column("hash").to_numpy()
        same = hashes[1:] == hashes[:-1]
        is_first = np.ones(len(hashes), dtype=bool)
        is_first[1:] = ~same
        at = np.flatnonzero(same)
        if at.size:
            for column in self._keys(batch):
                differs = pc.not_equal(column.take(pa.array(at)), column.take(pa.array(at + 1)))
                is_first[at + 1] |= differs.to_numpy(zero_copy_only=False)
        if before is not None:
            names = ("hash", *(field.name for field in self._key_fields))
            is_first[0] = not all(before.column(name).equals(batch.column(name).slice(0, 1)) for name in names)
        return is_first
