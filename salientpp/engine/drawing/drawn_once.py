"""Draws each batch of a host once. The first rank that needs the batch draws it for all ranks of the host, and leaves the others their shares.

A rank holds the lock of a batch while it draws. A rank that asks meanwhile waits for the lock, and then finds its share. So ranks only wait while a rank is
drawing, and need no message when an epoch begins or ends. A batch is a pure function of its key. So a rank that finds no share draws the batch itself, and
the batch is the same. This happens if the drawer failed, or if its memory is gone, or if it takes longer than a limit.

Each share is a block of memory (:mod:`salientpp.ranks.shared_memory`). A table that the ranks share says where the blocks of each batch are. The drawer frees
a block when its receiver has taken it, or when too many later blocks wait.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp.processes import Lock
from salientpp.ranks.comm import Comm
from salientpp.ranks.host_locks import HostLocks
from salientpp.ranks.shared_memory import CannotShare, Offer, block, mapped, shared_tensors
from salientpp.sampling.divided_batch import BatchShare, share_of, shares_of
from salientpp.sampling.packed_share import pack_share, unpack_share
from salientpp.sampling.topology import Mfg

#: Largest number of words of a key.
KEY_WORDS = 4

#: Seconds that a rank waits for another rank's draw.
LIMIT = 60.0

#: Smallest number of batches that the table holds, and largest number of blocks that a rank keeps open for others: each has two file descriptors.
_FEWEST_SLOTS, _MOST_BLOCKS = 64, 128

# Words of an entry of the table: the number of the entry, its drawer and its key. For each rank of the host follow the offer of its block (process, file,
# bytes, token) and the number of the entry that this rank took last.
_NUMBER, _DRAWER, _KEY = 0, 1, 2
_OFFERS = _KEY + KEY_WORDS
_TAKEN = Offer.NUM_WORDS
_OFFER_WORDS = _TAKEN + 1


@dataclass
class DrawCounts:
    """Statistics of one rank: how often it drew a batch, or took its share from another rank.

    Attributes:
        drawn: batches that this rank drew.
        taken: batches whose share another rank left.
        in_vain: shares that this rank left and that were not taken.
    """

    drawn: int = 0
    taken: int = 0
    in_vain: int = 0


@dataclass(eq=False)
class _Left:
    """A batch's shares that this rank left for others: number of the receiver -> context that keeps the block open."""

    slot: int
    number: int
    blocks: dict[int, contextlib.ExitStack] = field(default_factory=dict)


class DrawnOnce:
    """Draws each batch of a loader once per host, and hands out its shares. Several threads may use it.

    The constructor is collective among the host's ranks.

    Attributes:
        counts: statistics of this rank.

    Args:
        host: the ranks of the host.
        owners: int8 or int16 [N], for each vertex the number on the host of the rank that owns it.
        ahead: largest number of batches that a rank may draw before the others ask for them.
        limit: seconds that a rank waits for another rank's draw before it draws the batch itself.

    Raises:
        CannotShare: on every rank, if some of them cannot share memory.
    """

    def __init__(self, host: Comm, owners: Tensor, ahead: int, limit: float = LIMIT) -> None:
        self.counts = DrawCounts()
        self._owners, self._place, self._ranks, self._limit = owners, host.rank, host.size, limit
        self._lock = Lock()  # guards the counts and the blocks
        self._left: deque[_Left] = deque()
        self._made = 0
        self._process = os.getpid()
        self._is_closed = host.size == 1
        if host.size == 1:
            return
        ahead = max(most for (most,) in host.gather_numbers([ahead]))
        self._most_left = max(2, min(ahead, _MOST_BLOCKS // (host.size - 1)))
        self._locks = HostLocks(host)
        shape = (max(_FEWEST_SLOTS, 2 * ahead), _OFFERS + _OFFER_WORDS * host.size)
        (table,) = shared_tensors(host, [(shape, torch.int64)])
        self._table = table.numpy()

    def share(self, turn: int, key: Sequence[int], draw: Callable[[], Mfg]) -> BatchShare:
        """Returns this rank's share of a batch.

        Args:
            turn: number of the batch in its epoch, the same on all ranks of the host.
            key: up to four signed 64-bit integers. Batches with equal keys must be equal.
            draw: draws the whole batch of the host.

        Raises:
            ValueError: the batch cannot be divided; see :func:`~salientpp.sampling.divided_batch.shares_of`.
            Exception: ``draw`` raised it.
        """
        if self._is_closed or os.getpid() != self._process:  # the blocks of a forked child's parent are not the child's
            return self._own_share(draw)
        words = [*key, *[0] * (KEY_WORDS - len(key))]
        slot = turn % len(self._table)
        self._give_up_blocks()
        with self._locks.hold(slot, self._limit) as has_lock:
            if not has_lock:
                return self._own_share(draw)
            offer, number = self._offer(slot, words)
            if offer is None:
                return self._draw_for_all(slot, words, draw)
        try:
            packet = mapped(offer)
        except CannotShare:  # the drawer gave the block up, or has ended
            return self._own_share(draw)
        self._table[slot, self._offer_at(self._place) + _TAKEN] = number
        with self._lock:
            self.counts.taken += 1
        return unpack_share(packet)

    def close(self) -> None:
        """Frees all blocks that this rank left. It draws later batches itself."""
        self._is_closed = True
        self._give_up_blocks(but=0)

    def _own_share(self, draw: Callable[[], Mfg]) -> BatchShare:
        mfg = self._drawn(draw)
        return share_of(mfg, self._owners[mfg.node], self._ranks, self._place)

    def _drawn(self, draw: Callable[[], Mfg]) -> Mfg:
        mfg = draw()
        with self._lock:
            self.counts.drawn += 1
        return mfg

    @staticmethod
    def _offer_at(place: int) -> int:
        return _OFFERS + place * _OFFER_WORDS

    def _offer(self, slot: int, key: Sequence[int]) -> tuple[Offer | None, int]:
        """Returns where this rank's share was left for it (None: nowhere), and the number that marks it as taken."""
        entry = self._table[slot].tolist()
        *words, taken = entry[self._offer_at(self._place) :][:_OFFER_WORDS]
        number = entry[_NUMBER]
        if not number or entry[_DRAWER] == self._place or entry[_KEY:_OFFERS] != list(key) or taken == number:
            return None, number
        return Offer.of_words(words), number

    def _draw_for_all(self, slot: int, key: Sequence[int], draw: Callable[[], Mfg]) -> BatchShare:
        entry = self._table[slot]
        entry[_NUMBER] = 0
        mfg = self._drawn(draw)
        shares = shares_of(mfg, self._owners[mfg.node], self._ranks)
        with self._lock:
            self._made += 1
            left = _Left(slot, self._made * self._ranks + self._place)  # no other rank has this number
        try:
            for place, share in enumerate(shares):
                if place != self._place:
                    at = self._offer_at(place)
                    entry[at : at + _TAKEN] = self._leave(left, place, pack_share(share))
        except CannotShare:  # no memory is left, so the other ranks draw the batch
            self._close_blocks(left, list(left.blocks))
            return shares[self._place]
        entry[_DRAWER], entry[_KEY:_OFFERS] = self._place, key
        entry[_NUMBER] = left.number
        with self._lock:
            self._left.append(left)
        return shares[self._place]

    def _leave(self, left: _Left, place: int, packet: Tensor) -> list[int]:
        """Writes a share to a block of memory. Returns the integers by which its receiver finds the block."""
        left.blocks[place] = contextlib.ExitStack()
        memory, offer = left.blocks[place].enter_context(block(packet.numel()))
        memory.copy_(packet)
        return offer.words()

    def _give_up_blocks(self, but: int | None = None) -> None:
        """Closes blocks that were taken or replaced, and other blocks except those of the last ``but`` batches."""
        but = self._most_left if but is None else but
        with self._lock:
            for _ in range(len(self._left)):
                left = self._left.popleft()
                entry = self._table[left.slot]
                taken = [place for place in left.blocks if entry[self._offer_at(place) + _TAKEN] == left.number]
                self._close_blocks(left, taken)
                if entry[_NUMBER] != left.number or len(self._left) >= but:
                    self.counts.in_vain += len(left.blocks)
                    self._close_blocks(left, list(left.blocks))
                elif left.blocks:
                    self._left.append(left)

    @staticmethod
    def _close_blocks(left: _Left, places: Sequence[int]) -> None:
        for place in places:
            left.blocks.pop(place).close()
