"""Laws of the buffer pool: memory is reused, but never while a tensor shares it."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from graphs import random_data

from salientpp import NeighborLoader
from salientpp.store.buffers import BufferPool

SHAPE = (3000, 128)  # 1.5 MB of float32


def test_memory_is_reused_once_every_tensor_that_shares_it_is_gone():
    pool = BufferPool()
    first = pool.empty(SHAPE, torch.float32)
    address = first.data_ptr()
    view = first[100:200].t()
    del first
    second = pool.empty(SHAPE, torch.float32)
    assert second.data_ptr() != address, "a view still shares the first buffer"
    del view
    assert pool.empty(SHAPE, torch.float32).data_ptr() == address


def test_steady_state_allocates_nothing():
    pool = BufferPool()
    sizes = torch.randint(3000, 3600, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    allocated = []
    for size in sizes:
        out = pool.empty((size, 128), torch.float32)
        out.fill_(1)
        del out
        allocated.append(pool.bytes_allocated)
    assert allocated[-1] == allocated[20] <= 3 * 4 * 2**20


def test_free_buffers_are_bounded():
    pool = BufferPool()
    held = [pool.empty(SHAPE, torch.float32) for _ in range(60)]
    most = pool.bytes_allocated
    del held
    gc.collect()
    assert pool.bytes_allocated <= most * 16 / 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(0, 4), (3,), (2**21,), (2**19, 2, 2)])
def test_outputs_are_ordinary_tensors(shape, dtype):
    out = BufferPool().empty(shape, dtype)
    assert (tuple(out.shape), out.dtype, out.is_contiguous()) == (shape, dtype, True)
    out.zero_()
    assert not (out + out).any()


def test_new_batches_do_not_overwrite_old_ones():
    data = random_data(num_vertices=20_000, num_edges=200_000)
    data.x = torch.arange(20_000).float().view(-1, 1).repeat(1, 200)
    loader = NeighborLoader(data, [10, 10], batch_size=2000, shuffle=True, num_workers=2)
    batches = [batch for _ in range(2) for batch in loader]
    rows = [batch.x[5:10] for batch in loader]  # slices whose batch is gone
    ids = [batch.x[5:10, 0].clone() for batch in batches]
    del loader
    for batch in batches:
        assert batch.x.nbytes > 2**20
        assert torch.equal(batch.x, batch.n_id.float().view(-1, 1).expand(-1, 200))
    assert all(torch.equal(row[:, 0], row[:, 1]) and row.shape == (5, 200) for row in rows) and ids


def test_threads_can_share_a_pool():
    pool, wrong = BufferPool(), []

    def work(number: int) -> None:
        for _ in range(200):
            out = pool.empty(SHAPE, torch.float32)
            out.fill_(number)
            if not bool((out == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_child_and_its_parent_never_share_memory():
    pool = BufferPool()
    free = pool.empty(SHAPE, torch.float32)
    lease = pool.empty(SHAPE, torch.float32)
    addresses = {free.data_ptr(), lease.data_ptr()}
    rows = lease.numpy()  # filled by NumPy, because torch's threads do not exist in the child
    rows.fill(1)
    del free, lease
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            right = bool((rows == 1).all())
            rows.fill(2)
            taken = [pool.empty(SHAPE, torch.float32) for _ in range(2)]
            reuses = taken[0].data_ptr() in addresses and taken[1].data_ptr() not in addresses
            for out in taken:
                out.numpy().fill(3)
            os.write(writer, bytes([right, bool((rows == 2).all()), reuses]))
        finally:
            os._exit(0)
    os.close(writer)
    out = pool.empty(SHAPE, torch.float32)
    assert out.data_ptr() in addresses, "a buffer that was free at the fork is free in both processes"
    out.numpy().fill(4)
    assert os.read(reader, 3) == b"\1\1\1"
    os.waitpid(pid, 0)
    os.close(reader)
    assert (rows == 1).all() and (out == 4).all()
