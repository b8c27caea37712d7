"""Counts and forecasts what static caches leave to fetch, for every policy and replication factor.

A cache changes what travels and never the batches, so one dry run serves all of them: a row is fetched by every batch that needs it, unless it is cached.
Beside the count stands the forecast of the inclusion probabilities, which needs no sampling: too high from two hops on, so a few batches calibrate it.

Two oracles bound what a static cache can do. ``oracle`` ranks vertices by the very accesses that are counted: no static cache is better, but with few epochs
it has learned their noise. ``oracle-heldout`` ranks by as many other epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp.analysis.job import Job
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.producer import Drawn
from salientpp.processes import in_order
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import BatchKeys
from salientpp.vip.accesses import shuffled_batches
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.policies import POLICIES, TYPED_POLICIES, Policy, Workload, add_scores, plan_caches, score
from salientpp.vip.shared import shared_inclusion_probability
from salientpp.ways.cache import scores_of

ORACLES = ("oracle", "oracle-heldout")
#: Compared unless others are named: all but 'vip-hop', which ranks nearly as 'vip' does.
DEFAULT_POLICIES = ("vip", "degree", "halo", "wpr", "paths", "simulation", "random", "oracle")
#: Policies that need sampling, so that there is nothing to forecast without it.
LEARNED = (*ORACLES, "simulation")
#: One cache for the ranks of a host, as loaders have it; and a cache of the same memory for each rank.
CACHE, PRIVATE = "cache", "private cache"
#: Batches per rank that calibrate the forecast.
_CALIBRATION_BATCHES = 20

#: By vertex type.
Values = dict[str | None, np.ndarray]
Scores = Mapping[str | None, Tensor]
Out = TypeVar("Out")


def check_policies(policies: Sequence[str] | None, predict_only: bool, is_typed: bool) -> list[str]:
    """The policies to compare, 'vip' among them.

    Args:
        is_typed: vertices have several types, or batches are no plain ones.

    Raises:
        ValueError: there is no such policy.
    """
    known: Mapping[str, Any] = TYPED_POLICIES if is_typed else POLICIES
    if policies is None:
        policies = [policy for policy in DEFAULT_POLICIES if policy in known or policy in ORACLES]
    checked: list[str] = []
    for policy in policies:
        if policy not in known and policy not in ORACLES:
            words = " for such batches" if is_typed else ""
            raise ValueError(f"policies must be among {', '.join([*sorted(known), 'oracle'])}{words}, got {policy!r}")
        checked += ORACLES if policy == "oracle" else [policy]
    if predict_only:
        checked = [policy for policy in checked if policy not in LEARNED]
    if "vip" not in checked:
        checked.insert(0, "vip")  # the forecasts and recommendations are VIP's
    return list(dict.fromkeys(checked))


class Accesses:
    """Counts in how many batches of each epoch a rank needs each row that its host lacks.

    Attributes:
        counts: by epoch and vertex type, int32 [N].
    """

    edges = False

    def __init__(self, job: Job, epochs: int) -> None:
        sizes = {type_: book.num_vertices for type_, book in job.held.items()}
        self.counts = [{type_: np.zeros(size, dtype=np.int32) for type_, size in sizes.items()} for _ in range(epochs)]

    def measure(self, batch: Drawn) -> Values:
        return {type_: batch.places[type_].remote_id.numpy() for type_ in self.counts[0]}

    def add(self, epoch: int, measured: Values) -> None:
        for type_, ids in measured.items():
            self.counts[epoch][type_][ids] += 1


def other_accesses(job: Job, number: int, epochs: int, on_batch: Callable[[], None]) -> Values:
    """The same counts of rank ``number`` over as many other epochs: int32 [N] by type."""
    # The keys of `simulation` are numbered by part; these lie beyond.
    total, engine = Accesses(job, 1), job.engines[number]
    for measured in _other_batches(engine, total.measure, engine.basis.batch_size, len(job.engines) + number, epochs):
        total.add(0, measured)
        on_batch()
    return total.counts[0]


def _other_batches(
    engine: Engine,
    measure: Callable[[Drawn], Out],
    batch_size: int,
    key: int,
    epochs: int,
    only_of: int | None = None,
    most: int | None = None,
) -> Iterator[Out]:
    """What ``measure`` says of batches of no training run, by keys of ``key``: those of ``only_of`` seeds, ``most`` at most."""
    positions = torch.arange(engine.basis.source.seeds.number, device="cpu")
    drawn = shuffled_batches(positions, batch_size, key, epochs) if positions.numel() else ()
    chosen = (each for each in drawn if only_of is None or each[0].numel() == only_of)

    def measured(batch: tuple[Tensor, int]) -> Out:
        return measure(engine.producer.drawn([(batch[0], BatchKeys(batch[1], batch[1]))], only_vertices=True))

    return in_order(measured, islice(chosen, most), "salientpp-dry")


def _batch_sizes(basis: Basis) -> list[int]:
    """Seeds of each batch of an epoch."""
    return [positions.numel() for positions in basis.epochs.positions(0)]


@dataclass(frozen=True, eq=False)
class Probabilities:
    """What is known of a job's batches without sampling.

    Attributes:
        vip: by unit and vertex type float32 [N], the scores of 'vip'.
        expected: by rank and vertex type float64 [N], in how many batches of an epoch a row that the host lacks is expected.
        workloads: by unit, of plain batches from one type of vertices.
    """

    job: Job
    vip: Sequence[Scores]
    workloads: Sequence[Workload]
    expected: list[Values] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job) -> Probabilities:
        if job.is_of_one_type:
            workloads = [_workload_of(basis) for basis in job.units]
            if any(workload.vip is None for workload in workloads):  # one sweep for all
                seeds, first = [workload.seeds for workload in workloads], workloads[0]
                computed = inclusion_probability(first.graph, seeds, first.num_neighbors, first.batch_size)
                workloads = [
                    replace(each, vip=own) if each.vip is None else each for each, own in zip(workloads, computed)
                ]
            found = cls(job, [{None: cast(Tensor, each.vip)} for each in workloads], workloads)
        else:
            found = cls(job, [scores_of(basis, "vip") for basis in job.units], [])
        return replace(found, expected=found._expected())

    def scores(self, policy: str, unit: int) -> Scores:
        """What a unit's cache is planned by, as a run does."""
        if policy == "vip":
            return self.vip[unit]
        if self.workloads:
            return {None: score(cast(Policy, policy), self.workloads[unit])}
        return scores_of(self.job.units[unit], cast(Policy, policy))

    def _expected(self) -> list[Values]:
        found: list[Values] = []
        last, agrees = self._last_batches(), self.job.batches.shared_draws is not None
        for engine in self.job.engines:
            basis = engine.basis
            sizes, batch_size, unit = _batch_sizes(basis), basis.batch_size, basis.epochs.placement.own_part
            of_rank: Values = {}
            for type_, book in self.job.held.items():
                if not self.workloads:  # a smaller batch counts by its size
                    chance = self.vip[unit][type_].double() * (sum(sizes) / batch_size)
                elif agrees:
                    chance = self._shared(self.workloads[unit], sizes)
                else:
                    full = sum(size == batch_size for size in sizes)
                    chance = self.vip[unit][type_].double() * full
                    if full < len(sizes):
                        chance += last[sizes[-1]][unit]
                of_rank[type_] = chance.numpy()
                of_rank[type_][slice(*book.range_of(basis.source.exchange.part_id))] = 0
            found.append(of_rank)
        return found

    def _last_batches(self) -> dict[int, Tensor]:
        """By size [units, N], the probabilities of batches that are smaller than the others."""
        if not self.workloads or self.job.batches.shared_draws is not None:
            return {}
        first, seeds = self.workloads[0], [workload.seeds for workload in self.workloads]
        sizes = {size for engine in self.job.engines for size in _batch_sizes(engine.basis)[-1:]} - {first.batch_size}
        return {size: inclusion_probability(first.graph, seeds, first.num_neighbors, size) for size in sizes}

    def _shared(self, workload: Workload, sizes: list[int]) -> Tensor:
        total = torch.zeros(workload.graph.num_vertices, dtype=torch.float64, device="cpu")
        for size in sorted(set(sizes)):
            chance = shared_inclusion_probability(workload.graph, workload.seeds, workload.num_neighbors, size)
            total += chance.double() * sizes.count(size)
        return total


def _workload_of(basis: Basis) -> Workload:
    source, sampler = basis.source, cast(NeighborSampler, basis.source.sampler)
    assert (
        source.part is not None
        and source.part.part_id is not None
        and isinstance(source.seeds.inputs, NodeSamplerInput)
    )
    return source.part.workload(source.part.part_id, source.seeds.inputs.node, sampler.fanouts[0], basis.batch_size)


@dataclass(frozen=True, eq=False)
class Left:
    """Rows per epoch that the caches of one policy leave to fetch. Axes: W ranks, T vertex types, A replication factors, R counted epochs.

    Attributes:
        counted: [W, T, A, R].
        predicted: [W, T, A].
        cached: [T, A], rows in all caches.
        calibrated, variance: [T, A], an estimate from a few batches per rank, and its variance; of 'vip' alone.
    """

    counted: np.ndarray
    predicted: np.ndarray
    cached: np.ndarray
    calibrated: np.ndarray
    variance: np.ndarray

    @classmethod
    def nothing(cls, ranks: int, types: int, alphas: int, epochs: int) -> Left:
        sums = [np.zeros((types, alphas)) for _ in range(3)]
        return cls(np.zeros((ranks, types, alphas, epochs)), np.zeros((ranks, types, alphas)), *sums)


class Caches:
    """The static caches of a job's ranks, host after host.

    Attributes:
        left: by (way, policy).
        bare, bare_predicted: [W, T, R] and [W, T], rows per epoch without a cache.
    """

    def __init__(self, known: Probabilities, policies: Sequence[str], alphas: Sequence[float], epochs: int) -> None:
        job = known.job
        self._known, self._job, self._alphas, self._epochs = known, job, alphas, epochs
        self._policies, self._types = list(policies), list(job.held)
        ways = [CACHE, PRIVATE] if job.shares else [CACHE]
        shape = len(job.engines), len(self._types), len(alphas), epochs
        self.left = {(way, policy): Left.nothing(*shape) for way in ways for policy in policies}
        self.bare = np.zeros((shape[0], shape[1], epochs))
        self.bare_predicted = np.zeros(shape[:2])

    def count(
        self, host: range, accesses: Sequence[Accesses], others: Sequence[Values], on_policy: Callable[[], None]
    ) -> None:
        """Count for the ranks of one host.

        Args:
            accesses: of these ranks.
            others: of other epochs, where 'oracle-heldout' is asked for.
        """
        for number, own in zip(host, accesses):
            for t, type_ in enumerate(self._types):
                self.bare[number, t] = [counts[type_].sum() for counts in own.counts]
                self.bare_predicted[number, t] = self._known.expected[number][type_].sum()

        def planned(policy: str) -> list[tuple[str, list[int], Values]]:
            return self._plan(policy, host, accesses, others)

        # Planning takes one core, so policies share them.
        for policy, plans in zip(self._policies, in_order(planned, self._policies, "salientpp-plan")):
            for way, numbers, since in plans:
                self._add(self.left[way, policy], numbers, host, accesses, since, policy)
            on_policy()

    def _scores(self, policy: str, host: range, accesses: Sequence[Accesses], others: Sequence[Values]) -> list[Scores]:
        """Of each rank of a host."""
        if policy == "oracle":
            return [
                {t: torch.from_numpy(sum(counts[t] for counts in own.counts)).double() for t in self._types}
                for own in accesses
            ]
        if policy == "oracle-heldout":
            return [{t: torch.from_numpy(counts[t]).double() for t in self._types} for counts in others]
        units = [self._job.placements[number].own_part for number in host]
        of_unit = {unit: self._known.scores(policy, unit) for unit in dict.fromkeys(units)}
        return [of_unit[unit] for unit in units]

    def _plan(
        self, policy: str, host: range, accesses: Sequence[Accesses], others: Sequence[Values]
    ) -> list[tuple[str, list[int], Values]]:
        """The caches of a host: (way, ranks that use it, which rows it has)."""
        scores, engines = self._scores(policy, host, accesses, others), self._job.engines[host.start : host.stop]
        pooled: Scores = scores[0]
        if len(host) > 1:
            pooled = {t: torch.zeros(scores[0][t].numel(), dtype=torch.float64, device="cpu") for t in self._types}
            for each in scores:
                for type_, pool in pooled.items():
                    add_scores(cast(Policy, policy), pool, each[type_])
        found = [(CACHE, list(host), self._since(pooled, self._job.held, engines[0].basis.source.exchange.part_id))]
        if self._job.shares:
            for number, each, engine in zip(host, scores, engines):
                part: Any = engine.basis.source.part
                own = {type_: part.row_books[type_] for type_ in self._types}
                found.append((PRIVATE, [number], self._since(each, own, part.part_id)))
        return found

    def _since(self, scores: Scores, books: Mapping[str | None, PartitionBook], part_id: int) -> Values:
        """By type int32 [N]: the first of the ascending replication factors with which a row is cached; their number if with none."""
        since = {t: np.full(book.num_vertices, len(self._alphas), dtype=np.int32) for t, book in books.items()}
        wanted = {type_: scores[type_] for type_ in books}
        for a in reversed(range(len(self._alphas))):
            for type_, ids in plan_caches(wanted, books, self._job.widths, part_id, self._alphas[a]).items():
                since[type_][ids.numpy()] = a
        return since

    def _add(
        self, left: Left, numbers: list[int], host: range, accesses: Sequence[Accesses], since: Values, policy: str
    ) -> None:
        for t, type_ in enumerate(self._types):
            left.cached[t] += len(since[type_]) - self._beyond(np.ones(len(since[type_])), since[type_])
            for number in numbers:
                left.predicted[number, t] = self._beyond(self._known.expected[number][type_], since[type_])
                for epoch, counts in enumerate(accesses[number - host.start].counts):
                    left.counted[number, t, :, epoch] = self._beyond(counts[type_], since[type_])
        if policy == "vip" and self._epochs:
            for number in numbers:
                self._calibrate(left, number, since)

    def _beyond(self, values: np.ndarray, since: np.ndarray) -> np.ndarray:
        """[A]: the sum of the values of rows that are not cached, for each replication factor."""
        by_factor = np.bincount(since, weights=values, minlength=len(self._alphas) + 1)
        return by_factor[::-1].cumsum()[::-1][1:]

    def _calibrate(self, left: Left, number: int, since: Values) -> None:
        engine, ranks = self._job.engines[number], len(self._job.engines)
        sizes, num_seeds = _batch_sizes(engine.basis), engine.basis.source.seeds.number

        def beyond(batch: Drawn) -> list[list[Any]]:
            ids = {type_: batch.places[type_].remote_id.numpy() for type_ in self._types}
            return [[np.count_nonzero(since[t][ids[t]] > a) for a in range(len(self._alphas))] for t in self._types]

        for batch_size in sorted(set(sizes)):  # full batches, and perhaps a smaller last one
            epochs = -(-_CALIBRATION_BATCHES * batch_size // num_seeds) + 1
            whole = min(batch_size, num_seeds)
            found = _other_batches(engine, beyond, batch_size, 2 * ranks + number, epochs, whole, _CALIBRATION_BATCHES)
            sampled, times = np.array(list(found), dtype=np.float64), sizes.count(batch_size)
            left.calibrated[:] += sampled.mean(axis=0) * times
            left.variance[:] += sampled.var(axis=0, ddof=min(1, len(sampled) - 1)) / len(sampled) * times**2
