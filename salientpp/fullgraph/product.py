"""Linear aggregations as products of a sparse matrix and rows, computed while rows are still on their way, forward and backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from salientpp.fullgraph.exchange import Flight
from salientpp.fullgraph.local import Hop, LocalGraph


@dataclass(frozen=True, eq=False)
class Sparse:
    """A constant sparse matrix, and its transpose for the way back.

    On the CPU torch multiplies no matrices of narrow numbers. There the values are float32, and so are sums, whatever the rows are.
    """

    forth: Tensor  # CSR
    back: Tensor

    @classmethod
    def of(cls, row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> Sparse:
        """From coordinates; repeated ones add up."""
        if value.device.type == "cpu":
            value = value.to(wide(value.dtype))
        return cls(_csr(row, column, value, shape), _csr(column, row, value, (shape[1], shape[0])))

    def __matmul__(self, rows: Tensor) -> Tensor:
        """The product, in the matrix's dtype."""
        return _Product.apply(rows, self)


def _csr(row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> Tensor:
    order = row.argsort(stable=True)
    indptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    indptr[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that CSR is in beta
        return torch.sparse_csr_tensor(indptr, column[order], value[order], shape, device="cpu")


def multiplied(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix @ rows`` for a CSR matrix, also where either is empty. Rows of another dtype are converted to the matrix's."""
    if not matrix.values().numel() or not rows.numel():
        return rows.new_zeros((matrix.size(0), rows.size(1)), dtype=matrix.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return matrix @ rows.to(matrix.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up numbers of ``dtype`` in: float32 for the two narrow ones."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Sparse) -> Tensor:
        ctx.matrix, ctx.dtype = matrix, rows.dtype
        return multiplied(matrix.forth, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return multiplied(ctx.matrix.back, gradient.contiguous()).to(ctx.dtype), None


@dataclass(frozen=True, eq=False)
class Operand:
    """A rank's rows of a sparse matrix over the whole graph, in the local numbers of a :class:`LocalGraph`."""

    graph: LocalGraph
    inner: Sparse  # [num_inner, num_inner], of sources whose rows are in the table
    outer: Sparse  # [num_inner, outer], of the others

    def multiply(self, rows: Tensor, hop: Hop) -> Tensor:
        """The rows [num_inner, f] of the product, of rows [num_inner, f] that are right here, and those that ``hop`` fetches; in the matrix's dtype."""
        graph = self.graph
        flight = Flight(graph.ranks, rows, hop.route)
        if not graph.inner.numel():
            near = self.inner @ rows
            return near + self.outer @ flight.rows()
        # What arrives may replace rows of the table, so both products come after it.
        table = graph.with_halo(rows, hop, flight.rows())
        return self.inner @ table[: graph.num_inner] + self.outer @ table[graph.num_inner :]


def halo_operand(graph: LocalGraph, edge_index: Tensor, value: Tensor) -> Operand:
    """The matrix of edges with values, in the graph's local numbers."""
    source, target = edge_index
    size = graph.num_inner
    is_inner, is_outer = source < size, source >= size
    inner = Sparse.of(target[is_inner], source[is_inner], value[is_inner], (size, size))
    outer = Sparse.of(target[is_outer], source[is_outer] - size, value[is_outer], (size, graph.outer.numel()))
    return Operand(graph, inner, outer)
