"""Reads tables of Delta Lake and Apache Iceberg. The version that is current when a table is opened is read, so that all passes give the same rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from salientpp.addresses import raise_in_words, reason_of, without_password
from salientpp.datasets.converted.named_files import by_numbers
from salientpp.datasets.tabular.file_formats import Looked, sliced
from salientpp.files import first_line

if TYPE_CHECKING:
    import pyarrow as pa


def open_lake(kind: str, address: str, base: Path, what: str) -> DeltaPart | IcebergPart:
    """Opens a table of a lake. ``kind`` is a key of ``LAKES``; ``base`` is the folder that a relative address begins at.

    Raises:
        ImportError: the package of the lake is missing.
        OSError: the table is missing, forbidden or out of reach.
        ValueError: the table cannot be read.
    """
    shown = f"{kind}:{without_password(address)}"
    if not address.strip():
        raise ValueError(f"{what}: {shown} lacks an address; write {kind}:ADDRESS")
    try:
        return LAKES[kind](address, base, shown, what)
    except ImportError as error:
        package = {"delta": "deltalake", "iceberg": "pyiceberg"}[kind]
        raise ImportError(
            f"{what}: {shown} is read with the {package!r} package, which is not installed or lacks a part ({first_line(error)}): pip install {package}"
        ) from error
    except Exception as error:  # of packages that have many types of errors
        _raise(what, shown, error)


def _raise(what: str, shown: str, error: Exception) -> NoReturn:
    if isinstance(error, MemoryError):
        raise error
    text = f"{type(error).__name__} {error}"
    if isinstance(error, FileNotFoundError) or re.search(
        r"(?i)TableNotFound|NoSuchTable|no log files|not a Delta table|NotFound", text
    ):
        raise_in_words(what, shown, FileNotFoundError(first_line(error)))
    if re.search(r"(?i)AccessDenied|Forbidden|PermissionDenied|\b403\b", text):
        raise_in_words(what, shown, PermissionError(first_line(error)))
    if isinstance(error, OSError) or re.search(r"(?i)connect|timed? ?out|network|request", text):
        raise_in_words(what, shown, OSError(first_line(error)))
    raise ValueError(f"{what}: {shown} cannot be read ({reason_of(error)})") from error


class DeltaPart:
    """A version of a Delta table, as part of the table ``what``."""

    def __init__(self, address: str, base: Path, shown: str, what: str) -> None:
        import deltalake

        uri = _uri(address, base)
        table = deltalake.DeltaTable(uri)
        self.address, self._what, self._at_version = f"{shown} version {table.version()}", what, table.version()
        self.identity = f"delta:{uri}"
        self._shown, self._id = shown, str(table.metadata().id)
        self._dataset = table.to_pyarrow_dataset()
        self.looked = Looked(self._dataset.schema, self._dataset.count_rows())

    def read(self, schema: pa.Schema, most_rows: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        for fragment in sorted(self._dataset.get_fragments(), key=lambda fragment: by_numbers(fragment.path)):
            where, first = f"{self.address}, {fragment.path}", 0
            try:
                scanner = fragment.scanner(
                    schema=self._dataset.schema,
                    columns=schema.names,
                    batch_size=most_rows,
                    batch_readahead=1,
                    fragment_readahead=1,
                    use_threads=False,
                )
                for batch in scanner.to_batches():
                    for some in sliced(batch, most_rows):
                        yield some, where, first
                        first += some.num_rows
            except Exception as error:  # pyarrow has many types of errors
                _raise(self._what, f"{where}, after row {first}", error)

    def facts(self) -> dict[str, Any]:
        # A table that was removed and written again has the same numbers of versions.
        return {"address": self._shown, "version": self._at_version, "id": self._id}

    def check_unchanged(self, what: str) -> None:
        """Does nothing: the files of a version never change."""


class IcebergPart:
    """A snapshot of an Iceberg table, as part of the table ``what``."""

    def __init__(self, address: str, base: Path, shown: str, what: str) -> None:
        self._table = _iceberg_table(address, base)
        snapshot = self._table.current_snapshot()
        self._snapshot = None if snapshot is None else snapshot.snapshot_id
        self._shown, self._what = shown, what
        self.identity = f"iceberg:{self._table.metadata_location}"
        self.address = shown if snapshot is None else f"{shown} snapshot {self._snapshot}"
        self.looked = Looked(self._table.schema().as_arrow(), None)

    def read(self, schema: pa.Schema, most_rows: int) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        first = 0
        try:
            # Without snapshot_id, because the columns of a snapshot have the names of its time. This object keeps the snapshot that was current.
            scan = self._table.scan(selected_fields=tuple(schema.names))
            for batch in scan.to_arrow_batch_reader():
                for some in sliced(batch, most_rows):
                    yield some, self.address, first
                    first += some.num_rows
        except Exception as error:  # of packages that have many types of errors
            _raise(self._what, f"{self.address}, after row {first}", error)

    def facts(self) -> dict[str, Any]:
        # Renaming a column makes no snapshot.
        return {"address": self._shown, "snapshot": self._snapshot, "schema": self._table.schema().schema_id}

    def check_unchanged(self, what: str) -> None:
        """Does nothing: the files of a snapshot never change."""


def _iceberg_table(address: str, base: Path) -> Any:
    """Opens ``CATALOG/NAMESPACE.TABLE`` with a catalog that pyiceberg's settings name, or a metadata file, or the newest metadata of a folder."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    uri = _uri(address, base)
    found = re.fullmatch(r"([\w-]+)/([\w.-]+\.[\w-]+)", address)
    if found and not os.path.exists(uri) and not address.endswith(".json"):
        return load_catalog(found[1]).load_table(found[2])
    return StaticTable.from_metadata(uri if uri.endswith(".json") else _newest_metadata(uri))


def _newest_metadata(uri: str) -> str:
    """Returns the metadata file of a table's folder with the largest number: ``00003-....metadata.json`` or ``v3.metadata.json``."""
    from pyarrow import fs

    system, path = fs.FileSystem.from_uri(uri)
    infos = system.get_file_info(fs.FileSelector(f"{path.rstrip('/')}/metadata", allow_not_found=True))
    names = [info.base_name for info in infos if info.base_name.endswith(".metadata.json")]
    if not names:
        raise FileNotFoundError(f"{uri} has no file metadata/*.metadata.json")
    return f"{uri.rstrip('/')}/metadata/{max(names, key=by_numbers)}"


def _uri(address: str, base: Path) -> str:
    return address if "://" in address else os.path.abspath(base / address)


#: Kinds of lakes, and what opens their tables.
LAKES: dict[str, Callable[[str, Path, str, str], DeltaPart | IcebergPart]] = {
    "delta": DeltaPart,
    "iceberg": IcebergPart,
}
