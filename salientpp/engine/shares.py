"""Decides which seeds become which batches, and in what order a rank delivers them."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from salientpp.engine.agreement import Facts
from salientpp.engine.source import BatchSource
from salientpp.engine.state import inputs_digest
from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import Schedule, Turns, share_size

#: (first part, one past the last part) -> (number of seeds of these parts, digest of these seeds).
SeedsByPart = Mapping[tuple[int, int], tuple[int, str]]


def seeds_of_parts(source: BatchSource, placement: Placement, split: str | None) -> list[list[Any]]:
    """Returns entries [first part, one past the last part, number of seeds, digest], by which the ranks compare their seeds (:attr:`Facts.seeds`).

    Args:
        split: name of the stored split if the seeds are one; it then stands in for the digest.
    """
    seeds, parts = source.seeds, placement.own_parts
    if not parts:  # a storage rank
        return []

    def words(at: Tensor | None) -> str:
        return inputs_digest(seeds.inputs, at) if split is None else f"split {split}"

    if seeds.part_of is None or len(parts) == 1:
        return [[parts.start, parts.stop, seeds.number, words(None)]]
    part_of = seeds.part_of()
    some = {part: (part_of == part).nonzero().flatten() for part in parts}
    return [[part, part + 1, at.numel(), words(at)] for part, at in some.items()]


def seeds_by_part(everyone: Sequence[Facts]) -> SeedsByPart:
    """Collects what the ranks' facts say about seeds: (first part, end) -> (number of seeds, digest)."""
    return {(first, last): (number, words) for facts in everyone for first, last, number, words in facts.seeds}


@dataclass(frozen=True, eq=False)
class Shares:
    """Divides the seeds into batches of logical ranks, by the loader's options.

    Attributes:
        seeds: the seeds of all ranks.
        joined: True if batch i of all logical ranks of a rank is delivered as one batch.
        alone: True if this process does not wait for the processes that share its seeds.
        num_given: number of batches of each logical rank, if the user's sampler gives it instead of a batch size.
    """

    source: BatchSource
    seeds: SeedsByPart
    batch_size: int
    shuffle: bool
    drop_last: bool
    uneven: str
    joined: bool
    alone: bool
    num_given: int | None = None

    def order(self, placement: Placement, seed: int) -> Turns:
        """Returns the seeds of this rank's batches, in the order in which it delivers the batches."""
        sizes = self._sizes(placement)
        per_unit = placement.logical_ranks_per_unit
        numbers = [share_size(size, place, per_unit) for size in sizes for place in range(per_unit)]
        schedules = {
            logical_rank: Schedule(
                num_seeds=sizes[placement.unit_of(logical_rank)],
                unit=placement.unit_of(logical_rank),
                place=placement.place_of(logical_rank),
                logical_ranks_per_unit=per_unit,
                seeds_per_logical_rank=numbers,
                logical_rank=logical_rank,
                batch_size=self.batch_size,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
                uneven=self.uneven,
                seed=seed,
                kind=_kind(placement),
                num_given=self.num_given,
            )
            for logical_rank in placement.logical_ranks or range(1)
        }
        ranks = [placement.rank] if self.alone else range(placement.world_size)
        logical_ranks = [placement.logical_ranks_of(rank) for rank in ranks]
        own = [schedules[logical_rank] for logical_rank in placement.logical_ranks]
        another = None if own else schedules[0]
        return Turns(own, logical_ranks, self.joined, self._positions_by_unit(placement), another)

    def with_logical_ranks(self, placement: Placement, logical_ranks: int, seed: int) -> tuple[Placement, Turns]:
        """Returns the placement and the order with which this rank continues a saved state, given the state's seed and number of logical ranks.

        Raises:
            ValueError: this number does not fit the ranks, parts or seeds, or some rank would serve other parts.
        """
        try:
            found = dataclasses.replace(placement, num_logical_ranks=logical_ranks)
            order = self.order(found, seed)
        except ValueError as error:
            raise ValueError(f"cannot load this state: it has {logical_ranks} logical ranks; {error}") from None
        ranks = range(placement.world_size)
        if [found.parts_of(rank) for rank in ranks] != [placement.parts_of(rank) for rank in ranks]:
            raise ValueError(
                f"cannot load this state: with its {logical_ranks} logical ranks, these {len(ranks)} ranks would serve other parts than this loader's; "
                f"make the loader with logical_ranks={logical_ranks}"
            )
        check_units(self.source, found)
        return found, order

    def _sizes(self, placement: Placement) -> list[int]:
        parts = [placement.parts_of_unit(unit) for unit in range(placement.num_units)]
        starts, sizes = [of_unit.start for of_unit in parts], [0] * len(parts)
        for (first, last), (number, _) in self.seeds.items():
            unit = bisect_right(starts, first) - 1
            sizes[unit] += number if last <= parts[unit].stop else 0
        return sizes

    def _positions_by_unit(self, placement: Placement) -> dict[int, Tensor]:
        """Returns, for each group of parts in :func:`_units`, the positions of its seeds among the rank's seeds. Empty for one group."""
        units, part_of = _units(placement), self.source.seeds.part_of
        if len(units) <= 1 or part_of is None:
            return {}
        of = part_of()
        parts = {unit: placement.parts_of_unit(unit) for unit in units}
        return {unit: ((of >= own.start) & (of < own.stop)).nonzero().flatten() for unit, own in parts.items()}


def _kind(placement: Placement) -> str:
    """Returns the word that errors use for whoever a sequence of batches belongs to: 'rank', 'logical rank' or 'host'."""
    if placement.num_logical_ranks != placement.num_visitors:
        return "logical rank"
    return "host" if placement.cooperates else "rank"


def _units(placement: Placement) -> range:
    """Returns the units (groups of parts) from which this rank's logical ranks draw seeds."""
    own = placement.logical_ranks
    return range(placement.unit_of(own[0]), placement.unit_of(own[-1]) + 1) if own else range(0)


def check_units(source: BatchSource, placement: Placement) -> None:
    """Raises ValueError if it is unclear which logical rank visits each of the user's own seeds."""
    if source.seeds.part_of is None and len(_units(placement)) > 1:
        raise ValueError(
            f"rank {placement.rank} has {len(placement.logical_ranks)} logical ranks that draw from {len(_units(placement))} groups of parts, but your own "
            "seeds do not say which group they belong to; name a split, or start as many ranks as there are logical ranks"
        )
