"""Does a rank send the row of a source, or the sum that a target gets from all of its sources?

Between two ranks either serves a linear aggregation: each edge that leads from one to the other is covered by its source, whose row is sent, or by its
target, for which the sender adds up the rows of the sources that are not sent. The fewest rows are a minimum vertex cover of these edges, as many as a
maximum matching has edges (König): never more than the halo.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Route
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.product import Sparse
from salientpp.ranks.partition_book import PartitionBook

#: Edges of a pair of ranks up to which a minimum cover is looked for; above, all sources or all targets are taken, whichever are fewer.
_EXACT = 500_000


@dataclass(frozen=True, eq=False)
class CoverOperand:
    """A rank's rows of a sparse matrix, the others' part of whose product comes as rows and as sums.

    Attributes:
        near: [n, n], of this rank's own rows.
        sums: [s, n], the sums that this rank makes for others.
        far: [n, r], of what arrives.
        route: brings rows of the table of own rows and sums.
    """

    graph: LocalGraph
    near: Sparse
    sums: Sparse
    far: Sparse
    route: Route

    def multiply(self, rows: Tensor) -> Tensor:
        """The product's rows [n, f] of this rank's rows [n, f], in the matrix's dtype. Collective."""
        flight = self.graph.ranks.start(torch.cat([rows, (self.sums @ rows).to(rows.dtype)]), self.route)
        near = self.near @ rows
        return near + self.far @ flight.rows()


#: Of each graph the last edges from other ranks, and their covers: a layout is chosen by them, and then made of them.
_found: WeakKeyDictionary[LocalGraph, tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]] = WeakKeyDictionary()


def covers_of(graph: LocalGraph, edge_index: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each rank, the rows and the sums that this rank is to get from it: sources (global ids) and targets (local numbers), ascending."""
    source, target = edge_index.cpu()
    is_far = source >= graph.num_own
    source, target = graph.global_ids[source[is_far]], target[is_far]
    if (known := _found.get(graph)) and torch.equal(known[0], source) and torch.equal(known[1], target):
        return known[2]
    owner = PartitionBook(torch.tensor(graph.offsets, device="cpu")).owner(source)
    found = [minimum_cover(source[owner == rank], target[owner == rank]) for rank in range(graph.ranks.size)]
    _found[graph] = source, target, found
    return found


def cover_operand(graph: LocalGraph, edge_index: Tensor, value: Tensor) -> CoverOperand:
    """The matrix of edges with values, in the graph's local numbers. Collective."""
    ranks, size, number = graph.ranks, graph.ranks.size, graph.num_own
    source, target, value = edge_index[0].cpu(), edge_index[1].cpu(), value.cpu()
    is_near = source < number
    near = Sparse.of(target[is_near], source[is_near], value[is_near], (number, number))
    source, target, value = graph.global_ids[source[~is_near]], target[~is_near], value[~is_near]
    owner = PartitionBook(torch.tensor(graph.offsets, device="cpu")).owner(source)
    asked: list[Tensor] = []  # global ids of the rows wanted of each rank
    ends: list[Tensor] = []  # (sum, source) of the edges that each rank adds up
    weights: list[Tensor] = []
    far: list[tuple[Tensor, Tensor, Tensor]] = []
    counts: list[int] = []  # rows and sums of each rank
    sums: list[int] = []
    first = 0
    for rank, (rows, totals) in enumerate(covers_of(graph, edge_index)):
        here = owner == rank
        u, v, w = source[here], target[here], value[here]
        by_row = torch.isin(u, rows)
        place = torch.searchsorted(rows, u[by_row]) + first
        far.append((v[by_row], place, w[by_row]))
        far.append(
            (totals, torch.arange(totals.numel(), device="cpu") + first + rows.numel(), w.new_ones(totals.numel()))
        )
        ends.append(torch.stack([torch.searchsorted(totals, v[~by_row]), u[~by_row]], 1))
        weights.append(w[~by_row])
        asked.append(rows)
        sums.append(totals.numel())
        counts.append(rows.numel() + totals.numel())
        first += counts[-1]
    wanted = [each.numel() for each in asked]
    edges = [each.size(0) for each in ends]
    theirs = ranks.gather_numbers("to cover edges between ranks", [*wanted, *sums, *edges])
    rank = ranks.rank
    rows_out, sums_out, edges_out = ([numbers[kind * size + rank] for numbers in theirs] for kind in range(3))
    begin = graph.offsets[rank]
    given = ranks.comm.all_to_all(torch.cat(asked), wanted, rows_out).wait() - begin
    given_ends = ranks.comm.all_to_all(torch.cat(ends), edges, edges_out).wait()
    given_weights = ranks.comm.all_to_all(torch.cat(weights), edges, edges_out).wait()
    base = torch.tensor([0, *sums_out], device="cpu").cumsum(0)
    shift = torch.repeat_interleave(base[:-1], torch.tensor(edges_out, device="cpu"))
    total = int(base[-1])
    made = Sparse.of(given_ends[:, 0] + shift, given_ends[:, 1] - begin, given_weights, (total, number))
    pieces = []
    for peer, rows in enumerate(given.split(rows_out)):
        pieces += [rows, torch.arange(int(base[peer]), int(base[peer + 1]), device="cpu") + number]
    route = Route(torch.cat(pieces), [a + b for a, b in zip(rows_out, sums_out, strict=True)], counts)
    row, column, weight = (torch.cat(columns) for columns in zip(*far))
    return CoverOperand(graph, near, made, Sparse.of(row, column, weight, (number, first)), route)


def minimum_cover(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest left and right ends, ascending, such that each edge has one of them; repeated edges count once."""
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
    mate_of_left, mate_of_right = _matching(neighbours, rights.numel())
    # König: from unmatched left ends along alternating paths.
    seen_left = [mate < 0 for mate in mate_of_left]
    seen_right = [False] * rights.numel()
    waiting = deque(a for a, seen in enumerate(seen_left) if seen)
    while waiting:
        for b in neighbours[waiting.popleft()]:
            if not seen_right[b]:
                seen_right[b] = True
                a = mate_of_right[b]
                if a >= 0 and not seen_left[a]:
                    seen_left[a] = True
                    waiting.append(a)
    return lefts[~torch.tensor(seen_left, dtype=torch.bool, device="cpu")], rights[
        torch.tensor(seen_right, dtype=torch.bool, device="cpu")
    ]


def _matching(neighbours: list[list[int]], num_right: int) -> tuple[list[int], list[int]]:
    """A maximum matching (Hopcroft and Karp): the mate of each end, -1 for none."""
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
            return left, right
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
                    # Turn the path round: each left end takes the right end that it has just looked at.
                    for each in path:
                        taken = neighbours[each][at[each] - 1]
                        left[each], right[taken] = taken, each
                    break
                if level[mate] == level[a] + 1:
                    path.append(mate)
