"""Which part owns which vertex?

The first decision of a plan: each vertex v gets a part in [0, K), and the rank that serves the part holds the
features of v and draws batches from the seeds among its vertices. An edge whose ends lie in different parts is a
row that may have to travel, so the cut should be small; ranks work in step, so every part should hold about as
many vertices, edges and seeds of each split as any other:

    load(p, c) <= limit(c) = max((1 + tolerance) * mean load, ceil(mean load), largest single weight)

for each constraint c: 'vertices', 'edges' (in-degrees, what the owner of v stores and draws from) and one per
seed set. Three steps:

1. *Symmetrise.* METIS wants undirected graphs without loops. The edges u -> v and v -> u, however often each
   occurs, become one undirected edge whose weight is how many there were, so METIS's cut is the number of
   directed edges cut, which is what :attr:`PartitionAssignment.edge_cut` reports.
2. *METIS* (Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998), through pymetis, which takes one weight per
   vertex (and misreads more than one without a word). The weight is the in-degree: 'edges' is the constraint
   that is dear to repair, since moving load means moving well-connected vertices, while counts of vertices and
   seeds are repaired by moving those with few links. On three real graphs with K = 4 and 8 the balanced cut is 0
   to 54 % below that from the mean of all constraints as the weight. METIS holds all the graphs it coarsens through,
   about 110 bytes per edge end where they stay dense. So of graphs with more than 2^26 edge ends it gets the 32 heaviest
   edges of every vertex (those that either end keeps; our kernel ``keep_heaviest_edges``), as does step 3. On a generated
   graph of 105 M edge ends that is 71 % of them, and the parts are as good.
3. *Rebalance*, our kernel ``rebalance_parts`` (csrc/partitioning/rebalance_parts.cpp): moves vertices out of overloaded parts
   at least cost to the cut, then lowers the cut within the limits.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.graph.mapped import releaser
from salientpp.ids import first_outside
from salientpp.partitioning.coarsen import coarsen
from salientpp.partitioning.errors import PartitionerError, names_memory, out_of_memory
from salientpp.partitioning.kaminpar import (
    check_kaminpar,
    memory_of_kaminpar,
    partition_with_kaminpar,
    write_undirected,
)

#: Refinement sweeps over all vertices after balancing; on real graphs later ones move next to nothing.
_SWEEPS = 8

#: Balancing aims below the limits by a tenth of the tolerance: it ends in parts that are exactly full, which
#: would leave refinement no room, and where single moves cannot quite meet a limit the margin absorbs the rest.
_BALANCING_SHARE = 0.9

#: Graphs of more edge ends than this are thinned for METIS, to the heaviest edges of every vertex. With 32 the batches of three
#: real graphs fetched 0.98 to 1.01 times the rows that they do with all edges; with 16 the cut of the generated graph grew by a third.
_MOST_EDGE_ENDS = 2**26
_EDGES_KEPT = 32

#: Methods that need less memory than METIS.
_LESS_THAN_METIS = "a method that needs less ('kaminpar', an extra: 10 to 50 bytes for each edge end; 'random': a few numbers for each vertex)"

#: What is balanced beside the seed sets: a vertex counts once, and with its in-degree.
_LOADS = ("vertices", "edges")

#: Every part has tables of its own, and a folder of five digits on disk.
MOST_PARTS = 100_000

#: Edges looked at together when the cut is counted: bounds memory, and memory-mapped graphs stay on disk.
_EDGES_AT_ONCE = 2**22


@dataclass(eq=False)
class _Weights:
    """What each vertex adds to its part, under each constraint.

    Attributes:
        loads: name to int64 [N].
        seed_sets: name to int64 ids; a vertex adds as often as it is listed.
    """

    graph: Graph
    loads: Mapping[str, Tensor] | None
    seed_sets: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        return [*(_LOADS if self.loads is None else self.loads), *self.seed_sets]

    @cached_property
    def table(self) -> Tensor:
        """int64 [N, C], made when it is first asked for: partitioners can do with the memory."""
        table = torch.ones((self.graph.num_vertices, len(self.names)), dtype=torch.int64, device="cpu")
        for column, name in zip(table.unbind(1), self.names):
            if name in self.seed_sets:
                column.copy_(torch.bincount(self.seed_sets[name], minlength=len(table)))
            elif self.loads is not None:
                column.copy_(self.loads[name])
            elif name == "edges":
                column.copy_(self.graph.indptr.diff())
        return table

    def columns(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.table.unbind(1)))


@dataclass(frozen=True, eq=False)
class PartitionAssignment:
    """Which part owns which vertex, and how good that is.

    Attributes:
        assignment: int64 [N], the part of every vertex, in [0, K).
        num_parts: K.
        num_edges: E, directed edges of the graph.
        edge_cut: directed edges whose ends lie in different parts.
        loads: for 'vertices', 'edges' (in-degrees) and each non-empty seed set, the K loads. A vertex that a
            seed set lists twice counts twice.
    """

    assignment: Tensor
    num_parts: int
    num_edges: int
    edge_cut: int
    loads: Mapping[str, tuple[int, ...]]

    @property
    def edge_cut_fraction(self) -> float:
        """``edge_cut`` over E, in [0, 1]; 0 without edges."""
        return self.edge_cut / self.num_edges if self.num_edges else 0.0

    @property
    def balance(self) -> dict[str, float]:
        """For each load, the fullest part over the mean: 1.0 is perfect, K is everything in one part."""
        return {name: max(load) * self.num_parts / sum(load) if sum(load) else 1.0 for name, load in self.loads.items()}

    def rows(self) -> list[tuple[str, ...]]:
        """A table to print: a header, one row per part, then the imbalances."""
        parts = [(str(p), *(f"{load[p]:,}" for load in self.loads.values())) for p in range(self.num_parts)]
        return [("part", *self.loads), *parts, ("max / mean", *(f"{ratio:.3f}" for ratio in self.balance.values()))]


def assign_parts(
    graph: Graph,
    num_parts: int,
    *,
    method: str | Tensor = "metis",
    seed_sets: Mapping[str, Tensor] | None = None,
    loads: Mapping[str, Tensor] | None = None,
    edge_weights: Tensor | None = None,
    weight_of_each: Tensor | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
) -> PartitionAssignment:
    """Assign every vertex to one of K parts.

    Args:
        graph: N >= 1 vertices; directed edges, self-loops, repeated edges and isolated vertices are fine.
        num_parts: K, 1 <= K <= N (a given assignment may leave parts empty, so there K may be larger).
        method: 'metis': a small cut within the limits above. 'kaminpar': the same by KaMinPar, an extra, in less memory and with torch's threads; on
            several of them parts vary from run to run. 'random': equally many vertices, and seeds of each
            set, in every part (off by one for disjoint sets), edges as they fall. Or an integer tensor [N] of
            part ids, which is checked and measured, never changed.
        seed_sets: name to int32 or int64 ids in [0, N), e.g. ``{'train': ..., 'val': ...}``. Empty ones are
            left out of the balance.
        loads: name to int64 [N], >= 0: what a vertex adds to its part, beside the seed sets; None: 'vertices', 1 each, and 'edges', the
            in-degrees. 'random' minds the seed sets alone.
        edge_weights: int64 [N], each >= 1: how much cutting an edge into v costs (e.g. scaled VIP: what v draws, it
            draws from any in-edge alike). Only for 'metis' and 'kaminpar'; None means 1 each.
        weight_of_each: instead, int32 or int64 [E], in the order of ``graph.indices``.
        tolerance: how far above the mean a load may be, >= 0. Limits are met wherever the kernel finds moves
            that meet them all; ``balance`` of the result says.
        seed: >= 0; the same graph, arguments, seed and pymetis give the same assignment.

    Raises:
        ValueError: an argument is out of range, or the graph is too large for this pymetis.
        ImportError: 'metis' without pymetis >= 2025.2, 'kaminpar' without kaminpar.
        PartitionerError: METIS or KaMinPar failed, most often for want of memory. The text names the memory needed and the methods that need less.
    """
    num_vertices = graph.num_vertices
    if num_vertices == 0:
        raise ValueError("the graph must have at least one vertex to be partitioned, got 0")
    check_num_parts(num_parts)
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a number >= 0, got {tolerance!r}; 0.05 allows 5 % above the mean")
    tolerance = min(tolerance, num_parts)  # with all in one part the excess is num_parts - 1
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    if not isinstance(method, Tensor) and not (isinstance(method, str) and method in ("metis", "kaminpar", "random")):
        raise ValueError(f"method must be 'metis', 'kaminpar', 'random' or a tensor of part ids, got {method!r}")
    weights = _constraint_weights(graph, seed_sets or {}, loads)
    if edge_weights is not None or weight_of_each is not None:
        if isinstance(method, Tensor) or method == "random":
            raise ValueError("edge_weights only guide method='metis' and 'kaminpar'; leave them out")
        if edge_weights is not None and weight_of_each is not None:
            raise ValueError("edge_weights and weight_of_each are the same thing told in two ways; give one of them")
    if edge_weights is not None:
        _check_edge_weights(edge_weights, "edge_weights", num_vertices, ", for the edges into each vertex")
    if weight_of_each is not None:
        _check_edge_weights(weight_of_each, "weight_of_each", graph.num_edges, ", one for each edge", torch.int32)

    if isinstance(method, Tensor):
        assignment = check_assignment(method, num_vertices, num_parts)
    elif num_parts > num_vertices:
        raise ValueError(
            f"num_parts must be at most the number of vertices, {num_vertices}, got {num_parts}: "
            "some parts would be empty"
        )
    elif num_parts == 1:  # METIS is not made for one part
        assignment = torch.zeros(num_vertices, dtype=torch.int64, device="cpu")
    elif method == "random":
        strata = [weight for name, weight in weights.columns().items() if name in weights.seed_sets]
        assignment = _deal_at_random(strata, num_vertices, num_parts, seed)
    elif method == "kaminpar":
        assignment = _partition_with_kaminpar(graph, num_parts, weights, edge_weights, weight_of_each, tolerance, seed)
    else:
        with _memory_of_metis(graph):
            assignment = _partition_with_metis(graph, num_parts, weights, edge_weights, weight_of_each, tolerance, seed)
    return PartitionAssignment(
        assignment=assignment,
        num_parts=num_parts,
        num_edges=graph.num_edges,
        edge_cut=_count_cut_edges(graph, assignment),
        loads={name: _sum_by_part(weight, assignment, num_parts) for name, weight in weights.columns().items()},
    )


def loads_and_limits(
    graph: Graph, num_parts: int, seed_sets: Mapping[str, Tensor], tolerance: float
) -> tuple[Tensor, Tensor]:
    """What every vertex adds to its part, int64 [N, C], and how much of each a part may hold, int64 [C], of partitions of vertices, edges and seeds."""
    weights = _constraint_weights(graph, seed_sets)
    return weights.table, _load_limits(weights, num_parts, min(tolerance, num_parts))


# --- arguments -------------------------------------------------------------------------------------------


def check_num_parts(num_parts: int) -> None:
    """Raise ValueError unless K is an integer >= 1."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"num_parts must be an integer >= 1, got {num_parts!r}")
    if num_parts > MOST_PARTS:
        raise ValueError(f"num_parts must be at most {MOST_PARTS}, got {num_parts}")


def _constraint_weights(
    graph: Graph, seed_sets: Mapping[str, Tensor], loads: Mapping[str, Tensor] | None = None
) -> _Weights:
    """What a vertex adds to its part, under each constraint. Empty seed sets are left out."""
    for name, load in (loads or {}).items():
        if (load.dtype, list(load.shape)) != (torch.int64, [graph.num_vertices]) or bool((load < 0).any()):
            raise ValueError(
                f"loads[{name!r}] must be int64 [{graph.num_vertices}] of numbers >= 0, got {load.dtype} {list(load.shape)}"
            )
    checked = {}
    for name, ids in seed_sets.items():
        if name in (_LOADS if loads is None else loads):
            raise ValueError(f"a seed set may not be called {name!r}: that load is always balanced; rename it")
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(
                f"seed_sets[{name!r}] must be a 1-D int64 tensor of vertex ids, got {got}; "
                "for a mask give mask.nonzero().view(-1)"
            )
        ids = ids.to("cpu", torch.int64)
        i = first_outside(ids, graph.num_vertices)
        if i is not None:
            raise ValueError(f"seed_sets[{name!r}][{i}] must be in [0, {graph.num_vertices}), got {int(ids[i])}")
        if ids.numel():
            checked[name] = ids
    return _Weights(graph, loads, checked)


def _check_edge_weights(weights: Tensor, name: str, size: int, of: str, also: torch.dtype = torch.int64) -> None:
    if not isinstance(weights, Tensor) or weights.dtype not in (torch.int64, also) or list(weights.shape) != [size]:
        got = f"{weights.dtype} {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{name} must be int64 [{size}]{of}, got {got}")
    low = weights < 1
    if bool(low.any()):
        at = int(low.nonzero()[0])
        raise ValueError(f"{name}[{at}] must be >= 1, got {int(weights[at])}; scale the weights up and clamp them")


def check_assignment(assignment: Tensor, num_vertices: int, num_parts: int) -> Tensor:
    """A copy as int64 [N] on the CPU."""
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


# --- measures --------------------------------------------------------------------------------------------


def _sum_by_part(weight: Tensor, assignment: Tensor, num_parts: int) -> tuple[int, ...]:
    total = torch.zeros(num_parts, dtype=torch.int64, device="cpu").index_add_(0, assignment, weight)
    return tuple(total.tolist())


def _count_cut_edges(graph: Graph, assignment: Tensor) -> int:
    degree = graph.indptr.diff()
    cut = 0
    for begin, end in runs_of_vertices(graph.indptr, _EDGES_AT_ONCE):
        sources = graph.indices[int(graph.indptr[begin]) : int(graph.indptr[end])]
        targets_part = assignment[begin:end].repeat_interleave(degree[begin:end])
        cut += int((assignment.index_select(0, sources) != targets_part).sum())
    return cut


# --- methods ---------------------------------------------------------------------------------------------


def _deal_at_random(seed_sets: Sequence[Tensor], num_vertices: int, num_parts: int, seed: int) -> Tensor:
    """Shuffle the vertices, sort them by the seed sets they are in (int64 [N], how often), and deal them out in turn.

    A run of equals is dealt evenly to within one, so every stratum is, and the whole.
    """
    stratum = np.zeros(num_vertices, dtype=np.int64)
    for weight in seed_sets:
        # Numbered afresh after each set: fewer strata than vertices, so the product cannot overflow.
        _, listed = np.unique(weight.numpy(), return_inverse=True)
        _, stratum = np.unique(stratum * (listed.max() + 1) + listed, return_inverse=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(num_vertices)
    order = order[np.argsort(stratum[order], kind="stable")]
    # Which part is dealt first is drawn too, lest the low parts always get the odd vertices.
    turn = rng.permutation(num_parts)
    assignment = np.empty(num_vertices, dtype=np.int64)
    assignment[order] = turn[np.arange(num_vertices) % num_parts]
    return torch.from_numpy(assignment)


def _memory_of_metis(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Turns memory that runs out before, in or after METIS into an error that says what it needs."""
    num_ends = min(2 * graph.num_edges, _MOST_EDGE_ENDS)  # in both directions, of which repeats are one
    what = f"{graph.num_vertices} vertices and up to {num_ends} edge ends"
    return names_memory("METIS", what, _metis_bytes(graph.num_vertices, num_ends), _LESS_THAN_METIS)


def _metis_bytes(num_vertices: int, num_ends: int) -> int:
    """An estimate of the memory that METIS takes, with the copies of its input."""
    return 100 * num_vertices + 128 * num_ends


def _partition_with_metis(
    graph: Graph,
    num_parts: int,
    weights: _Weights,
    edge_weights: Tensor | None,
    weight_of_each: Tensor | None,
    tolerance: float,
    seed: int,
) -> Tensor:
    pymetis = _import_pymetis()
    idx_t = pymetis.zero_copy_dtype()
    # METIS adds these up, and now and then multiplies them by a little. In floating point: sums may overflow here.
    edge_total = 2.0 * graph.num_edges
    if edge_weights is not None:
        edge_total = 2.0 * float(edge_weights.double() @ graph.indptr.diff().double())
    if weight_of_each is not None:
        edge_total = 2.0 * float(weight_of_each.sum(dtype=torch.float64))
    if max(edge_total, graph.num_edges + graph.num_vertices) > np.iinfo(idx_t).max / 4:
        raise ValueError(
            f"the graph has {graph.num_vertices} vertices and {graph.num_edges} edges of total weight "
            f"{edge_total / 2:.0f}, too many for the {idx_t} integers of this METIS; scale edge_weights down, install a "
            "pymetis built with 64-bit integers, use method='random' or give an assignment"
        )
    indptr, indices, symmetric_weights = _symmetrise(graph, edge_weights, weight_of_each)
    if indices.numel() > _MOST_EDGE_ENDS:
        indptr, indices, symmetric_weights = _thin(indptr, indices, symmetric_weights)
    vertex_weights = _vertex_weights(graph)
    try:
        result = pymetis.part_graph(
            num_parts,
            # Copies where METIS's integers are 64 bits wide, as in pymetis's wheels; METIS's own memory is several times that.
            pymetis.CSRAdjacency(*(ids.numpy().astype(idx_t, copy=False) for ids in (indptr, indices))),
            vweights=vertex_weights.numpy().astype(idx_t, copy=False),
            eweights=None if symmetric_weights is None else symmetric_weights.numpy().astype(idx_t, copy=False),
            recursive=False,
            options=pymetis.Options(
                seed=seed % (2**31 - 1),  # goes to C's srand
                ufactor=max(1, round(1000 * tolerance / 2)),  # in thousandths; half of it leaves room for the rest
            ),
        )
    except (RuntimeError, MemoryError) as error:
        # METIS reports memory that ran out as it reports everything else, and prints the reason to standard error.
        what = f"{graph.num_vertices} vertices and {indices.numel()} edge ends in {num_parts} parts"
        needs = _metis_bytes(graph.num_vertices, indices.numel())
        raise PartitionerError(
            f"METIS failed ({error}), which most often means this: {out_of_memory('it', what, needs, _LESS_THAN_METIS)}"
        ) from error
    assignment = torch.from_numpy(np.array(result.vertex_part, dtype=np.int64))
    del result
    return _rebalanced(assignment, indptr, indices, symmetric_weights, weights, num_parts, tolerance)


def _partition_with_kaminpar(
    graph: Graph,
    num_parts: int,
    weights: _Weights,
    edge_weights: Tensor | None,
    weight_of_each: Tensor | None,
    tolerance: float,
    seed: int,
) -> Tensor:
    check_kaminpar()
    with (
        memory_of_kaminpar(graph.num_vertices, 2 * graph.num_edges),
        tempfile.TemporaryDirectory(prefix="salientpp-") as folder,
    ):
        path = Path(folder) / "graph.parhip"
        vertex_weights = _vertex_weights(graph)
        symmetric = write_undirected(path, graph, edge_weights, weight_of_each, vertex_weights)
        releaser(graph.indices)()  # not needed until it is done
        cluster = None
        if symmetric[1].dtype == torch.int32:
            cluster, path = coarsen(path, symmetric, vertex_weights, num_parts, seed)
        del vertex_weights
        # Half of the tolerance, as for METIS.
        assignment = partition_with_kaminpar(path, num_parts, tolerance / 2, seed)
        if cluster is not None:
            assignment = assignment.index_select(0, cluster)
        return _rebalanced(assignment, *symmetric, weights, num_parts, tolerance)


def _vertex_weights(graph: Graph) -> Tensor:
    """In-degrees, and 1 for vertices without in-edges, lest a partitioner take them for nothing."""
    return graph.indptr.diff().clamp_(min=1)


def _rebalanced(
    assignment: Tensor,
    indptr: Tensor,
    indices: Tensor,
    symmetric_weights: Tensor | None,
    weights: _Weights,
    num_parts: int,
    tolerance: float,
) -> Tensor:
    """The third step: within all limits, and then with a smaller cut."""
    for share, sweeps in ((_BALANCING_SHARE, 0), (1.0, _SWEEPS)):
        assignment = ops.rebalance_parts(
            indptr,
            indices,
            assignment,
            weights.table,
            _load_limits(weights, num_parts, share * tolerance),
            num_parts,
            sweeps,
            symmetric_weights,
        )
    return assignment


def _import_pymetis() -> Any:
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            f"method='metis' needs pymetis, which could not be imported ({error}); `pip install pymetis`, "
            "use method='random' or give an assignment"
        ) from error
    if not hasattr(pymetis, "CSRAdjacency"):
        raise ImportError(
            f"method='metis' needs pymetis >= 2025.2, got {pymetis.version}; `pip install --upgrade pymetis`, "
            "use method='random' or give an assignment"
        )
    return pymetis


def _symmetrise(
    graph: Graph, edge_weights: Tensor | None, weight_of_each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The undirected graph that partitioners want, without loops, each edge in the lists of both its ends.

    Args:
        edge_weights: int64 [N], of the edges into each vertex; None means 1 each.
        weight_of_each: instead, int32 or int64 [E].

    Returns:
        ``indptr`` int64 [N + 1], ``indices`` [E'] of the graph's dtype, ascending in each list, and the weight of each entry, int32 [E'] (int64 where
        they do not fit), or None where all are equal (METIS needs no array then, and 8 bytes per edge are many).
    """
    indptr, indices, weight = ops.symmetrise(graph.indptr, graph.indices, edge_weights, weight_of_each)
    return indptr, indices, weight if weight.numel() else None


def _thin(indptr: Tensor, indices: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The undirected graph with those edges only that are among the heaviest of either end."""
    kept = ops.keep_heaviest_edges(indptr, indices, _EDGES_KEPT, weight)
    place = torch.zeros(indices.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(kept, 0, out=place[1:])
    return place[indptr], indices[kept], None if weight is None else weight[kept]


def _load_limits(weights: _Weights, num_parts: int, tolerance: float) -> Tensor:
    """int64 [C]: the largest load allowed under each constraint."""
    limits = []
    for weight in weights.table.unbind(1):
        total = int(weight.sum())
        # Whole vertices cannot do better than ceil(mean), nor than the heaviest of them.
        limits.append(max(int((1 + tolerance) * total / num_parts), -(-total // num_parts), int(weight.max())))
    return torch.tensor(limits, dtype=torch.int64, device="cpu")
