"""Laws of `salientpp.plan.vip`: the kernel computes the formula, in full relative precision, whatever the threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch
from graphs import random_data, star

import salientpp
from salientpp import Graph, inclusion_probability, ops
from salientpp.plan.vip import check_fanouts, draw_weights

EXPAND = pytest.mark.parametrize("expand", ["frontier", "hop"])


def random_digraph(seed: int, num_vertices: int, num_edges: int) -> Graph:
    """Directed, with repeated edges, self-loops and vertices without any; some vertices are popular as sources."""
    generator = np.random.default_rng(seed)
    edges = (generator.random((2, num_edges)) ** [[2], [1]] * num_vertices * 0.9).astype(np.int64)
    return Graph.from_edge_index(torch.from_numpy(generator.permutation(num_vertices)[edges]), num_vertices)


def some_vertices(seed: int, num_vertices: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(num_vertices)[:size])


def formula(graph: Graph, seeds: torch.Tensor, fanouts, batch_size, **options) -> list:
    return reference.inclusion_probability(graph.indptr.tolist(), graph.indices.tolist(), seeds.tolist(), fanouts, batch_size, **options)


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
def test_it_equals_the_formula(seed, options):
    graph = random_digraph(seed, num_vertices=25, num_edges=[20, 50, 80, 120, 200][seed])
    for fanouts in ([3], [2, 2], [5, 3, 2], [-1, -1], [1, -1, 4], [1, 1, 1, 1]):
        for num_seeds, batch_size in ((1, 1), (7, 2), (20, 4), (10, 100)):
            seeds = some_vertices(seed, 25, num_seeds)
            want = formula(graph, seeds, fanouts, batch_size, **options)
            assert_equal_to(inclusion_probability(graph, seeds, fanouts, batch_size, **options), want)


def test_a_star_worked_out_by_hand():
    # Vertex 0 draws 2 of its 4 leaves, and is in a batch with probability 1/2: each leaf comes with 1/4. Leaf 1 is a
    # seed too, with 1/2; on the frontier it is found by sampling only where it is none: 1/4 (1 - 1/2).
    graph = Graph.from_edge_index(star(4), 5)
    seeds = torch.tensor([0, 1])
    probability = lambda **options: inclusion_probability(graph, seeds, [2], 1, **options).tolist()  # noqa: E731
    assert probability() == [0, 0.125, 0.25, 0.25, 0.25]
    assert probability(include_seeds=True) == [0.5, 0.625, 0.25, 0.25, 0.25]
    assert probability(expand="hop") == [0, 0.25, 0.25, 0.25, 0.25]
    assert probability(expand="hop", include_seeds=True) == [0.5, 0.625, 0.25, 0.25, 0.25]


@EXPAND
def test_direction_matters(expand):
    # 2 -> 1 -> 0: a batch that starts from 0 reaches 1, then 2; one that starts from 2 reaches nothing.
    graph = Graph.from_edge_index(torch.tensor([[2, 1], [1, 0]]), 3)
    assert inclusion_probability(graph, torch.tensor([0]), [1, 1], 1, expand=expand).tolist() == [0, 1, 1]
    assert inclusion_probability(graph, torch.tensor([2]), [1, 1], 1, expand=expand).tolist() == [0, 0, 0]


def test_the_two_meanings_of_a_hop_differ_where_a_vertex_is_met_again():
    # 0 and 1 list each other. By the paper's hops, 0 is met again at hop 2; on the frontier it is a seed and no news.
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
        assert torch.equal(inclusion_probability(graph, seeds, [3, 2], batch_size, expand=expand, include_seeds=True), want)


def test_a_graph_without_edges():
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4)
    assert inclusion_probability(graph, torch.tensor([1, 2]), [3, 3], 1).tolist() == [0, 0, 0, 0]
    assert inclusion_probability(graph, torch.tensor([1, 2]), [3, 3], 1, include_seeds=True).tolist() == [0, 0.5, 0.5, 0]
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


def test_it_is_the_public_function():
    assert salientpp.inclusion_probability is inclusion_probability


# --- precision --------------------------------------------------------------------------------------------


def thin_chain(length: int, width: int) -> Graph:
    """Vertex i lists vertex i + 1 once and the last vertex ``width - 1`` times."""
    chain = torch.stack([torch.arange(1, length + 1), torch.arange(length)])
    dummy = torch.stack([torch.full((length * (width - 1),), length + 1), torch.arange(length).repeat(width - 1)])
    return Graph.from_edge_index(torch.cat([chain, dummy], 1), length + 2)


@EXPAND
@pytest.mark.parametrize("length, width, replace", [(4, 1000, False), (10, 1000, False), (4, 1000, True), (3, 100_000, False)])
def test_tiny_probabilities_keep_their_relative_precision(expand, length, width, replace):
    # Down to 1e-12 and 1e-30: one draw out of `width` at every step of a chain.
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
    # Sums of 100,000 equal terms in float32: rounding is no longer random, and 1e-5 is not to be had.
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
def test_it_is_exactly_one_where_the_formula_is_and_exactly_zero_there_too(seed, options):
    graph = random_digraph(seed + 50, num_vertices=12, num_edges=25)
    for fanouts in ([2], [2, 1], [-1, 2], [-1, -1, 1]):
        for num_seeds, batch_size in ((1, 1), (4, 3), (6, 6), (3, 7)):
            seeds = some_vertices(seed, 12, num_seeds)
            exact = reference.exact_inclusion_probability(
                graph.indptr.tolist(), graph.indices.tolist(), seeds.tolist(), fanouts, batch_size, **options
            )
            probability = inclusion_probability(graph, seeds, fanouts, batch_size, **options)
            for got, want in zip(probability.tolist(), exact):
                assert got == 1 if want == 1 else got < 1 or 1 - want < 1e-7  # nearer to 1 than float32 can say
                assert (got == 0) == (want == 0)
            assert_equal_to(probability, exact)


@pytest.mark.parametrize("seed", range(3))
def test_it_never_exceeds_one_on_a_dense_graph(seed):
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
    """In how many batches each vertex is drawn as a neighbour, be it a seed or not; and how many batches there were."""
    counts, num_batches = np.zeros(graph.num_vertices, dtype=np.int64), 0
    for key, seeds in enumerate(batches):
        n_id, edge_index, *_ = ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, fanouts, key, replace)
        counts[n_id[edge_index[0]].unique().numpy()] += 1
        num_batches += 1
    return counts, num_batches


def found_as_new(graph: Graph, batches, fanouts, replace: bool = False) -> tuple[np.ndarray, int]:
    """The same for vertices that are no seeds of the batch."""
    counts, num_batches = np.zeros(graph.num_vertices, dtype=np.int64), 0
    for key, seeds in enumerate(batches):
        n_id = ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, fanouts, key, replace)[0]
        counts[n_id[len(seeds) :].numpy()] += 1
        num_batches += 1
    return counts, num_batches


def assert_binomial(counts: np.ndarray, num_batches: int, probability: torch.Tensor) -> None:
    """5.5 standard deviations: one vertex in 26 million fails by chance."""
    p = probability.double().numpy()
    assert (counts[p == 0] == 0).all() and (counts[p == 1] == num_batches).all()
    sure = (p == 0) | (p == 1)
    z = (counts - num_batches * p)[~sure] / np.sqrt(num_batches * p * (1 - p))[~sure]
    assert len(z) > 0 and np.abs(z).max() < 5.5, f"off by {np.abs(z).max():.1f} standard deviations"


def shuffled_batches(seeds: torch.Tensor, batch_size: int, epochs: int):
    for epoch in range(epochs):
        yield from seeds[ops.permutation(len(seeds), epoch)].split(batch_size)


@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
def test_shuffled_batches_meet_vertices_as_often_as_the_formula_says_at_one_hop(replace):
    # Each leaf is listed by one seed, so what the formula takes as independent does not arise.
    degrees = [1, 2, 3, 5, 10, 40, 100]
    centres = torch.arange(len(degrees) * 6)
    sizes = torch.tensor(degrees * 6)
    target = centres.repeat_interleave(sizes)
    graph = Graph.from_edge_index(torch.stack([len(centres) + torch.arange(len(target)), target]), len(centres) + len(target))
    probability = inclusion_probability(graph, centres, [4], 6, replace=replace)
    counts, num_batches = found(graph, shuffled_batches(centres, 6, 1000), [4], replace)
    assert num_batches == 7000
    assert_binomial(counts, num_batches, probability)


@EXPAND
@pytest.mark.parametrize("replace", [False, True], ids=["", "replace"])
def test_independent_seeds_meet_vertices_as_often_as_the_formula_says_at_one_hop(replace, expand):
    # A vertex listed by several seeds: exact if seeds come independently of each other. There are no repeated edges,
    # which are drawn together, and no self-loops, which are drawn by the seed they lead to.
    edge_index = random_data(150, 900, seed=5, directed=True).edge_index.unique(dim=1)
    graph = Graph.from_edge_index(edge_index[:, edge_index[0] != edge_index[1]], 150)
    seeds = torch.arange(0, 150, 2)
    probability = inclusion_probability(graph, seeds, [3], 15, expand=expand, replace=replace)
    generator = np.random.default_rng(6)
    batches = [seeds[torch.from_numpy(generator.random(75) < 0.2)] for _ in range(8000)]
    count = found_as_new if expand == "frontier" else found
    assert_binomial(*count(graph, batches, [3], replace), probability)


def test_from_two_hops_on_the_formula_is_near_the_truth_and_ranks_well():
    # The law is about volume: rows missed with the formula's cache over rows missed with the counts' own.
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


# --- refusals ---------------------------------------------------------------------------------------------

GRAPH = Graph.from_edge_index(star(3), 4)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(expand="both"), r"expand must be 'frontier' or 'hop', got 'both'"),
        (dict(batch_size=0), r"batch_size must be >= 1, got 0"),
        (dict(batch_size=-3), r"batch_size must be >= 1, got -3"),
        (dict(seeds=torch.tensor([0, 4])), r"seeds must be in \[0, 4\), got 4 at position 1 of seed set 0"),
        (dict(seeds=[torch.tensor([0]), torch.tensor([2, 1, -1])]), r"seeds must be in \[0, 4\), got -1 at position 2 of seed set 1"),
        (dict(num_neighbors=[-2]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got -2"),
        (dict(num_neighbors=[1.5]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got 1.5"),
        (dict(num_neighbors=[True]), r"num_neighbors\[0\] must be an integer >= 0, or -1 for all neighbours, got True"),
        (dict(num_neighbors=[]), r"num_neighbors must have one entry per hop, got an empty list"),
        (dict(num_neighbors=5), r"num_neighbors must be a list of integers, one per hop, got 5"),
        (dict(num_neighbors="15,10"), r"num_neighbors must be a list of integers, one per hop, got '15,10'"),
    ],
)
def test_bad_arguments_are_refused_with_words(change, text):
    arguments = dict(graph=GRAPH, seeds=torch.tensor([0]), num_neighbors=[2], batch_size=1) | change
    with pytest.raises(ValueError, match=text):
        inclusion_probability(**arguments)


@pytest.mark.parametrize("fanout", [None, "x", float("nan"), float("inf")])
def test_a_fanout_that_is_no_number_is_refused_with_words(fanout):
    with pytest.raises(ValueError, match=r"num_neighbors\[0\] must be an integer >= 0"):
        check_fanouts([fanout])


@pytest.mark.parametrize("seeds", [torch.tensor([True, False, False, True]), torch.tensor([0.5])], ids=["mask", "float"])
def test_seeds_that_are_no_ids_are_refused(seeds):
    with pytest.raises((ValueError, TypeError), match="seeds"):
        inclusion_probability(GRAPH, seeds, [2], 1)


def test_fanouts_come_back_as_a_list_of_ints():
    assert check_fanouts((15, np.int64(10), -1, 5.0)) == [15, 10, -1, 5]
    assert all(type(f) is int for f in check_fanouts((np.int64(10), 5.0)))


# --- edge weights ----------------------------------------------------------------------------------------


def test_draw_weights_are_the_expected_draws_of_an_in_edge():
    """0 <- 1 <- 2 <- 3, and 4, 5, 6 into 1; one seed, 0, of two: half the steps expand it."""
    graph = Graph.from_edge_index(torch.tensor([[1, 2, 3, 4, 5, 6], [0, 1, 2, 1, 1, 1]]), 8)
    seeds = torch.tensor([0, 7])
    # By hand: v is expanded with probability q, and draws a given one of d neighbours with chance min(1, f / d).
    # 0: 1/2 * 1; 1: 1/2 * 2/4; 2: found with 1/4, * 1. Over the six edges the mean is (1/2 + 4 * 1/4 + 1/4) / 6 = 7/24.
    weights = draw_weights(graph, seeds, [2, 2, 2], 1, mean=70.0)
    assert weights.dtype == torch.int64 and weights.tolist()[:3] == [120, 60, 60]
    assert weights.min() >= 1, "a partitioner takes no zeros"
    assert draw_weights(graph, seeds, [2, 2, 2], 1, mean=70.0, most=100).tolist()[:3] == [100, 60, 60]


def test_draw_weights_of_a_graph_without_edges_or_seeds_are_ones():
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    assert draw_weights(empty, torch.tensor([0]), [2], 1).ge(1).all()
    path = Graph.from_edge_index(torch.tensor([[0], [1]]), 2)
    assert draw_weights(path, torch.empty(0, dtype=torch.int64), [2], 1).tolist() == [1, 1]
