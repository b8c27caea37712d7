"""Tables of docs/results/training.md: steps, epochs and memory of training on one process."""

from __future__ import annotations

from collections.abc import Callable

from .base import Drawn, Row, as_file, joined, source, table

TRIMMED = "salientpp, nn.trim"
PLAIN = {TRIMMED: "`nn.trim`", "salientpp": "salientpp", "PyG": "PyG"}

Case = tuple[str, int, int, str]


def case_of(row: Row) -> Case:
    return row["graph"], row["layers"], row["hidden"], row["model"]


def cells_of(case: Case) -> list[str]:
    graph, layers, hidden, model = case
    return [f"{graph}, {layers} × {hidden}", model]


def best_by_hand(rows: list[Row], value: Callable[[Row], float]) -> Row | None:
    """Returns the best contender that needs a rewritten model and gives the plain model's loss."""
    return min((row for row in rows if row["by_hand"] and row["loss_difference"] < 1e-4), key=value, default=None)


def draw_cases(
    result: Row,
    title: str,
    value: Callable[[Row], float],
    digits: int,
    floors: dict[Case, float] | None = None,
    file: str | None = None,
) -> str:
    """Draws a line per case: our contenders, PyG's plain model, the best model trimmed by hand, and their ratios to ours.

    With ``file`` the lines stand in a file of this name, and the page has the range of the ratios.
    """
    names = [name for name in PLAIN if any(row["contender"] == name for row in result["rows"])]
    cases: dict[Case, list[Row]] = {}
    for row in result["rows"]:
        cases.setdefault(case_of(row), []).append(row)
    lines = []
    for case, rows in cases.items():
        values = {row["contender"]: value(row) for row in rows}
        best = best_by_hand(rows, value)
        line = [*cells_of(case), *(f"{values[name]:,.{digits}f}" for name in names)]
        line.append(f"{value(best):,.{digits}f}" if best else "–")
        line.append(best["contender"].removeprefix("PyG, ") if best else "–")
        line.append(f"{values['PyG'] / values[names[0]]:.1f}×" if "PyG" in values else "–")
        line.append(f"{value(best) / values[names[0]]:.1f}×" if best else "–")
        if floors is not None:
            line.append(f"{floors[case]:,.{digits}f}" if case in floors else "")
        lines.append(line)
    header = ["case", "model", *(PLAIN[name] for name in names), "by hand", "variant by hand"]
    header += [f"PyG / {PLAIN[names[0]]}", f"by hand / {PLAIN[names[0]]}"]
    header += ["dense"] if floors is not None else []
    if file is None:
        return joined(title, table(header, lines, left=2), source(result))
    ranges = []
    for name in header[-2:]:
        ratios = [float(line[header.index(name)][:-1]) for line in lines if line[header.index(name)] != "–"]
        ranges.append(f"{name} is {min(ratios):.1f} to {max(ratios):.1f}.")
    return joined(as_file(file, " ".join([title, *ranges]), header, lines), source(result))


def draw_steps(result: Row) -> str:
    title = (
        f"**A training step.** Milliseconds for forward, backward and Adam with {result['threads']} threads. *By hand* is the fastest model trimmed by "
        "hand that gives the plain model's loss. *Dense* has the matrix products of the rows that the seeds need, without sparse operations."
    )
    floors = {case_of(row): row["step_seconds"]["median"] * 1e3 for row in result["floors"]}
    return draw_cases(result, title, lambda row: row["step_seconds"]["median"] * 1e3, 1, floors)


def draw_epochs(result: Row) -> str:
    title = (
        f"**A training epoch.** Seconds for loading with {result['workers']} workers and training: mean time per batch, times the number of batches. "
        "In large cases few batches were measured."
    )
    return draw_cases(result, title, lambda row: row["seconds_per_epoch"], 2)


def draw_memory(result: Row) -> str:
    title = "**Peak memory of a step.** MB above the memory of the process before the step. *By hand* is here the variant with the least memory."
    return draw_cases(result, title, lambda row: row["step_peak_bytes"] / 1e6, 0, file="step-memory")


def draw_losses(result: Row) -> str:
    """Draws the contenders that give another loss than the plain model, or fail."""
    wrong = [
        (row, f"loss differs by {row['loss_difference']:.3f}")
        for row in result["rows"]
        if row["loss_difference"] > 1e-4
    ]
    failed = [(row, f"`{row['error'].partition(': ')[0]}`") for row in result["left_out"]]
    lines = [[*cells_of(case_of(row)), row["contender"], what] for row, what in [*wrong, *failed]]
    title = "**Variants that fail.** Models trimmed by hand whose loss on the same batch differs from the plain model's, or that raise an error."
    if not lines:
        return "None."
    models = ", ".join(sorted({line[1] for line in lines}))
    title += f" Models: {models}."
    return joined(as_file("wrong-variants", title, ["case", "model", "variant", "result"], lines), source(result))


def draw_fixed_shapes(result: Row) -> str:
    """Draws predicted and counted sizes of batches, and what padding adds to them."""
    lines = []
    for row in result["rows"]:
        shares = [
            f"{share * row['batches']:,.{0 if share * row['batches'] >= 1 else 1}f} / {number:,}"
            for share, number in row["shares_and_counts"].values()
        ]
        lines.append([
            f"{row['graph']}, {row['fanouts']}, {row['batch_size']:,}", row["size"],
            f"{row['counted_mean']:,.0f} ± {row['counted_deviation']:,.0f}",
            f"{(row['mean_by_vip'] - row['counted_mean']) / row['counted_deviation']:+.1f}",
            f"{(row['predicted_mean'] - row['counted_mean']) / row['counted_deviation']:+.2f}",
            f"{row['predicted_deviation'] / row['counted_deviation']:.2f}", *shares, f"{row['overflows']:,}",
            *(f"{(row['padding'][pad] - 1) * 100:.0f} %" for pad in ("fixed", "bucket")),
            f"{row['shapes']['bucket']}", f"{row['seconds']:.1f}",
        ])  # fmt: skip
    header = ["graph, fanouts, batch size", "size", "counted", "error of VIP", "error of mean", "ratio of deviations"]
    header += [f"larger at {sigmas} σ" for sigmas in result["rows"][0]["shares_and_counts"]]
    header += ["overflows", "padding", "padding, bucket", "shapes, bucket", "seconds"]
    title = (
        f"**Sizes of batches.** Counted: mean and standard deviation of {result['rows'][0]['batches']:,} batches. Error of the mean: "
        "predicted less counted, in counted standard deviations. Ratio of deviations: predicted over counted. Larger at z σ: predicted and "
        "counted number of batches larger than the predicted mean plus z predicted deviations. Overflows: batches that exceed the fixed "
        "size of vertices or of edges. Padding: how much larger padded batches are on average."
    )
    shown = [
        "graph, fanouts, batch size",
        "size",
        "counted",
        "error of mean",
        "ratio of deviations",
        "larger at 3 σ",
        "overflows",
        "padding",
    ]
    places = [header.index(name) for name in shown]
    short = [[line[place] for place in places] for line in lines if line[1] == "vertices"]
    more = as_file("batch-sizes", "**All figures**, also those of edges.", header, lines)
    return joined(title, table(shown, short, left=2), more, source(result))


def draw_first_epoch(result: Row) -> str:
    """Draws README's first table: an epoch with each change of a user's script, on every graph."""
    rows = [row for row in result["rows"] if (row["model"], row["layers"]) == ("GraphSAGE", 3)]
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    seconds = {(row["contender"], row["graph"]): row["seconds_per_epoch"] for row in rows}

    def line(what: str, of: Callable[[str], float]) -> list[str]:
        return [what, *(f"{of(graph):.1f} s" for graph in graphs)]

    def by_hand(graph: str) -> float:
        best = best_by_hand([row for row in rows if row["graph"] == graph], lambda row: row["seconds_per_epoch"])
        assert best is not None
        return best["seconds_per_epoch"]

    lines = [
        line("PyG", lambda graph: seconds["PyG", graph]),
        line("PyG, model rewritten with `trim_to_layer`", lambda graph: seconds["PyG, trim_to_layer", graph]),
        line("PyG, fastest model rewritten by hand", by_hand),
        line("salientpp, import changed", lambda graph: seconds["salientpp", graph]),
        line("salientpp, import changed and `nn.trim`", lambda graph: seconds[TRIMMED, graph]),
    ]
    sizes = {row["graph"]: row["vertices"] for row in rows}
    header = [f"{graph.replace('_', ' ')}, {sizes[graph]:,} vertices" for graph in graphs]
    machine = result["machine"]
    timed = [row["batches_per_turn"] for row in rows]
    caption = (
        f"*Epochs of three GraphSAGE layers, fanouts [15, 10, 5], computed from {min(timed)} to {max(timed)} batches; "
        f"{machine['cores']} cores of {machine['cpu']}, no GPU; {result['date']}; [all models](docs/results/training.md).*"
    )
    return joined(table(["", *header], lines), caption)


DRAWN: Drawn = {
    "epoch": ("train", draw_first_epoch),
    "fixed_shapes": ("fixed_shapes", draw_fixed_shapes),
    "train_steps": ("train", draw_steps),
    "train_epochs": ("train", draw_epochs),
    "train_memory": ("train", draw_memory),
    "train_losses": ("train", draw_losses),
}
