"""Divides the memory that a conversion may use."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

#: Arrays may take this fraction of the memory that is left below the limit. The rest is for allocators, file buffers and the interpreter.
_SHARE = 0.6

#: Least number of bytes for arrays. With fewer, reading the short pieces would take longer than the work on them.
_LEAST = 8 * 2**20


@dataclass(frozen=True)
class Budget:
    """Limits in bytes that a conversion keeps. ``memory`` limits the process's resident memory (0: not given), ``working`` the arrays of one step."""

    memory: int
    working: int

    @classmethod
    def of(cls, memory: int | str) -> Budget:
        """Returns the limits for a process that may take ``memory`` in all. ``working`` is 60% of what Python, torch and imported modules leave of it.

        Raises:
            ValueError: ``memory`` is not a number of bytes, or too little.
        """
        asked = read_bytes(memory)
        now = _resident_bytes()
        working = int((asked - now) * _SHARE)
        if working < _LEAST:
            raise ValueError(
                f"memory={memory} is too little: Python and torch take {now / 1e6:,.0f} MB, and the conversion needs {_LEAST / _SHARE / 1e6:,.0f} MB more; "
                f"give at least {-(-(now + _LEAST / _SHARE) // 10**6):.0f}MB"
            )
        return cls(asked, working)

    def needs(self, nbytes: int, step: str) -> None:
        """Raises ValueError if ``step`` needs more bytes for its arrays than the budget has."""
        if nbytes > self.working:
            more = self.memory + (nbytes - self.working) / _SHARE
            raise ValueError(
                f"{step} needs {nbytes / 1e6:,.1f} MB for its arrays, and memory={self.memory / 1e6:,.0f}MB leaves {self.working / 1e6:,.1f} MB for them; "
                f"give at least {-(-more // 10**6):.0f}MB"
            )


def read_bytes(memory: int | str) -> int:
    """Returns a number of bytes, from a number or a text such as 4GB or 512MiB. Raises ValueError for anything else."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", memory.upper()) if isinstance(memory, str) else None
    if match is None or not float(match[1]):
        raise ValueError(f"memory must be a number of bytes such as 4GB or 512MiB, got {memory!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
