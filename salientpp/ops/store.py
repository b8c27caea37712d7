"""Operators that find, copy, reduce and encode feature rows.

An operator that writes rows checks all arguments first: if it raises, it has written nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.ops.library import operators


def pack_id_set(ids: Tensor, num_ids: int) -> Tensor:
    """Packs a set of ids for :func:`look_up`, as a bitmap with running counts. ``ids`` are ascending and distinct, int64 [n] in [0, num_ids).

    Returns int64 words, one per 32 ids (none for the empty set): a quarter of a byte for each of the ``num_ids`` ids.
    In :func:`look_up` the slot of an id is its position in ``ids``.
    """
    return operators.pack_id_set(ids, num_ids)


def look_up(
    n_id: Tensor, offsets: Tensor, part_id: int, local_sets: Sequence[Tensor], remote_sets: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Finds the row of every id of a batch: in the first set that has it, else in the local part or at its owner.

    Args:
        n_id: int64 [n], global ids.
        offsets: int64 [K + 1], the partition book: part p owns [offsets[p], offsets[p + 1]).
        part_id: the part that is local.
        local_sets: packed sets of local ids (rows of the part), searched in this order.
        remote_sets: packed sets of global ids of other parts.

    Returns:
        ``position`` and ``slot``, two Python lists with an int64 vector per group, and ``remote_counts`` int64 [K], the
        number of remaining ids of each owner. The groups are: each local set; the rest of the part (slot: local id);
        each remote set; and the remaining ids (slot: global id), grouped by owner. ``position`` indexes ``n_id``; each
        index is in one group. The slot of an id in a set is the number of smaller ids in the set.
    """
    return operators.look_up(n_id, offsets, part_id, local_sets, remote_sets)


def take_hits(
    remote_position: Tensor, remote_id: Tensor, offsets: Tensor, hit_place: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits the remote rows of a batch into those found in a cache and those left to fetch.

    Args:
        remote_position, remote_id: int64 [n], places of the remote rows in the batch, and their global ids.
        offsets: int64 [K + 1], the partition book.
        hit_place: int64 [h], places of the found rows among the n, ascending.

    Returns:
        ``remote_position[hit_place]``; the ``remote_position`` and ``remote_id`` of the rows to fetch, in the given order; and the number of rows to fetch
        from each part, int64 [K].
    """
    return operators.take_hits(remote_position, remote_id, offsets, hit_place)


def find_keys(
    hash: Tensor,
    cells: Tensor,
    first: int,
    shift: int,
    stored: list[Tensor],
    stored_offsets: list[Tensor | None],
    wanted: list[Tensor],
    wanted_offsets: list[Tensor | None],
    num_keys: int,
) -> Tensor:
    """Finds keys among stored keys that ascend by hash. Hashes choose the candidates, and all bytes are compared, so the result is exact.

    Args:
        hash: int64 [n], the bits of the unsigned hashes of the wanted keys.
        cells: int32 or int64 [C + 1]. Keys ``cells[c]`` to ``cells[c + 1]`` are those whose hash minus ``first`` is ``c`` after a shift.
        first: the bits of the hash of the first stored key.
        shift: number of bits by which a hash is shifted to find its cell, in [0, 64).
        stored: columns of the stored keys: uint8 [K, width], or uint8 [B] if the column has offsets.
        stored_offsets: for each column int64 [K + 1] with the begin of each value and the end of the last one; None: all values are ``width`` bytes long.
        wanted, wanted_offsets: the columns of the wanted keys, in the same way. They may have offsets where the stored keys have none.
        num_keys: K.

    Returns:
        int64 [n]: the first stored key that equals each wanted key, or -1.
    """
    return operators.find_keys(hash, cells, first, shift, stored, stored_offsets, wanted, wanted_offsets, num_keys)


def gather_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None = None, parallel: bool = True
) -> None:
    """Copies rows of any dtype and shape: ``out[out_index] = source[source_index]`` along dimension 0.

    Args:
        source: contiguous [S, ...]; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        out: contiguous [O, ...] of the same dtype and row shape, written in place.
        out_index: int64 [n], in [0, O); None means 0, 1, ..., n - 1.
        parallel: share large work among torch's threads; False: the calling thread does it alone.
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
    """Copies rows of several tensors as if they were concatenated: :func:`gather_rows` from ``torch.cat(sources)``, without making it.

    ``sources`` has at least one tensor; all have one dtype and row shape.
    """
    if out.dtype not in KNOWN_DTYPES and all(source.dtype == out.dtype for source in sources):
        sources, out = [_as_bytes(source) for source in sources], _as_bytes(out)
    operators.gather_joined_rows(list(sources), source_index, out, out_index, parallel)


def read_rows(
    file: int,
    offset: int,
    num_rows: int,
    source_index: Tensor,
    out: Tensor,
    out_index: Tensor | None,
    gap: int,
    num_threads: int,
) -> Tensor:
    """Reads rows of a file in blocks, in file order: ``out[out_index] = rows[source_index]``.

    Blocks begin and end at multiples of 4,096 bytes, so the file may be open with ``O_DIRECT``.

    Args:
        file: descriptor of the open file.
        offset: byte at which row 0 begins.
        num_rows: number of rows in the file.
        source_index: int64 [n], ascending, in [0, num_rows); repeats are allowed.
        out: contiguous uint8 [O, W], written in place; W is the number of bytes of a row.
        out_index: int64 [n], in [0, O); None means 0, 1, ..., n - 1.
        gap: pages between two rows are read too if they have at most this number of bytes.
        num_threads: maximum number of threads that read at the same time.

    Returns:
        int64 [3]: the bytes read; the first byte that could not be read, or -1; and the system's error number. The error number is 0 at the end of the file.
        If a byte could not be read, the contents of ``out`` are undefined.
    """
    return operators.read_rows(file, offset, num_rows, source_index, out, out_index, gap, num_threads)


def reduce_rows(
    source: Tensor,
    source_index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    out: Tensor,
    reduction: int,
    parallel: bool = True,
) -> None:
    """Reduces groups of rows: ``out[i]`` is the sum, mean or maximum of the next ``size[i]`` rows of ``source[source_index]``; zeros for size 0.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        size: int64 [m], >= 0; adds up to n.
        weight: [n], factors of the rows, float64 if rows are float64, else float32; or None. A mean still divides by the number of rows.
        out: contiguous [m, ...] of the same dtype and row shape, written in place.
        reduction: 0 sum, 1 mean, 2 maximum (NaN if a value is NaN). 16-bit rows are added up in 32 bits.
        parallel: as in :func:`gather_rows`.
    """
    operators.reduce_rows(source, source_index, size, weight, out, reduction, parallel)


def encode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """Encodes rows: ``out[out_index] = encode(source[source_index])``, see :mod:`salientpp.store.narrow`.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        out: contiguous uint8 [O, W], written in place.
        source_index, out_index: as in :func:`gather_rows`.
        format: index into :data:`salientpp.store.narrow.FORMATS`.
        block: for integer formats, the number of values that share a scale and an offset; 0: a whole row.
    """
    operators.encode_rows(source, source_index, out, out_index, format, block)


def decode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """Decodes rows, the reverse of :func:`encode_rows`: ``out[out_index] = decode(source[source_index])``, from uint8 [S, W] to [O, ...]."""
    operators.decode_rows(source, source_index, out, out_index, format, block)


def round_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """Copies rows with the error of an encoding: ``out[out_index] = decode(encode(source[source_index]))``. Both have one dtype and row size."""
    operators.round_rows(source, source_index, out, out_index, format, block)


#: Dtypes that every libtorch with the stable ABI can pass to a kernel, and that torch can index. Rows of other dtypes are passed as bytes.
KNOWN_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def _as_bytes(rows: Tensor) -> Tensor:
    """Views a tensor of any dtype as uint8 [..., number of bytes of an element], so that a kernel can copy it."""
    return rows.unsqueeze(-1).view(torch.uint8)
