"""Checks that the ranks which construct a loader together passed matching arguments. Either all ranks get a loader, or all get an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.ranks.comm import Comm
from salientpp.ranks.greeting import check_names


@dataclass(frozen=True)
class Facts:
    """Facts about one rank's loader, as JSON values.

    Attributes:
        seed: the user's random seed. If the user gave none, a seed that this rank drew; only the one that rank 0 drew may be used.
        seeds: entries [first part, one past the last part, number of seeds, digest] of the rank's seeds. There is one entry for all of the rank's parts,
            or one for each of them. Ranks that share a part have the same entries.
        fills_cache: True if the rank has a cache to fill with rows of other ranks.
        same: the values that must be the same on all ranks, by name.
        least_label: sign of the smallest label of the rank's seeds: -1, 0 or 1. None: the seeds have no labels.
    """

    seed: int
    seed_is_given: bool
    seeds: list[list[Any]]
    fills_cache: bool
    same: dict[str, Any]
    least_label: int | None = None


def exchange_facts(comm: Comm, facts: Facts | None, error: Exception | None) -> list[Facts]:
    """Gathers the facts of all ranks, in the order of the ranks. Collective. ``facts`` is None if ``error`` prevented a loader.

    Raises:
        ValueError: on every rank, if a rank could not construct its loader, or if two ranks differ where they must agree. On the rank that could not
            construct its loader, ``error`` itself is raised.
        DifferentVersions: the ranks have different options.
    """
    try:
        everyone = comm.gather_facts({} if facts is None else vars(facts), error)
    finally:
        error = None  # otherwise this frame and the traceback would keep each other alive
    told = [Facts(**theirs) for theirs in everyone]
    check_names([each.same for each in told], comm.of)
    _check_same(told, comm.of)
    return told


def _check_same(everyone: Sequence[Facts], of: str) -> None:
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        for name, value in facts.same.items():
            if value != first.same[name]:
                raise ValueError(
                    f"all ranks must have the same {name}, got {first.same[name]} on rank 0 and {value} on rank {rank}{of}"
                )
        if facts.seed_is_given and facts.seed != first.seed:
            theirs = first.seed if first.seed_is_given else f"none (so {first.seed} was drawn)"
            raise ValueError(
                f"all ranks must have the same seed, got {theirs} on rank 0 and {facts.seed} on rank {rank}{of}"
            )
    leaders: dict[tuple[int, int], tuple[int, list[Any]]] = {}
    for rank, facts in enumerate(everyone):
        for first, last, *seeds in facts.seeds:
            leader, expected = leaders.setdefault((first, last), (rank, seeds))
            if seeds != expected:
                raise ValueError(
                    f"ranks that share a part share its seeds, so they must pass the same input_nodes, but rank {leader} and rank {rank}{of}, "
                    f"both of part {first}, pass different ones"
                )
