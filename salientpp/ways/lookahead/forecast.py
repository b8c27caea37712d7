"""Forecasts, without sampling, how many rows a cache fetches whose rank knows its next batches; docs/concepts.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.vip.policies import Workload
from salientpp.vip.shared import block_probability

#: With a window of W batches uses are found again that are up to W / LATE batches apart, as many as with all of the future: fitted to counts on two graphs,
#: with which the forecast then agrees within 0.02 for windows of half of T* to 3 T*. How far apart uses are that are kept varies from batch to batch.
LATE = 1.2


@dataclass(frozen=True)
class Trial:
    """What the ids of a batch take, as the mean over some batches.

    Attributes:
        num_ids: distinct remote rows of a batch.
        list_bytes: of their ids, as :func:`salientpp.ops.code_ids` codes them.
    """

    num_ids: float
    list_bytes: float

    @classmethod
    def of(cls, lists: Sequence[Tensor], num_ids: int) -> Trial:
        """Of lists of ids of [0, ``num_ids``)."""
        number = max(1, len(lists))
        return cls(
            sum(ops.ids_of_list(each, num_ids).numel() for each in lists) / number,
            sum(each.nbytes for each in lists) / number,
        )

    @classmethod
    def expected(cls, probability: Tensor) -> Trial:
        """Without any batch, of how probably one needs each remote row: a little too much, as the sum of the probabilities is."""
        number = float(probability.sum(dtype=torch.float64))
        bits = number * (2 + math.log2(probability.numel() / number)) if number > 0 else 0.0
        return cls(number, 1 + min(bits, probability.numel()) / 8 + 1)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Batches whose draws agree in blocks, so that a row which one of them needs is needed by others too.

    Attributes:
        size: batches of a block, b.
        probability: float [N], how probably any batch of a block needs each row, as :func:`salientpp.vip.shared.block_probability` gives it.
    """

    size: int
    probability: Tensor

    @classmethod
    def of(cls, workload: Workload, draw_block: int, num_batches: int, shared: bool) -> Blocks | None:
        """Of a part's batches; None if every batch draws by itself. ``shared``: vertices of a batch draw alike too."""
        size = min(draw_block, num_batches)
        if size <= 1:
            return None
        drawn = workload.graph, workload.seeds, workload.num_neighbors, workload.batch_size, size
        return cls(size, block_probability(*drawn, "batch" if shared else None))


def _as_counted(probability: Tensor, trial: Trial) -> Tensor:
    """The same rows, as many of them in a batch as those that were tried have: batches of a clustered graph have fewer than the formula says."""
    expected = float(probability.sum(dtype=torch.float64))
    return probability * (trial.num_ids / expected) if expected > 0 else probability


@dataclass(frozen=True, eq=False)
class Spread:
    """How many rows have which probability: by descending probability ``chance`` and ``count``, float64 [bins].

    Batches are taken to be independent of each other, or in blocks, and a row to be in each with its probability p. A row is kept between two uses if they are
    at most T batches apart. Then, with q = 1 - p, ``sum_v 1 - q^T (1 + p T)`` rows are there at a time, and ``sum_v p (1 - q^T)`` are found per batch; T* is
    where the former fill the slots.

    Attributes:
        in_block: of the same rows, how probably a block has them; each of its batches then needs them with ``chance / in_block``, independently. None:
            every batch draws by itself.
        block: batches of a block.
    """

    chance: Tensor
    count: Tensor
    in_block: Tensor | None = None
    block: int = 1

    @classmethod
    def of(cls, probability: Tensor, blocks: Blocks | None = None, trial: Trial | None = None) -> Spread:
        """Of float [N], how probably a batch needs each remote row; ``trial`` says, with ``blocks``, how many rows a batch has."""
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
        """How probably a row does not come again within so many batches, and the sum of that over all smaller numbers of them.

        A use stands anywhere in its block, with r batches of that after it; later blocks have the row or not, whatever this one did.
        """
        assert self.in_block is not None  # else draws do not agree
        size, places = self.block, min(self.block, 16)
        needed = self.in_block
        # How probably a batch of a block that has it does not need it.
        idle = (1 - self.chance / needed).clamp(1e-12, 1 - 1e-12)
        rest = ((torch.arange(places, dtype=torch.float64, device="cpu") + 0.5) * size / places).floor().view(-1, 1)

        def summed(number: Tensor) -> Tensor:  # of idle**j for j < number
            return (1 - idle**number) / (1 - idle)

        inside = rest.clamp(max=batches)
        beyond = (batches - rest).clamp(min=0)
        blocks, part = (beyond / size).floor(), beyond % size
        none = 1 - needed + needed * idle**size  # of a whole block
        later = none**blocks * (1 - needed + needed * idle**part)
        unused = idle**inside * later
        of_block = (1 - needed) * size + needed * summed(torch.tensor(float(size), device="cpu"))
        waited = of_block * (1 - none**blocks) / (1 - none).clamp(min=1e-12)
        waited = waited + none**blocks * ((1 - needed) * part + needed * summed(part))
        return unused.mean(0), (summed(inside) + idle**rest * waited).mean(0)

    def _within(self, batches: float) -> tuple[Tensor, Tensor]:
        """How probably a row comes again within so many batches, and how probably it is between two uses that are at most so far apart.

        Part of a batch means that part of the rows that come again just in that one.
        """
        if math.isinf(batches):
            return torch.ones_like(self.chance), torch.ones_like(self.chance)
        first, part = int(batches), batches - int(batches)
        ends = zip(self._whole(first), self._whole(first + 1))
        again, kept = ((1 - part) * one + part * other for one, other in ends)
        return again, kept

    def reach(self, num_slots: float) -> float:
        """T*: with uses that far apart the rows between them fill the slots; infinite if these hold everything. A longer window saves no more."""
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

    def _used(self, batches: float) -> float:
        return float((self.count * self._within(batches)[1]).sum())

    def rows(self, num_slots: float, window: float) -> float:
        """Rows fetched per batch, with a window of 0 by the static cache, with an infinite one by all of the future.

        With a window that is shorter than T* the hottest rows are kept always, and of the others what comes again inside it.
        """
        chance, count = self.chance, self.count
        all_rows = float((chance * count).sum())
        if num_slots >= float(count.sum()):
            return 0.0
        batches = min(window / LATE, self.reach(num_slots)) if window else 0.0
        again, kept = self._within(batches)
        # Each of the hottest bins takes its rows whole, until the slots are full.
        more = (count * (1 - kept)).cumsum(0)
        spare = max(0.0, num_slots - float((count * kept).sum()))
        whole = ((spare - (more - count * (1 - kept))) / (count * (1 - kept)).clamp(min=1e-300)).clamp(0, 1)
        hits = count * chance * (whole + (1 - whole) * again)
        return max(0.0, all_rows - float(hits.sum()))


def _has_row(chance: Tensor, needed: Tensor, size: int) -> Tensor:
    """How probably a block of ``size`` batches has a row that a batch needs with ``chance`` and any of the block with ``needed``.

    It has it with A, and then each batch needs it with q: ``A q = chance`` and ``A (1 - (1 - q)^size) = needed``.
    """
    low, high = chance.clone(), torch.ones_like(chance)  # of q
    for _ in range(50):
        middle = (low + high) / 2
        too_small = (1 - (1 - middle) ** size) / middle > needed / chance
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return (chance / high).clamp(max=1.0)
