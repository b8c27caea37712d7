"""What an engine is built from: plain values that are known before any row is placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.epochs import Epochs
from salientpp.engine.source import BatchSource
from salientpp.processes import lazy
from salientpp.ranks.comm import Comm
from salientpp.sampling.schedule import Turn
from salientpp.store.tiers import NO_IDS, Tiers

#: Of the first epoch, how many batches show what batches are like.
TRIAL_BATCHES = 8


@dataclass(eq=False)
class Basis:
    """What one rank knows of the batches that it will make.

    Attributes:
        comm: the ranks that make batches together; one process has itself alone.
        device: where batches are delivered.
        batch_size: seeds of a batch, on average.
        ranks_by_host: how many ranks each host has; empty: every rank is a host of its own.
        depth: batches in flight.
        num_workers: sampling threads; 0: the caller's.
        prefetch_factor: batches that each sampling thread draws ahead.
        dtype: of delivered ``x``; None: as it is stored.
        zero_copy: the device reads the rows of the host where they are.
        repeats: a batch may hold a vertex several times, as trees do.
        marks_sizes: tell ``torch.compile`` which sizes change.
    """

    comm: Comm
    source: BatchSource
    epochs: Epochs
    device: torch.device
    batch_size: int
    ranks_by_host: Sequence[int] = ()
    depth: int = 10
    num_workers: int = 0
    prefetch_factor: int = 2
    dtype: torch.dtype | None = None
    pin_memory: bool = False
    zero_copy: bool = False
    repeats: bool = False
    marks_sizes: bool = True
    transform_sampler_output: Any = None

    @property
    def most_ahead(self) -> int:
        """Batches that are drawn ahead at once."""
        return 1 + self.num_workers * self.prefetch_factor

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    @lazy
    def host(self) -> Comm:
        """The ranks of this host; made by all of them at the same time."""
        return self.comm.among(self.source.exchange.placement.ranks_of_host)

    def seeds_only(self, type_: str | None) -> list[str]:
        """The attributes of a vertex type that only seeds get."""
        return [name for owner, name in self.source.seed_columns if owner == type_]

    def tiers(self, near: Mapping[str | None, Tensor] | None = None) -> dict[str | None, Tiers]:
        """The rows of this part, by vertex type, and copies on the device of the rows ``near`` (ascending local ids, int64)."""
        source = self.source
        return {
            type_: Tiers.of(
                book, source.exchange.part_of(type_), source.rows[type_], device=self.device, zero_copy=self.zero_copy,
                device_ids=NO_IDS if near is None else near[type_], seeds_only=self.seeds_only(type_), narrow=source.narrow_of(type_),
            )
            for type_, book in source.books.items()
        }  # fmt: skip

    @property
    def trial_turns(self) -> Sequence[Turn]:
        """Up to :data:`TRIAL_BATCHES` turns of epoch 0, evenly spread."""
        turns = self.epochs.order.of_epoch(0)
        return turns[:: -(-len(turns) // TRIAL_BATCHES) or 1]

    def trial(self, only_vertices: bool = False) -> Iterator[list[Any]]:
        """The batches of :attr:`trial_turns`, as they will be drawn: for each the MFG of every piece of it. See :meth:`BatchSource.draw`."""
        for turn in self.trial_turns:
            yield [self.source.draw(*piece, only_vertices=only_vertices) for piece in self.epochs.pieces(0, turn)]
