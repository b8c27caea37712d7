"""Partitions a graph of tables with keys in one call: converts the tables to a hidden folder beside the result, and partitions from there."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.datasets.converted.budget import read_bytes
from salientpp.datasets.converted.convert import convert
from salientpp.datasets.converted.directory import load_converted, open_arrays, read_converted
from salientpp.datasets.tabular.changes import (
    asked_origin,
    check_report,
    check_same,
    differences,
    discard_rest,
    in_words,
    option_differences,
)
from salientpp.datasets.tabular.description import TableGraph
from salientpp.datasets.tabular.open import described_tables
from salientpp.files import says_where_to_write
from salientpp.partitioning.assign import check_num_parts
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.typed import Fanouts
from salientpp.progress import Progress
from salientpp.store.directory.description import check_topology
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.journal import HALF_WRITTEN, JOURNAL, alone
from salientpp.store.directory.kinds import CONVERTED, MANIFEST, has_manifest, is_converted
from salientpp.store.directory.load import load
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.origin import table_origin
from salientpp.store.directory.owned import hidden_name, listed_files, remove_files
from salientpp.store.directory.task import as_given
from salientpp.store.directory.unfinished import check_root_is_free
from salientpp.store.directory.writer import partition
from salientpp.vip.inclusion import check_batch_size

#: Options of the conversion: the defaults of :func:`convert`.
_PLAIN = {"deduplicate": False, "dtype": {}, "finite": False}


def partition_tables(
    source: str | Mapping[str, Any],
    num_parts: int,
    root: str | Path,
    num_neighbors: Fanouts = (15, 10, 5),
    batch_size: int = 1024,
    *,
    memory: int | str = "4GB",
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> PartitionedGraph:
    """Converts tables with keys and partitions the graph. The directory has the same bytes as after :func:`convert` and :func:`salientpp.partition`.

    The converted graph lies in the hidden folder ``.<name>.tables`` beside ``root`` until ``root`` is complete. A stopped run continues if it is called
    again with the same arguments and tables. A call that would write the complete directory ``root`` again does nothing.

    Args:
        source: ``"tables:FILE.toml"`` or a mapping, as for :func:`convert`.
        num_parts, root, num_neighbors, batch_size: as for :func:`salientpp.partition`.
        memory: limit of the resident memory while tables are converted: bytes, or a text such as "4GB". Partitioning may take more.
        report: file to write as JSON, as for :func:`convert`.
        overwrite: replace an existing dataset directory once the new one is complete, or the unfinished work of another call.
        progress: object that is told of every step.
        options: the other arguments of :func:`salientpp.partition`, without ``split`` and ``edge_split``, which the description gives.

    Returns:
        The opened directory.

    Raises:
        ValueError: an argument, the description or a table is wrong. Or ``root`` is complete and was made of other tables or with other arguments; the text
            says what differs.
        OSError: a table cannot be read, or a file cannot be written. Finished steps are kept for the next run.
    """
    root, progress = Path(root), progress or Progress()
    read_bytes(memory)  # a wrong text is an error even if nothing is to do
    asked = _arguments(num_parts, root, num_neighbors, batch_size, options)
    graph = described_tables(source)
    if not overwrite and has_manifest(root) and _is_complete(root, graph, asked, progress):
        check_report(report, root)
        _remove_rest(root, graph)
        return load(root)
    check_root_is_free(root, overwrite)
    with _folder_beside(root) as folder:
        is_begun = _is_begun(folder, graph, root, overwrite)
        if not is_begun or (overwrite and report is not None and not Path(report).is_file()):
            convert(source, folder, memory=memory, report=report, overwrite=overwrite, progress=progress)
        else:
            check_report(report, root)
        data = load_converted(folder)
        part = partition(
            data, num_parts, root, num_neighbors, batch_size, overwrite=overwrite, progress=progress, **options
        )
        _remove(folder)
    return part


def _arguments(
    num_parts: int, root: Path, num_neighbors: Fanouts, batch_size: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Checks the arguments of :func:`salientpp.partition` as far as is possible without a graph. Returns them as JSON."""
    if not {"split", "edge_split"}.isdisjoint(options):
        raise ValueError(
            "split and edge_split are not for tables; name a column with train, val and test as split in the description"
        )
    bound = inspect.signature(partition).bind(None, num_parts, root, num_neighbors, batch_size, **options)
    bound.apply_defaults()
    given = bound.arguments
    names = ("method", "edge_weights", "order", "refine", "tolerance", "seed")
    PartitionOptions(*(given[name] for name in names))
    check_num_parts(num_parts)
    check_batch_size(batch_size)
    check_topology(given["topology"])
    return as_given(given)


def _is_complete(root: Path, graph: TableGraph, asked: Mapping[str, Any], progress: Progress) -> bool:
    """Returns if ``root`` is a dataset directory of these tables, with the arguments ``asked`` of :func:`salientpp.partition`.

    Raises ValueError if it is one of other tables or arguments; the text says what differs.
    """
    made = None if is_converted(root) else table_origin(root)
    origin = None if made is None else asked_origin(graph, _PLAIN)
    if made is None or origin is None:
        return False
    check_same(root, differences(made, origin) + option_differences(made["partition"], asked), made, progress)
    return True


# --- the hidden folder --------------------------------------------------------------------------------------


def _hidden(root: Path, added: str = "tables") -> Path:
    place = Path(os.path.realpath(root))
    return place.parent / hidden_name(place.name, added)


@contextlib.contextmanager
def _folder_beside(root: Path) -> Iterator[Path]:
    """Makes and locks the hidden folder beside ``root``. Yields the path of the converted graph inside it. Empty folders are removed at the end."""
    hidden = _hidden(root)
    made = [path for path in hidden.parents if not path.exists()]  # nearest first
    with says_where_to_write(root, "choose a root in a directory that you may write to"):
        hidden.mkdir(parents=True, exist_ok=True)
    with alone(hidden, root):
        try:
            yield hidden / "graph"
        finally:
            for path in (hidden / "graph", hidden, *made):
                with contextlib.suppress(OSError):  # it holds files
                    path.rmdir()


def _is_begun(folder: Path, graph: TableGraph, root: Path, overwrite: bool) -> bool:
    """Returns if a stopped run has converted these tables. Raises ValueError if it has converted others, and may not be replaced."""
    made = table_origin(folder) if is_converted(folder) else None
    if made is None:
        return False
    origin = asked_origin(graph, _PLAIN)
    found = ["a table gives its rows once, so it cannot be compared"] if origin is None else differences(made, origin)
    if found and not overwrite:
        raise ValueError(
            f"{root} was begun by another command: {in_words(found)}. Repeat that command to continue it, pass overwrite (--overwrite) to start over, or "
            "choose another directory"
        )
    if origin is None or found:
        return False
    discard_rest(folder, graph, origin)
    try:
        open_arrays(folder, read_converted(folder)["files"], verify=False)
    except (
        DatasetError
    ):  # a run was killed that had removed some files after its result was complete, or they were damaged
        _remove(folder)
        return False
    return True


def _remove(folder: Path) -> None:
    """Removes a converted graph. Its manifest goes last, so that a run that is killed here leaves a folder whose files are known."""
    remove_files(folder, (listed_files(folder / MANIFEST, CONVERTED) or set()) | {JOURNAL}, [HALF_WRITTEN])
    (folder / MANIFEST).unlink(missing_ok=True)


def _remove_rest(root: Path, graph: TableGraph) -> None:
    """Removes the converted graph that a run left which was killed after ``root`` was complete. A run that replaces ``root`` and was stopped keeps its own."""
    if _hidden(root).is_dir() and not _hidden(root, "writing").exists():
        with contextlib.suppress(ValueError), _folder_beside(root) as folder:  # if another process writes
            if _is_begun(folder, graph, root, overwrite=True):
                _remove(folder)
