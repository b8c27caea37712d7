"""How is an analysis shown: a table, a CSV file, a picture?"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from rich import box
from rich.table import Table

from salientpp.analysis.advice import format_bytes
from salientpp.analysis.host_volume import HostAnalysis
from salientpp.analysis.volume import ORACLES, Analysis, Volume
from salientpp.files import write_whole

#: Of which a table shows the rows; a file has those of all.
_MOST_HOSTS = 16


def volume_table(analysis: Analysis, fanouts: tuple[int, ...]) -> Table:
    """For each policy and α the share of the rows without a cache that is still fetched; for VIP the rows too."""
    volumes = [volume for volume in analysis.results if volume.fanouts == fanouts]
    bare = analysis.rows_without_cache[",".join(map(str, fanouts))]
    kind = "fetched" if analysis.epochs else "expected to be fetched"
    alphas = sorted({volume.replication_factor for volume in volumes})
    table = _table(
        f"Fanouts {list(fanouts)}: {bare:,.0f} feature rows {kind} per epoch by {analysis.parts} machines without a cache; "
        f"the share still {kind} with one of α N / K rows per machine, by policy",
        "policy",
        [f"α={alpha:g}" for alpha in alphas],
    )
    for policy in dict.fromkeys(volume.policy for volume in volumes):
        shares = [f"{1 - volume.reduction:.3f}" for volume in volumes if volume.policy == policy]
        table.add_row(policy, *shares, style="dim" if policy in ORACLES else "bold" if policy == "vip" else "")
    own = {volume.replication_factor: volume for volume in volumes if volume.policy == "vip"}
    table.add_section()
    table.add_row("cache per machine", *(_bytes(own[alpha].cache_bytes, analysis) for alpha in alphas))
    if analysis.epochs:
        table.add_row("vip, rows counted", *(_short(own[alpha].remote_rows_per_epoch) for alpha in alphas))
        if analysis.row_bytes:
            sent = [own[alpha].remote_bytes_per_epoch or 0 for alpha in alphas]
            table.add_row("  bytes", *map(_short, sent))
            table.add_row("  bytes a step", *(_short(each / max(1, analysis.steps_per_epoch)) for each in sent))
    table.add_row("vip, rows forecast", *(_short(own[alpha].predicted_rows_per_epoch) for alpha in alphas))
    if analysis.epochs:
        table.add_row("  calibrated", *(_short(own[alpha].calibrated_rows_per_epoch) for alpha in alphas))
        table.add_row("  its error, ±", *(_short(own[alpha].calibrated_error) for alpha in alphas))
    return table


def lookahead_table(analysis: Analysis, fanouts: tuple[int, ...]) -> Table:
    """For each α what is left of the static cache's rows, if ranks know their next batches."""
    found = [volume for volume in analysis.lookahead if volume.fanouts == fanouts]
    counted = analysis.draws.lookahead is not None and analysis.epochs > 0
    static = {v.replication_factor: v for v in analysis.results if v.fanouts == fanouts and v.policy == "vip"}
    table = _table(
        f"Fanouts {list(fanouts)}: the share of vip's rows that is still {'fetched' if counted else 'expected to be fetched'} by machines that know their "
        f"next batches (lookahead={analysis.draws.lookahead or 'auto'}), in the same memory",
        "",
        [f"α={volume.replication_factor:g}" for volume in found],
    )
    table.add_row("known batches", *(_range(volume.windows) for volume in found))
    if counted:
        rows = [static[volume.replication_factor].rows or 0 for volume in found]
        shares = [(volume.remote_rows_per_epoch or 0) / own if own else 1.0 for volume, own in zip(found, rows)]
        table.add_row("counted", *(f"{share:.3f}" for share in shares), style="bold")
        if analysis.row_bytes:
            sent = [volume.remote_bytes_per_epoch or 0 for volume in found]
            table.add_row("  bytes", *map(_short, sent))
            table.add_row("  bytes a step", *(_short(each / max(1, analysis.steps_per_epoch)) for each in sent))
    table.add_row("forecast", *(f"{volume.predicted_share:.3f}" for volume in found))
    table.add_row("all of the future", *(f"{volume.best_share:.3f}" for volume in found), style="dim")
    table.add_row("worth knowing, T*", *("–" if math.isinf(v.reach) else f"{v.reach:.1f}" for v in found))
    return table


def _range(numbers: tuple[int, ...]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)}–{max(numbers)}"


def lookahead_advice(analysis: Analysis) -> list[str]:
    """For each fanouts, whether to look ahead; or why it was not counted."""
    lines = []
    for fanouts in dict.fromkeys(volume.fanouts for volume in analysis.lookahead):
        found = [volume for volume in analysis.lookahead if volume.fanouts == fanouts]
        refused = next((volume for volume in found if volume.refused is not None), None)
        if refused is not None:
            lines.append(f"fanouts {list(fanouts)}, α = {refused.replication_factor:g}: {refused.refused}")
        best = min(found, key=lambda volume: volume.predicted_share)
        if best.predicted_share < 0.97 and analysis.draws.lookahead is None:
            known = max(best.windows)
            lines.append(
                f"fanouts {list(fanouts)}: lookahead='auto' is expected to fetch {best.predicted_share:.0%} of these rows at α = {best.replication_factor:g}, "
                f"with {known} {'batch' if known == 1 else 'batches'} known ahead; neighbours are drawn twice"
            )
    return lines


def partial_table(analysis: Analysis, fanouts: tuple[int, ...]) -> Table:
    """For each α what is fetched with sums in the place of rows, and what of the bytes."""
    found = [volume for volume in analysis.partial if volume.fanouts == fanouts]
    table = _table(
        f"Fanouts {list(fanouts)}: what is fetched per epoch with partial_aggregation, over all machines, with the policy vip",
        "",
        [f"α={volume.replication_factor:g}" for volume in found],
    )
    table.add_row("rows", *(_short(volume.rows_per_epoch) for volume in found))
    table.add_row("sums in the place of rows", *(_short(volume.sums_per_epoch) for volume in found))
    table.add_row("rows in these sums", *(_short(volume.sources_per_epoch) for volume in found))
    table.add_row("bytes, of those without", *(f"{volume.share:.3f}" for volume in found), style="bold")
    parts = [sum(volume.auto) for volume in found]
    table.add_row("machines that ask with 'auto'", *(f"{number} of {analysis.parts}" for number in parts))
    return table


def partial_copies_table(analysis: Analysis, fanouts: tuple[int, ...]) -> Table:
    """For each β that was counted what is copied to devices with sums in the place of rows."""
    found = [copies for copies in analysis.partial_copies if copies.fanouts == fanouts]
    table = _table(
        f"Fanouts {list(fanouts)}: what hosts copy to devices of their own parts' rows per epoch with partial_aggregation, over all machines, if the first β "
        "of each part are kept in GPU memory",
        "",
        [f"β={copies.gpu_fraction:g}" for copies in found],
    )
    table.add_row("rows without", *(_short(copies.rows_without) for copies in found))
    table.add_row("rows", *(_short(copies.rows_per_epoch) for copies in found))
    table.add_row("sums in the place of rows", *(_short(copies.sums_per_epoch) for copies in found))
    table.add_row("rows and sums, of rows without", *(f"{copies.share:.3f}" for copies in found), style="bold")
    return table


def partial_advice(analysis: Analysis) -> list[str]:
    """For each fanouts and α at which it is worth it, what partial aggregation leaves."""
    return [
        f"fanouts {list(volume.fanouts)}, α = {volume.replication_factor:g}: partial_aggregation leaves {volume.share:.0%} of the bytes; the model's first "
        "layer must be one that salientpp.nn.merge_partial takes"
        for volume in analysis.partial
        if any(volume.auto)
    ]


def host_table(analysis: HostAnalysis) -> Table:
    """Rows from other hosts for each α and way to keep them, and of the last way by host."""
    kind = "fetched" if analysis.epochs else "expected to be fetched"
    hosts, ranks = len(analysis.ranks_by_host), sum(analysis.ranks_by_host)
    per_host = "/".join(map(str, sorted(set(analysis.ranks_by_host))))
    table = _table(
        f"Fanouts {list(analysis.fanouts)}: feature rows {kind} from other hosts per epoch, by {ranks} ranks ({per_host} a host, {hosts} hosts) on "
        f"{analysis.parts} parts, with α N / hosts cached rows on a host: in "
        "a private cache for each rank, in one for the host, and in one with each row fetched once a step",
        "",
        [f"α={result.replication_factor:g}" for result in analysis.results],
    )
    ways = ["private caches", "one per host", "fetched once"]
    for way, rows in zip(ways, zip(*(result.rows for result in analysis.results))):
        table.add_row(way, *map(_short, rows), style="bold" if way is ways[-1] else "")
    table.add_section()
    table.add_row("cache per host", *(_bytes(result.cache_bytes, analysis) for result in analysis.results))
    if analysis.epochs:
        forecast = [result.predicted_fetched_once_rows for result in analysis.results]
        table.add_row("  forecast", *map(_short, forecast))
        by_host = zip(*(result.by_host(analysis.ranks_by_host) for result in analysis.results))
        for host, rows in list(enumerate(by_host))[:_MOST_HOSTS]:
            table.add_row(f"  host {host}", *map(_short, rows))
    return table


def mean_table(analysis: Analysis) -> Table:
    """Geometric means over fanouts of the share of rows left."""
    means = analysis.geometric_means()
    alphas = sorted({alpha for _, alpha in means})
    table = _table(
        "Share of the rows still fetched with a cache, geometric mean over fanouts",
        "policy",
        [f"α={alpha:g}" for alpha in alphas],
    )
    for policy in dict.fromkeys(policy for policy, _ in means):
        table.add_row(policy, *(f"{means[policy, alpha]:.3f}" for alpha in alphas))
    return table


def device_table(analysis: Analysis, fanouts: tuple[int, ...]) -> Table:
    """Expected host-to-device rows over β."""
    rows = [row for row in analysis.device_rows if row.fanouts == fanouts]
    table = _table(
        f"Fanouts {list(fanouts)}: rows of its own part that a batch copies from host to device, expected, if the first β of "
        "the part are kept in GPU memory",
        "β",
        ["GPU memory", "VIP order", "original order"],
    )
    for row in rows:
        table.add_row(
            f"{row.gpu_fraction:g}",
            _bytes(row.gpu_bytes, analysis),
            _short(row.rows_per_batch_vip_order),
            _short(row.rows_per_batch_original_order),
        )
    return table


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _short(number: float | None) -> str:
    """At most five characters and three digits: 53.4k."""
    if number is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if number < 99.95 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def _bytes(number: int, analysis: Analysis | HostAnalysis) -> str:
    """Memory for so many bytes of rows; nothing is known without features."""
    return format_bytes(number) if analysis.row_bytes else "–"


def csv_text(analysis: Analysis) -> str:
    """One line per fanouts, policy and α; the columns are :class:`~salientpp.analysis.volume.Volume`'s."""
    out = io.StringIO()
    results = analysis.to_dict()["results"]
    columns = [name for name in results[0] if name != "remote_rows_per_part"]
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for result in results:
        writer.writerow({**result, "fanouts": " ".join(map(str, result["fanouts"]))})
    return out.getvalue()


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

    panels = list(dict.fromkeys(volume.fanouts for volume in analysis.results))
    figure = Figure(figsize=(1 + 4.2 * len(panels), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, fanouts in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        bare = analysis.rows_without_cache[",".join(map(str, fanouts))]
        lines: dict[str, list[Volume]] = {}
        for volume in analysis.results:
            if volume.fanouts == fanouts and volume.rows:
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
