"""Laws of the window of a lookahead cache: 'auto' takes the window that saves most, within the memory of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from known_batches import random_batches

from salientpp.ways.lookahead.forecast import ListSizes, Spread
from salientpp.ways.lookahead.shape import Shape, choose_shape, reach_of


def test_auto_takes_the_window_that_is_forecast_to_save_most():
    _, prior = random_batches(1, 3000, 4)
    trial = ListSizes(float(prior.sum()), 1.1 * float(prior.sum()))
    chosen = choose_shape("auto", prior, 60_000, 100, trial)
    spread = Spread.of(prior)
    for window in range(1, 40):
        shape = Shape.of(window, 60_000, 100, trial, 3000)
        assert spread.rows(chosen.num_slots, chosen.window) <= 1.02 * spread.rows(shape.num_slots, window)
    # If ids take as much memory as rows, a window does not pay.
    assert choose_shape("auto", prior, 3000, 1, trial).window == 0


def test_auto_lets_waiting_batches_take_as_much_memory_as_the_cache():
    _, prior = random_batches(1, 3000, 4)
    trial = ListSizes(float(prior.sum()), 1.1 * float(prior.sum()))
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
    trial = ListSizes(600, 660)
    with pytest.raises(
        ValueError, match=r"lookahead=64 needs .* bytes for ids, more than half of the 20,000 .*'auto' or 0"
    ):
        choose_shape(64, prior, 20_000, 100, trial)
    with pytest.raises(ValueError, match="pass at most 13, 'auto' or 0"):
        choose_shape(64, prior, 20_000, 100, trial)
    assert choose_shape(13, prior, 20_000, 100, trial).window == 13
