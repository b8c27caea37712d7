"""Decides by minimum cuts which rows of other ranks a rank keeps, fetches or gets as sums. Also computes vertex covers.

The graph of :func:`least_cut` has a source, a sink and the following nodes. A node is on the source's side of the cut if its statement
is true. A group g is a set of edges to one vertex whose rows one sum can replace.

* ``S(g, h)``: at hop h, no sum is sent for group g.
* ``N(u, h)``: the row of u is needed at hop h.
* ``K(u, d)``: u is kept, and d of its layers are recomputed.

A cut costs the sum of the arcs that it crosses from the source's side:

* source -> ``S(g, h)``: the cost of a sum;
* ``N(u, h)`` -> ``K(u, h)``: the cost of a fetched row. If no vertex can be kept at this depth, the arc goes to the sink instead;
* ``K(u, d)`` -> sink: the cost of keeping u one layer deeper.

No cut crosses arcs of infinite capacity. They mean that one statement implies another:

* ``S(g, h)`` -> ``N(u, h)`` for each edge from u in group g. At hops without sums, ``N(u, h)`` is true for each u with an edge to an own vertex;
* ``K(u, d)`` -> ``K(u, d - 1)``;
* ``K(v, h + 1)`` -> ``N(u, h)`` for each edge from u to v: a recomputed vertex needs its in-neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from salientpp.ops import minimum_cut

_SOURCE, _SINK, _FIRST = 0, 1, 2


class _Arcs:
    """Collects the arcs of a graph, and finds its minimum cut."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tail: Tensor | int, head: Tensor | int, capacity: Tensor | float) -> None:
        """Adds n arcs. ``tail`` or ``head`` is int64 [n], or both are. A single value holds for all arcs."""
        size = next(end.numel() for end in (tail, head) if isinstance(end, Tensor))
        ends = [self._filled(end, size, torch.int64) for end in (tail, head)]
        self._found.append((ends[0], ends[1], self._filled(capacity, size, torch.float64)))

    @staticmethod
    def _filled(value: Tensor | float, size: int, dtype: torch.dtype) -> Tensor:
        return value.to(dtype) if isinstance(value, Tensor) else torch.full((size,), value, dtype=dtype, device="cpu")

    def cut(self, num_nodes: int) -> Tensor:
        tail, head, capacity = (torch.cat(each) for each in zip(*self._found))
        return minimum_cut(tail, head, capacity, num_nodes, _SOURCE, _SINK)


def least_cut(
    named: Tensor,
    num_groups: int,
    pairs: Tensor,
    keep: Sequence[Tensor],
    fetch: Sequence[float],
    sums: Sequence[float],
    fixed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the cheapest choice by which a rank gets all rows that it needs: kept, fetched or as sums.

    Args:
        named: int64 [2, e], edges from candidates (m vertices of other ranks) to groups. A group is a set of edges to one vertex of this rank that
            one sum can replace.
        pairs: int64 [2, f], edges between candidates.
        keep: for each depth, the costs float64 [m] of keeping each candidate one layer deeper.
        fetch, sums: for each hop, the costs of a row and of a sum; infinite for hops without sums.
        fixed: int64 [m], the depths that the result must have; None: the cheapest.

    Returns:
        depths: int64 [m], the number of layers to recompute for each kept candidate; -1 for candidates that are not kept.
        summed: bool [hops, num_groups], True for groups that are served by sums.
    """
    number, deepest, hops = keep[0].numel(), len(keep), len(fetch)
    every, groups = torch.arange(number, device="cpu"), torch.arange(num_groups, device="cpu")
    kept = [_FIRST + depth * number for depth in range(deepest)]
    needed = [_FIRST + (deepest + hop) * number for hop in range(hops)]
    first_sum = _FIRST + (deepest + hops) * number
    arcs = _Arcs()
    for depth, costs in enumerate(keep):
        arcs.add(every + kept[depth], _SINK, costs)
        if depth:
            arcs.add(every + kept[depth], every + kept[depth - 1], inf)
        if fixed is not None:
            is_kept = fixed >= depth
            arcs.add(_SOURCE, every[is_kept] + kept[depth], inf)
            arcs.add(every[~is_kept] + kept[depth], _SINK, inf)
    for hop in range(hops):
        arcs.add(every + needed[hop], every + kept[hop] if hop < deepest else _SINK, fetch[hop])
        if sums[hop] == inf:
            arcs.add(_SOURCE, named[0].unique() + needed[hop], inf)
        else:
            group = first_sum + hop * num_groups
            arcs.add(_SOURCE, groups + group, sums[hop])
            arcs.add(named[1] + group, named[0] + needed[hop], inf)
        if hop + 1 < deepest:
            arcs.add(pairs[1] + kept[hop + 1], pairs[0] + needed[hop], inf)
    side = arcs.cut(first_sum + hops * num_groups)
    depths = side[_FIRST : needed[0]].view(deepest, number).sum(0) - 1
    is_summed = ~side[first_sum:].view(hops, num_groups)
    is_summed[[hop for hop in range(hops) if sums[hop] == inf]] = False
    return depths, is_summed


def minimum_cover(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a smallest set of left and right ends, ascending, with an end of every edge: ``left[i]`` or ``right[i]``.

    Of several smallest sets, it returns one with the most left ends.
    """
    lefts, u = left.unique(return_inverse=True)
    rights, v = right.unique(return_inverse=True)
    first = _FIRST + lefts.numel()
    arcs = _Arcs()
    arcs.add(_SOURCE, torch.arange(_FIRST, first, device="cpu"), 1.0)
    arcs.add(u + _FIRST, v + first, inf)
    arcs.add(torch.arange(first, first + rights.numel(), device="cpu"), _SINK, 1.0)
    side = arcs.cut(first + rights.numel())
    return lefts[~side[_FIRST:first]], rights[side[first:]]
