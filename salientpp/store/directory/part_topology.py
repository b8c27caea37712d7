"""Reads the neighbour lists of some parts of a dataset directory, and the attributes of their edges, without opening files of other parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from salientpp.graph.clock import Clock
from salientpp.graph.from_pyg import words_for
from salientpp.graph.part import PartGraph, PartLists
from salientpp.graph.relation import EdgeReader, Relation, one_each
from salientpp.store.directory.columns import StoredRows, no_rows, stored_rows
from salientpp.store.directory.description import EdgeType, check_times_of_edges
from salientpp.store.directory.topology import Topology


@dataclass(frozen=True, eq=False)
class PartEdgeRows:
    """Attributes of the edges of one type that lead into some consecutive parts.

    Attributes:
        first_edge: number of the first edge among all edges of the type. Row i belongs to the edge ``first_edge + i``.
        rows: attribute name -> rows [e, ...], memory-mapped. Encoded rows are decoded when taken.
    """

    first_edge: int
    rows: Mapping[str, StoredRows]


def part_edge_rows(topology: Topology, edges: EdgeType, stored: range) -> PartEdgeRows:
    """Returns the attributes of the edges that lead into the consecutive parts ``stored``."""
    rows = {
        name: stored_rows(
            edges,
            name,
            [topology.column_of_part(edges, name, part_id) for part_id in stored]
            or [no_rows(topology.arrays, edges, name)],
        )
        for name in edges.attributes
    }
    return PartEdgeRows(topology.edges_into(edges, stored)[0], rows)


def read_part_graph(topology: Topology, stored: range, time_attr: str | None, weight_attr: str | None) -> PartGraph:
    """Reads the neighbour lists of consecutive parts; see :meth:`salientpp.PartitionedGraph.part_graph`."""
    named = topology.description
    topology.check_attributes(time_attr, weight_attr)
    try:
        clock, node_time = _clock(topology, time_attr)
        lists = tuple(
            tuple(
                _lists(topology, edges, part_id, time_attr, weight_attr, clock, node_time)
                for part_id in stored or [None]
            )
            for edges in named.edge_types
        )
    except ValueError as error:
        raise type(error)(f"{topology.arrays.root}: {error}") from None
    return PartGraph(
        node_types=tuple(vertices.name for vertices in named.node_types),
        num_vertices=tuple(vertices.num_vertices for vertices in named.node_types),
        edge_types=tuple(edges.name for edges in named.edge_types),
        lists=lists,
        node_time=tuple(node_time.get(vertices.name) for vertices in named.node_types),
        clock=clock,
    )


def _clock(topology: Topology, time_attr: str | None) -> tuple[Clock | None, dict[str | None, Tensor]]:
    """Returns the clock, which turns times into comparable integers, and the vertex times in these: int64 [N] per type with times."""
    if time_attr is None:
        return None, {}
    node_time = {
        name: one_each(
            time, topology.description.vertices(name).num_vertices, f"time_attr={time_attr!r} of {words_for(name)}"
        )
        for name, time in topology.node_times(time_attr).items()
    }
    if node_time:
        clock = Clock.of(list(node_time.values()), time_attr)
        return clock, {name: clock.read(time, time_attr) for name, time in node_time.items()}
    # Times of one kind need no table of all times, which no part has.
    dtypes = topology.description.dtypes_of_edges(time_attr)
    check_times_of_edges(dtypes, time_attr)
    return Clock(any(dtype.is_floating_point for dtype in dtypes.values())), {}


def _lists(
    topology: Topology,
    edges: EdgeType,
    part_id: int | None,
    time_attr: str | None,
    weight_attr: str | None,
    clock: Clock | None,
    node_time: Mapping[str | None, Tensor],
) -> PartLists:
    """Reads the lists of one relation and one part on disk. None: a rank that holds no part has no lists, with the dtypes of those on disk."""
    named, targets = topology.description, topology.description.vertices(edges.target)
    names = [vertices.name for vertices in named.node_types]
    first_target, end = (targets.num_vertices,) * 2 if part_id is None else targets.book.range_of(part_id)

    def column(name: str) -> Tensor:
        return (
            no_rows(topology.arrays, edges, name) if part_id is None else topology.column_of_part(edges, name, part_id)
        )

    words = f"{words_for(edges.name, 'the edges')} into part {part_id}"
    is_sorted = time_attr is not None and time_attr == named.time_attr
    reader = EdgeReader(words, named.vertices(edges.source).num_vertices, end - first_target, is_sorted, False)
    weight, edge_time = None, None
    if weight_attr is not None and weight_attr in edges.attributes:
        weight = column(weight_attr)
    if clock is not None and time_attr is not None and time_attr in edges.attributes:
        edge_time = clock.read(column(time_attr), time_attr)
    lists = _no_lists(topology, edges) if part_id is None else topology.lists_of_part(edges, part_id)
    given = {"lists": lists, "weight": weight}
    arrays = reader.read(given, node_time.get(edges.source), edge_time)
    relation = Relation(names.index(edges.source), names.index(edges.target), *arrays)
    first_edge = edges.num_edges if part_id is None else topology.edges_into(edges, range(part_id, part_id + 1))[0]
    return PartLists(relation, first_target, first_edge)


def _no_lists(topology: Topology, edges: EdgeType) -> tuple[Tensor, Tensor]:
    """Returns the neighbour lists of no vertices, with the dtypes of those on disk."""
    indices = torch.from_numpy(np.empty(0, topology.arrays.files[edges.indices_file(0)]["dtype"]))
    return torch.zeros(1, dtype=torch.int64, device="cpu"), indices
