"""Progress of a long operation: the current step, and how much of it is done."""

from __future__ import annotations

from typing import Any


class Progress:
    """Receives the progress of a long operation. This class stores it and shows nothing. A subclass overrides :meth:`begin` and :meth:`reach`.

    Steps follow one another; a step ends where the next begins. All calls come from the thread that runs the operation.

    Attributes:
        step: description of the current step, such as "sorting edges".
        total: amount of work in this step. 0: unknown.
        unit: unit of ``total`` and ``done``, such as "edges".
        done: amount of ``total`` that is done.
    """

    step = ""
    total = 0
    unit = ""
    done = 0

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        """Starts a step."""
        self.step, self.total, self.unit, self.done = step, total, unit, 0

    def reach(self, done: int) -> None:
        """Reports the amount of the step that is done so far."""
        self.done = done

    def advance(self) -> None:
        """Reports that one more unit of the step is done."""
        self.reach(self.done + 1)


class ProgressBar(Progress):
    """Shows the current step as a tqdm bar on stderr."""

    _bar: Any = None

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        from tqdm import tqdm  # a dependency of PyG, so it is installed

        super().begin(step, total, unit)
        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(total=total or None, desc=step, unit=f" {unit}")

    def reach(self, done: int) -> None:
        super().reach(done)
        self._bar.update(done - self._bar.n)
        if done == self.total:
            self._bar.close()
