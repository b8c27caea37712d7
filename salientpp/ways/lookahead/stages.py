"""How does a rank know which rows its next batches need, and when does it decide what to keep?

A batch is a pure function of (seed, epoch, slot, index). So beside the batches that are made, those that come W later are drawn for their ids alone
(:class:`Scouts`), in the same sampling threads; later they are drawn again, whole. To keep what was drawn would take more memory than the cache has.

What is kept is decided (:mod:`salientpp.ways.lookahead.planner`) when a batch enters the pipeline, in the order of the batches: begun in ``sample`` and
awaited in
the stage after it, by a thread of its own where there are sampling threads. What was only asked for may be cancelled; what has entered is put together, also
when the epoch is left. So nothing that was decided has to be undone. Rows move when batches are put together, in the same order
(:mod:`salientpp.ways.lookahead.moving`).

Epochs join: near the end of one the first batches of the next are drawn. If something else comes then, the window is forgotten and the rows stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from salientpp.engine.stages import BatchStages, CountsSent, Finished, Request, RowsSent, Sampled
from salientpp.processes import Task, Undone
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.schedule import Turn
from salientpp.store.fetch import Recipe
from salientpp.store.tiers import Places
from salientpp.ways.lookahead.moving import MovingRows, with_kept
from salientpp.ways.lookahead.planner import Planner, group_of


@dataclass(frozen=True)
class Draws:
    """What the batches of an epoch are drawn by.

    Attributes:
        seed, slots: of the loader; loading a state may change them.
        epoch: its number.
    """

    seed: int
    slots: int
    epoch: int


@dataclass(frozen=True)
class ForeseenRequest(Request):
    """A batch of an epoch; ``index`` is its tick."""

    draws: Draws = Draws(0, 0, 0)


#: By vertex type, the list of remote ids that a batch needs.
Lists = Mapping[str | None, Tensor]


class Scouts:
    """The remote ids of batches to come, in order, through all epochs.

    Args:
        turns: of an epoch: its batches.
        submit: (epoch, turn) -> what gives the batch's lists, from a thread or from the one that asks.
        ahead: how many are drawn before they are asked for.
    """

    def __init__(
        self, turns: Callable[[Draws], Sequence[Turn]], submit: Callable[[Draws, Turn], Task | Undone], ahead: int
    ) -> None:
        self._turns_of, self._submit, self._ahead = turns, submit, ahead
        self._kept: dict[Draws, Sequence[Turn]] = {}  # of the epoch at hand and the one after it
        self._pending: deque[Task | Undone] = deque()
        self._expected: tuple[Draws, int] | None = None  # the batch that enters next
        self._next: tuple[Draws, int] | None = None  # to be drawn next

    def enter(self, draws: Draws, tick: int) -> bool:
        """A batch enters; whether it is the one that follows those that did before, so that what is known is of those that follow it."""
        expected, turns = self._expected, self._turns(draws)
        if expected is not None and expected[0] == draws and turns[expected[1]].tick == tick:
            follows, number = True, expected[1]
        else:
            follows, number = False, bisect_left(turns, tick, key=lambda turn: turn.tick)
        self._expected = self._after(draws, number)
        if not follows:
            self._cancel()
            self._next = self._expected
        if any(each.epoch < draws.epoch for each in self._kept):
            self._kept = {each: turns for each, turns in self._kept.items() if each.epoch >= draws.epoch}
        return follows

    def forget(self) -> None:
        """Whatever enters next, nothing is known."""
        self._cancel()
        self._expected = self._next = None

    def _cancel(self) -> None:
        for each in self._pending:
            each.cancel()
        self._pending.clear()

    def next(self) -> Lists | None:
        """The lists of the first batch that was not given yet; None if there are no batches at all."""
        while self._next is not None and len(self._pending) <= self._ahead:
            draws, number = self._next
            self._pending.append(self._submit(draws, self._turns(draws)[number]))
            self._next = self._after(draws, number)
        return self._pending.popleft().result() if self._pending else None

    def _turns(self, draws: Draws) -> Sequence[Turn]:
        if draws not in self._kept:
            self._kept[draws] = self._turns_of(draws)
        return self._kept[draws]

    def _after(self, draws: Draws, number: int) -> tuple[Draws, int] | None:
        if number + 1 < len(self._turns(draws)):
            return draws, number + 1
        following = dataclasses.replace(draws, epoch=draws.epoch + 1)
        return (following, 0) if len(self._turns(following)) else None


class LookaheadCache:
    """What one rank keeps of the rows that its batches fetch.

    Args:
        planners: by vertex type.
        rows, books: of the same types.
        scouts: what the batches to come need.
        submit: has a function done, one after the other, and returns its future.
    """

    def __init__(
        self,
        planners: Mapping[str | None, Planner],
        rows: Mapping[str | None, MovingRows],
        books: Mapping[str | None, PartitionBook],
        scouts: Scouts,
        submit: Callable[..., Task | Future],
    ) -> None:
        self.planners, self.rows, self._books, self._scouts = planners, rows, books, scouts
        self._submit = submit
        self._decision: Task | Future | None = None  # the last
        self._lists: dict[str | None, deque[Tensor]] = {type_: deque() for type_ in planners}
        self._under_way = 0  # batches that have entered and are not put together

    def begin_epoch(self) -> None:
        """Before any batch of it enters. Where batches of an epoch before were lost on their way, so are rows that slots were to have."""
        if self._under_way:
            self._under_way = 0
            if self._decision is not None:
                with contextlib.suppress(BaseException):  # whoever it was for has had the error, or is gone
                    self._decision.result()
            self._scouts.forget()
            for planner in self.planners.values():
                planner.forget_rows()

    def begin_to_decide(self, request: ForeseenRequest, places: Mapping[str | None, Places]) -> Task | Future:
        """Where the rows of a batch that enters come from, once it is known; called in the order of the batches."""
        self._under_way += 1
        self._decision = self._submit(self._decide, request, places)
        return self._decision

    def _decide(self, request: ForeseenRequest, places: Mapping[str | None, Places]) -> dict[str | None, Places]:
        if not self._scouts.enter(request.draws, request.index):
            for type_, planner in self.planners.items():
                planner.forget_window()
                self._lists[type_].clear()
        decided = dict(places)
        for type_, planner in self.planners.items():
            moves = planner.plan(places[type_].remote_id, partial(self._upcoming, type_))
            decided[type_] = with_kept(places[type_], moves, self._books[type_])
        return decided

    def _upcoming(self, type_: str | None) -> Tensor | None:
        """The next list of a type; those of other types wait until these ask, as their windows may be shorter."""
        if not self._lists[type_]:
            found = self._scouts.next()
            if found is None:
                return None
            for other, waiting in self._lists.items():
                waiting.append(found[other])
        return self._lists[type_].popleft()

    def put_together(self) -> None:
        """A batch has read its rows and left those that are kept."""
        self._under_way -= 1

    @property
    def window(self) -> int:
        """How many batches are known, by the type of which most are."""
        return max(planner.shape.window for planner in self.planners.values())

    def memory(self) -> dict[str, int]:
        """Bytes of the rows, under ``cache``, of what finds them and of the window's ids, under ``lookahead``."""
        return {
            "cache": sum(rows.nbytes for rows in self.rows.values()),
            "lookahead": sum(planner.shape.state_bytes for planner in self.planners.values()),
        }


def most_pending(planners: Mapping[str | None, Planner], most_ahead: int) -> int:
    """How many lists are drawn before they are asked for: with long windows several are asked for at once."""
    return most_ahead + max(group_of(planner.shape.window) for planner in planners.values()) - 1


@dataclass(frozen=True, eq=False)
class Deciding:
    """A batch that was drawn, while it is decided where its rows come from."""

    sampled: Sampled
    places: Task | Future

    @property
    def index(self) -> int:
        return self.sampled.index


@dataclass
class LookaheadStages(BatchStages):
    """The ten stages of a rank that looks ahead.

    Attributes:
        cache: what it keeps.
    """

    cache: LookaheadCache | None = None

    @property
    def _cache(self) -> LookaheadCache:
        assert self.cache is not None  # it comes last only because fields of the ten stages have defaults
        return self.cache

    def plan(self, places: Mapping[str | None, Places]) -> Mapping[str | None, Places | Recipe]:
        return {}  # what is fetched is not known yet

    def sample(self, request: Request) -> Sampled | Deciding:  # type: ignore[override]  # which the next stage takes
        sampled = super().sample(request)
        if sampled.batch is None or not isinstance(request, ForeseenRequest):
            return sampled
        return Deciding(sampled, self._cache.begin_to_decide(request, sampled.places))

    def exchange_counts(self, state: Sampled | Deciding) -> CountsSent:
        if isinstance(state, Deciding):
            places = state.places.result()
            state = dataclasses.replace(state.sampled, places=places, plan=self.fetch.plan(places))
        return super().exchange_counts(state)

    def assemble(self, state: RowsSent) -> Finished:
        finished = super().assemble(state)
        if not finished.idle:
            self._cache.put_together()
        return finished
