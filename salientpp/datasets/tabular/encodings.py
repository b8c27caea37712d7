"""Makes tensors of staged columns: numbers, numbers of categories, times in one unit, and standardised features.

A column is read once to find what its encoding depends on, such as its categories or its mean. These facts are JSON, and the converted graph stores them, so
that later data can be encoded in the same way. Facts are found in pieces of fixed size, so they do not depend on the memory.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from salientpp.datasets.converted.pieces import RowPiece, Rows
from salientpp.datasets.tabular.columns import CATEGORY, LIST, MOMENT, ColumnPlan, PlannedColumn
from salientpp.datasets.tabular.keyed import rows_that_have
from salientpp.datasets.tabular.rows import RowFile, RowsInMemory, joined

#: Rows that are examined at a time. Sums of floats depend on it, so it never changes.
_ROWS = 2**16

#: Most categories of a column, and most bytes of their texts.
MOST_CATEGORIES, MOST_CATEGORY_BYTES = 100_000, 2**24

#: Split -> words of a column of splits that stand for it.
SPLIT_WORDS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}

#: Largest number in ``x``, so that sums of squares are finite. Some programs write 1.8e308, the largest float, where a value is missing.
_LARGEST = 1e140

#: Largest number that float32 holds.
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

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
    file: RowFile | RowsInMemory
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


def examine_columns(staged: StagedColumns, known: Mapping[str, Any] | None = None, unit: int = 0) -> dict[str, Any]:
    """Finds the facts that the encodings of all columns need. Returns JSON: ``columns`` by name, and ``x``, ``tf`` and ``split`` if the plan has them.

    ``known`` has the facts of an earlier graph with the same plan, whose times have a unit of ``unit`` microseconds. The columns are then only compared with
    these facts, which are returned.

    Raises ValueError if a value is missing that must be there, a column has too many categories, or a value cannot be encoded with the known facts.
    """
    plan = staged.plan
    of_columns = known["columns"] if known else {}
    facts: dict[str, Any] = {
        "columns": {each.column: _examine(staged, each, of_columns.get(each.column), unit) for each in plan.columns}
    }
    if plan.joined:
        facts["x"] = [
            _examine_joined(staged, column, known["x"][number] if known else None)
            for number, column in enumerate(plan.joined)
        ]
    if plan.split:
        facts["split"] = {"column": plan.split, **stored_type(plan, plan.split), **_examine_split(staged, plan.split)}
    return facts


def stored_type(plan: ColumnPlan, column: str) -> dict[str, Any]:
    """Returns JSON: the type that a column is staged in, of lists that of their values, and the value of ``fill``."""
    type_ = plan.types[column]
    filled = {"fill": plan.fill[column].as_py()} if column in plan.fill else {}
    return {"type": str(getattr(type_, "value_type", type_)), **filled}


def _examine(
    staged: StagedColumns, planned: PlannedColumn, known: Mapping[str, Any] | None, unit: int
) -> dict[str, Any]:
    column = planned.column
    facts: dict[str, Any] = {
        "attribute": planned.attribute,
        "kind": planned.kind,
        **stored_type(staged.plan, column),
    }
    if planned.kind == CATEGORY:
        of_train = not planned.is_label
        categories = known["categories"] if known else list(count_categories(staged, column, of_train))
        return {**facts, "kind": CATEGORY if of_train else "class", "categories": categories}
    if planned.kind == MOMENT:
        row = _first_fraction(staged, column)
        if known and row is not None and unit == SECOND:
            raise staged.error(
                column,
                row,
                "must be whole seconds, as the times of the graph are, got a fraction of a second; round it, or convert all tables again without the "
                "earlier encoding",
            )
        return {**facts, "has_fractions": known["has_fractions"] if known else row is not None}
    if planned.kind == LIST:
        may_miss = _is_float(planned.type.value_type)
        return {**facts, "width": list_width(staged, column, may_miss, known["width"] if known else None)}
    if planned.is_label:
        return {**facts, "kind": "label", **_label_facts(staged, planned, known)}
    if not _is_float(planned.type):
        _refuse_nulls(staged, column)
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


def _examine_split(staged: StagedColumns, column: str) -> dict[str, Any]:
    """Counts the rows of each split, and those with other words. Returns JSON: ``rows``, ``other_rows``, and ``others``, the first other words."""
    rows, others, num_others = dict.fromkeys(SPLIT_WORDS, 0), Counter[str](), 0
    split_of = {word: split for split, words in SPLIT_WORDS.items() for word in words}
    for _, (array,) in staged.batches([column]):
        for each in array.drop_null().value_counts().to_pylist():
            word, count = each["values"], each["counts"]
            if word in split_of:
                rows[split_of[word]] += count
            else:
                others[word] += count
                num_others += count
        # The first words in alphabetical order have been counted in all batches, whatever their order.
        others = Counter({word: others[word] for word in sorted(others)[:_SHOWN]})
    return {"rows": rows, "other_rows": num_others, "others": dict(others)}


def warn_of_split(title: str, facts: Mapping[str, Any], needs_training: bool, stacklevel: int) -> None:
    """Warns if rows have other words than splits, or no row is of the training split and ``needs_training``. ``facts`` are of :func:`examine_columns`."""
    split = facts.get("split")
    if split is None:
        return
    shown = ", ".join(f"{word!r} ({count:,})" for word, count in split["others"].items())
    num_shown = sum(split["others"].values())
    if split["other_rows"]:
        warnings.warn(
            f"{title}: {rows_that_have(split['other_rows'])} other words in the column {split['column']!r} of the split than train, val (or valid, validation) "
            f"and test: {shown}{' and more' if num_shown < split['other_rows'] else ''}; such rows are in no split. Write one of these words, or none",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
    if needs_training and not split["rows"]["train"]:
        warnings.warn(
            f"{title}: no row has 'train' in the column {split['column']!r} of the split; so texts have no categories, and x is not standardised. Write train, "
            "val and test",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def in_train(split: Any) -> Any:
    """Returns an Arrow array of booleans: True where a column of splits says that a row is of the training split."""
    from pyarrow import compute

    return compute.fill_null(compute.equal(split, "train"), False)


def count_categories(staged: StagedColumns, column: str, of_train: bool) -> dict[str, int]:
    """Returns the texts of a column, ascending, and their numbers of rows. If the type has a split, and ``of_train``, only the training split counts."""
    found = Counter[str]()
    split = staged.plan.split if of_train else None
    nbytes = 0
    for _, arrays in staged.batches([column, *([split] if split else [])]):
        texts = arrays[0].filter(in_train(arrays[1])) if split else arrays[0]
        for each in texts.drop_null().value_counts().to_pylist():
            nbytes += len(each["values"].encode()) if each["values"] not in found else 0
            found[each["values"]] += each["counts"]
        if len(found) > MOST_CATEGORIES or nbytes > MOST_CATEGORY_BYTES:
            raise ValueError(
                f"{staged.plan.title}: column {column!r} must have at most {MOST_CATEGORIES:,} different texts, of {MOST_CATEGORY_BYTES:,} bytes in "
                "all, to become categories, but has more; name it in drop, or make it a vertex type of its own"
            )
    return dict(sorted(found.items()))


def _first_fraction(staged: StagedColumns, column: str) -> int | None:
    """Returns the first row whose time has a fraction of a second. Raises ValueError if a time is missing."""
    row = None
    for first, (array,) in staged.batches([column]):
        _refuse_null(staged, column, first, array)
        has_fraction = array.to_numpy(zero_copy_only=False) % SECOND != 0
        if row is None and has_fraction.any():
            row = first + int(has_fraction.argmax())
    return row


def list_width(staged: StagedColumns, column: str, may_miss: bool, width: int | None) -> int:
    """Returns the number of entries of each list. Raises ValueError if lists differ in it or from ``width``, or a value is missing and not ``may_miss``."""
    from pyarrow import compute

    for first, (array,) in staged.batches([column]):
        if not may_miss:
            _refuse_null(staged, column, first, array)
            if array.flatten().null_count:
                raise staged.error(
                    column,
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
                column, first + at, f"must have {width} numbers in each row, got {lengths[at]}; name it in drop"
            )
    return width or 0


def _label_facts(staged: StagedColumns, planned: PlannedColumn, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the facts about numbers as labels. Missing integers become -1, so no label may be negative then, here or in the graph of ``known``."""
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
    has_negative = known["has_negative"] if known else negative is not None
    if missing is not None and (has_negative or negative is not None):
        raise staged.error(
            planned.column,
            missing if negative is None else negative,
            "has negative labels and rows without one, which would become -1; set a value with fill",
        )
    return {"has_negative": has_negative}


def _examine_joined(staged: StagedColumns, column: str, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns mean and standard deviation of a column of ``x``. A constant column has the deviation 1."""
    if known:
        sizes = [_size(values) for values, _ in checked_values(staged, column, _LARGEST, "x")]
        facts, size = dict(known), max(sizes, default=0.0)
    else:
        _, mean, deviation, size = mean_and_deviation(staged, column, _LARGEST, "x")
        facts = {"column": column, **stored_type(staged.plan, column), "mean": mean, "std": deviation or 1.0}
    if (size + abs(facts["mean"])) / facts["std"] > LARGEST_FLOAT32:  # seldom, so that another pass costs little
        _refuse_far(staged, column, facts)
    return facts


def _size(values: np.ndarray) -> float:
    """Returns the largest absolute value; 0 if there is none."""
    return float(np.fmax.reduce(np.abs(values), initial=0.0))


def _refuse_far(staged: StagedColumns, column: str, facts: Mapping[str, Any]) -> None:
    """Raises ValueError if a standardised value is too large for float32."""
    for first, values, _ in _values(staged, column):
        with np.errstate(over="ignore"):
            far = np.abs(values - facts["mean"]) / facts["std"] > LARGEST_FLOAT32
        if far.any():
            at = int(far.argmax())
            raise staged.error(
                column,
                first + at,
                f"must be near the mean {facts['mean']:g} and deviation {facts['std']:g} of x, got {values[at]}, which would be infinite in float32; "
                "correct it, or name it in drop",
            )


def mean_and_deviation(
    staged: StagedColumns, column: str, largest: float, attribute: str
) -> tuple[int, float, float, float]:
    """Returns the number of values of the training split, their mean and their standard deviation, and the largest size of a value of any split.

    Without values, they are 0. Raises ValueError as :func:`checked_values` does.
    """
    least, most, size = math.inf, -math.inf, 0.0
    count, sums = 0, []
    for values, counts in checked_values(staged, column, largest, attribute):
        size = max(size, _size(values))
        kept = values[counts]
        least, most = (float(of(kept, initial=found)) for of, found in ((np.min, least), (np.max, most)))
        count += kept.size
        sums.append(float(kept.sum()))
    if not least < most:  # a sum of equal floats is rounded, so its mean differs from them
        return count, least + 0.0 if count else 0.0, 0.0, size
    mean = math.fsum(sums) / count
    squares = [float(((values[counts] - mean) ** 2).sum()) for _, values, counts in _values(staged, column)]
    return count, mean, math.sqrt(math.fsum(squares) / count), size


def checked_values(
    staged: StagedColumns, column: str, largest: float, attribute: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (float64 values [n], bool mask [n] of those of the training split that are not missing).

    Raises ValueError if a row of any split is infinite, or larger than ``largest``.
    """
    for first, values, counts in _values(staged, column):
        wrong = np.abs(values) > largest
        if wrong.any():
            at = int(wrong.argmax())
            need, got = ("finite", "infinity") if np.isinf(values[at]) else (f"at most {largest} in size", values[at])
            raise staged.error(
                column,
                first + at,
                f"must be {need} to become part of {attribute}, got {got}; correct it, or name it in drop",
            )
        yield values, counts


def _values(staged: StagedColumns, column: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (first row, float64 values [n], bool mask [n] of those of the training split that are not missing)."""
    split = staged.plan.split
    for first, arrays in staged.chunks([column, *([split] if split else [])], _ROWS):
        values = floats(arrays[0])
        counts = ~np.isnan(values)
        if split:
            counts &= in_train(arrays[1]).to_numpy(zero_copy_only=False)
        yield first, values, counts


def floats(array: Any) -> np.ndarray:
    """Returns numbers as float64 [n]; a missing one is NaN."""
    values = array.cast("int8") if str(array.type) == "bool" else array
    return values.cast("float64", safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)


# --- tensors ----------------------------------------------------------------------------------------------


def encoded_rows(staged: StagedColumns, planned: PlannedColumn, facts: Mapping[str, Any], unit: int) -> Rows:
    """Returns the rows of an attribute. ``unit`` is the number of microseconds of the unit of all times."""
    encode = _encoder(planned, facts, unit)
    width = facts.get("width", 1)
    return rows_of(staged, [planned.column], 8 * max(1, width), lambda arrays: encode(arrays[0]))


def _encoder(planned: PlannedColumn, facts: Mapping[str, Any], unit: int) -> Callable[[Any], np.ndarray]:
    kind = facts["kind"]
    if kind in (CATEGORY, "class"):
        return lambda array: category_numbers(array, facts["categories"])
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


def category_numbers(array: Any, categories: Sequence[Any]) -> np.ndarray:
    """Returns the place of each value among the categories, int64 [n], and -1 for other values."""
    import pyarrow
    from pyarrow import compute

    found = compute.index_in(array, value_set=pyarrow.array(categories, array.type))
    return found.fill_null(NO_CATEGORY).to_numpy(zero_copy_only=False).astype(np.int64)


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
        scaled = [(floats(array) - each["mean"]) / each["std"] for array, each in zip(arrays, facts)]
        return np.nan_to_num(np.stack(scaled, axis=1)).astype(np.float32)

    return rows_of(staged, names, 20 * len(names), join)


def split_mask_rows(staged: StagedColumns, column: str, split: str) -> Rows:
    """Returns the mask of a split, bool [n]: True where the column has a word that stands for the split."""
    import pyarrow
    from pyarrow import compute

    def mask(arrays: Sequence[Any]) -> np.ndarray:
        words = pyarrow.array(SPLIT_WORDS[split], arrays[0].type)
        return compute.is_in(arrays[0], value_set=words).to_numpy(zero_copy_only=False)

    return rows_of(staged, [column], 8, mask)


def rows_of(
    staged: StagedColumns, columns: Sequence[str], row_bytes: int, encode: Callable[[Sequence[Any]], np.ndarray]
) -> Rows:
    """Returns the rows that ``encode`` makes of the Arrow arrays of some columns. One row takes ``row_bytes`` bytes of memory."""

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
