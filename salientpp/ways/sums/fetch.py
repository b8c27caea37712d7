"""How does a rank get sums of rows that other ranks own, and a device those of rows that its host has?

**From other ranks** in the same three all-to-alls as rows (:mod:`salientpp.store.exchange`), as if there were more types of vertices: of :data:`SUMS` a rank
wants so many sums, and names the size of each; of :data:`SOURCES` the rows that they sum up, one sum's after the other's; and of :data:`WEIGHTS`, where
edges have weights that only the asking rank has looked up, what each of these rows is multiplied by. What comes back is the rows and the sums.
:mod:`salientpp.ways.sums.plan` says which of them a batch asks for.

**From the host** beside the rows that are packed and copied: while a group of threads packs rows, another makes the sums, of rows of one tier each, into
pinned memory (:mod:`salientpp.store.thread_groups`). Which they are follows from the same plan, with the tiers of the host in the place of owners; what is
saved there is rows copied, and ids cost nothing. Rows that a device reads where they are stay in the batch, whose model sums them on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.store.exchange import HOST_SUMS, SOURCES, SUMS, WEIGHTS, Column, PendingRows
from salientpp.store.fetch import Fetch, Recipe, Taken
from salientpp.store.rows import RowSource, TensorRows, empty_rows, take_rows
from salientpp.store.thread_groups import in_group, in_pieces
from salientpp.store.tiers import Places, Tiers
from salientpp.ways.sums.plan import REDUCTIONS, WORTH_IT, Sums, Wire, owners_of, plan_sums, without_sums

#: What is asked for beside rows.
_ASKED = (SUMS, SOURCES, WEIGHTS)


@dataclass(frozen=True, eq=False)
class HostSums:
    """What the host sums up for its device in one batch.

    Attributes:
        sums: by tier, as :func:`host_sums_of` gives them.
        slot: int64, of the rows in them, in the tier that has them.
        weight: floating-point, what these rows are multiplied by; None: nothing.
    """

    sums: Sums
    slot: Tensor
    weight: Tensor | None = None


@dataclass
class FetchWithSums(Fetch):
    """The rows and sums of one loader's batches.

    Attributes:
        reduction: 'sum', 'mean' or 'max'.
    """

    reduction: str = "sum"

    @property
    def is_local(self) -> bool:
        return False  # so that batches of one rank alone have the same form

    def take(self, plan: Mapping[str | None, Places | Recipe], asked: Mapping[str | None, Tensor]) -> Taken:
        taken = super().take(plan, {type_: rows for type_, rows in asked.items() if type_ not in _ASKED})
        sums: dict[Column, Tensor] = {
            (SUMS, name): self._reduced(self.tiers[type_].home.rows[name], asked) for type_, name in self.columns
        }
        return dataclasses.replace(taken, served={**taken.served, **sums})

    def take_host_sums(self, here: HostSums) -> dict[Column, Tensor]:
        """What the host sums up for its device, to be copied as packed rows are; for a worker thread."""
        return {(HOST_SUMS, name): self._summed_here(type_, name, here) for type_, name in self.columns}

    def _summed_here(self, type_: str | None, name: str, here: HostSums) -> Tensor:
        tiers, sums = self.tiers[type_], here.sums
        like = tiers.home.rows[name]
        is_pinned = torch.accelerator.is_available()
        out = torch.empty((sums.size.numel(), *like.shape[1:]), dtype=like.dtype, pin_memory=is_pinned, device="cpu")
        groups, sources = sums.groups.tolist(), sums.sources.tolist()
        weights = [None] * len(groups) if here.weight is None else list(here.weight.split(sources))
        pieces = zip(tiers.all, here.slot.split(sources), sums.size.split(groups), weights, out.split(groups))
        for tier, slot, size, weight, to in pieces:
            if size.numel():
                put_sums(tier.rows[name], slot, size, weight, self.reduction, to)
        return out

    def _reduced(self, rows: RowSource, asked: Mapping[str | None, Tensor]) -> Tensor:
        weight = None
        if WEIGHTS in asked:
            weight = self.exchange.weights_of(asked[WEIGHTS], self.exchange.weight_dtype(rows.dtype))
        out = empty_rows(rows, asked[SUMS].numel())
        put_sums(rows, asked[SOURCES], asked[SUMS], weight, self.reduction, out)
        return out

    def put_served_together(self, taken: Taken) -> Taken:
        sums = {column: rows for column, rows in taken.served.items() if column[0] == SUMS}
        rows = {column: rows for column, rows in taken.served.items() if column[0] != SUMS}
        done = super().put_served_together(dataclasses.replace(taken, served=rows))
        return dataclasses.replace(done, served={**done.served, **sums})

    def put_together(
        self,
        plan: Mapping[str | None, Places | Recipe],
        taken: Taken,
        pending: PendingRows,
        places: Mapping[str | None, Places],
    ) -> tuple[dict[Column, Tensor], dict[Column, Tensor]]:
        """As there; sums of the host are among what arrived."""
        here = {column: rows for column, rows in taken.own.items() if column[0] == HOST_SUMS}
        own = {column: rows for column, rows in taken.own.items() if column[0] != HOST_SUMS}
        rows, arrived = super().put_together(plan, dataclasses.replace(taken, own=own), pending, places)
        return rows, {**arrived, **here}


def put_sums(rows: RowSource, index: Tensor, size: Tensor, weight: Tensor | None, reduction: str, out: Tensor) -> None:
    """Write to ``out`` [m, ...], for each of the ``size`` int64 [m], the sum, mean or maximum of so many of the rows ``index`` int64 [n], which follow one
    another, times ``weight`` floating-point [n] if given."""
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
        of = slice(int(end[first]), int(end[last]))
        kernel(
            rows.tensor,
            index[of],
            size[first:last],
            None if weight is None else weight[of],
            out[first:last],
            parallel=False,
        )

    in_pieces(put, size.numel(), index.numel() * rows.tensor[:1].nbytes)


def _found_last(mfg: SamplerOutput) -> Tensor:
    """The vertices that were first found in the last hop."""
    return mfg.node[mfg.node.numel() - mfg.num_sampled_nodes[-1] :]


def sums_of(mfg: SamplerOutput, tiers: Tiers, wire: Wire, asks: bool = True) -> tuple[SamplerOutput, Sums]:
    """What is left of a batch of a rank with these tiers, and the sums that it asks for; with ``asks`` False none."""
    num_parts = tiers.book.num_parts
    if not asks:
        return without_sums(mfg, num_parts)
    last = _found_last(mfg)
    places = tiers.look_up(last)
    return plan_sums(mfg, owners_of(last.numel(), places.remote_position, places.remote_counts), num_parts, wire)


def host_sums_of(mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> tuple[SamplerOutput, HostSums]:
    """What is left of a batch for a device of a rank with these tiers, and what its host sums up so that it copies fewer, without weights."""
    last = _found_last(mfg)
    tier_of = torch.full((last.numel(),), -1, device="cpu")
    for number, (tier, position, _) in enumerate(tiers.groups(tiers.look_up(last))):
        if not tier.on_device:
            tier_of[slice(None) if position is None else position] = number
    left, sums = plan_sums(mfg, tier_of, len(tiers.all), wire.of_copies)
    slot = torch.empty_like(sums.source)
    for _, position, of_tier in tiers.groups(tiers.look_up(sums.source)):
        slot[slice(None) if position is None else position] = of_tier
    return left, HostSums(sums, slot)


@dataclass(frozen=True)
class Moved:
    """What is fetched from other ranks, or copied to a device, for a batch or for several.

    Attributes:
        rows, sums, sources: rows and sums that move, and rows in these sums.
        whole_rows: that would move without sums.
    """

    rows: int = 0
    sums: int = 0
    sources: int = 0
    whole_rows: int = 0

    @classmethod
    def between_ranks(cls, mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> Moved:
        """What a rank with these tiers fetches for a batch."""
        left, sums = sums_of(mfg, tiers, wire)
        rows, whole_rows = (tiers.look_up(n_id).remote_id.numel() for n_id in (left.node, mfg.node))
        return cls(rows, sums.size.numel(), sums.source.numel(), whole_rows)

    @classmethod
    def to_device(cls, mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> Moved:
        """What its host has of a batch and copies to its device; what is fetched comes on top."""
        left, here = host_sums_of(mfg, tiers, wire)
        rows, whole_rows = (
            sum(slot.numel() for tier, _, slot in tiers.groups(tiers.look_up(n_id)) if not tier.on_device)
            for n_id in (left.node, mfg.node)
        )
        return cls(rows, here.sums.size.numel(), here.sums.source.numel(), whole_rows)

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.rows + other.rows,
            self.sums + other.sums,
            self.sources + other.sources,
            self.whole_rows + other.whole_rows,
        )

    def bytes(self, wire: Wire) -> int:
        """Of requests and answers, without the messages that say how many there are."""
        return wire.bytes_of(self.rows, self.sums, self.sources)

    def is_worth_it(self, wire: Wire) -> bool:
        """Whether this is markedly less than without sums."""
        return self.bytes(wire) < WORTH_IT * wire.bytes_of(self.whole_rows)


def are_fetches_worth_it(mfgs: Iterable[SamplerOutput], tiers: Tiers, wire: Wire) -> bool:
    """Whether ranks take markedly fewer bytes with sums for batches like these."""
    return sum((Moved.between_ranks(mfg, tiers, wire) for mfg in mfgs), Moved()).is_worth_it(wire)


def are_copies_worth_it(mfgs: Iterable[SamplerOutput], tiers: Tiers, wire: Wire) -> bool:
    """Whether a device takes markedly fewer with sums that its host makes."""
    return sum((Moved.to_device(mfg, tiers, wire) for mfg in mfgs), Moved()).is_worth_it(wire.of_copies)
