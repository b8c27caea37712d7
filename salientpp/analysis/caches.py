"""Counts and forecasts the rows that are still fetched with static caches, for every policy and replication factor.

A cache changes what travels and never the batches, so one dry run serves all caches. Every batch that needs a row fetches the row, unless the row is cached.
Besides the count, inclusion probabilities give a forecast, which needs no sampling. The forecast is too high from two hops on, so a few batches calibrate it.

Two oracles bound what a static cache can save. ``oracle`` orders vertices by the counted accesses themselves. No static cache is better, but with few epochs
the oracle has learned the noise of these epochs. ``oracle-heldout`` orders vertices by the accesses in the same number of other epochs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from salientpp.analysis.job import Job, pooled
from salientpp.analysis.result import Volume, word_of_type
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.producer import Drawn
from salientpp.processes import in_order
from salientpp.progress import Progress
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.schedule import BatchKeys
from salientpp.suggestions import did_you_mean
from salientpp.vip.accesses import shuffled_batches
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.names import POLICY_NAMES
from salientpp.vip.policies import POLICIES, TYPED_POLICIES, cache_bytes, cache_capacity, plan_caches
from salientpp.vip.shared import shared_inclusion_probability
from salientpp.ways.cache import scores_of

ORACLES = ("oracle", "oracle-heldout")
#: Policies compared by default: all except 'vip-hop', which orders vertices nearly as 'vip' does.
DEFAULT_POLICIES = (*(name for name in POLICY_NAMES if name != "vip-hop"), "oracle")
#: Policies that need sampling. They have no forecast without it.
LEARNED = (*ORACLES, "simulation")
#: Names of two kinds of caches: one cache for all ranks of a host, as loaders have it; and one cache for each rank, with the same α.
CACHE, PRIVATE = "cache", "private cache"
#: Number of batches per rank that calibrate the forecast.
_CALIBRATION_BATCHES = 20

#: Values by vertex type: int32 [R, N], or one number for each vertex.
Values = dict[str | None, np.ndarray]
Scores = Mapping[str | None, Tensor]
Out = TypeVar("Out")


def check_policies(policies: Sequence[str] | None, predict_only: bool, is_typed: bool) -> list[str]:
    """Returns the policies to compare, with 'vip' always among them, because forecasts need it.

    Args:
        is_typed: True if vertices have several types, or unless :attr:`~salientpp.analysis.batches.Batches.is_plain`.

    Raises:
        ValueError: a policy does not exist.
    """
    known: Mapping[str, Any] = TYPED_POLICIES if is_typed else POLICIES
    allowed = {*known, *ORACLES}
    names = [policy for policy in DEFAULT_POLICIES if policy in allowed] if policies is None else policies
    for policy in names:
        if policy not in allowed:
            words = " for such batches" if is_typed else ""
            raise ValueError(
                f"policies must be among {', '.join([*sorted(known), 'oracle'])}{words}, got {policy!r}{did_you_mean(policy, sorted(allowed))}"
            )
    checked = [each for policy in names for each in (ORACLES if policy == "oracle" else [policy])]
    if "vip" not in checked:
        checked.insert(0, "vip")  # forecasts need it
    return [*dict.fromkeys(policy for policy in checked if not predict_only or policy not in LEARNED)]


class Accesses:
    """Counts the batches of a rank that need a row, for each of R epochs and for each row that the rank's host lacks.

    Attributes:
        counts: by vertex type int32 [R, N].
    """

    def __init__(self, job: Job, epochs: int) -> None:
        sizes = {type_: book.num_vertices for type_, book in job.held.items()}
        self.counts: Values = {type_: np.zeros((epochs, size), dtype=np.int32) for type_, size in sizes.items()}

    def measure(self, batch: Drawn) -> Values:
        return {type_: batch.places[type_].remote_id.numpy() for type_ in self.counts}

    def add(self, epoch: int, measured: Values) -> None:
        for type_, ids in measured.items():
            self.counts[type_][epoch, ids] += 1


def other_accesses(job: Job, number: int, epochs: int, title: str, progress: Progress) -> Values:
    """Returns the counts of :class:`Accesses` for rank ``number``, summed over ``epochs`` other epochs: by type int32 [1, N]."""
    total, engine = Accesses(job, 1), job.engines[number]
    size, num_seeds = engine.basis.batch_size, engine.basis.source.seeds.number
    progress.begin(f"{title}, held-out epochs", epochs * -(-num_seeds // size), "batches")
    # The policy `simulation` uses the numbers of the parts for its keys. The numbers here are above them.
    batches = shuffled_batches(torch.arange(num_seeds, device="cpu"), size, len(job.engines) + number, epochs)
    for measured in _drawn(engine, total.measure, batches if num_seeds else ()):
        total.add(0, measured)
        progress.advance()
    return total.counts


def _drawn(engine: Engine, measure: Callable[[Drawn], Out], batches: Iterable[tuple[Tensor, int]]) -> Iterator[Out]:
    """Samples batches that no training run has, and yields ``measure`` of each. A batch is given as (positions of its seeds int64 [B], key of its draws)."""

    def measured(batch: tuple[Tensor, int]) -> Out:
        return measure(engine.producer.drawn([(batch[0], BatchKeys(batch[1], batch[1]))], only_vertices=True))

    return in_order(measured, batches, "salientpp-dry")


def _batches_by_size(basis: Basis) -> Counter[int]:
    """Counts the batches of an epoch by their number of seeds: full batches, and perhaps a smaller last one."""
    return Counter(sorted(positions.numel() for positions in basis.epochs.positions(0)))


def _expected(job: Job) -> list[Values]:
    """Returns how many batches of an epoch are expected to need each row, for each rank: by vertex type float64 [N].

    Rows that the rank's host holds count as 0.
    """

    @cache
    def chances(size: int) -> Any:  # for plain batches of `size` seeds, float32 [N] of each unit
        first, seeds = job.workloads[0], [each.seeds for each in job.workloads]
        if job.batches.shared_draws is not None:
            return [shared_inclusion_probability(first.graph, own, first.num_neighbors, size) for own in seeds]
        if size == job.batches.batch_size:
            return [each.vip for each in job.workloads]
        return inclusion_probability(first.graph, seeds, first.num_neighbors, size)

    found: list[Values] = []
    for engine in job.engines:
        sizes, unit = _batches_by_size(engine.basis), engine.basis.epochs.placement.own_part
        found.append({})
        for type_, book in job.held.items():
            total = torch.zeros(book.num_vertices, dtype=torch.float64, device="cpu")
            for size, times in sizes.items() if job.workloads else ():
                total += chances(size)[unit].double() * times
            if not job.workloads:  # a smaller batch counts in proportion to its size
                total += job.vip[unit][type_].double() * (sum(sizes.elements()) / engine.basis.batch_size)
            total[slice(*book.range_of(engine.basis.source.exchange.part_id))] = 0
            found[-1][type_] = total.numpy()
    return found


class Caches:
    """Counts and forecasts the rows that a job's ranks still fetch with static caches. Call :meth:`count` once for each host.

    The arrays have the axes W (ranks), T (vertex types), A (replication factors) and R + 1: R counted epochs, and the forecast last. A way is the kind of
    cache: one for each host, or one for each rank.

    Attributes:
        left: by (way, policy) [W, T, A, R + 1], rows per epoch that are left to fetch.
        bare: [W, T, R + 1], rows per epoch to fetch without a cache.
        cached: by (way, policy) [T, A], rows in all caches.
        calibrated, variance: by way [T, A], an estimate of the rows left with 'vip' from a few batches per rank, and the variance of the estimate.
    """

    def __init__(self, job: Job, policies: Sequence[str], alphas: Sequence[float], epochs: int) -> None:
        self._job, self._policies, self._alphas, self._epochs = job, list(policies), alphas, epochs
        self._types, self._expected = list(job.held), _expected(job)
        ways = [CACHE, PRIVATE] if len(job.hosts) < len(job.engines) else [CACHE]
        ranks, types, factors = len(job.engines), len(self._types), len(alphas)
        both = [(way, policy) for way in ways for policy in policies]
        self.left = {each: np.zeros((ranks, types, factors, epochs + 1)) for each in both}
        self.cached = {each: np.zeros((types, factors), dtype=np.int64) for each in both}
        self.bare = np.zeros((ranks, types, epochs + 1))
        self.calibrated, self.variance = ({way: np.zeros((types, factors)) for way in ways} for _ in range(2))

    def count(
        self, host: range, accesses: Sequence[Values], others: Sequence[Values], on_policy: Callable[[], None]
    ) -> None:
        """Adds the rows that the ranks of one host still fetch to :attr:`left`, :attr:`bare` and the other arrays.

        Args:
            accesses: for each rank of the host, :attr:`Accesses.counts`.
            others: counts of other epochs in the same form, if 'oracle-heldout' is compared.
        """

        def needs(
            number: int, type_: str | None
        ) -> list[np.ndarray]:  # batches that need each row: counted in each epoch, and expected
            return [*accesses[number - host.start][type_], self._expected[number][type_]]

        for number in host:
            for t, type_ in enumerate(self._types):
                self.bare[number, t] = [values.sum() for values in needs(number, type_)]

        planned = partial(self._plan, host, accesses, others)
        # Planning a policy takes one core, so policies are planned in parallel.
        for policy, plans in zip(self._policies, in_order(planned, self._policies, "salientpp-plan")):
            for way, numbers, since in plans:
                for t, type_ in enumerate(self._types):
                    size = len(self._alphas) + 1
                    self.cached[way, policy][t] += np.bincount(since[type_], minlength=size)[:-1].cumsum()
                    for number in numbers:
                        for r, values in enumerate(needs(number, type_)):
                            by_factor = np.bincount(since[type_], weights=values, minlength=size)
                            self.left[way, policy][number, t, :, r] = by_factor[::-1].cumsum()[::-1][1:]
                if policy == "vip" and self._epochs:
                    for number in numbers:
                        self._calibrate(way, number, since)
            on_policy()

    def _plan(
        self, host: range, accesses: Sequence[Values], others: Sequence[Values], policy: Any
    ) -> list[tuple[str, list[int], Values]]:
        """Returns the caches of a host as (way, numbers of the ranks that use the cache, result of :meth:`_since`)."""
        engines = self._job.engines[host.start : host.stop]
        if policy in ORACLES:
            counts = accesses if policy == "oracle" else others
            scores: list[Scores] = [{t: torch.from_numpy(own[t].sum(axis=0)).double() for t in own} for own in counts]
        else:

            @cache
            def of_unit(unit: int) -> Scores:
                return self._job.vip[unit] if policy == "vip" else scores_of(self._job.units[unit], policy)

            scores = [of_unit(engine.basis.epochs.placement.own_part) for engine in engines]
        together = pooled(policy, scores) if len(host) > 1 else scores[0]
        placement, here = engines[0].basis.epochs.placement, engines[0].basis.source.exchange.part_id
        of_host = self._since(together, self._job.held, here, self._job.alpha_scale)
        found = [(CACHE, list(host), of_host)]
        if (PRIVATE, policy) in self.left:
            for number, each, engine in zip(host, scores, engines):
                part: Any = engine.basis.source.part
                own, at, scale = {type_: part.row_books[type_] for type_ in self._types}, part.part_id, 1.0
                if placement.num_storage_ranks:  # no rank has rows of its own
                    own, at, scale = self._job.held, here, len(placement.row_parts) / placement.num_trainers
                found.append((PRIVATE, [number], self._since(each, own, at, scale)))
        return found

    def _since(self, scores: Scores, books: Mapping[str | None, PartitionBook], part_id: int, scale: float) -> Values:
        """Returns, by type int32 [N], the index of the smallest replication factor with which a row is cached.

        If no factor is large enough, the index is the number of factors. ``scale`` multiplies the factors, as
        :attr:`~salientpp.analysis.job.Job.alpha_scale`.
        """
        since = {t: np.full(book.num_vertices, len(self._alphas), dtype=np.int32) for t, book in books.items()}
        for a in reversed(range(len(self._alphas))):
            for type_, ids in plan_caches(scores, books, self._job.widths, part_id, scale * self._alphas[a]).items():
                since[type_][ids.numpy()] = a
        return since

    def _calibrate(self, way: str, number: int, since: Values) -> None:
        engine, key = self._job.engines[number], 2 * len(self._job.engines) + number
        seeds = torch.arange(engine.basis.source.seeds.number, device="cpu")

        def beyond(batch: Drawn) -> list[list[Any]]:
            ids = {type_: batch.places[type_].remote_id.numpy() for type_ in self._types}
            return [[np.count_nonzero(since[t][ids[t]] > a) for a in range(len(self._alphas))] for t in self._types]

        for size, times in _batches_by_size(engine.basis).items():
            batches = shuffled_batches(seeds, size, key, -(-_CALIBRATION_BATCHES * size // seeds.numel()) + 1)
            whole = (batch for batch in batches if batch[0].numel() == min(size, seeds.numel()))
            found = _drawn(engine, beyond, islice(whole, _CALIBRATION_BATCHES))
            sampled = np.array(list(found), dtype=np.float64)
            self.calibrated[way] += sampled.mean(axis=0) * times
            self.variance[way] += sampled.var(axis=0, ddof=min(1, len(sampled) - 1)) / len(sampled) * times**2

    def volumes(self) -> Iterator[Volume]:
        """Yields the rows still fetched with each kind of cache, policy, replication factor and vertex type."""
        job, epochs = self._job, self._epochs
        totals = {each: self._total(rows) for each, rows in self.left.items()}
        bare = self._total(self.bare)

        def ratio(way: str, policy: str, oracle: str, t: int, a: int) -> float | None:
            best = totals[way, oracle][t, a] if (way, oracle) in totals else 0.0
            return float(totals[way, policy][t, a] / best) if best > 0 else None

        for (way, policy), rows in self.left.items():
            for a, alpha in enumerate(self._alphas):
                scaled = alpha * job.alpha_scale
                if len(job.held) == 1:
                    ((type_, book),) = job.held.items()
                    num_bytes = cache_capacity(scaled, book) * job.widths[type_]
                else:
                    num_bytes = cache_bytes(scaled, job.held, job.widths)
                for t, (type_, width) in enumerate(job.widths.items()):
                    counted, is_calibrated = rows[:, t, a, :-1], bool(epochs) and policy == "vip"
                    of_epochs = counted.sum(axis=0)
                    yield Volume(
                        num_neighbors=job.batches.numbers,
                        way=way,
                        policy=policy,
                        replication_factor=alpha,
                        vertex_type=word_of_type(type_),
                        row_bytes=width,
                        cache_bytes=num_bytes,
                        cached_rows=int(self.cached[way, policy][t, a]),
                        rows_without_cache=float(bare[t]),
                        remote_rows_per_epoch=float(of_epochs.mean()) if epochs else None,
                        remote_rows_std=float(of_epochs.std()) if epochs else None,
                        remote_bytes_per_epoch=float(of_epochs.mean()) * width if epochs else None,
                        remote_rows_per_rank=tuple(counted.mean(axis=1).tolist()) if epochs else None,
                        predicted_rows_per_epoch=None if policy in LEARNED else float(rows[:, t, a, -1].sum()),
                        calibrated_rows_per_epoch=float(self.calibrated[way][t, a]) if is_calibrated else None,
                        calibrated_error=math.sqrt(self.variance[way][t, a]) if is_calibrated else None,
                        ratio_to_oracle=ratio(way, policy, "oracle", t, a),
                        ratio_to_heldout=ratio(way, policy, "oracle-heldout", t, a),
                        reduction=float(1 - totals[way, policy][t, a] / bare[t]) if bare[t] > 0 else 0.0,
                    )

    def _total(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows that all ranks fetch in an epoch: the mean of the counted epochs, or the forecast if none was counted."""
        return rows[..., :-1].sum(axis=0).mean(axis=-1) if self._epochs else rows[..., -1].sum(axis=0)
