"""Laws of memory: filling a cache leaves nothing behind in the pools of the exchange."""

from __future__ import annotations

import distributed
import pytest
import torch
from graphs import random_data

import salientpp
from salientpp import NeighborLoader


def _kept(rank: int, root: str, options: dict) -> tuple[int, int]:
    """Returns the bytes in the pool that receives rows, and those of the cache, before the first batch."""
    loader = NeighborLoader(salientpp.load(root), [4], "all", batch_size=16, **options)
    return loader.engine.basis.source.exchange.buffers.bytes_allocated, loader.memory_used()["cache"]


@pytest.mark.parametrize(
    "options", [{"replication_factor": 1.0}, {"memory": "100MB"}, {"replication_factor": 1.0, "lookahead": 2}], ids=str
)
@pytest.mark.parametrize("columns", [1, 2])
def test_the_rows_that_fill_a_cache_leave_no_memory_behind(tmp_path, options, columns):
    data = random_data(4000, 8000)
    data.x = torch.rand(4000, 512)
    if columns == 2:
        data.z = torch.rand(4000, 256)
    names = ["x", "z"][:columns]
    salientpp.partition(data, 2, tmp_path / "parts", [4], 16, method=torch.arange(4000) % 2)
    for kept, cached in distributed.run(_kept, 2, str(tmp_path / "parts"), {**options, "columns": names}):
        assert kept == 0 and cached > 2**20
