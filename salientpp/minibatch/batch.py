"""What does the user's loop receive?

A PyG ``Data`` with what PyG's loader sets. From a ``Data`` object every node and edge attribute is there for every
sampled vertex and edge. From a partitioned graph the attributes named by ``gather`` (``x``) are there for every sampled
vertex, other node attributes for the seeds, edge attributes for every sampled edge.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_edge_store_, index_select
from torch_geometric.sampler import SamplerOutput

from salientpp.store.shard import take_rows


def edge_index_of(mfg: SamplerOutput) -> Tensor:
    """int64 [2, e], without a copy where the sampler made row and col as one tensor."""
    base = mfg.row._base
    if base is not None and base is mfg.col._base and base.shape == (2, mfg.row.numel()):
        return base
    return torch.stack([mfg.row, mfg.col])


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
    )


class DataTemplate:
    """Batches of a ``Data`` object: its attributes, cut to what was sampled.

    Args:
        data: the whole; N vertices, E edges.

    Attributes:
        gathered: names of the node attributes whose rows the pipeline brings; others (on another device, strided, not
            tensors, with the vertices in another dimension) are left to PyG's ``index_select``.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        store = data._store
        node = [name for name in store if name != "num_nodes" and store.is_node_attr(name)]
        self._dim = {name: data.__cat_dim__(name, value, store) for name, value in store.items()}
        self.gathered = [name for name in node if self._dim[name] == 0 and _is_rows(store[name], data.num_nodes)]
        self._other_node = [name for name in node if name not in self.gathered]
        self._edge = [name for name in store if name not in ("edge_index", "adj_t") and store.is_edge_attr(name)]

    def build(self, mfg: SamplerOutput, rows: Mapping[str, Tensor]) -> Data:
        """The batch without its bookkeeping; ``rows`` holds the gathered attributes."""
        data, out = self._data, copy.copy(self._data)
        for name, value in rows.items():
            out[name] = value
        for name in self._other_node:
            out[name] = _select(data[name], mfg.node, self._dim[name])
        for name in self._edge:
            value = data[name]
            if mfg.edge is None:  # as in PyG, when a transform of the sampler's output drops the ids
                out[name] = None
            elif self._dim[name] == 0 and _is_rows(value, data.num_edges):
                out[name] = take_rows(value, mfg.edge)
            else:
                out[name] = _select(value, mfg.edge, self._dim[name])
        if "num_nodes" in data:
            out.num_nodes = mfg.node.numel()
        if "edge_index" in data:
            out.edge_index = edge_index_of(mfg).to(data.edge_index.device)
        if isinstance(data.get("adj_t"), Tensor):
            out.adj_t = _sparse_rows(data.adj_t, mfg)
        elif "adj_t" in data:
            filter_edge_store_(Data(adj_t=data.adj_t)._store, out._store, mfg.row, mfg.col, mfg.edge)
        return out


def _sparse_rows(adj_t: Tensor, mfg: SamplerOutput) -> Tensor:
    """The sampled edges as a torch CSR tensor [n, n] of targets by sources, with the values of ``adj_t``; repeats stay."""
    size = mfg.node.numel()
    order = torch.sort(mfg.col, stable=True).indices  # the sampler's edges are sorted already; a transform's may not be
    values = adj_t.values()[mfg.edge] if mfg.edge is not None else adj_t.values().new_ones(mfg.row.numel())
    counts = torch.bincount(mfg.col, minlength=size)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.sparse_csr_tensor(indptr, mfg.row[order], values[order], (size, size), check_invariants=False)


def _select(value: object, index: Tensor, dim: int) -> object:
    return index_select(value, index.to(value.device) if isinstance(value, Tensor) else index, dim=dim)


@dataclass(frozen=True, eq=False)
class PartitionTemplate:
    """Batches of a partitioned graph.

    Attributes:
        edge_rows: attribute name -> [E, ...], in the order of the graph's edge ids.
    """

    edge_rows: Mapping[str, Tensor]

    def build(self, mfg: SamplerOutput, rows: Mapping[str, Tensor]) -> Data:
        """The batch without its bookkeeping; ``rows`` holds all node attributes."""
        out = Data(edge_index=edge_index_of(mfg), num_nodes=mfg.node.numel())
        for name, value in rows.items():
            out[name] = value
        for name, value in self.edge_rows.items():
            out[name] = None if mfg.edge is None else take_rows(value, mfg.edge)
        return out


def add_bookkeeping(batch: Data, mfg: SamplerOutput, input_id: Tensor, batch_size: int) -> Data:
    """Set what PyG's loader sets beside the attributes."""
    if "n_id" not in batch:
        batch.n_id = mfg.node
    if mfg.edge is not None and "e_id" not in batch:
        batch.e_id = mfg.edge
    batch.batch = mfg.batch
    batch.num_sampled_nodes = mfg.num_sampled_nodes
    batch.num_sampled_edges = mfg.num_sampled_edges
    batch.input_id = input_id
    batch.batch_size = batch_size
    return batch
