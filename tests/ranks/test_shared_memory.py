"""Laws of the memory that the ranks of a host share: there is one copy, all ranks see it, and none is left, however the processes end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import distributed
import pytest
import torch
from shared_blocks import blocks_of, mapping

from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import CannotShare, Offer, block, mapped, shared_tensors, sharing

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

NUM_BYTES = 8 * 2**20


def test_a_block_is_mapped_only_by_its_own_offer():
    with block(100) as (memory, offer):
        memory[:] = torch.arange(100, dtype=torch.uint8)
        other = mapped(offer)
        assert torch.equal(other, torch.arange(100, dtype=torch.uint8))
        other[3] = 77
        assert memory[3] == 77
        wrong = Offer(offer.process, offer.file, "00" * 16, 100)
        with pytest.raises(CannotShare, match="is not the rank that offered the memory"):
            mapped(wrong)
        with pytest.raises(CannotShare, match="is not the rank that offered"):
            mapped(Offer(offer.process, offer.file, offer.token, 99))
    with pytest.raises(CannotShare, match="cannot be opened .* separate containers"):
        mapped(offer)
    assert other[3] == 77, "a process that has mapped the memory keeps it"


def _write_shares(rank: int, hosts: list[list[int]]) -> tuple[list, int, int]:
    comm = Comm.create()
    assert sharing(comm, [range(ranks[0], ranks[-1] + 1) for ranks in hosts]) is None
    ours = next(ranks for ranks in hosts if rank in ranks)
    host = comm.among(ours)
    assert (host.rank, host.size) == (ours.index(rank), len(ours))
    numbers, rows, empty = shared_tensors(
        host, [((len(ours),), torch.int64), ((NUM_BYTES // 4,), torch.float32), ((0, 5), torch.bfloat16)]
    )
    assert empty.shape == (0, 5) and not rows.any()
    host.gather_numbers([0])
    numbers[host.rank] = 10 * rank
    rows[host.rank :: host.size] = rank
    host.gather_numbers([1])
    assert (rows[: host.size].int().tolist(), float(rows.sum())) == (ours, sum(ours) * (NUM_BYTES // 4 / len(ours)))
    seen = numbers.tolist(), mapping("Rss"), mapping("Pss")
    host.gather_numbers([1])
    return seen


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [2, 3]], [[0], [1, 2, 3, 4]]], ids=["1x2", "2x2", "1+4"])
def test_ranks_of_a_host_share_one_copy_and_see_each_others_writes(hosts):
    world = sum(map(len, hosts))
    results = distributed.run(_write_shares, world, hosts)
    for ranks in hosts:
        for rank in ranks:
            assert results[rank][0] == [10 * other for other in ranks]
        proportional = sum(results[rank][2] for rank in ranks)
        print("resident", [results[rank][1] for rank in ranks], "proportional", proportional)
        assert NUM_BYTES <= proportional <= NUM_BYTES + 65536, "all ranks together take one copy and a few pages"


def _pretend(rank: int) -> str | None:
    # Rank 1 pretends to be on another machine, where this process id does not exist or belongs to another process.
    if rank == 1:
        import salientpp.ranks.shared_memory as shared

        shared.mapped = _refuse
    return sharing(Comm.create(), [range(2), range(2, 4)])


def _refuse(offer: Offer) -> torch.Tensor:
    return mapped(Offer(offer.process, offer.file, "ff" * 16, offer.num_bytes))


def test_all_ranks_learn_that_one_cannot_share_memory():
    words = distributed.run(_pretend, 4)
    assert len(set(words)) == 1 and "rank 1: process " in words[0] and "is not the rank that offered" in words[0]


def _be_killed(rank: int, folder: str, victims: list[int]) -> str:
    comm = Comm.create()
    host = comm.among(range(comm.size))
    (memory,) = shared_tensors(host, [((NUM_BYTES,), torch.uint8)])
    memory[host.rank :: host.size] = 1
    Path(folder, str(rank)).write_text(str(os.getpid()))
    host.gather_numbers([1])
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        host.gather_numbers([2])
    except RuntimeError as error:
        assert int(memory.sum()) == NUM_BYTES, "the written bytes are visible"
        return str(error)
    return "nothing"


def named_blocks() -> set[str]:
    """Names of shared memory, without semaphores: other tests that run at the same time may use joblib, which makes some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize("victims", [[0], [1], [0, 1, 2]], ids=str)
def test_kill_9_of_one_or_of_all_leaves_no_memory_behind(tmp_path, victims):
    before = named_blocks()
    words = distributed.run(_be_killed, 3, str(tmp_path), victims, may_fail=True)
    for rank in set(range(3)) - set(victims):
        assert f"rank {victims[0]} went away" in words[rank]
    processes = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(processes) == 3
    deadline = time.monotonic() + distributed.HANG
    while blocks_of(processes) and time.monotonic() < deadline:
        time.sleep(0.05)  # the last processes are still ending
    assert blocks_of(processes) == []
    assert named_blocks() <= before, "blocks leave no names"
