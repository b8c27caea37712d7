"""How does KaMinPar partition a graph? In memory that it compresses, and with several threads.

TeraPart (Salwasser, Seemaier, Gottesbüren and Sanders, arXiv 2410.19119), by the package ``kaminpar`` (an extra). Its binding takes graphs from files alone,
so one is written for it, in ParHIP's binary format: 8 bytes for each vertex and edge end, and as many for their weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Entries written at a time.
_PIECE = 2**20
_HEADER_BYTES = 24


def partition_with_kaminpar(
    indptr: Tensor,
    indices: Tensor,
    edge_weights: Tensor | None,
    vertex_weights: Tensor,
    num_parts: int,
    tolerance: float,
    seed: int,
) -> Tensor:
    """Parts of the vertices, int64 [N]. With one of torch's threads the same arguments give the same parts; with several they vary.

    Args:
        indptr, indices: an undirected graph, each edge in the lists of both its ends, without loops and repeats.
        edge_weights, vertex_weights: integers >= 1; edges weigh 1 each without.
        tolerance: how far above the mean the vertices of a part may weigh.

    Raises:
        ImportError: the package is not there.
        OSError: the folder for temporary files does not hold the graph.
    """
    kaminpar = _import_kaminpar()
    with tempfile.TemporaryDirectory(prefix="salientpp-") as folder:
        path = Path(folder) / "graph.parhip"
        write_parhip(path, indptr, indices, edge_weights, vertex_weights)
        graph = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP, compress=True)
    kaminpar.reseed(seed % (2**31 - 1))
    solver = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.terapart_context())
    return torch.tensor(solver.compute_partition(graph, num_parts, max(1e-3, tolerance)), dtype=torch.int64)


def _import_kaminpar() -> Any:
    try:
        import kaminpar
    except ImportError as error:
        raise ImportError(
            f"method='kaminpar' needs the package kaminpar, which could not be imported ({error}); `pip install salientpp[kaminpar]`, or use method='metis'"
        ) from error
    return kaminpar


def write_parhip(
    path: Path, indptr: Tensor, indices: Tensor, edge_weights: Tensor | None, vertex_weights: Tensor
) -> None:
    """A header (which arrays are there, and the sizes), where in the file each list begins, the lists, weights of vertices, weights of edges."""
    num_vertices = indptr.numel() - 1
    first = _HEADER_BYTES + 8 * (num_vertices + 1)
    with path.open("wb") as file:
        # A set bit says what is not there, or not 64 bits wide.
        file.write(np.array([edge_weights is None, num_vertices, indices.numel()], dtype=np.uint64).tobytes())
        _write(file, indptr, lambda piece: piece * 8 + first)
        _write(file, indices)
        _write(file, vertex_weights)
        if edge_weights is not None:
            _write(file, edge_weights)


def _write(file: Any, array: Tensor, change: Any = lambda piece: piece) -> None:
    for begin in range(0, array.numel(), _PIECE):
        file.write(np.ascontiguousarray(change(array[begin : begin + _PIECE].numpy()), dtype=np.int64))
