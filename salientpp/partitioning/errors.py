"""Errors that say how much memory a partitioner needs if it fails, and which methods need less."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

#: Words of torch, of C++ and of this package's operators (csrc/check.h).
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "not enough memory", "cannot allocate ", "Cannot allocate memory")


class PartitionerError(RuntimeError):
    """A partitioner failed. The text says why, what memory it needs, and which methods need less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error means that memory ran out. torch and C++ raise a plain RuntimeError for it, the system an OSError."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


@contextlib.contextmanager
def names_memory(partitioner: str, what: str, nbytes: int, less: str) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into a PartitionerError; the arguments are the same as for :func:`out_of_memory`."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, PartitionerError) or not is_out_of_memory(error):
            raise
        raise PartitionerError(out_of_memory(partitioner, what, nbytes, less)) from error


def out_of_memory(partitioner: str, what: str, nbytes: int, less: str) -> str:
    """Returns the error text for a partitioner without enough memory: its input's size, an estimate of its need, and methods that need less."""
    return (
        f"{partitioner} ran out of memory for {what}: it needs about {nbytes / 1e9:.1f} GB besides what this process has. Use a machine with more memory, "
        f"{less}, or give an assignment"
    )
