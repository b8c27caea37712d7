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
    """Tells the batches of an epoch that are in flight whether this rank still wants them.

    Attributes:
        idle: tick -> the empty state that replaces the batch of this tick once the rank has left.
        has_left: True once this rank has left the epoch.
    """

    idle: Callable[[int], Any]
    has_left: bool = False


@dataclass(frozen=True)
class Request:
    """Request for the batch of tick ``index``. ``draws`` and ``attendance`` are None if it belongs to no epoch."""

    index: int
    sampling: Task | Future | Undone
    draws: Draws | None = None
    attendance: Attendance | None = None

    @property
    def is_wanted(self) -> bool:
        """False if this rank has left the epoch. The batch then runs none of the user's code, and requests nothing."""
        return self.attendance is None or not self.attendance.has_left

    def result(self) -> Any:
        """Waits for the sampled batch, and returns it. Returns a :class:`Round` if the draw must ask other ranks, or an empty state if the rank has left."""
        if self.attendance is None or self.is_wanted:
            return self.sampling.result()
        return self.attendance.idle(self.index)
