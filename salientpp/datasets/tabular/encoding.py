"""Encodes later rows of tables as the rows of a graph were encoded: with its categories, means, deviations, unit of time and values of ``fill``."""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from salientpp.datasets.converted.columns import narrowed
from salientpp.datasets.converted.pieces import Rows
from salientpp.datasets.tabular.columns import CATEGORY, LIST, MOMENT, NUMBER, ColumnPlan, PlannedColumn, staged_type
from salientpp.datasets.tabular.doors import TableBatch, open_table
from salientpp.datasets.tabular.encodings import SECOND, StagedColumns
from salientpp.datasets.tabular.frame_columns import FRAME, col_stats_of, frame_of
from salientpp.datasets.tabular.rows import RowsInMemory, kept_column
from salientpp.datasets.tabular.source import attributes_of, examine_table
from salientpp.store.directory.origin import table_origin
from salientpp.store.frames import check_installed, with_tables
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    from torch_geometric.typing import TensorFrame

#: Rows of the tables that are read at a time, and bytes of an attribute that are made at a time.
_ROWS, _BYTES = 2**16, 2**24

#: Unit of times in a manifest -> its microseconds.
_MICROSECONDS = {"second": SECOND, "microsecond": 1, None: SECOND}


@dataclass(frozen=True)
class Encoding:
    """Encoder of later rows of the tables that a graph was made of. :func:`load_encoding` makes it.

    Attributes:
        root: the graph.
        origin: the entry ``tables`` of its manifest.
    """

    root: Path
    origin: Mapping[str, Any] = field(repr=False)

    @property
    def digest(self) -> str:
        """Text that differs if columns are encoded in another way."""
        facts = {
            title: {name: value for name, value in of_title.items() if name not in ("from", "left_out", "split")}
            for title, of_title in self.origin["tables"].items()
        }
        return sha256(json.dumps([facts, self.origin["time_unit"]], sort_keys=True).encode()).hexdigest()

    @property
    def unit(self) -> int:
        """Microseconds of the unit of all times."""
        return _MICROSECONDS[self.origin["time_unit"]]

    def encode(self, table: object, entry: str | tuple[str, str, str]) -> dict[str, Tensor | TensorFrame]:
        """Encodes rows as :func:`~salientpp.datasets.convert` would have encoded them in the tables of the graph.

        Columns with other names, such as keys, are not read. The column of the label may be missing; ``y`` is then left out. Splits give no masks.

        Args:
            table: rows of the entry's tables, in any order: an object of pyarrow, pandas, polars or DuckDB (with ``__arrow_c_stream__``), or an address.
            entry: the type of the vertices, or the relation of the edges as a tuple or as ``"source,relation,target"``.

        Returns:
            Attributes by name: a tensor [n, ...] with the dtype and the row shape of the graph's, in the order of the rows. ``tf`` is a ``TensorFrame``.

        Raises:
            ValueError: the graph has no such entry, a column is missing or has another type, or a value cannot be encoded. The text names the row.
            ImportError: pyarrow is missing, or PyTorch Frame for ``tf``.
        """
        title = self._title(entry)
        facts = self.facts(title)
        with tempfile.TemporaryDirectory() as folder:
            opened = open_table([table], Path(), title)
            opened.spool(Path(folder))
            plan = self._plan_of_rows(title, opened.schema)
            read = [] if plan is None else list(opened.batches(plan.staged, _ROWS))
        if plan is None:
            return {}
        batches = [_plain(plan.prepare(each.batch, each.where)) for each in read]
        staged = StagedColumns(plan, RowsInMemory(batches), _Names(read))
        examine_table(staged, facts, self.unit)
        tensors = {name: self._tensor(name, rows) for name, rows in attributes_of(staged, facts, self.unit).items()}
        frames = {FRAME: frame_of(facts[FRAME])} if plan.framed else {}
        if frames:
            check_installed(f"{title} of {self.root}", frames.values())
        return with_tables(tensors, frames, sum(batch.num_rows for batch in batches))

    def col_stats(self, type_: str) -> dict[str, dict[Any, Any]]:
        """Returns statistics of the columns of ``tf``, as encoders of PyTorch Frame take them: column -> ``StatType`` -> value.

        Statistics are of the training split, if the type has a split. Categories are in the order of their numbers.

        Raises:
            ValueError: vertices of this type have no ``tf``.
            ImportError: PyTorch Frame is not installed.
        """
        title = self._title(type_)
        facts = self.facts(title)
        if FRAME not in facts:
            raise ValueError(
                f"{title} of {self.root} has no TensorFrame; set frame = true in its entry, and convert again"
            )
        check_installed(f"{title} of {self.root}", [frame_of(facts[FRAME])])
        return col_stats_of(facts[FRAME])

    # --- plans --------------------------------------------------------------------------------------------

    def facts(self, title: str) -> Mapping[str, Any]:
        """Returns what is known of the columns of an entry. Raises ValueError if the graph has no entry of this title, such as ``nodes.customer``."""
        known = self.origin["tables"]
        if title not in known:
            raise ValueError(
                f"{self.root} was not made of {title}; it has {', '.join(known)}{did_you_mean(title, list(known))}"
            )
        found: Mapping[str, Any] = known[title]
        return found

    def _title(self, entry: object) -> str:
        if isinstance(entry, tuple) and all(isinstance(word, str) for word in entry):
            return f"edges.{','.join(entry)}"
        if not isinstance(entry, str):
            raise ValueError(f"entry must be a type of vertices or a relation, got {entry!r}")
        return f"{'edges' if ',' in entry else 'nodes'}.{entry}"

    def same_plan(self, plan: ColumnPlan, schema: pa.Schema) -> ColumnPlan:
        """Returns the plan of the graph for the columns of other tables of an entry, whose own plan is ``plan``.

        Raises ValueError if the columns become other attributes than those of the graph, or have other types.
        """
        known = self._plan(plan.title)
        for of, own, other in (
            ("attributes", _uses(plan), _uses(known)),
            ("values of x", _places(plan), _places(known)),
            ("values of fill", _filled(plan), _filled(known)),
        ):
            for column in sorted(own.keys() | other.keys()):
                if own.get(column) != other.get(column):
                    raise ValueError(
                        f"{plan.title}: its columns must have the {of} of {self.root}, but {column!r} has {own.get(column, 'none')} here and "
                        f"{other.get(column, 'none')} there; correct the description or the column, or convert without the earlier encoding"
                    )
        self._check_types(known, schema)
        return replace(known, left_out=plan.left_out)

    def _plan_of_rows(self, title: str, schema: pa.Schema) -> ColumnPlan | None:
        """Returns the plan for rows with some columns, without the split; None if the entry has no attributes. Raises ValueError if a column is missing."""
        known = self._plan(title)
        columns = tuple(each for each in known.columns if each.attribute != "y" or each.column in schema.names)
        needed = {each.column for each in (*columns, *known.framed)} | set(known.joined)
        for name in sorted(needed):
            if name not in schema.names:
                raise ValueError(
                    f"{title}: the rows must have the column {name!r}, as the tables of {self.root} have, but have only {', '.join(schema.names)}; add it"
                    f"{did_you_mean(name, schema.names)}"
                )
        types = {name: type_ for name, type_ in known.types.items() if name in needed}
        plan = replace(known, columns=columns, split=None, types=types)
        self._check_types(plan, schema)
        return plan if types else None

    def _check_types(self, plan: ColumnPlan, schema: pa.Schema) -> None:
        """Raises ValueError if a column of ``schema`` has a type whose values the plan's type does not hold."""
        for name, wanted in plan.types.items():
            type_ = schema.field(name).type
            found = staged_type(type_)
            fits = str(type_) == "null" or (
                found is not None and (found[0] == MOMENT) == (name in plan.moments) and _holds(wanted, found[1])
            )
            if not fits:
                expected = "timestamps or dates" if name in plan.moments else str(wanted).removeprefix("large_")
                raise ValueError(
                    f"{plan.title}: column {name!r} must hold {expected}, as in the tables of {self.root}, got {type_}; cast it"
                )

    def _plan(self, title: str) -> ColumnPlan:
        """Returns the plan with which the tables of an entry were converted."""
        facts = self.facts(title)
        types: dict[str, Any] = {}
        fill: dict[str, Any] = {}
        moments = set()

        def planned(name: str, each: Mapping[str, Any], attribute: str) -> PlannedColumn:
            import pyarrow as pa

            kind = {"class": CATEGORY, "label": NUMBER}.get(each["kind"], each["kind"])
            own = pa.type_for_alias(each["type"])
            types[name] = pa.large_list(own) if kind == LIST else own
            if "fill" in each:
                fill[name] = pa.scalar(each["fill"], types[name])
            if kind == MOMENT:
                moments.add(name)
            return PlannedColumn(name, attribute, kind, types[name], each["kind"] in ("class", "label"))

        columns = tuple(planned(name, each, each["attribute"]) for name, each in sorted(facts["columns"].items()))
        framed = tuple(planned(each["column"], each, FRAME) for each in facts.get(FRAME, ()))
        joined = tuple(planned(each["column"], {"kind": NUMBER, **each}, "x").column for each in facts.get("x", ()))
        split = facts.get("split")
        if split:
            planned(split["column"], {"kind": CATEGORY, **split}, "split")
        in_order = {name: types[name] for name in sorted(types)}
        return ColumnPlan(
            title, columns, split and split["column"], joined, framed, in_order, fill, {}, frozenset(moments)
        )

    def _tensor(self, name: str, rows: Rows) -> Tensor:
        options = self.origin["options"]
        dtype, finite = options["dtype"].get(name), options["finite"]
        return torch.cat([narrowed(name, piece, dtype, finite) for piece in rows.pieces(_BYTES)])


def load_encoding(root: str | Path) -> Encoding:
    """Loads the encoding of a graph that was made of tables with keys: a converted graph, or a dataset directory.

    Raises:
        ValueError: the graph was not made of tables with keys.
        DatasetError: the directory is damaged, or is no graph.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise ValueError(f"root must be a directory, got {root!r}")
    root = Path(os.fspath(root).removeprefix("converted:"))
    origin = table_origin(root)
    if not origin:
        raise ValueError(
            f"{root} was not made of tables with keys, so it has no encoding; convert tables:FILE.toml for one"
        )
    return Encoding(root, origin)


@dataclass(frozen=True)
class _Names:
    """Names a row by its place in the tables that were read, for errors."""

    read: Sequence[TableBatch]

    def __call__(self, row: int) -> str:
        begins = [0]
        for each in self.read:
            begins.append(begins[-1] + each.batch.num_rows)
        at = bisect_right(begins, row) - 1
        where: Callable[[int], str] = self.read[at].where
        return where(row - begins[at])


def _plain(batch: Any) -> Any:
    """Returns staged columns in the form in which a conversion keeps them."""
    arrays = [kept_column(column) for column in batch.columns]
    return type(batch).from_arrays(arrays, names=batch.schema.names)


def _holds(wanted: Any, type_: Any) -> bool:
    """Returns if columns of an Arrow type may become ``wanted``. Integers are compared value by value when they are cast."""
    from pyarrow import types

    if wanted == type_:
        return True
    if types.is_large_list(wanted) and types.is_large_list(type_):
        return _holds(wanted.value_type, type_.value_type)
    if not all(types.is_integer(each) or types.is_floating(each) for each in (wanted, type_)):
        return False
    both_floats = types.is_floating(wanted) and types.is_floating(type_)
    return type_.bit_width <= wanted.bit_width if both_floats else not types.is_float16(wanted)


def _uses(plan: ColumnPlan) -> dict[str, str]:
    uses = {each.column: each.attribute for each in (*plan.columns, *plan.framed)}
    return uses | ({plan.split: "split"} if plan.split else {})


def _places(plan: ColumnPlan) -> dict[str, str]:
    return {column: f"the place {place}" for place, column in enumerate(plan.joined)}


def _filled(plan: ColumnPlan) -> dict[str, str]:
    return {name: repr(value.as_py()) for name, value in plan.fill.items()}
