"""Tables of docs/results/full-graph.md: epochs on the whole graph, by layout and by plan, and memory with recomputed layers."""

from __future__ import annotations

from .base import Drawn, Row, joined, source, table


def graph_of(row: Row) -> str:
    if "average degree" in row:
        return f"generated, degree {row['average degree']}"
    return row.get("graph", "generated")


def draw_layouts(result: Row) -> str:
    rows = [row for row in result["rows"] if "layout" in row]
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((graph_of(row), row["hosts"]), {})[row["layout"]] = row
    lines = []
    for (graph, hosts), found in cases.items():
        if hosts > 1:
            alone = cases[graph, 1]["one process"]
            for layout, row in found.items():
                first = row is next(iter(found.values()))
                lines.append(
                    [
                        f"{graph}, {hosts} hosts" if first else "",
                        f"`{layout}`",
                        f"{row['seconds']:.3f}",
                        f"{row['words'] / 1e6:.2f}",
                        f"{alone['seconds']:.3f}" if first else "",
                    ]
                )
    title = (
        f"**Layouts.** Seconds of an epoch of a 2-layer GCN over links of {result['bytes_per_second'] / 1e6:.0f} MB/s, and millions of words that the rank "
        f"with most traffic receives. The generated graph has {result['vertices']:,} vertices. *One process* has the whole graph and no network."
    )
    header = ["graph", "layout", "seconds", "M words", "one process, s"]
    return joined(title, table(header, lines, left=2), source(result))


def draw_plans(result: Row) -> str:
    plans = list(dict.fromkeys(row["plan"] for row in result["rows"] if "plan" in row))
    found = {(graph_of(row), row["plan"]): row for row in result["rows"] if "plan" in row}
    name = "auto" if "auto" in plans else "cut"
    columns = {"cached vertices": "cached", "recomputed vertices": "computed again", "sums": "sums"}
    says = "vertices whose rows it caches, vertices that it computes again, and sums that it gets"
    lines = []
    for graph in dict.fromkeys(graph for graph, _ in found):
        chosen = found[graph, name]["predicted"]  # a layout without a choice for each vertex has only words
        times = [f"{found[graph, plan]['seconds']:.3f}" for plan in plans]
        lines.append([graph, *times, *(f"{chosen.get(column, 0):,}" for column in columns)])
    title = (
        f"**Plans.** Seconds of an epoch of a 3-layer GraphSAGE on 4 emulated hosts with links of {result['bytes_per_second'] / 1e6:.0f} MB/s. "
        f"The last columns give the {name} plan of one rank: {says}."
    )
    header = ["graph", *(f"`{plan}`" for plan in plans), *columns.values()]
    return joined(title, table(header, lines), source(result))


def draw_recompute(result: Row) -> str:
    lines = []
    for row in result["rows"]:
        same = [each for each in result["rows"] if (each["ranks"], each["model"]) == (row["ranks"], row["model"])]
        first = same[0]
        ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
        lines.append(
            [
                f"{row['model']}, {ranks}" if row is first else "",
                row["way"],
                f"{row['step'] / 1e6:,.0f}",
                f"{row['step'] / first['step']:.0%}",
                f"{row['process'] / 1e6:,.0f}",
                f"{row['seconds']:.1f}",
            ]
        )
    title = (
        f"**Memory of deep models.** MB of a training step on {result['rows'][0]['graph']} with {result['hidden']} hidden features, on the rank with "
        "the largest peak, and the share of the memory without options. *Process* includes the graph, the features and the libraries."
    )
    header = ["model", "kept", "step, MB", "share", "process, MB", "seconds of a step"]
    return joined(title, table(header, lines, left=2), source(result))


DRAWN: Drawn = {
    "layouts": ("fullgraph", draw_layouts),
    "plans": ("fullgraph", draw_plans),
    "recompute": ("recompute", draw_recompute),
}
