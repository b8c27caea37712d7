"""Reads tensors that ``torch.save`` wrote in pieces, from a file that torch maps. What was read of the map is given back, since it counts as resident."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.converted.pieces import EdgePiece, Edges, RowPiece, Rows, counted


def saved_edges(edge_index: Tensor, name: str) -> Edges:
    """The edges of an ``edge_index`` [2, E] that is mapped."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32 [2, E], got {form(edge_index)}")
    total = edge_index.size(1)

    def pieces(most: int) -> Iterator[EdgePiece]:
        for first in range(0, total, most):
            source, target = (_copied(end[first : first + most]).numpy() for end in edge_index)
            yield EdgePiece(source, target, counted(f"{name}[:, ", first, "]"), first + source.size)

    return Edges(pieces, total, total)


def saved_rows(rows: Tensor, name: str) -> Rows:
    """The rows of a tensor [n, ...] that is mapped."""
    if rows.dim() == 0 or rows.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor with a row per vertex, got {form(rows)}")
    total = rows.size(0)

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, rows[:1].numel() * rows.element_size()))
        for first in range(0, max(1, total), most):
            piece = _copied(rows[first : first + most])
            yield RowPiece(piece, counted(f"{name}[", first, "]"), first + len(piece))

    return Rows(pieces, total, total)


def _copied(mapped: Tensor) -> Tensor:
    """A copy of rows that are mapped; the pages of the file are given back to the system, which reads them again if they are wanted."""
    copy = mapped.clone(memory_format=torch.contiguous_format)
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    page = mmap.PAGESIZE
    first = -(-mapped.data_ptr() // page) * page
    last = (mapped.data_ptr() + mapped.nbytes) // page * page
    if advise is not None and mapped.is_contiguous() and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return copy
