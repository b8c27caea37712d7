"""Moves vertices to other parts so that fewer rows travel.

A partitioner minimises a cut. The rows that an epoch fetches are, over the parts k,

    rows = sum_k n_k sum_{v not in k} p_k(v),        n_k = max(1, |T_k| / B)   (0 without seeds),

with p_k the inclusion probabilities of part k's batches (:mod:`salientpp.vip.inclusion`), T_k its seeds and B the batch size. Given an assignment, a
vertex v in part k changes this sum to first order by

    cost(k, v) = -n_k p_k(v)                                                              its row is local there, and
               + g_k(v) + [|T_k| >= B] (f_k / B - mean of g_k over T_k)   for a seed:     the rows that its own sampling fetches.

Here f_k is the inner sum, and g_k its gradient by p_0(v), the probability that v is a seed. The gradient is the recurrence of the probabilities
differentiated backwards, hop by hop; it takes about as long as the probabilities. Moves that lower the cost are made within the limits of the partition,
largest gain first (kernel ``reassign_parts``). A pass makes only few moves, since a cost is valid only as long as the other vertices stay. Then all costs are
computed again. If a pass does not lower the sum, it is undone, and the next pass moves fewer vertices.

A full part takes a vertex only in exchange for another. These swaps are like those of Kernighan and Lin (Bell System Technical Journal 49, 1970), but they
lower the rows instead of the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph

#: Number of passes, and the share of the vertices that the first pass may move. On two real graphs, further passes together gained less than 1 %.
_ROUNDS = 20
_FIRST_SHARE = 0.05
#: Refinement stops after a pass that gains less than this share of the rows.
_LEAST_GAIN = 5e-4

#: Probabilities p are capped at this number before a division by 1 - p.
_ALMOST = 1.0 - 1e-6

#: Number of parts whose probabilities are computed together. It bounds memory, and each pass over the edges serves several parts.
_COLUMNS = 4


def refine_by_vip(
    graph: Graph,
    assignment: Tensor,
    num_parts: int,
    *,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    batch_size: int,
    weights: Tensor,
    limits: Tensor,
) -> Tensor:
    """Moves vertices between parts so that fewer rows are predicted to travel.

    Args:
        graph: N vertices. Its transpose is made and kept.
        assignment: int64 [N], parts in [0, K).
        seeds: int64 ids that batches start from; part k has the seeds among its vertices.
        weights: int64 [N, C], what each vertex adds to the loads of its part.
        limits: int64 [C]. No load rises above its limit, and a load above its limit does not rise.

    Returns:
        int64 [N], the new parts, with at most as many predicted rows as ``assignment``. The same arguments give the same result.
    """
    hops = _Hops(graph, num_neighbors)
    best, (fewest, cost) = assignment, hops.costs(assignment, num_parts, seeds, batch_size)
    share = _FIRST_SHARE
    for _ in range(_ROUNDS):
        moved = ops.reassign_parts(cost, best, weights, limits, int(share * graph.num_vertices))
        if torch.equal(moved, best):
            break
        rows, next_cost = hops.costs(moved, num_parts, seeds, batch_size)
        if rows < fewest:
            gain = 1 - rows / fewest
            best, fewest, cost = moved, rows, next_cost
            if gain < _LEAST_GAIN:
                break
        else:
            share /= 2
    return best


class _Hops:
    """Computes the predicted rows of an assignment and the costs of all moves, by the module's formulas. One object serves all passes."""

    def __init__(self, graph: Graph, fanouts: Sequence[int]) -> None:
        self.graph, self.transposed, self.fanouts = graph, graph.transpose(), fanouts
        self.degree = graph.in_degree().clamp_(min=1).to(torch.float32)[:, None]

    def costs(self, assignment: Tensor, num_parts: int, seeds: Tensor, batch_size: int) -> tuple[float, Tensor]:
        """Returns the predicted rows of an epoch, and the cost of every vertex in every part, float32 [K, N]."""
        cost = torch.empty((num_parts, self.graph.num_vertices), dtype=torch.float32, device="cpu")
        part_of_seed, total = assignment[seeds], 0.0
        for first in range(0, num_parts, _COLUMNS):
            parts = range(first, min(first + _COLUMNS, num_parts))
            own = [seeds[part_of_seed == part] for part in parts]
            remote = assignment[:, None] != torch.arange(parts.start, parts.stop, device="cpu")
            included, gradient = self._differentiate(own, remote, batch_size)
            for column, (part, ids) in enumerate(zip(parts, own)):
                times = max(1.0, ids.numel() / batch_size) if ids.numel() else 0.0
                rows = float(included[:, column][remote[:, column]].sum(dtype=torch.float64))
                total += times * rows
                torch.mul(included[:, column], -times, out=cost[part])
                worth = gradient[seeds, column]
                if ids.numel() >= batch_size:
                    worth += rows / batch_size - float(gradient[ids, column].mean(dtype=torch.float64))
                cost[part].index_add_(0, seeds, worth)
        return total, cost

    def _differentiate(self, own: Sequence[Tensor], remote: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """Returns, for W parts, the inclusion probabilities, and the gradient of their sum over the remote vertices by p_0, both float32 [N, W].

        ``A`` sums over neighbour lists, and ``t_h``, ``p_h`` and ``q_h`` are as in :mod:`salientpp.vip.inclusion`.
        Forwards, with R_h the sum of q_0 to q_h: ``s_h = A^T log(1 - t_h q_{h-1})``, ``p_h = 1 - exp(s_h)``, ``q_h = p_h (1 - R_{h-1})``. Backwards, with
        a_h the derivative by q_h and m = [remote]: ``a_h = m [h > 0] - sum_{j>h} a_j p_j + t_{h+1} / (1 - t_{h+1} q_h) A ((1 - p_{h+1}) (1 - R_h) a_{h+1})``.
        """
        num_vertices, num_hops = self.graph.num_vertices, len(self.fanouts)
        q = torch.zeros((num_vertices, len(own)), dtype=torch.float32, device="cpu")
        for column, ids in enumerate(own):
            if ids.numel():
                q[ids, column] = min(1.0, batch_size / ids.numel())
        start, reached, reach = q, q.clone(), []
        for hop in range(num_hops):
            none = (self._chance(hop) * q).clamp_(max=_ALMOST).neg_().log1p_()
            none = ops.sum_over_lists(self.transposed.indptr, self.transposed.indices, none)
            p = none.expm1_().neg_()
            reach.append(p)
            q = p * (1.0 - reached).clamp_(min=0.0)
            reached += q
        included = reached.sub_(start)
        wanted = remote.to(torch.float32)
        by_later, by_draws = torch.zeros_like(start), torch.zeros_like(start)  # the two sums in a_h
        for hop in reversed(range(num_hops)):
            a = wanted - by_later + by_draws
            p = reach.pop()
            by_later += a * p
            a *= (1.0 - p) * _not_yet(start, reach)
            by_draws = ops.sum_over_lists(self.graph.indptr, self.graph.indices, a)
            q = reach[-1] * _not_yet(start, reach[:-1]) if reach else start
            chance = self._chance(hop)
            by_draws *= chance / (1.0 - (chance * q).clamp_(max=_ALMOST))
        return included, by_draws - by_later

    def _chance(self, hop: int) -> Tensor:
        """Returns the probability that a vertex, once expanded, draws one given neighbour, float32 [N, 1]."""
        fanout = self.fanouts[hop]
        return torch.ones_like(self.degree) if fanout < 0 else (fanout / self.degree).clamp_(max=1.0)


def _not_yet(start: Tensor, reach: Sequence[Tensor]) -> Tensor:
    """Returns 1 - R_h, the probability that a vertex is neither a seed nor found in the first h hops: ``(1 - p_0) (1 - p_1) ... (1 - p_h)``.

    ``start`` is p_0, and ``reach`` is [p_1, ..., p_h].
    """
    left = 1.0 - start
    for p in reach:
        left *= 1.0 - p
    return left
