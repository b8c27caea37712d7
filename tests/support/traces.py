"""Writes records of runs as loaders do under ``SALIENTPP_TRACE_DIR``, for jobs whose ranks take given times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salientpp.report.parts import Rank

#: Stages of the pipeline.
STAGES = (
    "sample", "exchange_counts", "read_counts", "exchange_ids", "localize_ids",
    "gather_host_rows", "copy_to_device", "gather_device_rows", "exchange_rows", "assemble",
)  # fmt: skip
SHORT = 0.0005  # seconds of a stage in which nothing happens
BEGIN = 1_700_000_000.0


@dataclass(frozen=True)
class Times:
    """Seconds a batch of one rank. All ranks take as long as the slowest: the others wait in the loader, or in their step.

    Attributes:
        sample, rows: waiting for the threads that draw and that take rows.
        network: waiting for bytes.
        received: bytes a batch.
        speed: bytes a second of each link from and to this rank.
    """

    train: float = 0.1
    transform: float = 0.005
    sample: float = 0.002
    rows: float = 0.002
    network: float = 0.0
    received: float = 1e6
    speed: float = 1e9
    batches: int = 40
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> float:
        return self.train + self.transform + self.sample + self.rows + self.network + 6 * SHORT


@dataclass(frozen=True)
class Made:
    """One rank: its description, the numbers of an epoch, and spans as (name, track, batch, start, seconds)."""

    about: dict[str, Any]
    numbers: dict[str, float]
    spans: list[tuple[str, str, int, float, float]]


def made(ranks: list[Times], sync: str = "loader", epoch: int = 0, begin: float = BEGIN) -> list[Made]:
    """Returns the records of each rank of a job. ``sync``: where ranks wait for slower ones, 'loader' or 'step'."""
    size, slowest = len(ranks), max(times.own * times.batches for times in ranks)
    speeds = [
        [a, b, min(ranks[a].speed, ranks[b].speed)] for a in range(size) for b in range(size) if a != b and size > 1
    ]
    return [_of_rank(number, times, ranks, slowest, speeds, sync, epoch, begin) for number, times in enumerate(ranks)]


def _of_rank(
    number: int, times: Times, ranks: list[Times], slowest: float, speeds: list[Any], sync: str, epoch: int, begin: float
) -> Made:  # fmt: skip
    gap = slowest / times.batches - times.own if len(ranks) > 1 else 0.0
    peers, train = times.network + gap * (sync == "loader"), times.train + gap * (sync == "step")
    spans: list[tuple[str, str, int, float, float]] = []
    now = begin
    for batch in range(times.batches):
        asked = now
        spans.append(("draw", "worker: 0", batch, now, 0.02))
        for stage in STAGES:
            took = {"sample": times.sample, "copy_to_device": times.rows}.get(stage, SHORT)
            took += peers if stage == "assemble" else 0.0
            if stage == "assemble" and peers:
                spans.append(("peers", "main", batch, now, peers))
            spans.append((stage, "main", batch, now, took))
            now += took
        spans.append(("gather", "worker: 1", batch, now, times.rows + 0.01))
        spans.append(("transform", "main", batch, now, times.transform))
        now += times.transform
        spans.append(("next", "main", batch, asked, now - asked))
        if batch + 1 < times.batches:
            spans.append(("train", "main", batch, now, train))
            now += train
    n, sums = times.batches, dict[str, float]()
    for name, *_, took in spans:
        sums[name] = sums.get(name, 0.0) + took
    seconds = now - begin
    numbers: dict[str, float] = {
        "epoch": epoch, "rank": number, "ranks": len(ranks), "batches": n, "seeds": 100 * n, "seconds": seconds,
        "batches_per_second": n / seconds, "wait.seconds": sums["next"], "wait.share": sums["next"] / seconds,
        "step.seconds": sums.get("train", 0.0), "transform.seconds": sums["transform"],
        "work.draw.seconds": sums["draw"], "work.gather.seconds": sums["gather"], "peers.seconds": sums.get("peers", 0.0),
        "rows.device": 0, "rows.host": 9000 * n, "rows.cache": 1000 * n, "rows.remote": times.received / 512 * n,
        "bytes.device": 0, "bytes.host": 9000 * 512 * n, "bytes.cache": 1000 * 512 * n,
        "bytes.remote": times.received * n, "bytes.sent": times.received * n, "bytes.received": times.received * n,
        "queue.drawn": 0, "queue.in_flight": 0, "memory.host": 3e8, "memory.cache": 2e7, "memory.graph": 1e8,
    }  # fmt: skip
    numbers |= {f"stage.{stage}.seconds": sums[stage] for stage in STAGES}
    numbers["stage.assemble.seconds"] += sums["transform"]
    about: dict[str, Any] = {
        "version": "0.1.0", "class": "NeighborLoader", "ranks": len(ranks), "options": {"num_workers": 1, "seed": 0},
        "batch_size": 100, "num_neighbors": [10, 5], "num_workers": 1, "depth": 10, "device": "cpu",
        "batches_by_rank": [each.batches for each in ranks], "row_bytes": {"": 512}, "parts": len(ranks),
        "own_rows": 100_000, "cached_rows": 1000, "links": speeds, "cache_forecast": [],
        "memory": {"host": 3e8, "cache": 2e7, "graph": 1e8}, "trimmed": None,
    }  # fmt: skip
    return Made(about | times.about, numbers, spans)


def ranks_of(ranks: list[Times], sync: str = "loader") -> list[Rank]:
    """Returns the ranks of a job's epoch, as the causes read them."""
    return [Rank(number, each.numbers, each.about) for number, each in enumerate(made(ranks, sync))]


def write(
    folder: Path, ranks: list[Times], epochs: int = 2, sync: str = "loader", loader: int = 0, pid: int = 100,
    begin: float = BEGIN,
) -> list[Path]:  # fmt: skip
    """Writes the records of a job, and returns the file of each rank."""
    folder.mkdir(exist_ok=True)
    lines: list[list[str]] = [[] for _ in ranks]
    for epoch in range(epochs):
        everyone = made(ranks, sync, epoch, begin + 1 + 1000 * epoch)
        for number, each in enumerate(everyone):
            common = {"rank": number, "global_rank": number, "local_rank": 0, "source": "loader"}
            common |= {"host_name": f"node-{number}", "pid": pid}

            def add(kind: str, name: str, time: float, value: Any = None, **more: Any) -> None:
                record = {**common, "step": 0, "time_us": round(time * 1e6), "log_type": kind, "log_type_name": name}
                record |= {"value": value, "task_name": "main", "event_name": "", "context": {}}
                lines[number].append(json.dumps(record | more))

            if epoch == 0:
                add("instant", "loader", begin, context=each.about)
            for name, track, batch, start, took in sorted(each.spans, key=lambda span: span[3] + span[4]):
                add("event", f"{name}_end", start + took, took * 1e3, step=batch, task_name=track)
            end = max(start + took for *_, start, took in each.spans)
            add("instant", "epoch", end, event_name=str(epoch), context=each.numbers)
    paths = [folder / f"loader.global_rank_{number}.node-{number}-{pid}-{loader}.jsonl" for number in range(len(ranks))]
    for path, own in zip(paths, lines):
        path.write_text("\n".join(own) + "\n")
    return paths
