"""Laws of `salientpp.partitioning.refine`: rows never rise, loads stay within the limits, and costs equal their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graphs import random_data, random_hetero, real_data
from steps import Told
from torch import Tensor

import salientpp
from salientpp import Graph, inclusion_probability, ops
from salientpp.partitioning import options
from salientpp.partitioning.assign import assign_parts
from salientpp.partitioning.balance import loads_and_limits
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.refine import _Hops, refine_by_vip
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.given_splits import collect_splits
from salientpp.vip.accesses import count_accesses, shuffled_batches


def communities(seed: int, num_vertices: int = 600, num_edges: int = 4000) -> tuple[Graph, dict[str, Tensor]]:
    """Makes a directed graph with hubs, loops, repeated edges and communities of 50; the seeds are spread over all communities."""
    rng = np.random.default_rng(seed)
    print("seed", seed)
    source = (rng.random(num_edges) ** 2 * num_vertices).astype(np.int64)
    target = rng.integers(0, num_vertices, num_edges)
    inside = rng.random(num_edges) < 0.7
    target = np.where(inside, source - source % 50 + target % 50, target).clip(max=num_vertices - 1)
    ids = torch.from_numpy(rng.permutation(num_vertices))
    graph = Graph.from_edge_index(ids[torch.from_numpy(np.stack([source, target]))], num_vertices)
    order = torch.from_numpy(rng.permutation(num_vertices))
    return graph, {"train": order[:120], "val": order[120:160]}


def predicted_rows(
    graph: Graph, assignment: Tensor, num_parts: int, seeds: Tensor, fanouts: list[int], batch_size: int
) -> float:
    own = [seeds[assignment[seeds] == part] for part in range(num_parts)]
    vip = inclusion_probability(graph, own, fanouts, batch_size).double()
    batches = [max(1.0, ids.numel() / batch_size) if ids.numel() else 0.0 for ids in own]
    return sum(times * float(row[assignment != part].sum()) for part, (times, row) in enumerate(zip(batches, vip)))


def part_loads(assignment: Tensor, weights: Tensor, num_parts: int) -> Tensor:
    return torch.zeros(num_parts, weights.size(1), dtype=torch.int64).index_add_(0, assignment, weights)


@pytest.mark.parametrize("fanouts", [[4, 3], [-1], [3, 0, 2], [5, 3, 2]])
@pytest.mark.parametrize("num_parts, batch_size", [(2, 16), (5, 16), (9, 64)])
@pytest.mark.parametrize("method", ["random", "metis"])
def test_rows_never_rise_and_no_load_passes_its_limit(fanouts, num_parts, batch_size, method):
    graph, splits = communities(num_parts)
    options = dict(splits=splits, seeds=splits["train"], num_neighbors=fanouts, batch_size=batch_size)
    before = assign_for(graph, num_parts, PartitionOptions(method, "equal", refine=False), **options)
    after = assign_for(graph, num_parts, PartitionOptions(method, "equal", refine=True), **options)
    rows = [
        predicted_rows(graph, found.assignment, num_parts, splits["train"], fanouts, batch_size)
        for found in (before, after)
    ]
    assert rows[1] <= rows[0] * (1 + 1e-5)
    if method == "random":
        assert rows[1] < 0.95 * rows[0]
    weights, limits = loads_and_limits(graph, num_parts, splits, 0.05)
    was, now = (part_loads(found.assignment, weights, num_parts) for found in (before, after))
    assert bool((now <= torch.maximum(limits, was.amax(0))).all())
    assert bool((now[:, 0] > 0).all())
    again = assign_for(graph, num_parts, PartitionOptions(method, "equal", refine=True), **options)
    assert torch.equal(again.assignment, after.assignment)


def test_costs_of_vertices_outside_the_seeds_are_the_change_by_a_move():
    graph, splits = communities(1)
    seeds, fanouts, batch_size, num_parts = splits["train"], [4, 3, 2], 16, 6
    assignment = assign_parts(graph, num_parts, method="random", seed_sets=splits).assignment
    rows, cost = _Hops(graph, fanouts).costs(assignment, num_parts, seeds, batch_size)
    assert rows == pytest.approx(predicted_rows(graph, assignment, num_parts, seeds, fanouts, batch_size), rel=1e-5)
    others = torch.ones(graph.num_vertices, dtype=torch.bool).index_fill_(0, seeds, False).nonzero().flatten()
    for v in others[:40].tolist():
        to = (int(assignment[v]) + 1 + v % (num_parts - 1)) % num_parts
        moved = assignment.clone().index_fill_(0, torch.tensor([v]), to)
        change = predicted_rows(graph, moved, num_parts, seeds, fanouts, batch_size) - rows
        assert change == pytest.approx(float(cost[to, v] - cost[assignment[v], v]), abs=1e-2)


@pytest.mark.parametrize("fanouts", [[4, 3, 2], [-1, 2], [6]])
def test_the_cost_of_a_seed_is_the_derivative_of_the_rows(fanouts):
    """Compares with torch's automatic differentiation of the formula, in double precision and with a dense matrix."""
    graph, splits = communities(2, num_vertices=150, num_edges=900)
    seeds, batch_size, num_parts = splits["train"], 16, 5
    assignment = torch.arange(150) % num_parts
    _, cost = _Hops(graph, fanouts).costs(assignment, num_parts, seeds, batch_size)
    degree = graph.in_degree()
    lists = torch.zeros(150, 150, dtype=torch.float64)  # [u, v]: how often v lists u
    lists.index_put_(
        (graph.indices.long(), torch.repeat_interleave(torch.arange(150), degree)),
        torch.ones(graph.num_edges, dtype=torch.float64),
        accumulate=True,
    )
    for part in range(num_parts):
        own = seeds[assignment[seeds] == part]
        p_0 = torch.zeros(150, dtype=torch.float64)
        p_0[own] = min(1.0, batch_size / own.numel())
        p_0.requires_grad_()
        q, reached = p_0, p_0
        for fanout in fanouts:
            chance = (fanout / degree.clamp(min=1).double()).clamp(max=1) if fanout >= 0 else torch.ones(150).double()
            p = 1 - torch.exp(lists @ torch.log1p(-(chance * q).clamp(max=1 - 1e-6)))
            q = p * (1 - reached)
            reached = reached + q
        included = reached - p_0
        rows = included[assignment != part].sum()
        (gradient,) = torch.autograd.grad(rows, p_0)
        times = max(1.0, own.numel() / batch_size)
        want = gradient[seeds] - times * included[seeds]
        if own.numel() >= batch_size:
            want = want + rows / batch_size - gradient[own].mean()
        torch.testing.assert_close(cost[part][seeds].double(), want.detach(), rtol=1e-3, atol=2e-3)


def test_a_full_part_takes_a_vertex_only_in_exchange():
    # Vertices 0 and 1 are in part 0, 2 and 3 in part 1. Vertex 0 gains by a move, 3 costs least in exchange, and each part has room for two.
    cost = torch.tensor([[5.0, 0.0, 9.0, 1.0], [0.0, 9.0, 0.0, 0.0]])
    one = torch.ones(4, 1, dtype=torch.int64)
    start = torch.tensor([0, 0, 1, 1])
    assert ops.reassign_parts(cost, start, one, torch.tensor([2]), 4).tolist() == [1, 0, 1, 0]
    assert ops.reassign_parts(cost, start, one, torch.tensor([3]), 4).tolist() == [1, 0, 1, 1]
    assert ops.reassign_parts(cost, start, one, torch.tensor([3]), 0).tolist() == start.tolist()
    dear = cost.clone()
    dear[0, 2:] = 6.0  # any exchange costs more than the move gains
    assert ops.reassign_parts(dear, start, one, torch.tensor([2]), 4).tolist() == start.tolist()


def test_swaps_keep_all_loads():
    rng = np.random.default_rng(3)
    start = torch.from_numpy(rng.integers(0, 4, 500))
    cost = torch.from_numpy(rng.random((4, 500), dtype=np.float32))
    weights = torch.from_numpy(np.stack([np.ones(500), rng.integers(0, 9, 500), rng.random(500) < 0.2], 1)).long()
    was = part_loads(start, weights, 4)
    moved = ops.reassign_parts(cost, start, weights, was.amax(0), 200)
    now = part_loads(moved, weights, 4)
    assert bool((now <= was.amax(0)).all())
    column = torch.arange(500)
    assert cost[moved, column].sum() < cost[start, column].sum() - 30
    assert 100 < int((moved != start).sum()) <= 201


@pytest.mark.parametrize("seeds", [None, torch.tensor([7])])
def test_all_kinds_of_seeds_are_accepted(seeds):
    graph, splits = communities(4)
    options = PartitionOptions("random", refine=True)
    found = assign_for(graph, 3, options, splits=splits, seeds=seeds, num_neighbors=[3, 2], batch_size=8)
    assert found.assignment.unique().tolist() == [0, 1, 2]
    ids = torch.arange(graph.num_vertices) if seeds is None else seeds
    plain = assign_parts(graph, 3, method="random", seed_sets=splits)
    assert predicted_rows(graph, found.assignment, 3, ids, [3, 2], 8) <= (1 + 1e-5) * predicted_rows(
        graph, plain.assignment, 3, ids, [3, 2], 8
    )


def test_a_single_part_is_not_changed():
    graph, splits = communities(5)
    weights, limits = loads_and_limits(graph, 1, splits, 0.05)
    start = torch.zeros(graph.num_vertices, dtype=torch.int64)
    options = dict(seeds=splits["train"], num_neighbors=[3], batch_size=8, weights=weights, limits=limits)
    assert torch.equal(refine_by_vip(graph, start, 1, **options), start)


def partition(data, num_parts, root, **options) -> tuple[salientpp.PartitionedGraph, str]:
    """Partitions; returns the directory, and the title of the step that assigns vertices."""
    steps: list[str] = []
    part = salientpp.partition(data, num_parts, root, [3, 2], 16, progress=Told(steps.append), **options)
    (assigning,) = (step for step in steps if step.startswith("assigning"))
    return part, assigning.removesuffix(" (METIS shows no progress)")


def assignment_of(part: salientpp.PartitionedGraph) -> Tensor:
    """Returns the part of every vertex, by the user's ids."""
    found = torch.empty(part.num_vertices, dtype=torch.int64)
    found[part.original_id(torch.arange(part.num_vertices))] = part.book.owner(torch.arange(part.num_vertices))
    return found


@pytest.mark.parametrize("edge_weights", ["vip", "equal"])
def test_parts_are_refined_unless_refine_is_false(tmp_path, edge_weights):
    data = random_data(300, 1500, seed=6)
    default, named = partition(data, 3, tmp_path / "default", edge_weights=edge_weights)
    asked, _ = partition(data, 3, tmp_path / "asked", edge_weights=edge_weights, refine=True)
    plain, plain_named = partition(data, 3, tmp_path / "plain", edge_weights=edge_weights, refine=False)
    words = "" if edge_weights == "vip" else " with equal edge weights"
    assert named == f"assigning 300 vertices to 3 parts by metis{words}, refined"
    assert plain_named == f"assigning 300 vertices to 3 parts by metis{words}"
    for found, refine in ((default, True), (asked, True), (plain, False)):
        assert found.description.partitioning == {
            "method": "metis",
            "edge_weights": edge_weights,
            "refine": refine,
            "order": "vip",
        }
    assert default.fingerprint == asked.fingerprint
    graph, seeds = Graph.from_data(data), data.train_mask.nonzero().flatten()
    rows = [predicted_rows(graph, assignment_of(found), 3, seeds, [3, 2], 16) for found in (default, plain)]
    assert rows[0] < rows[1]


@pytest.mark.parametrize(
    "options, why",
    [
        ({"method": "random"}, "by random, not refined (the assignment is random)"),
        ({"method": torch.arange(300) % 3}, "parts, not refined (the assignment is given)"),
        ({"split": {"train": torch.empty(0, dtype=torch.int64)}}, "not refined (refinement needs vertices that batches start from)"),
    ],
    ids=["random", "given", "no seeds"],
)  # fmt: skip
def test_progress_says_why_parts_are_not_refined(tmp_path, options, why):
    part, named = partition(random_data(300, 1500, seed=6), 3, tmp_path / "d", **options)
    plain, plain_named = partition(random_data(300, 1500, seed=6), 3, tmp_path / "plain", refine=False, **options)
    assert named.endswith(why) and "refined" not in plain_named
    assert not part.description.partitioning["refine"]
    assert part.fingerprint == plain.fingerprint


@pytest.mark.parametrize("method", ["random", torch.arange(300) % 3], ids=["random", "given"])
def test_random_and_given_parts_are_refined_on_request(tmp_path, method):
    data = random_data(300, 1500, seed=6)
    part, named = partition(data, 3, tmp_path / "parts", method=method, refine=True)
    plain, _ = partition(data, 3, tmp_path / "plain", method=method)
    assert named.endswith(", refined") and part.description.partitioning["refine"]
    cut = [found.manifest["quality"]["edge_cut"] for found in (part, plain)]
    assert cut[0] < cut[1]


def test_a_large_graph_is_refined_only_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "MOST_EDGES_OF_METIS", 1000)
    data = random_data(300, 1500, seed=6)
    part, named = partition(data, 3, tmp_path / "d", method="metis")
    assert named.endswith("by metis, not refined (the graph has more than 2^26 edges)")
    asked, named = partition(data, 3, tmp_path / "asked", method="metis", refine=True)
    assert named.endswith("by metis, refined") and asked.fingerprint != part.fingerprint


def test_one_part_needs_no_refinement(tmp_path):
    for refine in (None, True):
        part, named = partition(random_data(60, 300), 1, tmp_path / str(refine), refine=refine)
        assert named.endswith("to 1 parts by metis") and not part.description.partitioning["refine"]


def test_an_impossible_refinement_is_refused(tmp_path):
    typed, named = partition(random_hetero(), 2, tmp_path / "types")
    assert named.endswith("by metis, not refined (refinement needs one type of vertices and edges)")
    assert not typed.description.partitioning["refine"]
    text = "refine=True needs one type of vertices and edges, got a graph with types; leave refine out, or pass refine=False"
    with pytest.raises(ValueError, match=text):
        partition(random_hetero(), 2, tmp_path / "refused", refine=True)
    text = "refine=True needs vertices that batches start from, got no seeds; leave refine out, or pass refine=False"
    with pytest.raises(ValueError, match=text):
        partition(random_data(60, 300), 2, tmp_path / "refused", refine=True, split={"train": []})
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"method": "metis-vip"}, "method must be 'auto', 'metis', 'kaminpar', 'random' or an assignment, got 'metis-vip'"),
        ({"edge_weights": None}, "edge_weights must be 'vip' or 'equal', got None"),
        ({"order": "degree"}, "order must be 'vip' or 'original', got 'degree'"),
        ({"refine": "vip"}, "refine must be True, False or None, got 'vip'"),
    ],
)  # fmt: skip
def test_unknown_options_are_refused(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        partition(random_data(60, 300), 2, tmp_path / "d", **options)


@pytest.mark.parametrize("name", ["facebook_pages", "debian_full"])
def test_on_real_graphs_refinement_saves_five_percent_of_the_rows(name):
    data = real_data(name)
    graph = Graph.from_data(data)
    splits = collect_splits(data, None, data.y, graph.num_vertices)
    options = dict(splits=splits, seeds=splits["train"], num_neighbors=[15, 10, 5], batch_size=256)
    counted = []
    for refine in (False, None):
        found = assign_for(graph, 4, PartitionOptions(refine=refine), **options)
        assert max(found.balance.values()) <= 1.0501
        rows = 0
        for part in range(4):
            own = splits["train"][found.assignment[splits["train"]] == part]
            accesses = count_accesses(graph, shuffled_batches(own, 256, part, 1), [15, 10, 5])
            rows += int(accesses[found.assignment != part].sum())
        counted.append(rows)
    assert counted[1] < 0.95 * counted[0]
