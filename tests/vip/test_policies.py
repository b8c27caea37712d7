"""Laws of `salientpp.vip.policies`: a plan takes the best remote vertices, as many as α allows, and policies rank vertices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
from pathlib import Path

import distributed
import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from graphs import random_data

import salientpp
from salientpp import Graph, NeighborLoader
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.policies import POLICIES, Workload, cache_capacity, densest, plan_cache, score

BOOK = PartitionBook(torch.tensor([0, 3, 6, 10]))


def book_of(*offsets: int) -> PartitionBook:
    return PartitionBook(torch.tensor(offsets))


def workload(seed: int = 0, part_id: int = 1, num_neighbors=(4, 3), directed: bool = True) -> Workload:
    data = random_data(120, 500, seed=seed, directed=directed)
    book = book_of(0, 40, 80, 120)
    begin, end = book.range_of(part_id)
    seeds = torch.arange(begin, end)[data.train_mask[begin:end]]
    return Workload(Graph.from_edge_index(data.edge_index, 120), book, part_id, seeds, list(num_neighbors), 5)


# --- the plan ---------------------------------------------------------------------------------------------


def test_the_highest_remote_scores_are_cached():
    #                      part 0       | part 1 (ours) | part 2
    scores = torch.tensor([0.1, 0.5, 0.2, 9.0, 9.0, 9.0, 0.3, 0.0, 0.6, 0.4])
    assert plan_cache(scores, BOOK, 1, 0.9).tolist() == [1, 8, 9]  # floor(0.9 * 10 / 3) = 3 rows
    assert plan_cache(scores, BOOK, 1, 0.89).tolist() == [1, 8]  # floor(2.97) = 2


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_equals_the_slow_reference(seed):
    generator = np.random.default_rng(seed)
    num_vertices, num_parts = int(generator.integers(1, 200)), int(generator.integers(1, 6))
    cuts = np.sort(generator.integers(0, num_vertices + 1, size=num_parts - 1))
    book = book_of(0, *cuts.tolist(), num_vertices)
    # Few different values, so that ties and zeros occur.
    scores = torch.from_numpy(generator.integers(0, 5, size=num_vertices) / 4).float()
    for part_id in range(num_parts):
        for alpha in (0.0, 0.1, 0.5, 1.0, 2.5, 100.0):
            want = reference.plan_cache(
                scores.tolist(), *book.range_of(part_id), math.floor(alpha * num_vertices / num_parts)
            )
            plan = plan_cache(scores, book, part_id, alpha)
            assert plan.dtype == torch.int64
            assert plan.tolist() == want


def test_ties_go_to_the_lower_id():
    assert plan_cache(torch.ones(10), BOOK, 1, 0.9).tolist() == [0, 1, 2]
    assert plan_cache(torch.ones(10), BOOK, 0, 0.9).tolist() == [3, 4, 5]
    scores = torch.tensor([1.0, 2, 1, 0, 0, 0, 1, 2, 1, 1])
    assert plan_cache(scores, BOOK, 1, 1.2).tolist() == [0, 1, 2, 7]


def test_own_vertices_are_never_cached():
    scores = torch.arange(10, 0, -1).float()
    for part_id in range(3):
        begin, end = BOOK.range_of(part_id)
        assert plan_cache(scores, BOOK, part_id, 100).tolist() == [v for v in range(10) if not begin <= v < end]


def test_vertices_with_score_zero_are_never_cached():
    scores = torch.zeros(10)
    assert plan_cache(scores, BOOK, 0, 100).tolist() == []
    scores[7] = 1e-30
    assert plan_cache(scores, BOOK, 0, 100).tolist() == [7]


def test_a_larger_cache_holds_the_smaller_one():
    scores = torch.rand(1000, generator=torch.Generator().manual_seed(3))
    book = book_of(0, 300, 700, 1000)
    plans = [set(plan_cache(scores, book, 1, alpha).tolist()) for alpha in (0.0, 0.01, 0.1, 0.3, 1, 3)]
    assert [len(plan) for plan in plans] == [0, 3, 33, 100, 333, 600]
    assert all(small <= large for small, large in itertools.pairwise(plans))


def test_a_single_part_caches_nothing():
    assert plan_cache(torch.ones(10), PartitionBook.trivial(10), 0, 1.0).tolist() == []


def test_planning_does_not_change_the_scores():
    scores = torch.ones(10)
    plan_cache(scores, BOOK, 1, 1.0)
    assert scores.tolist() == [1] * 10


@pytest.mark.parametrize(
    "alpha, num_vertices, num_parts, rows",
    [
        (0, 100, 4, 0),
        (0.16, 100, 4, 4),
        (0.16, 99, 4, 3),
        (1, 100, 4, 25),
        (1, 100, 3, 33),
        (2.5, 10, 1, 25),
        (0.5, 0, 2, 0),
    ],
)
def test_the_capacity_is_alpha_n_over_k_rounded_down(alpha, num_vertices, num_parts, rows):
    assert cache_capacity(alpha, book_of(*[0] * num_parts, num_vertices)) == rows


def test_the_capacity_is_exact_if_alpha_n_over_k_is_whole():
    assert cache_capacity(0.29, book_of(0, 100)) == 29


@pytest.mark.parametrize("alpha", [-0.1, -1, math.nan, math.inf, -math.inf, "x", None, [0.1]], ids=repr)
def test_a_bad_replication_factor_is_refused(alpha):
    text = f"replication_factor must be >= 0 (cached rows of a part, divided by the mean number of rows of a part), got {alpha!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_cache(torch.ones(10), BOOK, 0, alpha)
    with pytest.raises(ValueError, match="replication_factor must be >= 0"):
        cache_capacity(alpha, BOOK)


def test_scores_must_cover_the_graph():
    with pytest.raises(ValueError, match=r"scores must have shape \[10\], got \[9\]"):
        plan_cache(torch.ones(9), BOOK, 0, 0.5)


def test_the_part_must_exist():
    with pytest.raises(ValueError, match=r"part_id must be in \[0, 3\), got 3"):
        plan_cache(torch.ones(10), BOOK, 3, 0.5)


# --- policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_is_a_pure_function_that_scores_every_vertex(policy):
    work = workload()
    before = [work.graph.indptr.clone(), work.graph.indices.clone(), work.seeds.clone()]
    scores = score(policy, work)
    assert scores.shape == (120,) and scores.is_floating_point()
    assert scores.isfinite().all() and (scores >= 0).all() and (scores > 0).any()
    assert torch.equal(scores, score(policy, work))
    assert all(torch.equal(a, b) for a, b in zip(before, [work.graph.indptr, work.graph.indices, work.seeds]))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_part_without_seeds_can_be_scored(policy):
    work = workload()
    empty = Workload(work.graph, work.book, 1, work.seeds[:0], work.num_neighbors, work.batch_size)
    scores = score(policy, empty)
    assert scores.shape == (120,) and scores.isfinite().all() and (scores >= 0).all()
    plan_cache(scores, work.book, 1, 0.5)


def test_vip_policies_are_inclusion_probabilities_of_either_model_of_a_hop():
    work = workload()
    for policy, expand in (("vip", "frontier"), ("vip-hop", "hop")):
        want = inclusion_probability(work.graph, work.seeds, [4, 3], 5, expand=expand)
        assert torch.equal(score(policy, work), want)
    with_replacement = Workload(work.graph, work.book, 1, work.seeds, [4, 3], 5, replace=True)
    assert torch.equal(
        score("vip", with_replacement), inclusion_probability(work.graph, work.seeds, [4, 3], 5, replace=True)
    )


def vertices_within(graph: Graph, seeds: torch.Tensor, hops: int) -> set[int]:
    """Returns the vertices reached by 1 to ``hops`` steps against the edges."""
    indptr, indices = graph.indptr.tolist(), graph.indices.tolist()
    reached, front = set(), set(seeds.tolist())
    for _ in range(hops):
        front = {u for v in front for u in indices[indptr[v] : indptr[v + 1]]}
        reached |= front
    return reached


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_degree_is_zero_outside_l_hops_and_the_number_of_readers_inside(hops, directed):
    work = workload(seed=4, num_neighbors=[2] * hops, directed=directed)
    few = Workload(work.graph, work.book, 1, work.seeds[:2], work.num_neighbors, 5)
    scores = score("degree", few)
    readers = np.bincount(work.graph.indices, minlength=120)
    within = vertices_within(few.graph, few.seeds, hops)
    assert 0 < len(within) < 120, "the test needs vertices on both sides"
    remote = [v for v in range(120) if not 40 <= v < 80]
    assert [scores[v].item() for v in remote] == [float(readers[v]) if v in within else 0.0 for v in remote]


def test_random_is_an_order_of_all_vertices_that_differs_by_part():
    orders = [score("random", workload(part_id=part_id)) for part_id in range(3)]
    for scores in orders:
        assert sorted(scores.tolist()) == list(range(1, 121))
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])


def test_an_unknown_policy_is_refused_with_the_names_of_all_policies():
    with pytest.raises(ValueError, match=rf"policy must be one of {', '.join(sorted(POLICIES))}, got 'lru'"):
        score("lru", workload())


# --- stored caches and the data they hold -------------------------------------------------------------------


def _dataset(
    root: Path, num_parts: int, shift: float = 0.0, seed: int = 0, assigned: torch.Tensor | None = None
) -> str:
    data = random_data(200, 900, seed=seed)
    data.x = data.x + shift
    data.z = data.x[:, 0].long()
    assigned = torch.arange(200) % num_parts if assigned is None else assigned
    salientpp.partition(data, num_parts, root, [4, 2], 16, method=assigned, overwrite=True)
    return str(root)


def _with_caches_of_others(rank: int, roots: dict[str, str]) -> dict[str, str]:
    """Records a loader's message about each stored cache, and checks every row where it has none."""

    def make(root: str, **options):
        graph = salientpp.load(root)
        return NeighborLoader(graph, [4, 2], "train", batch_size=16, seed=3, uneven="exact", **options)

    said = {}
    caches = {name: make(root, replication_factor=0.5).cache for name, root in roots.items()}
    caches["no rows"] = make(roots["own"]).cache
    caches["of Data"] = NeighborLoader(random_data(200, 900), [4, 2], batch_size=16).cache
    caches["x and z"] = make(roots["own"], replication_factor=0.5, columns=("z", "x")).cache
    caches["z"] = make(roots["own"], replication_factor=0.5, columns="z").cache
    other_part = dataclasses.replace(caches["own"], owner=(caches["own"].owner[0], 1 - rank))
    for name, cache in {
        **caches,
        "other part": other_part,
        "nobody's": dataclasses.replace(caches["own"], owner=None),
    }.items():
        try:
            loader = make(roots["own"], cache=cache)
        except ValueError as error:
            said[name] = str(error)
            continue
        part = loader.data
        for batch in loader:
            assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id)), name
        said[name] = "" if loader.stats().rows_cache or not len(cache) else "unused"
    # In place: the stored cache no longer belongs to this directory.
    dist.barrier()
    if rank == 0:
        _dataset(Path(roots["own"]), 2, assigned=(torch.arange(200) < 100).long())
    dist.barrier()
    with pytest.raises(ValueError, match="cache must hold rows of this loader's dataset"):
        make(roots["own"], cache=caches["own"])
    if rank == 0:
        _dataset(Path(roots["own"]), 2)
    dist.barrier()
    make(roots["own"], cache=caches["own"])
    data = random_data(200, 900)
    with pytest.raises(ValueError, match="cache must hold rows of this loader's dataset"):
        NeighborLoader(data, [4, 2], batch_size=16, cache=caches["own"])
    return said


def test_a_stored_cache_serves_only_its_own_contents_and_part(tmp_path):
    roots = {
        "own": _dataset(tmp_path / "own", 2),
        "other rows": _dataset(tmp_path / "rows", 2, shift=1000.0),
        "other edges": _dataset(tmp_path / "edges", 2, seed=1),
        "other parts": _dataset(tmp_path / "parts", 2, assigned=(torch.arange(200) > 90).long()),
    }
    shutil.copytree(roots["own"], tmp_path / "copy")
    roots["copy"] = str(tmp_path / "copy")
    for said in distributed.run(_with_caches_of_others, 2, roots, seconds=240):
        for name in ("other rows", "other edges", "other parts", "nobody's"):
            assert "cache must hold rows of this loader's dataset" in said[name], name
        assert (
            "was chosen for part" in said["other part"]
            and "take the cache of a loader on that part" in said["other part"]
        )
        assert (
            "has no rows of 'x', which this loader's batches get; make the cache by a loader with columns=('x',)"
            in said["z"]
        )
        assert [said[name] for name in ("own", "copy", "x and z", "no rows", "of Data")] == [""] * 5


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_workload_without_hops_caches_nothing(policy):
    assert score(policy, workload(num_neighbors=())).tolist() == [0.0] * 120


def _without_hops(rank: int, root: str) -> list[tuple[int, int]]:
    part, rows = salientpp.load(root), []
    for options in (
        {"replication_factor": 0.5},
        {"replication_factor": 0.5, "policy": "degree"},
        {"device_rows": 0.5},
    ):
        loader = NeighborLoader(part, [], "train", batch_size=16, uneven="exact", **options)
        for batch in loader:
            assert batch.num_nodes == batch.batch_size and torch.equal(
                batch.x[:, 0].long(), part.original_id(batch.n_id)
            )
        rows.append((len(loader.cache), loader.stats().rows_remote))
    return rows


def test_batches_of_seeds_alone_need_no_cache_and_no_remote_rows(tmp_path):
    assert distributed.run(_without_hops, 2, _dataset(tmp_path / "d", 2)) == [[(0, 0)] * 3] * 2


@pytest.mark.filterwarnings("ignore:data has neither")
@pytest.mark.parametrize(
    "options", [{}, {"disjoint": True}, {"subgraph_type": "induced"}, {"shuffle": True}, {"edges": False}], ids=str
)
@pytest.mark.parametrize("device_rows", [0.1, 0.5, 1.0])
def test_without_hops_the_seeds_are_the_rows_to_keep_on_the_device(options, device_rows):
    data = random_data(200, 900)
    if not options.pop("edges", True):
        del data.edge_index
    seeds = torch.arange(50, 150)
    loader = NeighborLoader(data, [], seeds, batch_size=16, device_rows=device_rows, **options)
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
    assert loader.stats().rows_device == min(len(seeds), int(200 * device_rows))


def test_a_row_that_does_not_fit_leaves_its_bytes_to_narrower_rows():
    widths = {"a": 950, "b": 30, "c": 100}
    scores = {
        "a": torch.tensor([5000.0], dtype=torch.float64),
        "b": torch.tensor([20.0, -1.0, 10.0], dtype=torch.float64),
        "c": torch.tensor([1000.0, 2.0], dtype=torch.float64),
    }
    chosen = {type_: ids.tolist() for type_, ids in densest(scores, widths, 1000).items()}
    assert chosen == {"a": [], "b": [0, 2], "c": [0, 1]}  # the wide row does not fit beside the densest one
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        widths = dict(zip("abcd", torch.randint(1, 300, (4,), generator=generator).tolist()))
        scores = {type_: torch.rand(12, dtype=torch.float64, generator=generator) for type_ in widths}
        chosen = {type_: ids.numel() for type_, ids in densest(scores, widths, 2000).items()}
        left = 2000 - sum(widths[type_] * number for type_, number in chosen.items())
        assert left >= 0
        assert all(left < widths[type_] for type_, number in chosen.items() if number < 12), "no other row fits"
