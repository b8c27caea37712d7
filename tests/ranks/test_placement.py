"""Laws of `salientpp.ranks.placement`: every logical rank, part and place belongs to one rank, in order, and a rank asks the rank at its own place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from salientpp.ranks.placement import Placement, parts_of


def _ranks(world_size, num_parts, **more):
    return [Placement(rank, world_size, num_parts, **more) for rank in range(world_size)]


@given(st.integers(1, 12), st.integers(1, 6))
def test_every_place_of_every_part_belongs_to_one_rank_in_order(num_parts, per_part):
    ranks = _ranks(num_parts * per_part, num_parts)
    assert [(r.part_id, r.place) for r in ranks] == [
        (part, place) for part in range(num_parts) for place in range(per_part)
    ]
    assert {r.ranks_per_part for r in ranks} == {per_part}
    assert [list(parts_of(r.rank, r.world_size, num_parts)) for r in ranks] == [[r.part_id] for r in ranks]
    assert [(list(r.logical_ranks), list(r.own_parts)) for r in ranks] == [([r.rank], [r.part_id]) for r in ranks]


@given(st.integers(1, 12), st.integers(1, 6))
def test_a_rank_asks_the_rank_of_the_part_at_its_own_place(num_parts, per_part):
    ranks = _ranks(num_parts * per_part, num_parts)
    for rank in ranks:
        asked = [ranks[rank.server_of(part_id)] for part_id in range(num_parts)]
        assert [(other.part_id, other.place) for other in asked] == [
            (part_id, rank.place) for part_id in range(num_parts)
        ]
        assert rank.server_of(rank.part_id) == rank.rank


@given(st.integers(1, 12), st.integers(1, 24), st.data())
def test_with_fewer_ranks_each_rank_has_consecutive_parts_and_logical_ranks(world_size, num_parts, data):
    assume(world_size <= num_parts)
    logical_ranks = data.draw(
        st.sampled_from([s for s in range(world_size, 49) if s <= num_parts or s % num_parts == 0]), "logical_ranks"
    )
    ranks = _ranks(world_size, num_parts, num_logical_ranks=logical_ranks)
    assert [logical_rank for rank in ranks for logical_rank in rank.logical_ranks] == list(range(logical_ranks))
    assert [part for rank in ranks for part in rank.own_parts] == list(range(num_parts))
    assert all(len(rank.own_parts) > 0 and len(rank.logical_ranks) > 0 for rank in ranks)
    for rank in ranks:
        # The parts that a logical rank visits belong to its rank, and do not depend on the number of ranks.
        units = [rank.parts_of_unit(rank.unit_of(logical_rank)) for logical_rank in rank.logical_ranks]
        assert {part for unit in units for part in unit} == set(rank.own_parts)
        alone = Placement(0, 1, num_parts, num_logical_ranks=logical_ranks)
        assert units == [alone.parts_of_unit(alone.unit_of(logical_rank)) for logical_rank in rank.logical_ranks]
        assert rank.row_offsets[rank.part_id : rank.part_id + 2] == (rank.own_parts.start, rank.own_parts.stop)
    assert {len(rank.own_parts) for rank in _ranks(world_size, num_parts)} <= {
        num_parts // world_size,
        -(-num_parts // world_size),
    }


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_host_holds_all_its_parts_and_one_rank_answers_requests(hosts, per_host, per_part, joined):
    world_size = hosts * per_host
    assume(world_size % per_part == 0 and (per_part == 1 or joined == 1))
    assume(per_host % per_part == 0 or per_part % per_host == 0)
    num_parts = world_size * joined // per_part
    ranks = _ranks(world_size, num_parts, ranks_by_host=(per_host,) * hosts)
    assert [r.host for r in ranks] == [rank // per_host for rank in range(world_size)]
    for r in ranks:
        assert set(r.own_parts) <= set(r.row_parts[r.part_id])
        together = {part for other in r.ranks_of_host for part in ranks[other].own_parts}
        assert together == set(r.row_parts[r.part_id])
        assert set(r.ranks_of_host) <= set(r.ranks_of_part)
        for part_id in range(len(r.row_parts)):
            server = ranks[r.server_of(part_id)]
            assert server.part_id == part_id and server.place == r.place
    assert [part for parts in ranks[0].row_parts for part in parts] == list(range(num_parts))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_hosts_can_have_different_numbers_of_ranks(by_host, joined):
    world_size = sum(by_host)
    ranks = _ranks(world_size, world_size * joined, ranks_by_host=tuple(by_host))
    assert all(begin < end for begin, end in pairwise(ranks[0].row_offsets))
    for r in ranks:
        servers = [ranks[r.server_of(part_id)] for part_id in range(len(by_host))]
        assert [server.part_id for server in servers] == list(range(len(by_host)))
        assert r.server_of(r.part_id) == r.rank


@given(hosts=st.integers(1, 4), per_host=st.integers(1, 4), num_parts=st.integers(1, 9), times=st.integers(1, 3))
def test_hosts_whose_ranks_cooperate_visit_seeds_as_one_rank_each(hosts, per_host, num_parts, times):
    assume(hosts <= num_parts or num_parts * (hosts // num_parts) == hosts)
    logical_ranks = hosts * times
    assume(logical_ranks <= num_parts or logical_ranks % num_parts == 0)
    for rank in range(hosts * per_host):
        ours = Placement(rank, hosts * per_host, num_parts, logical_ranks, (per_host,) * hosts, cooperates=True)
        alone = Placement(rank // per_host, hosts, num_parts, logical_ranks)
        assert ours.host == alone.rank and ours.num_visitors == hosts
        for name in ("logical_ranks", "own_parts", "own_offsets", "own_part", "num_units", "row_offsets", "part_id"):
            assert getattr(ours, name) == getattr(alone, name), name
        assert all(ours.server_of(part) // per_host == alone.server_of(part) for part in range(len(ours.row_parts)))


@pytest.mark.parametrize(("world_size", "num_parts"), [(3, 2), (5, 4), (5, 3)])
def test_a_group_that_does_not_fit_is_refused(world_size, num_parts):
    words = f"world size {world_size} does not fit {num_parts} parts: .*start at most {num_parts} ranks or a multiple of {num_parts}"
    with pytest.raises(ValueError, match=words):
        Placement(0, world_size, num_parts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 2, 4, 6), "logical_ranks=6 does not fit 4 parts: .*use at most 4 logical ranks or a multiple of 4"),
        (
            (0, 4, 8, 3),
            "logical_ranks=3 is less than the 4 ranks, so some ranks would have no batches; start at most 3 ranks",
        ),
        (
            (0, 8, 4, 12),
            "logical_ranks=12 does not fit 8 ranks: .*start a number of ranks that divides 12, or at most 4",
        ),
        ((0, 4, 4, 0, (3, 2)), r"ranks_by_host must be numbers >= 1 that add up to the 4 ranks, got \[3, 2\]"),
        (
            (0, 4, 2, 0, (3, 1)),
            "hosts 0 and 1 would share a part but not all of their parts .*or pass ranks_per_host=1",
        ),
        (
            (0, 3, 4, 0, (2, 1), True),
            r"hosts whose ranks cooperate need equally many ranks, got \[2, 1\] ranks; start the same number",
        ),
        (
            (0, 6, 2, 0, (2, 2, 2), True),
            "3 cooperating hosts do not fit 2 parts: .*start at most 2 hosts or a multiple",
        ),
        ((0, 4, 8, 1, (2, 2), True), "logical_ranks=1 is less than the 2 hosts, so some hosts would have no batches"),
    ],
)
def test_placements_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Placement(*arguments)
