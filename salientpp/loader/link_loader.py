"""Loader whose seeds are edges. It gives batches for link prediction, as PyG's ``LinkNeighborLoader`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import get_edge_label_index
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling
from torch_geometric.sampler.base import SubgraphType
from typing_extensions import Unpack

from salientpp.arguments import as_real, wording
from salientpp.engine.agreement import Facts
from salientpp.engine.seeds import Seeds, edge_inputs, edge_seeds, edges_of_part
from salientpp.engine.source import BatchSource, open_data
from salientpp.engine.state import digest
from salientpp.graph.from_pyg import count_vertices
from salientpp.loader.batch_loader import BatchLoader
from salientpp.loader.options import LoaderOptions
from salientpp.loader.pyg_arguments import SamplingOptions
from salientpp.loader.signature import divided, with_options
from salientpp.loader.values import Options
from salientpp.loader.vertex_options import OF_VERTICES
from salientpp.ranks.comm import Comm
from salientpp.sampling.seeds import checked_ends
from salientpp.sampling.stored import is_remote
from salientpp.store.directory.opened import PartitionedGraph

#: Largest number of negative edges for each edge of a batch, plus one.
_MOST_NEGATIVES = 2**31


@with_options(but=OF_VERTICES)
class LinkNeighborLoader(BatchLoader, torch_geometric.loader.LinkNeighborLoader):
    """Mini-batches of sampled neighbourhoods of edges, with negative examples. The class derives from PyG's ``LinkNeighborLoader``.

    Start here: ``data``, ``num_neighbors``, ``edge_label_index``, ``neg_sampling``, ``batch_size``, ``shuffle``, ``num_workers``, ``transform``,
    <start>.
    The page "Loader options" of the documentation describes each option. By purpose, the others are:

    <groups>
    * As in PyG and torch: the rest.

    Args:
        data: a PyG ``Data`` or ``HeteroData``, a pair of PyG's ``FeatureStore`` and ``GraphStore``, or a
            :class:`~salientpp.PartitionedGraph` from :func:`salientpp.load`.
        num_neighbors: as in :class:`~salientpp.NeighborLoader`.
        edge_label_index: the seeds, int64 [2, M]; None takes the graph's own edges. On a ``HeteroData`` an edge type, or (edge type,
            [2, M]). On a partitioned graph the name of a stored split of edges, 'all' or None for the graph's own edges, or pairs of
            global ids. If it has several edge types: (edge type, one of these). Of stored edges, a rank takes those whose destination
            its part owns; of pairs of ids, it takes all that it was given. The graph need not have the edge type of pairs of ids.
        edge_label: [M, ...] labels. With binary negative sampling, 0 means "negative": if the smallest label of all ranks is 0,
            all labels are raised by one. For stored edges also the name of the edge attribute that holds them.
        edge_label_time: [M], times of the seeds; sampled neighbours are not later than their edge. It needs ``time_attr``, and ``time_attr``
            needs it. For stored edges also the name of an edge attribute that holds the times.
        neg_sampling: PyG's ``NegativeSampling`` or its mode: 'binary' adds random edges with the label 0, 'triplet' adds random
            destinations to every edge.
        neg_sampling_ratio: deprecated; means ``NegativeSampling('binary', ratio)``.
        <options>
        input_id, custom_cls: as in PyG's ``LinkLoader``.

    :class:`~salientpp.NeighborLoader` describes all other arguments. Each batch of a block of ``shared_draws`` has its own negative examples.

    Negative examples follow from the seed, like all other draws, so they repeat. As in PyG, they may be edges of the graph. On a
    partitioned graph they are drawn from the vertices of all parts, as one process would draw them. Most of their rows are remote, and
    no cache can predict them. ``input_id`` of a batch then holds the numbers of the stored edges.

    Raises:
        ValueError: an argument is wrong.
    """

    _kinds_of_data = (Data, HeteroData, PartitionedGraph)
    _kinds_in_words = "a torch_geometric.data.Data, a HeteroData, a pair of FeatureStore and GraphStore, or the result of salientpp.load"

    def __init__(
        self,
        data: Data | HeteroData | PartitionedGraph,
        num_neighbors: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]],
        edge_label_index: Tensor | str | tuple[str, str, str] | tuple[tuple[str, str, str], Any] | None = None,
        edge_label: Tensor | str | None = None,
        edge_label_time: Tensor | str | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        neg_sampling_ratio: float | None = None,
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
        **options: Unpack[LoaderOptions],
    ) -> None:
        # Lightning reads every argument from an attribute, see NeighborLoader.
        self.edge_label_index = edge_label_index
        self.edge_label = edge_label
        self.edge_label_time = edge_label_time
        self.input_id = input_id
        self.custom_cls = custom_cls
        self.filter_per_worker = filter_per_worker
        self._negatives_given = neg_sampling, neg_sampling_ratio
        own, kwargs = divided(options, but=OF_VERTICES)
        given = Options(transform=transform, transform_sampler_output=transform_sampler_output, **own)
        sampling = SamplingOptions(
            num_neighbors=num_neighbors, replace=replace, subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
            time_attr=time_attr, weight_attr=weight_attr, is_sorted=is_sorted, directed=directed, neighbor_sampler=neighbor_sampler,
            shared_draws=given.shared_draws, time_window=given.time_window,
        )  # fmt: skip
        super().__init__(data, sampling, given, kwargs)

    def _seeds_given(self) -> dict[str, Any]:
        names = ("edge_label_index", "edge_label", "edge_label_time", "input_id")
        kind, ratio = self._negatives_given
        return {**{name: getattr(self, name) for name in names}, "neg_sampling": kind, "neg_sampling_ratio": ratio}

    def _open_source(self, comm: Comm, sampling: SamplingOptions) -> BatchSource:
        self.neg_sampling = negatives = _negatives(*self._negatives_given)
        if (self.edge_label_time is not None) != (sampling.time_attr is not None):
            label, time = (
                "not set" if value is None else "set" for value in (self.edge_label_time, sampling.time_attr)
            )
            raise ValueError(
                f"Received conflicting 'edge_label_time' and 'time_attr' arguments: 'edge_label_time' is {label} while 'time_attr' is {time}. Both "
                "arguments must be provided for temporal sampling."
            )
        if isinstance(self.data, PartitionedGraph):
            given = self.edge_label_index, self.edge_label, self.edge_label_time, self.input_id, negatives
            return self._open_partition(comm, sampling, lambda part, sampler: edges_of_part(part, sampler, *given))
        sampler = sampling.sampler(self.data, "sample_from_edges")
        type_, ends = self._given_edges(self.data)
        inputs = edge_inputs(type_, ends, self.edge_label, self.edge_label_time, self.input_id, negatives)
        seeds = edge_seeds(sampler, inputs, negatives)
        return open_data(self.data, comm, sampler, seeds, columns=self.columns, custom_cls=self.custom_cls)

    @property
    def link_sampler(self) -> BaseSampler:
        """The sampler, under PyG's name."""
        return self.engine.basis.source.sampler

    def _given_edges(self, data: Data | HeteroData) -> tuple[tuple[str, str, str] | None, Tensor]:
        """Returns the edge type and int64 [2, M] of ``edge_label_index``, checked, for data that one process holds."""
        sizes = count_vertices(data)
        given: Any = self.edge_label_index
        if None not in sizes and not (isinstance(given, (tuple, list)) and len(given) in (2, 3)):
            raise ValueError(
                f"edge_label_index of a graph with several types must be an edge type or (edge type, [2, M]), got {given!r}"
            )
        if None in sizes and is_remote(data) and (given is None or isinstance(given, Tensor)):
            given = (None, torch.stack(data[1].coo()[:2]) if given is None else given)  # PyG's function requires a pair
        if None in sizes and is_remote(data) and not (isinstance(given, (tuple, list)) and len(given) == 2):
            raise ValueError(f"edge_label_index must be int64 [2, M] or None, got {given!r}")
        if isinstance(data, HeteroData):
            # PyG's function would add an unknown type to the user's data.
            named = given if isinstance(given[0], str) else given[0]
            own = named is given or given[1] is None
            if own and data._to_canonical(*named) not in data.edge_types:
                raise ValueError(
                    f"edge_label_index must be of an edge type of the data ({', '.join(map(str, data.edge_types))}), got {named!r}"
                )
        type_, ends = get_edge_label_index(data, given)
        return type_, checked_ends(ends, type_, sizes)

    def _with_facts_of_seeds(self, facts: Facts, source: BatchSource) -> Facts:
        inputs, negatives = source.seeds.inputs, self.neg_sampling
        assert isinstance(inputs, EdgeSamplerInput)
        kind = None if negatives is None else [negatives.mode.value, negatives.amount]
        same = {**facts.same, "neg_sampling": kind}
        return dataclasses.replace(facts, same=same, least_label=_sign_of_least(inputs.label))

    def _adapt_seeds(self, seeds: Seeds, everyone: Sequence[Facts]) -> None:
        """Makes 0 mean "negative" with binary negatives: adds one to all labels if the smallest of all ranks is 0."""
        inputs, binary = seeds.inputs, self.neg_sampling is not None and self.neg_sampling.is_binary()
        assert isinstance(inputs, EdgeSamplerInput)
        least = min((facts.least_label for facts in everyone if facts.least_label is not None), default=None)
        if binary and least == 0 and inputs.label is not None:
            inputs.label = inputs.label + 1

    def _fingerprint_of_seeds(self) -> dict[str, Any]:
        negatives = self.neg_sampling
        if negatives is None:
            return {"neg_sampling": None}
        weights = negatives.src_weight, negatives.dst_weight
        digests = [None if weight is None else digest(weight) for weight in weights]
        return {"neg_sampling": [negatives.mode.value, negatives.amount, *digests]}


def _negatives(kind: Any, ratio: Any) -> NegativeSampling | None:
    """Reads the arguments ``neg_sampling`` and ``neg_sampling_ratio``. Raises ValueError or TypeError for wrong ones."""
    with wording("neg_sampling_ratio must be a number >= 0, of edges for each edge of a batch", ratio):
        kind = kind if ratio is None or ratio == 0.0 else NegativeSampling("binary", ratio)
    with wording("neg_sampling must be 'binary', 'triplet', a NegativeSampling or the arguments of one", kind):
        found = NegativeSampling.cast(kind)
    if found is None:
        return None
    amount = found.amount
    number = as_real(amount)
    if number is None or not 0 <= number < _MOST_NEGATIVES:
        raise ValueError(
            f"neg_sampling must draw a number of edges in [0, {_MOST_NEGATIVES:,}) for each edge of a batch, got {amount!r}; 1 draws one negative for each"
        )
    return found


def _sign_of_least(label: Tensor | None) -> int | None:
    """Returns -1, 0 or 1, the sign of the smallest label. NaN counts as -1: PyG adds nothing to such labels."""
    if label is None or not label.numel():
        return None
    least = label.min()
    return 0 if bool(least == 0) else 1 if bool(least > 0) else -1
