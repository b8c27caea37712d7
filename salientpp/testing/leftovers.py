"""Threads, files, shared memory and processes that a job leaves in its process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from pathlib import Path

#: Seconds for threads and files to go. Only something that stays takes them.
_SECONDS = 60.0

#: Most sockets and pipes of a process. Connections between ranks stay, and later loaders use them.
_MOST_CONNECTIONS = 500

#: Mapped files of data, and shared memory, in the system's description of a process.
_MAPPED = re.compile(r" (/\S.*\.npy|/memfd:salientpp.*)$", re.MULTILINE)


class Leftovers:
    """Record of the process before a job."""

    def __init__(self) -> None:
        self._before = _held()

    def found(self) -> list[str]:
        """Returns everything that is here now and was not before."""
        end, pause = time.monotonic() + _SECONDS, 0.001
        while True:
            left = sorted(_held() - self._before)
            if not left or time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
            gc.collect()  # a thread that has ended may leave a cycle
        connections = sum(target.startswith(("socket:", "pipe:", "anon_inode:")) for target in _targets())
        if connections > _MOST_CONNECTIONS:
            left.append(f"{connections} sockets and pipes")
        return [f"left: {', '.join(left[:5])}"] if left else []


def _held() -> set[str]:
    """Names of the threads, open files, shared memory, mapped files and child processes."""
    found = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    files = [target for target in _targets() if target.startswith("/") and not target.startswith("/dev/")]
    found |= {f"open {target} {number}" for target in set(files) for number in range(files.count(target))}
    found |= {f"mapped {path}" for path in _MAPPED.findall(Path("/proc/self/maps").read_text())}
    with contextlib.suppress(ChildProcessError):  # no process at all
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        for task in Path("/proc/self/task").glob("*/children"):
            found |= {f"process {child}" for child in _text(task).split()}
    return found


def _targets() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the list itself
            continue
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a thread that has ended
        return ""
