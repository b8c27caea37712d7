"""Divides a loader's threads into two groups that work at the same time: one packs rows for a device, the other computes sums of rows for it.

The device waits for both groups. So :class:`Balance` moves threads from the faster group to the slower one, after *Accelerating GNN training
with locality-aware partial execution* (APSys 2021). The threads are not torch's, because a torch kernel always wakes all of its threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from salientpp.processes import Task

Result = TypeVar("Result")

#: A thread moves only to a group that took longer by this factor than the other group will take with one thread less.
#: Small variations between batches then move no thread.
_MARGIN = 1.05

#: Number of batches between two adjustments, so that a single unusual batch moves no thread.
BATCHES_PER_LOOK = 8

#: Minimum bytes of a piece of work. Handing a piece to another thread and waiting for it costs as much as copying a tenth of this.
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class ThreadGroups:
    """Sizes of the two groups: number of threads that pack rows, and that compute sums. Each is at least 1."""

    rows: int
    sums: int

    @classmethod
    def half(cls, num_threads: int) -> ThreadGroups:
        """Divides the threads evenly. If their number is odd, one more thread packs rows. Each group gets at least one."""
        sums = max(1, num_threads // 2)
        return cls(max(1, num_threads - sums), sums)

    def after(self, row_seconds: float, sum_seconds: float) -> ThreadGroups:
        """Returns the groups for the next batches, given the seconds that each group took for the last ones.

        One thread moves from the faster group to the slower one, unless the faster group would then become the slower one. The rule assumes that a
        group's threads share its work evenly.
        """
        if row_seconds >= sum_seconds:
            to_rows = self.sums > 1 and row_seconds > _MARGIN * sum_seconds * self.sums / (self.sums - 1)
            return ThreadGroups(self.rows + 1, self.sums - 1) if to_rows else self
        to_sums = self.rows > 1 and sum_seconds > _MARGIN * row_seconds * self.rows / (self.rows - 1)
        return ThreadGroups(self.rows - 1, self.sums + 1) if to_sums else self


class Balance:
    """Runs the two groups of one loader, and adjusts their sizes. Only one thread at a time may call :meth:`both`.

    Args:
        num_threads: number of threads of both groups, including the calling thread.
        submit: runs a function in one of ``num_threads - 1`` threads (at least one), and returns its future.
    """

    def __init__(self, num_threads: int, submit: Callable[..., Task]) -> None:
        self.groups = ThreadGroups.half(num_threads)
        self._submit = submit
        self._spent: list[tuple[float, float]] = []

    def both(self, pack_rows: Callable[[], Any], sum_rows: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs both functions at the same time, and returns their results."""
        groups = self.groups
        summing = self._submit(self._timed, groups.sums, sum_rows)
        try:
            rows, row_seconds = self._timed(groups.rows, pack_rows)
        finally:
            sums, sum_seconds = summing.result()
        self._spent.append((row_seconds, sum_seconds))
        if len(self._spent) == BATCHES_PER_LOOK:
            self.groups = groups.after(*map(sum, zip(*self._spent, strict=True)))
            self._spent.clear()
        return rows, sums

    def _timed(self, num_threads: int, work: Callable[[], Result]) -> tuple[Result, float]:
        began = time.perf_counter()
        with _shared_by(num_threads, self._submit):
            return work(), time.perf_counter() - began


_here = threading.local()


@contextlib.contextmanager
def _shared_by(num_threads: int, submit: Callable[..., Task]) -> Iterator[None]:
    """Lets :func:`in_pieces` use ``num_threads`` threads inside the ``with`` block: this thread, and others through ``submit``."""
    _here.group = num_threads, submit
    try:
        yield
    finally:
        _here.group = None


def in_group() -> bool:
    return getattr(_here, "group", None) is not None


def in_pieces(work: Callable[[int, int], None], num_items: int, num_bytes: int) -> None:
    """Runs ``work(first, end)`` on pieces of ``num_items`` items at the same time, in the threads of this thread's group.

    Each thread gets at most one piece, and few bytes make few pieces. Only a thread inside :func:`_shared_by` may call it.

    Args:
        num_bytes: bytes of all items.
    """
    num_threads, submit = _here.group
    pieces = max(1, min(num_threads, num_bytes // _PIECE_BYTES))
    bounds = [num_items * piece // pieces for piece in range(pieces + 1)]
    others = [submit(work, *piece) for piece in pairwise(bounds[1:])]
    try:
        work(0, bounds[1])
    finally:
        # Wait also if one piece fails: the other threads write to memory that the caller then releases.
        errors = [error for error in map(_error_of, others) if error is not None]
    if errors:
        raise errors[0]


def _error_of(task: Task) -> BaseException | None:
    try:
        task.result()
    except BaseException as error:
        return error
    return None
