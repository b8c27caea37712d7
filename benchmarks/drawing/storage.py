"""Tables of docs/results/storage-ranks.md: jobs in which some hosts only store."""

from __future__ import annotations

from .base import Drawn, Row, joined, source, table

_MB = 1e6


def draw_links(result: Row) -> str:
    """Draws epochs, rows and bytes of each form of a job, for each link and form of the topology."""
    lines = []
    for row in result["rows"]:
        lines.append(
            [
                f"{row['megabytes_per_second']:g}",
                row["topology"],
                row["form"],
                f"{row['trainers']} + {row['storage_ranks']}",
                f"{row['resident_rows_bytes'] / _MB:.0f}",
                f"{row['loading_seconds']['median']:.2f}",
                *(f"{row[name]['median']:.2f}" for name in ("loading_ratio_to_2_hosts", "loading_ratio")),
                f"{row['training_seconds']['median']:.2f}",
                f"{row['rows_remote']:,}",
            ]
        )
    came = max(abs(row["received"]["other_over_counted"]) for row in result["rows"])
    went = max(row["sent"]["other_over_counted"] * row["sent"]["counted_bytes"] for row in result["rows"])
    text = (
        f"**Hosts that only store.** Epochs of {result['rows'][0]['batches']} batches ({result['vertices']:,} vertices, fan-outs "
        f"{result['fanouts']}, {result['batch_size']} seeds, {result['features']} float32 columns, 1 ms to a host). *Hosts*: those that train and "
        "those that only store. *MB*: cached and own rows on a host that trains. *Loading*: seconds of an epoch that only loads, and its ratios to two and "
        "to four joined hosts. *Training*: seconds of an epoch with a trimmed GraphSAGE."
    )
    header = ["MB/s", "topology", "form", "hosts", "MB", "loading", "to 2", "to 4", "training", "rows fetched"]
    after = (
        "Interfaces of the hosts count bytes too. Without the headers of packets, 66 bytes each, received bytes differ from those that the loaders count by at "
        f"most {came:.3%}. Hosts send at most {went / 1e3:,.0f} kB more than is counted in an epoch, for headers of messages."
    )
    return joined(text, table(header, lines, left=3), after, source(result))


def draw_memory(result: Row) -> str:
    """Draws what the memory of a rank that trains consists of, at its peak."""
    found = result["memory"]
    epoch = found["in_epoch"]
    total = epoch["anonymous"] + epoch["mapped"] + epoch["shared"]
    lines = [
        ["budget (`memory=`)", found["budget_bytes"]],
        ["rows in the cache, with their index", found["cached_bytes"]],
        ["ids of these rows", found["ids_of_cache_bytes"]],
        ["seeds and their order", found["seeds_bytes"]],
        ["table of the thread that draws", found["tables_of_drawing_bytes"]],
        ["pages mapped from files", epoch["mapped"]],
        ["other", found["other_anonymous_bytes"]],
        ["all of these but the budget, without batches", total - epoch["in_flight"]],
        ["batches in flight", epoch["in_flight"]],
    ]
    text = (
        f"**Memory of a rank that trains**, beyond that of libraries. It is the highest of samples that were taken every 0.05 s in an epoch. The graph has "
        f"{found['vertices']:,} vertices with rows of {found['row_bytes']} bytes, and {found['edges']:,} edges in parts. Fan-outs {result['fanouts']}, "
        f"{result['batch_size']} seeds."
    )
    after = (
        f"Without batches, this is {found['over_law_bytes'] / _MB:,.0f} MB more than the budget. In the first job on a directory, which computes the inclusion "
        f"probabilities of joined parts, it is {found['over_law_bytes_with_vip'] / _MB:,.0f} MB more."
    )
    return joined(
        text, table(["", "MB"], [[name, f"{value / _MB:,.1f}"] for name, value in lines]), after, source(result)
    )


def draw_slow(result: Row) -> str:
    """Draws the memory of a rank that stores while the rank that trains sleeps or does not."""
    lines = [
        [
            f"{row['sleep_seconds']:g}",
            f"{row['batch_row_bytes'] / _MB:.1f}",
            *(f"{row[name] / _MB:.1f}" for name in ("storage_bytes_before", "storage_peak_bytes")),
            f"{row['growth_in_second_half_bytes'] / _MB:+.1f}",
        ]
        for row in result["slow"]
    ]
    text = (
        f"**A slow rank.** It loads {result['slow_batches']} batches with fan-outs [50, 50] and sleeps after each. The other columns are MB. *Before*, *at "
        "most*: anonymous memory of the rank that stores, before the first batch and at most. *Growth*: from the first to the second half of the batches."
    )
    header = ["sleep, s", "rows of a batch", "before", "at most", "growth"]
    return joined(text, table(header, lines), source(result))


DRAWN: Drawn = {
    "storage_links": ("storage", draw_links),
    "storage_memory": ("storage_memory", draw_memory),
    "storage_slow": ("storage_memory", draw_slow),
}
