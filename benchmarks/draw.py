"""Draws the tables of README.md and of the pages under docs from the JSON under benchmarks/results.

    python benchmarks/draw.py

A table stands between ``<!-- name -->`` and ``<!-- /name -->``; everything between the markers is replaced. Plots are SVG files under docs/results.
``draw_paper.py`` draws docs/results/paper.md.
"""

from __future__ import annotations

from drawing import (
    communication,
    full_graph,
    gpu,
    host,
    plan,
    policies,
    scale,
    score,
    sessions,
    split,
    storage,
    together,
    topology,
    training,
)
from drawing.base import ROOT, filled, load, replaced

PAGES = (
    host,
    training,
    policies,
    communication,
    full_graph,
    together,
    topology,
    plan,
    scale,
    score,
    sessions,
    storage,
    split,
    gpu,
)
DRAWN = {name: drawn for page in PAGES for name, drawn in page.DRAWN.items()}


def main() -> None:
    summary = {name: load(name) for name in host.SUMMARY}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = page.read_text()
        text = filled(before, DRAWN)
        if "<!-- host -->" in text and any(summary.values()):
            text = replaced(text, "host", host.draw_summary(summary))
        if text != before:
            page.write_text(text)


if __name__ == "__main__":
    main()
