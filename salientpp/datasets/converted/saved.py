"""How are tensors read in pieces that ``torch.save`` wrote?

They stay in the file, which torch maps; what was read of the map is given back after each piece, since it would count as resident.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.converted.pieces import EdgePiece, RowPiece, counted


class SavedEdges:
    """An ``edge_index`` [2, E] that is mapped."""

    unit = "edges"

    def __init__(self, edge_index: Tensor, name: str) -> None:
        if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32 [2, E], got {form(edge_index)}")
        self._edge_index, self._name = edge_index, name
        self.num_edges: int | None = edge_index.size(1)
        self.total = edge_index.size(1)

    def pieces(self, most: int) -> Iterator[EdgePiece]:
        for first in range(0, self.total, most):
            ends = [end[first : first + most] for end in self._edge_index]
            source, target = (end.numpy().copy() for end in ends)
            for end in ends:
                _give_back(end)
            yield EdgePiece(source, target, counted(f"{self._name}[:, ", first, "]"), first + source.size)


class SavedRows:
    """A tensor [n, ...] that is mapped."""

    unit = "rows"

    def __init__(self, rows: Tensor, name: str) -> None:
        if rows.dim() == 0 or rows.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor with a row per vertex, got {form(rows)}")
        self._rows, self._name = rows, name
        self.num_rows: int | None = rows.size(0)
        self.total = rows.size(0)

    def pieces(self, most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, self._rows[:1].numel() * self._rows.element_size()))
        for first in range(0, max(1, self.total), most):
            mapped = self._rows[first : first + most]
            rows = mapped.clone(memory_format=torch.contiguous_format)
            _give_back(mapped)
            yield RowPiece(rows, counted(f"{self._name}[", first, "]"), first + len(rows))


def _give_back(mapped: Tensor) -> None:
    """Let go of pages of a file that is mapped and was only read; they come again from the file."""
    if not mapped.numel() or not mapped.is_contiguous():
        return
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    page = mmap.PAGESIZE
    first = -(-mapped.data_ptr() // page) * page
    last = (mapped.data_ptr() + mapped.nbytes) // page * page
    if advise is not None and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
