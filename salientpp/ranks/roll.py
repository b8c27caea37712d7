"""Roll call before ranks connect: names the ranks that do not come, and connects those that do."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from salientpp.processes import connecting
from salientpp.ranks import greeting
from salientpp.ranks.facts import check_same
from salientpp.ranks.failure import FailureNotes, RankFailure, failure_key, in_words, store_needed
from salientpp.ranks.groups import Circle, Groups
from salientpp.ranks.job import Job
from salientpp.ranks.job_store import attempt
from salientpp.ranks.standstill import Progress, Wait
from salientpp.ranks.waiting import SLICE_SECONDS

#: Amount by which the backend's timeout exceeds the timeout of the Comm.
GRACE = timedelta(seconds=5)

#: Number of collectives of a group that are under way at once. A tick of a pipeline starts two and awaits them two ticks later, so at most six are under
#: way. With torch's two threads they would wait for each other.
_THREADS = 6

#: Most seconds between two looks for a lost process while a rank meets others.
_LOOK_SECONDS = 0.1

#: Most seconds that the end of a process waits for a connection that was given up.
_END_SECONDS = 2.0

#: What a rank waits for in a roll call.
_MEETING = "to make a loader, open a part or begin inference"

#: If a rank could not make its group: seconds that it waits to hear which other ranks could not make it either.
_ROLL_SECONDS = 2.0

#: Mistakes that this rank made when it could not know which ranks would wait for it. A mistake becomes '' once other ranks have been told of it.
_mistakes: weakref.WeakKeyDictionary[Job, list[str]] = weakref.WeakKeyDictionary()


class Roll:
    """Roll call of the ranks that make a Comm together. It names the ranks that do not come, which torch's own errors do not.

    Attributes:
        job: the job whose ranks they are.
        ranks: ranks as numbers of the job, in the group's order; ``rank`` is this process's number among them.
        prefix: prefix of this Comm's keys in the store.
        of: text that errors append to a rank's number, and that says what the numbers mean.
        number: number of this Comm among those that these ranks have made or begun to make.
        within: notes of failures among more ranks, which these ranks are some of; None: there are no others.
    """

    def __init__(self, job: Job, ranks: tuple[int, ...], within: FailureNotes | None = None) -> None:
        self.job, self.ranks, self.rank = job, ranks, ranks.index(job.rank)
        self.circle, self.within = Circle.of(job, ranks), within
        self._store = job.store
        self._are_all = ranks == job.ranks
        # A process may be in several jobs, and tells their Comms apart by their keys.
        session = f"{job.name}/" if job.name else ""
        prefix = f"salientpp/{session}{'all' if self._are_all else '-'.join(map(str, ranks))}"
        self._calls = f"{prefix}/calls/{self.rank}"
        # Counted in the store: under torchrun it outlives the default group, and then has keys of the Comms of an earlier one.
        with store_needed(self.job):
            self.number = self._store.add(self._calls, 1)
        self.prefix = f"{prefix}/{self.number}"
        self.progress = Progress(
            self.prefix, ranks, job.rank, ranks, failure_key(f"{self.prefix}/before/{self.rank}"), job.name, _MEETING
        )
        self.of = job.of if self._are_all else f" of the process_group of ranks {list(ranks)}"

    @property
    def keys_of_this_rank(self) -> list[str]:
        return [self._keys(call)[self.rank] for call in ("before", "after")]

    def _keys(self, call: str) -> list[str]:
        return [f"{self.prefix}/{call}/{rank}" for rank in range(len(self.ranks))]

    def tell(self, mistake: str, astray: bool = False) -> None:
        """Leaves this rank's mistake as its answer to the roll call, so that the other ranks raise an error instead of waiting.

        ``astray``: True if :func:`go_astray` has left a note of the mistake before.
        """
        attempt(lambda: self._store.compare_set(f"{self.prefix}/error", "", json.dumps([self.rank, mistake, astray])))

    def lease(self, over: str, timeout: timedelta) -> Groups:
        """Leases connections that are free on every rank, or new ones. ``over``: 'gloo' or 'nccl', over which this rank's rows travel.

        Raises what ``Comm.create`` raises.
        """
        number = self._agree(over, self.circle.free(over), timeout)
        groups = self.circle.groups.get(number)
        if groups is None:
            with connecting():
                groups = self.circle.groups[number] = self._connect(number, over, timeout)
        groups.free = False
        # The backend's timeout is a little longer than ours, so that our error comes first. Its text says more.
        groups.host._set_default_timeout(timeout + GRACE)
        return groups

    def _agree(self, over: str, free: list[int], timeout: timedelta) -> int:
        """Tells the other ranks which groups are ``free``. Returns the number of the group that all take or make."""
        if not self.circle.has_compared:
            with store_needed(self.job):
                greeting.greet(self._store, self.ranks[self.rank])
        missing = self._missing("before", timeout.total_seconds(), json.dumps([over, free]))
        if missing:
            raise RankFailure(
                f"{in_words(missing)}{self.of} did not come to make a loader within {timeout.total_seconds():g} s; "
                "every rank must make its loaders in the same order; check the output of the missing ranks first"
            )
        # Compared before the answers are read, because an answer of another version may mean anything.
        self._compare_greetings()
        with store_needed(self.job):
            answers = [json.loads(self._store.get(key)) for key in self._keys("before")]
        advice = "give every rank a device of the same kind"
        check_same([{"backend": way} for way, _ in answers], self.of, "exchange rows over", advice=advice)
        everywhere = set.intersection(*(set(numbers) for _, numbers in answers))
        return min(everywhere, default=self.number)

    def _connect(self, number: int, over: str, timeout: timedelta) -> Groups:
        """Makes new connections between the ranks, which all have answered the roll call."""
        try:
            # A bare backend, and not dist.new_group, for three reasons. new_group must be called by every rank of the job. It needs a group name that
            # ranks with other groups may not find. torch's debugging wraps its groups, and does not pass the timeout on. gloo tries to connect five
            # times, each for as long as it would wait in a collective.
            options = _gloo_options(max(timeout / 5, timedelta(seconds=2)), self.job.address)
            host = self._unless_lost(
                lambda store: dist.ProcessGroupGloo(
                    dist.PrefixStore(f"{self.prefix}/gloo", store), self.rank, len(self.ranks), options
                )
            )
        except RankFailure:
            raise
        except RuntimeError as error:
            key = f"{self.prefix}/descriptors"
            if _lacks_descriptors(error):
                reason = (
                    f"rank {self.rank}{self.of} has no file descriptors left to connect its loader ({os.strerror(errno.EMFILE)}); raise the limit (ulimit -n), "
                    "or delete loaders that are not used any more"
                )
                attempt(lambda: self._store.set(key, reason))
                raise RankFailure(reason) from error
            missing = self._missing("after", _ROLL_SECONDS)
            with store_needed(self.job):
                if self._store.check([key]):
                    raise RankFailure(self._store.get(key).decode()) from error
            raise RankFailure(f"{in_words(missing) or 'a rank'}{self.of} went away while a loader was made") from error
        self._missing("after", 0)
        device = None
        if over == "nccl":
            # High priority: its kernels are few and small, and the pipeline waits for them, so they go before the model's.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            # With use_local_synchronization, only the members of the group call new_group.
            device = dist.new_group(
                None if self._are_all else [*self.ranks],
                timeout=timeout + GRACE,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=not self._are_all,
            )
        return Groups(host, device, number)

    def _unless_lost(self, connect: Callable[[dist.Store], Any]) -> Any:
        """Returns ``connect(store)``. If a process of the job is lost meanwhile, leaves it to a thread and raises RankFailure: gloo tries for minutes."""
        if not self.job.is_watched:
            return connect(self._store)
        made = futures.Future[Any]()

        def run() -> None:
            try:
                # A connection of its own, so that it keeps nobody waiting for the store. To make it may take as long as gloo.
                clone: Any = self._store.clone  # type: ignore[attr-defined]  # torch's type stubs lack it
                made.set_result(connect(clone()))
            except Exception as error:
                made.set_exception(error)

        connecting_there = threading.Thread(target=run, name="salientpp-connect", daemon=True)
        connecting_there.start()
        while not futures.wait([made], _LOOK_SECONDS).done:
            if (lost := self.job.lost()) is not None:
                # The interpreter aborts a process that exits while a thread returns from the store.
                multiprocessing.util.Finalize(None, connecting_there.join, (_END_SECONDS,), exitpriority=-1)
                raise RankFailure(lost)
        return made.result()

    def _missing(self, call: str, seconds: float, answer: str = "") -> list[int]:
        """Answers a roll call and waits for the others. Returns the ranks that have not answered in time.

        Raises:
            RankFailure: the store is gone.
            ValueError: a rank has made a mistake, and so does not come.
        """
        keys = self._keys(call)
        started, pause = time.monotonic(), 0.005
        wait: Wait | None = None
        try:
            with store_needed(self.job):
                self._store.set(keys[self.rank], answer)
                # Polled, because a wait of torch's store prints errors on stderr if it ends without an answer.
                while time.monotonic() < started + seconds and not self._store.check(keys):
                    is_long = time.monotonic() > started + SLICE_SECONDS
                    if (text := self.job.heard or (self.job.lost() if is_long else None)) is not None:
                        raise RankFailure(text)
                    if call == "before":
                        # A rank of another version may never answer, but it has greeted.
                        if not self.circle.has_compared and greeting.have_greeted(self._store, self.ranks):
                            self._compare_greetings()
                        self._look_for_mistakes(keys, is_long)
                        if is_long:
                            wait = wait or Wait(self.progress, 0)
                            self._look_for_standstill(wait)
                    time.sleep(pause)
                    pause = min(2 * pause, _LOOK_SECONDS if self.job.is_watched else SLICE_SECONDS)
                return [rank for rank, key in enumerate(keys) if seconds and not self._store.check([key])]
        finally:
            if wait is not None:
                attempt(functools.partial(wait.end(), self._store))

    def _compare_greetings(self) -> None:
        if not self.circle.has_compared:
            with store_needed(self.job):
                greeting.compare_greetings(self._store, self.ranks, self.ranks[self.rank], self.of)
            self.circle.has_compared = True

    def _look_for_mistakes(self, keys: list[str], also_astray: bool) -> None:
        told = self.circle.told
        if self._store.check([f"{self.prefix}/error"]):
            rank, text, astray = json.loads(self._store.get(f"{self.prefix}/error"))
            told[rank] += astray
            raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")
        for rank, key in enumerate(keys) if also_astray else ():
            note = _astray_key(self.ranks[rank])
            if not self._store.check([key]) and self._store.check([note]):
                count, text = json.loads(self._store.get(note))
                if count > told[rank]:
                    told[rank] += 1
                    raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")

    def _look_for_standstill(self, wait: Wait) -> None:
        """Raises RankFailure if a rank has failed, or if the ranks wait for each other and none can go on. This roll call then does not count."""
        key = self.progress.failure_key
        failure = None if self.within is None else self.within.failure()
        text = wait.turn(self._store) if failure is None else str(failure)
        if text is not None or self._store.check([key]):
            text = text or json.loads(self._store.get(key))["text"]
            for own in (key, self._keys("before")[self.rank]):
                self._store.delete_key(own)
            self._store.add(self._calls, -1)
            self.progress.withdraw()
            raise RankFailure(text)


def _lacks_descriptors(error: Exception) -> bool:
    """Returns True if this process could not open a socket or a file because it has too many."""
    if os.strerror(errno.EMFILE) in str(error):
        return True
    try:
        os.close(os.dup(0))
    except OSError as raised:
        return raised.errno == errno.EMFILE
    return False


def _gloo_options(timeout: timedelta, address: str | None) -> Any:
    """Returns the options that torch's own constructor would take, with more threads. ``address``: that of the interface to use; None: torch's choice."""
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack some of its functions
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = gloo._Options()
    if address is not None:
        options._devices = [gloo.create_device(hostname=address)]
    else:
        options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._timeout, options._threads = timeout, _THREADS
    return options


def go_astray(error: Exception, job: Job | None = None) -> None:
    """Tells ranks that may wait for this rank to construct a loader that it does not come, by a note in the store of their job (None: the default group's).

    Because of its mistake, this rank does not know which ranks wait. They have counted this roll call, but this rank has not, so their counts differ. If this
    rank continues, :func:`own_up` makes the counts equal again.
    """
    told = job or Job.default()
    if told is not None and not told.belongs_to_parent:
        texts = _mistakes.setdefault(told, [])
        texts.append(words_of(error))
        attempt(lambda: told.store.set(_astray_key(told.rank), json.dumps([len(texts), texts[-1]])))


def own_up(job: Job, ranks: tuple[int, ...]) -> None:
    """Tells these ranks of this rank's earlier mistakes. Each mistake takes one roll call, which the other ranks have already counted."""
    texts = _mistakes.get(job, [])
    if any(texts):
        for text in filter(None, texts):
            Roll(job, ranks).tell(text, astray=True)
        texts[:] = [""] * len(texts)
        attempt(lambda: job.store.delete_key(_astray_key(job.rank)))


@contextlib.contextmanager
def before_roll_call() -> Iterator[None]:
    """Wraps work of a rank before it makes a Comm. Other ranks that wait for it are told of an error; see :func:`go_astray`."""
    try:
        yield
    except Exception as error:
        go_astray(error)
        raise


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _astray_key(rank: int) -> str:
    """Returns the key of the note that :func:`go_astray` leaves."""
    return f"salientpp/astray/{rank}"
