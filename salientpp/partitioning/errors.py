"""Errors of partitioning that are neither the caller's nor the data's mistake: a partitioner that failed, and memory that ran out."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


class PartitionerError(RuntimeError):
    """A partitioner failed. The text says why, what memory it needs, and which methods need less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. torch and C++ report that as a plain RuntimeError, the system as an OSError."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in ("can't allocate memory", "bad_alloc", "not enough memory"))
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


@contextlib.contextmanager
def names_memory(partitioner: str, what: str, nbytes: int, less: str) -> Iterator[None]:
    """Turn memory that runs out inside the block into a PartitionerError; arguments as of :func:`out_of_memory`."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, PartitionerError) or not is_out_of_memory(error):
            raise
        raise PartitionerError(out_of_memory(partitioner, what, nbytes, less)) from error


def out_of_memory(partitioner: str, what: str, nbytes: int, less: str) -> str:
    """What to say of a partitioner whose memory ran out: the size of its input, an estimate of what it needs, and the methods that need less."""
    return (
        f"{partitioner} ran out of memory for {what}: it needs about {nbytes / 1e9:.1f} GB beside what this process has. Use a machine with more memory, "
        f"{less}, or give an assignment"
    )
