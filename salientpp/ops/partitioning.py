"""Operators that assign vertices to parts, and operators that coarsen the graph before that."""

from __future__ import annotations

from torch import Tensor

from salientpp.ops.library import operators


def symmetrise(
    indptr: Tensor, indices: Tensor, weight_by_target: Tensor | None = None, weight_of_each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a graph undirected and removes loops. One edge stands for all edges between two vertices, in the lists of both.

    Args:
        weight_by_target: int64 [N] >= 1, for each vertex the weight of the edges into it; None if not given.
        weight_of_each: int32 or int64 [E] >= 1, the weight of each edge; None if not given. Without both arguments every edge weighs 1.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E'] of the given dtype, ascending in each list; and ``weight`` [E'].
        An entry's weight is the total of the edges that it stands for, int32 if all totals fit. ``weight`` is empty if no weights are given and
        all entries stand for the same number of edges.
    """
    return operators.symmetrise(indptr, indices, weight_by_target, weight_of_each)


def rebalance_parts(
    indptr: Tensor,
    indices: Tensor,
    assignment: Tensor,
    weights: Tensor,
    limits: Tensor,
    num_parts: int,
    sweeps: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    """Moves vertices between parts until no part exceeds a limit; see :mod:`salientpp.partitioning.assign`."""
    return operators.rebalance_parts(indptr, indices, assignment, weights, limits, num_parts, sweeps, edge_weights)


def reassign_parts(cost: Tensor, assignment: Tensor, weights: Tensor, limits: Tensor, most_moves: int) -> Tensor:
    """Moves vertices to parts where they cost less, one at a time or as swaps of two, largest gain first; see :mod:`salientpp.partitioning.refine`.

    Args:
        cost: float32 [K, N], finite: cost of a vertex in a part, independent of the other vertices.
        assignment: int64 [N], parts in [0, K).
        weights: int64 [N, C], >= 0, what a vertex adds to the loads of its part.
        limits: int64 [C]. No load rises above its limit, and a load above its limit does not rise. No part becomes empty.
        most_moves: largest number of vertices to move; a final swap may exceed it by one.

    Returns:
        The new parts, int64 [N].
    """
    return operators.reassign_parts(cost, assignment, weights, limits, most_moves)


def keep_heaviest_edges(indptr: Tensor, indices: Tensor, most: int, edge_weights: Tensor | None = None) -> Tensor:
    """Marks the edges of an undirected graph that are among the ``most`` heaviest at either end, bool [E].

    Args:
        indptr, indices: each edge in the lists of both its ends, without repeats.
        most: >= 1. A vertex with at most this number of edges keeps them all.
        edge_weights: int32 or int64 [E], the same in both lists; None means 1 each. A hash of the ends breaks ties.
    """
    return operators.keep_heaviest_edges(indptr, indices, most, edge_weights)


def cluster_vertices(
    indptr: Tensor,
    indices: Tensor,
    vertex_weights: Tensor,
    most_weight: int,
    rounds: int,
    seed: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    """Groups strongly linked vertices of an undirected graph into clusters. Returns the cluster of each vertex, int32 [N].

    Clusters are numbered from 0, in the order of their first vertices.

    Args:
        indptr, indices: each edge in the lists of both its ends; loops do not count.
        vertex_weights: int64 [N], >= 1; their sum is at most 2**61.
        most_weight: >= 1, largest weight of a cluster with more than one vertex.
        rounds: >= 1, largest number of moves of a vertex. A move goes to the cluster that the vertex has most edge weight to.
        seed: random seed, which breaks ties.
        edge_weights: int32 or int64 [E] >= 1; None: 1 each.
    """
    return operators.cluster_vertices(indptr, indices, vertex_weights, most_weight, rounds, seed, edge_weights)


def contract_lists(
    indptr: Tensor,
    indices: Tensor,
    cluster: Tensor,
    num_clusters: int,
    first: int,
    last: int,
    edge_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the neighbour lists of clusters [first, last), in the graph that has the clusters as vertices and no loops.

    Args:
        indptr, indices: each edge in the lists of both its ends.
        cluster: int32 [N], the cluster of every vertex, in [0, num_clusters).
        edge_weights: int32 [E] >= 1; None: 1 each.

    Returns:
        The lengths of the lists, int64 [last - first]; their entries one list after another, int32, ascending in each list; and the entries'
        weights, int64. A weight is the total of all edges between two clusters. The call also needs 4 bytes of memory per given entry, or 8 with weights.
    """
    return operators.contract_lists(indptr, indices, cluster, num_clusters, first, last, edge_weights)
