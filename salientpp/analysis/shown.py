"""Results of an analysis and of a plan, which print as the command's tables on a console and in a notebook."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from salientpp.analysis import plan_report, report
from salientpp.analysis.plan_result import Planned
from salientpp.analysis.result import Analysis
from salientpp.display import html, text


@dataclass(frozen=True, repr=False)
class ShownAnalysis(Analysis):
    """The result of :func:`~salientpp.analysis.analyze.analyze`. Printed, it shows the tables of the command."""

    def __repr__(self) -> str:
        return _text(report.shown(self))

    def _repr_html_(self) -> str:
        return html(*report.shown(self))

    def plot(self) -> list[Any]:
        """Draws rows per epoch over α in a new figure of pyplot, and returns its axes. ImportError if matplotlib is not installed."""
        report.check_matplotlib()
        from matplotlib import pyplot

        figure = pyplot.figure(layout="constrained")
        report.draw(self, figure)
        return figure.axes


@dataclass(frozen=True, repr=False)
class ShownPlan(Planned):
    """The result of :func:`~salientpp.analysis.plan.plan`. Printed, it shows the tables of the command."""

    def __repr__(self) -> str:
        return _text(plan_report.shown(self))

    def _repr_html_(self) -> str:
        return html(*plan_report.shown(self))


def _text(blocks: Sequence[RenderableType]) -> str:
    """Renders blocks as the command prints them, in the width of the terminal."""
    return text(blocks, shutil.get_terminal_size().columns)
