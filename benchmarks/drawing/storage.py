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
    pools = found["pools_bytes"]
    lines = [
        ["budget (`memory=`)", found["budget_bytes"]],
        ["rows in the cache, with their index", found["cached_bytes"]],
        ["ids of these rows, seeds, and memory of threads, as planned", found["beside_bytes"]],
        ["pages mapped from files", found["in_epoch"]["mapped"]],
        ["other", found["other_bytes"]],
        ["all of these but the budget, without batches", found["beyond_libraries_bytes"] - found["in_flight_bytes"]],
        ["batches in flight: pools of buffers", pools],
        ["batches in flight: smaller tensors", found["in_flight_bytes"] - pools],
    ]
    text = (
        f"**Memory of a rank that trains**, beyond that of libraries, at its peak in an epoch. The graph has {found['vertices']:,} vertices with rows of "
        f"{found['row_bytes']} bytes, and {found['edges']:,} edges in parts. Fan-outs {result['fanouts']}, {result['batch_size']} seeds. Pools count whole, so "
        "*other* is reduced by those of their pages that no batch has touched."
    )
    over = [found[f"over_law_bytes{end}"] for end in ("", "_after", "_with_vip", "_after_with_vip")]
    at_peak, after, first_at_peak, first_after = (
        f"{abs(number) / _MB:,.0f} MB {'more' if number > 0 else 'less'} than the budget" for number in over
    )
    last = (
        f"Without batches, this is {at_peak}. After the epoch, memory without the pools is {after}. In the first job on a directory, which computes the "
        f"inclusion probabilities of joined parts, these are {first_at_peak} and {first_after}."
    )
    return joined(
        text, table(["", "MB"], [[name, f"{value / _MB:,.1f}"] for name, value in lines]), last, source(result)
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
    "storage_parts": ("storage_parts", draw_links),
    "storage_memory": ("storage_memory", draw_memory),
    "storage_slow": ("storage_memory", draw_slow),
}
