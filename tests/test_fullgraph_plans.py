"""Laws of plans: whatever is cached or recomputed, results are those of one process, words are as predicted, and no plan is cheaper."""

from __future__ import annotations

import itertools
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from test_fullgraph import data_of, network, train, train_alone

from salientpp.fullgraph import Constants, distribute, local, loss_mean, plan_for
from salientpp.fullgraph.planner import Costs, Problem
from salientpp.graph.csc import Graph

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
        model(graph.x, graph.edge_index)  # which fetches what is cached
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
        # A gradient comes to the rank that the row came from.
        gone = sum(summary["words with gradients"] - summary["words"] for summary, _, _ in of_kind)
        assert gone == sum(backward for _, _, backward in of_kind)
    summaries = [summary for summary, _, _ in per_rank[0]]
    assert summaries[0]["memory"] == 0 < summaries[1]["memory"] < summaries[2]["memory"]
    assert summaries[2]["rows"] == 0
    assert all(summaries[3]["seconds"] <= each["seconds"] for each in summaries)


# --- the planner --------------------------------------------------------------------------------------------


def small_problem(seed: int, remote: int, hops: int) -> Problem:
    """Few vertices of others, and constants between which each plan may win."""
    draw = torch.Generator().manual_seed(seed)
    number = remote + 4
    edges = int(torch.randint(2 * number, 4 * number, (), generator=draw))
    graph = Graph.from_edge_index(torch.randint(number, (2, edges), generator=draw), number)
    scale = lambda low, high: float(10 ** (low + (high - low) * torch.rand((), generator=draw)))  # noqa: E731
    constants = Constants(edge=scale(-10, -8.5), vertex=scale(-11, -9), word=scale(-9, -7.5), exchange=0.0)
    widths = torch.randint(1, 9, (hops,), generator=draw).tolist()
    return Problem.of(graph, 0, 4, Costs(widths, [False] + [True] * (hops - 1), constants))


def every_plan(problem: Problem) -> torch.Tensor:
    choices = torch.arange(-1, problem.costs.num_hops)
    return torch.cartesian_prod(*[choices] * problem.candidates.numel()).view(-1, problem.candidates.numel())


@pytest.mark.parametrize(
    ("seed", "remote", "hops"),
    [*itertools.product(range(12), [6], [2, 3]), *((seed, 12, 2) for seed in range(3)), *((s, 8, 3) for s in range(4))],
)
def test_no_plan_of_all_costs_less(seed, remote, hops):
    problem = small_problem(seed, remote, hops)
    least = min(float(problem.seconds(some).min()) for some in every_plan(problem).split(50_000))
    found = float(problem.seconds(problem.solve()))
    assert found == pytest.approx(least, rel=1e-9), seed
    greedy = float(problem.seconds(problem._greedy(None)))
    assert least * (1 - 1e-9) <= greedy <= float(problem.seconds(problem.pure("fetch"))) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_keeps_to_its_budget_and_is_no_worse_than_the_pure_plans_that_do(seed):
    problem = small_problem(seed, 12, 3)
    for share in (0.0, 0.3, 0.7):
        budget = share * float(problem.memory(problem.pure("recompute")))
        plan = problem.solve(budget)
        assert float(problem.memory(plan)) <= budget
        for kind in ("fetch", "cache", "recompute"):
            pure = problem.pure(kind)
            if float(problem.memory(pure)) <= budget:
                assert float(problem.seconds(plan)) <= float(problem.seconds(pure)) * (1 + 1e-12)


def test_what_two_recomputed_vertices_share_is_paid_once():
    # 0 <- 1, 0 <- 2, 1 <- 3, 2 <- 3: to recompute 1 and 2 takes the row of 3 once.
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3, 3], [0, 0, 1, 2]]), 4)
    problem = Problem.of(graph, 0, 1, Costs([5, 7], [False, True], Constants(0.0, 0.0, 1.0, 0.0)))
    seconds = lambda *depths: float(problem.seconds(torch.tensor(depths)))  # noqa: E731
    assert seconds(-1, -1, -1) == 2 * 5 + 2 * 14
    assert seconds(0, 0, -1) == 2 * 14
    assert seconds(1, 0, -1) == 14 + 5
    assert seconds(1, 1, -1) == 5
    assert seconds(1, 1, 0) == 0


def test_larger_plans_are_greedy_and_no_worse_than_the_pure_ones():
    data = data_of(4000)
    graph = Graph.from_edge_index(data.edge_index, 4000)
    problem = Problem.of(graph, 0, 700, Costs([16, 64, 64], [False, True, True], CONSTANTS))
    assert problem.candidates.numel() * 3 > 4000
    seconds = float(problem.seconds(problem.solve()))
    assert all(seconds <= float(problem.seconds(problem.pure(kind))) for kind in ("fetch", "cache", "recompute"))


def test_wrong_plans_are_refused():
    part = local(data_of())
    model = distribute(network("sage"), part)
    with pytest.raises(ValueError, match="kind must be 'hybrid', 'fetch', 'cache' or 'recompute', got 'all'"):
        plan_for(model, kind="all")
    with pytest.raises(ValueError, match="inner must be ids of vertices of other ranks, each once"):
        part.planned(torch.tensor([3]), torch.tensor([0]))
    flat = distribute(pyg.GCN(6, 8, 2, 7).double(), part, layout="1d")
    with pytest.raises(ValueError, match="takes a model with layout='halo' and without a plan"):
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
