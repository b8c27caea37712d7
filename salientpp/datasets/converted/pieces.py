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
    """Some edges that follow one another in a source."""

    source: np.ndarray  # integers of any type, [n]
    target: np.ndarray
    where: Callable[[int], str]  # file and line or position of an edge of the piece, for errors
    done: int  # how much of the source's ``total`` has been read with it


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

    ``pieces``, called with a number, gives all edges in their order, at most so many at a time; ValueError where the source is damaged.
    """

    pieces: Callable[[int], Iterator[EdgePiece]]
    total: int  # in ``unit``, for progress
    num_edges: int | None = None  # None where only reading tells
    unit: str = "edges"


@dataclass(frozen=True)
class Rows:
    """The rows of one attribute, or the ids of a split.

    ``pieces``, called with a number of bytes, gives all rows in their order, in pieces of at most so many bytes or of one row; at least one piece, which
    may be empty. ValueError where the source is damaged, or rows differ in their number of entries.
    """

    pieces: Callable[[int], Iterator[RowPiece]]
    total: int  # in ``unit``, for progress
    num_rows: int | None = None  # None where only reading tells
    unit: str = "rows"
    held_bytes: int = 0  # memory that reading holds beside the pieces


@dataclass(frozen=True)
class Split:
    """Which vertices are in a split: ids, or a mask of all vertices."""

    rows: Rows
    is_mask: bool = False


@dataclass(frozen=True)
class Vertices:
    """What a source has of one type of vertices."""

    num_vertices: int | None  # None: as many as the attributes have rows, or the largest id and one
    columns: Mapping[str, Rows] = field(default_factory=dict)  # labels are called ``y``
    splits: Mapping[str, Split] = field(default_factory=dict)
    keeps_unlabelled: bool = False  # else splits leave out the vertices that ``y`` marks as unlabelled


@dataclass(frozen=True)
class Source:
    """A graph that can be read in pieces. The type and the relation of a homogeneous graph are None."""

    name: str
    vertices: Mapping[str | None, Vertices]
    edges: Mapping[EdgeName, Edges]
    both_directions: bool = False  # every edge stands for two, one after the other
    undirected: bool = False  # every edge stands for two, and pairs that come up again are one
    files: tuple[Path, ...] = ()  # their sizes and times tell whether the source has changed
    made_of: Mapping[str, object] = field(default_factory=dict)  # tells it where there are no files
    left_out: tuple[str, ...] = ()  # attributes that are not converted
