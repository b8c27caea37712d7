"""How many feature rows would reach each host, if hosts have several ranks?

The ranks of a host hold the rows of all its parts together, so what crosses the network is what a host lacks. Counted are three ways to keep and to get
it, with the same memory for cached rows:

* **private**: every rank has a cache of its own, of ``α N / W`` rows, planned as if the host's other ranks were elsewhere, and fetches for itself;
* **shared**: the host has one cache of ``α N / H`` rows, planned by what any of its ranks needs, and every rank fetches for itself;
* **fetched once**: as that, and a row that several ranks of the host need in the same round crosses the network once.

The batches are those that loaders make for the same seed, so the counts of ``shared`` and ``fetched once`` are those of a run, rank by rank. Beside them
stand the forecasts of the inclusion probabilities, which need no sampling and are too high from two hops on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp import ops
from salientpp.analysis.volume import (
    Parted,
    Track,
    check_request,
    default_workload,
    no_track,
    open_graph,
    part_graph,
)
from salientpp.graph.csc import Graph
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import Schedule, batch_key, share_size
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.policies import add_scores, cache_capacity, score


@dataclass(frozen=True)
class HostVolume:
    """Rows from other hosts per epoch, with one replication factor.

    Attributes:
        replication_factor: α; ``cache_bytes`` is what cached rows may take on a host.
        private_rows, shared_rows, fetched_once_rows: over all hosts, mean over epochs; None if only predicted.
        shared_by_rank, fetched_once_by_rank: the same by rank: in ``stats()`` of its loader ``rows_remote``; loaders do not fetch once.
        predicted_private_rows, predicted_shared_rows, predicted_fetched_once_rows: the forecasts.
    """

    replication_factor: float
    cache_bytes: int
    private_rows: float | None
    shared_rows: float | None
    fetched_once_rows: float | None
    shared_by_rank: tuple[float, ...] | None
    fetched_once_by_rank: tuple[float, ...] | None
    predicted_private_rows: float
    predicted_shared_rows: float
    predicted_fetched_once_rows: float

    def by_host(self, ranks_by_host: Sequence[int]) -> list[float]:
        """Rows that each host fetches, each row once; where they were counted."""
        ends = [0, *accumulate(ranks_by_host)]
        by_rank = self.fetched_once_by_rank or ()
        return [sum(by_rank[first:last]) for first, last in pairwise(ends)]

    @property
    def rows(self) -> tuple[float, float, float]:
        """Private, shared, fetched once: the best figures there are."""
        if self.private_rows is None or self.shared_rows is None or self.fetched_once_rows is None:
            return self.predicted_private_rows, self.predicted_shared_rows, self.predicted_fetched_once_rows
        return self.private_rows, self.shared_rows, self.fetched_once_rows


@dataclass(frozen=True)
class HostAnalysis:
    """The result of :func:`analyze_hosts`; ``to_dict`` gives the documented JSON.

    Attributes:
        parts: on disk.
        ranks_by_host: how many ranks each host has; ``parts_by_rank`` says how many parts each rank has the seeds of.
        epochs: that were counted; 0: only predicted.
    """

    dataset: str
    num_vertices: int
    num_edges: int
    parts: int
    ranks_by_host: tuple[int, ...]
    parts_by_rank: tuple[int, ...]
    fanouts: tuple[int, ...]
    batch_size: int
    epochs: int
    seeds: str
    seed: int
    row_bytes: int
    results: tuple[HostVolume, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; ``schema`` is the version of their meaning."""
        by_host = [result.by_host(self.ranks_by_host) if self.epochs else None for result in self.results]
        results = [{**asdict(result), "fetched_once_by_host": rows} for result, rows in zip(self.results, by_host)]
        return {"schema": 1, **asdict(self), "results": results}

    def to_csv(self) -> str:
        """One line per α; the columns are :class:`HostVolume`'s."""
        out = io.StringIO()
        results = [asdict(result) for result in self.results]
        columns = [name for name in results[0] if not name.endswith("_by_rank")]
        writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)
        return out.getvalue()


def analyze_hosts(
    data: Data | PartitionedGraph,
    parts: int | None = None,
    *,
    ranks: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
    name: str = "graph",
    method: str | Tensor = "auto",
    fanouts: Sequence[int] | None = None,
    batch_size: int | None = None,
    replication_factors: Sequence[float] = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1),
    epochs: int = 10,
    seeds: str | None = None,
    seed: int = 0,
    predict_only: bool = False,
    send_as: Mapping[Any, str] | None = None,
    track: Track = no_track,
) -> HostAnalysis:
    """Count and forecast the rows that cross the network per epoch, where hosts have several ranks or ranks several parts; of the policy 'vip'.

    Args:
        data, parts, name, method, batch_size, replication_factors, epochs, seeds, seed, predict_only, send_as, track: as in
            :func:`~salientpp.analysis.volume.analyze`.
        ranks: W; None: as many as parts.
        ranks_per_host: of every host, or a number for each.
        fanouts: nearest the seeds first.

    Raises:
        ValueError: an argument is wrong; nothing was computed.
    """
    own = default_workload(data)
    batch_size = own["batch_size"] if batch_size is None else batch_size
    seeds = own["seeds"] if seeds is None else seeds
    chosen = own["num_neighbors"] if fanouts is None else fanouts
    ((chosen,), _) = check_request([chosen], batch_size, replication_factors, ["vip"], epochs, predict_only)
    source = open_graph(data.whole if isinstance(data, PartitionedGraph) else data, parts, name, seeds, send_as)
    num_parts = source.book.num_parts if isinstance(source, Parted) else source.parts
    ranks = num_parts if ranks is None else ranks
    placements = placed(ranks, num_parts, ranks_per_host)
    directory = data.whole if isinstance(data, PartitionedGraph) else None
    del data
    parted = source if isinstance(source, Parted) else part_graph(source, method, chosen, batch_size, seed, track)
    del source
    offsets = placements[0].own_offsets
    if directory is not None:  # whose joined parts have probabilities that are kept
        view = open_graph(directory.joined(offsets, None), None, name, seeds, send_as)
        assert isinstance(view, Parted)  # a directory comes in parts
    else:
        view = parted.joined(offsets)
    epochs = 0 if predict_only else epochs
    alphas = sorted({float(alpha) for alpha in replication_factors})
    held = PartitionBook(parted.book.offsets[list(placements[0].row_offsets)])
    results = _analyze(view, held, placements, chosen, batch_size, alphas, epochs, seed, track)
    return HostAnalysis(
        dataset=parted.name,
        num_vertices=parted.graph.num_vertices,
        num_edges=parted.graph.num_edges,
        parts=num_parts,
        ranks_by_host=placements[0].ranks_by_host,
        parts_by_rank=tuple(len(placement.own_parts) for placement in placements),
        fanouts=tuple(chosen),
        batch_size=batch_size,
        epochs=epochs,
        seeds=seeds,
        seed=seed,
        row_bytes=parted.row_bytes,
        results=results,
    )


#: Each is counted by itself.
MOST_RANKS = 1024


def placed(ranks: int, num_parts: int, ranks_per_host: int | Sequence[int]) -> list[Placement]:
    """Every rank's placement.

    Raises:
        ValueError: the numbers do not fit each other, or there are too many ranks.
    """
    if ranks > MOST_RANKS:
        raise ValueError(f"rows can be counted for at most {MOST_RANKS:,} ranks, got {ranks:,}")
    if isinstance(ranks_per_host, int):
        if ranks_per_host < 1 or ranks % ranks_per_host:
            raise ValueError(f"ranks_per_host must be >= 1 and divide the {ranks} ranks, got {ranks_per_host}")
        ranks_per_host = [ranks_per_host] * (ranks // ranks_per_host)
    by_host = tuple(ranks_per_host)
    return [Placement(rank, ranks, num_parts, ranks_by_host=by_host) for rank in range(ranks)]


def _analyze(
    view: Parted,
    held: PartitionBook,
    placements: Sequence[Placement],
    fanouts: list[int],
    batch_size: int,
    alphas: list[float],
    epochs: int,
    seed: int,
    track: Track,
) -> tuple[HostVolume, ...]:
    """``view`` has the ranks' parts, ``held`` the hosts'."""
    track("inclusion probabilities", 1)
    vip = [score("vip", view.workload(unit, fanouts, batch_size)) for unit in range(view.book.num_parts)]
    pooled = {
        host: torch.zeros(held.num_vertices, dtype=torch.float64, device="cpu")
        for host in range(placements[0].num_hosts)
    }
    for each in placements:
        add_scores("vip", pooled[each.host], vip[each.own_part])
    ranks = _ranks(view, held, placements, vip, pooled, batch_size, seed)
    sizes = ([cache_capacity(alpha, view.book) for alpha in alphas], [cache_capacity(alpha, held) for alpha in alphas])
    expected = _forecast(ranks, vip, pooled, batch_size, *sizes)
    counted = _count(view.graph, ranks, fanouts, epochs, seed, track, *sizes) / max(1, epochs)
    results = []
    for a, alpha in enumerate(alphas):
        private, shared, once = (None, None, None) if not epochs else map(float, counted[:, :, a].sum(axis=1))
        by_rank = (None, None) if not epochs else (tuple(each.tolist()) for each in counted[1:, :, a])
        results.append(
            HostVolume(
                alpha, sizes[1][a] * view.row_bytes, private, shared, once, *by_rank, *map(float, expected[:, a])
            )
        )
    return tuple(results)


@dataclass(frozen=True, eq=False)
class _Rank:
    """What a rank keeps and visits.

    Attributes:
        placement: of it.
        seeds: int64, of its unit.
        schedule: of its batches.
        outside: bool [N], whose rows its host does not hold.
        private, shared: int32 [N], how many rows are cached before this vertex's is, in a cache of its own and in its host's.
    """

    placement: Placement
    seeds: Tensor
    schedule: Schedule
    outside: np.ndarray
    private: np.ndarray
    shared: np.ndarray


def _ranks(
    view: Parted,
    held: PartitionBook,
    placements: Sequence[Placement],
    vip: Sequence[Tensor],
    pooled: Mapping[int, Tensor],
    batch_size: int,
    seed: int,
) -> list[_Rank]:
    shares = [
        (view.seeds[each.own_part].numel(), each.own_part, each.place_of(each.rank), each.slots_per_unit)
        for each in placements
    ]
    counts = [share_size(number, place, places) for number, _, place, places in shares]
    # What loaders do by default; ranks without seeds they serve under 'exact'.
    uneven = "exact" if 0 in counts else "wrap"
    orders: dict[Any, np.ndarray] = {}  # ranks of a part keep the same rows, and those of a host

    def order(key: Any, scores: Tensor, begin: int, end: int) -> np.ndarray:
        if key not in orders:
            orders[key] = _cached_before(scores, begin, end)
        return orders[key]

    ranks = []
    for each, share in zip(placements, shares):
        begin, end = held.range_of(each.part_id)
        outside = np.ones(held.num_vertices, dtype=bool)
        outside[begin:end] = False
        ranks.append(
            _Rank(
                each,
                view.seeds[each.own_part],
                Schedule(*share, counts, each.rank, batch_size, True, False, uneven, seed),
                outside,
                order(("rank", each.own_part), vip[each.own_part], *view.book.range_of(each.own_part)),
                order(("host", each.host), pooled[each.host], begin, end),
            )
        )
    return ranks


def _cached_before(scores: Tensor, begin: int, end: int) -> np.ndarray:
    """int32 [N]: how many rows a cache takes before each vertex's, the largest number where it never takes it. It is :func:`~salientpp.vip.policies.plan_cache`
    for every size at once: by descending score, among equals the lower id, never a zero and none in [``begin``, ``end``)."""
    remote = scores.clone()
    remote[begin:end] = 0
    ranked = torch.sort(remote, descending=True, stable=True)
    useful = ranked.indices[: int(torch.count_nonzero(ranked.values > 0))]
    before = np.full(scores.numel(), np.iinfo(np.int32).max, dtype=np.int32)
    before[useful.numpy()] = np.arange(useful.numel(), dtype=np.int32)
    return before


def _count(
    graph: Graph,
    ranks: Sequence[_Rank],
    fanouts: list[int],
    epochs: int,
    seed: int,
    track: Track,
    of_rank: Sequence[int],
    of_host: Sequence[int],
) -> np.ndarray:
    """Rows in all epochs, int64 [3, W, A]: private, shared and fetched once, by rank and size of the caches."""
    counts = np.zeros((3, len(ranks), len(of_rank)), dtype=np.int64)

    def left(before: np.ndarray, n_id: np.ndarray, sizes: Sequence[int]) -> list[int]:
        at = before[n_id]
        return [int(np.count_nonzero(at >= size)) for size in sizes]

    for epoch in range(epochs):
        batches = [rank.schedule.batches(epoch) for rank in ranks]
        rounds = max(map(len, batches))
        advance = track(f"epoch {epoch}", rounds)
        for index in range(rounds):
            wanted: dict[int, list[np.ndarray]] = {}  # by host
            for number, (rank, given) in enumerate(zip(ranks, batches)):
                if index >= len(given):
                    continue
                n_id = ops.sample_neighbors(
                    graph.indptr, graph.indices, None, rank.seeds[given[index]], fanouts, batch_key(seed, epoch, number, index)
                )[0].numpy()  # fmt: skip
                n_id = n_id[rank.outside[n_id]]
                counts[0, number] += left(rank.private, n_id, of_rank)
                counts[1, number] += left(rank.shared, n_id, of_host)
                wanted.setdefault(rank.placement.host, []).append(n_id)
            for of_ranks in wanted.values():
                union = np.unique(np.concatenate(of_ranks))
                first = next(rank for rank in ranks if wanted[rank.placement.host] is of_ranks)
                asking = first.placement.ranks_of_host
                for place, number in enumerate(asking):
                    counts[2, number] += left(first.shared, union[union % len(asking) == place], of_host)
            advance()
    return counts


def _forecast(
    ranks: Sequence[_Rank],
    vip: Sequence[Tensor],
    pooled: Mapping[int, Tensor],
    batch_size: int,
    of_rank: Sequence[int],
    of_host: Sequence[int],
) -> np.ndarray:
    """Rows expected per epoch, float64 [3, A]: private, shared and fetched once."""
    expected = np.zeros((3, len(of_rank)))

    def left(before: np.ndarray, chance: Tensor, outside: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        values = chance.numpy().astype(np.float64)
        return np.array([values[outside & (before >= size)].sum() for size in sizes])

    rounds: dict[int, tuple[float, _Rank]] = {}
    for rank in ranks:
        # A smaller batch counts by its size.
        batches = sum(positions.numel() for positions in rank.schedule.batches(0)) / batch_size
        chance = vip[rank.placement.own_part]
        expected[0] += batches * left(rank.private, chance, rank.outside, of_rank)
        expected[1] += batches * left(rank.shared, chance, rank.outside, of_host)
        rounds[rank.placement.host] = max(
            rounds.get(rank.placement.host, (0.0, rank)), (batches, rank), key=lambda of: of[0]
        )
    for host, (number, rank) in rounds.items():
        expected[2] += number * left(rank.shared, pooled[host], rank.outside, of_host)
    return expected
