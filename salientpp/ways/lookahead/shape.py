"""Plans a lookahead cache in the memory of a static cache: how many batches ahead it knows, and how many rows it keeps beside their ids and an index."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from salientpp.arguments import as_integer
from salientpp.ranks.partition_book import PartitionBook
from salientpp.suggestions import did_you_mean
from salientpp.ways.lookahead.forecast import Blocks, ListSizes, Spread

#: Number of batches known ahead. 'auto': the number with which the given memory saves the most rows.
Window = int | Literal["auto"]

#: Largest fraction of the budget that the ids of a window may take.
_MOST_FOR_IDS = 0.5

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
    """Returns how many batches a planner with this window plans at a time. It then reads at most nine lists of ids per batch, whatever the window."""
    return max(1, -(-window // 8))


def reach_of(window: int) -> int:
    """Returns how many batches ahead a planner with this window reads."""
    return window + group_of(window) - 1


@dataclass(frozen=True)
class Shape:
    """Division of a lookahead cache's memory.

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


def choose_shape(
    lookahead: Window,
    probability: Tensor,
    budget: int,
    row_bytes: int,
    trial: ListSizes,
    blocks: Callable[[], Blocks | None] = lambda: None,
    num_sharing: int = 1,
) -> Shape:
    """Divides a lookahead cache's memory for this window. 'auto' takes the window with the fewest forecast fetches.

    With 'auto', batches that wait take at most as much memory as the cache.

    Args:
        probability: float32 [N], probability that a batch needs each remote row; 0 for other rows.
        trial: sizes measured on some batches.
        budget: bytes of a static cache; of one that several ranks share, the bytes for this rank.
        blocks: describes batches that share draws (``draw_block``), or returns None; called for 'auto' only.
        num_sharing: number of ranks that would share a static cache.

    Raises:
        ValueError: the ids of the given window take too much of the budget.
    """
    most_rows = int(torch.count_nonzero(probability > 0))

    def shape(window: int) -> Shape:
        return Shape.of(window, budget, row_bytes, trial, most_rows)

    if lookahead != "auto":
        found = shape(lookahead)
        if found.list_bytes > _MOST_FOR_IDS * budget:
            fitting = [window for window in range(1, lookahead) if shape(window).list_bytes <= _MOST_FOR_IDS * budget]
            raise ValueError(
                f"lookahead={lookahead} needs {found.list_bytes:,} bytes for ids, more than half of the {budget:,} that the replication factor gives "
                f"(a batch has {trial.num_ids:,.0f} remote rows); pass "
                + (f"at most {fitting[-1]}, " if fitting else "")
                + "'auto' or 0, or a larger replication factor"
            )
        return found
    spread = Spread.of(probability, blocks(), trial)
    best = Shape(0, budget * num_sharing // max(1, row_bytes), 0)
    fewest = spread.rows(best.num_slots, 0)
    for window in _windows():
        found = shape(window)
        if found.list_bytes > _MOST_FOR_IDS * budget or reach_of(window) * trial.waiting_bytes > budget:
            break
        rows = spread.rows(found.num_slots, window)
        if rows < fewest:
            best, fewest = found, rows
        if spread.is_long_enough(found.num_slots, window):
            break
    return best


def _windows() -> list[int]:
    """Windows to try: 1, 2, 3, 4, and then each about an eighth longer than the one before."""
    found = [1]
    while found[-1] < MOST_AHEAD:
        found.append(min(MOST_AHEAD, found[-1] + max(1, found[-1] // 8)))
    return found


def plan_rows(
    lookahead: Window,
    scores: Tensor,
    book: PartitionBook,
    part_id: int,
    num_static: int,
    row_bytes: int,
    trial: Callable[[], ListSizes],
    blocks: Callable[[], Blocks | None] = lambda: None,
    num_sharing: int = 1,
) -> tuple[Shape, Tensor] | None:
    """Plans the lookahead cache that replaces a static cache in the same memory: its shape, and the ids of its initial rows, ascending int64.

    Args:
        scores: float [N], probability that a batch needs each row.
        num_static: number of rows of the static cache. The memory of its set of ids is available as well.
        trial: measures lists of remote ids; called only if the lookahead may save something.
        blocks, num_sharing: as for :func:`choose_shape`, which also raises the errors.

    Returns:
        None if nothing can be saved: the cache is empty, it holds every row that may be needed, or no window is worth its memory.
    """
    begin, end = book.range_of(part_id)
    remote = scores.to(torch.float32, copy=True)
    remote[begin:end] = 0
    if lookahead == 0 or num_static == 0 or num_static >= int(torch.count_nonzero(remote > 0)):
        return None
    budget = (num_static * row_bytes + 8 * -(-book.num_vertices // 32)) // num_sharing
    shape = choose_shape(lookahead, remote, budget, row_bytes, trial(), blocks, num_sharing)
    if shape.window == 0 or shape.num_slots == 0:
        return None
    order = torch.sort(remote, descending=True, stable=True).indices
    return shape, order[: shape.num_slots].sort().values
