"""Turns a sample and the rows of its vertices into a batch. Each kind of data source has a template class for this.

A batch of a ``Data`` or ``HeteroData`` has every node and edge attribute, for all sampled vertices and edges. In a batch of a partitioned graph, all sampled
vertices have the attributes in ``columns`` (``x``), and all sampled edges have the edge attributes. Only seeds have the other node attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput

from salientpp.batch.attributes import EdgeAttributes, NodeAttributes, edge_index_of, of_type, storage_of
from salientpp.batch.contents import Contents
from salientpp.graph.from_pyg import count_edges, count_vertices
from salientpp.processes import Lock
from salientpp.sampling.edge_rows import take_edge_rows
from salientpp.sampling.topology import Mfg
from salientpp.store.fetch import Column
from salientpp.store.rows import RowSource


class DataTemplate:
    """Builds batches from a ``Data`` or ``HeteroData``.

    A batch gets the attributes that the object has when the batch is built, cut to the sample. A batch has every type, even if nothing of it was sampled.

    Args:
        data: the whole graph. Its attributes may be written to, replaced, added and removed at any time, but sampling keeps using the original graph.
        own: columns (vertex type, attribute name) whose rows come from the user's sources.
    """

    def __init__(self, data: Data | HeteroData, own: Collection[Column] = ()) -> None:
        self._data = data
        self._contents = Contents(data)
        whole = self._contents.whole
        typed = isinstance(whole, HeteroData)
        nodes, edges = (whole.node_types, whole.edge_types) if typed else ([None], [None])
        own_of = {type_: [name for owner, name in own if owner == type_] for type_ in nodes}
        self._nodes = {type_: NodeAttributes(storage_of(whole, type_), own_of[type_]) for type_ in nodes}
        self._edges = {name: EdgeAttributes(storage_of(whole, name)) for name in edges}
        self._has_own = bool(own)

    def contents(self) -> Contents:
        """Returns the current contents of the user's ``Data`` or ``HeteroData``."""
        contents = self._contents
        if not contents.is_current():
            self._contents = contents = Contents(self._data, contents)
        return contents

    def columns(self) -> dict[Column, Tensor]:
        """Returns the columns whose rows the pipeline gathers from the object, as they are now: [N, ...] each."""
        whole = self.contents().whole
        return {
            (type_, name): rows
            for type_, nodes in self._nodes.items()
            for name, rows in nodes.columns(storage_of(whole, type_)).items()
        }

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """Builds the batch without the attributes that :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets.

        Args:
            rows: the columns that the pipeline gathers.
            contents: a result of :meth:`contents`, which has the other attributes.
        """
        assert contents is not None  # this template's contents are never None
        whole = contents.whole
        out = copy.copy(whole)
        for type_, nodes in self._nodes.items():
            own = {name: value for (owner, name), value in rows.items() if owner == type_}
            nodes.fill(storage_of(whole, type_), storage_of(out, type_), of_type(mfg.node, type_), own)
        for type_, edges in self._edges.items():
            row, col = of_type(mfg.row, type_), of_type(mfg.col, type_)
            edge = None if mfg.edge is None else of_type(mfg.edge, type_)
            # In a homogeneous graph, vertices and edges share a storage, so names of vertex rows can be skipped. If the user has sources of rows, one of
            # them may have an edge attribute's name, so PyG is asked about every name.
            of_vertices = own if type_ is None and not self._has_own else ()
            edges.fill(storage_of(whole, type_), storage_of(out, type_), row, col, edge, of_vertices)
        return out


class StoreTemplate:
    """Builds batches from PyG's ``FeatureStore`` and ``GraphStore``. They are the same as PyG's, and also have edge attributes.

    An attribute in an edge type's group belongs to the edges of that type. In a homogeneous graph, the number of rows
    decides whether any other attribute belongs to vertices or to edges, as in a ``Data``.

    Args:
        custom_cls: class of the batches. None: ``Data`` or ``HeteroData``.

    Raises:
        ValueError: an edge attribute does not have one row per edge.
    """

    def __init__(self, feature_store: FeatureStore, graph_store: GraphStore, custom_cls: type | None) -> None:
        self._features, self._graph = feature_store, graph_store
        self._custom_cls = custom_cls
        self._of_edges: dict[tuple[Any, str], bool] = {}  # by group and name
        self._lock = Lock()  # several sampling threads build batches, but the user's store may not be thread-safe
        typed = None not in {attr.edge_type for attr in graph_store.get_all_edge_attrs()}
        for attr in feature_store.get_all_tensor_attrs():
            self._is_of_edges(attr, typed)

    def contents(self) -> None:
        """Returns None: changes of a store are not tracked."""
        return None

    def columns(self) -> dict[Column, Tensor]:
        return {}

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None = None) -> Data | HeteroData:
        """Builds the batch without the attributes that :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets."""
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
            listed = dict.fromkeys(attr.edge_type for attr in self._graph.get_all_edge_attrs()) if typed else {}
        # The order of PyG: vertices before edges in a graph with types, otherwise edges first.
        if not typed:
            out.edge_index = torch.stack([mfg.row, mfg.col])
        for of_edges, owner, attr in wanted:
            if not of_edges:
                storage_of(out, owner).num_nodes = attr.index.numel()
        found = list(zip(wanted, values))
        for (of_edges, owner, attr), value in found:
            if not of_edges:
                storage_of(out, owner)[attr.attr_name] = value
        for name in listed:
            if name in mfg.row:
                storage_of(out, name).edge_index = torch.stack([mfg.row[name], mfg.col[name]])
        for (of_edges, owner, attr), value in found:
            if of_edges:
                storage_of(out, owner)[attr.attr_name] = value
        return out

    def _is_of_edges(self, attr: TensorAttr, typed: bool) -> bool:
        """True if an attribute belongs to edges. Each attribute is checked once."""
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
            return False  # the usual case, which saves counting the edges
        num_edges = count_edges(self._graph).get(group if typed else None)
        if num_edges is None:
            return True  # no batch has edges of this type
        if num_rows == num_edges:
            return True  # if the number of vertices is the same, PyG's Data decides by the name too
        if has_vertices:
            return False
        if num_rows is not None and (in_group or is_named):
            of = f" in the group {group!r}" if in_group else ""
            raise ValueError(
                f"{name!r}{of} of the feature store must have one row per edge, expected {num_edges} rows, got {num_rows}; store one row for every edge of "
                "the graph store, in its order, or remove the attribute"
            )
        return in_group or is_named


@dataclass(frozen=True, eq=False)
class PartitionTemplate:
    """Builds batches from a partitioned graph.

    Attributes:
        edge_rows: by edge type (None in a homogeneous graph), attribute name -> rows of the edges that this host holds, in the order of the graph's edge ids.
        first_edge: by edge type, id of the first of these edges. Empty: the host holds all edges.
    """

    edge_rows: Mapping[Any, Mapping[str, RowSource]]
    first_edge: Mapping[Any, int] = field(default_factory=dict)

    def contents(self) -> None:
        """Returns None: data on disk does not change."""
        return None

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None = None) -> Data | HeteroData:
        """Builds the batch without the attributes that :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets.

        ``rows`` holds all node attributes.
        """
        typed = isinstance(mfg, HeteroSamplerOutput)
        out = HeteroData() if typed else Data()
        edge_store = {name: storage_of(out, name) for name in (mfg.row if typed else [None])}
        for name, store in edge_store.items():
            store.edge_index = edge_index_of(of_type(mfg.row, name), of_type(mfg.col, name))
        for type_ in mfg.node if typed else [None]:
            storage_of(out, type_).num_nodes = of_type(mfg.node, type_).numel()
        for (type_, attribute), value in rows.items():
            storage_of(out, type_)[attribute] = value
        for name, store in edge_store.items():
            edge = None if mfg.edge is None else of_type(mfg.edge, name)
            first, arrived = self.first_edge.get(name, 0), getattr(mfg, "edge_rows", {}).get(name)
            for attribute, held in self.edge_rows[name].items():
                store[attribute] = None if edge is None else take_edge_rows(attribute, held, first, edge, arrived)
        return out
