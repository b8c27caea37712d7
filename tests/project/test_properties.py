"""Laws for any input: a right answer or a typed error that names the argument; never a crash, never a wrong batch.

Graphs, features, seeds, fanouts and invalid arguments are drawn by hypothesis. Every run draws the same few, and
``HYPOTHESIS_PROFILE=nightly`` draws many new ones. Answers are compared with tests/support/reference.py, and with
features that identify their vertices.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from directories import all_original_ids, assert_nothing_is_lost, mask_splits
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from operator_cases import CASES
from samplers import Sampler
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import Graph, NeighborLoader, ops
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.schedule import batch_key
from salientpp.vip.policies import cache_capacity, plan_cache

INT64 = np.iinfo(np.int64)
#: Absurd sizes, all too large for a machine to try to allocate them.
SIZES = [-1, 0, 1, 2, 31, 32, 33, 2**62, INT64.max, INT64.min]
EXTREMES = [*SIZES, 3, 4, 5, 99, 100, 2**31 - 1, 2**31]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]

keys = st.integers(INT64.min, INT64.max)
fanout_lists = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 7, 60, 2**31 - 1]), min_size=1, max_size=3)
few_fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 7]), min_size=1, max_size=3)


def few(examples: int):
    """Settings with fewer examples: ``examples`` of them where the profile has 60, otherwise in proportion."""
    return settings(max_examples=max(1, settings.default.max_examples * examples // 60))


@st.composite
def edge_lists(draw, least: int = 0, most: int = 20) -> tuple[Tensor, int]:
    """``edge_index`` int64 [2, E] and N: from an empty graph to stars, with self-loops, repeated edges and lone vertices."""
    num_vertices = draw(st.integers(least, most))
    if num_vertices == 0:
        return torch.empty(2, 0, dtype=torch.int64), 0
    busy = draw(st.integers(1, num_vertices))  # vertices from this number on are isolated
    num_edges = draw(st.integers(0, 50))
    edge_index = draw(arrays(np.int64, (2, num_edges), elements=st.integers(0, busy - 1)))
    match draw(st.sampled_from(["any", "any", "into 0", "out of 0", "loops"])):
        case "into 0":
            edge_index[1] = 0
        case "out of 0":
            edge_index[0] = 0
        case "loops":
            edge_index[1] = edge_index[0]
    return torch.from_numpy(edge_index), num_vertices


@st.composite
def graphs(draw, least: int = 0) -> Graph:
    edge_index, num_vertices = draw(edge_lists(least))
    graph = Graph.from_edge_index(edge_index, num_vertices)
    indices = graph.indices.long() if draw(st.booleans()) else graph.indices
    return Graph(graph.indptr, indices, graph.edge_id if draw(st.booleans()) else None)


def ids_below(num_vertices: int, most: int = 12):
    """Lists of int64 ids, with repeats, possibly empty."""
    if num_vertices == 0:
        return st.just(torch.empty(0, dtype=torch.int64))
    return st.lists(st.integers(0, num_vertices - 1), max_size=most).map(
        lambda ids: torch.tensor(ids, dtype=torch.int64)
    )


@st.composite
def rows(draw, num_rows: int) -> Tensor:
    """Features of any dtype and memory layout with random bits, including NaNs, infinities and negative zeros."""
    dtype, width = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 1, 2, 3, 16, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(256, (num_rows, 2 * width, size), dtype=torch.uint8, generator=generator)
    values = (raw[..., 0] > 127) if dtype == torch.bool else raw.view(dtype).reshape(num_rows, 2 * width)
    match draw(
        st.sampled_from(["contiguous", "strided", "transposed", "expanded", "read-only", "flat", "cube", "conjugate"])
    ):
        case "strided":
            return values[:, ::2]
        case "transposed":
            return values[:, :width].t().contiguous().t()
        case "expanded":
            return values[:1, :width].expand(num_rows, width)
        case "read-only" if dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            return read_only(values[:, :width])
        case "flat" if width:
            return values[:, 0].contiguous()
        case "cube":
            return values.view(num_rows, 2, width).contiguous()
        case "conjugate" if dtype == torch.complex64:
            return values[:, :width].contiguous().conj()
    return values[:, :width].contiguous()


def read_only(tensor: Tensor) -> Tensor:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not support read-only arrays
        return torch.from_numpy(array)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if all bits are the same, those of NaNs included."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """Contiguous uint8 copy of the bytes."""
    return tensor.resolve_conj().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


# --- the graph --------------------------------------------------------------------------------------------


@given(
    edge_lists(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(["plain", "strided", "transposed", "read-only"]),
)
def test_any_edge_list_becomes_the_graph_of_the_reference(edges, dtype, form):
    edge_index, num_vertices = edges
    given_edges = edge_index.to(dtype)
    if form == "strided":
        given_edges = given_edges.repeat_interleave(3, dim=1)[:, ::3]
    elif form == "transposed":
        given_edges = given_edges.t().contiguous().t()
    elif form == "read-only":
        given_edges = read_only(given_edges)
    graph = Graph.from_edge_index(given_edges, num_vertices)
    indptr, indices, edge_id = reference.csc_from_coo(edge_index.numpy(), num_vertices)
    assert graph.indptr.tolist() == indptr.tolist()
    assert graph.indices.tolist() == indices.tolist()
    assert graph.edge_id.tolist() == edge_id.tolist()
    turned = sorted((v, u) for u, v in reference.edges_of(indptr, indices))
    assert sorted(reference.edges_of(graph.transpose().indptr.tolist(), graph.transpose().indices.tolist())) == turned


@given(st.data())
def test_invalid_graph_arrays_are_refused_and_valid_ones_kept(data):
    """Small random arrays give either a graph of exactly these arrays, or a ValueError that names one of them."""
    values = st.one_of(st.integers(-1, 6), st.sampled_from(EXTREMES))
    indptr = torch.tensor(
        data.draw(st.one_of(st.lists(values, max_size=6), st.lists(st.integers(0, 4), max_size=5).map(sorted))),
        dtype=torch.int64,
    )
    indices = torch.tensor(data.draw(st.lists(values, max_size=5)), dtype=torch.int64)
    lists = [indptr[v : v + 2].tolist() for v in range(indptr.numel() - 1)]
    is_graph = (
        indptr.numel() >= 1
        and int(indptr[0]) == 0
        and all(a <= b for a, b in lists)
        and int(indptr[-1]) == indices.numel()
        and all(0 <= u < len(lists) for u in indices.tolist())
    )
    if is_graph:
        graph = Graph(indptr, indices)
        assert torch.equal(graph.indptr, indptr) and torch.equal(graph.indices, indices)
    else:
        with pytest.raises(ValueError, match="indptr|indices"):
            Graph(indptr, indices)


@pytest.mark.parametrize("num_vertices", [2**45, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2.5, "3", -1, float("nan")])
def test_an_impossible_number_of_vertices_is_refused_with_an_error(num_vertices):
    with pytest.raises((ValueError, TypeError), match="num_vertices|vertices"):
        Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), num_vertices)


# --- the sampler ------------------------------------------------------------------------------------------


def assert_obeys_the_hops(graph: Graph, out, seeds: Tensor, fanouts: list[int], replace: bool) -> None:
    """Checks everything that a valid sample must satisfy, except the random choice itself."""
    n_id, num_nodes, num_edges = out.node, out.num_sampled_nodes, out.num_sampled_edges
    assert torch.equal(n_id[: seeds.numel()], seeds)
    found = n_id[seeds.numel() :]
    assert found.unique().numel() == found.numel() and not torch.isin(found, seeds).any(), "only seeds may be repeated"
    assert sum(num_nodes) == n_id.numel() and sum(num_edges) == out.row.numel() == out.col.numel() == out.edge.numel()
    assert len(num_nodes) == len(fanouts) + 1 and num_nodes[0] == seeds.numel()
    numbers = torch.arange(graph.num_edges) if graph.edge_id is None else graph.edge_id
    where = torch.empty_like(numbers)
    where[numbers] = torch.arange(graph.num_edges)
    at = where[out.edge]
    assert torch.equal(graph.indices[at].long(), n_id[out.row]), "wrong source of an edge"
    assert bool(((at >= graph.indptr[n_id[out.col]]) & (at < graph.indptr[n_id[out.col] + 1])).all()), (
        "wrong target of an edge"
    )
    degree = graph.in_degree()[n_id].tolist()
    drawn = torch.bincount(out.col, minlength=n_id.numel()).tolist()
    begin = edges_before = 0
    for hop, fanout in enumerate(fanouts):
        end = begin + num_nodes[hop]
        for i in range(begin, end):
            d = degree[i]
            assert drawn[i] == (d if fanout == -1 else min(d, fanout) if not replace else fanout if d else 0)
        hop_edges = slice(edges_before, edges_before + num_edges[hop])
        assert bool(((out.col[hop_edges] >= begin) & (out.col[hop_edges] < end)).all()), (
            "a hop expands only vertices that the last hop found"
        )
        assert set(range(end, end + num_nodes[hop + 1])) <= set(out.row[hop_edges].tolist()), (
            "a hop finds only vertices that it drew"
        )
        if not replace or fanout == -1:
            pairs = torch.stack([out.col[hop_edges], at[hop_edges]])
            assert pairs.unique(dim=1).size(1) == pairs.size(1), "without replacement edges are distinct"
        begin, edges_before = end, edges_before + num_edges[hop]
    assert not any(drawn[begin:])


@given(graphs(), st.data(), fanout_lists, keys, st.booleans())
def test_any_sample_obeys_the_hops_and_equals_the_reference(graph, data, fanouts, key, replace):
    if replace:
        fanouts = [min(fanout, 7) for fanout in fanouts]
    seeds = data.draw(ids_below(graph.num_vertices))
    out = Sampler(graph, fanouts, replace).sample(seeds, key)
    assert_obeys_the_hops(graph, out, seeds, fanouts, replace)
    edge_id = None if graph.edge_id is None else graph.edge_id.tolist()
    expected = reference.sample_neighbors(
        graph.indptr.tolist(), graph.indices.tolist(), edge_id, seeds.tolist(), fanouts, key, replace
    )
    assert (out.node.tolist(), [out.row.tolist(), out.col.tolist()], out.edge.tolist()) == expected[:3]
    assert (out.num_sampled_nodes, out.num_sampled_edges) == expected[3:]
    vertices = ops.sample_vertices(graph.indptr, graph.indices, seeds, fanouts, key, replace)
    assert vertices.tolist() == expected[0], "without edges, the draws are the same"


STAR_LEAVES = 10**6


@pytest.fixture(scope="module")
def star(tmp_path_factory) -> Graph:
    """Star of a million leaves with edges into vertex 0, in read-only memory maps."""
    folder = tmp_path_factory.mktemp("star")
    np.save(folder / "indptr.npy", np.concatenate([[0], np.full(STAR_LEAVES + 1, STAR_LEAVES)]))
    np.save(folder / "indices.npy", np.arange(1, STAR_LEAVES + 1, dtype=np.int32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Graph(
            *(torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("indptr", "indices"))
        )


@pytest.mark.parametrize("budget", [ops.MAP_BUDGET_BYTES, 0], ids=["stamp_map", "hash_map"])
@pytest.mark.parametrize("fanout", [-1, 1, 48, 49, 1000, STAR_LEAVES - 1, STAR_LEAVES, STAR_LEAVES + 1, 2**31 - 1])
def test_samples_of_a_star_of_a_million_leaves_are_right(star, fanout, budget):
    seeds = torch.tensor([0, 7, 0])
    n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
        star.indptr, star.indices, None, seeds, [fanout, fanout], 3, map_budget_bytes=budget
    )
    drawn = STAR_LEAVES if fanout == -1 else min(fanout, STAR_LEAVES)
    assert num_edges.tolist() == [2 * drawn, 0], "a repeated seed draws the same edges again"
    first, second = edge_index[:, :drawn], edge_index[:, drawn:]
    assert bool((first[1] == 0).all()) and bool((second[1] == 2).all()) and torch.equal(first[0], second[0])
    assert e_id[:drawn].unique().numel() == drawn
    assert torch.equal(n_id[edge_index[0]], star.indices[e_id].long())
    assert n_id[3:].unique().numel() == n_id.numel() - 3 == num_nodes[1] == drawn - int((n_id[first[0]] == 7).any())


def test_samples_of_a_star_with_replacement_or_reversed_edges_are_right(star):
    out = Sampler(star, [3 * STAR_LEAVES, -1], replace=True).sample(torch.tensor([0]), 1)
    assert out.num_sampled_edges == [3 * STAR_LEAVES, 0]
    # Each leaf is missed with probability 1 / e^3 = 0.0498, nearly independently: about 950 213 +- 200 are found.
    assert abs(out.num_sampled_nodes[1] - STAR_LEAVES * (1 - math.exp(-3))) < 2000
    out = Sampler(star.transpose(), [2, 2]).sample(torch.arange(STAR_LEAVES + 1), 1)
    assert out.num_sampled_nodes == [STAR_LEAVES + 1, 0, 0] and out.num_sampled_edges == [STAR_LEAVES, 0]


def test_inclusion_probabilities_of_a_star_of_a_million_leaves_are_right(star):
    for expand in ("frontier", "hop"):
        vip = salientpp.inclusion_probability(star, torch.tensor([0]), [5, 5], 1, expand=expand)
        torch.testing.assert_close(vip[1:], torch.full((STAR_LEAVES,), 5 / STAR_LEAVES), rtol=1e-6, atol=0)
        assert vip[0] == 0
    # Every leaf is a seed and draws vertex 0: one of B = 1000 finds it with probability 1 - (1 - 1e-3)^1e6 = 1.
    vip = salientpp.inclusion_probability(star.transpose(), torch.arange(1, STAR_LEAVES + 1), [1], 1000)
    assert vip[0] == 1 and not vip[1:].any()


# --- vertex inclusion probabilities -----------------------------------------------------------------------


@given(
    graphs(),
    st.data(),
    fanout_lists,
    st.integers(1, 20),
    st.sampled_from(["frontier", "hop"]),
    st.booleans(),
    st.booleans(),
)
def test_inclusion_probabilities_of_any_graph_equal_the_reference(
    graph, data, fanouts, batch_size, expand, include_seeds, replace
):
    # In the formula, seeds are a set, so repeats are removed.
    seed_sets = data.draw(st.lists(ids_below(graph.num_vertices).map(Tensor.unique), max_size=10))
    got = salientpp.inclusion_probability(
        graph, seed_sets, fanouts, batch_size, expand=expand, include_seeds=include_seeds, replace=replace
    )
    assert got.dtype == torch.float32 and got.shape == (len(seed_sets), graph.num_vertices)
    assert bool(((got >= 0) & (got <= 1)).all())
    for row, seeds in zip(got, seed_sets):
        want = reference.inclusion_probability(
            graph.indptr.tolist(),
            graph.indices.tolist(),
            seeds.tolist(),
            fanouts,
            batch_size,
            expand=expand,
            include_seeds=include_seeds,
            replace=replace,
        )
        np.testing.assert_allclose(row, np.minimum(want, 1), rtol=1e-4, atol=1e-6)


@given(st.data())
def test_seeds_of_any_kind_give_probabilities_or_a_typed_error(data):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]]), 3)
    seeds = data.draw(hostile(torch.tensor([0, 2])))
    result, error = outcome(lambda: salientpp.inclusion_probability(graph, seeds, [2, 1], 1))
    if error is not None:
        assert "seed" in str(error), error
    elif isinstance(seeds, Tensor):
        assert torch.equal(result, salientpp.inclusion_probability(graph, seeds.long().flatten().clone(), [2, 1], 1))


@pytest.mark.parametrize(
    "batch_size", [0, -1, 2.5, "3", None, float("nan"), float("inf"), True, 2**63, 2**70, -(2**70)]
)
def test_an_invalid_batch_size_is_refused_by_name(tmp_path, batch_size):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    with pytest.raises((ValueError, TypeError), match="batch_size must be"):
        salientpp.inclusion_probability(graph, torch.tensor([0]), [2], batch_size)
    with pytest.raises((ValueError, TypeError), match="batch_size must be"):
        salientpp.partition(
            Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3), 1, tmp_path / "d", [2], batch_size
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fanout", [-2, 2.5, "3", None, float("nan"), float("inf"), True, 2**31, 2**70, 1e300, [2]])
def test_an_invalid_fanout_is_refused_by_name_everywhere(tmp_path, fanout):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    for use in (
        lambda fanouts: salientpp.inclusion_probability(Graph.from_data(data), torch.tensor([0]), fanouts, 1),
        lambda fanouts: NeighborLoader(data, fanouts),
        lambda fanouts: salientpp.partition(data, 1, tmp_path / "d", fanouts, 1),
        lambda fanouts: analyze(data, Batches(num_neighbors=fanouts), parts=1),
    ):
        with pytest.raises(ValueError, match=r"num_neighbors\[1\] must be"):
            use([1, fanout])
    assert list(tmp_path.iterdir()) == []


# --- caches -----------------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False)


@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.floats(0, 8))
def test_any_cache_plan_equals_the_reference(data, sizes, alpha):
    book = PartitionBook(torch.tensor([0, *sizes]).cumsum(0))
    scores = data.draw(
        st.lists(st.one_of(FLOATS, st.sampled_from([0.0, 1.0, math.inf])), min_size=sum(sizes), max_size=sum(sizes))
    )
    part_id = data.draw(st.integers(0, len(sizes) - 1))
    capacity = cache_capacity(alpha, book)
    exact = alpha * sum(sizes) / len(sizes)
    assert capacity <= exact + 1e-6 < capacity + 1 + 2e-6
    got = plan_cache(torch.tensor(scores, dtype=torch.float32), book, part_id, alpha)
    begin, end = book.range_of(part_id)
    assert got.tolist() == reference.plan_cache(scores, begin, end, capacity)
    if scores:
        spoiled = torch.tensor(scores, dtype=torch.float32)
        spoiled[data.draw(st.integers(0, len(scores) - 1))] = math.nan
        with pytest.raises(ValueError, match="scores must be numbers, got nan at vertex"):
            plan_cache(spoiled, book, part_id, alpha)


# --- the loader -------------------------------------------------------------------------------------------


@st.composite
def whole_data(draw, least: int = 0) -> Data:
    """A ``Data`` with vertex and edge rows of any dtype and layout; ``who[v] = v`` and ``which[e] = e``."""
    edge_index, num_vertices = draw(edge_lists(least))
    data = Data(edge_index=edge_index, num_nodes=num_vertices, who=torch.arange(num_vertices))
    data.which_edge_attr = torch.arange(edge_index.size(1))
    # If N = E, PyG can tell only by an attribute's name whether it belongs to vertices or edges.
    data.x = draw(rows(num_vertices))
    data.edge_attr = draw(rows(edge_index.size(1)))
    return data


@given(st.data(), few_fanouts, st.integers(1, 9), st.booleans(), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
def test_any_data_gives_right_batches(data, fanouts, batch_size, replace, device_rows, shuffle):
    whole = data.draw(whole_data())
    before = whole.clone()
    seeds = data.draw(st.one_of(st.none(), ids_below(whole.num_nodes)))
    form = data.draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8, "mask", "list", "numpy"]))
    nodes = seeds
    if seeds is not None:
        if form == "mask":
            nodes = torch.zeros(whole.num_nodes, dtype=torch.bool)
            nodes[seeds] = True
            seeds = nodes.nonzero().flatten()
        else:
            nodes = seeds.tolist() if form == "list" else seeds.numpy() if form == "numpy" else seeds.to(form)
    loader = NeighborLoader(
        whole,
        fanouts,
        nodes,
        replace=replace,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=data.draw(keys),
        device_rows=device_rows,
        num_workers=data.draw(st.sampled_from([0, 0, 2])),
        depth=data.draw(st.sampled_from([1, 2, 10])),
    )
    graph, given_seeds = Graph.from_data(whole), []
    for batch in loader:
        seeds_of_batch = batch.n_id[: batch.batch_size]
        given_seeds += seeds_of_batch.tolist()
        assert_obeys_the_hops(graph, sampler_output(batch), seeds_of_batch, fanouts, replace)
        assert torch.equal(batch.who, batch.n_id)
        assert torch.equal(whole.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
        assert same_bits(batch.x, whole.x[batch.n_id])
        assert same_bits(batch.edge_attr, whole.edge_attr[batch.e_id])
    expected = list(range(whole.num_nodes)) if seeds is None else seeds.tolist()
    assert (sorted(given_seeds) == sorted(expected)) if shuffle else (given_seeds == expected)
    assert all(same_bits(whole[name], before[name]) for name in ("x", "edge_attr", "edge_index", "who"))


@given(st.data(), few_fanouts, st.booleans())
def test_any_weights_give_right_batches_or_an_error_that_names_them(data, fanouts, replace):
    edge_index, num_vertices = data.draw(edge_lists(1))
    odd = st.sampled_from([0.0, -0.0, 5e-324, 1e-30, 1e308, math.nan, math.inf, -math.inf, -1.0])
    values = st.one_of(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), odd)
    weights = torch.tensor(
        data.draw(st.lists(values, min_size=edge_index.size(1), max_size=edge_index.size(1))), dtype=torch.float64
    )
    if data.draw(st.booleans()):
        weights = weights.nan_to_num(1.0, 1.0, 1.0).abs().clamp(max=1e9)
    weights = weights.to(data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])))
    whole = Data(edge_index=edge_index, num_nodes=num_vertices, weight=weights)
    make = lambda: list(NeighborLoader(whole, fanouts, batch_size=4, replace=replace, weight_attr="weight", seed=1))  # noqa: E731
    if bool((weights >= 0).all()) and bool(weights.double().sum().isfinite()):
        for batch in make():
            assert_obeys_the_hops(
                Graph.from_data(whole), sampler_output(batch), batch.n_id[: batch.batch_size], fanouts, replace
            )
    else:
        with pytest.raises(ValueError, match="weight"):
            make()


@given(st.data(), few_fanouts, st.sampled_from(["uniform", "last"]))
def test_no_tree_sees_a_vertex_of_a_later_time(data, fanouts, strategy):
    edge_index, num_vertices = data.draw(edge_lists(1))
    times = st.one_of(st.integers(-3, 3), st.sampled_from([INT64.min, INT64.max]))
    time = torch.tensor(data.draw(st.lists(times, min_size=num_vertices, max_size=num_vertices)), dtype=torch.int64)
    whole = Data(edge_index=edge_index, num_nodes=num_vertices, time=time)
    graph, given_seeds = Graph.from_data(whole), []
    for batch in NeighborLoader(
        whole,
        fanouts,
        batch_size=4,
        disjoint=True,
        time_attr="time",
        temporal_strategy=strategy,
        seed=1,
        replace=data.draw(st.booleans()),
    ):
        given_seeds += batch.n_id[: batch.batch_size].tolist()
        assert torch.equal(batch.batch[: batch.batch_size], torch.arange(batch.batch_size))
        clock = time[batch.n_id[: batch.batch_size]]
        assert bool((time[batch.n_id] <= clock[batch.batch]).all())
        pairs = torch.stack([batch.batch, batch.n_id])
        assert pairs.unique(dim=1).size(1) == pairs.size(1), "a vertex is at most once in a tree"
        assert torch.equal(whole.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]]), (
            "an edge joins two trees"
        )
        for i in range(batch.batch_size):
            lists = graph.indices[graph.indptr[batch.n_id[i]] : graph.indptr[batch.n_id[i] + 1]].long()
            seen = int((time[lists] <= clock[i]).sum())
            drawn = int((batch.edge_index[1] == i).sum())
            assert drawn == seen if fanouts[0] == -1 else (drawn >= min(seen, fanouts[0]))
    assert given_seeds == list(range(num_vertices))


def sampler_output(batch: Data):
    """The batch in the form of a sampler's output."""
    from torch_geometric.sampler import SamplerOutput

    row, col = batch.edge_index
    return SamplerOutput(
        node=batch.n_id,
        row=row,
        col=col,
        edge=batch.e_id,
        num_sampled_nodes=batch.num_sampled_nodes,
        num_sampled_edges=batch.num_sampled_edges,
    )


# --- dataset directories ----------------------------------------------------------------------------------


@few(20)
@given(st.data())
def test_any_graph_can_be_read_back_from_its_directory(tmp_path, data):
    whole = data.draw(whole_data(least=1))
    del whole.which_edge_attr
    whole.number = torch.arange(whole.num_nodes)
    num_vertices = whole.num_nodes
    for name in ("train", "val", "test"):
        whole[f"{name}_mask"] = torch.from_numpy(data.draw(arrays(np.bool_, num_vertices)))
    num_parts = data.draw(st.integers(1, num_vertices + 3))
    method = data.draw(st.sampled_from(["metis", "random", "given"]))
    if method == "given":
        method = torch.from_numpy(data.draw(arrays(np.int64, num_vertices, elements=st.integers(0, num_parts - 1))))
    features = {name: whole[name] for name in ("x", "edge_attr")}
    root = Path(tempfile.mkdtemp(dir=tmp_path)) / "d"

    def write() -> None:
        salientpp.partition(whole, num_parts, root, data.draw(few_fanouts), data.draw(st.integers(1, 9)), method=method)

    if num_parts > num_vertices and isinstance(method, str):
        with pytest.raises(
            ValueError, match=f"num_parts must be at most the number of vertices, {num_vertices}, got {num_parts}"
        ):
            write()
        assert list(root.parent.iterdir()) == []
        return
    write()
    part = salientpp.load(root, verify="full")
    original = all_original_ids(part)
    assert same_bits(torch.cat([part.node_rows(p)["x"] for p in range(num_parts)]), features["x"][original])
    # assert_nothing_is_lost identifies edges by their numbers.
    number = part.edge_rows()["edge_attr"]
    assert number.dtype == features["edge_attr"].dtype
    del whole.x, whole.edge_attr
    assert_nothing_is_lost(whole, part, mask_splits(whole))
    for p in range(num_parts):
        assert bool(((part.vip(p) >= 0) & (part.vip(p) <= 1)).all())


# --- the analysis -----------------------------------------------------------------------------------------


@few(10)
@given(st.data())
def test_the_analysis_of_any_small_graph_counts_what_batches_read(data):
    edge_index, num_vertices = data.draw(edge_lists(least=1, most=10))
    num_parts = data.draw(st.integers(1, num_vertices))
    whole = Data(edge_index=edge_index, num_nodes=num_vertices, x=torch.zeros(num_vertices, 2))
    whole.train_mask = torch.from_numpy(data.draw(arrays(np.bool_, num_vertices)))
    assume(bool(whole.train_mask.any()))
    fanouts, batch_size = data.draw(few_fanouts), data.draw(st.integers(1, 5))
    analysis = analyze(
        whole,
        Batches(num_neighbors=fanouts, batch_size=batch_size, epochs=2, seed=1),
        Ways(
            replication_factors=[0, 0.5, 20],
            policies=["vip", "degree", "halo", "wpr", "paths", "simulation", "random", "oracle"],
        ),
        parts=num_parts,
        method="random",
    )
    rows_by_policy: dict[str, list[float]] = {}
    for volume in analysis.of(way="cache"):
        assert volume.remote_rows_per_epoch >= 0
        assert volume.predicted_rows_per_epoch is None or volume.predicted_rows_per_epoch >= 0
        rows_by_policy.setdefault(volume.policy, []).append(volume.remote_rows_per_epoch)
    for policy, counts in rows_by_policy.items():
        assert counts == sorted(counts, reverse=True), policy
        assert counts[0] == next(iter(rows_by_policy.values()))[0], "without a cache all policies fetch the same"
    assert rows_by_policy["random"][-1] == 0, "a cache of everything fetches nothing"
    if num_parts == 1:
        assert not any(map(any, rows_by_policy.values()))


# --- broken arguments of operators ------------------------------------------------------------------------


@st.composite
def hostile(draw, value):
    """A value close to ``value`` that is wrong in one way, or right in an unusual form."""
    if isinstance(value, Tensor):
        kind = draw(st.sampled_from([
            "dtype", "shorter", "longer", "empty", "strided", "expanded", "row", "scalar", "meta", "sparse", "read-only", "extreme", "extreme",
            "extreme", "no tensor",
        ]))  # fmt: skip
        match kind:
            case "dtype":
                return value.to(draw(st.sampled_from([*DTYPES, torch.uint16, torch.uint64])))
            case "shorter":
                return value[:-1] if value.dim() else value
            case "longer":
                return torch.cat([value, value[-1:]]) if value.dim() else value
            case "empty":
                return value[:0] if value.dim() else value
            case "strided":
                return torch.stack([value, value], -1)[..., 0]
            case "expanded":
                return value[:1].expand(value.shape) if value.dim() and value.size(0) else value
            case "row":
                return value.unsqueeze(0)
            case "scalar":
                return value.flatten()[0].clone() if value.numel() else torch.zeros((), dtype=value.dtype)
            case "meta":
                return value.to("meta")
            case "sparse":
                return value.to_sparse() if value.dtype != torch.uint16 else value  # torch has none of uint16
            case "read-only":
                return read_only(value) if value.dtype != torch.bfloat16 else value
            case "extreme" if value.numel() and not (
                value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool
            ):
                changed, info = value.clone(), torch.iinfo(value.dtype)
                extreme = draw(st.sampled_from(EXTREMES))
                changed.view(-1)[draw(st.integers(0, value.numel() - 1))] = max(info.min, min(info.max, extreme))
                return changed
        return draw(st.sampled_from([None, "tensor", 3, [0, 1]]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from([*SIZES, None, "3", 2.5, 2**70]))
    if isinstance(value, list) and any(isinstance(entry, Tensor) for entry in value):
        if draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from([value[:-1], [*value, value[-1]], [], None]))
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(hostile(value[at])), *value[at + 1 :]]
    if isinstance(value, list):
        return draw(
            st.one_of(
                st.lists(st.sampled_from([-2, -1, 0, 1, 3, 1000, 2**31, INT64.max, INT64.min, 2**70]), max_size=3),
                st.none(),
            )
        )
    return draw(st.sampled_from([None, torch.tensor([0]), torch.tensor([0.5]), 3]))


def outcome(call):
    """(result, None) or (None, error); an unexpected type of error fails the test."""
    try:
        return call(), None
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        return None, error


def copy_of(arguments):
    return [
        copy_of(a) if isinstance(a, list) else a.clone() if isinstance(a, Tensor) and a.device.type == "cpu" else a
        for a in arguments
    ]


def tensors_in(value) -> list[Tensor]:
    return (
        [value]
        if isinstance(value, Tensor)
        else [t for entry in value for t in tensors_in(entry)]
        if isinstance(value, list)
        else []
    )


def equal(a, b) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.device == b.device and (a.device.type == "meta" or same_bits(a.to_dense(), b.to_dense()))
    return a is b or a == b


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(st.data())
def test_an_operator_answers_or_names_the_wrong_argument_and_changes_no_input(name, data):
    check_operator(name, data)


@pytest.mark.rare
@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_an_operator_answers_or_names_the_wrong_argument_in_more_examples(name, data):
    check_operator(name, data)


def check_operator(name, data):
    """Makes one or two arguments invalid. Sanitizers (make sanitize) detect reads and writes outside the arrays."""
    arguments = list(data.draw(st.sampled_from(CASES[name]))())
    schema = getattr(torch.ops.salientpp, name).default._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    places = data.draw(st.lists(st.integers(0, len(arguments) - 1), min_size=1, max_size=2, unique=True))
    for place in places:
        arguments[place] = data.draw(hostile(arguments[place]))
    before = copy_of(arguments)
    _, error = outcome(lambda: getattr(torch.ops.salientpp, name)(*arguments))
    for argument, old, is_written in zip(arguments, before, written):
        assert equal(argument, old) or (is_written and error is None)
    if error is not None:
        words = {argument.name for argument in schema.arguments} | {
            "edge_index",
            "Could not run",
            "no tensor arguments",
            "cannot allocate",
            "meta",
            "Meta tensors",
        }
        if name == "join_drawn":  # its sources were read from the lists of their owners, so the error names these
            words.add("indices is corrupt")
        assert any(word in str(error) for word in words) or isinstance(error, MemoryError), error


@given(st.data())
def test_rows_of_any_dtype_and_layout_are_gathered_bit_for_bit(data):
    source = data.draw(rows(data.draw(st.integers(0, 9))))
    index = data.draw(ids_below(source.size(0)))
    out = torch.zeros((index.numel(), *source.shape[1:]), dtype=source.dtype)
    _, error = outcome(lambda: ops.gather_rows(source, index, out))
    if error is None:
        assert same_bits(out, source[index])
    else:
        assert not source.is_contiguous() and "source and out must be contiguous" in str(error)


@given(st.data(), st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_the_tier_of_any_id_equals_the_reference(data, sizes):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    num_vertices, part_id = int(offsets[-1]), data.draw(st.integers(0, len(sizes) - 1))
    n_id = data.draw(ids_below(num_vertices, 40))
    gpu = data.draw(ids_below(sizes[part_id], 20)).unique()
    cache = data.draw(ids_below(num_vertices, 40)).unique()
    sets = [ops.pack_id_set(gpu, sizes[part_id])], [ops.pack_id_set(cache, num_vertices)]
    position, slot, counts = ops.look_up(n_id, offsets, part_id, *sets)
    want = reference.look_up(n_id.tolist(), offsets.tolist(), part_id, gpu.tolist(), cache.tolist())
    want["others"] = [pair for owner in want["remote"] for pair in owner]
    for tier, at, row in zip(("device", "host", "cache", "others"), position, slot, strict=True):
        assert list(zip(at.tolist(), row.tolist())) == want[tier], tier
    assert counts.tolist() == [len(owner) for owner in want["remote"]]


@given(st.data())
def test_rows_to_fetch_are_those_not_found_in_other_tiers(data):
    num_vertices, size = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_vertices), max_size=40)))
    offsets = torch.tensor([0, *cuts, num_vertices])
    remote_id = data.draw(ids_below(num_vertices, size))
    position = data.draw(ids_below(100, remote_id.numel()))[: remote_id.numel()]
    remote_id = remote_id[: position.numel()]
    found = torch.tensor(data.draw(st.lists(st.booleans(), min_size=position.numel(), max_size=position.numel())), dtype=torch.bool)  # fmt: skip
    hit_position, left, ids, counts = ops.take_hits(position, remote_id, offsets, found.nonzero().flatten())
    assert hit_position.equal(position[found]) and left.equal(position[~found]) and ids.equal(remote_id[~found])
    for part_id, count in enumerate(counts.tolist()):
        assert count == int(((ids >= offsets[part_id]) & (ids < offsets[part_id + 1])).sum())


@given(st.integers(0, 300), keys)
@example(0, 0)
def test_any_permutation_equals_the_reference(size, key):
    assert ops.permutation(size, key).tolist() == reference.permutation(size, key)


def test_a_batch_key_is_a_signed_64_bit_integer_for_any_fields():
    for fields in [(0, 0, 0, 0), (2**70, -1, 3, 4), (-(2**70), 2**63, 0, 2**64)]:
        assert INT64.min <= batch_key(*fields) <= INT64.max
