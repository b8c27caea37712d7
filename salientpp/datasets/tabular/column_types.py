"""Joins the schemas of a table's parts into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from salientpp.datasets.tabular.file_formats import Looked
from salientpp.datasets.tabular.text_tables import Kinds, joined_kinds, type_of_kinds

if TYPE_CHECKING:
    import pyarrow as pa


def joined_schema(looked: Sequence[tuple[str, Looked]], what: str) -> pa.Schema:
    """Returns the columns of a table, with types that hold the values of all parts.

    Texts of different types become ``large_string``, binary values ``large_binary``, categories their values, and times take the finer unit. A column
    without values takes the type of the others. Columns of CSV files take the first type that fits all their values. ``looked`` has the address and the
    content of each part.

    Raises:
        ValueError: a part lacks a column, or two parts have different types. The text has both parts.
    """
    import pyarrow as pa

    for address, each in looked:
        twice = next((name for name, times in Counter(each.schema.names).items() if times > 1), None)
        if twice is not None:
            raise ValueError(f"{what}: {address} has several columns called {twice!r}; rename them")
    names = _names(looked, what)
    kinds = _kinds_of_all([each.kinds for _, each in looked if each.kinds is not None])
    fields = []
    for name in names:
        type_, first = None, ""
        for address, each in looked:
            at = each.schema.get_field_index(name)
            if at < 0:
                continue
            own = type_of_kinds(kinds[name]) if name in (each.kinds or ()) else each.schema.field(at).type
            joined = own if type_ is None else joined_type(type_, own)
            if joined is None:
                raise ValueError(
                    f"{what}: column {name!r} holds {type_} in {first} and {own} in {address}; write all files with one type"
                )
            type_, first = joined, first or address
        fields.append(pa.field(name, type_))
    return pa.schema(fields)


def _names(looked: Sequence[tuple[str, Looked]], what: str) -> list[str]:
    """Returns the names of all columns, in the order of the first part. Takes time in proportion to the parts and their columns."""
    first = looked[0][0]
    columns = [each.schema.names for _, each in looked]  # makes a new list at each call
    names = dict.fromkeys(columns[0])
    may_add = all(each.is_sparse for _, each in looked)
    for (address, _), own in zip(looked, columns):
        more = [name for name in own if name not in names]
        if more and not may_add:
            raise ValueError(
                f"{what}: {first} has no column {more[0]!r}, which {address} has; write all files with the same columns"
            )
        names |= dict.fromkeys(more)
    for (address, each), own in zip(looked, columns):
        less = () if each.is_sparse else names.keys() - set(own)
        if less:
            name = next(name for name in names if name in less)
            raise ValueError(
                f"{what}: {address} has no column {name!r}, which {first} has; write all files with the same columns"
            )
    return list(names)


def _kinds_of_all(files: Sequence[Kinds]) -> dict[str, frozenset[str] | None]:
    joined: dict[str, frozenset[str] | None] = {}
    for kinds in files:
        for name, own in kinds.items():
            joined[name] = joined_kinds(joined.get(name), own)
    return joined


def joined_type(type_: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Returns a type that holds the values of both types without a change, or None if there is none."""
    import pyarrow as pa

    if type_ == other:
        return type_
    types = [each.value_type if pa.types.is_dictionary(each) else each for each in (type_, other)]
    for own, another in (types, types[::-1]):
        if pa.types.is_null(own) or own == another:
            return another
    for group, joined in ((is_text, pa.large_string()), (_is_bytes, pa.large_binary())):
        if all(map(group, types)):
            return joined
    if all(map(pa.types.is_timestamp, types)) and types[0].tz == types[1].tz:
        return max(types, key=lambda each: ("s", "ms", "us", "ns").index(each.unit))
    return None


def is_text(type_: pa.DataType) -> bool:
    """Returns if values of a type are strings."""
    return str(type_) in ("string", "large_string", "string_view")


def _is_bytes(type_: pa.DataType) -> bool:
    return str(type_) in ("binary", "large_binary", "binary_view")
