"""The producer of batches: requests go in, and finished batches leave its pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from salientpp.batch.builder import BatchBuilder
from salientpp.engine.basis import Basis
from salientpp.engine.counters import Work
from salientpp.engine.direct import BatchMaker, Direct, Made
from salientpp.engine.epochs import Draws
from salientpp.engine.huge_pages import ask_for_huge_pages
from salientpp.engine.pipeline import Pipeline, Stage
from salientpp.engine.request import Attendance, Request
from salientpp.engine.stages import BatchStages, Sampled
from salientpp.engine.way import PlacesByType, TiersByType, Way
from salientpp.engine.workers import Maker, SamplingWorkers
from salientpp.ops import return_freed_memory
from salientpp.processes import Threads, Undone, completed, forks, lazy, may_compute_in_parallel
from salientpp.sampling.schedule import BatchKeys, Turn
from salientpp.sampling.topology import ByType, Mfg, ids_by_type
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Column
from salientpp.store.fetch import Fetch, InPlace, Packed

#: Number of ticks after which freed memory returns to the system. It takes some milliseconds, and so does the first touch of pages that are needed again.
_TICKS = 64

#: Function that calls the user's code, instead of the stages: seed positions and draw keys -> complete batch.
ByHand = Callable[[Tensor, BatchKeys], Any]


@dataclass(frozen=True, eq=False)
class Drawn:
    """A drawn batch, with the places of its rows, before any row has moved.

    Attributes:
        notes: what each method decided about the batch in :meth:`Way.on_drawn`.
        list_bytes: bytes of the packets with draws from neighbour lists that other ranks hold.
    """

    mfg: Mfg
    places: PlacesByType
    notes: Sequence[Any]
    list_bytes: int = 0

    @classmethod
    def of(cls, mfg: Mfg, ways: Sequence[Way], look_up: Callable[[ByType], PlacesByType]) -> Drawn:
        """Lets each method (:class:`Way`) change a sample, and looks up the places of the rows that the sample still needs."""
        notes, list_bytes = [], getattr(mfg, "list_bytes", 0)
        for way in ways:
            mfg, note = way.on_drawn(mfg)
            notes.append(note)
        return cls(mfg, look_up(ids_by_type(mfg.node)), notes, list_bytes)


def _check_rows(way: Way, tiers: TiersByType, columns: Sequence[Column]) -> None:
    """Raises ValueError if a tier lacks the rows of a column, or holds them in another form than the part does, for instance not encoded."""
    for type_, name in columns:
        home, *others = (tier.rows.get(name) for tier in (tiers[type_].home, *tiers[type_].near, *tiers[type_].copies))
        for rows in others:
            expected, got = (None if each is None else (each.dtype, [*each.shape[1:]]) for each in (home, rows))
            if expected != got:
                raise ValueError(
                    f"ways: the tiers of {way.name!r} must have the rows of {name!r} as the part has them, each {expected}, got {got}; give a tier "
                    "the rows of all columns, encoded if columns are, or leave the way or the option out"
                )


class Producer:
    """Makes the batches of one engine. It takes the arguments of :class:`Engine`."""

    def __init__(self, basis: Basis, ways: Sequence[Way]) -> None:
        held = basis.source.template.contents()  # the contents that the tiers are made from
        tiers: Any = basis.tiers()
        for way in ways:
            tiers = way.place(basis, tiers)
            _check_rows(way, tiers, basis.source.exchanged)
        late = [way.name for way in ways if way.finds_late]
        if len(late) > 1:
            raise ValueError(
                f"at most one of the ways may find rows when a batch enters the pipeline (finds_late), got {', '.join(late)}; leave out all but one"
            )
        ask_for_huge_pages(rows for of_type in tiers.values() for rows in of_type.home.rows.values())
        self.basis, self.ways = basis, list(ways)
        source, on_host, others = basis.source, basis.on_host, basis.comm.device
        serves_in_place = others.type == "cpu"
        self.fetch = Fetch(
            tiers=tiers,
            exchange=source.exchange,
            columns=source.exchanged,
            seed_columns=source.seed_columns,
            seed_rows_here=source.seed_rows_here,
            own=InPlace(BufferPool()) if on_host else Packed(basis.device, dtype=basis.dtype),
            served=InPlace(BufferPool(), decodes=False) if serves_in_place else Packed(others, decodes=False),
            repeats=basis.repeats,
        )
        self.builder = BatchBuilder(
            fetch=self.fetch,
            template=source.template,
            add_batch_attributes=source.seeds.add_batch_attributes,
            device=basis.device,
            dtype=basis.dtype,
            pin_memory=basis.pin_memory and on_host and torch.accelerator.is_available(),
            own=source.own,
            held=held,
            marks_sizes=basis.marks_sizes,
            frames=source.frames,
        )
        gather = Threads(1, "salientpp-gather")
        self.work = Work()
        self.stages = BatchStages(self.fetch, self.builder, gather.submit, self.work, basis.device, self.ways)
        self.maker = BatchMaker(self.fetch, self.builder)
        self.workers = SamplingWorkers(basis.num_workers, source.drawing, basis.transform_sampler_output)
        for way in self.ways:
            way.attach(basis, self.fetch, self.workers)
        self._rounds, self.waits = source.drawing.stages(self.workers.scout), self._agree_on_waits()
        self._driver, self._num_ticks = Threads(1, "salientpp-drive"), 0
        self._forks = forks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _forks=forks())

    @property
    def is_local(self) -> bool:
        """True if batches are made in one call from rows that are all in this process."""
        return self.fetch.is_local and not any(way.needs_stages for way in self.ways)

    def _agree_on_waits(self) -> int:
        """Returns the number of ticks that drawn batches wait. It is the same on all ranks, because the ranks move through the stages together."""
        if not self.basis.source.drawing.is_collective:
            return 0
        own = max((way.waits for way in self.ways), default=0)
        return max(waits for (waits,) in self.basis.comm.gather_numbers([own]))

    @property
    def _drawing(self) -> list[list[Stage]]:
        """Stages that draw a batch together with other ranks, before its ten stages: one list per tick."""
        wait = [[Stage("begin_to_wait", self.stages.begin_to_wait, "host")]] if self.waits else []
        return [*self._rounds, *wait]

    @lazy
    def stage_names(self) -> list[str]:
        """Names of all stages of the pipeline, in order."""
        return [stage.name for run in (*self._drawing, self.stages.list()) for stage in run]

    @property
    def _maker(self) -> Maker:
        return self.maker if self.is_local else self.stages

    def drive(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function(*args)`` in this thread, or in a new one if a fork left this one without a working OpenMP."""
        if self._forks == forks() or may_compute_in_parallel():
            return function(*args)
        return self._driver.submit(function, *args).result()

    # --- an epoch -----------------------------------------------------------------------------------------

    def request(self, draws: Draws, turn: Turn, attendance: Attendance, by_hand: ByHand | None = None) -> Request:
        """Starts to draw a batch of an epoch, and returns the request that goes into the pipeline.

        Args:
            turn: tick of the batch, and which seeds it has.
            attendance: tells the batch's later stages whether this rank still wants it.
            by_hand: makes the whole batch with the user's code, instead of the stages; None: the stages make it.
        """
        pieces = draws.pieces(turn)
        if by_hand is not None:  # the user's code runs in the user's thread
            return Request(turn.tick, Undone(lambda: Made(turn.tick, by_hand(*pieces[0]))))
        requested = self.workers.request(draws.epoch, turn.tick, pieces, self._maker)
        ahead = [] if self.basis.source.drawing.is_collective else [way for way in self.ways if way.ahead]
        if not ahead:
            return Request(turn.tick, requested, draws, attendance)
        # Without sampling threads, this thread draws the batch now.
        sampling = completed(requested.result) if isinstance(requested, Undone) else requested
        for way in ahead:
            way.on_requested(draws, turn.tick, sampling)
        return Request(turn.tick, sampling, draws, attendance)

    @property
    def most_ahead(self) -> int:
        """Maximum number of batches that are drawn ahead."""
        return max([self.basis.most_ahead, *(way.ahead for way in self.ways)])

    def idle_request(self, tick: int, leaving: bool) -> Request:
        """Returns a request without a batch, for a tick in which only other ranks have batches."""
        return Request(tick, Undone(self._idle, tick, leaving))

    def without_batch(self, state: Any) -> Any:
        """Replaces a request by an empty one after this rank has left. Returns states of later stages as they are."""
        if not isinstance(state, Request):
            return state
        state.sampling.cancel()
        return self.idle_request(state.index, True)

    def attendance(self) -> Attendance:
        """Returns a new :class:`Attendance`, for an epoch that this rank begins."""
        return Attendance(partial(self._idle, leaving=True))

    def _idle(self, tick: int, leaving: bool) -> Sampled:
        places = self.fetch.look_up({})
        return Sampled(tick, places, leaving, asks=places)

    def pipeline(self, by_hand: ByHand | None = None) -> Pipeline | Direct:
        """Returns the pipeline that carries requests through the stages, or its direct replacement."""
        if by_hand is not None:
            return Direct(self.maker, is_ahead=False)
        if self.is_local:
            return Direct(self.maker, is_ahead=self.basis.num_workers > 0)
        stages, basis = self.stages, self.basis
        return Pipeline(
            stages.list(), steps=stages.steps, depth=basis.depth, device=basis.device, rank=basis.comm.rank, trace=stages.trace,
            hold=self.fetch.own.holds, ahead=self._drawing, waits=self.waits,
            end_tick=self._end_tick,
        )  # fmt: skip

    def _end_tick(self) -> None:
        self.fetch.exchange.mail.flush()
        self._num_ticks += 1
        if self._num_ticks % _TICKS == 0:
            self.return_freed_memory()

    def return_freed_memory(self) -> None:
        """Returns freed memory to the system, if this rank only trains, within a budget. Called after an epoch, and from time to time in it.

        The C library keeps the memory of smaller tensors that batches had. Later batches use it again, but never all of it.
        """
        if self.basis.has_budget:
            return_freed_memory()

    # --- single batches -----------------------------------------------------------------------------------

    def batch_of(self, mfg: Mfg, num_seeds: int, counts: bool) -> Any:
        """Makes the batch of one MFG outside any epoch, on one rank. ``counts``: count its rows in the statistics. A pipeline always does."""
        # A copy, so that the user's object stays unchanged.
        sampling = Undone(self.workers.prepare, 0, copy.copy(mfg), num_seeds, self._maker)
        if not self.is_local:
            pipeline = Pipeline(self.stages.list(), depth=1, device=self.basis.device)
            return pipeline.tick(Request(0, sampling)).batch
        made = sampling.result()
        self.work.add("gather", made.seconds[0])
        if counts:
            self.fetch.count(made.places)
        return made.batch

    def drawn(self, pieces: Sequence[tuple[Tensor, BatchKeys]], only_vertices: bool = False) -> Drawn:
        """Draws a batch of these pieces and looks up the places of its rows. Several threads may call it. See :meth:`DrawingMethod.draw`."""
        return self.noted(self.basis.source.drawing.draw(pieces, only_vertices))

    def noted(self, mfg: Mfg) -> Drawn:
        return Drawn.of(mfg, self.ways, self.fetch.look_up)
