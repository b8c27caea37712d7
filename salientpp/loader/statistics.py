"""Statistics of a loader since it was made or last reset."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from salientpp.display import Table, format_bytes, html
from salientpp.engine.engine import Engine

#: Where the rows of batches come from.
TIERS = ("device", "host", "cache", "remote")


@dataclass(frozen=True, repr=False)
class LoaderStats:
    """Statistics of a loader since it was made, or since ``reset_stats``. Printed, they are tables of rows by tier and of seconds by stage.

    Attributes:
        batches: batches given to the user.
        rows_device, rows_host, rows_cache, rows_remote: feature rows delivered, by the tier they came from. Batches that
            were in the pipeline when an epoch was left count too, because their rows did cross the network. Disjoint trees
            may hold a remote row several times in one batch; it is fetched once and counted once.
        bytes_sent, bytes_received: counts, ids and rows exchanged with other ranks, in bytes.
        control_messages, row_messages: all-to-alls that this rank started, for counts and ids together, and for rows. One rank starts none.
        seconds_by_stage: time spent in each stage by the thread that drives the pipeline.
        seconds_waiting: time that the caller spent in ``next()``.
        by_type: per vertex type (None if the graph has one type), a dict of rows by tier ('device', 'host', 'cache', 'remote') and
            'bytes_received', the bytes of the remote rows.
        rows_partial: sums that this rank received instead of rows (``partial_aggregation``). No tier counts them; ``bytes_received`` does.
        rows_partial_host: sums that this rank's host computed and copied to the device, instead of its own rows of the tiers 'host'
            and 'cache'.
        padded_batches: batches that were padded (``pad``).
        padding_overflows: padded batches that were larger than the largest size chosen in advance. They got a larger size.
        expansions_own, expansions_remote: with a topology in parts, vertices whose neighbour lists were read for this rank's batches. The lists were of
            the host's own parts, or of other ranks. A vertex counts once in each hop and tree that expands it.
        list_bytes_sent, list_bytes_received: bytes of requests for draws from other ranks' neighbour lists, and of the answers. ``bytes_sent`` and
            ``bytes_received`` include them.
        bytes_from_files: with ``read_ahead``, bytes of whole pages that were read from files.
        list_rounds: number of times that a batch made this rank ask others for draws from their neighbour lists.
        row_bytes: per vertex type, the bytes in which all attributes of a sampled vertex travel.
        seconds_of_work: seconds that threads spent on 'draw', 'gather' (copies of rows out of memory or files) and 'transform'.
        seconds_for_peers: seconds in which this rank waited for messages of other ranks.
        seeds: seeds in the batches.
        seconds_in_steps: seconds between a delivered batch and the next request of the same epoch, in which the caller trains.
        seconds: seconds of the epochs, each from its first request to its last delivery.
    """

    batches: int
    rows_device: int
    rows_host: int
    rows_cache: int
    rows_remote: int
    bytes_sent: int
    bytes_received: int
    control_messages: int
    row_messages: int
    seconds_by_stage: dict[str, float]
    seconds_waiting: float
    by_type: dict[str | None, dict[str, int]]
    rows_partial: int = 0
    rows_partial_host: int = 0
    padded_batches: int = 0
    padding_overflows: int = 0
    expansions_own: int = 0
    expansions_remote: int = 0
    list_bytes_sent: int = 0
    list_bytes_received: int = 0
    list_rounds: int = 0
    bytes_from_files: int = 0
    row_bytes: dict[str | None, int] = field(default_factory=dict)
    seconds_of_work: dict[str, float] = field(default_factory=dict)
    seconds_for_peers: float = 0.0
    seeds: int = 0
    seconds_in_steps: float = 0.0

    @property
    def seconds(self) -> float:
        return self.seconds_waiting + self.seconds_in_steps

    @property
    def rows(self) -> int:
        return self.rows_device + self.rows_host + self.rows_cache + self.rows_remote

    def __repr__(self) -> str:
        return "\n".join(map(str, self._shown()))

    def _repr_html_(self) -> str:
        return html(*self._shown())

    def _shown(self) -> list[str | Table]:
        """Returns the text of printed statistics: totals, rows by tier, seconds by stage, and other counts."""
        traffic = f"{format_bytes(self.bytes_sent)} sent, {format_bytes(self.bytes_received)} received"
        first = f"LoaderStats: {self.batches:,} batches, {self.rows:,} rows, {traffic}, {self.seconds_waiting:.3f} s waiting in next()"
        rows = [
            (tier if type_ is None else f"{type_} {tier}", of_type[tier], of_type[tier] * self.row_bytes.get(type_, 0))
            for type_, of_type in self.by_type.items()
            for tier in TIERS
            if of_type[tier]
        ]
        seconds = {name: number for name, number in self.seconds_by_stage.items() if number}
        spent = sum(seconds.values())
        tiers = [[name, f"{number:,}", f"{number / self.rows:.1%}", format_bytes(size)] for name, number, size in rows]
        stages = [[name, f"{number:.3f}", f"{number / spent:.1%}"] for name, number in seconds.items()]
        more = {
            f"{self.rows_partial + self.rows_partial_host:,} sums instead of rows": self.rows_partial
            + self.rows_partial_host,
            f"{self.padded_batches:,} padded batches, {self.padding_overflows:,} of them larger than planned": self.padded_batches,
            f"{self.expansions_remote:,} neighbour lists of other ranks, {format_bytes(self.list_bytes_received)} received for lists": self.list_rounds,
            f"{format_bytes(self.bytes_from_files)} read ahead from files": self.bytes_from_files,
        }
        tables = [Table(["rows from", "rows", "%", "bytes"], tiers), Table(["stage", "seconds", "%"], stages)]
        return [
            first,
            *(table for table in tables if table.lines),
            *(words for words, number in more.items() if number),
        ]

    def since(self, before: LoaderStats) -> LoaderStats:
        """Returns what was counted since ``before``, which are earlier statistics of the same loader."""
        names = [field.name for field in fields(self) if field.name != "row_bytes"]
        return replace(self, **{name: _less(getattr(self, name), getattr(before, name)) for name in names})

    @classmethod
    def of(cls, engine: Engine) -> LoaderStats:
        """Reads the statistics of an engine."""
        fetch, delivered, work = engine.producer.fetch, engine.counters.delivered, engine.producer.work.seconds
        stages = engine.producer.stage_names
        counts, traffic = fetch.counts, fetch.exchange.traffic
        received = traffic.row_bytes_received
        by_type = {
            type_: {**{tier: counts[type_, tier] for tier in TIERS}, "bytes_received": received[type_]}
            for type_ in fetch.tiers
        }
        # Ways receive other data than rows only on graphs with one type.
        beside = sum(number for name, number in received.items() if name not in by_type)
        if None in by_type:
            by_type[None]["bytes_received"] += beside
        rows = {f"rows_{tier}": sum(of_type[tier] for of_type in by_type.values()) for tier in TIERS}
        of_ways = {name: number for way in engine.ways for name, number in way.counts().items()}
        return cls(
            batches=delivered.batches,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            control_messages=fetch.exchange.mail.messages,
            row_messages=traffic.row_messages,
            seconds_by_stage={name: work.pop(name, 0.0) for name in stages},
            seconds_waiting=delivered.seconds_waiting,
            by_type=by_type,
            **{f"expansions_{place}": number for place, number in engine.producer.workers.reads._asdict().items()},
            list_bytes_sent=traffic.list_bytes_sent,
            list_bytes_received=traffic.list_bytes_received,
            list_rounds=traffic.list_rounds,
            rows_partial=of_ways.get("rows_partial", 0),
            bytes_from_files=of_ways.get("bytes_from_files", 0),
            rows_partial_host=of_ways.get("rows_partial_host", 0),
            row_bytes=dict(engine.basis.source.row_bytes),
            seconds_of_work=dict(work),
            seconds_for_peers=engine.basis.comm.seconds_waited,
            seeds=delivered.seeds,
            seconds_in_steps=delivered.seconds_in_steps,
            **rows,
        )


def _less(now: Any, before: Any) -> Any:
    """Subtracts a number, or the numbers in a dictionary; a number that ``before`` lacks was 0."""
    if isinstance(now, dict):
        return {
            name: _less(value, before.get(name, {} if isinstance(value, dict) else 0)) for name, value in now.items()
        }
    return now - before
