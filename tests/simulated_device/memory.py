"""Memory of the device, with a caching allocator, and pinned memory of the host.

Memory that Python frees belongs at once to the stream that allocated it, which may overwrite it. So freed memory is filled with poison, in the order of that
stream. ``record_stream(s)`` delays this until ``s`` has executed what it had queued when the memory was freed. New memory is filled with poison too,
because operations of its former owner may still be queued.

Poison is the bytes FF 7F FF 7F ... They are NaN in every floating-point type, and an index that no tensor has in every integer type of 16 bits or more.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.simulated_device.scheduler import Queue, scheduler


def poison(memory: Tensor) -> None:
    """Fills uint8 [n] on the CPU with poison."""
    memory[0::2] = 0xFF
    memory[1::2] = 0x7F


# --- memory of the device -----------------------------------------------------------------------------------


class Block:
    """Memory of one device tensor and its views. When Python has no reference to the block any more, the memory is free.

    Attributes:
        memory: uint8 [n] on the CPU. Queued operations refer to it, but not to the block.
        queue: queue of the stream that allocated the memory.
        used_on: queues of the streams that were recorded.
    """

    def __init__(self, num_bytes: int, queue: Queue) -> None:
        self.memory = memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.queue, self.used_on = queue, set[Queue]()
        poison(memory)
        scheduler.add(queue, lambda: poison(memory))
        usage.add(num_bytes)

    def __del__(self) -> None:
        # The garbage collector may call this in any thread and at any moment. So it takes no lock.
        others = [(queue, queue.num_queued) for queue in self.used_on if queue is not self.queue]
        _freed.append((self.memory, self.queue, others))


#: Memory, the queue of the stream to which it belongs (None: the host), and the entries of other queues that may use it.
_freed: deque[tuple[Tensor, Queue | None, list[tuple[Queue, int]]]] = deque()


def _reuse_freed_memory() -> None:
    """Overwrites freed memory, unless a recorded stream may still use it: memory of the device in the order of its stream, memory of the host at once."""
    for _ in range(len(_freed)):
        memory, queue, others = _freed.popleft()
        if not all(other.num_done >= number for other, number in others):
            _freed.append((memory, queue, others))
        elif queue is None:
            poison(memory)
        else:
            scheduler.push(queue, lambda memory=memory: poison(memory))
            usage.add(-memory.numel())


scheduler.on_turn = _reuse_freed_memory


class Usage:
    """Bytes that are allocated now, and their maximum."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


usage = Usage()


# --- pinned memory of the host ------------------------------------------------------------------------------


class _Lease(np.ndarray):
    """Pinned memory of one tensor. torch keeps it alive as long as a tensor shares it."""


@dataclass(eq=False)
class PinnedBlock:
    """Pinned memory of a tensor and its views. When they are gone, other host code may use the memory at once.

    As in torch's allocator, asynchronous copies delay this until they are executed. Operations that read the memory in place do not.

    Attributes:
        memory: uint8 [n]. Queued operations refer to it, but not to the tensor.
        address: address of the memory.
        used_on: queues of the streams on which copies were queued.
    """

    memory: Tensor
    address: int
    used_on: set[Queue] = field(default_factory=set)

    def view_of(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the same form and memory, which does not keep the memory from being freed."""
        view = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return view.set_(self.memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def free(self) -> None:
        # The garbage collector may call this in any thread and at any moment.
        _pinned.pop(self.address, None)
        _freed.append((self.memory, None, [(queue, queue.num_queued) for queue in list(self.used_on)]))


_pinned: dict[int, PinnedBlock] = {}  # by address


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a contiguous CPU tensor of poison in pinned memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    base = np.empty(max(16, -(-num_bytes // 16) * 16), dtype=np.uint8)
    block = PinnedBlock(torch.from_numpy(base), base.ctypes.data)
    poison(block.memory)
    lease = base.view(_Lease)
    _pinned[block.address] = block
    weakref.finalize(lease, block.free).atexit = False
    return torch.from_numpy(lease)[:num_bytes].view(dtype).view(tuple(shape))


def pinned_block_of(tensor: Tensor) -> PinnedBlock | None:
    """Returns the pinned memory that holds a tensor, or None."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    return _pinned.get(tensor.untyped_storage().data_ptr())


def is_pinned(tensor: Tensor) -> bool:
    """True if the tensor lies in pinned host memory."""
    return pinned_block_of(tensor) is not None


def pin(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns a copy of a CPU tensor in pinned memory, or the tensor itself if it is pinned."""
    if is_pinned(tensor):
        return tensor
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(f"cannot pin {tensor.layout} on {tensor.device}, only dense CPU tensors can be pinned")
    with torch.no_grad():
        out = pinned_empty(tensor.shape, tensor.dtype)
        return out.copy_(tensor)
