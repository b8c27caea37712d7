"""Describes the dataset directory that is about to be written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment
from salientpp.partitioning.numbering import VipNumbering
from salientpp.partitioning.options import PartitionOptions
from salientpp.store.directory.contents import Contents, describe
from salientpp.store.directory.description import Description, EdgeType, VertexType
from salientpp.store.directory.labels import num_classes_of


def describe_directory(
    contents: Contents,
    numberings: Mapping[str | None, VipNumbering],
    assigned: PartitionAssignment,
    time_attr: str | None,
    fanouts: list[list[int]],
    batch_size: int,
    options: PartitionOptions,
) -> Description:
    """The description, without the files.

    Args:
        numberings: per type of vertices.
        fanouts: per relation.
        options: as they were decided for this graph.
    """
    graph = contents.graph
    version = 2 if contents.is_hetero or any(contents.edge_splits.values()) or time_attr is not None else 1
    version = 3 if any(contents.narrow.values()) else version
    parts = {name: numbering.part_of_old() for name, numbering in numberings.items()}

    def counts(splits: Mapping[str, Tensor], part: Tensor) -> dict[str, list[int]]:
        return {name: torch.bincount(part[ids], minlength=assigned.num_parts).tolist() for name, ids in splits.items()}

    node_types = tuple(
        VertexType(
            name=name,
            prefix=f"n{number}." if version > 1 else "",
            num_vertices=size,
            offsets=numberings[name].book.offsets.tolist(),
            attributes={
                column: describe(rows, contents.narrow[name].get(column))
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
            attributes={column: describe(rows) for column, rows in contents.edge_columns[name].items()},
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
        num_neighbors=fanouts,
        batch_size=batch_size,
        seeds=contents.seeds,
        quality={
            "edge_cut": assigned.edge_cut,
            "edge_cut_fraction": assigned.edge_cut_fraction,
            "balance": dict(assigned.balance),
        },
        partitioning=options.to_json(),
    )


def _part_of_edges(relation: Relation, part: Tensor) -> Tensor:
    """int64 [E]: by the user's number of an edge, the part that owns its target."""
    in_lists = torch.repeat_interleave(part, relation.indptr.diff())
    if relation.edge_id is None:
        return in_lists
    of_user = torch.empty_like(in_lists)
    of_user[relation.edge_id] = in_lists
    return of_user
