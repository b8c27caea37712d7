"""Partial aggregation: owners send sums instead of rows, if the sums take fewer bytes.

After a batch is drawn, its missing rows are looked up, and :mod:`salientpp.ways.sums.plan` decides which of them arrive whole. It decides first about rows
of other ranks and then, for a device, about rows of the host. Vertices and edges that sums replace leave the batch before it is built. Later steps see a
smaller batch with requests for sums. The user's model adds the sums by :func:`salientpp.nn.merge_partial`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import SamplerOutput

from salientpp.engine.basis import Basis
from salientpp.engine.trace import WORKER, traced
from salientpp.engine.way import HostWork, Price, TiersByType, Wanted, Way
from salientpp.engine.workers import SamplingWorkers
from salientpp.processes import Lock, Threads
from salientpp.sampling.edge_rows import EdgeRowsByType, take_edge_rows
from salientpp.store.exchange import Column, Message
from salientpp.store.fetch import Fetch, Taken
from salientpp.store.rows import empty_rows
from salientpp.store.thread_groups import Balance
from salientpp.ways.sums.check import edge_rows_of, first_edge_of
from salientpp.ways.sums.marked import EDGE_WEIGHTS, EDGES, ROWS, Delivered, mark
from salientpp.ways.sums.moved import SOURCES, SUMS, WEIGHTS, Moved, host_sums_of, put_sums, sums_of
from salientpp.ways.sums.plan import AskedSums, PartialAggregation, Wire

#: Key under which the sums that a host computes for its own device stand beside the vertex types.
_OF_HOST = "(sums of the host)"


class Partial(NamedTuple):
    """Sums that replace rows of a batch, in ``batch.partial``. Other ranks compute them and, for a batch on a device, also the host.

    Attributes:
        target: int64 [m], positions in the batch of the vertices whose neighbours are summed. A vertex occurs once for each
            part, and for each tier of the host, that holds some of these neighbours.
        value: [m, ...], sum, mean or maximum of these neighbours, in the dtype of ``x``.
        count: int64 [m], number of these neighbours; a neighbour that was drawn twice counts twice.
        reduction: 'sum', 'mean' or 'max'.
        weight: name of the batch's edge weights, if each row was multiplied by its weight first; a mean still divides by the number of rows.
    """

    target: Tensor
    value: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple's method has this name
    reduction: str
    weight: str | None = None


@dataclass(frozen=True, eq=False)
class Note:
    """Decision of :class:`SumsOfRows` about one batch, which later steps of this batch read: its sums, and the weights of rows in them."""

    sums: AskedSums  # requests to other ranks, besides those for rows
    weight: Tensor | None  # weights of the rows in `sums`, as words of the message
    here: AskedSums | None  # sums that the host computes for the device, by tier and slot
    here_weight: Tensor | None  # weights of the rows in `here`


def messages_of(reduction: Any, weight: Any) -> Sequence[Message]:
    """Returns the messages by which ranks ask one another for sums; the loader checks these arguments later."""
    if reduction is None:
        return ()
    return (SUMS, SOURCES) if weight is None else (SUMS, SOURCES, WEIGHTS)


class SumsOfRows(Way):
    """Replaces neighbours of the last hop by sums, means or maxima, which are computed where the rows are stored.

    Args:
        reduction: 'sum', 'mean' or 'max'; 'auto': 'mean', if a trial shows that it saves enough.
        weight: the edge attribute that rows are multiplied by; None: rows are summed as they are.

    Attributes:
        asks: True if this rank asks for sums where they take fewer bytes; it answers the requests of others in any case.
        sums_here: True if the host sums its own rows where that means fewer bytes to copy to a device.
    """

    name = "sums"
    needs_stages = True  # a single rank then gives batches of the same form

    def __init__(self, reduction: PartialAggregation, weight: str | None) -> None:
        self.messages = messages_of(reduction, weight)
        self._is_tried = reduction == "auto"
        self._reduction: str = "mean" if reduction is None or reduction == "auto" else reduction
        self._weight_name = weight
        self.asks, self.sums_here = True, False
        self._counts: Counter[str] = Counter()
        self._counting = Lock()

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        self._decide(basis, tiers)
        return tiers

    def _decide(self, basis: Basis, tiers: TiersByType) -> None:
        """Prepares the choice of sums, and decides whether to ask for sums at all."""
        source, name = basis.source, self._weight_name
        self._tiers, self._repeats = tiers[None], basis.repeats
        (column,) = source.exchanged
        self._column, wire_dtype = column, source.exchange.wire_dtype
        wide = source.rows_of(column).dtype == torch.float64 or wire_dtype == torch.int64
        #: Dtype of the weights; it is at least as wide as a word of a message.
        self._weight_dtype, self._wire_dtype = torch.float64 if wide else torch.float32, wire_dtype
        self._weights = None if name is None else edge_rows_of(source)[name]
        self._first_edge = first_edge_of(source)
        weight_bytes = 0 if name is None else self._weight_dtype.itemsize
        self._wire = Wire(source.row_bytes[None], wire_dtype.itemsize, weight_bytes)
        self.sums_here = not basis.on_host
        if self._is_tried:
            tried = [mfg for pieces in basis.trial() for mfg in pieces]
            own, wire = self._tiers, self._wire
            fetched = sum((Moved.between_ranks(mfg, own, wire) for mfg in tried), Moved())
            self.asks = fetched.is_worth_it(wire)
            if self.sums_here:
                copied = sum((Moved.to_device(mfg, own, wire) for mfg in tried), Moved())
                self.sums_here = copied.is_worth_it(wire.of_copies)

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        self._fetch, self._dtype = fetch, basis.dtype
        self._decide(basis, fetch.tiers)
        self._rows = fetch.tiers[None].home.rows[self._column[1]]
        num_threads = torch.get_num_threads()
        self._balance = Balance(num_threads, Threads(max(1, num_threads - 1), "salientpp-groups").submit)

    def on_drawn(self, mfg: SamplerOutput) -> tuple[SamplerOutput, Note]:
        tiers, here, here_weight = self._tiers, None, None
        left, sums = sums_of(mfg, tiers, self._wire, self.asks, self._repeats)
        edge_rows = getattr(mfg, "edge_rows", {})
        weight = self._weight_of(sums, edge_rows)
        if self.sums_here:
            left, here = host_sums_of(left, tiers, self._wire)
            here_weight = self._weight_of(here, edge_rows)
        left.edge_rows = edge_rows
        words = None if weight is None else weight.view(self._wire_dtype)
        return left, Note(sums, words, here, here_weight)

    def wanted(self, note: Note) -> dict[str | None, Wanted]:
        sums = note.sums
        wanted: dict[str | None, Wanted] = {SUMS.name: Wanted(sums.size, sums.groups)}
        wanted[SOURCES.name] = Wanted(sums.source, sums.sources)
        if note.weight is not None:
            words = note.weight.numel() // max(1, sums.source.numel())
            wanted[WEIGHTS.name] = Wanted(note.weight, sums.sources * words)
        return wanted

    def take(self, work: HostWork, take_rows: Callable[[], Taken]) -> Taken:
        if work.note is None or work.note.here is None:
            taken = take_rows()
        else:
            taken, of_host = self._balance.both(take_rows, functools.partial(self._summed_here, work))
            taken = dataclasses.replace(taken, own={**taken.own, (_OF_HOST, self._column[1]): of_host})
        served = {**taken.served, (SUMS.name, self._column[1]): self._served(work.asked)}
        return dataclasses.replace(taken, served=served)

    def _served(self, asked: Mapping[str | None, Tensor]) -> Tensor:
        """Computes the sums that other ranks asked for, from this host's rows."""
        weight, size = None, asked[SUMS.name]
        if WEIGHTS.name in asked:
            words = asked[WEIGHTS.name].to(self._fetch.exchange.wire_dtype)
            weight = words.view(self._weight_dtype)
        out = empty_rows(self._rows, size.numel())
        put_sums(self._rows, asked[SOURCES.name], size, weight, self._reduction, out)
        return out

    def _summed_here(self, work: HostWork) -> Tensor:
        """Computes the sums of the host's rows that its device gets instead of the rows, [sums, ...]. The loader copies them like rows."""
        tiers, name = self._fetch.tiers[None], self._column[1]
        sums, weight = work.note.here, work.note.here_weight
        is_pinned = torch.accelerator.is_available()
        shape = (sums.size.numel(), *self._rows.shape[1:])
        out = torch.empty(shape, dtype=self._rows.dtype, pin_memory=is_pinned, device="cpu")
        groups, sources = sums.groups.tolist(), sums.sources.tolist()
        weights = [None] * len(groups) if weight is None else list(weight.split(sources))
        pieces = zip(tiers.all, sums.source.split(sources), sums.size.split(groups), weights, out.split(groups))
        with traced(work.trace, f"{WORKER}sum_host_rows", work.index):
            for tier, slot, size, weight, to in pieces:
                if size.numel():
                    put_sums(tier.rows[name], slot, size, weight, self._reduction, to)
        return out

    def _weight_of(self, sums: AskedSums, edge_rows: EdgeRowsByType) -> Tensor | None:
        """Returns the edge weights by which the rows in these sums are multiplied; None without weights."""
        if self._weights is None:
            return None
        assert sums.edge is not None  # edges of a partitioned graph have ids
        assert self._weight_name is not None
        rows = take_edge_rows(self._weight_name, self._weights, self._first_edge, sums.edge, edge_rows.get(None))
        return rows.view(-1).to(self._weight_dtype)

    def complete(self, batch: Data | HeteroData, note: Note, arrived: Mapping[Column, Tensor]) -> None:
        name, sums, here, to_device = self._column[1], note.sums, note.here, self._fetch.own.to_device
        target, value, count = sums.target, arrived[SUMS.name, name], sums.size
        if here is not None:
            target, count = torch.cat([target, here.target]), torch.cat([count, here.size])
            value = torch.cat([value, arrived[_OF_HOST, name]])
        with self._counting:
            self._counts["rows_partial"] += sums.size.numel()
            self._counts["rows_partial_host"] += 0 if here is None else here.size.numel()
        value = value if self._dtype is None else value.to(self._dtype)
        batch.partial = Partial(to_device(target), value, to_device(count), self._reduction, self._weight_name)

    def deliver(self, batch: Data | HeteroData, note: Note) -> None:
        """Marks the batch's tensors, so that a model without :func:`salientpp.nn.merge_partial` raises an error."""
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        delivered = Delivered(
            batch.partial, len(edges), int(batch.batch_size), sum(nodes), tuple(itertools.accumulate(edges))
        )
        roles = {"edge_index": EDGES, self._column[1]: ROWS}
        if self._weight_name is not None:
            roles[self._weight_name] = EDGE_WEIGHTS
        for name, role in roles.items():
            batch[name] = mark(batch[name], delivered, role, given=True)

    def price(self, price: Price, notes: Sequence[Note]) -> Price:
        batches = max(1, len(notes))
        number = sum(note.sums.size.numel() for note in notes) / batches
        arriving, sizes = number * self._wire.row_bytes, number * self._wire.id_bytes
        numbers_here = sum(0 if note.here is None else note.here.size.numel() for note in notes)
        here = numbers_here / batches * self._wire.row_bytes
        sources = sum(note.sums.source.numel() for note in notes) / batches * self._wire.source_bytes
        fetched: dict[str | None, float] = {None: price.fetched[None] + arriving}
        copied: dict[str | None, float] = {None: price.copied[None] + here}
        return dataclasses.replace(price, fetched=fetched, copied=copied, requests=price.requests + sources + sizes)

    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)

    def reset_counts(self) -> None:
        self._counts.clear()
