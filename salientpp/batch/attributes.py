"""Copies node and edge attributes of PyG's data to a batch, for the sampled vertices and edges only."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.loader.utils import filter_edge_store_, index_select

from salientpp.files import first_line
from salientpp.graph.from_pyg import positions_in
from salientpp.store.rows import take_rows
from salientpp.store.tiers import NO_IDS

#: Attributes that the loader sets on a batch, as PyG does, instead of the data's attributes of these names. (An ``n_id`` or ``e_id`` of the data stays.)
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


def _is_rows(value: object) -> bool:
    """True if the row kernel can gather from the value: a dense, contiguous CPU tensor without a gradient."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dim() >= 1
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_quantized
    )


class NodeAttributes:
    """Selects the rows of sampled vertices from the attributes in one PyG storage. Each call uses the attributes that the storage has at that moment.

    Args:
        store: the storage as it is when the loader is constructed.
        own: names of attributes whose rows come from the user's sources; the storage may lack them.
    """

    def __init__(self, store: BaseStorage, own: Collection[str]) -> None:
        self._own = own
        self._num_vertices = store.num_nodes  # the sampled graph keeps its size
        x = store.get("x")
        if isinstance(x, Tensor) and "x" not in own and not x.is_nested and x.dim() and not store.is_node_attr("x"):
            owner = "data" if store._key is None else f"data[{store._key!r}]"
            warnings.warn(
                f"{owner}.x has {x.size(0)} rows for {self._num_vertices} vertices, so every batch carries all of x, as in PyG",
                UserWarning,
                stacklevel=2,
            )

    def columns(self, store: BaseStorage) -> dict[str, Tensor]:
        """Returns the attributes whose rows the pipeline gathers with its own kernel, by name.

        For the others, :meth:`fill` calls PyG's ``index_select``. These are values that are not tensors, not on the CPU
        or not contiguous, and tensors that count vertices in another dimension than 0.
        """
        others = ("num_nodes", *_SET_BY_LOADER, *self._own)
        names = [name for name in store if name not in others and store.is_node_attr(name)]
        rows = {
            name: store[name] for name in names if _is_rows(store[name]) and store[name].size(0) == self._num_vertices
        }
        return {name: value for name, value in rows.items() if _cat_dim(store, name) == 0}

    def fill(self, store: BaseStorage, out: BaseStorage, n_id: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Sets the attributes of the vertices ``n_id`` on ``out``. ``rows``: by name, gathered rows, or placeholders for rows that arrive later."""
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


class EdgeAttributes:
    """Sets the sampled edges of one PyG storage, and their attributes, on a batch. Each call uses what the storage has at that moment.

    Args:
        store: the storage as it is when the loader is constructed.

    Raises:
        ValueError: the storage has both ``edge_index`` and ``adj_t``, and their edges differ.
    """

    def __init__(self, store: BaseStorage) -> None:
        self._position = None  # position in adj_t of each column of edge_index; None: the same position
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
        """Sets ``edge_index`` or ``adj_t``, and the attributes of the edges ``edge``. If ``edge`` is None, the attributes are removed, as in PyG.

        Args:
            of_vertices: names of known vertex attributes. PyG is not asked about these names, because asking is slow.
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
            to["edge_index"] = edge_index if device == edge_index.device else edge_index.to(device, non_blocking=True)
        if edge is not None and self._position is not None:
            edge = self._position[edge.to(torch.int64)]
        if "adj_t" not in store._mapping:
            return
        if isinstance(store.adj_t, Tensor):
            sources, targets = out.size()
            out.adj_t = _sparse_rows(store.adj_t, row, col, edge, (targets, sources))
        else:
            filter_edge_store_({"adj_t": store.adj_t}, out, row, col, edge)


def edge_index_of(row: Tensor, col: Tensor) -> Tensor:
    """Joins ``row`` and ``col`` to int64 [2, e], without a copy if the sampler made them as one tensor in this order."""
    base = row._base
    if base is not None and base is col._base and base.shape == (2, row.numel()) and row.data_ptr() == base.data_ptr():
        return base
    return torch.stack([row, col])


def storage_of(data: Data | HeteroData, type_: Any) -> BaseStorage:
    """Returns PyG's storage of a vertex or edge type. Use it instead of ``data[type_]``, which may return a relation for a missing node type."""
    if isinstance(data, Data):
        return data._store
    return data.get_edge_store(*type_) if isinstance(type_, tuple) else data.get_node_store(type_)


def of_type(ids: Tensor | Mapping[Any, Tensor], type_: Any) -> Tensor:
    # The test for Tensor comes first: to find that a tensor is no Mapping, Python once checks every Mapping class.
    return ids if isinstance(ids, Tensor) else ids.get(type_, NO_IDS)


def _sparse_rows(adj_t: Tensor, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]) -> Tensor:
    """Returns the sampled edges as a torch CSR tensor of targets by sources, with the values of ``adj_t``. Repeated edges stay."""
    # Sampled edges are sorted already, but a transform may have reordered them.
    order = torch.sort(col, stable=True).indices
    values = adj_t.values()[edge] if edge is not None else adj_t.values().new_ones(row.numel())
    counts = torch.bincount(col, minlength=size[0])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.sparse_csr_tensor(indptr, row[order], values[order], size, check_invariants=False, device="cpu")


def _cat_dim(store: BaseStorage, name: str) -> Any:
    """Returns the dimension in which an attribute counts vertices or edges, as the user's data object says in ``__cat_dim__``."""
    return store._parent().__cat_dim__(name, store[name], store)


def _cut(store: BaseStorage, name: str, ids: Tensor) -> object:
    """Returns the entries of a vertex or edge attribute that belong to ``ids``.

    Raises:
        ValueError: the attribute cannot be indexed by row.
    """
    value = store[name]
    dim = _cat_dim(store, name)
    if dim == 0 and _is_rows(value):
        return take_rows(value, ids)
    if isinstance(value, Tensor):
        ids = ids.to(value.device, non_blocking=True)  # the host does not wait for a device that holds the attribute
    try:
        return index_select(value, ids, dim=dim)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        owner = "data" if store._key is None else f"data[{store._key!r}]"
        kind = f"{value.layout} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        reason = first_line(error)[:200]
        raise ValueError(
            f"{owner}.{name} has one entry per vertex or edge, as PyG sees it, but cannot be cut to the sampled ones: "
            f"{kind} of length {len(value)} ({reason}); make it a dense or COO tensor, or delete it"
        ) from error
