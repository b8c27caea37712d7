"""Locks between threads of all ranks of a host. The kernel frees a rank's locks when the rank ends, also after ``kill -9``.

A lock is one byte of a file that the ranks share, with Linux's locks of open file descriptions (``F_OFD_SETLK``). Each holder opens the file again, so the
locks also exclude threads of one process.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import weakref
from collections.abc import Iterator

from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import CannotShare, shared_file

#: Longest pause between two attempts to get a lock, in seconds. The first pauses are shorter: a sixteenth of the time waited so far.
_LONGEST_PAUSE = 0.002
_SHORTEST_PAUSE = 0.00005


class HostLocks:
    """Locks for the threads of all ranks of a host, numbered from 0. All these ranks construct the object together.

    Raises:
        CannotShare: on every rank, if one of them cannot open the file or lock it.
    """

    def __init__(self, host: Comm) -> None:
        self._file = shared_file(host)
        weakref.finalize(self, os.close, self._file).atexit = False  # threads may still use it at the exit
        trouble = None
        try:
            with self.hold(0, 0.0):
                pass
        except OSError as error:
            trouble = f"files in memory cannot be locked here: {error}; this needs F_OFD_SETLK of Linux 3.15 or later"
        told = [facts["trouble"] for facts in host.gather_facts({"trouble": trouble})]
        for rank, words in enumerate(told):
            if words is not None:
                raise CannotShare(f"rank {rank}{host.of}: {words}")

    @contextlib.contextmanager
    def hold(self, number: int, limit: float) -> Iterator[bool]:
        """Holds a lock inside the ``with`` block. Yields False, without the lock, if other threads held it for ``limit`` seconds."""
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            has_lock = _wait_for(file, number, limit)
            try:
                yield has_lock
            finally:
                if has_lock:  # a forked child may have a copy of the descriptor, so closing it is not enough
                    _change(file, number, to_locked=False)
        finally:
            os.close(file)


def _wait_for(file: int, number: int, limit: float) -> bool:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            _change(file, number, to_locked=True)
            return True
        waited = time.monotonic() - begin
        if waited >= limit:
            return False
        time.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited / 16)))


def _change(file: int, number: int, to_locked: bool) -> None:
    """Locks a byte or unlocks it. Raises BlockingIOError if another holds the lock."""
    import fcntl  # only on Unix

    # struct flock of 64-bit Linux: type, origin of the start, start, length, process (0).
    kind = fcntl.F_WRLCK if to_locked else fcntl.F_UNLCK
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))
