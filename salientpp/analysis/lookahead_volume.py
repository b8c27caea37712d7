"""How many feature rows would cross the network, if every rank knew its next batches?

Counted are the very rows that loaders with ``lookahead=`` fetch: the same planner (:mod:`salientpp.ways.lookahead.planner`) goes through the batches that
they make
for the same seed. The first epoch begins with the rows of the static cache; later ones with what the epoch before has left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.sampling.schedule import Schedule
from salientpp.vip.policies import Workload, cache_capacity, plan_cache, score
from salientpp.ways.lookahead.planner import Blocks, Planner, Shape, Trial, Window, forecast, plan_rows

#: Batches drawn ahead, per thread.
_AHEAD = 4


@dataclass(frozen=True)
class LookaheadVolume:
    """Rows fetched per epoch, over all K parts, by ranks that know their next batches; with one replication factor and the policy 'vip'.

    Attributes:
        fanouts, replication_factor: of the cache.
        refused: why there is no such cache: the ids of the window would take too much of its memory. Then it counts as the static one.
        windows: by part, how many batches are known ahead; 0: the cache is the static one.
        slots: by part, rows that are kept; the rest of the memory has the ids of the window and what finds rows, ``state_bytes``.
        remote_rows_per_epoch, remote_rows_per_part: means over epochs; None if only predicted.
        remote_bytes_per_epoch: that these rows take on their way.
        predicted_share: rows over those of the static cache of the same memory, by the forecast; where batches draw alike in blocks and the latter are counted,
            over these.
        best_share: the same with all of the future.
        reach: T*, the largest of the parts: with a longer window nothing more is saved.
    """

    fanouts: tuple[int, ...]
    replication_factor: float
    refused: str | None
    windows: tuple[int, ...]
    slots: tuple[int, ...]
    state_bytes: tuple[int, ...]
    remote_rows_per_epoch: float | None
    remote_rows_per_part: tuple[float, ...] | None
    remote_bytes_per_epoch: float | None
    predicted_share: float
    best_share: float
    reach: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "reach": None if math.isinf(self.reach) else self.reach}


@dataclass(frozen=True, eq=False)
class Ahead:
    """What one part's cache does, with one replication factor.

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


def look_ahead(
    workload: Workload,
    schedule: Schedule,
    alphas: Sequence[float],
    lookahead: Window,
    *,
    row_bytes: int,
    epochs: int,
    shared: bool = False,
    draw_block: int = 1,
    on_batch: Callable[[], None] = lambda: None,
) -> list[Ahead]:
    """One part's caches, for every replication factor.

    Args:
        workload: of the part; it plans as loaders do.
        schedule: of its batches.
        lookahead: as of a loader.
        row_bytes: of a row.
        epochs: to count; 0: only predicted.
        shared, draw_block: how batches are drawn.
        on_batch: called after each batch.
    """
    book, part_id = workload.book, workload.part_id
    begin, end = book.range_of(part_id)
    scores = score("vip", workload).to(torch.float32)
    remote = scores.clone()
    remote[begin:end] = 0
    num_vertices, graph = book.num_vertices, workload.graph

    def coded(seeds: Tensor, key: int) -> Tensor:
        n_id = ops.sample_vertices(
            graph.indptr, graph.indices, seeds, workload.num_neighbors, key, workload.replace, shared=shared
        )
        return ops.code_ids(n_id, num_vertices, begin, end)

    def drawn(epoch: int, only: Iterable[int] | None = None) -> Iterator[tuple[Tensor, int]]:
        return schedule.drawn(workload.seeds, epoch, draw_block, only)

    def trial() -> Trial:
        if not epochs:
            return Trial.expected(remote)
        tried = drawn(0, Trial.batches(schedule.num_batches))
        return Trial.of([coded(*batch) for batch in tried], num_vertices)

    def agreeing() -> Blocks | None:
        return Blocks.of(workload, draw_block, schedule.num_batches, shared)

    tried, blocks = cache(trial), cache(agreeing)
    members, planned, refused = [], [], []
    for alpha in alphas:
        members.append(plan_cache(scores, book, part_id, alpha))
        plan, words = None, None
        try:
            plan = plan_rows(lookahead, scores, book, part_id, members[-1].numel(), row_bytes, tried, blocks=blocks)
        except ValueError as error:
            words = str(error)
        planned.append(plan)
        refused.append(words)
    rows: list[list[int]] = [[] for _ in alphas]
    if epochs and schedule.num_batches:
        rows = _count(coded, drawn, schedule.num_batches, epochs, scores, members, planned, on_batch)
    found = []
    for alpha, own, plan, words, of_epochs in zip(alphas, members, planned, refused, rows):
        slots, window = (own.numel(), 0) if plan is None else (plan[0].num_slots, plan[0].window)
        capacity = min(cache_capacity(alpha, book), own.numel())
        of_blocks = (None, None) if blocks() is None else (blocks(), tried())
        expected = forecast(remote, slots, window, capacity, *of_blocks)
        found.append(
            Ahead(
                None if plan is None else plan[0],
                words,
                own.numel(),
                of_epochs,
                expected.rows,
                expected.static_rows,
                forecast(remote, capacity, math.inf, None, *of_blocks).rows,
                expected.reach,
            )
        )
    return found


def _count(
    coded: Callable[[Tensor, int], Tensor],
    drawn: Callable[[int], Iterator[tuple[Tensor, int]]],
    num_batches: int,
    epochs: int,
    prior: Tensor,
    members: Sequence[Tensor],
    planned: Sequence[tuple[Shape, Tensor] | None],
    on_batch: Callable[[], None],
) -> list[list[int]]:
    """Rows fetched, by cache and epoch."""
    planners = [None if plan is None else Planner(plan[0], prior, plan[1]) for plan in planned]
    outside = []
    for own in members:
        outside.append(torch.ones(prior.numel(), dtype=torch.bool, device="cpu"))
        outside[-1][own] = False
    rows = [[0] * epochs for _ in planners]
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="salientpp-ahead") as pool:
        lists = _Lists((batch for epoch in count() for batch in drawn(epoch)), coded, pool)
        for index in range(epochs * num_batches):
            ids = ops.ids_of_list(lists[index], prior.numel())
            for of_cache, planner, is_outside in zip(rows, planners, outside):
                if planner is None:
                    number = int(torch.count_nonzero(is_outside[ids]))
                else:
                    number = planner.plan(ids, partial(lists.after, planner)).fetched_place.numel()
                of_cache[index // num_batches] += number
            lists.drop_before(index + 1)
            on_batch()
        lists.cancel()
    return rows


class _Lists:
    """What batches need, by their number, drawn when it is asked for and a little ahead."""

    def __init__(
        self,
        batches: Iterator[tuple[Tensor, int]],
        coded: Callable[[Tensor, int], Tensor],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._batches, self._coded, self._pool = batches, coded, pool
        self._first = 0
        self._found: deque[Future[Tensor]] = deque()

    def __getitem__(self, number: int) -> Tensor:
        ahead = _AHEAD * torch.get_num_threads()
        while self._first + len(self._found) <= number + ahead:
            self._found.append(self._pool.submit(self._coded, *next(self._batches)))
        return self._found[number - self._first].result()

    def after(self, planner: Planner) -> Tensor:
        """The first that the planner does not know."""
        return self[planner.known]

    def drop_before(self, number: int) -> None:
        while self._first < number:
            self._found.popleft()
            self._first += 1

    def cancel(self) -> None:
        for each in self._found:
            each.cancel()


def summed(
    fanouts: Sequence[int], alphas: Sequence[float], parts: Sequence[Sequence[Ahead]], row_bytes: int
) -> list[LookaheadVolume]:
    """Over all parts; ``parts`` is by part and replication factor."""
    found = []
    for place, alpha in enumerate(alphas):
        own = [of_part[place] for of_part in parts]
        static = sum(each.static for each in own)
        rows = [sum(each.rows) / len(each.rows) for each in own if each.rows]
        counted = len(rows) == len(own)
        found.append(
            LookaheadVolume(
                tuple(fanouts),
                alpha,
                next((each.refused for each in own if each.refused is not None), None),
                tuple(0 if each.shape is None else each.shape.window for each in own),
                tuple(each.num_static if each.shape is None else each.shape.num_slots for each in own),
                tuple(0 if each.shape is None else each.shape.state_bytes for each in own),
                sum(rows) if counted else None,
                tuple(rows) if counted else None,
                sum(rows) * row_bytes if counted else None,
                sum(each.predicted for each in own) / static if static > 0 else 1.0,
                sum(each.best for each in own) / static if static > 0 else 1.0,
                max((each.reach for each in own), default=math.inf),
            )
        )
    return found
