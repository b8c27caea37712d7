"""Laws of neighbour sampling: PyG's hops, exactly uniform draws, and draws that depend only on (batch key, hop, vertex)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import reference
import torch
from draws import BOTH_MAPS, HASH_MAP, STAMP_MAP, as_lists, many_stars, random_graph, random_seeds, same, subsets
from graphs import star
from reference import FALSE_ALARM
from samplers import Sampler

from salientpp import Graph, ops
from salientpp.ops import join_key
from salientpp.sampling.schedule import batch_key, order_key

CSRC = Path(__file__).parents[2] / "csrc"


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draw(graph, seeds, fanouts, key, replace=False, budget=STAMP_MAP):
    return ops.sample_neighbors(graph.indptr, graph.indices, graph.edge_id, seeds, fanouts, key, replace, budget)


# --- PyG's hops -------------------------------------------------------------------------------------------


def assert_obeys_the_hops(edge_index, graph, seeds, fanouts, output, replace):
    n_id, local_edges, e_id, num_nodes, num_edges = as_lists(output)
    row, col = local_edges
    degree = graph.in_degree().tolist()

    # Seeds come first. Every other vertex occurs once, and none of them is a seed.
    assert n_id[: len(seeds)] == seeds.tolist()
    found = n_id[len(seeds) :]
    assert len(set(found)) == len(found) and not set(found) & set(seeds.tolist())

    # Counts per hop.
    assert len(num_nodes) == len(fanouts) + 1 and len(num_edges) == len(fanouts)
    assert num_nodes[0] == len(seeds) and sum(num_nodes) == len(n_id)
    assert sum(num_edges) == len(row) == len(col) == len(e_id)

    # Each local edge is the user's edge with that number.
    assert [n_id[r] for r in row] == edge_index[0, e_id].tolist()
    assert [n_id[c] for c in col] == edge_index[1, e_id].tolist()

    # Edges refer to the first place of a repeated seed.
    first_place = {}
    for i, v in enumerate(n_id):
        first_place.setdefault(v, i)
    assert all(first_place[n_id[r]] == r for r in row)

    begin, edge_begin = 0, 0
    end = len(seeds)
    for hop, fanout in enumerate(fanouts):
        edges = range(edge_begin, edge_begin + num_edges[hop])
        # Hop h expands exactly the vertices first found at h - 1, all of them, in order.
        assert [col[e] for e in edges] == sorted(col[e] for e in edges)
        drawn = {i: [] for i in range(begin, end)}
        for e in edges:
            drawn[col[e]].append(e_id[e])
        for i, ids in drawn.items():
            d = degree[n_id[i]]
            if fanout == -1:
                assert len(set(ids)) == len(ids) == d
            elif replace:
                assert len(ids) == (fanout if d else 0)
            else:
                assert len(set(ids)) == len(ids) == min(fanout, d)
        # Vertices that were not known before are new at this hop, in order of discovery.
        known = set(n_id[:end])
        new = [v for v in dict.fromkeys(n_id[row[e]] for e in edges) if v not in known]
        begin, end, edge_begin = end, end + num_nodes[hop + 1], edges.stop
        assert n_id[begin:end] == new


FANOUTS = [[3], [5, 3, 2], [-1], [2, -1, 1], [1, 1, 1, 1], [100, 60]]


@BOTH_MAPS
@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
@pytest.mark.parametrize("seed", range(12))
def test_a_sample_obeys_the_hops(seed, replace, budget):
    edge_index, graph = random_graph(seed)
    for fanouts in FANOUTS:
        for repeats in (False, True):
            seeds = random_seeds(seed + 100, graph.num_vertices, repeats)
            output = draw(graph, seeds, fanouts, key=seed, replace=replace, budget=budget)
            assert_obeys_the_hops(edge_index, graph, seeds, fanouts, output, replace)


@BOTH_MAPS
@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
@pytest.mark.parametrize("seed", range(12))
def test_a_sample_equals_the_slow_reference(seed, replace, budget):
    _, graph = random_graph(seed)
    key = join_key(seed)
    for fanouts in FANOUTS:
        for graph_again in (graph, Graph(graph.indptr, graph.indices.long())):
            seeds = random_seeds(seed + 200, graph.num_vertices, repeats=True)
            output = draw(graph_again, seeds, fanouts, key, replace, budget)
            edge_id = None if graph_again.edge_id is None else graph_again.edge_id.tolist()
            want = reference.sample_neighbors(
                graph.indptr.tolist(), graph.indices.tolist(), edge_id, seeds.tolist(), fanouts, key, replace
            )
            assert as_lists(output) == list(want)
            assert all(tensor.dtype == torch.int64 for tensor in output)


@BOTH_MAPS
@pytest.mark.parametrize("num_vertices", [3000, 60_000])
def test_a_batch_of_many_blocks_equals_the_slow_reference(num_vertices, budget):
    # The kernel takes 64 vertices of the frontier at a time; this frontier has hundreds, with hubs among them. Small graphs are not prefetched.
    _, graph = random_graph(5, num_vertices=num_vertices, num_edges=20000)
    with_neighbours = graph.in_degree().nonzero().flatten().numpy()
    seeds = torch.from_numpy(np.random.default_rng(6).permutation(with_neighbours)[:500])
    output = draw(graph, seeds, [4, 3, 70], 77, budget=budget)
    edge_id = graph.edge_id.tolist()
    want = reference.sample_neighbors(
        graph.indptr.tolist(), graph.indices.tolist(), edge_id, seeds.tolist(), [4, 3, 70], 77
    )
    assert as_lists(output) == list(want)


def test_a_path_is_followed_one_hop_at_a_time():
    # 3 -> 2 -> 1 -> 0: each hop finds one vertex.
    graph = Graph.from_edge_index(torch.tensor([[3, 2, 1], [2, 1, 0]]), 4)
    n_id, edge_index, e_id, num_nodes, num_edges = draw(graph, long(0), [1, 1, 1, 1], key=0)
    assert n_id.tolist() == [0, 1, 2, 3]
    assert edge_index.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert e_id.tolist() == [2, 1, 0]
    assert num_nodes.tolist() == [1, 1, 1, 1, 0] and num_edges.tolist() == [1, 1, 1, 0]


def test_a_vertex_found_before_is_not_expanded_again():
    # 0 and 1 list each other: hop 1 expands only 1, and hop 2 nothing, since 0 is known from the start.
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    *_, num_nodes, num_edges = draw(graph, long(0), [1, 1, 1], key=0)
    assert num_nodes.tolist() == [1, 1, 0, 0] and num_edges.tolist() == [1, 1, 0]


def test_a_repeated_seed_is_expanded_each_time_with_the_same_draws():
    graph = Graph.from_edge_index(star(50), 51)
    n_id, edge_index, e_id, _, num_edges = draw(graph, long(0, 7, 0), [4], key=3)
    assert n_id[:3].tolist() == [0, 7, 0]
    assert num_edges.tolist() == [8]
    assert edge_index[1].tolist() == [0] * 4 + [2] * 4
    assert edge_index[0, :4].tolist() == edge_index[0, 4:].tolist() and e_id[:4].tolist() == e_id[4:].tolist()
    once = draw(graph, long(0), [4], key=3)
    assert e_id[:4].tolist() == once[2].tolist()


def test_isolated_seeds_find_nothing():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 5)
    for replace in (False, True):
        for fanout in (2, -1):
            n_id, edge_index, e_id, num_nodes, num_edges = draw(graph, long(4, 3), [fanout, fanout], 0, replace)
            assert n_id.tolist() == [4, 3] and edge_index.shape == (2, 0) and e_id.tolist() == []
            assert num_nodes.tolist() == [2, 0, 0] and num_edges.tolist() == [0, 0]


@BOTH_MAPS
def test_no_seeds_give_an_empty_batch(budget):
    for graph in (Graph.from_edge_index(star(3), 4), Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 0)):
        n_id, edge_index, e_id, num_nodes, num_edges = draw(graph, long(), [2, 2], 0, budget=budget)
        assert n_id.tolist() == [] and edge_index.shape == (2, 0) and e_id.tolist() == []
        assert num_nodes.tolist() == [0, 0, 0] and num_edges.tolist() == [0, 0]


def test_no_hops_give_no_edges():
    graph = Graph.from_edge_index(star(3), 4)
    n_id, edge_index, _, num_nodes, num_edges = draw(graph, long(0, 2), [], 0)
    assert n_id.tolist() == [0, 2] and edge_index.shape == (2, 0)
    assert num_nodes.tolist() == [2] and num_edges.tolist() == []


def test_the_sampler_returns_pygs_type():
    graph = Graph.from_edge_index(star(9), 10)
    out = Sampler(graph, [3, 2]).sample(long(0), 5)
    n_id, edge_index, e_id, num_nodes, num_edges = draw(graph, long(0), [3, 2], 5)
    assert type(out).__name__ == "SamplerOutput"
    assert torch.equal(out.node, n_id) and torch.equal(out.edge, e_id)
    assert torch.equal(out.row, edge_index[0]) and torch.equal(out.col, edge_index[1])
    assert out.num_sampled_nodes == num_nodes.tolist() == [1, 3, 0]
    assert out.num_sampled_edges == num_edges.tolist() == [3, 0]


def test_the_sampler_passes_on_replace():
    out = Sampler(Graph.from_edge_index(star(2), 3), [50], replace=True).sample(long(0), 5)
    assert out.num_sampled_edges == [50] and out.num_sampled_nodes == [1, 2]


# --- exactly uniform --------------------------------------------------------------------------------------


def draws_of_many_stars(degree, fanout, *, copies, keys, replace=False) -> np.ndarray:
    """Returns [draws, edges per draw] places in the neighbour list, in the order in which they were drawn."""
    graph = many_stars(degree, copies)
    out = [draw(graph, torch.arange(copies), [fanout], key, replace)[2] for key in keys]
    return (torch.cat(out).view(-1, fanout if replace else min(fanout, degree)) % degree).numpy()


SMALL_STARS = [(2, 1), (3, 1), (3, 2), (4, 2), (5, 3), (5, 4), (6, 2), (7, 1), (8, 4), (50, 49), (53, 51)]


@pytest.mark.parametrize("degree, fanout", SMALL_STARS)
def test_every_subset_of_neighbours_is_equally_likely(degree, fanout):
    # (2, 1) and (5, 3) detect draws from [0, j) instead of [0, j]; (50, 49) and larger ones use the hash set.
    num_subsets = int(np.prod(np.arange(degree, degree - fanout, -1.0) / np.arange(1, fanout + 1)).round())
    copies = 200
    keys = range(max(100, 25 * num_subsets // copies))
    draws = draws_of_many_stars(degree, fanout, copies=copies, keys=keys)
    assert all(len(set(row)) == fanout for row in draws.tolist())
    p = reference.p_of_equal_counts(subsets(draws), num_subsets)
    assert p > FALSE_ALARM, f"p = {p} with {len(draws)} draws of keys 0 to {len(keys) - 1}"


@pytest.mark.parametrize("degree, fanout", [(2, 1), (5, 3)])
def test_one_vertex_with_many_keys_draws_uniformly(degree, fanout):
    # As above, but only the key changes from draw to draw: successive numbers, and keys as the loader makes them.
    graph = Graph.from_edge_index(star(degree), degree + 1)
    num_subsets = {(2, 1): 2, (5, 3): 10}[degree, fanout]
    for keys in (range(20000), (batch_key(seed=1, epoch=2, logical_rank=3, index=i) for i in range(20000))):
        draws = np.array([draw(graph, long(0), [fanout], key)[2].tolist() for key in keys])
        p = reference.p_of_equal_counts(subsets(draws), num_subsets)
        assert p > FALSE_ALARM, p


@pytest.mark.parametrize("degree, fanout", [(100, 15), (200, 60), (60, 48), (60, 49), (1000, 5)])
def test_every_neighbour_is_equally_likely_on_big_stars(degree, fanout):
    draws = draws_of_many_stars(degree, fanout, copies=200, keys=range(200))
    counts = np.bincount(draws.ravel(), minlength=degree)
    p = reference.p_of_equal_inclusion(counts, len(draws), fanout)
    assert p > FALSE_ALARM, p
    # Count how many of some given neighbours are drawn together, for the first, the last and other places of the list.
    generator = np.random.default_rng(17)
    half = degree // 2
    groups = [
        np.arange(fanout),
        np.arange(degree - fanout, degree),
        np.arange(0, degree, 2),
        generator.permutation(degree)[:half],
    ]
    for group in groups:
        hits = np.isin(draws, group).sum(1)
        p = reference.p_of_hypergeometric(hits, degree, fanout, len(group))
        assert p > FALSE_ALARM, p


@pytest.mark.parametrize("degree, fanout", [(1, 3), (2, 2), (4, 3), (3, 4)])
def test_with_replacement_every_sequence_is_equally_likely(degree, fanout):
    draws = draws_of_many_stars(degree, fanout, copies=200, keys=range(100), replace=True)
    p = reference.p_of_equal_counts(map(tuple, draws.tolist()), degree**fanout)
    assert p > FALSE_ALARM, p


def test_with_replacement_every_neighbour_of_a_big_star_is_equally_likely():
    draws = draws_of_many_stars(100, 70, copies=200, keys=range(50), replace=True)
    p = reference.p_of_equal_counts(draws.ravel().tolist(), 100)
    assert p > FALSE_ALARM, p


# --- independent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a, b", [(0, 1), (0, 2), (1, 2), (0, 64), (511, 512), (3, 999)])
def test_two_vertices_draw_independently(a, b):
    graph = many_stars(3, copies=1000)
    joint = [tuple((draw(graph, long(a, b), [1], key)[2] % 3).tolist()) for key in range(9000)]
    p = reference.p_of_equal_counts(joint, 9)
    assert p > FALSE_ALARM, p


def test_one_vertex_draws_independently_at_different_hops():
    # 0 to 2 are leaves of 3; 4 lists only 3. From seed 3, it is expanded at hop 0; from seed 4, at hop 1.
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [3, 3, 3, 4]]), 5)
    joint = [
        (int(draw(graph, long(3), [1], key)[2][0]), int(draw(graph, long(4), [1, 1], key)[2][1])) for key in range(9000)
    ]
    p = reference.p_of_equal_counts(joint, 9)
    assert p > FALSE_ALARM, p


@pytest.mark.parametrize("step", [1, 2, 2**32, 2**63 - 1])
def test_one_vertex_draws_independently_under_neighbouring_keys(step):
    graph = Graph.from_edge_index(star(3), 4)
    pick = lambda key: int(draw(graph, long(0), [1], (key + 2**63) % 2**64 - 2**63)[2][0])  # noqa: E731
    joint = [(pick(key), pick(key + step)) for key in range(0, 27000, 3)]
    p = reference.p_of_equal_counts(joint, 9)
    assert p > FALSE_ALARM, p


# --- a pure function of (batch key, hop, vertex) ----------------------------------------------------------


def draws_by_hop_and_vertex(output, num_hops) -> dict[tuple[int, int], list[int]]:
    n_id, edge_index, e_id, _, num_edges = output
    hops = torch.arange(num_hops).repeat_interleave(num_edges)
    drawn: dict[tuple[int, int], list[int]] = {}
    for hop, v, e in zip(hops.tolist(), n_id[edge_index[1]].tolist(), e_id.tolist()):
        drawn.setdefault((hop, v), []).append(e)
    return drawn


@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
@pytest.mark.parametrize("seed", range(4))
def test_a_vertex_draws_the_same_for_the_same_key_and_hop(seed, replace):
    _, graph = random_graph(seed, num_vertices=300, num_edges=3000)
    generator = np.random.default_rng(seed)
    shared = 0
    seen: dict[tuple[int, int], list[int]] = {}
    for _ in range(20):
        seeds = torch.from_numpy(generator.permutation(300)[: int(generator.integers(1, 60))])
        for place, ids in draws_by_hop_and_vertex(draw(graph, seeds, [4, 3, 2], 123, replace), 3).items():
            shared += place in seen
            assert seen.setdefault(place, ids) == ids
    assert shared > 500, "the batches hardly overlapped, so nothing was tested"


def test_draws_change_with_the_key_the_hop_and_the_vertex():
    graph = many_stars(50, copies=2)
    places = lambda output: (output[2] % 50).tolist()  # noqa: E731
    assert places(draw(graph, long(0), [10], 1)) != places(draw(graph, long(0), [10], 2))
    assert places(draw(graph, long(0), [10], 1)) != places(draw(graph, long(1), [10], 1))


@pytest.mark.parametrize("seed", range(6))
def test_int32_and_int64_indices_give_the_same_batches(seed):
    _, graph = random_graph(seed, num_vertices=200, num_edges=2000)
    wide = Graph(graph.indptr, graph.indices.long(), graph.edge_id)
    seeds = random_seeds(seed, 200, repeats=True)
    for budget in (STAMP_MAP, HASH_MAP):
        for replace in (False, True):
            assert same(
                draw(graph, seeds, [5, 4, 3], seed, replace, budget),
                draw(wide, seeds, [5, 4, 3], seed, replace, budget),
            )


@pytest.mark.parametrize("num_edges", [200, 3000, 40_000])  # lists of about 1, 10 and 130
def test_vertices_without_edges_change_nothing(num_edges):
    """Graphs that fit into a core's own cache use a loop of their own, and larger ones another."""
    for seed in range(4):
        edge_index, graph = random_graph(seed, num_vertices=300, num_edges=num_edges)
        larger = Graph.from_edge_index(edge_index, 300_000)
        seeds = random_seeds(seed, 300, repeats=seed % 2 == 0)
        for fanouts in ([3, 2], [-1, 8], [9, -1], [60, 5, 1]):
            for replace in (False, True):
                batch = draw(graph, seeds, fanouts, seed, replace)
                assert batch[2].numel()
                assert same(batch, draw(larger, seeds, fanouts, seed, replace))


def test_edge_ids_change_only_the_reported_ids():
    _, graph = random_graph(1, num_vertices=200, num_edges=2000)
    plain = Graph(graph.indptr, graph.indices)
    seeds = random_seeds(1, 200, repeats=False)
    a, b = draw(graph, seeds, [5, 4], 9), draw(plain, seeds, [5, 4], 9)
    assert torch.equal(a[2], graph.edge_id[b[2]])
    assert same(a[:2] + a[3:], b[:2] + b[3:])


@pytest.mark.parametrize("budget", [ops.MAP_BUDGET_BYTES, 0], ids=["stamp_map", "hash_map"])
def test_linked_graphs_give_the_same_samples(budget):
    for seed in range(4):
        edge_index, graph = random_graph(seed, num_vertices=200, num_edges=2000)
        linked = Graph.from_edge_index(edge_index, 200, linked=True)
        assert linked.links is not None and graph.links is None and linked.nbytes == graph.nbytes
        seeds = random_seeds(seed, 200, repeats=seed % 2 == 0)
        for replace in (False, True):
            ours = ops.sample_neighbors(
                linked.indptr, linked.indices, None, seeds, [5, -1], seed, replace, budget, linked.links
            )
            assert same(ours, draw(graph, seeds, [5, -1], seed, replace, budget))
            both = (Sampler(each, [5, 4], replace).sample(seeds, 7) for each in (linked, graph))
            a, b = ((mfg.node, mfg.row, mfg.col, mfg.edge) for mfg in both)
            assert same(a, b)


# --- scratch memory never shows ---------------------------------------------------------------------------


def test_stamp_map_and_hash_map_agree_over_many_batches_and_graphs():
    # The stamp map's 8-bit stamp wraps every 255 batches.
    sizes = [(50, 300), (4000, 20000), (300, 2000), (1, 3), (9000, 9000)]
    graphs = [random_graph(i, n, e)[1] for i, (n, e) in enumerate(sizes)]
    generator = np.random.default_rng(8)
    for i in range(600):
        # Long runs on one graph, and jumps between them.
        graph = graphs[(i // 40) % 5 if i % 7 else int(generator.integers(5))]
        seeds = torch.from_numpy(generator.integers(graph.num_vertices, size=int(generator.integers(1, 60))))
        fanouts = [[5, 5, 5], [20], [-1, 2], [60, 2]][i % 4]
        assert same(
            draw(graph, seeds, fanouts, i, budget=STAMP_MAP), draw(graph, seeds, fanouts, i, budget=HASH_MAP)
        ), f"batch {i}"


@BOTH_MAPS
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511])
def test_a_map_forgets_the_batches_before(gap, budget):
    # There are two stars. The first batch gives the leaves of star 0 other local ids than the last batch does. Between them
    # are `gap` batches that touch only star 10. A map that did not forget would give the last batch the old ids.
    leaves = torch.arange(1, 10)
    edges = torch.cat([star(9), star(9) + 10], dim=1)
    graph = Graph.from_edge_index(edges, 20)
    draw(graph, leaves.flip(0), [-1], 0, budget=budget)
    for i in range(gap):
        draw(graph, long(10), [-1], i, budget=budget)
    n_id, edge_index, *_ = draw(graph, long(0), [-1], 0, budget=budget)
    assert n_id.tolist() == list(range(10))
    assert edge_index.tolist() == [list(range(1, 10)), [0] * 9]


@BOTH_MAPS
def test_one_huge_batch_does_not_disturb_small_ones(budget):
    _, graph = random_graph(3, num_vertices=20000, num_edges=60000)
    seeds = torch.arange(5)
    before = draw(graph, seeds, [3, 3], 1, budget=budget)
    for _ in range(3):
        draw(graph, torch.arange(20000), [-1], 1, budget=budget)
        assert same(before, draw(graph, seeds, [3, 3], 1, budget=budget))


def test_eight_threads_at_once_give_the_same_as_one():
    graphs = [random_graph(i, n, 10 * n)[1] for i, n in enumerate((2000, 500, 5000))]
    generator = np.random.default_rng(9)
    tasks = []
    for i in range(160):
        graph = graphs[i % 3]
        seeds = torch.from_numpy(generator.integers(graph.num_vertices, size=100))
        tasks.append((graph, seeds, [6, 5, 4], join_key(i), i % 5 == 0, HASH_MAP if i % 2 else STAMP_MAP))
    alone = [draw(*task) for task in tasks]
    ready = Barrier(8)

    def work(thread: int) -> list:
        ready.wait()
        # Every thread does every task, each in another order.
        return [(i % 160, draw(*tasks[i % 160])) for i in range(20 * thread, 20 * thread + 160)]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            assert all(same(output, alone[i]) for i, output in results)


@pytest.mark.parametrize("call", ["first", "after another batch"])
def test_a_new_thread_gives_the_same(call):
    _, graph = random_graph(4, num_vertices=400, num_edges=4000)
    seeds = torch.arange(30)
    want = draw(graph, seeds, [5, 5], 3)

    def work():
        if call == "after another batch":
            draw(graph, torch.arange(400), [-1, -1], 0)
        return draw(graph, seeds, [5, 5], 3)

    with ThreadPoolExecutor(1) as pool:
        assert same(pool.submit(work).result(), want)


# --- corrupt arrays are an error, never a crash -----------------------------------------------------------

HUGE = 2**62


@pytest.mark.parametrize(
    "indptr, indices, text",
    [
        (long(0, 9, 9), long(0, 1), r"indptr is corrupt at vertex 0"),
        (long(0, 2, 1), long(0, 1), r"indptr is corrupt at vertex 1"),
        (long(-1, 2, 2), long(0, 1), r"indptr is corrupt at vertex 0"),
        (long(0, HUGE, 2), long(0, 1), r"indptr is corrupt at vertex 0"),
        (long(HUGE, HUGE, HUGE), long(0, 1), r"indptr is corrupt at vertex 0"),
        (long(-HUGE, 1, 2), long(0, 1), r"indptr is corrupt at vertex 0"),
        (long(0, 2, -(2**63)), long(0, 1), r"indptr is corrupt at vertex 1"),
        (long(0, 2, 2), long(1, 2), r"indices is corrupt: it holds 2, expected ids in \[0, 2\)"),
        (long(0, 2, 2), long(-1, 1), r"indices is corrupt: it holds -1, expected ids in \[0, 2\)"),
        (long(0, 2, 2), long(1, HUGE), r"indices is corrupt: it holds 4611686018427387904"),
        (long(0, 2, 2), long(1, 2).int(), r"indices is corrupt: it holds 2, expected ids in \[0, 2\)"),
        (long(0, 2, 2), long(1, -(2**31)).int(), r"indices is corrupt: it holds -2147483648"),
    ],
)
@BOTH_MAPS
@pytest.mark.parametrize("fanouts", [[-1], [5, 5], [1, 1]], ids=str)
def test_corrupt_arrays_raise_and_the_next_batch_is_right(indptr, indices, text, fanouts, budget):
    _, good = random_graph(1, 100, 600)
    want = draw(good, torch.arange(20), [4, 3], 5)
    bad = Graph.trusted(indptr, indices)
    if fanouts == [1, 1] and "indices" in text:
        # One draw reads one index: with many keys, some read the corrupt one, and those raise.
        failures = 0
        for key in range(64):
            try:
                draw(bad, long(0, 1), fanouts, key, budget=budget)
            except RuntimeError as error:
                failures += "indices is corrupt" in str(error)
        assert 0 < failures < 64
    else:
        with pytest.raises(RuntimeError, match=text):
            draw(bad, long(0, 1), fanouts, 0, budget=budget)
    assert same(draw(good, torch.arange(20), [4, 3], 5, budget=budget), want)


def test_the_sampler_refuses_a_seed_out_of_range():
    sampler = Sampler(Graph.from_edge_index(star(3), 4), [2])
    with pytest.raises(RuntimeError, match=r"seeds\[1\] must be in \[0, 4\), got 4"):
        sampler.sample(long(0, 4), 0)


# --- order of an epoch ------------------------------------------------------------------------------------


def test_every_order_of_four_is_equally_likely():
    for keys in (range(24000), (order_key(seed=5, epoch=e, unit=0) for e in range(24000))):
        p = reference.p_of_equal_counts((tuple(ops.permutation(4, key).tolist()) for key in keys), 24)
        assert p > FALSE_ALARM, p


def test_every_place_is_equally_likely_in_a_long_order():
    orders = np.array([ops.permutation(30, key).tolist() for key in range(9000)])
    for v in (0, 1, 14, 29):
        p = reference.p_of_equal_counts(np.argwhere(orders == v)[:, 1].tolist(), 30)
        assert p > FALSE_ALARM, p


@pytest.mark.parametrize("size", [0, 1, 2, 100, 1000])
def test_a_permutation_has_every_number_once_and_depends_only_on_its_key(size):
    for key in (0, -1, 7, 2**63 - 1, -(2**63)):
        order = ops.permutation(size, key)
        assert order.dtype == torch.int64
        assert order.sort().values.tolist() == list(range(size))
        assert torch.equal(order, ops.permutation(size, key))
        assert order.tolist() == reference.permutation(size, key)
    assert size < 100 or ops.permutation(size, 0).tolist() != ops.permutation(size, 1).tolist()


# --- keys -------------------------------------------------------------------------------------------------


def unsigned(key: int) -> int:
    return key % 2**64


KEYS = [(), (0,), (1, 2), (2, 1), (1, 2, 0), (-1,), (2**64 - 1, 5), (10**30, 7)]


def test_join_key_folds_its_fields_one_by_one():
    for fields in KEYS:
        key = 0
        for field in fields:
            key = reference.join_key(key, field)
        assert unsigned(join_key(*fields)) == key
        assert -(2**63) <= join_key(*fields) < 2**63


def test_keys_differ_when_a_field_or_the_order_of_fields_does():
    keys = [join_key(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    keys += [join_key(a, b) for a in range(10) for b in range(10)]
    assert len(set(keys)) == len(keys)
    places = [f(a, b, 0) for f in (order_key, lambda *x: batch_key(*x, 0)) for a in range(20) for b in range(20)]
    assert len(set(places)) == len(places)


def test_the_kernel_joins_the_hop_to_the_batch_key_as_python_does():
    # With 10 leaves and fanout 1 at hop 0: the first number of the stream mix64(join_key(batch key, hop) ^ vertex * golden).
    graph = Graph.from_edge_index(star(10), 11, is_sorted=True)
    for fields in KEYS[1:]:
        stream = reference.Stream(reference.mix64(unsigned(join_key(*fields, 0))))
        assert draw(graph, long(0), [1], join_key(*fields))[2].tolist() == [stream.below(10)]


def test_join_key_and_streams_equal_the_c_header(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "keys.cpp"
    source.write_text(
        '#include "random.h"\nusing namespace salientpp;\n'
        'extern "C" uint64_t join(uint64_t key, uint64_t field) { return join_key(key, field); }\n'
        'extern "C" uint64_t nth_below(uint64_t key, uint64_t n, uint64_t bound) {\n'
        "  Stream stream(key); uint64_t x = 0; while (n-- > 0) x = stream.below(bound); return x; }\n"
    )
    library = tmp_path / "keys.so"
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", f"-I{CSRC}", source, "-o", library], check=True)
    c = ctypes.CDLL(str(library))
    c.join.argtypes, c.join.restype = [ctypes.c_uint64] * 2, ctypes.c_uint64
    c.nth_below.argtypes, c.nth_below.restype = [ctypes.c_uint64] * 3, ctypes.c_uint64
    for fields in KEYS:
        key = 0
        for field in fields:
            key = c.join(key, unsigned(field))
        assert key == unsigned(join_key(*fields))
    # Bounds just above 2^63 are rejected half of the time, so the rejection step is exercised.
    for bound in (1, 2, 10, 2**32 + 1, 2**63 + 1, 2**64 - 1):
        for key in range(20):
            stream = reference.Stream(key)
            assert [c.nth_below(key, n, bound) for n in (1, 2, 3)] == [stream.below(bound) for _ in range(3)]


# --- golden values: another CPU, compiler or release must give the same -----------------------------------


def test_golden_values_of_a_sample():
    edges = [[(i * i + 3 * i + 5 * (i % 7)) % 17 for i in range(70)], [(5 * i + i // 4) % 17 for i in range(70)]]
    graph = Graph.from_edge_index(torch.tensor(edges), 17)
    n_id, edge_index, e_id, num_nodes, num_edges = as_lists(draw(graph, long(4, 11), [3, 2], 3149489951934424438))
    assert n_id == [4, 11, 15, 14, 1, 9, 16, 12, 13, 2, 7]
    assert edge_index == [[2, 3, 3, 4, 5, 4, 6, 7, 8, 4, 8, 9, 10, 5], [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]
    assert e_id == [17, 4, 30, 28, 54, 67, 45, 58, 48, 19, 23, 52, 18, 60]
    assert num_nodes == [2, 4, 5]
    assert num_edges == [6, 8]
    n_id, edge_index, e_id, num_nodes, num_edges = as_lists(draw(graph, long(4, 11), [3], -1, replace=True))
    assert n_id == [4, 11, 14, 15, 1]
    assert edge_index == [[2, 2, 3, 3, 4, 3], [0, 0, 0, 1, 1, 1]]
    assert e_id == [4, 30, 17, 41, 28, 41]
    assert num_nodes == [2, 3]
    assert num_edges == [6]


def test_golden_values_of_keys_and_orders():
    assert join_key(1, 2, 3) == -4870434905891912117
    assert batch_key(seed=1, epoch=2, logical_rank=3, index=4) == 3149489951934424438
    assert order_key(seed=1, epoch=2, unit=3) == 7606386750998325435
    assert ops.permutation(10, 0).tolist() == [4, 9, 2, 5, 1, 7, 6, 0, 3, 8]
    assert ops.permutation(10, -4870434905891912117).tolist() == [9, 3, 4, 6, 2, 7, 0, 1, 8, 5]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("typed", [False, True], ids=["plain", "typed"])
def test_a_batch_of_the_whole_graph_has_its_lists_in_order(index_dtype, typed):
    """The answer is known. The tensors of this number of edges exceed 4 MiB, so they bypass the caches."""
    degree, num_vertices = 5, 140_001
    indptr = torch.arange(num_vertices + 1) * degree
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(num_vertices, (num_vertices * degree,), generator=generator, dtype=index_dtype)
    seeds = torch.randperm(num_vertices, generator=generator)
    if typed:
        (n_id,), _, (edge_index,), (e_id,), _, _ = ops.sample_typed_neighbors(
            [indptr], [indices], [None], [None], [None], [None], [0], [0], [num_vertices], [None], [seeds], [None], [], [0], [-1], 1, 0,
        )  # fmt: skip
    else:
        n_id, edge_index, e_id, _, _ = ops.sample_neighbors(indptr, indices, None, seeds, [-1], 0, False)
    assert torch.equal(n_id, seeds)
    place = torch.empty_like(seeds)
    place[seeds] = torch.arange(num_vertices)
    assert torch.equal(e_id, (indptr[seeds].unsqueeze(1) + torch.arange(degree)).flatten())
    assert torch.equal(edge_index[1], torch.arange(num_vertices).repeat_interleave(degree))
    assert torch.equal(edge_index[0], place[indices[e_id].long()])
