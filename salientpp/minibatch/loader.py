"""The loader: PyG's constructor, PyG's batches, made ahead of the training loop.

On a ``Data`` object it is one process's loader and needs no process group. On a partitioned graph it is one rank of many: every
rank constructs its loaders in the same order (construction agrees on sizes and fills the cache, which is collective),
and then iterates at its own pace.

**Who drives.** ``next()`` moves the pipeline on, in the caller's thread. When the user stops asking (the epoch is over
here but not elsewhere, an early ``break``, an exception), a background thread goes on answering the other ranks until all
have finished or left; the next epoch waits for it. So loops may differ in length without anyone waiting for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.utils import get_input_nodes

from salientpp.comm import DEFAULT_TIMEOUT, Comm, RankFailure
from salientpp.graph import Graph
from salientpp.minibatch.batch import DataTemplate, PartitionTemplate
from salientpp.minibatch.sampler import Sampler
from salientpp.minibatch.stages import BatchStages, Finished, Request, Sampled
from salientpp.minibatch.state import Disagreement, Point, Progress, check_state, data_digest, digest, first_point, make_state, settings
from salientpp.ops import join_key
from salientpp.pipeline import Pipeline, StageError, Trace, traced
from salientpp.plan.cache import POLICIES, Workload, check_replication_factor, plan_cache, score
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.schedule import UNEVEN, Schedule, batch_key, share_size
from salientpp.plan.vip import check_fanouts, inclusion_probability
from salientpp.store.dataset_dir import PartitionedGraph
from salientpp.store.exchange import Exchange, Traffic
from salientpp.store.shard import NO_IDS, FeatureCache, IdSet, Shard


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
class _Source:
    """What the two kinds of input have in common."""

    graph: Graph
    book: PartitionBook
    host_rows: dict[str, Tensor]
    template: DataTemplate | PartitionTemplate
    exchanged: list[str]
    seed_attributes: list[str]
    seeds: Tensor  # int64 global ids of the part
    input_id: Tensor | None  # None: positions in `seeds`
    fingerprint: str


class NeighborLoader(torch.utils.data.DataLoader):
    """Mini-batches of sampled neighbourhoods, as PyG's ``NeighborLoader`` gives them.

    Args:
        data: a homogeneous PyG ``Data``, or a :class:`~salientpp.PartitionedGraph` from :func:`salientpp.load`.
        num_neighbors: neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        input_nodes: seeds. On a ``Data``: mask, ids, or None for all. On a partitioned graph: 'train', 'val', 'test' (or
            another split), 'all', a mask [N], or global ids that this rank's part owns.
        replace: draw neighbours with replacement.
        transform: called with every batch.
        transform_sampler_output: called with every ``SamplerOutput``, in the sampling thread.
        is_sorted: ``edge_index`` is sorted by target already.
        batch_size, shuffle, drop_last, num_workers, prefetch_factor, generator: as in torch's ``DataLoader``, except that workers
            are threads that sample ahead (0: the caller's), and ``generator`` only seeds the loader.
        replication_factor: α >= 0; each rank caches ``floor(α N / K)`` remote rows.
        gpu_fraction: β in [0, 1]; this fraction of the part's rows, the hottest, is kept on ``device``.
        policy: how cached rows are chosen, a name in :data:`salientpp.plan.cache.POLICIES`.
        cache: the ``cache`` of another loader, instead of one of its own.
        gather: on a partitioned graph, the attributes that every sampled vertex gets; others come for the seeds.
        device: where batches are delivered; None: the CPU.
        depth: batches in flight, 1 to 10. 1 turns the pipeline off.
        seed: of everything random; None draws one from ``generator`` or torch's global generator (rank 0's counts).
        uneven: 'wrap', 'drop', 'exact' or 'error', see :mod:`salientpp.plan.schedule`.
        process_group: the ranks that serve the parts; None: the default group. The package makes its own group from it.
        timeout: longest wait for another rank, seconds or ``timedelta``.

    Raises:
        ValueError: an argument is wrong; with several ranks every rank raises, naming the one at fault.
    """

    def __init__(
        self,
        data: Data | PartitionedGraph,
        num_neighbors: Sequence[int],
        input_nodes: Tensor | str | Sequence[int] | None = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Data], Data] | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        replication_factor: float = 0.0,
        gpu_fraction: float = 0.0,
        policy: str = "vip",
        cache: FeatureCache | None = None,
        gather: Sequence[str] = ("x",),
        device: torch.device | str | None = None,
        depth: int = 10,
        seed: int | None = None,
        uneven: str = "wrap",
        process_group: Any = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be > 0, got {timeout.total_seconds():g} s")
        self.data = data
        self.input_nodes = input_nodes
        self.replace = bool(replace)
        self.transform = transform
        self.transform_sampler_output = transform_sampler_output
        self.replication_factor = replication_factor
        self.gpu_fraction = gpu_fraction
        self.policy = policy
        self.device = torch.device("cpu" if device is None else device)
        self.depth = depth
        self.uneven = uneven
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)

        partitioned = isinstance(data, PartitionedGraph)
        if not partitioned and not isinstance(data, Data):
            raise TypeError(
                f"data must be a homogeneous torch_geometric.data.Data or the result of salientpp.load, got {type(data).__name__}"
            )
        self._comm = Comm.create(process_group, timeout, self.device) if partitioned else Comm(None, timeout, torch.device("cpu"))

        # From here on a mistake on one rank is every rank's error, so that none waits for one that raised.
        error, source, facts = None, None, {}
        try:
            _refuse_unavailable(
                input_time=input_time,
                subgraph_type=getattr(subgraph_type, "value", subgraph_type) if directed else "induced",
                disjoint=disjoint,
                time_attr=time_attr,
                weight_attr=weight_attr,
                neighbor_sampler=neighbor_sampler,
                sampler=kwargs.get("sampler"),
                batch_sampler=kwargs.get("batch_sampler"),
            )
            self.num_neighbors = check_fanouts(num_neighbors)
            self._check_arguments(gpu_fraction, policy, cache, replication_factor, depth, uneven, seed)
            source = self._open_partition(data, gather) if partitioned else self._open_data(data, is_sorted, gather)
            # torch's random sampler refuses to have nothing to draw from; a rank without seeds is fine here.
            shuffle = bool(kwargs.pop("shuffle", False))
            with warnings.catch_warnings():
                # torch counts workers as processes and warns about more than there are cores; ours are threads.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                super().__init__(range(source.seeds.numel()), shuffle=shuffle and source.seeds.numel() > 0, **kwargs)
            if self.batch_size is None or self.batch_size < 1:
                raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
            place = self._comm.rank % self._exchange.ranks_per_part
            _check_cache(cache, source)
            facts = self._facts(source, place, seed, kwargs.get("generator"))
        except Exception as raised:
            error = raised
        everyone = self._comm.gather_facts({**facts, "error": None if error is None else f"{type(error).__name__}: {error}"})
        if error is not None:
            raise error
        _check_agreement(everyone)
        self.seed = everyone[0]["seed"]
        self._seed_is_given = seed is not None
        self._epoch_number = 0
        self._resume: int | None = None  # batches of that epoch given before, by a loaded state
        self._progress: Progress | None = None  # of the epoch begun last
        self._calls = 0
        self._seeds, self._input_id = source.seeds, source.input_id
        self._schedule = Schedule(
            num_seeds=source.seeds.numel(),
            part_id=self._exchange.part_id,
            place=place,
            ranks_per_part=self._exchange.ranks_per_part,
            seeds_per_rank=[facts["num_seeds"] for facts in everyone],
            rank=self._comm.rank,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=self.drop_last,
            uneven=uneven,
            seed=self.seed,
        )
        self._sampler = Sampler(source.graph, self.num_neighbors, self.replace)
        try:
            self._shard = self._make_shard(source)
            self._set_cache(source, cache, fill=any(facts["fills_cache"] for facts in everyone))
        except BaseException as error:
            self._comm.report_failure(f"rank {self._comm.rank} could not make its loader: {type(error).__name__}: {error}")
            raise

        workers = ThreadPoolExecutor(self.num_workers, thread_name_prefix="salientpp-sample") if self.num_workers else None
        host = ThreadPoolExecutor(1, thread_name_prefix="salientpp-gather")
        self._workers = workers
        self._stages = BatchStages(
            shard=self._shard,
            exchange=self._exchange,
            template=source.template,
            exchanged=source.exchanged,
            seed_attributes=source.seed_attributes,
            submit=partial(_submit, host),
            device=self.device,
            transform=transform,
        )
        pools = [pool for pool in (workers, host) if pool is not None]
        # Not at exit: a rank whose script has ended may still be answering others.
        weakref.finalize(self, _shut_down, pools).atexit = False
        self._run: weakref.ref[_Run] | None = None
        self._background_failure: Exception | None = None
        self.reset_stats()

    # --- construction -------------------------------------------------------------------------------------

    @staticmethod
    def _check_arguments(
        gpu_fraction: float,
        policy: str,
        cache: FeatureCache | None,
        replication_factor: float,
        depth: int,
        uneven: str,
        seed: int | None,
    ) -> None:
        if not (isinstance(gpu_fraction, (int, float)) and 0 <= gpu_fraction <= 1):
            raise ValueError(f"gpu_fraction must be in [0, 1] (the part of a part's rows kept on the device), got {gpu_fraction!r}")
        check_replication_factor(replication_factor)
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}")
        if cache is not None and not isinstance(cache, FeatureCache):
            raise TypeError(f"cache must be the cache of another loader (loader.cache), got {type(cache).__name__}")
        if cache is not None and replication_factor > 0:
            raise ValueError("pass either cache= or replication_factor=, not both: the size of a given cache is its maker's")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth must be an integer >= 1 (batches in flight), got {depth!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        if uneven not in UNEVEN:
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {uneven!r}")

    def _open_data(self, data: Data, is_sorted: bool, gather: Sequence[str]) -> _Source:
        graph = Graph.from_data(data, is_sorted=is_sorted)
        self._exchange = Exchange(self._comm, PartitionBook.trivial(graph.num_vertices))
        if tuple(gather) != ("x",):
            raise ValueError("gather is for partitioned graphs: on a Data object every attribute comes for every sampled vertex")
        _, seeds, input_id = get_input_nodes(data, _checked_seeds(self.input_nodes, graph.num_vertices))
        template = DataTemplate(data)
        return _Source(
            graph=graph,
            book=self._exchange.book,
            host_rows={name: data[name] for name in template.gathered},
            template=template,
            exchanged=template.gathered,
            seed_attributes=[],
            seeds=seeds.cpu().to(torch.int64),
            input_id=input_id,
            fingerprint="",
        )

    def _open_partition(self, part: PartitionedGraph, gather: Sequence[str]) -> _Source:
        self._exchange = Exchange(self._comm, part.book)
        if part.part_id is not None and part.part_id != self._exchange.part_id:
            raise ValueError(
                f"rank {self._comm.rank} serves part {self._exchange.part_id} of {part.num_parts}, but its graph was loaded with "
                f"part_id={part.part_id}; leave part_id out of salientpp.load"
            )
        part_id = self._exchange.part_id
        rows = part.node_rows(part_id)
        gather = [gather] if isinstance(gather, str) else list(gather)
        if gather == ["x"] and "x" not in rows:
            gather = []
        for name in gather:
            if name not in rows:
                raise ValueError(f"gather must name node attributes of {part.root} ({', '.join(sorted(rows))}), got {name!r}")
        begin, end = part.book.range_of(part_id)
        nodes, input_id = self.input_nodes, None
        if nodes is None:
            nodes = "all"
        if isinstance(nodes, str):
            seeds = input_id = part.split(nodes, part_id)
        else:
            nodes = _checked_seeds(nodes, part.num_vertices)
            if nodes.dtype == torch.bool:
                seeds = input_id = nodes[begin:end].nonzero().flatten() + begin
            else:
                seeds = nodes.to(torch.int64)
                foreign = ((seeds < begin) | (seeds >= end)).nonzero()
                if foreign.numel():
                    seed = seeds[foreign[0]]
                    raise ValueError(
                        f"seed {int(seed)} is owned by part {int(part.book.owner(seed))} but this rank serves part {part_id}; "
                        "give each rank its own seeds, or the name of a split"
                    )
        return _Source(
            graph=part.graph,
            book=part.book,
            host_rows=rows,
            template=PartitionTemplate(part.edge_rows()),
            exchanged=gather,
            seed_attributes=[name for name in rows if name not in gather],
            seeds=seeds,
            input_id=input_id,
            fingerprint=part.fingerprint,
        )

    def _facts(self, source: _Source, place: int, seed: int | None, generator: torch.Generator | None) -> dict[str, Any]:
        """What ranks tell each other at construction; all but the per-rank entries must be equal."""
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=generator))
        return {
            "seed": int(seed),
            "num_seeds": share_size(source.seeds.numel(), place, self._exchange.ranks_per_part),
            "fills_cache": self.replication_factor > 0,
            "same": {
                "dataset": source.fingerprint,
                "batch_size": self.batch_size,
                "drop_last": self.drop_last,
                "uneven": self.uneven,
                "depth": self.depth,
                "gather": [
                    [name, str(source.host_rows[name].dtype), list(source.host_rows[name].shape[1:])] for name in source.exchanged
                ],
            },
        }

    def _make_shard(self, source: _Source) -> Shard:
        part_id = self._exchange.part_id
        size = source.book.size_of(part_id)
        num_hot = int(self.gpu_fraction * size)
        if num_hot == 0:
            hot = NO_IDS
        elif isinstance(self.data, PartitionedGraph):
            hot = torch.arange(num_hot)  # rows of a part are in VIP order
        else:
            heat = inclusion_probability(
                source.graph, source.seeds, self.num_neighbors, self.batch_size, include_seeds=True, replace=self.replace
            )
            hot = torch.sort(heat, descending=True, stable=True).indices[:num_hot].sort().values
        rows = {name: source.host_rows[name] for name in source.exchanged}
        shard = Shard(source.book, part_id, rows, gpu_ids=hot, device=self.device)
        shard.host_rows.update({name: source.host_rows[name] for name in source.seed_attributes})
        return shard

    def _set_cache(self, source: _Source, cache: FeatureCache | None, fill: bool) -> None:
        """Fetch this rank's cache if any rank has one to fetch (that is collective), or take the given one."""
        if fill and self._exchange.book.num_parts > 1:
            members = NO_IDS
            if self.replication_factor > 0:
                members = plan_cache(self._scores(source), source.book, self._exchange.part_id, self.replication_factor)
            chosen = IdSet.of(members, source.book.num_vertices)
            self._shard.cache = self._exchange.fetch_cache(self._shard, chosen, source.exchanged)
        if cache is not None:
            self._shard.cache = cache

    def _scores(self, source: _Source) -> Tensor:
        part = self.data
        stored = {"num_neighbors": self.num_neighbors, "batch_size": self.batch_size, "seeds": self.input_nodes}
        if self.policy == "vip" and not self.replace and part.manifest["workload"] == stored:
            return part.vip(self._exchange.part_id)
        workload = Workload(
            source.graph, source.book, self._exchange.part_id, source.seeds, self.num_neighbors, self.batch_size, self.replace
        )
        return score(self.policy, workload)

    def __call__(self, index: Tensor | Sequence[int]) -> Data:
        """The batch of the seeds at these positions of ``input_nodes``; on one rank.

        Args:
            index: int64 [B] positions, or a list.
        """
        if self._comm.size > 1:
            raise RuntimeError("a single batch cannot be asked for on several ranks: the others would not answer; iterate instead")
        positions = torch.as_tensor(index, dtype=torch.int64).flatten()
        self._calls += 1
        pipeline = Pipeline(self._stages.list(), depth=1, device=self.device)
        # Epochs count up from 0, so the draws of calls are their own.
        return pipeline.tick(Request(0, _completed(self._sample, -self._calls, 0, positions))).batch

    # --- iteration ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._schedule.num_batches

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch: with the seed it fixes the order and all draws.

        After ``load_state_dict`` the number of the state's epoch keeps the state, and any other leaves it.
        """
        if int(epoch) != self._epoch_number:
            self._resume = None
        self._epoch_number = int(epoch)
        self._progress = None

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: plain values, for ``torch.save`` or JSON. Each rank saves its own; see :mod:`salientpp.minibatch.state`.

        Inside an epoch, and after leaving it early, it counts the batches that were given; after the end it is the start of the next.
        """
        epoch, batches = self._epoch_number, self._resume or 0
        if self._progress is not None and not self._progress.ended:
            epoch, batches = self._progress.epoch, self._progress.batches
        return make_state(epoch, batches, self.seed, self._fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter(loader)`` go on where ``state_dict()`` was called; on several ranks every rank loads its own state.

        A loader that was made without a seed takes the state's.

        Raises:
            ValueError: the state is of other data, arguments or another rank, or none at all; the loader stays as it was.
        """
        given_seed = self.seed if self._seed_is_given else None
        epoch, batches, seed = check_state(state, self._fingerprint, len(self), given_seed)
        self.seed = seed
        self._schedule = dataclasses.replace(self._schedule, seed=seed)
        self._epoch_number, self._resume, self._progress = epoch, batches, None

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        partitioned = isinstance(self.data, PartitionedGraph)
        return {
            "dataset": self.data.fingerprint if partitioned else data_digest(self.data, self._sampler.graph),
            "input_nodes": digest(self._seeds),
            **settings(self._sampler, but=["graph"]),
            "batch_size": self.batch_size,
            "shuffle": self._schedule.shuffle,
            "drop_last": self.drop_last,
            "uneven": self.uneven,
            "world_size": self._comm.size,
            "rank": self._comm.rank,
        }

    def __iter__(self) -> Iterator[Data]:
        self._finish_epoch()
        run = _Run(self, self._epoch_number, self._resume)
        self._progress, self._resume = run.progress, None
        self._epoch_number += 1
        self._run = weakref.ref(run)
        return _Epoch(run)

    def _finish_epoch(self) -> None:
        """On several ranks, leave an unfinished epoch and wait until all ranks have."""
        run = self._run() if self._run is not None else None
        if run is not None and self._comm.size > 1:
            run.leave()
            run.join()
        if self._background_failure is not None:
            raise self._background_failure

    def _request(self, epoch: int, index: int, positions: Tensor) -> Request:
        submit = _completed if self._workers is None else self._workers.submit
        return Request(index, submit(self._work_on_sample, epoch, index, positions))

    def _work_on_sample(self, epoch: int, index: int, positions: Tensor) -> Sampled:
        with traced(self._stages.trace, f"worker: {threading.current_thread().name}", index):
            return self._sample(epoch, index, positions)

    def _sample(self, epoch: int, index: int, positions: Tensor) -> Sampled:
        mfg = self._sampler.sample(self._seeds[positions], batch_key(self.seed, epoch, self._comm.rank, index))
        input_id = positions if self._input_id is None else self._input_id[positions]
        if self.transform_sampler_output is not None:
            mfg.metadata = (input_id, None)
            mfg = self.transform_sampler_output(mfg)
        return Sampled(index, positions.numel(), input_id, mfg, self._shard.look_up(mfg.node))

    def _idle_request(self, index: int, leaving: bool) -> Request:
        return Request(index, _completed(Sampled, index, 0, NO_IDS, None, self._shard.look_up(NO_IDS), leaving))

    # --- reports ------------------------------------------------------------------------------------------

    @property
    def cache(self) -> FeatureCache:
        """The cached rows; give it to another loader as ``cache=``."""
        return self._shard.cache

    def memory(self) -> dict[str, int]:
        """Bytes held, by tier, and of the topology; memory-mapped arrays count in full."""
        return {**self._shard.memory(), "graph": self._sampler.graph.nbytes}

    def stats(self) -> LoaderStats:
        """What happened since construction or ``reset_stats``; filling the cache is not counted."""
        rows, traffic = self._stages.row_counts, self._exchange.traffic
        return LoaderStats(
            batches=self._batches_given,
            rows_gpu=rows.gpu,
            rows_cpu=rows.cpu,
            rows_cache=rows.cache,
            rows_remote=rows.remote,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds_by_stage=dict(self._seconds_by_stage),
            seconds_waiting=self._seconds_waiting,
        )

    def reset_stats(self) -> None:
        """Start counting anew; between epochs."""
        self._finish_epoch()
        self._stages.row_counts = type(self._stages.row_counts)()
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_neighbors={self.num_neighbors}, batch_size={self.batch_size}, batches={len(self)})"


class _Run:
    """One epoch on this rank: what enters the pipeline, and who turns the crank.

    Args:
        resume: batches that were given before, in a run that stopped; None: this epoch starts anew.
    """

    unfinished: weakref.WeakSet[_Run] = weakref.WeakSet()

    def __init__(self, loader: NeighborLoader, epoch: int, resume: int | None = None) -> None:
        self._loader = loader
        self._epoch = epoch
        self._comm = loader._comm
        self._positions = loader._schedule.batches(epoch)
        self._rounds = loader._schedule.num_rounds
        self._pipeline = Pipeline(
            loader._stages.list(), depth=loader.depth, device=loader.device, rank=loader._comm.rank, trace=loader._stages.trace
        )
        self._ahead: deque[Request] = deque()
        self._most_ahead = 1 + loader.num_workers * (loader.prefetch_factor or 2)
        self._first = resume or 0  # batch to be given first
        self._resumed = resume is not None
        self._requested = self._first  # batches handed to the sampling threads
        self._entered = self._first  # rounds entered into the pipeline
        self._is_open = self._comm.size == 1 or self._rounds == 0
        self.progress = Progress(epoch, self._first)
        self._left = False
        self._all_left = False
        self._answering: threading.Thread | None = None
        self._failure: BaseException | None = None
        if self._comm.size > 1:
            self.unfinished.add(self)

    def give(self) -> Data:
        """The next batch; StopIteration after the last."""
        if self._failure is not None:
            raise self._failure
        if self._left or self.progress.batches == len(self._positions):
            self.progress.ended = self.progress.batches == len(self._positions)
            self.leave()
            raise StopIteration
        started = time.perf_counter()
        finished = None
        while finished is None or finished.idle:
            finished = self._tick()
        self.progress.batches += 1
        self._loader._batches_given += 1
        self._loader._seconds_waiting += time.perf_counter() - started
        return finished.batch

    def _tick(self) -> Finished | None:
        try:
            if not self._is_open:
                self._open()
            finished = self._pipeline.tick(self._next_request())
        except BaseException as error:
            self._failure = self._failure or self._pipeline.failure or error
            if not isinstance(error, Disagreement) and not isinstance(error.__cause__, RankFailure):
                self._comm.report_failure(str(self._failure))
            raise
        for name, seconds in self._pipeline.seconds.items():
            self._loader._seconds_by_stage[name] += seconds
            self._pipeline.seconds[name] = 0.0
        if finished is not None:
            self._all_left |= finished.all_left
        return finished

    def _open(self) -> None:
        """Agree with the other ranks on the round to start with. Where they resume an epoch before this one, answer them in it first."""
        start = self._first if self._first < len(self._positions) else self._rounds
        resumed = self._resumed
        while True:
            numbers = [self._epoch, start, int(resumed), join_key(self._loader.seed)]
            try:
                everyone = self._comm.gather_numbers(numbers)
            except BaseException as error:
                self._failure = StageError.of(error, self._comm.rank, self._first, "open_epoch")
                if isinstance(error, Exception):
                    raise self._failure from error
                raise
            points = [Point(epoch, first, bool(flag), key) for epoch, first, flag, key in everyone]
            epoch, self._entered = first_point(points)
            if epoch == self._epoch:
                self._is_open = True
                return
            behind = _Run(self._loader, epoch)
            behind._left = behind._is_open = True
            behind._entered = self._entered
            while not behind._is_over():
                self._comm.check_script()
                behind._tick()
            resumed = False

    def _next_request(self) -> Request | None:
        """The next round's batch; a rank without one of its own enters an empty one while others have some."""
        if self._entered == self._rounds or self._all_left:
            return None
        index = self._entered
        self._entered += 1
        if self._left or index >= len(self._positions):
            return self._loader._idle_request(index, leaving=True)
        if index < self._first:
            return self._loader._idle_request(index, leaving=False)
        while self._requested < len(self._positions) and len(self._ahead) < self._most_ahead:
            self._ahead.append(self._loader._request(self._epoch, self._requested, self._positions[self._requested]))
            self._requested += 1
        return self._ahead.popleft()

    def leave(self) -> None:
        """Give no more batches; answer the other ranks, in the background, until all have left."""
        if self._left:
            return
        self._left = True
        for request in self._ahead:
            request.sampling.cancel()
        self._ahead.clear()
        if self._is_over():
            return
        self._answering = threading.Thread(target=self._answer, name="salientpp-answer")
        self._answering.start()

    def leave_at_exit(self) -> None:
        """``leave`` where no thread can be started any more."""
        if self._left or self._is_over():
            return
        self._left = True
        self._answer()

    def _is_over(self) -> bool:
        """Whether no other rank can want anything more in this epoch."""
        done = self._is_open and self._pipeline.in_flight == 0 and (self._entered == self._rounds or self._all_left)
        return self._comm.size == 1 or done or self._failure is not None

    def _answer(self) -> None:
        try:
            while not self._is_over():
                self._comm.check_script()
                self._tick()
        except Exception as error:
            self._failure = self._loader._background_failure = error

    def join(self) -> None:
        """Wait until the others have left too; raises what went wrong meanwhile."""
        if self._answering is not None:
            self._answering.join()
            self._answering = None
        if self._failure is not None:
            raise self._failure


class _Epoch:
    """What ``iter(loader)`` returns: letting go of it leaves the epoch."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Data:
        return self._run.give()

    def close(self) -> None:
        """Leave the epoch early."""
        self._run.leave()

    def __del__(self) -> None:
        # At interpreter exit a thread can no longer be started, and trying may block; then `_leave_at_exit` was before.
        if not sys.is_finalizing():
            self._run.leave()


def _checked_seeds(nodes: Any, num_vertices: int) -> Any:
    """``input_nodes`` as a CPU mask or ids in range, or None."""
    if nodes is None:
        return None
    if isinstance(nodes, (tuple, str)) and not all(isinstance(node, int) for node in nodes):
        raise ValueError(f"input_nodes of a homogeneous graph must be a mask, ids or None, got {nodes!r}")
    nodes = torch.as_tensor(nodes).cpu() if not isinstance(nodes, Tensor) else nodes.cpu()
    if nodes.dim() != 1:
        raise ValueError(f"input_nodes must have 1 dimension, got shape {list(nodes.shape)}")
    if nodes.dtype == torch.bool:
        if nodes.numel() != num_vertices:
            raise ValueError(f"input_nodes as a mask must have shape [{num_vertices}], got {list(nodes.shape)}")
        return nodes
    if nodes.numel() == 0:
        return nodes.to(torch.int64)
    if nodes.dtype.is_floating_point or nodes.dtype.is_complex:
        raise ValueError(f"input_nodes must be a mask or integer ids, got {nodes.dtype}")
    bad = ((nodes < 0) | (nodes >= num_vertices)).nonzero()
    if bad.numel():
        raise ValueError(f"input_nodes must be in [0, {num_vertices}), got {int(nodes[bad[0]])} at position {int(bad[0])}")
    return nodes


def _refuse_unavailable(**arguments: Any) -> None:
    defaults = {"subgraph_type": "directional", "disjoint": False}
    for name, value in arguments.items():
        if value is not None and value != defaults.get(name):
            raise NotImplementedError(f"{name}={value!r} is not available yet; leave it at {defaults.get(name)!r}")


def _check_agreement(everyone: list[dict[str, Any]]) -> None:
    """Raise on every rank what one of them found, or where they differ."""
    for rank, facts in enumerate(everyone):
        if facts["error"] is not None:
            raise ValueError(f"rank {rank} could not make its loader: {facts['error']}")
    for rank, facts in enumerate(everyone):
        for name, value in facts["same"].items():
            if value != everyone[0]["same"][name]:
                raise ValueError(f"all ranks must have the same {name}, got {everyone[0]['same'][name]} on rank 0 and {value} on rank {rank}")


def _submit(pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> Future:
    """``pool.submit``, or a call at once where the interpreter is exiting and pools take no more work."""
    try:
        return pool.submit(function, *args)
    except RuntimeError:
        return _completed(function, *args)


def _completed(function: Callable[..., Any], *args: Any) -> Future:
    future: Future = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def _check_cache(cache: FeatureCache | None, source: _Source) -> None:
    """Refuse a given cache that lacks an attribute or has other rows."""
    for name in source.exchanged if cache is not None and len(cache.members) else ():
        if name not in cache.rows:
            raise ValueError(f"the given cache holds no rows of {name!r}; make it with gather={tuple(source.exchanged)}")
        rows, cached = source.host_rows[name], cache.rows[name]
        if (rows.dtype, rows.shape[1:]) != (cached.dtype, cached.shape[1:]):
            raise ValueError(
                f"the given cache must hold {rows.dtype} {list(rows.shape[1:])} rows of {name!r}, got {cached.dtype} "
                f"{list(cached.shape[1:])}; take the cache of a loader on the same dataset directory"
            )


def _leave_at_exit() -> None:
    """A rank whose script ends in mid-epoch answers the others to the end; one that fails tells them."""
    for run in list(_Run.unfinished):
        run.leave_at_exit()


atexit.register(_leave_at_exit)


def _shut_down(pools: list[ThreadPoolExecutor]) -> None:
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
