"""Computes the numbers of an epoch where no record has them: sums of the spans of an unfinished epoch, and means of several short epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """Time that one rank spent on one batch.

    Attributes:
        name: a stage, or 'next', 'train', 'transform', 'draw', 'gather' or 'peers'.
        track: 'main', or the name of a thread.
        batch: number of the batch in its epoch.
        start: seconds since 1970, by the clock of the rank's host.
    """

    name: str
    track: str
    batch: int
    start: float
    seconds: float


#: Names of spans whose sums have other names among the numbers of an epoch than those of stages.
_SUMS = {
    "next": "wait.seconds",
    "train": "step.seconds",
    "transform": "transform.seconds",
    "peers": "peers.seconds",
    "draw": "work.draw.seconds",
    "gather": "work.gather.seconds",
}


def numbers_of_spans(spans: Sequence[Span]) -> tuple[dict[str, float], int]:
    """Returns the numbers of an unfinished epoch that can be computed from its spans, and ``every``: one batch in this number has spans.

    If batches are short, a loader records only every second, fourth, ... batch. A recorded batch then counts as all batches up to the next.
    """
    asked = [span for span in spans if span.name == "next"]
    steps = sorted({span.batch for span in asked})
    counts = [after - step for step, after in pairwise(steps)] + [1]
    ahead = counts[-2] if len(steps) > 1 else 1  # for batches that the loop has not asked for

    def count(batch: int) -> int:
        if not steps or batch > steps[-1]:
            return ahead
        return counts[max(0, bisect_right(steps, batch) - 1)]

    found = dict.fromkeys(_SUMS.values(), 0.0)
    for span in spans:
        name = _SUMS.get(span.name, f"stage.{span.name}.seconds")
        found[name] = found.get(name, 0.0) + span.seconds * count(span.batch)
    found["stage.assemble.seconds"] = found.get("stage.assemble.seconds", 0.0) + found["transform.seconds"]
    begun = min((span.start for span in asked), default=0.0)
    seconds = max((span.start + span.seconds for span in asked), default=0.0) - begun
    batches = sum(count(span.batch) for span in asked)
    share = found["wait.seconds"] / seconds if seconds > 0 else 0.0
    every = round(batches / len(asked)) if asked else 1
    return found | {"batches": batches, "seconds": seconds, "wait.share": share}, every


def mean_of(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the numbers of a mean epoch: means of seconds, rows, bytes and batches. Other numbers, such as memory, come from the last epoch."""
    mean = dict(epochs[-1])
    for name in mean:
        if name.endswith("seconds") or name.startswith(("rows.", "bytes.")) or name in ("batches", "seeds"):
            mean[name] = sum(each.get(name, 0.0) for each in epochs) / len(epochs)
    if mean.get("seconds"):
        rates = {"wait.share": "wait.seconds", "batches_per_second": "batches", "seeds_per_second": "seeds"}
        mean |= {
            name: mean[amount] / mean["seconds"] for name, amount in rates.items() if name in mean and amount in mean
        }
    return mean


def words_of_epochs(numbers: Sequence[int]) -> str:
    """Writes numbers of epochs: 1 to 5, or 1, 3, 4."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
