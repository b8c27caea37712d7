"""Checks that the ranks which make a loader together agree: all get a loader, or all get an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.ranks.comm import Comm
from salientpp.ranks.greeting import check_names


@dataclass(frozen=True)
class Facts:
    """What one rank says of its loader; JSON values.

    Attributes:
        seed: given, or drawn for the case that rank 0 has none either.
        seeds: [first part, one past the last, number, digest] of the seeds that the rank has, of each of its parts, or of all these together. Ranks that
            share a part have the same.
        fills_cache: it wants rows of others for a cache.
        same: name -> what all ranks must have the same.
        least_label: the sign of the least label of the rank's seeds: -1, 0 or 1; None without labels.
    """

    seed: int
    seed_is_given: bool
    seeds: list[list[Any]]
    fills_cache: bool
    same: dict[str, Any]
    least_label: int | None = None


def exchange_facts(comm: Comm, facts: Facts | None, error: Exception | None) -> list[Facts]:
    """Every rank's facts, by rank. Collective; ``facts`` is None where ``error`` says why.

    Raises:
        ValueError: a rank could not make its loader, or two ranks differ in what must be the same; on every rank. Where this rank is the one
            that could not, ``error`` itself.
        DifferentVersions: the ranks have different options.
    """
    try:
        everyone = comm.gather_facts({} if facts is None else vars(facts), error)
    finally:
        error = None  # else this frame and the traceback would hold each other
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
                    f"the ranks of a part share its seeds, so all must give the same input_nodes, but rank {leader} and rank {rank}{of}, "
                    f"both of part {first}, give different ones"
                )
