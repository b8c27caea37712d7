"""Measures the CPU time of the loader's work on trial batches: draws, look-ups and gathers alone, and short epochs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.pipeline import tensors_in
from salientpp.sampling.topology import ids_by_type
from salientpp.store.rows import RowSource, TensorRows, empty_rows
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.rates import largest
from salientpp.ways.planner.trials import num_edges, num_last_edges

#: Limits of the numbers of batches that are counted, and largest number of batches that are drawn alone.
_FEWEST_BATCHES, _MOST_BATCHES, _MOST_DRAWS = 4, 256, 64

#: Bytes and number of the batches that are kept for steps. The last of them may exceed the bytes.
_KEPT_BYTES, _MOST_KEPT = 256 * 2**20, 32


# --- draws and rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Draws:
    """Measured cost of draws on this rank, and the vertices that were drawn.

    Attributes:
        seconds: CPU seconds per edge.
        last: mean number of edges of the last hop; 0 if edges are not counted by hop.
        ids: for each batch, its vertices by type.
    """

    seconds: float
    last: float
    ids: Sequence[Mapping[str | None, Tensor]]


def measure_draws(basis: Basis, seconds: float) -> Draws:
    """Measures the CPU time of draws in this thread. If other ranks hold some neighbour lists, all ranks draw together, and the time of all threads counts."""
    source, epochs = basis.source, basis.epochs
    batches: Iterator[Any] = (
        epochs.pieces(epoch, turn) for epoch in itertools.count() for turn in epochs.order.of_epoch(epoch)
    )
    batches = itertools.islice(batches, _MOST_DRAWS)
    basis.comm.gather_numbers([0])
    if source.drawing.is_collective:
        some = list(itertools.islice(batches, _MOST_DRAWS // 4))
        began = time.process_time()
        mfgs = source.drawing.draw_each(some, lambda mfg: mfg)
        spent = time.process_time() - began
        total = sum(map(num_edges, mfgs))
    else:
        source.drawing.draw(next(batches))
        mfgs, spent, total, end = [], 0.0, 0, time.perf_counter() + seconds
        for pieces in batches:
            began = time.thread_time()
            mfgs.append(source.drawing.draw(pieces))
            spent += time.thread_time() - began
            total += num_edges(mfgs[-1])
            if time.perf_counter() > end:
                break
    last = statistics.fmean(map(num_last_edges, mfgs))
    return Draws(spent / total if total else math.nan, last, [ids_by_type(mfg.node) for mfg in mfgs])


def measure_rows(engine: Engine, batches: Sequence[Mapping[str | None, Tensor]], seconds: float) -> tuple[float, float]:
    """Measures look-ups and gathers of rows: seconds per row, and seconds per byte. NaN if no row can be gathered."""
    source, fetch = engine.basis.source, engine.producer.fetch
    engine.basis.comm.gather_numbers([0])
    widths = {column: empty_rows(source.rows_of(column), 1).nbytes for column in source.exchanged}
    column = max(widths, key=lambda of: widths[of], default=None)
    if column is None or not widths[column]:
        return math.nan, math.nan
    begin, end = source.books[column[0]].range_of(source.exchange.part_of(column[0]))
    given = (ids[column[0]] for ids in batches if column[0] in ids)
    own = [ids[(ids >= begin) & (ids < end)] - begin for ids in given]
    if not sum(ids.numel() for ids in own):
        return math.nan, math.nan
    fetch.look_up(batches[0])
    began = time.thread_time()
    for ids in batches:
        fetch.look_up(ids)
    look_up = (time.thread_time() - began) / sum(of_type.numel() for ids in batches for of_type in ids.values())
    rows, width = source.rows_of(column), widths[column]
    narrow = _seconds_per_row(rows, own, seconds)
    number = rows.shape[0] // 2
    if not isinstance(rows, TensorRows) or not number:
        return look_up, narrow / width
    # The same memory as half as many rows of twice the width.
    pairs = TensorRows(rows.tensor[: 2 * number].view(number, -1))
    halves = [torch.unique(ids // 2) for ids in own]
    wide = _seconds_per_row(pairs, [ids[ids < number] for ids in halves], seconds)
    per_byte = min(max(0.0, wide - narrow), narrow) / width
    return look_up + narrow - per_byte * width, per_byte


def _seconds_per_row(rows: RowSource, batches: Sequence[Tensor], seconds: float) -> float:
    """Measures how many CPU seconds, of all threads, it takes to gather a row."""
    out = empty_rows(rows, max(ids.numel() for ids in batches))

    def gather() -> None:
        for ids in batches:
            rows.take(ids, out[: ids.numel()])

    gather()
    began, end, number = time.process_time(), time.perf_counter() + seconds, 0
    while not number or time.perf_counter() < end:
        gather()
        number += 1
    return (time.process_time() - began) / max(1, number * sum(ids.numel() for ids in batches))


# --- epochs -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Load:
    """CPU time of this rank for loading some batches, and the quantities that explain it.

    Attributes:
        cpu: CPU seconds of all threads.
        edges, vertices: edges and vertices of the delivered batches.
        num_bytes: bytes of their rows.
        served: bytes of the rows that this rank received. On average it gathers the same number of bytes for other
            ranks.
        wire_bytes: bytes sent and received.
        remote: rows of other ranks, including those found in a cache.
    """

    cpu: float = 0.0
    batches: int = 0
    edges: float = 0.0
    vertices: int = 0
    num_bytes: int = 0
    served: float = 0.0
    wire_bytes: float = 0.0
    remote: float = 0.0

    def add(self, batch: Any, row_bytes: Mapping[str | None, int]) -> None:
        of_types = {None: batch} if None in row_bytes else {type_: batch[type_] for type_ in batch.node_types}
        self.batches += 1
        self.edges += batch.num_edges
        for type_, of_type in of_types.items():
            self.vertices += of_type.num_nodes
            self.num_bytes += of_type.num_nodes * row_bytes[type_]

    def left(self, machines: Machines, draws: int = 1) -> float:
        """Returns the CPU seconds that the constants measured so far do not explain, if each batch is drawn ``draws`` times."""
        drawing, gathered = machines.draw * self.edges * draws, self.num_bytes + self.served
        return self.cpu - drawing - machines.loading(self.batches, self.vertices, gathered, self.wire_bytes)


@dataclass(frozen=True)
class TrialEpochs:
    """Runs short epochs to measure loading without training. All ranks take the same number of batches.

    Attributes:
        per_epoch: batches taken from each epoch: as many as the rank with the fewest has.
        skipped: batches until the pipeline is full; they are not counted.
        number: batches that are counted.
    """

    per_epoch: int
    skipped: int
    number: int

    @classmethod
    def of(cls, engine: Engine, per_epoch: int, seconds: float) -> TrialEpochs:
        """Chooses how many batches take about ``seconds``. Collective."""
        basis = engine.basis
        skipped = basis.depth + basis.most_ahead
        first = cls(per_epoch, 0, skipped + 2)
        began = time.perf_counter()
        for _ in first.deliver(engine):
            pass
        each = largest(basis.comm, (time.perf_counter() - began) / first.number)
        return cls(per_epoch, skipped, min(_MOST_BATCHES, max(_FEWEST_BATCHES, int(seconds / each))))

    def deliver(self, engine: Engine) -> Iterator[Any]:
        """Runs epochs one after the other, and yields ``skipped + number`` batches. Collective."""
        left = self.skipped + self.number
        for epoch in itertools.count():
            run = engine.run(epoch)
            for _ in range(min(left, self.per_epoch)):
                yield run.give()
            run.leave()
            left -= min(left, self.per_epoch)
            if not left:
                break
        engine.close()

    def load(self, engine: Engine) -> Load:
        """Runs the epochs and counts their work. Collective."""
        load, source, counting = Load(), engine.basis.source, 0.0

        def counts() -> tuple[float, ...]:
            traffic, rows = source.exchange.traffic, engine.producer.fetch.counts
            remote = sum(number for (_, tier), number in rows.items() if tier in ("remote", "cache"))
            received = sum(traffic.row_bytes_received.values())
            return time.process_time(), traffic.bytes_sent + traffic.bytes_received, received, remote

        row_bytes = source.row_bytes
        for place, batch in enumerate(self.deliver(engine), 1):
            if place > self.skipped:
                began = time.thread_time()
                load.add(batch, row_bytes)
                counting += time.thread_time() - began
            if place == self.skipped:
                before = counts()
            elif place == self.skipped + self.number:
                after = counts()
        cpu, load.wire_bytes, load.served, load.remote = (b - a for a, b in zip(before, after))
        load.cpu = cpu - counting
        return load

    def keep(self, engine: Engine) -> list[Any]:
        """Returns loaded batches to time steps on: at least one, and at most :data:`_KEPT_BYTES`. Collective."""
        kept, left = [], _KEPT_BYTES
        for batch in dataclasses.replace(self, skipped=0, number=min(self.number, _MOST_KEPT)).deliver(engine):
            if left > 0:
                kept.append(batch)
                left -= sum(each.nbytes for each in tensors_in(batch))
        return kept
