"""Limits the memory of a process and the page cache that it fills, with a control group of Linux. It needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(name: str, num_bytes: int) -> Iterator[None]:
    """Context in which this process, its memory from now on and the pages that it reads take at most ``num_bytes``.

    Memory that the process already had is not counted.

    Raises:
        OSError: the system has no control groups of version 1 or 2 that this process may make.
    """
    first = (_ROOT / "memory").is_dir()
    parent = _ROOT / "memory" if first else _ROOT
    group = parent / f"{name}-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(num_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # the system may still count pages of the group
            group.rmdir()
