"""Gives an engine the interface of torch's ``DataLoader``, with epochs, saved states and statistics."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.mixin import AffinityMixin, LogMemoryMixin, MultithreadingMixin

from salientpp.arguments import as_integer, as_real
from salientpp.display import Table, html
from salientpp.engine.engine import Engine
from salientpp.engine.producer import ByHand
from salientpp.engine.run import Epoch, EpochOfRounds, Run
from salientpp.engine.state import MOST_EPOCHS, Point, first_point
from salientpp.loader.bookmark import Bookmark
from salientpp.loader.copying import copied
from salientpp.loader.fingerprint import order_is_known, settings_of
from salientpp.loader.metrics import Measured
from salientpp.loader.samplers import OfLoader
from salientpp.loader.statistics import LoaderStats
from salientpp.processes import lazy
from salientpp.ranks.cooperation import Cooperation
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.cache import Cache, GivenCache


class EngineLoader(torch.utils.data.DataLoader, AffinityMixin, MultithreadingMixin, LogMemoryMixin):
    """Loader that runs an engine's epochs. Subclasses set ``engine`` and ``_bookmark``, the position in the epochs."""

    data: Any
    engine: Engine
    transform_sampler_output: Callable[[Any], Any] | None
    _bookmark: Bookmark
    _measured: Measured
    _description: Callable[[], dict[str, Any]]  # describes the loader in the file of its spans, as JSON values
    _orders_itself: bool  # False if a user's sampler orders the seeds

    def _finish(self) -> tuple[Callable[[Any], Any] | None, ByHand | None]:
        """Returns two functions with which a subclass changes how the engine makes batches, or None for each that it does not need.

        The engine calls the first on each batch after the last stage, for example to pad it. It calls the second instead of the stages, if a user's subclass
        overrides ``collate_fn`` or ``filter_fn``.
        """
        return None, None

    def _values_of_fingerprint(self) -> dict[str, Any]:
        """Returns the values by which a saved state recognises its loader, apart from the order of a user's sampler."""
        raise NotImplementedError

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._bookmark.epochs.order.num_batches

    @property
    def batches_by_rank(self) -> list[int]:
        """Number of batches of an epoch for each rank. With ``share``, where processes do not communicate, it has only the number of this process."""
        return self._bookmark.epochs.order.batches_by_rank

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch; together with the random seed, this number determines the order and all draws.

        After ``load_state_dict``, the state is kept if ``epoch`` is the epoch of the state, and discarded otherwise.

        Raises:
            ValueError: ``epoch`` is not an integer in [0, 2^62).
        """
        self._bookmark.set_epoch(_epoch_of(epoch))

    def set_next_epoch(self, epoch: int) -> None:
        """Does the same as ``set_epoch``, and also renumbers an epoch that was begun but has given no batch yet."""
        number = _epoch_of(epoch)
        if self.engine.move_to(number):
            self._bookmark.epoch = number + 1
        else:
            self.set_epoch(epoch)

    def next_positions(self) -> list[Tensor]:
        """Positions of the seeds of the next epoch, int64, batch by batch."""
        return self._bookmark.epochs.positions(self._bookmark.epoch)

    def __iter__(self) -> Iterator[Data]:  # type: ignore[override]  # torch declares a class of its own here
        return self._get_iterator()

    def _get_iterator(self) -> Iterator[Data]:  # type: ignore[override]
        return Epoch(self._begin_epoch())

    def rounds(self) -> Iterator[list[Data]]:
        """Begins an epoch, as ``iter(loader)`` does, and gives it in rounds: round i lists batch i of each of this rank's logical ranks.

        Every rank gets the same number of rounds. Ranks with different numbers of logical ranks can thus take one step together per round, for
        example with gradients accumulated over the batches. Under ``uneven='exact'``, a rank whose logical ranks have ended gets empty lists.
        A saved state counts whole rounds.
        """
        return EpochOfRounds(self._begin_epoch())

    def _begin_epoch(self) -> Run:
        comm, place = self.engine.basis.comm, self._bookmark
        comm.check_process()
        if isinstance(self.data, PartitionedGraph):
            self.engine.close()
        with comm.reporting("begin an epoch"):
            if isinstance(self.data, PartitionedGraph):
                self.data.check_sizes()
            if self.worker_init_fn is not None:
                self.engine.producer.workers.initialise(self.worker_init_fn, anew=not self.persistent_workers)
            self.engine.producer.workers.transform = self.transform_sampler_output  # the user may have changed it
            finish, by_hand = self._finish()
        self.engine.record_in(self._measured.spans, self._description)
        with self.engine.lock:
            begun = partial(self._measured.begin, self.engine, self.memory_used)
            run = self.engine.run(place.epoch, place.resume, finish, by_hand, begun)
            place.begun(run.reached)
        return run

    def _continues(self) -> bool:
        """Returns True if the next epoch continues from a loaded state. All ranks call this method together.

        If it is True, the ranks may have to prepare together first, for example to fill the caches that the state's plan has.
        """
        comm, place = self.engine.basis.comm, self._bookmark
        if place.resume is not None and comm.size > 1:
            first_point([Point.of(numbers) for numbers in comm.gather_numbers(place.point.numbers())])
        return place.resume is not None

    # --- state --------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """True if the order of the seeds can be reproduced. With a user's sampler, this holds only for torch's samplers without a state."""
        return self._orders_itself or order_is_known(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this loader as plain values, for ``torch.save`` or JSON; see :mod:`salientpp.engine.state`.

        Inside an epoch, or after leaving it early, the state counts the batches that were given. After the end of an epoch
        the state is the start of the next one.
        """
        state = self._bookmark.state(self.engine.producer.drive(getattr, self, "_fingerprint"))
        if not self._orders_itself:
            state["sampler_epoch"] = getattr(self.sampler, "epoch", 0)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next ``iter(loader)`` continue where ``state_dict()`` was called. On several ranks every rank must load a state.

        If the number of ranks is the same and each loads its own state, they continue with the very next batch. With another number of ranks, or if
        all ranks load the state of one rank, they continue with the first round that the saving rank had not given completely. A loader made without
        ``logical_ranks`` takes the state's number, and one made without a seed takes the state's seed.

        Raises:
            ValueError: ``state`` is no state, or belongs to other data or arguments; the loader is unchanged.
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
                    "a loader with a user's sampler or batch_sampler has no state, because the sampler orders the seeds; save the sampler's own state"
                )
            found["sampler"] = settings_of(self.sampler)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copies and pickles.

        A copy continues as this loader would, with the same next epoch and ``state_dict()``, but with its own threads and statistics.
        """
        if isinstance(self.data, PartitionedGraph):
            raise TypeError(
                "a loader of a partitioned graph cannot be copied or pickled: its connections and memory maps belong to this process; make a new one from "
                "salientpp.load(root) where you need it, and load this loader's state_dict() to continue from there"
            )
        engine = copy.copy(self.engine)
        own = {
            "engine": engine,
            "_bookmark": self._bookmark.copy(engine.basis.epochs),
            "_measured": self._measured.copy(),
        }
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.sampler, OfLoader):
            self.sampler.belong_to(self)

    def __copy__(self) -> EngineLoader:
        """Returns a copy with the same tensors and the same objects of the user's, among them the data and a ``neighbor_sampler``."""
        other = type(self).__new__(type(self))
        other.__setstate__(copied(self.__getstate__()))
        if isinstance(self.sampler, OfLoader):
            batches: Any = copy.copy(self.batch_sampler)
            batches.sampler = other.sampler
            other.__dict__["batch_sampler"] = batches
        return other

    # --- reports ------------------------------------------------------------------------------------------

    @property
    def cooperation(self) -> Cooperation | None:
        """The ranks that compute each batch together (``cooperate``), or None."""
        return self.engine.basis.cooperation

    @property
    def looks_ahead(self) -> bool:
        """True if the cache of this loader changes its rows from batch to batch (``lookahead``)."""
        way = self.engine.way(Cache)
        return way is not None and way.finds_late

    @property
    def cache(self) -> FeatureCache | TypedFeatureCache:
        """The cached rows; pass them to another loader as ``cache=``.

        Raises:
            RuntimeError: this loader looks ahead.
        """
        way = self.engine.way(Cache)
        if self.looks_ahead:
            raise RuntimeError(
                "a cache that looks ahead cannot be shared, because its rows change from batch to batch; make the other loader with its own "
                "replication_factor"
            )
        if way is None or not len(way.cache):
            way = self.engine.way(GivenCache) or way
        return FeatureCache.empty() if way is None else way.cache

    def memory_used(self) -> dict[str, int]:
        """Returns the bytes of memory that this loader holds, by purpose.

        Each tier has an entry. ``graph`` is the topology, where memory-mapped arrays count in full. ``batches`` are in the pipeline, and ``exchange`` are rows
        on their way from or to other ranks. ``lookahead`` adds the index of the cache, the ids of the planned batches and the probabilities.

        On the CPU, ``batches`` is the memory that the pool of buffers holds. On another device it is an upper bound: the size of the largest batch
        so far, times the number of batches that are on the device at once. With ``pad='fixed'``, ``batches`` is an upper bound that is known before the
        first batch, for batches that do not exceed the size. With ``lookahead`` and a topology in parts, ``batches`` includes the drawn batches that wait.
        """
        return self.engine.memory()

    def stats(self) -> LoaderStats:
        """Returns the statistics since construction or ``reset_stats``; filling the cache is not counted."""
        return LoaderStats.of(self.engine)

    def reset_stats(self) -> None:
        """Resets the statistics. Call it between epochs."""
        self.engine.close()
        self.engine.reset()
        self._measured.reset(self.engine)

    def metrics(self, *, all_ranks: bool = False, max_age: float = 1.0) -> dict[str, float]:
        """Returns numbers of the epoch that was begun last, by name: rates, waiting, stages, rows and bytes by tier, queues and memory.

        :data:`salientpp.loader.metrics.METRICS` describes them. Names that begin with ``recent.`` are numbers of the last 100 batches.

        Args:
            all_ranks: also compare the ranks. Collective: every rank calls this method at the same place of its script.
            max_age: seconds for which the numbers of an earlier call are returned again. So every step may call this method.

        Returns:
            Numbers by name. Later calls may return the same dictionary, so it cannot be changed; ``{**loader.metrics(), "loss": loss}`` is a new one.
        """
        made, found = self._measured.last
        if perf_counter() - made < max_age and not all_ranks:
            return found
        found = self._measured.metrics(self.engine, self.memory_used)
        return found | self._measured.comparison(self.engine, found) if all_ranks else found

    @contextlib.contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Writes a Chrome trace of the epochs that start inside the ``with`` block, with a track per stage and per worker thread.

        Open the file at ui.perfetto.dev or chrome://tracing. On CUDA the spans show the host's time; torch.profiler shows the same stages as
        ranges named ``salientpp::<stage>`` beside the kernels.
        """
        write = self.engine.trace_to(path)
        try:
            yield
        finally:
            write()

    def _aff_init_fn(self, worker_id: int) -> None:
        # PyG's version pins the whole process; here a worker is a thread.
        cores = self.loader_cores[worker_id]
        os.sched_setaffinity(0, cores if isinstance(cores, list) else [cores])
        self._old_worker_init_fn(worker_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(text for text, _ in self._facts().values())})"

    def _repr_html_(self) -> str:
        return html(Table(["", type(self).__name__], [(name, value) for name, (_, value) in self._facts().items()]))

    def _facts(self) -> dict[str, tuple[str, str]]:
        """Returns the facts that a printed loader shows, by name: each as text for a line, and as the value beside its name in a table.

        It computes and sends nothing.
        """
        engine = self.__dict__.get("engine")
        if engine is None:
            return {}
        source = engine.basis.source
        facts = {"batches": _batches_in_words(self)}
        if isinstance(self.data, PartitionedGraph):
            placement = source.exchange.placement
            name, value, text = _parts_in_words(placement.own_parts, placement.num_parts)
            facts[name] = text, value
        own = getattr(self, "neighbor_sampler", None)
        if own is None or isinstance(own, str):  # 'device'
            name, value = "num_neighbors", str(source.sampler.num_neighbors.values)
        else:
            name, value = "neighbor_sampler", type(own).__name__
        facts[name] = f"{name} {value}", value
        for way in engine.ways:
            name = "lookahead" if way.finds_late else way.name
            value = way.cache.in_words if isinstance(way, (Cache, GivenCache)) else ""
            facts[name] = f"{name} {value}".rstrip(), value or "yes"
        return facts


def _batches_in_words(loader: EngineLoader) -> tuple[str, str]:
    size = "" if loader.batch_size is None else f" of {loader.batch_size:,}"
    if not loader._orders_itself:
        return f"batches of a sampler{size}", f"of a sampler{size}"
    number = f"{len(loader):,}"
    return f"{number} batches{size}", number + size


def _parts_in_words(parts: range, num_parts: int) -> tuple[str, str, str]:
    """Describes the parts whose seeds a rank visits. Returns name, value and text of this fact, see :meth:`EngineLoader._facts`."""
    if len(parts) == num_parts > 1:
        return "parts", f"all {num_parts:,}", f"all {num_parts:,} parts"
    several = len(parts) > 1
    name = "parts" if several else "part"
    value = f"{parts[0]} to {parts[-1]} of {num_parts:,}" if several else f"{parts[0]} of {num_parts:,}"
    return name, value, f"{name} {value}"


def _epoch_of(epoch: Any) -> int:
    number, real = as_integer(epoch), as_real(epoch)
    if number is None and real is not None and real.is_integer():
        number = int(real)
    if number is None or not 0 <= number < MOST_EPOCHS:
        raise ValueError(f"epoch must be an integer in [0, 2^62), got {epoch!r}")
    return number
