"""Loader whose seeds are vertices: PyG's ``NeighborLoader``, for an object in memory or a partitioned graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType
from typing_extensions import Unpack

from salientpp.engine.seeds import vertex_seeds, vertices_of_part
from salientpp.engine.source import BatchSource, open_data
from salientpp.graph.from_pyg import count_vertices
from salientpp.loader.batch_loader import BatchLoader
from salientpp.loader.options import NeighborLoaderOptions
from salientpp.loader.pyg_arguments import SamplingOptions
from salientpp.loader.signature import divided, with_options
from salientpp.loader.values import Options
from salientpp.ranks.comm import Comm
from salientpp.sampling.seeds import check_one_per_seed, read_seeds, split_type
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.sums.way import messages_of


@with_options()
class NeighborLoader(BatchLoader, torch_geometric.loader.NeighborLoader):
    """Mini-batches of sampled neighbourhoods. The class derives from PyG's ``NeighborLoader`` and gives the same batches.

    Start here: ``data``, ``num_neighbors``, ``input_nodes``, ``batch_size``, ``shuffle``, ``num_workers``, ``transform``,
    <start>.
    The page "Loader options" of the documentation describes each option. By purpose, the others are:

    <groups>
    * As in PyG and torch: the rest.

    Args:
        data: a PyG ``Data`` or ``HeteroData``, a pair of PyG's ``FeatureStore`` and ``GraphStore``, or a
            :class:`~salientpp.PartitionedGraph` from :func:`salientpp.load`.
        num_neighbors: number of neighbours drawn per vertex, one number for each hop, beginning at the seeds; -1 draws all. For a
            ``HeteroData`` also a mapping from edge types to such lists.
        input_nodes: seeds. On a ``Data``: mask, ids, or None for all. On a ``HeteroData``: a node type, or (node type, mask or ids).
            On a partitioned graph: 'train', 'val', 'test' (or another split), 'all', a mask [N], or global ids that this rank's part
            owns. If it has several node types: (node type, one of these).
        input_time: [number of seeds]; times of the seeds, instead of those under ``time_attr``.
        replace, subgraph_type, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted, directed: how neighbours are drawn, see
            :class:`~salientpp.NeighborSampler`.
        transform: function that is called with every batch, and returns the batch to deliver.
        transform_sampler_output: function that is called with every ``SamplerOutput`` in the sampling thread, and returns the one to use.
        filter_per_worker: only for direct calls of ``collate_fn``: if False, the caller applies ``filter_fn``. Attributes are always
            gathered outside the caller's thread.
        neighbor_sampler: a PyG ``BaseSampler`` to draw with; the arguments that say how to draw are then ignored. 'device': the
            loader's sampler draws by kernels on ``device``, and batches stay the same.
        batch_size, shuffle, drop_last, num_workers, prefetch_factor, generator, sampler, batch_sampler, pin_memory, worker_init_fn,
            persistent_workers: as in torch's ``DataLoader``, with two exceptions. Workers are threads that sample ahead (0: the caller's
            thread samples), and ``generator`` only seeds the loader.
        <options>
        input_id, custom_cls: as in PyG's ``NodeLoader``.

    Raises:
        ValueError: an argument is wrong; with several ranks every rank raises, and the message names the rank at fault.
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
        neighbor_sampler: BaseSampler | Literal["device"] | None = None,
        directed: bool = True,
        *,
        input_id: Tensor | None = None,
        custom_cls: type | None = None,
        **options: Unpack[NeighborLoaderOptions],
    ) -> None:
        # Lightning constructs a second loader from the attributes of this one, to replace its sampler, so each argument is an attribute.
        self.input_nodes = input_nodes
        self.input_time = input_time
        self.input_id = input_id
        self.custom_cls = custom_cls
        self.filter_per_worker = filter_per_worker
        own, kwargs = divided(options)
        given = Options(transform=transform, transform_sampler_output=transform_sampler_output, **own)
        sampling = SamplingOptions(
            num_neighbors=num_neighbors, replace=replace, subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
            time_attr=time_attr, weight_attr=weight_attr, is_sorted=is_sorted, directed=directed, neighbor_sampler=neighbor_sampler,
            shared_draws=given.shared_draws, time_window=given.time_window,
        )  # fmt: skip
        super().__init__(data, sampling, given, kwargs)

    def _seeds_given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("input_nodes", "input_time", "input_id")}

    def _open_source(self, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        data, given = self.data, (self.input_nodes, self.input_time, self.input_id)
        if self.input_time is not None and sampling.time_attr is None:
            raise ValueError(
                "Received conflicting 'input_time' and 'time_attr' arguments: 'input_time' is set while 'time_attr' is not set."
            )
        if isinstance(data, PartitionedGraph):
            given_options = self._given_options
            reduction = "mean" if "sums" in given_options.memory_allow else given_options.partial_aggregation
            messages = messages_of(reduction, given_options.partial_aggregation_weight)
            return self._open_partition(
                comm, sampling, lambda part, sampler: vertices_of_part(part, sampler, *given), messages
            )
        sampler = sampling.sampler(data, "sample_from_nodes")
        inputs = _node_inputs(data, *given)
        seeds = vertex_seeds(sampler, inputs)
        return open_data(data, comm, sampler, seeds, columns=self.columns, custom_cls=self.custom_cls)

    @property
    def node_sampler(self) -> BaseSampler:
        """The sampler, under PyG's name."""
        return self.engine.basis.source.sampler


def _node_inputs(data: Any, nodes: Any, time: Tensor | None, input_id: Tensor | None) -> NodeSamplerInput:
    """Returns all seeds, for data that one process holds; ``input_nodes`` means the same as in PyG."""
    sizes = count_vertices(data)
    type_, nodes = (None, nodes) if None in sizes else split_type(nodes, sizes)
    if nodes is None:
        ids, is_mask = torch.arange(sizes[type_], device="cpu"), False
    else:
        ids, is_mask = read_seeds(nodes, sizes[type_], type_)
    if is_mask and input_id is None:
        input_id = ids
    check_one_per_seed(ids, input_time=time, input_id=input_id)
    return NodeSamplerInput(input_id, ids, time, type_)
