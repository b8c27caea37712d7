"""How do arrays that are mapped from files stay out of this process's memory?

Pages of a mapped file that a process has read count as resident until somebody wants the memory. Here is how to let go of them at once; the system keeps
them as long as it likes, and they come again when they are read again.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)")


def nothing() -> None:
    """There is nothing to let go of."""


def releaser(array: Tensor) -> Callable[[], None]:
    """What lets go of the pages under an array each time it is called. The array may be read meanwhile, and must not be written to.

    It is :func:`nothing` unless the array lies in a mapped file (Linux), and none of that map's pages was written to.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    # The pages that are the array's alone.
    first = -(-array.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.data_ptr() + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is None or not array.is_contiguous() or last <= first or not _only_read(first, last):
        return nothing

    def release() -> None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    return release


def _only_read(first: int, last: int) -> bool:
    """Whether addresses belong to one map, of a file, without pages of this process's own."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return False
    inside = False
    for line in lines:
        if head := _HEAD.match(line):
            inside = int(head[1], 16) <= first and last <= int(head[2], 16) and int(head[3]) > 0
        elif inside and line.startswith("Anonymous:"):
            return line.split()[1] == "0"
    return False
