"""Finds the undirected edges of a directed graph in little memory, by sorting integers.

The edge u -> v is one integer, its **key** ``major * N + minor``. Keys are sorted in place, without index arrays beside them, so that the edges of the
largest graphs fit into memory. N is below 2^31.5.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

#: Most vertices of a graph whose keys fit into int64.
_MOST = 3_037_000_499

#: An undirected graph without loops: ``indptr`` int64 [N + 1], ``indices``, and the weights of the entries, or None if all are equal.
Undirected = tuple[Tensor, Tensor, Tensor | None]


def sorted_unique(key: np.ndarray) -> np.ndarray:
    """Returns the sorted distinct keys, like ``numpy.unique``, but sorts in place: ``key`` is overwritten."""
    key.sort()
    is_first = first_of_equals(key)
    return key if is_first.all() else key[is_first]


def first_of_equals(key: np.ndarray) -> np.ndarray:
    """Marks ascending keys that differ from the key before them, bool [n]."""
    is_first = np.ones(key.size, dtype=bool)
    np.not_equal(key[1:], key[:-1], out=is_first[1:])
    return is_first


def split_keys(key: np.ndarray, num_vertices: int, major: np.ndarray, minor: np.ndarray) -> None:
    """Splits keys into the arrays ``major`` and ``minor``. A multiplication and a subtraction are far faster than a modulo."""
    np.floor_divide(key, num_vertices, out=major)
    np.multiply(major, -num_vertices, out=minor)
    minor += key


def symmetric_closure(source: np.ndarray, target: np.ndarray, num_vertices: int) -> np.ndarray:
    """Returns the symmetric closure of an edge list: int64 [2, E'], sorted by source, then target, each pair once.

    A self-loop stays single. The result is the same graph as with ``torch_geometric.utils.to_undirected``, which keeps several int64 arrays of the doubled
    edge list at a time. By calculation, this function needs nearly 80 GB besides its input for ogbn-papers100M (1.6 billion edges).
    """
    num_edges = source.size
    if num_vertices > _MOST:  # number the ends of edges among themselves, in the same order
        ends, number = np.unique(np.concatenate([source, target]), return_inverse=True)
        if ends.size > _MOST:
            raise ValueError(f"the inverse edges of a graph can be added up to {_MOST} vertices, got {ends.size}")
        closed = symmetric_closure(number[:num_edges], number[num_edges:], ends.size)
        return ends[closed].astype(np.int64, copy=False)
    key = np.empty(2 * num_edges, dtype=np.int64)
    for half, major, minor in ((key[:num_edges], target, source), (key[num_edges:], source, target)):
        np.multiply(major, num_vertices, out=half, dtype=np.int64)
        half += minor
    key = sorted_unique(key)
    edge_index = np.empty((2, key.size), dtype=np.int64)
    split_keys(key, num_vertices, edge_index[0], edge_index[1])
    return edge_index
