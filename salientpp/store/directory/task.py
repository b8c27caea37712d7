"""Identifies a call of ``partition``: its options and its data, by which a later call knows whether it goes on with the same job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from salientpp.partitioning.options import PartitionOptions
from salientpp.store.directory.contents import Contents
from salientpp.store.directory.identity import identify


def task_of(
    contents: Contents,
    num_parts: int,
    options: PartitionOptions,
    fanouts: list[list[int]],
    batch_size: int,
    time_attr: str | None,
) -> dict[str, Any]:
    """JSON that tells this job from others. The options are decided."""
    return {
        "num_parts": num_parts,
        "method": _named(options.method),
        "edge_weights": options.edge_weights,
        "order": options.order,
        "refine": options.refine,
        "num_neighbors": fanouts,
        "batch_size": batch_size,
        "seeds": contents.seeds,
        "replicate": sorted(map(str, contents.replicated)),
        "time_attr": time_attr,
        "store_as": [
            [type_, name, narrow.format] for type_, of in contents.narrow.items() for name, (narrow, _) in of.items()
        ],
        "tolerance": options.tolerance,
        "seed": options.seed,
        "data": _identify(contents),
    }


def _named(method: Any) -> Any:
    """What tells methods apart, as JSON."""
    if isinstance(method, Mapping):
        return {str(name): _named(parts) for name, parts in method.items()}
    return identify(method.detach().cpu()) if isinstance(method, Tensor) else str(method)


def _identify(contents: Contents) -> list[list[Any]]:
    """What tells the data apart from other data: the name of every array and what identifies it."""
    graph, found = contents.graph, []
    for edge_type, relation in zip(graph.edge_types, graph.relations):
        of = "" if edge_type is None else f" of {edge_type}"
        lists = {"edges": relation.indices, "ends of edges": relation.indptr, "order of edges": relation.edge_id}
        found += [(f"{name}{of}", array) for name, array in lists.items() if array is not None]
        found += [(f"{name}{of}", array) for name, array in contents.edge_columns[edge_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.edge_splits[edge_type].items()]
    for node_type in graph.node_types:
        of = "" if node_type is None else f" of {node_type!r}"
        found += [(f"{name}{of}", array) for name, array in contents.node_columns[node_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.splits[node_type].items()]
    sizes = [[f"number of {name or 'vertices'}", n] for name, n in zip(graph.node_types, graph.num_vertices)]
    return [*sizes, *sorted([name, identify(array)] for name, array in found)]
