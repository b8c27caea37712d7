"""Divides the memory that a conversion may take."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

#: Of what is free when work begins this share goes to arrays; the rest is for what allocators keep, files' buffers and the interpreter's own.
_SHARE = 0.6

#: With less for arrays, pieces would be so short that reading them takes longer than work on them.
_LEAST = 8 * 2**20


@dataclass(frozen=True)
class Budget:
    """Bytes that the process may have resident (0: only ``working`` was said), and bytes of these for the arrays of a step."""

    memory: int
    working: int

    @classmethod
    def of(cls, memory: int | str) -> Budget:
        """What is left of ``memory`` beside what this process has now: Python, torch and what has been imported.

        Raises:
            ValueError: it is no number of bytes, or too little.
        """
        asked = read_bytes(memory)
        now = _resident_bytes()
        working = int((asked - now) * _SHARE)
        if working < _LEAST:
            raise ValueError(
                f"memory={memory} is too little: Python and torch take {now / 1e6:,.0f} MB, and work needs {_LEAST / _SHARE / 1e6:,.0f} MB more; give at least "
                f"{-(-(now + _LEAST / _SHARE) // 10**6):.0f}MB"
            )
        return cls(asked, working)

    def needs(self, nbytes: int, step: str) -> None:
        """Raise ValueError unless a step that needs so many bytes fits."""
        if nbytes > self.working:
            more = self.memory + (nbytes - self.working) / _SHARE
            raise ValueError(
                f"{step} needs {nbytes / 1e6:,.1f} MB for its arrays, and memory={self.memory / 1e6:,.0f}MB leaves {self.working / 1e6:,.1f} MB for them; "
                f"give at least {-(-more // 10**6):.0f}MB"
            )


def read_bytes(memory: int | str) -> int:
    """Bytes, from a number or a text such as 4GB, 512MiB; ValueError where it is neither."""
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
