"""Reads PyG's graph formats: edge lists, sparse matrices and numbers of vertices."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.data.graph_store import EdgeLayout

#: A graph without edges.
NO_EDGES = torch.empty(2, 0, dtype=torch.int64, device="cpu")


def read_edge_index(edge_index: object, name: str, size: str = "E") -> Tensor:
    """Returns pairs of vertex ids, int32 or int64 [2, ``size``], on the CPU; ValueError with ``name`` for anything else."""
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
        got = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"{name} must be a tensor of shape [2, {size}], got {got}")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must have dtype int64 or int32, got {edge_index.dtype}")
    if edge_index.layout != torch.strided or edge_index.device.type == "meta":
        raise ValueError(
            f"{name} must be a dense tensor with data, got layout {edge_index.layout} on {edge_index.device}"
        )
    if type(edge_index) is not Tensor:  # PyG's EdgeIndex has its own rules
        edge_index = edge_index.as_subclass(Tensor)
    return edge_index.cpu()


def read_adj_t(adj_t: Any, name: str) -> tuple[Tensor, Tensor]:
    """Returns ``indptr`` and ``indices`` of a torch_sparse or a torch CSR matrix."""
    if not isinstance(adj_t, Tensor):
        return adj_t.csr()[:2]
    if adj_t.layout != torch.sparse_csr:
        raise ValueError(f"{name} must be a SparseTensor or a CSR tensor, got layout {adj_t.layout}")
    return adj_t.crow_indices(), adj_t.col_indices()


def positions_in(adj_t: Any, edge_index: Tensor, name: str) -> Tensor | None:
    """Finds the edges of a list [2, E] in a torch_sparse or torch CSR matrix of targets by sources.

    Returns:
        int64 [E], the position of each edge in the matrix, row by row. Repeated edges keep their order. None if both orders are the same.

    Raises:
        ValueError: the edges of the list and of the matrix differ.
    """
    listed = read_edge_index(edge_index, f"edge_index of {name}").to(torch.int64)
    indptr, indices = (part.cpu().to(torch.int64) for part in read_adj_t(adj_t, f"adj_t of {name}"))
    kept = torch.stack(
        [indices, torch.repeat_interleave(torch.arange(indptr.numel() - 1, device="cpu"), indptr.diff())]
    )
    if torch.equal(listed, kept):
        return None
    orders = [order_by(*edges) for edges in (listed, kept)]
    if listed.shape != kept.shape or not torch.equal(listed[:, orders[0]], kept[:, orders[1]]):
        raise ValueError(
            f"edge_index and adj_t of {name} must hold the same edges, got {listed.size(1)} and {kept.size(1)} edges that differ; "
            "delete the one that is not meant"
        )
    position = torch.empty_like(orders[0])
    position[orders[0]] = orders[1]
    return position


def order_by(key: Tensor, target: Tensor) -> Tensor:
    """Returns the order int64 [E] that sorts edges by target, and then by ``key`` [E]. The sort is stable."""
    order = torch.sort(key, stable=True).indices
    return order[torch.sort(target[order], stable=True).indices]


def count_vertices(data: Data | HeteroData | tuple[FeatureStore, GraphStore]) -> dict[str | None, int]:
    """Returns the number of vertices of each type; the type of a homogeneous graph is None.

    If a type of a ``HeteroData`` has nothing but edges, the number of its vertices is taken as the largest id in these edges plus one.
    """
    if isinstance(data, (Data, HeteroData)):
        sizes: dict[Any, int | None] = {None: data.num_nodes} if isinstance(data, Data) else {}
        for found in _sizes_by_type(data) if isinstance(data, HeteroData) else ():
            sizes.update(found)
        for name, size in sizes.items():
            if size is None:
                raise ValueError(
                    f"data must give the number of vertices of {words_for(name, 'the graph')}; set num_nodes, or an attribute such as x"
                )
        return {name: int(size) for name, size in sizes.items() if size is not None}
    feature_store, graph_store = data
    edges = graph_store.get_all_edge_attrs()
    if all(attr.edge_type is None for attr in edges):
        return {None: max(max(attr.size) for attr in edges)}
    names = [attr.group_name for attr in feature_store.get_all_tensor_attrs() if isinstance(attr.group_name, str)]
    names += [end for attr in edges for end in (attr.edge_type[0], attr.edge_type[2])]
    return {name: remote_backend_utils.num_nodes(feature_store, graph_store, name) for name in dict.fromkeys(names)}


def with_sizes(data: HeteroData) -> HeteroData:
    """Returns the data, or if a type declares no size, a shallow copy in which ``num_nodes`` of this type is set from the edges."""
    inferred = _sizes_by_type(data)[1]
    out = copy.copy(data) if inferred else data
    for name, size in inferred.items():
        out.get_node_store(name).num_nodes = size
    return out


def _sizes_by_type(data: HeteroData) -> tuple[dict[str, int | None], dict[str, int]]:
    """Returns two mappings: each type's declared size (None without one), and for types without one, the size that the edges imply."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unable to accurately infer 'num_nodes'")
        sizes: dict[str, int | None] = {name: data[name].num_nodes for name in data.node_types}
    inferred: dict[str, int] = {}
    for edge_type in data.edge_types:
        for side, name in enumerate((edge_type[0], edge_type[2])):
            size = _size_by_edges(data[edge_type], side) if sizes.get(name) is None else None
            if size is not None:
                inferred[name] = max(inferred.get(name, 0), size)
    for name, size in inferred.items():
        warnings.warn(
            f"data[{name!r}] has no attribute that gives its number of vertices, so {size} is assumed, one more than the largest id in its edges; "
            f"set data[{name!r}].num_nodes",
            UserWarning,
            stacklevel=4,
        )
    return sizes, inferred


def _size_by_edges(store: Any, side: int) -> int | None:
    """Returns the number of sources (``side`` 0) or targets (1) that the edges of a relation imply; None if they imply none."""
    edge_index = store.get("edge_index")
    if isinstance(edge_index, Tensor) and edge_index.dim() == 2 and edge_index.size(0) == 2:
        return int(edge_index[side].max()) + 1 if edge_index.numel() else 0
    adj_t = store.get("adj_t")
    return None if adj_t is None else int(adj_t.size(1 - side))


def full_edge_type(name: Any, edge_types: Iterable[Any]) -> Any:
    """Returns the edge type that a pair (source type, target type) means in PyG: the only one between them, or the one named 'to'.

    Any other value is returned unchanged, except that a list becomes a tuple.
    """
    if not isinstance(name, (tuple, list)) or len(name) != 2 or not all(isinstance(word, str) for word in name):
        return tuple(name) if isinstance(name, list) else name
    between = [type_ for type_ in edge_types if type_ is not None and (type_[0], type_[2]) == tuple(name)]
    return between[0] if len(between) == 1 else tuple(name) if between else (name[0], "to", name[1])


def count_edges(graph_store: GraphStore) -> dict[tuple[str, str, str] | None, int]:
    """Returns the number of edges of each edge type; the type of a homogeneous graph is None."""
    sizes: dict[Any, int] = {}
    for attr in graph_store.get_all_edge_attrs():
        if attr.edge_type not in sizes:
            edges = graph_store.get_edge_index(attr)
            # A CSR pair is (rowptr, col). In the other two layouts, the first tensor has an entry per edge.
            sizes[attr.edge_type] = edges[1 if attr.layout == EdgeLayout.CSR else 0].numel()
    return sizes


def words_for(name: str | tuple[str, str, str] | None, otherwise: str = "the vertices") -> str:
    return otherwise if name is None else repr(name)
