"""Shows an analysis: tables, remarks, and a plot."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from salientpp.analysis.caches import CACHE
from salientpp.analysis.result import Analysis, Volume
from salientpp.analysis.verdict import static_caches, verdict
from salientpp.display import format_bytes
from salientpp.tables import simple_table

#: A line of a table: its name, and a function that returns the cell of each column: a text, a number, or None if it is not known.
Line = tuple[str, Any]

#: Largest number of hosts that a table shows; a file has all of them.
_MOST_HOSTS = 16


def shown(analysis: Analysis, details: bool = False, hint: str = "", command: str = "") -> list[RenderableType]:
    """Returns what is printed of an analysis: a verdict, the policies, and what the user asked to be counted; with ``details`` everything.

    ``hint`` says how to get the details. It is printed if they are left out. ``command`` is a ``salientpp plan``
    command for the same graph and batches. It becomes the last line, unless it is empty or the graph has no features.
    """
    lines: list[RenderableType] = [*verdict(analysis)]
    for numbers in analysis.num_neighbors:
        tables = [cache_table(analysis, numbers, details)]
        if details or analysis.draws["lookahead"] is not None:
            tables.append(lookahead_table(analysis, numbers))
        tables.append(sums_table(analysis, numbers))
        tables += [device_table(analysis, numbers)] if details else []
        tables.append(copies_table(analysis, numbers))
        lines += [table for table in tables if table.row_count]
    if len(analysis.num_neighbors) > 1:
        lines.append(mean_table(analysis))
    if hint and not details:
        lines.append(hint)
    lines += remarks(analysis, details)
    # A command is one line, however narrow the terminal is, so that it can be copied.
    return [*lines, Text(f"  {command}", no_wrap=True)] if command and analysis.has_features else lines


def cache_table(analysis: Analysis, numbers: tuple[Any, ...], details: bool) -> Table:
    """Returns a table of static caches. For each policy and α, it has the fraction that is still fetched (:meth:`Analysis.share`).

    With ``details``, it also has the rows and bytes for the policy 'vip', counted and forecast.
    """
    cells, hosts, machine = static_caches(analysis, numbers), len(analysis.ranks_by_host), analysis.machine
    is_alone = machine == "machine"
    own = cells[CACHE, "vip"]
    first = next(iter(own.values()))
    bare = ", ".join(f"{v.rows_without_cache:,.0f}{f' {v.vertex_type}' if v.vertex_type else ''}" for v in first)
    kind = "fetched" if analysis.epochs else "expected to be fetched"
    per_host = "/".join(map(str, sorted(set(analysis.ranks_by_host))))
    machines = f"{sum(analysis.ranks_by_host)} ranks ({per_host} a host, {hosts} {machine}s) on {analysis.parts} parts"
    table = _table(
        f"num_neighbors {list(numbers)}: {bare} feature rows {kind} per epoch by {f'{hosts} machines' if is_alone else machines} without a cache. Below: "
        f"the share {'of their bytes ' if len(first) > 1 else ''}still {kind} with a cache of α N / {'K' if is_alone else f'{machine}s'} rows per "
        f"{machine}, by policy",
        "policy",
        [(f"α={alpha:g}", alpha) for alpha in own],
        [(_name(*key), lambda alpha, left=left: f"{analysis.share(left[alpha]):.3f}") for key, left in cells.items()],
    )
    table.add_section()
    memory = f"cache per {machine}", lambda each: format_bytes(each[0].cache_bytes) if each[0].row_bytes else None
    _add(table, own.values(), [memory])
    for t, of_type in enumerate(first if details else ()):
        name = f"vip, {of_type.vertex_type} rows" if of_type.vertex_type else "vip, rows"
        lines = [
            (f"{name} counted", attrgetter("remote_rows_per_epoch")),
            *_lines_of_bytes(analysis),
            (f"{name} forecast", attrgetter("predicted_rows_per_epoch")),
            ("  calibrated", attrgetter("calibrated_rows_per_epoch")),
            ("  standard error", attrgetter("calibrated_error")),
        ]
        lines += [("  rows cached", attrgetter("cached_rows"))] if of_type.vertex_type else []
        _add(table, [volumes[t] for volumes in own.values()], lines)
    if analysis.epochs and not is_alone:
        by_host = [[sum(rows) for rows in zip(*map(analysis.by_host, volumes))] for volumes in own.values()]
        _add(table, by_host, [(f"  host {host}", itemgetter(host)) for host in range(min(hosts, _MOST_HOSTS))])
    return table


def _lines_of_bytes(analysis: Analysis) -> list[Line]:
    def sent(steps: int, volume: Volume) -> float | None:
        counted = volume.remote_bytes_per_epoch
        return counted / steps if counted is not None and volume.row_bytes else None

    return [("  bytes", partial(sent, 1)), ("  bytes a step", partial(sent, max(1, analysis.steps_per_epoch)))]


def _of_way(analysis: Analysis, way: str, numbers: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Returns a table's columns, (heading, result) for each α. The results are of one method, ``way``, such as 'lookahead'."""
    return [(f"α={each.replication_factor:g}", each) for each in analysis.of(num_neighbors=numbers, way=way)]


def lookahead_table(analysis: Analysis, numbers: tuple[Any, ...]) -> Table:
    """Shows, for each α, the rows that ranks fetch with lookahead, divided by the rows that they fetch with the static
    VIP cache of the same α."""
    asked = analysis.draws["lookahead"]
    counted = asked is not None and analysis.epochs > 0
    vip = {each.replication_factor: each.rows for each in analysis.of(num_neighbors=numbers, way=CACHE, policy="vip")}

    def known(volume: Any) -> str:
        windows = volume.ahead.windows
        return "–".join(map(str, sorted({min(windows), max(windows)})))

    def share(volume: Any) -> str:
        static = vip[volume.replication_factor]
        return f"{volume.remote_rows_per_epoch / static if static else 1.0:.3f}"

    return _table(
        f"num_neighbors {list(numbers)}: share of vip's rows {'fetched' if counted else 'expected to be fetched'} by machines that know "
        f"their next batches (lookahead={asked or 'auto'}), with the same memory",
        "",
        _of_way(analysis, "lookahead", numbers),
        [
            ("known batches", known),
            *([("counted", share), *_lines_of_bytes(analysis)] if counted else []),
            ("forecast", lambda volume: f"{volume.ahead.predicted_share:.3f}"),
            ("all of the future", lambda volume: f"{volume.ahead.best_share:.3f}"),
            ("worth knowing, T*", lambda volume: "–" if volume.ahead.reach is None else f"{volume.ahead.reach:.1f}"),
        ],
    )


def sums_table(analysis: Analysis, numbers: tuple[Any, ...]) -> Table:
    """Shows, for each α, the rows and sums fetched with partial aggregation, and their bytes divided by the bytes
    fetched without it."""
    return _table(
        f"num_neighbors {list(numbers)}: rows and sums fetched per epoch with partial_aggregation, over all machines, with the policy vip",
        "",
        _of_way(analysis, "sums", numbers),
        [
            ("rows", attrgetter("remote_rows_per_epoch")),
            ("sums instead of rows", attrgetter("summed.sums_per_epoch")),
            ("rows in these sums", attrgetter("summed.sources_per_epoch")),
            ("share of the bytes without", lambda volume: f"{volume.summed.share:.3f}"),
            ("machines that ask with 'auto'", lambda volume: f"{sum(volume.summed.auto)} of {analysis.parts}"),
        ],
    )


def copies_table(analysis: Analysis, numbers: tuple[Any, ...]) -> Table:
    """Shows the rows and sums copied to devices with partial aggregation, for each share β of a part on the device."""
    return _table(
        f"num_neighbors {list(numbers)}: own parts' rows that hosts copy to devices per epoch with partial_aggregation, over all machines, if the "
        "first β of each part are kept in GPU memory",
        "",
        [(f"β={copies.device_fraction:g}", copies) for copies in analysis.copies if copies.num_neighbors == numbers],
        [
            ("rows without", attrgetter("rows_without")),
            ("rows", attrgetter("rows_per_epoch")),
            ("sums instead of rows", attrgetter("sums_per_epoch")),
            ("rows and sums, share of rows without", lambda copies: f"{copies.share:.3f}"),
        ],
    )


def remarks(analysis: Analysis, details: bool) -> list[str]:
    """Returns what lookahead and sums are expected to save, the reasons why lookahead was not counted, and the command that chooses sizes."""
    lines = []
    for numbers in analysis.num_neighbors:
        ahead: list[Any] = analysis.of(num_neighbors=numbers, way="lookahead")
        refused = [each for each in ahead if each.ahead.refused is not None]
        lines += [
            f"num_neighbors {list(numbers)}, α = {each.replication_factor:g}: {each.ahead.refused}"
            for each in refused[:1]
        ]
        best = min(ahead, key=lambda each: each.ahead.predicted_share, default=None)
        if details and best is not None and analysis.draws["lookahead"] is None and best.ahead.predicted_share < 0.97:
            known = max(best.ahead.windows)
            lines.append(
                f"num_neighbors {list(numbers)}: lookahead='auto' is expected to fetch {best.ahead.predicted_share:.0%} of these rows at "
                f"α = {best.replication_factor:g}, with {known} {'batch' if known == 1 else 'batches'} known ahead; neighbours are drawn twice"
            )
    lines += [
        f"num_neighbors {list(volume.num_neighbors)}, α = {volume.replication_factor:g}: partial_aggregation leaves {volume.summed.share:.0%} of the bytes; "
        "the model's first layer must be one that salientpp.nn.merge_partial takes"
        for volume in analysis.of(way="sums")
        if volume.summed is not None and any(volume.summed.auto)
    ]
    if not analysis.has_features:
        return lines  # a plan needs bytes
    return [*lines, "`salientpp plan` chooses these sizes for your memory, your machines and your network."]


def mean_table(analysis: Analysis) -> Table:
    """Shows, for each policy and α, the geometric mean over num_neighbors of :meth:`Analysis.share`.

    Shares below 0.001 count as 0.001.
    """
    tables = [static_caches(analysis, numbers) for numbers in analysis.num_neighbors]

    def mean(key: tuple[str, str], alpha: float) -> str:
        # A cache that leaves nothing for one of the num_neighbors would make the mean zero.
        return f"{geometric_mean(max(analysis.share(cells[key][alpha]), 1e-3) for cells in tables):.3f}"

    return _table(
        "Share of the rows still fetched with a cache, geometric mean over num_neighbors",
        "policy",
        [(f"α={alpha:g}", alpha) for alpha in tables[0][CACHE, "vip"]],
        [(_name(*key), partial(mean, key)) for key in tables[0]],
    )


def device_table(analysis: Analysis, numbers: tuple[Any, ...]) -> Table:
    """Shows the rows that a batch copies to the device, for each β: the share of the part that the device keeps."""
    columns = [
        ("GPU memory", lambda row: format_bytes(row.device_bytes) if analysis.row_bytes[""] else "–"),
        ("VIP order", attrgetter("rows_per_batch_vip_order")),
        ("original order", attrgetter("rows_per_batch_original_order")),
    ]
    rows = [row for row in analysis.device_rows if row.num_neighbors == numbers]
    return _table(
        f"num_neighbors {list(numbers)}: expected rows of its own part that a batch copies from host to device if the first β of "
        "the part are kept in GPU memory",
        "β",
        columns,
        [(f"{row.device_fraction:g}", lambda cell, row=row: cell(row)) for row in rows],
    )


def _name(way: str, policy: str) -> str:
    return policy if way == CACHE else f"{policy}, {way}s"


def _table(title: str, first: str, columns: Sequence[tuple[str, Any]], lines: Sequence[Line]) -> Table:
    """Makes a table. A line has a name and a function; a column has a heading and a value. Each cell is the line's function of the column's value."""
    table = simple_table(title, [first, *(heading for heading, _ in columns)], [first])
    _add(table, [each for _, each in columns], lines)
    return table


def _add(table: Table, columns: Collection[Any], lines: Sequence[Line]) -> None:
    """Adds lines to a table. A line in which every cell is None is left out."""
    for name, cell in lines:
        cells = [cell(each) for each in columns]
        style = "bold" if name in ("vip", "counted") else "dim" if name.startswith(("oracle", "all of")) else ""
        if any(each is not None for each in cells):
            table.add_row(name, *(each if isinstance(each, str) else _short(each) for each in cells), style=style)


def _short(number: float | None) -> str:
    """Formats a number with at most five characters and three digits: 53.4k."""
    if number is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if number < 99.95 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def check_matplotlib() -> None:
    """Raises ImportError with instructions unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"a plot needs matplotlib, which could not be imported ({error}): pip install 'salientpp[plot]'"
        ) from None


def check_plot(path: Path) -> None:
    """Raises ValueError unless the name ends in .png or .svg, and ImportError if matplotlib is not installed."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot must end in .png or .svg, got {path}")
    check_matplotlib()


def picture(draw: Callable[[Any], None], path: Path) -> bytes:
    """Calls ``draw`` with a figure of matplotlib. Returns the bytes of the picture, in the format of ``path``'s suffix. ImportError without matplotlib."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    return drawn.getvalue()


def draw(analysis: Analysis, figure: Any) -> None:
    """Draws rows per epoch (on a log scale) over α in a figure of matplotlib, with one panel per ``num_neighbors``.

    The area between no cache and the oracle is shaded, as in Figure 2 of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152).
    """
    dots, bound = {"marker": "o", "ms": 3, "lw": 1.4}, {"color": "black", "ls": "--", "lw": 1}
    styles: dict[str, Any] = {
        "vip": dots | {"lw": 2.4, "zorder": 5},
        "oracle": bound,
        "oracle-heldout": bound | {"ls": "-."},
    }

    def curve(volumes: list[Volume]) -> tuple[list[float], list[Any]]:
        return [volume.replication_factor for volume in volumes], [volume.rows for volume in volumes]

    panels = analysis.num_neighbors
    figure.set_size_inches(1 + 4.2 * len(panels), 4.6)
    for axes, numbers in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        found = analysis.of(num_neighbors=numbers, way=CACHE)
        bare = found[0].rows_without_cache
        lines: dict[str, list[Volume]] = {}
        for volume in found:
            if volume.rows:
                lines.setdefault(volume.policy, []).append(volume)
        axes.fill_between(*curve(lines.get("oracle") or lines["vip"]), bare, color="0.92", lw=0)
        axes.axhline(bare, color="0.4", lw=1, ls=":", label="no cache")
        for policy, volumes in lines.items():
            axes.plot(*curve(volumes), label=policy, **styles.get(policy, dots))
        axes.set(title=f"num_neighbors {list(numbers)}", xlabel="replication factor α", yscale="log")
        axes.grid(True, which="both", lw=0.3)
    figure.axes[0].set_ylabel("feature rows fetched per epoch")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    name = analysis.dataset.encode(errors="replace").decode()  # a file name need not be valid text
    figure.suptitle(f"{name}, {analysis.parts} parts, batch size {analysis.batch_size}", parse_math=False)
