"""Base of NeighborLoader and LinkNeighborLoader: builds an engine from their arguments, and makes single batches for PyG's ``collate_fn`` and ``filter_fn``."""

from __future__ import annotations

import contextlib
import contextvars
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.arguments import as_integer
from salientpp.engine.agreement import Facts
from salientpp.engine.basis import Basis
from salientpp.engine.connected import connect_part, placement_of
from salientpp.engine.drawing.divided import divide
from salientpp.engine.drawing.on_device import check_device, draw_on_device
from salientpp.engine.epochs import Epochs
from salientpp.engine.producer import ByHand
from salientpp.engine.seeds import Seeds
from salientpp.engine.shares import Shares, check_units, seeds_by_part, seeds_of_parts
from salientpp.engine.source import BatchSource, open_partition, sources_in
from salientpp.engine.spans import VARIABLE, SpanFile
from salientpp.loader.announcement import announce
from salientpp.loader.bookmark import Bookmark
from salientpp.loader.construction import connect, facts_of, prepare_together
from salientpp.loader.cooperation import check_cooperation, seeds_per_batch, settings_of_batches
from salientpp.loader.description import description_of, measured_together
from salientpp.loader.fingerprint import fingerprint_of
from salientpp.loader.hosts import agree_on_hosts
from salientpp.loader.metrics import Measured
from salientpp.loader.order import GivenOrder, checked_positions
from salientpp.loader.padding import check_padding
from salientpp.loader.planned_loader import PlannedLoader
from salientpp.loader.pyg_arguments import SamplingOptions, check_names, check_order, normalise
from salientpp.loader.samplers import OrderedSampler, RanksSampler, ShuffledSampler
from salientpp.loader.values import Options
from salientpp.loader.vertex_options import check_of_edges
from salientpp.ranks.comm import Comm
from salientpp.ranks.hosts import checked_hosts
from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import BatchKeys
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Message
from salientpp.ways.cache import check_given
from salientpp.ways.sums.check import check_partial, why_no_sums

#: Largest batch size: vertices of an MFG are counted in 32 bits.
_MOST_SEEDS = 2**31 - 1

#: Keys of the batch that an overridden ``collate_fn`` is making; None if something else calls it.
_batch_keys: contextvars.ContextVar[BatchKeys | None] = contextvars.ContextVar("batch_keys", default=None)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Source, options and facts that one rank prepares without communication. The ranks then compare their facts, so that an error reaches all of them."""

    source: BatchSource
    facts: Facts
    options: Options  # checked
    placement: Placement  # if processes share an object, the placement has one part: the object


class BatchLoader(PlannedLoader):
    """Base of both loaders. Subclasses say which data they take and what their seeds are."""

    #: Types that ``data`` may have, besides a pair of stores.
    _kinds_of_data: tuple[type, ...]
    _kinds_in_words: str

    def __init__(self, data: Any, sampling: SamplingOptions, options: Options, kwargs: dict[str, Any]) -> None:
        self.data = data
        self.__dict__.update(vars(sampling))  # Lightning reads every argument from an attribute
        # PyG ignores these two as well: Lightning passes on whatever it finds in a loader.
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        self._announced = announce(self, data, sampling, options, kwargs)
        comm, self.device = connect(data, self._kinds_of_data, self._kinds_in_words, options, self._announced)
        self._hosts: tuple[int, ...] = ()
        if isinstance(data, PartitionedGraph):
            given = options.ranks_per_host, as_integer(options.logical_ranks) or 0, bool(sources_in(options.columns))
            self._hosts = agree_on_hosts(comm, data, *given, cooperates=options.cooperate is not None)
        else:
            checked_hosts(options.ranks_per_host)
        # From here on a mistake on one rank raises on every rank, so that none waits for a rank that raised.
        prepare = partial(self._prepare, comm, sampling, options, kwargs)
        prepared, everyone = prepare_together(comm, prepare, "make its loader")
        self.seed = everyone[0].seed
        self._calls = 0
        self._adapt_seeds(prepared.source.seeds, everyone)
        self._bookmark = self._make_bookmark(prepared, everyone)
        with comm.reporting("make its loader"):
            prepared.source.drawing.prepare()
            basis = self._make_basis(comm, prepared)
            if prepared.options.cooperate is not None:
                divide(basis, prepared.options.cooperate_split_by)
            self._make_engine(basis, prepared.options, everyone)
            self._pad_together()
            self._measured = Measured(SpanFile(folder, comm.rank) if (folder := os.environ.get(VARIABLE)) else None)
            traced = all(each.traces for each in everyone)
            self._measured_together = measured_together(basis, traced)
        if comm.size > 1:  # a rank without batches waits for no other later, so it hears here of another's error
            comm.gather_numbers([0])
        comm.seconds_waited = 0.0

    def _prepare(self, comm: Comm, sampling: SamplingOptions, options: Options, kwargs: dict[str, Any]) -> _Prepared:
        """Opens the data and checks the arguments, without other ranks. Raises an error for a wrong argument."""
        options = options.checked(self.device)
        if not hasattr(self, "input_nodes"):
            check_of_edges(type(self).__name__, options.memory_allow, kwargs)
        check_names(type(self), kwargs, options.declared)
        self._own_ways = options.own_ways
        # The value in use may differ from the given one. These attributes are set elsewhere.
        elsewhere = ("device", "seed", "cache", "timeout")
        self.__dict__.update({name: value for name, value in options.by_name.items() if name not in elsewhere})
        self._given_options = options
        normalise(kwargs)
        partitioned = isinstance(self.data, PartitionedGraph)
        source = self._open_source(comm, sampling)
        self._shuffle = shuffle = bool(kwargs.pop("shuffle", None) or False)
        if options.uneven is None:
            self.uneven = "wrap" if shuffle else "exact"
        self._orders_itself = check_order(kwargs, partitioned)
        self._init_data_loader(source, comm.size, kwargs)
        self._check_hooks(comm)
        draws_seed = shuffle and options.seed is None and kwargs.get("generator") is None
        share = options.checked_share(partitioned, self._orders_itself, draws_seed)
        if not partitioned:
            options.check_for_object()
        if options.partial_aggregation is not None:
            check_partial(self.data, source, options.partial_aggregation, options.partial_aggregation_weight)
        elif "sums" in options.memory_allow and why_no_sums(self.data, source) is None:
            check_partial(self.data, source, "mean", options.partial_aggregation_weight)
        if options.is_planned and not self._orders_itself:
            raise ValueError(
                "memory= must know an epoch's batches in advance, but your sampler decides them; leave memory out, and choose device_rows= yourself"
            )
        if options.logical_ranks_join and self._has_hooks:
            raise ValueError(
                f"{type(self).__name__} overrides collate_fn or filter_fn for batches of one logical rank; pass transform=, or leave logical_ranks['join'] out"
            )
        options.check_drawing(source.drawing)
        check_cooperation(source, options, self._hosts, self)
        placement = source.exchange.placement if share is None else Placement(*share, num_parts=1)
        check_units(source, placement)
        check_given(options.cache, source)
        if sampling.draws_on_device:
            check_device(self.device)
            draw_on_device(source.sampler, self.device, self.data)
        if options.pad is not None:
            check_padding(options.pad, self.data, source, getattr(self, "custom_cls", None))
        if options.pad_static and self.pin_memory:
            raise ValueError(
                "pad={'static': True} excludes pin_memory: a copy to a device may still read the pinned tensors when the next batch overwrites them; pass "
                "device= instead of pin_memory"
            )
        given = [getattr(self, name, None) for name in ("input_id", "input_time", "edge_label", "edge_label_time")]
        split = source.seeds.split if all(value is None for value in given) else None
        seeds = seeds_of_parts(source, placement, split) if partitioned else [[0, 1, source.seeds.number, ""]]
        facts = facts_of(source, seeds, options, self._settings(), self._hosts, kwargs.get("generator"))
        return _Prepared(source, self._with_facts_of_seeds(facts, source), options, placement)

    def _init_data_loader(self, source: BatchSource, num_ranks: int, kwargs: dict[str, Any]) -> None:
        """Initialises torch's ``DataLoader`` over the positions of the seeds."""
        if kwargs.get("multiprocessing_context") is not None:
            warnings.warn("multiprocessing_context has no effect: workers are threads", UserWarning, stacklevel=5)
            kwargs.pop("multiprocessing_context")
        positions: Any = range(source.seeds.number)  # torch uses only the length of a dataset
        if num_ranks > 1:
            kwargs["sampler"] = RanksSampler(self)
        elif self._orders_itself:
            # torch's random sampler refuses an empty dataset, but a rank may have no seeds.
            made = ShuffledSampler if self._shuffle and source.seeds.number > 0 else OrderedSampler
            kwargs["sampler"] = made(self, positions)
        with warnings.catch_warnings() if kwargs.get("num_workers") else contextlib.nullcontext():
            if kwargs.get("num_workers"):  # torch warns about the number of worker processes, but ours are threads
                warnings.filterwarnings("ignore", message="This DataLoader will create")
            torch.utils.data.DataLoader.__init__(  # not super(): PyG's loaders, also base classes, build a sampler of their own
                self, positions, shuffle=self._shuffle and not self._orders_itself, **kwargs
            )  # fmt: skip
        del self.__dict__["collate_fn"]  # set by torch; it would hide the method, which subclasses may override
        batch_size = as_integer(self.batch_size)
        if kwargs.get("batch_sampler") is None and (batch_size is None or not 1 <= batch_size <= _MOST_SEEDS):
            raise ValueError(f"batch_size must be 1 to {_MOST_SEEDS:,}, got {self.batch_size}")

    def _make_bookmark(self, prepared: _Prepared, everyone: Sequence[Facts]) -> Bookmark:
        source, options, partitioned = prepared.source, prepared.options, isinstance(self.data, PartitionedGraph)
        self._seeds_by_part = seeds_by_part(everyone)
        shares = Shares(
            source, self._seeds_by_part, self._mean_batch_size(prepared), self._shuffle, self.drop_last, self.uneven, options.logical_ranks_join,
            alone=options.share is not None, num_given=options.cooperate_batches,
        )  # fmt: skip
        order: Any = shares.order(prepared.placement, self.seed)
        if not self._orders_itself:
            order = GivenOrder(self.batch_sampler, source.seeds.number, order)  # type: ignore[arg-type]
        epochs = Epochs(self.seed, prepared.placement, order, options.shared_draws_block)
        adopts = partitioned and options.logical_ranks is None
        return Bookmark(epochs, shares, partitioned, options.logical_ranks_join, adopts, prepared.facts.seed_is_given)

    def _make_basis(self, comm: Comm, prepared: _Prepared) -> Basis:
        source, options, placement = prepared.source, prepared.options, prepared.placement
        return Basis(
            comm, source, self._bookmark.epochs, self.device, self._mean_batch_size(prepared), self._hosts,
            depth=options.depth, num_workers=self.num_workers, prefetch_factor=self.prefetch_factor or 2, dtype=options.dtype,
            pin_memory=bool(self.pin_memory), zero_copy=options.device_rows_zero_copy, marks_sizes=options.pad is None,
            repeats=getattr(source.sampler, "disjoint", False) or options.logical_ranks_join, transform_sampler_output=options.transform_sampler_output,
            has_budget=options.memory is not None and placement.num_storage_ranks > 0 and bool(placement.logical_ranks),
        )  # fmt: skip

    def _mean_batch_size(self, prepared: _Prepared) -> int:
        number, placement = prepared.source.seeds.number, prepared.placement
        return seeds_per_batch(self, prepared.options, number, placement, self._hosts)

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments, besides ``options`` and the sampler, on which batches depend. The ranks compare them, because they must be equal."""
        same = {name: getattr(self, name) for name in ("time_attr", "weight_attr", "batch_size")}
        return {**same, "shuffle": self._shuffle, "drop_last": bool(self.drop_last), "uneven": self.uneven}

    def _open_partition(
        self, comm: Comm, sampling: SamplingOptions, make_seeds: Callable[..., Seeds], messages: Sequence[Message] = ()
    ) -> BatchSource:
        """Connects this rank to the others of a partitioned graph, and opens the graph with the seeds from ``make_seeds(connected, sampler)``."""
        placement = placement_of(
            self.data, comm, self._given_options.logical_ranks, self._hosts, self.cooperate is not None
        )
        messages = [*messages, *(message for way in self._own_ways for message in way.messages)]
        connected = connect_part(self.data, comm, placement, messages)
        sampler = sampling.sampler_of_part(connected.held)
        own = {"columns": self.columns, "custom_cls": self.custom_cls, "send_as": self.send_as}
        return open_partition(connected, sampler, make_seeds(connected, sampler), **own)

    # Differences between loaders of vertices and of edges.

    def _open_source(self, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        """Opens ``data`` as the source of batches, with this loader's seeds and sampler. Subclasses implement it."""
        raise NotImplementedError

    def _with_facts_of_seeds(self, facts: Facts, source: BatchSource) -> Facts:
        return facts

    def _adapt_seeds(self, seeds: Seeds, everyone: Sequence[Facts]) -> None:
        """Changes this rank's seeds if they depend on the other ranks, such as labels of edges. ``everyone`` holds the facts of all ranks."""

    def _fingerprint_of_seeds(self) -> Mapping[str, Any]:
        return {}

    # --- single batches, and PyG's hooks ------------------------------------------------------------------

    def __call__(self, index: Tensor | Sequence[int]) -> Data:
        """Returns the batch of the seeds at these positions of ``input_nodes``. It works only with a single rank.

        Args:
            index: integer [B] positions, a list of them, or a mask with an entry per seed.

        Raises:
            ValueError: ``index`` has another type, or a position is out of range.
        """
        with self.engine.lock:
            self._calls += 1
            call = self._calls
        keys = self._bookmark.epochs.keys(-call, 0)  # a negative epoch shares no draws with epochs, which are >= 0
        return self._through_hooks(index, keys) if self._has_hooks else self._batch_of(index, keys)

    def collate_fn(self, index: Tensor | Sequence[int]) -> Any:
        """Makes the batch of the seeds at these positions, as PyG's method does.

        Subclasses call it, and so do libraries that build a ``DataLoader``. With ``filter_per_worker=False`` it returns the input of :meth:`filter_fn`.
        """
        keys = _batch_keys.get()
        if keys is None:
            # Keys come from torch's generator: in worker processes a count of calls would restart in every epoch.
            keys = self._bookmark.epochs.keys(-int(torch.randint(2**62, 2**63 - 1, (), device="cpu")), 0)
        if self.filter_per_worker is False:
            return self.engine.producer.drive(self._draw, index, keys)
        if self._overrides("filter_fn"):
            return self.filter_fn(self.engine.producer.drive(self._draw, index, keys))
        return self._batch_of(index, keys)

    def filter_fn(self, out: Any) -> Data | HeteroData:
        """Makes a batch from the sampler's output for some seeds, as PyG's method does. If given a batch, returns it unchanged."""
        if not isinstance(out, (SamplerOutput, HeteroSamplerOutput)):
            return out
        self._check_is_alone()
        return self.engine.producer.drive(self._filtered, out)

    @property
    def input_data(self) -> NodeSamplerInput | EdgeSamplerInput:
        """All seeds. PyG's loaders have an attribute of this name, too."""
        return self.engine.basis.source.seeds.inputs

    def _overrides(self, name: str) -> bool:
        """Returns True if a subclass or this object overrides ``name``, one of PyG's hooks."""
        return name in self.__dict__ or getattr(type(self), name) is not getattr(BatchLoader, name)

    @property
    def _has_hooks(self) -> bool:
        return self._overrides("collate_fn") or self._overrides("filter_fn")

    def _check_hooks(self, comm: Comm) -> None:
        if comm.size > 1 and self._has_hooks:
            name = "collate_fn" if self._overrides("collate_fn") else "filter_fn"
            raise ValueError(
                f"{type(self).__name__} overrides {name}, but several ranks make batches in stages, which do not call it; pass transform= "
                "(called with every batch) or transform_sampler_output= instead"
            )

    def _check_is_alone(self) -> None:
        if self.engine.basis.comm.size > 1:
            raise RuntimeError(
                "cannot make a single batch on several ranks, because the other ranks would not take part; iterate over the loader instead"
            )

    def _through_hooks(self, index: Any, keys: BatchKeys) -> Any:
        """Makes a batch with the user's own ``collate_fn`` or ``filter_fn``, since the stages of the engine would not call them."""
        token = _batch_keys.set(keys)
        try:
            out = self.collate_fn(index.tolist() if isinstance(index, Tensor) else index)
            return self.filter_fn(out) if isinstance(out, (SamplerOutput, HeteroSamplerOutput)) else out
        finally:
            _batch_keys.reset(token)

    def _batch_of(self, index: Any, keys: BatchKeys) -> Data:
        return self.engine.producer.drive(lambda: self._filtered(self._draw(index, keys)))

    def _draw(self, index: Any, keys: BatchKeys) -> SamplerOutput | HeteroSamplerOutput:
        self._check_is_alone()
        source = self.engine.basis.source
        return source.drawing.draw([(checked_positions(index, source.seeds.number, "index"), keys)])

    def _filtered(self, mfg: SamplerOutput | HeteroSamplerOutput) -> Data | HeteroData:
        input_id = mfg.metadata[0] if mfg.metadata else None
        if input_id is None:
            raise ValueError(
                "metadata of a sampler's output must begin with the ids of the seeds (input_id), as collate_fn of PyG's loaders leaves them; got no metadata"
            )
        self.engine.producer.workers.transform = self.transform_sampler_output
        # The pipeline counts the rows of an epoch. With hooks no pipeline runs, so they are counted here.
        batch = self.engine.producer.batch_of(mfg, len(input_id), counts=self._has_hooks)
        return batch if self._finishing is None else self._finishing(batch)

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Accelerator.prepare of Hugging Face reads this attribute before it replaces a loader by one that divides its batches.
        if self.engine.basis.comm.size > 1 or self.share is not None:
            raise ValueError(
                "Accelerator.prepare would divide the batches among the processes a second time, and this loader has divided them already; leave it out of "
                "prepare(), and pass device=accelerator.device to the loader"
            )
        return False

    def _description(self) -> dict[str, Any]:
        return {**description_of(self, self._given_options), **self._measured_together}

    def _finish(self) -> tuple[Callable[[Any], Any] | None, ByHand | None]:
        self._check_hooks(self.engine.basis.comm)
        # With hooks, filter_fn finishes the batch.
        return (None, self._through_hooks) if self._has_hooks else (self._finishing, None)

    def _values_of_fingerprint(self) -> dict[str, Any]:
        basis, given = self.engine.basis, self._given_options
        settings = settings_of_batches(self._settings(), given, basis.batch_size)
        found = fingerprint_of(self.data, basis.source, self._seeds_by_part, given, settings)
        return {**found, **self._fingerprint_of_seeds()}
