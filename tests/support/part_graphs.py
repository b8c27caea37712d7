"""Cuts the lists of some parts out of a graph in memory, as a directory whose topology is stored in parts gives them to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from salientpp.graph.part import PartGraph, PartLists
from salientpp.graph.relation import Relation
from salientpp.graph.typed import TypedGraph


def cut_parts(graph: TypedGraph, offsets: Sequence[Sequence[int]], parts: range) -> PartGraph:
    """The lists of these parts.

    Args:
        offsets: per vertex type K + 1 numbers; part p owns the vertices from ``offsets[p]`` to ``offsets[p + 1] - 1``.
    """
    return PartGraph(
        graph.node_types,
        graph.num_vertices,
        graph.edge_types,
        tuple(
            tuple(cut_lists(relation, *offsets[relation.target][part : part + 2]) for part in parts)
            for relation in graph.relations
        ),
        graph.node_time,
        graph.clock,
    )


def cut_lists(relation: Relation, first: int, last: int) -> PartLists:
    """The lists of the targets from ``first`` to ``last`` - 1."""
    indptr = relation.indptr[first : last + 1]
    edges = slice(int(indptr[0]), int(indptr[-1]))
    cut = {
        name: None if (array := getattr(relation, name)) is None else array[edges].clone()
        for name in ("indices", "edge_weight", "edge_time", "source_time")
    }
    lists = replace(relation, indptr=indptr - indptr[0], edge_id=None, links=None, **cut)
    return PartLists(lists, first, edges.start)
