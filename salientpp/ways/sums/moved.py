"""Chooses and computes the sums that replace rows of a batch, and counts the bytes that they move.

**Other ranks** receive requests for sums in the same exchanges as requests for rows (:mod:`salientpp.store.exchange`), as three messages. :data:`SUMS` has
the size of each wanted sum, :data:`SOURCES` the rows to add up, sum after sum, and :data:`WEIGHTS` the factor of each row. Only the asking rank looks up the
weights of edges. :mod:`salientpp.ways.sums.plan` chooses the sums that a batch asks for.

**The host** sums rows for its device while other threads pack rows (:mod:`salientpp.store.thread_groups`). The same plan chooses these sums. The
places of rows in the host's memory (tiers) then stand for the owners. Rows that a device reads where they are stored stay in the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.store.exchange import Message
from salientpp.store.rows import RowSource, TensorRows, take_rows
from salientpp.store.thread_groups import in_group, in_pieces
from salientpp.store.tiers import Tiers
from salientpp.ways.sums.plan import REDUCTIONS, WORTH_IT, AskedSums, Wire, plan_sums

#: Messages by which ranks ask one another for sums.
SUMS, SOURCES, WEIGHTS = (
    Message("(sums)", has_ids=False),
    Message("(sources of sums)", has_ids=True),
    Message("(weights in sums)", has_ids=False),
)


def put_sums(rows: RowSource, index: Tensor, size: Tensor, weight: Tensor | None, reduction: str, out: Tensor) -> None:
    """Computes m sums, means or maxima of rows, and writes them to ``out`` [m, ...].

    Entry i of ``size`` is the number of consecutive entries of ``index`` int64 [n] whose rows are reduced. The rows are first multiplied by ``weight``,
    floating-point [n], if given.
    """
    if not isinstance(rows, TensorRows):
        rows, index = TensorRows(take_rows(rows, index)), torch.arange(index.numel(), device="cpu")
    if weight is not None:
        weight = weight.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    kernel = functools.partial(ops.reduce_rows, reduction=REDUCTIONS.index(reduction))
    if not in_group():
        kernel(rows.tensor, index, size, weight, out)
        return
    end = torch.cat([size.new_zeros(1), size.cumsum(0)])

    def put(first: int, last: int) -> None:
        of, groups = slice(int(end[first]), int(end[last])), slice(first, last)
        own = None if weight is None else weight[of]
        kernel(rows.tensor, index[of], size[groups], own, out[groups], parallel=False)

    in_pieces(put, size.numel(), index.numel() * rows.tensor[:1].nbytes)


def _found_last(mfg: SamplerOutput) -> Tensor:
    """Returns the vertices that are new in the last hop. Sums may replace their rows, which layers only aggregate."""
    return mfg.node[mfg.node.numel() - mfg.num_sampled_nodes[-1] :]


def sums_of(
    mfg: SamplerOutput, tiers: Tiers, wire: Wire, asks: bool = True, repeats: bool = False
) -> tuple[SamplerOutput, AskedSums]:
    """Replaces remote rows of a batch by sums, where that saves bytes. Returns what remains of the MFG, and the sums.

    Args:
        asks: False leaves all rows in the batch, and returns no sums.
        repeats: True if the batch may hold a vertex several times. The row of such a vertex is fetched once for all its places, so it is not summed.
    """
    num_parts = tiers.book.num_parts
    if not asks:
        none, counts = mfg.node.new_empty(0), mfg.node.new_zeros(num_parts)
        return mfg, AskedSums(none, none, none, None if mfg.edge is None else mfg.edge[:0], counts, counts)
    last = _found_last(mfg)
    places = tiers.look_up(last)
    owner = torch.full_like(last, -1)
    owner[places.remote_position] = torch.repeat_interleave(places.remote_counts)  # positions are grouped by part
    if repeats:
        _, which, times = mfg.node.unique(return_inverse=True, return_counts=True)
        owner[times[which[mfg.node.numel() - last.numel() :]] > 1] = -1
    return plan_sums(mfg, owner, num_parts, wire)


def host_sums_of(mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> tuple[SamplerOutput, AskedSums]:
    """Replaces rows that would be copied to the device by sums that the host computes. Returns what remains of the MFG, and the sums.

    These sums are grouped by tier (the memory of the host that holds the rows), and their ``source`` holds indices of rows in that tier.
    """
    last = _found_last(mfg)
    tier_of = torch.full((last.numel(),), -1, device="cpu")
    for number, (tier, position, _) in enumerate(tiers.groups(tiers.look_up(last))):
        if not tier.on_device:
            tier_of[slice(None) if position is None else position] = number
    left, sums = plan_sums(mfg, tier_of, len(tiers.all), wire.of_copies)
    slot = torch.empty_like(sums.source)
    for _, position, of_tier in tiers.groups(tiers.look_up(sums.source)):
        slot[slice(None) if position is None else position] = of_tier
    return left, dataclasses.replace(sums, source=slot)


@dataclass(frozen=True)
class Moved:
    """Numbers of rows and sums that are fetched from other ranks, or copied to a device, for one batch or several.

    Attributes:
        rows, sums, sources: numbers of rows that move, of sums that move, and of rows that these sums add up.
        whole_rows: number of rows that would move without sums.
    """

    rows: int = 0
    sums: int = 0
    sources: int = 0
    whole_rows: int = 0

    @classmethod
    def between_ranks(cls, mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> Moved:
        """Counts the rows and sums that a rank fetches for a batch."""
        left, sums = sums_of(mfg, tiers, wire)
        rows, whole_rows = (tiers.look_up(n_id).remote_id.numel() for n_id in (left.node, mfg.node))
        return cls(rows, sums.size.numel(), sums.source.numel(), whole_rows)

    @classmethod
    def to_device(cls, mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> Moved:
        """Counts a batch's copies from host to device: rows and sums, without rows that other ranks sent."""
        left, here = host_sums_of(mfg, tiers, wire)
        rows, whole_rows = (
            sum(slot.numel() for tier, _, slot in tiers.groups(tiers.look_up(n_id)) if not tier.on_device)
            for n_id in (left.node, mfg.node)
        )
        return cls(rows, here.size.numel(), here.source.numel(), whole_rows)

    def __add__(self, other: Moved) -> Moved:
        return Moved(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def bytes(self, wire: Wire) -> int:
        return wire.bytes_of(self.rows, self.sums, self.sources)

    def is_worth_it(self, wire: Wire) -> bool:
        """Returns True if rows and sums together take clearly fewer bytes than the rows alone would without sums."""
        return self.bytes(wire) < WORTH_IT * wire.bytes_of(self.whole_rows)
