"""Forecasts the rows of a rank's part that a batch copies from host to device, for several fractions of the part that the device holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.analysis.job import Job
from salientpp.analysis.result import DeviceRows
from salientpp.vip.inclusion import add_seeds

DEVICE_FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def device_rows(job: Job) -> list[DeviceRows]:
    """Returns the rows that a batch is expected to copy to a device, for each fraction β of a part that the device holds.

    The numbers are means over the parts. ``job`` must have one rank for each part, and one for each host.
    """
    row_bytes, book = job.widths[None], job.workloads[0].book
    # For each part, the probability that a batch needs its rows, in VIP's order and in the user's order.
    by_vip, by_id = [], []
    for part_id, workload in enumerate(job.workloads):
        begin, end = book.range_of(part_id)
        own = add_seeds(job.vip[part_id][None].double()[begin:end], workload.seeds - begin, workload.batch_size)
        by_vip.append(own.sort(descending=True).values)
        by_id.append(own[job.part.original_id(torch.arange(begin, end, device="cpu")).argsort()])

    def copied(lists: Sequence[Tensor], beta: float) -> float:
        return sum(float(chances[int(beta * chances.numel()) :].sum()) for chances in lists) / len(lists)

    largest, num_neighbors = max(map(book.size_of, range(book.num_parts))), tuple(job.workloads[0].num_neighbors)
    return [
        DeviceRows(num_neighbors, beta, int(beta * largest) * row_bytes, copied(by_vip, beta), copied(by_id, beta))
        for beta in DEVICE_FRACTIONS
    ]
