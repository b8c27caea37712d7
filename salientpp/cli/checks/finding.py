"""Result of a check of ``salientpp doctor``, and the machine that the checks examine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        text: one line.
        values: numbers and texts for ``--json``.
        problems: what to change so that training works, one sentence each.
        notes: what to change so that it is faster, or works on more machines.
    """

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def status(self) -> str:
        return "problem" if self.problems else "note" if self.notes else "ok"


@dataclass(frozen=True)
class Machine:
    """Machine and process that ``salientpp doctor`` examines. Tests replace its files and environment variables.

    Attributes:
        root: folder that has ``proc``, ``sys`` and ``dev``.
        environ: environment variables.
        directory: dataset directory or converted graph to check. None: no directory is checked.
        seconds: time after which the ranks of the self-test are killed.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: Path | None = None
    seconds: float = 60.0

    def read(self, path: str) -> str:
        """Returns the text of a file such as ``proc/meminfo``; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Returns the sorted names in a folder such as ``sys/class/net``; none if it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    @property
    def has_gpu(self) -> bool:
        """True if this process may have a GPU, whether or not torch can use it. A container may see the driver in /proc and no device."""
        return any((self.root / "dev" / name).exists() for name in ("nvidiactl", "kfd"))
