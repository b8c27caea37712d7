"""A look-alike of torch's DataLoader over an engine: epochs, saved states and statistics."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.mixin import AffinityMixin, LogMemoryMixin, MultithreadingMixin

from salientpp.arguments import as_integer
from salientpp.engine.engine import Engine
from salientpp.engine.producer import ByHand
from salientpp.engine.run import Epoch, Rounds, Run
from salientpp.loader.bookmark import Bookmark
from salientpp.loader.fingerprint import order_is_known, settings_of
from salientpp.loader.samplers import OfLoader
from salientpp.loader.statistics import LoaderStats
from salientpp.processes import lazy
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.cache import Cache, GivenCache


class EngineLoader(torch.utils.data.DataLoader, AffinityMixin, MultithreadingMixin, LogMemoryMixin):
    """Epochs of an engine. A subclass makes the engine and the bookmark, and says what becomes of finished batches."""

    data: Any
    engine: Engine
    transform_sampler_output: Callable[[Any], Any] | None
    _bookmark: Bookmark
    _orders_itself: bool  # no sampler of the user's does

    def _finish(self) -> tuple[Callable[[Any], Any] | None, ByHand | None]:
        """What is called with every finished batch, and what makes whole batches in place of the engine's stages."""
        return None, None

    def _values_of_fingerprint(self) -> dict[str, Any]:
        """Plain values that batches depend on, beside the order of a sampler of the user's."""
        raise NotImplementedError

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._bookmark.epochs.order.num_batches

    @property
    def batches_by_rank(self) -> list[int]:
        """Batches that each rank gives in an epoch; of processes that ``share`` an object only this one's."""
        return self._bookmark.epochs.order.batches_by_rank

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with the seed it fixes the order and all draws.

        After ``load_state_dict`` the number of the state's epoch keeps the state, and any other leaves it.
        """
        self._bookmark.set_epoch(int(epoch))

    def set_next_epoch(self, epoch: int) -> None:
        """As ``set_epoch``, also for an epoch that was begun and not yet asked for a batch."""
        if self.engine.move_to(int(epoch)):
            self._bookmark.epoch = int(epoch) + 1
        else:
            self.set_epoch(epoch)

    def next_positions(self) -> list[Tensor]:
        """The positions of the seeds of the next epoch, int64, batch by batch."""
        return self._bookmark.epochs.positions(self._bookmark.epoch)

    def __iter__(self) -> Iterator[Data]:  # type: ignore[override]  # torch names a class of its own here
        return self._get_iterator()

    def _get_iterator(self) -> Iterator[Data]:  # type: ignore[override]
        return Epoch(self._begin_epoch())

    def rounds(self) -> Iterator[list[Data]]:
        """An epoch as ``iter(loader)``, a round at a time: in round i the batches with number i of this rank's logical ranks, in order.

        Every rank gets as many rounds, so ranks with different numbers of logical ranks may take a step together after each, as with gradients
        accumulated over the batches. Under ``uneven='exact'`` a rank whose logical ranks have ended gets empty lists. States count whole rounds.
        """
        return Rounds(self._begin_epoch())

    def _begin_epoch(self) -> Run:
        comm, place = self.engine.basis.comm, self._bookmark
        comm.check_process()
        if isinstance(self.data, PartitionedGraph):
            self.engine.close()
            try:
                self.data.check_sizes()
            except DatasetError as error:
                comm.report_failure(f"rank {comm.rank} cannot begin an epoch: {error}")
                raise
        if self.worker_init_fn is not None:
            self.engine.producer.workers.initialise(self.worker_init_fn, anew=not self.persistent_workers)
        self.engine.producer.workers.transform = self.transform_sampler_output  # which the user may have set since
        finish, by_hand = self._finish()
        with self.engine.lock:
            run = self.engine.run(place.epoch, place.resume, finish, by_hand)
            place.begun(run.reached)
        return run

    # --- state --------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether the order of the seeds can be had again: not with a sampler of the user's, beside torch's that have no state of their own."""
        return self._orders_itself or order_is_known(self)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: plain values, for ``torch.save`` or JSON; see :mod:`salientpp.engine.state`.

        Inside an epoch, and after leaving it early, it counts the batches that were given; after the end it is the start of the next.
        """
        state = self._bookmark.state(self.engine.producer.drive(getattr, self, "_fingerprint"))
        if not self._orders_itself:
            state["sampler_epoch"] = getattr(self.sampler, "epoch", 0)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter(loader)`` go on where ``state_dict()`` was called; on several ranks every rank loads a state.

        As many ranks, each with its own state, go on with the very next batch. Any other number of ranks, or all with the state of one, go on with the
        first round that this one had not given whole; made without ``logical_ranks``, a loader takes the state's. So it does with the seed.

        Raises:
            ValueError: the state is of other data or arguments, or none at all; the loader stays as it was.
        """
        given = state.get("sampler_epoch", 0) if isinstance(state, dict) else 0
        sampler_epoch = as_integer(given)
        if sampler_epoch is None:
            raise ValueError(f"cannot load this state: sampler_epoch must be an integer, got {given!r}")
        self._bookmark.load(state, self.engine.producer.drive(getattr, self, "_fingerprint"))
        self.seed = self._bookmark.epochs.seed
        if not self._orders_itself and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(sampler_epoch)

    @lazy
    def _fingerprint(self) -> dict[str, Any]:
        found = self._values_of_fingerprint()
        if not self._orders_itself:
            if not self.has_state:
                raise ValueError(
                    "a loader with a sampler or batch_sampler of its own has no state: the order of the seeds is that sampler's"
                )
            found["sampler"] = settings_of(self.sampler)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which go on as this loader would: with the same next epoch, and ``state_dict()``; with threads and counts of their own."""
        if isinstance(self.data, PartitionedGraph):
            raise TypeError(
                "a loader of a partitioned graph cannot be copied or pickled: its connections and memory maps are this process's; make one from "
                "salientpp.load(root) where you need it, and give it this loader's state_dict() to go on from there"
            )
        engine = copy.copy(self.engine)
        return {**self.__dict__, "engine": engine, "_bookmark": self._bookmark.copy(engine.basis.epochs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.sampler, OfLoader):
            self.sampler.belong_to(self)

    # --- reports ------------------------------------------------------------------------------------------

    @property
    def cache(self) -> FeatureCache | TypedFeatureCache:
        """The cached rows; give it to another loader as ``cache=``.

        Raises:
            RuntimeError: this loader looks ahead.
        """
        way = self.engine.way(Cache)
        if way is not None and way.finds_late:
            raise RuntimeError(
                "the rows of a cache that looks ahead change from batch to batch, so it is its loader's alone; make the other loader with a replication_factor "
                "of its own"
            )
        if way is None or not len(way.cache):
            way = self.engine.way(GivenCache) or way
        return FeatureCache.empty() if way is None else way.cache

    def memory(self) -> dict[str, int]:
        """Bytes held, by tier, of the topology (memory-mapped arrays count in full), and of ``batches`` under way; with ``lookahead`` also of what finds its
        rows and of the ids of the batches to come.

        The latter on the CPU is what the pool of buffers holds; on another device what the largest batch so far took there, times the
        batches that are on the device at once, at most.
        """
        return self.engine.memory()

    def stats(self) -> LoaderStats:
        """What happened since construction or ``reset_stats``; filling the cache is not counted."""
        return LoaderStats.of(self.engine)

    def reset_stats(self) -> None:
        """Start counting anew; between epochs."""
        self.engine.close()
        self.engine.reset()

    @contextlib.contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Write a Chrome trace of the epochs started inside the ``with`` block: a track per stage and per worker thread.

        Open it at ui.perfetto.dev or chrome://tracing. On CUDA the spans are the host's; torch.profiler shows the same stages as
        ranges named ``salientpp::<stage>`` beside the kernels.
        """
        write = self.engine.trace_to(path)
        try:
            yield
        finally:
            write()

    def _aff_init_fn(self, worker_id: int) -> None:
        # PyG's pins the process; here a worker is a thread.
        cores = self.loader_cores[worker_id]
        os.sched_setaffinity(0, cores if isinstance(cores, list) else [cores])
        self._old_worker_init_fn(worker_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
