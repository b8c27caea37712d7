"""Static cache: copies of the remote rows that batches need most, chosen once by a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.source import BatchSource
from salientpp.engine.way import TiersByType, Way
from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.sampling.seeds import scores_of_part
from salientpp.store.cache import FeatureCache, TypedFeatureCache, on_device
from salientpp.store.rows import RowSource
from salientpp.store.tiers import NO_IDS, IdSet, Tier
from salientpp.vip.policies import Policy, add_scores, cache_bytes, densest, plan_caches

#: This part's own rows, by vertex type and attribute name.
HomeRows = Mapping["str | None", Mapping[str, RowSource]]


class Cache(Way):
    """Keeps copies of the remote rows that batches need most, so that they are not fetched for each batch. The set of rows is fixed.

    If the ranks of a host share one cache, ``replication_factor`` counts per host.

    Args:
        replication_factor: α as a float, or bytes as an int. This rank caches ``floor(α N / K)`` remote rows, or as many as fit into the bytes. Rows
            that an earlier method of the loader has copies of are not cached again.
        policy: chooses the rows.
        on_device: amount of cached rows that get a second copy on the device: a fraction of the cached rows as a float, or bytes as an int.
    """

    name = "cache"

    def __init__(self, replication_factor: float | int, policy: Policy, on_device: float | int = 0.0) -> None:
        self._factor, self._policy, self._on_device = replication_factor, policy, on_device
        self.cache: FeatureCache | TypedFeatureCache = FeatureCache.empty()

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        if not basis.source.travelling:
            return tiers
        members, scores = self._chosen(basis, tiers)
        row_bytes, found = basis.source.row_bytes, dict(tiers)
        near: Mapping[str | None, Tensor] = {}
        if scores is not None and self._on_device:
            cached = {type_: scores[type_][ids] for type_, ids in members.items()}
            whole = sum(ids.numel() * row_bytes[type_] for type_, ids in members.items())
            near = densest(cached, row_bytes, self._bytes_on_device(whole))
        for type_, ids in members.items():
            size, copies = basis.source.books[type_].num_vertices, [*found[type_].copies]
            if type_ in near and near[type_].numel():
                copies.append(Tier("cache", IdSet.of(ids[near[type_]], size), {}, True, "device"))
            if self._stays(type_):
                copies.append(Tier("cache", IdSet.of(ids, size), {}, basis.zero_copy, "cache"))
            found[type_] = dataclasses.replace(found[type_], copies=copies)
        return found

    def _chosen(
        self, basis: Basis, tiers: TiersByType
    ) -> tuple[dict[str | None, Tensor], Mapping[str | None, Tensor] | None]:
        """Chooses the rows to cache: ascending int64 ids of vertices per type. Also returns the scores, if any."""
        if not self._factor > 0:
            return dict.fromkeys(basis.source.travelling, NO_IDS), None
        scores = _scores_beside(self.scores(basis), tiers)
        return self._members(basis, scores), scores

    def _bytes_on_device(self, whole: int) -> int:
        """Returns the bytes that second copies on the device may take, if all cached rows take ``whole`` bytes."""
        return int(self._on_device * whole) if isinstance(self._on_device, float) else self._on_device

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        source = basis.source
        if not source.travelling:
            return tiers
        members, scores = self._chosen(basis, tiers)
        home = {
            type_: {name: tiers[type_].home.rows[name] for of_type, name in source.exchanged if of_type == type_}
            for type_ in members
        }
        caches = self._fetched(basis, home, members)
        if scores is not None and self._on_device:
            whole = sum(cache.row_bytes * len(cache) for cache in caches.values())
            caches = on_device(caches, scores, self._bytes_on_device(whole), basis.device)
        owner = (contents_of(source), source.exchange.part_id)
        caches = {type_: dataclasses.replace(cache, owner=owner) for type_, cache in caches.items()}
        self.cache = caches[None] if None in caches else TypedFeatureCache(caches, owner)
        if basis.zero_copy:
            self.cache = self.cache.pinned()
        return with_copies(basis, tiers, self.cache, self._stays)

    def scores(self, basis: Basis) -> Mapping[str | None, Tensor]:
        """Returns the policy's scores of the vertices, float [N] per vertex type. Rows with larger scores are cached first."""
        return basis.once(("scores", self._policy), lambda: scores_of(basis, self._policy))

    def _stays(self, type_: str | None) -> bool:
        """Returns True if the cached rows of a vertex type never change, so that ranks can share them."""
        return True

    def _members(self, basis: Basis, scores: Mapping[str | None, Tensor]) -> dict[str | None, Tensor]:
        """Returns the ids of the vertices with the highest scores, as many as fit, by type, ascending int64."""
        source = basis.source
        if basis.ranks_by_host:
            add, own = partial(add_scores, self._policy), {type_: scores[type_] for type_ in source.travelling}
            scores = basis.once(("pooled scores", self._policy), lambda: _pooled(basis.host, own, add))
        books, alpha = {type_: source.books[type_] for type_ in source.travelling}, self._factor
        placement = source.exchange.placement
        if not placement.logical_ranks:  # a storage rank has no batches
            return dict.fromkeys(books, NO_IDS)
        if isinstance(alpha, int):
            whole = cache_bytes(1.0, books, source.row_bytes)
            alpha = min(source.exchange.placement.num_parts, alpha / max(1, whole))
        else:
            alpha *= len(placement.row_parts) / placement.num_caches
        return plan_caches(scores, books, source.row_bytes, source.exchange.part_id, alpha)

    def _fetched(
        self, basis: Basis, home: HomeRows, members: Mapping[str | None, Tensor]
    ) -> dict[str | None, FeatureCache]:
        """Fills the cache: fetches the rows of ``members`` from their owners. Collective.

        On a host with several ranks, rows that never change lie in memory that the ranks share, and each rank fetches some of them.
        """
        exchange = basis.source.exchange
        sets = {type_: IdSet.of(ids, basis.source.books[type_].num_vertices) for type_, ids in members.items()}
        shared: dict[str | None, FeatureCache] = {}
        if basis.ranks_by_host:
            stay = {type_: of_type for type_, of_type in sets.items() if self._stays(type_)}
            shared = _in_memory_of_host(basis.host, home, stay)
        caches = {}
        for type_, rows in home.items():  # in the same order on all ranks, because fetching is collective
            if type_ in shared:
                caches[type_], share = shared[type_], slice(basis.host.rank, None, basis.host.size)
                to = {name: of_name[share] for name, of_name in shared[type_].rows.items()}
                exchange.fetch_rows(type_, rows, sets[type_].ids[share].contiguous(), to)
            else:
                caches[type_] = exchange.fetch_cache(type_, rows, sets[type_])
        if shared:
            basis.host.gather_numbers([0])  # waits until the other ranks of the host have written their share
        return caches


class GivenCache(Way):
    """Uses a cache that another loader has filled. The user passes it as ``cache=``."""

    name = "given cache"

    def __init__(self, cache: FeatureCache | TypedFeatureCache) -> None:
        self.cache = cache

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        return with_copies(basis, tiers, self.cache)

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        if basis.zero_copy:
            self.cache = self.cache.pinned()
        return with_copies(basis, tiers, self.cache)


def _pooled(
    host: Comm, scores: Mapping[str | None, Tensor], add: Callable[[Tensor, Tensor], Any]
) -> dict[str | None, Tensor]:
    """Adds up the scores of a host's ranks, per vertex type float64 [N], to choose the cache that they share.

    Collective among these ranks, which share the memory of the sums.

    Args:
        add: adds one rank's scores to the sums in place. The sums begin as zeros.
    """
    pool = dict(zip(scores, shared_tensors(host, [(tuple(of.shape), torch.float64) for of in scores.values()])))
    for rank in range(host.size):  # in rank order, so that rounding is equal on every host and in every run
        if rank == host.rank:
            for type_, of_type in scores.items():
                add(pool[type_], of_type)
        host.gather_numbers([0])
    return pool


def _in_memory_of_host(
    host: Comm, home: HomeRows, members: Mapping[str | None, IdSet]
) -> dict[str | None, FeatureCache]:
    """Allocates an empty cache of these ids in memory that a host's ranks share. Collective among these ranks."""
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


def with_copies(
    basis: Basis,
    tiers: TiersByType,
    cache: FeatureCache | TypedFeatureCache,
    stays: Callable[[str | None], bool] = lambda type_: True,
) -> TiersByType:
    """Adds a cache's copies to the tiers in which batches find rows. It leaves out copies on the host that may change: ``stays(type)`` is False."""
    found = dict(tiers)
    for type_, of_type in cache.by_type.items():
        if type_ in found and basis.source.books[type_].num_parts > 1:
            more = [tier for tier in of_type.tiers(basis.zero_copy) if stays(type_) or tier.memory == "device"]
            found[type_] = dataclasses.replace(found[type_], copies=[*found[type_].copies, *more])
    return found


def scores_of(basis: Basis, policy: Policy) -> Mapping[str | None, Tensor]:
    """Computes a policy's scores of the vertices, float [N] per vertex type. Rows with larger scores are cached first."""
    source = basis.source
    # The data is a partitioned graph, because only such a graph has rows to cache.
    assert source.seeds.start is not None and source.part is not None and source.part.part_id is not None
    found = scores_of_part(
        policy, part=source.part, part_id=source.part.part_id, sampler=source.sampler, inputs=source.seeds.inputs,
        start=source.seeds.start(basis.batch_size), batch_size=basis.batch_size, comm=source.exchange.comm,
    )  # fmt: skip
    return {type_: source.drawing.own(of_type) for type_, of_type in found.items()}


def _scores_beside(scores: Mapping[str | None, Tensor], tiers: TiersByType) -> Mapping[str | None, Tensor]:
    """Sets the scores of rows to 0 if an earlier method already has copies of them."""
    found = dict(scores)
    for type_, of_type in tiers.items():
        for tier in of_type.copies:
            assert tier.members is not None  # None means all rows, which only the home tier has
            found[type_] = found[type_].index_fill(0, tier.members.ids, 0)
    return found


def contents_of(source: BatchSource) -> str:
    """Returns a text that identifies the dataset and the encoding of a cache's rows, to check a given cache."""
    sent = (f", {column} as {source.narrow[column].format}" for column in source.exchanged if column in source.narrow)
    return source.fingerprint + "".join(sent)


def check_given(cache: FeatureCache | TypedFeatureCache | None, source: BatchSource) -> None:
    """Raises ValueError if a given cache has other contents, belongs to another part, or lacks an attribute."""
    if cache is None or not len(cache):
        return
    part_id = source.exchange.part_id
    fingerprint, owner = cache.owner or ("", None)
    if fingerprint != contents_of(source) or owner is None:
        raise ValueError(
            f"the given cache must hold rows of this loader's dataset, encoded in the same way (fingerprint {contents_of(source) or 'none'}), got rows of "
            f"another dataset, encoding or partitioning ({fingerprint or 'none'}); take the cache of a loader on the same directory with the same send_as"
        )
    if owner != part_id:
        raise ValueError(
            f"the given cache was chosen for part {owner}, but this rank serves part {part_id}; take the cache of a loader on that part"
        )
    for column in source.exchanged:
        type_, name = column
        if type_ not in source.travelling:
            continue
        of_type = cache.by_type.get(type_)
        if of_type is None or name not in of_type.rows:
            names = tuple(dict.fromkeys(name for _, name in source.exchanged))
            of = "" if type_ is None else f" of {type_!r}"
            raise ValueError(
                f"the given cache has no rows of {name!r}{of}, which this loader's batches get; make the cache by a loader with columns={names}"
            )
        rows, cached = source.rows_of(column), of_type.rows[name]
        if (rows.dtype, rows.shape[1:]) != (cached.dtype, cached.shape[1:]):
            raise ValueError(
                f"the given cache must hold {rows.dtype} {list(rows.shape[1:])} rows of {name!r}, got {cached.dtype} "
                f"{list(cached.shape[1:])}; take the cache of a loader on the same dataset directory"
            )
