"""The Triton kernel that gathers a batch's rows from up to five tensors. Only code that runs it imports this module, because it needs Triton.

One program moves a block of rows, word by word. The row's index tells which source holds it. Masked loads read nothing from the
other sources. Adjacent 8-byte words are moved as 16 bytes where the row size allows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

#: Number of words that one program moves. A word has 1, 2, 4 or 8 bytes.
_BLOCK = 1024
#: Maximum number of words of one row that a program moves at once.
_WIDEST = 128


# Sizes change with every batch. If the kernel were specialised on them, Triton would compile it again and again.
@triton.jit(do_not_specialize=["end_0", "end_1", "end_2", "end_3", "num_rows"])
def _assemble(  # type: ignore[no-untyped-def]  # Triton reads the signature
    out, index, source_0, source_1, source_2, source_3, source_4, end_0, end_1, end_2, end_3, num_rows,
    WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    # Cast to int64 before the multiplication: sources may have more than 2^31 words.
    at = tl.load(index + row, mask=inside, other=0).to(tl.int64)
    for begin in range(0, WORDS, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        wanted = inside[:, None] & (column < WORDS)
        value = tl.load(source_0 + at[:, None] * WORDS + column, mask=wanted & (at < end_0)[:, None], other=0)
        for_1 = (at >= end_0) & (at < end_1)
        value = tl.load(source_1 + (at - end_0)[:, None] * WORDS + column, mask=wanted & for_1[:, None], other=value)
        for_2 = (at >= end_1) & (at < end_2)
        value = tl.load(source_2 + (at - end_1)[:, None] * WORDS + column, mask=wanted & for_2[:, None], other=value)
        for_3 = (at >= end_2) & (at < end_3)
        value = tl.load(source_3 + (at - end_2)[:, None] * WORDS + column, mask=wanted & for_3[:, None], other=value)
        for_4 = at >= end_3
        value = tl.load(source_4 + (at - end_3)[:, None] * WORDS + column, mask=wanted & for_4[:, None], other=value)
        tl.store(out + row[:, None] * WORDS + column, value, mask=wanted)


def launch(sources: Sequence[Tensor], index: Tensor, out: Tensor, words: int) -> None:
    """Copies row ``index[i]`` of the concatenated sources to row i of ``out``, on the current stream.

    Args:
        sources: five tensors of whole words, [s * words].
        index: int32 or int64 [n].
        out: [n * words].
        words: number of words of a row.
    """
    ends, end = [], 0
    for rows in sources[:-1]:
        end += rows.numel() // words
        ends.append(end)
    columns = min(triton.next_power_of_2(words), _WIDEST)
    rows = _BLOCK // columns
    # An empty source is never read, but the kernel still needs a valid pointer.
    pointers = [rows_of if rows_of.numel() else out for rows_of in sources]
    _assemble[(triton.cdiv(index.numel(), rows),)](
        out, index, *pointers, *ends, index.numel(), WORDS=words, ROWS=rows, COLUMNS=columns
    )  # fmt: skip
