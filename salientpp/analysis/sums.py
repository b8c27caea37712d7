"""Counts the rows and sums that ranks fetch, and copy to devices, where owners and hosts sum up what they can.

The plan (:mod:`salientpp.ways.sums.plan`) is that of loaders with ``partial_aggregation=``. Whether 'auto' asks for sums follows from the same trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from salientpp.analysis.result import Copies, Summed
from salientpp.engine.engine import Engine
from salientpp.engine.producer import Drawn
from salientpp.store.tiers import IdSet, Tier, Tiers
from salientpp.vip.policies import Workload, plan_cache, score
from salientpp.ways.sums.moved import Moved, are_copies_worth_it, are_fetches_worth_it
from salientpp.ways.sums.plan import Wire

#: Of a part's rows, what a device has for which copies are counted.
DEVICE_FRACTIONS = (0.0, 0.04, 0.2)


class Sums:
    """What one rank fetches, for every replication factor, and what its host copies, for every one of :data:`DEVICE_FRACTIONS`.

    Args:
        workload: of the rank's part; it plans as loaders do.

    Attributes:
        wire: what moves for a row.
        fetched, copied: in all epochs.
        asks: once finished, whether 'auto' asks for sums, by replication factor, and whether its host makes them, by β.
    """

    edges = True

    def __init__(self, engine: Engine, workload: Workload, alphas: Sequence[float], row_bytes: int) -> None:
        book, part_id = workload.book, workload.part_id
        self._engine, self.wire = engine, Wire(row_bytes, 4 if book.num_vertices < 2**31 else 8)
        home = Tier("host", None, {}, False, "")
        scores = score("vip", workload)
        self._tiers = []
        for alpha in alphas:
            members = IdSet.of(plan_cache(scores, book, part_id, alpha), book.num_vertices)
            self._tiers.append(Tiers(book, part_id, home, copies=[Tier("cache", members, {}, False, "")]))
        size, self._device_tiers = book.size_of(part_id), []
        for beta in DEVICE_FRACTIONS:
            members = IdSet.of(torch.arange(int(beta * size), device="cpu"), size)
            near = [Tier("device", members, {}, True, "")] if beta else []
            self._device_tiers.append(Tiers(book, part_id, home, near=near))
        self.fetched = [Moved() for _ in self._tiers]
        self.copied = [Moved() for _ in self._device_tiers]

    def measure(self, batch: Drawn) -> tuple[list[Moved], list[Moved]]:
        mfg: Any = batch.mfg  # of one type
        fetched = [Moved.between_ranks(mfg, tiers, self.wire) for tiers in self._tiers]
        return fetched, [Moved.to_device(mfg, tiers, self.wire) for tiers in self._device_tiers]

    def add(self, epoch: int, measured: tuple[list[Moved], list[Moved]]) -> None:
        self.fetched, self.copied = (
            [sum_ + one for sum_, one in zip(total, own)]
            for total, own in zip((self.fetched, self.copied), measured)
        )  # fmt: skip

    def finish(self) -> None:
        """After the last epoch: see ``asks``, and let go of what found rows."""
        tried: list[Any] = list(self._engine.dry(0, lambda batch: batch.mfg, self._engine.basis.trial_turns))
        self.asks = (
            [are_fetches_worth_it(tried, tiers, self.wire) for tiers in self._tiers],
            [are_copies_worth_it(tried, tiers, self.wire) for tiers in self._device_tiers],
        )
        self._tiers, self._device_tiers = [], []


def over_ranks(ranks: Sequence[Sums], fanouts: tuple[Any, ...], epochs: int) -> tuple[list[Summed], list[Copies]]:
    """The figures of all ranks, by replication factor and by β."""
    asks, wire = [each.asks for each in ranks], ranks[0].wire
    summed, copies = [], []
    for a, fetched in enumerate(zip(*(each.fetched for each in ranks))):
        total = sum(fetched, Moved())
        with_sums, without = total.bytes(wire) / epochs, wire.bytes_of(total.whole_rows) / epochs
        summed.append(
            Summed(
                total.sums / epochs,
                total.sources / epochs,
                with_sums,
                without,
                tuple(each.sums / epochs for each in fetched),
                tuple(fetches[a] for fetches, _ in asks),
                with_sums / without if without else 1.0,
            )
        )
    for b, (beta, copied) in enumerate(zip(DEVICE_FRACTIONS, zip(*(each.copied for each in ranks)))):
        total = sum(copied, Moved())
        rows, sums, without = total.rows / epochs, total.sums / epochs, total.whole_rows / epochs
        share = (rows + sums) / without if without else 1.0
        auto = tuple(made[b] for _, made in asks)
        copies.append(Copies(fanouts, beta, without, rows, sums, total.sources / epochs, auto, share))
    return summed, copies
