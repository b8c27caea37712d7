"""What do all loaders have in common? PyG's batches, made ahead of the training loop.

On an object in memory a loader is one process's and needs no process group. On a partitioned graph it is one rank of many: every
rank constructs its loaders in the same order (construction agrees on sizes and fills the cache, which is collective),
and then iterates at its own pace; :mod:`salientpp.minibatch.epoch` says how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.mixin import AffinityMixin, LogMemoryMixin, MultithreadingMixin
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.comm import DEFAULT_TIMEOUT, Comm, go_astray
from salientpp.graph.from_pyg import count_vertices
from salientpp.minibatch.batch import Column, DataTemplate, PartitionTemplate, StoreTemplate
from salientpp.minibatch.epoch import Epoch, Run
from salientpp.minibatch.neighbor_sampler import NeighborSampler, is_remote
from salientpp.minibatch.stages import BatchStages, Request, Sampled
from salientpp.minibatch.state import Progress, check_state, data_digest, inputs_digest, make_state
from salientpp.ops import use_huge_pages
from salientpp.pipeline import Pipeline, Trace, traced
from salientpp.plan.arguments import as_integer, as_real
from salientpp.plan.cache import Policy, check_policy, check_replication_factor, plan_cache, score
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.schedule import UNEVEN, Schedule, batch_key, share_size
from salientpp.plan.vip import inclusion_probability, typed_inclusion_probability
from salientpp.processes import Lock, Threads, after_fork, completed, forks
from salientpp.store.assembly import has_kernel
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange, Traffic
from salientpp.store.fetch import Fetch, InPlace, Packed
from salientpp.store.rows import RowSource, TensorRows, checked_rows
from salientpp.store.tiers import NO_IDS, IdSet, Tiers

#: Rows of less than this are gathered mostly from caches, where the size of a page does not matter.
_LARGE_BYTES = 64 * 2**20

#: Of a batch: vertices of an MFG are counted in 32 bits.
_MOST_SEEDS = 2**31 - 1

#: Samplers of torch's that give the same order again: Lightning puts them into a loader, and asks it for its state.
_KNOWN_ORDERS = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did since it was made, or since ``reset_stats``.

    Attributes:
        batches: given to the user.
        rows_gpu, rows_cpu, rows_cache, rows_remote: feature rows delivered, by the tier they came from. Batches that
            were under way when an epoch was left count too: their rows did cross the network.
        bytes_sent, bytes_received: to and from other ranks: counts, ids and rows.
        seconds_by_stage: time spent in each stage by the thread that drives the pipeline.
        seconds_waiting: time that the caller spent in ``next()``.
    """

    batches: int
    rows_gpu: int
    rows_cpu: int
    rows_cache: int
    rows_remote: int
    bytes_sent: int
    bytes_received: int
    seconds_by_stage: dict[str, float]
    seconds_waiting: float

    @property
    def rows(self) -> int:
        return self.rows_gpu + self.rows_cpu + self.rows_cache + self.rows_remote


@dataclass(frozen=True, eq=False)
class Source:
    """What a loader draws from: the kinds of data and of seeds differ in nothing else.

    Attributes:
        inputs: all seeds, in PyG's type; ``inputs[positions]`` is a batch of them.
        num_inputs: how many.
        sampler: knows the graph and how to draw from it.
        draw: its method for such inputs; makes an MFG of a batch of them.
        books: per vertex type, who owns which vertex. Only a graph of one type has several parts.
        rows: per vertex type, the rows of this part by name.
        template, keep_books: make a batch of an MFG and rows.
        exchanged: columns that every sampled vertex gets.
        seed_columns: columns that only seeds get.
        heat: per vertex type, how probably a batch needs each row; called if rows are to be kept on the device. None: rows are in
            that order.
        fingerprint: of the dataset.
        own: columns whose rows come from a source of the user's, and not from the data.
        split: the name of the seeds, if they have one that means the same on every rank.
    """

    inputs: NodeSamplerInput | EdgeSamplerInput
    num_inputs: int
    sampler: BaseSampler
    draw: Callable[..., SamplerOutput | HeteroSamplerOutput]
    books: Mapping[str | None, PartitionBook]
    rows: Mapping[str | None, Mapping[str, RowSource]]
    template: DataTemplate | StoreTemplate | PartitionTemplate
    keep_books: Callable[[Any, Any], None]
    exchanged: Sequence[Column]
    seed_columns: Sequence[Column]
    heat: Callable[[], Mapping[str | None, Tensor]] | None
    fingerprint: str
    own: Collection[Column] = frozenset()
    split: str | None = None

    @property
    def book(self) -> PartitionBook:
        return next(iter(self.books.values()))

    def rows_of(self, column: Column) -> RowSource:
        return self.rows[column[0]][column[1]]


class RanksSampler(torch.utils.data.DistributedSampler):
    """Positions that a rank of a partitioned graph visits in the loader's next epoch.

    The loader does not ask it. It is torch's ``DistributedSampler`` so that Lightning sees that the ranks have shared the seeds already.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = weakref.ref(loader)  # a circle would keep both

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        return iter(torch.cat([torch.empty(0, dtype=torch.int64), *loader._positions(loader._epoch_number)]).tolist())

    def __len__(self) -> int:
        return sum(map(len, self._loader()._positions(0)))

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the loader counts its epochs, and has a ``set_epoch``."""


class BatchLoader(torch.utils.data.DataLoader, AffinityMixin, MultithreadingMixin, LogMemoryMixin):
    """What :class:`NeighborLoader` and :class:`LinkNeighborLoader` have in common; they say what a :class:`Source` is.

    Args:
        data: what the user gave.
        open_source: makes the source; called once, inside the construction that all ranks share.
        kwargs: torch's ``DataLoader``'s.

    The others are as in :class:`NeighborLoader`.
    """

    #: What ``data`` may be, beside a pair of stores.
    _kinds_of_data: tuple[type, ...]
    _kinds_in_words: str

    def __init__(
        self,
        data: Any,
        open_source: Callable[[], Source],
        kwargs: dict[str, Any],
        *,
        transform: Callable | None,
        transform_sampler_output: Callable | None,
        gpu_fraction: float,
        device: torch.device | str | None,
        depth: int,
        seed: int | None,
        timeout: float | timedelta,
        zero_copy: bool,
        dtype: torch.dtype | None,
        gpu_cache_bytes: int = 0,
        replication_factor: float = 0.0,
        policy: Policy = "vip",
        cache: FeatureCache | None = None,
        rows: Mapping[Any, Any] | None = None,
        uneven: str = "wrap",
        process_group: Any = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        self.data = data
        self.transform = transform
        self.transform_sampler_output = transform_sampler_output
        self.replication_factor = replication_factor
        self.gpu_fraction = gpu_fraction
        self.policy = policy
        self.rows = rows
        self.depth = depth
        self.uneven = uneven
        self.zero_copy = zero_copy
        self.dtype = dtype
        self.gpu_cache_bytes = gpu_cache_bytes
        self.process_group = process_group
        self.share = share
        # As in PyG, for the sake of Lightning, which passes on what it finds in a loader.
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)

        error = None
        try:
            if not isinstance(data, self._kinds_of_data) and not is_remote(data):
                raise TypeError(f"data must be {self._kinds_in_words}, got {type(data).__name__}")
        except TypeError as raised:
            go_astray(raised)  # nobody can know which ranks would have made this loader
            raise
        try:
            self.device, checked_timeout = _checked_device(device), _checked_timeout(timeout)
        except Exception as raised:
            self.device, checked_timeout, error = torch.device("cpu"), DEFAULT_TIMEOUT, raised
        partitioned = isinstance(data, PartitionedGraph)
        if partitioned:
            self._comm = Comm.create(process_group, checked_timeout, self.device, error)
        elif error is not None:
            raise error
        else:
            self._comm = Comm(None, checked_timeout)

        # From here on a mistake on one rank is every rank's error, so that none waits for one that raised.
        source, facts = None, {}
        try:
            seed = self._check_arguments(cache, seed)
            _normalise(kwargs)
            source = open_source()
            # torch's random sampler refuses to have nothing to draw from; a rank without seeds is fine here.
            shuffle = bool(kwargs.pop("shuffle", None) or False)
            self._orders_itself = kwargs.get("sampler") is None and kwargs.get("batch_sampler") is None
            if not self._orders_itself:
                self._check_sampler(kwargs, partitioned)
            if kwargs.get("multiprocessing_context") is not None:
                warnings.warn("multiprocessing_context has no effect: workers are threads", UserWarning, stacklevel=3)
                kwargs.pop("multiprocessing_context")
            if self._comm.size > 1:
                kwargs["sampler"] = RanksSampler(self)
            with warnings.catch_warnings():
                # torch counts workers as processes and warns about more than there are cores; ours are threads.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                torch.utils.data.DataLoader.__init__(  # not PyG's, which the loaders are too
                    self, range(source.num_inputs), shuffle=shuffle and source.num_inputs > 0 and self._comm.size == 1, **kwargs
                )  # fmt: skip
            if kwargs.get("batch_sampler") is None and (as_integer(self.batch_size) is None or not 1 <= self.batch_size <= _MOST_SEEDS):
                raise ValueError(f"batch_size must be 1 to {_MOST_SEEDS:,}, got {self.batch_size}")
            place, places = self._exchange.placement.place, self._exchange.placement.ranks_per_part
            if share is not None:
                place, places = _checked_share(share, partitioned, self._orders_itself)
            _check_cache(cache, source, self._exchange.part_id)
            facts = self._facts(source, share_size(source.num_inputs, place, places), seed, shuffle, kwargs.get("generator"))
        except Exception as raised:
            error = raised
        except BaseException as raised:  # Ctrl-C
            self._comm.report_failure(f"rank {self._comm.rank}{self._comm.of} could not make its loader: {type(raised).__name__}")
            raise
        everyone = self._comm.gather_facts({**facts, "error": None if error is None else f"{type(error).__name__}: {error}"})
        try:
            if error is not None:
                raise error
        finally:
            error = None  # else this loader and its traceback would hold each other
        _check_agreement(everyone, self._comm)
        self.seed = everyone[0]["seed"]
        self._seed_is_given = seed is not None
        self._epoch_number = 0
        self._resume: int | None = None  # batches of that epoch given before, by a loaded state
        self._progress: Progress | None = None  # of the epoch begun last
        self._calls = 0
        self._source = source
        shared = share is not None
        self._schedule = Schedule(
            num_seeds=source.num_inputs,
            part_id=self._exchange.part_id,
            place=place,
            ranks_per_part=places,
            seeds_per_rank=[share_size(source.num_inputs, i, places) for i in range(places)] if shared else [facts["num_seeds"] for facts in everyone],
            rank=place if shared else self._comm.rank,
            batch_size=self._mean_batch_size,
            shuffle=shuffle,
            drop_last=self.drop_last,
            uneven=self.uneven,
            seed=self.seed,
        )
        try:
            self._held = self._topology = source.template.contents()  # what the tiers are made of, and the graph
            self._cache = FeatureCache.empty()
            tiers = self._make_tiers(cache, fill=any(facts["fills_cache"] for facts in everyone))
            self._source = dataclasses.replace(source, heat=None)  # a function of this construction, which could not be pickled
            self._start_threads(tiers)
        except BaseException as error:
            self._comm.report_failure(f"rank {self._comm.rank}{self._comm.of} could not make its loader: {type(error).__name__}: {error}")
            raise

    def _start_threads(self, tiers: Mapping[str | None, Tiers]) -> None:
        sources = [rows for of_type in tiers.values() for rows in of_type.home.rows.values()]
        large = [rows.tensor for rows in sources if isinstance(rows, TensorRows) and rows.nbytes >= _LARGE_BYTES]
        if large:
            # It takes seconds for gigabytes, and batches need not wait for it.
            threading.Thread(target=_use_huge_pages, args=(large,), name="salientpp-pages", daemon=True).start()
        self._workers = Threads(self.num_workers, "salientpp-sample") if self.num_workers else None
        self._greeting: _OncePerThread | None = None
        self._driver = Threads(1, "salientpp-drive")
        self._forks = forks()
        self._lock = Lock()  # whoever holds it begins an epoch
        on_host = self.device.type == "cpu"
        self._fetch = Fetch(
            tiers=tiers,
            exchange=self._exchange,
            columns=self._source.exchanged,
            seed_columns=self._source.seed_columns,
            own=InPlace(BufferPool()) if on_host else Packed(self.device),
            served=InPlace() if self._comm.device.type == "cpu" else Packed(self._comm.device),
        )
        self._stages = BatchStages(
            fetch=self._fetch,
            template=self._source.template,
            keep_books=self._source.keep_books,
            submit=Threads(1, "salientpp-gather").submit,
            device=self.device,
            dtype=self.dtype,
            pin_memory=bool(self.pin_memory) and on_host and torch.accelerator.is_available(),
            own=self._source.own,
            held=self._held,
        )
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._run: Run | None = None  # the epoch that is not over yet
        self._background_failure: Exception | None = None
        self.reset_stats()

    # --- construction -------------------------------------------------------------------------------------

    def _check_arguments(self, cache: FeatureCache | None, seed: int | None) -> int | None:
        """Raise on a wrong argument; numbers become Python's. The seed."""
        gpu_fraction, gpu_cache_bytes, depth = as_real(self.gpu_fraction), as_integer(self.gpu_cache_bytes), as_integer(self.depth)
        if gpu_fraction is None or not 0 <= gpu_fraction <= 1:
            raise ValueError(f"gpu_fraction must be in [0, 1] (the part of a part's rows kept on the device), got {self.gpu_fraction!r}")
        self.replication_factor = check_replication_factor(self.replication_factor)
        check_policy(self.policy)
        if cache is not None and not isinstance(cache, FeatureCache):
            raise TypeError(f"cache must be the cache of another loader (loader.cache), got {type(cache).__name__}")
        if cache is not None and self.replication_factor > 0:
            raise ValueError("pass either cache= or replication_factor=, not both: the size of a given cache is its maker's")
        if gpu_cache_bytes is None or gpu_cache_bytes < 0:
            raise ValueError(f"gpu_cache_bytes must be an integer >= 0 (device memory for cached rows), got {self.gpu_cache_bytes!r}")
        if cache is not None and gpu_cache_bytes:
            raise ValueError("gpu_cache_bytes is for a cache that the loader makes; a given cache has its device rows from its maker")
        if not isinstance(self.zero_copy, bool):
            raise ValueError(f"zero_copy must be True or False, got {self.zero_copy!r}")
        if self.zero_copy and self.device.type == "cuda" and not has_kernel():
            raise ValueError("zero_copy needs Triton, which is not installed; `pip install triton`, or leave zero_copy out")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype (of delivered x) or None, got {self.dtype!r}")
        if depth is None or depth < 1:
            raise ValueError(f"depth must be an integer >= 1 (batches in flight), got {self.depth!r}")
        if seed is not None and as_integer(seed) is None:
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        if not isinstance(self.uneven, str) or self.uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {self.uneven!r}")
        self.gpu_fraction, self.gpu_cache_bytes, self.depth = gpu_fraction, gpu_cache_bytes, depth
        return None if seed is None else as_integer(seed)

    @staticmethod
    def _check_sampler(kwargs: dict[str, Any], partitioned: bool) -> None:
        name = "sampler" if kwargs.get("sampler") is not None else "batch_sampler"
        if partitioned:
            raise ValueError(f"{name}= is for a Data or HeteroData object: the ranks of a partitioned graph agree on the order of their seeds")
        if not hasattr(kwargs[name], "__len__"):
            raise ValueError(f"{name} must have a length (how much it gives in an epoch), got {type(kwargs[name]).__name__} without __len__")

    def _open_data(self, data: Any, gather: Sequence[str], sampler: BaseSampler, custom_cls: type | None, **rest: Any) -> Source:
        """The source of an object that one process holds, whatever its seeds are."""
        if gather not in ("x", ["x"], ("x",)):
            raise ValueError("gather is for partitioned graphs: on a Data object every attribute comes for every sampled vertex")
        if custom_cls is not None and not is_remote(data):
            raise ValueError("custom_cls is for a pair of FeatureStore and GraphStore; batches of a Data are what the Data is")
        books = {type_: PartitionBook.trivial(size) for type_, size in count_vertices(data).items()}
        own = self._own_rows({type_: book.num_vertices for type_, book in books.items()})
        if own and is_remote(data):
            raise ValueError("rows is for a Data, a HeteroData or a partitioned graph: rows of a FeatureStore come from that store")
        template = StoreTemplate(*data, custom_cls) if is_remote(data) else DataTemplate(data, own)
        self._exchange = Exchange(self._comm, next(iter(books.values())))
        columns = {**_sources(template.columns()), **own}
        return Source(
            sampler=sampler,
            books=books,
            rows=_by_type(books, columns),
            own=frozenset(own),
            template=template,
            exchanged=list(columns),
            seed_columns=[],
            fingerprint="",
            **rest,
        )

    def _own_rows(self, sizes: Mapping[str | None, int]) -> dict[Column, RowSource]:
        """The user's ``rows``, checked; ``sizes`` says how many each vertex type must have."""
        if self.rows is not None and not isinstance(self.rows, Mapping):
            raise TypeError(f"rows must map names of attributes to tensors or sources of rows, got {type(self.rows).__name__}")
        own = {}
        for key, value in (self.rows or {}).items():
            type_, name = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
            if type_ not in sizes or not isinstance(name, str):
                known = "names of attributes" if None in sizes else f"(node type, name) with a node type of the data ({', '.join(sizes)})"
                raise ValueError(f"the keys of rows must be {known}, got {key!r}")
            own[type_, name] = checked_rows(value, f"rows[{key!r}]", sizes[type_])
        return own

    @property
    def _mean_batch_size(self) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return max(1, -(-len(self.dataset) // max(1, len(self.batch_sampler))))

    def _facts(self, source: Source, num_seeds: int, seed: int | None, shuffle: bool, generator: torch.Generator | None) -> dict[str, Any]:
        """What ranks tell each other at construction, see :func:`_check_agreement`; JSON values."""
        exchange = self._exchange
        # Ranks of one part split its seeds between them.
        digest = inputs_digest(source.inputs) if exchange.placement.ranks_per_part > 1 else ""
        settings = source.sampler.settings() if isinstance(source.sampler, NeighborSampler) else {}
        return {
            "seed": int(torch.randint(2**62, (), generator=generator)) if seed is None else seed,
            "seed_is_given": seed is not None,
            "num_seeds": num_seeds,
            "fills_cache": self.replication_factor > 0,
            "same": {
                "dataset": source.fingerprint,
                "input_nodes": source.split or "ids or a mask",
                **{name: bool(value) if name == "replace" else value for name, value in settings.items()},
                "batch_size": self.batch_size,
                "shuffle": shuffle,
                "drop_last": bool(self.drop_last),
                "uneven": self.uneven,
                "depth": self.depth,
                "dtype": str(self.dtype),
                "gather": [[column[1], str(source.rows_of(column).dtype), list(source.rows_of(column).shape[1:])] for column in source.exchanged],
            },
            "same_in_part": {"part": exchange.part_id, "input_nodes": digest},
        }

    def _make_tiers(self, cache: FeatureCache | None, fill: bool) -> dict[str | None, Tiers]:
        """The tiers by vertex type, with the given cache, or with one of this loader's own if any rank has one to ``fill`` (that is collective)."""
        source, part_id = self._source, self._exchange.part_id
        num_hot = {type_: int(self.gpu_fraction * book.size_of(part_id)) for type_, book in source.books.items()}
        heat = source.heat() if source.heat is not None and any(num_hot.values()) else None
        made = {}
        for type_, book in source.books.items():
            hot = torch.arange(num_hot[type_])
            if heat is not None:
                hot = torch.sort(heat[type_], descending=True, stable=True).indices[: len(hot)].sort().values
            seeds_only = [name for owner, name in source.seed_columns if owner == type_]
            made[type_] = Tiers.of(
                book, part_id, source.rows[type_], device=self.device, gpu_ids=hot, zero_copy=self.zero_copy, seeds_only=seeds_only
            )  # fmt: skip
        has_others = source.book.num_parts > 1  # then there is one type
        if fill and has_others and source.exchanged:
            self._cache = self._fetch_cache(made[None])
        if cache is not None:
            self._cache = cache
        if self.zero_copy:
            self._cache = self._cache.pinned()
        if has_others:
            made[None] = dataclasses.replace(made[None], copies=self._cache.tiers(self.zero_copy))
        return made

    def _read_anew(self) -> None:
        """Take what a ``Data`` holds now for the rows that the pipeline brings. Without this batches are right too, but made twice."""
        stages, fetch, source = self._stages, self._fetch, self._source
        contents = source.template.contents()
        if contents is None or contents.equals(stages.held) or any(run.is_under_way for run in self._runs):
            return
        edges = contents.changed_edges(self._topology)
        if edges:
            names = ", ".join("the edges of data" if key is None else f"the edges of data[{key!r}]" for key in edges)
            warnings.warn(
                f"{names} have changed since this loader was made; as in PyG it goes on with the graph as it was. Make a new loader",
                UserWarning,
                stacklevel=4,
            )
            self._topology = contents
        own = {column: source.rows_of(column) for column in source.exchanged if column in source.own}
        columns = {**_sources(source.template.columns()), **own}
        self._source = source = dataclasses.replace(source, rows=_by_type(source.books, columns), exchanged=list(columns))
        fetch.tiers = {
            type_: Tiers.of(
                tiers.book, tiers.part_id, source.rows[type_], device=self.device, zero_copy=self.zero_copy,
                gpu_ids=tiers.near[0].members.ids if tiers.near else NO_IDS,
            )
            for type_, tiers in fetch.tiers.items()
        }  # fmt: skip
        fetch.columns = source.exchanged
        self._held = stages.held = contents

    def _fetch_cache(self, tiers: Tiers) -> FeatureCache:
        source, members, scores = self._source, NO_IDS, None
        if self.replication_factor > 0:
            scores = self._scores()
            members = plan_cache(scores, source.book, tiers.part_id, self.replication_factor)
        home = {name: tiers.home.rows[name] for _, name in source.exchanged}
        cache = self._exchange.fetch_cache(home, IdSet.of(members, source.book.num_vertices))
        cache = dataclasses.replace(cache, owner=(source.fingerprint, tiers.part_id))
        return cache.on_device(scores, self.gpu_cache_bytes, self.device) if len(members) else cache

    def _scores(self) -> Tensor:
        source, sampler = self._source, self._source.sampler
        seeds, part_id = source.inputs.node, self._exchange.part_id
        return score(self.policy, self.data.workload(part_id, seeds, sampler.fanouts[0], self.batch_size, sampler.replace))

    def __call__(self, index: Tensor | Sequence[int]) -> Data:
        """The batch of the seeds at these positions of ``input_nodes``; on one rank.

        Args:
            index: integer [B] positions, a list of them, or a mask with an entry per seed.

        Raises:
            ValueError: it is something else, or a position is out of range.
        """
        with self._lock:
            self._calls += 1
            call = self._calls
        return self._batch_of(index, -call)  # epochs count up from 0, so the draws of calls are their own

    def _batch_of(self, index: Tensor | Sequence[int], epoch: int) -> Data:
        if self._comm.size > 1:
            raise RuntimeError("a single batch cannot be asked for on several ranks: the others would not answer; iterate instead")
        positions = _checked_positions(index, self._source.num_inputs, "index")
        return self._drive(self._make_one, positions, epoch)

    def _make_one(self, positions: Tensor, epoch: int) -> Data:
        pipeline = Pipeline(self._stages.list(), depth=1, device=self.device)
        batch = pipeline.tick(Request(0, completed(self._sample, epoch, 0, positions))).batch
        return batch if self.transform is None else self.transform(batch)

    @property
    def collate_fn(self) -> Callable[[Sequence[int]], Data]:
        """Makes a batch of positions: for libraries that make a ``DataLoader`` of their own from the parts of this one."""
        return self._collate

    @collate_fn.setter
    def collate_fn(self, function: Callable) -> None:
        pass  # torch's constructor sets its own

    def _collate(self, index: Sequence[int]) -> Data:
        # The draws are torch's: in worker processes the count of calls would begin anew in every epoch.
        return self._batch_of(index, -int(torch.randint(2**62, 2**63 - 1, ())))

    def filter_fn(self, batch: Data) -> Data:
        """``batch`` itself: what :attr:`collate_fn` makes has its rows already. PyG's ``ZipLoader`` calls the two in turn."""
        return batch

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Hugging Face's Accelerator.prepare asks every loader for this before it makes one of its own, with a share of the batches.
        if self._comm.size > 1 or self.share is not None:
            raise ValueError(
                "Accelerator.prepare would share the batches among the processes once more, which this loader has done already; leave it out of "
                "prepare(), and pass device=accelerator.device to the loader"
            )
        return False

    # --- processes ----------------------------------------------------------------------------------------

    def _drive(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, in this thread; in a process that was forked since the loader was made, in a thread that started there."""
        return function(*args) if self._forks == forks() else self._driver.submit(function, *args).result()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which go on as this loader would: with the same next epoch, and ``state_dict()``; with threads and counts of their own."""
        if isinstance(self.data, PartitionedGraph):
            raise TypeError(
                "a loader of a partitioned graph cannot be copied or pickled: its connections and memory maps are this process's; make one from "
                "salientpp.load(root) where you need it, and give it this loader's state_dict() to go on from there"
            )
        progress = None if self._progress is None else dataclasses.replace(self._progress)
        return {**self.__dict__, "_progress": progress, "_run": None, "_runs": None, "_greeting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _runs=weakref.WeakSet(), _forks=forks())
        # Contents are told by their place in memory, which in a copy is another.
        self._held = self._topology = self._stages.held = self._source.template.contents()

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._schedule.num_batches if self._orders_itself else len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with the seed it fixes the order and all draws.

        After ``load_state_dict`` the number of the state's epoch keeps the state, and any other leaves it.
        """
        if int(epoch) != self._epoch_number:
            self._resume = None
        self._epoch_number = int(epoch)
        self._progress = None

    @property
    def has_state(self) -> bool:
        """Whether the order of the seeds can be had again: not with a sampler of the user's, beside torch's that have no state of their own."""
        return self._orders_itself or (type(self.batch_sampler) is torch.utils.data.BatchSampler and type(self.sampler) in _KNOWN_ORDERS)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: plain values, for ``torch.save`` or JSON. Each rank saves its own; see :mod:`salientpp.minibatch.state`.

        Inside an epoch, and after leaving it early, it counts the batches that were given; after the end it is the start of the next.
        """
        epoch, batches = self._epoch_number, self._resume or 0
        if self._progress is not None and not self._progress.ended:
            epoch, batches = self._progress.epoch, self._progress.batches
        state = make_state(epoch, batches, self.seed, self._drive(getattr, self, "_fingerprint"))
        if not self._orders_itself:
            state["sampler_epoch"] = getattr(self.sampler, "epoch", 0)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter(loader)`` go on where ``state_dict()`` was called; on several ranks every rank loads its own state.

        A loader that was made without a seed takes the state's.

        Raises:
            ValueError: the state is of other data, arguments or another rank, or none at all; the loader stays as it was.
        """
        given_seed = self.seed if self._seed_is_given else None
        epoch, batches, seed = check_state(state, self._drive(getattr, self, "_fingerprint"), len(self), given_seed)
        if not self._orders_itself and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(state.get("sampler_epoch", 0))
        self.seed = seed
        self._schedule = dataclasses.replace(self._schedule, seed=seed)
        self._epoch_number, self._resume, self._progress = epoch, batches, None

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        sampler = self._source.sampler
        ours = isinstance(sampler, NeighborSampler)
        partitioned = isinstance(self.data, PartitionedGraph)
        return {
            "dataset": self.data.fingerprint if partitioned else data_digest(self.data, sampler.arrays() if ours else []),
            "input_nodes": inputs_digest(self._source.inputs),
            **(sampler.settings() if ours else {"neighbor_sampler": type(sampler).__name__}),
            "batch_size": self.batch_size,
            "shuffle": self._schedule.shuffle,
            "drop_last": self.drop_last,
            "uneven": self.uneven,
            "world_size": self._comm.size if self.share is None else self.share[1],
            "rank": self._schedule.rank,
            **({"rows": self._describe(self.rows)} if self.rows else {}),
            **({} if self._orders_itself else {"sampler": self._sampler_settings()}),
        }

    def _sampler_settings(self) -> list[Any]:
        """Of a sampler of torch's whose order is known, what it depends on beside its epoch."""
        if not self.has_state:
            raise ValueError("a loader with a sampler or batch_sampler of its own has no state: the order of the seeds is that sampler's")
        # Not its rank: Lightning keeps rank 0's state for all.
        fields = ("num_replicas", "shuffle", "seed", "drop_last")
        return [type(self.sampler).__name__, len(self.sampler), *(getattr(self.sampler, name) for name in fields if hasattr(self.sampler, name))]

    def _describe(self, names: Iterable[Any]) -> list[Any]:
        """Plain values: dtype and shape of the rows of these attributes."""
        columns = {name: name if isinstance(name, tuple) else (None, name) for name in names}
        return [[str(name), str(self._source.rows_of(column).dtype), list(self._source.rows_of(column).shape)] for name, column in columns.items()]

    def __iter__(self) -> Iterator[Data]:
        self._comm.check_process()
        with self._lock:
            self._finish_epoch()
            self._check_files()
            if self.worker_init_fn is not None and (self._greeting is None or not self.persistent_workers):
                self._greeting = _OncePerThread(self.worker_init_fn)
            self._drive(self._read_anew)
            run = self._drive(Run, self, self._epoch_number, self._resume)
            self._runs.add(run)
            self._progress, self._resume = run.progress, None
            self._epoch_number += 1
            self._run = run
            return Epoch(run)

    def _finish_epoch(self) -> None:
        """On several ranks, leave an unfinished epoch and wait until all ranks have."""
        run = self._run
        if run is not None and self._comm.size > 1:
            run.check_thread()
            run.leave()
            run.join()
        if self._background_failure is not None:
            raise self._background_failure

    def _check_files(self) -> None:
        """Raise, here and on the other ranks, where a file of the dataset was cut short."""
        if isinstance(self.data, PartitionedGraph):
            try:
                self.data.check_sizes()
            except DatasetError as error:
                self._comm.report_failure(f"rank {self._comm.rank} cannot begin an epoch: {error}")
                raise

    def _positions(self, epoch: int) -> list[Tensor]:
        """The epoch's batches, as positions among the seeds."""
        if self._orders_itself:
            return self._schedule.batches(epoch)
        return [_checked_positions(batch, self._source.num_inputs, "a batch of the sampler") for batch in self.batch_sampler]

    def _request(self, epoch: int, index: int, positions: Tensor) -> Request:
        submit: Callable[..., Any] = completed if self._workers is None else self._workers.submit
        return Request(index, submit(self._work_on_sample, epoch, index, positions))

    def _work_on_sample(self, epoch: int, index: int, positions: Tensor) -> Sampled:
        if self._workers is not None and self._greeting is not None:
            self._greeting()
        with traced(self._stages.trace, f"worker: {threading.current_thread().name}", index):
            return self._sample(epoch, index, positions)

    def _sample(self, epoch: int, index: int, positions: Tensor) -> Sampled:
        mfg = self._draw(self._source.inputs[positions], batch_key(self.seed, epoch, self._schedule.rank, index))
        metadata = mfg.metadata
        if self.transform_sampler_output is not None:
            mfg = self.transform_sampler_output(mfg)
            mfg.metadata = metadata if mfg.metadata is None else mfg.metadata
        permutation = self._source.sampler.edge_permutation
        if permutation is not None:
            mfg.edge = _users_edge_ids(mfg.edge, permutation)
        return self._stages.prepare(index, mfg, positions.numel())

    def _draw(self, inputs: NodeSamplerInput | EdgeSamplerInput, key: int) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of a batch's inputs; a sampler of the user's takes no key."""
        source = self._source
        mfg = source.draw(inputs, key=key) if isinstance(source.sampler, NeighborSampler) else source.draw(inputs)
        if mfg.metadata is None and isinstance(inputs, NodeSamplerInput):
            mfg.metadata = (inputs.input_id, inputs.time)
        return mfg

    def _idle_request(self, index: int, leaving: bool) -> Request:
        return Request(index, completed(Sampled, index, self._fetch.look_up({}), leaving))

    # --- reports ------------------------------------------------------------------------------------------

    @property
    def cache(self) -> FeatureCache:
        """The cached rows; give it to another loader as ``cache=``."""
        return self._cache

    def memory(self) -> dict[str, int]:
        """Bytes held, by tier, of the topology (memory-mapped arrays count in full), and of ``batches`` under way.

        The latter on the CPU is what the pool of buffers holds; on another device what the largest batch so far took there, times the
        batches that are on the device at once, at most.
        """
        memory = [tiers.memory() for tiers in self._fetch.tiers.values()]
        held = self._new_pipeline().num_past("copy_to_device") + 1  # and the one that the caller has
        return {
            **{tier: sum(of_type[tier] for of_type in memory) for tier in memory[0]},
            "graph": getattr(self._source.sampler, "nbytes", 0),
            "batches": self._fetch.own.bytes_under_way(held),
        }

    def _new_pipeline(self) -> Pipeline:
        stages = self._stages
        return Pipeline(
            stages.list(), depth=self.depth, device=self.device, rank=self._comm.rank, trace=stages.trace, hold=self._fetch.own.holds
        )  # fmt: skip

    def stats(self) -> LoaderStats:
        """What happened since construction or ``reset_stats``; filling the cache is not counted."""
        rows, traffic = self._fetch.counts, self._exchange.traffic
        return LoaderStats(
            batches=self._batches_given,
            rows_gpu=rows["gpu"],
            rows_cpu=rows["cpu"],
            rows_cache=rows["cache"],
            rows_remote=rows["remote"],
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds_by_stage=dict(self._seconds_by_stage),
            seconds_waiting=self._seconds_waiting,
        )

    def reset_stats(self) -> None:
        """Start counting anew; between epochs."""
        self._finish_epoch()
        self._fetch.counts.clear()
        self._exchange.traffic = Traffic()
        self._batches_given = 0
        self._seconds_waiting = 0.0
        self._seconds_by_stage = {stage.name: 0.0 for stage in self._stages.list()}

    @contextlib.contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Write a Chrome trace of the epochs started inside the ``with`` block: a track per stage and per worker thread.

        Open it at ui.perfetto.dev or chrome://tracing. On CUDA the spans are the host's; torch.profiler shows the same stages as
        ranges named ``salientpp::<stage>`` beside the kernels.
        """
        self._stages.trace = trace = Trace()
        try:
            yield
        finally:
            self._stages.trace = None
            Path(path).write_text(json.dumps(trace.to_chrome()))

    def _aff_init_fn(self, worker_id: int) -> None:
        # PyG's pins the process; here a worker is a thread.
        cores = self.loader_cores[worker_id]
        os.sched_setaffinity(0, cores if isinstance(cores, list) else [cores])
        self._old_worker_init_fn(worker_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _checked_positions(index: Any, num_inputs: int, name: str) -> Tensor:
    """int64 [B] positions among the seeds, of positions or of a mask."""
    try:
        index = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must hold positions of seeds, or a mask of them, got {type(index).__name__} ({error})") from None
    index = index.cpu().flatten()
    if index.dtype == torch.bool:
        if index.numel() != num_inputs:
            raise ValueError(f"{name} as a mask must have an entry per seed, expected {num_inputs}, got {index.numel()}")
        return index.nonzero().flatten()
    if index.numel() and (index.dtype.is_floating_point or index.dtype.is_complex):  # an empty list becomes float32
        raise ValueError(f"{name} must hold integer positions of seeds, or a mask of them, got {index.dtype}")
    index = index.to(torch.int64)
    bad = ((index < 0) | (index >= num_inputs)).nonzero()
    if bad.numel():
        raise ValueError(f"{name} must hold positions of seeds in [0, {num_inputs}), got {int(index[bad[0]])} at place {int(bad[0])}")
    return index


def _sources(columns: Mapping[Column, Tensor]) -> dict[Column, RowSource]:
    return {column: TensorRows(rows) for column, rows in columns.items()}


def _by_type(books: Mapping[str | None, PartitionBook], columns: Mapping[Column, RowSource]) -> dict[str | None, dict[str, RowSource]]:
    return {type_: {name: rows for (owner, name), rows in columns.items() if owner == type_} for type_ in books}


def checked_sampler(sampler: Any, method: str) -> BaseSampler | None:
    """A user's own sampler, or None."""
    if sampler is not None and not callable(getattr(sampler, method, None)):
        raise TypeError(f"neighbor_sampler must be a torch_geometric.sampler.BaseSampler with {method}, got {type(sampler).__name__}")
    return sampler


def heat_of(sampler: BaseSampler, start: Mapping[str | None, Tensor], seeds: Tensor | None, batch_size: int) -> Mapping[str | None, Tensor]:
    """Per vertex type, how probably a batch needs each row.

    Args:
        start: per vertex type, float [N], the probability that a batch has the vertex as a seed; other types have no seeds.
        seeds: what ``start`` comes from, if that is drawing ``batch_size`` of these.
    """
    if not isinstance(sampler, NeighborSampler):
        raise ValueError(
            f"gpu_fraction needs to know how batches are drawn, which a {type(sampler).__name__} does not tell; "
            "pass a salientpp.NeighborSampler, or gpu_fraction=0"
        )
    if sampler.graph is not None and seeds is not None and sampler.fanouts[0]:
        heat = inclusion_probability(sampler.graph, seeds, sampler.fanouts[0], batch_size, include_seeds=True, replace=sampler.replace)
        return {None: heat}
    return typed_inclusion_probability(sampler.as_typed(), start, sampler.fanouts, include_seeds=True, replace=sampler.replace)


def _checked_share(share: Any, partitioned: bool, orders_itself: bool) -> tuple[int, int]:
    """Place and number of places of ``share=``."""
    if partitioned:
        raise ValueError("share= is for a Data or HeteroData object: the ranks of a partitioned graph share its seeds by themselves")
    if not orders_itself:
        raise ValueError("share= excludes sampler= and batch_sampler=: let the sampler give this process its share")
    whole = isinstance(share, (tuple, list)) and len(share) == 2 and all(isinstance(i, int) and not isinstance(i, bool) for i in share)
    if not whole or not 0 <= share[0] < share[1]:
        raise ValueError(f"share must be (rank, number of ranks), with 0 <= rank < number of ranks, got {share!r}")
    return share[0], share[1]


def _checked_timeout(timeout: Any) -> timedelta:
    seconds = as_real(timeout)
    if seconds == 0:
        return DEFAULT_TIMEOUT  # 0 is how torch says that none was given
    try:
        found = timeout if isinstance(timeout, timedelta) else timedelta(seconds=seconds)
    except (TypeError, OverflowError):  # no finite number, or too large a one
        found = timedelta(0)
    if found <= timedelta(0):
        raise ValueError(f"timeout must be > 0 and finite, in seconds or a timedelta (the longest wait for another rank), got {timeout!r}")
    return found


def _checked_device(device: torch.device | str | int | None) -> torch.device:
    """The CPU or a CUDA device that is there, with its number."""
    if device is None:
        return torch.device("cpu")
    number = torch.cuda.device_count()
    there = "the CPU" if number == 0 else f"the CPU or one of {number} CUDA device{'s' if number > 1 else ''}"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be {there}, got {device!r}") from error
    if found.type == "cuda" and found.index is None and number:
        found = torch.device("cuda", torch.cuda.current_device())
    if found.type != "cpu" and not (found.type == "cuda" and found.index is not None and found.index < number):
        why = "" if number or found.type != "cuda" else "; this torch is built without CUDA, or sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        raise ValueError(f"device must be {there}, got {str(found)!r}{why}")
    return found


def _users_edge_ids(edge: Any, permutation: Any) -> Any:
    """The user's edge ids of a sampler that has put the edges in another order."""
    if isinstance(edge, dict):
        return {
            name: ids if ids is None or permutation.get(name) is None else permutation[name][ids.to(torch.int64)]
            for name, ids in edge.items()
        }
    return None if edge is None else permutation[edge.to(torch.int64)]


def _use_huge_pages(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        use_huge_pages(tensor)


class _OncePerThread:
    """Calls ``worker_init_fn`` in every thread that asks, once, with the number of the thread."""

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


def _check_agreement(everyone: list[dict[str, Any]], comm: Comm) -> None:
    """Raise on every rank what one of them found, or where they differ."""
    for rank, facts in enumerate(everyone):
        if facts["error"] is not None:
            raise ValueError(f"rank {rank}{comm.of} could not make its loader: {facts['error']}")
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        for name, value in facts["same"].items():
            if value != first["same"][name]:
                raise ValueError(
                    f"all ranks must have the same {name}, got {first['same'][name]} on rank 0 and {value} on rank {rank}{comm.of}"
                )
        if facts["seed_is_given"] and facts["seed"] != first["seed"]:
            theirs = first["seed"] if first["seed_is_given"] else f"none (so {first['seed']} was drawn)"
            raise ValueError(f"all ranks must have the same seed, got {theirs} on rank 0 and {facts['seed']} on rank {rank}{comm.of}")
    leaders: dict[int, tuple[int, str]] = {}
    for rank, facts in enumerate(everyone):
        part, digest = facts["same_in_part"].values()
        leader, expected = leaders.setdefault(part, (rank, digest))
        if digest != expected:
            raise ValueError(
                f"the ranks of a part share its seeds, so all must give the same input_nodes, but rank {leader} and rank {rank}{comm.of}, "
                f"both of part {part}, give different ones"
            )


def _normalise(kwargs: dict[str, Any]) -> None:
    """Numbers for torch's DataLoader become Python's."""
    for name in ("batch_size", "num_workers", "prefetch_factor"):
        number = as_integer(kwargs.get(name))
        if number is not None:
            kwargs[name] = number
        elif kwargs.get(name) is not None and name != "batch_size":
            raise ValueError(f"{name} must be an integer, got {kwargs[name]!r}")


def _check_cache(cache: FeatureCache | None, source: Source, part_id: int) -> None:
    """Refuse a given cache of other contents or of another part, or one that lacks an attribute."""
    if cache is None or not len(cache):
        return
    fingerprint, owner = cache.owner or ("", None)
    if fingerprint != source.fingerprint or owner is None:
        raise ValueError(
            f"the given cache holds rows of another dataset (its fingerprint is {fingerprint or 'none'}, this one's {source.fingerprint or 'none'}), "
            "perhaps of before the directory was partitioned again; take the cache of a loader on the same dataset directory"
        )
    if owner != part_id:
        raise ValueError(f"the given cache was chosen for part {owner} and this rank serves part {part_id}; take the cache of a loader on that part")
    for column in source.exchanged:
        name = column[1]
        if name not in cache.rows:
            raise ValueError(f"the given cache holds no rows of {name!r}; make it with gather={tuple(name for _, name in source.exchanged)}")
        rows, cached = source.rows_of(column), cache.rows[name]
        if (rows.dtype, rows.shape[1:]) != (cached.dtype, cached.shape[1:]):
            raise ValueError(
                f"the given cache must hold {rows.dtype} {list(rows.shape[1:])} rows of {name!r}, got {cached.dtype} "
                f"{list(cached.shape[1:])}; take the cache of a loader on the same dataset directory"
            )
