"""The rows that a rank has, and the tier of each.

The tiers of a rank are an ordered list: those **near** hold some of its part's rows, **home** all of them, those of **copies** rows of other
parts. What is in none of them is **remote**. One look-up says for every id of a batch which tier serves it, at which slot: the first that has it.

Statistics count rows under four names: ``device``, the part's rows that batches need most, in device memory; ``host``, the part's rows on the host,
in memory, in a memory-mapped file or in another storage; ``cache``, copies of the remote rows that batches need most; ``remote``.
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
_NONE_REMOTE = torch.zeros(1, dtype=torch.int64, device="cpu")  # of one part


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
class Tier:
    """Rows of one set of vertices, in one kind of memory.

    Attributes:
        name: under which statistics count rows that it serves.
        members: whose; slot i of every attribute is the row of ``members.ids[i]``. None: the part's, all of them.
        rows: attribute name -> source.
        on_device: a device reads the rows where they are; then each source is a :class:`TensorRows`.
        memory: under which ``memory()`` counts the rows; '' where another rank does.
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
        """The rows of an attribute for the device to read, if the tier is ``on_device``."""
        source = self.rows[name]
        if not isinstance(source, TensorRows):
            raise TypeError(f"rows of {name!r} that a device reads must be a TensorRows, got {type(source).__name__}")
        return source.tensor


@dataclass(frozen=True, eq=False)
class Kept:
    """Remote rows of a batch that a changing cache has (:class:`salientpp.store.fetch.Fetch`), and what it takes over from the batch: int64 vectors.

    Attributes:
        position, slot: places in the batch, and where their rows are when it is put together.
        admitted_row, admitted_slot: which of the fetched rows the cache takes after that, and where to.
    """

    position: Tensor
    slot: Tensor
    admitted_row: Tensor
    admitted_slot: Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of a batch are: for each tier and for what is remote, ``position`` in the batch and ``slot`` there, int64.

    The positions of all groups together hold every place of the batch once.

    Attributes:
        position, slot: by tier, in the order of the tiers. A position None: all of the batch, in order.
        remote_position: those that get rows of other ranks.
        remote_id: global ids to fetch, grouped by owner.
        remote_counts: int64 [K], how many to fetch from each part.
        remote_row: for each remote position, which of the fetched rows it gets; None: one each, in order.
        kept: those whose rows are read when the batch is put together.
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
    """The tiers of one rank, for vertices of one type.

    Attributes:
        book: who owns what.
        part_id: the part whose rows are local.
        home: all rows of the part.
        near: of the part's rows, nearest first; members are rows of the part.
        copies: of other parts' rows, nearest first; members are global ids.
        narrow: of the attributes whose rows all tiers have, and other ranks send, as encoded bytes, what they are decoded to when a batch gets them.
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
        """Home, and a copy of the rows ``device_ids`` on the device.

        Args:
            rows: attribute name -> a row for every vertex of the part.
            device: where batches live.
            device_ids: ascending local ids, int64.
            zero_copy: the device reads rows of the host where they are, in pinned memory.
            seeds_only: attributes that are read on the host alone.
            narrow: of the attributes whose rows are encoded.
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
                    f"zero_copy needs rows in memory, but those of {', '.join(elsewhere)} come from a source of yours; leave zero_copy out"
                )
            rows = {**rows, **{name: TensorRows(pinned(tensor)) for name, tensor in in_memory.items()}}
        made = cls(book, part_id, Tier("host", None, rows, zero_copy, "host"), narrow=narrow or {})
        return made.with_near(device_ids, device, seeds_only)

    def with_near(self, ids: Tensor, device: torch.device, seeds_only: Iterable[str] = ()) -> Tiers:
        """These tiers and a copy on ``device`` of the rows ``ids``, ascending local ids int64, of all attributes but those for seeds."""
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
        """In the order of a look-up's groups."""
        return *self.near, self.home, *self.copies

    def look_up(self, n_id: Tensor) -> Places:
        """Places of the int64 [n] global ids ``n_id``."""
        if self.book.num_parts == 1 and not self.near and not self.copies:
            return Places([None], [n_id], NO_IDS, NO_IDS, _NONE_REMOTE)
        sets = (
            [tier.members.words for tier in tiers if tier.members is not None] for tiers in (self.near, self.copies)
        )
        *position, remote_position = (found := ops.look_up(n_id, self.book.offsets, self.part_id, *sets))[0]
        *slot, remote_id = found[1]
        return Places(position, slot, remote_position, remote_id, found[2])

    def fetched_once(self, places: Places) -> Places:
        """The same places where each remote row is fetched once, however many positions get it."""
        if not places.remote_id.numel():
            return places
        # Owners have ranges of ids, so ascending ids are grouped by owner.
        remote_id, remote_row = torch.unique(places.remote_id, return_inverse=True)
        counts = torch.bincount(self.book.owner(remote_id), minlength=self.book.num_parts)
        return dataclasses.replace(places, remote_id=remote_id, remote_counts=counts, remote_row=remote_row)

    def at_home(self, row: Tensor) -> Places:
        """Places of rows int64 [n] of the part that all come from home."""
        position: list[Tensor | None] = [NO_IDS] * len(self.all)
        slot = [NO_IDS] * len(self.all)
        position[len(self.near)], slot[len(self.near)] = None, row
        return Places(position, slot, NO_IDS, NO_IDS, NO_IDS)

    def groups(self, places: Places) -> Iterator[tuple[Tier, Tensor | None, Tensor]]:
        """(tier, positions, slots) of every tier."""
        return zip(self.all, places.position, places.slot, strict=True)

    def memory(self) -> dict[str, int]:
        """Bytes by kind of memory; ``host`` counts arrays that may be memory-mapped and shared, sources that do not say take none."""
        memory = {"device": 0, "host": 0, "cache": 0}
        for tier in self.all:
            if tier.memory:
                memory[tier.memory] += sum(getattr(source, "nbytes", 0) for source in tier.rows.values())
            if tier.members is not None:
                memory[tier.name] += tier.members.words.nbytes
        return memory


def _in_memory(source: RowSource) -> Tensor | None:
    """The rows as one tensor, copied if need be; None of another storage."""
    if isinstance(source, TensorRows):
        return source.tensor
    is_here = isinstance(source.wide if isinstance(source, EncodedRows) else source, (TensorRows, JoinedRows))
    return source.whole() if is_here and isinstance(source, (JoinedRows, EncodedRows)) else None
