"""Streams and events of the device, and the module that ``torch.get_device_module("simulated")`` returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tests.simulated_device import memory
from tests.simulated_device.scheduler import Queue, Wait, scheduler

NAME = "simulated"


class Stream:
    """A queue of operations. Operations of one stream are executed in order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device(NAME, 0), priority
        self.queue: Queue = scheduler.new_queue()

    def wait_event(self, event: Event) -> None:
        """Blocks this stream until the event is reached. An event that was never recorded blocks nothing."""
        if event.mark is not None:
            scheduler.add(self.queue, Wait(*event.mark))

    def wait_stream(self, stream: Stream) -> None:
        """Blocks this stream until ``stream`` has executed everything that is in its queue now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return self.queue.num_done >= self.queue.num_queued

    def synchronize(self) -> None:
        scheduler.synchronize(self.queue)


class Event:
    """A point in the queue of a stream.

    Attributes:
        mark: queue, and number of its entries before the point. None: not recorded yet.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.mark: tuple[Queue, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        queue = (stream or current_stream()).queue
        self.mark = queue, queue.num_queued

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.mark is None or self.mark[0].num_done >= self.mark[1]

    def synchronize(self) -> None:
        if self.mark is not None:
            scheduler.synchronize(*self.mark)


class _Here(threading.local):
    stream: Stream | None = None


_here = _Here()
_default: Stream | None = None


def default_stream(device: Any = None) -> Stream:
    global _default
    with scheduler.lock:
        if _default is None:
            _default = Stream()
        return _default


def current_stream(device: Any = None) -> Stream:
    return _here.stream or default_stream()


def set_stream(stream: Stream) -> None:
    _here.stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    before, _here.stream = _here.stream, stream or _here.stream
    try:
        yield
    finally:
        _here.stream = before


def restart(seed: int) -> None:
    """Executes everything that is queued, and chooses the order of later operations."""
    global _default
    with scheduler.lock:
        scheduler.restart(seed)
        _default = None


class DeviceModule:
    """Functions of ``torch.simulated``, as far as they are like those of ``torch.cuda``."""

    Stream, Event = Stream, Event
    default_stream, current_stream = staticmethod(default_stream), staticmethod(current_stream)
    stream, set_stream = staticmethod(stream), staticmethod(set_stream)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "simulated accelerator"

    def synchronize(self, device: Any = None) -> None:
        scheduler.synchronize_all()

    def set_sync_debug_mode(self, mode: str) -> None:
        """Makes a synchronisation of the host an error ("error"), or allows it ("default")."""
        if mode not in ("default", "error"):
            raise ValueError(f"mode must be 'default' or 'error', got {mode!r}")
        scheduler.sync_is_error = mode == "error"

    def memory_allocated(self, device: Any = None) -> int:
        with scheduler.lock:
            scheduler.on_turn()
            return memory.usage.now

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.usage.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.usage.peak = self.memory_allocated()

    def empty_cache(self) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def _is_in_bad_fork(self) -> bool:
        return False
