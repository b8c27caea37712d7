"""Encodings that store a row in fewer bytes.

An **encoded** row has a fixed number of bytes, uint8 [W], which include everything that decoding needs. The formats of a row with D values:

* ``'fp16'``, ``'bf16'``: 16-bit floats; 2 D bytes.
* ``'int8'``, ``'int8/B'``: codes of 0 to 255, times a scale, plus an offset; D bytes, and 8 per block.
* ``'int4'``, ``'int4/B'``: codes of 0 to 15, times a scale, plus an offset; D / 2 bytes, and 8 per block.

The bytes are rounded up to a multiple of 4. Integer formats have one scale and offset per row, or with ``/B`` one per
block of B values. The scale maps the range of the values to the range of the codes. Codes are rounded to the nearest, so an error is at most half a step.

All arithmetic uses 32-bit floats in a fixed order, so every processor and device writes and reads the same bits. Values are first rounded to 32-bit
floats. The formats with a scale decode a row (or block) to NaN throughout if one of its values, or its range, is not finite. If the values of a row (or
block) differ by less than 1e-30, it decodes to a constant. 16-bit floats keep infinities, and overflow to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.store.rows import RowSource, TensorRows, take_rows
from salientpp.suggestions import did_you_mean

#: Formats, in the order of the kernel's format numbers.
FORMATS = ("fp16", "bf16", "int8", "int4")

#: The dtypes that rows may be encoded from and decoded to.
WIDE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: An attribute of one vertex type, as (type, name). The type is None in a homogeneous graph.
Column = tuple[str | None, str]

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_BLOCK = 2**20


@dataclass(frozen=True)
class Narrow:
    """Encoding of an attribute's rows: a format, and the dtype and shape of the decoded rows.

    Attributes:
        format: one of the formats above.
        dtype: dtype of decoded rows, one of :data:`WIDE`.
        row_shape: shape of a decoded row.

    Raises:
        ValueError: the format is unknown, or cannot encode the dtype.
    """

    format: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        read_format(self.format)
        if self.dtype not in WIDE:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDE)
            raise ValueError(
                f"rows of {str(self.dtype).removeprefix('torch.')} cannot be stored as {self.format}, which takes {known}; leave them as they are"
            )

    @property
    def columns(self) -> int:
        """D, the number of values of a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """W, the number of bytes of an encoded row."""
        kind, _ = read_format(self.format)
        codes = 2 * self.columns if kind in _FLOATS else -(-self.columns // 2) if kind == "int4" else self.columns
        return -(-(self.header_bytes + codes) // 4) * 4

    @property
    def wide_bytes(self) -> int:
        """Number of bytes of a decoded row."""
        return self.columns * self.dtype.itemsize

    @property
    def _num_blocks(self) -> int:
        _, block = read_format(self.format)
        return max(1, -(-self.columns // block)) if block else 1

    @property
    def header_bytes(self) -> int:
        """Number of bytes of scales and offsets, which precede the codes in an encoded row."""
        kind, _ = read_format(self.format)
        return 0 if kind in _FLOATS else 8 * self._num_blocks

    @property
    def _numbers(self) -> tuple[int, int]:
        """Arguments that tell the C++ kernels the format: its number in :data:`FORMATS`, and its block size."""
        kind, block = read_format(self.format)
        return FORMATS.index(kind), block

    def encode(self, rows: Tensor) -> Tensor:
        """Encodes rows [n, ...] on the CPU as uint8 [n, W]."""
        out = torch.empty((len(rows), self.row_bytes), dtype=torch.uint8, device="cpu")
        ops.encode_rows(rows.contiguous(), torch.arange(len(rows), device="cpu"), out, None, *self._numbers)
        return out

    def decode(self, encoded: Tensor) -> Tensor:
        """Decodes rows uint8 [n, W] on the CPU or a device. Returns [n, ...] on the same device."""
        if encoded.device.type != "cpu":
            return self.decode_by_torch(encoded)
        out = torch.empty((len(encoded), *self.row_shape), dtype=self.dtype, device="cpu")
        ops.decode_rows(encoded.contiguous(), torch.arange(len(encoded), device="cpu"), out, None, *self._numbers)
        return out

    def put(self, rows: RowSource, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        """Writes ``out[out_index] = decode(rows[index])`` on the CPU. ``rows`` are encoded; arguments as of ``RowSource.take``."""
        if isinstance(rows, TensorRows):
            ops.decode_rows(rows.tensor, index, out, out_index, *self._numbers)
        elif isinstance(rows, EncodedRows) and isinstance(rows.wide, TensorRows):
            ops.round_rows(rows.wide.tensor, index, out, out_index, *self._numbers)
        else:
            taken = take_rows(rows, index)
            ops.decode_rows(taken, torch.arange(len(taken), device="cpu"), out, out_index, *self._numbers)

    def decode_by_torch(self, encoded: Tensor) -> Tensor:
        """Decodes as :meth:`decode`, with torch's operators. Each operator rounds separately: none fuses a product with a sum.

        The code is the same on every device, and never waits for the device. With Triton, a GPU decodes rows in the pass that assembles them
        (:mod:`salientpp.store.assembly`), with the same bits. These operators need several passes over the rows.

        Args:
            encoded: contiguous, in memory that is aligned to 4 bytes.
        """
        kind, block = read_format(self.format)
        columns, header = self.columns, self.header_bytes
        if not columns:
            return torch.empty((len(encoded), *self.row_shape), dtype=self.dtype, device=encoded.device)
        if kind in _FLOATS:
            values = encoded.view(_FLOATS[kind])[:, :columns].to(torch.float32)
        else:
            numbers, codes = encoded.view(torch.float32), encoded[:, header:]
            if kind == "int4":
                codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
            steps = numbers[:, : 2 * self._num_blocks].unflatten(1, (-1, 2))
            scale, offset = steps[:, :, 0], steps[:, :, 1]
            if block:
                scale, offset = (each.repeat_interleave(block, 1)[:, :columns] for each in (scale, offset))
            values = codes[:, :columns].to(torch.float32).mul_(scale).add_(offset)
        return values.to(self.dtype).reshape(len(encoded), *self.row_shape)


def decoded_to(dtype: torch.dtype | None, narrow: Narrow | None, like: RowSource) -> Narrow | None:
    """Returns an encoding that decodes rows directly to ``dtype``, so that no cast follows.

    A cast would give the same bits. Rows of float16 and bfloat16 count as encoded in ``'fp16'`` and ``'bf16'``.

    Args:
        dtype: wanted dtype. None: the dtype that the rows have.
        narrow: encoding of the rows. None: the rows are not encoded.
        like: source of the rows.

    Returns:
        ``narrow`` itself if a cast must follow or none is needed. A cast must follow if ``dtype`` is not one of :data:`WIDE`, or if values would be rounded
        once instead of twice.
    """
    if dtype not in WIDE:
        return narrow
    if narrow is not None:
        rounds_once = narrow.dtype in (torch.float32, torch.float64)
        return replace(narrow, dtype=dtype) if rounds_once else narrow
    for format, stored in _FLOATS.items():
        plain = Narrow(format, dtype, tuple(like.shape[1:]))
        if like.dtype == stored != dtype and plain.row_bytes == plain.columns * stored.itemsize:
            return plain
    return None


def read_format(text: Any) -> tuple[str, int]:
    """Divides a format such as 'int4/32' into its name and its block size (0: the whole row). ValueError if unknown."""
    found = re.fullmatch(r"(\w+)(?:/([1-9]\d*))?", text) if isinstance(text, str) else None
    if found is not None and found[1] in FORMATS:
        block = int(found[2] or 0)
        if not block or (found[1].startswith("int") and block % 2 == 0 and block <= _MOST_BLOCK):
            return found[1], block
    raise ValueError(
        f"a format must be one of {', '.join(map(repr, FORMATS))}, or an int format with an even block size as in 'int4/32', got {text!r}"
        f"{did_you_mean(text, FORMATS)}"
    )


class NarrowRows:
    """Source of rows that are stored encoded. It decodes them to the user's dtype when they are taken.

    Attributes:
        encoded: the encoded rows, a source of uint8 [S, W].
        narrow: their encoding.
    """

    def __init__(self, encoded: RowSource, narrow: Narrow) -> None:
        self.encoded, self.narrow, self.dtype = encoded, narrow, narrow.dtype
        self.shape = torch.Size((encoded.shape[0], *narrow.row_shape))

    @property
    def nbytes(self) -> int:
        return getattr(self.encoded, "nbytes", 0)

    def whole(self) -> Tensor:
        """Returns all rows, decoded."""
        return take_rows(self, torch.arange(self.shape[0], device="cpu"))

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        self.narrow.put(self.encoded, index, out, out_index)


class EncodedRows:
    """Source of encoded rows, uint8 [S, W], for rows in the user's dtype. It encodes them when they are taken.

    Attributes:
        wide: the rows in the user's dtype.
        narrow: the encoding.
    """

    dtype = torch.uint8

    def __init__(self, wide: RowSource, narrow: Narrow) -> None:
        self.wide, self.narrow = wide, narrow
        self.shape = torch.Size((wide.shape[0], narrow.row_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows ``wide``, before encoding."""
        return getattr(self.wide, "nbytes", 0)

    def whole(self) -> Tensor:
        """Returns all rows, encoded."""
        return take_rows(self, torch.arange(self.shape[0], device="cpu"))

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        wide = self.wide
        if not isinstance(wide, TensorRows):
            wide, index = TensorRows(take_rows(wide, index)), torch.arange(index.numel(), device="cpu")
        ops.encode_rows(wide.tensor, index, out, out_index, *self.narrow._numbers)


def read_formats(
    argument: str,
    given: Any,
    known: Mapping[Column, tuple[torch.dtype, Sequence[int]]],
    kind: str = "node attributes",
) -> dict[Column, Narrow]:
    """Reads an argument that maps attribute names to formats, such as ``{'x': 'int8'}``. Returns the encoding of each attribute.

    A name selects the attribute in every type that has it. A pair (type, name) selects it in one type.

    Args:
        argument: name of the user's argument, for errors.
        given: value of the user's argument. None: nothing is encoded.
        known: dtype and row shape of every existing attribute.
        kind: what error texts call these attributes.

    Raises:
        TypeError: ``given`` is not a mapping.
        ValueError: an attribute or format does not exist, or encoding would not make the rows smaller.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must map node attribute names to formats, as in {{'x': 'int8'}}, got {type(given).__name__}"
        )
    found: dict[Column, Narrow] = {}
    for key, format in given.items():
        columns = [column for column in known if column == key or (isinstance(key, str) and column[1] == key)]
        if not columns:
            there = ", ".join(sorted(name if type_ is None else f"({type_!r}, {name!r})" for type_, name in known))
            raise ValueError(f"{argument} must name {kind} ({there or 'there are none'}), got {key!r}")
        for column in columns:
            dtype, row_shape = known[column]
            try:
                narrow = Narrow(format, dtype, tuple(row_shape))
            except ValueError as error:
                raise ValueError(f"{argument}[{key!r}]: {error}") from None
            if narrow.row_bytes >= narrow.wide_bytes:
                raise ValueError(
                    f"{argument}[{key!r}]: a row of {column[1]!r} takes {narrow.row_bytes} bytes as {format}, and {narrow.wide_bytes} as it is; leave it out"
                )
            found[column] = narrow
    return found


class Loss:
    """Measures how much an encoding changes rows. :meth:`add` adds rows; attributes give the error of all rows so far.

    Attributes:
        largest: largest absolute difference between a value and its decoded value.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._squares = self._squared_differences = 0.0

    @property
    def relative_rms(self) -> float:
        """Root mean square of the differences, divided by the root mean square of the values. 0 if all values are 0."""
        return math.sqrt(self._squared_differences / self._squares) if self._squares else 0.0

    def add(self, rows: Tensor, decoded: Tensor) -> int | None:
        """Adds rows [n, ...] to the measured ones. ``decoded``: the same rows after encoding and decoding.

        Returns:
            Number of the first row that is damaged, or None. A row is damaged if encoding changed an
            infinite value or a NaN, or made a finite value infinite or NaN.
        """
        # Not [n, -1]: a type may have no vertices.
        wide, read = (each.reshape(len(rows), math.prod(rows.shape[1:])).to(torch.float64) for each in (rows, decoded))
        finite = wide.isfinite() & read.isfinite()
        same = finite | (wide == read) | (wide.isnan() & read.isnan())
        difference = torch.where(finite, wide - read, 0.0)
        self.largest = max(self.largest, float(difference.abs().max()) if difference.numel() else 0.0)
        self._squared_differences += float(difference.square().sum())
        self._squares += float(torch.where(finite, wide, 0.0).square().sum())
        damaged = (~same).any(dim=1).nonzero()
        return int(damaged[0]) if damaged.numel() else None
