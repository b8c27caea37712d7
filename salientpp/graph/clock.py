"""Exact comparison of integer and floating-point times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Clock:
    """Order-preserving map of times to int64, so that kernels compare one kind of number.

    Integer and floating-point times compare by value, exactly: neither kind is rounded to the other. In a graph with both kinds, a
    time becomes the number of the graph's times that are not later.

    Attributes:
        real: True if the graph has floating-point times.
        known: all times of the graph, as ascending int64 and ascending float64, if it has both kinds; else None.
    """

    real: bool
    known: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, times: Sequence[Tensor], name: str) -> Clock:
        """Creates the clock of a graph that has these times.

        Raises:
            ValueError: as :meth:`read`.
        """
        exact = [_exact_time(time, name).flatten() for time in times]
        whole = [time for time in exact if time.dtype == torch.int64]
        real = [time for time in exact if time.dtype == torch.float64]
        return cls(
            bool(real), (torch.cat(whole).sort().values, torch.cat(real).sort().values) if whole and real else None
        )

    def read(self, time: Tensor, name: str) -> Tensor:
        """Returns int64 values in the order of the times.

        For a time t of the graph and any time s, ``read(t) <= read(s)`` exactly where ``t <= s``. A time that no time of the graph can
        equal is rounded down: 2.5 among integer times to 2, 2^53 + 1 among floating-point times to 2^53.

        Raises:
            ValueError: a time is NaN, an integer is not below 2^63, or the dtype has no order.
        """
        time = _exact_time(time, name)
        is_whole = time.dtype == torch.int64
        if self.known is not None:
            whole, real = self.known
            down = _real_below(time) if is_whole else _whole_below(time)
            earlier = (time, down) if is_whole else (down, time)
            return torch.searchsorted(whole, earlier[0], right=True) + torch.searchsorted(real, earlier[1], right=True)
        if not self.real:
            return (time if is_whole else _whole_below(time)).contiguous()
        # Adding zero turns -0.0 into 0.0.
        bits = ((_real_below(time) if is_whole else time) + 0.0).contiguous().view(torch.int64)
        return bits ^ ((bits >> 63) & (2**63 - 1))


def _exact_time(time: Tensor, name: str) -> Tensor:
    """Returns the same values on the CPU as int64 or float64; ValueError if neither can hold them, or if they have no order."""
    if not isinstance(time, Tensor) or time.dtype.is_complex:
        raise ValueError(
            f"{name} must be a tensor of integers or floating-point numbers, got {time.dtype if isinstance(time, Tensor) else type(time).__name__}"
        )
    time = time.detach().cpu()
    if time.dtype.is_floating_point:
        time = time.to(torch.float64)
        if bool(time.isnan().any()):
            raise ValueError(f"{name} must hold numbers, got NaN at position {int(time.isnan().nonzero()[0])}")
        return time
    whole = time.to(torch.int64)
    if time.dtype == torch.uint64 and bool((whole < 0).any()):
        at = int((whole < 0).nonzero()[0])
        raise ValueError(f"{name} must be < 2^63, got {int(whole[at]) + 2**64} at position {at}")
    return whole


def _whole_below(time: Tensor) -> Tensor:
    """Returns the largest int64 that is at most a float64, or the least int64 if none is."""
    floor = time.floor()
    inside = floor.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)  # 2^63 - 1024 is the last float64 below 2^63
    return torch.where(floor >= 2.0**63, 2**63 - 1, inside)


def _real_below(time: Tensor) -> Tensor:
    """Returns the largest float64 that is at most an int64."""
    real = time.to(torch.float64)
    rounded_up = (real >= 2.0**63) | (real.clamp(max=2.0**63 - 1024).to(torch.int64) > time)
    return torch.where(rounded_up, real.nextafter(torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")), real)
