"""Keeps batches that several ranks drew together until their rows are fetched, so that a lookahead cache knows them.

If the topology is divided among ranks, all of them draw together, so a rank cannot draw a later batch only for its ids. Instead, every batch is drawn once,
early enough, and waits (:attr:`salientpp.engine.way.Way.waits`). The cache knows no batches beyond the epoch, because the next epoch's batches are not drawn
yet.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from salientpp.engine.epochs import Draws
from salientpp.engine.way import PlacesByType
from salientpp.sampling.topology import Mfg, ids_by_type


def waiting_bytes(mfg: Mfg) -> int:
    """Estimates the bytes that a drawn batch takes while it waits: ids of vertices, places of their rows, and edges."""
    rows = mfg.row.values() if isinstance(mfg.row, dict) else [mfg.row]
    num_vertices = sum(ids.numel() for ids in ids_by_type(mfg.node).values())
    return 8 * (3 * num_vertices + 5 * sum(row.numel() for row in rows))


class Waiting:
    """Queue of an epoch's drawn batches that wait for their rows. One thread adds batches while another may ask for their ids."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Draws, int, PlacesByType]] = deque()
        self._tick = 0  # of the batch that entered last
        self._follows = False

    def add(self, draws: Draws, tick: int, places: PlacesByType) -> None:
        self._batches.append((draws, tick, places))

    def enter(self, draws: Draws, tick: int) -> bool:
        """Records that a batch enters the pipeline. Returns True if it directly follows the one that entered before."""
        follows = self._follows
        while self._batches.popleft()[:2] != (draws, tick):
            follows = False  # a batch was given up, because the rank left the epoch
        self._tick, self._follows = tick, True
        return follows

    def forget(self) -> None:
        self._batches.clear()
        self._follows = False

    def after(self, number: int, reach: int, type_: str | None) -> Tensor | None:
        """Returns the remote ids of the ``number``-th waiting batch; 1 is the next that enters the pipeline.

        None if fewer batches wait, or if its tick is more than ``reach`` ticks after that of the batch that entered last.
        """
        if number > len(self._batches):
            return None
        _, tick, places = self._batches[number - 1]
        return places[type_].remote_id if tick <= self._tick + reach else None
