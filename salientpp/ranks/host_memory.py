"""Exchanges of rows between the ranks of a host through memory that they share.

A sender writes the rows for all receivers into a block of its own. Then it sends every rank a small message, which says where the rows are. A receiver copies
them out of the sender's block when the message has arrived. Thus a row is copied twice, and no row passes a socket.

A block is written again only after every rank has finished the exchange that used the block before. The ranks count finished exchanges in memory that all of
them map. If exchanges follow each other, two blocks alternate: a message of one exchange shows that its sender has finished the exchange before. If several
exchanges are under way at once, there are more blocks. At its end a process waits until the others have copied its rows, because its blocks end with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.shared_memory import CannotShare, Offer, block, mapped, shared_tensors

#: Least size of a block. Larger sizes are powers of two. Pages that were never written take no memory.
_LEAST = 1 << 16

#: Numbers in a message to one rank: number of the block, first byte of the rows, and the values of the block's offer (two for its token).
_NUMBERS = 7

#: Seconds for which a process waits at its end for others to copy its rows.
_AT_END = 30.0


@dataclass(eq=False)
class _Block:
    """Memory that this rank writes.

    Attributes:
        user: number of the last exchange that used it.
    """

    memory: Tensor
    offer: Offer
    held: contextlib.ExitStack
    user: int = -1


class HostMemory:
    """Exchanges of rows through shared memory. The ranks of ``comm`` are on one host.

    Only one thread at a time may begin exchanges, in the same order on every rank.
    """

    def __init__(self, comm: Comm, finished: Tensor) -> None:
        self.comm = comm
        self._blocks: list[_Block] = []
        self._opened: dict[tuple[int, int], tuple[Offer, Tensor]] = {}
        self._begun = 0
        self._finished = _Finished(finished, comm.rank)
        weakref.finalize(self, _close, self._blocks, self._finished)

    @classmethod
    def create(cls, comm: Comm) -> HostMemory | None:
        """Returns exchanges between the ranks of ``comm``, or None if they cannot share memory. Collective, with the same result on every rank."""
        if comm.size == 1:
            return None
        try:
            (finished,) = shared_tensors(comm, [((comm.size, 2), torch.int64)])
        except CannotShare:
            return None
        return cls(comm, finished)

    def begin(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> HostPending:
        """Starts an exchange, like :meth:`salientpp.ranks.comm.Comm.all_to_all`, of rows [sum(send_counts), ...] on the CPU.

        Raises:
            CannotShare: the system has no memory left for the rows.
        """
        number, self._begun = self._begun, self._begun + 1
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        message = torch.zeros((self.comm.size, _NUMBERS), dtype=torch.int64, device="cpu")
        if rows.nbytes:
            slot = self._writable(rows.nbytes)
            mine = self._blocks[slot]
            mine.memory[: rows.nbytes].copy_(bytes_of(rows))
            mine.user = number
            offer = mine.offer
            halves = [int.from_bytes(half, "little", signed=True) for half in _halves(offer.token)]
            message[:, 0] = slot
            message[1:, 1] = torch.tensor(send_counts[:-1], device="cpu").cumsum(0) * row_bytes
            message[:, 2:] = torch.tensor([offer.process, offer.file, *halves, offer.num_bytes], device="cpu")
        told = self.comm.all_to_all(message, [1] * self.comm.size, [1] * self.comm.size)
        shape = (sum(recv_counts), *rows.shape[1:])
        return HostPending(self, number, told, shape, rows.dtype, [count * row_bytes for count in recv_counts])

    def _writable(self, num_bytes: int) -> int:
        """Returns the number of a block of at least this size that no rank reads any more."""
        finished = self._finished.by_all
        free = [slot for slot, each in enumerate(self._blocks) if each.user < finished]
        large = [slot for slot in free if self._blocks[slot].offer.num_bytes >= num_bytes]
        if large:
            return large[0]
        held = contextlib.ExitStack()
        memory, offer = held.enter_context(block(max(_LEAST, 1 << (num_bytes - 1).bit_length())))
        made = _Block(memory, offer, held)
        if not free:
            self._blocks.append(made)
            return len(self._blocks) - 1
        self._blocks[free[0]].held.close()
        self._blocks[free[0]] = made
        return free[0]

    def arrived(self, pending: HostPending) -> Tensor:
        """Copies the rows of an exchange out of the senders' blocks."""
        told = pending.told.wait().tolist()
        rows = torch.empty(pending.shape, dtype=pending.dtype, device="cpu")
        pieces = bytes_of(rows).split(pending.recv_bytes)
        for sender, (piece, numbers) in enumerate(zip(pieces, told, strict=True)):
            if piece.numel():
                piece.copy_(self._block_of(sender, numbers)[numbers[1] : numbers[1] + piece.numel()])
        return rows

    def _block_of(self, sender: int, numbers: Sequence[int]) -> Tensor:
        slot, _, process, file, *halves, num_bytes = numbers
        if sender == self.comm.rank:
            return self._blocks[slot].memory
        token = b"".join(half.to_bytes(8, "little", signed=True) for half in halves).hex()
        offer = Offer(process, file, token, num_bytes)
        known, memory = self._opened.get((sender, slot), (None, None))
        if known != offer or memory is None:
            memory = mapped(offer)
            self._opened[sender, slot] = offer, memory
        return memory


@dataclass(eq=False)
class HostPending:
    """An exchange in progress. :meth:`wait` returns the rows of all senders, in the order of the ranks, or raises ``RankFailure``."""

    memory: HostMemory
    number: int
    told: Pending
    shape: tuple[int, ...]
    dtype: torch.dtype
    recv_bytes: Sequence[int]

    def wait(self) -> Tensor:
        try:
            return self.memory.arrived(self)
        finally:
            self.memory._finished.add(self.number)

    def __del__(self) -> None:
        self.memory._finished.add(self.number)  # after an error, nobody waits for an exchange


class _Finished:
    """Finished exchanges of all ranks.

    Args:
        shared: int64 [ranks, 2]: for each rank, the number of exchanges before the first that it has not finished, and its process. Only the rank writes these.
    """

    def __init__(self, shared: Tensor, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._before = 0
        self._later: set[int] = set()
        self._process = os.getpid()
        shared[rank, 1] = self._process
        self._has_ended = False

    @property
    def by_all(self) -> int:
        """Number of exchanges that all ranks have finished."""
        return int(self._shared[:, 0].min())

    def add(self, number: int) -> None:
        """Records that this rank has finished an exchange. Numbers come in any order, and may come twice."""
        if number >= self._before:
            self._later.add(number)
        while self._before in self._later:
            self._later.remove(self._before)
            self._before += 1
        if not self._has_ended:
            self._shared[self._rank, 0] = self._before

    def end(self, number: int) -> None:
        """Waits until every other process has finished ``number`` exchanges or has ended. This rank then counts as finished. A forked process does nothing."""
        if self._process != os.getpid():
            return
        self._has_ended = True
        self._shared[self._rank, 0] = torch.iinfo(torch.int64).max
        deadline = time.monotonic() + _AT_END
        waiting = [process for before, process in self._shared.tolist() if before < number]
        while waiting and time.monotonic() < deadline:
            time.sleep(0.001)
            waiting = [process for before, process in self._shared.tolist() if before < number and _lives(process)]


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to someone else
    return True


def _halves(token: str) -> tuple[bytes, bytes]:
    whole = bytes.fromhex(token)
    return whole[:8], whole[8:]


def _close(blocks: list[_Block], finished: _Finished) -> None:
    finished.end(1 + max((each.user for each in blocks), default=-1))
    for each in blocks:
        each.held.close()
