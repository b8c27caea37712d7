"""Draws docs/results/paper.md from results/paper_*.json: its tables, and its figures as PNG and SVG under docs/results.

python benchmarks/draw_paper.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from drawing.base import ROOT, Drawn, Row, as_file, counted, filled, joined, load, replaced, source, table
from drawing.svg import Picture

FOLDER = ROOT / "docs" / "results"


def short(row: Row) -> str:
    return f"α = {row['replication_factor']:g}" if row["step"] == "feature caching" else row["step"]


def cases(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Groups rows by graph and number of hosts."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["graph"], row["hosts"]), []).append(row)
    return found


def seconds(row: Row) -> float:
    return row["seconds"]["median"]


def figure(
    name: str, text: str, draw: Callable[..., None], columns: int = 1, width: float = 4.8, font: float = 10
) -> str:
    """Saves what ``draw(*axes)`` draws, and returns the Markdown link to it with the alternative ``text``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "salientpp"  # the same data give the same file
    from matplotlib import pyplot

    FOLDER.mkdir(exist_ok=True)
    with pyplot.rc_context({"font.size": font}):
        picture, axes = pyplot.subplots(1, columns, figsize=(width * columns, 3.6), squeeze=False)
        draw(*axes[0])
        picture.tight_layout()
        for kind in ("svg", "png"):
            picture.savefig(FOLDER / f"{name}.{kind}", metadata={"Date": None} if kind == "svg" else None, dpi=120)
        pyplot.close(picture)
    return f"![{text}]({name}.svg)"


def draw_table1(result: Row) -> str:
    lines = []
    for (graph, hosts), rows in cases(result["rows"]).items():
        full = seconds(rows[0])
        for row in rows:
            spread = row["seconds"]
            lines.append(
                [
                    f"{graph}, {hosts} hosts: {short(row)}",
                    f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})",
                    f"{spread['median'] / full:.2f}",
                    f"{row['remote_rows']:,.0f}",
                    f"{row['predicted_rows']:,.0f}",
                    f"{row['bytes'] / 1e6:,.1f}",
                    f"{row['feature_bytes'] / row['partitioned_bytes']:.2f}",
                ]
            )
    header = ["case", "seconds per epoch", "relative", "rows fetched", "predicted", "MB fetched", "feature memory"]
    exact = sum(
        (row["remote_rows"], row["bytes"]) == (row["predicted_rows"], row["predicted_bytes"]) for row in result["rows"]
    )
    title = (
        f"Median of {result['rows'][0]['seconds']['repeats']} epochs (quartiles). Each line of a case keeps what the lines before it added; "
        "α stands for feature caching. "
        "*Relative* compares with full replication. *Feature memory* adds up all hosts, in copies of the features. "
        f"Rows and bytes are exactly as predicted in {exact} of {len(result['rows'])} lines."
    )
    more = as_file("paper-steps", "**2, 4 and 8 hosts.**", header, lines)
    return joined(title, table(header, of_four(lines)), more, draw_rates(result), source(result))


def of_four(lines: list[list[str]]) -> list[list[str]]:
    """Returns the lines of four hosts, which the page shows."""
    return [line for line in lines if ", 4 hosts: " in line[0]]


def draw_lookahead(result: Row) -> str:
    lines = []
    for (graph, hosts), rows in cases(result["rows"]).items():
        full = rows[0]
        for row in rows:
            spread = row["seconds"]
            shares = [own / others for own, others in zip(row["seconds_by_turn"], full["seconds_by_turn"], strict=True)]
            lines.append(
                [
                    f"{graph}, {hosts} hosts: {short(row)}" + (f", W = {row['lookahead']}" if row["lookahead"] else ""),
                    f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})",
                    f"{spread['median'] / seconds(full):.2f}",
                    f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
                    f"{row['remote_rows']:,.0f}",
                    f"{row['predicted_rows']:,.0f}",
                    f"{row['bytes'] / 1e6:,.1f}",
                    f"{row['feature_bytes'] / row['partitioned_bytes']:.3f}",
                ]
            )
    header = [
        "case",
        "seconds per epoch",
        "relative",
        "turn by turn",
        "rows fetched",
        "predicted",
        "MB fetched",
        "feature memory",
    ]
    # These are means over epochs, added in two orders, so they differ in the last digits.
    exact = sum(
        abs(row["remote_rows"] - row["predicted_rows"]) < 1e-6 and abs(row["bytes"] - row["predicted_bytes"]) < 1e-3
        for row in result["rows"]
    )
    title = (
        f"Median of {result['rows'][0]['seconds']['repeats']} epochs (quartiles) after a warm-up epoch. *Relative* compares with full replication. "
        "*Turn by turn* is the median of the ratios to full replication's epoch in the same turn (smallest to largest). "
        f"Rows and bytes are means of all epochs. They are exactly as predicted in {exact} of {len(result['rows'])} lines."
    )
    more = as_file("paper-lookahead", "**2, 4 and 8 hosts.**", header, lines)
    return joined(title, table(header, of_four(lines)), more, draw_rates(result), source(result))


def draw_partial(result: Row) -> str:
    lines = []
    for (graph, hosts), rows in cases(result["rows"]).items():
        without: dict[float, float] = {}
        for row in rows:
            spread, alpha = row["seconds"], row["replication_factor"]
            without.setdefault(alpha, row["bytes"])  # rows come before rows and sums
            is_full = row is rows[0]
            lines.append(
                [
                    f"{graph}, {hosts} hosts: {row['step']}" + ("" if is_full else f", α = {alpha:g}"),
                    f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})",
                    f"{spread['median'] / seconds(rows[0]):.2f}",
                    f"{row['remote_rows']:,.0f}",
                    f"{row['sums']:,.0f}",
                    f"{row['bytes'] / 1e6:,.1f}",
                    "–" if is_full else f"{without[alpha] / row['bytes']:.2f}",
                ]
            )
    header = ["case", "seconds per epoch", "relative", "rows fetched", "sums", "MB fetched", "times fewer bytes"]
    exact = sum(
        abs(row["remote_rows"] - row["predicted_rows"]) < 1e-6
        and abs(row["sums"] - row["predicted_sums"]) < 1e-6
        and abs(row["bytes"] - row["predicted_bytes"]) < 1e-3
        for row in result["rows"]
    )
    title = (
        f"Median of {result['rows'][0]['seconds']['repeats']} epochs (quartiles) after a warm-up epoch. *Relative* compares with full replication. "
        f"Rows, sums and bytes are means of all epochs. They are as predicted in {exact} of {len(result['rows'])} lines."
    )
    return joined(title, table(header, lines), draw_rates(result), source(result))


def draw_rates(result: Row) -> str:
    """Draws the links of the cases that the page shows: those of four hosts, if there are any."""
    found = cases(result["rows"])
    four = {case: rows for case, rows in found.items() if case[1] == 4}
    lines = [
        [
            f"{graph}, {hosts} hosts",
            str(rows[0]["hidden"]),
            f"{rows[0]['compute_seconds']:.2f}",
            f"{rows[0]['communication_seconds']:.2f}",
            f"{rows[0]['ratio']:.2f}",
            f"{rows[0]['link_bytes_per_second'] / 1e6:.1f}",
            str(rows[0]["batches_per_epoch"]),
        ]
        for (graph, hosts), rows in (four or found).items()
    ]
    title = (
        f"The rates of the links, chosen by measurement. GraphSAGE, fanouts {result['fanouts']}, {result['batch_size']} seeds per batch and host. "
        "*Computation* and *communication* are the measured seconds of an epoch, and *ratio* is the second divided by the first."
    )
    header = ["graph", "width", "computation, s", "communication, s", "ratio", "MB/s, each way", "batches per host"]
    return joined(title, table(header, lines))


def draw_figure4(result: Row) -> str:
    chosen = {graph: rows for (graph, hosts), rows in cases(result["rows"]).items() if hosts == 4}

    def draw(axes: Any) -> None:
        for place, rows in enumerate(chosen.values()):
            for index, row in enumerate(rows):
                axes.bar(
                    place + index / 8,
                    seconds(row) / seconds(rows[0]),
                    1 / 9,
                    color=f"C{index}",
                    label=short(row) if place == 0 else None,
                )
        axes.set(
            xticks=[place + 0.3 for place in range(len(chosen))],
            ylabel="epoch relative to full replication",
            title="4 hosts",
        )
        axes.set_xticklabels(chosen)
        axes.margins(y=0.4)  # room for the legend
        axes.legend(frameon=False, fontsize=7, ncol=2)

    return figure("figure4", "Epoch by step and graph, relative to full replication", draw) if chosen else ""


def draw_overview(steps: Row, train: Row) -> str:
    """Draws docs/results/overview.svg for README.md, and returns the picture's Markdown with its caption.

    Left: an epoch in one process, relative to PyG, computed from few batches, so without a spread. Right: the median epoch on four hosts, relative to a full
    copy of the features on each host, with quartiles.
    """
    contenders = {
        "PyG": ("PyG", "grid"),
        "PyG, trim_to_layer": ("PyG, trim_to_layer", "soft"),
        "salientpp": ("salientpp, import changed", "pale"),
        "salientpp, nn.trim": ("salientpp and nn.trim", "one"),
    }
    versions = {
        "partitioned features": ("partitioned", "grid"),
        "pipelined communication": ("and the pipeline", "soft"),
        "α = 0.32": ("and a VIP cache", "one"),
    }
    epochs = {
        (row["graph"], row["contender"]): row["seconds_per_epoch"]
        for row in train["rows"]
        if (row["model"], row["layers"]) == ("GraphSAGE", 3) and "seconds_per_epoch" in row
    }
    on_hosts = {
        graph: {short(row): row for row in rows} for (graph, hosts), rows in cases(steps["rows"]).items() if hosts == 4
    }
    graphs = {"generated": "generated", "facebook_pages": "facebook pages", "debian_full": "debian full"}
    picture = Picture(
        720,
        300,
        "Epochs of three graphs in one process, relative to PyG, and on four hosts, relative to a full copy on each host.",
    )

    def panel(
        x: float, title: str, legend: list[tuple[str, str]], bars: list[list[tuple[float, float, float]]], most: float
    ) -> None:
        """Bars of each graph: their value, and the quartiles."""
        low, scale = 232.0, 185.0 / most
        picture.text(x, 20, title, size=15)
        picture.line(x, low - scale, x + 330, low - scale, "pale")
        for number, (name, of_graph) in enumerate(zip(graphs.values(), bars, strict=True)):
            left, width = x + 4 + 110 * number, 96 / len(legend)
            for place, ((value, first, last), (_, color)) in enumerate(zip(of_graph, legend, strict=True)):
                at = left + width * place
                picture.box(at, low - scale * value, width - 2, scale * value, color)
                picture.text(at + width / 2 - 1, low - scale * last - 4, f"{value:.2f}", anchor="middle", size=10)
                if first < last:
                    picture.line(at + width / 2 - 1, low - scale * first, at + width / 2 - 1, low - scale * last, "ink")
            picture.text(left + 48, low + 16, name, anchor="middle")
        for number, (name, color) in enumerate(legend):
            picture.box(x + 185 * (number % 2), 259 + 18 * (number // 2), 11, 11, color)
            picture.text(x + 16 + 185 * (number % 2), 269 + 18 * (number // 2), name, size=12)

    one = [[(epochs[graph, each] / epochs[graph, "PyG"],) * 3 for each in contenders] for graph in graphs]
    panel(10, "One process: epoch / PyG's epoch", list(contenders.values()), one, 1.1)
    four = []
    for graph in graphs:
        rows = on_hosts[graph]
        spreads = [[rows[step]["seconds"][key] for key in ("median", "low", "high")] for step in versions]
        four.append([tuple(value / seconds(rows["full replication"]) for value in spread) for spread in spreads])
    panel(380, "Four hosts: epoch / full copy's epoch", list(versions.values()), four, 3.1)
    picture.save(FOLDER / "overview.svg")
    rates = sorted(rows["full replication"]["link_bytes_per_second"] / 1e6 for rows in on_hosts.values())
    share = on_hosts["generated"]["α = 0.32"]
    return joined(
        "![Epoch times of three graphs, in one process and on four hosts](docs/results/overview.svg)",
        f"*Left: [the epochs above](docs/results/training.md), without a spread. Right: medians and quartiles of {share['seconds']['repeats']} epochs "
        f"on [emulated hosts](docs/results/paper.md), {rates[0]:.0f} to {rates[-1]:.0f} MB/s for each, α = 0.32; all hosts hold "
        f"{share['feature_bytes'] / share['partitioned_bytes']:.1f} copies of the features, not 4.*",
    )


def draw_figure5(result: Row) -> str:
    graph = result["rows"][0]["graph"]
    by_hosts = {hosts: rows for (name, hosts), rows in cases(result["rows"]).items() if name == graph}
    hosts = sorted(by_hosts)

    def draw(time: Any, memory: Any) -> None:
        for index, name in enumerate(map(short, by_hosts[hosts[0]])):
            time.plot(
                hosts, [seconds(by_hosts[k][index]) / seconds(by_hosts[k][0]) for k in hosts], marker="o", label=name
            )
            memory.plot(
                hosts,
                [by_hosts[k][index]["feature_bytes"] / by_hosts[k][index]["partitioned_bytes"] for k in hosts],
                marker="o",
            )
        time.set(xlabel="hosts", xticks=hosts, ylabel="epoch relative to full replication", title=graph)
        memory.set(
            xlabel="hosts",
            xticks=hosts,
            ylabel="feature memory of all hosts, in copies",
            title="1 + α, or one copy per host",
        )
        time.legend(frameon=False, fontsize=7)

    return figure("figure5", "Epoch and feature memory over the number of hosts", draw, columns=2)


def draw_figure8(result: Row) -> str:
    """Draws the time inside the stages and in the training step, gradients included."""
    rows = next((rows for (_, hosts), rows in cases(result["rows"]).items() if hosts == 4), [])
    if not rows:
        return ""
    chosen = [row for row in rows if row["step"] != "feature caching" or row["replication_factor"] == 0.32]
    stages = list(chosen[0]["seconds_by_stage"])
    lines = [[stage, *(f"{row['seconds_by_stage'][stage]:.2f}" for row in chosen)] for stage in stages]
    lines.append(["waiting in `next()`, total", *(f"{row['seconds_waiting']:.2f}" for row in chosen)])
    lines.append(
        [
            "training step, all-reduce included",
            *(f"{seconds(row) - row['seconds_waiting']:.2f}" for row in chosen),
        ]
    )

    def draw(axes: Any) -> None:
        for place, row in enumerate(chosen):
            parts = {**row["seconds_by_stage"], "training step": seconds(row) - row["seconds_waiting"]}
            bottom = 0.0
            for index, (name, value) in enumerate(parts.items()):
                axes.bar(
                    place,
                    value,
                    0.7,
                    bottom,
                    color=f"C{index}" if index < 10 else "lightgrey",
                    label=name if place == 0 else None,
                )
                bottom += value
        axes.set(xticks=range(len(chosen)), ylabel="seconds per epoch", title=f"{chosen[0]['graph']}, 4 hosts")
        axes.set_xticklabels([short(row).replace(" ", "\n", 1) for row in chosen], fontsize=7)
        axes.legend(frameon=False, fontsize=6)

    title = f"Seconds of an epoch, mean over hosts. {chosen[0]['graph'].capitalize()} graph, 4 hosts."
    return joined(
        as_file("figure8", title, ["", *map(short, chosen)], lines),
        figure("figure8", "Seconds of an epoch by stage", draw),
    )


def draw_figure7(result: Row) -> str:
    full, *rows = result["rows"]
    lines = [
        [
            f"{row['replication_factor']:g}",
            f"{seconds(row):.2f}",
            f"{seconds(row) / seconds(full):.2f}",
            f"{row['remote_rows'] / rows[0]['remote_rows']:.3f}",
            "yes" if row["remote_rows"] == row["predicted_rows"] else "no",
        ]
        for row in rows
    ]

    def draw(axes: Any) -> None:
        alphas = [row["replication_factor"] for row in rows]
        axes.plot(
            alphas,
            [seconds(row) / seconds(full) for row in rows],
            marker="o",
            label="epoch relative to full replication",
        )
        axes.plot(
            alphas,
            [row["remote_rows"] / rows[0]["remote_rows"] for row in rows],
            marker="o",
            label="share of rows still fetched",
        )
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(xlabel="replication factor α", ylim=0, title=f"{full['graph']}, {full['hosts']} hosts")
        axes.legend(frameon=False)

    header = ["α", "seconds per epoch", "relative to full replication", "share of rows fetched", "rows as predicted"]
    return joined(
        figure("figure7", "Epoch and share of rows fetched over α", draw),
        as_file(
            "figure7",
            f"Rows are exactly as predicted in {sum(line[-1] == 'yes' for line in lines)} of {len(lines)} points.",
            header,
            lines,
        ),
        source(result),
    )


def draw_figure9(result: Row) -> str:
    by_policy = {policy: [row for row in result["rows"] if row["policy"] == policy] for policy in ("vip", "simulation")}
    lines = [
        [
            f"{vip['replication_factor']:g}",
            *(
                f"{seconds(row):.2f} ({row['seconds']['low']:.2f} to {row['seconds']['high']:.2f})"
                for row in (vip, other)
            ),
            f"{seconds(other) / seconds(vip):.2f}",
            f"{other['remote_rows'] / max(vip['remote_rows'], 1):.3f}",
        ]
        for vip, other in zip(by_policy["vip"], by_policy["simulation"])
    ]

    def draw(axes: Any) -> None:
        for policy, rows in by_policy.items():
            axes.plot(
                [row["replication_factor"] for row in rows], [seconds(row) for row in rows], marker="o", label=policy
            )
        axes.set(
            xlabel="replication factor α",
            ylabel="seconds per epoch",
            ylim=0,
            title=f"links of 1/{result['rows'][0]['slowdown']:g} of the rate",
        )
        axes.legend(frameon=False)

    header = [
        "α",
        "VIP by formula, s",
        "VIP by simulation, s",
        "time, simulation / formula",
        "rows, simulation / formula",
    ]
    return joined(
        figure("figure9", "Epoch with VIP by formula and by simulation, over α", draw),
        as_file("figure9", "**Points of the figure**, with quartiles.", header, lines),
        source(result),
    )


def draw_figure6(result: Row) -> str:
    graphs = list(dict.fromkeys(row["graph"] for row in result["rows"]))
    by_graph = {graph: [row for row in result["rows"] if row["graph"] == graph] for graph in graphs}
    orders = ("vip_order", "file_order")
    lines = [
        [
            f"{graph}, β = {row['gpu_fraction']:g}",
            *(f"{row[f'{kind}_{order}']:,.0f}" for order in orders for kind in ("expected", "rows")),
        ]
        for graph, rows in by_graph.items()
        for row in rows
    ]

    def draw(*all_axes: Any) -> None:
        for axes, (graph, rows) in zip(all_axes, by_graph.items()):
            betas = [row["gpu_fraction"] for row in rows]
            for index, (order, name) in enumerate(zip(orders, ("VIP order", "file order"))):
                axes.plot(
                    betas, [row[f"rows_{order}"] for row in rows], "o", color=f"C{index}", label=f"{name}, counted"
                )
                axes.plot(
                    betas, [row[f"expected_{order}"] for row in rows], "-", color=f"C{index}", label=f"{name}, expected"
                )
            axes.set(xlabel="GPU fraction β", ylabel="rows per epoch", ylim=0, title=graph)
        all_axes[0].legend(frameon=False, fontsize=7)

    header = ["graph, β", "VIP order, expected", "counted", "file order, expected", "counted"]
    return joined(
        figure("figure6", "Rows copied to the device over β, in two orders", draw, columns=len(graphs)),
        as_file("figure6", "**Points of the figure.**", header, lines),
        source(result),
    )


def draw_accuracy(result: Row) -> str:
    found: dict[tuple[str, int], list[float]] = {}
    for row in result["rows"]:
        found.setdefault((row["graph"], row["hosts"]), []).append(row["test_accuracy"])
    lines = [
        [
            f"{graph}, {counted(hosts, 'rank')}",
            *(f"{value:.4f}" for value in values),
            f"{sum(values) / len(values):.4f}",
            f"{max(values) - min(values):.4f}",
        ]
        for (graph, hosts), values in found.items()
    ]
    seeds = sorted({row["seed"] for row in result["rows"]})
    title = f"Test accuracy after {result['rows'][0]['epochs']} epochs with the same global batch."
    return joined(title, table(["case", *(f"seed {seed}" for seed in seeds), "mean", "spread"], lines), source(result))


def draw_evaluation(result: Row) -> str:
    lines = []
    for (graph, hosts), rows in cases(result["rows"]).items():
        for row in rows:
            evaluation, train = statistics.median(row["evaluation_seconds"]), statistics.median(row["train_seconds"])
            reached = row["seconds_to_target"]
            lines.append(
                [
                    f"{graph}, {hosts} hosts: {row['way']}",
                    f"{train:.2f}",
                    f"{evaluation:.2f}",
                    f"{row['seconds_per_epoch']:.2f}",
                    f"{statistics.median(row['bytes_by_host']) / 1e6:,.1f}",
                    "–" if reached is None else f"{row['epochs_to_target']}",
                    "–" if reached is None else f"{reached:.1f}",
                    f"{row['test_accuracy'][-1]:.4f}",
                ]
            )
    header = [
        "case, evaluation by",
        "training, s",
        "evaluation, s",
        "epoch with evaluation, s",
        "MB received per host",
        "epochs to target",
        "seconds to target",
        "test accuracy",
    ]
    targets = ", ".join(f"{rows[0]['target']:.4f} ({graph})" for (graph, _), rows in cases(result["rows"]).items())
    title = (
        f"Medians of {len(result['rows'][0]['train_seconds'])} epochs, α = 0.32. The vertices of val and test are evaluated after each epoch. The target is a "
        f"validation accuracy of {targets}: the best exact one, less 0.005. Bytes count one evaluation."
    )
    return joined(title, table(header, lines), draw_rates(result), source(result))


DRAWN: Drawn = {
    "evaluation": ("paper_evaluation", draw_evaluation),
    "table1": ("paper_steps", draw_table1),
    "figure4": ("paper_steps", draw_figure4),
    "figure5": ("paper_steps", draw_figure5),
    "figure8": ("paper_steps", draw_figure8),
    "lookahead": ("paper_lookahead", draw_lookahead),
    "partial": ("paper_partial", draw_partial),
    "figure7": ("paper_alpha", draw_figure7),
    "figure9": ("paper_slow", draw_figure9),
    "figure6": ("paper_device", draw_figure6),
    "accuracy": ("paper_accuracy", draw_accuracy),
}


def main() -> None:
    page = FOLDER / "paper.md"
    page.write_text(filled(page.read_text(), DRAWN))
    steps, train = load("paper_steps"), load("train")
    if steps is not None and train is not None:
        readme = ROOT / "README.md"
        readme.write_text(replaced(readme.read_text(), "overview", draw_overview(steps, train)))


if __name__ == "__main__":
    main()
