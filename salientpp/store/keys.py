"""Gives keys of table rows a common form and a hash, so that keys of any tables can be compared.

A key is one or more Arrow columns. Its **canonical** columns have one of these types:

* int64 for integers, except that unsigned integers of 64 bits stay uint64
* large_string, large_binary, or fixed_size_binary, which is also the type of UUIDs
* decimal128(38, scale)
* date32, and timestamps in microseconds, without a zone or in UTC

:func:`adapt_keys` converts canonical columns to the types of another table by value. :func:`key_hash` then gives equal keys equal hashes. Hashes are stored,
so the function never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from salientpp.files import first_line

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are hashed at a time, so that their arrays stay in the processor's cache.
_ROWS = 2**15

_START = np.uint64(0x243F6A8885A308D3)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINAL = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

#: Types of texts and bytes whose values pyarrow cannot take by number -> types of the same values. Categories of polars have them.
_TAKEN_AS = {"string_view": "large_string", "binary_view": "large_binary"}

_ALLOWED = "integers, strings, binary values, UUIDs, decimals, dates and timestamps"


# --- types ------------------------------------------------------------------------------------------------


def canonical_keys(columns: Sequence[pa.Array], what: str) -> list[pa.Array]:
    """Returns the columns of a key with their canonical types. Nulls stay.

    Args:
        columns: arrays [n], as they are in a table.
        what: begins the text of an error, such as ``nodes.customer``.

    Raises:
        ValueError: a column cannot be a key, for example because it holds floats, or a timestamp has a fraction of a microsecond.
    """
    return [_canonical(column, what) for column in columns]


def _canonical(column: Any, what: str) -> Any:
    import pyarrow as pa

    type_ = canonical_type(column.type, what)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    column = decoded(column)
    if column.type == type_:
        return column
    try:
        return column.cast(type_)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{what}: a key of type {column.type} cannot be stored as {type_} ({first_line(error)}); cast the column to a string"
        ) from None


def canonical_type(type_: pa.DataType, what: str) -> pa.DataType:
    """Returns the type of :func:`canonical_keys`'s result for a column of type ``type_``. Raises ValueError if such a column cannot be a key."""
    type_ = decoded_type(type_)
    canonical = _canonical_type(type_)
    if canonical is None:
        raise ValueError(f"{what}: a key must hold {_ALLOWED}, got {type_}; cast the column to a string or an integer")
    return canonical


def _canonical_type(type_: Any) -> Any | None:
    import pyarrow as pa
    from pyarrow import types

    if types.is_uint64(type_) or types.is_null(type_) or types.is_fixed_size_binary(type_):
        return type_
    if types.is_integer(type_):
        return pa.int64()
    if types.is_date(type_):
        return pa.date32()
    if types.is_timestamp(type_):
        return pa.timestamp("us", None if type_.tz is None else "UTC")
    if types.is_decimal(type_):
        return pa.decimal128(38, type_.scale) if 0 <= type_.scale <= 38 else None
    if types.is_string(type_) or types.is_large_string(type_) or type_ == getattr(pa, "string_view", pa.null)():
        return pa.large_string()
    if types.is_binary(type_) or types.is_large_binary(type_) or type_ == getattr(pa, "binary_view", pa.null)():
        return pa.large_binary()
    return None


def decoded(column: pa.Array) -> pa.Array:
    """Returns an array without extensions, run lengths and dictionaries."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if hasattr(pa, "RunEndEncodedArray") and isinstance(column, pa.RunEndEncodedArray):
        column = pc.run_end_decode(column)
    if not pa.types.is_dictionary(column.type):
        return column
    type_ = column.type.value_type
    if str(type_) not in _TAKEN_AS:
        return column.dictionary_decode()
    values = column.dictionary.cast(pa.type_for_alias(_TAKEN_AS[str(type_)]))
    return pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode().cast(type_)


def decoded_type(type_: pa.DataType) -> pa.DataType:
    """Returns the type of :func:`decoded`'s result for an array of type ``type_``."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(type_, pa.BaseExtensionType):
        return decoded_type(type_.storage_type)
    if types.is_dictionary(type_) or (hasattr(types, "is_run_end_encoded") and types.is_run_end_encoded(type_)):
        return decoded_type(type_.value_type)
    return type_


def adapt_keys(
    columns: Sequence[pa.Array], types: Sequence[pa.DataType], what: str
) -> tuple[list[pa.Array], np.ndarray | None]:
    """Converts canonical columns to the canonical types of another table, by value.

    Args:
        columns: arrays [n] from :func:`canonical_keys`.
        types: type of each column in the other table.
        what: begins the text of an error.

    Returns:
        The columns, and a bool mask [n] that is True for keys which the types cannot hold, or None if there are none. No key of the other table equals
        these; they are null in the columns.

    Raises:
        ValueError: the tables have keys of different kinds, for example strings and integers, or of different numbers of columns.
    """
    if len(columns) != len(types):
        raise ValueError(
            f"{what}: a key must have {len(types)} columns, got {len(columns)}; name them in the same order"
        )
    adapted, unlike = [], None
    for column, type_ in zip(columns, types):
        if column.type != type_:
            column, wrong = _adapted(column, type_, what)
            if wrong is not None:
                unlike = wrong if unlike is None else unlike | wrong
        adapted.append(column)
    return adapted, unlike


def _adapted(column: Any, type_: Any, what: str) -> tuple[Any, np.ndarray | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_null(column.type):  # all rows are null
        return pa.nulls(len(column), type_), None
    if pa.types.is_null(type_):  # the other table has no keys
        return pa.nulls(len(column), type_), column.is_valid().to_numpy(zero_copy_only=False)
    if not all(pa.types.is_integer(of) or pa.types.is_decimal(of) for of in (column.type, type_)):
        raise ValueError(
            f"{what}: keys that refer to each other must have the same type, got {column.type} here and {type_} in the table of the vertices; cast one of them"
        )
    try:
        return column.cast(type_), None
    except pa.ArrowInvalid:
        pass
    # Some values do not fit. As decimals of 76 digits, all values can be compared.
    scales = [of.scale if pa.types.is_decimal(of) else 0 for of in (column.type, type_)]
    wide = column.cast(pa.decimal256(76, max(scales)))
    cut = wide.cast(pa.decimal256(76, scales[1]), safe=False)
    least, most = (pa.scalar(bound).cast(cut.type) for bound in _bounds(type_))
    fits = pc.and_(pc.equal(cut.cast(wide.type), wide), pc.and_(pc.greater_equal(cut, least), pc.less_equal(cut, most)))
    kept = pc.if_else(fits, cut, pa.scalar(None, cut.type)).cast(type_)
    return kept, pc.fill_null(pc.invert(fits), False).to_numpy(zero_copy_only=False)


def _bounds(type_: Any) -> tuple[Any, Any]:
    """Returns the smallest and the largest value of an integer or decimal type, as decimals."""
    from decimal import Decimal

    import pyarrow as pa

    if pa.types.is_uint64(type_):
        return Decimal(0), Decimal(2**64 - 1)
    if pa.types.is_integer(type_):
        return Decimal(-(2**63)), Decimal(2**63 - 1)
    most = Decimal((0, (9,) * 38, -type_.scale))
    return most.copy_negate(), most


# --- hash -------------------------------------------------------------------------------------------------


def key_hash(columns: Sequence[pa.Array]) -> np.ndarray:
    """Returns the hash of each key, uint64 [n].

    The words of 8 bytes of a value are added and multiplied in one after the other, then its number of bytes. SplitMix64's last step mixes the bits.
    Integers of any type have their value modulo 2^64 as their only word.

    Args:
        columns: canonical arrays [n] without nulls. Nulls get an undefined hash.
    """
    num_rows = len(columns[0])
    hashes = np.full(num_rows, _START, dtype=np.uint64)
    for begin in range(0, num_rows, _ROWS):
        part = hashes[begin : begin + _ROWS]
        for column in columns:
            _absorb_column(part, column.slice(begin, len(part)))
            _mix(part)
    return hashes


def value_bytes(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the values of a canonical column [n] as bytes.

    Returns:
        uint8 [n, width] and None. For texts and binary values: uint8 [B], and int64 [n + 1] with the begin of each value and the end of the last one.
    """
    import pyarrow as pa

    type_ = column.type
    if pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, dtype="<i8")[column.offset : column.offset + len(column) + 1]
        return np.frombuffer(data or b"", dtype=np.uint8), ends
    width = type_.bit_width // 8
    data = np.frombuffer(column.buffers()[1] or b"", dtype=np.uint8)
    return data[column.offset * width : (column.offset + len(column)) * width].reshape(len(column), width), None


def _absorb_column(hashes: np.ndarray, column: Any) -> None:
    import pyarrow as pa

    type_ = column.type
    if pa.types.is_null(type_):
        return
    data, ends = value_bytes(column)
    if ends is not None:
        _absorb_bytes(hashes, ends, data)
    elif pa.types.is_fixed_size_binary(type_) or pa.types.is_decimal(type_):
        _absorb_bytes(hashes, np.arange(len(column) + 1, dtype=np.int64) * data.shape[1], data.reshape(-1))
    else:
        values = data.view(f"<i{data.shape[1]}")[:, 0]
        _absorb_words(hashes, values.astype(np.int64, copy=False).view(np.uint64))


def _absorb_bytes(hashes: np.ndarray, ends: np.ndarray, data: np.ndarray) -> None:
    """Takes the bytes ``data[ends[i] : ends[i + 1]]`` into hash ``i``, 8 at a time. The last word is filled with zeros."""
    lengths = np.diff(ends)
    first, last = int(ends[0]), int(ends[-1])
    padded = np.zeros(last - first + 8, dtype=np.uint8)
    if last > first:
        padded[:-8] = data[first:last]
    longest = int(lengths.max())
    if longest == int(lengths.min()) and longest % 8 == 0:
        words = padded[:-8].view("<u8").reshape(len(lengths), longest // 8)
        for at in range(longest // 8):
            _absorb_words(hashes, words[:, at])
    else:
        # A view of the 8 bytes from every position, since words of strings begin anywhere.
        words = np.lib.stride_tricks.as_strided(padded[:8].view("<u8"), (len(padded) - 7,), (1,))
        _absorb_uneven(hashes, ends[:-1] - first, lengths, words)
    _absorb_words(hashes, lengths.view(np.uint64))


def _absorb_uneven(hashes: np.ndarray, begins: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> None:
    # Long values come first, so that the values that have a word number ``at`` are the first ones.
    is_even = (lengths == lengths[0]).all()
    order = slice(None) if is_even else np.argsort(-lengths, kind="stable")
    begins, lengths = begins[order], lengths[order]
    sorted_hashes = hashes[order]
    num_words = (lengths + 7) // 8
    for at in range(int(num_words[0])):
        count = int(np.searchsorted(-num_words, -at, side="left"))
        word = words[begins[:count] + 8 * at].astype(np.uint64)
        unused = np.maximum(8 * (at + 1) - lengths[:count], 0).astype(np.uint64) * np.uint64(8)
        word &= np.uint64(2**64 - 1) >> unused
        _absorb_words(sorted_hashes[:count], word)
    hashes[order] = sorted_hashes


def _absorb_words(hashes: np.ndarray, words: np.ndarray) -> None:
    hashes += words
    hashes *= _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)


def _mix(hashes: np.ndarray) -> None:
    """Applies the last step of SplitMix64 to each hash. It is a bijection, so different integers have different hashes."""
    hashes ^= hashes >> np.uint64(30)
    hashes *= _FINAL[0]
    hashes ^= hashes >> np.uint64(27)
    hashes *= _FINAL[1]
    hashes ^= hashes >> np.uint64(31)
