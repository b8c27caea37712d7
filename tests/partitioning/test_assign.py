"""Laws of `salientpp.partitioning.assign`: every vertex gets a part, loads are balanced, and the cut is small."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from communities import count_cut, make_communities, make_skewed
from forked_python import python
from hypothesis import given
from hypothesis import strategies as st
from peers import real_graph
from rare import rare
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.partitioning import assign, balance, kaminpar, metis, parhip
from salientpp.partitioning.assign import assign_parts
from salientpp.partitioning.errors import PartitionerError, is_out_of_memory


def make_graph(pairs: list[tuple[int, int]], num_vertices: int) -> Graph:
    """Makes a graph from directed edges (source, target)."""
    return Graph.from_edge_index(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t(), num_vertices)


def symmetric(graph: Graph) -> tuple[Tensor, Tensor, Tensor | None]:
    return metis.symmetrise(graph, None)


def worst_overload(assignment: Tensor, weights: Tensor, limits: Tensor, num_parts: int) -> float:
    loads = torch.zeros(num_parts, weights.size(1), dtype=torch.int64).index_add_(0, assignment, weights)
    return float(((loads - limits).clamp(min=0) / limits.clamp(min=1)).max())


# --- metis -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_communities", [2, 4])
def test_metis_finds_planted_communities(num_communities):
    graph, community = make_communities(num_communities, size=300, inside=6000, across=300, seed=0)
    found = assign_parts(graph, num_communities)
    random = assign_parts(graph, num_communities, method="random")
    planted = assign_parts(graph, num_communities, method=community)
    assert found.edge_cut <= 1.05 * planted.edge_cut
    assert found.edge_cut < 0.2 * random.edge_cut


@pytest.mark.parametrize("num_parts", [2, 4, 7])
@pytest.mark.parametrize("tolerance", [0.02, 0.05, 0.2])
def test_every_load_keeps_within_its_limit_on_a_skewed_graph(num_parts, tolerance):
    graph, seed_sets = make_skewed(seed=1)
    result = assign_parts(graph, num_parts, seed_sets=seed_sets, tolerance=tolerance)
    assert set(result.balance) == {"vertices", "edges", "train", "val"}
    heaviest = int(graph.indptr.diff().max())
    for name, load in result.loads.items():
        mean = sum(load) / num_parts
        slack = heaviest if name == "edges" else 1  # the documented limit for whole vertices
        assert max(load) <= max((1 + tolerance) * mean, -(-sum(load) // num_parts), slack), name
    assert result.edge_cut < assign_parts(graph, num_parts, method="random").edge_cut


def test_the_same_seed_gives_the_same_parts():
    graph, seed_sets = make_skewed(seed=2)
    for method in ("metis", "random"):
        first, again, other = (
            assign_parts(graph, 4, method=method, seed_sets=seed_sets, seed=seed).assignment for seed in (3, 3, 4)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_seeds_beyond_32_bits_are_accepted():
    graph, _ = make_communities(2, size=20, inside=100, across=5, seed=0)
    assert assign_parts(graph, 2, seed=2**40).edge_cut < graph.num_edges


def test_the_parts_do_not_depend_on_the_width_of_indices():
    graph, seed_sets = make_skewed(seed=3)
    wide = Graph(graph.indptr, graph.indices.long())
    assert graph.indices.dtype == torch.int32
    narrow_result, wide_result = (assign_parts(g, 4, seed_sets=seed_sets) for g in (graph, wide))
    assert torch.equal(narrow_result.assignment, wide_result.assignment)
    assert narrow_result.edge_cut == wide_result.edge_cut


def test_the_symmetrised_graph_counts_each_pair_with_its_multiplicity():
    # 0 -> 1 twice and back once, 2 -> 1 once, a loop at 3, 4 isolated.
    indptr, indices, weight = metis.symmetrise(make_graph([(0, 1), (0, 1), (1, 0), (2, 1), (3, 3)], 5), None)
    assert indptr.tolist() == [0, 1, 3, 4, 4, 4]
    assert indices.tolist() == [1, 0, 2, 1]
    assert weight.tolist() == [3, 3, 1, 1]
    edge_weights = torch.ones(5, dtype=torch.int64)
    same = metis.symmetrise(make_graph([(0, 1), (0, 1), (1, 0), (2, 1), (3, 3)], 5), edge_weights)
    assert [part.tolist() for part in same] == [indptr.tolist(), indices.tolist(), weight.tolist()]


def test_an_undirected_edge_weighs_the_costs_of_its_directed_edges():
    # 0 -> 1 twice (7 each) and back once (5), 2 -> 1 once (7).
    graph = make_graph([(0, 1), (0, 1), (1, 0), (2, 1), (3, 3)], 4)
    for scale in (1, 2**40):
        indptr, indices, weight = metis.symmetrise(graph, torch.tensor([5, 7, 11, 13]) * scale)
        assert (indptr.tolist(), indices.tolist()) == ([0, 1, 3, 4, 4], [1, 0, 2, 1])
        assert weight.tolist() == [19 * scale, 19 * scale, 7 * scale, 7 * scale]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40),
    kind=st.sampled_from(["none", "by target", "of each", "large"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_the_symmetrised_graph_sums_weights_over_pairs(pairs, kind, index, seed):
    graph = make_graph(pairs, 7)
    rng = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [
            int(graph.indptr[v]) + torch.randperm(int(graph.indptr[v + 1] - graph.indptr[v]), generator=rng)
            for v in range(7)
        ]
    )
    indices = graph.indices[order].to(index)  # lists in any order
    target = torch.arange(7).repeat_interleave(graph.indptr.diff())
    weight, given_weights = torch.ones(indices.numel(), dtype=torch.int64), {}
    if kind == "by target":
        by_target = torch.randint(1, 9, (7,), generator=rng)
        weight, given_weights = by_target[target], {"weight_by_target": by_target}
    elif kind != "none":
        weight = torch.randint(1, 9 if kind == "of each" else 2**40, (indices.numel(),), generator=rng)
        given_weights = {"weight_of_each": weight.int() if kind == "of each" else weight}
    expected: Counter[tuple[int, int]] = Counter()
    for v, u, w in zip(target.tolist(), indices.tolist(), weight.tolist()):
        if u != v:
            expected[v, u] += w
            expected[u, v] += w
    indptr, found, sums = ops.symmetrise(graph.indptr, indices, **given_weights)
    assert found.dtype == index
    owner = torch.arange(7).repeat_interleave(indptr.diff())
    assert list(zip(owner.tolist(), found.tolist())) == sorted(expected)
    if sums.numel():
        assert sums.tolist() == [expected[pair] for pair in sorted(expected)]
        assert sums.dtype == (torch.int32 if max(expected.values()) < 2**31 else torch.int64)
    else:
        assert not expected or (kind == "none" and len(set(expected.values())) == 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_by_target": [1, 0]}, "weights of edges must be >= 1, got 0 for edge 0"),
        ({"weight_by_target": [1]}, "weight_by_target must have one entry per vertex, expected 2, got 1"),
        ({"weight_of_each": [1, 1]}, "weight_of_each must have one entry per edge, expected 1, got 2"),
        ({"weight_of_each": [2**61]}, "the edge weights sum to more than 2^60; scale them down"),
        ({"weight_by_target": [1, 1], "weight_of_each": [1]}, "weight_by_target and weight_of_each exclude each other"),
    ],
)
def test_weights_that_cannot_be_summed_are_refused(change, words):
    with pytest.raises(RuntimeError, match=re.escape(words)):
        ops.symmetrise(torch.tensor([0, 0, 1]), torch.tensor([0]), **{k: torch.tensor(v) for k, v in change.items()})


def test_edges_of_one_weight_need_no_weights():
    indptr, indices, weight = metis.symmetrise(make_graph([(0, 1), (1, 0), (1, 2), (2, 1)], 3), None)
    assert (indptr.tolist(), indices.tolist(), weight) == ([0, 1, 3, 4], [1, 0, 2, 1], None)


def test_heavy_edges_are_not_cut():
    # A ring of 8 whose edges 0-1, 2-3, 4-5, 6-7 are heavy. Halves of four vertices can cut two light edges.
    pairs = [(v, (v + 1) % 8) for v in range(8)]
    graph = make_graph(pairs, 8)
    edge_weights = torch.where(torch.arange(8) % 2 == 1, 100, 1)  # weights of the edges into each vertex
    assignment = assign_parts(graph, 2, edge_weights=edge_weights).assignment
    assert torch.equal(assignment[0::2], assignment[1::2])
    assert assignment.bincount().tolist() == [4, 4]


def test_metis_balances_given_weights_of_vertices():
    """The first 20 of 200 vertices on a path have nine tenths of the weight. No vertex has a load, so nothing is moved after METIS."""
    graph = make_graph([(v, v + 1) for v in range(199)], 200)
    weights = torch.where(torch.arange(200) < 20, 81, 1)
    for chosen, balanced in ((weights, weights), (None, torch.ones(200).long())):
        found = assign_parts(graph, 2, loads={"rows": torch.zeros(200).long()}, vertex_weights=chosen)
        of_parts = torch.zeros(2).long().index_add_(0, found.assignment, balanced)
        assert float(of_parts.max() / of_parts.double().mean()) < 1.1, of_parts
        assert found.edge_cut <= 3


# --- thinning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 10**9])
@pytest.mark.parametrize("weighted", [True, False])
def test_an_edge_stays_if_it_is_among_the_heaviest_of_either_end(most, weighted):
    graph, _ = make_skewed(seed=4)
    # The weights are distinct. Without weights, a hash decides, and keeps the same number.
    indptr, indices, _ = symmetric(graph)
    target = torch.arange(graph.num_vertices).repeat_interleave(indptr.diff())
    low, high = torch.minimum(target, indices), torch.maximum(target, indices)
    weight = 1 + (low * 7919 + high * 104_729) % 1_000_003
    kept = ops.keep_heaviest_edges(indptr, indices, most, weight if weighted else None)
    pairs = set(zip(target[kept].tolist(), indices[kept].tolist()))
    assert all((v, u) in pairs for u, v in pairs), "an edge that stays is in the lists of both ends"
    if not weighted:
        assert bool((torch.bincount(target[kept], minlength=graph.num_vertices) >= indptr.diff().clamp(max=most)).all())
        return
    best: dict[tuple[int, int], int] = {}
    for v in range(graph.num_vertices):
        begin, end = indptr[v : v + 2].tolist()
        for rank, e in enumerate((begin + weight[begin:end].argsort(descending=True)).tolist()):
            edge = (int(low[e]), int(high[e]))
            best[edge] = min(rank, best.get(edge, rank))
    assert pairs == {pair for (u, v), rank in best.items() if rank < most for pair in ((u, v), (v, u))}


def test_no_id_is_favoured_among_edges_of_equal_weight():
    indices = (torch.arange(200).repeat(200, 1)[~torch.eye(200, dtype=torch.bool)]).contiguous()  # a complete graph
    indptr = torch.arange(201) * 199
    kept = indices[ops.keep_heaviest_edges(indptr, indices, 10)].bincount(minlength=200)
    assert kept.min() >= 10 and kept.max() < 60 and abs(kept[:100].sum() / kept.sum() - 0.5) < 0.05


def test_a_thinned_graph_is_partitioned_as_well_within_the_limits(monkeypatch):
    graph, _ = make_communities(4, size=300, inside=12_000, across=3000, seed=10)
    whole = assign_parts(graph, 4)
    kept = []
    monkeypatch.setattr(metis, "_EDGES_KEPT", 8)
    monkeypatch.setattr(metis, "_MOST_EDGE_ENDS", graph.num_edges // 4)
    original = metis._thin

    def counting(indptr, indices, weight):
        thin = original(indptr, indices, weight)
        kept.append(thin[1].numel() / indices.numel())
        return thin

    monkeypatch.setattr(metis, "_thin", counting)
    thinned = assign_parts(graph, 4)
    assert len(kept) == 1 and 0.2 < kept[0] < 0.8
    assert thinned.edge_cut <= 1.01 * whole.edge_cut
    assert max(thinned.balance.values()) <= 1.05
    monkeypatch.setattr(metis, "_MOST_EDGE_ENDS", graph.num_edges)
    assert assign_parts(graph, 4).edge_cut == whole.edge_cut and len(kept) == 1, (
        "graphs within the bound are left whole"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"most": 0}, "most must be >= 1, got 0"),
        ({"indptr": [0, 2, 1]}, "indptr must run from 0 to the number of indices, 2, got 0 to 1"),
        ({"indptr": [0, 3, 2]}, "indptr must not decrease, got 2 after 3"),
        ({"indices": [1, 2]}, r"indices\[1\] must be in \[0, 2\), got 2"),
        ({"edge_weights": [1]}, "edge_weights must have one entry per edge, expected 2, got 1"),
    ],
)
def test_thinning_refuses_bad_arguments(change, words):
    arguments = {"indptr": [0, 1, 2], "indices": [1, 0], "most": 1, "edge_weights": [1, 1]} | change
    tensors = {key: torch.tensor(entry) if isinstance(entry, list) else entry for key, entry in arguments.items()}
    with pytest.raises(RuntimeError, match=words):
        ops.keep_heaviest_edges(**tensors)


@pytest.mark.parametrize("pairs", [[], [(3, 3), (4, 4)], [(0, 1)]])
def test_graphs_without_edges_and_isolated_vertices_are_distributed(pairs):
    for method in ("metis", "random"):
        result = assign_parts(make_graph(pairs, 40), 4, method=method)
        assert result.loads["vertices"] == (10, 10, 10, 10)
        assert method == "random" or result.edge_cut == 0


@pytest.mark.parametrize("num_parts", [2, 7, 39, 40])
def test_no_part_is_empty_if_vertices_suffice(num_parts):
    ring = make_graph([(v, (v + 1) % 40) for v in range(40)], 40)
    star = make_graph([(0, v) for v in range(1, 40)], 40)
    for graph in (ring, star):
        for method in ("metis", "random"):
            assert min(assign_parts(graph, num_parts, method=method).loads["vertices"]) >= 1


@pytest.mark.parametrize("method", ["metis", "random"])
def test_one_part_owns_everything_and_cuts_nothing(method, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)  # METIS is not called
    result = assign_parts(make_graph([(0, 1), (1, 2), (2, 2)], 3), 1, method=method)
    assert result.assignment.tolist() == [0, 0, 0]
    assert (result.edge_cut, result.balance) == (0, {"vertices": 1.0, "edges": 1.0})


# --- random and given ------------------------------------------------------------------------------------


def test_random_parts_share_each_seed_set_evenly():
    graph = make_graph([], 1003)
    order = torch.from_numpy(np.random.default_rng(5).permutation(1003))
    seed_sets = {"train": order[:101], "val": order[101:150], "test": order[150:153], "none": order[:0]}
    result = assign_parts(graph, 4, method="random", seed_sets=seed_sets)
    assert set(result.loads) == {"vertices", "edges", "train", "val", "test"}
    assert all(max(load) - min(load) <= 1 for load in result.loads.values())


def test_a_given_assignment_is_measured_and_never_changed():
    graph, _ = make_skewed(seed=6)
    given = (torch.arange(graph.num_vertices, dtype=torch.int32) % 3).clamp(max=1)
    result = assign_parts(graph, 3, method=given)
    assert result.assignment.dtype == torch.int64
    assert torch.equal(result.assignment, given.long())
    assert result.loads["vertices"][2] == 0  # an empty part is reported, not repaired
    given.zero_()
    assert result.assignment.any()


def test_quality_agrees_with_counting_by_hand(monkeypatch):
    monkeypatch.setattr(assign, "_EDGES_AT_ONCE", 7)  # so that the count takes several steps
    rng = np.random.default_rng(7)
    graph = Graph.from_edge_index(torch.from_numpy(rng.integers(0, 30, (2, 90))), 30)
    assignment = torch.from_numpy(rng.integers(0, 3, 30))
    seeds = torch.tensor([0, 4, 4, 9, 29])
    result = assign_parts(graph, 3, method=assignment, seed_sets={"train": seeds})
    assert result.edge_cut == count_cut(graph, assignment)
    assert result.edge_cut_fraction == result.edge_cut / 90
    degree = graph.indptr.diff().tolist()
    for name, weight in {"vertices": [1] * 30, "edges": degree, "train": seeds.bincount(minlength=30).tolist()}.items():
        loads = [sum(w for v, w in enumerate(weight) if assignment[v] == p) for p in range(3)]
        assert list(result.loads[name]) == loads
        assert result.balance[name] == pytest.approx(max(loads) / (sum(loads) / 3))


def test_direction_counts_only_what_the_owner_holds():
    # All edges point at vertex 0: its part holds every edge, and the cut counts each once.
    result = assign_parts(make_graph([(1, 0), (2, 0), (3, 0)], 4), 2, method=torch.tensor([0, 0, 1, 1]))
    assert result.loads["edges"] == (3, 0)
    assert result.edge_cut == 2


# --- laws of the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_rebalancing_never_increases_the_worst_overload(seed):
    rng = np.random.default_rng(seed)
    num_vertices, num_parts, num_constraints = 60, int(rng.integers(1, 7)), int(rng.integers(1, 4))
    indptr, indices, weight = symmetric(Graph.from_edge_index(torch.from_numpy(rng.integers(0, 60, (2, 200))), 60))
    weights = torch.from_numpy(rng.integers(0, 9, (num_vertices, num_constraints)) ** rng.integers(1, 4))
    limits = (weights.sum(0).double() / num_parts * rng.uniform(0.7, 1.3)).long()  # some cannot be met
    assignment = torch.from_numpy(rng.integers(0, num_parts, num_vertices) * rng.integers(0, 2, num_vertices))
    result = ops.rebalance_parts(indptr, indices, assignment, weights, limits, num_parts, 3, weight)
    print(f"seed {seed}")
    assert int(result.min()) >= 0 and int(result.max()) < num_parts
    before, after = (worst_overload(a, weights, limits, num_parts) for a in (assignment, result))
    assert after <= before
    assert result.bincount(minlength=num_parts).min() >= 1  # 60 vertices, at most 6 parts


@pytest.mark.parametrize("seed", range(10))
def test_rebalancing_meets_limits_that_leave_room(seed):
    graph, seed_sets = make_skewed(seed)
    indptr, indices, weight = symmetric(graph)
    adds = balance.VertexLoads(graph, seed_sets)
    weights, limits = adds.table, balance._load_limits(adds, 4, 0.05)
    aim = balance._load_limits(adds, 4, 0.045)
    everything_in_one = torch.zeros(graph.num_vertices, dtype=torch.int64)
    result = ops.rebalance_parts(indptr, indices, everything_in_one, weights, aim, 4, 2, weight)
    assert worst_overload(result, weights, limits, 4) == 0.0
    # Moves of one vertex at a time may stop slightly short of limits that only an exact fit meets.
    assert worst_overload(result, weights, aim, 4) < 1e-3


def test_refinement_lowers_the_cut_within_the_limits():
    graph, community = make_communities(2, size=100, inside=2000, across=100, seed=8)
    indptr, indices, weight = symmetric(graph)
    rng = np.random.default_rng(8)
    noisy = torch.where(torch.from_numpy(rng.random(200) < 0.2), 1 - community, community)
    ones = torch.ones(200, 1, dtype=torch.int64)
    refined = ops.rebalance_parts(indptr, indices, noisy, ones, torch.tensor([110]), 2, 10, weight)
    assert count_cut(graph, refined) <= 1.1 * count_cut(graph, community) < count_cut(graph, noisy)
    assert int(refined.bincount().max()) <= 110


def test_unlike_vertices_are_exchanged_when_no_part_has_room_for_both():
    # Part 0 holds every seed and both parts are full, so seeds can leave only in exchange for other vertices.
    weights = torch.ones(40, 2, dtype=torch.int64)
    weights[:, 1] = torch.arange(40) < 20
    assignment = (torch.arange(40) >= 20).long()
    indptr, no_edges = torch.zeros(41, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    result = ops.rebalance_parts(indptr, no_edges, assignment, weights, torch.tensor([20, 10]), 2, 0)
    assert worst_overload(result, weights, torch.tensor([20, 10]), 2) == 0.0


def test_impossible_limits_still_give_a_result():
    indptr, indices, weight = symmetric(make_communities(2, size=50, inside=400, across=50, seed=9)[0])
    weights = torch.ones(100, 2, dtype=torch.int64)
    weights[0, 1] = 10**12
    result = ops.rebalance_parts(
        indptr, indices, torch.zeros(100, dtype=torch.int64), weights, torch.tensor([0, 1]), 3, 5, weight
    )
    assert result.shape == (100,)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("assignment", [0, 2], r"assignment\[1\] must be in \[0, 2\), got 2"),
        ("assignment", [0], "assignment must have one entry per vertex, expected 2, got 1"),
        ("weights", [[1], [-1]], r"weights\[1, 0\] must be >= 0, got -1"),
        ("weights", [[1]], "weights must have one row per vertex and one column per limit"),
        ("weights", [[2**62], [2**62]], r"weights\[:, 0\] sum to more than 2\^63 - 1"),
        ("limits", [-1], r"limits\[0\] must be >= 0, got -1"),
        ("indices", [1, 5], r"indices\[1\] must be in \[0, 2\), got 5"),
        ("indptr", [0, 3, 2], "indptr must not decrease"),
        ("edge_weights", [1], "edge_weights must have one entry per edge, expected 2, got 1"),
        ("edge_weights", [2**61, 1], r"the edge weights sum to more than 2\^61"),
        ("edge_weights", [2**63 - 1, 2**63 - 1], r"the edge weights sum to more than 2\^61"),
        ("edge_weights", [1, 0], r"edge_weights\[1\] must be >= 1, got 0"),
    ],
)
def test_the_kernel_refuses_bad_arguments(name, value, words):
    arguments = {
        "indptr": [0, 1, 2],
        "indices": [1, 0],
        "assignment": [0, 1],
        "weights": [[1], [1]],
        "limits": [1],
        "edge_weights": [1, 1],
    }
    arguments[name] = value
    tensors = {key: torch.tensor(entry, dtype=torch.int64) for key, entry in arguments.items()}
    with pytest.raises(RuntimeError, match=words):
        ops.rebalance_parts(**tensors, num_parts=2, sweeps=1)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_parts": 0}, "num_parts must be an integer >= 1, got 0"),
        ({"num_parts": -2}, "num_parts must be an integer >= 1, got -2"),
        ({"num_parts": 2.0}, "num_parts must be an integer >= 1, got 2.0"),
        ({"num_parts": True}, "num_parts must be an integer >= 1, got True"),
        ({"num_parts": 6}, "num_parts must be at most the number of vertices, 5, got 6: some parts would be empty"),
        (
            {"method": "spectral"},
            "method must be 'metis', 'kaminpar', 'random' or a tensor of part ids, got 'spectral'",
        ),
        ({"method": [0, 1]}, r"method must be 'metis', 'kaminpar', 'random' or a tensor of part ids, got \[0, 1\]"),
        ({"tolerance": -0.1}, "tolerance must be a number >= 0, got -0.1; 0.05 allows 5 % above the mean"),
        ({"tolerance": float("nan")}, "tolerance must be a number >= 0, got nan"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"method": torch.zeros(4)}, r"assignment must have shape \[5\], one part per vertex, got \[4\]"),
        ({"method": torch.zeros(5)}, "assignment must have an integer dtype, got torch.float32; use assignment.long"),
        ({"method": torch.tensor([0, 1, 2, 9, -1])}, r"assignment\[2\] must be in \[0, 2\), got 2"),
        ({"seed_sets": {"train": torch.tensor([0, 5])}}, r"seed_sets\['train'\]\[1\] must be in \[0, 5\), got 5"),
        ({"seed_sets": {"val": torch.tensor([-1])}}, r"seed_sets\['val'\]\[0\] must be in \[0, 5\), got -1"),
        ({"seed_sets": {"val": torch.ones(5).bool()}}, r"seed_sets\['val'\] must be a 1-D int64 tensor .*mask.nonzero"),
        ({"seed_sets": {"val": [1]}}, r"seed_sets\['val'\] must be a 1-D int64 tensor of vertex ids, got list"),
        ({"seed_sets": {"edges": torch.tensor([1])}}, "a seed set may not be called 'edges'"),
        ({"edge_weights": torch.ones(3)}, r"edge_weights must be int64 \[5\], .*, got torch.float32 \[3\]"),
        ({"edge_weights": torch.tensor([1, 2, 0, 1, 1])}, r"edge_weights\[2\] must be >= 1, got 0"),
        ({"edge_weights": torch.ones(5).long(), "method": "random"}, "edge_weights need method='metis'"),
        ({"vertex_weights": torch.ones(5)}, r"vertex_weights must be int64 \[5\], got torch.float32 \[5\]"),
        ({"vertex_weights": torch.ones(5).long(), "method": "random"}, "vertex_weights need method='metis'"),
        ({"vertex_weights": torch.ones(5).long(), "method": torch.zeros(5).long()}, "vertex_weights need method"),
        ({"edge_weights": torch.full((5,), 2**61)}, "too many for the int64 integers of this METIS"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    graph = make_graph([(0, 1), (1, 2), (2, 3), (3, 4)], 5)
    with pytest.raises(ValueError, match=words):
        assign_parts(graph, **{"num_parts": 2, **arguments})


def test_an_empty_graph_is_refused():
    with pytest.raises(ValueError, match="the graph must have at least one vertex to be partitioned, got 0"):
        assign_parts(make_graph([], 0), 1)


def test_without_kaminpar_the_error_names_alternatives(monkeypatch):
    monkeypatch.setitem(sys.modules, "kaminpar", None)
    with pytest.raises(ImportError, match=r"pip install salientpp\[kaminpar\]`, or use method='metis'"):
        assign_parts(make_graph([(0, 1), (1, 0)], 2), 2, method="kaminpar")


def _exhausted(error):
    def fail(*arguments, **named):
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize(
    ("method", "where"), [(metis, "symmetrise"), (metis, "rebalanced"), (kaminpar, "write_undirected")]
)
def test_an_out_of_memory_error_names_methods_that_need_less(monkeypatch, error, method, where):
    monkeypatch.setattr(kaminpar, "has_kaminpar", lambda: True)
    monkeypatch.setattr(method, where, _exhausted(error))
    words = r"(METIS|KaMinPar) ran out of memory for 300 vertices and up to \d+ edge ends: it needs about 0\.\d GB .*'random'.*give an assignment"
    with pytest.raises(PartitionerError, match=words):
        assign_parts(
            make_graph([(v, (v + 1) % 300) for v in range(300)], 300), 2, method=method.__name__.rpartition(".")[2]
        )


@pytest.mark.parametrize(
    "error", [ValueError("odd"), RuntimeError("indptr must not decrease"), OSError(errno.ENOSPC, "full")]
)
def test_other_errors_are_raised_unchanged(monkeypatch, error):
    monkeypatch.setattr(metis, "symmetrise", _exhausted(error))
    with pytest.raises(type(error)) as raised:
        assign_parts(make_graph([(0, 1), (1, 0)], 2), 2)
    assert raised.value is error


_TOO_LITTLE_FOR_METIS = """
import re, resource, sys
from pathlib import Path
from salientpp import cli
from salientpp.partitioning import metis

whole = metis.symmetrise

def limited(*arguments):
    found = whole(*arguments)
    now = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**24, now + 2**24))
    return found

metis.symmetrise = limited
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["partition"], *rare(["analyze", "--predict-only", "--seeds", "all"])])
def test_the_command_names_the_memory_that_metis_lacks(tmp_path, command):
    ends = np.random.default_rng(0).integers(0, 20_000, (2, 500_000))
    np.savez(tmp_path / "g.npz", edge_index=ends, num_nodes=20_000)
    words = [command[0], f"npz:{tmp_path / 'g.npz'}", *([str(tmp_path / "d")] if command[0] == "partition" else [])]
    done = subprocess.run(
        [
            python(),
            "-c",
            _TOO_LITTLE_FOR_METIS,
            *words,
            "--parts",
            "4",
            "--method",
            "metis",
            *command[1:],
            "--num-neighbors",
            "2",
        ],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("salientpp")]
    assert done.returncode == 2 and len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(
        r"METIS .*ran out of memory for 20000 vertices and \d+ edge ends .* needs about 0\.\d GB .*'kaminpar'.*'random'",
        said[0],
    )


def test_a_kaminpar_that_fails_says_why_and_what_to_do(tmp_path):
    pytest.importorskip("kaminpar")
    with pytest.raises(PartitionerError, match=r"KaMinPar failed .*memory.*use method='random'"):
        kaminpar._run_kaminpar(tmp_path / "nothing.parhip", 2, 0.05, 0)


def test_a_kaminpar_that_is_killed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(kaminpar, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(PartitionerError, match=r"KaMinPar was ended by signal 9, most often for lack of memory"):
        kaminpar._run_kaminpar(tmp_path / "g.parhip", 2, 0.05, 0)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40),
    kind=st.sampled_from(["none", "by target", "of each", "large"]),
    seed=st.integers(0, 99),
    piece=st.sampled_from([1, 5, 2**20]),
)
def test_the_undirected_graph_in_a_file_is_the_one_in_memory(pairs, kind, seed, piece):
    graph = make_graph(pairs, 7)
    rng = torch.Generator().manual_seed(seed)
    of_target = of_each = None
    if kind in ("by target", "large"):
        of_target = torch.randint(1, 9 if kind == "by target" else 2**40, (7,), generator=rng)
    elif kind == "of each":
        of_each = torch.randint(1, 9, (len(pairs),), generator=rng)
    expected = metis.symmetrise(graph, of_target, of_each)
    before, parhip._PIECE = parhip._PIECE, piece
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "g.parhip"
            found = parhip.write_undirected(path, graph, of_target, of_each, torch.arange(7) + 1)
            assert list(Path(folder).iterdir()) == [path]
    finally:
        parhip._PIECE = before
    for ours, theirs in zip(found, expected):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("weights", ["none", "narrow", "wide"])
def test_the_file_for_kaminpar_holds_the_graph_and_its_weights(tmp_path, weights):
    kaminpar = pytest.importorskip("kaminpar")
    graph, _ = make_skewed(0)
    graph = Graph.from_edge_index(graph_without_repeats(graph), graph.num_vertices)
    generator = torch.Generator().manual_seed(0)
    of_target = torch.randint(1, 100, (graph.num_vertices,), generator=generator) * (2**30 if weights == "wide" else 1)
    vertex_weights = torch.arange(graph.num_vertices) + 3
    indptr, indices, of_each = parhip.write_undirected(
        tmp_path / "g", graph, None if weights == "none" else of_target, None, vertex_weights
    )
    assert indices.dtype == (torch.int64 if weights == "wide" else torch.int32)
    read = kaminpar.load_graph(str(tmp_path / "g"), kaminpar.GraphFileFormat.PARHIP, compress=True)
    assert (read.n(), read.m(), read.is_edge_weighted()) == (graph.num_vertices, indices.numel(), weights != "none")
    for vertex in range(0, graph.num_vertices, 97):
        entries = slice(int(indptr[vertex]), int(indptr[vertex + 1]))
        ids = indices[entries].tolist()
        assert sorted(read.neighbors(vertex)) == sorted(
            zip(ids, [1] * len(ids) if of_each is None else of_each[entries].tolist())
        )
        assert read.node_weight(vertex) == vertex + 3


def graph_without_repeats(graph: Graph) -> Tensor:
    """Returns the edges in both directions, each once, so that all weigh the same: int64 [2, E]."""
    target = torch.arange(graph.num_vertices).repeat_interleave(graph.indptr.diff())
    edges = torch.stack([graph.indices.long(), target])
    return torch.unique(torch.cat([edges, edges.flip(0)], dim=1), dim=1)


def test_kaminpar_keeps_the_limits_and_cuts_hardly_more_than_metis():
    pytest.importorskip("kaminpar")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        graph, seed_sets = make_skewed(2)
        parts = {
            method: assign_parts(graph, 4, method=method, seed_sets=seed_sets, seed=3)
            for method in ("metis", "kaminpar")
        }
        again = assign_parts(graph, 4, method="kaminpar", seed_sets=seed_sets, seed=3)
    finally:
        torch.set_num_threads(threads)
    found = parts["kaminpar"]
    assert torch.equal(found.assignment, again.assignment), "with one thread, a seed always gives the same parts"
    assert max(found.balance.values()) <= 1.05 + 0.01
    assert found.edge_cut <= 1.2 * parts["metis"].edge_cut


def test_without_pymetis_the_error_names_alternatives(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="pip install pymetis`, use method='random' or give an assignment"):
        assign_parts(make_graph([(0, 1)], 2), 2)
    assert assign_parts(make_graph([(0, 1)], 2), 2, method="random").edge_cut == 1


# --- real graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "largest_cut"), [("debian_full", 0.19), ("facebook_pages", 0.12), ("tolokers", 0.36)])
def test_partitions_of_real_graphs_have_a_small_cut_and_are_balanced(name, largest_cut):
    with np.load(real_graph(name)) as file:
        edge_index = torch.from_numpy(file["edge_index"])
        num_vertices = file["x"].shape[0]
        seed_sets = {split: torch.from_numpy(file[f"{split}_idx"]) for split in ("train", "val", "test")}
        if not file["directed"]:
            edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    result = assign_parts(Graph.from_edge_index(edge_index, num_vertices), 4, seed_sets=seed_sets)
    assert result.edge_cut_fraction < largest_cut
    assert max(result.balance.values()) <= 1.0501


def test_an_operator_without_memory_is_known_as_such():
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"cannot allocate a vector of \d+ entries") as raised:
        ops.csc_from_coo(none, none, 2**45)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("the index is out of range"))
