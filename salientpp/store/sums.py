"""How does a rank get sums of rows that other ranks own?

In the same three all-to-alls as rows (:mod:`salientpp.store.exchange`), as if there were two more types of vertices: of :data:`SUMS` a rank wants so
many sums, and names the size of each; of :data:`SOURCES` the rows that they sum up, one sum's after the other's; and of :data:`WEIGHTS`, where edges have
weights that only the asking rank has looked up, what each of these rows is multiplied by. What comes back is the rows and the sums.
:mod:`salientpp.plan.sums` says which of them a batch asks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.plan.sums import REDUCTIONS, WORTH_IT, Sums, Wire, owners_of, plan_sums
from salientpp.store.exchange import SOURCES, SUMS, WEIGHTS, Column
from salientpp.store.fetch import Fetch, Recipe, Taken
from salientpp.store.rows import RowSource, TensorRows, empty_rows, take_rows
from salientpp.store.tiers import NO_IDS, Places, Tiers

#: What is asked for beside rows.
_ASKED = (SUMS, SOURCES, WEIGHTS)


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

    def _reduced(self, rows: RowSource, asked: Mapping[str | None, Tensor]) -> Tensor:
        weight = None
        if WEIGHTS in asked:
            weight = self.exchange.weights_of(asked[WEIGHTS], self.exchange.weight_dtype(rows.dtype))
        return reduced(rows, asked[SOURCES], asked[SUMS], weight, self.reduction)

    def put_served_together(self, taken: Taken) -> Taken:
        sums = {column: rows for column, rows in taken.served.items() if column[0] == SUMS}
        rows = {column: rows for column, rows in taken.served.items() if column[0] != SUMS}
        done = super().put_served_together(dataclasses.replace(taken, served=rows))
        return dataclasses.replace(done, served={**done.served, **sums})


def reduced(rows: RowSource, index: Tensor, size: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """[m, ...], for each of the ``size`` int64 [m] the sum, mean or maximum of so many of the rows ``index`` int64 [n], which follow one another, times
    ``weight`` floating-point [n] if given."""
    if not isinstance(rows, TensorRows):
        rows, index = TensorRows(take_rows(rows, index)), torch.arange(index.numel())
    out = empty_rows(rows, size.numel())
    if weight is not None:
        weight = weight.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    ops.reduce_rows(rows.tensor, index, size, weight, out, REDUCTIONS.index(reduction))
    return out


def sums_of(mfg: SamplerOutput, tiers: Tiers, wire: Wire, asks: bool = True) -> tuple[SamplerOutput, Sums]:
    """What is left of a batch of a rank with these tiers, and the sums that it asks for; with ``asks`` False none."""
    last = mfg.node[mfg.node.numel() - mfg.num_sampled_nodes[-1] :]
    places, none = tiers.look_up(last), NO_IDS.new_zeros(tiers.book.num_parts)
    owner = (
        owners_of(last.numel(), places.remote_position, places.remote_counts)
        if asks
        else owners_of(last.numel(), NO_IDS, none)
    )
    return plan_sums(mfg, owner, tiers.book.num_parts, wire)


@dataclass(frozen=True)
class Fetched:
    """What travels for a batch, or for several.

    Attributes:
        rows, sums, sources: rows and sums that are fetched, and rows in these sums.
        whole_rows: that would be fetched without sums.
    """

    rows: int = 0
    sums: int = 0
    sources: int = 0
    whole_rows: int = 0

    @classmethod
    def of(cls, mfg: SamplerOutput, tiers: Tiers, wire: Wire) -> Fetched:
        """For a batch of a rank with these tiers."""
        left, sums = sums_of(mfg, tiers, wire)
        rows, whole_rows = (tiers.look_up(n_id).remote_id.numel() for n_id in (left.node, mfg.node))
        return cls(rows, sums.size.numel(), sums.source.numel(), whole_rows)

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(
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


def is_worth_it(mfgs: Iterable[SamplerOutput], tiers: Tiers, wire: Wire) -> bool:
    """Whether batches like these take markedly fewer bytes with sums."""
    return sum((Fetched.of(mfg, tiers, wire) for mfg in mfgs), Fetched()).is_worth_it(wire)
