"""Describes staged vertices, edges and columns as a source that can be converted, and reports what became of rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.converted.pieces import EdgeName, EdgePiece, EdgeSource, Rows, Source, Split, Vertices
from salientpp.datasets.tabular.columns import ColumnPlan
from salientpp.datasets.tabular.description import EdgeTable, NodeTable, TableGraph
from salientpp.datasets.tabular.doors import Table
from salientpp.datasets.tabular.encodings import (
    SECOND,
    StagedColumns,
    encoded_rows,
    examine_columns,
    joined_rows,
    split_mask_rows,
)
from salientpp.datasets.tabular.frame_columns import FRAME, examine_framed, frame_of, framed_rows
from salientpp.datasets.tabular.joining import JoinedEdges, SortedEdges
from salientpp.datasets.tabular.keyed import key_text
from salientpp.datasets.tabular.numbering import NumberedVertices
from salientpp.store.key_table import KeyTable

#: Reason why the columns in ``Table.left_out`` are left out.
_INDEX = "it is an index without a name, which pandas stored"

#: Facts about a column that a report leaves out.
_NOT_SHOWN = ("categories", "counts", "has_fractions", "has_negative", "type")

#: Microseconds -> name of the unit.
_UNITS = {SECOND: "second", 1: "microsecond"}


@dataclass(frozen=True)
class StagedGraph:
    """Source of the graph, and the report: JSON that says what became of rows and columns."""

    source: Source
    report: Mapping[str, Any]


def staged_columns(
    graph: TableGraph,
    plans: Sequence[ColumnPlan],
    vertices: Mapping[str, NumberedVertices],
    joined: Sequence[JoinedEdges],
) -> dict[str, StagedColumns]:
    """Returns the columns of each entry of the description, by its title. ``plans`` has vertex types first, then relations."""
    columns = {}
    for node, plan in zip(graph.nodes, plans):
        columns[node.title] = StagedColumns(plan, vertices[node.name].columns, _VertexNames(node.name, vertices))
    for edge, plan, each in zip(graph.edges, plans[len(graph.nodes) :], joined):
        names = _EdgeNames(edge.name, each.forward, vertices)
        columns[edge.title] = StagedColumns(plan, each.forward.columns, names)
    return columns


@dataclass(frozen=True)
class _VertexNames:
    """Names a vertex by its key, for errors."""

    type_: str
    vertices: Mapping[str, NumberedVertices]

    def __call__(self, vertex: int) -> str:
        keys = KeyTable(self.vertices[self.type_].keys.path).rows([vertex])
        return f"{self.type_} {key_text(keys.column_names, keys.columns, 0)}"


@dataclass(frozen=True)
class _EdgeNames:
    """Names an edge by the keys of its ends, for errors."""

    name: tuple[str, str, str]
    edges: SortedEdges
    vertices: Mapping[str, NumberedVertices]

    def __call__(self, edge: int) -> str:
        first = 0
        for batch in self.edges.ends.batches(["source", "target"]):
            if edge < first + batch.num_rows:
                ends = [batch.column(end)[edge - first].as_py() for end in ("source", "target")]
                types = (self.name[0], self.name[2])
                source, target = (_VertexNames(type_, self.vertices)(end) for type_, end in zip(types, ends))
                return f"edge from {source} to {target}"
            first += batch.num_rows
        return f"edge {edge}"


def examine_table(staged: StagedColumns, known: Mapping[str, Any] | None = None, unit: int = 0) -> dict[str, Any]:
    """Finds the facts that the encodings of the columns of an entry need: those of :func:`examine_columns`, and ``tf`` if columns are in a frame.

    ``known`` has the facts of an earlier graph, whose times have a unit of ``unit`` microseconds. Then they are returned, after the columns were compared
    with them. Raises ValueError if a value cannot be encoded.
    """
    facts = examine_columns(staged, known, unit)
    if staged.plan.framed:
        facts[FRAME] = examine_framed(staged, known[FRAME] if known else None)
    return facts


# --- the source -------------------------------------------------------------------------------------------


def describe_source(
    graph: TableGraph,
    columns: Mapping[str, StagedColumns],
    facts: Mapping[str, Mapping[str, Any]],
    vertices: Mapping[str, NumberedVertices],
    joined: Sequence[JoinedEdges],
    tables: Mapping[str, Table],
    task: str,
    unit: int,
) -> StagedGraph:
    """Returns the graph as a source, and its report.

    ``columns``, ``facts`` (of :func:`examine_table`) and ``tables`` are by the titles of entries. ``task`` identifies the contents of the tables, and all
    times have a unit of ``unit`` microseconds.
    """
    nodes: dict[str | None, Vertices] = {}
    for node in graph.nodes:
        staged, of_type, numbered = columns[node.title], facts[node.title], vertices[node.name]
        nodes[node.name] = Vertices(
            numbered.num_vertices,
            attributes_of(staged, of_type, unit),
            _splits(staged),
            keys=numbered.keys.path,
            frames={FRAME: frame_of(of_type[FRAME])} if FRAME in of_type else {},
        )
    edges: dict[EdgeName, EdgeSource] = {}
    for edge, each in zip(graph.edges, joined):
        staged = columns[edge.title]
        edges[edge.name] = _edges(each.forward, staged, facts[edge.title], unit)
        if each.backward is not None:
            names = _EdgeNames(edge.reverse_name, each.backward, vertices)
            inverse = StagedColumns(staged.plan, each.backward.columns, names)
            edges[edge.reverse_name] = _edges(each.backward, inverse, facts[edge.title], unit)
    origin = {
        "description": graph.recorded,
        "folder": graph.folder,
        "time_unit": _UNITS.get(unit),
        "tables": {
            title: {
                "from": table.facts(),
                **facts[title],
                "left_out": {**dict.fromkeys(table.left_out, _INDEX), **columns[title].plan.left_out},
            }
            for title, table in tables.items()
        },
    }
    source = Source(graph.name, nodes, edges, made_of={"tables": task}, origin=origin)
    return StagedGraph(source, _report(graph, origin, facts, vertices, joined, tables))


def unit_of(facts: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the microseconds of the unit of all times: a second, or a microsecond if a time has a fraction of a second. 0: the graph has no times."""
    found = [
        column["has_fractions"]
        for each in facts.values()
        for column in each["columns"].values()
        if "has_fractions" in column
    ]
    return (1 if any(found) else SECOND) if found else 0


def attributes_of(staged: StagedColumns, facts: Mapping[str, Any], unit: int) -> dict[str, Rows]:
    """Returns the rows of all attributes by name, and those of the tensors of ``tf``."""
    attributes = {
        planned.attribute: encoded_rows(staged, planned, facts["columns"][planned.column], unit)
        for planned in staged.plan.columns
    }
    if "x" in facts:
        attributes["x"] = joined_rows(staged, facts["x"])
    if staged.plan.framed:
        attributes |= framed_rows(staged, facts[FRAME])
    return attributes


def _splits(staged: StagedColumns) -> dict[str, Split]:
    column = staged.plan.split
    return {} if column is None else {name: Split(split_mask_rows(staged, column, name), True) for name in SPLITS}


def _edges(edges: SortedEdges, staged: StagedColumns, facts: Mapping[str, Any], unit: int) -> EdgeSource:
    def pieces(most: int) -> Iterator[EdgePiece]:
        done = 0
        for batch in edges.ends.batches(["source", "target"], most):
            source, target = (np.asarray(batch.column(end)) for end in ("source", "target"))
            first, done = done, done + batch.num_rows
            yield EdgePiece(source, target, _after(staged.name_row, first), done)

    num_edges = edges.ends.num_rows
    return EdgeSource(pieces, num_edges, num_edges, columns=attributes_of(staged, facts, unit), ascends=True)


def _after(name_row: Callable[[int], str], first: int) -> Callable[[int], str]:
    return lambda row: name_row(first + row)


# --- the report -------------------------------------------------------------------------------------------


def _report(
    graph: TableGraph,
    origin: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    vertices: Mapping[str, NumberedVertices],
    joined: Sequence[JoinedEdges],
    tables: Mapping[str, Table],
) -> dict[str, Any]:
    """Returns JSON: for each entry of the description the rows that were read, kept and dropped, and what each column became."""
    nodes = {}
    for node in graph.nodes:
        found = vertices[node.name]
        nodes[node.name] = {
            "vertices": found.num_vertices,
            "added": found.num_added,
            "duplicates": asdict(found.duplicates),
            "null_keys": asdict(found.null_keys),
            **_entry(node, origin, facts, tables),
        }
    edges = {}
    for edge, each in zip(graph.edges, joined):
        edges[",".join(edge.name)] = {
            "edges": each.num_edges,
            "null_keys": asdict(each.null_keys),
            "dangling_sources": asdict(each.dangling_sources),
            "dangling_targets": asdict(each.dangling_targets),
            "reverse": ",".join(edge.reverse_name) if edge.reverse else None,
            **_entry(edge, origin, facts, tables),
        }
    return {"source": graph.name, "time_unit": origin["time_unit"], "nodes": nodes, "edges": edges}


def _entry(
    entry: NodeTable | EdgeTable,
    origin: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    tables: Mapping[str, Table],
) -> dict[str, Any]:
    columns = {}
    for name, column in facts[entry.title]["columns"].items():
        columns[name] = _short(column)
    of_entry = facts[entry.title]
    return {
        "tables": tables[entry.title].facts(),
        "columns": columns,
        "x": [_short(column) for column in of_entry.get("x", ())],
        **({FRAME: [_short(column) for column in of_entry[FRAME]]} if FRAME in of_entry else {}),
        **({"split": _short(of_entry["split"])} if "split" in of_entry else {}),
        "drop": list(entry.drop),
        "left_out": origin["tables"][entry.title]["left_out"],
    }


def _short(column: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts about a column that a report shows, with the number of categories."""
    left = {key: value for key, value in column.items() if key not in _NOT_SHOWN}
    return {**left, **({"categories": len(column["categories"])} if "categories" in column else {})}
