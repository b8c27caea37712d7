"""How can a sparse product over the whole graph be laid out over P ranks?

The rows of vertices always lie in one way: rank r has its vertices' rows, at full width. Where the matrix's blocks lie, and which rows and partial sums travel
for a product, is the layout:

* ``halo``: a rank has the rows of the matrix for its vertices, and fetches those rows of others that they need.
* ``cover``: the same, but that a rank sends, to each other, rows or sums of rows, whichever are fewer (:mod:`salientpp.fullgraph.covers`).
* ``grid:RxC``: rank (i, j) = i C + j keeps the block of the i-th group of targets and the j-th group of sources, for good. Rows are gathered down the
  column, sums scattered along the row: ``n f (R - 1) / P + n f (C - 1) / P`` words come to a rank.
* ``1d``: ``grid:Px1``, CAGNET's broadcast of all rows: ``(n - n_r) f``.
* ``1.5d`` with replication c: P / c groups of c ranks. A group's rows are replicated in it, each rank multiplies by a c-th of the matrix's columns, and the
  sums are reduced in the group.
* ``2d``: SUMMA on q × q ranks: rows are split by columns too, and blocks of the matrix and of the rows are broadcast along rows and columns of the grid in
  q stages.
* ``3d``: q layers of it, on q³ ranks: each has a q-th of every inner block, and the layers' sums are reduced.

1d, 1.5d, 2d and 3d are as in "Reducing communication in graph neural network training" (Tripathy, Yelick, Buluç, SC 2020); as rows lie whole between
products, 2d and 3d exchange columns before and after one, which is counted by itself ('columns').

Every layout is made of differentiable exchanges and local products. So the product's adjoint, that of the transposed matrix, needs no code of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from salientpp.fullgraph.covers import CoverOperand, cover_operand
from salientpp.fullgraph.exchange import Route
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.product import Operand, Sparse, halo_operand, product_dtype, values_of
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import runs


@dataclass(frozen=True)
class Layout:
    """A layout over a number of ranks.

    Attributes:
        name: as the user gives it.
        kind: 'halo', 'cover', 'grid', '1.5d' or 'summa'.
        rows, columns, layers: of the grid of ranks; of '1.5d' ``columns`` is c.
    """

    name: str
    kind: str
    rows: int = 1
    columns: int = 1
    layers: int = 1

    @classmethod
    def of(cls, name: str, size: int) -> Layout:
        """The layout of a name, over ``size`` ranks.

        Raises:
            ValueError: there is none of this name, or it does not fit so many ranks.
        """
        known = "'halo', 'cover', '1d', '1.5d' (c = 2) or '1.5d:c', '2d', '3d', 'grid:RxC', 'auto'"
        if name in ("halo", "cover"):
            return cls(name, name)
        if name == "1d":
            return cls(name, "grid", size, 1)
        if found := re.fullmatch(r"grid:(\d+)x(\d+)", str(name)):
            rows, columns = int(found[1]), int(found[2])
            if rows * columns != size:
                raise ValueError(f"layout={name!r} is for {rows * columns} ranks, and there are {size}")
            return cls(name, "grid", rows, columns)
        if found := re.fullmatch(r"1\.5d(?::(\d+))?", str(name)):
            copies = int(found[1] or 2)
            if copies < 1 or size % copies:
                raise ValueError(
                    f"layout={name!r} replicates rows {copies} times, which must divide the number of ranks, {size}"
                )
            return cls(name, "1.5d", size // copies, copies)
        if name in ("2d", "3d"):
            power = int(name[0])
            side = round(size ** (1 / power))
            if side**power != size:
                raise ValueError(
                    f"layout={name!r} needs a {'square' if power == 2 else 'cubic'} number of ranks, and there are {size}"
                )
            return cls(name, "summa", side, side, side if power == 3 else 1)
        raise ValueError(f"layout must be one of {known}, got {name!r}")

    @property
    def num_exchanges(self) -> int:
        """Exchanges of a product, one after the other; of each non-zero's broadcast three."""
        if self.kind == "summa":
            return 2 + 4 * self.columns + (self.layers > 1)
        return {"halo": 1, "cover": 1, "grid": 2, "1.5d": 3}[self.kind]

    def holder(self, target: int, source: int) -> int:
        """The rank that keeps the entries between the vertices of two ranks."""
        if self.kind in ("halo", "cover"):
            return target
        if self.kind == "grid":
            return target // self.columns * self.columns + source % self.columns
        if self.kind == "1.5d":
            return target // self.columns * self.columns + self._stage_of(source // self.columns)
        per_row = self.columns * self.layers
        i, (j, k) = target // per_row, (source // per_row, source % self.layers)
        return (i * self.columns + j) * self.layers + k

    def _stages(self, column: int) -> range:
        """Of '1.5d': the groups whose rows the ranks of a column multiply by."""
        bounds = runs(self.rows, self.columns)
        return range(bounds[column], bounds[column + 1])

    def _stage_of(self, group: int) -> int:
        return next(column for column in range(self.columns) if group in self._stages(column))

    def targets(self, rank: int) -> list[int]:
        """The ranks whose vertices are the rows of this rank's block, in order."""
        if self.kind == "halo":
            return [rank]
        if self.kind != "summa":
            return self.in_row(rank)
        i = rank // (self.columns * self.layers)
        return [peer for layer in range(self.layers) for peer in self.sub_block(i, layer)]

    def sources(self, rank: int) -> list[int]:
        """The ranks whose vertices are the columns of this rank's block, in order."""
        size = self.rows * self.columns * self.layers
        if self.kind == "grid":
            return list(range(rank % self.columns, size, self.columns))
        if self.kind == "1.5d":
            groups = self._stages(rank % self.columns)
            return [group * self.columns + place for group in groups for place in range(self.columns)]
        return self.sub_block(rank // self.layers % self.columns, rank % self.layers)

    def in_row(self, rank: int) -> list[int]:
        """Of 'grid' and '1.5d': the ranks of this one's row."""
        first = rank // self.columns * self.columns
        return list(range(first, first + self.columns))

    def sub_block(self, i: int, layer: int) -> list[int]:
        """Of 'summa': the ranks (i, ·, layer)."""
        return [(i * self.columns + j) * self.layers + layer for j in range(self.columns)]


class DistAdjacency:
    """A constant sparse matrix over the vertices of a graph, laid out over the ranks. Made by :meth:`of`.

    Attributes:
        graph: this rank's part.
        layout: where the blocks lie.
        reduce: 'sum' or 'max' ('mean' is a sum of weighted rows).
        num_values: entries that this rank keeps.
    """

    def __init__(
        self, graph: LocalGraph, layout: Layout, reduce: str, entries: tuple[Tensor, Tensor, Tensor] | None
    ) -> None:
        self.graph, self.layout, self.reduce = graph, layout, reduce
        self._halo: Operand | None = None
        self._cover: CoverOperand | None = None
        self._dtype: torch.dtype | None = None  # of products
        self._sizes = [last - first for first, last in pairwise(graph.offsets)]
        if entries is not None:
            source, target, value = entries
            ranks, offsets = graph.ranks, graph.offsets
            self._row = _numbers(target, layout.targets(ranks.rank), offsets)
            self._column = _numbers(source, layout.sources(ranks.rank), offsets)
            self._value = value
            self._shape = (self._sum(layout.targets(ranks.rank)), self._sum(layout.sources(ranks.rank)))
            self._matrix = Sparse.of(self._row, self._column, value, self._shape)
            self.num_values = value.numel()

    @classmethod
    def of(
        cls,
        graph: LocalGraph,
        layout: str = "halo",
        *,
        edge_index: Tensor | None = None,
        weight: Tensor | None = None,
        reduce: str = "sum",
        dtype: torch.dtype | None = None,
    ) -> DistAdjacency:
        """The matrix of edges; its product is what aggregates rows along them. Collective.

        Args:
            graph: of :func:`salientpp.fullgraph.local`.
            layout: see the module.
            edge_index: in the graph's local numbers; None: the graph's edges.
            weight: [e], or None for ones.
            reduce: 'sum', 'mean' or 'max'; 'max' takes no weights, and 1d, 1.5d and grids only.
            dtype: of the rows; None: that of ``weight`` or of ``graph.x``.

        Raises:
            ValueError: there is no such layout for so many ranks, or it cannot reduce so.
        """
        form = Layout.of(layout, graph.ranks.size)
        if reduce not in ("sum", "mean", "max"):
            raise ValueError(f"reduce must be 'sum', 'mean' or 'max', got {reduce!r}")
        if reduce == "max" and (form.kind in ("summa", "halo", "cover") or weight is not None):
            raise ValueError(
                f"reduce='max' takes no weights and goes with '1d', '1.5d' and 'grid:RxC', got layout={layout!r}{'' if weight is None else ' and weights'}"
            )
        if graph.is_planned and form.kind != "halo":
            raise ValueError(
                f"a plan that caches or recomputes goes with layout='halo' alone, got {layout!r}: other layouts fetch no single rows"
            )
        edge_index = graph.edge_index if edge_index is None else edge_index
        if dtype is None:
            dtype = weight.dtype if weight is not None else graph.x.dtype
        if form.kind == "halo":
            made = cls(graph, form, reduce, None)
            made._halo = halo_operand(graph, edge_index, weight, reduce, dtype)
            made.num_values = edge_index.size(1)
            return made
        value = values_of(graph, edge_index, None if weight is None else weight.detach(), reduce, dtype)
        if form.kind == "cover":
            made = cls(graph, form, "sum", None)
            made._cover = cover_operand(graph, edge_index, value)
            made.num_values = edge_index.size(1)
        else:
            made = cls(graph, form, "max" if reduce == "max" else "sum", _dealt(graph, form, edge_index, value))
        made._dtype = product_dtype(dtype, weight)
        return made

    def _sum(self, ranks: Sequence[int]) -> int:
        return sum(self._sizes[rank] for rank in ranks)

    @property
    def rows_received(self) -> int:
        """Rows and sums that come in for a product under 'halo' and 'cover'."""
        route = self._cover.route if self._cover is not None else self.graph.hops[0].route
        return route.num_received

    # --- products -------------------------------------------------------------------------------------------

    def spmm(self, x: Tensor) -> Tensor:
        """The product's rows of this rank's vertices, of all ranks' rows [n, f]; differentiable. Collective."""
        graph = self.graph
        number = graph.n_id.numel()
        if x.dim() != 2 or x.size(0) not in (number, graph.num_inner):
            raise ValueError(
                f"x must have a row for each of this rank's {number} vertices, [{number}, f], got {list(x.shape)}"
            )
        if self._halo is not None:
            rows = torch.cat([x, x.new_zeros((graph.num_inner - x.size(0), x.size(1)))])
            return self._halo.multiply(rows, graph.hops[0])[: x.size(0)]
        if self._cover is not None:
            rows = torch.cat([x, x.new_zeros((graph.num_own - x.size(0), x.size(1)))])
            return self._cover.multiply(rows)[: x.size(0)].to(self._dtype)
        own = x[:number]
        out = self._summa(own) if self.layout.kind == "summa" else self._grid(own)
        return torch.cat([out, out.new_zeros((x.size(0) - number, x.size(1)))]) if x.size(0) != number else out

    def spmm_transposed(self, y: Tensor) -> Tensor:
        """The product of the transposed matrix with all ranks' rows [n, f]. Collective. It is what :meth:`spmm` does to gradients."""
        with torch.enable_grad():
            x = torch.zeros_like(y, requires_grad=True)
            (out,) = torch.autograd.grad(self.spmm(x), x, y)
        return out

    def _grid(self, x: Tensor) -> Tensor:
        layout, ranks = self.layout, self.graph.ranks
        rank, size = ranks.rank, ranks.size
        name = ranks.agree_to_exchange(x)
        mine = x.size(0)
        if layout.kind == "1.5d":
            # The group's rows, on each of its ranks; then those of the groups of this column's stages.
            peers = layout.in_row(rank)
            block = self._shared(x, peers, peers, "forward", name)
            group, column = rank // layout.columns, rank % layout.columns
            down = [peer for peer in range(size) if peer % layout.columns == column]
            senders = [stage * layout.columns + column for stage in layout._stages(column)]
            receivers = down if group in layout._stages(column) else []
            counts = {peer: self._sum(layout.in_row(peer)) for peer in senders}
            table = self._sent(block, receivers, counts, "forward", name)
        else:
            down = layout.sources(rank)
            table = self._shared(x, down, down, "forward", name)
        if self.reduce == "max":
            partial = self._largest(table)
        else:
            partial = (self._matrix @ table).to(self._dtype)
        # Each rank of the row gets its vertices' sums of all.
        peers = layout.in_row(rank)
        route = Route(
            torch.arange(partial.size(0), device=partial.device),
            [self._sizes[peer] if peer in peers else 0 for peer in range(size)],
            [mine if peer in peers else 0 for peer in range(size)],
        )
        pieces = ranks.fetch(partial, route, "forward", name).view(len(peers), mine, x.size(1))
        if self.reduce == "max":
            largest = pieces.amax(0)
            return torch.where(largest == -torch.inf, 0, largest)
        return pieces.sum(0)

    def _largest(self, table: Tensor) -> Tensor:
        """Of each row of the block, the largest of the rows it names; -inf without any."""
        lowest = table.new_full((self._shape[0], table.size(1)), -torch.inf)
        index = self._row[:, None].expand(-1, table.size(1))
        return lowest.scatter_reduce(0, index, table[self._column], "amax")

    def _shared(self, rows: Tensor, receivers: Sequence[int], senders: Sequence[int], kind: str, name: str) -> Tensor:
        """The rows of all ``senders``, in their order; this rank's go to all ``receivers``."""
        return self._sent(rows, receivers, {peer: self._sizes[peer] for peer in senders}, kind, name)

    def _sent(self, rows: Tensor, receivers: Sequence[int], counts: dict[int, int], kind: str, name: str) -> Tensor:
        """All ``rows`` to each of the ``receivers``, and from each sender so many as ``counts`` says."""
        size = self.graph.ranks.size
        every = torch.arange(rows.size(0), device=rows.device)
        send = [rows.size(0) if peer in receivers else 0 for peer in range(size)]
        route = Route(every.repeat(len(receivers)), send, [counts.get(peer, 0) for peer in range(size)])
        return self.graph.ranks.fetch(rows, route, kind, name)

    def _summa(self, x: Tensor) -> Tensor:
        layout, ranks = self.layout, self.graph.ranks
        rank, side, layers = ranks.rank, layout.columns, layout.layers
        i, j, k = rank // (side * layers), rank // layers % side, rank % layers
        name = ranks.agree_to_exchange(x)  # of all columns, which is the same width on every rank
        widths = [last - first for first, last in pairwise(runs(x.size(1), side))]
        peers = layout.sub_block(i, k)
        # From rows at full width to the sub-block's rows at this rank's columns.
        mine = x.size(0)
        columns = torch.cat([piece.reshape(-1) for piece in x.split(widths, 1)])
        arrived = self._moved(
            columns,
            {peer: mine * width for peer, width in zip(peers, widths, strict=True)},
            {peer: self._sizes[peer] * widths[j] for peer in peers},
            name,
        )
        block = arrived.view(-1, widths[j])
        total: Tensor | None = None
        for stage in range(side):
            matrix = self._broadcast_matrix(layout, i, k, stage)
            sender = (stage * side + j) * layers + k
            height = self._sum(layout.sub_block(stage, k))
            receivers = [(row * side + j) * layers + k for row in range(side)] if i == stage else []
            rows = self._sent(block, receivers, {sender: height}, "forward", name)
            product = matrix @ rows
            total = product if total is None else total + product
        assert total is not None
        total = total.to(self._dtype)
        if layers > 1:
            # The layers' sums, each rank's own sub-block.
            heights = [self._sum(layout.sub_block(i, layer)) for layer in range(layers)]
            across = [(i * side + j) * layers + layer for layer in range(layers)]
            route = Route(
                torch.arange(total.size(0), device=total.device),
                [heights[across.index(peer)] if peer in across else 0 for peer in range(ranks.size)],
                [heights[k] if peer in across else 0 for peer in range(ranks.size)],
            )
            total = ranks.fetch(total, route, "reduce", name).view(layers, heights[k], widths[j]).sum(0)
        # And back to rows at full width.
        arrived = self._moved(
            total.reshape(-1),
            {peer: self._sizes[peer] * widths[j] for peer in peers},
            {peer: mine * width for peer, width in zip(peers, widths, strict=True)},
            name,
        )
        return torch.cat(
            [
                piece.view(mine, width)
                for piece, width in zip(arrived.split([mine * width for width in widths]), widths, strict=True)
            ],
            1,
        )

    def _moved(self, words: Tensor, send: dict[int, int], receive: dict[int, int], name: str) -> Tensor:
        size = self.graph.ranks.size
        every = torch.arange(words.numel(), device=words.device)
        route = Route(
            every, [send.get(peer, 0) for peer in range(size)], [receive.get(peer, 0) for peer in range(size)]
        )
        return self.graph.ranks.fetch(words, route, "columns", name)

    def _broadcast_matrix(self, layout: Layout, i: int, k: int, stage: int) -> Sparse:
        """The block of rank (i, stage, k), on every rank (i, ·, k)."""
        ranks, side, layers = self.graph.ranks, layout.columns, layout.layers
        sender = (i * side + stage) * layers + k
        peers = layout.sub_block(i, k)
        number = torch.tensor([self.num_values if ranks.rank == sender else 0], device="cpu")
        is_sender = ranks.rank == sender
        send = [1 if is_sender and peer in peers else 0 for peer in range(ranks.size)]
        receive = [1 if peer == sender else 0 for peer in range(ranks.size)]
        counts = ranks.comm.all_to_all(number.repeat(sum(send)), send, receive).wait()
        come = [int(counts[0]) if peer == sender else 0 for peer in range(ranks.size)]
        go = [self.num_values if each else 0 for each in send]
        ids = torch.stack([self._row, self._column], 1)
        values = ranks.arrived(ranks.begin(self._value.repeat(sum(send)), go, come, "nonzeros"))
        places = ranks.arrived(ranks.begin(ids.repeat(sum(send), 1), go, come, "ids of nonzeros"))
        width = self._sum(layout.sub_block(stage, k))
        return Sparse.of(places[:, 0].contiguous(), places[:, 1].contiguous(), values, (self._shape[0], width))


def _numbers(ids: Tensor, ranks: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Positions of global ids in the vertices of some ranks, one rank after the other."""
    sizes = [offsets[rank + 1] - offsets[rank] for rank in ranks]
    shift = torch.zeros(len(offsets) - 1, dtype=torch.int64, device="cpu")
    for rank, first in zip(ranks, accumulate([0, *sizes[:-1]])):
        shift[rank] = first - offsets[rank]
    owner = PartitionBook(torch.tensor(offsets, device="cpu")).owner(ids)
    return ids + shift[owner]


def _dealt(graph: LocalGraph, layout: Layout, edge_index: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries that this rank is to keep, as global (source, target, value), of those that each rank has of its own vertices."""
    ranks = graph.ranks
    names = graph.global_ids
    source, target = names[edge_index[0].cpu()], names[edge_index[1].cpu()]
    there = target >= 0  # the row of a rank without vertices may have got a self-loop
    source, target, value = source[there], target[there], value.cpu()[there]
    owner = PartitionBook(torch.tensor(graph.offsets, device="cpu")).owner(source)
    holders = torch.tensor([layout.holder(ranks.rank, peer) for peer in range(ranks.size)], device="cpu")[owner]
    order = holders.argsort(stable=True)
    counts = torch.bincount(holders, minlength=ranks.size).tolist()
    come = [numbers[ranks.rank] for numbers in ranks.gather_numbers("to lay out a matrix", counts)]
    ends = ranks.comm.all_to_all(torch.stack([source, target], 1)[order], counts, come).wait()
    values = ranks.comm.all_to_all(value[order].contiguous(), counts, come).wait()
    return ends[:, 0].contiguous(), ends[:, 1].contiguous(), values


def words_of_product(
    layout: str, offsets: Sequence[int], width: int, rank: int, halo: int = 0, nonzeros: int = 0
) -> float:
    """Words of rows and sums that come to a rank for one product, from the closed form of the layout; of '2d' and '3d' with those of non-zeros, about.

    Args:
        offsets: the first vertex of each rank, and at the end N.
        width: columns of the rows, f.
        halo: rows that the rank fetches under 'halo', or rows and sums under 'cover'.
        nonzeros: of the whole matrix.
    """
    size = len(offsets) - 1
    form = Layout.of(layout, size)
    sizes = [last - first for first, last in pairwise(offsets)]
    if form.kind in ("halo", "cover"):
        return halo * width
    of = lambda ranks: sum(sizes[each] for each in ranks)  # noqa: E731
    if form.kind == "grid":
        gathered = of(form.sources(rank)) - sizes[rank]
        return (gathered + (form.columns - 1) * sizes[rank]) * width
    if form.kind == "1.5d":
        group = of(form.in_row(rank))
        inside = group if rank // form.columns in form._stages(rank % form.columns) else 0
        staged = of(form.sources(rank)) - inside
        return (group - sizes[rank] + staged + (form.columns - 1) * sizes[rank]) * width
    side, layers = form.columns, form.layers
    i, j, k = rank // (side * layers), rank // layers % side, rank % layers
    widths = [last - first for first, last in pairwise(runs(width, side))]
    sub_block = of(form.sub_block(i, k))
    staged = sum(of(form.sub_block(stage, k)) for stage in range(side) if stage != i) * widths[j]
    reduced = (layers - 1) * sub_block * widths[j]
    columns = (sub_block - sizes[rank]) * widths[j] + sizes[rank] * (width - widths[j])
    return staged + reduced + columns + nonzeros * (side - 1) / size
