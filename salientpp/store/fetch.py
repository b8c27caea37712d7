"""Puts the rows of a batch together, from the tiers of this rank and from other ranks.

A worker thread takes rows from the tiers of the host, for this rank's batch and for what other ranks asked for; those that arrive from other ranks
come last. There are two ways, one of which a loader chooses when it is made; each has a plan that is made once for all attributes:

* :class:`InPlace`, on the CPU: the worker writes every row to its place, with gaps for those that will arrive.
* :class:`Packed`, for another device: the worker packs the rows that the device lacks, one after the other, into pinned memory. They are
  copied, and the device puts all rows in their places in one pass (:mod:`salientpp.store.assembly`).

:class:`Fetch` does so for all attributes and all vertex types of a batch.
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
from salientpp.store.assembly import assemble_rows
from salientpp.store.buffers import BufferPool
from salientpp.store.exchange import Column, Counts, Exchange, PendingRows
from salientpp.store.narrow import Narrow, NarrowRows
from salientpp.store.rows import RowSource, TensorRows, pinned, put_rows, row_numbers, take_rows
from salientpp.store.tiers import NO_IDS, Kept, Places, Tiers

#: Rows [slots, ...] on the host of a cache that changes, and which of them a batch gets.
KeptRows = tuple[Tensor, Kept]


class InPlace:
    """Every row is written to its place in a tensor on the host.

    Args:
        buffers: where the memory of large tensors comes from; None: torch.
        decodes: rows that are encoded are decoded; rows for other ranks are not.

    Attributes:
        holds: a finished batch should stay in the pipeline for one more tick.
    """

    holds = False

    def __init__(self, buffers: BufferPool | None = None, decodes: bool = True) -> None:
        self.buffers, self._decodes = buffers, decodes

    def plan(self, tiers: Tiers, places: Places) -> Places:
        return places

    def plan_for_others(self, tiers: Tiers, row: Tensor) -> Places:
        """For rows int64 [a] of the part that other ranks asked for."""
        return tiers.at_home(row)

    def take(self, tiers: Tiers, name: str, plan: Places) -> Tensor:
        """Take from the host what the plan wants from there; for a worker thread."""
        like, narrow = tiers.home.rows[name], self._narrow(tiers, name)
        if narrow is None and plan.position[0] is None and isinstance(like, TensorRows):  # all come from home
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
        """Complete what was taken, with the rows that arrived from other ranks, and those that were kept of earlier batches."""
        narrow = self._narrow(tiers, name)
        if kept is not None:
            _put(narrow, kept[0], kept[1].slot, taken, kept[1].position)
        if arrived is not None and plan.remote_position.numel():
            row = row_numbers(arrived.size(0)) if plan.remote_row is None else plan.remote_row
            _put(narrow, arrived, row, taken, plan.remote_position)
        return taken

    def _narrow(self, tiers: Tiers, name: str) -> Narrow | None:
        """What the rows of an attribute are decoded to, if they are."""
        return tiers.narrow.get(name) if self._decodes else None

    def pin(self, batch: Any) -> Any:
        return batch

    def to_device(self, value: Any) -> Any:
        return value

    def measure(self, parts: Iterable[Tensor]) -> None:
        pass

    def bytes_under_way(self, num_batches: int) -> int:
        """What batches take at most: here, what the pool has taken for as many as there were."""
        return 0 if self.buffers is None else self.buffers.bytes_allocated


def _put(narrow: Narrow | None, rows: Tensor | RowSource, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
    """``out[out_index] = rows[index]``, decoded if the rows are ``narrow``."""
    if narrow is not None:
        narrow.put(TensorRows(rows) if isinstance(rows, Tensor) else rows, index, out, out_index)
    elif isinstance(rows, Tensor):
        put_rows(rows, index, out, out_index)
    else:
        rows.take(index, out, out_index)


def _take_over(slots: Tensor, arrived: Tensor, kept: Kept) -> None:
    """Write to ``slots`` what a batch has fetched, ``arrived`` [fetched, ...] on the host or on a device, and what is to be kept of it."""
    row = kept.admitted_row
    if not row.numel():
        return
    if arrived.device.type != "cpu":
        arrived, row = arrived.index_select(0, row.to(arrived.device)).cpu(), torch.arange(row.numel(), device="cpu")
    put_rows(arrived, row, slots, kept.admitted_slot)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a device puts rows together.

    Attributes:
        index: int32 or int64 [n], for every place the row among those of the tiers ``on_device``, the packed, the arrived and the kept
            ones, laid end to end in this order; None: the packed rows, as they are.
        packed: int64, by tier, the slots whose rows are packed first.
    """

    index: Tensor | None
    packed: Sequence[Tensor]

    def to(self, device: torch.device, non_blocking: bool) -> Recipe:
        if self.index is None:
            return self
        return dataclasses.replace(self, index=self.index.to(device, non_blocking=non_blocking))


class Packed:
    """Rows are put together on ``device``, and decoded there unless they are for other ranks."""

    holds = True

    def __init__(self, device: torch.device, decodes: bool = True) -> None:
        self._device, self._decodes = device, decodes
        self._largest = 0

    def plan(self, tiers: Tiers, places: Places) -> Recipe:
        packed = [NO_IDS if tier.on_device else slot for tier, _, slot in tiers.groups(places)]
        if any(position is None and not tier.on_device for tier, position, _ in tiers.groups(places)):
            return Recipe(None, packed)
        # Which places each tensor fills, from which of its rows (None: all, in order), and how many rows it has.
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
        # torch's pool of pinned memory gives it to nobody else before the copy out of it is done.
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
        out = taken
        if plan.index is not None:
            tensors = self._tensors(tiers, name, taken, arrived, kept)
            out = taken.new_empty((plan.index.numel(), *taken.shape[1:]))
            assemble_rows([rows for rows in tensors if len(rows)], plan.index, out)
        return out if narrow is None else narrow.decode_by_torch(out)

    def _tensors(
        self, tiers: Tiers, name: str, taken: Tensor, arrived: Tensor | None, kept: KeptRows | None
    ) -> list[Tensor]:
        """Those that hold the rows of an attribute, in the order of a plan's ``index``."""
        tensors = [tier.tensor(name) for tier in tiers.all if tier.on_device]
        tensors += [taken, taken[:0] if arrived is None else arrived]
        if kept is not None:
            (rows, places), is_pinned = kept, torch.accelerator.is_available()
            shape = (places.slot.numel(), *rows.shape[1:])
            staged = torch.empty(shape, dtype=rows.dtype, pin_memory=is_pinned, device="cpu")
            put_rows(rows, places.slot, staged)
            tensors.append(staged.to(self._device, non_blocking=True))
        return tensors

    def pin(self, batch: Any) -> Any:
        """The batch with its tensors in pinned memory."""
        return batch.apply(lambda value: pinned(value) if _is_plain(value) else value)

    def to_device(self, value: Any) -> Any:
        """A copy on the device, from pinned memory without waiting for it, of what has ``to``, or of a dictionary of such."""
        if isinstance(value, Mapping):
            return {name: self.to_device(item) for name, item in value.items()}
        return None if value is None else value.to(self._device, non_blocking=True)

    def measure(self, parts: Iterable[Tensor]) -> None:
        """Note what a batch takes on the device, with all that it is made from."""
        on_device = {id(part): part.nbytes for part in parts if part.device == self._device}
        self._largest = max(self._largest, sum(on_device.values()))

    def bytes_under_way(self, num_batches: int) -> int:
        """What so many batches take on the device at most."""
        return num_batches * self._largest


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided


@dataclass(frozen=True, eq=False)
class Taken:
    """What the worker has taken from the tiers of the host.

    Attributes:
        own: by column, for this rank's batch; by the way of :class:`InPlace` or :class:`Packed`.
        served: by column, for the other ranks.
        plan: how ``served`` is put together, by vertex type.

    Of a column whose type has no plan, what was taken is complete; ways put such columns there.
    """

    own: Mapping[Column, Tensor]
    served: Mapping[Column, Tensor]
    plan: Mapping[str | None, Any]


@dataclass
class Fetch:
    """The rows of one engine's batches.

    Attributes:
        tiers: by vertex type.
        exchange: how to get rows of other ranks.
        columns: the attributes that every sampled vertex gets; the same on all ranks.
        seed_columns: those that only seeds get.
        own, served: how rows are put together for this rank's batches, and for other ranks.
        repeats: a batch may hold a vertex several times, as trees do.
        moving: by vertex type, attribute name -> [slots, ...] on the host, of a cache whose rows change; its statistics are those of the tier 'cache'.
        counts: rows delivered, by vertex type and the name of the tier that served them; remote ones as often as they were fetched.
        counting: guards them, since threads may drive an epoch each.
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

    def rows_of(self, column: Column) -> RowSource:
        """The rows of the part, as batches get them."""
        tiers, name = self.tiers[column[0]], column[1]
        rows, narrow = tiers.home.rows[name], tiers.narrow.get(name)
        return rows if narrow is None else NarrowRows(rows, narrow)

    @property
    def is_local(self) -> bool:
        """Whether batches are put together on the host, of rows that are all in this process."""
        return self.exchange.comm.size == 1 and isinstance(self.own, InPlace)

    @property
    def has_copies(self) -> bool:
        """Whether a device has rows of this part too, which may be older than those that they were copied from."""
        return any(tiers.near or tiers.home.on_device for tiers in self.tiers.values())

    def placeholder(self, column: Column, num_rows: int) -> Tensor:
        """Of the shape that the rows will have, for those who ask; it takes no memory."""
        like = self.rows_of(column)
        return torch.empty((), dtype=like.dtype, device="cpu").expand(num_rows, *like.shape[1:])

    def seed_rows(self, n_id: Mapping[str | None, Tensor], num_seeds: int) -> dict[Column, Tensor]:
        """What only seeds get: they are the first of their type's ``n_id``, global ids of this part."""
        found = {}
        for type_, name in self.seed_columns:
            begin, _ = self.tiers[type_].book.range_of(self.tiers[type_].part_id)
            found[type_, name] = take_rows(self.rows_of((type_, name)), n_id[type_][:num_seeds] - begin)
        return found

    def look_up(self, n_id: Mapping[str | None, Tensor]) -> dict[str | None, Places]:
        """The place of every row that is needed, by vertex type: none of a type without ``columns``, or that is not there."""
        needed = {type_ for type_, _ in self.columns}
        places = {
            type_: tiers.look_up(n_id.get(type_, NO_IDS) if type_ in needed else NO_IDS)
            for type_, tiers in self.tiers.items()
        }
        if self.repeats:
            places = {type_: self.tiers[type_].fetched_once(of_type) for type_, of_type in places.items()}
        return places

    def take_all(
        self, columns: Sequence[Column], n_id: Mapping[str | None, Tensor]
    ) -> tuple[dict[Column, Tensor], dict[str | None, Places]]:
        """The rows of these columns for the vertices ``n_id`` int64 [n] of each type, and their places, where none is remote or on a device."""
        places: dict[str | None, Any] = self.look_up(n_id)
        return {(type_, name): self.own.take(self.tiers[type_], name, places[type_]) for type_, name in columns}, places

    def plan(self, places: Mapping[str | None, Places]) -> dict[str | None, Any]:
        """How the rows at these places are put together, by vertex type."""
        return {type_: self.own.plan(self.tiers[type_], of_type) for type_, of_type in places.items()}

    def take(self, plan: Mapping[str | None, Any], asked: Mapping[str | None, Tensor]) -> Taken:
        """Take from the host; for a worker thread.

        Args:
            plan: of this rank's batch; empty without one.
            asked: by vertex type int64 [a], rows of this part that the others want, by rank; of types that may travel, and of messages.
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
        """Copy what is packed to where it is put together."""
        return Taken(
            self.own.to_device(taken.own), self.served.to_device(taken.served), self.served.to_device(taken.plan)
        )

    def put_served_together(self, taken: Taken) -> Taken:
        """Complete the rows for the other ranks."""
        served = {
            (type_, name): self.served.put_together(self.tiers[type_], name, taken.plan[type_], rows, None)
            if type_ in taken.plan
            else rows
            for (type_, name), rows in taken.served.items()
        }
        return dataclasses.replace(taken, served=served)

    def send(self, counts: Counts, taken: Taken) -> PendingRows:
        """Start to send the rows that the others asked for; pending are those that this rank asked for."""
        return self.exchange.send_rows(counts, taken.served)

    def put_together(
        self,
        plan: Mapping[str | None, Any],
        taken: Taken,
        pending: PendingRows,
        places: Mapping[str | None, Places],
    ) -> tuple[dict[Column, Tensor], dict[Column, Tensor]]:
        """Wait for the rows that were asked for and complete this rank's batch; then keep those of them that are to be kept.

        Returns:
            The rows of the batch; and what arrived for it, with what ways have taken from this host.
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
        """Add the rows of a delivered batch to ``counts``."""
        with self.counting:
            for type_, of_type in places.items():
                for tier, _, slot in self.tiers[type_].groups(of_type):
                    self.counts[type_, tier.name] += slot.numel()
                if of_type.kept is not None:
                    self.counts[type_, "cache"] += of_type.kept.slot.numel()
                self.counts[type_, "remote"] += of_type.remote_id.numel()
