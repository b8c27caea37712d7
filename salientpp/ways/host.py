"""Hold the rows and the cache of a host once, in memory that its ranks share.

The cache is planned by what any of the ranks wants (:func:`salientpp.vip.policies.add_scores`). Each rank fetches its share of the rows.
:mod:`salientpp.ranks.placement` says which rows the ranks of a host have, and :mod:`salientpp.ways.hosts` which ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.store.cache import FeatureCache
from salientpp.store.exchange import Exchange
from salientpp.store.rows import RowSource
from salientpp.store.tiers import IdSet
from salientpp.vip.policies import Policy, add_scores
from salientpp.ways.cache import Cache


class HostCache(Cache):
    """One cache for the ranks of a host; α counts per host."""

    def _members(self, basis: Basis, scores: Mapping[str | None, Tensor]) -> dict[str | None, Tensor]:
        of_types = {type_: scores[type_] for type_ in basis.source.travelling}
        return super()._members(basis, pooled(basis.host, self._policy, of_types))

    def _fetch(
        self,
        basis: Basis,
        home: Mapping[str | None, Mapping[str, RowSource]],
        members: Mapping[str | None, Tensor],
    ) -> dict[str | None, FeatureCache]:
        sizes = {type_: basis.source.books[type_].num_vertices for type_ in home}
        return fetch_host_caches(basis.host, basis.source.exchange, home, members, sizes)


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
