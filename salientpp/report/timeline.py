"""Chooses the spans of a timeline: as many as a page can hold, in tracks that can be read.

Each rank has a row for the training loop, one for the stages of the pipeline, and one for each thread that draws or takes rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from salientpp.report.parts import PART_COLOURS, PARTS
from salientpp.report.read import Log, Span, spans_of

#: Most spans of a page, which takes about 120 bytes for each.
MOST_SPANS = 5000
#: Most batches between the batch that the loop asks for and a batch that is drawn at the same time.
MOST_AHEAD = 256
#: Batches that the page shows first.
SHOWN = 6
#: Kinds of spans, by name of the span; other names are stages of the exchange.
KINDS = {
    "train": "training step",
    "transform": "transform",
    "sample": "sampling",
    "draw": "sampling",
    "gather": "taking rows",
    "gather_host_rows": "taking rows",
    "copy_to_device": "taking rows",
    "gather_device_rows": "taking rows",
    "peers": "waiting for other ranks",
    "next": "next()",
}
EXCHANGE = "other stages"
_AS_PARTS = {"waiting for other ranks": "others", EXCHANGE: "assemble", "next()": "step_wait"}
#: Colours by kind, as in the chart of parts.
COLOURS = {PARTS[part]: PART_COLOURS[part] for part in ("train", "transform", "sample", "rows")}
COLOURS |= {kind: PART_COLOURS[part] for kind, part in _AS_PARTS.items()}


def timeline_of(logs: Sequence[Log], epoch: int, batches: tuple[int, int] | None) -> dict[str, Any]:
    """Returns the spans to draw, each with its row, kind, start and duration in ms, and a caption that says which were left out.

    A span has two numbers. ``batch`` is the batch that the span works for. ``at`` is the batch that the loop asked for or trained with at that time. The two
    differ because the pipeline works ahead. ``batches`` chooses spans by ``at``.

    Raises:
        ValueError: no rank has these batches.
    """
    asked = {log.rank: sorted((span.start, span.batch) for span in spans_of(log, epoch, "next")) for log in logs}
    numbers = sorted({batch for of_rank in asked.values() for _, batch in of_rank})
    if not numbers:
        return {"spans": [], "shown": [0, 0], "batches": [0, 0], "left_out": 0, "caption": ""}
    first, last = (numbers[0], numbers[-1]) if batches is None else batches
    inside: Sequence[int] = [number for number in numbers if first <= number <= last]
    if not inside:
        raise ValueError(
            f"expected batches between {numbers[0]} and {numbers[-1]} of epoch {epoch}, got {first}:{last}; choose other --batches"
        )
    if batches is None:  # no more batches than have at least three spans on each rank
        middle, most = len(inside) // 2, MOST_SPANS // (3 * len(logs))
        inside = inside[max(0, middle - most) : middle + most + 1]
    begun = min(of_rank[0][0] for of_rank in asked.values() if of_rank)
    near = (inside[0] - MOST_AHEAD, inside[-1] + MOST_AHEAD)
    found = [
        each for log in logs for each in _of_rank(log.rank, spans_of(log, epoch, "", near), asked[log.rank], begun)
    ]
    found = [each for each in found if inside[0] <= each["at"] <= inside[-1]]
    if batches is None:
        inside = _around_the_median(found, inside)
    found = [each for each in found if inside[0] <= each["at"] <= inside[-1]]
    total = len(found)
    found = sorted(found, key=lambda each: each["ms"], reverse=True)
    dropped, found = found[MOST_SPANS:], sorted(found[:MOST_SPANS], key=lambda each: (each["start"], -each["ms"]))
    middle = inside[len(inside) // 2]
    shown = [max(inside[0], middle - SHOWN // 2), min(inside[-1], middle + (SHOWN - 1) // 2)]
    if batches is not None:
        shown = [inside[0], inside[-1]]
    words = [f"The page holds batches {inside[0]} to {inside[-1]} of {numbers[0]} to {numbers[-1]}."]
    if len(inside) < len(numbers):
        words.append("`--batches A:B` chooses others.")
    if dropped:
        share = sum(each["ms"] for each in dropped) / sum(each["ms"] for each in [*dropped, *found])
        words.append(
            f"{len(dropped):,} of {total:,} spans, those up to {dropped[0]['ms']:.3g} ms, are left out; they are {share:.1%} of the time."
        )
    words.append("Each rank has the clock of its own host.")
    return {
        "spans": found,
        "shown": shown,
        "batches": [inside[0], inside[-1]],
        "left_out": len(dropped),
        "caption": " ".join(words),
    }


def _of_rank(
    rank: int, spans: Sequence[Span], asked: Sequence[tuple[float, int]], begun: float
) -> list[dict[str, Any]]:
    """Returns the spans of a rank as JSON values.

    ``asked``: when its loop asked for each batch. ``begun``: the time that counts as 0.
    """
    starts = [start for start, _ in asked]
    rows = {track: f"{rank} {name}" for track, name in _names_of_threads(spans).items()}
    found = []
    for span in spans:
        place = bisect_right(starts, span.start) - 1
        row = f"{rank} loop" if span.name in ("next", "train") else rows.get(span.track, f"{rank} stages")
        found.append(
            {
                "row": row,
                "name": span.name,
                "kind": KINDS.get(span.name, EXCHANGE),
                "batch": span.batch,
                "at": asked[max(0, place)][1] if asked else span.batch,
                "start": round((span.start - begun) * 1e3, 3),
                "ms": round(span.seconds * 1e3, 4),
            }
        )
    return found


def _names_of_threads(spans: Sequence[Span]) -> dict[str, str]:
    """Returns a name for each thread: the work that it does, and a number if several threads do the same work."""
    works: dict[str, list[str]] = {}
    for track, name in sorted({(span.track, span.name) for span in spans if span.track != "main"}):
        if all(track not in tracks for tracks in works.values()):
            works.setdefault(name, []).append(track)
    return {
        track: f"{name} {place + 1}" if len(tracks) > 1 else name
        for name, tracks in works.items()
        for place, track in enumerate(tracks)
    }


def _around_the_median(spans: Sequence[dict[str, Any]], batches: Sequence[int]) -> Sequence[int]:
    """Returns the batches around the middle one, as many as a page can hold the spans of, at least one."""
    count = dict.fromkeys(batches, 0)
    for span in spans:
        if span["at"] in count:
            count[span["at"]] += 1
    first = last = len(batches) // 2
    total = count[batches[first]]
    while first > 0 or last < len(batches) - 1:
        more = [place for place in (first - 1, last + 1) if 0 <= place < len(batches)]
        place = min(more, key=lambda each: abs(each - len(batches) // 2))
        total += count[batches[place]]
        if total > MOST_SPANS:
            break
        first, last = min(first, place), max(last, place)
    return batches[first : last + 1]
