"""Makes a source of a graph out of keyed tables: numbers the vertices, joins the edges, and encodes the columns.

Everything goes through files in a working folder. Finished steps stay there until the conversion is complete.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.names import check_edge_names, check_vertex_names
from salientpp.datasets.tabular.columns import MOMENT, ColumnPlan, plan_edges, plan_nodes
from salientpp.datasets.tabular.description import EdgeTable, NodeTable, TableGraph
from salientpp.datasets.tabular.doors import Table, TableBatch, open_table
from salientpp.datasets.tabular.encoding import Encoding
from salientpp.datasets.tabular.encodings import warn_of_split
from salientpp.datasets.tabular.joining import JoinedEdges, join_edges, missing_keys
from salientpp.datasets.tabular.keyed import key_types
from salientpp.datasets.tabular.numbering import NumberedVertices, number_vertices
from salientpp.datasets.tabular.rows import RowFile, plain_memory
from salientpp.datasets.tabular.source import StagedGraph, describe_source, examine_table, staged_columns, unit_of
from salientpp.datasets.tabular.steps import Steps, staged_beside, working_folder
from salientpp.processes import lazy
from salientpp.progress import Progress
from salientpp.store.keys import adapt_keys

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedTable:
    """Tables of one entry of a description, whose columns are cast to the types of ``plan`` while they are read."""

    table: Table
    plan: ColumnPlan
    progress: Progress

    @lazy
    def schema(self) -> Any:
        """Arrow schema of the columns as they are read."""
        import pyarrow

        fields = [(field.name, self.plan.types.get(field.name, field.type)) for field in self.table.schema]
        return pyarrow.schema(fields)

    def batches(self, columns: Sequence[str], most_rows: int) -> Iterator[TableBatch]:
        """Yields all rows, as :meth:`Table.batches` does."""
        done = 0
        self.progress.begin(f"reading {self.plan.title}", self.table.num_rows or 0, "rows")
        for each in self.table.batches(columns, most_rows):
            done += each.batch.num_rows
            yield TableBatch(self.plan.prepare(each.batch, each.where), each.where)
            self.progress.reach(done)
        self.progress.begin(f"sorting {self.plan.title}")


@contextlib.contextmanager
def staged_tables(
    graph: TableGraph, root: Path, budget: Budget, progress: Progress, encoding: Encoding | None = None
) -> Iterator[StagedGraph]:
    """Opens the tables of a description as a source for a ``with`` block that converts it to ``root``.

    If ``encoding`` of an earlier graph is given, columns are encoded in the same way.

    The working folder lies beside ``root``. It is removed at the end of the block; if the block raises, it stays, and the next call goes on.

    Raises:
        ValueError: the description does not fit the tables, or a policy refuses a row. The text names the entry, and the file and row.
        OSError: a table cannot be read.
    """
    work = staged_beside(root)
    with plain_memory(), working_folder(work, root) as spool:
        yield open_tables(graph, work, spool, budget, progress, encoding)


def open_tables(
    graph: TableGraph, work: Path, spool: Path, budget: Budget, progress: Progress, encoding: Encoding | None = None
) -> StagedGraph:
    """Does all steps that are not finished in the folder ``work``. One-shot streams are copied to the folder ``spool`` first."""
    tables = _planned_tables(graph, spool, progress, encoding)
    encode_as = None if encoding is None else encoding.digest
    task = task_of(graph, [planned.table.facts() for planned in tables], encode_as)
    known = {} if encoding is None else {each.plan.title: encoding.facts(each.plan.title) for each in tables}
    unit = 0 if encoding is None else encoding.unit
    steps = Steps(work, task)
    staging = _Staging(graph, tables, steps, budget.working)
    vertices = staging.number()
    joined = staging.join(vertices)
    progress.begin("examining columns")
    columns = staged_columns(graph, [planned.plan for planned in tables], vertices, joined)
    facts_of = steps.run(
        "facts",
        dict,
        lambda folder: {name: examine_table(each, known.get(name), unit) for name, each in columns.items()},
    )
    for name, of_entry in facts_of.items():
        warn_of_split(name, of_entry, needs_training=encoding is None, stacklevel=8)  # the call of convert
    by_title = {planned.plan.title: planned.table for planned in tables}
    found = unit_of(facts_of)
    return describe_source(graph, columns, facts_of, vertices, joined, by_title, task, found and (unit or found))


def task_of(graph: TableGraph, facts: Sequence[Sequence[Mapping[str, Any]]], encode_as: str | None) -> str:
    """Returns a text that differs if the description, a table or the encoding does. ``facts`` has those of each entry, and ``encode_as`` a digest."""
    return sha256(json.dumps([graph.text, graph.folder, facts, encode_as], sort_keys=True).encode()).hexdigest()


def _planned_tables(
    graph: TableGraph, spool: Path, progress: Progress, encoding: Encoding | None
) -> list[PlannedTable]:
    """Opens the tables of all entries, first of vertex types and then of relations. Entries with the same tables share them."""
    opened: dict[tuple[object, ...], Table] = {}
    planned = []
    of_nodes = set(map(_identity, graph.nodes))
    for entry in graph.entries:
        same = _identity(entry)
        if same not in opened:
            progress.begin(f"opening {entry.title}")
            opened[same] = open_table(entry.tables, graph.base, entry.title)
            opened[same].spool(spool / str(len(opened)))
        schema = opened[same].schema
        if isinstance(entry, NodeTable):
            plan = plan_nodes(entry, schema)
            check_vertex_names(graph.name, entry.name, plan.attributes, SPLITS if plan.split else ())
        else:
            plan = plan_edges(entry, schema, same in of_nodes)
            check_edge_names(graph.name, entry.name, plan.attributes)
        plan = plan if encoding is None else encoding.same_plan(plan, schema)
        planned.append(PlannedTable(opened[same], plan, progress))
        _warn_of_left_out(plan)
    _check_times([each.plan for each in planned])
    _check_keys(graph, planned)
    return planned


def _identity(entry: NodeTable | EdgeTable) -> tuple[object, ...]:
    return tuple(table if isinstance(table, str) else id(table) for table in entry.tables)


def _warn_of_left_out(plan: ColumnPlan) -> None:
    if plan.left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items())
        warnings.warn(
            f"{plan.title}: columns are left out ({reasons}). Name them in drop to leave them out on purpose, or cast them",
            UserWarning,
            stacklevel=10,  # the call of convert
        )


def _check_times(plans: Sequence[ColumnPlan]) -> None:
    """Raises ValueError if the attributes ``time`` are timestamps in some tables and plain numbers in others, which cannot be compared."""
    found = [(each.kind == MOMENT, plan.title) for plan in plans for each in plan.columns if each.attribute == "time"]
    kinds = dict(found)
    if len(kinds) > 1:
        raise ValueError(
            f"{kinds[True]} has timestamps as time, and {kinds[False]} has numbers, which cannot be compared; write timestamps in both, or name one "
            "column in drop"
        )


def _check_keys(graph: TableGraph, planned: Sequence[PlannedTable]) -> None:
    """Raises ValueError if a column cannot be a key, or if a relation names vertices by another type of key than they have."""
    import pyarrow

    keys = {node.name: key_types(each, node.key, node.title) for node, each in zip(graph.nodes, planned)}
    for edge, each in zip(graph.edges, planned[len(graph.nodes) :]):
        for end, columns, type_ in ("source", edge.source, edge.name[0]), ("target", edge.target, edge.name[2]):
            own = key_types(each, columns, f"{edge.title}, {end}")
            names = " and ".join(map(repr, columns))
            adapt_keys([pyarrow.nulls(0, of) for of in own], keys[type_], f"{edge.title}, {end} {names}")


class _Staging:
    """Steps that read the tables. ``working`` is the number of bytes that one step may take."""

    def __init__(self, graph: TableGraph, tables: Sequence[PlannedTable], steps: Steps, working: int) -> None:
        self._nodes = list(zip(graph.nodes, tables))
        self._edges = list(zip(graph.edges, tables[len(graph.nodes) :]))
        self._steps, self._working = steps, working

    def number(self) -> dict[str, NumberedVertices]:
        """Numbers the vertices of all types, also those that only edges name if a relation adds them."""
        vertices = {
            entry.name: self._number(f"n{number}", entry, planned, ())
            for number, (entry, planned) in enumerate(self._nodes)
        }
        added = self._missing(vertices)
        for number, (entry, planned) in enumerate(self._nodes):
            files = added.get(entry.name, ())
            if any(file.num_rows for file in files):
                vertices[entry.name] = self._number(f"n{number}.more", entry, planned, files)
        return vertices

    def _number(self, step: str, entry: NodeTable, planned: PlannedTable, added: Sequence[RowFile]) -> NumberedVertices:
        number = partial(
            number_vertices,
            planned,
            entry.key,
            planned.plan.staged,
            duplicates=entry.duplicates,
            null_keys=entry.null_keys,
            what=entry.title,
            added=added,
        )
        return self._steps.run(step, NumberedVertices, partial(_read_whole, number, self._working, planned.table))

    def _missing(self, vertices: Mapping[str, NumberedVertices]) -> dict[str, list[RowFile]]:
        """Returns the keys that edges name and tables lack, by vertex type, for relations that add such vertices."""
        missing: dict[str, list[RowFile]] = {}
        for number, (entry, planned) in enumerate(self._edges):
            if entry.dangling != "add":
                continue
            for end, type_, key, other in (
                ("source", entry.name[0], entry.source, entry.target),
                ("target", entry.name[2], entry.target, entry.source),
            ):
                find = partial(missing_keys, planned, key, other, vertices[type_], what=entry.title)
                found = self._steps.run(
                    f"e{number}.{end}", RowFile, partial(_read_whole, find, self._working, planned.table)
                )
                missing.setdefault(type_, []).append(found)
        return missing

    def join(self, vertices: Mapping[str, NumberedVertices]) -> list[JoinedEdges]:
        """Joins the edges of all relations with the vertices."""
        joined = []
        for number, (entry, planned) in enumerate(self._edges):
            join = partial(
                join_edges,
                planned,
                entry.source,
                entry.target,
                planned.plan.staged,
                vertices[entry.name[0]],
                vertices[entry.name[2]],
                dangling="error" if entry.dangling == "add" else entry.dangling,
                null_keys=entry.null_keys,
                what=entry.title,
                reverse=entry.reverse,
            )
            joined.append(
                self._steps.run(f"e{number}", JoinedEdges, partial(_read_whole, join, self._working, planned.table))
            )
        return joined


def _read_whole(step: Callable[..., T], working: int, table: Table, folder: Path) -> T:
    """Does a step that reads a table. Raises ValueError if the table has changed meanwhile, so that the step is not finished."""
    result = step(work=folder, working=working)
    table.check_unchanged()
    return result
