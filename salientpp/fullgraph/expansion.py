"""Chooses the vertices of other hosts that a host preloads for full-graph training.

A host starts from its inner vertices, which its ranks own. The choice takes several rounds. In each round, every vertex of a set, the frontier, picks
in-neighbours that are not inner vertices: all of them, or at most ``fanout`` random ones. The first frontier has the inner vertices. Each later one has the
vertices that were picked for the first time in the round before. The picks of a vertex depend on the vertex and the host only. So fewer rounds or a lower
fanout give a subset of the vertices.

The source is GraNNDis (Song et al., PACT 2024, arXiv:2311.06837), which calls this shared preloading, and with a fanout expansion-aware sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.arguments import as_integer
from salientpp.fullgraph.exchange import Ranks
from salientpp.fullgraph.local import LocalGraph
from salientpp.ranks.placement import runs
from salientpp.store.target_lists import Edges


@dataclass(frozen=True)
class Preload:
    """User's options for preloading vertices of other hosts, so that no rows travel between hosts in a training step.

    Attributes:
        hops: number of rounds in which vertices pick in-neighbours, at least 0. Training is exact if ``fanout`` is None and ``hops`` is at least the number
            of layers, where a layer that passes messages K times counts K times.
        fanout: largest number of in-neighbours that a vertex picks, at random, at least 1; None: all in-neighbours that are not the host's.
        seed: seed of the picks, and of the division of a host's graph among its ranks.

    Raises:
        ValueError: a value is out of range.
    """

    hops: int
    fanout: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("hops", 0), ("fanout", 1), ("seed", 0)):
            value = getattr(self, name)
            number = as_integer(value)
            if (number is None or number < lowest) and not (name == "fanout" and value is None):
                more = ", or None for all in-neighbours" if name == "fanout" else ""
                raise ValueError(f"{name} of Preload must be an integer >= {lowest}{more}, got {value!r}")


@dataclass(frozen=True, eq=False)
class Expansion:
    """Result of :func:`expanded`: vertices that a host keeps, and the edges into them that this rank has read.

    Attributes:
        inner: the ids of the host's inner vertices.
        picked: int64 [p], ids of the picked vertices of other hosts, ascending.
        reads: for each round, the vertices int64 [m] whose edges this rank has read, and all edges into them. One rank of the host reads each vertex.
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
    score = None if preload.fanout is None else _random_scores(whole.num_vertices, preload.seed)
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
    """Lets each target of ``edges`` pick sources outside ``inner``. Returns the picked ids, int64, which may repeat.

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
    """Returns the concatenated ``values`` [n] of all ranks, in their order. Collective. n may differ between ranks."""
    counts = [number for (number,) in ranks.gather_numbers("to gather values", [values.numel()])]
    return ranks.comm.all_to_all(values.repeat(ranks.size), [values.numel()] * ranks.size, counts).wait()


def _random_scores(number: int, seed: int) -> Tensor:
    """Draws a score for each vertex, float64 [N], by which targets pick sources. It is equal on all ranks, whatever the number of hosts."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(number, generator=draw, dtype=torch.float64, device="cpu")
