"""Progress bars and warnings of a subcommand, on stderr."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from salientpp.cli import terminal
from salientpp.progress import Progress


@contextlib.contextmanager
def warnings_in_lines(command: str) -> Iterator[None]:
    """Shows each warning as one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: terminal.complain(f"salientpp {command}: {message}")
        yield


class _Times(ProgressColumn):
    """Column of a bar: the time of the step so far, and an estimate of the time that is left."""

    def render(self, task: Task) -> Text:
        times = [(task.elapsed, "so far"), (task.time_remaining, "left")]
        return Text(", ".join(f"{timedelta(seconds=int(time))} {word}" for time, word in times if time is not None))


def rate_of(done: int, seconds: float, unit: str) -> str:
    """Returns how fast a step goes, such as "12.3 k edges/s", or per minute if it is slow. Empty before anything is done."""
    if not done or seconds <= 0:
        return ""
    rate, per = (done / seconds, "s") if done >= seconds else (60 * done / seconds, "min")
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if rate >= 0.9995 * size:
            return f"{rate / size:.3g}{letter} {unit}/{per}"
    return f"{rate:.3g} {unit}/{per}"


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
        self._bar.refresh()  # so that short steps appear too

    def reach(self, done: int) -> None:
        super().reach(done)
        self._bar.update(self._task, completed=done, amount=rate_of(done, time.perf_counter() - self._begun, self.unit))


@contextlib.contextmanager
def shown_progress(lines: bool = True) -> Iterator[Progress]:
    """Yields an object that shows the progress of a subcommand on stderr.

    Args:
        lines: show a line for each step, in addition to the bar.
    """
    screen = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}", markup=False, table_column=Column()),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        _Times(table_column=Column(no_wrap=True)),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bar:
        yield Shown(bar, lines)
