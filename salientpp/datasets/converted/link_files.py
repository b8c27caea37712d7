"""Reads the splits of a link-prediction dataset (ogbl-...), and writes them into the files of a converted graph.

Such a split is a file of ``torch.save``: a dictionary of arrays. OGB names the edges ``edge`` [M, 2], ``source_node`` and ``target_node`` [M], or ``head`` and
``tail`` [M]. They all become the column ``edge`` [M, 2]. Other arrays keep their names.

Tensors are mapped and read in pieces. An array of numpy is a part of the file's pickle, so it is whole in memory while its split is written.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import check_file, form
from salientpp.datasets.converted.arrays import saved_rows
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.columns import write_column
from salientpp.datasets.converted.pieces import LinkFile, RowPiece, Rows, counted, first_row
from salientpp.datasets.torch_files import is_archive, read_torch_file
from salientpp.progress import Progress

#: Names that OGB gives to the two ends of an edge.
_ENDS = (("source_node", "target_node"), ("head", "tail"))

#: Columns of vertex ids.
_IDS = ("edge", "edge_neg", "source_node_neg", "target_node_neg", "head_neg", "tail_neg")

#: Most bytes of a column's name.
_LONGEST = 200

#: Bytes of memory for each byte of pickled arrays while they are read. Measured: 2.8 for the format since torch 1.6, 1.8 for the older one.
_READ_BYTES = 3

_DTYPES = "?bBhHiIqQlLefd"


def numpy_classes() -> list[Any]:
    """Returns the functions and classes that torch must allow, so that ``weights_only=True`` reads a numpy array that numpy 1 or 2 pickled."""
    rebuild = np.empty(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *{type(np.dtype(code)) for code in _DTYPES}]


def link_file(path: Path) -> LinkFile:
    """Opens the file of a split. Only the size of its pickle is read."""
    check_file(path)
    pickled = path.stat().st_size
    if is_archive(path):
        with zipfile.ZipFile(path) as archive:
            pickled = sum(each.file_size for each in archive.infolist() if each.filename.endswith("/data.pkl"))
    return LinkFile(path, lambda: _columns(path), _READ_BYTES * pickled)


def _columns(path: Path) -> dict[str, Rows]:
    found = read_torch_file(
        path,
        more=numpy_classes(),
        refused=lambda needed: (
            f"expected a dictionary of arrays, but it needs {needed}; save it with arrays of numbers only"
        ),
        map_tensors=True,
    )
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a dictionary of arrays, got {form(found)}")
    for key in map(str, found):
        if not key or set(key) & {"/", "\0"} or len(os.fsencode(key)) > _LONGEST:
            raise ValueError(
                f"{path}: the column {key!r} cannot have this name, because a file is called after it; rename it, without '/' and with at most {_LONGEST} bytes"
            )
    columns = {str(key): _rows(value, f"{path}: {key}", is_archive(path)) for key, value in found.items()}
    for ends in _ENDS:
        if set(ends) <= set(columns) and "edge" not in columns:
            columns["edge"] = _joined(*(columns.pop(end) for end in ends))
    if "edge" not in columns:
        raise ValueError(
            f"{path} must have the key edge, the keys source_node and target_node, or the keys head and tail; got {', '.join(map(str, found)) or 'none'}"
        )
    # The edges come first, since the other columns must have as many rows.
    return {"edge": columns.pop("edge"), **columns}


def _rows(value: Any, name: str, is_mapped: bool) -> Rows:
    if isinstance(value, Tensor) and is_mapped:
        return saved_rows(value, name)
    array = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(array, Tensor) or array.dim() == 0:
        raise ValueError(f"{name} must be an array with a row per edge, got {form(array)}")
    held: Tensor = array

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, held[:1].numel() * held.element_size()))
        for first in range(0, max(1, len(held)), most):
            rows = held[first : first + most]
            yield RowPiece(rows, counted(f"{name}[", first, "]"), first + len(rows))

    return Rows(pieces, len(held), len(held))


def _joined(source: Rows, target: Rows) -> Rows:
    """Returns edges [M, 2] that are read in pieces from a column of sources [M] and a column of targets [M]."""

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        for one, other in zip(source.pieces(most_bytes // 2), target.pieces(most_bytes // 2)):
            if (
                one.values.dim() != 1
                or one.values.shape != other.values.shape
                or one.values.dtype != other.values.dtype
            ):
                raise ValueError(
                    f"{one.where(0)} and {other.where(0)} must be ends of the same edges, of one dtype, got {form(one.values)} and {form(other.values)}"
                )
            yield RowPiece(torch.stack([one.values, other.values], 1), one.where, one.done)

    if source.num_rows != target.num_rows:
        first = next(source.pieces(8))
        raise ValueError(
            f"{first.where(0)}: expected as many targets as sources, got {source.num_rows} sources and {target.num_rows} targets"
        )
    return Rows(pieces, source.total, source.num_rows)


def write_links(
    split: str, links: LinkFile, num_vertices: int, work: Path, budget: Budget, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Writes the columns of a split to files ``l.<split>.<column>.npy`` below ``work``.

    Returns the manifest's description of each file, and the number of rows of each column. Raises ValueError if an id is out of range, or a column has
    another number of rows than the edges.
    """
    budget.needs(links.held_bytes, f"reading the arrays of {links.path} at once")
    files: dict[str, dict[str, Any]] = {}
    num_rows: dict[str, int] = {}
    for name, rows in links.columns().items():
        progress.begin(f"reading {name} of the split {split}", rows.total, rows.unit)
        if name in _IDS:
            rows = _checked(name, rows, num_vertices)
        # Negative edges may have any number. Every other column belongs to the edges.
        expected = None if name in ("edge", "edge_neg") else num_rows["edge"]
        if expected is not None and rows.num_rows != expected:
            raise ValueError(f"{links.path}: {name} must have {expected} rows, one per edge, got {rows.num_rows}")
        file = f"l.{split}.{name}.npy"
        less = Budget(budget.memory, budget.working - links.held_bytes)
        files[file] = write_column(
            name, rows, rows.num_rows, work / file, less, dtype=None, finite=False, progress=progress
        )
        num_rows[name] = files[file]["shape"][0]
    return files, num_rows


def _checked(name: str, rows: Rows, num_vertices: int) -> Rows:
    """Returns the rows with vertex ids as int64. The ids are checked while they are read: ValueError if one is out of range, or an edge lacks two ends."""

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        for piece in rows.pieces(most_bytes):
            ids = piece.values
            if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                raise ValueError(f"{piece.where(0)}: {name} must hold vertex ids, got {form(ids)}")
            if name.startswith("edge") and ids.shape[1:] != (2,):
                raise ValueError(f"{piece.where(0)}: {name} must have shape [M, 2], got {form(ids)}")
            wrong = (ids < 0) | (ids >= num_vertices)
            if bool(wrong.any()):
                raise ValueError(
                    f"{piece.where(first_row(wrong))}: {name} must hold vertex ids in [0, {num_vertices}), got {int(ids[wrong][0])}"
                )
            yield RowPiece(ids.to(torch.int64), piece.where, piece.done)

    return Rows(pieces, rows.total, rows.num_rows, rows.unit)
