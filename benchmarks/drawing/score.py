"""Draws docs/results/score.md: every installed loader on one graph."""

from __future__ import annotations

from drawing.base import Drawn, Row, joined, source, table


def draw_score(result: Row) -> str:
    """Draws one line for each loader and number of workers. Speeds are relative to PyG over pyg-lib where it ran, or else to the slowest loader."""
    rows = [row for row in result["rows"] if "failed" not in row]
    lines = []
    for row in sorted(rows, key=lambda row: (row["workers"], -row["batches_per_second"])):
        alike = [other for other in rows if other["workers"] == row["workers"]]
        base = next((other for other in alike if other["name"] == "PyG over pyg-lib"), None)
        base = base or min(alike, key=lambda other: other["batches_per_second"])
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if name != "python")
        lines.append(
            [
                row["name"],
                versions,
                str(row["workers"]),
                f"{row['batches_per_second']:.2f}",
                f"{row['batches_per_second'] / base['batches_per_second']:.2f}×",
                f"{row['cpu_seconds_per_batch']:.3f}",
                f"{row['first_batch_seconds']:.2f}",
                f"{(row['memory_bytes'] - row['memory_of_graph']) / 2**20:,.0f}",
            ]
        )
    header = ["loader", "versions", "workers", "batches per s", "relative", "CPU s per batch", "first batch, s", "MiB"]
    title = (
        f"**Loaders** on `{result['graph']}`: {result['vertices']:,} vertices, {result['edges']:,} edges, {result['features']} features. Fanouts "
        f"{result['fanouts']}, {result['batch_size']:,} seeds per batch. Memory does not include the arrays of the graph."
    )
    failed = [f"* {row.get('name', row['file'])}: {row['failed']}" for row in result["rows"] if "failed" in row]
    absent = ["\n".join(["Without figures:", "", *dict.fromkeys(failed)])] if failed else []
    return joined(title, table(header, lines, left=2), *absent, source(result))


DRAWN: Drawn = {"score": ("score", draw_score)}
