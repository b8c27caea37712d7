"""Makes the ``TensorFrame`` of a vertex type from staged columns, and the statistics that encoders of PyTorch Frame need.

Each column has a semantic type: numbers are ``numerical``, texts and booleans ``categorical``, times ``timestamp``, and lists of one length ``embedding``.
The tensors are stored as :mod:`salientpp.store.frames` describes. Statistics are of the training split, if the type has one, and are JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from salientpp.datasets.converted.pieces import Rows
from salientpp.datasets.tabular.columns import CATEGORY, LIST, MOMENT, PlannedColumn
from salientpp.datasets.tabular.encodings import (
    LARGEST_FLOAT32,
    SECOND,
    StagedColumns,
    category_numbers,
    checked_values,
    count_categories,
    floats,
    in_train,
    list_width,
    mean_and_deviation,
    rows_of,
    stored_type,
)
from salientpp.store.frames import Frame, TablePiece

#: Name of the attribute.
FRAME = "tf"

#: Semantic type -> (kind and dtype of its tensor, bytes of memory for a row of one column). Tensors of a table are in this order.
_TENSORS = {
    "numerical": ("dense", "float32", 24),
    "categorical": ("dense", "int64", 32),
    "timestamp": ("dense", "int64", 200),
    "embedding": ("embedding", "float32", 32),
}

#: Seconds of a day.
_DAY = 24 * 60 * 60

#: Places of the three quartiles among the sorted values.
_QUARTILES = (0.25, 0.5, 0.75)


# --- facts ------------------------------------------------------------------------------------------------


def examine_framed(staged: StagedColumns, known: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Returns JSON about each column of ``tf``: its semantic type and its statistics.

    ``known`` has the facts of an earlier graph. The columns are then only compared with these facts, which are returned.

    Raises ValueError if a value cannot be stored, or a column has too many categories.
    """
    framed = staged.plan.framed
    return [_examine(staged, each, known[number] if known else None) for number, each in enumerate(framed)]


def _examine(staged: StagedColumns, planned: PlannedColumn, known: Mapping[str, Any] | None) -> dict[str, Any]:
    stype, column = _stype(planned), planned.column
    facts = {"column": column, "stype": stype, "kind": planned.kind, **stored_type(staged.plan, column)}
    if stype == "embedding":
        facts["width"] = list_width(staged, column, True, known["width"] if known else None)
        _check_lists(staged, column)
    if stype == "numerical" and known:
        for _ in checked_values(staged, column, LARGEST_FLOAT32, FRAME):
            pass
    if known:
        return dict(known)
    if stype == "numerical":
        facts |= _numerical_facts(staged, column)
    elif stype == "timestamp":
        facts |= _timestamp_facts(staged, column)
    elif planned.kind == CATEGORY:
        categories = count_categories(staged, column, of_train=True)
        facts |= {"categories": list(categories), "counts": list(categories.values())}
    elif stype == "categorical":
        counts = [0, 0]
        for values in _training(staged, column):
            counts = [counts[truth] + int((values == truth).sum()) for truth in (False, True)]
        facts |= {"categories": [False, True], "counts": counts}
    return facts


def _stype(planned: PlannedColumn) -> str:
    if planned.kind == LIST:
        return "embedding"
    if planned.kind == MOMENT:
        return "timestamp"
    return "categorical" if planned.kind == CATEGORY or str(planned.type) == "bool" else "numerical"


def _check_lists(staged: StagedColumns, column: str) -> None:
    """Raises ValueError if a list has a value that is infinite, or too large for float32."""
    for first, (array,) in staged.batches([column]):
        if (np.abs(floats(array.flatten())) > LARGEST_FLOAT32).any():
            raise staged.error(
                column,
                first,
                f"has a list with a value above {LARGEST_FLOAT32} in size, here or in a row after it; correct it, or name it in drop",
            )


def _numerical_facts(staged: StagedColumns, column: str) -> dict[str, Any]:
    """Returns mean, standard deviation, and the quantiles 0, 0.25, 0.5, 0.75 and 1; None if all values are missing."""
    count, mean, deviation, _ = mean_and_deviation(staged, column, LARGEST_FLOAT32, FRAME)
    if not count:
        return {"mean": None, "std": None, "quantiles": None}
    places = [place * (count - 1) for place in _QUARTILES]
    ranks = {0, count - 1, *map(math.floor, places), *map(math.ceil, places)}
    found = values_at_ranks(lambda: _training(staged, column), sorted(ranks))
    quartiles = [
        found[math.floor(place)] + (found[math.ceil(place)] - found[math.floor(place)]) * (place % 1)
        for place in places
    ]
    return {"mean": mean, "std": deviation, "quantiles": [found[0], *quartiles, found[count - 1]]}


def _timestamp_facts(staged: StagedColumns, column: str) -> dict[str, Any]:
    """Returns the oldest, median and newest time, in microseconds since 1970; None if all values are missing."""
    count = sum(values.size for values in _training(staged, column))
    if not count:
        return {"oldest": None, "median": None, "newest": None}
    found = values_at_ranks(lambda: _training(staged, column), sorted({0, count // 2, count - 1}))
    return {"oldest": found[0], "median": found[count // 2], "newest": found[count - 1]}


def _training(staged: StagedColumns, column: str) -> Iterator[np.ndarray]:
    """Yields values [n] of the training split that are not missing. Moments stay integers, and other values become floats."""
    split = staged.plan.split
    for _, arrays in staged.batches([column, *([split] if split else [])]):
        array = arrays[0].filter(in_train(arrays[1])) if split else arrays[0]
        array = array.drop_null()
        values = array.to_numpy(zero_copy_only=False) if column in staged.plan.moments else floats(array) + 0.0
        yield values if values.dtype.kind == "i" else values[~np.isnan(values)]


def values_at_ranks(read: Callable[[], Iterator[np.ndarray]], ranks: Sequence[int]) -> dict[int, Any]:
    """Returns the values that have these places in ascending order, by place. So the values are never sorted, and need not fit in memory.

    ``read`` gives all values, int64 or float64 without NaN, in pieces. It is called four times. Each time, 16 further bits of the values at the places are
    found by counting.
    """
    found = {
        rank: (0, rank) for rank in ranks
    }  # rank -> (leading bits of the value, place among the values with these bits)
    for shift in (48, 32, 16, 0):
        counts = {bits: np.zeros(2**16, dtype=np.int64) for bits, _ in found.values()}
        for values in read():
            dtype = values.dtype
            words = _words(values)
            leading = words >> np.uint64(shift + 16) if shift < 48 else np.zeros(len(words), dtype=np.uint64)
            next_bits = (words >> np.uint64(shift)) & np.uint64(2**16 - 1)
            for bits, count in counts.items():
                count += np.bincount(next_bits[leading == np.uint64(bits)].astype(np.int64), minlength=2**16)
        for rank, (bits, place) in found.items():
            ends = counts[bits].cumsum()
            digit = int(np.searchsorted(ends, place, side="right"))
            found[rank] = (bits << 16) | digit, place - int(ends[digit - 1] if digit else 0)
    words = np.array([bits for bits, _ in found.values()], dtype=np.uint64)
    return dict(zip(found, _of_words(words, dtype).tolist()))


_SIGN = np.uint64(2**63)


def _words(values: np.ndarray) -> np.ndarray:
    """Returns unsigned integers that ascend with the values."""
    words = values.view(np.uint64)
    if values.dtype.kind == "i":
        return words ^ _SIGN
    return np.where(words & _SIGN, ~words, words | _SIGN)


def _of_words(words: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the values of :func:`_words`."""
    if dtype.kind == "i":
        return (words ^ _SIGN).view(dtype)
    return np.where(words & _SIGN, words ^ _SIGN, ~words).view(dtype)


# --- tensors ----------------------------------------------------------------------------------------------


def framed_rows(staged: StagedColumns, facts: Sequence[Mapping[str, Any]]) -> dict[str, Rows]:
    """Returns the rows of the tensors of ``tf``, by the names of :func:`frame_of`."""
    rows = {}
    for stype, of_type in _by_stype(facts).items():
        row_bytes = _TENSORS[stype][2] * sum(each.get("width", 1) for each in of_type)
        rows[f"{FRAME}.{stype}"] = rows_of(
            staged, [each["column"] for each in of_type], max(1, row_bytes), _Encoder(stype, of_type)
        )
    return rows


def frame_of(facts: Sequence[Mapping[str, Any]]) -> Frame:
    """Returns the description of the table ``tf``."""
    pieces, names = [], []
    for stype, of_type in _by_stype(facts).items():
        kind, dtype, _ = _TENSORS[stype]
        offset = np.cumsum([0, *(each["width"] for each in of_type)]).tolist() if kind == "embedding" else ()
        pieces.append(TablePiece(stype, None, kind, dtype, tuple(offset), f"{FRAME}.{stype}"))
        names.append((stype, tuple(each["column"] for each in of_type)))
    return Frame(tuple(pieces), tuple(names))


def _by_stype(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found = {stype: [each for each in facts if each["stype"] == stype] for stype in _TENSORS}
    return {stype: of_type for stype, of_type in found.items() if of_type}


class _Encoder:
    """Makes the tensor of a semantic type from Arrow arrays of its columns."""

    def __init__(self, stype: str, facts: Sequence[Mapping[str, Any]]) -> None:
        self._stype, self._facts = stype, facts

    def __call__(self, arrays: Sequence[Any]) -> np.ndarray:
        if self._stype == "embedding":
            lists = [_list_floats(array, each["width"]) for array, each in zip(arrays, self._facts)]
            return np.concatenate(lists, axis=1)
        if self._stype == "timestamp":
            missing = [array.is_null().to_numpy(zero_copy_only=False) for array in arrays]
            moments = [array.fill_null(0).to_numpy(zero_copy_only=False) for array in arrays]
            return np.stack([calendar(*each) for each in zip(moments, missing)], axis=1)
        if self._stype == "categorical":
            columns = [category_numbers(array, each["categories"]) for array, each in zip(arrays, self._facts)]
            return np.stack(columns, axis=1)
        return np.stack([floats(array).astype(np.float32) for array in arrays], axis=1)


def _list_floats(array: Any, width: int) -> np.ndarray:
    """Returns lists of numbers as float32 [n, width]. Missing lists and entries are NaN."""
    rows = np.full((len(array), width), math.nan, np.float32)
    rows[array.is_valid().to_numpy(zero_copy_only=False)] = floats(array.flatten()).reshape(-1, width) if width else 0
    return rows


def calendar(moments: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Returns year, month, day, day of the week, hour, minute and second of microseconds since 1970, int64 [n, 7], in UTC.

    As in PyTorch Frame, months, days and days of the week begin with 0, and all entries of a missing time are -1. ``moments`` is int64 [n], and ``missing``
    bool [n].
    """
    seconds = moments // SECOND
    days, of_day = seconds // _DAY, seconds % _DAY
    date = days.astype("datetime64[D]")
    month, year = date.astype("datetime64[M]"), date.astype("datetime64[Y]")
    columns = [
        year.astype(np.int64) + 1970,
        (month - year.astype("datetime64[M]")).astype(np.int64),
        (date - month.astype("datetime64[D]")).astype(np.int64),
        (days + 3) % 7,  # 1970 began with a Thursday
        of_day // 3600,
        of_day // 60 % 60,
        of_day % 60,
    ]
    rows = np.stack(columns, axis=1)
    rows[missing] = -1
    return rows


# --- statistics of PyTorch Frame --------------------------------------------------------------------------


def col_stats_of(facts: Sequence[Mapping[str, Any]]) -> dict[str, dict[Any, Any]]:
    """Returns the statistics of each column, by ``torch_frame.data.stats.StatType``. PyTorch Frame must be installed."""
    from torch_frame.data.stats import StatType

    stats: dict[str, dict[Any, Any]] = {}
    for each in facts:
        if each["stype"] == "numerical":
            numbers = [math.nan if each[name] is None else each[name] for name in ("mean", "std")]
            quantiles = [math.nan] * 5 if each["quantiles"] is None else list(each["quantiles"])
            found = {StatType.MEAN: numbers[0], StatType.STD: numbers[1], StatType.QUANTILES: quantiles}
        elif each["stype"] == "categorical":
            found = {StatType.COUNT: (list(each["categories"]), list(each["counts"]))}
        elif each["stype"] == "embedding":
            found = {StatType.EMB_DIM: each["width"]}
        else:
            oldest, median, newest = (_time_tensor(each[name]) for name in ("oldest", "median", "newest"))
            found = {
                StatType.YEAR_RANGE: [int(oldest[0]), int(newest[0])],
                StatType.NEWEST_TIME: newest,
                StatType.OLDEST_TIME: oldest,
                StatType.MEDIAN_TIME: median,
            }
        stats[each["column"]] = found
    return stats


def _time_tensor(moment: int | None) -> torch.Tensor:
    return torch.from_numpy(calendar(np.array([moment or 0]), np.array([moment is None]))[0])
