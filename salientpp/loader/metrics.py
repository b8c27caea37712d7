"""Numbers that show what a loader does while it works: rates, waiting, stages, rows, memory, and the slowest rank.

:data:`METRICS` describes them. Their names and units follow OpenTelemetry's conventions (https://opentelemetry.io/docs/specs/semconv/general/metrics/).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from salientpp.engine.counters import Delivered, EpochTimes, Single
from salientpp.engine.engine import Engine
from salientpp.engine.run import Run
from salientpp.engine.spans import SpanFile
from salientpp.engine.stages import LAST_STAGE
from salientpp.loader.statistics import TIERS, LoaderStats
from salientpp.processes import Lock, forks
from salientpp.ranks.comm import Comm

#: Prefix of numbers of the last batches, and the number of these batches.
RECENT, NUM_RECENT = "recent.", 100


@dataclass(frozen=True)
class Metric:
    """Description of one number that ``loader.metrics()`` returns.

    Attributes:
        unit: unit in UCUM: 's', 'By' (bytes), '1' (a share or a number without unit), or what is counted, as in '{batch}'.
        kind: 'counter' for a number that only grows within an epoch, 'gauge' for any other.
        text: what the number says.
    """

    unit: str
    kind: Literal["counter", "gauge"]
    text: str


#: Stages that only wait for messages of other ranks.
_WAITS = ("read_counts", "localize_ids")

#: Numbers of an epoch, by name. A word in capitals stands for the names of stages, tiers or kinds of memory. Stages, work, rows and bytes count what
#: the loader did since the epoch began, also for other iterators that are in use.
METRICS: Mapping[str, Metric] = {
    "epoch": Metric("1", "gauge", "number of the epoch"),
    "rank": Metric("1", "gauge", "number of this rank"),
    "ranks": Metric("1", "gauge", "number of ranks"),
    "batches": Metric("{batch}", "counter", "batches delivered"),
    "seeds": Metric("{seed}", "counter", "seeds in these batches"),
    "seconds": Metric("s", "counter", "time from the first request to the last delivery"),
    "batches_per_second": Metric("{batch}/s", "gauge", "batches a second"),
    "seeds_per_second": Metric("{seed}/s", "gauge", "seeds a second"),
    "wait.seconds": Metric("s", "counter", "time in which the training loop waited for batches"),
    "wait.share": Metric("1", "gauge", "share of the time in which the training loop waited for batches"),
    "wait.p50": Metric("s", "gauge", "median of the waiting for a batch"),
    "wait.p95": Metric("s", "gauge", "95th percentile of the waiting for a batch"),
    "wait.p99": Metric("s", "gauge", "99th percentile of the waiting for a batch"),
    "step.seconds": Metric("s", "counter", "time between batches, in which the training loop computed"),
    "step.p50": Metric("s", "gauge", "median of the time between two batches; within a round of rounds() it is 0"),
    "stage.NAME.seconds": Metric("s", "counter", "time of a stage in the thread that drives the pipeline"),
    "stage.NAME.share": Metric("1", "gauge", "share of the time in which that thread was in a stage"),
    "transform.seconds": Metric("s", "counter", "time of the user's transform, a part of the stage 'assemble'"),
    "work.draw.seconds": Metric("s", "counter", "time in which threads drew batches, counted at the latest when a batch is delivered"),
    "work.gather.seconds": Metric("s", "counter", "time in which threads copied rows out of memory or files"),
    "work.seeds.seconds": Metric("s", "counter", "time in which the user's sampler gave seeds"),
    "peers.seconds": Metric("s", "counter", "time in which this rank waited for messages of other ranks"),
    "peers.share": Metric("1", "gauge", "share of the time in which this rank waited for messages of other ranks"),
    "rows.TIER": Metric("{row}", "counter", "rows delivered from a tier"),
    "bytes.TIER": Metric("By", "counter", "bytes of the rows delivered from a tier"),
    "bytes.sent": Metric("By", "counter", "bytes sent to other ranks"),
    "bytes.received": Metric("By", "counter", "bytes received from other ranks"),
    "queue.drawn": Metric("{batch}", "gauge", "batches that are drawn, or being drawn, and have not entered the pipeline"),
    "queue.in_flight": Metric("{batch}", "gauge", "batches in the pipeline"),
    "memory.KIND": Metric("By", "gauge", "memory that the loader holds"),
    "ranks.slowest": Metric("1", "gauge", "rank that spent the longest time on own work: all but waiting for other ranks"),
    "ranks.slowest.seconds": Metric("s", "gauge", "time of this rank's own work"),
    "ranks.slowest.stage.NAME": Metric("s", "gauge", "time of the longest part of this work"),
    "ranks.wait.share.min": Metric("1", "gauge", "smallest share of waiting among the ranks"),
    "ranks.wait.share.max": Metric("1", "gauge", "largest share of waiting among the ranks"),
}  # fmt: skip


def metric_of(key: str) -> tuple[str, Metric]:
    """Returns the name in :data:`METRICS` that describes a number of ``loader.metrics()``, and the description.

    Raises:
        KeyError: no description has this name.
    """
    own = key.removeprefix(RECENT)
    if own in METRICS:
        return own, METRICS[own]
    words = own.split(".")
    for name, metric in METRICS.items():
        pattern = name.split(".")
        if len(pattern) == len(words) and all(a == b or a.isupper() for a, b in zip(pattern, words)):
            return name, metric
    raise KeyError(key)


def metrics_of(engine: Engine, times: EpochTimes, counted: LoaderStats, memory: Mapping[str, int]) -> dict[str, float]:
    """Returns the numbers of an epoch on this rank.

    Args:
        times: times of its batches.
        counted: what was counted in this epoch.
        memory: bytes by kind.
    """
    comm = engine.basis.comm
    found: dict[str, float] = {"epoch": times.epoch, "rank": comm.rank, "ranks": comm.size}
    delivered, last, recent = times.read(NUM_RECENT)
    found |= numbers_of(delivered, last)
    found |= {RECENT + name: number for name, number in numbers_of(recent.total, recent).items()}
    seconds = found["seconds"]
    stages = ("sample", "gather_host_rows", "assemble") if engine.producer.is_local else counted.seconds_by_stage
    for name in stages:
        spent = counted.seconds_by_stage[name]
        found |= {f"stage.{name}.seconds": spent, f"stage.{name}.share": _share(spent, seconds)}
    work = counted.seconds_of_work
    found |= {f"work.{kind}.seconds": work.get(kind, 0.0) for kind in ("draw", "gather", "seeds")}
    found["transform.seconds"] = work.get("transform", 0.0)
    peers = counted.seconds_for_peers
    found |= {"peers.seconds": peers, "peers.share": _share(peers, seconds)}
    for tier in TIERS:
        found[f"rows.{tier}"] = sum(of_type[tier] for of_type in counted.by_type.values())
        found[f"bytes.{tier}"] = sum(
            of_type[tier] * counted.row_bytes.get(type_, 0) for type_, of_type in counted.by_type.items()
        )
    found |= {"bytes.sent": counted.bytes_sent, "bytes.received": counted.bytes_received}
    found["queue.drawn"], found["queue.in_flight"] = engine.queued
    return found | {f"memory.{kind}": number for kind, number in memory.items()}


def numbers_of(of: Delivered, single: Single) -> dict[str, float]:
    """Returns counts, rates and waiting of batches. The totals are in ``of``; ``single`` has the times of single batches, for percentiles."""
    seconds = of.seconds_waiting + of.seconds_in_steps
    found: dict[str, float] = {"batches": of.batches, "seeds": of.seeds, "seconds": seconds}
    found |= {"batches_per_second": _share(of.batches, seconds), "seeds_per_second": _share(of.seeds, seconds)}
    found |= {"wait.seconds": of.seconds_waiting, "wait.share": _share(of.seconds_waiting, seconds)}
    ordered = np.sort(single.waits)
    found |= {f"wait.p{percent}": _percentile(ordered, percent) for percent in (50, 95, 99)}
    return found | {"step.seconds": of.seconds_in_steps, "step.p50": _percentile(np.sort(single.steps), 50)}


def _percentile(ordered: np.ndarray, percent: int) -> float:
    """Returns the nearest-rank percentile of numbers in ascending order; 0 without numbers."""
    return float(ordered[max(0, -(-len(ordered) * percent // 100) - 1)]) if len(ordered) else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def compare_ranks(comm: Comm, own: Mapping[str, float]) -> dict[str, float]:
    """Returns the numbers that compare the ranks, from the numbers of each. Collective."""
    work = {
        name.split(".")[1]: seconds
        for name, seconds in own.items()
        if name.startswith("stage.") and name.endswith(".seconds") and name.split(".")[1] not in _WAITS
    }
    # The last stage contains the transform, and waits for the rows of other ranks.
    work[LAST_STAGE] = max(0.0, work[LAST_STAGE] - own["transform.seconds"] - own["peers.seconds"])
    work |= {"transform": own["transform.seconds"], "step": own["step.seconds"]}
    facts = {"own": own["seconds"] - own["peers.seconds"], "share": own["wait.share"], "work": work}
    everyone = comm.gather_facts(facts, "compare its metrics")
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank]["own"])
    shares, work = [each["share"] for each in everyone], everyone[slowest]["work"]
    longest = max(work, key=lambda kind: work[kind])
    return {
        "ranks.slowest": slowest,
        "ranks.slowest.seconds": everyone[slowest]["own"],
        f"ranks.slowest.stage.{longest}": work[longest],
        "ranks.wait.share.min": min(shares),
        "ranks.wait.share.max": max(shares),
    }


class Numbers(dict[str, float]):
    """Read-only dictionary. Several calls of ``metrics()`` return the same one, since a copy for each would take 1 % of a small batch's time."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "later calls of metrics() return this dictionary again, so it cannot be changed; change a copy, dict(loader.metrics())"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, float]]]:
        return dict, (dict(self),)


class _Measuring(NamedTuple):
    """State of the measurements of one epoch.

    Attributes:
        before: the loader's statistics when the epoch began. None: it began with zeros.
        after: the statistics when the epoch ended. None: it goes on, so the present statistics count.
        times: times of its batches.
    """

    before: LoaderStats | None
    times: EpochTimes
    after: LoaderStats | None = None

    def counted(self, engine: Engine) -> LoaderStats:
        """Returns what was counted in the epoch, until now or until its end."""
        after = self.after or LoaderStats.of(engine)
        return after if self.before is None else after.since(self.before)


class Measured:
    """Measurements of one loader in its latest epoch. Another thread may read them while epochs begin and end.

    Args:
        spans: file that receives the numbers at the end of each epoch; None: none.

    Attributes:
        last: the numbers that were computed last, and when, as a time of ``time.perf_counter``.
    """

    def __init__(self, spans: SpanFile | None = None) -> None:
        self.spans = spans
        self.last = -math.inf, Numbers()
        self._epoch = _Measuring(None, EpochTimes(0))
        self._open: object = None  # identifies the epoch that goes on
        self._lock = Lock()  # held while an epoch is replaced
        self._forks = forks()
        self._comm: Comm | None = None

    def begin(self, engine: Engine, memory: Callable[[], Mapping[str, int]], run: Run) -> None:
        """Begins to measure an epoch."""
        self._end(engine, memory, self._open)  # its iterator may still live
        token, begun = object(), _Measuring(LoaderStats.of(engine), run.times)
        with self._lock:
            self._open, self._forks = token, forks()
            self._set(begun)
        run.on_end = partial(self._end, engine, memory, token)

    def _end(self, engine: Engine, memory: Callable[[], Mapping[str, int]], token: object) -> None:
        with self._lock:
            if token is None or self._open is not token:
                return
            self._open, epoch = None, self._epoch
        ended = epoch._replace(after=LoaderStats.of(engine))
        with self._lock:
            if self._epoch is epoch:  # otherwise another thread has begun one
                self._set(ended)
        if self.spans is not None and self._forks == forks():  # an epoch of the parent is not the child's to record
            found = metrics_of(engine, ended.times, ended.counted(engine), memory())
            of_epoch = {name: number for name, number in found.items() if not name.startswith(RECENT)}
            self.spans.note("epoch", of_epoch, str(epoch.times.epoch))

    def _set(self, epoch: _Measuring) -> None:
        self._epoch, self.last = epoch, (-math.inf, Numbers())

    def copy(self) -> Measured:
        """Returns the measurements for a copy of the loader. The copy records to a file of its own."""
        other = Measured(copy.copy(self.spans))
        other._epoch = self._epoch._replace(times=copy.deepcopy(self._epoch.times))
        return other

    def reset(self, engine: Engine) -> None:
        """Starts the counts of the epoch again from zero, because the loader has reset its statistics."""
        self._set(_Measuring(None, engine.counters.times))

    def metrics(self, engine: Engine, memory: Callable[[], Mapping[str, int]]) -> Numbers:
        """Computes the numbers of :data:`METRICS` for this rank, and keeps them in ``last``."""
        while True:
            epoch = self._epoch
            found = Numbers(metrics_of(engine, epoch.times, epoch.counted(engine), memory()))
            # Otherwise another thread has begun or ended an epoch, whose numbers may be among these.
            if epoch is self._epoch:
                self.last = time.perf_counter(), found
                return found

    def comparison(self, engine: Engine, own: Mapping[str, float]) -> dict[str, float]:
        """Returns the numbers that compare the first ``number`` ranks of ``comm``. Collective among these ranks."""
        if self._comm is None:  # of its own, because a thread of the engine may be in a collective of an epoch
            self._comm = engine.basis.comm.among([*range(engine.basis.source.exchange.placement.num_trainers)])
        return compare_ranks(self._comm, own)
