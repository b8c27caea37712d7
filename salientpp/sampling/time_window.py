"""Reads the length of a time window, which bounds the age of the neighbours that a seed sees."""

from __future__ import annotations

import math
from typing import Any

from salientpp.arguments import as_integer, as_real
from salientpp.graph.clock import Clock


def read_window(given: Any, clock: Clock | None) -> tuple[int | float | None, int | float | None]:
    """Returns the length of a time window twice: as a Python number, and in the form that :meth:`~salientpp.graph.clock.Clock.since` takes.

    Args:
        given: the user's value; None sees all earlier times.
        clock: the clock of the graph; None without times.

    Raises:
        ValueError: the value is not a number >= 0, or the graph has no times, or times that the window does not fit.
    """
    if given is None:
        return None, None
    number = as_integer(given)
    length: int | float | None = as_real(given) if number is None else number
    if isinstance(given, float) and given == math.inf:
        length = math.inf
    if length is None or length < 0:
        raise ValueError(f"time_window must be a number >= 0 in the units of the times, or None, got {given!r}")
    if clock is None:
        raise ValueError(f"time_window={given!r} needs times; pass time_attr too")
    return length, clock.window(length)
