"""What a long operation tells its caller: the step that it is at, and how much of the step is done."""

from __future__ import annotations

from typing import Any


class Progress:
    """Receives what a long operation tells. This class keeps it and shows nothing; a subclass overrides :meth:`begin` and :meth:`reach`.

    Steps follow one another; a step ends where the next begins. All calls come from the thread that runs the operation.

    Attributes:
        step: what is being done, such as "sorting edges".
        total: how much there is to do in this step; 0: that is not counted.
        unit: what ``total`` and ``done`` count, such as "edges".
        done: how much of ``total`` is done.
    """

    step = ""
    total = 0
    unit = ""
    done = 0

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        """A step begins."""
        self.step, self.total, self.unit, self.done = step, total, unit, 0

    def reach(self, done: int) -> None:
        """So much of the step is done in all."""
        self.done = done

    def advance(self) -> None:
        """One unit more of the step is done."""
        self.reach(self.done + 1)


class ProgressBar(Progress):
    """Shows a bar of the present step on stderr, by tqdm."""

    _bar: Any = None

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        from tqdm import tqdm  # PyG needs it, so it is there

        super().begin(step, total, unit)
        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(total=total or None, desc=step, unit=f" {unit}")

    def reach(self, done: int) -> None:
        super().reach(done)
        self._bar.update(done - self._bar.n)
        if done == self.total:
            self._bar.close()
