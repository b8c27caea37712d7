"""Counts what an engine's epochs did, and for how long its threads worked and waited."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from salientpp.engine.trace import Trace
from salientpp.processes import Lock

#: Number of batches whose single times an epoch keeps, for percentiles. An epoch may have no end.
_MOST_TIMES = 2**12


class _OfThread(threading.local):
    """Seconds of one thread. Each thread that uses it appends its own to ``everyone``."""

    def __init__(self, everyone: list[tuple[threading.Thread, dict[str, float]]]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        everyone.append((threading.current_thread(), self.seconds))


class Work:
    """Seconds that the threads of an engine spent on each kind of work: 'draw', 'gather' and 'transform'.

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

    @property
    def seconds(self) -> dict[str, float]:
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
            return dict(found)

    def reset(self) -> None:
        with self._lock:
            for seconds in (self._ended, *(seconds for _, seconds in self._everyone)):
                seconds.clear()

    def __reduce__(self) -> tuple[type[Work], tuple[dict[str, float]]]:
        return Work, (self.seconds,)


@dataclass
class EpochTimes:
    """Times at which the batches of one epoch were requested and delivered, from ``time.perf_counter``.

    Attributes:
        epoch: number of the epoch.
        trace: receives a span 'next' for each batch, and a span 'train' for the time before the next request; None: none.
        batches, seeds: batches delivered, and seeds in them.
        seconds_waiting: time between the requests for batches and their delivery.
        seconds_in_steps: time between a delivery and the next request, in which the caller trains.
        index: number of the last batch; -1 before the first.
        begun: time of the first request; None before it.
        ended: time of the last delivery.
        single: (requested, delivered, number of seeds) of the last batches.
    """

    epoch: int
    trace: Trace | None = None
    batches: int = 0
    seeds: int = 0
    seconds_waiting: float = 0.0
    seconds_in_steps: float = 0.0
    index: int = -1
    begun: float | None = None
    ended: float = 0.0
    single: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))

    def count(self, index: int, requested: float, delivered: float, seeds: int) -> None:
        if self.begun is None:
            self.begun = requested
        else:
            self.seconds_in_steps += max(0.0, requested - self.ended)  # several threads may have requested batches
        if self.trace is not None:
            if self.batches and self.index % self.trace.every == 0:
                self.trace.add("train", self.index, self.ended, requested)
            if index % self.trace.every == 0:
                self.trace.add("next", index, requested, delivered)
        self.index = index
        self.batches += 1
        self.seeds += seeds
        self.seconds_waiting += delivered - requested
        self.ended = delivered
        self.single.append((requested, delivered, seeds))


@dataclass
class Counters:
    """Statistics of an engine's epochs.

    Attributes:
        lock: guards the numbers, because several threads may each drive an epoch.
        batches, seeds: batches delivered, and seeds in them.
        seconds_waiting: total time between the requests for batches and their delivery.
        seconds_in_steps: total time between a delivery and the next request of the same epoch.
        seconds_by_stage: time that the thread which drives the pipeline spent in each stage.
        times: times of the epoch that was begun last.
        failure: error that occurred while an epoch answered the other ranks in the background.
    """

    lock: Lock
    batches: int = 0
    seeds: int = 0
    seconds_waiting: float = 0.0
    seconds_in_steps: float = 0.0
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    times: EpochTimes = field(default_factory=lambda: EpochTimes(0))
    failure: BaseException | None = None

    def reset(self, stages: Iterable[str]) -> None:
        with self.lock:
            self.batches = self.seeds = 0
            self.seconds_waiting = self.seconds_in_steps = 0.0
            self.seconds_by_stage = dict.fromkeys(stages, 0.0)

    def count_batch(self, times: EpochTimes, index: int, requested: float, delivered: float, seeds: int) -> None:
        """Counts batch ``index`` of an epoch."""
        with self.lock:
            step = times.seconds_in_steps
            times.count(index, requested, delivered, seeds)
            self.batches += 1
            self.seeds += seeds
            self.seconds_waiting += delivered - requested
            self.seconds_in_steps += times.seconds_in_steps - step

    def count_stages(self, seconds: Mapping[str, float]) -> None:
        with self.lock:
            for name, spent in seconds.items():
                self.seconds_by_stage[name] += spent
