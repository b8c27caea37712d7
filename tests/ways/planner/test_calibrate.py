"""Laws of calibration: all ranks get the same constants, and a constant grows with the time or the bytes that it stands for.

No test compares a time with a fixed number, except that of a link whose rate is emulated.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import cluster
import distributed
import pytest
import torch
from cluster import Cluster
from distributed import HANG
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ways.planner import rates
from salientpp.ways.planner.calibrate import calibrate
from salientpp.ways.planner.machines import LINKS, Link, Machines

FANOUTS, BATCH = [4, 3], 8

#: Seconds of a calibration in a test.
SHORT = 1.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    data = random_data(600, 3600, train_fraction=0.5)
    return salientpp.partition(data, 2, tmp_path_factory.mktemp("calibrate") / "d", FANOUTS, BATCH).root


def _loader(root: Path, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "partial_aggregation": "mean", **options}
    return NeighborLoader(salientpp.load(root), FANOUTS, "train", **options)


def _measured(rank: int, root: Path, options: dict, given: dict) -> Machines:
    return calibrate(_loader(root, **options).engine.basis, seconds=SHORT, **given)


def test_all_ranks_get_the_same_constants(root):
    one, other = distributed.run(_measured, 2, root, {}, {"about": {"salientpp": "1"}})
    assert one == other
    needed = (one.between.bytes_per_second, one.between.delay, one.cores, one.draw, one.row + one.byte, one.wire)
    assert all(0 < number < math.inf for number in needed)
    assert min(one.row, one.byte, one.batch, one.look_ahead, one.sum) >= 0
    # The default stands for what these ranks do not have: a rank on the same host, a device, a step.
    assert (one.within, one.to_device, one.step) == (Machines.within, 0.0, None)
    about = {
        "ranks": 2,
        "hosts": 2,
        "num_neighbors": FANOUTS,
        "batch_size": BATCH,
        "dataset": str(root),
        "salientpp": "1",
    }
    assert about.items() <= one.about.items()
    assert Machines.of(one.to_dict(), "here") == one


def test_ranks_of_one_host_measure_the_link_within_it(root):
    one, other = distributed.run(_measured, 2, root, {"ranks_per_host": 2}, {"between": LINKS["10GbE"]})
    assert one == other
    assert one.between == LINKS["10GbE"] and one.within != Machines.within
    assert one.within.bytes_per_second > 0 and one.about["hosts"] == 1


def _steps(rank: int, root: Path) -> list[Machines]:
    """Constants with a short and with a long step; the long one is long on rank 1 only."""
    basis, found = _loader(root).engine.basis, []
    for seconds in (0.01, 0.1):

        def step(batch) -> None:
            time.sleep(seconds if rank == 1 else 0.0)

        found.append(calibrate(basis, step, seconds=SHORT, gradient_bytes=12.0))
    return found


def test_the_step_has_the_time_of_the_slowest_rank(root):
    for short, long in distributed.run(_steps, 2, root):
        assert 0.01 <= short.step.seconds < long.step.seconds and long.step.seconds >= 0.1
        assert short.step.gradient_bytes == 12.0
        assert short.step.edges > 0 and long.step.cpu_seconds < long.step.seconds


def _slow(rank: int, root: Path, seconds: float) -> tuple[Machines, Machines]:
    """Constants without and with a slow draw and slow rows."""
    loader = _loader(root)
    source = loader.engine.basis.source
    before = calibrate(loader.engine.basis, seconds=SHORT)

    def spin() -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    draw = type(source.drawing).draw

    def slowly(self, *args, **kwargs):
        spin()
        return draw(self, *args, **kwargs)

    type(source.drawing).draw = slowly
    return before, calibrate(loader.engine.basis, seconds=SHORT)


def test_a_slow_draw_is_a_cost_of_draws_and_not_of_batches(root):
    seconds = 0.05
    for before, after in distributed.run(_slow, 2, root, seconds):
        edges = sum(FANOUTS[0] * FANOUTS[1] * BATCH for _ in range(2))  # more than a batch has
        assert after.draw > before.draw + seconds / edges
        assert after.batch < seconds


def _fails(rank: int, root: Path) -> None:
    def step(batch) -> None:
        if rank == 1:
            raise ArithmeticError("the user's mistake")
        time.sleep(0.01)

    calibrate(_loader(root).engine.basis, step, seconds=SHORT)


def test_a_step_that_fails_ends_all_ranks(root):
    one, other = distributed.run(_fails, 2, root, may_fail=True)
    assert other.kind == "ArithmeticError" and other.text.startswith("the user's mistake")
    assert one.kind == "RankFailure"
    assert "rank 1 could not calibrate: ArithmeticError: the user's mistake" in one.text


def test_one_process_measures_itself_and_needs_the_link(root):
    whole = salientpp.partition(random_data(600, 3600), 1, root.parent / "whole", FANOUTS, BATCH).root
    basis = _loader(whole).engine.basis
    with pytest.raises(
        ValueError, match=r"can be measured with ranks on several hosts, but all 1 rank is on one; start"
    ):
        calibrate(basis, seconds=SHORT)
    with pytest.raises(
        ValueError, match=r"seconds must be a number > 0 and at most 3600 \(the time that measuring takes\), got 0"
    ):
        calibrate(basis, seconds=0)
    found = calibrate(basis, lambda batch: batch.x.sum(), seconds=SHORT, between=Link(1e9))
    assert found.between == Link(1e9) and found.step.seconds > 0 and found.batch > 0
    assert (found.look_ahead, found.sum) == (Machines.look_ahead, Machines.sum)


def test_a_rank_without_batches_is_named(root):
    with pytest.raises(AssertionError, match="every rank must have at least one batch to measure, but rank 1 has none"):
        distributed.run(_without_batches, 2, root)


def _without_batches(rank: int, root: Path) -> None:
    part = salientpp.load(root)
    seeds = part.split("train", rank)[: 8 * (rank == 0)]
    loader = NeighborLoader(part, FANOUTS, seeds, batch_size=BATCH, shuffle=True, seed=3, uneven="exact")
    calibrate(loader.engine.basis, seconds=SHORT)


def _links(rank: int) -> rates.Measured:
    comm = Comm.create()
    return rates.measure_link(comm, [other for other in range(comm.size) if other != rank])


@pytest.mark.parametrize("bytes_per_second", [5e6, 20e6])
def test_an_emulated_link_has_the_rate_that_it_was_given(bytes_per_second):
    reason = cluster.unavailable()
    if reason is not None:
        pytest.skip(reason)
    distributed.forks()
    with Cluster(2, bytes_per_second=bytes_per_second) as hosts:
        one, other = hosts.run(_links, seconds=HANG)
    assert one == other
    # A busy machine only makes the link slower.
    assert one.link.bytes_per_second == pytest.approx(bytes_per_second, rel=0.25)
    assert one.link.delay < 0.05


def test_numbers_of_ranks_are_gathered_as_they_are():
    comm = Comm(None, DEFAULT_TIMEOUT)
    numbers = [0.1, -math.inf, 1e-300]
    assert rates.gather_reals(comm, numbers) == [numbers]
    assert math.isnan(rates.mean(comm, math.nan)) and rates.smallest(comm, 2.5) == rates.largest(comm, 2.5) == 2.5
    assert torch.tensor(rates.gather_reals(comm, [math.nan])).isnan().all()
