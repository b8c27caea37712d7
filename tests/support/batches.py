"""Loaders on identity features, and comparisons of their batches.

:func:`packed` makes a loader on the CPU put batches together as for a device.
"""

from __future__ import annotations

from typing import Any

import torch
from graphs import identity_features, random_data
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.store.fetch import InPlace, Packed
from salientpp.testing.comparison import differences

N = 250  # bfloat16 and uint8 can still represent 250 different ids
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def identity(dtype: torch.dtype) -> Tensor:
    """Features [N, 3] that identify each vertex; in bool, only whether its id is odd."""
    return (
        identity_features(N, dtype=torch.int64).remainder(2).bool()
        if dtype == torch.bool
        else identity_features(N, dtype=dtype)
    )


def known_data(**changes: Any) -> Data:
    """250 vertices, edge attributes that number the edges, identity features in every dtype."""
    data = random_data(N, 1500, seed=1, directed=True, edge_attributes=True)
    for dtype in DTYPES:
        data[f"x_{dtype}".replace("torch.", "")] = identity(dtype)
    return data.update(changes)


def make(data: Data | salientpp.PartitionedGraph, **options: Any) -> NeighborLoader:
    arguments = {"num_neighbors": [4, 3], "batch_size": 32, "shuffle": True, "seed": 5, **options}
    return NeighborLoader(data, **arguments)


def assert_same_batches(a: list[Data], b: list[Data]) -> None:
    assert len(a) == len(b)
    for index, (one, other) in enumerate(zip(a, b)):
        assert differences(one, other) == [], f"batch {index}"


def packed(loader: NeighborLoader, serves: bool = False) -> NeighborLoader:
    """Makes a loader on the CPU put its batches together as for a device.

    With ``serves``, rows for other ranks are packed too.
    """
    loader.engine.producer.fetch.own = Packed(loader.device, dtype=loader.engine.basis.dtype)
    loader.engine.producer.fetch.served = Packed(loader.device, decodes=False) if serves else InPlace(decodes=False)
    return loader
