"""Counts and forecasts the feature rows that would cross the network in an epoch, and says what caches, lookahead and sums would save.

The count is that of a run with the same seed: per batch the distinct rows that its host lacks and no cache has, of the batches that loaders make. Every way to
fetch fewer rows is counted on one dry run of the loaders' engine, since none changes a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.analysis import lookahead as ahead
from salientpp.analysis import sums
from salientpp.analysis.advice import DeviceRows, Recommendation, advise
from salientpp.analysis.batches import Batches, one_or_several
from salientpp.analysis.caches import CACHE, LEARNED, Accesses, Caches, Probabilities, check_policies, other_accesses
from salientpp.analysis.graph import open_graph
from salientpp.analysis.in_memory import Unparted
from salientpp.analysis.job import MOST_RANKS, Job, placed
from salientpp.analysis.result import Analysis, Copies, Volume, word_of_type
from salientpp.engine.producer import Drawn
from salientpp.partitioning.options import PartitionOptions
from salientpp.progress import Progress
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.policies import cache_bytes, cache_capacity, check_replication_factor
from salientpp.ways.lookahead.shape import Window, check_lookahead


@dataclass(frozen=True)
class Ways:
    """The ways to fetch fewer rows that are compared.

    Attributes:
        policies: names of ``vip.policies.POLICIES``, and 'oracle', which stands for both oracles; None: those of
            :data:`~salientpp.analysis.caches.DEFAULT_POLICIES` that the batches allow.
        replication_factors: α >= 0, any number of them.
        lookahead: count what loaders with this argument fetch, with the policy 'vip'; None: predict that, for 'auto'.
        sums: count what loaders with ``partial_aggregation`` fetch, with the policy 'vip', and what they copy to a device.
        send_as: the formats that rows of ``x`` travel in, as in :class:`salientpp.NeighborLoader`; those that a directory stores narrower travel so.
    """

    policies: Sequence[str] | None = None
    replication_factors: Sequence[float] = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1)
    lookahead: Window | None = None
    sums: bool = False
    send_as: Mapping[Any, str] | None = None

    @property
    def alphas(self) -> list[float]:
        return sorted({check_replication_factor(alpha) for alpha in self.replication_factors})

    def checked(self, predict_only: bool) -> Ways:
        """The same, or ValueError if something is wrong whatever the graph is."""
        if self.sums and predict_only:
            raise ValueError(
                "partial counts what sums leave to fetch, for which there is no forecast; leave predict_only out"
            )
        if self.sums and self.send_as:
            raise ValueError(
                "partial sums rows as they are, and send_as has them travel otherwise; leave one of them out"
            )
        for alpha in self.replication_factors:
            check_replication_factor(alpha)
        return self if self.lookahead is None else replace(self, lookahead=check_lookahead(self.lookahead))


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
    predict_only: bool = False,
    name: str = "graph",
    progress: Progress | None = None,
) -> Analysis:
    """Count and forecast the rows that cross the network per epoch.

    Args:
        data: a ``Data``, partitioned here in memory for the first batches; or an opened dataset directory, whose ids are the loader's, so that counts
            equal a live run's exactly.
        batches: what to count, or several that differ in ``num_neighbors``.
        ways: what to compare.
        parts: K; needed for a ``Data``.
        method, edge_weights, refine: of partitioning a ``Data``, as in ``partition``.
        ranks: W; None: as many as parts. Several share a part's seeds, or one has several parts.
        ranks_per_host: of every host, or a number for each. The ranks of a host have one cache; a cache for each rank is counted too.
        predict_only: no sampling, VIP's forecast alone.
        name: of the dataset, for the report.
        progress: told of each step.

    Raises:
        ValueError: an argument is wrong; nothing was computed.
    """
    progress = progress or Progress()
    several = one_or_several(Batches() if batches is None else batches, data)
    ways = (ways or Ways()).checked(predict_only)
    is_typed = not several[0].is_plain or (isinstance(data, PartitionedGraph) and data.is_hetero)
    policies = check_policies(ways.policies, predict_only, is_typed)
    _check_sums(data, ways)
    options = PartitionOptions(method, edge_weights, refine=refine, seed=several[0].seed)
    graph, row_bytes = open_graph(data, parts, several[0], ways.send_as)
    num_parts = graph.num_parts
    placements = None
    if ranks is not None or num_parts <= MOST_RANKS:
        placements = placed(
            ranks, num_parts, ranks_per_host
        )  # what does not fit is said before the graph is partitioned
    del data  # a caller who keeps no reference either has the memory back
    part: Any = graph.parted(options, several[0], progress) if isinstance(graph, Unparted) else graph
    del graph
    placements = placements or placed(ranks, num_parts, ranks_per_host)
    jobs = [Job.of(part, row_bytes, placements, each) for each in several]
    found = [_Count(job, ways, policies, 0 if predict_only else job.batches.epochs, progress) for job in jobs]
    for count in found:
        count.run()
    first, send_as = several[0], ways.send_as
    quality = part.description.quality if isinstance(part, PartitionedGraph) else part.quality
    return Analysis(
        dataset=name,
        num_vertices={word_of_type(type_): book.num_vertices for type_, book in part.books.items()},
        num_edges=part.num_edges,
        parts=num_parts,
        ranks_by_host=placements[0].ranks_by_host,
        parts_by_rank=tuple(len(placement.own_parts) for placement in placements),
        batch_size=first.batch_size or 0,
        epochs=0 if predict_only else first.epochs,
        seeds=first.words_of_seeds(),
        seed=first.seed,
        row_bytes={word_of_type(type_): width for type_, width in row_bytes.items()},
        replicated=tuple(word_of_type(type_) for type_ in part.books if type_ in part.replicated),
        edge_cut_fraction=quality["edge_cut_fraction"],
        balance=quality["balance"],
        draws={**first.draws(), "lookahead": ways.lookahead},
        send_as=None if not send_as else {_words(key): value for key, value in send_as.items()},
        steps_per_epoch=max(jobs[0].engines[0].basis.epochs.order.batches_by_rank),
        results=tuple(volume for count in found for volume in count.volumes),
        device_rows=tuple(row for count in found for row in count.device_rows),
        recommendations=tuple(count.recommendation for count in found if count.recommendation is not None),
        copies=tuple(copies for count in found for copies in count.copies),
    )


def _words(key: Any) -> str:
    return key if isinstance(key, str) else ":".join(map(str, key))


def _check_sums(data: Any, ways: Ways) -> None:
    if ways.sums and isinstance(data, PartitionedGraph) and not data.is_hetero:
        narrow = data.description.vertices(None).narrow("x")
        if narrow is not None:
            raise ValueError(
                f"partial: {data.root} stores x as {narrow.format}, and rows are summed as they are; leave it out"
            )


class Consumer(Protocol):
    """Counts something of a rank's batches.

    Attributes:
        edges: it needs the edges of batches.
    """

    edges: bool

    def measure(self, batch: Drawn) -> Any:
        """What counts of one batch; called by threads."""

    def add(self, epoch: int, measured: Any) -> None:
        """Called batch after batch, in order."""


class _Count:
    """Counts one kind of batches for all ranks of a job."""

    def __init__(self, job: Job, ways: Ways, policies: Sequence[str], epochs: int, progress: Progress) -> None:
        self.job, self._ways, self._policies = job, ways, policies
        self.epochs, self._progress, self.alphas = epochs, progress, ways.alphas
        self._title = ",".join(map(str, job.batches.fanouts))
        self.volumes: list[Volume] = []
        self.device_rows: list[DeviceRows] = []
        self.recommendation: Recommendation | None = None
        self.copies: list[Copies] = []
        agree = job.batches.shared_draws is not None or job.batches.draw_block > 1
        if (agree or ways.lookahead is not None or ways.sums) and not job.is_simple:
            raise ValueError(
                "lookahead, shared_draws, draw_block and partial are counted for plain draws from one type of vertices, and a rank per part and host; "
                "loader.stats() says what a loader with them fetches"
            )

    def run(self) -> None:
        self._progress.begin(f"{self._title}: inclusion probabilities")
        known = Probabilities.of(self.job)
        caches = Caches(known, self._policies, self.alphas, self.epochs)
        windows: list[list[ahead.Known]] = []
        summed: list[sums.Sums] = []
        for host in self.job.hosts:
            accesses, others = [], []
            for number in host:
                own = Accesses(self.job, self.epochs)
                consumers: list[Consumer] = [own]
                window = self._lookahead(number, known) if self.job.is_simple else None
                if window is not None and self._ways.lookahead is not None:
                    consumers.append(window)
                if self._ways.sums:
                    workload, width = known.workloads[number], self.job.widths[None]
                    summed.append(sums.Sums(self.job.engines[number], workload, self.alphas, width))
                    consumers.append(summed[-1])
                self._dry_run(number, consumers)
                accesses.append(own)
                windows += [] if window is None else [window.found()]
                if self._ways.sums:
                    summed[-1].finish()
                others += [self._other_epochs(number)] if "oracle-heldout" in self._policies else []
            self._progress.begin(f"{self._title}: host {self._of(host.start)}", len(self._policies), "policies")
            caches.count(host, accesses, others, self._progress.advance)
        for way, policy in caches.left:
            self.volumes += _volumes(self, caches, way, policy)
        if self.job.is_simple:
            self._advise(known)
            self._add_lookahead(caches, windows)
        if summed:
            self._add_sums(summed)

    def _of(self, number: int) -> str:
        return f"{number} of {len(self.job.engines)}"

    def _lookahead(self, number: int, known: Probabilities) -> ahead.Lookahead:
        epochs = 0 if self._ways.lookahead is None else self.epochs
        window = "auto" if self._ways.lookahead is None else self._ways.lookahead
        return ahead.Lookahead(
            self.job.engines[number], known.workloads[number], self.alphas, window, self.job.widths[None], epochs
        )

    def _dry_run(self, number: int, consumers: Sequence[Consumer]) -> None:
        """Draw the rank's epochs once, for all consumers."""
        engine, bare = self.job.engines[number], not any(consumer.edges for consumer in consumers)
        for epoch in range(self.epochs):
            step = f"{self._title}: rank {self._of(number)}, epoch {epoch}"
            self._progress.begin(step, engine.basis.epochs.order.num_batches, "batches")
            for measured in engine.dry(epoch, lambda batch: [c.measure(batch) for c in consumers], only_vertices=bare):
                for consumer, own in zip(consumers, measured):
                    consumer.add(epoch, own)
                self._progress.advance()

    def _other_epochs(self, number: int) -> dict[str | None, np.ndarray]:
        basis = self.job.engines[number].basis
        total = self.epochs * -(-basis.source.seeds.number // basis.batch_size)
        self._progress.begin(f"{self._title}: rank {self._of(number)}, held-out epochs", total, "batches")
        return other_accesses(self.job, number, self.epochs, self._progress.advance)

    def _advise(self, known: Probabilities) -> None:
        own = [volume for volume in self.volumes if (volume.way, volume.policy) == (CACHE, "vip")]
        part: Any = self.job.engines[0].basis.source.part
        original_id = part.original_id(torch.arange(part.books[None].num_vertices, device="cpu"))
        self.device_rows, self.recommendation = advise(
            known.workloads,
            [scores[None] for scores in known.vip],
            original_id,
            [(volume.replication_factor, 1 - volume.reduction) for volume in own],
            self.job.widths[None],
        )

    def _add_lookahead(self, caches: Caches, found: Sequence[Sequence[ahead.Known]]) -> None:
        counted = self._ways.lookahead is not None and self.epochs > 0
        if counted and self.job.batches.draw_block > 1:
            # Of draws that agree the probabilities say too little of what a static cache leaves, which is counted.
            static = caches.left[CACHE, "vip"].counted[:, 0].mean(axis=2)
            found = [
                [
                    replace(own, static=float(rows) / max(1, engine.basis.epochs.order.num_batches))
                    for own, rows in zip(of_rank, left)
                ]
                for of_rank, left, engine in zip(found, static, self.job.engines)
            ]
        for own, of_alpha in zip(self._vip(), zip(*found)):
            rows = [sum(each.rows) / self.epochs for each in of_alpha] if counted else None
            figures = ahead.over_ranks(of_alpha)
            left = figures.predicted_share * (own.rows or 0) if rows is None else sum(rows)
            self.volumes.append(_of_other_way(own, "lookahead", rows, left, ahead=figures))

    def _add_sums(self, summed: Sequence[sums.Sums]) -> None:
        found, self.copies = sums.over_ranks(summed, self.job.batches.fanouts, self.epochs)
        for a, (own, figures) in enumerate(zip(self._vip(), found)):
            rows = [each.fetched[a].rows / self.epochs for each in summed]
            volume = _of_other_way(own, "sums", rows, sum(rows) + figures.sums_per_epoch, summed=figures)
            self.volumes.append(replace(volume, remote_bytes_per_epoch=figures.bytes_with))

    def _vip(self) -> list[Volume]:
        return [volume for volume in self.volumes if (volume.way, volume.policy) == (CACHE, "vip")]


def _volumes(count: _Count, caches: Caches, way: str, policy: str) -> list[Volume]:
    """The rows of one policy's static caches, by replication factor and vertex type."""
    found = []
    epochs, job, left = count.epochs, count.job, caches.left[way, policy]
    of_ranks = left.counted.sum(axis=0).mean(axis=2) if epochs else left.predicted.sum(axis=0)  # [T, A]
    bare = caches.bare.sum(axis=0).mean(axis=1) if epochs else caches.bare_predicted.sum(axis=0)  # [T]

    def ratio(oracle: str, t: int, a: int) -> float | None:
        other = caches.left.get((way, oracle))
        rows = 0.0 if other is None else other.counted[:, t, a].sum(axis=0).mean()
        return float(of_ranks[t, a] / rows) if rows > 0 else None

    for a, alpha in enumerate(count.alphas):
        if len(job.held) == 1:
            ((type_, book),) = job.held.items()
            num_bytes = cache_capacity(alpha, book) * job.widths[type_]
        else:
            num_bytes = cache_bytes(alpha, job.held, job.widths)
        for t, (type_, width) in enumerate(job.widths.items()):
            of_epochs, is_vip = left.counted[:, t, a].sum(axis=0), policy == "vip"
            found.append(
                Volume(
                    fanouts=job.batches.fanouts,
                    way=way,
                    policy=policy,
                    replication_factor=alpha,
                    vertex_type=word_of_type(type_),
                    row_bytes=width,
                    cache_bytes=num_bytes,
                    cached_rows=int(left.cached[t, a]),
                    rows_without_cache=float(bare[t]),
                    remote_rows_per_epoch=float(of_epochs.mean()) if epochs else None,
                    remote_rows_std=float(of_epochs.std()) if epochs else None,
                    remote_bytes_per_epoch=float(of_epochs.mean()) * width if epochs else None,
                    remote_rows_per_rank=tuple(left.counted[:, t, a].mean(axis=1).tolist()) if epochs else None,
                    predicted_rows_per_epoch=None if policy in LEARNED else float(left.predicted[:, t, a].sum()),
                    calibrated_rows_per_epoch=float(left.calibrated[t, a]) if epochs and is_vip else None,
                    calibrated_error=math.sqrt(left.variance[t, a]) if epochs and is_vip else None,
                    ratio_to_oracle=ratio("oracle", t, a),
                    ratio_to_heldout=ratio("oracle-heldout", t, a),
                    reduction=float(1 - of_ranks[t, a] / bare[t]) if bare[t] > 0 else 0.0,
                )
            )
    return found


def _of_other_way(own: Volume, way: str, rows: Sequence[float] | None, left: float, **figures: Any) -> Volume:
    """The row of a way that takes the place of the static cache ``own`` in its memory: ``rows`` by rank, what is ``left`` of those without a cache."""
    total = None if rows is None else sum(rows)
    return replace(
        own, way=way, cached_rows=None, remote_rows_per_epoch=total, remote_rows_std=None,
        remote_bytes_per_epoch=None if total is None else total * own.row_bytes, remote_rows_per_rank=None if rows is None else tuple(rows),
        predicted_rows_per_epoch=None, calibrated_rows_per_epoch=None, calibrated_error=None, ratio_to_oracle=None, ratio_to_heldout=None,
        reduction=1 - left / own.rows_without_cache if own.rows_without_cache else 0.0, **figures,
    )  # fmt: skip
