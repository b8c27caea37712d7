"""Laws of memory: filling a cache leaves nothing behind in the pools of the exchange."""

from __future__ import annotations

import distributed
import pytest
import torch
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.store.exchange import Exchange


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


def _sent_at_once(rank: int, root: str, options: dict) -> tuple[int, int]:
    """Returns the bytes of the largest message of rows that fills a cache, and of the cache."""
    sizes = []
    send = Exchange._send

    def counted(self, tensor, *rest):
        sizes.append(tensor.nbytes)
        return send(self, tensor, *rest)

    Exchange._send = counted
    loader = NeighborLoader(salientpp.load(root), [4], "all", batch_size=16, **options)
    return max(sizes), loader.memory_used()["cache"]


@pytest.mark.parametrize("options", [{"replication_factor": 1.0}, {"memory": "100MB"}], ids=str)
def test_a_cache_is_filled_by_messages_that_are_small_beside_it(tmp_path, options):
    data = random_data(6000, 12_000)
    data.x = torch.rand(6000, 1024)
    salientpp.partition(data, 2, tmp_path / "parts", [4], 16, method=torch.arange(6000) % 2)
    for sent, cached in distributed.run(_sent_at_once, 2, str(tmp_path / "parts"), options):
        assert sent <= 4 * 2**20 and cached > 9 * 2**20
