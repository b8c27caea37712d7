"""Laws of exchanges through shared memory: rows arrive as over gloo, whatever the order of waits and the sizes; memory is reused; failures end the wait."""

from __future__ import annotations

import os
import signal
from typing import Any

import distributed
import pytest
import torch
from torch import Tensor

from salientpp.ranks import shared_memory
from salientpp.ranks.comm import Comm
from salientpp.ranks.host_memory import HostMemory


def counts_of(draw: torch.Generator, size: int, largest: int) -> Tensor:
    """Numbers of rows from each rank to each rank, the same on all ranks; some are 0."""
    return torch.randint(-largest // 3, largest, (size, size), generator=draw).clamp(min=0)


def rows_of(number: int, rank: int, count: int, form: int) -> Tensor:
    values = torch.arange(count * 3) + 1000 * number + 100_000 * rank
    if form == 0:
        return values.to(torch.float64).view(count, 3)
    return values.to([torch.int64, torch.float32, torch.bfloat16][form - 1]).view(count, 3, 1)


def exchanges(rank: int, size: int) -> int:
    comm = Comm.create()
    memory = HostMemory.create(comm)
    assert memory is not None
    draw = torch.Generator().manual_seed(size)
    under_way: list[Any] = []
    for number in range(60):
        counts = counts_of(draw, size, 1 << (number % 12))
        rows = rows_of(number, rank, int(counts[rank].sum()), number % 4)
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        expected = comm.all_to_all(rows, send, receive).wait()
        under_way.append((memory.begin(rows, send, receive), expected))
        rows.fill_(-1)
        depth, turn = torch.randint(4, (2,), generator=torch.Generator().manual_seed(number + rank)).tolist()
        while len(under_way) > depth:  # each rank waits for other numbers of exchanges at a time, and in another order
            pending, expected = under_way.pop(turn % len(under_way))
            assert torch.equal(pending.wait(), expected)
    for pending, expected in under_way:
        assert torch.equal(pending.wait(), expected)
    return len(memory._blocks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_through_shared_memory_equal_those_over_gloo(size):
    for blocks in distributed.run(exchanges, size, size):
        assert blocks <= 12


def in_turn(rank: int) -> tuple[int, int]:
    memory = HostMemory.create(Comm.create())
    files = 0
    for number in range(100):
        pending = memory.begin(torch.full((40_000,), float(number)), [20_000, 20_000], [20_000, 20_000])
        if number % 10 == 9:
            del pending  # as after an error
            continue
        assert bool((pending.wait() == number).all())
        if number == 50:
            files = len(os.listdir("/proc/self/fd"))
    return len(memory._blocks), len(os.listdir("/proc/self/fd")) - files


def test_blocks_are_reused():
    for blocks, more_files in distributed.run(in_turn, 2):
        assert blocks <= 4
        assert more_files <= 8  # two for each block that this rank made, one for each of the other rank


def dying(rank: int) -> None:
    memory = HostMemory.create(Comm.create())
    pending = memory.begin(torch.ones(8), [4, 4], [4, 4])
    pending.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory.begin(torch.ones(8), [4, 4], [4, 4]).wait()


def test_a_killed_rank_ends_the_wait():
    alive, killed = distributed.run(dying, 2, may_fail=True)
    assert killed.kind == "Died"
    assert alive.kind == "RankFailure"


def without(rank: int) -> bool:
    def block(num_bytes: int) -> Any:
        raise shared_memory.CannotShare("no")

    if rank == 1:
        shared_memory.mapped = lambda offer: block(0)
    return HostMemory.create(Comm.create()) is None


def test_ranks_that_cannot_share_memory_use_the_network():
    assert distributed.run(without, 2) == [True, True]
