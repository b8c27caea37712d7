"""Finds the file behind a memory-mapped array, and releases the array's pages from this process's memory.

Pages that a process has read from a mapped file count as resident until the system needs the memory. Released pages are read again on the next use.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s*(.*)")


def nothing() -> None:
    """Does nothing: the result of :func:`releaser` for an array without pages to release."""


def releaser(array: Tensor) -> Callable[[], None]:
    """Returns a function that releases the pages under an array at each call. Other threads may read the array meanwhile, but must not write to it.

    The result is :func:`nothing` unless the array lies in a mapped file (Linux) and the process has not written to any page of that mapping.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    # Only whole pages: the first and the last may hold other data too.
    first = -(-array.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.data_ptr() + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is None or not array.is_contiguous() or last <= first or _maps_over([(first, last)]) == [None]:
        return nothing

    def release() -> None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    return release


def mapped_from(array: Tensor) -> tuple[Path, int] | None:
    """Returns the file that an array is mapped from, and the byte at which the array begins there.

    None unless the array is mapped (Linux), and the process has not written to any page of that mapping.
    """
    return files_of([array])[0]


def files_of(arrays: Sequence[Tensor]) -> list[tuple[Path, int] | None]:
    """Returns, for each array, the file that it is mapped from and the byte at which it begins there, or None, as :func:`mapped_from` does.

    Reads the system's list of mappings once for all arrays, which may take 0.1 s.
    """
    spans = [
        (array.data_ptr(), array.data_ptr() + array.nbytes) if array.is_contiguous() and array.numel() else (0, 0)
        for array in arrays
    ]
    return [None if found is None else _file_of(first, *found) for (first, _), found in zip(spans, _maps_over(spans))]


def _file_of(first: int, start: int, offset: int, inode: int, path: Path) -> tuple[Path, int] | None:
    try:
        # The system escapes unusual characters of a path, so make sure that the path leads to this file.
        is_there = path.is_absolute() and path.stat().st_ino == inode
    except OSError:
        return None
    return (path, offset + first - start) if is_there else None


def _maps_over(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, Path] | None]:
    """Finds, for each span of addresses [first, last), the file mapping that covers it: (start, offset in the file, inode, path).

    None for a span unless one mapping of a file covers all of it and has no private (written) pages.
    """
    heads: dict[tuple[int, int], re.Match[str]] = {}
    left = {span for span in spans if span[1]}
    try:
        # For smaps, the system visits every page of a mapping. So it is read only as far as needed, and never for arrays in memory.
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps if left else ():
                begin, end = (int(address, 16) for address in line[: line.index(" ")].split("-"))
                here = {span for span in left if begin <= span[0] < end}
                head = _HEAD.match(line) if here else None
                if head is not None and int(head[4]):
                    heads |= {span: head for span in here if span[1] <= end}
                left -= here
                if not left:
                    break
        untouched = _untouched({head[0].partition(" ")[0] for head in heads.values()})
    except OSError:
        return [None] * len(spans)
    found = {
        span: (int(head[1], 16), int(head[3], 16), int(head[4]), Path(head[5]))
        for span, head in heads.items()
        if head[0].partition(" ")[0] in untouched
    }
    return [found.get(span) for span in spans]


def _untouched(ranges: set[str]) -> set[str]:
    """Returns those of the mappings ``ranges`` (such as '7f00-7f40') to which the process has not written."""
    if not ranges:
        return set()
    with open("/proc/self/smaps", errors="surrogateescape") as maps:
        return _unwritten_of(ranges, maps)


def _unwritten_of(ranges: set[str], smaps: Iterable[str]) -> set[str]:
    """Returns those of ``ranges`` without private pages, in memory or swapped out, by the lines of smaps. Reads no further than needed."""
    found: set[str] = set()
    left, inside = set(ranges), None
    for line in smaps:
        # Only addresses begin with a digit or a small letter. Most lines are of other mappings, and are skipped at once.
        begins = line[0] > "Z" or line[0] <= "9"
        if inside is None and not begins:
            continue
        name, _, rest = line.partition(" ")
        if begins:
            if not left:
                break
            inside = name if name in left else None
            left.discard(name)
        elif inside is not None and name == "Anonymous:":
            if rest.split()[0] == "0":
                found.add(inside)
        elif inside is not None and name == "Swap:" and rest.split()[0] != "0":
            found.discard(inside)
    return found
