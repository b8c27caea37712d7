"""Reads numbers that users pass as values of Python, NumPy or torch, if no information is lost. Booleans do not count as numbers."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from salientpp.display import UNITS


def as_integer(value: Any) -> int | None:
    """Returns an int for an integer of Python, NumPy (also a 0-dimensional array) or torch (a 0-dimensional tensor). None for anything else."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_real(value: Any) -> float | None:
    """Returns a float for a finite real number of Python, NumPy or torch, in the same forms as :func:`as_integer` takes. None for anything else."""
    whole = as_integer(value)
    dtype = getattr(value, "dtype", None)
    if type(value) in (int, float):
        is_real = True  # the usual types, checked first because the first check of an abstract class takes tens of microseconds
    elif isinstance(value, Tensor):
        is_real = value.ndim == 0 and value.dtype.is_floating_point
    else:
        is_real = (isinstance(value, numbers.Real) and not isinstance(value, bool)) or (
            getattr(value, "ndim", 1) == 0 and getattr(dtype, "kind", "") == "f"
        )
    if whole is None and not is_real:
        return None
    try:
        number = float(value if whole is None else whole)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def wording(expected: str, given: Any) -> Iterator[None]:
    """Says what an argument must be before the words of PyG's error, which need not name the argument. ``expected`` begins with the name."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{expected}, got {given!r}{f': {error}' if str(error) else ''}") from None


#: Bytes are counted in 64 bits.
_MOST_BYTES = 2.0**63


def as_amount(value: Any) -> float | int | None:
    """Returns an amount of memory: a float in [0, 1], which is a fraction, or an int below 2^63, which is a number of bytes. None for anything else.

    Args:
        value: a number in [0, 1] for a fraction, an integer >= 2 for bytes, or text such as ``"2GiB"``, ``"500 MB"`` or ``"0B"`` for bytes.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", value)
        amount = float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else math.inf
        return int(amount) if amount < _MOST_BYTES else None
    number = as_real(value)
    if number is None or not 0 <= number < _MOST_BYTES:
        return None
    return number if number <= 1 else as_integer(value)
