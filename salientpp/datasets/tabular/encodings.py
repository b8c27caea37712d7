"""Makes tensors of staged columns: numbers, numbers of categories, times in one unit, and standardised features.

A column is read once to find what its encoding depends on, such as its categories or its mean. These facts are JSON, and the converted graph stores them, so
that later data can be encoded in the same way. Facts are found in pieces of fixed size, so they do not depend on the memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from salientpp.datasets.converted.pieces import RowPiece, Rows
from salientpp.datasets.tabular.columns import CATEGORY, LIST, MOMENT, ColumnPlan, PlannedColumn
from salientpp.datasets.tabular.rows import RowFile, joined

#: Rows that are examined at a time. Sums of floats depend on it, so it never changes.
_ROWS = 2**16

#: Most categories of a column, and most bytes of their texts.
MOST_CATEGORIES, MOST_CATEGORY_BYTES = 100_000, 2**24

#: Largest number in ``x``, so that sums of squares are finite. Some programs write 1.8e308, the largest float, where a value is missing.
_LARGEST = 1e140

#: Values of a column that a warning shows.
_SHOWN = 5

#: Microseconds of a second.
SECOND = 1_000_000

#: Encoded value of a text that is missing or not a category.
NO_CATEGORY = -1


@dataclass(frozen=True)
class StagedColumns:
    """Columns of vertices or edges in their final order. ``name_row`` names a row in errors, such as by its key."""

    plan: ColumnPlan
    file: RowFile
    name_row: Callable[[int], str]

    def chunks(self, columns: Sequence[str], most_rows: int) -> Iterator[tuple[int, list[Any]]]:
        """Yields (number of the first row, Arrow array of each column). All chunks but the last have ``most_rows`` rows, for sums that depend on it.

        Nulls are filled here, and not where tables are read, because vertices that only edges name have nulls too.
        """
        first, held, missing = 0, [], most_rows
        for batch in self.file.batches(columns, most_rows):
            while batch.num_rows:
                held.append(batch.slice(0, missing))
                batch, missing = batch.slice(missing), missing - held[-1].num_rows
                if not missing:
                    yield first, self._joined(held, columns)
                    first, held, missing = first + most_rows, [], most_rows
        if held:
            yield first, self._joined(held, columns)

    def batches(self, columns: Sequence[str], most_rows: int | None = None) -> Iterator[tuple[int, list[Any]]]:
        """Yields the same rows as :meth:`chunks`, in pieces of at most ``most_rows`` rows. They are not larger than the batches of the file."""
        first = 0
        for batch in self.file.batches(columns, most_rows):
            yield first, self._joined([batch], columns)
            first += batch.num_rows

    def _joined(self, batches: Sequence[Any], columns: Sequence[str]) -> list[Any]:
        arrays, fill = joined(batches, batches[0].schema).columns, self.plan.fill
        return [array.fill_null(fill[name]) if name in fill else array for name, array in zip(columns, arrays)]

    def error(self, column: str, row: int, text: str) -> ValueError:
        """Returns the error for the value of a row."""
        return ValueError(f"{self.plan.title}: column {column!r} {text} ({self.name_row(row)})")


# --- facts ------------------------------------------------------------------------------------------------


def examine_columns(staged: StagedColumns) -> dict[str, Any]:
    """Finds the facts that the encodings of all columns need. Returns JSON: ``columns`` by name, and ``x`` if columns are joined.

    Raises ValueError if a value is missing that must be there, or a column has too many categories.
    """
    plan = staged.plan
    facts: dict[str, Any] = {"columns": {each.column: _examine(staged, each) for each in plan.columns}}
    if plan.joined:
        facts["x"] = [_examine_joined(staged, column) for column in plan.joined]
    return facts


def _examine(staged: StagedColumns, planned: PlannedColumn) -> dict[str, Any]:
    facts: dict[str, Any] = {"attribute": planned.attribute, "kind": planned.kind}
    if planned.kind == CATEGORY:
        categories = _categories(staged, planned.column, of_train=not planned.is_label)
        return {**facts, "kind": "class" if planned.is_label else CATEGORY, "categories": categories}
    if planned.kind == MOMENT:
        return {**facts, "has_fractions": _has_fractions(staged, planned.column)}
    if planned.kind == LIST:
        return {**facts, "width": _width(staged, planned)}
    if planned.is_label:
        return {**facts, "kind": "label", **_label_facts(staged, planned)}
    if not _is_float(planned.type):
        _refuse_nulls(staged, planned.column)
    return facts


def _is_float(type_: Any) -> bool:
    return str(type_) in ("halffloat", "float", "double")


def _refuse_nulls(staged: StagedColumns, column: str) -> None:
    for first, (array,) in staged.batches([column]):
        _refuse_null(staged, column, first, array)


def _refuse_null(staged: StagedColumns, column: str, first: int, array: Any) -> None:
    if array.null_count:
        row = first + int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        advice = "" if "list" in str(array.type) else f"set a value with fill = {{ {column} = ... }}, or "
        raise staged.error(
            column,
            row,
            f"of {array.type} has no value in a row; {advice}name it in drop",
        )


def warn_without_training(staged: StagedColumns, stacklevel: int) -> None:
    """Warns if the type has a split, and no row is of the training split."""
    column = staged.plan.split
    if column is None:
        return
    found: set[str] = set()
    for _, (array,) in staged.batches([column]):
        texts = array.unique().drop_null().to_pylist()
        if "train" in texts:
            return
        found |= set(texts[:_SHOWN])
    if staged.file.num_rows:
        shown = ", ".join(map(repr, sorted(found)[:_SHOWN])) or "no values"
        warnings.warn(
            f"{staged.plan.title}: no row has 'train' in the column {column!r} of the split, but {shown}; so texts have no categories, and x is not "
            "standardised. Write train, val and test",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _in_train(split: Any) -> Any:
    from pyarrow import compute

    return compute.fill_null(compute.equal(split, "train"), False)


def _categories(staged: StagedColumns, column: str, of_train: bool) -> list[str]:
    """Returns the texts of a column, ascending. If the type has a split, and ``of_train``, only those of the training split count."""
    found: set[str] = set()
    split = staged.plan.split if of_train else None
    nbytes = 0
    for _, arrays in staged.batches([column, *([split] if split else [])]):
        texts = arrays[0].filter(_in_train(arrays[1])) if split else arrays[0]
        new = set(texts.unique().drop_null().to_pylist()) - found
        found |= new
        nbytes += sum(len(text.encode()) for text in new)
        if len(found) > MOST_CATEGORIES or nbytes > MOST_CATEGORY_BYTES:
            raise ValueError(
                f"{staged.plan.title}: column {column!r} must have at most {MOST_CATEGORIES:,} different texts, of {MOST_CATEGORY_BYTES:,} bytes in "
                "all, to become categories, but has more; name it in drop, or make it a vertex type of its own"
            )
    return sorted(found)


def _has_fractions(staged: StagedColumns, column: str) -> bool:
    has_fractions = False
    for first, (array,) in staged.batches([column]):
        _refuse_null(staged, column, first, array)
        has_fractions |= bool((array.to_numpy(zero_copy_only=False) % SECOND).any())
    return has_fractions


def _width(staged: StagedColumns, planned: PlannedColumn) -> int:
    """Returns the number of entries of each list. Raises ValueError if lists differ in it, or if integers are missing."""
    from pyarrow import compute

    width = None
    for first, (array,) in staged.batches([planned.column]):
        if not _is_float(planned.type.value_type):
            _refuse_null(staged, planned.column, first, array)
            if array.flatten().null_count:
                raise staged.error(
                    planned.column,
                    first,
                    "has a list in which a value is missing, here or in a row after it; correct it, or name it in drop",
                )
        lengths = compute.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths >= 0)[:1] if width is None else ():
            width = int(lengths[row])
        wrong = (lengths >= 0) & (lengths != width)
        if wrong.any():
            at = int(wrong.argmax())
            raise staged.error(
                planned.column, first + at, f"must have {width} numbers in each row, got {lengths[at]}; name it in drop"
            )
    return width or 0


def _label_facts(staged: StagedColumns, planned: PlannedColumn) -> dict[str, Any]:
    """Returns the facts about numbers as labels. Missing integers become -1, which no label may be then."""
    if _is_float(planned.type):
        return {}
    if str(planned.type) == "bool":
        return {"categories": [False, True]}
    missing = negative = None
    for first, (array,) in staged.batches([planned.column]):
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        if array.null_count and missing is None:
            missing = first + int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        if negative is None and (values < 0).any():
            negative = first + int((values < 0).argmax())
    if missing is not None and negative is not None:
        raise staged.error(
            planned.column,
            negative,
            "has negative labels and rows without one, which would become -1; set a value with fill",
        )
    return {}


def _examine_joined(staged: StagedColumns, column: str) -> dict[str, Any]:
    """Returns mean and standard deviation of a column, of the training split if the type has a split. A constant column has the deviation 1.

    Raises ValueError if a row of any split is infinite, or so large that its square is not a float.
    """
    least, most = math.inf, -math.inf
    count, sums = 0, []
    for first, values, counts in _values(staged, column):
        wrong = np.abs(values) > _LARGEST
        if wrong.any():
            at = int(wrong.argmax())
            need, got = ("finite", "infinity") if np.isinf(values[at]) else (f"at most {_LARGEST} in size", values[at])
            raise staged.error(
                column, first + at, f"must be {need} to become part of x, got {got}; correct it, or name it in drop"
            )
        kept = values[counts]
        least, most = (float(of(kept, initial=found)) for of, found in ((np.min, least), (np.max, most)))
        count += kept.size
        sums.append(float(kept.sum()))
    if not least < most:  # a sum of equal floats is rounded, so its mean differs from them
        return {"column": column, "mean": least + 0.0 if least == most else 0.0, "std": 1.0}
    mean = math.fsum(sums) / count
    squares = [float(((values[counts] - mean) ** 2).sum()) for _, values, counts in _values(staged, column)]
    return {"column": column, "mean": mean, "std": math.sqrt(math.fsum(squares) / count) or 1.0}


def _values(staged: StagedColumns, column: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (first row, float64 values [n], bool mask [n] of those of the training split that are not missing)."""
    split = staged.plan.split
    for first, arrays in staged.chunks([column, *([split] if split else [])], _ROWS):
        values = _floats(arrays[0])
        counts = ~np.isnan(values)
        if split:
            counts &= _in_train(arrays[1]).to_numpy(zero_copy_only=False)
        yield first, values, counts


def _floats(array: Any) -> np.ndarray:
    """Returns numbers as float64 [n]; a missing one is NaN."""
    values = array.cast("int8") if str(array.type) == "bool" else array
    return values.cast("float64", safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)


# --- tensors ----------------------------------------------------------------------------------------------


def encoded_rows(staged: StagedColumns, planned: PlannedColumn, facts: Mapping[str, Any], unit: int) -> Rows:
    """Returns the rows of an attribute. ``unit`` is the number of microseconds of the unit of all times."""
    encode = _encoder(planned, facts, unit)
    width = facts.get("width", 1)
    return _rows(staged, [planned.column], 8 * max(1, width), lambda arrays: encode(arrays[0]))


def _encoder(planned: PlannedColumn, facts: Mapping[str, Any], unit: int) -> Callable[[Any], np.ndarray]:
    import pyarrow
    from pyarrow import compute

    kind = facts["kind"]
    if kind in (CATEGORY, "class"):
        categories = pyarrow.array(facts["categories"], pyarrow.large_string())
        return lambda array: (
            compute.index_in(array, value_set=categories)
            .fill_null(NO_CATEGORY)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
    if kind == MOMENT:
        return lambda array: array.to_numpy(zero_copy_only=False) // unit
    if kind == LIST:
        return lambda array: _list_values(array, facts["width"])
    if _is_float(planned.type):
        return lambda array: array.to_numpy(zero_copy_only=False)  # missing ones become NaN
    if kind == "label":
        return lambda array: array.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
    if planned.attribute == "time":
        return lambda array: array.to_numpy(zero_copy_only=False).astype(np.int64)
    return lambda array: array.to_numpy(zero_copy_only=False)


def _list_values(array: Any, width: int) -> np.ndarray:
    """Returns lists of floats or integers as [n, width]. Missing lists and entries are NaN."""
    inner = array.flatten()
    if str(inner.type) == "bool" or not _is_float(inner.type):
        return inner.to_numpy(zero_copy_only=False).reshape(len(array), width)
    values = inner.to_numpy(zero_copy_only=False)
    rows = np.full((len(array), width), math.nan, values.dtype)
    rows[array.is_valid().to_numpy(zero_copy_only=False)] = values.reshape(-1, width) if width else 0
    return rows


def joined_rows(staged: StagedColumns, facts: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns the rows of ``x``, float32 [n, columns]: each column with mean 0 and variance 1 on the training rows. A missing value becomes the mean, 0."""
    names = [each["column"] for each in facts]

    def join(arrays: Sequence[Any]) -> np.ndarray:
        scaled = [(_floats(array) - each["mean"]) / each["std"] for array, each in zip(arrays, facts)]
        return np.nan_to_num(np.stack(scaled, axis=1)).astype(np.float32)

    return _rows(staged, names, 20 * len(names), join)


def split_mask_rows(staged: StagedColumns, column: str, split: str) -> Rows:
    """Returns the mask of a split, bool [n]: True where the column has the name of the split."""
    from pyarrow import compute

    def mask(arrays: Sequence[Any]) -> np.ndarray:
        return compute.fill_null(compute.equal(arrays[0], split), False).to_numpy(zero_copy_only=False)

    return _rows(staged, [column], 8, mask)


def _rows(
    staged: StagedColumns, columns: Sequence[str], row_bytes: int, encode: Callable[[Sequence[Any]], np.ndarray]
) -> Rows:
    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        done = 0
        for first, arrays in staged.batches(columns, max(1, most_bytes // row_bytes)):
            done = first + len(arrays[0])
            values = np.require(encode(arrays), requirements=["C", "W"])
            yield RowPiece(torch.from_numpy(values), _namer(staged, columns, first), done)
        if not done:
            empty = encode([_empty(staged, name) for name in columns])
            yield RowPiece(torch.from_numpy(np.require(empty, requirements=["C", "W"])), lambda _: staged.plan.title, 0)

    return Rows(pieces, staged.file.num_rows, staged.file.num_rows)


def _empty(staged: StagedColumns, column: str) -> Any:
    import pyarrow

    return pyarrow.array([], staged.plan.types[column])


def _namer(staged: StagedColumns, columns: Sequence[str], first: int) -> Callable[[int], str]:
    return lambda row: f"{staged.plan.title}, {', '.join(columns)} of {staged.name_row(first + row)}"
