"""Gives rows in memory, in files or in other storage one interface, from which batches take them.

A :class:`RowSource` copies rows, selected by number, into memory that the caller provides. :class:`TensorRows` reads a tensor in memory or in a
memory-mapped file. For other storage, a user writes a class with the attributes ``shape`` and ``dtype`` and the method ``take``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from salientpp import ops
from salientpp.ops.store import KNOWN_DTYPES
from salientpp.store.thread_groups import in_group, in_pieces


class RowSource(Protocol):
    """Interface of an object that holds the rows of an attribute. Batches take rows by number. All have one shape and dtype.

    Users may write their own class. Several threads may call ``take`` at the same time.

    Attributes:
        shape: [S, ...], the number of rows followed by the shape of a row.
        dtype: dtype of the rows.
    """

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        """Copies ``out[out_index] = rows[index]``.

        Args:
            index: int64 [n] on the CPU, in [0, S), in any order; repeats are allowed.
            out: contiguous, on the CPU, with the dtype and row shape of the source. ``take`` must not change its other rows.
            out_index: int64 [n], distinct row numbers of ``out``. None: 0, 1, ..., n - 1.
        """


#: Up to this many bytes of rows, torch's operator takes a fraction of the time of one call of the row kernel.
_SMALL_BYTES = 64 * 2**10

#: If the tensor fits into the CPU cache, torch's operator wins for larger sizes too, because the kernel's prefetches cost more than they save. It then
#: takes any number of labels or masks, and other rows up to the size from which the pool provides memory.
_CACHED_BYTES, _NARROW_BYTES, _UNPOOLED_BYTES = 4 * 2**20, 8, 2**20


class TensorRows:
    """Source of the rows of a contiguous tensor, which may be memory-mapped. ``take`` works only for CPU tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype, self.nbytes = tensor, tensor.shape, tensor.dtype, tensor.nbytes
        self._most_little = -1  # number of rows
        if tensor.dtype in KNOWN_DTYPES:
            row_bytes = max(1, self.nbytes // max(1, tensor.size(0)))
            is_cached = self.nbytes <= _CACHED_BYTES
            most = _UNPOOLED_BYTES if is_cached else _SMALL_BYTES
            if is_cached and row_bytes <= _NARROW_BYTES:
                most = sys.maxsize
            self._most_little = most // row_bytes

    def is_little(self, num_rows: int) -> bool:
        """True if torch's ``index_select`` takes this number of rows faster than the package's row kernel does."""
        return num_rows <= self._most_little

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        put_rows(self.tensor, index, out, out_index)


class JoinedRows:
    """Source that presents the rows of several tensors as one sequence, without copying them. They may be maps of several files.

    Args:
        pieces: at least one tensor, all with the same dtype and row shape.

    Raises:
        ValueError: the pieces differ in dtype or row shape.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        kinds = {(piece.dtype, tuple(piece.shape[1:])): number for number, piece in enumerate(pieces)}
        if len(kinds) > 1:
            words = ", ".join(
                f"{dtype} {list(shape)} in piece {number}"
                for (dtype, shape), number in sorted(kinds.items(), key=lambda kind: kind[1])
            )
            raise ValueError(f"rows of one attribute must have the same dtype and shape in every piece, got {words}")
        self.pieces, self.dtype = list(pieces), pieces[0].dtype
        self.shape = torch.Size((sum(piece.size(0) for piece in pieces), *pieces[0].shape[1:]))
        self.nbytes = sum(piece.nbytes for piece in pieces)

    def whole(self) -> Tensor:
        """Returns all rows, copied into one tensor."""
        return torch.cat(self.pieces)

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        _put(ops.gather_joined_rows, self.pieces, index, out, out_index, self.nbytes // max(1, self.shape[0]))


def checked_rows(value: Any, name: str, num_rows: int) -> RowSource:
    """Checks a user's tensor or source of rows, and returns it as a source. Error texts call it ``name``.

    Raises:
        TypeError: the value is neither a tensor nor a source.
        ValueError: the number of rows is not ``num_rows``, or the tensor is not contiguous on the CPU.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or not value.is_contiguous():
            strides = list(value.stride()) if value.layout == torch.strided else None
            raise ValueError(
                f"{name} must be a contiguous tensor on the CPU, got {value.layout} on {value.device} with strides {strides}"
            )
        value = TensorRows(value.detach())
    elif not callable(getattr(value, "take", None)) or not hasattr(value, "shape"):
        raise TypeError(
            f"{name} must be a tensor, or an object with shape, dtype and take(index, out, out_index), got {type(value).__name__}"
        )
    if not isinstance(getattr(value, "dtype", None), torch.dtype):
        raise TypeError(f"{name}.dtype must be a torch.dtype, got {getattr(value, 'dtype', None)!r}")
    shape = value.shape
    if not isinstance(shape, Sequence) or not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise TypeError(f"{name}.shape must be [number of rows, ...], whole numbers >= 0, got {shape!r}")
    if shape[0] != num_rows:
        raise ValueError(f"{name} must have one row per vertex, expected {num_rows}, got {shape[0]}")
    return value


def empty_rows(like: RowSource, num_rows: int) -> Tensor:
    """Returns an uninitialised CPU tensor for ``num_rows`` rows of the source ``like``."""
    return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device="cpu")


def take_rows(rows: Tensor | RowSource, index: Tensor) -> Tensor:
    """Returns ``rows[index]`` as a new CPU tensor, for a CPU tensor or a source of rows."""
    source = TensorRows(rows) if isinstance(rows, Tensor) else rows
    if isinstance(source, TensorRows) and source.is_little(index.numel()):
        return source.tensor.index_select(0, index)
    out = empty_rows(source, index.numel())
    source.take(index, out)
    return out


def put_rows(rows: Tensor, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
    """Copies ``out[out_index] = rows[index]`` for CPU tensors, with this package's kernel. ``out_index`` None means 0, 1, ..."""
    _put(ops.gather_rows, rows, index, out, out_index, rows[:1].nbytes)


def _put(
    gather: Callable[..., None], rows: Any, index: Tensor, out: Tensor, out_index: Tensor | None, row_bytes: int
) -> None:
    """Runs the kernel ``gather``. If this thread belongs to a group (thread_groups.py), the group shares the work."""
    if not in_group():
        gather(rows, index, out, out_index)
        return
    num_rows = index.numel()

    def put(first: int, last: int) -> None:
        to, places = (out[first:last], None) if out_index is None else (out, out_index[first:last])
        gather(rows, index[first:last], to, places, parallel=False)

    in_pieces(put, num_rows, num_rows * row_bytes)


_numbers = torch.arange(0, device="cpu")


def row_numbers(size: int) -> Tensor:
    """Returns the numbers 0 to size - 1, int64. All callers share one tensor, so they must not write to it."""
    global _numbers
    numbers = _numbers  # another thread may replace the global meanwhile
    if numbers.numel() < size:
        _numbers = numbers = torch.arange(2 * size, device="cpu")
    return numbers[:size]


def pinned(tensor: Tensor) -> Tensor:
    """Returns a copy in page-locked host memory, which a device can read directly. Without an accelerator, returns the tensor itself."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def hold_for_stream(rows: Tensor, device: torch.device) -> None:
    """Keeps the memory of ``rows`` from being reused before the current stream of ``device`` has read it.

    Call it before a stream reads rows in place: the loader that owns them may be deleted before they are read.
    """
    if rows.device.type != "cpu":
        rows.record_stream(torch.get_device_module(device).current_stream(device))
    elif device.type != "cpu":
        # torch learns which streams use pinned memory only from copies out of it, so one row is copied.
        rows[:1].to(device, non_blocking=True)
