"""Causes that lie in the work of a rank: drawing, taking rows, the transform, and assembling batches."""

from __future__ import annotations

import math
from statistics import median

from salientpp.display import format_bytes
from salientpp.report.finding import HALF, WORTH, Finding, finding_of, seconds, takes
from salientpp.report.parts import PARTS, Job

#: Bytes a second above which rows come from memory rather than from a disk or a network file system.
FROM_MEMORY = 3e8
#: Bytes below which narrower rows take as long as rows of this width.
NARROW = 256
#: Numbers with the seconds that threads work on a part.
_WORK = {"sample": "work.draw.seconds", "rows": "work.gather.seconds"}


def transform(job: Job) -> Finding:
    """Returns the finding that the ``transform``, which runs in the loop's own thread, is slow."""
    _, rank, what = takes(job, "transform", "`transform`")
    change = "Make it faster, or apply it to the data before training."
    return finding_of(job, "transform", "transform", rank, what, change)


def seeds(job: Job) -> Finding:
    """Returns the finding that the user's ``sampler``, which gives the seeds in the loop's own thread, is slow."""
    _, rank, what = takes(job, "seeds", "`sampler`")
    return finding_of(
        job, "seeds", "seeds", rank, what, "Make it faster, or let it compute its seeds before the epoch."
    )


def sampling(job: Job) -> Finding:
    """Returns the finding that the sampling threads draw batches more slowly than the loop takes them."""
    place, rank, what = takes(job, "sample", "waiting for sampled batches")
    return _by_threads(job, "sampling", "sample", place, rank, what)


def _by_threads(job: Job, cause: str, part: str, place: int, named: int | None, what: str) -> Finding:
    """Returns a finding for a part that threads share. It advises more threads, or less work if the rank has no cores for them."""
    rank, parts = job.ranks[place], job.parts[place]
    names = ("sample", "rows") if rank.is_alone else (part,)  # threads of a process that has all rows do both
    work = sum(rank.of(_WORK[name]) or parts[name] for name in names)
    left = job.expected(**{name: [0.0] * len(job.ranks) for name in names})
    workers, cores = int(rank.about.get("num_workers") or 0), job.cores_of(place)
    enough = max(workers + 1, math.ceil(work / max(0.9 * left, 1e-9)))
    where, on_cores = "on cores that the model leaves free", ""
    if cores is not None:
        total = int(rank.about["cores"])
        its = f"{total} core{'s' * (total > 1)}"
        if (sharing := round(total / cores)) > 1:
            its += f" for {sharing} ranks on its host"
        most = max(1, int(cores))
        if workers >= most or job.least > (1 - WORTH) * job.seconds:
            doing = "Drawing" if part == "sample" else "Taking rows"
            change = f"{doing} needs more than {its}, or fewer neighbours (smaller `num_neighbors`)."
            more = "; half the neighbours take half the time"
            return finding_of(job, cause, part, named, what, change, lambda at, now: now / 2, more)
        enough, where = min(enough, most), f"within {its}"
        on_cores = f"; all threads and loops need {seconds(job.least)} on these cores"
        if int(rank.about.get("torch_threads") or 1) > 1 and rank.about.get("device") == "cpu":
            on_cores += ", and more if the training step keeps several cores busy"
    change = f"Use `num_workers={enough}` instead of {workers}, {where}."
    threads = f"{enough} threads need" if enough > 1 else "1 thread needs"
    each = f"each for {seconds(work)} of work" if enough > 1 else "for this work"
    more = f"; {threads} {seconds(work / enough)} {each}{on_cores}"
    return finding_of(job, cause, part, named, what, change, more=more, least=max(job.least, work / enough))


def rows(job: Job) -> Finding:
    """Returns the finding that feature rows come slowly: from a disk, a network file system, or the memory of a busy host."""
    place, rank, what = takes(job, "rows", "taking feature rows")
    slow = job.ranks[place]
    if slow.is_alone and not slow.about.get("num_workers"):  # the loop's own thread takes the rows
        return _by_threads(job, "rows", "rows", place, rank, what)
    taken = slow.of("bytes.host") + slow.of("bytes.cache") + slow.of("bytes.sent")
    worked = slow.of("work.gather.seconds") or job.parts[place]["rows"]
    width = max([0, *(slow.about.get("row_bytes") or {}).values()])
    is_narrow = 0 < width < NARROW
    speed = taken * (NARROW / width if is_narrow else 1) / worked if worked else math.inf
    in_files, is_slow = slow.about.get("reads_files"), 0 < speed < FROM_MEMORY
    if is_slow and in_files is not False:
        more = f"; rows come at {format_bytes(speed)} a second, and memory gives {format_bytes(FROM_MEMORY)} or more"
        if is_narrow:
            more = f"; {speed / NARROW:,.0f} rows come a second, and memory gives {FROM_MEMORY / NARROW:,.0f} or more"
        given = (slow.about.get("options") or {}).get("read_ahead")
        ahead = f"a larger `read_ahead` than {given}" if given else '`read_ahead="2GiB"`'
        change = f"Use {ahead} or `salientpp copy-to-disk`{'' if in_files else ' if rows lie on a disk'}"
        change += "." if is_narrow else "; narrower rows (`store_as`) need fewer bytes."
        return finding_of(job, "rows", "rows", rank, what, change, lambda at, now: now * speed / FROM_MEMORY, more)
    change, more = "Store rows as float16 (`store_as`), which halves their bytes, or give the loader more cores.", HALF
    if is_narrow:
        change = f"Give the loader more cores, or use smaller `num_neighbors`: rows of {width:g} bytes take as long as wider ones."
        more = "; half the rows take half the time"
    if is_slow:
        change += " If `columns` has a source of your own, make its `take` faster."
    return finding_of(job, "rows", "rows", rank, what, change, lambda at, now: now / 2, more)


def assembling(job: Job) -> Finding:
    """Returns the finding that the loop's own thread takes long to put batches together."""
    _, rank, what = takes(job, "assemble", "putting batches together")
    change = "Use fewer or narrower `columns`, or smaller batches; on a GPU pass `device`."
    return finding_of(job, "assembling", "assemble", rank, what, change, lambda at, now: now / 2, HALF)


#: Parts in which a single slow rank is told by its own cause.
_TOLD = ("transform", "seeds", "sample", "rows")


def uneven(job: Job) -> Finding | None:
    """Returns the finding that the others wait for one rank, which has more batches, a slower training step or a slower machine. None if there is none."""
    if len(job.ranks) == 1 or any(rank.batches < (rank.listed or 0) for rank in job.ranks):
        return None  # an epoch that was left early tells nothing about the sizes of parts
    place = job.slowest
    rank, parts = job.ranks[place], job.parts[place]
    more = {name: max(0.0, parts[name] - job.on_others(name, place)) for name in ("train", *_TOLD, "assemble", "rest")}
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
    elif (largest in _TOLD and is_one_part) or more[largest] <= 0:
        return None  # the cause of this part says so, or no part is longer
    elif largest in ("train", "rest") and is_one_part:
        mine, others = (each / max(1, rank.batches) for each in (parts[largest], job.on_others(largest, place)))
        what = f"{slowest} its {PARTS[largest]} takes {seconds(mine)} a batch, that of the others {seconds(others)}."
    else:
        times = job.own[place] / usual if usual else 1.0
        what = f"{slowest} all its work takes {times:.1f} times as long as that of the others, which wait."
    after = [each["rest"] - saved * (at == place) for at, each in enumerate(job.parts)]
    expected = job.expected(rest=after)
    return Finding("uneven", rank.number, what, change, expected, how, job.seconds - expected, "rest", after)
