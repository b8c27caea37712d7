"""Laws of draws over parts: batches that the owners of the lists draw are the batches of one process, bit for bit (law 3)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_hops import sample_parts
from draws import BOTH_MAPS, as_lists, random_graph, random_seeds
from graphs import RELATIONS, random_hetero
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp import Graph, ops
from salientpp.graph.typed import TypedGraph
from salientpp.ops import join_key

OPTIONS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"disjoint": True, "replace": True},
    {"induced": True},
    {"induced": True, "disjoint": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True, "disjoint": True},
    {"time_attr": "time"},
    {"time_attr": "time", "last": True},
    {"time_attr": "edge_time", "replace": True},
    {"time_attr": "edge_time", "induced": True},
    {"time_attr": "edge_time", "last": True, "weight_attr": "weight"},
    {"shared": True},
    {"shared": True, "disjoint": True, "induced": True},
    {"shared": True, "time_attr": "edge_time", "last": True},
]
EVERY_OPTION = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items()) or "plain"
)


def some_bounds(size: int, seed: int) -> list[int]:
    """Bounds of a few parts. Some parts are empty."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, size + 1, (1 + seed % 4,), generator=generator).sort().values.tolist()
    return [0, *inner, *inner[-1:], size]


def typed_sample(
    graph: TypedGraph,
    seeds: list[Tensor],
    times: list[Tensor | None],
    first_tree: list[int],
    fanouts: list[list[int]],
    key: int,
    **options: Any,
) -> tuple:
    relations = graph.relations
    return ops.sample_typed_neighbors(
        [r.indptr for r in relations],
        [r.indices for r in relations],
        [r.edge_id for r in relations],
        [r.links for r in relations],
        [r.edge_weight for r in relations],
        [r.edge_time if r.source_time is None else r.source_time for r in relations],
        [r.source for r in relations],
        [r.target for r in relations],
        graph.num_vertices,
        [None] * len(graph.num_vertices),
        seeds,
        times,
        [],
        first_tree,
        [fanout for per_hop in fanouts for fanout in per_hop],
        len(fanouts[0]),
        key,
        **options,
    )


def assert_parts_draw_the_same(
    data: Data | HeteroData, seeds: dict, fanouts: Any, seed: int, budget: int, options: dict[str, Any], cuts: int = 3
) -> None:
    """Compares draws over the whole lists with those over ``cuts`` divisions of the lists."""
    read = {name: options[name] for name in ("time_attr", "weight_attr") if name in options}
    draws = {name: value for name, value in options.items() if name not in read}
    if "time_attr" in options:
        draws["disjoint"] = True
    graph = TypedGraph.from_data(data, **read)
    per_relation = [fanouts[name] if isinstance(fanouts, dict) else fanouts for name in graph.edge_types]
    first, total = {}, 0
    for name in reversed(seeds):  # trees of types in another order than the types
        first[name], total = total, total + seeds[name].numel()
    no_ids = torch.empty(0, dtype=torch.int64)
    ids = [seeds.get(name, no_ids) for name in graph.node_types]
    times: list[Tensor | None] = [None] * len(ids)
    if "time_attr" in options:
        times = [torch.arange(each.numel()) % 9 if each.numel() else None for each in ids]
    common = (ids, times, [first.get(name, 0) for name in graph.node_types], per_relation, join_key(seed))
    want = typed_sample(graph, *common, **draws)
    for cut in range(cuts):
        bounds = [some_bounds(size, seed + cut + place) for place, size in enumerate(graph.num_vertices)]
        got = sample_parts(graph.relations, bounds, *common, budget=budget, **draws)
        assert as_lists_of_lists(got) == as_lists_of_lists(want), (bounds, fanouts)


def as_lists_of_lists(output: tuple) -> list:
    return [each.tolist() if isinstance(each, Tensor) else as_lists(each) for each in output]


def homogeneous_data(seed: int) -> Data:
    """Makes skewed degrees, self-loops, repeated edges and isolated vertices, times with ties, and weights with zeros."""
    edge_index, graph = random_graph(seed, 60, 500)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(500, generator=generator)
    return Data(
        edge_index=edge_index,
        num_nodes=graph.num_vertices,
        time=torch.randint(9, (graph.num_vertices,), generator=generator),
        edge_time=torch.randint(9, (500,), generator=generator),
        weight=torch.where(weight < 0.1, 0.0, weight),
    )


@BOTH_MAPS
@pytest.mark.parametrize("draws", [{}, {"replace": True}, {"shared": True}], ids=lambda o: "".join(o) or "plain")
def test_parts_draw_the_batches_of_the_plain_sampler(draws, budget):
    for seed in range(6):
        _, graph = random_graph(seed)
        if seed in (1, 4):
            graph = Graph(graph.indptr, graph.indices.long(), graph.edge_id)
        seeds = random_seeds(seed, graph.num_vertices, repeats=seed % 2 == 0)
        for fanouts in ([3], [5, 3, 2], [-1], [2, -1, 1], [1, 1, 1, 1], [100, 60], [2, 0, 2], [0]):
            key = join_key(seed, len(fanouts))
            n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
                graph.indptr, graph.indices, graph.edge_id, seeds, fanouts, key, **draws
            )
            bounds = [some_bounds(graph.num_vertices, seed)]
            got = sample_parts(
                TypedGraph.of(graph).relations,
                bounds,
                [seeds],
                [None],
                [0],
                [fanouts],
                key,
                budget=budget,
                **draws,
            )
            want = ([n_id], [], [edge_index], [e_id], num_nodes.view(1, -1), num_edges.view(1, -1))
            assert as_lists_of_lists(got) == as_lists_of_lists(want), (seed, fanouts)


@BOTH_MAPS
@EVERY_OPTION
@pytest.mark.parametrize("seed", [0, *rare(1, 2)])
def test_parts_draw_the_batches_of_the_typed_sampler(options, budget, seed):
    data = homogeneous_data(seed)
    for fanouts, repeats in itertools.product(([3, 2], [2, -1], [-1, 0, 2], [7, 50]), (False, True)):
        seeds = {None: random_seeds(seed, 60, repeats)}
        assert_parts_draw_the_same(data, seeds, fanouts, seed, budget, options)


@BOTH_MAPS
@EVERY_OPTION
def test_parts_draw_batches_of_several_types(options, budget):
    data = random_hetero(seed=3)
    mixed = dict(zip(RELATIONS, ([3, 2, 1], [2, 0, 4], [0, 5, 1], [-1, 2, -1])))
    for fanouts, (key, names) in itertools.product(
        (mixed, [2, 3]), enumerate([["paper"], ["author", "paper"], ["venue", "author"]])
    ):
        seeds = {name: random_seeds(key, data[name].num_nodes, repeats=True) for name in names}
        assert_parts_draw_the_same(data, seeds, fanouts, key, budget, options, cuts=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replace": True},
        {"shared": True},
        {"weight_attr": "weight"},
        {"weight_attr": "weight", "replace": True},
        {"time_attr": "edge_time"},
        {"time_attr": "edge_time", "last": True, "shared": True},
        {"disjoint": True, "induced": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_parts_draw_the_same_from_hubs(options):
    # Lists of 900 to 1,100 entries, around the longest list of shared draws, and a list of 5,000.
    generator = torch.Generator().manual_seed(5)
    length = torch.cat([torch.arange(900, 1101, 20), torch.tensor([5000, 0, 1])])
    target = torch.arange(length.numel()).repeat_interleave(length)
    size = target.numel()
    data = Data(
        edge_index=torch.stack([torch.randint(0, 4000, (size,), generator=generator), target]),
        num_nodes=4000,
        edge_time=torch.randint(0, 9, (size,), generator=generator),
        weight=torch.rand(size, generator=generator),
    )
    for fanouts in ([10, 4], [49, 2], [300, 1], [-1, 1]):
        assert_parts_draw_the_same(data, {None: torch.arange(14)}, fanouts, 3, ops.MAP_BUDGET_BYTES, options)


@BOTH_MAPS
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"time_attr": "time", "induced": True}], ids=str)
def test_parts_draw_batches_of_many_blocks(options, budget):
    data = random_hetero(6000, seed=4, paper=900, author=700, venue=30)
    seeds = {"paper": torch.arange(300), "author": torch.arange(100)}
    assert_parts_draw_the_same(data, seeds, [4, 3, 2], 9, budget, options)


def test_linked_relations_and_ids_of_eight_bytes_give_the_same_batches():
    for linked in (False, True):
        graph = TypedGraph.from_data(homogeneous_data(3), linked=linked)
        (relation,) = graph.relations
        assert (relation.links is not None) == linked
        wide = replace(relation, indices=relation.indices.long())
        arguments = ([torch.arange(20)], [None], [0], [[4, 3]], 11)
        want = as_lists_of_lists(typed_sample(graph, *arguments))
        for each in (relation, wide):
            assert as_lists_of_lists(sample_parts([each], [[0, 17, 60]], *arguments)) == want


@BOTH_MAPS
@pytest.mark.parametrize("options", OPTIONS[:8], ids=str)
def test_parts_may_have_no_edges_and_batches_no_seeds(options, budget):
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=5, weight=torch.empty(0))
    for seeds in (torch.arange(3), torch.empty(0, dtype=torch.int64)):
        for fanouts in ([2, -1], []):
            assert_parts_draw_the_same(data, {None: seeds}, fanouts, 1, budget, options)
