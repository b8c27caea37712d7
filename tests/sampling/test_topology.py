"""Laws of topologies: one from outside the package gives the batches of the stored graph with the same edges."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from batches import assert_same_batches
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from salientpp import NeighborLoader, NeighborSampler
from salientpp.sampling.topology import DrawOptions, Topology

SIZE, FANOUTS = 60, [-1, -1]


class Ring(Topology):
    """A topology from outside the package that stores no edges: vertex v has the neighbours v - 1 and v + 1; it takes all of them."""

    def __init__(self, size: int) -> None:
        self.num_vertices = {None: size}

    def arrays(self) -> list[Tensor]:
        return [torch.tensor([self.num_vertices[None]])]

    def sample(
        self,
        seeds: Mapping[str | None, Tensor],
        key: int,
        options: DrawOptions,
        seed_time: Mapping[str | None, Tensor] | None = None,
        *,
        only_vertices: bool = False,
    ) -> SamplerOutput:
        place: dict[int, int] = {}
        for vertex in seeds[None].tolist():
            place.setdefault(vertex, len(place))
        row, col, edge, first = [], [], [], 0
        num_nodes, num_edges = [len(place)], []
        for _ in options.fanouts[0]:
            frontier = list(place)[first:]
            first = len(place)
            for vertex in frontier:
                for step, delta in enumerate((-1, 1)):
                    source = (vertex + delta) % self.num_vertices[None]
                    row.append(place.setdefault(source, len(place)))
                    col.append(place[vertex])
                    edge.append(2 * vertex + step)
            num_nodes.append(len(place) - first)
            num_edges.append(len(row) - sum(num_edges))
        ends = torch.tensor([row, col], dtype=torch.int64)
        return SamplerOutput(
            torch.tensor(list(place)), ends[0], ends[1], torch.tensor(edge), None, num_nodes, num_edges
        )


def stored() -> Data:
    """The same ring with its edges, in the order of their ids."""
    target = torch.arange(SIZE).repeat_interleave(2)
    source = (target + torch.tensor([-1, 1]).repeat(SIZE)) % SIZE
    return Data(x=torch.rand(SIZE, 4), edge_index=torch.stack([source, target]))


def test_a_sampler_draws_from_a_topology_of_the_users():
    ring, graph = NeighborSampler(Ring(SIZE), FANOUTS), NeighborSampler(stored(), FANOUTS)
    assert ring.num_nodes == graph.num_nodes and not ring.is_hetero and not ring.is_temporal
    for start in range(0, SIZE, 7):
        inputs = NodeSamplerInput(None, torch.tensor([start, (start + 2) % SIZE]))
        ours, want = ring.sample_from_nodes(inputs, key=1), graph.sample_from_nodes(inputs, key=1)
        for name in ("node", "row", "col", "edge"):
            assert torch.equal(getattr(ours, name), getattr(want, name)), name
        assert ours.num_sampled_nodes == want.num_sampled_nodes and ours.num_sampled_edges == want.num_sampled_edges


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_batches_of_the_stored_graph(num_workers):
    data, options = stored(), {"batch_size": 8, "shuffle": True, "seed": 2, "num_workers": num_workers}
    sampler = NeighborSampler(Ring(SIZE), FANOUTS)
    ours = NeighborLoader(data, FANOUTS, neighbor_sampler=sampler, **options)
    want = NeighborLoader(data, FANOUTS, **options)
    for _ in range(2):
        assert_same_batches(list(ours), list(want))


def test_what_needs_edges_says_that_there_are_none():
    sampler = NeighborSampler(Ring(SIZE), FANOUTS)
    with pytest.raises(ValueError, match="a Ring holds no graph; leave out what needs them, such as device_rows"):
        NeighborLoader(stored(), FANOUTS, neighbor_sampler=sampler, batch_size=8, device_rows=0.5)


@pytest.mark.parametrize("argument", [{"time_attr": "time"}, {"weight_attr": "w"}, {"sample_direction": "backward"}])
def test_arguments_about_pygs_objects_are_refused(argument):
    with pytest.raises(ValueError, match="are for PyG's objects: a Ring has its times, weights and directions"):
        NeighborSampler(Ring(SIZE), FANOUTS, **argument)
