"""Finds where a rank can read each row of a batch. Its tiers are sets of rows, each in one kind of memory.

A rank has an ordered list of tiers. The **near** tiers hold some of its part's rows, **home** holds all of them, and the **copies** hold rows of other
parts. A row that is in no tier is **remote**. One look-up returns, for every id of a batch, the first tier that has its row and the slot in that tier.

Statistics count rows under four names. ``device``: the part's rows that batches need most, in device memory. ``host``: the part's rows on the host, in
memory, in a memory-mapped file or in other storage. ``cache``: copies of the remote rows that batches need most. ``remote``: rows of other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp import ops
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.narrow import EncodedRows, Narrow
from salientpp.store.rows import JoinedRows, RowSource, TensorRows, pinned, take_rows

NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_NONE_REMOTE = torch.zeros(1, dtype=torch.int64, device="cpu")  # counts per part, for a single part


@dataclass(frozen=True, eq=False)
class IdSet:
    """Tells which rows a tier holds. Slot i holds the row of ``ids[i]``; ``ids`` is ascending int64 [m].

    ``words`` holds the same ids, packed by :func:`salientpp.ops.pack_id_set` for fast look-up.
    """

    ids: Tensor
    words: Tensor

    @classmethod
    def of(cls, ids: Tensor, num_ids: int) -> IdSet:
        return cls(ids, ops.pack_id_set(ids, num_ids))

    def __len__(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True, eq=False)
class Tier:
    """Set of rows in one kind of memory, such as a cache. A batch takes its rows from the first tier that has them.

    Attributes:
        name: name under which statistics count the rows that this tier serves.
        members: ids of the rows. Slot i of every attribute holds the row of ``members.ids[i]``. None: all rows of the part.
        rows: attribute name -> source.
        on_device: True if a device reads the rows in place. Each source is then a :class:`TensorRows`.
        memory: kind of memory under which :meth:`Tiers.memory` counts the rows; '' if another rank counts them.
    """

    name: str
    members: IdSet | None
    rows: Mapping[str, RowSource]
    on_device: bool
    memory: str

    @property
    def num_rows(self) -> int:
        if self.members is not None:
            return len(self.members)
        return next((source.shape[0] for source in self.rows.values()), 0)

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor from which a device reads an attribute. Only for a tier that is ``on_device``."""
        source = self.rows[name]
        if not isinstance(source, TensorRows):
            raise TypeError(
                f"a device can read rows of {name!r} only from a TensorRows, got {type(source).__name__}; make the tier with one, or with on_device=False"
            )
        return source.tensor


@dataclass(frozen=True, eq=False)
class Kept:
    """Tells which rows a batch reads from a cache whose rows change between batches, and which rows it adds. All tensors are int64.

    Attributes:
        position, slot: positions in the batch, and the cache slots of their rows when the batch is assembled.
        admitted_row, admitted_slot: after the batch is assembled, fetched row ``admitted_row[i]`` is copied into slot ``admitted_slot[i]``.
    """

    position: Tensor
    slot: Tensor
    admitted_row: Tensor
    admitted_slot: Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Tells where each row of a batch is found: in a slot of a tier, in a changing cache, or on another rank. All tensors are int64.

    Every position of the batch occurs once: in ``position``, in ``remote_position`` or in ``kept``.

    Attributes:
        position, slot: one vector per tier, in the order of the tiers. None instead of a position means 0, 1, 2, ...: the whole batch.
        remote_position: positions in the batch whose rows come from other ranks.
        remote_id: global ids to fetch, grouped by owner.
        remote_counts: int64 [K], number of rows to fetch from each part.
        remote_row: for each remote position, the index of its row among the fetched rows. None: remote position i gets fetched row i.
        kept: hits in a changing cache. Their rows are read when the batch is assembled.
    """

    position: Sequence[Tensor | None]
    slot: Sequence[Tensor]
    remote_position: Tensor
    remote_id: Tensor
    remote_counts: Tensor
    remote_row: Tensor | None = None
    kept: Kept | None = None

    @property
    def num_rows(self) -> int:
        kept = 0 if self.kept is None else self.kept.position.numel()
        return sum(slot.numel() for slot in self.slot) + self.remote_position.numel() + kept


@dataclass(frozen=True, eq=False)
class Tiers:
    """Finds the rows of one vertex type that a batch needs, in the tiers of one rank.

    Attributes:
        book: partition book, which maps ids to owners.
        part_id: number of the part whose rows are local.
        home: all rows of the part.
        near: tiers with some of the part's rows, nearest first. Their ``members`` are row numbers in the part.
        copies: tiers with rows of other parts, nearest first. Their ``members`` are global ids.
        narrow: attribute name -> encoding, for attributes whose rows are encoded in all tiers and on the wire. They are decoded when a batch gets them.
    """

    book: PartitionBook
    part_id: int
    home: Tier
    near: Sequence[Tier] = ()
    copies: Sequence[Tier] = ()
    narrow: Mapping[str, Narrow] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        book: PartitionBook,
        part_id: int,
        rows: Mapping[str, RowSource],
        *,
        device: torch.device,
        device_ids: Tensor = NO_IDS,
        zero_copy: bool = False,
        seeds_only: Iterable[str] = (),
        narrow: Mapping[str, Narrow] | None = None,
    ) -> Tiers:
        """Makes the tiers of a rank: home, and if ``device_ids`` is not empty, a tier with device copies of these rows.

        Args:
            rows: attribute name -> source with one row per vertex of the part.
            device: device of the batches.
            device_ids: ascending local ids, int64.
            zero_copy: True if the device reads the host's rows in place, in pinned memory.
            seeds_only: attributes that only seeds get; they are read on the host.
            narrow: attribute name -> encoding, for attributes whose rows are encoded.
        """
        size = book.size_of(part_id)
        for name, source in rows.items():
            if source.shape[0] != size:
                raise ValueError(
                    f"attribute {name!r} must have one row per vertex of part {part_id}, expected {size}, got {source.shape[0]}"
                )
        if zero_copy:
            tensors = {name: _in_memory(source) for name, source in rows.items() if name not in seeds_only}
            in_memory = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            if elsewhere := [name for name in tensors if name not in in_memory]:
                raise ValueError(
                    f"device_rows['zero_copy'] needs rows in memory, but the rows of {', '.join(elsewhere)} come from a custom row source; leave "
                    "'zero_copy' out"
                )
            rows = {**rows, **{name: TensorRows(pinned(tensor)) for name, tensor in in_memory.items()}}
        made = cls(book, part_id, Tier("host", None, rows, zero_copy, "host"), narrow=narrow or {})
        return made.with_near(device_ids, device, seeds_only)

    def with_near(self, ids: Tensor, device: torch.device, seeds_only: Iterable[str] = ()) -> Tiers:
        """Returns these tiers plus device copies of the rows ``ids`` (ascending local ids, int64), for all attributes except ``seeds_only``."""
        if not ids.numel():
            return self
        members = IdSet.of(ids, self.book.size_of(self.part_id))
        rows = {
            name: TensorRows(take_rows(source, ids).to(device))
            for name, source in self.home.rows.items()
            if name not in seeds_only
        }
        near = Tier("device", members, rows, True, "device")
        return dataclasses.replace(self, near=[*self.near, near])

    @property
    def all(self) -> Sequence[Tier]:
        """All tiers, in the order in which a look-up tries them."""
        return *self.near, self.home, *self.copies

    def look_up(self, n_id: Tensor) -> Places:
        """Finds each row of a batch: returns the places of the global ids ``n_id``, int64 [n]."""
        if self.book.num_parts == 1 and not self.near and not self.copies:
            return Places([None], [n_id], NO_IDS, NO_IDS, _NONE_REMOTE)
        sets = (
            [tier.members.words for tier in tiers if tier.members is not None] for tiers in (self.near, self.copies)
        )
        *position, remote_position = (found := ops.look_up(n_id, self.book.offsets, self.part_id, *sets))[0]
        *slot, remote_id = found[1]
        return Places(position, slot, remote_position, remote_id, found[2])

    def fetched_once(self, places: Places) -> Places:
        """Returns the same places, with each remote row fetched once even if several positions get it."""
        if not places.remote_id.numel():
            return places
        # An owner has a contiguous range of ids, so ascending ids are grouped by owner.
        remote_id, remote_row = torch.unique(places.remote_id, return_inverse=True)
        counts = torch.bincount(self.book.owner(remote_id), minlength=self.book.num_parts)
        return dataclasses.replace(places, remote_id=remote_id, remote_counts=counts, remote_row=remote_row)

    def at_home(self, row: Tensor) -> Places:
        """Returns places that take all rows from the home tier: position i gets the part's row ``row[i]``, int64 [n]."""
        position: list[Tensor | None] = [NO_IDS] * len(self.all)
        slot = [NO_IDS] * len(self.all)
        position[len(self.near)], slot[len(self.near)] = None, row
        return Places(position, slot, NO_IDS, NO_IDS, NO_IDS)

    def groups(self, places: Places) -> Iterator[tuple[Tier, Tensor | None, Tensor]]:
        """Yields (tier, positions in the batch, slots in the tier) for every tier."""
        return zip(self.all, places.position, places.slot, strict=True)

    def memory(self) -> dict[str, int]:
        """Returns bytes by kind of memory. ``host`` includes arrays that may be memory-mapped and shared. Sources without ``nbytes`` count as 0."""
        memory = {"device": 0, "host": 0, "cache": 0}
        for tier in self.all:
            if tier.memory:
                memory[tier.memory] += sum(getattr(source, "nbytes", 0) for source in tier.rows.values())
            if tier.members is not None:
                memory[tier.name] += tier.members.words.nbytes
        return memory


def _in_memory(source: RowSource) -> Tensor | None:
    """Returns a source's rows as one tensor, copied if necessary. None for rows in other storage."""
    if isinstance(source, TensorRows):
        return source.tensor
    is_here = isinstance(source.wide if isinstance(source, EncodedRows) else source, (TensorRows, JoinedRows))
    return source.whole() if is_here and isinstance(source, (JoinedRows, EncodedRows)) else None
