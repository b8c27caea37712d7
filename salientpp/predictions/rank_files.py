"""Folder of Parquet files of which each rank writes one. The files of all ranks appear together, or none does."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any

from salientpp.loader.values import Options
from salientpp.predictions.destination import folder_at
from salientpp.predictions.parquet_writer import ParquetOutput, new_parquet
from salientpp.predictions.part_files import check_others
from salientpp.ranks.comm import Comm
from salientpp.store.directory.opened import PartitionedGraph

if TYPE_CHECKING:
    import pyarrow as pa


def comm_of(data: Any, process_group: Any, timeout: float | timedelta) -> Comm:
    """Connects the ranks of a graph, and of a job whose ranks hold a graph in memory. Collective. ValueError if ``timeout`` is wrong."""
    error, waits = None, Options().checked_timeout()
    try:
        waits = Options(timeout=timeout).checked_timeout()
    except ValueError as raised:
        error = raised
    return Comm.create(process_group, waits, error=error, job=data.job if isinstance(data, PartitionedGraph) else None)


class RankFile:
    """File ``part-<rank in five digits>.parquet`` of this rank in a folder.

    Construction and :meth:`end` are collective.

    Raises:
        ValueError: on some rank the folder cannot be written, or it has files of ranks that this job lacks.
        ImportError: the package that reaches the address is missing.
    """

    def __init__(self, out: str | PathLike[str], comm: Comm) -> None:
        self._comm = comm
        with ExitStack() as stack:
            with comm.together("open its file of predictions"):
                folder = folder_at(out)
                folder.prepare()
                check_others(folder, "part-*.parquet", comm.size, f"of other ranks than the {comm.size} of this job")
                file = stack.enter_context(new_parquet(folder, f"part-{comm.rank:05d}.parquet"))
            self._file: ParquetOutput | None = file
            self._is_broken = False
            self._stack = stack.pop_all()

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def append(self, table: pa.Table) -> None:
        """Appends a table as one row group. OSError if the file cannot be written. Then it will not appear, because it may have a part of the table."""
        if self._file is None:
            raise RuntimeError("the file of predictions is closed; write inside the with block, or make another writer")
        self._check_whole()
        self._is_broken = True
        self._file.append(table)
        self._is_broken = False

    def _check_whole(self) -> None:
        if self._is_broken:
            raise OSError(
                "rows could not be written to the file of predictions before; make another writer, and write all rows again"
            )

    def end(self, otherwise: pa.Schema, write_rest: Callable[[], None], error: BaseException | None = None) -> None:
        """Completes the files of all ranks, or removes them if a rank has an ``error``. Later calls do nothing.

        Args:
            otherwise: columns of the files if no rank has appended a table.
            write_rest: appends the last tables.

        Raises:
            ValueError: the ranks have different columns.
            OSError: this rank's file cannot be completed.
            RuntimeError: another rank has failed.
            BaseException: ``error`` itself, or an error of ``write_rest``.
        """
        file = self._file
        if file is None:
            return
        try:
            with self._stack as stack, self._comm.patient():
                with self._comm.together("write its predictions", RuntimeError) as told:
                    if error is not None:
                        raise error
                    self._check_whole()
                    write_rest()
                    told.mine = {"schema": None if file.schema is None else _as_text(file.schema)}
                schema = _agreed([facts["schema"] for facts in told.everyone]) or otherwise
                with self._comm.together("write its predictions", RuntimeError):
                    file.finish(schema)
                with self._comm.together("name its file of predictions", RuntimeError):
                    stack.close()
        finally:
            self._file = None

    def discard(self) -> None:
        """Removes this rank's unfinished file. Not collective: the other ranks know of the failure."""
        self._file = None
        with contextlib.suppress(_Discarded), self._stack:
            raise _Discarded


class _Discarded(Exception):
    """Ends the ``with`` block of a file that is not wanted."""


def _as_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _agreed(schemas: list[str | None]) -> pa.Schema | None:
    """Returns the columns of the files; None if no rank has any. Ranks without rows have None.

    Raises:
        ValueError: ranks have different columns.
    """
    import pyarrow as pa

    found = [
        (rank, pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))))
        for rank, text in enumerate(schemas)
        if text is not None
    ]
    for rank, schema in found:
        if not schema.equals(found[0][1]):
            raise ValueError(
                f"all ranks must write the same columns, but rank {found[0][0]} has {_in_words(found[0][1])}, and rank {rank} has "
                f"{_in_words(schema)}; write the same outputs on every rank"
            )
    return found[0][1] if found else None


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
