"""Tells ranks that another rank has failed, and why.

A rank that fails in mid-epoch, or whose script ends with an error, leaves a note in the job's key-value store. The others look for it while they wait, and
record in the store that they have read it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from salientpp.ranks.groups import Groups
from salientpp.ranks.job import Job
from salientpp.ranks.job_store import PatientStore

#: After a failure, the process which hosts the store stays so that others can read the note: most seconds that it stays, and seconds between its checks.
_STAY_SECONDS = 2.0
_STAY_PAUSE = 0.05

#: Seconds that gloo's thread may take to release a collective.
_LET_GO_SECONDS = 0.05


def failure_key(prefix: str) -> str:
    """Returns the store's key for the failure note of a Comm. ``prefix`` begins all keys of this Comm."""
    return f"{prefix}/failure"


class RankFailure(RuntimeError):
    """Another rank failed, left or stopped answering. The text names the rank, the place and the reason."""


@contextlib.contextmanager
def store_needed(job: Job) -> Iterator[None]:
    """Wraps accesses to a job's store that must succeed. Raises RankFailure if the store is gone."""
    try:
        yield
    except dist.DistError as error:
        raise RankFailure(job.reason_of_lost_store()) from error


class FailureNotes:
    """Leaves and reads notes of failures among the ranks of a Comm, in the key-value store of their job (None for a single rank).

    Notes belong to the Comm and not to its groups, so that the next Comm which leases the groups does not find them.

    Attributes:
        key: the store's key of the note.
        known: text of the first failure that this rank has reported or read; None: none so far.
    """

    living: ClassVar[weakref.WeakSet[FailureNotes]] = weakref.WeakSet()

    def __init__(self, groups: Groups | None, job: Job | None, prefix: str, of: str) -> None:
        self._groups = groups
        self.rank = 0 if groups is None else groups.rank
        self.of = of
        self._job = job
        self.store = None if job is None else PatientStore(job.store)
        self.key = failure_key(prefix)
        self._stays = False
        self.known: str | None = None
        if groups is not None:
            self.living.add(self)

    @property
    def keeper(self) -> str:
        """Text that names the host of the job's store, for errors."""
        return "rank 0 or torchrun" if self._job is None else self._job.keeper

    def report(self, text: str) -> None:
        """Leaves a failure note for the other ranks. They read only the first note that any rank left. Never raises."""
        if self._groups is not None:
            self._groups.abandon()
        self.known = self.known or text
        self._leave(text)
        self._stay(time.monotonic() + _STAY_SECONDS)

    def failure(self) -> RankFailure | None:
        """Returns the failure that another rank has reported, or what this rank has heard of a process that is lost. Otherwise None."""
        note = self.ask(self._read)
        heard = None if self._job is None else self._job.heard
        if heard is not None:  # a rank that leaves a note may have failed because of this process
            self.known = self.known or heard
            return RankFailure(heard)
        if note is None or note["rank"] == self.rank:
            return None
        self.known = self.known or note["text"]
        self._stay(time.monotonic() + _STAY_SECONDS)
        return RankFailure(note["text"])

    def check(self) -> None:
        """Raises RankFailure if this rank knows of a failure. Call it before a collective.

        Ranks that caught the error of a failed call may have begun different collectives. gloo would match them, and end the process if their sizes differ.
        """
        if self.known is not None:
            raise RankFailure(self.known)

    def check_script(self) -> None:
        """Raises if this rank's script has ended with an error while a thread still serves the other ranks. It tells them first.

        Otherwise this rank and the others might wait for each other.
        """
        text = self._early_end()
        if text is not None:
            self.report(text)
            raise RankFailure(text)

    def ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Asks the job's store ``question(store)``. Returns its answer, or None if the store does not answer."""
        return None if self.store is None else self.store.ask(question)

    @classmethod
    def leave_at_exit(cls) -> None:
        """Tells the other ranks if this rank's script has ended with an error, and they do not know it yet.

        The others may have begun their next epoch before this rank stopped answering, and would then wait for it.
        """
        until = time.monotonic() + _STAY_SECONDS
        told = []
        for notes in list(cls.living):
            groups = notes._groups
            if groups is None or groups.is_inherited or groups.broken:
                continue
            text = notes._early_end()
            if text is not None and any(map(groups.reaches, groups.others)):
                notes._leave(text)
                told.append(notes)
        for notes in told:
            notes._stay(until)

    def _leave(self, text: str) -> None:
        def leave(store: dist.Store) -> None:
            store.compare_set(self.key, "", json.dumps({"rank": self.rank, "text": text}))
            store.set(self._read_key(self.rank), "")

        if self.store is not None:
            self.store.ask(leave)

    def _read(self, store: dist.Store) -> Any:
        if not store.check([self.key]):
            return None
        note = json.loads(store.get(self.key))
        store.set(self._read_key(self.rank), "")
        return note

    def _read_key(self, rank: int) -> str:
        """Returns the store's key that rank ``rank`` sets when it has read the note."""
        return f"{self.key}/read/{rank}"

    def _early_end(self) -> str | None:
        words = None if threading.main_thread().is_alive() else script_error()
        return None if words is None else f"rank {self.rank} ended early: {words}"

    def _stay(self, until: float) -> None:
        """Keeps the store's host alive until the others have read the note or are gone, at most until ``until``."""
        if self._stays or self.store is None or not self.store.is_hosted_here:
            return
        self._stays = True
        staying = threading.Thread(
            target=self.store.ask, args=(lambda store: self._await_readers(store, until),), name="salientpp-stay"
        )
        if threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):  # no thread can be started
                staying.start()  # the interpreter waits for it, also in processes of multiprocessing, which do not run `atexit`
        else:
            staying.run()

    def _await_readers(self, store: dist.Store, until: float) -> None:
        groups = self._groups
        others = [] if groups is None else groups.others
        while groups is not None and others and time.monotonic() < until:
            time.sleep(_STAY_PAUSE)
            others = [rank for rank in others if not store.check([self._read_key(rank)]) and groups.reaches(rank)]


def in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def script_error() -> str | None:
    """Returns the error by which the main thread ended, or None."""
    error = getattr(sys, "last_value", None)  # set when the interpreter has printed a traceback
    if error is not None:
        return f"{type(error).__name__}: {error}"
    # multiprocessing prints the traceback itself, or hands it to its parent. It keeps only the exit code, in the frame in
    # which the main thread now waits for the other threads.
    main_thread = threading.main_thread().ident
    frame = None if main_thread is None else sys._current_frames().get(main_thread)
    while frame is not None:
        if frame.f_code.co_name == "_bootstrap" and frame.f_globals.get("__name__") == "multiprocessing.process":
            code = frame.f_locals.get("exitcode")
            return f"its process ended with exit code {code}" if code else None
        frame = frame.f_back
    return None


def _linger() -> None:
    """Runs at exit. Tells others of an error, and gives gloo's threads time to release the last collectives; see :meth:`Groups.end`."""
    FailureNotes.leave_at_exit()
    if Groups.made:
        time.sleep(_LET_GO_SECONDS)


atexit.register(_linger)  # registered on import, so that it runs after the exit functions of modules that use Comm
