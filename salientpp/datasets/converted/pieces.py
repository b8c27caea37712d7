"""Describes a source that gives its edges and rows in pieces, so that no array is ever whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from salientpp.store.frames import Frame

EdgeName = tuple[str, str, str] | None


@dataclass(frozen=True)
class EdgePiece:
    """Consecutive edges of an :class:`EdgeSource` that have been read into memory."""

    source: np.ndarray  # integers of any type, [n]
    target: np.ndarray
    where: Callable[[int], str]  # file and line or position of an edge of the piece, for errors
    done: int  # amount of the source's ``total`` that is read when this piece ends


@dataclass(frozen=True)
class RowPiece:
    """Some rows [n, ...] of :class:`Rows`, in memory. ``where`` and ``done`` are as in :class:`EdgePiece`.

    ``at`` is None if the rows are in the order of the vertices. Otherwise it has the vertex id of each row, integers [n]. All pieces together have each
    id once.
    """

    values: Tensor
    where: Callable[[int], str]
    done: int
    at: np.ndarray | None = None


def counted(before: str, first: int, after: str = "") -> Callable[[int], str]:
    """Returns the function ``where`` of a piece. It names entry ``i`` of the piece in errors, as number ``first + i`` between two texts."""
    return lambda at: f"{before}{first + at}{after}"


def first_row(wrong: Tensor) -> int:
    """Returns the number of the first row of a bool tensor [n, ...] that has a True entry."""
    return int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])


@dataclass(frozen=True)
class EdgeSource:
    """Edges of one relation, which stay on disk until they are read.

    ``pieces(most)`` gives all edges in their order, at most ``most`` at a time. It raises ValueError if the source is damaged.
    """

    pieces: Callable[[int], Iterator[EdgePiece]]
    total: int  # in ``unit``, for progress
    num_edges: int | None = None  # None if it is unknown before reading
    unit: str = "edges"
    left_out: tuple[str, ...] = ()  # columns that are not converted
    columns: Mapping[str, Rows] = field(default_factory=dict)  # attributes: a row per edge, in the order of the pieces
    ascends: bool = False  # the targets ascend, so the edges need no sorting; edges with attributes must ascend


@dataclass(frozen=True)
class Rows:
    """Rows of one attribute, or ids of a split, which stay on disk until they are read.

    ``pieces(most_bytes)`` gives all rows in their order, in pieces. A piece has at most ``most_bytes``, or is one row. There is at least one piece, which may
    be empty. ``pieces`` raises ValueError if the source is damaged, or if rows differ in their number of entries.
    """

    pieces: Callable[[int], Iterator[RowPiece]]
    total: int  # in ``unit``, for progress
    num_rows: int | None = None  # None if it is unknown before reading
    unit: str = "rows"
    held_bytes: int = 0  # memory that reading needs in addition to the pieces


@dataclass(frozen=True)
class Split:
    """The vertices of a split: their ids, or a mask of all vertices."""

    rows: Rows
    is_mask: bool = False


@dataclass(frozen=True)
class Vertices:
    """One type of vertices of a source."""

    num_vertices: int | None  # None: the number of rows of the attributes, or the largest id plus one
    columns: Mapping[str, Rows] = field(default_factory=dict)  # labels are called ``y``
    splits: Mapping[str, Split] = field(default_factory=dict)
    keeps_unlabelled: bool = False  # if False, splits leave out the vertices that ``y`` marks as unlabelled
    keys: Path | None = None  # Arrow file with the key of each vertex, in the order of the ids
    frames: Mapping[str, Frame] = field(default_factory=dict)  # tables whose tensors are among the columns


@dataclass(frozen=True)
class LinkFile:
    """File of a link split, opened only when ``columns()`` is called. That function returns the columns by name; ``edge`` [M, 2] is the first."""

    path: Path
    columns: Callable[[], Mapping[str, Rows]]
    held_bytes: int  # memory that the open file needs in addition to the pieces


@dataclass(frozen=True)
class Source:
    """Graph to convert, which is read in pieces. A homogeneous graph has the only vertex type None and the only relation None."""

    name: str
    vertices: Mapping[str | None, Vertices]
    edges: Mapping[EdgeName, EdgeSource]
    links: Mapping[str, LinkFile] = field(default_factory=dict)  # by split; for a graph with one type of vertices
    both_directions: bool = False  # store each edge, and directly after it the inverse edge
    undirected: bool = False  # in each relation within one type, store each edge in both directions, and each pair once
    files: tuple[Path, ...] = ()  # files of the source; if their sizes or times differ, the source has changed
    versions: Sequence[Sequence[Any]] = ()  # JSON values that identify the versions of files that were fetched
    made_of: Mapping[str, object] = field(default_factory=dict)  # identifies a source without files
    left_out: tuple[str, ...] = ()  # attributes that are not converted
    origin: Mapping[str, object] = field(
        default_factory=dict
    )  # JSON object that says where tables came from, and how values were encoded
