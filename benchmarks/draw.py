"""Draw the tables of README.md and docs from the JSON under benchmarks/results: python benchmarks/draw.py

A table stands between ``<!-- name -->`` and ``<!-- /name -->``; what is between is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(result: dict) -> str:
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']:.0f} GB, {machine['gpu'] or 'no GPU'}; torch "
        f"{result['versions']['torch']}; {result['date']}; `{result['command']}`."
    )


def draw_demo(result: dict) -> str:
    runs = result["rows"]
    rows = [
        [quantity, *(f"{run[quantity]:,.1f}" if "MB" in quantity else f"{run[quantity]:,.0f}" for run in runs)]
        for quantity in list(runs[0])[1:]
    ]
    rows += [[f"test accuracy, {who}", f"{value:.3f}", ""] for who, value in result["test accuracy"].items()]
    title = (
        f"**The demo**: {result['ranks']} ranks on one machine, fanouts {result['fanouts']}, batch size {result['batch_size']} per rank, "
        f"generated graph of 100,000 vertices; figures per epoch, sum of ranks; {result['seconds']:.0f} s in all."
    )
    return "\n\n".join([title, table(["", *(run["name"] for run in runs)], rows), source(result)])


def draw_volume(result: dict) -> str:
    """Share of rows left at α = 0.16, fanouts (15, 10, 5), per graph, workload and K."""
    policies = ["vip", "simulation", "wpr", "halo", "degree", "paths", "random", "oracle-heldout"]
    cells: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        if row["fanouts"] == [15, 10, 5] and row["replication_factor"] == 0.16:
            key = (row["dataset"], row["workload"], row["batch_size"], row["parts"])
            cells.setdefault(key, {})[row["policy"]] = row["remote_rows_per_epoch"]
    rows = []
    for (dataset, workload, batch_size, parts), counts in cells.items():
        best = counts["oracle-heldout"]
        shares = [f"{counts[policy] / best:.3f}" for policy in policies[:-1]]
        rows.append([f"{dataset}, {'1 % seeds' if workload == 'concentrated' else 'all training seeds'}, B = {batch_size}, K = {parts}",
                     f"{best:,.0f}", *shares])  # fmt: skip
    title = (
        "**Rows fetched per epoch with a cache of α = 0.16**, fanouts (15, 10, 5), relative to an oracle that ranks vertices by the "
        f"accesses of {result['epochs']} other epochs (first column: its rows). Real graphs; less is better."
    )
    return "\n\n".join([title, table(["graph and workload", "oracle", *policies[:-1]], rows), source(result)])


DRAWN = {"demo": draw_demo, "volume": draw_volume}


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        for name, draw in DRAWN.items():
            result = load(name)
            if result is not None:
                body = f"<!-- {name} -->\n\n{draw(result)}\n\n<!-- /{name} -->"
                text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.S)
        page.write_text(text)


if __name__ == "__main__":
    main()
