"""Linear aggregations as products of a sparse matrix and rows. The computation overlaps with the exchange of rows, forward and backward."""

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
    """Constant sparse matrix, and its transpose for the backward.

    On the CPU, torch does not multiply sparse matrices of 16-bit floats. There, values and sums are float32, whatever the dtype of the rows.
    """

    forth: Tensor  # CSR
    back: Tensor

    @classmethod
    def of(cls, row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> Sparse:
        """Makes the matrix from coordinates; repeated coordinates add up."""
        if value.device.type == "cpu":
            value = value.to(wide(value.dtype))
        return cls(_csr(row, column, value, shape), _csr(column, row, value, (shape[1], shape[0])))

    def __matmul__(self, rows: Tensor) -> Tensor:
        """Multiplies rows by the matrix, in the matrix's dtype."""
        return _Product.apply(rows, self)


def _csr(row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> Tensor:
    order = row.argsort(stable=True)
    indptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    indptr[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSR is in beta
        return torch.sparse_csr_tensor(indptr, column[order], value[order], shape, device="cpu")


def multiplied(matrix: Tensor, rows: Tensor) -> Tensor:
    """Returns ``matrix @ rows`` for a CSR matrix, also if either is empty. Rows are converted to the matrix's dtype."""
    if not matrix.values().numel() or not rows.numel():
        return rows.new_zeros((matrix.size(0), rows.size(1)), dtype=matrix.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return matrix @ rows.to(matrix.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of ``dtype`` are added up: float32 for float16 and bfloat16; no change for others."""
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
    """One rank's rows of the whole graph's sparse matrix, in the local numbers of a :class:`LocalGraph`."""

    graph: LocalGraph
    inner: Sparse  # [num_inner, num_inner], for sources whose rows are in the rank's table
    outer: Sparse  # [num_inner, outer], for other sources

    def multiply(self, rows: Tensor, hop: Hop) -> Tensor:
        """Returns the product's rows [num_inner, f] in the matrix's dtype, from this rank's rows [num_inner, f] and the rows that ``hop`` fetches."""
        graph = self.graph
        flight = Flight(graph.ranks, rows, hop.route)
        if not graph.inner.numel():
            near = self.inner @ rows
            return near + self.outer @ flight.rows()
        # Arriving rows may replace rows of the table, so both products must wait for them.
        table = graph.with_halo(rows, hop, flight.rows())
        return self.inner @ table[: graph.num_inner] + self.outer @ table[graph.num_inner :]


def halo_operand(graph: LocalGraph, edge_index: Tensor, value: Tensor) -> Operand:
    """Makes the operand for edges and their values. The edges are in the graph's local numbers."""
    source, target = edge_index
    size = graph.num_inner
    is_inner, is_outer = source < size, source >= size
    inner = Sparse.of(target[is_inner], source[is_inner], value[is_inner], (size, size))
    outer = Sparse.of(target[is_outer], source[is_outer] - size, value[is_outer], (size, graph.outer.numel()))
    return Operand(graph, inner, outer)
