"""Laws of topologies in parts, in one process: the owners of lists draw what a topology with all lists draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graphs import random_hetero
from odd_samples import FANOUTS, random_data, same, some_seeds
from part_graphs import cut_parts
from rare import rare
from torch_geometric.data import Data, HeteroData

from salientpp.graph.typed import TypedGraph
from salientpp.ops import join_key
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.stored import TypedTopology
from salientpp.sampling.topology import DrawOptions, Mfg, Topology

FIELDS = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges")


def numbered(data: Data | HeteroData, **read: Any) -> TypedGraph:
    """A graph whose edges are numbered by their positions in the lists, as in a dataset directory."""
    graph = TypedGraph.from_data(data, **read)
    return replace(graph, relations=tuple(replace(each, edge_id=None, links=None) for each in graph.relations))


def offsets_of(graph: TypedGraph, num_parts: int, seed: int) -> list[list[int]]:
    """Random parts, some of them empty."""
    generator = np.random.default_rng(seed)
    return [
        [0, *sorted(generator.integers(size + 1, size=num_parts - 1).tolist()), size] for size in graph.num_vertices
    ]


def topologies(graph: TypedGraph, offsets: list[list[int]], joins: int = 1) -> list[PartTopology]:
    """The topology of every host. A host holds ``joins`` consecutive parts."""
    num_parts = len(offsets[0]) - 1
    held = [range(first, min(first + joins, num_parts)) for first in range(0, num_parts, joins)]
    books = {
        name: PartitionBook(torch.tensor([own[parts.start] for parts in held] + [own[-1]]))
        for name, own in zip(graph.node_types, offsets)
    }
    return [
        PartTopology(cut_parts(graph, offsets, parts), books, part, seeds_are_held=False)
        for part, parts in enumerate(held)
    ]


def drawn(hosts: list[PartTopology], at: int, *arguments: Any, **named: Any) -> tuple[Mfg, int]:
    """Draws on one host. The others answer. Returns the sample and the number of rounds."""
    drawing, answers, rounds = hosts[at].drawing(*arguments, **named), None, 0
    while True:
        try:
            asks = drawing.send(answers)
        except StopIteration as end:
            return end.value, rounds
        answers, rounds = {part: hosts[part].answer(packet) for part, packet in asks.items()}, rounds + 1
        assert at not in answers


def check_same(whole: Topology, hosts: list[PartTopology], *arguments: Any) -> None:
    expected, options = whole.sample(*arguments), arguments[2]
    for at in range(len(hosts)):
        found, rounds = drawn(hosts, at, *arguments)
        for field in FIELDS:
            assert same(getattr(found, field), getattr(expected, field)), (field, at, options)
        hops = len(options.fanouts[0]) if options.fanouts else 0
        assert rounds == hosts[at].num_rounds(hops, options.induced)
        only, _ = drawn(hosts, at, *arguments[:2], options._replace(induced=False), *arguments[3:], only_vertices=True)
        assert same(only.node, expected.node)


OPTIONS = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"induced": True},
    {"induced": True, "disjoint": True},
    {"shared": True},
    {"shared": True, "disjoint": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
@pytest.mark.parametrize(
    "num_parts,joins,seed", [(1, 1, 0), (2, 1, 1), (5, 2, 0), *rare((2, 1, 0), (4, 1, 1), (5, 2, 1))]
)
def test_owners_draw_what_a_whole_topology_draws(num_parts, joins, seed, options):
    for fanouts in FANOUTS:
        graph = numbered(random_data(seed))
        hosts = topologies(graph, offsets_of(graph, num_parts, seed), joins)
        seeds = {None: some_seeds(seed, 60, repeats="induced" not in options)}
        check_same(TypedTopology(graph), hosts, seeds, join_key(seed, 9), DrawOptions([fanouts], **options))


@pytest.mark.parametrize("name,last", [("time", False), ("edge_time", False), ("time", True), ("edge_time", True)])
@pytest.mark.parametrize("induced", [False, True])
@pytest.mark.parametrize("window,seed", [(None, 0), (3, 1), (2.25, 2), *rare((None, 1), (3, 2), (2.25, 0))])
def test_trees_see_the_same_times(name, last, induced, window, seed):
    for fanouts in FANOUTS:
        data = random_data(seed)
        if isinstance(window, float):
            data[name] = data[name] * 0.75
        graph = numbered(data, time_attr=name)
        hosts, seeds = topologies(graph, offsets_of(graph, 3, seed)), some_seeds(seed, 60)
        now = {None: torch.from_numpy(np.random.default_rng(seed).integers(9, size=seeds.numel()))}
        if graph.clock is not None and isinstance(window, float):
            now = {None: graph.clock.read(now[None] * 0.75, "now")}
        options = DrawOptions([fanouts], disjoint=True, last=last, induced=induced, window=window)
        check_same(TypedTopology(graph), hosts, {None: seeds}, seed, options, now)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("seed", [0, *rare(1, 2)])
def test_weighted_draws_are_the_same(replaces, disjoint, seed):
    for fanouts in FANOUTS:
        graph = numbered(random_data(seed, 100, 3000), weight_attr="weight")
        hosts, seeds = topologies(graph, offsets_of(graph, 3, seed)), {None: some_seeds(seed, 100)}
        options = DrawOptions([fanouts], replace=replaces, disjoint=disjoint)
        check_same(TypedTopology(graph), hosts, seeds, seed, options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_several_types_are_the_same(options):
    for seed in range(3):
        graph = numbered(random_hetero(seed))
        hosts = topologies(graph, offsets_of(graph, 3, seed), 1 + seed % 2)
        fanouts = [[3, 2, 2], [2, 0, -1], [4, 1, 0], [-1, 2, 1], [1, 3, 2], [2, 2, 2]][: len(graph.edge_types)]
        fanouts += [[2, 2, 2]] * (len(graph.edge_types) - len(fanouts))
        names = list(graph.node_types)
        seeds = {name: some_seeds(seed, graph.num_vertices[names.index(name)]) for name in names[: 1 + seed % 2][::-1]}
        check_same(TypedTopology(graph), hosts, seeds, seed, DrawOptions(fanouts, **options))


def test_a_batch_that_starts_elsewhere_is_refused_where_the_first_hop_has_no_round():
    graph = numbered(random_data(0))
    hosts = topologies(graph, [[0, 30, 60]])
    hosts[0].seeds_are_held = True
    with pytest.raises(RuntimeError, match="starts from a vertex of part 1, but this host holds part 0"):
        next(hosts[0].drawing({None: torch.tensor([5, 40])}, 1, DrawOptions([[2, 2]])))
    with pytest.raises(RuntimeError, match="needs neighbour lists that part 1 does not hold"):
        hosts[1].sample({None: torch.tensor([40])}, 1, DrawOptions([[-1, -1]]))


def test_an_owner_refuses_a_vertex_that_is_not_its_own():
    graph = numbered(random_data(0))
    one, two = topologies(graph, [[0, 30, 60]]), topologies(graph, [[0, 10, 60]])
    asks = next(two[0].drawing({None: torch.tensor([59])}, 1, DrawOptions([[2]])))
    with pytest.raises(RuntimeError, match=r"vertex 79, but part 1 owns \[30, 60\); start all ranks on the same"):
        one[1].answer(asks[1])
