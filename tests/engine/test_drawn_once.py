"""Laws of draws that are made once per host: every rank gets its share of every batch, and a batch is drawn once.

No rank waits for a rank that does not draw.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp import NeighborSampler
from salientpp.engine.drawing import drawn_once
from salientpp.engine.drawing.drawn_once import DrawnOnce
from salientpp.ranks import host_locks
from salientpp.ranks.comm import Comm
from salientpp.ranks.host_locks import HostLocks
from salientpp.ranks.shared_memory import CannotShare
from salientpp.sampling.divided_batch import BatchShare, share_of
from salientpp.sampling.packed_share import pack_share, unpack_share

NUM_VERTICES = 300
SAMPLER = NeighborSampler(random_data(NUM_VERTICES, 1500), [3, 2])


class Fault(RuntimeError):
    pass


def draw(index: int) -> Any:
    seeds = torch.randint(NUM_VERTICES, (16,), generator=torch.Generator().manual_seed(index))
    mfg = SAMPLER.sample_from_nodes(NodeSamplerInput(None, seeds), key=index)
    mfg.metadata = (seeds + 1000, None)
    return mfg


def owners(ranks: int) -> Tensor:
    return torch.randint(ranks, (NUM_VERTICES,), generator=torch.Generator().manual_seed(9)).to(torch.int8)


def is_share(found: BatchShare, index: int, comm: Comm) -> bool:
    """True if the share is the one that this rank would make alone."""
    mfg = draw(index)
    return same(found, share_of(mfg, owners(comm.size)[mfg.node], comm.size, comm.rank))


def same(a: BatchShare, b: BatchShare) -> bool:
    tensors = [
        (of.node, of.row, of.col, of.edge, of.share.send, *(value for value in of.metadata or () if value is not None))
        for of in (a, b)
    ]
    names = ("num_vertices", "own", "edges", "sent", "received")
    numbers = [
        [of.num_sampled_nodes, of.num_sampled_edges, of.metadata is None, *(getattr(of.share, name) for name in names)]
        for of in (a, b)
    ]
    return numbers[0] == numbers[1] and all(map(torch.equal, *tensors))


def start(ahead: int = 4, **options: Any) -> tuple[Comm, DrawnOnce]:
    comm = Comm.create()
    return comm, DrawnOnce(comm, owners(comm.size), ahead, **options)


def get(once: DrawnOnce, comm: Comm, indices: Any, first_key: int = 0) -> None:
    """Asks for batches, and checks the shares."""
    for index in indices:
        assert is_share(once.share(index, [index, first_key], lambda index=index: draw(index)), index, comm)


def counts(once: DrawnOnce) -> tuple[int, int]:
    return once.counts.drawn, once.counts.taken


def open_blocks() -> int:
    names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:salientpp" in name for name in names)


# --- packets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, (None, None), "ids", "times"])
def test_a_share_survives_a_packet(metadata):
    mfg = draw(3)
    if metadata != "ids":
        mfg.metadata = (mfg.metadata[0], 2**40 + mfg.metadata[0]) if metadata == "times" else metadata
    for place in range(4):
        share = share_of(mfg, owners(3)[mfg.node], 4, place)  # place 3 has no vertices
        assert same(unpack_share(pack_share(share)), share)
        share.edge = None
        assert unpack_share(pack_share(share)).edge is None


def test_metadata_that_no_packet_holds_are_an_error():
    mfg = draw(3)
    mfg.metadata = (mfg.metadata[0], torch.zeros(16))
    with pytest.raises(TypeError, match="must be int64 to be sent to another rank of the host, got torch.float32"):
        pack_share(share_of(mfg, owners(2)[mfg.node], 2, 0))


# --- draws -----------------------------------------------------------------------------------------------


def _draw_all(rank: int, num_threads: int, batches: int) -> tuple[int, int]:
    comm, once = start(ahead=batches)
    for epoch in range(2):
        with ThreadPoolExecutor(num_threads) as threads:
            indices = range(epoch * batches, (epoch + 1) * batches)
            futures = [threads.submit(once.share, i % batches, [i], lambda i=i: draw(i)) for i in indices]
            for index, future in zip(indices, futures, strict=True):
                assert is_share(future.result(), index, comm)
        comm.gather_numbers([0])
    return counts(once)


@pytest.mark.parametrize("ranks, num_threads", [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_every_batch_is_drawn_once_and_every_rank_gets_its_share(ranks, num_threads):
    batches = 40  # as many as a rank keeps for three others
    found = distributed.run(_draw_all, ranks, num_threads, batches)
    assert sum(drawn for drawn, _ in found) == 2 * batches
    assert all(drawn + taken == 2 * batches for drawn, taken in found)


def _leave_early(rank: int) -> tuple[int, int]:
    comm, once = start(ahead=9)
    get(once, comm, range(2 if rank == 0 else 9))
    comm.gather_numbers([0])
    get(once, comm, range(5, 9) if rank == 0 else range(7, 9), 1)  # resumed at different batches
    comm.gather_numbers([0])
    return counts(once)


def test_ranks_may_leave_early_and_resume_anywhere():
    found = distributed.run(_leave_early, 3)
    assert [sum(numbers) for numbers in found] == [6, 11, 11]
    assert sum(drawn for drawn, _ in found) == 9 + 4


def _repeat(rank: int) -> tuple[int, int]:
    comm, once = start(ahead=8)
    for _ in range(3):
        get(once, comm, range(8))
        comm.gather_numbers([0])
    return counts(once)


def test_an_epoch_that_is_repeated_is_drawn_once_each_time():
    found = distributed.run(_repeat, 2)
    assert sum(drawn for drawn, _ in found) == 3 * 8


def _other_keys(rank: int) -> tuple[int, int, int]:
    comm, once = start()
    for index in (5, 6):  # the same turn, with another key on each rank
        get(once, comm, [index], rank)
        comm.gather_numbers([0])
    get(once, comm, [7])
    comm.gather_numbers([0])
    return *counts(once), once.counts.in_vain


def test_a_share_of_another_key_is_never_taken_and_gives_its_place_up():
    found = distributed.run(_other_keys, 2)
    assert sorted(found)[0][:2] == (2, 1) and sorted(found)[1][:2] == (3, 0)
    assert sum(in_vain for _, _, in_vain in found) == 2, "the later rank took the place of the earlier one"


# --- faults ----------------------------------------------------------------------------------------------


def _fail(rank: int) -> tuple[int, int]:
    comm, once = start()

    def fail() -> Any:
        raise Fault("a draw that fails")

    if rank == 0:
        with pytest.raises(Fault):
            once.share(0, [0], fail)
    comm.gather_numbers([0])
    if rank == 1:
        get(once, comm, [0])
    comm.gather_numbers([0])
    if rank == 0:
        get(once, comm, [0])
    comm.gather_numbers([0])  # a rank that ends takes its blocks along
    return counts(once)


def test_a_draw_that_failed_is_made_by_the_next_rank():
    assert distributed.run(_fail, 2) == [(0, 1), (1, 0)]


def _die(rank: int) -> tuple[int, int]:
    comm, once = start()
    if rank == 0:

        def die() -> Any:
            comm.gather_numbers([0])
            os.kill(os.getpid(), signal.SIGKILL)

        once.share(0, [0], die)
    comm.gather_numbers([0])  # rank 0 holds the lock, and may be dead
    get(once, comm, [0])
    return counts(once)


def test_a_rank_that_is_killed_while_it_draws_keeps_no_lock():
    found = distributed.run(_die, 2, may_fail=True)
    assert found[1] == (1, 0)


def _too_slow(rank: int) -> tuple[int, int, int]:
    comm, once = start(limit=0.0)
    before = open_blocks()
    if rank == 0:

        def wait() -> Any:
            comm.gather_numbers([0])
            comm.gather_numbers([0])
            return draw(0)

        assert is_share(once.share(0, [0, 0], wait), 0, comm)
    else:
        comm.gather_numbers([0])
        get(once, comm, [0])  # rank 0 is drawing it
        comm.gather_numbers([0])
    return *counts(once), open_blocks() - before


def test_a_rank_draws_a_batch_for_itself_if_another_is_too_slow():
    assert distributed.run(_too_slow, 2) == [(1, 0, 2), (1, 0, 0)]


def _nobody_takes(rank: int, ahead: int) -> tuple[int, int, int, int]:
    comm, once = start(ahead)
    before, blocks = open_blocks(), 0
    if rank == 0:
        for index in range(40):
            get(once, comm, [index])
            blocks = max(blocks, open_blocks() - before)
    comm.gather_numbers([0])
    if rank == 1:
        get(once, comm, range(40))
    comm.gather_numbers([0])
    once.close()
    assert open_blocks() == before
    get(once, comm, [50])
    return *counts(once), once.counts.in_vain, blocks


def test_blocks_that_nobody_takes_are_given_up():
    first, second = distributed.run(_nobody_takes, 2, 3)
    assert first == (41, 0, 36, 2 * 4), "the last four shares wait; each has a descriptor, and one of its mapping"
    assert second == (37, 4, 0, 0)


def _without_memory(rank: int) -> tuple[int, int]:
    comm, once = start()

    def block(num_bytes: int) -> Any:
        raise CannotShare("no memory")

    drawn_once.block = block
    get(once, comm, range(3))
    return counts(once)


def test_ranks_draw_themselves_if_no_memory_is_left_for_shares():
    assert distributed.run(_without_memory, 2) == [(3, 0)] * 2


def _fork(rank: int) -> tuple[int, int]:
    comm, once = start()
    get(once, comm, range(3))
    comm.gather_numbers([0])
    child = os.fork()
    if child == 0:
        try:
            before = once.counts.drawn
            get(once, comm, range(3))
            os._exit(0 if once.counts.drawn == before + 3 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    get(once, comm, range(3, 6))
    comm.gather_numbers([0])
    return counts(once)


def test_a_forked_child_draws_itself_and_leaves_its_parent_alone():
    found = distributed.run(_fork, 2)
    assert sum(drawn for drawn, _ in found) == 6


# --- locks -----------------------------------------------------------------------------------------------


def _hold(rank: int) -> list[bool]:
    comm = Comm.create()
    locks, found = HostLocks(comm), []
    for turn in range(2):
        if rank == turn:
            with locks.hold(3, 0.0) as mine, locks.hold(3, 0.0) as again, locks.hold(4, 0.0) as other:
                found += [mine, again, other]
                comm.gather_numbers([0])
                comm.gather_numbers([0])
        else:
            comm.gather_numbers([0])
            with locks.hold(3, 0.0) as mine, locks.hold(5, 0.0) as other:
                found += [mine, other]
            comm.gather_numbers([0])
        comm.gather_numbers([0])
    return found


def test_a_lock_excludes_threads_of_all_ranks():
    first, second = distributed.run(_hold, 2)
    assert first == [True, False, True, False, True]
    assert second == [False, True, True, False, True]


def _cannot_lock(rank: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(22, "Invalid argument")

    if rank == 1:
        host_locks._change = refuse
    start()


def test_a_system_without_such_locks_is_an_error_on_all_ranks():
    for failed in distributed.run(_cannot_lock, 2, may_fail=True):
        assert failed.kind == "CannotShare"
        assert (
            "rank 1: files in memory cannot be locked here: [Errno 22] Invalid argument; this needs F_OFD_SETLK of Linux"
            in failed.text
        )
