"""Laws that need a GPU. They skip without one, unless FAIL_WITHOUT_CUDA=1 is set, as `make gpu-check` does.

Batches on the device are compared with batches on the CPU, which the other tests check against the laws.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import distributed
import pytest
import torch
import torch.distributed as dist
from batches import assert_same_batches, known_data, make
from distributed import HANG
from graphs import RELATIONS, random_data, random_hetero
from tier_rows import random_rows
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.ranks.comm import Comm
from salientpp.ranks.groups import Groups
from salientpp.store.assembly import assemble_rows
from salientpp.store.fetch import Packed

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("FAIL_WITHOUT_CUDA") != "1", reason="needs a GPU"
)
CUDA = torch.device("cuda", 0)
N = 250


@pytest.fixture(scope="module")
def data() -> Data:
    return known_data()


@pytest.fixture(scope="module")
def part(data, tmp_path_factory) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("cuda") / "d", [4, 3], 16, method="random")


@pytest.fixture(scope="module")
def large() -> Data:
    """Graph whose batches are megabytes, so that copies and kernels take measurable time."""
    data = random_data(60_000, 900_000, train_fraction=0.5)
    data.x = torch.arange(60_000).view(-1, 1).repeat(1, 100).float()
    return data


def on_cpu(batches) -> list:
    return [batch.to("cpu") for batch in batches]


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (100,), (301,), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64], ids=str)
def test_the_kernel_places_rows_from_device_and_pinned_memory(dtype, shape):
    import numpy as np

    generator = np.random.default_rng(0)
    sources = [random_rows(generator, size, shape, dtype) for size in (500, 0, 300, 7, 1000)]
    index = torch.from_numpy(generator.integers(0, 1807, size=5000)).int()
    want = torch.cat(sources)[index.long()]
    there = [rows.pin_memory() if i in (2, 3) else rows.to(CUDA) for i, rows in enumerate(sources)]
    out = torch.empty_like(want, device=CUDA)
    assemble_rows(there, index.to(CUDA), out)
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["data", "part"])
def test_batches_on_the_device_equal_batches_on_the_cpu(data, part, source, device_rows, zero_copy):
    graph, nodes = (data, data.train_mask) if source == "data" else (part, "train")
    want = list(make(graph, input_nodes=nodes))
    for depth, num_workers in [(1, 0), (4, 1), (10, 3)]:
        options = {
            "device_rows": device_rows,
            "depth": depth,
            "num_workers": num_workers,
            "zero_copy": zero_copy,
            "device": CUDA,
        }
        batches = list(make(graph, input_nodes=nodes, **options))
        for name, value in batches[0]:
            assert not isinstance(value, torch.Tensor) or value.device == CUDA, (
                f"{name} is on {value.device}, expected {CUDA}"
            )
        assert_same_batches(on_cpu(batches), want)


def test_typed_and_link_batches_on_the_device_equal_those_on_the_cpu(data):
    graph = random_hetero(paper=60, author=40, venue=5)
    options = {
        "num_neighbors": dict.fromkeys(RELATIONS, [3, 2]),
        "input_nodes": "paper",
        "batch_size": 8,
        "seed": 1,
        "device_rows": 0.4,
    }
    for one, other in zip(
        NeighborLoader(graph, **options), on_cpu(NeighborLoader(graph, device=CUDA, **options)), strict=True
    ):
        for store, same in zip(one.stores, other.stores, strict=True):
            for name, value in store.items():
                assert torch.equal(value, same[name]) if isinstance(value, torch.Tensor) else value == same[name], name
    links = {"num_neighbors": [3, 2], "batch_size": 64, "neg_sampling": "binary", "seed": 2}
    assert_same_batches(
        on_cpu(LinkNeighborLoader(data, device=CUDA, device_rows=0.2, **links)),
        list(LinkNeighborLoader(data, **links)),
    )


@pytest.mark.parametrize("stored", [torch.float16, torch.int8])
def test_x_is_converted_on_the_device(stored):
    data = random_data(100, 600)
    data.x = data.x.to(stored)
    for one, other in zip(make(data), make(data, dtype=torch.float32, device_rows=0.5, device=CUDA), strict=True):
        assert other.x.dtype == torch.float32 and torch.equal(one.x.float(), other.x.cpu())


def test_attributes_already_on_the_device_are_in_the_batch(large):
    data = Data(x=large.x, edge_index=large.edge_index, there=torch.arange(large.num_nodes, device=CUDA))
    for batch in make(data, input_nodes=torch.arange(3000), device=CUDA, batch_size=512):
        assert torch.equal(batch.there, batch.n_id) and torch.equal(batch.x[:, 0].long(), batch.n_id)


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("device_rows", [0, 0.3])
def test_batches_are_right_when_the_device_is_late(large, device_rows, zero_copy):
    # Memory freed in Python can still be in use on some stream. A missing event or record would show as wrong rows.
    loader = make(
        large,
        input_nodes=large.train_mask,
        batch_size=1024,
        num_workers=2,
        device=CUDA,
        device_rows=device_rows,
        zero_copy=zero_copy,
    )
    side, wrong, last = torch.cuda.Stream(), torch.zeros((), device=CUDA), []
    for index, batch in enumerate(loader):
        if index % 3 == 0:
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host runs ahead
        wrong += (batch.x != batch.n_id.view(-1, 1)).any() | (batch.y != batch.n_id % 7).any()
        last.append((batch.x, batch.n_id))
        if len(last) > 3:  # frees memory at other times than batches do
            x, n_id = last.pop(0)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                wrong += (x != n_id.view(-1, 1)).any()
            x.record_stream(side), n_id.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
    assert int(wrong) == 0


@pytest.mark.parametrize("zero_copy", [False, True])
def test_the_host_never_waits_for_the_device(large, zero_copy):
    loader = make(
        large,
        input_nodes=large.train_mask,
        batch_size=96,
        num_workers=2,
        device=CUDA,
        device_rows=0.3,
        zero_copy=zero_copy,
    )
    model = GraphSAGE(100, 16, num_layers=2, out_channels=7).to(CUDA)
    loss = torch.zeros((), device=CUDA)
    given = 0
    try:
        for batch in loader:
            given += 1
            if given == 20:  # by now kernels are compiled and memory pools are filled
                torch.cuda.set_sync_debug_mode("error")
            loss += model(batch.x, batch.edge_index)[: batch.batch_size].sum().detach()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert given > 300 and bool(loss.isfinite())


def test_device_memory_stays_within_the_documented_bound(large):
    for depth in (1, 10):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loader = make(large, input_nodes=large.train_mask, batch_size=1024, device=CUDA, device_rows=0.3, depth=depth)
        for batch in loader:  # noqa: B007  (kept until the memory is read)
            torch.cuda.synchronize()
        stated = loader.memory()
        assert torch.cuda.max_memory_allocated() - before <= stated["device"] + stated["batches"] + 2**21
        del loader, batch


# --- models -----------------------------------------------------------------------------------------------


def test_compiled_and_autocast_models_train_on_batches(large):
    model = GraphSAGE(100, 16, num_layers=2, out_channels=7).to(CUDA)
    compiled = torch.compile(model, backend="eager")
    for batch, _ in zip(make(large, input_nodes=large.train_mask, batch_size=256, device=CUDA), range(5)):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = compiled(batch.x / 60_000, batch.edge_index)
        out.float().square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- ranks ------------------------------------------------------------------------------------------------


def _compare_on_one_gpu(rank: int, root: str) -> int:
    part = salientpp.load(root)
    common = {"batch_size": 16, "shuffle": True, "seed": 3, "replication_factor": 0.3}
    want, compared = list(NeighborLoader(part, [4, 3], "train", **common)), 0
    for depth, device_rows, device_cache, zero_copy in [
        (1, 0, 0, False),
        (10, 0.3, 100, False),
        (10, 0.5, 10**6, True),
    ]:
        options = {
            "depth": depth,
            "device_rows": device_rows,
            "device_cache": device_cache,
            "zero_copy": zero_copy,
            "device": CUDA,
        }
        assert_same_batches(on_cpu(NeighborLoader(part, [4, 3], "train", **common, **options)), want)
        compared += len(want)
    return compared


def test_two_ranks_on_one_gpu_over_gloo(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16, method="random")
    assert min(distributed.run(_compare_on_one_gpu, 2, str(tmp_path / "d"))) > 3


def _over_nccl(rank: int, root: str) -> list[float]:
    timeout = timedelta(seconds=HANG)
    comm = Comm(Groups(dist.new_group([0], backend="gloo"), dist.new_group([0], backend="nccl")), timeout, CUDA)
    assert comm.device == CUDA
    rows = torch.arange(12.0, device=CUDA).view(4, 3)
    pending = comm.all_to_all(rows, [4], [4])
    Comm.create = classmethod(lambda cls, *_: comm)  # a loader on one rank would make no group
    loader = NeighborLoader(salientpp.load(root), [4, 3], "train", batch_size=16, seed=1, device=CUDA, device_rows=0.3)
    assert isinstance(loader.engine.producer.fetch.served, Packed)
    assert_same_batches(
        on_cpu(loader), list(NeighborLoader(salientpp.load(root), [4, 3], "train", batch_size=16, seed=1))
    )
    return pending.wait().cpu().flatten().tolist()


def test_rows_travel_over_nccl(tmp_path):
    salientpp.partition(random_data(), 1, tmp_path / "d", [4, 3], 16, method="random")
    assert distributed.run(_over_nccl, 1, str(tmp_path / "d")) == [[float(i) for i in range(12)]]


# --- inference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GAT])
@pytest.mark.parametrize("jk", [None, "cat"])
def test_inference_on_the_device_equals_inference_on_the_cpu(data, part, kind, jk):
    torch.manual_seed(0)
    model = kind(data.num_features, 8, 3, 4, jk=jk)
    on_host = salientpp.inference(model, data, batch_size=64)
    model = model.to(CUDA)
    ids = part.original_id(part.split("all"))
    for got, expected in (
        (salientpp.inference(model, data, batch_size=64), on_host),
        (salientpp.inference(model, part, batch_size=64), on_host[ids]),
    ):
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert next(model.parameters()).device == CUDA


# --- training steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [(GraphSAGE, {}), (GCN, {}), (GIN, {}), (GAT, {"heads": 2}), (GAT, {"heads": 2, "v2": True})],
)
def test_a_trimmed_model_on_the_device_equals_the_plain_model(data, kind, options):
    plain = kind(data.num_features, 16, 2, 6, **options).to(CUDA).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(plain))
    for batch in make(data, input_nodes=data.train_mask, device=CUDA):
        outs = [model(batch.x.double() / N, batch.edge_index) for model in (plain, trimmed)]
        number = batch.batch_size
        torch.testing.assert_close(outs[1][:number], outs[0][:number], rtol=1e-9, atol=1e-10)
        assert len(outs[1]) < len(outs[0]) or len(outs[0]) == number
        grads = [
            torch.autograd.grad(out[:number].square().sum(), model.parameters())
            for out, model in zip(outs, (plain, trimmed), strict=True)
        ]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
