"""Holds the topology of a graph in CSC form, from which sampling reads.

A :class:`Graph` holds two arrays: ``indices[indptr[v]:indptr[v + 1]]`` are the sources of the edges into v, the vertices
that v aggregates from (PyG's ``source_to_target``). A graph is validated once, in its constructor; every later step relies on that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp import ops
from salientpp.graph.from_pyg import read_adj_t, read_edge_index
from salientpp.processes import lazy, may_compute_in_parallel

#: Numbers that tell the graphs of this process apart.
_identities = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph of N vertices and E edges. Self-loops and repeated edges are kept.

    Attributes:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E], sources in [0, N). int32 halves the memory that sampling reads.
        edge_id: int64 [E], the user's number of each edge; None if positions in ``indices`` are the
            numbers.

    Raises:
        ValueError: ``indptr`` is not monotone from 0 to E, or an index is out of range.
    """

    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = field(default=None)

    #: The array that sampling reads instead of ``indices`` and ``edge_id``; None except in a :class:`LinkedGraph`.
    links: ClassVar[Tensor | None] = None

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
        self.check_lists()
        if self.edge_id is not None and (self.edge_id.dtype, self.edge_id.shape) != (torch.int64, self.indices.shape):
            raise ValueError(
                f"edge_id must be int64 [{self.num_edges}], got {self.edge_id.dtype} {list(self.edge_id.shape)}"
            )

    def check_lists(self) -> None:
        """Raises ValueError unless ``indptr`` and ``indices`` are a graph in CSC form. Arrays of a memory-mapped graph may have been altered on disk."""
        try:
            ops.check_csc(self.indptr, self.indices)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def trusted(cls, indptr: Tensor, indices: Tensor) -> Graph:
        """Creates a graph from arrays that were validated before, for instance when they were written to disk.

        The sampler still refuses ids out of range, so a wrong array raises an error and never causes a read outside an array.
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
        """Returns the number of neighbours that each vertex draws from, int64 [N]."""
        return self.indptr.diff()

    @lazy
    def _transposed(self) -> Graph:
        # Most large graphs are undirected and memory-mapped. They need no second copy in memory.
        if bool(ops.is_symmetric(self.indptr, self.indices)):
            return Graph.trusted(self.indptr, self.indices)
        return Graph.trusted(*ops.transpose_csc(self.indptr, self.indices))

    @lazy
    def _identity(self) -> int:
        return next(_identities)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the identity: a copy gets an identity of its own, also in another process."""
        return {name: value for name, value in vars(self).items() if name != "_identity"}

    @property
    def number(self) -> int:
        """Number by which caches recognise this graph in its present state, at least 1.

        No other graph of the process has it, and writing to the arrays changes it.
        """
        written = sum(0 if array.is_inference() else array._version for array in (self.indptr, self.indices))
        return self._identity + (written << 40)

    def transpose(self) -> Graph:
        """Returns the graph with every edge reversed, without edge ids.

        It is computed once and kept until :meth:`forget_transpose`. If the graph is undirected and its lists ascend, both graphs share the same arrays.
        """
        return self._transposed

    def forget_transpose(self) -> None:
        """Frees the arrays that :meth:`transpose` has made. A later call makes them again."""
        transposed = vars(self).get("_transposed")
        if transposed is not None and transposed.indices is not self.indices:
            vars(self).pop("_transposed", None)

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_vertices: int | None = None, *, is_sorted: bool = False, linked: bool = False
    ) -> Graph:
        """Creates a graph from PyG's COO form.

        Args:
            edge_index: int32 or int64 [2, E]; row 0 sources, row 1 targets.
            num_vertices: N; None means the largest id plus one.
            is_sorted: the edges are already sorted by target, so edge ids need no array.
            linked: make a :class:`LinkedGraph` if edge ids need an array and N and E are below 2**31.

        Raises:
            ValueError: a shape or dtype is wrong, or an id is out of range.
        """
        edge_index = read_edge_index(edge_index, "edge_index")
        if num_vertices is None:
            num_vertices = int(edge_index.max()) + 1 if edge_index.numel() else 0
        source, target = edge_index[0].contiguous(), edge_index[1].contiguous()
        linked = linked and not is_sorted and max(num_vertices, source.numel()) < 2**31
        try:
            indptr, indices, order = ops.csc_from_coo(
                source,
                target,
                num_vertices,
                linked=linked,
                is_sorted=is_sorted,
                parallel=may_compute_in_parallel(),
            )
        except RuntimeError as error:
            text = str(error)
            raise ValueError(
                text if "is_sorted" in text else f"{text}; the graph has {num_vertices} vertices"
            ) from None
        if linked:
            return LinkedGraph.of(indptr, indices, order)
        return cls(indptr, indices, None if is_sorted else order)

    @classmethod
    def from_data(cls, data: Data, *, is_sorted: bool = False, linked: bool = False) -> Graph:
        """Creates a graph from a homogeneous PyG ``Data`` with ``edge_index``, or with ``adj_t`` (torch_sparse or torch's CSR).

        :meth:`from_edge_index` explains the options.
        """
        if not isinstance(data, Data):
            raise TypeError(f"data must be a torch_geometric.data.Data, got {type(data).__name__}")
        if data.get("edge_index") is not None:
            return cls.from_edge_index(data.edge_index, data.num_nodes, is_sorted=is_sorted, linked=linked)
        adj_t = data.get("adj_t")
        if adj_t is None:
            raise ValueError("data must have edge_index or adj_t, got neither")
        indptr, indices = read_adj_t(adj_t, "adj_t")
        num_vertices = indptr.numel() - 1
        if num_vertices < 2**31:
            indices = indices.to(torch.int32)
        return cls(indptr.long(), indices)

    def __repr__(self) -> str:
        return f"Graph(num_vertices={self.num_vertices}, num_edges={self.num_edges}, indices={self.indices.dtype})"


class LinkedGraph(Graph):
    """A graph that keeps the source and the id of an edge in one 64-bit word, so that a sampled edge costs one cache miss instead of two.

    It takes as much memory as a graph with edge ids. ``edge_id`` is computed on first use and takes 8 more bytes per edge.
    """

    @classmethod
    def of(cls, indptr: Tensor, indices: Tensor, links: Tensor) -> LinkedGraph:
        """Creates a graph from the result of :func:`salientpp.ops.csc_from_coo` with ``linked``."""
        graph = object.__new__(cls)
        graph.__dict__.update(indptr=indptr, indices=indices, links=links)
        return graph

    @lazy
    def edge_id(self) -> Tensor:
        assert self.links is not None
        return self.links >> 32

    @property
    def nbytes(self) -> int:
        arrays = (self.indptr, self.indices, self.links, self.__dict__.get("edge_id"))
        return sum(array.nbytes for array in arrays if array is not None)


def runs_of_vertices(indptr: Tensor, num_edges: int) -> Iterator[tuple[int, int]]:
    """Divides the vertices of ``indptr`` int64 [N + 1] into consecutive ranges that can be processed one at a time in bounded memory.

    Yields (first, end). A range has at most ``num_edges`` in-edges, or a single vertex.
    """
    first, num_vertices = 0, indptr.numel() - 1
    while first < num_vertices:
        last = max(first + 1, int(torch.searchsorted(indptr, indptr[first] + num_edges, right=True)) - 1)
        yield first, last
        first = last
