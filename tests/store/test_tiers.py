"""Laws of `salientpp.store.tiers` and `salientpp.store.cache`: every row of a batch has exactly one place, and the place holds that row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference
import torch
from graphs import identity_features
from tier_rows import FRACTIONS, random_case, some_of, sources

from salientpp import ops
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.cache import FeatureCache
from salientpp.store.rows import put_rows, take_rows
from salientpp.store.tiers import NO_IDS, IdSet, Places, Tier, Tiers

CPU = torch.device("cpu")


def tiers_of(book, part_id, device_ids, cache_ids) -> Tiers:
    begin, end = book.range_of(part_id)
    x = identity_features(book.num_vertices, 2)
    tiers = Tiers.of(book, part_id, sources(x=x[begin:end].clone()), device_ids=device_ids, device=CPU)
    cache = FeatureCache(IdSet.of(cache_ids, book.num_vertices), {"x": x[cache_ids]})
    return dataclasses.replace(tiers, copies=cache.tiers(zero_copy=False))


def pairs(tiers: Tiers, places: Places) -> dict[str, list[tuple[int, int]]]:
    """Returns (position, slot) pairs by the name of the tier, without remote rows."""
    found = {"device": [], "host": [], "cache": []}
    for tier, position, slot in tiers.groups(places):
        found[tier.name] += zip(range(len(slot)) if position is None else position.tolist(), slot.tolist())
    return found


# --- look-up ----------------------------------------------------------------------------------------------


@FRACTIONS
@pytest.mark.parametrize("seed", range(15))
def test_look_up_equals_the_slow_reference(seed, gpu_fraction, cache_fraction):
    book, part_id, device_ids, cache_ids, n_id = random_case(seed, gpu_fraction, cache_fraction)
    tiers = tiers_of(book, part_id, device_ids, cache_ids)
    places = tiers.look_up(n_id)
    want = reference.look_up(n_id.tolist(), book.offsets.tolist(), part_id, device_ids.tolist(), cache_ids.tolist())
    found = pairs(tiers, places)
    assert found["device"] == want["device"] and found["host"] == want["host"] and found["cache"] == want["cache"]
    # Remote ids are grouped by owner, and keep the order of the batch inside a group.
    assert list(zip(places.remote_position.tolist(), places.remote_id.tolist())) == sum(want["remote"], [])
    assert places.remote_counts.tolist() == [len(group) for group in want["remote"]]
    assert all(tensor.dtype == torch.int64 for tensor in tensors_of(places))


@FRACTIONS
@pytest.mark.parametrize("seed", range(15))
def test_the_groups_have_every_position_once_and_lead_to_its_row(seed, gpu_fraction, cache_fraction):
    book, part_id, device_ids, cache_ids, n_id = random_case(seed, gpu_fraction, cache_fraction)
    tiers = tiers_of(book, part_id, device_ids, cache_ids)
    places = tiers.look_up(n_id)
    groups = [(tier, torch.arange(len(slot)) if at is None else at, slot) for tier, at, slot in tiers.groups(places)]
    positions = torch.cat([*(position for _, position, _ in groups), places.remote_position])
    assert positions.sort().values.tolist() == list(range(len(n_id)))
    assert places.num_rows == len(n_id)

    # Features that identify their vertex: x[v] = v.
    x = torch.full((len(n_id), 2), -1.0)
    for tier, position, slot in groups:
        x[position] = tier.tensor("x")[slot]
    x[places.remote_position] = places.remote_id.float().view(-1, 1)
    assert torch.equal(x[:, 0].long(), n_id)

    assert places.remote_counts.sum() == len(places.remote_id)
    assert places.remote_counts[part_id] == 0
    for owner, ids in enumerate(places.remote_id.split(places.remote_counts.tolist())):
        assert (book.owner(ids) == owner).all()


def test_look_up_in_a_single_tier_returns_the_batch_itself():
    tiers = tiers_of(PartitionBook.trivial(10), 0, NO_IDS, NO_IDS)
    n_id = torch.tensor([3, 3, 9])
    places = tiers.look_up(n_id)
    assert list(places.position) == [None] and places.slot[0] is n_id
    assert places.remote_counts.tolist() == [0]
    assert len(places.remote_position) == len(places.remote_id) == 0


def test_look_up_is_right_for_a_million_ids():
    # The ids span more than one word and one block of the set, and positions in the set exceed 2^16.
    book = PartitionBook(torch.tensor([0, 400_000, 1_000_000]))
    cache_ids = torch.arange(400_000, 1_000_000, 3)
    places = tiers_of(book, 0, torch.arange(0, 400_000, 2), cache_ids).look_up(torch.arange(1_000_000))
    gpu, cpu, cache = zip(places.position, places.slot, strict=True)
    assert torch.equal(gpu[1], torch.arange(200_000)) and torch.equal(gpu[0], torch.arange(0, 400_000, 2))
    assert torch.equal(cpu[1], torch.arange(1, 400_000, 2))
    assert torch.equal(cache[1], torch.arange(200_000)) and torch.equal(cache[0], cache_ids)
    assert places.remote_counts.tolist() == [0, 400_000]


def test_an_error_in_a_look_up_does_not_change_the_next_one():
    book, part_id, device_ids, cache_ids, n_id = random_case(3, 0.4, 0.4)
    tiers = tiers_of(book, part_id, device_ids, cache_ids)
    before = tiers.look_up(n_id)
    with pytest.raises(RuntimeError, match=r"n_id\[1\] must be in \[0, "):
        tiers.look_up(torch.tensor([0, book.num_vertices]))
    after = tiers.look_up(n_id)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(before), tensors_of(after), strict=True))


def tensors_of(places: Places) -> list[torch.Tensor]:
    return [
        *(at for at in places.position if at is not None),
        *places.slot,
        places.remote_position,
        places.remote_id,
        places.remote_counts,
    ]


@pytest.mark.parametrize("seed", range(15))
def test_the_first_of_any_number_of_tiers_serves_a_row(seed):
    generator = np.random.default_rng(seed)
    book, part_id, _, _, n_id = random_case(seed, 0, 0)
    begin, end = book.range_of(part_id)
    foreign = np.setdiff1d(np.arange(book.num_vertices), np.arange(begin, end))
    near = [some_of(generator, np.arange(end - begin), 0.3) for _ in range(seed % 4)]
    copies = [some_of(generator, foreign, 0.3) for _ in range(seed % 3)]
    tier = lambda ids, size: Tier("cache", IdSet.of(ids, size), {}, False, "cache")  # noqa: E731
    tiers = dataclasses.replace(
        tiers_of(book, part_id, NO_IDS, NO_IDS),
        near=[tier(ids, end - begin) for ids in near],
        copies=[tier(ids, book.num_vertices) for ids in copies],
    )
    places = tiers.look_up(n_id)
    for position, v in enumerate(n_id.tolist()):
        sets, among = (near, v - begin) if begin <= v < end else (copies, v)
        first = next((number for number, ids in enumerate(sets) if among in ids.tolist()), None)
        if first is None and sets is copies:
            assert position in places.remote_position.tolist()
            continue
        group = len(near) if first is None else first + (0 if sets is near else len(near) + 1)
        at = places.position[group]
        row = places.slot[group][position if at is None else at.tolist().index(position)]
        assert row == (among if first is None else sets[first].tolist().index(among))


# --- sets and caches --------------------------------------------------------------------------------------


def test_slot_i_of_a_set_is_its_ith_id():
    ids = torch.tensor([0, 31, 32, 63, 64, 99])
    members = IdSet.of(ids, 100)
    assert len(members) == 6 and members.ids is ids
    position, slot, _ = ops.look_up(torch.arange(100), torch.tensor([0, 0, 100]), 0, [], [members.words])
    assert position[1].tolist() == ids.tolist() and slot[1].tolist() == list(range(6))


@pytest.mark.parametrize("ids", [[3, 3], [4, 2], [100], [-1]], ids=str)
def test_a_set_of_ids_out_of_order_or_range_is_refused(ids):
    with pytest.raises(RuntimeError, match=r"ids must ascend"):
        IdSet.of(torch.tensor(ids), 64)


def test_an_empty_cache_holds_nothing():
    cache = FeatureCache.empty()
    assert len(cache.members) == 0 and dict(cache.rows) == {} and cache.nbytes == 0


def test_nbytes_of_a_cache_counts_ids_and_rows():
    cache = FeatureCache(
        IdSet.of(torch.tensor([1, 70]), 100), {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.int64)}
    )
    assert cache.nbytes == 4 * 8 + 2 * 8 * 4 + 2 * 8  # four words of 32 ids each, then the rows


# --- the tiers --------------------------------------------------------------------------------------------


def test_the_device_tier_holds_copies_of_its_rows():
    book = PartitionBook(torch.tensor([0, 4, 10]))
    rows = sources(x=identity_features(10, 3)[4:], y=torch.arange(4, 10), label=torch.arange(6))
    tiers = Tiers.of(book, 1, rows, device_ids=torch.tensor([0, 2, 5]), device=CPU, seeds_only=["label"])
    gpu, home = tiers.all
    assert gpu.tensor("x")[:, 0].tolist() == [4, 6, 9] and gpu.tensor("y").tolist() == [4, 6, 9]
    assert gpu.tensor("x").data_ptr() != home.tensor("x").data_ptr() == rows["x"].tensor.data_ptr()
    assert gpu.rows.keys() == {"x", "y"} and home.rows.keys() == {"x", "y", "label"}


def test_memory_counts_the_bytes_of_each_tier():
    book = PartitionBook(torch.tensor([0, 4, 104]))
    rows = sources(x=torch.zeros(100, 2), y=torch.zeros(100, dtype=torch.int8))
    tiers = Tiers.of(book, 1, rows, device_ids=torch.arange(10), device=CPU)
    assert tiers.memory() == {"device": 4 * 8 + 10 * 8 + 10, "host": 100 * 8 + 100, "cache": 0}
    cache = FeatureCache(
        IdSet.of(torch.tensor([1]), 104), {"x": torch.zeros(1, 2), "y": torch.zeros(1, dtype=torch.int8)}
    )
    assert dataclasses.replace(tiers, copies=cache.tiers(False)).memory()["cache"] == 4 * 8 + 8 + 1 == cache.nbytes
    assert Tiers.of(book, 0, {}, device=CPU).memory() == {"device": 0, "host": 0, "cache": 0}


def test_an_attribute_must_have_one_row_per_vertex_of_the_part():
    book = PartitionBook(torch.tensor([0, 4, 10]))
    with pytest.raises(ValueError, match=r"attribute 'y' must have one row per vertex of part 1, expected 6, got 5"):
        Tiers.of(book, 1, sources(x=torch.zeros(6, 1), y=torch.zeros(5)), device=CPU)


def test_the_part_must_exist():
    with pytest.raises(ValueError, match=r"part_id must be in \[0, 2\), got 2"):
        Tiers.of(PartitionBook(torch.tensor([0, 4, 10])), 2, {}, device=CPU)


def test_device_rows_must_be_rows_of_the_part():
    with pytest.raises(RuntimeError, match=r"\[0, 6\), got 6"):
        Tiers.of(
            PartitionBook(torch.tensor([0, 4, 10])),
            1,
            sources(x=torch.zeros(6, 1)),
            device_ids=torch.tensor([6]),
            device=CPU,
        )


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_take_rows_and_put_rows_equal_indexing(dtype, shape):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(2, (20, *shape), generator=generator).to(dtype)
    index = torch.randint(20, (7,), generator=generator)
    assert torch.equal(take_rows(rows, index), rows[index])
    out, places = torch.zeros(9, *shape, dtype=dtype), torch.randperm(9, generator=generator)[:7]
    want = out.clone()
    want[places] = rows[index]
    put_rows(rows, index, out, places)
    assert torch.equal(out, want)
    put_rows(rows, index, out, None)
    assert torch.equal(out[:7], rows[index])
