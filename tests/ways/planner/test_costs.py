"""Laws of the predicted cost of an epoch, on prices and constants with answers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from salientpp.engine.way import Price
from salientpp.ways.planner.choices import Budget, Choice
from salientpp.ways.planner.costs import OVERLAP, cost_of
from salientpp.ways.planner.machines import Link, Machines, Step
from salientpp.ways.planner.plan import WORTH_IT, Line, best_of, slowest
from salientpp.ways.planner.trials import Batch

BATCH = Batch(number=100, vertices=1000, edges=5000, last_edges=4000, row_bytes=1e6)
PRICE = Price(fetched={None: 4e5}, copied={None: 6e5}, seconds=2e-3, requests=1e4)
#: Only the link and the batches cost something: each constant that a test needs is set there.
FREE = Machines(
    Link(1e12), draw=0.0, row=0.0, byte=0.0, wire=0.0, batch=0.0, look_ahead=0.0, sum=0.0, step=Step(seconds=0.01)
)
NO_DRAWS = replace(PRICE, seconds=0.0)


def seconds(price: Price = NO_DRAWS, choice: Choice | None = None, **constants) -> float:
    return cost_of(price, BATCH, choice or Choice(cache=1), replace(FREE, **constants)).seconds


def test_an_epoch_without_loading_takes_the_training_steps():
    assert seconds() == pytest.approx(1.0)


def test_a_slow_link_takes_its_bytes_divided_by_its_rate():
    # 410,000 bytes in each of 100 batches.
    assert seconds(between=Link(1e6)) == pytest.approx(41.0)


def test_gradients_cross_the_same_link():
    with_gradients = Step(seconds=0.01, gradient_bytes=4.1e5)
    assert seconds(between=Link(1e6), step=with_gradients) == pytest.approx(82.0)


def test_loading_uses_the_cores_that_the_step_leaves_free():
    loaded = replace(FREE, batch=5e-3)  # 0.5 s beside 1 s of training
    assert cost_of(NO_DRAWS, BATCH, Choice(), replace(loaded, cores=2.0)).seconds == pytest.approx(1.0)
    assert cost_of(NO_DRAWS, BATCH, Choice(), replace(loaded, cores=1.5)).seconds == pytest.approx(1.0)
    assert cost_of(NO_DRAWS, BATCH, Choice(), replace(loaded, cores=1.0)).seconds == pytest.approx(1.5)
    assert cost_of(NO_DRAWS, BATCH, Choice(), replace(loaded, cores=0.5)).seconds == pytest.approx(2.0)


def test_cores_and_link_overlap_except_for_a_little():
    both = seconds(between=Link(4.1e7))  # both take one second
    assert both == pytest.approx(2 ** (1 / OVERLAP))
    assert 1.0 < both < 1.15


def test_loading_uses_the_cores_while_steps_wait_for_gradients():
    loaded = replace(FREE, batch=5e-3)  # 0.5 s beside 1 s of training, of which the cores compute 0.7 s
    waits = Step(seconds=0.01, cpu_seconds=0.007, gradient_bytes=1e3)
    for rate, expected in (
        (1e12, 1.5),
        (1e6, 1.4),
        (2.5e5, 1.2),
    ):  # gradients take nothing, 0.1 s, and more than the cores are idle
        found = cost_of(NO_DRAWS, BATCH, Choice(), replace(loaded, step=waits, between=Link(rate)))
        assert found.training + found.loading == pytest.approx(expected)


def test_the_ways_own_work_counts_only_for_these_ways():
    constants = {"look_ahead": 1e-5, "sum": 1e-5}
    assert seconds(choice=Choice(cache=1), **constants) == pytest.approx(1.0)
    assert seconds(choice=Choice(cache=1, lookahead="auto"), **constants) == pytest.approx(2.0)
    assert seconds(choice=Choice(cache=1, sums="mean"), **constants) == pytest.approx(5.0)


def test_a_step_takes_time_in_proportion_to_its_edges():
    assert seconds(step=Step(seconds=0.01, edges=10_000)) == pytest.approx(0.5)


def test_causes_add_up_to_the_epoch():
    cost = cost_of(PRICE, BATCH, Choice(), replace(FREE, between=Link(4e7), to_device=1e8))
    assert cost.training + cost.loading + cost.waiting == pytest.approx(cost.seconds)
    assert min(cost.training, cost.loading, cost.waiting) > 0


@pytest.mark.parametrize(
    "slower",
    [
        {"between": Link(5e6, 1e-4)},
        {"cores": 0.5},
        {"to_device": 1e7},
        {"row": 1e-5},
        {"byte": 1e-8},
        {"wire": 1e-8},
        {"batch": 1e-2},
        {"step": Step(0.004)},
    ],
    ids=lambda slower: next(iter(slower)),
)
def test_slower_machines_never_make_an_epoch_faster(slower):
    machines = Machines(Link(1e7, 1e-4), to_device=1e9, step=Step(0.002))
    before, after = (cost_of(PRICE, BATCH, Choice(), of).seconds for of in (machines, replace(machines, **slower)))
    assert after > before


def line(choice: Choice, took: float, **memory: int) -> Line:
    return Line(choice, cost_of(NO_DRAWS, BATCH, choice, replace(FREE, step=Step(took / BATCH.number))), memory)


def test_the_slowest_rank_decides():
    static, ahead = Choice(cache=1), Choice(cache=1, lookahead="auto")
    first = [line(static, 5.0, cache=10), line(ahead, 1.0, cache=30)]
    second = [line(static, 2.0, cache=20), line(ahead, 3.0, cache=10)]
    together = slowest([first, second])
    assert [each.cost.seconds for each in together] == pytest.approx([5.0, 3.0])
    assert [dict(each.memory) for each in together] == [{"cache": 20}, {"cache": 30}]
    assert best_of(together).choice == ahead


def test_another_way_must_save_more_than_predictions_err():
    static, ahead = Choice(cache=1), Choice(cache=1, lookahead="auto")
    for saved, chosen in ((0.5 * WORTH_IT, static), (1.5 * WORTH_IT, ahead)):
        assert best_of([line(static, 1.0), line(ahead, 1.0 - saved)]).choice == chosen


def test_choices_stay_inside_the_budget_and_begin_with_the_static_cache():
    for memory in (0, 1000, 10**9):
        budget = Budget(memory, device_memory=500, all_rows=10**6, sums="mean")
        choices = budget.choices()
        assert len(set(choices)) == len(choices)
        assert choices[0].words in ("cache + device rows", "device rows")
        for choice in choices:
            assert choice.cache <= min(memory, 10**6)
            assert choice.device_rows + choice.device_cache <= 500


def test_given_values_are_not_chosen():
    choices = Budget(1000, all_rows=10**6, sums="mean", given={"cache": 0.25, "sums": None}).choices()
    assert {choice.cache for choice in choices} == {0.25}
    assert {choice.sums for choice in choices} == {None}
    assert {choice.lookahead for choice in choices} == {0, "auto"}
