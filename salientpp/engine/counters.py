"""Counts what an engine's epochs did, and for how long its threads worked and waited. Counting a batch takes no lock."""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from salientpp.engine.trace import Trace
from salientpp.processes import Lock

#: Number of batches whose single times an epoch keeps, for percentiles. An epoch may have no end.
MOST_TIMES = 2**12


class _OfThread(threading.local):
    """Seconds of one thread. Each thread that uses it appends its own to ``everyone``."""

    def __init__(self, everyone: list[tuple[threading.Thread, dict[str, float]]]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        everyone.append((threading.current_thread(), self.seconds))


class Work:
    """Seconds that the threads of an engine spent: in each stage of the pipeline, and on 'draw', 'gather', 'transform' and 'seeds'.

    Each thread has its own numbers, so that counting needs no lock.

    Args:
        before: seconds to begin with.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._lock = Lock()
        self._ended: defaultdict[str, float] = defaultdict(float, before or {})  # of threads that have ended
        self._everyone: list[tuple[threading.Thread, dict[str, float]]] = []
        self._own = _OfThread(self._everyone)

    def add(self, kind: str, seconds: float) -> None:
        self._own.seconds[kind] += seconds

    def take(self, seconds: dict[str, float]) -> None:
        """Adds these seconds, by kind, and sets the values of the argument to 0."""
        own = self._own.seconds
        for kind, spent in seconds.items():
            own[kind] += spent
            seconds[kind] = 0.0

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Seconds of all threads together, by kind."""
        with self._lock:
            found = self._ended.copy()
            for each in self._everyone.copy():
                thread, seconds = each
                to = [found]
                if not thread.is_alive() and each in self._everyone:
                    self._everyone.remove(each)
                    to.append(self._ended)
                for kind, spent in seconds.copy().items():
                    for total in to:
                        total[kind] += spent
            return found

    def reset(self) -> None:
        with self._lock:
            for seconds in (self._ended, *(seconds for _, seconds in self._everyone)):
                seconds.clear()

    def __reduce__(self) -> tuple[type[Work], tuple[dict[str, float]]]:
        return Work, (self.seconds,)


class Delivered(NamedTuple):
    """Batches that were delivered, and the time around them.

    Attributes:
        batches, seeds: batches, and seeds in them.
        seconds_waiting: time between the requests for batches and their delivery.
        seconds_in_steps: time between a delivery and the next request of the same epoch, in which the caller trains.
    """

    batches: int = 0
    seeds: int = 0
    seconds_waiting: float = 0.0
    seconds_in_steps: float = 0.0


class Single(NamedTuple):
    """Times of single batches: of waiting for each (``waits``), of the steps between them (``steps``), and their numbers of seeds."""

    waits: np.ndarray
    steps: np.ndarray
    seeds: np.ndarray

    @property
    def total(self) -> Delivered:
        return _total(Delivered(), *self)


class EpochTimes:
    """Times at which the batches of one epoch were requested and delivered. Only one thread at a time adds batches; any thread reads.

    Code that runs once per batch finds the processor's caches cold. So a batch only appends to ``log``, and numbers are computed when they are read.

    Args:
        trace: receives a span 'next' for each batch, and a span 'train' for the time before the next request; None: none.

    Attributes:
        epoch: number of the epoch.
        log: for each batch the times of its request and of its delivery, from ``time.perf_counter``, and the number of its seeds.
        is_over: True if the epoch was left. A batch may still be added, if the user's transform has left it.
        index: number of the last batch that the trace received; -1 before the first.
    """

    def __init__(self, epoch: int, trace: Trace | None = None) -> None:
        self.epoch, self.trace, self.index, self.is_over = epoch, trace, -1, False
        self._lock = Lock()  # held while the log is replaced
        self._start_log(Delivered(), None, array("d"))

    def _start_log(self, before: Delivered, ended: float | None, log: array[float]) -> None:
        # Earlier batches, the time at which the last of them was delivered, and the log. Replaced as a whole, so that reading takes no lock.
        self._state, self.log = (before, ended, log), log

    def settle(self, index: int) -> None:
        """Writes the spans of batch ``index``, which was added last, to the trace. It keeps only sums of old times, because an epoch may have no end."""
        trace, log = self.trace, self.log
        if trace is not None and log:
            if len(log) > 3 and self.index % trace.every == 0:
                trace.add("train", self.index, log[-5], log[-3])
            if index % trace.every == 0:
                trace.add("next", index, log[-3], log[-2])
        self.index = index
        if len(log) >= 6 * MOST_TIMES:
            with self._lock:
                before, ended, log = self._state
                if (first := len(log) - 3 * MOST_TIMES) > 0:  # otherwise another thread has just reset it
                    before = _total(before, *_differences(log[:first], ended))
                    self._start_log(before, log[first - 2], log[first:])

    @property
    def delivered(self) -> Delivered:
        """Batches delivered since the epoch began, or since the last reset in it."""
        before, ended, log = self._state
        return _total(before, *_differences(log[:], ended))  # a copy, because an array that numpy reads cannot grow

    def read(self, number: int) -> tuple[Delivered, Single, Single]:
        """Returns ``delivered``, the last :data:`MOST_TIMES` batches, and the last ``number`` of these, all at the same moment."""
        before, ended, log = self._state
        log = log[:]
        last, recent = (_differences(log[-3 * most :], None) for most in (MOST_TIMES, number))
        return _total(before, *_differences(log, ended)), Single(*last), Single(*recent)

    def reset(self) -> None:
        with self._lock:
            self._start_log(Delivered(), None, array("d"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trace": None}  # a copy adds no batches


def _differences(log: array[float], ended: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for the batches of ``log``, the seconds of waiting, the seconds of the steps before them, and their numbers of seeds.

    Args:
        log: for each batch the times of its request and of its delivery, and the number of its seeds.
        ended: time at which the batch before the first one was delivered. None: it is unknown, and no step is returned for the first batch.
    """
    requested, delivered, seeds = np.array(log).reshape(-1, 3).T
    before = delivered[:-1] if ended is None else np.concatenate([[ended], delivered[:-1]])
    steps = requested[len(requested) - len(before) :] - before
    return delivered - requested, np.maximum(steps, 0.0), seeds  # several threads may have requested batches


def _total(before: Delivered, waits: np.ndarray, steps: np.ndarray, seeds: np.ndarray) -> Delivered:
    return _sum(before, Delivered(len(waits), int(seeds.sum()), float(waits.sum()), float(steps.sum())))


class Counters:
    """Counts what all epochs of an engine delivered.

    Args:
        past: batches that earlier epochs delivered.
        epoch: number of the epoch that was begun last.

    Attributes:
        times: times of the batches of the epoch that was begun last.
        failure: error that occurred while an epoch answered the other ranks in the background.
    """

    def __init__(self, past: Delivered | None = None, epoch: int = 0) -> None:
        self._lock = Lock()
        # Batches of earlier epochs, and the epochs that go on or have ended since the last one began. Replaced as a whole, so that reading takes no lock.
        self._state: tuple[Delivered, tuple[EpochTimes, ...]] = past or Delivered(), ()
        self.times = EpochTimes(epoch)
        self.failure: BaseException | None = None

    def begin(self, times: EpochTimes) -> None:
        with self._lock:
            past, epochs = self._state
            over = [each for each in epochs if each.is_over]
            epochs = (*(each for each in epochs if each not in over), times)
            self._state, self.times = (_sum(past, *(each.delivered for each in over)), epochs), times

    @property
    def delivered(self) -> Delivered:
        """Batches delivered since the engine was made, or since the last reset."""
        past, epochs = self._state
        return _sum(past, *(times.delivered for times in epochs))

    def reset(self) -> None:
        with self._lock:
            epochs = self._state[1]
            for times in (*epochs, self.times):
                times.reset()
            self._state = Delivered(), epochs

    def __reduce__(self) -> tuple[Any, ...]:
        return Counters, (self.delivered, self.times.epoch)


def _sum(*parts: Delivered) -> Delivered:
    return Delivered._make(map(sum, zip(*parts)))
