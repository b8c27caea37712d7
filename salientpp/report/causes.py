"""Says which rank and which part of an epoch is the bottleneck, what would change it, and how much.

Each cause is a function of :data:`CAUSES`. It returns a finding, or None if the numbers do not show this cause. A function
forecasts the epoch without its cause by :meth:`~salientpp.report.parts.Job.expected`, with fewer seconds for one part of the
epoch. A finding that saves less than ``WORTH`` of the epoch is dropped. If none is left, the training step is the
bottleneck, or two causes hide each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from salientpp.report.finding import NEAR, WORTH, Finding, finding_of, seconds
from salientpp.report.network import many_bytes, messages, slow_link, small_cache
from salientpp.report.own_work import assembling, rows, sampling, seeds, transform, uneven
from salientpp.report.parts import PARTS, Job

#: Fewest batches of a rank that say something.
FEW = 10
#: Steps of ranks are about equal if the shortest takes this share of the longest.
EQUAL = 0.8


@dataclass(frozen=True)
class Verdict:
    """The answer of a report: what slows the epoch down, and what would change it.

    Attributes:
        sentences: the answer as text, at most three sentences for each finding in it.
        findings: all findings, the most important first.
    """

    sentences: Sequence[str]
    findings: Sequence[Finding]


def verdict_of(job: Job, epochs: int = 1) -> Verdict:
    """Returns what would shorten the epoch of a job. ``epochs``: number of epochs of which the job's numbers are means."""
    most = max(rank.batches for rank in job.ranks)
    if most * epochs < FEW:
        return _probably(job, most)
    found = _merged(job, [finding for cause in CAUSES if (finding := cause(job)) is not None])
    findings = sorted(filter(partial(_is_worth, job), found), key=lambda each: each.saved, reverse=True)
    if not findings and _waits(job) < 2 * WORTH:
        findings = [_training_step(job)]
    elif not findings:
        both = _together(job, found)
        findings = [both if both is not None and _is_worth(job, both) else _nothing_alone(job)]
    told = [each for each in findings if each.saved >= NEAR * findings[0].saved][:2] or findings[:1]
    sentences = _sentences(job, told[0])
    if len(told) == 2:
        first, *rest = _sentences(job, told[1])
        sentences += [f"Nearly as large: {first[0].lower() + first[1:]}", *rest]
    return Verdict(sentences, findings)


def _probably(job: Job, most: int) -> Verdict:
    """Returns the verdict on an epoch that is too short for a sure answer: its largest part, and how to measure longer."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    few = f"An epoch of {most} {'batch' if most == 1 else 'batches'} a rank is too short for a sure answer"
    largest = max(parts, key=lambda name: parts[name])
    if parts[largest] > 0 and rank.batches:
        takes, all_of = (seconds(each / rank.batches) for each in (parts[largest], rank.of("seconds")))
        there = f" on rank {rank.number}" if len(job.ranks) > 1 else ""
        few += f"; the largest part is probably `{PARTS[largest]}`: {takes} of {all_of} a batch{there}"
    sure = "Train more epochs, or use a smaller `batch_size` for this measurement"
    return Verdict([f"{few}.", f"{sure}: a sure answer needs {FEW} batches or more after the first epoch."], [])


def _merged(job: Job, found: Sequence[Finding]) -> list[Finding]:
    """Joins findings that advise the same change for different parts of the epoch into one, with the savings of both."""
    merged: dict[str, Finding] = {}
    for finding in found:
        other = merged.get(finding.change)
        if other is None or other.part == finding.part:
            merged[finding.change if other is None else f"{finding.change} {finding.cause}"] = finding
            continue
        expected = _with_both(job, other, finding)
        first, second = sorted((other, finding), key=lambda each: each.saved, reverse=True)
        what = f"{first.what} {second.what}" if second.saved >= WORTH * first.saved else first.what
        how = f"{first.how}; with both parts {seconds(expected)}"
        rank = first.rank if first.rank == second.rank else None
        merged[finding.change] = replace(
            first, what=what, how=how, rank=rank, expected=expected, saved=job.seconds - expected
        )
    return list(merged.values())


def _with_both(job: Job, one: Finding, other: Finding) -> float:
    """Returns the seconds of the epoch that are expected if the changes of two findings, for different parts, are both made."""
    expected = job.expected(**{one.part: one.after, other.part: other.after})
    return min(job.seconds, max(expected, one.least, other.least))


def _is_worth(job: Job, finding: Finding) -> bool:
    return finding.saved > 0 and finding.saved >= WORTH * job.seconds


def _sentences(job: Job, finding: Finding) -> list[str]:
    words = [finding.what, finding.change]
    if finding.expected is not None:
        condition = " if a step takes half as long" if finding.cause == "training_step" else ""
        words.append(f"Expected: an epoch of {seconds(finding.expected)} instead of {seconds(job.seconds)}{condition}.")
    return words


def _training_step(job: Job) -> Finding:
    """Returns the finding that the training step is the bottleneck, not the loader."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    batch = seconds(parts["train"] / max(1, rank.batches))
    what = f"The loader is not the bottleneck: the training step takes {batch} a batch, and waiting {_waits(job):.0%} of the epoch."
    change = "Make the step faster: `model = salientpp.nn.trim(model)` computes only the rows that seeds need, if the model is not trimmed yet."
    steps = [each.of("step.seconds") / each.batches for each in job.ranks if each.batches]
    if len(steps) > 1 and min(steps) >= EQUAL * max(steps):
        change += " If ranks average gradients in it, one slow rank makes all steps look equal: time forward and backward on each rank."
    more = "; a step that takes half as long"
    return finding_of(job, "training_step", "train", None, what, change, lambda at, now: now / 2, more)


def _waits(job: Job) -> float:
    """Share of the epoch in which the slowest rank waits for batches."""
    rank = job.ranks[job.slowest]
    return rank.of("wait.seconds") / max(rank.of("seconds"), 1e-9)


def _together(job: Job, found: Sequence[Finding]) -> Finding | None:
    """Returns a finding of two changes that save time only together, as when each slows another rank. None if fewer than two parts have findings."""

    def largest(finding: Finding) -> float:
        return max(each[finding.part] for each in job.parts)

    of_parts = {each.part: each for each in sorted(found, key=largest) if each.cause != "uneven"}
    if len(of_parts) < 2:
        return None
    second, first = [*of_parts.values()][-2:]
    expected = _with_both(job, first, second)
    what = f"Two causes hide each other. {first.what} {second.what}"
    change = f"Change both. {first.change} {second.change}"
    how = f"{first.how}; with both changes {seconds(expected)}"
    return Finding("together", None, what, change, expected, how, job.seconds - expected, first.part, first.after)


def _nothing_alone(job: Job) -> Finding:
    """Returns the finding that the loop waits long, but no single change would help."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    batch = max(1, rank.batches)
    waits = [name for name in parts if name not in ("train", "step_wait") and parts[name] > 0]
    longest = sorted(waits, key=lambda name: -parts[name])[:3]
    words = ", ".join(f"{PARTS[name]} {seconds(parts[name] / batch)}" for name in longest)
    what = f"Waiting takes {_waits(job):.0%} of the epoch, for several reasons."
    what += f" A batch needs: {words}." if words else ""
    change = f"No single change saves {WORTH:.0%}. Larger batches (`batch_size`) need less of such work for each seed."
    return Finding("nothing_alone", None, what, change, None, "", 0.0, "rest", [each["rest"] for each in job.parts])


#: Every cause. A further one is a function here.
CAUSES: Sequence[Callable[[Job], Finding | None]] = (
    transform,
    seeds,
    sampling,
    rows,
    slow_link,
    small_cache,
    many_bytes,
    messages,
    uneven,
    assembling,
)
