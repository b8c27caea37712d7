"""Law: the rows that `analyze` counts are exactly the rows that a run with the same seed fetches, even if scores nearly tie.

On regular and symmetric graphs, the inclusion probabilities of many vertices are equal or differ only by rounding. Ranks that were computed
under another numbering, or from other arrays, would then cache other vertices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import distributed
import pytest
import torch
from rare import rare
from samplers import Sampler
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.sampling.schedule import Schedule, batch_key
from salientpp.vip.policies import POLICIES, plan_cache, score

ALPHAS = [0.0, 0.05, 0.16, 0.5, 1.0]


def edges_of(kind: str, generator: torch.Generator) -> tuple[int, Tensor]:
    """Returns the number of vertices, and edges in both directions in a random order, under a random numbering."""
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    if kind == "circulant":
        n = draw(60, 140)
        steps = torch.randperm(n // 2 - 1, generator=generator)[: draw(2, 5)] + 1
        pairs = torch.stack([torch.arange(n).repeat(len(steps)), (torch.arange(n) + steps.view(-1, 1)).flatten() % n])
    elif kind == "torus":
        a, b = draw(6, 12), draw(6, 12)
        n, at = a * b, torch.arange(a * b)
        pairs = torch.cat([torch.stack([at, (at + b) % n]), torch.stack([at, at // b * b + (at + 1) % b])], 1)
    elif kind == "bipartite":
        a, b = draw(5, 12), draw(40, 90)
        n, pairs = a + b, torch.stack([torch.arange(a).repeat(b), torch.arange(b).repeat_interleave(a) + a])
    elif kind == "cliques":
        size, number = draw(4, 9), draw(10, 18)
        n, base = size * number, torch.combinations(torch.arange(size)).T
        pairs = torch.cat(
            [base + size * c for c in range(number)]
            + [torch.stack([torch.arange(number), torch.arange(1, number + 1) % number]) * size],
            1,
        )
    elif kind == "permutations":  # random and regular
        n = draw(60, 140)
        pairs = torch.cat(
            [torch.stack([torch.arange(n), torch.randperm(n, generator=generator)]) for _ in range(draw(2, 4))], 1
        )
    else:  # few distinct degrees
        n = draw(80, 140)
        pairs = torch.randint(n, (2, 3 * n), generator=generator)
    both = to_undirected(torch.randperm(n, generator=generator)[pairs], num_nodes=n)
    return n, both[:, torch.randperm(both.size(1), generator=generator)]


#: Graphs by kind and seed. For some, a plan changes with the numbering under which probabilities are computed; every kind has one graph.
TIED = {
    2: [
        ("cliques", 0),
        ("cliques", 26),
        ("torus", 8),
        ("torus", 11),
        ("permutations", 19),
        ("circulant", 27),
        ("bipartite", 1),
        ("sparse", 2),
    ],
    4: [
        ("cliques", 0),
        ("cliques", 19),
        ("torus", 8),
        ("circulant", 9),
        ("circulant", 17),
        ("permutations", 21),
        ("bipartite", 2),
        ("sparse", 1),
    ],
}
KINDS = ["circulant", "torus", "bipartite", "cliques", "permutations", "sparse"]


def tied_data(kind: str, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    n, edge_index = edges_of(kind, generator)
    data = Data(x=torch.arange(n).view(-1, 1).float(), edge_index=edge_index)
    data.train_mask = torch.rand(n, generator=generator) < (0.2, 0.6, 1.0)[seed % 3]
    data.val_mask = ~data.train_mask
    return data


def write(root: Path, kind: str, seed: int, num_parts: int) -> tuple[salientpp.PartitionedGraph, list[int], int]:
    fanouts, batch_size = ([3, 2, 2], [2, 2], [4, 3], [-1, 2])[seed % 4], (3, 8)[seed % 2]
    part = salientpp.partition(
        tied_data(kind, seed),
        num_parts,
        root,
        fanouts,
        batch_size,
        method=("metis", "random")[seed // 2 % 2],
        seed=seed,
    )
    return part, fanouts, batch_size


def counted(
    source: Data | salientpp.PartitionedGraph, fanouts: list[int], batch_size: int, **options
) -> dict[tuple[str, float], tuple]:
    analysis = analyze(
        source,
        Batches(**{"epochs": 1, "seed": 5, **options}, num_neighbors=fanouts, batch_size=batch_size),
        Ways(policies=sorted(POLICIES), replication_factors=ALPHAS),
    )
    return {(v.policy, v.replication_factor): v.remote_rows_per_rank for v in analysis.of(way="cache")}


def fetched(
    part: salientpp.PartitionedGraph, fanouts: list[int], batch_size: int
) -> Iterator[tuple[tuple[str, float], tuple]]:
    """Returns the rows that the ranks' plans leave of their batches, from the parts of a loader, without its processes."""
    own = [part.split("train", p) for p in range(part.num_parts)]
    sizes = [len(seeds) for seeds in own]
    batches = []
    for p, seeds in enumerate(own):
        schedule = Schedule(
            len(seeds), p, 0, 1, sizes, p, batch_size, True, False, "exact" if 0 in sizes else "wrap", 5
        )
        sampler = Sampler(part.graph, fanouts)
        batches.append(
            [sampler.sample(seeds[at], batch_key(5, 0, p, i)).node.unique() for i, at in enumerate(schedule.batches(0))]
        )
    scores = {
        name: [score(name, part.workload(p, seeds, fanouts, batch_size)) for p, seeds in enumerate(own)]
        for name in POLICIES
    }
    for policy, alpha in itertools.product(POLICIES, ALPHAS):
        rows = []
        for p in range(part.num_parts):
            begin, end = part.book.range_of(p)
            at_hand = torch.zeros(part.num_vertices, dtype=torch.bool)
            at_hand[begin:end] = True
            at_hand[plan_cache(scores[policy][p], part.book, p, alpha)] = True
            rows.append(float(sum(int((~at_hand[n_id]).sum()) for n_id in batches[p])))
        yield (policy, alpha), tuple(rows)


def seeds_of(kind: str, num_parts: int, further: bool) -> list[int]:
    """Returns one seed of the kind, or its further seeds."""
    *others, last = (seed for tied, seed in TIED[num_parts] if tied == kind)
    return sorted({*others, 0, 1} - {last}) if further else [last]


FURTHER = pytest.mark.parametrize("further", [False, *rare(True)])


@FURTHER
@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_analysis_counts_the_rows_that_the_ranks_plans_leave(tmp_path, kind, num_parts, further):
    for seed in seeds_of(kind, num_parts, further):
        part, fanouts, batch_size = write(tmp_path / f"d{seed}", kind, seed, num_parts)
        rows = counted(part, fanouts, batch_size)
        for case, expected in fetched(part, fanouts, batch_size):
            assert rows[case] == expected, (kind, num_parts, seed, *case)


@FURTHER
@pytest.mark.parametrize("kind", KINDS)
def test_the_analysis_in_memory_equals_the_analysis_of_the_written_directory(tmp_path, kind, further):
    for seed in seeds_of(kind, 2, further):
        part, fanouts, batch_size = write(tmp_path / f"d{seed}", kind, seed, 2)
        method = ("metis", "random")[seed // 2 % 2]
        alone = analyze(
            tied_data(kind, seed),
            Batches(num_neighbors=fanouts, batch_size=batch_size, epochs=1, seed=seed),
            Ways(policies=sorted(POLICIES), replication_factors=ALPHAS),
            parts=2,
            method=method,
        )
        rows = {(v.policy, v.replication_factor): v.remote_rows_per_rank for v in alone.of(way="cache")}
        assert rows == counted(part, fanouts, batch_size, seed=seed), (kind, seed)


def _run(rank: int, roots: list[tuple[str, list[int], int]], alphas: list[float]) -> list[dict]:
    rows = []
    for root, fanouts, batch_size in roots:
        part = salientpp.load(root)
        own = part.split("train", part.part_id)
        rows.append({})
        # The test of plans has all sizes. A run shows that its loaders make these plans.
        for policy, alpha in itertools.product(sorted(POLICIES), alphas):
            for seeds in (
                ("train", own.flip(0)) if policy == "vip" else ("train",)
            ):  # the same seeds given in another form are the same workload
                loader = NeighborLoader(
                    part,
                    fanouts,
                    seeds,
                    batch_size=batch_size,
                    shuffle=True,
                    seed=5,
                    replication_factor=alpha,
                    policy=policy,
                )
                for batch in loader:
                    assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
                key = policy, alpha
                if isinstance(seeds, str):
                    rows[-1][key] = loader.stats().rows_remote
                    plan = loader.cache.members.ids
                else:
                    assert torch.equal(loader.cache.members.ids, plan)
    return rows


#: Graphs of the short runs. Each has another kind.
SHORT = {2: [("cliques", 26), ("torus", 11)], 4: [("circulant", 17), ("permutations", 21)]}


@FURTHER
@pytest.mark.parametrize("num_parts", [2, 4])
def test_the_analysis_counts_the_rows_that_a_run_fetches(tmp_path, num_parts, further):
    cases = [case for case in TIED[num_parts] if (case in SHORT[num_parts]) != further]
    written = [write(tmp_path / f"{kind}{seed}", kind, seed, num_parts) for kind, seed in cases]
    ranks = distributed.run(
        _run,
        num_parts,
        [(str(part.root), *rest) for part, *rest in written],
        ALPHAS[1:4] if further else [0.16],
        seconds=600,
        group_seconds=300,
    )
    for case, (part, fanouts, batch_size), *rows in zip(cases, written, *ranks):
        expected = counted(part, fanouts, batch_size)
        for key in rows[0]:
            assert tuple(float(row[key]) for row in rows) == expected[key], (*case, *key)
