"""Keys for graphs of tests, of two columns: vertex i is customer ``c<i>`` of shop i % 3."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from salientpp.store.key_table import KeyTable

#: Names of the key columns.
COLUMNS = ("shop", "customer_id")


def known_keys(folder: Path, num_rows: int, columns: tuple[str, str] = COLUMNS) -> KeyTable:
    """Writes the keys of ``num_rows`` vertices into a new file of the folder."""
    numbers = range(num_rows)
    table = pa.table({
        columns[0]: pa.array([i % 3 for i in numbers], pa.int64()),
        columns[1]: pa.array([f"c{i}" for i in numbers], pa.large_string()),
    })  # fmt: skip
    path = folder / f"keys-{len([*folder.iterdir()])}.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return KeyTable(path)


def numbers_in(table: pa.Table, name: str = "customer_id") -> list[int]:
    """Returns the vertices of the rows, from their keys."""
    return [int(key[1:]) for key in table.column(name).to_pylist()]
