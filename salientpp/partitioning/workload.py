"""Assigns the vertices of a graph to parts for a workload, with edge weights and refinement by VIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.partitioning.assign import PartitionAssignment, assign_parts, check_num_parts
from salientpp.partitioning.balance import loads_and_limits
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.refine import refine_by_vip
from salientpp.vip.inclusion import draw_weights


def assign_for(
    graph: Graph,
    num_parts: int,
    options: PartitionOptions,
    *,
    splits: Mapping[str, Tensor],
    seeds: Tensor | None,
    num_neighbors: Sequence[int],
    batch_size: int,
) -> PartitionAssignment:
    """Assigns every vertex to one of K parts for a workload.

    Args:
        options: see :class:`~salientpp.partitioning.options.PartitionOptions`. VIP weights come from :func:`~salientpp.vip.inclusion.draw_weights`, for steps
            in which each of K ranks draws a batch.
        splits: name to int64 ids, balanced as ``seed_sets`` of :func:`~salientpp.partitioning.assign.assign_parts`.
        seeds: int64 ids that batches start from; None: all vertices.

    Raises:
        ValueError, ImportError, PartitionerError: as in ``assign_parts``; or ``refine`` is True and refinement is impossible.
    """
    check_num_parts(num_parts)
    seeds = torch.arange(graph.num_vertices, device="cpu") if seeds is None else seeds
    options, _ = options.decided(num_parts=num_parts, num_edges=graph.num_edges, num_seeds=seeds.numel())
    weights = None
    if options.weights_used == "vip":
        # Use a separate graph object, so that its transpose is not kept while METIS needs the memory.
        own = Graph.trusted(graph.indptr, graph.indices)
        weights = draw_weights(own, seeds, num_neighbors, batch_size * num_parts)
        del own
    found = assign_parts(
        graph,
        num_parts,
        method=options.method,  # type: ignore[arg-type]  # checked there
        seed_sets=splits,
        edge_weights=weights,
        tolerance=options.tolerance,
        seed=options.seed,
    )
    if not options.refine:
        return found
    del weights
    loads, limits = loads_and_limits(graph, num_parts, splits, options.tolerance)
    refined = refine_by_vip(
        Graph.trusted(graph.indptr, graph.indices), found.assignment, num_parts, seeds=seeds, num_neighbors=num_neighbors, batch_size=batch_size,
        weights=loads, limits=limits,
    )  # fmt: skip
    return assign_parts(graph, num_parts, method=refined, seed_sets=splits)
