"""Says which rank and which part of an epoch is the bottleneck, what would change it, and how much.

Each cause is a function of :data:`CAUSES` that returns a finding, or None where the numbers do not show this cause. The
causes forecast the epoch with :meth:`~salientpp.report.parts.Job.expected`, from other seconds for one part of the
epoch. A finding that saves less than ``WORTH`` of the epoch is dropped. If nothing is left, the training step is the
bottleneck, or two causes hide each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from salientpp.report.finding import Finding, finding_of, seconds
from salientpp.report.network import many_bytes, messages, slow_link, small_cache
from salientpp.report.own_work import assembling, rows, sampling, transform, uneven
from salientpp.report.parts import PARTS, Job

#: Smallest share of the epoch that a finding must save. A second finding that saves this share of the first's savings is told too.
WORTH, NEAR = 0.1, 0.7
#: Fewest batches of a rank that say something.
FEW = 10


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


def _training_step(job: Job) -> Finding:
    """The training step, which the loader does not delay."""
    rank, parts = job.ranks[job.slowest], job.parts[job.slowest]
    batch = seconds(parts["train"] / max(1, rank.batches))
    what = f"The loader is not the bottleneck: the training step takes {batch} a batch, and waiting {_waits(job):.0%} of the epoch."
    change = "Make the step faster: `model = salientpp.nn.trim(model)` computes only the rows that seeds need."
    more = "; a step that takes half as long"
    return finding_of(job, "training_step", "train", None, what, change, lambda at, now: now / 2, more)


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
