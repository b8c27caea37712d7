"""The engine, which makes the batches of epochs for a loader. It does not depend on the loaders that use it."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.counters import Counters
from salientpp.engine.direct import Direct
from salientpp.engine.epochs import Draws
from salientpp.engine.price import price_of
from salientpp.engine.producer import ByHand, Drawn, Producer
from salientpp.engine.run import Run
from salientpp.engine.source import by_type
from salientpp.engine.spans import SpanFile
from salientpp.engine.state import Disagreement, Resume
from salientpp.engine.trace import Trace
from salientpp.engine.way import Price, Way
from salientpp.processes import Lock, in_order, lazy
from salientpp.sampling.held_lists import Reads
from salientpp.sampling.schedule import Turn
from salientpp.store.tiers import NO_IDS, Tiers

Out = TypeVar("Out")


class Engine:
    """Makes the batches of one rank's epochs. Collective: the ranks construct their engines together.

    Args:
        basis: the values that determine the batches.
        ways: methods that move fewer bytes for the same batches, in the order in which they act.

    Attributes:
        lock: held while an epoch is begun.
    """

    def __init__(self, basis: Basis, ways: Sequence[Way]) -> None:
        self.basis, self.ways = basis, list(ways)
        self.producer = Producer(basis, self.ways)
        self.counters = Counters()
        self.lock = Lock()
        self._topology = self.producer.builder.held  # contents of the data that the graph was read from
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._run: Run | None = None  # the epoch begun last
        self.on_open: Callable[[Draws, Resume | None], None] | None = None  # :attr:`Run.on_open` of later epochs
        self.reset()

    def way(self, kind: type[Any]) -> Any:
        """Returns the first of ``ways`` that is an instance of ``kind``, such as the cache; None if there is none."""
        return next((way for way in self.ways if isinstance(way, kind)), None)

    # --- epochs -------------------------------------------------------------------------------------------

    def run(
        self,
        epoch: int,
        start: Resume | None = None,
        finish: Callable[[Any], Any] | None = None,
        by_hand: ByHand | None = None,
        begun: Callable[[Run], None] | None = None,
    ) -> Run:
        """Begins an epoch. With several ranks, first ends the previous epoch, and waits until all ranks have ended it.

        Args:
            epoch: number of the epoch. Together with the seed it determines the order and all draws.
            start: where a stopped run continues. None: at the beginning.
            finish: called with every batch, in the caller's thread.
            by_hand: function that makes complete batches, instead of the stages; only with one rank.
            begun: called with the epoch before anything happens in it.
        """
        with self.lock:
            self.close()
            with self.basis.comm.reporting("begin an epoch"):
                self.producer.drive(self.read_anew)
                for way in self.ways:
                    way.begin_epoch()
                self._run = run = self.producer.drive(Run, self.producer, self.counters, epoch, start, finish, by_hand)
                run.on_open = self.on_open or run.on_open
                self._runs.add(run)
                self.counters.begin(run.times)
        if begun is not None:
            begun(run)
        run.leave_if_done()
        return run

    def dry(
        self,
        epoch: int,
        measure: Callable[[Drawn], Out],
        turns: Sequence[Turn] | None = None,
        *,
        only_vertices: bool = False,
    ) -> Iterator[Out]:
        """Yields ``measure(batch)`` for this rank's batches of an epoch, to analyse it without moving rows. Only the places of rows are looked up.

        It needs a process that holds all neighbour lists.

        Args:
            measure: called by several threads, each with a different batch.
            turns: batches of the epoch to measure. None: all.
        """
        epochs = self.basis.epochs

        def measured(turn: Turn) -> Out:
            return measure(self.producer.drawn(epochs.pieces(epoch, turn), only_vertices))

        return in_order(measured, epochs.order.of_epoch(epoch) if turns is None else turns, "salientpp-dry")

    def price(self) -> Price:
        """Predicts the cost of a batch on this rank, from trial batches and forecasts of the methods in use. No rows
        move.

        If other ranks hold some neighbour lists, the call is collective.
        """
        source, tiers = self.basis.source, self.producer.fetch.tiers
        clock = time.process_time if source.drawing.is_collective else time.thread_time
        begun = clock()
        batches = [self.basis.epochs.pieces(0, turn) for turn in self.basis.trial_turns]
        if not source.drawing.is_collective:  # in this thread, whose time is measured
            tried = [self.producer.drawn(pieces) for pieces in batches]
        else:
            tried = source.drawing.draw_each(batches, self.producer.noted)
        seconds = (clock() - begun) / max(1, len(tried))
        return price_of(tried, tiers, source.row_bytes, source.exchange.wire_dtype.itemsize, self.ways, seconds)

    def move_to(self, epoch: int) -> bool:
        """Renumbers the epoch begun last, if no batch of it was requested yet. Returns True if it now has this number."""
        return self._run is not None and self._run.move_to(epoch)

    def close(self) -> None:
        """Leaves an unfinished epoch if there are several ranks, and waits until all ranks have left it.

        Raises:
            Exception: the epoch failed.
        """
        run = self._run
        try:
            if run is not None and self.basis.comm.size > 1 and not run.is_gone:
                run.check_thread()
                run.leave()
                run.join()
            if self.counters.failure is not None:
                raise self.counters.failure
        except Disagreement as difference:
            # All ranks stay connected, and the user may have mended it. It is raised here only if a thread found it in the background.
            is_new = difference is self.counters.failure
            self._run = self.counters.failure = None
            if is_new:
                raise
        self._run = None

    def read_anew(self) -> None:
        """Reads the rows of a ``Data`` again if the user has changed it. Without this call batches are still right, but are built twice."""
        producer, basis = self.producer, self.basis
        builder, fetch, source = producer.builder, producer.fetch, basis.source
        contents = source.template.contents()
        if contents is None or contents.equals(builder.held) or any(run.is_under_way for run in self._runs):
            return
        edges = [] if self._topology is None else contents.changed_edges(self._topology)
        if edges:
            names = ", ".join("the edges of data" if key is None else f"the edges of data[{key!r}]" for key in edges)
            warnings.warn(
                f"{names} have changed since this loader was made; as in PyG, it keeps using the old graph. Construct a new loader",
                UserWarning,
                stacklevel=6,
            )
            self._topology = contents
        columns = source.columns_now()
        basis.source = dataclasses.replace(source, rows=by_type(source.books, columns), exchanged=list(columns))
        fetch.tiers = basis.tiers({type_: _near_ids(tiers) for type_, tiers in fetch.tiers.items()})
        fetch.columns = basis.source.exchanged
        builder.held = contents

    # --- reports ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.producer.fetch.counts.clear()
        self.producer.workers.reads = Reads()
        self.producer.work.reset()
        self.basis.comm.seconds_waited = 0.0
        self.basis.source.exchange.reset_traffic()
        self.counters.reset()
        for way in self.ways:
            way.reset_counts()

    @property
    def is_busy(self) -> bool:
        """True if an epoch has begun, and another rank may request something in it."""
        return self._run is not None and not self._run.is_gone

    @property
    def queued(self) -> tuple[int, int]:
        """Numbers of batches of the latest epoch that wait to enter the pipeline, and that are in it."""
        run = self._run
        return (0, 0) if run is None else run.queued

    @lazy
    def _num_held(self) -> int:
        """Largest number of batches on the device: those in the pipeline, and the one that the caller holds."""
        pipeline = self.producer.pipeline()
        return 1 + (0 if isinstance(pipeline, Direct) else pipeline.num_past("copy_to_device"))

    def memory(self, bytes_of_batch: int = 0) -> dict[str, int]:
        """Returns bytes by holder: tiers, caches and other methods, the topology (``graph``), ``batches`` in flight, and rows that travel (``exchange``).

        Args:
            bytes_of_batch: bytes that a batch and its inputs take, if known in advance.
        """
        fetch, held = self.producer.fetch, self._num_held
        by_type_ = [tiers.memory() for tiers in fetch.tiers.values()]
        memory = {tier: sum(of_type[tier] for of_type in by_type_) for tier in by_type_[0]}
        for way in self.ways:
            for name, number in way.memory().items():
                memory[name] = memory.get(name, 0) + number
        graph = getattr(self.basis.source.sampler, "nbytes", 0)
        waiting = self.producer.waits * self.producer.stages.bytes_of_waiting
        batches = max(fetch.own.bytes_under_way(held), held * bytes_of_batch) + waiting
        exchange = fetch.served.bytes_under_way(held) + self.basis.source.exchange.buffers.bytes_allocated
        return {**memory, "graph": graph, "batches": batches, "exchange": exchange}

    def record_in(self, spans: SpanFile | None, describe: Callable[[], dict[str, Any]]) -> None:
        """Records the spans of all epochs that begin from now on in a file too. The file begins with the values of ``describe()``."""
        if spans is None:
            return
        if not spans.is_begun:
            spans.note("loader", describe())
        trace, producer, counters = self.producer.stages.trace, self.producer, self.counters
        if trace is None or isinstance(trace, SpanFile):
            producer.stages.trace = producer.maker.trace = spans
        else:  # somebody records these epochs for a while
            while trace.outer is not None and not isinstance(trace.outer, SpanFile):
                trace = trace.outer
            trace.outer = spans
        if self.basis.comm.size > 1:
            self.basis.comm.on_wait = lambda began, ended: spans.add("peers", counters.times.index + 1, began, ended)

    def trace_to(self, path: str | Path) -> Callable[[], None]:
        """Records spans of the epochs that begin from now on. Calling the result stops recording and writes a Chrome trace to ``path``."""
        path = Path(path).absolute()  # the working directory may change before the file is written
        producer = self.producer
        outer = producer.stages.trace
        trace = Trace(outer)
        producer.stages.trace = producer.maker.trace = trace

        def write() -> None:
            producer.stages.trace = producer.maker.trace = outer
            path.write_text(json.dumps(trace.to_chrome()))

        return write

    # --- copies -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        basis = dataclasses.replace(self.basis, epochs=copy.copy(self.basis.epochs))
        producer = copy.copy(self.producer)
        producer.basis = basis
        return {**self.__dict__, "basis": basis, "producer": producer, "_run": None, "_runs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _runs=weakref.WeakSet())


def _near_ids(tiers: Tiers) -> Tensor:
    """Returns the ids of the part's rows that have a copy on the device."""
    members = tiers.near[0].members if tiers.near else None
    return NO_IDS if members is None else members.ids
