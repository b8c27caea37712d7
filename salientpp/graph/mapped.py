"""Arrays that are mapped from files: which files they are, and how their pages leave this process's memory at once.

Pages of a mapped file that a process has read count as resident until somebody wants the memory. Pages that were let go of are read again when needed.
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
    """There is nothing to let go of."""


def releaser(array: Tensor) -> Callable[[], None]:
    """What lets go of the pages under an array each time it is called. The array may be read meanwhile, and must not be written to.

    It is :func:`nothing` unless the array lies in a mapped file (Linux), and none of that map's pages was written to.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    # The pages that are the array's alone.
    first = -(-array.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.data_ptr() + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is None or not array.is_contiguous() or last <= first or _map_over(first, last) is None:
        return nothing

    def release() -> None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    return release


def mapped_from(array: Tensor) -> tuple[Path, int] | None:
    """The file that an array lies in and the byte where it begins there; None unless it is mapped (Linux), and none of that map's pages was written to."""
    first = array.data_ptr()
    found = _map_over(first, first + array.nbytes) if array.is_contiguous() and array.numel() else None
    if found is None:
        return None
    start, offset, inode, path = found
    try:
        # The system's text says it otherwise of odd names.
        is_there = path.is_absolute() and path.stat().st_ino == inode
    except OSError:
        return None
    return (path, offset + first - start) if is_there else None


def _map_over(first: int, last: int) -> tuple[int, int, int, Path] | None:
    """If addresses belong to one map, of a file, without pages of this process's own: its start, the offset and inode of the file, its path."""
    inside = None
    try:
        # For smaps the system looks at every page of a map, so it is read no further than needed, and not at all for arrays in memory.
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
