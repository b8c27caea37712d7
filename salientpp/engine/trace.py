"""Records when each stage and each thread worked on which batch."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

#: Beginning of the track of a thread that works beside the one that drives the pipeline.
WORKER = "worker: "


class Trace:
    """Records spans: which track (a stage or a thread) worked on which batch, and when. Threads may share a trace.

    Args:
        outer: a trace that gets the same spans; None: none. It may be set later.

    Attributes:
        every: only batches whose number is a multiple of it are recorded.
    """

    every = 1

    def __init__(self, outer: Trace | None = None) -> None:
        self.outer = outer
        self._spans: list[tuple[str, int, float, float]] = []

    def add(self, track: str, index: int, started: float, ended: float) -> None:
        """Records that a track worked on batch ``index`` between two times of ``time.perf_counter``."""
        self._spans.append((track, index, started, ended))
        if self.outer is not None:
            self.outer.add(track, index, started, ended)

    def to_chrome(self) -> dict[str, Any]:
        """Returns JSON values for chrome://tracing and Perfetto: one thread per track, in the order of first use."""
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span[0] for span in self._spans))}
        zero = min((span[2] for span in self._spans), default=0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        for track, index, started, ended in self._spans:
            times = {"ts": (started - zero) * 1e6, "dur": (ended - started) * 1e6}
            name = f"batch {index}"
            events.append({"ph": "X", "name": name, "cat": track, "pid": 0, "tid": tracks[track], **times})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Span:
    """Context that records its time in a trace. A class, because a generator would cost several times as much."""

    __slots__ = ("_index", "_started", "_trace", "_track")

    def __init__(self, trace: Trace, track: str, index: int) -> None:
        self._trace, self._track, self._index = trace, track, index

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._trace.add(self._track, self._index, self._started, time.perf_counter())


_NOTHING = contextlib.nullcontext()


def traced(trace: Trace | None, track: str, index: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context that records its time as a span of batch ``index``. It does nothing if the batch is not recorded."""
    return _NOTHING if trace is None or index % trace.every else _Span(trace, track, index)


def in_stage(stage: str, index: int, trace: Trace | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context that shows a stage in torch's profiler and in the trace. If neither records, the context does nothing."""
    if torch.autograd._profiler_enabled():
        return _profiled(stage, index, trace)
    return _NOTHING if trace is None or index % trace.every else _Span(trace, stage, index)


@contextlib.contextmanager
def _profiled(stage: str, index: int, trace: Trace | None) -> Any:
    with torch.profiler.record_function(f"salientpp::{stage}"), traced(trace, stage, index):
        yield
