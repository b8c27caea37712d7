"""Maps integer and floating-point times to int64 in the same order, so that kernels compare times exactly."""

from __future__ import annotations

import math
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
        return _ordered_bits((_real_below(time) if is_whole else time) + 0.0)

    def window(self, length: float) -> int | float | None:
        """Converts the length of a time window for :meth:`since`. Returns None if the window is infinite, so that it has no begin.

        Args:
            length: a number >= 0 in the units of the times.

        Raises:
            ValueError: the graph has integer and floating-point times, or the window of integer times is too long.
        """
        if length == math.inf:
            return None
        if self.known is not None:
            raise ValueError(
                f"time_window={length} needs times of one kind, but the graph has integer and floating-point times; convert them to one dtype"
            )
        if self.real:
            return float(length)
        if length >= 2**63:
            raise ValueError(f"time_window must be < 2^63 for integer times, or inf, got {length}")
        return math.floor(length)

    def since(self, now: Tensor, window: int | float) -> Tensor:
        """Returns the times at which windows begin, as int64 values of this clock.

        Args:
            now: int64 [n], values of this clock, at which the windows end.
            window: a result of :meth:`window`. With floating-point times, a window begins at ``end - window``, computed in float64 and so rounded.
        """
        if self.real:
            return _ordered_bits(_ordered_bits(now).view(torch.float64) - window + 0.0)
        first = now - int(window)
        return torch.where(first > now, -(2**63), first)  # a difference below int64 has wrapped

    def check_ends(self, time: Tensor, name: str) -> None:
        """Checks that the times at which windows end have no fraction if the graph's times are integers.

        The clock would drop the fraction, so a window would begin too early.

        Raises:
            ValueError: a time has a fraction, but the graph's times are integers.
        """
        if self.real or not time.dtype.is_floating_point:
            return
        at = (time != time.floor()).nonzero()
        if at.numel():
            raise ValueError(
                f"{name} must hold whole numbers with time_window, because the graph's times are integers, got {float(time[at[0]])} at position {int(at[0])}"
            )


def _ordered_bits(value: Tensor) -> Tensor:
    """Maps float64 to int64 of the same order. Given such an int64, it returns the bits of the float64, so it is its own inverse."""
    bits = value.contiguous().view(torch.int64)
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
    """Rounds float64 times down to int64. A time below every int64 becomes the least int64."""
    floor = time.floor()
    inside = floor.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)  # 2^63 - 1024 is the last float64 below 2^63
    return torch.where(floor >= 2.0**63, 2**63 - 1, inside)


def _real_below(time: Tensor) -> Tensor:
    """Rounds int64 times down to the next float64."""
    real = time.to(torch.float64)
    rounded_up = (real >= 2.0**63) | (real.clamp(max=2.0**63 - 1024).to(torch.int64) > time)
    return torch.where(rounded_up, real.nextafter(torch.tensor(-torch.inf, dtype=torch.float64, device="cpu")), real)
