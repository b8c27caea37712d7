"""How many rows of each type of vertices would cross the network, however batches are drawn?

What :mod:`salientpp.analysis.volume` counts for uniform draws from one type of vertices, counted here for all that the loaders do on a partitioned
graph: several types, times, weights, disjoint trees, and seeds that are edges with negative examples. Batches are drawn by the loader's own sampler
with the loader's keys, so the counts are those of a run with the same seed, type by type.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

from salientpp.analysis.advice import format_bytes
from salientpp.analysis.volume import MOST_EPOCHS, Track, no_track, sent_row_bytes
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import Schedule, batch_key
from salientpp.sampling.seeds import edge_start, part_edges, part_nodes, scores_of_part
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.inclusion import check_batch_size, uniform_start
from salientpp.vip.policies import (
    TYPED_POLICIES,
    cache_bytes,
    check_replication_factor,
    plan_caches,
)

#: Ranks vertices by the very accesses that are counted, per byte: no static cache is better.
ORACLE = "oracle"


@dataclass(frozen=True)
class TypedVolume:
    """Rows fetched per epoch, over all K parts, with one policy and replication factor.

    Attributes:
        cache_bytes: what the cached rows may take on a machine.
        rows_per_epoch: by vertex type, mean over epochs; None if only predicted.
        bytes_per_epoch: of these rows, over all types.
        cached_rows: by vertex type, rows that the parts cache in all.
        predicted_rows_per_epoch: VIP's forecast by type; None for the oracle.
    """

    policy: str
    replication_factor: float
    cache_bytes: int
    rows_per_epoch: dict[str, float] | None
    bytes_per_epoch: float | None
    cached_rows: dict[str, int]
    predicted_rows_per_epoch: dict[str, float] | None


@dataclass(frozen=True)
class TypedAnalysis:
    """The result of :func:`analyze_typed`; ``to_dict`` gives JSON values. A graph's only type of vertices is called ''."""

    dataset: str
    parts: int
    num_vertices: dict[str, int]
    row_bytes: dict[str, int]
    replicated: tuple[str, ...]
    drawing: dict[str, Any]
    batch_size: int
    epochs: int
    seeds: str
    seed: int
    results: tuple[TypedVolume, ...]

    def to_dict(self) -> dict:
        """JSON values; ``schema`` is the version of their meaning."""
        return {"schema": 1, "typed": True, **asdict(self)}


@dataclass(frozen=True, eq=False)
class _Part:
    """One part's figures, by type [N] each.

    Attributes:
        scores: by policy, as a run plans its cache by them.
        counts: per epoch, in how many batches each vertex was.
        expected: VIP's forecast of the same.
    """

    scores: Mapping[str, Mapping[Any, Tensor]]
    counts: list[dict[Any, np.ndarray]]
    expected: Mapping[Any, Tensor]


def analyze_typed(
    part: PartitionedGraph,
    num_neighbors: Any,
    *,
    name: str = "graph",
    batch_size: int = 1024,
    replication_factors: Sequence[float] = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1),
    policies: Sequence[str] = ("vip", "degree", "random", ORACLE),
    epochs: int = 10,
    seeds: Any = "train",
    link: bool = False,
    neg_sampling: NegativeSampling | str | None = None,
    seed: int = 0,
    predict_only: bool = False,
    send_as: Mapping[Any, str] | None = None,
    track: Track = no_track,
    **sampling: Any,
) -> TypedAnalysis:
    """Count and forecast the rows of every type that cross the network per epoch.

    Args:
        part: an opened dataset directory, with all parts.
        num_neighbors, batch_size, seed, neg_sampling: as given to the loader.
        seeds: as ``input_nodes`` of the loader, or its ``edge_label_index`` if ``link``: names, no ids of one rank.
        link: seeds are edges.
        replication_factors: α >= 0, any number of them.
        policies: names of ``vip.policies.TYPED_POLICIES``, and 'oracle'.
        epochs: counted epochs.
        predict_only: no sampling, VIP's forecast alone.
        send_as: the formats that rows of ``x`` travel in, as in :class:`salientpp.NeighborLoader`.
        track: see :data:`~salientpp.analysis.volume.Track`.
        sampling: ``time_attr``, ``weight_attr``, ``replace``, ``disjoint``, ``temporal_strategy``, ``subgraph_type``, and for edges
            ``edge_label_time``.

    Raises:
        ValueError: an argument is wrong; nothing was computed.
    """
    batch_size = check_batch_size(batch_size)
    if not 1 <= epochs <= MOST_EPOCHS:
        raise ValueError(f"epochs must be in [1, {MOST_EPOCHS:,}], got {epochs}")
    widths = sent_row_bytes(part, send_as)
    alphas = sorted({check_replication_factor(alpha) for alpha in replication_factors})
    chosen = _checked_policies(policies, predict_only)
    epochs = 0 if predict_only else epochs
    edge_time = sampling.pop("edge_label_time", None)
    time_attr, weight_attr = sampling.pop("time_attr", None), sampling.pop("weight_attr", None)
    plain = not part.is_hetero and time_attr is None and weight_attr is None
    sampler = NeighborSampler.of(
        part.graph if plain else part.typed_graph(time_attr, weight_attr), num_neighbors, **sampling
    )
    negatives: Any = NegativeSampling.cast(neg_sampling) if neg_sampling is not None else None

    inputs = [_inputs(part, part_id, seeds, link, edge_time) for part_id in range(part.num_parts)]
    sizes = [_size(of_part) for of_part in inputs]
    uneven = "exact" if 0 in sizes else "wrap"
    schedules = [
        Schedule(size, part_id, 0, 1, sizes, part_id, batch_size, True, False, uneven, seed)
        for part_id, size in enumerate(sizes)
    ]
    books = {type_: book for type_, book in part.row_books.items() if book.num_parts == part.num_parts}
    books = {type_: book for type_, book in books.items() if widths[type_]}
    if not books:
        raise ValueError(
            f"no type of vertices of {part.root} has rows of x that would travel, so there is nothing to count"
        )
    parts = []
    for part_id, of_part in enumerate(inputs):
        start = (
            edge_start(of_part, negatives, batch_size)
            if isinstance(of_part, EdgeSamplerInput)
            else {of_part.input_type: uniform_start(of_part.node, batch_size)}
        )
        track(f"part {part_id} of {part.num_parts}: scores", 1)
        scores = {
            policy: scores_of_part(
                policy, part=part, part_id=part_id, sampler=sampler, inputs=of_part, start=start, batch_size=batch_size
            )
            for policy in chosen
            if policy != ORACLE
        }
        times = sum(positions.numel() for positions in schedules[part_id].batches(0)) / batch_size
        counts = [
            _count(sampler, of_part, negatives, schedules[part_id], epoch, seed, part_id, books, track)
            for epoch in range(epochs)
        ]
        parts.append(_Part(scores, counts, {type_: scores["vip"][type_].double() * times for type_ in books}))
    results = [_volume(policy, alpha, parts, books, widths, epochs) for policy in chosen for alpha in alphas]
    replicated = [type_ for type_, book in part.row_books.items() if book.num_parts < part.num_parts]
    return TypedAnalysis(
        dataset=name,
        parts=part.num_parts,
        num_vertices={_word(type_): book.num_vertices for type_, book in part.books.items()},
        row_bytes={_word(type_): width for type_, width in widths.items()},
        replicated=tuple(map(_word, replicated)),
        drawing={
            **sampler.settings(),
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "neg_sampling": None if negatives is None else f"{negatives.mode.value} {negatives.amount:g}",
        },
        batch_size=batch_size,
        epochs=epochs,
        seeds=f"{'edges' if link else 'vertices'} {seeds!r}",
        seed=seed,
        results=tuple(results),
    )


def _checked_policies(policies: Sequence[str], predict_only: bool) -> list[str]:
    known = [*sorted(TYPED_POLICIES), ORACLE]
    for policy in policies:
        if policy not in known:
            raise ValueError(f"policies must be among {', '.join(known)} for such batches, got {policy!r}")
    chosen = [policy for policy in dict.fromkeys(policies) if not (predict_only and policy == ORACLE)]
    return chosen if "vip" in chosen else ["vip", *chosen]


def _inputs(
    part: PartitionedGraph, part_id: int, seeds: Any, link: bool, edge_time: Any
) -> NodeSamplerInput | EdgeSamplerInput:
    if not link:
        return part_nodes(part, part_id, seeds, None, None)[0]
    stored = part_edges(part, part_id, seeds)
    return EdgeSamplerInput(
        stored.edge_id, stored.ends[0], stored.ends[1], None, stored.attribute(edge_time), stored.type_
    )


def _size(inputs: NodeSamplerInput | EdgeSamplerInput) -> int:
    return (inputs.row if isinstance(inputs, EdgeSamplerInput) else inputs.node).numel()


def _count(
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    negatives: NegativeSampling | None,
    schedule: Schedule,
    epoch: int,
    seed: int,
    part_id: int,
    books: Mapping[Any, Any],
    track: Track,
) -> dict[Any, np.ndarray]:
    """In how many batches of an epoch each vertex was, by type; 0 for those of the part."""
    counts = {type_: np.zeros(book.num_vertices, dtype=np.int32) for type_, book in books.items()}
    batches = schedule.batches(epoch)
    advance = track(f"part {part_id} of {len(schedule.seeds_per_slot)}, epoch {epoch}", len(batches))
    for index, positions in enumerate(batches):
        key = batch_key(seed, epoch, part_id, index)
        if isinstance(inputs, EdgeSamplerInput):
            node = sampler.sample_from_edges(inputs[positions], negatives, key).node
        else:
            node = sampler.sample_from_nodes(inputs[positions], key).node
        for type_, n_id in (node if isinstance(node, dict) else {None: node}).items():
            if type_ in counts:
                counts[type_][n_id.numpy()] += 1  # assignment, so that a tree's repeat counts once
        advance()
    for type_, book in books.items():
        begin, end = book.range_of(part_id)
        counts[type_][begin:end] = 0
    return counts


def _volume(
    policy: str,
    alpha: float,
    parts: Sequence[_Part],
    books: Mapping[Any, Any],
    widths: Mapping[Any, int],
    epochs: int,
) -> TypedVolume:
    rows = dict.fromkeys(books, 0.0)
    predicted, cached_rows = dict(rows), dict.fromkeys(books, 0)
    for part_id, of_part in enumerate(parts):
        if policy == ORACLE:
            scores = {type_: torch.from_numpy(sum(c[type_] for c in of_part.counts)).double() for type_ in books}
        else:
            scores = {type_: of_type for type_, of_type in of_part.scores[policy].items() if type_ in books}
        cached = plan_caches(scores, books, widths, part_id, alpha)
        for type_, book in books.items():
            left = np.ones(book.num_vertices, dtype=bool)
            left[slice(*book.range_of(part_id))] = False
            left[cached[type_].numpy()] = False
            rows[type_] += sum(float(counts[type_][left].sum()) for counts in of_part.counts) / max(1, epochs)
            predicted[type_] += float(of_part.expected[type_].numpy()[left].sum())
            cached_rows[type_] += cached[type_].numel()
    return TypedVolume(
        policy=policy,
        replication_factor=alpha,
        cache_bytes=cache_bytes(alpha, books, widths),
        rows_per_epoch={_word(type_): number for type_, number in rows.items()} if epochs else None,
        bytes_per_epoch=sum(number * widths[type_] for type_, number in rows.items()) if epochs else None,
        cached_rows={_word(type_): number for type_, number in cached_rows.items()},
        predicted_rows_per_epoch=None
        if policy == ORACLE
        else {_word(type_): number for type_, number in predicted.items()},
    )


def _word(type_: Any) -> str:
    return "" if type_ is None else str(type_)


# --- how it is shown ---------------------------------------------------------------------------------------


def typed_table(analysis: TypedAnalysis) -> Table:
    """For each policy and α the megabytes and the rows of each type that are still fetched."""
    types = list(analysis.results[0].cached_rows)
    kind = "fetched" if analysis.epochs else "expected to be fetched"
    table = Table(
        title=f"Rows {kind} per epoch by {analysis.parts} machines, and rows that they cache in all, by type of vertices",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for column in ("α", "cache per machine", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for type_ in types:
        table.add_column(f"{type_ or 'rows'}", justify="right", no_wrap=True)
        table.add_column("cached", justify="right", no_wrap=True)
    previous = None
    for volume in analysis.results:
        if previous not in (None, volume.policy):
            table.add_section()
        previous = volume.policy
        rows = volume.rows_per_epoch or volume.predicted_rows_per_epoch or {}
        megabytes = sum(rows[type_] * analysis.row_bytes[type_] for type_ in rows) / 1e6
        table.add_row(
            volume.policy,
            f"{volume.replication_factor:g}",
            format_bytes(volume.cache_bytes),
            f"{megabytes:,.1f}",
            *(text for type_ in types for text in (f"{rows[type_]:,.0f}", f"{volume.cached_rows[type_]:,}")),
            style="dim" if volume.policy == ORACLE else "",
        )
    return table


def typed_csv(analysis: TypedAnalysis) -> str:
    """One line per policy, α and type of vertices."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "policy",
            "replication_factor",
            "cache_bytes",
            "type",
            "row_bytes",
            "rows_per_epoch",
            "predicted_rows_per_epoch",
            "cached_rows",
        ]
    )
    for volume in analysis.results:
        for type_, cached in volume.cached_rows.items():
            counted, predicted = volume.rows_per_epoch, volume.predicted_rows_per_epoch
            writer.writerow(
                [
                    volume.policy,
                    volume.replication_factor,
                    volume.cache_bytes,
                    type_,
                    analysis.row_bytes[type_],
                    "" if counted is None else counted[type_],
                    "" if predicted is None else predicted[type_],
                    cached,
                ]
            )
    return out.getvalue()
