"""Graphs of communities, and the cut of a partition."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.graph.csc import Graph


def make_communities(num_communities: int, size: int, inside: int, across: int, seed: int) -> tuple[Graph, Tensor]:
    """Undirected graph with each edge stored in both directions; vertex v is in community ``v % num_communities``."""
    rng = np.random.default_rng(seed)
    num_vertices = num_communities * size
    member = rng.integers(0, size, (2, inside)) * num_communities + rng.integers(0, num_communities, inside)
    edges = np.concatenate([member, rng.integers(0, num_vertices, (2, across))], axis=1)
    both = torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1))
    return Graph.from_edge_index(both, num_vertices), torch.arange(num_vertices) % num_communities


def make_skewed(seed: int) -> tuple[Graph, dict[str, Tensor]]:
    """Directed graph with power-law degrees and 16 communities; all training seeds are in one community."""
    rng = np.random.default_rng(seed)
    num_vertices, num_edges, num_communities = 8000, 80_000, 16
    pull = rng.pareto(1.5, num_vertices) + 1
    source = rng.choice(num_vertices, num_edges, p=pull / pull.sum())
    target = rng.choice(num_vertices, num_edges, p=pull / pull.sum())
    inside = rng.random(num_edges) < 0.8
    target = np.where(inside, target - target % num_communities + source % num_communities, target)
    graph = Graph.from_edge_index(torch.from_numpy(np.stack([source, target.clip(max=num_vertices - 1)])), num_vertices)
    community = torch.arange(0, num_vertices, num_communities)
    return graph, {"train": community[:400], "val": torch.from_numpy(rng.permutation(num_vertices)[:800])}


def count_cut(graph: Graph, assignment: Tensor) -> int:
    """Number of edges between parts, counted edge by edge."""
    part, indptr = assignment.tolist(), graph.indptr.tolist()
    indices = graph.indices.tolist()
    return sum(part[indices[e]] != part[v] for v in range(graph.num_vertices) for e in range(indptr[v], indptr[v + 1]))


CLASSES, WIDTH = 4, 16


@functools.cache
def _made() -> Data:
    """Four communities whose features only partly separate them."""
    generator = torch.Generator().manual_seed(0)
    n, e = 1200, 9000
    y = torch.arange(n) % CLASSES
    source = torch.randint(n, (e,), generator=generator)
    inside = (source + CLASSES * torch.randint(n // CLASSES, (e,), generator=generator)) % n
    target = torch.where(torch.rand(e, generator=generator) < 0.8, inside, torch.randint(n, (e,), generator=generator))
    x = torch.randn(n, WIDTH, generator=generator) + torch.randn(CLASSES, WIDTH, generator=generator)[y]
    draw = torch.rand(n, generator=generator)
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    masks = {"train_mask": draw < 0.5, "val_mask": (draw >= 0.5) & (draw < 0.7), "test_mask": draw >= 0.7}
    return Data(x=x, y=y, edge_index=edge_index, **masks)


def plain() -> Data:
    return copy.copy(_made())
