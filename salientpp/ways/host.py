"""Hold the rows and the cache of a host once, in memory that its ranks share.

The cache is planned by what any of the ranks wants (:func:`salientpp.vip.policies.add_scores`), see :class:`salientpp.ways.cache.Cache`.
:mod:`salientpp.ranks.placement` says which rows the ranks of a host have, and :mod:`salientpp.ways.hosts` which ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.store.cache import FeatureCache
from salientpp.store.rows import RowSource
from salientpp.store.tiers import IdSet
from salientpp.vip.policies import Policy, add_scores


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


def in_memory_of_host(
    host: Comm, home: Mapping[str | None, Mapping[str, RowSource]], members: Mapping[str | None, IdSet]
) -> dict[str | None, FeatureCache]:
    """The cache of a host by vertex type, in a block of shared memory; its rows are yet to be fetched. Collective among the ranks of ``host``.

    Args:
        home: by type, attribute name -> this host's own rows.
        members: by type, the ids to cache; the same on all ranks of the host.
    """
    shapes: list[tuple[Sequence[int], torch.dtype]] = []
    for type_, own in members.items():
        shapes += [(own.ids.shape, own.ids.dtype), (own.words.shape, own.words.dtype)]
        shapes += [((len(own), *rows.shape[1:]), rows.dtype) for rows in home[type_].values()]
    tensors = iter(shared_tensors(host, shapes))
    caches = {}
    for type_, own in members.items():
        in_common = IdSet(next(tensors), next(tensors))
        if host.rank == 0:
            in_common.ids.copy_(own.ids)
            in_common.words.copy_(own.words)
        caches[type_] = FeatureCache(in_common, {name: next(tensors) for name in home[type_]})
    return caches
