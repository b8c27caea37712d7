"""Checks the records that a report reads, since a file may be damaged or come from another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "SALIENTPP_TRACE_DIR"
AGAIN = f"train again with {VARIABLE}=DIR in the environment of every rank"
#: Largest number of ranks, largest value of any number, and largest number of lists and objects inside each other.
_MOST_RANKS, _MOST, _DEEPEST = 100_000, 1e18, 50
#: Difference that rounding of sums may make.
_ROUNDING = 1e-3


def _is_number(value: Any) -> bool:
    """True for numbers that are neither negative, nor too large, nor NaN."""
    return isinstance(value, (int, float)) and 0 <= value <= _MOST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_speed(value: Any) -> bool:
    return isinstance(value, float) or _is_number(value)  # one that is not finite is left aside later


def _are(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a check of a list of lists. Each inner list must have one value for each of ``kinds``, and pass its check."""

    def of_one(entry: Any) -> bool:
        return (
            isinstance(entry, list) and len(entry) == len(kinds) and all(kind(each) for kind, each in zip(kinds, entry))
        )

    return lambda value: isinstance(value, list) and all(map(of_one, value))


_WHOLE: tuple[Callable[[Any], bool], str] = _is_whole, "a whole number"
#: Field of a description -> its check, and what it must be. A field may be missing or null.
_ABOUT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "ranks": (
        lambda value: _is_whole(value) and 1 <= value <= _MOST_RANKS,
        f"a number of ranks from 1 to {_MOST_RANKS:,}",
    ),
    **dict.fromkeys(("num_workers", "depth", "own_rows", "cached_rows", "parts", "cores", "torch_threads"), _WHOLE),
    "options": (lambda value: isinstance(value, dict), "an object of options"),
    "links": (_are(_is_whole, _is_whole, _is_speed), "a list of [from rank, to rank, bytes per second]"),
    "cache_forecast": (_are(_is_number, _is_number), "a list of [cached rows, rows left]"),
    "batches_by_rank": (
        lambda value: isinstance(value, list) and all(map(_is_whole, value)),
        "a list of whole numbers",
    ),
    "row_bytes": (lambda value: isinstance(value, dict) and all(map(_is_number, value.values())), "bytes by type"),
}


def refuse(path: Path, field: str, expected: str, value: Any) -> ValueError:
    """Returns an error that names a file and a field with another value than expected."""
    try:
        shown = repr(value)[:60]
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deep list
        shown = f"a very large {type(value).__name__}"
    return ValueError(f"{path}: expected {expected} in {field!r}, got {shown}; remove the file, or {AGAIN}")


def check_about(path: Path, about: Mapping[str, Any]) -> None:
    """Raises ValueError if a value in the description of a loader has a wrong type or too many lists inside each other."""
    for name, (is_right, expected) in _ABOUT.items():
        if about.get(name) is not None and not is_right(about[name]):
            raise refuse(path, name, expected, about[name])
    for name, value in about.items():
        if _is_deep(value):
            raise refuse(path, name, f"at most {_DEEPEST} lists inside each other", value)


def check_numbers(path: Path, numbers: Mapping[str, Any]) -> None:
    """Raises ValueError if a number of an epoch is negative or too large. NaN and infinity are left aside later."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and (value < -_ROUNDING or _MOST < value < float("inf")):
            raise refuse(path, name, "a number of 0 or more", value)


def check_moment(path: Path, record: Mapping[str, Any]) -> None:
    """Raises ValueError unless a record's time is a valid number, and its batch, if given, a whole number."""
    if not _is_number(record["time_us"]):
        raise refuse(path, "time_us", "microseconds since 1970", record["time_us"])
    if record.get("step") is not None and not _is_whole(record["step"]):
        raise refuse(path, "step", "the number of a batch", record["step"])


def milliseconds(path: Path, value: float) -> float:
    """Returns ``value``, the duration of a span. Raises ValueError if it is negative, too large or NaN."""
    if not _is_number(value + _ROUNDING):
        raise refuse(path, "value", "milliseconds of 0 or more", value)
    return value


def epoch_of(path: Path, text: str) -> int | None:
    """Returns the number of an epoch, or None if its name is not a number."""
    if not text.isdecimal():
        return None
    if len(text) > 15:
        raise refuse(path, "event_name", "the number of an epoch", text)
    return int(text)


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level, depth = [each for values in inner for each in values], depth + 1
    return depth > _DEEPEST
