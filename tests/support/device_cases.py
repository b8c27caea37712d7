"""Random batches for the sampler that draws on a device, and its comparison with the sampler of the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from reference import _GOLDEN, _MASK
from torch import Tensor

from salientpp import Graph, ops
from salientpp.sampling.device_draw import DeviceGraph, sample_neighbors


class Case(NamedTuple):
    """A batch to draw."""

    graph: Graph
    seeds: Tensor
    fanouts: list[int]
    key: int
    replace: bool = False


def any_key(generator: np.random.Generator) -> int:
    return int(generator.integers(-(2**63), 2**63 - 1, endpoint=True))


def random_graph(generator: np.random.Generator, num_vertices: int, num_edges: int) -> Graph:
    """Graph with skewed degrees, empty lists and repeated edges, in one of five storages."""
    ends = (generator.random((2, num_edges)) ** 2 * num_vertices).astype(np.int64)
    edge_index = torch.from_numpy(generator.permutation(num_vertices)[ends])
    storage = generator.integers(5)
    graph = Graph.from_edge_index(edge_index, num_vertices, linked=bool(storage == 0))
    if storage == 0:
        return graph
    indices = graph.indices.to(torch.int32 if storage < 3 else torch.int64)
    return Graph(graph.indptr, indices, graph.edge_id if storage % 2 else None)


def random_case(
    generator: np.random.Generator, most_vertices: int, most_edges: int, most_seeds: int, fanouts: list[int]
) -> Case:
    """Returns a case of 1 to 4 hops; few hops are more frequent. Seeds may repeat, and there may be none."""
    num_vertices = int(generator.integers(1, most_vertices))
    graph = random_graph(generator, num_vertices, int(generator.integers(0, most_edges)))
    seeds = torch.from_numpy(generator.integers(0, num_vertices, size=int(generator.integers(0, most_seeds))))
    num_hops = int(generator.choice([1, 2, 3, 4], p=[0.8, 0.12, 0.05, 0.03]))
    chosen = [int(fanout) for fanout in generator.choice(fanouts, size=num_hops)]
    return Case(graph, seeds, chosen, any_key(generator), bool(generator.integers(2)))


def assert_drawn_as_on_the_host(case: Case, device: torch.device, held: DeviceGraph | None = None) -> None:
    graph, seeds, fanouts, key, replace = case
    edge_id = graph.edge_id if graph.links is None else None
    want = ops.sample_neighbors(
        graph.indptr, graph.indices, edge_id, seeds, fanouts, key, replace, links=graph.links
    )  # fmt: skip
    held = DeviceGraph.of(graph, device) if held is None else held
    table = held.new_table()
    fresh = table.clone()
    n_id, edges, num_nodes, num_edges = sample_neighbors(held, table, seeds, fanouts, key, replace)
    assert n_id.device.type == edges.device.type == device.type and n_id.dtype == edges.dtype == torch.int64
    where = f"fanouts={fanouts}, key={key}, replace={replace}, seeds={seeds.tolist()[:20]}, {graph}"
    assert torch.equal(n_id.cpu(), want[0]), f"other vertices: {where}"
    assert torch.equal(edges[:2].cpu(), want[1]) and torch.equal(edges[2].cpu(), want[2]), f"other edges: {where}"
    assert num_nodes == want[3].tolist() and num_edges == want[4].tolist(), f"other counts: {where}"
    assert torch.equal(table, fresh), f"the table was not cleared: {where}"


def star(degree: int, num_hubs: int = 1) -> Graph:
    """Hubs 0, 1, ... with ``degree`` in-edges each, from leaves of their own."""
    hub = torch.arange(num_hubs).repeat_interleave(degree)
    leaf = num_hubs + torch.arange(num_hubs * degree)
    return Graph.from_edge_index(torch.stack([leaf, hub]), num_hubs * (degree + 1), is_sorted=True)


def rejecting_key(vertex: int, draw: int, hop: int = 0) -> int:
    """Returns a batch key whose stream of a vertex gives 0 as number ``draw``, which Lemire's method rejects if 2**64 is not a multiple of the bound."""
    stream = -(draw + 1) * _GOLDEN & _MASK  # mix64(0) is 0
    hop_key = _unmix(stream) ^ (vertex * _GOLDEN & _MASK)
    key = (_unmix(_unmix(hop_key) ^ ((hop * 0xD1342543DE82EF95 + _GOLDEN) & _MASK)) - _GOLDEN) & _MASK
    return key - 2**64 if key >= 2**63 else key


def _unmix(z: int) -> int:
    """Inverse of ``mix64``."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = z
        for _ in range(64 // shift):
            unshifted = z ^ (unshifted >> shift)
        z = unshifted * pow(factor, -1, 2**64) & _MASK
    return z
