"""What does the user's loop receive?

A PyG ``Data`` or ``HeteroData`` with what PyG's loader sets. From such an object every node and edge attribute is there for every
sampled vertex and edge. From a partitioned graph the attributes named by ``gather`` (``x``) are there for every sampled
vertex, other node attributes for the seeds, edge attributes for every sampled edge.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.loader.utils import filter_custom_hetero_store, filter_custom_store, filter_edge_store_, index_select
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.processes import Lock
from salientpp.store.shard import NO_IDS, take_rows


#: An attribute of the vertices of one type; the type is None where there is only one.
Column = tuple[str | None, str]


def edge_index_of(row: Tensor, col: Tensor) -> Tensor:
    """int64 [2, e], without a copy where the sampler made row and col as one tensor, in this order."""
    base = row._base
    if base is not None and base is col._base and base.shape == (2, row.numel()) and row.data_ptr() == base.data_ptr():
        return base
    return torch.stack([row, col])


def _is_rows(value: object, num_rows: int) -> bool:
    """Whether the row kernel can gather it: a dense, contiguous CPU tensor with one row per vertex or edge."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dim() >= 1
        and value.size(0) == num_rows
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_quantized
    )


class _NodeAttributes:
    """The vertex attributes of one storage.

    Attributes:
        gathered: names of those whose rows the pipeline brings; others (on another device, strided, not tensors, with the
            vertices in another dimension) are left to PyG's ``index_select``.
    """

    def __init__(self, data: Data | HeteroData, store: BaseStorage, num_vertices: int) -> None:
        self._store = store
        names = [name for name in store if name != "num_nodes" and store.is_node_attr(name)]
        self._dim = {name: data.__cat_dim__(name, store[name], store) for name in names}
        self.gathered = [name for name in names if self._dim[name] == 0 and _is_rows(store[name], num_vertices)]
        self._other = [name for name in names if name not in self.gathered]

    def fill(self, out: BaseStorage, n_id: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Set the attributes of the vertices ``n_id``; ``rows`` holds the gathered ones."""
        for name in self.gathered:
            out[name] = rows[name]
        for name in self._other:
            out[name] = _select(self._store[name], n_id, self._dim[name])
        if "num_nodes" in self._store:
            out.num_nodes = n_id.numel()


class _EdgeAttributes:
    """The edges of one storage, and their attributes."""

    def __init__(self, data: Data | HeteroData, store: BaseStorage) -> None:
        self._store = store
        names = [name for name in store if name not in ("edge_index", "adj_t") and store.is_edge_attr(name)]
        self._dim = {name: data.__cat_dim__(name, store[name], store) for name in names}

    def fill(self, out: BaseStorage, row: Tensor, col: Tensor, edge: Tensor | None) -> None:
        """Set ``edge_index`` or ``adj_t`` and the attributes of the edges ``edge``; those vanish where it is None, as in PyG."""
        store = self._store
        for name, dim in self._dim.items():
            value = store[name]
            if edge is None:
                out[name] = None
            elif dim == 0 and _is_rows(value, store.num_edges):
                out[name] = take_rows(value, edge)
            else:
                out[name] = _select(value, edge, dim)
        if "edge_index" in store:
            out.edge_index = edge_index_of(row, col).to(store.edge_index.device)
        if isinstance(store.get("adj_t"), Tensor):
            sources, targets = out.size()
            out.adj_t = _sparse_rows(store.adj_t, row, col, edge, (targets, sources))
        elif "adj_t" in store:
            filter_edge_store_(_Only(store, "adj_t"), out, row, col, edge)


class _Only:
    """A view of a storage with one attribute, for PyG's function."""

    def __init__(self, store: BaseStorage, name: str) -> None:
        self._item = (name, store[name])

    def items(self) -> list[tuple[str, object]]:
        return [self._item]


class DataTemplate:
    """Batches of a ``Data`` object: its attributes, cut to what was sampled.

    Args:
        data: the whole; N vertices, E edges.

    Attributes:
        gathered: columns whose rows the pipeline brings.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._nodes = _NodeAttributes(data, data._store, data.num_nodes)
        self._edges = _EdgeAttributes(data, data._store)
        self.gathered: list[Column] = [(None, name) for name in self._nodes.gathered]

    def build(self, mfg: SamplerOutput, rows: Mapping[Column, Tensor]) -> Data:
        """The batch without its bookkeeping; ``rows`` holds the gathered columns."""
        out = copy.copy(self._data)
        self._nodes.fill(out._store, mfg.node, {name: value for (_, name), value in rows.items()})
        self._edges.fill(out._store, mfg.row, mfg.col, mfg.edge)
        return out


class HeteroTemplate:
    """Batches of a ``HeteroData`` object; every type is there, also those that nothing was sampled of.

    Attributes:
        gathered: columns whose rows the pipeline brings.
    """

    def __init__(self, data: HeteroData) -> None:
        self._data = data
        self._nodes = {name: _NodeAttributes(data, data[name], data[name].num_nodes) for name in data.node_types}
        self._edges = {name: _EdgeAttributes(data, data[name]) for name in data.edge_types}
        self.gathered: list[Column] = [(name, attribute) for name, nodes in self._nodes.items() for attribute in nodes.gathered]

    def build(self, mfg: HeteroSamplerOutput, rows: Mapping[Column, Tensor]) -> HeteroData:
        """The batch without its bookkeeping; ``rows`` holds the gathered columns."""
        out = copy.copy(self._data)
        for name, nodes in self._nodes.items():
            ids = mfg.node.get(name)
            own = {attribute: value for (owner, attribute), value in rows.items() if owner == name}
            nodes.fill(out[name], NO_IDS if ids is None else ids, own)
        for name, edges in self._edges.items():
            edge = None if mfg.edge is None else mfg.edge.get(name, NO_IDS)
            edges.fill(out[name], mfg.row.get(name, NO_IDS), mfg.col.get(name, NO_IDS), edge)
        return out


class StoreTemplate:
    """Batches of a pair of PyG's ``FeatureStore`` and ``GraphStore``: what PyG makes of an MFG and these.

    Args:
        custom_cls: the class of the batches; None: ``Data`` or ``HeteroData``.
    """

    gathered: Sequence[Column] = ()

    def __init__(self, feature_store: FeatureStore, graph_store: GraphStore, custom_cls: type | None) -> None:
        self._stores = feature_store, graph_store
        self._custom_cls = custom_cls
        self._lock = Lock()  # sampling threads build batches, and a user's store may not expect several

    def build(self, mfg: SamplerOutput | HeteroSamplerOutput, rows: Mapping[Column, Tensor]) -> Data | HeteroData:
        """The batch without its bookkeeping."""
        make = filter_custom_hetero_store if isinstance(mfg, HeteroSamplerOutput) else filter_custom_store
        with self._lock:
            return make(*self._stores, mfg.node, mfg.row, mfg.col, mfg.edge, self._custom_cls)


def _sparse_rows(adj_t: Tensor, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]) -> Tensor:
    """The sampled edges as a torch CSR tensor of targets by sources, with the values of ``adj_t``; repeats stay."""
    order = torch.sort(col, stable=True).indices  # the sampler's edges are sorted already; a transform's may not be
    values = adj_t.values()[edge] if edge is not None else adj_t.values().new_ones(row.numel())
    counts = torch.bincount(col, minlength=size[0])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.sparse_csr_tensor(indptr, row[order], values[order], size, check_invariants=False)


def _select(value: object, index: Tensor, dim: int) -> object:
    return index_select(value, index.to(value.device) if isinstance(value, Tensor) else index, dim=dim)


@dataclass(frozen=True, eq=False)
class PartitionTemplate:
    """Batches of a partitioned graph.

    Attributes:
        edge_rows: attribute name -> [E, ...], in the order of the graph's edge ids.
    """

    edge_rows: Mapping[str, Tensor]

    def build(self, mfg: SamplerOutput, rows: Mapping[Column, Tensor]) -> Data:
        """The batch without its bookkeeping; ``rows`` holds all node attributes."""
        out = Data(edge_index=edge_index_of(mfg.row, mfg.col), num_nodes=mfg.node.numel())
        for (_, name), value in rows.items():
            out[name] = value
        for name, value in self.edge_rows.items():
            out[name] = None if mfg.edge is None else take_rows(value, mfg.edge)
        return out


# --- what PyG's loaders set beside the attributes ----------------------------------------------------------


def keep_books(batch: Data | HeteroData, mfg: SamplerOutput | HeteroSamplerOutput) -> None:
    """Ids, trees and counts; what is None vanishes, as in PyG."""
    if isinstance(mfg, HeteroSamplerOutput):
        for name, n_id in mfg.node.items():
            if "n_id" not in batch[name]:
                batch[name].n_id = n_id
        for name, e_id in (mfg.edge or {}).items():
            if e_id is not None and "e_id" not in batch[name]:
                batch[name].e_id = e_id
        batch.set_value_dict("batch", mfg.batch)
        batch.set_value_dict("num_sampled_nodes", mfg.num_sampled_nodes)
        batch.set_value_dict("num_sampled_edges", mfg.num_sampled_edges)
        if mfg.orig_row is not None:
            for name in mfg.orig_row:
                batch[name]._orig_edge_index = torch.stack([mfg.orig_row[name], mfg.orig_col[name]])
        return
    if "n_id" not in batch:
        batch.n_id = mfg.node
    if mfg.edge is not None and "e_id" not in batch:
        batch.e_id = mfg.edge
    batch.batch = mfg.batch
    batch.num_sampled_nodes = mfg.num_sampled_nodes
    batch.num_sampled_edges = mfg.num_sampled_edges
    if mfg.orig_row is not None:
        batch._orig_edge_index = torch.stack([mfg.orig_row, mfg.orig_col])


def keep_node_books(batch: Data | HeteroData, mfg: SamplerOutput | HeteroSamplerOutput, input_type: str | None) -> None:
    """What ``NeighborLoader`` adds about its seeds, from ``mfg.metadata``: (input ids, times or None)."""
    keep_books(batch, mfg)
    seeds = batch if input_type is None else batch[input_type]
    seeds.input_id, seeds.seed_time = mfg.metadata[:2]
    seeds.batch_size = mfg.metadata[0].numel()


def keep_link_books(
    batch: Data | HeteroData, mfg: SamplerOutput | HeteroSamplerOutput, input_type: tuple[str, str, str] | None, triplet: bool
) -> None:
    """What ``LinkNeighborLoader`` adds about its edges, from ``mfg.metadata`` as PyG's ``edge_sample`` leaves it."""
    keep_books(batch, mfg)
    edges = batch if input_type is None else batch[input_type]
    edges.input_id = mfg.metadata[0]
    if not triplet:
        edges.edge_label_index, edges.edge_label, edges.edge_label_time = mfg.metadata[1:4]
        return
    source, target = (batch, batch) if input_type is None else (batch[input_type[0]], batch[input_type[-1]])
    source.src_index, target.dst_pos_index, target.dst_neg_index = mfg.metadata[1:4]
    source.seed_time = target.seed_time = mfg.metadata[4]
    # They belong to the whole graph, if they are there at all.
    for name in ("edge_label_index", "edge_label_time"):
        if name in edges:
            del edges[name]
