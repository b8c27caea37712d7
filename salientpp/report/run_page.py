"""Makes the report of a run: its numbers, a verdict, and the page that shows them.

The page is drawn from the same numbers that ``--json`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from salientpp.display import Table, format_bytes
from salientpp.report.causes import FEW, verdict_of
from salientpp.report.finding import seconds
from salientpp.report.page import (
    Chart,
    choice,
    colour_by,
    details,
    memory_chart,
    page,
    paragraph,
    section,
    stacked_bars,
    table,
    tips,
)
from salientpp.report.parts import PART_COLOURS, PARTS, Job, Rank
from salientpp.report.read import Log, Run
from salientpp.report.sums import mean_of, words_of_epochs
from salientpp.report.timeline import COLOURS, timeline_of

#: Tiers that hold a row, the nearest first, and their colours.
TIERS = {"device": "#3aa6a6", "host": "#4c78a8", "cache": "#c7a500", "remote": "#d1495b"}
#: Most ranks whose timelines are shown at first, and most spans of the table below the timeline.
MOST_RANKS, MOST_LINES = 8, 1000


def numbers_of(run: Run, epoch: int | None = None, batches: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns everything that a report shows, as JSON values.

    Args:
        epoch: number of the epoch to explain. None: the last that all ranks have finished; if it is short, the mean of such epochs.
        batches: first and last batch of the timeline. None: as many batches around the median batch as a page can hold.

    Raises:
        ValueError: no rank has this epoch, or no rank has these batches.
    """
    number, logs = run.of_epoch(epoch)
    most = max(log.epochs[number].numbers.get("batches", 0) for log in logs)
    pooled = run.like(number) if epoch is None and most < FEW else [number]
    ranks = [
        Rank(log.rank, mean_of([log.epochs[each].numbers for each in pooled]), log.about, log.host) for log in logs
    ]
    job = Job.of(ranks)
    verdict = verdict_of(job, len(pooled))
    notes = [*run.notes, *_notes(run, number, logs)]
    if len(pooled) > 1:
        notes.append(
            f"An epoch has few batches, so numbers are means over epochs {words_of_epochs(pooled)}. The timeline shows epoch {number}."
        )
    return {
        "schema": 1,
        "folder": str(run.folder),
        "loader": run.loader,
        "epoch": number,
        "pooled": pooled,
        "seconds": job.seconds,
        "verdict": {"sentences": [*verdict.sentences], "findings": [vars(finding) for finding in verdict.findings]},
        "ranks": [
            {
                "rank": log.rank,
                "host": log.host,
                "file": log.path.name,
                "epochs": len(log.epochs),
                "batches": rank.batches,
                "seconds": rank.of("seconds"),
                "parts": dict(parts),
                "numbers": dict(rank.numbers),
                "about": dict(log.about),
            }
            for log, rank, parts in zip(logs, ranks, job.parts)
        ],
        "links": [[source, to, speed] for (source, to), speed in sorted(job.links.items())],
        "epochs": [
            {
                "epoch": each,
                "rank": log.rank,
                "seconds": numbers.numbers.get("seconds", 0.0),
                "is_whole": numbers.is_whole,
            }
            | {tier: numbers.numbers.get(f"rows.{tier}", 0) for tier in TIERS}
            for log in run.logs
            for each, numbers in sorted(log.epochs.items())
        ],
        "timeline": timeline_of(logs, number, batches),
        "notes": notes,
    }


def _notes(run: Run, number: int, logs: Sequence[Log]) -> Iterator[str]:
    """Yields sentences about what the records of an epoch lack, such as a rank that did not finish it."""
    epochs = {log.rank: log.epochs[number] for log in logs}
    if unfinished := [rank for rank, epoch in epochs.items() if not epoch.is_whole]:
        every = max(epochs[rank].every for rank in unfinished)
        thinned = f" About one batch in {every} was recorded, and counts as {every}." if every > 1 else ""
        yield f"Epoch {number} was not finished on rank {_listed(unfinished)}: its numbers are sums of its spans.{thinned}"
    if early := [rank for rank, epoch in epochs.items() if epoch.is_left_early]:
        yield f"Epoch {number} was left before its last batch on rank {_listed(early)}."
    others = {each for log in run.logs for each, epoch in log.epochs.items() if epoch.is_left_early and each != number}
    if others and not early:
        yield f"Epochs that were left early are not explained: {_listed(sorted(others))}."
    if without := [log.rank for log in run.logs if number not in log.epochs]:
        yield f"Rank {_listed(without)} has no records of epoch {number}."
    if number == 0 and len(run.epochs) == 1:
        yield "This is the first epoch, in which files are read into memory and models are compiled."


def _listed(numbers: Sequence[int], most: int = 20) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _epoch(numbers: dict[str, Any]) -> str:
    """Names the epochs that a report explains."""
    pooled = numbers["pooled"]
    return f"Epoch {numbers['epoch']}" if len(pooled) == 1 else f"Mean of epochs {words_of_epochs(pooled)}"


def words(numbers: dict[str, Any]) -> list[str]:
    """Returns the answer and its reasons, as lines for a terminal."""
    verdict = numbers["verdict"]
    where = f"{_epoch(numbers)} of loader {numbers['loader']}: {_ranks(len(numbers['ranks']))}, {seconds(numbers['seconds'])}."
    others = [each for each in verdict["findings"] if each["what"] not in verdict["sentences"]]
    lines = [" ".join(verdict["sentences"]), where]
    lines += [f"Also: {each['what']} {each['change']}" for each in others[1:] if each["expected"] is not None]
    return [*lines, *(f"Note: {note}" for note in numbers["notes"])]


def run_page(numbers: dict[str, Any]) -> bytes:
    """Returns the page of a run."""
    ranks = numbers["ranks"]
    title = f"{_epoch(numbers)} of {ranks[0]['about'].get('class', 'a loader')} on {_ranks(len(ranks))}"
    named = [each["rank"] for each in numbers["verdict"]["findings"] if each["rank"] is not None]
    slowest = next(iter(named), ranks[0]["rank"])
    sections = [
        _reasons(numbers),
        section("What the epoch was made of", _bars(ranks)),
        section("When each batch was made", _timeline(numbers["timeline"], slowest)),
        section("Where rows came from", _rows(numbers), "<h3>Memory of the loader</h3>", _memory(ranks)),
        section("What was read", *_read(numbers)),
    ]
    return page(title, numbers["verdict"]["sentences"], sections)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _reasons(numbers: dict[str, Any]) -> str:
    """Returns as HTML the formula of each finding, and sentences on what the records lack."""
    lines = [
        [
            f"{each['what']} {each['change']}",
            "–" if each["expected"] is None else seconds(each["expected"]),
            each["how"],
        ]
        for each in numbers["verdict"]["findings"]
    ]
    notes = "".join(paragraph(note, "dim") for note in numbers["notes"])
    shown = table(Table(["what is slow, and what would change it", "epoch then", "computed as"], lines), texts=True)
    return notes + (details("How the gain was computed, and smaller causes", shown) if lines else "")


def _bars(ranks: Sequence[dict[str, Any]]) -> str:
    used = [part for part in PARTS if any(each["parts"][part] > 0 for each in ranks)]
    colours = {PARTS[part]: PART_COLOURS[part] for part in used}
    values = [
        {"rank": each["rank"], "part": PARTS[part], "order": order, "seconds": (spent := each["parts"][part])}
        | {"batch": spent / max(1, each["batches"]) * 1e3, "share": spent / max(1e-12, each["seconds"])}
        for each in ranks
        for order, part in enumerate(used)
    ]
    shown = tips(part="part", rank="rank", seconds="seconds:,.4~g", batch="ms a batch:,.4~g", share="share:.1%")
    spec = stacked_bars(values, "rank", ("seconds", "seconds of the epoch"), colour_by("part", colours), shown)
    heads = ["rank", "batches", "seconds", *(PARTS[part] for part in used)]
    lines = [
        [
            str(each["rank"]),
            f"{each['batches']:,}",
            _short(each["seconds"]),
            *(_short(each["parts"][part]) for part in used),
        ]
        for each in ranks
    ]
    caption = (
        "Waiting for the network is what the bytes need on the measured links, or as long as every rank waits for messages."
        if len(ranks) > 1
        else ""
    )
    names = list(dict.fromkeys(name for each in ranks for name in each["numbers"]))
    all_lines = [[name, *(_short(each["numbers"].get(name)) for each in ranks)] for name in names]
    everything = Table(
        ["number", *(f"rank {each['rank']}" for each in ranks)], all_lines, "Names as in loader.metrics()"
    )
    chart = Chart(spec, Table(heads, lines, "Seconds of the epoch"), colours, caption)
    return chart.html() + details("All numbers of each rank", table(everything))


def _short(number: float | None) -> str:
    """Formats a number for the page: a whole number with all its digits, any other with four."""
    if number is None:
        return "–"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.4g}"


def _timeline(timeline: dict[str, Any], rank: int) -> str:
    """Draws spans over time. Of many ranks, only ``rank`` is shown at first."""
    spans = timeline["spans"]
    if not spans:
        return paragraph("The records of this epoch have no spans.")
    first, last = timeline["shown"]
    kinds = {span["kind"] for span in spans}
    colours = {kind: colour for kind, colour in COLOURS.items() if kind in kinds}
    rows = sorted({span["row"] for span in spans}, key=_place_of)
    ranks = list(dict.fromkeys(row.split()[0] for row in rows))
    bound = {"input": "number", "min": timeline["batches"][0], "max": timeline["batches"][1], "step": 1}
    begin = {"zero": False, "nice": False}
    spec = {
        "data": {"values": spans},
        "params": [
            {"name": "first", "value": first, "bind": {**bound, "name": "first batch"}},
            {"name": "last", "value": last, "bind": {**bound, "name": "last batch"}},
            choice("ranks", "rank", ["all", *ranks], "all" if len(ranks) <= MOST_RANKS else str(rank)),
        ],
        "transform": [
            {"filter": "ranks == 'all' || split(datum.row, ' ')[0] == ranks"},
            {"calculate": "datum.start + datum.ms", "as": "end"},
            {"calculate": "datum.at >= first && datum.at <= last", "as": "inside"},
            {"calculate": "datum.inside ? datum.start : 1e15", "as": "from"},
            {"calculate": "datum.inside ? datum.end : -1e15", "as": "to"},
            # All ranks show the same time, also those that are ahead.
            {
                "joinaggregate": [
                    {"op": "min", "field": "from", "as": "low"},
                    {"op": "max", "field": "to", "as": "high"},
                ]
            },
            {"filter": "datum.end >= datum.low && datum.start <= datum.high"},
        ],
        "height": {"step": 22},
        "mark": {"type": "bar", "stroke": "#8886", "strokeWidth": 0.5},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "title": None, "sort": rows},
            "x": {
                "field": "start",
                "type": "quantitative",
                "title": "ms after the first request of the epoch",
                "scale": begin,
            },
            "x2": {"field": "end"},
            "color": colour_by("kind", colours),
            "tooltip": tips(name="what", batch="batch", row="where", start="from, ms:,.2f", ms="took, ms:,.4~f"),
        },
    }
    at_first = [span for span in spans if first <= span["at"] <= last]
    lines = [
        [span["row"], span["name"], str(span["batch"]), f"{span['start']:,.2f}", f"{span['ms']:,.3f}"]
        for span in at_first[:MOST_LINES]
    ]
    title = f"Batches {first} to {last}: {len(lines):,} of {len(at_first):,} spans; salientpp report --json writes all"
    return Chart(
        spec, Table(["where", "what", "batch", "from, ms", "took, ms"], lines, title), colours, timeline["caption"]
    ).html()


def _place_of(row: str) -> tuple[int, bool, bool, str]:
    """Returns the sort key of a row of the timeline: by rank, then the loop, the stages, and the threads."""
    rank, _, name = row.partition(" ")
    return int(rank), name != "loop", name != "stages", name


def _rows(numbers: dict[str, Any]) -> str:
    epochs = sorted(numbers["epochs"], key=lambda each: (each["epoch"], each["rank"]))
    used = [tier for tier in TIERS if any(each[tier] for each in epochs)]
    if not used:
        return paragraph("No rows were counted.")
    colours = {tier: colour for tier, colour in TIERS.items() if tier in used}
    values = [
        {"epoch": each["epoch"], "rank": str(each["rank"]), "tier": tier, "order": order, "rows": each[tier]}
        for each in epochs
        for order, tier in enumerate(used)
    ]
    transform = [
        {"filter": "rank == 'all' || datum.rank == rank"},
        {"aggregate": [{"op": "sum", "field": "rows", "as": "rows"}], "groupby": ["epoch", "tier", "order"]},
        {"joinaggregate": [{"op": "sum", "field": "rows", "as": "all"}], "groupby": ["epoch"]},
        {"calculate": "datum.all > 0 ? datum.rows / datum.all : 0", "as": "share"},
    ]
    spec = stacked_bars(
        values, "epoch", ("rows", "rows"), colour_by("tier", colours), tips(epoch="epoch", tier="from", rows="rows:,", share="share:.1%"), False,
        params=[choice("rank", "rank", ["all", *dict.fromkeys(each["rank"] for each in values)])], transform=transform,
    )  # fmt: skip
    lines = [
        [str(each["epoch"]), str(each["rank"]), _short(each["seconds"]), *(f"{each[tier]:,.0f}" for tier in used)]
        for each in epochs
    ]
    caption = "`remote` rows travelled from other ranks. The other rows lay on the host or on the device."
    return Chart(spec, Table(["epoch", "rank", "seconds", *used], lines, "Rows by tier"), colours, caption).html()


def _memory(ranks: Sequence[dict[str, Any]]) -> str:
    held = [{name[7:]: size for name, size in each["numbers"].items() if name.startswith("memory.")} for each in ranks]
    if not any(any(each.values()) for each in held):
        return paragraph("The records do not say how much memory the loader holds.")
    bars = [({"rank": rank["rank"]}, each) for rank, each in zip(ranks, held)]
    return memory_chart(bars, "rank", {"rank": "rank"}, "Memory by kind")


def _read(numbers: dict[str, Any]) -> list[str]:
    """Returns tables of the files that were read, the loader's options and the measured links, as HTML."""
    ranks, about = numbers["ranks"], numbers["ranks"][0]["about"]
    lines = [
        [each["file"], str(each["rank"]), each["host"], str(each["about"].get("version", "–")), str(each["epochs"])]
        for each in ranks
    ]
    files = Table(["file", "rank", "host", "version", "epochs"], lines, f"Files of {numbers['folder']}")
    facts = {
        name: about[name]
        for name in ("class", "batch_size", "num_neighbors", "num_workers", "depth", "device", "parts")
        if name in about
    }
    facts |= about.get("options") or {}
    options = Table(
        ["option", "value"],
        [[name, str(value)] for name, value in facts.items()],
        f"Options on rank {ranks[0]['rank']}",
    )
    speeds = [[str(source), str(to), format_bytes(speed)] for source, to, speed in numbers["links"]]
    links = Table(["from rank", "to rank", "bytes a second"], speeds)
    return [table(files), table(options, texts=True), details("Measured links", table(links)) if speeds else ""]
