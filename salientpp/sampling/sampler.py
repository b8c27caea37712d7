"""Which vertices and edges does a batch consist of?

Node-wise sampling with PyG's hops: hop h draws, for every vertex first found at hop h - 1, up to ``fanouts[h]`` of its
neighbours, uniformly and without replacement (or with). The output is the message-flow graph (MFG) of the seeds, in
PyG's types :class:`~torch_geometric.sampler.SamplerOutput` and :class:`~torch_geometric.sampler.HeteroSamplerOutput`.

Everything random is a pure function of a key: :func:`salientpp.sampling.schedule.batch_key` gives a batch's, and a vertex's draws
depend on (batch key, hop, vertex) alone; where they are shared, on (batch key, neighbour). So threads, depth, a resumed run or another host change nothing.

There are two: :class:`Sampler` for one type of vertices and uniform draws, which is the fastest, and :class:`TypedSampler` for
everything else. Where both apply they draw the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph


@dataclass(frozen=True, eq=False)
class Sampler:
    """How a batch is drawn from a graph.

    Attributes:
        graph: the topology, whole on every rank.
        fanouts: neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        replace: draw with replacement.
        shared: draws agree between vertices, see :class:`salientpp.NeighborLoader`.
    """

    graph: Graph
    fanouts: Sequence[int]
    replace: bool = False
    shared: bool = False

    def sample(self, seeds: Tensor, key: int) -> SamplerOutput:
        """The MFG of ``seeds`` int64 [B]; a pure function of graph, fanouts, seeds and key.

        Returns:
            ``node`` int64 [n], seeds first; ``row`` and ``col`` int64 [e], local ids of sources and targets, two rows of
            one tensor; ``edge`` int64 [e], the graph's edge ids; counts per hop as lists.

        Raises:
            RuntimeError: a seed is out of range.
        """
        graph = self.graph
        n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
            graph.indptr,
            graph.indices,
            graph.edge_id if graph.links is None else None,
            seeds,
            self.fanouts,
            key,
            self.replace,
            links=graph.links,
            shared=self.shared,
            graph_number=graph.number if self.shared else 0,
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

    def vertices(self, seeds: Tensor, key: int) -> Tensor:
        """``node`` of :meth:`sample` alone, int64 [n], which takes less time."""
        graph = self.graph
        return ops.sample_vertices(
            graph.indptr,
            graph.indices,
            seeds,
            self.fanouts,
            key,
            self.replace,
            shared=self.shared,
            graph_number=graph.number if self.shared else 0,
        )


@dataclass(frozen=True, eq=False)
class TypedSampler:
    """How a batch is drawn from a graph with several types of vertices, times or weights, or in disjoint trees.

    Attributes:
        graph: the topology.
        fanouts: per relation of the graph, neighbours per vertex and hop; -1 takes all.
        replace: draw with replacement.
        disjoint: every seed grows a tree of its own. Times need it.
        last: of the neighbours that a tree may see, draw from the latest only.
        induced: give all edges between the sampled vertices (of a tree, and visible to it).
        shared: draws agree between vertices, see :class:`salientpp.NeighborLoader`; of trees too.
    """

    graph: TypedGraph
    fanouts: Sequence[Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    last: bool = False
    induced: bool = False
    shared: bool = False

    def sample(
        self, seeds: Mapping[str | None, Tensor], key: int, seed_time: Mapping[str | None, Tensor] | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of ``seeds``; a pure function of graph, options, seeds, times and key.

        Args:
            seeds: per node type int64 [B]; the trees are numbered in the order of this mapping.
            seed_time: per node type int64 [B], on the graph's clock; None takes the seeds' own times. A tree sees neighbours whose time
                is at most its seed's.

        Returns:
            A ``SamplerOutput`` of a homogeneous graph, otherwise a ``HeteroSamplerOutput`` with every type. ``batch`` is the
            tree of each vertex. Counts per hop are None for an induced subgraph.

        Raises:
            ValueError: edges have times and the seeds have none.
            RuntimeError: a seed is out of range.
        """
        graph = self.graph
        first_tree, total = {}, 0
        for name, ids in seeds.items():
            first_tree[name], total = total, total + ids.numel()
        all_seeds = [seeds.get(name, _NONE) for name in graph.node_types]
        times: list[Tensor | None] = [None] * len(all_seeds)
        if graph.clock is not None:
            times = [
                self._time(place, name, ids, seed_time)
                for place, (name, ids) in enumerate(zip(graph.node_types, all_seeds))
            ]
        relations = graph.relations
        searched = {relation.source for relation in relations if relation.source_time is None}
        n_id, tree, edge_index, e_id, num_nodes, num_edges = ops.sample_typed_neighbors(
            [relation.indptr for relation in relations],
            [relation.indices for relation in relations],
            [relation.edge_id if relation.links is None else None for relation in relations],
            [relation.links for relation in relations],
            [relation.edge_weight for relation in relations],
            [relation.edge_time if relation.source_time is None else relation.source_time for relation in relations],
            [relation.source for relation in relations],
            [relation.target for relation in relations],
            graph.num_vertices,
            [time if place in searched else None for place, time in enumerate(graph.node_time)],
            all_seeds,
            times,
            [first_tree.get(name, 0) for name in graph.node_types],
            [fanout for per_hop in self.fanouts for fanout in per_hop],
            len(self.fanouts[0]) if self.fanouts else 0,
            key,
            replace=self.replace,
            disjoint=self.disjoint,
            last=self.last,
            induced=self.induced,
            shared=self.shared,
        )
        nodes_per_hop, edges_per_hop = num_nodes.tolist(), num_edges.tolist()
        if graph.is_homogeneous:
            return SamplerOutput(
                node=n_id[0],
                row=edge_index[0][0],
                col=edge_index[0][1],
                edge=e_id[0],
                batch=tree[0] if self.disjoint else None,
                num_sampled_nodes=None if self.induced else nodes_per_hop[0],
                num_sampled_edges=None if self.induced else edges_per_hop[0],
            )
        return HeteroSamplerOutput(
            node=dict(zip(graph.node_types, n_id)),
            row={name: ends[0] for name, ends in zip(graph.edge_types, edge_index)},
            col={name: ends[1] for name, ends in zip(graph.edge_types, edge_index)},
            edge=dict(zip(graph.edge_types, e_id)),
            batch=dict(zip(graph.node_types, tree)) if self.disjoint else None,
            num_sampled_nodes=None if self.induced else dict(zip(graph.node_types, nodes_per_hop)),
            num_sampled_edges=None if self.induced else dict(zip(graph.edge_types, edges_per_hop)),
        )

    def _time(
        self, place: int, name: str | None, seeds: Tensor, seed_time: Mapping[str | None, Tensor] | None
    ) -> Tensor | None:
        if not seeds.numel():
            return None
        if seed_time is not None and seed_time.get(name) is not None:
            return seed_time[name]
        own_time = self.graph.node_time[place]
        if own_time is None:
            kind = (
                "edges have times"
                if any(relation.edge_time is not None for relation in self.graph.relations)
                else f"{name!r} has none"
            )
            raise ValueError(f"the seeds need times, since {kind}; pass input_time (of a link loader edge_label_time)")
        return own_time[seeds]


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def ids_by_type(n_id: Tensor | Mapping[str | None, Tensor]) -> Mapping[str | None, Tensor]:
    """Ids by vertex type; None where there is only one."""
    return {None: n_id} if isinstance(n_id, Tensor) else n_id
