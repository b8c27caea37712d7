"""Laws of a cache that knows the next batches: it keeps what is needed next, in the memory that it was given, and is what its forecast says."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import pairwise

import pytest
import torch
from reference import LookaheadReference

from salientpp import ops
from salientpp.ways.lookahead.planner import (
    Blocks,
    Planner,
    Shape,
    Spread,
    Trial,
    check_lookahead,
    choose_shape,
    forecast,
    group_of,
)


def _batches(number: int, num_ids: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Batches by random probabilities, each in a random order, and these probabilities."""
    draw = torch.Generator().manual_seed(seed)
    prior = torch.rand(num_ids, generator=draw) ** 4
    prior[torch.rand(num_ids, generator=draw) < 0.05] = 0.0
    batches = []
    for _ in range(number):
        ids = (torch.rand(num_ids, generator=draw) < prior).nonzero().flatten()
        batches.append(ids[torch.randperm(ids.numel(), generator=draw)])
    return batches, prior


def _upcoming(planner: Planner, lists: list[torch.Tensor]):
    return lambda: lists[planner.known] if planner.known < len(lists) else None


def _shape(window: int, slots: int) -> Shape:
    return Shape(window, slots, 10**9)


# --- lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("num_ids", [0, 1, 9, 1000, 70000])
def test_a_list_holds_its_ids_in_at_most_a_bit_for_each(density, num_ids):
    ids = (torch.rand(num_ids, generator=torch.Generator().manual_seed(num_ids)) < density).nonzero().flatten()
    coded = ops.code_ids(ids[torch.randperm(ids.numel())], num_ids)
    assert ops.ids_of_list(coded, num_ids).equal(ids)
    assert coded.nbytes <= 1 + min(num_ids // 8 + 1, 3 * ids.numel())


def test_a_list_takes_little_more_than_its_ids_say():
    """Ids that come independently of each other have so many bits of entropy; half of them ten times as often as the others."""
    num_ids, often, seldom = 200_000, 0.2, 0.02
    chance = torch.cat([torch.full((num_ids // 2,), often), torch.full((num_ids // 2,), seldom)])
    ids = (torch.rand(num_ids, generator=torch.Generator().manual_seed(0)) < chance).nonzero().flatten()
    entropy = -(chance * chance.log2() + (1 - chance) * (1 - chance).log2()).sum()
    assert entropy < 8 * ops.code_ids(ids, num_ids).nbytes < 1.07 * entropy


def test_wide_gaps_are_coded():
    ids = torch.tensor([0, 127, 128, 300, 2**14, 2**21, 2**28 + 5, 2**31 - 2])
    assert ops.ids_of_list(ops.code_ids(ids, 2**31 - 1), 2**31 - 1).equal(ids)


def test_a_list_leaves_out_repeats_and_a_range():
    ids = torch.tensor([7, 3, 7, 0, 9, 4, 3])
    assert ops.ids_of_list(ops.code_ids(ids, 10, 3, 5), 10).tolist() == [0, 7, 9]


@pytest.mark.parametrize("wrong", [8, -1, 2**62])
def test_ids_out_of_range_are_refused(wrong):
    with pytest.raises(RuntimeError, match=r"ids must be in \[0, 8\), got"):
        ops.code_ids(torch.tensor([1, wrong]), 8)


@pytest.mark.parametrize(
    "coded",
    [[], [2, 1], [0, 200], [0, 41], [0, 31, 0, 1, 0, 0, 0, 0], [1, 0, 255], [0, 255, 255, 255, 255, 255, 255, 1]],
)
def test_a_list_that_was_damaged_is_refused(coded):
    coded = torch.tensor(coded, dtype=torch.uint8)
    slots = torch.full((2,), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int16), torch.zeros(3).short()
    for use in (
        lambda: ops.ids_of_list(coded, 9),
        lambda: ops.link_lists([coded], 1, 9),
        lambda: ops.note_uses(coded, 0, 9, *slots),
    ):
        with pytest.raises(RuntimeError, match="list"):
            use()


@pytest.mark.parametrize("num_ids", [40, 70000])
def test_links_lead_to_the_next_list_with_the_id(num_ids):
    batches, _ = _batches(7, num_ids, 1)
    links = ops.link_lists([ops.code_ids(ids, num_ids) for ids in batches], 3, num_ids)
    assert len(links) == 3
    sets = [set(ids.tolist()) for ids in batches]
    for head, of_head in enumerate(links):
        expected = [next((j - head for j in range(head + 1, 7) if v in sets[j]), 0) for v in sorted(sets[head])]
        assert of_head.tolist() == expected


# --- the planner --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 8, 9, 20, 64])
@pytest.mark.parametrize("slots", [0, 1, 7, 30, 200])
def test_it_keeps_what_is_needed_next(window, slots):
    batches, prior = _batches(40, 120, window)
    lists = [ops.code_ids(ids, 120) for ids in batches]
    members = torch.randperm(120, generator=torch.Generator().manual_seed(slots))[: slots // 2]
    planner, slow = Planner(_shape(window, slots), prior, members), LookaheadReference(window, slots, prior, members)
    for i, ids in enumerate(batches):
        moves = planner.plan(ids, _upcoming(planner, lists))
        reach = min(40, i // group_of(window) * group_of(window) + group_of(window) + window)
        assert planner.known == reach >= min(40, i + 1 + window)
        hits, fetched, admitted = slow.plan(ids.tolist(), [set(known.tolist()) for known in batches[i + 1 : reach]])
        assert list(zip(moves.hit_place.tolist(), moves.hit_slot.tolist())) == hits
        assert moves.fetched_place.tolist() == fetched
        assert dict(zip(moves.admitted_slot.tolist(), moves.admitted_row.tolist())) == admitted
        assert planner.slot_id.tolist() == slow.ids


def test_with_all_of_the_future_no_choice_fetches_less():
    """Against every sequence of choices, on caches of two rows."""
    for seed in range(30):
        draw = random.Random(seed)
        batches = [frozenset(draw.sample(range(6), draw.randint(1, 4))) for _ in range(7)]

        @cache
        def fewest(i, kept):
            if i == len(batches):
                return 0
            missing, candidates = len(batches[i] - kept), batches[i] | kept
            subsets = [frozenset()]
            for v in candidates:
                subsets += [each | {v} for each in subsets if len(each) < 2]
            return missing + min(fewest(i + 1, each) for each in subsets)

        planner = Planner(_shape(50, 2), torch.full((6,), 0.5), torch.tensor([0, 1]))
        lists = [ops.code_ids(torch.tensor(sorted(ids)), 6) for ids in batches]
        fetched = 0
        for ids in batches:
            fetched += planner.plan(torch.tensor(sorted(ids)), _upcoming(planner, lists)).fetched_place.numel()
        assert fetched == fewest(0, frozenset({0, 1})), f"seed {seed}"


def test_numbers_of_batches_may_outgrow_their_field():
    batches, prior = _batches(30, 60, 3)
    lists = [ops.code_ids(ids, 60) for ids in batches]
    planners = [Planner(_shape(4, 20), prior, torch.arange(20)) for _ in range(2)]
    planners[1].batch = planners[1].known = 2**15 - 9
    for i, ids in enumerate(batches):
        found = [
            planner.plan(ids, lambda p=planner, b=begin: lists[p.known - b] if p.known - b < 30 else None)
            for planner, begin in zip(planners, (0, 2**15 - 9))
        ]
        assert all(one.equal(other) for one, other in zip(*found)), i


def test_a_window_that_is_forgotten_leaves_the_rows_and_the_prior():
    batches, prior = _batches(12, 60, 5)
    lists = [ops.code_ids(ids, 60) for ids in batches]
    planner = Planner(_shape(9, 20), prior, torch.arange(20))
    for ids in batches[:6]:
        planner.plan(ids, _upcoming(planner, lists))
    kept = planner.slot_id.clone()
    planner.forget_window()
    assert planner.slot_id.equal(kept) and planner.known == planner.batch == 6
    slow = LookaheadReference(9, 20, prior, kept)  # begins with these rows and has seen nothing
    ids = batches[6]
    moves = planner.plan(ids, lambda: None)
    hits, fetched, admitted = slow.plan(ids.tolist(), [])
    assert moves.fetched_place.tolist() == fetched and planner.slot_id.tolist() == slow.ids
    assert dict(zip(moves.admitted_slot.tolist(), moves.admitted_row.tolist())) == admitted
    assert list(zip(moves.hit_place.tolist(), moves.hit_slot.tolist())) == hits


def test_rows_that_are_forgotten_are_fetched_again():
    batches, prior = _batches(6, 60, 5)
    planner = Planner(_shape(2, 20), prior, torch.arange(20))
    planner.plan(batches[0], lambda: None)
    planner.forget_rows()
    assert planner.slot_id.tolist() == [-1] * 20
    assert planner.plan(batches[1], lambda: None).hit_place.numel() == 0


def test_a_window_without_room_is_shorter_and_the_plan_still_right():
    batches, prior = _batches(30, 400, 7)
    lists = [ops.code_ids(ids, 400) for ids in batches]
    planner = Planner(Shape(20, 50, 4 * lists[0].nbytes), prior, torch.arange(50))
    held = set(range(50))
    for i, ids in enumerate(batches):
        moves = planner.plan(ids, _upcoming(planner, lists))
        assert planner.known - i <= 7
        assert set(ids[moves.hit_place].tolist()) == set(ids.tolist()) & held
        held = set(planner.slot_id.tolist())


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [4, 256, 4096])
@pytest.mark.parametrize("budget", [0, 1000, 300_000, 400_000_000])
def test_rows_and_state_stay_inside_the_budget(row_bytes, budget):
    for window in (1, 9, 200):
        shape = Shape.of(window, budget, row_bytes, Trial(100, 110), 10**9)
        if shape.num_slots:
            planner = Planner(shape, torch.ones(10), torch.tensor([], dtype=torch.int64))
            own = sum(each.nbytes for each in (planner._slot_id, planner._slot_key, planner._table))
            assert own + shape.list_bytes == shape.state_bytes
            assert shape.num_slots * row_bytes + shape.state_bytes <= budget
            assert (shape.num_slots + 3) * (row_bytes + 6) + shape.list_bytes > budget - 4 * 7 * shape.num_slots


def test_no_more_slots_than_rows_that_may_be_needed():
    assert Shape.of(3, 10**9, 100, Trial(10, 11), 50).num_slots == 50


# --- the forecast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [20, 60, 150])
@pytest.mark.parametrize("window", [1, 4, 12, 40])
def test_the_forecast_is_near_what_independent_batches_fetch(slots, window):
    """Within 3 % of what is fetched without a cache, over 300 batches."""
    batches, prior = _batches(300, 600, slots + window)
    lists = [ops.code_ids(ids, 600) for ids in batches]
    hottest = torch.sort(prior, descending=True, stable=True).indices
    planner = Planner(_shape(window, slots), prior, hottest[:slots].sort().values)
    fetched = sum(planner.plan(ids, _upcoming(planner, lists)).fetched_place.numel() for ids in batches) / 300
    expected = forecast(prior, slots, window + (group_of(window) - 1) / 2)
    bare = float(prior.sum())
    assert abs(fetched - expected.rows) < 0.03 * bare
    assert expected.best_rows <= expected.rows <= expected.static_rows + 1e-9
    static = bare - float(prior[hottest[:slots]].sum())
    assert expected.static_rows == pytest.approx(static, rel=1e-2)


def test_the_forecast_falls_with_memory_and_with_the_window():
    _, prior = _batches(1, 2000, 9)
    spread = Spread.of(prior)
    for window in (0, 1, 2, 5, 30, math.inf):
        rows = [spread.rows(slots, window) for slots in range(0, 2001, 50)]
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(rows))
    for slots in (0, 10, 300, 1900, 2000):
        rows = [spread.rows(slots, window) for window in (0, 1, 2, 3, 5, 9, 30, 300, math.inf)]
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(rows))
        reach = spread.reach(slots)
        assert spread.rows(slots, 1.3 * reach) == pytest.approx(spread.rows(slots, math.inf))


def _in_blocks(size: int, number: int, num_ids: int) -> tuple[list[torch.Tensor], torch.Tensor, Blocks]:
    """Batches in blocks: a block needs some rows, and each of its batches some of these; with how probably a batch and a block need each."""
    draw = torch.Generator().manual_seed(size)
    of_block = torch.rand(num_ids, generator=draw) ** 3
    of_batch = of_block * (0.05 + 0.5 * torch.rand(num_ids, generator=draw))
    lists = []
    for index in range(number):
        if index % size == 0:
            needed = torch.rand(num_ids, generator=draw) < of_block
        lists.append(needed & (torch.rand(num_ids, generator=draw) < of_batch / of_block))
    some = 1 - (1 - of_batch / of_block) ** size  # of a block's batches at least one
    return [ops.code_ids(each.nonzero().flatten(), num_ids) for each in lists], of_batch, Blocks(size, of_block * some)


def _fetched(lists: list[torch.Tensor], prior: torch.Tensor, window: int, slots: int, skip: int) -> float:
    """Rows per batch, after the first."""
    members = torch.sort(prior, descending=True).indices[:slots].sort().values
    planner, rows = Planner(_shape(window, slots), prior, members), []
    for each in lists:
        rows.append(planner.plan(ops.ids_of_list(each, prior.numel()), _upcoming(planner, lists)).fetched_place.numel())
    return sum(rows[skip:-window]) / len(rows[skip:-window])


@pytest.mark.parametrize("size", [4, 40])
def test_where_batches_agree_in_blocks_the_forecast_is_what_the_planner_fetches(size):
    lists, prior, blocks = _in_blocks(size, 200, 2000)
    for slots in (100, 300, 800):
        for window in (3, 8, 30):
            fetched = _fetched(lists, prior, window, slots, size)
            expected = forecast(prior, slots, window, blocks=blocks).rows
            alone = forecast(prior, slots, window).rows
            assert abs(expected - fetched) < 0.6 * abs(alone - fetched), (slots, window, fetched, expected, alone)


def test_blocks_of_one_batch_are_none():
    _, prior = _batches(1, 2000, 9)
    one = Spread.of(prior, Blocks(1, prior))
    assert one.in_block is None
    for window in (1, 7, 40):
        again, kept = Spread(one.chance, one.count, one.chance, 1)._within(window)
        for ours, theirs in zip((again, kept), one._within(window)):
            assert torch.allclose(ours, theirs, atol=1e-9)


def test_what_holds_everything_fetches_nothing():
    _, prior = _batches(1, 100, 2)
    number = int((prior > 0).sum())
    assert Spread.of(prior).reach(number) == math.inf and forecast(prior, number, 3).rows == 0.0


def test_auto_takes_the_window_that_is_forecast_to_save_most():
    _, prior = _batches(1, 3000, 4)
    trial = Trial(float(prior.sum()), 1.1 * float(prior.sum()))
    chosen = choose_shape("auto", prior, 60_000, 100, trial)
    spread = Spread.of(prior)
    for window in range(1, 40):
        shape = Shape.of(window, 60_000, 100, trial, 3000)
        assert spread.rows(chosen.num_slots, chosen.window) <= 1.02 * spread.rows(shape.num_slots, window)
    # Where ids take as much as rows a window does not pay.
    assert choose_shape("auto", prior, 3000, 1, trial).window == 0


def test_a_window_that_eats_the_budget_is_refused_in_words():
    _, prior = _batches(1, 3000, 4)
    trial = Trial(600, 660)
    with pytest.raises(
        ValueError, match=r"lookahead=64 needs .* bytes for ids, more than half of the 20,000 .*'auto' or 0"
    ):
        choose_shape(64, prior, 20_000, 100, trial)
    with pytest.raises(ValueError, match="pass at most 13, 'auto' or 0"):
        choose_shape(64, prior, 20_000, 100, trial)
    assert choose_shape(13, prior, 20_000, 100, trial).window == 13


@pytest.mark.parametrize("wrong", [-1, 1.5, "all", None, True, 2**13 + 1])
def test_what_is_no_lookahead_is_refused_in_words(wrong):
    with pytest.raises(ValueError, match=r"lookahead must be an integer in \[0, 8192\] .* or 'auto', got"):
        check_lookahead(wrong)
    assert check_lookahead("auto") == "auto" and check_lookahead(torch.tensor(3)) == 3
