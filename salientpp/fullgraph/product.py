"""Multiplies a rank's part of a sparse matrix by rows of vertices, while rows of other ranks arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Flight, Ranks, Route
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.once import once_differentiable
from salientpp.fullgraph.rank_graph import Hop
from salientpp.nn.composed_products import csr, multiplied


@dataclass(frozen=True, eq=False)
class Sparse:
    """Constant sparse matrix that autograd can multiply by rows. It also holds its transpose, for the backward.

    On the CPU, torch does not multiply sparse matrices of 16-bit floats. There, values and sums are float32, whatever the dtype of the rows.
    """

    forth: Tensor  # CSR
    back: Tensor

    @classmethod
    def of(
        cls,
        row: Tensor,
        column: Tensor,
        value: Tensor,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> Sparse:
        """Makes the matrix from its entries. Repeated entries add up. ``device`` None: the device of ``value``."""
        if device is not None:
            row, column, value = row.to(device), column.to(device), value.to(device)
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
    return csr(indptr, column[order], value[order], shape)


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
    """Computes one rank's part of a product at one hop. It holds the rank's rows of the sparse matrix, and the route of rows and sums.

    In shapes, n is ``num_inner`` of the :class:`LocalGraph`, s the number of sums computed for others, and r the number of rows and sums that arrive.
    """

    ranks: Ranks
    near: Sparse  # [n, n], multiplies the rows that are available here
    far: Sparse  # [n, r], multiplies the arriving rows and sums
    route: Route  # sends rows of this rank's table (its rows, then its sums), and brings those of others
    sums: Sparse | None  # [s, n]; None if no rank sends sums

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiplies this rank's rows [n, f]. Returns the product's rows [n, f] in the matrix's dtype. Collective."""
        sent = rows if self.sums is None else torch.cat([rows, (self.sums @ rows).to(rows.dtype)])
        flight = Flight(self.ranks, sent, self.route)
        near = self.near @ rows
        return near + self.far @ flight.rows()


def operand_of(graph: LocalGraph, edge_index: Tensor, value: Tensor, hop: Hop) -> Operand:
    """Makes this rank's :class:`Operand` for one hop, from edges (local numbers) and their values. Collective if ``hop.has_sums``.

    It leaves out edges into vertices that need not be computed at this hop. If the row of a source is neither available here nor fetched, its
    owner adds it up and sends the sum.
    """
    ranks, number, depths, device = graph.ranks, graph.num_inner, graph.row_depths, value.device
    source, target, value = *edge_index.cpu(), value.cpu()
    is_here = depths[source] >= hop.level
    is_needed = depths[target] > hop.level
    near = is_here & is_needed
    inner = Sparse.of(target[near], source[near], value[near], (number, number), device)
    far = is_needed & ~is_here
    source, target, value = source[far], target[far], value[far]
    column = torch.full((graph.num_rows,), -1, device="cpu")
    column[hop.slots.cpu()] = torch.arange(hop.slots.numel(), device="cpu")
    column = column[source]
    by_row = column >= 0
    if not hop.has_sums:
        if not bool(by_row.all()):
            raise ValueError(
                f"{int((~by_row).sum())} edges come from vertices whose rows are not fetched at hop {hop.level}; under a plan, layers must use the edges of "
                "the graph"
            )
        outer = Sparse.of(target, column, value, (number, hop.route.num_received), device)
        return Operand(ranks, inner, outer, hop.route, None)
    ids = graph.global_ids[source[~by_row]]
    made, keys, totals, theirs = _exchanged_sums(graph, ids, target[~by_row], value[~by_row], device)
    route = hop.route
    row_places, sum_places = _in_turns(route.send_counts, theirs)
    send = torch.empty(row_places.numel() + sum_places.numel(), dtype=torch.int64, device="cpu")
    send[row_places], send[sum_places] = route.send.cpu(), torch.arange(sum(theirs), device="cpu") + number
    row_places, sum_places = _in_turns(route.recv_counts, totals)
    come = [a + b for a, b in zip(route.recv_counts, totals, strict=True)]
    outer = Sparse.of(
        torch.cat([target[by_row], keys % number]),
        torch.cat([row_places[column[by_row]], sum_places]),
        torch.cat([value[by_row], value.new_ones(keys.numel())]),
        (number, sum(come)),
        device,
    )
    go = [a + b for a, b in zip(route.send_counts, theirs, strict=True)]
    return Operand(ranks, inner, outer, Route(send.to(ranks.device), go, come), made)


def _exchanged_sums(
    graph: LocalGraph, source: Tensor, target: Tensor, value: Tensor, device: torch.device
) -> tuple[Sparse, Tensor, list[int], list[int]]:
    """Asks the owners of these sources for sums of their rows. Collective.

    Args:
        source, target, value: edges [e] from global ids of other ranks' vertices to local numbers, with their values.

    Returns:
        * A matrix [s, num_inner], which computes the sums that this rank sends.
        * The keys ``owner * num_inner + target`` of the sums that it gets, int64 [t], ascending.
        * The numbers of sums that it gets from each rank, and that it sends to each rank.
    """
    ranks, number = graph.ranks, graph.num_inner
    owner = graph.owner(source)
    keys, which = (owner * number + target).unique(return_inverse=True)
    totals = torch.bincount(keys // number, minlength=ranks.size)
    first = totals.cumsum(0) - totals
    order = owner.argsort(stable=True)
    ends = torch.stack([which - first[owner], source], 1)[order]
    edges = torch.bincount(owner, minlength=ranks.size).tolist()
    told = ranks.gather_numbers("to add up rows for other ranks", [*totals.tolist(), *edges])
    sums_out, edges_out = ([numbers[at] for numbers in told] for at in (ranks.rank, ranks.size + ranks.rank))
    ends = ranks.comm.all_to_all(ends, edges, edges_out).wait()
    weights = ranks.comm.all_to_all(value[order], edges, edges_out).wait()
    starts = torch.tensor([0, *sums_out], device="cpu").cumsum(0)[:-1]
    shift = torch.repeat_interleave(starts, torch.tensor(edges_out, device="cpu"))
    own = ends[:, 1] - graph.offsets[ranks.rank]
    made = Sparse.of(ends[:, 0] + shift, own, weights, (sum(sums_out), number), device)
    return made, keys, totals.tolist(), sums_out


def _in_turns(rows: Sequence[int], sums: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the positions of rows, and of sums, in a table that has rank 0's rows, rank 0's sums, rank 1's rows, and so on."""
    is_sum = torch.tensor([False, True] * len(rows), device="cpu")
    counts = torch.tensor([*zip(rows, sums, strict=True)], device="cpu").flatten()
    is_sum = torch.repeat_interleave(is_sum, counts)
    return (~is_sum).nonzero().flatten(), is_sum.nonzero().flatten()
