"""Causes that lie in the network between ranks."""

from __future__ import annotations

from collections import Counter
from statistics import median

from salientpp.display import exact_bytes, format_bytes, round_up
from salientpp.report.finding import HALF, Finding, finding_of, seconds, takes
from salientpp.report.parts import Job, transfer_of

#: A link below this share of the speed of the other links is slow.
SLOW_LINK = 1 / 3


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
    """Returns the finding that the links of one rank are slower than those of the others, or None."""
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
    return finding_of(job, "slow_link", "network", number, what, change, lambda at, now: after[at], more)


def _network(job: Job) -> str:
    """Returns the text "waiting for the network", with the median speed of a link if links were measured."""
    speed = f" ({format_bytes(median(job.links.values()))} a second on a link)" if job.links else ""
    return f"waiting for the network{speed}"


def small_cache(job: Job) -> Finding | None:
    """Returns the finding that a larger cache would leave fewer rows to fetch, or None. No link may be slower than the others."""
    place, named, what = takes(job, "network", _network(job))
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
    memory = f'`memory="{exact_bytes(round_up(most * width + index))}"`, or `' if width else "`"
    change = f"Use a cache of {most:,} rows instead of {now:,}: {memory}replication_factor={most / own:.2g}`."
    more = f"; such a cache is forecast to leave {left:,.0f} of {before:,.0f} remote rows an epoch"
    return finding_of(job, "small_cache", "network", named, what, change, lambda at, spent: spent * left / before, more)


def many_bytes(job: Job) -> Finding | None:
    """Returns the finding that ranks fetch many bytes and no larger cache is known to help, or None. No link may be slower than the others."""
    place, rank, what = takes(job, "network", _network(job))
    if _slow_link(job) is not None or small_cache(job) is not None or not _bytes_matter(job, place):
        return None
    size = format_bytes(job.ranks[place].of("bytes.received") / max(1, job.ranks[place].batches))
    change = f"Send fewer than {size} a batch: `send_as` or `store_as` float16 halves them, `memory=` adds a cache."
    return finding_of(job, "many_bytes", "network", rank, what, change, lambda at, now: now / 2, HALF)


def _bytes_matter(job: Job, place: int) -> bool:
    """True if the bytes of a rank explain a third or more of its waiting for the network, or if the speeds of links are unknown."""
    transfer = transfer_of(job.ranks[place], job.links)
    return not transfer or transfer >= job.parts[place]["network"] / 3


def messages(job: Job) -> Finding | None:
    """Returns the finding that ranks wait for messages although the bytes need little time, or None."""
    place, rank, what = takes(job, "network", "waiting for messages")
    if _bytes_matter(job, place):
        return None
    transfer = [min(transfer_of(each, job.links), parts["network"]) for each, parts in zip(job.ranks, job.parts)]
    what = f"{what.removesuffix('.')}, though its bytes need {seconds(transfer[place] / max(1, job.ranks[place].batches))}."
    depth = int(job.ranks[place].about.get("depth") or 10)
    deeper = f", and `depth=10` instead of {depth}." if depth < 10 else "."
    change = f"Use a larger `batch_size`, which needs fewer messages{deeper}"
    more = "; batches of twice the size need half as many messages"
    return finding_of(job, "messages", "network", rank, what, change, lambda at, now: (now + transfer[at]) / 2, more)
