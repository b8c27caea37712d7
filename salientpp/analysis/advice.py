"""How much cache and how much GPU memory is worth giving?

Both questions have the same shape: rows ordered by how often they are needed, and what the first of them save. The advice is the
knee of that curve over the range that was tried: where it is farthest above the straight line from its first to its last point (as in
Satopaa et al., Finding a "Kneedle" in a Haystack, ICDCS Workshops 2011). Less gives much away, more brings little; a machine with
memory to spare may still want more, so what a next GB would save is said as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.vip.inclusion import add_seeds
from salientpp.vip.policies import Workload, cache_capacity

DEVICE_FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DeviceRows:
    """Rows of its own part that a batch copies from host to device, expected, mean over parts, by GPU fraction β.

    ``device_bytes`` is what β of the largest part takes on the device.
    """

    fanouts: tuple[int, ...]
    device_fraction: float
    device_bytes: int
    rows_per_batch_vip_order: float
    rows_per_batch_original_order: float


@dataclass(frozen=True)
class Recommendation:
    """A replication factor and a GPU fraction, for one fanout, with policy 'vip'.

    Both are knees of the curves of rows left, over the range that was tried.

    Attributes:
        replication_factor, remaining: α, and the share of rows per epoch that it leaves.
        cache_bytes: what the cache costs a machine; ``next_gb_saves`` is the further share a next 10^9 bytes would save.
        device_fraction, device_remaining, device_bytes, next_device_gb_saves: the same for β and host-to-device rows.
    """

    fanouts: tuple[int, ...]
    replication_factor: float
    remaining: float
    cache_bytes: int
    next_gb_saves: float
    device_fraction: float
    device_remaining: float
    device_bytes: int
    next_device_gb_saves: float

    def __str__(self) -> str:
        return (
            f"fanouts {list(self.fanouts)}: α = {self.replication_factor:g} ({format_bytes(self.cache_bytes)} per machine) leaves "
            f"{self.remaining:.0%} of the rows to fetch; {_next_gb(self.next_gb_saves, self.remaining)}. "
            f"β = {self.device_fraction:g} ({format_bytes(self.device_bytes)} of GPU memory) leaves {self.device_remaining:.0%} of the rows "
            f"to copy from host to device; {_next_gb(self.next_device_gb_saves, self.device_remaining)}."
        )


def advise(
    workloads: Sequence[Workload],
    vip: Sequence[Tensor],
    original_id: Tensor,
    remaining: Sequence[tuple[float, float]],
    row_bytes: int,
) -> tuple[list[DeviceRows], Recommendation]:
    """Expected host-to-device rows over β, and the recommended α and β.

    Args:
        workloads: one per part.
        vip: float32 [N] of each part, without seeds.
        original_id: int64 [N], the user's ids, whose order is compared with VIP's.
        remaining: (α, share of the rows without a cache that are still fetched), with policy 'vip'.
        row_bytes: of one feature row.
    """
    gb_rows = int(1e9 / row_bytes) if row_bytes else 0
    alpha, left = remaining[_knee([alpha for alpha, _ in remaining], [1 - left for _, left in remaining])]
    fanouts = tuple(workloads[0].num_neighbors)
    book = workloads[0].book
    device = torch.zeros(2, len(DEVICE_FRACTIONS), dtype=torch.float64, device="cpu")
    gains = torch.zeros(
        2, dtype=torch.float64, device="cpu"
    )  # expected rows that a next GB saves: of the cache, of the GPU
    totals = torch.zeros(2, dtype=torch.float64, device="cpu")
    by_part = []
    for part_id, workload in enumerate(workloads):
        begin, end = book.range_of(part_id)
        chance = vip[part_id].to(torch.float64)
        outside = torch.cat([chance[:begin], chance[end:]]).sort(descending=True).values
        size = cache_capacity(alpha, book)
        gains[0] += outside[size : size + gb_rows].sum()
        totals[0] += outside.sum()

        with_seeds = add_seeds(chance[begin:end], workload.seeds - begin, workload.batch_size)
        by_vip = with_seeds.sort(descending=True).values
        by_id = with_seeds[original_id[begin:end].argsort()]
        for i, fraction in enumerate(DEVICE_FRACTIONS):
            first = int(fraction * (end - begin))
            device[0, i] += by_vip[first:].sum()
            device[1, i] += by_id[first:].sum()
        by_part.append(by_vip)
        totals[1] += with_seeds.sum()
    device /= len(workloads)
    largest = max(book.size_of(part_id) for part_id in range(book.num_parts))
    rows = [
        DeviceRows(fanouts, beta, int(beta * largest) * row_bytes, float(device[0, i]), float(device[1, i]))
        for i, beta in enumerate(DEVICE_FRACTIONS)
    ]
    whole = max(float(device[0, 0]), 1e-12)
    best = rows[_knee(list(DEVICE_FRACTIONS), [1 - row.rows_per_batch_vip_order / whole for row in rows])]
    for by_vip in by_part:
        first = int(best.device_fraction * by_vip.numel())
        gains[1] += by_vip[first : first + gb_rows].sum()
    return rows, Recommendation(
        fanouts=fanouts,
        replication_factor=alpha,
        remaining=left,
        cache_bytes=cache_capacity(alpha, book) * row_bytes,
        next_gb_saves=float(gains[0] / totals[0].clamp(min=1e-12)),
        device_fraction=best.device_fraction,
        device_remaining=best.rows_per_batch_vip_order / whole,
        device_bytes=best.device_bytes,
        next_device_gb_saves=float(gains[1] / totals[1].clamp(min=1e-12)),
    )


def _knee(costs: Sequence[float], gains: Sequence[float]) -> int:
    """The index of the point farthest above the line from the first to the last; ``costs`` ascend."""
    span, rise = max(costs[-1] - costs[0], 1e-12), max(gains[-1] - gains[0], 1e-12)
    above = [(gain - gains[0]) / rise - (cost - costs[0]) / span for cost, gain in zip(costs, gains)]
    return above.index(max(above))


def _next_gb(saves: float, left: float) -> str:
    # What is left was counted and what a GB saves is a forecast, so "all" may be a little off.
    return "a next GB would save the rest" if saves >= 0.99 * left else f"a next GB would save another {saves:.1%}"


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")
