"""Which seeds make up batch i of an epoch on this rank, and how many batches are there?

Every rank of a part visits its share of the part's seeds, in an order that is a pure function of (seed, epoch, part). What a
batch draws is fixed by a key that joins (seed, epoch, rank, batch index). Ranks may have different numbers of seeds; ``uneven`` says what follows:

* ``'wrap'``: every rank gives as many seeds as the one with the most, repeating its own from the start, so batches
  have the same size on all ranks at every step and DDP never waits. As torch's ``DistributedSampler`` does.
* ``'drop'``: every rank stops at the smallest number of batches.
* ``'exact'``: every seed once; ranks differ in how many batches they give.
* ``'error'``: different numbers of batches are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops

UNEVEN = ("wrap", "drop", "exact", "error")


# One word per purpose, so that the order of an epoch and the draws of its batches are independent; 3 is plan.accesses'.
_ORDER, _DRAWS = 1, 2


def order_key(seed: int, epoch: int, part_id: int) -> int:
    """The key of the order in which a part's seeds are visited in an epoch."""
    return ops.join_key(_ORDER, seed, epoch, part_id)


def batch_key(seed: int, epoch: int, rank: int, index: int) -> int:
    """The key of all draws of one batch."""
    return ops.join_key(_DRAWS, seed, epoch, rank, index)


def share_size(num_seeds: int, place: int, num_shares: int) -> int:
    """How many of a part's seeds the rank with this place inside the part visits."""
    return len(range(place, num_seeds, num_shares))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The epochs of one rank.

    Attributes:
        num_seeds: seeds of the part.
        part_id, place, ranks_per_part: which part, and this rank's place among those that serve it.
        seeds_per_rank: for every rank of the group, how many seeds it visits.
        rank: this rank.
        batch_size, shuffle, drop_last, uneven: as in the loader.
        seed: of the order.

    Raises:
        ValueError: a rank has no seeds under 'wrap' or 'drop'; ranks differ under 'error'.
    """

    num_seeds: int
    part_id: int
    place: int
    ranks_per_part: int
    seeds_per_rank: Sequence[int]
    rank: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    uneven: str
    seed: int

    def __post_init__(self) -> None:
        if self.uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {self.uneven!r}")
        counts = self.seeds_per_rank
        if len(counts) > 1 and self.uneven in ("wrap", "drop") and 0 in counts:
            raise ValueError(
                f"rank {list(counts).index(0)} has no seeds, so uneven={self.uneven!r} cannot give it batches; pass "
                "uneven='exact', or partition so that every part has seeds"
            )
        batches = [self._batches(count) for count in counts]
        if self.uneven == "error" and len(set(batches)) > 1:
            raise ValueError(
                f"uneven='error', but ranks 0 to {len(counts) - 1} have {batches} batches; pass uneven='wrap', 'drop' or 'exact'"
            )

    def _batches(self, num_seeds: int) -> int:
        return num_seeds // self.batch_size if self.drop_last else -(-num_seeds // self.batch_size)

    @property
    def num_batches(self) -> int:
        """Batches that this rank gives in an epoch."""
        if self.uneven == "wrap":
            return self._batches(max(self.seeds_per_rank))
        if self.uneven == "drop":
            return min(map(self._batches, self.seeds_per_rank))
        return self._batches(self.seeds_per_rank[self.rank])

    @property
    def num_rounds(self) -> int:
        """Batches of the rank that gives the most: how long every rank must answer the others."""
        if self.uneven in ("wrap", "drop"):
            return self.num_batches
        return max(map(self._batches, self.seeds_per_rank))

    def batches(self, epoch: int) -> list[Tensor]:
        """Positions in the part's seeds, int64, one tensor per batch."""
        if self.shuffle:
            order = ops.permutation(self.num_seeds, order_key(self.seed, epoch, self.part_id))
        else:
            order = torch.arange(self.num_seeds)
        if self.ranks_per_part > 1:
            order = order[self.place :: self.ranks_per_part]
        wanted = max(self.seeds_per_rank)
        if self.uneven == "wrap" and 0 < order.numel() != wanted:
            order = order[torch.arange(wanted) % order.numel()]
        return list(order.split(self.batch_size)[: self.num_batches]) if order.numel() else []
