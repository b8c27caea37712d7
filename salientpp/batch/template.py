"""Templates: they make a batch of what was sampled and of the rows of its vertices.

From a ``Data`` or ``HeteroData`` every node and edge attribute is there for every sampled vertex and edge. From a partitioned graph the attributes in
``columns`` (``x``) are there for every sampled vertex, other node attributes for the seeds, edge attributes for every sampled edge.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput

from salientpp.batch.attributes import EdgeAttributes, NodeAttributes, edge_index_of, of_type, storage_of
from salientpp.batch.contents import Contents
from salientpp.graph.from_pyg import count_edges, count_vertices
from salientpp.processes import Lock
from salientpp.sampling.topology import Mfg
from salientpp.store.fetch import Column
from salientpp.store.rows import take_rows


class DataTemplate:
    """Batches of a ``Data`` or a ``HeteroData``: what it holds when a batch is built, cut to what was sampled.

    Every type is there, also those that nothing was sampled of.

    Args:
        data: the whole. Its attributes may be written to, replaced, added and removed at any time; the graph is sampled as it was.
        own: columns whose rows come from elsewhere.
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
        """What the object holds now."""
        contents = self._contents
        if not contents.is_current():
            self._contents = contents = Contents(self._data, contents)
        return contents

    def columns(self) -> dict[Column, Tensor]:
        """The columns whose rows the pipeline brings from here, as they are now: [N, ...] each."""
        whole = self.contents().whole
        return {
            (type_, name): rows
            for type_, nodes in self._nodes.items()
            for name, rows in nodes.columns(storage_of(whole, type_)).items()
        }

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """The batch without what :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets.

        Args:
            rows: the columns that the pipeline brings.
            contents: what this template's :meth:`contents` gave, for the others.
        """
        assert contents is not None  # they are this template's
        whole = contents.whole
        out = copy.copy(whole)
        for type_, nodes in self._nodes.items():
            own = {name: value for (owner, name), value in rows.items() if owner == type_}
            nodes.fill(storage_of(whole, type_), storage_of(out, type_), of_type(mfg.node, type_), own)
        for type_, edges in self._edges.items():
            row, col = of_type(mfg.row, type_), of_type(mfg.col, type_)
            edge = None if mfg.edge is None else of_type(mfg.edge, type_)
            # Only with one type of vertices do these share a storage with edges. Rows that are not of the data may go by the name of such an attribute.
            of_vertices = own if type_ is None and not self._has_own else ()
            edges.fill(storage_of(whole, type_), storage_of(out, type_), row, col, edge, of_vertices)
        return out


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

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None = None) -> Data | HeteroData:
        """The batch without what :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets."""
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
        # PyG sets vertices before edges where there are types, else edges first.
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


@dataclass(frozen=True, eq=False)
class PartitionTemplate:
    """Batches of a partitioned graph.

    Attributes:
        edge_rows: by edge type (None where there is only one), attribute name -> [E, ...], in the order of the graph's edge ids.
    """

    edge_rows: Mapping[Any, Mapping[str, Tensor]]

    def contents(self) -> None:
        """None: what is on disk stays as it is."""
        return None

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None = None) -> Data | HeteroData:
        """The batch without what :func:`~salientpp.batch.loader_attributes.add_batch_attributes` sets; ``rows`` holds all node attributes."""
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
            for attribute, value in self.edge_rows[name].items():
                store[attribute] = None if edge is None else take_rows(value, edge)
        return out
