"""Position of a loader: its next epoch and its progress in the current one. It can be saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from salientpp.engine.epochs import Epochs
from salientpp.engine.shares import Shares
from salientpp.engine.state import Point, Position, Reached, Resume, check_state, make_state


@dataclass(eq=False)
class Bookmark:
    """Position of one loader, from which ``state_dict()`` is made and the next epoch begins."""

    epochs: Epochs  # shared with the engine; loading a state changes them
    shares: Shares
    partitioned: bool  # the data is a partitioned graph, whose ranks agree on their positions
    joined: bool  # the batches of a round are joined into one
    adopts: bool  # a loaded state may have another number of logical ranks, which this loader then takes over
    seed_is_given: bool  # a loaded state must then have the same seed
    epoch: int = 0  # the number of the next epoch
    resume: Resume | None = None  # the point of a loaded state from which the next epoch continues
    reached: Reached | None = None  # progress of the epoch that was begun last

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.resume = None
        self.epoch, self.reached = epoch, None

    def begun(self, reached: Reached) -> None:
        """Records that the next epoch has begun. ``reached`` is the object that counts its batches from now on."""
        self.reached, self.resume = reached, None
        self.epoch += 1

    @property
    def point(self) -> Point:
        """The point at which the next epoch starts. Its ``start`` is 0 until the ranks have agreed on one."""
        return Point.at(0, self.epochs.draws(self.epoch), self.resume)

    def copy(self, epochs: Epochs) -> Bookmark:
        """Returns a bookmark at the same position for a copy of the loader."""
        return replace(self, epochs=epochs, reached=self.reached and replace(self.reached))

    @property
    def _identity(self) -> tuple[int, int, int, bool]:
        """Number of logical ranks, number of ranks, this rank, and True if the batches of a round are joined into one.

        A saved state has the same four values, which tell who saved it. With ``cooperate``, a host counts as one rank.
        """
        placement = self.epochs.placement
        return placement.num_logical_ranks, placement.num_visitors, placement.visitor, self.joined

    def state(self, fingerprint: dict[str, Any]) -> dict[str, Any]:
        """Returns the position as numbers, texts and dictionaries, which JSON and ``torch.save`` can store."""
        order, reached = self.epochs.order, self.reached
        epoch, resume = self.epoch, self.resume or Resume(0, 0)
        if reached is not None and not reached.ended:
            epoch, resume = reached.epoch, Resume(reached.batches, order.round_after(reached.batches))
            if reached.rounds is not None:  # a state then counts whole rounds, so a round that was begun is given again
                resume = Resume(order.batches_before(reached.rounds), reached.rounds)
        return make_state(Position(epoch, resume.batches, resume.round, self.epochs.seed, *self._identity), fingerprint)

    def load(self, state: Mapping[str, Any], fingerprint: dict[str, Any]) -> None:
        """Moves to the position that was saved.

        Raises:
            ValueError: the state belongs to other data or arguments. The position is then unchanged.
        """
        logical_ranks, ranks, rank, joined = self._identity
        same: dict[str, Any] = {} if self.adopts else {"logical_ranks": logical_ranks}
        # Processes that share an object do not coordinate, so each must load its own state.
        same |= {} if self.partitioned else {"ranks": ranks, "rank": rank, "joined": joined}
        same |= {"seed": self.epochs.seed} if self.seed_is_given else {}
        found = check_state(state, fingerprint, same)
        placement, order = self.epochs.placement, self.epochs.order
        if found.logical_ranks != logical_ranks:
            placement, order = self.shares.with_logical_ranks(placement, found.logical_ranks, self.epochs.seed)
        num_batches = order.num_batches
        num_rounds = num_batches if order.num_rounds is None else order.num_rounds
        is_own = (found.ranks, found.rank, found.joined) == (ranks, rank, joined)
        if not 0 <= found.round <= num_rounds:
            raise ValueError(f"cannot load this state: round must be in [0, {num_rounds}], got {found.round}")
        if found.batches < 0 or (is_own and found.batches > num_batches):
            raise ValueError(f"cannot load this state: batches must be in [0, {num_batches}], got {found.batches}")
        self.epochs.seed, self.epochs.placement = found.seed, placement
        self.epochs.order = order = order.with_seed(found.seed)
        if not is_own:
            resume = Resume(order.batches_before(found.round), found.round, by_round=True)
        elif found.batches < num_batches:
            resume = Resume(found.batches, order.round_after(found.batches))
        else:
            resume = Resume(num_batches, max(found.round, order.round_after(num_batches)))
        self.epoch, self.resume, self.reached = found.epoch, resume, None
