"""Counts the rows that ranks fetch with caches that know the next batches.

The planner of loaders with ``lookahead=`` (:mod:`salientpp.ways.lookahead.planner`) chooses the rows to keep. The first epoch begins with the rows of the
static cache, and later epochs begin with the rows that the epoch before left in the cache. If the topology is stored in parts, a window ends with its epoch.
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
from salientpp.analysis.job import Job
from salientpp.analysis.result import Ahead, Volume
from salientpp.engine.producer import Drawn
from salientpp.sampling.schedule import Turn
from salientpp.vip.policies import cache_capacity, plan_cache, score
from salientpp.ways.lookahead.forecast import Blocks, ListSizes, Spread
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape, Window, group_of, plan_rows
from salientpp.ways.lookahead.waiting import waiting_bytes


@dataclass(eq=False)
class Known:
    """Count and forecast for the lookahead cache of one rank with one replication factor.

    Attributes:
        shape: shape of the cache; None if the cache stays static.
        refused: why the cache stays static although lookahead was asked for; else None.
        num_static: rows of the static cache.
        predicted, static, best: forecasts of the rows that a batch fetches: with lookahead, with a static cache, and with all future batches known.
        rows: rows fetched in each counted epoch, if the cache is not static.
    """

    shape: Shape | None
    refused: str | None
    num_static: int
    predicted: float
    static: float
    best: float
    reach: float
    rows: list[int]


class Lookahead:
    """Counts what lookahead caches of one rank would fetch, for every replication factor.

    Args:
        number: number of the rank.
        lookahead: the loader argument.
        epochs: epochs to count; 0: only forecast.

    Attributes:
        found: results by replication factor.
    """

    def __init__(self, job: Job, number: int, alphas: Sequence[float], lookahead: Window, epochs: int) -> None:
        self._engine, workload, self._epochs = job.engines[number], job.workloads[number], epochs
        self._num_batches = self._engine.basis.epochs.order.num_batches
        self._ends_with_epoch = job.part.topology == "parts"
        book, part_id = job.held[None], self._engine.basis.source.exchange.part_id
        scores = score("vip", workload).to(torch.float32)
        self._remote = scores.clone()
        self._remote[slice(*book.range_of(part_id))] = 0
        self._reach = 0  # number of batches that the longest window needs
        self._lists: deque[Tensor] = deque()  # lists of remote ids, from batch `_first` on
        self._first = 0
        self._later: Iterator[Tensor] = iter(())  # lists of the epochs after the counted ones
        if epochs and self._num_batches:
            self._later = chain.from_iterable(map(self._lists_of, count(epochs)))
        blocks = Blocks.of(workload, job.batches.draw_block, self._num_batches, job.batches.shared_draws is not None)
        spread = Spread.of(self._remote, blocks, None if blocks is None else self._trial)
        self.found: list[Known] = []
        self._planners: list[tuple[Planner, Known]] = []
        for factor in alphas:
            alpha = factor * job.alpha_scale
            own, plan, refused = plan_cache(scores, book, part_id, alpha), None, None
            try:
                plan = plan_rows(
                    lookahead, scores, book, part_id, own.numel(), job.widths[None], lambda: self._trial, lambda: blocks
                )  # fmt: skip
            except ValueError as error:
                refused = str(error)
            shape, members = plan or (None, own)
            slots, window = (own.numel(), 0) if shape is None else (shape.num_slots, shape.window)
            self._reach = max(self._reach, group_of(window) + window if window else 0)
            capacity = min(cache_capacity(alpha, book), own.numel())
            forecasts = spread.rows(slots, window), spread.rows(capacity, 0), spread.rows(capacity, math.inf)
            self.found.append(Known(shape, refused, own.numel(), *forecasts, spread.reach(slots), [0] * epochs))
            if epochs and shape is not None:
                self._planners.append((Planner(shape, scores, members), self.found[-1]))

    @cached_property
    def _trial(self) -> ListSizes:
        if not self._epochs:
            return ListSizes.expected(self._remote)
        turns, waiting = self._engine.basis.trial_turns, 0.0
        if self._ends_with_epoch and turns:
            waiting = sum(self._engine.dry(0, lambda drawn: waiting_bytes(drawn.mfg), turns)) / len(turns)
        return ListSizes.of(list(self._lists_of(0, turns)), self._remote.numel(), waiting)

    def _lists_of(self, epoch: int, turns: Sequence[Turn] | None = None) -> Iterator[Tensor]:
        """Yields the ids of each batch's remote rows, in the order of the batches of an epoch. :func:`ops.code_ids` packs them to save memory."""
        return self._engine.dry(epoch, self.measure, turns, only_vertices=True)

    def measure(self, batch: Drawn) -> Tensor:
        return ops.code_ids(batch.places[None].remote_id, self._remote.numel())

    def add(self, epoch: int, measured: Tensor) -> None:
        self._lists.append(measured)
        if len(self._lists) > self._reach:
            self._plan_next()

    def finish(self) -> None:
        """Plans the batches that are left, whose windows may reach into epochs after the last counted one. Then releases the planners' memory."""
        while self._first < self._epochs * self._num_batches:
            self._plan_next()
        self._planners, self._later = [], iter(())

    def _plan_next(self) -> None:
        epoch, ids = self._first // self._num_batches, ops.ids_of_list(self._list(self._first), self._remote.numel())
        for planner, known in self._planners:
            moves = planner.plan(ids, lambda own=planner: self._known(own.known))  # type: ignore[misc]  # known type
            known.rows[epoch] += moves.fetched_place.numel()
        self._lists.popleft()
        self._first += 1

    def _known(self, number: int) -> Tensor | None:
        """Returns the packed ids of a batch's remote rows. None: a loader would not know them yet, because its window ends with the epoch."""
        is_later = number // self._num_batches != self._first // self._num_batches
        return None if self._ends_with_epoch and is_later else self._list(number)

    def _list(self, number: int) -> Tensor:
        while self._first + len(self._lists) <= number:
            self._lists.append(next(self._later))
        return self._lists[number - self._first]


def volumes(ranks: Sequence[list[Known]], job: Job, vip: Sequence[Volume], epochs: int) -> list[Volume]:
    """Returns, for each static cache in ``vip``, the rows that all ranks fetch with a lookahead cache of the same size.

    With ``epochs=0`` these are forecasts.
    """
    found = []
    for own, known in zip(vip, zip(*ranks)):
        static, static_rows = sum(each.static for each in known), own.remote_rows_per_rank or ()
        if epochs and job.batches.draw_block > 1:
            # For batches with common draws, the probabilities underestimate the rows that a static cache leaves to fetch. So use the static cache's count.
            numbers = (max(1, engine.basis.epochs.order.num_batches) for engine in job.engines)
            static = sum(rows / number for rows, number in zip(static_rows, numbers))
        shapes, reach = [each.shape for each in known], max(each.reach for each in known)
        share = sum(each.predicted for each in known) / static if static > 0 else 1.0
        ahead = Ahead(
            refused=next((each.refused for each in known if each.refused is not None), None),
            windows=tuple(0 if shape is None else shape.window for shape in shapes),
            slots=tuple(each.num_static if each.shape is None else each.shape.num_slots for each in known),
            state_bytes=tuple(0 if shape is None else shape.state_bytes for shape in shapes),
            predicted_share=share,
            best_share=sum(each.best for each in known) / static if static > 0 else 1.0,
            reach=None if math.isinf(reach) else reach,
        )
        rows = None
        if epochs:
            rows = [rows if each.shape is None else sum(each.rows) / epochs for rows, each in zip(static_rows, known)]
        found.append(own.beside("lookahead", rows, share * (own.rows or 0) if rows is None else sum(rows), ahead=ahead))
    return found
