"""Graphs with several vertex types, or with times or weights.

A :class:`TypedGraph` holds one CSC matrix for each relation between vertex types, with the times and weights of its edges if they have any. A
homogeneous graph with times or weights is a typed graph too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from salientpp.graph.clock import Clock
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import count_vertices, words_for
from salientpp.graph.relation import EdgeReader, Relation, one_each
from salientpp.suggestions import did_you_mean


@dataclass(frozen=True, eq=False)
class TypedGraph:
    """Vertices of T types with R relations between them, and their times and weights if any.

    A homogeneous graph is the case of one type and one relation, both named None.

    Attributes:
        node_types, num_vertices: names and numbers of vertices of the T types.
        edge_types, relations: names and CSC matrices of the R relations.
        node_time: per type the times of its vertices, int64 [N], or None if these vertices exist at all times.
        clock: the map from the user's times to int64; None without times.

    In a relation with times, every list ascends by time.
    """

    node_types: tuple[str | None, ...]
    num_vertices: tuple[int, ...]
    edge_types: tuple[tuple[str, str, str] | None, ...]
    relations: tuple[Relation, ...]
    node_time: tuple[Tensor | None, ...]
    clock: Clock | None = None

    @classmethod
    def of(cls, graph: Graph) -> TypedGraph:
        """Wraps a homogeneous graph; shares its arrays."""
        edge_id = graph.edge_id if graph.links is None else None
        relation = Relation(0, 0, graph.indptr, graph.indices, edge_id, links=graph.links)
        return cls((None,), (graph.num_vertices,), (None,), (relation,), (None,))

    @classmethod
    def from_data(
        cls,
        data: Data | HeteroData,
        *,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        backward: bool = False,
        linked: bool = False,
    ) -> TypedGraph:
        """Creates a graph from PyG's objects. A relation with neither ``edge_index`` nor ``adj_t`` has no edges.

        Args:
            time_attr: name of the node or edge times; types without it are allowed.
            weight_attr: name of the edge weights; relations without it are allowed.
            is_sorted: edges are already sorted by target, and by time inside a target's list.
            backward: reverse every edge, so that a vertex draws from the vertices that it points to.
            linked: make relations with :attr:`Relation.links`. Sampling from them is faster. They take 4 more bytes for each edge that needs an id.

        Raises:
            ValueError: an attribute is missing or has the wrong shape, a weight is negative or not finite, or an id is out of range.
        """
        if isinstance(data, HeteroData):
            nodes = {name: data[name] for name in data.node_types}
            edges = {name: data[name] for name in data.edge_types}
        else:
            nodes, edges = {None: data._store}, {None: data._store}
        num_vertices = count_vertices(data)
        for name, end in ((type_, end) for type_ in edges for end in _ends(type_)):
            if end not in num_vertices:
                raise ValueError(
                    f"edge type {name} must join node types of the data ({', '.join(map(str, num_vertices))}), got {end!r}; set num_nodes of {end!r}"
                )
        node_time, edge_time = _times(data, nodes, edges, time_attr)
        if weight_attr is not None and not any(weight_attr in store for store in edges.values()):
            close = did_you_mean(weight_attr, [name for store in edges.values() for name in store])
            raise ValueError(
                f"weight_attr names the edge weights, but no edges have an attribute {weight_attr!r}{close}"
            )
        given = {
            name: {kind: store.get(kind) for kind in ("edge_index", "adj_t")} | {"weight": store.get(weight_attr)}
            for name, store in edges.items()
        }
        return cls._assemble(num_vertices, given, node_time, edge_time, time_attr, is_sorted, backward, linked)

    @classmethod
    def from_stores(
        cls,
        feature_store: FeatureStore,
        graph_store: GraphStore,
        *,
        time_attr: str | None = None,
        backward: bool = False,
    ) -> TypedGraph:
        """Creates a graph from PyG's feature store and graph store. The whole topology is read, and the times too.

        Raises:
            ValueError: ``time_attr`` names nothing, or times of both vertices and edges.
        """
        edge_types = list(dict.fromkeys(attr.edge_type for attr in graph_store.get_all_edge_attrs()))
        attributes = feature_store.get_all_tensor_attrs()
        on_nodes: dict[Any, Tensor] = {}
        on_edges: dict[Any, Tensor] = {}
        for attr in attributes if time_attr is not None else []:
            if attr.attr_name != time_attr:
                continue
            attr = copy.copy(attr)
            attr.index = None
            # A homogeneous graph has no type names, so the attribute's name decides whose times these are, as in PyG.
            homogeneous = edge_types == [None]
            of_nodes = time_attr == "time" if homogeneous else isinstance(attr.group_name, str)
            found = on_nodes if of_nodes else on_edges
            found[None if homogeneous else attr.group_name] = feature_store.get_tensor(attr)
        if time_attr is not None and bool(on_nodes) == bool(on_edges):
            raise ValueError(
                f"time_attr={time_attr!r} must name times of vertices or of edges in the feature store, and not both"
            )
        num_vertices = count_vertices((feature_store, graph_store))
        edges: dict[Any, dict]
        if edge_types == [None]:
            edges = {None: {"csc": graph_store.csc()}}
        else:
            rows, indptrs, edge_ids = graph_store.csc()
            edges = {name: {"csc": (rows[name], indptrs[name], edge_ids.get(name))} for name in edge_types}
        return cls._assemble(num_vertices, edges, on_nodes, on_edges, time_attr, False, backward)

    @classmethod
    def from_lists(
        cls,
        num_vertices: Mapping[str | None, int],
        lists: Mapping[tuple[str, str, str] | None, tuple[Tensor, Tensor]],
        *,
        time_attr: str | None = None,
        node_time: Mapping[str | None, Tensor] = MappingProxyType({}),
        edge_time: Mapping[tuple[str, str, str] | None, Tensor] = MappingProxyType({}),
        weight: Mapping[tuple[str, str, str] | None, Tensor] = MappingProxyType({}),
        is_sorted: bool = False,
    ) -> TypedGraph:
        """Creates a graph from neighbour lists that were validated before. Positions in them are edge ids. Arrays that need no sorting are shared.

        Args:
            num_vertices: size of each vertex type; the only type of a homogeneous graph is None.
            lists: ``(indptr, indices)`` of each edge type: for each vertex of its target type, ids of its source type.
            time_attr: name of the times, used in errors. None: times are not used.
            node_time, edge_time: times by type, [N] or [E]. Give only one of the two arguments; types without times are allowed.
            weight: edge weights [E]; relations without weights are allowed.
            is_sorted: lists already ascend by time.

        Raises:
            ValueError: a time or a weight is not valid, or lists do not ascend.
        """
        edges = {name: {"lists": arrays, "weight": weight.get(name)} for name, arrays in lists.items()}
        return cls._assemble(num_vertices, edges, node_time, edge_time, time_attr, is_sorted)

    @classmethod
    def _assemble(
        cls,
        num_vertices: Mapping[Any, int],
        edges: Mapping[Any, Mapping[str, Any]],
        node_time: Mapping[Any, Tensor],
        edge_time: Mapping[Any, Tensor],
        time_attr: str | None,
        is_sorted: bool,
        backward: bool = False,
        linked: bool = False,
    ) -> TypedGraph:
        """Builds the graph. ``edges`` has, by edge type, the input of :meth:`EdgeReader.read`."""
        node_types = tuple(num_vertices)
        times = [*node_time.values(), *edge_time.values()]
        clock, on_clock, edges_on_clock = None, {}, {}
        if time_attr is not None and times:
            clock = Clock.of(times, time_attr)
            on_clock = {
                name: clock.read(
                    one_each(time, num_vertices[name], f"time_attr={time_attr!r} of {words_for(name)}"), time_attr
                )
                for name, time in node_time.items()
            }
            edges_on_clock = {name: clock.read(time, time_attr) for name, time in edge_time.items()}
        relations = []
        for name, given in edges.items():
            source, target = _ends(name)
            reader = EdgeReader(
                words_for(name, "the edges"), num_vertices[source], num_vertices[target], is_sorted, backward
            )
            drawn, by = (target, source) if backward else (source, target)
            arrays = reader.read(given, on_clock.get(drawn), edges_on_clock.get(name))
            relation = Relation(node_types.index(drawn), node_types.index(by), *arrays)
            relations.append(relation.linked() if linked else relation)
        sizes = tuple(num_vertices.values())
        return cls(
            node_types, sizes, tuple(edges), tuple(relations), tuple(on_clock.get(name) for name in node_types), clock
        )

    def __repr__(self) -> str:
        num_edges = {name: relation.indices.numel() for name, relation in zip(self.edge_types, self.relations)}
        return f"TypedGraph(num_vertices={dict(zip(self.node_types, self.num_vertices))}, num_edges={num_edges})"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, including everything that relations keep per edge."""
        return sum(relation.nbytes for relation in self.relations) + sum(
            time.nbytes for time in self.node_time if time is not None
        )


def _ends(name: Any) -> tuple[str | None, str | None]:
    """Returns the source and target type of an edge type."""
    return (None, None) if name is None else (name[0], name[2])


def _times(data: Data | HeteroData, nodes: dict, edges: dict, time_attr: str | None) -> tuple[dict, dict]:
    """Returns node times by node type, and edge times by edge type, from the attribute ``time_attr``. One of the two is empty."""
    if time_attr is None:
        return {}, {}
    if isinstance(data, HeteroData):
        on_nodes = {name: store[time_attr] for name, store in nodes.items() if time_attr in store}
        on_edges = {name: store[time_attr] for name, store in edges.items() if time_attr in store}
    else:
        on_nodes = {None: data[time_attr]} if time_attr in data and data.is_node_attr(time_attr) else {}
        on_edges = (
            {None: data[time_attr]} if time_attr in data and data.is_edge_attr(time_attr) and not on_nodes else {}
        )
    if on_nodes and on_edges:
        raise ValueError(
            f"time_attr={time_attr!r} is both a node-level and an edge-level attribute; give one of them another name"
        )
    if not on_nodes and not on_edges:
        known = [name for store in (*nodes.values(), *edges.values()) for name in store]
        meant = did_you_mean(time_attr, known) or f"; name one of {', '.join(sorted({*known}))}"
        raise ValueError(f"The time attribute {time_attr!r} is neither a node-level or edge-level attribute{meant}")
    return on_nodes, on_edges
