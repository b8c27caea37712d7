"""Packets: several tensors in one tensor of bytes.

Integers travel in the narrowest dtype that holds all values of their tensor, because most of the numbers that ranks tell each other are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.ops import bytes_of

#: Dtypes of a section, by code. Bytes that are no integers have the last code.
_DTYPES = (torch.uint8, torch.uint16, torch.int32, torch.int64, torch.uint8)
_BYTES = len(_DTYPES) - 1

#: Sections begin at multiples of this number of bytes, so that they can be viewed in any dtype.
_ALIGNED = 8

NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def pack(sections: Sequence[Tensor]) -> Tensor:
    """Returns a packet, uint8 [bytes], of these sections.

    Args:
        sections: int64 tensors [n] of integers, and uint8 tensors [n] of other bytes, on the CPU.
    """
    header, pieces = [len(sections)], []
    for section in sections:
        code = _code_of(section)
        narrow = bytes_of(section.to(_DTYPES[code]).contiguous())
        header.append(section.numel() * len(_DTYPES) + code)
        pieces += [narrow, NO_BYTES.new_zeros(-narrow.numel() % _ALIGNED)]
    return torch.cat([bytes_of(torch.tensor(header, dtype=torch.int64, device="cpu")), *pieces])


def unpack(packet: Tensor) -> list[Tensor]:
    """Returns the sections of a packet, int64 [n] or uint8 [n]."""
    packet = packet if packet.data_ptr() % _ALIGNED == 0 else packet.clone()
    words = packet[: packet.numel() // _ALIGNED * _ALIGNED].view(torch.int64)
    number = int(words[0])
    at, sections = (1 + number) * _ALIGNED, []
    for word in words[1 : 1 + number].tolist():
        size, code = divmod(word, len(_DTYPES))
        dtype = _DTYPES[code]
        num_bytes = size * dtype.itemsize
        section = packet[at : at + num_bytes].view(dtype)
        sections.append(section if code == _BYTES else section.to(torch.int64))
        at += num_bytes + -num_bytes % _ALIGNED
    return sections


def _code_of(section: Tensor) -> int:
    if section.dtype == torch.uint8:
        return _BYTES
    if not section.numel():
        return 0
    least, most = (int(bound) for bound in section.aminmax())
    if least < 0:
        return 2 if least >= -(2**31) and most < 2**31 else 3
    return 0 if most < 2**8 else 1 if most < 2**16 else 2 if most < 2**31 else 3
