"""Two groups of threads that work side by side: one packs rows for a device, the other sums rows up for it.

A device waits for both. So a rule moves threads between them by what batches took, after *Accelerating GNN training with locality-aware partial execution*
(APSys 2021). The threads are not torch's: those of its kernels are all woken for each kernel, whatever share of them is to work.
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

#: A thread moves only to a group that took so much longer than the other will. What varies less from batch to batch moves none forth and back.
_MARGIN = 1.05

#: Batches between two looks at what the groups took, so that one that is unlike the others moves none.
BATCHES_PER_LOOK = 8

#: To hand a piece to another thread and wait for it costs what copying a tenth of this does.
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class ThreadGroups:
    """How many threads pack rows, and how many sum them up; at least one each."""

    rows: int
    sums: int

    @classmethod
    def half(cls, num_threads: int) -> ThreadGroups:
        """Half of so many threads each, and the odd one to rows; of fewer than two, one each."""
        sums = max(1, num_threads // 2)
        return cls(max(1, num_threads - sums), sums)

    def after(self, row_seconds: float, sum_seconds: float) -> ThreadGroups:
        """The groups for the next batches, by what these took: one thread goes from the group that was done first to the other, unless
        the group that it leaves would then be the later one. Work is taken to be shared evenly within a group."""
        if row_seconds >= sum_seconds:
            to_rows = self.sums > 1 and row_seconds > _MARGIN * sum_seconds * self.sums / (self.sums - 1)
            return ThreadGroups(self.rows + 1, self.sums - 1) if to_rows else self
        to_sums = self.rows > 1 and sum_seconds > _MARGIN * row_seconds * self.rows / (self.rows - 1)
        return ThreadGroups(self.rows - 1, self.sums + 1) if to_sums else self


class Balance:
    """The groups of one loader, and what they took since the last look. One thread at a time has work done.

    Args:
        num_threads: of both groups, the calling thread among them.
        submit: runs a function in one of ``num_threads - 1`` threads, at least one, and returns its future.
    """

    def __init__(self, num_threads: int, submit: Callable[..., Task]) -> None:
        self.groups = ThreadGroups.half(num_threads)
        self._submit = submit
        self._spent: list[tuple[float, float]] = []

    def both(self, pack_rows: Callable[[], Any], sum_rows: Callable[[], Any]) -> tuple[Any, Any]:
        """What the two give, which are run side by side."""
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
    """Inside it this thread has others with which :func:`in_pieces` shares work."""
    _here.group = num_threads, submit
    try:
        yield
    finally:
        _here.group = None


def in_group() -> bool:
    """Whether this thread has others to share work with."""
    return getattr(_here, "group", None) is not None


def in_pieces(work: Callable[[int, int], None], num_items: int, num_bytes: int) -> None:
    """Have ``work(first, last)`` done for pieces of ``range(num_items)``, ``num_bytes`` in all, by the threads of this one's group, side by side."""
    num_threads, submit = _here.group
    pieces = max(1, min(num_threads, num_bytes // _PIECE_BYTES))
    bounds = [num_items * piece // pieces for piece in range(pieces + 1)]
    others = [submit(work, *piece) for piece in pairwise(bounds[1:])]
    try:
        work(0, bounds[1])
    finally:
        # Also where one fails: the others write to memory that its caller gives away.
        errors = [error for error in map(_error_of, others) if error is not None]
    if errors:
        raise errors[0]


def _error_of(task: Task) -> BaseException | None:
    try:
        task.result()
    except BaseException as error:
        return error
    return None
