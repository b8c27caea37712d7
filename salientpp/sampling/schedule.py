"""Which seeds make up batch i of an epoch in each logical rank, and when a rank gives which batch.

An epoch's batches belong to logical ranks (:mod:`salientpp.ranks.placement`). Every logical rank of a unit visits its share of the unit's seeds, in an
order that is a pure function of (seed, epoch, unit). Logical ranks may have different numbers of seeds; ``uneven`` says what follows:

* ``'wrap'``: every logical rank gives as many seeds as the one with the most, repeating its own from the start, so batches
  have the same size in all logical ranks at every step and DDP never waits. As torch's ``DistributedSampler`` does.
* ``'drop'``: every logical rank stops at the smallest number of batches.
* ``'exact'``: every seed once; logical ranks differ in how many batches they give.
* ``'error'``: different numbers of batches are refused.

Round i of an epoch is batch i of every logical rank. All ranks move through an epoch in equal steps, ticks, each of which brings a rank one batch or
none. A round takes as many ticks as the rank with most batches of it has such; one with fewer waits first. So no rank waits for another inside a round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from salientpp import ops

UNEVEN = ("wrap", "drop", "exact", "error")


# One word per purpose, so that the order of an epoch and the draws of its batches are independent; 3 is vip.accesses'.
_ORDER, _DRAWS, _BLOCK = 1, 2, 4


def order_key(seed: int, epoch: int, unit: int) -> int:
    """The key of the order in which a unit's seeds are visited in an epoch."""
    return ops.join_key(_ORDER, seed, epoch, unit)


def batch_key(seed: int, epoch: int, logical_rank: int, index: int) -> int:
    """The key of all draws of one batch."""
    return ops.join_key(_DRAWS, seed, epoch, logical_rank, index)


class BatchKeys(NamedTuple):
    """What a batch's draws depend on.

    Attributes:
        batch: of what is its own, such as negative examples.
        draws: of its neighbours, which a block of batches may have in common.
    """

    batch: int
    draws: int


def batch_keys(seed: int, epoch: int, logical_rank: int, index: int, block: int = 1) -> BatchKeys:
    """The keys of one batch, where ``block`` batches of a logical rank that follow one another draw alike."""
    own = batch_key(seed, epoch, logical_rank, index)
    return BatchKeys(own, own if block == 1 else ops.join_key(_BLOCK, seed, epoch, logical_rank, index // block))


def share_size(num_seeds: int, place: int, num_shares: int) -> int:
    """How many of a unit's seeds the logical rank with this place inside the unit visits."""
    return len(range(place, num_seeds, num_shares))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The epochs of one logical rank.

    Attributes:
        unit, num_seeds, place, logical_ranks_per_unit: which unit, its seeds, and the place of ``logical_rank`` among those that draw from it.
        seeds_per_logical_rank: for every logical rank, how many seeds it visits.
        batch_size, shuffle, drop_last, uneven: as in the loader.
        seed: of the order.
        kind: what a text calls a logical rank.

    Raises:
        ValueError: a logical rank has no seeds under 'wrap' or 'drop'; logical ranks differ under 'error'.
    """

    num_seeds: int
    unit: int
    place: int
    logical_ranks_per_unit: int
    seeds_per_logical_rank: Sequence[int]
    logical_rank: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    uneven: str
    seed: int
    kind: str = "rank"

    def __post_init__(self) -> None:
        if self.uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {self.uneven!r}")
        counts = self.seeds_per_logical_rank
        if len(counts) > 1 and self.uneven in ("wrap", "drop") and 0 in counts:
            raise ValueError(
                f"{self.kind} {list(counts).index(0)} has no seeds, so uneven={self.uneven!r} cannot give it batches; pass "
                "uneven='exact', or partition so that every part has seeds"
            )
        batches = [self._batches(count) for count in counts] if self.uneven == "error" else []
        if len(set(batches)) > 1:
            raise ValueError(
                f"uneven='error', but {self.kind}s 0 to {len(counts) - 1} have {batches} batches; pass uneven='wrap', 'drop' or 'exact'"
            )

    def _batches(self, num_seeds: int) -> int:
        return num_seeds // self.batch_size if self.drop_last else -(-num_seeds // self.batch_size)

    def batches_of(self, logical_rank: int) -> int:
        """Batches that a logical rank gives in an epoch."""
        if self.uneven == "wrap":
            return self._batches(max(self.seeds_per_logical_rank))
        if self.uneven == "drop":
            return min(map(self._batches, self.seeds_per_logical_rank))
        return self._batches(self.seeds_per_logical_rank[logical_rank])

    @property
    def num_batches(self) -> int:
        """Batches that this logical rank gives in an epoch."""
        return self.batches_of(self.logical_rank)

    @property
    def num_rounds(self) -> int:
        """Batches of the logical rank that gives the most: how long every rank must answer the others."""
        if self.uneven in ("wrap", "drop"):
            return self.num_batches
        return max(map(self._batches, self.seeds_per_logical_rank))

    def batches(self, epoch: int) -> list[Tensor]:
        """Positions in the unit's seeds, int64, one tensor per batch."""
        if self.shuffle:
            order = ops.permutation(self.num_seeds, order_key(self.seed, epoch, self.unit))
        else:
            order = torch.arange(self.num_seeds, device="cpu")
        if self.logical_ranks_per_unit > 1:
            order = order[self.place :: self.logical_ranks_per_unit]
        wanted = max(self.seeds_per_logical_rank)
        if self.uneven == "wrap" and 0 < order.numel() != wanted:
            order = order[torch.arange(wanted, device="cpu") % order.numel()]
        return list(order.split(self.batch_size)[: self.num_batches]) if order.numel() else []


class Turn(NamedTuple):
    """What one tick brings a rank: one batch.

    Attributes:
        tick, round: when, counted from the beginning of the epoch.
        pieces: (logical rank, int64 positions among the rank's seeds) of the batch, or of each of several that are joined to one.
    """

    tick: int
    round: int
    pieces: Sequence[tuple[int, Tensor]]


@dataclass(frozen=True, eq=False)
class Turns:
    """The epochs of one rank: which batches of its logical ranks it gives, and when.

    Attributes:
        schedules: of this rank's logical ranks.
        logical_ranks_by_rank: of every rank.
        joined: the batches of a round are given as one.
        positions: where the seeds of a unit are among this rank's; not of a rank that has but one unit.
    """

    schedules: Sequence[Schedule]
    logical_ranks_by_rank: Sequence[range]
    joined: bool = False
    positions: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def batches_of_logical_rank(self) -> int:
        """Batches that the first of this rank's logical ranks gives in an epoch."""
        return self.schedules[0].num_batches

    @property
    def num_rounds(self) -> int:
        return self.schedules[0].num_rounds

    @cached_property
    def _ticks_by_round(self) -> list[range]:
        """How many ticks each round has, and which; those in which this rank gives a batch are the last."""
        if self.joined or all(len(logical_ranks) == 1 for logical_ranks in self.logical_ranks_by_rank):
            return [range(index, index + 1) for index in range(self.num_rounds)]
        batches, number = self.schedules[0].batches_of, torch.arange(self.num_rounds, device="cpu")
        most = torch.zeros_like(number)
        for logical_ranks in self.logical_ranks_by_rank:
            of_rank = sum(((number < batches(each)).long() for each in logical_ranks), torch.zeros_like(number))
            most = torch.maximum(most, of_rank)
        ends = most.cumsum(0).tolist()
        return [range(end - size, end) for end, size in zip(ends, most.tolist(), strict=True)]

    @property
    def num_ticks(self) -> int:
        """Of an epoch; the same on every rank."""
        return self._ticks_by_round[-1].stop if self._ticks_by_round else 0

    @cached_property
    def _rounds(self) -> list[int]:
        """The round of each batch that this rank gives."""
        numbers = [schedule.num_batches for schedule in self.schedules]
        return [
            index
            for index in range(max(numbers))
            for _ in range(1 if self.joined else sum(number > index for number in numbers))
        ]

    @property
    def num_batches(self) -> int:
        """Batches that this rank gives in an epoch."""
        return len(self._rounds)

    @property
    def batches_by_rank(self) -> list[int]:
        """Batches that each rank gives in an epoch."""
        numbers = [
            [self.schedules[0].batches_of(logical_rank) for logical_rank in logical_ranks]
            for logical_ranks in self.logical_ranks_by_rank
        ]
        return [max(of_rank) if self.joined else sum(of_rank) for of_rank in numbers]

    def round_after(self, batches: int) -> int:
        """The first round of which this rank has not given all its batches, after so many."""
        if batches < len(self._rounds):
            return self._rounds[batches]
        return self._rounds[-1] + 1 if self._rounds else 0

    def batches_before(self, number: int) -> int:
        """How many batches this rank gives before a round."""
        return bisect_left(self._rounds, number)

    def with_seed(self, seed: int) -> Turns:
        """The same with another seed."""
        return replace(self, schedules=[replace(schedule, seed=seed) for schedule in self.schedules])

    def of_epoch(self, epoch: int) -> list[Turn]:
        """This rank's turns, in order."""
        batches = [(schedule, schedule.batches(epoch)) for schedule in self.schedules]
        turns = []
        for index, ticks in enumerate(self._ticks_by_round):
            pieces = [
                (schedule.logical_rank, self.positions[schedule.unit][given[index]] if self.positions else given[index])
                for schedule, given in batches
                if index < len(given)
            ]
            if not pieces:
                break
            if self.joined:
                turns.append(Turn(ticks.start, index, pieces))
            else:
                turns += [Turn(ticks.stop - len(pieces) + at, index, [piece]) for at, piece in enumerate(pieces)]
        return turns
