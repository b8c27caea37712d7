"""Tables with keys in memory, for tests of numbering and joining."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from salientpp.datasets.tabular import joining, keyed, numbering
from salientpp.datasets.tabular.numbering import NumberedVertices, number_vertices
from salientpp.datasets.tabular.rows import RowFile
from salientpp.store.keys import key_hash


@dataclass(frozen=True)
class Piece:
    batch: pa.RecordBatch
    where: Callable[[int], str]


class MemoryTable:
    """A table that gives batches of at most ``at_once`` rows. ``where`` names rows by their number."""

    def __init__(self, table: pa.Table, at_once: int = 2**20) -> None:
        self.table, self.schema, self._at_once = table, table.schema, at_once

    def batches(self, columns: Sequence[str], most_rows: int) -> Iterator[Piece]:
        first = 0
        for batch in self.table.select(list(columns)).to_batches(min(most_rows, self._at_once)):
            yield Piece(batch, lambda row, first=first: f"row {first + row}")
            first += batch.num_rows


def rows_of(file: RowFile) -> list[tuple]:
    return [tuple(row.values()) for batch in file.batches() for row in batch.to_pylist()]


@contextmanager
def weak_hashes(bits: int) -> Iterator[None]:
    """Makes hashes of ``bits`` bits, so that different keys have equal hashes."""
    weak = lambda columns: key_hash(columns) & np.uint64((1 << bits) - 1)  # noqa: E731
    modules = (keyed, numbering, joining)
    for module in modules:
        module.key_hash = weak
    try:
        yield
    finally:
        for module in modules:
            module.key_hash = key_hash


# --- kinds of keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Values of a key column, few enough to repeat, and Arrow types that hold all of them."""

    values: Sequence[Any]
    types: Sequence[pa.DataType]


_DAYS = [datetime.date(2020, 1, 1) + datetime.timedelta(days=number) for number in range(-3, 9)]
_TIMES = [datetime.datetime(1969, 12, 31, 23, 59) + datetime.timedelta(seconds=7 * number) for number in range(12)]
_TEXTS = ["", "a", "a\0", "b", "é", "12345678", "123456789", "0123456789abcdef", "0123456789abcdeg", "x" * 40, "x" * 41]

KINDS = {
    "int": Kind(range(-5, 7), [pa.int8(), pa.int32(), pa.int64(), pa.decimal128(10, 2)]),
    "unsigned": Kind([0, 1, 2, 2**63 - 1], [pa.uint64(), pa.int64()]),
    "text": Kind(_TEXTS, [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]),
    "bytes": Kind([text.encode() for text in _TEXTS], [pa.binary(), pa.large_binary()]),
    "uuid": Kind([uuid.UUID(int=number**20).bytes for number in range(9)], [pa.binary(16)]),
    "nothing": Kind([b""], [pa.binary(0)]),
    "decimal": Kind(
        [decimal.Decimal(number) / 4 for number in range(-4, 6)], [pa.decimal128(9, 2), pa.decimal128(30, 7)]
    ),
    "date": Kind(_DAYS, [pa.date32(), pa.date64()]),
    "time": Kind(_TIMES, [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns")]),
}


@st.composite
def key_columns(draw: st.DrawFn, most_columns: int = 2) -> list[Kind]:
    return [KINDS[name] for name in draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=most_columns))]


def drawn_keys(draw: st.DrawFn, kinds: Sequence[Kind], most_rows: int, nulls: bool = False) -> list[tuple]:
    """Draws keys, as tuples of Python values."""
    entries = [st.sampled_from([*kind.values, *([None] if nulls else [])]) for kind in kinds]
    return draw(st.lists(st.tuples(*entries), max_size=most_rows))


def key_table(
    draw: st.DrawFn, kinds: Sequence[Kind], names: Sequence[str], keys: Sequence[tuple]
) -> dict[str, pa.Array]:
    """Returns keys as columns of drawn types."""
    columns = zip(*keys) if keys else ((),) * len(kinds)
    return {
        name: pa.array(list(column), draw(st.sampled_from(kind.types)))
        for name, kind, column in zip(names, kinds, columns)
    }


#: Further columns: their types and values.
COLUMNS = {
    "number": (pa.int16(), st.integers(-2, 2)),
    "real": (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, -2.0, math.inf, math.nan])),
    "text": (pa.string(), st.sampled_from(["", "a", "a\0", "long text " * 3])),
    "flag": (pa.bool_(), st.booleans()),
    "pair": (pa.list_(pa.int8(), 2), st.sampled_from([[1, 2], [1, None], [0, 3]])),
    "list": (pa.list_(pa.int32()), st.sampled_from([[], [1], [1, 2]])),
    "class": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y"])),
}

#: Bytes of memory that need many buckets, some, and none.
BUDGETS = (4_000, 20_000, 2**30)


# --- vertices and edges -----------------------------------------------------------------------------------


def numbered(table: pa.Table, key: list[str], folder: Path, working: int = 2**30, **options) -> NumberedVertices:
    work = folder / f"{len(list(folder.iterdir()))}"
    work.mkdir()
    columns = options.pop("columns", [name for name in table.column_names if name not in key])
    done = number_vertices(MemoryTable(table, 7), key, columns, work, working, what="nodes.n", **options)
    assert {path.name for path in work.iterdir()} == {"keys.arrow", "hashes.npy", "columns.arrow"}
    return done


def order_of(value, name):
    """Sorts the values of COLUMNS as the package does."""
    if value is None:
        return (1,)
    if name == "real":
        return (0, (1, 0, 0) if math.isnan(value) else (0, value, math.copysign(1, value)))
    if name in ("pair", "list"):
        return (0, [(entry is None, entry or 0) for entry in value])
    return (0, value.encode() if isinstance(value, str) else value)


def plain_keys(keys) -> list[tuple]:
    """Keys as tuples that are equal for equal keys of any type."""
    return [
        tuple(
            float(value) if type(value).__name__ in ("int", "Decimal") and abs(value) < 2**50 else value
            for value in key
        )
        for key in keys
    ]
