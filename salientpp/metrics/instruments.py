"""Instruments of OpenTelemetry that observe the numbers of a loader."""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from typing import TYPE_CHECKING, Any

from salientpp.metrics.series import HasMetrics, Reader, all_series
from salientpp.processes import Lock
from salientpp.versions import own_version

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

#: Prefix of the names of instruments, and of the names of attributes.
PREFIX, ATTRIBUTES = "salientpp.loader.", "salientpp."

#: Seconds for which numbers serve the instruments of one export.
MAX_AGE = 1.0

_log = logging.getLogger(__name__)
_lock = Lock()
#: Readers of the loaders that the instruments of each meter observe, by name.
_readers: weakref.WeakKeyDictionary[Meter, dict[str, Reader]] = weakref.WeakKeyDictionary()


def otel(loader: HasMetrics, meter: Meter | None = None, name: str | None = None) -> None:
    """Registers a loader with instruments of OpenTelemetry. They observe ``loader.metrics()`` whenever an exporter reads them.

    Call it once for each loader, on every rank. An instrument has the name of the number after ``salientpp.loader.``, such as
    ``salientpp.loader.wait.share``. Stages, tiers and kinds of memory are attributes: ``salientpp.loader.stage.seconds`` has ``salientpp.stage``. Each
    observation has ``salientpp.rank`` and ``salientpp.loader``. The loader is not kept alive, and an error in it reaches the log but no exporter.

    Args:
        loader: a loader of this package.
        meter: meter that makes the instruments. None: one of the global meter provider.
        name: value of the attribute ``salientpp.loader``, which tells apart the loaders of a meter. A later loader of the same name replaces the earlier
            one. None: a running number.

    Raises:
        ModuleNotFoundError: opentelemetry-api is not installed.
    """
    try:
        import opentelemetry.metrics  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"salientpp.metrics.otel needs opentelemetry-api ({error}): pip install 'salientpp[otel]'", name=error.name
        ) from None
    reader = Reader(loader, name)
    with _lock:
        meter = _global_meter() if meter is None else meter
        readers = _readers.get(meter)
        if readers is None:
            readers = _readers[meter] = {}
            _create(meter, readers)
        for gone in [key for key, other in readers.items() if not other.has_loader]:
            del readers[gone]
        while name is None and reader.name in readers:  # another loader was given this number as its name
            reader = Reader(loader)
        readers[reader.name] = reader


@functools.cache
def _global_meter() -> Meter:
    """Returns one meter of the global provider. Before a provider is set, each would be another, whose instruments the SDK ignores later."""
    from opentelemetry import metrics

    return metrics.get_meter("salientpp", own_version())


class _Readings:
    """Numbers of all loaders of a meter. Each export reads them once, so that it has numbers of one moment.

    An export calls the callback of each instrument once. So a callback that comes again begins another export.
    """

    def __init__(self, readers: dict[str, Reader]) -> None:
        self._readers = readers
        self._lock = Lock()
        self._observed: set[str] = set()
        self._read_at = -math.inf
        self._found: dict[str, list[Observation]] = {}

    def of(self, name: str, options: Any = None) -> list[Observation]:
        """Returns the observations of an instrument, which calls this once in each export."""
        with self._lock:
            if name in self._observed or time.monotonic() - self._read_at > MAX_AGE:
                self._observed.clear()
                self._found = self._read()
                self._read_at = time.monotonic()
            self._observed.add(name)
            return self._found.get(name, [])

    def _read(self) -> dict[str, list[Observation]]:
        from opentelemetry.metrics import Observation

        found: dict[str, list[Observation]] = {}
        for reader in list(self._readers.values()):
            try:
                rank, values = reader.read()
            except Exception:  # an exporter may stop for good
                _log.warning(
                    "salientpp.metrics.otel could not read the numbers of loader %s", reader.name, exc_info=True
                )
                continue
            shared: dict[str, str | int] = {f"{ATTRIBUTES}rank": rank, f"{ATTRIBUTES}loader": reader.name}
            for series, number in values:
                labels = {f"{ATTRIBUTES}{label}": word for label, word in series.labels}
                found.setdefault(series.name, []).append(Observation(number, {**shared, **labels}))
        return found


def _create(meter: Meter, readers: dict[str, Reader]) -> None:
    """Makes the instruments of a meter. An SDK ignores a second instrument of the same name, so each of these observes all loaders."""
    readings = _Readings(readers)
    for name, metric in all_series().items():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        callback = functools.partial(readings.of, name)
        create(f"{PREFIX}{name}", callbacks=[callback], unit=metric.unit, description=metric.text)
