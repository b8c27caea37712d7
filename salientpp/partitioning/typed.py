"""Assigns the vertices of several types to parts, and numbers them.

One partition serves all types. Vertices of all types are numbered one type after another, and the edges of all relations between them form one graph, the
**joint graph**. It is partitioned like any other (:mod:`salientpp.partitioning.assign`). The vertices of every type, the edges of every
relation (in-degrees) and every split of every type are balanced.

With VIP weights, an edge u -> v weighs the bytes that a step is expected to receive through it (:func:`~salientpp.vip.inclusion.typed_traffic`). The bytes
are the row of u and the rows of everything that is drawn from u. Counting only the row of u is not enough: on a graph where half of the vertices
have no rows (``synthetic-mag``), this gave worse parts than no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import words_for
from salientpp.graph.typed import TypedGraph
from salientpp.partitioning.assign import PartitionAssignment, assign_parts, check_assignment
from salientpp.partitioning.numbering import VipNumbering, number_by
from salientpp.partitioning.options import METHODS, PartitionOptions
from salientpp.vip.inclusion import check_fanouts, typed_inclusion_probabilities, typed_traffic, uniform_starts

#: Input of :func:`check_typed_fanouts`.
Fanouts = Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]]


@dataclass(frozen=True, eq=False)
class JointGraph:
    """Presents the vertices of all types and the edges of all relations as one graph, which a partitioner can read.

    Attributes:
        graph: its vertices are the vertices of the first type, then of the second, and so on.
        first: per type, the id that its vertex 0 has in ``graph``; at the end, the number of all vertices.
        place: per relation int64 [E], positions of its edges in ``graph.indices``.
    """

    graph: Graph
    first: list[int]
    place: list[Tensor]

    @classmethod
    def of(cls, typed: TypedGraph) -> JointGraph:
        first = list(accumulate(typed.num_vertices, initial=0))
        degree = torch.zeros(first[-1], dtype=torch.int64, device="cpu")
        for relation in typed.relations:
            degree[first[relation.target] : first[relation.target + 1]] += relation.indptr.diff()
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), degree.cumsum(0)])
        del degree
        next_place = indptr[:-1].clone()  # a vertex's lists of several relations follow one another
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32 if first[-1] < 2**31 else torch.int64, device="cpu")
        places = []
        for relation in typed.relations:
            ahead = next_place[first[relation.target] : first[relation.target + 1]]
            place = torch.repeat_interleave(ahead - relation.indptr[:-1], relation.indptr.diff())
            place += torch.arange(place.numel(), device="cpu")
            indices[place] = relation.indices.to(indices.dtype) + first[relation.source]
            ahead += relation.indptr.diff()
            places.append(place)
        return cls(Graph.trusted(indptr, indices), first, places)


def check_typed_fanouts(num_neighbors: Fanouts, edge_types: Sequence[tuple[str, str, str] | None]) -> list[list[int]]:
    """Returns the fanouts of each relation, from one list for all or from a mapping by edge type.

    Raises:
        ValueError: an edge type is unknown or missing, or numbers of hops differ.
    """
    if not isinstance(num_neighbors, Mapping) or list(edge_types) == [None]:
        for_all = check_fanouts(num_neighbors)  # type: ignore[arg-type]  # checked there
        return [list(for_all) for _ in edge_types]
    name: Any  # name of an edge type
    for name in num_neighbors:
        if name not in edge_types:
            raise ValueError(
                f"the keys of num_neighbors must be edge types of the data ({', '.join(map(repr, edge_types)) or 'none'}), got {name!r}"
            )
    fanouts = []
    for name in edge_types:
        if name not in num_neighbors:
            raise ValueError(f"num_neighbors must have a list for every edge type, got none for {name!r}")
        try:
            fanouts.append(check_fanouts(num_neighbors[name]))
        except ValueError as error:
            raise ValueError(f"edge type {name!r}: {error}") from None
        if len(fanouts[-1]) != len(fanouts[0]):
            raise ValueError(
                f"num_neighbors must have the same number of hops for all edge types, got {len(fanouts[0])} for {edge_types[0]!r} and "
                f"{len(fanouts[-1])} for {name!r}"
            )
    return fanouts


def assign_types(
    typed: TypedGraph,
    num_parts: int,
    options: PartitionOptions,
    *,
    splits: Mapping[str | None, Mapping[str, Tensor]],
    seeds: Mapping[str | None, Tensor],
    fanouts: Sequence[Sequence[int]],
    batch_size: int,
    row_bytes: Mapping[str | None, int],
) -> PartitionAssignment:
    """Assigns the vertices of all types to K parts, by partitioning one graph of all types (:class:`JointGraph`).

    Args:
        options: decided options. A given assignment has, per type, an integer tensor [N] of parts.
        splits: per type, name -> int64 ids.
        seeds: per type, the int64 ids that batches start from.
        fanouts: one list per relation.
        row_bytes: per type, the bytes that fetching the row of a vertex takes.

    Raises:
        ValueError, ImportError, PartitionerError: see :func:`~salientpp.partitioning.assign.assign_parts`.
    """
    joint = JointGraph.of(typed)
    method, weights = options.method, None
    given = method if isinstance(method, str) else _joint_assignment(typed, method, num_parts)
    if options.weights_used == "vip":
        weights = _cut_costs(typed, joint, uniform_starts(seeds, batch_size * num_parts), fanouts, row_bytes)
    # The strata of 'random' are types and splits; edges are not balanced.
    starts = zip(typed.node_types, pairwise(joint.first))
    sets = {f"vertices of {name}": torch.arange(*bounds, device="cpu") for name, bounds in starts}
    for i, name in enumerate(typed.node_types):
        for split, ids in splits.get(name, {}).items():
            if split in ("vertices", "edges"):
                raise ValueError(f"a split may not be called {split!r}: {split} are always balanced; rename the split")
            sets[f"{split} of {name}"] = ids + joint.first[i]
    loads = {}
    for edge_type, relation in zip(typed.edge_types, typed.relations):
        load = torch.zeros(joint.first[-1], dtype=torch.int64, device="cpu")
        load[joint.first[relation.target] : joint.first[relation.target + 1]] = relation.indptr.diff()
        if relation.indices.numel():
            loads[f"edges of {' '.join(edge_type or ())}"] = load
    return assign_parts(
        joint.graph,
        num_parts,
        method=given,
        seed_sets=sets,
        loads=loads,
        weight_of_each=weights,
        tolerance=options.tolerance,
        seed=options.seed,
    )


def number_types(
    typed: TypedGraph,
    assigned: PartitionAssignment,
    seeds: Mapping[str | None, Tensor],
    fanouts: Sequence[Sequence[int]],
    batch_size: int,
    order: str = "vip",
) -> dict[str | None, VipNumbering]:
    """Numbers the vertices of every type by the inclusion probabilities of a workload; :func:`assign_types` explains the arguments."""
    parts = dict(zip(typed.node_types, assigned.assignment.split(list(typed.num_vertices))))
    num_parts = assigned.num_parts
    of_parts = [{name: ids[parts[name][ids] == part_id] for name, ids in seeds.items()} for part_id in range(num_parts)]
    starts = [uniform_starts(own, batch_size) for own in of_parts]
    vip = typed_inclusion_probabilities(typed, starts, fanouts)
    numberings = {}
    for name, size in zip(typed.node_types, typed.num_vertices):
        without = torch.stack([of_part[name] for of_part in vip])
        with_seeds = (
            (row.double() + start[name](size)).clamp(max=1.0).to(torch.float32) if name in start else row
            for row, start in zip(without, starts)
        )
        numberings[name] = number_by(parts[name], without, with_seeds, order)
    return numberings


def _joint_assignment(typed: TypedGraph, given: Any, num_parts: int) -> Tensor:
    """Checks the parts that the user gave per type, integers [N], and concatenates them in the order of the joint graph, int64."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"method must be {', '.join(map(repr, METHODS))} or a mapping from node types to tensors of part ids, got {type(given).__name__}"
        )
    name: Any  # name of a node type
    for name in given:
        if name not in typed.node_types:
            raise ValueError(
                f"the keys of method must be node types of the data ({', '.join(map(repr, typed.node_types))}), got {name!r}"
            )
    pieces = []
    for name, size in zip(typed.node_types, typed.num_vertices):
        if not isinstance(given.get(name), Tensor):
            raise ValueError(
                f"method must have a tensor of part ids for every node type, got none for {words_for(name)}"
            )
        try:
            pieces.append(check_assignment(given[name], size, num_parts))
        except ValueError as error:
            raise ValueError(f"node type {words_for(name)}: {error}") from None
    return torch.cat(pieces)


def _cut_costs(
    typed: TypedGraph,
    joint: JointGraph,
    start: Mapping,
    fanouts: Sequence[Sequence[int]],
    row_bytes: Mapping[str | None, int],
) -> Tensor | None:
    """Returns edge weights for a partitioner: the expected traffic through each edge, int32 [E] in the order of the joint graph.

    The traffic is scaled to a mean of 10 over the edges with traffic, and clamped to [1, 1000]. None if no edge has traffic.
    """
    traffic = typed_traffic(typed, start, fanouts, row_bytes)
    total, carrying = sum(float(each.sum()) for each in traffic), sum(int((each > 0).sum()) for each in traffic)
    if carrying == 0:
        return None
    weights = torch.empty(joint.graph.num_edges, dtype=torch.int32, device="cpu")
    for each, place in zip(traffic, joint.place):
        weights[place] = (each * (10.0 * carrying / total)).round().clamp(1, 1000).to(torch.int32)
    return weights
