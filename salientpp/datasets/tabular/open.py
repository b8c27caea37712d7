"""Opens tables with keys as a source of a conversion. pyarrow is imported only when tables are opened."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.pieces import Source
from salientpp.datasets.tabular.description import TableGraph, read_description
from salientpp.datasets.tabular.encoding import Encoding
from salientpp.datasets.tabular.staging import staged_tables
from salientpp.files import check_output, write_whole
from salientpp.progress import Progress
from salientpp.store.key_table import arrow

#: Beginning of the name of a source that a TOML file describes.
TABLES = "tables:"


def described_tables(source: str | Mapping[str, Any]) -> TableGraph:
    """Reads ``tables:FILE.toml``, or a mapping with the contents of such a file. ValueError if the description is wrong. ImportError without pyarrow."""
    arrow()  # before memory is measured, because its own is not for arrays
    return read_description(source.removeprefix(TABLES) if isinstance(source, str) else source)


@contextlib.contextmanager
def opened_tables(
    graph: TableGraph,
    root: Path,
    budget: Budget,
    report: str | Path | None,
    encoding: Encoding | None,
    progress: Progress,
) -> Iterator[Source]:
    """Opens the tables that a description names, and writes the report. The ``with`` block converts the source to ``root``.

    If ``encoding`` of an earlier graph is given, columns are encoded in the same way.

    Raises:
        ValueError: the description or a table is wrong. The text names the entry, and the file and row.
        OSError: a table cannot be read, or a file cannot be written.
    """
    if report is not None:
        check_output(Path(report))
    with staged_tables(graph, root, budget, progress, encoding) as staged:
        if report is not None:
            text = json.dumps(staged.report, indent=1, default=str)
            write_whole(Path(report), lambda file: file.write(f"{text}\n".encode()))
        yield staged.source
