"""Counts the rows and sums that ranks fetch, and that hosts copy to devices, with ``partial_aggregation``.

:mod:`salientpp.ways.sums.plan` chooses the sums, as in loaders with ``partial_aggregation=``. 'auto' decides for or against sums by the same trial as in
loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from salientpp.analysis.job import Job
from salientpp.analysis.result import Copies, Summed, Volume
from salientpp.engine.producer import Drawn
from salientpp.store.tiers import IdSet, Tier, Tiers
from salientpp.vip.policies import plan_cache, score
from salientpp.ways.sums.moved import Moved
from salientpp.ways.sums.plan import Wire

#: Fractions of a part's rows on a device, for which copies are counted.
DEVICE_FRACTIONS = (0.0, 0.04, 0.2)


class SumTraffic:
    """Counts the rows and sums that one rank moves, for each replication factor and each fraction in :data:`DEVICE_FRACTIONS`.

    The cases with a replication factor come first. They count what the rank fetches. The cases with a fraction count what the rank's host copies to the device.

    Attributes:
        wire: bytes of a row and of the ids that move with it.
        moved: for each case, the totals of all epochs.
        asks: for each case, True if 'auto' uses sums; empty before :meth:`finish`. Other ranks compute the sums that a
            rank fetches. Its host computes the sums for the device.
    """

    def __init__(self, job: Job, number: int, alphas: Sequence[float]) -> None:
        self._engine, workload = job.engines[number], job.workloads[number]
        book, part_id = workload.book, workload.part_id
        self.wire = wire = Wire(job.widths[None], 4 if book.num_vertices < 2**31 else 8)
        home = Tier("host", None, {}, False, "")
        scores, size = score("vip", workload), book.size_of(part_id)
        #: For each case, a function that measures what a batch moves, and the bytes by which 'auto' decides.
        self._measures: list[tuple[Callable[[Any], Moved], Wire]] = []
        for alpha in alphas:
            members = IdSet.of(plan_cache(scores, book, part_id, alpha), book.num_vertices)
            tiers = Tiers(book, part_id, home, copies=[Tier("cache", members, {}, False, "")])
            self._measures.append((partial(Moved.between_ranks, tiers=tiers, wire=wire), wire))
        for beta in DEVICE_FRACTIONS:
            members = IdSet.of(torch.arange(int(beta * size), device="cpu"), size)
            tiers = Tiers(book, part_id, home, near=[Tier("device", members, {}, True, "")] if beta else [])
            self._measures.append((partial(Moved.to_device, tiers=tiers, wire=wire), wire.of_copies))
        self.moved = [Moved()] * len(self._measures)
        self.asks: list[bool] = []

    def measure(self, batch: Drawn) -> list[Moved]:
        return [measure(batch.mfg) for measure, _ in self._measures]

    def add(self, epoch: int, measured: list[Moved]) -> None:
        self.moved = [total + one for total, one in zip(self.moved, measured)]

    def finish(self) -> None:
        """Call it after the last epoch. It runs the trial by which 'auto' decides, sets ``asks``, and releases the memory of the caches."""
        tried = list(self._engine.dry(0, lambda batch: batch.mfg, self._engine.basis.trial_turns))
        self.asks = [sum(map(measure, tried), Moved()).is_worth_it(wire) for measure, wire in self._measures]
        self._measures = []


def volumes(ranks: Sequence[SumTraffic], vip: Sequence[Volume], epochs: int) -> tuple[list[Volume], list[Copies]]:
    """Returns two lists of results over all ranks.

    The first has what ranks fetch with sums, for each static cache in ``vip`` and in its memory. The second has what hosts copy to devices, for each of
    :data:`DEVICE_FRACTIONS`.
    """
    wire, found, copies = ranks[0].wire, [], []
    moved, asks = list(zip(*(each.moved for each in ranks))), list(zip(*(each.asks for each in ranks)))
    for own, by_rank, auto in zip(vip, moved, asks):
        total, rows = sum(by_rank, Moved()), [each.rows / epochs for each in by_rank]
        sums, sums_by_rank = total.sums / epochs, tuple(each.sums / epochs for each in by_rank)
        bytes_with, without = total.bytes(wire) / epochs, wire.bytes_of(total.whole_rows) / epochs
        share = bytes_with / without if without else 1.0
        summed = Summed(sums, total.sources / epochs, bytes_with, without, sums_by_rank, auto, share)
        volume = own.beside("sums", rows, sum(rows) + sums, summed=summed)
        found.append(replace(volume, remote_bytes_per_epoch=bytes_with))
    for beta, by_rank, auto in zip(DEVICE_FRACTIONS, moved[len(vip) :], asks[len(vip) :]):
        total = sum(by_rank, Moved())
        copied, sums, without = total.rows / epochs, total.sums / epochs, total.whole_rows / epochs
        share = (copied + sums) / without if without else 1.0
        copies.append(Copies(vip[0].num_neighbors, beta, without, copied, sums, total.sources / epochs, auto, share))
    return found, copies
