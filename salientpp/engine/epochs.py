"""Which batches each epoch has on this rank, and by which keys they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import BatchKeys, Turn, batch_keys


class Order(Protocol):
    """The order in which the batches of a rank come. Numbers are of an epoch.

    Attributes:
        batches_by_rank: of one process that shares with others without talking to them, its own.
        batches_of_logical_rank: of the rank's first logical rank.
        num_rounds, num_ticks: the same on every rank. None: as many as this rank has batches.
    """

    @property
    def num_batches(self) -> int: ...

    @property
    def batches_by_rank(self) -> list[int]: ...

    @property
    def batches_of_logical_rank(self) -> int: ...

    @property
    def num_rounds(self) -> int | None: ...

    @property
    def num_ticks(self) -> int | None: ...

    def of_epoch(self, epoch: int) -> Sequence[Turn]:
        """This rank's turns, in order."""

    def round_after(self, batches: int) -> int:
        """The first round of which this rank has not given all its batches, after so many."""

    def batches_before(self, number: int) -> int:
        """How many batches this rank gives before a round."""

    def with_seed(self, seed: int) -> Order:
        """The same with another seed."""


class Draws(NamedTuple):
    """What the batches of an epoch are drawn by; loading a state may change the first two."""

    seed: int
    logical_ranks: int
    epoch: int


@dataclass(eq=False)
class Epochs:
    """The epochs of one rank. Loading a saved state replaces ``seed``, ``placement`` and ``order``.

    Attributes:
        draw_block: so many consecutive batches of a logical rank draw alike.
    """

    seed: int
    placement: Placement
    order: Order
    draw_block: int = 1

    def turns(self, draws: Draws) -> Sequence[Turn]:
        """This rank's turns in an epoch."""
        return self.order.of_epoch(draws.epoch)

    def draws(self, epoch: int) -> Draws:
        return Draws(self.seed, self.placement.num_logical_ranks, epoch)

    def keys(self, epoch: int, index: int, logical_rank: int | None = None) -> BatchKeys:
        """Of a batch of this logical rank; None: of the rank's first."""
        logical_rank = self.placement.logical_ranks[0] if logical_rank is None else logical_rank
        return batch_keys(self.seed, epoch, logical_rank, index, self.draw_block)

    def pieces(self, epoch: int, turn: Turn) -> list[tuple[Tensor, BatchKeys]]:
        """The positions of a batch's seeds and the keys of its draws; several where batches of a round are joined."""
        return [(positions, self.keys(epoch, turn.round, logical_rank)) for logical_rank, positions in turn.pieces]

    def positions(self, epoch: int) -> list[Tensor]:
        """The positions of the seeds of an epoch, int64, batch by batch."""
        return [positions for turn in self.order.of_epoch(epoch) for _, positions in turn.pieces]
