"""Keeps copies of remote rows on a rank, so that batches need not fetch them.

The plan (:mod:`salientpp.vip.policies`) chooses the rows. :meth:`salientpp.store.exchange.Exchange.fetch_cache` fetches them once. The hottest rows may
have a second copy on the device. Statistics count both copies as ``cache``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp.display import format_bytes
from salientpp.store.rows import TensorRows, pinned, take_rows
from salientpp.store.tiers import NO_IDS, IdSet, Tier
from salientpp.vip.policies import densest

_NO_SET = IdSet(NO_IDS, NO_IDS)


@dataclass(frozen=True, eq=False, repr=False)
class FeatureCache:
    """Copies of remote rows: a packed set of global ids, and one tensor of rows per attribute.

    Attributes:
        members: the cached global ids. Slot i of every attribute holds the row of ``members.ids[i]``.
        rows: attribute name -> [len(members), ...] on the host; pinned if the device reads them in place.
        device_members: global ids of the rows that have a second copy on the device.
        device_rows: attribute name -> [len(device_members), ...], the copies on the device.
        owner: fingerprint of the dataset and number of the part that the rows were chosen for. None: the cache has no rows.
    """

    members: IdSet
    rows: Mapping[str, Tensor]
    device_members: IdSet = _NO_SET
    device_rows: Mapping[str, Tensor] = field(default_factory=dict)
    owner: tuple[str, int] | None = None

    @classmethod
    def empty(cls) -> FeatureCache:
        return cls(_NO_SET, {})

    @property
    def row_bytes(self) -> int:
        """Bytes of all attributes of one vertex."""
        return sum(rows.nbytes for rows in self.rows.values()) // max(1, len(self))

    def pinned(self) -> FeatureCache:
        """Returns this cache with its host rows in pinned memory, which a device can read."""
        return dataclasses.replace(self, rows={name: pinned(rows) for name, rows in self.rows.items()})

    def tiers(self, zero_copy: bool) -> Sequence[Tier]:
        """Returns the device copies and the host rows as tiers. ``zero_copy``: the device reads host rows in place."""
        found = []
        if len(self.device_members):
            found.append(Tier("cache", self.device_members, _sources(self.device_rows), True, "device"))
        if len(self):
            found.append(Tier("cache", self.members, _sources(self.rows), zero_copy, "cache"))
        return found

    def __len__(self) -> int:
        return len(self.members)

    @property
    def by_type(self) -> Mapping[str | None, FeatureCache]:
        """Returns ``{None: self}``, so that callers treat it as a typed cache. None is the type of a homogeneous graph."""
        return {None: self}

    @property
    def nbytes(self) -> int:
        ids = self.members.words.nbytes + self.device_members.words.nbytes
        return ids + sum(rows.nbytes for rows in self.rows.values())

    @property
    def in_words(self) -> str:
        return _in_words(self)

    def __repr__(self) -> str:
        rows = [f"{name}={[*rows.shape]}" for name, rows in self.rows.items()]
        copies = [f"{len(self.device_members):,} of them on the device"] if len(self.device_members) else []
        return f"FeatureCache({', '.join([self.in_words, *rows, *copies])})"


def on_device(
    caches: Mapping[str | None, FeatureCache],
    probability: Mapping[str | None, Tensor],
    num_bytes: int,
    device: torch.device,
) -> dict[str | None, FeatureCache]:
    """Returns the caches, by vertex type, each with copies of some of its rows on the device.

    Rows of all types are ranked by access probability per byte, and copied until ``num_bytes`` are full. ``probability``: of every vertex, per type float [N].
    """
    cached = {type_: probability[type_][cache.members.ids] for type_, cache in caches.items()}
    widths = {type_: cache.row_bytes for type_, cache in caches.items()}
    made = {}
    for type_, slots in densest(cached, widths, num_bytes).items():
        cache = caches[type_]
        if slots.numel():
            cache = dataclasses.replace(
                cache,
                device_members=IdSet.of(cache.members.ids[slots], probability[type_].numel()),
                device_rows={name: take_rows(rows, slots).to(device) for name, rows in cache.rows.items()},
            )
        made[type_] = cache
    return made


@dataclass(frozen=True, eq=False, repr=False)
class TypedFeatureCache:
    """Copies of remote rows, as a :class:`FeatureCache` for each of several vertex types.

    Attributes:
        by_type: the cache of each type that has cached rows.
        owner: as in :class:`FeatureCache`.
    """

    by_type: Mapping[str | None, FeatureCache]
    owner: tuple[str, int] | None = None

    def pinned(self) -> TypedFeatureCache:
        """Returns this cache with its host rows in pinned memory, which a device can read."""
        return dataclasses.replace(self, by_type={type_: cache.pinned() for type_, cache in self.by_type.items()})

    def __len__(self) -> int:
        return sum(map(len, self.by_type.values()))

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.by_type.values())

    @property
    def in_words(self) -> str:
        return _in_words(self)

    def __repr__(self) -> str:
        types = [f"{type_}: {cache.in_words}" for type_, cache in self.by_type.items()]
        return f"TypedFeatureCache({', '.join([self.in_words, *types])})"


def _in_words(cache: FeatureCache | TypedFeatureCache) -> str:
    return f"{len(cache):,} rows ({format_bytes(cache.nbytes)})"


def _sources(rows: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    return {name: TensorRows(tensor) for name, tensor in rows.items()}
