"""Laws of the forecast: it predicts about as many rows as the planner fetches."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from known_batches import random_batches, roomy, upcoming

from salientpp import ops
from salientpp.ways.lookahead.forecast import Blocks, Spread
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import group_of


@pytest.mark.parametrize("slots", [20, 60, 150])
@pytest.mark.parametrize("window", [1, 4, 12, 40])
def test_the_forecast_is_near_the_rows_that_independent_batches_fetch(slots, window):
    """The difference is at most 3 % of the rows fetched without a cache, over 300 batches."""
    batches, prior = random_batches(300, 600, slots + window)
    lists = [ops.code_ids(ids, 600) for ids in batches]
    hottest = torch.sort(prior, descending=True, stable=True).indices
    planner = Planner(roomy(window, slots), prior, hottest[:slots].sort().values)
    fetched = sum(planner.plan(ids, upcoming(planner, lists)).fetched_place.numel() for ids in batches) / 300
    spread = Spread.of(prior)
    expected = spread.rows(slots, window + (group_of(window) - 1) / 2)
    bare = float(prior.sum())
    assert abs(fetched - expected) < 0.03 * bare
    assert spread.rows(slots, math.inf) <= expected <= spread.rows(slots, 0) + 1e-9
    static = bare - float(prior[hottest[:slots]].sum())
    assert spread.rows(slots, 0) == pytest.approx(static, rel=1e-2)


def test_the_forecast_falls_with_memory_and_with_the_window():
    _, prior = random_batches(1, 2000, 9)
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
    """Makes batches in blocks. A block draws some rows at random, and each of its batches takes some of them. Returns the lists of the batches, the probability
    that a batch needs a row, and the probability that a block needs it.
    """
    draw = torch.Generator().manual_seed(size)
    of_block = torch.rand(num_ids, generator=draw) ** 3
    of_batch = of_block * (0.05 + 0.5 * torch.rand(num_ids, generator=draw))
    lists = []
    for index in range(number):
        if index % size == 0:
            needed = torch.rand(num_ids, generator=draw) < of_block
        lists.append(needed & (torch.rand(num_ids, generator=draw) < of_batch / of_block))
    some = 1 - (1 - of_batch / of_block) ** size  # at least one batch of the block
    return [ops.code_ids(each.nonzero().flatten(), num_ids) for each in lists], of_batch, Blocks(size, of_block * some)


def _fetched(lists: list[torch.Tensor], prior: torch.Tensor, window: int, slots: int, skip: int) -> float:
    """Returns the rows fetched per batch, after the first batches."""
    members = torch.sort(prior, descending=True).indices[:slots].sort().values
    planner, rows = Planner(roomy(window, slots), prior, members), []
    for each in lists:
        rows.append(planner.plan(ops.ids_of_list(each, prior.numel()), upcoming(planner, lists)).fetched_place.numel())
    return sum(rows[skip:-window]) / len(rows[skip:-window])


@pytest.mark.parametrize("size", [4, 40])
def test_the_forecast_for_batches_in_blocks_is_near_the_fetched_rows(size):
    lists, prior, blocks = _in_blocks(size, 200, 2000)
    for slots in (100, 300, 800):
        for window in (3, 8, 30):
            fetched = _fetched(lists, prior, window, slots, size)
            expected = Spread.of(prior, blocks).rows(slots, window)
            alone = Spread.of(prior).rows(slots, window)
            assert abs(expected - fetched) < 0.6 * abs(alone - fetched), (slots, window, fetched, expected, alone)


def test_blocks_of_one_batch_count_as_no_blocks():
    _, prior = random_batches(1, 2000, 9)
    one = Spread.of(prior, Blocks(1, prior))
    assert one.in_block is None
    for window in (1, 7, 40):
        again, kept = Spread(one.chance, one.count, one.chance, 1)._within(window)
        for ours, theirs in zip((again, kept), one._within(window)):
            assert torch.allclose(ours, theirs, atol=1e-9)


def test_a_cache_that_holds_everything_fetches_nothing():
    _, prior = random_batches(1, 100, 2)
    number = int((prior > 0).sum())
    assert Spread.of(prior).reach(number) == math.inf and Spread.of(prior).rows(number, 3) == 0.0
