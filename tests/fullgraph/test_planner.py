"""Laws of plans: with any rows cached, recomputed or summed, results equal those of one process, words are as predicted, and no plan is cheaper."""

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
from rare import rare
from torch_geometric.utils import degree

from salientpp.fullgraph import Constants, distribute, local, loss_mean, plan_for, planner
from salientpp.fullgraph import problem as problems
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.planner import _UNIT
from salientpp.fullgraph.problem import Costs, Decision, Problem
from salientpp.fullgraph.trial import _words_of, times_of, without_halo
from salientpp.graph.csc import Graph
from salientpp.store.target_lists import TargetLists

CONSTANTS = Constants(edge=1e-9, vertex=1e-10, word=1e-8)
KINDS = ["fetch", "cache", "recompute", "sum", "cut"]


def random_plan(part: LocalGraph, has_sums: bool) -> LocalGraph:
    """Returns the part with random vertices kept at random depths, and with random rows summed."""
    draw = torch.Generator().manual_seed(part.ranks.rank)
    begin, end = part.offsets[part.ranks.rank : part.ranks.rank + 2]
    others = torch.cat([torch.arange(begin), torch.arange(end, part.num_vertices)])
    inner = others[torch.rand(others.numel(), generator=draw) < 0.4]
    some = lambda: part.outer[torch.rand(part.outer.numel(), generator=draw) < 0.5]  # noqa: E731
    rows = [some(), some(), some()] if has_sums else None
    return part.planned(inner, torch.randint(3, inner.shape, generator=draw), rows)


def planned_curves(rank: int, name: str, kinds: list[str]) -> dict[str, Any]:
    part = local(data_of(), offsets=[0, 0, 37, 120] if name != "gat" else [0, 11, 70, 120])
    found: dict[str, Any] = {}
    for kind in kinds:
        if kind.startswith("random"):
            graph = random_plan(part, kind == "random sums" and name != "gat")
            model = distribute(network(name), graph)
        else:
            plan = plan_for(network(name), part, kind=kind, constants=CONSTANTS)
            model = distribute(network(name), part, plan)
        assert not (name == "gat" and any(hop.has_sums for hop in model.graph.hops))
        found[kind] = train(model, part, 2), [hop.has_sums for hop in model.graph.hops]
    return found


EVERY = [*KINDS, "random rows", "random sums"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("sage", EVERY), ("gat", ["recompute", "cut", "random rows"]), *rare(("gat", EVERY), ("gcn", EVERY))],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} kinds",
)
def test_any_plan_gives_the_losses_of_one_process(name, kinds):
    expected = train_alone(network(name), data_of(), 2)
    for found in distributed.run(planned_curves, 3, name, kinds):
        for kind, (losses, has_sums) in found.items():
            assert losses == pytest.approx(expected, abs=1e-9), kind
            assert any(has_sums) == (name != "gat" and kind in ("sum", "cut", "random sums")), kind


#: Constants under which the cut for ``data_of()`` has rows and sums, and cached and recomputed vertices.
MIXED = Constants(edge=1e-9, vertex=3e-11, word=3e-9)


class Net(torch.nn.Module):
    """Two products, a layer with attention between them, and rows of every layer in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = pyg.SAGEConv(6, 8), pyg.GraphConv(8, 5)
        self.middle = pyg.GATConv(8, 8)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor) -> Any:
        one = self.first(x, edge_index).relu()
        two = self.middle(one, edge_index).tanh()
        return {"out": self.last(two, edge_index, edge_weight), "one": one}


def gradients(model: Any, x: torch.Tensor, edge_index: torch.Tensor, weight: torch.Tensor) -> Any:
    found = model(x, edge_index, weight)
    (found["out"].sin().sum() + found["one"].square().sum()).backward()
    plain = getattr(model, "module", model)
    return found["out"].detach(), [each.grad for each in plain.parameters()]


def mixed(rank: int) -> tuple[dict[str, float], list[bool], float]:
    data = data_of()
    part, net = local(data), Net().double()
    plan = plan_for(net, part, part.x, part.edge_index, part.edge_weight, constants=MIXED)
    out, found = gradients(distribute(net, part, plan), part.x, part.edge_index, part.edge_weight)
    alone, expected = gradients(Net().double(), data.x, data.edge_index, data.edge_weight)
    begin, end = part.offsets[rank : rank + 2]
    off = [float((a - b).abs().max()) for a, b in zip([out, *found], [alone[begin:end], *expected], strict=True)]
    return plan.summary(), [hop.has_sums for hop in plan.graph.hops], max(off)


def test_a_plan_of_rows_sums_cached_and_recomputed_vertices_gives_the_gradients_of_one_process():
    found = distributed.run(mixed, 3)
    for option in ("rows", "sums", "cached vertices", "recomputed vertices"):
        assert max(summary[option] for summary, _, _ in found) > 0, option
    for _, has_sums, off in found:
        assert not has_sums[1], "a layer with attention gets no sums"
        assert off < 1e-10


class Degrees(Net):
    """The same model, whose input rows depend on the numbers of edges."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor) -> Any:
        x = x + 0.1 * degree(edge_index[1], x.size(0), x.dtype)[:, None]
        return super().forward(x, edge_index, edge_weight)


def with_degrees(rank: int, kinds: list[str], recompute: str | None) -> dict[str, float]:
    data, worst = data_of(), {}
    part = local(data, offsets=[0, 11, 70, 120])
    alone, expected = gradients(Degrees().double(), data.x, data.edge_index, data.edge_weight)
    begin, end = part.offsets[rank : rank + 2]
    for kind in kinds:
        net = Degrees().double()
        plan = plan_for(net, part, part.x, part.edge_index, part.edge_weight, kind=kind, constants=MIXED)
        model = distribute(net, part, plan, recompute=recompute)
        out, found = gradients(model, part.x, part.edge_index, part.edge_weight)
        pairs = zip([out, *found], [alone[begin:end], *expected], strict=True)
        worst[kind] = max(float((a - b).abs().max()) for a, b in pairs)
    return worst


@pytest.mark.parametrize(("kinds", "recompute"), [(KINDS, None), (["cache"], "layers")], ids=["plans", "recompute"])
def test_vertices_that_a_plan_keeps_without_their_edges_get_no_wrong_degrees(kinds, recompute):
    for found in distributed.run(with_degrees, 3, kinds, recompute):
        assert max(found.values()) < 1e-10, found


def counted(rank: int, name: str) -> list[tuple[dict[str, float], int, int]]:
    part, found = local(data_of()), []
    for kind in KINDS:
        plan = plan_for(network(name), part, kind=kind, constants=MIXED)
        model = distribute(network(name), part, plan)
        model(part.x, part.edge_index)  # fetches the rows to cache
        part.ranks.received.clear()
        out = model(part.x, part.edge_index)
        loss_mean(F.cross_entropy(out, part.y, reduction="none"), part).backward()
        found.append((plan.summary(), part.ranks.received["forward"], part.ranks.received["backward"]))
    return found


@pytest.mark.parametrize(("size", "name"), [(3, "gcn"), (2, "gat"), *rare((3, "sage"), (3, "gat"))])
def test_words_are_as_the_plan_predicts(size, name):
    per_rank = distributed.run(counted, size, name)
    for of_kind in zip(*per_rank):
        for summary, forward, _ in of_kind:
            assert summary["words"] == forward
        # A gradient travels to the rank that the row came from.
        gone = sum(summary["words with gradients"] - summary["words"] for summary, _, _ in of_kind)
        assert gone == sum(backward for _, _, backward in of_kind)
    fetch, cache, recompute, sums, cut = (summary for summary, _, _ in per_rank[0])
    assert fetch["memory"] == 0 < cache["memory"] < recompute["memory"]
    assert recompute["rows"] == 0 < fetch["rows"] and (sums["rows"] == 0) == (name != "gat")
    assert all(cut["seconds"] <= each["seconds"] for each in (fetch, cache, recompute, sums))


# --- times of steps -----------------------------------------------------------------------------------------


def without_others(rank: int) -> bool:
    part = local(data_of(), offsets=[0, 0, 37, 120])
    x, weight, edge_index = part.x, part.edge_weight, part.edge_index
    alone = without_halo(part)
    given = [*map(alone.in_plan, (x, edge_index, weight, 3))]
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
    costs = Costs(widths, [False, True], [False, False], _UNIT).timed(times, Constants(0.0, 0.0, 1.0))
    saved = 1000 * (costs.fetch(0) - costs.vertex) - costs.constants.kept
    assert saved == pytest.approx(steps[0] - steps[2])


def plans_timed(rank: int) -> list[tuple[int, list[int]]]:
    """Returns the words that ``step_times`` counts for each plan, and the words that a step under it moves."""
    found: list[tuple[int, list[int]]] = []
    part = local(data_of())
    base = distribute(network("sage"), part)
    base(part.x, part.edge_index)
    words = [width * (2 if backward else 1) for width, backward, _ in base.seen]
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
    for plan in zip(*distributed.run(plans_timed, 2)):
        assert sum(counted for counted, _ in plan) == sum(sum(moved) for _, moved in plan)


def test_costs_reproduce_the_times_of_steps():
    costs = Costs([6, 16, 16], [False, True, True], [True, False, True], _UNIT)
    alone = Constants(edge=1e-12, vertex=1e-12, word=1.0)
    timed = costs.timed(Constants(vertex=3e-4, edge=2e-5, word=7e-8, kept=0.1), alone)
    assert timed.constants.kept == 0.1
    assert (timed.vertex, timed.edge(1)) == pytest.approx((3e-4, 2e-5)) and timed.fetch(1) == pytest.approx(
        2 * 16 * 7e-8
    )
    assert timed.sum(1) == pytest.approx(timed.fetch(1) + 2 * 16 * timed.constants.edge)
    # The layer of hop 1 is no product and adds up all edges at once. A product adds them up if they are needed.
    assert (timed.edge(2), timed.edge(3)) == pytest.approx((0.0, 2 * 16 * timed.constants.edge))
    noise = costs.timed(Constants(vertex=-1.0, edge=-1.0, word=-1.0, kept=-1.0), alone)
    assert noise.constants == Constants(edge=1e-12, vertex=1e-12, word=0.0)


def timed(rank: int, name: str) -> tuple[list[float], bool, float]:
    part = local(data_of())
    model = distribute(network(name), part)
    model.train()
    train(model, part, 1)
    before = copy.deepcopy([(each, each.grad) for each in model.parameters()]), copy.deepcopy(model.state_dict())
    counted, state = dict(part.ranks.received), torch.get_rng_state()
    expected = model(part.x, part.edge_index).detach()
    state_dict = copy.deepcopy(model.state_dict())  # batch norms count the call
    plan = plan_for(model.module, part)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and torch.equal(a.grad, g) for a, (b, g) in zip(model.parameters(), before[0]))
    assert all(torch.equal(value, state_dict[key]) for key, value in model.state_dict().items())
    assert {kind for kind, words in part.ranks.received.items() if words != counted.get(kind)} <= {
        "forward",
        "calibration",
        "cached",
        "columns",
        "nonzeros",
        "ids of nonzeros",
        "model",
        "normalisation",
        "reduce",
        "sums",
    }
    assert all(each.training for each in model.modules())
    found = distribute(model.module, part, plan)(part.x, part.edge_index).detach()
    constants = plan.problem.costs.constants
    return [constants.edge, constants.vertex, constants.word], plan.name, float((found - expected).abs().max())


@pytest.mark.parametrize(("size", "name"), [(2, "sage"), *rare((3, "sage"), (3, "gat"))])
def test_planning_by_measured_steps_leaves_the_model_unchanged(size, name):
    found = distributed.run(timed, size, name)
    for each in found:
        assert each[:2] == found[0][:2], "all ranks plan with the same constants, and take the same plan"
    assert min(found[0][0]) >= 0 and min(found[0][0][:2]) > 0
    assert max(off for *_, off in found) < 1e-10


class Counting(torch.nn.Module):
    """A model whose forward changes a parameter, a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(6, 7).double()
        self.scale = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(7, dtype=torch.float64))
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        with torch.no_grad():
            self.scale.add_(0.1)
            self.mean = self.mean + 1
        return self.conv(x, edge_index) * self.scale + self.mean


def test_planning_undoes_what_a_forward_changes():
    model, part = Counting(), local(data_of())
    plan_for(model, part, constants=CONSTANTS)
    assert model.scale.tolist() == [1.0] * 7 and model.mean.tolist() == [0.0] * 7 and model.calls == []
    assert all(each.training for each in model.modules())


class CountingSparsely(Counting):
    """A model whose forward also changes a sparse buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(7, dtype=torch.float64).to_sparse(layout=layout))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        self.matrix.mul_(2)
        return super().forward(x, edge_index) @ self.matrix.to_dense()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_planning_restores_a_sparse_buffer(layout):
    model, part = CountingSparsely(layout), local(data_of())
    plan_for(model, part, constants=CONSTANTS)
    assert torch.equal(model.matrix.to_dense(), torch.eye(7, dtype=torch.float64))


class Writing(torch.nn.Module):
    """Model that writes to its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(6, 7).double()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mul_(2), edge_index)


class WritingMore(Writing):
    """Model that writes to a further argument, which is a dictionary."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        more["bias"].add_(1)
        return self.conv(x, edge_index) + more["bias"]


def test_a_model_that_writes_to_its_arguments_is_not_planned():
    part, more = local(data_of()), {"bias": torch.zeros(7, dtype=torch.float64)}
    for model, arguments in ((Writing(), ()), (WritingMore(), (part.x, part.edge_index, more))):
        with pytest.raises(ValueError, match=r"writes to its arguments in place, so plan_for, .* open the part again"):
            plan_for(model, part, *arguments, constants=CONSTANTS)


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


def within(rank: int, memory: int | None) -> tuple[str, float, float]:
    part, data = local(data_of()), data_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "step_times", lambda *_: Constants(edge=1e-8, vertex=1e-6, word=1e-7))
        plan = plan_for(network("sage"), part, memory=memory)
        model = distribute(network("sage"), part, plan if memory == 0 else "auto").eval()
    begin, end = part.offsets[rank : rank + 2]
    expected = network("sage").eval()(data.x, data.edge_index)[begin:end]
    off = float((model(part.x, part.edge_index) - expected).detach().abs().max())
    return plan.name, plan.summary()["memory"], off


@pytest.mark.parametrize("memory", [None, 0])
def test_a_plan_is_the_minimum_cut_within_the_memory(memory):
    for name, taken, off in distributed.run(within, 3, memory):
        assert name == "cut" and off < 1e-10
        assert taken <= memory if memory is not None else taken > 0


# --- the planner --------------------------------------------------------------------------------------------


def problem_of(graph: Graph, offsets: list[int], costs: Costs) -> Problem:
    """Makes the problem of the first rank."""
    lists = TargetLists.of_graph(graph, {})
    edges = lists.into(torch.arange(offsets[1]))
    is_far = edges.source >= offsets[1]
    return Problem.of(offsets, 0, (edges.source[is_far], edges.target[is_far]), lists.into, costs)


def small_problem(seed: int, remote: int, hops: int, own: int = 4, products: bool = False) -> Problem:
    """Makes a problem with few vertices of other ranks, and constants under which each plan may win. ``products``: at most hops, sums may travel."""
    draw = torch.Generator().manual_seed(seed)
    number = remote + own
    edges = int(torch.randint(2 * number, 4 * number, (), generator=draw))
    graph = Graph.from_edge_index(torch.randint(number, (2, edges), generator=draw), number)
    scale = lambda low, high: float(10 ** (low + (high - low) * torch.rand((), generator=draw)))  # noqa: E731
    constants = Constants(scale(-10, -8.5), scale(-11, -9), scale(-9, -7.5), kept=seed % 2 * scale(-9, -6))
    widths = torch.randint(1, 9, (hops,), generator=draw).tolist()
    may_sum = [products and (seed + hop) % 4 > 0 for hop in range(hops)]
    costs = Costs(widths, [False] + [True] * (hops - 1), may_sum, constants)
    return problem_of(graph, [0, own, own + remote // 2, number], costs)


def without_sums(problem: Problem, depths: torch.Tensor) -> Decision:
    none = torch.zeros((*depths.shape[:-1], problem.costs.num_hops, problem.num_groups), dtype=torch.bool)
    return Decision(depths, none)


def every_plan(problem: Problem) -> torch.Tensor:
    choices = torch.arange(-1, problem.costs.num_hops)
    return torch.cartesian_prod(*[choices] * problem.candidates.numel()).view(-1, problem.candidates.numel())


@pytest.mark.parametrize(
    ("seed", "remote", "hops"),
    [*itertools.product(range(12), [6], [2, 3]), *((seed, 12, 2) for seed in range(3)), *((s, 8, 3) for s in range(4))],
)
def test_no_other_plan_costs_less(seed, remote, hops):
    problem = small_problem(seed, remote, hops)
    parts = every_plan(problem).split(50_000)
    least = min(float(problem.seconds(without_sums(problem, some)).min()) for some in parts)
    found = problem.solve()
    assert not bool(found.summed.any())
    assert float(problem.seconds(found)) == pytest.approx(least, rel=1e-9), seed


def least_with_sums(problem: Problem) -> float:
    """Returns the seconds of the best plan, by trying every depth of every candidate and every set of sums."""
    costs, hops = problem.costs, problem.costs.num_hops
    named, pairs, degrees = problem.named.t().tolist(), problem.pairs.t().tolist(), problem.in_degree.tolist()
    groups = range(problem.num_groups)
    subsets = [set(each) for size in range(len(groups) + 1) for each in itertools.combinations(groups, size)]
    least = float("inf")
    for depths in itertools.product(range(-1, hops), repeat=problem.candidates.numel()):
        kept = sum(depth >= 0 for depth in depths)
        total = kept * costs.vertex + (kept > 0) * costs.constants.kept
        total += sum(degrees[v] * costs.edge(d) for v, depth in enumerate(depths) for d in range(1, depth + 1))
        for hop in range(hops):
            recomputed = {u for u, v in pairs if depths[v] > hop}
            best = float("inf")
            for summed in subsets if costs.products[hop] else [set()]:
                rows = {u for u, g in named if g not in summed} | recomputed
                rows = {u for u in rows if depths[u] < hop}
                sent = {g for u, g in named if depths[u] < hop and u not in rows}
                best = min(best, len(rows) * costs.fetch(hop) + len(sent) * costs.sum(hop))
            total += best
        least = min(least, total)
    return least


@pytest.mark.parametrize("seed", range(16))
def test_no_other_plan_with_sums_costs_less(seed):
    problem = small_problem(seed, 5, 2 + seed % 2, own=2, products=True)
    assert float(problem.seconds(problem.solve())) == pytest.approx(least_with_sums(problem), rel=1e-9), seed
    # Of the pure plans, none costs less, and the cheapest sums for given depths cost no more than fetching.
    for kind in ("fetch", "cache", "recompute", "sum"):
        pure = problem.pure(kind)
        given = problem.cut(depths=pure.depths)
        assert torch.equal(given.depths, pure.depths)
        assert float(problem.seconds(given)) <= float(problem.seconds(pure)) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_without_recomputation_two_hops_decide_for_all(seed):
    problem = small_problem(seed + 100, 30, 4, own=12, products=True)
    costs = Costs([8, 5, 5, 5], [False, True, True, True], [True] * 4, problem.costs.constants)
    none = torch.zeros_like(problem.in_degree)
    flat = Problem(costs, problem.candidates, problem.named, problem.num_groups, problem.pairs[:, :0], none, False)
    choice = flat.cut()
    assert flat.num_levels == 2 and torch.equal(choice.summed[1], choice.summed[3])
    # If hops are decided one by one, the costs are the same.
    every = Problem(
        costs, problem.candidates, problem.named, problem.num_groups, problem.pairs[:, :0], none + 10**9, True
    )
    assert every.num_levels == 4
    assert float(flat.seconds(choice)) == pytest.approx(float(every.seconds(every.cut())), rel=1e-9)


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
        seconds += (depth >= 0) * costs.vertex + (depth > 0) * int(problem.in_degree[v]) * costs.edge(1)
        sources = sum(1 << u for u in problem.pairs[0][problem.pairs[1] == v].tolist())
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
    named = sum(1 << v for v in problem.named[0].unique().tolist())
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
    of_all = float(small.seconds(without_sums(small, every_plan(small))).min())
    assert least_of_all(small) == pytest.approx(of_all, rel=1e-9)
    problem = small_problem(seed, 12, 3)
    assert problem.candidates.numel() == 12
    assert float(problem.seconds(problem.solve())) == pytest.approx(least_of_all(problem), rel=1e-9), seed


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_keeps_its_budget_and_is_no_worse_than_pure_plans(seed):
    problem = small_problem(seed, 12, 3, products=seed > 3)
    for share in (0.0, 0.3, 0.7):
        budget = share * float(problem.memory(problem.pure("recompute").depths))
        plan = problem.solve(budget)
        assert float(problem.memory(plan.depths)) <= budget
        for kind in ("fetch", "cache", "recompute", "sum"):
            pure = problem.pure(kind)
            if float(problem.memory(pure.depths)) <= budget:
                assert float(problem.seconds(plan)) <= float(problem.seconds(pure)) * (1 + 1e-12)


def test_half_of_equal_vertices_are_cached_with_half_of_the_memory():
    # Twenty vertices of another rank have one edge each to the same vertex. They enter the plan at the same price.
    graph = Graph.from_edge_index(torch.stack([torch.arange(1, 21), torch.zeros(20, dtype=torch.int64)]), 21)
    costs = Costs([4], [False], [False], Constants(0.0, 0.0, 1.0))
    problem = problem_of(graph, [0, 1, 21], costs)
    plan = problem.solve(10 * costs.vertex_bytes + 3)
    assert int((plan.depths == 0).sum()) == 10 and float(problem.seconds(plan)) == 10 * 4


def test_a_row_that_two_recomputed_vertices_need_is_paid_once():
    # Edges 0 <- 1, 0 <- 2, 1 <- 3, 2 <- 3: recomputing 1 and 2 needs the row of 3 once.
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3, 3], [0, 0, 1, 2]]), 4)
    problem = problem_of(graph, [0, 1, 4], Costs([5, 7], [False, True], [True, True], Constants(0.0, 0.0, 1.0)))
    seconds = lambda *depths: float(problem.seconds(without_sums(problem, torch.tensor(depths))))  # noqa: E731
    assert seconds(-1, -1, -1) == 2 * 5 + 2 * 14
    assert seconds(0, 0, -1) == 2 * 14
    assert seconds(1, 0, -1) == 14 + 5
    assert seconds(1, 1, -1) == 5
    assert seconds(1, 1, 0) == 0
    # Both rows arrive in one sum at each hop, because both belong to the same rank.
    assert float(problem.seconds(problem.pure("sum"))) == 5 + 14
    one = Decision(torch.tensor([0, -1, -1]), torch.ones(2, 1, dtype=torch.bool))
    assert float(problem.seconds(one)) == 5 + 14, "a sum of one row counts as a sum"


def test_larger_problems_take_a_pure_plan(monkeypatch):
    data = data_of(4000)
    graph = Graph.from_edge_index(data.edge_index, 4000)
    costs = Costs([16, 64, 64], [False, True, True], [True] * 3, CONSTANTS)
    problem = problem_of(graph, [0, 700, 2000, 4000], costs)
    exact = float(problem.seconds(problem.solve()))
    monkeypatch.setattr(problems, "MOST_ARCS", problem.num_arcs - 1)
    seconds = float(problem.seconds(problem.solve()))
    pure = [float(problem.seconds(problem.pure(kind))) for kind in ("fetch", "cache", "recompute", "sum")]
    assert exact < seconds == min(pure)


def test_wrong_plans_are_refused():
    part = local(data_of())
    with pytest.raises(ValueError, match="kind must be one of 'cut', 'fetch', .*, got 'all'"):
        plan_for(network("sage"), part, kind="all")
    for memory in (0.5, "much", -1):
        with pytest.raises(ValueError, match='memory must be a number of bytes, text such as "1GiB", or None, got'):
            plan_for(network("sage"), part, memory=memory)
    with pytest.raises(ValueError, match="inner must be ids of vertices of other ranks, without repetition"):
        part.planned(torch.tensor([3]), torch.tensor([0]))
    plan = plan_for(network("sage"), part)
    with pytest.raises(ValueError, match="plan_for needs a part without a plan"):
        plan_for(network("sage"), plan.graph)
    with pytest.raises(ValueError, match="layout is a plan for another part"):
        distribute(network("sage"), local(data_of()), plan)
    with pytest.raises(ValueError, match="a plan for single vertices needs layout='halo', got '1d'"):
        distribute(network("gcn"), plan.graph, "1d")


def differing(rank: int, what: str) -> str:
    part = local(data_of(), timeout=distributed.NEVER)
    given = {
        "memory": {"memory": "1GiB" if rank else None},
        "kind": {"kind": "all" if rank else "cut"},
        "solver": {"constants": CONSTANTS},
    }
    with pytest.MonkeyPatch.context() as patch:
        if what == "solver" and rank:
            patch.setattr(Problem, "solve", lambda *_: 1 // 0)
        try:
            plan_for(network("sage"), part, **given[what])
        except Exception as error:
            return str(error)
    return "none"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("memory", "all ranks must call plan_for with the same memory, got None on rank 0 and '1GiB' on rank 1"),
        ("kind", "kind must be one of"),
        ("solver", "failed in plan_for: ZeroDivisionError"),
    ],
)
def test_no_rank_waits_for_one_that_plans_differently(what, said):
    found = distributed.run(differing, 2, what)
    assert said in found[0] and (said in found[1] or "integer division" in found[1])


def with_other_rows(rank: int) -> tuple[float, str]:
    data = data_of()
    part = local(data, timeout=distributed.NEVER)
    plan = plan_for(network("sage"), part, kind="recompute", constants=CONSTANTS)
    model = distribute(network("sage"), part, plan).eval()
    begin, end = part.offsets[rank : rank + 2]
    expected = network("sage").eval()(data.x * 2, data.edge_index)[begin:end]
    off = float((model(part.x * 2, part.edge_index) - expected).detach().abs().max())
    try:
        distribute(pyg.GCN(6, 8, 2).double(), part, plan)(part.x, part.edge_index, part.edge_weight * 2)
    except ValueError as error:
        return off, str(error)
    return off, "none"


def test_a_plan_takes_other_rows_of_vertices_but_needs_known_rows_of_edges():
    for off, said in distributed.run(with_other_rows, 2):
        assert off < 1e-10
        assert "pass an attribute of the part, or give this tensor to plan_for as an argument" in said


def with_other_weights(rank: int) -> tuple[float, int]:
    data = data_of()
    part = local(data)
    weight = part.edge_weight * 2
    plan = plan_for(network("gcn"), part, part.x, part.edge_index, weight, constants=MIXED)
    begin, end = part.offsets[rank : rank + 2]
    expected = network("gcn")(data.x, data.edge_index, data.edge_weight * 2)[begin:end]
    out = distribute(network("gcn"), part, plan)(part.x, part.edge_index, weight)
    return float((out - expected).detach().abs().max()), plan.summary()["recomputed vertices"]


def test_nothing_is_recomputed_if_rows_of_edges_are_unknown():
    for off, recomputed in distributed.run(with_other_weights, 2):
        assert off < 1e-10 and recomputed == 0
