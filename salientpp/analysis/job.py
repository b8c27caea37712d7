"""Simulates the ranks of a job in one process. Each rank has the engine that its loader would have, without rows and without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from salientpp.analysis.batches import Batches
from salientpp.batch.template import PartitionTemplate
from salientpp.engine.basis import Basis
from salientpp.engine.connected import connect_part
from salientpp.engine.drawing.choose import method_of
from salientpp.engine.engine import Engine
from salientpp.engine.epochs import Epochs
from salientpp.engine.seeds import Seeds, draws_of, edges_of_part, sampler_of_part, vertices_of_part
from salientpp.engine.shares import Shares
from salientpp.engine.source import BatchSource
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.seeds import workload_of_part
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.policies import Policy, Workload, add_scores
from salientpp.ways.cache import scores_of

#: Largest number of ranks that may be given; each rank is counted separately.
MOST_RANKS = 1024


def pooled(policy: Policy, scores: Sequence[Mapping[str | None, Tensor]]) -> dict[str | None, Tensor]:
    """Adds the scores of a host's ranks, since they have one cache, as :mod:`salientpp.ways.cache` does. Returns float64 [N] by vertex type."""
    pool = {type_: torch.zeros_like(of, dtype=torch.float64) for type_, of in scores[0].items()}
    for each in scores:
        for type_, of_type in each.items():
            add_scores(policy, pool[type_], of_type)
    return pool


def placed(
    ranks: int | None, num_parts: int, ranks_per_host: int | Sequence[int] = 1, storage_hosts: int = 0
) -> list[Placement]:
    """Returns the placement of every rank that trains; ``ranks=None`` means one rank per part.

    Args:
        storage_hosts: number of further hosts, each with one rank that only stores; 0: the ranks that train hold the rows.

    Raises:
        ValueError: the numbers do not fit each other, or there are too many ranks.
    """
    if ranks is not None and ranks > MOST_RANKS:
        raise ValueError(f"rows can be counted for at most {MOST_RANKS:,} ranks, got {ranks:,}")
    ranks = num_parts if ranks is None else ranks
    if isinstance(ranks_per_host, int):
        if ranks_per_host < 1 or ranks % ranks_per_host:
            raise ValueError(f"ranks_per_host must be >= 1 and divide the {ranks} ranks, got {ranks_per_host}")
        ranks_per_host = [ranks_per_host] * (ranks // ranks_per_host)
    if not 0 <= storage_hosts <= MOST_RANKS:
        raise ValueError(f"storage_hosts must be an integer from 0 to {MOST_RANKS:,}, got {storage_hosts}")
    by_host, size = (*ranks_per_host, *(1,) * storage_hosts), ranks + storage_hosts
    of_rank = partial(Placement, world_size=size, num_parts=num_parts, ranks_by_host=by_host)
    return [of_rank(rank, num_storage_ranks=storage_hosts) for rank in range(ranks)]


@dataclass(frozen=True, eq=False)
class Job:
    """All ranks of a job that train, with one kind of batches.

    Attributes:
        batches: the batches that the ranks draw.
        engines: one engine per rank. They draw the loaders' batches in the loaders' order.
        widths: bytes of a row, by vertex type whose rows travel.
    """

    batches: Batches
    engines: Sequence[Engine]
    widths: Mapping[str | None, int]

    @classmethod
    def of(
        cls, part: Any, row_bytes: Mapping[str | None, int], placements: Sequence[Placement], batches: Batches
    ) -> Job:
        """Creates engines like the engines of loaders with ``shuffle``. If some rank has no seeds, all engines use uneven='exact', as loaders then must.

        Args:
            part: a :class:`~salientpp.PartitionedGraph` or a :class:`~salientpp.analysis.graph.MemoryGraph`.
            row_bytes: by vertex type, bytes of a row of ``x`` as it travels.
        """
        travelling = (type_ for type_ in part.books if type_ not in part.replicated)
        types = [type_ for type_ in travelling if row_bytes[type_] or not part.is_hetero]
        if not types:
            raise ValueError("no vertex type has rows of x that would travel, so there is nothing to count")
        alone, batch_size = Comm(None, DEFAULT_TIMEOUT), batches.batch_size or 0
        all_parts = part.joined(part.offsets, None)  # a view of no part gives the sampler the lists of all parts
        sampler = sampler_of_part(
            all_parts, batches.num_neighbors, batches.time_attr, batches.weight_attr, **draws_of(batches)
        )
        negatives = None if batches.neg_sampling is None else NegativeSampling.cast(batches.neg_sampling)
        views = [connect_part(part, alone, placement) for placement in placements]
        seeds_of: Any = vertices_of_part
        if batches.link:
            seeds_of = partial(edges_of_part, time=batches.edge_label_time, negatives=negatives)
        visited = {view.own_part: view for view in views}  # several ranks may share a part
        seeds: dict[int, Seeds] = {own: seeds_of(view, sampler, batches.seeds) for own, view in visited.items()}
        fewest = min(each.number for each in seeds.values())
        uneven = "exact" if fewest < placements[0].logical_ranks_per_unit else "wrap"
        numbers = {(at.own_parts.start, at.own_parts.stop): (seeds[at.own_part].number, "") for at in placements}
        books, engines = views[0].held.row_books, []
        rows: dict[str | None, Any] = {type_: {} for type_ in books}
        template, exchanged = PartitionTemplate({}), [(type_, "x") for type_ in types]
        for view, placement in zip(views, placements):
            drawing = method_of(seeds[view.own_part], sampler, view.exchange)
            source = BatchSource(drawing, books, rows, template, exchanged, [], "", part=view.own)
            shares = Shares(source, numbers, batch_size, True, False, uneven, joined=False, alone=False)
            epochs = Epochs(batches.seed, placement, shares.order(placement, batches.seed), batches.draw_block)
            basis = Basis(alone, source, epochs, torch.device("cpu"), batch_size, repeats=sampler.disjoint)
            engines.append(Engine(basis, ()))
        return cls(batches, engines, {type_: row_bytes[type_] for type_ in types})

    @cached_property
    def hosts(self) -> list[range]:
        return [*dict.fromkeys(engine.basis.epochs.placement.ranks_of_host for engine in self.engines)]

    @cached_property
    def units(self) -> list[Basis]:
        """Basis of one rank for each unit. A unit is a part, or several joined parts, whose seeds the same ranks visit."""
        return [*{engine.basis.epochs.placement.own_part: engine.basis for engine in self.engines}.values()]

    @cached_property
    def held(self) -> dict[str | None, PartitionBook]:
        """Partition books that say which rows each host holds, by vertex type. Only types whose rows are sent between ranks have one."""
        return {type_: self.engines[0].basis.source.books[type_] for type_ in self.widths}

    @cached_property
    def alpha_scale(self) -> float:
        """Number by which to multiply α, because a cache plan divides it by the number of row parts. It is 1 without storage ranks."""
        placement = self.engines[0].basis.epochs.placement
        return len(placement.row_parts) / placement.num_caches

    @property
    def part(self) -> Any:
        """The partitioned graph. Parts whose seeds the same ranks take are joined into one."""
        return self.engines[0].basis.source.part

    @property
    def has_storage(self) -> bool:
        """True if other hosts than those that train hold the rows."""
        return self.engines[0].basis.epochs.placement.num_storage_ranks > 0

    @property
    def is_of_one_type(self) -> bool:
        """True if the graph has one vertex type and :attr:`Batches.is_plain`. Only then do the forecasts from inclusion probabilities hold."""
        return self.batches.is_plain and not self.part.is_hetero

    @property
    def is_simple(self) -> bool:
        """True if every rank is alone on its host and has its own part, and :attr:`is_of_one_type`. Lookahead is counted only then."""
        return self.is_of_one_type and len(self.hosts) == len(self.units) == len(self.engines)

    @cached_property
    def workloads(self) -> list[Workload]:
        """Workload of each of :attr:`units`, to plan its cache. Empty unless :attr:`is_of_one_type`."""
        found = []
        for basis in self.units if self.is_of_one_type else ():
            source: Any = basis.source
            of_part = source.part, source.part.part_id, source.sampler, source.seeds.inputs.node
            found.append(workload_of_part(*of_part, basis.batch_size, source.exchange.comm))
        if any(each.vip is None for each in found):  # one computation serves all units
            first, seeds = found[0], [each.seeds for each in found]
            computed = inclusion_probability(first.graph, seeds, first.num_neighbors, first.batch_size)
            found = [replace(each, vip=own) if each.vip is None else each for each, own in zip(found, computed)]
        return found

    @cached_property
    def vip(self) -> Sequence[Mapping[str | None, Tensor]]:
        """Scores by the policy 'vip' for each of :attr:`units`: a mapping from vertex types to float32 [N]."""
        known: list[Any] = [{None: each.vip} for each in self.workloads]
        return known or [scores_of(basis, "vip") for basis in self.units]
