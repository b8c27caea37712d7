"""Finds the keys of vertices of a dataset directory, and the vertices of keys.

Each part has a file with the keys of its vertices, in the order of their ids. One index serves all parts: the hashes of all keys in ascending order, and the
vertex of each. A look-up finds a hash by bisection, and compares the keys of the vertices that have it, since different keys may have one hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from salientpp.processes import lazy
from salientpp.store.directory.columns import named_vertices
from salientpp.store.directory.description import Description, VertexType, words_of_type
from salientpp.store.directory.files import Arrays, DatasetError
from salientpp.store.directory.manifest import check_is_there
from salientpp.store.key_table import KeyTable, arrow, flat_ids, gathered
from salientpp.store.keys import adapt_keys, canonical_keys, key_hash
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

#: Number of keys that are looked up at a time.
_KEYS_AT_ONCE = 2**20


class StoredKeys:
    """Reads the keys of a dataset directory. All views of the directory share this object, so that each file is mapped once."""

    def __init__(self, arrays: Arrays, description: Description) -> None:
        self._arrays, self._description = arrays, description

    @lazy
    def _tables(self) -> dict[str, KeyTable]:
        """Files with keys that were opened so far, by name."""
        return {}

    @lazy
    def _indexes(self) -> dict[str | None, tuple[np.ndarray, np.ndarray]]:
        """Indices that were opened so far, by vertex type."""
        return {}

    def rows(self, type_: str | None, n_id: Tensor) -> pa.Table:
        """Returns the keys of vertices; see :meth:`WithKeys.keys_of`."""
        vertices = self._with_keys(type_)
        ids = flat_ids(n_id, vertices.num_vertices, f"n_id{words_of_type(type_)}")
        return self._rows(vertices, ids)

    def ids(self, type_: str | None, keys: Any) -> Tensor:
        """Returns the vertices of keys; see :meth:`WithKeys.ids_of`."""
        vertices = self._with_keys(type_)
        what = f"keys of {self._arrays.root}{words_of_type(type_)}"
        table = read_keys(keys, [column["name"] for column in vertices.keys or ()], what)
        pieces = table.to_batches(max_chunksize=_KEYS_AT_ONCE)
        found = [self._find(vertices, piece.columns, what) for piece in pieces]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    def are_valid(self, type_: str | None, part_ids: Iterable[int]) -> bool:
        """True if the index has each vertex once, in the order of the hashes, and these parts' keys have the hashes of the index."""
        vertices = self._with_keys(type_)
        hashes, ids = self._index(vertices)
        if bool((hashes[1:] < hashes[:-1]).any()) or not np.array_equal(np.sort(ids), np.arange(ids.size)):
            return False
        of_vertex = np.empty_like(hashes)
        of_vertex[ids] = hashes
        schema = self._schema(vertices)
        if [{"name": field.name, "type": str(field.type)} for field in schema] != [*(vertices.keys or ())]:
            return False
        for part_id in [0] if vertices.replicated else part_ids:
            first, table = vertices.row_book.range_of(part_id)[0], self._table(vertices, part_id)
            for batch in table.batches():
                if table.schema != schema or any(column.null_count for column in batch.columns):
                    return False
                if not np.array_equal(key_hash(batch.columns), of_vertex[first : first + batch.num_rows]):
                    return False
                first += batch.num_rows
        return True

    def _with_keys(self, type_: str | None) -> VertexType:
        vertices = named_vertices(self._arrays, self._description, type_)
        if vertices.keys is None:
            having = [repr(each.name) for each in self._description.node_types if each.keys is not None]
            of = f"; these types have keys: {', '.join(having)}" if having else ""
            raise ValueError(
                f"{self._arrays.root} stores no keys{words_of_type(type_)}{of}; graphs that `salientpp convert tables:FILE` writes have keys, and partition "
                "stores them"
            )
        return vertices

    def _table(self, vertices: VertexType, part_id: int) -> KeyTable:
        """Returns the keys of a part. DatasetError if a host's copy lacks the part, or the file does not match the manifest."""
        if not vertices.replicated:
            check_is_there(self._arrays.root, part_id)
        return self._opened(vertices.keys_file(part_id))

    def _schema(self, vertices: VertexType) -> pa.Schema:
        """Returns names and types of the key columns."""
        return self._opened(vertices.key_schema_file).schema

    def _opened(self, name: str) -> KeyTable:
        if name not in self._tables:
            table, expected = KeyTable(self._arrays.path_of(name)), self._arrays.files[name]["shape"]
            if [table.num_rows] != expected:
                raise DatasetError(
                    f"{self._arrays.root / name} must hold {expected[0]} keys, got {table.num_rows}; copy it again, or partition again"
                )
            if table.map is not None:
                self._arrays.watch(table.map, name)
            self._tables[name] = table
        return self._tables[name]

    def _index(self, vertices: VertexType) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ascending hashes of all keys, uint64 [N], and the vertex of each, int64 [N]. Both are memory-mapped."""
        if vertices.name not in self._indexes:
            hashes, ids = map(self._arrays.open, (vertices.key_hashes_file, vertices.key_ids_file))
            self._indexes[vertices.name] = hashes.numpy(), ids.numpy()
        return self._indexes[vertices.name]

    def _rows(self, vertices: VertexType, ids: np.ndarray) -> pa.Table:
        def rows_of(part_id: int, inside: np.ndarray) -> pa.Table:
            return self._table(vertices, part_id).rows(inside)

        return gathered(ids, vertices.row_book.offsets.numpy(), rows_of, self._schema(vertices))

    def _find(self, vertices: VertexType, columns: Sequence[pa.Array], what: str) -> np.ndarray:
        """Returns the vertices of some keys, int64 [n]. Unknown keys, and keys with nulls, get -1."""
        pyarrow, num_keys = arrow(), len(columns[0])
        found = np.full(num_keys, -1, dtype=np.int64)
        types = self._schema(vertices).types
        keys, impossible = adapt_keys(canonical_keys(columns, what), types, what)
        is_whole = np.ones(num_keys, dtype=bool) if impossible is None else ~impossible
        for column in keys:
            is_whole &= column.is_valid().to_numpy(zero_copy_only=False)
        if not is_whole.any():
            return found
        position = np.flatnonzero(is_whole)
        keys = [column.filter(pyarrow.array(is_whole)) for column in keys]
        wanted = key_hash(keys)
        hashes, ids = self._index(vertices)
        first, last = (np.searchsorted(hashes, wanted, side) for side in ("left", "right"))
        count = last - first
        # For each vertex whose key has a wanted hash: the number of the key, and the vertex.
        key = np.repeat(np.arange(count.size), count)
        vertex = ids[np.arange(key.size) + np.repeat(first - (np.cumsum(count) - count), count)]
        stored = self._rows(vertices, vertex)
        is_same = np.ones(key.size, dtype=bool)
        for column, of_key in zip(stored.columns, keys):
            equal = pyarrow.compute.equal(column.combine_chunks(), of_key.take(pyarrow.array(key)))
            is_same &= _flat(equal)
        found[position[key[is_same]]] = vertex[is_same]
        return found


class WithKeys:
    """Base of a partitioned graph: the keys by which the user's tables name vertices."""

    _keys: StoredKeys

    def keys_of(self, n_id: Tensor, type_: str | None = None) -> pa.Table:
        """Returns the keys of vertices, such as ``batch.n_id``: an Arrow table with the key columns and a row for each id.

        Reads only these keys, from the files of the parts that own the vertices. The id -1 of padding gives a row of nulls.

        Args:
            n_id: global ids, integers [n].
            type_: vertex type of the ids, if types have names.

        Raises:
            ValueError: the type has no keys, or an id is not in the graph.
            DatasetError: the directory is a host's copy without a part that owns some of the vertices.
            ImportError: pyarrow is not installed.
        """
        return self._keys.rows(type_, n_id)

    def ids_of(self, keys: Any, type_: str | None = None) -> Tensor:
        """Returns the global ids of vertices that have these keys, int64 [n]. Unknown keys, and keys with nulls, give -1.

        Args:
            keys: an Arrow table, a ``DataFrame`` or a mapping from names to columns. It has the key columns; others are
                ignored. For a key of one column, an array or a sequence of its values will do.
            type_: vertex type of the keys, if types have names.

        Raises:
            ValueError: the type has no keys, or a key column is missing or has another type.
            DatasetError: the directory is a host's copy without a part that may own some of the vertices.
            ImportError: pyarrow is not installed.
        """
        return self._keys.ids(type_, keys)

    def keys_are_valid(self, type_: str | None, part_ids: Iterable[int]) -> bool:
        """True if the index of a type's keys is valid and has the keys of these parts. Reads all of them."""
        return self._keys.are_valid(type_, part_ids)


def read_keys(keys: Any, names: Sequence[str], what: str) -> pa.Table:
    """Reads a user's keys as a table of the key columns ``names``. Raises ValueError, which begins with ``what``, if that is not possible."""
    pyarrow = arrow()
    given: Any = keys.numpy() if isinstance(keys, Tensor) else keys
    try:
        if isinstance(given, Mapping):
            _check_columns([*given], names, what)
            return pyarrow.table({name: _column(given[name]) for name in names})
        if isinstance(given, pyarrow.RecordBatch):
            given = pyarrow.Table.from_batches([given])
        column = None if isinstance(given, pyarrow.Table) else _column(given)
        if column is not None and pyarrow.types.is_struct(column.type):
            given, column = pyarrow.Table.from_struct_array(column), None
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(
            f"{what}: these cannot be read as keys ({error}); pass a table with the columns {', '.join(names)}"
        ) from None
    if column is None:
        _check_columns(given.column_names, names, what)
        return given.select(list(names))
    if len(names) > 1:
        raise ValueError(
            f"{what}: a key has several columns, got one; pass a table with the columns {', '.join(names)}"
        )
    return pyarrow.table([column], names=list(names))


def _check_columns(found: Sequence[Any], names: Sequence[str], what: str) -> None:
    for name in names:
        times = found.count(name)
        if times != 1:
            raise ValueError(
                f"{what}: expected one column {name!r}, got {times or 'none'} among {', '.join(map(str, found)) or 'no columns'}{did_you_mean(name, found)}"
            )


def _column(values: Any) -> pa.ChunkedArray:
    """Returns an array, a series or a sequence as a column. A table of another library gives a column of structs."""
    pyarrow = arrow()
    if isinstance(values, (str, bytes)):  # else each character would be a key
        raise TypeError("a single value; put it into a list")
    if isinstance(values, (pyarrow.Array, pyarrow.ChunkedArray)) or hasattr(values, "__arrow_c_stream__"):
        return pyarrow.chunked_array([values] if isinstance(values, pyarrow.Array) else values)
    try:
        return pyarrow.chunked_array([pyarrow.array(values)])
    except OverflowError:  # integers above 2^63
        return pyarrow.chunked_array([pyarrow.array(values, pyarrow.uint64())])


def _flat(values: pa.Array) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(bool, copy=False)
