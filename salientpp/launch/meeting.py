"""Which ranks are of this start, where the store still knows those of the last?

torchrun's agents keep one key-value store for the whole job. When they start all ranks anew, torch's names in it are those of the start before (and
the number of the restart does not say it either: it stays as it is where a host has come or gone). A rank can then find the address of a
process that is gone, and fail with it. So the ranks first make sure of each other, and what they write from then on has a name that no
other start has.

Every rank writes a word of chance. Rank 0 reads everyone's, which may be of the last start, and publishes the list, anew where a word has changed, until
every rank has answered it; a rank answers only a list that has its own word. So a list that all have answered is of this start.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_PREFIX = "salientpp/meeting"
#: Seconds between two looks into the store, at first and at last: a thousand ranks look at the same time.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.3


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks of this start; collective.

    Args:
        store: of the job, which may know ranks of earlier starts.
        timeout: how long to wait for the others.

    Returns:
        The same store under a prefix that only this start's ranks have.

    Raises:
        TimeoutError: ranks have not come; rank 0's text names them.
    """
    word, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{_PREFIX}/came/{rank}", word)
    words = _gather(store, world_size, deadline) if rank == 0 else _follow(store, rank, world_size, word, deadline)
    return dist.PrefixStore(f"salientpp/start/{words[0]}", store)


def _gather(store: dist.Store, world_size: int, deadline: float) -> list[str]:
    """Rank 0: publish who is there until all agree."""
    came = [f"{_PREFIX}/came/{rank}" for rank in range(world_size)]
    answers = [f"{_PREFIX}/answer/{rank}" for rank in range(1, world_size)]
    published = ""
    missing = list(range(1, world_size))

    def all_agree() -> list[str] | None:
        nonlocal published, missing
        if absent := [rank for rank, key in enumerate(came) if not store.check([key])]:
            missing = absent
            return None
        words = [store.get(key).decode() for key in came]
        if (seen := json.dumps(words)) != published:
            store.set(f"{_PREFIX}/list", published := seen)
        missing = [
            rank
            for rank, key in enumerate(answers, 1)
            if not store.check([key]) or store.get(key).decode() != published
        ]
        return None if missing else words

    words = _until(all_agree, deadline)
    if words is None:
        raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come")
    store.set(f"{_PREFIX}/agreed", published)
    return words


def _follow(store: dist.Store, rank: int, world_size: int, word: str, deadline: float) -> list[str]:
    """Another rank: answer rank 0's list as soon as it has this rank's word."""
    answered = ""

    def agreed() -> list[str] | None:
        nonlocal answered
        if not store.check([f"{_PREFIX}/list"]):
            return None
        published = store.get(f"{_PREFIX}/list").decode()
        words = json.loads(published)
        if len(words) != world_size or words[rank] != word:
            return None
        if published != answered:
            store.set(f"{_PREFIX}/answer/{rank}", answered := published)
        is_agreed = store.check([f"{_PREFIX}/agreed"]) and store.get(f"{_PREFIX}/agreed").decode() == published
        return words if is_agreed else None

    words = _until(agreed, deadline)
    if words is None:
        raise TimeoutError("rank 0 did not come, or not all others" if not answered else "not all other ranks came")
    return words


def _until(asked: Callable[[], list[str] | None], deadline: float) -> list[str] | None:
    """What ``asked`` gives, once it gives something; None after the deadline."""
    pause = _PAUSE
    while (found := asked()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return found
