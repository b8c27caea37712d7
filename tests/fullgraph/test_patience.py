"""Laws of long preparations: a rank that computes for others may take longer than the time-out, and plans are timed two at a time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import distributed
import pytest
from graphs import random_data
from torch import ones

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.drawing import divided
from salientpp.fullgraph import Preload, local, preload

#: Time-out of the ranks while none dies, and the time that one of them computes, in seconds.
TIMEOUT, LONG = 5.0, 7.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("patience") / "2"
    data = random_data(80, 240, train_fraction=0.8)
    data.x = ones(80, 6)
    salientpp.partition(data, 2, folder, [2], 16)
    return str(folder)


def slowly(function: Any, dies: bool) -> Any:
    def slow(*args: Any, **options: Any) -> Any:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONG)
        return function(*args, **options)

    return slow


def divides(rank: int, root: str, form: str, dies: bool) -> None:
    part, timeout = salientpp.load(root), distributed.NEVER if dies else TIMEOUT
    if form == "preload":
        preload.assign_parts = slowly(preload.assign_parts, dies)
        local(part, preload=Preload(1), ranks_per_host=2, timeout=timeout)
    else:
        divided.make_owners = slowly(divided.make_owners, dies)
        list(NeighborLoader(part, [2], "train", ranks_per_host=2, cooperate="host", timeout=timeout))


@pytest.mark.parametrize("form", ["preload", "cooperate"])
def test_ranks_wait_longer_than_the_time_out_for_one_that_partitions(root, form):
    distributed.run(divides, 2, root, form, False)


def collects_slowly(rank: int) -> None:
    data = random_data(80, 240)
    data.x = ones(80, 6)
    if rank >= 2:  # both ranks of the second host work longer than the time-out
        collect = preload._Induced.of
        preload._Induced.of = staticmethod(slowly(collect, dies=False))
    local(data, preload=Preload(1), ranks_per_host=2, timeout=TIMEOUT)


def test_a_host_waits_for_another_that_collects_its_edges():
    distributed.run(collects_slowly, 4)


@pytest.mark.parametrize("form", ["preload", "cooperate"])
def test_a_rank_that_dies_while_it_partitions_is_named(root, form):
    first, second = distributed.run(divides, 2, root, form, True, may_fail=True)
    assert first.kind == "Died" and "rank 0 went away" in second.text, second.text
