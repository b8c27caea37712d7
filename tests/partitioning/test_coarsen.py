"""Laws of `salientpp.partitioning.coarsen`: a coarsened graph represents its graph, and its parts are about as good."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from communities import count_cut, make_communities, make_skewed
from hypothesis import given
from hypothesis import strategies as st
from peers import real_graph
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.partitioning import coarsen, metis
from salientpp.partitioning.assign import assign_parts
from salientpp.partitioning.parhip import write_parhip


def undirected(pairs: list[tuple[int, int]], num_vertices: int) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    both = torch.cat([both, both.flip(1)]).unique(dim=0)
    graph = Graph.from_edge_index(both.t(), num_vertices)
    return graph.indptr, graph.indices


def cliques(number: int, size: int) -> tuple[Tensor, Tensor]:
    """Makes cliques; each is linked to the next by one edge."""
    pairs = [(c * size + i, c * size + j) for c in range(number) for i in range(size) for j in range(i)]
    return undirected([*pairs, *((c * size, c * size + size) for c in range(number - 1))], number * size)


def ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.int64)


# --- clusters ------------------------------------------------------------------------------------------------


def test_strongly_linked_vertices_are_a_cluster():
    indptr, indices = cliques(20, 8)
    owner = torch.arange(160).repeat_interleave(indptr.diff())
    weights = torch.where(owner // 8 == indices // 8, 3, 1)
    for seed in range(5):
        cluster = ops.cluster_vertices(indptr, indices, ones(160), 8, 5, seed, weights)
        assert cluster.dtype == torch.int32
        assert cluster.tolist() == torch.arange(20).repeat_interleave(8).tolist()


def test_the_heavier_edge_decides_the_cluster():
    indptr, indices = undirected([(0, 1), (1, 2), (2, 3)], 4)
    weight = {(0, 1): 1, (1, 2): 5, (2, 3): 1}
    owner = torch.arange(4).repeat_interleave(indptr.diff())
    weights = torch.tensor([weight[min(v, u), max(v, u)] for v, u in zip(owner.tolist(), indices.tolist())])
    for dtype in (torch.int32, torch.int64):
        cluster = ops.cluster_vertices(indptr, indices, ones(4), 2, 5, 0, weights.to(dtype)).tolist()
        assert cluster == [0, 1, 1, 0]  # both ends favour a full cluster


def test_vertices_that_favour_a_full_cluster_or_have_no_edges_are_grouped():
    star = undirected([(0, leaf) for leaf in range(1, 101)], 201)  # the last hundred have no edges
    cluster = ops.cluster_vertices(*star, torch.tensor([50] + [1] * 200), 10, 5, 0)
    sizes = torch.bincount(cluster).tolist()
    assert sizes == [1] + [10] * 20
    assert set(cluster[1:101].tolist()).isdisjoint(cluster[101:].tolist())


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    st.lists(st.integers(1, 9), min_size=12, max_size=12),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(-(2**63), 2**63 - 1),
)
def test_clusters_are_numbered_by_their_first_vertices_and_not_too_heavy(pairs, weights, most, rounds, seed):
    indptr, indices = undirected(pairs, 12)
    weight = torch.tensor(weights)
    cluster = ops.cluster_vertices(indptr, indices, weight, most, rounds, seed)
    firsts = [cluster.tolist().index(c) for c in range(int(cluster.max()) + 1)]
    assert firsts == sorted(firsts)
    heavy = torch.bincount(cluster, weight.double()) > most
    assert all(int((cluster == c).sum()) == 1 for c in heavy.nonzero().flatten().tolist())
    assert torch.equal(cluster, ops.cluster_vertices(indptr, indices.long(), weight, most, rounds, seed))


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40),
    st.lists(st.integers(0, 4), min_size=9, max_size=9),
    st.booleans(),
    st.integers(1, 5),
)
def test_contracted_lists_are_the_product_with_the_matrix_of_the_clusters(pairs, clusters, weighted, step):
    indptr, indices = undirected(pairs, 9)
    owner = torch.arange(9).repeat_interleave(indptr.diff())
    low, high = torch.minimum(owner, indices.long()), torch.maximum(owner, indices.long())
    weight = (2**30 + 7 * low + 3 * high).int() if weighted else None
    adjacency = torch.zeros(9, 9, dtype=torch.int64)
    adjacency[owner, indices.long()] = 1 if weight is None else weight.long()
    member = torch.nn.functional.one_hot(torch.tensor(clusters), 5)
    expected = (member.t() @ adjacency @ member).fill_diagonal_(0)
    found = torch.zeros_like(expected)
    for first in range(0, 5, step):
        last = min(5, first + step)
        length, others, sums = ops.contract_lists(
            indptr, indices, torch.tensor(clusters, dtype=torch.int32), 5, first, last, weight
        )
        assert int(length.sum()) == others.numel() == sums.numel()
        for c, (of, by) in enumerate(zip(others.split(length.tolist()), sums.split(length.tolist())), first):
            assert of.tolist() == sorted(set(of.tolist()))
            found[c, of.long()] = by
    assert torch.equal(found, expected)
    assert int((found > 0).sum()) == int((expected > 0).sum())


INDPTR, INDICES = undirected([(0, 1), (1, 2)], 3)
OF = torch.tensor([0, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vertex_weights": [1, 0, 1]}, "vertex_weights[1] must be >= 1, got 0"),
        ({"vertex_weights": [1, 1]}, "vertex_weights must have one entry per vertex, expected 3, got 2"),
        ({"vertex_weights": [2**61, 1, 1]}, "vertex_weights sum to more than 2^61"),
        ({"edge_weights": [1, 1, 0, 1]}, "edge_weights[2] must be >= 1, got 0"),
        ({"edge_weights": [2**62] * 4}, "edge_weights sum to more than 2^63"),
        ({"indices": [1, 0, 3, 1]}, "indices[2] must be in [0, 3), got 3"),
        ({"indices": [1, 0, -1, 1]}, "indices[2] must be in [0, 3), got -1"),
        ({"most_weight": 0}, "most_weight must be >= 1, got 0"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
    ],
)
def test_graphs_that_cannot_be_clustered_are_refused(change, words):
    given = {"indptr": INDPTR, "indices": INDICES, "vertex_weights": ones(3), "most_weight": 2, "rounds": 1, "seed": 0}
    given |= {name: torch.tensor(value) if isinstance(value, list) else value for name, value in change.items()}
    with pytest.raises(RuntimeError, match=re.escape(words)):
        ops.cluster_vertices(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cluster": OF[:2]}, "cluster must have one entry per vertex, expected 3, got 2"),
        ({"cluster": OF + 1}, "cluster[2] must be in [0, 2), got 2"),
        (
            {"last": 3},
            "first and last must be in order within [0, num_clusters], of at most 3 clusters, got 0, 3 and 2",
        ),
        ({"num_clusters": 4}, "of at most 3 clusters, got 0, 2 and 4"),
        ({"edge_weights": ones(4)}, "edge_weights must have dtype Int"),
        ({"edge_weights": ones(3).int()}, "edge_weights must have one entry per edge, expected 4, got 3"),
        ({"indices": INDICES + 1}, "indices[2] must be in [0, 3), got 3"),
    ],
)
def test_graphs_that_cannot_be_contracted_are_refused(change, words):
    given = {"indptr": INDPTR, "indices": INDICES, "cluster": OF, "num_clusters": 2, "first": 0, "last": 2}
    with pytest.raises(RuntimeError, match=re.escape(words)):
        ops.contract_lists(**{**given, **change})


# --- the graph for the partitioner ---------------------------------------------------------------------------


@pytest.mark.parametrize(("whole", "most", "levels"), [(8000, 10, 0), (7999, 2000, 1), (7999, 300, 2)])
def test_a_graph_is_coarsened_until_it_is_small(tmp_path, monkeypatch, whole, most, levels):
    monkeypatch.setattr(coarsen, "MOST_VERTICES", whole)
    monkeypatch.setattr(coarsen, "MOST_CLUSTERS", most)
    monkeypatch.setattr(coarsen, "_EDGES_KEPT", 32)
    graph, _ = make_communities(32, 250, 60_000, 6000, seed=1)
    vertex_weights = graph.indptr.diff().clamp_(min=1)
    path = tmp_path / "graph.parhip"
    indptr, indices, weights = metis.symmetrise(graph, None)
    owner_of_all = np.repeat(np.arange(8000), np.diff(indptr.numpy()))
    lists = write_parhip(
        path,
        8000,
        [(0, 8000, indptr.diff().numpy(), indices.numpy(), None if weights is None else weights.numpy())],
        vertex_weights,
        10**6,
        weights is not None,
    )
    cluster, found = coarsen.coarsen(path, lists, vertex_weights, 1, 0)
    assert (cluster.dtype, cluster.numel()) == (torch.int32, 8000)
    if not levels:
        assert (found, cluster.tolist()) == (path, list(range(8000)))
        return
    assert found == tmp_path / "graph.heaviest"
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [
        ".heaviest",
        *[".level-1", ".level-2"][:levels],
        ".parhip",
    ]
    absent, num_clusters, entries = np.fromfile(found, np.uint64, 3).tolist()
    assert num_clusters == int(cluster.max()) + 1 <= most
    # After the starts: ids, then weights of vertices and of edges, all int32.
    body = np.fromfile(found, np.int32, offset=24 + 8 * (num_clusters + 1))
    assert (absent & 1, body.size) == (0, 2 * entries + num_clusters)
    weight_of_cluster = body[entries : entries + num_clusters]
    assert weight_of_cluster.tolist() == torch.bincount(cluster, vertex_weights.double()).tolist()
    start = (np.fromfile(found, np.int64, num_clusters + 1, offset=24) - 24 - 8 * (num_clusters + 1)) // 4
    owner, other = np.repeat(np.arange(num_clusters), np.diff(start)), body[:entries]
    # An edge weighs the total of all edges between the two clusters. If some are left out, they are the lightest.
    between = np.zeros((num_clusters, num_clusters), dtype=np.int64)
    np.add.at(
        between,
        (cluster.numpy()[owner_of_all], cluster.numpy()[indices.numpy()]),
        1 if weights is None else weights.numpy(),
    )
    np.fill_diagonal(between, 0)
    if levels == 1:
        assert np.array_equal(body[entries + num_clusters :], between[owner, other])
        kept = np.zeros_like(between, dtype=bool)
        kept[owner, other] = True
        assert np.array_equal(kept, kept.T)
        for c in range(num_clusters):
            left_out = between[c][~kept[c]].max(initial=0)
            assert (between[c][kept[c]] >= left_out).sum() >= min(32, (between[c] > 0).sum())


@pytest.mark.parametrize("name", ["facebook_pages", "skewed"])
def test_parts_of_a_coarsened_graph_keep_limits_and_are_good(monkeypatch, name):
    pytest.importorskip("kaminpar")
    graph, seed_sets = make_skewed(seed=2)
    if name != "skewed":
        with np.load(real_graph(name)) as file:
            edges = torch.from_numpy(file["edge_index"])
            graph, seed_sets = Graph.from_edge_index(torch.cat([edges, edges.flip(0)], 1), len(file["x"])), {}
    cut = {}
    for most in (2**20, 500):
        monkeypatch.setattr(coarsen, "MOST_VERTICES", most)
        monkeypatch.setattr(coarsen, "MOST_CLUSTERS", most)
        found = [assign_parts(graph, 4, method="kaminpar", seed_sets=seed_sets, seed=s) for s in range(3)]
        assert all(max(parts.balance.values()) <= 1.06 for parts in found)
        assert all(parts.edge_cut == count_cut(graph, parts.assignment) for parts in found)
        cut[most] = min(parts.edge_cut for parts in found)
    assert cut[500] <= 1.2 * cut[2**20]
