"""What do all loaders have in common? PyG's batches, made ahead of the training loop.

On an object in memory a loader is one process's and needs no process group. On a partitioned graph it is one rank of many: every
rank constructs its loaders in the same order (construction agrees on sizes and fills the cache, which is collective),
and then iterates at its own pace; :mod:`salientpp.engine.epoch` says how.

Here the pieces are put together, a file for each question: which arguments (``options``), what is drawn from (``source``), in what ranks must agree
(``agreement``), who draws (``workers``), the ten steps from there (``stages``) or one call where those are not needed (``direct``), what both build
(``builder``), who drives them through an epoch (``epoch``), and where a run stopped (``state``).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import hashlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.mixin import AffinityMixin, LogMemoryMixin, MultithreadingMixin
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.arguments import as_integer
from salientpp.batch.builder import BatchBuilder
from salientpp.engine.agreement import Facts, exchange_facts
from salientpp.engine.direct import BatchMaker, Direct, Made
from salientpp.engine.epoch import Counters, Epoch, Rounds, Run, RunContext
from salientpp.engine.pipeline import Pipeline, Trace
from salientpp.engine.source import BatchSource, Seeds, by_type
from salientpp.engine.stages import BatchStages, Request, Sampled, ids_by_type
from salientpp.engine.state import (
    Position,
    Progress,
    Resume,
    check_state,
    data_digest,
    inputs_digest,
    make_state,
)
from salientpp.engine.workers import SamplingWorkers, draw
from salientpp.ids import as_tensor
from salientpp.loader.options import Options, SamplingOptions, check_order, normalise_numbers
from salientpp.loader.padding import TRIAL, TRIAL_EPOCH, Classes, Padding, check_padding, sizes_of, types_of
from salientpp.ops import code_ids, use_huge_pages
from salientpp.processes import Lock, Threads, Undone, completed, forks, lazy, may_compute_in_parallel
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm, go_astray
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.neighbor_sampler import NeighborSampler, is_remote
from salientpp.sampling.schedule import BatchKeys, Schedule, Turn, Turns, batch_keys, share_size
from salientpp.sampling.seeds import scores_of_part
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache, TypedFeatureCache, on_device
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import HOST_SUMS, SUMS, Traffic
from salientpp.store.fetch import Fetch, InPlace, Packed
from salientpp.store.narrow import EncodedRows, NarrowRows
from salientpp.store.rows import TensorRows
from salientpp.store.thread_groups import Balance
from salientpp.store.tiers import NO_IDS, IdSet, Tiers
from salientpp.vip.policies import plan_caches
from salientpp.ways.devices import reachable, split_rows, split_tiers
from salientpp.ways.host import HostExchange, fetch_host_caches, pooled
from salientpp.ways.hosts import agree_on_hosts, checked_hosts
from salientpp.ways.lookahead.moving import MovingRows
from salientpp.ways.lookahead.planner import Blocks, Planner, Trial, plan_rows
from salientpp.ways.lookahead.stages import (
    Draws,
    ForeseenRequest,
    LookaheadCache,
    LookaheadStages,
    Scouts,
    most_pending,
)
from salientpp.ways.sharing import SharingStages
from salientpp.ways.sums.fetch import FetchWithSums, are_copies_worth_it, are_fetches_worth_it
from salientpp.ways.sums.stages import PartialStages, check_partial, weights_of, wire_of

#: Rows of less than this are gathered mostly from caches, where the size of a page does not matter.
_LARGE_BYTES = 64 * 2**20

#: Of a batch: vertices of an MFG are counted in 32 bits.
_MOST_SEEDS = 2**31 - 1

#: Of the draws of the batch that an overridden ``collate_fn`` is making; None: it is called by somebody else.
_batch_keys: contextvars.ContextVar[BatchKeys | None] = contextvars.ContextVar("batch_keys", default=None)

#: Samplers of torch's that give the same order again: Lightning puts them into a loader, and asks it for its state.
_KNOWN_ORDERS = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did since it was made, or since ``reset_stats``.

    Attributes:
        batches: given to the user.
        rows_gpu, rows_cpu, rows_cache, rows_remote: feature rows delivered, by the tier they came from. Batches that
            were under way when an epoch was left count too: their rows did cross the network. A remote row that a batch
            holds several times, as disjoint trees may, was fetched once and counts once.
        rows_fetched: rows that this rank received from other hosts. Those of ``rows_remote``, unless ranks of a host ask for one another (``fetch_once``):
            then a row that several of them need in the same round was received once, by one of them.
        bytes_sent, bytes_received: to and from other ranks: counts, ids and rows, without what the ranks of a host pass on.
        seconds_by_stage: time spent in each stage by the thread that drives the pipeline.
        seconds_waiting: time that the caller spent in ``next()``.
        by_type: per vertex type (None where there is only one), these rows by tier, 'gpu', 'cpu', 'cache' and 'remote', and
            'bytes_received', what the remote ones took.
        rows_partial: sums that this rank received in the place of rows (``partial_aggregation``); no rows of the tiers, and in ``bytes_received``.
        rows_partial_cpu: sums that the host of this rank made in the place of its own rows, of the tiers 'cpu' and 'cache', and copied to the device.
    """

    batches: int
    rows_gpu: int
    rows_cpu: int
    rows_cache: int
    rows_remote: int
    rows_fetched: int
    bytes_sent: int
    bytes_received: int
    seconds_by_stage: dict[str, float]
    seconds_waiting: float
    by_type: dict[str | None, dict[str, int]]
    rows_partial: int = 0
    rows_partial_cpu: int = 0

    @property
    def rows(self) -> int:
        return self.rows_gpu + self.rows_cpu + self.rows_cache + self.rows_remote


class _OfLoader:
    """A sampler that a loader has in the place of torch's: the loader does not ask it, but who gives it a number of an epoch means the loader's.

    Args:
        loader: whose it is.
        *args: of torch's class.
    """

    def __init__(self, loader: BatchLoader, *args: Any) -> None:
        super().__init__(*args)
        self.belong_to(loader)

    def belong_to(self, loader: BatchLoader) -> None:
        """A copy of a loader has a copy of its sampler."""
        self._loader = weakref.ref(loader)  # a circle would keep both

    def _living_loader(self) -> BatchLoader:
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the loader whose seeds these are is gone")
        return loader

    def set_epoch(self, epoch: int) -> None:
        """The number of the epoch that comes next, or of one that was begun and has not been asked for a batch: Lightning calls ``iter`` first."""
        self._living_loader()._set_next_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loader"}


class ShuffledSampler(_OfLoader, torch.utils.data.RandomSampler):
    """Of a loader with ``shuffle``, by which other libraries tell that it shuffles."""


class OrderedSampler(_OfLoader, torch.utils.data.SequentialSampler):
    """Of a loader without ``shuffle``."""


class RanksSampler(_OfLoader, torch.utils.data.DistributedSampler):
    """Positions that a rank of a partitioned graph visits in the loader's next epoch.

    It is torch's ``DistributedSampler`` so that Lightning sees that the ranks have shared the seeds already.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.belong_to(loader)  # torch's has sizes of its own

    def __iter__(self) -> Iterator[int]:
        loader = self._living_loader()
        return iter(
            torch.cat(
                [torch.empty(0, dtype=torch.int64, device="cpu"), *loader._positions(loader._epoch_number)]
            ).tolist()
        )

    def __len__(self) -> int:
        return sum(positions.numel() for positions in self._living_loader()._positions(0))


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What a rank has found out for its loader before it asks the others.

    Attributes:
        cache: the user's.
        shuffle: the order of seeds is another in each epoch.
        placement: whose slots draw from which parts; of processes that share an object, with it as the only part.
    """

    source: BatchSource
    facts: Facts
    cache: FeatureCache | TypedFeatureCache | None
    shuffle: bool
    placement: Placement


class BatchLoader(torch.utils.data.DataLoader, AffinityMixin, MultithreadingMixin, LogMemoryMixin):
    """What :class:`NeighborLoader` and :class:`LinkNeighborLoader` have in common; they say which data they take and what their seeds are.

    Args:
        data: what the user gave.
        sampling: how to draw.
        options: the package's own arguments.
        kwargs: torch's ``DataLoader``'s.
    """

    #: What ``data`` may be, beside a pair of stores.
    _kinds_of_data: tuple[type, ...]
    _kinds_in_words: str

    def __init__(self, data: Any, sampling: SamplingOptions, options: Options, kwargs: dict[str, Any]) -> None:
        self.data = data
        self.__dict__.update(vars(sampling))  # each argument is an attribute, for Lightning
        # As in PyG, for the sake of Lightning, which passes on what it finds in a loader.
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        self._comm = self._connect(options)
        self._ranks_by_host: tuple[int, ...] = ()
        if isinstance(data, PartitionedGraph):
            self._ranks_by_host = agree_on_hosts(
                self._comm,
                data,
                options.ranks_per_host,
                as_integer(options.slots) or 0,
                bool(options.rows),
                looks_ahead=bool(options.lookahead),
            )
        else:
            checked_hosts(options.ranks_per_host)
        # From here on a mistake on one rank is every rank's error, so that none waits for one that raised.
        prepared, error = None, None
        try:
            prepared = self._prepare(sampling, options, kwargs)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # Ctrl-C
            self._comm.report_failure(
                f"rank {self._comm.rank}{self._comm.of} could not make its loader: {type(raised).__name__}"
            )
            raise
        try:
            everyone = exchange_facts(self._comm, None if prepared is None else prepared.facts, error)
        finally:
            error = None  # else this loader and its traceback would hold each other
        assert prepared is not None  # else there was an error
        self.seed = everyone[0].seed
        self._seed_is_given = prepared.facts.seed_is_given
        self._epoch_number = 0
        self._resume: Resume | None = None  # where that epoch goes on, by a loaded state
        self._progress: Progress | None = None  # of the epoch begun last
        self._calls = 0
        self._source = source = prepared.source
        self._adapt_seeds(source.seeds, everyone)
        self._placement, self._seeds_by_part = prepared.placement, _seeds_by_part(everyone)
        self._turns = self._make_turns(prepared.placement, prepared.shuffle)
        try:
            self._topology = source.template.contents()  # what the tiers are made of, and the graph
            self._cache: FeatureCache | TypedFeatureCache = FeatureCache.empty()
            self._planners: dict[str | None, Planner] = {}
            self._start_threads(self._make_tiers(prepared.cache, fill=any(facts.fills_cache for facts in everyone)))
        except BaseException as error:
            self._comm.report_failure(
                f"rank {self._comm.rank}{self._comm.of} could not make its loader: {type(error).__name__}: {error}"
            )
            raise

    def _start_threads(self, tiers: Mapping[str | None, Tiers]) -> None:
        sources = [
            rows.wide if isinstance(rows, EncodedRows) else rows.encoded if isinstance(rows, NarrowRows) else rows
            for of_type in tiers.values()
            for rows in of_type.home.rows.values()
        ]
        large = [rows.tensor for rows in sources if isinstance(rows, TensorRows) and rows.nbytes >= _LARGE_BYTES]
        if large:
            # It takes seconds for gigabytes, and batches need not wait for it.
            threading.Thread(target=_use_huge_pages, args=(large,), name="salientpp-pages", daemon=True).start()
        self._driver = Threads(1, "salientpp-drive")
        self._forks = forks()
        self._lock = Lock()  # whoever holds it begins an epoch
        on_host = self.device.type == "cpu"
        reduction = "mean" if self.partial_aggregation == "auto" else self.partial_aggregation
        self._fetch = (Fetch if reduction is None else functools.partial(FetchWithSums, reduction=reduction))(
            tiers=tiers,
            exchange=self._source.exchange,
            columns=self._source.exchanged,
            seed_columns=self._source.seed_columns,
            own=InPlace(BufferPool()) if on_host else Packed(self.device),
            served=InPlace(BufferPool(), decodes=False)
            if self._comm.device.type == "cpu"
            else Packed(self._comm.device, decodes=False),
            repeats=getattr(self._source.sampler, "disjoint", False) or self.join_slots,
        )
        self._builder = BatchBuilder(
            fetch=self._fetch,
            template=self._source.template,
            add_batch_attributes=self._source.seeds.add_batch_attributes,
            device=self.device,
            dtype=self.dtype,
            pin_memory=bool(self.pin_memory) and on_host and torch.accelerator.is_available(),
            own=self._source.own,
            held=self._topology,
            marks_sizes=self.pad is None,
        )
        gather = Threads(1, "salientpp-gather")
        self._stages = BatchStages(self._fetch, self._builder, gather.submit, self.device)
        if self._fetches_once:
            between = HostExchange(self._host, self._source.exchange)
            self._fetch.askers = self._host.size
            self._stages = SharingStages(self._fetch, self._builder, gather.submit, self.device, host=between)
        self._ahead: LookaheadCache | None = None
        if self._planners:
            self._ahead = self._make_lookahead()
            self._fetch.moving = self._ahead.rows
            self._stages = LookaheadStages(self._fetch, self._builder, gather.submit, self.device, cache=self._ahead)
        if reduction is not None:
            wire = wire_of(self._source, self.partial_weight)
            asks, sums_here = True, not on_host
            if self.partial_aggregation == "auto":
                tried = list(self._first_draws())
                asks = are_fetches_worth_it(tried, tiers[None], wire)
                sums_here = sums_here and are_copies_worth_it(tried, tiers[None], wire)
            num_threads = torch.get_num_threads()
            helpers = Threads(max(1, num_threads - 1), "salientpp-groups")
            self._stages = PartialStages(
                self._fetch, self._builder, gather.submit, self.device,
                reduction=reduction, weight=weights_of(self._source, self.partial_weight), wire=wire, asks=asks,
                sums_here=sums_here, balance=Balance(num_threads, helpers.submit),
            )  # fmt: skip
        self._maker = BatchMaker(self._fetch, self._builder)
        self._workers = SamplingWorkers(
            self.num_workers, self._source.seeds, self._source.sampler, self._stages, self._maker
        )
        self._counters = Counters(self._fetch.counting)
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._run: Run | None = None  # the epoch that is not over yet
        self._background_failure: BaseException | None = None
        self.reset_stats()

    def _first_draws(self) -> Iterator[Any]:
        """Some batches of epoch 0, as they will be drawn."""
        turns = self._turns.of_epoch(0)
        for number in Trial.batches(len(turns)):
            for piece in self._pieces(0, turns[number]):
                yield draw(self._source.seeds, self._source.sampler, *piece)

    def _make_lookahead(self) -> LookaheadCache:
        """Of the planners, with the rows of the cache that was fetched for them."""
        source, planners = self._source, self._planners
        rows = {type_: MovingRows(self._cache.by_type[type_].rows) for type_ in planners}
        books = {type_: source.books[type_] for type_ in planners}
        scouts = Scouts(
            lambda draws: self._turns.of_epoch(draws.epoch),
            lambda draws, turn: self._workers.scout(self._scout, self._pieces(draws.epoch, turn)),
            most_pending(planners, self._most_ahead if self.num_workers else 0),
        )
        submit: Callable[..., Any] = Threads(1, "salientpp-decide").submit if self.num_workers else completed
        return LookaheadCache(planners, rows, books, scouts, submit)

    def _scout(self, pieces: Sequence[tuple[Tensor, BatchKeys]]) -> dict[str | None, Tensor]:
        """Per vertex type, the list of remote ids that the batch of these pieces needs."""
        exchange, books = self._source.exchange, self._source.books
        ids = [ids_by_type(self._workers.draw_vertices(*piece).node) for piece in pieces]
        found = {}
        for type_ in self._planners:
            own = [each[type_] for each in ids if type_ in each]
            book, part_id = books[type_], exchange.part_of(type_)
            whole = torch.cat(own) if len(own) > 1 else own[0] if own else NO_IDS
            found[type_] = code_ids(whole, book.num_vertices, *book.range_of(part_id))
        return found

    # --- construction -------------------------------------------------------------------------------------

    def _set_options(self, options: Options) -> None:
        """Each argument is an attribute; ``device``, ``seed`` and ``cache`` are set elsewhere, since they may differ from what was given."""
        elsewhere = ("device", "seed", "cache", "timeout")
        self.__dict__.update({name: value for name, value in vars(options).items() if name not in elsewhere})

    def _connect(self, options: Options) -> Comm:
        """The ranks that make this loader; on an object in memory this process alone. Sets ``device``, which they may exchange rows from."""
        try:
            if not isinstance(self.data, self._kinds_of_data) and not is_remote(self.data):
                raise TypeError(f"data must be {self._kinds_in_words}, got {type(self.data).__name__}")
        except TypeError as raised:
            go_astray(raised)  # nobody can know which ranks would have made this loader
            raise
        error = None
        try:
            self.device, timeout = options.checked_device(), options.checked_timeout()
        except Exception as raised:
            self.device, timeout, error = torch.device("cpu"), DEFAULT_TIMEOUT, raised
        try:
            if isinstance(self.data, PartitionedGraph):
                return Comm.create(options.process_group, timeout, self.device, error)
            if error is not None:
                raise error
            return Comm(None, timeout)
        finally:
            error = None  # else this frame and the traceback would hold each other

    def _prepare(self, sampling: SamplingOptions, options: Options, kwargs: dict[str, Any]) -> _Prepared:
        """What this rank can find out without the others; raises on a wrong argument."""
        for name in ("partial_aggregation", "partial_weight"):
            if name in kwargs:
                raise ValueError(
                    f"{name}= is for a NeighborLoader; {type(self).__name__} gives batches of edges, without sums; leave it out"
                )
        options = options.checked(self.device)
        self._set_options(options)
        normalise_numbers(kwargs)
        partitioned = isinstance(self.data, PartitionedGraph)
        source = self._open_source(self._comm, sampling)
        shuffle = bool(kwargs.pop("shuffle", None) or False)
        if options.uneven is None:
            self.uneven = "wrap" if shuffle else "exact"
        self._orders_itself = check_order(kwargs, partitioned)
        if kwargs.get("multiprocessing_context") is not None:
            warnings.warn("multiprocessing_context has no effect: workers are threads", UserWarning, stacklevel=4)
            kwargs.pop("multiprocessing_context")
        num_inputs = source.seeds.number
        positions: Any = range(num_inputs)  # all that torch asks of a dataset
        if self._comm.size > 1:
            kwargs["sampler"] = RanksSampler(self)
        elif self._orders_itself:
            # torch's random sampler refuses to have nothing to draw from; a rank without seeds is fine here.
            made = ShuffledSampler if shuffle and num_inputs > 0 else OrderedSampler
            kwargs["sampler"] = made(self, positions)
        with _threads_for_workers() if kwargs.get("num_workers") else contextlib.nullcontext():
            torch.utils.data.DataLoader.__init__(  # not PyG's, which the loaders are too
                self, positions, shuffle=shuffle and not self._orders_itself, **kwargs
            )  # fmt: skip
        del self.__dict__["collate_fn"]  # torch's own; ours is a method, which subclasses may override
        self._check_hooks()
        batch_size = as_integer(self.batch_size)
        if kwargs.get("batch_sampler") is None and (batch_size is None or not 1 <= batch_size <= _MOST_SEEDS):
            raise ValueError(f"batch_size must be 1 to {_MOST_SEEDS:,}, got {self.batch_size}")
        exchange = source.exchange
        if options.draw_block != 1 and not isinstance(source.sampler, NeighborSampler):
            raise ValueError(
                f"draw_block is for draws by this package's sampler; got draw_block={options.draw_block} and neighbor_sampler of "
                f"{type(source.sampler).__name__}, which takes no key; leave draw_block out"
            )
        draws_seed = shuffle and options.seed is None and kwargs.get("generator") is None
        share = options.checked_share(partitioned, self._orders_itself, draws_seed)
        options.check_slots(partitioned)
        options.check_send_as(partitioned)
        if options.partial_aggregation is not None:
            check_partial(self.data, source, options.partial_aggregation, options.partial_weight)
        placement = exchange.placement if share is None else Placement(*share, num_parts=1)
        self._check_slots(source, placement)
        _check_cache(options.cache, source, exchange.part_id)
        if options.pad is not None:
            check_padding(self.data, source, getattr(self, "custom_cls", None))
        given = [getattr(self, name, None) for name in ("input_id", "input_time", "edge_label", "edge_label_time")]
        split = source.seeds.split if all(value is None for value in given) else None
        seeds = _seeds_of_parts(source, placement, split) if partitioned else [[0, 1, num_inputs, ""]]
        facts = self._facts(source, seeds, options.seed, shuffle, kwargs.get("generator"))
        return _Prepared(source, facts, options.cache, shuffle, placement)

    def _open_source(self, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        """What to draw from; called once, inside the construction that all ranks share."""
        raise NotImplementedError

    def _adapt_seeds(self, seeds: Seeds, everyone: Sequence[Facts]) -> None:
        """Change this rank's seeds where their meaning depends on the seeds of all ranks."""

    def _check_slots(self, source: BatchSource, placement: Placement) -> None:
        if self.join_slots and self._has_hooks:
            raise ValueError(
                f"{type(self).__name__} overrides collate_fn or filter_fn, which make one batch of one slot; leave join_slots out, or pass transform="
            )
        if source.seeds.part_of is None and len(_units(placement)) > 1:
            raise ValueError(
                f"rank {placement.rank} has {len(placement.slots)} slots that draw from {len(_units(placement))} groups of parts, and seeds of your own do not "
                "say which they are of; name a split, or start as many ranks as there are slots"
            )

    def _make_turns(self, placement: Placement, shuffle: bool) -> Turns:
        """This rank's batches, and when it gives them."""
        sizes = [_size_of(placement.parts_of_unit(unit), self._seeds_by_part) for unit in range(placement.num_units)]
        per_unit = placement.slots_per_unit
        counts = [share_size(size, place, per_unit) for size in sizes for place in range(per_unit)]
        schedules = [
            Schedule(
                num_seeds=sizes[placement.unit_of(slot)],
                unit=placement.unit_of(slot),
                place=placement.place_of(slot),
                slots_per_unit=per_unit,
                seeds_per_slot=counts,
                slot=slot,
                batch_size=self._mean_batch_size,
                shuffle=shuffle,
                drop_last=self.drop_last,
                uneven=self.uneven,
                seed=self.seed,
                kind="rank" if placement.num_slots == placement.world_size else "slot",
            )
            for slot in placement.slots
        ]
        # Processes that share an object do not wait for each other.
        ranks = range(placement.world_size) if self.share is None else [placement.rank]
        return Turns(
            schedules,
            [placement.slots_of(rank) for rank in ranks],
            self.join_slots,
            _positions_by_unit(self._source, placement),
        )

    @property
    def _mean_batch_size(self) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return max(1, -(-self._source.seeds.number // max(1, len(self._given_batches))))

    @property
    def _given_batches(self) -> Any:
        """The user's ``batch_sampler``, or torch's over the user's ``sampler``; it has a length."""
        return self.batch_sampler

    def _facts(
        self,
        source: BatchSource,
        seeds: list[list[Any]],
        seed: int | None,
        shuffle: bool,
        generator: torch.Generator | None,
    ) -> Facts:
        """What this rank tells the others."""
        settings = source.sampler.settings() if isinstance(source.sampler, NeighborSampler) else {}
        return Facts(
            seed=int(torch.randint(2**62, (), generator=generator, device="cpu")) if seed is None else seed,
            seed_is_given=seed is not None,
            seeds=seeds,
            fills_cache=self.replication_factor > 0,
            same={
                "dataset": source.fingerprint,
                "send_as": {str(key): str(format) for key, format in (self.send_as or {}).items()},
                "kind of seeds": "edges" if isinstance(source.seeds.inputs, EdgeSamplerInput) else "vertices",
                "input_nodes": source.seeds.split or "ids or a mask",
                "time_attr": self.time_attr,
                "weight_attr": self.weight_attr,
                "shared_draws": None,
                **{name: bool(value) if name == "replace" else value for name, value in settings.items()},
                "draw_block": self.draw_block,
                "batch_size": self.batch_size,
                "shuffle": shuffle,
                "drop_last": bool(self.drop_last),
                "uneven": self.uneven,
                "slots": self.slots,
                "join_slots": self.join_slots,
                "depth": self.depth,
                "partial_aggregation": self.partial_aggregation,
                "partial_weight": self.partial_weight,
                "dtype": str(self.dtype),
                "gather": [
                    [
                        *(word for word in column if word is not None),
                        str(source.delivered(column).dtype),
                        list(source.delivered(column).shape[1:]),
                        *([source.narrow[column].format] if column in source.narrow else []),
                    ]
                    for column in source.exchanged
                ],
                **self._facts_of_hosts(),
            },
        )

    def _facts_of_hosts(self) -> dict[str, Any]:
        """In what all ranks must agree where some share a host."""
        if not self._ranks_by_host:
            return {}
        policy = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__qualname__", "a function")
        return {
            "policy": policy,
            "replication_factor": self.replication_factor,
            "fetch_once": self.fetch_once,
            "gpu_split": self.gpu_split,
            "gpu_fraction": self.gpu_fraction if self.gpu_split else None,
        }

    @property
    def _fetches_once(self) -> bool:
        """Whether the ranks of a host ask other hosts for one another; the same on all ranks."""
        return bool(self.fetch_once and self._ranks_by_host and self._source.travelling)

    def _splits_devices(self) -> bool:
        """Whether the devices of this host share rows; collective among its ranks."""
        if not self.gpu_split or not self._ranks_by_host or self._host.size == 1:
            return False
        trouble = reachable(self._host, self.device)
        if trouble is not None:
            warnings.warn(f"gpu_split has no effect: {trouble}", UserWarning, stacklevel=5)
        return trouble is None

    @lazy
    def _host(self) -> Comm:
        """The ranks of this host; made by all of them at the same time."""
        return self._comm.among(self._source.exchange.placement.ranks_of_host)

    def _make_tiers(self, cache: FeatureCache | TypedFeatureCache | None, fill: bool) -> dict[str | None, Tiers]:
        """The tiers by vertex type, with the given cache, or with one of this loader's own if any rank has one to ``fill`` (that is collective)."""
        source = self._source
        home = {type_: source.exchange.part_of(type_) for type_ in source.books}
        num_hot = {type_: int(self.gpu_fraction * book.size_of(home[type_])) for type_, book in source.books.items()}
        splits = any(num_hot.values()) and self._splits_devices()
        num_split = {type_: int(self.gpu_split * number) if splits else 0 for type_, number in num_hot.items()}
        hot = {type_: torch.arange(number - num_split[type_], device="cpu") for type_, number in num_hot.items()}
        of_rows, shares = source.seeds.access_probability, {}
        if of_rows is not None and any(num_hot.values()):
            chance = {type_: of_type for type_, of_type in of_rows(self._mean_batch_size).items() if type_ in hot}
            order = {type_: torch.sort(of, descending=True, stable=True).indices for type_, of in chance.items()}
            hot |= {type_: ids[: hot[type_].numel()].sort().values for type_, ids in order.items()}
            shares = split_rows(self._host, chance, hot, num_split) if splits else {}
        made = {}
        for type_, book in source.books.items():
            seeds_only = [name for owner, name in source.seed_columns if owner == type_]
            made[type_] = Tiers.of(
                book, home[type_], source.rows[type_], device=self.device, gpu_ids=hot[type_], zero_copy=self.zero_copy, seeds_only=seeds_only
            )  # fmt: skip
            made[type_] = dataclasses.replace(made[type_], narrow=source.narrow_of(type_))
            if type_ in shares:
                whole = {name: rows for name, rows in source.rows[type_].items() if name not in seeds_only}
                num_rows = book.size_of(home[type_])
                tiers = split_tiers(self._host, self.device, whole, shares[type_], num_rows)
                made[type_] = dataclasses.replace(made[type_], near=[*made[type_].near, *tiers])
        if fill and source.travelling:
            self._cache = self._fetch_cache(made)
        if cache is not None:
            self._cache = cache
        if self.zero_copy:
            self._cache = self._cache.pinned()
        for type_, of_type in self._cache.by_type.items():
            if type_ in made and type_ not in self._planners and source.books[type_].num_parts > 1:
                made[type_] = dataclasses.replace(made[type_], copies=of_type.tiers(self.zero_copy))
        return made

    def _read_anew(self) -> None:
        """Take what a ``Data`` holds now for the rows that the pipeline brings. Without this batches are right too, but made twice."""
        builder, fetch, source = self._builder, self._fetch, self._source
        contents = source.template.contents()
        if contents is None or contents.equals(builder.held) or any(run.is_under_way for run in self._runs):
            return
        edges = [] if self._topology is None else contents.changed_edges(self._topology)
        if edges:
            names = ", ".join("the edges of data" if key is None else f"the edges of data[{key!r}]" for key in edges)
            warnings.warn(
                f"{names} have changed since this loader was made; as in PyG it goes on with the graph as it was. Make a new loader",
                UserWarning,
                stacklevel=4,
            )
            self._topology = contents
        columns = source.columns_now()
        self._source = source = dataclasses.replace(
            source, rows=by_type(source.books, columns), exchanged=list(columns)
        )
        fetch.tiers = {
            type_: Tiers.of(
                tiers.book, tiers.part_id, source.rows[type_], device=self.device, zero_copy=self.zero_copy,
                gpu_ids=_near_ids(tiers),
            )
            for type_, tiers in fetch.tiers.items()
        }  # fmt: skip
        fetch.columns = source.exchanged
        builder.held = contents

    def _fetch_cache(self, tiers: Mapping[str | None, Tiers]) -> FeatureCache | TypedFeatureCache:
        source, part_id = self._source, self._source.exchange.part_id
        books = {type_: source.books[type_] for type_ in source.travelling}
        members, scores = dict.fromkeys(books, NO_IDS), None
        if self.replication_factor > 0:
            scores = self._scores()
            of_host = scores
            if self._ranks_by_host:
                of_host = pooled(self._host, self.policy, {type_: scores[type_] for type_ in books})
            members = plan_caches(of_host, books, source.row_bytes, part_id, self.replication_factor)
            if self.lookahead:
                members = self._plan_ahead(scores, members)
        home = {
            type_: {name: tiers[type_].home.rows[name] for of_type, name in source.exchanged if of_type == type_}
            for type_ in books
        }
        if self._ranks_by_host:
            sizes = {type_: book.num_vertices for type_, book in books.items()}
            caches = fetch_host_caches(self._host, source.exchange, home, members, sizes)
        else:
            caches = {
                type_: source.exchange.fetch_cache(type_, home[type_], IdSet.of(members[type_], book.num_vertices))
                for type_, book in books.items()
            }
        owner = (_contents(source), part_id)
        caches = {type_: dataclasses.replace(cache, owner=owner) for type_, cache in caches.items()}
        if scores is not None and self.gpu_cache_bytes:
            caches = on_device(caches, scores, self.gpu_cache_bytes, self.device)
        return caches[None] if None in caches else TypedFeatureCache(caches, owner)

    def _plan_ahead(
        self, scores: Mapping[str | None, Tensor], members: Mapping[str | None, Tensor]
    ) -> dict[str | None, Tensor]:
        """Make planners where they gain something; gives, instead of the ``members`` of a static cache, whose rows are there at first."""
        source, found = self._source, dict(members)
        parts = {type_: source.exchange.part_of(type_) for type_ in members}

        @functools.cache
        def tried() -> list[dict[str | None, Tensor]]:
            turns = self._turns.of_epoch(0)
            mfgs = [
                [
                    ids_by_type(draw(source.seeds, source.sampler, *piece, only_vertices=True).node)
                    for piece in self._pieces(0, turns[number])
                ]
                for number in Trial.batches(len(turns))
            ]
            return [
                {type_: torch.cat([ids.get(type_, NO_IDS) for ids in of_batch]) for type_ in members}
                for of_batch in mfgs
            ]

        for type_, own in members.items():
            book = source.books[type_]

            def trial(type_: str | None = type_, book: PartitionBook = book) -> Trial:
                sizes = book.num_vertices, *book.range_of(parts[type_])
                return Trial.of([code_ids(ids[type_], *sizes) for ids in tried()], book.num_vertices)

            planned = plan_rows(
                self.lookahead, scores[type_], book, parts[type_], own.numel(), source.row_bytes[type_], trial, blocks=self._blocks
            )  # fmt: skip
            if planned is not None:
                shape, found[type_] = planned
                self._planners[type_] = Planner(shape, scores[type_].to(torch.float32), found[type_])
        return found

    def _blocks(self) -> Blocks | None:
        """How batches agree in blocks, where that is known: with one type of vertices, seeds that are vertices and draws without weights."""
        part, inputs, sampler = self._source.part, self._source.seeds.inputs, self._source.sampler
        assert part is not None and part.part_id is not None and isinstance(sampler, NeighborSampler)
        if self.draw_block == 1 or sampler.replace or not (sampler.is_plain and isinstance(inputs, NodeSamplerInput)):
            return None
        workload = part.workload(part.part_id, inputs.node, sampler.fanouts[0], self._mean_batch_size)
        num_batches = self._turns.schedules[0].num_batches
        return Blocks.of(workload, self.draw_block, num_batches, sampler.shared_draws is not None)

    def _scores(self) -> Mapping[str | None, Tensor]:
        source, batch_size = self._source, self._mean_batch_size
        assert (
            source.seeds.start is not None and source.part is not None and source.part.part_id is not None
        )  # it is a partitioned graph
        return scores_of_part(
            self.policy, part=source.part, part_id=source.part.part_id, sampler=source.sampler, inputs=source.seeds.inputs,
            start=source.seeds.start(batch_size), batch_size=batch_size,
        )  # fmt: skip

    # --- single batches, and PyG's hooks ------------------------------------------------------------------

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
        keys = self._keys(-call, 0)  # epochs count up from 0, so the draws of calls are their own
        return self._through_hooks(index, keys) if self._has_hooks else self._batch_of(index, keys)

    def collate_fn(self, index: Tensor | Sequence[int]) -> Any:
        """Makes a batch of positions, as PyG's: for subclasses, and for libraries that make a ``DataLoader`` of the parts of this one.

        With ``filter_per_worker=False`` it gives what was sampled, for :meth:`filter_fn`.
        """
        keys = _batch_keys.get()
        if keys is None:
            # The draws are torch's: in worker processes the count of calls would begin anew in every epoch.
            keys = self._keys(-int(torch.randint(2**62, 2**63 - 1, (), device="cpu")), 0)
        if self.filter_per_worker is False:
            return self._drive(self._draw, index, keys)
        if self._overrides("filter_fn"):
            return self.filter_fn(self._drive(self._draw, index, keys))
        return self._batch_of(index, keys)

    def filter_fn(self, out: Any) -> Data | HeteroData:
        """The batch of what was sampled, as PyG's; a batch itself is given back.

        Args:
            out: what the sampler drew of some of the seeds.
        """
        if not isinstance(out, (SamplerOutput, HeteroSamplerOutput)):
            return out
        self._check_is_alone()
        return self._drive(self._filtered, out)

    @property
    def input_data(self) -> NodeSamplerInput | EdgeSamplerInput:
        """All seeds, by PyG's name."""
        return self._source.seeds.inputs

    def _overrides(self, name: str) -> bool:
        """Whether a subclass, or this object, has a ``collate_fn`` or ``filter_fn`` of its own."""
        return name in self.__dict__ or getattr(type(self), name) is not getattr(BatchLoader, name)

    @property
    def _has_hooks(self) -> bool:
        return self._overrides("collate_fn") or self._overrides("filter_fn")

    def _check_hooks(self) -> None:
        if self._comm.size > 1 and self._has_hooks:
            name = "collate_fn" if self._overrides("collate_fn") else "filter_fn"
            raise ValueError(
                f"{type(self).__name__} overrides {name}, which would not be called on several ranks, where batches are made in stages; pass transform= "
                "(called with every batch) or transform_sampler_output= instead"
            )

    def _check_is_alone(self) -> None:
        if self._comm.size > 1:
            raise RuntimeError(
                "a single batch cannot be asked for on several ranks: the others would not answer; iterate instead"
            )

    def _through_hooks(self, index: Any, keys: BatchKeys) -> Any:
        """A batch by way of ``collate_fn`` and ``filter_fn``, one of which is overridden."""
        token = _batch_keys.set(keys)
        try:
            out = self.collate_fn(index)
            return self.filter_fn(out) if isinstance(out, (SamplerOutput, HeteroSamplerOutput)) else out
        finally:
            _batch_keys.reset(token)

    def _made_by_hooks(self, index: int, positions: Tensor, keys: BatchKeys) -> Made:
        return Made(index, self._through_hooks(positions.tolist(), keys), None, {}, {}, None, (0.0, 0.0))

    def _batch_of(self, index: Any, keys: BatchKeys) -> Data:
        return self._drive(lambda: self._filtered(self._draw(index, keys)))

    def _draw(self, index: Any, keys: BatchKeys) -> SamplerOutput | HeteroSamplerOutput:
        self._check_is_alone()
        return self._workers.draw(_checked_positions(index, self._source.seeds.number, "index"), keys)

    def _filtered(self, mfg: SamplerOutput | HeteroSamplerOutput) -> Data | HeteroData:
        input_id = mfg.metadata[0] if mfg.metadata else None
        if input_id is None:
            raise ValueError(
                "the metadata of what was sampled must begin with the ids of the seeds (input_id), as collate_fn of PyG's loaders leaves them"
            )
        sampling = Undone(
            self._workers.prepare, 0, copy.copy(mfg), len(input_id), self.transform_sampler_output
        )  # the user's object stays as it is
        if self._fetch.is_local:
            made = sampling.result()
            batch = made.batch
            if self._has_hooks:  # else an epoch's pipeline counts
                self._fetch.count(made.places)
        else:
            batch = Pipeline(self._stages.list(), depth=1, device=self.device).tick(Request(0, sampling)).batch
        return batch if self._finishing is None else self._finishing(batch)

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
        if self._forks == forks() or may_compute_in_parallel():
            return function(*args)
        return self._driver.submit(function, *args).result()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which go on as this loader would: with the same next epoch, and ``state_dict()``; with threads and counts of their own."""
        if isinstance(self.data, PartitionedGraph):
            raise TypeError(
                "a loader of a partitioned graph cannot be copied or pickled: its connections and memory maps are this process's; make one from "
                "salientpp.load(root) where you need it, and give it this loader's state_dict() to go on from there"
            )
        progress = None if self._progress is None else dataclasses.replace(self._progress)
        return {**self.__dict__, "_progress": progress, "_run": None, "_runs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _runs=weakref.WeakSet(), _forks=forks())
        if isinstance(self.sampler, _OfLoader):
            self.sampler.belong_to(self)
        # Contents are told by their place in memory, which in a copy is another.
        self._topology = self._builder.held = self._source.template.contents()

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._turns.num_batches if self._orders_itself else len(self._given_batches)

    @property
    def batches_by_rank(self) -> list[int]:
        """Batches that each rank gives in an epoch, without a sampler of the user's; of processes that ``share`` an object only this one's."""
        return self._turns.batches_by_rank

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with the seed it fixes the order and all draws.

        After ``load_state_dict`` the number of the state's epoch keeps the state, and any other leaves it.
        """
        if int(epoch) != self._epoch_number:
            self._resume = None
        self._epoch_number = int(epoch)
        self._progress = None

    def _set_next_epoch(self, epoch: int) -> None:
        with self._lock:
            if self._run is not None and self._run.move_to(int(epoch)):
                self._epoch_number = int(epoch) + 1
            else:
                self.set_epoch(epoch)

    @property
    def has_state(self) -> bool:
        """Whether the order of the seeds can be had again: not with a sampler of the user's, beside torch's that have no state of their own."""
        return self._orders_itself or (
            type(self.batch_sampler) is torch.utils.data.BatchSampler and type(self.sampler) in _KNOWN_ORDERS
        )

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: plain values, for ``torch.save`` or JSON; see :mod:`salientpp.engine.state`.

        Inside an epoch, and after leaving it early, it counts the batches that were given; after the end it is the start of the next.
        """
        epoch, resume, progress = self._epoch_number, self._resume or Resume(0, 0), self._progress
        if progress is not None and not progress.ended:
            epoch, resume = progress.epoch, Resume(progress.batches, self._round_after(progress.batches))
            if progress.rounds is not None:  # whole rounds: of one that is under way nothing counts
                turns = self._turns
                batches = turns.batches_before(progress.rounds) if self._orders_itself else progress.rounds
                resume = Resume(batches, progress.rounds)
        position = Position(epoch, resume.batches, resume.round, self.seed, *self._identity)
        state = make_state(position, self._drive(getattr, self, "_fingerprint"))
        if not self._orders_itself:
            state["sampler_epoch"] = getattr(self.sampler, "epoch", 0)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter(loader)`` go on where ``state_dict()`` was called; on several ranks every rank loads a state.

        As many ranks, each with its own state, go on with the very next batch. Any other number of ranks, or all with the state of one, go on with the
        first round that this one had not given whole; made without ``slots``, a loader takes the state's. So it does with the seed.

        Raises:
            ValueError: the state is of other data or arguments, or none at all; the loader stays as it was.
        """
        partitioned = isinstance(self.data, PartitionedGraph)
        slots, ranks, rank, joined = self._identity
        adopts = partitioned and self.slots is None
        same: dict[str, Any] = {} if adopts else {"slots": slots}
        # Processes that share an object do not agree on anything, so each goes on where it was itself.
        same |= {} if partitioned else {"ranks": ranks, "rank": rank, "joined": joined}
        same |= {"seed": self.seed} if self._seed_is_given else {}
        found = check_state(state, self._drive(getattr, self, "_fingerprint"), same)
        placement, turns = self._placement, self._turns
        if found.slots != slots:
            placement, turns = self._drive(self._with_slots, found.slots)
        num_batches = turns.num_batches if self._orders_itself else len(self)
        num_rounds = turns.num_rounds if self._orders_itself else num_batches
        is_own = (found.ranks, found.rank, found.joined) == (ranks, rank, joined)
        if not 0 <= found.round <= num_rounds:
            raise ValueError(f"cannot load this state: round must be in [0, {num_rounds}], got {found.round}")
        if found.batches < 0 or (is_own and found.batches > num_batches):
            raise ValueError(f"cannot load this state: batches must be in [0, {num_batches}], got {found.batches}")
        sampler_epoch = as_integer(state.get("sampler_epoch", 0))
        if sampler_epoch is None:
            raise ValueError(
                f"cannot load this state: sampler_epoch must be an integer, got {state['sampler_epoch']!r}"
            )
        if not self._orders_itself and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(sampler_epoch)
        self.seed = found.seed
        schedules = [dataclasses.replace(schedule, seed=found.seed) for schedule in turns.schedules]
        self._placement, self._turns = placement, dataclasses.replace(turns, schedules=schedules)
        if not is_own:
            resume = Resume(turns.batches_before(found.round), found.round, by_round=True)
        elif found.batches < num_batches:
            resume = Resume(found.batches, self._round_after(found.batches))
        else:
            resume = Resume(num_batches, max(found.round, self._round_after(num_batches)))
        self._epoch_number, self._resume, self._progress = found.epoch, resume, None

    @property
    def _identity(self) -> tuple[int, int, int, bool]:
        """Slots, ranks, this rank, and whether slots are joined: as a state has them."""
        placement = self._placement
        return placement.num_slots, placement.world_size, placement.rank, self.join_slots

    def _round_after(self, batches: int) -> int:
        return self._turns.round_after(batches) if self._orders_itself else batches

    def _with_slots(self, slots: int) -> tuple[Placement, Turns]:
        """What this rank gives if the epoch's batches belong to another number of slots.

        Raises:
            ValueError: then it would have other parts.
        """
        words = f"make the loader with slots={slots}"
        try:
            placement = dataclasses.replace(self._placement, num_slots=slots)
            found = placement, self._make_turns(placement, self._turns.schedules[0].shuffle)
        except ValueError as error:
            raise ValueError(f"cannot load this state: it is of {slots} slots; {error}") from None
        ranks = range(placement.world_size)
        if [placement.parts_of(rank) for rank in ranks] != [self._placement.parts_of(rank) for rank in ranks]:
            raise ValueError(
                f"cannot load this state: it is of {slots} slots, by which the {len(ranks)} ranks would have other parts; {words}"
            )
        self._check_slots(self._source, placement)
        return found

    @lazy
    def _fingerprint(self) -> dict[str, Any]:
        sampler = self._source.sampler
        ours = isinstance(sampler, NeighborSampler)
        partitioned = isinstance(self.data, PartitionedGraph)
        return {
            "dataset": self.data.fingerprint
            if partitioned
            else data_digest(self.data, sampler.arrays() if ours else []),
            "input_nodes": self._seeds_digest() if partitioned else inputs_digest(self._source.seeds.inputs),
            **(sampler.settings() if ours else {"neighbor_sampler": type(sampler).__name__}),
            "batch_size": self.batch_size,
            "shuffle": self._turns.schedules[0].shuffle,
            "drop_last": self.drop_last,
            "uneven": self.uneven,
            # States of loaders without it do not name it.
            **({"draw_block": self.draw_block} if self.draw_block != 1 else {}),
            **({"rows": self._describe(self.rows)} if self.rows else {}),
            # Of an object in memory the digest knows times and weights; a directory has several attributes that may be meant.
            **(
                {name: value for name in ("time_attr", "weight_attr") if partitioned and (value := getattr(self, name))}
            ),
            **({} if self._orders_itself else {"sampler": self._sampler_settings()}),
        }

    def _seeds_digest(self) -> str:
        """Of the seeds of all ranks together, so the same on each, and for every number of ranks."""
        inputs = self._source.seeds.inputs
        whole = hashlib.sha256(json.dumps(sorted(self._seeds_by_part.items())).encode()).hexdigest()[:16]
        return whole if inputs.input_type is None else f"{inputs.input_type}: {whole}"

    def _sampler_settings(self) -> list[Any]:
        """Of a sampler of torch's whose order is known, what it depends on beside its epoch."""
        if not self.has_state:
            raise ValueError(
                "a loader with a sampler or batch_sampler of its own has no state: the order of the seeds is that sampler's"
            )
        # Not its rank: Lightning keeps rank 0's state for all.
        fields = ("num_replicas", "shuffle", "seed", "drop_last")
        sampler: Any = self.sampler
        return [
            type(sampler).__name__,
            len(sampler),
            *(getattr(sampler, name) for name in fields if hasattr(sampler, name)),
        ]

    def _describe(self, names: Iterable[Any]) -> list[Any]:
        """Plain values: dtype and shape of the rows of these attributes; of a part without how many these are."""
        columns = {name: name if isinstance(name, tuple) else (None, name) for name in names}
        first = 1 if isinstance(self.data, PartitionedGraph) else 0
        return [
            [str(name), str(self._source.delivered(column).dtype), list(self._source.delivered(column).shape[first:])]
            for name, column in columns.items()
        ]

    def __iter__(self) -> Iterator[Data]:  # type: ignore[override]  # torch names a class of its own here
        return self._get_iterator()

    def _get_iterator(self) -> Iterator[Data]:  # type: ignore[override]
        return Epoch(self._begin_epoch())

    def rounds(self) -> Iterator[list[Data]]:
        """An epoch as ``iter(loader)``, a round at a time: in round i the batches with number i of this rank's slots, in order.

        Every rank gets as many rounds, so ranks with different numbers of slots may take a step together after each, as with gradients accumulated over the
        batches. Under ``uneven='exact'`` a rank whose slots have ended gets empty lists. States count whole rounds.
        """
        return Rounds(self._begin_epoch())

    def _begin_epoch(self) -> Run:
        self._comm.check_process()
        self._check_hooks()
        with self._lock:
            self._finish_epoch()
            self._check_files()
            if self.worker_init_fn is not None:
                self._workers.initialise(self.worker_init_fn, anew=not self.persistent_workers)
            self._drive(self._read_anew)
            if self._ahead is not None:
                self._ahead.begin_epoch()
            run = self._drive(Run, self._run_context(), self._epoch_number, self._resume)
            self._runs.add(run)
            self._progress, self._resume = run.progress, None
            self._epoch_number += 1
            self._run = run
            run.leave_if_done()
            return run

    @property
    def _most_ahead(self) -> int:
        return 1 + self.num_workers * (self.prefetch_factor or 2)

    def _run_context(self) -> RunContext:
        """What an epoch needs of this loader. It holds the loader, which must not hold it for longer than the epoch lasts."""
        return RunContext(
            comm=self._comm,
            most_ahead=self._most_ahead,
            transform=None if self._has_hooks else self._finishing,  # else filter_fn is where it is called
            counters=self._counters,
            turns=self._of_epoch,
            num_ticks=lambda: self._turns.num_ticks if self._orders_itself else None,
            num_rounds=lambda: self._turns.num_rounds if self._orders_itself else None,
            slots=lambda: self._placement.num_slots,
            seed=lambda: self.seed,
            request=self._request,
            idle_request=self._idle_request,
            new_pipeline=self._new_pipeline,
            deliver=self._stages.deliver,
            trace=lambda: self._stages.trace,
            drive=self._drive,
            on_end=self._forget_run,
            on_failure=self._note_failure,
        )

    def _forget_run(self, run: Run) -> None:
        """Undo the circle of loader and epoch, so that both go when the user lets go of them."""
        if self._run is run:
            self._run = None

    def _note_failure(self, error: BaseException) -> None:
        """Of an epoch that has answered the other ranks in the background: raised when the next begins."""
        self._background_failure = error

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

    def _of_epoch(self, epoch: int) -> list[Turn]:
        """The epoch's batches, as positions among the seeds."""
        if self._orders_itself:
            return self._turns.of_epoch(epoch)
        batches = (
            _checked_positions(batch, self._source.seeds.number, "a batch of the sampler")
            for batch in self._given_batches
        )
        return [Turn(index, index, [(0, batch)]) for index, batch in enumerate(batches)]

    def _positions(self, epoch: int) -> list[Tensor]:
        return [positions for turn in self._of_epoch(epoch) for _, positions in turn.pieces]

    def _request(self, epoch: int, turn: Turn) -> Request:
        pieces = self._pieces(epoch, turn)
        if self._has_hooks:  # the user's code: in the user's thread
            return Request(turn.tick, Undone(self._made_by_hooks, turn.tick, *pieces[0]))
        request = self._workers.request(turn.tick, pieces, self.transform_sampler_output)
        if self._ahead is None:
            return request
        return ForeseenRequest(request.index, request.sampling, Draws(self.seed, self._placement.num_slots, epoch))

    def _pieces(self, epoch: int, turn: Turn) -> list[tuple[Tensor, BatchKeys]]:
        return [(positions, self._keys(epoch, turn.round, slot)) for slot, positions in turn.pieces]

    def _idle_request(self, index: int, leaving: bool) -> Request:
        return Request(index, Undone(Sampled, index, self._fetch.look_up({}), leaving))

    def _keys(self, epoch: int, index: int, slot: int | None = None) -> BatchKeys:
        """Of a batch of this slot; None: of the rank's first."""
        slot = self._placement.slots[0] if slot is None else slot
        return batch_keys(self.seed, epoch, slot, index, self.draw_block)

    @property
    def _finishing(self) -> Callable[[Any], Any] | None:
        """What becomes of every batch when it is complete: it is filled up, and then goes through the user's ``transform``."""
        return self.transform if self.pad is None else self._fill_up

    def _fill_up(self, batch: Data) -> Data:
        batch = self._padding(batch)
        return batch if self.transform is None else self.transform(batch)

    @lazy
    def _padding(self) -> Padding:
        """With classes of sizes from a trial, which is a function of the seed."""
        turns = self._turns.of_epoch(0)
        turns = turns[:-1] or turns  # the last may be smaller
        chosen = turns[:: -(-len(turns) // TRIAL) or 1]
        trial = (
            sizes_of(
                self._workers.draw_joined(
                    [(positions, self._keys(TRIAL_EPOCH, i, slot)) for slot, positions in turn.pieces]
                )
            )
            for i, turn in enumerate(chosen)
        )
        return Padding(self.data, self._source, Classes.of(trial, types_of(self.data)))

    # --- reports ------------------------------------------------------------------------------------------

    @property
    def cache(self) -> FeatureCache | TypedFeatureCache:
        """The cached rows; give it to another loader as ``cache=``.

        Raises:
            RuntimeError: this loader looks ahead.
        """
        if self._planners:
            raise RuntimeError(
                "the rows of a cache that looks ahead change from batch to batch, so it is its loader's alone; make the other loader with a replication_factor "
                "of its own"
            )
        return self._cache

    def memory(self) -> dict[str, int]:
        """Bytes held, by tier, of the topology (memory-mapped arrays count in full), and of ``batches`` under way; with ``lookahead`` also of what finds its
        rows and of the ids of the batches to come.

        The latter on the CPU is what the pool of buffers holds; on another device what the largest batch so far took there, times the
        batches that are on the device at once, at most.
        """
        memory = [tiers.memory() for tiers in self._fetch.tiers.values()]
        pipeline = self._new_pipeline()
        # And the one that the caller has.
        held = 1 + (0 if isinstance(pipeline, Direct) else pipeline.num_past("copy_to_device"))
        tiers = {tier: sum(of_type[tier] for of_type in memory) for tier in memory[0]}
        if self._ahead is not None:
            ahead = self._ahead.memory()
            tiers["cache"] += ahead["cache"]
            tiers["lookahead"] = ahead["lookahead"]
        return {
            **tiers,
            "graph": getattr(self._source.sampler, "nbytes", 0),
            "batches": self._fetch.own.bytes_under_way(held),
        }

    def _new_pipeline(self) -> Pipeline | Direct:
        stages = self._stages
        if self._has_hooks:
            return Direct(self._maker, is_ahead=False)
        if self._fetch.is_local:
            return Direct(self._maker, is_ahead=self.num_workers > 0)
        return Pipeline(
            stages.list(), depth=self.depth, device=self.device, rank=self._comm.rank, trace=stages.trace, hold=self._fetch.own.holds
        )  # fmt: skip

    def stats(self) -> LoaderStats:
        """What happened since construction or ``reset_stats``; filling the cache is not counted."""
        counts, traffic, counters = self._fetch.counts, self._source.exchange.traffic, self._counters
        by_type = {
            type_: {
                **{tier: counts[type_, tier] for tier in ("gpu", "cpu", "cache", "remote")},
                # Without sums nobody has any.
                "bytes_received": traffic.row_bytes_received[type_]
                + (traffic.row_bytes_received[SUMS] if type_ is None else 0),
            }
            for type_ in self._fetch.tiers
        }
        rows = {tier: sum(of_type[tier] for of_type in by_type.values()) for tier in ("gpu", "cpu", "cache", "remote")}
        return LoaderStats(
            batches=counters.batches,
            rows_gpu=rows["gpu"],
            rows_cpu=rows["cpu"],
            rows_cache=rows["cache"],
            rows_remote=rows["remote"],
            rows_fetched=sum(counts[type_, "fetched"] for type_ in self._fetch.tiers),
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds_by_stage=dict(counters.seconds_by_stage),
            seconds_waiting=counters.seconds_waiting,
            by_type=by_type,
            rows_partial=counts[SUMS, "fetched"],
            rows_partial_cpu=counts[HOST_SUMS, "cpu"],
        )

    def reset_stats(self) -> None:
        """Start counting anew; between epochs."""
        self._finish_epoch()
        self._fetch.counts.clear()
        self._source.exchange.traffic = Traffic()
        self._counters.reset(stage.name for stage in self._stages.list())

    @contextlib.contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Write a Chrome trace of the epochs started inside the ``with`` block: a track per stage and per worker thread.

        Open it at ui.perfetto.dev or chrome://tracing. On CUDA the spans are the host's; torch.profiler shows the same stages as
        ranges named ``salientpp::<stage>`` beside the kernels.
        """
        self._stages.trace = self._maker.trace = trace = Trace()
        try:
            yield
        finally:
            self._stages.trace = self._maker.trace = None
            Path(path).write_text(json.dumps(trace.to_chrome()))

    def _aff_init_fn(self, worker_id: int) -> None:
        # PyG's pins the process; here a worker is a thread.
        cores = self.loader_cores[worker_id]
        os.sched_setaffinity(0, cores if isinstance(cores, list) else [cores])
        self._old_worker_init_fn(worker_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@contextlib.contextmanager
def _threads_for_workers() -> Iterator[None]:
    """torch counts workers as processes and warns about more than there are cores; ours are threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _units(placement: Placement) -> range:
    """What a rank's slots draw from."""
    return range(placement.unit_of(placement.slots[0]), placement.unit_of(placement.slots[-1]) + 1)


def _seeds_of_parts(source: BatchSource, placement: Placement, split: str | None) -> list[list[Any]]:
    """What :class:`Facts` says of a rank's seeds; ``split`` if they are what the directory has under that name, and nothing else."""
    seeds, parts = source.seeds, placement.own_parts

    def words(at: Tensor | None) -> str:
        return inputs_digest(seeds.inputs, at) if split is None else f"split {split}"

    if seeds.part_of is None or len(parts) == 1:
        return [[parts.start, parts.stop, seeds.number, words(None)]]
    part_of = seeds.part_of()
    some = {part: (part_of == part).nonzero().flatten() for part in parts}
    return [[part, part + 1, at.numel(), words(at)] for part, at in some.items()]


def _seeds_by_part(everyone: Sequence[Facts]) -> dict[tuple[int, int], tuple[int, str]]:
    """Of the first part and one past the last: how many seeds, and their digest."""
    return {(first, last): (number, words) for facts in everyone for first, last, number, words in facts.seeds}


def _size_of(parts: range, seeds_by_part: Mapping[tuple[int, int], tuple[int, str]]) -> int:
    """How many seeds these parts have."""
    inside = [number for (first, last), (number, _) in seeds_by_part.items() if first in parts and last <= parts.stop]
    return sum(inside)


def _positions_by_unit(source: BatchSource, placement: Placement) -> dict[int, Tensor]:
    """Where the seeds of each unit are among a rank's; nothing of a rank that has but one unit."""
    units, part_of = _units(placement), source.seeds.part_of
    if len(units) == 1 or part_of is None:
        return {}
    of = part_of()
    parts = {unit: placement.parts_of_unit(unit) for unit in units}
    return {unit: ((of >= own.start) & (of < own.stop)).nonzero().flatten() for unit, own in parts.items()}


def _checked_positions(index: Any, num_inputs: int, name: str) -> Tensor:
    """int64 [B] positions among the seeds, of positions or of a mask."""
    index = as_tensor(index, f"{name} must hold positions of seeds, or a mask of them")
    if index.is_meta:
        raise ValueError(f"{name} must hold positions of seeds, or a mask of them, got Tensor without values")
    index = index.cpu().flatten()
    if index.dtype == torch.bool:
        if index.numel() != num_inputs:
            raise ValueError(
                f"{name} as a mask must have an entry per seed, expected {num_inputs}, got {index.numel()}"
            )
        return index.nonzero().flatten()
    if index.numel() and (index.dtype.is_floating_point or index.dtype.is_complex):  # an empty list becomes float32
        raise ValueError(f"{name} must hold integer positions of seeds, or a mask of them, got {index.dtype}")
    index = index.to(torch.int64)
    bad = ((index < 0) | (index >= num_inputs)).nonzero()
    if bad.numel():
        raise ValueError(
            f"{name} must hold positions of seeds in [0, {num_inputs}), got {int(index[bad[0]])} at place {int(bad[0])}"
        )
    return index


def _near_ids(tiers: Tiers) -> Tensor:
    """The rows of the part that have a copy on the device."""
    members = tiers.near[0].members if tiers.near else None
    return NO_IDS if members is None else members.ids


def _use_huge_pages(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        use_huge_pages(tensor)


def _contents(source: BatchSource) -> str:
    """What cached rows are of: the dataset, and how rows are encoded in order to be sent."""
    sent = (f", {column} as {source.narrow[column].format}" for column in source.exchanged if column in source.narrow)
    return source.fingerprint + "".join(sent)


def _check_cache(cache: FeatureCache | TypedFeatureCache | None, source: BatchSource, part_id: int) -> None:
    """Refuse a given cache of other contents or of another part, or one that lacks an attribute."""
    if cache is None or not len(cache):
        return
    fingerprint, owner = cache.owner or ("", None)
    if fingerprint != _contents(source) or owner is None:
        raise ValueError(
            f"the given cache holds rows of another dataset (its fingerprint is {fingerprint or 'none'}, this one's {_contents(source) or 'none'}), "
            "perhaps of before the directory was partitioned again; take the cache of a loader on the same dataset directory"
        )
    if owner != part_id:
        raise ValueError(
            f"the given cache was chosen for part {owner} and this rank serves part {part_id}; take the cache of a loader on that part"
        )
    for column in source.exchanged:
        type_, name = column
        if type_ not in source.travelling:
            continue
        of_type = cache.by_type.get(type_)
        if of_type is None or name not in of_type.rows:
            names = tuple(dict.fromkeys(name for _, name in source.exchanged))
            of = "" if type_ is None else f" of {type_!r}"
            raise ValueError(f"the given cache holds no rows of {name!r}{of}; make it with gather={names}")
        rows, cached = source.rows_of(column), of_type.rows[name]
        if (rows.dtype, rows.shape[1:]) != (cached.dtype, cached.shape[1:]):
            raise ValueError(
                f"the given cache must hold {rows.dtype} {list(rows.shape[1:])} rows of {name!r}, got {cached.dtype} "
                f"{list(cached.shape[1:])}; take the cache of a loader on the same dataset directory"
            )
