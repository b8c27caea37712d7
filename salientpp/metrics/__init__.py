"""Exports the numbers of ``loader.metrics()`` to other tools: OpenTelemetry, Prometheus, the loggers of Lightning, and progress bars.

Each name is imported when it is first used, so that no tool is imported without need.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from salientpp.metrics.exposition import Exposition, prometheus
    from salientpp.metrics.instruments import otel
    from salientpp.metrics.line import progress
    from salientpp.metrics.loggers import LightningCallback

_MODULES = {
    "Exposition": "exposition",
    "LightningCallback": "loggers",
    "otel": "instruments",
    "progress": "line",
    "prometheus": "exposition",
}

__all__ = ["Exposition", "LightningCallback", "otel", "progress", "prometheus"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
