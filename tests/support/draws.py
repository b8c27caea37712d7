"""Graphs for tests of the laws of draws, and comparisons of draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salientpp import Graph, ops

STAMP_MAP, HASH_MAP = ops.MAP_BUDGET_BYTES, 0
BOTH_MAPS = pytest.mark.parametrize("budget", [STAMP_MAP, HASH_MAP], ids=["stamp_map", "hash_map"])


def as_lists(output):
    return [tensor.tolist() for tensor in output]


def same(a, b) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def random_graph(
    seed: int, num_vertices: int | None = None, num_edges: int | None = None
) -> tuple[torch.Tensor, Graph]:
    """Graph with skewed degrees, self-loops, repeated edges, isolated vertices, and edges in random order."""
    generator = np.random.default_rng(seed)
    num_vertices = num_vertices or int(generator.integers(5, 80))
    num_edges = num_edges or int(generator.integers(1, 500))
    popular = (generator.random((2, num_edges)) ** 2 * num_vertices).astype(np.int64)
    edge_index = torch.from_numpy(generator.permutation(num_vertices)[popular])
    return edge_index, Graph.from_edge_index(edge_index, num_vertices)


def random_seeds(seed: int, num_vertices: int, repeats: bool) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, max(2, num_vertices // 2)))
    return torch.from_numpy(generator.choice(num_vertices, size, replace=repeats).astype(np.int64))


def many_stars(degree: int, copies: int) -> Graph:
    """Graph of ``copies`` stars whose centres each have ``degree`` leaves; edges of one centre are consecutive."""
    centre = torch.arange(copies).repeat_interleave(degree)
    leaf = copies + torch.arange(copies * degree)
    return Graph.from_edge_index(torch.stack([leaf, centre]), copies * (degree + 1), is_sorted=True)


def subsets(draws: np.ndarray) -> list[tuple]:
    return [tuple(row) for row in np.sort(draws, 1).tolist()]
