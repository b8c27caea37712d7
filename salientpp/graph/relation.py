"""What are the edges from one type of vertices to another, and how are they read?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.from_pyg import NO_EDGES, read_adj_t, read_edge_index
from salientpp.ids import first_outside
from salientpp.processes import lazy, may_compute_in_parallel

#: Weights of these are kept as float32, which takes half the memory; others may lose by it.
_HELD_BY_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Relation:
    """The edges from one type of vertices to another, or the same; validated by :class:`TypedGraph`.

    Attributes:
        source, target: positions in the graph's ``node_types``.
        indptr: int64 [N_target + 1].
        indices: int32 or int64 [E], sources in [0, N_source).
        edge_id: int32 [E] where E < 2**31, else int64: the user's number of each edge, or None where positions in ``indices`` are the numbers.
        edge_weight: float32 [E] in the order of ``indices``, where that holds what was given exactly, else float64; finite and >= 0, or None: all alike.
        edge_time: int64 [E] in the order of ``indices``, or None; see :class:`Clock`.
        source_time: the times of the vertices in ``indices``, or None where these have none: int32 [E] where they fit, else int64, so
            4 or 8 bytes per edge. A search in a list then reads the list's times alone, and no vertex's.
    """

    source: int
    target: int
    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = None
    edge_weight: Tensor | None = None
    edge_time: Tensor | None = None
    source_time: Tensor | None = None

    #: What sampling reads in place of ``indices`` and ``edge_id`` where there is one, see :class:`LinkedRelation`.
    links: ClassVar[Tensor | None] = None

    def linked(self) -> Relation:
        """The same edges for sampling: what it reads of an edge stands together, where ids need an array and sizes allow it."""
        if self.edge_id is None or self.indices.dtype != torch.int32 or self.indices.numel() >= 2**31:
            return self
        links = self.edge_id.to(torch.int64, copy=True).bitwise_left_shift_(32).bitwise_or_(self.indices)
        ops.use_huge_pages(links)
        return LinkedRelation.of(self, links)

    @property
    def nbytes(self) -> int:
        ids = self.edge_id if self.links is None else self.__dict__.get("edge_id")
        arrays = (self.indptr, self.indices, ids, self.links, self.edge_weight, self.edge_time, self.source_time)
        return sum(array.nbytes for array in arrays if array is not None)


class LinkedRelation(Relation):
    """A relation that keeps edge ids beside the sources, as :class:`salientpp.graph.csc.LinkedGraph` does: int64 [E], an edge's source in the lower half.

    ``edge_id`` is made when it is first asked for.
    """

    @classmethod
    def of(cls, relation: Relation, links: Tensor) -> LinkedRelation:
        """The same edges; ``links`` are as :func:`salientpp.ops.csc_from_coo` makes them."""
        linked = object.__new__(cls)
        linked.__dict__.update(
            {name: array for name, array in vars(relation).items() if name != "edge_id"}, links=links
        )
        return linked

    @lazy
    def edge_id(self) -> Tensor:
        assert self.links is not None
        return (self.links >> 32).to(torch.int32)


@dataclass(frozen=True)
class EdgeReader:
    """Reads one relation: its name for errors, its sizes, and what the user says of its order."""

    name: str
    num_sources: int
    num_targets: int
    is_sorted: bool
    backward: bool

    def ends(self, store: Mapping[str, Any]) -> tuple[Tensor, Tensor, bool]:
        """Source and target of every edge, and whether they stand in the order of a neighbour list, so that positions are ids."""
        if store.get("edge_index") is not None:
            return *self._ends(store["edge_index"]), False
        if store.get("adj_t") is not None:
            return *self._ends_of_matrix(store["adj_t"]), True
        return NO_EDGES[0], NO_EDGES[1], False

    def read(
        self,
        source: Tensor,
        target: Tensor,
        listed: bool,
        *,
        weight: Tensor | None,
        node_time: Tensor | None,
        edge_time: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """``(indptr, indices, edge_id, edge_weight, edge_time, source_time)`` as :class:`Relation` takes them."""
        num_edges = source.numel()
        num_sources, num_targets = self.num_sources, self.num_targets
        if self.backward:
            source, target, num_sources, num_targets = target, source, num_targets, num_sources
        weight = None if weight is None else self._checked_weight(weight, num_edges)
        if edge_time is not None:
            one_each(edge_time, num_edges, f"the time of {self.name}")
        time = edge_time if edge_time is not None else None if node_time is None else node_time[source]
        order = None
        if time is not None and not self.is_sorted:
            order = torch.sort(time, stable=True).indices
            source, target = source[order], target[order]
        # The kernel sorts by target and keeps the order of a list. It knows one number of vertices, so take the larger.
        widest = max(num_sources, num_targets)
        indptr, indices, edge_id = ops.csc_from_coo(
            source.contiguous(), target.contiguous(), widest, parallel=may_compute_in_parallel()
        )
        indptr = indptr[: num_targets + 1].contiguous()
        if self.is_sorted and target.numel() and bool((target.diff() < 0).any()):
            raise ValueError(f"is_sorted=True, but {self.name} are not sorted by target; leave is_sorted=False")
        if order is not None:
            edge_id = order[edge_id]
        edge_id = _narrow_ids(edge_id)
        in_lists = None if time is None else time[edge_id]
        if in_lists is not None and self.is_sorted:
            at = _first_fall(indptr, in_lists)
            if at is not None:
                raise ValueError(
                    f"is_sorted=True, but the times of {self.name} do not ascend inside a neighbour list (edges {at} and {at + 1}); "
                    "leave is_sorted=False"
                )
        read = (
            indptr,
            indices,
            None if self.is_sorted or (listed and time is None and not self.backward) else edge_id,
            None if weight is None else weight[edge_id],
            None if edge_time is None else in_lists,
            None if edge_time is not None or in_lists is None else _narrowed(in_lists),
        )
        for array in read:
            if array is not None:
                ops.use_huge_pages(array)
        return read

    def read_lists(
        self,
        indptr: Tensor,
        indices: Tensor,
        *,
        weight: Tensor | None,
        node_time: Tensor | None,
        edge_time: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """As :meth:`read`, of neighbour lists that were validated before; they are shared, unless times want another order. Positions are edge ids.

        Raises:
            ValueError: a weight or a time is none; with ``is_sorted``, times do not ascend inside a list.
        """
        num_edges = indices.numel()
        weight = None if weight is None else self._checked_weight(weight, num_edges)
        if edge_time is not None:
            one_each(edge_time, num_edges, f"the time of {self.name}")
        time = edge_time if edge_time is not None else None if node_time is None else node_time[indices]
        fall = None if time is None else _first_fall(indptr, time)
        edge_id = None
        if time is not None and fall is not None:
            if self.is_sorted:
                raise ValueError(
                    f"the times of {self.name} must ascend inside a neighbour list, and edges {fall} and {fall + 1} do not"
                )
            edge_id = _narrow_ids(_sorted_inside(indptr, time))
            indices, time = indices[edge_id], time[edge_id]
            weight = None if weight is None else weight[edge_id]
        of_edges = None if edge_time is None else time
        of_sources = None if edge_time is not None or time is None else _narrowed(time)
        for array in (*(() if edge_id is None else (indices, edge_id)), weight, of_edges, of_sources):
            if array is not None:
                ops.use_huge_pages(array)
        return indptr, indices, edge_id, weight, of_edges, of_sources

    def _ends(self, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        edge_index = read_edge_index(edge_index, f"edge_index of {self.name}")
        for row, size in ((0, self.num_sources), (1, self.num_targets)):
            at = first_outside(edge_index[row], size)
            if at is not None:
                raise ValueError(
                    f"edge_index[{row}, {at}] of {self.name} must be in [0, {size}), got {int(edge_index[row, at])}"
                )
        return edge_index[0], edge_index[1]

    def _ends_of_matrix(self, adj_t: Any) -> tuple[Tensor, Tensor]:
        indptr, indices = read_adj_t(adj_t, f"adj_t of {self.name}")
        indptr, indices = indptr.cpu().to(torch.int64), indices.cpu().to(torch.int64)
        target = torch.repeat_interleave(torch.arange(indptr.numel() - 1, device="cpu"), indptr.diff())
        return self._ends(torch.stack([indices, target]))

    def _checked_weight(self, weight: Tensor, num_edges: int) -> Tensor:
        weight = one_each(weight, num_edges, f"the weight of {self.name}").detach().cpu()
        if weight.dtype.is_complex:
            raise ValueError(f"the weight of {self.name} must be real numbers, got {weight.dtype}")
        weight = weight.to(torch.float32 if weight.dtype in _HELD_BY_FLOAT32 else torch.float64)
        bad = ~(weight.isfinite() & (weight >= 0))
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise ValueError(f"the weight of {self.name} must be finite and >= 0, got {float(weight[at])} at edge {at}")
        if not bool(weight.sum(dtype=torch.float64).isfinite()):
            raise ValueError(
                f"the weight of {self.name} must have a finite sum; divide it by its largest, {float(weight.max()):g}"
            )
        return weight


def _sorted_inside(indptr: Tensor, key: Tensor) -> Tensor:
    """int64 [E]: the order of the edges that leaves lists where they are and sorts each by ``key`` [E]; equals keep their order."""
    by_key = torch.sort(key, stable=True).indices
    target = torch.repeat_interleave(torch.arange(indptr.numel() - 1, device="cpu"), indptr.diff())
    return by_key[torch.sort(target[by_key], stable=True).indices]


def _first_fall(indptr: Tensor, time: Tensor) -> int | None:
    """The first position in a list after which a smaller time follows in the same list; None: lists ascend."""
    falls = time.diff() < 0
    starts = indptr[1:-1]
    starts = starts[(starts > 0) & (starts < time.numel())]
    falls[starts - 1] = False
    return int(falls.nonzero()[0]) if bool(falls.any()) else None


def _narrow_ids(edge_id: Tensor) -> Tensor:
    """The same permutation as int32 where that holds it: what a batch reads of it lies on half as many lines."""
    return edge_id.to(torch.int32) if edge_id.numel() < 2**31 else edge_id


def _narrowed(times: Tensor) -> Tensor:
    """The same numbers as int32 where that holds them."""
    if not times.numel():
        return times
    least, most = times.aminmax()
    fits = int(least) >= -(2**31) and int(most) < 2**31
    return times.to(torch.int32) if fits else times


def one_each(values: object, size: int, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 1 or values.numel() != size:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a tensor of shape [{size}], got {got}")
    return values
