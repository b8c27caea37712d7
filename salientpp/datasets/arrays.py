"""Checks the arrays of a graph. Errors name the file or object, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.files import first_line, what_to_do
from salientpp.ids import first_outside
from salientpp.partitioning.undirected import symmetric_closure
from salientpp.store.directory.attributes import edge_stores, node_stores, place
from salientpp.store.directory.labels import is_unlabelled, marks_unlabelled, warn_of_unlabelled

SPLITS = ("train", "val", "test")


def check_data(data: Data | HeteroData, where: str | None = None) -> None:
    """Raises ValueError if an array of ``data`` has a wrong type, shape or value. ``where`` names the origin of ``data`` in errors."""
    where = where or ("HeteroData object" if isinstance(data, HeteroData) else "Data object")
    stores = node_stores(data)
    edge_indices = {name: store.get("edge_index") for name, store in edge_stores(data).items()}
    if not stores:
        raise ValueError(f"{where}: expected at least one node type, got none")
    if isinstance(data, Data) and edge_indices[None] is None and data.get("adj_t") is None:
        raise ValueError(f"{where}: expected edge_index or adj_t, got only {', '.join(data.keys()) or 'nothing'}")
    for name, edge_index in edge_indices.items():
        # Checked before num_nodes, which PyG may infer from edge_index.
        if edge_index is not None:
            _check_edge_index_form(edge_index, where if name is None else f"{where}: {name!r}")
    sizes = {name: store.num_nodes for name, store in stores.items()}
    for type_, size in sizes.items():
        if size is None:
            of = "" if type_ is None else f" of {type_!r}"
            raise ValueError(f"{where}: the number of vertices{of} is unknown; set {place(type_)}.num_nodes")
    for name, edge_index in edge_indices.items():
        ends = (None, None) if name is None else (name[0], name[2])
        for end in ends:
            if end not in sizes:
                raise ValueError(
                    f"{where}: edge type {name!r} must join node types ({', '.join(map(str, sizes))}), got {end!r}"
                )
        if name is None and edge_index is not None:
            _check_id_range(edge_index, "edge_index", sizes[None], where)
        elif edge_index is not None:
            for row, end in enumerate(ends):
                _check_id_range(edge_index[row], f"edge_index[{row}] of {name!r}", sizes[end], where)
    adj_t = data.get("adj_t") if isinstance(data, Data) else None
    if adj_t is not None:
        if not (isinstance(adj_t, Tensor) or hasattr(adj_t, "sparse_sizes")):
            raise ValueError(f"{where}: adj_t must be a sparse matrix, got {form(adj_t)}")
        # torch_sparse.SparseTensor and torch's own sparse tensors name their shape differently.
        shape = adj_t.sparse_sizes() if hasattr(adj_t, "sparse_sizes") else adj_t.size()
        if tuple(shape) != (sizes[None], sizes[None]):
            raise ValueError(f"{where}: adj_t must have shape {[sizes[None]] * 2}, got {list(shape)}")
    for type_, store in stores.items():
        num_vertices = sizes[type_]
        at = where if type_ is None else f"{where}: {type_!r}"
        if isinstance(store.get("x"), Tensor):
            check_features(store["x"], num_vertices, at)
        for split in SPLITS:
            mask = store.get(f"{split}_mask")
            is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (num_vertices,)
            if mask is not None and not is_mask:
                raise ValueError(f"{at}: {split}_mask must be bool [{num_vertices}], got {form(mask)}")


def form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _check_edge_index_form(edge_index: object, where: str) -> None:
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"{where}: edge_index must be a tensor, got {form(edge_index)}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"{where}: edge_index must have shape [2, E], got {list(edge_index.shape)}")
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise ValueError(f"{where}: edge_index must hold integers, got {form(edge_index)}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: edge_index must be int64 or int32, got {form(edge_index)}")
    if edge_index.layout != torch.strided or edge_index.is_meta:
        raise ValueError(
            f"{where}: edge_index must be dense and have values, got layout {edge_index.layout} on {edge_index.device}"
        )


def _check_id_range(ids: Tensor, key: str, num_vertices: int, where: str) -> None:
    at = first_outside(ids, num_vertices)
    if at is not None:
        raise ValueError(f"{where}: {key} must hold vertex ids in [0, {num_vertices}), got {int(ids.flatten()[at])}")


def _check_integers(array: np.ndarray, key: str, where: str, words: str = "") -> None:
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where}: {key} must hold integers{words}, got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"{where}: {key} must hold numbers below 2^63, got {int(array.max())}")


def check_features(x: Tensor, num_vertices: int, where: str) -> None:
    if x.dim() == 0 or x.size(0) != num_vertices:
        raise ValueError(f"{where}: x must have one row per vertex, expected {num_vertices} rows, got {list(x.shape)}")
    if not x.is_floating_point() or x.layout != torch.strided or x.is_meta:
        return
    # Check in blocks, because a mask of the whole feature matrix would need a quarter of the matrix's memory.
    rows_per_block = max(1, (1 << 24) // max(1, x[:1].numel()))
    for start in range(0, num_vertices, rows_per_block):
        finite = torch.isfinite(x[start : start + rows_per_block]).reshape(-1, max(1, x[:1].numel())).all(dim=1)
        if not bool(finite.all()):
            row = start + int((~finite).nonzero()[0])
            raise ValueError(f"{where}: x must be finite, got nan or infinity in row {row}")


def assemble(
    where: str,
    edge_index: np.ndarray,
    num_vertices: int,
    x: np.ndarray | None,
    y: np.ndarray | None,
    split_ids: Mapping[str, tuple[str, np.ndarray]],
    symmetrise: bool,
) -> Data:
    """Checks arrays that came from a file, and returns them as a ``Data`` object.

    ``edge_index`` is integer [2, E], ``x`` floating [N, F], ``y`` integer [N] or [N, labels per vertex]. ``split_ids`` maps the name of a split to a pair: the
    name of the split's array in the file, and this array of vertex ids [*].
    """
    data = Data(num_nodes=num_vertices)
    if x is not None:
        if x.dtype not in (np.float16, np.float32, np.float64):
            raise ValueError(f"{where}: x must hold float16, float32 or float64, got dtype {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"{where}: x must have shape [N, F], got {list(x.shape)}")
        data.x = torch.from_numpy(x).contiguous()
        check_features(data.x, num_vertices, where)

    if y is not None:
        _check_integers(y, "y", where, " (-1 for an unlabelled vertex)")
        if y.shape[:1] != (num_vertices,):
            raise ValueError(f"{where}: y must have shape [N] with N = {num_vertices}, got {list(y.shape)}")
        data.y = torch.from_numpy(y.astype(np.int64))

    _check_integers(edge_index, "edge_index", where)
    edges = torch.from_numpy(np.ascontiguousarray(edge_index, dtype=np.int64))
    del edge_index
    _check_edge_index_form(edges, where)
    _check_id_range(edges, "edge_index", num_vertices, where)
    if symmetrise:
        edges = torch.from_numpy(symmetric_closure(edges[0].numpy(), edges[1].numpy(), num_vertices))
    data.edge_index = edges

    unlabelled = is_unlabelled(data.y) if y is not None and marks_unlabelled([data.y]) else None
    for split, (key, ids) in split_ids.items():
        if ids.size:
            _check_integers(ids, key, where)
        if ids.ndim != 1:
            raise ValueError(f"{where}: {key} must be a list of vertex ids, shape [*], got {list(ids.shape)}")
        mask = torch.zeros(num_vertices, dtype=torch.bool, device="cpu")
        chosen = torch.from_numpy(ids.astype(np.int64))
        _check_id_range(chosen, key, num_vertices, where)
        mask[chosen] = True
        if int(mask.sum()) < chosen.numel():
            raise ValueError(
                f"{where}: {key} must hold each vertex id once, got one again; if it has a flag per vertex, write the ids of the flagged vertices "
                "(numpy.flatnonzero)"
            )
        if unlabelled is not None:
            left_out = mask & unlabelled
            warn_of_unlabelled(
                int(left_out.sum()), int(mask.sum()), f"{where}: {key}", f"To keep them, set {split}_mask yourself.", 2
            )
            mask &= ~unlabelled
        data[f"{split}_mask"] = mask
    return data


def check_file(file: Path) -> None:
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    if not file.is_file():  # reading a pipe would block
        raise ValueError(f"{file}: {'a directory' if file.is_dir() else 'a device or a pipe'}; expected a file")


def unreadable(where: object, error: OSError | MemoryError) -> ValueError:
    """Returns the ValueError to raise for a file that could not be read. Its text says if the machine lacks memory or open files, for example."""
    reason = getattr(error, "strerror", None) or first_line(error)
    return ValueError("; ".join(filter(None, (f"{where} cannot be read ({reason})", what_to_do(error, "")))))


def check_undirected(undirected: object, dataset: str) -> None:
    if undirected is not None and not isinstance(undirected, bool):
        raise ValueError(f"{dataset}: undirected must be True, False or None, got {undirected!r}")
