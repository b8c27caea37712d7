"""Reads tables from text: CSV, TSV, and JSON with one object a line.

The type of a column is found from all its values, so the order of rows and files does not matter. pyarrow would decide from the first megabyte.
Integers with leading zeros, such as postcodes, stay text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from json import JSONDecoder
from typing import TYPE_CHECKING, Any

from salientpp.datasets.tabular.addresses import TableFile, ending_of
from salientpp.display import format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

#: For each column of text, the names of the types in ``_PATTERNS`` that fit every value. None: the column has no value.
Kinds = Mapping[str, frozenset[str] | None]

#: Bytes of text that are parsed at once.
_BLOCK = 2**20

#: A longer line of JSON is refused, because it must fit in memory.
_LONGEST_LINE = 2**26

#: Words that stand for a missing value, except in a column of text. There, only an empty field without quotes is missing.
_MISSING = ("", "NULL", "null", "NA", "N/A", "NaN", "nan")

#: Integers above it may have no floating-point number.
_EXACT = 2.0**53

#: A character that is no space between objects of JSON.
_WORD = re.compile(r"\S")

_TIME = r"[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"

#: Form of a value of each type. The first type that fits every value of a column is its type; without one it is text. Floating-point numbers of more than
#: fifteen digits would be rounded.
_PATTERNS = {
    "int64": r"^(0|-?[1-9][0-9]{0,18})$",
    "double": r"^-?((0|[1-9][0-9]{0,14})([.][0-9]*)?|[.][0-9]+)([eE][-+]?[0-9]+)?$",
    "bool": r"^(true|false|True|False|TRUE|FALSE)$",
    "date32": rf"^{_DATE}$",
    "timestamp": rf"^{_DATE}([ T]{_TIME})?$",
    "timestamp in UTC": rf"^{_DATE}[ T]{_TIME} ?(Z|[-+][0-9]{{2}}:?[0-9]{{2}})$",
}


def joined_kinds(some: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    """Returns the types that fit the values of both columns."""
    if some is None or others is None:
        return others if some is None else some
    return some & others


def type_of_kinds(kinds: frozenset[str] | None) -> pa.DataType:
    """Returns the type of a column of text."""
    import pyarrow as pa

    if kinds is None:
        return pa.null()
    return next((_type(kind) for kind in _PATTERNS if kind in kinds), pa.string())


def _type(kind: str) -> pa.DataType:
    import pyarrow as pa

    times = {"timestamp": pa.timestamp("us"), "timestamp in UTC": pa.timestamp("us", "UTC")}
    return times.get(kind) or pa.type_for_alias(kind)


def kinds_of_csv(file: TableFile) -> tuple[Kinds, int]:
    """Returns the possible types of each column, and the number of rows. Reads the whole file.

    Raises:
        ValueError: the text is damaged, or has no header.
    """
    names = _header(file)
    kinds: dict[str, frozenset[str] | None] = dict.fromkeys(names)
    num_rows = 0
    for batch in _csv_batches(file, names):
        num_rows += batch.num_rows
        for name, values in zip(names, batch.columns):
            kinds[name] = joined_kinds(kinds[name], kinds_of_values(values, kinds[name]))
    return kinds, num_rows


def kinds_of_values(values: Any, possible: frozenset[str] | None = None) -> frozenset[str] | None:
    """Returns the types among ``possible`` that fit all strings. None: there are no values. ``possible`` None means all types."""
    import pyarrow.compute as pc

    if possible == frozenset():
        return possible
    values = values.filter(pc.invert(_is_missing(values)))
    if not len(values):
        return None
    return frozenset(kind for kind in possible or _PATTERNS if _converted(values, kind) is not None)


def _is_missing(values: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(values, value_set=pa.array([*_MISSING, None], pa.string()))


def _converted(values: Any, kind: str) -> Any:
    """Returns strings without missing values as another type, or None if a value does not fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    matches = pc.match_substring_regex(values, _PATTERNS[kind])
    if not pc.all(matches, min_count=0).as_py():
        return None
    try:
        return values.cast(_type(kind))
    except pa.ArrowInvalid:  # an integer above 2^63, or the 31st of February
        return None


def read_csv(file: TableFile, schema: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Yields columns of a CSV file with the types of ``schema``. Raises ValueError if a value does not fit."""
    import pyarrow as pa

    names = _header(file)
    first = 0
    for batch in _csv_batches(file, names, schema.names):
        columns = [as_type(batch.column(field.name), field, first) for field in schema]
        whole = pa.RecordBatch.from_arrays(columns, schema=schema)
        first += batch.num_rows
        for start in range(0, whole.num_rows, most_rows):
            yield whole.slice(start, most_rows)


def as_type(values: Any, field: pa.Field, first: int) -> Any:
    """Returns strings as the type of ``field``. ``first`` is the number of the first value, for errors."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        return values.cast(field.type)
    missing = _is_missing(values)
    values = pc.if_else(missing, pa.scalar(None, pa.string()), values)
    if values.null_count == len(values):
        return pa.nulls(len(values), field.type)
    kind = next((kind for kind in _PATTERNS if _is_of(kind, field.type)), None)
    with contextlib.suppress(pa.ArrowInvalid):  # the forms of all values were checked when the file was opened
        if kind is not None:
            typed = values.cast(_type(kind)).cast(field.type)
            if not pa.types.is_floating(typed.type) or not pc.any(is_large := pc.is_inf(typed)).as_py():
                return typed
            at = pc.index(is_large, True).as_py()
            raise ValueError(
                f"row {first + at}: column {field.name!r} must hold numbers below 1.8e308 in size, got {values[at].as_py()!r}; correct it"
            )
    at = next((at for at in range(len(values)) if values[at].is_valid and not _fits(values[at : at + 1], kind)), 0)
    raise ValueError(f"row {first + at}: column {field.name!r} must hold {field.type}, got {values[at].as_py()!r}")


def _is_of(kind: str, type_: pa.DataType) -> bool:
    """Returns if a type is the type of a kind, or a time in another unit."""
    import pyarrow as pa

    own = _type(kind)
    return own == type_ or (pa.types.is_timestamp(own) and pa.types.is_timestamp(type_) and own.tz == type_.tz)


def _fits(value: Any, kind: str | None) -> bool:
    return kind is not None and _converted(value, kind) is not None


def _header(file: TableFile) -> list[str]:
    """Returns the names in the first line. Raises ValueError if two are equal."""
    from pyarrow import csv

    with file.system.open_input_stream(file.path, buffer_size=2**16) as stream:
        options = csv.ReadOptions(use_threads=False, block_size=_BLOCK)
        names = csv.open_csv(stream, read_options=options, parse_options=_parsing(file)).schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"several columns called {twice!r}; rename them")
    return names


def _csv_batches(file: TableFile, names: list[str], wanted: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yields the columns ``wanted`` of a file as text. None: all."""
    import pyarrow as pa
    from pyarrow import csv

    conversion = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=names if wanted is None else wanted,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    options = csv.ReadOptions(use_threads=False, block_size=_BLOCK)
    with file.system.open_input_stream(file.path, buffer_size=2**16) as stream:
        yield from csv.open_csv(stream, options, _parsing(file), conversion)


def _parsing(file: TableFile) -> Any:
    from pyarrow import csv

    delimiter = "\t" if ending_of(file.path) == ".tsv" else ","
    return csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)


def schema_of_json(file: TableFile) -> tuple[pa.Schema, int]:
    """Returns the schema of all lines, and the number of rows. Reads the whole file.

    Raises:
        ValueError: the text is damaged, or the values of a column have types that have no common one.
    """
    import pyarrow as pa

    schema = pa.schema([])
    num_rows = 0
    for table in _json_tables(file, None):
        for field in table.schema:
            at = schema.get_field_index(field.name)
            if at < 0:
                schema = schema.append(field)
            else:
                schema = schema.set(at, _joined_field(schema.field(at), field, num_rows))
        num_rows += table.num_rows
    return schema, num_rows


def _joined_field(field: pa.Field, other: pa.Field, row: int) -> pa.Field:
    import pyarrow as pa

    if field.type == other.type:
        return field
    texts = [pa.types.is_string(each.type) or pa.types.is_timestamp(each.type) for each in (field, other)]
    try:
        return pa.unify_schemas([pa.schema([field]), pa.schema([other])], promote_options="permissive").field(0)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        if all(texts):
            return field.with_type(pa.string())
        raise ValueError(
            f"column {field.name!r} holds {field.type}, and {other.type} after row {row}; write it with one type"
        ) from error


def read_json(file: TableFile, schema: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Yields columns of a file with one JSON object a line, with the types of ``schema``."""
    for table in _json_tables(file, schema):
        for batch in table.to_batches():
            for first in range(0, batch.num_rows, most_rows):
                yield batch.slice(first, most_rows)


def _json_tables(file: TableFile, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yields the rows of a file, some lines at a time. Types that ``schema`` does not have are inferred; with a schema, other columns are left out."""
    import pyarrow as pa
    from pyarrow import json

    is_plain = schema is not None
    parsing = json.ParseOptions(
        explicit_schema=pa.schema([_json_field(field) for field in schema]) if schema is not None else None,
        unexpected_field_behavior="ignore" if is_plain else "infer",
    )
    first = 0
    for block in _lines(file):
        options = json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        table = json.read_json(pa.BufferReader(block), options, parsing)
        _refuse_rounded(block, table, first)
        yield table
        first += table.num_rows


def _refuse_rounded(block: bytes, table: pa.Table, first: int) -> None:
    """Raises ValueError if an integer of a block of JSON became a floating-point number that differs from it. ``first`` is the number of the first row."""
    names = [
        name for name, column in zip(table.schema.names, table.columns) if any(map(_may_be_rounded, column.chunks))
    ]
    if not names:
        return
    text, decoder = block.decode(), JSONDecoder(strict=False)
    at, row = 0, first
    while begin := _WORD.search(text, at):
        found, at = decoder.raw_decode(text, begin.start())
        for name in names:
            for number in _integers(found.get(name)):
                if float(number) != number:
                    raise ValueError(
                        f"row {row}: column {name!r} has the integer {number} beside fractions or larger integers, so it would be rounded; write all values "
                        "of the column as texts, or without fractions and below 2^63"
                    )
        row += 1


def _may_be_rounded(column: Any) -> bool:
    """Returns if an Arrow array has floats that may be rounded integers, also in lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while pa.types.is_list(column.type):
        column = column.flatten()
    if not pa.types.is_floating(column.type):
        return False
    return pc.any(pc.greater_equal(pc.abs(column), _EXACT)).as_py() is True


def _integers(value: object) -> Iterator[int]:
    """Yields the integers in a value of JSON, also those in lists."""
    if isinstance(value, list):
        for each in value:
            yield from _integers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _json_field(field: pa.Field) -> pa.Field:
    """Returns the field to parse, because the parser does not know all types of text."""
    import pyarrow as pa

    return field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field


def _lines(file: TableFile) -> Iterator[bytes]:
    """Yields blocks of whole lines. Raises ValueError if the file is a list of objects."""
    rest, is_first = b"", True
    with file.system.open_input_stream(file.path, buffer_size=2**16) as stream:
        while True:
            read = stream.read(_BLOCK)
            whole, newline, tail = (rest + read).rpartition(b"\n") if read else (rest, b"", b"")
            block, rest = whole + newline, tail
            if len(rest) > _LONGEST_LINE:
                raise ValueError(f"a line of more than {format_bytes(_LONGEST_LINE)}; write one object on each line")
            if is_first and block.strip():
                if block.lstrip()[:1] == b"[":
                    raise ValueError("a list; write one object on each line (jq -c '.[]')")
                is_first = False
            if block.strip():
                yield block
            if not read:
                return
