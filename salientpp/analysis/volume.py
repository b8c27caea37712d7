"""How many feature rows would cross the network, and what would a cache or a GPU tier save?

For a graph, K machines, fanouts and a batch size, count for every cache policy and replication factor the rows that an
epoch fetches, exactly as the loader fetches them: per batch the distinct vertices that are remote and not cached. The
batches are those that the loader makes for the same seed, so the count of a real run is the same number. One
simulation serves all policies and replication factors, because a cache changes what travels and never the batches.

Beside the count stands VIP's forecast, which needs no sampling: the sum of the inclusion probabilities of the same vertices. It
is too high from two hops on, so a handful of simulated batches calibrates it.

Two oracles bound what a static cache can do. ``oracle`` ranks vertices by the very accesses that are counted: no static cache is
better, but with few epochs it has learned their noise. ``oracle-heldout`` ranks by as many other epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp import ops
from salientpp.analysis.advice import DeviceRows, Recommendation, advise
from salientpp.analysis.lookahead_volume import LookaheadVolume, look_ahead, summed
from salientpp.analysis.partial_volume import GPU_FRACTIONS, PartialCopies, PartialVolume, count_sums
from salientpp.graph.csc import Graph
from salientpp.partitioning.numbering import assign_for, choose_method, lay_out, relabel
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.schedule import Schedule
from salientpp.store.directory.given_splits import collect_splits
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import read_formats
from salientpp.vip.accesses import count_accesses, shuffled_batches
from salientpp.vip.inclusion import check_fanouts, inclusion_probability
from salientpp.vip.policies import POLICIES, Policy, Workload, cache_capacity, check_replication_factor, score
from salientpp.vip.shared import shared_inclusion_probability
from salientpp.ways.lookahead.planner import Window, check_lookahead

ORACLES = ("oracle", "oracle-heldout")
#: Compared unless others are named: all but 'vip-hop', which ranks nearly as 'vip' does.
DEFAULT_POLICIES = ("vip", "degree", "halo", "wpr", "paths", "simulation", "random", "oracle")
#: Policies that need sampling, so that there is nothing to forecast without it.
LEARNED = (*ORACLES, "simulation")
#: Batches per part that calibrate the forecast.
CALIBRATION_BATCHES = 20
#: More than anyone waits for.
MOST_EPOCHS = 1_000_000

#: Called with (what, total steps) before a long step; returns a function to call after each of them.
Track = Callable[[str, int], Callable[[], None]]


def no_track(what: str, total: int) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class Volume:
    """Rows fetched per epoch, over all K parts, with one policy and replication factor.

    Attributes:
        fanouts, policy, replication_factor: of the cache; ``cache_bytes`` is what its rows may take on a machine.
        remote_rows_per_epoch, remote_rows_std: mean and standard deviation over epochs; None if only predicted.
        remote_bytes_per_epoch: that the counted rows take on their way, in the format that they travel in.
        remote_rows_per_part: the mean by part.
        predicted_rows_per_epoch: VIP's forecast for the same cache, None for caches that depend on counted accesses.
        calibrated_rows_per_epoch, calibrated_error: the forecast after a handful of batches per part, and its standard
            error; policy 'vip' only.
        ratio_to_oracle, ratio_to_heldout: rows over the oracles' rows at the same replication factor, None where not counted
            or where the oracle fetches nothing.
        reduction: share of the rows without a cache that the cache saves.
    """

    fanouts: tuple[int, ...]
    policy: str
    replication_factor: float
    cache_bytes: int
    remote_rows_per_epoch: float | None
    remote_rows_std: float | None
    remote_bytes_per_epoch: float | None
    remote_rows_per_part: tuple[float, ...] | None
    predicted_rows_per_epoch: float | None
    calibrated_rows_per_epoch: float | None
    calibrated_error: float | None
    ratio_to_oracle: float | None
    ratio_to_heldout: float | None
    reduction: float

    @property
    def rows(self) -> float | None:
        """The best figure there is: counted, else predicted."""
        return self.predicted_rows_per_epoch if self.remote_rows_per_epoch is None else self.remote_rows_per_epoch


@dataclass(frozen=True)
class Draws:
    """How batches agree in what they draw, and what a rank knows of them ahead; as the loaders' arguments of these names.

    Attributes:
        lookahead: None where nobody asked: then it is only predicted, for 'auto'.
    """

    shared_draws: str | None = None
    draw_block: int = 1
    lookahead: Window | None = None

    def checked(self) -> Draws:
        """Raise ValueError if one of them is wrong."""
        if self.shared_draws not in (None, "batch"):
            raise ValueError(f"shared_draws must be 'batch' or None, got {self.shared_draws!r}")
        if isinstance(self.draw_block, bool) or not isinstance(self.draw_block, int) or self.draw_block < 1:
            raise ValueError(f"draw_block must be an integer >= 1 (batches that draw alike), got {self.draw_block!r}")
        return self if self.lookahead is None else replace(self, lookahead=check_lookahead(self.lookahead))


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyze`; ``to_dict`` gives the documented JSON.

    Attributes:
        row_bytes: of a row of ``x`` as it travels and is cached; ``send_as`` is the format where that is not the one it is stored in.
        steps_per_epoch: batches of the machine that has most.
        lookahead: for each fanouts and α, of ranks that know their next batches.
        partial: for each fanouts and α, with sums in the place of rows; empty where nobody asked.
        partial_copies: likewise for each fanouts and some β, of rows copied to a device.
    """

    dataset: str
    num_vertices: int
    num_edges: int
    parts: int
    batch_size: int
    epochs: int
    seeds: str
    seed: int
    row_bytes: int
    edge_cut_fraction: float
    balance: dict[str, float]
    rows_without_cache: dict[str, float]
    results: tuple[Volume, ...]
    device_rows: tuple[DeviceRows, ...]
    recommendations: tuple[Recommendation, ...]
    draws: Draws = Draws()
    lookahead: tuple[LookaheadVolume, ...] = ()
    send_as: str | None = None
    steps_per_epoch: int = 0
    partial: tuple[PartialVolume, ...] = ()
    partial_copies: tuple[PartialCopies, ...] = ()

    def to_dict(self) -> dict:
        """JSON values; ``schema`` is the version of their meaning."""
        figures = {"schema": 1, **asdict(self), "lookahead": [volume.to_dict() for volume in self.lookahead]}
        return {
            **figures,
            **{name: [v.to_dict() for v in getattr(self, name)] for name in ("partial", "partial_copies")},
        }

    def geometric_means(self) -> dict[tuple[str, float], float]:
        """(policy, α) -> geometric mean over fanouts of the share of rows left; shares below 0.001 count as 0.001."""
        ratios: dict[tuple[str, float], list[float]] = {}
        for volume in self.results:
            # A cache that leaves nothing for one of the fanouts would make the mean zero.
            ratios.setdefault((volume.policy, volume.replication_factor), []).append(max(1 - volume.reduction, 1e-3))
        return {key: math.exp(sum(map(math.log, values)) / len(values)) for key, values in ratios.items()}


@dataclass(frozen=True, eq=False)
class Parted:
    """A graph under new ids, with seeds by part; ``workload`` gives that of a part, fanouts and a batch size, as a run plans by it."""

    name: str
    graph: Graph
    workload: Callable[[int, list[int], int], Workload]
    book: PartitionBook
    original_id: Tensor
    seeds: list[Tensor]
    row_bytes: int
    edge_cut_fraction: float
    balance: dict[str, float]

    def joined(self, offsets: Sequence[int]) -> Parted:
        """The same graph whose part i is the parts ``offsets[i]`` to ``offsets[i + 1] - 1``."""
        book = PartitionBook(self.book.offsets[list(offsets)])
        own = [torch.cat(self.seeds[first:last]) for first, last in pairwise(offsets)]

        def workload(part_id: int, fanouts: list[int], batch_size: int) -> Workload:
            first, last = offsets[part_id : part_id + 2]
            if last - first == 1:
                return replace(self.workload(first, fanouts, batch_size), book=book, part_id=part_id)
            return Workload(self.graph, book, part_id, own[part_id], fanouts, batch_size)

        return replace(self, workload=workload, book=book, seeds=own)


#: Of a graph for which nobody has said one.
_WORKLOAD: dict[str, Any] = {"num_neighbors": [15, 10, 5], "batch_size": 1024, "seeds": "train"}


def analyze(
    data: Data | PartitionedGraph,
    parts: int | None = None,
    *,
    name: str = "graph",
    method: str | Tensor = "auto",
    fanouts: Sequence[Sequence[int]] | None = None,
    batch_size: int | None = None,
    replication_factors: Sequence[float] = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1),
    policies: Sequence[str] = DEFAULT_POLICIES,
    epochs: int = 10,
    seeds: str | None = None,
    seed: int = 0,
    predict_only: bool = False,
    shared_draws: str | None = None,
    draw_block: int = 1,
    lookahead: Window | None = None,
    send_as: Mapping[Any, str] | None = None,
    partial: bool = False,
    track: Track = no_track,
) -> Analysis:
    """Count and forecast the rows that cross the network per epoch.

    Args:
        data: a ``Data``, partitioned here in memory, or an opened dataset directory (its ids are the loader's, so counts
            equal a live run's exactly).
        parts: K; needed for a ``Data``.
        name: of the dataset, for the report.
        method: as in ``partition``.
        fanouts: one or more lists, nearest the seeds first. None, as for ``batch_size`` and ``seeds``: what the directory was ordered for; of a ``Data``
            one list of 15, 10, 5, batches of 1024, and 'train'.
        batch_size: seeds per batch and rank.
        replication_factors: α >= 0, any number of them.
        policies: names of ``vip.policies.POLICIES``, and 'oracle', which stands for both oracles.
        epochs: counted epochs, and as many held-out ones for the oracle that learns from others.
        seeds: the split that batches start from, or 'all'.
        seed: of the batches and of the partition.
        predict_only: no sampling, VIP's forecast alone.
        shared_draws, draw_block: how batches are drawn, as in :class:`salientpp.NeighborLoader`.
        lookahead: count also what loaders with this argument fetch, with the policy 'vip'; None: predict that, for 'auto'.
        send_as: the format that rows of ``x`` travel in, as in :class:`salientpp.NeighborLoader`; those that a directory stores narrower travel so.
        partial: count also what loaders with ``partial_aggregation`` fetch, with the policy 'vip', and what they copy to a device.
        track: see :data:`Track`.

    Raises:
        ValueError: an argument is wrong; nothing was computed.
    """
    if partial and predict_only:
        raise ValueError(
            "partial counts what sums leave to fetch, for which there is no forecast; leave predict_only out"
        )
    if partial and send_as:
        raise ValueError("partial sums rows as they are, and send_as has them travel otherwise; leave one of them out")
    if partial and isinstance(data, PartitionedGraph) and not data.is_hetero:
        narrow = data.description.vertices(None).narrow("x")
        if narrow is not None:
            raise ValueError(
                f"partial: {data.root} stores x as {narrow.format}, and rows are summed as they are; leave it out"
            )
    own = default_workload(data)
    fanouts = [own["num_neighbors"]] if fanouts is None else fanouts
    batch_size = own["batch_size"] if batch_size is None else batch_size
    seeds = own["seeds"] if seeds is None else seeds
    fanouts, policies = check_request(fanouts, batch_size, replication_factors, policies, epochs, predict_only)
    draws = Draws(shared_draws, draw_block, lookahead).checked()
    source = open_graph(data, parts, name, seeds, send_as)
    del data  # a caller who keeps no reference either has the memory back
    parted = source if isinstance(source, Parted) else part_graph(source, method, fanouts[0], batch_size, seed, track)
    del source
    alphas = sorted({float(alpha) for alpha in replication_factors})
    results, device_rows, recommendations, without, ahead = [], [], [], {}, []
    sums: list[PartialVolume] = []
    copies: list[PartialCopies] = []
    for entry in fanouts:
        volumes, devices, recommendation, bare, known = _analyze_fanouts(
            parted, entry, batch_size, alphas, policies, 0 if predict_only else epochs, seed, draws, track
        )
        ahead += known
        if partial:
            fetched, copied = _count_sums(parted, entry, batch_size, alphas, epochs, seed, draws, track)
            sums, copies = sums + fetched, copies + copied
        results += volumes
        device_rows += devices
        recommendations.append(recommendation)
        without[",".join(map(str, entry))] = bare
    return Analysis(
        dataset=parted.name,
        num_vertices=parted.graph.num_vertices,
        num_edges=parted.graph.num_edges,
        parts=parted.book.num_parts,
        batch_size=batch_size,
        epochs=0 if predict_only else epochs,
        seeds=seeds,
        seed=seed,
        row_bytes=parted.row_bytes,
        edge_cut_fraction=parted.edge_cut_fraction,
        balance=parted.balance,
        rows_without_cache=without,
        results=tuple(results),
        device_rows=tuple(device_rows),
        recommendations=tuple(recommendations),
        draws=draws,
        lookahead=tuple(ahead),
        send_as=next(iter(send_as.values())) if send_as else None,
        steps_per_epoch=max(schedule.num_batches for schedule in _schedules(parted, batch_size, seed)),
        partial=tuple(sums),
        partial_copies=tuple(copies),
    )


def check_request(
    fanouts: Sequence[Sequence[int]],
    batch_size: int,
    replication_factors: Sequence[float],
    policies: Sequence[str],
    epochs: int,
    predict_only: bool,
) -> tuple[list[list[int]], list[str]]:
    """The fanouts and policies to analyze; the arguments are :func:`analyze`'s.

    Raises:
        ValueError: one of them is wrong.
    """
    checked = [check_fanouts(entry) for entry in fanouts]
    if not checked:
        raise ValueError("fanouts must hold at least one list")
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, got {batch_size}")
    if epochs < 1 and not predict_only:
        raise ValueError(f"epochs must be >= 1, got {epochs}")
    if epochs > MOST_EPOCHS:
        raise ValueError(
            f"epochs must be at most {MOST_EPOCHS:,}, got {epochs}: counts are kept for each; ten are enough for most graphs"
        )
    for alpha in replication_factors:
        check_replication_factor(alpha)
    return checked, _check_policies(policies, predict_only)


def _check_policies(policies: Sequence[str], predict_only: bool) -> list[str]:
    checked: list[str] = []
    for policy in policies:
        if policy not in POLICIES and policy not in ORACLES:
            raise ValueError(f"policies must be among {', '.join([*sorted(POLICIES), 'oracle'])}, got {policy!r}")
        checked += ORACLES if policy == "oracle" else [policy]
    if predict_only:
        checked = [policy for policy in checked if policy not in LEARNED]
    if "vip" not in checked:
        checked.insert(0, "vip")  # the forecasts and recommendations are VIP's
    return list(dict.fromkeys(checked))


@dataclass(frozen=True, eq=False)
class Unparted:
    """What is needed of a ``Data``: the rest may be freed while METIS wants the memory."""

    name: str
    graph: Graph
    splits: dict[str, Tensor]
    seeds: Tensor | None
    row_bytes: int
    parts: int


def default_workload(data: Data | PartitionedGraph) -> dict[str, Any]:
    """``num_neighbors``, ``batch_size`` and ``seeds`` where nobody has said them: what a directory was ordered for.

    Raises:
        ValueError: there are several types of vertices.
    """
    if not isinstance(data, PartitionedGraph):
        return _WORKLOAD
    if data.is_hetero:
        raise ValueError(
            f"{data.root} has several types of vertices, whose rows salientpp.analysis.typed_volume.analyze_typed counts, and `salientpp analyze`"
        )
    stored = data.description
    return {"num_neighbors": stored.num_neighbors[0], "batch_size": stored.batch_size, "seeds": stored.seeds[1]}


def sent_row_bytes(part: PartitionedGraph, send_as: Mapping[Any, str] | None) -> dict[str | None, int]:
    """By type of vertices, of a row of ``x`` as a run sends it and caches it; 0 of types without.

    Raises:
        TypeError, ValueError: ``send_as`` is not what a loader takes.
    """
    types = {type_.name: type_ for type_ in part.description.node_types}
    known = {}
    for name, type_ in types.items():
        if "x" in type_.attributes:
            entry = type_.attributes["x"]
            known[name, "x"] = getattr(torch, entry["dtype"]), entry["row_shape"]
    row_bytes = {name: type_.row_bytes("x") for name, type_ in types.items()}
    for (name, attribute), format in read_formats("send_as", send_as, known).items():
        stored = types[name].narrow(attribute)
        if stored is not None:
            words = attribute if name is None else str((name, attribute))
            raise ValueError(
                f"send_as names {words!r}, which {part.root} stores as {stored.format}, and so it travels; leave it out"
            )
        if not types[name].replicated:
            row_bytes[name] = format.row_bytes
    return row_bytes


def open_graph(
    data: Data | PartitionedGraph, parts: int | None, name: str, seeds: str, send_as: Mapping[Any, str] | None = None
) -> Parted | Unparted:
    """What an analysis needs of a graph, in parts if it comes in some.

    Raises:
        ValueError: ``parts``, ``seeds`` or ``send_as`` do not fit it.
    """
    if isinstance(data, PartitionedGraph):
        if parts not in (None, data.num_parts):
            raise ValueError(
                f"{data.root} has {data.num_parts} parts, got parts={parts}; leave it out, or partition again"
            )
        row_bytes = sent_row_bytes(data, send_as)[None]
        own = [data.split(seeds, part_id) for part_id in range(data.num_parts)]
        return Parted(
            name,
            data.graph,
            lambda part_id, fanouts, batch_size: data.workload(part_id, own[part_id], fanouts, batch_size),
            data.book,
            data.original_id(torch.arange(data.num_vertices, device="cpu")),
            own,
            row_bytes,
            data.description.quality["edge_cut_fraction"],
            data.description.quality["balance"],
        )
    if parts is None:
        raise ValueError("parts must be given for a graph that is not partitioned yet")
    graph = Graph.from_data(data)
    graph = Graph.trusted(graph.indptr, graph.indices)  # the user's edge ids are not needed: 8 bytes per edge
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    if seeds != "all" and seeds not in splits:
        raise ValueError(
            f"seeds must be 'all' or a split of the data ({', '.join(splits) or 'it has none'}), got {seeds!r}"
        )
    x = data.get("x")
    row_bytes = 0 if x is None else x[0].numel() * x.element_size()
    for narrow in read_formats("send_as", send_as, {} if x is None else {(None, "x"): (x.dtype, x.shape[1:])}).values():
        row_bytes = narrow.row_bytes
    return Unparted(name, graph, splits, None if seeds == "all" else splits[seeds], row_bytes, parts)


def part_graph(
    source: Unparted, method: str | Tensor, fanouts: Sequence[int], batch_size: int, seed: int, track: Track
) -> Parted:
    """Partition in memory, for a workload."""
    # METIS lets no other Python thread run, so a clock on the screen stands still with it.
    method = choose_method(method, source.graph.num_edges)
    is_metis = isinstance(method, str) and method.startswith("metis")
    track("partitioning (METIS stops the clock)" if is_metis else "partitioning", 1)
    graph, chosen, parts = source.graph, source.seeds, source.parts
    assigned = assign_for(
        graph,
        parts,
        method=method,
        splits=source.splits,
        seeds=chosen,
        num_neighbors=fanouts,
        batch_size=batch_size,
        seed=seed,
    )
    layout = lay_out(graph, assigned, chosen, fanouts, batch_size)
    new_id = layout.new_id()
    seed_ids = (torch.arange(graph.num_vertices, device="cpu") if chosen is None else new_id[chosen]).sort().values
    relabelled = relabel(graph, layout)
    own = [seed_ids[layout.book.owner(seed_ids) == part_id] for part_id in range(parts)]

    def workload(part_id: int, chosen: list[int], size: int) -> Workload:
        known = layout.vip[part_id] if (chosen, size) == (list(fanouts), batch_size) else None
        return Workload(relabelled, layout.book, part_id, own[part_id], chosen, size, vip=known)

    return Parted(
        source.name,
        relabelled,
        workload,
        layout.book,
        layout.order,
        own,
        source.row_bytes,
        assigned.edge_cut_fraction,
        assigned.balance,
    )


@dataclass(frozen=True, eq=False)
class _PartRows:
    """One part's figures; rows per epoch. Axes: P policies, A replication factors, R epochs."""

    counted: np.ndarray  # [P, A, R]; R = 0 if only predicted
    counted_bare: np.ndarray  # [R]
    forecast: np.ndarray  # [P, A]
    forecast_bare: float
    calibrated: np.ndarray  # [A]
    calibrated_variance: np.ndarray  # [A]


def _analyze_fanouts(
    parted: Parted,
    fanouts: list[int],
    batch_size: int,
    alphas: list[float],
    policies: list[str],
    epochs: int,
    seed: int,
    draws: Draws,
    track: Track,
) -> tuple[list[Volume], list[DeviceRows], Recommendation, float, list[LookaheadVolume]]:
    book = parted.book
    title = ",".join(map(str, fanouts))
    track(f"{title}: inclusion probabilities", 1)
    workloads = [parted.workload(part_id, fanouts, batch_size) for part_id in range(book.num_parts)]
    known = [workload.vip for workload in workloads if workload.vip is not None]
    if len(known) < len(workloads):
        computed = inclusion_probability(parted.graph, parted.seeds, fanouts, batch_size)  # one sweep for all
        known = [own if workload.vip is None else workload.vip for workload, own in zip(workloads, computed)]
        workloads = [replace(workload, vip=own) for workload, own in zip(workloads, known)]
    vip = torch.stack(known)
    schedules = _schedules(parted, batch_size, seed)
    expected = _expected_accesses(workloads, vip, schedules, draws)
    parts, ahead = [], []
    for part_id, workload in enumerate(workloads):
        what = f"{title}: part {part_id} of {book.num_parts}"
        parts.append(
            _analyze_part(workload, expected[part_id], schedules[part_id], alphas, policies, epochs, draws, what, track)
        )
        counted_epochs = 0 if draws.lookahead is None else epochs
        ahead.append(
            look_ahead(
                workload,
                schedules[part_id],
                alphas,
                "auto" if draws.lookahead is None else draws.lookahead,
                row_bytes=parted.row_bytes,
                epochs=counted_epochs,
                shared=draws.shared_draws is not None,
                draw_block=draws.draw_block,
                on_batch=track(f"{what}, lookahead", counted_epochs * schedules[part_id].num_batches),
            )
        )

    if draws.draw_block > 1 and draws.lookahead is not None and epochs:
        # Of draws that agree the probabilities say too little of what a static cache leaves, which is counted.
        vip_at = policies.index("vip")
        ahead = [
            [
                replace(own, static=float(part.counted[vip_at, a].mean()) / max(1, schedule.num_batches))
                for a, own in enumerate(of_part)
            ]
            for of_part, part, schedule in zip(ahead, parts, schedules)
        ]
    counted = _total([part.counted for part in parts])
    forecast = _total([part.forecast for part in parts])
    bare = (
        float(_total([part.counted_bare for part in parts]).mean())
        if epochs
        else sum(part.forecast_bare for part in parts)
    )
    mean = counted.mean(axis=2) if epochs else forecast
    volumes = []
    for p, policy in enumerate(policies):
        for a, alpha in enumerate(alphas):
            volumes.append(
                Volume(
                    fanouts=tuple(fanouts),
                    policy=policy,
                    replication_factor=alpha,
                    cache_bytes=cache_capacity(alpha, book) * parted.row_bytes,
                    remote_rows_per_epoch=float(counted[p, a].mean()) if epochs else None,
                    remote_rows_std=float(counted[p, a].std()) if epochs else None,
                    remote_bytes_per_epoch=float(counted[p, a].mean()) * parted.row_bytes if epochs else None,
                    remote_rows_per_part=tuple(float(part.counted[p, a].mean()) for part in parts) if epochs else None,
                    predicted_rows_per_epoch=None if policy in LEARNED else float(forecast[p, a]),
                    calibrated_rows_per_epoch=(
                        float(sum(part.calibrated[a] for part in parts)) if epochs and policy == "vip" else None
                    ),
                    calibrated_error=(
                        math.sqrt(sum(part.calibrated_variance[a] for part in parts))
                        if epochs and policy == "vip"
                        else None
                    ),
                    ratio_to_oracle=_ratio_to("oracle", policies, mean[:, a], p),
                    ratio_to_heldout=_ratio_to("oracle-heldout", policies, mean[:, a], p),
                    reduction=float(1 - mean[p, a] / bare) if bare > 0 else 0.0,
                )
            )
    own = [volume for volume in volumes if volume.policy == "vip"]
    devices, recommendation = advise(
        workloads,
        vip,
        parted.original_id,
        [(volume.replication_factor, 1 - volume.reduction) for volume in own],
        parted.row_bytes,
    )
    return volumes, devices, recommendation, bare, summed(fanouts, alphas, ahead, parted.row_bytes)


def _schedules(parted: Parted, batch_size: int, seed: int) -> list[Schedule]:
    """Of each part's batches, as loaders have them by default; a part without seeds they serve under 'exact'."""
    sizes = [ids.numel() for ids in parted.seeds]
    uneven = "exact" if 0 in sizes else "wrap"
    return [
        Schedule(size, part_id, 0, 1, sizes, part_id, batch_size, True, False, uneven, seed)
        for part_id, size in enumerate(sizes)
    ]


def _count_sums(
    parted: Parted,
    fanouts: list[int],
    batch_size: int,
    alphas: list[float],
    epochs: int,
    seed: int,
    draws: Draws,
    track: Track,
) -> tuple[list[PartialVolume], list[PartialCopies]]:
    schedules = _schedules(parted, batch_size, seed)
    title = ",".join(map(str, fanouts))
    found = []
    for part_id, schedule in enumerate(schedules):
        on_batch = track(f"{title}: part {part_id} of {parted.book.num_parts}, sums", epochs * schedule.num_batches)
        workload = parted.workload(part_id, fanouts, batch_size)
        found.append(
            count_sums(
                workload, schedule, alphas, row_bytes=parted.row_bytes, epochs=epochs, shared=draws.shared_draws is not None,
                draw_block=draws.draw_block, on_batch=on_batch,
            )
        )  # fmt: skip
    volumes = [
        PartialVolume.of(tuple(fanouts), alpha, epochs, [fetched[a] for fetched, _ in found])
        for a, alpha in enumerate(alphas)
    ]
    copies = [
        PartialCopies.of(tuple(fanouts), beta, epochs, [copied[b] for _, copied in found])
        for b, beta in enumerate(GPU_FRACTIONS)
    ]
    return volumes, copies


def _total(figures: Sequence[np.ndarray]) -> np.ndarray:
    return sum(figures[1:], figures[0])


def _expected_accesses(
    workloads: Sequence[Workload], vip: Tensor, schedules: Sequence[Schedule], draws: Draws
) -> list[Tensor]:
    """For each part float64 [N]: in how many batches of an epoch a vertex is expected, the last batch being smaller."""
    expected = []
    if draws.shared_draws is not None:
        for workload, schedule in zip(workloads, schedules):
            total = torch.zeros(workload.graph.num_vertices, dtype=torch.float64, device="cpu")
            sizes = [positions.numel() for positions in schedule.batches(0)]
            for size in sorted(set(sizes)):
                chance = shared_inclusion_probability(workload.graph, workload.seeds, workload.num_neighbors, size)
                total += chance.to(torch.float64) * sizes.count(size)
            expected.append(total)
        return expected
    smaller: dict[int, list[int]] = {}
    for part_id, schedule in enumerate(schedules):
        sizes = [positions.numel() for positions in schedule.batches(0)]
        full = sum(size == schedule.batch_size for size in sizes)
        expected.append(vip[part_id].to(torch.float64) * full)
        if full < len(sizes):
            smaller.setdefault(sizes[-1], []).append(part_id)
    for size, part_ids in smaller.items():
        first = workloads[part_ids[0]]
        seed_sets = [workloads[part_id].seeds for part_id in part_ids]
        for part_id, last in zip(part_ids, inclusion_probability(first.graph, seed_sets, first.num_neighbors, size)):
            expected[part_id] += last
    return expected


def _analyze_part(
    workload: Workload,
    expected: Tensor,
    schedule: Schedule,
    alphas: list[float],
    policies: list[str],
    epochs: int,
    draws: Draws,
    what: str,
    track: Track,
) -> _PartRows:
    book, part_id, seeds, num_batches = workload.book, workload.part_id, workload.seeds, schedule.num_batches
    begin, end = book.range_of(part_id)
    remote = torch.cat([torch.arange(begin, device="cpu"), torch.arange(end, book.num_vertices, device="cpu")])
    chance = expected[remote].numpy()
    capacities = [cache_capacity(alpha, book) for alpha in alphas]

    shared = draws.shared_draws is not None

    def count(batches: Iterable[tuple[Tensor, int]], name: str, total: int) -> Tensor:
        on_batch = track(f"{what}, {name}", total)
        return count_accesses(workload.graph, batches, workload.num_neighbors, shared=shared, on_batch=on_batch)

    counts = [
        count(schedule.drawn(seeds, epoch, draws.draw_block), f"epoch {epoch}", num_batches)[remote].numpy()
        for epoch in range(epochs)
    ]
    scores = {}
    if "oracle" in policies:
        scores["oracle"] = torch.zeros(book.num_vertices, dtype=torch.float32, device="cpu").index_put_(
            (remote,), torch.from_numpy(sum(counts)).float()
        )
    if "oracle-heldout" in policies:
        # The keys of `simulation` are numbered by part; these lie beyond.
        others = shuffled_batches(seeds, schedule.batch_size, book.num_parts + part_id, epochs)
        scores["oracle-heldout"] = count(
            others, "held-out epochs", epochs * -(-seeds.numel() // schedule.batch_size)
        ).float()

    counted = np.zeros((len(policies), len(alphas), epochs))
    forecast = np.zeros((len(policies), len(alphas)))
    calibrated, variance = np.zeros(len(alphas)), np.zeros(len(alphas))
    advance = track(f"{what}, policies", len(policies))

    def rank(policy: str) -> tuple[Tensor, list[int]]:
        """The remote vertices in the order in which a cache takes them, and how many each size takes."""
        ranking = scores[policy] if policy in scores else score(cast(Policy, policy), workload)  # the name was checked
        # plan_cache's choice for every size at once: by descending score, among equals the lower id, never a zero.
        ranked = torch.sort(ranking[remote], descending=True, stable=True)
        useful = int(torch.count_nonzero(ranked.values > 0))
        return ranked.indices, [min(capacity, useful) for capacity in capacities]

    # Sorting takes one core, so policies share them.
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="salientpp-rank") as pool:
        for p, (policy, (order, sizes)) in enumerate(zip(policies, pool.map(rank, policies))):
            forecast[p] = _left_by(chance[order.numpy()], sizes)
            for epoch in range(epochs):
                counted[p, :, epoch] = _left_by(counts[epoch][order.numpy()], sizes)
            if policy == "vip" and epochs and seeds.numel():
                calibrated, variance = _calibrate(workload, remote[order], sizes, schedule, shared)
            advance()
    return _PartRows(
        counted, np.array([float(c.sum()) for c in counts]), forecast, float(chance.sum()), calibrated, variance
    )


def _left_by(accesses: np.ndarray, cache_sizes: list[int]) -> np.ndarray:
    """What caches of these sizes leave to fetch; ``accesses`` [remote vertices], in the order in which a cache takes them."""
    return np.array([accesses[size:].sum() for size in cache_sizes])


def _calibrate(
    workload: Workload, ranked: Tensor, cache_sizes: list[int], schedule: Schedule, shared: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Rows per epoch estimated from a few batches, and the variance of that estimate, for each cache size."""
    graph = workload.graph
    place = np.full(graph.num_vertices, -1)
    place[ranked.numpy()] = np.arange(ranked.numel())
    rows, variance = np.zeros(len(cache_sizes)), np.zeros(len(cache_sizes))
    epoch_sizes = [positions.numel() for positions in schedule.batches(0)]
    for batch_size in sorted(set(epoch_sizes)):  # full batches, and perhaps a smaller last one
        epochs = -(-CALIBRATION_BATCHES * batch_size // workload.seeds.numel()) + 1
        batches = shuffled_batches(workload.seeds, batch_size, 2 * workload.book.num_parts + workload.part_id, epochs)
        whole = ((seeds, key) for seeds, key in batches if seeds.numel() == min(batch_size, workload.seeds.numel()))
        samples = []
        for seeds, key in islice(whole, CALIBRATION_BATCHES):
            n_id = ops.sample_neighbors(
                graph.indptr, graph.indices, None, seeds, workload.num_neighbors, key, workload.replace, shared=shared
            )[0]
            at = place[n_id.numpy()]
            samples.append([np.count_nonzero(at >= size) for size in cache_sizes])
        sampled = np.array(samples, dtype=np.float64)
        times = epoch_sizes.count(batch_size)
        rows += sampled.mean(axis=0) * times
        variance += sampled.var(axis=0, ddof=min(1, len(sampled) - 1)) / len(sampled) * times**2
    return rows, variance


def _ratio_to(oracle: str, policies: list[str], rows: np.ndarray, p: int) -> float | None:
    if oracle not in policies or rows[policies.index(oracle)] <= 0:
        return None
    return float(rows[p] / rows[policies.index(oracle)])
