"""What does a cache look like whose rows change from batch to batch?

Which rows it has when a batch is put together, :mod:`salientpp.ways.lookahead.planner` decides when the batch enters the pipeline, up to ten batches
earlier, in
the order in which batches enter. In that order they are put together too, and only then is the cache touched: first what the batch needs is read, then what it
has fetched is written. So a row may be found that a batch before it has yet to bring, and a slot is written to when all who were to read it have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.rows import put_rows
from salientpp.store.tiers import Kept, Places
from salientpp.ways.lookahead.planner import Moves


def with_kept(places: Places, moves: Moves, book: PartitionBook) -> Places:
    """These places where some of the remote rows are not fetched but found in the cache.

    Args:
        moves: of ``places.remote_id``, in its order.
    """
    if places.remote_row is None:
        taken = ops.take_hits(places.remote_position, places.remote_id, book.offsets, moves.hit_place)
        kept_position, remote_position, remote_id, counts = taken
        slot, remote_row = moves.hit_slot, None
    else:
        remote_id = places.remote_id[moves.fetched_place]  # owners keep their order
        counts = torch.bincount(book.owner(remote_id), minlength=book.num_parts)
        number = torch.full_like(places.remote_id, -1)
        number[moves.fetched_place] = torch.arange(remote_id.numel(), device="cpu")
        slot_of = torch.full_like(places.remote_id, -1)
        slot_of[moves.hit_place] = moves.hit_slot
        row = number[places.remote_row]
        kept_position, slot = places.remote_position[row < 0], slot_of[places.remote_row[row < 0]]
        remote_position, remote_row = places.remote_position[row >= 0], row[row >= 0]
    return dataclasses.replace(
        places,
        remote_position=remote_position,
        remote_id=remote_id,
        remote_counts=counts,
        remote_row=remote_row,
        kept=Kept(kept_position, slot, moves.admitted_row, moves.admitted_slot),
    )


@dataclass(frozen=True, eq=False)
class MovingRows:
    """The rows of one type of vertices that a rank keeps for a while.

    Attributes:
        rows: attribute name -> [slots, ...] on the host, in this process's memory.
    """

    rows: Mapping[str, Tensor]

    def take_over(self, name: str, arrived: Tensor, kept: Kept) -> None:
        """Write what the batch has fetched, of an attribute [fetched, ...], on the host or on a device."""
        if not kept.admitted_row.numel():
            return
        if arrived.device.type == "cpu":
            put_rows(arrived, kept.admitted_row, self.rows[name], kept.admitted_slot)
        else:
            taken = arrived.index_select(0, kept.admitted_row.to(arrived.device)).cpu()
            put_rows(taken, torch.arange(len(taken), device="cpu"), self.rows[name], kept.admitted_slot)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())
