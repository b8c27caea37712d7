"""Helpers of the drawing modules: read a result, format a table, name its source, replace a marked part of a page."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
#: Marker of a table -> name of its result file, and the function that draws it.
Drawn = dict[str, tuple[str, Callable[[Row], str]]]


def load(name: str) -> Row | None:
    """Reads ``results/<name>.json``; None if it does not exist."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """Formats a Markdown table. The first ``left`` columns are text, the others are aligned to the right."""
    header = list(header)
    lines = [header, [*["---"] * left, *["---:"] * (len(header) - left)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_file(name: str, title: str, header: Iterable[str], lines: Sequence[Sequence[str]]) -> str:
    """Writes a table that is too long for a page to docs/results/``name``.csv. Returns ``title`` with a link to the file."""
    path = ROOT / "docs" / "results" / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *lines])
    return f"{title} [{name}.csv]({name}.csv) has {counted(len(lines), 'line')}."


def joined(*paragraphs: str) -> str:
    return "\n\n".join(paragraphs)


def source(result: Row) -> str:
    """Returns the line below a table: machine, version, date and command."""
    machine = result["machine"]
    # Scripts that were run inside benchmarks/ recorded no folder.
    command = re.sub(r"\bpython bench_", "python benchmarks/bench_", result["command"])
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']:.0f} GB, {machine['gpu'] or 'no GPU'}; torch "
        f"{result['versions']['torch']}; {result['date']}; `{command}`."
    )


def shown(name: str) -> str:
    """Name of a contender as the pages print it: ``PyG over pyg-lib`` becomes ``PyG (pyg-lib)``."""
    return re.sub(r"^PyG over (.+)$", r"PyG (\1)", name)


def ratio_to(names: Sequence[str], own: str = "salientpp") -> list[str]:
    """Headers of columns that divide a contender's figure by ours."""
    return [f"{shown(name)} / {own}" for name in names]


def ours_first(rows: list[Row], key: str) -> list[str]:
    return sorted(dict.fromkeys(row[key] for row in rows), key=lambda name: (not name.startswith("salientpp"), name))


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + "s" * (number != 1)


def filled(text: str, drawn: Drawn) -> str:
    """Redraws everything between the markers of a page for which a result exists."""
    for name, (file, draw) in drawn.items():
        if f"<!-- {name} -->" in text and (result := load(file)) is not None:
            text = replaced(text, name, draw(result))
    return text


def replaced(text: str, name: str, body: str) -> str:
    body = f"<!-- {name} -->\n\n{body}\n\n<!-- /{name} -->"
    return re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: body, text, flags=re.S)
