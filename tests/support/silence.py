"""A rank that is silent until all other ranks have said so, in tests of time-outs.

The silence ends then, and not after a fixed time that must be longer than the time-outs on the slowest machine.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def note_said(folder: str | Path, rank: int) -> None:
    """Notes that this rank has named the silent one."""
    Path(folder, f"said-{rank}").touch()


def stay_silent(folder: str | Path, others: list[int], seconds: float) -> None:
    """Waits until the other ranks have called :func:`note_said`, at most ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(Path(folder, f"said-{rank}").exists() for rank in others):
        time.sleep(0.05)


def suspend_self(folder: str | Path, others: list[int], seconds: float) -> None:
    """Suspends this process. It is killed when the other ranks have called :func:`note_said`, or after ``seconds``."""
    files = " -a ".join(f"-e {Path(folder, f'said-{rank}')}" for rank in others)
    wait = f"for _ in $(seq {int(10 * seconds)}); do [ {files} ] && break; sleep 0.1; done"
    os.system(f"({wait}; kill -9 {os.getpid()}) > /dev/null 2>&1 &")
    os.kill(os.getpid(), signal.SIGSTOP)
