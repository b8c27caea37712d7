"""Laws of the sampler that draws on a device, on a GPU. They skip without one, unless FAIL_WITHOUT_CUDA=1 is set."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from batches import assert_same_batches, known_data, make
from device_cases import Case, any_key, assert_drawn_as_on_the_host, random_case, random_graph, rejecting_key, star

import salientpp
from salientpp import LinkNeighborLoader
from salientpp.sampling import device_draw
from salientpp.sampling.device_draw import DeviceGraph
from salientpp.sampling.device_topology import DeviceTopology
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("FAIL_WITHOUT_CUDA") != "1", reason="needs a GPU"
)
CUDA = torch.device("cuda", 0)
FANOUTS = [-1, 0, 1, 2, 3, 5, 8, 10, 15, 20, 40, 64, 100]


@pytest.mark.parametrize("seed", range(10))
def test_a_gpu_draws_what_the_host_draws(seed):
    generator = np.random.default_rng(seed)
    for _ in range(100):
        assert_drawn_as_on_the_host(random_case(generator, 200, 3000, 40, FANOUTS), CUDA)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("fanouts", [[15, 10, 5], [10, 10, 10, 10], [-1, 5], [300, 3]], ids=str)
def test_a_gpu_draws_large_batches_as_the_host_does(fanouts, pinned, monkeypatch):
    if pinned:
        monkeypatch.setattr(device_draw, "SHARE_OF_FREE_MEMORY", 0.0)
    generator = np.random.default_rng(1)
    for _ in range(5):
        graph = random_graph(generator, 200_000, 3_000_000)
        held = DeviceGraph.of(graph, CUDA)
        assert held.indptr.is_pinned() == held.lists.is_pinned() == pinned
        for replace in (False, True):
            seeds = torch.from_numpy(generator.integers(0, 200_000, size=1024))
            assert_drawn_as_on_the_host(Case(graph, seeds, fanouts, any_key(generator), replace), CUDA, held)


@pytest.mark.parametrize("fanout", [-1, 1, 48, 49, 333, 1024])
@pytest.mark.parametrize("replace", [False, True])
def test_a_gpu_draws_from_hubs_as_the_host_does(fanout, replace):
    graph = star(100_000, 3)
    seeds = torch.tensor([0, 2, 1, 100_002, 0, 0])
    assert_drawn_as_on_the_host(Case(graph, seeds, [fanout], 9, replace), CUDA)


@pytest.mark.parametrize("draw", [0, 1, 4])
@pytest.mark.parametrize("replace", [False, True])
def test_a_gpu_repeats_rejected_draws_as_the_host_does(replace, draw):
    case = Case(star(1000, 200), torch.arange(200).flip(0), [5], rejecting_key(77, draw), replace)
    assert_drawn_as_on_the_host(case, CUDA)


def test_threads_draw_from_one_topology_at_once():
    generator = np.random.default_rng(2)
    graph = random_graph(generator, 100_000, 1_500_000)
    host, device = GraphTopology(graph), DeviceTopology(graph, CUDA)
    batches = [(torch.from_numpy(generator.integers(0, 100_000, size=512)), any_key(generator)) for _ in range(60)]

    def drawn(topology, seeds, key):
        return topology.sample({None: seeds}, key, DrawOptions([[10, 5, 5]]))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda batch: drawn(device, *batch), batches))
    for batch, sample in zip(batches, found, strict=True):
        want = drawn(host, *batch)
        for name in ("node", "row", "col", "edge"):
            value = getattr(sample, name)
            assert value.device.type == "cpu" and torch.equal(value, getattr(want, name)), name
        assert sample.num_sampled_nodes == want.num_sampled_nodes
        assert sample.num_sampled_edges == want.num_sampled_edges


@pytest.mark.parametrize("source", ["data", "part"])
@pytest.mark.parametrize("depth, num_workers", [(1, 0), (4, 1), (10, 3)])
def test_a_loader_that_samples_on_a_gpu_gives_the_hosts_batches(source, depth, num_workers, tmp_path):
    data = known_data()
    graph, nodes = data, data.train_mask
    if source == "part":
        graph, nodes = salientpp.partition(data, 1, tmp_path / "d", method="random"), "train"
    want = list(make(graph, input_nodes=nodes))
    options = {"device": CUDA, "depth": depth, "num_workers": num_workers, "device_rows": 0.3}
    batches = list(make(graph, input_nodes=nodes, neighbor_sampler="device", **options))
    assert all(batch.edge_index.device == batch.x_float32.device == CUDA for batch in batches)
    assert_same_batches([batch.to("cpu") for batch in batches], want)


def test_a_link_loader_that_samples_on_a_gpu_gives_the_hosts_batches():
    data = known_data()
    links = {"num_neighbors": [3, 2], "batch_size": 64, "neg_sampling": "binary", "seed": 2}
    batches = LinkNeighborLoader(data, device=CUDA, neighbor_sampler="device", num_workers=2, **links)
    assert_same_batches([batch.to("cpu") for batch in batches], list(LinkNeighborLoader(data, **links)))
