"""Finds the files that a pattern names, and reads rows from files of every kind."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from salientpp.addresses import local_path
from salientpp.datasets.arrays import check_file
from salientpp.datasets.converted.arrays import StoredArray, array_edges, array_rows
from salientpp.datasets.converted.column_names import UNKNOWN, Ends
from salientpp.datasets.converted.parquet import parquet_edges, parquet_rows
from salientpp.datasets.converted.pieces import EdgeSource, Rows
from salientpp.datasets.converted.text import text_edges, text_rows

#: Endings of files with text.
TEXT = (".txt", ".tsv", ".csv", ".el", ".edges")

#: Endings of files with edges or rows. Text may also end in .gz.
FILES = (*TEXT, ".npy", ".parquet")


class Finder:
    """Finds the files and folders of a source. This class finds those on this host.

    Attributes:
        versions: address, size, time and version of each file that was fetched, as JSON values.
    """

    versions: Sequence[Sequence[Any]] = ()

    def files(self, name: str, pattern: str) -> list[Path]:
        """Returns the files that match ``pattern``; see :func:`find_files`."""
        return find_files(name, str(local_path(pattern)))

    def path(self, name: str, place: str) -> Path:
        """Returns the path of a file or folder, which need not exist. ``name`` is the user's name of the source, for errors."""
        return local_path(place)


#: Finds what lies on this host.
ON_THIS_HOST = Finder()


def find_files(name: str, pattern: str) -> list[Path]:
    """Returns the files that match ``pattern``, ordered by the numbers in their names. ``name`` is the user's name for them, for errors.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: the files are of different kinds.
    """
    found = [pattern] if Path(pattern).exists() or not glob.has_magic(pattern) else glob.glob(pattern)
    if not found:
        raise FileNotFoundError(f"{name}: no file matches {pattern}")
    paths = [Path(path) for path in sorted(found, key=by_numbers)]
    for path in paths:
        check_file(path)
    check_kinds(name, pattern, paths)
    return paths


def check_kinds(name: str, pattern: str, paths: Sequence[Path]) -> None:
    """Raises ValueError if the files that match a pattern are of different kinds, or of an unknown kind."""
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"{name}: files of {pattern} must all be of one kind, got {', '.join(sorted(kinds))}")


def by_numbers(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def kind_of(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in TEXT:
        return "text"
    if path.suffix in (".npy", ".parquet"):
        return path.suffix[1:]
    raise ValueError(f"the name of {path} must end in {', '.join(TEXT)} (also with .gz), .npy or .parquet")


def rows_of(paths: Sequence[Path], dtype: type, skip: int) -> Rows:
    kind = kind_of(paths[0])
    if kind == "npy":
        return array_rows([StoredArray.of(path) for path in paths])
    return parquet_rows(paths) if kind == "parquet" else text_rows(paths, dtype, skip=skip)


def edges_of(paths: Sequence[Path], skip: int | None = 0, ends: Ends = UNKNOWN, name: str = "") -> EdgeSource:
    """Returns the edges of files of one kind, one file after another. ``ends`` helps to tell named columns apart.

    ``skip`` is the number of text lines to leave out; None finds headers. ``name`` is the user's name of the files, for errors.
    """
    kind = kind_of(paths[0])
    if kind == "npy":
        return array_edges([StoredArray.of(path) for path in paths])
    return parquet_edges(paths, ends) if kind == "parquet" else text_edges(paths, skip, ends, name)
