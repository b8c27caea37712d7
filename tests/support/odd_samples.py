"""Small graphs with odd lists, seeds and fanouts for samplers, and a comparison of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

FANOUTS = [[3], [5, 3, 2], [-1], [2, -1, 1], [1, 1, 1, 1], [100, 60], [2, 0, 2], [0], []]


def random_data(seed: int, num_vertices: int = 60, num_edges: int = 400) -> Data:
    """Makes skewed degrees, self-loops, repeated edges and isolated vertices; edges in no order, times with ties, weights with zeros."""
    generator = np.random.default_rng(seed)
    ends = generator.permutation(num_vertices)[(generator.random((2, num_edges)) ** 2 * num_vertices).astype(np.int64)]
    return Data(
        edge_index=torch.from_numpy(ends),
        num_nodes=num_vertices,
        time=torch.from_numpy(generator.integers(8, size=num_vertices)),
        edge_time=torch.from_numpy(generator.integers(8, size=num_edges)),
        weight=torch.from_numpy(np.where(generator.random(num_edges) < 0.1, 0.0, generator.random(num_edges) ** 3)),
    )


def some_seeds(seed: int, num_vertices: int, repeats: bool = False) -> Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(
        generator.choice(num_vertices, int(generator.integers(1, num_vertices // 2)), replace=repeats).astype(np.int64)
    )


def same(a: Any, b: Any) -> bool:
    """Compares two samples, attribute by attribute."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b
