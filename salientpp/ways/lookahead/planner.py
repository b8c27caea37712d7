"""Decides which remote rows a rank keeps, given the rows that its next batches need.

Inside the window the method is the optimal replacement of Belady, *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal
5(2), 1966; see docs/explanation/traffic.md. Ties are broken as follows. Among rows that are needed equally late, cached rows stay; rows in lower slots leave
first; lower ids enter first. Probabilities are compared on a scale with 16 steps per factor of two. Those on the same step count as equal.

With a long window of W batches, the ids of their rows are read only once for every G batches. The window is thus up to
W + G - 1 batches long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.mapped import mapped_from
from salientpp.processes import outside_inference
from salientpp.ways.lookahead.shape import Shape, group_of


def prior_bytes(prior: Tensor) -> int:
    """Returns the bytes that a planner's probabilities take in this process: 0 if they are mapped from a file."""
    return prior.nbytes if mapped_from(prior) is None else 0


class Moves(NamedTuple):
    """Decisions about one batch's remote rows, as int64 vectors. The batch reads slots before it writes any.

    Attributes:
        hit_place, hit_slot: positions in ``remote_id`` of the rows that the cache holds, and their slots.
        fetched_place: positions in ``remote_id`` of the other rows.
        admitted_row, admitted_slot: positions among the fetched rows of those that enter the cache, and their slots.
    """

    hit_place: Tensor
    hit_slot: Tensor
    fetched_place: Tensor
    admitted_row: Tensor
    admitted_slot: Tensor


class Planner:
    """Decides, batch by batch, which remote rows one rank keeps.

    Args:
        shape: division of the cache's memory. Its window must be at least one batch.
        prior: float32 [N], probability that a batch needs each row, in this process's memory or memory-mapped.
        members: int64, distinct ids whose rows are in the first slots at the beginning.

    Attributes:
        shape, prior: as given.
        slot_id: int32 [C], id of the row in each slot after the planned batches; -1 for none.
        batch: number of the batch that :meth:`plan` plans next, counted from 0.
        known: end of the window: batches before this number are known.
    """

    @outside_inference
    def __init__(self, shape: Shape, prior: Tensor, members: Tensor) -> None:
        self.shape, self.prior, self._num_ids = shape, prior, prior.numel()
        self.slot_id = torch.empty(shape.num_slots, dtype=torch.int32, device="cpu")
        self._slot_key = torch.empty(shape.num_slots, dtype=torch.int16, device="cpu")
        self._table = torch.empty(shape.table_size, dtype=shape.table_dtype, device="cpu")
        self._lists: deque[Tensor] = deque()  # ids of the batches after the last one with links
        self._links: deque[Tensor] = deque()  # links of the batches from `batch` on
        self._waiting: Tensor | None = None  # the list of batch `known`, which did not fit into the memory
        self._group = group_of(shape.window)
        self.batch = self.known = 0
        self._fill(members)

    @property
    def state_bytes(self) -> int:
        """Bytes that the cache takes besides its rows. They include those of the probabilities in ``prior``, unless these are mapped from a file."""
        return self.shape.state_bytes + prior_bytes(self.prior)

    def _fill(self, members: Tensor) -> None:
        ops.fill_slots(members, self.prior, self.slot_id, self._slot_key, self._table)

    def plan(self, remote_id: Tensor, upcoming: Callable[[], Tensor | None]) -> Moves:
        """Decides which remote rows of the next batch are fetched, and which of them the cache keeps.

        Args:
            remote_id: int64 [n], the distinct remote ids that this batch needs, in any order.
            upcoming: returns the remote ids of batch ``known``, packed by :func:`salientpp.ops.code_ids`, or None if
                they are unknown. It is called while the window has room.
        """
        if not self._links:
            self._link(remote_id, upcoming)
        moves = ops.plan_batch(
            remote_id, self._links.popleft(), self.batch, self.prior, self.slot_id, self._slot_key, self._table
        )
        self.batch += 1
        return Moves(*moves)

    def _link(self, remote_id: Tensor, upcoming: Callable[[], Tensor | None]) -> None:
        if self._lists:
            own = self._lists.popleft()
        else:
            own, self.known, self._waiting = ops.code_ids(remote_id, self._num_ids), self.batch + 1, None
        # The links of the group's other batches replace their lists.
        room = self.shape.list_bytes - sum(each.nbytes for each in self._lists)
        while self.known < self.batch + self._group + self.shape.window:
            found = upcoming() if self._waiting is None else self._waiting
            self._waiting = found
            if found is None or found.nbytes > room:
                break
            self._waiting = None
            room -= found.nbytes
            ops.note_uses(found, self.known, self._num_ids, self.slot_id, self._slot_key, self._table)
            self._lists.append(found)
            self.known += 1
        heads = min(self._group, 1 + len(self._lists))
        self._links.extend(ops.link_lists([own, *self._lists], heads, self._num_ids))
        for _ in range(heads - 1):
            self._lists.popleft()

    def forget_window(self) -> None:
        """Discards the known batches, because other batches follow than those that were expected. Cached rows stay in their slots."""
        self._lists.clear()
        self._links.clear()
        self._waiting = None
        self.known = self.batch
        there = self.slot_id >= 0
        self._slot_key[there] = _unknown(self.prior[self.slot_id[there].long()])

    def forget_rows(self) -> None:
        """Empties every slot and discards the known batches."""
        self._fill(torch.empty(0, dtype=torch.int64, device="cpu"))
        self.forget_window()


def _unknown(probability: Tensor) -> Tensor:
    """Returns int16 keys that order, by probability, rows whose next use is not known (csrc/ways/slots.cpp)."""
    level = (0x3F800000 - probability.view(torch.int32)) >> 19
    level = torch.where(probability > 0, level.clamp(0, 1022), 1023)
    return (level - 2**15).to(torch.int16)
