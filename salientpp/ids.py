"""Reads vertex ids from a mask or from integers, as int64, and finds ids that are out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(given: Any, must: str) -> Tensor:
    """Converts a tensor, a number, a list of numbers, or an array of any strides and byte order to a tensor.

    ValueError if torch cannot convert it. ``must`` names the argument and what it must be, such as "input_nodes must be a mask or integer ids".
    """
    try:
        if isinstance(given, np.ndarray):
            given = given.astype(given.dtype.newbyteorder("="), copy=min(given.strides, default=0) < 0)
        return given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        is_array = isinstance(given, np.ndarray)
        got = f"a NumPy array of {given.dtype}" if is_array else f"{type(given).__name__} ({error})"
        raise ValueError(f"{must}, got {got}") from None


def first_outside(ids: Tensor, end: int, begin: int = 0) -> int | None:
    """Returns the position of the first integer that is not in ``[begin, end)``, or None."""
    if not ids.numel():
        return None
    low, high = torch.aminmax(ids)
    if begin <= int(low) and int(high) < end:
        return None
    return int(((ids < begin) | (ids >= end)).flatten().nonzero()[0])


def check_range(ids: Tensor, end: int, must: str, of: str = "") -> None:
    """Raises ValueError unless all ids int64 [n] are in ``[0, end)``. The error gives the position of the first wrong id.

    ``must`` is the beginning of the error, such as "seeds must be". ``of`` is its end, such as " of seed set 3", which says where the position counts.
    """
    at = first_outside(ids, end)
    if at is not None:
        raise ValueError(f"{must} in [0, {end}), got {int(ids[at])} at position {at}{of}")


def read_ids(
    given: Tensor, size: int, name: str, kinds: str = "a mask or integer ids", must: str = "must be"
) -> tuple[Tensor, bool]:
    """Returns flat int64 ids, and True if a mask was given. Ids of a mask are ascending; other ids keep their order.

    Args:
        given: bool [size], or integers of any type. An empty tensor may have any type, because an empty list becomes float32.
        size: ids must be in ``[0, size)``.
        name, kinds, must: parts of error texts: the argument's name, the kinds of values that it takes, and the words before the range of ids.

    Raises:
        ValueError: a mask has another shape, numbers are not integers, or an id is out of range.
    """
    given = given.cpu()
    if given.dtype == torch.bool:
        if given.shape != (size,):
            raise ValueError(f"{name} as a mask must have shape [{size}], got {list(given.shape)}")
        return given.nonzero().flatten(), True
    if given.numel() and (given.dtype.is_floating_point or given.dtype.is_complex):
        raise ValueError(f"{name} must be {kinds}, got {given.dtype}")
    ids = given.to(torch.int64).flatten()  # torch cannot compare some integer types
    check_range(ids, size, f"{name} {must}")
    return ids, False
