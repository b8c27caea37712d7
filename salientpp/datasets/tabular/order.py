"""Gives the order of rows by any of their columns, as words of 64 bits that compare like the values.

Columns are compared one after the other. Nulls come last. Floating-point numbers have a total order, with -0 before 0 and NaN at the end. Texts and
binary values compare by bytes. Lists of numbers compare by their entries, one after the other; values of other nested types compare by their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_SIGN = np.uint64(1 << 63)

#: Entries of lists that are packed at a time.
_ENTRIES = 2**16

#: Bytes of a binary value in one word. The low byte of a word has their number, or one more if further bytes follow.
_BYTES_OF_A_WORD = 7
CONTINUES = _BYTES_OF_A_WORD + 1


def order_columns(column: pa.Array) -> list[pa.Array]:
    """Returns columns [n] of type uint64 or large_binary that sort rows as ``column`` does, one after the other, with nulls last."""
    import pyarrow as pa
    from pyarrow import types

    type_ = column.type
    if types.is_null(type_):
        return []
    if types.is_large_string(type_) or types.is_large_binary(type_):
        return [column.cast(pa.large_binary())]
    if types.is_fixed_size_binary(type_):
        return [column.cast(pa.binary()).cast(pa.large_binary())]
    if types.is_fixed_size_list(type_):
        return _list_columns(column)
    if types.is_boolean(type_):
        return [column.cast(pa.uint64())]
    if types.is_decimal128(type_):
        halves = _numbers(column, "<u8", 2).reshape(-1, 2)
        return [_words(halves[:, 1] ^ _SIGN, column), _words(halves[:, 0], column)]
    if types.is_floating(type_):
        return [_words(_float_words(_numbers(column, f"<u{type_.bit_width // 8}")), column)]
    if types.is_unsigned_integer(type_):
        return [column.cast(pa.uint64())]
    if types.is_integer(type_) or (types.is_temporal(type_) and type_.bit_width <= 64):
        values = _numbers(column, f"<i{type_.bit_width // 8}").astype(np.int64)
        return [_words(values.view(np.uint64) ^ _SIGN, column)]
    if types.is_large_list(type_) and (packed := _packed_lists(column)) is not None:
        return [packed]
    texts = [None if value is None else repr(value).encode() for value in column.to_pylist()]
    return [pa.array(texts, pa.large_binary())]


def _numbers(column: Any, dtype: str, per_value: int = 1) -> np.ndarray:
    """Returns the numbers of a column of a fixed width. A null has any number."""
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.zeros(len(column) * per_value, dtype=dtype)
    begin = column.offset * per_value
    return np.frombuffer(data, dtype=dtype)[begin : begin + len(column) * per_value]


def _words(words: np.ndarray, column: Any) -> Any:
    import pyarrow as pa

    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(words, pa.uint64(), mask=nulls)


def _float_words(bits: np.ndarray) -> np.ndarray:
    """Returns words uint64 that ascend with floating-point numbers, which are given as their bits."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign).astype(np.uint64)


def _list_columns(column: Any) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    size, count = column.type.list_size, len(column)
    values = column.values.slice(column.offset * size, count * size)
    valid = column.is_valid()
    columns = [pc.invert(valid).cast(pa.uint64())]
    for entry in range(size):
        entries = values.take(pa.array(np.arange(entry, count * size, size, dtype=np.int64)))
        columns += [pc.if_else(valid, part, pa.scalar(None, part.type)) for part in order_columns(entries)]
    return columns


def _packed_lists(column: Any) -> Any | None:
    """Returns lists of numbers as binary values that compare like the lists: the null flag and the word of each entry. None if entries are no numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    type_ = column.type.value_type
    if not pa.types.is_primitive(type_):
        return None
    word = np.dtype(f">u{max(8, type_.bit_width) // 8}")
    is_signed = pa.types.is_signed_integer(type_) or pa.types.is_temporal(type_)
    least = np.uint64((1 << 63) - (1 << (8 * word.itemsize - 1)) if is_signed else 0)  # word of the smallest value
    width = 1 + word.itemsize
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    ends = np.concatenate([[0], lengths.cumsum()])
    buffer = pa.allocate_buffer(width * int(ends[-1]))
    packed = np.frombuffer(buffer, dtype=np.uint8).reshape(-1, width)
    rows = max(
        1, _ENTRIES * len(column) // max(1, len(packed))
    )  # at a time, because words take more memory than entries
    for begin in range(0, len(column), rows):
        entries = column.slice(begin, rows).flatten()
        parts = order_columns(entries)
        if len(parts) != 1 or not pa.types.is_uint64(parts[0].type):
            return None
        some = packed[ends[begin] :][: len(entries)]
        some[:, 0] = entries.is_null().to_numpy(zero_copy_only=False)
        some[:, 1:] = (parts[0].fill_null(least).to_numpy() - least).astype(word)[:, None].view(np.uint8)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    valid = pa.py_buffer(np.packbits(~nulls, bitorder="little")) if nulls.any() else None
    buffers = [valid, pa.py_buffer(ends * width), buffer]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(column), buffers)


def word_at(column: pa.Array, step: int) -> np.ndarray:
    """Returns word number ``step`` of each row of one of :func:`order_columns`, uint64 [n].

    Word 0 is 1 for nulls, else 0. A number has its value as word 1. A binary value has words for each 7 bytes; its last word has a low byte below
    :data:`CONTINUES`. Where a row has no such word, it is 0.
    """
    import pyarrow as pa

    if step == 0:
        return column.is_null().to_numpy(zero_copy_only=False).astype(np.uint64)
    if pa.types.is_uint64(column.type):
        return column.fill_null(0).to_numpy()
    column = column.fill_null(b"")
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, dtype="<i8")[column.offset : column.offset + len(column) + 1]
    position = ends[:-1] + (step - 1) * _BYTES_OF_A_WORD
    left = np.clip(ends[1:] - position, 0, CONTINUES)
    bytes_ = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(1, dtype=np.uint8)
    words = left.astype(np.uint64)
    for number in range(_BYTES_OF_A_WORD):
        byte = np.where(left > number, bytes_[np.minimum(position + number, len(bytes_) - 1)], 0)
        words |= byte.astype(np.uint64) << np.uint64(8 * (_BYTES_OF_A_WORD - number))
    return words


def sorted_positions(leading: Sequence[np.ndarray], rest: Sequence[pa.Array]) -> np.ndarray:
    """Returns the positions of rows in ascending order, int64 [n].

    Args:
        leading: one or two columns of non-negative integers [n] that decide first.
        rest: columns [n] that decide between rows with equal leading columns.
    """
    if not len(leading[0]):
        return np.empty(0, dtype=np.int64)
    words = [column.view(np.uint64) for column in leading]
    packed = _packed(words)
    if packed is None:
        order = np.lexsort(words[::-1])
        same = np.ones(len(order) - 1, dtype=bool)
        for word in words:
            same &= word[order[1:]] == word[order[:-1]]
    else:
        order = np.argsort(packed)
        in_order = packed[order]
        same = in_order[1:] == in_order[:-1]
    if rest and same.any():
        _break_ties(order, same, rest)
    return order


def _packed(words: Sequence[np.ndarray]) -> np.ndarray | None:
    """Returns one word that compares like two, or None if they have too many bits."""
    if len(words) == 1:
        return words[0]
    least, most = int(words[0].min()), int(words[0].max())
    bits = int(words[1].max()).bit_length()
    if (most - least).bit_length() + bits > 64:
        return None
    packed = words[0] - np.uint64(least)
    packed <<= np.uint64(bits)
    packed |= words[1]
    return packed


def _break_ties(order: np.ndarray, same: np.ndarray, rest: Sequence[Any]) -> None:
    """Sorts neighbours in ``order`` by ``rest``, in place. ``same`` [n - 1] says whether a row and the next one are tied."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_tied = np.zeros(len(order), dtype=bool)
    is_tied[1:] |= same
    is_tied[:-1] |= same
    at = np.flatnonzero(is_tied)
    group = np.cumsum(~np.concatenate([[False], same])[at])
    rows = pa.array(order[at])
    parts = [part for column in rest for part in order_columns(column.take(rows))]
    if not parts:
        return
    names = [str(number) for number in range(len(parts) + 1)]
    table = pa.table([pa.array(group), *parts], names=names)
    by = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in names])
    order[at] = order[at][by.to_numpy()]
