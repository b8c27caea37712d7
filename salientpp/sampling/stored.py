"""Topologies whose graph is in the memory of this process.

:class:`GraphTopology` is for one vertex type and uniform draws, and is the fastest. :class:`TypedTopology` is for everything else. On a graph that
both support, both draw the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import NO_EDGES, count_vertices
from salientpp.graph.typed import TypedGraph
from salientpp.processes import lazy
from salientpp.sampling.topology import ByType, DrawOptions, Mfg, Topology, as_sample, first_trees
from salientpp.store.tiers import NO_IDS


class GraphTopology(Topology):
    def __init__(self, graph: Graph) -> None:
        self.graph: Graph = graph
        self.num_vertices = {None: graph.num_vertices}

    @lazy
    def _typed(self) -> TypedTopology:
        return TypedTopology(self.as_typed())

    def arrays(self) -> list[Tensor]:
        return [self.graph.indptr, self.graph.indices]

    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples as :meth:`Topology.sample` says; ``row`` and ``col`` are two rows of one tensor."""
        if options.disjoint or options.induced:
            return self._typed.sample(seeds, key, options, seed_time)
        graph, ids, (fanouts,), shared = self.graph, seeds.get(None, NO_IDS), options.fanouts, options.shared
        number = graph.number if shared else 0
        if only_vertices:
            n_id = ops.sample_vertices(
                graph.indptr, graph.indices, ids, fanouts, key, options.replace, shared=shared, graph_number=number
            )
            return SamplerOutput(n_id, NO_EDGES[0], NO_EDGES[1], None)
        n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
            graph.indptr,
            graph.indices,
            graph.edge_id if graph.links is None else None,
            ids,
            fanouts,
            key,
            options.replace,
            links=graph.links,
            shared=shared,
            graph_number=number,
        )
        row, col = edge_index.unbind()
        return SamplerOutput(
            node=n_id,
            row=row,
            col=col,
            edge=e_id,
            num_sampled_nodes=num_nodes.tolist(),
            num_sampled_edges=num_edges.tolist(),
        )


class TypedTopology(Topology):
    """Topology of a graph with several vertex types, with times or with weights."""

    def __init__(self, graph: TypedGraph) -> None:
        self.graph: TypedGraph = graph
        self.num_vertices = dict(zip(graph.node_types, graph.num_vertices))
        self.edge_types = graph.edge_types
        self.node_time = {name: time for name, time in zip(graph.node_types, graph.node_time) if time is not None}
        self.clock = graph.clock
        relations = graph.relations
        self.has_weights = any(relation.edge_weight is not None for relation in relations)
        self.has_edge_times = any(relation.edge_time is not None for relation in relations)
        searched = {relation.source for relation in relations if relation.source_time is None}
        self._arrays = (
            [relation.indptr for relation in relations],
            [relation.indices for relation in relations],
            [relation.edge_id for relation in relations],
            [relation.links for relation in relations],
            [relation.edge_weight for relation in relations],
            [relation.edge_time if relation.source_time is None else relation.source_time for relation in relations],
            [relation.source for relation in relations],
            [relation.target for relation in relations],
            graph.num_vertices,
            [time if place in searched else None for place, time in enumerate(graph.node_time)],
        )

    def arrays(self) -> list[Tensor]:
        arrays = [array for r in self.graph.relations for array in (r.indptr, r.indices, r.edge_weight, r.edge_time)]
        return [array for array in (*arrays, *self.graph.node_time) if array is not None]

    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        graph, fanouts = self.graph, options.fanouts
        first_tree, _ = first_trees(seeds)
        all_seeds = [seeds.get(name, NO_IDS) for name in graph.node_types]
        times: list[Tensor | None] = [None] * len(all_seeds)
        if graph.clock is not None:
            times = [self.time_of_seeds(name, ids, seed_time) for name, ids in zip(graph.node_types, all_seeds)]
        n_id, tree, edge_index, e_id, num_nodes, num_edges = ops.sample_typed_neighbors(
            *self._arrays,
            all_seeds,
            times,
            [] if options.window is None else [self.since(time, options.window) for time in times],
            [first_tree.get(name, 0) for name in graph.node_types],
            [fanout for per_hop in fanouts for fanout in per_hop],
            len(fanouts[0]) if fanouts else 0,
            key,
            replace=options.replace,
            disjoint=options.disjoint,
            last=options.last,
            induced=options.induced,
            shared=options.shared,
        )
        return as_sample(self, options, n_id, tree, edge_index, e_id, num_nodes.tolist(), num_edges.tolist())


def is_remote(data: Any) -> bool:
    """Returns True for a pair of PyG's FeatureStore and GraphStore."""
    return (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and isinstance(data[0], FeatureStore)
        and isinstance(data[1], GraphStore)
    )


def topology_of(
    data: Any, *, time_attr: str | None, weight_attr: str | None, is_sorted: bool, backward: bool, linked: bool
) -> Topology:
    """Returns the topology that a :class:`~salientpp.NeighborSampler` with these arguments draws from.

    Args:
        backward: reverse every edge.
        linked: keep edge ids beside the sources, see :class:`~salientpp.graph.csc.LinkedGraph`.
    """
    if isinstance(data, (Topology, Graph, TypedGraph)):
        if time_attr is not None or weight_attr is not None or backward:
            raise ValueError(
                f"time_attr, weight_attr and sample_direction are for PyG's objects: a {type(data).__name__} already has its times, weights and directions; "
                "leave them out"
            )
        if isinstance(data, Topology):
            return data
        return GraphTopology(data) if isinstance(data, Graph) else TypedTopology(data)
    if is_remote(data):
        if weight_attr is not None:
            raise NotImplementedError(
                "weight_attr is for a Data or HeteroData; PyG does not take it for a pair of stores either"
            )
        return TypedTopology(TypedGraph.from_stores(*data, time_attr=time_attr, backward=backward))
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(
            f"data must be a torch_geometric.data.Data, a HeteroData or a pair of FeatureStore and GraphStore, got {type(data).__name__}"
        )
    if isinstance(data, HeteroData) or time_attr is not None or weight_attr is not None or backward:
        return TypedTopology(
            TypedGraph.from_data(
                data,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                backward=backward,
                linked=linked,
            )
        )
    if data.get("edge_index") is None and data.get("adj_t") is None:
        return GraphTopology(Graph.from_edge_index(NO_EDGES, count_vertices(data)[None]))
    return GraphTopology(Graph.from_data(data, is_sorted=is_sorted, linked=linked))
