"""Provides host memory for the rows of batches, from a pool that reuses its buffers.

A new output of tens of megabytes costs more in page faults than copying the rows costs. A buffer returns to the pool when the last tensor that shares
its memory is gone, views and slices included. So a user who keeps old batches keeps them intact. A new tensor never shares memory with a living one, in
this process or in a forked process. Pinned memory for a device comes from torch's host allocator, which has its own pool.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from salientpp.processes import Lock

#: Smaller outputs come from torch's allocator, which keeps pages for reuse at these sizes.
_POOLED_BYTES = 2**20
#: Buffer sizes are multiples of this, the size of a huge page.
_UNIT = 2 * 2**20
#: Maximum number of free buffers. A pipeline has fewer batches in flight.
_KEPT = 16


class _Lease(np.ndarray):
    """Array that owns a buffer's memory for one output. When no tensor shares the memory, the array is deleted and the buffer returns to the pool."""


class BufferPool:
    """Provides memory for tensors of varying size, and reuses it once a tensor is gone.

    Threads may share a pool. A forked child inherits the free buffers. A copy of the pool starts empty.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = Lock()  # reentrant, because garbage collection may end a lease inside `empty`
        self.bytes_allocated = 0

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised, contiguous CPU tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _POOLED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = self._take(num_bytes)
        lease = np.frombuffer(buffer, dtype=np.uint8, count=num_bytes).view(_Lease)
        weakref.finalize(lease, self._give_back, buffer).atexit = False
        return torch.from_numpy(lease).view(dtype).view(*shape)

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            fitting = [buffer for buffer in self._free if num_bytes <= len(buffer) <= 4 * num_bytes]
            if fitting:
                buffer = min(fitting, key=len)
                self._free.remove(buffer)
                return buffer
        # A quarter more than asked for, because the next batch may be a little larger.
        size = -(-num_bytes * 5 // 4 // _UNIT) * _UNIT
        # Private memory, because Python's default is memory that a forked child and its parent would both write to.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        buffer = mmap.mmap(-1, size, **flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        self.bytes_allocated += size
        return buffer

    def _give_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > _KEPT:
                smallest = min(self._free, key=len)
                self._free.remove(smallest)
                self.bytes_allocated -= len(smallest)
