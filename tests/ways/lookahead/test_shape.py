"""Laws of the memory of a lookahead cache: it stays inside the budget."""

from __future__ import annotations

import pytest
import torch

from salientpp.ways.lookahead.forecast import ListSizes
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape, check_lookahead


@pytest.mark.parametrize("row_bytes", [4, 256, 4096])
@pytest.mark.parametrize("budget", [0, 1000, 300_000, 400_000_000])
def test_rows_and_state_stay_inside_the_budget(row_bytes, budget):
    for window in (1, 9, 200):
        shape = Shape.of(window, budget, row_bytes, ListSizes(100, 110), 10**9)
        if shape.num_slots:
            planner = Planner(shape, torch.ones(10), torch.tensor([], dtype=torch.int64))
            own = sum(each.nbytes for each in (planner.slot_id, planner._slot_key, planner._table))
            assert own + shape.list_bytes == shape.state_bytes
            assert shape.num_slots * row_bytes + shape.state_bytes <= budget
            assert (shape.num_slots + 3) * (row_bytes + 6) + shape.list_bytes > budget - 4 * 7 * shape.num_slots


def test_slots_never_exceed_the_rows_that_may_be_needed():
    assert Shape.of(3, 10**9, 100, ListSizes(10, 11), 50).num_slots == 50


@pytest.mark.parametrize("wrong", [-1, 1.5, "all", None, True, 2**13 + 1])
def test_a_wrong_lookahead_raises_a_clear_error(wrong):
    with pytest.raises(ValueError, match=r"lookahead must be an integer in \[0, 8192\] .* or 'auto', got"):
        check_lookahead(wrong)
    assert check_lookahead("auto") == "auto" and check_lookahead(torch.tensor(3)) == 3
