"""Collects the node and edge attributes of a PyG ``Data`` or ``HeteroData`` that a dataset directory stores."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.typing import TensorFrame

from salientpp.graph.from_pyg import positions_in, words_for
from salientpp.graph.typed import TypedGraph
from salientpp.ids import as_tensor
from salientpp.store.directory.description import EdgeName
from salientpp.store.directory.files import numpy_dtype
from salientpp.store.frames import Frame, take_apart
from salientpp.store.key_table import KeyTable, check_key_types

_TOPOLOGY = ("edge_index", "adj_t", "num_nodes")
_OF_SEEDS = ("batch_size", "input_id", "seed_time")
_OF_DRAWS = ("n_id", "e_id", "batch", "ptr", "num_sampled_nodes", "num_sampled_edges")
#: Names that a batch uses for its own attributes, so node and edge attributes cannot have them.
OWN_NAMES = frozenset((*_TOPOLOGY, *_OF_SEEDS, *_OF_DRAWS))

#: Under these names PyG expects one entry per vertex, or one per edge.
_OF_VERTICES, _OF_EDGES = ("x", "pos"), ("edge_attr", "edge_weight", "edge_type")

#: For each split, the data's attributes that may give its vertices. If several exist, the first one counts.
SPLIT_ATTRIBUTES = {
    split: [f"{split}_{kind}" for kind in ("mask", "idx", "index")] for split in ("train", "val", "test")
}


def node_stores(data: Data | HeteroData) -> dict[str | None, Any]:
    """Returns PyG's storage of each node type."""
    return {name: data[name] for name in data.node_types} if isinstance(data, HeteroData) else {None: data._store}


def edge_stores(data: Data | HeteroData) -> dict[EdgeName, Any]:
    """Returns PyG's storage of each edge type."""
    return {name: data[name] for name in data.edge_types} if isinstance(data, HeteroData) else {None: data._store}


def check_types(data: HeteroData) -> None:
    """Raises ValueError if the data has no node types, or if the name of a type cannot be written and read back."""
    if not data.node_types:
        raise ValueError("data has no node types; a HeteroData to be partitioned needs at least one")
    for name in (*data.node_types, *(part for edge_type in data.edge_types for part in edge_type)):
        if not isinstance(name, str) or name.encode(errors="replace").decode() != name:
            raise ValueError(f"the names of types must be valid text, got {name!a}; rename it")


class Collected(NamedTuple):
    """Attributes that a directory stores for one type, by name. ``columns`` also has the columns of the tables in ``frames``."""

    columns: dict[str, Tensor]
    frames: dict[str, Frame]


def collect_attributes(
    data: Data | HeteroData, graph: TypedGraph
) -> tuple[dict[str | None, Collected], dict[EdgeName, Collected]]:
    """Collects node and edge attributes per type. Raises ValueError for an attribute that cannot be stored."""
    node: dict[str | None, Collected] = {}
    edge: dict[EdgeName, Collected] = {}
    stores = edge_stores(data)
    for name, relation in zip(graph.edge_types, graph.relations):
        store, where = stores[name], place(name)
        if store.get("edge_index") is not None and store.get("adj_t") is not None:
            # Only one of them is stored, so both must have the same edges.
            positions_in(store["adj_t"], store["edge_index"], words_for(name, "the edges"))
        if store.get("adj_t") is not None and _has_weights(store["adj_t"]):
            raise ValueError(
                f"{where}.adj_t has values other than 1, but only its topology is stored; give the graph as edge_index alone, and the "
                "values as edge_attr or edge_weight"
            )
        edge[name] = _columns(store, where, num_edges=relation.indices.numel())
    for type_, (store, size) in zip(graph.node_types, zip(node_stores(data).values(), graph.num_vertices)):
        node[type_] = _columns(store, place(type_), num_vertices=size)
    return node, edge


def collect_keys(data: Data | HeteroData, graph: TypedGraph) -> dict[str | None, KeyTable]:
    """Returns the keys of the vertex types that have a :class:`KeyTable` named ``key_table``. ValueError unless it has a row per vertex."""
    keys = {}
    for (type_, store), size in zip(node_stores(data).items(), graph.num_vertices):
        table = store.get("key_table")
        if isinstance(table, KeyTable):
            if table.num_rows != size:
                raise ValueError(
                    f"{place(type_)}.key_table must have one row per vertex, expected {size}, got {table.num_rows}; take it out: "
                    f"del {place(type_)}.key_table"
                )
            check_key_types(table.schema, f"{place(type_)}.key_table")
            keys[type_] = table
    return keys


def place(name: str | EdgeName) -> str:
    """Returns the expression that selects a type of the user's data, such as ``data['paper']``, for error texts."""
    return "data" if name is None else f"data[{name!r}]"


def _columns(store: Any, where: str, *, num_vertices: int | None = None, num_edges: int | None = None) -> Collected:
    """Collects the attributes of vertices in a PyG storage if ``num_vertices`` is given, or those of edges if ``num_edges`` is given."""
    wants_nodes = num_vertices is not None
    of, size = ("vertex", num_vertices) if wants_nodes else ("edge", num_edges)
    columns: dict[str, Tensor] = {}
    frames: dict[str, Frame] = {}
    left_out = []
    for name, value in store.items():
        if name in _TOPOLOGY or any(name in names for names in SPLIT_ATTRIBUTES.values()):
            continue
        if isinstance(value, np.ndarray):
            with contextlib.suppress(ValueError):  # it may describe the whole graph, and is then left out
                value = as_tensor(value, "")
        # A storage of vertices has no edges; the storage of a homogeneous graph has both.
        is_node = isinstance(store, NodeStorage) and store.is_node_attr(name)
        is_edge = isinstance(store, EdgeStorage) and store.is_edge_attr(name)
        if not (is_node or is_edge):
            if name in (_OF_VERTICES if wants_nodes else _OF_EDGES):
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{where}.{name} must be a tensor with one row per {of}, expected {size} rows, got {got}"
                )
            if isinstance(value, Tensor) and value.numel() > 1 and wants_nodes == isinstance(store, NodeStorage):
                left_out.append(f"{where}.{name} ({str(value.dtype).removeprefix('torch.')} {list(value.shape)})")
            if isinstance(value, TensorFrame) and wants_nodes == isinstance(store, NodeStorage):
                left_out.append(f"{where}.{name} (TensorFrame of {len(value)} rows)")
            continue  # a value of the whole graph belongs to no vertex and no batch
        if is_node != wants_nodes:
            continue
        if name == "edge_label_index":
            raise ValueError(
                f"{where}.edge_label_index holds seeds of a LinkNeighborLoader, which are not stored; take it out first: "
                f"pairs = {where}.edge_label_index; del {where}.edge_label_index. Pass the pairs to a LinkNeighborLoader on the directory as "
                "edge_label_index=part.directory_id(pairs). Leave edge_label_index out to start from all edges of the graph; edge_label='edge_label' "
                "then gives their labels"
            )
        if name in OWN_NAMES:
            raise ValueError(
                f"{where}.{name} cannot be stored: batches have an attribute of their own with this name; rename it: "
                f"{where}.my_{name} = {where}.{name}; del {where}.{name}"
            )
        if isinstance(value, TensorFrame):
            frames[name], own = take_apart(name, value, where)
        else:
            own = {name: value}
        for column, rows in own.items():
            if column in columns or (column != name and column in store):
                raise ValueError(
                    f"{where}.{column} has the name of a column of the TensorFrame {where}.{name}; rename it"
                )
            columns[column] = _checked(column, rows, where, of, size)
    if left_out:
        or_edge = " or per edge" if wants_nodes and isinstance(store, EdgeStorage) else ""
        warnings.warn(
            f"{', '.join(left_out)} left out: only attributes with one row per {of} ({size}){or_edge} are stored, and splits (train_mask, train_idx, "
            "train_index and so on, or split=)",
            UserWarning,
            stacklevel=6,
        )
    return Collected(columns, frames)


def _checked(name: str, value: Any, where: str, of: str, size: int | None) -> Tensor:
    """Returns the rows of an attribute on the CPU. Raises ValueError, naming the attribute, if they cannot be stored."""
    if not isinstance(value, Tensor):
        kind = f"a NumPy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{where}.{name} must be a tensor to be stored, got {kind}; convert or delete it")
    if value.size(0) != size:
        raise ValueError(
            f"{where}.{name} must have one row per {of} in dimension 0, expected {size}, got {value.size(0)}"
        )
    if value.is_meta:
        raise ValueError(f"{where}.{name} is on the meta device, without values; give it values, or delete it")
    if value.layout != torch.strided:
        raise ValueError(f"{where}.{name} must be dense to be stored, got layout {value.layout}; call .to_dense()")
    if "/" in name or "\0" in name or name.encode(errors="replace").decode() != name:
        raise ValueError(f"{where}[{name!r}] cannot be stored, because its name must be a valid file name; rename it")
    try:
        numpy_dtype(value.dtype)
    except TypeError:
        raise ValueError(
            f"{where}.{name} has dtype {value.dtype}, which .npy files cannot hold; convert or delete it"
        ) from None
    return value.detach().cpu().resolve_conj().resolve_neg()


def _has_weights(adj_t: Any) -> bool:
    values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
    # A stride of 0: one expanded value for all edges. There may be more edges than fit into memory.
    if values is not None and values.stride() == (0,):
        values = values[:1]
    return values is not None and bool((values != 1).any())
