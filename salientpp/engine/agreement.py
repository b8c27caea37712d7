"""Checks that the ranks which construct a loader together passed matching arguments. Either all ranks get a loader, or all get an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.ranks.facts import check_same
from salientpp.ranks.greeting import check_names


@dataclass(frozen=True)
class Facts:
    """Facts about one rank's loader, as JSON values. All ranks compare them when they construct a loader together.

    Attributes:
        seed: the user's random seed. If the user gave none, a seed that this rank drew; only the one that rank 0 drew may be used.
        seeds: entries [first part, one past the last part, number of seeds, digest] of the rank's seeds. There is one entry for all of the rank's parts,
            or one for each of them. Ranks that share a part have the same entries.
        fills_cache: True if the rank has a cache to fill with rows of other ranks.
        traces: True if the rank writes the spans of its epochs to a file.
        same: the values that must be the same on all ranks, by name.
        least_label: sign of the smallest label of the rank's seeds: -1, 0 or 1. None: the seeds have no labels.
    """

    seed: int
    seed_is_given: bool
    seeds: list[list[Any]]
    fills_cache: bool
    traces: bool
    same: dict[str, Any]
    least_label: int | None = None


def check_facts(everyone: Sequence[Facts], of: str) -> None:
    """Checks the facts of all ranks, in the order of the ranks. ``of`` names their group in errors.

    Raises:
        ValueError: two ranks differ where they must agree.
        DifferentVersions: the ranks have different options.
    """
    first, same = everyone[0], [each.same for each in everyone]
    check_names(same, of)
    check_same(same, of)
    for rank, facts in enumerate(everyone):
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
