"""Cache of neighbour lists: copies of the lists of other parts that batches are most likely to read.

The ranks choose and copy the lists once, when the loader is made. Requests to other ranks then leave out these lists (:mod:`salientpp.sampling.part_topology`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.together import by_part, by_rank, exchange_packets
from salientpp.engine.way import TiersByType, Way
from salientpp.ranks.shared_memory import shared_tensors
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
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.packets import NO_BYTES, pack, unpack
from salientpp.sampling.part_topology import CopiedLists, PartTopology
from salientpp.sampling.seeds import list_sums_of
from salientpp.store.exchange import FILL_CHUNK_BYTES
from salientpp.ways.cache import pooled


class TopologyCache(Way):
    """Cache with a fixed set of neighbour lists. The ranks of a host share one.

    It has no effect if the topology is not divided among hosts.

    Args:
        num_bytes: bytes per host of the lists with their weights, times and attributes, and of their index.
    """

    name = "topology cache"

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.copied: CopiedLists | None = None

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        source = basis.source
        topology, sampler = source.rounds_topology, source.sampler
        if topology is not None and isinstance(sampler, NeighborSampler) and self._num_bytes:
            self.copied = topology.copied = self._filled(basis, topology, sampler)
        return tiers

    def memory(self) -> Mapping[str, int]:
        return {} if self.copied is None else {"topology_cache": self.copied.nbytes}

    def _filled(self, basis: Basis, topology: PartTopology, sampler: NeighborSampler) -> CopiedLists | None:
        """Chooses and copies the lists. Collective. Returns None if the bytes suffice for no list."""
        comm, start = basis.comm, basis.source.seeds.start
        assert start is not None  # the seeds of a partitioned graph always have `start`
        sums = list_sums_of(sampler, comm)
        reads = expected_reads(sums, start(basis.batch_size), sampler)
        degree = degrees(sums)
        del sums
        told = comm.gather_facts({"columns": columns_of(topology)})
        formats = formats_of(topology, [facts["columns"] for facts in told])
        if basis.ranks_by_host:
            # Each rank of a host asks for its own batches, so the numbers of reads add up.
            reads = pooled(basis.host, reads, Tensor.add_)
        members = chosen_members(topology, reads, degree, formats, self._num_bytes)
        shares = basis.ranks_by_host and basis.host.size > 1
        copies = Copies(
            topology, members, degree, formats, (lambda shapes: shared_tensors(basis.host, shapes)) if shares else None
        )
        _fill(basis, topology, copies, formats, shares=bool(shares))
        return copies.finished() if any(ids.numel() for ids in members) else None


def _fill(basis: Basis, topology: PartTopology, copies: Copies, formats: list[CopyFormat], shares: bool) -> None:
    """Fetches the lists from their owners in bounded chunks. Collective. With ``shares``, each rank of a host fetches some of the chunks."""
    exchange, comm = basis.source.exchange, basis.comm
    chunks = list(copies.chunks(max(1, FILL_CHUNK_BYTES // comm.size)))
    if shares:
        chunks = chunks[basis.host.rank :: basis.host.size]
    remaining, goes_on = iter(chunks), True
    while goes_on:
        chunk = next(remaining, None)
        wanted = [] if chunk is None else copies.wanted(*chunk)
        type_number, first, _ = chunk or (0, 0, 0)
        asks = {part: pack([row.new_tensor([type_number]), row]) for part, row in wanted}
        asked, flags = exchange_packets(exchange, by_rank(exchange, asks), chunk is not None)
        answers = [NO_BYTES] * comm.size
        for rank, packet in enumerate(asked):
            if packet.numel():
                type_, row = unpack(packet)
                answers[rank] = pack_lists(topology, int(type_), row, formats)
        arrived, _ = exchange_packets(exchange, answers, False)
        packets = by_part(exchange, asks, arrived)
        for part, row in wanted:
            copies.put(type_number, first, first + row.numel(), packets[part])
            first += row.numel()
        goes_on = any(flags)
    if shares:
        basis.host.gather_numbers([0])  # waits until the other ranks of the host have written their share
