"""Laws of faults at random moments: every rank ends, with correct batches or with an error that names the culprit.

Tests that take minutes are marked ``faults`` and run with `make test-faults`. Short versions of them run in every test run. Each case prints its
random seed.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import HANG, NEVER
from graphs import random_data
from silence import note_said, suspend_self

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks import failure, job_store, standstill, waiting

FANOUTS, BATCH = [4, 3], 8

#: Seconds that ranks wait for one that is gone. A rank that is alive but slow must not be taken for gone.
TIMEOUT = 20
STOPPED_TIMEOUT = 5


def _partition(root: Path, num_parts: int) -> str:
    salientpp.partition(random_data(), num_parts, root, FANOUTS, BATCH)
    return str(root)


def _loader(root: str, **options) -> NeighborLoader:
    options = {
        "batch_size": BATCH,
        "shuffle": True,
        "seed": 7,
        "timeout": TIMEOUT,
        "num_workers": 1,
        "replication_factor": 0.1,
        **options,
    }
    return NeighborLoader(salientpp.load(root), FANOUTS, "train", **options)


def _is_right(part: salientpp.PartitionedGraph, batch) -> bool:
    return torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))


# --- kill -9 at a random moment ---------------------------------------------------------------------------


def _until_killed(
    rank: int, root: str, victim: int, moment: float, depth: int, how: str
) -> tuple[str, str, float, int, int]:
    """Runs epochs until a rank dies. Returns the error, the time from the fault to the error, and the numbers of batches and of wrong batches."""
    part = salientpp.load(root)
    rng = random.Random(f"{moment} {rank}")
    dist.barrier()
    if rank == victim:
        deadly = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        threading.Timer(moment, os.kill, (os.getpid(), deadly)).start()
    started, batches, wrong = time.monotonic(), 0, 0
    try:
        loader = _loader(root, depth=depth)
        while time.monotonic() < started + moment + HANG / 2:
            for batch in loader:
                batches += 1
                wrong += not _is_right(part, batch)
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.02)
                if rng.random() < 0.02:
                    break
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started - moment, batches, wrong
    return "none", "", 0.0, batches, wrong


def _campaign(tmp_path: Path, number: int, seed: int, how: str = "killed") -> None:
    rng = random.Random(seed)
    roots = {parts: _partition(tmp_path / str(parts), parts) for parts in (2, 3, 4)}
    batches, named = 0, Counter()
    for _ in range(number):
        parts, depth, hosts = rng.choice([2, 3, 4]), rng.choice([1, 3, 10]), rng.random() < 0.5
        victim, moment = rng.randrange(parts), rng.random() ** 2 * 1.5
        case = f"seed {seed}: {parts} ranks, rank {victim} {how} after {moment:.4f} s, depth {depth}, rank 0 hosts the store: {hosts}"
        print(case)
        results = distributed.run(
            _until_killed, parts, roots[parts], victim, moment, depth, how, may_fail=True, rank_0_hosts=hosts
        )
        assert results[victim].kind == "Died", case
        for rank, result in enumerate(results):
            if rank != victim:
                kind, text, seconds, given, wrong = result
                print("  ", rank, kind, f"{seconds:.2f} s", given, text[:160])
                # Rank 0 hosts the store. It may end before a rank that is still connecting can ask the store who is missing.
                gone = (
                    hosts
                    and "key-value store (which rank 0 or torchrun hosts) went away while loaders were made" in text
                )
                assert gone or re.search(rf"ranks? (\d, )*{victim}(, \d)* ", text.replace(f"rank {rank}, batch", "")), (
                    case
                )
                named["store" if gone else "alone" if f"rank {victim} " in text else "among others"] += 1
                assert seconds < TIMEOUT + 60, case
                assert wrong == 0, case
                batches += given
    print(f"{number} killed; named by the survivors: {dict(named)}; {batches} batches, none wrong")
    # On a busy machine, a survivor may also name a rank that is only late. The bound has a constant, because a few survivors are a small sample.
    assert batches > 0 and named.total() - named["alone"] <= 2 + 0.1 * named.total()


def test_a_rank_killed_at_a_random_moment_is_named_by_all_others(tmp_path):
    _campaign(tmp_path, 4, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_ranks_killed_at_random_moments_are_named_by_all_others(tmp_path, seed):
    _campaign(tmp_path, 30, seed)


def _stopped(rank: int, root: str, victim: int, depth: int, said: str) -> tuple[str, float]:
    """Iterates on all ranks. One rank is suspended (not killed) in mid-epoch, so its connections stay open."""
    loader = _loader(root, depth=depth, timeout=STOPPED_TIMEOUT)
    started = time.monotonic()
    try:
        for index in itertools.count():
            for _ in loader:
                if rank == victim and index == 2:
                    suspend_self(said, [other for other in range(3) if other != victim], 5 * STOPPED_TIMEOUT)
            started = time.monotonic()
    except RuntimeError as error:
        seconds = time.monotonic() - started
        note_said(said, rank)
        return str(error), seconds
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("victim", "depth", "rank_0_hosts"),
    [(0, 10, True)]
    + [pytest.param(v, d, h, marks=pytest.mark.faults) for v in range(3) for d in (1, 3, 10) for h in (False, True)],
)
def test_a_suspended_rank_is_named_after_the_timeout(tmp_path, victim, depth, rank_0_hosts):
    root, said = _partition(tmp_path / "parts", 3), str(tmp_path)
    results = distributed.run(_stopped, 3, root, victim, depth, said, may_fail=True, rank_0_hosts=rank_0_hosts)
    for rank, result in enumerate(results):
        if rank != victim:
            text, seconds = result
            print(text, seconds)
            # A suspended rank that hosts the store does not answer accesses to the store either.
            named = f"no answer from rank {victim} within {STOPPED_TIMEOUT} s" in text
            assert named or (
                rank_0_hosts and victim == 0 and "nor from the job's key-value store (which rank 0" in text
            )
            assert seconds >= STOPPED_TIMEOUT


# --- the store ends with rank 0 ---------------------------------------------------------------------------


def _fail_and_end(rank: int, root: str, culprit: int) -> None:
    """Fails on one rank. The last rank hears of it late, and no rank stays for a fixed time."""
    failure._STAY_SECONDS = job_store._STORE_SECONDS = NEVER

    def fail(batch):
        if rank == culprit:
            raise LookupError("the user's mistake")
        return batch

    for _ in _loader(root, depth=1, timeout=NEVER, transform=fail):
        if rank == 2:
            time.sleep(1.5)


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_host_of_the_store_stays_until_all_have_read_the_failure(tmp_path, culprit):
    results = distributed.run(
        _fail_and_end, 3, _partition(tmp_path / "parts", 3), culprit, may_fail=True, rank_0_hosts=True
    )
    for result in results:
        assert f"rank {culprit}, batch 0, stage assemble: the user's mistake" in result.text


def _fail_unheard(rank: int, root: str, how: str) -> None:
    loader = _loader(root, timeout=NEVER)
    if rank == 0:
        if how == "killed":
            failure._STAY_SECONDS = job_store._STORE_SECONDS = NEVER
        loader.engine.basis.comm.report_failure("the user's mistake")
        raise LookupError("the user's mistake")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while loader.engine.basis.comm.groups.reaches(0):
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["killed", "does not listen"])
def test_the_rank_that_hosts_the_store_ends_even_if_another_never_reads(tmp_path, how):
    first, _ = distributed.run(
        _fail_unheard, 2, _partition(tmp_path / "parts", 2), how, may_fail=True, rank_0_hosts=True
    )
    assert first.kind == "LookupError"


def _end_well(rank: int, root: str) -> None:
    failure._STAY_SECONDS = job_store._STORE_SECONDS = NEVER
    for _ in _loader(root, timeout=NEVER):
        pass


def test_without_a_failure_no_rank_waits_at_its_end(tmp_path):
    distributed.run(_end_well, 2, _partition(tmp_path / "parts", 2), rank_0_hosts=True)


def _make_none(rank: int, root: str, absent: int) -> str:
    if rank == absent:
        time.sleep(4)
        return ""
    try:
        _loader(root, timeout=1)
    except RuntimeError as error:
        return str(error)
    return "made"


def test_a_rank_that_makes_no_loader_is_named_after_the_timeout(tmp_path):
    texts = distributed.run(_make_none, 3, _partition(tmp_path / "parts", 3), 1)
    assert [text.startswith("rank 1 did not come to make a loader within 1 s") for text in texts] == [True, False, True]


def _count_accesses(rank: int, root: str) -> tuple[int, int, float, list[str]]:
    loader = _loader(root)
    store = loader.engine.basis.comm.notes.store
    asked, ask = 0, store.ask

    def counted(question):
        nonlocal asked
        asked += 1
        return ask(question)

    store.ask = counted
    started = time.monotonic()
    batches = sum(1 for _ in range(20) for _ in loader)
    return asked, batches, time.monotonic() - started, [thread.name for thread in threading.enumerate()]


def test_batches_use_neither_the_store_nor_a_watching_thread(tmp_path):
    for asked, batches, seconds, threads in distributed.run(_count_accesses, 2, _partition(tmp_path / "parts", 2)):
        # Zero if no wait takes half a second; on a busy machine a few waits do.
        assert batches > 100 and asked <= 4 * seconds and asked < batches / 10
        assert "salientpp-store" not in threads


# --- leaving at any point ---------------------------------------------------------------------------------


class _UsersOwn(Exception):
    pass


def _leave_with_each(rank: int, root: str, cases: list[tuple[int, str]], epochs: int) -> list[int]:
    return [_leave_often(rank, root, depth, epochs, 0, {"uneven": uneven}) for depth, uneven in cases]


def _leave_often(rank: int, root: str, depth: int, epochs: int, seed: int, options: dict) -> int:
    """Leaves every epoch at a random point and in a random way, different on each rank. Returns the number of wrong or misplaced batches."""
    reference = _loader(root, num_workers=0, replication_factor=0.0, **options)
    loader = _loader(root, depth=depth, **options)
    rng = random.Random(f"{seed} {rank}")
    wrong = 0
    whole = [[batch.n_id.tolist() for batch in reference] for _ in range(epochs)]
    for expected in whole:
        stop, how = rng.randint(0, len(loader) + 1), rng.choice(["break", "raise", "close", "drop", "cycle", "keep"])
        given = []
        iterator = iter(loader)
        try:
            for batch in itertools.islice(iterator, stop):
                given.append(batch.n_id.tolist())
                wrong += not _is_right(loader.data, batch)
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 0.01)
            if how == "raise":
                raise _UsersOwn
        except _UsersOwn:
            pass
        if how == "close":
            iterator.close()
        elif how == "cycle":  # only the garbage collector can free the iterator
            ring = [iterator]
            ring.append(ring)
            del ring, iterator
            gc.collect(0)
        elif how != "keep":
            del iterator
        wrong += given != expected[: min(stop, len(expected))]
    return wrong


def test_after_leaving_an_epoch_at_any_point_the_next_one_is_complete(tmp_path):
    cases = [(1, "exact"), (4, "wrap"), (10, "exact")]
    assert distributed.run(_leave_with_each, 3, _partition(tmp_path / "parts", 3), cases, 8) == [[0] * 3] * 3


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(8))
def test_after_leaving_an_epoch_at_many_points_the_next_one_is_complete(tmp_path, seed):
    depth, uneven = [1, 2, 4, 10][seed % 4], ["wrap", "exact", "drop"][seed % 3]
    out = distributed.run(_leave_often, 4, _partition(tmp_path / "parts", 4), depth, 150, seed, {"uneven": uneven})
    assert out == [0] * 4


def _press_ctrl_c(rank: int, root: str, moment: float, depth: int) -> tuple[str, str, int]:
    """Presses Ctrl-C on rank 1 at any moment: in a stage, between two stages, in the loop's body, or between epochs."""
    loader = _loader(root, depth=depth)
    dist.barrier()
    wrong = 0
    try:
        if rank == 1:
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            for batch in loader:
                wrong += not _is_right(loader.data, batch)
    except KeyboardInterrupt:
        return "interrupted", "", wrong
    except RuntimeError as error:
        return type(error).__name__, str(error), wrong


def _ctrl_c(tmp_path: Path, number: int, seed: int) -> None:
    rng = random.Random(seed)
    root = _partition(tmp_path / "parts", 3)
    for _ in range(number):
        moment, depth = rng.random() * 0.5, rng.choice([1, 3, 10])
        print(f"seed {seed}: Ctrl-C on rank 1 after {moment:.4f} s, depth {depth}")
        results = distributed.run(_press_ctrl_c, 3, root, moment, depth)
        assert results[1][0] == "interrupted"
        for rank in (0, 2):
            print("  ", results[rank])
            assert "rank 1" in results[rank][1].replace(f"rank {rank}, batch", "")
        assert [wrong for _, _, wrong in results] == [0] * 3


def test_ctrl_c_at_a_random_moment_ends_all_ranks(tmp_path):
    _ctrl_c(tmp_path, 2, seed=0)


@pytest.mark.faults
def test_ctrl_c_at_many_random_moments_ends_all_ranks(tmp_path):
    _ctrl_c(tmp_path, 60, seed=1)


# --- waits ------------------------------------------------------------------------------------------------


class _LateWork:
    """A collective whose first wait times out, and which is complete right afterwards."""

    waits = 0

    def wait(self, timeout) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_during_a_check_has_not_failed():
    work = _LateWork()
    ended: list[_LateWork] = []
    groups = SimpleNamespace(check_process=lambda: None, broken=False, end=ended.append)
    notes, alone = failure.FailureNotes(None, None, "", ""), standstill.Progress()
    waiting.wait_for(work, 1, alone, groups, notes, [0], timedelta(seconds=HANG))
    assert work.waits == 2 and ended == [work]


# --- load -------------------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _work(rank: int, root: str, num_batches: int, seed: int) -> dict:
    """Runs batches with random delays and early leaves. Returns memory, descriptors and threads after a quarter of them and at the end."""
    part = salientpp.load(root)
    loader = _loader(root, timeout=NEVER, num_workers=2)
    plan = random.Random(seed)  # the same on every rank: which rank leaves which epoch after which batch
    mine = random.Random(f"{seed} {rank}")
    totals = [0] * dist.get_world_size()
    batches = epochs = wrong = 0
    marks = []
    while min(totals) < num_batches:
        lengths = [plan.choice([plan.randint(1, len(loader)), len(loader)]) for _ in totals]
        totals = [total + length for total, length in zip(totals, lengths)]
        for given, batch in enumerate(loader, 1):
            wrong += not _is_right(part, batch)
            batches += 1
            if mine.random() < 0.05:
                time.sleep(mine.random() * 0.01)
            if given == lengths[rank]:
                break
        epochs += 1
        if min(totals) >= num_batches * (1 + 3 * len(marks)) / 4:
            gc.collect()
            marks.append((_resident_bytes(), _descriptors(), threading.active_count()))
    return {"batches": batches, "epochs": epochs, "wrong": wrong, "marks": marks}


def _check_load(tmp_path: Path, world: int, num_batches: int, seconds: float = HANG) -> None:
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc")
    data = random_data(num_vertices=4000, num_edges=24000)
    salientpp.partition(data, world, tmp_path / "parts", FANOUTS, BATCH, method="random")
    for rank, result in enumerate(
        distributed.run(_work, world, str(tmp_path / "parts"), num_batches, 0, seconds=seconds)
    ):
        print(rank, result)
        assert result["wrong"] == 0 and result["batches"] >= num_batches
        assert len(result["marks"]) == 2
        (early_bytes, early_files, _), (late_bytes, late_files, late_threads) = result["marks"]
        assert late_bytes - early_bytes < 24 * 2**20, "memory grows"
        assert late_files <= early_files + 2, "descriptors leak"
        assert late_threads < 10, "threads leak"


def test_memory_and_descriptors_of_two_ranks_do_not_grow(tmp_path):
    _check_load(tmp_path, 2, 240)


@pytest.mark.faults
def test_memory_and_descriptors_of_eight_ranks_do_not_grow(tmp_path):
    _check_load(tmp_path, 8, 2000, seconds=1800)
