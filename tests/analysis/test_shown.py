"""Laws of printed results: an analysis and a plan show the command's tables, as text and as HTML, and an analysis draws its picture."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import pytest
from graphs import random_data

import salientpp
from salientpp.analysis import plan_report, report
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.plan import plan
from salientpp.cli import terminal
from salientpp.ways.planner.machines import Link, Machines


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return salientpp.partition(random_data(60, 240), 2, tmp_path_factory.mktemp("shown") / "d", [3, 2], 4)


def printed(blocks) -> str:
    with redirect_stdout(StringIO()) as text:
        terminal.show(*blocks)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


@pytest.mark.parametrize("columns", ["60", "120"])
def test_an_analysis_shows_the_commands_tables(part, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    found = analyze(part, Batches([3, 2], 4, epochs=1), Ways(["vip", "degree"], [0, 0.5]))
    assert repr(found) == str(found) == printed(report.shown(found))
    assert max(map(len, repr(found).splitlines())) <= int(columns)
    assert "--" not in repr(found) + found._repr_html_()  # words of the command line
    assert "<th>α=0.5</th>" in found._repr_html_() and "<td>degree</td>" in found._repr_html_()


def test_an_analysis_draws_a_panel_for_each_num_neighbors(part):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    batches = [Batches([3, 2], 4, epochs=1), Batches([3], 4, epochs=1)]
    axes = analyze(part, batches, Ways(["vip", "degree"], [0, 0.5])).plot()
    assert [each.get_title() for each in axes] == ["num_neighbors [3, 2]", "num_neighbors [3]"]
    pyplot.close(axes[0].figure)


def test_a_plan_shows_the_commands_tables(part, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = plan(part, Machines(Link(1e-4, 1e9)), batches=Batches([3, 2], 4))
    assert repr(found) == printed(plan_report.shown(found))
    assert "<th>best ways</th>" in found._repr_html_()
