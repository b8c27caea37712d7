"""Assigns every vertex to a part.

Ranks work in step, so all parts should hold about equal numbers of vertices, edges and seeds of each split:

    load(p, c) <= limit(c) = max((1 + tolerance) * mean load, ceil(mean load), largest single weight)

for each constraint c: 'vertices', 'edges' (in-degrees) and one per seed set. METIS or KaMinPar cuts the undirected graph without loops. There, the weight
of an edge is the total of the directed edges that it stands for. :mod:`salientpp.partitioning.balance` then moves vertices until the limits hold, by the moves
that make the cut grow least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.ids import first_outside
from salientpp.partitioning.balance import VertexLoads
from salientpp.partitioning.kaminpar import partition_with_kaminpar
from salientpp.partitioning.metis import partition_with_metis

#: Limit of the number of parts: every part has tables of its own, and a folder with five digits on disk.
MOST_PARTS = 100_000

#: Number of edges processed together when the cut is counted. It bounds memory, and memory-mapped graphs stay on disk.
_EDGES_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class PartitionAssignment:
    """Tells the part of every vertex, and how good this assignment is: the cut, and the loads of the parts.

    Attributes:
        assignment: int64 [N], the part of every vertex, in [0, K).
        num_parts: K.
        num_edges: E, directed edges of the graph.
        edge_cut: directed edges whose ends lie in different parts.
        loads: the K loads of 'vertices', of 'edges' (in-degrees) and of each non-empty seed set. A vertex that a
            seed set lists twice counts twice.
    """

    assignment: Tensor
    num_parts: int
    num_edges: int
    edge_cut: int
    loads: Mapping[str, tuple[int, ...]]

    @property
    def edge_cut_fraction(self) -> float:
        """``edge_cut`` divided by E, in [0, 1]; 0 without edges."""
        return self.edge_cut / self.num_edges if self.num_edges else 0.0

    @property
    def balance(self) -> dict[str, float]:
        """Evenness of each load: the load of the fullest part divided by the mean. 1.0 is perfect; K means that one part has everything."""
        return {name: max(load) * self.num_parts / sum(load) if sum(load) else 1.0 for name, load in self.loads.items()}


def assign_parts(
    graph: Graph,
    num_parts: int,
    *,
    method: str | Tensor = "metis",
    seed_sets: Mapping[str, Tensor] | None = None,
    loads: Mapping[str, Tensor] | None = None,
    edge_weights: Tensor | None = None,
    weight_of_each: Tensor | None = None,
    vertex_weights: Tensor | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
) -> PartitionAssignment:
    """Assigns every vertex to one of K parts.

    Args:
        graph: N >= 1 vertices; directed edges, self-loops, repeated edges and isolated vertices are allowed.
        num_parts: K, 1 <= K <= N. A given assignment may leave parts empty, so K may then be larger than N.
        method: one of these.
            'metis': a small cut within the limits above.
            'kaminpar': the same in less memory, with torch's threads. With several threads, parts vary from run to run.
            'random': equal numbers of vertices, and of seeds of each set, in every part. They differ by at most one if the sets are disjoint. Edges are not
            balanced.
            An integer tensor [N] of part ids: it is checked and measured, never changed.
        seed_sets: name to int32 or int64 ids in [0, N). Empty sets are left out of the balance.
        loads: name to int64 [N], >= 0: what a vertex adds to each load of its part, besides the seed sets. None: 'vertices', 1 each, and 'edges', the
            in-degrees.
        edge_weights: int64 [N], each >= 1: cost of cutting an edge into v; None: 1 each. Only for 'metis' and 'kaminpar'.
        weight_of_each: alternative to ``edge_weights``: int32 or int64 [E], in the order of ``graph.indices``.
        vertex_weights: int64 [N], each >= 1: the weights that METIS balances before all loads are balanced; None: in-degrees. With ``loads`` that differ much
            from in-degrees, their sum gives smaller cuts. Only for 'metis'.
        tolerance: largest excess of a load over the mean, as a fraction, >= 0. Limits are met if the kernel finds moves that meet all of them.
        seed: >= 0; the same graph, arguments, seed and pymetis give the same assignment.

    Raises:
        ValueError: an argument is out of range, or the graph is too large for this pymetis.
        ImportError: 'metis' without pymetis >= 2025.2, 'kaminpar' without kaminpar.
        PartitionerError: METIS or KaMinPar failed, most often for lack of memory. The text names the memory needed and the methods that need less.
    """
    _check_arguments(graph, num_parts, method, edge_weights, weight_of_each, tolerance, seed)
    if vertex_weights is not None:
        if isinstance(method, Tensor) or method != "metis":
            raise ValueError("vertex_weights need method='metis'; leave them out")
        _check_weights(vertex_weights, "vertex_weights", graph.num_vertices, "")
    weights = VertexLoads(graph, seed_sets or {}, loads)
    # If one part holds everything, the excess is num_parts - 1.
    num_vertices, tolerance = graph.num_vertices, min(tolerance, num_parts)
    if isinstance(method, Tensor):
        assignment = check_assignment(method, num_vertices, num_parts)
    elif num_parts > num_vertices:
        raise ValueError(
            f"num_parts must be at most the number of vertices, {num_vertices}, got {num_parts}: "
            "some parts would be empty"
        )
    elif num_parts == 1:  # METIS does not support a single part
        assignment = torch.zeros(num_vertices, dtype=torch.int64, device="cpu")
    elif method == "random":
        strata = [load for name, load in zip(weights.names, weights.table.unbind(1)) if name in weights.seed_sets]
        assignment = _deal_at_random(strata, num_vertices, num_parts, seed)
    elif method == "kaminpar":
        assignment = partition_with_kaminpar(graph, num_parts, weights, edge_weights, weight_of_each, tolerance, seed)
    else:
        assignment = partition_with_metis(
            graph, num_parts, weights, edge_weights, weight_of_each, tolerance, seed, vertex_weights
        )
    totals = torch.zeros((num_parts, len(weights.names)), dtype=torch.int64, device="cpu")
    totals.index_add_(0, assignment, weights.table)
    return PartitionAssignment(
        assignment=assignment,
        num_parts=num_parts,
        num_edges=graph.num_edges,
        edge_cut=_count_cut_edges(graph, assignment),
        loads=dict(zip(weights.names, map(tuple, totals.t().tolist()))),
    )


def _check_arguments(
    graph: Graph,
    num_parts: int,
    method: str | Tensor,
    edge_weights: Tensor | None,
    weight_of_each: Tensor | None,
    tolerance: float,
    seed: int,
) -> None:
    if graph.num_vertices == 0:
        raise ValueError("the graph must have at least one vertex to be partitioned, got 0")
    check_num_parts(num_parts)
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a number >= 0, got {tolerance!r}; 0.05 allows 5 % above the mean")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    if not isinstance(method, Tensor) and not (isinstance(method, str) and method in ("metis", "kaminpar", "random")):
        raise ValueError(f"method must be 'metis', 'kaminpar', 'random' or a tensor of part ids, got {method!r}")
    if edge_weights is not None or weight_of_each is not None:
        if isinstance(method, Tensor) or method == "random":
            raise ValueError("edge_weights need method='metis' or 'kaminpar'; leave them out")
        if edge_weights is not None and weight_of_each is not None:
            raise ValueError("edge_weights and weight_of_each both set the weights of edges; give one of them")
    if edge_weights is not None:
        _check_weights(edge_weights, "edge_weights", graph.num_vertices, ", for the edges into each vertex")
    if weight_of_each is not None:
        _check_weights(weight_of_each, "weight_of_each", graph.num_edges, ", one for each edge", torch.int32)


def check_num_parts(num_parts: int) -> None:
    """Raises ValueError unless K is an integer in [1, MOST_PARTS]."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"num_parts must be an integer >= 1, got {num_parts!r}")
    if num_parts > MOST_PARTS:
        raise ValueError(f"num_parts must be at most {MOST_PARTS}, got {num_parts}")


def _check_weights(weights: Tensor, name: str, size: int, of: str, also: torch.dtype = torch.int64) -> None:
    if not isinstance(weights, Tensor) or weights.dtype not in (torch.int64, also) or list(weights.shape) != [size]:
        got = f"{weights.dtype} {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{name} must be int64 [{size}]{of}, got {got}")
    low = weights < 1
    if bool(low.any()):
        at = int(low.nonzero()[0])
        raise ValueError(f"{name}[{at}] must be >= 1, got {int(weights[at])}; scale the weights up and clamp them")


def check_assignment(assignment: Tensor, num_vertices: int, num_parts: int) -> Tensor:
    """Checks an assignment and returns a copy as int64 [N] on the CPU."""
    if assignment.dim() != 1 or assignment.numel() != num_vertices:
        raise ValueError(
            f"assignment must have shape [{num_vertices}], one part per vertex, got {list(assignment.shape)}"
        )
    if assignment.dtype.is_floating_point or assignment.dtype.is_complex or assignment.dtype == torch.bool:
        raise ValueError(f"assignment must have an integer dtype, got {assignment.dtype}; use assignment.long()")
    assignment = assignment.detach().to("cpu", torch.int64, copy=True)
    v = first_outside(assignment, num_parts)
    if v is not None:
        raise ValueError(f"assignment[{v}] must be in [0, {num_parts}), got {int(assignment[v])}")
    return assignment


def _count_cut_edges(graph: Graph, assignment: Tensor) -> int:
    degree = graph.indptr.diff()
    cut = 0
    for begin, end in runs_of_vertices(graph.indptr, _EDGES_AT_ONCE):
        sources = graph.indices[int(graph.indptr[begin]) : int(graph.indptr[end])]
        targets_part = assignment[begin:end].repeat_interleave(degree[begin:end])
        cut += int((assignment.index_select(0, sources) != targets_part).sum())
    return cut


def _deal_at_random(seed_sets: Sequence[Tensor], num_vertices: int, num_parts: int, seed: int) -> Tensor:
    """Assigns vertices to parts at random, with equal numbers of vertices and of the seeds of each set. Returns int64 [N].

    It shuffles the vertices, sorts them by stratum, and deals them out to the parts in turn. A stratum is the vertices that each set lists equally often.
    Parts differ by at most one in their number of vertices of a stratum, and in their number of all vertices.

    Args:
        seed_sets: for each set int64 [N], how often it lists each vertex.
    """
    stratum = np.zeros(num_vertices, dtype=np.int64)
    for weight in seed_sets:
        # Renumber after each set: strata are then fewer than vertices, so the product cannot overflow.
        _, listed = np.unique(weight.numpy(), return_inverse=True)
        _, stratum = np.unique(stratum * (listed.max() + 1) + listed, return_inverse=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(num_vertices)
    order = order[np.argsort(stratum[order], kind="stable")]
    # The order of the parts is drawn too, so that low parts do not always get the odd vertices.
    turn = rng.permutation(num_parts)
    assignment = np.empty(num_vertices, dtype=np.int64)
    assignment[order] = turn[np.arange(num_vertices) % num_parts]
    return torch.from_numpy(assignment)
