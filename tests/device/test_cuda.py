"""Laws that need a GPU: kernels, streams that are late, waits of the host, memory, compiled models and NCCL.

The tests are skipped without a GPU. If FAIL_WITHOUT_CUDA=1 is set, as in `make gpu-check`, they fail.
"""

from __future__ import annotations

from datetime import timedelta

import distributed
import pytest
import torch
import torch.distributed as dist
from batches import assert_same_batches, make
from distributed import HANG
from graphs import random_data
from tier_rows import random_rows
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.comm import Comm
from salientpp.ranks.groups import Groups
from salientpp.store.assembly import assemble_rows
from salientpp.store.fetch import Packed

from .devices import need_cuda, on_cpu

# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (100,), (301,), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64], ids=str)
def test_the_kernel_places_rows_from_device_and_pinned_memory(cuda, dtype, shape):
    import numpy as np

    generator = np.random.default_rng(0)
    sources = [random_rows(generator, size, shape, dtype) for size in (500, 0, 300, 7, 1000)]
    index = torch.from_numpy(generator.integers(0, 1807, size=5000)).int()
    want = torch.cat(sources)[index.long()]
    there = [rows.pin_memory() if i in (2, 3) else rows.to(cuda) for i, rows in enumerate(sources)]
    out = torch.empty_like(want, device=cuda)
    assemble_rows(there, index.to(cuda), out)
    assert torch.equal(out.cpu(), want)


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("device_rows", [0, 0.3])
def test_batches_are_right_when_the_device_is_late(cuda, large, device_rows, zero_copy):
    # Memory freed in Python can still be in use on some stream. A missing event or record would show as wrong rows.
    loader = make(
        large,
        input_nodes=large.train_mask,
        batch_size=1024,
        num_workers=2,
        device=cuda,
        device_rows={"part": device_rows, "zero_copy": zero_copy},
    )
    side, wrong, last = torch.cuda.Stream(), torch.zeros((), device=cuda), []
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


@pytest.mark.parametrize(("zero_copy", "trims"), [(False, False), (True, False), (False, True)])
def test_the_host_never_waits_for_the_device(cuda, large, zero_copy, trims):
    loader = make(
        large,
        input_nodes=large.train_mask,
        batch_size=96,
        num_workers=2,
        device=cuda,
        device_rows={"part": 0.3, "zero_copy": zero_copy},
    )
    model = GraphSAGE(100, 16, num_layers=2, out_channels=7).to(cuda)
    model = salientpp.nn.trim(model) if trims else model
    loss = torch.zeros((), device=cuda)
    given = 0
    try:
        for batch in loader:
            given += 1
            # By the fortieth batch kernels are compiled, memory pools are filled, and batches have the lists that trimmed models use.
            if given == 40:
                torch.cuda.set_sync_debug_mode("error")
            out = model(batch.x, batch.edge_index)[: batch.batch_size].sum()
            out.backward()
            loss += out.detach()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert given > 300 and bool(loss.isfinite())


def test_device_memory_stays_within_the_documented_bound(cuda, large):
    for depth in (1, 10):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loader = make(large, input_nodes=large.train_mask, batch_size=1024, device=cuda, device_rows=0.3, depth=depth)
        for batch in loader:  # noqa: B007  (kept until the memory is read)
            torch.cuda.synchronize()
        stated = loader.memory_used()
        assert torch.cuda.max_memory_allocated() - before <= stated["device"] + stated["batches"] + 2**21
        del loader, batch


# --- models -----------------------------------------------------------------------------------------------


def test_compiled_and_autocast_models_train_on_batches(cuda, large):
    model = GraphSAGE(100, 16, num_layers=2, out_channels=7).to(cuda)
    compiled = torch.compile(model, backend="eager")
    for batch, _ in zip(make(large, input_nodes=large.train_mask, batch_size=256, device=cuda), range(5)):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = compiled(batch.x / 60_000, batch.edge_index)
        out.float().square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_cuda_graph_on_static_buffers_equals_the_plain_model(cuda, large):
    options = {"input_nodes": large.train_mask, "batch_size": 256, "drop_last": True, "pad": "fixed", "device": cuda}
    static = make(large, num_workers=2, **{**options, "pad": {"static": True}})
    model = GraphSAGE(100, 16, num_layers=2, out_channels=7).to(cuda).double().eval()
    graph, out, replayed = torch.cuda.CUDAGraph(), None, 0
    with torch.no_grad():
        for batch, other in zip(static, make(large, num_workers=2, **options), strict=True):
            if out is None:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # cuBLAS allocates its memory before the capture
                    model(batch.x.double(), batch.edge_index)
                torch.cuda.current_stream().wait_stream(side)
                addresses = batch.x.data_ptr(), batch.edge_index.data_ptr()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads pin memory meanwhile
                    out = model(batch.x.double(), batch.edge_index)
            if (batch.x.data_ptr(), batch.edge_index.data_ptr()) != addresses:
                continue  # a larger batch, with buffers of its own
            graph.replay()
            replayed += 1
            want = model(other.x.double(), other.edge_index)[: other.batch_size]
            torch.testing.assert_close(out[: batch.batch_size], want, rtol=1e-9, atol=1e-9)
    assert replayed > 0.9 * len(static)


# --- ranks ------------------------------------------------------------------------------------------------


def _over_nccl(rank: int, root: str) -> list[float]:
    cuda, timeout = need_cuda(), timedelta(seconds=HANG)
    comm = Comm(Groups(dist.new_group([0], backend="gloo"), dist.new_group([0], backend="nccl")), timeout, cuda)
    assert comm.device == cuda
    rows = torch.arange(12.0, device=cuda).view(4, 3)
    pending = comm.all_to_all(rows, [4], [4])
    Comm.create = classmethod(lambda cls, *_: comm)  # a loader on one rank would make no group
    loader = NeighborLoader(salientpp.load(root), [4, 3], "train", batch_size=16, seed=1, device=cuda, device_rows=0.3)
    assert isinstance(loader.engine.producer.fetch.served, Packed)
    assert_same_batches(
        list(on_cpu(loader)), list(NeighborLoader(salientpp.load(root), [4, 3], "train", batch_size=16, seed=1))
    )
    return pending.wait().cpu().flatten().tolist()


def test_rows_travel_over_nccl(cuda, tmp_path):
    salientpp.partition(random_data(), 1, tmp_path / "d", [4, 3], 16, method="random")
    assert distributed.run(_over_nccl, 1, str(tmp_path / "d")) == [[float(i) for i in range(12)]]
