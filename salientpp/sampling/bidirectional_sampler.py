"""A PyG ``BaseSampler`` that follows edges in both directions, as if the graph were undirected.

A hop starts from a frontier, at first the seeds. It draws sources of the edges into the frontier and targets of the edges out of it, and adds both to the
batch. The vertices that are new in a hop are the frontier of the next one. Edges keep their directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import node_sample

from salientpp import ops
from salientpp.sampling.held_lists import Lists, Vertices
from salientpp.sampling.neighbor_sampler import NeighborSampler, key_of_draws
from salientpp.sampling.pyg_samples import sample_of_edges
from salientpp.sampling.stored import is_remote
from salientpp.sampling.topology import ByType, DrawOptions, Mfg
from salientpp.suggestions import suggest_arguments
from salientpp.vip.inclusion import check_fanouts


class BidirectionalNeighborSampler(BaseSampler):
    """Neighbour sampler that follows edges of a directed graph in both directions.

    PyG's loaders, Lightning's data modules and this package's loaders (``neighbor_sampler=``) take it. A vertex draws up to ``num_neighbors[h]`` sources of its
    in-edges and as many targets of its out-edges in hop h. An edge that is drawn from both ends is in the batch once.

    Args:
        data: a ``Data``, or a pair of PyG's ``FeatureStore`` and ``GraphStore``, with one vertex type.
        num_neighbors: fanouts, nearest the seeds first, -1 for all; the same in both directions.
        subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted, share_memory, directed, time_window: as in
            :class:`~salientpp.NeighborSampler`.

    Every call makes new draws from torch's global generator, unless ``key`` is given.

    Raises:
        ValueError: an argument is wrong, or ``num_neighbors`` depends on edge types.
        NotImplementedError: the graph has several vertex types.
        TypeError: ``data`` is of another type.
    """

    @suggest_arguments
    def __init__(
        self,
        data: Data,
        num_neighbors: NumNeighbors | Sequence[int],
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        *,
        time_window: float | None = None,
    ) -> None:
        if not isinstance(data, Data) and not is_remote(data):
            name = type(data).__name__
            text = f"data must be a torch_geometric.data.Data or a pair of FeatureStore and GraphStore, got {name}"
            raise (NotImplementedError if name == "HeteroData" else TypeError)(text)
        fanouts = _fanouts_of(num_neighbors)
        #: Draws from the edges into a vertex.
        self.forward_sampler = NeighborSampler(
            data, fanouts, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted, share_memory, directed,
            time_window=time_window,
        )  # fmt: skip
        if self.forward_sampler.is_hetero:
            raise NotImplementedError(
                "BidirectionalNeighborSampler samples graphs with one vertex type and one edge type; pass data of one type, or use NeighborSampler"
            )
        #: Draws from the edges out of a vertex.
        self.backward_sampler = NeighborSampler(
            data, fanouts, self.forward_sampler.subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr, is_sorted, share_memory,
            sample_direction="backward", time_window=time_window,
        )  # fmt: skip

    # --- attributes that PyG's samplers have ------------------------------------------------------------------------

    @property
    def num_neighbors(self) -> NumNeighbors:
        return self.forward_sampler.num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        fanouts = _fanouts_of(num_neighbors)
        self.forward_sampler.num_neighbors = self.backward_sampler.num_neighbors = fanouts

    @property
    def subgraph_type(self) -> SubgraphType:
        return self.forward_sampler.subgraph_type

    @property
    def is_hetero(self) -> bool:
        return False

    @property
    def is_temporal(self) -> bool:
        return self.forward_sampler.is_temporal

    @property
    def disjoint(self) -> bool:
        return self.forward_sampler.disjoint

    @disjoint.setter
    def disjoint(self, disjoint: bool) -> None:
        self.forward_sampler.disjoint = self.backward_sampler.disjoint = disjoint

    @property
    def num_nodes(self) -> int:
        return self.forward_sampler.topology.num_vertices[None]

    def settings(self) -> dict[str, Any]:
        """Returns the sampling options as plain values, for the saved state of a loader."""
        return self.forward_sampler.settings()

    # --- sampling -----------------------------------------------------------------------------------------

    def sample_from_nodes(self, inputs: NodeSamplerInput, key: int | None = None) -> Mfg:
        """Samples the surroundings of some vertices.

        Args:
            inputs: the seeds, with times if any.
            key: 64-bit; fixes all draws. None draws a key from torch's global generator.

        Returns:
            A sample as :meth:`~salientpp.sampling.topology.Topology.sample` describes it. A repeated seed is in ``node`` each time, but draws neighbours once.
            The counts of a hop hold the new vertices and the new edges of both directions.
        """
        key = key_of_draws(key)
        out = node_sample(inputs, lambda seed, time: self._sample(seed, time, key, False))
        return self.forward_sampler.finished(out, False)

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: int | None = None
    ) -> Mfg:
        """Samples the surroundings of the end points of some edges and of negative examples.

        Args:
            inputs: the edges, with labels and times if any.
            neg_sampling: number and kind of negative examples.
            key: as in :meth:`sample_from_nodes`; fixes the negative examples too.
        """
        number, sampler = key_of_draws(key), self.forward_sampler
        out = sample_of_edges(
            sampler.topology, self.disjoint, inputs, neg_sampling, number,
            lambda seed, time: self._sample(seed, time, number, True), sampler.window is not None,
        )  # fmt: skip
        return sampler.finished(out, False)

    def _sample(self, seed: Tensor, seed_time: Any, key: int, on_clock: bool) -> SamplerOutput:
        sampler = self.forward_sampler
        seeds, key, options, times = sampler.arguments(seed, seed_time, key, on_clock, False)
        topology = sampler.topology
        now = topology.time_of_seeds(None, seeds[None], times) if self.is_temporal else None
        batch = _Batch(seeds[None], self.disjoint, now, self.num_nodes)
        for hop, fanout in enumerate(options.fanouts[0]):
            ids, tree = batch.frontier
            of_hop = options._replace(fanouts=[[fanout]], induced=False)
            time: ByType | None = None if now is None else {None: now[tree]}
            for number, each in enumerate((sampler, self.backward_sampler)):
                drawn = each.topology.sample({None: ids}, ops.join_key(key, hop, number), of_hop, time)
                batch.add(drawn, tree, is_backward=number == 1)
            batch.end_hop()
        return batch.induced(sampler, options) if options.induced else batch.finished()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_neighbors={self.num_neighbors.values}, graph={self.forward_sampler.topology.graph})"


class _Batch:
    """A batch that grows from its seeds, with the edges found so far."""

    def __init__(self, seeds: Tensor, disjoint: bool, now: Tensor | None, num_vertices: int) -> None:
        self.disjoint, self.now, self.num_vertices = disjoint, now, num_vertices
        self.node = seeds
        self.tree = torch.arange(seeds.numel(), device="cpu") if disjoint else torch.zeros_like(seeds)
        self.first = _first_places(self._identity(self.node, self.tree)).unique()  # the frontier's places
        self.num_nodes, self.num_edges = [seeds.numel()], list[int]()
        self.row = self.col = self.edge = seeds.new_empty(0)
        self._edges_before = 0

    def _identity(self, ids: Tensor, tree: Tensor) -> Tensor:
        return tree * self.num_vertices + ids

    @property
    def frontier(self) -> tuple[Tensor, Tensor]:
        """Vertices that the next hop expands: their ids and the numbers of their trees, int64 [f] each. Without ``disjoint``, each tree number is 0."""
        return self.node[self.first], self.tree[self.first]

    def add(self, drawn: Mfg, tree_of_seed: Tensor, is_backward: bool) -> None:
        """Adds the edges that were drawn for the frontier in one direction, and their new vertices.

        Args:
            drawn: sample of one hop, whose seeds are the frontier.
            tree_of_seed: int64 [f], the tree of each vertex of the frontier.
            is_backward: True if the draw followed edges out of the frontier.
        """
        assert (
            isinstance(drawn, SamplerOutput) and drawn.edge is not None
        )  # a topology with one type gives such samples
        tree = torch.zeros_like(drawn.node) if drawn.batch is None else tree_of_seed[drawn.batch]
        known = self.node.numel()
        first = _first_places(self._identity(torch.cat([self.node, drawn.node]), torch.cat([self.tree, tree])))[known:]
        new = first[first >= known].unique()
        place = torch.where(first < known, first, known + torch.searchsorted(new, first))
        self.node = torch.cat([self.node, drawn.node[new - known]])
        self.tree = torch.cat([self.tree, tree[new - known]])
        ends = (drawn.col, drawn.row) if is_backward else (drawn.row, drawn.col)
        self.row, self.col = (torch.cat([of, place[end]]) for of, end in zip((self.row, self.col), ends))
        self.edge = torch.cat([self.edge, drawn.edge.to(torch.int64)])

    def end_hop(self) -> None:
        """Removes edges that were drawn twice, and makes the new vertices the frontier of the next hop."""
        size = int(self.edge.max()) + 1 if self.edge.numel() else 0
        once = _first_places(self.tree[self.col] * size + self.edge).unique()
        self.row, self.col, self.edge = self.row[once], self.col[once], self.edge[once]
        known = sum(self.num_nodes)
        self.first = torch.arange(known, self.node.numel(), device="cpu")
        self.num_nodes.append(self.first.numel())
        self.num_edges.append(once.numel() - sum(self.num_edges))

    def finished(self, with_hops: bool = True) -> SamplerOutput:
        return SamplerOutput(
            node=self.node,
            row=self.row,
            col=self.col,
            edge=self.edge,
            batch=self.tree if self.disjoint else None,
            num_sampled_nodes=self.num_nodes if with_hops else None,
            num_sampled_edges=self.num_edges if with_hops else None,
        )

    def induced(self, sampler: NeighborSampler, options: DrawOptions) -> SamplerOutput:
        """Returns the sample with all edges between its vertices, instead of the drawn edges."""
        topology, tree = sampler.topology, self.tree if self.disjoint else None
        once = _first_places(self._identity(self.node, self.tree)).unique()
        now = None if self.now is None else self.now[self.tree[once]]
        of = Vertices(self.node[once], None if tree is None else tree[once], now, topology.since(now, options.window))
        (relation,) = topology.as_typed().relations
        found = Lists(relation, 0, 0).edges_between(
            of.ids, of, Vertices(self.node, tree), self.num_vertices, self.num_nodes[0], False
        )
        self.row, self.col, self.edge = found.source, once.repeat_interleave(found.count), found.number
        return self.finished(with_hops=False)


def _first_places(values: Tensor) -> Tensor:
    """Returns, for each value, the index of its first occurrence in ``values``, int64 [n]."""
    unique, inverse = values.unique(return_inverse=True)
    places = torch.arange(values.numel(), device="cpu")
    return torch.zeros_like(unique).scatter_reduce_(0, inverse, places, "amin", include_self=False)[inverse]


def _fanouts_of(num_neighbors: Any) -> list[int]:
    values = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
    if isinstance(values, Mapping):
        raise ValueError(
            "num_neighbors of a BidirectionalNeighborSampler must be one list, got numbers by edge type; pass a list"
        )
    return check_fanouts(values, may_be_empty=True)
