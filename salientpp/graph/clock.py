"""Compares times, whole and real ones alike, without rounding any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Clock:
    """Times as int64 in an order-preserving way, so that kernels compare one kind of number.

    Whole and real times compare by value, exactly: none is rounded to the other kind. Where a graph has both kinds, a time becomes
    the number of the graph's times that are not later.

    Attributes:
        real: the graph has real times, floating-point numbers.
        known: if it has whole times too: all of either kind, int64 and float64, ascending.
    """

    real: bool
    known: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, times: Sequence[Tensor], name: str) -> Clock:
        """For a graph that has these times.

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
        """int64: for a time t of the graph and any time s, ``read(t) <= read(s)`` just where ``t <= s``.

        What no time of the graph can equal is rounded down: 2.5 among whole times to 2, 2^53 + 1 among real ones to 2^53.

        Raises:
            ValueError: a time that is not a number, or not below 2^63 though whole; times of a dtype without an order.
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
    """The same values on the CPU as int64 or float64; ValueError where these cannot hold them, or they have no order."""
    if not isinstance(time, Tensor) or time.dtype.is_complex:
        raise ValueError(
            f"{name} must be a tensor of whole or real numbers, got {time.dtype if isinstance(time, Tensor) else type(time).__name__}"
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
    """The largest int64 that is at most a float64; the least one where there is none."""
    floor = time.floor()
    inside = floor.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)  # 2^63 - 1024 is the last float64 below 2^63
    return torch.where(floor >= 2.0**63, 2**63 - 1, inside)


def _real_below(time: Tensor) -> Tensor:
    """The largest float64 that is at most an int64."""
    real = time.to(torch.float64)
    rounded_up = (real >= 2.0**63) | (real.clamp(max=2.0**63 - 1024).to(torch.int64) > time)
    return torch.where(rounded_up, real.nextafter(torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")), real)
