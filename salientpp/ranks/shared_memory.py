"""Memory that the ranks of a host share. It is freed when the last of them ends.

A block is anonymous memory (``memfd_create``). One rank makes it; the others open it through ``/proc`` of that process and map it. The kernel frees it when
the last process that maps it is gone, also after ``kill -9``. Processes can share memory if they see each other's process ids in ``/proc`` and run as the
same user. So all processes of a host can, unless each is in its own container. A block begins with random bytes, which identify it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from salientpp.ranks.comm import Comm

_TOKEN_BYTES = 16

#: Alignment of the tensors in a block: a page, so that a device can register each of them separately.
_ALIGNMENT = mmap.PAGESIZE


class CannotShare(RuntimeError):
    """The memory of another process cannot be mapped. The text gives the reason."""


@dataclass(frozen=True)
class Offer:
    """Data that a process needs to map another process's block of memory. ``vars(offer)`` has them as JSON values."""

    process: int
    file: int
    token: str
    num_bytes: int

    #: Length of :meth:`words`.
    NUM_WORDS: ClassVar[int] = 5

    def words(self) -> list[int]:
        """Returns the offer as signed 64-bit integers, for tables and messages of numbers."""
        token = bytes.fromhex(self.token)
        halves = (int.from_bytes(token[at : at + 8], "little", signed=True) for at in (0, 8))
        return [self.process, self.file, self.num_bytes, *halves]

    @classmethod
    def of_words(cls, words: Sequence[int]) -> Offer:
        process, file, num_bytes, *halves = words
        token = b"".join(half.to_bytes(8, "little", signed=True) for half in halves)
        return cls(process, file, token.hex(), num_bytes)


@contextlib.contextmanager
def block(num_bytes: int) -> Iterator[tuple[Tensor, Offer]]:
    """Yields memory that this process makes, uint8 [num_bytes], and the offer with which other processes can map it inside the ``with`` block.

    Pages that were never written are zeros and take no memory. Processes that have mapped the memory keep it.

    Raises:
        CannotShare: the system has no such memory.
    """
    try:
        file = os.memfd_create("salientpp", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise CannotShare(f"anonymous shared memory (memfd_create) is not available here: {error}") from None
    try:
        try:
            os.ftruncate(file, _ALIGNMENT + num_bytes)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(file, token, 0)
            memory = _mapped(file, num_bytes)
        except OSError as error:
            raise CannotShare(f"{num_bytes} bytes of shared memory are not available: {error}") from None
        yield memory, Offer(os.getpid(), file, token.hex(), num_bytes)
    finally:
        os.close(file)


def mapped(offer: Offer) -> Tensor:
    """Maps a block that another process offers, as uint8 [num_bytes]. Raises CannotShare if it cannot be opened, or is not the block of the offer."""
    file = _opened(offer)
    try:
        return _mapped(file, offer.num_bytes)
    except OSError as error:
        raise CannotShare(f"memory of process {offer.process} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(file)


def _opened(offer: Offer) -> int:
    """Opens the file of a block that a process offers, and returns the descriptor. Raises the errors of :func:`mapped`."""
    name = f"/proc/{offer.process}/fd/{offer.file}"
    try:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CannotShare(
            f"memory of process {offer.process} cannot be opened ({name}: {error.strerror}); check whether the ranks are in separate containers"
        ) from None
    try:
        size = os.fstat(file).st_size
        if size == _ALIGNMENT + offer.num_bytes and os.pread(file, _TOKEN_BYTES, 0).hex() == offer.token:
            return file
        words = f"process {offer.process} of this host is not the rank that offered the memory"
    except OSError as error:
        words = f"memory of process {offer.process} cannot be read: {error.strerror}"
    os.close(file)
    raise CannotShare(words)


def _mapped(file: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(file, _ALIGNMENT + num_bytes)  # the tensor keeps the map alive
    return torch.frombuffer(memory, dtype=torch.uint8)[_ALIGNMENT:]


def sharing(comm: Comm, hosts: Sequence[range]) -> str | None:
    """Returns why some rank cannot map the memory of its host's first rank, or None if all can. Collective, with the same result on every rank."""
    first = next(ranks[0] for ranks in hosts if comm.rank in ranks)
    _, told = _shared(comm, first, _ALIGNMENT, mapped)
    return next((f"rank {rank}{comm.of}: {words}" for rank, words in enumerate(told) if words), None)


def shared_tensors(host: Comm, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Makes uninitialised tensors that all ranks of a host share, in one block. They are zeros until written. Collective among these ranks.

    Args:
        shapes: shape and dtype of each tensor, the same on all ranks of the host.

    Raises:
        CannotShare: on every rank, if one of them cannot share memory.
    """
    sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in shapes]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    memory = _all_have(*_shared(host, 0, begins[-1], mapped))
    return [
        memory[begin : begin + size].view(dtype).view(tuple(shape))
        for (shape, dtype), begin, size in zip(shapes, begins, sizes)
    ]


def shared_file(host: Comm) -> int:
    """Opens one empty file on all ranks of a host, such as for locks, and returns the descriptor. Collective among these ranks.

    Raises:
        CannotShare: on every rank, if one of them cannot open the file.
    """
    return _all_have(*_shared(host, 0, _ALIGNMENT, _opened))


T = TypeVar("T")


def _all_have(taken: T | None, told: Sequence[str | None]) -> T:
    """Returns ``taken``, this rank's result of :func:`_shared`, after checking that every rank has a result.

    Args:
        told: for every rank, why it has no result, or None.

    Raises:
        CannotShare: on every rank, if some rank has none.
    """
    words = next((words for words in told if words), None)
    if words is not None or taken is None:
        raise CannotShare(words or "the first rank of the host has no memory to share")
    return taken


def _shared(comm: Comm, first: int, num_bytes: int, take: Callable[[Offer], T]) -> tuple[T | None, list[str | None]]:
    """Calls ``take`` on every rank with the offer of memory that rank ``first`` makes.

    Returns:
        The result of this rank, and for every rank the reason why it has none, or None.
    """
    taken, made, trouble = None, None, None
    with contextlib.ExitStack() as held:
        try:
            if comm.rank == first:
                _, made = held.enter_context(block(num_bytes))
        except CannotShare as error:
            trouble = str(error)
        offer = comm.gather_facts({"offer": made and vars(made)})[first]["offer"]
        try:
            if offer is not None:
                taken = take(Offer(**offer))
        except CannotShare as error:
            trouble = str(error)
        return taken, [facts["trouble"] for facts in comm.gather_facts({"trouble": trouble})]
