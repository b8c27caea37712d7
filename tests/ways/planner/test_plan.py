"""Laws of budgets, choices and the table of a plan, without ranks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from salientpp.loader.planned_loader import Planning
from salientpp.loader.values import Options
from salientpp.ways.cache import Cache
from salientpp.ways.device import DeviceRows
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.planner.choices import Beside, Budget, Choice
from salientpp.ways.planner.costs import Cost
from salientpp.ways.planner.machines import Link, Machines, Step
from salientpp.ways.planner.plan import best_of, slowest
from salientpp.ways.planner.result import Line, MemoryPlan
from salientpp.ways.planner.trials import Batch
from salientpp.ways.sums.way import SumsOfRows

ALL = Budget(1000, device_memory=200, all_rows=10**6, index=40, sums="mean")


def test_no_choice_takes_more_than_the_budget():
    for memory in (0, 39, 40, 41, 1000):
        for choice in dataclasses.replace(ALL, memory=memory).choices():
            index = 0 if not choice.cache else (2 if choice.device_cache else 1) * ALL.index
            assert choice.cache + index <= memory
            assert choice.device_rows + choice.device_cache <= ALL.device_memory


@pytest.mark.parametrize(("memory", "tables"), [(10**6, 160_000), (10**5, 160_000), (0, 160_000), (10**6, 0)])
def test_a_host_that_only_trains_has_its_ids_and_tables_within_the_budget(memory, tables):
    row = 92
    budget = Budget(memory, beside=Beside(tables, 10**9, row), all_rows=10**12, looks_ahead=False)
    (choice,) = budget.choices()
    needed = choice.cache + 8 * (choice.cache // row) + min(tables, memory // 2)
    assert memory - 200 <= needed <= memory or not memory, "no more is kept free than a row takes"
    few = dataclasses.replace(budget, beside=Beside(tables, 10, row))
    assert few.choices()[0].cache == memory - min(tables, memory // 2) - (80 if memory else 0)


def test_choices_differ_and_begin_with_the_static_cache():
    choices = ALL.choices()
    assert len(set(choices)) == len(choices)
    assert choices[0] == Choice(960, device_rows=200)
    assert any(choice.lookahead for choice in choices) and any(choice.sums for choice in choices)
    assert any(choice.device_cache for choice in choices)
    assert not any(choice.lookahead and choice.sums for choice in choices)


def test_more_rows_than_there_are_need_no_memory():
    choices = dataclasses.replace(ALL, memory=10**9).choices()
    assert max(choice.cache for choice in choices) == 10**6


def test_ways_that_are_not_possible_are_not_chosen():
    plain = dataclasses.replace(ALL, looks_ahead=False, sums=None, device_memory=0)
    assert plain.choices() == [Choice(960)]


def test_given_values_stay():
    given = {"cache": 0.5, "device_rows": 77}
    choices = dataclasses.replace(ALL, given=given).choices()
    assert {(choice.cache, choice.device_rows) for choice in choices} == {(0.5, 77)}
    assert len(set(choices)) == len(choices)


def test_a_given_window_stays():
    choices = dataclasses.replace(ALL, given={"lookahead": 5}, sums=None, device_memory=0).choices()
    assert choices == [Choice(960, 5)]


def test_a_choice_makes_its_ways_in_the_order_in_which_they_act():
    kinds = [type(way) for way in Choice(9, 0, "mean", 3, 2).ways()]
    assert kinds == [DeviceRows, Cache, SumsOfRows]
    assert [type(way) for way in Choice(9, "auto").ways()] == [Lookahead] and Choice().ways() == []


@pytest.mark.parametrize("choice", [*ALL.choices(), Choice(0.25, 7), Choice()])
def test_a_choice_survives_json_and_the_names_of_the_options(choice):
    again = Choice.of(json.loads(json.dumps(choice.values)))
    assert again == choice and [type(value) for value in vars(again).values()] == [
        type(value) for value in vars(choice).values()
    ]


# --- lines ----------------------------------------------------------------------------------------------------


def line(choice: Choice, seconds: float, memory: dict[str, int] | None = None) -> Line:
    return Line(choice, Cost(seconds, 0.0, seconds, 0.0, 0.0, seconds, 1e6), memory or {})


def test_the_slowest_rank_decides_and_the_largest_memory_is_shown():
    first = [line(Choice(1), 2.0, {"cache": 10, "lookahead": 5}), line(Choice(2), 1.0)]
    second = [line(Choice(1), 1.0, {"cache": 14}), line(Choice(2), 3.0)]
    found = slowest([first, second])
    assert [each.cost.seconds for each in found] == [2.0, 3.0]
    assert found[0].memory == {"cache": 10, "lookahead": 5} and found[0].copies == 15


def test_a_small_saving_does_not_replace_the_static_cache():
    static = line(Choice(1), 1.0)
    assert best_of([static, line(Choice(2), 0.98)]) is static
    assert best_of([static, line(Choice(2), 0.9)]).choice == Choice(2)


def table(**changes) -> str:
    lines = [line(Choice(number, "auto", None, number * 3), number / 10) for number in range(1, 30)]
    machines = Machines(Link(1e9), step=Step(seconds=1.0))
    values = {"chosen": lines[20], "lines": lines, "batch": Batch(10, 1.0, 1.0, 1.0, 1.0), "machines": machines}
    return " ".join(str(MemoryPlan(**{**values, "memory": 100, "device_memory": 7, "saves": 0.5, **changes})).split())


def test_a_table_shows_the_chosen_line_even_if_it_is_not_among_the_fastest():
    text = table()
    assert "> lookahead + device rows" in text
    assert "17 slower combinations are not shown" in text
    assert "one more GiB of memory per host would save 0.5 s of an epoch" in text
    assert "no training step" not in text and "this rank holds" not in text


def test_a_table_says_why_copies_save_nothing():
    said = "all ranks share one host, or need no rows that they lack, so nothing is fetched, and copies on the host save nothing"
    bare = line(Choice(), 1.0)
    nothing = dataclasses.replace(bare, cost=dataclasses.replace(bare.cost, bytes_in=0.0))
    full = dataclasses.replace(nothing, choice=Choice(100))
    assert said in table(chosen=nothing, lines=[nothing])
    assert said not in table() and said not in table(chosen=full, lines=[full, bare])


def test_a_table_names_what_the_budget_does_not_contain():
    text = table(held={"host": 2**21, "graph": 3 * 2**10, "batches": 7}, device_saves=0.25)
    assert (
        "besides the budget, this rank holds 2.1 MB own rows, 3.07 kB topology, 7 B batches in flight, 0 B rows that travel."
        in text
    )
    assert "one more GiB of device memory would save 0.25 s" in text
    assert "no training step was measured" in table(machines=Machines(Link(1e9)))


@pytest.mark.parametrize(
    ("cores", "text"), [(1, "1 core for a rank"), (0.5, "0.5 cores for a rank"), (2, "2 cores for a rank")]
)
def test_one_core_is_no_plural(cores, text):
    assert f" {text}." in table(machines=Machines(Link(1e9), cores=cores))


def test_results_of_once_are_kept_until_the_outermost_block_ends():
    from salientpp.engine.basis import Basis

    basis, calls = object.__new__(Basis), []
    basis._remembered = None

    def compute() -> int:
        calls.append(0)
        return len(calls)

    with basis.remembering():
        with basis.remembering():
            assert basis.once("a", compute) == basis.once("a", compute) == 1
        assert basis.once("a", compute) == 1
    assert basis.once("a", compute) == 2


def test_a_plan_counts_what_is_not_for_copies():
    chosen = line(Choice(900), 1.0, {"cache": 900})
    machines = Machines(Link(0.0, 1e9))
    plan = MemoryPlan(chosen, [chosen], Batch(10, 100.0, 200.0, 100.0, 800.0), machines, 1000, 0, beside=100)
    assert not plan.exceeds and "100 B of the budget are for ids of cached rows, seeds" in " ".join(str(plan).split())
    exceeded = dataclasses.replace(plan, beside=101)
    assert "need 900 B per host" in exceeded.exceeds and "more than the budget of 899 B" in exceeded.exceeds
    planning = Planning(plan, Options(memory=1000), [])
    assert planning.read(Choice(901).values) is None, "a plan of ranks that store too may fill the whole budget"
    assert planning.read(Choice(900).values) == Choice(900)
