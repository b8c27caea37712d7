"""Conversions of models, each with a law for random models and a way to draw models for it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

from random_cases import distributed_models, inferred, merged, trimmed, typed
from random_cases.models import Case, Failure, Invalid, Outcome, Refused, script_of, shrunk


@dataclass(frozen=True)
class Target:
    """Conversion of models.

    Attributes:
        case_of: returns the random case of an integer.
        outcome_of: runs a case.
    """

    case_of: Callable[[int], Case]
    outcome_of: Callable[[Case], Outcome]


TARGETS = {
    "trim": Target(trimmed.case_of, trimmed.outcome_of),
    "distributed": Target(distributed_models.case_of, distributed_models.outcome_of),
    "inferred": Target(inferred.case_of, inferred.outcome_of),
    "typed": Target(typed.case_of, typed.outcome_of),
    "merged": Target(merged.case_of, merged.outcome_of),
}


def fails(case: Case) -> bool:
    """Returns True if a case fails."""
    try:
        return isinstance(TARGETS[case.target].outcome_of(case), Failure)
    except Invalid:
        return False


def run(name: str, seeds: range, show: Callable[[int, str], None]) -> int:
    """Runs the cases of some integers, and prints what it found. ``show`` gets the seeds and scripts of failures. Returns their number."""
    target = TARGETS[name]
    others: dict[str, collections.Counter[str]] = {"invalid": collections.Counter(), "refused": collections.Counter()}
    found: dict[tuple[str, ...], list[int]] = {}
    for seed in seeds:
        case = target.case_of(seed)
        try:
            outcome = target.outcome_of(case)
        except Invalid as error:
            others["invalid"][str(error)[:150]] += 1
            continue
        if isinstance(outcome, Refused):
            others["refused"][outcome.text[:150]] += 1
        if not isinstance(outcome, Failure):
            continue
        small = shrunk(case, fails)
        is_new = small.kinds not in found
        found.setdefault(small.kinds, []).append(seed)
        if is_new:
            print(f"seed {seed}: {outcome}\n    {' | '.join(small.kinds)}: {target.outcome_of(small)}", flush=True)
            show(seed, script_of(small))
    failed = sum(map(len, found.values()))
    counts = ", ".join(f"{sum(counter.values())} {what}" for what, counter in others.items())
    print(f"{name}: {len(seeds)} models, {failed} failed, {counts}", flush=True)
    for what, counter in others.items():
        for text, count in counter.most_common(25):
            print(f"  {what} {count}: {text}")
    return failed
