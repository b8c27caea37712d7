"""Counts the rows that ranks fetch which know their next batches.

The planner (:mod:`salientpp.ways.lookahead.planner`) is that of loaders with ``lookahead=``. The first epoch begins with the rows of the static cache; later
ones with what the epoch before has left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count

import torch
from torch import Tensor

from salientpp import ops
from salientpp.analysis.result import Ahead
from salientpp.engine.engine import Engine
from salientpp.engine.producer import Drawn
from salientpp.sampling.schedule import Turn
from salientpp.vip.policies import Workload, cache_capacity, plan_cache, score
from salientpp.ways.lookahead.forecast import Blocks, Spread, Trial
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape, Window, group_of, plan_rows


@dataclass(frozen=True, eq=False)
class Known:
    """What one rank's cache does, with one replication factor.

    Attributes:
        shape: None where the cache stays the static one; ``refused`` says why, where that is not what was asked for.
        rows: fetched in each counted epoch; empty if only predicted.
        predicted, static, best: rows per batch by the forecast: with the window, with a static cache, and with all of the future.
    """

    shape: Shape | None
    refused: str | None
    num_static: int
    rows: list[int]
    predicted: float
    static: float
    best: float
    reach: float


class Lookahead:
    """The caches of one rank, for every replication factor; of plain batches.

    Args:
        workload: of the rank's part; it plans as loaders do.
        lookahead: as of a loader.
        epochs: to count; 0: only predicted.
    """

    edges = False

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        alphas: Sequence[float],
        lookahead: Window,
        row_bytes: int,
        epochs: int,
    ) -> None:
        self._engine, self._workload, self._alphas = engine, workload, alphas
        self._epochs, self._num_batches = epochs, engine.basis.epochs.order.num_batches
        book, part_id = workload.book, workload.part_id
        begin, end = book.range_of(part_id)
        scores = score("vip", workload).to(torch.float32)
        self._remote = scores.clone()
        self._remote[begin:end] = 0
        self._members: list[Tensor] = []
        self._plans: list[tuple[Shape, Tensor] | None] = []
        self._refused: list[str | None] = []
        for alpha in alphas:
            own, plan, words = plan_cache(scores, book, part_id, alpha), None, None
            try:
                plan = plan_rows(
                    lookahead, scores, book, part_id, own.numel(), row_bytes, lambda: self._trial, blocks=lambda: self._blocks
                )  # fmt: skip
            except ValueError as error:
                words = str(error)
            self._members.append(own)
            self._plans.append(plan)
            self._refused.append(words)
        self._planners: list[Planner | None] = []
        self._outside: list[Tensor] = []
        for own, plan in zip(self._members, self._plans) if epochs else ():
            self._planners.append(None if plan is None else Planner(plan[0], scores, plan[1]))
            self._outside.append(torch.ones(book.num_vertices, dtype=torch.bool, device="cpu"))
            self._outside[-1][own] = False
        windows = [0 if plan is None else group_of(plan[0].window) + plan[0].window for plan in self._plans]
        self._reach = max(windows, default=0)
        self._rows = [[0] * epochs for _ in alphas]
        self._lists: deque[Tensor] = deque()  # from batch `_first` on
        self._first = 0
        self._later: Iterator[Tensor] = iter(())

    @cached_property
    def _trial(self) -> Trial:
        if not self._epochs:
            return Trial.expected(self._remote)
        return Trial.of(list(self._lists_of(0, self._engine.basis.trial_turns)), self._remote.numel())

    @cached_property
    def _blocks(self) -> Blocks | None:
        basis = self._engine.basis
        shared = getattr(basis.source.sampler, "shared_draws", None) is not None
        return Blocks.of(self._workload, basis.epochs.draw_block, self._num_batches, shared)

    def _lists_of(self, epoch: int, turns: Sequence[Turn] | None = None) -> Iterator[Tensor]:
        """The coded remote ids of the batches of an epoch."""
        return self._engine.dry(epoch, self.measure, turns, only_vertices=True)

    # --- counting -----------------------------------------------------------------------------------------

    def measure(self, batch: Drawn) -> Tensor:
        return ops.code_ids(batch.places[None].remote_id, self._remote.numel())

    def add(self, epoch: int, measured: Tensor) -> None:
        self._lists.append(measured)
        if len(self._lists) > self._reach:
            self._plan_next()

    def _finish(self) -> None:
        """Plan the last batches, whose windows reach into the next epochs."""
        epochs = count(self._epochs) if self._num_batches else ()
        self._later = chain.from_iterable(map(self._lists_of, epochs))
        while self._first < self._epochs * self._num_batches:
            self._plan_next()

    def _plan_next(self) -> None:
        epoch, ids = self._first // self._num_batches, ops.ids_of_list(self._list(self._first), self._remote.numel())
        for rows, planner, is_outside in zip(self._rows, self._planners, self._outside):
            if planner is None:
                rows[epoch] += int(torch.count_nonzero(is_outside[ids]))
            else:
                moves = planner.plan(ids, lambda own=planner: self._list(own.known))  # type: ignore[misc]  # known type
                rows[epoch] += moves.fetched_place.numel()
        self._lists.popleft()
        self._first += 1

    def _list(self, number: int) -> Tensor:
        while self._first + len(self._lists) <= number:
            self._lists.append(next(self._later))
        return self._lists[number - self._first]

    # --- results ------------------------------------------------------------------------------------------

    def found(self) -> list[Known]:
        """What all replication factors leave, after the last epoch."""
        self._finish()
        spread = Spread.of(self._remote, self._blocks, None if self._blocks is None else self._trial)
        found = []
        for alpha, own, plan, words, rows in zip(
            self._alphas, self._members, self._plans, self._refused, self._rows, strict=True
        ):
            slots, window = (own.numel(), 0) if plan is None else (plan[0].num_slots, plan[0].window)
            capacity = min(cache_capacity(alpha, self._workload.book), own.numel())
            predicted, static = spread.rows(slots, window), spread.rows(capacity, 0)
            best = spread.rows(capacity, math.inf)
            shape = None if plan is None else plan[0]
            found.append(Known(shape, words, own.numel(), rows, predicted, static, best, spread.reach(slots)))
        return found


def over_ranks(ranks: Sequence[Known]) -> Ahead:
    """The figures of all ranks, with one replication factor."""
    static, shapes = sum(each.static for each in ranks), [each.shape for each in ranks]
    reach = max(each.reach for each in ranks)
    return Ahead(
        refused=next((each.refused for each in ranks if each.refused is not None), None),
        windows=tuple(0 if shape is None else shape.window for shape in shapes),
        slots=tuple(each.num_static if each.shape is None else each.shape.num_slots for each in ranks),
        state_bytes=tuple(0 if shape is None else shape.state_bytes for shape in shapes),
        predicted_share=sum(each.predicted for each in ranks) / static if static > 0 else 1.0,
        best_share=sum(each.best for each in ranks) / static if static > 0 else 1.0,
        reach=None if math.isinf(reach) else reach,
    )
