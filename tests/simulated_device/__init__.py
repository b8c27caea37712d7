"""A simulated accelerator that finds missing waits, for machines without a GPU.

``install()`` registers the device ``simulated:0`` with torch. It has streams, events, pinned memory and a caching allocator. Its operations compute what
the CPU computes, but later. Their order is as unfavourable as streams and events allow, and ``seed(n)`` selects one of these orders. Code that
forgets a wait, or frees memory too early, then reads **poison**: NaN, or an index that no tensor has.

Four rules make faults visible:

1. An operation is queued on the current stream. Streams execute their queues independently (:mod:`tests.simulated_device.scheduler`).
2. Free memory is overwritten in the order of the stream that allocated it (:mod:`tests.simulated_device.memory`).
3. A copy from or to pinned memory reads or writes the host's memory when it is executed (:mod:`tests.simulated_device.copies`).
4. ``torch.simulated.set_sync_debug_mode("error")`` makes it an error if the host waits for the device.

The device lasts as long as the process, so tests that use it run in processes of their own (``pytest -m simulated``). It lacks sparse
tensors, ``resize_``, timing events, and more than one device. Random numbers come from the CPU's generator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from salientpp.loader import values
from tests.simulated_device import copies, memory, streams, tensors
from tests.simulated_device.scheduler import DeviceFault, scheduler
from tests.simulated_device.streams import NAME

__all__ = ["NAME", "DeviceFault", "install", "scheduler", "seed"]

_library: Any = None


def install() -> torch.device:
    """Registers the device with torch, once per process, and returns it."""
    global _library
    if _library is None:
        backend_registration._setup_privateuseone_for_python_backend(NAME, streams.DeviceModule())
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("empty.memory_format", _empty, "PrivateUse1")
        _library.impl("empty_strided", _empty_strided, "PrivateUse1")
        _library.impl("_copy_from", copies._copy_from, "PrivateUse1")
        for name in _FACTORIES:
            _library.impl(name, functools.partial(_made_by_host, name), "PrivateUse1")
        _replace_pinned_memory()
        has_kernel = values.has_kernel
        values.has_kernel = lambda device: device.type == NAME or has_kernel(device)  # its operators read pinned memory
    return torch.device(NAME, 0)


def seed(number: int) -> None:
    """Executes everything that is queued, and selects the order of later operations."""
    streams.restart(number)


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    form = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return tensors.allocate_like(form)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return tensors.allocate(size, stride, dtype or torch.get_default_dtype())


#: Operators without tensors as arguments, which torch would otherwise compute by resizing an empty tensor.
_FACTORIES = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "tril_indices", "triu_indices")


def _made_by_host(name: str, *args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
    """Returns the result of an operator of :data:`_FACTORIES`. A queued operation writes its values."""
    packet, _, overload = name.partition(".")
    made = getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, device="cpu", **options)
    out = tensors.allocate_like(made)
    host = out.host  # the queue must not refer to the device tensor
    tensors.enqueue(lambda: host.copy_(made))  # type: ignore[arg-type, return-value]
    return out


def _replace_pinned_memory() -> None:
    """Replaces torch's functions for pinned memory. torch's allocator of pinned memory cannot be replaced from Python."""

    def replaced(name: str, create: Any, pinned: Any) -> None:
        def created(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            out = create(*args, **options)
            return pinned(out) if pin_memory else out

        torch.jit._builtins._register_builtin(created, f"aten::{name}")  # TorchScript still finds torch's function
        setattr(torch, name, created)

    replaced("empty", torch.empty, lambda out: memory.pinned_empty(out.shape, out.dtype))
    for name in ("zeros", "ones", "full", "tensor"):
        replaced(name, getattr(torch, name), memory.pin)
    torch.Tensor.pin_memory = memory.pin  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda tensor, device=None: memory.is_pinned(tensor)  # type: ignore[method-assign, assignment]
