"""How many bytes would cross the network, if owners summed up what they can, and how many rows would be copied to devices, if hosts did?

Counted are the very rows and sums that loaders with ``partial_aggregation=`` fetch: the same plan (:mod:`salientpp.ways.sums.plan`) for the batches that
they make
for the same seed, with the rows that their caches have. Whether 'auto' asks for sums follows from the same trial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch_geometric.sampler import SamplerOutput

from salientpp.sampling.sampler import Sampler
from salientpp.sampling.schedule import Schedule
from salientpp.store.tiers import IdSet, Tier, Tiers
from salientpp.vip.policies import Workload, plan_cache, score
from salientpp.ways.lookahead.planner import Trial
from salientpp.ways.sums.moved import Moved, are_copies_worth_it, are_fetches_worth_it
from salientpp.ways.sums.plan import Wire

#: Of a part's rows, what a device has for which copies are counted.
GPU_FRACTIONS = (0.0, 0.04, 0.2)

#: Batches counted ahead, per thread.
_AHEAD = 4


@dataclass(frozen=True)
class PartialVolume:
    """What is fetched per epoch over all K parts, with one replication factor and the policy 'vip'; means over epochs.

    Attributes:
        fanouts, replication_factor: of the cache.
        rows_per_epoch, sums_per_epoch, sources_per_epoch: rows, sums in the place of rows, and rows in these sums.
        bytes_per_epoch, bytes_without: of requests and answers with sums and without, but for the messages that say how many there are, which are 16 bytes
            longer with sums, per batch and other rank.
        rows_per_part, sums_per_part: the first two by part.
        auto: by part, whether 'auto' asks for sums.
    """

    fanouts: tuple[int, ...]
    replication_factor: float
    rows_per_epoch: float
    sums_per_epoch: float
    sources_per_epoch: float
    bytes_per_epoch: float
    bytes_without: float
    rows_per_part: tuple[float, ...]
    sums_per_part: tuple[float, ...]
    auto: tuple[bool, ...]

    @classmethod
    def of(
        cls, fanouts: tuple[int, ...], alpha: float, epochs: int, parts: Sequence[tuple[Moved, Wire, bool]]
    ) -> PartialVolume:
        """Of what the parts fetch in so many epochs, and whether they ask for sums by themselves."""
        every, wire = sum((fetched for fetched, _, _ in parts), Moved()), parts[0][1]
        return cls(
            fanouts,
            alpha,
            every.rows / epochs,
            every.sums / epochs,
            every.sources / epochs,
            every.bytes(wire) / epochs,
            wire.bytes_of(every.whole_rows) / epochs,
            tuple(fetched.rows / epochs for fetched, _, _ in parts),
            tuple(fetched.sums / epochs for fetched, _, _ in parts),
            tuple(asks for _, _, asks in parts),
        )

    @property
    def share(self) -> float:
        """Bytes with sums over those without."""
        return self.bytes_per_epoch / self.bytes_without if self.bytes_without else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class PartialCopies:
    """What of their own parts' rows hosts copy to a device per epoch over all K parts, if it has the first rows of each part; means over epochs.

    Attributes:
        fanouts, gpu_fraction: β, the part of the rows that a device has.
        rows_without: without sums.
        rows_per_epoch, sums_per_epoch, sources_per_epoch: rows, sums in the place of rows, and rows in these sums.
        auto: by part, whether 'auto' has its host sum up.
    """

    fanouts: tuple[int, ...]
    gpu_fraction: float
    rows_without: float
    rows_per_epoch: float
    sums_per_epoch: float
    sources_per_epoch: float
    auto: tuple[bool, ...]

    @classmethod
    def of(
        cls, fanouts: tuple[int, ...], beta: float, epochs: int, parts: Sequence[tuple[Moved, Wire, bool]]
    ) -> PartialCopies:
        """Of what the parts' hosts copy in so many epochs, and whether they sum up by themselves."""
        every, worth_it = sum((moved for moved, _, _ in parts), Moved()), tuple(asks for _, _, asks in parts)
        return cls(
            fanouts,
            beta,
            every.whole_rows / epochs,
            every.rows / epochs,
            every.sums / epochs,
            every.sources / epochs,
            worth_it,
        )

    @property
    def share(self) -> float:
        """Rows and sums over rows without."""
        copied = self.rows_per_epoch + self.sums_per_epoch
        return copied / self.rows_without if self.rows_without else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "share": self.share}


def count_sums(
    workload: Workload,
    schedule: Schedule,
    alphas: Sequence[float],
    *,
    row_bytes: int,
    epochs: int,
    shared: bool = False,
    draw_block: int = 1,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[list[tuple[Moved, Wire, bool]], list[tuple[Moved, Wire, bool]]]:
    """What one part fetches in all epochs, for every replication factor, and what its host copies, for every one of :data:`GPU_FRACTIONS`; what moves for a
    row; and whether 'auto' asks for sums.

    Args:
        workload, schedule: of the part; it plans as loaders do.
        row_bytes: of a row.
        epochs: to count.
        shared, draw_block: how batches are drawn.
        on_batch: called after each batch.
    """
    book, part_id = workload.book, workload.part_id
    wire = Wire(row_bytes, 4 if book.num_vertices < 2**31 else 8)
    sampler = Sampler(workload.graph, workload.num_neighbors, workload.replace, shared)
    home = Tier("cpu", None, {}, False, "")
    scores = score("vip", workload)
    tiers = []
    for alpha in alphas:
        members = IdSet.of(plan_cache(scores, book, part_id, alpha), book.num_vertices)
        tiers.append(Tiers(book, part_id, home, copies=[Tier("cache", members, {}, False, "")]))
    size, device_tiers = book.size_of(part_id), []
    for beta in GPU_FRACTIONS:
        members = IdSet.of(torch.arange(int(beta * size), device="cpu"), size)
        device_tiers.append(Tiers(book, part_id, home, near=[Tier("gpu", members, {}, True, "")] if beta else ()))

    def drawn(epoch: int, only: Sequence[int] | None = None) -> Iterator[SamplerOutput]:
        for batch in schedule.drawn(workload.seeds, epoch, draw_block, only):
            yield sampler.sample(*batch)

    def count(mfg: SamplerOutput) -> list[Moved]:
        fetched = [Moved.between_ranks(mfg, of_alpha, wire) for of_alpha in tiers]
        return fetched + [Moved.to_device(mfg, of_beta, wire) for of_beta in device_tiers]

    total = [Moved() for _ in (*tiers, *device_tiers)]

    def add(pending: Future[list[Moved]]) -> None:
        for place, fetched in enumerate(pending.result()):
            total[place] += fetched
        on_batch()

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="salientpp-sums") as pool:
        under_way: deque[Future[list[Moved]]] = deque()
        for epoch in range(epochs):
            for mfg in drawn(epoch):
                under_way.append(pool.submit(count, mfg))
                if len(under_way) > _AHEAD * threads:
                    add(under_way.popleft())
        while under_way:
            add(under_way.popleft())
    tried = list(drawn(0, Trial.batches(schedule.num_batches)))
    fetched = [(moved, wire, are_fetches_worth_it(tried, of_alpha, wire)) for moved, of_alpha in zip(total, tiers)]
    copied = zip(total[len(tiers) :], device_tiers)
    return fetched, [(moved, wire.of_copies, are_copies_worth_it(tried, of_beta, wire)) for moved, of_beta in copied]
