"""Finds ranks that wait for each other in different collectives, so that none of them can go on.

A rank that has waited for half a second (:mod:`salientpp.ranks.waiting`) leaves a note in the job's store, and renews it as long as it waits. The note says
for which collectives its threads wait, and how many collectives it has started. The rank with the lowest number looks at the notes. The ranks stand still if
three things hold in two looks:

* every rank waits: all of its threads that start collectives do;
* each awaited collective lacks a rank that has not started it;
* between the looks, all waits have gone on. So at the time of the first look, all ranks waited at once.

A rank that computes, saves a state or is stopped in a debugger has no such note. So slow ranks raise no alarm, and ranks that do not wait pay nothing.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

#: Number of different waits that an error lists.
_LISTED = 4

#: Threads of this process that may start collectives: those that have done so, and those given to :func:`expect`.
_threads: set[threading.Thread] = set()

#: Threads of this process that wait until another one ends.
_joining: set[threading.Thread] = set()

#: Prefix of the keys of some ranks' Comms -> number of the Comm that this rank has made last, or is making.
_made: dict[str, int] = {}


@dataclass(eq=False)
class Progress:
    """Counts the collectives that this rank has started on one Comm, and says what the latest one is for.

    Attributes:
        key: prefix of the Comm's keys in the store, which ends with the Comm's number; empty for a single rank.
        ranks: ranks of the Comm, as numbers of the job.
        rank: number of this rank in the job.
        circle, failure_key: ranks of the job that must learn of a failure, and the store's key at which they look for the note.
        job: name of the job; see :class:`salientpp.ranks.job.Job`.
        task: what the latest collective is for, as errors say it after "rank 0 waits".
        started: number of collectives that this rank has started.
    """

    key: str = ""
    ranks: Sequence[int] = (0,)
    rank: int = 0
    circle: Sequence[int] = (0,)
    failure_key: str = ""
    job: str = ""
    task: str = "for another rank"
    started: int = 0
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        if self.key:
            prefix, _, number = self.key.rpartition("/")
            _made[prefix] = int(number)
            _living[id(self)] = self

    def withdraw(self) -> None:
        """Takes back the number of a Comm that was not made, so that the next Comm gets this number."""
        prefix, _, number = self.key.rpartition("/")
        _made[prefix] = int(number) - 1

    def start(self) -> int:
        """Counts a collective that this thread starts, and returns its number."""
        thread = threading.current_thread()
        # Autograd's own threads start collectives for the thread that called the model, and which waits for them.
        if thread is not self._thread and not isinstance(thread, threading._DummyThread):
            self._thread = thread
            expect(thread)
        self.started += 1
        return self.started

    @property
    def thread(self) -> threading.Thread:
        """Thread that a wait of the current thread is recorded for.

        Waits of autograd's threads are recorded for the thread that called the model.
        """
        thread = threading.current_thread()
        return self._thread if self._thread and isinstance(thread, threading._DummyThread) else thread


#: All :class:`Progress` objects by their ``id``. Unlike a WeakSet, this can be listed while another thread makes a Comm.
_living: weakref.WeakValueDictionary[int, Progress] = weakref.WeakValueDictionary()


def expect(thread: threading.Thread) -> None:
    """Tells the standstill check that a running thread can start collectives. This rank then counts as waiting only if the thread waits too."""
    # Changed in single steps of the interpreter, because several threads may be here at once.
    _threads.difference_update([each for each in [*_threads] if not each.is_alive()])
    _threads.add(thread)


class Wait:
    """Long wait of this thread for collective ``number`` of a Comm; 0 stands for the roll call before the Comm is made."""

    def __init__(self, progress: Progress, number: int) -> None:
        self.progress, self.number, self.turns = progress, number, 0
        self._thread = progress.thread
        self._seen: dict[int, Any] | None = None
        _waits[self._thread] = self

    def turn(self, store: dist.Store) -> str | None:
        """Renews this rank's note. On the lowest rank, also looks whether all ranks wait for each other.

        Returns the text of an error, which the other ranks are told too, if the ranks stand still. Otherwise returns None.
        """
        self.turns += 1
        store.set(_key(self.progress.rank), _note(self.progress.job))
        if self.progress.rank != min(self.progress.circle):
            return None
        before, self._seen = self._seen, _notes(store, self.progress.circle)
        if before is None or self._seen is None or not _stand_still(before, self._seen):
            return None
        text = _words(self._seen)
        keys = {wait["failure"] for note in self._seen.values() for wait in note["waits"].values()}
        if any(store.check([key]) for key in keys):
            return None  # a rank has told of a failure, which is about to end a wait
        for key in keys:
            store.compare_set(key, "", json.dumps({"rank": -1, "text": text}))
        return text

    def end(self) -> Callable[[dist.Store], None]:
        """Ends the wait, and returns a function that removes it from this rank's note in the store."""
        _waits.pop(self._thread, None)
        job = self.progress.job
        note = _note(job) if any(wait.progress.job == job for wait in [*_waits.values()]) else ""
        return lambda store: store.set(_key(self.progress.rank), note)


_waits: dict[threading.Thread, Wait] = {}


def join(other: threading.Thread) -> None:
    """Waits for the end of another thread, which may start collectives."""
    thread = threading.current_thread()
    _joining.add(thread)
    try:
        other.join()
    finally:
        _joining.discard(thread)


def not_waiting(store: dist.Store, progress: Progress) -> list[int]:
    """Returns the other ranks that have not recorded that they wait, as positions in ``progress.circle``."""
    keys = [(place, _key(rank)) for place, rank in enumerate(progress.circle) if rank != progress.rank]
    return [place for place, key in keys if not store.check([key]) or not store.get(key)]


def _key(rank: int) -> str:
    return f"salientpp/waits/{rank}"


def _note(job: str) -> str:
    """Returns the note that this rank leaves in the store of a job while it waits, as JSON. ``free``: some thread may still start a collective.

    A thread that waits for ranks of another job counts as free, because the ranks of this job cannot tell how long it waits.
    """
    # Copied once, so that each thread that counts as blocked has its wait in the note. The numbers are read last: if a wait ends meanwhile, they are higher.
    waits = {thread: wait for thread, wait in _waits.copy().items() if wait.progress.job == job}
    blocked = {*waits, *_joining}
    free = any(thread.is_alive() and thread not in blocked for thread in [*_threads])
    started: dict[str, int] = {}
    for each in filter(None, [reference() for reference in _living.valuerefs()]):
        # An earlier default group, or a roll call that has not taken place, may have left another one with this key.
        started[each.key] = max(each.started, started.get(each.key, 0))
    return json.dumps({
        "free": free,
        "waits": {f"{wait.progress.key} {wait.number}": _shown(wait) for wait in waits.values()},
        "made": _made,
        "started": started,
    })  # fmt: skip


def _shown(wait: Wait) -> dict[str, Any]:
    its = wait.progress
    return {"ranks": [*its.ranks], "turns": wait.turns, "task": its.task, "failure": its.failure_key}


def _notes(store: dist.Store, ranks: Sequence[int]) -> dict[int, Any] | None:
    """Returns the notes of these ranks and of all for which they wait, by rank; None if one of them does not wait."""
    notes: dict[int, Any] = {}
    wanted = {*ranks}
    while missing := sorted(wanted - notes.keys()):
        if not store.check([_key(rank) for rank in missing]):
            return None
        for rank in missing:
            text = store.get(_key(rank))
            notes[rank] = json.loads(text) if text else {"free": True}
            if notes[rank]["free"]:
                return None
            wanted.update(other for wait in notes[rank]["waits"].values() for other in wait["ranks"])
    return notes


def _stand_still(before: dict[int, Any], notes: dict[int, Any]) -> bool:
    """Returns True if no rank can go on, given the notes of two looks."""
    for rank, note in notes.items():
        earlier, waits = before.get(rank, {}).get("waits", {}), note["waits"]
        if earlier.keys() != waits.keys() or any(waits[key]["turns"] <= earlier[key]["turns"] for key in waits):
            return False
        for key, wait in waits.items():
            if all(_has_started(notes[other], *key.split()) for other in wait["ranks"] if other != rank):
                return False  # the data is on its way
    return True


def _has_started(note: dict[str, Any], key: str, number: str) -> bool:
    if key in note["started"]:
        return note["started"][key] >= int(number)
    prefix, _, comm = key.rpartition("/")
    # A Comm that this rank has made and dropped has no number. It may have started everything.
    return note["made"].get(prefix, 0) >= int(comm)


def _words(notes: dict[int, Any]) -> str:
    waits = [(rank, key, wait) for rank, note in sorted(notes.items()) for key, wait in note["waits"].items()]
    comms: dict[str, set[str]] = {}
    for _, key, wait in waits:
        comms.setdefault(wait["task"], set()).add(key.split()[0])
    ranks: dict[str, list[str]] = {}
    for rank, key, wait in waits:
        number = key.split()[0].rpartition("/")[2]
        which = f" (connection {number})" if len(comms[wait["task"]]) > 1 else ""
        ranks.setdefault(wait["task"] + which, []).append(str(rank))
    said = [f"rank{'s' * (len(on) > 1)} {', '.join(on)} wait{'s' * (len(on) < 2)} {task}" for task, on in ranks.items()]
    more = f"; {len(said) - _LISTED} more waits" if len(said) > _LISTED else ""
    return (
        f"the ranks wait for each other: {'; '.join(said[:_LISTED])}{more}; iterate the loader and call the model, its loss and backward() equally often and "
        "in the same order on every rank, also after 'continue' and after an error that one rank has caught"
    )
