"""Time series of the numbers of a loader: variable parts of a name become labels, and counters never decrease."""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from salientpp.loader.metrics import METRICS, RECENT, Metric, metric_of
from salientpp.processes import Lock

#: Variable part of a name in ``METRICS`` -> name of the label.
LABELS = {"NAME": "stage", "TIER": "tier", "KIND": "kind"}


class HasMetrics(Protocol):
    """Interface of an object that has the numbers of a loader: the loader itself, or an object that wraps it."""

    def metrics(self) -> dict[str, float]: ...

    def stats(self) -> Any: ...


#: Names of loaders that were given none.
_numbers = itertools.count()


@dataclass(frozen=True)
class Series:
    """Name and labels under which another tool, such as Prometheus, keeps a number.

    Attributes:
        name: its name without variable parts, such as 'stage.seconds'.
        metric: its unit, kind and meaning. Numbers of the last batches are gauges.
        labels: the variable parts, such as 'stage' and 'sample'.
    """

    name: str
    metric: Metric
    labels: tuple[tuple[str, str], ...] = field(default=())


@functools.cache
def series_of(key: str) -> Series | None:
    """Returns the series of a number of ``loader.metrics()``; None if it has no description."""
    try:
        template, metric = metric_of(key)
    except KeyError:
        return None
    is_recent = key.startswith(RECENT)
    if is_recent:
        metric = Metric(metric.unit, "gauge", f"of the last batches: {metric.text}")
    pairs = list(zip(template.split("."), key.removeprefix(RECENT).split("."), strict=True))
    labels = tuple((LABELS.get(part, part.lower()), word) for part, word in pairs if part.isupper())
    return Series(f"{RECENT if is_recent else ''}{name_of(template)}", metric, labels)


def name_of(template: str) -> str:
    """Returns a name of ``METRICS`` without its variable parts, such as 'stage.seconds' for 'stage.NAME.seconds'."""
    return ".".join(part for part in template.split(".") if not part.isupper())


def all_series() -> dict[str, Metric]:
    """Returns every name that a series can have, with its description."""
    keys = [key for name in METRICS if name != "rank" for key in (name, RECENT + name) if name.islower() or key == name]
    return {series.name: series.metric for key in keys if (series := series_of(key)) is not None}


class Reader:
    """Reads the numbers of a loader, which it does not keep alive. Several threads may read, and a forked child may read too.

    Counters are totals of ``loader.stats()``. They never decrease: after a reset of these statistics, the reader adds what it read last.

    Args:
        loader: a loader of this package.
        name: name that tells the loader from others in the same tool. None: a running number.

    Attributes:
        name: the name.
    """

    def __init__(self, loader: HasMetrics, name: str | None = None) -> None:
        self.name = str(next(_numbers)) if name is None else str(name)
        self._loader = weakref.ref(loader)
        self._lock = Lock()
        self._last: dict[str, float] = {}
        self._before: dict[str, float] = {}

    @property
    def has_loader(self) -> bool:
        """False if the loader has been freed."""
        return self._loader() is not None

    def read(self) -> tuple[int, list[tuple[Series, float]]]:
        """Returns the rank, and the present value of each series. Without values if the loader has been freed."""
        loader = self._loader()
        if loader is None:
            return 0, []
        with self._lock:  # around the loader too, so that no thread brings older numbers after newer ones
            found, stats = loader.metrics(), loader.stats()
            values: list[tuple[Series, float]] = []
            for key, number in found.items():
                series = series_of(key)
                if series is None or key == "rank":
                    continue
                if series.metric.kind == "counter":
                    number = self._sum(key, total_of(stats, key))
                values.append((series, number))
        return int(found.get("rank", 0)), values

    def _sum(self, key: str, total: float) -> float:
        last = self._last.get(key, 0.0)
        if total < last * (1 - 1e-9):  # the statistics were reset; sums in another order differ by less
            self._before[key], last = self._before.get(key, 0.0) + last, 0.0
        self._last[key] = total = max(last, total)
        return self._before.get(key, 0.0) + total


def total_of(stats: Any, key: str) -> float:
    """Returns the total of a counter over all epochs, from the statistics of a loader.

    Raises:
        KeyError: the statistics have no such total.
    """
    match key.split("."):
        case [("batches" | "seeds" | "seconds") as name]:
            return getattr(stats, name)
        case ["wait", "seconds"]:
            return stats.seconds_waiting
        case ["step", "seconds"]:
            return stats.seconds_in_steps
        case ["peers", "seconds"]:
            return stats.seconds_for_peers
        case ["stage", name, "seconds"]:
            return stats.seconds_by_stage[name]
        case ["work", kind, "seconds"] | ["transform" as kind, "seconds"]:
            return stats.seconds_of_work.get(kind, 0.0)
        case ["bytes", ("sent" | "received") as way]:
            return getattr(stats, f"bytes_{way}")
        case ["rows", tier]:
            return getattr(stats, f"rows_{tier}")
        case ["bytes", tier]:
            return sum(of_type[tier] * stats.row_bytes.get(type_, 0) for type_, of_type in stats.by_type.items())
    raise KeyError(key)
