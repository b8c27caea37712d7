"""Schedules: the seeds of batch i of an epoch in each logical rank, and the step at which a rank gives each batch.

An epoch's batches belong to logical ranks. A logical rank draws from a unit: a part, or several parts joined (:mod:`salientpp.ranks.placement`). Every
logical rank of a unit visits its share of the unit's seeds, in an order that is a pure function of (seed, epoch, unit).

If logical ranks have different numbers of seeds, ``uneven`` decides:

* ``'wrap'``: every logical rank gives as many seeds as the one with the most, repeating its own seeds from the start. Batches
  then have the same size in all logical ranks at every step, and DDP never waits. torch's ``DistributedSampler`` does the same.
* ``'drop'``: every logical rank stops at the smallest number of batches.
* ``'exact'``: every seed is given once; logical ranks give different numbers of batches.
* ``'error'``: different numbers of batches are refused.

Round i of an epoch is batch i of every logical rank. All ranks move through an epoch in equal steps, called ticks. A tick brings a rank one batch or
none. A round has as many ticks as its busiest rank has batches. A rank with fewer batches gives none in the first ticks of the round, and then one in every
tick. So all ranks complete a round in the same tick.
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


# One number per purpose, so that the order of an epoch and the draws of its batches are independent; vip.accesses uses 3.
_ORDER, _DRAWS, _BLOCK = 1, 2, 4


def order_key(seed: int, epoch: int, unit: int) -> int:
    """Returns the key of the order in which an epoch visits the seeds of a unit (a part, or several joined parts)."""
    return ops.join_key(_ORDER, seed, epoch, unit)


def batch_key(seed: int, epoch: int, logical_rank: int, index: int) -> int:
    """Returns the key of all draws of one batch."""
    return ops.join_key(_DRAWS, seed, epoch, logical_rank, index)


class BatchKeys(NamedTuple):
    """The keys of a batch's draws.

    Attributes:
        batch: key of the batch's own draws, such as negative examples.
        draws: key of the draws of neighbours; consecutive batches may share it, see ``block`` of :func:`batch_keys`.
    """

    batch: int
    draws: int


def batch_keys(seed: int, epoch: int, logical_rank: int, index: int, block: int = 1) -> BatchKeys:
    """Returns the keys of one batch. ``block`` consecutive batches of a logical rank share the key of their draws of neighbours."""
    own = batch_key(seed, epoch, logical_rank, index)
    return BatchKeys(own, own if block == 1 else ops.join_key(_BLOCK, seed, epoch, logical_rank, index // block))


def share_size(num_seeds: int, place: int, num_shares: int) -> int:
    """Returns how many of ``num_seeds`` seeds a logical rank visits: seed ``place`` and every ``num_shares``-th seed after it."""
    return len(range(place, num_seeds, num_shares))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Divides the seeds of one logical rank into the batches of each epoch.

    Attributes:
        unit, num_seeds: number of the unit (a part, or several joined parts) that the logical rank draws from, and how many seeds it has.
        place, logical_ranks_per_unit: the index of ``logical_rank`` among the logical ranks that draw from the unit, and their number.
        seeds_per_logical_rank: number of seeds that each logical rank visits.
        batch_size, shuffle, drop_last, uneven: as in the loader.
        seed: fixes the order.
        kind: name of a logical rank in errors.
        num_given: number of batches into which the seeds of each logical rank are divided as evenly as possible, instead of by ``batch_size``.

    Raises:
        ValueError: a logical rank has no seeds with 'wrap' or 'drop', or fewer than ``num_given``, or logical ranks differ with 'error'.
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
    num_given: int | None = None

    def __post_init__(self) -> None:
        if self.uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {self.uneven!r}")
        counts = self.seeds_per_logical_rank
        if len(counts) > 1 and self.uneven in ("wrap", "drop") and 0 in counts:
            raise ValueError(
                f"{self.kind} {list(counts).index(0)} has no seeds, so uneven={self.uneven!r} cannot give it batches; pass "
                "uneven='exact', or partition so that every part has seeds"
            )
        if self.num_given is not None and min(counts) < self.num_given:
            raise ValueError(
                f"cooperate['batches']={self.num_given} is more than the {min(counts)} seeds of {self.kind} {list(counts).index(min(counts))}; every "
                f"batch needs a seed, so pass {max(1, min(counts))} or less"
            )
        batches = [self._batches(count) for count in counts] if self.uneven == "error" else []
        if len(set(batches)) > 1:
            raise ValueError(
                f"uneven='error', but {self.kind}s 0 to {len(counts) - 1} have {batches} batches; pass uneven='wrap', 'drop' or 'exact'"
            )

    def _batches(self, num_seeds: int) -> int:
        if self.num_given is not None:
            return self.num_given
        return num_seeds // self.batch_size if self.drop_last else -(-num_seeds // self.batch_size)

    def batches_of(self, logical_rank: int) -> int:
        """Returns the number of batches that a logical rank gives in an epoch."""
        if self.uneven == "wrap":
            return self._batches(max(self.seeds_per_logical_rank))
        if self.uneven == "drop":
            return min(map(self._batches, self.seeds_per_logical_rank))
        return self._batches(self.seeds_per_logical_rank[logical_rank])

    @property
    def num_batches(self) -> int:
        """Number of batches that this logical rank gives in an epoch."""
        return self.batches_of(self.logical_rank)

    @property
    def num_rounds(self) -> int:
        """Number of rounds of an epoch: the most batches of a logical rank. A rank takes part in all rounds, because other ranks ask it for rows."""
        if self.uneven in ("wrap", "drop"):
            return self.num_batches
        return max(map(self._batches, self.seeds_per_logical_rank))

    def batches(self, epoch: int) -> list[Tensor]:
        """Returns the batches of an epoch: for each, the positions of its seeds among the unit's seeds, int64."""
        if self.shuffle:
            order = ops.permutation(self.num_seeds, order_key(self.seed, epoch, self.unit))
        else:
            order = torch.arange(self.num_seeds, device="cpu")
        if self.logical_ranks_per_unit > 1:
            order = order[self.place :: self.logical_ranks_per_unit]
        wanted = max(self.seeds_per_logical_rank)
        if self.uneven == "wrap" and 0 < order.numel() != wanted:
            order = order[torch.arange(wanted, device="cpu") % order.numel()]
        if self.num_given is not None:
            return list(order.tensor_split(self.num_given))
        return list(order.split(self.batch_size)[: self.num_batches]) if order.numel() else []


class Turn(NamedTuple):
    """One batch of a rank, with the step of the epoch in which the rank gives it.

    Attributes:
        tick: number of the step in the epoch. All ranks take each step together.
        round: number of the batch among those of its logical rank.
        pieces: (logical rank, int64 positions among the rank's seeds) of the batch; several pieces if the batches of several logical ranks are joined.
    """

    tick: int
    round: int
    pieces: Sequence[tuple[int, Tensor]]

    @property
    def num_seeds(self) -> int:
        """Number of seeds in the batch."""
        pieces = self.pieces
        return pieces[0][1].numel() if len(pieces) == 1 else sum(positions.numel() for _, positions in pieces)


@dataclass(frozen=True, eq=False)
class Turns:
    """Tells which batches a rank gives in each epoch, and in which ticks. A tick is a step that all ranks take together.

    Attributes:
        schedules: one for each logical rank of this rank.
        logical_ranks_by_rank: logical ranks of every rank.
        joined: True if the rank's batches of a round are joined to one batch.
        positions: by unit, the positions of the unit's seeds among this rank's seeds; empty if the rank has only one unit.
        another: schedule of another logical rank, for a storage rank, which has none. It has the numbers that all schedules have in common.
    """

    schedules: Sequence[Schedule]
    logical_ranks_by_rank: Sequence[range]
    joined: bool = False
    positions: Mapping[int, Tensor] = field(default_factory=dict)
    another: Schedule | None = None

    @property
    def _any(self) -> Schedule:
        return self.schedules[0] if self.another is None else self.another

    @property
    def batches_of_logical_rank(self) -> int:
        """Number of batches that the first of this rank's logical ranks gives in an epoch."""
        return self._any.num_batches

    @property
    def num_rounds(self) -> int:
        return self._any.num_rounds

    @cached_property
    def _ticks_by_round(self) -> list[range]:
        """Ticks of each round i, which has batch i of every logical rank. This rank gives its batches in the last ticks of a round."""
        if self.joined or all(len(logical_ranks) <= 1 for logical_ranks in self.logical_ranks_by_rank):
            return [range(index, index + 1) for index in range(self.num_rounds)]
        batches, number = self._any.batches_of, torch.arange(self.num_rounds, device="cpu")
        most = torch.zeros_like(number)
        for logical_ranks in self.logical_ranks_by_rank:
            of_rank = sum(((number < batches(each)).long() for each in logical_ranks), torch.zeros_like(number))
            most = torch.maximum(most, of_rank)
        ends = most.cumsum(0).tolist()
        return [range(end - size, end) for end, size in zip(ends, most.tolist(), strict=True)]

    @property
    def num_ticks(self) -> int:
        """Number of ticks (common steps of all ranks) in an epoch, the same on every rank."""
        return self._ticks_by_round[-1].stop if self._ticks_by_round else 0

    @cached_property
    def _rounds(self) -> list[int]:
        """Round of each batch that this rank gives."""
        numbers = [schedule.num_batches for schedule in self.schedules]
        return [
            index
            for index in range(max(numbers, default=0))
            for _ in range(1 if self.joined else sum(number > index for number in numbers))
        ]

    @property
    def num_batches(self) -> int:
        """Number of batches that this rank gives in an epoch."""
        return len(self._rounds)

    @property
    def batches_by_rank(self) -> list[int]:
        """Number of batches that each rank gives in an epoch."""
        numbers = [
            [self._any.batches_of(logical_rank) for logical_rank in logical_ranks]
            for logical_ranks in self.logical_ranks_by_rank
        ]
        return [max(of_rank, default=0) if self.joined else sum(of_rank) for of_rank in numbers]

    def round_after(self, batches: int) -> int:
        """Returns the round that this rank is in after ``batches`` batches: the first that it has not completed."""
        if batches < len(self._rounds):
            return self._rounds[batches]
        return self._rounds[-1] + 1 if self._rounds else 0

    def batches_before(self, number: int) -> int:
        """Returns the number of batches that this rank gives before round ``number``."""
        return bisect_left(self._rounds, number)

    def with_seed(self, seed: int) -> Turns:
        """Returns a copy of these turns with another random seed."""
        schedules = [replace(schedule, seed=seed) for schedule in self.schedules]
        return replace(self, schedules=schedules)

    def trial(self) -> list[Turn]:
        """Returns this rank's batches of epoch 0. Callers draw some of them to estimate sizes."""
        return self.of_epoch(0)

    def of_epoch(self, epoch: int) -> list[Turn]:
        """Returns this rank's batches of an epoch, in the order in which it gives them."""
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
