"""What are the ten steps from seeds to a batch?

    sample · exchange_counts · read_counts · exchange_ids · localize_ids ·
    gather_host_rows · copy_to_device · gather_device_rows · exchange_rows · assemble

After Appendix D of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152). Each step is a function from one frozen
state to the next, so a half-filled batch has no type. Slow work is started in one step and awaited in the next:

* ``sample`` awaits the sampling thread, which has drawn the MFG, looked up the tier of every vertex, and made the batch but for its rows;
* ``exchange_counts``, ``exchange_ids`` and ``exchange_rows`` start an all-to-all, the step after each awaits it;
* ``gather_host_rows`` starts a worker thread on the host rows of this batch and of the others' requests, and ``copy_to_device`` awaits it.

Rows are :mod:`salientpp.store.fetch`'s business, also whether the host or a device puts them together.

A batch without seeds (``sampled.batch is None``) belongs to a rank that has none for this round: it wants nothing, and
answers the others. With ``leaving`` it has none for later rounds either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.batch.builder import BatchBuilder, store_of
from salientpp.batch.template import Contents
from salientpp.engine.pipeline import Stage, Trace, tensors_in, traced
from salientpp.processes import Task, Undone
from salientpp.ranks.comm import Pending
from salientpp.store.exchange import Column, Counts, PendingCounts, PendingRows
from salientpp.store.fetch import Fetch, Recipe, Taken
from salientpp.store.tiers import Places

#: By its name the time of a user's ``transform`` counts, and its errors.
LAST_STAGE = "assemble"


@dataclass(frozen=True, eq=False)
class Wanted:
    """Rows of one vertex type that this rank asks other hosts for.

    Attributes:
        remote_id: distinct global ids, ascending, int64.
        remote_counts: int64 [row parts], how many of each.
        row: int64, for every id that a rank of this host wants through this one, by rank, its place in ``remote_id``.
    """

    remote_id: Tensor
    remote_counts: Tensor
    row: Tensor


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a sampling thread has made of a batch.

    Attributes:
        places: the place of every row, by vertex type.
        leaving: this rank has no further batches of its own in this epoch.
        batch: complete but for the rows that every sampled vertex gets; None without seeds.
        plan: how these are put together, by vertex type.
        mfg: what was sampled.
        contents: what the data held before the batch was made of it; None where it cannot change.
        wanted: what this rank asks other hosts for, where that is not what its batch needs of them but a share of what all batches of its host do.
    """

    index: int
    places: Mapping[str | None, Places]
    leaving: bool = False
    batch: Data | HeteroData | None = None
    plan: Mapping[str | None, Places | Recipe] = field(default_factory=dict)
    mfg: SamplerOutput | HeteroSamplerOutput | None = None
    contents: Contents | None = None
    wanted: Mapping[str | None, Wanted] | None = None

    @property
    def from_others(self) -> Mapping[str | None, Wanted | Places]:
        """By vertex type the ``remote_id`` that this rank asks other hosts for, and ``remote_counts``."""
        return self.places if self.wanted is None else self.wanted


@dataclass(frozen=True)
class Request:
    """A batch to be made: ``sampling`` gives it, from a thread or from the one that asks."""

    index: int
    sampling: Task | Undone


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
    """``asked``: by vertex type int64 [a], rows of this part that the others want, by rank."""

    counts: Counts
    asked: Mapping[str | None, Tensor]


@dataclass(frozen=True, eq=False)
class RowsTaken(InFlight):
    counts: Counts
    taken: Task


@dataclass(frozen=True, eq=False)
class OnDevice(InFlight):
    """``batch``, ``plan`` and ``taken`` are where the batch is delivered."""

    counts: Counts
    taken: Taken
    batch: Data | HeteroData | None
    plan: Mapping[str | None, Places | Recipe]


@dataclass(frozen=True, eq=False)
class Gathered(OnDevice):
    """``taken.served`` is complete."""


@dataclass(frozen=True, eq=False)
class RowsSent(InFlight):
    gathered: Gathered
    pending: PendingRows


@dataclass(frozen=True, eq=False)
class Finished:
    """``idle``: this rank had no batch for this round; ``all_left``: every rank had left the epoch; ``contents``: what the data held when
    the batch was put together, if it may have changed since."""

    index: int
    batch: Data | HeteroData | None
    idle: bool
    all_left: bool
    mfg: SamplerOutput | HeteroSamplerOutput | None = None
    contents: Contents | None = None


@dataclass
class BatchStages:
    """The ten stages of one loader.

    Attributes:
        fetch: gets the rows.
        builder: makes batches of MFGs and rows.
        submit: runs a function in a worker thread and returns its future.
        device: where batches are delivered.
        trace: takes a span for what the worker threads do, if set.
    """

    fetch: Fetch
    builder: BatchBuilder
    submit: Callable[..., Task]
    device: torch.device
    trace: Trace | None = None

    def list(self) -> list[Stage]:
        """In order; :data:`LAST_STAGE` is the last."""
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
            Stage(LAST_STAGE, self.assemble, "gather"),
        ]

    def prepare(self, index: int, mfg: SamplerOutput | HeteroSamplerOutput, num_seeds: int) -> Sampled:
        """Make what needs neither other ranks nor the rows of every vertex. For sampling threads."""
        return self._prepared(index, mfg, num_seeds, self.fetch.look_up(ids_by_type(mfg.node)))

    def _prepared(
        self,
        index: int,
        mfg: SamplerOutput | HeteroSamplerOutput,
        num_seeds: int,
        places: Mapping[str | None, Places],
    ) -> Sampled:
        """The same with the places of its rows."""
        fetch, n_id, contents = self.fetch, ids_by_type(mfg.node), self.builder.contents()
        columns = self.builder.brought(contents)
        rows = {column: fetch.placeholder(column, places[column[0]].num_rows) for column in columns}
        seeds = fetch.seed_rows(n_id, num_seeds) if fetch.seed_columns else {}
        batch = self.builder.build(mfg, {**rows, **seeds}, contents)
        for column in columns:  # attributes keep their order
            store_of(batch, column[0])[column[1]] = fetch.placeholder(column, 0)
        return Sampled(index, places, batch=fetch.own.pin(batch), plan=self.plan(places), mfg=mfg, contents=contents)

    def plan(self, places: Mapping[str | None, Places]) -> Mapping[str | None, Places | Recipe]:
        """How the rows at these places are put together, by vertex type. For sampling threads."""
        return self.fetch.plan(places)

    def sample(self, request: Request) -> Sampled:
        return request.sampling.result()

    def exchange_counts(self, state: Sampled) -> CountsSent:
        counts = {type_: wanted.remote_counts for type_, wanted in state.from_others.items()}
        return CountsSent(state, self.fetch.exchange.send_counts(counts, leaving=state.leaving))

    def read_counts(self, state: CountsSent) -> CountsRead:
        return CountsRead(state.sampled, self.fetch.exchange.read_counts(state.pending))

    def exchange_ids(self, state: CountsRead) -> IdsSent:
        ids = {type_: wanted.remote_id for type_, wanted in state.sampled.from_others.items()}
        return IdsSent(state.sampled, state.counts, self.fetch.exchange.send_ids(state.counts, ids))

    def localize_ids(self, state: IdsSent) -> IdsRead:
        return IdsRead(state.sampled, state.counts, self.fetch.exchange.read_ids(state.counts, state.pending))

    def gather_host_rows(self, state: IdsRead) -> RowsTaken:
        return RowsTaken(state.sampled, state.counts, self.submit(self._work_on_host_rows, state))

    def _work_on_host_rows(self, state: IdsRead) -> Taken:
        with traced(self.trace, "worker: gather_host_rows", state.index):
            return self.fetch.take(state.sampled.plan, state.asked)

    def copy_to_device(self, state: RowsTaken) -> OnDevice:
        fetch, batch, taken = self.fetch, state.sampled.batch, state.taken.result()
        if self.device.type != "cpu" and any(value.device.type != "cpu" for value in tensors_in(batch)):
            # The user's own tensors on a device: the sampling thread has taken from them on the device's default stream.
            module = torch.get_device_module(self.device)
            module.current_stream(self.device).wait_stream(module.default_stream(self.device))
        return OnDevice(
            state.sampled,
            state.counts,
            fetch.to_device(taken),
            fetch.own.to_device(batch),
            fetch.own.to_device(state.sampled.plan),
        )

    def gather_device_rows(self, state: OnDevice) -> Gathered:
        return Gathered(
            state.sampled, state.counts, self.fetch.put_served_together(state.taken), state.batch, state.plan
        )

    def exchange_rows(self, state: Gathered) -> RowsSent:
        return RowsSent(state.sampled, state, self.fetch.send(state.counts, state.taken))

    def assemble(self, state: RowsSent) -> Finished:
        sampled, gathered = state.sampled, state.gathered
        rows, arrived = self.fetch.put_together(gathered.plan, gathered.taken, state.pending, sampled.places)
        self.fetch.count_fetched({type_: wanted.remote_id.numel() for type_, wanted in sampled.from_others.items()})
        if gathered.batch is None:
            return Finished(sampled.index, None, True, gathered.counts.all_left)
        self.fetch.own.measure(tensors_in([gathered.taken, gathered.batch, gathered.plan, arrived, rows]))
        self.fetch.count(sampled.places)
        batch, contents = gathered.batch, None if sampled.contents is None else self.builder.contents()
        if contents is not None and not self.builder.is_current(sampled.contents, contents):
            rows = {
                column: value
                for column, value in rows.items()
                if self.builder.has_current(column, sampled.contents, contents)
            }
            batch = self.builder.build_anew(sampled.mfg, rows, contents)
        for (type_, name), value in rows.items():
            store_of(batch, type_)[name] = value
        self._complete(batch, sampled, arrived)
        # One for a device is held for one more tick.
        later = (sampled.mfg, contents) if self.fetch.own.holds else ()
        return Finished(sampled.index, self.builder.finish(batch), False, gathered.counts.all_left, *later)

    def _complete(self, batch: Data | HeteroData, sampled: Sampled, arrived: Mapping[Column, Tensor]) -> None:
        """Add what has arrived for the batch beside its rows."""

    def deliver(self, finished: Finished) -> Data | HeteroData:
        """The batch as the data is now: one for a device has waited since it was put together, and the data may have been written to."""
        now = None if finished.contents is None else self.builder.contents()
        if now is None or now.equals(finished.contents):
            return finished.batch
        own = {(type_, name): store_of(finished.batch, type_)[name] for type_, name in self.builder.own}
        return self.builder.in_dtype(self.builder.build_anew(finished.mfg, own, now))


def ids_by_type(n_id: Tensor | Mapping[str | None, Tensor]) -> Mapping[str | None, Tensor]:
    """Ids by vertex type; None where there is only one."""
    return {None: n_id} if isinstance(n_id, Tensor) else n_id
