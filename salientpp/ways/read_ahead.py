"""Reads the rows of upcoming batches from mapped files before the batches need them, for several batches at once.

Batches are drawn ahead, and wait without rows. The rows are read into buffers of slots (:mod:`salientpp.store.row_buffer`), one row a slot. Once half of the
slots are free, a thread admits the next batches, as many as fit, and reads their missing rows together. Meanwhile the batches in the other half take their
rows. If the loader waits for a batch, the thread reads the rows of the batches that are drawn, up to half of the slots.

Only speed depends on the buffers: a row that is in none is read when a batch takes it. So the rows that other ranks ask for are read when they ask.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws
from salientpp.engine.way import HostWork, PlacesByType, TiersByType, Way
from salientpp.engine.workers import SamplingWorkers
from salientpp.processes import Lock, Task, Threads, after_fork, completed
from salientpp.sampling.topology import ids_by_type
from salientpp.store.fetch import Fetch, Taken
from salientpp.store.file_rows import FileRows
from salientpp.store.narrow import EncodedRows
from salientpp.store.row_buffer import BufferedRows, RowBuffer
from salientpp.store.rows import RowSource
from salientpp.store.tiers import NO_IDS, Tiers
from salientpp.ways.lookahead.waiting import waiting_bytes

#: Most batches that wait.
_MOST_AHEAD = 64


@dataclass(eq=False)
class Ticket:
    """Records which rows must be read for a requested batch, and whether they are there.

    Attributes:
        tick: number of the batch.
        drawn: task whose result says which rows the batch needs.
        rows: by vertex type, the part's rows that the batch needs, ascending and distinct. None: not known yet, or the batch could not be drawn.
        is_held: True while the buffers hold the rows.
        error: why the rows could not be read.
        ready: set once the batch may take its rows.
    """

    tick: int
    drawn: Task | Future
    rows: Mapping[str | None, Tensor] | None = None
    is_held: bool = False
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class ReadAhead(Way):
    """Reads rows of mapped files into a buffer before the batches that need them, so that a batch does not wait for the disk.

    Args:
        num_bytes: bytes of the rows in the buffer, of its tables, and of the batches that wait. Each vertex type gets memory in proportion to its bytes in a
            batch.

    Attributes:
        buffers: the buffer of each vertex type with rows in mapped files.
    """

    name = "read ahead"
    needs_stages = True

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.buffers: dict[str | None, RowBuffer] = {}
        self._fetch: Fetch | None = None
        self._bytes_of_waiting = 0
        self._threads = Threads(1, "salientpp-read")
        self._lock = Lock()  # of the fields below
        self._stepping = Lock()  # held while batches are admitted and rows are read
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._tickets: dict[int, Ticket] = {}  # batches that have not taken their rows, by tick
        self._queue: deque[Ticket] = deque()  # those whose rows were not read yet, in order
        self._is_submitted, self._num_starving = False, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tickets": {}, "_queue": deque(), "_is_submitted": False, "_num_starving": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        after_fork(self)

    # --- construction -------------------------------------------------------------------------------------

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        files = {type_: files_of(basis, type_, of_type) for type_, of_type in tiers.items()}
        files = {type_: of_type for type_, of_type in files.items() if of_type}
        if not files:
            part = basis.source.part
            # Rows that storage hosts have sent lie in files without names. Others read ahead for this rank.
            everywhere = part.replicated if part is not None and part.num_storage_ranks else frozenset()
            shapes = [
                tiers[type_].home.rows[name].shape for type_, name in basis.source.exchanged if type_ not in everywhere
            ]
            if shapes and not any(map(math.prod, shapes)):  # a part without vertices, or rows without columns
                basis.trial()  # collective if other ranks hold some of the lists, and these ranks have rows
                return tiers
            names = ", ".join(repr(name) for _, name in basis.source.exchanged) or "any attribute"
            raise ValueError(
                f"read_ahead={self._num_bytes} reads rows of memory-mapped files, but the rows of {names} are in no such file; leave read_ahead out"
            )
        shares = self._shares(basis, tiers, files)
        placed = dict(tiers)
        for type_, columns in files.items():
            self.buffers[type_] = buffer = RowBuffer(columns, shares[type_])
            home = tiers[type_].home
            rows = {name: _buffered(buffer, name, source) for name, source in home.rows.items()}
            placed[type_] = dataclasses.replace(tiers[type_], home=dataclasses.replace(home, rows=rows))
        return placed

    def _shares(
        self, basis: Basis, tiers: TiersByType, files: Mapping[str | None, Mapping[str, FileRows]]
    ) -> dict[str | None, int]:
        """Divides the memory between buffers and waiting batches. Returns the rows in the buffer of each vertex type. May be collective."""
        batches = basis.trial()
        number = max(1, len(batches))
        self._bytes_of_waiting = sum(waiting_bytes(mfg) for pieces in batches for mfg in pieces) // number
        width = {type_: max(1, sum(rows.row_bytes for rows in columns.values())) for type_, columns in files.items()}
        needed = dict.fromkeys(files, 0.0)  # bytes per batch
        for mfg in (mfg for pieces in batches for mfg in pieces):
            for type_, ids in ids_by_type(mfg.node).items():
                if type_ in needed:
                    needed[type_] += _own_rows(tiers[type_], tiers[type_].look_up(ids)).numel() * width[type_] / number
        size = {type_: next(iter(columns.values())).num_rows for type_, columns in files.items()}
        of_batch, tables = sum(needed.values()), sum(map(RowBuffer.table_bytes, size.values()))
        # At least one slot of each type, also on a rank without batches.
        one_each = sum(width.values()) + RowBuffer.SLOT_BYTES * len(width)
        slots_of_batch = max(of_batch * (1 + RowBuffer.SLOT_BYTES / min(width.values())), one_each)
        # The batches that wait are twice as many as fill the buffer if they share no rows, but leave it the rows of a batch. They and the tables take part
        # of the bytes.
        left, waiting = float(self._num_bytes - tables), self._bytes_of_waiting
        fitting = min(2 * left / max(1.0, of_batch + 2 * waiting), (left - slots_of_batch) / max(1, waiting))
        ahead = max(2, min(_MOST_AHEAD, int(fitting)))
        left -= ahead * waiting
        if left < slots_of_batch:
            least = int(tables + 4 * (slots_of_batch + self._bytes_of_waiting))
            raise ValueError(
                f"read_ahead must hold the rows of several batches, expected about {least} bytes or more, got {self._num_bytes}; give more, or leave it out"
            )
        if not basis.source.drawing.is_collective:
            self.ahead = ahead
        else:
            self.waits = ahead
        left -= one_each
        shares: dict[str | None, int] = {}
        # A type whose rows all fit takes no more than these. So types come in the order of the time after which batches have read their rows once.
        for type_ in sorted(files, key=lambda type_: size[type_] * width[type_] / max(1.0, needed[type_])):
            share = left * needed[type_] / max(1e-9, sum(needed[other] for other in files if other not in shares))
            taken = width[type_] + RowBuffer.SLOT_BYTES
            shares[type_] = max(1, min(size[type_], 1 + int(share / taken)))
            left -= (shares[type_] - 1) * taken
        return shares

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        self._fetch = fetch

    # --- batches ------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        with self._stepping:
            with self._lock:
                # A batch of an epoch that the user has left may still wait in the queue, without a place in the table.
                old = {*self._tickets.values(), *self._queue}
                self._tickets.clear()
                self._queue.clear()
            for ticket in old:
                self._release(ticket)
                ticket.ready.set()

    def on_requested(self, draws: Draws, tick: int, sampling: Task | Future) -> None:
        self._expect(Ticket(tick, sampling))

    def on_waiting(self, draws: Draws, tick: int, places: PlacesByType) -> None:
        rows = self._rows_of(places)
        self._expect(Ticket(tick, completed(lambda: None), rows))

    def take(self, work: HostWork, take_rows: Callable[[], Taken]) -> Taken:
        with self._lock:
            # Only the oldest one is awaited: otherwise the batches before it, of another epoch at once, might fill the buffers.
            is_next = next(iter(self._tickets), None) == work.index
            ticket = self._tickets.pop(work.index) if is_next else None
        if ticket is None:
            return take_rows()
        self._await(ticket)
        try:
            if ticket.error is not None:
                raise ticket.error
            return take_rows()
        finally:
            self._release(ticket)
            self._submit()

    def _expect(self, ticket: Ticket) -> None:
        with self._lock:
            is_earlier = ticket.tick <= next(reversed(self._tickets), -1)
        if is_earlier:
            self.begin_epoch()  # two epochs at once: the one that asked last reads ahead
        with self._lock:
            self._tickets[ticket.tick] = ticket
            self._queue.append(ticket)
        self._submit()

    def _await(self, ticket: Ticket) -> None:
        """Waits until the thread has read a batch's rows. All earlier batches must have taken their rows."""
        if ticket.ready.is_set():
            return
        with self._lock:
            self._num_starving += 1
        try:
            self._submit()
            ticket.ready.wait()
        finally:
            with self._lock:
                self._num_starving = max(0, self._num_starving - 1)

    def _release(self, ticket: Ticket) -> None:
        if ticket.is_held and ticket.rows is not None:
            ticket.is_held = False
            for type_, rows in ticket.rows.items():
                self.buffers[type_].release(rows)

    # --- the thread that reads ----------------------------------------------------------------------------

    def _submit(self) -> None:
        """Wakes the reading thread."""
        with self._lock:
            if self._is_submitted or not self._queue:
                return
            self._is_submitted = True
        self._threads.submit(self._read)

    def _read(self) -> None:
        with self._lock:
            self._is_submitted = False
        try:
            while True:
                with self._stepping:
                    if not self._step():
                        return
        except BaseException as error:
            with self._lock:
                waiting = list(self._queue)
                self._queue.clear()
            for ticket in waiting:  # otherwise their batches would wait forever
                ticket.error = error
                ticket.ready.set()

    def _step(self) -> bool:
        """Reads the rows of the next batches. Returns False if there are none, or no room for them yet."""
        group = self._next_group()
        if not group:
            return False
        try:
            for buffer in self.buffers.values():
                buffer.read()
        except BaseException as error:
            for ticket in group:
                ticket.error = error
                self._release(ticket)
        with self._lock:
            for _ in group:
                self._queue.popleft()
        for ticket in group:
            ticket.ready.set()
        return True

    def _next_group(self) -> list[Ticket]:
        """Reserves room in the buffers for the next batches, as many as fit, and returns these. It waits for half of the room, unless a batch is awaited."""
        with self._lock:
            queue = list(self._queue)
        group: list[Ticket] = []
        # With less room, a few rows would be read at a time. Batches of the other half are made meanwhile.
        if not self._num_starving and self._is_half_full():
            return group
        for number, ticket in enumerate(queue):
            if group and self._num_starving and not _is_known(ticket):
                break  # a batch is awaited, so the rows of the batches that are known are read now
            self._learn_rows(ticket)
            if group and self._num_starving and self._is_half_full():
                break
            if not self._admit(ticket, [other for other in queue[number + 1 :] if other.rows is not None]):
                fits_later = group or not self._num_starving or self._any_held()
                if fits_later:
                    break  # otherwise the batch is larger than a buffer, so it will read its rows itself
            group.append(ticket)
        return group

    def _is_half_full(self) -> bool:
        return any(2 * buffer.num_held > buffer.num_slots for buffer in self.buffers.values())

    def _any_held(self) -> bool:
        with self._lock:
            return any(ticket.is_held for ticket in self._tickets.values())

    def _learn_rows(self, ticket: Ticket) -> None:
        """Waits until a batch is drawn, and records which rows it needs."""
        if ticket.rows is None:
            try:
                ticket.rows = self._rows_of(ticket.drawn.result().places)
            except BaseException:  # the batch's own stage raises it
                ticket.rows = {}

    def _rows_of(self, places: PlacesByType) -> dict[str | None, Tensor]:
        assert self._fetch is not None  # set before any batch
        tiers = self._fetch.tiers
        # If the user has replaced the rows of a Data, they come from elsewhere.
        types = [type_ for type_ in self.buffers if any(map(_is_buffered, tiers[type_].home.rows.values()))]
        return {type_: torch.unique(_own_rows(tiers[type_], places[type_])) for type_ in types}

    def _admit(self, ticket: Ticket, upcoming: Sequence[Ticket]) -> bool:
        """Reserves room for a batch's rows in all buffers. Returns False, without effect, if one lacks room."""
        assert ticket.rows is not None
        held: list[str | None] = []
        for type_, rows in ticket.rows.items():
            later = [other.rows[type_] for other in upcoming if other.rows and type_ in other.rows]
            if not self.buffers[type_].admit(rows, later):
                for other in held:
                    self.buffers[other].release(ticket.rows[other])
                return False
            held.append(type_)
        ticket.is_held = True
        return True

    # --- reports ------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        waiting = self.ahead * self._bytes_of_waiting  # the engine counts batches that are drawn in rounds
        return {"read_ahead": sum(buffer.nbytes for buffer in self.buffers.values()) + waiting}

    def counts(self) -> dict[str, int]:
        return {"bytes_from_files": sum(files.bytes_read for files in self._all_files())}

    def reset_counts(self) -> None:
        for files in self._all_files():
            files.bytes_read = 0

    def _all_files(self) -> list[FileRows]:
        return [files for buffer in self.buffers.values() for files in buffer.columns.values()]


def _is_known(ticket: Ticket) -> bool:
    return ticket.rows is not None or ticket.drawn.done()


def _own_rows(tiers: Tiers, places: Any) -> Tensor:
    """Returns the indices, within this rank's part, of the rows that a batch takes there."""
    return next((slot for tier, _, slot in tiers.groups(places) if tier is tiers.home), NO_IDS)


def _inner(source: RowSource) -> RowSource:
    """Returns the rows as files store them.

    An :class:`EncodedRows` encodes rows when they are taken. For such a ``source``, these are the rows that it encodes; else they are ``source`` itself.
    """
    return source.wide if isinstance(source, EncodedRows) else source


def _is_buffered(source: RowSource) -> bool:
    return isinstance(_inner(source), BufferedRows)


def files_of(basis: Basis, type_: str | None, tiers: Tiers) -> dict[str, FileRows]:
    """Returns the mapped files, by name, of those attributes of a vertex type that batches contain."""
    names = [name for owner, name in basis.source.exchanged if owner == type_]
    return FileRows.of({name: _inner(tiers.home.rows[name]) for name in names})


def _buffered(buffer: RowBuffer, name: str, source: RowSource) -> RowSource:
    if name not in buffer.columns:
        return source
    rows = BufferedRows(buffer, name, _inner(source))
    return EncodedRows(rows, source.narrow) if isinstance(source, EncodedRows) else rows
