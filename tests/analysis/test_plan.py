"""Laws of the plan of a job: predictions follow the constants of the machines, and agree with what the analysis counts."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import distributed
import pytest
import torch
from graphs import random_data, random_hetero, real_data
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.plan import Question, named_link, plan
from salientpp.analysis.plan_result import ALIKE
from salientpp.datasets import synthetic
from salientpp.store.tiers import IdSet
from salientpp.ways.planner.machines import Link, Machines, Step
from salientpp.ways.planner.plan import WORTH_IT

FANOUTS, BATCH = [10, 5], 64
BATCHES = Batches(num_neighbors=FANOUTS, batch_size=BATCH, seed=3)
FAST, SLOW = Link(1e12, 0.0), Link(1e6, 1e-4)


@pytest.fixture(scope="module")
def graph() -> Data:
    return synthetic(num_vertices=6000, num_features=16, seed=0)


@pytest.fixture(scope="module")
def directory(graph, tmp_path_factory):
    return salientpp.partition(graph, 4, tmp_path_factory.mktemp("plan") / "d", FANOUTS, BATCH, seed=3)


def _best(planned, **labels):
    """The chosen predictions with these values."""
    return [each for each in planned.chosen if all(getattr(each, name) == value for name, value in labels.items())]


def test_an_epoch_is_training_divided_by_hosts_if_training_dominates():
    # 4096 seeds: 64, 32 and 16 batches of each rank. With random parts of equal size, every rank has the same number.
    data = synthetic(num_vertices=8192, num_features=4, seed=0)
    data.train_mask = torch.arange(8192) % 2 == 0
    data.val_mask = data.test_mask = None
    machines = Machines(FAST, cores=1000, step=Step(0.1))
    planned = plan(data, machines, Question([1, 2, 4], memory=[0]), BATCHES, method="random")
    for each in planned.chosen:
        steps = each.steps
        assert abs(steps - 64 / each.hosts) <= 1
        assert each.training == pytest.approx(0.1 * steps) and each.seconds == pytest.approx(0.1 * steps, rel=1e-3)
    assert planned.recommended.hosts == 4


def test_the_parts_of_an_epoch_add_up(directory):
    planned = plan(directory, Machines(SLOW, step=Step(0.001)), Question([2, 4]))
    for each in planned.predictions:
        assert each.training + each.loading + each.waiting == pytest.approx(each.seconds)
        assert min(each.training, each.loading) >= 0 and each.waiting >= -1e-12


def test_a_slower_link_never_predicts_a_faster_epoch(directory):
    links = [Link(rate, delay) for rate, delay in ((1e9, 0.0), (1e8, 1e-5), (1e7, 1e-4), (1e6, 1e-3))]
    plans = [plan(directory, Machines(link, step=Step(0.001)), Question([2, 4], memory=[0, 50_000])) for link in links]
    for faster, slower in pairwise(plans):
        assert [each.ways for each in faster.predictions] == [each.ways for each in slower.predictions]
        for one, other in zip(faster.predictions, slower.predictions):
            assert one.seconds <= other.seconds and one.network_bytes == other.network_bytes


def test_more_memory_never_predicts_a_slower_epoch(directory):
    budgets = [0, 2_000, 10_000, 50_000, 200_000, 10**12]
    for link in (FAST, SLOW):
        planned = plan(directory, Machines(link), Question([2, 4], memory=budgets))
        for hosts in (2, 4):
            by_budget = [
                min(each.seconds for each in planned.predictions if (each.hosts, each.budget) == (hosts, budget))
                for budget in budgets
            ]
            assert by_budget == sorted(by_budget, reverse=True)
            assert by_budget[-1] < by_budget[0]


def test_a_host_that_holds_all_rows_receives_nothing(directory):
    planned = plan(directory, Machines(SLOW), Question([1, 4], memory=[10**12]))
    assert all(each.network_bytes == 0 for each in _best(planned, hosts=1))
    (of_four,) = _best(planned, hosts=4)
    assert of_four.network_bytes == 0
    rows = sum(directory.books[None].size_of(part) for part in range(1, 4)) * 64
    assert of_four.memory["cache"] <= rows + IdSet.of(torch.arange(1), 6000).words.nbytes + 64 * 300


def test_the_chosen_combination_takes_the_least_time(directory):
    for link in (FAST, SLOW):
        planned = plan(directory, Machines(link), Question([2, 4], memory=[0, 50_000], allow=["sums", "int8"]))
        assert {(each.hosts, each.budget) for each in planned.chosen} == {(2, 0), (2, 50_000), (4, 0), (4, 50_000)}
        for each in planned.chosen:
            others = [
                other.seconds
                for other in planned.predictions
                if (other.hosts, other.budget) == (each.hosts, each.budget)
            ]
            # Each of two kinds of rows keeps its static cache for a saving below the limit.
            assert each.seconds <= min(others) / (1 - WORTH_IT) ** 2
        assert len(planned.chosen) == 4
    # With a slow link, bytes decide.
    assert all({"partial_aggregation", "send_as"} & set(each.options) for each in planned.chosen)


def test_batches_change_only_for_a_saving(directory):
    free = plan(directory, Machines(FAST, cores=1000, step=Step(0.1)), Question([4], allow=["sums", "int8"]))
    assert all(set(each.options) <= {"replication_factor"} for each in free.chosen)


@pytest.mark.parametrize("hosts", [2, 4])
def test_predicted_bytes_are_close_to_the_bytes_that_the_analysis_counts(graph, hosts):
    whole = 6000 * 64
    planned = plan(graph, Machines(SLOW), Question([hosts], memory=[0, whole // 20, whole // 4]), BATCHES)
    alphas = [hosts * share for share in (0, 1 / 20, 1 / 4)]
    batches = dataclasses.replace(BATCHES, epochs=4)
    counted = analyze(graph, batches, Ways(["vip"], alphas, lookahead="auto"), parts=hosts)
    found = 0
    for way in ("cache", "lookahead"):
        volumes = sorted(counted.of(way=way, policy="vip"), key=lambda each: each.replication_factor)
        for budget, volume in zip(sorted({each.budget for each in planned.predictions}), volumes, strict=True):
            for each in planned.predictions:
                if (each.budget, each.ways) == (budget, way if budget else "no cache"):
                    # A fetched row takes its bytes and an id of 4 bytes.
                    expected = volume.remote_rows_per_epoch * (64 + 4)
                    assert each.network_bytes == pytest.approx(expected, rel=0.15)
                    found += 1
    assert found == 6


def test_predicted_bytes_of_a_real_graph_are_close_to_counted_bytes():
    data = real_data("facebook_pages")
    data.x = data.x.repeat(1, 16)
    whole = data.x.nbytes
    batches = dataclasses.replace(BATCHES, epochs=3)
    planned = plan(data, Machines(SLOW), Question([2], memory=[0, whole // 20]), batches)
    counted = analyze(data, batches, Ways(["vip"], [0.0, 0.1]), parts=2).of(way="cache", policy="vip")
    row_bytes = data.x[0].nbytes + 4  # and an id
    bare, cached = (volume.remote_rows_per_epoch * row_bytes for volume in counted)
    for each in planned.predictions:
        expected = {"no cache": bare, "cache": cached}.get(each.ways)
        assert expected is None or abs(each.network_bytes - expected) < 0.15 * bare


def test_a_graph_is_planned_like_the_directory_that_the_same_options_make(graph, directory):
    question, machines = Question([4], memory=[20_000], allow=["sums", "int8", "shared_draws"]), Machines(SLOW)
    of_graph = plan(graph, machines, question, BATCHES)
    of_directory = plan(directory, machines, question, dataclasses.replace(BATCHES, seeds="train"))
    assert any("lookahead" in each.ways for each in of_graph.predictions)
    assert [each.ways for each in of_graph.predictions] == [each.ways for each in of_directory.predictions]
    for one, other in zip(of_graph.predictions, of_directory.predictions):
        assert one.network_bytes == pytest.approx(other.network_bytes, rel=1e-3)
        assert one.seconds == pytest.approx(other.seconds, rel=1e-3)
        assert one.memory["host"] == other.memory["host"]


def test_ranks_of_a_host_share_rows_and_a_cache(graph, directory):
    machines, question = Machines(SLOW), Question([2], ranks_per_host=2, memory=[0, 50_000])
    planned = plan(directory, machines, question)
    assert all((each.hosts, each.ranks) == (2, 4) for each in planned.predictions)
    batches = dataclasses.replace(BATCHES, epochs=4, seeds="train")
    alphas = [0.0, 2 * 50_000 / (6000 * 64)]
    counted = analyze(directory, batches, Ways(["vip"], alphas), ranks=4, ranks_per_host=2)
    rows = [each.remote_rows_per_epoch for each in counted.of(way="cache", policy="vip")]
    (bare,) = (each for each in planned.predictions if each.budget == 0)
    (cached,) = (each for each in planned.predictions if each.ways == "cache")
    assert bare.network_bytes == pytest.approx(rows[0] * 68, rel=0.15)
    assert cached.network_bytes == pytest.approx(rows[1] * 68, rel=0.15)
    # Two parts lie on each host, so half of the rows are its own; four hosts hold a quarter each.
    alone = plan(directory, machines, Question([4], memory=[0]))
    assert bare.memory["host"] > 1.8 * alone.predictions[0].memory["host"]
    assert bare.network_bytes < alone.predictions[0].network_bytes


def _planned_by_loader(rank: int, root: str, ranks_per_host: int, memory: int, machines: Machines) -> dict:
    loader = NeighborLoader(
        salientpp.load(root),
        FANOUTS,
        "train",
        batch_size=BATCH,
        shuffle=True,
        seed=3,
        memory={"host": memory, "machines": machines, "allow": ["sums"]},
        ranks_per_host=ranks_per_host,
    )
    found = loader.plan()
    return {line.choice.words: (line.cost.seconds, line.memory, line is found.chosen) for line in found.lines}


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(2, 1), (4, 1), (4, 2)])
def test_loaders_with_the_same_memory_make_the_same_plan(directory, ranks, ranks_per_host):
    machines, hosts = Machines(SLOW, step=Step(0.001)), ranks // ranks_per_host
    by_loaders = distributed.run(_planned_by_loader, ranks, str(directory.root), ranks_per_host, 50_000, machines)
    question = Question([hosts], ranks_per_host, memory=[50_000], allow=["sums"])
    planned = plan(directory, machines, question, dataclasses.replace(BATCHES, seeds="train"))
    predicted = {each.ways: each for each in planned.predictions if each.ways != "no cache"}
    assert set(predicted) == {"cache", "cache + sums", "lookahead"}
    for by_loader in by_loaders:
        assert set(by_loader) == set(predicted)
        for ways, (seconds, memory, chosen) in by_loader.items():
            found = predicted[ways]
            assert found.seconds == pytest.approx(seconds, rel=1e-9) and found.chosen == chosen
            assert {name: found.memory.get(name) for name in memory} == memory


def test_a_price_gives_costs_and_the_cheapest_plan(directory):
    machines = Machines(FAST, cores=1000, step=Step(0.1), price=3.6)
    planned = plan(directory, machines, Question([1, 2, 4], memory=[0], epochs=10))
    for each in planned.chosen:
        assert each.cost == pytest.approx(each.hosts * 3.6 * each.seconds * 10 / 3600)
    costs = [each.cost for each in planned.chosen]
    assert planned.cheapest.cost <= min(costs) / (1 - ALIKE)
    assert plan(directory, Machines(FAST), Question([2])).cheapest is None


def test_of_equal_epochs_the_fewest_hosts_and_the_least_memory_are_recommended(directory):
    # Loading costs nothing and a step takes no time for a delay: all budgets take the same time.
    machines = Machines(FAST, cores=1000, step=Step(0.1))
    planned = plan(directory, machines, Question([4], memory=[50_000, 1_000, 100_000]))
    assert planned.recommended.budget == 1_000


def test_a_recommendation_says_why_it_is_not_the_shortest_epoch(directory):
    planned = plan(directory, Machines(FAST, cores=1000, step=Step(0.1)), Question([4], memory=[1_000, 50_000]))
    few, many = planned.chosen
    for seconds, says in ((few.seconds * 0.98, True), (few.seconds, False)):
        better = dataclasses.replace(many, seconds=seconds)
        other = dataclasses.replace(planned, predictions=(few, better))
        said = repr(other)
        assert (
            other.recommended is few
            and f"Recommended: 4 hosts, {few.ways}. An epoch takes about {few.seconds:.3g} s" in said
        )
        reason = (
            f"The shortest epoch takes {seconds:.3g} s. Of all within 3 % of it, the recommended one needs the fewest"
        )
        assert (reason in " ".join(said.split())) == says


def test_device_memory_saves_copies(directory):
    machines = Machines(FAST, to_device=1e6)
    planned = plan(directory, machines, Question([4], memory=[0], device_memory=[0, 20_000, 10**9]))
    none, some, every = (
        min(e.seconds for e in planned.predictions if e.device_budget == n) for n in (0, 20_000, 10**9)
    )
    assert none > some > every
    index = 8 * 6000 // 32 + 8  # on the host
    assert all(each.device_bytes <= each.device_budget + index for each in planned.chosen)


def test_graphs_with_several_types_are_planned(tmp_path):
    part = salientpp.partition(random_hetero(), 2, tmp_path / "d", [4, 3], 16, seeds=("paper", "all"))
    planned = plan(part, Machines(SLOW), Question([1, 2], memory=[150, 300, 10_000]))
    by_budget = [each.network_bytes for each in planned.predictions if (each.hosts, each.ways) == (2, "cache")]
    assert len(by_budget) == 3 and by_budget == sorted(by_budget, reverse=True) and by_budget[0] > 0 == by_budget[-1]
    with pytest.raises(ValueError, match="allow sums: .* has several vertex types; leave sums out"):
        plan(part, Machines(SLOW), Question(allow=["sums"]))


def test_json_names_the_recommended_predictions(directory):
    planned = plan(directory, Machines(SLOW, price=1.0), Question([2, 4], memory=[0, 50_000]))
    values = json.loads(json.dumps(planned.to_dict()))
    assert values["schema"] == 1
    assert values["predictions"][values["recommended"]]["seconds"] == planned.recommended.seconds
    assert values["predictions"][values["cheapest"]]["cost"] == planned.cheapest.cost
    assert Machines.of(values["machines"], "the plan").between == SLOW


def test_ranks_of_a_host_share_a_named_link():
    assert named_link("10GbE", 4).between.bytes_per_second == 10e9 / 8 / 4


@pytest.mark.parametrize(
    ("question", "machines", "text"),
    [
        (
            Question([8]),
            Machines(FAST),
            "hosts must be at most the number of parts of .*, which is 4, got 8; partition",
        ),
        (Question([0]), Machines(FAST), "hosts must be integers >= 1, got 0"),
        (Question([3], 2), Machines(FAST), "world size 6 does not fit 4 parts"),
        (Question([2], 0), Machines(FAST), "ranks_per_host must be integers >= 1, got 0"),
        (Question([2], memory=[-1]), Machines(FAST), "memory must be numbers of bytes >= 0, got -1"),
        (Question([2], device_memory=[5]), Machines(FAST), "device_memory needs constants of machines with a device"),
        (
            Question([2], allow=["magic"]),
            Machines(FAST),
            "allow must hold names of sums, int8, shared_draws, got 'magic'",
        ),
        (Question([2], epochs=0), Machines(FAST), "epochs must be >= 1, got 0"),
    ],
)
def test_wrong_questions_are_refused(directory, question, machines, text):
    with pytest.raises(ValueError, match=text):
        plan(directory, machines, question)


@pytest.mark.parametrize(
    ("parts", "ranks_per_host", "hosts"),
    [(6, 1, [1, 2, 4, 6]), (6, 2, [1, 2, 6]), (6, 3, [1, 2, 6]), (3, 3, [1, 3]), (6, 7, [6])],
)
def test_only_numbers_of_hosts_that_fit_the_parts_are_proposed(tmp_path, parts, ranks_per_host, hosts):
    data = random_data(60, 200)
    salientpp.partition(data, parts, tmp_path / "d", [2], 8, method=torch.arange(60) % parts)
    question = Question(ranks_per_host=ranks_per_host, memory=[0])
    planned = plan(salientpp.load(tmp_path / "d"), Machines(FAST), question)
    assert sorted({each.hosts for each in planned.predictions}) == hosts


def test_wrong_graphs_are_refused(tmp_path):
    data = random_data()
    with pytest.raises(ValueError, match="allow int8: no rows of x would travel in fewer bytes"):
        plan(data, Machines(FAST), Question([2], allow=["int8"]))  # 12 bytes
    data.x = data.x.repeat(1, 8)
    with pytest.raises(ValueError, match="hosts must be given for a graph that is not partitioned yet"):
        plan(data, Machines(FAST))
    with pytest.raises(
        ValueError, match="machines must be a JSON file of salientpp calibrate, or a link .*, got '10GB'"
    ):
        named_link("10GB", 1)
    stored = salientpp.partition(data, 2, tmp_path / "narrow", [3, 2], 16, store_as={"x": "int8"})
    with pytest.raises(ValueError, match="allow int8: no rows of x would travel in fewer bytes"):
        plan(stored, Machines(FAST), Question(allow=["int8"]))
    with pytest.raises(ValueError, match="allow sums: .* stores x in a narrow format"):
        plan(stored, Machines(FAST), Question(allow=["sums"]))
    data.num_nodes = data.num_nodes
    del data.x
    with pytest.raises(ValueError, match="graph has no rows of x, so nothing travels"):
        plan(data, Machines(FAST), Question([2]))
