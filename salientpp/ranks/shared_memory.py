"""Memory that the ranks of a host have in common. It goes with the last of them.

A block is anonymous memory (``memfd_create``): one rank makes it, the others open it through ``/proc`` of that process and map it. The kernel takes it back
when the last process that has it mapped is gone, also after ``kill -9``. Processes can do so that see each other's numbers in ``/proc`` and run for the same
user: those of a host, unless each is in a container of its own. A block begins with random bytes, by which it is known.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.ranks.comm import Comm

_TOKEN_BYTES = 16

#: Where each tensor of a block begins: at a multiple of a page, so that a device may register one of them alone.
_ALIGNMENT = mmap.PAGESIZE


class CannotShare(RuntimeError):
    """This process cannot map another's memory; the text says why."""


@dataclass(frozen=True)
class Offer:
    """What a process needs to know of another's block; JSON values by ``vars``."""

    process: int
    file: int
    token: str
    num_bytes: int


@contextlib.contextmanager
def block(num_bytes: int) -> Iterator[tuple[Tensor, Offer]]:
    """Memory that this process makes, uint8 [num_bytes], and the offer by which others may map it inside the block.

    Pages that nobody has written are zeros and take nothing. Those who have mapped the memory keep it.

    Raises:
        CannotShare: the system has no such memory.
    """
    try:
        file = os.memfd_create("salientpp", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise CannotShare(f"memory without a name (memfd_create) is not to be had here: {error}") from None
    try:
        try:
            os.ftruncate(file, _ALIGNMENT + num_bytes)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(file, token, 0)
            memory = _mapped(file, num_bytes)
        except OSError as error:
            raise CannotShare(f"{num_bytes} bytes of shared memory are not to be had: {error}") from None
        yield memory, Offer(os.getpid(), file, token.hex(), num_bytes)
    finally:
        os.close(file)


def mapped(offer: Offer) -> Tensor:
    """uint8 [num_bytes]: the memory of a block that another process holds open; CannotShare if it cannot be opened, or is not that block."""
    name = f"/proc/{offer.process}/fd/{offer.file}"
    try:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CannotShare(
            f"memory of process {offer.process} cannot be opened ({name}: {error.strerror}); are the ranks in containers of their own?"
        ) from None
    try:
        size = os.fstat(file).st_size
        if size != _ALIGNMENT + offer.num_bytes or os.pread(file, _TOKEN_BYTES, 0).hex() != offer.token:
            raise CannotShare(f"process {offer.process} of this host is none of the ranks that it is said to be one of")
        return _mapped(file, offer.num_bytes)
    except OSError as error:
        raise CannotShare(f"memory of process {offer.process} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(file)


def _mapped(file: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(file, _ALIGNMENT + num_bytes)  # the tensor keeps it
    return torch.frombuffer(memory, dtype=torch.uint8)[_ALIGNMENT:]


def sharing(comm: Comm, hosts: Sequence[range]) -> str | None:
    """Why some rank cannot map the memory of the first of its host; None if all can. Collective, with the same answer on every rank."""
    first = next(ranks[0] for ranks in hosts if comm.rank in ranks)
    _, told = _shared_memory(comm, first, _ALIGNMENT)
    return next((f"rank {rank}{comm.of}: {words}" for rank, words in enumerate(told) if words), None)


def shared_tensors(host: Comm, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Uninitialised tensors (zeros, until somebody writes) that all ranks of a host see, in one block; collective among them.

    Args:
        shapes: of each tensor shape and dtype; the same on all ranks of the host.

    Raises:
        CannotShare: on every rank, if one cannot.
    """
    sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in shapes]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    memory, told = _shared_memory(host, 0, begins[-1])
    words = next((words for words in told if words), None)
    if words is not None or memory is None:
        raise CannotShare(words or "the first rank of the host has no memory to share")
    return [
        memory[begin : begin + size].view(dtype).view(tuple(shape))
        for (shape, dtype), begin, size in zip(shapes, begins, sizes)
    ]


def _shared_memory(comm: Comm, first: int, num_bytes: int) -> tuple[Tensor | None, list[str | None]]:
    """A block of the rank ``first`` of this host, as this rank has mapped it; and of every rank why it could not."""
    memory, made, trouble = None, None, None
    with contextlib.ExitStack() as held:
        try:
            if comm.rank == first:
                memory, made = held.enter_context(block(num_bytes))
        except CannotShare as error:
            trouble = str(error)
        offer = comm.gather_facts({"offer": made and vars(made)})[first]["offer"]
        try:
            if comm.rank != first and offer is not None:
                memory = mapped(Offer(**offer))
        except CannotShare as error:
            trouble = str(error)
        return memory, [facts["trouble"] for facts in comm.gather_facts({"trouble": trouble})]
