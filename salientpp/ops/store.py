"""Operators that say where feature rows are, and that copy, reduce and encode rows.

Those that write rows check everything first: where they raise, nothing was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.ops.library import operators


def pack_id_set(ids: Tensor, num_ids: int) -> Tensor:
    """Pack ascending, distinct ``ids`` int64 [n] of [0, num_ids) into a bitmap with ranks.

    Returns int64 words, one per 32 ids (none for the empty set): a quarter of a byte per id of the universe.
    In :func:`look_up` the slot of a member is its position in ``ids``.
    """
    return operators.pack_id_set(ids, num_ids)


def look_up(
    n_id: Tensor, offsets: Tensor, part_id: int, local_sets: Sequence[Tensor], remote_sets: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Say for every id of a batch where its row is: in the first set that has it, else in the part or at its owner.

    Args:
        n_id: int64 [n], global ids.
        offsets: int64 [K + 1], the partition book: part p owns [offsets[p], offsets[p + 1]).
        part_id: the part that is local.
        local_sets: packed sets of local ids (rows of the part), looked through in this order.
        remote_sets: packed sets of global ids, for ids of other parts.

    Returns:
        ``position`` and ``slot``, two lists of int64 vectors, and ``remote_counts`` int64 [K]. Their entries are one group for each local
        set, the rest of the part (slot: local id), one group for each remote set, and what is left (slot: global id), grouped by owner.
        Positions are places in ``n_id``; together the groups hold each place once. The slot of an id in a set is how many members are smaller.
    """
    return operators.look_up(n_id, offsets, part_id, local_sets, remote_sets)


def take_hits(
    remote_position: Tensor, remote_id: Tensor, offsets: Tensor, hit_place: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left to fetch of a batch's remote rows, where some of them are found in a cache.

    Args:
        remote_position, remote_id: int64 [n], places in the batch, and global ids.
        offsets: int64 [K + 1], the partition book.
        hit_place: int64 [h], which of the n are found, ascending.

    Returns:
        ``remote_position[hit_place]``; of the others, in their order, ``remote_position`` and ``remote_id``; and int64 [K], how many of these each part owns.
    """
    return operators.take_hits(remote_position, remote_id, offsets, hit_place)


def gather_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None = None, parallel: bool = True
) -> None:
    """``out[out_index] = source[source_index]`` along dimension 0, for rows of any dtype and shape.

    Args:
        source: contiguous [S, ...]; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        out: contiguous [O, ...] of the same dtype and row shape, written in place.
        out_index: int64 [n], in [0, O); None means 0, 1, ..., n - 1.
        parallel: torch's threads share large work; False: the thread that calls does it.
    """
    if source.dtype not in KNOWN_DTYPES and source.dtype == out.dtype:
        source, out = _as_bytes(source), _as_bytes(out)
    operators.gather_rows(source, source_index, out, out_index, parallel)


def gather_joined_rows(
    sources: Sequence[Tensor],
    source_index: Tensor,
    out: Tensor,
    out_index: Tensor | None = None,
    parallel: bool = True,
) -> None:
    """:func:`gather_rows` of ``torch.cat(sources)``, which is not made: at least one tensor, of one dtype and row shape."""
    if out.dtype not in KNOWN_DTYPES and all(source.dtype == out.dtype for source in sources):
        sources, out = [_as_bytes(source) for source in sources], _as_bytes(out)
    operators.gather_joined_rows(list(sources), source_index, out, out_index, parallel)


def reduce_rows(
    source: Tensor,
    source_index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    out: Tensor,
    reduction: int,
    parallel: bool = True,
) -> None:
    """``out[i]`` = the sum, mean or maximum of ``size[i]`` of the rows ``source[source_index]``, which follow one another; zeros of none.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        size: int64 [m], >= 0; adds up to n.
        weight: [n], by which rows are multiplied first; a mean is still over their number. float64 if rows are, else float32. None: not at all.
        out: contiguous [m, ...] of the same dtype and row shape, written in place.
        reduction: 0 the sum, 1 the mean, 2 the maximum, of which a NaN is one. Rows of 16 bits are added up in 32.
        parallel: as in :func:`gather_rows`.
    """
    operators.reduce_rows(source, source_index, size, weight, out, reduction, parallel)


def encode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = encode(source[source_index])``, see :mod:`salientpp.store.narrow`.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        out: contiguous uint8 [O, W], written in place.
        source_index, out_index: as in :func:`gather_rows`.
        format: the place in :data:`salientpp.store.narrow.FORMATS`.
        block: of integers, how many values share a scale and an offset; 0: all of a row.
    """
    operators.encode_rows(source, source_index, out, out_index, format, block)


def decode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = decode(source[source_index])``: the reverse of :func:`encode_rows`, from uint8 [S, W] to [O, ...]."""
    operators.decode_rows(source, source_index, out, out_index, format, block)


def round_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = decode(encode(source[source_index]))``, of one dtype and row size, in one pass."""
    operators.round_rows(source, source_index, out, out_index, format, block)


#: What every libtorch of the stable ABI can pass to a kernel, and all that torch indexes; others are passed as bytes.
KNOWN_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8 [..., bytes of an entry]."""
    return rows.unsqueeze(-1).view(torch.uint8)
