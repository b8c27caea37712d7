"""Multiplies the whole graph's sparse matrix by rows of vertices, over P ranks, in one of several layouts.

Before and after a product, a rank has whole rows of its own vertices. A layout says where the matrix's blocks are
stored, and which rows and partial sums travel:

* ``halo``: a rank has the matrix rows of its own vertices. It fetches the rows of all other vertices that have entries in these matrix rows.
* ``cover``: each edge between two ranks is served by the row of its source, or by a sum that the owner of the source computes for its target. The fewest rows
  and sums are a minimum vertex cover of the edges between two ranks. They are never more than the rows under ``halo``.
* ``grid:RxC``: rank i C + j has the place (i, j) in a grid. It permanently keeps the matrix block of the i-th group of targets and the j-th group of sources.
  For a product, rows are gathered down the columns of the grid, and sums are scattered along its rows. ``1d`` is ``grid:Px1``.
* ``1.5d`` with replication c: P / c groups of c ranks. Each group replicates its rows, each rank multiplies by a c-th of the matrix's columns, and the
  sums are reduced in the group.
* ``2d``: SUMMA on q × q ranks. Rows are also divided by columns, into q pieces. In q steps, matrix blocks are broadcast along the rows of the grid,
  and blocks of rows along its columns.
* ``3d``: q layers of q × q ranks, each of which runs SUMMA. Each layer has a q-th of the sources of every block. The sums of the layers are added up.

1d, 1.5d, 2d and 3d follow "Reducing communication in graph neural network training" (Tripathy, Yelick, Buluç, SC 2020). Between
products rows are whole, so 2d and 3d exchange columns before and after each product. This traffic is counted separately ('columns').
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.cut import minimum_cover
from salientpp.fullgraph.exchange import Route
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.product import Operand, Sparse, operand_of, wide
from salientpp.fullgraph.rank_graph import Hop
from salientpp.ranks.placement import runs


@dataclass(frozen=True)
class Layout:
    """Layout of a product over a given number of ranks: which rank stores which block of the matrix.

    Attributes:
        name: the layout's name, as the user gave it.
        kind: 'halo', 'cover', 'grid', '1.5d' or 'summa'.
        rows, columns, layers: dimensions of the grid of ranks; for '1.5d', ``columns`` is c.
    """

    name: str
    kind: str
    rows: int = 1
    columns: int = 1
    layers: int = 1

    @classmethod
    def of(cls, name: str, size: int) -> Layout:
        """Returns the layout called ``name`` over ``size`` ranks.

        Raises:
            ValueError: no layout has this name, or it does not fit this number of ranks.
        """
        known = "'halo', 'cover', '1d', '1.5d' (c = 2) or '1.5d:c', '2d', '3d', 'grid:RxC', 'auto'"
        if name in ("halo", "cover"):
            return cls(name, name)
        if name == "1d":
            return cls(name, "grid", size, 1)
        if found := re.fullmatch(r"grid:(\d+)x(\d+)", str(name)):
            rows, columns = int(found[1]), int(found[2])
            if rows * columns != size:
                raise ValueError(f"layout={name!r} needs {rows * columns} ranks, got {size}")
            return cls(name, "grid", rows, columns)
        if found := re.fullmatch(r"1\.5d(?::(\d+))?", str(name)):
            copies = int(found[1] or 2)
            if copies < 1 or size % copies:
                raise ValueError(
                    f"layout={name!r} replicates rows {copies} times; this must divide the number of ranks, {size}"
                )
            return cls(name, "1.5d", size // copies, copies)
        if name in ("2d", "3d"):
            power = int(name[0])
            side = round(size ** (1 / power))
            if side**power != size:
                raise ValueError(
                    f"layout={name!r} needs a {'square' if power == 2 else 'cubic'} number of ranks, got {size}"
                )
            return cls(name, "summa", side, side, side if power == 3 else 1)
        raise ValueError(f"layout must be one of {known}, got {name!r}")

    def holders(self, target: int) -> list[int]:
        """Returns, for each rank r, the rank that stores the edges from r's vertices into those of ``target``."""
        blocks = [rank for rank in range(self.rows * self.columns * self.layers) if target in self.targets(rank)]
        by_source = {source: rank for rank in blocks for source in self.sources(rank)}
        return [rank for _, rank in sorted(by_source.items())]

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns the place (row, column, layer) of a rank in the grid of ranks."""
        return rank // (self.columns * self.layers), rank // self.layers % self.columns, rank % self.layers

    def stages(self, column: int) -> range:
        """Returns the groups whose rows a rank in this ``column`` of the grid multiplies, under the layout '1.5d'."""
        return range(*runs(self.rows, self.columns)[column : column + 2])

    def targets(self, rank: int) -> list[int]:
        """Returns the ranks that own the targets of ``rank``'s matrix block, in the order of the block's rows."""
        row = self.place(rank)[0]
        return [peer for layer in range(self.layers) for peer in self.sub_block(row, layer)]

    def sources(self, rank: int) -> list[int]:
        """Returns the ranks that own the sources of ``rank``'s matrix block, in the order of the block's columns."""
        _, column, layer = self.place(rank)
        if self.kind == "grid":
            return list(range(column, self.rows * self.columns, self.columns))
        if self.kind == "1.5d":
            return [peer for group in self.stages(column) for peer in self.sub_block(group)]
        return self.sub_block(column, layer)

    def sub_block(self, row: int, layer: int = 0) -> list[int]:
        """Returns all ranks in one row and one layer of the grid."""
        return [(row * self.columns + column) * self.layers + layer for column in range(self.columns)]


class DistAdjacency:
    """Sparse matrix of a graph, divided among the ranks. Its product with the vertices' rows sums them along edges.

    Making one is collective.

    Args:
        graph: this rank's part, from :func:`salientpp.fullgraph.local`.
        layout: name of a layout, see the module.
        edge_index: the matrix's entries as edges, in the graph's local numbers; None: the graph's edges.
        weight: values of the entries [e]; None: 1 for each.
        reduce: reduction over a target's edges, 'sum', 'mean' or 'max'; 'max' takes no weights, and works with 1d, 1.5d and grids only.
        dtype: dtype of the rows; None: the dtype of ``weight`` or of ``graph.x``.
        hop: number of the hop that the product computes, from 0. It matters only if the graph has a plan.

    Attributes:
        num_values: number of matrix entries that this rank stores.

    Raises:
        ValueError: the layout does not exist for this number of ranks, or does not support the reduction.
    """

    def __init__(
        self,
        graph: LocalGraph,
        layout: str = "halo",
        *,
        edge_index: Tensor | None = None,
        weight: Tensor | None = None,
        reduce: str = "sum",
        dtype: torch.dtype | None = None,
        hop: int = 0,
    ) -> None:
        form = Layout.of(layout, graph.ranks.size)
        if reduce not in ("sum", "mean", "max"):
            raise ValueError(f"reduce must be 'sum', 'mean' or 'max', got {reduce!r}")
        if reduce == "max" and (form.kind in ("summa", "halo", "cover") or weight is not None):
            raise ValueError(
                f"reduce='max' takes no weights and needs layout '1d', '1.5d' or 'grid:RxC', got layout={layout!r}{'' if weight is None else ' and weights'}"
            )
        check_plan(graph, layout)
        self.graph, self.layout, self.reduce = graph, form, reduce
        edge_index = graph.edge_index if edge_index is None else edge_index
        target = edge_index[1]
        if dtype is None:
            dtype = graph.x.dtype if weight is None else weight.dtype
        self._dtype = dtype if weight is None else torch.promote_types(dtype, weight.dtype)  # dtype of products
        value = target.new_ones(target.numel()) if weight is None else weight.detach()
        value = value.to(wide(self._dtype))
        if reduce == "mean":
            value = value / torch.bincount(target, minlength=graph.num_inner).clamp(min=1)[target]
        self._sizes = [last - first for first, last in pairwise(graph.offsets)]
        self._operand: Operand | None = None
        if form.kind in ("halo", "cover"):
            rows = graph.hops[min(hop, len(graph.hops) - 1)] if form.kind == "halo" else covering(graph, edge_index)
            self._operand = operand_of(graph, edge_index, value, rows)
            self.num_values = edge_index.size(1)
            return
        source, target, self._value, self._all_num_values = _dealt(graph, form, edge_index, value)
        targets, sources = form.targets(graph.ranks.rank), form.sources(graph.ranks.rank)
        row, column = _numbers(target, targets, graph.offsets), _numbers(source, sources, graph.offsets)
        self._ends = torch.stack([row, column])
        self._shape = self._sum(targets), self._sum(sources)
        self._matrix = Sparse.of(row, column, self._value, self._shape)
        self._is_empty = torch.bincount(row, minlength=self._shape[0])[:, None] == 0
        self._has_edges = torch.bincount(edge_index[1], minlength=graph.num_inner) > 0
        self.num_values = self._value.numel()

    def _sum(self, ranks: Sequence[int]) -> int:
        return sum(self._sizes[rank] for rank in ranks)

    @property
    def rows_received(self) -> int:
        """Number of rows and sums that this rank receives for a product, under 'halo' and 'cover'; otherwise 0."""
        return 0 if self._operand is None else self._operand.route.num_received

    # --- products -------------------------------------------------------------------------------------------

    def spmm(self, x: Tensor) -> Tensor:
        """Returns the product's rows [n, f] of this rank, from its rows ``x`` [n, f]. Differentiable. Collective."""
        graph = self.graph
        number = graph.n_id.numel()
        if x.dim() != 2 or x.size(0) not in (number, graph.num_inner):
            shape = list(x.shape)
            raise ValueError(f"x must have a row for each of this rank's {number} vertices, [{number}, f], got {shape}")
        if self._operand is not None:
            out = self._operand.multiply(_resized(x, graph.num_inner)).to(self._dtype)
        else:
            own = x[:number]
            out = self._summa(own) if self.layout.kind == "summa" else self._grid(own)
        return _resized(out, x.size(0))

    def spmm_transposed(self, y: Tensor) -> Tensor:
        """Multiplies the transposed matrix by the ranks' rows ``y`` [n, f], as :meth:`spmm`'s backward. Collective."""
        with torch.enable_grad():
            x = torch.zeros_like(y, requires_grad=True)
            (out,) = torch.autograd.grad(self.spmm(x), x, y)
        return out

    def _grid(self, x: Tensor) -> Tensor:
        layout, sizes, mine = self.layout, self._sizes, x.size(0)
        rank, size = self.graph.ranks.rank, self.graph.ranks.size
        name = self.graph.ranks.agree_to_exchange(x)
        row, column, _ = layout.place(rank)
        peers = layout.sub_block(row)
        down = range(column, size, layout.columns)
        if layout.kind == "1.5d":
            # First replicate the rows in the group, then fetch the rows of the groups that this column multiplies.
            x = self._moved(x, dict.fromkeys(peers, mine), {peer: sizes[peer] for peer in peers}, "forward", name)
            heights = {down[stage]: self._sum(layout.sub_block(stage)) for stage in layout.stages(column)}
        else:
            heights = {peer: sizes[peer] for peer in down}
        receivers = down if rank in heights else []
        table = self._moved(x, dict.fromkeys(receivers, x.size(0)), heights, "forward", name)
        partial = self._largest(table) if self.reduce == "max" else (self._matrix @ table).to(self._dtype)
        shares_gradient = self.reduce == "max" and len(peers) > 1 and x.requires_grad and torch.is_grad_enabled()
        ties = self._ties(table, partial) if shares_gradient else None
        # Each rank in a row of the grid gets the sums of its own vertices from all ranks in this row.
        send = {peer: sizes[peer] for peer in peers}
        pieces = self._moved(partial, send, dict.fromkeys(peers, mine), "forward", name)
        pieces = pieces.view(len(peers), mine, x.size(1))
        if self.reduce != "max":
            return pieces.sum(0)
        if ties is None:
            largest = pieces.amax(0)
        else:
            ties = self._moved(ties, send, dict.fromkeys(peers, mine), "ties", name)
            largest = _LargestPiece.apply(pieces, ties.view(pieces.shape))
        return torch.where(self._has_edges[:mine, None], largest, 0)

    def _largest(self, table: Tensor) -> Tensor:
        """Returns, for each matrix row, the maximum of the rows of ``table`` that its entries refer to, or -inf."""
        index = self._ends[0, :, None].expand(-1, table.size(1))
        # As in PyG, equal extremes share the gradient, and nothing else does: torch counts an equal initial value too.
        zeros = table.new_zeros((self._shape[0], table.size(1)))
        largest = zeros.scatter_reduce(0, index, table[self._ends[1]], "amax", include_self=False)
        return largest.masked_fill(self._is_empty, -torch.inf)

    def _ties(self, table: Tensor, largest: Tensor) -> Tensor:
        """Counts the entries of each matrix row whose value is the maximum, int32 in the shape of ``largest``."""
        with torch.no_grad():
            is_largest = table[self._ends[1]] == largest[self._ends[0]]
            return torch.zeros_like(largest, dtype=torch.int32).index_add_(0, self._ends[0], is_largest.int())

    def _moved(self, rows: Tensor, send: Mapping[int, int], receive: Mapping[int, int], kind: str, name: str) -> Tensor:
        """Sends ``send[r]`` rows to each rank r. Returns the rows that arrive, ``receive[r]`` from each rank r, in the order of the ranks.

        Rank 0 gets the first rows of ``rows``, rank 1 those after them, and so on. After the last row, it starts again with the first one. So all
        receivers can get the same rows.
        """
        peers = range(self.graph.ranks.size)
        which = torch.arange(sum(send.values()), device=rows.device) % max(1, rows.size(0))
        route = Route(which, [send.get(peer, 0) for peer in peers], [receive.get(peer, 0) for peer in peers])
        return self.graph.ranks.fetch(rows, route, kind, name)

    def _summa(self, x: Tensor) -> Tensor:
        layout, sizes, mine = self.layout, self._sizes, x.size(0)
        side, layers = layout.columns, layout.layers
        i, j, k = layout.place(self.graph.ranks.rank)
        name = self.graph.ranks.agree_to_exchange(x)  # with all columns, whose number is equal on all ranks
        widths = [last - first for first, last in pairwise(runs(x.size(1), side))]
        width, peers = widths[j], layout.sub_block(i, k)
        # Exchange whole rows for this rank's columns of all rows of the sub-block.
        whole = dict(zip(peers, [mine * each for each in widths], strict=True))
        of_block = {peer: sizes[peer] * width for peer in peers}
        columns = torch.cat([piece.reshape(-1) for piece in x.split(widths, 1)])
        block = self._moved(columns, whole, of_block, "columns", name).view(-1, width)
        products = []
        for stage in range(side):
            matrix = self._broadcast_matrix(stage, name)
            receivers = [layout.sub_block(row, k)[j] for row in range(side)] if i == stage else []
            stage_peers = layout.sub_block(stage, k)
            height = {stage_peers[j]: self._sum(stage_peers)}
            rows = self._moved(block, dict.fromkeys(receivers, block.size(0)), height, "forward", name)
            products.append(matrix @ rows)
        total = sum(products[1:], products[0]).to(self._dtype)
        if layers > 1:
            # Add up the sums of the layers. Each rank keeps those of its own sub-block.
            heights = {layout.sub_block(i, layer)[j]: self._sum(layout.sub_block(i, layer)) for layer in range(layers)}
            total = self._moved(total, heights, dict.fromkeys(heights, block.size(0)), "reduce", name)
            total = total.view(layers, -1, width).sum(0)
        # Exchange these columns for whole rows.
        arrived = self._moved(total.reshape(-1), of_block, whole, "columns", name).split([*whole.values()])
        return torch.cat([piece.view(mine, each) for piece, each in zip(arrived, widths, strict=True)], 1)

    def _broadcast_matrix(self, stage: int, name: str) -> Sparse:
        """Returns the matrix block that this stage of SUMMA needs: rank (i, stage, k) sends it to all (i, ·, k)."""
        rank = self.graph.ranks.rank
        row, _, layer = self.layout.place(rank)
        peers = self.layout.sub_block(row, layer)
        send = dict.fromkeys(peers if rank == peers[stage] else [], self.num_values)
        receive = {peers[stage]: self._all_num_values[peers[stage]]}
        values = self._moved(self._value, send, receive, "nonzeros", name)
        ends = self._moved(self._ends.t(), send, receive, "ids of nonzeros", name)
        width = self._sum(self.layout.sub_block(stage, layer))
        return Sparse.of(ends[:, 0], ends[:, 1], values, (self._shape[0], width))


class _LargestPiece(torch.autograd.Function):
    """Maximum over C blocks, from their maxima [C, n, f]. ``ties`` [C, n, f]: number of entries with a block's maximum.

    In the backward, all entries with the overall maximum get equal parts of the gradient. A block gets the sum for its entries, and divides it among them. As
    in PyG with ``torch.scatter_reduce``, the initial value 0 of a row counts as one more entry if the maximum is 0.
    """

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, ties: Tensor) -> Tensor:
        largest = pieces.amax(0)
        ctx.save_for_backward(torch.where(pieces == largest, ties, 0), largest == 0)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ties, is_zero = ctx.saved_tensors
        parts = torch.where(ties > 0, ties + is_zero.int(), 0)
        return gradient * parts.to(gradient.dtype) / (ties.sum(0) + is_zero.int()).clamp(min=1), None


def _resized(rows: Tensor, number: int) -> Tensor:
    """Returns the first ``number`` rows, padded with zeros if there are fewer."""
    return rows if rows.size(0) == number else torch.nn.functional.pad(rows, (0, 0, 0, number - rows.size(0)))


def check_plan(graph: LocalGraph, layout: str) -> None:
    if graph.is_planned and layout != "halo":
        raise ValueError(
            f"a plan for single vertices needs layout='halo', got {layout!r}; other layouts do not fetch single rows"
        )


def covering(graph: LocalGraph, edge_index: Tensor) -> Hop:
    """Finds the exchange for a product along these edges (local numbers) that brings the fewest rows and sums from other ranks.

    Returns it as a :class:`Hop`. Collective.
    """
    source, target = edge_index.cpu()
    is_far = source >= graph.num_own
    source, target = graph.global_ids[source[is_far]], target[is_far]
    # One cover serves all pairs of ranks: a group is a target and the owner of its sources.
    rows, _ = minimum_cover(source, graph.owner(source) * graph.num_own + target)
    return graph.fetching(rows, has_sums=graph.ranks.size > 1)


def _numbers(ids: Tensor, ranks: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Numbers the vertices of ``ranks``, rank after rank, from 0. Returns the numbers of the vertices ``ids``."""
    known = torch.cat([ids[:0], *(torch.arange(*offsets[rank : rank + 2], device="cpu") for rank in ranks)])
    places = ids.new_empty(offsets[-1])
    places[known] = torch.arange(known.numel(), device="cpu")
    return places[ids]


def _dealt(
    graph: LocalGraph, layout: Layout, edge_index: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Sends each entry of the matrix to the rank that stores its block.

    Returns the entries of this rank's block (source, target, value), with global ids, and the ranks' numbers of
    entries.
    """
    ranks = graph.ranks
    ends = graph.global_ids[edge_index.cpu()]
    there = ends[1] >= 0  # without self-loops of the placeholder row of a rank without vertices
    ends, value = ends[:, there], value.cpu()[there]
    holder = torch.tensor(layout.holders(ranks.rank), device="cpu")[graph.owner(ends[0])]
    order = holder.argsort(stable=True)
    counts = torch.bincount(holder, minlength=ranks.size).tolist()
    everyone = ranks.gather_numbers("to lay out a matrix", counts)
    come = [numbers[ranks.rank] for numbers in everyone]
    ends = ranks.comm.all_to_all(ends[:, order].t().contiguous(), counts, come).wait()
    value = ranks.comm.all_to_all(value[order], counts, come).wait()
    return *ends.t(), value, [sum(column) for column in zip(*everyone)]
