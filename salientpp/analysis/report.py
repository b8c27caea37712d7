"""Shows an analysis: tables, advice in words, and a plot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from salientpp.analysis.advice import format_bytes
from salientpp.analysis.caches import CACHE, ORACLES
from salientpp.analysis.result import Ahead, Analysis, Summed, Volume
from salientpp.files import write_whole

#: Of which a table shows the rows; a file has those of all.
_MOST_HOSTS = 16


def shown(analysis: Analysis) -> list[RenderableType]:
    """All that is printed of an analysis."""
    widths = {type_: width for type_, width in analysis.row_bytes.items() if width or len(analysis.row_bytes) == 1}
    words = ", ".join(f"{width:,} bytes per row{f' of {type_}' if type_ else ''}" for type_, width in widths.items())
    lines: list[RenderableType] = [
        f"{sum(analysis.num_vertices.values()):,} vertices, {analysis.num_edges:,} edges, edge cut {analysis.edge_cut_fraction:.1%}, {words}"
        + (f" sent as {', '.join(analysis.send_as.values())}" if analysis.send_as else "")
    ]
    for fanouts in analysis.fanouts:
        lines.append(cache_table(analysis, fanouts))
        if analysis.of(fanouts=fanouts, way="lookahead"):
            lines.append(lookahead_table(analysis, fanouts))
        if analysis.of(fanouts=fanouts, way="sums"):
            lines.append(sums_table(analysis, fanouts))
        if analysis.device_rows:
            lines.append(device_table(analysis, fanouts))
        if analysis.copies:
            lines.append(copies_table(analysis, fanouts))
    if len(analysis.fanouts) > 1:
        lines.append(mean_table(analysis))
    return [*lines, *map(str, analysis.recommendations), *lookahead_advice(analysis), *sums_advice(analysis)]


def cache_table(analysis: Analysis, fanouts: tuple[Any, ...]) -> Table:
    """For each policy and α the share of what moves without a cache that is still fetched; for VIP the rows too."""
    cells = _caches(analysis, fanouts)
    own = cells[CACHE, "vip"]
    first = next(iter(own.values()))
    bare = ", ".join(f"{v.rows_without_cache:,.0f}{f' {v.vertex_type}' if v.vertex_type else ''}" for v in first)
    kind = "fetched" if analysis.epochs else "expected to be fetched"
    table = _table(
        f"Fanouts {list(fanouts)}: {bare} feature rows {kind} per epoch by {_machines(analysis)} without a cache; the "
        f"share {'of their bytes ' if len(first) > 1 else ''}still {kind} with one of α N / {'K' if _alone(analysis) else 'hosts'} rows per "
        f"{_machine(analysis)}, by policy",
        "policy",
        [f"α={alpha:g}" for alpha in own],
        {},
    )
    for (way, policy), by_alpha in cells.items():
        style = "dim" if policy in ORACLES else "bold" if (way, policy) == (CACHE, "vip") else ""
        table.add_row(_name(way, policy), *(f"{analysis.share(each):.3f}" for each in by_alpha.values()), style=style)
    table.add_section()
    table.add_row(f"cache per {_machine(analysis)}", *(_bytes(each[0]) for each in own.values()))
    for t, of_type in enumerate(first):
        _add_rows(table, analysis, [each[t] for each in own.values()], of_type.vertex_type)
    if analysis.epochs and not _alone(analysis):
        by_host = zip(*([sum(rows) for rows in zip(*map(analysis.by_host, each))] for each in own.values()))
        for host, rows in list(enumerate(by_host))[:_MOST_HOSTS]:
            table.add_row(f"  host {host}", *map(_short, rows))
    return table


def _caches(analysis: Analysis, fanouts: tuple[Any, ...]) -> dict[tuple[str, str], dict[float, list[Volume]]]:
    """The static caches: (way, policy) -> α -> the results of each vertex type."""
    found: dict[tuple[str, str], dict[float, list[Volume]]] = {}
    for volume in analysis.of(fanouts=fanouts):
        if volume.ahead is None and volume.summed is None:
            of_policy = found.setdefault((volume.way, volume.policy), {})
            of_policy.setdefault(volume.replication_factor, []).append(volume)
    return found


def _add_rows(table: Table, analysis: Analysis, volumes: Sequence[Volume], type_: str) -> None:
    """What VIP's caches fetch of one type of vertices."""
    name = f"vip, {type_} rows" if type_ else "vip, rows"
    if analysis.epochs:
        table.add_row(f"{name} counted", *(_short(volume.remote_rows_per_epoch) for volume in volumes))
        _add_bytes(table, analysis, volumes)
    table.add_row(f"{name} forecast", *(_short(volume.predicted_rows_per_epoch) for volume in volumes))
    if analysis.epochs:
        table.add_row("  calibrated", *(_short(volume.calibrated_rows_per_epoch) for volume in volumes))
        table.add_row("  its error, ±", *(_short(volume.calibrated_error) for volume in volumes))
    if type_:
        table.add_row("  rows cached", *(_short(volume.cached_rows) for volume in volumes))


def _add_bytes(table: Table, analysis: Analysis, volumes: Sequence[Volume]) -> None:
    if volumes[0].row_bytes:
        sent = [volume.remote_bytes_per_epoch or 0 for volume in volumes]
        table.add_row("  bytes", *map(_short, sent))
        table.add_row("  bytes a step", *(_short(each / max(1, analysis.steps_per_epoch)) for each in sent))


def _alone(analysis: Analysis) -> bool:
    """Every rank is a host and has one part."""
    return max(analysis.ranks_by_host) == 1 and len(analysis.ranks_by_host) == analysis.parts


def _machine(analysis: Analysis) -> str:
    return "machine" if _alone(analysis) else "host"


def _machines(analysis: Analysis) -> str:
    hosts, ranks = len(analysis.ranks_by_host), sum(analysis.ranks_by_host)
    if _alone(analysis):
        return f"{hosts} machines"
    per_host = "/".join(map(str, sorted(set(analysis.ranks_by_host))))
    return f"{ranks} ranks ({per_host} a host, {hosts} hosts) on {analysis.parts} parts"


def lookahead_table(analysis: Analysis, fanouts: tuple[Any, ...]) -> Table:
    """For each α what is left of the static cache's rows, if ranks know their next batches."""
    found = analysis.of(fanouts=fanouts, way="lookahead")
    figures = [volume.ahead for volume in found if volume.ahead is not None]
    asked = analysis.draws["lookahead"]
    counted = asked is not None and analysis.epochs > 0
    table = _table(
        f"Fanouts {list(fanouts)}: the share of vip's rows that is still {'fetched' if counted else 'expected to be fetched'} by machines that know their "
        f"next batches (lookahead={asked or 'auto'}), in the same memory",
        "",
        [f"α={volume.replication_factor:g}" for volume in found],
        {"known batches": [_range(each.windows) for each in figures]},
    )
    if counted:
        static = [volume.rows or 0 for volume in analysis.of(fanouts=fanouts, way=CACHE, policy="vip")]
        shares = [(volume.remote_rows_per_epoch or 0) / own if own else 1.0 for volume, own in zip(found, static)]
        table.add_row("counted", *(f"{share:.3f}" for share in shares), style="bold")
        _add_bytes(table, analysis, found)
    table.add_row("forecast", *(f"{each.predicted_share:.3f}" for each in figures))
    table.add_row("all of the future", *(f"{each.best_share:.3f}" for each in figures), style="dim")
    table.add_row("worth knowing, T*", *("–" if each.reach is None else f"{each.reach:.1f}" for each in figures))
    return table


def _range(numbers: tuple[int, ...]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)}–{max(numbers)}"


def lookahead_advice(analysis: Analysis) -> list[str]:
    """For each fanouts, whether to look ahead; or why it was not counted."""
    lines = []
    for fanouts in analysis.fanouts:
        found: list[tuple[float, Ahead]] = [
            (volume.replication_factor, volume.ahead)
            for volume in analysis.of(fanouts=fanouts)
            if volume.ahead is not None
        ]
        refused = [(alpha, each.refused) for alpha, each in found if each.refused is not None]
        lines += [f"fanouts {list(fanouts)}, α = {alpha:g}: {words}" for alpha, words in refused[:1]]
        if not found or analysis.draws["lookahead"] is not None:
            continue
        alpha, best = min(found, key=lambda each: each[1].predicted_share)
        known = max(best.windows)
        if best.predicted_share < 0.97:
            lines.append(
                f"fanouts {list(fanouts)}: lookahead='auto' is expected to fetch {best.predicted_share:.0%} of these rows at α = {alpha:g}, "
                f"with {known} {'batch' if known == 1 else 'batches'} known ahead; neighbours are drawn twice"
            )
    return lines


def _summed(analysis: Analysis, **labels: Any) -> list[tuple[Volume, Summed]]:
    return [(volume, volume.summed) for volume in analysis.of(way="sums", **labels) if volume.summed is not None]


def sums_table(analysis: Analysis, fanouts: tuple[Any, ...]) -> Table:
    """For each α what is fetched with sums in the place of rows, and what of the bytes."""
    found = _summed(analysis, fanouts=fanouts)
    return _table(
        f"Fanouts {list(fanouts)}: what is fetched per epoch with partial_aggregation, over all machines, with the policy vip",
        "",
        [f"α={volume.replication_factor:g}" for volume, _ in found],
        {
            "rows": [_short(volume.remote_rows_per_epoch) for volume, _ in found],
            "sums in the place of rows": [_short(each.sums_per_epoch) for _, each in found],
            "rows in these sums": [_short(each.sources_per_epoch) for _, each in found],
            "bytes, of those without": [f"{each.share:.3f}" for _, each in found],
            "machines that ask with 'auto'": [f"{sum(each.auto)} of {analysis.parts}" for _, each in found],
        },
    )


def copies_table(analysis: Analysis, fanouts: tuple[Any, ...]) -> Table:
    """For each β that was counted what is copied to devices with sums in the place of rows."""
    found = [copies for copies in analysis.copies if copies.fanouts == fanouts]
    return _table(
        f"Fanouts {list(fanouts)}: what hosts copy to devices of their own parts' rows per epoch with partial_aggregation, over all machines, if the first β "
        "of each part are kept in GPU memory",
        "",
        [f"β={copies.device_fraction:g}" for copies in found],
        {
            "rows without": [_short(copies.rows_without) for copies in found],
            "rows": [_short(copies.rows_per_epoch) for copies in found],
            "sums in the place of rows": [_short(copies.sums_per_epoch) for copies in found],
            "rows and sums, of rows without": [f"{copies.share:.3f}" for copies in found],
        },
    )


def sums_advice(analysis: Analysis) -> list[str]:
    """For each fanouts and α at which it is worth it, what partial aggregation leaves."""
    return [
        f"fanouts {list(volume.fanouts)}, α = {volume.replication_factor:g}: partial_aggregation leaves {each.share:.0%} of the bytes; the model's first "
        "layer must be one that salientpp.nn.merge_partial takes"
        for volume, each in _summed(analysis)
        if any(each.auto)
    ]


def mean_table(analysis: Analysis) -> Table:
    """Geometric means over fanouts of the share of rows left; shares below 0.001 count as 0.001."""
    shares: dict[str, dict[float, list[float]]] = {}
    for fanouts in analysis.fanouts:
        for (way, policy), by_alpha in _caches(analysis, fanouts).items():
            for alpha, volumes in by_alpha.items():
                # A cache that leaves nothing for one of the fanouts would make the mean zero.
                of_policy = shares.setdefault(_name(way, policy), {}).setdefault(alpha, [])
                of_policy.append(max(analysis.share(volumes), 1e-3))
    return _table(
        "Share of the rows still fetched with a cache, geometric mean over fanouts",
        "policy",
        [f"α={alpha:g}" for alpha in next(iter(shares.values()))],
        {name: [f"{geometric_mean(each):.3f}" for each in of.values()] for name, of in shares.items()},
    )


def device_table(analysis: Analysis, fanouts: tuple[Any, ...]) -> Table:
    """Expected host-to-device rows over β."""
    return _table(
        f"Fanouts {list(fanouts)}: rows of its own part that a batch copies from host to device, expected, if the first β of "
        "the part are kept in GPU memory",
        "β",
        ["GPU memory", "VIP order", "original order"],
        {
            f"{row.device_fraction:g}": [
                format_bytes(row.device_bytes) if analysis.row_bytes[""] else "–",
                _short(row.rows_per_batch_vip_order),
                _short(row.rows_per_batch_original_order),
            ]
            for row in analysis.device_rows
            if row.fanouts == fanouts
        },
    )


def _name(way: str, policy: str) -> str:
    return policy if way == CACHE else f"{policy}, {way}s"


def _table(title: str, first: str, columns: list[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _short(number: float | None) -> str:
    """At most five characters and three digits: 53.4k."""
    if number is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if number < 99.95 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def _bytes(volume: Volume) -> str:
    """Memory of a cache; nothing is known without features."""
    return format_bytes(volume.cache_bytes) if volume.row_bytes else "–"


def check_matplotlib() -> None:
    """Raise ImportError, with what to do, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"a plot needs matplotlib, which could not be imported ({error}): pip install 'salientpp[plot]'"
        ) from None


def plot(analysis: Analysis, path: Path) -> None:
    """Rows per epoch over α on a log scale, one panel per fanouts, the room between no cache and the oracle shaded.

    Like Figure 2 of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152).

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = analysis.fanouts
    figure = Figure(figsize=(1 + 4.2 * len(panels), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, fanouts in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        found = analysis.of(fanouts=fanouts, way=CACHE)
        bare = found[0].rows_without_cache
        lines: dict[str, list[Volume]] = {}
        for volume in found:
            if volume.rows:
                lines.setdefault(volume.policy, []).append(volume)
        floor = lines.get("oracle") or lines["vip"]
        axes.fill_between([v.replication_factor for v in floor], [v.rows for v in floor], bare, color="0.92", lw=0)
        axes.axhline(bare, color="0.4", lw=1, ls=":", label="no cache")
        for policy, volumes in lines.items():
            style = (
                {"color": "black", "ls": "--", "lw": 1} if policy in ORACLES else {"marker": "o", "ms": 3, "lw": 1.4}
            )
            if policy == "vip":
                style |= {"lw": 2.4, "zorder": 5}
            if policy == "oracle-heldout":
                style["ls"] = "-."
            axes.plot([v.replication_factor for v in volumes], [v.rows for v in volumes], label=policy, **style)
        axes.set(title=f"fanouts {list(fanouts)}", xlabel="replication factor α", yscale="log")
        axes.grid(True, which="both", lw=0.3)
    figure.axes[0].set_ylabel("feature rows fetched per epoch")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    name = analysis.dataset.encode(errors="replace").decode()  # the name of a file need not be text
    figure.suptitle(f"{name}, {analysis.parts} parts, batch size {analysis.batch_size}", parse_math=False)
    picture = io.BytesIO()  # whole, since a pipe lets nobody go back
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    write_whole(path, lambda file: file.write(picture.getbuffer()))
