"""Sources of feature rows.

A :class:`RowSource` copies rows, by number, into memory that it is given: those of a tensor in memory or in a memory-mapped file (:class:`TensorRows`),
or of another storage, for which a user writes a class with these two attributes and this one method.
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
    """S rows of one shape and dtype.

    Several threads may call ``take`` at once.

    Attributes:
        shape: [S, ...], the number of rows and the shape of one.
        dtype: of the rows.
    """

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        """``out[out_index] = rows[index]``.

        Args:
            index: int64 [n] on the CPU, in [0, S); in any order, with repeats.
            out: contiguous, on the CPU, of this dtype and row shape. Its other rows are to stay as they are.
            out_index: int64 [n], distinct rows of ``out``; None: its n rows in order.
        """


#: Rows of so many bytes in all torch's operator takes in a fraction of the time that a call of the row kernel costs.
_SMALL_BYTES = 64 * 2**10

#: Out of tensors that a cache holds it takes more in less time, as the kernel's prefetches cost more than they save: labels and masks, however
#: many, and other rows as long as a pool would not give them memory.
_CACHED_BYTES, _NARROW_BYTES, _UNPOOLED_BYTES = 4 * 2**20, 8, 2**20


class TensorRows:
    """The rows of a contiguous tensor, which may be memory-mapped. One on a device is there for the device alone: ``take`` is for the CPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype, self.nbytes = tensor, tensor.shape, tensor.dtype, tensor.nbytes
        self._most_little = -1  # rows
        if tensor.dtype in KNOWN_DTYPES:
            row_bytes = max(1, self.nbytes // max(1, tensor.size(0)))
            is_cached = self.nbytes <= _CACHED_BYTES
            most = _UNPOOLED_BYTES if is_cached else _SMALL_BYTES
            if is_cached and row_bytes <= _NARROW_BYTES:
                most = sys.maxsize
            self._most_little = most // row_bytes

    def is_little(self, num_rows: int) -> bool:
        """Whether so many rows are better taken by torch's operator."""
        return num_rows <= self._most_little

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        put_rows(self.tensor, index, out, out_index)


class JoinedRows:
    """The rows of several tensors, one after the other; they stay where they are, as memory maps of several files do.

    Args:
        pieces: at least one, of one dtype and row shape.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces, self.dtype = list(pieces), pieces[0].dtype
        self.shape = torch.Size((sum(piece.size(0) for piece in pieces), *pieces[0].shape[1:]))
        self.nbytes = sum(piece.nbytes for piece in pieces)

    def whole(self) -> Tensor:
        """All rows, copied into one tensor."""
        return torch.cat(self._pieces)

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        _put(ops.gather_joined_rows, self._pieces, index, out, out_index, self.nbytes // max(1, self.shape[0]))


def checked_rows(value: Any, name: str, num_rows: int) -> RowSource:
    """A user's tensor or source as a source of ``num_rows`` rows; ``name`` is for errors.

    Raises:
        TypeError, ValueError: it is neither; it has another number of rows, or is a tensor whose rows do not lie one after the other on the CPU.
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
            f"{name} must be a tensor, or have shape, dtype and take(index, out, out_index), got {type(value).__name__}"
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
    """An uninitialised CPU tensor for rows of ``like``."""
    return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device="cpu")


def take_rows(rows: Tensor | RowSource, index: Tensor) -> Tensor:
    """``rows[index]`` for CPU rows, as a new tensor."""
    source = TensorRows(rows) if isinstance(rows, Tensor) else rows
    if isinstance(source, TensorRows) and source.is_little(index.numel()):
        return source.tensor.index_select(0, index)
    out = empty_rows(source, index.numel())
    source.take(index, out)
    return out


def put_rows(rows: Tensor, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
    """``out[out_index] = rows[index]`` for CPU rows, through the row kernel; ``out_index`` None: 0, 1, ..."""
    _put(ops.gather_rows, rows, index, out, out_index, rows[:1].nbytes)


def _put(
    gather: Callable[..., None], rows: Any, index: Tensor, out: Tensor, out_index: Tensor | None, row_bytes: int
) -> None:
    """By a kernel over ``rows``, shared by the threads of a group where this is one of them."""
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
    """int64 0, 1, ..., size - 1. Others have them too, so they are to be read only."""
    global _numbers
    numbers = _numbers  # another thread may set it meanwhile
    if numbers.numel() < size:
        _numbers = numbers = torch.arange(2 * size, device="cpu")
    return numbers[:size]


def pinned(tensor: Tensor) -> Tensor:
    """A copy in page-locked host memory, from which a device copies and reads by itself; without an accelerator the tensor."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor
