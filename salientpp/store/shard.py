"""Where does a rank keep which rows, and in which tier is the row of vertex v?

A rank sees four tiers, nearest first: ``gpu``, the hottest rows of its own part, in device memory; ``cpu``, all
rows of its part, in host memory or memory-mapped; ``cache``, copies of the remote rows most probably needed;
``remote``, everything else, which :mod:`salientpp.store.exchange` fetches. One look-up says for every id of a
batch which tier serves it, at which slot.

Cached rows may have a second copy on the device, of the hottest of them (``FeatureCache.device_rows``); in look-ups and statistics
they remain ``cache``.

"Device memory" is the loader's device; with ``device='cpu'`` the gpu tier is a tensor in host memory like any
other, which is how its logic is tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp import ops
from salientpp.plan.partition_book import PartitionBook
from salientpp.store.assembly import Recipe

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
        rows: attribute name -> [len(members), ...] on the host, pinned where the device reads them there.
        device_rows: attribute name -> [d, ...], copies on the device.
        device_slot: int32 [len(members)], the slot's place in ``device_rows``, or -1; empty if there are none.
        owner: for which part of which contents the rows were chosen: the dataset's fingerprint and a part. None: there are no rows.
    """

    members: IdSet
    rows: Mapping[str, Tensor]
    device_rows: Mapping[str, Tensor] = field(default_factory=dict)
    device_slot: Tensor = NO_IDS
    owner: tuple[str, int] | None = None

    @classmethod
    def empty(cls) -> FeatureCache:
        return cls(IdSet(NO_IDS, NO_IDS), {})

    def on_device(self, scores: Tensor, num_bytes: int, device: torch.device) -> FeatureCache:
        """This cache with as many of its rows on ``device`` too as fit into ``num_bytes``: those of the highest ``scores``, float [N]."""
        row_bytes = sum(rows.nbytes for rows in self.rows.values()) // max(1, len(self))
        number = min(len(self), num_bytes // max(1, row_bytes))
        if number == 0:
            return self
        slots = torch.sort(scores[self.members.ids], descending=True, stable=True).indices[:number].sort().values
        device_slot = torch.full((len(self),), -1, dtype=torch.int32)
        device_slot[slots] = torch.arange(number, dtype=torch.int32)
        return dataclasses.replace(
            self, device_rows={name: take_rows(rows, slots).to(device) for name, rows in self.rows.items()}, device_slot=device_slot
        )

    def pinned(self) -> FeatureCache:
        """This cache with its host rows where a device can read them."""
        return dataclasses.replace(self, rows={name: pinned(rows) for name, rows in self.rows.items()})

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_device_rows(self) -> int:
        return next((rows.size(0) for rows in self.device_rows.values()), 0)

    @property
    def nbytes(self) -> int:
        """On the host."""
        return self.members.words.nbytes + self.device_slot.nbytes + sum(rows.nbytes for rows in self.rows.values())


class Shard:
    """The rows that one rank holds.

    Args:
        book: who owns what.
        part_id: the part whose rows are local.
        host_rows: attribute name -> contiguous [rows of the part, ...] on the CPU.
        gpu_ids: ascending local ids whose rows go to the device, int64.
        device: where the gpu tier and the batches live.
        zero_copy: the device reads rows of the host tiers where they are, in pinned memory; else they are staged.
    """

    def __init__(
        self,
        book: PartitionBook,
        part_id: int,
        host_rows: Mapping[str, Tensor],
        *,
        gpu_ids: Tensor = NO_IDS,
        device: torch.device,
        zero_copy: bool = False,
    ) -> None:
        size = book.size_of(part_id)
        for name, rows in host_rows.items():
            if rows.size(0) != size:
                raise ValueError(f"attribute {name!r} must have one row per vertex of part {part_id}, expected {size}, got {rows.size(0)}")
        self.book = book
        self.part_id = part_id
        self.begin, self.end = book.range_of(part_id)
        self.host_rows = {name: pinned(rows) if zero_copy else rows for name, rows in host_rows.items()}
        self.device = device
        self.gpu = IdSet.of(gpu_ids, size)
        self.gpu_rows = {name: take_rows(rows, gpu_ids).to(device) for name, rows in host_rows.items()} if len(self.gpu) else {}
        self.cache = FeatureCache.empty()
        self.zero_copy = zero_copy

    def look_up(self, n_id: Tensor) -> Places:
        """Places of the int64 [n] global ids ``n_id``."""
        if self.book.num_parts == 1 and not len(self.gpu):
            return Places(NO_IDS, NO_IDS, None, n_id, NO_IDS, NO_IDS, NO_IDS, NO_IDS, NO_IDS.new_zeros(1))
        return Places(*ops.look_up(n_id, self.book.offsets, self.part_id, self.gpu.words, self.cache.members.words))

    def recipe(self, places: Places) -> Recipe:
        """How a batch with these places is put together from ``sources``."""
        if places.cpu_position is None:
            return Recipe(places.cpu_row, NO_IDS, NO_IDS) if self.zero_copy else Recipe(None, places.cpu_row, NO_IDS)
        cache_position, cache_slot = places.cache_position, places.cache_slot
        on_device = NO_IDS, NO_IDS
        if len(self.cache.device_slot):
            device_slot = self.cache.device_slot[cache_slot]
            is_there = device_slot >= 0
            on_device = cache_position[is_there], device_slot[is_there]
            cache_position, cache_slot = cache_position[~is_there], cache_slot[~is_there]
        # Per source: which places it fills, from which of its rows (None: all, in order), and how many rows it has.
        takes = [(places.gpu_position, places.gpu_slot, len(self.gpu)), (*on_device, self.cache.num_device_rows)]
        if self.zero_copy:
            takes.append((places.cpu_position, places.cpu_row, self.book.size_of(self.part_id)))
            takes.append((cache_position, cache_slot, len(self.cache)))
        else:
            staged = torch.cat([places.cpu_position, cache_position])
            takes.append((staged, None, staged.numel()))
        takes.append((places.remote_position, None, places.remote_position.numel()))
        num_rows = sum(size for _, _, size in takes)
        index = torch.empty(sum(position.numel() for position, _, _ in takes), dtype=torch.int32 if num_rows < 2**31 else torch.int64)
        begin = 0
        for position, row, size in takes:
            row = torch.arange(size) if row is None else row
            index[position] = (row + begin).to(index.dtype)
            begin += size
        return Recipe(index, NO_IDS, NO_IDS) if self.zero_copy else Recipe(index, places.cpu_row, cache_slot)

    def stage(self, name: str, recipe: Recipe, out: Tensor) -> None:
        """Gather the rows of the host tiers that the recipe takes, one after the other, into the CPU tensor ``out``."""
        put_rows(self.host_rows[name], recipe.cpu_row, out, None)
        if recipe.cache_slot.numel():
            put_rows(self.cache.rows[name], recipe.cache_slot, out[recipe.cpu_row.numel() :], None)

    def sources(self, name: str, staged: Tensor, arrived: Tensor) -> list[Tensor]:
        """The rows of an attribute from which a recipe takes its own, in its order; ``staged`` and ``arrived`` are on the device."""
        nothing = staged[:0]
        host = [self.host_rows[name], self.cache.rows.get(name, nothing)] if self.zero_copy else [staged]
        return [self.gpu_rows.get(name, nothing), self.cache.device_rows.get(name, nothing), *host, arrived]

    def memory(self) -> dict[str, int]:
        """Bytes by tier; ``cpu`` counts the part's arrays, which may be memory-mapped and shared, ``gpu`` also cached rows there."""
        on_device = [*self.gpu_rows.values(), *self.cache.device_rows.values()]
        return {
            "gpu": self.gpu.words.nbytes + sum(rows.nbytes for rows in on_device),
            "cpu": sum(rows.nbytes for rows in self.host_rows.values()),
            "cache": self.cache.nbytes,
        }


def pinned(tensor: Tensor) -> Tensor:
    """A copy in page-locked host memory, from which a device copies and reads by itself; without an accelerator the tensor."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` for CPU rows, through the row kernel."""
    out = rows.new_empty((index.numel(), *rows.shape[1:]))
    ops.gather_rows(rows, index, out)
    return out


def put_rows(rows: Tensor, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
    """``out[out_index] = rows[index]`` for CPU rows, through the row kernel; ``out_index`` None: 0, 1, ..."""
    ops.gather_rows(rows, index, out, out_index)
