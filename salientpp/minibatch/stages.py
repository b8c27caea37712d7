"""What are the ten steps from seeds to a batch?

    sample · exchange_counts · read_counts · exchange_ids · localize_ids ·
    gather_host_rows · copy_to_device · gather_device_rows · exchange_rows · assemble

After Appendix D of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152). Each step is a function from one frozen
state to the next, so a half-filled batch has no type. Slow work is started in one step and awaited in the next:

* ``sample`` awaits the sampling thread, which has drawn the MFG and looked up the tier of every vertex;
* ``exchange_counts``, ``exchange_ids`` and ``exchange_rows`` start an all-to-all, the step after each awaits it;
* ``gather_host_rows`` starts a worker thread on the host rows of this batch and of the others' requests, and
  ``copy_to_device`` awaits it.

A batch without seeds (``sampled.mfg is None``) belongs to a rank that has none for this round: it wants nothing, and
answers the others. With ``leaving`` it has none for later rounds either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.comm import Pending
from salientpp.minibatch.batch import Column, DataTemplate, HeteroTemplate, PartitionTemplate, StoreTemplate
from salientpp.pipeline import Stage, Trace, traced
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Counts, Exchange, PendingCounts
from salientpp.store.shard import Places, Shard, put_rows, take_rows


@dataclass(frozen=True, eq=False)
class Sampled:
    """A batch of global ids with the place of every row, by vertex type. ``batch_size`` is its number of seeds."""

    index: int
    batch_size: int
    mfg: SamplerOutput | HeteroSamplerOutput | None
    places: Mapping[str | None, Places]
    leaving: bool = False

    def num_vertices(self, type_: str | None) -> int:
        if self.mfg is None:
            return 0
        n_id = self.mfg.node if type_ is None else self.mfg.node.get(type_)
        return 0 if n_id is None else n_id.numel()

    @property
    def travelling(self) -> Places:
        """Of the vertices that others may own: only a graph of one type is partitioned, with several none is remote."""
        return next(iter(self.places.values()))


@dataclass(frozen=True)
class Request:
    """A batch to be made: ``sampling`` gives it, from a thread or at once."""

    index: int
    sampling: Future[Sampled]


@dataclass(frozen=True, eq=False)
class InFlight:
    """What every later state carries along."""

    sampled: Sampled

    @property
    def index(self) -> int:
        return self.sampled.index


@dataclass(frozen=True, eq=False)
class CountsSent(InFlight):
    pending: PendingCounts


@dataclass(frozen=True, eq=False)
class CountsRead(InFlight):
    counts: Counts


@dataclass(frozen=True, eq=False)
class IdsSent(InFlight):
    counts: Counts
    pending: Pending


@dataclass(frozen=True, eq=False)
class IdsRead(InFlight):
    """``asked``: int64 [a], rows of this part that the others want, by rank."""

    counts: Counts
    asked: Tensor


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows gathered on the host, by column.

    Attributes:
        own: on the CPU the batch's rows in MFG order, with gaps for other tiers; for another device only the rows of
            the host tiers, one after the other.
        seeds: rows of the seeds, for attributes that are not exchanged.
        served: [a, ...], rows for the other ranks.
    """

    own: dict[Column, Tensor]
    seeds: dict[Column, Tensor]
    served: dict[Column, Tensor]


@dataclass(frozen=True, eq=False)
class HostRowsStarted(InFlight):
    counts: Counts
    rows: Future[HostRows]


@dataclass(frozen=True, eq=False)
class OnDevice(InFlight):
    counts: Counts
    rows: HostRows


@dataclass(frozen=True, eq=False)
class Gathered(InFlight):
    """``rows``: by column, [n, ...] on the device in MFG order, complete but for remote rows."""

    counts: Counts
    rows: dict[Column, Tensor]
    seeds: dict[Column, Tensor]
    served: dict[Column, Tensor]


@dataclass(frozen=True, eq=False)
class RowsSent(InFlight):
    counts: Counts
    rows: dict[Column, Tensor]
    seeds: dict[Column, Tensor]
    pending: dict[Column, Pending]


@dataclass(frozen=True, eq=False)
class Finished:
    """``idle``: this rank had no batch for this round; ``all_left``: every rank had left the epoch."""

    index: int
    batch: Data | HeteroData | None
    idle: bool
    all_left: bool


@dataclass
class RowCounts:
    """Rows delivered, by tier."""

    gpu: int = 0
    cpu: int = 0
    cache: int = 0
    remote: int = 0


@dataclass
class BatchStages:
    """The ten stages of one loader.

    Attributes:
        shards, exchange: where rows are, by vertex type, and how to get the others.
        template: turns an MFG and its rows into a batch.
        keep_books: sets what PyG's loader sets beside the attributes.
        exchanged: the columns that every sampled vertex gets; the same on all ranks.
        seed_columns: the columns that only seeds get.
        submit: runs a function in a worker thread and returns its future.
        device: where batches are delivered.
        pin_memory: put finished batches into pinned host memory.
        transform: the user's, applied to the finished batch.
        row_counts: kept up to date.
        buffers: where host rows are put.
        trace: takes a span for what the worker threads do, if set.
    """

    shards: Mapping[str | None, Shard]
    exchange: Exchange
    template: DataTemplate | HeteroTemplate | StoreTemplate | PartitionTemplate
    keep_books: Callable[[Data | HeteroData, SamplerOutput | HeteroSamplerOutput], None]
    exchanged: Sequence[Column]
    seed_columns: Sequence[Column]
    submit: Callable[..., Future]
    device: torch.device
    pin_memory: bool = False
    transform: Callable[[Data], Data] | None = None
    row_counts: RowCounts = field(default_factory=RowCounts)
    buffers: BufferPool = field(default_factory=BufferPool)
    trace: Trace | None = None

    def list(self) -> list[Stage]:
        return [
            Stage("sample", self.sample, "host"),
            Stage("exchange_counts", self.exchange_counts, "comm"),
            Stage("read_counts", self.read_counts, "comm"),
            Stage("exchange_ids", self.exchange_ids, "comm"),
            Stage("localize_ids", self.localize_ids, "comm"),
            Stage("gather_host_rows", self.gather_host_rows, "copy"),
            Stage("copy_to_device", self.copy_to_device, "copy"),
            Stage("gather_device_rows", self.gather_device_rows, "gather"),
            Stage("exchange_rows", self.exchange_rows, "comm"),
            Stage("assemble", self.assemble, "gather"),
        ]

    def sample(self, request: Request) -> Sampled:
        return request.sampling.result()

    def exchange_counts(self, state: Sampled) -> CountsSent:
        return CountsSent(state, self.exchange.send_counts(state.travelling.remote_counts, leaving=state.leaving))

    def read_counts(self, state: CountsSent) -> CountsRead:
        return CountsRead(state.sampled, self.exchange.read_counts(state.pending))

    def exchange_ids(self, state: CountsRead) -> IdsSent:
        return IdsSent(state.sampled, state.counts, self.exchange.send_ids(state.counts, state.sampled.travelling.remote_id))

    def localize_ids(self, state: IdsSent) -> IdsRead:
        return IdsRead(state.sampled, state.counts, self.exchange.read_ids(state.counts, state.pending))

    def gather_host_rows(self, state: IdsRead) -> HostRowsStarted:
        return HostRowsStarted(state.sampled, state.counts, self.submit(self._work_on_host_rows, state))

    def _work_on_host_rows(self, state: IdsRead) -> HostRows:
        with traced(self.trace, "worker: gather_host_rows", state.index):
            return self._gather_host_rows(state)

    def _gather_host_rows(self, state: IdsRead) -> HostRows:
        mfg = state.sampled.mfg
        own = {column: self._own_rows(column, state.sampled) for column in self.exchanged}
        seeds = {}
        if mfg is not None:
            for type_, name in self.seed_columns:
                shard = self.shards[type_]
                seeds[type_, name] = take_rows(shard.host_rows[name], mfg.node[: state.sampled.batch_size] - shard.begin)
        served = {(type_, name): take_rows(self.shards[type_].host_rows[name], state.asked) for type_, name in self.exchanged}
        return HostRows(own, seeds, served)

    def _own_rows(self, column: Column, sampled: Sampled) -> Tensor:
        """The rows of the host tiers; on the CPU in their places, for another device one after the other."""
        type_, name = column
        shard, places = self.shards[type_], sampled.places[type_]
        host = shard.host_rows[name]
        if self.device.type == "cpu":
            rows = self.buffers.empty((sampled.num_vertices(type_), *host.shape[1:]), host.dtype)
            put_rows(host, places.cpu_row, rows, places.cpu_position)
            if len(shard.cache.members):
                put_rows(shard.cache.rows[name], places.cache_slot, rows, places.cache_position)
            return rows
        size = places.cpu_row.numel() + places.cache_slot.numel()
        rows = torch.empty((size, *host.shape[1:]), dtype=host.dtype, pin_memory=True)
        put_rows(host, places.cpu_row, rows, None)
        if len(shard.cache.members):
            put_rows(shard.cache.rows[name], places.cache_slot, rows[places.cpu_row.numel() :], None)
        return rows

    def copy_to_device(self, state: HostRowsStarted) -> OnDevice:
        rows = state.rows.result()
        served = {name: self._to(value, self.exchange.comm.device) for name, value in rows.served.items()}
        own = {name: self._to(value, self.device) for name, value in rows.own.items()}
        seeds = {name: self._to(value, self.device) for name, value in rows.seeds.items()}
        return OnDevice(state.sampled, state.counts, HostRows(own, seeds, served))

    @staticmethod
    def _to(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def gather_device_rows(self, state: OnDevice) -> Gathered:
        rows = state.rows.own
        if self.device.type != "cpu":
            rows = {column: self._spread(state.sampled.places[column[0]], value) for column, value in rows.items()}
        for type_, shard in self.shards.items():
            if not len(shard.gpu):
                continue
            places = state.sampled.places[type_]
            slot, position = (self._to(index, self.device) for index in (places.gpu_slot, places.gpu_position))
            for column in self.exchanged:
                if column[0] == type_:
                    put_rows(shard.gpu_rows[column[1]], slot, rows[column], position)
        return Gathered(state.sampled, state.counts, rows, state.rows.seeds, state.rows.served)

    def _spread(self, places: Places, host: Tensor) -> Tensor:
        """Rows of the host tiers, put into an output in MFG order on the device."""
        if places.cpu_position is None:
            return host
        position = self._to(torch.cat([places.cpu_position, places.cache_position]), self.device)
        num_rows = position.numel() + places.gpu_position.numel() + places.remote_position.numel()
        return host.new_empty((num_rows, *host.shape[1:])).index_copy_(0, position, host)

    def exchange_rows(self, state: Gathered) -> RowsSent:
        pending = {name: self.exchange.send_rows(state.counts, state.served[name]) for name in self.exchanged}
        return RowsSent(state.sampled, state.counts, state.rows, state.seeds, pending)

    def assemble(self, state: RowsSent) -> Finished:
        sampled, places = state.sampled, state.sampled.travelling
        num_remote = places.remote_position.numel()
        arrived = {name: pending.wait() for name, pending in state.pending.items()}
        if sampled.mfg is None:
            return Finished(sampled.index, None, True, state.counts.all_left)
        if num_remote:
            index = torch.arange(num_remote, device=self.device)
            position = self._to(places.remote_position, self.device)
            for name, rows in arrived.items():
                put_rows(self._to(rows, self.device), index, state.rows[name], position)
        batch = self.template.build(sampled.mfg, {**state.rows, **state.seeds})
        self.keep_books(batch, sampled.mfg)
        if self.device.type != "cpu":
            batch = batch.to(self.device, non_blocking=True)
        elif self.pin_memory:
            batch = batch.pin_memory()
        counts = self.row_counts
        for places in sampled.places.values():
            counts.gpu += places.gpu_slot.numel()
            counts.cpu += places.cpu_row.numel()
            counts.cache += places.cache_slot.numel()
            counts.remote += places.remote_position.numel()
        batch = batch if self.transform is None else self.transform(batch)
        return Finished(sampled.index, batch, False, state.counts.all_left)
