"""Samples of a ``TypedGraph`` by the slow reference, and tensors as lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reference
from torch import Tensor

from salientpp.graph.typed import TypedGraph


def as_lists(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else None if value is None else [as_lists(v) for v in value]


def typed_reference(
    graph: TypedGraph,
    fanouts: Any,
    seeds: Mapping[Any, Tensor],
    key: int,
    seed_time: Mapping[Any, Tensor] | None,
    window: int | None = None,
    **options: bool,
) -> tuple:
    """Returns the reference's sample; ``seeds`` and ``seed_time`` are by vertex type, ``options`` as in ``reference.sample_typed_neighbors``."""
    relations = [
        reference.Relation(
            r.source,
            r.target,
            *as_lists(
                [r.indptr, r.indices, r.edge_id if r.links is None else r.links >> 32, r.edge_weight, r.edge_time]
            ),
        )
        for r in graph.relations
    ]
    first, total = {}, 0
    for name, ids in seeds.items():
        first[name], total = total, total + len(ids)
    times = [None if seed_time is None else seed_time.get(name) for name in graph.node_types]
    since = {} if window is None else {"seed_since": as_lists([None if t is None else t - window for t in times])}
    return reference.sample_typed_neighbors(
        relations,
        [as_lists(seeds[name]) if name in seeds else [] for name in graph.node_types],
        fanouts,
        key,
        node_time=as_lists(graph.node_time),
        seed_time=as_lists(times),
        first_tree=[first.get(name, 0) for name in graph.node_types],
        **since,
        **options,
    )
