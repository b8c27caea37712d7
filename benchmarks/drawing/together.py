"""Tables and findings of docs/results/together.md: strategies of training on hosts with several ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from .base import Drawn, Row, as_file, counted, joined, source, table

#: Strategy -> heading of its column.
_SHOWN = {
    "halo": "halo",
    "preload": "all hops",
    "preload, VIP": "1 hop, VIP",
    "preload, uniform": "1 hop, random",
    "together": "together",
    "together, trimmed": "together, trimmed",
    "private": "private",
    "private, trimmed": "private, trimmed",
}
_WHOLE = ("halo", "preload", "preload, VIP", "preload, uniform")
_TOGETHER = ("together", "together, trimmed")
_PRIVATE = ("private", "private, trimmed")

#: Number of layers from which a model counts as deep.
_DEEP = 7

#: Cells by name, and in each the rows of the strategies that ended without an error.
Cells = dict[str, dict[str, Row]]


def cells_of(result: Row) -> Cells:
    cells: Cells = {}
    for row in result["rows"]:
        if "error" not in row:
            name = f"{row['graph']}, {result['hosts']} × {row['ranks_per_host']}, {row['model']} {row['layers']}"
            cells.setdefault(name, {})[row["strategy"]] = row
    return cells


# --- tables -------------------------------------------------------------------------------------------------


def _by_strategy(result: Row, shown: Callable[[Row], str], best: str) -> str:
    """Draws a line for each cell and a column for each strategy.

    Args:
        shown: text of one strategy in one cell.
        best: name of the figure whose lowest value in a line is bold.
    """
    cells = cells_of(result)
    names = [name for name in _SHOWN if any(name in found for found in cells.values())]
    lines = []
    for cell, found in cells.items():
        lowest = min(row[best] for row in found.values())
        line = [cell]
        for name in names:
            text = shown(found[name]) if name in found else "–"
            is_best = name in found and found[name][best] == lowest
            line.append(f"**{text}**" if is_best else text)
        lines.append(line)
    header = ["graph, hosts × ranks, layers", *(_SHOWN[name] for name in names)]
    return joined(table(header, lines), source(result))


def draw_seconds(result: Row) -> str:
    title = f"**Epochs.** Median seconds of an epoch on the slowest rank, over links of {result['megabytes_per_second']:g} MB/s. The lowest of a line is bold."
    return joined(title, _by_strategy(result, lambda row: f"{row['seconds']:.3f}", best="seconds"))


#: Name of a figure -> what it is, and the divisor from the recorded unit.
_FIGURES = {
    "seconds": ("seconds of an epoch", 1),
    "bytes_between": ("MB over the network in an epoch", 1e6),
    "rows_between": ("rows from other hosts in an epoch", 1),
    "rows_inside": ("rows from ranks of the own host in an epoch", 1),
    "rows_before": ("rows from other hosts before the first epoch", 1),
    "computed": ("rows computed in an epoch", 1),
    "memory": ("MB at the peak of an epoch", 1e6),
    "seconds_to_make": ("seconds to start", 1),
    "memory_to_make": ("MB at the peak of the start", 1e6),
    "accuracy": ("test accuracy, %", 0.01),
    "largest_class": ("accuracy of the largest class, %", 0.01),
    "epochs": ("epochs until the accuracy", 1),
}


def draw_costs(result: Row) -> str:
    """Draws each strategy's figures relative to the halo's, over all settings, and writes the figures themselves to a file."""
    cells = cells_of(result)
    lines = []
    for name, heading in _SHOWN.items():
        pairs = [(found[name], found["halo"]) for found in cells.values() if name in found and "halo" in found]
        if pairs and name != "halo":
            line = [heading]
            for key in ("seconds", "bytes_between", "computed", "memory"):
                ratios = [row[key] / halo[key] for row, halo in pairs]
                line.append(f"{statistics.geometric_mean(ratios):.3g} ({min(ratios):.2g} to {max(ratios):.2g})")
            starts = [row["seconds_to_make"] for row, _ in pairs]
            points = [100 * (row["accuracy"] - halo["accuracy"]) for row, halo in pairs]
            starts_text = f"{min(starts):.1f} to {max(starts):.1f}"
            lines.append(
                [*line, starts_text, f"{statistics.median(points):+.1f} ({min(points):+.1f} to {max(points):+.1f})"]
            )
    title = (
        "**An epoch, relative to the halo.** Geometric mean over the settings (least to most): seconds, MB over the network with all headers, rows "
        "that layers compute, and peak memory of the largest rank. *Start*: seconds until the slowest rank is ready. *Accuracy* on the test vertices after "
        f"equal epochs: median difference in percentage points. An epoch is one step on the whole graph, or {counted(result['batches'], 'step')} of batches."
    )
    header = ["strategy", "seconds", "network", "rows computed", "memory", "start, s", "accuracy"]
    every = [
        [cell, _SHOWN[name], *(f"{found[name][key] / divisor:.6g}" for key, (_, divisor) in _FIGURES.items())]
        for cell, found in cells.items()
        for name in _SHOWN
        if name in found
    ]
    columns = ["setting", "strategy", *(words for words, _ in _FIGURES.values())]
    note = "**Every setting.** Rows that ranks of a host read in shared caches and parts are not counted."
    return joined(title, table(header, lines), as_file("together", note, columns, every), source(result))


def draw_rankings(result: Row) -> str:
    """Draws VIP against random ranking, where both preload about as many rows."""
    lines = []
    for cell, vip, uniform in _pairs(result):
        figures = [_figures(row) for row in (vip, uniform)]
        lines.append([cell, *(" · ".join(both) for both in zip(*figures))])
    title = (
        "**Rankings.** Preloading of one hop, where a vertex keeps the neighbours with the highest VIP · random ones. VIP had the fanout 15, or 2 where it is "
        "low, and random ranking the fanout that preloaded the most similar number of rows. Both rankings were measured before the one by VIP was dropped, and "
        "`benchmarks/strategies.py` now has only random picks with fanouts 15 and 2. *Gradient error*: norm of the difference from the exact "
        "gradient in the first step, divided by the norm of the exact gradient."
    )
    header = ["graph, hosts × ranks, layers", "rows preloaded", "gradient error", "seconds", "accuracy, %"]
    return joined(as_file("together-rankings", title, header, lines), source(result))


def _figures(row: Row) -> list[str]:
    return [
        f"{row['rows_before']:,}",
        f"{row['gradient_error']:.2%}",
        f"{row['seconds']:.3f}",
        f"{row['accuracy']:.1%}"[:-1],
    ]


def _pairs(result: Row) -> list[tuple[str, Row, Row]]:
    """Returns (name, VIP, random) of each comparison of rankings."""
    return [
        (f"{cell}{', low fanout' if few else ''}", found[f"preload, VIP{few}"], found[f"preload, uniform{few}"])
        for cell, found in cells_of(result).items()
        for few in ("", ", few")
        if "halo" in found and f"preload, VIP{few}" in found and f"preload, uniform{few}" in found
    ]


# --- findings -----------------------------------------------------------------------------------------------


def draw_findings(result: Row) -> str:
    cells = cells_of(result)
    found = [
        *_of_batches(cells),
        *_of_preloading(cells),
        *_of_rankings(result),
        *_of_accuracy(cells),
        *_of_losers(cells),
    ]
    return "\n".join(f"* {line}" for line in [*found, *_of_errors(result)])


def _fastest(found: dict[str, Row], names: tuple[str, ...]) -> Row | None:
    there = [found[name] for name in names if name in found]
    return min(there, key=lambda row: row["seconds"]) if there else None


def _compared(cells: Cells) -> list[tuple[str, Row, Row]]:
    """Returns (cell, cooperative, private), of each the faster of the plain and the trimmed model."""
    found = []
    for name, of_cell in cells.items():
        together, private = _fastest(of_cell, _TOGETHER), _fastest(of_cell, _PRIVATE)
        if together and private:
            found.append((name, together, private))
    return found


def _of_batches(cells: Cells) -> list[str]:
    compared = _compared(cells)
    lines = []
    for is_deep, kind in ((True, f"{_DEEP} layers or more"), (False, f"fewer than {_DEEP} layers")):
        ratios = [
            private["seconds"] / together["seconds"]
            for _, together, private in compared
            if (together["layers"] >= _DEEP) == is_deep
        ]
        if ratios:
            lines.append(
                f"**Cooperative or private batches, {kind}.** Cooperative batches have the faster epochs in {_won(ratios)}. They are {_times(ratios)} "
                "times as fast."
            )
    return lines


def draw_batches(result: Row) -> str:
    """Draws cooperative against private batches."""
    lines = []
    for name, together, private in _compared(cells_of(result)):
        ratio = private["seconds"] / together["seconds"]
        shares = [_share(together[key], private[key]) for key in ("computed", "rows_between", "memory")]
        text = f"{ratio:.2f}"
        lines.append([name, f"**{text}**" if ratio > 1 else text, *(f"{share:.0%}" for share in shares)])
    title = (
        "**Cooperative batches compared with private ones**, the faster model of each. *Speed*: seconds of private batches, divided by seconds of cooperative "
        "ones; bold where cooperative batches win. The other columns divide figures of cooperative batches by those of private ones."
    )
    header = ["graph, hosts × ranks, layers", "speed", "rows computed", "rows over the network", "memory of a rank"]
    return joined(title, table(header, lines), source(result))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _won(ratios: list[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {counted(len(ratios), 'setting')}"


def _times(values: list[float], form: str = ".2f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _of_preloading(cells: Cells) -> list[str]:
    both = [found for found in cells.values() if "halo" in found and "preload" in found]
    if not both:
        return []

    def ratios(one: str, other: str, key: str, of: list[dict[str, Row]]) -> list[float]:
        return [found[one][key] / found[other][key] for found in of]

    faster = ratios("halo", "preload", "seconds", both)
    lines = [
        f"**All hops or halo.** Epochs with all hops preloaded are faster than with a halo in {_won(faster)}, {_times(faster)} times as fast. They compute "
        f"{_times(ratios('preload', 'halo', 'computed', both))} times the rows, and take {_times(ratios('preload', 'halo', 'memory', both))} times the memory."
    ]
    one = [found for found in both if "preload, VIP" in found]
    if one:
        errors = [found["preload, VIP"]["gradient_error"] for found in one]
        change = [100 * (found["preload, VIP"]["accuracy"] - found["preload"]["accuracy"]) for found in one]
        lines.append(
            f"**One hop.** Epochs with one hop by VIP are {_times(ratios('preload', 'preload, VIP', 'seconds', one))} times as fast as with all hops, and "
            f"{_times(ratios('halo', 'preload, VIP', 'seconds', one))} times as fast as with a halo. The first gradient is {_times(errors, '.2%')} off. The "
            f"accuracy changes by {_times(change, '+.1f')} points."
        )
    return lines


def _of_rankings(result: Row) -> list[str]:
    pairs = _pairs(result)
    if not pairs:
        return []
    errors = [vip["gradient_error"] / uniform["gradient_error"] for _, vip, uniform in pairs]
    better = sum(error < 1 for error in errors)
    mean = math.exp(sum(map(math.log, errors)) / len(errors))
    rows = [vip["rows_before"] / uniform["rows_before"] for _, vip, uniform in pairs]
    change = [100 * (vip["accuracy"] - uniform["accuracy"]) for _, vip, uniform in pairs]
    return [
        f"**VIP or random ranking.** The gradient error of VIP is the lower one in {better} of {counted(len(pairs), 'comparison')}. It is {mean:.2f} times the "
        f"other one in the geometric mean. VIP preloads {_times(rows)} times as many rows. The accuracy of VIP is {_times(change, '+.1f')} points from that "
        "of random ranking."
    ]


def _of_accuracy(cells: Cells) -> list[str]:
    ahead = []
    for found in cells.values():
        batches = [found[name]["accuracy"] for name in (*_TOGETHER, *_PRIVATE) if name in found]
        whole = [found[name]["accuracy"] for name in _WHOLE if name in found]
        if batches and whole:
            ahead.append(max(batches) > max(whole))
    if not ahead:
        return []
    return [
        f"**Accuracy after equal epochs.** The best strategy with batches is ahead of the best one with the whole graph in {sum(ahead)} of "
        f"{counted(len(ahead), 'setting')}. Batches make several steps in an epoch, the whole graph makes one."
    ]


def _of_losers(cells: Cells) -> list[str]:
    best = {min(found, key=lambda name: found[name]["seconds"]) for found in cells.values()}
    measured = {name for found in cells.values() for name in found}
    never = [f"*{_SHOWN[name]}*" for name in _SHOWN if name in measured - best]
    return [f"**Never the fastest epoch:** {', '.join(never)}."] if never else []


def _of_errors(result: Row) -> list[str]:
    skipped = [f"*{_SHOWN[name]}*" for name in result["skipped"] if name in _SHOWN]
    failed = [
        f"{row['graph']}, {result['hosts']} × {row['ranks_per_host']}, {row['model']} {row['layers']}, *{_SHOWN.get(row['strategy'], row['strategy'])}*"
        for row in result["rows"]
        if "error" in row
    ]
    lines = [f"**Not measured:** {', '.join(skipped)}."] if skipped else []
    return lines + ([f"**Failed:** {'; '.join(failed)}."] if failed else [])


DRAWN: Drawn = {
    "together_findings": ("together", draw_findings),
    "together_batches": ("together", draw_batches),
    "together_seconds": ("together", draw_seconds),
    "together_costs": ("together", draw_costs),
    "together_rankings": ("together", draw_rankings),
}
