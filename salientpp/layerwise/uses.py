"""Cache of an inference, for rows of other parts that several batches need. All batches are known in advance, so their needs can be counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.store.target_lists import TargetLists
from salientpp.ways.cache import Cache


def count_transfers_saved(lists: TargetLists, ranges: Sequence[tuple[int, int]], num_vertices: int) -> Tensor:
    """Returns the number of transfers that caching each vertex's row saves, float32 [N]: the number of batches that need the row, less one.

    Args:
        ranges: the batches, as ranges of the vertices that have ``lists``.
        num_vertices: number of vertices of the whole graph, N.
    """
    counts = np.zeros(num_vertices, dtype=np.int32)
    for first, last in ranges:
        edges = lists.into(torch.arange(first, last, device="cpu") + lists.first_target)
        counts[edges.source.numpy()] += 1  # indexed assignment counts a repeated vertex once
    return torch.from_numpy(counts).sub_(1).clamp_(min=0).to(torch.float32)


class CacheOfUses(Cache):
    """Cache of the rows that most batches of an inference need.

    Args:
        replication_factor: as in :class:`Cache`.
        count: function that returns the scores, from :func:`count_transfers_saved` for this rank's batches.
    """

    def __init__(self, replication_factor: float, count: Callable[[], Tensor]) -> None:
        super().__init__(replication_factor, "vip")
        self._count = count

    def scores(self, basis: Basis) -> Mapping[str | None, Tensor]:
        return {None: self._count()}
