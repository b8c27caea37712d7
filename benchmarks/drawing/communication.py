"""Tables of docs/results/communication.md about traffic beyond a static cache, and about hosts with several ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .base import Drawn, Row, as_file, joined, source, table


def draws(row: Row) -> str:
    """Names the way in which vertices draw their neighbours."""
    shared = f"`{row['shared_draws']!r}`".replace("'", '"') if row["shared_draws"] else "independent"
    return shared if row["draw_block"] == 1 else f"{shared}, blocks of {row['draw_block']}"


def draw_volume_ahead(result: Row) -> str:
    """Draws rows and bytes of an epoch, with their ratio to the static cache, at each α."""
    names = {
        "static VIP cache": "static VIP cache",
        "the same with sums": "sums instead of rows",
        "lookahead='auto'": 'lookahead "auto"',
        "and blocks of draws": "+ shared draws in blocks",
        "and rows as int8": "+ rows as int8",
    }
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    alphas = sorted({row["alpha"] for row in result["rows"]})
    found = {(row["dataset"], row["way"], row["alpha"]): row for row in result["rows"]}
    lines = []
    for dataset in dict.fromkeys(row["dataset"] for row in result["rows"]):
        for way in ways:
            cells = []
            for alpha in alphas:
                row, static = found[dataset, way, alpha], found[dataset, ways[0], alpha]
                cells += [
                    f"{row['rows']:,.0f} ({row['rows'] / static['rows']:.3f})",
                    f"{row['bytes'] / 1e6:,.1f} ({row['bytes'] / static['bytes']:.3f})",
                ]
            lines.append([dataset if way == ways[0] else "", names.get(way, way), *cells])
    first = result["rows"][0]
    title = (
        f"**Rows and MB per epoch**, and in brackets relative to the static cache. {first['parts']} parts, fanouts (15, 10, 5), batches of "
        f"{first['batch_size']}, all training seeds."
    )
    columns = [f"{what}, α = {alpha:g}" for alpha in alphas for what in ("rows", "MB")]
    return joined(title, table(["graph", "way", *columns], lines, left=2), source(result))


def draw_by_alpha(result: Row, title: str, cell: Callable[[Row], str], file: str | None = None) -> str:
    """Draws a table of lookahead, on the page or to a file: a line for each graph, kind of draws and window. A refused window is a dash."""
    alphas = sorted({row["alpha"] for row in result["rows"]})
    cases: dict[tuple[str, str, str], dict[float, str]] = {}
    for row in result["rows"]:
        case = (f"{row['graph']}, {row['batch_size']}", draws(row), str(row["lookahead"]).replace("auto", '"auto"'))
        cases.setdefault(case, {})[row["alpha"]] = "–" if row["rows"] is None else cell(row)
    lines = [[*case, *(cells[alpha] for alpha in alphas)] for case, cells in cases.items()]
    header = ["graph, batch size", "draws", "lookahead", *(f"α = {alpha:g}" for alpha in alphas)]
    drawn = joined(title, table(header, lines, left=3)) if file is None else as_file(file, title, header, lines)
    return joined(drawn, source(result))


def draw_lookahead(result: Row) -> str:
    """Draws the share of a static cache's rows that lookahead leaves."""
    title = (
        "**Lookahead.** Rows fetched, divided by the rows of the static VIP cache with the same memory and independent draws. Counted by simulation over "
        f"{result['epochs']} epochs, {result['parts']} parts, fanouts {result['fanouts']}. A dash means that the ids of the window would take more "
        "than half of the memory."
    )
    return draw_by_alpha(result, title, lambda row: f"{row['share']:.3f}")


def draw_lookahead_forecast(result: Row) -> str:
    """Draws the counted share of the rows of a static cache with the same draws, beside its forecast."""
    errors = [
        abs(row["rows"] / row["static_rows_of_these_draws"] - row["forecast_share"])
        for row in result["rows"]
        if row["rows"] is not None
    ]
    title = (
        "**Forecast of lookahead.** Rows as a share of the rows of the static VIP cache: counted / forecast. The static cache is counted "
        "with the draws of the same line; in the table above, with independent draws. "
        f"The two differ by at most {max(errors):.2f}, and by {statistics.median(errors):.3f} in the median."
    )
    return draw_by_alpha(
        result,
        title,
        lambda row: f"{row['rows'] / row['static_rows_of_these_draws']:.2f} / {row['forecast_share']:.2f}",
        "lookahead-forecast",
    )


def draw_lookahead_cpu(result: Row) -> str:
    lines = []
    cases: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in result["rows"]:
        cases.setdefault((row["graph"], row["batch_size"], draws(row)), {})[str(row["lookahead"])] = row
    windows = list(next(iter(cases.values())))[1:]
    for (graph, size, way), found in cases.items():
        ratios = [f"{found[window]['ratio']:.2f}×" for window in windows]
        lines.append([f"{graph}, {size}", way, f"{found['0']['cpu_ms']:.2f}", *ratios])
    first = result["rows"][0]
    title = (
        f"**CPU time of lookahead.** CPU milliseconds per batch without lookahead. The windows have the time with lookahead, divided by the time without. "
        f"{first['ranks']} ranks with all their threads, α = {first['alpha']:g}, whole epochs in turns, medians over {result['turns']} turns."
    )
    header = ["graph, batch size", "draws", "ms without", *(f"window {window}" for window in windows)]
    return joined(title, table(header, lines, left=2), source(result))


def draw_shared_draws(result: Row) -> str:
    """Draws the vertices, CPU time and distinct vertices of shared draws, relative to independent draws."""
    lines = []
    for graph in dict.fromkeys(row["graph"] for row in result["rows"]):
        found = {(row["shared_draws"], row["draw_block"]): row for row in result["rows"] if row["graph"] == graph}
        own, block = found[None, 1], found["batch", result["block"]]
        shared = found["batch", 1]
        lines.append(
            [
                f"{graph}, {own['batches']} batches of {own['batch_size']:,}",
                f"{shared['vertices_per_batch'] / own['vertices_per_batch']:.2f}",
                f"{shared['cpu_ms_per_batch'] / own['cpu_ms_per_batch']:.1f}",
                f"{block['cpu_ms_per_batch'] / found[None, result['block']]['cpu_ms_per_batch']:.1f}",
                f"{block['distinct_vertices'] / own['distinct_vertices']:.2f}",
            ]
        )
    title = (
        '**Shared draws.** `shared_draws="batch"` relative to independent draws; one thread, fanouts '
        f"{result['fanouts']}. The last two columns are for blocks of {result['block']} batches: CPU time, and distinct vertices of all batches together."
    )
    header = ["graph", "vertices of a batch", "CPU time", "CPU time, in blocks", "distinct vertices, in blocks"]
    return joined(title, table(header, lines), source(result))


def percent(share: float) -> str:
    """Formats a share in percent with two significant digits."""
    value = 100 * share
    return f"{value:.{0 if not value or value >= 10 else 1 if value >= 1 else 2}f} %"


def accuracy(values: Row) -> str:
    return f"{values['mean']:.4f} ± {values['spread']:.4f}"


def draw_shared_accuracy(result: Row) -> str:
    found = {(row["graph"], draws(row)): row for row in result["rows"]}
    ways = list(dict.fromkeys(way for _, way in found))
    lines = [
        [graph, *(accuracy(found[graph, way]) for way in ways)] for graph in dict.fromkeys(graph for graph, _ in found)
    ]
    title = (
        f"**Accuracy with shared draws.** Test accuracy of a 2-layer GraphSAGE after {result['epochs']} epochs, fanouts {result['fanouts']}, batches of "
        f"{result['batch_size']}. Mean ± standard deviation over {len(result['rows'][0]['accuracy'])} seeds."
    )
    return joined(title, table(["graph", *ways], lines), source(result))


def draw_narrow(result: Row) -> str:
    """Draws size, error, CPU cost and accuracy of the narrow formats."""
    rows = result["rows"]
    costs = {(row["format"], row["what"]): row for row in rows if row["kind"] == "cost"}
    errors = {(row["format"], row["graph"]): row for row in rows if row["kind"] == "error"}
    scores = {(row["format"], row["graph"]): row for row in rows if row["kind"] == "accuracy"}
    graphs = list(dict.fromkeys(graph for _, graph in errors))
    columns = next(iter(errors.values()))["columns"]
    plain = ["float32", str(4 * columns), "", "", "", ""]
    lines = [[*plain, *(accuracy(scores["float32", graph]) for graph in graphs)]]
    for name in dict.fromkeys(name for name, _ in errors):
        found = [errors[name, graph]["relative_rms_error"] for graph in graphs]
        lines.append(
            [
                f"`{name}`",
                str(errors[name, graphs[0]]["row_bytes"]),
                " / ".join(map(percent, found)),
                *(f"{costs[name, what]['of_gather']:.2f}" for what in ("decode", "encode", "both")),
                *(accuracy(scores[name, graph]) if (name, graph) in scores else "" for graph in graphs),
            ]
        )
    first = next(row for row in rows if row["kind"] == "accuracy")
    title = (
        f"**Narrow rows** of {columns} values. *Error* is the root mean square error relative to the root mean square of the values, on "
        f"{' / '.join(graphs)}. *Decode*, *encode* and *both* are CPU times of a gather, relative to a gather of float32 rows "
        f"({costs['', 'gather']['ns_per_row']:.0f} ns per row, one thread). *Accuracy* is the test accuracy of a 2-layer GraphSAGE after "
        f"{first['epochs']} epochs, mean ± standard deviation over {len(first['accuracy'])} seeds."
    )
    header = ["format", "bytes", "error", "decode", "encode", "both", *(f"accuracy, {graph}" for graph in graphs)]
    return joined(title, table(header, lines), source(result))


def draw_partial(result: Row) -> str:
    """Draws rows without sums, rows and sums with them, and the ratio of bytes."""
    fanouts = list(dict.fromkeys(tuple(row["fanouts"]) for row in result["rows"]))
    found = {(row["graph"], row["replication_factor"], tuple(row["fanouts"])): row for row in result["rows"]}
    lines = []
    for graph, alpha in dict.fromkeys(key[:2] for key in found):
        line = [graph, f"{alpha:g}"]
        for each in fanouts:
            row = found[graph, alpha, each]
            without, rows, sums = (
                row[key] / 1e3 for key in ("rows_without", "rows_per_epoch", "sums_per_epoch")
            )  # thousands
            line.append(
                f"{without:,.1f} → {rows:,.1f} + {sums:,.1f} ({row['bytes_without'] / row['bytes_per_epoch']:.2f}×)"
            )
        lines.append(line)
    sizes = {row["graph"]: row["row_bytes"] for row in result["rows"]}
    usual = max(sizes.values())
    others = [f"{size} on {graph}" for graph, size in sizes.items() if size != usual]
    title = (
        f"**Sums instead of rows.** Thousands of rows per epoch without sums → thousands of rows + sums with them, over all "
        f"{result['parts']} machines. In brackets: "
        f"how many times fewer bytes of requests and answers. Counted by simulation; batches of {result['batch_size']}, METIS without refinement. "
        f"Rows take {usual} bytes ({', '.join(others)})."
    )
    return joined(title, table(["graph", "α", *(str(each) for each in map(list, fanouts))], lines), source(result))


def draw_partial_costs(result: Row) -> str:
    """Draws the CPU time for choosing sums, beside that for drawing the batch."""
    lines = [
        [
            row["graph"],
            str(row["fanouts"]),
            f"{row['batch_edges']:,}",
            f"{1e3 * row['draw_cpu_seconds']:.2f}",
            f"{1e3 * row['choose_cpu_seconds']:.2f}",
            f"{row['choose_cpu_seconds'] / row['draw_cpu_seconds']:.1f}×",
        ]
        for row in result["costs"]
    ]
    title = "**CPU time of choosing sums.** Milliseconds per batch on one thread, for drawing the batch (*draw*) and for choosing its sums (*choose*)."
    header = ["graph", "fanouts", "edges", "draw", "choose", "choose / draw"]
    ratios = [row["choose_cpu_seconds"] / row["draw_cpu_seconds"] for row in result["costs"]]
    title += f" Choosing takes {min(ratios):.1f} to {max(ratios):.1f} times as long as drawing."
    return joined(as_file("sums-cpu", title, header, lines), source(result))


def draw_partial_copies(result: Row) -> str:
    """Draws the rows and sums that a host copies to its device."""
    betas = list(dict.fromkeys(row["gpu_fraction"] for row in result["rows"]))
    found = {(tuple(row["fanouts"]), row["gpu_fraction"]): row for row in result["rows"]}
    lines = []
    for fanouts in dict.fromkeys(key[0] for key in found):
        line = [str(list(fanouts))]
        for beta in betas:
            row = found[fanouts, beta]
            line.append(
                f"{row['rows_without']:,.0f} → {row['rows_per_epoch']:,.0f} + {row['sums_per_epoch']:,.0f} ({1 / row['share']:.2f}×)"
            )
        lines.append(line)
    first = result["rows"][0]
    title = (
        "**Sums for a device.** Rows that one machine copies to its device per epoch without sums → rows + sums with them, if the device holds the first "
        f"β of the rows. Counted by simulation on a generated graph of {first['vertices']:,} vertices and {first['edges'] / 1e6:.0f} M edges, batches of "
        f"{result['batch_size']:,}."
    )
    return joined(title, table(["fanouts", *(f"β = {beta:g}" for beta in betas)], lines), source(result))


# --- Hosts with several ranks, ranks with several parts -----------------------------------------------------


def draw_host_volume(result: Row) -> str:
    """Draws the rows from other hosts relative to those with private caches, for each graph and shape."""
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
        "**One cache per host.** Rows from other hosts per epoch, without a cache and with a private cache per rank. *Shared / private* divides the rows "
        "with one shared cache per host by the rows with private caches of the same memory. Simulated, fanouts "
        f"{result['fanouts']}, batches of {result['batch_size']}."
    )
    header = ["graph, hosts of ranks", "no cache"]
    header += [f"α = {alpha:g}, {way}" for alpha in alphas for way in ("private", "shared / private")]
    return joined(title, table(header, lines), source(result))


def draw_joins(result: Row) -> str:
    """Draws the rows that 16 parts on fewer ranks fetch, relative to a directory with one part per rank."""
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
    title = "**16 parts on fewer ranks.** Rows fetched, relative to a directory with one part per rank."
    return joined(title, table(["graph, ranks", *(f"α = {alpha:g}" for alpha in alphas)], lines), source(result))


def draw_second_level(result: Row) -> str:
    """Draws the rows for one part per host. Its ranks split the seeds of the part, or have parts of their own inside it."""
    ways = {"hosts": "one cut", "a part per host, seeds split": "split", "a part per host, cut again": "again"}
    found = {
        (row["what"], row["graph"], row["hosts"], row["per_host"], row["alpha"]): row["shared_rows"]
        for row in result["rows"]
        if row["what"] in ways
    }
    alphas = sorted({alpha for *_, alpha in found})
    lines = []
    for graph, hosts, per_host in dict.fromkeys(key[1:4] for key in found):
        cells = []
        for alpha in alphas:
            rows = [found[what, graph, hosts, per_host, alpha] for what in ways]
            cells += [f"{rows[1] / rows[0]:.2f}", f"{rows[2] / rows[0]:.2f}"]
        lines.append([f"{graph}, {hosts} hosts of {per_host}", *cells])
    title = (
        "**A part for each host.** The graph is cut into one part per host. Rows that cross the network with one cache per host, relative to a graph that is "
        "cut into one part per rank. *Split*: the ranks of a host split the seeds of its part. *Cut again*: METIS cuts the part into one piece per rank."
    )
    header = [
        "graph, hosts of ranks",
        *(f"α = {alpha:g}, {way}" for alpha in alphas for way in ("split", "cut again")),
    ]
    return joined(as_file("second-level", title, header, lines), source(result))


def draw_hosts(result: Row) -> str:
    """Draws rows and seconds of an epoch over emulated hosts, by the way in which the ranks of a host share."""
    ways = {"private": "private caches", "shared": "one per host"}
    found = {(row["graph"], row["alpha"], row["way"]): row for row in result["rows"]}
    lines = []
    for graph, alpha in dict.fromkeys(key[:2] for key in found):
        rows = [found[graph, alpha, way] for way in ways]
        lines.append(
            [
                graph,
                f"{alpha:g}",
                *(f"{row['rows_from_other_hosts']:,.0f}" for row in rows),
                *(f"{row['seconds_fetching']:.2f} · {row['seconds_training']:.2f}" for row in rows),
            ]
        )
    title = (
        f"**{result['hosts']} emulated hosts of {result['ranks_per_host']} ranks**, links of {result['megabytes_per_second']:g} MB/s. Rows from other hosts "
        f"in an epoch, and its seconds: batches alone · with training of a GraphSAGE of width {result['hidden']}. {result['seed_fraction']:.0%} of the "
        f"training vertices, fanouts {result['fanouts']}, batches of {result['batch_size']}."
    )
    header = ["graph", "α", *(f"rows, {way}" for way in ways.values()), *(f"s, {way}" for way in ways.values())]
    return joined(title, table(header, lines), source(result))


DRAWN: Drawn = {
    "volume_ahead": ("volume_ahead", draw_volume_ahead),
    "lookahead_rows": ("lookahead", draw_lookahead),
    "lookahead_forecast": ("lookahead", draw_lookahead_forecast),
    "lookahead_cpu": ("lookahead_cpu", draw_lookahead_cpu),
    "shared_draws": ("shared_draws", draw_shared_draws),
    "shared_accuracy": ("shared_accuracy", draw_shared_accuracy),
    "narrow": ("narrow", draw_narrow),
    "partial_rows": ("partial", draw_partial),
    "partial_costs": ("partial", draw_partial_costs),
    "partial_copies": ("partial_copies", draw_partial_copies),
    "host_volume": ("host_volume", draw_host_volume),
    "hosts": ("hosts", draw_hosts),
    "joins": ("host_volume", draw_joins),
    "second_level": ("host_volume", draw_second_level),
}
