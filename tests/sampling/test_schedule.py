"""Laws of `salientpp.sampling.schedule`: the seeds that each rank visits and their order, also if ranks have different numbers of seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from graphs import random_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.sampling.schedule import UNEVEN, Schedule, share_size

# Seeds of each part and ranks per part; the parts have different numbers of seeds.
GROUPS = [
    ((10,), 1),
    ((10,), 3),
    ((23, 7), 1),
    ((23, 7), 2),
    ((16, 16), 2),
    ((5, 31, 12), 2),
    ((1, 100), 1),
    ((9, 8), 4),
]
GROUP = pytest.mark.parametrize("seeds_of_parts, ranks_per_part", GROUPS, ids=lambda x: str(x).replace(" ", ""))
BATCH_SIZES = (1, 3, 8, 1000)


def schedules(
    seeds_of_parts, ranks_per_part, batch_size, uneven, *, shuffle=True, drop_last=False, seed=1
) -> list[Schedule]:
    """Makes one schedule per rank of the group, in order of rank."""
    counts = [share_size(n, place, ranks_per_part) for n in seeds_of_parts for place in range(ranks_per_part)]
    return [
        Schedule(
            num_seeds=seeds_of_parts[rank // ranks_per_part],
            unit=rank // ranks_per_part,
            place=rank % ranks_per_part,
            logical_ranks_per_unit=ranks_per_part,
            seeds_per_logical_rank=counts,
            logical_rank=rank,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            uneven=uneven,
            seed=seed,
        )
        for rank in range(len(counts))
    ]


def as_lists(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches) -> list[int]:
    return [i for batch in batches for i in batch.tolist()]


# --- shares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_shares_add_up_and_differ_by_one_at_most(num_shares):
    for num_seeds in range(30):
        sizes = [share_size(num_seeds, place, num_shares) for place in range(num_shares)]
        assert sum(sizes) == num_seeds and max(sizes) - min(sizes) <= 1


@GROUP
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_ranks_of_a_part_share_its_seeds(seeds_of_parts, ranks_per_part, shuffle):
    # Each rank's share is one place of every `ranks_per_part` in a common order of the part's seeds.
    ranks = schedules(seeds_of_parts, ranks_per_part, 4, "exact", shuffle=shuffle)
    for part_id, num_seeds in enumerate(seeds_of_parts):
        shares = [flat(s.batches(0)) for s in ranks if s.unit == part_id]
        assert sorted(sum(shares, [])) == list(range(num_seeds))
        assert [len(share) for share in shares] == [
            share_size(num_seeds, place, ranks_per_part) for place in range(ranks_per_part)
        ]


# --- the four values of `uneven` --------------------------------------------------------------------------


@GROUP
@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_promised_number_of_batches_is_given(seeds_of_parts, ranks_per_part, uneven, drop_last):
    for batch_size in BATCH_SIZES:
        try:
            ranks = schedules(seeds_of_parts, ranks_per_part, batch_size, uneven, drop_last=drop_last)
        except ValueError:
            assert uneven == "error"
            continue
        for schedule in ranks:
            batches = schedule.batches(0)
            assert len(batches) == schedule.num_batches
            assert all(1 <= len(batch) <= batch_size and batch.dtype == torch.int64 for batch in batches)
            # Only the last batch may be smaller, and with drop_last none is.
            assert all(len(batch) == batch_size for batch in (batches if drop_last else batches[:-1]))
            assert schedule.num_rounds == max(s.num_batches for s in ranks)


@GROUP
def test_exact_gives_every_seed_once(seeds_of_parts, ranks_per_part):
    for batch_size in BATCH_SIZES:
        ranks = schedules(seeds_of_parts, ranks_per_part, batch_size, "exact")
        for epoch in range(2):
            for part_id, num_seeds in enumerate(seeds_of_parts):
                given = [i for s in ranks if s.unit == part_id for i in flat(s.batches(epoch))]
                assert sorted(given) == list(range(num_seeds))
        assert [s.num_batches for s in ranks] == [math.ceil(n / batch_size) for n in ranks[0].seeds_per_logical_rank]


@GROUP
@pytest.mark.parametrize("drop_last", [False, True])
def test_wrap_gives_all_ranks_batches_of_the_same_sizes(seeds_of_parts, ranks_per_part, drop_last):
    for batch_size in BATCH_SIZES:
        ranks = schedules(seeds_of_parts, ranks_per_part, batch_size, "wrap", drop_last=drop_last)
        sizes = [[len(batch) for batch in s.batches(0)] for s in ranks]
        assert all(size == sizes[0] for size in sizes)
        most = max(ranks[0].seeds_per_logical_rank)
        assert sum(sizes[0]) == (most // batch_size * batch_size if drop_last else most)


@GROUP
def test_wrap_repeats_a_ranks_own_seeds_evenly_from_the_start(seeds_of_parts, ranks_per_part):
    most = max(share_size(n, 0, ranks_per_part) for n in seeds_of_parts)
    wrapped = schedules(seeds_of_parts, ranks_per_part, 4, "wrap")
    exact = schedules(seeds_of_parts, ranks_per_part, 4, "exact")
    for a, b in zip(wrapped, exact):
        once = flat(b.batches(3))
        assert flat(a.batches(3)) == [once[i % len(once)] for i in range(most)]
        times = Counter(flat(a.batches(3)))
        assert max(times.values()) - min(times.values()) <= 1 and len(times) == len(once)


@GROUP
def test_drop_stops_every_rank_at_the_smallest_number_of_batches(seeds_of_parts, ranks_per_part):
    for batch_size in BATCH_SIZES:
        ranks = schedules(seeds_of_parts, ranks_per_part, batch_size, "drop")
        exact = schedules(seeds_of_parts, ranks_per_part, batch_size, "exact")
        least = min(s.num_batches for s in exact)
        for a, b in zip(ranks, exact):
            assert a.num_batches == least
            assert as_lists(a.batches(2)) == as_lists(b.batches(2))[:least]


def test_error_refuses_different_numbers_of_batches():
    with pytest.raises(
        ValueError,
        match=r"uneven='error', but ranks 0 to 1 have \[6, 2\] batches; pass uneven='wrap', 'drop' or 'exact'",
    ):
        schedules((23, 7), 1, 4, "error")


def test_error_accepts_equal_numbers_of_batches():
    ranks = schedules((8, 7), 1, 4, "error")
    assert [[len(batch) for batch in s.batches(0)] for s in ranks] == [[4, 4], [4, 3]]
    # With drop_last the second rank has one batch less.
    with pytest.raises(ValueError, match=r"ranks 0 to 1 have \[2, 1\] batches"):
        schedules((8, 7), 1, 4, "error", drop_last=True)


# --- drop_last --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uneven", UNEVEN)
def test_drop_last_drops_the_short_batch_and_nothing_else(uneven):
    (keep,) = schedules((23,), 1, 5, uneven)
    (drop,) = schedules((23,), 1, 5, uneven, drop_last=True)
    assert [len(batch) for batch in keep.batches(0)] == [5, 5, 5, 5, 3]
    assert as_lists(drop.batches(0)) == as_lists(keep.batches(0))[:4]
    (whole,) = schedules((20,), 1, 5, uneven, drop_last=True)
    assert [len(batch) for batch in whole.batches(0)] == [5] * 4


def test_fewer_seeds_than_a_batch_give_one_batch_or_none():
    (keep,) = schedules((3,), 1, 5, "wrap")
    (drop,) = schedules((3,), 1, 5, "wrap", drop_last=True)
    assert [len(batch) for batch in keep.batches(0)] == [3] and keep.num_batches == 1
    assert drop.batches(0) == [] and drop.num_batches == 0


# --- order ------------------------------------------------------------------------------------------------


def test_without_shuffle_seeds_come_in_order_in_every_epoch():
    ranks = schedules((10,), 2, 3, "exact", shuffle=False)
    for epoch in range(3):
        assert as_lists(ranks[0].batches(epoch)) == [[0, 2, 4], [6, 8]]
        assert as_lists(ranks[1].batches(epoch)) == [[1, 3, 5], [7, 9]]


@GROUP
@pytest.mark.parametrize("uneven", ["wrap", "drop", "exact"])
def test_an_epoch_is_a_pure_function_of_seed_and_epoch(seeds_of_parts, ranks_per_part, uneven):
    ranks = schedules(seeds_of_parts, ranks_per_part, 4, uneven)
    again = schedules(seeds_of_parts, ranks_per_part, 4, uneven)
    for a, b in zip(ranks, again):
        later_first = [as_lists(b.batches(epoch)) for epoch in (2, 0, 1)]
        assert [as_lists(a.batches(epoch)) for epoch in (2, 0, 1)] == later_first
        assert as_lists(a.batches(0)) == as_lists(a.batches(0))


def test_order_changes_with_the_epoch_the_seed_and_the_part():
    orders = {
        (seed, epoch, s.unit): tuple(flat(s.batches(epoch)))
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
        for s in schedules((50, 50), 1, 8, "exact", seed=seed)
    }
    assert len(set(orders.values())) == len(orders) == 18


def test_all_values_of_uneven_share_one_order():
    # `uneven` and the batch size change where the epoch is cut, never the order.
    orders = [flat(s.batches(4)) for uneven in UNEVEN for size in (1, 7, 40) for s in schedules((40,), 1, size, uneven)]
    assert all(order == orders[0] for order in orders)


# --- no seeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_rank_without_seeds_gives_no_batches(uneven, drop_last):
    (schedule,) = schedules((0,), 1, 4, uneven, drop_last=drop_last)
    assert schedule.num_batches == schedule.num_rounds == 0 and schedule.batches(0) == []


@pytest.mark.parametrize("uneven", ["wrap", "drop"])
@pytest.mark.parametrize("seeds_of_parts, ranks_per_part, rank", [((9, 0), 1, 1), ((9, 0), 2, 2), ((9, 1), 2, 3)])
def test_a_rank_without_seeds_among_others_is_refused(uneven, seeds_of_parts, ranks_per_part, rank):
    text = rf"rank {rank} has no seeds, so uneven='{uneven}' cannot give it batches; pass uneven='exact', or partition"
    with pytest.raises(ValueError, match=text):
        schedules(seeds_of_parts, ranks_per_part, 4, uneven)


def test_with_exact_a_rank_without_seeds_serves_the_others():
    idle, busy = schedules((0, 9), 1, 4, "exact")
    assert idle.batches(0) == [] and idle.num_batches == 0 and idle.num_rounds == busy.num_batches == 3


# --- processes that hold the same data -----------------------------------------------------------------------


@pytest.mark.parametrize("uneven", ["wrap", "exact", "drop"])
def test_processes_with_shares_visit_every_seed_between_them(uneven):
    data = random_data(60, 300)
    loaders = [
        NeighborLoader(data, [3], torch.arange(41), batch_size=4, shuffle=True, seed=3, share=(rank, 3), uneven=uneven)
        for rank in range(3)
    ]
    for _ in range(2):
        seeds = [[batch.input_id.tolist() for batch in loader] for loader in loaders]
        assert [len(batches) for batches in seeds] == [len(loader) for loader in loaders]
        flat = sorted(seed for batches in seeds for batch in batches for seed in batch)
        if uneven == "exact":
            assert flat == list(range(41))
        else:
            assert len({len(batches) for batches in seeds}) == 1 and (uneven == "drop" or set(flat) == set(range(41)))


@pytest.mark.parametrize("link", [False, True])
def test_shares_of_a_shuffled_order_need_a_common_seed(link):
    data = random_data(60, 300)
    make = LinkNeighborLoader if link else NeighborLoader
    with pytest.raises(
        ValueError,
        match=r"share=\(1, 2\) with shuffle=True needs the same order of seeds in all 2 processes, .* same seed=",
    ):
        make(data, [3], shuffle=True, share=(1, 2))
    # These options need no common order, or have one.
    for options in (
        {"share": (0, 1), "shuffle": True},
        {"share": (1, 2)},
        {"share": (1, 2), "shuffle": True, "seed": 0},
    ):
        make(data, [3], batch_size=8, **options)
    visited: list[int] = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(5)
        loader = make(data, [3], batch_size=8, shuffle=True, share=(rank, 2), generator=generator, uneven="exact")
        visited += [seed for batch in loader for seed in batch.input_id.tolist()]
    assert sorted(visited) == list(range(data.num_edges if link else 60))


def test_a_share_has_draws_and_a_state_of_its_own():
    data = random_data(60, 300)
    first, second = (
        NeighborLoader(data, [2, 2], torch.zeros(40, dtype=torch.int64), batch_size=4, seed=3, share=(rank, 2))
        for rank in range(2)
    )
    assert [b.e_id.tolist() for b in first] != [b.e_id.tolist() for b in second], "though their seeds are alike"
    state = first.state_dict()
    with pytest.raises(ValueError, match="rank: expected 1, got 0"):
        second.load_state_dict(state)
    links = LinkNeighborLoader(data, [2], data.edge_index[:, :9], batch_size=2, seed=3, share=(1, 2), uneven="exact")
    assert torch.cat([batch.input_id for batch in links]).tolist() == [1, 3, 5, 7]


def test_impossible_shares_are_refused(tmp_path):
    data = random_data(60, 300)
    for share in ((2, 2), (-1, 2), (0, 0), 3, (0,), (True, 2), (0.0, 2)):
        with pytest.raises(ValueError, match=r"share must be \(rank, number of ranks\)"):
            NeighborLoader(data, [2], share=share)
    with pytest.raises(ValueError, match="share= excludes sampler="):
        NeighborLoader(data, [2], share=(0, 2), sampler=[1, 2])
    part = salientpp.partition(data, 1, tmp_path / "d", [3], 8)
    with pytest.raises(ValueError, match="share= is for a Data or HeteroData"):
        NeighborLoader(part, [2], "train", share=(0, 1))
