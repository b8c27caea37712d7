"""Laws of the memory of a lookahead cache: it stays inside the budget, and 'auto' takes the window that saves most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from known_batches import random_batches

from salientpp.ways.lookahead.forecast import Spread, Trial
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape, check_lookahead, choose_shape, reach_of


@pytest.mark.parametrize("row_bytes", [4, 256, 4096])
@pytest.mark.parametrize("budget", [0, 1000, 300_000, 400_000_000])
def test_rows_and_state_stay_inside_the_budget(row_bytes, budget):
    for window in (1, 9, 200):
        shape = Shape.of(window, budget, row_bytes, Trial(100, 110), 10**9)
        if shape.num_slots:
            planner = Planner(shape, torch.ones(10), torch.tensor([], dtype=torch.int64))
            own = sum(each.nbytes for each in (planner.slot_id, planner._slot_key, planner._table))
            assert own + shape.list_bytes == shape.state_bytes
            assert shape.num_slots * row_bytes + shape.state_bytes <= budget
            assert (shape.num_slots + 3) * (row_bytes + 6) + shape.list_bytes > budget - 4 * 7 * shape.num_slots


def test_slots_never_exceed_the_rows_that_may_be_needed():
    assert Shape.of(3, 10**9, 100, Trial(10, 11), 50).num_slots == 50


def test_auto_takes_the_window_that_is_forecast_to_save_most():
    _, prior = random_batches(1, 3000, 4)
    trial = Trial(float(prior.sum()), 1.1 * float(prior.sum()))
    chosen = choose_shape("auto", prior, 60_000, 100, trial)
    spread = Spread.of(prior)
    for window in range(1, 40):
        shape = Shape.of(window, 60_000, 100, trial, 3000)
        assert spread.rows(chosen.num_slots, chosen.window) <= 1.02 * spread.rows(shape.num_slots, window)
    # If ids take as much memory as rows, a window does not pay.
    assert choose_shape("auto", prior, 3000, 1, trial).window == 0


def test_auto_lets_waiting_batches_take_as_much_memory_as_the_cache():
    _, prior = random_batches(1, 3000, 4)
    trial = Trial(float(prior.sum()), 1.1 * float(prior.sum()))
    free = choose_shape("auto", prior, 60_000, 100, trial).window
    windows = []
    for waiting_bytes in (1.0, 60_000 / 2, 60_001.0):
        windows.append(choose_shape("auto", prior, 60_000, 100, replace(trial, waiting_bytes=waiting_bytes)).window)
        assert reach_of(windows[-1]) * waiting_bytes <= 60_000
    assert free > 2 and windows == [free, 2, 0]
    # A window that the user chose stays as it is.
    assert choose_shape(9, prior, 60_000, 100, replace(trial, waiting_bytes=60_000.0)).window == 9


def test_a_window_that_takes_most_of_the_budget_raises_a_clear_error():
    _, prior = random_batches(1, 3000, 4)
    trial = Trial(600, 660)
    with pytest.raises(
        ValueError, match=r"lookahead=64 needs .* bytes for ids, more than half of the 20,000 .*'auto' or 0"
    ):
        choose_shape(64, prior, 20_000, 100, trial)
    with pytest.raises(ValueError, match="pass at most 13, 'auto' or 0"):
        choose_shape(64, prior, 20_000, 100, trial)
    assert choose_shape(13, prior, 20_000, 100, trial).window == 13


@pytest.mark.parametrize("wrong", [-1, 1.5, "all", None, True, 2**13 + 1])
def test_a_wrong_lookahead_raises_a_clear_error(wrong):
    with pytest.raises(ValueError, match=r"lookahead must be an integer in \[0, 8192\] .* or 'auto', got"):
        check_lookahead(wrong)
    assert check_lookahead("auto") == "auto" and check_lookahead(torch.tensor(3)) == 3
