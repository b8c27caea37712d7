"""Makes a graph smaller for a partitioner that would take too much memory for it.

Vertices that hang together become one cluster, which weighs what they weigh together, and the edges between two clusters one edge. The kernels
(csrc/partitioning/coarsen.cpp) go through mapped lists from end to end, and hold 20 bytes a vertex and 20 an edge end of the piece that they contract.
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

#: Larger graphs are coarsened, and again until no more clusters are left than the second number.
MOST_VERTICES = 2**22
MOST_CLUSTERS = 2**18

#: A cluster may weigh so many times the mean of the vertices, and this share of the mean of the parts.
_CLUSTER_SIZE = 32
_CLUSTERS_PER_PART = 128
#: Rounds in which vertices join clusters; later ones move few.
_ROUNDS = 5
#: A level that leaves more than this share of the vertices is the last.
_MOST_LEFT = 0.9
#: Of a cluster, beside those that the other end keeps. KaMinPar's memory is by the edges, and between clusters most are light.
#: With 64 of them the parts of two real graphs fetched 1 to 2 % more rows.
_EDGES_KEPT = 128

#: Times that the lists are gone through, each time for the clusters with such a share of the edge ends; entries of the result that are thinned at a time.
_TIMES = 16
_PIECE = 2**20
_MOST_WEIGHT = 2**31 - 1


def coarsen(path: Path, lists: Undirected, vertex_weights: Tensor, num_parts: int, seed: int) -> tuple[Tensor, Path]:
    """Write a graph of clusters, unless this one is small or does not get smaller.

    Args:
        path: where the graph is written, as by :func:`~salientpp.partitioning.parhip.write_parhip`; files of other suffixes are made beside it.
        lists: the graph, int32.
        vertex_weights: int64 [N], each >= 1.
        seed: decides among equals.

    Returns:
        int32 [N], the cluster of every vertex, that is the vertex of the graph that is to be partitioned; and where this one is written.
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
                releaser(array)()  # not needed until its parts are balanced, or ever
        cluster = joined.index_select(0, cluster)
    if level:
        path = path.with_suffix(".heaviest")
        write_parhip(path, vertex_weights.numel(), _heaviest(*lists), vertex_weights, _MOST_WEIGHT, True)
    return cluster, path


def _write_contracted(path: Path, lists: Undirected, cluster: Tensor, weight_of_cluster: Tensor) -> Undirected:
    """Write the graph of the clusters, and return its lists."""
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
    """The lists without the edges that are not among the heaviest of either end."""
    kept = ops.keep_heaviest_edges(indptr, indices, _EDGES_KEPT, weights)
    for first, last in runs_of_vertices(indptr, _PIECE):
        begin, end = int(indptr[first]), int(indptr[last])
        of = kept[begin:end]
        until = torch.nn.functional.pad(of.cumsum(0), (1, 0))[indptr[first : last + 1] - begin]
        weight = None if weights is None else weights[begin:end][of].numpy()
        yield first, last, until.diff().numpy(), indices[begin:end][of].numpy(), weight
