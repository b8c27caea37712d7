"""What is a graph here, and how does one get in?

A :class:`Graph` is topology in CSC form: ``indices[indptr[v]:indptr[v + 1]]`` are the sources of the edges
into v, the vertices that v aggregates from (PyG's ``source_to_target``). It is validated once, when it is made;
every later step relies on that. A :class:`TypedGraph` is several such matrices, one for each relation between types of
vertices, with the times and weights that edges may have; a homogeneous graph with times or weights is one too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils

from salientpp import ops
from salientpp.ids import first_outside

NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph of N vertices and E edges; self-loops and repeated edges are kept.

    Attributes:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E], sources in [0, N); int32 halves the memory that sampling reads.
        edge_id: int64 [E], the user's number of each edge, or None where positions in ``indices`` are the
            numbers.

    Raises:
        ValueError: ``indptr`` is not monotone from 0 to E, or an index is out of range.
    """

    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        for name in ("indptr", "indices", "edge_id"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, got {tensor.device}; use {name}.cpu()")
            if tensor.layout != torch.strided:
                raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
            object.__setattr__(self, name, tensor.contiguous())
        try:
            ops.check_csc(self.indptr, self.indices)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        if self.edge_id is not None and (self.edge_id.dtype, self.edge_id.shape) != (torch.int64, self.indices.shape):
            raise ValueError(
                f"edge_id must be int64 [{self.num_edges}], got {self.edge_id.dtype} {list(self.edge_id.shape)}"
            )

    @classmethod
    def trusted(cls, indptr: Tensor, indices: Tensor) -> Graph:
        """A graph whose arrays were validated before, for instance when they were written to disk.

        The sampler still refuses ids out of range, so a wrong array is an error and never a stray read.
        """
        graph = object.__new__(cls)
        for name, value in (("indptr", indptr), ("indices", indices), ("edge_id", None)):
            object.__setattr__(graph, name, value)
        return graph

    @property
    def num_vertices(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, whether in memory or memory-mapped."""
        return sum(t.nbytes for t in (self.indptr, self.indices, self.edge_id) if t is not None)

    def in_degree(self) -> Tensor:
        """int64 [N]: how many neighbours each vertex draws from."""
        return self.indptr.diff()

    @cached_property
    def _transposed(self) -> Graph:
        return Graph.trusted(*ops.transpose_csc(self.indptr, self.indices))

    def transpose(self) -> Graph:
        """The graph with every edge turned round, without edge ids; made once and kept."""
        return self._transposed

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_vertices: int | None = None, *, is_sorted: bool = False) -> Graph:
        """From PyG's COO form.

        Args:
            edge_index: int32 or int64 [2, E]; row 0 sources, row 1 targets.
            num_vertices: N; None takes the largest id plus one.
            is_sorted: the edges are already sorted by target, so edge ids need no array.

        Raises:
            ValueError: wrong shape, dtype or an id out of range.
        """
        edge_index = read_edge_index(edge_index, "edge_index")
        if num_vertices is None:
            num_vertices = int(edge_index.max()) + 1 if edge_index.numel() else 0
        source, target = edge_index[0].contiguous(), edge_index[1].contiguous()
        try:
            indptr, indices, edge_id = ops.csc_from_coo(source, target, num_vertices)
        except RuntimeError as error:
            raise ValueError(f"{error}; the graph has {num_vertices} vertices") from None
        if is_sorted:
            if target.numel() and bool((target.diff() < 0).any()):
                raise ValueError("is_sorted=True, but edge_index is not sorted by target (row 1); leave is_sorted=False")
            edge_id = None
        return cls(indptr, indices, edge_id)

    @classmethod
    def from_data(cls, data: Data, *, is_sorted: bool = False) -> Graph:
        """From a homogeneous PyG ``Data`` with ``edge_index``, or with ``adj_t`` (torch_sparse or torch's CSR)."""
        if not isinstance(data, Data):
            raise TypeError(f"data must be a torch_geometric.data.Data, got {type(data).__name__}")
        if data.get("edge_index") is not None:
            return cls.from_edge_index(data.edge_index, data.num_nodes, is_sorted=is_sorted)
        adj_t = data.get("adj_t")
        if adj_t is None:
            raise ValueError("data must have edge_index or adj_t, got neither")
        indptr, indices = _read_adj_t(adj_t, "adj_t")
        num_vertices = indptr.numel() - 1
        if num_vertices < 2**31:
            indices = indices.to(torch.int32)
        return cls(indptr.long(), indices)

    def __repr__(self) -> str:
        return f"Graph(num_vertices={self.num_vertices}, num_edges={self.num_edges}, indices={self.indices.dtype})"


def runs_of_vertices(indptr: Tensor, num_edges: int) -> Iterator[tuple[int, int]]:
    """Ranges of vertices, one after another, with at most ``num_edges`` edges into each, or one vertex: work on a run takes bounded memory.

    Args:
        indptr: int64 [N + 1].
    """
    first, num_vertices = 0, indptr.numel() - 1
    while first < num_vertices:
        last = max(first + 1, int(torch.searchsorted(indptr, indptr[first] + num_edges, right=True)) - 1)
        yield first, last
        first = last


def read_edge_index(edge_index: object, name: str, size: str = "E") -> Tensor:
    """Pairs of vertex ids, int32 or int64 [2, ``size``], on the CPU; ValueError with ``name`` for anything else."""
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
        got = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"{name} must be a tensor of shape [2, {size}], got {got}")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must have dtype int64 or int32, got {edge_index.dtype}")
    if edge_index.layout != torch.strided or edge_index.device.type == "meta":
        raise ValueError(f"{name} must be a dense tensor with data, got layout {edge_index.layout} on {edge_index.device}")
    return edge_index.as_subclass(Tensor).cpu()  # PyG's EdgeIndex is a subclass with its own rules


def _read_adj_t(adj_t: Any, name: str) -> tuple[Tensor, Tensor]:
    """``indptr`` and ``indices`` of a torch_sparse or a torch CSR matrix."""
    if not isinstance(adj_t, Tensor):
        return adj_t.csr()[:2]
    if adj_t.layout != torch.sparse_csr:
        raise ValueError(f"{name} must be a SparseTensor or a CSR tensor, got layout {adj_t.layout}")
    return adj_t.crow_indices(), adj_t.col_indices()


def positions_in(adj_t: Any, edge_index: Tensor, name: str) -> Tensor | None:
    """Where a matrix holds each edge of a list.

    Args:
        adj_t: a torch_sparse or a torch CSR matrix of targets by sources.
        edge_index: [2, E].
        name: what the edges are called.

    Returns:
        int64 [E], the place of each edge in the matrix row by row, of repeated edges in their order; None: the orders are the same.

    Raises:
        ValueError: they do not hold the same edges.
    """
    listed = read_edge_index(edge_index, f"edge_index of {name}").to(torch.int64)
    indptr, indices = (part.cpu().to(torch.int64) for part in _read_adj_t(adj_t, f"adj_t of {name}"))
    kept = torch.stack([indices, torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())])
    if torch.equal(listed, kept):
        return None
    orders = [_by_target_and_source(edges) for edges in (listed, kept)]
    if listed.shape != kept.shape or not torch.equal(listed[:, orders[0]], kept[:, orders[1]]):
        raise ValueError(
            f"edge_index and adj_t of {name} must be of the same edges, got {listed.size(1)} and {kept.size(1)} that differ; "
            "delete the one that is not meant"
        )
    position = torch.empty_like(orders[0])
    position[orders[0]] = orders[1]
    return position


def _by_target_and_source(edge_index: Tensor) -> Tensor:
    """int64 [E]: the stable order of edges by target, and by source among those of one."""
    order = torch.sort(edge_index[0], stable=True).indices
    return order[torch.sort(edge_index[1][order], stable=True).indices]


# --- several types of vertices ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Relation:
    """The edges from one type of vertices to another, or the same; validated by :class:`TypedGraph`.

    Attributes:
        source, target: positions in the graph's ``node_types``.
        indptr: int64 [N_target + 1].
        indices: int32 or int64 [E], sources in [0, N_source).
        edge_id: int64 [E], the user's number of each edge, or None where positions in ``indices`` are the numbers.
        edge_weight: float64 [E] in the order of ``indices``, finite and >= 0, or None: all alike.
        edge_time: int64 [E] in the order of ``indices``, or None; see :class:`Clock`.
    """

    source: int
    target: int
    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = None
    edge_weight: Tensor | None = None
    edge_time: Tensor | None = None

    @property
    def nbytes(self) -> int:
        arrays = (self.indptr, self.indices, self.edge_id, self.edge_weight, self.edge_time)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, eq=False)
class Clock:
    """Times as int64 in an order-preserving way, so that kernels compare one kind of number.

    Whole and real times compare by value, exactly: none is rounded to the other kind. Where a graph has both kinds, a time becomes
    the number of the graph's times that are not later.

    Attributes:
        real: the graph has real times, floating-point numbers.
        known: if it has whole times too: all of either kind, int64 and float64, ascending.
    """

    real: bool
    known: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, times: Sequence[Tensor], name: str) -> Clock:
        """For a graph that has these times.

        Raises:
            ValueError: as :meth:`read`.
        """
        exact = [_exact_time(time, name).flatten() for time in times]
        whole = [time for time in exact if time.dtype == torch.int64]
        real = [time for time in exact if time.dtype == torch.float64]
        return cls(bool(real), (torch.cat(whole).sort().values, torch.cat(real).sort().values) if whole and real else None)

    def read(self, time: Tensor, name: str) -> Tensor:
        """int64: for a time t of the graph and any time s, ``read(t) <= read(s)`` just where ``t <= s``.

        What no time of the graph can equal is rounded down: 2.5 among whole times to 2, 2^53 + 1 among real ones to 2^53.

        Raises:
            ValueError: a time that is not a number, or not below 2^63 though whole; times of a dtype without an order.
        """
        time = _exact_time(time, name)
        is_whole = time.dtype == torch.int64
        if self.known is not None:
            whole, real = self.known
            down = _real_below(time) if is_whole else _whole_below(time)
            earlier = (time, down) if is_whole else (down, time)
            return sum(torch.searchsorted(all_, own, right=True) for all_, own in zip((whole, real), earlier))
        if not self.real:
            return (time if is_whole else _whole_below(time)).contiguous()
        bits = ((_real_below(time) if is_whole else time) + 0.0).contiguous().view(torch.int64)  # adding zero turns -0.0 into 0.0
        return bits ^ ((bits >> 63) & (2**63 - 1))


def _exact_time(time: Tensor, name: str) -> Tensor:
    """The same values on the CPU as int64 or float64; ValueError where these cannot hold them, or they have no order."""
    if not isinstance(time, Tensor) or time.dtype.is_complex:
        raise ValueError(f"{name} must be a tensor of whole or real numbers, got {time.dtype if isinstance(time, Tensor) else type(time).__name__}")
    time = time.detach().cpu()
    if time.dtype.is_floating_point:
        time = time.to(torch.float64)
        if bool(time.isnan().any()):
            raise ValueError(f"{name} must hold numbers, got NaN at position {int(time.isnan().nonzero()[0])}")
        return time
    whole = time.to(torch.int64)
    if time.dtype == torch.uint64 and bool((whole < 0).any()):
        at = int((whole < 0).nonzero()[0])
        raise ValueError(f"{name} must be < 2^63, got {int(whole[at]) + 2**64} at position {at}")
    return whole


def _whole_below(time: Tensor) -> Tensor:
    """The largest int64 that is at most a float64; the least one where there is none."""
    floor = time.floor()
    inside = floor.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)  # 2^63 - 1024 is the last float64 below 2^63
    return torch.where(floor >= 2.0**63, 2**63 - 1, inside)


def _real_below(time: Tensor) -> Tensor:
    """The largest float64 that is at most an int64."""
    real = time.to(torch.float64)
    rounded_up = (real >= 2.0**63) | (real.clamp(max=2.0**63 - 1024).to(torch.int64) > time)
    return torch.where(rounded_up, real.nextafter(torch.tensor(-torch.inf, dtype=torch.float64)), real)


@dataclass(frozen=True, eq=False)
class TypedGraph:
    """Vertices of T types with R relations between them, with times and weights if there are any.

    A homogeneous graph is the case of one type and one relation, both named None.

    Attributes:
        node_types, num_vertices: T names and sizes.
        edge_types, relations: R names and matrices.
        node_time: per type int64 [N], or None where vertices are there at all times.
        clock: how times were read; None without times.

    Lists of a relation with times ascend by them.
    """

    node_types: tuple[str | None, ...]
    num_vertices: tuple[int, ...]
    edge_types: tuple[tuple[str, str, str] | None, ...]
    relations: tuple[Relation, ...]
    node_time: tuple[Tensor | None, ...]
    clock: Clock | None = None

    @classmethod
    def of(cls, graph: Graph) -> TypedGraph:
        """A homogeneous graph; shares its arrays."""
        relation = Relation(0, 0, graph.indptr, graph.indices, graph.edge_id)
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
    ) -> TypedGraph:
        """From PyG's objects; a relation with neither ``edge_index`` nor ``adj_t`` has no edges.

        Args:
            time_attr: the name of node or edge times; they may be missing on some types.
            weight_attr: the name of edge weights; they may be missing on some relations.
            is_sorted: edges are sorted by target already, and by time inside a target's list.
            backward: turn every edge round, so that a vertex draws from those it points to.

        Raises:
            ValueError: an attribute is missing or of the wrong shape, a weight is negative or not finite, an id is out of range.
        """
        if isinstance(data, HeteroData):
            nodes = {name: data[name] for name in data.node_types}
            edges = {name: data[name] for name in data.edge_types}
            ends = {name: (name[0], name[2]) for name in edges}
            for name, end in ((name, end) for name, both in ends.items() for end in both):
                if end not in nodes:
                    raise ValueError(f"edge type {name} must join node types of the data ({', '.join(nodes)}), got {end!r}; set num_nodes of it")
        else:
            nodes, edges, ends = {None: data._store}, {None: data._store}, {None: (None, None)}
        num_vertices = count_vertices(data)
        node_time, edge_time = _times(data, nodes, edges, time_attr)
        if weight_attr is not None and not any(weight_attr in store for store in edges.values()):
            raise ValueError(f"weight_attr names the edge weights, but no edges have an attribute {weight_attr!r}")

        def read(name: Any, edges_of: _Edges, times: dict[str, Tensor | None]) -> tuple:
            store = edges[name]
            weight = store[weight_attr] if weight_attr is not None and weight_attr in store else None
            return edges_of.read(*edges_of.ends(store), weight=weight, **times)

        return cls._assemble(num_vertices, ends, node_time, edge_time, time_attr, is_sorted, backward, read)

    @classmethod
    def from_stores(
        cls, feature_store: FeatureStore, graph_store: GraphStore, *, time_attr: str | None = None, backward: bool = False
    ) -> TypedGraph:
        """From PyG's interfaces to graphs and features that are kept elsewhere: their topology is read whole, their times too.

        Raises:
            ValueError: ``time_attr`` names nothing, or both vertices' and edges' times.
        """
        edge_types = list(dict.fromkeys(attr.edge_type for attr in graph_store.get_all_edge_attrs()))
        attributes = feature_store.get_all_tensor_attrs()
        on_nodes, on_edges = {}, {}
        for attr in attributes if time_attr is not None else []:
            if attr.attr_name != time_attr:
                continue
            attr = copy.copy(attr)
            attr.index = None
            # A graph of one type has no names to tell whose times they are, so PyG goes by the attribute's.
            homogeneous = edge_types == [None]
            of_nodes = time_attr == "time" if homogeneous else isinstance(attr.group_name, str)
            (on_nodes if of_nodes else on_edges)[None if homogeneous else attr.group_name] = feature_store.get_tensor(attr)
        if time_attr is not None and bool(on_nodes) == bool(on_edges):
            raise ValueError(f"time_attr={time_attr!r} must name times of vertices or of edges in the feature store, and not both")
        num_vertices = count_vertices((feature_store, graph_store))
        if edge_types == [None]:
            ends = {None: (None, None)}
            row, indptr, edge_id = graph_store.csc()
            lists = {None: (row, indptr, edge_id)}
        else:
            ends = {name: (name[0], name[2]) for name in edge_types}
            rows, indptrs, edge_ids = graph_store.csc()
            lists = {name: (rows[name], indptrs[name], edge_ids.get(name)) for name in edge_types}

        def read(name: Any, edges_of: _Edges, times: dict[str, Tensor | None]) -> tuple:
            row, indptr, edge_id = lists[name]
            target = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
            if edge_id is not None and times["edge_time"] is not None:
                times = {**times, "edge_time": times["edge_time"][edge_id]}
            source, target, _ = edges_of.ends({"edge_index": torch.stack([row.to(torch.int64), target])})
            indptr, indices, position, weight, time = edges_of.read(source, target, False, weight=None, **times)
            return indptr, indices, position if edge_id is None else edge_id[position], weight, time

        return cls._assemble(num_vertices, ends, on_nodes, on_edges, time_attr, False, backward, read)

    @classmethod
    def _assemble(
        cls, num_vertices: dict, ends: dict, node_time: dict, edge_time: dict, time_attr: str | None, is_sorted: bool, backward: bool, read: Any
    ) -> TypedGraph:
        node_types = tuple(num_vertices)
        times = [*node_time.values(), *edge_time.values()]
        clock = Clock.of(times, time_attr) if times else None
        on_clock = {
            name: clock.read(_one_each(time, num_vertices[name], f"{time_attr!r} of {_call(name)}"), time_attr)
            for name, time in node_time.items()
        }
        relations = []
        for name, (source, target) in ends.items():
            edges_of = _Edges(_call(name, "the edges"), num_vertices[source], num_vertices[target], is_sorted, backward)
            arrays = read(
                name,
                edges_of,
                {
                    "node_time": on_clock.get(target if backward else source),
                    "edge_time": clock.read(edge_time[name], time_attr) if name in edge_time else None,
                },
            )
            source_type, target_type = node_types.index(source), node_types.index(target)
            relations.append(Relation(*((target_type, source_type) if backward else (source_type, target_type)), *arrays))
        sizes = tuple(num_vertices.values())
        return cls(node_types, sizes, tuple(ends), tuple(relations), tuple(on_clock.get(name) for name in node_types), clock)

    @property
    def is_homogeneous(self) -> bool:
        return self.node_types == (None,)

    def __repr__(self) -> str:
        num_edges = {name: relation.indices.numel() for name, relation in zip(self.edge_types, self.relations)}
        return f"TypedGraph(num_vertices={dict(zip(self.node_types, self.num_vertices))}, num_edges={num_edges})"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for part in (*self.relations, *(time for time in self.node_time if time is not None)))


def count_vertices(data: Data | HeteroData | tuple[FeatureStore, GraphStore]) -> dict[str | None, int]:
    """How many vertices of each type there are; the type of a homogeneous graph is None."""
    if isinstance(data, (Data, HeteroData)):
        sizes = {None: data.num_nodes} if isinstance(data, Data) else {name: data[name].num_nodes for name in data.node_types}
        for name, size in sizes.items():
            if size is None:
                raise ValueError(f"data must say how many there are of {_call(name)}: set num_nodes, or an attribute such as x")
        return {name: int(size) for name, size in sizes.items()}
    feature_store, graph_store = data
    edges = graph_store.get_all_edge_attrs()
    if all(attr.edge_type is None for attr in edges):
        return {None: max(max(attr.size) for attr in edges)}
    names = [attr.group_name for attr in feature_store.get_all_tensor_attrs() if isinstance(attr.group_name, str)]
    names += [end for attr in edges for end in (attr.edge_type[0], attr.edge_type[2])]
    return {name: remote_backend_utils.num_nodes(feature_store, graph_store, name) for name in dict.fromkeys(names)}


def _call(name: str | tuple[str, str, str] | None, otherwise: str = "the vertices") -> str:
    return otherwise if name is None else repr(name)


def _times(data: Data | HeteroData, nodes: dict, edges: dict, time_attr: str | None) -> tuple[dict, dict]:
    """Node times by node type and edge times by edge type; one of the two is empty."""
    if time_attr is None:
        return {}, {}
    if isinstance(data, HeteroData):
        on_nodes = {name: store[time_attr] for name, store in nodes.items() if time_attr in store}
        on_edges = {name: store[time_attr] for name, store in edges.items() if time_attr in store}
    else:
        on_nodes = {None: data[time_attr]} if time_attr in data and data.is_node_attr(time_attr) else {}
        on_edges = {None: data[time_attr]} if time_attr in data and data.is_edge_attr(time_attr) and not on_nodes else {}
    if on_nodes and on_edges:
        raise ValueError(f"time_attr={time_attr!r} is both a node-level and an edge-level attribute; give one of them another name")
    if not on_nodes and not on_edges:
        raise ValueError(f"The time attribute {time_attr!r} is neither a node-level or edge-level attribute")
    return on_nodes, on_edges


def _one_each(values: object, size: int, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 1 or values.numel() != size:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a tensor of shape [{size}], got {got}")
    return values


@dataclass(frozen=True)
class _Edges:
    """Reads one relation: its name for errors, its sizes, and what the user says of its order."""

    name: str
    num_sources: int
    num_targets: int
    is_sorted: bool
    backward: bool

    def ends(self, store: Mapping[str, Any]) -> tuple[Tensor, Tensor, bool]:
        """Source and target of every edge, and whether they stand in the order of a neighbour list, so that positions are ids."""
        if store.get("edge_index") is not None:
            return *self._ends(store["edge_index"]), False
        if store.get("adj_t") is not None:
            return *self._ends_of_matrix(store["adj_t"]), True
        return NO_EDGES[0], NO_EDGES[1], False

    def read(
        self, source: Tensor, target: Tensor, listed: bool, *, weight: Tensor | None, node_time: Tensor | None, edge_time: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """``(indptr, indices, edge_id, edge_weight, edge_time)`` as :class:`Relation` takes them."""
        num_edges = source.numel()
        num_sources, num_targets = self.num_sources, self.num_targets
        if self.backward:
            source, target, num_sources, num_targets = target, source, num_targets, num_sources
        weight = None if weight is None else self._checked_weight(weight, num_edges)
        if edge_time is not None:
            _one_each(edge_time, num_edges, f"the time of {self.name}")
        time = edge_time if edge_time is not None else None if node_time is None else node_time[source]
        order = None
        if time is not None and not self.is_sorted:
            order = torch.sort(time, stable=True).indices
            source, target = source[order], target[order]
        # The kernel sorts by target and keeps the order of a list. It knows one number of vertices, so take the larger.
        widest = max(num_sources, num_targets)
        indptr, indices, edge_id = ops.csc_from_coo(source.contiguous(), target.contiguous(), widest)
        indptr = indptr[: num_targets + 1].contiguous()
        if self.is_sorted and target.numel() and bool((target.diff() < 0).any()):
            raise ValueError(f"is_sorted=True, but {self.name} are not sorted by target; leave is_sorted=False")
        if order is not None:
            edge_id = order[edge_id]
        in_lists = None if time is None else time[edge_id]
        if in_lists is not None and self.is_sorted:
            self._check_sorted(indptr, in_lists)
        return (
            indptr,
            indices,
            None if self.is_sorted or (listed and time is None and not self.backward) else edge_id,
            None if weight is None else weight[edge_id],
            None if edge_time is None else in_lists,
        )

    def _ends(self, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        edge_index = read_edge_index(edge_index, f"edge_index of {self.name}")
        for row, size in ((0, self.num_sources), (1, self.num_targets)):
            at = first_outside(edge_index[row], size)
            if at is not None:
                raise ValueError(f"edge_index[{row}, {at}] of {self.name} must be in [0, {size}), got {int(edge_index[row, at])}")
        return edge_index[0], edge_index[1]

    def _ends_of_matrix(self, adj_t: Any) -> tuple[Tensor, Tensor]:
        indptr, indices = _read_adj_t(adj_t, f"adj_t of {self.name}")
        indptr, indices = indptr.cpu().to(torch.int64), indices.cpu().to(torch.int64)
        target = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
        return self._ends(torch.stack([indices, target]))

    def _checked_weight(self, weight: Tensor, num_edges: int) -> Tensor:
        weight = _one_each(weight, num_edges, f"the weight of {self.name}").detach().cpu()
        if weight.dtype.is_complex:
            raise ValueError(f"the weight of {self.name} must be real numbers, got {weight.dtype}")
        weight = weight.to(torch.float64)
        bad = ~(weight.isfinite() & (weight >= 0))
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise ValueError(f"the weight of {self.name} must be finite and >= 0, got {float(weight[at])} at edge {at}")
        if not bool(weight.sum().isfinite()):
            raise ValueError(f"the weight of {self.name} must have a finite sum; divide it by its largest, {float(weight.max()):g}")
        return weight

    def _check_sorted(self, indptr: Tensor, time: Tensor) -> None:
        falls = time.diff() < 0
        starts = indptr[1:-1]
        starts = starts[(starts > 0) & (starts < time.numel())]
        falls[starts - 1] = False
        if bool(falls.any()):
            at = int(falls.nonzero()[0])
            raise ValueError(
                f"is_sorted=True, but the times of {self.name} do not ascend inside a neighbour list (edges {at} and {at + 1}); "
                "leave is_sorted=False"
            )
