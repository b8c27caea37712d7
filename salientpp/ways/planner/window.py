"""Chooses how many batches ahead a lookahead cache should know, so that it fetches the fewest rows with a given memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from salientpp.ranks.partition_book import PartitionBook
from salientpp.ways.lookahead.forecast import Blocks, ListSizes, Spread
from salientpp.ways.lookahead.shape import MOST_AHEAD, Shape, Window, reach_of

#: Largest fraction of the budget that the ids of a window may take.
_MOST_FOR_IDS = 0.5


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
        budget: bytes of a static cache; of one that several ranks share, the bytes for this rank.
        blocks: returns the blocks of batches whose draws agree; called for 'auto' only.
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
