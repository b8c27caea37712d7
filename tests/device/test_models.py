"""Laws of models on a device: inference and trimmed steps equal those on the CPU and those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import make
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import salientpp
from salientpp.nn import composed_products
from salientpp.sampling.edge_lists import EdgeLists

from .devices import SIMULATES

#: On the simulated device one order is enough, because models use one stream.
ORDERS = range(1)


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GAT])
@pytest.mark.parametrize("jk", [None, "cat"])
def test_inference_on_the_device_equals_inference_on_the_cpu(device, data, part, kind, jk):
    torch.manual_seed(0)
    model = kind(data.num_features, 8, 3, 4, jk=jk)
    on_host = salientpp.inference(model, data, batch_size=64)
    model = model.to(device)
    ids = part.original_id(part.split("all"))
    for got, expected in (
        (salientpp.inference(model, data, batch_size=64), on_host),
        (salientpp.inference(model, part, batch_size=64), on_host[ids]),
    ):
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert next(model.parameters()).device == device


@pytest.mark.parametrize(
    ("kind", "options"),
    [(GraphSAGE, {}), (GCN, {}), (GIN, {}), (GAT, {"heads": 2}), (GAT, {"heads": 2, "v2": True})],
)
def test_a_trimmed_model_on_the_device_equals_the_plain_model(device, data, kind, options):
    if SIMULATES and kind is not GAT:
        pytest.skip("the simulated device has no sparse tensors")
    torch.manual_seed(0)
    plain = kind(data.num_features, 16, 2, 6, **options).double().to(device)
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for batch in make(data, input_nodes=data.train_mask, device=device):
        outs = [model(batch.x.double() / data.num_nodes, batch.edge_index) for model in (plain, trimmed)]
        number = batch.batch_size
        torch.testing.assert_close(outs[1][:number], outs[0][:number], rtol=1e-9, atol=1e-10)
        assert len(outs[1]) < len(outs[0]) or len(outs[0]) == number
        grads = [
            torch.autograd.grad(out[:number].square().sum(), model.parameters())
            for out, model in zip(outs, (plain, trimmed), strict=True)
        ]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_lists_by_source_are_cut_without_a_wait(device):
    indptr, source = torch.tensor([0, 3, 3, 7, 9]), torch.tensor([0, 2, 1, 3, 0, 2, 1, 4, 5])
    lists = EdgeLists(indptr, source, None, 6)
    lists.by_source  # noqa: B018 (made on first use)
    want = composed_products._by_source(lists, 3, 4)
    assert [list(map(int, part)) for part in want] == [[0, 2, 4, 6, 7], [0, 2, 0, 2, 0, 2, 2], [0, 4, 2, 6, 1, 5, 3]]
    module, there = torch.get_device_module(device), lists.pin_memory().to(device, non_blocking=True)
    module.set_sync_debug_mode("error")
    try:
        got = composed_products._by_source(there, 3, 4)
    finally:
        module.set_sync_debug_mode("default")
    for ours, expected in zip(got, want, strict=True):
        assert torch.equal(ours.cpu(), expected)
