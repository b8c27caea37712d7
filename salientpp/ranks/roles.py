"""Messages of the ranks that train to the ranks that only store.

The scripts of the ranks that train decide which loaders there are, and when their epochs begin. Storage ranks have no such script: they follow messages. Rank 0
writes each message, as JSON, to the job's key-value store, under a number. Every storage rank reads all messages in this order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing.util
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch.distributed as dist

from salientpp.processes import forks
from salientpp.ranks.failure import RankFailure, in_words, script_error, store_needed
from salientpp.ranks.greeting import is_hosted_here
from salientpp.ranks.job import Job
from salientpp.ranks.lifelines import Lifelines

_PREFIX = "salientpp/roles"

#: Seconds between two looks of a storage rank for a message: at first, and after a long time without one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02

#: Seconds between two looks for a failure.
_FAILURE_PAUSE = 0.5

#: Seconds between two beats of a rank that trains, and seconds without one after which it counts as stopped.
_BEAT_SECONDS, _SILENT_SECONDS = 2.0, 300.0

#: Longest time, in seconds, between two looks for a lost process.
_WATCH_PAUSE = 0.2

#: Seconds in which a storage rank must have noticed that rank 0 is gone, if the store is gone with it.
_NEWS_SECONDS = 2.0

#: Number of looks for a lost process after the store is gone.
_LAST_LOOKS = 20

#: Longest time, in seconds, that the end of a process waits for the thread that watches the others.
_END_SECONDS = 2.0

#: Longest time, in seconds, that the process which hosts the store stays until all storage ranks have ended, after the ranks that train have.
_STAY_SECONDS = 30.0


class Roles:
    """Messages in one job, the last ``num_storage_ranks`` ranks of which only store. All loaders of a process that belong to the job share this object.

    Attributes:
        rank: number of this rank.
        num_trainers: number of ranks that train, the first ones.
        lifelines: connections that show which processes live. None: in a session, whose storage hosts watch the ranks.
    """

    #: The objects of this process, by job.
    known: ClassVar[weakref.WeakKeyDictionary[Job, Roles]] = weakref.WeakKeyDictionary()

    def __init__(self, job: Job, num_storage_ranks: int) -> None:
        self.rank, self.num_trainers = job.rank, job.size - num_storage_ranks
        self._num_storage_ranks = num_storage_ranks
        self._store, self._job, self._forks = job.store, weakref.ref(job), forks()
        # Counted in single steps of the interpreter, because a loader that is dropped posts a message in any thread, also during another post.
        self._posted = itertools.count()
        self._made = 0
        self.lifelines: Lifelines | None = None
        if self.rank < self.num_trainers:
            # Also runs at the end of a process of multiprocessing, which does not run `atexit`. A session ends when nothing uses it any more.
            multiprocessing.util.Finalize(job if job.name else None, self._end, exitpriority=0)

    @classmethod
    def of_job(cls, job: Job, num_storage_ranks: int) -> Roles:
        """Returns the object of this process for a job.

        Raises:
            ValueError: it was made for another number of storage ranks.
        """
        found = cls.known.get(job)
        if found is None:
            found = cls.known.setdefault(job, cls(job, num_storage_ranks))
            if not job.name:  # in a session, the storage hosts watch the ranks
                job.is_watched = True
                found.lifelines = Lifelines(job.store, job.rank, range(found.num_trainers, job.size))
                over = threading.Event()
                about = weakref.ref(job), job.store, found.lifelines, over
                watching = threading.Thread(target=_watch, args=about, name="salientpp-beat", daemon=True)
                watching.start()
                # After `_end`. The interpreter aborts a process that exits while a thread is in the store.
                multiprocessing.util.Finalize(None, _end_watch, (watching, over), exitpriority=-1)
        if found._num_storage_ranks != num_storage_ranks:
            raise ValueError(
                f"storage_ranks must be equal for all graphs of a job, got {num_storage_ranks} after {found._num_storage_ranks}"
            )
        return found

    @property
    def speaks(self) -> bool:
        """True on the rank that writes the messages."""
        return self.rank == 0

    # --- ranks that train -----------------------------------------------------------------------------------

    def post(self, message: dict[str, Any]) -> None:
        """Writes a message, if this is rank 0. A forked child writes none: it has a copy of the parent's connection to the store.

        Raises:
            RankFailure: the job's store is gone.
        """
        if self.speaks and self._forks == forks():
            job = self._job()  # None: a loader that outlived its job is dropped
            with contextlib.nullcontext() if job is None else store_needed(job):
                self._store.set(f"{_PREFIX}/{next(self._posted)}", json.dumps(message))

    def number_of_loader(self) -> int:
        """Returns the number by which messages name a new loader."""
        self._made += 1
        return self._made - 1

    def drop(self, number: int) -> None:
        """Tells the storage ranks that a loader is gone. It may run in any thread, and at any time."""
        with contextlib.suppress(RuntimeError):
            self.post({"do": "drop", "number": number})

    def _end(self) -> None:
        """Runs when the script of a rank that trains ends, for any reason. The host of the store stays until the storage ranks have ended."""
        with contextlib.suppress(RuntimeError):
            # A session may also end before the script: when nothing uses its graph any more. An earlier error was caught then.
            words = (script_error() or _error_on_the_way()) if multiprocessing.util.is_exiting() else None
            if words is not None:
                self._store.compare_set(f"{_PREFIX}/failure", "", f"rank {self.rank} ended early: {words}")
            # Returns when the store has the key, so that the others find it when this process's connections close.
            self._store.compare_set(_ended(self.rank), "", "1")
            self._stay(also_for_trainers=words is None)

    # --- storage ranks --------------------------------------------------------------------------------------

    def messages(self, look: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yields the messages, until the scripts of all ranks that train have ended.

        Args:
            look: called about twice a second, to raise an error that happened in another thread.

        Raises:
            RankFailure: the job's store is gone, and with it the rank that hosted it.
        """
        number, pause, looked = 0, _FIRST_PAUSE, time.monotonic()
        silence = _Silence(self._store, self.num_trainers)
        ended = False
        try:
            while not ended:
                key = f"{_PREFIX}/{number}"
                if self._store.check([key]):
                    yield json.loads(self._store.get(key))
                    number, pause = number + 1, _FIRST_PAUSE
                    continue
                ended = self._store.check([_ended(rank) for rank in range(self.num_trainers)])
                if not ended:
                    time.sleep(pause)
                    pause = min(1.2 * pause, _LONGEST_PAUSE)
                if time.monotonic() - looked > _FAILURE_PAUSE:
                    look()
                    if (silent := silence.look()) is not None:
                        if (job := self._job()) is not None:
                            job.tell_lost(silent)  # otherwise the others would name this rank, which ends now
                        raise RankFailure(silent)
                    looked = time.monotonic()
            failure = f"{_PREFIX}/failure"
            text = self._store.get(failure).decode() if self._store.check([failure]) else None
        except dist.DistError as error:
            if ended:
                return  # the rank that hosts the store was the last to train
            raise RankFailure(
                "rank 0 went away, and with it the job's key-value store; look at its output first"
                if self._has_lost_rank_0()
                else f"storage rank {self.rank} has lost the job's store, so the rank that hosted it has ended; look at the output of the ranks that train "
                f"({error})"
            ) from error
        if text is not None:
            raise RankFailure(text)

    def _has_lost_rank_0(self) -> bool:
        """Returns True if the connection to rank 0 has closed. Another thread may notice this a moment later than the end of the store."""
        until = time.monotonic() + _NEWS_SECONDS
        while self.lifelines is not None and 0 not in self.lifelines.closed and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE)
        return self.lifelines is not None and 0 in self.lifelines.closed

    def leave(self, stay: bool = True) -> None:
        """Lets the process that hosts the store end.

        Args:
            stay: if this process hosts it, wait until the others have left.
        """
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_ended(self.rank), "", "1")
            self._store.add(f"{_PREFIX}/left", 1)
            if stay:
                self._stay()

    def _stay(self, also_for_trainers: bool = False) -> None:
        """Waits until all storage ranks have left, if this process hosts the store.

        Args:
            also_for_trainers: the wait is limited only once the scripts of all ranks that train have ended, or the processes of all storage ranks.
        """
        trainers = [_ended(rank) for rank in range(self.num_trainers)]
        until = time.monotonic() + _STAY_SECONDS
        while is_hosted_here(self._store) and time.monotonic() < until:
            if self._store.add(f"{_PREFIX}/left", 0) >= self._num_storage_ranks:
                break
            closed = set[int]() if self.lifelines is None else self.lifelines.closed
            is_left = sum(rank >= self.num_trainers for rank in closed) == self._num_storage_ranks
            if also_for_trainers and not is_left and not self._store.check(trainers):
                until = time.monotonic() + _STAY_SECONDS
            time.sleep(_LONGEST_PAUSE)


class _Silence:
    """Finds ranks that train and are stopped: they have sent beats, and send no more."""

    def __init__(self, store: dist.Store, num_trainers: int) -> None:
        self._store, self._num_trainers = store, num_trainers
        self._beats: dict[int, bytes] = {}
        self._silent: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self) -> str | None:
        """Returns a text that names a silent rank, or None. Call it about twice a second. Time during which this process was stopped itself does not count."""
        passed = time.monotonic() - self._looked
        if passed < _BEAT_SECONDS:
            return None
        self._looked += passed
        for rank in range(self._num_trainers):
            if not self._store.check([_beat_of(rank)]) or self._store.check([_ended(rank)]):
                continue
            beat = self._store.get(_beat_of(rank))
            is_new = beat != self._beats.get(rank)
            self._beats[rank] = beat
            self._silent[rank] = 0.0 if is_new else self._silent[rank] + min(passed, 2 * _BEAT_SECONDS)
            if self._silent[rank] > _SILENT_SECONDS:
                return f"rank {rank} has not answered for {_SILENT_SECONDS:g} s; it may be stopped"
        return None


def _watch(job: weakref.ref[Job], store: dist.Store, lifelines: Lifelines, over: threading.Event) -> None:
    """Watches the processes of a job, and renews the beat of this one. Runs in a thread until the process ends, or the store is gone."""
    with lifelines:
        try:
            _watch_while_there_is_a_store(job, store, lifelines, over)
        except RuntimeError:  # the store is gone, and so may be the rank that hosted it
            for _ in range(_LAST_LOOKS):
                lifelines.wait(_NEWS_SECONDS / _LAST_LOOKS, connects=False)


def _watch_while_there_is_a_store(
    job: weakref.ref[Job], store: dist.Store, lifelines: Lifelines, over: threading.Event
) -> None:
    clone: Any = store.clone  # type: ignore[attr-defined]  # torch's type stubs lack it
    lifelines.store = own = clone()  # another thread that waits for the store would keep this one waiting
    beat_at, pause = 0.0, _FIRST_PAUSE
    for number in itertools.count():
        closed = lifelines.wait(_WATCH_PAUSE if lifelines.are_all else pause)
        if time.monotonic() > beat_at:
            own.set(_beat_of(lifelines.rank), str(number))
            beat_at = time.monotonic() + _BEAT_SECONDS
        lost = [rank for rank in closed if not own.check([_ended(rank)])]
        if (there := job()) is not None:
            if lost:
                there.tell_lost(
                    f"{in_words(lost)} went away; look at {'its' if len(lost) == 1 else 'their'} output first", own
                )
            there.lost(own)
        del there
        pause = min(1.2 * pause, _WATCH_PAUSE)
        if over.is_set():
            return


def _end_watch(watching: threading.Thread, over: threading.Event) -> None:
    """Runs at the end of the process. A stopped store keeps the thread, which then cannot do any harm."""
    over.set()
    watching.join(_END_SECONDS)


def _beat_of(rank: int) -> str:
    return f"{_PREFIX}/beat/{rank}"


def _ended(rank: int) -> str:
    """Returns the store's key that a rank sets when its script has ended, or its :func:`~salientpp.serve`."""
    return f"{_PREFIX}/ended/{rank}"


def _error_on_the_way() -> str | None:
    """Returns the error that ends this process, or None. multiprocessing ends a process while the error is still being raised."""
    error = sys.exc_info()[1]
    ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
    return None if ends_well else f"{type(error).__name__}: {error}"
