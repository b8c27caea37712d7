"""Laws of `salientpp.vip.inclusion`: the kernel computes the formula in full relative precision, with any number of threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch
from graphs import RELATIONS, random_data, random_hetero, star
from samplers import TypedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

import salientpp
from salientpp import Graph, NeighborSampler, inclusion_probability, ops
from salientpp.graph.typed import TypedGraph
from salientpp.vip import inclusion as vip
from salientpp.vip.inclusion import (
    check_fanouts,
    draw_probability,
    draw_weights,
    link_start,
    typed_inclusion_probabilities,
    typed_inclusion_probability,
    typed_traffic,
    uniform_start,
)

EXPAND = pytest.mark.parametrize("expand", ["frontier", "hop"])


def random_digraph(seed: int, num_vertices: int, num_edges: int) -> Graph:
    """Makes a directed graph with repeated edges, self-loops and isolated vertices; some vertices are popular as sources."""
    generator = np.random.default_rng(seed)
    edges = (generator.random((2, num_edges)) ** [[2], [1]] * num_vertices * 0.9).astype(np.int64)
    return Graph.from_edge_index(torch.from_numpy(generator.permutation(num_vertices)[edges]), num_vertices)


def some_vertices(seed: int, num_vertices: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(num_vertices)[:size])


def formula(graph: Graph, seeds: torch.Tensor, fanouts, batch_size, **options) -> list:
    return reference.inclusion_probability(
        graph.indptr.tolist(), graph.indices.tolist(), seeds.tolist(), fanouts, batch_size, **options
    )


def assert_equal_to(probability: torch.Tensor, want: list[float], relative: float = 1e-5) -> None:
    assert probability.dtype == torch.float32
    np.testing.assert_allclose(probability.double(), np.array(want, dtype=float), rtol=relative, atol=0)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the formula ------------------------------------------------------------------------------------------

OPTIONS = [
    dict(expand=expand, include_seeds=include_seeds, replace=replace)
    for expand, include_seeds, replace in itertools.product(("frontier", "hop"), (False, True), (False, True))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items() if v))
@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_equals_the_formula(seed, options):
    graph = random_digraph(seed, num_vertices=25, num_edges=[20, 50, 80, 120, 200][seed])
    for fanouts in ([3], [2, 2], [5, 3, 2], [-1, -1], [1, -1, 4], [1, 1, 1, 1]):
        for num_seeds, batch_size in ((1, 1), (7, 2), (20, 4), (10, 100)):
            seeds = some_vertices(seed, 25, num_seeds)
            want = formula(graph, seeds, fanouts, batch_size, **options)
            assert_equal_to(inclusion_probability(graph, seeds, fanouts, batch_size, **options), want)


def test_a_star_equals_the_result_by_hand():
    # Vertex 0 draws 2 of its 4 leaves, and is in a batch with probability 1/2, so each leaf is drawn with 1/4. Leaf 1 is
    # also a seed with 1/2. On the frontier it is found by sampling only if it is not a seed: 1/4 (1 - 1/2).
    graph = Graph.from_edge_index(star(4), 5)
    seeds = torch.tensor([0, 1])
    probability = lambda **options: inclusion_probability(graph, seeds, [2], 1, **options).tolist()  # noqa: E731
    assert probability() == [0, 0.125, 0.25, 0.25, 0.25]
    assert probability(include_seeds=True) == [0.5, 0.625, 0.25, 0.25, 0.25]
    assert probability(expand="hop") == [0, 0.25, 0.25, 0.25, 0.25]
    assert probability(expand="hop", include_seeds=True) == [0.5, 0.625, 0.25, 0.25, 0.25]


@EXPAND
def test_direction_matters(expand):
    # 2 -> 1 -> 0: a batch that starts from 0 reaches 1, then 2; a batch that starts from 2 reaches nothing.
    graph = Graph.from_edge_index(torch.tensor([[2, 1], [1, 0]]), 3)
    assert inclusion_probability(graph, torch.tensor([0]), [1, 1], 1, expand=expand).tolist() == [0, 1, 1]
    assert inclusion_probability(graph, torch.tensor([2]), [1, 1], 1, expand=expand).tolist() == [0, 0, 0]


def test_the_models_of_a_hop_differ_if_a_vertex_is_reached_again():
    # 0 and 1 list each other. With the paper's hops, hop 2 reaches 0 again; on the frontier 0 is a seed and not new.
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    seeds = torch.tensor([0])
    assert inclusion_probability(graph, seeds, [1, 1], 1, expand="frontier").tolist() == [0, 1]
    assert inclusion_probability(graph, seeds, [1, 1], 1, expand="hop").tolist() == [1, 1]


@EXPAND
@pytest.mark.parametrize("include_seeds", [False, True])
def test_many_seed_sets_at_once_equal_one_by_one_bit_for_bit(expand, include_seeds):
    graph = random_digraph(7, 200, 1500)
    seed_sets = [some_vertices(k, 200, size) for k, size in enumerate([20, 1, 0, 60, 199, 5, 33, 8, 2, 100, 17])]
    options = dict(expand=expand, include_seeds=include_seeds)
    one_by_one = [inclusion_probability(graph, seeds, [4, 3, 2], 10, **options) for seeds in seed_sets]
    for k in range(12):
        together = inclusion_probability(graph, seed_sets[:k], [4, 3, 2], 10, **options)
        assert together.shape == (k, 200)
        assert torch.equal(together, torch.stack(one_by_one[:k]) if k else torch.empty(0, 200))


@pytest.mark.parametrize("sets", [0, 1, 3, 19])
def test_results_in_given_memory_are_the_same(monkeypatch, sets):
    graph = random_digraph(5, 40, 200)
    seeds = [some_vertices(k, 40, 1 + k % 7) for k in range(sets)]
    elsewhere = torch.full((sets, 40), -1.0)
    want = inclusion_probability(graph, seeds, [3, 2], 4)
    assert inclusion_probability(graph, seeds, [3, 2], 4, out=elsewhere) is elsewhere
    assert torch.equal(elsewhere, want)
    monkeypatch.setattr(vip, "_MANY_VERTICES", 10)
    assert torch.equal(inclusion_probability(graph, seeds, [3, 2], 4, out=torch.empty(sets, 40)), want)


@EXPAND
@pytest.mark.parametrize("include_seeds", [False, True])
def test_a_part_without_seeds_needs_nothing(expand, include_seeds):
    graph = random_digraph(1, 50, 300)
    empty = torch.empty(0, dtype=torch.int64)
    options = dict(expand=expand, include_seeds=include_seeds)
    assert inclusion_probability(graph, empty, [3, 2], 8, **options).tolist() == [0] * 50
    assert inclusion_probability(graph, [empty, torch.arange(5)], [3, 2], 8, **options)[0].tolist() == [0] * 50


@EXPAND
def test_a_batch_larger_than_the_seed_set_holds_every_seed(expand):
    graph = random_digraph(2, 50, 300)
    seeds = some_vertices(3, 50, 9)
    want = inclusion_probability(graph, seeds, [3, 2], 9, expand=expand, include_seeds=True)
    assert (want[seeds] == 1).all()
    for batch_size in (10, 1000, 2**62):
        assert torch.equal(
            inclusion_probability(graph, seeds, [3, 2], batch_size, expand=expand, include_seeds=True), want
        )


def test_a_graph_without_edges_needs_only_its_seeds():
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4)
    assert inclusion_probability(graph, torch.tensor([1, 2]), [3, 3], 1).tolist() == [0, 0, 0, 0]
    assert inclusion_probability(graph, torch.tensor([1, 2]), [3, 3], 1, include_seeds=True).tolist() == [
        0,
        0.5,
        0.5,
        0,
    ]
    nothing = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 0)
    assert inclusion_probability(nothing, torch.empty(0, dtype=torch.int64), [3], 1).shape == (0,)


@EXPAND
def test_wide_and_narrow_indices_agree(expand):
    graph = random_digraph(4, 60, 300)
    wide = Graph(graph.indptr, graph.indices.long())
    seeds = some_vertices(4, 60, 20)
    a, b = (inclusion_probability(g, seeds, [4, 3], 5, expand=expand) for g in (graph, wide))
    assert torch.equal(a, b)


def test_seeds_may_be_int32_and_of_any_shape():
    graph = random_digraph(4, 60, 300)
    seeds = some_vertices(4, 60, 20)
    want = inclusion_probability(graph, seeds, [4, 3], 5)
    assert torch.equal(inclusion_probability(graph, seeds.int().view(4, 5), [4, 3], 5), want)


def test_inclusion_probability_is_public():
    assert salientpp.inclusion_probability is inclusion_probability


# --- precision --------------------------------------------------------------------------------------------


def thin_chain(length: int, width: int) -> Graph:
    """Makes a chain: vertex i lists vertex i + 1 once and the last vertex ``width - 1`` times."""
    chain = torch.stack([torch.arange(1, length + 1), torch.arange(length)])
    dummy = torch.stack([torch.full((length * (width - 1),), length + 1), torch.arange(length).repeat(width - 1)])
    return Graph.from_edge_index(torch.cat([chain, dummy], 1), length + 2)


@EXPAND
@pytest.mark.parametrize(
    "length, width, replace", [(4, 1000, False), (10, 1000, False), (4, 1000, True), (3, 100_000, False)]
)
def test_tiny_probabilities_keep_their_relative_precision(expand, length, width, replace):
    # Down to 1e-12 and 1e-30: every step of the chain draws one of `width`.
    graph = thin_chain(length, width)
    probability = inclusion_probability(graph, torch.tensor([0]), [1] * length, 1, expand=expand, replace=replace)
    want = [float(width) ** -h for h in range(1, length + 1)]
    assert_equal_to(probability[1 : length + 1], want)
    assert want[-1] <= 1e-12 and probability[0] == 0


@EXPAND
def test_tiny_probabilities_add_up(expand):
    # 1000 seeds, each drawing vertex 0 with probability 1e-6 or 2e-6 in a batch of one.
    seeds = torch.arange(1, 1001)
    to_zero = torch.stack([torch.zeros(1000, dtype=torch.int64), seeds])
    others = torch.stack([torch.full((999_000,), 1001), seeds.repeat(999)])
    graph = Graph.from_edge_index(torch.cat([to_zero, others], 1), 1002)
    for fanout in (1, 2):
        probability = inclusion_probability(graph, seeds, [fanout], 1, expand=expand)
        want = -np.expm1(1000 * np.log1p(-fanout * 1e-6))
        assert_equal_to(probability[:1], [want])


def test_a_hub_keeps_its_probability_to_one_in_a_thousand():
    # Sums of 100,000 equal terms in float32: rounding errors are no longer random, and 1e-5 cannot be reached.
    for size, relative in ((10_000, 1e-5), (100_000, 1e-3)):
        seeds = torch.arange(1, size + 1)
        to_hub = torch.stack([torch.zeros(size, dtype=torch.int64), seeds])
        others = torch.stack([torch.full((6 * size,), size + 1), seeds.repeat(6)])
        graph = Graph.from_edge_index(torch.cat([to_hub, others], 1), size + 2)
        for batch_size in (1, 10, size // 10):
            want = -np.expm1(size * np.log1p(-batch_size / size / 7))
            assert_equal_to(inclusion_probability(graph, seeds, [1], batch_size)[:1], [want], relative)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items() if v))
@pytest.mark.parametrize("seed", range(6))
def test_certain_and_impossible_vertices_get_exactly_one_and_zero(seed, options):
    graph = random_digraph(seed + 50, num_vertices=12, num_edges=25)
    for fanouts in ([2], [2, 1], [-1, 2], [-1, -1, 1]):
        for num_seeds, batch_size in ((1, 1), (4, 3), (6, 6), (3, 7)):
            seeds = some_vertices(seed, 12, num_seeds)
            exact = reference.exact_inclusion_probability(
                graph.indptr.tolist(), graph.indices.tolist(), seeds.tolist(), fanouts, batch_size, **options
            )
            probability = inclusion_probability(graph, seeds, fanouts, batch_size, **options)
            for got, want in zip(probability.tolist(), exact):
                assert got == 1 if want == 1 else got < 1 or 1 - want < 1e-7  # nearer to 1 than float32 resolves
                assert (got == 0) == (want == 0)
            assert_equal_to(probability, exact)


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_never_exceed_one_on_a_dense_graph(seed):
    graph = random_digraph(seed, 100, 20_000)
    for options in OPTIONS:
        probability = inclusion_probability(graph, some_vertices(seed, 100, 50), [20, 15, 10, 5], 40, **options)
        assert probability.min() >= 0 and probability.max() <= 1


# --- threads ----------------------------------------------------------------------------------------------


@EXPAND
def test_any_number_of_threads_gives_the_same_bits(expand, threads):
    graph = random_digraph(5, 20_000, 150_000)
    seed_sets = [some_vertices(k, 20_000, 3000) for k in range(3)]
    results = []
    for num_threads in (1, 2, 3, 8):
        threads(num_threads)
        results.append(inclusion_probability(graph, seed_sets, [10, 5, 3], 200, expand=expand, include_seeds=True))
    assert all(torch.equal(results[0], result) for result in results[1:])


# --- the formula and the sampler --------------------------------------------------------------------------


def found(graph: Graph, batches, fanouts, replace: bool = False) -> tuple[np.ndarray, int]:
    """Counts the batches that draw each vertex as a neighbour, also if it is a seed; also returns the number of batches."""
    counts, num_batches = np.zeros(graph.num_vertices, dtype=np.int64), 0
    for key, seeds in enumerate(batches):
        n_id, edge_index, *_ = ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, fanouts, key, replace)
        counts[n_id[edge_index[0]].unique().numpy()] += 1
        num_batches += 1
    return counts, num_batches


def found_as_new(graph: Graph, batches, fanouts, replace: bool = False) -> tuple[np.ndarray, int]:
    """Counts the same for vertices that are not seeds of the batch."""
    counts, num_batches = np.zeros(graph.num_vertices, dtype=np.int64), 0
    for key, seeds in enumerate(batches):
        n_id = ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, fanouts, key, replace)[0]
        counts[n_id[len(seeds) :].numpy()] += 1
        num_batches += 1
    return counts, num_batches


def assert_binomial(counts: np.ndarray, num_batches: int, probability: torch.Tensor) -> None:
    """Allows 5.5 standard deviations: one vertex in 26 million fails by chance."""
    p = probability.double().numpy()
    assert (counts[p == 0] == 0).all() and (counts[p == 1] == num_batches).all()
    sure = (p == 0) | (p == 1)
    z = (counts - num_batches * p)[~sure] / np.sqrt(num_batches * p * (1 - p))[~sure]
    assert len(z) > 0 and np.abs(z).max() < 5.5, f"off by {np.abs(z).max():.1f} standard deviations"


def shuffled_batches(seeds: torch.Tensor, batch_size: int, epochs: int):
    for epoch in range(epochs):
        yield from seeds[ops.permutation(len(seeds), epoch)].split(batch_size)


@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
def test_at_one_hop_the_formula_is_right_for_shuffled_batches(replace):
    # Each leaf is listed by one seed, so the formula's assumption of independence does not matter.
    degrees = [1, 2, 3, 5, 10, 40, 100]
    centres = torch.arange(len(degrees) * 6)
    sizes = torch.tensor(degrees * 6)
    target = centres.repeat_interleave(sizes)
    graph = Graph.from_edge_index(
        torch.stack([len(centres) + torch.arange(len(target)), target]), len(centres) + len(target)
    )
    probability = inclusion_probability(graph, centres, [4], 6, replace=replace)
    counts, num_batches = found(graph, shuffled_batches(centres, 6, 1000), [4], replace)
    assert num_batches == 7000
    assert_binomial(counts, num_batches, probability)


@EXPAND
@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
def test_at_one_hop_the_formula_is_right_for_independent_seeds(replace, expand):
    # A vertex may be listed by several seeds: the formula is exact if seeds are independent. The graph has no repeated
    # edges, which would be drawn together, and no self-loops, which are drawn by the seed they lead to.
    edge_index = random_data(150, 900, seed=5, directed=True).edge_index.unique(dim=1)
    graph = Graph.from_edge_index(edge_index[:, edge_index[0] != edge_index[1]], 150)
    seeds = torch.arange(0, 150, 2)
    probability = inclusion_probability(graph, seeds, [3], 15, expand=expand, replace=replace)
    generator = np.random.default_rng(6)
    batches = [seeds[torch.from_numpy(generator.random(75) < 0.2)] for _ in range(8000)]
    count = found_as_new if expand == "frontier" else found
    assert_binomial(*count(graph, batches, [3], replace), probability)


def test_from_two_hops_on_the_formula_is_nearly_right_and_ranks_well():
    # The law is about volume: rows missed by the formula's cache, relative to rows missed by a cache from the counts.
    graph = Graph.from_edge_index(random_data(600, 4000, seed=7).edge_index, 600)
    seeds, remote = torch.arange(100), np.arange(300, 600)
    probability = inclusion_probability(graph, seeds, [4, 3], 10).double().numpy()[remote]
    counts, num_batches = found_as_new(graph, shuffled_batches(seeds, 10, 100), [4, 3])
    frequency = counts[remote] / num_batches
    assert 0.95 < probability.sum() / frequency.sum() < 1.4
    for capacity in (15, 50, 100):
        missed = np.delete(frequency, np.argsort(-probability)[:capacity]).sum()
        least = np.sort(frequency)[: len(remote) - capacity].sum()
        assert missed / least < 1.05


# --- several vertex types, weights, seeds that are edges ----------------------------------------------------


def weighted_star(weights: list[float]) -> TypedGraph:
    data = Data(
        edge_index=star(len(weights)), num_nodes=len(weights) + 1, weight=torch.tensor(weights, dtype=torch.float64)
    )
    return TypedGraph.from_data(data, weight_attr="weight")


def drawn(weights: list[float], fanout: int, replace: bool) -> np.ndarray:
    return draw_probability(weighted_star(weights).relations[0], fanout, replace).numpy()


def inclusion_by_enumeration(weights: list[float], fanout: int) -> np.ndarray:
    """Returns the inclusion probabilities of successive sampling without replacement."""
    chances = reference.successive_sampling(weights, fanout)
    return np.array([sum(p for subset, p in chances.items() if k in subset) for k in range(len(weights))])


@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
def test_uniform_draws_have_the_probability_of_the_formula(replace):
    graph = TypedGraph.of(random_digraph(3, 40, 200))
    relation = graph.relations[0]
    degree = relation.indptr.diff().repeat_interleave(relation.indptr.diff()).double()
    for fanout in (1, 3, 50):
        want = 1 - (1 - 1 / degree) ** fanout if replace else (fanout / degree).clamp(max=1)
        torch.testing.assert_close(draw_probability(relation, fanout, replace), want)
    assert (draw_probability(relation, 0, replace) == 0).all() and (draw_probability(relation, -1, replace) == 1).all()


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [5.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1e-200, 3e-200]], ids=str)
def test_some_weighted_draws_have_an_exact_probability(weights):
    total, size = sum(weights), len(weights)
    share = np.array([w / total for w in weights]) if total else np.full(size, 1 / size)
    for fanout in (1, 2, 5):
        np.testing.assert_allclose(drawn(weights, fanout, replace=True), 1 - (1 - share) ** fanout, rtol=1e-12)
    np.testing.assert_allclose(drawn(weights, 1, replace=False), inclusion_by_enumeration(weights, 1), rtol=1e-12)
    positive = sum(w > 0 for w in weights) or size
    for fanout in range(positive, size + 2):  # every neighbour with weight; the rest is shared among the others
        np.testing.assert_allclose(
            drawn(weights, fanout, replace=False), inclusion_by_enumeration(weights, min(fanout, size)), rtol=1e-12
        )
    assert (drawn(weights, -1, replace=False) == 1).all() and (drawn(weights, 0, replace=True) == 0).all()


def test_draw_probabilities_of_lists_are_independent():
    weights = [[3.0, 1.0], [0.0, 0.0, 0.0], [7.0], [1.0, 2.0, 3.0, 4.0]]
    sizes = torch.tensor([len(w) for w in weights])
    edges = torch.stack([4 + torch.arange(10), torch.arange(4).repeat_interleave(sizes)])
    data = Data(edge_index=edges, num_nodes=14, weight=torch.tensor(sum(weights, [])))
    relation = TypedGraph.from_data(data, weight_attr="weight").relations[0]
    for fanout, replace in itertools.product((1, 2, 3), (False, True)):
        together = draw_probability(relation, fanout, replace)
        np.testing.assert_allclose(together, np.concatenate([drawn(w, fanout, replace) for w in weights]), rtol=1e-9)


@pytest.mark.parametrize(
    "weights",
    [[1.0, 2.0, 4.0, 8.0], [9.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.1, 0.9, 1.0, 1.2, 0.8], [5.0, 0.0, 2.0, 1.0, 1.0]],
    ids=str,
)
def test_successive_sampling_is_near_its_asymptotic_probability(weights):
    for fanout in range(2, len(weights)):
        probability, exact = drawn(weights, fanout, replace=False), inclusion_by_enumeration(weights, fanout)
        assert abs(probability.sum() - fanout) < 1e-6
        assert np.abs(probability - exact).max() < 0.06
        assert (np.argsort(probability, kind="stable") == np.argsort(exact.round(12), kind="stable")).all()


def test_long_lists_draw_with_the_asymptotic_probability():
    weights = (np.random.default_rng(2).random(80) ** 3 + 0.01).tolist()
    sampler = TypedSampler(weighted_star(weights), [[12]])
    counts = np.zeros(80)
    for key in range(4000):
        counts[sampler.sample({None: torch.tensor([0])}, key).edge] += 1
    assert np.abs(drawn(weights, 12, replace=False) - counts / 4000).max() < 0.03


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items() if v))
@pytest.mark.parametrize("seed", range(3))
def test_one_relation_gives_the_same_as_the_fast_function(seed, options):
    graph = random_digraph(seed, 60, 300)
    seeds = some_vertices(seed, 60, 20)
    for fanouts in ([3], [2, 2], [-1, 0, 4], [5, 3, 2]):
        for batch_size in (4, 100):
            typed = typed_inclusion_probability(
                TypedGraph.of(graph), {None: uniform_start(seeds, batch_size)}, [fanouts], **options
            )
            assert_equal_to(
                typed[None], inclusion_probability(graph, seeds, fanouts, batch_size, **options).double().tolist()
            )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k if v is True else v for k, v in o.items() if v))
def test_several_types_equal_the_formula(options):
    data = random_hetero(40, seed=2, paper=12, author=9, venue=3)
    weighted = "weight" if options["replace"] else None  # the formula is then exact with weights too
    graph = TypedGraph.from_data(data, weight_attr=weighted)
    fanouts = [[3, 2, 1], [2, 0, 4], [1, -1, 1], [1, 1, 1]]
    start = {"paper": uniform_start(torch.arange(5), 2), "author": torch.linspace(0, 1, 9)}
    lists = lambda tensor: None if tensor is None else tensor.tolist()  # noqa: E731
    relations = [
        reference.Relation(r.source, r.target, *map(lists, (r.indptr, r.indices, None, r.edge_weight)))
        for r in graph.relations
    ]
    p_0 = [start["paper"](12).tolist(), start["author"].tolist(), [0.0] * 3]
    want = reference.typed_inclusion_probability(relations, p_0, fanouts, **options)
    got = typed_inclusion_probability(graph, start, fanouts, **options)
    assert list(got) == data.node_types
    for probability, values in zip(got.values(), want):
        np.testing.assert_allclose(probability, np.clip(values, 0, 1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight", "replace": True}], ids=str)
def test_at_one_hop_the_formula_is_right_for_seeds_of_several_types(options):
    data = random_hetero(150, seed=4)
    for name in RELATIONS:  # no repeated edges, which would be drawn together, and no self-loops
        store = data[name]
        edges = torch.unique(store.edge_index, dim=1)
        store.edge_index = edges[:, edges[0] != edges[1]] if name[0] == name[2] else edges
        store.weight = 0.1 + torch.rand(store.edge_index.size(1), generator=torch.Generator().manual_seed(1)) ** 2
        del store.edge_attr, store.edge_time
    replace = options.get("replace", False)
    graph = TypedGraph.from_data(data, weight_attr=options.get("weight_attr"))
    sampler = TypedSampler(graph, [[2]] * 4, replace)
    chance = {"paper": 0.2, "author": 0.4}
    start = {name: torch.full((data[name].num_nodes,), p) for name, p in chance.items()}
    probability = typed_inclusion_probability(graph, start, sampler.fanouts, replace=replace)
    counts = {name: np.zeros(data[name].num_nodes, dtype=np.int64) for name in data.node_types}
    generator = np.random.default_rng(7)
    for key in range(2500):
        seeds = {
            name: torch.from_numpy(np.flatnonzero(generator.random(data[name].num_nodes) < p))
            for name, p in chance.items()
        }
        out = sampler.sample(seeds, key)
        for name, ids in out.node.items():
            counts[name][ids[out.num_sampled_nodes[name][0] :]] += 1
    for name in data.node_types:
        assert_binomial(counts[name], 2500, probability[name])


@pytest.mark.parametrize(
    "negatives",
    [
        None,
        NegativeSampling("binary", 1.5),
        NegativeSampling("triplet", 2),
        NegativeSampling("triplet", 1, dst_weight=torch.arange(30.0)),
    ],
    ids=["none", "binary", "triplet", "weighted"],
)
def test_at_one_hop_the_formula_is_right_for_batches_of_edges(negatives):
    """Each tag and word is listed by one vertex, so the formula's assumption of independence does not matter."""
    generator = torch.Generator().manual_seed(5)
    data, (users, items) = HeteroData(), (40, 30)
    data["user"].num_nodes, data["item"].num_nodes = users, items
    degrees = {"user": 1 + torch.arange(users) % 6, "item": 1 + torch.arange(items) % 4}
    for name, leaf in (("user", "tag"), ("item", "word")):
        target = torch.arange(len(degrees[name])).repeat_interleave(degrees[name])
        data[leaf].num_nodes = len(target)
        data[leaf, "of", name].edge_index = torch.stack([torch.arange(len(target)), target])
    edges = torch.stack(
        [(torch.rand(400, generator=generator) ** 2 * users).long(), torch.randint(items, (400,), generator=generator)]
    )
    data["user", "buys", "item"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    batch_size = 10
    amount = 0 if negatives is None else int(batch_size * negatives.amount)
    triplet = negatives is not None and negatives.is_triplet()
    start = {
        "user": link_start(edges[0], batch_size, 0 if triplet else amount),
        "item": link_start(edges[1], batch_size, amount, None if negatives is None else negatives.dst_weight),
    }
    sampler = NeighborSampler(data, [2])
    probability = typed_inclusion_probability(sampler.topology.as_typed(), start, sampler.fanouts, include_seeds=True)
    counts = {name: np.zeros(data[name].num_nodes, dtype=np.int64) for name in data.node_types}
    for key, chosen in enumerate(
        batch for epoch in range(60) for batch in ops.permutation(400, epoch).split(batch_size)
    ):
        inputs = EdgeSamplerInput(None, edges[0, chosen], edges[1, chosen], None, None, ("user", "buys", "item"))
        for name, ids in sampler.sample_from_edges(inputs, negatives, key=key).node.items():
            counts[name][ids] += 1
    for name in data.node_types:
        assert_binomial(counts[name], 2400, probability[name])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(expand="both"), "expand must be 'frontier' or 'hop', got 'both'"),
        (dict(start={None: torch.zeros(3)}), r"start of None must have shape \[4\], got \[3\]"),
    ],
)
def test_bad_typed_arguments_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        typed_inclusion_probability(**{"graph": TypedGraph.of(GRAPH), "start": {}, "fanouts": [[2]], **options})


# --- refusals ---------------------------------------------------------------------------------------------

GRAPH = Graph.from_edge_index(star(3), 4)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(expand="both"), r"expand must be 'frontier' or 'hop', got 'both'"),
        (dict(batch_size=0), r"batch_size must be >= 1, got 0"),
        (dict(batch_size=-3), r"batch_size must be >= 1, got -3"),
        (dict(seeds=torch.tensor([0, 4])), r"seeds must be in \[0, 4\), got 4 at position 1 of seed set 0"),
        (
            dict(seeds=[torch.tensor([0]), torch.tensor([2, 1, -1])]),
            r"seeds must be in \[0, 4\), got -1 at position 2 of seed set 1",
        ),
        (dict(num_neighbors=[-2]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got -2"),
        (dict(num_neighbors=[1.5]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got 1.5"),
        (dict(num_neighbors=[True]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got True"),
        (dict(num_neighbors=[]), r"num_neighbors must have one entry per hop, got an empty list"),
        (dict(num_neighbors=5), r"num_neighbors must be a list of integers, one per hop, got 5"),
        (dict(num_neighbors="15,10"), r"num_neighbors must be a list of integers, one per hop, got '15,10'"),
    ],
)
def test_bad_arguments_are_refused(change, text):
    arguments = dict(graph=GRAPH, seeds=torch.tensor([0]), num_neighbors=[2], batch_size=1) | change
    with pytest.raises(ValueError, match=text):
        inclusion_probability(**arguments)


@pytest.mark.parametrize("fanout", [None, "x", float("nan"), float("inf")])
def test_a_fanout_that_is_not_a_number_is_refused(fanout):
    with pytest.raises(ValueError, match=r"num_neighbors\[0\] must be an integer >= 0"):
        check_fanouts([fanout])


@pytest.mark.parametrize(
    "seeds", [torch.tensor([True, False, False, True]), torch.tensor([0.5])], ids=["mask", "float"]
)
def test_seeds_that_are_not_ids_are_refused(seeds):
    with pytest.raises((ValueError, TypeError), match="seeds"):
        inclusion_probability(GRAPH, seeds, [2], 1)


def test_fanouts_are_returned_as_a_list_of_ints():
    assert check_fanouts((15, np.int64(10), -1, 5.0)) == [15, 10, -1, 5]
    assert all(type(f) is int for f in check_fanouts((np.int64(10), 5.0)))


# --- edge weights ----------------------------------------------------------------------------------------


def test_draw_weights_are_the_expected_draws_of_an_in_edge():
    """The graph is 0 <- 1 <- 2 <- 3, with 4, 5, 6 into 1. Seed 0 is one of two: half of the steps expand it."""
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3, 4, 5, 6], [0, 1, 2, 1, 1, 1]]), 8)
    seeds = torch.tensor([0, 7])
    # By hand: v is expanded with probability q, and draws a given one of d neighbours with probability min(1, f / d).
    # 0: 1/2 * 1; 1: 1/2 * 2/4; 2: found with 1/4, * 1. Over the six edges the mean is (1/2 + 4 * 1/4 + 1/4) / 6 = 7/24.
    weights = draw_weights(graph, seeds, [2, 2, 2], 1, mean=70.0)
    assert weights.dtype == torch.int64 and weights.tolist()[:3] == [120, 60, 60]
    assert weights.min() >= 1, "partitioners refuse weights of zero"
    assert draw_weights(graph, seeds, [2, 2, 2], 1, mean=70.0, most=100).tolist()[:3] == [100, 60, 60]


def test_draw_weights_of_a_graph_without_edges_or_seeds_are_ones():
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    assert draw_weights(empty, torch.tensor([0]), [2], 1).ge(1).all()
    path = Graph.from_edge_index(torch.tensor([[0], [1]]), 2)
    assert draw_weights(path, torch.empty(0, dtype=torch.int64), [2], 1).tolist() == [1, 1]


# --- several seed sets, and the traffic of edges ------------------------------------------------------------


def test_several_seed_sets_together_give_the_same_as_each_alone():
    data = random_hetero(200, seed=3)
    for weight_attr in (None, "weight"):
        graph = TypedGraph.from_data(data, weight_attr=weight_attr)
        starts = [
            {"paper": uniform_start(torch.arange(20), 4)},
            {"author": uniform_start(torch.arange(9), 3), "venue": torch.linspace(0, 1, 6)},
            {},
        ]
        fanouts = [[3, 2], [2, 2], [-1, 1], [0, 4]]
        for options in ({}, {"expand": "hop"}, {"include_seeds": True}, {"replace": True}):
            together = typed_inclusion_probabilities(graph, starts, fanouts, **options)
            for start, got in zip(starts, together):
                want = typed_inclusion_probability(graph, start, fanouts, **options)
                assert all(torch.equal(got[name], want[name]) for name in graph.node_types)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_traffic_of_an_edge_is_everything_drawn_along_it(weighted):
    """The graph is a tree, so nothing is reached twice. Paper 0 has tags 0 and 1, tag 0 papers 1 to 4, tag 1 paper 5, and paper 1 tag 2."""
    data = HeteroData()
    data["paper"].num_nodes, data["tag"].num_nodes = 6, 3
    data["tag", "of", "paper"].edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
    data["paper", "has", "tag"].edge_index = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 0, 0, 1]])
    for name in data.edge_types if weighted else ():
        data[name].weight = torch.full((data[name].edge_index.size(1),), 3.0)
    graph = TypedGraph.from_data(data, weight_attr="weight" if weighted else None)
    start = {"paper": torch.tensor([0.5, 0, 0, 0, 0, 0])}
    of, has = typed_traffic(graph, start, [[1, 1, 1], [1, 1, 1]], {"paper": 8, "tag": 100})
    # Half of the steps have paper 0, which draws both tags. Tag 0 draws one of four papers, and paper 1 draws tag 2.
    from_paper_1, from_tag_0, from_tag_1 = 100, 8 + 100 / 4, 8
    assert of.tolist() == pytest.approx([0.25 * (100 + from_tag_0), 0.25 * (100 + from_tag_1), 0.25 / 4 * 100])
    assert has.tolist() == pytest.approx([0.0625 * (8 + from_paper_1), 0.0625 * 8, 0.0625 * 8, 0.0625 * 8, 0.25 * 8])
    of, has = typed_traffic(graph, start, [[1, 1, 1], [1, 1, 1]], {"paper": 8, "tag": 0})
    assert of.tolist() == pytest.approx([0.25 * 8, 0.25 * 8, 0]), "a tag without a row still brings papers"


def test_the_traffic_of_one_hop_is_draws_times_bytes():
    data = random_hetero(200, seed=4)
    graph = TypedGraph.from_data(data)
    start = {"paper": uniform_start(torch.arange(30), 6)}
    sizes = {"paper": 16, "author": 4, "venue": 0}
    for got, name, relation in zip(typed_traffic(graph, start, [[3]] * 4, sizes), graph.edge_types, graph.relations):
        target = torch.repeat_interleave(torch.arange(relation.indptr.numel() - 1), relation.indptr.diff())
        p_0 = start["paper"](60)[target] if name[2] == "paper" else torch.zeros(target.numel(), dtype=torch.float64)
        torch.testing.assert_close(got, draw_probability(relation, 3, False) * p_0 * sizes[name[0]])
