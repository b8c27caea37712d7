"""Keys of draws, mixed as the kernels mix them."""

from __future__ import annotations

import functools


def join_key(*fields: int) -> int:
    """A signed 64-bit key that depends on every field and on their order, for the kernels that draw.

    The mixing of ``csrc/random.h``: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
    """
    key = _with_field(_of_fields(fields[:-1]), fields[-1]) if fields else 0
    return key - 2**64 if key >= 2**63 else key


@functools.lru_cache(maxsize=256)
def _of_fields(fields: tuple[int, ...]) -> int:
    """Unsigned. The batches of an epoch have all but the last field in common."""
    key = 0
    for value in fields:
        key = _with_field(key, value)
    return key


def _with_field(key: int, value: int) -> int:
    return _mix(_mix((key + _GOLDEN) & _MASK) ^ ((value * 0xD1342543DE82EF95 + _GOLDEN) & _MASK))


_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
