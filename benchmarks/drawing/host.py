"""Tables of docs/results/host.md: sampling, batches, start-up and kernels on the CPU, and the short table of README.md."""

from __future__ import annotations

import statistics

from .base import ROOT, Drawn, Row, counted, joined, ours_first, ratio_to, shown, source, table


def draw_sampler(result: Row) -> str:
    names = list(dict.fromkeys(row["sampler"] for row in result["rows"]))
    peers = [name for name in names if not name.startswith("salientpp")]
    lines = []
    for vertices, edges in dict.fromkeys((row["vertices"], row["edges"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["vertices"], row["edges"]) == (vertices, edges)]
        times = {row["sampler"]: row["cpu_ns_per_edge"] for row in rows}
        cells = [f"{times[name]:,.1f}" for name in names]
        ratios = [f"{times[name] / times['salientpp']:.0f}×" for name in peers]
        lines.append([f"{vertices:,} vertices, {edges / 1e6:.1f} M edges", *cells, *ratios])
    title = (
        "**Sampling.** CPU nanoseconds per sampled edge on one core. "
        f"Generated graphs, fanouts {result['fanouts']}, batches of {result['batch_size']:,}."
    )
    return joined(title, table(["graph", *map(shown, names), *ratio_to(peers)], lines), source(result))


def draw_typed(result: Row) -> str:
    names = ours_first(result["rows"], "sampler")
    found = {(row["case"], row["sampler"]): row for row in result["rows"]}
    lines = []
    for case in dict.fromkeys(key[0] for key in found):
        ours = found[case, "salientpp"]
        times = {name: found[case, name]["cpu_ns_per_edge"] for name in names if (case, name) in found}
        cells = [f"{times[name]:,.1f}" if name in times else "–" for name in names]
        ratios = [f"{times[name] / times['salientpp']:.1f}×" if name in times else "–" for name in names[1:]]
        lines.append([f"{case}, {ours['fanouts']}", f"{ours['edges']:,}", *cells, *ratios])
    title = (
        "**Types, times, weights, trees and links.** CPU nanoseconds per edge of a batch on one core, for the whole call that a loader makes "
        f"(from seeds to a `SamplerOutput`). Generated graph of {result['vertices']:,} vertices and {result['graph_edges'] / 1e6:.1f} M edges, "
        f"batches of {result['batch_size']:,}. A dash means that the backend does not support the case, or that the case was not measured."
    )
    header = ["case, fanouts", "edges", *map(shown, names), *ratio_to(names[1:])]
    return joined(title, table(header, lines), source(result))


def draw_loader(result: Row) -> str:
    lines = []
    for vertices, edges, workers in dict.fromkeys(
        (row["vertices"], row["edges"], row["workers"]) for row in result["rows"]
    ):
        rows = [row for row in result["rows"] if (row["vertices"], row["workers"]) == (vertices, workers)]
        ours = next(row for row in rows if row["loader"] == "salientpp")
        for row in rows:
            lines.append(
                [
                    f"{vertices:,} vertices, {edges / 1e6:.0f} M edges" if row is ours else "",
                    shown(row["loader"]),
                    str(workers),
                    f"{row['batches_per_second']:.2f}",
                    f"{row['cpu_seconds_per_batch']:.3f}",
                    f"{ours['batches_per_second'] / row['batches_per_second']:.1f}×",
                    f"{row['cpu_seconds_per_batch'] / ours['cpu_seconds_per_batch']:.1f}×",
                ]
            )
    title = (
        f"**Whole batches.** Batches with {result['features']} float32 features, labels and ids, fanouts {result['fanouts']}, "
        f"{result['batch_size']:,} seeds each. Workers are threads in salientpp and processes in PyG. "
        "The last columns say how many times faster salientpp is, by wall clock and by CPU time."
    )
    header = ["graph", "loader", "workers", "batches / s", "CPU s / batch", "faster, wall", "faster, CPU"]
    return joined(title, table(header, lines, left=2), source(result))


def draw_small(result: Row) -> str:
    names = ours_first(result["rows"], "loader")
    case = ("features", "workers", "batch_size", "fanouts")
    found = {(*(str(row[name]) for name in case), row["loader"]): row for row in result["rows"]}
    lines = []
    for features, workers, size, fanouts in dict.fromkeys(key[:4] for key in found):
        rows = [found[features, workers, size, fanouts, name] for name in names]
        cells = [f"{row['us_per_batch']:,.0f} / {row['cpu_us_per_batch']:,.0f}" for row in rows]
        ratios = [f"{row['us_per_batch'] / rows[0]['us_per_batch']:.1f}×" for row in rows[1:]]
        lines.append([features, workers, size, fanouts, *cells, *ratios])
    title = (
        f"**A small graph** of {result['vertices']:,} vertices and {result['edges']:,} edges. "
        "Microseconds per batch, wall / CPU. The ratios are of wall time."
    )
    header = ["features", "workers", "batch size", "fanouts", *map(shown, names), *ratio_to(names[1:])]
    return joined(title, table(header, lines, left=0), source(result))


def draw_start(result: Row) -> str:
    names = ours_first([row for row in result["rows"] if not row["loader"].startswith("one pass")], "loader")
    lines = []
    for what in dict.fromkeys(row["what"] for row in result["rows"]):
        times = {row["loader"]: row["ms"] for row in result["rows"] if row["what"] == what}
        if names[0] not in times:  # a reference that belongs to no loader
            lines.append([what, f"{next(iter(times.values())):,.1f}", *[""] * (2 * len(names) - 2)])
            continue
        cells = [f"{times[name]:,.1f}" if name in times else "" for name in names]
        ratios = [f"{times[name] / times[names[0]]:.1f}×" if name in times else "" for name in names[1:]]
        lines.append([what.replace("beside", "in addition to"), *cells, *ratios])
    title = (
        "**Start-up.** Wall-clock milliseconds, no workers, one thread unless the row says otherwise. "
        f"The larger graphs have fanouts {result['fanouts']} and batches of 1,024. Lines with one number are for comparison."
    )
    return joined(title, table(["step", *map(shown, names), *ratio_to(names[1:])], lines), source(result))


def draw_parts(result: Row) -> str:
    lines = []
    for row in result["rows"]:
        alone, at_once, parts, network = (row[f"cpu_ms_{kind}"] for kind in ("alone", "at_once", "parts", "network"))
        lines.append(
            [
                f"{row['case']}, {row['fanouts']}",
                row["hosts"],
                f"{row['alpha']:g}",
                f"{row['remote_rows_per_batch']:,.0f}",
                f"{alone:.2f}",
                f"{at_once:.2f}",
                f"{parts:.2f}",
                f"{network:.2f}",
                f"{parts / at_once:.2f}×",
                f"{(parts - network) / at_once:.2f}×",
            ]
        )
    title = (
        f"**Cost of partitioning.** CPU milliseconds per batch of {result['batch_size']} seeds. *One process* has the whole graph; *one of two* is the "
        "same while a second such process runs on the machine. *Two ranks* have a part each. On *two hosts* (emulated) they exchange rows over loopback; on "
        "*one host* both read all rows. *Network* is the time of gloo's threads, in which the kernel copies bytes. The ratios divide *two ranks*, with and "
        "without *network*, by *one of two*."
    )
    header = [
        "graph, fanouts",
        "ranks on",
        "α",
        "remote rows",
        "one process",
        "one of two",
        "two ranks",
        "network",
        "ratio",
        "ratio without network",
    ]
    return joined(title, table(header, lines, left=2), source(result))


def draw_batch(result: Row) -> str:
    edges = result["batch_edges"]
    lines = [
        [row["step"], f"{row['cpu_ns'] / 1e3:,.0f}", f"{row['cpu_ns'] / edges:.2f}", f"{row['share']:.1%}"]
        for row in result["rows"]
    ]
    title = (
        f"**Steps of a batch.** Median CPU time by step. {result['vertices']:,} vertices, {result['edges'] / 1e6:.0f} M edges, "
        f"{result['features']} float32 features, labels and three masks. A batch has {result['batch_vertices']:,.0f} vertices and {edges:,.0f} edges."
    )
    return joined(title, table(["step", "µs", "ns per sampled edge", "share"], lines), source(result))


def draw_growth(result: Row) -> str:
    names = ours_first(result["rows"], "loader")
    found = {(row["vertices"], row["loader"]): row for row in result["rows"]}
    sizes = sorted({row["vertices"] for row in result["rows"]})
    plot_growth(found, names, sizes)
    lines = []
    for size in sizes:
        rows = [found[size, name] for name in names]
        cells = [f"{row['cpu_ns_per_edge']:,.1f}" for row in rows] + [f"{row['peak_bytes'] / 1e6:,.0f}" for row in rows]
        lines.append([f"{size:,} vertices, {rows[0]['edges'] / 1e6:,.1f} M edges", *cells])
    title = (
        "**Growth with the graph.** CPU nanoseconds per sampled edge of whole batches with one float32 feature, and peak resident MB above the inputs "
        f"(construction included). Fanouts {result['fanouts']}, batches of {result['batch_size']:,}, or of all training seeds if these are fewer."
    )
    header = ["graph", *(f"ns, {shown(name)}" for name in names), *(f"MB, {shown(name)}" for name in names)]
    picture = "![CPU time per sampled edge, and memory, over the number of edges](growth.svg)"
    return joined(title, picture, table(header, lines), source(result))


def plot_growth(found: dict[tuple[int, str], Row], names: list[str], sizes: list[int]) -> None:
    """Draws docs/results/growth.svg: cost per sampled edge and memory over the number of edges, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "salientpp"  # the same data give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, label in (
        (axes[0], "cpu_ns_per_edge", "CPU ns per sampled edge"),
        (axes[1], "peak_bytes", "peak MB above the inputs"),
    ):
        for name in names:
            rows = [found[size, name] for size in sizes]
            axis.plot(
                [row["edges"] for row in rows],
                [row[key] / (1e6 if key == "peak_bytes" else 1) for row in rows],
                marker="o",
                label=shown(name),
            )
        axis.set(xscale="log", yscale="log", xlabel="directed edges of the graph", title=label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results" / "growth.svg", metadata={"Date": None})
    pyplot.close(figure)


def draw_long(result: Row) -> str:
    rows = [row for row in result["rows"] if row["batches"] % (4 * result["rows"][0]["batches"]) == 0]
    lines = [
        [f"{row['batches']:,}", f"{row['resident_bytes'] / 2**20:.1f}", str(row["descriptors"]), str(row["threads"])]
        for row in rows
    ]
    last = result["rows"][-1]
    title = (
        f"**A long run.** {last['batches']:,} batches in {last['seconds']:.0f} s with {result['workers']} sampling threads. Over the last half, resident "
        f"memory changed by {result['growth_of_last_half']['resident memory']:+.2%} ({result['bytes_per_batch']:+.1f} bytes per batch)."
    )
    return joined(title, table(["batches", "resident MiB", "file descriptors", "threads"], lines), source(result))


def draw_gather(result: Row) -> str:
    names = ours_first(result["rows"], "gather")
    found = {(row["dtype"], row["threads"], row["gather"]): row["gb_per_second"] for row in result["rows"]}
    lines = []
    for dtype, threads in dict.fromkeys(key[:2] for key in found):
        speeds = [found[dtype, threads, name] for name in names]
        lines.append(
            [f"{dtype.removeprefix('torch.')}, {counted(threads, 'thread')}", *(f"{speed:.1f}" for speed in speeds)]
        )
    title = (
        f"**Gathering rows.** GB/s of payload for {result['gathered']:,} distinct rows in random order, out of {result['vertices']:,} rows of "
        f"{result['columns']} columns."
    )
    return joined(title, table(["rows", *names], lines), source(result))


def draw_lookup(result: Row) -> str:
    ours = result["rows"][0]["ns_per_id"]
    lines = [
        [
            row["look_up"],
            f"{row['ns_per_id']:.1f}",
            f"{row['ns_per_id'] / ours:.2f}×",
            "–" if row.get("bytes_per_vertex") is None else f"{row['bytes_per_vertex']:.2f}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Tier look-up.** CPU nanoseconds per id on one core. {result['vertices']:,} vertices, {result['parts']} parts, α = {result['alpha']}. "
        "A third of the ids is local, a third cached and a third remote."
    )
    header = ["method", "ns per id", "relative to salientpp", "bytes per vertex"]
    return joined(title, table(header, lines), source(result))


def draw_vip(result: Row) -> str:
    ours = {row["threads"]: row["seconds"] for row in result["rows"] if row["vip"] == "salientpp"}
    lines = [
        [
            f"{row['vip']}, {counted(row['threads'], 'thread')}",
            f"{row['seconds']:.2f}",
            f"{row['ns_per_edge_and_hop']:.1f}",
            f"{row['seconds'] / ours[row['threads']]:.1f}×",
        ]
        for row in sorted(result["rows"], key=lambda row: row["threads"])
    ]
    title = (
        f"**Inclusion probabilities** of {result['parts']} parts over three hops. {result['vertices']:,} vertices, {result['edges'] / 1e6:.0f} M edges. "
        f"At its peak salientpp takes {result['extra_bytes_per_vertex_and_part']:.1f} bytes per vertex and part in addition to the graph, output included."
    )
    header = ["method", "seconds", "ns per edge and hop", "relative to salientpp"]
    return joined(title, table(header, lines), source(result))


def draw_cuda(result: Row) -> str:
    """Draws three small tables: epochs against the floor, over β in two orders, and the assembly kernel."""
    parts = {name: [row for row in result["rows"] if row["part"] == name] for name in ("epoch", "tier", "assembly")}
    epochs = [
        [
            row["name"],
            f"{row['ms_per_batch']:.2f}",
            f"{row['over_floor']:.2f}×",
            f"{row['share_waiting']:.0%}",
            f"{statistics.median(row['batches_per_second_loading']):,.1f}" if row["batches_per_second_loading"] else "",
        ]
        for row in parts["epoch"]
    ]
    tiers: dict[float, dict[str, Row]] = {}
    for row in parts["tier"]:
        tiers.setdefault(row["beta"], {})[row["order"]] = row
    orders = list(dict.fromkeys(row["order"] for row in parts["tier"]))
    over_beta = [
        [
            f"{beta:g}",
            *(
                cell
                for order in orders
                for cell in (f"{by[order]['ms_per_batch']:.2f}", f"{by[order]['share_of_rows_from_host']:.0%}")
            ),
        ]
        for beta, by in tiers.items()
    ]
    kernel = [
        [
            row["dtype"],
            f"{row['fused_us']:,.0f}",
            f"{row['in_torch_us']:,.0f}",
            f"{row['in_torch_us'] / row['fused_us']:.1f}×",
        ]
        for row in parts["assembly"]
    ]
    model = f"3-layer GraphSAGE, width {result['hidden']}, fanouts {result['fanouts']}, batches of {result['batch_size']}, {result['workers']} workers"
    return joined(
        f"**Training on a GPU**, {result['vertices']:,} vertices; {model}. The floor is the same model on batches that are already on the device.",
        table(["", "ms per batch", "relative to the floor", "GPU waits", "batches / s, loading alone"], epochs),
        f"**The GPU tier**, {result['sparse_vertices']:,} vertices, 1 % of them seeds: ms per batch and share of rows from the host.",
        table(["β", *(cell for order in orders for cell in (f"{order} order, ms", "from the host"))], over_beta),
        "**Assembling rows**, µs.",
        table(["", "one pass", "concatenate and permute in torch", "ratio"], kernel),
        source(result),
    )


#: Results that the short table of README.md needs.
SUMMARY = ["sampler", "loader", "small", "gather", "vip", "paper_evaluation"]


def draw_summary(results: dict[str, Row | None]) -> str:
    """Draws the short table: our figure, the closest peer's, and their ratio."""
    machine = next(result for result in results.values() if result is not None)["machine"]
    largest = max((row["vertices"] for row in (results["sampler"] or {"rows": []})["rows"]), default=0)
    small = {"features": 16, "workers": 0, "batch_size": 32, "fanouts": [10, 10]}
    exact = {"graph": "generated", "way": ("salientpp.inference", "PyG model.inference")}
    # what, result, name of a contender, figure, rows to take (a tuple lists the allowed values), unit, digits, whether more is better
    entries = [
        ("CPU time per sampled edge", "sampler", "sampler", "cpu_ns_per_edge", {"vertices": largest}, "ns", 1, False),
        (
            "CPU time per batch, no workers",
            "loader",
            "loader",
            "cpu_seconds_per_batch",
            {"workers": 0, "vertices": largest},
            "s",
            3,
            False,
        ),
        (
            "batches, 2 workers",
            "loader",
            "loader",
            "batches_per_second",
            {"workers": 2, "vertices": largest},
            "per s",
            1,
            True,
        ),
        ("time per small batch", "small", "loader", "us_per_batch", small, "µs", 0, False),
        (
            "epoch with [exact evaluation](docs/results/paper.md#evaluation-included), 4 hosts",
            "paper_evaluation",
            "way",
            "seconds_per_epoch",
            exact,
            "s",
            1,
            False,
        ),
        ("inclusion probabilities, 2 threads", "vip", "vip", "seconds", {"threads": 2}, "s", 2, False),
    ]
    lines, dates = [], []
    for what, name, key, value, where, unit, digits, more_is_better in entries:
        result = results[name]
        if result is None or result["machine"] != machine:  # the caption names one machine
            continue
        rows = [
            row
            for row in result["rows"]
            if all(row[k] in v if isinstance(v, tuple) else row[k] == v for k, v in where.items())
        ]
        ours = [row[value] for row in rows if row[key].startswith("salientpp")]
        peers = {row[key]: row[value] for row in rows if not row[key].startswith("salientpp")}
        if not ours or not peers:
            continue
        closest = (max if more_is_better else min)(peers, key=lambda peer: peers[peer])
        ratio = ours[0] / peers[closest] if more_is_better else peers[closest] / ours[0]
        peer = f"{peers[closest]:,.{digits}f} {unit}, {shown(closest).partition(', ')[0]}"
        lines.append([what, f"{ours[0]:,.{digits}f} {unit}", peer, f"{ratio:.1f}×"])
        dates.append(result["date"])
    caption = (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']:.0f} GB, no GPU; {min(dates)} to {max(dates)}; `make bench`. "
        f"Generated graphs, the largest with {largest / 1e6:.1f} M vertices."
    )
    return joined(table(["", "salientpp", "closest peer", "faster"], lines), caption)


DRAWN: Drawn = {
    "sampler": ("sampler", draw_sampler),
    "typed": ("typed", draw_typed),
    "loader": ("loader", draw_loader),
    "small": ("small", draw_small),
    "start": ("start", draw_start),
    "parts": ("parts", draw_parts),
    "batch": ("batch", draw_batch),
    "growth": ("growth", draw_growth),
    "long": ("long", draw_long),
    "gather": ("gather", draw_gather),
    "lookup": ("lookup", draw_lookup),
    "vip": ("vip", draw_vip),
    "cuda": ("cuda", draw_cuda),
}
