"""Says which rank and which part of an epoch is the bottleneck, what would change it, and how much.

Each cause is a function of :data:`CAUSES` that returns a finding, or None where the numbers do not show this cause. The
causes forecast the epoch with :meth:`~salientpp.report.parts.Job.expected`, from other seconds for one part of the
epoch. A finding that saves less than ``WORTH`` of the epoch is dropped. If nothing is left, the training step is the
bottleneck, or two causes hide each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from salientpp.display import format_bytes, rounded_up
from salientpp.report.parts import PARTS, Job, transfer_of

#: Smallest share of the epoch that a finding must save. A second finding that saves this share of the first's savings is told too.
WORTH, NEAR = 0.1, 0.7
#: Fewest batches of a rank that say something.
FEW = 10
#: Bytes a second above which rows come from memory rather than from a disk or a network file system.
FROM_MEMORY = 3e8
#: A link below this share of the speed of the other links is slow.
SLOW_LINK = 1 / 3
HALF = "; half the bytes take half the time"


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
        part: the part of the epoch that changes. ``after``: its seconds on each rank afterwards.
    """

    cause: str
    rank: int | None
    what: str
    change: str
    expected: float | None
    how: str
    saved: float
    part: str
    after: Sequence[float]


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
        few = f"An epoch of {most} batches a rank: too few to tell what is slow."
        return Verdict([few, f"Run an epoch of {FEW} batches or more."], [])
    found = [finding for cause in CAUSES if (finding := cause(job)) is not None]
    findings = sorted(filter(partial(_is_worth, job), found), key=lambda each: each.saved, reverse=True)
    if not findings and _waits(job) < 2 * WORTH:
        findings = [_training_step(job)]
    elif not findings:
        both = _together(job, found)
        findings = [both if both is not None and _is_worth(job, both) else _nothing_alone(job)]
    told = [each for each in findings if each.saved >= NEAR * findings[0].saved][:2]
    sentences = _sentences(job, told[0])
    if len(told) == 2:
        first, *rest = _sentences(job, told[1])
        sentences += [f"Nearly as large: {first[0].lower() + first[1:]}", *rest]
    return Verdict(sentences, findings)


def _is_worth(job: Job, finding: Finding) -> bool:
    return finding.saved > 0 and finding.saved >= WORTH * job.seconds


def _sentences(job: Job, finding: Finding) -> list[str]:
    words = [finding.what, finding.change]
    if finding.expected is not None:
        words.append(f"Expected: an epoch of {seconds(finding.expected)} instead of {seconds(job.seconds)}.")
    return words


def seconds(number: float) -> str:
    """Writes seconds with two or three digits: 41 s, 0.31 s, 2.5 ms."""
    if number >= 9.95:
        return f"{number:,.0f} s"
    return f"{number:.2g} s" if number >= 0.0995 or number == 0 else f"{number * 1e3:.2g} ms"


def _slow_ranks(job: Job, part: str) -> tuple[int, list[int]]:
    """Returns the place of the rank on which a part takes longest, and the places of all ranks that are about as slow.

    The place returned first is ``job.slowest`` if the part takes about as long there.
    """
    values = [each[part] for each in job.parts]
    place = job.slowest if values[job.slowest] >= 0.6 * max(values) else values.index(max(values))
    return place, [at for at, value in enumerate(values) if value >= 0.6 * values[place]]


def _takes(job: Job, part: str, name: str) -> tuple[int, int | None, str]:
    """Returns the place of the rank that a part slows down most, its number, and a sentence about it.

    The number is None if all ranks are as slow.
    """
    place, slow = _slow_ranks(job, part)
    rank = job.ranks[place]
    batch = max(1, rank.batches)
    takes = f"takes {seconds(job.parts[place][part] / batch)} of {seconds(rank.of('seconds') / batch)} a batch"
    is_code = name.startswith("`")
    alone = f"The {name}" if is_code else name[0].upper() + name[1:]
    if len(job.ranks) == 1:
        return place, None, f"{alone} {takes}."
    if len(slow) == len(job.ranks):
        return place, None, f"{alone} {takes}, on every rank."
    if len(slow) > 1:
        numbers = " and ".join(str(job.ranks[at].number) for at in slow)
        return place, rank.number, f"Ranks {numbers} are the slowest: {'the ' * is_code}{name} {takes} there."
    return place, rank.number, f"Rank {rank.number} is the slowest: {'its ' * is_code}{name} {takes}."


def _finding(
    job: Job, cause: str, part: str, rank: int | None, what: str, change: str,
    left: Callable[[int, float], float] = lambda place, now: 0.0, more: str = "",
) -> Finding:  # fmt: skip
    """Returns a finding for a part that would take ``left(place, seconds now)`` on each rank. ``more`` explains these seconds."""
    after = [left(place, each[part]) for place, each in enumerate(job.parts)]
    expected = job.expected(**{part: after})
    place, _ = _slow_ranks(job, part)
    now, then = job.parts[place][part], after[place]
    how = f"{seconds(job.seconds)} - ({seconds(now)} - {seconds(then)} of {PARTS[part]}){more}"
    if job.seconds - expected < 0.99 * (now - then):
        how += f"; another rank or part then needs {seconds(expected)}"
    return Finding(cause, rank, what, change, expected, how, job.seconds - expected, part, after)


def transform(job: Job) -> Finding:
    """A slow ``transform``, which runs in the loop's own thread."""
    _, rank, what = _takes(job, "transform", "`transform`")
    change = "Make it faster, or apply it to the data before training."
    return _finding(job, "transform", "transform", rank, what, change)


def sampling(job: Job) -> Finding:
    """Sampling threads that draw fewer batches than the loop takes."""
    place, rank, what = _takes(job, "sample", "waiting for sampled batches")
    drawn = job.ranks[place].of("work.draw.seconds") or job.parts[place]["sample"]
    change, more = _threads(job, place, drawn, job.expected(sample=[0.0] * len(job.ranks)))
    return _finding(job, "sampling", "sample", rank, what, change, more=more)


def _threads(job: Job, place: int, work: float, left: float) -> tuple[str, str]:
    """Returns how many threads do this work within ``left`` seconds, and why."""
    workers = int(job.ranks[place].about.get("num_workers") or 0)
    enough = max(workers + 1, math.ceil(work / max(0.9 * left, 1e-9)))
    change = f"Use `num_workers={enough}` instead of {workers}, on cores that the model leaves free."
    return change, f"; {enough} threads need {seconds(work / enough)} each for {seconds(work)} of work"


def rows(job: Job) -> Finding:
    """A slow source of feature rows: a disk, a network file system, or memory of a busy host."""
    place, rank, what = _takes(job, "rows", "taking feature rows")
    slow = job.ranks[place]
    taken = slow.of("bytes.host") + slow.of("bytes.cache") + slow.of("bytes.sent")
    worked = slow.of("work.gather.seconds") or job.parts[place]["rows"]
    if slow.is_alone and not slow.about.get("num_workers"):  # the loop's own thread takes the rows
        change, more = _threads(job, place, worked, job.expected(rows=[0.0] * len(job.ranks)))
        return _finding(job, "rows", "rows", rank, what, change, more=more)
    speed = taken / worked if worked else math.inf
    if taken and speed < FROM_MEMORY:
        more = f"; rows come at {format_bytes(speed)} a second, and memory gives {format_bytes(FROM_MEMORY)} or more"
        given = slow.about.get("options", {}).get("read_ahead")
        ahead = f"a larger `read_ahead` than {given}" if given else '`read_ahead="2GiB"`'
        change = f"Use {ahead} or `salientpp copy-to-disk` if rows lie on a disk; narrower rows (`store_as`) need fewer bytes."
        return _finding(job, "rows", "rows", rank, what, change, lambda at, now: now * speed / FROM_MEMORY, more)
    change = "Store rows as float16 (`store_as`), which halves their bytes, or give the loader more cores."
    return _finding(job, "rows", "rows", rank, what, change, lambda at, now: now / 2, HALF)


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
    if len(job.links) < len(job.ranks) * (len(job.ranks) - 1):  # few pairs were measured, so few transfers are known
        after = [parts["network"] * speed / usual for parts in job.parts]
    place = max(range(len(job.ranks)), key=lambda at: job.parts[at]["network"])
    batch = job.parts[place]["network"] / max(1, job.ranks[place].batches)
    rates = f"{format_bytes(speed)} a second, other links {format_bytes(usual)}, and ranks wait {seconds(batch)} a batch for it"
    ends = f"from rank {pairs[0][0]} to rank {pairs[0][1]}" if len(job.ranks) == 2 else f"of rank {number}"
    what = f"The network {ends} is slow: links {word} rank {number} give {rates}."
    change = "Check the rank's host with `salientpp doctor`, or run the rank on another host."
    more = f"; the bytes on these links need less time at {format_bytes(usual)} a second than at {format_bytes(speed)}"
    return _finding(job, "slow_link", "network", number, what, change, lambda at, now: after[at], more)


def _network(job: Job) -> str:
    """Names the network with the speed of its links, where they were measured."""
    speed = f" ({format_bytes(median(job.links.values()))} a second on a link)" if job.links else ""
    return f"waiting for the network{speed}"


def small_cache(job: Job) -> Finding | None:
    """A cache that leaves many rows to fetch over an even network, where a larger one is forecast to leave fewer."""
    place, named, what = _takes(job, "network", _network(job))
    rank = job.ranks[place]
    forecast = sorted((int(cached), float(left)) for cached, left in rank.about.get("cache_forecast") or ())
    if _slow_link(job) is not None or not forecast or not _bytes_matter(job, place):
        return None
    now = int(rank.about.get("cached_rows") or 0)
    before = next((left for cached, left in reversed(forecast) if cached <= now), forecast[0][1])
    larger = [(cached, left) for cached, left in forecast if cached > now]
    if not larger or not before:
        return None
    most, left = next(((cached, left) for cached, left in larger if left <= before / 2), larger[-1])
    if left > 0.8 * before:
        return None
    total = sum(rank.of(f"rows.{tier}") for tier in ("device", "host", "cache", "remote"))
    what = f"{what.removesuffix('.')}: {rank.of('rows.remote') / max(1, total):.0%} of the rows come from other ranks."
    width = max([0, *(rank.about.get("row_bytes") or {}).values()])
    own = max(1, int(rank.about.get("own_rows") or 1))
    index = own * int(rank.about.get("parts") or 1) // 4  # of cached rows: 8 bytes for 32 vertices
    memory = f'`memory="{rounded_up(most * width + index)}"`, or `' if width else "`"
    change = f"Use a cache of {most:,} rows instead of {now:,}: {memory}replication_factor={most / own:.2g}`."
    more = f"; such a cache is forecast to leave {left:,.0f} of {before:,.0f} remote rows an epoch"
    return _finding(job, "small_cache", "network", named, what, change, lambda at, spent: spent * left / before, more)


def many_bytes(job: Job) -> Finding | None:
    """Many bytes over an even network, where no larger cache is known to help."""
    place, rank, what = _takes(job, "network", _network(job))
    if _slow_link(job) is not None or small_cache(job) is not None or not _bytes_matter(job, place):
        return None
    size = format_bytes(job.ranks[place].of("bytes.received") / max(1, job.ranks[place].batches))
    change = f"Send fewer than {size} a batch: `send_as` or `store_as` float16 halves them, `memory=` adds a cache."
    return _finding(job, "many_bytes", "network", rank, what, change, lambda at, now: now / 2, HALF)


def _bytes_matter(job: Job, place: int) -> bool:
    """True unless the links are known and the bytes of a rank need less than a third of its waiting for the network."""
    transfer = transfer_of(job.ranks[place], job.links)
    return not transfer or transfer >= job.parts[place]["network"] / 3


def messages(job: Job) -> Finding | None:
    """Waiting for messages, although their bytes need little time."""
    place, rank, what = _takes(job, "network", "waiting for messages")
    if _bytes_matter(job, place):
        return None
    transfer = [min(transfer_of(each, job.links), parts["network"]) for each, parts in zip(job.ranks, job.parts)]
    what = f"{what.removesuffix('.')}, though its bytes need {seconds(transfer[place] / max(1, job.ranks[place].batches))}."
    depth = int(job.ranks[place].about.get("depth") or 10)
    deeper = f", and `depth=10` instead of {depth}." if depth < 10 else "."
    change = f"Use a larger `batch_size`, which needs fewer messages{deeper}"
    more = "; batches of twice the size need half as many messages"
    return _finding(job, "messages", "network", rank, what, change, lambda at, now: (now + transfer[at]) / 2, more)


def assembling(job: Job) -> Finding:
    """Batches that take long to put together in the loop's own thread."""
    _, rank, what = _takes(job, "assemble", "putting batches together")
    change = "Use fewer or narrower `columns`, or smaller batches; on a GPU pass `device`."
    return _finding(job, "assembling", "assemble", rank, what, change, lambda at, now: now / 2, HALF)


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


def _training_step(job: Job) -> Finding:
    """The training step, which the loader does not delay."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    batch = seconds(parts["train"] / max(1, rank.batches))
    what = f"The loader is not the bottleneck: the training step takes {batch} a batch, and waiting {_waits(job):.0%} of the epoch."
    change = "Make the step faster: `model = salientpp.nn.trim(model)` computes only the rows that seeds need."
    more = "; a step that takes half as long"
    return _finding(job, "training_step", "train", None, what, change, lambda at, now: now / 2, more)


def _waits(job: Job) -> float:
    """Share of the epoch in which the slowest rank waits for batches."""
    rank = job.ranks[job.slowest]
    return rank.of("wait.seconds") / max(rank.of("seconds"), 1e-9)


def _together(job: Job, found: Sequence[Finding]) -> Finding | None:
    """Returns two parts that shorten the epoch only if both are changed: one may hide behind the other, as on two ranks."""

    def largest(finding: Finding) -> float:
        return max(each[finding.part] for each in job.parts)

    of_parts = {each.part: each for each in sorted(found, key=largest) if each.cause != "uneven"}
    if len(of_parts) < 2:
        return None
    second, first = [*of_parts.values()][-2:]
    expected = job.expected(**{first.part: first.after, second.part: second.after})
    what = f"Two causes hide each other. {first.what} {second.what}"
    change = f"Change both. {first.change} {second.change}"
    how = f"{first.how}; with both changes {seconds(expected)}"
    return Finding("together", None, what, change, expected, how, job.seconds - expected, first.part, first.after)


def _nothing_alone(job: Job) -> Finding:
    """Returns a description of an epoch that waits much, for no single reason."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    batch = max(1, rank.batches)
    longest = sorted((name for name in parts if name not in ("train", "step_wait")), key=lambda name: -parts[name])[:3]
    words = ", ".join(f"{PARTS[name]} {seconds(parts[name] / batch)}" for name in longest)
    what = f"Waiting takes {_waits(job):.0%} of the epoch, for several reasons. A batch needs: {words}."
    change = f"No single change saves {WORTH:.0%}. Larger batches (`batch_size`) need less of such work for each seed."
    return Finding("nothing_alone", None, what, change, None, "", 0.0, "rest", [each["rest"] for each in job.parts])


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
