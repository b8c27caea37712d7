"""A sampler of the vertices with the largest personalised PageRank (PPR) of each seed.

A walk starts at a seed. At each vertex it ends with probability ``alpha``, or goes to one of the vertex's in-neighbours, drawn uniformly. At a vertex without
in-neighbours it ends. The PPR of v is the probability that the walk ends at v. It is approximated by forward push (Andersen, Chung and Lang, *Local Graph
Partitioning using PageRank Vectors*, FOCS 2006), with walks that are not lazy. A score p(v) is never above the PPR of v. If every edge has a reverse,
it is below it by at most ``epsilon`` times the in-degree of v.

A batch has the vertices as fixed-length sequences, as PPRGo reads them (Bojchevski and others, KDD 2020). It has their induced subgraph too, as shaDow-GNN
reads it (Zeng and others, NeurIPS 2021).

Scores depend only on the graph. So they need no key, and the cached rows of a part are chosen by the exact probability that a batch has a vertex.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp import ops
from salientpp.arguments import as_integer, as_real
from salientpp.graph.csc import Graph
from salientpp.graph.relation import Relation
from salientpp.processes import lazy, may_compute_in_parallel
from salientpp.sampling.growing_batch import GrowingBatch
from salientpp.sampling.held_lists import Drawn, Lists
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import Drawing, Packets, PartTopology, drawn_alone, topology_of_part
from salientpp.sampling.topology import ByType, Mfg, Topology
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.tiers import NO_IDS
from salientpp.suggestions import suggest_arguments

#: Number of seeds whose walks are followed at once, where lists of other ranks are needed.
SEEDS_AT_ONCE = 64

#: Number of seeds that are counted at once.
_CHUNK = 4096

#: The ends of the only relation.
_ENDS = ((0, 0),)


class Top(NamedTuple):
    """Vertices with the largest scores for each of B seeds.

    Attributes:
        id: int64 [B, k], global ids by descending score, equal scores by ascending id; -1 fills rows that are shorter.
        score: float64 [B, k]; 0.0 fills.
        number: int64 [B], number of vertices of each seed.
    """

    id: Tensor
    score: Tensor
    number: Tensor


class PPRSampler(NeighborSampler):
    """Sampler of the ``k`` vertices with the largest personalised PageRank of each seed, for any loader that takes a ``BaseSampler``.

    Batches of this package's loaders get ``ppr_index`` int64 [B, k], the positions of these vertices in the batch, and ``ppr_score`` float32 [B, k], their
    approximate PageRank. Both are sorted by descending score, equal scores by ascending id. -1 and 0.0 fill the rows of seeds that reach fewer vertices.
    The seed itself has a score too, usually the largest. The edges form the induced subgraph.

    Args:
        data: a ``Data``, a :class:`~salientpp.Graph` or a :class:`~salientpp.PartitionedGraph`, with one vertex type.
        k: largest number of vertices for each seed.
        alpha: probability in (0, 1) that a walk ends at a vertex. A larger value keeps walks nearer to the seed.
        epsilon: > 0. A vertex is pushed while its residual is more than ``epsilon`` times its in-degree. A smaller value takes longer and gives smaller
            errors.
        disjoint: every seed has a subgraph of its own; ``batch`` numbers the subgraphs.

    Raises:
        ValueError: an argument is wrong, or the data has several vertex types.
        TypeError: ``data`` is of another type.
    """

    @suggest_arguments
    def __init__(
        self,
        data: Data | Graph | PartitionedGraph | Topology,
        k: int,
        alpha: float = 0.15,
        epsilon: float = 1e-4,
        disjoint: bool = False,
    ) -> None:
        number, ends, most = as_integer(k), as_real(alpha), as_real(epsilon)
        if number is None or number < 1:
            raise ValueError(f"k must be an integer >= 1 (vertices per seed), got {k!r}")
        if ends is None or not 0 < ends < 1:
            raise ValueError(f"alpha must be in (0, 1) (probability that a walk ends at a vertex), got {alpha!r}")
        if most is None or not 0 < most < math.inf:
            raise ValueError(f"epsilon must be > 0 (residual per in-neighbour that is not pushed), got {epsilon!r}")
        self.k, self.alpha, self.epsilon = number, float(ends), float(most)
        self._part = data if isinstance(data, PartitionedGraph) else None
        edges = _edges_of(data) if isinstance(data, PartitionedGraph) else data
        super().__init__(edges, [], subgraph_type="induced", disjoint=disjoint)
        if self.is_hetero:
            raise ValueError(
                f"a PPRSampler needs a graph with one vertex type, got {len(self.topology.num_vertices)}; pass a Data, such as HeteroData.to_homogeneous()"
            )
        if self.is_temporal or self.topology.has_weights:
            raise ValueError("walks of a PPRSampler ignore times and weights; pass a graph without them")
        self._kept: tuple[Tensor, Top] | None = None

    def over(self, held: PartitionedGraph) -> PPRSampler:
        """Returns a sampler with the same arguments over the part that this host holds. A sampler over a graph in memory stays as it is."""
        if self._part is None:
            return self
        return type(self)(held, self.k, self.alpha, self.epsilon, self._disjoint)

    def settings(self) -> dict[str, Any]:
        same = {"num_neighbors": [], "replace": False, "subgraph_type": self.subgraph_type.value}
        walks = {"ppr": [self.k, self.alpha, self.epsilon]}
        return {**same, "disjoint": self.disjoint, "temporal_strategy": self.temporal_strategy, **walks}

    @lazy
    def _graph(self) -> Relation:
        """Neighbour lists of all vertices. ValueError if this process does not hold the whole graph."""
        (relation,) = self.topology.as_typed().relations
        return relation if relation.links is None else replace(relation, edge_id=relation.links >> 32, links=None)

    # --- the largest scores -------------------------------------------------------------------------------

    def top(self, seeds: Tensor) -> Top:
        """Returns the vertices with the largest scores of these seeds, int64 [B]. Looks them up if :meth:`keep` stored them for all seeds.

        Raises:
            RuntimeError: a seed is out of range, or its scores need lists of another part and were not kept.
        """
        if not seeds.numel():
            score = torch.empty((0, self.k), dtype=torch.float64, device="cpu")
            return Top(NO_IDS.new_empty((0, self.k)), score, NO_IDS)
        if self._kept is not None:
            known, kept = self._kept
            place = torch.searchsorted(known, seeds).clamp_(max=max(0, known.numel() - 1))
            if known.numel() and torch.equal(known[place], seeds):
                return Top(*(column[place] for column in kept))
        topology = self.topology
        if isinstance(topology, PartTopology):
            if topology.is_shared:
                raise RuntimeError(
                    "personalised PageRank of some seeds was not found when the loader was made, and needs neighbour lists of other ranks; use the "
                    "sampler in a loader whose seeds are these vertices"
                )
            return drawn_alone(self.finding(seeds, degrees_held(topology)))
        graph = self._graph
        found = ops.ppr_push(
            graph.indptr, graph.indices, seeds, self.alpha, self.epsilon, self.k, parallel=may_compute_in_parallel()
        )
        return Top(*found[:3])

    def keep(self, seeds: Tensor, found: Top) -> None:
        """Stores the result of :meth:`top` for these seeds, int64 [n], so that :meth:`top` looks it up. Results stored before stay."""
        if self._kept is not None:
            seeds = torch.cat([self._kept[0], seeds])
            found = Top(*(torch.cat(columns) for columns in zip(self._kept[1], found)))
        known, which = torch.unique(seeds, return_inverse=True)
        first = torch.empty_like(known)
        first[which] = torch.arange(which.numel(), device="cpu")
        self._kept = known, Top(*(column[first] for column in found))

    def finding(self, seeds: Tensor, degree: Tensor) -> Generator[Packets, Packets | None, Top]:
        """Computes :meth:`top` over a graph that is divided among hosts. The generator yields requests to other ranks and is sent their answers.

        The computation starts again after each exchange, with the lists that were missing. The number of exchanges depends on the graph.

        Args:
            seeds: int64 [B].
            degree: int32 or int64 [N], the in-degrees of all vertices.
        """
        topology = self.topology
        assert isinstance(topology, PartTopology)  # as the callers checked
        size = seeds.numel()
        found = Top(
            torch.full((size, self.k), -1, dtype=torch.int64, device="cpu"),
            torch.zeros((size, self.k), dtype=torch.float64, device="cpu"),
            torch.zeros(size, dtype=torch.int64, device="cpu"),
        )
        ids, length, sources = NO_IDS, NO_IDS, NO_IDS
        rest = torch.arange(size, device="cpu")
        while True:
            indptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
            *columns, missing = ops.ppr_push(
                indptr, sources, seeds[rest], self.alpha, self.epsilon, self.k, ids, degree, may_compute_in_parallel()
            )
            for column, more in zip(found, columns):
                column[rest] = more
            rest = rest[columns[2] < 0]
            if not rest.numel():
                return found
            more_length, more_sources = yield from topology.reading(missing)
            # Lists are kept in the order of their vertices.
            ids, order = torch.cat([ids, missing]).sort()
            place = torch.empty_like(order)
            place[order] = torch.arange(order.numel(), device="cpu")
            place_of = list(place.split([length.numel(), more_length.numel()]))
            length, sources = ops.merge_lists(order.numel(), place_of, [length, more_length], [sources, more_sources])

    def inclusion(self, seeds: Tensor, batch_size: int) -> Tensor:
        """Returns the probability that a batch has each vertex, float32 [N].

        If c of the n seeds have a vertex in their result of :meth:`top`, it is in a batch of B distinct seeds with probability
        ``1 - C(n - c, B) / C(n, B)``.

        Args:
            seeds: int64 [n].
        """
        size, n = self.topology.num_vertices[None], seeds.numel()
        count = torch.zeros(size, dtype=torch.float64, device="cpu")
        for chunk in seeds.split(_CHUNK):
            top = self.top(chunk)
            others = chunk[(top.id != chunk[:, None]).all(1)]  # seeds that are not among their own vertices
            count += torch.bincount(torch.cat([top.id[top.id >= 0], others]), minlength=size)
        b = min(batch_size, n)
        rest = (n - count).clamp(min=b)  # with fewer other seeds than b, the chance is 1 in any case
        log_without = (rest + 1).lgamma() - (rest - b + 1).lgamma() - math.lgamma(n + 1) + math.lgamma(n - b + 1)
        return torch.where(n - count < b, 1.0, -log_without.expm1()).clamp_(0.0, 1.0).to(torch.float32)

    # --- batches ------------------------------------------------------------------------------------------

    def drawing(self, seed: Any, seed_time: Any, key: int, on_clock: bool, only_vertices: bool) -> Drawing:
        seeds, key, options, _ = self.arguments(seed, None, key, on_clock, only_vertices)
        topology, ids = self.topology, seeds[None]
        top = self.top(ids)
        batch = GrowingBatch.begin(topology, _ENDS, {None: ids}, options, None)
        there = top.id >= 0
        batch.join([[(None, Drawn(top.number, top.id[there]))]])
        index = torch.full_like(top.id, -1)
        index[there] = batch.edge_index[0][0]
        if options.induced and isinstance(topology, PartTopology):
            yield from topology.inducing(batch, key)
        elif options.induced:
            members = batch.vertices(0)
            lists = Lists(self._graph, 0, 0)
            size = topology.num_vertices[None]
            between = lists.edges_between(members.ids, members, members, size, batch.num_trees, False)
            batch.replace_edges([[(None, between)]])
        out: Any = batch.finished(options, only_vertices)
        out.per_seed = {"ppr_index": index, "ppr_score": top.score.to(torch.float32)}
        return out

    def _sample(
        self,
        seed: Tensor | ByType,
        seed_time: Any = None,
        key: int | None = None,
        on_clock: bool = False,
        only_vertices: bool = False,
    ) -> Mfg:
        return drawn_alone(self.drawing(seed, seed_time, key or 0, on_clock, only_vertices))

    def __repr__(self) -> str:
        graph = self.topology.graph or self.topology
        return f"{type(self).__name__}(k={self.k}, alpha={self.alpha}, epsilon={self.epsilon}, graph={graph})"


def _edges_of(part: PartitionedGraph) -> Graph | Topology:
    """Returns the neighbour lists of a partitioned graph from which this process draws."""
    if part.is_hetero:
        raise ValueError(
            f"a PPRSampler needs a graph with one vertex type, got {len(part.node_types)} in {part.root}; partition a Data"
        )
    if part.topology == "parts" and part.part_id is not None and part.num_parts > 1:
        return topology_of_part(part, None, None)
    return part.graph


def degrees_held(topology: PartTopology) -> Tensor:
    """Returns the in-degrees of the vertices whose lists this host holds, int64 [vertices of its part], in the order of their ids."""
    return torch.cat([lists.relation.indptr.diff() for lists in topology.part.lists[0]])
