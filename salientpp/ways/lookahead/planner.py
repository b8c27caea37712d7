"""Which remote rows does a rank keep, if it knows what its next batches need?

A batch is a pure function of (seed, epoch, slot, index), so a rank can know which rows its next W batches need. Then a cache need not stay as it is: after
each batch it keeps, of the rows that it has and those that arrive, the C that are needed next. When that is, is known inside the **window** of the next W
batches (as in Belady, *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal 5(2), 1966), and expected beyond it: a row that
a batch needs with probability p comes 1 / p batches later. So what the window does not show is kept by its inclusion probability, as the static cache
keeps all. A row may go by without entering. Where rows are needed equally late, those that are there stay, then those with the lower slot leave first, and the
lower id enters first; probabilities that differ by less than a 16th of a factor of two count as equal.

**Memory** is that of a static cache: rows and what it takes to find them, the ids of the window included (:class:`Shape`). Ids of a batch are kept as gaps of 5
to 7 bits each, or as a bit for every vertex, whichever is shorter.

**Groups.** To find out when each row of a batch comes next, all lists of the window are read, a few nanoseconds an id. With a long window this is done for G
batches at once, the window then being W + G - 1 batches long at the first of them and W at the last.

:class:`Planner` does this for one rank and one type of vertices, in the order of its batches; loaders and analyses have the very same. :func:`forecast` says
without sampling what it would save.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from salientpp import ops
from salientpp.arguments import as_integer
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.policies import Workload
from salientpp.vip.shared import block_probability

#: How many batches are known ahead; 'auto': as many as are worth their memory.
Window = int | Literal["auto"]

#: The longest window; numbers of batches are compared modulo 2**15.
MOST_AHEAD = 2**13

#: Batches of epoch 0 that say how many bytes the ids of a batch take; evenly spread over the epoch.
TRIAL = 8

#: With a window of W batches uses are found again that are up to W / _LATE batches apart, as many as with all of the future: fitted to counts on two graphs,
#: with which the forecast then agrees within 0.02 for windows of half of T* to 3 T*. How far apart uses are that are kept varies from batch to batch.
_LATE = 1.2

#: A window whose ids take more of the budget than this is refused.
_MOST_FOR_IDS = 0.5


def check_lookahead(lookahead: Any) -> Window:
    """It as 'auto' or a Python integer.

    Raises:
        ValueError: it is neither, or out of range.
    """
    if isinstance(lookahead, str) and lookahead == "auto":
        return "auto"
    number = as_integer(lookahead)
    if number is None or isinstance(lookahead, bool) or not 0 <= number <= MOST_AHEAD:
        raise ValueError(
            f"lookahead must be an integer in [0, {MOST_AHEAD}] (batches known ahead) or 'auto', got {lookahead!r}"
        )
    return number


class Moves(NamedTuple):
    """What becomes of the remote rows of one batch: int64 vectors.

    Attributes:
        hit_place, hit_slot: places in the batch's ``remote_id``, ascending, of rows that slots have, and which slots.
        fetched_place: places of the others, ascending.
        admitted_row, admitted_slot: which of the fetched rows enter, and where. Slots are read by this batch before they are written by it.
    """

    hit_place: Tensor
    hit_slot: Tensor
    fetched_place: Tensor
    admitted_row: Tensor
    admitted_slot: Tensor


# --- memory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What the ids of a batch take, as the mean over some batches.

    Attributes:
        num_ids: distinct remote rows of a batch.
        list_bytes: of their ids, as :func:`salientpp.ops.code_ids` codes them.
    """

    num_ids: float
    list_bytes: float

    @classmethod
    def of(cls, lists: Sequence[Tensor], num_ids: int) -> Trial:
        """Of lists of ids of [0, ``num_ids``)."""
        number = max(1, len(lists))
        return cls(
            sum(ops.ids_of_list(each, num_ids).numel() for each in lists) / number,
            sum(each.nbytes for each in lists) / number,
        )

    @classmethod
    def expected(cls, probability: Tensor) -> Trial:
        """Without any batch, of how probably one needs each remote row: a little too much, as the sum of the probabilities is."""
        number = float(probability.sum(dtype=torch.float64))
        bits = number * (2 + math.log2(probability.numel() / number)) if number > 0 else 0.0
        return cls(number, 1 + min(bits, probability.numel()) / 8 + 1)

    @staticmethod
    def batches(number: int) -> range:
        """Which of the ``number`` batches of epoch 0 are tried."""
        return range(0, number, -(-number // TRIAL) or 1)


def group_of(window: int) -> int:
    """How many batches are looked up in the window at once, so that reading its lists costs a batch no more than nine of them."""
    return max(1, -(-window // 8))


@dataclass(frozen=True)
class Shape:
    """How a budget of bytes splits.

    Attributes:
        window: W.
        num_slots: C, rows that are kept.
        list_bytes: the most that the ids of the window take. Where they would take more for a while, fewer batches are known.
    """

    window: int
    num_slots: int
    list_bytes: int

    @classmethod
    def of(cls, window: int, budget: int, row_bytes: int, trial: Trial, most_rows: int) -> Shape:
        """The largest cache inside ``budget`` bytes.

        Args:
            window: >= 1.
            row_bytes: of a row.
            most_rows: that there are to keep.
        """
        group = group_of(window)
        lists = math.ceil(window * trial.list_bytes + (group - 1) * 2 * trial.num_ids)
        number = max(0, budget - lists) // row_bytes if row_bytes else most_rows
        for entry_bytes in (2, 4):
            # A slot has an id of 4 bytes, a key of 2 and 5/3 entries of a table, which has one more.
            per_slot = row_bytes + 6 + entry_bytes * 5 / 3
            number = max(0, int((budget - lists - entry_bytes) / per_slot))
            if min(number, most_rows) < 2**16:
                break
        return cls(window, min(number, most_rows), lists)

    @property
    def table_size(self) -> int:
        return self.num_slots + self.num_slots * 2 // 3 + 1

    @property
    def table_dtype(self) -> torch.dtype:
        return torch.int16 if self.num_slots < 2**16 else torch.int32

    @property
    def state_bytes(self) -> int:
        """Of everything but the rows."""
        return self.list_bytes + 6 * self.num_slots + self.table_size * self.table_dtype.itemsize


def choose_shape(
    lookahead: Window,
    probability: Tensor,
    budget: int,
    row_bytes: int,
    trial: Trial,
    prefix: str = "",
    blocks: Callable[[], Blocks | None] = lambda: None,
) -> Shape:
    """How a cache that knows ``lookahead`` batches splits its budget; 'auto': the window of which :func:`forecast` expects the fewest rows.

    Args:
        probability: float32 [N], how probably a batch needs each remote row; 0 of others.
        budget: bytes of a static cache.
        prefix: of errors.
        blocks: called for 'auto', where the draws of batches agree.

    Raises:
        ValueError: the ids of the given window take too much of the budget.
    """
    most_rows = int(torch.count_nonzero(probability > 0))

    def shape(window: int) -> Shape:
        return Shape.of(window, budget, row_bytes, trial, most_rows)

    if lookahead != "auto":
        found = shape(lookahead)
        if found.list_bytes > _MOST_FOR_IDS * budget:
            fitting = [window for window in range(1, lookahead) if shape(window).list_bytes <= _MOST_FOR_IDS * budget]
            raise ValueError(
                f"{prefix}lookahead={lookahead} needs {found.list_bytes:,} bytes for ids, more than half of the {budget:,} that the replication factor gives "
                f"(a batch has {trial.num_ids:,.0f} remote rows); pass "
                + (f"at most {fitting[-1]}, " if fitting else "")
                + "'auto' or 0, or a larger replication factor"
            )
        return found
    agreeing = blocks()
    spread = Spread.of(probability if agreeing is None else _as_counted(probability, trial), agreeing)
    best = Shape(0, budget // max(1, row_bytes), 0)
    fewest = spread.rows(best.num_slots, 0)
    for window in _windows():
        found = shape(window)
        if found.list_bytes > _MOST_FOR_IDS * budget:
            break
        rows = spread.rows(found.num_slots, window)
        if rows < fewest:
            best, fewest = found, rows
        if window >= _LATE * spread.reach(found.num_slots):
            break  # a longer one knows nothing more
    return best


def _windows() -> list[int]:
    """1, 2, 3, 4 and then about an eighth more each."""
    found = [1]
    while found[-1] < MOST_AHEAD:
        found.append(min(MOST_AHEAD, found[-1] + max(1, found[-1] // 8)))
    return found


def plan_rows(
    lookahead: Window,
    scores: Tensor,
    book: PartitionBook,
    part_id: int,
    num_static: int,
    row_bytes: int,
    trial: Callable[[], Trial],
    prefix: str = "",
    blocks: Callable[[], Blocks | None] = lambda: None,
) -> tuple[Shape, Tensor] | None:
    """What takes the place of a static cache, in as much memory: how it splits, and whose rows it has at the beginning, ascending int64.

    Args:
        scores: float [N], how probably a batch needs each row.
        num_static: rows of the static cache; their place takes the set of their ids too.
        row_bytes: of a row.
        trial: called if there is something to gain.
        prefix: of errors.
        blocks: called for 'auto', where the draws of batches agree; of all rows.

    Returns:
        None where nothing is to be gained: there is no cache, it holds all that may be needed, or no window is worth its memory.

    Raises:
        ValueError: as :func:`choose_shape`.
    """
    begin, end = book.range_of(part_id)
    remote = scores.to(torch.float32, copy=True)
    remote[begin:end] = 0
    if lookahead == 0 or num_static == 0 or num_static >= int(torch.count_nonzero(remote > 0)):
        return None
    budget = num_static * row_bytes + 8 * -(-book.num_vertices // 32)
    shape = choose_shape(lookahead, remote, budget, row_bytes, trial(), prefix, blocks)
    if shape.window == 0 or shape.num_slots == 0:
        return None
    order = torch.sort(remote, descending=True, stable=True).indices
    return shape, order[: shape.num_slots].sort().values


# --- the planner ------------------------------------------------------------------------------------------


class Planner:
    """What one rank keeps, batch by batch.

    Args:
        shape: how its memory splits; a window of at least one batch.
        prior: float32 [N], how probably a batch needs each row, in this process's memory or mapped.
        members: int64, distinct ids whose rows the first slots have at the beginning.

    Attributes:
        batch: number of the batch that :meth:`plan` is asked for next, counted from 0.
        known: how far the window reaches: batches before this number are known.
    """

    def __init__(self, shape: Shape, prior: Tensor, members: Tensor) -> None:
        if not 1 <= shape.window <= MOST_AHEAD:
            raise ValueError(f"the window must be in [1, {MOST_AHEAD}], got {shape.window}")
        self.shape, self._prior = shape, prior
        self._slot_id = torch.empty(shape.num_slots, dtype=torch.int32, device="cpu")
        self._slot_key = torch.empty(shape.num_slots, dtype=torch.int16, device="cpu")
        self._table = torch.empty(shape.table_size, dtype=shape.table_dtype, device="cpu")
        self._lists: deque[Tensor] = deque()  # of the batches after the last that has links
        self._links: deque[Tensor] = deque()  # from `batch` on
        self._waiting: Tensor | None = None  # the list of batch `known`, for which there was no room
        self._group = group_of(shape.window)
        self.batch = self.known = 0
        self._fill(members)

    @property
    def num_ids(self) -> int:
        """N."""
        return self._prior.numel()

    @property
    def slot_id(self) -> Tensor:
        """int32 [C], the id whose row each slot has after the batches that were planned; -1 for none."""
        return self._slot_id

    def _fill(self, members: Tensor) -> None:
        ops.fill_slots(members, self._prior, self._slot_id, self._slot_key, self._table)

    def plan(self, remote_id: Tensor, upcoming: Callable[[], Tensor | None]) -> Moves:
        """Decide for the next batch.

        Args:
            remote_id: int64 [n], the distinct remote ids that it needs, in any order.
            upcoming: gives the list of batch ``known``, as :func:`salientpp.ops.code_ids` makes it, or None if it is not known; called as often as the window
                has room.
        """
        if not self._links:
            self._link(remote_id, upcoming)
        moves = ops.plan_batch(
            remote_id, self._links.popleft(), self.batch, self._prior, self._slot_id, self._slot_key, self._table
        )
        self.batch += 1
        return Moves(*moves)

    def _link(self, remote_id: Tensor, upcoming: Callable[[], Tensor | None]) -> None:
        if self._lists:
            own = self._lists.popleft()
        else:
            own, self.known, self._waiting = ops.code_ids(remote_id, self.num_ids), self.batch + 1, None
        # Links of the group's other batches take the place of their lists.
        room = self.shape.list_bytes - sum(each.nbytes for each in self._lists)
        while self.known < self.batch + self._group + self.shape.window:
            found = upcoming() if self._waiting is None else self._waiting
            self._waiting = found
            if found is None or found.nbytes > room:
                break
            self._waiting = None
            room -= found.nbytes
            ops.note_uses(found, self.known, self.num_ids, self._slot_id, self._slot_key, self._table)
            self._lists.append(found)
            self.known += 1
        heads = min(self._group, 1 + len(self._lists))
        self._links.extend(ops.link_lists([own, *self._lists], heads, self.num_ids))
        for _ in range(heads - 1):
            self._lists.popleft()

    def forget_window(self) -> None:
        """Other batches come than those that were known; rows stay where they are."""
        self._lists.clear()
        self._links.clear()
        self._waiting = None
        self.known = self.batch
        there = self._slot_id >= 0
        self._slot_key[there] = _unknown(self._prior[self._slot_id[there].long()])

    def forget_rows(self) -> None:
        """No slot holds anything; nor is the window known."""
        self._fill(torch.empty(0, dtype=torch.int64, device="cpu"))
        self.forget_window()


def _unknown(probability: Tensor) -> Tensor:
    """int16 keys of rows whose next use is not known, as csrc/ways/slots.h makes them."""
    level = (0x3F800000 - probability.view(torch.int32)) >> 19
    level = torch.where(probability > 0, level.clamp(0, 1022), 1023)
    return (level - 2**15).to(torch.int16)


# --- the forecast -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What the inclusion probabilities say of a cache that knows the next batches.

    Attributes:
        reach: T*, how many batches apart two uses of a row may be that is kept between them, if all of the future is known. A longer window saves no more.
        rows, static_rows: fetched per batch with the window, and by the static cache of as many rows.
        best_rows: with all of the future.
    """

    reach: float
    rows: float
    static_rows: float
    best_rows: float


@dataclass(frozen=True, eq=False)
class Blocks:
    """Batches whose draws agree in blocks, so that a row which one of them needs is needed by others too.

    Attributes:
        size: batches of a block, b.
        probability: float [N], how probably any batch of a block needs each row, as :func:`salientpp.vip.shared.block_probability` gives it.
    """

    size: int
    probability: Tensor

    @classmethod
    def of(cls, workload: Workload, draw_block: int, num_batches: int, shared: bool) -> Blocks | None:
        """Of a part's batches; None if every batch draws by itself.

        Args:
            draw_block: batches that draw alike, of the ``num_batches`` of an epoch.
            shared: vertices of a batch draw alike too.
        """
        size = min(draw_block, num_batches)
        if size <= 1:
            return None
        drawn = workload.graph, workload.seeds, workload.num_neighbors, workload.batch_size, size
        return cls(size, block_probability(*drawn, "batch" if shared else None))


def _as_counted(probability: Tensor, trial: Trial) -> Tensor:
    """The same rows, as many of them in a batch as those that were tried have.

    Batches of a clustered graph have fewer than the formula says. Blocks of them have as many as it says of blocks, so without this a row would come again
    too soon.
    """
    expected = float(probability.sum(dtype=torch.float64))
    return probability * (trial.num_ids / expected) if expected > 0 else probability


@dataclass(frozen=True, eq=False)
class Spread:
    """How many rows have which probability: by descending probability ``chance`` and ``count``, float64 [bins].

    Attributes:
        chance, count: those.
        in_block: of the same rows, how probably a block has them; each of its batches then needs them with ``chance / in_block``, independently. None:
            every batch draws by itself.
        block: batches of a block.
    """

    chance: Tensor
    count: Tensor
    in_block: Tensor | None = None
    block: int = 1

    @classmethod
    def of(cls, probability: Tensor, blocks: Blocks | None = None) -> Spread:
        """Of float [N]; those that are 0 do not count."""
        bins_per_factor = 64 if blocks is None else 16
        there = probability > 0
        positive = probability[there].clamp(max=1.0).to(torch.float64)
        at = (-torch.log2(positive) * bins_per_factor).floor().clamp(0, 64 * bins_per_factor).long()
        count = torch.bincount(at).to(torch.float64)
        some = count > 0

        def mean(values: Tensor) -> Tensor:
            return torch.bincount(at, weights=values.to(torch.float64))[some] / count[some]

        if blocks is None or blocks.size == 1:
            return cls(mean(positive), count[some])
        chance = mean(positive)
        in_block = _has_row(chance, mean(blocks.probability[there].clamp(max=1.0)), blocks.size)
        return cls(chance, count[some], in_block, blocks.size)

    def _whole(self, batches: int) -> tuple[Tensor, Tensor]:
        if self.in_block is None:
            unused = torch.exp(batches * torch.log1p(-self.chance.clamp(max=1 - 1e-12)))
            return 1 - unused, (1 - unused * (1 + self.chance * batches)).clamp(0, 1)
        unused, waited = self._in_blocks(batches)
        return 1 - unused, (self.chance * (waited - batches * unused)).clamp(0, 1)

    def _in_blocks(self, batches: int) -> tuple[Tensor, Tensor]:
        """How probably a row does not come again within so many batches, and the sum of that over all smaller numbers of them.

        A use stands anywhere in its block, with r batches of that after it; later blocks have the row or not, whatever this one did.
        """
        assert self.in_block is not None  # else draws do not agree
        size, places = self.block, min(self.block, 16)
        needed = self.in_block
        # How probably a batch of a block that has it does not need it.
        idle = (1 - self.chance / needed).clamp(1e-12, 1 - 1e-12)
        rest = ((torch.arange(places, dtype=torch.float64, device="cpu") + 0.5) * size / places).floor().view(-1, 1)

        def summed(number: Tensor) -> Tensor:  # of idle**j for j < number
            return (1 - idle**number) / (1 - idle)

        inside = rest.clamp(max=batches)
        beyond = (batches - rest).clamp(min=0)
        blocks, part = (beyond / size).floor(), beyond % size
        none = 1 - needed + needed * idle**size  # of a whole block
        later = none**blocks * (1 - needed + needed * idle**part)
        unused = idle**inside * later
        of_block = (1 - needed) * size + needed * summed(torch.tensor(float(size), device="cpu"))
        waited = of_block * (1 - none**blocks) / (1 - none).clamp(min=1e-12)
        waited = waited + none**blocks * ((1 - needed) * part + needed * summed(part))
        return unused.mean(0), (summed(inside) + idle**rest * waited).mean(0)

    def _within(self, batches: float) -> tuple[Tensor, Tensor]:
        """How probably a row comes again within so many batches, and how probably it is between two uses that are at most so far apart.

        Part of a batch means that part of the rows that come again just in that one.
        """
        if math.isinf(batches):
            return torch.ones_like(self.chance), torch.ones_like(self.chance)
        first, part = int(batches), batches - int(batches)
        ends = zip(self._whole(first), self._whole(first + 1))
        again, kept = ((1 - part) * one + part * other for one, other in ends)
        return again, kept

    def reach(self, num_slots: float) -> float:
        """T*: with uses that far apart the rows between them fill the slots; infinite if these hold everything."""
        if num_slots >= float(self.count.sum()):
            return math.inf
        low, high = 0.0, 1.0
        while high < 2**40 and self._used(high) < num_slots:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            if self._used(middle) < num_slots:
                low = middle
            else:
                high = middle
        return high

    def _used(self, batches: float) -> float:
        return float((self.count * self._within(batches)[1]).sum())

    def rows(self, num_slots: float, window: float) -> float:
        """Rows fetched per batch: with a window that is shorter than T* the hottest rows are kept always, and of the others what comes again inside it."""
        chance, count = self.chance, self.count
        all_rows = float((chance * count).sum())
        if num_slots >= float(count.sum()):
            return 0.0
        batches = min(window / _LATE, self.reach(num_slots)) if window else 0.0
        again, kept = self._within(batches)
        # Each of the hottest bins takes its rows whole, until the slots are full.
        more = (count * (1 - kept)).cumsum(0)
        spare = max(0.0, num_slots - float((count * kept).sum()))
        whole = ((spare - (more - count * (1 - kept))) / (count * (1 - kept)).clamp(min=1e-300)).clamp(0, 1)
        hits = count * chance * (whole + (1 - whole) * again)
        return max(0.0, all_rows - float(hits.sum()))


def _has_row(chance: Tensor, needed: Tensor, size: int) -> Tensor:
    """How probably a block of ``size`` batches has a row that a batch needs with ``chance`` and any of the block with ``needed``.

    It has it with A, and then each batch needs it with q: ``A q = chance`` and ``A (1 - (1 - q)^size) = needed``.
    """
    low, high = chance.clone(), torch.ones_like(chance)  # of q
    for _ in range(50):
        middle = (low + high) / 2
        too_small = (1 - (1 - middle) ** size) / middle > needed / chance
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return (chance / high).clamp(max=1.0)


def forecast(
    probability: Tensor,
    num_slots: int,
    window: float,
    static_slots: int | None = None,
    blocks: Blocks | None = None,
    trial: Trial | None = None,
) -> Forecast:
    """What a cache of so many rows fetches, if it knows ``window`` batches.

    Batches are taken to be independent of each other, and a row to be in each with its probability p. A row is kept between two uses if they are at most T
    batches apart. Then, with q = 1 - p, ``sum_v 1 - q^T (1 + p T)`` rows are there at a time, and ``sum_v p (1 - q^T)`` are found per batch; T* is where the
    former fill the slots.

    Args:
        probability: float32 [N], how probably a batch needs each remote row; 0 of others.
        num_slots: C.
        window: W; infinity for all of the future.
        static_slots: rows of the static cache that it is compared with; None: as many.
        blocks: where the draws of batches agree.
        trial: with ``blocks``, how many rows a batch has; None: as many as expected.
    """
    counted = probability if blocks is None or trial is None else _as_counted(probability, trial)
    spread = Spread.of(counted, blocks)
    return Forecast(
        spread.reach(num_slots),
        spread.rows(num_slots, window),
        spread.rows(num_slots if static_slots is None else static_slots, 0),
        spread.rows(num_slots, math.inf),
    )
