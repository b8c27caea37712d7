"""Vertex inclusion probabilities: the probability that a batch needs vertex v.

The vertex inclusion probability (VIP) of v for a part is the probability that a mini-batch of the part contains v after L hops
of neighbour sampling. The batch's seeds are drawn from the part's seed set T. VIP decides which remote rows a part
caches, in what order the part's own rows are kept on the device, and how vertices are numbered inside a part.

The source is Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152), Proposition 1. Let B be the batch size and
``p_0 = min(1, B / |T|)`` on T. At hop h

    p_h(u) = 1 - prod_{v lists u} (1 - t_h(v) x_{h-1}(v)),      t_h(v) = min(1, f_h / d(v)),

where d(v) is the in-degree of v, and t_h the probability that v, once expanded, draws one given neighbour (with
replacement ``1 - (1 - 1/d)^f``). A hop has two models:

* ``expand='hop'``, as in the paper: every vertex may be expanded at every hop. Then x = p, and the inclusion
  probability is ``1 - prod_{h>=1} (1 - p_h)``.
* ``expand='frontier'``, the default, as PyG's and our sampler work: hop h expands the vertices first found
  at hop h - 1. Then x = q with ``q_0 = p_0``, ``q_h(u) = p_h(u) (1 - sum_{j<h} q_j(u))``, and the inclusion
  probability is ``sum_{h>=1} q_h``.

At one hop, the formula only assumes that seeds are independent. This nearly holds, though a shuffled epoch draws seeds without
replacement. From two hops on, it assumes that events which share vertices are independent, and overestimates on most graphs. The
ranking of the vertices, which is all that a cache needs, stays near the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from salientpp import ops
from salientpp.arguments import as_integer, as_real
from salientpp.graph.csc import Graph
from salientpp.graph.relation import Relation
from salientpp.graph.typed import TypedGraph
from salientpp.ids import check_range
from salientpp.suggestions import suggest_arguments
from salientpp.vip.list_sums import ListSums

#: One set of seeds. Per vertex type: ``p_0`` float [N], or a function that :func:`uniform_start` or :func:`link_start` returned.
#: Types without seeds may be missing.
Start: TypeAlias = "Mapping[str | None, Callable[[int], Tensor] | Tensor]"

#: Numbers of seed sets that the kernel sweeps together. The second number is for graphs of more than ``_MANY_VERTICES`` vertices.
_SETS_AT_ONCE, _SETS_OF_MANY_VERTICES = 8, 4
_MANY_VERTICES = 2**25


def check_fanouts(fanouts: Sequence[int], *, may_be_empty: bool = False) -> list[int]:
    """Returns ``fanouts`` as a list of ints; ValueError if one is neither >= 0 nor -1 (all neighbours), or if the list is empty without ``may_be_empty``."""
    if isinstance(fanouts, (str, bytes)) or not isinstance(fanouts, Sequence):
        raise ValueError(f"num_neighbors must be a list of integers, one per hop, got {fanouts!r}")
    checked = []
    for hop, fanout in enumerate(fanouts):
        number = as_real(fanout)
        if number is None or not number.is_integer() or number < -1:
            raise ValueError(f"num_neighbors[{hop}] must be an integer >= 0, or -1 for all neighbours, got {fanout!r}")
        if number >= 2**31:
            raise ValueError(f"num_neighbors[{hop}] must be < 2^31, got {fanout!r}; -1 takes all neighbours")
        checked.append(int(number))
    if not checked and not may_be_empty:
        raise ValueError("num_neighbors must have one entry per hop, got an empty list")
    return checked


def check_batch_size(batch_size: int) -> int:
    """Returns ``batch_size`` as an int; ValueError unless it is an integer of at least 1 in 64 bits."""
    number = as_integer(batch_size)
    if number is None:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    if not 1 <= number < 2**63:
        raise ValueError(f"batch_size must be {'>= 1' if number < 1 else '< 2^63'}, got {number}")
    return number


@suggest_arguments
def inclusion_probability(
    graph: Graph | ListSums,
    seeds: Tensor | Sequence[Tensor],
    num_neighbors: Sequence[int],
    batch_size: int,
    *,
    include_seeds: bool = False,
    expand: str = "frontier",
    replace: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the vertex inclusion probabilities of one seed set or of several. Several sets share sweeps over the edges.

    Args:
        graph: N vertices; it may be directed. The sweep needs its transpose, which is made once. May be :class:`ListSums` of one type.
        seeds: int64 [T] global ids, or a list of K such tensors; an empty tensor gives zeros.
        num_neighbors: fanouts, nearest the seeds first; -1 takes all neighbours.
        batch_size: seeds per batch.
        include_seeds: a vertex that is a seed counts as included too. The order of a part's own rows on a device needs this. A cache
            plan does not, since remote vertices are never seeds.
        expand: 'frontier': a hop expands the vertices first found at the hop before, as in this package's sampler. 'hop': a hop may expand every
            vertex, as in the paper.
        replace: neighbours are drawn with replacement.
        out: float32 [K, N], such as a mapped file, to hold the result of a list of seed sets. Then only the sets of one sweep are in memory at a time.

    Returns:
        float32 [N], or [K, N] for a list of seed sets; small values keep their relative precision.

    Raises:
        ValueError: a seed is out of range, a fanout is below -1, ``batch_size`` < 1, or ``expand`` is unknown.
    """
    if expand not in ("frontier", "hop"):
        raise ValueError(f"expand must be 'frontier' or 'hop', got {expand!r}")
    batch_size = check_batch_size(batch_size)
    fanouts = check_fanouts(num_neighbors)
    seed_sets: list[Tensor] = list(seeds) if isinstance(seeds, (list, tuple)) else [seeds]  # type: ignore[list-item]  # checked below
    for k, seed_set in enumerate(seed_sets):
        if not isinstance(seed_set, Tensor) or seed_set.device.type != "cpu" or seed_set.layout != torch.strided:
            got = f"{seed_set.layout} on {seed_set.device}" if isinstance(seed_set, Tensor) else type(seed_set).__name__
            raise ValueError(f"seeds must be a dense CPU tensor or a list of such, got {got} in seed set {k}")
        if seed_set.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"seeds must be integer ids, got {seed_set.dtype} in seed set {k}; for a mask, pass mask.nonzero()"
            )
    ids = [seed_set.to(torch.int64).flatten() for seed_set in seed_sets]
    num_vertices = graph.num_vertices[0] if isinstance(graph, ListSums) else graph.num_vertices
    for k, seed_set in enumerate(ids):
        check_range(seed_set, num_vertices, "seeds must be", f" of seed set {k}")

    def sweep(some: Sequence[Tensor]) -> Tensor:
        draws: dict[str, Any] = {"include_seeds": include_seeds, "replace": replace}
        if isinstance(graph, ListSums):
            starts = [uniform_starts({None: seed_set}, batch_size) for seed_set in some]
            found = typed_inclusion_probabilities(graph, starts, [fanouts], expand=expand, **draws)
            return torch.stack([of_set[None] for of_set in found])
        transposed = graph.transpose()
        return ops.inclusion_probability(
            graph.indptr,
            transposed.indptr,
            transposed.indices,
            torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *some]),
            torch.tensor([0, *(seed_set.numel() for seed_set in some)], device="cpu").cumsum(0),
            fanouts,
            batch_size,
            frontier=expand == "frontier",
            **draws,
        )

    if out is not None:
        step = _SETS_OF_MANY_VERTICES if num_vertices > _MANY_VERTICES else _SETS_AT_ONCE
        for first in range(0, len(ids), step):
            some = ids[first : first + step]
            out[first : first + len(some)] = sweep(some)
        return out
    return sweep(ids)[0] if isinstance(seeds, Tensor) else sweep(ids)


# --- several vertex types, weights, seeds of other kinds ----------------------------------------------


def uniform_start(seeds: Tensor, batch_size: int) -> Callable[[int], Tensor]:
    """Returns ``p_0``, the probability that a batch has each vertex among its seeds, if ``batch_size`` of ``seeds`` are drawn uniformly.

    ``p_0`` is a function from the number of vertices to float64 [N].
    """
    return uniform_starts({None: seeds}, batch_size)[None]


def uniform_starts(seeds: Mapping[str | None, Tensor], batch_size: int) -> dict[str | None, Callable[[int], Tensor]]:
    """Returns a function as :func:`uniform_start` for each vertex type. Batches draw uniformly from the seeds of all types together."""
    share = min(1.0, batch_size / max(1, sum(ids.numel() for ids in seeds.values())))

    def start(ids: Tensor, num_vertices: int) -> Tensor:
        probability = torch.zeros(num_vertices, dtype=torch.float64, device="cpu")
        probability[ids] = share
        return probability

    return {type_: partial(start, ids) for type_, ids in seeds.items()}


def link_start(
    ends: Tensor, batch_size: int, negatives_per_batch: int = 0, weight: Tensor | None = None
) -> Callable[[int], Tensor]:
    """Returns ``p_0``, as :func:`uniform_start` does, for batches of ``batch_size`` edges with random negative examples.

    The ends of the edges are the seeds. A vertex that is the end of c of the M edges is a seed with probability
    ``1 - (1 - B/M)^c``. Each negative example is vertex v with probability ``w(v) / sum w``.

    Args:
        ends: int64 [M], the sources of the edges, or their targets.
        negatives_per_batch: number of negative examples that a batch has on this side of the edges.
        weight: [N], relative frequency of each vertex as a negative example; None: uniform.
    """

    def start(num_vertices: int) -> Tensor:
        count = torch.bincount(ends, minlength=num_vertices).to(torch.float64)
        share = min(1.0, batch_size / max(1, ends.numel()))
        absent = torch.pow(torch.tensor(1.0 - share, dtype=torch.float64, device="cpu"), count)
        if negatives_per_batch:
            chance = torch.full_like(absent, 1.0 / num_vertices) if weight is None else weight.double() / weight.sum()
            absent = absent * (1.0 - chance) ** negatives_per_batch
        return 1.0 - absent

    return start


def draw_probability(relation: Relation, fanout: int, replace: bool) -> Tensor:
    """Returns ``t``: for every edge of a relation, in list order, the probability that its target, once expanded, draws its source.

    Uniform draws have ``min(1, f / d)``, or ``1 - (1 - 1/d)^f`` with replacement. Weighted draws with replacement have
    ``1 - (1 - w/W)^f``. For weighted draws without replacement the value is exact for f = 1, ``w / W``, and for f >= d. Other fanouts have
    ``1 - exp(-λ w)`` with λ such that the sum over a list is f. This is the asymptotic inclusion probability of successive sampling
    (Rosén, Journal of Statistical Planning and Inference 62, 1997).

    Returns:
        float64 [E].
    """
    degree = relation.indptr.diff()
    if relation.edge_weight is None or fanout <= 0:
        return torch.repeat_interleave(uniform_draw_probability(degree, fanout, replace), degree)
    size = torch.repeat_interleave(degree, degree).to(torch.float64)
    target = torch.repeat_interleave(torch.arange(degree.numel(), device="cpu"), degree)

    def list_sum(values: Tensor) -> Tensor:
        return torch.zeros(degree.numel(), dtype=torch.float64, device="cpu").index_add_(0, target, values)

    # A list with only zero weights counts as a list of ones, as in the sampler.
    weight = relation.edge_weight.to(torch.float64)
    weight = torch.where(list_sum(weight)[target] > 0, weight, 1.0)
    share = weight / list_sum(weight)[target]
    if replace:
        return 1.0 - (1.0 - share) ** fanout
    positive = list_sum((share > 0).to(torch.float64))
    wanted = positive.clamp(max=float(fanout))
    rate = wanted.clone()  # Newton's method from below: the sum is concave in the rate, so no step overshoots
    for _ in range(100):
        absent = torch.exp(-rate[target] * share)
        missing = wanted - list_sum(1.0 - absent)
        solve = (positive > fanout) & (missing > 1e-9)
        if not bool(solve.any()):
            break
        rate = torch.where(solve, rate + missing / list_sum(share * absent).clamp(min=1e-300), rate)
    probability = share if fanout == 1 else 1.0 - torch.exp(-rate[target] * share)
    all_positive = positive[target] <= fanout
    # If fewer positive entries than the fanout exist, entries without weight share the remaining draws.
    left = ((fanout - positive)[target] / (size - positive[target]).clamp(min=1.0)).clamp(0.0, 1.0)
    return torch.where(share > 0, torch.where(all_positive, 1.0, probability), torch.where(all_positive, left, 0.0))


def uniform_draw_probability(degree: Tensor, fanout: int, replace: bool) -> Tensor:
    """Returns the probability that a vertex of each degree, once expanded, draws one given neighbour, float64 [N]."""
    size = degree.to(torch.float64, copy=True).clamp_(min=1)
    if fanout <= 0:
        return torch.full_like(size, -fanout)  # 0 or -1: no neighbours or all of them
    return 1.0 - (1.0 - 1.0 / size) ** fanout if replace else (fanout / size).clamp_(max=1.0)


class TypedHops:
    """Computes the probability that a hop draws each vertex, from the probabilities that it expands each. One object serves all sets of seeds."""

    def __init__(self, graph: TypedGraph | ListSums, fanouts: Sequence[Sequence[int]], replace: bool) -> None:
        self.lists = ListSums.of(graph)
        self.num_hops = len(fanouts[0]) if fanouts else 0
        self._fanouts, self._replace = fanouts, replace
        self._of_edges = {
            place: [draw_probability(piece.relation, fanout, replace) for fanout in fanouts[piece.number]]
            for place, piece in enumerate(self.lists.pieces)
            if piece.has_weights
        }

    def _chance(self, hop: int, place: int) -> Tensor:
        if place in self._of_edges:
            return self._of_edges[place][hop]
        piece = self.lists.pieces[place]
        # Not kept, because it takes 8 bytes for each list and hop.
        return uniform_draw_probability(piece.degree, self._fanouts[piece.number][hop], self._replace)

    def draws(self, hop: int, place: int, expanded: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two probabilities for the edges of a piece: per list, float64 [n], or if edges have weights, per edge, [e].

        The first: a target, once expanded, draws an edge. The second: the hop expands the target, and draws the edge.

        Args:
            place: position of the piece in ``lists.pieces``.
            expanded: the probability [n] that the hop expands each target of the piece.
        """
        chance = self._chance(hop, place)
        return chance, chance * self.lists.pieces[place].spread(expanded)

    def reach(self, hop: int, expanded: Sequence[Tensor]) -> list[Tensor]:
        """Returns the probability that a hop draws each vertex, per type float64 [N].

        ``expanded``: the probability that it expands each vertex.
        """

        def log_none(place: int, of_targets: Tensor) -> Tensor:
            return self.draws(hop, place, of_targets)[1].clamp_(max=1.0).neg_().log1p_()

        return [none.expm1_().neg_() for none in self.lists.to_sources(expanded, log_none)]


def typed_inclusion_probability(
    graph: TypedGraph | ListSums, start: Start, fanouts: Sequence[Sequence[int]], **options: Any
) -> dict[str | None, Tensor]:
    """Computes :func:`typed_inclusion_probabilities` of one set of seeds."""
    return typed_inclusion_probabilities(graph, [start], fanouts, **options)[0]


def typed_inclusion_probabilities(
    graph: TypedGraph | ListSums,
    starts: Sequence[Start],
    fanouts: Sequence[Sequence[int]],
    *,
    include_seeds: bool = False,
    expand: str = "frontier",
    replace: bool = False,
) -> list[dict[str | None, Tensor]]:
    """Computes vertex inclusion probabilities over several vertex types.

    For a vertex u, the product in the module's formula runs over the edges of all relations that can draw u. The model leaves out times and disjoint
    trees. It counts neighbours that a tree may not see because of their time, and lets trees share vertices. For one type without weights,
    :func:`inclusion_probability` is faster.

    Args:
        starts: the sets of seeds. The graph is prepared once for all.
        fanouts: one list per relation of the graph, with one entry per hop.
        include_seeds, expand, replace: as in :func:`inclusion_probability`.

    Returns:
        For each set of seeds, per vertex type, float32 [N].
    """
    if expand not in ("frontier", "hop"):
        raise ValueError(f"expand must be 'frontier' or 'hop', got {expand!r}")
    hops = TypedHops(graph, fanouts, replace)
    return [_probabilities(graph, hops, start_of_types(graph, start), include_seeds, expand) for start in starts]


def _probabilities(
    graph: TypedGraph | ListSums, hops: TypedHops, expanded: list[Tensor], include_seeds: bool, expand: str
) -> dict[str | None, Tensor]:
    """Computes :func:`typed_inclusion_probabilities` of one set of seeds, whose ``p_0`` is ``expanded``.

    It frees arrays as soon as they are not read any more, because each takes 8 bytes for every vertex.
    """
    first = list(expanded) if include_seeds else None
    reached = list(expanded)  # sum of q
    included: list[Tensor] | None = None
    for hop in range(hops.num_hops):
        expanded = hops.reach(hop, expanded)
        if expand == "frontier":
            expanded = [p.mul_((1.0 - sum_q).clamp_(min=0.0)) for p, sum_q in zip(expanded, reached)]
            reached = [sum_q + q for sum_q, q in zip(reached, expanded)]
        if included is None:
            included = list(expanded)
        elif expand == "frontier":
            included = [before + q for before, q in zip(included, expanded)]
        else:
            included = [before + p - before * p for before, p in zip(included, expanded)]
    if included is None:
        included = [torch.zeros_like(p_0) for p_0 in expanded]
    if first is not None:
        either = [p_0 + p for p_0, p in zip(first, included)]
        included = either if expand == "frontier" else [p - p_0 * q for p, p_0, q in zip(either, first, included)]
    # 0 is added, because a vertex out of reach has the probability -0.0.
    return {name: p.clamp(max=1.0).add_(0.0).to(torch.float32) for name, p in zip(graph.node_types, included)}


def start_of_types(graph: TypedGraph | ListSums, start: Start) -> list[Tensor]:
    """Returns the ``p_0`` in ``start`` as a tensor for every vertex type, float64 [N]; zeros for types without seeds."""
    first = []
    for name, size in zip(graph.node_types, graph.num_vertices):
        given = start.get(name, torch.zeros(size, dtype=torch.float64, device="cpu"))
        p_0 = given(size) if callable(given) else given.to(torch.float64)
        if p_0.shape != (size,):
            raise ValueError(f"start of {name!r} must have shape [{size}], got {list(p_0.shape)}")
        first.append(p_0)
    return first


def typed_traffic(
    graph: TypedGraph,
    start: Start,
    fanouts: Sequence[Sequence[int]],
    row_bytes: Mapping[str | None, int],
) -> list[Tensor]:
    """Computes the bytes that a step is expected to receive through each edge: per relation float64 [E].

    An edge u -> v that hop h draws brings the row of u, and the rows of everything that is then drawn from u. With ``b(u)`` the bytes of a row,

        ``sum_h t_h(u, v) q_{h-1}(v) (b(u) + B_h(u))``,      ``B_h(u) = sum_{w in u's lists} t_{h+1}(w, u) (b(w) + B_{h+1}(w))``,

    where ``B_h`` counts every drawn vertex as if the batch did not have it yet, and is 0 after the last hop. ``B_h`` matters for types without rows:
    without it, a partitioner would separate vertices that are linked through them.

    Args:
        start, fanouts: as in :func:`typed_inclusion_probabilities`.
        row_bytes: per vertex type; 0 if the type has no rows, or if every rank has them.
    """
    first = start_of_types(graph, start)
    hops = TypedHops(graph, fanouts, False)
    expanded, reached = [list(first)], list(first)  # q of each hop, and their sum
    for hop in range(hops.num_hops - 1):
        p = hops.reach(hop, expanded[-1])
        expanded.append([chance * (1.0 - sum_q).clamp(min=0.0) for chance, sum_q in zip(p, reached)])
        reached = [sum_q + q for sum_q, q in zip(reached, expanded[-1])]
    traffic = [torch.zeros(relation.indices.numel(), dtype=torch.float64, device="cpu") for relation in graph.relations]
    below = [torch.zeros_like(p_0) for p_0 in first]
    for hop in reversed(range(hops.num_hops)):
        worth = [more + row_bytes[name] for name, more in zip(graph.node_types, below)]
        below = [torch.zeros_like(p_0) for p_0 in first]
        for number, relation in enumerate(graph.relations):
            chance, draws = hops.draws(hop, number, expanded[hop][relation.target])
            degree, brings = relation.indptr.diff(), worth[relation.source]
            if relation.edge_weight is None:
                draws = torch.repeat_interleave(draws, degree)
                below[relation.target] += chance * ops.sum_over_lists(relation.indptr, relation.indices, brings)
            else:
                target = torch.repeat_interleave(torch.arange(degree.numel(), device="cpu"), degree)
                below[relation.target].index_add_(0, target, chance * brings[relation.indices])
            traffic[number] += draws * brings[relation.indices]
    return traffic


def add_seeds(probability: Tensor, seeds: Tensor, batch_size: int) -> Tensor:
    """Converts a ``probability`` float [N] that was computed without ``include_seeds`` into the one with it, without another sweep.

    ``seeds`` int64 [T] are positions in ``probability``.
    """
    with_seeds = probability.clone()
    if seeds.numel():
        with_seeds[seeds] = (with_seeds[seeds] + min(1.0, batch_size / seeds.numel())).clamp(max=1.0)
    return with_seeds


def expected_draws(
    graph: Graph, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, *, replace: bool = False
) -> Tensor:
    """Computes how often a batch is expected to draw each edge into v: ``w(v) = sum_h t_h(v) q_{h-1}(v)``, with the frontier probabilities above.

    Args:
        seeds, num_neighbors, batch_size, replace: as in :func:`inclusion_probability`.

    Returns:
        float64 [N]. All edges into a vertex have the same value.
    """
    fanouts = check_fanouts(num_neighbors)
    reached = torch.zeros(graph.num_vertices, dtype=torch.float64, device="cpu")  # sum of q_j over j < hop
    draws = torch.zeros_like(reached)
    for hop, fanout in enumerate(fanouts):
        if hop == 0:
            until = uniform_start(seeds, batch_size)(graph.num_vertices)
        else:
            options: dict[str, Any] = {"include_seeds": True, "replace": replace}
            until = inclusion_probability(graph, seeds, fanouts[:hop], batch_size, **options).double()
        draws += uniform_draw_probability(graph.in_degree(), fanout, replace) * (until - reached).clamp(min=0.0)
        reached = until
    return draws


def draw_weights(
    graph: Graph, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, *, mean: float = 10.0, most: int = 1000
) -> Tensor:
    """Returns edge weights for a partitioner, in proportion to :func:`expected_draws`. ``batch_size`` is the sum over all ranks.

    Every cut edge that is drawn may move a row, so heavy edges should not be cut.

    Args:
        mean, most: see :func:`edge_weights_of`.

    Returns:
        int64 [N], for each vertex the weight of the edges into it.
    """
    return edge_weights_of(graph, expected_draws(graph, seeds, num_neighbors, batch_size), mean=mean, most=most)


def edge_weights_of(graph: Graph, draws: Tensor, *, mean: float = 10.0, most: int = 1000) -> Tensor:
    """Returns integer edge weights for a partitioner, in proportion to ``draws`` float64 [N], the value of each edge into a vertex.

    Args:
        mean, most: weights are scaled to this mean over the edges, rounded and clamped to [1, most], since partitioners take integers.

    Returns:
        int64 [N].
    """
    average = (draws @ graph.in_degree().double()) / max(1, graph.num_edges)
    return (draws * (mean / average.clamp(min=1e-30))).round().clamp(1, most).to(torch.int64)
