"""Memory-mapped arrays: finds the file behind an array, and releases its pages from this process's memory.

Pages that a process has read from a mapped file count as resident until the system needs the memory. Released pages are read again on the next use.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path

from torch import Tensor

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s*(.*)")


def nothing() -> None:
    """Does nothing, because there are no pages to release."""


def releaser(array: Tensor) -> Callable[[], None]:
    """Returns a function that releases the pages under an array at each call. Other threads may read the array meanwhile, but must not write to it.

    The result is :func:`nothing` unless the array lies in a mapped file (Linux) and the process has not written to any page of that mapping.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    # Only whole pages: the first and the last may hold other data too.
    first = -(-array.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.data_ptr() + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is None or not array.is_contiguous() or last <= first or _map_over(first, last) is None:
        return nothing

    def release() -> None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    return release


def mapped_from(array: Tensor) -> tuple[Path, int] | None:
    """Returns the file that an array is mapped from, and the byte at which the array begins there.

    None unless the array is mapped (Linux), and the process has not written to any page of that mapping.
    """
    first = array.data_ptr()
    found = _map_over(first, first + array.nbytes) if array.is_contiguous() and array.numel() else None
    if found is None:
        return None
    start, offset, inode, path = found
    try:
        # The system escapes unusual characters of a path, so make sure that the path leads to this file.
        is_there = path.is_absolute() and path.stat().st_ino == inode
    except OSError:
        return None
    return (path, offset + first - start) if is_there else None


def _map_over(first: int, last: int) -> tuple[int, int, int, Path] | None:
    """Returns the mapping that covers the addresses [first, last): its start, the file's offset and inode, and the path.

    None unless one mapping of a file covers them all and has no private (written) pages.
    """
    inside = None
    try:
        # For smaps, the system visits every page of a mapping. So it is read only as far as needed, and never for arrays in memory.
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                begin, end = (int(address, 16) for address in line[: line.index(" ")].split("-"))
                if begin <= first < end:
                    inside = _HEAD.match(line) if last <= end else None
                    break
        if inside is None or int(inside[4]) == 0:
            return None
        with open("/proc/self/smaps", errors="surrogateescape") as maps:
            own = dropwhile(lambda line: not line.startswith(f"{inside[1]}-{inside[2]} "), maps)
            anonymous = next((line for line in own if line.startswith("Anonymous:")), "")
    except OSError:
        return None
    is_untouched = anonymous.split()[1:2] == ["0"]
    return (int(inside[1], 16), int(inside[3], 16), int(inside[4]), Path(inside[5])) if is_untouched else None
