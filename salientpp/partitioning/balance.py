"""Keeps the loads of parts within limits: computes what every vertex adds to a load, and moves vertices until no load exceeds its limit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.ids import first_outside
from salientpp.partitioning.undirected import Undirected

#: Number of refinement sweeps over all vertices after balancing. On real graphs, further sweeps move almost nothing.
_SWEEPS = 8

#: Balancing aims below the limits by a tenth of the tolerance. It would otherwise end with parts that are exactly full, which
#: leaves refinement no room. If single moves cannot quite meet this aim, the margin also absorbs what is missing.
_BALANCING_SHARE = 0.9

#: The default loads besides the seed sets: each vertex counts once, and with its in-degree.
_LOADS = ("vertices", "edges")


class VertexLoads:
    """Tells what each vertex adds to the loads of its part. :func:`~salientpp.partitioning.assign.assign_parts` explains ``loads`` and ``seed_sets``.

    Attributes:
        seed_sets: name to int64 ids, without empty sets; a vertex counts as often as it is listed.
        names: names of all loads, seed sets last.
    """

    def __init__(
        self, graph: Graph, seed_sets: Mapping[str, Tensor], loads: Mapping[str, Tensor] | None = None
    ) -> None:
        for name, load in (loads or {}).items():
            if (load.dtype, list(load.shape)) != (torch.int64, [graph.num_vertices]) or bool((load < 0).any()):
                raise ValueError(
                    f"loads[{name!r}] must be int64 [{graph.num_vertices}] of numbers >= 0, got {load.dtype} {list(load.shape)}"
                )
        self.graph, self.loads, self.seed_sets = graph, loads, dict[str, Tensor]()
        others = _LOADS if loads is None else tuple(loads)
        for name, ids in seed_sets.items():
            if name in others:
                raise ValueError(f"a seed set may not be called {name!r}: {name} are always balanced; rename the set")
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
                self.seed_sets[name] = ids
        self.names = [*others, *self.seed_sets]

    @cached_property
    def table(self) -> Tensor:
        """Contribution of each vertex to each of the C loads, int64 [N, C]. It is made on first use, because partitioners need the memory before."""
        table = torch.ones((self.graph.num_vertices, len(self.names)), dtype=torch.int64, device="cpu")
        for column, name in zip(table.unbind(1), self.names):
            if name in self.seed_sets:
                column.copy_(torch.bincount(self.seed_sets[name], minlength=len(table)))
            elif self.loads is not None:
                column.copy_(self.loads[name])
            elif name == "edges":
                column.copy_(self.graph.indptr.diff())
        return table


def _load_limits(weights: VertexLoads, num_parts: int, tolerance: float) -> Tensor:
    """Returns the largest value that each of a part's C loads (vertices, edges, seeds of a set, or the user's own) may have, int64 [C]."""
    limits = []
    for weight in weights.table.unbind(1):
        total = int(weight.sum())
        # Vertices are whole, so no limit can be below ceil(mean) or below the heaviest vertex.
        limits.append(max(int((1 + tolerance) * total / num_parts), -(-total // num_parts), int(weight.max())))
    return torch.tensor(limits, dtype=torch.int64, device="cpu")


def loads_and_limits(
    graph: Graph, num_parts: int, seed_sets: Mapping[str, Tensor], tolerance: float
) -> tuple[Tensor, Tensor]:
    """Returns what every vertex adds to the C loads of its part, int64 [N, C], and the limits of these loads, int64 [C].

    The loads are vertices, edges (in-degrees) and the seeds of each set.
    """
    weights = VertexLoads(graph, seed_sets)
    return weights.table, _load_limits(weights, num_parts, min(tolerance, num_parts))


def weight_of_vertices(graph: Graph) -> Tensor:
    """Returns in-degrees, and 1 for vertices without in-edges, so that no vertex has weight 0 for a partitioner."""
    return graph.indptr.diff().clamp_(min=1)


def rebalanced(assignment: Tensor, lists: Undirected, weights: VertexLoads, num_parts: int, tolerance: float) -> Tensor:
    """Moves vertices until all limits hold, and then so that the cut gets smaller. Returns the parts, int64 [N]."""
    indptr, indices, edge_weights = lists
    for share, sweeps in ((_BALANCING_SHARE, 0), (1.0, _SWEEPS)):
        limits = _load_limits(weights, num_parts, share * tolerance)
        assignment = ops.rebalance_parts(
            indptr, indices, assignment, weights.table, limits, num_parts, sweeps, edge_weights
        )
    return assignment
