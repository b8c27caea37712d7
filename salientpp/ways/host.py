"""What do the ranks of one host do together, so that memory and network carry a row once?

* One **cache**: planned by what any of them wants (:func:`salientpp.vip.policies.add_scores`), in one block of shared memory, of which each fills its share.
* One **request**: what several of them want in the same round crosses the network once. Vertices are split between them by id; each asks other hosts
  for its share of what all want, and passes the rows on (:class:`HostExchange`; :mod:`salientpp.ways.sharing` says when).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.placement import Placement
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache
from salientpp.store.exchange import Counts, Exchange, Traffic
from salientpp.store.rows import RowSource
from salientpp.store.tiers import IdSet, Places
from salientpp.vip.policies import Policy, add_scores


def by_asker(places: Places, num_ranks: int) -> Places:
    """The same places where ``remote_id`` is grouped by the rank of the host that asks other hosts for it, and ``remote_counts`` int64 [``num_ranks``]
    says for how many each of them does.

    Ids of a part descend by how hot they are, so their remainders share hot and cold ones evenly.
    """
    place = places.remote_id % num_ranks
    order = torch.sort(place, stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device="cpu")
    return dataclasses.replace(
        places,
        remote_id=places.remote_id[order],
        remote_counts=torch.bincount(place, minlength=num_ranks),
        remote_row=row if places.remote_row is None else row[places.remote_row],
    )


class HostExchange(Exchange):
    """Rows by request between the ranks of a host: each tells the others what it wants them to get for it, by :func:`by_asker`.

    Args:
        comm: these ranks.
        outside: what gets rows of other hosts.
    """

    def __init__(self, comm: Comm, outside: Exchange) -> None:
        self.comm, self.types = comm, outside.types
        self._books, self._wire_dtype = outside._books, outside._wire_dtype
        self.placement = Placement(comm.rank, comm.size, comm.size)  # its "parts" are shares of the vertices
        self.traffic, self._buffers = Traffic(), BufferPool()

    def read_ids(self, counts: Counts, pending: Pending) -> dict[str | None, Tensor]:
        """Wait for the ids that this rank is to get for the host's ranks: global ids, int64, by type and in it by rank."""
        return self._ids_asked(counts, pending)


def pooled(host: Comm, policy: Policy, scores: Mapping[str | None, Tensor]) -> dict[str | None, Tensor]:
    """The scores by which a host's cache is planned, per vertex type float64 [N]; collective among its ranks, each of which gives its own.

    They are in shared memory, N numbers for the host.
    """
    pool = dict(zip(scores, shared_tensors(host, [(tuple(of.shape), torch.float64) for of in scores.values()])))
    for rank in range(host.size):  # in this order, so that rounding is the same on every host and in every run
        if rank == host.rank:
            for type_, of_type in scores.items():
                add_scores(policy, pool[type_], of_type)
        host.gather_numbers([0])
    return pool


def fetch_host_caches(
    host: Comm,
    exchange: Exchange,
    home: Mapping[str | None, Mapping[str, RowSource]],
    members: Mapping[str | None, Tensor],
    num_ids: Mapping[str | None, int],
) -> dict[str | None, FeatureCache]:
    """The cache of a host by vertex type, in a block of shared memory; every rank fetches its share of the rows.

    Collective among all ranks of ``exchange``.

    Args:
        host: the ranks of this host.
        home: by type, attribute name -> this host's own rows.
        members: by type, ascending global ids to cache, int64; the same on all ranks of the host.
        num_ids: by type, N.
    """
    own = {type_: IdSet.of(ids, num_ids[type_]) for type_, ids in members.items()}
    shapes: list[tuple[Sequence[int], torch.dtype]] = []
    for type_, ids in members.items():
        shapes += [(ids.shape, ids.dtype), (own[type_].words.shape, own[type_].words.dtype)]
        shapes += [((ids.numel(), *rows.shape[1:]), rows.dtype) for rows in home[type_].values()]
    tensors = iter(shared_tensors(host, shapes))
    caches = {}
    for type_, ids in members.items():
        in_common = IdSet(next(tensors), next(tensors))
        if host.rank == 0:
            in_common.ids.copy_(own[type_].ids)
            in_common.words.copy_(own[type_].words)
        rows = {name: next(tensors) for name in home[type_]}
        share = slice(host.rank, None, host.size)
        of_this_rank = {name: of_name[share] for name, of_name in rows.items()}
        exchange.fetch_rows(type_, home[type_], ids[share].contiguous(), of_this_rank)
        caches[type_] = FeatureCache(in_common, rows)
    host.gather_numbers([0])  # the others are done too
    return caches
