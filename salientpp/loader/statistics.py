"""What a loader did since it was made, or since its statistics were reset."""

from __future__ import annotations

from dataclasses import dataclass

from salientpp.engine.engine import Engine

_TIERS = ("device", "host", "cache", "remote")


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did since it was made, or since ``reset_stats``.

    Attributes:
        batches: given to the user.
        rows_device, rows_host, rows_cache, rows_remote: feature rows delivered, by the tier they came from. Batches that
            were under way when an epoch was left count too: their rows did cross the network. A remote row that a batch
            holds several times, as disjoint trees may, was fetched once and counts once.
        bytes_sent, bytes_received: to and from other ranks: counts, ids and rows.
        seconds_by_stage: time spent in each stage by the thread that drives the pipeline.
        seconds_waiting: time that the caller spent in ``next()``.
        by_type: per vertex type (None where there is only one), these rows by tier, 'device', 'host', 'cache' and 'remote', and
            'bytes_received', what the remote ones took.
        rows_partial: sums that this rank received in the place of rows (``partial_aggregation``); no rows of the tiers, and in ``bytes_received``.
        rows_partial_host: sums that the host of this rank made in the place of its own rows, of the tiers 'host' and 'cache', and copied to the device.
    """

    batches: int
    rows_device: int
    rows_host: int
    rows_cache: int
    rows_remote: int
    bytes_sent: int
    bytes_received: int
    seconds_by_stage: dict[str, float]
    seconds_waiting: float
    by_type: dict[str | None, dict[str, int]]
    rows_partial: int = 0
    rows_partial_host: int = 0

    @property
    def rows(self) -> int:
        return self.rows_device + self.rows_host + self.rows_cache + self.rows_remote

    @classmethod
    def of(cls, engine: Engine) -> LoaderStats:
        """The statistics of an engine."""
        fetch, counters = engine.producer.fetch, engine.counters
        counts, traffic = fetch.counts, fetch.exchange.traffic
        received = traffic.row_bytes_received
        by_type = {
            type_: {**{tier: counts[type_, tier] for tier in _TIERS}, "bytes_received": received[type_]}
            for type_ in fetch.tiers
        }
        # What ways receive beside rows is of the only type.
        beside = sum(number for name, number in received.items() if name not in by_type)
        if None in by_type:
            by_type[None]["bytes_received"] += beside
        rows = {f"rows_{tier}": sum(of_type[tier] for of_type in by_type.values()) for tier in _TIERS}
        of_ways = {name: number for way in engine.ways for name, number in way.counts().items()}
        return cls(
            batches=counters.batches,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds_by_stage=dict(counters.seconds_by_stage),
            seconds_waiting=counters.seconds_waiting,
            by_type=by_type,
            rows_partial=of_ways.get("rows_partial", 0),
            rows_partial_host=of_ways.get("rows_partial_host", 0),
            **rows,
        )
