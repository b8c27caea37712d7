"""Limits the memory of processes and the page cache that they fill, with a control group of Linux. It needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A control group with a limit.

    Attributes:
        peak: file with the largest number of bytes that the group took.
    """

    folder: Path
    peak: Path

    def take(self, pid: int) -> None:
        """Moves a process into the group. Memory that it already has is not counted."""
        (self.folder / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def limited_group(num_bytes: int) -> Iterator[Group]:
    """Yields a group whose processes and the pages that they read take at most ``num_bytes``. It must be empty at the end.

    Raises:
        OSError: the system has no control groups of version 1 or 2 that this process may make.
    """
    parent, is_first = _own()
    folder = parent / f"salientpp-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(num_bytes))
        yield Group(folder, folder / ("memory.max_usage_in_bytes" if is_first else "memory.peak"))
    finally:
        with contextlib.suppress(OSError):  # the system may still count pages of the group
            folder.rmdir()


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Context in which this process, its memory from now on and the pages that it reads take at most ``num_bytes``."""
    with limited_group(num_bytes) as group:
        group.take(os.getpid())
        try:
            yield
        finally:
            (group.folder.parent / "cgroup.procs").write_text(str(os.getpid()))


def _own() -> tuple[Path, bool]:
    """Returns this process's group, and True if it is of version 1."""
    lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = _ROOT / "memory" if "memory" in lines else _ROOT
    own = root / lines.get("memory", lines.get("", "/")).lstrip("/")
    return own if own.is_dir() else root, "memory" in lines
