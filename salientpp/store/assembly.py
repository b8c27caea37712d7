"""Assembles a batch's rows on the device: one tensor in the batch's order, from rows in several tensors.

The rows of a batch lie in up to five tensors: the tiers that the device reads in place, the packed rows, and the rows that arrived from other
ranks. A Triton kernel does the work (:mod:`salientpp.store.assembly_kernel`). Without Triton, torch operators do it in one pass per tensor.
Neither makes the host wait for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from salientpp.ops import bytes_of

#: Maximum number of tensors that hold the rows of a batch.
NUM_TENSORS = 5

#: Types of devices for which Triton compiles. In torch, AMD's GPUs are CUDA devices too.
_COMPILED = {"cuda"}

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@cache
def has_kernel(device: torch.device) -> bool:
    """True if Triton is installed and compiles for devices of this type."""
    return device.type in _COMPILED and importlib.util.find_spec("triton") is not None


def assemble_rows(tensors: Sequence[Tensor], index: Tensor, out: Tensor) -> None:
    """Writes ``out[i]`` = row ``index[i]`` of the concatenated tensors, on the device's current stream.

    Args:
        tensors: at most five, contiguous [s, ...], with the dtype and row shape of ``out``. They lie on its device, or in pinned host memory (pinned
            memory needs Triton). Their addresses are multiples of the largest power of two, up to 8, that divides the bytes of a row.
        index: int32 or int64 [n] on the device, in [0, sum of s). The range is not checked: a check would make the host wait.
        out: contiguous [n, ...].
    """
    if out.numel() == 0:
        return
    if has_kernel(out.device):
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
    """Runs :func:`assemble_rows` with the kernel. It also works on the CPU, under Triton's interpreter (``TRITON_INTERPRET=1``)."""
    from salientpp.store import assembly_kernel

    if len(tensors) > NUM_TENSORS:
        raise ValueError(
            f"the rows of a batch may lie in at most {NUM_TENSORS} tensors, got {len(tensors)}; keep fewer tiers on the device"
        )
    nothing = out[:0]
    words, out = _words_of([*tensors, *[nothing] * (NUM_TENSORS - len(tensors))], out)
    assembly_kernel.launch([rows.view(-1) for rows in words], index, out.view(-1), out.size(1))


def _words_of(tensors: Sequence[Tensor], out: Tensor) -> tuple[list[Tensor], Tensor]:
    """Views the same memory as integers [rows, words per row], so that rows of every dtype can be moved. Rows of ``out`` must not be empty."""
    row_bytes = out.nbytes // out.size(0)
    word = next(size for size in _WORDS if row_bytes % size == 0)

    def as_words(rows: Tensor) -> Tensor:
        if not len(rows):  # torch refuses to view an empty tensor that is not aligned
            return torch.empty((0, row_bytes // word), dtype=_WORDS[word], device=rows.device)
        return bytes_of(rows).view(_WORDS[word]).view(len(rows), -1)

    return [as_words(rows) for rows in tensors], as_words(out)
