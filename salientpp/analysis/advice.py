"""Recommends a cache size and an amount of GPU memory.

Both recommendations follow from a curve. Rows are ordered by how often they are needed, and the curve shows what the first rows save. The advice is the knee
of that curve over the range that was tried. The knee is the point farthest above the straight line from the first point to the last (Satopaa et al., Finding a
"Kneedle" in a Haystack, ICDCS Workshops 2011). Less memory than at the knee loses much, and more memory gains little. For machines with memory to spare, the
advice also says what one more GB would save.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.analysis.job import Job
from salientpp.analysis.result import DeviceRows, Recommendation, Volume
from salientpp.vip.inclusion import add_seeds
from salientpp.vip.policies import cache_capacity

DEVICE_FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def advise(job: Job, vip: Sequence[Volume]) -> tuple[list[DeviceRows], Recommendation]:
    """Returns the expected host-to-device rows for each β, and the recommended α and β.

    Args:
        vip: results of the static caches of the policy 'vip', by replication factor.
    """
    row_bytes = job.widths[None]
    gb_rows = int(1e9 / row_bytes) if row_bytes else 0
    chosen = vip[_knee([volume.replication_factor for volume in vip], [volume.reduction for volume in vip])]
    book, num_neighbors = job.workloads[0].book, tuple(job.workloads[0].num_neighbors)
    capacity = cache_capacity(chosen.replication_factor, book)
    # Remote rows that batches need, remote rows that one more GB would save, and own rows that batches need.
    remote = saved = needed = 0.0
    # For each part, the probability that a batch needs its rows, in VIP's order and in the user's order.
    by_vip, by_id = [], []
    for part_id, workload in enumerate(job.workloads):
        begin, end = book.range_of(part_id)
        chance = job.vip[part_id][None].double()
        outside = torch.cat([chance[:begin], chance[end:]]).sort(descending=True).values
        saved += float(outside[capacity : capacity + gb_rows].sum())
        remote += float(outside.sum())
        own = add_seeds(chance[begin:end], workload.seeds - begin, workload.batch_size)
        needed += float(own.sum())
        by_vip.append(own.sort(descending=True).values)
        by_id.append(own[job.part.original_id(torch.arange(begin, end, device="cpu")).argsort()])

    def copied(lists: list[Tensor], beta: float) -> float:
        return sum(float(chances[int(beta * chances.numel()) :].sum()) for chances in lists) / len(lists)

    largest = max(book.size_of(part_id) for part_id in range(book.num_parts))
    rows = [
        DeviceRows(num_neighbors, beta, int(beta * largest) * row_bytes, copied(by_vip, beta), copied(by_id, beta))
        for beta in DEVICE_FRACTIONS
    ]
    shares = [row.rows_per_batch_vip_order / max(rows[0].rows_per_batch_vip_order, 1e-12) for row in rows]
    best = _knee(DEVICE_FRACTIONS, [1 - share for share in shares])
    firsts = [int(DEVICE_FRACTIONS[best] * chances.numel()) for chances in by_vip]
    next_rows = sum(float(chances[first : first + gb_rows].sum()) for chances, first in zip(by_vip, firsts))
    return rows, Recommendation(
        num_neighbors=num_neighbors,
        replication_factor=chosen.replication_factor,
        remaining=1 - chosen.reduction,
        cache_bytes=capacity * row_bytes,
        next_gb_saves=saved / max(remote, 1e-12),
        device_fraction=DEVICE_FRACTIONS[best],
        device_remaining=shares[best],
        device_bytes=rows[best].device_bytes,
        next_device_gb_saves=next_rows / max(needed, 1e-12),
    )


def _knee(costs: Sequence[float], gains: Sequence[float]) -> int:
    """Returns the index of the point farthest above the line from the first to the last point; ``costs`` ascend."""
    span, rise = max(costs[-1] - costs[0], 1e-12), max(gains[-1] - gains[0], 1e-12)
    above = [(gain - gains[0]) / rise - (cost - costs[0]) / span for cost, gain in zip(costs, gains)]
    return above.index(max(above))
