"""Says which rank and which part of an epoch is the bottleneck, what would change it, and how much.

Each cause is a function of :data:`CAUSES` that returns a finding, or None where the numbers do not show this cause. All expect the epoch to
change as :meth:`~salientpp.report.parts.Job.expected` says, with other seconds for one part. A finding that saves less than ``WORTH`` of
the epoch is dropped. If nothing is left, the training step is the bottleneck.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from salientpp.display import format_bytes
from salientpp.report.parts import PARTS, Job, transfer_of

#: Smallest share of the epoch that a finding must save. A second finding that saves this share of the first's savings is told too.
WORTH, NEAR = 0.1, 0.7
#: Fewest batches of a rank that say something.
FEW = 10
#: Bytes a second above which rows come from memory rather than from a disk or a network file system.
FROM_MEMORY = 1e9
#: A link below this share of the speed of the other links is slow.
SLOW_LINK = 0.5


@dataclass(frozen=True)
class Finding:
    """One cause of a long epoch.

    Attributes:
        cause: name of the cause, that of its function.
        rank: the rank that is slowed down most, or None if all are.
        what: a sentence that says what takes how long. ``change``: a sentence that says what would change it.
        expected: seconds of the epoch after this change; None if they are not known.
        how: formula of ``expected``, with numbers.
        saved: seconds that the change is worth, by which findings are ordered.
    """

    cause: str
    rank: int | None
    what: str
    change: str
    expected: float | None
    how: str
    saved: float


@dataclass(frozen=True)
class Verdict:
    """The answer for one epoch.

    Attributes:
        sentences: at most three for each told finding.
        findings: all findings, the most important first.
    """

    sentences: Sequence[str]
    findings: Sequence[Finding]


def verdict_of(job: Job) -> Verdict:
    """Returns what would shorten the epoch of a job."""
    most = max(rank.batches for rank in job.ranks)
    if most < FEW:
        few = f"An epoch of {_count(most, 'batch', 'batches')} a rank: too few to tell what is slow."
        return Verdict([few, f"Run an epoch of {FEW} batches or more."], [])
    found = [finding for cause in CAUSES if (finding := cause(job)) is not None]
    findings = sorted(
        [each for each in found if each.saved > 0 and each.saved >= WORTH * job.seconds],
        key=lambda each: each.saved,
        reverse=True,
    )
    findings = findings or [_training_step(job)]
    told = [each for each in findings if each.saved >= NEAR * findings[0].saved][:2]
    sentences = _sentences(job, told[0])
    if len(told) == 2:
        first, *rest = _sentences(job, told[1])
        sentences += [f"Nearly as large: {first[0].lower() + first[1:]}", *rest]
    return Verdict(sentences, findings)


def _sentences(job: Job, finding: Finding) -> list[str]:
    words = [finding.what, finding.change]
    if finding.expected is not None:
        words.append(f"Expected: an epoch of {seconds(finding.expected)} instead of {seconds(job.seconds)}.")
    return words


def seconds(number: float) -> str:
    """Writes seconds with two or three digits: 41 s, 0.31 s, 2.5 ms."""
    if number >= 9.95:
        return f"{number:,.0f} s"
    return f"{number:.2g} s" if number >= 0.01 or number == 0 else f"{number * 1e3:.2g} ms"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _slow_ranks(job: Job, part: str) -> tuple[int, list[int]]:
    """Returns the place of the rank on which a part takes longest, beside those that are as slow, and the places of all such ranks.

    The first is the slowest rank, if this part takes long there.
    """
    values = [each[part] for each in job.parts]
    place = job.slowest if values[job.slowest] >= 0.6 * max(values) else values.index(max(values))
    return place, [at for at, value in enumerate(values) if value >= 0.6 * values[place]]


def _takes(job: Job, part: str, its: str, name: str) -> tuple[int, int | None, str]:
    """Returns the place of the rank that a part slows down most, the rank if not all are slow, and a sentence that says so.

    ``its`` names the part of one rank, ``name`` that of every rank.
    """
    place, slow = _slow_ranks(job, part)
    rank = job.ranks[place]
    batch = max(1, rank.batches)
    share = f"takes {seconds(job.parts[place][part] / batch)} of {seconds(rank.of('seconds') / batch)} a batch"
    if len(job.ranks) == 1:
        return place, None, f"{name} {share}."
    if len(slow) == len(job.ranks):
        return place, None, f"{name} {share}, on every rank."
    if len(slow) > 1:
        numbers = " and ".join(str(job.ranks[at].number) for at in slow)
        return place, rank.number, f"Ranks {numbers} are the slowest: {name[0].lower() + name[1:]} {share} there."
    return place, rank.number, f"Rank {rank.number} is the slowest: {its} {share}."


def _without(job: Job, part: str, left: Callable[[int, float], float] = lambda place, now: 0.0) -> tuple[float, str]:
    """Returns the epoch's seconds if a part took what ``left`` returns for a place and its seconds now, and the formula."""
    after = [left(place, each[part]) for place, each in enumerate(job.parts)]
    expected = job.expected(**{part: after})
    place, _ = _slow_ranks(job, part)
    now, then = job.parts[place][part], after[place]
    how = f"{seconds(job.seconds)} - ({seconds(now)} - {seconds(then)} of {PARTS[part]})"
    if job.seconds - expected < 0.99 * (now - then):
        how += f", but another rank or part then needs {seconds(expected)}"
    return expected, how


def transform(job: Job) -> Finding | None:
    """A slow ``transform``, which runs in the loop's own thread."""
    _, rank, what = _takes(job, "transform", "its `transform`", "The `transform`")
    expected, how = _without(job, "transform")
    change = "Make it faster, or apply it to the data before training."
    return Finding("transform", rank, what, change, expected, how, job.seconds - expected)


def sampling(job: Job) -> Finding | None:
    """Sampling threads that draw fewer batches than the loop takes."""
    place, rank, what = _takes(job, "sample", "waiting for sampled batches", "Waiting for sampled batches")
    expected, how = _without(job, "sample")
    workers = int(job.ranks[place].about.get("num_workers") or 0)
    drawn = job.ranks[place].of("work.draw.seconds") or job.parts[place]["sample"]
    enough = max(workers + 1, math.ceil(drawn / max(0.9 * expected, 1e-9)))
    how += f"; {enough} threads need {seconds(drawn / enough)} each for {seconds(drawn)} of drawing"
    change = f"Use `num_workers={enough}` instead of {workers}, on cores that the model leaves free."
    return Finding("sampling", rank, what, change, expected, how, job.seconds - expected)


def rows(job: Job) -> Finding | None:
    """A slow source of feature rows: a disk, a network file system, or memory of a busy host."""
    place, rank, what = _takes(job, "rows", "taking feature rows", "Taking feature rows")
    slow = job.ranks[place]
    taken = slow.of("bytes.host") + slow.of("bytes.cache") + slow.of("bytes.sent")
    worked = slow.of("work.gather.seconds") or job.parts[place]["rows"]
    speed = taken / worked if worked else math.inf
    narrower = "narrower rows (`store_as`) need fewer bytes"
    if taken and speed < FROM_MEMORY:
        expected, how = _without(job, "rows", lambda at, now: min(now, now * speed / FROM_MEMORY))
        how += f"; rows come at {format_bytes(speed)} a second, and memory gives {format_bytes(FROM_MEMORY)} or more"
        given = slow.about.get("options", {}).get("read_ahead")
        ahead = f"a larger `read_ahead` than {given!r}" if given else '`read_ahead="2GiB"`'
        change = f"Use {ahead}, or copy the rows to a disk of the host with `salientpp copy-to-disk`; {narrower}."
    else:
        expected, how = _without(job, "rows", lambda at, now: now / 2)
        how += "; rows of half the bytes take half the time"
        change = f"Store rows as float16: {narrower}. More cores for `num_workers` also help."
    return Finding("rows", rank, what, change, expected, how, job.seconds - expected)


def _slow_link(job: Job) -> tuple[int, str, list[tuple[int, int]], float, float] | None:
    """Returns the rank with slow links, a word for their direction, the links, their speed and that of the others.

    Returns None if links are even or were not measured. Both directions are compared, because a rank may send slowly and receive fast. With two
    ranks, the link from one is compared with the link from the other.
    """
    found = []
    for end, word in enumerate(("from", "to")):
        for number in sorted({number for pair in job.links for number in pair}):
            others = [speed for pair, speed in job.links.items() if number not in pair]
            pairs = [pair for pair in job.links if pair[end] == number]
            back = [speed for pair, speed in job.links.items() if pair[1 - end] == number]
            if pairs and (others or back):
                speed, usual = median(job.links[pair] for pair in pairs), median(others or back)
                if speed < SLOW_LINK * usual:
                    found.append((number, word, pairs, speed, usual))
    if not found:
        return None
    # A rank that is slow in both directions makes one direction of its neighbours slow.
    ends = Counter(number for number, *_ in found)
    number, word, pairs, speed, usual = min(found, key=lambda each: (-ends[each[0]], each[3] / each[4]))
    if ends[number] == 2:
        word, pairs = "of", [pair for each in found if each[0] == number for pair in each[2]]
    return number, word, pairs, speed, usual


def slow_link(job: Job) -> Finding | None:
    """One rank whose links are slower than those of the others."""
    found = _slow_link(job)
    if found is None:
        return None
    number, word, pairs, speed, usual = found
    links = {**job.links, **{pair: max(job.links[pair], usual) for pair in pairs}}
    after = [parts["network"] for parts in job.with_links(links).parts]
    if len(job.links) < len(job.ranks) * (
        len(job.ranks) - 1
    ):  # of a few links, so that transfers of most ranks are not known
        after = [parts["network"] * speed / usual for parts in job.parts]
    expected, how = _without(job, "network", lambda place, now: after[place])
    place = max(range(len(job.ranks)), key=lambda at: job.parts[at]["network"])
    batch = job.parts[place]["network"] / max(1, job.ranks[place].batches)
    rates = f"{format_bytes(speed)} a second, other links {format_bytes(usual)}, and ranks wait {seconds(batch)} a batch for it"
    ends = f"from rank {pairs[0][0]} to rank {pairs[0][1]}" if len(job.ranks) == 2 else f"of rank {number}"
    what = f"The network {ends} is slow: links {word} rank {number} give {rates}."
    change = "Check the rank's host with `salientpp doctor`, or run the rank on another host."
    how += f"; bytes on these links need less time at {format_bytes(usual)} a second than at {format_bytes(speed)}"
    return Finding("slow_link", number, what, change, expected, how, job.seconds - expected)


def small_cache(job: Job) -> Finding | None:
    """A cache that leaves many rows to fetch over an even network, where a larger one is forecast to leave fewer."""
    place, _ = _slow_ranks(job, "network")
    rank = job.ranks[place]
    forecast = sorted((int(rows), float(left)) for rows, left in rank.about.get("cache_forecast") or ())
    if _slow_link(job) is not None or not forecast or not _bytes_matter(job, place):
        return None
    cached = int(rank.about.get("cached_rows") or 0)
    before = next((left for rows, left in reversed(forecast) if rows <= cached), forecast[0][1])
    larger = [(rows, left) for rows, left in forecast if rows > cached]
    if not larger or not before:
        return None
    rows, left = next(((rows, left) for rows, left in larger if left <= before / 2), larger[-1])
    if left > 0.8 * before:
        return None
    expected, how = _without(job, "network", lambda at, now: now * left / before)
    remote, total = (
        rank.of("rows.remote"),
        sum(rank.of(f"rows.{tier}") for tier in ("device", "host", "cache", "remote")),
    )
    _, named, what = _takes(job, "network", "waiting for the network", "Waiting for the network")
    what = f"{what.removesuffix('.')}: {remote / max(1, total):.0%} of the rows of a batch come from other ranks."
    width = max([0, *(rank.about.get("row_bytes") or {}).values()])
    own = max(1, int(rank.about.get("own_rows") or 1))
    index = own * int(rank.about.get("parts") or 1) // 4  # of cached rows: 8 bytes for 32 vertices
    memory = f'`memory="{rounded_up(rows * width + index)}"`, or `' if width else "`"
    change = f"Use a cache of {rows:,} rows instead of {cached:,}: {memory}replication_factor={rows / own:.2g}`."
    how += f"; such a cache is forecast to leave {left:,.0f} of {before:,.0f} remote rows an epoch"
    return Finding("small_cache", named, what, change, expected, how, job.seconds - expected)


def many_bytes(job: Job) -> Finding | None:
    """Many bytes over an even network, where no larger cache is known to help."""
    place, rank, what = _takes(job, "network", "waiting for the network", "Waiting for the network")
    if _slow_link(job) is not None or small_cache(job) is not None or not _bytes_matter(job, place):
        return None
    expected, how = _without(job, "network", lambda at, now: now / 2)
    size = format_bytes(job.ranks[place].of("bytes.received") / max(1, job.ranks[place].batches))
    change = f"Send fewer than {size} a batch: `send_as` or `store_as` float16 halves them, `memory=` adds a cache."
    how += "; half the bytes need half the time"
    return Finding("many_bytes", rank, f"{what}", change, expected, how, job.seconds - expected)


def _bytes_matter(job: Job, place: int) -> bool:
    """True unless the links are known and the bytes of a rank need less than a third of its waiting for the network."""
    transfer = transfer_of(job.ranks[place], job.links)
    return not transfer or transfer >= job.parts[place]["network"] / 3


def messages(job: Job) -> Finding | None:
    """Waiting for messages, although their bytes need little time."""
    place, rank, what = _takes(job, "network", "waiting for messages", "Waiting for messages")
    if _bytes_matter(job, place):
        return None
    transfer = [min(transfer_of(each, job.links), parts["network"]) for each, parts in zip(job.ranks, job.parts)]
    expected, how = _without(job, "network", lambda at, now: (now + transfer[at]) / 2)
    what = f"{what.removesuffix('.')}, though its bytes need {seconds(transfer[place] / job.ranks[place].batches)}."
    depth = int(job.ranks[place].about.get("depth") or 10)
    change = "Use a larger `batch_size`, which needs fewer messages"
    change += f", and `depth=10` instead of {depth}." if depth < 10 else "."
    how += "; batches of twice the size need half as many messages"
    return Finding("messages", rank, what, change, expected, how, job.seconds - expected)


#: Parts in which a single slow rank is told by its own cause.
_TOLD = ("transform", "sample", "rows")


def uneven(job: Job) -> Finding | None:
    """A rank with more batches, with a slower training step, or on a slower machine, for which the others wait."""
    if len(job.ranks) == 1:
        return None
    place = job.slowest
    rank, parts = job.ranks[place], job.parts[place]
    names = [name for name in parts if name not in ("others", "step_wait", "network", "rest")]
    more = {name: max(0.0, parts[name] - job.on_others(name, place)) for name in names}
    largest = max(more, key=lambda name: more[name])
    usual = median([own for at, own in enumerate(job.own) if at != place])
    batches = median([each.batches for at, each in enumerate(job.ranks) if at != place])
    if largest in _TOLD and more[largest] >= sum(more.values()) / 2 and rank.batches <= 1.1 * batches:
        return None  # that part's own cause says so
    expected = job.expected(
        rest=[each["rest"] - (job.own[place] - usual) * (at == place) for at, each in enumerate(job.parts)]
    )
    how = f"{seconds(job.seconds)} - ({seconds(job.own[place])} - {seconds(usual)}): this rank's own work as long as that of the others"
    if rank.batches > 1.1 * batches:
        what = f"Rank {rank.number} has {rank.batches:,} batches and the others {batches:,.0f}: they wait for it."
        mine, usual = float(rank.batches), sum(each.batches for each in job.ranks) / len(job.ranks)
        expected = job.expected(
            rest=[each["rest"] - job.own[at] * (1 - usual / mine) * (at == place) for at, each in enumerate(job.parts)]
        )
        how = f"{seconds(job.seconds)} × {usual:,.0f} / {mine:,.0f} batches: each rank has as many"
        change = 'Balance the seeds of the parts with `salientpp partition --seeds`, or use `uneven="drop"`.'
    elif largest == "train" and more["train"] >= sum(more.values()) / 2:
        both = [each / max(1, rank.batches) for each in (parts["train"], job.on_others("train", place))]
        what = f"Rank {rank.number} is the slowest: its training step takes {seconds(both[0])} a batch, that of the others {seconds(both[1])}."
        change = "Compare its machine with the others by `salientpp doctor`: its processor may be slower or busy."
    else:
        times = job.own[place] / usual if usual else 1.0
        what = f"Rank {rank.number} is the slowest: all its work takes {times:.1f} times as long as that of the others, which wait."
        change = "Compare its machine with the others by `salientpp doctor`; its part may also have larger batches."
    return Finding("uneven", rank.number, what, change, expected, how, job.seconds - expected)


def assembling(job: Job) -> Finding | None:
    """Batches that take long to put together in the loop's own thread."""
    _, rank, what = _takes(job, "assemble", "putting batches together", "Putting batches together")
    expected, how = _without(job, "assemble", lambda at, now: now / 2)
    change = "Use fewer or narrower `columns`, or smaller batches; on a GPU pass `device`."
    how += "; half the bytes take half the time"
    return Finding("assembling", rank, what, change, expected, how, job.seconds - expected)


def _training_step(job: Job) -> Finding:
    """The training step, which the loader does not delay."""
    place = job.slowest
    rank, parts = job.ranks[place], job.parts[place]
    waits = rank.of("wait.seconds") / rank.of("seconds") if rank.of("seconds") else 0.0
    batch = parts["train"] / max(1, rank.batches)
    worst = max((name for name in parts if name not in ("train", "step_wait")), key=lambda name: parts[name])
    largest = f", most of it for {PARTS[worst]}" if waits >= 2 * WORTH else ""
    what = f"The loader is not the bottleneck: the training step takes {seconds(batch)} a batch, and waiting {waits:.0%} of the epoch{largest}."
    change = "Make the step faster: `model = salientpp.nn.trim(model)` computes only the rows that seeds need."
    after = [each["train"] / 2 for each in job.parts]
    expected = job.expected(train=after)
    how = f"{seconds(job.seconds)} - {seconds(parts['train'])} / 2: a training step that takes half as long"
    return Finding("training_step", None, what, change, expected, how, job.seconds - expected)


def rounded_up(num_bytes: float) -> str:
    """Writes a number of bytes with two digits, as `memory` takes it."""
    exponent = max(0, int(math.log10(max(1.0, num_bytes))) - 1)
    number = math.ceil(num_bytes / 10**exponent) * 10**exponent
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number}B"


#: Every cause. A further one is a function here.
CAUSES: Sequence[Callable[[Job], Finding | None]] = (
    transform,
    sampling,
    rows,
    slow_link,
    small_cache,
    many_bytes,
    messages,
    uneven,
    assembling,
)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Returns JSON values."""
    return {"sentences": [*verdict.sentences], "findings": [vars(finding) for finding in verdict.findings]}
