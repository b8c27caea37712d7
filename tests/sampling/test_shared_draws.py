"""Laws of shared draws: in both kernels, each vertex still draws a uniform subset of its list. Draws that vertices, or batches of a block, share
are the same for all of them."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import distributed
import numpy as np
import pytest
import reference
import torch
from draws import (
    BOTH_MAPS,
    as_lists,
    many_stars,
    random_graph,
    random_seeds,
    same,
    subsets,
)
from graphs import random_data, random_hetero
from one_process import FANOUTS, TYPED_FANOUTS, check_batches, homogeneous, typed_data, whole
from reference import FALSE_ALARM
from samplers import Sampler, TypedSampler
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PyGLoader
from torch_geometric.sampler import NodeSamplerInput

import salientpp
from salientpp import Graph, LinkNeighborLoader, NeighborLoader, NeighborSampler, ops
from salientpp.graph.typed import TypedGraph
from salientpp.sampling.schedule import batch_key, batch_keys

LONGEST = 1000  # longest list whose draws are shared


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def plain(graph: Graph, fanouts: list[int], seeds: Tensor, key: int) -> Any:
    return Sampler(graph, fanouts, shared=True).sample(seeds, key)


def typed(graph: Graph, fanouts: list[int], seeds: Tensor, key: int) -> Any:
    return TypedSampler(TypedGraph.of(graph), [fanouts], shared=True).sample({None: seeds}, key)


def trees(graph: Graph, fanouts: list[int], seeds: Tensor, key: int) -> Any:
    return TypedSampler(TypedGraph.of(graph), [fanouts], disjoint=True, shared=True).sample({None: seeds}, key)


KERNELS = pytest.mark.parametrize("sample", [plain, typed, trees], ids=lambda f: f.__name__)


def draws_of(sample: Any, graph: Graph, degree: int, fanout: int, copies: int, keys: Any) -> np.ndarray:
    """Returns [draws, fanout] places in the lists of equal stars."""
    drawn = [sample(graph, [fanout], torch.arange(copies), key).edge for key in keys]
    return (torch.cat(drawn).view(-1, fanout) % degree).numpy()


# --- the slow reference -----------------------------------------------------------------------------------


@BOTH_MAPS
@pytest.mark.parametrize("seed", range(6))
def test_a_sample_equals_the_slow_reference(seed, budget):
    _, graph = random_graph(seed)  # it has parallel edges
    for fanouts in ([3], [5, 3, 2], [2, -1, 1], [100, 60], [0, 4]):
        seeds = random_seeds(seed + 200, graph.num_vertices, repeats=True)
        edge_id = None if graph.edge_id is None else graph.edge_id
        out = ops.sample_neighbors(
            graph.indptr, graph.indices, edge_id, seeds, fanouts, seed, False, budget, shared=True
        )
        vertices = ops.sample_vertices(graph.indptr, graph.indices, seeds, fanouts, seed, False, budget, shared=True)
        assert torch.equal(vertices, out[0])
        arrays = graph.indptr.tolist(), graph.indices.tolist(), None if edge_id is None else edge_id.tolist()
        want = reference.sample_neighbors(*arrays, seeds.tolist(), fanouts, seed, shared=True)
        assert as_lists(out) == list(want)


@pytest.mark.parametrize("links", [False, True], ids=["", "links"])
def test_a_batch_of_many_blocks_equals_the_slow_reference(links):
    data = random_data(3000, 40_000, directed=True)
    hub = torch.stack(
        [torch.arange(LONGEST + 1), torch.full((LONGEST + 1,), 7)]
    )  # one list that is too long, and one that is not
    edge = torch.stack([torch.arange(LONGEST), torch.full((LONGEST,), 8)])
    keep = (data.edge_index[1] != 7) & (data.edge_index[1] != 8)
    data.edge_index = torch.cat([data.edge_index[:, keep], hub, edge], 1)
    graph = Graph.from_data(data, linked=links)
    assert (graph.links is not None) == links
    seeds = torch.cat([long(7, 8), torch.randperm(3000)[:500]])
    for fanouts in ([4, 3], [70, 10]):
        out = plain(graph, fanouts, seeds, 77)
        at = torch.sort(data.edge_index[1], stable=True).indices
        indptr = torch.cat([long(0), torch.bincount(data.edge_index[1], minlength=3000).cumsum(0)])
        want = reference.sample_neighbors(
            indptr.tolist(), data.edge_index[0, at].tolist(), at.tolist(), seeds.tolist(), fanouts, 77, shared=True
        )
        assert [out.node.tolist(), [out.row.tolist(), out.col.tolist()], out.edge.tolist()] == list(want[:3])


@pytest.mark.parametrize("seed", range(3))
def test_both_kernels_draw_the_same(seed):
    _, graph = random_graph(seed + 50, 400, 6000)
    seeds = random_seeds(seed, 400, repeats=True)
    for fanouts in ([3, 2], [10, 10, 5], [-1, 4]):
        a, b = plain(graph, fanouts, seeds, seed), typed(graph, fanouts, seeds, seed)
        assert same([a.node, a.row, a.col, a.edge], [b.node, b.row, b.col, b.edge])


# --- draws that a thread remembers ------------------------------------------------------------------------


def test_remembered_draws_do_not_change_samples():
    graphs = [random_graph(seed, 300, 9000)[1] for seed in (1, 2)]
    fanouts = [[3, 2], [10, 5], [22, 4], [23, 2], [60], [-1, 3]]
    turns = [(0, 0, 5), (0, 0, 5), (1, 0, 5), (0, 1, 5), (0, 0, 6)]  # graph, fanouts, key
    turns += torch.stack([torch.randint(high, (60,)) for high in (2, len(fanouts), 3)], 1).tolist()
    for number, which, key in turns:
        graph, seeds = graphs[number], torch.randint(300, (20,))
        given = (graph.indptr, graph.indices, graph.edge_id, seeds, fanouts[which], key)
        remembering = ops.sample_neighbors(*given, shared=True, graph_number=graph.number)
        assert same(remembering, ops.sample_neighbors(*given, shared=True))
        vertices = ops.sample_vertices(*given[:2], *given[3:], shared=True, graph_number=graph.number)
        assert torch.equal(vertices, remembering[0])


def test_writing_to_a_graph_changes_later_samples():
    _, graph = random_graph(3, 300, 9000)
    seeds = torch.arange(50)
    plain(graph, [4, 3], seeds, 9)
    graph.indices.copy_(graph.indices.flip(0))
    written = Graph(graph.indptr, graph.indices.clone(), graph.edge_id)
    ours, want = plain(graph, [4, 3], seeds, 9), plain(written, [4, 3], seeds, 9)
    assert same([ours.node, ours.edge], [want.node, want.edge])


def test_no_two_graphs_have_a_number_in_common():
    _, graph = random_graph(4)
    with torch.inference_mode():  # tensors made here do not count writes
        inferred = Graph(graph.indptr.clone(), graph.indices.clone())
    graphs = [graph, inferred, Graph(graph.indptr, graph.indices), copy.deepcopy(graph)]
    graphs += [pickle.loads(pickle.dumps(each)) for each in graphs]
    numbers = [each.number for each in graphs]
    assert numbers == [each.number for each in graphs]
    graph.indices.zero_()
    numbers.append(graph.number)
    assert len(set(numbers)) == 9
    assert min(numbers) >= 1


# --- exactly uniform --------------------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("degree, fanout", [(2, 1), (3, 2), (5, 3), (6, 2), (8, 4)])
def test_every_subset_of_neighbours_is_equally_likely(sample, degree, fanout):
    graph = many_stars(degree, 200)
    num_subsets = len(list(itertools.combinations(range(degree), fanout)))
    draws = draws_of(sample, graph, degree, fanout, 200, range(max(60, 25 * num_subsets // 200)))
    assert all(len(set(row)) == fanout for row in draws.tolist())
    p = reference.p_of_equal_counts(subsets(draws), num_subsets)
    assert p > FALSE_ALARM, p


@KERNELS
def test_one_vertex_with_many_keys_draws_uniformly(sample):
    graph = many_stars(5, 1)
    for keys in (range(8000), (batch_key(1, 2, 3, i) for i in range(8000))):
        p = reference.p_of_equal_counts(subsets(draws_of(sample, graph, 5, 3, 1, keys)), 10)
        assert p > FALSE_ALARM, p


@KERNELS
@pytest.mark.parametrize("degree, fanout", [(100, 15), (200, 60), (LONGEST, 5), (LONGEST, 990), (LONGEST + 1, 5)])
def test_every_neighbour_and_every_pair_is_equally_likely_on_big_stars(sample, degree, fanout):
    draws = draws_of(sample, many_stars(degree, 50), degree, fanout, 50, range(60))
    p = reference.p_of_equal_inclusion(np.bincount(draws.ravel(), minlength=degree), len(draws), fanout)
    assert p > FALSE_ALARM, p
    for group in (np.arange(2), np.arange(degree - 2, degree), np.arange(0, degree, 2)):  # two neighbours together
        p = reference.p_of_hypergeometric(np.isin(draws, group).sum(1), degree, fanout, len(group))
        assert p > FALSE_ALARM, p


@KERNELS
@pytest.mark.parametrize("repeats", [[0, 0, 1, 2], [0, 1, 0, 1, 0], [3, 3, 3, 3], [0] * 3 + [1] + [2] * 2])
def test_parallel_edges_are_drawn_separately(sample, repeats):
    degree, copies = len(repeats), 150
    centre = torch.arange(copies).repeat_interleave(degree)
    leaf = copies + torch.tensor(repeats).repeat(copies) + 10 * torch.arange(copies).repeat_interleave(degree)
    graph = Graph.from_edge_index(torch.stack([leaf, centre]), 12 * copies, is_sorted=True)
    for fanout in (1, 2, 3):
        draws = draws_of(sample, graph, degree, fanout, copies, range(60))
        p = reference.p_of_equal_counts(subsets(draws), len(list(itertools.combinations(range(degree), fanout))))
        assert p > FALSE_ALARM, p


@KERNELS
def test_many_parallel_edges_are_drawn_separately(sample):
    # This number of repeats makes the kernel sort. Of 400 edges, 200 have one end, 100 another, and 100 have distinct ends.
    ends = torch.cat([torch.zeros(200), torch.ones(100), torch.arange(2, 102)]).long()[torch.randperm(400)]
    copies = 40
    leaf = copies + ends.repeat(copies) + 110 * torch.arange(copies).repeat_interleave(400)
    graph = Graph.from_edge_index(
        torch.stack([leaf, torch.arange(copies).repeat_interleave(400)]), 120 * copies, is_sorted=True
    )
    draws = draws_of(sample, graph, 400, 7, copies, range(60))
    p = reference.p_of_equal_inclusion(np.bincount(draws.ravel(), minlength=400), len(draws), 7)
    assert p > FALSE_ALARM, p
    for end in (0, 1):
        hits = (ends.numpy()[draws] == end).sum(1)
        p = reference.p_of_hypergeometric(hits, 400, 7, int((ends == end).sum()))
        assert p > FALSE_ALARM, p


@pytest.mark.parametrize("last_time", [4, 6])
def test_visible_neighbours_are_drawn_uniformly(last_time):
    data = Data(edge_index=torch.stack([torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)]), num_nodes=8)
    data.time = long(0, *range(7))
    sampler = NeighborSampler(data, [2], time_attr="time", shared_draws="batch")
    inputs = NodeSamplerInput(None, long(0), long(last_time))
    drawn = [tuple(sampler.sample_from_nodes(inputs, key).edge.tolist()) for key in range(3000)]
    p = reference.p_of_equal_counts(drawn, len(list(itertools.combinations(range(last_time + 1), 2))))
    assert p > FALSE_ALARM, p


# --- draws agree ------------------------------------------------------------------------------------------


def twins(degree: int, repeats: bool = False) -> Data:
    """Makes a graph in which 0 and 1 list the same vertices in different orders, and 2 lists these and as many others."""
    ends = torch.arange(3, 3 + degree)
    ends = torch.cat([ends, ends[: degree // 2]]) if repeats else ends
    of_2 = torch.cat([ends, ends + degree])
    sources = torch.cat([ends, ends.flip(0), of_2])
    targets = long(*[0] * len(ends), *[1] * len(ends), *[2] * len(of_2))
    return Data(edge_index=torch.stack([sources, targets]), num_nodes=3 + 2 * degree)


@KERNELS
@pytest.mark.parametrize("repeats", [False, True], ids=["", "parallel"])
def test_vertices_with_the_same_list_draw_the_same(sample, repeats):
    data = twins(30, repeats)
    graph = Graph.from_data(data)
    for key in range(50):
        out = sample(graph, [4], long(0, 1, 2), key)
        drawn = [sorted(data.edge_index[0, edges].tolist()) for edges in out.edge.split(4)]
        assert drawn[0] == drawn[1]
        # Of the vertices that 0 lists too, 2 takes only those that 0 takes.
        assert {end for end in drawn[2] if end < 33} <= set(drawn[0])


@KERNELS
def test_lists_that_are_too_long_draw_as_without_sharing(sample):
    graph = Graph.from_data(twins(LONGEST + 1))
    of = {plain: Sampler(graph, [4]), typed: TypedSampler(TypedGraph.of(graph), [[4]]),
          trees: TypedSampler(TypedGraph.of(graph), [[4]], disjoint=True)}[sample]  # fmt: skip
    for key in range(5):
        seeds = long(0, 1) if sample is plain else {None: long(0, 1)}
        assert torch.equal(sample(graph, [4], long(0, 1), key).edge, of.sample(seeds, key).edge)


def test_all_hops_share_the_number_of_a_vertex():
    # 0 lists 2 .. 21; 1 lists the same, and is found by 22 at another hop.
    leaves = torch.arange(2, 22)
    edge_index = torch.stack(
        [torch.cat([leaves, leaves, long(1)]), torch.cat([torch.zeros(20), torch.ones(20), torch.tensor([22])]).long()]
    )
    graph = Graph.from_edge_index(edge_index, 23)
    for key in range(30):
        out = plain(graph, [3, 3], long(0, 22), key)
        assert out.num_sampled_edges == [4, 3]
        first, second = edge_index[0, out.edge[:3]], edge_index[0, out.edge[4:]]
        assert sorted(first.tolist()) == sorted(second.tolist())


def test_only_relations_from_the_same_type_share_numbers():
    data = HeteroData()
    for name in "abc":
        data[name].num_nodes = 20
    star = torch.stack([torch.arange(20), torch.zeros(20, dtype=torch.int64)])
    data["b", "to", "a"].edge_index = data["b", "of", "a"].edge_index = data["c", "to", "a"].edge_index = star
    sampler = NeighborSampler(data, [1], shared_draws="batch")
    inputs = NodeSamplerInput(None, long(0), None, "a")
    joint = [[int(edge) for edge in sampler.sample_from_nodes(inputs, key).edge.values()] for key in range(3000)]
    assert all(a == b for a, b, _ in joint)
    p = reference.p_of_equal_counts([(a // 5, c // 5) for a, _, c in joint], 16)
    assert p > FALSE_ALARM, p


@KERNELS
def test_other_keys_draw_independently(sample):
    graph = many_stars(3, 1)
    joint = [tuple((sample(graph, [1], long(0), key + more).edge % 3).item() for more in (0, 1)) for key in range(3000)]
    p = reference.p_of_equal_counts(joint, 9)
    assert p > FALSE_ALARM, p


def test_a_batch_has_fewer_vertices():
    data = random_data(2000, 40_000)
    seeds = torch.arange(0, 2000, 20)
    sizes = {
        shared: [NeighborSampler(data, [5, 5], shared_draws=shared).sample_from_nodes(NodeSamplerInput(None, seeds), key).node.numel() for key in range(5)]
        for shared in (None, "batch")
    }  # fmt: skip
    assert max(sizes["batch"]) < min(sizes[None])


# --- loaders ----------------------------------------------------------------------------------------------


def test_a_loader_draws_as_its_sampler_and_pygs_loader_takes_it():
    data = random_data(500, 4000)
    options = dict(batch_size=16, seed=3)
    loader = NeighborLoader(data, [4, 3], data.train_mask, shared_draws={"vertices": "batch", "block": 2}, **options)
    one = NeighborSampler(data, [4, 3], shared_draws="batch")
    seeds = data.train_mask.nonzero().flatten()
    for index, (batch, ids) in enumerate(zip(loader, seeds.split(16), strict=True)):
        mfg = one.sample_from_nodes(NodeSamplerInput(None, ids), batch_keys(3, 0, 0, index, 2).draws)
        assert torch.equal(batch.n_id, mfg.node) and torch.equal(batch.e_id, mfg.edge)
    given = NeighborLoader(data, [9], data.train_mask, neighbor_sampler=one, shared_draws={"block": 2}, **options)
    next(iter(given))
    assert all(torch.equal(a.n_id, b.n_id) for a, b in zip(given, loader, strict=True))  # batches of the second epoch
    assert sum(1 for _ in PyGLoader(data, [4, 3], data.train_mask, neighbor_sampler=one, batch_size=16)) > 0


def lists_drawn(batch: Data, num_hops: int) -> dict[tuple[int, int], list[int]]:
    """Returns the draws of each vertex, by (hop, vertex)."""
    drawn: dict[tuple[int, int], list[int]] = {}
    hop_of = torch.repeat_interleave(torch.arange(num_hops + 1), torch.tensor(batch.num_sampled_nodes))
    for target, edge in zip(batch.edge_index[1].tolist(), batch.e_id.tolist()):
        drawn.setdefault((int(hop_of[target]), int(batch.n_id[target])), []).append(edge)
    return drawn


@pytest.mark.parametrize("shared", [None, "batch"])
def test_batches_of_a_block_draw_alike_and_others_do_not(shared):
    data = random_data(300, 6000)
    options = dict(batch_size=10, shuffle=True, seed=3, uneven="exact")
    loader = NeighborLoader(data, [4, 3], data.train_mask, shared_draws={"vertices": shared, "block": 3}, **options)
    for _ in range(2):
        batches = [lists_drawn(batch, 2) for batch in loader]
        assert len(batches) % 3 and len(batches) > 6  # the last block is shorter
        equal, all_of = {True: 0, False: 0}, {True: 0, False: 0}
        for (i, a), (j, b) in itertools.combinations(enumerate(batches), 2):
            for place in a.keys() & b.keys():
                if len(a[place]) == [4, 3][place[0]]:
                    all_of[i // 3 == j // 3] += 1
                    equal[i // 3 == j // 3] += a[place] == b[place]
        assert equal[True] == all_of[True] > 20
        assert equal[False] < 0.2 * all_of[False]


def test_a_block_of_one_batch_changes_nothing():
    assert batch_keys(1, 2, 3, 4) == batch_keys(1, 2, 3, 4, 1) == (batch_key(1, 2, 3, 4),) * 2
    assert batch_keys(1, 2, 3, 4, 2).batch == batch_key(1, 2, 3, 4)
    assert batch_keys(1, 2, 3, 4, 2).draws == batch_keys(1, 2, 3, 5, 2).draws
    keys = {batch_keys(1, *key, 2).draws for key in itertools.product(range(3), range(3), (0, 2, 4))}
    assert len(keys) == 27 and not keys & {
        batch_key(1, *key) for key in itertools.product(range(3), range(3), range(5))
    }


def test_each_batch_of_a_block_has_its_own_negative_examples():
    data = random_data(300, 3000)
    options = dict(edge_label_index=data.edge_index[:, :60], neg_sampling="binary", batch_size=10, seed=3)
    for shared in (None, "batch"):
        base = list(LinkNeighborLoader(data, [3], **options))
        block = list(LinkNeighborLoader(data, [3], shared_draws={"vertices": shared, "block": 6}, **options))
        ends = [[batch.n_id[batch.edge_label_index].tolist() for batch in batches] for batches in (base, block)]
        assert ends[0] == ends[1]
        assert ends[1][0][0][10:] != ends[1][1][0][10:]
        drawn = [lists_drawn(batch, 1) for batch in block]
        common = drawn[0].keys() & drawn[1].keys()
        assert common and all(drawn[0][place] == drawn[1][place] for place in common)


def test_a_saved_state_records_how_draws_are_shared():
    data = random_data(300, 3000)

    def loader(**options: Any) -> NeighborLoader:
        return NeighborLoader(data, [3, 2], data.train_mask, batch_size=8, shuffle=True, seed=3, **options)

    assert not {"shared_draws", "shared_draws['block']"} & loader().state_dict()["fingerprint"].keys()
    for options in (
        {"shared_draws": "batch"},
        {"shared_draws": {"block": 4}},
        {"shared_draws": {"vertices": "batch", "block": 4}},
    ):
        first = loader(**options)
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [batch.n_id for batch in batches]
        second = loader(**options)
        second.load_state_dict(state)
        assert all(torch.equal(a, batch.n_id) for a, batch in zip(rest, second, strict=True))
        with pytest.raises(ValueError, match=r"cannot load this state.*" + next(iter(options))):
            loader().load_state_dict(state)
        with pytest.raises(ValueError, match=r"cannot load this state.*" + next(iter(options))):
            second.load_state_dict(loader().state_dict())


def refused(text: str, **options: Any) -> None:
    data = random_data(60, 300)
    data.weight = torch.rand(data.num_edges)
    with pytest.raises(ValueError, match=text):
        NeighborLoader(data, [2], data.train_mask, batch_size=4, **options)


def test_impossible_options_are_refused():
    refused(r"shared_draws must be 'batch' or None, got 'epoch'", shared_draws="epoch")
    refused(r"shared_draws must be 'batch' or None, got True", shared_draws=True)
    refused(r"shared_draws='batch' excludes replace=True.*leave one of them out", shared_draws="batch", replace=True)
    refused(r"shared_draws='batch' excludes weight_attr.*leave one", shared_draws="batch", weight_attr="weight")
    for block in (0, -3, 1.5, "64", None):
        refused(
            r"shared_draws\['block'\] must be an integer >= 1 \(consecutive batches that share draws\)",
            shared_draws={"block": block},
        )
    other = PyGLoader(random_data(60, 300), [2]).node_sampler
    refused(
        r"shared_draws\['block'\]=\d+ excludes a torch_geometric.NeighborSampler: only draws of salientpp.NeighborSampler can be shared; leave it out",
        shared_draws={"block": 2},
        neighbor_sampler=other,
    )
    sampler = NeighborSampler(random_data(60, 300), [2], shared_draws="batch")
    sampler.replace = True  # set after construction
    with pytest.raises(ValueError, match="excludes replace=True"):
        sampler.sample_from_nodes(NodeSamplerInput(None, long(0)), 1)


def test_the_operators_refuse_impossible_options():
    graph = many_stars(3, 1)
    with pytest.raises(RuntimeError, match="shared draws are without replacement"):
        ops.sample_neighbors(graph.indptr, graph.indices, None, long(0), [1], 0, True, shared=True)
    data = random_hetero()
    weighted = TypedGraph.from_data(data, weight_attr="weight")
    with pytest.raises(RuntimeError, match="shared draws are uniform"):
        TypedSampler(weighted, [[1]] * 4, shared=True).sample({"paper": long(0)}, 0)


# --- several ranks ----------------------------------------------------------------------------------------

SHARED = [
    {"shared_draws": "batch"},
    {"shared_draws": {"vertices": "batch", "block": 3}},
    {"shared_draws": {"block": 3}},
    {"shared_draws": {"vertices": "batch", "block": 2}, "disjoint": True},
    {"shared_draws": "batch", "time_attr": "time"},
]


def check_ranks(rank: int, root: str) -> None:
    part = salientpp.load(root)
    data = whole(part)
    fanouts: Any = TYPED_FANOUTS if part.is_hetero else FANOUTS
    nodes = ("paper", "train") if part.is_hetero else "train"
    for options in SHARED:
        draws = options.get("shared_draws")
        draws = draws.get("vertices") if isinstance(draws, dict) else draws
        one = NeighborSampler(data, fanouts, **{**options, "shared_draws": draws})
        for alpha in (0.0, 0.3):
            loader = NeighborLoader(
                part, fanouts, nodes, batch_size=8, shuffle=True, seed=3, uneven="exact", replication_factor=alpha, **options
            )  # fmt: skip
            check_batches(loader, one, data, "sample_from_nodes")
    if part.is_hetero:
        return
    one = NeighborSampler(data, fanouts, shared_draws="batch")
    links = LinkNeighborLoader(
        part,
        fanouts,
        batch_size=32,
        shuffle=True,
        seed=3,
        neg_sampling="binary",
        shared_draws={"vertices": "batch", "block": 4},
    )
    check_batches(links, one, data, "sample_from_edges", neg_sampling=links.neg_sampling)
    for name, mine in (("shared_draws", "batch"), ("shared_draws['block']", {"block": 2})):
        with pytest.raises(ValueError, match=re.escape(f"all ranks must have the same {name}")):
            NeighborLoader(part, fanouts, nodes, batch_size=8, shared_draws=mine if rank == 0 else None)


@pytest.mark.parametrize("kind", ["one type", "types"])
def test_batches_on_ranks_equal_the_batches_of_one_process(tmp_path, kind):
    root = tmp_path / "parts"
    if kind == "types":
        salientpp.partition(typed_data(), 2, root, TYPED_FANOUTS, 8, seeds=("paper", "train"))
    else:
        salientpp.partition(homogeneous(), 2, root, FANOUTS, 8)
    distributed.run(check_ranks, 2, str(root))
