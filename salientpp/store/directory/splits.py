"""Reads the splits of a dataset directory: the seeds of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.store.directory.description import EdgeType, VertexType, words_of_type
from salientpp.store.directory.files import Arrays


def vertex_split(arrays: Arrays, vertices: VertexType, name: str, stored: Sequence[int]) -> Tensor:
    """Global ids int64, ascending, of the vertices in a split, or in 'all', of parts on disk that follow one another.

    Raises:
        ValueError: the type has no such split.
    """
    if name == "all":
        return torch.arange(vertices.offsets[stored[0]], vertices.offsets[stored[-1] + 1], device="cpu")
    return _read(arrays, vertices, name, stored)


def edge_split(
    arrays: Arrays, edges: EdgeType, name: str, stored: Sequence[int], targets: VertexType, indptr: Tensor
) -> Tensor:
    """Positions int64 in the lists, ascending, of the edges in a split, or in 'all', whose targets the parts own.

    Args:
        targets: the type of the targets.
        indptr: of the lists.

    Raises:
        ValueError: the type has no such split.
    """
    if name == "all":
        begin, end = (int(indptr[targets.offsets[at]]) for at in (stored[0], stored[-1] + 1))
        return torch.arange(begin, end, device="cpu")
    return _read(arrays, edges, name, stored)


def _read(arrays: Arrays, type_: VertexType | EdgeType, name: str, stored: Sequence[int]) -> Tensor:
    if name not in type_.splits:
        known = ", ".join(repr(split) for split in [*type_.splits, "all"])
        words = words_of_type(type_.name) or (" of edges" if isinstance(type_, EdgeType) else "")
        raise ValueError(f"{arrays.root} has the splits {known}{words}, got {name!r}")
    first, *others = (arrays.open(type_.split_file(name, part)) for part in stored)
    return torch.cat([first, *others]) if others else first
