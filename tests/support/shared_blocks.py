"""Memory that ranks share, as /proc reports it."""

from __future__ import annotations

import os
from pathlib import Path


def mapping(field: str, process: int | str = "self") -> int:
    """Sum in bytes of a field of /proc/PID/smaps over all mappings of shared blocks."""
    total, is_block = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_block = "memfd:salientpp" in line
        elif is_block and words[0] == f"{field}:":
            total += int(words[1]) * 1024
    return total


def blocks_of(processes: list[int]) -> list[int]:
    """Processes among those given that still have a block mapped or open."""
    found = []
    for process in processes:
        try:
            names = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]
            if mapping("Size", process) or any("memfd:salientpp" in name for name in names):
                found.append(process)
        except OSError:
            pass  # the process has ended
    return found
