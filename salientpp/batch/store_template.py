"""Batches of a pair of PyG's ``FeatureStore`` and ``GraphStore``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.batch.contents import Contents
from salientpp.batch.template import store_of
from salientpp.graph.from_pyg import count_edges, count_vertices
from salientpp.processes import Lock
from salientpp.store.fetch import Column


class StoreTemplate:
    """Batches of a pair of PyG's ``FeatureStore`` and ``GraphStore``: what PyG makes of an MFG and these, with attributes of edges too.

    An attribute in a group of an edge type belongs to its edges. In a graph of one type an attribute without such a group belongs to what it has as many
    rows as, as in a ``Data``.

    Args:
        custom_cls: the class of the batches; None: ``Data`` or ``HeteroData``.

    Raises:
        ValueError: an attribute of edges does not have one row per edge.
    """

    def __init__(self, feature_store: FeatureStore, graph_store: GraphStore, custom_cls: type | None) -> None:
        self._features, self._graph = feature_store, graph_store
        self._custom_cls = custom_cls
        self._of_edges: dict[tuple[Any, str], bool] = {}  # by group and name
        self._lock = Lock()  # sampling threads build batches, and a user's store may not expect several
        typed = None not in {attr.edge_type for attr in graph_store.get_all_edge_attrs()}
        for attr in feature_store.get_all_tensor_attrs():
            self._is_of_edges(attr, typed)

    def contents(self) -> None:
        """None: when a store is read is not the batch's business."""
        return None

    def columns(self) -> dict[Column, Tensor]:
        return {}

    def build(
        self, mfg: SamplerOutput | HeteroSamplerOutput, rows: Mapping[Column, Tensor], contents: Contents | None = None
    ) -> Data | HeteroData:
        """The batch without what :func:`~salientpp.batch.attributes.add_batch_attributes` sets."""
        typed = isinstance(mfg, HeteroSamplerOutput)
        out = (self._custom_cls or (HeteroData if typed else Data))()
        with self._lock:
            wanted = []
            for attr in self._features.get_all_tensor_attrs():
                of_edges = self._is_of_edges(attr, typed)
                ids = mfg.edge if of_edges else mfg.node
                owner = attr.group_name if typed else None
                index = ids.get(owner) if isinstance(ids, dict) else ids
                if index is not None:
                    attr.index = index
                    wanted.append((of_edges, owner, attr))
            values = self._features.multi_get_tensor([attr for *_, attr in wanted])
            relations = list(mfg.row) if typed else [None]
            if typed:
                listed = dict.fromkeys(attr.edge_type for attr in self._graph.get_all_edge_attrs())
                relations = [name for name in listed if name in mfg.row]
        # PyG sets vertices before edges where there are types, else edges first.
        if not typed:
            out.edge_index = torch.stack([mfg.row, mfg.col])
        for of_edges, owner, attr in wanted:
            if not of_edges:
                store_of(out, owner).num_nodes = attr.index.numel()
        found = list(zip(wanted, values))
        for (of_edges, owner, attr), value in found:
            if not of_edges:
                store_of(out, owner)[attr.attr_name] = value
        for name in relations if typed else []:
            store_of(out, name).edge_index = torch.stack([mfg.row[name], mfg.col[name]])
        for (of_edges, owner, attr), value in found:
            if of_edges:
                store_of(out, owner)[attr.attr_name] = value
        return out

    def _is_of_edges(self, attr: TensorAttr, typed: bool) -> bool:
        """Whether an attribute belongs to edges; checked once for each."""
        key = (attr.group_name, attr.attr_name)
        if key not in self._of_edges:
            self._of_edges[key] = self._find_kind(attr, typed)
        return self._of_edges[key]

    def _find_kind(self, attr: TensorAttr, typed: bool) -> bool:
        group, name = attr.group_name, attr.attr_name
        in_group, is_named = isinstance(group, tuple), "edge" in name
        if typed and not in_group:
            return False
        whole = copy.copy(attr)
        whole.index = None
        size = self._features.get_tensor_size(whole)
        num_rows = size[0] if size else None
        has_vertices = not in_group and num_rows == count_vertices((self._features, self._graph))[None]
        if has_vertices and not is_named:
            return False  # the usual case, in which nobody has to count edges
        num_edges = count_edges(self._graph).get(group if typed else None)
        if num_edges is None:
            return True  # no batch has edges of this type
        if num_rows == num_edges:
            return True  # where there are as many vertices, PyG's Data goes by the name too
        if has_vertices:
            return False
        if num_rows is not None and (in_group or is_named):
            of = f" in the group {group!r}" if in_group else ""
            raise ValueError(
                f"{name!r}{of} of the feature store must have one row per edge, expected {num_edges} rows, got {num_rows}; store a row for every edge of "
                "the graph store, in its order, or remove the attribute"
            )
        return in_group or is_named
