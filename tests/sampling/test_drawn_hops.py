"""Laws of draws over parts: batches that the owners of the lists draw are the batches of one process, bit for bit (law 3)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from drawn_hops import sample_parts
from draws import BOTH_MAPS, as_lists, random_graph, random_seeds
from graphs import RELATIONS, random_hetero
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
        first_tree,
        [fanout for per_hop in fanouts for fanout in per_hop],
        len(fanouts[0]),
        key,
        **options,
    )


def assert_parts_draw_the_same(
    data: Data | HeteroData, seeds: dict, fanouts: Any, seed: int, budget: int, options: dict[str, Any]
) -> None:
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
    for cut in range(3):
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
@pytest.mark.parametrize("shared, replace", [(False, False), (False, True), (True, False)])
def test_parts_draw_the_batches_of_the_plain_sampler(shared, replace, budget):
    for seed, wide in itertools.product(range(12), (False, True)):
        _, graph = random_graph(seed)
        if wide:
            graph = Graph(graph.indptr, graph.indices.long(), graph.edge_id)
        seeds = random_seeds(seed, graph.num_vertices, repeats=seed % 2 == 0)
        for fanouts in ([3], [5, 3, 2], [-1], [2, -1, 1], [1, 1, 1, 1], [100, 60], [2, 0, 2], [0]):
            key = join_key(seed, len(fanouts))
            n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
                graph.indptr, graph.indices, graph.edge_id, seeds, fanouts, key, replace, shared=shared
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
                replace=replace,
                shared=shared,
                budget=budget,
            )
            want = ([n_id], [], [edge_index], [e_id], num_nodes.view(1, -1), num_edges.view(1, -1))
            assert as_lists_of_lists(got) == as_lists_of_lists(want), (seed, fanouts)


@BOTH_MAPS
@EVERY_OPTION
def test_parts_draw_the_batches_of_the_typed_sampler(options, budget):
    for seed in range(3):
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
        assert_parts_draw_the_same(data, seeds, fanouts, key, budget, options)
