"""Assembles the rows of a batch, from the memory of this rank (its tiers) and from other ranks.

A worker thread takes rows from the host's tiers, both for this rank's batch and for the requests of other ranks. Rows from other ranks arrive last.
A loader chooses one of two methods when it is constructed. Each method makes one plan per batch for all attributes:

* :class:`InPlace`, on the CPU: the worker writes every row to its place, and leaves gaps for rows that will arrive.
* :class:`Packed`, for another device: the worker packs the rows that the device lacks, one after the other, into pinned memory. They are copied to
  the device, which puts all rows in their places in one pass (:mod:`salientpp.store.assembly`).

:class:`Fetch` does this for all attributes and all vertex types of a batch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salientpp.processes import Lock
from salientpp.store.assembly import assemble_rows, decode_rows
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Column, Counts, Exchange, PendingRows
from salientpp.store.narrow import Narrow, NarrowRows, decoded_to
from salientpp.store.rows import RowSource, TensorRows, hold_for_stream, pinned, put_rows, row_numbers, take_rows
from salientpp.store.tiers import NO_IDS, Kept, Places, Tiers

#: Rows [slots, ...] of a changing cache, which lie on the host, and the batch's hits in the cache.
KeptRows = tuple[Tensor, Kept]


class InPlace:
    """Assembles a batch's rows on the host: writes every row to its place in one tensor.

    Args:
        buffers: pool that provides memory for large tensors. None: torch allocates it.
        decodes: True: decode encoded rows. False: leave them encoded, as rows for other ranks are.

    Attributes:
        holds: True if the pipeline delivers a batch one tick later, so that the device can finish its work meanwhile.
    """

    holds = False

    def __init__(self, buffers: BufferPool | None = None, decodes: bool = True) -> None:
        self.buffers, self._decodes = buffers, decodes

    def plan(self, tiers: Tiers, places: Places) -> Places:
        return places

    def plan_for_others(self, tiers: Tiers, row: Tensor) -> Places:
        """Plans the rows for other ranks: the part's rows with the numbers ``row``, int64 [a], in order."""
        return tiers.at_home(row)

    def take(self, tiers: Tiers, name: str, plan: Places) -> Tensor:
        """Writes the host's rows to their places in a new tensor, with gaps for others. A worker thread calls it."""
        like, narrow = tiers.home.rows[name], self._narrow(tiers, name)
        if narrow is None and plan.position[0] is None and isinstance(like, TensorRows):  # all rows come from home
            slot = plan.slot[0]
            if like.is_little(slot.numel()):
                return like.tensor.index_select(0, slot)
        empty = torch.empty if self.buffers is None else self.buffers.empty
        row_shape, dtype = (like.shape[1:], like.dtype) if narrow is None else (narrow.row_shape, narrow.dtype)
        out = empty((plan.num_rows, *row_shape), dtype=dtype)
        for tier, position, slot in tiers.groups(plan):
            if slot.numel():
                _put(narrow, tier.rows[name], slot, out, position)
        return out

    def put_together(
        self, tiers: Tiers, name: str, plan: Places, taken: Tensor, arrived: Tensor | None, kept: KeptRows | None = None
    ) -> Tensor:
        """Fills the gaps in ``taken`` with rows that arrived from other ranks, and with rows of a changing cache."""
        narrow = self._narrow(tiers, name)
        if kept is not None:
            _put(narrow, kept[0], kept[1].slot, taken, kept[1].position)
        if arrived is not None and plan.remote_position.numel():
            row = row_numbers(arrived.size(0)) if plan.remote_row is None else plan.remote_row
            _put(narrow, arrived, row, taken, plan.remote_position)
        return taken

    def _narrow(self, tiers: Tiers, name: str) -> Narrow | None:
        """Returns the encoding of an attribute whose rows are decoded here, or None."""
        return tiers.narrow.get(name) if self._decodes else None

    def pin(self, batch: Any) -> Any:
        return batch

    def to_device(self, value: Any) -> Any:
        return value

    def measure(self, parts: Iterable[Tensor]) -> None:
        pass

    def bytes_under_way(self, num_batches: int) -> int:
        """Returns an upper bound of the bytes that the rows of batches in flight take: the bytes of the pool."""
        return 0 if self.buffers is None else self.buffers.bytes_allocated


def _put(narrow: Narrow | None, rows: Tensor | RowSource, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
    """Copies ``out[out_index] = rows[index]``, and decodes the rows if they have the encoding ``narrow``."""
    if narrow is not None:
        narrow.put(TensorRows(rows) if isinstance(rows, Tensor) else rows, index, out, out_index)
    elif isinstance(rows, Tensor):
        put_rows(rows, index, out, out_index)
    else:
        rows.take(index, out, out_index)


def _take_over(slots: Tensor, arrived: Tensor, kept: Kept) -> None:
    """Copies some of the fetched rows into the ``slots`` of a changing cache, as ``kept`` says. ``arrived``: all fetched rows."""
    row = kept.admitted_row
    if not row.numel():
        return
    if arrived.device.type != "cpu":
        arrived, row = arrived.index_select(0, row.to(arrived.device)).cpu(), torch.arange(row.numel(), device="cpu")
    put_rows(arrived, row, slots, kept.admitted_slot)


@dataclass(frozen=True, eq=False)
class Recipe:
    """Tells a device how to assemble the rows of a batch from several tensors.

    Attributes:
        index: int32 or int64 [n]: number of the row for each position of the batch. Numbers count the rows of the tiers
            ``on_device``, then the packed, arrived and kept rows. None: the batch is the packed rows, in order.
        packed: one int64 vector per tier, the slots of the rows that the worker packs.
    """

    index: Tensor | None
    packed: Sequence[Tensor]

    def to(self, device: torch.device, non_blocking: bool) -> Recipe:
        if self.index is None:
            return self
        return dataclasses.replace(self, index=self.index.to(device, non_blocking=non_blocking))


class Packed:
    """Assembles a batch's rows on ``device``. The host packs only the rows that the device lacks.

    Args:
        device: device of the assembled rows.
        decodes: True: decode encoded rows. False: leave them encoded.
        dtype: dtype in which ``x`` is assembled, if that takes no further pass over the rows. None: as stored.
    """

    holds = True

    def __init__(self, device: torch.device, decodes: bool = True, dtype: torch.dtype | None = None) -> None:
        self._device, self._decodes, self._dtype = device, decodes, dtype
        self._largest = 0

    def plan(self, tiers: Tiers, places: Places) -> Recipe:
        packed = [NO_IDS if tier.on_device else slot for tier, _, slot in tiers.groups(places)]
        if any(position is None and not tier.on_device for tier, position, _ in tiers.groups(places)):
            return Recipe(None, packed)
        # For each tensor: the positions it fills, the rows it fills them with (None: all, in order), and its number of rows.
        takes: list[tuple[Tensor | None, Tensor | None, int]] = [
            (position, slot, tier.num_rows) for tier, position, slot in tiers.groups(places) if tier.on_device
        ]
        takes += [(position, None, slot.numel()) for tier, position, slot in tiers.groups(places) if not tier.on_device]
        takes.append((places.remote_position, places.remote_row, places.remote_id.numel()))
        if places.kept is not None:
            takes.append((places.kept.position, None, places.kept.slot.numel()))
        num_rows = sum(size for _, _, size in takes)
        index = torch.empty(places.num_rows, dtype=torch.int32 if num_rows < 2**31 else torch.int64, device="cpu")
        begin = 0
        for position, row, size in takes:
            row = torch.arange(size, device="cpu") if row is None else row
            index[slice(None) if position is None else position] = (row + begin).to(index.dtype)
            begin += size
        return Recipe(pinned(index), packed)

    def plan_for_others(self, tiers: Tiers, row: Tensor) -> Recipe:
        return self.plan(tiers, tiers.look_up(row + tiers.book.range_of(tiers.part_id)[0]))

    def take(self, tiers: Tiers, name: str, plan: Recipe) -> Tensor:
        like = tiers.home.rows[name]
        # torch's pool of pinned memory does not reuse this memory before the copy out of it has finished.
        num_rows = sum(slot.numel() for slot in plan.packed)
        out = torch.empty(
            (num_rows, *like.shape[1:]), dtype=like.dtype, pin_memory=torch.accelerator.is_available(), device="cpu"
        )
        begin = 0
        for tier, slot in zip(tiers.all, plan.packed, strict=True):
            if slot.numel():
                tier.rows[name].take(slot, out[begin : begin + slot.numel()])
                begin += slot.numel()
        return out

    def put_together(
        self, tiers: Tiers, name: str, plan: Recipe, taken: Tensor, arrived: Tensor | None, kept: KeptRows | None = None
    ) -> Tensor:
        narrow = tiers.narrow.get(name) if self._decodes else None
        if name == "x":
            narrow = decoded_to(self._dtype, narrow, tiers.home.rows[name])
        if plan.index is None:
            return taken if narrow is None else decode_rows(narrow, [taken], None)
        tensors = [rows for rows in self._tensors(tiers, name, taken, arrived, kept) if len(rows)]
        if narrow is not None:
            return decode_rows(narrow, tensors or [taken], plan.index)
        out = taken.new_empty((plan.index.numel(), *taken.shape[1:]))
        assemble_rows(tensors, plan.index, out)
        return out

    def _tensors(
        self, tiers: Tiers, name: str, taken: Tensor, arrived: Tensor | None, kept: KeptRows | None
    ) -> list[Tensor]:
        """Returns the tensors that hold an attribute's rows, in the order of :attr:`Recipe.index`."""
        tensors = [tier.tensor(name) for tier in tiers.all if tier.on_device]
        for rows in tensors:
            hold_for_stream(rows, self._device)
        tensors += [taken, taken[:0] if arrived is None else arrived]
        if kept is not None:
            (rows, places), is_pinned = kept, torch.accelerator.is_available()
            shape = (places.slot.numel(), *rows.shape[1:])
            staged = torch.empty(shape, dtype=rows.dtype, pin_memory=is_pinned, device="cpu")
            put_rows(rows, places.slot, staged)
            tensors.append(staged.to(self._device, non_blocking=True))
        return tensors

    def pin(self, batch: Any) -> Any:
        """Returns the batch with its tensors in pinned memory."""
        return batch.apply(lambda value: pinned(value) if _is_plain(value) else value)

    def to_device(self, value: Any) -> Any:
        """Copies a tensor, an object with ``to``, or a dictionary of them to the device, without waiting for it."""
        if isinstance(value, Mapping):
            return {name: self.to_device(item) for name, item in value.items()}
        return None if value is None else value.to(self._device, non_blocking=True)

    def measure(self, parts: Iterable[Tensor]) -> None:
        """Records the bytes that a batch and its inputs (``parts``) take on the device, for :meth:`bytes_under_way`."""
        on_device = {id(part): part.nbytes for part in parts if part.device == self._device}
        self._largest = max(self._largest, sum(on_device.values()))

    def bytes_under_way(self, num_batches: int) -> int:
        """Returns the device memory of this number of batches, in bytes, if each is as large as the largest so far."""
        return num_batches * self._largest


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided


@dataclass(frozen=True, eq=False)
class Taken:
    """Rows that a worker thread has taken from the host's memory, for this rank's batch and for other ranks.

    Attributes:
        own: by column, rows for this rank's batch, as :class:`InPlace` or :class:`Packed` takes them.
        served: by column, rows for the other ranks.
        plan: by vertex type, how the rows of ``served`` are assembled.

    Columns without a plan for their type, such as sums, are already complete.
    """

    own: Mapping[Column, Tensor]
    served: Mapping[Column, Tensor]
    plan: Mapping[str | None, Any]


def places_of(
    tiers: Mapping[str | None, Tiers],
    columns: Sequence[Column],
    n_id: Mapping[str | None, Tensor],
    repeats: bool = False,
) -> dict[str | None, Places]:
    """Finds the tier or owner of each needed row, by vertex type. A type without columns or ids gets empty places.

    Args:
        repeats: True if ``n_id`` may hold a vertex several times. Its row is then fetched once.
    """
    needed = {type_ for type_, _ in columns}
    places = {
        type_: of_type.look_up(n_id.get(type_, NO_IDS) if type_ in needed else NO_IDS)
        for type_, of_type in tiers.items()
    }
    if repeats:
        places = {type_: tiers[type_].fetched_once(of_type) for type_, of_type in places.items()}
    return places


@dataclass
class Fetch:
    """Gets the rows of an engine's batches, from this host's memory and from other ranks.

    Attributes:
        tiers: by vertex type, the tiers of this rank.
        exchange: exchange that gets rows of other ranks.
        columns: attributes that every sampled vertex gets; the same on all ranks.
        seed_columns: attributes that only seeds get.
        own, served: methods that assemble rows, for this rank's batches and for other ranks.
        repeats: True if a batch may hold a vertex several times, as sampled trees do.
        moving: by vertex type, attribute name -> [slots, ...] on the host: the rows of a changing cache. Its hits count as those of the tier 'cache'.
        counts: number of rows delivered, by vertex type and by the name of the tier that served them. A remote row counts once per fetch.
        counting: lock for ``counts``, because several threads may each drive an epoch.
        seed_rows_here: column of ``seed_columns`` -> id of the vertex of row 0, and rows, for a rank whose part lacks the rows of its seeds.
    """

    tiers: Mapping[str | None, Tiers]
    exchange: Exchange
    columns: Sequence[Column]
    seed_columns: Sequence[Column]
    own: InPlace | Packed
    served: InPlace | Packed
    repeats: bool = False
    moving: Mapping[str | None, Mapping[str, Tensor]] = field(default_factory=dict)
    counts: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    counting: Lock = field(default_factory=Lock)
    seed_rows_here: Mapping[Column, tuple[int, RowSource]] = field(default_factory=dict)

    def rows_of(self, column: Column) -> RowSource:
        """Returns a source of the part's rows of a column. It decodes encoded rows, so it gives the values that batches get."""
        tiers, name = self.tiers[column[0]], column[1]
        rows, narrow = tiers.home.rows[name], tiers.narrow.get(name)
        return rows if narrow is None else NarrowRows(rows, narrow)

    @property
    def is_local(self) -> bool:
        """True if batches are assembled on the host, and this rank is the only one, so that it has all rows."""
        return self.exchange.comm.size == 1 and isinstance(self.own, InPlace)

    @property
    def has_copies(self) -> bool:
        """True if a device holds copies of the part's rows. A later change of these rows does not change the copies."""
        return any(tiers.near or tiers.home.on_device for tiers in self.tiers.values())

    def placeholder(self, column: Column, num_rows: int) -> Tensor:
        """Returns a tensor of ``num_rows`` rows, without memory for them, for code that reads only shape and dtype."""
        like = self.rows_of(column)
        return torch.empty((), dtype=like.dtype, device="cpu").expand(num_rows, *like.shape[1:])

    def seed_rows(self, n_id: Mapping[str | None, Tensor], num_seeds: int) -> dict[Column, Tensor]:
        """Returns the rows of ``seed_columns`` for the seeds: the first ``num_seeds`` of their type's ``n_id``."""
        found = {}
        for type_, name in self.seed_columns:
            begin, _ = self.tiers[type_].book.range_of(self.tiers[type_].part_id)
            first, rows = self.seed_rows_here.get((type_, name)) or (begin, self.rows_of((type_, name)))
            found[type_, name] = take_rows(rows, n_id[type_][:num_seeds] - first)
        return found

    def look_up(self, n_id: Mapping[str | None, Tensor]) -> dict[str | None, Places]:
        """Finds each row that a batch needs: its tier or owner, by vertex type. See :func:`places_of`."""
        return places_of(self.tiers, self.columns, n_id, self.repeats)

    def take_all(
        self, columns: Sequence[Column], n_id: Mapping[str | None, Tensor]
    ) -> tuple[dict[Column, Tensor], dict[str | None, Places]]:
        """Returns the rows of ``columns`` for ``n_id``, int64 [n] per type, and their places. This rank must hold all of them."""
        places: dict[str | None, Any] = self.look_up(n_id)
        return {(type_, name): self.own.take(self.tiers[type_], name, places[type_]) for type_, name in columns}, places

    def plan(self, places: Mapping[str | None, Places]) -> dict[str | None, Any]:
        """Plans how this rank assembles its batch from the rows at these places, by vertex type."""
        return {type_: self.own.plan(self.tiers[type_], of_type) for type_, of_type in places.items()}

    def take(self, plan: Mapping[str | None, Any], asked: Mapping[str | None, Tensor]) -> Taken:
        """Takes rows from the host's memory, for this rank's batch and for other ranks. A worker thread calls it.

        Args:
            plan: plan of this rank's batch; empty if the rank has no batch.
            asked: by vertex type int64 [a], rows of this part that the other ranks want, in the order of the ranks. Entries for messages
                are skipped.
        """
        own = {
            (type_, name): self.own.take(self.tiers[type_], name, plan[type_]) for type_, name in self.columns if plan
        }
        for_others: dict[str | None, Any] = {
            type_: self.served.plan_for_others(self.tiers[type_], rows)
            for type_, rows in asked.items()
            if type_ in self.tiers
        }
        served = {
            (type_, name): self.served.take(self.tiers[type_], name, for_others[type_])
            for type_, name in self.columns
            if type_ in for_others
        }
        return Taken(own, served, for_others)

    def to_device(self, taken: Taken) -> Taken:
        """Copies the taken rows, and the plan of the rows for other ranks, to the device that assembles them."""
        return Taken(
            self.own.to_device(taken.own), self.served.to_device(taken.served), self.served.to_device(taken.plan)
        )

    def put_served_together(self, taken: Taken) -> Taken:
        """Assembles the rows for the other ranks, so that they can be sent."""
        served = {
            (type_, name): self.served.put_together(self.tiers[type_], name, taken.plan[type_], rows, None)
            if type_ in taken.plan
            else rows
            for (type_, name), rows in taken.served.items()
        }
        return dataclasses.replace(taken, served=served)

    def send(self, counts: Counts, taken: Taken) -> PendingRows:
        """Starts to send the rows that other ranks requested. The result receives the rows that this rank requested."""
        return self.exchange.send_rows(counts, taken.served)

    def put_together(
        self,
        plan: Mapping[str | None, Any],
        taken: Taken,
        pending: PendingRows,
        places: Mapping[str | None, Places],
    ) -> tuple[dict[Column, Tensor], dict[Column, Tensor]]:
        """Waits for the requested rows and completes this rank's batch. Then copies the rows that a changing cache admits into its slots.

        Returns:
            The rows of the batch; and the rows that arrived for it, with columns that need no plan, such as sums.
        """
        fetched = pending.wait()
        arrived = {column: self.own.to_device(rows) for column, rows in fetched.items()}
        arrived |= {column: rows for column, rows in taken.own.items() if column[0] not in plan}
        rows = {
            (type_, name): self.own.put_together(
                self.tiers[type_],
                name,
                plan[type_],
                rows,
                arrived.get((type_, name)),
                self._kept(type_, name, places[type_]),
            )
            for (type_, name), rows in taken.own.items()
            if type_ in plan
        }
        for type_, moving in self.moving.items():
            kept = places[type_].kept
            if kept is not None:
                for name, slots in moving.items():
                    _take_over(slots, fetched[type_, name], kept)
        return rows, arrived

    def _kept(self, type_: str | None, name: str, places: Places) -> KeptRows | None:
        return None if places.kept is None else (self.moving[type_][name], places.kept)

    def count(self, places: Mapping[str | None, Places]) -> None:
        """Adds the numbers of rows that each tier served for a delivered batch to ``counts``."""
        with self.counting:
            for type_, of_type in places.items():
                for tier, _, slot in self.tiers[type_].groups(of_type):
                    self.counts[type_, tier.name] += slot.numel()
                if of_type.kept is not None:
                    self.counts[type_, "cache"] += of_type.kept.slot.numel()
                self.counts[type_, "remote"] += of_type.remote_id.numel()
