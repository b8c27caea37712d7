"""Compares batches element for element, and names the values that differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for each tensor and plain value inside a batch. A path looks like ``"paper/x"``.

    Yields (path, (type, length)) for each container too, so that empty containers are compared.
    """
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, (dict, list, tuple)):
        yield f"{at}[]", (type(value).__name__, len(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{at}/{key}" if at else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{at}/{number}" if at else str(number))
    elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
        yield from _leaves(vars(value), f"{at}/{type(value).__name__}")
    else:
        yield at, value


def differences(ours: Any, want: Any) -> list[str]:
    """Returns the paths of values that differ between two batches, such as ``"paper/x"``. Values of another type, dtype or shape differ too."""
    found, expected = dict(_leaves(ours)), dict(_leaves(want))
    wrong = sorted(found.keys() ^ expected.keys())
    for at in sorted(found.keys() & expected.keys()):
        one, other = found[at], expected[at]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        else:
            same = type(one) is type(other) and one == other
        wrong += [] if same else [at]
    return wrong


def compare(ours: Iterable[Any], want: Iterable[Any]) -> list[str]:
    """Compares two series of batches, one after another. Returns the differences as texts, empty if there are none."""
    wrong: list[str] = []
    for number, (one, other) in enumerate(itertools.zip_longest(ours, want)):
        if one is None or other is None:
            return [*wrong, f"{number} batches, then only {'ours' if other is None else 'theirs'}"]
        wrong += [f"batch {number}: {at}" for at in differences(one, other)]
    return wrong


# --- random cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Error that says why the package refuses a random case."""

    text: str


#: Result of a random case. None: it is right. A text: what is wrong.
Outcome = Refused | str | None


def judge(found: Sequence[Sequence[Any]]) -> None:
    """Fails the test if a case has failed on a rank, or only some ranks refuse it. Skips the test if all cases are refused.

    ``found`` has (case, outcome on each rank) for each case.
    """
    for case, *outcomes in found:
        wrong = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        if not wrong and len({isinstance(outcome, Refused) for outcome in outcomes}) > 1:
            wrong = [f"only some ranks refuse: {outcomes}"]
        if wrong:
            pytest.fail(
                "\n".join([f"a case fails; to run it alone, set first = {case.seed} and cases = 1", str(case), *wrong]),
                pytrace=False,
            )
    if all(isinstance(outcome, Refused) for _, *outcomes in found for outcome in outcomes):
        pytest.skip(f"every case is refused: {found[0][1].text}")
