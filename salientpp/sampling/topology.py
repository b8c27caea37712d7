"""The protocol of a topology: the object in which a sampler finds the neighbours of vertices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.graph.clock import Clock
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph

#: A message-flow graph: the vertices and edges of a batch, hop by hop.
Mfg: TypeAlias = "SamplerOutput | HeteroSamplerOutput"


class TypedSample(HeteroSamplerOutput):
    """A sample over several vertex types whose ``seed_node`` is right for every type.

    PyG's class looks the number of a tree up among the vertices of each type, but the seeds are of one type.

    Attributes:
        tree_seed: int64 [trees], the id of each tree's seed; None without trees.
    """

    tree_seed: Tensor | None = None

    @property
    def seed_node(self) -> dict[str, Tensor] | None:
        """Ids of seeds, int64 [n] by vertex type: for each sampled vertex, the seed whose tree it belongs to. None if the sample has no trees."""
        if self.batch is None or self.tree_seed is None:
            return None
        return {name: self.tree_seed[tree] for name, tree in self.batch.items()}


#: Tensors by vertex type. The type is None if there is only one.
ByType = Mapping[str | None, Tensor]


class DrawOptions(NamedTuple):
    """Options of a draw.

    Attributes:
        fanouts: per edge type of the topology, neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        replace: draw with replacement.
        disjoint: every seed grows a tree of its own. Times need this.
        last: draw only from the latest of the neighbours that a tree may see.
        induced: return all edges between the sampled vertices. With ``disjoint``, both ends must be in one tree, and the tree must be allowed to see the edge.
        shared: the vertices and the trees of a batch share random numbers; see :class:`salientpp.NeighborLoader`.
        window: length of the time window that a tree sees, on the topology's clock; None sees all earlier times.
    """

    fanouts: Sequence[Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    last: bool = False
    induced: bool = False
    shared: bool = False
    window: int | float | None = None


class Topology(ABC):
    """Vertices of one type or several, and methods that draw from the edges into them.

    A subclass sets :attr:`num_vertices` and implements :meth:`arrays` and :meth:`sample`. The other attributes have the values for one vertex type
    without times or weights; a subclass overrides those that differ. Several threads may call :meth:`sample` at once.

    Attributes:
        num_vertices: by vertex type; the type is None if there is only one.
        edge_types: names, in the order of ``DrawOptions.fanouts``.
        node_time: by vertex type int64 [N], for the types whose vertices have times.
        clock: the map from the user's times to int64; None without times.
        has_weights: True if neighbours are drawn in proportion to weights.
        has_edge_times: True if edges have times.
        graph: the whole graph, if this process holds it. Plans that are computed from its edges need it.
    """

    num_vertices: Mapping[str | None, int]
    edge_types: Sequence[tuple[str, str, str] | None] = (None,)
    node_time: ByType = MappingProxyType({})
    clock: Clock | None = None
    has_weights: bool = False
    has_edge_times: bool = False
    graph: Graph | TypedGraph | None = None

    def for_loader(self) -> Topology:
        """Returns the topology for one more loader: a copy if loaders change some of its values, else itself."""
        return self

    @abstractmethod
    def arrays(self) -> list[Tensor]:
        """Returns the arrays that samples depend on. A saved state of a loader holds a digest of them."""

    @abstractmethod
    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples the MFG of ``seeds``; a pure function of the topology and the arguments.

        Hop h draws up to ``fanouts[h]`` neighbours for every vertex first found at hop h - 1. The draws of a vertex depend only on
        (key, hop, vertex). Shared draws depend only on (key, neighbour).

        Args:
            seeds: by vertex type int64 [B]; trees are numbered in the order of this mapping.
            key: signed 64-bit.
            seed_time: by vertex type int64 [B], on the :attr:`clock`; None takes the seeds' own times. A tree sees neighbours whose time is not
                later than its seed's. With ``options.window``, the time is also at most this much earlier.
            only_vertices: the caller wants only ``node``; the other fields may be empty.

        Returns:
            A ``SamplerOutput`` for one vertex type, else a ``HeteroSamplerOutput`` with every type. ``node`` int64 [n] has seeds first, then vertices in
            order of discovery. ``row`` and ``col`` int64 [e] are the positions in ``node`` of sources and targets. ``edge`` int64 [e] are the ids of
            the edges. With ``disjoint``, ``batch`` is the tree of each vertex. The counts per hop are lists, or None for an induced subgraph.

        Raises:
            ValueError: edges have times and the seeds do not.
            RuntimeError: a seed is out of range.
        """

    @property
    def is_hetero(self) -> bool:
        return None not in self.num_vertices

    def __repr__(self) -> str:
        numbers = dict(self.num_vertices) if self.is_hetero else self.num_vertices[None]
        return f"{type(self).__name__}(num_vertices={numbers})"

    @property
    def nbytes(self) -> int:
        """Memory that the edges take in this process, with their times and weights, in bytes."""
        return 0 if self.graph is None else self.graph.nbytes

    def time_of_seeds(self, name: str | None, seeds: Tensor, seed_time: ByType | None) -> Tensor | None:
        """Returns the given times of seeds of one type, or their own times, int64 [B]; None without seeds.

        Raises:
            ValueError: the seeds have no times.
        """
        if not seeds.numel():
            return None
        if seed_time is not None and seed_time.get(name) is not None:
            return seed_time[name]
        if name not in self.node_time:
            kind = "edges have times" if self.has_edge_times else f"the vertices of {name!r} have none"
            raise ValueError(f"the seeds need times, since {kind}; pass input_time (edge_label_time for a link loader)")
        return self.node_time[name][seeds]

    def since(self, now: Tensor | None, window: int | float | None) -> Tensor | None:
        """Returns the time at which each tree's time window begins, on the :attr:`clock`; None without a window. ``now``: the seeds' times."""
        return None if now is None or window is None or self.clock is None else self.clock.since(now, window)

    def as_typed(self) -> TypedGraph:
        """Returns :attr:`graph` as a typed graph.

        Raises:
            ValueError: this process does not hold the graph.
        """
        if self.graph is None:
            raise ValueError(
                f"inclusion probabilities need the edges of a graph, and a {type(self).__name__} holds no graph; leave out the options that need "
                "them, such as device_rows"
            )
        return TypedGraph.of(self.graph) if isinstance(self.graph, Graph) else self.graph


def first_trees(seeds: ByType) -> tuple[dict[str | None, int], int]:
    """Numbers the trees, one per seed. Returns the number of the first tree of each type's seeds, and the number of all trees."""
    first, total = {}, 0
    for name, ids in seeds.items():
        first[name], total = total, total + ids.numel()
    return first, total


def as_sample(
    topology: Topology,
    options: DrawOptions,
    n_id: Sequence[Tensor],
    tree: Sequence[Tensor],
    edge_index: Sequence[Tensor],
    edge: Sequence[Tensor | None],
    num_nodes: Sequence[list[int]],
    num_edges: Sequence[list[int]],
) -> Mfg:
    """Returns a sample in PyG's classes, as :meth:`Topology.sample` describes it.

    Args:
        n_id, tree, num_nodes: by vertex type: ids, trees (not read without ``disjoint``), and counts per hop.
        edge_index, edge, num_edges: by relation: positions int64 [2, e] of sources and targets, ids, and counts per hop.
    """
    with_hops = not options.induced
    if not topology.is_hetero:
        return SamplerOutput(
            node=n_id[0],
            row=edge_index[0][0],
            col=edge_index[0][1],
            edge=edge[0],
            batch=tree[0] if options.disjoint else None,
            num_sampled_nodes=num_nodes[0] if with_hops else None,
            num_sampled_edges=num_edges[0] if with_hops else None,
        )
    types, relations = topology.num_vertices, topology.edge_types
    out = TypedSample(
        node=dict(zip(types, n_id)),
        row={name: ends[0] for name, ends in zip(relations, edge_index)},
        col={name: ends[1] for name, ends in zip(relations, edge_index)},
        edge=dict(zip(relations, edge)),
        batch=dict(zip(types, tree)) if options.disjoint else None,
        num_sampled_nodes=dict(zip(types, num_nodes)) if with_hops else None,
        num_sampled_edges=dict(zip(relations, num_edges)) if with_hops else None,
    )
    if options.disjoint:
        out.tree_seed = torch.empty(sum(counts[0] for counts in num_nodes), dtype=torch.int64, device="cpu")
        for ids, trees, (size, *_) in zip(n_id, tree, num_nodes):
            out.tree_seed[trees[:size]] = ids[:size]
    return out


def ids_by_type(n_id: Tensor | ByType) -> ByType:
    """Returns ids by vertex type. The type is None if there is only one."""
    return {None: n_id} if isinstance(n_id, Tensor) else n_id
