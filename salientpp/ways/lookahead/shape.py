"""Divides the memory of a static cache between rows, known ids and index of a lookahead cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from salientpp.arguments import as_integer
from salientpp.suggestions import did_you_mean
from salientpp.ways.lookahead.forecast import ListSizes

#: Number of batches known ahead. 'auto': the number with which the given memory saves the most rows.
Window = int | Literal["auto"]

#: Longest window. Numbers of batches are compared modulo 2**15.
MOST_AHEAD = 2**13


def check_lookahead(lookahead: Any) -> Window:
    """Returns ``lookahead`` as 'auto' or a Python integer."""
    if isinstance(lookahead, str) and lookahead == "auto":
        return "auto"
    number = as_integer(lookahead)
    if number is None or isinstance(lookahead, bool) or not 0 <= number <= MOST_AHEAD:
        raise ValueError(
            f"lookahead must be an integer in [0, {MOST_AHEAD}] (batches known ahead) or 'auto', got {lookahead!r}{did_you_mean(lookahead, ['auto'])}"
        )
    return number


def group_of(window: int) -> int:
    """Returns how many batches are planned at a time. Planning then reads at most nine lists of ids per batch."""
    return max(1, -(-window // 8))


def reach_of(window: int) -> int:
    """Returns how many batches ahead a planner with this window reads."""
    return window + group_of(window) - 1


@dataclass(frozen=True)
class Shape:
    """Use of a lookahead cache's budget of bytes.

    Attributes:
        window: W, number of batches known ahead.
        num_slots: C, rows that are kept.
        list_bytes: limit for the ids of the window. If they would take more for a while, fewer batches are known.
    """

    window: int
    num_slots: int
    list_bytes: int

    @classmethod
    def of(cls, window: int, budget: int, row_bytes: int, trial: ListSizes, most_rows: int) -> Shape:
        """Finds the largest cache of at most ``most_rows`` rows within ``budget`` bytes, with a window of at least one batch."""
        lists = math.ceil(window * trial.list_bytes + (group_of(window) - 1) * 2 * trial.num_ids)
        for entry_bytes in (2, 4):
            # A slot takes an id of 4 bytes, a key of 2 bytes and 5/3 entries of a table; the table has one further entry.
            per_slot = row_bytes + 6 + entry_bytes * 5 / 3
            number = max(0, int((budget - lists - entry_bytes) / per_slot))
            if min(number, most_rows) < 2**16:
                break
        return cls(window, min(number, most_rows), lists)

    @property
    def table_size(self) -> int:
        return self.num_slots + self.num_slots * 2 // 3 + 1

    @property
    def table_dtype(self) -> torch.dtype:
        return torch.int16 if self.num_slots < 2**16 else torch.int32

    @property
    def state_bytes(self) -> int:
        """Bytes that a cache of this shape takes besides its rows."""
        return self.list_bytes + 6 * self.num_slots + self.table_size * self.table_dtype.itemsize
