"""Laws of plans: with any rows cached or recomputed, results equal those of one process, words are as predicted, and no plan is cheaper."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import distributed
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from fullgraph_training import data_of, network, train, train_alone

from salientpp.fullgraph import Constants, distribute, local, loss_mean, plan_for, trial
from salientpp.fullgraph.distribute import DistributedModel
from salientpp.fullgraph.planner import _UNIT, Costs, Problem
from salientpp.fullgraph.trial import StepTimes, _of, _words_of, times_of, without_halo
from salientpp.graph.csc import Graph
from salientpp.store.target_lists import TargetLists

CONSTANTS = Constants(edge=1e-9, vertex=1e-10, word=1e-8, exchange=1e-4)


def planned_curves(rank: int, kinds: list[str], name: str) -> dict[str, Any]:
    part = local(data_of(), offsets=[0, 0, 37, 120] if name != "gat" else [0, 11, 70, 120])
    found: dict[str, Any] = {}
    for kind in kinds:
        if kind == "random":
            draw = torch.Generator().manual_seed(rank)
            begin, end = part.offsets[rank : rank + 2]
            others = torch.cat([torch.arange(begin), torch.arange(end, 120)])
            inner = others[torch.rand(others.numel(), generator=draw) < 0.4]
            graph = part.planned(inner, torch.randint(3, inner.shape, generator=draw))
        else:
            graph = plan_for(distribute(network(name), part), kind=kind, constants=CONSTANTS).apply()
        model = distribute(network(name), graph)
        found[kind] = train(model, graph, 3)
    return found


@pytest.mark.parametrize("name", ["sage", "gat", "gcn"])
def test_any_plan_gives_the_losses_of_one_process(name):
    expected = train_alone(network(name), data_of(), 3)
    for found in distributed.run(planned_curves, 3, ["fetch", "cache", "recompute", "hybrid", "random"], name):
        for kind, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-9), kind


def counted(rank: int) -> list[tuple[dict[str, float], int, int]]:
    part, found = local(data_of()), []
    for kind in ("fetch", "cache", "recompute", "hybrid"):
        plan = plan_for(distribute(network("sage"), part), kind=kind, constants=CONSTANTS)
        graph = plan.apply()
        model = distribute(network("sage"), graph)
        model(graph.x, graph.edge_index)  # fetches the rows to cache
        graph.ranks.received.clear()
        out = model(graph.x, graph.edge_index)
        loss_mean(F.cross_entropy(out, graph.y, reduction="none"), graph).backward()
        found.append((plan.summary(), graph.ranks.received["forward"], graph.ranks.received["backward"]))
    return found


def test_words_are_as_the_plan_predicts():
    per_rank = distributed.run(counted, 3)
    for of_kind in zip(*per_rank):
        for summary, forward, _ in of_kind:
            assert summary["words"] == forward
        # A gradient travels to the rank that the row came from.
        gone = sum(summary["words with gradients"] - summary["words"] for summary, _, _ in of_kind)
        assert gone == sum(backward for _, _, backward in of_kind)
    summaries = [summary for summary, _, _ in per_rank[0]]
    assert summaries[0]["memory"] == 0 < summaries[1]["memory"] < summaries[2]["memory"]
    assert summaries[2]["rows"] == 0
    assert all(summaries[3]["seconds"] <= each["seconds"] for each in summaries)


# --- times of steps -----------------------------------------------------------------------------------------


def without_others(rank: int) -> bool:
    part = local(data_of(), offsets=[0, 0, 37, 120])
    x, weight, edge_index = part.x, part.edge_weight, part.edge_index
    alone = without_halo(part)
    given = [_of(alone, part, each) for each in (x, edge_index, weight, 3)]
    assert given[0] is x and given[1] is alone.edge_index and given[2] is alone.edge_weight and given[3] == 3
    assert not alone.outer.numel() and bool((alone.edge_index < alone.num_own).all())
    assert torch.equal(alone.edge_index[1], edge_index[1]), "targets of edges are unchanged"
    return torch.equal(alone.e_id, part.e_id)


def test_the_timed_part_without_a_halo_has_all_vertices_and_edges():
    assert distributed.run(without_others, 3) == [True] * 3


def test_times_of_steps_do_not_depend_on_other_load_in_a_round():
    widths, vertex, edge, word, kept = [64, 16], 2e-5, 3e-7, 4e-8, 0.01
    vertices, edges = [0, 1, 1000, 1000, 0], [9000, 9000, 9000, 15000, 9000]
    words = [900_000, 899_936, 836_000, 700_000, 0]
    steps = [
        0.2 + v * vertex + e * edge + w * word + (v > 0) * kept for v, e, w in zip(vertices, edges, words, strict=True)
    ]
    rounds = [[seconds + turn for seconds in steps] for turn in (0, 3, 1, 2, 7)]
    times = times_of(rounds, vertices, edges, words)
    assert (times.vertex, times.edge, times.word, times.kept) == pytest.approx((vertex, edge, word, kept))
    # For the timed half, the cost model must predict the measured times.
    costs = Costs(widths, [False, True], _UNIT).timed(times, Constants(0.0, 0.0, 1.0, 0.0))
    saved = 1000 * (costs.fetch(0) - costs.vertex) - costs.constants.kept
    assert saved == pytest.approx(steps[0] - steps[2])


def plans_timed(rank: int) -> list[tuple[int, list[int]]]:
    """Returns the words that ``step_times`` counts for each plan, and the words that a step under it moves."""
    found: list[tuple[int, list[int]]] = []
    part = local(data_of())
    base = distribute(network("sage"), part)
    base(part.x, part.edge_index)
    words = [width * (2 if backward else 1) for width, backward in base.seen]
    half = part.outer[::2]
    for depths in (torch.zeros_like(half), torch.arange(half.numel()) % 2):
        graph = part.planned(half, depths)
        model = distribute(network("sage"), graph)
        model(graph.x, graph.edge_index)  # fetches the rows to cache
        before = graph.ranks.received.copy()
        model(graph.x, graph.edge_index).sum().backward()
        moved = graph.ranks.received - before
        found.append((_words_of(graph, words), [moved["forward"], moved["backward"]]))
    return found


def test_words_of_a_timed_plan_equal_the_moved_words():
    for plan in zip(*distributed.run(plans_timed, 3)):
        assert sum(counted for counted, _ in plan) == sum(sum(moved) for _, moved in plan)


def test_costs_reproduce_the_times_of_steps():
    costs = Costs([6, 16, 16], [False, True, True], _UNIT)
    alone = Constants(edge=1e-12, vertex=1e-12, word=1.0, exchange=0.5)
    timed = costs.timed(StepTimes(vertex=3e-4, edge=2e-5, word=7e-8, kept=0.1), alone)
    assert timed.constants.kept == 0.1
    assert (timed.vertex, timed.edge) == pytest.approx((3e-4, 2e-5)) and timed.fetch(1) == pytest.approx(2 * 16 * 7e-8)
    noise = costs.timed(StepTimes(vertex=-1.0, edge=-1.0, word=-1.0, kept=-1.0), alone)
    assert noise.constants == Constants(edge=1e-12, vertex=1e-12, word=0.0, exchange=0.5)


def timed(rank: int, name: str) -> tuple[list[float], bool]:
    part = local(data_of())
    model = distribute(network(name), part)
    model.train()
    train(model, part, 1)
    before = copy.deepcopy([(each, each.grad) for each in model.parameters()]), copy.deepcopy(model.state_dict())
    counted = dict(part.ranks.received)
    plan = plan_for(model, kind="hybrid")
    assert all(torch.equal(a, b) and torch.equal(a.grad, g) for a, (b, g) in zip(model.parameters(), before[0]))
    assert all(torch.equal(value, before[1][key]) for key, value in model.state_dict().items())
    assert {kind for kind, words in part.ranks.received.items() if words != counted.get(kind)} <= {
        "forward",
        "calibration",
        "cached",
        "model",
    }
    constants = plan.problem.costs.constants
    return [constants.edge, constants.vertex, constants.word], all(each.training for each in model.modules())


@pytest.mark.parametrize("name", ["sage", "gat"])
def test_planning_by_measured_steps_leaves_the_model_unchanged(name):
    found = distributed.run(timed, 3, name)
    assert found[0] == found[1] == found[2], "all ranks plan with the same constants"
    assert found[0][1] and min(found[0][0]) >= 0 and min(found[0][0][:2]) > 0


def with_kept_edges(rank: int) -> tuple[list[float], list[float]]:
    model = pyg.GCN(6, 16, 2, 7, cached=True).double()
    model(data_of().x, data_of().edge_index)
    part = local(data_of())
    curves = []
    for graph in (part, part.planned(part.outer, torch.ones_like(part.outer))):
        torch.manual_seed(0)
        model.reset_parameters()
        model.convs[0]._cached_edge_index = (part.edge_index[:, :3], None)
        curves.append(train(distribute(model, graph), graph, 2))
        assert model.convs[0].cached and model.convs[0]._cached_edge_index[0].size(1) == 3
    return curves[0], curves[1]


def test_values_that_a_layer_caches_from_another_graph_are_kept():
    torch.manual_seed(0)
    alone = pyg.GCN(6, 16, 2, 7).double()
    torch.manual_seed(0)
    alone.reset_parameters()
    expected = train_alone(alone, data_of(), 2)
    for curves in distributed.run(with_kept_edges, 2):
        assert curves == (pytest.approx(expected, abs=1e-9),) * 2


def taken_of(rank: int, slow: list[str], budget: float | None) -> tuple[str, float]:
    """Returns the plan that is taken if steps under some plans are slow."""
    part = local(data_of())
    model = distribute(network("sage"), part)

    def step(candidate: DistributedModel, arguments: Any) -> float:
        inner = candidate.graph.inner.numel()
        most = max(numbers[0] for numbers in part.ranks.comm.gather_numbers([inner]))
        cached = candidate.graph.inner.sort().values.equal(part.outer) and not candidate.graph.depths.any()
        return 2.0 if ("fetch" if most == 0 else "cache" if cached else "other") in slow else 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_step", step)
        plan = plan_for(model, budget=budget)
    named = {name: plan.problem.pure(name) for name in ("fetch", "cache")}
    found = [name for name, depths in named.items() if torch.equal(plan.depths, depths)]
    return found[0] if found else "other", float(plan.problem.memory(plan.depths))


@pytest.mark.parametrize(
    ("slow", "budget", "expected"),
    [(["fetch"], None, "cache"), (["cache", "other"], None, "fetch"), (["fetch"], 0.0, "fetch")],
)
def test_the_plan_with_the_fastest_steps_is_taken_on_all_ranks(slow, budget, expected):
    for kind, memory in distributed.run(taken_of, 3, slow, budget):
        assert kind == expected and (budget is None or memory <= budget)


# --- the planner --------------------------------------------------------------------------------------------


def problem_of(graph: Graph, number: int, costs: Costs) -> Problem:
    """Makes the problem of a rank with the first ``number`` vertices of a graph."""
    lists = TargetLists.of_graph(graph, {})
    sources = lists.into(torch.arange(number)).source
    return Problem.of(range(number), sources[sources >= number].unique(), lists.into, costs)


def small_problem(seed: int, remote: int, hops: int) -> Problem:
    """Makes a problem with few vertices of other ranks, and constants under which each plan may win."""
    draw = torch.Generator().manual_seed(seed)
    number = remote + 4
    edges = int(torch.randint(2 * number, 4 * number, (), generator=draw))
    graph = Graph.from_edge_index(torch.randint(number, (2, edges), generator=draw), number)
    scale = lambda low, high: float(10 ** (low + (high - low) * torch.rand((), generator=draw)))  # noqa: E731
    constants = Constants(
        scale(-10, -8.5), scale(-11, -9), scale(-9, -7.5), exchange=0.0, kept=seed % 2 * scale(-9, -6)
    )
    widths = torch.randint(1, 9, (hops,), generator=draw).tolist()
    return problem_of(graph, 4, Costs(widths, [False] + [True] * (hops - 1), constants))


def every_plan(problem: Problem) -> torch.Tensor:
    choices = torch.arange(-1, problem.costs.num_hops)
    return torch.cartesian_prod(*[choices] * problem.candidates.numel()).view(-1, problem.candidates.numel())


@pytest.mark.parametrize(
    ("seed", "remote", "hops"),
    [*itertools.product(range(12), [6], [2, 3]), *((seed, 12, 2) for seed in range(3)), *((s, 8, 3) for s in range(4))],
)
def test_no_other_plan_costs_less(seed, remote, hops):
    problem = small_problem(seed, remote, hops)
    least = min(float(problem.seconds(some).min()) for some in every_plan(problem).split(50_000))
    found = float(problem.seconds(problem.solve()))
    assert found == pytest.approx(least, rel=1e-9), seed
    greedy = float(problem.seconds(problem._greedy()))
    fetched = float(problem.seconds(problem.pure("fetch")))
    assert least * (1 - 1e-9) <= greedy <= (fetched + problem.costs.constants.kept) * (1 + 1e-9)


def of_some(problem: Problem, vertices: range) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Describes every choice for some candidates.

    Returns, for each choice, the seconds to keep its rows. Also returns two bit sets for each hop: the rows that the choice needs, and the rows that
    it keeps here.
    """
    costs, hops = problem.costs, problem.costs.num_hops
    depths = np.array([*itertools.product(range(-1, hops), repeat=len(vertices))])
    seconds = np.zeros(len(depths))
    needed, here = ([np.zeros(len(depths), np.int64) for _ in range(hops)] for _ in range(2))
    for place, v in enumerate(vertices):
        depth = depths[:, place]
        seconds += (depth >= 0) * costs.vertex + (depth > 0) * int(problem.in_degree[v]) * costs.edge
        sources = sum(1 << u for u in problem.sources[problem.targets == v].tolist())
        for hop in range(hops):
            needed[hop] |= (depth > hop) * sources
            here[hop] |= (depth >= hop) * (1 << v)
    return seconds, needed, here


def least_of_all(problem: Problem) -> float:
    """Returns the seconds of the best plan, by trying every plan."""
    number, costs = problem.candidates.numel(), problem.costs
    (seconds, needed, here), others = (
        of_some(problem, span) for span in (range(number // 2), range(number // 2, number))
    )
    named = sum(1 << v for v in problem.is_named.nonzero().flatten().tolist())
    ones = np.array([bits.bit_count() for bits in range(1 << number)])
    least = float("inf")
    for at in range(len(seconds)):
        total = seconds[at] + others[0]
        for hop in range(costs.num_hops):
            fetched = (named | needed[hop][at] | others[1][hop]) & ~(here[hop][at] | others[2][hop])
            total = total + ones[fetched] * costs.fetch(hop)
        keeps_any = (at > 0) | (np.arange(len(others[0])) > 0)  # the first choice of each half fetches everything
        least = min(least, float((total + keeps_any * costs.constants.kept).min()))
    return least


@pytest.mark.parametrize("seed", [0, 3, 7, 11])
def test_no_plan_of_twelve_vertices_and_three_hops_costs_less(seed):
    small = small_problem(seed, 6, 3)
    assert least_of_all(small) == pytest.approx(float(small.seconds(every_plan(small)).min()), rel=1e-9)
    problem = small_problem(seed, 12, 3)
    assert problem.candidates.numel() == 12
    assert float(problem.seconds(problem.solve())) == pytest.approx(least_of_all(problem), rel=1e-9), seed


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_keeps_its_budget_and_is_no_worse_than_pure_plans(seed):
    problem = small_problem(seed, 12, 3)
    for share in (0.0, 0.3, 0.7):
        budget = share * float(problem.memory(problem.pure("recompute")))
        plan = problem.solve(budget)
        assert float(problem.memory(plan)) <= budget
        for kind in ("fetch", "cache", "recompute"):
            pure = problem.pure(kind)
            if float(problem.memory(pure)) <= budget:
                assert float(problem.seconds(plan)) <= float(problem.seconds(pure)) * (1 + 1e-12)


def test_a_row_that_two_recomputed_vertices_need_is_paid_once():
    # Edges 0 <- 1, 0 <- 2, 1 <- 3, 2 <- 3: recomputing 1 and 2 needs the row of 3 once.
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3, 3], [0, 0, 1, 2]]), 4)
    problem = problem_of(graph, 1, Costs([5, 7], [False, True], Constants(0.0, 0.0, 1.0, 0.0)))
    seconds = lambda *depths: float(problem.seconds(torch.tensor(depths)))  # noqa: E731
    assert seconds(-1, -1, -1) == 2 * 5 + 2 * 14
    assert seconds(0, 0, -1) == 2 * 14
    assert seconds(1, 0, -1) == 14 + 5
    assert seconds(1, 1, -1) == 5
    assert seconds(1, 1, 0) == 0


def test_larger_plans_are_greedy_and_no_worse_than_the_pure_ones():
    data = data_of(4000)
    graph = Graph.from_edge_index(data.edge_index, 4000)
    problem = problem_of(graph, 700, Costs([16, 64, 64], [False, True, True], CONSTANTS))
    assert problem.candidates.numel() * 3 > 4000
    seconds = float(problem.seconds(problem.solve()))
    assert all(seconds <= float(problem.seconds(problem.pure(kind))) for kind in ("fetch", "cache", "recompute"))


def test_wrong_plans_are_refused():
    part = local(data_of())
    model = distribute(network("sage"), part)
    with pytest.raises(ValueError, match="kind must be 'hybrid', 'fetch', 'cache' or 'recompute', got 'all'"):
        plan_for(model, kind="all")
    with pytest.raises(ValueError, match="inner must be ids of vertices of other ranks, without repetition"):
        part.planned(torch.tensor([3]), torch.tensor([0]))
    flat = distribute(pyg.GCN(6, 8, 2, 7).double(), part, layout="1d")
    with pytest.raises(ValueError, match="needs a model with layout='halo' and without a plan"):
        plan_for(flat)


def with_other_rows(rank: int) -> str:
    part = local(data_of(), timeout=distributed.NEVER)
    graph = plan_for(distribute(network("sage"), part), kind="cache", constants=CONSTANTS).apply()
    try:
        distribute(network("sage"), graph)(graph.x.clone(), graph.edge_index)
    except ValueError as error:
        return str(error)
    return "none"


def test_a_plan_needs_the_rows_that_it_caches():
    for said in distributed.run(with_other_rows, 2):
        assert "must be model.graph.x itself, whose rows do not change" in said
