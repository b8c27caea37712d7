"""Laws of a cache that knows the next batches: it keeps the rows that are needed next."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from known_batches import random_batches, roomy, upcoming
from reference import LookaheadReference

from salientpp import ops
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape, group_of

# --- lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("num_ids", [0, 1, 9, 1000, 70000])
def test_a_list_takes_at_most_one_bit_per_possible_id(density, num_ids):
    ids = (torch.rand(num_ids, generator=torch.Generator().manual_seed(num_ids)) < density).nonzero().flatten()
    coded = ops.code_ids(ids[torch.randperm(ids.numel())], num_ids)
    assert ops.ids_of_list(coded, num_ids).equal(ids)
    assert coded.nbytes <= 1 + min(num_ids // 8 + 1, 3 * ids.numel())


def test_a_list_takes_little_more_than_its_entropy():
    """Independent ids have this entropy in bits. Half of the ids occur ten times as often as the others."""
    num_ids, often, seldom = 200_000, 0.2, 0.02
    chance = torch.cat([torch.full((num_ids // 2,), often), torch.full((num_ids // 2,), seldom)])
    ids = (torch.rand(num_ids, generator=torch.Generator().manual_seed(0)) < chance).nonzero().flatten()
    entropy = -(chance * chance.log2() + (1 - chance) * (1 - chance).log2()).sum()
    assert entropy < 8 * ops.code_ids(ids, num_ids).nbytes < 1.07 * entropy


def test_wide_gaps_are_coded():
    ids = torch.tensor([0, 127, 128, 300, 2**14, 2**21, 2**28 + 5, 2**31 - 2])
    assert ops.ids_of_list(ops.code_ids(ids, 2**31 - 1), 2**31 - 1).equal(ids)


def test_a_list_excludes_repeats_and_a_range():
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
def test_links_point_to_the_next_list_with_the_id(num_ids):
    batches, _ = random_batches(7, num_ids, 1)
    links = ops.link_lists([ops.code_ids(ids, num_ids) for ids in batches], 3, num_ids)
    assert len(links) == 3
    sets = [set(ids.tolist()) for ids in batches]
    for head, of_head in enumerate(links):
        expected = [next((j - head for j in range(head + 1, 7) if v in sets[j]), 0) for v in sorted(sets[head])]
        assert of_head.tolist() == expected


# --- the planner --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 8, 9, 20, 64])
@pytest.mark.parametrize("slots", [0, 1, 7, 30, 200])
def test_the_planner_keeps_the_rows_needed_next(window, slots):
    batches, prior = random_batches(40, 120, window)
    lists = [ops.code_ids(ids, 120) for ids in batches]
    members = torch.randperm(120, generator=torch.Generator().manual_seed(slots))[: slots // 2]
    planner, slow = Planner(roomy(window, slots), prior, members), LookaheadReference(window, slots, prior, members)
    for i, ids in enumerate(batches):
        moves = planner.plan(ids, upcoming(planner, lists))
        reach = min(40, i // group_of(window) * group_of(window) + group_of(window) + window)
        assert planner.known == reach >= min(40, i + 1 + window)
        hits, fetched, admitted = slow.plan(ids.tolist(), [set(known.tolist()) for known in batches[i + 1 : reach]])
        assert list(zip(moves.hit_place.tolist(), moves.hit_slot.tolist())) == hits
        assert moves.fetched_place.tolist() == fetched
        assert dict(zip(moves.admitted_slot.tolist(), moves.admitted_row.tolist())) == admitted
        assert planner.slot_id.tolist() == slow.ids


def test_no_choice_fetches_less_if_the_whole_future_is_known():
    """The planner is compared with every sequence of choices, on caches of two rows."""
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

        planner = Planner(roomy(50, 2), torch.full((6,), 0.5), torch.tensor([0, 1]))
        lists = [ops.code_ids(torch.tensor(sorted(ids)), 6) for ids in batches]
        fetched = 0
        for ids in batches:
            fetched += planner.plan(torch.tensor(sorted(ids)), upcoming(planner, lists)).fetched_place.numel()
        assert fetched == fewest(0, frozenset({0, 1})), f"seed {seed}"


def test_numbers_of_batches_may_exceed_their_15_bits():
    batches, prior = random_batches(30, 60, 3)
    lists = [ops.code_ids(ids, 60) for ids in batches]
    planners = [Planner(roomy(4, 20), prior, torch.arange(20)) for _ in range(2)]
    planners[1].batch = planners[1].known = 2**15 - 9
    for i, ids in enumerate(batches):
        found = [
            planner.plan(ids, lambda p=planner, b=begin: lists[p.known - b] if p.known - b < 30 else None)
            for planner, begin in zip(planners, (0, 2**15 - 9))
        ]
        assert all(one.equal(other) for one, other in zip(*found)), i


def test_forgetting_the_window_keeps_rows_and_probabilities():
    batches, prior = random_batches(12, 60, 5)
    lists = [ops.code_ids(ids, 60) for ids in batches]
    planner = Planner(roomy(9, 20), prior, torch.arange(20))
    for ids in batches[:6]:
        planner.plan(ids, upcoming(planner, lists))
    kept = planner.slot_id.clone()
    planner.forget_window()
    assert planner.slot_id.equal(kept) and planner.known == planner.batch == 6
    slow = LookaheadReference(9, 20, prior, kept)  # the reference starts with the same rows and knows no next batch
    ids = batches[6]
    moves = planner.plan(ids, lambda: None)
    hits, fetched, admitted = slow.plan(ids.tolist(), [])
    assert moves.fetched_place.tolist() == fetched and planner.slot_id.tolist() == slow.ids
    assert dict(zip(moves.admitted_slot.tolist(), moves.admitted_row.tolist())) == admitted
    assert list(zip(moves.hit_place.tolist(), moves.hit_slot.tolist())) == hits


def test_forgotten_rows_are_fetched_again():
    batches, prior = random_batches(6, 60, 5)
    planner = Planner(roomy(2, 20), prior, torch.arange(20))
    planner.plan(batches[0], lambda: None)
    planner.forget_rows()
    assert planner.slot_id.tolist() == [-1] * 20
    assert planner.plan(batches[1], lambda: None).hit_place.numel() == 0


def test_a_window_shrinks_if_memory_is_short_and_the_plan_stays_right():
    batches, prior = random_batches(30, 400, 7)
    lists = [ops.code_ids(ids, 400) for ids in batches]
    planner = Planner(Shape(20, 50, 4 * lists[0].nbytes), prior, torch.arange(50))
    held = set(range(50))
    for i, ids in enumerate(batches):
        moves = planner.plan(ids, upcoming(planner, lists))
        assert planner.known - i <= 7
        assert set(ids[moves.hit_place].tolist()) == set(ids.tolist()) & held
        held = set(planner.slot_id.tolist())
