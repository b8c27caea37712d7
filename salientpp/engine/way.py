"""The interface of a way: a method, such as a cache, that moves fewer bytes for the same batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws
from salientpp.engine.trace import Trace
from salientpp.engine.workers import SamplingWorkers
from salientpp.processes import Task
from salientpp.store.exchange import Column, Message
from salientpp.store.fetch import Fetch, Taken
from salientpp.store.tiers import Places, Tiers

#: Tiers or places by vertex type; the key is None in a graph with one vertex type.
TiersByType = Mapping["str | None", Tiers]
PlacesByType = Mapping["str | None", Places]


@dataclass(frozen=True, eq=False)
class Wanted:
    """The requests of a rank to the others: ids of rows of one vertex type, or one kind of message.

    Attributes:
        remote_id: int64 [n], ids of the rows, or words of the message, grouped by the part that answers.
        remote_counts: int64 [parts], number of ids or words for each part.
    """

    remote_id: Tensor
    remote_counts: Tensor


@dataclass(frozen=True, eq=False)
class Price:
    """Expected cost of a batch of this rank, as a mean over an epoch.

    Attributes:
        fetched: by vertex type, bytes that arrive from other ranks, as rows or instead of rows.
        copied: by vertex type, bytes that come from the host's memory: rows, and copies of rows that the device lacks.
        seconds: time of one thread to sample the batch and to find its rows.
        requests: bytes that this rank sends to other ranks to ask for rows and for sums.
        lists: bytes of the requests for neighbour lists that other ranks hold, and of their answers.
    """

    fetched: Mapping[str | None, float]
    copied: Mapping[str | None, float]
    seconds: float
    requests: float = 0.0
    lists: float = 0.0


@dataclass(frozen=True, eq=False)
class HostWork:
    """Describes what the worker thread that takes rows on the host does in one tick.

    Attributes:
        index: number of the batch.
        note: the object that :meth:`Way.on_drawn` returned for this rank's batch. None without a batch.
        asked: by vertex type or message, what the other ranks request.
        trace: trace that receives spans, or None.
    """

    index: int
    note: Any
    asked: Mapping[str | None, Tensor]
    trace: Trace | None


class Way:
    """A method that moves fewer bytes for the same batches.

    Each function of this class has no effect unless a subclass overrides it. The engine calls :meth:`place` and :meth:`attach` once, collectively. It calls
    :meth:`begin_epoch` for each epoch, and the other functions for each batch or on request. They are listed below in the order of the calls. A planner that
    only compares ways calls :meth:`choose`, :meth:`on_drawn` and :meth:`price`.

    Attributes:
        name: name of the way in errors, notes and statistics.
        messages: kinds of requests that ranks send each other besides requests for rows.
        needs_stages: True if batches must go through the ten stages even if one process could make them in one call.
        finds_late: True if :meth:`find` decides where rows come from when a batch enters the pipeline. Only one way of an engine may do so.
        waits: number of ticks that a batch waits between its draw and its entry into the ten stages, if batches are drawn in rounds. The engine reads it after
            :meth:`attach`, and takes the largest number of all ways and ranks.
        ahead: number of batches that are drawn ahead of the batch that enters the pipeline, if they are not drawn in rounds. The engine reads it for each
            epoch, and takes the largest number of all ways.
    """

    name: ClassVar[str] = ""
    messages: Sequence[Message] = ()
    needs_stages = False
    finds_late = False
    waits = 0
    ahead = 0

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        """Decides which rows this method will hold, to price it. Returns the tiers as :meth:`place` will, but without their rows. Collective."""
        return tiers

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        """Fetches the rows that this method holds, and returns the tiers with those that it adds. Collective: every rank calls it."""
        return tiers

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        """Prepares for batches whose rows ``fetch`` brings and that ``workers`` draw. Collective: every rank calls it."""

    def begin_epoch(self) -> None:
        """Prepares for an epoch, before any of its batches enters the pipeline."""

    def on_requested(self, draws: Draws, tick: int, sampling: Task | Future) -> None:
        """Learns that a batch will be drawn; ``sampling.result()`` waits for it. The engine calls it in the order of the batches.

        It calls it only if :attr:`ahead` is above 0 and this process draws batches without other ranks.
        """

    def on_drawn(self, mfg: Any) -> tuple[Any, Any]:
        """Changes a sampled batch. Returns it with a note: any object, which later calls for this batch get. A sampling thread calls it."""
        return mfg, None

    def wanted(self, note: Any) -> Mapping[str | None, Wanted]:
        """Returns this method's requests to other ranks for a batch, by name of the message."""
        return {}

    def on_waiting(self, draws: Draws, tick: int, places: PlacesByType) -> None:
        """Learns which rows a batch needs that was drawn and begins to wait. The engine calls it in the order of the batches, if batches wait."""

    def find(self, draws: Draws, tick: int, places: PlacesByType) -> Task | Future:
        """Starts to decide from which tier each row of a batch comes.

        Returns a future of the result, which replaces ``places``. If :attr:`finds_late` is True, the engine calls it
        once per batch of an epoch, in the order of the batches.
        """
        raise NotImplementedError

    def take(self, work: HostWork, take_rows: Callable[[], Taken]) -> Taken:
        """Takes a batch's rows from the host, by calling ``take_rows()``, and adds this method's own data. A worker thread calls it."""
        return take_rows()

    def complete(self, batch: Data | HeteroData, note: Any, arrived: Mapping[Column, Tensor]) -> None:
        """Adds to a batch the data that this method got for it besides rows."""

    def deliver(self, batch: Data | HeteroData, note: Any) -> None:
        """Handles a complete batch, at the end of its last stage."""

    def price(self, price: Price, notes: Sequence[Any]) -> Price:
        """Returns the cost of a batch with this method, from its notes on the trial batches.

        ``price`` already includes the effects of the method's tiers and of :meth:`on_drawn`.
        """
        return price

    def memory(self) -> Mapping[str, int]:
        """Returns bytes that this method holds beside the tiers, under the names of ``loader.memory_used()``."""
        return {}

    def counts(self) -> Mapping[str, int]:
        """Returns this method's own statistics, by name."""
        return {}

    def reset_counts(self) -> None:
        """Resets this method's statistics."""
