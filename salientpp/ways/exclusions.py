"""Which options of the loaders cannot be given together, each pair with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOVES = "rows of a cache that looks ahead change from batch to batch, in this loader's own memory on the host"

#: (an option, one that it excludes) -> why.
EXCLUDED: Mapping[tuple[str, str], str] = {
    ("cache", "replication_factor"): "the size of a given cache is its maker's",
    ("cache", "device_cache"): "a given cache has its device rows from its maker",
    ("lookahead", "cache"): _MOVES,
    ("lookahead", "zero_copy"): _MOVES,
    ("lookahead", "device_cache"): _MOVES,
    ("lookahead", "transform_sampler_output"): "it may change the vertices that a batch needs after they were foreseen",
    ("lookahead", "ranks_per_host"): "the cache follows the batches of one rank, and those of a host would share it",
    ("partial_aggregation", "lookahead"): "a cache that looks ahead decides after the sums which rows it has",
    ("partial_aggregation", "join_logical_ranks"): "the last hops of joined batches do not stand together",
    ("partial_aggregation", "pad"): "its sums would be as many as before",
    ("partial_aggregation", "transform_sampler_output"): "it may change what was sampled, and sums are of that",
    ("partial_aggregation", "send_as"): "it sums rows as they are",
}

#: Excluded only where hosts have several ranks, which :func:`salientpp.ways.hosts.agree_on_hosts` finds out.
_LATER = ("lookahead", "ranks_per_host")


def check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError if options that exclude each other were given.

    Args:
        values: of the options that can be given, by name.
    """
    for one, other in EXCLUDED:
        if (one, other) != _LATER and _is_given(values[one]) and _is_given(values[other]):
            raise ValueError(excludes(one, values[one], other))


def excludes(one: str, value: Any, other: str) -> str:
    """The words of the error for a pair of the table, of which the first option has ``value``."""
    given = f"={value!r}" if isinstance(value, (int, float, str)) else "="
    return f"{one}{given} excludes {other}=: {EXCLUDED[one, other]}; leave one of them out"


def _is_given(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float, str, Mapping)) else value is not None
