"""Laws of the loader on 1, 2 and 4 real ranks (gloo on loopback)."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import threading
import time
from pathlib import Path

import distributed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import NEVER
from graphs import random_data
from rare import rare
from samplers import Sampler
from torch.distributed.algorithms.join import Join
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic
from salientpp.engine.way import Way
from salientpp.ranks.failure import RankFailure
from salientpp.sampling.schedule import Schedule, batch_key
from salientpp.ways.planner.machines import Link, Machines

FANOUTS, BATCH = [5, 3, 2], 16
MACHINES = Machines(between=Link(1e6, 1e-5))


def _partition(root: Path, num_parts: int, **options) -> str:
    salientpp.partition(random_data(**options), num_parts, root, FANOUTS, BATCH)
    return str(root)


def _skewed(root: Path, seeds_per_part: list[int]) -> str:
    """Makes a directory whose parts have the given numbers of training seeds."""
    data = random_data()
    assignment = torch.arange(data.num_nodes) % len(seeds_per_part)
    train = torch.cat([(assignment == part).nonzero().flatten()[:count] for part, count in enumerate(seeds_per_part)])
    salientpp.partition(data, len(seeds_per_part), root, FANOUTS, BATCH, method=assignment, split={"train": train})
    return str(root)


def _loader(root: str, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, **options}
    return NeighborLoader(salientpp.load(root), FANOUTS, options.pop("input_nodes", "train"), **options)


def _digest(batch) -> tuple:
    return (
        batch.n_id.tolist(),
        batch.edge_index.tolist(),
        batch.e_id.tolist(),
        batch.input_id.tolist(),
        batch.y.tolist(),
    )


# --- laws 1 to 3 -------------------------------------------------------------------------------------------


def _check_identity(rank: int, root: str, grid: list[dict]) -> list:
    part = salientpp.load(root)
    digests = []
    for options in grid:
        loader = _loader(root, **options)
        digest = []
        for _ in range(2):
            for batch in loader:
                original = part.original_id(batch.n_id)
                assert batch.x.shape == (original.numel(), 3), options
                assert torch.equal(batch.x, original.view(-1, 1).expand(-1, 3).to(batch.x.dtype)), options
                assert torch.equal(batch.y, original[: batch.batch_size] % 7), options
                digest.append(_digest(batch))
        assert len(digest) == 2 * len(loader)
        digests.append(digest)
    return digests


@pytest.mark.parametrize(("num_parts", "world_size"), [(1, 1), (2, 2), (2, 4), *rare((4, 4), (1, 2))])
def test_x_has_the_rows_of_n_id_for_tiers_workers_and_depths(tmp_path, num_parts, world_size):
    root = _partition(tmp_path / "parts", num_parts)
    grid = [
        {"replication_factor": alpha, "device_rows": beta, "policy": policy, "depth": depth, "num_workers": workers}
        for alpha, beta, policy, depth, workers in [
            (0.0, 0.0, "vip", 10, 0),
            (0.3, 0.0, "vip", 10, 2),
            (0.3, 0.5, "degree", 1, 0),
            (5.0, 1.0, "random", 4, 1),
            (0.05, 0.1, "vip-hop", 7, 3),
            (0.0, 1.0, "vip", 2, 1),
        ]
    ]
    for digests in distributed.run(_check_identity, world_size, root, grid):
        assert all(digest == digests[0] for digest in digests)
        assert digests[0], "no batch was compared"


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool]


def test_rows_of_any_dtype_are_exchanged(tmp_path):
    roots = [
        _partition(tmp_path / str(at), 2, num_vertices=100, num_edges=600, dtype=dtype)
        for at, dtype in enumerate(DTYPES)
    ]
    distributed.run(_check_dtypes, 2, roots)


def _check_dtypes(rank: int, roots: list[str]) -> None:
    for root, dtype in zip(roots, DTYPES, strict=True):
        _check_identity(rank, root, [{"replication_factor": 0.2, "device_rows": 0.2}])
        loader = _loader(root)
        assert next(iter(loader)).x.dtype == dtype
        loader.reset_stats()


def test_columns_bring_other_attributes_of_every_vertex(tmp_path):
    distributed.run(_check_gather, 2, _partition(tmp_path / "parts", 2, edge_attributes=True))


def _check_gather(rank: int, root: str) -> None:
    part = salientpp.load(root)
    loader = _loader(root, columns=("x", "y"), replication_factor=0.1)
    edge_attr = part.edge_rows()["edge_attr"]
    for batch in loader:
        assert torch.equal(batch.y, part.original_id(batch.n_id) % 7)
        assert torch.equal(batch.edge_attr, edge_attr[batch.e_id])
    assert all(batch.x.size(0) == batch.batch_size for batch in _loader(root, columns=()))


# --- law 4 -------------------------------------------------------------------------------------------------


def _measure_each(rank: int, root: str, alphas: list[float]) -> list[tuple]:
    return [_measure(rank, root, alpha) for alpha in alphas]


def _measure(rank: int, root: str, alpha: float) -> tuple:
    loader = _loader(root, replication_factor=alpha, num_workers=1)
    for _ in range(3):
        for _ in loader:
            pass
    stats = loader.stats()
    rows = loader.cache.rows
    assert torch.equal(rows["x"][:, 0].long(), loader.data.original_id(loader.cache.members.ids)) if rows else True
    return stats, loader.cache.members.ids.tolist()


@pytest.mark.parametrize("num_parts", [2, 4])
def test_measured_communication_is_the_sum_of_distinct_remote_uncached_vertices(tmp_path, num_parts):
    root, alphas = _partition(tmp_path / "parts", num_parts), [0.0, 0.2]
    for rank, of_rank in enumerate(distributed.run(_measure_each, num_parts, root, alphas)):
        for alpha, (stats, cached) in zip(alphas, of_rank, strict=True):
            remote, hits, total = _simulate(root, rank, set(cached))
            assert (stats.rows_remote, stats.rows_cache, stats.rows) == (remote, hits, total), alpha
            assert (alpha == 0) == (hits == 0)


def _simulate(root: str, rank: int, cached: set[int]) -> tuple[int, int, int]:
    """Counts remote rows, cache hits and all rows of three epochs of a rank, without loader or processes."""
    part = salientpp.load(root, part_id=rank)
    seeds_per_rank = [part.split("train", part_id).numel() for part_id in range(part.num_parts)]
    seeds = part.split("train")
    schedule = Schedule(seeds.numel(), rank, 0, 1, seeds_per_rank, rank, BATCH, True, False, "wrap", 7)
    sampler = Sampler(part.graph, FANOUTS)
    begin, end = part.book.range_of(rank)
    remote = hits = total = 0
    for epoch in range(3):
        for index, positions in enumerate(schedule.batches(epoch)):
            n_id = sampler.sample(seeds[positions], batch_key(7, epoch, rank, index)).node.tolist()
            outside = [v for v in set(n_id) if not begin <= v < end]
            hits += sum(v in cached for v in outside)
            remote += sum(v not in cached for v in outside)
            total += len(n_id)
    return remote, hits, total


# --- law 7: uneven ranks -----------------------------------------------------------------------------------


def _count_each(rank: int, root: str, cases: list[dict]) -> list[tuple[int, list[list[int]]]]:
    return [_count(rank, root, options) for options in cases]


def _count(rank: int, root: str, options: dict, epochs: int = 2) -> tuple[int, list[list[int]]]:
    loader = _loader(root, **options)
    given = [[batch.input_id.tolist() for batch in loader] for _ in range(epochs)]
    assert all(len(batches) == len(loader) for batches in given)
    return len(loader), given


@pytest.mark.parametrize("seeds", [[70, 10], [33, 64], [16, 16], [1, 90]])
def test_uneven_ranks_never_wait_forever(tmp_path, seeds):
    root = _skewed(tmp_path / "parts", seeds)
    batches = [-(-count // BATCH) for count in seeds]
    numbers = {"wrap": [max(batches)] * 2, "drop": [min(batches)] * 2, "exact": batches}
    cases = [{"uneven": uneven, "depth": depth} for uneven in numbers for depth in (1, 3, 10)]
    for case, out in zip(cases, zip(*distributed.run(_count_each, 2, root, cases)), strict=True):
        uneven = case["uneven"]
        assert [length for length, _ in out] == numbers[uneven], case
        sizes = [[[len(batch) for batch in epoch] for epoch in given] for _, given in out]
        if uneven == "wrap":
            assert sizes[0] == sizes[1], f"batches must have the same size on all ranks; {case}"
        if uneven == "exact":
            assert all(sorted(sum(epoch, [])) == sorted(set(sum(epoch, []))) for _, given in out for epoch in given), (
                case
            )
            assert [len(sum(given[0], [])) for _, given in out] == seeds, case


def test_a_rank_without_seeds_serves_under_exact_and_is_named_otherwise(tmp_path):
    root = _skewed(tmp_path / "parts", [40, 0])
    assert [length for length, _ in distributed.run(_count, 2, root, {"uneven": "exact"})] == [3, 0]
    for uneven in ("wrap", "drop"):
        for failed in distributed.run(_count, 2, root, {"uneven": uneven}, may_fail=True):
            assert failed.kind == "ValueError" and f"rank 1 has no seeds, so uneven='{uneven}'" in failed.text


class _BrokenOn(Way):
    name = "broken"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def attach(self, basis, fetch, workers) -> None:
        if basis.comm.rank == self._rank:
            raise ValueError("this way is broken")


def _with_a_broken_way(rank: int, root: str) -> str:
    with pytest.raises((ValueError, RankFailure)) as raised:
        _loader(root, uneven="exact", ways=[_BrokenOn(1)])
    return str(raised.value)


def test_a_rank_without_batches_learns_that_another_could_not_make_its_loader(tmp_path):
    """It has no batches that wait for the other rank."""
    first, second = distributed.run(_with_a_broken_way, 2, _skewed(tmp_path / "parts", [0, 9]))
    assert first == "rank 1 could not make its loader: ValueError: this way is broken"
    assert second == "this way is broken"


def _with_device_rows_on(rank: int, root: str, which: int) -> str:
    with pytest.raises(ValueError) as raised:
        _loader(root, device_rows=0.5 * (rank == which))
    return str(raised.value)


@pytest.mark.parametrize("which", [0, 1])
def test_over_a_topology_in_parts_all_ranks_give_device_rows_or_none_does(tmp_path, which):
    """Ranks with device_rows would wait for the others in a collective that these do not begin."""
    salientpp.partition(random_data(), 2, tmp_path / "parts", FANOUTS, BATCH, topology="parts")
    for text in distributed.run(_with_device_rows_on, 2, str(tmp_path / "parts"), which):
        assert text.startswith(
            f"all ranks must have the same device_rows, got {which == 0} on rank 0 and {which == 1} on rank 1"
        )


def test_error_refuses_unequal_ranks(tmp_path):
    root = _skewed(tmp_path / "parts", [40, 10])
    for failed in distributed.run(_count, 2, root, {"uneven": "error"}, may_fail=True):
        assert "uneven='error', but ranks 0 to 1 have [3, 1] batches" in failed.text
    assert [length for length, _ in distributed.run(_count, 2, root, {"uneven": "error", "input_nodes": "all"})] == [
        13,
        13,
    ]


MODES = ["wrap", "drop", "exact"]


def _train_in_each_mode(rank: int, root: str) -> list[list[float]]:
    return [_train_with_ddp(rank, root, uneven) for uneven in MODES]


def _train_with_ddp(rank: int, root: str, uneven: str) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(GraphSAGE(3, 8, 3, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = _loader(root, uneven=uneven, replication_factor=0.1, num_workers=1)
    for _ in range(2):
        with Join([model]) if uneven == "exact" else contextlib.nullcontext():
            for batch in loader:
                out = model(batch.x / 400, batch.edge_index)[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_ddp_trains_on_uneven_ranks(tmp_path):
    """Ranks that are done continue to serve rows in the background, under 'exact' with torch's Join."""
    root = _skewed(tmp_path / "parts", [120, 20])
    for uneven, first, second in zip(MODES, *distributed.run(_train_in_each_mode, 2, root), strict=True):
        assert all(torch.tensor(first).isfinite()), uneven
        if uneven != "exact":
            assert first == second, uneven


# --- law 7: leaving early ----------------------------------------------------------------------------------


def _leave_each(rank: int, root: str, cases: list[tuple[list[int | None], int, str]]) -> list[tuple[int, list]]:
    return [_leave(rank, root, *case) for case in cases]


def _leave(rank: int, root: str, stops: list[int | None], depth: int, how: str) -> tuple[int, list]:
    loader = _loader(root, depth=depth, num_workers=1, replication_factor=0.1)
    given = 0
    try:
        for _ in loader:
            given += 1
            if given == stops[rank]:
                if how == "raise":
                    raise KeyError("the user's own")
                break
    except KeyError:
        pass
    return given, [_digest(batch) for batch in loader]


def test_after_leaving_early_the_next_epoch_is_whole(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    cases: list[tuple[list[int | None], int, str]] = [
        (stops, depth, how)
        for stops in ([1, 1], [2, 3], [None, 1], [3, None])
        for depth in (1, 10)
        for how in ("break", "raise")
    ]
    whole = distributed.run(_second_epoch, 2, root)
    for rank, of_rank in enumerate(distributed.run(_leave_each, 2, root, cases)):
        for case, (given, second) in zip(cases, of_rank, strict=True):
            assert given == (case[0][rank] or len(second)), case
            assert second == whole[rank], case


def _second_epoch(rank: int, root: str) -> list:
    loader = _loader(root)
    loader.set_epoch(1)
    return [_digest(batch) for batch in loader]


def _abandon(rank: int, root: str) -> int:
    """Ends the process with a live iterator, in mid-epoch, on one rank."""
    loader = _loader(root)
    iterator = iter(loader)
    next(iterator)
    if rank == 1:
        return sum(1 for _ in iterator)
    return 0


def test_a_rank_may_end_its_script_in_mid_epoch(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    _, rest = distributed.run(_abandon, 2, root)
    assert rest > 2


def _be_slow(rank: int, root: str, slow: int, depth: int) -> int:
    given = 0
    for _ in _loader(root, uneven="exact", depth=depth):
        given += 1
        if rank == slow:
            time.sleep(0.1)
    return given


@pytest.mark.parametrize("depth", [1, *rare(10)])
def test_a_rank_whose_script_has_ended_continues_to_serve(tmp_path, depth):
    root = _skewed(tmp_path / "parts", [16, 160])
    assert distributed.run(_be_slow, 2, root, 1, depth) == [1, 10]


# --- law 7: failing ranks ----------------------------------------------------------------------------------


def _fail_in_each(rank: int, root: str, failing: int, stages: list[str], depth: int) -> list[tuple[str, str]]:
    """Fails in one stage after the other, each with loaders of its own. Returns the errors."""
    errors = []
    for stage in stages:
        try:
            _fail_in_stage(rank, root, failing, stage, depth)
            errors.append(("none", ""))
        except RuntimeError as error:
            errors.append((type(error).__name__, str(error)))
        dist.barrier()
    return errors


def _fail_in_stage(rank: int, root: str, failing: int, stage: str, depth: int) -> None:
    loader = _loader(
        root, depth=depth, timeout=NEVER, batch_size=4
    )  # enough batches, so that later ones need the failing rank
    assert len(loader) > 2 + 5
    if rank == failing:
        original, calls = getattr(loader.engine.producer.stages, stage), 0

        def fail_once(state):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError("injected")
            return original(state)

        setattr(loader.engine.producer.stages, stage, fail_once)
    for _ in loader:
        pass


STAGES = [
    "sample",
    "exchange_counts",
    "read_counts",
    "exchange_ids",
    "localize_ids",
    "gather_host_rows",
    "copy_to_device",
    "gather_device_rows",
    "exchange_rows",
    "assemble",
]


def test_the_test_knows_all_stages(tmp_path):
    assert list(_loader(_partition(tmp_path / "parts", 1)).stats().seconds_by_stage) == STAGES


@pytest.mark.parametrize("depth", [1, 10, *(pytest.param(depth, marks=pytest.mark.faults) for depth in (2, 3, 4, 7))])
def test_a_stage_that_raises_ends_every_rank_with_rank_batch_and_stage(tmp_path, depth):
    """A reported failure does not wait for the time-out, which is longer than the test may take."""
    root = _partition(tmp_path / "parts", 3)
    for rank, errors in enumerate(distributed.run(_fail_in_each, 3, root, 0, STAGES, depth)):
        for stage, (kind, text) in zip(STAGES, errors, strict=True):
            assert kind == "StageError" and f"rank 0, batch 2, stage {stage}: injected" in text, (stage, text)
            assert text.startswith(f"rank {rank}, batch "), (stage, text)


def _interrupted(rank: int, root: str) -> str:
    loader = _loader(root, timeout=NEVER)
    if rank == 1:
        loader.engine.producer.stages.localize_ids = _press_ctrl_c
    try:
        for _ in loader:
            pass
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


def _press_ctrl_c(state):
    raise KeyboardInterrupt


def test_ctrl_c_on_one_rank_ends_the_others(tmp_path):
    waiting, interrupted = distributed.run(_interrupted, 2, _partition(tmp_path / "parts", 2), may_fail=True)
    assert interrupted == "interrupted"
    assert waiting.kind == "StageError" and "rank 1, batch 0, stage localize_ids: KeyboardInterrupt" in waiting.text


def _die(rank: int, root: str) -> None:
    loader = _loader(root, timeout=NEVER)
    for index, _ in enumerate(loader):
        if rank == 1 and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    for _ in loader:  # the first epoch may have been near its end
        pass


def test_a_killed_rank_ends_the_others_without_the_timeout(tmp_path):
    """The time-out is longer than the test may take."""
    waiting, killed = distributed.run(_die, 2, _partition(tmp_path / "parts", 2), may_fail=True)
    assert killed.kind == "Died"
    assert (
        waiting.kind == "StageError"
        and waiting.text.startswith("rank 0, batch ")
        and "rank 1 went away, its connection is closed" in waiting.text
    )


def _silent(rank: int, root: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    loader = _loader(root, timeout=5)
    if rank == 0:
        store.wait(["rank 1 has its answer"])
        return
    try:
        for _ in loader:
            pass
    finally:
        store.set("rank 1 has its answer", "")


def test_a_rank_that_does_not_answer_raises_an_error_after_the_timeout(tmp_path):
    _, waiting = distributed.run(_silent, 2, _partition(tmp_path / "parts", 2), may_fail=True)
    assert waiting.kind == "StageError"
    assert "rank 1, batch 0, stage open_epoch: no answer from rank 0 within 5 s" in waiting.text


# --- construction ------------------------------------------------------------------------------------------


def _differ(rank: int, root: str, options: list[dict]) -> None:
    _loader(root, timeout=NEVER, **options[rank])


def test_a_mistake_on_one_rank_raises_on_every_rank(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    foreign = int(salientpp.load(root, part_id=0).book.offsets[1])
    options = [{"input_nodes": torch.tensor([foreign])}, {}]
    first, second = distributed.run(_differ, 2, root, options, may_fail=True)
    words = f"seed {foreign} is owned by part 1 but this rank serves part 0"
    assert first.kind == "ValueError" and words in first.text
    assert second.kind == "ValueError" and f"rank 0 could not make its loader: ValueError: {words}" in second.text


def _wrong_world(rank: int, root: str) -> None:
    salientpp.load(root)


def test_a_world_size_that_does_not_fit_the_parts_is_refused(tmp_path):
    for failed in distributed.run(_wrong_world, 3, _partition(tmp_path / "parts", 2), may_fail=True):
        assert failed.kind == "ValueError" and "world size 3 does not fit 2 parts" in failed.text


def _share_cache(rank: int, root: str) -> None:
    train = _loader(root, replication_factor=0.2)
    val = _loader(root, input_nodes="val", cache=train.cache, uneven="exact", shuffle=False)
    part = train.data
    seen = []
    for index, batch in enumerate(train):
        if index == 1:  # an evaluation in the middle of an epoch
            for inner in val:
                assert torch.equal(inner.x[:, 0].long(), part.original_id(inner.n_id))
                seen += inner.n_id[: inner.batch_size].tolist()
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
    assert sorted(seen) == part.split("val").tolist()
    assert val.cache is train.cache
    assert val.stats().rows_cache > 0


def test_two_loaders_share_a_cache_and_interleave(tmp_path):
    distributed.run(_share_cache, 4, _partition(tmp_path / "parts", 4))


def test_ranks_outside_the_parts_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="world size 4 does not fit 3 parts"):
        distributed.run(_wrong_world, 4, _partition(tmp_path / "parts", 3))


# --- threads and ranks that run the user's code ------------------------------------------------------------


def _leave_with_functions(rank: int, root: str, workers: int, depth: int) -> tuple[list[list], int, bool]:
    """Rank 1 leaves each epoch after one batch. Its functions would raise after that."""
    left, ran = False, []

    def users_own(name):
        def function(value):
            ran.append((name, threading.current_thread() is threading.main_thread()))
            if left:
                raise LookupError(f"{name} runs after break")
            return value

        return function

    loader = _loader(
        root,
        num_workers=workers,
        depth=depth,
        batch_size=4,
        transform=users_own("transform"),
        uneven="exact",
        timeout=20,
    )
    counts = []
    for _ in range(2):
        left = False
        for index, _ in enumerate(loader, 1):  # noqa: B007  (counted below)
            if rank == 1:
                break
            time.sleep(0.02)
        left, before = True, len(ran)
        if rank == 1:
            time.sleep(0.5)  # rank 0 continues meanwhile
        counts.append((index, len(ran) - before))
    return counts, len(loader), all(in_main for _, in_main in ran)


@pytest.mark.parametrize(("workers", "depth"), [(0, 1), *rare((0, 10)), (2, 10)])
def test_a_rank_that_has_left_answers_without_running_user_code(tmp_path, workers, depth):
    first, second = distributed.run(_leave_with_functions, 2, _partition(tmp_path / "parts", 2), workers, depth)
    assert first == ([(first[1], 0)] * 2, first[1], True)
    assert second == ([(1, 0)] * 2, second[1], True)


def _leave_with_sampler_output(rank: int, root: str) -> tuple[int, int, int]:
    """Returns the numbers of samples that were begun before leaving, a moment later, and after the epoch."""
    begun = []

    def transform_sampler_output(out):
        begun.append(out)
        time.sleep(0.01)
        return out

    loader = _loader(
        root,
        num_workers=1,
        prefetch_factor=30,
        batch_size=2,
        transform_sampler_output=transform_sampler_output if rank == 1 else None,
    )
    iterator = iter(loader)
    next(iterator)
    if rank == 1:
        iterator.close()
    before = len(begun)
    rest = sum(1 for _ in iterator)
    time.sleep(0.2)
    after = len(begun)
    dist.barrier()
    return rest, before, after


def test_a_rank_that_has_left_begins_no_more_samples(tmp_path):
    (rest, _, _), (_, before, after) = distributed.run(_leave_with_sampler_output, 2, _partition(tmp_path / "parts", 2))
    assert rest > 20 and after - before <= 1, "only the sample that was being drawn"


def _transform_raises(rank: int, root: str, failing: int, workers: int) -> tuple[int, str, str, str]:
    calls = 0

    def transform(batch):
        nonlocal calls
        calls += 1
        if calls == 3 and rank == failing:
            raise ZeroDivisionError("division by zero")
        return batch.n_id

    loader = _loader(root, transform=transform, num_workers=workers, timeout=distributed.NEVER, batch_size=4)
    given, iterator = 0, iter(loader)
    try:
        for n_id in iterator:
            assert isinstance(n_id, torch.Tensor)
            given += 1
    except RuntimeError as error:
        again = ""
        try:
            next(iterator)
        except RuntimeError as second:
            again = str(second)
        return given, str(error), type(error.__cause__).__name__, again
    return given, "", "", ""


@pytest.mark.parametrize("workers", [*rare(0), 1])
def test_a_transform_that_raises_ends_every_rank_with_rank_batch_and_stage(tmp_path, workers):
    results = distributed.run(_transform_raises, 3, _partition(tmp_path / "parts", 3), 1, workers)
    text = "rank 1, batch 2, stage assemble: division by zero"
    assert results[1] == (2, text, "ZeroDivisionError", text)
    assert text in results[0][1] and text in results[2][1]


# --- mistakes before the ranks have met ---------------------------------------------------------------------


def _make_with(rank: int, root: str, name: str, wrong: dict[int, dict]) -> str:
    part = salientpp.load(root)
    options = {
        "batch_size": BATCH,
        "timeout": distributed.NEVER,  # so that a rank that waits for the time-out hangs
        "input_nodes": "train",
        "num_neighbors": FANOUTS,
        "data": part,
        **wrong.get(rank, {}),
    }
    try:
        getattr(salientpp, options.pop("loader", "NeighborLoader"))(**options)
        text = "made"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    # Afterwards the ranks take part in the same collectives again.
    loader = _loader(root)
    assert sum(1 for _ in loader) == len(loader) > 0
    return text


_MISTAKES = [
    ("device", {"device": "cuda:77"}, "device must be "),
    ("device type", {"device": 3.5}, "device must be "),
    ("timeout", {"timeout": -1}, "timeout must be > 0"),
    ("timeout type", {"timeout": "long"}, "timeout must be > 0"),
    ("process_group", {"process_group": 3}, "process_group must be "),
    ("data", {"data": "a path"}, "data must be "),
    ("data None", {"data": None}, "data must be "),
    ("loader", {"loader": "LinkNeighborLoader", "input_nodes": None}, "has no argument 'input_nodes'"),
    ("num_neighbors", {"num_neighbors": [5, -2]}, "num_neighbors[1] must be "),
    ("num_neighbors type", {"num_neighbors": None}, "num_neighbors must be "),
    ("input_nodes", {"input_nodes": "trian"}, "trian"),
    ("keyword", {"batchsize": 3}, "has no argument 'batchsize'"),
    ("batch_size", {"batch_size": 0}, "batch_size"),
    ("batch_size type", {"batch_size": 2.5}, "batch_size"),
    ("num_workers", {"num_workers": -1}, "num_workers"),
    ("num_workers type", {"num_workers": 1.5}, "num_workers must be an integer"),
    ("prefetch_factor", {"prefetch_factor": 2}, "prefetch_factor"),
    ("generator", {"generator": 3}, "generator"),
    ("cache", {"cache": "none"}, "cache must be "),
    ("policy", {"policy": ["vip"]}, "policy must be one of "),
    ("uneven", {"uneven": ["wrap"]}, "uneven must be one of "),
    ("columns", {"columns": 7}, "columns must be "),
    ("alpha", {"replication_factor": 1e308}, "replication_factor must be at most "),
    ("time_attr", {"time_attr": "no"}, "The time attribute 'no' is neither"),
    (
        "neighbor_sampler",
        {"neighbor_sampler": 3},
        "neighbor_sampler= other than salientpp.NeighborSampler is for data in one process",
    ),
    ("sampler", {"sampler": [1, 2]}, "sampler= is for a Data"),
    ("subgraph_type", {"subgraph_type": "some"}, "some"),
]


def _make_all(rank: int, root: str, mistakes: list, culprits: list[int]) -> list[str]:
    return [
        _make_with(rank, root, name, {culprit: dict(wrong)})
        for (name, wrong, _), culprit in zip(mistakes, culprits, strict=True)
    ]


@pytest.mark.parametrize(("world", "first"), [(2, 0), *rare((2, 1), (3, 0))])
def test_a_mistake_in_any_argument_raises_on_all_ranks_at_once(tmp_path, world, first):
    culprits = [(first + at) % 2 for at in range(len(_MISTAKES))]
    results = distributed.run(_make_all, world, _partition(tmp_path / "parts", world), _MISTAKES, culprits)
    for index, ((name, _, text), culprit) in enumerate(zip(_MISTAKES, culprits)):
        for rank, got in enumerate(result[index] for result in results):
            print(name, rank, got)
            assert text in got, name
            assert rank == culprit or got.startswith(f"ValueError: rank {culprit} could not make its loader: "), name


# --- arguments that must agree ------------------------------------------------------------------------------


def _same(value):
    return value


#: Two values of each argument, for different ranks. The third entry is None, or names the argument in the error.
_DIFFERENT = {
    "num_neighbors": ([3, 2], [3, 3], "num_neighbors"),
    "input_nodes": ("train", "val", "input_nodes"),
    "replace": (False, True, "replace"),
    "subgraph_type": ("directional", "induced", "subgraph_type"),
    "directed": (True, False, "subgraph_type"),
    "batch_size": (8, 9, "batch_size"),
    "shuffle": (True, False, "shuffle"),
    "drop_last": (True, False, "drop_last"),
    "uneven": ("wrap", "exact", "uneven"),
    "logical_ranks": (2, 4, "logical_ranks"),
    "logical_ranks, join": ({}, {"logical_ranks": {"join": True}}, "logical_ranks['join']"),
    "shared_draws": (None, "batch", "shared_draws"),
    "time_window": ({"time_attr": "y", "time_window": 2}, {"time_attr": "y", "time_window": 3}, "time_window"),
    "shared_draws, block": ({"shared_draws": {"block": 4}}, {}, "shared_draws['block']"),
    "send_as": ({}, {"send_as": {"x": "fp16"}}, "send_as"),
    "depth": (3, 4, "depth"),
    "memory": (2000, 3000, "memory"),
    "read_ahead": (0, "1MiB", "read_ahead"),
    "memory, plain or not": ({"memory": {"host": 0, "machines": MACHINES}}, {"memory": 0}, "memory['machines']"),
    "memory, allow": ({"memory": {"host": 0, "allow": ["sums"]}}, {"memory": 0}, "memory['allow']"),
    "partial_aggregation": (None, "sum", "partial_aggregation"),
    "partial_aggregation, weight": (
        {"partial_aggregation": "sum"},
        {"partial_aggregation": {"reduce": "sum", "weight": "edge_attr"}},
        "partial_aggregation['weight']",
    ),
    "dtype": (None, torch.float16, "dtype"),
    "columns": (("x",), ("x", "y"), "columns"),
    "seed": (1, 2, "seed"),
    "ranks_per_host": (2, 1, "ranks_per_host"),
    "cooperate": (None, "host", "cooperate"),
    "cooperate, batches": (
        {"batch_size": 1, "cooperate": {"batches": 2}},
        {"batch_size": 1, "cooperate": {"batches": 3}},
        "cooperate['batches']",
    ),
    "cooperate, split_by": ({"cooperate": {"split_by": "rows"}}, {"cooperate": "host"}, "cooperate['split_by']"),
    "transform": (None, _same, None),
    "transform_sampler_output": (None, _same, None),
    "is_sorted": (False, True, None),
    "filter_per_worker": (None, True, None),
    "replication_factor": (0.0, 0.3, None),
    "device_rows": (0.0, 0.5, None),
    "device_rows, cache": ({}, {"device_rows": {"cache": 1000}}, None),
    "device_rows, zero_copy": ({}, {"device_rows": {"zero_copy": True}}, None),
    "policy": ("vip", "degree", None),
    "timeout": (20, 60, None),
    "num_workers": (0, 2, None),
    "prefetch_factor": ({"num_workers": 1, "prefetch_factor": 3}, {"num_workers": 1, "prefetch_factor": 1}, None),
    "worker_init_fn": (None, _same, None),
    "persistent_workers": ({"num_workers": 1, "persistent_workers": True}, {}, None),
    "pin_memory": (False, True, None),
    "pin_memory_device": ("", "cuda", None),
    "generator": (None, "one", None),
    "in_order": (True, False, None),
    "pad": (None, "bucket", None),
    "pad, sigma": ({"pad": "fixed"}, {"pad": {"sigma": 1.0}}, None),
    "pad, static": ({"pad": "fixed"}, {"pad": {"static": True}}, None),
    "lookahead": (0, 3, None),
    "disjoint": (False, True, "disjoint"),
    "time_attr": (None, "y", "time_attr"),
}
#: Arguments that the table leaves out. The data is one. Others are refused, are ignored, or cannot be seen by other ranks. Other tests pass ``device`` and
#: ``cache`` to some ranks only.
_APART = {
    "data", "input_time", "temporal_strategy", "weight_attr", "neighbor_sampler", "process_group", "dataset", "collate_fn",
    "sampler", "batch_sampler", "multiprocessing_context", "cache", "device", "input_id", "custom_cls", "share", "ways",
}  # fmt: skip


def _differ_in_each(rank: int, root: str) -> dict[str, str]:
    texts = {}
    for name, (first, second, _) in _DIFFERENT.items():
        value = second if rank == 1 else first
        options = {name: value} if not isinstance(value, dict) else dict(value)
        if options.get("generator") == "one":
            options["generator"] = torch.Generator()
        options = {
            "input_nodes": "train",
            "batch_size": 8,
            "timeout": 60,
            **({} if name in ("seed", "generator") else {"seed": 0}),
            **options,
        }
        try:
            loader = NeighborLoader(salientpp.load(root), **{"num_neighbors": [3, 2], **options})
            for batch in loader:
                real = batch.n_id >= 0
                assert torch.equal(batch.x[real, 0].long(), loader.data.original_id(batch.n_id[real]))
            texts[name] = ""
        except ValueError as error:
            texts[name] = str(error)
    return texts


def test_every_argument_is_in_one_of_the_two_tables():
    ours = set(inspect.signature(NeighborLoader.__init__).parameters) - {"self", "kwargs"}
    torchs = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {"self"}
    assert ours | torchs == {name.split(",")[0] for name in _DIFFERENT} | _APART


def test_arguments_that_must_agree_are_compared_and_the_others_may_differ(tmp_path):
    first, second = distributed.run(
        _differ_in_each, 2, _partition(tmp_path / "parts", 2, edge_attributes=True), seconds=200
    )
    assert first == second, "all ranks raise the same"
    for name, (_, _, named) in _DIFFERENT.items():
        expected = "" if named is None else f"all ranks must have the same {named}, got "
        assert first[name].startswith(expected) and bool(first[name]) == bool(named), name


def test_the_documented_table_says_what_is_compared():
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "several-machines.md").read_text()
    table = text.split("| must agree |", 1)[1].split("\n\n")[0]
    rows = re.findall(r"^ *\| \*\*(yes|no)\*\* \|(.*)\|.*\|$", table, re.MULTILINE)
    alike, own = (
        {name for answer, row in rows if answer == which for name in re.findall(r"`(\w+)`", row)}
        for which in ("yes", "no")
    )
    assert alike >= {name.split(",")[0] for name, (_, _, named) in _DIFFERENT.items() if named}
    assert own >= {name.split(",")[0] for name, (_, _, named) in _DIFFERENT.items() if not named} | {
        "cache",
        "device",
        "neighbor_sampler",
    }
    assert not alike & own


def _differ_in_one(rank: int, root: str, cases: list[list[dict]]) -> list[str]:
    texts = []
    for case in cases:
        options = {
            name: torch.tensor(value) if name == "input_nodes" and not isinstance(value, str) else value
            for name, value in case[rank].items()
        }
        try:
            _loader(root, timeout=60, **{"seed": None, **options})
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_ranks_of_one_part_must_give_the_same_seeds(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    begin = int(salientpp.load(root, part_id=0).book.offsets[1])
    mine, theirs = [1, 2, 3, 4], [begin, begin + 1, begin + 2, begin + 3]
    cases = [
        [{"input_nodes": seeds} for seeds in (mine, mine, theirs, theirs)],
        [{"input_nodes": seeds} for seeds in (mine, mine[:2], theirs, theirs)],
        [{"input_nodes": seeds} for seeds in (mine, mine, theirs, theirs[::-1])],
        [{"input_nodes": seeds} for seeds in ("train", "train", "train", theirs)],
        [{"shuffle": rank != 3} for rank in range(4)],
    ]
    texts = distributed.run(_differ_in_one, 4, root, cases)
    assert all(each == texts[0] for each in texts)
    assert texts[0][0] == ""
    assert "rank 0 and rank 1, both of part 0, pass different ones" in texts[0][1]
    assert "rank 2 and rank 3, both of part 1, pass different ones" in texts[0][2]
    assert texts[0][3] == "all ranks must have the same input_nodes, got train on rank 0 and ids or a mask on rank 3"
    assert texts[0][4] == "all ranks must have the same shuffle, got True on rank 0 and False on rank 3"


def test_a_seed_that_some_ranks_give_must_equal_rank_0s(tmp_path):
    cases = [[{"seed": a}, {"seed": b}] for a, b in [(5, 5), (5, None), (None, None), (None, 5), (5, 6)]]
    texts, others = distributed.run(_differ_in_one, 2, _partition(tmp_path / "parts", 2), cases)
    assert texts == others and texts[:3] == ["", "", ""]
    assert re.fullmatch(
        r"all ranks must have the same seed, got none \(so \d+ was drawn\) on rank 0 and 5 on rank 1", texts[3]
    )
    assert texts[4] == "all ranks must have the same seed, got 5 on rank 0 and 6 on rank 1"


def test_different_logical_ranks_are_named_before_the_parts_that_they_join(tmp_path):
    cases = [[{"logical_ranks": 3}, {"logical_ranks": 2}]]
    ((text,), other) = distributed.run(_differ_in_one, 2, _partition(tmp_path / "parts", 4), cases)
    assert text == "all ranks must have the same logical_ranks, got 3 on rank 0 and 2 on rank 1" and other == [text]


def test_a_plain_value_on_one_rank_agrees_with_the_equal_mapping_on_another(tmp_path):
    cases = [
        [{"logical_ranks": 2}, {"logical_ranks": {"number": 2, "join": False}}],
        [{"shared_draws": "batch"}, {"shared_draws": {"block": 1, "vertices": "batch"}}],
        [{"memory": {"host": 0, "machines": MACHINES}}, {"memory": {"machines": MACHINES, "host": "0B", "allow": []}}],
        [{"partial_aggregation": "sum"}, {"partial_aggregation": {"reduce": "sum", "weight": None}}],
    ]
    assert distributed.run(_differ_in_one, 2, _partition(tmp_path / "parts", 2), cases) == [[""] * 4] * 2


# --- numbers of NumPy and torch -----------------------------------------------------------------------------

#: Whole numbers for every numeric argument, and other numbers for those that need not be whole.
_WHOLE_NUMBERS = {
    "replication_factor": 1, "device_rows": 1, "timeout": 30, "depth": 3, "seed": 7, "batch_size": 16, "num_workers": 1, "num_neighbors": 5,
}  # fmt: skip
_REAL_NUMBERS = {"replication_factor": 0.25, "device_rows": 0.5, "timeout": 20.5}
_WHOLE = [
    np.int8,
    np.uint8,
    np.int32,
    np.int64,
    np.uint64,
    lambda v: np.array(v),
    lambda v: torch.tensor(v),
    lambda v: torch.tensor(v, dtype=torch.uint8),
]
_REAL = [
    np.float16,
    np.float32,
    np.float64,
    lambda v: np.array(float(v)),
    lambda v: torch.tensor(float(v)),
    lambda v: torch.tensor(v, dtype=torch.float64),
]


def _give_numbers(rank: int, root: str) -> int:
    """Gives all numeric arguments as each kind of number. The batches equal those with Python's numbers."""
    made = 0
    also_real = {name: _WHOLE_NUMBERS[name] for name in _REAL_NUMBERS}
    for numbers, converts in ((_WHOLE_NUMBERS, _WHOLE), (also_real, _REAL), (_REAL_NUMBERS, _REAL)):
        expected = None
        for convert in [lambda v: v, *converts]:
            given = {name: convert(value) for name, value in numbers.items()}
            if "num_neighbors" in given:
                given["num_neighbors"] = [given["num_neighbors"], 2]
            loader = NeighborLoader(
                salientpp.load(root),
                **{"num_neighbors": [5, 2], "input_nodes": "train", "batch_size": 16, "seed": 1, **given},
            )
            own = [repr(getattr(loader, name)) for name in ("depth", "seed", "batch_size", "num_workers")]
            digest = (_digest(next(iter(loader))), len(loader), loader.cache.nbytes, own)
            expected = expected or digest
            assert digest == expected, (numbers, convert)
            made += 1
    return made


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    number = 3 + len(_WHOLE) + 2 * len(_REAL)
    assert distributed.run(_give_numbers, 2, _partition(tmp_path / "parts", 2), seconds=200) == [number] * 2


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.True_, torch.tensor(True), np.array([3]), torch.tensor([3]), "3", 3j, None, np.float64("nan")),
        pytest.param(2**5000, id="2**5000"),
    ],
)
def test_values_that_are_no_numbers_raise_a_clear_error(value):
    data = random_data()
    for name in ("depth", "replication_factor", "device_rows"):
        if name == "depth" and isinstance(value, int) and value > 1:
            continue
        with pytest.raises(ValueError, match=f"{name} must be "):
            NeighborLoader(data, FANOUTS, **{name: value})


def _reuse(rank: int, root: str) -> list[int]:
    part = salientpp.load(root)
    loader = NeighborLoader(part, [-1, -1], "all", batch_size=500, columns=("x",), seed=0, uneven="wrap")
    pools = [loader.engine.basis.source.exchange.buffers, loader.engine.producer.fetch.served.buffers]
    taken = []
    for _ in range(4):
        for batch in loader:
            assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
        taken.append([pool.bytes_allocated for pool in pools])
    assert all(taken[0]), "rows for others and from others are large enough for pools"
    return [sum(now) for now in taken]


def test_rows_that_travel_take_no_fresh_memory_in_steady_state(tmp_path):
    data = synthetic(num_vertices=4000, num_features=1, seed=0)
    data.x = torch.arange(4000.0).view(-1, 1).expand(-1, 512).contiguous()
    root = tmp_path / "parts"
    salientpp.partition(data, num_parts=2, root=root, num_neighbors=[-1, -1], batch_size=500)
    for taken in distributed.run(_reuse, 2, str(root)):
        assert taken[-1] == taken[1]
