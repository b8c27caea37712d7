"""Partitions a graph with METIS.

METIS (Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998) is called through pymetis, which takes one weight per vertex (and silently misreads several).
The weight is the in-degree, unless the caller gives another. The 'edges' constraint is the expensive one to repair, because moving its load means moving
well-connected vertices. Numbers of vertices and seeds are repaired by moving vertices with few links.

METIS holds all graphs of its coarsening together. They take about 110 bytes per edge end if they stay dense. So for graphs with more than 2^26 edge ends,
METIS and rebalancing get only the 32 heaviest edges of every vertex: an edge stays if either end keeps it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.partitioning.balance import VertexLoads, rebalanced, weight_of_vertices
from salientpp.partitioning.errors import PartitionerError, names_memory, out_of_memory
from salientpp.partitioning.undirected import Undirected

#: Graphs with more edge ends than the first number are thinned to the second number of edges per vertex. With 16, the cut of a generated graph grew by a third.
_MOST_EDGE_ENDS = 2**26
_EDGES_KEPT = 32

#: Methods that need less memory than METIS.
_LESS_THAN_METIS = "a method that needs less ('kaminpar', an extra: 10 to 50 bytes for each edge end; 'random': a few numbers for each vertex)"


def partition_with_metis(
    graph: Graph,
    num_parts: int,
    loads: VertexLoads,
    edge_weights: Tensor | None,
    weight_of_each: Tensor | None,
    tolerance: float,
    seed: int,
    vertex_weights: Tensor | None = None,
) -> Tensor:
    """Assigns vertices to parts with METIS, then moves vertices until all loads are within their limits. Returns the parts, int64 [N].

    Args:
        vertex_weights: weights that METIS balances, int64 [N], each >= 1; None: in-degrees.

    Raises the errors of :func:`~salientpp.partitioning.assign.assign_parts`.
    """
    num_ends = min(2 * graph.num_edges, _MOST_EDGE_ENDS)  # both directions; repeated edges count once
    what = f"{graph.num_vertices} vertices and up to {num_ends} edge ends"
    with names_memory("METIS", what, _metis_bytes(graph.num_vertices, num_ends), _LESS_THAN_METIS):
        lists = _undirected(graph, edge_weights, weight_of_each)
        weights = weight_of_vertices(graph) if vertex_weights is None else vertex_weights
        assignment = _cut(lists, weights, num_parts, tolerance, seed)
        return rebalanced(assignment, lists, loads, num_parts, tolerance)


def _undirected(graph: Graph, edge_weights: Tensor | None, weight_of_each: Tensor | None) -> Undirected:
    """Returns the graph for METIS: the result of :func:`symmetrise`, thinned if it is large."""
    idx_t = _import_pymetis().zero_copy_dtype()
    # METIS adds the weights up, and sometimes multiplies them by a small factor. Use floating point, because sums may overflow here.
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
    lists = symmetrise(graph, edge_weights, weight_of_each)
    return _thin(*lists) if lists[1].numel() > _MOST_EDGE_ENDS else lists


def _cut(lists: Undirected, vertex_weights: Tensor, num_parts: int, tolerance: float, seed: int) -> Tensor:
    """Runs METIS; returns the parts of the vertices, int64 [N]."""
    pymetis = _import_pymetis()
    idx_t, num_vertices = pymetis.zero_copy_dtype(), vertex_weights.numel()
    indptr, indices, edge_weights = lists
    try:
        result = pymetis.part_graph(
            num_parts,
            # These are copies if METIS's integers have 64 bits, as in pymetis's wheels; METIS itself takes several times that memory.
            pymetis.CSRAdjacency(*(ids.numpy().astype(idx_t, copy=False) for ids in (indptr, indices))),
            vweights=vertex_weights.numpy().astype(idx_t, copy=False),
            eweights=None if edge_weights is None else edge_weights.numpy().astype(idx_t, copy=False),
            recursive=False,
            options=pymetis.Options(
                seed=seed % (2**31 - 1),  # passed to C's srand
                ufactor=max(
                    1, round(1000 * tolerance / 2)
                ),  # in thousandths; the other half of the tolerance leaves room for the other loads
            ),
        )
    except (RuntimeError, MemoryError) as error:
        # METIS reports an out-of-memory error like any other error, and prints the reason to standard error.
        what = f"{num_vertices} vertices and {indices.numel()} edge ends in {num_parts} parts"
        needs = _metis_bytes(num_vertices, indices.numel())
        raise PartitionerError(
            f"METIS failed ({error}), most often because {out_of_memory('it', what, needs, _LESS_THAN_METIS)}"
        ) from error
    return torch.from_numpy(np.array(result.vertex_part, dtype=np.int64))


def _metis_bytes(num_vertices: int, num_ends: int) -> int:
    """Returns an estimate of the bytes that METIS takes, with the copies of its input."""
    return 100 * num_vertices + 128 * num_ends


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


def symmetrise(graph: Graph, edge_weights: Tensor | None, weight_of_each: Tensor | None = None) -> Undirected:
    """Returns the undirected graph of :func:`salientpp.ops.symmetrise`."""
    indptr, indices, weight = ops.symmetrise(graph.indptr, graph.indices, edge_weights, weight_of_each)
    return indptr, indices, weight if weight.numel() else None


def _thin(indptr: Tensor, indices: Tensor, weight: Tensor | None) -> Undirected:
    """Returns the undirected graph without edges that are light for both of their ends, so that METIS needs less memory.

    Each vertex keeps its :data:`_EDGES_KEPT` heaviest edges; an edge stays if either end keeps it.
    """
    kept = ops.keep_heaviest_edges(indptr, indices, _EDGES_KEPT, weight)
    place = torch.zeros(indices.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(kept, 0, out=place[1:])
    return place[indptr], indices[kept], None if weight is None else weight[kept]
