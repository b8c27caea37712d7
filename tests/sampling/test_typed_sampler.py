"""Laws of sampling over several vertex types, with trees, times and weights: what a batch may hold, and with which probability."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import reference
import torch
from graphs import RELATIONS, random_hetero, star
from odd_samples import FANOUTS, random_data, same, some_seeds
from reference import FALSE_ALARM
from samplers import Sampler, TypedSampler
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.sampler.utils import to_bidirectional
from typed_reference import as_lists, typed_reference

from salientpp import Graph, NeighborSampler, ops
from salientpp.graph.clock import Clock
from salientpp.graph.typed import TypedGraph
from salientpp.ops import join_key

REPLACE = pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
NONE = torch.empty(0, dtype=torch.int64)


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def typed(data: Data | HeteroData, fanouts: Any, **options: Any) -> TypedSampler:
    """Makes a sampler of all relations; ``fanouts`` are for all of them, or by relation."""
    read = {name: options.pop(name) for name in ("time_attr", "weight_attr", "backward", "linked") if name in options}
    graph = TypedGraph.from_data(data, **read)
    per_relation = (
        [fanouts[name] for name in graph.edge_types] if isinstance(fanouts, dict) else [fanouts] * len(graph.edge_types)
    )
    return TypedSampler(graph, per_relation, **options)


def same_samples(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in vars(a))


# --- both samplers draw the same where both apply ---------------------------------------------------------


@REPLACE
@pytest.mark.parametrize("seed", range(6))
def test_one_relation_without_options_draws_the_same_bits_as_the_plain_sampler(seed, replace):
    data = random_data(seed)
    narrow = Graph.from_data(data)
    for graph in (
        narrow,
        Graph(narrow.indptr, narrow.indices.long(), narrow.edge_id),
        Graph(narrow.indptr, narrow.indices),
        Graph.from_data(data, linked=True),
    ):
        for fanouts, repeats in itertools.product(FANOUTS, (False, True)):
            seeds, key = some_seeds(seed, 60, repeats), join_key(seed, len(fanouts))
            plain = Sampler(graph, fanouts, replace).sample(seeds, key)
            other = TypedSampler(TypedGraph.of(graph), [fanouts], replace).sample({None: seeds}, key)
            assert same_samples(plain, other), fanouts


def test_both_samplers_draw_the_same_in_batches_of_many_blocks_with_hubs():
    graph = Graph.from_data(random_data(5, 3000, 40_000))
    seeds = some_seeds(6, 3000)
    for fanouts in ([10, 5], [70, 60]):
        other = TypedSampler(TypedGraph.of(graph), [fanouts]).sample({None: seeds}, 77)
        assert same_samples(Sampler(graph, fanouts).sample(seeds, 77), other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replace": True},
        {"disjoint": True},
        {"induced": True},
        {"shared": True},
        {"backward": True, "disjoint": True},
        {"weight_attr": "weight"},
        {"time_attr": "time", "disjoint": True},
        {"time_attr": "edge_time", "last": True, "disjoint": True},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_linked_relations_give_the_same_samples(options):
    data, now = random_data(3), {None: torch.full((60,), 5)} if "time_attr" in options else None
    apart, linked = (typed(data, [4, 3], linked=linked, **options) for linked in (False, True))
    (ids,), (beside,) = apart.graph.relations, linked.graph.relations
    assert ids.links is None and beside.links is not None and ids.edge_id.dtype == torch.int32
    assert beside.nbytes == ids.nbytes + 4 * data.num_edges
    seeds = {None: torch.randperm(60, generator=torch.Generator().manual_seed(1))}
    for key in range(3):
        assert same_samples(apart.sample(seeds, key, now), linked.sample(seeds, key, now))
    for relation in (beside, copy.deepcopy(beside), pickle.loads(pickle.dumps(beside))):
        assert relation.edge_id is None and torch.equal(relation.links >> 32, ids.edge_id.long())
        assert torch.equal(relation.links & 0xFFFFFFFF, ids.indices.long())


def test_sorted_edges_need_no_links():
    data = random_data(3)
    data.edge_index = data.edge_index[:, data.edge_index[1].sort(stable=True).indices]
    (relation,) = TypedGraph.from_data(data, is_sorted=True, linked=True).relations
    assert relation.links is None and relation.edge_id is None


def test_sorted_edges_may_not_have_falling_times_that_lie_far_apart():
    data = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), when=torch.tensor([3.0, -3.0]), num_nodes=3)
    with pytest.raises(
        ValueError, match=r"the times of the edges do not ascend inside a neighbour list \(edges 0 and 1\)"
    ):
        NeighborSampler(data, [2], time_attr="when", is_sorted=True)


# --- the slow reference -----------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"disjoint": True, "replace": True},
    {"induced": True},
    {"induced": True, "disjoint": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"weight_attr": "weight", "disjoint": True, "induced": True},
    {"time_attr": "time"},
    {"time_attr": "time", "last": True},
    {"time_attr": "time", "last": True, "replace": True},
    {"time_attr": "time", "induced": True},
    {"time_attr": "edge_time"},
    {"time_attr": "edge_time", "replace": True, "weight_attr": "weight"},
    {"time_attr": "edge_time", "last": True, "weight_attr": "weight"},
    {"time_attr": "time", "weight_attr": "weight"},
    {"shared": True},
    {"shared": True, "disjoint": True, "induced": True},
    {"shared": True, "time_attr": "time"},
    {"shared": True, "time_attr": "edge_time", "last": True},
]
EVERY_OPTION = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items()) or "plain"
)


def by_reference(sampler: TypedSampler, seeds: dict, key: int, seed_time: dict | None) -> tuple:
    options = {name: getattr(sampler, name) for name in ("replace", "disjoint", "last", "induced", "shared")}
    return typed_reference(sampler.graph, sampler.fanouts, seeds, key, seed_time or None, **options)


def assert_is_the_references(sampler: TypedSampler, seeds: dict, key: int, seed_time: dict | None = None) -> None:
    out = sampler.sample(seeds, key, seed_time)
    n_id, tree, edge_index, e_id, num_nodes, num_edges = by_reference(sampler, seeds, key, seed_time)
    listed = lambda value: as_lists(list(value.values()) if isinstance(value, dict) else [value])  # noqa: E731
    assert listed(out.node) == n_id
    assert out.batch is None if not sampler.disjoint else listed(out.batch) == tree
    assert [list(ends) for ends in zip(listed(out.row), listed(out.col))] == edge_index
    assert listed(out.edge) == e_id
    counts = (out.num_sampled_nodes, out.num_sampled_edges)
    if sampler.induced:
        assert counts == (None, None)
    else:
        assert [list(c.values()) if isinstance(c, dict) else [c] for c in counts] == [num_nodes, num_edges]


@EVERY_OPTION
@pytest.mark.parametrize("seed", range(2))
def test_a_homogeneous_sample_equals_the_slow_reference(seed, options):
    data = random_data(seed + 10)
    options = {"disjoint": True, **options} if "time_attr" in options else options
    for fanouts, repeats in itertools.product(([3, 2], [2, -1], [-1, 0, 2], [7, 50]), (False, True)):
        sampler = typed(data, fanouts, **options)
        seeds = some_seeds(seed, 60, repeats)
        seed_time = {None: data.time[seeds] + seed} if "time_attr" in options else None
        assert_is_the_references(sampler, {None: seeds}, join_key(seed, 3), seed_time)


@EVERY_OPTION
@pytest.mark.parametrize("backward", [False, True], ids=["", "backward"])
def test_a_sample_over_several_types_equals_the_slow_reference(backward, options):
    data = random_hetero(seed=3)
    options = {"disjoint": True, **options} if "time_attr" in options else options
    mixed = dict(zip(RELATIONS, ([3, 2, 1], [2, 0, 4], [0, 5, 1], [-1, 2, -1])))
    for fanouts, (key, names) in itertools.product(
        (mixed, [2, 3]), enumerate([["paper"], ["author", "paper"], ["venue", "author"]])
    ):
        sampler = typed(data, fanouts, backward=backward, **options)
        seeds = {name: some_seeds(key, data[name].num_nodes, repeats=True) for name in names}
        seed_time = {name: data[name].time[ids] + 1 for name, ids in seeds.items()} if "time_attr" in options else None
        assert_is_the_references(sampler, seeds, key, seed_time)


def test_a_batch_of_many_blocks_equals_the_slow_reference():
    # The kernel takes 64 vertices at a time; this batch has hundreds of each type.
    data = random_hetero(6000, seed=4, paper=900, author=700, venue=30)
    seeds = {"paper": torch.arange(300), "author": torch.arange(100)}
    assert_is_the_references(typed(data, [4, 3], disjoint=True), seeds, 9)
    assert_is_the_references(typed(data, [4, 3], weight_attr="weight"), seeds, 9)


@pytest.mark.parametrize("options", [{}, {"induced": True}, {"weight_attr": "weight", "replace": True}], ids=str)
def test_the_kind_of_map_changes_nothing(options, monkeypatch):
    data = random_hetero(6000, seed=4, paper=900, author=700, venue=30)
    sampler = typed(data, [4, 3], **options)
    seeds = {"paper": torch.randint(900, (300,)), "author": torch.arange(100)}
    stamps = [sampler.sample(seeds, key) for key in range(3)]
    for budget in (0, 4 * 1630 - 1):  # one byte too few for all three types together
        with monkeypatch.context() as patch:
            limited = partial(ops.sample_typed_neighbors, map_budget_bytes=budget)
            patch.setattr(ops, "sample_typed_neighbors", limited)
            assert all(same_samples(sampler.sample(seeds, key), stamps[key]) for key in range(3))


def test_ids_of_more_than_32_bits_are_distinguished_in_trees():
    """Types with this number of vertices can only be drawn from: a target's lists need an entry for every vertex."""
    huge, width = 2**40, 2**32
    sources = torch.tensor([5, 5 + width, 5 + 2 * width, huge - 1, 5])
    for disjoint in (False, True):
        n_id, tree, edge_index, *_ = ops.sample_typed_neighbors(
            [torch.tensor([0, 5, 5])], [sources], [None], [None], [None], [None], [1], [0], [2, huge], [None, None],
            [long(0, 1, 0), NONE], [None, None], [], [0, 3], [-1], 1, 0, disjoint=disjoint,
        )  # fmt: skip
        once = [5, 5 + width, 5 + 2 * width, huge - 1]
        assert n_id[1].tolist() == (once * 2 if disjoint else once)
        assert edge_index[0][0].tolist() == [0, 1, 2, 3, 0] + ([4, 5, 6, 7, 4] if disjoint else [0, 1, 2, 3, 0])
        assert not disjoint or tree[1].tolist() == [0] * 4 + [2] * 4


# --- several types ----------------------------------------------------------------------------------------


def in_edges(data: HeteroData) -> dict:
    """Returns the numbers of the edges into each target, per relation."""
    lists: dict = {name: {} for name in data.edge_types}
    for name in data.edge_types:
        for e, v in enumerate(data[name].edge_index[1].tolist()):
            lists[name].setdefault(v, []).append(e)
    return lists


@pytest.mark.parametrize("seeds", [{"paper": [3, 1]}, {"venue": [0]}, {"author": [2], "paper": [5]}], ids=str)
def test_minus_one_gives_the_whole_neighbourhood_hop_by_hop(seeds):
    data, lists = random_hetero(120, seed=5), in_edges(random_hetero(120, seed=5))
    out = typed(data, [-1, -1]).sample({name: long(*ids) for name, ids in seeds.items()}, 0)
    known = {name: set(seeds.get(name, [])) for name in data.node_types}
    frontier = {name: set(ids) for name, ids in known.items()}
    edges: dict = {name: set() for name in data.edge_types}
    for hop in range(2):
        found = {name: set() for name in data.node_types}
        for name in data.edge_types:
            drawn = [e for v in frontier[name[2]] for e in lists[name].get(v, [])]
            assert out.num_sampled_edges[name][hop] == len(drawn)
            edges[name].update(drawn)
            found[name[0]].update(data[name].edge_index[0, drawn].tolist())
        frontier = {name: ids - known[name] for name, ids in found.items()}
        for name, ids in frontier.items():
            assert out.num_sampled_nodes[name][hop + 1] == len(ids)
            known[name] |= ids
    for name in data.node_types:
        assert len(out.node[name]) == len(known[name]) and set(out.node[name].tolist()) == known[name]
    for name in data.edge_types:
        assert len(out.edge[name]) == len(edges[name]) and set(out.edge[name].tolist()) == edges[name]


@REPLACE
@pytest.mark.parametrize("seed", range(4))
def test_every_vertex_draws_in_every_relation_one_hop_after_it_was_found(seed, replace):
    data = random_hetero(seed=seed)
    lists = in_edges(data)
    fanouts = dict(zip(RELATIONS, ([3, 2], [2, 0], [0, 5], [1, 1])))
    out = typed(data, fanouts, replace=replace).sample({"paper": torch.arange(20), "author": torch.arange(9)}, seed)
    bounds = {name: np.cumsum([0, *counts]) for name, counts in out.num_sampled_nodes.items()}
    assert {name: b[-1] for name, b in bounds.items()} == {name: len(ids) for name, ids in out.node.items()}
    for name in data.edge_types:
        source, _, target = name
        ends = torch.stack([out.node[source][out.row[name]], out.node[target][out.col[name]]])
        assert torch.equal(ends, data[name].edge_index[:, out.edge[name]]), "each is the user's edge of that number"
        first = np.cumsum([0, *out.num_sampled_edges[name]])
        assert first[-1] == len(out.edge[name])
        for hop in range(2):
            drawn = out.edge[name][first[hop] : first[hop + 1]].tolist()
            targets = Counter(out.col[name][first[hop] : first[hop + 1]].tolist())
            for i in range(bounds[target][hop], bounds[target][hop + 1]):
                degree, fanout = len(lists[name].get(int(out.node[target][i]), [])), fanouts[name][hop]
                assert targets.pop(i, 0) == (fanout * (degree > 0) if replace else min(fanout, degree))
            assert not targets, "no other vertex is expanded"
            assert replace or len(set(drawn)) == len(drawn)


def test_ids_of_32_and_64_bits_give_the_same():
    narrow = TypedGraph.from_data(random_hetero(seed=6), weight_attr="weight")
    assert all(r.indices.dtype == torch.int32 for r in narrow.relations)
    wide = [type(r)(**{**vars(r), "indices": r.indices.long()}) for r in narrow.relations]
    wide = TypedGraph(narrow.node_types, narrow.num_vertices, narrow.edge_types, tuple(wide), narrow.node_time)
    for options in ({}, {"induced": True}, {"disjoint": True, "replace": True}):
        a, b = (
            TypedSampler(graph, [[3, 2]] * 4, **options).sample({"paper": torch.arange(20)}, 5)
            for graph in (narrow, wide)
        )
        assert same_samples(a, b)


def test_types_without_vertices_edges_or_seeds_are_empty_in_the_batch():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes, data["c"].num_nodes = 3, 2, 0
    data["b", "to", "a"].edge_index = torch.tensor([[0, 1], [0, 0]])
    data["c", "to", "a"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    out = typed(data, [2, 2]).sample({"a": long(0, 1)}, 0)
    assert {name: ids.tolist() for name, ids in out.node.items()} == {"a": [0, 1], "b": [0, 1], "c": []}
    assert out.num_sampled_nodes == {"a": [2, 0, 0], "b": [0, 2, 0], "c": [0, 0, 0]}
    assert out.num_sampled_edges == {("b", "to", "a"): [2, 0], ("c", "to", "a"): [0, 0]}
    empty = typed(data, [2]).sample({"a": long()}, 0)
    assert all(len(ids) == 0 for ids in empty.node.values()) and all(len(ids) == 0 for ids in empty.edge.values())


# --- disjoint trees ---------------------------------------------------------------------------------------


def assert_is_a_forest(n_id: dict, tree: dict, row: dict, col: dict, num_seeds: int) -> None:
    """Checks that every vertex occurs once in its tree, edges stay in a tree, and every tree is connected to its seed."""
    places = {
        (name, i): (int(tree[name][i]), name, int(n_id[name][i])) for name in n_id for i in range(len(n_id[name]))
    }
    assert len(set(places.values())) == len(places)
    above: dict = {}
    for (source, _, target), ends in row.items():
        for i, j in zip(ends.tolist(), col[source, _, target].tolist()):
            assert places[source, i][0] == places[target, j][0]
            above.setdefault((source, i), []).append((target, j))
    seeds = [place for place in places if place[1] < num_seeds]
    reached, grew = set(seeds), True
    while grew:
        more = {
            place for place, targets in above.items() if place not in reached and any(t in reached for t in targets)
        }
        reached, grew = reached | more, bool(more)
    assert reached == set(places)


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"}], ids=str)
def test_every_seed_grows_a_tree_of_its_own(options):
    data = random_hetero(seed=7)
    seeds = long(4, 9, 4, 0)
    out = typed(data, [3, 2, 2], disjoint=True, **options).sample({"paper": seeds}, 1)
    assert torch.equal(out.node["paper"][:4], seeds) and out.batch["paper"][:4].tolist() == [0, 1, 2, 3]
    known = {(name, int(t), int(v)) for name in out.node for t, v in zip(out.batch[name], out.node[name])}
    assert len(known) == sum(map(len, out.node.values())), "known by tree and id"
    assert any(out.node[name].unique().numel() < len(out.node[name]) for name in out.node), "trees may share vertices"
    for name in data.edge_types:
        assert torch.equal(out.batch[name[0]][out.row[name]], out.batch[name[2]][out.col[name]])
        ends = torch.stack([out.node[name[0]][out.row[name]], out.node[name[2]][out.col[name]]])
        assert torch.equal(ends, data[name].edge_index[:, out.edge[name]])


def test_trees_are_connected_and_with_all_neighbours_equal_the_seeds_own_batch():
    data = random_hetero(120, seed=8)
    sampler, seeds = typed(data, [-1, -1], disjoint=True), [3, 8, 3, 40]
    together = sampler.sample({"paper": long(*seeds)}, 0)
    papers = dict(together.node)
    for number, seed in enumerate(seeds):
        alone = sampler.sample({"paper": long(seed)}, 0)
        for name in papers:
            assert sorted(papers[name][together.batch[name] == number].tolist()) == sorted(alone.node[name].tolist())
        for name in data.edge_types:
            in_tree = together.batch[name[2]][together.col[name]] == number
            assert sorted(together.edge[name][in_tree].tolist()) == sorted(alone.edge[name].tolist())
    homogeneous = typed(random_data(1), [3, 2], disjoint=True).sample({None: torch.arange(15)}, 4)
    edges = {("", "", ""): homogeneous.row}, {("", "", ""): homogeneous.col}
    assert_is_a_forest({"": homogeneous.node}, {"": homogeneous.batch}, *edges, 15)


def test_trees_of_several_types_are_numbered_in_the_order_of_the_seeds():
    sampler = typed(random_hetero(seed=9), [2], disjoint=True)
    for names, first in (
        (["paper", "author"], {"paper": 0, "author": 3}),
        (["author", "paper"], {"author": 0, "paper": 3}),
    ):
        out = sampler.sample({name: torch.arange(3) for name in names}, 0)
        assert {name: out.batch[name][:3].tolist() for name in names} == {
            name: [k, k + 1, k + 2] for name, k in first.items()
        }


def test_two_trees_of_one_seed_draw_independently():
    sampler = typed(Data(edge_index=star(3), num_nodes=4), [1], disjoint=True)
    joint = [tuple(sampler.sample({None: long(0, 0)}, key).edge.tolist()) for key in range(5000)]
    p = reference.p_of_equal_counts(joint, 9)
    assert p > FALSE_ALARM, p


def test_two_relations_of_one_vertex_draw_independently():
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 4
    data["b", "to", "a"].edge_index = data["b", "of", "a"].edge_index = star(3)
    sampler = typed(data, [1])
    for options in ({}, {"disjoint": True}):
        sampler = typed(data, [1], **options)
        joint = [tuple(int(edge) for edge in sampler.sample({"a": long(0)}, key).edge.values()) for key in range(5000)]
        p = reference.p_of_equal_counts(joint, 9)
        assert p > FALSE_ALARM, p


# --- times ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
@pytest.mark.parametrize(
    "options", [{}, {"last": True}, {"replace": True}, {"weight_attr": "weight"}, {"induced": True}], ids=str
)
def test_no_tree_sees_neighbours_newer_than_its_seed(time_attr, options):
    data = random_hetero(seed=11)
    now = torch.from_numpy(np.random.default_rng(1).integers(-1, 11, size=40))
    for fanout in (3, -1):
        out = typed(data, [fanout, fanout], disjoint=True, time_attr=time_attr, **options).sample(
            {"paper": torch.arange(40)}, 2, {"paper": now}
        )
        equal = 0
        for name in data.edge_types:
            seed_time = now[out.batch[name[2]][out.col[name]]]
            time = (
                data[name].edge_time[out.edge[name]]
                if time_attr == "edge_time"
                else data[name[0]].time[out.node[name[0]][out.row[name]]]
            )
            assert bool((time <= seed_time).all())
            equal += int((time == seed_time).sum())
        assert equal > 0, "what is as old as the seed is seen"


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
def test_fanout_minus_one_takes_all_neighbours_that_are_not_newer(time_attr):
    data = random_data(12)
    lists = {v: (data.edge_index[1] == v).nonzero().flatten().tolist() for v in range(60)}
    time = data.time[data.edge_index[0]] if time_attr == "time" else data.edge_time
    seeds = torch.arange(60)
    out = typed(data, [-1], disjoint=True, time_attr=time_attr).sample({None: seeds}, 0, {None: data.time})
    for v in range(60):
        visible = {e for e in lists[v] if time[e] <= data.time[v]}
        assert set(out.edge[out.batch[out.col] == v].tolist()) == visible


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
def test_last_takes_exactly_the_latest_visible_neighbours(time_attr, kind):
    data = random_data(13)
    generator = torch.Generator().manual_seed(13)
    for name, size in (("time", 60), ("edge_time", 400)):  # no ties; some times are negative
        data[name] = (torch.randperm(size, generator=generator) - size // 3).to(kind) * (
            0.37 if kind.is_floating_point else 1
        )
    time = data.time[data.edge_index[0]] if time_attr == "time" else data.edge_time
    now = torch.full((60,), 9, dtype=kind)
    sampler = typed(data, [4], disjoint=True, last=True, time_attr=time_attr)
    out = sampler.sample({None: torch.arange(60)}, 0, {None: sampler.graph.clock.read(now, "now")})
    for v in range(60):
        seen = ((data.edge_index[1] == v) & (time <= 9)).nonzero().flatten()
        drawn = out.edge[out.batch[out.col] == v]
        latest = seen[time[seen].argsort(descending=True)][:4]
        assert sorted(time[drawn].tolist()) == sorted(time[latest].tolist())  # the source of two edges has one time


@pytest.mark.parametrize(("visible", "fanout"), [(5, 2), (4, 1), (6, 3)])
def test_uniform_draws_are_uniform_over_visible_neighbours(visible, fanout):
    # 9 leaves with times 0 to 8; the seed sees those up to visible - 1.
    data = Data(edge_index=star(9), num_nodes=10, time=torch.cat([long(0), torch.arange(9)]))
    sampler = typed(data, [fanout], disjoint=True, time_attr="time")
    copies, now = torch.zeros(200, dtype=torch.int64), torch.full((200,), visible - 1)
    drawn = torch.cat([sampler.sample({None: copies}, key, {None: now}).edge for key in range(100)]).view(-1, fanout)
    subsets = [tuple(sorted(row)) for row in drawn.tolist()]
    assert max(map(max, subsets)) < visible
    p = reference.p_of_equal_counts(subsets, len(list(itertools.combinations(range(visible), fanout))))
    assert p > FALSE_ALARM, p


def test_seeds_have_their_own_time_unless_another_is_given():
    data = Data(edge_index=star(9), num_nodes=10, time=torch.cat([long(4), torch.arange(9)]))
    sampler = NeighborSampler(data, [-1], time_attr="time")
    ages = lambda time: sampler.sample_from_nodes(NodeSamplerInput(None, long(0), time)).edge.tolist()  # noqa: E731
    assert sorted(ages(None)) == [0, 1, 2, 3, 4]
    assert sorted(ages(long(7))) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sorted(ages(torch.tensor([1.5]))) == [0, 1], "a real time among whole ones"
    assert ages(long(-1)) == []


def test_edges_with_times_need_seeds_with_times():
    data = random_data(1)
    sampler = NeighborSampler(data, [2], time_attr="edge_time")
    with pytest.raises(ValueError, match="the seeds need times, since edges have times; pass input_time"):
        sampler.sample_from_nodes(NodeSamplerInput(None, long(0, 1)))
    hetero = random_hetero()
    del hetero["venue"].time
    with pytest.raises(
        ValueError, match="the seeds need times, since the vertices of 'venue' have none; pass input_time"
    ):
        NeighborSampler(hetero, [2], time_attr="time").sample_from_nodes(
            NodeSamplerInput(None, long(0), input_type="venue")
        )


def test_vertices_without_times_are_always_visible():
    data = random_hetero(seed=14)
    del data["venue"].time
    out = typed(data, [-1], disjoint=True, time_attr="time").sample(
        {"paper": torch.arange(60)}, 0, {"paper": torch.full((60,), -5)}
    )
    prints = data["venue", "prints", "paper"].num_edges
    assert len(out.edge["venue", "prints", "paper"]) == prints
    assert all(len(out.edge[name]) == 0 for name in RELATIONS[:3])


def test_a_clock_keeps_the_order_of_its_times():
    real = torch.tensor(
        [-float("inf"), -1e300, -2.5, -1.0, -1e-320, -0.0, 0.0, 1e-320, 0.5, 1.0, 3e9, 1e300, float("inf")],
        dtype=torch.float64,
    )
    for clock, values in ((Clock(True), real), (Clock(True), torch.arange(-5, 5)), (Clock(False), torch.arange(-5, 5))):
        read = clock.read(values, "t")
        assert read.dtype == torch.int64
        assert torch.equal(values[:, None] < values[None], read[:, None] < read[None])
        assert torch.equal(values[:, None] == values[None], read[:, None] == read[None])
    assert Clock(False).read(torch.tensor([2.0, 2.5, -2.5, float("inf"), -float("inf")]), "t").tolist()[:3] == [
        2,
        2,
        -3,
    ]
    huge = Clock(False).read(torch.tensor([float("inf"), -float("inf")]), "t").tolist()
    assert huge[0] >= 2**62 and huge[1] <= -(2**62)
    with pytest.raises(ValueError, match="t must hold numbers, got NaN at position 1"):
        Clock(True).read(torch.tensor([0.0, float("nan")]), "t")


def seen_at(times: Tensor, now: Tensor) -> list[int]:
    """Returns the places of the edge times that a seed sees at ``now``."""
    data = Data(edge_index=star(len(times)), num_nodes=len(times) + 1, edge_time=times)
    return sorted(
        NeighborSampler(data, [-1], time_attr="edge_time")
        .sample_from_nodes(NodeSamplerInput(None, long(0), now))
        .edge.tolist()
    )


NANOSECONDS = 1_700_000_000_000_000_000


@pytest.mark.parametrize("middle", [2**53, NANOSECONDS, -NANOSECONDS, 2**62, 2**63 - 200, -(2**63) + 200])
def test_integer_and_float_times_compare_by_value_without_rounding(middle):
    whole = [middle + step for step in (-130, -65, -64, -2, -1, 0, 1, 2, 3, 64, 65, 127, 130)]
    real = sorted({float(time) for time in whole} | {float(middle - 1000)})
    for now in real:  # the seed has a floating-point time
        assert seen_at(long(*whole), torch.tensor([now], dtype=torch.float64)) == [
            k for k, time in enumerate(whole) if time <= now
        ]
    for now in whole:
        assert seen_at(torch.tensor(real, dtype=torch.float64), long(now)) == [
            k for k, time in enumerate(real) if time <= now
        ]


def test_infinite_times_see_everything_or_nothing():
    whole = long(-(2**63) + 1, 0, 2**62 + 1, 2**63 - 1)
    for now, seen in (
        (float("inf"), [0, 1, 2, 3]),
        (1e300, [0, 1, 2, 3]),
        (2.0**62, [0, 1]),
        (-1e300, []),
        (-float("inf"), []),
    ):
        assert seen_at(whole, torch.tensor([now], dtype=torch.float64)) == seen


@pytest.mark.parametrize("middle", [2**53, NANOSECONDS, 0])
def test_types_of_a_graph_may_have_integer_and_float_times(middle):
    """Compares with Python's numbers, which compare integers and floats exactly."""
    steps = [-300, -128, -64, -1, 0, 1, 63, 64, 65, 128, 300]
    data = HeteroData()
    data["a"].time = long(*(middle + step for step in steps))
    data["b"].time = torch.tensor(
        [float(middle + step) + (0.5 if middle == 0 else 0.0) for step in steps], dtype=torch.float64
    )
    size = data["a"].num_nodes = data["b"].num_nodes = len(steps)
    ends = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T
    for source, target in itertools.product("ab", "ab"):
        data[source, "to", target].edge_index = ends
    sampler = NeighborSampler(data, [-1], time_attr="time")
    times = {name: data[name].time.tolist() for name in "ab"}
    moments = {
        "a": long(middle - 5, middle + 5),
        "b": torch.tensor([float(middle) - 0.25, float(middle) + 0.25], dtype=torch.float64),
    }
    for seeds, given in (
        ("a", None),
        ("b", None),
        ("a", moments["a"]),
        ("a", moments["b"]),
        ("b", moments["a"]),
        ("b", moments["b"]),
    ):
        ids = torch.arange(size) if given is None else torch.zeros(len(given), dtype=torch.int64)
        out = sampler.sample_from_nodes(NodeSamplerInput(None, ids, given, seeds))
        for source in "ab":
            name = source, "to", seeds
            for tree, now in enumerate((data[seeds].time if given is None else given).tolist()):
                seen = out.node[source][out.row[name]][out.batch[seeds][out.col[name]] == tree]
                assert set(seen.tolist()) == {v for v, time in enumerate(times[source]) if time <= now}, (
                    seeds,
                    source,
                    now,
                )


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (
            torch.ones(3, dtype=torch.complex64),
            "'?edge_time'? must be a tensor of integers or floating-point numbers, got torch.complex64",
        ),
        (torch.tensor([0, 2**63, 1], dtype=torch.uint64), r"must be < 2\^63, got 9223372036854775808 at position 1"),
        (torch.tensor([0.0, 1.0, float("nan")]).half(), "must hold numbers, got NaN at position 2"),
        ([0, 1, 2], "must be a tensor of integers or floating-point numbers, got list"),
    ],
)
def test_times_that_cannot_be_ordered_are_refused(time, text):
    data = Data(edge_index=star(3), num_nodes=4)
    data.edge_time = time
    with pytest.raises(ValueError, match=text):
        NeighborSampler(data, [-1], time_attr="edge_time")


def test_unsigned_times_are_integer_times():
    assert seen_at(torch.tensor([0, 5, 2**63 - 1], dtype=torch.uint64), torch.tensor([5], dtype=torch.uint8)) == [0, 1]


def test_float_times_compare_as_floats():
    times = torch.tensor([0.0, -1.5, 0.25, 1e-30, 2.5])
    data = Data(edge_index=star(5), num_nodes=6, edge_time=times)
    sampler = NeighborSampler(data, [-1], time_attr="edge_time")
    for now in (-2.0, -1.5, -0.0, 0.0, 0.24, 0.25, 3.0):
        out = sampler.sample_from_nodes(NodeSamplerInput(None, long(0), torch.tensor([now])))
        assert sorted(out.edge.tolist()) == (times <= now).nonzero().flatten().tolist()
    whole = sampler.sample_from_nodes(NodeSamplerInput(None, long(0), long(1)))
    assert sorted(whole.edge.tolist()) == [0, 1, 2, 3]


# --- weights ----------------------------------------------------------------------------------------------


def weighted_stars(weights: list[float], copies: int, **more: Any) -> tuple[Data, int]:
    """Makes stars: each centre draws from ``len(weights)`` leaves of its own, with these weights; its edges are consecutive."""
    degree = len(weights)
    centre = torch.arange(copies).repeat_interleave(degree)
    leaf = copies + torch.arange(copies * degree)
    weight = torch.tensor(weights, dtype=torch.float64).repeat(copies)
    return Data(edge_index=torch.stack([leaf, centre]), num_nodes=copies * (degree + 1), weight=weight, **more), degree


def weighted_draws(
    weights: list[float], fanout: int, *, keys: int = 100, copies: int = 200, **options: Any
) -> list[tuple[int, ...]]:
    """Returns places in the list, per draw; ascending unless drawn with replacement."""
    data, degree = weighted_stars(weights, copies)
    sampler = typed(data, [fanout], weight_attr="weight", **options)
    drawn = torch.cat([sampler.sample({None: torch.arange(copies)}, key).edge for key in range(keys)])
    return list(map(tuple, (drawn.view(keys * copies, -1) % degree).tolist()))


SKEWED = [
    ([1.0, 1.0], 1),
    ([1.0, 3.0], 1),
    ([0.2, 0.3, 0.5], 1),
    ([0.2, 0.3, 0.5], 2),
    ([1.0, 2.0, 4.0, 8.0], 2),
    ([1.0, 2.0, 4.0, 8.0], 3),
    ([100.0, 1.0, 1.0, 1.0, 1.0], 2),
    ([100.0, 1.0, 1.0, 1.0, 1.0], 4),
    ([5.0, 5.0, 1e-3, 2.0, 3.0, 0.5], 3),
    ([1e-200, 3e-200, 2e-200], 1),
    ([1e200, 3e200, 2e200], 2),
]


@pytest.mark.parametrize(("weights", "fanout"), SKEWED, ids=str)
def test_weighted_draws_are_successive_sampling_without_replacement(weights, fanout):
    draws = weighted_draws(weights, fanout)
    p = reference.p_of_chances(draws, reference.successive_sampling(weights, fanout))
    assert p > FALSE_ALARM, p


@pytest.mark.parametrize(
    ("weights", "fanout"),
    [([1.0, 3.0], 3), ([0.2, 0.3, 0.5], 2), ([8.0, 0.0, 1.0, 1.0], 3), ([1e-3, 1.0, 5.0, 2.0], 2)],
    ids=str,
)
def test_weighted_draws_with_replacement_are_independent(weights, fanout):
    draws = weighted_draws(weights, fanout, replace=True)
    shares = [w / sum(weights) for w in weights]
    chances = {
        row: float(np.prod([shares[k] for k in row])) for row in itertools.product(range(len(weights)), repeat=fanout)
    }
    p = reference.p_of_chances(draws, chances)
    assert p > FALSE_ALARM, p


def test_arrivals_are_exact_to_one_in_a_trillion():
    """Two neighbours have weights with which they arrive at nearly the same time, so the kernel's logarithm decides the order."""
    for key in range(600):
        stream = reference.Stream(reference.mix64(reference.join_key(key, 0)))
        exponentials = [-math.log(reference.uniform(stream)) for _ in range(2)]
        for first, sooner in itertools.product((0, 1), (1e-12, 1e-9)):
            weights = torch.tensor(exponentials, dtype=torch.float64)
            weights[first] *= 1 + sooner
            data = Data(edge_index=star(2), num_nodes=3, weight=weights)
            assert typed(data, [1], weight_attr="weight").sample({None: long(0)}, key).edge.tolist() == [first]


@pytest.mark.parametrize("kind", ["alike", "steep", "one outweighs all", "mostly none", "far apart", "equal"])
@pytest.mark.parametrize("degree", [3, 40, 700])
def test_long_lists_of_any_weights_equal_the_slow_reference(kind, degree):
    """The kernel draws the earliest arrivals, however it guesses them."""
    generator = np.random.default_rng(degree)
    uniform = generator.random((6, degree)) + 0.01
    weights = {
        "alike": uniform,
        "steep": uniform**40,
        "one outweighs all": np.where(np.arange(degree) == degree // 2, 1e12, uniform),
        "mostly none": np.where(generator.random((6, degree)) < 0.9, 0.0, uniform),
        "far apart": 10.0 ** generator.integers(-290, 290, (6, degree)),
        "equal": np.ones((6, degree)),
    }[kind]
    edge_index = torch.stack([torch.arange(6 * degree) % (degree + 6), torch.arange(6).repeat_interleave(degree)])
    data = Data(edge_index=edge_index, num_nodes=degree + 6, weight=torch.from_numpy(weights).flatten())
    for fanout in (1, 2, degree // 3, degree - 1):
        assert_is_the_references(typed(data, [fanout], weight_attr="weight"), {None: torch.arange(6)}, fanout)


TINY = 5e-324  # the smallest positive double


@pytest.mark.parametrize(
    ("weights", "like", "fanout"),
    [
        ([1e-310, 2e-310, 3e-310, 4e-310], [1.0, 2.0, 3.0, 4.0], 2),
        ([TINY, 2 * TINY, 3 * TINY], [1.0, 2.0, 3.0], 1),
        ([TINY, TINY, TINY, TINY], [1.0] * 4, 2),
        ([2e305, 1e305, 4e305], [2.0, 1.0, 4.0], 2),
        ([1e300, 2e-300, 1e-300, 1e-300], None, 2),
        ([8e305, 3 * TINY, TINY, 0.0], None, 2),
        ([0.0, 2e-310, 1e-310, 0.0], None, 3),
    ],
    ids=str,
)
def test_only_the_ratios_of_weights_matter(weights, like, fanout):
    if (
        like is None
    ):  # the largest weight is certainly drawn first, then the others by their ratios, and zero weights last
        like = (
            {2: [1e30, 2.0, 1.0, 1.0], 3: [0.0, 2.0, 1.0, 0.0]}[fanout]
            if weights[-1] != 0 or fanout == 3
            else [1e30, 3.0, 1.0, 0.0]
        )
    draws = weighted_draws(weights, fanout)
    chances = {row: chance for row, chance in reference.successive_sampling(like, fanout).items() if chance > 1e-20}
    assert set(draws) <= set(chances)
    assert len(chances) == 1 or reference.p_of_chances(draws, chances) > FALSE_ALARM


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1e-310, 2e-310, 1e-310], [0.25, 0.5, 0.25]),
        ([TINY, 3 * TINY], [0.25, 0.75]),
        ([4e305, 2e305, 2e305], [0.5, 0.25, 0.25]),
        ([1e-300, 1e300, 3e300, 0.0], [0.0, 0.25, 0.75, 0.0]),
    ],
    ids=str,
)
def test_with_replacement_only_the_ratios_of_weights_matter(weights, shares):
    draws = weighted_draws(weights, 2, replace=True)
    chances = {(a, b): p * q for a, p in enumerate(shares) for b, q in enumerate(shares) if p * q}
    assert set(draws) <= set(chances) and reference.p_of_chances(draws, chances) > FALSE_ALARM


def test_the_kernel_draws_from_a_list_with_an_infinite_sum():
    copies, weights = 3000, torch.full((3,), 1.5e308, dtype=torch.float64)
    indptr, indices = torch.tensor([0, 3, 3, 3, 3]), torch.tensor([1, 2, 3])
    drawn = []
    for key in range(copies):
        out = ops.sample_typed_neighbors(
            [indptr],
            [indices],
            [None],
            [None],
            [weights],
            [None],
            [0],
            [0],
            [4],
            [None],
            [long(0)],
            [None],
            [],
            [0],
            [1],
            1,
            key,
            replace=True,
        )
        drawn += out[3][0].tolist()
    assert reference.p_of_equal_counts(drawn, 3) > FALSE_ALARM


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("exponent", [-900, -40, 0, 1, 900])
def test_a_power_of_two_common_to_all_weights_changes_no_draw(exponent, replace):
    data = random_data(31)
    out = typed(data, [3, 2], weight_attr="weight", replace=replace).sample({None: torch.arange(60)}, 5)
    data.weight = data.weight * 2.0**exponent
    assert same_samples(
        out, typed(data, [3, 2], weight_attr="weight", replace=replace).sample({None: torch.arange(60)}, 5)
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_the_smallest_weights_of_every_dtype_are_drawn_by_their_ratios(kind):
    least = torch.tensor(
        [1, 2, 5], dtype={1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    ).view(kind)
    assert bool((least.double() > 0).all())
    data, degree = weighted_stars([1.0] * 3, 200)
    data.weight = least.repeat(200) if kind.itemsize > 1 else least.view(torch.uint8).repeat(200).view(kind)
    sampler = typed(data, [1], weight_attr="weight")
    drawn = torch.cat([sampler.sample({None: torch.arange(200)}, key).edge for key in range(100)]) % degree
    shares = least.double() / least.double().sum()
    assert (
        reference.p_of_chances([(k,) for k in drawn.tolist()], {(k,): float(share) for k, share in enumerate(shares)})
        > FALSE_ALARM
    )


def test_zero_weights_are_drawn_only_after_all_positive_ones():
    weights = [0.0, 2.0, 0.0, 1.0, 0.0]
    for fanout in (1, 2, 3, 4):
        draws = weighted_draws(weights, fanout)
        assert all({1, 3} <= set(row) or set(row) <= {1, 3} for row in draws)
        p = reference.p_of_chances(draws, reference.successive_sampling(weights, fanout)) if fanout != 2 else 1.0
        assert p > FALSE_ALARM, p
    assert set(itertools.chain(*weighted_draws(weights, 3, replace=True))) == {1, 3}
    assert weighted_draws(weights, 5, keys=1) == [(0, 1, 2, 3, 4)] * 200
    assert weighted_draws(weights, -1, keys=1) == [(0, 1, 2, 3, 4)] * 200


@REPLACE
def test_a_list_of_zeros_is_drawn_from_uniformly(replace):
    draws = weighted_draws([0.0] * 4, 2, replace=replace)
    p = reference.p_of_equal_counts(draws, 16 if replace else 6)
    assert p > FALSE_ALARM, p


@REPLACE
def test_equal_weights_draw_uniformly_even_from_long_lists(replace):
    draws = np.array(weighted_draws([0.3] * 150, 40, keys=20, copies=100, replace=replace))
    counts = np.bincount(draws.ravel(), minlength=150)
    p = (
        reference.p_of_equal_counts(draws.ravel().tolist(), 150)
        if replace
        else reference.p_of_equal_inclusion(counts, len(draws), 40)
    )
    assert p > FALSE_ALARM, p


def test_weights_may_have_any_numeric_dtype_and_relations_may_lack_them():
    data = random_hetero(seed=15)
    for name, kind in zip(RELATIONS, (torch.float32, torch.float16, torch.int64, torch.bool)):
        data[name].weight = (data[name].weight * 5).to(kind)
    del data[RELATIONS[0]].weight
    sampler = typed(data, [2, 2], weight_attr="weight")
    assert sampler.graph.relations[0].edge_weight is None
    out = sampler.sample({"paper": torch.arange(30), "author": torch.arange(30)}, 0)
    plain = typed(data, [2, 2]).sample({"paper": torch.arange(30), "author": torch.arange(30)}, 0)
    first = slice(0, plain.num_sampled_edges[RELATIONS[0]][0])
    assert torch.equal(out.edge[RELATIONS[0]][first], plain.edge[RELATIONS[0]][first]), (
        "without weights it draws as if there were none"
    )
    # Integers are weights too. Edges without weight into a paper come last.
    name = RELATIONS[2]
    for v in range(30):
        listed = (data[name].edge_index[1] == v).nonzero().flatten()
        drawn = out.edge[name][: out.num_sampled_edges[name][0]]
        drawn = drawn[data[name].edge_index[1, drawn] == v]
        positive = int((data[name].weight[listed] > 0).sum())
        assert int((data[name].weight[drawn] > 0).sum()) == min(positive, len(drawn))


def test_weights_and_times_together_draw_visible_neighbours_by_weight():
    weights = [4.0, 1.0, 2.0, 3.0]
    copies = 200
    data, degree = weighted_stars(weights, copies, edge_time=long(2, 0, 9, 1).repeat(copies))
    sampler = typed(data, [2], weight_attr="weight", time_attr="edge_time", disjoint=True)
    now = {None: torch.full((copies,), 5)}
    drawn = (
        torch.cat([sampler.sample({None: torch.arange(copies)}, key, now).edge for key in range(100)]).view(-1, 2)
        % degree
    )
    chances = {
        tuple(sorted((0, 1, 3)[k] for k in pair)): chance
        for pair, chance in reference.successive_sampling([4.0, 1.0, 3.0], 2).items()
    }
    p = reference.p_of_chances((tuple(sorted(row)) for row in drawn.tolist()), chances)
    assert p > FALSE_ALARM, p


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float64),
    ],
    ids=str,
)
def test_weights_are_kept_exactly_and_narrow_ones_draw_the_same_as_doubles(given, kept, replace):
    data = random_data(3, 300, 9000)
    data.weight = torch.randint(0, 200, (data.num_edges,), generator=torch.Generator().manual_seed(1)).to(given)
    narrow = typed(data, [7, 5], weight_attr="weight", replace=replace)
    data.weight = data.weight.double()
    wide = typed(data, [7, 5], weight_attr="weight", replace=replace)
    (of_narrow,), (of_wide,) = narrow.graph.relations, wide.graph.relations
    assert of_narrow.edge_weight.dtype == kept and of_wide.edge_weight.dtype == torch.float64
    assert torch.equal(of_narrow.edge_weight.double(), of_wide.edge_weight)
    for key in range(20):
        ours, theirs = (sampler.sample({None: torch.arange(50)}, key) for sampler in (narrow, wide))
        assert torch.equal(ours.edge, theirs.edge) and torch.equal(ours.node, theirs.node)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.tensor([1.0, -0.5, 1.0]), "the weight of the edges must be finite and >= 0, got -0.5 at edge 1"),
        (torch.tensor([1.0, 1.0, float("nan")]), "must be finite and >= 0, got nan at edge 2"),
        (torch.tensor([float("inf"), 1.0, 1.0]), "must be finite and >= 0, got inf at edge 0"),
        (torch.ones(3, 1), r"the weight of the edges must be a tensor of shape \[3\], got \[3, 1\]"),
        (torch.full((3,), 1e308, dtype=torch.float64), "the weight of the edges must have a finite sum"),
        (torch.tensor([1.0, float("inf"), 1.0]).half(), "must be finite and >= 0, got inf at edge 1"),
        (torch.tensor([1.0, -1e-320, 1.0], dtype=torch.float64), "must be finite and >= 0, got -1e-320 at edge 1"),
        (torch.ones(3, dtype=torch.complex64), "the weight of the edges must be real numbers, got torch.complex64"),
    ],
)
def test_wrong_weights_are_refused(weight, text):
    with pytest.raises(ValueError, match=text):
        typed(Data(edge_index=star(3), num_nodes=4, weight=weight), [1], weight_attr="weight")


# --- with replacement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"weight_attr": "weight"}], ids=str)
def test_with_replacement_two_draws_are_independent(options):
    weights = [1.0, 2.0, 3.0]
    data, degree = weighted_stars(weights, 200)
    sampler = typed(data, [2], replace=True, **options)
    drawn = torch.cat([sampler.sample({None: torch.arange(200)}, key).edge for key in range(100)]).view(-1, 2) % degree
    shares = [w / 6 for w in weights] if "weight_attr" in options else [1 / 3] * 3
    p = reference.p_of_chances(
        map(tuple, drawn.tolist()), {(a, b): shares[a] * shares[b] for a in range(3) for b in range(3)}
    )
    assert p > FALSE_ALARM, p


# --- induced ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"replace": True}, {"disjoint": True}, {"time_attr": "time"}, {"time_attr": "edge_time"}], ids=str
)
@pytest.mark.parametrize("fanouts", [[3, 2], [1], []], ids=str)
def test_an_induced_subgraph_has_every_edge_between_its_vertices_once(fanouts, options):
    data = random_hetero(500, seed=16)
    options = {"disjoint": True, **options} if "time_attr" in options else options
    seeds = torch.arange(12)
    now = {"paper": data["paper"].time[seeds] + 3} if "time_attr" in options else None
    out = typed(data, fanouts, induced=True, **options).sample({"paper": seeds}, 3, now)
    drawn = typed(data, fanouts, **options).sample({"paper": seeds}, 3, now)
    assert same(out.node, drawn.node) and same(out.batch, drawn.batch), "the directed sample has the same vertices"
    loops = repeats = 0
    for name in data.edge_types:
        source, _, target = name
        trees = range(12) if "disjoint" in options else [None]
        expected = []
        for tree in trees:
            there = {
                end: set(out.node[end].tolist() if tree is None else out.node[end][out.batch[end] == tree].tolist())
                for end in (source, target)
            }
            for e, (u, v) in enumerate(data[name].edge_index.t().tolist()):
                if u not in there[source] or v not in there[target]:
                    continue
                time = {"time": data[source].time[u], "edge_time": data[name].edge_time[e]}.get(
                    options.get("time_attr")
                )
                if time is None or time <= now["paper"][tree]:
                    expected.append((tree, e))
        trees_of = out.batch[target][out.col[name]].tolist() if "disjoint" in options else [None] * len(out.col[name])
        assert sorted(zip(trees_of, out.edge[name].tolist())) == sorted(expected)
        ends = torch.stack([out.node[source][out.row[name]], out.node[target][out.col[name]]])
        assert torch.equal(ends, data[name].edge_index[:, out.edge[name]])
        loops += int((ends[0] == ends[1]).sum()) if source == target else 0
        repeats += len(expected) - ends.unique(dim=1).size(1) if len(expected) else 0
    assert not fanouts or (loops > 0 and repeats > 0), "self-loops and repeated edges are among them"


# --- backward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"}, {"weight_attr": "weight"}],
    ids=str,
)
def test_backward_sampling_mirrors_forward_sampling_of_the_reversed_graph(options):
    data, reversed_data = random_hetero(seed=17), random_hetero(seed=17)
    turned = HeteroData()
    for name in reversed_data.node_types:
        turned[name].num_nodes = reversed_data[name].num_nodes
    for source, relation, target in RELATIONS:
        store = reversed_data[source, relation, target]
        turned[target, relation, source].edge_index, turned[target, relation, source].weight = (
            store.edge_index.flip(0),
            store.weight,
        )
    seeds = NodeSamplerInput(None, torch.arange(15), input_type="author")
    backward = NeighborSampler(data, [3, 2], sample_direction="backward", **options).sample_from_nodes(seeds, key=5)
    forward = NeighborSampler(turned, [3, 2], **options).sample_from_nodes(seeds, key=5)
    assert same(backward.node, forward.node) and same(backward.num_sampled_nodes, forward.num_sampled_nodes)
    assert same(backward.batch, forward.batch)
    for source, relation, target in RELATIONS:
        mine, mirrored = (source, relation, target), (target, relation, source)
        assert torch.equal(backward.row[mine], forward.col[mirrored]) and torch.equal(
            backward.col[mine], forward.row[mirrored]
        )
        assert torch.equal(backward.edge[mine], forward.edge[mirrored])
        ends = torch.stack([backward.node[source][backward.row[mine]], backward.node[target][backward.col[mine]]])
        assert torch.equal(ends, data[mine].edge_index[:, backward.edge[mine]])


def test_backward_sampling_of_one_type_follows_edges_to_their_targets():
    data = random_data(18)
    seeds = NodeSamplerInput(None, torch.arange(10))
    out = NeighborSampler(data, [-1], sample_direction="backward").sample_from_nodes(seeds, key=1)
    assert set(out.edge.tolist()) == set((data.edge_index[0] < 10).nonzero().flatten().tolist())
    assert torch.equal(torch.stack([out.node[out.row], out.node[out.col]]), data.edge_index[:, out.edge])


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
def test_backward_sampling_obeys_times_too(time_attr):
    data = random_data(19)
    time = data.time[data.edge_index[1]] if time_attr == "time" else data.edge_time
    now = torch.arange(20) % 8
    sampler = NeighborSampler(data, [-1], time_attr=time_attr, sample_direction="backward")
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(20), now), key=1)
    for v in range(20):
        seen = ((data.edge_index[0] == v) & (time <= now[v])).nonzero().flatten().tolist()
        assert sorted(out.edge[out.batch[out.row] == v].tolist()) == seen


# --- a pure function of its arguments ---------------------------------------------------------------------


def test_eight_threads_at_once_give_the_same_as_one():
    data, other = random_hetero(1500, seed=20, paper=300, author=200, venue=9), random_data(20, 800, 8000)
    tasks = []
    for i in range(60):
        # Graphs with different numbers of types and relations use the same memory of a thread.
        if i % 3 == 2:
            sampler, seeds, now = (
                typed(other, [4, 4], weight_attr="weight", replace=i % 2 == 0),
                {None: torch.arange(i, i + 50)},
                None,
            )
        else:
            timed = (
                {"time_attr": ("time", "edge_time")[i % 2], "last": i % 4 == 0} if i % 3 else {"induced": i % 2 == 0}
            )
            sampler, seeds = (
                typed(data, [3, 2], disjoint=True, **timed),
                {("paper", "author")[i % 2]: torch.arange(i, i + 40)},
            )
            now = {name: torch.full((40,), 6) for name in seeds} if i % 3 else None
        tasks.append((sampler, seeds, join_key(i), now))
    alone = [sampler.sample(*rest) for sampler, *rest in tasks]
    ready = Barrier(8)

    def work(thread: int) -> list:
        ready.wait()
        return [(i % 60, tasks[i % 60][0].sample(*tasks[i % 60][1:])) for i in range(7 * thread, 7 * thread + 60)]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            assert all(same_samples(output, alone[i]) for i, output in results)


@EVERY_OPTION
def test_a_key_fixes_a_sample_and_another_key_changes_it(options):
    data = random_hetero(seed=21)
    options = {"disjoint": True, **options} if "time_attr" in options else options
    now = {"paper": torch.full((30,), 7)} if "time_attr" in options else None
    sampler = typed(data, [2, 2], **options)
    draw = lambda key: sampler.sample({"paper": torch.arange(30)}, key, now)  # noqa: E731
    first = draw(1)
    typed(data, [-1, -1]).sample({"author": torch.arange(20)}, 5)
    assert same_samples(first, draw(1))
    assert options.get("last") or not same_samples(first, draw(2))


# --- checks of the operator -------------------------------------------------------------------------------

INDPTR, INDICES = long(0, 1, 3, 3), long(1, 0, 2)
GOOD = dict(
    indptr=[INDPTR], indices=[INDICES], edge_id=[None], links=[None], edge_weight=[None], edge_time=[None],
    source_type=[0], target_type=[0], num_vertices=[3], node_time=[None], seeds=[long(0, 1)], seed_time=[None], seed_since=[], first_tree=[0], fanouts=[2],
    num_hops=1, batch_key=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(seeds=[long(0, 3)]), r"seeds\[1\] must be in \[0, 3\), got 3"),
        (dict(seeds=[long(-1)]), r"seeds\[0\] must be in \[0, 3\), got -1"),
        (dict(seeds=[long(0, 1).int()]), "seeds must have dtype Long, got Int"),
        (dict(seeds=[long(0, 1).view(2, 1)]), "seeds must have 1 dimension, got 2"),
        (dict(seeds=[long(0, 1, 0, 1)[::2]]), "seeds must be contiguous"),
        (dict(seeds=[]), "seeds, seed_time and first_tree must have one entry per vertex type, 1"),
        (dict(node_time=[]), "must have one entry per vertex type, 1"),
        (dict(seed_time=[None, None]), "must have one entry per vertex type, 1"),
        (dict(first_tree=[0, 0]), "must have one entry per vertex type, 1"),
        (dict(first_tree=[1]), r"first_tree\[0\] must be in \[0, 0\], got 1"),
        (dict(first_tree=[-1]), r"first_tree\[0\] must be in \[0, 0\], got -1"),
        (dict(num_vertices=[-1]), r"num_vertices\[0\] must be >= 0, got -1"),
        (dict(num_vertices=[4]), r"indptr\[0\] must have 5 entries, got 4"),
        (dict(num_vertices=[2**63 - 1]), r"indptr\[0\] must have 9223372036854775808 entries, got 4"),
        (dict(indptr=[INDPTR.int()]), "indptr must have dtype Long, got Int"),
        (dict(indices=[INDICES.float()]), "indices must have dtype int32 or int64, got Float"),
        (dict(indices=[]), "must have one entry per relation, 1"),
        (dict(edge_weight=[]), "must have one entry per relation, 1"),
        (dict(target_type=[0, 0]), "must have one entry per relation, 1"),
        (dict(source_type=[1]), r"source_type and target_type must be in \[0, 1\)"),
        (dict(target_type=[-1]), r"source_type and target_type must be in \[0, 1\)"),
        (dict(edge_id=[long(0, 1)]), r"edge_id\[0\] must have 3 entries, got 2"),
        (dict(edge_id=[torch.zeros(3)]), "edge_id must have dtype int32 or int64, got Float"),
        (dict(links=[long(0, 1)]), r"links\[0\] must have 3 entries, got 2"),
        (dict(links=[None, None]), "must have one entry per relation, 1"),
        (dict(links=[INDICES.int()]), "links must have dtype Long, got Int"),
        (dict(links=[INDICES], edge_id=[INDICES]), r"edge_id\[0\] must be None if links are given, because links hold the ids"),
        (dict(links=[long(7, 0, 2)]), r"indices is corrupt: it holds 7, expected ids in \[0, 3\)"),
        (dict(links=[long(7, 0, 2)], disjoint=True), r"indices is corrupt: it holds 7, expected ids in \[0, 3\)"),
        (dict(links=[long(0, 0, 5)], fanouts=[0], induced=True), "indices is corrupt: it holds 5"),
        (dict(edge_weight=[torch.zeros(2).double()]), r"edge_weight\[0\] must have 3 entries, got 2"),
        (dict(edge_weight=[torch.zeros(3).half()]), "edge_weight must have dtype float32 or float64, got Half"),
        (dict(edge_time=[long(0, 1)], seed_time=[long(1, 1)], disjoint=True), r"edge_time\[0\] must have 3 entries, got 2"),
        (dict(edge_time=[torch.zeros(3)]), "edge_time must have dtype Long, got Float"),
        (dict(node_time=[long(0, 1)], seed_time=[long(1, 1)], disjoint=True), r"node_time\[0\] must have 3 entries, got 2"),
        (dict(seed_time=[long(1)], disjoint=True), r"seed_time\[0\] must have 2 entries, got 1"),
        (dict(seed_time=[torch.zeros(2)], disjoint=True), "seed_time must have dtype Long, got Float"),
        (dict(seed_time=[long(1, 1)]), "seed_time needs disjoint=True, because one tree may see a vertex and another may not"),
        (dict(fanouts=[2, 2]), "fanouts must have 1 entries per relation, got 2 for 1 relations"),
        (dict(fanouts=[-2]), r"fanouts\[0\] must be in \[0, 2\^31\), or -1 for all neighbours, got -2"),
        (dict(fanouts=[2**31]), r"fanouts\[0\] must be in \[0, 2\^31\), or -1 for all neighbours, got 2147483648"),
        (dict(num_hops=-1), r"num_hops must be in \[0, 2\^31\), got -1"),
        (dict(indptr=[long(0, 9, 9, 9)]), "indptr is corrupt at vertex 0"),
        (dict(indptr=[long(0, 3, 1, 3)], seeds=[long(1)]), "indptr is corrupt at vertex 1"),
        (dict(indices=[long(7, 0, 2)]), r"indices is corrupt: it holds 7, expected ids in \[0, 3\)"),
        (dict(indices=[long(-1, 0, 2)]), "indices is corrupt: it holds -1"),
        (dict(indices=[long(0, 0, 5)], seeds=[long(0, 1)], fanouts=[0], induced=True), "indices is corrupt: it holds 5"),
        (dict(indices=[long(7, 0, 2)], node_time=[long(0, 0, 0)], seed_time=[long(1, 1)], disjoint=True), "indices is corrupt: it holds 7"),
    ],
)  # fmt: skip
def test_bad_arguments_raise_and_the_next_batch_is_right(change, text):
    want = ops.sample_typed_neighbors(**GOOD)
    with pytest.raises(RuntimeError, match=text):
        ops.sample_typed_neighbors(**{**GOOD, **change})
    assert as_lists(ops.sample_typed_neighbors(**GOOD)) == as_lists(want)


def test_times_for_some_seeds_are_refused():
    two = {
        **GOOD,
        "num_vertices": [3, 2],
        "node_time": [None, None],
        "seeds": [long(0, 1), long(1)],
        "first_tree": [0, 2],
        "disjoint": True,
    }
    with pytest.raises(RuntimeError, match="seed_time must be given for all seeds or for none, got it for 2 of 3"):
        ops.sample_typed_neighbors(**{**two, "seed_time": [long(1, 1), None]})


# --- edges and their reverses -------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [True, False], ids=["ids", ""])
@pytest.mark.parametrize("order", ["by target", "none"])
@pytest.mark.parametrize("size", [0, 1, 7, 500, 20_000])
def test_edges_and_their_reverses_equal_pygs(size, order, with_ids):
    """PyG keeps any id of several edges with the same ends, depending on its sort. Here the last edge's id is kept."""
    generator = torch.Generator().manual_seed(size)
    for num_vertices, own_reverses in itertools.product((3, 90, 50_000), (True, False)):
        row, col, other, another = torch.randint(num_vertices, (4, size), generator=generator)
        col = col.sort().values if order == "by target" else col
        reverse = (row, col) if own_reverses else (other[: size // 3], another[: size // 3])
        ids = [torch.randperm(10**6, generator=generator)[: len(ends)] for ends in (row, reverse[0])]
        ids = [ids[0], ids[0]] if own_reverses else ids
        given = (row, col, *reverse, *(ids if with_ids else (None, None)))
        edge_index, edge = ops.to_bidirectional(*given)
        pyg_row, pyg_col, pyg_edge = to_bidirectional(*given)
        assert torch.equal(edge_index[0], pyg_row) and torch.equal(edge_index[1], pyg_col)
        assert (edge is None) == (pyg_edge is None) == (not with_ids)
        if edge is None:
            continue
        both = [*zip(row.tolist(), col.tolist(), ids[0].tolist())]
        both += zip(reverse[1].tolist(), reverse[0].tolist(), ids[1].tolist())
        count = Counter(pair[:2] for pair in both)
        last = {pair[:2]: pair[2] for pair in both}
        ends = [*zip(*edge_index.tolist())]
        assert edge.tolist() == [last[pair] for pair in ends]
        single = torch.tensor([count[pair] == 1 for pair in ends], dtype=torch.bool)
        assert torch.equal(edge[single], pyg_edge[single])


@pytest.mark.parametrize("keep_orig_edges", [False, True], ids=["", "keep_orig_edges"])
def test_a_bidirectional_sample_equals_pygs_for_the_same_draws(keep_orig_edges):
    data = random_data(8)
    once = data.edge_index.unique(dim=1)
    data = Data(edge_index=once[:, once[0] < once[1]], num_nodes=60)  # no two edges have the same ends
    inputs = NodeSamplerInput(None, some_seeds(8, 60))
    drawn = NeighborSampler(data, [4, 3]).sample_from_nodes(inputs, key=5)
    sampler = NeighborSampler(data, [4, 3], subgraph_type="bidirectional")
    sampler.keep_orig_edges = keep_orig_edges
    assert same_samples(sampler.sample_from_nodes(inputs, key=5), drawn.to_bidirectional(keep_orig_edges))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({0: long(0)}, "row and col must have the same length, got 1 and 2"),
        ({2: long(0)}, "rev_row and rev_col must have the same length, got 1 and 2"),
        ({1: long(0, -1)}, r"col must hold ids in \[0, 2147483647\), got -1"),
        ({3: long(0, 2**31)}, r"rev_col must hold ids in \[0, 2147483647\), got 2147483648"),
        ({4: None}, "edge_id and rev_edge_id must both be given or both be None"),
        ({5: long(1)}, "rev_edge_id must have 2 entries, got 1"),
        ({0: torch.zeros(2)}, "row must have dtype Long, got Float"),
    ],
    ids=str,
)
def test_edges_that_cannot_be_reversed_are_refused(change, text):
    good = [long(0, 1), long(1, 2), long(0, 1), long(1, 2), long(5, 6), long(5, 6)]
    with pytest.raises(RuntimeError, match=text):
        ops.to_bidirectional(*(change.get(place, value) for place, value in enumerate(good)))


# --- golden values: another CPU, compiler or release must give the same -----------------------------------


def test_golden_values_of_a_weighted_sample_over_two_types():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 9, 7
    steps = torch.arange(40)
    data["a", "to", "b"].edge_index = torch.stack([(steps * 5 + steps // 3) % 9, (steps * 3 + steps // 7) % 7])
    data["b", "to", "a"].edge_index = torch.stack([(steps * 2 + steps // 5) % 7, (steps * 7 + steps // 4) % 9])
    for name in data.edge_types:
        data[name].weight = (steps % 6).double() ** 2
    out = typed(data, [2, 2], weight_attr="weight", disjoint=True).sample({"a": long(0, 4)}, 3149489951934424438)
    assert {name: ids.tolist() for name, ids in out.node.items()} == {"a": [0, 4, 5, 3, 8, 1], "b": [4, 5, 3, 1]}
    assert {name: ids.tolist() for name, ids in out.batch.items()} == {"a": [0, 1, 0, 0, 1, 1], "b": [0, 0, 1, 1]}
    assert out.edge["a", "to", "b"].tolist() == [17, 28, 4, 33, 10, 39, 5, 16]
    assert out.edge["b", "to", "a"].tolist() == [5, 15, 8, 23]
