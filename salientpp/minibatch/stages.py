"""What are the ten steps from seeds to a batch?

    sample · exchange_counts · read_counts · exchange_ids · localize_ids ·
    gather_host_rows · copy_to_device · gather_device_rows · exchange_rows · assemble

After Appendix D of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152). Each step is a function from one frozen
state to the next, so a half-filled batch has no type. Slow work is started in one step and awaited in the next:

* ``sample`` awaits the sampling thread, which has drawn the MFG and looked up the tier of every vertex;
* ``exchange_counts``, ``exchange_ids`` and ``exchange_rows`` start an all-to-all, the step after each awaits it;
* ``gather_host_rows`` starts a worker thread on the host rows of this batch and of the others' requests and on the batch itself, and
  ``copy_to_device`` awaits it.

On the CPU rows are put **in place**: the worker makes the batch with its rows, and the later stages fill the gaps (device tier, remote
rows). For another device rows are **staged**: the worker makes everything else of the batch, and gathers only rows that are not on the device, in
pinned memory; ``assemble`` puts them together there (:mod:`salientpp.store.assembly`).

A batch without seeds (``sampled.mfg is None``) belongs to a rank that has none for this round: it wants nothing, and
answers the others. With ``leaving`` it has none for later rounds either.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.comm import Pending
from salientpp.minibatch.batch import Column, DataTemplate, HeteroTemplate, PartitionTemplate, StoreTemplate
from salientpp.pipeline import Stage, Trace, tensors_in, traced
from salientpp.store.assembly import Recipe, assemble_rows
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Counts, Exchange, PendingCounts
from salientpp.store.shard import Places, Shard, pinned, put_rows, take_rows


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
    """What the worker has made of a batch.

    Attributes:
        batch: complete but for rows of ``own`` that come later; None without seeds.
        own: by column; in place, rows in MFG order, with gaps for other tiers; staged, the rows that are copied to the device.
        served: [a, ...] rows for the other ranks; those to be put together on a device lack the device's.
        index: staged, by type, how the batch's rows are put together, see :class:`~salientpp.store.assembly.Recipe`.
        served_index: the same of ``served``.
    """

    batch: Data | HeteroData | None
    own: dict[Column, Tensor]
    served: dict[Column, Tensor]
    index: dict[str | None, Tensor | None] = field(default_factory=dict)
    served_index: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HostRowsStarted(InFlight):
    counts: Counts
    rows: Future[HostRows]


@dataclass(frozen=True, eq=False)
class OnDevice(InFlight):
    counts: Counts
    rows: HostRows


@dataclass(frozen=True, eq=False)
class Gathered(OnDevice):
    """``rows.served`` is complete."""


@dataclass(frozen=True, eq=False)
class RowsSent(InFlight):
    counts: Counts
    rows: HostRows
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
        staged: put rows together on the device; else in place on the host.
        serves_staged: so too the rows for other ranks, which then travel from device to device.
        pin_memory: put finished batches into pinned host memory.
        dtype: of delivered ``x``; None: as it is stored.
        transform: the user's, applied to the finished batch.
        row_counts: kept up to date.
        buffers: where host rows are put, but for another device.
        batch_bytes: the most that a batch has taken on the device, with all that it is made from.
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
    staged: bool = False
    serves_staged: bool = False
    pin_memory: bool = False
    dtype: torch.dtype | None = None
    transform: Callable[[Data], Data] | None = None
    row_counts: RowCounts = field(default_factory=RowCounts)
    buffers: BufferPool = field(default_factory=BufferPool)
    batch_bytes: int = 0
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
        return self._stage_rows(state) if self.staged else self._put_rows(state)

    def _put_rows(self, state: IdsRead) -> HostRows:
        own = {column: self._own_rows(column, state.sampled) for column in self.exchanged}
        return HostRows(self._build(state.sampled, own), own, self._served_rows(state.asked))

    def _own_rows(self, column: Column, sampled: Sampled) -> Tensor:
        """The rows of the host tiers in their places."""
        type_, name = column
        shard, places = self.shards[type_], sampled.places[type_]
        host = shard.host_rows[name]
        rows = self.buffers.empty((sampled.num_vertices(type_), *host.shape[1:]), host.dtype)
        put_rows(host, places.cpu_row, rows, places.cpu_position)
        if len(shard.cache):
            put_rows(shard.cache.rows[name], places.cache_slot, rows, places.cache_position)
        return rows

    def _served_rows(self, asked: Tensor) -> dict[Column, Tensor]:
        return {(type_, name): take_rows(self.shards[type_].host_rows[name], asked) for type_, name in self.exchanged}

    def _stage_rows(self, state: IdsRead) -> HostRows:
        recipes = {type_: shard.recipe(state.sampled.places[type_]) for type_, shard in self.shards.items()}
        own = {column: self._staged(column, recipes[column[0]]) for column in self.exchanged}
        index = {type_: None if recipe.index is None else pinned(recipe.index) for type_, recipe in recipes.items()}
        batch = self._build(state.sampled, {column: self._placeholder(column, state.sampled) for column in self.exchanged})
        if batch is not None:
            for (type_, name), rows in own.items():
                (batch if type_ is None else batch[type_])[name] = rows[:0]
            batch = batch.apply(_pinned)
        if not self.serves_staged:
            return HostRows(batch, own, self._served_rows(state.asked), index)
        shard = next(iter(self.shards.values()))
        recipe = shard.recipe(shard.look_up(state.asked + shard.begin))
        served = {column: self._staged(column, recipe) for column in self.exchanged}
        return HostRows(batch, own, served, index, None if recipe.index is None else pinned(recipe.index))

    def _staged(self, column: Column, recipe: Recipe) -> Tensor:
        shard, name = self.shards[column[0]], column[1]
        host = shard.host_rows[name]
        shape = (recipe.cpu_row.numel() + recipe.cache_slot.numel(), *host.shape[1:])
        # torch's pool of pinned memory gives it to nobody else before the copy out of it is done.
        rows = torch.empty(shape, dtype=host.dtype, pin_memory=torch.accelerator.is_available())
        shard.stage(name, recipe, rows)
        return rows

    def _placeholder(self, column: Column, sampled: Sampled) -> Tensor:
        """Of the shape that the rows will have, for those who ask the batch how many vertices it has; it has no memory."""
        host = self.shards[column[0]].host_rows[column[1]]
        return host.new_empty(()).expand(sampled.num_vertices(column[0]), *host.shape[1:])

    def _build(self, sampled: Sampled, rows: dict[Column, Tensor]) -> Data | HeteroData | None:
        """The batch with these rows of the exchanged columns."""
        mfg = sampled.mfg
        if mfg is None:
            return None
        for type_, name in self.seed_columns:
            shard = self.shards[type_]
            rows = {**rows, (type_, name): take_rows(shard.host_rows[name], mfg.node[: sampled.batch_size] - shard.begin)}
        batch = self.template.build(mfg, rows)
        self.keep_books(batch, mfg)
        return batch

    def copy_to_device(self, state: HostRowsStarted) -> OnDevice:
        rows = state.rows.result()
        if not self.staged:
            return OnDevice(state.sampled, state.counts, rows)
        batch = rows.batch
        if batch is not None:
            if any(value.device.type != "cpu" for value in tensors_in(batch)):
                # The user's own tensors on a device: the worker has taken from them on the device's default stream.
                self._module.current_stream(self.device).wait_stream(self._module.default_stream(self.device))
            batch = batch.to(self.device, non_blocking=True)
        own = {column: self._to(value, self.device) for column, value in rows.own.items()}
        index = {type_: self._to(value, self.device) for type_, value in rows.index.items()}
        over = self.exchange.comm.device
        served = {column: self._to(value, over) for column, value in rows.served.items()}
        return OnDevice(state.sampled, state.counts, HostRows(batch, own, served, index, self._to(rows.served_index, over)))

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @staticmethod
    def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    def gather_device_rows(self, state: OnDevice) -> Gathered:
        rows = state.rows
        if self.serves_staged:
            served = {column: self._put_together(column, value, value[:0], rows.served_index) for column, value in rows.served.items()}
            rows = dataclasses.replace(rows, served=served)
        for type_, name in () if self.staged else self.exchanged:
            shard, places = self.shards[type_], state.sampled.places[type_]
            if len(shard.gpu):
                put_rows(shard.gpu_rows[name], places.gpu_slot, rows.own[type_, name], places.gpu_position)
        return Gathered(state.sampled, state.counts, rows)

    def _put_together(self, column: Column, staged: Tensor, arrived: Tensor, index: Tensor | None) -> Tensor:
        if index is None:
            return staged
        out = staged.new_empty((index.numel(), *staged.shape[1:]))
        assemble_rows(self.shards[column[0]].sources(column[1], staged, arrived), index, out)
        return out

    def exchange_rows(self, state: Gathered) -> RowsSent:
        pending = {column: self.exchange.send_rows(state.counts, state.rows.served[column]) for column in self.exchanged}
        return RowsSent(state.sampled, state.counts, state.rows, pending)

    def assemble(self, state: RowsSent) -> Finished:
        sampled, rows = state.sampled, state.rows
        arrived = {column: pending.wait() for column, pending in state.pending.items()}
        batch = rows.batch
        if batch is None:
            return Finished(sampled.index, None, True, state.counts.all_left)
        given = (self._assemble_on_device if self.staged else self._assemble_in_place)(sampled, rows, arrived)
        for (type_, name), value in given.items():
            (batch if type_ is None else batch[type_])[name] = value if self.dtype is None or name != "x" else value.to(self.dtype)
        if not self.staged and self.pin_memory:
            batch = batch.pin_memory()
        self._count(sampled)
        if "torch._dynamo" in sys.modules:  # which torch.compile has loaded
            _mark_sizes(batch)
        batch = batch if self.transform is None else self.transform(batch)
        return Finished(sampled.index, batch, False, state.counts.all_left)

    def _assemble_in_place(self, sampled: Sampled, rows: HostRows, arrived: dict[Column, Tensor]) -> dict[Column, Tensor]:
        position = sampled.travelling.remote_position
        if position.numel():
            index = torch.arange(position.numel())
            for column, value in arrived.items():
                put_rows(value, index, rows.own[column], position)
        return rows.own

    def _assemble_on_device(self, sampled: Sampled, rows: HostRows, arrived: dict[Column, Tensor]) -> dict[Column, Tensor]:
        arrived = {column: self._to(value, self.device) for column, value in arrived.items()}
        given = {column: self._put_together(column, value, arrived[column], rows.index[column[0]]) for column, value in rows.own.items()}
        parts = [*tensors_in(rows), *arrived.values(), *(value for column, value in given.items() if value is not rows.own[column])]
        self.batch_bytes = max(self.batch_bytes, sum(part.nbytes for part in parts if part.device == self.device))
        return given

    def _count(self, sampled: Sampled) -> None:
        counts = self.row_counts
        for places in sampled.places.values():
            counts.gpu += places.gpu_slot.numel()
            counts.cpu += places.cpu_row.numel()
            counts.cache += places.cache_slot.numel()
            counts.remote += places.remote_position.numel()


def _pinned(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    return pinned(value) if is_plain else value


def _mark_sizes(batch: Data | HeteroData) -> None:
    """Tell ``torch.compile`` which sizes change from batch to batch, so that it compiles once and not again at the second one."""
    for store in batch.stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and value.dim() and value.layout == torch.strided:
                dim = batch.__cat_dim__(name, value, store)
                if isinstance(dim, int):
                    torch._dynamo.maybe_mark_dynamic(value, dim % value.dim())
