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
    """Sort edges by target, keeping the order of edges with the same target.

    Args:
        source, target: int32 or int64 [E], ids in [0, N).
        num_vertices: N.
        linked: give links in place of ``edge_id``: int64 [E], an edge's source in the lower half, its input position in the upper. For
            fewer than 2**31 vertices and edges.
        is_sorted: the edges are in order already, which is checked; ``edge_id`` is empty.
        parallel: torch's threads share large work; False: the thread that calls does it.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E], the sources (int32 where N < 2**31, else int64); ``edge_id``
        int64 [E], the input position of every edge.
    """
    return operators.csc_from_coo(source, target, num_vertices, linked, is_sorted, parallel)


def transpose_csc(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The same edges, listed by source: ``indptr`` int64 [N + 1], ``indices`` [E] (ascending targets)."""
    return operators.transpose_csc(indptr, indices)


def is_symmetric(indptr: Tensor, indices: Tensor) -> Tensor:
    """Whether :func:`transpose_csc` would give the same arrays, bool [1]: lists ascend, and every edge is there in both directions, equally often.

    By a sum of hashes, which takes no memory and takes one graph in 2**64 for symmetric that is not.
    """
    return operators.is_symmetric(indptr, indices)


def check_csc(indptr: Tensor, indices: Tensor) -> None:
    """Raise unless ``indptr`` int64 [N + 1] runs from 0 to E without decreasing and ``indices`` is in [0, N)."""
    operators.check_csc(indptr, indices)
