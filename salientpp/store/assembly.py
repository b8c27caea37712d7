"""Makes one tensor of rows that lie in several, in the batch's order, on the device.

The rows of a batch lie in up to five tensors: those of the tiers that the device reads where they are, the packed rows, and what arrived from other
ranks. The kernel is Triton's (:mod:`salientpp.store.assembly_kernel`). Where there is no Triton, torch does the same with a pass per tensor. Neither makes
the host wait for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from salientpp.ops import bytes_of

#: Tensors of a batch, at most.
NUM_TENSORS = 5

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@cache
def has_kernel() -> bool:
    """Whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


def assemble_rows(tensors: Sequence[Tensor], index: Tensor, out: Tensor) -> None:
    """``out[i]`` = row ``index[i]`` of the tensors laid end to end, in one pass on the device's current stream.

    Args:
        tensors: at most five, contiguous [s, ...], of the dtype and row shape of ``out``; on its device or in pinned host memory (the
            latter needs Triton). Their bytes are aligned to the row's largest power of two up to 8.
        index: int32 or int64 [n] on the device, in [0, sum of s); not checked, as that would make the host wait.
        out: contiguous [n, ...].
    """
    if out.numel() == 0:
        return
    if has_kernel() and out.device.type == "cuda":
        run_kernel(tensors, index, out)
        return
    words, out = _words_of(tensors, out)
    begin = 0
    for rows in words:
        row = index.long() - begin
        begin += rows.size(0)
        if rows.size(0):
            inside = ((row >= 0) & (row < rows.size(0))).unsqueeze(1)
            torch.where(inside, rows.index_select(0, row.clamp(0, rows.size(0) - 1)), out, out=out)


def run_kernel(tensors: Sequence[Tensor], index: Tensor, out: Tensor) -> None:
    """:func:`assemble_rows` by the kernel, also on the CPU under Triton's interpreter (``TRITON_INTERPRET=1``)."""
    from salientpp.store import assembly_kernel

    if len(tensors) > NUM_TENSORS:
        raise ValueError(
            f"the rows of a batch may lie in at most {NUM_TENSORS} tensors, got {len(tensors)}; keep fewer tiers on the device"
        )
    nothing = out[:0]
    words, out = _words_of([*tensors, *[nothing] * (NUM_TENSORS - len(tensors))], out)
    assembly_kernel.launch([rows.view(-1) for rows in words], index, out.view(-1), out.size(1))


def _words_of(tensors: Sequence[Tensor], out: Tensor) -> tuple[list[Tensor], Tensor]:
    """The same memory as integers [rows, words per row], which torch can move whatever the dtype was; ``out`` has rows that are not empty."""
    row_bytes = out.nbytes // out.size(0)
    word = next(size for size in _WORDS if row_bytes % size == 0)

    def as_words(rows: Tensor) -> Tensor:
        if not len(rows):  # views of nothing are refused where they are not aligned
            return torch.empty((0, row_bytes // word), dtype=_WORDS[word], device=rows.device)
        return bytes_of(rows).view(_WORDS[word]).view(len(rows), -1)

    return [as_words(rows) for rows in tensors], as_words(out)
