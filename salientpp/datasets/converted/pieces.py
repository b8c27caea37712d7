"""Describes a source that gives its edges and rows in pieces, so that no array is ever whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

EdgeName = tuple[str, str, str] | None


@dataclass(frozen=True)
class EdgePiece:
    """Some edges that follow one another in a source.

    Attributes:
        source, target: integers of any type, [n].
        where: file and line or position of an edge of the piece, for errors.
        done: how much of the source's ``total`` has been read with it.
    """

    source: np.ndarray
    target: np.ndarray
    where: Callable[[int], str]
    done: int


@dataclass(frozen=True)
class RowPiece:
    """Some rows that follow one another in a source, [n, ...]; ``where`` and ``done`` as of edges."""

    values: Tensor
    where: Callable[[int], str]
    done: int


def counted(before: str, first: int, after: str = "") -> Callable[[int], str]:
    """``where`` of a piece whose entries are numbered from ``first``."""
    return lambda at: f"{before}{first + at}{after}"


def first_row(wrong: Tensor) -> int:
    """The first row in which an entry is true."""
    return int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])


@dataclass(frozen=True)
class Edges:
    """The edges of one relation.

    Attributes:
        pieces: called with a number, gives all edges in their order, at most so many at a time; ValueError, with file and line or position, where the
            source is damaged.
        total, unit: what progress is counted in, edges or bytes of a file.
        num_edges: E, or None where only reading tells.
    """

    pieces: Callable[[int], Iterator[EdgePiece]]
    total: int
    num_edges: int | None = None
    unit: str = "edges"


@dataclass(frozen=True)
class Rows:
    """The rows of one attribute, or the ids of a split.

    Attributes:
        pieces: called with a number of bytes, gives all rows in their order, in pieces of at most so many bytes or of one row; at least one piece, which may
            be empty. ValueError where the source is damaged, or rows differ in their number of entries.
        total, unit: as of edges.
        num_rows: or None where only reading tells.
        held_bytes: the memory that reading holds beside the pieces.
    """

    pieces: Callable[[int], Iterator[RowPiece]]
    total: int
    num_rows: int | None = None
    unit: str = "rows"
    held_bytes: int = 0


@dataclass(frozen=True)
class Split:
    """Which vertices are in a split: ids, or a mask of all vertices."""

    rows: Rows
    is_mask: bool = False


@dataclass(frozen=True)
class Vertices:
    """What a source has of one type of vertices.

    Attributes:
        num_vertices: or None: as many as the attributes have rows, or the largest id and one.
        columns: name -> rows. Labels are called ``y``.
        splits: name -> which vertices.
        keeps_unlabelled: splits are stored as they are. Else vertices that ``y`` marks as unlabelled are left out of them.
    """

    num_vertices: int | None
    columns: Mapping[str, Rows] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    keeps_unlabelled: bool = False


@dataclass(frozen=True)
class Source:
    """A graph that can be read in pieces.

    Attributes:
        name: for errors.
        vertices: type -> what there is of it; the type of a homogeneous graph is None.
        edges: relation -> its edges; that of a homogeneous graph is None.
        both_directions: every edge stands for two, one after the other.
        undirected: every edge stands for two, and pairs that come up again are one.
        files: what it is read from, to tell whether it has changed.
        made_of: what stands for it where there are no files.
        left_out: names of attributes that are not converted.
    """

    name: str
    vertices: Mapping[str | None, Vertices]
    edges: Mapping[EdgeName, Edges]
    both_directions: bool = False
    undirected: bool = False
    files: tuple[Path, ...] = ()
    made_of: Mapping[str, object] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
