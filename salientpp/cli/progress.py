"""Progress bars and warnings of a subcommand, on stderr."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from salientpp.cli import terminal
from salientpp.progress import Progress


@contextlib.contextmanager
def warnings_in_lines(command: str) -> Iterator[None]:
    """Shows each warning as one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: terminal.complain(f"salientpp {command}: {message}")
        yield


class Shown(Progress):
    """Shows each step as a line on stderr, and on a terminal a bar for the current step with its rate and the time left."""

    def __init__(self, bar: Bar, lines: bool) -> None:
        self._bar, self._lines = bar, lines
        self._task = bar.add_task("", amount="")
        self._started = time.perf_counter()

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        super().begin(step, total, unit)
        self._begun = time.perf_counter()
        if self._lines:
            terminal.complain(f"{self._begun - self._started:7.1f} s  {step}")
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(terminal.printable(step), total=total or None, amount="")

    def reach(self, done: int) -> None:
        super().reach(done)
        seconds = max(1e-9, time.perf_counter() - self._begun)
        self._bar.update(self._task, completed=done, amount=f"{done / seconds / 1e6:.1f} M {self.unit}/s")


@contextlib.contextmanager
def shown_progress(lines: bool = True) -> Iterator[Progress]:
    """Yields an object that shows the progress of a subcommand on stderr.

    Args:
        lines: show a line for each step, in addition to the bar.
    """
    screen = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bar:
        yield Shown(bar, lines)
