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

    def __init__(self, everyone: list[dict[str, float]]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        everyone.append(self.seconds)


class Work:
    """Seconds that the threads of an engine spent on each kind of work: 'draw', 'gather' and 'transform'.

    Each thread has its own numbers, so that counting needs no lock.

    Args:
        before: seconds to begin with.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._everyone: list[dict[str, float]] = [dict(before or {})]
        self._own = _OfThread(self._everyone)

    def add(self, kind: str, seconds: float) -> None:
        self._own.seconds[kind] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all threads together, by kind."""
        found: defaultdict[str, float] = defaultdict(float)
        for each in self._everyone.copy():
            for kind, seconds in each.copy().items():
                found[kind] += seconds
        return dict(found)

    def reset(self) -> None:
        for each in self._everyone.copy():
            each.clear()

    def __reduce__(self) -> tuple[type[Work], tuple[dict[str, float]]]:
        return Work, (self.seconds,)


@dataclass
class EpochTimes:
    """Times at which the batches of one epoch were requested and delivered, from ``time.perf_counter``.

    Attributes:
        epoch: number of the epoch.
        first: number of its first batch, if it continues an epoch that was left.
        trace: receives a span 'next' for each batch, and a span 'train' for the time before the next request; None: none.
        batches, seeds: batches delivered, and seeds in them.
        seconds_waiting: time between the requests for batches and their delivery.
        seconds_in_steps: time between a delivery and the next request, in which the caller trains.
        begun: time of the first request; None before it.
        ended: time of the last delivery.
        single: (requested, delivered, number of seeds) of the last batches.
    """

    epoch: int
    first: int = 0
    trace: Trace | None = None
    batches: int = 0
    seeds: int = 0
    seconds_waiting: float = 0.0
    seconds_in_steps: float = 0.0
    begun: float | None = None
    ended: float = 0.0
    single: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))

    def count(self, requested: float, delivered: float, seeds: int) -> None:
        if self.begun is None:
            self.begun = requested
        else:
            self.seconds_in_steps += max(0.0, requested - self.ended)  # several threads may have requested batches
        if self.trace is not None:
            index = self.first + self.batches
            if self.batches and (index - 1) % self.trace.every == 0:
                self.trace.add("train", index - 1, self.ended, requested)
            if index % self.trace.every == 0:
                self.trace.add("next", index, requested, delivered)
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
        seconds_waiting: total time between the requests for batches and their delivery.
        seconds_by_stage: time that the thread which drives the pipeline spent in each stage.
        times: times of the epoch that was begun last.
        failure: error that occurred while an epoch answered the other ranks in the background.
    """

    lock: Lock
    batches: int = 0
    seconds_waiting: float = 0.0
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    times: EpochTimes = field(default_factory=lambda: EpochTimes(0))
    failure: BaseException | None = None

    def reset(self, stages: Iterable[str]) -> None:
        with self.lock:
            self.batches, self.seconds_waiting = 0, 0.0
            self.seconds_by_stage = dict.fromkeys(stages, 0.0)
            self.times = EpochTimes(self.times.epoch)

    def count_batch(self, times: EpochTimes, requested: float, delivered: float, seeds: int) -> None:
        """Counts one more batch of an epoch."""
        with self.lock:
            self.batches += 1
            self.seconds_waiting += delivered - requested
            times.count(requested, delivered, seeds)

    def count_stages(self, seconds: Mapping[str, float]) -> None:
        with self.lock:
            for name, spent in seconds.items():
                self.seconds_by_stage[name] += spent
