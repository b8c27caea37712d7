"""Laws of `salientpp.graph`: every input format gives the same CSC arrays, in a fixed order, or a clear error."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import reference
import torch
from graphs import random_data, star
from peers import peer
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from salientpp import Graph, ops

# A directed graph with a self-loop at 1, a repeated edge 0 -> 1, and vertex 3 without edges.
SMALL = torch.tensor([[0, 1, 2, 0, 4, 1], [1, 1, 0, 1, 0, 4]])


def random_edges(seed: int) -> tuple[torch.Tensor, int]:
    """Makes directed edges with self-loops and repeats; a third of the vertices has no edge."""
    generator = np.random.default_rng(seed)
    num_vertices = int(generator.integers(3, 60))
    busy = generator.permutation(num_vertices)[: max(1, 2 * num_vertices // 3)]
    edge_index = busy[generator.integers(len(busy), size=(2, int(generator.integers(0, 300))))]
    return torch.from_numpy(edge_index.astype(np.int64)), num_vertices


def edge_list(graph: Graph) -> list[tuple[int, int]]:
    return reference.edges_of(graph.indptr.tolist(), graph.indices.tolist())


# --- from edge lists --------------------------------------------------------------------------------------


def test_a_small_graph_equals_the_result_by_hand():
    graph = Graph.from_edge_index(SMALL, 5)
    assert graph.indptr.tolist() == [0, 2, 5, 5, 5, 6]
    assert graph.indices.tolist() == [2, 4, 0, 1, 0, 1]
    assert graph.edge_id.tolist() == [2, 4, 0, 1, 3, 5]
    assert (graph.num_vertices, graph.num_edges) == (5, 6)
    assert graph.in_degree().tolist() == [2, 3, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_from_edge_index_equals_a_stable_sort_by_target(seed, dtype):
    edge_index, num_vertices = random_edges(seed)
    graph = Graph.from_edge_index(edge_index.to(dtype), num_vertices)
    indptr, indices, edge_id = reference.csc_from_coo(edge_index.numpy(), num_vertices)
    np.testing.assert_array_equal(graph.indptr, indptr)
    np.testing.assert_array_equal(graph.indices, indices)
    np.testing.assert_array_equal(graph.edge_id, edge_id)
    assert (graph.indptr.dtype, graph.indices.dtype, graph.edge_id.dtype) == (torch.int64, torch.int32, torch.int64)


#: Number of edges of a list that several threads sort.
LARGE = 1_200_001


@pytest.mark.parametrize("shape", ["even", "hub", "sorted", "in two halves", "few vertices", "many vertices"])
def test_large_edge_lists_are_sorted_the_same_in_several_buckets(shape):
    generator = torch.Generator().manual_seed(5)
    num_vertices, num_edges = {"few vertices": 3, "many vertices": 3_000_001}.get(shape, 40_961), LARGE
    edge_index = torch.randint(num_vertices, (2, num_edges), generator=generator)
    if shape == "hub":
        edge_index[1, torch.rand(num_edges, generator=generator) < 0.7] = 40_960
    if shape == "sorted":
        edge_index[1] = edge_index[1].sort().values
    if shape == "in two halves":
        edge_index[1] = torch.cat([half.sort().values for half in edge_index[1].split(LARGE // 2 + 1)])
    order = edge_index[1].sort(stable=True).indices
    graph = Graph.from_edge_index(edge_index, num_vertices)
    assert torch.equal(graph.edge_id, order)
    assert torch.equal(graph.indices.long(), edge_index[0, order])
    assert torch.equal(graph.in_degree(), edge_index[1].bincount(minlength=num_vertices))
    linked = Graph.from_edge_index(edge_index, num_vertices, linked=True)
    assert torch.equal(linked.links, order << 32 | edge_index[0, order]) and linked.nbytes == graph.nbytes
    by_one_thread = ops.csc_from_coo(*edge_index, num_vertices, parallel=False)
    assert all(map(torch.equal, by_one_thread, (graph.indptr, graph.indices, graph.edge_id)))
    assert all(map(torch.equal, (linked.indptr, linked.indices), (graph.indptr, graph.indices)))
    assert torch.equal(linked.edge_id, order) and torch.equal(copy.deepcopy(linked).edge_id, order)
    if shape == "sorted":
        alone = Graph.from_edge_index(edge_index, num_vertices, is_sorted=True)
        assert alone.edge_id is None
        assert all(map(torch.equal, (alone.indptr, alone.indices), (graph.indptr, graph.indices)))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_the_first_wrong_id_of_a_large_edge_list_is_named(row, wrong):
    edge_index = torch.zeros(2, LARGE, dtype=torch.int64)
    edge_index[row, [LARGE // 3, LARGE // 2, LARGE - 1]] = wrong
    text = rf"edge_index\[{row}, {LARGE // 3}\] must be in \[0, 7\), got {wrong}"
    with pytest.raises(ValueError, match=text):
        Graph.from_edge_index(edge_index, 7)


@pytest.mark.parametrize("seed", range(4))
def test_edge_ids_are_the_users_edge_numbers(seed):
    edge_index, num_vertices = random_edges(seed)
    graph = Graph.from_edge_index(edge_index, num_vertices)
    assert edge_list(graph) == list(zip(*edge_index[:, graph.edge_id].tolist()))
    assert sorted(graph.edge_id.tolist()) == list(range(edge_index.size(1)))


def test_edges_need_not_be_contiguous():
    edge_index = SMALL.t().contiguous().t()
    assert not edge_index[0].is_contiguous()
    assert edge_list(Graph.from_edge_index(edge_index, 5)) == edge_list(Graph.from_edge_index(SMALL, 5))


def test_the_callers_edges_are_not_changed():
    edge_index = SMALL.clone()
    Graph.from_edge_index(edge_index, 5).transpose()
    assert torch.equal(edge_index, SMALL)


def test_without_a_number_of_vertices_the_largest_id_decides():
    assert Graph.from_edge_index(SMALL).num_vertices == 5
    assert Graph.from_edge_index(star(7)).num_vertices == 8
    assert Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64)).num_vertices == 0


@pytest.mark.parametrize("num_vertices", [0, 1, 5])
def test_a_graph_without_edges_has_empty_lists(num_vertices):
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_vertices)
    assert graph.indptr.tolist() == [0] * (num_vertices + 1)
    assert graph.indices.tolist() == graph.edge_id.tolist() == []
    assert (graph.num_vertices, graph.num_edges) == (num_vertices, 0)
    assert graph.transpose().indptr.tolist() == graph.indptr.tolist()


def test_one_vertex_may_have_two_self_loops():
    graph = Graph.from_edge_index(torch.zeros(2, 2, dtype=torch.int64), 1)
    assert graph.indptr.tolist() == [0, 2] and graph.indices.tolist() == [0, 0] and graph.edge_id.tolist() == [0, 1]


def test_sorted_edges_need_no_edge_ids():
    edge_index = SMALL[:, SMALL[1].argsort(stable=True)]
    graph = Graph.from_edge_index(edge_index, 5, is_sorted=True)
    assert graph.edge_id is None
    assert edge_list(graph) == list(zip(*edge_index.tolist()))


def test_edges_that_are_not_sorted_are_refused_with_is_sorted():
    with pytest.raises(ValueError, match=r"is_sorted=True, but edge_index is not sorted by target \(row 1\)"):
        Graph.from_edge_index(SMALL, 5, is_sorted=True)


# --- transposition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_transpose_has_every_edge_reversed(seed):
    edge_index, num_vertices = random_edges(seed)
    graph = Graph.from_edge_index(edge_index, num_vertices)
    turned = graph.transpose()
    assert Counter(edge_list(turned)) == Counter((v, u) for u, v in edge_list(graph))
    assert turned.num_vertices == num_vertices
    assert turned.in_degree().tolist() == np.bincount(edge_index[0], minlength=num_vertices).tolist()
    for v in range(num_vertices):
        targets = turned.indices[turned.indptr[v] : turned.indptr[v + 1]].tolist()
        assert targets == sorted(targets)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_transposing_twice_gives_the_same_edges(seed, index_dtype):
    edge_index, num_vertices = random_edges(seed)
    graph = Graph.from_edge_index(edge_index, num_vertices)
    graph = Graph(graph.indptr, graph.indices.to(index_dtype))
    twice = graph.transpose().transpose()
    assert twice.indices.dtype == index_dtype
    assert torch.equal(twice.indptr, graph.indptr)
    assert Counter(edge_list(twice)) == Counter(edge_list(graph))
    # A transpose is sorted inside its lists, so a third transpose changes nothing more.
    assert torch.equal(twice.transpose().transpose().indices, twice.indices)


def test_the_transpose_is_made_once():
    graph = Graph.from_edge_index(SMALL, 5)
    assert graph.transpose() is graph.transpose()


# --- from PyG's Data --------------------------------------------------------------------------------------


def test_from_data_takes_the_number_of_nodes_from_the_data():
    graph = Graph.from_data(Data(edge_index=SMALL, x=torch.zeros(9, 1)))
    assert graph.num_vertices == 9
    assert graph.indices.tolist() == Graph.from_edge_index(SMALL, 9).indices.tolist()


def test_from_data_takes_edges_sorted_by_target():
    edge_index = SMALL[:, SMALL[1].argsort(stable=True)]
    graph = Graph.from_data(Data(edge_index=edge_index, num_nodes=5), is_sorted=True)
    assert graph.edge_id is None and edge_list(graph) == list(zip(*edge_index.tolist()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_from_data_takes_torchs_csr_adj_t(dtype):
    # Row v of adj_t lists the sources of v, so its arrays are the graph's arrays. (CSR needs sorted lists without repeats.)
    plain = Graph.from_edge_index(SMALL.unique(dim=1), 5)
    adj_t = torch.sparse_csr_tensor(
        plain.indptr.to(dtype), plain.indices.to(dtype), torch.ones(5), size=(5, 5), check_invariants=True
    )
    graph = Graph.from_data(Data(adj_t=adj_t))
    assert torch.equal(graph.indptr, plain.indptr) and torch.equal(graph.indices, plain.indices)
    assert graph.edge_id is None
    assert (graph.indptr.dtype, graph.indices.dtype) == (torch.int64, torch.int32)


def test_from_data_takes_torch_sparse_adj_t():
    torch_sparse = peer("torch_sparse")
    plain = Graph.from_edge_index(SMALL, 5)
    adj_t = torch_sparse.SparseTensor(rowptr=plain.indptr, col=plain.indices.long(), sparse_sizes=(5, 5))
    graph = Graph.from_data(Data(adj_t=adj_t))
    assert torch.equal(graph.indptr, plain.indptr)
    for begin, end in zip(plain.indptr, plain.indptr[1:]):  # torch_sparse sorts the neighbours of a vertex
        assert torch.equal(graph.indices[begin:end], plain.indices[begin:end].sort().values)


def test_from_data_takes_objects_with_a_csr_method():
    plain = Graph.from_edge_index(SMALL, 5)

    class Adjacency:
        def csr(self):
            return plain.indptr, plain.indices.long(), None

    graph = Graph.from_data(Data(adj_t=Adjacency(), num_nodes=5))
    assert torch.equal(graph.indptr, plain.indptr) and torch.equal(graph.indices, plain.indices)
    assert graph.indices.dtype == torch.int32


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_from_data_takes_pygs_edge_index(sort_order):
    data = random_data(60, 200, seed=1, directed=True)
    edge_index = data.edge_index
    if sort_order is not None:
        edge_index = edge_index[:, edge_index[("row", "col").index(sort_order)].argsort(stable=True)]
    typed = EdgeIndex(edge_index, sparse_size=(60, 60), sort_order=sort_order)
    graph = Graph.from_data(Data(edge_index=typed, num_nodes=60))
    plain = Graph.from_edge_index(edge_index, 60)
    for name in ("indptr", "indices", "edge_id"):
        assert torch.equal(getattr(graph, name), getattr(plain, name))
        assert type(getattr(graph, name)) is torch.Tensor


# --- size and text of a graph -----------------------------------------------------------------------------


def test_bytes_and_repr_describe_the_graph():
    graph = Graph.from_edge_index(SMALL, 5)
    assert graph.nbytes == 6 * 8 + 6 * 4 + 6 * 8
    assert Graph(graph.indptr, graph.indices.long()).nbytes == 6 * 8 + 6 * 8
    assert repr(graph) == "Graph(num_vertices=5, num_edges=6, indices=torch.int32)"


def test_arrays_are_made_contiguous():
    graph = Graph.from_edge_index(SMALL, 5)
    apart = Graph(
        torch.stack([graph.indptr] * 2, 1)[:, 0],
        torch.stack([graph.indices] * 2, 1)[:, 0],
        torch.stack([graph.edge_id] * 2, 1)[:, 0],
    )
    assert apart.indptr.is_contiguous() and apart.indices.is_contiguous() and apart.edge_id.is_contiguous()
    assert edge_list(apart) == edge_list(graph)


def test_a_trusted_graph_keeps_the_given_arrays():
    indptr, indices = torch.tensor([0, 1]), torch.tensor([7])
    graph = Graph.trusted(indptr, indices)
    assert graph.indptr is indptr and graph.indices is indices and graph.edge_id is None


def test_a_corrupt_trusted_graph_cannot_be_transposed():
    with pytest.raises(RuntimeError, match=r"indices\[0\] must be in \[0, 1\), got 7"):
        Graph.trusted(torch.tensor([0, 1]), torch.tensor([7])).transpose()


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edge_index, num_vertices, text",
    [
        (torch.zeros(3, 4, dtype=torch.int64), 5, r"edge_index must be a tensor of shape \[2, E\], got \[3, 4\]"),
        (torch.zeros(4, dtype=torch.int64), 5, r"edge_index must be a tensor of shape \[2, E\], got \[4\]"),
        ([[0], [1]], 5, r"edge_index must be a tensor of shape \[2, E\], got list"),
        (torch.zeros(2, 4), 5, r"edge_index must have dtype int64 or int32, got torch.float32"),
        (torch.zeros(2, 4, dtype=torch.bool), 5, r"edge_index must have dtype int64 or int32, got torch.bool"),
        (SMALL, 4, r"edge_index\[0, 4\] must be in \[0, 4\), got 4; the graph has 4 vertices"),
        (SMALL.flip(0), 4, r"edge_index\[1, 4\] must be in \[0, 4\), got 4; the graph has 4 vertices"),
        (SMALL - 1, 5, r"edge_index\[0, 0\] must be in \[0, 5\), got -1; the graph has 5 vertices"),
        (SMALL.int() - 1, 5, r"edge_index\[0, 0\] must be in \[0, 5\), got -1; the graph has 5 vertices"),
        (torch.tensor([[0, -1], [0, 0]]), None, r"edge_index\[0, 1\] must be in \[0, 1\), got -1"),
        (SMALL, -1, r"num_vertices must be >= 0, got -1"),
        (SMALL, 0, r"edge_index\[0, 0\] must be in \[0, 0\), got 0; the graph has 0 vertices"),
        (
            SMALL,
            2**45,
            r"cannot allocate a vector of 35184372088833 entries of dtype Long; the graph has 35184372088832 vertices",
        ),
        (SMALL, 2**63 - 1, r"num_vertices must be < 2\^63 - 1, got 9223372036854775807"),
        (SMALL.to("meta"), 5, r"edge_index must be a dense tensor with data, got layout torch.strided on meta"),
        (SMALL.to_sparse(), 5, r"edge_index must be a dense tensor with data, got layout torch.sparse_coo on cpu"),
    ],
)
def test_a_bad_edge_list_is_refused(edge_index, num_vertices, text):
    with pytest.raises(ValueError, match=text):
        Graph.from_edge_index(edge_index, num_vertices)


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    "arrays, text",
    [
        ((long(), long()), r"indptr must have N \+ 1 >= 1 entries, got 0"),
        ((long(1, 2), long(0, 0)), r"indptr\[0\] must be 0, got 1"),
        ((long(0, 2, 1), long(0)), r"indptr must not decrease, got indptr\[1\] = 2 and indptr\[2\] = 1"),
        ((long(0, -1, 1), long(0)), r"indptr must not decrease, got indptr\[0\] = 0 and indptr\[1\] = -1"),
        ((long(0, 2), long(0)), r"indptr\[-1\] must be the number of indices, expected 1, got 2"),
        ((long(0, 1), long(0, 0)), r"indptr\[-1\] must be the number of indices, expected 2, got 1"),
        ((long(0, 1, 2), long(1, 2)), r"indices\[1\] must be in \[0, 2\), got 2"),
        ((long(0, 1, 2), long(-1, 1).int()), r"indices\[0\] must be in \[0, 2\), got -1"),
        ((long(0, 1).int(), long(0)), r"indptr must have dtype Long, got Int"),
        ((long(0, 1), torch.zeros(1)), r"indices must have dtype int32 or int64, got Float"),
        ((long(0, 1).view(1, 2), long(0)), r"indptr must have 1 dimension, got 2"),
        ((long(0, 1), long(0).view(1, 1)), r"indices must have 1 dimension, got 2"),
        ((long(0, 1), long(0), long(0, 1)), r"edge_id must be int64 \[1\], got torch.int64 \[2\]"),
        ((long(0, 1), long(0), long(0).int()), r"edge_id must be int64 \[1\], got torch.int32 \[1\]"),
        ((long(0, 1), long(0).to_sparse()), r"indices must be a dense tensor, got layout torch.sparse_coo"),
        ((long(0, 1).to("meta"), long(0)), r"indptr must be on the CPU, got meta; use indptr.cpu\(\)"),
    ],
)
def test_bad_arrays_are_refused(arrays, text):
    with pytest.raises(ValueError, match=text):
        Graph(*arrays)


def test_arrays_must_be_tensors():
    with pytest.raises(TypeError, match=r"indices must be a torch.Tensor, got list"):
        Graph(long(0, 1), [0])


def test_data_must_be_homogeneous_data():
    with pytest.raises(TypeError, match=r"data must be a torch_geometric.data.Data, got HeteroData"):
        Graph.from_data(HeteroData())


def test_data_must_have_edges():
    with pytest.raises(ValueError, match=r"data must have edge_index or adj_t, got neither"):
        Graph.from_data(Data(x=torch.zeros(3, 1)))


def test_adj_t_must_be_compressed():
    with pytest.raises(ValueError, match=r"adj_t must be a SparseTensor or a CSR tensor, got layout torch.sparse_coo"):
        Graph.from_data(Data(adj_t=torch.eye(3).to_sparse()))


def test_data_with_fewer_nodes_than_ids_is_refused():
    with pytest.raises(ValueError, match=r"edge_index\[0, 4\] must be in \[0, 3\), got 4; the graph has 3 vertices"):
        Graph.from_data(Data(edge_index=SMALL, num_nodes=3))


def test_an_undirected_graph_whose_lists_ascend_is_its_own_transpose():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        edges = torch.from_numpy(rng.integers(0, 30, (2, 100)))
        both = torch.cat([edges, edges.flip(0)], dim=1)
        order = torch.from_numpy(np.lexsort((both[0].numpy(), both[1].numpy())))
        graph = Graph.from_edge_index(both[:, order], 30, is_sorted=True)
        assert ops.is_symmetric(graph.indptr, graph.indices).tolist() == [True]
        assert graph.transpose().indices.data_ptr() == graph.indices.data_ptr()
        for made, found in zip(ops.transpose_csc(graph.indptr, graph.indices), (graph.indptr, graph.indices)):
            assert torch.equal(made, found)
        # It is not if an edge is missing, if one occurs once more in one direction, or if lists do not ascend.
        for other in (both[:, order[1:]], torch.cat([both, both[:, :1]], dim=1), both.flip(1)):
            rest = other[:, torch.from_numpy(np.argsort(other[1].numpy(), kind="stable"))]
            almost = Graph.from_edge_index(rest, 30, is_sorted=True)
            made = ops.transpose_csc(almost.indptr, almost.indices)
            want = torch.equal(made[0], almost.indptr) and torch.equal(made[1], almost.indices)
            assert ops.is_symmetric(almost.indptr, almost.indices).tolist() == [want]
            assert torch.equal(almost.transpose().indices, made[1])
