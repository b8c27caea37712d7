"""Which options of the loaders cannot be given together, each pair with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: (an option, one that it excludes) -> why.
EXCLUDED: Mapping[tuple[str, str], str] = {
    ("lookahead", "transform_sampler_output"): "it may change the vertices that a batch needs after they were foreseen",
    ("partial_aggregation", "lookahead"): "a cache that looks ahead decides after the sums which rows it has",
    ("partial_aggregation", "pad"): "its sums would be as many as before",
    ("partial_aggregation", "transform_sampler_output"): "it may change what was sampled, and sums are of that",
    ("partial_aggregation", "send_as"): "it sums rows as they are",
}


def check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError if options that exclude each other were given.

    Args:
        values: of the options that can be given, by name.
    """
    for one, other in EXCLUDED:
        if _is_given(values[one]) and _is_given(values[other]):
            value = values[one]
            given = f"={value!r}" if isinstance(value, (int, float, str)) else "="
            raise ValueError(f"{one}{given} excludes {other}=: {EXCLUDED[one, other]}; leave one of them out")


def _is_given(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float, str, Mapping)) else value is not None
