"""Counts and forecasts the feature rows that would cross the network in an epoch, and the savings of caches, lookahead and sums.

The count equals that of a real run with the same seed. The batches of the loaders are sampled without rows. For each batch, the rows count that the host
lacks and no cache has. No cache or other method changes a batch, so one such pass over the batches counts for all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from salientpp.analysis import lookahead, sums
from salientpp.analysis.batches import Batches, is_without_split, one_or_several
from salientpp.analysis.caches import CACHE, Accesses, Caches, Values, check_policies, other_accesses
from salientpp.analysis.device_rows import device_rows
from salientpp.analysis.graph import open_graph, with_storage
from salientpp.analysis.job import MOST_RANKS, Job, placed
from salientpp.analysis.result import word_of_type
from salientpp.analysis.shown import ShownAnalysis
from salientpp.engine.producer import Drawn
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.progress import Progress
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.policies import check_replication_factor
from salientpp.ways.lookahead.shape import Window, check_lookahead


@dataclass(frozen=True)
class Ways:
    """The caches and other methods to compare.

    Attributes:
        policies: names of ``vip.policies.POLICIES``, and 'oracle', which means both oracles. None: the policies in
            :data:`~salientpp.analysis.caches.DEFAULT_POLICIES` that support the batches.
        replication_factors: sizes of the caches, α >= 0, any number of them.
        lookahead: value of the loaders' ``lookahead``. The rows that such loaders fetch with the policy 'vip' are counted. None: the rows for 'auto' are only
            forecast.
        sums: True to count the rows and sums that loaders with ``partial_aggregation`` and the policy 'vip' fetch, and those that they copy to a device.
        send_as: formats that rows of ``x`` travel in, as in :class:`salientpp.NeighborLoader`. Rows that a directory stores in a narrow format travel in that
            format.
    """

    policies: Sequence[str] | None = None
    replication_factors: Sequence[float] = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1)
    lookahead: Window | None = None
    sums: bool = False
    send_as: Mapping[Any, str] | None = None

    def checked(self, predict_only: bool, storage_hosts: int = 0) -> Ways:
        """Returns the same methods, with the replication factors sorted and without repeats. Raises ValueError for values that are wrong for every graph."""
        if self.sums and predict_only:
            raise ValueError(
                "predict_only cannot forecast which rows partial_aggregation leaves to fetch; leave predict_only out"
            )
        if self.sums and storage_hosts:
            raise ValueError("partial_aggregation does not work with storage hosts; leave one of them out")
        if self.sums and self.send_as:
            raise ValueError(
                "partial_aggregation sums rows in the format they are stored in, but send_as sends them in another; leave one of them out"
            )
        alphas = sorted({check_replication_factor(alpha) for alpha in self.replication_factors})
        lookahead = None if self.lookahead is None else check_lookahead(self.lookahead)
        return replace(self, replication_factors=alphas, lookahead=lookahead)


def analyze(
    data: Data | PartitionedGraph,
    batches: Batches | Sequence[Batches] | None = None,
    ways: Ways | None = None,
    *,
    parts: int | None = None,
    method: str | Tensor = "auto",
    edge_weights: str = "vip",
    refine: bool | None = None,
    ranks: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
    storage_hosts: int = 0,
    predict_only: bool = False,
    name: str = "graph",
    progress: Progress | None = None,
) -> ShownAnalysis:
    """Counts and forecasts the rows that cross the network per epoch.

    Args:
        data: a ``Data``, which is partitioned here in memory, for the first of ``batches``; or an opened dataset directory. With a directory, vertices have
            the same ids as in a loader, so the counts equal those of a run exactly.
        batches: the batches to count, or several kinds of batches, which differ only in ``num_neighbors``.
        ways: the caches and other methods to compare.
        parts: K; needed for a ``Data``.
        method, edge_weights, refine: options for partitioning a ``Data``, as in ``partition``.
        ranks: W; None: the number of parts. With more ranks than parts, several ranks split the seeds of a part. With fewer, a rank has several parts.
        ranks_per_host: number for all hosts, or a number for each host. The ranks of a host have one cache; a cache for each rank is counted too.
        storage_hosts: number of further hosts, which hold all rows and train nothing. The ``ranks`` then hold only their caches, of α N / hosts rows,
            and every other row counts. 0: the ranks hold the rows.
        predict_only: True to forecast by VIP only, without sampling.
        name: name of the dataset, for the report.
        progress: object that is told of each step.

    Raises:
        ValueError: an argument is wrong. It is raised before anything is computed.
    """
    progress = progress or Progress()
    several = one_or_several(Batches() if batches is None else batches, data)
    ways = (ways or Ways()).checked(predict_only, storage_hosts)
    is_typed = not several[0].is_plain or (isinstance(data, PartitionedGraph) and data.is_hetero)
    policies = check_policies(ways.policies, predict_only, is_typed)
    options = PartitionOptions(method, edge_weights, refine=refine, seed=several[0].seed)
    graph, row_bytes = open_graph(data, parts, several[0], ways.send_as)
    num_parts: Any = graph.num_parts if isinstance(graph, PartitionedGraph) else parts
    # Refuse numbers that do not fit each other now, before the graph is partitioned.
    is_small = ranks is not None or num_parts <= MOST_RANKS
    placements = placed(ranks, num_parts, ranks_per_host, storage_hosts) if is_small else None
    has_split = not is_without_split(several[0], data)
    del data  # frees the memory, if the caller keeps no reference either
    part: Any = graph if isinstance(graph, PartitionedGraph) else graph(options, progress)
    del graph
    part = with_storage(part, storage_hosts)
    placements = placements or placed(ranks, num_parts, ranks_per_host, storage_hosts)
    jobs = [Job.of(part, row_bytes, placements, each) for each in several]
    for job in jobs:
        _check(job, ways)
    _warn_of_lone_seeds(jobs[0])
    epochs = 0 if predict_only else several[0].epochs
    steps = max(jobs[0].engines[0].basis.epochs.order.batches_by_rank)
    found = [_count(jobs.pop(0), ways, policies, epochs, progress) for _ in several]  # one by one, to bound memory
    first, send_as = several[0], (ways.send_as or {}).items()
    names = "results", "device_rows", "copies"
    counted: dict[str, Any] = {name: tuple(chain.from_iterable(each.get(name, ()) for each in found)) for name in names}
    return ShownAnalysis(
        dataset=name,
        **_facts_of_graph(part, row_bytes),
        parts=num_parts,
        ranks_by_host=placements[0].ranks_by_host[: placements[0].num_training_hosts],
        storage_hosts=storage_hosts,
        parts_by_rank=tuple(len(placement.own_parts) for placement in placements),
        batch_size=first.batch_size or 0,
        epochs=epochs,
        seeds=first.words_of_seeds(),
        seed=first.seed,
        draws={**first.draws(), "lookahead": ways.lookahead},
        send_as={key if isinstance(key, str) else ":".join(map(str, key)): value for key, value in send_as} or None,
        steps_per_epoch=steps,
        has_split=has_split,
        **counted,
    )


def _facts_of_graph(part: Any, row_bytes: Mapping[str | None, int]) -> dict[str, Any]:
    """Returns what an :class:`~salientpp.analysis.result.Analysis` says of the graph and its parts."""
    quality = part.description.quality if isinstance(part, PartitionedGraph) else part.quality
    return {
        "num_vertices": {word_of_type(type_): book.num_vertices for type_, book in part.books.items()},
        "num_edges": part.num_edges,
        "row_bytes": {word_of_type(type_): width for type_, width in row_bytes.items()},
        "replicated": tuple(word_of_type(type_) for type_ in part.books if type_ in part.replicated),
        "edge_cut_fraction": quality["edge_cut_fraction"],
        "balance": quality["balance"],
    }


def _check(job: Job, ways: Ways) -> None:
    agree = job.batches.shared_draws is not None or job.batches.draw_block > 1
    if (agree or ways.lookahead is not None or ways.sums) and not job.is_simple:
        raise ValueError(
            "lookahead, shared_draws, draw_block and partial_aggregation are counted only for plain draws from one vertex type, with one rank per part "
            "and host; leave them out, or run a loader with them and read loader.stats()"
        )
    if ways.sums and isinstance(job.part, PartitionedGraph):
        stored = job.part.description.vertices(None).attributes.get("x", {}).get("stored_as")
        if stored is not None:
            raise ValueError(
                f"partial_aggregation: {job.part.root} stores x as {stored['format']}, and rows are summed in their own format; leave it out"
            )


def _warn_of_lone_seeds(job: Job) -> None:
    """Warns if most seeds have no in-neighbours, as when an undirected graph is stored with one direction per edge."""
    lone, number = 0, 0
    for workload in job.workloads:
        assert isinstance(workload.graph, Graph)  # an analysis has the whole topology
        degrees = workload.graph.indptr[workload.seeds + 1] - workload.graph.indptr[workload.seeds]
        lone, number = lone + int((degrees == 0).sum()), number + degrees.numel()
    if 2 * lone > number:
        warnings.warn(
            f"{lone:,} of {number:,} seeds have no in-neighbours, so their batches have no other vertices. A vertex draws the sources of the edges that "
            "end at it. Did you mean an undirected graph? `salientpp convert ... --undirected` and PyG's ToUndirected store both directions",
            stacklevel=3,
        )


def _count(job: Job, ways: Ways, policies: Sequence[str], epochs: int, progress: Progress) -> dict[str, Any]:
    """Counts and forecasts the rows of all ranks of a job. Returns them under the attributes of :class:`~salientpp.analysis.result.Analysis` to fill."""
    alphas, title, ranks = ways.replication_factors, ",".join(map(str, job.batches.numbers)), len(job.engines)
    progress.begin(f"{title}: inclusion probabilities")
    caches = Caches(job, policies, alphas, epochs)
    ahead: list[list[lookahead.Known]] = []
    summed: list[sums.SumTraffic] = []
    window, counted = ("auto", 0) if ways.lookahead is None else (ways.lookahead, epochs)
    for host in job.hosts:
        accesses: list[Values] = []
        others: list[Values] = []
        for number in host:
            # Threads call `measure` of each consumer with every batch; `add` gets the results in order.
            consumers: list[Any] = [Accesses(job, epochs)]
            if job.is_simple:
                caches_ahead = lookahead.Lookahead(job, number, alphas, window, counted)
                ahead.append(caches_ahead.found)
                consumers += [caches_ahead] if counted else []
            if ways.sums:
                summed.append(sums.SumTraffic(job, number, alphas))
                consumers.append(summed[-1])
            of_rank, engine = f"{title}: rank {number} of {ranks}", job.engines[number]
            for epoch in range(epochs):
                progress.begin(f"{of_rank}, epoch {epoch}", engine.basis.epochs.order.num_batches, "batches")
                measure = partial(_measured, consumers)
                for measured in engine.dry(epoch, measure, only_vertices=not ways.sums):
                    for consumer, of_batch in zip(consumers, measured):
                        consumer.add(epoch, of_batch)
                    progress.advance()
            accesses.append(consumers[0].counts)
            for consumer in consumers[1:]:
                consumer.finish()
            if "oracle-heldout" in policies:
                others.append(other_accesses(job, number, epochs, of_rank, progress))
        progress.begin(f"{title}: host {host.start} of {ranks}", len(policies), "policies")
        caches.count(host, accesses, others, progress.advance)
    found: dict[str, Any] = {"results": list(caches.volumes())}
    vip = [volume for volume in found["results"] if (volume.way, volume.policy) == (CACHE, "vip")]
    if job.is_simple:
        found["device_rows"] = [] if job.has_storage else device_rows(job)
        found["results"] += lookahead.volumes(ahead, job, vip, counted)
    if summed:
        volumes, found["copies"] = sums.volumes(summed, vip, epochs)
        found["results"] += volumes
    return found


def _measured(consumers: Sequence[Any], batch: Drawn) -> list[Any]:
    return [consumer.measure(batch) for consumer in consumers]
