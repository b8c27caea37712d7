"""Instruments of OpenTelemetry that observe the numbers of a loader."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from salientpp.metrics.series import HasMetrics, Reader, all_series
from salientpp.processes import Lock
from salientpp.versions import own_version

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

#: Prefix of the names of instruments, and of the names of attributes.
PREFIX, ATTRIBUTES = "salientpp.loader.", "salientpp."

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
    """Returns the same meter of the global provider at every call.

    Before the user sets a provider, each call of OpenTelemetry's ``get_meter`` makes a new meter. The SDK would later ignore instruments with names that
    another of these meters has.
    """
    from opentelemetry import metrics

    return metrics.get_meter("salientpp", own_version())


def _create(meter: Meter, readers: dict[str, Reader]) -> None:
    """Makes the instruments of a meter. Each observes all loaders, because an SDK ignores a second instrument of the same name."""
    for name, metric in all_series().items():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(f"{PREFIX}{name}", callbacks=[_observing(name, readers)], unit=metric.unit, description=metric.text)


def _observing(name: str, readers: dict[str, Reader]) -> Callable[[Any], Iterable[Observation]]:
    """Returns a callback that observes one number of all loaders."""
    from opentelemetry.metrics import Observation

    def observe(options: Any) -> Iterable[Observation]:
        found = []
        for reader in list(readers.values()):
            try:
                rank, values = reader.read()
            except Exception:  # an exporter may stop for good
                _log.warning("salientpp.metrics.otel could not read %s of loader %s", name, reader.name, exc_info=True)
                continue
            shared: dict[str, str | int] = {f"{ATTRIBUTES}rank": rank, f"{ATTRIBUTES}loader": reader.name}
            found += [
                Observation(number, {**shared, **{f"{ATTRIBUTES}{label}": word for label, word in series.labels}})
                for series, number in values
                if series.name == name
            ]
        return found

    return observe
