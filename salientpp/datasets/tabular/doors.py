"""Opens tables wherever they are: files by address, objects of other libraries, and tables of Delta and Iceberg.

:func:`open_table` joins the parts of a table, checks that they have the same columns, and returns a :class:`Table`. It reads record batches any number of
times, always with the same types. Each batch tells the file and row of its rows, for errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.addresses import without_password
from salientpp.datasets.converted.pieces import counted
from salientpp.datasets.tabular.addresses import find_table_files
from salientpp.datasets.tabular.column_types import joined_schema
from salientpp.datasets.tabular.file_formats import FORMATS, sliced
from salientpp.datasets.tabular.lakes import LAKES, open_lake
from salientpp.datasets.tabular.rows import return_memory
from salientpp.datasets.tabular.table_parts import (
    UNNAMED_INDEX,
    FilePart,
    ObjectPart,
    TablePart,
    facts_of_file,
    instead_of,
    is_in_memory,
    is_object,
    with_types,
)
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class TableBatch:
    """Some rows of a table, in memory. ``where`` returns the file and the row of an entry, for errors."""

    batch: pa.RecordBatch
    where: Callable[[int], str]


class Table:
    """Table that stays where it is until it is read.

    Attributes:
        what: name of the table in errors.
        schema: columns in the order of the first part, without metadata.
        num_rows: None if it is unknown before reading.
        left_out: columns that are not read: unnamed indices, which pandas stored.
    """

    def __init__(self, parts: Sequence[TablePart], what: str) -> None:
        self.what, self._parts = what, parts
        whole = joined_schema([(part.address, part.looked) for part in parts], what)
        self.left_out = tuple(name for name in whole.names if UNNAMED_INDEX.fullmatch(name))
        for name in self.left_out:
            whole = whole.remove(whole.get_field_index(name))
        self.schema: pa.Schema = whole

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.schema.names)

    @property
    def num_rows(self) -> int | None:
        """Number of rows, or None if it is unknown before reading."""
        numbers = [part.looked.num_rows for part in self._parts]
        return None if None in numbers else sum(number or 0 for number in numbers)

    @property
    def is_spooled(self) -> bool:
        """Whether the table can be read. False if a part gives its rows once, until :meth:`spool` is called."""
        return all(part.is_spooled for part in self._parts if isinstance(part, ObjectPart))

    def check_columns(self, columns: Sequence[str], use: str) -> None:
        """Raises ValueError if the table lacks a column. ``use`` says what names it, such as ``key``."""
        known = dict.fromkeys(self.names)
        for name in columns:
            if name not in known:
                raise ValueError(
                    f"{self.what}: {use} names the column {name!r}, which {self._parts[0].address} does not have; it has {', '.join(known)}"
                    f"{did_you_mean(name, known)}"
                )

    def spool(self, folder: Path) -> None:
        """Writes the rows of objects that give them once to files in ``folder``, which is made if it is missing. Other parts are not copied.

        Raises:
            OSError: a file cannot be written, or the library that makes the rows fails.
        """
        for part in self._parts:
            if isinstance(part, ObjectPart):
                part.spool(folder)

    def batches(self, columns: Sequence[str], most_rows: int) -> Iterator[TableBatch]:
        """Yields all rows in their order, with the given columns in the given order. A batch has 1 to ``most_rows`` rows.

        Raises:
            OSError: a file can no longer be read.
            ValueError: a file is damaged, or it changed; or a column is missing.
        """
        self.check_columns(columns, "batches()")
        for part in self._parts:
            yield from self._batches_of(part, columns, most_rows)
            return_memory()

    def head(self, columns: Sequence[str], total: int, most_rows: int) -> Iterator[TableBatch]:
        """Yields up to ``total`` rows, from the beginning of each part. Otherwise like :meth:`batches`."""
        self.check_columns(columns, "head()")
        for number, part in enumerate(self._parts):
            own = -(-total // (len(self._parts) - number))  # parts share the rows that are left
            if own <= 0:
                return
            for each in self._batches_of(part, columns, min(most_rows, own)):
                if own <= 0:
                    break
                batch = each.batch.slice(0, own)
                own, total = own - batch.num_rows, total - batch.num_rows
                yield TableBatch(batch, each.where)

    def _batches_of(self, part: TablePart, columns: Sequence[str], most_rows: int) -> Iterator[TableBatch]:
        import pyarrow as pa

        schema = pa.schema([self.schema.field(name) for name in columns])
        for batch, address, first in part.read(schema, most_rows):
            typed, at = with_types(batch, schema, f"{self.what}: {address}"), first
            for some in sliced(typed, most_rows):
                yield TableBatch(some, counted(f"{address}, row ", at))
                at += some.num_rows

    def facts(self) -> list[dict[str, Any]]:
        """Returns what identifies the content of each part: address, size and time, or the version of a lake's table, or a digest of an object."""
        return [part.facts() for part in self._parts]

    def check_unchanged(self) -> None:
        """Raises ValueError if a file has changed since the table was opened, and OSError if this cannot be found out."""
        for part in self._parts:
            part.check_unchanged(self.what)


def open_table(tables: Sequence[object], base: Path, what: str) -> Table:
    """Opens a table. Files of text are read once, to find the types of their columns.

    Args:
        tables: addresses, see :func:`~salientpp.datasets.tabular.addresses.find_table_files`; ``delta:ADDRESS``; ``iceberg:ADDRESS`` or
            ``iceberg:CATALOG/NAMESPACE.TABLE``; or objects with ``__arrow_c_stream__``. Their rows follow each other.
        base: folder that relative addresses begin at.
        what: name of the table in errors, such as ``nodes.customer``.

    Raises:
        OSError: a file is missing, forbidden or out of reach.
        ValueError: a file is damaged or of an unknown kind, or the columns of two files differ.
        ImportError: a package is missing.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'{what} is read with the "pyarrow" package, which is not installed: pip install salientpp[tables]'
        ) from error
    parts: list[TablePart] = []
    for number, table in enumerate(tables):
        if isinstance(table, (str, os.PathLike)):
            parts += _parts_of(os.fspath(table), base, what)
        elif is_object(table):
            parts.append(ObjectPart(table, number, what))
        else:
            raise ValueError(
                f"{what}: a table must be an address or an object with __arrow_c_stream__, got a {type(table).__name__}"
                f"{instead_of(table)}"
            )
    if not parts:
        raise ValueError(f"{what}: expected at least one address or object, got none")
    _check_named_once(parts, what)
    return Table(parts, what)


def facts_of(tables: Sequence[object], base: Path, what: str) -> list[dict[str, Any]] | None:
    """Returns :meth:`Table.facts` without reading files. None: an object gives its rows once, so that only reading it identifies them.

    Takes the arguments of :func:`open_table`, and raises its errors.
    """
    facts: list[dict[str, Any]] = []
    for number, table in enumerate(tables):
        if not isinstance(table, (str, os.PathLike)):
            if not is_in_memory(table):
                return None
            facts.append(ObjectPart(table, number, what).facts())
            continue
        address = os.fspath(table)
        kind, colon, rest = address.partition(":")
        if colon and kind in LAKES:
            facts.append(open_lake(kind, rest, base, what).facts())
        else:
            facts += [facts_of_file(file) for file in find_table_files(address, base, what, tuple(FORMATS))]
    return facts


def _check_named_once(parts: Sequence[TablePart], what: str) -> None:
    """Raises ValueError if two addresses lead to one file or table, whose rows would come twice."""
    found: dict[str, str] = {}
    for part in parts:
        first = found.get(part.identity)
        if first is not None:
            names = f"{first} twice" if first == part.address else f"{first} and {part.address}, which are one"
            raise ValueError(f"{what}: its addresses name {names}; name each file once")
        found[part.identity] = part.address


def _parts_of(address: str, base: Path, what: str) -> list[TablePart]:
    kind, colon, rest = address.partition(":")
    if colon and kind in LAKES:
        return [open_lake(kind, rest, base, what)]
    if not address.strip():
        raise ValueError(f"{what}: an address is empty; write a path or a URL")
    if "\0" in address:
        raise ValueError(f"{what}: {without_password(address)!r} is not an address")
    return [FilePart(file, what) for file in find_table_files(address, base, what, tuple(FORMATS))]
