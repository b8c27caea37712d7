"""Checks that a loader can use ``partial_aggregation``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.sampler.base import SubgraphType

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.source import BatchSource
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import WIDE
from salientpp.store.rows import RowSource


def edge_rows_of(source: BatchSource) -> Mapping[str, RowSource]:
    """Returns the edge attributes that this host holds, which may serve as weights. The graph has one edge type."""
    assert isinstance(source.template, PartitionTemplate)  # check_partial has refused others
    return source.template.edge_rows[None]


def first_edge_of(source: BatchSource) -> int:
    """Returns the id of the edge that row 0 of :func:`edge_rows_of` belongs to."""
    assert isinstance(source.template, PartitionTemplate)
    return source.template.first_edge.get(None, 0)


def check_partial(data: Any, source: BatchSource, given: Any, weight: Any) -> None:
    """Raises ValueError if a loader's batches cannot have sums, or cannot have sums with these weights."""
    why = why_no_sums(data, source)
    if why is not None:
        raise ValueError(f"partial_aggregation={given!r} {why}")
    if weight is not None:
        edge_rows = edge_rows_of(source)
        if not isinstance(weight, str) or weight not in edge_rows:
            known = ", ".join(edge_rows) or "none"
            raise ValueError(
                f"partial_aggregation['weight'] must name an edge attribute of {data.root}, which has {known}; got {weight!r}"
            )
        rows = edge_rows[weight]
        if math.prod(rows.shape[1:]) != 1 or rows.dtype == torch.bool or rows.dtype.is_complex:
            dtype = str(rows.dtype).removeprefix("torch.")
            raise ValueError(
                f"partial_aggregation['weight']={weight!r} must be one real number per edge, [{rows.shape[0]}], got {dtype} {list(rows.shape)}"
            )


def why_no_sums(data: Any, source: BatchSource) -> str | None:
    """Returns the reason why batches cannot have sums of rows, or None."""
    if not isinstance(data, PartitionedGraph):
        return "applies only to a partitioned graph, whose rows travel between ranks; rows of an object in memory do not travel; leave it out"
    sampler = source.sampler
    assert isinstance(sampler, NeighborSampler)  # sampler_of_part has refused others
    if sampler.is_hetero or data.is_hetero:
        return f"needs a graph with one type of vertices, but {data.root} has several; leave it out"
    if sampler.subgraph_type != SubgraphType.directional:
        needing = f"batches with subgraph_type={sampler.subgraph_type.value!r}"
        return f"replaces edges of the last hop by sums, but {needing} need these edges; leave one of them out"
    if sampler.disjoint:
        return "excludes disjoint and time_attr, because several trees may share vertices of the last hop; leave one of them out"
    if len(source.exchanged) != 1:
        names = [name for _, name in source.exchanged]
        return f"sums exactly one attribute of vertices, got columns={names}; pass one name"
    (column,) = source.exchanged
    if column in source.narrow:
        travel = f"the rows of {column[1]!r} travel as {source.narrow[column].format} (store_as, send_as)"
        return f"sums rows as they are stored, but {travel}; leave one of them out"
    if source.rows_of(column).dtype not in WIDE:
        are = f"the rows of {column[1]!r} are {str(source.rows_of(column).dtype).removeprefix('torch.')}"
        return f"sums floating-point rows (float64, float32, float16, bfloat16), but {are}; leave it out"
    return None
