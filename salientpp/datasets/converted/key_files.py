"""Writes the keys of vertices to a converted graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.datasets.arrays import check_file
from salientpp.store.directory.files import ARROW
from salientpp.store.directory.journal import says_what_to_do
from salientpp.store.key_table import arrow, check_key_types, write_key_file

if TYPE_CHECKING:
    import pyarrow as pa


def write_keys_of_vertices(keys: Path, num_vertices: int, path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Copies an Arrow file of keys, one batch in memory at a time.

    The result depends on the keys only, not on the batches of the file.

    Returns:
        The manifest's description of the file, and name and type of each key column.

    Raises:
        ValueError: the file is damaged, a key has a null or a type in which keys are not stored, or the number of rows is not ``num_vertices``.
    """
    pyarrow = arrow()
    check_file(keys)
    try:
        with pyarrow.OSFile(str(keys)) as source, pyarrow.ipc.open_file(source) as reader:
            check_key_types(reader.schema, str(keys))
            with says_what_to_do(path), path.open("wb") as file:
                num_rows = write_key_file(file, reader.schema, _batches(reader))
                file.flush()
                os.fsync(file.fileno())
            columns = [{"name": field.name, "type": str(field.type)} for field in reader.schema]
    except pyarrow.ArrowException as error:
        raise ValueError(f"{keys} is damaged, or not an Arrow file ({error}); convert the tables again") from None
    if num_rows != num_vertices:
        raise ValueError(f"{keys} must have a row per vertex, expected {num_vertices}, got {num_rows}; convert the tables again")  # fmt: skip
    return {"dtype": ARROW, "shape": [num_rows]}, columns


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
