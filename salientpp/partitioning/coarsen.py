"""Coarsens a graph for a partitioner that would need too much memory for the whole graph.

Strongly linked vertices become one cluster with their total weight, and the edges between two clusters become one edge. The kernels
(csrc/partitioning/coarsen.cpp) read memory-mapped lists in order. They hold 20 bytes per vertex, and 20 bytes per end of an edge in
the piece that they contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import runs_of_vertices
from salientpp.graph.mapped import releaser
from salientpp.partitioning.parhip import Lists, write_parhip
from salientpp.partitioning.undirected import Undirected

#: Graphs with more vertices than the first number are coarsened until no more clusters are left than the second number.
MOST_VERTICES = 2**22
MOST_CLUSTERS = 2**18

#: Limits of a cluster's weight: the first number times the mean weight of a vertex, and the mean weight of a part divided by the second number.
_CLUSTER_SIZE = 32
_CLUSTERS_PER_PART = 128
#: Number of sweeps in which vertices join clusters. Later sweeps move few vertices.
_ROUNDS = 5
#: Coarsening stops if a level has more than this share of the vertices of the level before.
_MOST_LEFT = 0.9
#: Number of edges that each cluster keeps, besides those that the other end keeps. KaMinPar's memory depends on the edges, and most edges between
#: clusters are light. With 64 edges per cluster, the parts of two real graphs fetched 1 to 2 % more rows.
_EDGES_KEPT = 128

#: Largest number of passes over the lists. A pass contracts the lists of some of the clusters.
_TIMES = 16
#: Number of edge ends that are thinned at a time. A pass contracts at least this number.
_PIECE = 2**20
_MOST_WEIGHT = 2**31 - 1


def coarsen(path: Path, lists: Undirected, vertex_weights: Tensor, num_parts: int, seed: int) -> tuple[Tensor, Path]:
    """Writes a smaller graph, in which each cluster of vertices is one vertex, for the partitioner to read. Small graphs stay as they are.

    It repeats this until the graph is small, or hardly gets smaller.

    Args:
        path: file of the graph, as :func:`~salientpp.partitioning.parhip.write_parhip` wrote it; files with other suffixes are made beside it.
        lists: the graph, int32.
        vertex_weights: int64 [N], each >= 1.
        seed: breaks ties.

    Returns:
        int32 [N], the cluster of every vertex, and the file of the graph to partition, whose vertices are the clusters.
    """
    total = int(vertex_weights.sum())
    cluster, level = torch.arange(vertex_weights.numel(), dtype=torch.int32, device="cpu"), 0
    while (size := vertex_weights.numel()) > (MOST_CLUSTERS if level else MOST_VERTICES):
        most = min(_CLUSTER_SIZE * total // size, total // (_CLUSTERS_PER_PART * num_parts))
        joined = ops.cluster_vertices(*lists[:2], vertex_weights, max(1, most), _ROUNDS, seed, lists[2])
        num_clusters = int(joined.max()) + 1
        if num_clusters > _MOST_LEFT * size:
            break
        vertex_weights = torch.zeros(num_clusters, dtype=torch.int64, device="cpu").index_add_(
            0, joined, vertex_weights
        )
        level += 1
        path = path.with_suffix(f".level-{level}")
        larger, lists = lists, _write_contracted(path, lists, joined, vertex_weights)
        for array in larger[1:]:
            if array is not None:
                releaser(array)()  # the first graph is not needed until the parts are balanced, the others not again
        cluster = joined.index_select(0, cluster)
    if level:
        path = path.with_suffix(".heaviest")
        write_parhip(path, vertex_weights.numel(), _heaviest(*lists), vertex_weights, _MOST_WEIGHT, True)
    return cluster, path


def _write_contracted(path: Path, lists: Undirected, cluster: Tensor, weight_of_cluster: Tensor) -> Undirected:
    """Writes the graph of the clusters, and returns its lists."""
    indptr, indices, weights = lists
    num_clusters = weight_of_cluster.numel()
    ends = torch.zeros(num_clusters + 1, dtype=torch.int64, device="cpu")
    ends[1:].index_add_(0, cluster, indptr.diff())
    at_once = max(_PIECE, indices.numel() // _TIMES)

    def contracted() -> Iterator[Lists]:
        for first, last in runs_of_vertices(ends.cumsum(0), at_once):
            length, found, weight = ops.contract_lists(indptr, indices, cluster, num_clusters, first, last, weights)
            yield first, last, length.numpy(), found.numpy(), weight.clamp_(max=_MOST_WEIGHT).numpy()

    return write_parhip(path, num_clusters, contracted(), weight_of_cluster, _MOST_WEIGHT, True)


def _heaviest(indptr: Tensor, indices: Tensor, weights: Tensor | None) -> Iterator[Lists]:
    """Yields the neighbour lists, run by run, without edges that are light for both of their ends, because the partitioner's memory depends on the edges."""
    kept = ops.keep_heaviest_edges(indptr, indices, _EDGES_KEPT, weights)
    for first, last in runs_of_vertices(indptr, _PIECE):
        begin, end = int(indptr[first]), int(indptr[last])
        of = kept[begin:end]
        until = torch.nn.functional.pad(of.cumsum(0), (1, 0))[indptr[first : last + 1] - begin]
        weight = None if weights is None else weights[begin:end][of].numpy()
        yield first, last, until.diff().numpy(), indices[begin:end][of].numpy(), weight
