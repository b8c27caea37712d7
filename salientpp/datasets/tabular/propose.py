"""Proposes which tables hold vertices, which columns are keys, and which tables refer to which, from names and from the values of some rows.

A table with a column that differs in every row is a vertex type. A column that refers to the key of another table becomes a relation. A table without a key
that refers to two others holds the edges between them. The proposal is a start: the user checks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salientpp.datasets.tabular.column_types import is_text
from salientpp.datasets.tabular.profiles import ColumnProfile, TableProfile, plain_name, profile_table, stem_of

#: Share of the values of a column that are keys of another table. The first is for a column whose name has the other table's name, the second for a
#: column that is only named as a key.
_SHARE_BY_NAME, _SHARE_BY_VALUES = 0.5, 0.9

#: Different values that texts need so that they may refer to a table whose name they do not have.
_TEXT_VALUES = 3

#: Names of integers that may refer to rows of their own table. Otherwise integers of any meaning would.
_OWN_TABLE = re.compile(r"parent|manager|boss|reply|replies|reports?_to|prev|next|root|origin")

#: Names of the time at which a row came to be, the best first.
_TIMES = (r"creat|order|occur|event|regist|sign", r"(^|_)(time|timestamp|date|at|ts)$|time|date", r"")


@dataclass(frozen=True)
class Reference:
    """A column of a table that refers to the key of another.

    Attributes:
        missing: number of its different values that the rows of the other table that were read do not have.
        nulls: number of rows without a value.
        by_name: True if the name of the column says so, False if only its values do.
    """

    column: str
    to: str
    missing: int
    nulls: int
    by_name: bool


@dataclass
class TableProposal:
    """Proposed meaning of a table.

    Attributes:
        key: columns of the key; empty if the table holds no vertices.
        references: columns that refer to other tables.
        unclear: columns that may refer to several tables, and their names.
    """

    profile: TableProfile
    key: tuple[str, ...] = ()
    references: list[Reference] = field(default_factory=list)
    unclear: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_link(self) -> bool:
        """Whether the table holds only edges."""
        return not self.key and len(self.references) >= 2

    @property
    def time(self) -> str | None:
        """Name of the column with the time of a row, or None."""
        times = [column.name for column in self.profile.columns.values() if column.is_time]
        found = (name for pattern in _TIMES for name in times if re.search(pattern, plain_name(name)))
        return next(found, None)

    @property
    def split(self) -> str | None:
        """Name of the column with the splits, or None."""
        return next((column.name for column in self.profile.columns.values() if column.is_split), None)

    @property
    def labels(self) -> list[str]:
        """Names of columns that may hold a label."""
        return [column.name for column in self.profile.columns.values() if column.is_named_as_label and column.kind]

    def becomes(self, column: ColumnProfile) -> str:
        """Returns what a column becomes."""
        to = next((each.to for each in self.references if each.column == column.name), None)
        if column.name in self.key:
            return "key" + (f", and refers to {to}" if to else "")
        if to is not None:
            return f"refers to {to}"
        if column.name in self.unclear:
            return f"may refer to {' or '.join(self.unclear[column.name])}"
        if not self.is_link and column.name == self.split:
            return "splits"
        if column.name == self.time:
            return "time"
        if column.kind is None:
            return f"left out: {column.type} cannot become an attribute"
        if column.is_free_text:
            return "left out: text that differs in most rows"
        kinds = {"category": f"attribute, {column.distinct:,} categories", "list": "attribute, [n, k]"}
        label = ", or the label" if column.is_named_as_label else ""
        return kinds.get(column.kind, "attribute") + label

    @property
    def left_out(self) -> list[str]:
        """Names of columns that should not become attributes of vertices."""
        used = {*self.key, self.time, self.split}
        referring = {each.column for each in self.references}
        return [
            column.name
            for column in self.profile.columns.values()
            if column.name not in used and (column.name in referring or column.is_free_text or column.kind is None)
        ]


def propose_graph(addresses: Sequence[str], base: Path, most_rows: int) -> list[TableProposal]:
    """Reads up to ``most_rows`` rows of each table, and proposes what the tables and their columns mean.

    Raises:
        OSError, ValueError, ImportError: a table cannot be read, see :func:`~salientpp.datasets.tabular.doors.open_table`.
    """
    profiles = [profile_table(address, base, most_rows) for address in addresses]
    return propose(with_own_names(profiles))


def with_own_names(profiles: Sequence[TableProfile]) -> list[TableProfile]:
    """Returns the profiles with different names: the second ``customer`` is called ``customer_2``."""
    named, taken = [], set[str]()
    for profile in profiles:
        name, number = profile.name, 1
        while name in taken:
            number += 1
            name = f"{profile.name}_{number}"
        taken.add(name)
        named.append(TableProfile(name, profile.address, profile.columns, profile.rows, profile.num_rows))
    return named


def propose(profiles: Sequence[TableProfile]) -> list[TableProposal]:
    """Proposes keys and references, see :func:`propose_graph`."""
    tables = {profile.name: TableProposal(profile) for profile in profiles}
    for table in tables.values():
        table.key = _key_by_name(table.profile, tables)
    for table in tables.values():
        _find_references(table, tables)
    for table in tables.values():
        if not table.key and len(table.references) != 2:
            table.key = _key_by_values(table)
    for table in tables.values():  # a table that now has a key can be referred to
        table.references, table.unclear = [], {}
        _find_references(table, tables)
    return list(tables.values())


def _key_by_name(profile: TableProfile, tables: Mapping[str, TableProposal]) -> tuple[str, ...]:
    """Returns the column that differs in every row and is named as a key of this table."""
    ranked = []
    for position, column in enumerate(profile.columns.values()):
        stem = stem_of(column.name)
        is_of_other = any(_refers_by_name(stem, name) for name in tables if name != profile.name)
        is_own = stem in ("", profile.name) or (stem in profile.name.split("_") and not is_of_other)
        if not column.is_unique or (is_of_other and not is_own):
            continue
        if (is_own and (column.is_named_as_key or stem == profile.name)) or plain_name(column.name) in ("uuid", "guid"):
            ranked.append((0, position, column.name))
        elif column.is_named_as_key:
            ranked.append((1 + position, position, column.name))
    return (min(ranked)[2],) if ranked else ()


def _key_by_values(table: TableProposal) -> tuple[str, ...]:
    """Returns the key of a table whose names do not tell it: a column that differs in every row, or all columns that refer to other tables."""
    columns = list(table.profile.columns.values())
    unique = [column.name for column in columns if column.is_unique]
    referring = tuple(each.column for each in table.references)
    if len(referring) > 2:
        return referring
    named = [name for name in unique if name in referring]
    first = [column.name for column in columns[:1] if column.is_unique]
    texts = [column.name for column in columns if column.is_unique and column.group == "text"]
    return tuple((named or first or texts)[:1])


def _refers_by_name(stem: str, name: str) -> bool:
    return bool(stem) and (stem == name or stem.endswith(f"_{name}") or stem == name.replace("_", ""))


def _find_references(table: TableProposal, tables: Mapping[str, TableProposal]) -> None:
    """Fills in the references of a table to keys of one column."""
    for column in table.profile.columns.values():
        if column.values is None or not column.distinct:
            continue
        found = []
        for name, other in tables.items():
            is_itself = other is table and column.name in other.key
            if len(other.key) != 1 or is_itself:
                continue
            key = other.profile.columns[other.key[0]]
            is_named = column.is_named_as_key or _OWN_TABLE.search(plain_name(column.name)) is not None
            if other is table and column.group == "integer" and not _OWN_TABLE.search(plain_name(column.name)):
                continue
            reference = _reference(column, key, other, table.key == (column.name,), is_named)
            if reference is not None:
                found.append((not reference.by_name, reference.missing, name, reference))
        if not found:
            continue
        best = [each for each in found if each[:2] == min(found)[:2]]
        own = [each for each in best if each[2] == table.profile.name and _OWN_TABLE.search(plain_name(column.name))]
        if len(best) == 1 or own:
            table.references.append((own or best)[0][3])
        else:
            table.unclear[column.name] = tuple(name for _, _, name, _ in best)


def _widest(values: Any) -> Any:
    """Returns integers as int64 and texts as large_string, so that equal values are equal. Integers above 2^63 wrap around."""
    import pyarrow as pa

    if pa.types.is_integer(values.type):
        return values.cast(pa.int64(), safe=False)
    return values.cast(pa.large_string()) if is_text(values.type) else values


def _reference(
    column: ColumnProfile, key: ColumnProfile, other: TableProposal, is_key: bool, is_named: bool
) -> Reference | None:
    """Returns the reference of ``column`` to ``key``, the key of ``other``, or None if it does not refer to it.

    ``is_key`` says that the column is the key of its table, and ``is_named`` that its name is one of a reference.
    """
    import pyarrow.compute as pc

    types = [getattr(each.values, "type", each.type) for each in (column, key)]
    if column.group != key.group or (column.group == "other" and types[0] != types[1]):
        return None
    values, have = (_widest(each.values) for each in (column, key))
    missing = len(values) - int(pc.sum(pc.is_in(values, value_set=have)).as_py() or 0)
    share = 1 - missing / len(values)
    by_name = _refers_by_name(stem_of(column.name), other.profile.name)
    is_similar = plain_name(column.name) == plain_name(key.name) and stem_of(column.name) != ""
    by_name |= is_similar and not is_key
    reference = Reference(column.name, other.profile.name, missing, column.nulls, by_name)
    if reference.by_name:
        return reference if share >= _SHARE_BY_NAME or not other.profile.is_whole else None
    if is_key:
        return None
    if is_named:
        return reference if share >= _SHARE_BY_VALUES and column.distinct > 1 else None
    is_word = column.group == "text" and share == 1 and column.distinct >= _TEXT_VALUES
    return reference if is_word else None
