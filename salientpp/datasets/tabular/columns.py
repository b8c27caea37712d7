"""Decides what each column of a keyed table becomes, from the description and the types of the columns.

Columns are staged in few types: booleans, integers, floats, texts, lists of numbers, and moments as int64 microseconds since 1970 (UTC). After the rows are
in the order of the vertices, :mod:`~salientpp.datasets.tabular.encodings` makes tensors of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import numpy as np

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.tabular.column_types import is_text
from salientpp.datasets.tabular.description import EdgeTable, NodeTable
from salientpp.datasets.tabular.rows import first_unfit
from salientpp.files import first_line
from salientpp.store.directory.attributes import OWN_NAMES
from salientpp.store.keys import decoded
from salientpp.suggestions import did_you_mean

#: Kinds of staged columns.
NUMBER, MOMENT, CATEGORY, LIST = "number", "moment", "category", "list"

#: Unsigned integers that torch computes with in few operations -> the type that replaces them.
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


@dataclass(frozen=True)
class PlannedColumn:
    """Column that becomes the attribute ``attribute``. ``type`` is the Arrow type that it is staged in."""

    column: str
    attribute: str
    kind: str
    type: Any
    is_label: bool


@dataclass(frozen=True)
class ColumnPlan:
    """Uses of the columns of a keyed table. All mappings and tuples are in the order of the columns' names, unless stated otherwise.

    Attributes:
        title: the table's entry in the description, for errors.
        columns: columns that become attributes of their own.
        split: column of the splits, or None.
        joined: columns that are joined into ``x``, in the order of the entries of a row.
        framed: columns of the ``TensorFrame`` ``tf``.
        types: column -> the Arrow type that it is staged in; has all columns that are staged.
        fill: column -> Arrow scalar that replaces nulls.
        left_out: column -> reason why it is not converted.
        moments: columns that are staged as microseconds.
    """

    title: str
    columns: tuple[PlannedColumn, ...]
    split: str | None
    joined: tuple[str, ...]
    framed: tuple[PlannedColumn, ...]
    types: Mapping[str, Any]
    fill: Mapping[str, Any]
    left_out: Mapping[str, str]
    moments: frozenset[str]

    @property
    def staged(self) -> tuple[str, ...]:
        """Names of the columns to stage, ascending."""
        return tuple(self.types)

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the attributes that columns become, without ``x``, ``tf`` and masks."""
        return tuple(planned.attribute for planned in self.columns)

    def prepare(self, batch: Any, where: Callable[[int], str]) -> Any:
        """Returns a record batch whose staged columns have the types that they are staged in. Other columns, such as keys, stay as they are.

        Raises ValueError if a value does not fit its type.
        """
        import pyarrow

        arrays = []
        for name, array in zip(batch.schema.names, batch.columns):
            if name not in self.types:
                arrays.append(array)
                continue
            cast = partial(as_staged, type_=self.types[name], is_moment=name in self.moments)
            try:
                arrays.append(cast(array))
            except pyarrow.ArrowInvalid as error:
                raise ValueError(
                    f"{where(first_unfit(array, cast))}: column {name!r} must fit {self.types[name]} ({first_line(error)}); correct it, "
                    f"or name it in drop of {self.title}"
                ) from error
        return pyarrow.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def staged_type(type_: Any) -> tuple[str, Any] | None:
    """Returns the kind of a column of an Arrow type and the type that it is staged in, or None if the column cannot become an attribute."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(type_):
        return staged_type(type_.value_type)
    if types.is_boolean(type_) or types.is_floating(type_) or types.is_integer(type_):
        wider = _WIDER.get(str(type_))
        return NUMBER, type_ if wider is None else pyarrow.type_for_alias(wider)
    if types.is_decimal(type_):
        return NUMBER, pyarrow.float64()
    if types.is_timestamp(type_) or types.is_date(type_):
        return MOMENT, pyarrow.int64()
    if is_text(type_):
        return CATEGORY, pyarrow.large_string()
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner = staged_type(type_.value_type)
        return (LIST, pyarrow.large_list(inner[1])) if inner is not None and inner[0] == NUMBER else None
    return None


def as_staged(array: Any, type_: Any, is_moment: bool) -> Any:
    """Casts an Arrow array to the type that its column is staged in. Moments become int64 microseconds; finer ones are rounded down."""
    import pyarrow
    from pyarrow import types

    array = decoded(array)
    if not is_moment:
        return array if array.type == type_ else array.cast(type_)
    if types.is_timestamp(array.type) and array.type.unit == "ns":
        whole = array.cast(pyarrow.int64()).fill_null(0).to_numpy(zero_copy_only=False) // 1000
        return pyarrow.array(whole, pyarrow.int64(), mask=_is_null(array))
    zone = array.type.tz if types.is_timestamp(array.type) else None
    return array.cast(pyarrow.timestamp("us", tz=zone)).cast(pyarrow.int64())


def _is_null(array: Any) -> np.ndarray:
    return array.is_null().to_numpy(zero_copy_only=False)


# --- planning ---------------------------------------------------------------------------------------------


def plan_nodes(table: NodeTable, schema: Any) -> ColumnPlan:
    """Plans the columns of the tables of a vertex type, whose Arrow schema is ``schema``. Raises ValueError if the description does not fit it."""
    named = {"time": table.time, "label": table.label, "split": table.split}
    planner = _Planner(table.title, schema, {*table.key, *table.drop}, table.fill)
    planner.check_present("key", table.key)
    joined = planner.numbers(set(filter(None, named.values()))) if table.x is True else table.x or ()
    planner.check_joined(joined)
    uses = {column: use for use, column in named.items() if column is not None}
    return planner.plan(uses, joined, table.drop, in_frame=table.frame)


def plan_edges(table: EdgeTable, schema: Any, is_of_nodes: bool) -> ColumnPlan:
    """Plans the columns of the tables of a relation. If the same tables hold vertices (``is_of_nodes``), only ``time`` becomes an attribute of the edges."""
    taken = {*table.source, *table.target, *table.drop}
    planner = _Planner(table.title, schema, taken, table.fill)
    for use in ("source", "target"):
        planner.check_present(use, getattr(table, use))
    uses = {} if table.time is None else {table.time: "time"}
    if is_of_nodes:
        planner.taken |= set(schema.names) - set(uses)
    return planner.plan(uses, (), table.drop, may_list=False)


class _Planner:
    """Plans the columns of one entry ``title`` of a description. Columns in ``taken`` do not become attributes."""

    def __init__(self, title: str, schema: Any, taken: set[str], fill: Mapping[str, object]) -> None:
        self.title, self.schema, self.taken, self._fill = title, schema, taken, fill

    def check_present(self, use: str, columns: Sequence[str]) -> None:
        names = self.schema.names
        for column in columns:
            if column not in names:
                raise ValueError(
                    f"{self.title}: {use} must name columns of the table ({', '.join(names)}), got {column!r}{did_you_mean(column, names)}"
                )

    def numbers(self, named: set[str]) -> tuple[str, ...]:
        """Returns the columns with a number a row that no entry names."""
        free = [name for name in sorted(self.schema.names) if name not in self.taken | named]
        return tuple(
            name for name in free if (found := staged_type(self.schema.field(name).type)) and found[0] == NUMBER
        )

    def check_joined(self, columns: Sequence[str]) -> None:
        self.check_present("x", columns)
        for column in columns:
            type_ = self.schema.field(column).type
            found = staged_type(type_)
            if found is None or found[0] != NUMBER:
                raise ValueError(
                    f"{self.title}: x must name columns with a number a row, got {column!r} of {type_}; leave it out, and it becomes an attribute of its own"
                )

    def plan(
        self,
        uses: Mapping[str, str],
        joined: Sequence[str],
        drop: Sequence[str],
        may_list: bool = True,
        in_frame: bool = False,
    ) -> ColumnPlan:
        """Makes the plan. ``uses`` maps columns to time, label and split. If not ``may_list``, columns of lists are left out.

        If ``in_frame``, columns without a use become columns of ``tf``.
        """
        for column, named in uses.items():
            self.check_present(named, [column])
        self.check_present("drop", drop)
        columns: list[PlannedColumn] = []
        framed: list[PlannedColumn] = []
        types: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        moments: set[str] = set()
        for name in sorted(set(self.schema.names) - self.taken):
            type_, use = self.schema.field(name).type, uses.get(name)
            found = staged_type(type_)
            if found is not None and found[0] == LIST and not may_list and use is None:
                left_out[name] = f"edges cannot have lists ({type_})"
            elif found is None and use is None and name not in joined:
                left_out[name] = "it has no values" if str(type_) == "null" else f"{type_} cannot become an attribute"
            else:
                kind, types[name] = self._checked(use, name, found)
                if kind == MOMENT:
                    moments.add(name)
                if use is None and in_frame and name not in joined:
                    framed.append(PlannedColumn(name, "tf", kind, types[name], False))
                elif use != "split" and name not in joined:
                    attribute = {"time": "time", "label": "y"}.get(use or "", name)
                    columns.append(PlannedColumn(name, attribute, kind, types[name], use == "label"))
        split = next((column for column, use in uses.items() if use == "split"), None)
        self._check_attributes(columns, bool(joined), split is not None)
        fill = self._scalars(types, moments)
        return ColumnPlan(
            self.title,
            tuple(columns),
            split,
            tuple(joined),
            tuple(framed),
            types,
            fill,
            left_out,
            frozenset(moments),
        )

    def _checked(self, use: str | None, name: str, found: tuple[str, Any] | None) -> tuple[str, Any]:
        """Returns the kind and staged type of a column. Raises ValueError if its ``use`` needs another type."""
        type_ = self.schema.field(name).type
        kind, staged = found or ("", None)
        if use == "time" and kind != MOMENT and not str(staged).startswith(("int", "uint")):
            raise ValueError(
                f"{self.title}: time must name a column of timestamps, dates or integers, got {name!r} of {type_}; parse it"
            )
        if use == "split" and kind != CATEGORY:
            raise ValueError(
                f"{self.title}: split must name a column of texts (train, val, test), got {name!r} of {type_}"
            )
        if use == "label" and kind not in (NUMBER, CATEGORY, LIST):
            raise ValueError(f"{self.title}: label must name a column of numbers or texts, got {name!r} of {type_}")
        return kind, staged

    def _check_attributes(self, columns: Sequence[PlannedColumn], has_x: bool, has_split: bool) -> None:
        made: dict[str, str] = {"x": "x"} if has_x else {}
        made |= {f"{split}_mask": "split" for split in SPLITS} if has_split else {}
        made |= {planned.attribute: planned.column for planned in columns if planned.attribute != planned.column}
        for planned in columns:
            if planned.attribute in OWN_NAMES:
                raise ValueError(
                    f"{self.title}: the column {planned.column!r} cannot become an attribute of this name, which batches use themselves; rename the column, "
                    "or name it in drop"
                )
            if planned.attribute == planned.column and planned.column in made:
                other = made[planned.attribute]
                raise ValueError(
                    f"{self.title}: the column {planned.column!r} and the column or entry {other!r} would both become the attribute {planned.attribute!r}; "
                    "rename the column, or name it in drop"
                )

    def _scalars(self, types: Mapping[str, Any], moments: set[str]) -> dict[str, Any]:
        import pyarrow

        self.check_present("fill", list(self._fill))
        scalars = {}
        for name in sorted(self._fill):
            if name not in types:
                raise ValueError(
                    f"{self.title}: fill must name columns that become attributes, got {name!r}; leave it out"
                )
            try:
                scalars[name] = self._scalar(name, types[name], name in moments)
            except (pyarrow.ArrowException, OverflowError) as error:
                raise ValueError(
                    f"{self.title}: fill must have a value of {self.schema.field(name).type} for {name!r}, got {self._fill[name]!r} ({first_line(error)})"
                ) from None
        return scalars

    def _scalar(self, name: str, type_: Any, is_moment: bool) -> Any:
        """Returns the value of ``fill`` for a column in the type that the column is staged in."""
        import pyarrow

        value = self._fill[name]
        if not is_moment:
            # pyarrow would leave out the fraction without a word.
            if isinstance(value, float) and pyarrow.types.is_integer(type_) and not value.is_integer():
                raise pyarrow.ArrowInvalid(f"{value} is not an integer")
            return pyarrow.scalar(value, type_)
        if not isinstance(value, date):
            raise pyarrow.ArrowInvalid("write a date or a timestamp, without quotes in TOML")
        return as_staged(pyarrow.array([value]).cast(self.schema.field(name).type), type_, True)[0]
