"""Writes a row in fewer bytes, and reads it back.

An **encoded** row is one fixed number of bytes, uint8 [W], with all that reading it back takes. Its format is one of

========================  ==================================================================  =======================
``'fp16'``, ``'bf16'``    16-bit floats                                                       2 D bytes
``'fp8'``                 8-bit floats (e4m3) times a scale of the row's                      4 + D
``'int8'``, ``'int8/B'``  steps of 0 to 255, times a scale, plus an offset                    8 per block, and D
``'int4'``, ``'int4/B'``  steps of 0 to 15, likewise                                          8 per block, and D / 2
========================  ==================================================================  =======================

rounded up to a multiple of 4, where D is the number of values of a row. Integers have one scale and offset for the row, or with ``/B`` for every block of B
values. The scale takes the range of the values to that of the codes, so an error is at most half a step; codes are rounded to the nearest.

All arithmetic is that of 32-bit floats, in a fixed order, so every processor and device writes and reads the same bits. Values are rounded to
32-bit floats first. A row (a block) with a value that is not finite, or with a range that is not, is NaN throughout in the formats with a scale, and one whose
values differ by less than 1e-30 is constant; 16-bit floats keep infinities, and overflow to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.store.rows import RowSource, TensorRows, take_rows

#: In the order of the kernel's numbers.
FORMATS = ("fp16", "bf16", "fp8", "int8", "int4")

#: The dtypes that rows may be encoded from, and are decoded to.
WIDE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: An attribute of the vertices of one type; the type is None where there is only one.
Column = tuple[str | None, str]

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_BLOCK = 2**20


@dataclass(frozen=True)
class Narrow:
    """A format, and what rows in it are decoded to.

    Attributes:
        format: as in the table above.
        dtype: of decoded rows, one of :data:`WIDE`.
        row_shape: of a decoded row.

    Raises:
        ValueError: there is no such format, or it does not take such a dtype.
    """

    format: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        read_format(self.format)
        if self.dtype not in WIDE:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDE)
            raise ValueError(
                f"rows of {str(self.dtype).removeprefix('torch.')} cannot be written as {self.format}, which is for {known}; leave them as they are"
            )

    @property
    def columns(self) -> int:
        """D, the values of a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """W, the bytes of an encoded row."""
        kind, _ = read_format(self.format)
        codes = 2 * self.columns if kind in _FLOATS else -(-self.columns // 2) if kind == "int4" else self.columns
        return -(-(self._header_bytes + codes) // 4) * 4

    @property
    def wide_bytes(self) -> int:
        """The bytes of a decoded row."""
        return self.columns * self.dtype.itemsize

    @property
    def _num_blocks(self) -> int:
        _, block = read_format(self.format)
        return max(1, -(-self.columns // block)) if block else 1

    @property
    def _header_bytes(self) -> int:
        kind, _ = read_format(self.format)
        return 0 if kind in _FLOATS else 4 if kind == "fp8" else 8 * self._num_blocks

    @property
    def _numbers(self) -> tuple[int, int]:
        """What the kernel calls the format."""
        kind, block = read_format(self.format)
        return FORMATS.index(kind), block

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 [n, W] of rows [n, ...] on the CPU."""
        out = torch.empty((len(rows), self.row_bytes), dtype=torch.uint8, device="cpu")
        ops.encode_rows(rows.contiguous(), torch.arange(len(rows), device="cpu"), out, None, *self._numbers)
        return out

    def decode(self, encoded: Tensor) -> Tensor:
        """[n, ...] of encoded rows uint8 [n, W], on their device."""
        if encoded.device.type != "cpu":
            return self.decode_by_torch(encoded)
        out = torch.empty((len(encoded), *self.row_shape), dtype=self.dtype, device="cpu")
        ops.decode_rows(encoded.contiguous(), torch.arange(len(encoded), device="cpu"), out, None, *self._numbers)
        return out

    def put(self, rows: RowSource, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        """``out[out_index] = decode(rows[index])`` on the CPU, for encoded rows; as :meth:`~salientpp.store.rows.RowSource.take`."""
        if isinstance(rows, TensorRows):
            ops.decode_rows(rows.tensor, index, out, out_index, *self._numbers)
        elif isinstance(rows, EncodedRows) and isinstance(rows.wide, TensorRows):
            ops.round_rows(rows.wide.tensor, index, out, out_index, *self._numbers)
        else:
            taken = take_rows(rows, index)
            ops.decode_rows(taken, torch.arange(len(taken), device="cpu"), out, out_index, *self._numbers)

    def decode_by_torch(self, encoded: Tensor) -> Tensor:
        """:meth:`decode` by torch's operators. Each rounds by itself: none fuses a product with a sum.

        Nothing here asks which device it is, and nothing waits for it: rows that a GPU puts together are decoded there, on its current stream, and tests run
        the same lines on the CPU. A kernel of its own would save passes over the rows, not change a bit of them.

        Args:
            encoded: contiguous, in memory that is aligned to 4 bytes.
        """
        kind, block = read_format(self.format)
        columns, header = self.columns, self._header_bytes
        if not columns:
            return torch.empty((len(encoded), *self.row_shape), dtype=self.dtype, device=encoded.device)
        if kind in _FLOATS:
            values = encoded.view(_FLOATS[kind])[:, :columns].to(torch.float32)
        else:
            numbers, codes = encoded.view(torch.float32), encoded[:, header:]
            if kind == "fp8":
                values = codes[:, :columns].view(torch.float8_e4m3fn).to(torch.float32).mul_(numbers[:, :1])
            else:
                if kind == "int4":
                    codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
                steps = numbers[:, : 2 * self._num_blocks].unflatten(1, (-1, 2))
                scale, offset = steps[:, :, 0], steps[:, :, 1]
                if block:
                    scale, offset = (each.repeat_interleave(block, 1)[:, :columns] for each in (scale, offset))
                values = codes[:, :columns].to(torch.float32).mul_(scale).add_(offset)
        return values.to(self.dtype).reshape(len(encoded), *self.row_shape)


def read_format(text: Any) -> tuple[str, int]:
    """A format without its block, and the block (0: the whole row); ValueError if there is no such format."""
    found = re.fullmatch(r"(\w+)(?:/([1-9]\d*))?", text) if isinstance(text, str) else None
    if found is not None and found[1] in FORMATS:
        block = int(found[2] or 0)
        if not block or (found[1].startswith("int") and block % 2 == 0 and block <= _MOST_BLOCK):
            return found[1], block
    raise ValueError(
        f"a format must be one of {', '.join(map(repr, FORMATS))}, or of the last two with an even block of values as in 'int4/32', got {text!r}"
    )


class NarrowRows:
    """Rows that are stored encoded, as the user has them: decoded when they are taken. A :class:`~salientpp.store.rows.RowSource`.

    Attributes:
        encoded: the bytes, a source of uint8 [S, W].
        narrow: their format.
    """

    def __init__(self, encoded: RowSource, narrow: Narrow) -> None:
        self.encoded, self.narrow, self.dtype = encoded, narrow, narrow.dtype
        self.shape = torch.Size((encoded.shape[0], *narrow.row_shape))

    @property
    def nbytes(self) -> int:
        return getattr(self.encoded, "nbytes", 0)

    def whole(self) -> Tensor:
        """All rows, decoded."""
        return take_rows(self, torch.arange(self.shape[0], device="cpu"))

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        self.narrow.put(self.encoded, index, out, out_index)


class EncodedRows:
    """Rows that are stored as the user has them, encoded when they are taken: a source of uint8 [S, W].

    Attributes:
        wide: the rows.
        narrow: the format.
    """

    dtype = torch.uint8

    def __init__(self, wide: RowSource, narrow: Narrow) -> None:
        self.wide, self.narrow = wide, narrow
        self.shape = torch.Size((wide.shape[0], narrow.row_bytes))

    @property
    def nbytes(self) -> int:
        """Of what is held, which is not encoded."""
        return getattr(self.wide, "nbytes", 0)

    def whole(self) -> Tensor:
        """All rows, encoded."""
        return take_rows(self, torch.arange(self.shape[0], device="cpu"))

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        wide = self.wide
        if not isinstance(wide, TensorRows):
            wide, index = TensorRows(take_rows(wide, index)), torch.arange(index.numel(), device="cpu")
        ops.encode_rows(wide.tensor, index, out, out_index, *self.narrow._numbers)


def read_formats(
    argument: str, given: Any, known: Mapping[Column, tuple[torch.dtype, Sequence[int]]]
) -> dict[Column, Narrow]:
    """The user's ``{'x': 'int8'}`` by column. A name means this attribute of every type that has it, (type, name) that of one.

    Args:
        argument: what the user calls it, for errors.
        known: dtype and shape of a row of the attributes that there are.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no such attribute or format, or the rows would not become narrower.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must map names of node attributes to formats, as in {{'x': 'int8'}}, got {type(given).__name__}"
        )
    found: dict[Column, Narrow] = {}
    for key, format in given.items():
        columns = [column for column in known if column == key or (isinstance(key, str) and column[1] == key)]
        if not columns:
            there = ", ".join(sorted(name if type_ is None else f"({type_!r}, {name!r})" for type_, name in known))
            raise ValueError(f"{argument} must name node attributes ({there or 'there are none'}), got {key!r}")
        for column in columns:
            dtype, row_shape = known[column]
            try:
                narrow = Narrow(format, dtype, tuple(row_shape))
            except ValueError as error:
                raise ValueError(f"{argument}[{key!r}]: {error}") from None
            if narrow.row_bytes >= narrow.wide_bytes:
                raise ValueError(
                    f"{argument}[{key!r}]: as {format} a row of {column[1]!r} takes {narrow.row_bytes} bytes, and {narrow.wide_bytes} as it is; leave it out"
                )
            found[column] = narrow
    return found


class Loss:
    """What was lost in writing rows narrower: count rows with :meth:`add`, then ask.

    Attributes:
        largest: the largest difference of a value.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._squares = self._squared_differences = 0.0

    @property
    def relative_rms(self) -> float:
        """Root mean square of the differences over that of the values; 0 of zeros."""
        return math.sqrt(self._squared_differences / self._squares) if self._squares else 0.0

    def add(self, rows: Tensor, decoded: Tensor) -> int | None:
        """Count rows [n, ...] as they were and as they are; gives the first with a value that is not finite in one of them, and not the same in both."""
        wide, read = rows.reshape(len(rows), -1).to(torch.float64), decoded.reshape(len(rows), -1).to(torch.float64)
        finite = wide.isfinite() & read.isfinite()
        same = finite | (wide == read) | (wide.isnan() & read.isnan())
        difference = torch.where(finite, wide - read, 0.0)
        self.largest = max(self.largest, float(difference.abs().max()) if difference.numel() else 0.0)
        self._squared_differences += float(difference.square().sum())
        self._squares += float(torch.where(finite, wide, 0.0).square().sum())
        damaged = (~same).any(dim=1).nonzero()
        return int(damaged[0]) if damaged.numel() else None
