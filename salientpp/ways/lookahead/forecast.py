"""Forecasts how many rows a lookahead cache will fetch, from probabilities alone. docs/explanation/traffic.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.vip.policies import Workload
from salientpp.vip.shared import block_probability

#: With a window of W batches, uses that are at most W / LATE batches apart are cache hits as often as if the whole future were known. The factor is fitted to
#: counts on two graphs. With it, the forecast differs from these counts by at most 0.02 for windows of T* / 2 to 3 T* (T*: see :class:`Spread`). The factor
#: exceeds 1 because the longest distance between two uses over which a row is kept varies from batch to batch.
LATE = 1.2


@dataclass(frozen=True)
class ListSizes:
    """Mean number of remote rows that a batch needs, and mean bytes of their ids, over some batches.

    Attributes:
        num_ids: distinct remote rows of a batch.
        list_bytes: bytes of their ids, as packed by :func:`salientpp.ops.code_ids`.
        waiting_bytes: bytes that a drawn batch takes while it waits. 0: batches do not wait.
    """

    num_ids: float
    list_bytes: float
    waiting_bytes: float = 0.0

    @classmethod
    def of(cls, lists: Sequence[Tensor], num_ids: int, waiting_bytes: float = 0.0) -> ListSizes:
        """Measures ids in [0, ``num_ids``) of some batches, each packed by :func:`ops.code_ids`."""
        number = max(1, len(lists))
        return cls(
            sum(ops.ids_of_list(each, num_ids).numel() for each in lists) / number,
            sum(each.nbytes for each in lists) / number,
            waiting_bytes,
        )

    @classmethod
    def expected(cls, probability: Tensor) -> ListSizes:
        """Estimates the sizes without any batch, from the probability that a batch needs each remote row. The estimate is slightly too large."""
        number = float(probability.sum(dtype=torch.float64))
        bits = number * (2 + math.log2(probability.numel() / number)) if number > 0 else 0.0
        return cls(number, 1 + min(bits, probability.numel()) / 8 + 1)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Describes batches that share draws in blocks (``draw_block``). A row that one batch needs is likely needed by others of its block.

    Attributes:
        size: number of batches in a block, b.
        probability: float [N], probability that any batch of a block needs each row, from :func:`salientpp.vip.shared.block_probability`.
    """

    size: int
    probability: Tensor

    @classmethod
    def of(cls, workload: Workload, draw_block: int, num_batches: int, shared: bool) -> Blocks | None:
        """Describes a part's blocks. None if batches draw independently. ``shared``: vertices share draws too."""
        size = min(draw_block, num_batches)
        if size <= 1:
            return None
        drawn = workload.graph, workload.seeds, workload.num_neighbors, workload.batch_size, size
        return cls(size, block_probability(*drawn, "batch" if shared else None))


def _as_counted(probability: Tensor, trial: ListSizes) -> Tensor:
    """Scales probabilities so that they add up to the mean number of rows in the trial. In a clustered graph, the computed ones add up to more."""
    expected = float(probability.sum(dtype=torch.float64))
    return probability * (trial.num_ids / expected) if expected > 0 else probability


@dataclass(frozen=True, eq=False)
class Spread:
    """Forecasts how many rows a lookahead cache fetches, from a histogram of the rows' probabilities.

    In the model, a row is kept between two uses if they are at most t batches apart. Suppose that batches are
    independent of each other, and that each needs row v with probability p. With q = 1 - p, the cache then holds
    ``sum_v 1 - q^t (1 + p t)`` rows at a time, and ``sum_v p (1 - q^t)`` rows are found per batch. T* is the t at which
    the held rows fill the slots. Batches that share draws in blocks have other sums.

    Attributes:
        chance: float64 [bins], for each bin of the histogram the probability that a batch needs a row of it.
        count: float64 [bins], number of rows in each bin.
        in_block: probability that a block contains each row. Each batch of such a block then needs the row with ``chance / in_block``, independently.
            None: every batch draws independently.
        block: number of batches in a block.
    """

    chance: Tensor
    count: Tensor
    in_block: Tensor | None = None
    block: int = 1

    @classmethod
    def of(cls, probability: Tensor, blocks: Blocks | None = None, trial: ListSizes | None = None) -> Spread:
        """Makes the histogram of ``probability``, float [N]. With ``blocks``, scales it to the rows in ``trial``."""
        if blocks is not None and trial is not None:
            probability = _as_counted(probability, trial)
        bins_per_factor = 64 if blocks is None else 16
        there = probability > 0
        positive = probability[there].clamp(max=1.0).to(torch.float64)
        at = (-torch.log2(positive) * bins_per_factor).floor().clamp(0, 64 * bins_per_factor).long()
        count = torch.bincount(at).to(torch.float64)
        some = count > 0

        def mean(values: Tensor) -> Tensor:
            return torch.bincount(at, weights=values.to(torch.float64))[some] / count[some]

        if blocks is None or blocks.size == 1:
            return cls(mean(positive), count[some])
        chance = mean(positive)
        in_block = _has_row(chance, mean(blocks.probability[there].clamp(max=1.0)), blocks.size)
        return cls(chance, count[some], in_block, blocks.size)

    def _whole(self, batches: int) -> tuple[Tensor, Tensor]:
        if self.in_block is None:
            unused = torch.exp(batches * torch.log1p(-self.chance.clamp(max=1 - 1e-12)))
            return 1 - unused, (1 - unused * (1 + self.chance * batches)).clamp(0, 1)
        unused, waited = self._in_blocks(batches)
        return 1 - unused, (self.chance * (waited - batches * unused)).clamp(0, 1)

    def _in_blocks(self, batches: int) -> tuple[Tensor, Tensor]:
        """Returns two numbers for each bin, for batches that share draws in blocks.

        The first is the probability that a row, once used, is not used in the next ``batches`` batches. The second is the sum of this probability over
        0, 1, ..., ``batches`` - 1 batches. The use may be in any batch of its block. So both are means over the number of batches that follow it there.
        Later blocks contain the row independently of this block.
        """
        assert self.in_block is not None  # the caller handles independent draws
        size, places = self.block, min(self.block, 16)
        needed = self.in_block
        # Probability that a batch does not need a row that its block contains.
        idle = (1 - self.chance / needed).clamp(1e-12, 1 - 1e-12)
        rest = ((torch.arange(places, dtype=torch.float64, device="cpu") + 0.5) * size / places).floor().view(-1, 1)

        def summed(number: Tensor) -> Tensor:  # sum of idle**j for j < number
            return (1 - idle**number) / (1 - idle)

        inside = rest.clamp(max=batches)
        beyond = (batches - rest).clamp(min=0)
        blocks, part = (beyond / size).floor(), beyond % size
        none = 1 - needed + needed * idle**size  # probability that a whole block does not use the row
        later = none**blocks * (1 - needed + needed * idle**part)
        unused = idle**inside * later
        of_block = (1 - needed) * size + needed * summed(torch.tensor(float(size), device="cpu"))
        waited = of_block * (1 - none**blocks) / (1 - none).clamp(min=1e-12)
        waited = waited + none**blocks * ((1 - needed) * part + needed * summed(part))
        return unused.mean(0), (summed(inside) + idle**rest * waited).mean(0)

    def _within(self, batches: float) -> tuple[Tensor, Tensor]:
        """Returns two probabilities per bin: that a row, once used, is used again within ``batches``, and that a row is now between two such uses.

        A fraction of a batch interpolates between the whole numbers of batches around it.
        """
        if math.isinf(batches):
            return torch.ones_like(self.chance), torch.ones_like(self.chance)
        first, part = int(batches), batches - int(batches)
        ends = zip(self._whole(first), self._whole(first + 1))
        again, kept = ((1 - part) * one + part * other for one, other in ends)
        return again, kept

    def reach(self, num_slots: float) -> float:
        """Returns T*, the window in batches at which kept rows fill the slots; infinite if all rows fit."""
        if num_slots >= float(self.count.sum()):
            return math.inf
        low, high = 0.0, 1.0
        while high < 2**40 and self._used(high) < num_slots:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            if self._used(middle) < num_slots:
                low = middle
            else:
                high = middle
        return high

    def is_long_enough(self, num_slots: float, window: float) -> bool:
        """Returns True if a longer window would save no more fetches, because rows between two uses in this window already fill the slots."""
        return num_slots < float(self.count.sum()) and self._used(window / LATE) >= num_slots

    def _used(self, batches: float) -> float:
        return float((self.count * self._within(batches)[1]).sum())

    def rows(self, num_slots: float, window: float) -> float:
        """Returns the forecast: rows fetched per batch.

        A window of 0 is a static cache, an infinite one knows all batches. With a window shorter than T*, the
        hottest rows always stay, and others stay if they are used again inside the window.
        """
        chance, count = self.chance, self.count
        all_rows = float((chance * count).sum())
        if num_slots >= float(count.sum()):
            return 0.0
        batches = window / LATE
        if window and self.is_long_enough(num_slots, window):
            batches = min(batches, self.reach(num_slots))
        again, kept = self._within(batches)
        # Slots that are left keep all rows of the hottest bins, until they are full.
        more = (count * (1 - kept)).cumsum(0)
        spare = max(0.0, num_slots - float((count * kept).sum()))
        whole = ((spare - (more - count * (1 - kept))) / (count * (1 - kept)).clamp(min=1e-300)).clamp(0, 1)
        hits = count * chance * (whole + (1 - whole) * again)
        return max(0.0, all_rows - float(hits.sum()))


def _has_row(chance: Tensor, needed: Tensor, size: int) -> Tensor:
    """Returns the probability A that a block of ``size`` batches contains a row.

    One batch needs the row with probability ``chance``, and at least one batch of the block with probability ``needed``.
    If the block contains the row, each batch needs it with probability q: ``A q = chance`` and ``A (1 - (1 - q)^size) = needed``.
    """
    low, high = chance.clone(), torch.ones_like(chance)  # bounds of q
    for _ in range(50):
        middle = (low + high) / 2
        too_small = (1 - (1 - middle) ** size) / middle > needed / chance
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return (chance / high).clamp(max=1.0)
