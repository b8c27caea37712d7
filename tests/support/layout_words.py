"""The number of words that a product moves under a layout, from a formula. Tests compare it with counted words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from salientpp.fullgraph.layouts import Layout
from salientpp.ranks.placement import runs


def words_of_product(
    layout: str, offsets: Sequence[int], width: int, rank: int, halo: int = 0, nonzeros: int = 0
) -> float:
    """Returns the number of words (elements) of rows and sums that a rank receives for one product, from a formula.

    For '2d' and '3d' the result is approximate, and includes the words of the non-zeros that travel.

    Args:
        offsets: the first vertex of each rank, and N at the end.
        width: number of columns of the rows, f.
        halo: number of rows that the rank fetches under 'halo', or of rows and sums under 'cover'.
        nonzeros: number of non-zeros of the whole matrix.
    """
    size = len(offsets) - 1
    form = Layout.of(layout, size)
    row, column, layer = form.place(rank)
    sizes = [last - first for first, last in pairwise(offsets)]
    if form.kind in ("halo", "cover"):
        return halo * width
    of = lambda ranks: sum(sizes[each] for each in ranks)  # noqa: E731
    if form.kind == "grid":
        return (of(form.sources(rank)) + (form.columns - 2) * sizes[rank]) * width
    sub_block = of(form.sub_block(row, layer))
    if form.kind == "1.5d":
        staged = of(form.sources(rank)) - (sub_block if row in form.stages(column) else 0)
        return (sub_block + staged + (form.columns - 2) * sizes[rank]) * width
    mine = runs(width, form.columns)[column + 1] - runs(width, form.columns)[column]
    staged = sum(of(form.sub_block(stage, layer)) for stage in range(form.columns) if stage != row)
    reduced = (form.layers - 1) * sub_block
    columns = (sub_block - sizes[rank]) * mine + sizes[rank] * (width - mine)
    return (staged + reduced) * mine + columns + nonzeros * (form.columns - 1) / size
