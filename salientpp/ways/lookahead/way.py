"""Lookahead cache: keeps the remote rows that the next batches need, which it knows because it draws them in advance.

Sampling threads draw batches W ahead, only to learn which rows they need (:class:`Scouts`). If the topology is divided among ranks, drawn batches wait instead
(:mod:`salientpp.ways.lookahead.waiting`). The decision which rows to keep (:mod:`salientpp.ways.lookahead.planner`) begins in stage ``sample`` and is awaited
in the next stage. If there are sampling threads, it runs in a thread of its own. Requests that have not entered the pipeline may be cancelled. A batch that
has entered is always put together, also when the epoch is left, so no decision has to be undone.

Rows move when batches are put together, in the order of the batches (:mod:`salientpp.store.fetch`). Each batch reads its slots before it writes the rows that
it fetched. So a slot is overwritten only after every batch that needed its row has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp import ops
from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws
from salientpp.engine.way import PlacesByType, Price, TiersByType
from salientpp.engine.workers import SamplingWorkers
from salientpp.processes import Task, Threads, Undone, completed
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import BatchKeys, Turn
from salientpp.sampling.seeds import workload_of_part
from salientpp.sampling.topology import ids_by_type
from salientpp.store.fetch import Fetch
from salientpp.store.tiers import NO_IDS, Kept, Places
from salientpp.vip.policies import Policy
from salientpp.ways.cache import Cache
from salientpp.ways.lookahead.forecast import Blocks, ListSizes, Spread
from salientpp.ways.lookahead.planner import Moves, Planner
from salientpp.ways.lookahead.shape import Shape, Window, group_of, plan_rows, reach_of
from salientpp.ways.lookahead.waiting import Waiting, waiting_bytes

#: Coded list of the remote ids that a batch needs, by vertex type.
Lists = Mapping[str | None, Tensor]


class Scouts:
    """Draws upcoming batches in advance and gives the ids of their remote rows, in order, across epochs.

    Args:
        turns: returns this rank's batches in an epoch.
        submit: starts a task for (epoch, turn), in a thread or by the caller. The task returns the batch's remote ids.
        ahead: number of batches that are drawn before the planner asks for their ids.
    """

    def __init__(
        self, turns: Callable[[Draws], Sequence[Turn]], submit: Callable[[Draws, Turn], Task | Undone], ahead: int
    ) -> None:
        # Up to three epochs are in use: that of the entering batch, that of the batch to draw, and the epoch after one of these.
        self._turns = lru_cache(3)(turns)
        self._submit, self._ahead = submit, ahead
        self._pending: deque[Task | Undone] = deque()
        self._expected: tuple[Draws, int] | None = None  # the batch that should enter next
        self._next: tuple[Draws, int] | None = None  # the batch to draw next

    def enter(self, draws: Draws, tick: int) -> bool:
        """Records that a batch enters the pipeline. Returns True if it directly follows the one that entered before."""
        number = bisect_left(self._turns(draws), tick, key=lambda turn: turn.tick)
        follows = self._expected == (draws, number)
        if not follows:
            self.forget()
            self._next = self._after(draws, number)
        self._expected = self._after(draws, number)
        return follows

    def forget(self) -> None:
        for each in self._pending:
            each.cancel()
        self._pending.clear()
        self._expected = self._next = None

    def next(self) -> Lists | None:
        """Returns the remote ids of the next batch, each batch once. None if there are no further batches."""
        while self._next is not None and len(self._pending) <= self._ahead:
            draws, number = self._next
            self._pending.append(self._submit(draws, self._turns(draws)[number]))
            self._next = self._after(draws, number)
        return self._pending.popleft().result() if self._pending else None

    def _after(self, draws: Draws, number: int) -> tuple[Draws, int] | None:
        if number + 1 < len(self._turns(draws)):
            return draws, number + 1
        following = dataclasses.replace(draws, epoch=draws.epoch + 1)
        return (following, 0) if len(self._turns(following)) else None


class Lookahead(Cache):
    """Cache that changes its rows from batch to batch, in the memory of a static cache.

    Ranks that would share a static cache divide its memory equally. The rows of a vertex type stay fixed if changing
    them would save no fetches. Rows with a second copy on the device stay fixed too.

    Args:
        window: batches known ahead, or 'auto'.
        replication_factor, policy, on_device: as for a :class:`~salientpp.ways.cache.Cache`.

    Attributes:
        planners: one for each vertex type whose rows change; empty if nothing can be saved.
        under_way: number of batches that have entered the pipeline and were not delivered yet.
    """

    def __init__(self, window: Window, replication_factor: float, policy: Policy, on_device: float | int = 0.0) -> None:
        super().__init__(replication_factor, policy, on_device)
        self._window = window
        self.planners: dict[str | None, Planner] = {}
        self._decision: Task | Future | None = None  # the latest decision
        self.under_way = 0

    @property
    def finds_late(self) -> bool:  # type: ignore[override]  # its value is known only after place()
        return bool(self.planners)

    def _stays(self, type_: str | None) -> bool:
        return type_ not in self.planners

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        placed = super().place(basis, tiers)
        for type_, planner in self.planners.items():
            cache = self.cache.by_type[type_]
            if len(
                cache.device_members
            ):  # batches find these rows on the device, so their copies on the host are unused
                prior = planner.prior.index_fill(0, cache.device_members.ids, 0)
                self.planners[type_] = Planner(planner.shape, prior, cache.members.ids)
        return placed

    def _members(self, basis: Basis, scores: Mapping[str | None, Tensor]) -> dict[str | None, Tensor]:
        members = super()._members(basis, scores)
        planned = self._planned(basis, scores, members)
        moves = [plan is not None for plan in planned.values()]
        if basis.ranks_by_host:  # for a type, either all ranks of a host share a cache or none does
            moves = [all(of_type) for of_type in zip(*basis.host.gather_numbers(list(map(int, moves))))]
        for (type_, plan), does in zip(planned.items(), moves):
            if plan is not None and does:
                shape, members[type_] = plan
                # Without a copy, because the probabilities may be memory-mapped.
                self.planners[type_] = Planner(shape, scores[type_].to(torch.float32), members[type_])
        return members

    def _planned(
        self, basis: Basis, scores: Mapping[str | None, Tensor], members: Mapping[str | None, Tensor]
    ) -> dict[str | None, tuple[Shape, Tensor] | None]:
        """Plans, for each vertex type, the lookahead cache that replaces ``members``; None if it would save nothing."""
        source = basis.source
        self._basis, self._blocks = basis, cache(lambda: basis.once("blocks", partial(_blocks_of, basis)))
        static_bytes = sum(of_type.numel() * source.row_bytes[type_] for type_, of_type in members.items())
        num_sharing = basis.ranks_on_host

        waits = source.drawing.is_collective

        @cache
        def tried() -> tuple[list[dict[str | None, Tensor]], float]:
            batches = basis.trial(only_vertices=not waits)
            num_bytes = sum(waiting_bytes(mfg) for pieces in batches for mfg in pieces) if waits else 0
            return [_ids_of(pieces) for pieces in batches], num_bytes / max(1, len(batches))

        if waits:  # both are collective, and a rank with nothing to plan asks for neither
            tried()
            self._blocks()

        def plan(type_: str | None, static: Tensor) -> tuple[Shape, Tensor] | None:
            book, part_id = source.books[type_], source.exchange.part_of(type_)

            def trial() -> ListSizes:
                sizes, (batches, num_bytes) = (book.num_vertices, *book.range_of(part_id)), tried()
                lists = [ops.code_ids(ids.get(type_, NO_IDS), *sizes) for ids in batches]
                # The types share the memory of waiting batches as they share the memory of the static cache.
                share = static.numel() * source.row_bytes[type_] / max(1, static_bytes)
                return ListSizes.of(lists, book.num_vertices, share * num_bytes)

            own = scores[type_], book, part_id, static.numel(), source.row_bytes[type_]
            return plan_rows(self._window, *own, trial, self._blocks, num_sharing)

        return {type_: plan(type_, static) for type_, static in members.items()}

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        if not self.planners:
            return
        self._lists: dict[str | None, deque[Tensor]] = {type_: deque() for type_ in self.planners}
        windows = [planner.shape.window for planner in self.planners.values()]
        if basis.source.drawing.is_collective:
            self._ahead: Scouts | Waiting = Waiting()
            self.waits = max(map(reach_of, windows))
        else:
            self._ahead = Scouts(
                Draws.turns,
                lambda draws, turn: workers.scout(self._scout, basis, fetch, draws.pieces(turn)),
                # With long windows several lists are requested at once.
                (basis.most_ahead if basis.num_workers else 0) + max(map(group_of, windows)) - 1,
            )
        self._submit: Callable[..., Any] = Threads(1, "salientpp-decide").submit if basis.num_workers else completed
        fetch.moving = {type_: self.cache.by_type[type_].rows for type_ in self.planners}

    def _scout(self, basis: Basis, fetch: Fetch, pieces: Sequence[tuple[Tensor, BatchKeys]]) -> Lists:
        """Draws a batch in advance. Returns by type, packed by ``code_ids``, its remote ids, without rows that other methods have copies of."""
        ids = _ids_of(basis.source.drawing.draw_vertices(pieces))
        found = {}
        for type_ in self.planners:
            tiers, of_type = fetch.tiers[type_], ids.get(type_, NO_IDS)
            if tiers.copies:  # rows that other ways have copies of
                of_type = tiers.look_up(of_type).remote_id
            found[type_] = ops.code_ids(of_type, tiers.book.num_vertices, *tiers.book.range_of(tiers.part_id))
        return found

    def begin_epoch(self) -> None:
        """Empties the cache if an earlier epoch was left while batches were in flight. Rows that these batches should have written to slots are missing."""
        if not self.planners:
            return
        if self.under_way:
            self.under_way = 0
            if self._decision is not None:
                with contextlib.suppress(BaseException):  # the batch's consumer has received the error, or has gone
                    self._decision.result()
            self._ahead.forget()
            for planner in self.planners.values():
                planner.forget_rows()
        if isinstance(self._ahead, Waiting):
            self._ahead.forget()

    def on_waiting(self, draws: Draws, tick: int, places: PlacesByType) -> None:
        if self.planners and isinstance(self._ahead, Waiting):
            self._ahead.add(draws, tick, places)

    def find(self, draws: Draws, tick: int, places: PlacesByType) -> Task | Future:
        self.under_way += 1
        self._decision = decision = self._submit(self._decide, draws, tick, places)
        return decision

    def _decide(self, draws: Draws, tick: int, places: PlacesByType) -> dict[str | None, Places]:
        if not self._ahead.enter(draws, tick):
            for type_, planner in self.planners.items():
                planner.forget_window()
                self._lists[type_].clear()
        decided = dict(places)
        for type_, planner in self.planners.items():
            moves = planner.plan(places[type_].remote_id, partial(self._upcoming, type_))
            decided[type_] = _with_kept(places[type_], moves, self._basis.source.books[type_])
        return decided

    def _upcoming(self, type_: str | None) -> Tensor | None:
        """Returns the next batch's ids of one type. It keeps the ids of other types, whose windows may be shorter."""
        if isinstance(self._ahead, Waiting):
            planner, book = self.planners[type_], self._basis.source.books[type_]
            ids = self._ahead.after(planner.known - planner.batch, reach_of(planner.shape.window), type_)
            return None if ids is None else ops.code_ids(ids, book.num_vertices)
        if not self._lists[type_]:
            found = self._ahead.next()
            if found is None:
                return None
            for other, waiting in self._lists.items():
                waiting.append(found[other])
        return self._lists[type_].popleft()

    def deliver(self, batch: Any, note: Any) -> None:
        if self.planners:
            self.under_way -= 1

    def price(self, price: Price, notes: Sequence[Any]) -> Price:
        fetched, copied = dict(price.fetched), dict(price.copied)
        for type_ in self.planners:
            fetched[type_] = price.fetched[type_] * self._fetched_share(type_, price.fetched[type_])
            copied[type_] += price.fetched[type_] - fetched[type_]
        # With scouts, every batch is drawn twice: first for its ids only.
        draws = 2 if self.planners and not self._basis.source.drawing.is_collective else 1
        left = sum(fetched.values()) / max(1e-300, sum(price.fetched.values()))
        seconds, requests = price.seconds * draws, price.requests * left
        return dataclasses.replace(price, fetched=fetched, copied=copied, seconds=seconds, requests=requests)

    def _fetched_share(self, type_: str | None, num_bytes: float) -> float:
        """Forecasts the fraction of a batch's remote rows, ``num_bytes`` in all, that must be fetched."""
        source, planner = self._basis.source, self.planners[type_]
        remote = planner.prior.clone()
        remote[slice(*source.books[type_].range_of(source.exchange.part_of(type_)))] = 0
        number = num_bytes / max(1, source.row_bytes[type_])
        spread = Spread.of(remote, self._blocks(), ListSizes(number, 0))
        return spread.rows(planner.shape.num_slots, planner.shape.window) / max(spread.rows(0, 0), 1e-300)

    def memory(self) -> Mapping[str, int]:
        """Returns bytes: ``cache`` for the rows; ``lookahead`` for the index, the probabilities and the window's ids."""
        if not self.planners:
            return {}
        rows = [rows.nbytes for type_ in self.planners for rows in self.cache.by_type[type_].rows.values()]
        return {"cache": sum(rows), "lookahead": sum(each.state_bytes for each in self.planners.values())}


def _with_kept(places: Places, moves: Moves, book: PartitionBook) -> Places:
    """Changes where a batch finds its rows: those that the cache holds come from its slots, not from other ranks. ``moves`` index ``places.remote_id``."""
    if places.remote_row is None:
        taken = ops.take_hits(places.remote_position, places.remote_id, book.offsets, moves.hit_place)
        kept_position, remote_position, remote_id, counts = taken
        slot, remote_row = moves.hit_slot, None
    else:
        remote_id = places.remote_id[moves.fetched_place]  # still grouped by owner
        counts = torch.bincount(book.owner(remote_id), minlength=book.num_parts)
        number = torch.full_like(places.remote_id, -1)
        number[moves.fetched_place] = torch.arange(remote_id.numel(), device="cpu")
        slot_of = torch.full_like(places.remote_id, -1)
        slot_of[moves.hit_place] = moves.hit_slot
        row = number[places.remote_row]
        kept_position, slot = places.remote_position[row < 0], slot_of[places.remote_row[row < 0]]
        remote_position, remote_row = places.remote_position[row >= 0], row[row >= 0]
    return dataclasses.replace(
        places,
        remote_position=remote_position,
        remote_id=remote_id,
        remote_counts=counts,
        remote_row=remote_row,
        kept=Kept(kept_position, slot, moves.admitted_row, moves.admitted_slot),
    )


def _ids_of(pieces: Sequence[Any]) -> dict[str | None, Tensor]:
    """Returns the ids of the vertices in these MFGs, by vertex type."""
    found: dict[str | None, list[Tensor]] = {}
    for mfg in pieces:
        for type_, ids in ids_by_type(mfg.node).items():
            found.setdefault(type_, []).append(ids)
    return {type_: torch.cat(ids) if len(ids) > 1 else ids[0] for type_, ids in found.items()}


def _blocks_of(basis: Basis) -> Blocks | None:
    """Describes the blocks of batches that share draws. None for several vertex types, edges as seeds, or weights."""
    part, inputs, sampler = basis.source.part, basis.source.seeds.inputs, basis.source.sampler
    assert part is not None and part.part_id is not None and isinstance(sampler, NeighborSampler)
    block = basis.epochs.draw_block
    if block == 1 or sampler.replace or not (sampler.is_plain and isinstance(inputs, NodeSamplerInput)):
        return None
    workload = workload_of_part(part, part.part_id, sampler, inputs.node, basis.batch_size, basis.source.exchange.comm)
    num_batches, shared = basis.epochs.order.batches_of_logical_rank, sampler.shared_draws is not None
    drawing = basis.source.drawing
    if not drawing.is_collective:
        blocks = Blocks.of(workload, block, num_batches, shared)
        return blocks and dataclasses.replace(blocks, probability=drawing.own(blocks.probability))
    # All ranks sweep together if one has blocks. A rank with a single batch has none, and sweeps any block for the others.
    if all(number <= 1 for (number,) in basis.comm.gather_numbers([num_batches])):
        return None
    found = Blocks.of(workload, block, max(2, num_batches), shared)
    return found if num_batches > 1 else None
