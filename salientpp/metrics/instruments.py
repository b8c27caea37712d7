"""Instruments of OpenTelemetry that observe the numbers of a loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from salientpp.metrics.series import HasMetrics, Reader, all_series
from salientpp.versions import own_version

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

#: Prefix of the names of instruments, and of the names of attributes.
PREFIX, ATTRIBUTES = "salientpp.loader.", "salientpp."

_log = logging.getLogger(__name__)


def otel(loader: HasMetrics, meter: Meter | None = None) -> None:
    """Registers instruments of OpenTelemetry that observe ``loader.metrics()`` whenever an exporter reads them.

    Call it once for each loader, on every rank. An instrument has the name of the number after ``salientpp.loader.``, such as
    ``salientpp.loader.wait.share``. Stages, tiers and kinds of memory are attributes: ``salientpp.loader.stage.seconds`` has ``salientpp.stage``. Each
    observation has ``salientpp.rank``. The loader is not kept alive, and an error in it reaches the log but no exporter.

    Args:
        loader: a loader of this package.
        meter: meter that makes the instruments. None: one of the global meter provider.

    Raises:
        ModuleNotFoundError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"salientpp.metrics.otel needs opentelemetry-api ({error}): pip install 'salientpp[otel]'", name=error.name
        ) from None
    if meter is None:
        meter = metrics.get_meter("salientpp", own_version())
    reader = Reader(loader)

    def observing(name: str) -> Callable[[Any], Iterable[metrics.Observation]]:
        def observe(options: Any) -> Iterable[metrics.Observation]:
            try:
                rank, values = reader.read()
            except Exception:  # an exporter may stop for good
                _log.warning("salientpp.metrics.otel could not read %s", name, exc_info=True)
                return []
            shared = {f"{ATTRIBUTES}rank": rank}
            return [
                metrics.Observation(
                    number, {**shared, **{f"{ATTRIBUTES}{label}": word for label, word in series.labels}}
                )
                for series, number in values
                if series.name == name
            ]

        return observe

    for name, metric in all_series().items():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(f"{PREFIX}{name}", callbacks=[observing(name)], unit=metric.unit, description=metric.text)
