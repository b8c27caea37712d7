"""Tells whether the C library gives a block of memory pages of its own, which return to the system when it is freed."""

from __future__ import annotations

import ctypes

import pytest

needs_counts_of_blocks = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")


class Blocks(ctypes.Structure):
    """Result of ``mallinfo2``. ``hblks`` is the number of blocks that have pages of their own."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]


def has_own_pages(number: int) -> bool:
    """Returns True if the C library gives a block of ``number`` bytes pages of its own."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype, library.malloc.restype = Blocks, ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    before = library.mallinfo2().hblks
    block = library.malloc(number)
    after = library.mallinfo2().hblks
    library.free(block)
    return after > before
