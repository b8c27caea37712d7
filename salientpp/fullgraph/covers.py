"""Linear aggregation that sends the fewest rows between two ranks: rows of sources, or sums that the sender computes for targets.

Each edge between two ranks is covered by its source or by its target. A source that covers edges has its row sent. For a target that covers edges, the sender
adds up the rows of those sources whose rows are not sent, and sends the sum. The fewest rows and sums are a minimum vertex cover of the edges. By König's
theorem, this cover is as large as a maximum matching. It is never larger than the halo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Flight, Route
from salientpp.fullgraph.local import Hop, LocalGraph
from salientpp.fullgraph.product import Sparse

#: Number of edges between two ranks up to which a minimum cover is computed. For more edges, all sources or all targets are taken, whichever are fewer.
_EXACT = 500_000


@dataclass(frozen=True, eq=False)
class CoverOperand:
    """One rank's rows of a sparse matrix. The contribution of other ranks to the product arrives as rows and as sums."""

    graph: LocalGraph
    near: Sparse  # [n, n], multiplies this rank's own rows
    sums: Sparse  # [s, n], sums that this rank computes for others
    far: Sparse  # [n, r], multiplies the arriving rows and sums
    route: Route  # brings rows from the table of own rows and sums

    def multiply(self, rows: Tensor, hop: Hop) -> Tensor:
        """Returns the product's rows [n, f] in the matrix's dtype. ``rows`` [n, f] are this rank's rows. Collective. The argument ``hop`` is not used."""
        flight = Flight(self.graph.ranks, torch.cat([rows, (self.sums @ rows).to(rows.dtype)]), self.route)
        near = self.near @ rows
        return near + self.far @ flight.rows()


#: Graph -> the edges from other ranks that were covered last (sources, targets), and their covers. Covers are found when a layout is chosen, and used again
#: when the layout is made.
_found: WeakKeyDictionary[LocalGraph, tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]] = WeakKeyDictionary()


def covers_of(graph: LocalGraph, edge_index: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each rank, the sources whose rows that rank sends here (global ids), and the targets whose sums it sends (local numbers). Both ascend."""
    source, target = edge_index.cpu()
    is_far = source >= graph.num_own
    source, target = graph.global_ids[source[is_far]], target[is_far]
    if (known := _found.get(graph)) and torch.equal(known[0], source) and torch.equal(known[1], target):
        return known[2]
    owner = graph.owner(source)
    found = [minimum_cover(source[owner == rank], target[owner == rank]) for rank in range(graph.ranks.size)]
    _found[graph] = source, target, found
    return found


def cover_operand(graph: LocalGraph, edge_index: Tensor, value: Tensor) -> CoverOperand:
    """Makes the operand for edges and their values. The edges are in the graph's local numbers. Collective."""
    ranks, number = graph.ranks, graph.num_own
    source, target, value = *edge_index.cpu(), value.cpu()
    is_near = source < number
    near = Sparse.of(target[is_near], source[is_near], value[is_near], (number, number))
    source, target, value = graph.global_ids[source[~is_near]], target[~is_near], value[~is_near]
    owner = graph.owner(source)
    rows, totals = zip(*covers_of(graph, edge_index))  # from each rank
    asked = torch.cat(rows)
    keys = torch.cat([targets + rank * number for rank, targets in enumerate(totals)])
    by_row = torch.isin(source, asked)
    # Edges that other ranks add up, as (number of the sum, source), grouped by the rank that adds.
    order = (owner + ranks.size * by_row).argsort(stable=True)[: int((~by_row).sum())]
    sums = torch.searchsorted(keys, (owner * number + target)[order])
    first_sum = torch.tensor([0, *map(len, totals)], device="cpu").cumsum(0)
    ends = torch.stack([sums - first_sum[owner[order]], source[order]], 1)
    edges = torch.bincount(owner[order], minlength=ranks.size).tolist()
    route = Route.asking(ranks, asked, graph.offsets)
    theirs = ranks.gather_numbers("to cover edges between ranks", [*map(len, totals), *edges])
    sums_out, edges_out = ([numbers[at] for numbers in theirs] for at in (ranks.rank, ranks.size + ranks.rank))
    ends = ranks.comm.all_to_all(ends, edges, edges_out).wait()
    weights = ranks.comm.all_to_all(value[order], edges, edges_out).wait()
    shift = torch.repeat_interleave(
        torch.tensor([0, *sums_out], device="cpu").cumsum(0)[:-1], torch.tensor(edges_out, device="cpu")
    )
    shape = sum(sums_out), number
    made = Sparse.of(ends[:, 0] + shift, ends[:, 1] - graph.offsets[ranks.rank], weights, shape)
    row_places, sum_places = _in_turns(route.send_counts, sums_out)
    send = row_places.new_empty(row_places.numel() + shape[0])
    send[row_places], send[sum_places] = route.send.cpu(), torch.arange(shape[0], device="cpu") + number
    come = [a + len(b) for a, b in zip(route.recv_counts, totals, strict=True)]
    row_places, sum_places = _in_turns(route.recv_counts, [*map(len, totals)])
    far = Sparse.of(
        torch.cat([target[by_row], keys % number]),
        torch.cat([row_places[torch.searchsorted(asked, source[by_row])], sum_places]),
        torch.cat([value[by_row], value.new_ones(keys.numel())]),
        (number, sum(come)),
    )
    go = [a + b for a, b in zip(route.send_counts, sums_out, strict=True)]
    return CoverOperand(graph, near, made, far, Route(send, go, come))


def _in_turns(rows: Sequence[int], sums: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the places of rows, and those of sums, in a table that holds for each rank its ``rows`` rows and then its ``sums`` sums."""
    is_sum = torch.tensor([False, True] * len(rows), device="cpu")
    counts = torch.tensor([*zip(rows, sums, strict=True)], device="cpu").flatten()
    is_sum = torch.repeat_interleave(is_sum, counts)
    return (~is_sum).nonzero().flatten(), is_sum.nonzero().flatten()


def minimum_cover(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fewest left and right ends, ascending, that cover all edges. Edge i joins ``left[i]`` and ``right[i]``. Repeated edges count once."""
    lefts, u = left.unique(return_inverse=True)
    rights, v = right.unique(return_inverse=True)
    none = left[:0]
    if left.numel() > _EXACT:
        return (lefts, none) if lefts.numel() <= rights.numel() else (none, rights)
    neighbours: list[list[int]] = [[] for _ in range(lefts.numel())]
    for a, b in set(zip(u.tolist(), v.tolist())):
        neighbours[a].append(b)
    for each in neighbours:
        each.sort()
    # König: left ends that no alternating path from an unmatched left end reaches, and right ends that such a path reaches.
    level, mate = (
        torch.tensor(each, dtype=torch.int64, device="cpu") for each in _matching(neighbours, rights.numel())
    )
    return lefts[level < 0], rights[(mate >= 0) & (level[mate] >= 0)]


def _matching(neighbours: list[list[int]], num_right: int) -> tuple[list[int], list[int]]:
    """Finds a maximum matching (Hopcroft and Karp).

    Returns:
        For each left end, its distance from unmatched left ends along alternating paths, or -1 without such a path. For each right end, the left end that it
        is matched with, or -1.
    """
    left, right = [-1] * len(neighbours), [-1] * num_right
    while True:
        level = [0 if mate < 0 else -1 for mate in left]
        waiting = deque(a for a, depth in enumerate(level) if depth == 0)
        is_open = False
        while waiting:
            a = waiting.popleft()
            for b in neighbours[a]:
                mate = right[b]
                if mate < 0:
                    is_open = True
                elif level[mate] < 0:
                    level[mate] = level[a] + 1
                    waiting.append(mate)
        if not is_open:
            return level, right
        at = [0] * len(neighbours)
        for start, mate in enumerate(left):
            if mate >= 0:
                continue
            path = [start]
            while path:
                a = path[-1]
                if at[a] == len(neighbours[a]):
                    level[a] = -1
                    path.pop()
                    continue
                b = neighbours[a][at[a]]
                at[a] += 1
                mate = right[b]
                if mate < 0:
                    # Augment: each left end on the path takes the right end that it looked at last.
                    for each in path:
                        taken = neighbours[each][at[each] - 1]
                        left[each], right[taken] = taken, each
                    break
                if level[mate] == level[a] + 1:
                    path.append(mate)
