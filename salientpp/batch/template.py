"""What does the user's loop receive?

A PyG ``Data`` or ``HeteroData`` with what PyG's loader sets. From such an object every node and edge attribute is there for every
sampled vertex and edge. From a partitioned graph the attributes in ``columns`` (``x``) are there for every sampled
vertex, other node attributes for the seeds, edge attributes for every sampled edge.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.data.storage import BaseStorage
from torch_geometric.loader.utils import filter_edge_store_, index_select
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.graph.from_pyg import count_edges, count_vertices, positions_in
from salientpp.processes import Lock
from salientpp.store.fetch import Column
from salientpp.store.rows import take_rows
from salientpp.store.tiers import NO_IDS

#: What a batch says about itself in place of attributes by these names, as in PyG. (An ``n_id`` or ``e_id`` of the data stays.)
_SET_BY_LOADER = frozenset(
    [
        "batch",
        "batch_size",
        "input_id",
        "seed_time",
        "num_sampled_nodes",
        "num_sampled_edges",
        "edge_label_index",
        "edge_label",
        "edge_label_time",
        "src_index",
        "dst_pos_index",
        "dst_neg_index",
        "_orig_edge_index",
    ]
)


def edge_index_of(row: Tensor, col: Tensor) -> Tensor:
    """int64 [2, e], without a copy where the sampler made row and col as one tensor, in this order."""
    base = row._base
    if base is not None and base is col._base and base.shape == (2, row.numel()) and row.data_ptr() == base.data_ptr():
        return base
    return torch.stack([row, col])


def _is_rows(value: object) -> bool:
    """Whether the row kernel can gather from it: a dense, contiguous CPU tensor without a gradient."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dim() >= 1
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_quantized
    )


class Contents:
    """What a ``Data`` or ``HeteroData`` held at one moment: the attributes, and for each tensor which memory it had and how often
    that had been written to.

    torch counts in-place writes (``Tensor._version``), but none through ``.data`` or numpy.

    Args:
        data: the object. Another thread may set and delete its attributes at the same time.
        former: contents from before, which know of what has stayed whether it is an attribute of vertices or of edges.

    Attributes:
        whole: a shallow copy of the object as it was then, for threads to read.
    """

    def __init__(self, data: Data | HeteroData, former: Contents | None = None) -> None:
        self._data = data
        self.whole = _copy_of(data)
        _keep_kinds(self.whole, None if former is None else former.whole)
        self._entries = _entries_of(self.whole)
        # What is held cannot be taken for something that was put into its memory.
        self._memory = {
            column: value.untyped_storage()
            for column, (value, _) in self._entries.items()
            if isinstance(value, Tensor) and value.layout == torch.strided
        }

    def __reduce__(self) -> tuple[type[Contents], tuple[Data | HeteroData]]:
        return Contents, (self._data,)  # a copy's memory is its own

    def is_current(self) -> bool:
        """Whether the object still holds this."""
        entries = iter(self._entries.items())
        for store in self._data.stores:
            key = store._key
            for name, value in dict(store._mapping).items():
                column, (former, state) = next(entries, _NO_ENTRY)
                if value is not former or column != (key, name) or _state_of(value) != state:
                    return False
        return next(entries, None) is None

    def equals(self, other: Contents | None) -> bool:
        return self is other or (other is not None and _are_same(self._entries, other._entries))

    def value(self, column: Column) -> object:
        """An attribute of one type of vertices or edges, or None."""
        return self._entries.get(column, (None,))[0]

    def has_same(self, column: Column, other: Contents | None) -> bool:
        """Whether an attribute is the same in both, down to the last write."""
        if other is None:
            return False
        ours, theirs = self._entries.get(column), other._entries.get(column)
        return ours is not None and theirs is not None and ours[0] is theirs[0] and ours[1] == theirs[1]

    def changed_edges(self, then: Contents) -> list[Any]:
        """Where the edges are not those of ``then``: their types; None stands for those of a homogeneous graph."""
        both = dict.fromkeys([*self._entries, *then._entries])
        changed = [
            column
            for column in both
            if column[1] in ("edge_index", "adj_t") and not (self.has_same(column, then) or self._moved(column, then))
        ]
        return list(
            dict.fromkeys(
                key for key, name in changed if not _is_equal(self.value((key, name)), then.value((key, name)))
            )
        )

    def _moved(self, column: Column, then: Contents) -> bool:
        """Whether an attribute is the same tensor, only in other memory: torch moves what is sent to another process to where both can read it."""
        ours, theirs = (each._memory.get(column) for each in (self, then))
        if ours is None or theirs is None or ours._cdata != theirs._cdata:
            return False
        (value, state), (former, former_state) = self._entries[column], then._entries[column]
        same = isinstance(state, tuple) and isinstance(former_state, tuple) and state[0] == former_state[0]
        return same and value is former


_NO_ENTRY: tuple[Column | None, tuple[object, object]] = (None, (None, None))


def _copy_of(data: Data | HeteroData) -> Data | HeteroData:
    """A shallow copy of an object that another thread may write to at the same time."""
    for _ in range(10):
        try:
            return copy.copy(data)
        except RuntimeError:  # PyG goes through dictionaries, of types among others, and one has grown meanwhile
            pass
    return copy.copy(data)


def _keep_kinds(data: Data | HeteroData, former: Data | HeteroData | None) -> None:
    """Let a copy know which attributes are of vertices and of edges, as far as PyG has found that out for the former copy.

    PyG tells by sizes, which it infers from the attributes that there are: it could not after a loop has deleted ``x``.
    """
    known: dict[Any, BaseStorage] = {} if former is None else {store._key: store for store in former.stores}
    for store in data.stores:
        kinds = store._cached_attr = defaultdict(set)  # PyG's, who would add it while another thread copies the storage
        before = known.get(store._key, BaseStorage())
        for kind, names in dict(before.__dict__.get("_cached_attr", {})).items():
            kinds[kind] = {name for name in set(names) if store.get(name) is before.get(name)}


def _entries_of(data: Data | HeteroData) -> dict[Column, tuple[object, object]]:
    """(type, name) -> (value, what tells whether the value is as it was). Of an object that no other thread writes to."""
    return {
        (store._key, name): (value, _state_of(value)) for store in data.stores for name, value in store._mapping.items()
    }


def _are_same(ours: dict[Column, tuple[object, object]], theirs: dict[Column, tuple[object, object]]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(
        a == b and value is other and state == other_state
        for (a, (value, state)), (b, (other, other_state)) in zip(ours.items(), theirs.items())
    )


def _state_of(value: Any) -> object:
    try:
        return (value._version, value.data_ptr(), value.requires_grad)
    except (AttributeError, RuntimeError):  # no tensor, or one without memory or count of its own
        return _state_of_other(value)


def _state_of_other(value: object) -> object:
    if not isinstance(value, Tensor):
        values = (
            value.storage._value if hasattr(value, "storage") and hasattr(value, "csr") else None
        )  # a SparseTensor's
        return None if values is None else _state_of(values)
    if value.layout == torch.strided:  # made in inference mode
        return (value.data_ptr(), value.requires_grad)
    has_values = value.layout != torch.sparse_coo or value.is_coalesced()
    return (value._version, value.values()._version if has_values else value._values()._version)


def _is_equal(ours: object, theirs: object) -> bool:
    """Of edges; they may have been moved to another device, or copied."""
    if ours is theirs or not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    if ours.layout != torch.strided or (ours.layout, ours.shape, ours.dtype) != (
        theirs.layout,
        theirs.shape,
        theirs.dtype,
    ):
        return False
    return torch.equal(ours.cpu(), theirs.cpu())


class _NodeAttributes:
    """The vertex attributes of one storage, whatever it holds at the moment.

    Args:
        store: the storage as it is when the loader is made.
        own: names of those whose rows come from elsewhere; they may be missing in the storage.
    """

    def __init__(self, store: BaseStorage, own: Collection[str]) -> None:
        self._own = own
        self._num_vertices = store.num_nodes  # the graph that is sampled keeps its size
        x = store.get("x")
        if isinstance(x, Tensor) and "x" not in own and not x.is_nested and x.dim() and not store.is_node_attr("x"):
            owner = "data" if store._key is None else f"data[{store._key!r}]"
            warnings.warn(
                f"{owner}.x has {x.size(0)} rows for {self._num_vertices} vertices, so every batch carries it whole, as in PyG",
                UserWarning,
                stacklevel=2,
            )

    def columns(self, store: BaseStorage) -> dict[str, Tensor]:
        """Those whose rows the pipeline brings from here; others (on another device, strided, not tensors, with the vertices in another
        dimension) are left to PyG's ``index_select``."""
        others = ("num_nodes", *_SET_BY_LOADER, *self._own)
        names = [name for name in store if name not in others and store.is_node_attr(name)]
        rows = {
            name: store[name] for name in names if _is_rows(store[name]) and store[name].size(0) == self._num_vertices
        }
        return {name: value for name, value in rows.items() if _cat_dim(store, name) == 0}

    def fill(self, store: BaseStorage, out: BaseStorage, n_id: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Set the attributes of the vertices ``n_id``; ``rows`` holds those that are there already, or will come."""
        to = out._mapping
        for name in store._mapping:
            if name in rows:
                to[name] = rows[name]
            elif name == "num_nodes":
                to[name] = n_id.numel()
            elif name not in self._own and store.is_node_attr(name):
                to[name] = _cut(store, name, n_id)
        for name in self._own:
            to[name] = rows[name]


class _EdgeAttributes:
    """The edges of one storage, and their attributes, whatever it holds at the moment.

    Args:
        store: the storage as it is when the loader is made.

    Raises:
        ValueError: it has ``edge_index`` and ``adj_t``, and they are not of the same edges.
    """

    def __init__(self, store: BaseStorage) -> None:
        self._position = None  # in adj_t, of each column of edge_index; None: the same
        if store.get("edge_index") is not None and store.get("adj_t") is not None:
            key = store._key
            self._position = positions_in(store.adj_t, store.edge_index, "the edges" if key is None else repr(key))

    def fill(
        self,
        store: BaseStorage,
        out: BaseStorage,
        row: Tensor,
        col: Tensor,
        edge: Tensor | None,
        of_vertices: Collection[str] = (),
    ) -> None:
        """Set ``edge_index`` or ``adj_t`` and the attributes of the edges ``edge``; those vanish where it is None, as in PyG.

        Args:
            of_vertices: names of which it is known that they are attributes of vertices; asking PyG takes long.
        """
        to = out._mapping
        for name in store._mapping:
            if name in ("edge_index", "adj_t") or name in of_vertices or not store.is_edge_attr(name):
                continue
            if edge is None:
                to.pop(name, None)
            else:
                to[name] = _cut(store, name, edge)
        if "edge_index" in store._mapping:
            device, edge_index = store._mapping["edge_index"].device, edge_index_of(row, col)
            to["edge_index"] = edge_index if device == edge_index.device else edge_index.to(device)
        if edge is not None and self._position is not None:
            edge = self._position[edge.to(torch.int64)]
        if "adj_t" not in store._mapping:
            return
        if isinstance(store.adj_t, Tensor):
            sources, targets = out.size()
            out.adj_t = _sparse_rows(store.adj_t, row, col, edge, (targets, sources))
        else:
            filter_edge_store_(_Only(store, "adj_t"), out, row, col, edge)


class _Only:
    """A view of a storage with one attribute, for PyG's function."""

    def __init__(self, store: BaseStorage, name: str) -> None:
        self._item = (name, store[name])

    def items(self) -> list[tuple[str, object]]:
        return [self._item]


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
        self._nodes = {type_: _NodeAttributes(_store_of(whole, type_), own_of[type_]) for type_ in nodes}
        self._edges = {name: _EdgeAttributes(_store_of(whole, name)) for name in edges}
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
            for name, rows in nodes.columns(_store_of(whole, type_)).items()
        }

    def build(
        self, mfg: SamplerOutput | HeteroSamplerOutput, rows: Mapping[Column, Tensor], contents: Contents | None
    ) -> Data | HeteroData:
        """The batch without what :func:`add_batch_attributes` sets.

        Args:
            rows: the columns that the pipeline brings.
            contents: what this template's :meth:`contents` gave, for the others.
        """
        assert contents is not None  # they are this template's
        whole = contents.whole
        out = copy.copy(whole)
        for type_, nodes in self._nodes.items():
            own = {name: value for (owner, name), value in rows.items() if owner == type_}
            nodes.fill(_store_of(whole, type_), _store_of(out, type_), _of_type(mfg.node, type_), own)
        for type_, edges in self._edges.items():
            row, col = _of_type(mfg.row, type_), _of_type(mfg.col, type_)
            edge = None if mfg.edge is None else _of_type(mfg.edge, type_)
            # Only with one type of vertices do these share a storage with edges. Rows that are not of the data may go by the name of such an attribute.
            of_vertices = own if type_ is None and not self._has_own else ()
            edges.fill(_store_of(whole, type_), _store_of(out, type_), row, col, edge, of_vertices)
        return out


def _store_of(data: Data | HeteroData, type_: Any) -> BaseStorage:
    """The storage of exactly this type. ``data[type_]`` may mean a relation instead, if the node type does not exist yet."""
    if isinstance(data, Data):
        return data._store
    return data.get_edge_store(*type_) if isinstance(type_, tuple) else data.get_node_store(type_)


def _of_type(ids: Tensor | Mapping[Any, Tensor], type_: Any) -> Tensor:
    # In this order: to find out that a tensor is no mapping, Python once goes through all classes of mappings.
    return ids if isinstance(ids, Tensor) else ids.get(type_, NO_IDS)


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
        """The batch without what :func:`add_batch_attributes` sets."""
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
                _store_of(out, owner).num_nodes = attr.index.numel()
        found = list(zip(wanted, values))
        for (of_edges, owner, attr), value in found:
            if not of_edges:
                _store_of(out, owner)[attr.attr_name] = value
        for name in relations if typed else []:
            _store_of(out, name).edge_index = torch.stack([mfg.row[name], mfg.col[name]])
        for (of_edges, owner, attr), value in found:
            if of_edges:
                _store_of(out, owner)[attr.attr_name] = value
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


def _sparse_rows(adj_t: Tensor, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]) -> Tensor:
    """The sampled edges as a torch CSR tensor of targets by sources, with the values of ``adj_t``; repeats stay."""
    order = torch.sort(col, stable=True).indices  # the sampler's edges are sorted already; a transform's may not be
    values = adj_t.values()[edge] if edge is not None else adj_t.values().new_ones(row.numel())
    counts = torch.bincount(col, minlength=size[0])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.sparse_csr_tensor(indptr, row[order], values[order], size, check_invariants=False, device="cpu")


def _cat_dim(store: BaseStorage, name: str) -> Any:
    """Which dimension of an attribute counts vertices or edges, as the object says that the storage is of."""
    return store._parent().__cat_dim__(name, store[name], store)


def _cut(store: BaseStorage, name: str, ids: Tensor) -> object:
    """An attribute of the vertices or edges, cut to ``ids``.

    Raises:
        ValueError: it is of a kind that has no rows to take.
    """
    value = store[name]
    dim = _cat_dim(store, name)
    if dim == 0 and _is_rows(value):
        return take_rows(value, ids)
    try:
        return index_select(value, ids.to(value.device) if isinstance(value, Tensor) else ids, dim=dim)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        owner = "data" if store._key is None else f"data[{store._key!r}]"
        kind = f"{value.layout} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"{owner}.{name} cannot be cut to what was sampled, as PyG does with an attribute that has an entry per vertex or edge: "
            f"{kind} of length {len(value)} ({reason}); make it a dense or COO tensor, or delete it"
        ) from error


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

    def build(
        self, mfg: SamplerOutput | HeteroSamplerOutput, rows: Mapping[Column, Tensor], contents: Contents | None = None
    ) -> Data | HeteroData:
        """The batch without what :func:`add_batch_attributes` sets; ``rows`` holds all node attributes."""
        out = Data() if isinstance(mfg, SamplerOutput) else HeteroData()
        edge_types = [None] if isinstance(mfg, SamplerOutput) else list(mfg.row)
        edge_store = {name: _store_of(out, name) for name in edge_types}
        for name, store in edge_store.items():
            store.edge_index = edge_index_of(_of_type(mfg.row, name), _of_type(mfg.col, name))
        for type_ in [None] if isinstance(mfg, SamplerOutput) else mfg.node:
            _store_of(out, type_).num_nodes = _of_type(mfg.node, type_).numel()
        for (type_, attribute), value in rows.items():
            _store_of(out, type_)[attribute] = value
        for name, store in edge_store.items():
            edge = None if mfg.edge is None else _of_type(mfg.edge, name)
            for attribute, value in self.edge_rows[name].items():
                store[attribute] = None if edge is None else take_rows(value, edge)
        return out


# --- what PyG's loaders set beside the attributes ----------------------------------------------------------


def _set_attributes(batch: Data | BaseStorage, /, **values: object) -> None:
    """Set what is not None, and let vanish what is, as PyG's setters do: they take 2 µs each, as much as all of these here."""
    if isinstance(batch, Data) and type(batch) is not Data:  # may have setters of its own
        for name, value in values.items():
            setattr(batch, name, value)
        return
    to = batch._store._mapping if isinstance(batch, Data) else batch._mapping
    for name, value in values.items():
        if value is not None:
            to[name] = value
        else:
            to.pop(name, None)


def add_batch_attributes(batch: Data | HeteroData, mfg: SamplerOutput | HeteroSamplerOutput) -> None:
    """Ids, trees and counts; what is None vanishes, as in PyG."""
    if isinstance(mfg, HeteroSamplerOutput):
        for name, n_id in mfg.node.items():
            store = _store_of(batch, name)  # a pair of stores may have no attributes of this type
            if "n_id" not in store:
                store.n_id = n_id
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
    _set_attributes(
        batch,
        n_id=batch._store._mapping.get("n_id", mfg.node),
        e_id=batch._store._mapping.get("e_id", mfg.edge),
        batch=mfg.batch,
        num_sampled_nodes=mfg.num_sampled_nodes,
        num_sampled_edges=mfg.num_sampled_edges,
    )
    if mfg.orig_row is not None:
        batch._orig_edge_index = torch.stack([mfg.orig_row, mfg.orig_col])


def add_node_attributes(
    batch: Data | HeteroData, mfg: SamplerOutput | HeteroSamplerOutput, input_type: str | None
) -> None:
    """What ``NeighborLoader`` adds about its seeds, from ``mfg.metadata``: (input ids, times or None)."""
    add_batch_attributes(batch, mfg)
    input_id, seed_time = mfg.metadata[:2]
    seeds = batch if input_type is None else batch[input_type]
    _set_attributes(seeds, input_id=input_id, seed_time=seed_time, batch_size=input_id.numel())


def add_link_attributes(
    batch: Data | HeteroData,
    mfg: SamplerOutput | HeteroSamplerOutput,
    input_type: tuple[str, str, str] | None,
    triplet: bool,
) -> None:
    """What ``LinkNeighborLoader`` adds about its edges, from ``mfg.metadata`` as PyG's ``edge_sample`` leaves it."""
    add_batch_attributes(batch, mfg)
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
