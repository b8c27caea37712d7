"""The protocol of a topology: where a sampler finds the neighbours of vertices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.graph.clock import Clock
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph

#: What a batch is made of, a message-flow graph: its vertices and edges, hop by hop.
Mfg: TypeAlias = "SamplerOutput | HeteroSamplerOutput"

#: Tensors by vertex type, all under None where there is but one type.
ByType = Mapping[str | None, Tensor]


class DrawOptions(NamedTuple):
    """How a batch is drawn.

    Attributes:
        fanouts: per edge type of the topology, neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        replace: draw with replacement.
        disjoint: every seed grows a tree of its own. Times need it.
        last: of the neighbours that a tree may see, draw from the latest only.
        induced: give all edges between the sampled vertices (of a tree, and visible to it).
        shared: draws agree between vertices, see :class:`salientpp.NeighborLoader`; of trees too.
    """

    fanouts: Sequence[Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    last: bool = False
    induced: bool = False
    shared: bool = False


class Topology(ABC):
    """Vertices of one type or several, and how to draw from the edges into them.

    A subclass sets :attr:`num_vertices` and has :meth:`arrays` and :meth:`sample`. What else differs from a graph of one type of vertices without
    times or weights, it overrides. Several threads may call :meth:`sample` at once.

    Attributes:
        num_vertices: by vertex type; all named None where there is but one type.
        edge_types: names, in the order of ``DrawOptions.fanouts``.
        node_time: by vertex type int64 [N], of the types whose vertices have times.
        clock: how times were read; None without times.
        has_weights: neighbours are drawn in proportion to weights.
        graph: the whole graph, where this process holds it. What is planned by its edges needs it.
    """

    num_vertices: Mapping[str | None, int]
    edge_types: Sequence[tuple[str, str, str] | None] = (None,)
    node_time: ByType = MappingProxyType({})
    clock: Clock | None = None
    has_weights: bool = False
    graph: Graph | TypedGraph | None = None

    @abstractmethod
    def arrays(self) -> list[Tensor]:
        """What samples depend on, beside seeds, key and options; a saved state of a loader holds a digest of it."""

    @abstractmethod
    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        """The MFG of ``seeds``; a pure function of the topology and the arguments.

        Hop h draws, for every vertex first found at hop h - 1, up to ``fanouts[h]`` neighbours. The draws of a vertex depend on (key, hop, vertex)
        alone; shared ones on (key, neighbour).

        Args:
            seeds: by vertex type int64 [B]; trees are numbered in the order of this mapping.
            key: signed 64-bit.
            seed_time: by vertex type int64 [B], on the :attr:`clock`; None takes the seeds' own times. A tree sees neighbours whose time is at
                most its seed's.
            only_vertices: nothing but ``node`` is wanted; the rest may be empty.

        Returns:
            A ``SamplerOutput`` with one type of vertices, otherwise a ``HeteroSamplerOutput`` with every type. ``node`` int64 [n], seeds first, then in
            order of discovery; ``row`` and ``col`` int64 [e], positions in ``node`` of sources and targets; ``edge`` int64 [e], the ids of the edges;
            ``batch`` the tree of each vertex; counts per hop as lists, None for an induced subgraph.

        Raises:
            ValueError: edges have times and the seeds have none.
            RuntimeError: a seed is out of range.
        """

    @property
    def is_hetero(self) -> bool:
        return None not in self.num_vertices

    @property
    def nbytes(self) -> int:
        """Memory of this process that the edges take, with their times and weights."""
        return 0 if self.graph is None else self.graph.nbytes

    def as_typed(self) -> TypedGraph:
        """:attr:`graph` as one with types.

        Raises:
            ValueError: this process does not hold it.
        """
        if self.graph is None:
            raise ValueError(
                f"inclusion probabilities are computed from the edges of a graph, and a {type(self).__name__} holds no graph; leave out what needs "
                "them, such as device_rows"
            )
        return TypedGraph.of(self.graph) if isinstance(self.graph, Graph) else self.graph


def ids_by_type(n_id: Tensor | ByType) -> ByType:
    """Ids by vertex type; None where there is only one."""
    return {None: n_id} if isinstance(n_id, Tensor) else n_id
