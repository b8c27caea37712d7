"""Assembles a batch's rows on the device: one tensor in the batch's order, from rows in several tensors.

The rows of a batch lie in up to five tensors: rows that the device reads in place, rows that the host packed, and rows that came from other
ranks. A Triton kernel does the work (:mod:`salientpp.store.assembly_kernel`). Encoded rows have a kernel that writes them decoded, in the same pass
(:mod:`salientpp.store.decoding_kernel`). Without Triton, torch operators do it in one pass per tensor, and decode in further passes. Neither makes
the host wait for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.store.narrow import Narrow

#: Maximum number of tensors that hold the rows of a batch.
NUM_TENSORS = 5

#: Types of devices for which Triton compiles. In torch, AMD's GPUs are CUDA devices too.
_COMPILED = {"cuda"}

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernel(device: torch.device) -> bool:
    """True if Triton is installed and compiles for devices of this type."""
    return device.type in _COMPILED and has_triton()


def assemble_rows(tensors: Sequence[Tensor], index: Tensor, out: Tensor) -> None:
    """Copies row ``index[i]`` of the concatenated ``tensors`` to ``out[i]``, on the device's current stream.

    Args:
        tensors: at most five, contiguous [s, ...], with the dtype and row shape of ``out``, on its device or in pinned
            memory (needs Triton). Addresses are multiples of the largest power of two <= 8 that divides a row's bytes.
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


def decode_rows(narrow: Narrow, tensors: Sequence[Tensor], index: Tensor | None) -> Tensor:
    """Selects the rows ``index`` of the concatenated tensors, and decodes them, on the device's current stream.

    Args:
        narrow: encoding of the rows.
        tensors: one to five tensors of encoded rows, contiguous [s, ...] with W bytes per row, on the device or in pinned host memory (pinned memory needs
            Triton). Their addresses are multiples of 4.
        index: int32 or int64 [n] on the device, in [0, sum of s), not checked. None: all rows of the only tensor, which lies on the device, in order.

    Returns:
        Contiguous [n, ...] in the dtype and row shape of ``narrow``, bit for bit as the CPU decodes.
    """
    tensors = [bytes_of(rows).view(len(rows), narrow.row_bytes) for rows in tensors]
    like = tensors[0] if index is None else index
    if has_kernel(like.device):
        out = like.new_empty((len(like), *narrow.row_shape), dtype=narrow.dtype)
        run_decoding_kernel(narrow, tensors, index, out)
        return out
    if index is None:
        return narrow.decode_by_torch(tensors[0])
    encoded = like.new_empty((len(like), narrow.row_bytes), dtype=torch.uint8)
    assemble_rows(tensors, index, encoded)
    return narrow.decode_by_torch(encoded)


def run_kernel(tensors: Sequence[Tensor], index: Tensor, out: Tensor) -> None:
    """Runs :func:`assemble_rows` with the kernel. It also works on the CPU, under Triton's interpreter (``TRITON_INTERPRET=1``)."""
    from salientpp.store import assembly_kernel

    words, out = _words_of(_five(tensors, out[:0]), out)
    assembly_kernel.launch([rows.view(-1) for rows in words], index, out.view(-1), out.size(1))


def run_decoding_kernel(narrow: Narrow, tensors: Sequence[Tensor], index: Tensor | None, out: Tensor) -> None:
    """Runs :func:`decode_rows` with the kernel and writes to ``out``. It also works under Triton's interpreter, as :func:`run_kernel` does."""
    from salientpp.store import decoding_kernel

    if out.numel():
        decoding_kernel.launch(narrow, _five(tensors, tensors[0][:0]), index, out)


def _five(tensors: Sequence[Tensor], nothing: Tensor) -> list[Tensor]:
    """Returns exactly five tensors, as the kernels need: the given ones, then the empty tensor ``nothing``."""
    if len(tensors) > NUM_TENSORS:
        raise ValueError(
            f"the rows of a batch may lie in at most {NUM_TENSORS} tensors, got {len(tensors)}; keep fewer tiers on the device"
        )
    return [*tensors, *[nothing] * (NUM_TENSORS - len(tensors))]


def _words_of(tensors: Sequence[Tensor], out: Tensor) -> tuple[list[Tensor], Tensor]:
    """Views ``tensors`` and ``out`` as integers [rows, words per row], so that the kernel can ignore their dtype."""
    row_bytes = out.nbytes // out.size(0)
    word = next(size for size in _WORDS if row_bytes % size == 0)

    def as_words(rows: Tensor) -> Tensor:
        if not len(rows):  # torch refuses to view an empty tensor that is not aligned
            return torch.empty((0, row_bytes // word), dtype=_WORDS[word], device=rows.device)
        return bytes_of(rows).view(_WORDS[word]).view(len(rows), -1)

    return [as_words(rows) for rows in tensors], as_words(out)
