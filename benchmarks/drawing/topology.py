"""Tables of docs/results/topology.md: epochs, traffic and memory with the topology in parts."""

from __future__ import annotations

from .base import Drawn, Row, counted, joined, source, table

#: Number of batches in flight if the option ``depth`` is not given.
_DEPTH = 10


def network(row: Row) -> str:
    return f"{row['hosts']} hosts, {row['megabytes_per_second']:g} MB/s, {row['delay_ms']:g} ms"


def workload(result: Row) -> str:
    """Describes the graph and the batches of a result."""
    return (
        f"A generated graph of {result['vertices']:,} vertices and {result['rows'][0]['edges'] / 1e6:.1f} M edges with {result['features']} float32 columns. "
        f"Fanouts {result['fanouts']}, batches of {result['batch_size']}, {result['batches']} batches of every rank in an epoch, α = {result['alpha']:g}. "
        f"The model is a trimmed GraphSAGE of {len(result['fanouts'])} layers of {result['hidden']} under DDP."
    )


def draw_epochs(result: Row) -> str:
    """Draws seconds of an epoch in both forms, and the ratio of seconds and of CPU seconds."""
    lines = []
    rows = [row for row in result["rows"] if row["depth"] == _DEPTH]
    for row, after in zip(rows[::2], rows[1::2], strict=True):
        assert (row["work"], after["work"]) == ("loading", "training"), "each network has both works"
        cells = []
        for of_work in (row, after):
            seconds = [of_work[form]["seconds"]["median"] for form in ("whole", "parts")]
            ratio = of_work["ratio"]
            cells += [
                f"{seconds[0]:.2f}",
                f"{seconds[1]:.2f}",
                f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})",
                f"{of_work['cpu_ratio']['median']:.2f}",
            ]
        lines.append([network(row), *cells])
    turns = [row["ratio"]["repeats"] for row in rows]
    columns = ["whole, s", "parts, s", "ratio", "CPU ratio"]
    header = ["network", *(f"{work}: {column}" for work in ("loading", "training") for column in columns)]
    title = (
        f"**Epochs.** {workload(result)} Medians of at least {counted(min(turns), 'turn')}, in brackets quartiles. A ratio compares the forms "
        "in one turn."
    )
    loads = result["load_averages"]
    load = f"The load average of the machine was {min(loads):.0f} to {max(loads):.0f} between the cases."
    return joined(title, table(header, lines), load, source(result))


def draw_depth(result: Row) -> str:
    """Draws the effect of ``depth`` on epochs in both forms."""
    links = {
        (row["hosts"], row["megabytes_per_second"], row["delay_ms"]) for row in result["rows"] if row["depth"] != _DEPTH
    }
    rows = [row for row in result["rows"] if (row["hosts"], row["megabytes_per_second"], row["delay_ms"]) in links]
    lines = []
    for row in sorted(rows, key=lambda row: (row["hosts"], row["work"], row["depth"])):
        seconds = [f"{row[form]['seconds']['median']:.2f}" for form in ("whole", "parts")]
        lines.append([f"{network(row)}, {row['work']}", str(row["depth"]), *seconds, f"{row['ratio']['median']:.2f}"])
    if not lines:
        return "Not measured."
    header = ["network, work", "`depth`", "whole, s", "parts, s", "ratio"]
    return joined("**Depth of the pipeline.** The same workload.", table(header, lines), source(result))


def draw_traffic(result: Row) -> str:
    """Draws messages and bytes of a batch in both forms."""
    lines = []
    rows = {row["hosts"]: row for row in result["rows"] if row["depth"] == _DEPTH}
    for hosts, row in rows.items():
        for form in ("whole", "parts"):
            found = row[form]
            batches = found["batches"]
            kilobytes = [found[f"{kind}_bytes"] / batches / 1e3 for kind in ("row", "list", "other")]
            lines.append(
                [
                    f"{hosts} hosts, {form}",
                    f"{found['control_messages'] / batches:.1f}",
                    f"{found['row_messages'] / batches:.1f}",
                    *(f"{number:,.0f}" for number in kilobytes),
                    f"{row['byte_ratio']:.3f}" if form == "parts" else "",
                    f"{found['topology_bytes'] / 1e6:.1f}",
                ]
            )
    header = [
        "hosts, topology",
        "small messages",
        "row messages",
        "rows, kB",
        "lists, kB",
        "other, kB",
        "bytes / whole",
        "lists held, MB",
    ]
    title = (
        "**Messages and bytes of a batch.** Received by one rank, on average. *Lists* are requests to draw and their answers. *Other* are counts and ids "
        "of rows."
    )
    return joined(title, table(header, lines), source(result))


def draw_memory(result: Row) -> str:
    """Draws the memory of the lists of a large graph."""
    whole = next(row for row in result["rows"] if row["form"] == "whole")
    lines = [
        [
            row["form"],
            f"{row['batches']}",
            f"{row['list_bytes'] / 1e6:,.1f}",
            f"{row['resident_bytes'] / 1e6:,.1f}",
            f"{row['resident_bytes'] / whole['list_bytes'] * result['parts']:.3f}",
            f"{row['anonymous_bytes_before'] / 1e6:,.0f}",
            f"{row['anonymous_bytes'] / 1e6:,.0f}",
            f"{row['batch_bytes'] / 1e6:,.0f}",
        ]
        for row in result["rows"]
    ]
    share = f"resident, 1/{result['parts']} of all lists"
    header = [
        "topology",
        "batches",
        "lists held, MB",
        "resident, MB",
        share,
        "anonymous before, MB",
        "anonymous after, MB",
        "batches, MB",
    ]
    title = (
        f"**Memory of a large topology.** {result['vertices'] / 1e6:g} M vertices, {result['edges'] / 1e6:.1f} M edges, {result['parts']} parts of random "
        f"vertices, fanouts {result['fanouts']}, batches of {result['batch_size']}. The rank with the most resident lists, after an epoch without caches."
    )
    return joined(title, table(header, lines), source(result))


DRAWN: Drawn = {
    "topology_epochs": ("topology", draw_epochs),
    "topology_depth": ("topology", draw_depth),
    "topology_traffic": ("topology", draw_traffic),
    "topology_memory": ("topology_memory", draw_memory),
}
