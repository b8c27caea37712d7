"""Operators that assign vertices to parts, and that coarsen the graph for it."""

from __future__ import annotations

from torch import Tensor

from salientpp.ops.library import operators


def symmetrise(
    indptr: Tensor, indices: Tensor, weight_by_target: Tensor | None = None, weight_of_each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The undirected graph without loops in which one edge stands for all between two vertices, in the lists of both.

    Args:
        weight_by_target: int64 [N] >= 1, what each edge into a vertex weighs; or
        weight_of_each: int32 or int64 [E] >= 1; 1 each without both.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E'] of the dtype that was given, ascending in each list; ``weight`` [E'], what the edges that an entry stands
        for weigh together, int32 where all fit. It is empty where no weights are given and all entries stand for as many edges.
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
    """Move vertices between parts until no part exceeds a limit; see :mod:`salientpp.partitioning.assign`."""
    return operators.rebalance_parts(indptr, indices, assignment, weights, limits, num_parts, sweeps, edge_weights)


def reassign_parts(cost: Tensor, assignment: Tensor, weights: Tensor, limits: Tensor, most_moves: int) -> Tensor:
    """Move vertices to parts where they cost less, alone or two that swap places, those that gain most first; see :mod:`salientpp.partitioning.refine`.

    Args:
        cost: float32 [K, N], finite: of a vertex in a part, whatever other vertices do.
        assignment: int64 [N], parts in [0, K).
        weights: int64 [N, C], >= 0, what a vertex adds to its part.
        limits: int64 [C]. No load rises above its limit, and none that is above it rises; no part becomes empty.
        most_moves: of vertices; a swap may be one more.

    Returns:
        int64 [N].
    """
    return operators.reassign_parts(cost, assignment, weights, limits, most_moves)


def keep_heaviest_edges(indptr: Tensor, indices: Tensor, most: int, edge_weights: Tensor | None = None) -> Tensor:
    """Which edges of an undirected graph are among the ``most`` heaviest at either end, bool [E].

    Args:
        indptr, indices: each edge in the lists of both its ends, without repeats.
        most: >= 1. A vertex of no more edges keeps them all.
        edge_weights: int32 or int64 [E], the same at both ends; None means 1 each. A hash of the ends decides among equals.
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
    """Clusters of an undirected graph's vertices that hang together, int32 [N], numbered from 0 by their first vertices.

    Args:
        indptr, indices: each edge in the lists of both its ends; loops do not count.
        vertex_weights: int64 [N], >= 1, of sum <= 2**61.
        most_weight: >= 1, of a cluster of more than one vertex.
        rounds: >= 1, how often every vertex may move at most, to the cluster that it has most edge weight to.
        seed: decides among equals.
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
    """The neighbour lists of the clusters in [first, last), in the graph whose vertices are the clusters, without loops.

    Args:
        indptr, indices: each edge in the lists of both its ends.
        cluster: int32 [N], of every vertex, in [0, num_clusters).
        edge_weights: int32 [E] >= 1; None: 1 each.

    Returns:
        The lengths of the lists, int64 [last - first]; their entries one after another, int32, ascending in each list; and the weights of all edges between
        the two clusters together, int64. Beside it there are 4 bytes for each entry that was given, 8 with weights.
    """
    return operators.contract_lists(indptr, indices, cluster, num_clusters, first, last, edge_weights)
