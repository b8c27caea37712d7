"""Checks of single option values of the loaders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from salientpp.arguments import as_amount, as_integer, as_real
from salientpp.engine.option import Check
from salientpp.engine.way import Way
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.suggestions import did_you_mean
from salientpp.vip.policies import Policy, check_policy, check_replication_factor
from salientpp.ways.planner.machines import Machines

#: Names of the methods that change batches. A plan may use them only if the entry ``allow`` of ``memory`` names them.
ALLOWED = ("sums",)


def check_policy_option(name: str, value: Any) -> Policy:
    check_policy(value)
    return value


def check_alpha(name: str, value: Any) -> float | int:
    if not isinstance(value, str):
        return check_replication_factor(value)
    num_bytes = as_amount(value)
    if num_bytes is None:
        raise ValueError(
            f"{name} must be >= 0 (a number α, which caches α N / K rows, or an amount of memory such as '2GiB'), got {value!r}"
        )
    return num_bytes


def check_cache(name: str, value: Any) -> FeatureCache | TypedFeatureCache | None:
    if value is not None and not isinstance(value, (FeatureCache, TypedFeatureCache)):
        raise TypeError(f"{name} must be the cache of another loader (loader.cache), got {type(value).__name__}")
    return value


def check_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is not None and not isinstance(value, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype (dtype of delivered x) or None, got {value!r}")
    return value


def one_of(expected: str, *words: str) -> Check:
    """Returns a check that accepts None and these ``words``. The error says ``expected``, a description of them."""

    def check(name: str, value: Any) -> Any:
        if value is not None and (not isinstance(value, str) or value not in words):
            raise ValueError(f"{name} must be {expected}, got {value!r}{did_you_mean(value, words)}")
        return value

    return check


def check_sigma(name: str, value: Any) -> float:
    number = as_real(value)
    if number is None or not 0 <= number <= 1000:  # sizes of much larger numbers fit in no memory
        raise ValueError(
            f"{name} must be a number in [0, 1000] (standard deviations above the expected size), got {value!r}"
        )
    return number


def check_seed(name: str, value: Any) -> int | None:
    if value is not None and as_integer(value) is None:
        raise ValueError(f"{name} must be an integer or None, got {value!r}")
    return None if value is None else as_integer(value)


def check_ways(name: str, value: Any) -> Sequence[Way]:
    if not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of objects of salientpp.engine.way.Way, got {type(value).__name__}")
    for way in value:
        if not isinstance(way, Way):
            raise TypeError(f"{name} must contain objects of salientpp.engine.way.Way, got {type(way).__name__}")
    return value


def budget(where: str) -> Check:
    """Returns a check for a budget of bytes, or None; ``where`` describes the memory in the error."""

    def check(name: str, value: Any) -> int | None:
        number = as_amount(value) if isinstance(value, str) else as_integer(value)
        if value is not None and (not isinstance(number, int) or not 0 <= number < 2**63):
            raise ValueError(
                f"{name} must be a number of bytes >= 0 and < 2^63 of {where}, such as '8GiB', or None, got {value!r}"
            )
        return None if value is None else int(number)  # type: ignore[arg-type]

    return check


def check_machines(name: str, value: Any) -> Machines | None:
    if value is None or isinstance(value, Machines):
        return value
    if not isinstance(value, (str, Path)):
        raise TypeError(
            f"{name} must be the path of a file that salientpp calibrate wrote, a Machines, or None, got {type(value).__name__}"
        )
    try:
        return Machines.read(value)
    except OSError as error:
        raise ValueError(
            f"{name} must be the path of a file that salientpp calibrate wrote, got {str(value)!r} ({error.strerror}); run salientpp calibrate, "
            "or leave it out"
        ) from error


def check_allow(name: str, value: Any) -> tuple[str, ...]:
    words = ", ".join(map(repr, ALLOWED))
    if isinstance(value, str) or not isinstance(value, (Sequence, set, frozenset)):
        raise TypeError(f"{name} must be a list of methods ({words}), got {value!r}")
    wrong = [each for each in value if each not in ALLOWED]
    if wrong:
        raise ValueError(f"{name} may contain {words} (methods that change batches), got {wrong[0]!r}")
    return tuple(each for each in ALLOWED if each in value)
