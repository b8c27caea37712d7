"""Where does a rank keep which rows, and in which tier is the row of vertex v?

A rank sees four tiers, nearest first: ``gpu``, the hottest rows of its own part, in device memory; ``cpu``, all
rows of its part, in host memory or memory-mapped; ``cache``, copies of the remote rows most probably needed;
``remote``, everything else, which :mod:`salientpp.store.exchange` fetches. One look-up says for every id of a
batch which tier serves it, at which slot.

"Device memory" is the loader's device; with ``device='cpu'`` the gpu tier is a tensor in host memory like any
other, which is how its logic is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.plan.partition_book import PartitionBook

NO_IDS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class IdSet:
    """Ascending, distinct ids int64 [m] of [0, num_ids), packed for look-up; slot i holds the row of ``ids[i]``."""

    ids: Tensor
    words: Tensor

    @classmethod
    def of(cls, ids: Tensor, num_ids: int) -> IdSet:
        return cls(ids, ops.pack_id_set(ids, num_ids))

    def __len__(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True, eq=False)
class Places:
    """The tier of every id of a batch: ``position`` in the batch, ``row``/``slot`` in the tier.

    The positions of the four groups together hold every place of the batch once.

    Attributes:
        gpu_position, gpu_slot: int64; rows of the device tier.
        cpu_position, cpu_row: int64; rows of the part. ``cpu_position`` None: all of the batch, in order.
        cache_position, cache_slot: int64; rows of the cache.
        remote_position, remote_id: int64; global ids to fetch, grouped by owner.
        remote_counts: int64 [K], how many to fetch from each part.
    """

    gpu_position: Tensor
    gpu_slot: Tensor
    cpu_position: Tensor | None
    cpu_row: Tensor
    cache_position: Tensor
    cache_slot: Tensor
    remote_position: Tensor
    remote_id: Tensor
    remote_counts: Tensor


@dataclass(frozen=True, eq=False)
class FeatureCache:
    """Copies of remote rows: whose (a packed set of global ids), and the rows of each attribute.

    Attributes:
        members: the cached global ids; slot i of every attribute is the row of ``members.ids[i]``.
        rows: attribute name -> [len(members), ...].
    """

    members: IdSet
    rows: Mapping[str, Tensor]

    @classmethod
    def empty(cls) -> FeatureCache:
        return cls(IdSet(NO_IDS, NO_IDS), {})

    @property
    def nbytes(self) -> int:
        return self.members.words.nbytes + sum(rows.nbytes for rows in self.rows.values())


class Shard:
    """The rows that one rank holds.

    Args:
        book: who owns what.
        part_id: the part whose rows are local.
        host_rows: attribute name -> contiguous [rows of the part, ...] on the CPU.
        gpu_ids: ascending local ids whose rows go to the device, int64.
        device: where the gpu tier and the batches live.
    """

    def __init__(
        self,
        book: PartitionBook,
        part_id: int,
        host_rows: Mapping[str, Tensor],
        *,
        gpu_ids: Tensor = NO_IDS,
        device: torch.device,
    ) -> None:
        size = book.size_of(part_id)
        for name, rows in host_rows.items():
            if rows.size(0) != size:
                raise ValueError(f"attribute {name!r} must have one row per vertex of part {part_id}, expected {size}, got {rows.size(0)}")
        self.book = book
        self.part_id = part_id
        self.begin, self.end = book.range_of(part_id)
        self.host_rows = dict(host_rows)
        self.device = device
        self.gpu = IdSet.of(gpu_ids, size)
        self.gpu_rows = {name: take_rows(rows, gpu_ids).to(device) for name, rows in host_rows.items()} if len(self.gpu) else {}
        self.cache = FeatureCache.empty()

    def look_up(self, n_id: Tensor) -> Places:
        """Places of the int64 [n] global ids ``n_id``."""
        if self.book.num_parts == 1 and not len(self.gpu):
            return Places(NO_IDS, NO_IDS, None, n_id, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS.new_zeros(1))
        return Places(*ops.look_up(n_id, self.book.offsets, self.part_id, self.gpu.words, self.cache.members.words))

    def memory(self) -> dict[str, int]:
        """Bytes by tier; ``cpu`` counts the part's arrays, which may be memory-mapped and shared."""
        return {
            "gpu": self.gpu.words.nbytes + sum(rows.nbytes for rows in self.gpu_rows.values()),
            "cpu": sum(rows.nbytes for rows in self.host_rows.values()),
            "cache": self.cache.nbytes,
        }


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` for CPU rows, through the row kernel."""
    out = rows.new_empty((index.numel(), *rows.shape[1:]))
    ops.gather_rows(rows, index, out)
    return out


def put_rows(rows: Tensor, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
    """``out[out_index] = rows[index]`` where all are on one device; ``out_index`` None (CPU only): 0, 1, ..."""
    if out.device.type == "cpu":
        ops.gather_rows(rows, index, out, out_index)
    else:
        out.index_copy_(0, out_index, rows.index_select(0, index))
