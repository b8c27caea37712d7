"""The values that an engine is built from. All are known before any row is placed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from salientpp.engine.epochs import Epochs
from salientpp.engine.source import BatchSource
from salientpp.ops import return_freed_memory
from salientpp.processes import lazy, outside_inference
from salientpp.ranks.comm import Comm
from salientpp.ranks.cooperation import Cooperation
from salientpp.sampling.schedule import Turn
from salientpp.store.tiers import NO_IDS, Tiers

Out = TypeVar("Out")

#: Number of batches of the first epoch that are drawn to estimate the size of batches.
TRIAL_BATCHES = 8


@dataclass(eq=False)
class Basis:
    """Values that determine the batches of one rank. The engine reads them, and so do its caches and other methods (:class:`Way`).

    Attributes:
        comm: the ranks that make batches together; a single process has only itself.
        device: device of the delivered batches.
        batch_size: mean number of seeds in a batch.
        ranks_by_host: number of ranks on each host. Empty: every rank is its own host.
        depth: number of batches in flight.
        num_workers: number of sampling threads. 0: the caller's thread samples.
        prefetch_factor: number of batches that each sampling thread draws ahead.
        dtype: dtype of the delivered ``x``. None: as stored.
        zero_copy: if True, the device reads the host's rows in place.
        repeats: True if a batch may hold a vertex several times, as sampled trees do.
        marks_sizes: True if ``torch.compile`` is told which sizes of a batch change.
        has_budget: True if all memory of the process but its batches must stay within the budget of the loader.
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
    has_budget: bool = False
    transform_sampler_output: Any = None
    _remembered: dict[Any, Any] | None = field(default=None, init=False, repr=False)

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Makes :meth:`once` keep its results inside the ``with`` block, so that plans of several methods compute them once."""
        before, self._remembered = self._remembered, {} if self._remembered is None else self._remembered
        try:
            yield
        finally:
            self._remembered = before

    def once(self, key: Any, compute: Callable[[], Out]) -> Out:
        """Returns ``compute()``. Inside :meth:`remembering`, it is computed only once for each key."""
        if self._remembered is None:
            return compute()
        if key not in self._remembered:
            self._remembered[key] = compute()
            return_freed_memory()  # otherwise the results lie between the pages of what was freed
        return self._remembered[key]

    @property
    def most_ahead(self) -> int:
        """Maximum number of batches that sampling threads draw ahead of the pipeline."""
        return 1 + self.num_workers * self.prefetch_factor

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    @lazy
    def host(self) -> Comm:
        """The ranks of this host, connected to each other. They all create this object at the same time."""
        return self.comm.among(self.source.exchange.placement.ranks_of_host)

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this rank's host, which share copies of rows; 1 if :attr:`ranks_by_host` is empty."""
        return len(self.epochs.placement.ranks_of_host) if self.ranks_by_host else 1

    @lazy
    def cooperation(self) -> Cooperation | None:
        """Ranks with which this rank computes batches; None: it does so alone. Read it only after :func:`divide`."""
        if self.source.drawing.division is None:
            return None
        placement = self.source.exchange.placement
        return Cooperation(self.comm, placement.ranks_of_host, placement.host)

    def seeds_only(self, type_: str | None) -> list[str]:
        """Returns the attributes of a vertex type that a batch has only for its seeds, such as ``y``."""
        return [name for owner, name in self.source.seed_columns if owner == type_]

    @outside_inference
    def tiers(self, near: Mapping[str | None, Tensor] | None = None) -> dict[str | None, Tiers]:
        """Returns the tiers of this part's rows by vertex type. ``near``: ascending local ids to copy to the device."""
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
        """Batches of epoch 0 (as turns) from which sizes are estimated: evenly spaced, at most :data:`TRIAL_BATCHES`."""
        turns = self.epochs.order.trial()
        return turns[:: -(-len(turns) // TRIAL_BATCHES) or 1]

    def trial(self, only_vertices: bool = False) -> list[list[Any]]:
        """Draws the batches of :attr:`trial_turns` as epoch 0 will draw them. Returns, for each batch, one MFG per logical rank that it joins.

        Collective if ranks hold neighbour lists for each other (:attr:`DrawingMethod.is_collective`).
        """

        def draw() -> list[list[Any]]:
            batches = [self.epochs.pieces(0, turn) for turn in self.trial_turns]
            pieces = ([piece] for of_batch in batches for piece in of_batch)
            mfgs = iter(self.source.drawing.draw_each(pieces, lambda mfg: mfg, only_vertices))
            return [[next(mfgs) for _ in of_batch] for of_batch in batches]

        return self.once(("trial", only_vertices), draw)
