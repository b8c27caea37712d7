"""Describes the dataset directory that is about to be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment
from salientpp.partitioning.numbering import VipNumbering
from salientpp.store.directory.description import Description, EdgeType, VertexType
from salientpp.store.directory.labels import num_classes_of
from salientpp.store.directory.task import Job
from salientpp.store.narrow import Loss, Narrow


def describe_directory(
    job: Job, numberings: Mapping[str | None, VipNumbering], assigned: PartitionAssignment
) -> Description:
    """The description, without the files; ``numberings`` are per type of vertices."""
    contents, graph, time_attr = job.contents, job.contents.graph, job.time_attr
    version = 2 if contents.is_hetero or any(contents.edge_splits.values()) or time_attr is not None else 1
    version = 3 if any(contents.narrow.values()) else version
    parts = dict(zip(graph.node_types, assigned.assignment.split(list(graph.num_vertices))))

    def counts(splits: Mapping[str, Tensor], part: Tensor) -> dict[str, list[int]]:
        return {name: torch.bincount(part[ids], minlength=assigned.num_parts).tolist() for name, ids in splits.items()}

    node_types = tuple(
        VertexType(
            name=name,
            prefix=f"n{number}." if version > 1 else "",
            num_vertices=size,
            offsets=numberings[name].book.offsets.tolist(),
            attributes={
                column: _describe(rows, contents.narrow[name].get(column))
                for column, rows in contents.node_columns[name].items()
            },
            splits=counts(contents.splits[name], parts[name]),
            num_classes=num_classes_of(contents.node_columns[name].get("y")),
            replicated=name in contents.replicated,
        )
        for number, (name, size) in enumerate(zip(graph.node_types, graph.num_vertices))
    )
    edge_types = tuple(
        EdgeType(
            name=name,
            prefix=f"e{number}." if version > 1 else "",
            num_edges=relation.indices.numel(),
            attributes={column: _describe(rows) for column, rows in contents.edge_columns[name].items()},
            splits=counts(
                contents.edge_splits[name], _part_of_edges(relation, parts[graph.node_types[relation.target]])
            )
            if contents.edge_splits[name]
            else {},
        )
        for number, (name, relation) in enumerate(zip(graph.edge_types, graph.relations))
    )
    return Description(
        version=version,
        num_parts=assigned.num_parts,
        node_types=node_types,
        edge_types=edge_types,
        time_attr=time_attr,
        num_neighbors=job.fanouts,
        batch_size=job.batch_size,
        seeds=contents.seeds,
        quality={name: getattr(assigned, name) for name in ("edge_cut", "edge_cut_fraction", "balance")},
        partitioning=job.options.to_json(),
    )


def _part_of_edges(relation: Relation, part: Tensor) -> Tensor:
    """int64 [E]: by the user's number of an edge, the part that owns its target."""
    in_lists = torch.repeat_interleave(part, relation.indptr.diff())
    if relation.edge_id is None:
        return in_lists
    of_user = torch.empty_like(in_lists)
    of_user[relation.edge_id] = in_lists
    return of_user


def _describe(rows: Tensor, stored: tuple[Narrow, Loss] | None = None) -> dict[str, Any]:
    """What the manifest says of an attribute, and of how it is ``stored`` narrower."""
    entry: dict[str, Any] = {"dtype": str(rows.dtype).removeprefix("torch."), "row_shape": list(rows.shape[1:])}
    if stored is not None:
        narrow, loss = stored
        entry["stored_as"] = {
            "format": narrow.format,
            "row_bytes": narrow.row_bytes,
            "largest_error": loss.largest,
            "relative_rms_error": loss.relative_rms,
        }
    return entry
