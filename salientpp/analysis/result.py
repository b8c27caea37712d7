"""Results of an analysis, as JSON and CSV. docs/reference/analysis-files.md describes each field."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True)
class Ahead:
    """Sizes and forecasts of lookahead caches, as a :class:`Volume` has them."""

    refused: str | None
    windows: tuple[int, ...]
    slots: tuple[int, ...]
    state_bytes: tuple[int, ...]
    predicted_share: float
    best_share: float
    reach: float | None


@dataclass(frozen=True)
class Summed:
    """Sums and bytes with ``partial_aggregation``, where ranks fetch sums instead of some rows. Means over epochs."""

    sums_per_epoch: float
    sources_per_epoch: float
    bytes_with: float
    bytes_without: float
    sums_per_rank: tuple[float, ...]
    auto: tuple[bool, ...]
    share: float


@dataclass(frozen=True)
class Copies:
    """Rows of own parts that hosts copy to devices per epoch.

    A device holds the share ``device_fraction`` of each part. Means over epochs.
    """

    num_neighbors: tuple[Any, ...]
    device_fraction: float
    rows_without: float
    rows_per_epoch: float
    sums_per_epoch: float
    sources_per_epoch: float
    auto: tuple[bool, ...]
    share: float


@dataclass(frozen=True)
class Volume:
    """Result for one cache or other method: the rows of one vertex type that all ranks together fetch from other hosts per epoch."""

    num_neighbors: tuple[Any, ...]
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
        """The counted rows, or the forecast if none were counted."""
        return self.predicted_rows_per_epoch if self.remote_rows_per_epoch is None else self.remote_rows_per_epoch

    def beside(self, way: str, rows: Sequence[float] | None, left: float, **figures: Any) -> Volume:
        """Returns the result of another method, to be listed beside this static cache, whose memory it uses.

        Args:
            rows: counted rows by rank, or None.
            left: number of rows, or of rows and sums, that are still to fetch.
        """
        total = None if rows is None else sum(rows)
        return replace(
            self, way=way, cached_rows=None, remote_rows_per_epoch=total, remote_rows_std=None,
            remote_bytes_per_epoch=None if total is None else total * self.row_bytes, remote_rows_per_rank=None if rows is None else tuple(rows),
            predicted_rows_per_epoch=None, calibrated_rows_per_epoch=None, calibrated_error=None, ratio_to_oracle=None, ratio_to_heldout=None,
            reduction=1 - left / self.rows_without_cache if self.rows_without_cache else 0.0, **figures,
        )  # fmt: skip


@dataclass(frozen=True)
class DeviceRows:
    """Expected rows of a rank's part that a batch copies from host to device, if the device holds the fraction β of the part. Mean over parts."""

    num_neighbors: tuple[int, ...]
    device_fraction: float
    device_bytes: int
    rows_per_batch_vip_order: float
    rows_per_batch_original_order: float


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`~salientpp.analysis.analyze.analyze`."""

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
    copies: tuple[Copies, ...]
    #: False if all vertices are seeds because the graph has no training split.
    has_split: bool = True
    #: Number of hosts that hold all rows and train nothing. 0: the hosts that train hold the rows.
    storage_hosts: int = 0

    def of(self, **labels: Any) -> list[Volume]:
        """Returns the results with these attributes, such as ``way='cache', policy='vip'``."""
        return [each for each in self.results if all(getattr(each, name) == value for name, value in labels.items())]

    @property
    def num_neighbors(self) -> list[tuple[Any, ...]]:
        """The values of ``num_neighbors`` that have results."""
        return list(dict.fromkeys(volume.num_neighbors for volume in self.results))

    def by_host(self, volume: Volume) -> list[float]:
        """Returns the counted rows that each host fetches."""
        ends = [0, *accumulate(self.ranks_by_host)]
        return [sum((volume.remote_rows_per_rank or ())[first:last]) for first, last in pairwise(ends)]

    def share(self, volumes: Sequence[Volume]) -> float:
        """Returns the bytes fetched with one cache, divided by the bytes fetched without it, over all vertex types.

        Counts rows if the bytes of a row are unknown.
        """
        weights = [volume.row_bytes or 1 for volume in volumes]
        without = sum(volume.rows_without_cache * weight for volume, weight in zip(volumes, weights))
        left = sum((volume.rows or 0) * weight for volume, weight in zip(volumes, weights))
        return left / without if without else 1.0

    @property
    def has_features(self) -> bool:
        """True if the graph has features, so that rows can be counted in bytes."""
        return any(self.row_bytes.values())

    @property
    def machine(self) -> str:
        """The word for a host in texts: 'machine' if every host has one rank and one part, else 'host'. 'training host' if other hosts hold the rows."""
        if self.storage_hosts:
            return "training host"
        is_alone = max(self.ranks_by_host) == 1 and len(self.ranks_by_host) == self.parts
        return "machine" if is_alone else "host"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values; ``schema`` is the version of their format."""
        return {"schema": 3, **asdict(self)}

    def to_csv(self) -> str:
        """Returns one line per result. The columns are the fields of :class:`Volume`, :class:`Ahead` and :class:`Summed`, without figures by rank."""
        out = io.StringIO()
        left_out = "ahead", "summed", "remote_rows_per_rank", "windows", "slots", "state_bytes", "sums_per_rank", "auto"
        entries = (entry.name for kind in (Volume, Ahead, Summed) for entry in fields(kind))
        columns = [name for name in entries if name not in left_out]
        writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for volume in self.results:
            line = asdict(volume)
            line |= (line.pop("ahead") or {}) | (line.pop("summed") or {})
            writer.writerow({**line, "num_neighbors": " ".join(map(str, volume.num_neighbors))})
        return out.getvalue()


def words_of_rows(row_bytes: Mapping[str, int]) -> str:
    """Returns the text "512 bytes per row" for each vertex type that has features, or "" without features."""
    return ", ".join(
        f"{width:,} bytes per row{f' of {type_}' if type_ else ''}" for type_, width in row_bytes.items() if width
    )


def word_of_type(type_: Any) -> str:
    return "" if type_ is None else str(type_)
