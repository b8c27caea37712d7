"""Laws of the answers of pages, and of their style, as far as they show without a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from salientpp.analysis.plan_result import Planned, Prediction
from salientpp.report import page
from salientpp.report.analysis_page import _over_caches
from salientpp.report.plan_page import plan_page

NOTES = (
    "constants were not measured: the link is 10GbE, and the rest are defaults.",
    "no training step is known, so times are those of loading alone.",
)
SMALL = Prediction(
    hosts=2, ranks=2, budget=0, device_budget=0, ways="no copies", options={}, seconds=0.0333, training=0.0, loading=0.01,
    waiting=0.0233, link=0.0233, cpu=0.01, steps=7, network_bytes=1e6, memory={"host": 10**7}, device_bytes=0, cost=None, chosen=True,
)  # fmt: skip
LARGE = replace(
    SMALL, budget=2 * 10**6, ways="cache", seconds=0.016649, waiting=0.006649, memory={"host": 10**7, "cache": 2 * 10**6}
)  # fmt: skip


def lead_of(*predictions: Prediction) -> str:
    planned = Planned("graph", {"": 600}, 4000, 10, [3, 2], "all", {"": 32}, 1, {}, NOTES, predictions)
    found = re.search('<div class="lead">(.*?)</div>', plan_page(planned).decode())
    assert found is not None
    return unescape(re.sub("<[^>]+>", " ", found[1]))


@pytest.fixture(autouse=True)
def _no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_bundle", lambda: "/* Vega */")  # takes seconds


def test_the_answer_of_a_plan_says_how_sure_it_is_and_what_it_saves() -> None:
    lead = lead_of(SMALL, LARGE)
    assert "An epoch takes about 0.0166 s." in lead and "0.01665" not in lead
    assert [note for note in NOTES if note not in lead] == []
    assert (
        "A host needs 12 MB of memory for it. Without memory for copies, the smallest of the given memories, a host needs 10 MB"
        in lead
    )
    assert "an epoch takes about 0.0333 s: the recommended memory saves 50% of it." in lead
    assert "A host needs 10 MB of memory for it. Of the given memories, it is the smallest." in lead_of(SMALL)


def test_the_axis_of_shares_begins_at_zero() -> None:
    """Shares of 90 and 100 per cent would otherwise look like none and all."""
    point: dict[str, Any] = {
        "num_neighbors": "3",
        "policy": "vip",
        "type": "all",
        "MB": 1.0,
        "cache": 0.1,
        "by_rank": (),
    }
    chart = _over_caches(
        [{**point, "alpha": alpha, "rows": 100 - alpha, "share": 1 - alpha / 100} for alpha in (0, 10)]
    )
    found = re.search('<script type="application/json">(.*?)</script>', chart)
    assert found is not None
    assert json.loads(found[1])["encoding"]["y"].get("scale", {}).get("zero", True)


def test_a_list_of_choices_is_at_most_as_wide_as_the_page() -> None:
    style = page.page("", [], []).decode()
    assert re.search(r"\.vega-bind{[^}]*max-width:100%", style)
    assert re.search(r"\.vega-bind :is\(input,select\){[^}]*max-width:100%", style) and "60vw" not in style
