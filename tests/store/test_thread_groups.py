"""Laws of the two groups of threads that pack rows and compute sums.

* A rule moves threads between the groups. It stops at a split that is about as fast as the best one, and keeps it.
* Each group uses its number of threads.
* The groups do not change the bits of rows and sums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from salientpp.processes import completed
from salientpp.store import thread_groups
from salientpp.store.rows import TensorRows, put_rows
from salientpp.store.thread_groups import BATCHES_PER_LOOK, Balance, ThreadGroups, in_group, in_pieces
from salientpp.ways.sums.moved import put_sums

THREADS = st.integers(2, 64)
WORK = st.floats(1e-6, 1e3)


def seconds(groups: ThreadGroups, row_work: float, sum_work: float) -> tuple[float, float]:
    """Returns the seconds that both groups take for evenly shared work."""
    return row_work / groups.rows, sum_work / groups.sums


def settled(groups: ThreadGroups, row_work: float, sum_work: float) -> list[ThreadGroups]:
    """Returns the groups after each adjustment, until the rule moves no thread."""
    seen = [groups]
    while (groups := groups.after(*seconds(groups, row_work, sum_work))) != seen[-1]:
        seen.append(groups)
        assert len(seen) <= groups.rows + groups.sums, "the rule must not cycle"
    return seen


@pytest.mark.parametrize("num_threads, rows, sums", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1), (8, 4, 4), (15, 8, 7)])
def test_each_group_starts_with_half_of_the_threads_and_at_least_one(num_threads, rows, sums):
    assert ThreadGroups.half(num_threads) == ThreadGroups(rows, sums)


@given(THREADS, WORK, WORK)
def test_threads_move_to_the_slower_group_until_no_split_is_much_faster(num_threads, row_work, sum_work):
    seen = settled(ThreadGroups.half(num_threads), row_work, sum_work)
    for before, after in pairwise(seen):
        row_seconds, sum_seconds = seconds(before, row_work, sum_work)
        assert after.rows - before.rows == before.sums - after.sums == (1 if row_seconds > sum_seconds else -1)
        assert max(seconds(after, row_work, sum_work)) < max(row_seconds, sum_seconds)
    assert all(groups.rows >= 1 and groups.sums >= 1 and groups.rows + groups.sums == num_threads for groups in seen)
    soonest = min(max(seconds(ThreadGroups(k, num_threads - k), row_work, sum_work)) for k in range(1, num_threads))
    assert max(seconds(seen[-1], row_work, sum_work)) <= 1.0501 * soonest


@given(st.integers(1, 64), st.integers(1, 64), WORK)
def test_groups_that_finish_together_keep_their_threads(rows, sums, each):
    assert ThreadGroups(rows, sums).after(each, each) == ThreadGroups(rows, sums)


@given(THREADS, WORK, WORK, st.randoms(use_true_random=False))
def test_variations_of_two_per_cent_move_no_thread(num_threads, row_work, sum_work, random):
    groups, moves = ThreadGroups.half(num_threads), set()
    for _ in range(4 * num_threads):
        noisy = [each * random.uniform(0.98, 1.02) for each in seconds(groups, row_work, sum_work)]
        following = groups.after(*noisy)
        moves.add(following.rows - groups.rows)
        groups = following
    assert not {-1, 1} <= moves


def test_threads_follow_changes_of_the_work():
    groups = settled(ThreadGroups.half(16), 3.0, 1.0)[-1]
    assert groups == ThreadGroups(12, 4)
    assert settled(groups, 1.0, 3.0)[-1] == ThreadGroups(4, 12)
    assert settled(groups, 1.0, 0.0)[-1] == ThreadGroups(15, 1)
    assert ThreadGroups(2, 2).after(0.0, 0.0) == ThreadGroups(2, 2)


def test_a_single_unusual_batch_moves_no_thread(monkeypatch):
    now = 0.0
    monkeypatch.setattr(thread_groups.time, "perf_counter", lambda: now)

    def taking(seconds: float) -> Callable[[], float]:
        def work() -> float:
            nonlocal now
            now += seconds
            return seconds

        return work

    balance = Balance(6, completed)  # the groups run one after the other, because both move the same clock
    for turn in range(3 * BATCHES_PER_LOOK):
        row_seconds = (
            9.0 if turn == 2 * BATCHES_PER_LOOK else 1.0
        )  # one slow batch: 16 s against 12 s in all, too little to move a thread
        assert balance.both(taking(row_seconds), taking(1.5)) == (row_seconds, 1.5)
        assert balance.groups == ThreadGroups(3, 3)
    for _ in range(BATCHES_PER_LOOK):
        assert balance.groups == ThreadGroups(3, 3)
        balance.both(taking(3.0), taking(1.0))
    assert balance.groups == ThreadGroups(4, 2)


# --- pieces ----------------------------------------------------------------------------------------------


def shared(num_threads: int, pack_rows: Callable[[], Any], sum_rows: Callable[[], Any]) -> Any:
    """Runs both functions in groups with ``num_threads`` threads in total."""
    with ThreadPoolExecutor(max(1, num_threads - 1)) as pool:
        return Balance(num_threads, pool.submit).both(pack_rows, sum_rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 5, 16])
def test_groups_do_not_change_the_bits_of_rows_and_sums(num_threads, weighted):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((20_000, 64), generator=generator)
    index, size = (
        torch.randint(20_000, (40_000,), generator=generator),
        torch.randint(9, (9_000,), generator=generator),
    )
    places, weight = torch.randperm(40_000, generator=generator), torch.rand(40_000, generator=generator)
    of_sums, weight = index[: int(size.sum())], weight[: int(size.sum())] if weighted else None

    def pack() -> list[torch.Tensor]:
        in_order, placed = torch.empty(40_000, 64), torch.empty(40_000, 64)
        put_rows(rows, index, in_order)
        put_rows(rows, index, placed, places)
        return [in_order, placed]

    def sum_up() -> torch.Tensor:
        out = torch.empty(9_000, 64)
        put_sums(TensorRows(rows), of_sums, size, weight, "mean", out)
        return out

    (in_order, placed), sums = shared(num_threads, pack, sum_up)
    assert torch.equal(in_order, rows[index]) and torch.equal(placed[places], rows[index])
    assert torch.equal(sums, sum_up())


def test_each_group_uses_its_number_of_threads():
    seen: dict[str, set[int]] = {"rows": set(), "sums": set()}
    groups = ThreadGroups(4, 3)
    meet = threading.Barrier(7)

    def work(group: str) -> None:
        def piece(first: int, last: int) -> None:
            seen[group].add(threading.get_ident())
            assert not in_group() or first == 0
            meet.wait(120)  # fails unless all of the group's threads arrive at the same time

        assert in_group()
        in_pieces(piece, 100, 2**30)

    with ThreadPoolExecutor(6) as pool:
        balance = Balance(7, pool.submit)
        assert balance.groups == groups
        balance.both(lambda: work("rows"), lambda: work("sums"))
    assert (len(seen["rows"]), len(seen["sums"])) == (4, 3) and not seen["rows"] & seen["sums"] and not in_group()


@pytest.mark.parametrize("at", ["rows", "sums", "piece"])
def test_an_error_is_raised_after_all_threads_have_stopped_writing(at):
    under_way = []

    def work(group: str) -> None:
        def piece(first: int, last: int) -> None:
            under_way.append(first)
            try:
                if at == group or (at == "piece" and first > 0):
                    raise LookupError(group)
                time.sleep(0.05)
            finally:
                under_way.remove(first)

        in_pieces(piece, 10, 2**30)

    with ThreadPoolExecutor(5) as pool:
        balance = Balance(6, pool.submit)
        with pytest.raises(LookupError):
            balance.both(lambda: work("rows"), lambda: work("sums"))
        assert not under_way and not in_group()
        assert balance.both(lambda: 1, lambda: 2) == (1, 2)


def test_little_work_is_not_divided():
    seen = []
    shared(8, lambda: in_pieces(lambda *piece: seen.append(piece), 1000, 2**20), lambda: None)
    shared(8, lambda: in_pieces(lambda *piece: seen.append(piece), 0, 0), lambda: None)
    assert seen == [(0, 1000), (0, 0)]
