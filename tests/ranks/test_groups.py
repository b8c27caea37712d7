"""Laws of the connections between ranks: loaders that are dropped leave nothing behind, and the ranks of a process group need no other ranks."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from graphs import random_data
from rare import rare

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks import roll
from salientpp.ranks.comm import Comm
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.groups import Circle
from salientpp.ranks.job import Job
from salientpp.ranks.waiting import SLICE_SECONDS

FANOUTS, BATCH = [3, 2], 8


def _partition(root: Path, num_parts: int, **options) -> str:
    salientpp.partition(random_data(**options), num_parts, root, FANOUTS, BATCH)
    return str(root)


def _loader(part: salientpp.PartitionedGraph, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": 20, **options}
    return NeighborLoader(part, FANOUTS, options.pop("input_nodes", "train"), **options)


def _batches(loader: NeighborLoader) -> list:
    """Returns the batches of an epoch, after checking them."""
    given = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), loader.data.original_id(batch.n_id))
        given.append((batch.n_id.tolist(), batch.edge_index.tolist()))
    assert len(given) == len(loader) > 0
    return given


# --- a store that outlives the default group ----------------------------------------------------------------


def _met_again(rank: int) -> list[list[list[int]]]:
    found = []
    for turn in range(2):
        comm = Comm.create(timeout=timedelta(seconds=distributed.NEVER))
        if turn and rank == 1:
            time.sleep(2 * SLICE_SECONDS)  # rank 0 looks for failure notes meanwhile
        found.append(comm.gather_numbers([turn, rank]))
        if rank == 1:
            comm.report_failure("this turn is over")
        dist.barrier()
        Circle.known.clear()  # as after destroy_process_group
    return found


def test_keys_of_an_earlier_default_group_do_not_disturb_the_next():
    """torchrun's agents host one store for all default groups of a process."""
    for found in distributed.run(_met_again, 2):
        assert found == [[[turn, 0], [turn, 1]] for turn in range(2)]


# --- loaders that are made and dropped --------------------------------------------------------------------


def _usage() -> tuple[int, int, int, int]:
    """Returns the numbers of descriptors, threads, resident bytes, and keys in the store."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    keys = dist.distributed_c10d._get_default_store().num_keys()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident, keys


def _sweep(rank: int, root: str, number: int) -> list[tuple[int, int, int, int]]:
    """Makes loaders, uses them in every way and drops them in every way, different on each rank. Returns the usage after a third and at the end."""
    part = salientpp.load(root)
    mine = random.Random(rank)
    usages = []
    for index in range(number):
        loader = _loader(part, num_workers=index % 2, replication_factor=0.1 * (index % 3 == 0))
        if index % 4 == 0:
            for given, _ in enumerate(loader):
                if given == mine.randrange(3):
                    break
        if mine.random() < 0.3:
            loader.itself = loader  # only the garbage collector can free the loader
        del loader
        if index in (number // 3, number - 1):
            dist.barrier()
            usages.append(_usage())
    return usages


def _check_sweep(root: str, number: int, seconds: float) -> None:
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc")
    for early, late in distributed.run(_sweep, 2, root, number, seconds=seconds):
        print(early, late)
        # Each rank collects garbage at a different time, so a few more groups may be leased.
        assert late[0] <= early[0] + 20, "descriptors leak"
        assert late[1] <= early[1] + 15, "threads leak"
        assert late[2] - early[2] < 16 * 2**20, "memory grows"
        assert late[3] <= early[3] + 40, "keys stay in the store"


def test_loaders_that_are_dropped_leave_no_descriptors_threads_or_keys(tmp_path):
    _check_sweep(_partition(tmp_path / "parts", 2), 90, seconds=240)


@pytest.mark.faults
def test_a_thousand_loaders_that_are_dropped_leave_no_descriptors_threads_or_keys(tmp_path):
    _check_sweep(_partition(tmp_path / "parts", 2), 1000, seconds=900)


def _come_and_go(rank: int, root: str, number: int) -> int:
    """Makes and drops loaders at different times on each rank, with nested iterations. Returns the number of groups that were made."""
    part = salientpp.load(root)
    plan, mine = random.Random("the same"), random.Random(rank)
    expected = _batches(_loader(part))
    living: list[NeighborLoader] = []
    kept: list[NeighborLoader] = []
    for _ in range(number):
        if plan.random() < 0.6 or not living:
            living.append(_loader(part, depth=plan.choice([1, 10])))
        else:
            gone = living.pop(plan.randrange(len(living)))
            if mine.random() < 0.4:
                kept.append(gone)  # this rank drops the loader later or never
            del gone
            if mine.random() < 0.3:
                kept.clear()
        if len(living) > 1 and plan.random() < 0.3:
            outer, inner = plan.sample(living, 2)
            outer.set_epoch(0)
            for index, _ in enumerate(outer):
                if index == 1:
                    inner.set_epoch(0)
                    assert _batches(inner) == expected
        elif living:
            chosen = plan.choice(living)
            chosen.set_epoch(0)
            assert _batches(chosen) == expected
    return len({id(loader.engine.basis.comm.groups) for loader in living})


@pytest.mark.parametrize("world", [*rare(2), 3])
def test_loaders_that_live_at_the_same_time_never_share_connections(tmp_path, world):
    made = distributed.run(_come_and_go, world, _partition(tmp_path / "parts", world), 20, seconds=200)
    assert len(set(made)) == 1 and made[0] > 1


def _fail_and_go_on(rank: int, root: str) -> tuple[list[str], int]:
    part = salientpp.load(root)
    texts = []
    for index in range(3):
        loader = _loader(part, transform=_explode if rank == 1 else None, num_workers=0)
        try:
            for _ in loader:
                pass
        except RuntimeError as error:
            texts.append(str(error))
        groups = loader.engine.basis.comm.groups
        assert groups.broken and not groups.free
        del loader
        gc.collect()
        assert not groups.free
        dist.barrier()
        again = _loader(part)
        assert again.engine.basis.comm.groups is not groups
        assert _batches(again), index
    return texts, len(texts)


def _explode(batch):
    raise ZeroDivisionError("division by zero")


def test_after_a_failure_the_next_loader_gets_no_old_connection_or_note(tmp_path):
    for texts, count in distributed.run(_fail_and_go_on, 2, _partition(tmp_path / "parts", 2)):
        assert count == 3
        assert all("rank 1, batch 0, stage assemble: division by zero" in text for text in texts)


# --- process groups of some ranks -------------------------------------------------------------------------


def _train_apart(rank: int, roots: list[str], members: list[list[int]], counts: list[int], locally: bool) -> list:
    """Trains each group on its own directory and at its own pace. Returns the batches that the rank got."""
    ours = next(index for index, ranks in enumerate(members) if rank in ranks)
    if locally:
        group = dist.new_group(members[ours], use_local_synchronization=True, sort_ranks=False)
    else:
        group = [dist.new_group(ranks, sort_ranks=False) for ranks in members][ours]
    given = []
    for index in range(counts[ours]):
        part = salientpp.load(roots[ours], process_group=group)
        assert part.part_id == members[ours].index(rank) * part.num_parts // len(members[ours])
        loader = _loader(part, process_group=group, replication_factor=0.1, seed=index)
        given += [_batches(loader) for _ in range(2)]
        time.sleep(0.02 * ours)
    return given


def _train_alone(rank: int, root: str, count: int) -> list:
    return [
        _batches(loader)
        for index in range(count)
        for loader in [_loader(salientpp.load(root), seed=index)]
        for _ in range(2)
    ]


_GROUPS = [([[3, 0], [2, 1]], [2, 5], False), ([[0, 2], [1, 3]], [5, 1], True), ([[0, 1], [2, 3]], [3, 3], False)]
_LOCALLY = {False: "all-make-groups", True: "members-make-groups"}


@pytest.mark.parametrize(
    ("members", "counts", "same", "locally"),
    [
        pytest.param(
            *given,
            locally,
            id=f"{given[0]}-{words}",
            marks=[] if (at, locally) in ((0, False), (1, True)) else pytest.mark.rare,
        )
        for at, given in enumerate(_GROUPS)
        for locally, words in _LOCALLY.items()
    ],
)
def test_two_groups_of_ranks_train_independently(tmp_path, members, counts, same, locally):
    roots = [_partition(tmp_path / "0", 2, seed=0)] * 2
    if not same:
        roots[1] = _partition(tmp_path / "1", 2, seed=1)
    results = distributed.run(_train_apart, 4, roots, members, counts, locally, seconds=200)
    most = {root: max(count for other, count in zip(roots, counts) if other == root) for root in roots}
    alone = {root: distributed.run(_train_alone, 2, root, count) for root, count in most.items()}
    for root, count, ranks in zip(roots, counts, members):
        assert [results[rank] for rank in ranks] == [batches[: 2 * count] for batches in alone[root]]


def test_ranks_serve_parts_by_their_numbers_in_the_group(tmp_path):
    """Three of four ranks, in no particular order, serve one part; the fourth does something else."""
    root = _partition(tmp_path / "parts", 1)
    seeds = distributed.run(_share_one_part, 4, root, [3, 1, 0])
    assert seeds[2] is None
    given = [seed for rank in (3, 1, 0) for seed in seeds[rank]]
    assert sorted(given) == salientpp.load(root, part_id=0).split("train").tolist()


def _share_one_part(rank: int, root: str, ranks: list[int]) -> list[int] | None:
    group = dist.new_group(ranks, sort_ranks=False)
    if rank not in ranks:
        return None
    loader = _loader(salientpp.load(root, process_group=group), process_group=group, uneven="exact")
    assert loader.engine.basis.comm.rank == ranks.index(rank)
    return [seed for batch in loader for seed in batch.input_id.tolist()]


def _copy(rank: int, root: str, to: str, members: list[list[int]]) -> list[int]:
    groups = [dist.new_group(ranks) for ranks in members]
    ours = next(index for index, ranks in enumerate(members) if rank in ranks)
    copy = salientpp.copy_to_disk(root, Path(to) / str(rank), process_group=groups[ours])
    part = salientpp.load(copy, process_group=groups[ours])
    loader = _loader(part, process_group=groups[ours])
    assert _batches(loader)
    return [part.part_id, sorted(int(path.name.rpartition("-")[2]) for path in copy.glob("part-*"))]


def test_a_rank_copies_the_parts_that_it_serves_in_its_group(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    out = distributed.run(_copy, 4, root, str(tmp_path / "copies"), [[0, 3], [1, 2]])
    assert [part for part, _ in out] == [0, 0, 1, 1]
    assert all(copied in ([], [part]) for part, copied in out)


def _fail_in_group(rank: int, root: str, ranks: list[int]) -> str:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return ""
    part = salientpp.load(root, process_group=group)
    try:
        _loader(part, process_group=group, depth=1 + (rank == ranks[-1]))
    except ValueError as error:
        return str(error)
    return "made"


def test_errors_say_which_group_rank_numbers_refer_to(tmp_path):
    texts = distributed.run(_fail_in_group, 4, _partition(tmp_path / "parts", 2), [1, 3])
    assert texts[0] == texts[2] == ""
    for rank in (1, 3):
        assert (
            texts[rank]
            == "all ranks must have the same depth, got 1 on rank 0 and 2 on rank 1 of the process_group of ranks [1, 3]"
        )


def _load_for_all(rank: int, root: str) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    try:
        _loader(salientpp.load(root), process_group=groups[rank // 2])  # part 0 on ranks 0 and 1
    except ValueError as error:
        return str(error)
    return "made"


def test_a_graph_loaded_for_other_ranks_is_refused(tmp_path):
    texts = distributed.run(_load_for_all, 4, _partition(tmp_path / "parts", 2))
    words = "its graph was loaded with part_id={}; leave part_id out of salientpp.load, and give it the loader's process_group"
    assert [words.format(part) in text for text, part in zip(texts, [0, 0, 1, 1])] == [True] * 4


def _wrong_group(rank: int, root: str, what: str) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ours, others = groups[rank // 2], groups[1 - rank // 2]
    part = salientpp.load(root, process_group=ours)
    wrong = {"type": "the first two", "other": others, "size": 2}[what]
    try:
        _loader(part, process_group=wrong if rank == 1 else ours, timeout=distributed.NEVER)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize("what", [*rare("type"), "other", *rare("size")])
def test_waiting_ranks_are_told_which_rank_has_a_wrong_process_group(tmp_path, what):
    texts = distributed.run(_wrong_group, 4, _partition(tmp_path / "parts", 2), what)
    assert texts[2:] == ["made", "made"], "the other group is not affected"
    assert texts[1].startswith("ValueError: process_group must be a ")
    assert texts[0].startswith(
        "ValueError: rank 1 of the process_group of ranks [0, 1] could not make its loader: ValueError: process_group must be a "
    )


# --- torch's own debugging --------------------------------------------------------------------------------


def _be_busy(rank: int, root: str, seconds: float, timeout: float) -> int:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert "Wrapper" in type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__, "torch's debugging is active"
    given = 0
    for given, _ in enumerate(_loader(salientpp.load(root), timeout=timeout), 1):
        if given == 1 and rank == 0:
            time.sleep(seconds)  # more than a fifth of the timeout, which is gloo's limit for one attempt to connect
    return given


def test_with_torchs_debugging_a_rank_may_be_busy_within_the_timeout(tmp_path, capfd):
    assert min(distributed.run(_be_busy, 2, _partition(tmp_path / "parts", 2), 4.0, 18.0)) > 2
    assert "timeout" not in capfd.readouterr().err


# --- options of gloo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interfaces, number", [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_a_group_uses_the_interfaces_of_the_environment(monkeypatch, interfaces, number):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    options = roll._gloo_options(timedelta(seconds=7), None)
    assert (len(options._devices), options._threads, options._timeout) == (number, 6, timedelta(seconds=7))


# --- some ranks of a group --------------------------------------------------------------------------------


def _host_between_devices(rank: int) -> list[float]:
    """Exchanges numbers between the two ranks of a host, over the group that would be NCCL's if the ranks had devices."""
    new_group, made = dist.new_group, []

    def over_gloo(ranks: list[int], backend: str, pg_options: object, **options):
        made.append((backend, ranks))
        return new_group(ranks, backend="gloo", **options)

    dist.new_group = over_gloo
    dist.ProcessGroupNCCL = SimpleNamespace(Options=lambda is_high_priority_stream: None)
    job = Comm.create(timeout=timedelta(seconds=60))
    job.device = torch.device("cuda")
    host = [0, 1] if rank < 2 else [2, 3]
    time.sleep(0.2 * rank)  # the hosts do so at different times
    comm = job.among(host, between_devices=True)
    assert made == [("nccl", host)]
    assert comm.device.type == "cuda"
    assert job.among(host).device.type == "cpu"
    received = torch.empty(2)
    dist.all_to_all_single(received, torch.full((2,), float(rank)), group=comm.groups.device)
    return received.tolist()


def test_devices_of_a_host_exchange_rows_over_a_group_that_only_its_ranks_make():
    found = distributed.run(_host_between_devices, 4)
    assert found == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]


def _fails_before_its_host_meets(rank: int) -> tuple[str, int]:
    comm, text = Comm.create(timeout=timedelta(seconds=distributed.NEVER)), ""
    try:
        with comm.reporting("make its loader"):
            if rank == 1:
                raise ValueError("too little memory")
            if rank == 2:
                comm.among([1, 2])
    except (ValueError, RuntimeError) as error:
        text = str(error)
    dist.barrier()
    again = Comm.create(timeout=timedelta(seconds=60))
    return text, again.among([1, 2]).size if rank else 1


def test_a_rank_that_waits_for_its_host_is_told_of_a_failure():
    """The ranks of the host can also meet later."""
    wrong = "too little memory"
    found = distributed.run(_fails_before_its_host_meets, 3)
    assert found == [("", 1), (wrong, 2), (f"rank 1 could not make its loader: ValueError: {wrong}", 2)]


def without_descriptors(rank: int) -> str:
    """Makes connections, which take five descriptors. Rank 1 has two left, or a few more if another thread closes some."""
    torch.distributed.barrier()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        os.close(first := os.dup(0))  # the lowest that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + 2, before[1]))
    try:
        Comm.create(timeout=timedelta(seconds=20))
        return "connected"
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_without_descriptors_says_so_to_all():
    for said in distributed.run(without_descriptors, 2):
        assert said.startswith("rank 1 has no file descriptors left to connect its loader"), said


class _Unreachable:
    """A store whose host answers earlier connections, and no new one."""

    def __init__(self) -> None:
        self._answers, self.let_go = dist.HashStore(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answers, name)

    def clone(self) -> Any:
        self.let_go.wait(10)
        raise dist.DistNetworkError("there is no host any more")


def test_a_rank_that_cannot_reach_the_store_again_hears_of_a_loss() -> None:
    """It makes a connection of its own to the store before gloo connects. torch's client tries for its whole time-out."""
    store = _Unreachable()
    job = Job(store, 0, 2, "session")
    job.tell_lost("rank 1 of the job went away")
    try:
        with pytest.raises(RankFailure, match="rank 1 of the job went away"):
            roll.Roll(job, (0, 1))._connect(1, "gloo", timedelta(seconds=20))
    finally:
        store.let_go.set()
