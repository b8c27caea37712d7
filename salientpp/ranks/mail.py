"""Combines small all-to-alls between the ranks of a :class:`Comm`: those of one step of the pipeline (a tick) leave together, as one.

A message costs at least one round trip of the network, however short it is, and gloo works on two collectives at a time. So a tick that starts several small
collectives waits for several round trips. Mail posts each of them as a **letter**. All letters posted since the last flush travel in one all-to-all of bytes.

Every rank posts the same letters in the same order, with the sizes that :meth:`Comm.all_to_all` takes. So both sides know where each letter lies in the bytes,
and no header travels::

    for each rank, in order: its piece of the first letter, its piece of the second letter, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm, Pending


@dataclass(eq=False)
class Letter:
    """Small all-to-all that was posted, and leaves together with others. :meth:`Mail.post` makes it.

    Attributes:
        mail: the mail that sends it.
        tensor: rows to send, grouped by rank.
        send_counts, recv_counts: number of rows to and from each rank.
    """

    mail: Mail
    tensor: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    _delivery: _Delivery | None = None
    _place: int = 0

    def wait(self) -> Tensor:
        """Waits for the rows of this letter. If it has not left yet, first sends all letters that wait with it.

        Returns:
            [sum(recv_counts), ...] on the host, ordered by source rank.

        Raises:
            RankFailure: another rank failed, left or stopped answering.
        """
        if self._delivery is None:
            self.mail.flush()
        assert self._delivery is not None  # the flush has sent it
        arrived, row_shape, dtype = self._delivery.letter(self._place), self.tensor.shape[1:], self.tensor.dtype
        if arrived.dtype == dtype and arrived.shape[1:] == row_shape:
            return arrived
        shape = (sum(self.recv_counts), *row_shape)
        return arrived.view(dtype).view(shape) if arrived.numel() else self.tensor.new_empty(shape)

    @property
    def nbytes_received(self) -> int:
        return sum(self.recv_counts) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


@dataclass(eq=False)
class _Delivery:
    """The collective in which some letters left together. It holds no references to the letters, because they refer to it.

    Attributes:
        sizes: bytes of the arriving pieces, by rank and then by letter. A letter that travels alone has none, and arrives as it was sent.
    """

    pending: Pending
    num_letters: int
    sizes: list[int] = field(default_factory=list)
    _pieces: tuple[Tensor, ...] = ()

    def letter(self, place: int) -> Tensor:
        """Waits, and returns what arrived for the letter at this place: bytes, or the rows of a letter that travelled alone."""
        arrived = self.pending.wait()
        if self.num_letters == 1:
            return arrived
        self._pieces = self._pieces or arrived.split(self.sizes)
        return torch.cat(self._pieces[place :: self.num_letters])  # a copy, which is aligned for every dtype


class Mail:
    """Sends letters together. One thread at a time posts and flushes, in the same order on all ranks.

    Args:
        comm: the ranks that write to each other.
        merges: if False, each letter leaves when it is posted. All ranks must use the same value.
        empty: memory for arriving bytes; see :meth:`Comm.all_to_all`.

    Attributes:
        messages: number of all-to-alls that were started. A single rank starts none.
    """

    def __init__(
        self,
        comm: Comm,
        merges: bool = True,
        empty: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> None:
        self.comm = comm
        # A single rank has nobody to write to, and its threads may each drive an epoch.
        self.merges = merges and comm.size > 1
        self.messages = 0
        self._empty = empty
        self._letters: list[Letter] = []

    def post(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Letter:
        """Posts rows for every rank: ``send_counts[r]`` consecutive rows go to rank r, and ``recv_counts[r]`` rows come from it.

        Args:
            tensor: [sum(send_counts), ...] of any dtype, contiguous, on the CPU. It must not change before the letter has arrived.

        Raises:
            ValueError: the tensor is on a device, or its number of rows or the number of counts is wrong.
        """
        size = self.comm.size
        if tensor.device.type != "cpu":
            raise ValueError(
                f"post() sends tensors on the CPU, got one on {tensor.device}; send it with Comm.all_to_all"
            )
        if len(send_counts) != size or len(recv_counts) != size or sum(send_counts) != tensor.size(0):
            raise ValueError(
                f"post() needs a count for each of {size} ranks, and a row for each that it sends; got {len(send_counts)} and {len(recv_counts)} "
                f"counts, and {tensor.size(0)} rows for {sum(send_counts)}"
            )
        letter = Letter(self, tensor, send_counts, recv_counts)
        if self.merges:
            self._letters.append(letter)
        else:
            self._send([letter])
        return letter

    def flush(self) -> None:
        """Starts one all-to-all with all letters posted since the last flush. Without letters, nothing is sent."""
        letters, self._letters = self._letters, []
        if letters:
            self._send(letters)

    def _send(self, letters: list[Letter]) -> None:
        if len(letters) == 1:
            (letter,) = letters
            pending = self.comm.all_to_all(letter.tensor, letter.send_counts, letter.recv_counts, self._empty)
            delivery = _Delivery(pending, 1)
        else:
            send = [[count * letter._row_bytes for count in letter.send_counts] for letter in letters]
            recv = [[count * letter._row_bytes for count in letter.recv_counts] for letter in letters]
            pieces = zip(*(bytes_of(letter.tensor).split(sizes) for letter, sizes in zip(letters, send)))
            together = torch.cat([piece for of_rank in pieces for piece in of_rank])
            sent, received = ([sum(of_rank) for of_rank in zip(*by_letter)] for by_letter in (send, recv))
            pending = self.comm.all_to_all(together, sent, received, self._empty)
            delivery = _Delivery(pending, len(letters), [size for of_rank in zip(*recv) for size in of_rank])
        self.messages += self.comm.size > 1
        for place, letter in enumerate(letters):
            letter._delivery, letter._place = delivery, place
