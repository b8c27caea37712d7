"""Writes an undirected graph to a file in ParHIP's binary format, piece by piece, and maps its lists.

KaMinPar reads the file (:mod:`salientpp.partitioning.kaminpar`). This process never holds the whole graph in memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph, runs_of_vertices
from salientpp.partitioning.undirected import Undirected, first_of_equals, split_keys

#: Number of edge ends merged at a time, and of entries written at a time.
_PIECE = 2**20
_HEADER_BYTES = 24
_MOST_NARROW = 2**31 - 1

#: First and last vertex of a run, lengths of its lists, the lists, and the weights of their entries (None: all equal).
Lists = tuple[int, int, np.ndarray, np.ndarray, "np.ndarray | None"]


def write_undirected(
    path: Path, graph: Graph, edge_weights: Tensor | None, weight_of_each: Tensor | None, vertex_weights: Tensor
) -> Undirected:
    """Writes the undirected graph without loops for a partitioner; :func:`salientpp.ops.symmetrise` defines this graph and its weights.

    Args:
        edge_weights: int64 [N], weights of the edges into each vertex; None: 1 each. Memory holds the reversed edges and a piece of the result.
        weight_of_each: alternative to ``edge_weights``: int32 or int64 [E]. With it, the whole result is built in memory.
        vertex_weights: int64 [N], each >= 1.

    Returns:
        The graph. Its ``indices`` and weights are mapped from the file: int32, or int64 if they do not fit.

    Raises:
        OSError: the disk is too small for the graph.
        ValueError: the weights sum to more than 2^60.
    """
    num_vertices = graph.num_vertices
    if weight_of_each is not None or num_vertices > _MOST_NARROW:
        lists = [array.numpy() for array in ops.symmetrise(graph.indptr, graph.indices, edge_weights, weight_of_each)]
        whole: Lists = (0, num_vertices, np.diff(lists[0]), lists[1], lists[2] if lists[2].size else None)
        most = int(lists[2].max(initial=1))
        return write_parhip(path, num_vertices, [whole], vertex_weights, most, lists[2].size > 0)
    transposed = Graph.trusted(
        graph.indptr, graph.indices
    ).transpose()  # a separate graph object, so that the transpose is not kept
    ends = graph.indptr + transposed.indptr
    largest = 1 if edge_weights is None else int(edge_weights.max())
    if edge_weights is not None and float(edge_weights.double() @ graph.indptr.diff().double()) > 2**60:
        raise ValueError("edge_weights sum to more than 2^60 over the edges; scale them down")
    most = largest * int(ends.diff().max())
    pieces = _merged(graph, transposed, ends, edge_weights)
    return write_parhip(path, num_vertices, pieces, vertex_weights, most, edge_weights is not None)


def _merged(graph: Graph, transposed: Graph, ends: Tensor, edge_weights: Tensor | None) -> Iterator[Lists]:
    """Merges in-edges and out-edges into undirected lists. Yields them for runs of vertices; each list has a vertex's neighbours, ascending."""
    num_vertices = graph.num_vertices
    weight_of = None if edge_weights is None else edge_weights.numpy()
    for first, last in runs_of_vertices(ends, _PIECE):
        halves = []
        # An edge end is one integer: the vertex whose list it is in, the neighbour, and the direction of the edge.
        for direction, lists in enumerate((graph, transposed)):
            begin, end = int(lists.indptr[first]), int(lists.indptr[last])
            key = np.repeat(np.arange(last - first), lists.indptr[first : last + 1].diff().numpy())
            key *= num_vertices
            key += lists.indices[begin:end].numpy()
            key *= 2
            key += direction
            halves.append(key)
        key = np.concatenate(halves)
        del halves
        key.sort()
        goes_out = (key & 1).astype(bool)
        key >>= 1
        start = np.flatnonzero(first_of_equals(key)) if key.size else np.empty(0, dtype=np.int64)
        major, minor = np.empty_like(key), np.empty_like(key)
        split_keys(key, num_vertices, major, minor)
        if weight_of is None:
            weight = np.diff(start, append=key.size)
        else:
            weight = np.add.reduceat(weight_of[np.where(goes_out, minor, major + first)], start) if key.size else key
        major, minor = major[start], minor[start]
        kept = major + first != minor
        length = np.bincount(major[kept], minlength=last - first)
        yield first, last, length, minor[kept], weight[kept]


def write_parhip(
    path: Path, num_vertices: int, lists: Iterable[Lists], vertex_weights: Tensor, most_weight: int, weighted: bool
) -> Undirected:
    """Writes the file: a header (presence of arrays, and sizes), the position of each list, the lists, vertex weights, edge weights.

    Args:
        lists: lists of all vertices, run by run.
        most_weight: upper bound of an edge's weight.
        weighted: write edge weights even if all are equal.
    """
    # All arrays have the same width, so that all are aligned.
    narrow = max(num_vertices, most_weight, int(vertex_weights.max())) <= _MOST_NARROW
    width = np.dtype(np.int32 if narrow else np.int64)
    position = _HEADER_BYTES + 8 * (num_vertices + 1)
    indptr = np.zeros(num_vertices + 1, dtype=np.int64)
    least, most = most_weight, 0
    with path.open("wb") as file, tempfile.TemporaryFile(dir=path.parent) as of_edges:
        file.seek(position)
        for first, last, length, indices, weight in lists:
            indptr[first + 1 : last + 1] = length
            _write(file, indices, width)
            if weight is not None:
                _write(of_edges, weight, width)
                least, most = min(least, int(weight.min(initial=least))), max(most, int(weight.max(initial=most)))
        np.cumsum(indptr, out=indptr)
        weighted = (weighted or least < most) and bool(indptr[-1])
        _write(file, vertex_weights.numpy(), width)
        if weighted:
            of_edges.seek(0)
            shutil.copyfileobj(of_edges, file, 8 * _PIECE)
        file.seek(0)
        # A set bit means absent (edge weights, vertex weights) or not 64 bits wide (starts, ids, vertex weights, edge weights).
        absent = (not weighted) | (0b111000 if narrow else 0)
        file.write(np.array([absent, num_vertices, indptr[-1]], dtype=np.uint64).tobytes())
        _write(file, indptr, np.dtype(np.int64), width.itemsize, position)
    num_entries, weights = int(indptr[-1]), None
    if weighted:
        weights = _mapped(path, width, position + width.itemsize * (num_entries + num_vertices), num_entries)
    return torch.from_numpy(indptr), _mapped(path, width, position, num_entries), weights


def _write(file: BinaryIO | Any, array: np.ndarray, width: np.dtype, times: int = 1, plus: int = 0) -> None:
    for begin in range(0, array.size, _PIECE):
        piece = array[begin : begin + _PIECE]
        file.write(np.ascontiguousarray(piece * times + plus if times > 1 else piece, dtype=width).data)


def _mapped(path: Path, width: np.dtype, offset: int, size: int) -> Tensor:
    # Copy-on-write, since torch has no read-only arrays. An empty file region cannot be mapped.
    return torch.from_numpy(np.memmap(path, width, "c", offset, size) if size else np.empty(0, dtype=width))
