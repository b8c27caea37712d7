"""Laws of expected sizes: the sums of the formula, and derivatives that equal finite differences."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from salientpp import NeighborSampler
from salientpp.graph.typed import TypedGraph
from salientpp.vip.inclusion import typed_inclusion_probabilities
from salientpp.vip.sizes import expected_sizes

N = 40


def edges(size: int, sources: int, targets: int, generator: torch.Generator) -> torch.Tensor:
    return torch.stack([torch.randint(end, (size,), generator=generator) for end in (sources, targets)])


def homogeneous(weighted: bool) -> TypedGraph:
    generator = torch.Generator().manual_seed(3)
    data = Data(edge_index=edges(200, N, N, generator), num_nodes=N)
    data.weight = torch.rand(200, generator=generator) + 0.1
    return TypedGraph.from_data(data, weight_attr="weight" if weighted else None)


def several_types() -> TypedGraph:
    generator = torch.Generator().manual_seed(4)
    data = HeteroData()
    sizes = {"paper": 30, "author": 25, "venue": 4}
    for type_, size in sizes.items():
        data[type_].num_nodes = size
    for source, name, target in [
        ("author", "wrote", "paper"),
        ("paper", "cites", "paper"),
        ("paper", "by", "author"),
        ("venue", "has", "paper"),
    ]:
        data[source, name, target].edge_index = edges(90, sizes[source], sizes[target], generator)
    return TypedGraph.from_data(data)


GRAPHS = {
    "one type": lambda: homogeneous(False),
    "weights": lambda: homogeneous(True),
    "several types": several_types,
}


def starts(graph: TypedGraph) -> dict:
    generator = torch.Generator().manual_seed(5)
    return {
        type_: 0.3 * torch.rand(size, generator=generator, dtype=torch.float64)
        for type_, size in zip(graph.node_types, graph.num_vertices)
    }


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[3], [3, 2], [2, -1, 4]], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_derivatives_equal_finite_differences(name, fanouts, replace):
    graph, step = GRAPHS[name](), 1e-6
    per_relation, start = [fanouts] * len(graph.relations), starts(graph)
    found = expected_sizes(graph, start, per_relation, replace=replace)
    for type_, by_seed in found.by_seed.items():
        for vertex in range(0, by_seed.size(0), 5):
            means = []
            for sign in (1.0, -1.0):
                moved = {key: value.clone() for key, value in start.items()}
                moved[type_][vertex] += sign * step
                means.append(expected_sizes(graph, moved, per_relation, replace=replace).mean)
            torch.testing.assert_close(by_seed[vertex], (means[0] - means[1]) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_expected_vertices_are_the_sums_of_the_probabilities(name):
    graph = GRAPHS[name]()
    fanouts, start = [[3, 2]] * len(graph.relations), starts(graph)
    found = expected_sizes(graph, start, fanouts)
    (probabilities,) = typed_inclusion_probabilities(graph, [start], fanouts, include_seeds=True)
    sums = torch.stack([probabilities[type_].double().sum() for type_ in graph.node_types])
    torch.testing.assert_close(found.mean[: sums.numel()], sums, rtol=1e-6, atol=0.0)
    assert found.names == [*graph.node_types, *graph.edge_types]


def test_a_batch_of_certain_seeds_has_exactly_the_expected_sizes():
    graph = homogeneous(False)
    sampled = NeighborSampler(graph, [-1, -1]).sample_from_nodes
    seeds = torch.tensor([1, 5, 8])
    start = torch.zeros(N, dtype=torch.float64)
    start[seeds] = 1.0
    found = expected_sizes(graph, {None: start}, [[-1, -1]])
    from torch_geometric.sampler import NodeSamplerInput

    mfg = sampled(NodeSamplerInput(None, seeds))
    assert found.mean.tolist() == [mfg.node.numel(), mfg.row.numel()]
    assert all(torch.isfinite(by_seed).all() for by_seed in found.by_seed.values())


def test_edges_of_the_first_hop_follow_the_degrees():
    graph = homogeneous(False)
    degree = graph.relations[0].indptr.diff().double()
    start = starts(graph)
    for fanout, draws in [(3, degree.clamp(max=3.0)), (-1, degree)]:
        assert float(expected_sizes(graph, start, [[fanout]]).mean[1]) == pytest.approx(float(start[None] @ draws))
    twice = expected_sizes(graph, start, [[3]], replace=True).mean[1]
    assert float(twice) == pytest.approx(3.0 * float(start[None][degree > 0].sum()))
