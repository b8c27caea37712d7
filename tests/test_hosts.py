"""Laws of hosts with several ranks: they hold one copy of rows and one cache, fetch a row once, and batches are those of ranks that are alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.plan.cache import add_scores, plan_cache, score
from salientpp.plan.placement import Placement

FANOUTS, BATCH = [4, 3, 2], 8

#: Parts, and ranks of each host.
HOSTS = {
    "2x2": (4, [2, 2]),
    "2x4": (8, [4, 4]),
    "2x2-of-2-parts": (2, [2, 2]),
    "uneven": (5, [2, 1, 2]),
    "one-host": (3, [3]),
    "3-ranks-of-8-parts": (8, [2, 1]),
    "a-part-on-two-hosts": (2, [2, 2, 4]),
}
EACH = pytest.mark.parametrize("hosts", HOSTS)


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
    """Everything of an epoch's batches, after a look at who the rows are."""
    given = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))  # law 1
        given.append(tuple(batch[name].tolist() for name in ("n_id", "x", "y", "edge_index", "e_id", "input_id")))
    return given


def compare(rank: int, root: str, hosts: list[int]) -> list[dict]:
    part = salientpp.load(root)
    found = []
    for options in ({}, {"replication_factor": 0.3}, {"replication_factor": 0.3, "depth": 1, "gpu_fraction": 0.3}):
        for fetch_once in (None, False):
            shared = loader_of(part, hosts, fetch_once=fetch_once, **options)
            batches = epoch_of(shared, part)
            alone = loader_of(part, 1, **options)
            assert batches == epoch_of(alone, part)  # laws 2 and 3
            stats, cache = shared.stats(), shared.cache
            members = cache.members.ids
            assert torch.equal(cache.rows["x"][:, 0].long() if len(cache) else members, part.original_id(members))
            begin, end = shared._source.books[None].range_of(shared._source.exchange.part_id)
            cached = set(members.tolist())
            wanted = [[v for v in n_id if not begin <= v < end and v not in cached] for n_id, *_ in batches]
            assert stats.rows_remote == sum(map(len, wanted))
            found.append({"wanted": wanted, "fetched": stats.rows_fetched, "cached": members.tolist()})
            found[-1]["alone"] = alone.stats().rows_remote
            assert alone.stats().rows_fetched == alone.stats().rows_remote
    return found


@EACH
def test_batches_are_the_same_and_rows_cross_once_per_host_and_round(roots, hosts):
    num_parts, per_host = HOSTS[hosts]
    results = distributed.run(compare, sum(per_host), roots[num_parts], per_host)
    for case in range(len(results[0])):
        for ranks in ranks_of(per_host):
            of_host = [results[rank][case] for rank in ranks]
            assert all(of_rank["cached"] == of_host[0]["cached"] for of_rank in of_host), "one cache"
            rounds = max(len(of_rank["wanted"]) for of_rank in of_host)
            each = [of_rank["wanted"] for of_rank in of_host]
            once = sum(len(set().union(*(wanted[i] for wanted in each if i < len(wanted)))) for i in range(rounds))
            all_rows = sum(len(wanted) for of_rank in each for wanted in of_rank)
            assert sum(of_rank["fetched"] for of_rank in of_host) == (all_rows if case % 2 else once)  # law 4
            if len(ranks) > 1 and all_rows:
                assert once < all_rows <= sum(of_rank["alone"] for of_rank in of_host) or case >= 2


def plan(rank: int, root: str, hosts: list[int], policy: str) -> tuple[list[int], Any]:
    part = salientpp.load(root)
    loader = loader_of(part, hosts, replication_factor=0.3, policy=policy)
    scores = score(
        policy, loader._source.part.workload(loader._source.part.part_id, part.split("train"), FANOUTS, BATCH)
    )
    return loader.cache.members.ids.tolist(), scores


@pytest.mark.parametrize("policy", ["vip", "vip-hop", "degree"])
@pytest.mark.parametrize("hosts", ["2x2", "2x2-of-2-parts", "uneven"])
def test_a_hosts_cache_is_planned_by_what_any_of_its_ranks_needs(roots, hosts, policy):
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


def test_joint_probability_of_a_host_loses_nothing_for_small_numbers():
    pool = torch.zeros(3, dtype=torch.float64)
    for scores in ([1e-30, 0.5, 1.0], [2e-30, 0.5, 0.1]):
        add_scores("vip", pool, torch.tensor(scores))
    assert torch.allclose(pool, torch.tensor([3e-30, 0.75, 1.0], dtype=torch.float64), rtol=1e-6, atol=0)
