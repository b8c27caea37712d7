"""Operators that build and check a graph in CSC form."""

from __future__ import annotations

from torch import Tensor

from salientpp.ops.library import operators


def csc_from_coo(
    source: Tensor,
    target: Tensor,
    num_vertices: int,
    *,
    linked: bool = False,
    is_sorted: bool = False,
    parallel: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Converts edges to CSC form: sorts them by target, and keeps the order of edges with the same target.

    Args:
        source, target: int32 or int64 [E], ids in [0, N).
        num_vertices: N.
        linked: return links int64 [E] instead of ``edge_id``. A link has the edge's source in its lower 32 bits and the edge's input position in its
            upper 32 bits. Vertices and edges must be fewer than 2**31.
        is_sorted: the edges are already sorted by target; this is checked. The returned ``edge_id`` is then empty.
        parallel: share large work among torch's threads; False: the calling thread does it alone.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E], the sources (int32 where N < 2**31, else int64); ``edge_id``
        int64 [E], the input position of every edge.
    """
    return operators.csc_from_coo(source, target, num_vertices, linked, is_sorted, parallel)


def transpose_csc(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Groups the same edges by source. Returns ``indptr`` int64 [N + 1], and for each source its targets, ascending: ``indices`` [E]."""
    return operators.transpose_csc(indptr, indices)


def is_symmetric(indptr: Tensor, indices: Tensor) -> Tensor:
    """Checks if :func:`transpose_csc` would return the same arrays, so that no second copy is needed. Returns bool [1].

    The arrays are the same if lists ascend and every edge exists equally often in both directions. The check compares sums of hashes, so it needs
    no further memory. By chance it takes one asymmetric graph in 2**64 for symmetric.
    """
    return operators.is_symmetric(indptr, indices)


def check_csc(indptr: Tensor, indices: Tensor) -> None:
    """Raises unless ``indptr`` int64 [N + 1] runs from 0 to E without decreasing and ``indices`` is in [0, N)."""
    operators.check_csc(indptr, indices)
