"""Progress that calls a function with the name of each step."""

from __future__ import annotations

from collections.abc import Callable

from salientpp.progress import Progress


class Told(Progress):
    def __init__(self, on_step: Callable[[str], object]) -> None:
        self._on_step = on_step

    def begin(self, step: str, total: int = 0, unit: str = "") -> None:
        super().begin(step, total, unit)
        self._on_step(step)
