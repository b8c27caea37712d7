"""Steps of writing a directory: progress that tells their names, and runs that are stopped after each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from salientpp.progress import Progress
from salientpp.store.directory.journal import Journal


class Told(Progress):
    def __init__(self, on_step: Callable[[str], object]) -> None:
        self._on_step = on_step

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        super().begin(step, total, unit)
        self._on_step(step)


def stopped_after_each_step(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], after: Callable[[int], object] = lambda runs: None
) -> list[str]:
    """Repeats ``run``, whose runs finish one step and are stopped in the next, until a run ends. Calls ``after`` with the number of the stopped run.

    Returns the steps in the order in which they were finished.
    """
    steps: list[str] = []
    note = Journal.note

    def stops(self, step, *rest):
        if len(steps) == most:
            raise KeyboardInterrupt
        steps.append(step)
        return note(self, step, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "note", stops)
        for most in range(99):
            try:
                run()
                break
            except KeyboardInterrupt:
                after(most)
    return steps
