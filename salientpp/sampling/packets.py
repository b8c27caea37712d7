"""Packets: several tensors, called sections, in one tensor of bytes.

Integers travel in the narrowest dtype that holds all values of their tensor, because most of the numbers that ranks tell each other are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from salientpp.ops import pack_integers

#: Dtypes of a section, by code. Bytes that are no integers have the last code.
_DTYPES = (torch.uint8, torch.uint16, torch.int32, torch.int64, torch.uint8)
_BYTES = len(_DTYPES) - 1

#: Sections begin at multiples of this number of bytes, so that they can be viewed in any dtype.
_ALIGNED = 8

NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def pack(sections: Sequence[Tensor], lists: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> Tensor:
    """Returns a packet, uint8 [bytes], of these sections.

    Args:
        sections: int64 tensors [n] of integers, and uint8 tensors [n] of other bytes, on the CPU. At least one.
        lists: for sections that hold lists of integers, by index of the section: the length and the base of each list, int64 [m] each. The packet stores
            each integer minus the base of its list, because smaller numbers take fewer bytes.
    """
    of = [(lists or {}).get(number, (None, None)) for number in range(len(sections))]
    return pack_integers(
        [section.contiguous() for section in sections], [count for count, _ in of], [base for _, base in of]
    )


def unpack(packet: Tensor) -> list[Tensor]:
    """Returns the sections of a packet, int64 [n] or uint8 [n]."""
    return [section if code == _BYTES else section.to(torch.int64) for section, code in _views(packet)]


def unpack_narrow(packet: Tensor) -> list[Tensor]:
    """Returns the sections of a packet, [n], as views in the dtypes in which they travelled: integers may be uint8, uint16, int32 or int64."""
    return [section for section, _ in _views(packet)]


def as_rows(data: Tensor, dtype: torch.dtype, row_shape: Sequence[int], number: int) -> Tensor:
    """Views a section of bytes as rows [number, ...]. Copies it first if the dtype needs a larger alignment than sections have. Rows may have width 0."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(number, *row_shape)


def _views(packet: Tensor) -> list[tuple[Tensor, int]]:
    """Returns each section and the code of its dtype."""
    packet = packet if packet.data_ptr() % _ALIGNED == 0 else packet.clone()
    words = packet[: packet.numel() // _ALIGNED * _ALIGNED].view(torch.int64)
    number = int(words[0])
    at, sections = (1 + number) * _ALIGNED, []
    for word in words[1 : 1 + number].tolist():
        size, code = divmod(word, len(_DTYPES))
        dtype = _DTYPES[code]
        num_bytes = size * dtype.itemsize
        sections.append((packet[at : at + num_bytes].view(dtype), code))
        at += num_bytes + -num_bytes % _ALIGNED
    return sections
