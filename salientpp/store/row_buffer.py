"""Reads rows from files into memory before batches need them, and keeps those that later batches need.

The buffer has slots. An admitted batch holds the slots of its rows until it is made. Rows that no batch holds stay in their slots until the memory is needed.
Then rows that no known batch needs are dropped first: those that the fewest batches used since they were read, and of these the ones used longest ago. Next
come the rows that known batches need last, after Belady, *A study of replacement algorithms for a virtual-storage computer* (IBM Systems Journal, 1966).

Reading is separate from admission. So the missing rows of several batches are read together, in file order, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from salientpp import ops
from salientpp.processes import Lock, after_fork, outside_inference
from salientpp.store.buffers import BufferPool
from salientpp.store.file_rows import FileRows
from salientpp.store.rows import RowSource

#: When slots are needed, this fraction of all slots is freed in addition, so that slots are seldom sorted.
_FREED_SHARE = 1 / 32

#: Order of rows that a known batch needs: above every row that none needs.
_KNOWN = 2**62


class RowBuffer:
    """Keeps rows of one vertex type in memory for the next batches, so that files are read in order and seldom.

    A slot holds all attributes of one row. :meth:`admit` reserves slots for a batch, :meth:`read` fills them, and :meth:`release` ends the reservation.

    Args:
        columns: attribute name -> all rows, in files. All have the same number of rows.
        num_slots: number of rows that the buffer holds.

    Attributes:
        columns, num_slots: the arguments.
        SLOT_BYTES: bytes that tables take for each slot.
    """

    SLOT_BYTES: ClassVar[int] = 29

    def __init__(self, columns: Mapping[str, FileRows], num_slots: int) -> None:
        self.columns, self.num_slots = dict(columns), num_slots
        self._num_rows = next(iter(self.columns.values())).num_rows
        pool = BufferPool()
        self._rows = {name: pool.empty((num_slots, of.row_bytes), torch.uint8) for name, of in self.columns.items()}
        self._lock = Lock()
        self._empty()
        after_fork(self)

    @outside_inference
    def _empty(self) -> None:
        size = self.num_slots
        self._slot_of = torch.full((self._num_rows,), -1, dtype=torch.int32, device="cpu")
        self._row_of = torch.full((size,), -1, dtype=torch.int64, device="cpu")
        self._holders = torch.zeros(size, dtype=torch.int32, device="cpu")
        self._is_filled = torch.zeros(size, dtype=torch.bool, device="cpu")
        self._order = torch.zeros(size, dtype=torch.int64, device="cpu")  # uses << 32 | clock of the last use
        self._free = torch.arange(size, device="cpu")
        self._unread: list[Tensor] = []  # slots whose rows are to be read
        self._clock = 0

    def _after_fork(self) -> None:
        self._empty()  # a thread that does not exist here may have been changing it

    def __reduce__(self) -> tuple[type[RowBuffer], tuple[Mapping[str, FileRows], int]]:
        return RowBuffer, (self.columns, self.num_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the tables that tell which slot holds a row."""
        rows = sum(rows.nbytes for rows in self._rows.values())
        return rows + self.num_slots * self.SLOT_BYTES + self.table_bytes(self._num_rows)

    @staticmethod
    def table_bytes(num_rows: int) -> int:
        """Returns the bytes of the table that gives the slot of each of ``num_rows`` rows."""
        return 4 * num_rows

    @property
    def num_held(self) -> int:
        """Number of slots that batches hold."""
        return int(torch.count_nonzero(self._holders))

    def admit(self, rows: Tensor, upcoming: Sequence[Tensor]) -> bool:
        """Reserves slots for a batch's rows; :meth:`read` reads missing ones. Returns False if too few slots are free.

        Args:
            rows: int64 [n], ascending and distinct.
            upcoming: rows of the known batches after this one, nearest first.
        """
        with self._lock:
            slot = self._slot_of.index_select(0, rows)
            is_missing = slot < 0
            missing, there = rows[is_missing], slot[~is_missing]
            self._holders[there.long()] += 1
            lacking = missing.numel() - self._free.numel()
            if lacking > 0 and not self._evict(lacking, upcoming):
                self._holders[there.long()] -= 1
                return False
            new, self._free = self._free.split([missing.numel(), self._free.numel() - missing.numel()])
            self._slot_of[missing] = new.to(torch.int32)
            self._row_of[new], self._holders[new], self._order[new] = missing, 1, 0
            if new.numel():
                self._unread.append(new)
            return True

    def _evict(self, least: int, upcoming: Sequence[Tensor]) -> bool:
        """Drops rows, so that at least ``least`` more slots are free. Drops none and returns False if admitted batches still need too many rows."""
        may_go = ((self._holders == 0) & self._is_filled).nonzero().flatten()
        if may_go.numel() < least:
            return False
        order = self._order
        if upcoming:
            order = order.clone()
            for number, rows in reversed(list(enumerate(upcoming))):
                slot = self._slot_of.index_select(0, rows)
                order[slot[slot >= 0].long()] = _KNOWN - number
        number = min(may_go.numel(), least + int(self.num_slots * _FREED_SHARE))
        gone = may_go[torch.topk(order[may_go], number, largest=False, sorted=False).indices]
        self._forget(gone)
        return True

    def _forget(self, slots: Tensor) -> None:
        self._slot_of[self._row_of[slots]] = -1
        self._row_of[slots], self._holders[slots], self._is_filled[slots] = -1, 0, False
        self._free = torch.cat([self._free, slots])

    def read(self) -> None:
        """Reads the missing rows of all admitted batches from the files. If it fails, the caller must release these batches."""
        with self._lock:
            slots = torch.cat(self._unread) if self._unread else self._free[:0]
            self._unread.clear()
            rows, order = torch.sort(self._row_of[slots])
            slots = slots[order]
        try:
            for name, files in self.columns.items():
                files.read(rows, self._rows[name], slots)
        except BaseException:
            with self._lock:
                self._forget(slots)
            raise
        with self._lock:
            self._is_filled[slots] = True

    def release(self, rows: Tensor) -> None:
        """Ends the reservation that :meth:`admit` made for a batch's rows. Rows stay until their slots are needed."""
        with self._lock:
            slot = self._slot_of.index_select(0, rows)
            slot = slot[slot >= 0].long()  # all of them, unless reading failed
            self._clock += 1
            self._holders[slot] = (self._holders[slot] - 1).clamp_(min=0)
            self._order[slot] = (((self._order[slot] >> 32) + 1) << 32) | self._clock

    def take(self, name: str, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
        """Copies ``out[out_index] = rows[index]``. Rows that no slot holds are read from the files.

        Args:
            index: int64 [n], in any order; repeats are allowed.
            out: contiguous uint8 [O, row bytes].
        """
        with self._lock:
            slot = self._slot_of.index_select(0, index)
            is_here = (slot >= 0) & self._is_filled[slot.clamp(min=0).long()]
            held = slot if (all_here := bool(is_here.all())) else slot[is_here]
            ones = torch.ones_like(held)
            self._holders.index_add_(0, held, ones)  # so that no other thread writes to these slots meanwhile
        try:
            if all_here:
                ops.gather_rows(self._rows[name], held, out, out_index)
                return
            places = torch.arange(index.numel(), device="cpu") if out_index is None else out_index
            ops.gather_rows(self._rows[name], held, out, places[is_here])
            rows, order = torch.sort(index[~is_here])
            self.columns[name].read(rows, out, places[~is_here][order])
        finally:
            with self._lock:
                self._holders.index_add_(0, held, -ones)


class BufferedRows:
    """Source of an attribute's rows that takes them from a buffer. Rows that the buffer lacks are read from the files.

    Args:
        source: the same rows, which give shape and dtype.
    """

    def __init__(self, buffer: RowBuffer, name: str, source: RowSource) -> None:
        self.buffer, self._name = buffer, name
        self.shape, self.dtype, self.nbytes = source.shape, source.dtype, getattr(source, "nbytes", 0)

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        width = self.buffer.columns[self._name].row_bytes
        if width and index.numel():
            self.buffer.take(self._name, index, ops.bytes_of(out).view(-1, width), out_index)
