"""Laws of the sampler that follows edges in both directions. With all neighbours it finds what PyG's class finds, and what a walk over the edges finds."""

from __future__ import annotations

import itertools
from typing import Any

import peers
import pytest
import torch
import torch_geometric.sampler
from graphs import random_hetero
from odd_samples import random_data, same
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput, NumNeighbors, SamplerOutput

from salientpp import BidirectionalNeighborSampler, LinkNeighborLoader, NeighborLoader


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pairs(row: Tensor, col: Tensor) -> set[tuple[int, int]]:
    return set(zip(row.tolist(), col.tolist()))


def surroundings(data: Data, seeds: list[int], hops: int, sees: Any = lambda e, source: True) -> tuple[list, list]:
    """Numbers of the vertices and of the edges that are new in each hop, found by a walk over all edges."""
    (source, target), known, edges = data.edge_index.tolist(), set(seeds), set[int]()
    frontier, num_nodes, num_edges = set(seeds), [], []
    for _ in range(hops):
        found = {
            e
            for e, (u, v) in enumerate(zip(source, target))
            if (v in frontier and sees(e, u)) or (u in frontier and sees(e, v))
        }
        frontier = {end for e in found for end in (source[e], target[e])} - known
        known |= frontier
        num_edges.append(len(found - edges))
        num_nodes.append(len(frontier))
        edges |= found
    return [sorted(known), sorted(edges)], [num_nodes, num_edges]


def of_tree(out: SamplerOutput, tree: int) -> tuple[list[int], list[int]]:
    return sorted(out.node[out.batch == tree].tolist()), sorted(out.edge[out.batch[out.col] == tree].tolist())


# --- all neighbours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_all_neighbours_of_both_directions_are_found_hop_by_hop(hops):
    for seed in range(4):
        data, seeds = random_data(seed, 60, 90), long(7, 3, 30, 3)
        out = BidirectionalNeighborSampler(data, [-1] * hops).sample_from_nodes(NodeSamplerInput(None, seeds))
        (nodes, edges), (num_nodes, num_edges) = surroundings(data, seeds.tolist(), hops)
        assert out.node[:4].tolist() == seeds.tolist() and out.batch is None
        assert sorted(out.node[[0, 1, 2, *range(4, out.node.numel())]].tolist()) == nodes
        assert sorted(out.edge.tolist()) == edges
        assert torch.equal(torch.stack([out.global_row, out.global_col]), data.edge_index[:, out.edge])
        assert out.num_sampled_nodes == [4, *num_nodes] and out.num_sampled_edges == num_edges


@pytest.mark.parametrize("hops", [1, 2])
def test_all_neighbours_equal_those_of_pygs_class(hops):
    seeds = long(7, 3, 30)
    for seed in range(3):
        data = random_data(seed, 60, 90)
        inputs = NodeSamplerInput(None, seeds)
        with peers.sampling_with("pyg-lib"):
            theirs = torch_geometric.sampler.BidirectionalNeighborSampler(data, [-1] * hops).sample_from_nodes(inputs)
        ours = BidirectionalNeighborSampler(data, [-1] * hops).sample_from_nodes(inputs)
        assert same(sorted(ours.node.tolist()), sorted(theirs.node.tolist())) and ours.node[:3].tolist() == [7, 3, 30]
        # PyG numbers edges separately for each direction, so it may hold an edge twice.
        assert pairs(ours.global_row, ours.global_col) == pairs(theirs.global_row, theirs.global_col)
        assert sum(ours.num_sampled_nodes) == sum(theirs.num_sampled_nodes)


@pytest.mark.parametrize("name", ["time", "edge_time", None])
def test_each_tree_is_what_its_seed_alone_finds(name):
    data, seeds, now = random_data(5), long(7, 3, 30, 3), long(3, 5, 9, 1)
    window = 2 if name else None
    sampler = BidirectionalNeighborSampler(data, [-1, -1], disjoint=True, time_attr=name, time_window=window)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds, now if name else None))
    assert out.batch[:4].tolist() == [0, 1, 2, 3]
    sizes = []
    for tree, (seed, t) in enumerate(zip(seeds.tolist(), now.tolist())):

        def sees(e: int, vertex: int, t: int = t) -> bool:
            time = None if name is None else data.time[vertex] if name == "time" else data.edge_time[e]
            return time is None or bool(t - 2 <= time <= t)

        (nodes, edges), _ = surroundings(data, [seed], 2, sees)
        assert of_tree(out, tree) == (nodes, edges)
        sizes.append(len(edges))
    assert max(sizes) > 3
    assert bool((out.batch[out.row] == out.batch[out.col]).all())


# --- draws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"replace": True}, {"weight_attr": "weight"}], ids=str)
def test_a_vertex_draws_up_to_the_fanout_in_each_direction(options):
    data, seeds = random_data(2), torch.arange(20)
    sampler = BidirectionalNeighborSampler(data, [3, 2], **options)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=5)
    assert torch.equal(torch.stack([out.global_row, out.global_col]), data.edge_index[:, out.edge])
    trees = out.batch[out.col] if out.batch is not None else torch.zeros_like(out.col)
    assert len(set(zip(out.edge.tolist(), trees.tolist()))) == out.edge.numel(), "no edge stands twice"
    first = out.num_sampled_edges[0]
    assert first <= 20 * 6
    if not options.get("disjoint"):
        drawn_by = [int((end[:first] == v).sum()) for end in (out.row, out.col) for v in range(20)]
        assert max(drawn_by) > 3, "a vertex that draws three is also drawn by others"
    again, other = (sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=key) for key in (5, 6))
    assert all(same(getattr(again, name), getattr(out, name)) for name in vars(out))
    assert not torch.equal(other.edge[:40], out.edge[:40])


def test_both_directions_are_drawn_independently_and_uniformly():
    """The seed has four sources and four targets, and draws one of each."""
    edges = torch.tensor([[1, 2, 3, 4, 0, 0, 0, 0], [0, 0, 0, 0, 5, 6, 7, 8]])
    sampler = BidirectionalNeighborSampler(Data(edge_index=edges, num_nodes=9), [1])
    counts = dict.fromkeys(itertools.product(range(4), range(4, 8)), 0)
    for key in range(1600):
        counts[tuple(sampler.sample_from_nodes(NodeSamplerInput(None, long(0)), key=key).edge.tolist())] += 1
    assert min(counts.values()) > 50 and max(counts.values()) < 160, counts


def test_last_takes_the_latest_of_both_directions():
    edges = torch.tensor([[1, 2, 3, 0, 0, 0], [0, 0, 0, 4, 5, 6]])
    data = Data(edge_index=edges, num_nodes=7, edge_time=long(1, 5, 3, 2, 4, 9))
    sampler = BidirectionalNeighborSampler(data, [1], time_attr="edge_time", temporal_strategy="last")
    assert sampler.sample_from_nodes(NodeSamplerInput(None, long(0), long(4))).edge.tolist() == [2, 4]


# --- kinds of subgraphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("time_attr", [None, "edge_time"])
def test_an_induced_subgraph_has_every_edge_between_its_vertices(disjoint, time_attr):
    data, seeds = random_data(3), torch.arange(0, 50, 9)
    now = torch.full((seeds.numel(),), 4)
    sampler = BidirectionalNeighborSampler(data, [2, 1], "induced", disjoint=disjoint, time_attr=time_attr)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds, now if time_attr else None), key=1)
    trees = torch.zeros_like(out.node) if out.batch is None else out.batch
    want = set()
    for tree in trees.unique().tolist():
        inside = set(out.node[trees == tree].tolist())
        want |= {
            (tree, e)
            for e, (u, v) in enumerate(data.edge_index.t().tolist())
            if {u, v} <= inside and (time_attr is None or data.edge_time[e] <= 4)
        }
    assert set(zip(trees[out.col].tolist(), out.edge.tolist())) == want and out.edge.numel() == len(want) > 9
    assert torch.equal(torch.stack([out.global_row, out.global_col]), data.edge_index[:, out.edge])
    assert out.num_sampled_nodes is None and out.num_sampled_edges is None


def test_a_bidirectional_subgraph_has_every_edge_with_its_reverse():
    data = random_data(3)
    one, both = (
        BidirectionalNeighborSampler(data, [2, 1], kind).sample_from_nodes(NodeSamplerInput(None, long(1, 5)), key=3)
        for kind in ("directional", "bidirectional")
    )
    assert pairs(both.row, both.col) == pairs(one.row, one.col) | pairs(one.col, one.row)


# --- uses -------------------------------------------------------------------------------------------------


def test_loaders_take_the_sampler_and_its_draws_follow_their_seed():
    data = random_data(1)
    data.x = torch.arange(60.0).view(-1, 1)
    make = lambda seed, workers=0, **more: NeighborLoader(  # noqa: E731
        data, [], neighbor_sampler=BidirectionalNeighborSampler(data, [2, 2]), batch_size=7, seed=seed, num_workers=workers, **more
    )  # fmt: skip
    one, other = list(make(3)), list(make(4))
    for batch, again in zip(one, make(3, 2), strict=True):
        assert torch.equal(batch.x.flatten().long(), batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_index, again.edge_index) and torch.equal(batch.n_id, again.n_id)
    assert any(not torch.equal(a.n_id, b.n_id) for a, b in zip(one, other))
    state = make(3).state_dict()
    make(3).load_state_dict(state)
    wide = BidirectionalNeighborSampler(data, [3, 2])
    with pytest.raises(ValueError, match="num_neighbors"):
        NeighborLoader(data, [], neighbor_sampler=wide, batch_size=7, seed=3).load_state_dict(state)
    for batch in NodeLoader(data, BidirectionalNeighborSampler(data, [2, 2]), batch_size=7):
        assert torch.equal(batch.x.flatten().long(), batch.n_id)


def test_edges_with_negative_examples_are_seeds_too():
    data = random_data(1)
    sampler = BidirectionalNeighborSampler(data, [-1])
    inputs = EdgeSamplerInput(None, long(3, 4), long(5, 3))
    out = sampler.sample_from_edges(inputs, key=1)
    (nodes, edges), _ = surroundings(data, [3, 4, 5], 1)
    assert sorted(out.node.tolist()) == nodes and sorted(out.edge.tolist()) == edges
    loader = LinkNeighborLoader(data, [], neighbor_sampler=sampler, neg_sampling="binary", batch_size=50, seed=0)
    for batch in loader:
        assert batch.edge_label.numel() == batch.edge_label_index.size(1) == 2 * int(batch.edge_label.sum())


def test_a_pair_of_stores_gives_the_samples_of_the_data():
    data = random_data(1)
    stores = as_stores(data)
    of = lambda given: BidirectionalNeighborSampler(given, [-1, -1]).sample_from_nodes(  # noqa: E731
        NodeSamplerInput(None, torch.arange(9)), key=4
    )
    ours, want = of(stores), of(data)
    assert sorted(ours.node.tolist()) == sorted(want.node.tolist())
    assert pairs(ours.global_row, ours.global_col) == pairs(want.global_row, want.global_col)


def as_stores(data: Data) -> tuple[Any, Any]:
    from torch_geometric.testing import MyFeatureStore, MyGraphStore

    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(torch.rand(data.num_nodes, 2), group_name=None, attr_name="x", index=None)
    graph.put_edge_index(data.edge_index, edge_type=None, layout="coo", size=(data.num_nodes, data.num_nodes))
    return features, graph


def test_settings_may_be_changed_later():
    data = random_data(2)
    sampler = BidirectionalNeighborSampler(data, NumNeighbors([2]))
    sampler.num_neighbors, sampler.disjoint = [-1, -1], True
    want = BidirectionalNeighborSampler(data, [-1, -1], disjoint=True)
    a, b = (each.sample_from_nodes(NodeSamplerInput(None, long(1, 2)), key=0) for each in (sampler, want))
    assert torch.equal(a.edge, b.edge) and torch.equal(a.batch, b.batch)
    assert sampler.num_neighbors.values == [-1, -1] and sampler.num_nodes == 60 and not sampler.is_hetero
    assert "num_neighbors=[-1, -1]" in repr(sampler)


def test_what_the_sampler_does_not_take_is_refused_by_name():
    data, hetero = random_data(1), random_hetero()
    for make, kind, text in (
        (lambda: BidirectionalNeighborSampler(hetero, [2]), NotImplementedError, "data must be a torch_geometric.data.Data"),
        (lambda: BidirectionalNeighborSampler(7, [2]), TypeError, "data must be a torch_geometric.data.Data"),
        (lambda: BidirectionalNeighborSampler(data, {("a", "b", "c"): [2]}), ValueError, "must be one list, got numbers by edge type"),
        (lambda: BidirectionalNeighborSampler(data, [2], temporal_strategy="last"), ValueError, "needs times"),
        (lambda: BidirectionalNeighborSampler(data, [2], time_window=3), ValueError, "time_window=3 needs times"),
        (lambda: BidirectionalNeighborSampler(data, [-3]), ValueError, "must be an integer >= 0, or -1"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            make()
