"""The loader whose seeds are vertices: PyG's ``NeighborLoader``, on an object in memory or on a partitioned graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from salientpp.batch.template import add_node_attributes
from salientpp.engine.source import (
    BatchSource,
    Probability,
    Seeds,
    access_of_part,
    access_probability,
    check_gather_is_default,
    connect_part,
    open_data,
    open_partition,
)
from salientpp.engine.way import Way
from salientpp.graph.from_pyg import count_vertices
from salientpp.loader.batch_loader import BatchLoader
from salientpp.loader.options import Options, Pad, SamplingOptions, Uneven
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.sampling.neighbor_sampler import SharedDraws
from salientpp.sampling.seeds import check_one_per_seed, part_nodes, read_seeds, split_type
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.rows import RowSource
from salientpp.vip.inclusion import uniform_start
from salientpp.vip.policies import Policy
from salientpp.ways.lookahead.planner import Window
from salientpp.ways.sums.plan import PartialAggregation
from salientpp.ways.sums.way import messages_of


class NeighborLoader(BatchLoader, torch_geometric.loader.NeighborLoader):
    """Mini-batches of sampled neighbourhoods, as PyG's ``NeighborLoader`` gives them, which it is an instance of.

    Args:
        data: a PyG ``Data`` or ``HeteroData``, a pair of PyG's ``FeatureStore`` and ``GraphStore``, or a
            :class:`~salientpp.PartitionedGraph` from :func:`salientpp.load`.
        num_neighbors: neighbours per vertex and hop, nearest the seeds first; -1 takes all. Of a ``HeteroData`` also a mapping from
            edge types to such lists.
        input_nodes: seeds. On a ``Data``: mask, ids, or None for all. On a ``HeteroData``: a node type, or (node type, mask or ids).
            On a partitioned graph: 'train', 'val', 'test' (or another split), 'all', a mask [N], or global ids that this rank's part
            owns; with several types (node type, one of these).
        input_time: [number of seeds]; the seeds' times, instead of those under ``time_attr``.
        replace, subgraph_type, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted, directed: how to draw, see
            :class:`~salientpp.NeighborSampler`.
        transform: called with every batch.
        transform_sampler_output: called with every ``SamplerOutput``, in the sampling thread.
        filter_per_worker: only for who calls ``collate_fn``: False leaves ``filter_fn`` to him. Attributes are gathered beside the caller's thread
            in any case.
        neighbor_sampler: a PyG ``BaseSampler`` to draw with; then the arguments that say how to draw are not looked at.
        batch_size, shuffle, drop_last, num_workers, prefetch_factor, generator, sampler, batch_sampler, pin_memory, worker_init_fn,
            persistent_workers: as in torch's ``DataLoader``, except that workers are threads that sample ahead (0: the caller's), and
            ``generator`` only seeds the loader.
        replication_factor: α >= 0; each rank, or each host's ranks together, cache ``floor(α N / K)`` remote rows, where K is how many ranks or hosts
            have rows that others do not. With several types of vertices as many as take
            ``α / K`` of the bytes of all rows that may travel.
        gpu_fraction: β in [0, 1]; this fraction of the part's rows, the hottest, is kept on ``device``.
        gpu_cache_bytes: as many of the cached rows as fit into this, the hottest, are kept on ``device`` too.
        zero_copy: on a CUDA device, keep the part's rows and the cached ones in page-locked host memory and let the device read them there,
            instead of gathering them in staging buffers; takes host memory for all of them, and needs Triton.
        dtype: of delivered ``x``, which may be stored narrower: converted on ``device``, a plain cast. None: as stored.
        policy: how cached rows are chosen: a name in :data:`salientpp.vip.policies.POLICIES`, or a function that scores the vertices of a
            :class:`~salientpp.vip.policies.Workload`, float [N], the higher the sooner cached, 0 never. With several types of vertices, or by
            weights, a name in :data:`salientpp.vip.policies.TYPED_POLICIES`, or a function of a :class:`~salientpp.vip.policies.TypedWorkload`.
        cache: the ``cache`` of another loader, instead of one of its own.
        rows: name -> where the rows of that vertex attribute come from, instead of the data: a tensor, or an object with ``shape``, ``dtype`` and
            ``take`` (a :class:`~salientpp.store.rows.RowSource`). Row i is vertex i's; on a partitioned graph that of the part's i-th vertex.
            Of a ``HeteroData``, (node type, name) -> rows.
        gather: on a partitioned graph, the attributes that every sampled vertex gets, each named once or more; others come for the
            seeds. Without any, no row travels. With several types a name means this attribute of every type that has it, and
            (node type, name) that of one.
        device: where batches are delivered; None: the CPU.
        depth: batches in flight, 1 to 10. 1 turns the pipeline off. Without other ranks or another device there is none.
        seed: of everything random; None draws one from ``generator`` or torch's global generator (rank 0's counts).
        uneven: 'wrap', 'drop', 'exact' or 'error', see :mod:`salientpp.sampling.schedule`; None: 'wrap' with ``shuffle``, without it 'exact'.
        process_group: the ranks that serve the parts; None: the default group. The package makes its own group from it.
        timeout: longest wait for another rank, seconds or ``timedelta``; 0: the default.
        share: (rank, number of ranks): of a ``Data`` or ``HeteroData`` that every process holds, visit this process's share of the seeds.
            All processes pass the same ``seed``, which ``shuffle`` requires; nobody talks to anybody.
        pad: 'bucket': fill batches up to few sizes, for compiled models, see :mod:`salientpp.loader.padding`.
        ranks_per_host: on a partitioned graph, how many ranks each host has, a number or a list with one for every host. They hold the rows of their parts
            once and share one cache; α then counts per host. None: what torchrun or SLURM says, or 1 where neither speaks or
            memory cannot be shared. See :mod:`salientpp.ranks.placement`.
        slots: how many share an epoch's batches, from the number of ranks to 16,384; any number of ranks gives the same batches of each. None: the
            number of ranks.
        join_slots: give the batches that a rank's slots have in a round as one, their MFGs side by side; each remote row is fetched once.
        shared_draws: None: every vertex draws its neighbours by itself. 'batch': every vertex t has one number r_t in a batch, the same for all hops, and
            whoever lists t among more neighbours than its fanout takes those with the smallest r (LABOR-0), so that a batch has fewer vertices. Lists of
            more than 1,000 draw by themselves. Not with ``replace`` or ``weight_attr``.
        draw_block: so many batches of a slot that follow one another draw alike: a vertex that two of them expand at the same hop (with ``shared_draws``,
            at any) draws the same neighbours in both. Whose own sampler draws has none.
        lookahead: on a partitioned graph, how many of its next batches a rank knows, 0 to 8,192, or 'auto': as many as are worth their memory. The cache then
            follows them: batches stay the same, and fewer rows travel. It takes the memory that ``replication_factor`` gives, ids of the batches to come
            included, and neighbours are drawn twice. Every rank has a cache of its own, also where ranks share a host. Not with another policy than 'vip'
            or 'vip-hop', nor with ``cache``, ``zero_copy``, ``gpu_cache_bytes`` or ``transform_sampler_output``.
        send_as: on a partitioned graph, name of an attribute that every sampled vertex gets -> the format that its rows travel in and are cached in,
            ``{"x": "int8"}``, see :mod:`salientpp.store.narrow`. Each row is delivered as it would be read from such a message, wherever it comes from, so
            batches do not depend on who has which rows. For a directory that was partitioned with ``store_as`` leave it out.
        partial_aggregation: on a partitioned graph with one type of vertices: neighbours in the last hop that another rank has come as their 'sum', 'mean' or
            'max', in one row for each vertex that they are neighbours of, where that is fewer bytes than their rows. They and their edges are not in the batch,
            which has ``partial`` instead (:class:`~salientpp.ways.sums.way.Partial`); :func:`salientpp.nn.merge_partial` makes the model's first
            layer add it. 'auto': 'mean', where a trial of this rank's first epoch gains 3 % or more.
        partial_weight: with ``partial_aggregation``, the edge attribute that the first layer is given as ``edge_weight``: rows are multiplied by the weights of
            their edges before they are summed. Weights travel with the request. None: rows are summed as they are.
        ways: further methods that move fewer bytes for the same batches, as objects of :class:`~salientpp.engine.way.Way`; the same on all ranks.
        input_id, custom_cls: as in PyG's ``NodeLoader``.

    Raises:
        ValueError: an argument is wrong; with several ranks every rank raises, naming the one at fault.
    """

    _kinds_of_data = (Data, HeteroData, PartitionedGraph)
    _kinds_in_words = "a torch_geometric.data.Data, a HeteroData, a pair of FeatureStore and GraphStore, or the result of salientpp.load"

    def __init__(
        self,
        data: Data | HeteroData | PartitionedGraph,
        num_neighbors: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]],
        input_nodes: Tensor | str | Sequence[int] | tuple[str, Any] | None = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Data], Data] | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        *,
        replication_factor: float = 0.0,
        gpu_fraction: float = 0.0,
        gpu_cache_bytes: int = 0,
        zero_copy: bool = False,
        dtype: torch.dtype | None = None,
        policy: Policy = "vip",
        cache: FeatureCache | TypedFeatureCache | None = None,
        rows: Mapping[Any, Tensor | RowSource] | None = None,
        gather: Iterable[str] = ("x",),
        device: torch.device | str | None = None,
        depth: int = 10,
        seed: int | None = None,
        uneven: Uneven = None,
        process_group: Any = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        share: tuple[int, int] | None = None,
        pad: Pad = None,
        ranks_per_host: int | Sequence[int] | None = None,
        slots: int | None = None,
        join_slots: bool = False,
        shared_draws: SharedDraws = None,
        draw_block: int = 1,
        lookahead: Window = 0,
        send_as: Mapping[Any, str] | None = None,
        partial_aggregation: PartialAggregation = None,
        partial_weight: str | None = None,
        ways: Sequence[Way] = (),
        input_id: Tensor | None = None,
        custom_cls: type | None = None,
        **kwargs: Any,
    ) -> None:
        # Lightning makes a loader anew from its attributes, to put another sampler into it: each argument is one.
        self.input_nodes = input_nodes
        self.input_time = input_time
        self.input_id = input_id
        self.custom_cls = custom_cls
        self.gather = gather
        self.filter_per_worker = filter_per_worker
        sampling = SamplingOptions(
            num_neighbors=num_neighbors, replace=replace, subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
            time_attr=time_attr, weight_attr=weight_attr, is_sorted=is_sorted, directed=directed, neighbor_sampler=neighbor_sampler,
            shared_draws=shared_draws,
        )  # fmt: skip
        options = Options(
            transform=transform, transform_sampler_output=transform_sampler_output, replication_factor=replication_factor,
            gpu_fraction=gpu_fraction, gpu_cache_bytes=gpu_cache_bytes, zero_copy=zero_copy, dtype=dtype, policy=policy, cache=cache, rows=rows,
            device=device, depth=depth, seed=seed, uneven=uneven, process_group=process_group, timeout=timeout, share=share,
            pad=pad, ranks_per_host=ranks_per_host, slots=slots, join_slots=join_slots, draw_block=draw_block,
            lookahead=lookahead, send_as=send_as, partial_aggregation=partial_aggregation, partial_weight=partial_weight, ways=ways,
        )  # fmt: skip
        super().__init__(data, sampling, options, kwargs)

    def _open_source(self, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        data = self.data
        if isinstance(data, PartitionedGraph):
            return self._open_partition(data, comm, sampling)
        _check_times(self.input_time, sampling)
        sampler = sampling.sampler(data, "sample_from_nodes")
        inputs = _node_inputs(data, self.input_nodes, self.input_time, self.input_id)
        check_gather_is_default(self.gather)
        seeds = Seeds(
            inputs=inputs,
            number=inputs.node.numel(),
            draw=sampler.sample_from_nodes,
            add_batch_attributes=partial(add_node_attributes, input_type=inputs.input_type),
            access_probability=partial(_access_probability, sampler, inputs),
        )
        return open_data(data, comm, sampler, seeds, rows=self.rows, custom_cls=self.custom_cls)

    def _open_partition(self, part: PartitionedGraph, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        _check_times(self.input_time, sampling)
        sampler = sampling.sampler_of_part(part)
        connected = connect_part(
            part,
            comm,
            self.slots,
            self._hosts,
            [
                *messages_of(self.partial_aggregation, self.partial_weight),
                *(message for way in self.ways for message in way.messages),
            ],
        )
        inputs, split = part_nodes(connected.own, connected.own_part, self.input_nodes, self.input_time, self.input_id)
        start = partial(_start, inputs)
        seeds = Seeds(
            inputs=inputs,
            number=inputs.node.numel(),
            draw=sampler.sample_from_nodes,
            add_batch_attributes=partial(add_node_attributes, input_type=inputs.input_type),
            access_probability=None
            if connected.is_in_order
            else partial(access_of_part, connected, sampler, inputs, start),
            split=split,
            part_of=partial(connected.own.whole.books[inputs.input_type].owner, inputs.node),
            start=start,
        )
        return open_partition(
            connected,
            sampler,
            seeds,
            gather=self.gather,
            rows=self.rows,
            custom_cls=self.custom_cls,
            send_as=self.send_as,
        )

    @property
    def node_sampler(self) -> BaseSampler:
        """What draws, by PyG's name."""
        return self.engine.basis.source.sampler


def _start(inputs: NodeSamplerInput, batch_size: int) -> dict[str | None, Callable[[int], Tensor]]:
    """How probably a batch starts from each vertex."""
    return {inputs.input_type: uniform_start(inputs.node, batch_size)}


def _access_probability(sampler: BaseSampler, inputs: NodeSamplerInput, batch_size: int) -> Probability:
    """How probably a batch needs each row."""
    return access_probability(sampler, _start(inputs, batch_size), inputs.node, batch_size)


def _check_times(input_time: Tensor | None, sampling: SamplingOptions) -> None:
    if input_time is not None and sampling.time_attr is None:
        raise ValueError(
            "Received conflicting 'input_time' and 'time_attr' arguments: 'input_time' is set while 'time_attr' is not set."
        )


def _node_inputs(data: Any, nodes: Any, time: Tensor | None, input_id: Tensor | None) -> NodeSamplerInput:
    """All seeds of what one process holds, with PyG's meaning of ``input_nodes``."""
    sizes = count_vertices(data)
    type_ = None
    if None not in sizes:
        type_, nodes = split_type(nodes, sizes)
    ids, is_mask = (
        (torch.arange(sizes[type_], device="cpu"), False) if nodes is None else read_seeds(nodes, sizes[type_], type_)
    )
    if is_mask and input_id is None:
        input_id = ids
    check_one_per_seed(ids, input_time=time, input_id=input_id)
    return NodeSamplerInput(input_id, ids, time, type_)
