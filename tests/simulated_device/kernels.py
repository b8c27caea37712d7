"""Triton's kernels on the simulated device. A launch is queued on the current stream, and Triton's interpreter runs it later on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import triton_interpreter

from tests.simulated_device.tensors import SimulatedTensor, enqueue

#: Functions that launch a kernel of :mod:`salientpp.sampling.device_kernels`.
_LAUNCHES = ("draw", "read_lists", "mark", "flag", "finish")


@contextlib.contextmanager
def sampling_kernels(free_memory: int) -> Iterator[None]:
    """Lets the device draw neighbours inside the ``with`` block.

    Args:
        free_memory: bytes that the device reports as free. With 0, the lists of neighbours stay in pinned memory.
    """
    from salientpp.sampling import device_draw, device_kernels

    with triton_interpreter.interpreted(), mock.patch.object(device_draw, "_free_memory", lambda device: free_memory):
        for name in _LAUNCHES:  # loading the module again takes this back
            setattr(device_kernels, name, functools.partial(_queue, getattr(device_kernels, name)))
        yield


def _queue(launch: Callable[..., None], *arguments: Any) -> None:
    on_host = [value.host if isinstance(value, SimulatedTensor) else value for value in arguments]
    enqueue(lambda: launch(*on_host))
