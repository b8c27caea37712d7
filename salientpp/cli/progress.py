"""Progress bars and warnings on stderr, while a subcommand works."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from salientpp.analysis.volume import Track
from salientpp.cli import terminal
from salientpp.progress import Progress


@contextlib.contextmanager
def warnings_in_lines(command: str) -> Iterator[None]:
    """Show each warning as one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: terminal.complain(f"salientpp {command}: {message}")
        yield


@contextlib.contextmanager
def progress() -> Iterator[Track]:
    """A bar on the screen, and what starts it anew for every step."""
    screen = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as progress:
        bar = progress.add_task("")

        def track(what: str, total: int) -> Callable[[], None]:
            progress.reset(bar, description=what, total=max(1, total))
            return lambda: progress.advance(bar)

        track("loading", 1)
        yield track


class Shown(Progress):
    """Shows each step in a line on stderr, and on a terminal a bar for the present one with its rate and the time left."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("", amount="")
        self._started = time.perf_counter()

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        super().begin(step, total, unit)
        self._begun = time.perf_counter()
        terminal.complain(f"{self._begun - self._started:7.1f} s  {step}")
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(terminal.printable(step), total=total or None, amount="")

    def reach(self, done: int) -> None:
        super().reach(done)
        seconds = max(1e-9, time.perf_counter() - self._begun)
        self._bar.update(self._task, completed=done, amount=f"{done / seconds / 1e6:.1f} M {self.unit}/s")


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """The progress of a subcommand, on stderr."""
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
        yield Shown(bar)
