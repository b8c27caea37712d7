"""Divides each batch among the ranks of a host, which compute it together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp.ops import join_key
from salientpp.sampling.divided_batch import BatchShare, share_of
from salientpp.sampling.schedule import BatchKeys
from salientpp.sampling.topology import Mfg


class Once(Protocol):
    """Interface of :class:`DrawnOnce`: one rank of a host draws a batch, and the others take their shares of it."""

    def share(self, turn: int, key: Sequence[int], draw: Callable[[], Mfg]) -> BatchShare:
        """Returns this rank's share of batch number ``turn``. Batches with equal ``key`` are equal. ``draw`` draws the whole batch."""


@dataclass(frozen=True, eq=False)
class Division:
    """Says which rank of a host computes each vertex, and divides batches accordingly.

    Attributes:
        owner: int8 or int16 [N], for each vertex the number on the host of the rank that computes it.
        num_ranks: number of ranks of the host.
        place: number of this rank on its host, in [0, ``num_ranks``).
        once: lets a batch of an epoch be drawn by one rank. None: every rank draws it.
        number: number of the loader, equal on all ranks of the host.
    """

    owner: Tensor
    num_ranks: int
    place: int
    once: Once | None = None
    number: int = 0

    def share(self, draw: Callable[[], Mfg], keys: BatchKeys, turn: tuple[int, int] | None) -> BatchShare:
        """Returns this rank's share of the batch that ``draw`` draws by ``keys``. ``turn``: (epoch, tick), or None outside an epoch. Any thread may call it."""
        if turn is None:
            mfg = draw()
            assert isinstance(mfg, SamplerOutput)  # the loader refuses graphs with several types
            return share_of(mfg, self.owner[mfg.node], self.num_ranks, self.place)
        epoch, tick = turn
        mine = self.share(draw, keys, None) if self.once is None else self.once.share(tick, keys, draw)
        assert mine.share is not None
        origin = join_key(self.number, *keys)
        whole = dataclasses.replace(mine.share.whole, name=f"batch {tick} of epoch {epoch}", origin=origin)
        mine.share = dataclasses.replace(mine.share, whole=whole)
        return mine

    def own_vertices(self, mfg: Mfg) -> Mfg:
        """Returns a sample whose ``node`` has only the vertices of this rank. Its other fields describe the whole batch."""
        own = copy.copy(mfg)
        own.node = mfg.node[self.owner[mfg.node] == self.place]
        return own

    def masked(self, scores: Tensor, first: int = 0) -> Tensor:
        """Returns the scores with 0 for each vertex that another rank computes. ``scores`` [n]: of the vertices from ``first`` on."""
        return scores * (self.owner[first : first + scores.numel()] == self.place)
