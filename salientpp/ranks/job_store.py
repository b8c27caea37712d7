"""Accesses to a job's key-value store, which a rank or torchrun hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch.distributed as dist

from salientpp.processes import forks
from salientpp.ranks.greeting import is_hosted_here

#: Maximum seconds of an access to the store.
_STORE_SECONDS = 5.0


def attempt(action: Callable[[], Any]) -> None:
    """Runs an action on the store. An error is ignored: if the store is gone, other ranks notice that themselves."""
    with contextlib.suppress(RuntimeError):
        action()


class PatientStore:
    """Access to the store that always ends within seconds.

    The store may be gone with the rank that hosts it, or that rank may be suspended. A forked child makes no accesses, because the store belongs to its parent.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store | None = store
        self._forks = forks()

    def ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Returns ``question(store)``; None if it fails, or if the store does not answer within seconds."""
        if self._store is None or self._forks != forks():
            return None
        answer, store = Future[Any](), self._store

        def look() -> None:
            try:
                answer.set_result(question(store))
            except Exception as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=look, name="salientpp-store", daemon=True).start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            look()
        try:
            return answer.result(_STORE_SECONDS)
        except FutureTimeout:
            self._store = None  # a stuck access holds the store's lock, so no further access is made
        except Exception:
            pass
        return None

    @property
    def is_hosted_here(self) -> bool:
        """True if this process hosts the store."""
        return self._store is not None and self._forks == forks() and is_hosted_here(self._store)
