"""Laws of topologies: batches do not depend on where a sampler finds neighbours. The topologies here are defined outside the package."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import reference
import torch
from batches import differences
from graphs import random_data, random_hetero
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PyGLoader
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput, SamplerOutput

import salientpp
from salientpp import Graph, LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.graph.typed import TypedGraph
from salientpp.sampling.topology import DrawOptions, Topology

WIDTH, HEIGHT = 12, 9
STEPS = ((-1, 0), (0, -1), (0, 1), (1, 0))


class Computed(Sequence):
    """A sequence whose items are computed on access."""

    def __init__(self, item):
        self._item = item

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index):
        return (
            [self._item(at) for at in range(index.start, index.stop)] if isinstance(index, slice) else self._item(index)
        )


class Torus(Topology):
    """A grid without borders: each vertex has four neighbours, and no edges are stored."""

    def __init__(self) -> None:
        self.num_vertices = {None: WIDTH * HEIGHT}

    def arrays(self) -> list[Tensor]:
        return [torch.tensor([WIDTH, HEIGHT])]

    def sample(self, seeds, key, options: DrawOptions, seed_time=None, only_vertices=False) -> SamplerOutput:
        n_id, (row, col), e_id, num_nodes, num_edges = reference.sample_neighbors(
            Computed(lambda v: 4 * v), Computed(neighbour), None, seeds[None].tolist(), options.fanouts[0], key,
            options.replace, options.shared,
        )  # fmt: skip
        return SamplerOutput(*map(torch.tensor, (n_id, row, col, e_id)), None, num_nodes, num_edges)


def neighbour(edge: int) -> int:
    """Returns the source of an edge."""
    (y, x), (dy, dx) = divmod(edge // 4, WIDTH), STEPS[edge % 4]
    return (y + dy) % HEIGHT * WIDTH + (x + dx) % WIDTH


class Counting(Topology):
    """A wrapper of a topology that counts batches. It holds no graph, like a topology whose edges are on other hosts."""

    def __init__(self, inner: Topology) -> None:
        self._inner, self.drawn = inner, 0
        for name in ("num_vertices", "edge_types", "node_time", "clock", "has_weights"):
            setattr(self, name, getattr(inner, name))

    def arrays(self) -> list[Tensor]:
        return self._inner.arrays()

    def sample(self, *args, **options):
        self.drawn += 1
        return self._inner.sample(*args, **options)


def torus() -> Data:
    edges = range(4 * WIDTH * HEIGHT)
    edge_index = torch.tensor([[neighbour(edge) for edge in edges], [edge // 4 for edge in edges]])
    return Data(
        edge_index=edge_index, x=torch.arange(WIDTH * HEIGHT).view(-1, 1).float(), edge_attr=torch.arange(len(edges))
    )


def plain(value):
    """Converts a sample to values that ``==`` compares."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def assert_same_batches(ours, theirs) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs):
        assert one.keys() == other.keys()
        stores = zip(one.stores, other.stores)
        assert [differences(a, b) for a, b in stores] == [[]] * len(one.stores)


@pytest.mark.parametrize("draws", [{}, {"replace": True}, {"shared_draws": "batch"}], ids=["", "replace", "shared"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_computed_topology_gives_the_batches_of_the_stored_graph(draws, workers):
    data, options = torus(), dict(batch_size=16, shuffle=True, seed=4, num_workers=workers)
    sampler = NeighborSampler(Torus(), [3, 2], **draws)
    bare = torus()
    assert_same_batches(
        NeighborLoader(bare, [3, 2], neighbor_sampler=sampler, **options),
        NeighborLoader(data, [3, 2], **options, **draws),
    )
    link = dict(edge_label_index=data.edge_index[:, ::9], neg_sampling="binary", **options)
    assert_same_batches(
        LinkNeighborLoader(bare, [3, 2], neighbor_sampler=sampler, **link),
        LinkNeighborLoader(data, [3, 2], **link, **draws),
    )


@pytest.mark.parametrize(
    "read",
    [
        {},
        {"disjoint": True},
        {"subgraph_type": "induced"},
        {"subgraph_type": "bidirectional"},
        {"time_attr": "time"},
        {"time_attr": "time", "temporal_strategy": "last"},
        {"weight_attr": "weight"},
        {"sample_direction": "backward"},
    ],
    ids=lambda read: "-".join(map(str, read.values())),
)
@pytest.mark.parametrize("typed", [False, True], ids=["one type", "types"])
def test_a_topology_that_wraps_another_draws_the_same(read, typed):
    data, type_ = (random_hetero(seed=3), "paper") if typed else (random_data(300, 2000, seed=3), None)
    nodes = data[type_] if typed else data
    nodes.time = torch.arange(nodes.num_nodes) % 7
    for store in data.edge_stores:
        store.weight = torch.rand(store.num_edges)
    sampler = NeighborSampler(data, [4, 3], **read)
    again = NeighborSampler(data, [4, 3], **read)
    again.topology = counting = Counting(sampler.topology)
    seeds = torch.arange(20)
    for only in (False, True):
        inputs = NodeSamplerInput(None, seeds, nodes.time[seeds] if "time_attr" in read else None, type_)
        one, other = (each.sample_from_nodes(inputs, 5, only_vertices=only) for each in (sampler, again))
        assert plain(vars(one)) == plain(vars(other))
    ends = EdgeSamplerInput(
        None, seeds, seeds.flip(0), None, inputs.time, ("paper", "cites", "paper") if typed else None
    )
    one, other = (each.sample_from_edges(ends, key=5) for each in (sampler, again))
    assert plain(vars(one)) == plain(vars(other)) and counting.drawn == 3


@pytest.mark.parametrize("options", [{}, {"disjoint": True, "subgraph_type": "induced"}], ids=["", "induced trees"])
def test_a_graph_can_be_passed_as_a_topology(options):
    data = random_data(300, 2000, seed=8)
    given = [data, Graph.from_data(data), TypedGraph.from_data(data), NeighborSampler(data, []).topology]
    inputs = NodeSamplerInput(None, torch.arange(30))
    samples = [NeighborSampler(each, [4, 3], **options).sample_from_nodes(inputs, 5) for each in given]
    assert all(plain(vars(sample)) == plain(vars(samples[0])) for sample in samples[1:])


def test_pygs_loader_can_draw_from_a_topology():
    loader = PyGLoader(torus(), [3, 2], neighbor_sampler=NeighborSampler(Torus(), [3, 2]), batch_size=16)
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        source, target = batch.n_id[batch.edge_index]
        assert [neighbour(int(edge)) for edge in batch.e_id] == source.tolist() and (batch.e_id // 4).equal(target)


def test_a_saved_state_identifies_its_topology():
    class Other(Torus):
        def arrays(self) -> list[Tensor]:
            return [torch.tensor([WIDTH, HEIGHT + 1])]

    def loader(topology: Topology) -> NeighborLoader:
        return NeighborLoader(torus(), [2], neighbor_sampler=NeighborSampler(topology, [2]), batch_size=16, seed=1)

    state = loader(Torus()).state_dict()
    loader(Torus()).load_state_dict(state)
    with pytest.raises(ValueError, match="dataset"):
        loader(Other()).load_state_dict(state)


def test_options_that_need_the_edges_of_a_graph_are_refused_without_them():
    sampler = NeighborSampler(Torus(), [2])
    with pytest.raises(
        ValueError, match="a Torus holds no graph; leave out the options that need them, such as device_rows"
    ):
        NeighborLoader(torus(), [2], neighbor_sampler=sampler, device_rows=0.5, device="cpu")


def test_attributes_of_data_are_refused_for_edges_alone():
    for wrong in ({"time_attr": "time"}, {"weight_attr": "weight"}, {"sample_direction": "backward"}):
        with pytest.raises(
            ValueError,
            match="time_attr, weight_attr and sample_direction are for PyG's objects: a Torus already has its",
        ):
            NeighborSampler(Torus(), [2], **wrong)


def test_a_partitioned_graph_is_drawn_from_by_a_given_topology(tmp_path):
    part = salientpp.partition(random_data(300, 2000), 1, tmp_path / "one")
    counting = Counting(NeighborSampler(part.graph, []).topology)
    options = dict(batch_size=16, shuffle=True, seed=4)
    given = NeighborLoader(part, [4, 3], "train", neighbor_sampler=NeighborSampler(counting, [4, 3]), **options)
    assert_same_batches(given, NeighborLoader(part, [4, 3], "train", **options))
    assert counting.drawn == len(given)
    with pytest.raises(
        ValueError, match=r"the topology of neighbor_sampler has \{None: 108\} vertices, but .* has \{None: 300\}"
    ):
        NeighborLoader(part, [2], "train", neighbor_sampler=NeighborSampler(Torus(), [2]))
