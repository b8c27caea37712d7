"""The graph of this package.

A :class:`Graph` is topology in CSC form: ``indices[indptr[v]:indptr[v + 1]]`` are the sources of the edges
into v, the vertices that v aggregates from (PyG's ``source_to_target``). It is validated once, when it is made;
every later step relies on that.
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

#: Numbers by which graphs of this process are told apart.
_identities = itertools.count(1)


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

    #: What sampling reads in place of ``indices`` and ``edge_id`` where there is one, see :class:`LinkedGraph`.
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

    @lazy
    def _transposed(self) -> Graph:
        # Most graphs that are large are undirected, and mapped: they need no second copy, in memory.
        if bool(ops.is_symmetric(self.indptr, self.indices)):
            return Graph.trusted(self.indptr, self.indices)
        return Graph.trusted(*ops.transpose_csc(self.indptr, self.indices))

    @lazy
    def _identity(self) -> int:
        return next(_identities)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also one in another process, has an identity of its own."""
        return {name: value for name, value in vars(self).items() if name != "_identity"}

    @property
    def number(self) -> int:
        """Of this graph as it is now: no other in this process has it, nor had this one before something was written to its arrays. At least 1."""
        written = sum(0 if array.is_inference() else array._version for array in (self.indptr, self.indices))
        return self._identity + (written << 40)

    def transpose(self) -> Graph:
        """The graph with every edge turned round, without edge ids; made once and kept. Of an undirected graph whose lists ascend it has the same arrays."""
        return self._transposed

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_vertices: int | None = None, *, is_sorted: bool = False, linked: bool = False
    ) -> Graph:
        """From PyG's COO form.

        Args:
            edge_index: int32 or int64 [2, E]; row 0 sources, row 1 targets.
            num_vertices: N; None takes the largest id plus one.
            is_sorted: the edges are already sorted by target, so edge ids need no array.
            linked: where edge ids need one and sizes allow it, make a :class:`LinkedGraph`.

        Raises:
            ValueError: wrong shape, dtype or an id out of range.
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
        """From a homogeneous PyG ``Data`` with ``edge_index``, or with ``adj_t`` (torch_sparse or torch's CSR); the options are those of
        :meth:`from_edge_index`."""
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
    """A graph that keeps edge ids beside the sources, in words of 64 bits: an edge that is sampled misses the cache once for both.

    It takes the memory of a graph with edge ids. ``edge_id`` is made when it is first asked for, and takes as much again.
    """

    @classmethod
    def of(cls, indptr: Tensor, indices: Tensor, links: Tensor) -> LinkedGraph:
        """Of what :func:`salientpp.ops.csc_from_coo` made."""
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
    """Consecutive ranges of the vertices of ``indptr`` int64 [N + 1], with at most ``num_edges`` edges into each, or one vertex."""
    first, num_vertices = 0, indptr.numel() - 1
    while first < num_vertices:
        last = max(first + 1, int(torch.searchsorted(indptr, indptr[first] + num_edges, right=True)) - 1)
        yield first, last
        first = last
