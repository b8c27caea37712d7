"""Laws of sweeps over lists that are divided among ranks: they give what one process computes, and a rank reads only its own lists."""

from __future__ import annotations

import distributed
import numpy as np
import pytest
import torch
from graphs import random_data, random_hetero
from part_graphs import cut_parts
from rare import rare

from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.ranks.comm import Comm
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip import divided
from salientpp.vip.divided import DividedListSums
from salientpp.vip.inclusion import (
    inclusion_probability,
    link_start,
    typed_inclusion_probabilities,
    typed_inclusion_probability,
    uniform_starts,
)
from salientpp.vip.list_sums import ListSums
from salientpp.vip.policies import TYPED_POLICIES, TypedWorkload, Workload, score, score_types
from salientpp.vip.shared import block_probability, shared_inclusion_probability
from salientpp.vip.sizes import expected_sizes

#: Ranks and parts: one part per rank, two ranks per part, two parts per rank, and one rank for all.
LAYOUTS = [(1, 1), (1, 3), (2, 2), (2, 1), (2, 4), (4, 4), (4, 2), (3, 4)]
N = 90


def parts_of(rank: int, world: int, num_parts: int) -> range:
    if world > num_parts:
        return range(rank * num_parts // world, rank * num_parts // world + 1)
    return range(rank * num_parts // world, (rank + 1) * num_parts // world)


def offsets_of(num_parts: int, sizes) -> list[list[int]]:
    """Uneven parts; the last part of the smallest type is empty."""
    return [[size * k * k // num_parts**2 for k in range(num_parts)] + [size] if size > 10 else
            [min(size, k * size) for k in range(num_parts)] + [size] for size in sizes]  # fmt: skip


GRAPHS = {
    "plain": lambda: TypedGraph.from_data(random_data(num_vertices=N)),
    "weights": lambda: TypedGraph.from_data(weighted(), weight_attr="weight"),
    "types": lambda: TypedGraph.from_data(random_hetero()),
    "typed weights": lambda: TypedGraph.from_data(random_hetero(), weight_attr="weight"),
}


def weighted():
    data = random_data(num_vertices=N)
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    return data


def start_of(graph: TypedGraph, rank: int):
    """Seeds that differ by rank, also in number; rank 2 has none. Odd ranks start from edges."""
    seeds = {
        type_: torch.empty(0, dtype=torch.int64) if rank == 2 else torch.arange(rank, size, 3 + rank)
        for type_, size in zip(graph.node_types[:2], graph.num_vertices)
    }
    if rank % 2:
        return {type_: link_start(torch.cat([ids, ids[:3]]), 7, 2) for type_, ids in seeds.items()}
    return uniform_starts(seeds, 9)


def fanouts_of(graph: TypedGraph) -> list[list[int]]:
    return [[3, 2, 4], [2, -1, 1], [1, 1, 0], [4, 2, 2]][: len(graph.edge_types)]


OPTIONS = [
    dict(expand="frontier"),
    dict(expand="frontier", include_seeds=True),
    dict(expand="hop", replace=True),
    dict(expand="hop", include_seeds=True),
]


def typed_values(graph: TypedGraph | ListSums, whole: TypedGraph, rank: int) -> dict[str, torch.Tensor]:
    """Every value that is computed for a graph of any kind."""
    start, fanouts = start_of(whole, rank), fanouts_of(whole)
    found = {}
    for number, options in enumerate(OPTIONS):
        found |= named(f"vip {number}", typed_inclusion_probability(graph, start, fanouts, **options))
    starts = [start, start_of(whole, rank + 1)]
    for number, each in enumerate(typed_inclusion_probabilities(graph, starts, fanouts)):
        found |= named(f"set {number}", each)
    sizes = expected_sizes(graph, start, fanouts, replace=bool(len(whole.edge_types) > 1))
    found |= {"mean": sizes.mean} | named("by seed", sizes.by_seed)
    for policy in TYPED_POLICIES:
        found |= named(policy, score_types(policy, TypedWorkload(graph, rank, start, fanouts)))
    return found


def named(name: str, by_type) -> dict[str, torch.Tensor]:
    return {f"{name} {type_}": of_type for type_, of_type in by_type.items()}


def plain_values(graph: Graph | ListSums, book: PartitionBook, rank: int) -> dict[str, torch.Tensor]:
    """Every value that is computed for one vertex type."""
    seeds = torch.arange(rank, N, 4 + rank)
    found = {
        "plain": inclusion_probability(graph, seeds, [4, 2, 2], 6, replace=True),
        "sets": inclusion_probability(graph, [seeds, seeds[:0]], [3, -1], 6, expand="hop", include_seeds=True),
        "shared": shared_inclusion_probability(graph, seeds, [3, 2], 6),
        "block": block_probability(graph, seeds, [3, 2], 3, 2),
        "shared block": block_probability(graph, seeds, [3, 2], 3, 2, "batch", include_seeds=True),
    }
    workload = Workload(graph, book, min(rank, book.num_parts - 1), seeds, [3, 2], 6)
    for policy in ("degree", "halo", "paths", "random", "vip", "vip-hop", "wpr"):
        found[policy] = score(policy, workload)
    return found


def _of_rank(rank: int, name: str, num_parts: int, world: int):
    graph = GRAPHS[name]()
    offsets = offsets_of(num_parts, graph.num_vertices)
    lists = DividedListSums(Comm.create(), cut_parts(graph, offsets, parts_of(rank, world, num_parts)))
    values = typed_values(lists, graph, rank)
    if name == "plain":
        values |= plain_values(lists, PartitionBook(torch.tensor(offsets[0])), rank)
    return {key: value.numpy() for key, value in values.items()}, sum(
        piece.relation.indices.numel() for piece in lists.pieces
    )


#: Every layout and every graph. The other pairs are rare.
PAIRS = [
    *(("plain", 2, 2), ("plain", 2, 4), ("weights", 4, 2), ("weights", 1, 3), ("types", 4, 4), ("types", 3, 4)),
    *(("typed weights", 2, 1), ("typed weights", 2, 4), ("typed weights", 1, 1)),
]


@pytest.mark.parametrize(
    ("name", "world", "num_parts"),
    [*PAIRS, *rare(*((name, *layout) for name in GRAPHS for layout in LAYOUTS if (name, *layout) not in PAIRS))],
)
def test_ranks_compute_what_one_process_computes(name, world, num_parts):
    graph = GRAPHS[name]()
    found = distributed.run(_of_rank, world, name, num_parts, world)
    for rank, (values, _) in enumerate(found):
        want = typed_values(graph, graph, rank)
        if name == "plain":
            book = PartitionBook(torch.tensor(offsets_of(num_parts, graph.num_vertices)[0]))
            want |= plain_values(Graph.from_data(random_data(num_vertices=N)), book, rank)
        assert values.keys() == want.keys()
        for key, value in want.items():
            assert values[key].dtype == value.numpy().dtype, key
            np.testing.assert_allclose(values[key], value, rtol=1e-6, atol=1e-7, err_msg=f"{key} of rank {rank}")
    assert sum(number for _, number in found) == sum(relation.indices.numel() for relation in graph.relations)


def _in_messages_of(rank: int, name: str, sizes: list[int]) -> list[dict]:
    graph, found = GRAPHS[name](), []
    for size in sizes:
        divided._CHUNK_VERTICES = size
        lists = DividedListSums(Comm.create(), cut_parts(graph, offsets_of(2, graph.num_vertices), [rank]))
        found.append({key: value.numpy() for key, value in typed_values(lists, graph, rank).items()})
    return found


@pytest.mark.parametrize("name", ["plain", "typed weights", *rare("weights", "types")])
def test_sums_do_not_depend_on_the_number_of_messages_in_which_they_travel(name):
    for by_size in distributed.run(_in_messages_of, 2, name, [2**16, 8, 24]):
        for key, whole in by_size[0].items():
            assert all(np.array_equal(whole, values[key]) for values in by_size[1:]), key


# --- errors -----------------------------------------------------------------------------------------------


def _with_ranges(rank: int, ranges: list[range], num_parts: int) -> str:
    graph = GRAPHS["types"]()
    try:
        held = cut_parts(graph, offsets_of(num_parts, graph.num_vertices), ranges[rank])
        DividedListSums(Comm.create(), held).pieces  # noqa: B018 (the lists are divided now)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranges", [[range(0, 1), range(2, 3)], [range(0, 2), range(1, 3)], [range(0, 2), range(0, 2)]])
def test_ranks_that_do_not_hold_every_list_once_are_refused_on_every_rank(ranges):
    told = distributed.run(_with_ranges, 2, ranges, 3)
    assert all(
        "must hold the neighbour lists of all targets" in text and "start ranks that serve all parts" in text
        for text in told
    )


def _with_a_wrong_id(rank: int) -> str:
    graph = GRAPHS["plain"]()
    held = cut_parts(graph, offsets_of(2, graph.num_vertices), range(rank, rank + 1))
    if rank == 1:
        held.lists[0][0].relation.indices[5] = N
    try:
        DividedListSums(Comm.create(), held).pieces  # noqa: B018
    except Exception as error:
        return str(error)
    return ""


def test_a_wrong_id_is_an_error_on_every_rank():
    first, second = distributed.run(_with_a_wrong_id, 2)
    assert second == f"indices is corrupt: it must hold ids in [0, {N})"
    assert first == f"rank 1 could not sum over its lists: RuntimeError: {second}"


def test_simulated_batches_need_the_whole_topology():
    graph = GRAPHS["plain"]()
    workload = Workload(ListSums.of(graph), PartitionBook(torch.tensor([0, 40, N])), 0, torch.arange(40), [3, 2], 6)
    with pytest.raises(ValueError, match="policy 'simulation' samples batches in one process.*use policy='vip'"):
        score("simulation", workload)
