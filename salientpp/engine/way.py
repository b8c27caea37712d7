"""The protocol of a way: a method that moves fewer bytes for the same batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws
from salientpp.engine.pipeline import Trace
from salientpp.engine.workers import SamplingWorkers
from salientpp.processes import Task
from salientpp.store.exchange import Column, Message
from salientpp.store.fetch import Fetch, Taken
from salientpp.store.tiers import Places, Tiers

#: By vertex type; None where there is only one.
TiersByType = Mapping["str | None", Tiers]
PlacesByType = Mapping["str | None", Places]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a rank asks the others for under one name.

    Attributes:
        remote_id: int64 [n], ids or words, grouped by the part that answers.
        remote_counts: int64 [parts], how many for each part.
    """

    remote_id: Tensor
    remote_counts: Tensor


@dataclass(frozen=True, eq=False)
class Price:
    """What a batch of this rank takes, as the expected mean over an epoch.

    Attributes:
        fetched: by vertex type, bytes of the rows that arrive from other ranks, and of what arrives in place of rows.
        copied: by vertex type, bytes that come from the host's memory: those of its rows and copies of rows that the device lacks.
        seconds: of one thread, to draw the batch and to find its rows.
    """

    fetched: Mapping[str | None, float]
    copied: Mapping[str | None, float]
    seconds: float


@dataclass(frozen=True, eq=False)
class HostWork:
    """What the worker thread does on the host for one tick.

    Attributes:
        index: of the batch.
        note: what :meth:`Way.on_drawn` noted of this rank's batch; None without a batch.
        asked: by vertex type or message, what the other ranks want.
        trace: takes spans, if there is one.
    """

    index: int
    note: Any
    asked: Mapping[str | None, Tensor]
    trace: Trace | None


class Way:
    """One method that moves fewer bytes for the same batches.

    A method of this class that a subclass does not override has no effect. The engine calls them in the order given here: :meth:`place` and
    :meth:`attach` once, collectively; :meth:`begin_epoch` for each epoch; the others for each batch.

    Attributes:
        name: under which errors, notes and statistics name it.
        messages: what ranks ask one another for beside rows.
        needs_stages: batches go through the ten stages even where one process could make them in one call.
        finds_late: :meth:`find` decides where rows come from when a batch enters the pipeline. At most one way of an engine may do so.
    """

    name: ClassVar[str] = ""
    messages: Sequence[Message] = ()
    needs_stages = False
    finds_late = False

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        """The tiers with what this way adds to them. Collective: every rank calls it."""
        return tiers

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        """Prepare for batches whose rows ``fetch`` brings and that ``workers`` draw. Collective: every rank calls it."""

    def begin_epoch(self) -> None:
        """Before any batch of an epoch enters the pipeline."""

    def on_drawn(self, mfg: Any) -> tuple[Any, Any]:
        """What is left of a sampled batch, and a note for the later steps. In a sampling thread."""
        return mfg, None

    def wanted(self, note: Any) -> Mapping[str | None, Wanted]:
        """By message, what this rank asks the others for."""
        return {}

    def find(self, draws: Draws, tick: int, places: PlacesByType) -> Task | Future:
        """Start to decide where the rows of a batch come from, in the order of the batches; gives the new places."""
        raise NotImplementedError

    def take(self, work: HostWork, take_rows: Callable[[], Taken]) -> Taken:
        """Take rows from the host, by ``take_rows()``, and what this way adds. In a worker thread."""
        return take_rows()

    def complete(self, batch: Data | HeteroData, note: Any, arrived: Mapping[Column, Tensor]) -> None:
        """Add to a batch what has arrived for it beside its rows."""

    def deliver(self, batch: Data | HeteroData, note: Any) -> None:
        """A batch is finished."""

    def price(self, price: Price, notes: Sequence[Any]) -> Price:
        """What a batch takes with this way, by the notes of those that were tried; its tiers and what it changes in :meth:`on_drawn` count in ``price``."""
        return price

    def memory(self) -> Mapping[str, int]:
        """Bytes that it holds beside the tiers, by the names of ``loader.memory()``."""
        return {}

    def counts(self) -> Mapping[str, int]:
        """Statistics of its own, by name."""
        return {}

    def reset_counts(self) -> None:
        """Count anew."""
