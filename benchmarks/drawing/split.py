"""Table of docs/how-to/cooperative-batches.md: owner maps."""

from __future__ import annotations

from .base import Drawn, Row, joined, source, table

_MAPS = ("vip", "rows", "random")


def draw_owners(result: Row) -> str:
    """Draws balance and exchanged rows of each owner map, for each graph and number of ranks."""
    found = {(row["graph"], row["ranks"], row["split_by"]): row for row in result["rows"]}
    lines = []
    for graph, ranks in dict.fromkeys(key[:2] for key in found):
        rows = [found[graph, ranks, split_by] for split_by in _MAPS]
        excess = [max(row["rows_excess_of_batch"], row["edges_excess_of_batch"]) for row in rows[:2]]
        least = min(row["halo"] for row in rows)
        halo = [f"**{row['halo']:.2f}**" if row["halo"] == least else f"{row['halo']:.2f}" for row in rows]
        ratio = rows[0]["divide_seconds"] / rows[0]["draw_seconds"]
        lines.append([f"{graph}, {ranks}", *halo, *(f"{value:.0%}" for value in excess), f"{ratio:.1f}"])
    header = ["graph, ranks of the host", *(f"rows, {name}" for name in _MAPS)]
    header += [*(f"excess, {name}" for name in _MAPS[:2]), "divide / draw"]
    text = (
        "**Owners.** *Rows* is the largest number of rows that a layer exchanges inside the host, as a fraction of the rows of the batch. *Excess* says by how "
        "much the fullest rank of a batch exceeds the mean, in vertices or edges, whichever is larger. *Divide / draw* is the time to divide a batch, as a "
        'multiple of the time to draw it, with `"vip"`. One rank of the host does both, and the others only read their shares. Batches of the first of '
        f"{result['hosts']} hosts, fanouts {result['fanouts']}, {result['batch_size']} seeds for each rank."
    )
    return joined(text, table(header, lines), source(result))


DRAWN: Drawn = {"split_owners": ("split", draw_owners)}
