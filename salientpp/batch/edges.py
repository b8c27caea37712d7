"""Lets the ``edge_index`` of a batch carry the hops of its batch (:class:`~salientpp.sampling.hops.Hops`) to the model.

Models trimmed by :func:`salientpp.nn.trim` read from it which rows the seeds need. The tensor computes as any other; results of operations are plain tensors.
A copy knows the hops too, also on another device. A tensor that was written to does not know them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.batch.attributes import edge_index_of, of_type, storage_of
from salientpp.batch.contents import is_sparse_tensor
from salientpp.sampling.hops import Asked, Hops, Relation, hops_of
from salientpp.sampling.topology import Mfg


class BatchEdges(Tensor):
    """Edges int64 [2, e] that know the hops of their batch, so that a layer can skip rows that the seeds do not need.

    Attributes:
        hops: how many of the batch's vertices and edges lie within each number of hops of the seeds.
        relation: edge type of these edges.
        adj_t_version: if the batch has an ``adj_t``, the number of in-place writes to its values when the batch was
            made. By this number ``edges_of`` notices a later change. It is -1 for a ``SparseTensor`` without values.
            None: the batch has ``edge_index``.
    """

    # Operations skip the check for subclasses, and return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    hops: Hops
    relation: Relation
    adj_t_version: int | None = None
    _version_given: int

    @property
    def is_given(self) -> bool:
        """True if the edges are unchanged since they were sampled."""
        return self.hops.is_unchanged and self._version_given == self._version

    def _with_mark(self, out: Tensor) -> Tensor:
        return mark(out, self.hops, self.relation) if self.is_given and out.dtype == self.dtype else out

    def _moved(self, out: Tensor, non_blocking: bool) -> Tensor:
        """Makes ``out``, the edges on another device, a :class:`BatchEdges`. Also copies the batch's edge lists (by target, by source) there."""
        if self.is_given:
            for lists in self.hops.made_lists().values():
                lists.to(out.device, non_blocking=non_blocking)
        return self._with_mark(out)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().to(*args, **kwargs), kwargs.get("non_blocking", False))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._with_mark(super().cpu(*args, **kwargs))

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().cuda(*args, **kwargs), kwargs.get("non_blocking", False))

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._with_mark(super().clone(*args, **kwargs))

    def detach(self) -> Tensor:
        return self._with_mark(super().detach())

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._with_mark(super().contiguous(*args, **kwargs))

    def pin_memory(self, *args: Any, **kwargs: Any) -> Tensor:
        self.hops.kept |= {key: lists.pin_memory() for key, lists in self.hops.made_lists().items()}
        return self._with_mark(super().pin_memory(*args, **kwargs))

    # torch does not count writes through the results of the following methods.

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        self.hops.is_exposed = True
        return super().numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self.hops.is_exposed = True
        return super().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self.hops.is_exposed = True
        return self.plain().__dlpack__(*args, **kwargs)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        self.hops.is_exposed = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    def plain(self) -> Tensor:
        """Returns a plain tensor of the same memory, which does not know the hops."""
        return torch.Tensor.detach(self)

    def __copy__(self) -> Tensor:
        return self._with_mark(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain()
        return (mark, (plain, self.hops, self.relation)) if self.is_given else plain.__reduce_ex__(protocol)


def mark(edge_index: Tensor, hops: Hops, relation: Relation) -> BatchEdges:
    """Makes :class:`BatchEdges` of ``edge_index``, in the same memory. Copies inference tensors, because torch counts no writes to them."""
    if edge_index.is_inference():
        with torch.inference_mode(False):
            edge_index = edge_index.clone()
    marked = edge_index if isinstance(edge_index, BatchEdges) else edge_index.as_subclass(BatchEdges)
    marked.hops, marked.relation, marked._version_given = hops, relation, marked._version
    return marked


def edges_of(value: Any) -> Any:
    """Returns the :class:`BatchEdges` that :func:`mark_edges` attached to a batch's ``adj_t``, if it was not changed since. Else returns ``value``."""
    edges = getattr(value, "_salientpp_edges", None)
    return edges if edges is not None and edges.adj_t_version == _version_of(value) else value


def _is_unweighted(adj_t: Any) -> bool:
    """True if the value is a ``SparseTensor`` without values, or a CSR tensor whose values are all 1."""
    if isinstance(adj_t, Tensor):
        return adj_t.layout == torch.sparse_csr and bool((adj_t.values() == 1).all())
    return is_sparse_tensor(adj_t) and not adj_t.has_value()


def _version_of(adj_t: Any) -> int:
    """Returns the number of in-place writes to the values of a CSR tensor. For a ``SparseTensor``: -1 if it has no values, or else 0."""
    if isinstance(adj_t, Tensor):
        return adj_t.values()._version
    return 0 if adj_t.has_value() else -1


def mark_edges(batch: Data | HeteroData, mfg: Mfg, asked: Asked) -> None:
    """Replaces the edges of a batch by :class:`BatchEdges`, if they were sampled hop by hop. ``asked``: as in :class:`Hops`."""
    hops = hops_of(mfg, asked)
    if hops is None:
        return
    edge_index = {}
    for relation, counts in hops.num_edges.items():
        store = storage_of(batch, relation)
        edges, adj_t = store.get("edge_index"), store.get("adj_t")
        if type(edges) is Tensor and edges.size(1) == counts[-1]:
            store._mapping["edge_index"] = marked = mark(edges, hops, relation)
        elif edges is None and _is_unweighted(adj_t):
            marked = mark(edge_index_of(of_type(mfg.row, relation), of_type(mfg.col, relation)), hops, relation)
            marked.adj_t_version = _version_of(adj_t)
            adj_t._salientpp_edges = marked
        else:
            continue
        edge_index[relation] = marked.plain()
    hops.know(edge_index)
    hops.make_used_lists()
