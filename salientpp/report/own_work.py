"""Causes that lie in the work of a rank: drawing, taking rows, the transform, and assembling batches."""

from __future__ import annotations

import math
from statistics import median

from salientpp.display import format_bytes
from salientpp.report.finding import HALF, Finding, finding_of, seconds, takes
from salientpp.report.parts import Job

#: Bytes a second above which rows come from memory rather than from a disk or a network file system.
FROM_MEMORY = 3e8


def transform(job: Job) -> Finding:
    """A slow ``transform``, which runs in the loop's own thread."""
    _, rank, what = takes(job, "transform", "`transform`")
    change = "Make it faster, or apply it to the data before training."
    return finding_of(job, "transform", "transform", rank, what, change)


def sampling(job: Job) -> Finding:
    """Sampling threads that draw fewer batches than the loop takes."""
    place, rank, what = takes(job, "sample", "waiting for sampled batches")
    drawn = job.ranks[place].of("work.draw.seconds") or job.parts[place]["sample"]
    change, more = _threads(job, place, drawn, job.expected(sample=[0.0] * len(job.ranks)))
    return finding_of(job, "sampling", "sample", rank, what, change, more=more)


def _threads(job: Job, place: int, work: float, left: float) -> tuple[str, str]:
    """Returns how many threads do this work within ``left`` seconds, and why."""
    workers = int(job.ranks[place].about.get("num_workers") or 0)
    enough = max(workers + 1, math.ceil(work / max(0.9 * left, 1e-9)))
    change = f"Use `num_workers={enough}` instead of {workers}, on cores that the model leaves free."
    return change, f"; {enough} threads need {seconds(work / enough)} each for {seconds(work)} of work"


def rows(job: Job) -> Finding:
    """A slow source of feature rows: a disk, a network file system, or memory of a busy host."""
    place, rank, what = takes(job, "rows", "taking feature rows")
    slow = job.ranks[place]
    taken = slow.of("bytes.host") + slow.of("bytes.cache") + slow.of("bytes.sent")
    worked = slow.of("work.gather.seconds") or job.parts[place]["rows"]
    if slow.is_alone and not slow.about.get("num_workers"):  # the loop's own thread takes the rows
        change, more = _threads(job, place, worked, job.expected(rows=[0.0] * len(job.ranks)))
        return finding_of(job, "rows", "rows", rank, what, change, more=more)
    speed = taken / worked if worked else math.inf
    if taken and speed < FROM_MEMORY:
        more = f"; rows come at {format_bytes(speed)} a second, and memory gives {format_bytes(FROM_MEMORY)} or more"
        given = slow.about.get("options", {}).get("read_ahead")
        ahead = f"a larger `read_ahead` than {given}" if given else '`read_ahead="2GiB"`'
        change = f"Use {ahead} or `salientpp copy-to-disk` if rows lie on a disk; narrower rows (`store_as`) need fewer bytes."
        return finding_of(job, "rows", "rows", rank, what, change, lambda at, now: now * speed / FROM_MEMORY, more)
    change = "Store rows as float16 (`store_as`), which halves their bytes, or give the loader more cores."
    return finding_of(job, "rows", "rows", rank, what, change, lambda at, now: now / 2, HALF)


def assembling(job: Job) -> Finding:
    """Batches that take long to put together in the loop's own thread."""
    _, rank, what = takes(job, "assemble", "putting batches together")
    change = "Use fewer or narrower `columns`, or smaller batches; on a GPU pass `device`."
    return finding_of(job, "assembling", "assemble", rank, what, change, lambda at, now: now / 2, HALF)


#: Parts in which a single slow rank is told by its own cause.
_TOLD = ("transform", "sample", "rows")


def uneven(job: Job) -> Finding | None:
    """A rank with more batches, with a slower training step, or on a slower machine, for which the others wait."""
    if len(job.ranks) == 1:
        return None
    place = job.slowest
    rank, parts = job.ranks[place], job.parts[place]
    more = {name: max(0.0, parts[name] - job.on_others(name, place)) for name in ("train", *_TOLD, "assemble")}
    largest = max(more, key=lambda name: more[name])
    is_one_part = more[largest] >= sum(more.values()) / 2
    usual = median([own for at, own in enumerate(job.own) if at != place])
    batches = median([each.batches for at, each in enumerate(job.ranks) if at != place])
    saved, how = (
        job.own[place] - usual,
        f"{seconds(job.seconds)} - ({seconds(job.own[place])} - {seconds(usual)}) of own work",
    )
    change = "Compare its machine with the others by `salientpp doctor`: its processor may be slower or busy."
    slowest = f"Rank {rank.number} is the slowest:"
    if rank.batches > 1.1 * batches:
        even = sum(each.batches for each in job.ranks) / len(job.ranks)
        what = f"Rank {rank.number} has {rank.batches:,} batches and the others {batches:,.0f}: they wait for it."
        change = 'Balance the seeds of the parts with `salientpp partition --seeds`, or use `uneven="drop"`.'
        saved = job.own[place] * (1 - even / rank.batches)
        how = f"{seconds(job.seconds)} × {even:,.0f} / {rank.batches:,} batches"
    elif largest in _TOLD and is_one_part:
        return None  # the cause of this part says so
    elif largest == "train" and is_one_part:
        mine, others = (each / max(1, rank.batches) for each in (parts["train"], job.on_others("train", place)))
        what = f"{slowest} its training step takes {seconds(mine)} a batch, that of the others {seconds(others)}."
    else:
        times = job.own[place] / usual if usual else 1.0
        what = f"{slowest} all its work takes {times:.1f} times as long as that of the others, which wait."
    after = [each["rest"] - saved * (at == place) for at, each in enumerate(job.parts)]
    expected = job.expected(rest=after)
    return Finding("uneven", rank.number, what, change, expected, how, job.seconds - expected, "rest", after)
