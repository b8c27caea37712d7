"""Parts of a table: a file, an object in memory, or a table of a lake. :class:`salientpp.datasets.tabular.doors.Table` joins them.

A part reads record batches, and says what identifies its content. Errors of pyarrow and of file systems become errors that name the table and the part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from salientpp.addresses import raise_in_words, reason_of
from salientpp.datasets.tabular.addresses import TableFile
from salientpp.datasets.tabular.file_formats import Looked, format_of, sliced
from salientpp.datasets.tabular.text_tables import as_type, kinds_of_values
from salientpp.files import first_line, replace_file
from salientpp.store.directory.journal import says_what_to_do
from salientpp.store.keys import decoded

if TYPE_CHECKING:
    import pyarrow as pa

#: Objects whose ``__arrow_c_stream__`` gives the same rows each time. Other objects may compute their rows, or give them once.
_IN_MEMORY = {"pyarrow.Table", "pyarrow.RecordBatch", "pandas.DataFrame", "polars.DataFrame"}

#: Rows of a batch of which the digest is computed at once.
_DIGEST_ROWS = 2**16

#: Name of a column in which pandas stores an index that has no name.
UNNAMED_INDEX = re.compile(r"__index_level_\d+__")


class TablePart(Protocol):
    """A part of a table.

    Attributes:
        address: its name in errors.
        identity: text that is equal for two addresses of one file or table.
        looked: its schema and number of rows.
    """

    address: str
    identity: str
    looked: Looked

    def read(self, schema: pa.Schema, most_rows: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        """Yields batches with at least the columns of ``schema``, the name of what each is read from, and the number of its first row there."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns what identifies the content of the part, as JSON values."""
        ...

    def check_unchanged(self, what: str) -> None:
        """Raises ValueError if the part has changed since it was opened."""
        ...


class FilePart:
    """A file as part of the table ``what``."""

    def __init__(self, file: TableFile, what: str) -> None:
        self.address, self.identity, self._file, self._what = file.address, file.identity, file, what
        self._format = format_of(file)
        try:
            in_file = self._format.look(file)
            stored = in_file.schema.names  # fails if the names are damaged
        except Exception as error:  # pyarrow has many types of errors
            self._raise(error, "")
        self._columns = in_file.schema
        self._folders = {name: value for name, value in file.folders if name not in stored}
        self.looked = _with_folders(in_file, self._folders)

    def read(self, schema: pa.Schema, most_rows: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        import pyarrow as pa

        stored = [field for field in schema if field.name not in self._folders]
        # At least one column tells the number of rows.
        of_file = pa.schema(stored or list(self._columns)[:1])
        first = 0
        try:
            for batch in self._format.read(self._file, of_file, most_rows):
                batch.validate(full=True)  # damaged offsets would lead outside the buffers
                for name in self._folders:
                    if name in schema.names:
                        batch = _with_value(batch, schema.field(name), self._folders[name])
                yield batch, self.address, first
                first += batch.num_rows
        except Exception as error:  # pyarrow has many types of errors
            self._raise(error, f" after row {first}")

    def _raise(self, error: Exception, after: str) -> None:
        from pyarrow import ArrowException

        if isinstance(error, ImportError) or (isinstance(error, MemoryError) and not _is_absurd(error)):
            raise error
        is_of_package = not self._file.is_local and not isinstance(error, (OSError, ValueError, ArrowException))
        if is_of_package or (isinstance(error, OSError) and not _is_damage(error, self._file.is_local)):
            raise_in_words(self._what, self.address + after, error)
        self.check_unchanged(self._what)
        reason = reason_of(error)
        is_own = type(error) is ValueError  # pyarrow raises subclasses
        text = reason if is_own else f"damaged, or not a file of this kind ({reason})"
        raise ValueError(f"{self._what}: {self.address}{after}: {text}") from error

    def facts(self) -> dict[str, Any]:
        return facts_of_file(self._file)

    def check_unchanged(self, what: str) -> None:
        self._file.check_unchanged(what)


def facts_of_file(file: TableFile) -> dict[str, Any]:
    """Returns what identifies the content of a file, as JSON values: address, size in bytes, time of the last change in nanoseconds, and etag."""
    found = {"address": file.address, "size": file.size, "modified": file.modified}
    return found | ({"etag": file.etag} if file.etag else {})


def _with_folders(looked: Looked, folders: Mapping[str, str | None]) -> Looked:
    """Returns what is known of a file, with a column of text for each folder ``name=value``."""
    import pyarrow as pa

    if not folders:
        return looked
    schema, kinds = looked.schema, dict(looked.kinds or {})
    for name, value in folders.items():
        schema = schema.append(pa.field(name, pa.string()))
        found = kinds_of_values(pa.array([value], pa.string()))
        kinds[name] = None if found is None else found & {"int64", "date32"}
    return replace(looked, schema=schema, kinds=kinds)


def _with_value(batch: pa.RecordBatch, field: pa.Field, value: str | None) -> pa.RecordBatch:
    """Returns a batch with a further column that holds one value."""
    import pyarrow as pa

    column = pa.repeat(pa.scalar(value, pa.string()), batch.num_rows)
    schema = batch.schema.append(field)
    return pa.RecordBatch.from_arrays([*batch.columns, as_type(column, field, 0)], schema=schema)


#: Bytes that no machine has.
_MOST_MEMORY = 2**43

#: Words of errors about the bytes of a file.
_DAMAGE = re.compile(
    r"(?i)deserialize|decompress|corrupt|zlib|gzip|snappy|zstd|lz4|unexpected end|magic|truncated|not an? [a-z]+ file|expected to be able to read"
)

#: Words of errors about reading them.
_NETWORK = re.compile(r"(?i)AWS Error|curl|connection|timeout|http|socket")


def _is_damage(error: OSError, is_local: bool) -> bool:
    """Returns if an OSError of pyarrow is about the bytes of a file, and not about reading them."""
    if error.errno is not None:
        return False
    return is_local or (_DAMAGE.search(str(error)) is not None and _NETWORK.search(str(error)) is None)


def _is_absurd(error: MemoryError) -> bool:
    """Returns if more memory was asked for than any machine has, because a size in the file is damaged."""
    found = re.search(r"size (-?\d+)", str(error))
    return found is not None and not 0 <= int(found[1]) < _MOST_MEMORY


class ObjectPart:
    """An object with ``__arrow_c_stream__`` as part of the table ``what``.

    Attributes:
        is_spooled: False if the object gives its rows once, and :meth:`spool` has not written them yet.
    """

    def __init__(self, value: Any, number: int, what: str) -> None:
        self.address, self._what, self._number = _kind_of_object(value), what, number
        self.identity = f"object {number}"
        self._value: Any = value
        self._spooled: FilePart | None = None
        self._digest: str | None = None
        self.is_spooled = is_in_memory(value)
        reader = self._reader()
        self._stream = None if self.is_spooled else reader
        rows = len(value) if self.is_spooled and hasattr(value, "__len__") else None
        self.looked = Looked(reader.schema, rows)

    def spool(self, folder: Path) -> None:
        """Writes the rows to a file in ``folder``, unless they are in memory or were written before."""
        import pyarrow as pa
        from pyarrow import fs, ipc

        if self.is_spooled:
            return
        path = folder / f"stream-{self._number}.arrow"
        hashed = _Digest()
        if self._stream is None:
            raise ValueError(f"{self._what}: {self.address} gave a part of its rows before; make it again")
        stream, self._stream = self._stream, None

        def write(file: Any) -> None:
            # The streaming format, because the other one needs the same categories in all batches.
            with ipc.new_stream(pa.PythonFile(_Both(file, hashed), "w"), self.looked.schema) as writer:
                for batch in self._batches_of(stream):
                    for some in sliced(batch, _DIGEST_ROWS):
                        writer.write_batch(some)

        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, write)
        except OSError as error:
            if error.errno is None:  # of the library that makes the rows
                raise
            with says_what_to_do(path):
                raise
        system = fs.LocalFileSystem()
        info = system.get_file_info(str(path))
        file = TableFile(self.address, system, str(path), info.size, info.mtime_ns, None)
        self._spooled = FilePart(file, self._what)
        self._digest = hashed.hexdigest()
        self.looked = self._spooled.looked
        self.is_spooled, self._value = True, None

    def read(self, schema: pa.Schema, most_rows: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        if not self.is_spooled:
            raise RuntimeError(f"{self._what}: {self.address} gives its rows once; call spool() before batches()")
        if self._spooled is not None:
            yield from self._spooled.read(schema, most_rows)
            return
        first = 0
        for batch in self._batches_of(self._reader()):
            for some in sliced(batch, most_rows):
                yield some, self.address, first
                first += some.num_rows

    def facts(self) -> dict[str, Any]:
        import pyarrow as pa
        from pyarrow import ipc

        if self._digest is None:
            hashed = _Digest()
            with ipc.new_stream(pa.PythonFile(hashed, "w"), self.looked.schema) as writer:
                for batch, _, _ in self.read(self.looked.schema, _DIGEST_ROWS):
                    writer.write_batch(batch)
            self._digest = hashed.hexdigest()
        return {"address": self.address, "digest": self._digest, "rows": self.looked.num_rows}

    def check_unchanged(self, what: str) -> None:
        """Does nothing: rows in memory are read as they are."""

    def _reader(self) -> Any:
        import pyarrow as pa

        try:
            if self.address == "pandas.DataFrame":  # old versions have no __arrow_c_stream__
                table = pa.Table.from_pandas(self._value)
                return table.to_reader()
            return pa.RecordBatchReader.from_stream(self._value)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise ValueError(
                f"{self._what}: {self.address} cannot be read as an Arrow table ({first_line(error)})"
            ) from error

    def _batches_of(self, reader: Any) -> Iterator[pa.RecordBatch]:
        """Yields the batches of a stream. Raises OSError if the library that makes them fails."""
        try:
            yield from reader
        except Exception as error:  # of any library
            if isinstance(error, MemoryError):
                raise
            raise OSError(
                f"{self._what}: {self.address} failed while its rows were read ({first_line(error)})"
            ) from error


def _kind_of_object(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__.partition('.')[0].lstrip('_')}.{kind.__name__}"


def is_in_memory(value: Any) -> bool:
    """Returns if a value is a table that gives the same rows each time."""
    return _kind_of_object(value) in _IN_MEMORY


def is_object(value: Any) -> bool:
    """Returns if a value is a table of another library."""
    return hasattr(value, "__arrow_c_stream__") or _kind_of_object(value) == "pandas.DataFrame"


#: Methods of objects that are no tables -> what to pass instead.
_INSTEAD = {
    "collect": "call its collect() first",
    "to_pyarrow_table": "write delta:ADDRESS, or pass its to_pyarrow_table()",
    "to_arrow_batch_reader": "pass its to_arrow_batch_reader()",
    "scan": "write iceberg:ADDRESS, or pass its scan().to_arrow_batch_reader()",
}


def instead_of(value: object) -> str:
    """Returns advice for an object of another library that :func:`is_object` does not take; empty for others."""
    return next((f"; {advice}" for method, advice in _INSTEAD.items() if hasattr(value, method)), "")


class _Digest:
    """Binary file that keeps only the digest of what is written to it."""

    closed = False

    def __init__(self) -> None:
        self._hashed = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hashed.update(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing: each write is complete."""

    def close(self) -> None:
        """Does nothing: the digest can still be read."""

    def hexdigest(self) -> str:
        """Returns the SHA-256 of all bytes, as hexadecimal digits."""
        return self._hashed.hexdigest()


class _Both(_Digest):
    """Binary file that writes to another file, and adds what is written to a digest."""

    def __init__(self, file: Any, digest: _Digest) -> None:
        self._file, self._digest = file, digest

    def write(self, data: Any) -> int:
        self._digest.write(data)
        self._file.write(data)
        return len(data)


def with_types(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Returns the columns of ``schema``, in its order and with its types. A column that the batch lacks has nulls.

    Raises:
        ValueError: a value does not fit the type. ``where`` is the origin of the batch.
    """
    import pyarrow as pa

    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        column = batch.column(at) if at >= 0 else pa.nulls(batch.num_rows)
        try:
            columns.append(column if column.type == field.type else _as(column, field.type))
        except (pa.ArrowException, ValueError) as error:
            raise ValueError(
                f"{where}: column {field.name!r} cannot be read as {field.type} ({first_line(error)})"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _as(column: Any, type_: pa.DataType) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(type_):
        column = decoded(column)
    return column if column.type == type_ else column.cast(type_)
