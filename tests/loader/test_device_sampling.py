"""Laws of `neighbor_sampler="device"`: batches stay the same, and what a device does not draw is refused with the reason.

The kernels run in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import copy
import pickle

import distributed
import pytest
import torch
import triton_interpreter
from batches import N, assert_same_batches, known_data, make
from graphs import RELATIONS, random_data, random_hetero
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.sampling.device_topology import DeviceTopology

pytest.importorskip("triton")


@pytest.fixture
def interpreted():
    with triton_interpreter.interpreted():
        yield


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"replace": True},
        {"num_neighbors": [-1, 2]},
        {"subgraph_type": "bidirectional"},
        {"shared_draws": {"block": 3}},
        {"device_rows": 0.5, "depth": 3},
        {"num_neighbors": [3, 2, 2, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("source", ["data", "part"])
def test_batches_equal_the_hosts_batches(interpreted, tmp_path, source, options):
    data = known_data()
    graph, nodes = data, data.train_mask
    if source == "part":
        graph, nodes = salientpp.partition(data, 1, tmp_path / "d", method="random"), "train"
    made = make(graph, input_nodes=nodes, neighbor_sampler="device", **options)
    assert isinstance(made.node_sampler.topology, DeviceTopology)
    assert_same_batches(list(made), list(make(graph, input_nodes=nodes, **options)))


def _on_the_device_of_one_rank(rank: int, root: str) -> int:
    options = {"batch_size": 16, "shuffle": True, "seed": 3, "replication_factor": 0.3}
    want = list(NeighborLoader(salientpp.load(root), [4, 3], "train", **options))
    with triton_interpreter.interpreted():
        on = "device" if rank == 1 else None
        loader = NeighborLoader(salientpp.load(root), [4, 3], "train", neighbor_sampler=on, **options)
        assert_same_batches(list(loader), want)
    return len(want)


def test_ranks_may_sample_in_different_places(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16, method="random")
    assert min(distributed.run(_on_the_device_of_one_rank, 2, str(tmp_path / "d"))) > 3


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
def test_link_batches_equal_the_hosts_batches(interpreted, negatives):
    data = known_data()
    options = dict(num_neighbors=[3, 2], batch_size=200, neg_sampling=negatives, seed=2)
    assert_same_batches(
        list(LinkNeighborLoader(data, neighbor_sampler="device", **options)), list(LinkNeighborLoader(data, **options))
    )


def test_a_saved_state_continues_on_the_other_sampler(interpreted):
    data = known_data()
    want = list(make(data))
    for first, second in ((None, "device"), ("device", None)):
        loader = make(data, neighbor_sampler=first)
        batches = iter(loader)
        begun = [next(batches) for _ in range(3)]
        again = make(data, neighbor_sampler=second)
        again.load_state_dict(loader.state_dict())
        assert_same_batches([*begun, *again], want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_draw_the_same(interpreted, copied):
    loader = make(known_data(), neighbor_sampler="device")
    assert_same_batches(list(copied(loader)), list(make(known_data())))


def test_memory_counts_both_copies_of_the_graph(interpreted):
    one, other = make(known_data()), make(known_data(), neighbor_sampler="device")
    graph = other.node_sampler.topology.graph
    assert other.memory_used()["graph"] - one.memory_used()["graph"] == graph.indptr.nbytes + graph.links.nbytes


def stores():
    data, features, graph = random_data(), MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    graph.put_edge_index(edge_index=data.edge_index, edge_type=None, layout="coo", size=(400, 400))
    return features, graph


def timed():
    data = known_data()
    data.time, data.weight = torch.arange(N), torch.ones(data.num_edges)
    return data


@pytest.mark.parametrize(
    "make_data, options, reason",
    [
        (random_hetero, {"num_neighbors": dict.fromkeys(RELATIONS, [2]), "input_nodes": "paper"}, "data with several node types: the kernels"),
        (stores, {}, "a pair of FeatureStore and GraphStore: the kernels"),
        (timed, {"weight_attr": "weight"}, "weight_attr=: the kernels draw uniformly"),
        (timed, {"time_attr": "time"}, "time_attr=: the kernels do not compare times"),
        (timed, {"disjoint": True}, "disjoint=True: the kernels number"),
        (timed, {"subgraph_type": "induced"}, "subgraph_type='induced': the kernels return"),
        (timed, {"shared_draws": "batch"}, "shared_draws=: the kernels draw for each vertex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_device_does_not_draw_is_refused_with_the_reason(interpreted, make_data, options, reason):
    with pytest.raises(ValueError, match=f"neighbor_sampler='device' excludes {reason}.*; leave one of them out"):
        NeighborLoader(make_data(), **{"num_neighbors": [2], "neighbor_sampler": "device", **options})


def test_fanouts_that_are_too_large_for_a_device_are_refused(interpreted):
    with pytest.raises(ValueError, match=r"draws 0 to 1024 neighbours per vertex, or all \(-1\), got 2000 at hop 1"):
        make(known_data(), num_neighbors=[2, 2000], neighbor_sampler="device")


def test_options_that_change_after_construction_are_refused_too(interpreted):
    loader = make(known_data(), neighbor_sampler="device")
    loader.node_sampler.disjoint = True
    with pytest.raises(RuntimeError, match="a device does not draw with disjoint=True; sample on the host"):
        next(iter(loader))


def test_a_device_is_needed():
    with pytest.raises(
        ValueError, match="neighbor_sampler='device' needs a device other than the CPU, got device='cpu'"
    ):
        make(known_data(), neighbor_sampler="device")


@pytest.mark.parametrize("value", ["gpu", "host", 1])
def test_other_places_are_refused(value):
    expected = (
        "neighbor_sampler must be a torch_geometric.sampler.BaseSampler with sample_from_nodes, 'device' or None, got "
    )
    with pytest.raises(TypeError, match=expected):
        make(known_data(), neighbor_sampler=value)


def test_triton_is_needed(monkeypatch):
    from salientpp.engine.drawing import on_device

    monkeypatch.setattr(on_device, "has_triton", lambda: False)
    monkeypatch.setattr(on_device, "can_draw_on", lambda device: False)
    with pytest.raises(ValueError, match="neighbor_sampler='device' needs Triton, which is not installed"):
        on_device.check_device(torch.device("cuda", 0))
