"""Requests for batches, which go into the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from salientpp.engine.epochs import Draws
from salientpp.processes import Task, Undone


@dataclass(eq=False)
class Attendance:
    """Tells the batches of an epoch whether this rank still wants them.

    Attributes:
        idle: returns the state, without a batch, for a tick of a rank that has left.
        has_left: True once this rank has left the epoch.
    """

    idle: Callable[[int], Any]
    has_left: bool = False


@dataclass(frozen=True)
class Request:
    """Request for a batch. ``index`` is its tick. ``draws`` and ``attendance`` are None if the batch belongs to no epoch."""

    index: int
    sampling: Task | Future | Undone
    draws: Draws | None = None
    attendance: Attendance | None = None

    @property
    def is_wanted(self) -> bool:
        """False if this rank has left the epoch. The user's code no longer runs for the batch then, and it asks other ranks for nothing."""
        return self.attendance is None or not self.attendance.has_left

    def result(self) -> Any:
        """Waits for the sampled batch, or for the next round in which it is drawn."""
        if self.attendance is None or self.is_wanted:
            return self.sampling.result()
        return self.attendance.idle(self.index)
