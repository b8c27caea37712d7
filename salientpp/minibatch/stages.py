"""What are the ten steps from seeds to a batch?

    sample · exchange_counts · read_counts · exchange_ids · localize_ids ·
    gather_host_rows · copy_to_device · gather_device_rows · exchange_rows · assemble

After Appendix D of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152). Each step is a function from one frozen
state to the next, so a half-filled batch has no type. Slow work is started in one step and awaited in the next:

* ``sample`` awaits the sampling thread, which has drawn the MFG, looked up the tier of every vertex, and made the batch but for its rows;
* ``exchange_counts``, ``exchange_ids`` and ``exchange_rows`` start an all-to-all, the step after each awaits it;
* ``gather_host_rows`` starts a worker thread on the host rows of this batch and of the others' requests, and ``copy_to_device`` awaits it.

On the CPU rows are put **in place**: the worker leaves gaps for other tiers, and the later stages fill them. For another device rows
are **staged**: the worker gathers those that are not on the device, one after the other, in pinned memory, and ``assemble`` puts all
together there (:mod:`salientpp.store.assembly`).

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
from torch_geometric.data.storage import NodeStorage
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.comm import Pending
from salientpp.minibatch.batch import Column, DataTemplate, HeteroTemplate, PartitionTemplate, StoreTemplate
from salientpp.pipeline import Stage, Trace, tensors_in, traced
from salientpp.processes import Lock, Task
from salientpp.store.assembly import Recipe, assemble_rows
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Counts, Exchange, PendingCounts
from salientpp.store.shard import Places, Shard, pinned, put_rows, take_rows


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a sampling thread has made of a batch.

    Attributes:
        batch_size: its number of seeds.
        mfg: its global ids; None without seeds.
        places: the place of every row, by vertex type.
        batch: complete but for the rows of the exchanged columns.
        recipes: if rows are staged, how they are put together, by vertex type.
    """

    index: int
    batch_size: int
    mfg: SamplerOutput | HeteroSamplerOutput | None
    places: Mapping[str | None, Places]
    leaving: bool = False
    batch: Data | HeteroData | None = None
    recipes: Mapping[str | None, Recipe] = field(default_factory=dict)

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
    sampling: Future[Sampled] | Task


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
    """What the worker has gathered.

    Attributes:
        own: by column; in place, rows in MFG order, with gaps for other tiers; staged, the rows that are copied to the device.
        served: [a, ...] rows for the other ranks; those to be put together on a device lack the device's.
        served_index: how they are put together there.
    """

    own: dict[Column, Tensor]
    served: dict[Column, Tensor]
    served_index: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HostRowsStarted(InFlight):
    counts: Counts
    rows: Task


@dataclass(frozen=True, eq=False)
class OnDevice(InFlight):
    """``batch``, ``rows`` and ``order`` (the recipes' indices, by vertex type) are on the device, if rows are staged."""

    counts: Counts
    rows: HostRows
    batch: Data | HeteroData | None
    order: Mapping[str | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Gathered(OnDevice):
    """``rows.served`` is complete."""


@dataclass(frozen=True, eq=False)
class RowsSent(InFlight):
    gathered: Gathered
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
        row_counts: kept up to date.
        counting: guards them, since threads may drive an epoch each.
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
    submit: Callable[..., Task]
    device: torch.device
    staged: bool = False
    serves_staged: bool = False
    pin_memory: bool = False
    dtype: torch.dtype | None = None
    row_counts: RowCounts = field(default_factory=RowCounts)
    counting: Lock = field(default_factory=Lock)
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

    def prepare(self, sampled: Sampled) -> Sampled:
        """Make what needs neither rows nor other ranks: the batch around its rows, and the recipes. For sampling threads."""
        mfg = sampled.mfg
        rows = {column: self._placeholder(column, sampled) for column in self.exchanged}
        for type_, name in self.seed_columns:
            shard = self.shards[type_]
            rows[type_, name] = take_rows(shard.host_rows[name], mfg.node[: sampled.batch_size] - shard.begin)
        batch = self.template.build(mfg, rows)
        self.keep_books(batch, mfg)
        for type_, name in self.exchanged:
            _store_of(batch, type_)[name] = self.shards[type_].host_rows[name][:0]  # attributes keep their order
        if not self.staged:
            return dataclasses.replace(sampled, batch=batch)
        recipes = {type_: shard.recipe(sampled.places[type_]) for type_, shard in self.shards.items()}
        recipes = {type_: dataclasses.replace(recipe, index=_pinned(recipe.index)) for type_, recipe in recipes.items()}
        return dataclasses.replace(sampled, batch=batch.apply(_pinned), recipes=recipes)

    def _placeholder(self, column: Column, sampled: Sampled) -> Tensor:
        """Of the shape that the rows will have, for those who ask the batch how many vertices it has; it has no memory."""
        host = self.shards[column[0]].host_rows[column[1]]
        return host.new_empty(()).expand(sampled.num_vertices(column[0]), *host.shape[1:])

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
        own = {} if state.sampled.mfg is None else {column: self._own_rows(column, state.sampled) for column in self.exchanged}
        shard = next(iter(self.shards.values()))
        if not self.serves_staged:
            return HostRows(own, {column: take_rows(shard.host_rows[column[1]], state.asked) for column in self.exchanged})
        recipe = shard.recipe(shard.look_up(state.asked + shard.begin))
        return HostRows(own, {column: self._stage(column, recipe) for column in self.exchanged}, _pinned(recipe.index))

    def _own_rows(self, column: Column, sampled: Sampled) -> Tensor:
        """The rows of the host tiers: staged, or in their places."""
        type_, name = column
        if self.staged:
            return self._stage(column, sampled.recipes[type_])
        shard, places = self.shards[type_], sampled.places[type_]
        host = shard.host_rows[name]
        rows = self.buffers.empty((sampled.num_vertices(type_), *host.shape[1:]), host.dtype)
        put_rows(host, places.cpu_row, rows, places.cpu_position)
        if len(shard.cache):
            put_rows(shard.cache.rows[name], places.cache_slot, rows, places.cache_position)
        return rows

    def _stage(self, column: Column, recipe: Recipe) -> Tensor:
        shard, name = self.shards[column[0]], column[1]
        host = shard.host_rows[name]
        shape = (recipe.cpu_row.numel() + recipe.cache_slot.numel(), *host.shape[1:])
        # torch's pool of pinned memory gives it to nobody else before the copy out of it is done.
        rows = torch.empty(shape, dtype=host.dtype, pin_memory=torch.accelerator.is_available())
        shard.stage(name, recipe, rows)
        return rows

    def copy_to_device(self, state: HostRowsStarted) -> OnDevice:
        sampled, rows = state.sampled, state.rows.result()
        if not self.staged:
            return OnDevice(sampled, state.counts, rows, sampled.batch, {})
        over = self.exchange.comm.device
        rows = HostRows(_to(rows.own, self.device), _to(rows.served, over), _to(rows.served_index, over))
        batch = sampled.batch
        if batch is not None:
            if any(value.device.type != "cpu" for value in tensors_in(batch)):
                # The user's own tensors on a device: the sampling thread has taken from them on the device's default stream.
                self._module.current_stream(self.device).wait_stream(self._module.default_stream(self.device))
            batch = batch.to(self.device, non_blocking=True)
        order = {type_: _to(recipe.index, self.device) for type_, recipe in sampled.recipes.items()}
        return OnDevice(sampled, state.counts, rows, batch, order)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def gather_device_rows(self, state: OnDevice) -> Gathered:
        rows = state.rows
        if self.serves_staged:
            served = {column: self._put_together(column, value, value[:0], rows.served_index) for column, value in rows.served.items()}
            rows = dataclasses.replace(rows, served=served)
        for (type_, name), own in () if self.staged else rows.own.items():
            shard, places = self.shards[type_], state.sampled.places[type_]
            if len(shard.gpu):
                put_rows(shard.gpu_rows[name], places.gpu_slot, own, places.gpu_position)
        return Gathered(state.sampled, state.counts, rows, state.batch, state.order)

    def _put_together(self, column: Column, staged: Tensor, arrived: Tensor, index: Tensor | None) -> Tensor:
        if index is None:
            return staged
        out = staged.new_empty((index.numel(), *staged.shape[1:]))
        assemble_rows(self.shards[column[0]].sources(column[1], staged, arrived), index, out)
        return out

    def exchange_rows(self, state: Gathered) -> RowsSent:
        pending = {column: self.exchange.send_rows(state.counts, state.rows.served[column]) for column in self.exchanged}
        return RowsSent(state.sampled, state, pending)

    def assemble(self, state: RowsSent) -> Finished:
        sampled, batch, counts = state.sampled, state.gathered.batch, state.gathered.counts
        arrived = {column: pending.wait() for column, pending in state.pending.items()}
        if batch is None:
            return Finished(sampled.index, None, True, counts.all_left)
        rows = (self._assemble_on_device if self.staged else self._assemble_in_place)(state.gathered, arrived)
        for (type_, name), value in rows.items():
            _store_of(batch, type_)[name] = value if self.dtype is None or name != "x" else value.to(self.dtype)
        if not self.staged and self.pin_memory:
            batch = batch.pin_memory()
        self._count(sampled)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it takes seconds
            _mark_sizes(batch)
        return Finished(sampled.index, batch, False, counts.all_left)

    def _assemble_in_place(self, state: Gathered, arrived: dict[Column, Tensor]) -> dict[Column, Tensor]:
        position = state.sampled.travelling.remote_position
        if position.numel():
            index = torch.arange(position.numel())
            for column, value in arrived.items():
                put_rows(value, index, state.rows.own[column], position)
        return state.rows.own

    def _assemble_on_device(self, state: Gathered, arrived: dict[Column, Tensor]) -> dict[Column, Tensor]:
        staged, arrived = state.rows.own, _to(arrived, self.device)
        rows = {column: self._put_together(column, value, arrived[column], state.order[column[0]]) for column, value in staged.items()}
        parts = {id(part): part for part in tensors_in([state.rows, state.batch, state.order, arrived, rows])}
        self.batch_bytes = max(self.batch_bytes, sum(part.nbytes for part in parts.values() if part.device == self.device))
        return rows

    def _count(self, sampled: Sampled) -> None:
        with self.counting:
            counts = self.row_counts
            for places in sampled.places.values():
                counts.gpu += places.gpu_slot.numel()
                counts.cpu += places.cpu_row.numel()
                counts.cache += places.cache_slot.numel()
                counts.remote += places.remote_position.numel()


def _store_of(batch: Data | HeteroData, type_: str | None) -> Data | NodeStorage:
    return batch if type_ is None else batch[type_]


def _pinned(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    return pinned(value) if is_plain else value


def _to(value: Any, device: torch.device) -> Any:
    """A tensor, a dictionary of tensors or None, from pinned memory to the device without waiting for it."""
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return None if value is None else value.to(device, non_blocking=True)


def _mark_sizes(batch: Data | HeteroData) -> None:
    """Tell ``torch.compile`` which sizes change from batch to batch, so that it compiles once and not again at the second one."""
    for store in batch.stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and value.dim() and value.layout == torch.strided:
                dim = batch.__cat_dim__(name, value, store)
                if isinstance(dim, int):
                    torch._dynamo.maybe_mark_dynamic(value, dim % value.dim())
