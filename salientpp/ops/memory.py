"""Functions for memory: huge pages for a tensor, a tensor's bytes, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from salientpp.ops.library import operators


def use_huge_pages(tensor: Tensor) -> None:
    """Asks the system to move a large CPU tensor into huge pages, in place. Reading rows at random is then faster.

    It does nothing for small or strided tensors, memory-mapped files, and systems without huge pages or without
    ``MADV_COLLAPSE`` (Linux 6.1). It takes about as long as copying the tensor. Other threads may read the tensor meanwhile.
    """
    operators.use_huge_pages(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor, or of a contiguous copy, as uint8 [bytes].

    torch calls a tensor of at most one entry contiguous whatever its strides are, and then refuses to view it as bytes.
    """
    tensor = tensor.detach().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def return_freed_memory() -> None:
    """Returns memory that this process has freed, and that the GNU C library keeps, to the system. Without that library it does nothing.

    Without this call, the library keeps the pages of a freed block that lies below a block in use. After a large block
    was freed, this holds for blocks of up to 32 MiB. Memory of other threads is returned only for those that called :func:`mark_thread`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
        _return_ends()


#: Size in bytes of the block of a marked thread, and its size for a moment. The library returns memory when 64 KiB or more are freed. From 128 KiB on, a block
#: may have pages of its own.
_MARK, _SMALLER = 100 << 10, 16 << 10

#: Number of a marked thread -> address of its block.
_marks: dict[int, int] = {}


def mark_thread() -> None:
    """Lets :func:`return_freed_memory` return memory that the C library keeps for this thread, also after the thread has ended. Later calls do nothing.

    The GNU C library takes the blocks of each thread from an arena, which may outlive the thread. ``malloc_trim`` returns the free pages between the blocks
    of all arenas, but free pages at the end only of the main thread's. The end of another arena is returned when a block of that arena is freed. So a marked
    thread has a block, of which any thread can free a part.
    """
    thread = threading.get_ident()
    if thread not in _marks:
        malloc = ctypes.CDLL(None).malloc
        malloc.restype = ctypes.c_void_p
        address = malloc(ctypes.c_size_t(_MARK))
        if address:
            _marks[thread] = address


def _return_ends() -> None:
    """Returns the free ends of the arenas of marked threads, unless the user has set limits or the process uses another C library."""
    library = ctypes.CDLL(None)
    if not _marks or not hasattr(library, "mallopt") or _is_set_by_user():
        return
    library.realloc.restype = ctypes.c_void_p
    with _changing:
        library.mallopt(_RETURNED, 128 << 10)
        for thread, address in [*_marks.items()]:
            for size in (_SMALLER, _MARK):
                address = library.realloc(ctypes.c_void_p(address), ctypes.c_size_t(size)) or address
            _marks[thread] = address
        if _is_limited:
            _set_limits()
        else:  # the values that the library's own adaptation reaches
            library.mallopt(_OWN_PAGES, _USUAL)
            library.mallopt(_RETURNED, 2 * _USUAL)


#: Growth in bytes for which :func:`return_growth` returns memory. The step after it takes new pages: in models with smaller tables, that cost more than
#: a tenth of the time of eight steps.
_GROWTH = 256 << 20

#: Smallest number of bytes that the process has held since :func:`return_growth` last returned memory.
_held = 0


def return_growth() -> None:
    """Calls :func:`return_freed_memory` if the process has grown by 256 MiB or more since this function's last return, and the user has set no limits."""
    global _held
    if _is_set_by_user():
        return
    held = _held_bytes()
    if held is not None and held - _held < _GROWTH:
        _held = min(held, _held)
        return
    return_freed_memory()
    _held = _held_bytes() or 0


def _held_bytes() -> int | None:
    """Returns the bytes of memory that this process holds, without files and shared memory; None if the system does not tell."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except (OSError, ValueError):
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


#: Options of ``mallopt`` (malloc.h of the GNU C library). From the size in the first, a block has pages of its own, which return to the system when it is
#: freed. The library returns free memory above the size in the second.
_OWN_PAGES, _RETURNED = -3, -1

#: Values of the first option, in bytes: while some model asks for freed blocks to be returned, while they are to be kept, and otherwise. By default, glibc
#: adapts the options to the blocks that a process frees. Setting one ends the adaptation. So the last value is the largest that glibc itself reaches.
#: Data sets are mostly larger than the second value, so they return to the system when they are freed. The second option is 128 KiB at the start.
_SMALLEST, _LARGEST, _USUAL = 4 << 20, 1 << 30, 32 << 20

#: Environment variables in which a user sets these options, and their names in the variable ``GLIBC_TUNABLES``.
_SET_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold=", "glibc.malloc.trim_threshold=")

#: Number of calls of :func:`return_freed_blocks` that no :func:`end_return_of_freed_blocks` has ended, whether :func:`keep_freed_blocks` holds, and their
#: lock. The lock is reentrant, because a garbage collection may call the second function within the first.
_asking, _keeping, _changing = 0, False, threading.RLock()

if hasattr(os, "register_at_fork"):
    # A child would wait for the lock forever, and would know a block by its old address.
    os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_changing.release)

#: True if :func:`_set_limits` has ended the library's adaptation.
_is_limited = False


def return_freed_blocks() -> None:
    """Makes the C library return freed large blocks to the system, until :func:`end_return_of_freed_blocks` is called as often.

    By default glibc keeps freed blocks of up to 32 MiB for later use. Tensors of other sizes then fragment these
    blocks: a 14-layer model took 3 times its tensors' bytes.
    """
    global _asking
    with _changing:
        _asking += 1
        _set_limits()
        if _keeping:
            return_freed_memory()


def end_return_of_freed_blocks() -> None:
    """Ends the effect of one call of :func:`return_freed_blocks`. After the last one, freed blocks are kept again."""
    global _asking
    with _changing:
        _asking -= 1
        if not _asking:
            _set_limits()


def keep_freed_blocks(keep: bool) -> None:
    """Makes the C library keep all freed blocks of up to 1 GiB for later use, or ends this and returns what was kept.

    A large block otherwise comes from the system, and the first touch of each of its pages is a page fault. Kept blocks suit steps that make tables of
    about the same sizes. Nothing is kept while :func:`return_freed_blocks` has effect.
    """
    global _keeping
    with _changing:
        if keep or _keeping:
            _keeping = keep
            _set_limits()
    if not keep:
        return_freed_memory()


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _SET_BY_USER) or any(name in tunables for name in _TUNABLES)


def _set_limits() -> None:
    """Sets the two options, unless the user has set one or the process uses another C library."""
    global _is_limited
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or _is_set_by_user():
        return
    _is_limited = True
    keeps = _keeping and not _asking
    if not set_option(_OWN_PAGES, _SMALLEST if _asking else _LARGEST if keeps else _USUAL):
        set_option(
            _OWN_PAGES, _USUAL
        )  # before 2.35, glibc refuses larger values, and would keep the one of this moment
    set_option(_RETURNED, -1 if keeps else 128 << 10)  # -1: never, except by return_freed_memory()
