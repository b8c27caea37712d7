"""Tables of docs/results/scale.md: conversion, partitioning and estimates for graphs that outgrow memory."""

from __future__ import annotations

import math

import numpy as np

from .base import Drawn, Row, as_file, counted, joined, source, table


def draw_convert(result: Row) -> str:
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
    header = ["graph, step", "raw MB", "s · CPU s", "M edges per CPU s", "peak MB", "above start"]
    title = (
        f"**Converting** with `memory={result['memory']}`. Undirected graphs of average degree {result['degree']}. The archive has "
        f"{result['features']} float16 columns; the text has only edges. "
        "*In memory* loads the archive with `load_dataset` and builds its neighbour lists. "
        "The ratios divide the CPU time and the peak by those of *in memory*. "
        "*Above start* is the peak minus the memory of the process at its start."
    )
    return joined(title, table([*header, "CPU ratio", "peak ratio"], lines), source(result))


def draw_convert_layouts(result: Row) -> str:
    lines = [
        [
            row["step"],
            f"{row['raw_bytes'] / 1e6:,.0f}",
            f"{row['edges'] / 1e6:.1f}",
            f"{row['seconds']:.1f} · {row['cpu_seconds']:.1f}",
            f"{row['raw_bytes'] / row['cpu_seconds'] / 1e6:,.0f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['above_start_bytes'] / 1e6:,.0f}",
        ]
        for row in result["rows"]
    ]
    header = ["step", "raw MB", "M edges", "s · CPU s", "MB per CPU s", "peak MB", "above start"]
    title = (
        f"**Converting public layouts** with `memory={result['memory']}`. Random files in each layout, with the sizes of the real datasets divided by "
        f"{result['share']}. *In memory* reads the arrays whole, adds reverse edges with `ToUndirected` and builds the neighbour lists. "
        "The rows of the Parquet table come in random order."
    )
    return joined(title, table(header, lines), source(result))


def draw_tables(result: Row) -> str:
    lines = [
        [
            f"{row['edges'] / 1e6:,.0f} M edges, {row['step']}",
            f"{row['raw_bytes'] / 1e6:,.0f}",
            f"{row['seconds']:.1f} · {row['cpu_seconds']:.1f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['above_start_bytes'] / 1e6:,.0f}",
            f"{row['seconds_of_ids']:.1f}× · {row['cpu_seconds_of_ids']:.1f}×",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Converting tables with keys** with `memory={result['memory']}`, compared with the same graph under ids. The Parquet files have a tenth as many "
        f"vertices as edges. *Keys of texts* are texts of {result['key_bytes']} bytes, read as `tables:`. *Keys of integers* are int64, read in the same way. "
        "*Ids* are the same integers, read as `edges:`, which looks up nothing. The ratios divide seconds and CPU seconds by those of *ids*."
    )
    return joined(
        title, table(["graph, step", "raw MB", "s · CPU s", "peak MB", "above start", "ratio"], lines), source(result)
    )


def partitioned(result: Row) -> str:
    """Returns the options of `salientpp partition`."""
    return f"--method {result['method']} {'--refine' if result['refine'] else '--no-refine'}"


def draw_partition(result: Row) -> str:
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
    header = [
        "graph, method",
        "s · CPU s",
        "MB besides the graph",
        "edges cut",
        "largest load / mean",
        "predicted rows",
    ]
    title = (
        f"**Partitioners.** {result['parts']} parts of generated, memory-mapped graphs, two threads (METIS uses one). *Predicted rows* are VIP's forecast "
        "per epoch without a cache."
    )
    return joined(title, table(header, lines), source(result))


def draw_scale(result: Row) -> str:
    sizes = sorted({row["edges"] for row in result["rows"]})
    steps = [step for step in dict.fromkeys(row["step"] for row in result["rows"]) if step != "generate"]
    found = {(row["edges"], row["step"]): row for row in result["rows"]}
    header = ["step", *(f"{edges / 1e6:.1f} M edges" for edges in sizes)]

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
        "**Partitioning large graphs.** Seconds · CPU seconds · peak GB anonymous · peak GB resident. `salientpp partition converted:DIR` into "
        f"{result['parts']} parts with `{partitioned(result)}`, {result['features']} float16 columns, fanouts {result['fanouts']}, batches of "
        f"{result['batch_size']:,}, {result['threads']} threads."
    )
    return joined(title, table(header, lines), source(result))


#: The largest public graphs. None was loaded here. ``edges`` are the edges that batches are drawn from. For papers100M and MAG240M they are both directions of
#: every stored edge, assuming that none is stored twice. For IGB-full they are the stored edges. ``rows`` are vertices with features, ``row_bytes`` their size
#: as float16. ``train`` are seeds, ``split`` ids in all splits. For IGB-full they are 60 % and all of the labelled vertices, as in its own loader.
#: Sources: OGB (arXiv 2005.00687), OGB-LSC (arXiv 2103.09430), IGB (arXiv 2302.13522).
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

#: Cores per machine, and Gbit/s of its network, that the table assumes.
CORES, GIGABITS = 16, (1, 10, 100)


def directory_bytes(
    parts: int, vertices: int, edges: int, rows: int, row_bytes: int, split: int, label: int = 8
) -> float:
    """Returns the size of a dataset directory: neighbour lists (int64 and int32), original ids, rows, labels, splits, and VIP of every vertex and part."""
    return 8 * (vertices + 1) + 4 * edges + 8 * vertices + rows * (row_bytes + label) + 8 * split + 4 * parts * vertices


def draw_large_disk(result: Row) -> str:
    """Draws what the file formats take, which is exact except for headers."""
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
            lines.append([f"{name}, {counted(parts, 'machine')}", *(f"{figure / 1e9:,.0f}" for figure in figures)])
    title = (
        "**Disk and memory, computed from the formats, not measured.** GB, with float16 rows. For "
        f"{len(errors)} directories of generated graphs that were written, the formula is off by {min(errors):+.2%} to {max(errors):+.2%}. "
        "*Memory* is enough for everything that a host reads, with a cache of α = 0.16."
    )
    header = [
        "graph",
        "converted graph",
        "directory",
        "needed by one machine",
        "topology",
        "rows of a part",
        "memory",
    ]
    return joined(title, table(header, lines), source(result))


def plane(rows: list[Row], key: str) -> np.ndarray:
    """Fits ``a + b N + c E`` with b, c >= 0 by least squares and returns [a, b, c]."""
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


def draw_scale_degrees(result: Row) -> str:
    """Draws memory and time by vertices and by edges, from graphs of several degrees."""
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
            # Checks the fit: the plane through the other graphs, evaluated at the largest.
            *others, largest = sorted(rows, key=lambda row: row["edges"])
            of_others = plane(others, key) @ [1, largest["vertices"], largest["edges"]]
            line.append(
                f"{start / 1e9:.2f} GB + {by_vertex:.0f} B · N + {by_edge:.1f} B · E"
                if unit == "GB"
                else f"{start:.1f} s + {1e6 * by_vertex:.1f} µs · N + {1e6 * by_edge:.2f} µs · E"
            )
            line.append(f"{of_others / largest[key] - 1:+.0%}")
            numbers = [
                (start + by_vertex * graph["vertices"] + by_edge * graph["edges"]) / scale for graph in LARGE.values()
            ]
            line.append(" · ".join(f"{number:,.0f}" if unit == "GB" else f"{number:,.2f}" for number in numbers))
        extrapolated.append(line)
    header = ["step", *(f"{vertices / 1e6:g} M vertices, {edges / 1e6:.1f} M edges" for vertices, edges in sizes)]
    title = (
        f"**Measured.** Peak anonymous GB · CPU seconds. Graphs of several degrees, {result['parts']} parts, `{partitioned(result)}`, "
        f"{result['features']} float16 columns."
    )
    fit = (
        "**Fitted; italics are extrapolated, not measured.** Each formula is a plane that is fitted to these figures, for N vertices and E edges. For "
        "*error*, a plane is fitted without the graph with most edges. *Error* is the difference between this plane and the figure of that graph."
    )
    of = " · ".join(LARGE)
    names = ["step", "anonymous memory", "error", f"*{of}, GB*", "CPU time", "error", f"*{of}, CPU h*"]
    more = as_file("partition-steps", title, header, measured)
    return joined(more, fit, table(names, extrapolated), source(result))


def draw_large_rows(result: Row) -> str:
    """Draws the rows per seed that were measured as graphs grow."""
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
                        f"like {name}, {row['vertices'] / 1e6:g} M vertices, {row['edges'] / 1e6:.1f} M edges",
                        str(parts),
                        str(row["batch_size"]),
                        f"{row['edge_cut_fraction']:.1%}",
                        f"{row['vertices_per_seed']:.0f}",
                        *(f"{number:.0f}" for number in row["rows_per_seed"]),
                    ]
                )
    header = [
        "graph",
        "K",
        "batch size",
        "edges cut",
        "vertices per seed",
        *(f"rows, α = {a:g}" for a in result["alphas"]),
    ]
    title = (
        "**Rows per seed**, measured on generated graphs: distinct vertices of a batch per seed, and those that another part owns and the cache lacks. "
        f"Fanouts (15, 10, 5), at least {result['counted_seeds']} seeds of each part."
    )
    largest = max(row["vertices"] for row in result["rows"])
    shown = [line for line in lines if f" {largest / 1e6:g} M vertices" in line[0]]
    more = as_file("rows-per-seed", "**Smaller graphs.**", header, lines)
    return joined(title, table(header, shown), more, source(result))


def draw_large_epoch(result: Row) -> str:
    """Draws the rows of an epoch of the largest graphs, and the bottleneck."""
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
                limit = "network" if len(slow) == len(GIGABITS) else f"network up to {slow[-1]} Gbit/s" if slow else ""
                cells.append(limit or "making batches")
            lines.append([f"{name}, {counted(parts, 'machine')}", *cells])
    header = [
        "graph",
        "batches per machine",
        f"s to make them, {CORES} cores",
        *(f"M rows, α = {alpha:g}" for alpha in alphas),
        *(f"s at {speed} Gbit/s" for speed in GIGABITS),
        "bottleneck",
    ]
    title = (
        "**An epoch, extrapolated, not measured.** Figures per seed of the largest generated graph, times the seeds of the dataset. Rows add up all "
        "machines. Network seconds are for the rows that one machine receives at α = 0.16."
    )
    return joined(title, table(header, lines), source(result))


def draw_mapped(result: Row) -> str:
    disk = {row["row_bytes"]: row["seconds"] for row in result["rows"] if row["way"] == "disk"}
    names = {"kernel": "row kernel", "torch": "`torch.index_select`", "disk": "pread of pages, 32 threads"}
    lines = [
        [
            f"{row['row_bytes']:,} bytes, {names[row['way']]}",
            f"{1e3 * row['seconds']:,.0f} · {1e3 * row['cpu_seconds']:,.0f}",
            f"{row['bytes_read'] / 1e6:,.0f}",
            f"{row['bytes_read'] / row['seconds'] / 1e6:,.0f}",
            f"{result['rows_per_turn'] / row['seconds'] / 1e3:,.0f}",
            f"{disk[row['row_bytes']] / row['seconds']:.2f}×",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Rows that are not in memory.** {result['rows_per_turn']:,} random rows of a mapped file of {result['gigabytes']:g} GiB. "
        "Half of the file is in the page cache."
    )
    header = ["rows, method", "ms · CPU ms", "MB read", "MB/s read", "thousand rows/s", "speed relative to pread"]
    return joined(title, table(header, lines), source(result))


def draw_inference(result: Row) -> str:
    lines = []
    for row in result["rows"]:
        order = "the first layer, pulled" if row["way"] == "pulled" else row["way"]
        is_partial = row["way"] == "pulled"
        counted = row["counted"][0] if row["counted"] else None
        lines.append(
            [
                order,
                f"{row['seconds']:,.0f}" + (" (extrapolated)" if is_partial else ""),
                f"{row['seconds_by_layer'][0]:,.0f}",
                f"{row['cpu_seconds']:,.0f}",
                f"{row['bytes_read'] / 1e9:,.1f}",
                "–" if counted is None else f"{counted[0] / 1e9:,.1f}",
                "–" if counted is None else f"{counted[1] / 1e9:,.1f}",
                "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
            ]
        )
    header = [
        "rows",
        "seconds",
        "seconds, first layer",
        "CPU seconds",
        "GB read",
        "GB counted, first layer, pushed",
        "pulled",
        "peak GiB",
    ]
    difference = result["largest_difference"]
    equal = (
        "" if difference is None else f" The outputs in files differ from those in memory by at most {difference:.1g}."
    )
    title = (
        f"**Inference beyond memory.** GraphSAGE of 3 layers, {result['hidden']} wide, on {result['vertices'] / 1e6:.1f} M vertices and "
        f"{result['edges'] / 1e6:.0f} M edges, {result['columns']} float16 columns. Runs with files have {result['limit_gib']:g} GiB, page cache included, "
        f"and `memory={result['memory']!r}`.{equal}"
    )
    return joined(title, table(header, lines), source(result))


def draw_disk(result: Row) -> str:
    names = {
        "index_select": "memory map, `torch.index_select`",
        "map": "memory map, row kernel",
        "pread": "`pread` of pages, 32 threads",
        "read_ahead": "`read_ahead`",
    }
    pread = next(row["rows_per_second"] for row in result["rows"] if row["way"] == "pread")
    lines = [
        [
            names[row["way"]],
            f"{row['rows_per_second'] / 1e3:,.1f}",
            f"{row['rows_per_second'] / pread:,.2f}×",
            f"{row['bytes_read_per_row'] / result['row_bytes']:,.1f}",
            f"{row['bytes_read_per_row'] * row['rows_per_second'] / 1e6:,.0f}",
            f"{1e6 * row['cpu_seconds_per_row']:,.1f}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Rows larger than memory.** {result['vertices'] / 1e6:g} M rows of {result['row_bytes']} bytes, {result['file_bytes'] / 1e9:.1f} GB. "
        f"The memory holds {result['share']:.0%} of them. Batches of {result['batch_size']} seeds with fanouts {result['fanouts']} have about "
        f"{result['rows'][-1]['rows_per_batch'] / 1e3:,.0f} thousand rows; with `torch.index_select`, "
        f"{result['rows'][0]['rows_per_batch'] / 1e3:,.1f} thousand. The disk reads {result['rates']['random'] / 1e6:,.0f} MB/s in pages of 4 KiB at random, "
        f"and {result['rates']['in_order'] / 1e6:,.0f} MB/s in order."
    )
    header = [
        "rows are read by",
        "thousand rows/s",
        "speed relative to pread",
        "bytes read / bytes of rows",
        "MB/s read",
        "CPU µs per row",
    ]
    return joined(title, table(header, lines), source(result))


DRAWN: Drawn = {
    "inference": ("inference", draw_inference),
    "convert": ("convert", draw_convert),
    "convert_layouts": ("convert_layouts", draw_convert_layouts),
    "tables": ("tables", draw_tables),
    "partition": ("partition", draw_partition),
    "scale": ("scale", draw_scale),
    "scale_degrees": ("scale_degrees", draw_scale_degrees),
    "large_disk": ("large", draw_large_disk),
    "large_rows": ("large", draw_large_rows),
    "large_epoch": ("large", draw_large_epoch),
    "mapped": ("mapped", draw_mapped),
    "disk": ("disk", draw_disk),
}
