"""How does a row that several ranks of a host want in the same round cross the network once?

Vertices are split between the ranks of a host by id. Before the exchange with other hosts each rank tells the others which rows it wants them to get for
it, and joins what they want through it; after it each passes rows on. So around the ten stages come four:

    sample · **share_counts · share_ids · join_ids** · exchange_counts · … · exchange_rows · **share_rows** · assemble

The other way would be to let one rank of each host ask for all. It gets the same rows once as well, but then a single connection and a single
process carry all of a host's traffic, where here every rank carries its share of it.

A batch is the same, bit for bit, whoever got its rows. All ranks have these stages or none has, also a rank that is alone on its host: collectives must come
in the same order everywhere.
"""

from __future__ import annotations

import builtins
import dataclasses
from dataclasses import dataclass

import torch

from salientpp.engine.pipeline import Stage
from salientpp.engine.stages import BatchStages, InFlight, RowsSent, Sampled, Wanted
from salientpp.ranks.comm import Pending
from salientpp.store.exchange import Counts, PendingCounts
from salientpp.store.rows import take_rows
from salientpp.ways.host import HostExchange


@dataclass(frozen=True, eq=False)
class CountsShared(InFlight):
    pending: PendingCounts


@dataclass(frozen=True, eq=False)
class IdsShared(InFlight):
    counts: Counts
    pending: Pending


@dataclass(frozen=True, eq=False)
class Joined(Sampled):
    """``passing``: how many rows the ranks of the host want through this one, and this one through them."""

    passing: Counts | None = None


@dataclass
class SharingStages(BatchStages):
    """The stages of a rank whose host's ranks ask other hosts for one another.

    Attributes:
        host: the exchange between these ranks.
    """

    host: HostExchange | None = None

    def list(self) -> builtins.list[Stage]:
        first, *middle, last = super().list()
        before = [
            Stage("share_counts", self.share_counts, "comm"),
            Stage("share_ids", self.share_ids, "comm"),
            Stage("join_ids", self.join_ids, "comm"),
        ]
        return [first, *before, *middle, Stage("share_rows", self.share_rows, "comm"), last]

    @property
    def _host(self) -> HostExchange:
        assert self.host is not None  # it comes last only because fields of the ten stages have defaults
        return self.host

    def share_counts(self, state: Sampled) -> CountsShared:
        counts = {type_: places.remote_counts for type_, places in state.places.items()}
        return CountsShared(state, self._host.send_counts(counts, leaving=state.leaving))

    def share_ids(self, state: CountsShared) -> IdsShared:
        counts = self._host.read_counts(state.pending)
        ids = {type_: places.remote_id for type_, places in state.sampled.places.items()}
        return IdsShared(state.sampled, counts, self._host.send_ids(counts, ids))

    def join_ids(self, state: IdsShared) -> Joined:
        wanted = {}
        for type_, ids in self._host.read_ids(state.counts, state.pending).items():
            book = self.fetch.tiers[type_].book
            # Row parts have ranges of ids, so ascending ids are grouped by their owners.
            remote_id, row = torch.unique(ids, return_inverse=True)
            wanted[type_] = Wanted(remote_id, torch.bincount(book.owner(remote_id), minlength=book.num_parts), row)
        sampled = state.sampled
        return Joined(
            **{field.name: getattr(sampled, field.name) for field in dataclasses.fields(Sampled) if field.name != "wanted"},
            wanted=wanted, passing=state.counts,
        )  # fmt: skip

    def share_rows(self, state: RowsSent) -> RowsSent:
        joined = state.sampled
        assert isinstance(joined, Joined) and joined.wanted is not None and joined.passing is not None
        wanted = joined.wanted
        rows = {
            (type_, name): take_rows(arrived.cpu(), wanted[type_].row)
            for (type_, name), arrived in state.pending.wait().items()
        }
        return RowsSent(joined, state.gathered, self._host.send_rows(joined.passing, rows))
