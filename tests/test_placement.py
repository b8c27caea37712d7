"""Laws of `salientpp.plan.placement`: every place of every part is one rank's, and whom a rank asks stands at its own place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salientpp.plan.placement import Placement, parts_of


@given(st.integers(1, 12), st.integers(1, 6))
def test_every_place_of_every_part_is_one_ranks_in_order(num_parts, per_part):
    ranks = [Placement(rank, num_parts * per_part, num_parts) for rank in range(num_parts * per_part)]
    assert [(r.part_id, r.place) for r in ranks] == [
        (part, place) for part in range(num_parts) for place in range(per_part)
    ]
    assert {r.ranks_per_part for r in ranks} == {per_part}
    assert [list(parts_of(r.rank, r.world_size, num_parts)) for r in ranks] == [[r.part_id] for r in ranks]


@given(st.integers(1, 12), st.integers(1, 6))
def test_a_rank_asks_the_rank_of_the_part_at_its_own_place(num_parts, per_part):
    ranks = [Placement(rank, num_parts * per_part, num_parts) for rank in range(num_parts * per_part)]
    for rank in ranks:
        asked = [ranks[rank.server_of(part_id)] for part_id in range(num_parts)]
        assert [(other.part_id, other.place) for other in asked] == [
            (part_id, rank.place) for part_id in range(num_parts)
        ]
        assert rank.server_of(rank.part_id) == rank.rank


@pytest.mark.parametrize(("world_size", "num_parts"), [(1, 2), (3, 2), (5, 4)])
def test_a_group_that_does_not_fit_is_refused(world_size, num_parts):
    with pytest.raises(
        ValueError,
        match=f"world size {world_size} does not fit {num_parts} parts: .*start {num_parts} ranks or a multiple of that",
    ):
        Placement(0, world_size, num_parts)
