"""Holds what an analysis found: one row for each way to fetch fewer rows, policy, replication factor and vertex type; as JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from salientpp.analysis.advice import DeviceRows, Recommendation


@dataclass(frozen=True)
class Ahead:
    """Figures of ranks that know their next batches.

    Attributes:
        refused: why there is no such cache: the ids of the window would take too much of its memory. Then it counts as the static one.
        windows: by rank, how many batches are known ahead; 0: the cache is the static one.
        slots: by rank, rows that are kept; the rest of the memory has the ids of the window and what finds rows, ``state_bytes``.
        predicted_share: rows over those of the static cache of the same memory, by the forecast; where batches draw alike in blocks and the latter are counted,
            over these.
        best_share: the same with all of the future.
        reach: T*, the largest of the ranks: with a longer window nothing more is saved; None where everything fits.
    """

    refused: str | None
    windows: tuple[int, ...]
    slots: tuple[int, ...]
    state_bytes: tuple[int, ...]
    predicted_share: float
    best_share: float
    reach: float | None


@dataclass(frozen=True)
class Summed:
    """Figures of sums in the place of rows; means over epochs.

    Attributes:
        sums_per_epoch, sources_per_epoch: sums, and rows in these sums.
        bytes_with, bytes_without: of requests and answers with sums and without. The messages that say how many there are come on top, 16 bytes longer
            with sums, per batch and other rank.
        sums_per_rank: the sums by rank.
        auto: by rank, whether 'auto' asks for sums.
        share: bytes with sums over those without.
    """

    sums_per_epoch: float
    sources_per_epoch: float
    bytes_with: float
    bytes_without: float
    sums_per_rank: tuple[float, ...]
    auto: tuple[bool, ...]
    share: float


@dataclass(frozen=True)
class Copies:
    """Rows of their own parts that hosts copy to devices per epoch, over all ranks, if a device has the first β of each part; means over epochs.

    Attributes:
        device_fraction: β.
        rows_without: without sums.
        rows_per_epoch, sums_per_epoch, sources_per_epoch: with sums: rows, sums in the place of rows, and rows in these sums.
        auto: by rank, whether 'auto' has its host sum up.
        share: rows and sums over rows without.
    """

    fanouts: tuple[Any, ...]
    device_fraction: float
    rows_without: float
    rows_per_epoch: float
    sums_per_epoch: float
    sources_per_epoch: float
    auto: tuple[bool, ...]
    share: float


@dataclass(frozen=True)
class Volume:
    """Rows of one vertex type that are fetched from other hosts per epoch, over all ranks.

    Attributes:
        fanouts: of the batches.
        way: 'cache': a static cache for each host; 'private cache': the same memory, with a cache for each rank, where hosts have several; 'lookahead'; 'sums'.
        policy, replication_factor: of the cache; ``cache_bytes`` is what its rows, of all types, may take on a host.
        vertex_type: '' if there is one.
        row_bytes: of a row as it travels and is cached.
        cached_rows: in the static caches of all hosts.
        rows_without_cache: rows per epoch without a cache: counted, else predicted.
        remote_rows_per_epoch, remote_rows_std: mean and standard deviation over epochs; None if only predicted.
        remote_bytes_per_epoch: of the counted rows; of 'sums' that of requests and answers.
        remote_rows_per_rank: the mean by rank.
        predicted_rows_per_epoch: VIP's forecast for the same cache; None for caches that depend on counted accesses.
        calibrated_rows_per_epoch, calibrated_error: the forecast after a few batches per rank, and its standard error; policy 'vip' alone.
        ratio_to_oracle, ratio_to_heldout: rows over the oracles' rows at the same replication factor; None where not counted or where the oracle fetches
            nothing. With several types an oracle weighs bytes, so it may fetch more rows of one of them.
        reduction: share of ``rows_without_cache`` that is saved, where sums count as rows; of 'lookahead' that is not counted, as forecast.
        ahead, summed: figures of the ways 'lookahead' and 'sums' alone.
    """

    fanouts: tuple[Any, ...]
    way: str
    policy: str
    replication_factor: float
    vertex_type: str
    row_bytes: int
    cache_bytes: int
    cached_rows: int | None
    rows_without_cache: float
    remote_rows_per_epoch: float | None
    remote_rows_std: float | None
    remote_bytes_per_epoch: float | None
    remote_rows_per_rank: tuple[float, ...] | None
    predicted_rows_per_epoch: float | None
    calibrated_rows_per_epoch: float | None
    calibrated_error: float | None
    ratio_to_oracle: float | None
    ratio_to_heldout: float | None
    reduction: float
    ahead: Ahead | None = None
    summed: Summed | None = None

    @property
    def rows(self) -> float | None:
        """The best figure there is: counted, else predicted."""
        return self.predicted_rows_per_epoch if self.remote_rows_per_epoch is None else self.remote_rows_per_epoch


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`~salientpp.analysis.analyze.analyze`; ``to_dict`` gives the documented JSON.

    Attributes:
        num_vertices, row_bytes: by vertex type; a graph's only type is called ''. ``replicated`` are the types whose rows every part has.
        parts: of the graph; ``ranks_by_host`` says how many ranks each host has, ``parts_by_rank`` how many parts each rank has the seeds of.
        epochs: that were counted; 0: only predicted.
        draws: how batches are drawn.
        send_as: the format of rows where that is not the one they are stored in.
        steps_per_epoch: batches of the rank that has most.
        results: see :class:`Volume`.
        device_rows, recommendations: of plain batches and ranks that are hosts of their own.
        copies: to devices, where sums are counted.
    """

    dataset: str
    num_vertices: dict[str, int]
    num_edges: int
    parts: int
    ranks_by_host: tuple[int, ...]
    parts_by_rank: tuple[int, ...]
    batch_size: int
    epochs: int
    seeds: str
    seed: int
    row_bytes: dict[str, int]
    replicated: tuple[str, ...]
    edge_cut_fraction: float
    balance: dict[str, float]
    draws: dict[str, Any]
    send_as: dict[str, str] | None
    steps_per_epoch: int
    results: tuple[Volume, ...]
    device_rows: tuple[DeviceRows, ...]
    recommendations: tuple[Recommendation, ...]
    copies: tuple[Copies, ...]

    def of(self, **labels: Any) -> list[Volume]:
        """The results with these attributes, such as ``way='cache', policy='vip'``."""
        return [
            volume for volume in self.results if all(getattr(volume, name) == value for name, value in labels.items())
        ]

    @property
    def fanouts(self) -> list[tuple[Any, ...]]:
        """Of which there are results."""
        return list(dict.fromkeys(volume.fanouts for volume in self.results))

    def by_host(self, volume: Volume) -> list[float]:
        """The counted rows that each host fetches."""
        ends = [0, *accumulate(self.ranks_by_host)]
        return [sum((volume.remote_rows_per_rank or ())[first:last]) for first, last in pairwise(ends)]

    def share(self, volumes: Sequence[Volume]) -> float:
        """Bytes that one cache leaves of those without it, over all vertex types; rows where there are no bytes."""
        weights = [volume.row_bytes or 1 for volume in volumes]
        without = sum(volume.rows_without_cache * weight for volume, weight in zip(volumes, weights))
        left = sum((volume.rows or 0) * weight for volume, weight in zip(volumes, weights))
        return left / without if without else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values; ``schema`` is the version of their meaning."""
        return {"schema": 2, **asdict(self)}

    def to_csv(self) -> str:
        """One line per result; the columns are :class:`Volume`'s, and those of its :class:`Ahead` and :class:`Summed` but for figures by rank."""
        out = io.StringIO()
        nested = [entry.name for kind in (Ahead, Summed) for entry in fields(kind)]
        columns = [entry.name for entry in fields(Volume) if entry.name not in ("ahead", "summed")] + nested
        by_rank = ("remote_rows_per_rank", "windows", "slots", "state_bytes", "sums_per_rank", "auto")
        writer = csv.DictWriter(
            out, [name for name in columns if name not in by_rank], extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        for volume in self.results:
            line = asdict(volume)
            line |= (line.pop("ahead") or {}) | (line.pop("summed") or {})
            writer.writerow({**line, "fanouts": " ".join(map(str, volume.fanouts))})
        return out.getvalue()


def word_of_type(type_: Any) -> str:
    return "" if type_ is None else str(type_)
