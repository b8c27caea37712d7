"""Findings: what a cause is said to be, what would change it, and how long the epoch would then take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from salientpp.report.parts import PARTS, Job

#: Smallest share of the epoch that a finding must save. A second finding that saves this share of the first's savings is told too.
WORTH, NEAR = 0.1, 0.7
HALF = "; half the bytes take half the time"


@dataclass(frozen=True)
class Finding:
    """One cause of a long epoch.

    Attributes:
        cause: name of the function that found the cause.
        rank: the rank that is slowed down most, or None if all are.
        what: a sentence that says what takes how long. ``change``: a sentence that says what would change it.
        expected: seconds of the epoch after this change; None if they are not known.
        how: formula of ``expected``, with numbers.
        saved: seconds that the change is worth, by which findings are ordered.
        part: the part of the epoch that changes. ``after``: its seconds on each rank afterwards.
        least: seconds that the epoch needs at least after the change, whatever else changes.
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
    least: float = 0.0


def seconds(number: float) -> str:
    """Writes seconds with two or three digits: 41 s, 0.31 s, 2.5 ms."""
    if number >= 9.95:
        return f"{number:,.0f} s"
    return f"{number:.2g} s" if number >= 0.0995 or number == 0 else f"{number * 1e3:.2g} ms"


def slow_ranks(job: Job, part: str) -> tuple[int, list[int]]:
    """Returns the index in ``job.ranks`` of the rank on which a part takes longest, and the indices of all ranks that are about as slow.

    If the part takes about as long on the slowest rank of the whole epoch, that rank is returned first.
    """
    values = [each[part] for each in job.parts]
    place = job.slowest if values[job.slowest] >= 0.6 * max(values) else values.index(max(values))
    return place, [at for at, value in enumerate(values) if value >= 0.6 * values[place]]


def takes(job: Job, part: str, name: str) -> tuple[int, int | None, str]:
    """Returns the index in ``job.ranks`` of the rank that a part slows down most, its number, and a sentence about it.

    The number is None if all ranks are about as slow. ``name`` is the part's name in the sentence.
    """
    place, slow = slow_ranks(job, part)
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


def finding_of(
    job: Job, cause: str, part: str, rank: int | None, what: str, change: str,
    left: Callable[[int, float], float] = lambda place, now: 0.0, more: str = "", least: float = 0.0,
) -> Finding:  # fmt: skip
    """Returns a finding that forecasts the epoch with a shorter part.

    ``left(place, now)`` returns the part's seconds after the change, for the rank with index ``place`` and ``now`` seconds today. ``more`` explains them.
    """
    after = [left(place, each[part]) for place, each in enumerate(job.parts)]
    alone = job.expected(**{part: after})
    expected = min(job.seconds, max(alone, least))
    place, _ = slow_ranks(job, part)
    now, then = job.parts[place][part], after[place]
    how = f"{seconds(job.seconds)} - ({seconds(now)} - {seconds(then)} of {PARTS[part]}){more}"
    if job.seconds - alone < 0.99 * (now - then):
        how += f"; another rank or part then needs {seconds(alone)}"
    if alone < expected:
        how += f"; at least {seconds(expected)}"
    return Finding(cause, rank, what, change, expected, how, job.seconds - expected, part, after, least)
