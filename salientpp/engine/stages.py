"""The ten stages from seeds to a batch, after Appendix D of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152).

Each stage is a function from one frozen state to the next. One stage starts slow work, and a later stage waits for it. ``sample`` waits for the sampling
thread. The stage after each ``exchange_*`` waits for the all-to-all. Counts and ids leave at the end of a tick, in one message. ``copy_to_device`` waits
for the worker thread of ``gather_host_rows``.

A rank that has no batch for a tick carries a batch without seeds (``sampled.batch is None``). It requests nothing, but answers the other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.batch.attributes import storage_of
from salientpp.batch.builder import BatchBuilder
from salientpp.batch.contents import Contents
from salientpp.engine.counters import Work
from salientpp.engine.pipeline import Stage, record_stream, tensors_in
from salientpp.engine.request import Request
from salientpp.engine.trace import WORKER, Trace, traced
from salientpp.engine.way import HostWork, Wanted, Way
from salientpp.processes import Task, Undone, lazy
from salientpp.ranks.mail import Letter
from salientpp.sampling.topology import Mfg, ids_by_type
from salientpp.store.exchange import Counts, PendingCounts, PendingRows
from salientpp.store.fetch import Column, Fetch, Recipe, Taken
from salientpp.store.tiers import Places

#: Name of the last stage. Time and errors of a user's ``transform`` count as those of this stage.
LAST_STAGE = "assemble"

#: Number of stages in each step of a batch. At full depth, a step is a tick. A batch waits two ticks for the messages that it sends in one tick. So a tick may
#: be as short as half a round trip of the network.
STEPS = (1, 1, 0, 2, 0, 2, 2, 1, 0, 1)


@dataclass(frozen=True, eq=False)
class Sampled:
    """A batch as the sampling thread leaves it.

    Attributes:
        leaving: True if this rank has no more batches in this epoch.
        batch: complete, except for the rows that every sampled vertex gets. None without seeds.
        plan: by vertex type, the plan by which the rows of every sampled vertex are assembled.
        contents: contents of the data before the batch was made. None: the data cannot change.
        notes: name of a method (:class:`Way`) -> what it decided about the batch.
        asks: by vertex type or message, what this rank requests from the others.
        finding: future of the rows' places, if a method such as lookahead decides late where rows come from.
    """

    index: int
    places: Mapping[str | None, Places]
    leaving: bool = False
    batch: Data | HeteroData | None = None
    plan: Mapping[str | None, Places | Recipe] = field(default_factory=dict)
    mfg: Mfg | None = None
    contents: Contents | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    asks: Mapping[str | None, Wanted | Places] = field(default_factory=dict)
    finding: Task | Future | None = None


@dataclass(frozen=True, eq=False)
class InFlight:
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
    letter: Letter | None


@dataclass(frozen=True, eq=False)
class IdsRead(InFlight):
    """State after the ids arrived. ``asked``: by vertex type int64 [a], this part's rows that other ranks want, in the order of the ranks."""

    counts: Counts
    asked: Mapping[str | None, Tensor]


@dataclass(frozen=True, eq=False)
class RowsTaken(InFlight):
    counts: Counts
    taken: Task


@dataclass(frozen=True, eq=False)
class OnDevice(InFlight):
    """State whose ``batch``, ``plan`` and ``taken`` are on the device of delivery."""

    counts: Counts
    taken: Taken
    batch: Data | HeteroData | None
    plan: Mapping[str | None, Places | Recipe]


@dataclass(frozen=True, eq=False)
class Gathered(OnDevice):
    """State in which the rows for the other ranks, ``taken.served``, are complete."""


@dataclass(frozen=True, eq=False)
class RowsSent(InFlight):
    gathered: Gathered
    pending: PendingRows


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished batch.

    Attributes:
        idle: True if this rank had no batch for this tick.
        all_left: True if every rank had left the epoch.
        contents: contents of the data when the batch was assembled, if the data may have changed since.
    """

    index: int
    batch: Data | HeteroData | None
    idle: bool
    all_left: bool
    mfg: Mfg | None = None
    contents: Contents | None = None


@dataclass
class BatchStages:
    """The ten stages of one engine.

    Attributes:
        submit: runs a function in a worker thread.
        work: receives the seconds that worker threads spend.
        steps: number of stages in each step (:data:`STEPS`); the same on all ranks.
        bytes_of_waiting: bytes of the largest batch that has begun to wait.
    """

    fetch: Fetch
    builder: BatchBuilder
    submit: Callable[..., Task]
    work: Work
    device: torch.device
    ways: Sequence[Way] = ()
    trace: Trace | None = None
    steps: Sequence[int] = STEPS
    bytes_of_waiting: int = 0

    def list(self) -> list[Stage]:
        """Returns the stages in order. :data:`LAST_STAGE` is the last."""
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

    @lazy
    def _finder(self) -> Way | None:
        """The method that finds rows only when a batch enters the pipeline, or None."""
        return next((way for way in self.ways if way.finds_late), None)

    def make(self, index: int, mfg: Mfg, num_seeds: int) -> Sampled:
        """Makes the parts of a batch that need neither other ranks nor the rows of every sampled vertex. Sampling threads call it."""
        notes: dict[str, Any] = {}
        for way in self.ways:
            mfg, notes[way.name] = way.on_drawn(mfg)
        fetch, n_id, contents = self.fetch, ids_by_type(mfg.node), self.builder.contents()
        places = fetch.look_up(n_id)
        asks: dict[str | None, Wanted | Places] = {**places}
        for way in self.ways:
            asks |= way.wanted(notes[way.name])
        columns = self.builder.brought(contents)
        rows = {column: fetch.placeholder(column, places[column[0]].num_rows) for column in columns}
        seeds = fetch.seed_rows(n_id, num_seeds) if fetch.seed_columns else {}
        batch = self.builder.build(mfg, {**rows, **seeds}, contents)
        for column in columns:  # placeholders without rows keep the order of the attributes
            storage_of(batch, column[0])[column[1]] = fetch.placeholder(column, 0)
        plan = fetch.plan(places) if self._finder is None else {}
        batch = fetch.own.pin(batch)
        return Sampled(index, places, False, batch, plan, mfg, contents, notes, asks)

    def count_draw(self, _: object, seconds: float) -> None:
        self.work.add("draw", seconds)

    def begin_to_wait(self, request: Request) -> Request:
        """Tells methods such as lookahead which rows a batch needs, so that they plan ahead. The batch then waits while later batches are drawn."""
        sampled = self._drawn(request)
        if request.draws is not None and sampled.batch is not None:
            for way in self.ways:
                way.on_waiting(request.draws, request.index, sampled.places)
            held = {part.data_ptr(): part.nbytes for part in tensors_in([sampled.batch, sampled.mfg, sampled.places])}
            self.bytes_of_waiting = max(self.bytes_of_waiting, sum(held.values()))
        return dataclasses.replace(request, sampling=Undone(lambda: sampled))

    def _drawn(self, request: Request) -> Sampled:
        with self._default_stream():  # without sampling threads, the batch is drawn here
            sampled = request.result()
        if not isinstance(sampled, Sampled):
            raise RuntimeError(
                "a batch needs more exchanges between the ranks than when the loader was made: the sampler's num_neighbors has more hops now, or its "
                "subgraph_type is now 'induced'; make a new loader"
            )
        return sampled

    def sample(self, request: Request) -> Sampled:
        sampled = self._drawn(request)
        if self._finder is None or sampled.batch is None:
            return sampled
        if request.draws is None:  # a batch outside any epoch, so earlier and later batches are not known
            return dataclasses.replace(sampled, plan=self.fetch.plan(sampled.places))
        finding = self._finder.find(request.draws, request.index, sampled.places)
        return dataclasses.replace(sampled, finding=finding)

    def exchange_counts(self, state: Sampled) -> CountsSent:
        if state.finding is not None:
            places = state.finding.result()
            plan, asks = self.fetch.plan(places), {**state.asks, **places}
            state = dataclasses.replace(state, places=places, plan=plan, asks=asks, finding=None)
        counts = {type_: wanted.remote_counts for type_, wanted in state.asks.items()}
        return CountsSent(state, self.fetch.exchange.send_counts(counts, leaving=state.leaving))

    def read_counts(self, state: CountsSent) -> CountsRead:
        return CountsRead(state.sampled, self.fetch.exchange.read_counts(state.pending))

    def exchange_ids(self, state: CountsRead) -> IdsSent:
        ids = {type_: wanted.remote_id for type_, wanted in state.sampled.asks.items()}
        return IdsSent(state.sampled, state.counts, self.fetch.exchange.send_ids(state.counts, ids))

    def localize_ids(self, state: IdsSent) -> IdsRead:
        return IdsRead(state.sampled, state.counts, self.fetch.exchange.read_ids(state.counts, state.letter))

    def gather_host_rows(self, state: IdsRead) -> RowsTaken:
        return RowsTaken(state.sampled, state.counts, self.submit(self._work_on_host_rows, state))

    def _work_on_host_rows(self, state: IdsRead) -> Taken:
        take: Callable[[], Taken] = functools.partial(self._take_rows, state)
        for way in self.ways:
            note = state.sampled.notes.get(way.name)
            take = functools.partial(way.take, HostWork(state.index, note, state.asked, self.trace), take)
        return take()

    def _take_rows(self, state: IdsRead) -> Taken:
        started = time.perf_counter()
        with traced(self.trace, f"{WORKER}gather_host_rows", state.index):
            taken = self.fetch.take(state.sampled.plan, state.asked)
        self.work.add("gather", time.perf_counter() - started)
        return taken

    def copy_to_device(self, state: RowsTaken) -> OnDevice:
        fetch, batch, taken = self.fetch, state.sampled.batch, state.taken.result()
        if self.device.type != "cpu" and any(value.device.type != "cpu" for value in tensors_in(batch)):
            self._wait_for_default_stream(batch)  # it holds the user's own tensors on a device
        taken, batch = fetch.to_device(taken), fetch.own.to_device(batch)
        return OnDevice(state.sampled, state.counts, taken, batch, fetch.own.to_device(state.sampled.plan))

    def gather_device_rows(self, state: OnDevice) -> Gathered:
        taken = self.fetch.put_served_together(state.taken)
        return Gathered(state.sampled, state.counts, taken, state.batch, state.plan)

    def exchange_rows(self, state: Gathered) -> RowsSent:
        return RowsSent(state.sampled, state, self.fetch.send(state.counts, state.taken))

    def assemble(self, state: RowsSent) -> Finished:
        sampled, gathered = state.sampled, state.gathered
        rows, arrived = self.fetch.put_together(gathered.plan, gathered.taken, state.pending, sampled.places)
        if gathered.batch is None:
            return Finished(sampled.index, None, True, gathered.counts.all_left)
        self.fetch.own.measure(tensors_in([gathered.taken, gathered.batch, gathered.plan, arrived, rows]))
        self.fetch.count(sampled.places)
        batch, contents = gathered.batch, None if sampled.contents is None else self.builder.contents()
        if contents is not None and not self.builder.is_current(sampled.contents, contents):
            rows = current_rows(self.builder, rows, sampled.contents, contents)
            with self._default_stream():
                batch = self.builder.build_anew(sampled.mfg, rows, contents)
            self._wait_for_default_stream(batch)
        for (type_, name), value in rows.items():
            storage_of(batch, type_)[name] = value
        for way in self.ways:
            way.complete(batch, sampled.notes[way.name], arrived)
        batch = self.builder.finish(batch)
        for way in self.ways:
            way.deliver(batch, sampled.notes[way.name])
        # A batch for a device is held for one more tick, and the data may change meanwhile.
        later = (sampled.mfg, contents) if self.fetch.own.holds else ()
        return Finished(sampled.index, batch, False, gathered.counts.all_left, *later)

    def _default_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the device's default stream is current. The user's own tensors on a device are read on this stream, in every thread."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        module = torch.get_device_module(self.device)
        return module.stream(module.default_stream(self.device))

    def _wait_for_default_stream(self, batch: Data | HeteroData) -> None:
        """Lets the current stream use a batch that was made on the default stream."""
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            current = module.current_stream(self.device)
            current.wait_stream(module.default_stream(self.device))
            record_stream(batch, current)

    def deliver(self, finished: Finished) -> Data | HeteroData:
        """Returns the batch with the data's current contents. A batch for a device waits after it is assembled, and the data may change meanwhile."""
        now = None if finished.contents is None else self.builder.contents()
        if now is None or now.equals(finished.contents):
            return finished.batch
        own = {(type_, name): storage_of(finished.batch, type_)[name] for type_, name in self.builder.own}
        return self.builder.in_dtype(self.builder.build_anew(finished.mfg, own, now))


def current_rows(
    builder: BatchBuilder, rows: Mapping[Column, Tensor], then: Contents | None, now: Contents
) -> dict[Column, Tensor]:
    """Returns those of the gathered rows that are still current. They were gathered when the data had the contents ``then``; it now has ``now``."""
    return {column: value for column, value in rows.items() if builder.has_current(column, then, now)}
