"""The Triton kernel that assembles encoded rows and writes them decoded, in one pass. Only code that runs it imports this module, because it needs Triton.

One program decodes a block of rows. Each row's index selects the address of the row in one of the sources. The program reads the scale (and the offset) of
the row and its codes, and writes the values to the output. :mod:`salientpp.store.narrow` defines the formats. The arithmetic follows
``csrc/store/narrow_rows.cpp`` step by step, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.store.narrow import Narrow, read_format

#: Number of values that one program writes.
_BLOCK = 2048
#: Maximum number of values of one row that a program writes at once.
_WIDEST = 256
#: Minimum of that number, since a program unpacks eight 4-bit codes at once.
_NARROWEST = 8
#: Options of the compiler. A fused product and sum rounds once instead of twice, which gives other bits than the CPU's.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _round_to_bfloat16(bits):  # type: ignore[no-untyped-def]
    """Rounds 32-bit floats, given as uint32, to bfloat16, given as uint16: to the nearest, ties to even. A NaN becomes 0x7FC0."""
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(tl.uint16)


@triton.jit
def _repeat(x, times: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns x [R, C] as [R, C * times]: each column is followed by its copies."""
    repeated = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], times])
    return tl.reshape(repeated, [x.shape[0], x.shape[1] * times])


# Sizes change with every batch. If the kernel were specialised on them, Triton would compile it again and again.
@triton.jit(do_not_specialize=["end_0", "end_1", "end_2", "end_3", "num_rows"])
def _decode(  # type: ignore[no-untyped-def]  # Triton reads the signature
    out, index, source_0, source_1, source_2, source_3, source_4, end_0, end_1, end_2, end_3, num_rows,
    FORMAT: tl.constexpr, VALUES: tl.constexpr, ROW_BYTES: tl.constexpr, HEADER_BYTES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    # Cast to int64 before the multiplication: sources may have more than 2^31 bytes.
    at = row if index is None else tl.load(index + row, mask=inside, other=0).to(tl.int64)
    start = tl.where(at < end_0, source_0 + at * ROW_BYTES, source_1 + (at - end_0) * ROW_BYTES)
    start = tl.where(at < end_1, start, source_2 + (at - end_1) * ROW_BYTES)
    start = tl.where(at < end_2, start, source_3 + (at - end_2) * ROW_BYTES)
    start = tl.where(at < end_3, start, source_4 + (at - end_3) * ROW_BYTES)
    if BLOCK == 0 and HEADER_BYTES > 0:
        scale = tl.load(start.to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)[:, None]
        offset = tl.load(start.to(tl.pointer_type(tl.float32)) + 1, mask=inside, other=0.0)[:, None]
    # The compiler does not see through tl.where. Without its knowledge of the alignment, it would read one code at a time.
    start, inside = tl.multiple_of(start[:, None], [ALIGNMENT, ALIGNMENT]), inside[:, None]
    numbers, codes = start.to(tl.pointer_type(tl.float32)), start + HEADER_BYTES
    for begin in range(0, VALUES, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        wanted = inside & (column < VALUES)
        if BLOCK > 0:
            # A group of columns lies in one block.
            first = begin + GROUP * tl.arange(0, COLUMNS // GROUP)[None, :]
            step, there = numbers + 2 * (first // BLOCK), inside & (first < VALUES)
            scale = _repeat(tl.load(step, mask=there, other=0.0), GROUP)
            offset = _repeat(tl.load(step + 1, mask=there, other=0.0), GROUP)
        if FORMAT == "fp16":
            value = tl.load(codes.to(tl.pointer_type(tl.float16)) + column, mask=wanted, other=0.0).to(tl.float32)
        elif FORMAT == "bf16":
            code = tl.load(codes.to(tl.pointer_type(tl.uint16)) + column, mask=wanted, other=0)
            value = (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        elif FORMAT == "int8":
            value = tl.load(codes + column, mask=wanted, other=0).to(tl.float32) * scale + offset
        else:
            word = begin // 8 + tl.arange(0, COLUMNS // 8)[None, :]
            eight = tl.load(codes.to(tl.pointer_type(tl.uint32)) + word, mask=inside & (word * 8 < VALUES), other=0)
            code = _repeat(eight, 8) >> (column % 8 * 4) & 15
            value = code.to(tl.float32) * scale + offset
        place = out + row[:, None] * VALUES + column
        if out.dtype.element_ty == tl.uint16:
            tl.store(place, _round_to_bfloat16(value.to(tl.uint32, bitcast=True)), mask=wanted)
        else:
            tl.store(place, value.to(out.dtype.element_ty), mask=wanted)


def launch(narrow: Narrow, sources: Sequence[Tensor], index: Tensor | None, out: Tensor) -> None:
    """Writes decoded rows to ``out`` on the current stream.

    Args:
        narrow: encoding of the rows.
        sources: five tensors of encoded rows, uint8 [s, W]. Their addresses are multiples of 4.
        index: int32 or int64 [n], row numbers of the concatenated sources. None: 0, 1, ..., n - 1.
        out: contiguous [n, ...] with at least one value, in the dtype and row shape of ``narrow``.
    """
    ends, end = [], 0
    for rows in sources[:-1]:
        end += len(rows)
        ends.append(end)
    # An empty source is never read, but the kernel still needs a valid pointer.
    pointers = [rows if len(rows) else bytes_of(out) for rows in sources]
    alignment = math.gcd(16, narrow.row_bytes, *(rows.data_ptr() for rows in sources if len(rows)))
    constants = constants_of(narrow, alignment)
    values = out.view(torch.uint16) if out.dtype == torch.bfloat16 else out
    grid = (triton.cdiv(len(out), constants["ROWS"]),)
    _decode[grid](values, index, *pointers, *ends, len(out), **constants, **OPTIONS)


def constants_of(narrow: Narrow, alignment: int) -> dict[str, Any]:
    """Returns the kernel's constants for a format. The address of each encoded row is a multiple of ``alignment``, a power of two."""
    kind, block = read_format(narrow.format)
    columns = min(max(triton.next_power_of_2(narrow.columns), _NARROWEST), _WIDEST)
    return {
        "FORMAT": kind,
        "VALUES": narrow.columns,
        "ROW_BYTES": narrow.row_bytes,
        "HEADER_BYTES": narrow.header_bytes,
        "BLOCK": block,
        "GROUP": math.gcd(block, columns),
        "ALIGNMENT": alignment,
        "ROWS": _BLOCK // columns,
        "COLUMNS": columns,
    }
