"""Reads how many bytes of the mapped neighbour lists of a dataset directory are resident in this process, from /proc (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

#: Names of the files of a dataset directory that hold neighbour lists.
_LISTS = re.compile(r"(\w+\.)?(indptr|indices)\.npy")


def resident_lists(root: str | Path) -> int:
    """Returns the resident bytes of the neighbour lists that this process maps from a dataset directory.

    A page counts if this process has touched it, or a page beside it.
    """
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = Path(line.split(maxsplit=5)[-1])
            inside = path.is_relative_to(root) and _LISTS.fullmatch(path.name) is not None
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
