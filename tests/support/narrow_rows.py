"""Rows for the tests of narrow formats, and the comparison of decoded values."""

from __future__ import annotations

import torch

FORMATS = ["fp16", "bf16", "int8", "int8/16", "int4", "int4/2", "int4/32"]


def rows_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns 40 rows of many magnitudes and offsets: small and large, constant, zero, and of one sign."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, *shape, generator=generator)
    ones = (1,) * len(shape)
    rows *= torch.logspace(-4, 4, 40).view(40, *ones)
    rows += torch.tensor([0.0, 3.0, -1e3, 0.1]).repeat(10).view(40, *ones)
    rows[3], rows[4] = 0.0, 0.3
    rows[5] = rows[5].abs() * (torch.rand(rows[5].shape, generator=generator) < 0.5)
    return rows.to(dtype)


def rows_with_infinities(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows of :func:`rows_of`, but row 7 is NaN and row 8 infinite."""
    rows = rows_of(shape, seed, dtype)
    rows[7], rows[8] = torch.nan, torch.inf
    return rows


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both tensors of floats have the same dtype, shape and bits. All NaNs count as equal."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = _BITS[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
