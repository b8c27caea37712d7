"""Draw the tables and plots of README.md and docs from the JSON under benchmarks/results: python benchmarks/draw.py

A table stands between ``<!-- name -->`` and ``<!-- /name -->``; what is between is replaced. Plots are SVG files under docs/.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

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


POLICIES = ["vip", "vip-hop", "simulation", "wpr", "halo", "degree", "paths", "random"]


def by_case(result: dict) -> dict[tuple, dict[str, float]]:
    """(graph, workload, K, fanouts, α) -> policy -> rows per epoch."""
    cases: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        key = (row["dataset"], row["workload"], row["parts"], tuple(row["fanouts"]), row["replication_factor"])
        cases.setdefault(key, {})[row["policy"]] = row["remote_rows_per_epoch"]
    return cases


def named(workload: str) -> str:
    return {"train": "all training seeds", "concentrated": "1 % seeds"}[workload]


def draw_volume(result: dict) -> str:
    """Share of rows left at α = 0.16, fanouts (15, 10, 5), per graph, workload and K."""
    policies = [policy for policy in POLICIES if policy != "vip-hop"]
    batch_sizes = {row["workload"]: row["batch_size"] for row in result["rows"]}
    rows = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        if (fanouts, alpha) == ((15, 10, 5), 0.16):
            best = counts["oracle-heldout"]
            shares = [f"{counts[policy] / best:.3f}" for policy in policies]
            rows.append(
                [f"{dataset}, {named(workload)}, B = {batch_sizes[workload]}, K = {parts}", f"{best:,.0f}", *shares]
            )
    title = (
        "**Rows fetched per epoch with a cache of α = 0.16**, fanouts (15, 10, 5), relative to an oracle that ranks vertices by the "
        f"accesses of {result['epochs']} other epochs (first column: its rows); less is better. Real graphs: packages of Debian 12 and their "
        "dependencies (101,291 vertices), Facebook pages (22,470) and Toloka workers (11,758)."
    )
    return "\n\n".join([title, table(["graph and workload", "oracle", *policies], rows), source(result)])


def draw_volume_ahead(result: dict) -> str:
    """Rows and bytes of an epoch, and what they are of the static cache's, at each α."""
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    alphas = sorted({row["alpha"] for row in result["rows"]})
    lines = []
    for dataset in dict.fromkeys(row["dataset"] for row in result["rows"]):
        for way in ways:
            own = {row["alpha"]: row for row in result["rows"] if (row["dataset"], row["way"]) == (dataset, way)}
            first = {row["alpha"]: row for row in result["rows"] if (row["dataset"], row["way"]) == (dataset, ways[0])}
            cells = []
            for alpha in alphas:
                row, static = own[alpha], first[alpha]
                cells += [
                    f"{row['rows']:,.0f} ({row['rows'] / static['rows']:.3f})",
                    f"{row['bytes'] / 1e6:,.1f} ({row['bytes'] / static['bytes']:.3f})",
                ]
            some = own[alphas[0]]
            name = f"{dataset}, B = {some['batch_size']}, K = {some['parts']}" if way == ways[0] else ""
            lines.append([name, way, *cells])
    columns = [f"{what}, α = {alpha:g}" for alpha in alphas for what in ("rows", "MB")]
    return "\n\n".join([table(["graph", "way", *columns], lines), source(result)])


def draw_volume_summary(result: dict) -> str:
    cases = [counts for key, counts in by_case(result).items() if key[-1] > 0 and counts["oracle-heldout"] > 0]
    lines = []
    for policy in POLICIES:
        ratios = [counts[policy] / counts["oracle-heldout"] for counts in cases]
        others = [counts["vip"] / counts[policy] for counts in cases if counts[policy] > 0]
        lines.append([policy, f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{max(others):.3f}"])
    text = (
        f"{len(cases)} cases: {len({key[:2] for key in by_case(result)})} graphs and workloads, K, fanouts and α > 0."
    )
    return "\n\n".join(
        [
            text,
            table(["policy", "geometric mean over held-out oracle", "worst", "VIP over it, worst"], lines),
            source(result),
        ]
    )


def draw_volume_exceptions(result: dict) -> str:
    lines = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        best = min(counts["oracle"], counts["oracle-heldout"])
        if fanouts != (5, 5, 5) and alpha <= 0.5 and best > 0 and counts["vip"] > 1.03 * best:
            ratios = [f"{counts['vip'] / counts[oracle]:.3f}" for oracle in ("oracle", "oracle-heldout")]
            lines.append(
                [
                    f"{dataset}, {named(workload)}",
                    str(parts),
                    str(list(fanouts)),
                    f"{alpha:g}",
                    f"{counts['vip']:,.0f}",
                    *ratios,
                ]
            )
    if not lines:
        return "None."
    return table(
        ["graph", "K", "fanouts", "α", "VIP, rows per epoch", "over the oracle", "over the held-out oracle"], lines
    )


def draw_oracle(result: dict) -> str:
    cases: dict[tuple, dict[int, str]] = {}
    for row in result["rows"]:
        ratios = [row["ratio_to_oracle"], row["ratio_to_heldout"]]
        if None not in ratios:
            key = (row["dataset"], str(row["fanouts"]), f"{row['replication_factor']:g}")
            cases.setdefault(key, {})[row["epochs"]] = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    epochs = sorted({row["epochs"] for row in result["rows"]})
    lines = [
        [", ".join([key[0], f"fanouts {key[1]}", f"α = {key[2]}"]), *(cells.get(e, "–") for e in epochs)]
        for key, cells in cases.items()
    ]
    title = f"VIP over the oracle / over the held-out oracle, 1 % seeds, K = {result['parts']}, by the number of counted epochs:"
    return "\n\n".join([title, table(["", *(f"{e} epochs" for e in epochs)], lines), source(result)])


def draw_partitions(result: dict) -> str:
    found: dict[tuple, dict[str, dict]] = {}
    for entry in result["partitions"]:
        found.setdefault((entry["dataset"], entry["workload"], entry["parts"]), {})[entry["edge_weights"]] = entry
    lines = []
    for (dataset, workload, parts), weights in found.items():
        rows = {name: entry["rows_without_cache"] for name, entry in weights.items()}
        ratios = [f"{rows['vip'][fanouts] / rows['equal'][fanouts]:.3f}" for fanouts in rows["equal"]]
        lines.append([f"{dataset}, {named(workload)}, K = {parts}", *ratios])
    return table(["", *(f"fanouts {fanouts}" for fanouts in result["partitions"][0]["rows_without_cache"])], lines)


def draw_volume_all(result: dict) -> str:
    parts = []
    cases = by_case(result)
    for dataset, workload in dict.fromkeys(key[:2] for key in cases):
        lines = []
        for (_, _, k, fanouts, alpha), counts in (
            (key, value) for key, value in cases.items() if key[:2] == (dataset, workload)
        ):
            best = counts["oracle-heldout"]
            ratios = [
                f"{counts[policy] / best:.3f}" if best else f"({counts[policy]:,.0f})"
                for policy in [*POLICIES, "oracle"]
            ]
            lines.append([f"{k}, {list(fanouts)}, {alpha:g}", f"{best:,.0f}", *ratios])
        parts += [
            f"### {dataset}, {named(workload)}",
            table(["K, fanouts, α", "held-out oracle, rows", *POLICIES, "oracle"], lines),
        ]
    return "\n\n".join([*parts, source(result)])


def draw_sampler(result: dict) -> str:
    names = list(dict.fromkeys(row["sampler"] for row in result["rows"]))
    sizes = list(dict.fromkeys((row["vertices"], row["edges"]) for row in result["rows"]))
    lines = []
    for size in sizes:
        of_size = {
            row["sampler"]: row["cpu_ns_per_edge"] for row in result["rows"] if (row["vertices"], row["edges"]) == size
        }
        peers = [of_size[name] / of_size["salientpp"] for name in names if not name.startswith("salientpp")]
        cells = [f"{of_size[name]:,.1f}" for name in names]
        lines.append(
            [f"{size[0]:,} vertices, {size[1] / 1e6:.1f} M edges", *cells, *(f"{ratio:.0f}×" for ratio in peers)]
        )
    peers = [f"{name} / salientpp" for name in names if not name.startswith("salientpp")]
    title = f"**Sampling**, CPU nanoseconds per sampled edge on one core, fanouts {result['fanouts']}, batches of {result['batch_size']}, generated graphs:"
    return "\n\n".join([title, table(["", *names, *peers], lines), source(result)])


def draw_typed(result: dict) -> str:
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
        f"**Types, times, weights, trees and links**, CPU nanoseconds per edge of a batch on one core, {result['vertices']:,} vertices, "
        f"{result['graph_edges'] / 1e6:.1f} M edges, batches of {result['batch_size']}; the whole call that a loader makes, seeds in and a "
        "`SamplerOutput` out. A dash: that backend cannot do it, or was not asked:"
    )
    header = ["case, fanouts", "edges", *names, *(f"{name} / salientpp" for name in names[1:])]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_loader(result: dict) -> str:
    lines = []
    cases = dict.fromkeys((row["vertices"], row["edges"], row["workers"]) for row in result["rows"])
    for vertices, edges, workers in cases:
        rows = [row for row in result["rows"] if (row["vertices"], row["workers"]) == (vertices, workers)]
        ours = next(row for row in rows if row["loader"] == "salientpp")
        for row in rows:
            lines.append(
                [
                    f"{vertices:,} vertices, {edges / 1e6:.0f} M edges" if row is ours else "",
                    str(workers),
                    row["loader"],
                    f"{row['batches_per_second']:.2f}",
                    f"{row['cpu_seconds_per_batch']:.3f}",
                    f"{ours['batches_per_second'] / row['batches_per_second']:.1f}× · "
                    f"{row['cpu_seconds_per_batch'] / ours['cpu_seconds_per_batch']:.1f}×",
                ]
            )
    title = (
        f"**Whole batches** (features, labels, ids), {result['features']} float32 features, fanouts {result['fanouts']}, batches of "
        f"{result['batch_size']}; workers are threads here and processes in PyG; how many times as fast ours is, by the wall clock and by CPU time:"
    )
    header = ["", "workers", "loader", "batches per second", "CPU seconds per batch", "salientpp's speed, wall · CPU"]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_start(result: dict) -> str:
    names = ours_first([row for row in result["rows"] if not row["loader"].startswith("one pass")], "loader")
    lines = []
    for what in dict.fromkeys(row["what"] for row in result["rows"]):
        of_what = {row["loader"]: row["ms"] for row in result["rows"] if row["what"] == what}
        if names[0] not in of_what:  # no loader's
            lines.append([what, f"{next(iter(of_what.values())):,.1f}", *[""] * (2 * len(names) - 2)])
            continue
        cells = [f"{of_what[name]:,.1f}" if name in of_what else "" for name in names]
        ratios = [f"{of_what[name] / of_what[names[0]]:.1f}×" if name in of_what else "" for name in names[1:]]
        lines.append([what, *cells, *ratios])
    title = (
        "**Until something can be done**, ms by the wall clock, no workers, one thread where nothing else is said; larger graphs with fanouts "
        f"{result['fanouts']} and batches of 1,024:"
    )
    return "\n\n".join(
        [title, table(["", *names, *(f"{name} / {names[0]}" for name in names[1:])], lines), source(result)]
    )


def draw_small(result: dict) -> str:
    names = ours_first(result["rows"], "loader")
    case = ("features", "workers", "batch_size", "fanouts")
    found = {(*(str(row[name]) for name in case), row["loader"]): row for row in result["rows"]}
    lines = []
    for features, workers, size, fanouts in dict.fromkeys(key[:4] for key in found):
        rows = [found[features, workers, size, fanouts, name] for name in names]
        cells = [f"{row['us_per_batch']:,.0f} / {row['cpu_us_per_batch']:,.0f}" for row in rows]
        ratios = [f"{row['us_per_batch'] / rows[0]['us_per_batch']:.1f}×" for row in rows[1:]]
        lines.append([f"{features} features, {workers} workers, batches of {size}, fanouts {fanouts}", *cells, *ratios])
    title = (
        f"**A small graph**, {result['vertices']:,} vertices, {result['edges']:,} edges: µs per batch, wall / CPU. Work that each batch pays once counts most "
        "here, and where features are wide, copying them:"
    )
    header = ["", *names, *(f"{name} / salientpp, wall" for name in names[1:])]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_parts(result: dict) -> str:
    lines = [
        [
            f"{row['case']}, {row['fanouts']}",
            row["hosts"],
            f"{row['alpha']:g}",
            f"{row['cpu_ms_alone']:.2f}",
            f"{row['cpu_ms_at_once']:.2f}",
            f"{row['cpu_ms_parts']:.2f}",
            f"{row['cpu_ms_network']:.2f}",
            f"{row['cpu_ms_parts'] / row['cpu_ms_alone']:.2f}× · {row['cpu_ms_parts'] / row['cpu_ms_at_once']:.2f}×",
            " · ".join(
                f"{(row['cpu_ms_parts'] - row['cpu_ms_network']) / row[alone]:.2f}×"
                for alone in ("cpu_ms_alone", "cpu_ms_at_once")
            ),
            f"{row['remote_rows_per_batch']:,.0f}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**What partitioning adds**, CPU milliseconds per batch of {result['batch_size']} seeds: one process with the whole graph, by itself and two of them "
        "at once, which share the machine as two ranks do; and two ranks with a part each, as if on two hosts, with all between them over loopback, and on "
        "one, as torchrun and SLURM start them, where both read all rows: both ranks' CPU time over both ranks' batches, "
        "and what gloo's threads have of it, which is the kernel copying bytes. Ratios to one process by itself · to one of two:"
    )
    header = [
        "",
        "on",
        "α",
        "one process",
        "one of two",
        "two ranks",
        "of it network",
        "ratio",
        "without network",
        "rows fetched per batch",
    ]
    return "\n\n".join([title, table(header, lines), source(result)])


def counted(threads: int) -> str:
    return f"{threads} thread" + "s" * (threads != 1)


def ours_first(rows: list[dict], key: str) -> list[str]:
    return sorted(dict.fromkeys(row[key] for row in rows), key=lambda name: (not name.startswith("salientpp"), name))


def draw_gather(result: dict) -> str:
    names = ours_first(result["rows"], "gather")
    found = {(row["dtype"], row["threads"], row["gather"]): row["gb_per_second"] for row in result["rows"]}
    lines = []
    for dtype, threads in dict.fromkeys(key[:2] for key in found):
        speeds = [found[dtype, threads, name] for name in names]
        lines.append([f"{dtype.removeprefix('torch.')}, {counted(threads)}", *(f"{speed:.1f}" for speed in speeds)])
    title = (
        f"**Gathering rows**, GB/s of payload, {result['gathered']:,} distinct rows in no order out of {result['vertices']:,} of "
        f"{result['columns']} columns:"
    )
    return "\n\n".join([title, table(["", *names], lines), source(result)])


def draw_lookup(result: dict) -> str:
    ours = result["rows"][0]["ns_per_id"]
    lines = []
    for row in result["rows"]:
        size = row.get("bytes_per_vertex")
        lines.append(
            [
                row["look_up"],
                f"{row['ns_per_id']:.1f}",
                f"{row['ns_per_id'] / ours:.2f}",
                "–" if size is None else f"{size:.2f}",
            ]
        )
    title = (
        f"**Tier look-up**, CPU nanoseconds per id on one core, {result['vertices']:,} vertices, K = {result['parts']}, α = {result['alpha']}; "
        "a third of the ids local, a third cached, a third remote:"
    )
    return "\n\n".join([title, table(["", "ns per id", "over ours", "bytes per vertex"], lines), source(result)])


def draw_vip(result: dict) -> str:
    ours = {row["threads"]: row["seconds"] for row in result["rows"] if row["vip"] == "salientpp"}
    lines = [
        [
            f"{row['vip']}, {counted(row['threads'])}",
            f"{row['seconds']:.2f}",
            f"{row['ns_per_edge_and_hop']:.1f}",
            f"{row['seconds'] / ours[row['threads']]:.1f}×",
        ]
        for row in sorted(result["rows"], key=lambda row: row["threads"])
    ]
    title = (
        f"**Inclusion probabilities** of {result['parts']} parts, three hops, {result['vertices']:,} vertices, {result['edges'] / 1e6:.0f} M "
        f"edges; ours takes {result['extra_bytes_per_vertex_and_part']:.1f} bytes per vertex and part above the graph at its peak, output included:"
    )
    return "\n\n".join([title, table(["", "seconds", "ns per edge and hop", "over ours"], lines), source(result)])


TRIMMED = "salientpp, nn.trim"


def fastest_by_hand(rows: list[dict], value: Callable[[dict], float]) -> dict | None:
    """The best contender that needs a rewritten model and gives the plain model's loss."""
    return min((row for row in rows if row["by_hand"] and row["loss_difference"] < 1e-4), key=value, default=None)


def draw_training(
    result: dict, title: str, value: Callable[[dict], float], digits: int, floors: dict[tuple, float] | None = None
) -> str:
    """A line for each case: the package's contenders, PyG's plain model, the best by hand, and how many times our figure these are."""
    names = [name for name in (TRIMMED, "salientpp", "PyG") if any(row["contender"] == name for row in result["rows"])]
    cases: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["graph"], row["layers"], row["hidden"], row["model"]), []).append(row)
    lines = []
    for (graph, layers, hidden, model), rows in cases.items():
        of = {row["contender"]: value(row) for row in rows}
        best = fastest_by_hand(rows, value)
        line = [f"{graph}, {layers} × {hidden}, {model}", *(f"{of[name]:,.{digits}f}" for name in names)]
        line.append(f"{value(best):,.{digits}f} ({best['contender'].removeprefix('PyG, ')})" if best else "–")
        line.append(f"{of['PyG'] / of[names[0]]:.1f}×" if "PyG" in of else "–")
        line.append(f"{value(best) / of[names[0]]:.1f}×" if best else "–")
        if floors is not None:
            floor = floors.get((graph, layers, hidden, model))
            line.append(f"{floor:,.{digits}f}" if floor is not None else "")
        lines.append(line)
    header = ["", *names, "PyG, by hand", f"PyG / {names[0]}", f"by hand / {names[0]}"]
    header += ["dense products"] if floors is not None else []
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_train_steps(result: dict) -> str:
    title = (
        f"**A training step**, ms: forward, backward and Adam, {result['threads']} threads, batches of {result['batch_size']}, 3 layers on fanouts "
        "[15, 10, 5] and 2 on [10, 10]. *By hand* is the fastest that gives the plain model's loss. *Dense products*: "
        "those of the rows that the seeds need, alone:"
    )
    floors = {
        (row["graph"], row["layers"], row["hidden"], row["model"]): row["step_seconds"]["median"] * 1e3
        for row in result["floors"]
    }
    return draw_training(result, title, lambda row: row["step_seconds"]["median"] * 1e3, 1, floors)


def draw_train_memory(result: dict) -> str:
    title = (
        "**Peak memory of a step**, MB above what the process held before; *by hand* is here the one with the least:"
    )
    return draw_training(result, title, lambda row: row["step_peak_bytes"] / 1e6, 0)


def draw_train_epochs(result: dict) -> str:
    title = (
        f"**A training epoch**, seconds, loader with {result['workers']} workers and steps; the mean batch of a turn times the number of batches, "
        "median of turns:"
    )
    return draw_training(result, title, lambda row: row["seconds_per_epoch"], 2)


def draw_train_losses(result: dict) -> str:
    """What is not the plain model's result, and what cannot run."""
    lines = [
        [f"{row['graph']}, {row['layers']} × {row['hidden']}, {row['model']}", row["contender"], what]
        for row, what in [
            *(
                (row, f"loss off by {row['loss_difference']:.3f}")
                for row in result["rows"]
                if row["loss_difference"] > 1e-4
            ),
            *((row, f"`{row['error'].partition(': ')[0]}`") for row in result["left_out"]),
        ]
    ]
    return table(["", "contender", "what is wrong"], lines) if lines else "None."


def draw_batch(result: dict) -> str:
    edges = result["batch_edges"]
    lines = [
        [row["step"], f"{row['cpu_ns'] / 1e3:,.0f}", f"{row['cpu_ns'] / edges:.2f}", f"{row['share']:.1%}"]
        for row in result["rows"]
    ]
    title = (
        f"**Where the time of a batch goes**: CPU time of one batch by step, medians; {result['vertices']:,} vertices, "
        f"{result['edges'] / 1e6:.0f} M edges, {result['features']} float32 features, labels, three masks; {result['batch_vertices']:,.0f} "
        f"vertices and {edges:,.0f} edges per batch:"
    )
    return "\n\n".join([title, table(["step", "µs", "ns per sampled edge", "share"], lines), source(result)])


def draw_growth(result: dict) -> str:
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
        f"**As the graph grows**: CPU nanoseconds per sampled edge of whole batches (one float32 feature, fanouts {result['fanouts']}, batches of "
        f"{result['batch_size']} or all training seeds), and peak resident MB above the inputs, construction included:"
    )
    header = ["", *(f"ns, {name}" for name in names), *(f"MB, {name}" for name in names)]
    picture = "![Cost and memory over the size of the graph](growth.svg)"
    return "\n\n".join([title, picture, table(header, lines), source(result)])


def plot_growth(found: dict[tuple[int, str], dict], names: list[str], sizes: list[int]) -> None:
    """docs/growth.svg: cost per sampled edge and memory per vertex over the number of edges, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "salientpp"  # the same data, the same file
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
                label=name,
            )
        axis.set(xscale="log", yscale="log", xlabel="directed edges of the graph", title=label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "growth.svg", metadata={"Date": None})
    pyplot.close(figure)


def draw_cuda(result: dict) -> str:
    """Three small tables: epochs against the floor, over β in two orders, and the kernel."""
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
    tiers: dict[float, dict[str, dict]] = {}
    for row in parts["tier"]:
        tiers.setdefault(row["beta"], {})[row["order"]] = row
    orders = list(dict.fromkeys(row["order"] for row in parts["tier"]))
    over_beta = [
        [
            f"{beta:g}",
            *(
                cell
                for order in orders
                for cell in (f"{of[order]['ms_per_batch']:.2f}", f"{of[order]['share_of_rows_from_host']:.0%}")
            ),
        ]
        for beta, of in tiers.items()
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
    return "\n\n".join(
        [
            f"**Training**, {result['vertices']:,} vertices; {model}. The floor is the same model on batches that are on the device already:",
            table(["", "ms per batch", "over the floor", "GPU waits", "batches per second, loading alone"], epochs),
            f"**The GPU tier**, {result['sparse_vertices']:,} vertices, 1 % of them seeds: ms per batch and share of rows from the host",
            table(["β", *(cell for order in orders for cell in (f"{order} order, ms", "from the host"))], over_beta),
            "**Putting rows together**, µs:",
            table(["", "one pass", "concatenate and permute in torch", "ratio"], kernel),
            source(result),
        ]
    )


def draw_long(result: dict) -> str:
    rows = [row for row in result["rows"] if row["batches"] % (4 * result["rows"][0]["batches"]) == 0]
    lines = [
        [f"{row['batches']:,}", f"{row['resident_bytes'] / 2**20:.1f}", str(row["descriptors"]), str(row["threads"])]
        for row in rows
    ]
    title = (
        f"**As a run goes on**: {result['rows'][-1]['batches']:,} batches in {result['rows'][-1]['seconds']:.0f} s, "
        f"{result['workers']} sampling threads; "
        f"over the last half resident memory changed by {result['growth_of_last_half']['resident memory']:+.2%}, "
        f"{result['bytes_per_batch']:+.1f} bytes per batch:"
    )
    return "\n\n".join([title, table(["batches", "resident MiB", "descriptors", "threads"], lines), source(result)])


def draw_host(results: dict[str, dict | None]) -> str:
    """The short table: for each kernel ours, the peer that comes nearest, and the ratio."""
    machine = next(result for result in results.values() if result is not None)["machine"]
    lines = []

    def add(
        what: str, name: str, unit: str, digits: int, best: float, peers: dict[str, float], more_is_better: bool = False
    ) -> None:
        if peers:
            nearest = (max if more_is_better else min)(peers, key=lambda peer: peers[peer])
            ratio = best / peers[nearest] if more_is_better else peers[nearest] / best
            lines.append(
                [
                    what,
                    f"{best:,.{digits}f} {unit}",
                    f"{peers[nearest]:,.{digits}f} {unit}",
                    nearest,
                    f"{ratio:.1f}×",
                    results[name]["date"],
                ]
            )

    def split(name: str, key: str, value: str, where: dict) -> tuple[float, dict[str, float]] | None:
        rows = [row for row in (results[name] or {"rows": []})["rows"] if all(row[k] == v for k, v in where.items())]
        ours = [row[value] for row in rows if row[key].startswith("salientpp")]
        return (
            (ours[0], {row[key]: row[value] for row in rows if not row[key].startswith("salientpp")}) if ours else None
        )

    largest = max((row["vertices"] for row in (results["sampler"] or {"rows": []})["rows"]), default=0)
    for what, name, key, value, where, unit, digits, more in (
        (
            "sampling, per edge, one core",
            "sampler",
            "sampler",
            "cpu_ns_per_edge",
            {"vertices": largest},
            "ns",
            1,
            False,
        ),
        (
            "whole batches, no workers, CPU",
            "loader",
            "loader",
            "cpu_seconds_per_batch",
            {"workers": 0, "vertices": largest},
            "s",
            3,
            False,
        ),
        (
            "whole batches, 2 workers",
            "loader",
            "loader",
            "batches_per_second",
            {"workers": 2, "vertices": largest},
            "per s",
            1,
            True,
        ),
        (
            "a small graph, batches of 32, 16 features, no workers",
            "small",
            "loader",
            "us_per_batch",
            {"features": 16, "workers": 0, "batch_size": 32, "fanouts": [10, 10]},
            "µs",
            0,
            False,
        ),
        (
            "training epoch, the model as it is, 2 workers",
            "train",
            "contender",
            "seconds_per_epoch",
            {"graph": "generated", "model": "GraphSAGE", "layers": 3, "by_hand": False},
            "s",
            1,
            False,
        ),
        (
            "training epoch, the peer's model rewritten by hand, 2 workers",
            "train",
            "contender",
            "seconds_per_epoch",
            {"graph": "generated", "model": "GraphSAGE", "layers": 3},
            "s",
            1,
            False,
        ),
        ("tier look-up, per id", "lookup", "look_up", "ns_per_id", {}, "ns", 1, False),
        (
            "gathering float32 rows, 1 thread",
            "gather",
            "gather",
            "gb_per_second",
            {"dtype": "torch.float32", "threads": 1},
            "GB/s",
            1,
            True,
        ),
        ("inclusion probabilities, 2 threads", "vip", "vip", "seconds", {"threads": 2}, "s", 2, False),
    ):
        values = split(name, key, value, where)
        if values is not None and results[name]["machine"] == machine:  # the table names one
            add(what, name, unit, digits, *values, more_is_better=more)
    footer = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']:.0f} GB; `make bench`."
    return "\n\n".join([table(["", "salientpp", "peer", "", "ratio", "measured"], lines), footer])


def draw_types(result: dict) -> str:
    cases = list(dict.fromkeys((row["graph"], tuple(row["fanouts"])) for row in result["rows"]))
    found = {(row["graph"], tuple(row["fanouts"]), row["method"]): row for row in result["rows"]}
    lines = []
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        rows = [found[(*case, method)] for case in cases]
        counts = [f"{row['predicted_rows']:,.0f} ({row['fetched_rows']:,.0f})" for row in rows]
        # Of two fanouts on one graph the worse.
        fullest = {row["graph"]: 0.0 for row in rows}
        for row in rows:
            fullest[row["graph"]] = max(fullest[row["graph"]], row["rows_balance"])
        lines.append([method, *counts, " · ".join(f"{ratio:.2f}" for ratio in fullest.values())])
    title = (
        f"**What to partition**, {result['parts']} parts, batches of {result['batch_size']}: rows with features that a step of all ranks fetches without "
        f"a cache, by typed VIP and, in brackets, counted over {result['steps']} steps; last, the fullest part over the mean, in rows of the type that "
        "is worst, on each graph:"
    )
    header = ["", *(f"{graph}, {list(fanouts)}" for graph, fanouts in cases), "fullest part"]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_host_volume(result: dict) -> str:
    """Rows from other hosts over those with private caches, for each graph and shape."""
    found = {
        (row["graph"], row["hosts"], row["per_host"], row["alpha"]): row
        for row in result["rows"]
        if row["what"] == "hosts"
    }
    alphas = sorted({alpha for *_, alpha in found if alpha})
    lines = []
    for graph, hosts, per_host in dict.fromkeys(key[:3] for key in found):
        cells = []
        for alpha in alphas:
            row = found[graph, hosts, per_host, alpha]
            cells += [f"{row['private_rows']:,.0f}", f"{row['shared_rows'] / row['private_rows']:.2f}"]
        bare = found[graph, hosts, per_host, 0.0]
        lines.append([f"{graph}, {hosts} hosts of {per_host}", f"{bare['private_rows']:,.0f}", *cells])
    title = (
        f"**Rows from other hosts per epoch**, simulated, fanouts {result['fanouts']}, batches of {result['batch_size']}: without a cache, with private "
        "caches, and relative to that with one cache of the same memory per host:"
    )
    header = ["", "no cache", *(f"α = {alpha:g}, {way}" for alpha in alphas for way in ("private", "shared"))]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_joins(result: dict) -> str:
    """What 16 parts on fewer ranks fetch, over a cut into just so many parts."""
    found = {(row["what"], row["graph"], row.get("ranks"), row["alpha"]): row["shared_rows"] for row in result["rows"]}
    alphas = sorted({alpha for *_, alpha in found})
    shapes = dict.fromkeys((graph, ranks) for what, graph, ranks, _ in found if what == "16 parts joined")
    lines = [
        [
            f"{graph}, {ranks} ranks",
            *(
                f"{found['16 parts joined', graph, ranks, alpha] / found['cut into as many', graph, ranks, alpha]:.2f}"
                for alpha in alphas
            ),
        ]
        for graph, ranks in shapes
    ]
    title = "**16 parts on fewer ranks**: rows fetched over those of a directory that was cut into just so many parts:"
    return "\n\n".join([title, table(["", *(f"α = {alpha:g}" for alpha in alphas)], lines), source(result)])


def draw_second_level(result: dict) -> str:
    """A part for each host: its ranks split the seeds, or have parts of their own inside it."""
    ways = {"hosts": "one cut", "a part per host, seeds split": "split", "a part per host, cut again": "again"}
    found = {
        (row["what"], row["graph"], row["hosts"], row["per_host"], row["alpha"]): row["shared_rows"]
        for row in result["rows"]
        if row["what"] in ways
    }
    shapes = dict.fromkeys(key[1:4] for key in found)
    alphas = sorted({alpha for *_, alpha in found})
    lines = []
    for graph, hosts, per_host in shapes:
        cells = []
        for alpha in alphas:
            rows = [found[what, graph, hosts, per_host, alpha] for what in ways]
            cells += [f"{rows[1] / rows[0]:.2f}", f"{rows[2] / rows[0]:.2f}"]
        lines.append([f"{graph}, {hosts} hosts of {per_host}", *cells])
    title = (
        "**A part for each host**: rows that cross the network, with one cache per host, over those of one cut into as many parts as ranks: where a "
        "host's ranks split the seeds of its part, and where METIS cuts the part again, one for each rank:"
    )
    header = ["", *(f"α = {alpha:g}, {way}" for alpha in alphas for way in ("split", "cut again"))]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_hosts(result: dict) -> str:
    """Live, over emulated hosts: rows and seconds of an epoch by the way in which a host's ranks share."""
    ways = {"private": "private caches", "shared": "one per host"}
    found = {(row["graph"], row["alpha"], row["way"]): row for row in result["rows"]}
    lines = []
    for graph, alpha in dict.fromkeys(key[:2] for key in found):
        rows = [found[graph, alpha, way] for way in ways]
        lines.append(
            [
                f"{graph}, α = {alpha:g}",
                *(f"{row['rows_from_other_hosts']:,.0f}" for row in rows),
                *(f"{row['seconds_fetching']:.2f} · {row['seconds_training']:.2f}" for row in rows),
            ]
        )
    title = (
        f"**{result['hosts']} hosts of {result['ranks_per_host']} ranks**, emulated, links of {result['megabytes_per_second']:g} MB/s, "
        f"{result['seed_fraction']:.0%} of the training vertices, fanouts {result['fanouts']}, batches of {result['batch_size']}: rows from other hosts in an "
        f"epoch, and its seconds, of batches alone · with a GraphSAGE of width {result['hidden']} that is trained on them:"
    )
    header = ["", *(f"rows, {way}" for way in ways.values()), *(f"s, {way}" for way in ways.values())]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_convert(result: dict) -> str:
    found = {(row["edges_asked"], row["step"]): row for row in result["rows"]}
    lines = []
    for asked in dict.fromkeys(row["edges_asked"] for row in result["rows"]):
        for step in ("generate", "convert npz", "convert text", "in memory"):
            row = found[asked, step]
            ratio = (
                [f"{row['cpu_seconds_of_in_memory']:.1f}×", f"{row['peak_of_in_memory']:.2f}×"]
                if step.startswith("convert")
                else ["", ""]
            )
            lines.append(
                [
                    f"{row['edges'] / 1e6:.1f} M edges, {step}",
                    "" if row["raw_bytes"] is None else f"{row['raw_bytes'] / 1e6:,.0f}",
                    f"{row['seconds']:.1f} · {row['cpu_seconds']:.1f}",
                    f"{row['edges'] / row['cpu_seconds'] / 1e6:.2f}",
                    f"{row['peak_bytes'] / 1e6:,.0f}",
                    f"{row['above_start_bytes'] / 1e6:,.0f}",
                    *ratio,
                ]
            )
    header = ["", "raw MB", "s · CPU s", "M edges per CPU s", "peak MB", "of these, not there at the start"]
    title = (
        f"**Generating and converting** with `memory={result['memory']}`, undirected, average degree {result['degree']}; the archive has {result['features']} "
        "float16 columns, the text edges alone; *in memory* is `load_dataset` of the archive and its neighbour lists; ratios are to it:"
    )
    return "\n\n".join([title, table([*header, "CPU ratio", "peak ratio"], lines), source(result)])


def partitioned(result: dict) -> str:
    """The options of `salientpp partition`."""
    return f"--method {result['method']} {'--refine' if result['refine'] else '--no-refine'}"


def draw_partition(result: dict) -> str:
    lines = [
        [
            f"{row['edges'] / 1e6:.1f} M edges, {row['way']}",
            f"{row['seconds']:.1f} · {row['cpu_seconds']:.1f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['edge_cut_fraction']:.1%}",
            f"{row['largest_load']:.3f}",
            f"{row['predicted_rows']:,.0f}",
        ]
        for row in result["rows"]
    ]
    header = ["", "s · CPU s", "MB beside the graph", "edges cut", "largest load / mean", "predicted rows per epoch"]
    title = f"**Partitioners**, {result['parts']} parts, on generated graphs that are mapped; two threads, of which METIS uses one:"
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_refine(result: dict) -> str:
    lines = []
    for plain, refined in zip(result["rows"][::2], result["rows"][1::2]):
        ratios = [
            f"{new / old:.3f} · {of_new / of_old:.3f}"
            for old, new, of_old, of_new in zip(
                plain["predicted_rows"], refined["predicted_rows"], plain["counted_rows"], refined["counted_rows"]
            )
        ]
        lines.append(
            [
                f"{plain['dataset']}, {plain['method']}, K = {plain['parts']}",
                *ratios,
                f"{plain['edge_cut_fraction']:.1%} → {refined['edge_cut_fraction']:.1%}",
                f"{plain['largest_load']:.3f} → {refined['largest_load']:.3f}",
                f"{plain['cpu_seconds']:.1f} → {refined['cpu_seconds']:.1f}",
            ]
        )
    alphas = ["without a cache" if alpha == 0 else f"α = {alpha:g}" for alpha in result["alphas"]]
    title = (
        f"**Rows of an epoch, refined over not**, predicted · counted ({result['epochs']} epochs), all training seeds, batches of {result['batch_size']}, "
        "fanouts 15,10,5:"
    )
    header = ["", *alphas, "edges cut", "largest load / mean", "CPU s"]
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_scale(result: dict) -> str:
    sizes = sorted({row["edges"] for row in result["rows"]})
    steps = [step for step in dict.fromkeys(row["step"] for row in result["rows"]) if step != "generate"]
    found = {(row["edges"], row["step"]): row for row in result["rows"]}
    header = ["", *(f"{edges / 1e6:.1f} M edges" for edges in sizes)]

    def cells(step: str) -> list[str]:
        rows = [found[edges, step] for edges in sizes]
        return [
            f"{row['seconds']:,.0f} · {row['cpu_seconds']:,.0f} · {row['anonymous_bytes'] / 1e9:.2f} · {row['resident_bytes'] / 1e9:.2f}"
            for row in rows
        ]

    def whole(edges: int) -> dict[str, float]:
        rows = [found[edges, step] for step in steps]
        return {kind: sum(row[kind] for row in rows) for kind in ("seconds", "cpu_seconds")} | {
            kind: max(row[kind] for row in rows) for kind in ("anonymous_bytes", "resident_bytes")
        }

    lines = [[step, *cells(step)] for step in steps]
    found |= {(edges, "all"): whole(edges) for edges in sizes}
    lines.append(["**all**", *cells("all")])
    lines.append(
        [
            "edges cut",
            *(f"{row['edge_cut_fraction']:.1%}" for row in sorted(result["quality"], key=lambda row: row["edges"])),
        ]
    )
    title = (
        f"**Measured**: `partition converted:`, {result['parts']} parts, `{partitioned(result)}`, {result['features']} float16 columns, fanouts "
        f"{result['fanouts']}, batches of {result['batch_size']}, {result['threads']} threads: seconds · CPU seconds · most GB, anonymous · resident:"
    )
    return "\n\n".join([title, table(header, lines), source(result)])


#: The largest public graphs, which are not here. Edges are those that batches are drawn from: of papers100M and MAG240M both directions of every edge that is
#: stored (none is assumed to be stored both ways), of IGB-full the edges as they are stored. ``rows``: vertices with features; ``row_bytes``: as float16.
#: ``train`` and ``split``: seeds, and ids in all splits, of IGB-full 60 % and all of its labelled vertices, as its own loader has them. From: OGB
#: (arXiv 2005.00687), OGB-LSC (arXiv 2103.09430), IGB (arXiv 2302.13522).
LARGE = {
    "papers100M": dict(
        vertices=111_059_956, edges=2 * 1_615_685_872, rows=111_059_956, row_bytes=256, train=1_207_179, split=1_546_782
    ),
    "MAG240M": dict(
        vertices=244_160_499, edges=2 * 1_728_364_232, rows=121_751_666, row_bytes=1536, train=1_112_392, split=1_398_159
    ),
    "IGB-full": dict(
        vertices=269_346_174, edges=3_995_777_033, rows=269_346_174, row_bytes=2048, train=136_278_514, split=227_130_858
    ),
}  # fmt: skip

#: Cores of a machine, and Gbit/s of its network, that the table assumes.
CORES, GIGABITS = 16, (1, 10, 100)


def directory_bytes(
    parts: int, vertices: int, edges: int, rows: int, row_bytes: int, split: int, label: int = 8
) -> float:
    """Of a dataset directory: lists (int64 and int32), original ids, rows, labels, ids of splits, and the VIP of every vertex for every part."""
    return 8 * (vertices + 1) + 4 * edges + 8 * vertices + rows * (row_bytes + label) + 8 * split + 4 * parts * vertices


def draw_large_disk(result: dict) -> str:
    """What the formats take: exact but for headers."""
    errors = [
        directory_bytes(
            row["parts"],
            row["vertices"],
            row["edges"],
            row["vertices"],
            row["row_bytes"],
            row["split_ids"],
            row["label_bytes"],
        )
        / row["bytes"]
        - 1
        for row in result["disk"]
    ]
    lines = []
    for name, graph in LARGE.items():
        vertices, edges, rows, row_bytes = (graph[key] for key in ("vertices", "edges", "rows", "row_bytes"))
        converted = 8 * (vertices + 1) + 4 * edges + rows * (row_bytes + 8) + 3 * vertices
        for parts in (1, 8, 16):
            whole = directory_bytes(parts, vertices, edges, rows, row_bytes, graph["split"])
            topology = 8 * (vertices + 1) + 4 * edges
            own = topology + 8 * vertices + rows * (row_bytes + 8) / parts + 4 * vertices
            memory = topology + rows * row_bytes / parts * (1 + (0.16 if parts > 1 else 0)) + 4 * vertices
            figures = [converted, whole, own, topology, rows * row_bytes / parts, memory]
            lines.append(
                [f"{name}, {parts} machine{'s' * (parts > 1)}", *(f"{figure / 1e9:,.0f}" for figure in figures)]
            )
    title = (
        "**Computed from the formats, not measured**, GB; float16 rows. Against directories of generated graphs that were written, "
        f"{len(errors)} of them, the sum is off by {min(errors):+.2%} to {max(errors):+.2%}:"
    )
    header = [
        "",
        "converted graph",
        "directory",
        "of it, what one machine needs",
        "topology, mapped",
        "rows of a part",
        "a host's memory that holds all it reads, α = 0.16",
    ]
    return "\n\n".join([title, table(header, lines), source(result)])


def plane(rows: list[dict], key: str) -> np.ndarray:
    """Least squares ``a + b N + c E`` with b, c >= 0: [a, b, c]."""
    design = np.array([[1.0, row["vertices"], row["edges"]] for row in rows])
    values = np.array([row[key] for row in rows])
    best, least = np.zeros(3), math.inf
    for columns in ([0, 1, 2], [0, 1], [0, 2], [0]):
        size = design[:, columns].max(0)
        found = np.zeros(3)
        found[columns] = np.linalg.lstsq(design[:, columns] / size, values, rcond=None)[0] / size
        error = float(((design @ found - values) ** 2).sum())
        if (found[1:] >= 0).all() and error < least:
            best, least = found, error
    return best


def draw_scale_degrees(result: dict) -> str:
    """Memory and time by vertices and by edges, from graphs of several degrees."""
    measured, extrapolated = [], []
    sizes = sorted({(row["vertices"], row["edges"]) for row in result["rows"]})
    for step in dict.fromkeys(row["step"] for row in result["rows"]):
        if step == "generate":
            continue
        rows = sorted(
            (row for row in result["rows"] if row["step"] == step), key=lambda row: (row["vertices"], row["edges"])
        )
        measured.append([step, *(f"{row['anonymous_bytes'] / 1e9:.2f} · {row['cpu_seconds']:.0f}" for row in rows)])
        line = [step]
        for key, unit, scale in (("anonymous_bytes", "GB", 1e9), ("cpu_seconds", "CPU h", 3600)):
            start, by_vertex, by_edge = plane(rows, key)
            # Whether a plane holds: what the other graphs say of the largest.
            *others, largest = sorted(rows, key=lambda row: row["edges"])
            of_others = plane(others, key) @ [1, largest["vertices"], largest["edges"]]
            line.append(
                f"{start / 1e9:.2f} GB + {by_vertex:.0f} B · N + {by_edge:.1f} B · E"
                if unit == "GB"
                else f"{start:.1f} s + {1e6 * by_vertex:.1f} µs · N + {1e6 * by_edge:.2f} µs · E"
            )
            line.append(f"{of_others / largest[key] - 1:+.0%}")
            for graph in LARGE.values():
                number = (start + by_vertex * graph["vertices"] + by_edge * graph["edges"]) / scale
                line.append(f"{number:,.0f}" if unit == "GB" else f"{number:,.2f}")
        extrapolated.append(line)
    header = ["", *(f"{vertices / 1e6:g} M vertices, {edges / 1e6:.1f} M edges" for vertices, edges in sizes)]
    title = (
        f"**Measured**: most anonymous GB · CPU seconds, graphs of several degrees, {result['parts']} parts, `{partitioned(result)}`, "
        f"{result['features']} float16 columns:"
    )
    says = (
        "**Fitted, and in italics extrapolated, not measured**: a plane through these figures, N vertices and E edges; *error* is how far the plane through "
        "the other graphs misses the one of most edges:"
    )
    of_fit = ["", "anonymous memory", "error", *(f"*{name}, GB*" for name in LARGE)]
    of_fit += ["CPU time", "error", *(f"*{name}, CPU h*" for name in LARGE)]
    return "\n\n".join([title, table(header, measured), says, table(of_fit, extrapolated), source(result)])


def draw_large_rows(result: dict) -> str:
    """Rows of a seed as graphs grow: what was measured."""
    lines = []
    for name in LARGE:
        for parts in sorted({row["parts"] for row in result["rows"]}):
            rows = sorted(
                (row for row in result["rows"] if (row["shape"], row["parts"]) == (name, parts)),
                key=lambda row: row["vertices"],
            )
            for row in rows:
                lines.append(
                    [
                        f"like {name}, K = {parts}, {row['vertices'] / 1e6:g} M vertices, {row['edges'] / 1e6:.1f} M edges",
                        str(row["batch_size"]),
                        f"{row['edge_cut_fraction']:.1%}",
                        f"{row['vertices_per_seed']:.0f}",
                        *(f"{number:.0f}" for number in row["rows_per_seed"]),
                    ]
                )
    header = ["", "batch size", "edges cut", "vertices a seed", *(f"rows, α = {alpha:g}" for alpha in result["alphas"])]
    title = (
        "**Measured** on generated graphs, for each seed of a batch: its share of the batch's distinct vertices, and of those that another part owns and "
        f"that are not cached; fanouts 15,10,5, {result['counted_seeds']} seeds of each part at least:"
    )
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_large_epoch(result: dict) -> str:
    """Rows of an epoch, and what bounds it, of the largest graphs."""
    gather = {row["row_bytes"]: row["cpu_seconds_per_row"] for row in result["gather"]}
    alphas = result["alphas"]
    lines = []
    for name, graph in LARGE.items():
        with_rows = graph["rows"] / graph["vertices"]
        for parts in (1, 8, 16):
            own = [row for row in result["rows"] if (row["shape"], row["parts"]) == (name, max(8, parts))]
            row = max(own, key=lambda row: row["vertices"])
            seeds = graph["train"] / parts
            of_vertex = row["sampling_cpu_seconds_per_vertex"] + with_rows * gather[graph["row_bytes"]]
            making = seeds * row["vertices_per_seed"] * of_vertex / CORES
            cells = [f"{seeds / result['batch_size']:,.0f}", f"{making:,.0f}"]
            if parts == 1:
                cells += ["0"] * len(alphas) + ["–"] * len(GIGABITS) + ["making batches"]
            else:
                fetched = [number * with_rows * graph["train"] for number in row["rows_per_seed"]]
                received = fetched[alphas.index(0.16)] / parts * graph["row_bytes"]
                seconds = [received / (speed * 1e9 / 8) for speed in GIGABITS]
                slow = [f"{speed:g}" for speed, time in zip(GIGABITS, seconds) if time > making]
                cells += [f"{number / 1e6:,.0f}" for number in fetched] + [f"{time:,.0f}" for time in seconds]
                cells.append(f"the network up to {slow[-1]} Gbit/s" if slow else "making batches")
            lines.append([f"{name}, {parts} machine{'s' * (parts > 1)}", *cells])
    header = [
        "",
        "batches a machine",
        f"s to make them, {CORES} cores",
        *(f"M rows, α = {alpha:g}" for alpha in alphas),
        *(f"s at {speed} Gbit/s" for speed in GIGABITS),
        "what bounds it",
    ]
    title = (
        "**Extrapolated, not measured**: an epoch by the largest of those graphs, times the seeds of the dataset; rows of all machines together; seconds of "
        "the network for what one machine receives at α = 0.16:"
    )
    return "\n\n".join([title, table(header, lines), source(result)])


def draw_mapped(result: dict) -> str:
    disk = {row["row_bytes"]: row["seconds"] for row in result["rows"] if row["way"] == "disk"}
    names = {"kernel": "the row kernel", "torch": "torch's index_select", "disk": "pages with pread, 32 threads"}
    lines = [
        [
            f"rows of {row['row_bytes']:,} bytes, {names[row['way']]}",
            f"{1e3 * row['seconds']:,.0f} · {1e3 * row['cpu_seconds']:,.0f}",
            f"{row['bytes_read'] / 1e6:,.0f}",
            f"{row['bytes_read'] / row['seconds'] / 1e6:,.0f}",
            f"{result['rows_per_turn'] / row['seconds'] / 1e3:,.0f}",
            f"{disk[row['row_bytes']] / row['seconds']:.2f}×",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Rows that are not in memory**: {result['rows_per_turn']:,} random rows of a mapped file of {result['gigabytes']:g} GiB, "
        "half of which is in the page cache:"
    )
    header = ["", "ms · CPU ms", "MB read", "MB read a second", "thousand rows a second", "speed over pread's"]
    return "\n\n".join([title, table(header, lines), source(result)])


#: Marker -> the result file and how to draw it.
DRAWN = {
    "demo": ("demo", draw_demo),
    "sampler": ("sampler", draw_sampler),
    "typed": ("typed", draw_typed),
    "loader": ("loader", draw_loader),
    "small": ("small", draw_small),
    "start": ("start", draw_start),
    "parts": ("parts", draw_parts),
    "gather": ("gather", draw_gather),
    "lookup": ("lookup", draw_lookup),
    "vip": ("vip", draw_vip),
    "train_steps": ("train", draw_train_steps),
    "train_memory": ("train", draw_train_memory),
    "train_epochs": ("train", draw_train_epochs),
    "train_losses": ("train", draw_train_losses),
    "batch": ("batch", draw_batch),
    "growth": ("growth", draw_growth),
    "long": ("long", draw_long),
    "cuda": ("cuda", draw_cuda),
    "volume": ("volume", draw_volume),
    "volume_ahead": ("volume_ahead", draw_volume_ahead),
    "volume_summary": ("volume", draw_volume_summary),
    "volume_exceptions": ("volume", draw_volume_exceptions),
    "volume_all": ("volume", draw_volume_all),
    "partitions": ("volume", draw_partitions),
    "oracle": ("oracle", draw_oracle),
    "types": ("types", draw_types),
    "host_volume": ("host_volume", draw_host_volume),
    "hosts": ("hosts", draw_hosts),
    "joins": ("host_volume", draw_joins),
    "convert": ("convert", draw_convert),
    "partition": ("partition", draw_partition),
    "refine": ("refine", draw_refine),
    "scale": ("scale", draw_scale),
    "scale_degrees": ("scale_degrees", draw_scale_degrees),
    "large_disk": ("large", draw_large_disk),
    "large_rows": ("large", draw_large_rows),
    "large_epoch": ("large", draw_large_epoch),
    "mapped": ("mapped", draw_mapped),
    "second_level": ("host_volume", draw_second_level),
}


#: What the short table of the README draws on.
HOST = ["sampler", "loader", "small", "train", "lookup", "gather", "vip"]


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = filled(page.read_text(), DRAWN)
        host = {name: load(name) for name in HOST}
        if "<!-- host -->" in text and any(host.values()):
            text = replaced(text, "host", draw_host(host))
        page.write_text(text)


def filled(text: str, drawn: dict[str, tuple[str, Callable[[dict], str]]]) -> str:
    """A page with everything between its markers drawn anew, where there is a result."""
    for name, (file, draw) in drawn.items():
        result = load(file)
        if result is not None and f"<!-- {name} -->" in text:
            text = replaced(text, name, draw(result))
    return text


def replaced(text: str, name: str, body: str) -> str:
    body = f"<!-- {name} -->\n\n{body}\n\n<!-- /{name} -->"
    return re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: body, text, flags=re.S)


if __name__ == "__main__":
    main()
