"""Laws of the pool of ranks: jobs of any number of ranks, errors with the rank's words, and hung or dead ranks that end one job only."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from random_cases.pool import Failed, Pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def _sum(place, addend):
    value = torch.tensor([place.rank + addend])
    dist.all_reduce(value, group=place.group)
    return int(value), os.getpid()


def test_the_same_processes_run_jobs_of_any_number_of_ranks(pool):
    pids = set()
    for world_size in (4, 1, 3, 2, 4):
        results = pool.run(_sum, world_size, 10)
        assert [value for value, _ in results] == [world_size * (world_size - 1) // 2 + 10 * world_size] * world_size
        pids |= {pid for _, pid in results}
    assert len(pids) == 4 and pool.starts == 1


def _fail_on(place, rank):
    if place.rank == rank:
        raise KeyError("these words")
    return "went well"


def _die_on(place, rank):
    if place.rank == rank:
        os._exit(7)
    return _sum(place, 0)


def _wait_forever(place):
    threading.Event().wait()


def test_a_job_that_fails_says_where_and_the_next_one_has_new_processes(pool):
    failed, well = pool.run(_fail_on, 2, 0)
    assert failed == Failed("KeyError", failed.text) and "these words" in failed.text and "_fail_on" in failed.text
    assert well == "went well"
    dead = pool.run(_die_on, 2, 1)
    assert isinstance(dead[0], Failed) and dead[1].kind == "Died" and "exit code 7" in dead[1].text
    for result in pool.run(_wait_forever, 2, seconds=0.5):
        assert result.kind == "Hang" and "_wait_forever" in result.text
    assert [value for value, _ in pool.run(_sum, 4, 0)] == [6] * 4
