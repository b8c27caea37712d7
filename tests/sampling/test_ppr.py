"""Laws of personalised PageRank: scores are within their bound of the exact ones, and batches do not depend on who draws them."""

from __future__ import annotations

import itertools
from math import comb
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import reference
import torch
from graphs import identity_features, random_data, star
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.utils import to_undirected

import salientpp
from salientpp import Graph, LinkNeighborLoader, NeighborLoader, PPRSampler, ops
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.ppr import Top, degrees_held
from salientpp.testing.comparison import compare


def some_graph(seed: int, directed: bool = True) -> Graph:
    """A graph with repeated edges, self-loops and vertices without in-neighbours."""
    size = 20 + 7 * seed
    edge_index = torch.randint(size, (2, 3 * size), generator=torch.Generator().manual_seed(seed))
    if not directed:
        edge_index = to_undirected(edge_index, num_nodes=size)
    return Graph.from_edge_index(edge_index, size)


def push(graph: Graph, seeds: Tensor, alpha: float, epsilon: float, k: int, **more: Any) -> Top:
    return Top(*ops.ppr_push(graph.indptr, graph.indices, seeds, alpha, epsilon, k, **more)[:3])


# --- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alpha, epsilon, k", [(0.15, 1e-3, 6), (0.5, 1e-2, 3), (0.9, 1e-6, 100), (0.2, 10.0, 4)])
def test_scores_equal_the_reference_bit_for_bit(seed, alpha, epsilon, k):
    graph = some_graph(seed)
    seeds = torch.arange(graph.num_vertices)
    top = push(graph, seeds, alpha, epsilon, k)
    for v in seeds.tolist():
        want = reference.ppr_push(graph.indptr.tolist(), graph.indices.tolist(), v, alpha, epsilon, k)
        rest = k - len(want)
        assert top.number[v] == len(want)
        assert top.id[v].tolist() == [u for u, _ in want] + [-1] * rest
        assert top.score[v].tolist() == [score for _, score in want] + [0.0] * rest


@pytest.mark.parametrize("epsilon", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("directed", [False, True])
def test_scores_are_below_the_exact_ones_by_at_most_their_bound(epsilon, directed):
    graph, alpha = some_graph(2, directed), 0.2
    size = graph.num_vertices
    exact = reference.exact_ppr(graph.indptr.tolist(), graph.indices.tolist(), alpha)
    assert np.allclose(exact.sum(axis=1), 1.0)
    top = push(graph, torch.arange(size), alpha, epsilon, size)
    score = torch.zeros(size, size + 1, dtype=torch.float64)
    score.scatter_(1, torch.where(top.id < 0, size, top.id), top.score)
    error = exact - score[:, :size].numpy()
    degree = graph.in_degree().double().numpy()
    # A walk that is not settled is at u with probability at most epsilon d(u), and ends at v with probability exact[u, v].
    bound = epsilon * degree @ exact if directed else epsilon * degree
    assert (error > -1e-12).all()
    assert (error <= bound + 1e-12).all()
    assert error.max() > 0, "the bound is not trivial"


def test_with_a_tiny_epsilon_the_largest_scores_are_the_exact_ones():
    graph, k = some_graph(3), 5
    exact = reference.exact_ppr(graph.indptr.tolist(), graph.indices.tolist(), 0.15)
    top = push(graph, torch.arange(graph.num_vertices), 0.15, 1e-13, k)
    for v in range(graph.num_vertices):
        count = int(top.number[v])
        assert np.allclose(top.score[v, :count], np.sort(exact[v])[::-1][:count], atol=1e-10)
        assert np.allclose(top.score[v, :count], exact[v, top.id[v, :count]], atol=1e-10)


def test_a_pair_and_a_vertex_without_in_neighbours_are_solved_by_hand():
    # 0 and 1 are joined both ways; 2 has no in-neighbour.
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 3)
    alpha = 0.25
    top = push(graph, torch.tensor([0, 2]), alpha, 1e-15, 3)
    assert top.id.tolist() == [[0, 1, -1], [2, -1, -1]]
    assert top.score[0].tolist() == pytest.approx([1 / (2 - alpha), (1 - alpha) / (2 - alpha), 0.0])
    assert top.score[1].tolist() == [1.0, 0.0, 0.0]


def test_equal_scores_are_ordered_by_id():
    top = push(Graph.from_edge_index(to_undirected(star(6)), 7), torch.tensor([0]), 0.15, 1e-9, 4)
    assert top.id.tolist() == [[0, 1, 2, 3]]
    assert len(set(top.score[0, 1:].tolist())) == 1


def test_walks_go_from_a_vertex_to_its_in_neighbours():
    top = push(Graph.from_edge_index(torch.tensor([[0], [1]]), 2), torch.tensor([0, 1]), 0.5, 1e-9, 2)
    assert top.id.tolist() == [[0, -1], [0, 1]], (
        "walks from 1 reach 0 along the edge from 0 to 1, and walks from 0 stay"
    )


def test_threads_do_not_change_scores():
    graph = Graph.from_data(random_data(500, 4000, seed=3))
    seeds = torch.arange(500)
    alone = push(graph, seeds, 0.15, 1e-5, 20, parallel=False)
    together = push(graph, seeds, 0.15, 1e-5, 20)
    for one, other in zip(alone, together):
        assert torch.equal(one, other)


def test_seeds_do_not_influence_each_other():
    graph = Graph.from_data(random_data(500, 4000, seed=4))
    seeds = torch.tensor([3, 490, 3, 7, 100, 7])
    together = push(graph, seeds, 0.05, 1e-6, 50)
    for at in range(seeds.numel()):
        for column, alone in zip(together, push(graph, seeds[at : at + 1], 0.05, 1e-6, 50)):
            assert torch.equal(column[at : at + 1], alone)


def test_missing_lists_are_named_and_with_them_scores_equal_the_whole_graphs():
    graph = some_graph(3)
    degree, seeds = graph.in_degree(), torch.arange(graph.num_vertices)
    want = push(graph, seeds, 0.2, 1e-4, 8)
    ids = torch.tensor([], dtype=torch.int64)
    for _ in range(100):
        lists = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in ids.tolist()]
        indptr = torch.tensor([0, *itertools.accumulate(map(len, lists))])
        sources = torch.cat([graph.indices[:0], *lists])
        *found, missing = ops.ppr_push(indptr, sources, seeds, 0.2, 1e-4, 8, ids, degree)
        is_there = found[2] >= 0
        for column, expected in zip(found, want):
            assert torch.equal(column[is_there], expected[is_there])
        assert bool(missing.numel()) == (not is_there.all())
        assert not torch.isin(missing, ids).any() and (degree[missing] > 0).all()
        if not missing.numel():
            break
        ids = torch.cat([ids, missing[:3]]).sort().values
    assert is_there.all()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"seeds": torch.tensor([3])}, "seeds[0] must be in [0, 3), got 3"),
        ({"alpha": 0.0}, "alpha must be in (0, 1), got 0"),
        ({"alpha": float("nan")}, "alpha must be in (0, 1), got nan"),
        ({"epsilon": 0.0}, "epsilon must be > 0, got 0"),
        ({"k": 0}, "k must be >= 1, got 0"),
        ({"indices": torch.tensor([1, 9, 0])}, "indices must be in [0, 3); one is not"),
        ({"indptr": torch.tensor([0, 2, 9, 3])}, "indptr must hold the bounds of lists in indices"),
        ({"ids": torch.tensor([0])}, "ids and degree must be given both or not at all"),
        ({"ids": torch.tensor([0]), "degree": torch.tensor([2, 1, 0])}, "ids must have one entry per list, expected 3, got 1"),
    ],
)  # fmt: skip
def test_the_operator_refuses_bad_arguments(change, text):
    given = {"indptr": torch.tensor([0, 2, 3, 3]), "indices": torch.tensor([1, 2, 0]), "seeds": torch.tensor([0])}
    with pytest.raises(RuntimeError) as caught:
        ops.ppr_push(**{**given, "alpha": 0.2, "epsilon": 1e-3, "k": 2, **change})
    assert text in str(caught.value)


# --- the sampler ------------------------------------------------------------------------------------------


def edges_inside(data: Data, ids: Tensor) -> list[tuple[int, int, int]]:
    """All edges between vertices, as (source, target, number)."""
    source, target = data.edge_index
    inside = (torch.isin(source, ids) & torch.isin(target, ids)).nonzero().flatten()
    return sorted(zip(source[inside].tolist(), target[inside].tolist(), inside.tolist()))


def edges_of(batch: Data, keep: Tensor | None = None) -> list[tuple[int, int, int]]:
    keep = torch.ones(batch.e_id.numel(), dtype=torch.bool) if keep is None else keep
    source, target = batch.n_id[batch.edge_index[:, keep]]
    return sorted(zip(source.tolist(), target.tolist(), batch.e_id[keep].tolist()))


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_batch_has_the_sequences_and_the_induced_subgraph(disjoint):
    data = random_data(300, 1500, seed=1, directed=True)
    sampler = PPRSampler(data, k=7, epsilon=1e-3, disjoint=disjoint)
    loader = NeighborLoader(data, [], torch.arange(90), batch_size=16, neighbor_sampler=sampler, shuffle=True)
    assert loader.node_sampler is sampler
    for batch in loader:
        top = sampler.top(batch.n_id[: batch.batch_size])
        there = batch.ppr_index >= 0
        assert batch.ppr_index.dtype == torch.int64 and batch.ppr_score.dtype == torch.float32
        assert torch.equal(torch.where(there, batch.n_id[batch.ppr_index], -1), top.id)
        assert torch.equal(batch.ppr_score, top.score.to(torch.float32))
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        if not disjoint:
            assert torch.equal(batch.n_id.unique(), torch.cat([batch.input_id, top.id[there]]).unique())
            assert edges_of(batch) == edges_inside(data, batch.n_id)
            continue
        assert (batch.batch[batch.ppr_index][there] == torch.arange(len(top.id))[:, None].expand_as(there)[there]).all()
        tree = batch.batch[batch.edge_index[1]]
        for number in range(batch.batch_size):
            ids = batch.n_id[batch.batch == number]
            assert torch.equal(
                ids.unique(), torch.cat([batch.input_id[number : number + 1], top.id[number][there[number]]]).unique()
            )
            assert edges_of(batch, tree == number) == edges_inside(data, ids)


def test_the_sampler_serves_pygs_loader_and_seeds_that_are_edges():
    data = random_data(300, 1500, seed=2)
    sampler = PPRSampler(data, k=5)
    for batch in NodeLoader(data, sampler, torch.arange(20), batch_size=10):
        assert edges_of(batch) == edges_inside(data, batch.n_id)
    loader = LinkNeighborLoader(
        data, [], data.edge_index[:, :40], neg_sampling="binary", batch_size=8, neighbor_sampler=sampler, seed=0
    )
    for batch in loader:
        ends = batch.n_id[batch.edge_label_index].flatten().unique()
        assert torch.equal(batch.n_id[: ends.numel()].sort().values, ends)
        there = batch.ppr_index >= 0
        want = sampler.top(batch.n_id[: ends.numel()])
        assert torch.equal(batch.n_id[batch.ppr_index[there]], want.id[there])


def test_a_repeated_seed_and_no_seed_have_rows():
    data = random_data(100, 600, seed=2)
    loader = NeighborLoader(data, [], torch.tensor([5, 7, 5]), batch_size=3, neighbor_sampler=PPRSampler(data, k=4))
    (batch,) = loader
    assert torch.equal(batch.ppr_index[0], batch.ppr_index[2]) and batch.n_id[:3].tolist() == [5, 7, 5]
    assert list(NeighborLoader(data, [], torch.tensor([]).long(), neighbor_sampler=PPRSampler(data, k=4))) == []


def test_workers_links_and_states_do_not_change_batches():
    data = random_data(300, 1500, seed=1)

    def loader(graph: Any = data, **options: Any) -> NeighborLoader:
        given = {"batch_size": 16, "shuffle": True, "seed": 1, "neighbor_sampler": PPRSampler(graph, k=6)}
        return NeighborLoader(data, [], torch.arange(100), **{**given, **options})

    want = list(loader())
    assert compare(loader(num_workers=3), want) == []
    assert compare(loader(Graph.from_edge_index(data.edge_index, 300, linked=True)), want) == []
    first = loader()
    for _ in itertools.islice(iter(first), 3):
        pass
    second = loader()
    second.load_state_dict(first.state_dict())
    assert compare(second, want[3:]) == []
    other = loader(neighbor_sampler=PPRSampler(data, k=6, alpha=0.3))
    with pytest.raises(ValueError, match="ppr"):
        other.load_state_dict(first.state_dict())


def test_the_transform_of_samples_keeps_the_sequences():
    data = random_data(300, 1500, seed=1)

    def copied(mfg: Any) -> Any:
        return type(mfg)(mfg.node, mfg.row, mfg.col, mfg.edge, mfg.batch)

    options = {"batch_size": 16, "neighbor_sampler": PPRSampler(data, k=6)}
    want = NeighborLoader(data, [], torch.arange(100), **options)
    assert compare(NeighborLoader(data, [], torch.arange(100), transform_sampler_output=copied, **options), want) == []


def test_the_probability_of_a_vertex_is_its_share_of_all_possible_batches():
    data = random_data(60, 300, seed=6)
    sampler = PPRSampler(data, k=4, epsilon=1e-2)
    seeds, batch_size = torch.tensor([3, 9, 11, 20, 21, 40, 59]), 3
    held = [set(ids[ids >= 0].tolist()) | {seed} for seed, ids in zip(seeds.tolist(), sampler.top(seeds).id)]
    count = torch.zeros(60, dtype=torch.float64)
    for chosen in itertools.combinations(held, batch_size):
        for v in set().union(*chosen):
            count[v] += 1
    want = count / comb(len(held), batch_size)
    assert torch.allclose(sampler.inclusion(seeds, batch_size).double(), want, atol=1e-6)
    assert torch.equal(sampler.inclusion(seeds, 100) > 0, want > 0)
    assert set(sampler.inclusion(seeds, 100).tolist()) == {0.0, 1.0}
    assert not sampler.inclusion(seeds[:0], 3).any()


@pytest.mark.parametrize(
    "given, text",
    [
        ({"k": 0}, "k must be an integer >= 1 (vertices per seed), got 0"),
        ({"k": 2.5}, "k must be an integer >= 1 (vertices per seed), got 2.5"),
        ({"alpha": 0}, "alpha must be in (0, 1) (probability that a walk ends at a vertex), got 0"),
        ({"alpha": 1.0}, "alpha must be in (0, 1) (probability that a walk ends at a vertex), got 1.0"),
        ({"alpha": "x"}, "alpha must be in (0, 1) (probability that a walk ends at a vertex), got 'x'"),
        ({"epsilon": 0.0}, "epsilon must be > 0 (residual per in-neighbour that is not pushed), got 0.0"),
        ({"epsilon": -1}, "epsilon must be > 0 (residual per in-neighbour that is not pushed), got -1"),
    ],
)
def test_wrong_arguments_are_refused(given, text):
    with pytest.raises(ValueError) as caught:
        PPRSampler(random_data(30, 60), **{"k": 3, **given})
    assert str(caught.value) == text


def test_data_with_several_types_is_refused():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(3, 1), torch.rand(2, 1)
    data["a", "to", "b"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="a PPRSampler needs a graph with one vertex type, got 2"):
        PPRSampler(data, 3)


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"pad": "fixed"},
            "pad='fixed' excludes a salientpp.PPRSampler: sizes of batches are computed from neighbours per hop",
        ),
        (
            {"policy": "degree"},
            "policy='degree' excludes a salientpp.PPRSampler: it knows the exact probability of each vertex; leave it out",
        ),
        (
            {"shared_draws": {"block": 2}},
            "shared_draws['block']=2 excludes a salientpp.PPRSampler: it draws no random numbers",
        ),
    ],
)
def test_options_that_plan_by_hops_are_refused(options, text, tmp_path):
    data: Any = random_data(100, 600)
    if "policy" in options:  # which a Data has no use for
        data = salientpp.partition(data, 1, tmp_path / "d", [2], 4, method="random")
    with pytest.raises(ValueError) as caught:
        NeighborLoader(data, [], neighbor_sampler=PPRSampler(data, 3), **options)
    assert text in str(caught.value)


# --- ranks ------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "trees": {"disjoint": True, "num_workers": 1},
    "cache": {"replication_factor": 0.3},
    "lookahead": {"replication_factor": 0.2, "lookahead": "auto", "depth": 3},
    "rows on the device": {"device_rows": 0.4, "num_workers": 2},
    "other seeds": {"input_nodes": "val", "shuffle": False, "depth": 1},
    "narrow": {"send_as": {"x": "int8"}},
    "logical ranks": {"logical_ranks": 4},
}


def ranked_data() -> Data:
    data = random_data(240, 1300, seed=3, directed=True, edge_attributes=True)
    data.x = identity_features(240, 8)
    return data


def make(root: Path, form: str, options: dict[str, Any]) -> NeighborLoader:
    part = salientpp.load(root / form)
    given = {"input_nodes": "train", "batch_size": 8, "shuffle": True, "seed": 5, **options}
    sampler = PPRSampler(part, k=6, epsilon=1e-3, disjoint=given.pop("disjoint", False))
    return NeighborLoader(part, [], neighbor_sampler=sampler, **given)


def both_forms(rank: int, root: Path, names: list[str]) -> dict[str, Any]:
    """Compares two epochs of a loader over lists in parts with one over whole lists, and their sequences with the sampler's."""
    found: dict[str, Any] = {}
    for name in names:
        ours, want = make(root, "parts", CASES[name]), make(root, "whole", CASES[name])
        batches = [list(ours), list(ours)]
        found[name] = [line for batch in batches for line in compare(batch, want)]
        if ours.stats().rows_remote != want.stats().rows_remote:
            found[name].append("rows_remote")
        whole = PPRSampler(salientpp.load(root / "whole").graph, k=6, epsilon=1e-3)
        for batch in itertools.chain(*batches):
            top = whole.top(batch.n_id[: batch.batch_size]).id
            if not torch.equal(torch.where(batch.ppr_index < 0, -1, batch.n_id[batch.ppr_index]), top):
                found[name].append("sequences")
    return found


@pytest.mark.parametrize("num_parts, world", [(2, 1), (2, 2), (4, 3), *rare((4, 4), (2, 4), (4, 2))])
def test_batches_over_parts_equal_those_over_whole_lists(tmp_path, num_parts, world):
    for form in ("whole", "parts"):
        salientpp.partition(ranked_data(), num_parts, tmp_path / form, [4, 3], 8, topology=form, refine=False)
    names = list(CASES) if num_parts == world == 2 else ["plain", "trees", "cache"]
    found = distributed.run(both_forms, world, tmp_path, names)
    assert found == [dict.fromkeys(names, [])] * world


def fetched(rank: int, root: Path) -> list[int]:
    rows = []
    for options in ({}, {"replication_factor": 0.05}, {"replication_factor": 100.0}):
        loader = make(root, "parts", {**options, "shuffle": False})
        for _ in loader:
            pass
        rows.append(loader.stats().rows_remote)
    return rows


def test_a_cache_saves_rows_and_a_large_one_all(tmp_path):
    salientpp.partition(ranked_data(), 2, tmp_path / "parts", [4, 3], 8, topology="parts", refine=False)
    for none, some, all_ in distributed.run(fetched, 2, tmp_path):
        assert none > some > all_ == 0


def of_one_part(rank: int, root: Path) -> list[int]:
    found = []
    for form in ("whole", "parts"):
        loader = make(root, form, {"shuffle": False, "replication_factor": 0.1})
        found.append(len(list(loader)))
    return found


def test_a_rank_may_have_no_seeds(tmp_path):
    data = ranked_data()
    parts = torch.arange(240) % 2
    for form in ("whole", "parts"):
        salientpp.partition(
            data, 2, tmp_path / form, [4, 3], 8, method=parts, split={"train": torch.arange(0, 80, 2)}, topology=form
        )
    assert distributed.run(of_one_part, 2, tmp_path) == [[5, 5], [0, 0]]


def refused(rank: int, root: Path) -> list[str]:
    part, texts = salientpp.load(root / "parts"), []
    tries: list[Any] = [
        lambda: NeighborLoader(part, [], "train", seed=0, neighbor_sampler=PPRSampler(part, 3 + rank)),
        lambda: NeighborLoader(part, [], "train", seed=0, neighbor_sampler=PPRSampler(part, 3) if rank else None),
        lambda: NeighborLoader(part, [], "train", seed=0, neighbor_sampler=PPRSampler(part, 3), pad="bucket"),
        lambda: LinkNeighborLoader(part, [], seed=0, neighbor_sampler=PPRSampler(part, 3)),
        lambda: PPRSampler(part, 3).top(torch.tensor([0])),
    ]
    for attempt in tries:
        try:
            attempt()
            texts.append("")
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    return texts


def test_ranks_that_differ_and_seeds_that_are_edges_are_refused_on_every_rank(tmp_path):
    salientpp.partition(ranked_data(), 2, tmp_path / "parts", [4, 3], 8, topology="parts", refine=False)
    for texts in distributed.run(refused, 2, tmp_path):
        assert "all ranks must have the same ppr, got [3, 0.15, 0.0001]" in texts[0]
        assert "all ranks must have the same" in texts[1]
        assert "pad='bucket' excludes a salientpp.PPRSampler" in texts[2]
        assert "so they must be vertices, got edges" in texts[3]
        assert "was not found when the loader was made" in texts[4]


def test_a_host_that_holds_all_parts_finds_scores_alone(tmp_path):
    salientpp.partition(ranked_data(), 2, tmp_path / "parts", [4, 3], 8, topology="parts", refine=False)
    part = salientpp.load(tmp_path / "parts").joined([0, 2], 0)
    graph = PPRSampler(part.graph, 5)
    held = PPRSampler(part.graph, 5)
    held.topology = PartTopology(part.part_graph(), part.books, 0)
    assert torch.equal(degrees_held(held.topology), part.graph.in_degree())
    seeds = torch.arange(0, 240, 3)
    for one, other in zip(held.top(seeds), graph.top(seeds)):
        assert torch.equal(one, other)
