"""Counts how often batches need each vertex, by sampling the batches.

The probabilities of :mod:`salientpp.vip.inclusion` are compared with these counts. The policy ``simulation`` of SALIENT++ (section 3.2) uses the counts of
two epochs as scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.processes import in_order


def count_accesses(
    graph: Graph,
    batches: Iterable[tuple[Tensor, int]],
    num_neighbors: Sequence[int],
    *,
    replace: bool = False,
    shared: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Counts the batches in which each vertex occurs, int32 [N].

    Args:
        batches: pairs of seeds int64 [B] and a key, which fixes the batch's draws.
        num_neighbors, replace, shared: as in :func:`salientpp.ops.sample_neighbors`.
        on_batch: called after each batch, for progress bars.
    """
    # numpy, because torch's threads would compete with the sampling threads for a few thousand additions
    counts = np.zeros(graph.num_vertices, dtype=np.int32)

    def sample(batch: tuple[Tensor, int]) -> np.ndarray:
        return ops.sample_neighbors(
            graph.indptr, graph.indices, None, batch[0], num_neighbors, batch[1], replace, shared=shared
        )[0].numpy()

    for vertices in in_order(sample, batches, "salientpp-count"):
        counts[vertices] += 1  # indexed assignment counts a repeated seed once
        on_batch()
    return torch.from_numpy(counts)


def shuffled_batches(seeds: Tensor, batch_size: int, key: int, epochs: int) -> Iterable[tuple[Tensor, int]]:
    """Yields (seeds, key) for the batches of ``epochs`` shuffled passes over ``seeds``. No training run has the same keys, so none has the same draws."""
    for epoch in range(epochs):
        order = ops.permutation(seeds.numel(), ops.join_key(_SIMULATION, key, epoch))
        for index, positions in enumerate(order.split(batch_size)):
            yield seeds[positions], ops.join_key(_SIMULATION, key, epoch, index)


_SIMULATION = 3  # the purpose of these keys; sampling.schedule uses 1 and 2
