"""Reads record batches from files of each format: Parquet, ORC, Arrow, and, in :mod:`salientpp.datasets.tabular.text_tables`, text.

A format is an entry of ``FORMATS``: a function that looks at a file, and one that reads some of its columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from salientpp.datasets.tabular.addresses import TableFile, ending_of
from salientpp.datasets.tabular.text_tables import Kinds, kinds_of_csv, read_csv, read_json, schema_of_json
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes of the read buffer of each column. Without it, pyarrow reads a whole column of a row group at once. A request to an object store takes long.
_BUFFER, _REMOTE_BUFFER = 2**18, 2**21


@dataclass(frozen=True)
class Looked:
    """Facts about a file that are known before it is read.

    Attributes:
        num_rows: None if it is unknown.
        kinds: for text without types, the types that fit every value of each column. The column's type in ``schema`` is then text.
        is_sparse: a column that the file lacks has nulls. JSON leaves out nulls.
    """

    schema: pa.Schema
    num_rows: int | None
    kinds: Kinds | None = None
    is_sparse: bool = False


@dataclass(frozen=True)
class TableFormat:
    """Format of a file.

    Attributes:
        look: returns what is known of a file.
        read: yields the columns of a schema as record batches of at most the given number of rows. The types of the schema are only used by text. Batches may
            have further columns, and their columns may be in another order.
    """

    look: Callable[[TableFile], Looked]
    read: Callable[[TableFile, pa.Schema, int], Iterator[pa.RecordBatch]]


def format_of(file: TableFile) -> TableFormat:
    """Returns the format that the file's name says. Raises ValueError if its ending is unknown."""
    ending = ending_of(file.path)
    if ending not in FORMATS:
        meant = did_you_mean(ending, FORMATS)
        raise ValueError(f"the name of {file.address} must end in {', '.join(FORMATS)}; text also with .gz{meant}")
    return FORMATS[ending]


def _look_at_parquet(file: TableFile) -> Looked:
    with _parquet(file) as parquet:
        return Looked(parquet.schema_arrow, parquet.metadata.num_rows)


def _read_parquet(file: TableFile, schema: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    with _parquet(file) as parquet:
        yield from parquet.iter_batches(most_rows, columns=schema.names, use_threads=False)


@contextlib.contextmanager
def _parquet(file: TableFile) -> Iterator[Any]:
    from pyarrow import parquet

    buffer = _BUFFER if file.is_local else _REMOTE_BUFFER
    with file.system.open_input_file(file.path) as source:
        yield parquet.ParquetFile(source, buffer_size=buffer, pre_buffer=False)


def _look_at_orc(file: TableFile) -> Looked:
    from pyarrow import orc

    with file.system.open_input_file(file.path) as source:
        opened = orc.ORCFile(source)
        return Looked(opened.schema, opened.nrows)


def _read_orc(file: TableFile, schema: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    from pyarrow import orc

    with file.system.open_input_file(file.path) as source:
        opened = orc.ORCFile(source)
        for number in range(opened.nstripes):
            yield from sliced(opened.read_stripe(number, columns=schema.names), most_rows)


def _look_at_arrow(file: TableFile) -> Looked:
    from pyarrow import ipc

    with file.system.open_input_file(file.path) as source:
        if _is_random_access(source):
            reader = ipc.open_file(source)
            return Looked(reader.schema, reader.count_rows() if hasattr(reader, "count_rows") else None)
        return Looked(ipc.open_stream(source).schema, None)


def _read_arrow(file: TableFile, schema: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    from pyarrow import ipc

    with file.system.open_input_file(file.path) as source:
        is_random_access = _is_random_access(source)
        open_ = ipc.open_file if is_random_access else ipc.open_stream
        fields = open_(source).schema
        source.seek(0)
        included = [fields.get_field_index(name) for name in schema.names]
        reader = open_(source, options=ipc.IpcReadOptions(included_fields=included, use_threads=False))
        if not is_random_access:
            for batch in reader:
                yield from sliced(batch, most_rows)
            return
        for number in range(reader.num_record_batches):
            yield from sliced(reader.get_batch(number), most_rows)


def _is_random_access(source: Any) -> bool:
    """Returns if a file is in Arrow's file format. Otherwise it should be in the streaming format."""
    start = source.read(8)
    source.seek(0)
    if start[:4] == b"FEA1":
        raise ValueError("a file of Feather version 1; write version 2")
    return start[:6] == b"ARROW1"


def sliced(batch: pa.RecordBatch, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a batch, at most ``most_rows`` at a time."""
    for first in range(0, batch.num_rows, most_rows):
        yield batch.slice(first, most_rows)


def _look_at_csv(file: TableFile) -> Looked:
    import pyarrow as pa

    kinds, num_rows = kinds_of_csv(file)
    return Looked(pa.schema([(name, pa.string()) for name in kinds]), num_rows, kinds)


def _look_at_json(file: TableFile) -> Looked:
    return Looked(*schema_of_json(file), is_sparse=True)


_ARROW = TableFormat(_look_at_arrow, _read_arrow)
_CSV = TableFormat(_look_at_csv, read_csv)
_JSON = TableFormat(_look_at_json, read_json)

#: Formats by the ending of a file's name.
FORMATS = {
    ".parquet": TableFormat(_look_at_parquet, _read_parquet),
    ".orc": TableFormat(_look_at_orc, _read_orc),
    ".arrow": _ARROW,
    ".feather": _ARROW,
    ".ipc": _ARROW,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".json": _JSON,
    ".jsonl": _JSON,
    ".ndjson": _JSON,
}
