"""Joins edges, whose ends are keys, with numbered vertices: the result has vertex numbers, and is sorted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salientpp.datasets.converted.buckets import MOST_VERTICES
from salientpp.datasets.tabular.keyed import (
    KeyedBatch,
    KeyedTable,
    KeyExamples,
    NullKeys,
    Policy,
    has_null,
    key_types,
    keys_of,
    places_of,
    rows_that_have,
)
from salientpp.datasets.tabular.numbering import NumberedVertices
from salientpp.datasets.tabular.pairs import sorted_pairs
from salientpp.datasets.tabular.resolving import Indexes, Resolving
from salientpp.datasets.tabular.rows import (
    Dropped,
    RowFile,
    RowWriter,
    kept_column,
    plain_type,
    portions,
    rows_to_read,
    scratch_folder,
)
from salientpp.datasets.tabular.sorting import Sorting
from salientpp.store.keys import adapt_keys, key_hash

if TYPE_CHECKING:
    import pyarrow as pa

#: Divisor of the memory for the edges of a batch.
_BATCH = 32


@dataclass(frozen=True)
class SortedEdges:
    """Edges of a relation in ascending order of their targets, then sources, then columns.

    Attributes:
        ends: columns ``source`` and ``target``, int64, with the vertex numbers.
        columns: the other columns, in the same order.
    """

    ends: RowFile
    columns: RowFile


@dataclass(frozen=True)
class JoinedEdges:
    """Edges of a table.

    Attributes:
        backward: edges of the reverse relation, whose sources are the targets of ``forward``. None if it is not wanted.
        null_keys: rows without the key of an end.
        dangling_sources, dangling_targets: rows whose source is not a vertex, and other rows whose target is not.
    """

    num_edges: int
    forward: SortedEdges
    backward: SortedEdges | None
    null_keys: Dropped
    dangling_sources: Dropped
    dangling_targets: Dropped


def join_edges(
    table: KeyedTable,
    source: Sequence[str],
    target: Sequence[str],
    columns: Sequence[str],
    sources: NumberedVertices,
    targets: NumberedVertices,
    work: Path,
    working: int,
    *,
    what: str,
    reverse: bool,
    dangling: Policy = "error",
    null_keys: Policy = "error",
) -> JoinedEdges:
    """Finds the vertices of both ends of each row of a table, and writes the edges in order.

    Args:
        source, target: names of the key columns of each end, in the order of the keys of ``sources`` and ``targets``.
        columns: names of the columns to write.
        work: existing folder for the results and, meanwhile, for other files. It serves this table only.
        working: bytes of memory for arrays.
        what: begins the texts of errors, such as ``edges.customer,placed,order``.
        reverse: also write the edges of the reverse relation.
        dangling, null_keys: what to do with rows that have an end which is not a vertex, and with rows without the key of an end.

    Raises:
        ValueError: keys of edges and vertices have different types, or rows have no vertex or no key and the policy is ``error``.
    """
    ends = (_End(table, tuple(source), sources, "source", what), _End(table, tuple(target), targets, "target", what))
    reading = _Reading(table, ends, tuple(columns), working, what)
    nulls = NullKeys(tuple(dict.fromkeys((*source, *target))))
    with scratch_folder(work) as scratch:
        batches, schema = reading.batches(nulls), reading.schema
        indexes = Indexes([sources, targets], working)
        for end in ends:
            looked_up = end.resolving(indexes, scratch, working)
            batches, schema = looked_up.resolve(batches, schema), looked_up.schema_after(schema)
        order = _Order(schema, reading.column_names, max(sources.num_vertices, targets.num_vertices), scratch, working)
        in_order = order.sort(indexes.while_reading(batches), targets.num_vertices)
        forward = _write(in_order, work, "forward", columns, schema, working)
        null_rows = nulls.settled(null_keys, what)
        unknown = [end.settled(dangling, reading.most_rows) for end in ends]
        backward = None
        if reverse:
            exchanged = order.sort(_exchanged(forward, schema), sources.num_vertices)
            backward = _write(exchanged, work, "backward", columns, schema, working)
    return JoinedEdges(forward.ends.num_rows, forward, backward, null_rows, *unknown)


def missing_keys(
    table: KeyedTable,
    key: Sequence[str],
    other: Sequence[str],
    vertices: NumberedVertices,
    work: Path,
    working: int,
    *,
    what: str,
) -> RowFile:
    """Writes the keys of one end of edges that are not keys of vertices. A key may be written several times.

    Args:
        key: names of the key columns of this end, in the order of the keys of ``vertices``.
        other: names of the key columns of the other end. Rows with a null in ``key`` or ``other`` are left out.
        work: existing folder for the result and, meanwhile, for other files.

    Returns:
        File of keys with the names and types of ``vertices.keys``.

    Raises:
        ValueError: a key cannot be stored with the type of the vertices' keys.
    """
    import pyarrow as pa

    end = _End(table, tuple(key), vertices, " and ".join(map(repr, key)), what)
    schema = pa.schema([field.with_name(name) for name, field in zip(vertices.keys.schema.names, end.key_fields)])
    writer = RowWriter(work / "missing.arrow", schema, most_bytes=working // 32)

    def write(keys: Sequence[Any], hashes: np.ndarray) -> None:
        writer.write(_distinct(pa.RecordBatch.from_arrays(list(keys), schema=schema), hashes))

    reading = _Reading(table, (end,), (), working, what, must_have=tuple(other))
    with scratch_folder(work) as scratch:
        indexes = Indexes([vertices], working)
        looked_up = end.resolving(indexes, scratch, working, write)
        for _ in indexes.while_reading(looked_up.resolve(reading.batches(NullKeys(key)), reading.schema)):
            pass
    unlike = end.unlike.dropped()
    if unlike.count:
        raise ValueError(
            f"{end.what}: {rows_that_have(unlike.count)} a key that the type of the vertices' keys, {', '.join(map(str, end.types))}, cannot hold, for example "
            f'{"; ".join(unlike.examples)}; cast the key of the vertices\' table, or set dangling = "drop"'
        )
    return writer.finish()


def _distinct(batch: Any, hashes: np.ndarray) -> Any:
    """Returns a batch of keys without most of the repeated ones."""
    import pyarrow as pa
    import pyarrow.compute as pc

    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    repeats = np.ones(len(hashes), dtype=bool)
    for column in batch.columns:  # other keys of the same hash stay
        equal = pc.equal(column, column.take(pa.array(first[group])))
        repeats &= equal.to_numpy(zero_copy_only=False)
    repeats[first] = False
    return batch.filter(pa.array(~repeats))


class _End:
    """One end of edges: the key that names it in the table, and its vertices.

    Attributes:
        types: types of the keys of the vertices. Keys of edges get them.
        unknown, unlike: rows whose key is not that of a vertex, and among them rows whose key these types cannot hold.
    """

    def __init__(
        self, table: KeyedTable, key: tuple[str, ...], vertices: NumberedVertices, name: str, what: str
    ) -> None:
        import pyarrow as pa

        self.key, self.vertices, self.name = key, vertices, name
        self._table, self.what = table, f"{what}, {name}"
        own = key_types(table, key, self.what)
        self.types = vertices.keys.schema.types
        adapt_keys([pa.nulls(0, type_) for type_ in own], self.types, self.what)  # raises if they cannot be compared
        if not vertices.num_vertices:  # a table without rows may have no types
            self.types = [of if pa.types.is_null(type_) else type_ for type_, of in zip(self.types, own)]
        self.key_fields = [pa.field(f"{name} key {number}", type_) for number, type_ in enumerate(self.types)]
        self.hash_field = pa.field(f"{name} hash", pa.uint64())
        self.unknown, self.unlike = KeyExamples.of(key), KeyExamples.of(key)

    def read(self, piece: KeyedBatch) -> tuple[list[pa.Array], list[pa.Array], np.ndarray | None]:
        """Returns the keys of a batch as in the table, the keys with the types of the vertices, and where these cannot hold them."""
        own = keys_of(piece, self.key, self.what)
        adapted, unlike = adapt_keys(own, self.types, self.what)
        return own, adapted, unlike

    def resolving(self, indexes: Indexes, scratch: Path, working: int, unknown: Any = None) -> Resolving:
        """Returns the look-up of this end. ``unknown`` takes rows without a vertex; None counts them."""
        names = [field.name for field in self.key_fields]
        taken = self.unknown.add if unknown is None else unknown
        return Resolving(self.vertices, self.hash_field.name, names, self.name, taken, indexes, scratch, working)

    def settled(self, policy: Policy, most_rows: int) -> Dropped:
        """Returns the dropped rows. Raises ValueError if there are any and the policy is ``error``."""
        dropped = self.unknown.dropped()
        if dropped.count and policy == "error":
            places = places_of(self._table, self.key, self.types, self.unknown, most_rows, self.what, most_places=1)
            raise ValueError(
                f'{self.what}: {rows_that_have(dropped.count)} a key that no vertex has, for example {places}; add the vertices, or set dangling = "drop" '
                'or "add"'
            )
        return dropped


class _Reading:
    """Reads edges from a table. Columns are called ``source hash``, ``source key 0`` ..., in the same way for the target, and ``column 0`` ..."""

    def __init__(
        self,
        table: KeyedTable,
        ends: Sequence[_End],
        columns: tuple[str, ...],
        working: int,
        what: str,
        must_have: tuple[str, ...] = (),
    ) -> None:
        import pyarrow as pa

        self._table, self._ends, self._columns, self._what = table, ends, columns, what
        self._working, self._must_have = working, must_have
        plain = [plain_type(table.schema.field(name).type) for name in columns]
        fields = [field for end in ends for field in (end.hash_field, *end.key_fields)]
        column_fields = [pa.field(f"column {number}", type_) for number, type_ in enumerate(plain)]
        self.column_names = [field.name for field in column_fields]
        self.schema = pa.schema([*fields, *column_fields])
        self._names = tuple(dict.fromkeys((*(name for end in ends for name in end.key), *must_have, *columns)))
        self.most_rows = rows_to_read(table, self._names, working)

    def batches(self, nulls: NullKeys) -> Iterator[pa.RecordBatch]:
        """Yields the edges both of whose ends have a key that the types of the vertices can hold."""
        import pyarrow as pa

        for piece in self._table.batches(self._names, self.most_rows):
            batch = piece.batch
            keys = [end.read(piece) for end in self._ends]
            must_have = keys_of(piece, self._must_have, self._what)
            left_out = has_null([*(column for own, _, _ in keys for column in own), *must_have], batch.num_rows)
            nulls.add(left_out, piece.where)
            arrays: list[Any] = []
            for end, (own, adapted, unlike) in zip(self._ends, keys):
                if unlike is not None:
                    unlike = unlike & ~left_out
                    for counted in (end.unknown, end.unlike):
                        counted.add([column.filter(pa.array(unlike)) for column in own])
                    left_out = left_out | unlike
                arrays += [pa.array(key_hash(adapted)), *adapted]
            arrays += [kept_column(batch.column(name)) for name in self._columns]
            edges = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            edges = edges.filter(pa.array(~left_out)) if left_out.any() else edges
            yield from portions([edges], self._working // _BATCH)


@dataclass(frozen=True)
class _Order:
    """Sorts edges with the columns ``source``, ``target`` and ``column_names``. ``most_vertices`` is the larger number of vertices of both ends."""

    schema: Any
    column_names: Sequence[str]
    most_vertices: int
    scratch: Path
    working: int

    def sort(self, batches: Iterator[Any], num_targets: int) -> Iterator[Any]:
        if not self.column_names and self.most_vertices <= MOST_VERTICES:
            return sorted_pairs(batches, num_targets, self.scratch, self.working)
        sorting = Sorting(self.schema, ["target", "source"], self.column_names, self.scratch, self.working)
        return sorting.sort(batches, max(0, num_targets - 1))


def _write(
    batches: Iterator[Any], work: Path, name: str, columns: Sequence[str], schema: Any, working: int
) -> SortedEdges:
    import pyarrow as pa

    ends_schema = pa.schema([("source", pa.int64()), ("target", pa.int64())])
    ends = RowWriter(work / f"{name}.ends.arrow", ends_schema)
    named = [pa.field(name, schema.field(f"column {number}").type) for number, name in enumerate(columns)]
    others = RowWriter(work / f"{name}.columns.arrow", pa.schema(named), most_bytes=working // 16)
    for batch in batches:
        ends.write(batch.select(["source", "target"]))
        arrays = [batch.column(f"column {number}") for number in range(len(columns))]
        if columns:
            others.write(pa.RecordBatch.from_arrays(arrays, schema=others.schema))
    written_ends = ends.finish()
    return SortedEdges(written_ends, RowFile(others.finish().path, written_ends.num_rows))


def _exchanged(edges: SortedEdges, schema: Any) -> Iterator[Any]:
    """Yields edges with source and target exchanged, and with the columns of ``schema``."""
    import pyarrow as pa

    columns = edges.columns.batches()
    waiting = None
    for ends in edges.ends.batches():
        begin = 0
        while begin < ends.num_rows:
            count = ends.num_rows - begin
            others: list[Any] = []
            if len(schema.names) > 2:
                waiting = next(columns) if waiting is None or not waiting.num_rows else waiting
                count = min(count, waiting.num_rows)
                others = waiting.slice(0, count).columns
                waiting = waiting.slice(count)
            part = ends.slice(begin, count)
            begin += count
            by_name = {"source": part.column("target"), "target": part.column("source")}
            by_name |= {f"column {number}": column for number, column in enumerate(others)}
            yield pa.RecordBatch.from_arrays([by_name[name] for name in schema.names], schema=schema)
