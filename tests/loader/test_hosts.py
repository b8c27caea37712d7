"""Laws of hosts with several ranks: they hold one copy of rows and one cache, fetch a row once, and give the batches of ranks on separate hosts."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from rare import rare, some_of
from shared_blocks import blocks_of, mapping

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.loader import hosts
from salientpp.ranks import shared_memory as shared
from salientpp.ranks.comm import Comm
from salientpp.ranks.hosts import host_by_launcher
from salientpp.ranks.placement import Placement
from salientpp.ranks.shared_memory import Offer, mapped, sharing
from salientpp.vip.policies import add_scores, plan_cache, score

FANOUTS, BATCH = [4, 3, 2], 8

#: Number of parts, and ranks of each host.
HOSTS = {
    "2x2": (4, [2, 2]),
    "2x4": (8, [4, 4]),
    "2x2-of-2-parts": (2, [2, 2]),
    "uneven": (5, [2, 1, 2]),
    "one-host": (3, [3]),
    "3-ranks-of-8-parts": (8, [2, 1]),
    "a-part-on-two-hosts": (2, [2, 1, 3]),
}
#: The most ranks, or like another one in all but their number: rare tests.
LIKE_OTHERS = ["2x4", "one-host"]
EACH = pytest.mark.parametrize("hosts", [*(name for name in HOSTS if name not in LIKE_OTHERS), *rare(*LIKE_OTHERS)])


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[int, str]:
    folder, made = tmp_path_factory.mktemp("hosts"), {}
    for num_parts in {num_parts for num_parts, _ in HOSTS.values()}:
        data = random_data(600, 3600, train_fraction=0.5)
        salientpp.partition(data, num_parts, folder / str(num_parts), FANOUTS, BATCH)
        made[num_parts] = str(folder / str(num_parts))
    return made


def ranks_of(hosts: Sequence[int]) -> list[range]:
    return [range(*bounds) for bounds in pairwise([0, *accumulate(hosts)])]


def loader_of(part: salientpp.PartitionedGraph, hosts: Any, **options: Any) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, "num_workers": 1, **options}
    return NeighborLoader(part, FANOUTS, "train", ranks_per_host=hosts, **options)


def epoch_of(loader: Any, part: salientpp.PartitionedGraph) -> list[tuple]:
    """Returns everything in an epoch's batches, after a check that rows belong to their vertices."""
    given = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))  # law 1
        given.append(tuple(batch[name].tolist() for name in ("n_id", "x", "y", "edge_index", "e_id", "input_id")))
    return given


def compare(rank: int, root: str, hosts: list[int]) -> list[dict]:
    part = salientpp.load(root)
    found = []
    for options in ({}, {"replication_factor": 0.3}, {"replication_factor": 0.3, "depth": 1, "device_rows": 0.3}):
        shared = loader_of(part, hosts, **options)
        batches = epoch_of(shared, part)
        alone = loader_of(part, 1, **options)
        assert batches == epoch_of(alone, part)  # laws 2 and 3
        stats, cache = shared.stats(), shared.cache
        members = cache.members.ids
        assert torch.equal(cache.rows["x"][:, 0].long() if len(cache) else members, part.original_id(members))
        begin, end = shared.engine.basis.source.books[None].range_of(shared.engine.basis.source.exchange.part_id)
        cached = set(members.tolist())
        wanted = [[v for v in n_id if not begin <= v < end and v not in cached] for n_id, *_ in batches]
        assert stats.rows_remote == sum(map(len, wanted))
        found.append({"shared": stats.rows_remote, "alone": alone.stats().rows_remote, "cached": members.tolist()})
    return found


@EACH
def test_batches_are_the_same_and_hosts_have_one_cache(roots, hosts):
    num_parts, per_host = HOSTS[hosts]
    results = distributed.run(compare, sum(per_host), roots[num_parts], per_host)
    for case in range(len(results[0])):
        for ranks in ranks_of(per_host):
            of_host = [results[rank][case] for rank in ranks]
            assert all(of_rank["cached"] == of_host[0]["cached"] for of_rank in of_host), "one cache"
            shared, alone = (sum(of_rank[name] for of_rank in of_host) for name in ("shared", "alone"))
            assert shared <= alone or case >= 1  # a host's cache may hold rows that one rank alone would not keep


def small_caches(rank: int, root: str, hosts: list[int], sizes: list[int]) -> list[list[int]]:
    part = salientpp.load(root)
    cached = []
    for size in sizes:
        loader = loader_of(part, hosts, replication_factor=(size + 0.5) * len(hosts) / part.num_vertices)
        epoch_of(loader, part)
        members = loader.cache.members.ids
        assert torch.equal(loader.cache.rows["x"][:, 0].long(), part.original_id(members))
        cached.append(members.tolist())
    return cached


def test_a_hosts_cache_may_be_smaller_than_its_number_of_ranks(roots):
    sizes = [1, 2, 3, 4, 5]
    first, *others = distributed.run(small_caches, 4, roots[4], [3, 1], sizes)
    assert [len(members) for members in first] == sizes
    assert others[:2] == [first, first] and [len(members) for members in others[2]] == sizes


def count(rank: int, root: str, hosts: list[int], alpha: float) -> int:
    loader = loader_of(salientpp.load(root), hosts, replication_factor=alpha)
    for _ in loader:
        pass
    return loader.stats().rows_remote


SOME = [("2x2", 0.25), ("uneven", 0.0), ("3-ranks-of-8-parts", 0.25), ("a-part-on-two-hosts", 0.25), ("one-host", 0.0)]
EVERY = [*itertools.product(HOSTS, (0.0, 0.25))]


@pytest.mark.parametrize(("hosts", "alpha"), some_of(SOME, EVERY))
def test_fetched_rows_equal_the_analysis(roots, hosts, alpha):
    num_parts, per_host = HOSTS[hosts]
    live = distributed.run(count, sum(per_host), roots[num_parts], per_host, alpha)
    said = analyze(
        salientpp.load(roots[num_parts]),
        Batches(epochs=1, seed=5),
        Ways(replication_factors=[alpha]),
        ranks=sum(per_host),
        ranks_per_host=per_host,
    ).results[0]
    assert said.remote_rows_per_rank == tuple(live)  # law 4


def everything(batch: Any) -> Any:
    """Returns everything that a batch has, in a fixed order."""
    stores = [store.to_dict() for store in batch.stores]
    return [(name, store[name]) for store in stores for name in sorted(store)]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def compare_kinds(rank: int, root: str, typed: bool) -> int:
    part = salientpp.load(root)
    common = {"batch_size": BATCH, "shuffle": True, "seed": 3, "replication_factor": 0.2}
    if typed:
        paper, edges = {"input_nodes": ("paper", "train")}, {"edge_label_index": ("author", "writes", "paper")}
        cases = [
            (NeighborLoader, {**paper, "columns": ("x", "time")}),
            (NeighborLoader, {**paper, "time_attr": "time", "uneven": "exact", "device_rows": {"cache": 200}}),
            (NeighborLoader, {"input_nodes": ("author", "train"), "disjoint": True, "uneven": "exact"}),
            (LinkNeighborLoader, {**edges, "neg_sampling": "binary", "uneven": "exact"}),
        ]
    else:
        train = {"input_nodes": "train"}
        cases = [
            (NeighborLoader, {**train, "columns": ("x", "y"), "policy": "degree"}),
            (NeighborLoader, {**train, "disjoint": True, "num_workers": 2}),
            (NeighborLoader, {**train, "columns": ()}),
            (NeighborLoader, {**train, "uneven": "exact", "batch_size": 7, "replication_factor": 0.0}),
            (LinkNeighborLoader, {"neg_sampling": "triplet", "batch_size": 32}),
        ]
    number = 0
    for make, options in cases:
        options = {**common, **options}
        fanouts = TYPED_FANOUTS if typed else FANOUTS
        ours, theirs = (make(part, fanouts, ranks_per_host=hosts, **options) for hosts in (2, 1))
        for left, right in zip(ours, theirs, strict=True):
            assert same(everything(left), everything(right)), options
            number += 1
        assert sum(ours.stats().by_type[type_]["remote"] for type_ in ours.stats().by_type) == ours.stats().rows_remote
    return number


@pytest.mark.parametrize("typed", [False, True], ids=["one-type", "types"])
def test_batches_of_every_kind_equal_those_of_ranks_on_separate_hosts(roots, tmp_path, typed):
    root = roots[4]
    if typed:
        data, root = typed_data(), str(tmp_path / "typed")
        salientpp.partition(data, 4, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=("venue",))
    assert min(distributed.run(compare_kinds, 4, root, typed)) > 0


def leave_and_resume(rank: int, root: str) -> None:
    part = salientpp.load(root)
    expected = epoch_of(loader_of(part, 1), part)
    loader = loader_of(part, 2, replication_factor=0.1)
    for number, _ in enumerate(loader):  # law 7: every rank leaves at another batch
        if number == rank:
            break
    loader.set_epoch(0)
    assert epoch_of(loader, part) == expected
    first = loader_of(part, [1, 1, 2])
    iterator = iter(first)
    given = [next(iterator) for _ in range(2 + rank)]
    state = first.state_dict()
    iterator.close()
    assert len(given) == 2 + rank
    second = loader_of(part, 2)
    second.load_state_dict(state)  # a state does not depend on the hosts
    assert epoch_of(second, part) == expected[2 + rank :]


def test_an_epoch_may_be_left_and_resumed_by_other_hosts(roots):
    distributed.run(leave_and_resume, 4, roots[4])


def compare_logical_ranks(rank: int, root: str, hosts: list[int], logical_ranks: int) -> int:
    part, number = salientpp.load(root), 0
    for options in (
        {"logical_ranks": logical_ranks},
        {"logical_ranks": {"number": logical_ranks, "join": True}, "replication_factor": 0.2},
    ):
        ours, theirs = (loader_of(part, given, **options) for given in (hosts, 1))
        begin, end = ours.engine.basis.source.books[None].range_of(ours.engine.basis.source.exchange.part_id)
        cached, remote = set(ours.cache.members.ids.tolist()), 0
        for left, right in zip(ours.rounds(), theirs.rounds(), strict=True):
            assert same([everything(batch) for batch in left], [everything(batch) for batch in right])
            remote += sum(len({v for v in batch.n_id.tolist() if not begin <= v < end} - cached) for batch in left)
            number += 1
        assert ours.stats().rows_remote == remote
    return number


@pytest.mark.parametrize(
    ("hosts", "logical_ranks"), [("3-ranks-of-8-parts", 8), ("2x2-of-2-parts", 4), *rare(("2x2", 8))]
)
def test_logical_ranks_are_independent_of_hosts(roots, hosts, logical_ranks):
    num_parts, per_host = HOSTS[hosts]
    assert min(distributed.run(compare_logical_ranks, sum(per_host), roots[num_parts], per_host, logical_ranks)) > 0


def plan(rank: int, root: str, hosts: list[int], policy: str) -> tuple[list[int], Any]:
    part = salientpp.load(root)
    loader = loader_of(part, hosts, replication_factor=0.3, policy=policy)
    scores = score(
        policy,
        loader.engine.basis.source.part.workload(
            loader.engine.basis.source.part.part_id, part.split("train"), FANOUTS, BATCH
        ),
    )
    return loader.cache.members.ids.tolist(), scores


PLANNED = [("uneven", "vip"), ("2x2", "vip-hop"), ("2x2-of-2-parts", "degree")]
EVERY_PLANNED = [*itertools.product(("2x2", "2x2-of-2-parts", "uneven"), ("vip", "vip-hop", "degree"))]


@pytest.mark.parametrize(("hosts", "policy"), some_of(PLANNED, EVERY_PLANNED))
def test_a_hosts_cache_is_planned_for_all_of_its_ranks(roots, hosts, policy):
    num_parts, per_host = HOSTS[hosts]
    root = roots[num_parts]
    results = distributed.run(plan, sum(per_host), root, per_host, policy)
    whole = salientpp.load(root)
    placement = Placement(0, sum(per_host), num_parts, ranks_by_host=tuple(per_host))
    book = whole.joined(placement.row_offsets, None).book
    for part_id, ranks in enumerate(ranks_of(per_host)):
        scores = torch.stack([results[rank][1].double() for rank in ranks])
        pool = scores.sum(0) if policy == "degree" else 1 - (1 - scores).prod(0)
        members = results[ranks[0]][0]
        begin, end = book.range_of(part_id)
        assert not [v for v in members if begin <= v < end]
        assert len(members) == len(plan_cache(pool, book, part_id, 0.3))
        pool[begin:end] = 0
        left = torch.ones(whole.num_vertices, dtype=torch.bool)
        left[members] = False
        assert float(pool[members].min()) >= float(pool[left].max()) - 1e-12


def test_joint_probability_of_a_host_is_accurate_for_small_numbers():
    pool = torch.zeros(3, dtype=torch.float64)
    for scores in ([1e-30, 0.5, 1.0], [2e-30, 0.5, 0.1]):
        add_scores("vip", pool, torch.tensor(scores))
    assert torch.allclose(pool, torch.tensor([3e-30, 0.75, 1.0], dtype=torch.float64), rtol=1e-6, atol=0)


# --- which ranks share a host -----------------------------------------------------------------------------


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, "ranks 4 to 7"),
        (TORCHRUN | {"WORLD_SIZE": "16"}, None),  # stale variables of another start
        (TORCHRUN | {"RANK": "1"}, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, None),
        (TORCHRUN | {"LOCAL_RANK": "many"}, None),
        (TORCHRUN | {"LOCAL_RANK": "١"}, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4" * 5000}, None),
        (SRUN | {"SLURM_NODEID": "2" * 5000}, None),
        ({"RANK": "5", "WORLD_SIZE": "8"}, None),
        (SRUN, "node 2"),
        ({"RANK": "5", "WORLD_SIZE": "8"} | SRUN, "node 2"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4"}, None),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, None),  # a batch script
    ],
)
def test_hosts_follow_from_the_launchers_variables(environ, expected):
    assert host_by_launcher(5, 8, environ) == expected


def under_torchrun(rank: int, root: str, per_host: list[int], options: dict, wrong: int | None = None) -> Any:
    first = next(ranks[0] for ranks in ranks_of(per_host) if rank in ranks)
    size = next(len(ranks) for ranks in ranks_of(per_host) if rank in ranks)
    names = {"RANK": rank, "WORLD_SIZE": sum(per_host), "LOCAL_RANK": rank - first, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in names.items()})
    if rank == wrong:
        hosts.sharing = refusing
    part = salientpp.load(root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = loader_of(part, **{"hosts": None, **options})
        batches = epoch_of(loader, part)
    words = [str(warning.message) for warning in caught if "share its memory" in str(warning.message)]
    return loader.engine.basis.ranks_by_host, words, batches, loader.stats().rows_remote


def refusing(comm: Comm, hosts: Sequence[range]) -> str | None:
    shared.mapped = lambda offer: mapped(Offer(offer.process, offer.file, "ff" * 16, offer.num_bytes))
    return sharing(comm, hosts)


def test_hosts_are_by_default_those_of_torchrun(roots):
    alone = distributed.run(under_torchrun, 4, roots[4], [2, 2], {"hosts": 1})
    found = distributed.run(under_torchrun, 4, roots[4], [2, 2], {})
    assert [of_rank[:2] for of_rank in alone] == [((), [])] * 4
    assert [of_rank[:2] for of_rank in found] == [((2, 2), [])] * 4
    assert [of_rank[2] for of_rank in found] == [of_rank[2] for of_rank in alone]
    assert sum(of_rank[3] for of_rank in found) < sum(of_rank[3] for of_rank in alone)


def test_ranks_that_cannot_share_memory_warn_and_continue_separately(roots):
    for sizes, words, _, _ in distributed.run(under_torchrun, 4, roots[4], [2, 2], {"replication_factor": 0.2}, 3):
        assert sizes == () and len(words) == 1
        assert "the ranks of a host do not share its memory: rank 3: process " in words[0]
        assert words[0].endswith("pass ranks_per_host=1 if that is intended")


def test_hosts_that_do_not_fit_the_parts_are_ignored_with_a_warning(roots):
    for sizes, words, _, _ in distributed.run(under_torchrun, 4, roots[2], [1, 3], {}):
        assert sizes == () and "hosts 0 and 1 would share a part but not all of their parts" in words[0]


def test_own_sources_of_rows_disable_hosts(roots):
    for sizes, words, *_ in distributed.run(with_own_rows, 2, roots[2], None):
        assert sizes == () and words == []
    for text in distributed.run(with_own_rows, 2, roots[2], 2):
        assert "rank 0 has rows of its own in columns=, which the other ranks of its host cannot read" in text


def copied(rank: int, root: str, to: str, together: bool) -> Any:
    where = Path(to) / ("all" if together else str(rank))
    if rank == 1:
        time.sleep(0.3)  # the first rank stages its part and continues
    copy = salientpp.copy_to_disk(root, where)
    return under_torchrun(rank, str(copy), [2], {})[:2]


@pytest.mark.parametrize("together", [True, False])
def test_ranks_of_a_host_need_one_copy_of_the_dataset(roots, tmp_path, together):
    for sizes, words in distributed.run(copied, 2, roots[2], str(tmp_path), together):
        assert sizes == ((2,) if together else ())
        assert together or "rank 0 reads a copy without part 1, which another rank of its host serves" in words[0]


def with_own_rows(rank: int, root: str, given: Any) -> Any:
    rows = {"x": salientpp.load(root).node_rows()["x"].clone()}
    try:
        return under_torchrun(rank, root, [2], {"hosts": given, "columns": rows})
    except ValueError as error:
        return str(error)


#: Values of ``ranks_per_host`` and options, by rank; and the error.
WRONG: list[tuple[list[Any], list[dict], str]] = [
    ([3], [{}], r"ranks_per_host=3 does not fit 4 ranks; start a multiple of 3, or pass a list"),
    ([[1, 2]], [{}], r"ranks_per_host=\[1, 2\] must add up to the 4 ranks, got a sum of 3"),
    ([0], [{}], r"ranks_per_host must be the number of ranks on each host .* got 0"),
    ([2, 2, 2, "two"], [{}], r"ranks_per_host must be the number of ranks on each host .* got 'two'"),
    ([2, 1], [{}], r"all ranks must have the same ranks_per_host, got 2 on rank 0 and 1 on rank 1"),
    ([2], [{}, {"replication_factor": 0.1}], r"all ranks must have the same replication_factor, got 0.0 on rank 0 and 0.1 on rank 1"),
]  # fmt: skip


def refused(rank: int, root: str) -> list[str]:
    said = []
    for given, options, _ in WRONG:
        try:
            loader_of(salientpp.load(root), given[rank % len(given)], **options[rank % len(options)])
            said.append("made")
        except ValueError as error:
            said.append(str(error))
    return said


def test_hosts_that_are_wrong_are_refused_on_every_rank(roots):
    for said in distributed.run(refused, 4, roots[4]):
        for text, (*_, words) in zip(said, WRONG, strict=True):
            assert re.search(words, text), text


# --- memory, and ranks that die ---------------------------------------------------------------------------


def proportional(rank: int, root: str) -> tuple[int, int, int]:
    part = salientpp.load(root)
    loader = loader_of(part, 2, replication_factor=1.5)
    for tensor in (*loader.cache.rows.values(), loader.cache.members.ids, loader.cache.members.words):
        tensor.sum()  # every rank reads it
    torch.distributed.barrier()
    seen = mapping("Pss"), loader.cache.nbytes + loader.cache.members.ids.nbytes, loader.memory_used()["cache"]
    torch.distributed.barrier()
    return seen


def test_a_hosts_cache_takes_the_memory_of_one_cache(tmp_path):
    data = random_data(4000, 24000, train_fraction=0.5)
    data.x = torch.arange(4000.0).view(-1, 1).repeat(1, 300)
    salientpp.partition(data, 4, tmp_path / "parts", FANOUTS, 64)
    results = distributed.run(proportional, 4, str(tmp_path / "parts"))
    for first in (0, 2):
        (pss, size, told), other = results[first : first + 2]
        assert size == other[1] > 1e6 and told > 1e6
        print("proportional", pss + other[0], "of", size)
        # Each tensor begins on its own page. At most 3 blocks are alive: this one, and those of scores.
        assert size <= pss + other[0] <= size + 16 * 4096


def be_killed(rank: int, root: str, folder: str, victims: list[int]) -> str:
    part = salientpp.load(root)
    loader = loader_of(part, 2, replication_factor=0.3)
    Path(folder, str(rank)).write_text(str(os.getpid()))
    try:
        for index, _ in enumerate(loader):
            if index == 2:
                torch.distributed.barrier()
                if rank in victims:
                    os.kill(os.getpid(), signal.SIGKILL)
        next(iter(loader))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("victims", [[1], [0, 1, 2, 3]], ids=str)
def test_a_killed_rank_raises_on_the_others_and_leaves_no_shared_memory(roots, tmp_path, victims):
    before = set(os.listdir("/dev/shm"))
    words = distributed.run(be_killed, 4, roots[4], str(tmp_path), victims, may_fail=True)
    for rank in set(range(4)) - set(victims):
        assert "rank 1 went away" in str(words[rank]), words
    processes = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(processes) == 4
    deadline = time.monotonic() + distributed.HANG
    while blocks_of(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert blocks_of(processes) == [] and set(os.listdir("/dev/shm")) <= before
