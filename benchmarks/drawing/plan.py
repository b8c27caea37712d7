"""Tables and plot of docs/results/plan.md: predicted and measured epochs."""

from __future__ import annotations

import statistics

from .base import ROOT, Drawn, Row, as_file, joined, source, table

#: Ways in the order of the table.
_WAYS = ("cache", "lookahead", "cache + sums")

#: Loss against the best combination that still counts as the best.
_NEAR = 0.05


def settings(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows of each setting: one graph, number of hosts, rate and budget."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["graph"], row["hosts"], row["megabytes_per_second"], row["alpha"]), []).append(row)
    return list(found.values())


def error(row: Row) -> float:
    return row["predicted"] / row["seconds"]["median"] - 1


def seconds_of(rows: list[Row], way: str) -> float:
    return next(row["seconds"]["median"] for row in rows if row["way"] == way)


def chosen(rows: list[Row]) -> Row:
    return next(row for row in rows if row["chosen"])


def draw_accuracy(result: Row) -> str:
    """Draws errors of predictions and losses of chosen plans, by graph and number of hosts."""
    lines = []
    rows = result["rows"]
    groups = list(dict.fromkeys((row["graph"], row["hosts"]) for row in rows))
    for label, of_group in [
        *(
            (f"{graph}, {hosts} hosts", [row for row in rows if (row["graph"], row["hosts"]) == (graph, hosts)])
            for graph, hosts in groups
        ),
        ("all", rows),
    ]:
        errors = [abs(error(row)) for row in of_group]
        several = settings(of_group)
        losses = [
            chosen(each)["seconds"]["median"] / min(row["seconds"]["median"] for row in each) - 1 for each in several
        ]
        against = [chosen(each)["seconds"]["median"] / seconds_of(each, "cache") for each in several]
        bytes_ = [abs(row["predicted_bytes"] / max(1.0, row["bytes"]) - 1) for row in of_group]
        lines.append(
            [
                label,
                str(len(of_group)),
                f"{statistics.median(errors):.1%}",
                f"{max(errors):.1%}",
                f"{statistics.median(bytes_):.1%}",
                f"{sum(loss <= _NEAR for loss in losses)} of {len(losses)}",
                f"{max(losses):.1%}",
                f"{min(against):.2f} to {max(against):.2f}",
            ]
        )
    title = (
        "**Accuracy.** Error: predicted seconds of an epoch, divided by the median of the measured ones, less 1. *Best*: the chosen combination takes at "
        f"most {_NEAR:.0%} longer than the fastest one that was measured. *Static cache*: seconds of the chosen combination divided by those of a static cache "
        f"in the same memory. Fanouts {result['fanouts']}, batches of {result['batch_size']}, {result['batches']} batches of a rank, medians of "
        f"{result['turns']} turns."
    )
    header = [
        "graph",
        "epochs",
        "median error",
        "largest error",
        "median error, bytes",
        "best",
        "largest loss",
        "static cache",
    ]
    plot(rows)
    picture = "![Measured over predicted seconds of an epoch](plan.svg)"
    return joined(title, picture, table(header, lines), source(result))


def draw_settings(result: Row) -> str:
    """Draws predicted and measured seconds of all settings."""
    lines = []
    for each in settings(result["rows"]):
        first, cells = each[0], []
        for way in _WAYS:
            row = next((row for row in each if row["way"] == way), None)
            if row is None:
                cells.append("–")
                continue
            text = f"{row['predicted']:.2f} · {row['seconds']['median']:.2f}"
            cells.append(f"**{text}**" if row["chosen"] else text)
        rate = f"{first['megabytes_per_second']:g}"
        lines.append([first["graph"], str(first["hosts"]), rate, f"{first['alpha']:g}", *cells])
    title = (
        "**All settings.** Seconds of an epoch: predicted · measured. The chosen combination stands between asterisks."
    )
    header = ["graph", "hosts", "MB/s", "budget, α", "static cache", "lookahead", "static cache and sums"]
    return joined(as_file("plan", title, header, lines), source(result))


def plot(rows: list[Row]) -> None:
    """Draws docs/results/plan.svg: measured over predicted seconds, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "salientpp"  # the same data give the same file
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(5, 4.6))
    for hosts in dict.fromkeys(row["hosts"] for row in rows):
        points = [row for row in rows if row["hosts"] == hosts]
        axis.plot(
            [row["predicted"] for row in points],
            [row["seconds"]["median"] for row in points],
            "o",
            markersize=3,
            label=f"{hosts} hosts",
        )
    ends = [min(row["predicted"] for row in rows) / 1.2, max(row["predicted"] for row in rows) * 1.2]
    axis.plot(ends, ends, color="grey", linewidth=1)
    axis.fill_between(
        ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="grey", alpha=0.2, label="15 %"
    )
    axis.set(xscale="log", yscale="log", xlabel="predicted seconds of an epoch", ylabel="measured seconds")
    marks = [mark for mark in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if ends[0] <= mark <= ends[1]]
    for one in (axis.xaxis, axis.yaxis):  # the labels of all minor ticks would overlap
        one.set_major_locator(ticker.FixedLocator(marks))
        one.set_major_formatter(ticker.FormatStrFormatter("%g"))
        one.set_minor_formatter(ticker.NullFormatter())
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results" / "plan.svg", metadata={"Date": None})
    pyplot.close(figure)


DRAWN: Drawn = {"plan_accuracy": ("plan", draw_accuracy), "plan_settings": ("plan", draw_settings)}
