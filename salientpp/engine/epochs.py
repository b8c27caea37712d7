"""The batches of each epoch on one rank, and the keys by which they are drawn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import BatchKeys, Turn, batch_keys


class Order(Protocol):
    """Interface of the order in which a rank delivers batches. A turn is one batch in it. All numbers are per epoch.

    Attributes:
        batches_by_rank: number of batches of each rank. A process that waits for no other lists only its own number.
        batches_of_logical_rank: number of batches of the rank's first logical rank.
        num_rounds, num_ticks: number of rounds and of ticks, the same on every rank. None: equal to the number of this rank's batches.
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

    def of_epoch(self, epoch: int) -> Iterable[Turn]:
        """Returns this rank's batches of an epoch, one turn for each. Iterating over them reads a user's sampler."""

    def trial(self) -> Sequence[Turn]:
        """Returns batches (as turns) like those of epoch 0, to estimate sizes. It does not read a user's sampler."""

    def round_after(self, batches: int) -> int:
        """Returns the first round that this rank has not completed after this number of batches. Round i is batch i of every logical rank."""

    def batches_before(self, number: int) -> int:
        """Returns the number of batches that this rank delivers before round ``number``. Round i is batch i of every logical rank."""

    def with_seed(self, seed: int) -> Order:
        """Returns the same order with another seed."""


class TurnsOfEpoch:
    """Reads the batches of one epoch (as turns) from an order only when they are needed, because a user's sampler may depend on the loop.

    Args:
        count: receives the seconds in which the sampler gave seeds.

    Attributes:
        size: number of batches. None: not known yet.
    """

    def __init__(self, turns: Iterable[Turn], count: Callable[[float], None]) -> None:
        self._rest, self._count = iter(turns), count
        self._read: deque[Turn] = deque()
        self._first = 0  # index of the first turn in _read
        self._error: BaseException | None = None
        self.size: int | None = None
        if isinstance(turns, list):
            self._read, self.size = deque(turns), len(turns)

    def at(self, index: int) -> Turn | None:
        """Returns the turn of batch ``index``, which must not have been dropped; None after the last. Reads as many turns as needed."""
        while self.size is None and index >= self._first + len(self._read):
            if self._error is not None:
                raise self._error
            began = time.perf_counter()
            try:
                self._read.append(next(self._rest))
                self._count(time.perf_counter() - began)
            except StopIteration:
                self.size = self._first + len(self._read)
            except BaseException as error:
                self._error = error  # an iterator that has failed would seem to have ended
                raise
        return None if self.size is not None and index >= self.size else self._read[index - self._first]

    def drop(self, index: int) -> None:
        """Forgets all batches before this one, because an epoch may have no end."""
        while self._read and self._first < index:
            self._read.popleft()
            self._first += 1


@dataclass(frozen=True)
class Draws:
    """Numbers that determine how the batches of an epoch are drawn. Loading a state may change ``seed`` and ``logical_ranks``.

    Attributes:
        epochs: copy of the rank's :class:`Epochs` from when the epoch began, since a state may be loaded later; or
            None.
    """

    seed: int
    logical_ranks: int
    epoch: int
    epochs: Epochs | None = field(default=None, compare=False, repr=False)

    def pieces(self, turn: Turn) -> list[tuple[Tensor, BatchKeys]]:
        assert self.epochs is not None  # the caller has a batch of an epoch
        return self.epochs.pieces(self.epoch, turn)

    def turns(self) -> Sequence[Turn]:
        assert self.epochs is not None  # as above
        return [*self.epochs.order.of_epoch(self.epoch)]


@dataclass(eq=False)
class Epochs:
    """Order and draw keys of a rank's batches in all epochs. Loading a state replaces all fields but ``draw_block``.

    Attributes:
        draw_block: number of consecutive batches of a logical rank that share their draws.
    """

    seed: int
    placement: Placement
    order: Order
    draw_block: int = 1

    def draws(self, epoch: int) -> Draws:
        return Draws(self.seed, self.placement.num_logical_ranks, epoch)

    def keys(self, epoch: int, index: int, logical_rank: int | None = None) -> BatchKeys:
        """Returns the draw keys of batch ``index`` of a logical rank. None: this rank's first logical rank."""
        logical_rank = self.placement.logical_ranks[0] if logical_rank is None else logical_rank
        return batch_keys(self.seed, epoch, logical_rank, index, self.draw_block)

    def pieces(self, epoch: int, turn: Turn, index: int | None = None) -> list[tuple[Tensor, BatchKeys]]:
        """Returns a batch's pieces, (seed positions, draw keys). A batch has several if it joins the batches of several logical ranks.

        Args:
            index: number of the batch whose keys are used. None: the number of the turn's round.
        """
        index = turn.round if index is None else index
        return [(positions, self.keys(epoch, index, logical_rank)) for logical_rank, positions in turn.pieces]

    def positions(self, epoch: int) -> list[Tensor]:
        """Returns an epoch's seeds as positions among the rank's seeds, int64, one tensor per piece."""
        return [positions for turn in self.order.of_epoch(epoch) for _, positions in turn.pieces]
