"""Counts the requests for neighbour lists that the ranks of a job send if the topology is stored in parts, with caches of lists of several sizes.

This process holds the lists of all hosts. It draws each batch as a rank would, and gives it the answers that the owners of the lists would give. So the
counted bytes are the bytes of the packets of a run (:mod:`salientpp.sampling.requests`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from salientpp.analysis.graph import read_sent
from salientpp.analysis.job import Job
from salientpp.analysis.result import ListTraffic
from salientpp.engine.basis import Basis
from salientpp.engine.source import BatchSource
from salientpp.processes import in_order
from salientpp.progress import Progress
from salientpp.sampling.copied_lists import (
    Copies,
    CopyFormat,
    chosen_members,
    columns_of,
    degrees,
    expected_reads,
    formats_of,
    pack_lists,
)
from salientpp.sampling.held_lists import Reads
from salientpp.sampling.in_rounds import answer_joined
from salientpp.sampling.part_topology import Packets, PartTopology, topology_of_part
from salientpp.sampling.schedule import Turn
from salientpp.sampling.seeds import list_sums_of
from salientpp.store.exchange import fill_chunk_bytes


@dataclass(eq=False)
class _Count:
    """Expansions, rounds with requests, and bytes that each rank sends and receives."""

    reads: Reads = field(default_factory=Reads)
    rounds: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)

    def note(self, sender: int, receiver: int, packet: Tensor) -> None:
        self.sent[sender] += packet.numel()
        self.received[receiver] += packet.numel()

    def add(self, more: _Count) -> None:
        self.reads, self.rounds = self.reads.plus(more.reads), self.rounds + more.rounds
        self.sent.update(more.sent)
        self.received.update(more.received)


class Lists:
    """The lists of all hosts of a job, and the copies that caches of several sizes hold.

    Args:
        budgets: bytes per host.
        send_as: formats in which rows travel, as in :class:`salientpp.NeighborLoader`.
    """

    def __init__(self, job: Job, budgets: Sequence[int], send_as: Mapping[Any, str] | None = None) -> None:
        self._job, self._budgets = job, budgets
        held = {view.exchange.part_id: view.held for view in job.views}
        attributes = job.batches.time_attr, job.batches.weight_attr
        self._parts = [topology_of_part(held[part], *attributes) for part in sorted(held)]
        _, of_edges = read_sent(job.views[0].held, send_as)
        for topology in self._parts:
            topology.seeds_are_held = not job.batches.link
            topology.send_edges_as(of_edges)
        sampler: Any = job.engines[0].basis.source.sampler
        sums = list_sums_of(sampler, job.engines[0].basis.comm)
        self._reads = [expected_reads(sums, _start(basis), sampler) for basis in job.units]
        self._degree = degrees(sums)
        self._formats = formats_of(self._parts[0], [columns_of(topology) for topology in self._parts])
        #: For each host, its topology with each budget.
        self._hosts = [[self._with_copies(host, budget) for budget in budgets] for host in job.hosts]

    def count(self, epochs: int, progress: Progress) -> list[ListTraffic]:
        """Counts ``epochs`` epochs, and predicts one. Returns the figures for each budget."""
        found = []
        for number, budget in enumerate(self._budgets):
            counts = []
            for rank in range(len(self._job.engines)):
                progress.begin(f"lists of other parts, {budget:,} bytes of copies: rank {rank}")
                counts.append(self._count_rank(rank, number, epochs))
            found.append(self._figures(number, budget, counts, epochs))
        return found

    def _with_copies(self, host: range, budget: int) -> PartTopology:
        """Returns the topology of a host with its copies, as :class:`salientpp.ways.topology_cache.TopologyCache` makes them."""
        topology = copy.copy(self._parts[self._job.views[host.start].exchange.part_id])
        pool: dict[str | None, Tensor] = {
            name: torch.zeros(of_type.numel(), dtype=torch.float64, device="cpu")
            for name, of_type in self._reads[0].items()
        }
        for rank in host:
            for name, of_type in self._reads_of(rank).items():
                pool[name] += of_type
        members = chosen_members(topology, pool, self._degree, self._formats, budget)
        if any(ids.numel() for ids in members):
            topology.copied = _filled(
                Copies(topology, members, self._degree, self._formats), self._parts, self._formats
            )
        return topology

    def _reads_of(self, rank: int) -> Mapping[str | None, Tensor]:
        own = self._job.views[rank].own_part
        return self._reads[[basis.epochs.placement.own_part for basis in self._job.units].index(own)]

    def _topology(self, rank: int, number: int) -> PartTopology:
        return next(of_host[number] for host, of_host in zip(self._job.hosts, self._hosts) if rank in host)

    def _count_rank(self, rank: int, number: int, epochs: int) -> _Count:
        basis = self._job.engines[rank].basis
        sampler: Any = copy.copy(basis.source.sampler)
        sampler.topology = self._topology(rank, number)
        source, total = replace(basis.source, sampler=sampler), _Count()
        for epoch in range(epochs):
            turns = basis.epochs.order.of_epoch(epoch)
            for one in in_order(partial(self._count_batch, basis, source, epoch), turns, "salientpp-lists"):
                total.add(one)
        return total

    def _count_batch(self, basis: Basis, source: BatchSource, epoch: int, turn: Turn) -> _Count:
        placement, count = basis.epochs.placement, _Count()
        drawing = source.drawing_joined(basis.epochs.pieces(epoch, turn))
        answers: Packets | None = None
        while True:
            try:
                asks = drawing.send(answers)
            except StopIteration as end:
                count.reads = end.value.reads
                return count
            count.rounds += bool(asks)
            answers = {part: answer_joined(self._parts[part], packet) for part, packet in asks.items()}
            for part, packet in asks.items():
                owner = placement.server_of(part)
                count.note(placement.rank, owner, packet)
                count.note(owner, placement.rank, answers[part])

    def _figures(self, number: int, budget: int, counts: Sequence[_Count], epochs: int) -> ListTraffic:
        job, ranks = self._job, range(len(counts))
        batches = [engine.basis.epochs.order.num_batches for engine in job.engines]
        everything, elsewhere = 0.0, 0.0
        for rank, num_batches in zip(ranks, batches):
            own_everything, own_elsewhere = self._predicted(rank, number)
            everything += num_batches * own_everything
            elsewhere += num_batches * own_elsewhere
        total = _Count()
        for one in counts:
            total.add(one)
        counted: dict[str, Any] = {}
        if epochs:
            own, copied, remote = (each / epochs for each in total.reads)
            counted = {
                "expansions_own": own,
                "expansions_copied": copied,
                "expansions_remote": remote,
                "list_bytes_per_epoch": sum(total.sent.values()) / epochs,
                "list_rounds_per_epoch": total.rounds / epochs,
                "list_rounds_per_batch": total.rounds / epochs / max(1, sum(batches)),
                "expansions_per_rank": tuple(tuple(each / epochs for each in one.reads) for one in counts),
                "bytes_sent_per_rank": tuple(total.sent[rank] / epochs for rank in ranks),
                "bytes_received_per_rank": tuple(total.received[rank] / epochs for rank in ranks),
                "rounds_per_rank": tuple(one.rounds / epochs for one in counts),
            }
        copies = [of_host[number].copied for of_host in self._hosts]
        return ListTraffic(
            num_neighbors=job.batches.numbers,
            topology_cache=budget,
            copied_bytes=tuple(0 if each is None else each.nbytes for each in copies),
            predicted_remote=elsewhere,
            predicted_local_share=1 - elsewhere / everything if everything else 1.0,
            **counted,
        )

    def _predicted(self, rank: int, number: int) -> tuple[float, float]:
        """Returns the expected number of vertices that a batch of a rank expands, and the number of those whose lists the rank requests."""
        topology, everything, elsewhere = self._topology(rank, number), 0.0, 0.0
        reads = list(self._reads_of(rank).values())
        for type_ in {target for _, target in topology.ends}:
            of_type, book = reads[type_].to(torch.float64), topology.books[type_]
            begin, end = book.range_of(topology.part_id)
            total = float(of_type.sum())
            held = float(of_type[begin:end].sum())
            if topology.copied is not None:
                held += float(of_type[topology.copied.members[type_].ids].sum())
            everything, elsewhere = everything + total, elsewhere + total - held
        return everything, max(0.0, elsewhere)


def _start(basis: Basis) -> Any:
    start = basis.source.seeds.start
    assert start is not None  # the seeds of a partitioned graph always have `start`
    return start(basis.batch_size)


def _filled(copies: Copies, parts: Sequence[PartTopology], formats: Sequence[CopyFormat]) -> Any:
    for type_, first, last in copies.chunks(fill_chunk_bytes(copies.nbytes)):
        for part, row in copies.wanted(type_, first, last):
            copies.put(type_, first, first + row.numel(), pack_lists(parts[part], type_, row, formats))
            first += row.numel()
    return copies.finished()
