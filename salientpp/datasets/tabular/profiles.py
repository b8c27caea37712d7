"""Looks at some rows of a table, to propose what its columns mean: nulls, different values, and the values of columns that may be keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.tabular.addresses import name_of
from salientpp.datasets.tabular.column_types import is_text
from salientpp.datasets.tabular.columns import CATEGORY, MOMENT, staged_type
from salientpp.datasets.tabular.doors import open_table
from salientpp.datasets.tabular.rows import plain_column, plain_type

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are read at once.
_BATCH = 2**14

#: Texts are taken for free text, and not for categories, from this share of different values on, if there are this many rows.
_FREE_TEXT_SHARE, _FREE_TEXT_ROWS = 0.5, 20

#: Last words of a column that refers to a row, and first ones.
_SUFFIX = r"(?:id|ids|key|pk|fk|sk|uuid|guid|code|ref|no|nr|num|number)"
_ENDS_AS_KEY = re.compile(rf"(?:^|.*_){_SUFFIX}|(?:id|fk)_.*")

#: Names of labels.
_LABELS = re.compile(r"y|label|target|class|outcome|(?:.*_)?(?:label|target)|is_fraud|churn(?:ed)?")


@dataclass(frozen=True)
class ColumnProfile:
    """Facts about a column, from some of its rows.

    Attributes:
        kind: the kind of attribute that it becomes (``salientpp.datasets.tabular.columns``). None: it cannot become one.
        nulls: number of nulls in the rows that were read.
        distinct: number of different values in them.
        values: these values, without null. None if the column cannot be a key.
    """

    name: str
    type: pa.DataType
    kind: str | None
    rows: int
    nulls: int
    distinct: int
    values: Any | None

    @property
    def is_unique(self) -> bool:
        """Whether each row that was read has a value of its own."""
        return self.values is not None and self.rows > 0 and self.nulls == 0 and self.distinct == self.rows

    @property
    def is_named_as_key(self) -> bool:
        """Whether the name ends as names of keys do."""
        return _ENDS_AS_KEY.fullmatch(plain_name(self.name)) is not None

    @property
    def is_free_text(self) -> bool:
        """Whether the column holds texts that hardly repeat."""
        differs = self.distinct > _FREE_TEXT_SHARE * (self.rows - self.nulls)
        return self.kind == CATEGORY and self.rows >= _FREE_TEXT_ROWS and differs

    @property
    def is_split(self) -> bool:
        """Whether the values are names of splits."""
        if self.values is None or not is_text(self.values.type):
            return False
        values = set(self.values.to_pylist())
        return "train" in values and values <= {*SPLITS, ""}

    @property
    def is_time(self) -> bool:
        """Whether the column holds dates or times."""
        return self.kind == MOMENT

    @property
    def is_named_as_label(self) -> bool:
        """Whether the name is one of a label."""
        return _LABELS.fullmatch(plain_name(self.name)) is not None

    @property
    def group(self) -> str:
        """Group of types whose values may be equal: ``integer``, ``text`` or ``other``."""
        from pyarrow import types

        type_ = self.type if self.values is None else self.values.type
        return "integer" if types.is_integer(type_) else "text" if is_text(type_) else "other"


@dataclass(frozen=True)
class TableProfile:
    """Facts about a table, from some of its rows.

    Attributes:
        name: name of the vertex type that the table may hold.
        rows: number of rows that were read.
        num_rows: number of rows of the table, or None if it is unknown.
    """

    name: str
    address: str
    columns: Mapping[str, ColumnProfile]
    rows: int
    num_rows: int | None

    @property
    def is_whole(self) -> bool:
        """Whether all rows were read."""
        return self.rows == self.num_rows


def profile_table(address: str, base: Path, most_rows: int) -> TableProfile:
    """Reads up to ``most_rows`` rows of a table, from the beginning of each of its files.

    Raises:
        OSError, ValueError, ImportError: the table cannot be read, see :func:`~salientpp.datasets.tabular.doors.open_table`.
    """
    import pyarrow as pa

    table = open_table([address], base, address)
    batches = [each.batch for each in table.head(table.names, most_rows, _BATCH)]
    some = pa.Table.from_batches(batches, schema=table.schema)
    columns = {name: _profile(name, some.column(name)) for name in table.names}
    num_rows = table.num_rows
    if num_rows is None and some.num_rows < most_rows:
        num_rows = some.num_rows
    return TableProfile(singular(plain_name(name_of(address))), address, columns, some.num_rows, num_rows)


def _profile(name: str, column: pa.ChunkedArray) -> ColumnProfile:
    import pyarrow as pa

    found = staged_type(column.type)
    plain = pa.chunked_array([plain_column(chunk) for chunk in column.chunks], plain_type(column.type))
    try:
        values = plain.unique().drop_null()
        distinct = len(values)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # lists and structures
        values, distinct = None, 0
    kept = values if _may_be_key(plain.type) else None
    return ColumnProfile(name, column.type, found and found[0], len(column), column.null_count, distinct, kept)


def _may_be_key(type_: pa.DataType) -> bool:
    from pyarrow import types

    is_bytes = types.is_large_binary(type_) or types.is_fixed_size_binary(type_)  # also UUIDs
    return types.is_integer(type_) or types.is_decimal(type_) or is_text(type_) or is_bytes


def plain_name(name: str) -> str:
    """Returns a name in lower case with underscores: ``customer_id`` of ``customerId``."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_") or "table"


def singular(name: str) -> str:
    """Returns the singular of an English name: ``category`` of ``categories``."""
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("shes", "sh")):
        if name.endswith(ending) and len(name) > len(ending) + 1:
            return name[: -len(ending)] + instead
    return name[:-1] if re.search(r"[^sui]s$", name) and len(name) > 2 else name


def stem_of(column: str) -> str:
    """Returns what a column refers to by its name: ``customer`` of ``CustomerID``, or an empty text for ``id``."""
    plain = plain_name(column)
    without = re.sub(rf"^(?:id|fk)_|(?:^|_){_SUFFIX}$", "", plain)
    if without == plain:  # customerid
        without = re.sub(r"(?:id|key|uuid)$", "", plain)
    return singular(without)
