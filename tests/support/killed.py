"""Runs work in a process that is killed at a chosen call, to check what it leaves behind.

Only for scripts that have not yet computed with torch: they have no threads and may fork.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def killed_at(owner: Any, name: str, number: int, after: bool, work: Callable[[], Any]) -> None:
    """Runs ``work`` in a fork, which kills itself at call ``number`` of ``owner.name``: before it, or ``after`` it. Checks that it was killed."""
    pid = os.fork()
    if not pid:
        die_at(owner, name, number, after)
        work()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (owner, name, number, after, status)


def die_at(owner: Any, name: str, number: int, after: bool) -> None:
    """Replaces ``owner.name`` by a function that kills this process at its call ``number``: before it, or ``after`` it."""
    original, calls = getattr(owner, name), 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)
