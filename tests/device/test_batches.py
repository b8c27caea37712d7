"""Laws of batches that are delivered on a device: they equal the batches on the CPU, which other tests check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import assert_same_batches, differences, make
from graphs import RELATIONS, random_data, random_hetero
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.store.narrow import FORMATS

from .devices import on_cpu


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["data", "part"])
def test_batches_on_the_device_equal_batches_on_the_cpu(device, data, part, source, device_rows, zero_copy):
    graph, nodes = (data, data.train_mask) if source == "data" else (part, "train")
    want = list(make(graph, input_nodes=nodes))
    for depth, num_workers in [(1, 0), (4, 1), (10, 3)]:
        options = {
            "depth": depth,
            "num_workers": num_workers,
            "device_rows": {"part": device_rows, "zero_copy": zero_copy},
        }
        batches = list(make(graph, input_nodes=nodes, device=device, **options))
        for name, value in batches[0]:
            assert not isinstance(value, torch.Tensor) or value.device == device, name
        assert_same_batches(list(on_cpu(batches)), want)


def test_batches_are_right_while_others_are_freed(device, data):
    # Memory freed in Python can still be in use on some stream.
    options = {"input_nodes": data.train_mask, "batch_size": 8}
    loader = make(data, device=device, device_rows=0.3, **options)
    for want, got in zip(make(data, **options), on_cpu(loader), strict=True):
        assert differences(got, want) == []


def test_typed_batches_on_the_device_equal_those_on_the_cpu(device):
    graph = random_hetero(paper=60, author=40, venue=5)
    fanouts = dict.fromkeys(RELATIONS, [3, 2])
    options = {"input_nodes": "paper", "batch_size": 8, "seed": 1, "device_rows": 0.4}
    loaders = NeighborLoader(graph, fanouts, **options), NeighborLoader(graph, fanouts, device=device, **options)
    for want, got in zip(loaders[0], on_cpu(loaders[1]), strict=True):
        for one, other in zip(want.stores, got.stores, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], (
                    name
                )


@pytest.mark.parametrize("source", ["data", "part"])
def test_tables_on_the_device_equal_those_on_the_cpu(device, tmp_path, source):
    from tables import parts, same, table  # skips the test without PyTorch Frame

    graph: Any = random_hetero(paper=60, author=40, venue=5)
    for name in graph.node_types:
        graph[name].tf = table(graph[name].num_nodes)
    nodes: Any = "paper"
    if source == "part":
        graph, nodes = salientpp.partition(graph, 1, tmp_path / "d", [3, 2], 8, seeds="all"), ("paper", "all")
    options: dict[str, Any] = {"input_nodes": nodes, "batch_size": 8, "seed": 1}
    want = list(NeighborLoader(graph, [3, 2], **options))
    for device_rows, num_workers in [(0, 0), (0.4, 2)]:
        where = {"device": device, "device_rows": device_rows, "num_workers": num_workers}
        batches = list(NeighborLoader(graph, [3, 2], **where, **options))
        assert all(tensor.device == device for tensor in parts(batches[0]["paper"].tf))
        for one, other in zip(want, on_cpu(batches), strict=True):
            for name in one.node_types:
                assert same(one[name].tf, other[name].tf), name


def test_link_batches_on_the_device_equal_those_on_the_cpu(device, data):
    some = data.edge_index[:, :200]
    links = {"num_neighbors": [3, 2], "edge_label_index": some, "batch_size": 32, "neg_sampling": "binary", "seed": 2}
    got = LinkNeighborLoader(data, device=device, device_rows=0.2, **links)
    assert_same_batches(list(on_cpu(got)), list(LinkNeighborLoader(data, **links)))


@pytest.mark.parametrize("stored", [torch.float16, torch.int8])
def test_x_is_converted_on_the_device(device, stored):
    data = random_data(100, 600)
    data.x = data.x.to(stored)
    got = make(data, dtype=torch.float32, device_rows=0.5, device=device)
    for one, other in zip(make(data), on_cpu(got), strict=True):
        assert other.x.dtype == torch.float32 and torch.equal(one.x.float(), other.x)


@pytest.mark.parametrize("format", FORMATS)
def test_narrow_rows_are_decoded_on_the_device(device, tmp_path, format):
    data = random_data(300, 1800)
    data.x = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    part = salientpp.partition(data, 1, tmp_path / "d", [4, 3], 16, method="random", store_as={"x": format})
    want = list(make(part, input_nodes="train"))
    for device_rows in (0, 0.3, 1.0):
        assert_same_batches(list(on_cpu(make(part, input_nodes="train", device=device, device_rows=device_rows))), want)


@pytest.mark.parametrize("device_rows", [0, 0.3])
def test_attributes_already_on_the_device_are_in_the_batch(device, data, device_rows):
    number = data.num_nodes
    mixed = Data(x=data.x, edge_index=data.edge_index, there=torch.arange(number).to(device), num_nodes=number)
    for batch in on_cpu(make(mixed, device=device, device_rows=device_rows)):
        assert torch.equal(batch.there, batch.n_id) and torch.equal(batch.x[:, 0].long(), batch.n_id)


def _summarise(batch: Data) -> Data:
    batch.total = batch.x.sum(0) + batch.y.sum()
    batch.x = batch.x * 2 - 1
    return batch


@pytest.mark.parametrize("depth", [1, 10])
def test_a_transform_runs_on_the_device(device, data, depth):
    devices = set()

    def transform(batch: Data) -> Data:
        devices.update(value.device for _, value in batch if isinstance(value, torch.Tensor))
        return _summarise(batch)

    got = make(data, device=device, device_rows=0.3, depth=depth, num_workers=2, transform=transform)
    assert_same_batches(list(on_cpu(got)), list(make(data, transform=_summarise)))
    assert devices == {device}


def test_padded_batches_on_the_device_equal_those_on_the_cpu(device, data):
    options = {"input_nodes": data.train_mask, "pad": "bucket"}
    got = make(data, device=device, device_rows=0.3, num_workers=1, **options)
    assert_same_batches(list(on_cpu(got)), list(make(data, **options)))
