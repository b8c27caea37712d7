"""The threads that sample batches ahead of the training loop. Without threads, the caller's thread samples.

A batch is a pure function of its seeds and its key, so neither the number of threads nor their order matters.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from salientpp.engine.drawing.method import DrawingMethod, checked_sample
from salientpp.engine.trace import WORKER, Trace, traced
from salientpp.ops import mark_thread
from salientpp.processes import Lock, Task, Threads, Undone, after_fork
from salientpp.sampling.held_lists import Reads
from salientpp.sampling.schedule import BatchKeys
from salientpp.sampling.topology import Mfg


class Maker(Protocol):
    """Turns a sampled batch into the object that a sampling thread delivers."""

    trace: Trace | None

    def make(self, index: int, mfg: Mfg, num_seeds: int) -> Any: ...

    def count_draw(self, made: Any, seconds: float) -> None:
        """Counts the time in which a thread drew a batch, and made it if it is complete."""


class SamplingWorkers:
    """Samples batches from seed positions, in its own threads or in the caller's.

    Args:
        number: number of threads. 0: the caller's thread samples.
        transform: the user's ``transform_sampler_output``; it may be set later.

    Attributes:
        reads: numbers of neighbour lists that batches have read since the last reset; 0 if this process holds all.
    """

    def __init__(self, number: int, drawing: DrawingMethod, transform: Callable[[Any], Any] | None) -> None:
        self._threads = Threads(number, "salientpp-sample") if number else None
        self._drawing, self.transform = drawing, transform
        self._initialiser: _OncePerThread | None = None
        self._lock = Lock()
        self.reads = Reads()

    def initialise(self, function: Callable[[int], None], anew: bool) -> None:
        """Makes every thread call ``worker_init_fn`` before it samples. Later calls have no effect unless ``anew``."""
        if self._initialiser is None or anew:
            self._initialiser = _OncePerThread(function)

    def request(
        self, epoch: int, index: int, pieces: Sequence[tuple[Tensor, BatchKeys]], maker: Maker
    ) -> Task | Undone:
        """Requests that batch ``index`` of an epoch be sampled and made, or only begun if stages continue the draw.

        Args:
            pieces: for each piece, the int64 [B] positions of its seeds, and the keys of its draws. All pieces become one batch.
        """
        return self.scout(self._work, epoch, index, pieces, maker)

    def scout(self, function: Callable[..., Any], *args: Any) -> Task | Undone:
        """Runs ``function(*args)`` in a sampling thread, such as a draw for a lookahead cache."""
        if self._threads is None:
            return Undone(function, *args)
        return self._threads.submit(self._initialised, function, *args)

    def _initialised(self, function: Callable[..., Any], *args: Any) -> Any:
        mark_thread()
        if self._initialiser is not None:
            self._initialiser()
        return function(*args)

    def _work(self, epoch: int, index: int, pieces: Sequence[tuple[Tensor, BatchKeys]], maker: Maker) -> Any:
        num_seeds = pieces[0][0].numel() if len(pieces) == 1 else sum(positions.numel() for positions, _ in pieces)
        started = time.perf_counter()
        trace = maker.trace
        track = "" if trace is None else f"{WORKER}{threading.current_thread().name}"
        with traced(trace, track, index):
            finish = partial(self._prepare_drawn, index, num_seeds, maker)
            result = self._drawing.begin(pieces, (epoch, index), finish)
        maker.count_draw(result, time.perf_counter() - started)
        return result

    def _prepare_drawn(self, index: int, num_seeds: int, maker: Maker, mfg: Any) -> Any:
        if self._drawing.is_collective:
            with self._lock:
                self.reads = self.reads.plus(mfg.reads)
        share = getattr(mfg, "share", None)
        return self.prepare(index, mfg, num_seeds if share is None else share.own[0], maker)

    def prepare(self, index: int, mfg: Any, num_seeds: int, maker: Maker) -> Any:
        """Applies the user's ``transform_sampler_output`` to a sample, and makes the result of the request from it."""
        metadata = mfg.metadata
        kept = {name: value for name in ("edge_rows", "per_seed") if (value := getattr(mfg, name, None)) is not None}
        if self.transform is not None:
            mfg = checked_sample("transform_sampler_output", self.transform(mfg))
            mfg.metadata = metadata if mfg.metadata is None else mfg.metadata
            for name, value in kept.items():
                setattr(mfg, name, value)
        permutation = self._drawing.sampler.edge_permutation
        if permutation is not None:
            mfg.edge = _users_edge_ids(mfg.edge, permutation)
        return maker.make(index, mfg, num_seeds)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_initialiser": None}  # a copy starts new threads


class _OncePerThread:
    """Calls ``worker_init_fn`` once in every thread that uses it, with the number of the thread."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._numbers = itertools.count()
        self._done = threading.local()

    def __call__(self) -> None:
        if not getattr(self._done, "yes", False):
            self._function(next(self._numbers))
            self._done.yes = True


def _users_edge_ids(edge: Any, permutation: Any) -> Any:
    """Returns the user's ids of edges that a sampler has numbered in another order."""
    if isinstance(edge, dict):
        return {
            name: ids if ids is None or permutation.get(name) is None else permutation[name][ids.to(torch.int64)]
            for name, ids in edge.items()
        }
    return None if edge is None else permutation[edge.to(torch.int64)]
