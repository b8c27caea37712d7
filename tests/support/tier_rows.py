"""Random cases of tiers, and the rows that they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.rows import TensorRows


def some_of(generator, ids: np.ndarray, fraction: float) -> torch.Tensor:
    """Random subset of ids, ascending and distinct."""
    return torch.from_numpy(ids[generator.random(len(ids)) < fraction].astype(np.int64))


def random_case(seed: int, gpu_fraction: float, cache_fraction: float):
    """A partition book with some empty parts, a part, its device rows and cached vertices, and a batch with repeats."""
    generator = np.random.default_rng(seed)
    num_parts = int(generator.integers(1, 7))
    num_vertices = int(generator.integers(1, 400))
    cuts = np.sort(generator.integers(0, num_vertices + 1, size=num_parts - 1)).tolist()
    book = PartitionBook(torch.tensor([0, *cuts, num_vertices]))
    part_id = int(generator.integers(num_parts))
    begin, end = book.range_of(part_id)
    device_ids = some_of(generator, np.arange(end - begin), gpu_fraction)
    foreign = np.setdiff1d(np.arange(num_vertices), np.arange(begin, end))
    cache_ids = some_of(generator, foreign, cache_fraction)
    n_id = torch.from_numpy(generator.integers(0, num_vertices, size=int(generator.integers(0, 300))))
    return book, part_id, device_ids, cache_ids, n_id


FRACTIONS = pytest.mark.parametrize("gpu_fraction, cache_fraction", [(0, 0), (0.3, 0), (0, 0.3), (0.4, 0.4), (1, 1)])


def sources(**rows: torch.Tensor) -> dict[str, TensorRows]:
    return {name: TensorRows(tensor) for name, tensor in rows.items()}


def random_rows(generator: np.random.Generator, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random rows of small values, valid in every dtype."""
    return torch.from_numpy(generator.integers(0, 100, size=(size, *shape))).to(dtype)
