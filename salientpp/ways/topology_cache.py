"""Cache of neighbour lists: copies of the lists of other parts that batches are most likely to read.

The ranks choose and copy the lists once, when the loader is made. Requests to other ranks then leave out these lists (:mod:`salientpp.sampling.part_topology`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.together import by_part, by_rank, exchange_packets
from salientpp.engine.way import Price, TiersByType, Way
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.sampling.copied_lists import (
    Copies,
    CopyFormat,
    bytes_of_copies,
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
from salientpp.sampling.topology import ids_by_type
from salientpp.store.exchange import fill_chunk_bytes
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
        self._chosen: _Chosen | None = None  # the copies that a plan considers; no list is copied

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        topology = self._topology(basis)
        if topology is not None:
            needs = _needs(basis, topology)
            members = chosen_members(topology, *needs, self._num_bytes)
            size = bytes_of_copies(topology, members, *needs[1:]) if any(ids.numel() for ids in members) else 0
            sizes = topology.part.num_vertices
            masks = [
                torch.zeros(number, dtype=torch.bool, device="cpu").index_fill_(0, ids, True)
                for ids, number in zip(members, sizes)
            ]
            self._chosen = _Chosen(topology, masks, size)
        return tiers

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        topology = self._topology(basis)
        if topology is not None:
            self.copied = topology.copied = self._filled(basis, topology)
        return tiers

    def on_drawn(self, mfg: Any) -> tuple[Any, float]:
        return mfg, 1.0 if self._chosen is None else self._chosen.share_left(mfg)

    def price(self, price: Price, notes: Sequence[float]) -> Price:
        return replace(price, lists=price.lists * sum(notes) / max(1, len(notes)))

    def memory(self) -> Mapping[str, int]:
        if self._chosen is not None:
            return {"topology_cache": self._chosen.num_bytes}
        return {} if self.copied is None else {"topology_cache": self.copied.nbytes}

    def _topology(self, basis: Basis) -> PartTopology | None:
        """Returns the topology that gets copies. None: this way has no effect."""
        source = basis.source
        return source.rounds_topology if isinstance(source.sampler, NeighborSampler) and self._num_bytes else None

    def _filled(self, basis: Basis, topology: PartTopology) -> CopiedLists | None:
        """Chooses and copies the lists. Collective. Returns None if the bytes suffice for no list."""
        reads, degree, formats = _needs(basis, topology)
        members = chosen_members(topology, reads, degree, formats, self._num_bytes)
        shares = basis.ranks_by_host and basis.host.size > 1
        copies = Copies(
            topology, members, degree, formats, (lambda shapes: shared_tensors(basis.host, shapes)) if shares else None
        )
        _fill(basis, topology, copies, formats, shares=bool(shares))
        return copies.finished() if any(ids.numel() for ids in members) else None


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Copies that a plan considers.

    Attributes:
        is_copied: per vertex type bool [N], True for vertices whose lists would be copied.
        num_bytes: bytes of the copies.
    """

    topology: PartTopology
    is_copied: Sequence[Tensor]
    num_bytes: int

    def share_left(self, mfg: Any) -> float:
        """Returns the share of a sample's requests and answers that remain. A vertex weighs as much as its draws and its id."""
        everything, left, topology = 0, 0, self.topology
        ids, hops = ids_by_type(mfg.node), _by_type(mfg.num_sampled_nodes)
        columns = _by_type(mfg.col)
        for type_, (name, book) in enumerate(zip(topology.part.node_types, topology.books)):
            relations = [number for number, (_, target) in enumerate(topology.ends) if target == type_]
            if name not in ids or book.num_parts == 1 or not relations:
                continue
            weight = torch.ones(ids[name].numel(), dtype=torch.int64, device="cpu")
            for number in relations:
                column = columns.get(topology.edge_types[number])
                if column is not None:
                    weight += torch.bincount(column, minlength=weight.numel())
            read = slice(None if hops is None or hops.get(name) is None else sum(hops[name][:-1]))  # not the last hop's
            expanded, weight = ids[name][read], weight[read]
            begin, end = book.range_of(topology.part_id)
            elsewhere = (expanded < begin) | (expanded >= end)
            everything += int(weight[elsewhere].sum())
            left += int(weight[elsewhere & ~self.is_copied[type_][expanded]].sum())
        return left / everything if everything else 1.0


def _by_type(values: Any) -> Mapping[Any, Any]:
    """Returns values of a sample by type. The type is None if there is only one."""
    return values if isinstance(values, Mapping) else {None: values}


def bytes_of_all_lists(basis: Basis) -> int:
    """Returns the bytes of copies of all lists of other parts. 0 if the topology is not divided among hosts. Collective."""
    topology = basis.source.rounds_topology
    if topology is None or not isinstance(basis.source.sampler, NeighborSampler):
        return 0
    _, degree, formats = _needs(basis, topology)
    return bytes_of_copies(topology, None, degree, formats)


#: Expected reads per vertex type, lengths of lists per relation, and formats of copies per relation.
_Needs = tuple[Mapping["str | None", Tensor], list[Tensor], list[CopyFormat]]


def _needs(basis: Basis, topology: PartTopology) -> _Needs:
    """Returns the facts from which copies are chosen. Collective."""

    def gather() -> _Needs:
        comm, start, sampler = basis.comm, basis.source.seeds.start, basis.source.sampler
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
        return reads, degree, formats

    return basis.once("lists", gather)


def _fill(basis: Basis, topology: PartTopology, copies: Copies, formats: list[CopyFormat], shares: bool) -> None:
    """Fetches the lists from their owners in bounded chunks. Collective. With ``shares``, each rank of a host fetches some of the chunks."""
    exchange, comm = basis.source.exchange, basis.comm
    # A rank answers up to this many requests at once.
    chunks = list(copies.chunks(max(1, fill_chunk_bytes(copies.nbytes) // comm.size)))
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
