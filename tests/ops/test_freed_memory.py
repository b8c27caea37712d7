"""Laws of memory that the C library keeps: what threads freed returns to the system, also after epochs of a rank that only trains within a budget."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
import torch
from own_pages import needs_counts_of_blocks

import salientpp
from salientpp import NeighborLoader, ops
from salientpp.datasets import synthetic

MIB = 2**20


def anonymous_bytes() -> int:
    """Returns the resident bytes of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def kept(rank: int) -> int:
    """Returns the bytes that the process keeps of 30 MiB that a thread took and freed, after the thread has ended."""
    torch.empty(20 * MIB, dtype=torch.uint8).fill_(1)  # blocks of up to 20 MiB then come from arenas

    def work() -> None:
        ops.mark_thread()
        held = [torch.empty(MIB, dtype=torch.uint8).fill_(1) for _ in range(30)]
        del held

    gc.collect()
    ops.return_freed_memory()
    before = anonymous_bytes()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ops.return_freed_memory()
    return anonymous_bytes() - before


@needs_counts_of_blocks
def test_memory_that_an_ended_thread_freed_returns_to_the_system():
    [still] = distributed.run(kept, 1)
    assert still < 10 * MIB


@needs_counts_of_blocks
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_limits_of_the_user_stay_when_memory_of_threads_returns(monkeypatch, name):
    def called(*args: int) -> int:
        raise AssertionError("the C library was asked to change a limit")

    memory = sys.modules["salientpp.ops.memory"]
    ops.mark_thread()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=called, malloc_trim=lambda pad: 1))
    monkeypatch.setenv(name, "1000000")
    ops.return_freed_memory()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_while_blocks_are_moved_knows_where_they_are(monkeypatch):
    memory, moving = sys.modules["salientpp.ops.memory"], threading.Event()

    def moved(address: Any, size: Any) -> int:
        moving.set()
        time.sleep(0.1)  # the other thread forks
        return 2

    library = SimpleNamespace(mallopt=lambda option, value: 1, malloc_trim=lambda pad: 1, realloc=moved)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(memory, "_marks", {0: 1})
    monkeypatch.setattr(memory, "_is_set_by_user", lambda: False)
    thread = threading.Thread(target=ops.return_freed_memory)
    thread.start()
    assert moving.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if memory._changing.acquire(blocking=False) and memory._marks == {0: 2} else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def returns_by_epoch(
    rank: int, root: str, storage: int, trainers: int, options: dict[str, Any], ticks: int = 10**9
) -> list[int]:
    """Returns how often memory was returned until the end of each of three epochs, of which the second is left early.

    Args:
        storage: number of ranks that only store. For them, the result is how often they returned memory in all.
        trainers: number of other ranks.
        ticks: number of ticks after which memory is returned within an epoch.
    """
    found: list[int] = []
    returned: list[int] = []
    producer: Any = sys.modules["salientpp.engine.producer"]
    producer._TICKS = ticks
    producer.return_freed_memory = lambda: returned.append(os.getpid())
    part = salientpp.load(root, storage_ranks=storage)
    if rank >= trainers:
        salientpp.serve(part)
        return [len(returned)]
    loader = NeighborLoader(part, [3, 2], "train", batch_size=8, **options)
    for most in (1000, 1, 1000):
        for _, _ in zip(range(most), loader):
            pass
        gc.collect()
        loader.engine.close()
        found.append(len(returned))
    return found


def returns(root: Path, storage: int, *args: Any) -> list[list[int]]:
    """Returns the returns of two ranks that train, and of others that store."""
    data = synthetic(num_vertices=400, num_features=4, train_fraction=0.5)
    salientpp.partition(data, 2, root / "parts", [3, 2], 8, refine=False)
    return distributed.run(returns_by_epoch, 2 + storage, str(root / "parts"), storage, 2, *args)


@pytest.mark.parametrize(
    ("storage", "options", "expected"),
    [
        (2, {"memory": "1kB"}, [[1, 2, 3]] * 2 + [[0]] * 2),
        (2, {"replication_factor": 0.1}, [[0, 0, 0]] * 2 + [[0]] * 2),
        (0, {"memory": "1kB"}, [[0, 0, 0]] * 2),
    ],
)
def test_a_rank_that_only_trains_within_a_budget_returns_freed_memory_after_each_epoch(
    tmp_path, storage, options, expected
):
    assert returns(tmp_path, storage, options) == expected


def test_a_rank_that_only_trains_within_a_budget_returns_freed_memory_within_long_epochs(tmp_path):
    *trained, stored = returns(tmp_path, 1, {"memory": "1kB"}, 5)
    assert stored == [0]
    for found in trained:
        first, second, third = (after - before for before, after in zip([0, *found], found))
        assert first > 2 and third > 2 and second >= 1, found


def looks_up_without_memory(rank: int) -> list[bool]:
    """Looks up many ids with too little memory, and then fewer. Returns whether the latter were all found in the part."""
    ids, book = torch.arange(8_000_000), torch.tensor([0, 8_000_000, 9_000_000])
    ops.look_up(ids[:4_000_000], book, 0, [], [])  # blocks of more than 32 MiB have pages of their own
    before, found = resource.getrlimit(resource.RLIMIT_AS), []
    for more in range(90, 190, 20):  # some do for the first blocks of a look-up, and not for all
        held = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (held + more * 2**20, before[1]))
        with contextlib.suppress(MemoryError, RuntimeError):
            ops.look_up(ids, book, 0, [], [])
        resource.setrlimit(resource.RLIMIT_AS, before)
        positions, rows, _ = ops.look_up(ids[:7_000_000], book, 0, [], [])
        found.append(torch.equal(positions[0], ids[:7_000_000]) and torch.equal(rows[0], ids[:7_000_000]))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_look_up_after_one_that_got_no_memory_is_right():
    assert distributed.run(looks_up_without_memory, 1) == [[True] * 5]
