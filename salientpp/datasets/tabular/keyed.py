"""Reads the keys of a table's rows, and describes rows that a policy drops or refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from salientpp.datasets.tabular.rows import MOST_EXAMPLES, Dropped, first_unfit
from salientpp.store.keys import adapt_keys, canonical_keys, canonical_type, key_hash

if TYPE_CHECKING:
    import pyarrow as pa

#: What to do with rows that have no place in the graph.
Policy = Literal["error", "drop"]


#: Rows of a batch that are compared with a key whose hash they have.
_TRIED = 16


class KeyedBatch(Protocol):
    """Rows of a table in memory. ``where`` gives the file and the number of a row, for errors."""

    @property
    def batch(self) -> pa.RecordBatch: ...

    @property
    def where(self) -> Callable[[int], str]: ...


class KeyedTable(Protocol):
    """A table that can be read several times."""

    @property
    def schema(self) -> pa.Schema: ...

    def batches(self, columns: Sequence[str], most_rows: int) -> Iterator[KeyedBatch]:
        """Yields all rows of some columns, in batches of at most ``most_rows`` rows."""
        ...


def key_types(table: KeyedTable, key: Sequence[str], what: str) -> list[pa.DataType]:
    """Returns the canonical types of a key. Raises ValueError if a column cannot be a key."""
    if not key:
        raise ValueError(f"{what}: a key must have at least one column")
    return [canonical_type(table.schema.field(name).type, f"{what}, column {name!r}") for name in key]


def keys_of(piece: KeyedBatch, key: Sequence[str], what: str) -> list[pa.Array]:
    """Returns the canonical columns of a key in a batch. Raises ValueError, which names the file and the row, if a value cannot be stored."""
    columns = []
    for name in key:
        column, text = piece.batch.column(name), f"{what}, column {name!r}"
        try:
            columns += canonical_keys([column], text)
        except ValueError:
            row = first_unfit(column, lambda some: canonical_keys([some], what))
            canonical_keys([column.slice(row, 1)], f"{text}, {piece.where(row)}")
            raise
    return columns


def has_null(columns: Sequence[pa.Array], num_rows: int) -> np.ndarray:
    """Returns True, bool [n], for rows with a null in any of the columns."""
    nulls = np.zeros(num_rows, dtype=bool)
    for column in columns:
        if column.null_count:
            nulls |= column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def key_text(names: Sequence[str], columns: Sequence[pa.Array], row: int) -> str:
    """Returns the key of a row for errors and reports, such as ``customer_id='c17'``."""
    text = ", ".join(f"{name}={_shown(column[row])}" for name, column in zip(names, columns))
    return text if len(names) == 1 else f"({text})"


def _shown(scalar: Any) -> str:
    try:
        value = scalar.as_py()
    except OverflowError:  # Python has no such year
        value = scalar.cast("string")
    text = repr(value) if isinstance(value, (str, bytes, int)) or value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class NullKeys:
    """Counts rows whose key has a null, and keeps the places of the first ones."""

    def __init__(self, key: Sequence[str]) -> None:
        self._key_names, self._count, self._examples = tuple(key), 0, list[str]()

    def add(self, nulls: np.ndarray, where: Callable[[int], str]) -> None:
        """Takes a batch's rows. ``nulls`` bool [n] is True for those without a key."""
        rows = np.flatnonzero(nulls)
        self._count += len(rows)
        self._examples += [where(int(row)) for row in rows[: MOST_EXAMPLES - len(self._examples)]]

    def settled(self, policy: Policy, what: str) -> Dropped:
        """Returns what was dropped. Raises ValueError if the policy is ``error`` and a row has no key."""
        if self._count and policy == "error":
            raise ValueError(
                f"{what}: {rows_that_have(self._count)} no value in {' or '.join(map(repr, self._key_names))}, for example {'; '.join(self._examples)}; "
                'fill the column, or set null_keys = "drop"'
            )
        return Dropped(self._count, tuple(self._examples))


@dataclass(frozen=True)
class KeyExamples:
    """Counts rows by their keys, and keeps the keys with the smallest hashes. So the examples do not depend on the order of the rows.

    ``names`` are the names of the columns in the table that is read.
    """

    names: tuple[str, ...]
    texts: dict[str, int]  # text of a key -> its hash
    counts: list[int]

    @classmethod
    def of(cls, names: Sequence[str]) -> KeyExamples:
        """Returns a count of zero rows."""
        return cls(tuple(names), {}, [0])

    def add(self, columns: Sequence[pa.Array], hashes: np.ndarray | None = None) -> None:
        """Takes the keys of further rows, as canonical columns [n]."""
        num_rows = len(columns[0])
        if not num_rows:
            return
        self.counts[0] += num_rows
        hashes = key_hash(columns) if hashes is None else hashes
        _, rows = np.unique(hashes, return_index=True)
        for row in rows[:MOST_EXAMPLES].tolist():
            self.texts[key_text(self.names, columns, row)] = int(hashes[row])
        kept = sorted(self.texts, key=lambda text: (self.texts[text], text))
        for text in kept[MOST_EXAMPLES:]:
            del self.texts[text]

    def dropped(self) -> Dropped:
        """Returns the number of rows and the examples."""
        return Dropped(self.counts[0], tuple(sorted(self.texts, key=lambda text: (self.texts[text], text))))


def places_of(
    table: KeyedTable,
    key: Sequence[str],
    types: Sequence[pa.DataType],
    examples: KeyExamples,
    most_rows: int,
    what: str,
    most_places: int,
) -> str:
    """Reads a table again to find rows by their keys, for an error.

    Args:
        types: the types to which keys were adapted before ``examples`` took them.
        most_places: places that are wanted for each key.

    Returns:
        The texts of the keys, each with the places of rows that have this key.
    """
    places: dict[str, list[str]] = {text: [] for text in examples.texts}
    for piece in table.batches(tuple(dict.fromkeys(key)), most_rows):
        own = keys_of(piece, key, what)
        adapted, unlike = adapt_keys(own, types, what)
        is_valid = ~has_null(own, piece.batch.num_rows)
        for columns, is_one in ((adapted, ~unlike), (own, unlike)) if unlike is not None else ((adapted, True),):
            hashes = key_hash(columns)
            for text, of in places.items():
                if len(of) < most_places:
                    rows = np.flatnonzero(is_valid & is_one & (hashes == np.uint64(examples.texts[text])))
                    same = (row for row in rows[:_TRIED].tolist() if key_text(key, columns, row) == text)
                    of += [piece.where(row) for row in itertools.islice(same, most_places - len(of))]
        if all(len(of) == most_places for of in places.values()):
            break
    return "; ".join(f"{text} ({', '.join(of)})" if of else text for text, of in places.items())


def rows_that_have(count: int) -> str:
    """Returns the beginning of a sentence about a number of rows."""
    return f"{count:,} row has" if count == 1 else f"{count:,} rows have"
