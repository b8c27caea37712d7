"""How often do batches need each vertex, counted by making them?

Sampling batches and throwing them away is the slow way to what :mod:`salientpp.vip.inclusion` computes; it is the ground
truth that policies are judged by, and two epochs of it are the ``simulation`` policy of SALIENT++ (section 3.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph

#: Batches that wait for their turn to be counted, per sampling thread.
_AHEAD = 4


def count_accesses(
    graph: Graph,
    batches: Iterable[tuple[Tensor, int]],
    num_neighbors: Sequence[int],
    *,
    replace: bool = False,
    shared: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """In how many of the batches each vertex occurs, int32 [N].

    Args:
        batches: (seeds int64 [B], key) pairs; a key fixes a batch's draws.
        num_neighbors: fanouts, nearest the seeds first.
        shared: draws of a batch agree, see :func:`salientpp.ops.sample_neighbors`.
        on_batch: called after each batch, for progress bars.
    """
    # numpy, because torch's threads would compete with the sampling threads over a few thousand additions
    counts = np.zeros(graph.num_vertices, dtype=np.int32)

    def sample(seeds: Tensor, key: int) -> np.ndarray:
        return ops.sample_neighbors(
            graph.indptr, graph.indices, None, seeds, num_neighbors, key, replace, shared=shared
        )[0].numpy()

    def count(pending: Future[np.ndarray]) -> None:
        counts[pending.result()] += 1  # assignment, so that a repeated seed counts once
        on_batch()

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="salientpp-count") as pool:
        under_way: deque[Future[np.ndarray]] = deque()
        for seeds, key in batches:
            under_way.append(pool.submit(sample, seeds, key))
            if len(under_way) > _AHEAD * threads:
                count(under_way.popleft())
        while under_way:
            count(under_way.popleft())
    return torch.from_numpy(counts)


def shuffled_batches(seeds: Tensor, batch_size: int, key: int, epochs: int) -> Iterable[tuple[Tensor, int]]:
    """Batches of ``epochs`` shuffled passes over ``seeds``, with keys of their own: not those of any training run."""
    for epoch in range(epochs):
        order = ops.permutation(seeds.numel(), ops.join_key(_SIMULATION, key, epoch))
        for index, positions in enumerate(order.split(batch_size)):
            yield seeds[positions], ops.join_key(_SIMULATION, key, epoch, index)


_SIMULATION = 3  # the purpose of these keys; 1 and 2 are sampling.schedule's
