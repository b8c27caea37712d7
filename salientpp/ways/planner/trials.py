"""Predicts what a batch costs with each combination of methods, from batches that are drawn once. No rows move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from salientpp.engine.basis import Basis
from salientpp.engine.price import price_of
from salientpp.engine.producer import Drawn
from salientpp.engine.way import Price, TiersByType, Way
from salientpp.ops import mark_thread
from salientpp.processes import Threads
from salientpp.sampling.topology import Mfg, ids_by_type
from salientpp.store.fetch import places_of


@dataclass(frozen=True)
class Batch:
    """Mean size of a rank's batches, and their number in an epoch.

    Attributes:
        number: batches in an epoch.
        vertices, edges: mean numbers in a batch.
        last_edges: mean number of edges of the last hop; 0 if edges are not counted by hop.
        row_bytes: mean bytes of the rows of a batch, as they travel.
    """

    number: int
    vertices: float
    edges: float
    last_edges: float
    row_bytes: float


def num_edges(mfg: Mfg) -> int:
    """Returns the number of sampled edges, of all types."""
    rows: Any = mfg.row
    return sum(0 if row is None else row.numel() for row in (rows.values() if isinstance(rows, Mapping) else [rows]))


def num_last_edges(mfg: Mfg) -> int:
    """Returns the number of edges of the last hop, of all types; 0 if edges are not counted by hop."""
    counts: Any = mfg.num_sampled_edges
    if counts is None:
        return 0
    return sum(of_type[-1] for of_type in (counts.values() if isinstance(counts, Mapping) else [counts]) if of_type)


class Trials:
    """Trial batches of a rank, drawn once to price combinations of methods. Collective if other ranks hold some of the neighbour lists.

    Args:
        basis: the values that determine the rank's batches.
    """

    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        batches = [basis.epochs.pieces(0, turn) for turn in basis.trial_turns]
        self._mfgs: Sequence[Mfg] = basis.once(
            "joined trial", lambda: basis.source.drawing.draw_each(batches, lambda mfg: mfg)
        )

    @cached_property
    def batch(self) -> Batch:
        basis, number = self._basis, max(1, len(self._mfgs))
        row_bytes, vertices, edges, last, moved = basis.source.row_bytes, 0, 0, 0, 0
        for mfg in self._mfgs:
            for type_, ids in ids_by_type(mfg.node).items():
                vertices += ids.numel()
                moved += ids.numel() * row_bytes.get(type_, 0)
            edges += num_edges(mfg)
            last += num_last_edges(mfg)
        of_epoch = basis.epochs.order.num_batches
        return Batch(of_epoch, vertices / number, edges / number, last / number, moved / number)

    def price(self, ways: Sequence[Way], seconds_per_edge: float) -> tuple[Price, TiersByType]:
        """Returns the cost of a batch with these methods, and the tiers of rows that they choose. Collective.

        Args:
            seconds_per_edge: time of one thread to draw an edge.
        """
        basis, source = self._basis, self._basis.source
        tiers: TiersByType = basis.tiers()
        for way in ways:
            tiers = way.choose(basis, tiers)
        look_up = partial(places_of, tiers, source.exchanged, repeats=basis.repeats)
        # A thread keeps memory for the look-ups of its largest batch. This one ends with the call, and its memory with it.
        thread = Threads(1, "salientpp-price")
        thread.submit(mark_thread).result()
        tried = [thread.submit(Drawn.of, mfg, ways, look_up).result() for mfg in self._mfgs]
        id_bytes, seconds = source.exchange.wire_dtype.itemsize, self.batch.edges * seconds_per_edge
        return price_of(tried, tiers, source.row_bytes, id_bytes, ways, seconds), tiers
