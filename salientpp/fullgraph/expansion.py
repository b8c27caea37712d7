"""Choice of the vertices of other hosts that a host preloads for full-graph training.

A host starts from its inner vertices, those of its ranks. In each round, every frontier vertex picks in-neighbours that are not inner vertices: all of them, or
at most ``fanout`` with the highest score. The first frontier are the inner vertices, each later one are the vertices that the round before picked for the
first time. The picks of a vertex depend on the vertex and the host only. So the vertices of a host with fewer rounds or a lower fanout are a subset.

The source is GraNNDis (Song et al., PACT 2024, arXiv:2311.06837), which calls this shared preloading, and with a fanout expansion-aware sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.arguments import as_integer
from salientpp.fullgraph.exchange import Ranks
from salientpp.fullgraph.local import LocalGraph
from salientpp.graph.csc import Graph
from salientpp.graph.part import PartGraph, PartLists
from salientpp.graph.relation import Relation
from salientpp.ranks.placement import runs
from salientpp.store.rows import take_rows
from salientpp.store.target_lists import Edges
from salientpp.vip.divided import DividedListSums
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.list_sums import ListSums

#: Number of hops of the score 'vip'. It does not depend on ``Preload.hops``, so that the vertices of fewer hops are a subset.
_VIP_HOPS = 3


@dataclass(frozen=True)
class Preload:
    """Vertices of other hosts that a host keeps for full-graph training, see :func:`salientpp.fullgraph.local`.

    Attributes:
        hops: number of rounds in which vertices pick in-neighbours, at least 0. Training is exact if ``fanout`` is None and ``hops`` is at least the number
            of layers.
        fanout: largest number of in-neighbours that a vertex picks, at least 1; None: all in-neighbours that are not the host's.
        rank_by: score by which a vertex chooses ``fanout`` in-neighbours. 'vip': the probability that random walks from the host's training vertices visit the
            neighbour (:func:`vip_scores`). 'degree': the number of edges into the neighbour. 'uniform': random numbers.
        seed: seed of 'uniform', and of the division of a host's graph among its ranks.

    Raises:
        ValueError: a value is out of range.
    """

    hops: int
    fanout: int | None = None
    rank_by: str = "vip"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("hops", 0), ("fanout", 1), ("seed", 0)):
            value = getattr(self, name)
            number = as_integer(value)
            if (number is None or number < lowest) and not (name == "fanout" and value is None):
                more = ", or None for all in-neighbours" if name == "fanout" else ""
                raise ValueError(f"{name} of Preload must be an integer >= {lowest}{more}, got {value!r}")
        if self.rank_by not in RANKINGS:
            raise ValueError(
                f"rank_by of Preload must be one of {', '.join(map(repr, RANKINGS))}, got {self.rank_by!r}"
            )


@dataclass(frozen=True, eq=False)
class Expansion:
    """The vertices that a host keeps, and the neighbour lists of them that this rank has read.

    Attributes:
        inner: the ids of the host's inner vertices.
        picked: int64 [p], ids of the picked vertices of other hosts, ascending.
        reads: pairs of vertices int64 [m] and all edges into them. Each vertex of the host is in the pairs of one rank.
    """

    inner: range
    picked: Tensor
    reads: list[tuple[Tensor, Edges]]


def expanded(whole: LocalGraph, host: Ranks, inner: range, preload: Preload) -> Expansion:
    """Picks the vertices that a host keeps. Collective over all ranks of the job.

    Args:
        whole: this rank's part of the graph, over all ranks of the job.
        host: the ranks of this rank's host.
        inner: the ids of the host's inner vertices.
    """
    score = None if preload.fanout is None else RANKINGS[preload.rank_by](whole, host, inner, preload)
    reads = [(whole.n_id, whole.lists.into(whole.n_id))]
    picked = whole.n_id[:0]
    for _ in range(preload.hops):
        found = gathered(host, picks(reads[-1][1], inner, score, preload.fanout)).unique()
        found = found[~torch.isin(found, picked)]
        picked = torch.cat([picked, found])
        bounds = runs(found.numel(), host.size)[host.rank : host.rank + 2]
        mine = found[slice(*bounds)]  # the ranks of the host divide the frontier
        reads.append((mine, whole.others.into(mine, with_rows=True)))
    return Expansion(inner, picked.sort().values, reads)


def picks(edges: Edges, inner: range, score: Tensor | None, fanout: int | None) -> Tensor:
    """Returns the ids of the vertices outside ``inner`` that the targets of some edges pick, int64, with repetitions.

    Args:
        score: [N]; a target picks the sources with the highest score, and of equal ones those with the lowest id. None: it picks all.
    """
    is_outside = (edges.source < inner.start) | (edges.source >= inner.stop)
    source, target = edges.source[is_outside], edges.target[is_outside]
    if score is None or fanout is None:
        return source.unique()
    number = score.numel()
    pairs = (target * number + source).unique()  # a repeated edge counts once; ascending by target, then by source
    target, source = pairs // number, pairs % number
    order = score[source].argsort(descending=True, stable=True)
    order = order[target[order].argsort(stable=True)]
    counts = torch.bincount(target)
    place = torch.arange(target.numel(), device="cpu") - (counts.cumsum(0) - counts)[target[order]]
    return source[order][place < fanout]


def gathered(ranks: Ranks, values: Tensor) -> Tensor:
    """Returns the ``values`` [n] of all ranks, rank after rank. Collective; n may differ."""
    counts = [number for (number,) in ranks.gather_numbers("to gather values", [values.numel()])]
    return ranks.comm.all_to_all(values.repeat(ranks.size), [values.numel()] * ranks.size, counts).wait()


# --- scores -----------------------------------------------------------------------------------------------


def vip_scores(whole: LocalGraph, host: Ranks, inner: range, preload: Preload) -> Tensor:
    """Returns the inclusion probabilities of all vertices for the training vertices of a host, float32 [N]. Collective.

    This is the formula of :mod:`salientpp.vip.inclusion` with ``expand='hop'``. Every training vertex of the host is a seed, and each vertex draws one
    in-neighbour per hop. So v draws a given in-neighbour with probability 1 / d(v), which is the weight of this neighbour in the mean over the
    in-neighbours of v. If vertices drew all in-neighbours, every vertex within the hops would have the probability 1. There are three hops.
    A host without training vertices uses its inner vertices as seeds.
    """
    own = whole.splits.get("train", whole.n_id[:0]) + whole.offsets[whole.ranks.rank]
    seeds = gathered(host, own)
    if not seeds.numel():
        seeds = torch.arange(inner.start, inner.stop, device="cpu")
    return inclusion_probability(_list_sums(whole), seeds, [1] * _VIP_HOPS, max(1, seeds.numel()), expand="hop")


def _list_sums(whole: LocalGraph) -> ListSums:
    lists = whole.lists
    indices = take_rows(lists.indices, torch.arange(int(lists.indptr[-1]), device="cpu"))
    if lists.is_whole:
        return ListSums.of(Graph(lists.indptr, indices))
    piece = PartLists(Relation(0, 0, lists.indptr, indices), lists.first_target, lists.first_edge)
    part = PartGraph((None,), (whole.num_vertices,), (None,), ((piece,),), (None,))
    return DividedListSums(whole.ranks.comm, part)


def degree_scores(whole: LocalGraph, host: Ranks, inner: range, preload: Preload) -> Tensor:
    """Returns the number of edges into each vertex of the whole graph, int64 [N]. Collective."""
    return gathered(whole.ranks, whole.lists.degrees(whole.n_id))


def uniform_scores(whole: LocalGraph, host: Ranks, inner: range, preload: Preload) -> Tensor:
    """Returns random numbers float64 [N], equal on all ranks. They depend on the seed and the vertex only, and not on the hosts."""
    draw = torch.Generator(device="cpu").manual_seed(preload.seed)
    return torch.rand(whole.num_vertices, generator=draw, dtype=torch.float64, device="cpu")


#: Scores by name: functions of the part, the ranks of the host, the ids of its inner vertices and the :class:`Preload`. They are collective over the job.
RANKINGS: Mapping[str, Callable[[LocalGraph, Ranks, range, Preload], Tensor]] = {
    "vip": vip_scores,
    "degree": degree_scores,
    "uniform": uniform_scores,
}
