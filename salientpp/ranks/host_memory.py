"""Exchanges of rows between the ranks of a host through memory that they share.

A sender writes the rows for all receivers into a block of its own. A small message tells every rank where the rows are. A receiver copies them out of the
sender's block when the message has arrived. Thus a row is copied twice, and no row passes a socket.

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
from itertools import accumulate

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.failure import FailureNotes
from salientpp.ranks.shared_memory import CannotShare, Offer, block, mapped, shared_tensors

#: Least size of a block. Larger sizes are powers of two. Pages that were never written take no memory.
_LEAST = 1 << 16

#: Numbers of a message before the first byte of each receiver's rows: the number of the block, and the words of its offer.
_NUMBERS = 1 + Offer.NUM_WORDS

#: Seconds for which a process waits at its end for others to copy its rows.
_AT_END = 30.0


@dataclass(eq=False)
class _Block:
    """Block of shared memory that this rank writes, and others read.

    Attributes:
        user: number of the last exchange that used it.
    """

    memory: Tensor
    offer: Offer
    held: contextlib.ExitStack
    user: int = -1


class HostMemory:
    """Exchanges rows between the ranks of one host (``comm``) through memory that they share.

    Only one thread at a time may begin exchanges, in the same order on every rank.
    """

    def __init__(self, comm: Comm, finished: Tensor) -> None:
        self.comm = comm
        self._blocks: list[_Block] = []
        self._opened: dict[tuple[int, int], tuple[Offer, Tensor]] = {}
        self._begun = 0
        self._finished = _Finished(finished, comm.rank)
        weakref.finalize(self, _close, self._blocks, self._finished, comm.notes)

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
        """Starts an exchange, like :meth:`salientpp.ranks.comm.Comm.all_to_all`, of rows [sum(send_counts), ...].

        Raises:
            CannotShare: the system has no memory left for the rows.
        """
        message, size = self.write(rows, None, send_counts), self.comm.size
        told = self.comm.all_to_all(message.expand(size, -1).contiguous(), [1] * size, [1] * size)
        return self.told(told, rows, recv_counts)

    def write(self, rows: Tensor, take: Tensor | None, send_counts: Sequence[int]) -> Tensor:
        """Writes rows for the next exchange, grouped by receiver. The exchange begins with :meth:`told`. Until then the caller may drop it.

        Args:
            rows: [n, ...]
            take: int64 [sum(send_counts)], the rows to write; None: all.

        Returns:
            The message that tells every rank where its rows are, int64 [6 + number of ranks] on the CPU.
        """
        number = rows.size(0) if take is None else take.numel()
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        message = torch.zeros(_NUMBERS + self.comm.size, dtype=torch.int64, device="cpu")
        if number and row_bytes:
            slot = self._writable(number * row_bytes)
            mine = self._blocks[slot]
            place = mine.memory[: number * row_bytes].view(rows.dtype).view(number, *rows.shape[1:])
            if take is None:
                place.copy_(rows)
            elif rows.device.type == "cpu":
                torch.index_select(rows, 0, take, out=place)
            else:
                place.copy_(rows.index_select(0, take))
            mine.user = self._begun
            begins = [count * row_bytes for count in accumulate(send_counts[:-1], initial=0)]
            values = [slot, *mine.offer.words(), *begins]
            message.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
        return message

    def told(self, messages: Tensor | Pending, rows: Tensor, recv_counts: Sequence[int]) -> HostPending:
        """Begins the exchange of the rows that :meth:`write` has written.

        Args:
            messages: the messages of all ranks, or their collective under way.
            rows: tensor with the dtype and the row shape of the rows that arrive.
        """
        number, self._begun = self._begun, self._begun + 1
        return HostPending(self, number, messages, (sum(recv_counts), *rows.shape[1:]), rows.dtype, recv_counts)

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
        messages = pending.messages if isinstance(pending.messages, Tensor) else pending.messages.wait()
        rows = torch.empty(pending.shape, dtype=pending.dtype, device="cpu")
        pieces = rows.split(list(pending.recv_counts))
        for sender, (piece, numbers) in enumerate(zip(pieces, messages.tolist(), strict=True)):
            if piece.numel():
                begin = numbers[_NUMBERS + self.comm.rank]
                bytes_of(piece).copy_(self._block_of(sender, numbers)[begin : begin + piece.nbytes])
        return rows

    def _block_of(self, sender: int, numbers: Sequence[int]) -> Tensor:
        slot, *words = numbers[:_NUMBERS]
        if sender == self.comm.rank:
            return self._blocks[slot].memory
        offer = Offer.of_words(words)
        known, memory = self._opened.get((sender, slot), (None, None))
        if known != offer or memory is None:
            try:
                memory = mapped(offer)
            except CannotShare:
                if not _lives(offer.process):
                    self.comm.gather_numbers([0])  # raises RankFailure, which names the rank that was killed
                raise
            self._opened[sender, slot] = offer, memory
        return memory


@dataclass(eq=False)
class HostPending:
    """An exchange in progress. :meth:`wait` returns the rows of all senders, in the order of the ranks, or raises ``RankFailure``."""

    memory: HostMemory
    number: int
    messages: Tensor | Pending
    shape: tuple[int, ...]
    dtype: torch.dtype
    recv_counts: Sequence[int]

    def wait(self) -> Tensor:
        try:
            return self.memory.arrived(self)
        finally:
            self.memory._finished.add(self.number)

    def __del__(self) -> None:
        self.memory._finished.add(self.number)  # after an error, nobody waits for an exchange


class _Finished:
    """Counts the exchanges that each rank has finished, so that no rank writes to memory that another still reads.

    Args:
        shared: int64 [ranks, 2]: for each rank, the number of its first unfinished exchange, from 0, and its process id. A rank writes only its own row.
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
        """Marks this rank as finished, then waits until every other process has finished ``number`` exchanges or has ended. A forked process does nothing."""
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
    """Returns False if a process has ended, even if its parent does not know yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _close(blocks: list[_Block], finished: _Finished, notes: FailureNotes) -> None:
    # After a failure, the other ranks may never finish their exchanges.
    finished.end(0 if notes.known is not None else 1 + max((each.user for each in blocks), default=-1))
    for each in blocks:
        each.held.close()
