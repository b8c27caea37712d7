"""Holds the edges between two vertex types as neighbour lists, and reads them from PyG's formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.from_pyg import NO_EDGES, order_by, read_adj_t, read_edge_index
from salientpp.ids import first_outside
from salientpp.processes import may_compute_in_parallel

#: Weights of these dtypes are kept as float32, which takes half the memory. Weights of other dtypes might lose precision as float32.
_HELD_BY_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Relation:
    """The edges from one vertex type to another, or to itself. :class:`TypedGraph` validates them.

    Attributes:
        source, target: positions in the graph's ``node_types``.
        indptr: int64 [N_target + 1].
        indices: int32 or int64 [E], sources in [0, N_source).
        edge_id: int32 [E] if E < 2**31, else int64: the user's number of each edge. None if positions in ``indices`` are the numbers, or if
            ``links`` holds them.
        edge_weight: [E] in the order of ``indices``, finite and >= 0; float32 if this dtype holds the given values exactly, else float64. None: all
            edges weigh the same.
        edge_time: int64 [E] in the order of ``indices``, or None; see :class:`Clock`.
        source_time: times of the vertices in ``indices``: int32 [E] if they fit, else int64; None if these vertices have no times. The copy costs
            4 or 8 bytes per edge. In return, a search in a list reads only consecutive times, not the times of scattered vertices.
        links: int64 [E], read by sampling instead of ``indices`` and ``edge_id``: the source in the lower 32 bits, the edge's number in
            the upper 32 bits.
    """

    source: int
    target: int
    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None = None
    edge_weight: Tensor | None = None
    edge_time: Tensor | None = None
    source_time: Tensor | None = None
    links: Tensor | None = None

    def linked(self) -> Relation:
        """Returns the same edges with ``links`` for faster sampling; returns ``self`` if edge ids need no array or sizes do not allow links."""
        if self.edge_id is None or self.indices.dtype != torch.int32 or self.indices.numel() >= 2**31:
            return self
        links = self.edge_id.to(torch.int64, copy=True).bitwise_left_shift_(32).bitwise_or_(self.indices)
        ops.use_huge_pages(links)
        return replace(self, edge_id=None, links=links)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, Tensor))


#: ``indptr``, ``indices``, ``edge_id``, ``edge_weight``, ``edge_time`` and ``source_time``, as :class:`Relation` takes them.
Arrays = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class EdgeReader:
    """Reads the edges of one relation from PyG's formats.

    ``name`` is for errors. ``is_sorted``: the user says that edges are sorted by target and time. ``backward``: reverse every edge.
    """

    name: str
    num_sources: int
    num_targets: int
    is_sorted: bool
    backward: bool

    def read(self, edges: Mapping[str, Any], node_time: Tensor | None, edge_time: Tensor | None) -> Arrays:
        """Returns the arrays of a :class:`Relation`.

        Args:
            edges: ``edge_index``, ``adj_t``, ``csc`` (sources, indptr, and edge ids or None) or ``lists`` (indptr and indices that were validated
                before). Without any of these the relation has no edges. ``weight`` is optional.
            node_time: times of the vertices that are drawn.
            edge_time: times of the edges, [E].

        Raises:
            ValueError: an id is out of range, a weight or a time is not valid, or, with ``is_sorted``, edges are not in order.
        """
        if "lists" in edges:
            indptr, indices = edges["lists"]
            return self._read_lists(indptr, indices, edges.get("weight"), node_time, edge_time)
        ids = None
        listed = False  # True if edges stand in the order of a neighbour list, so that positions are ids
        if edges.get("edge_index") is not None:
            source, target = self._ends(edges["edge_index"])
        elif edges.get("adj_t") is not None:
            source, target = self._ends_of_lists(*read_adj_t(edges["adj_t"], f"adj_t of {self.name}"))
            listed = True
        elif "csc" in edges:
            indices, indptr, ids = edges["csc"]
            source, target = self._ends_of_lists(indptr, indices)
            edge_time = edge_time if ids is None or edge_time is None else edge_time[ids]
        else:
            source, target = NO_EDGES
        num_sources, num_targets = self.num_sources, self.num_targets
        if self.backward:
            source, target, num_sources, num_targets = target, source, num_targets, num_sources
        weight, time = self._checked(edges.get("weight"), source, node_time, edge_time)
        order = None
        if time is not None and not self.is_sorted:
            order = torch.sort(time, stable=True).indices
            source, target = source[order], target[order]
        # The kernel sorts by target and keeps the order inside a list. It takes one number of vertices for both ends, so pass the larger.
        widest = max(num_sources, num_targets)
        indptr, indices, edge_id = ops.csc_from_coo(
            source.contiguous(), target.contiguous(), widest, parallel=may_compute_in_parallel()
        )
        indptr = indptr[: num_targets + 1].contiguous()
        if self.is_sorted and target.numel() and bool((target.diff() < 0).any()):
            raise ValueError(f"is_sorted=True, but {self.name} are not sorted by target; leave is_sorted=False")
        edge_id = _narrow_ids(edge_id if order is None else order[edge_id])
        if time is not None:
            in_lists = time[edge_id]
            at = _first_fall(indptr, in_lists) if self.is_sorted else None
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
            *_times(None if time is None else in_lists, edge_time is not None),
        )
        _use_huge_pages(*read)
        return read if ids is None else (indptr, indices, ids[edge_id], *read[3:])

    def _read_lists(
        self, indptr: Tensor, indices: Tensor, weight: Tensor | None, node_time: Tensor | None, edge_time: Tensor | None
    ) -> Arrays:
        """Returns the arrays for lists that were validated before. Positions are edge ids. The lists are not copied unless times need another order."""
        weight, time = self._checked(weight, indices, node_time, edge_time)
        fall = None if time is None else _first_fall(indptr, time)
        edge_id = None
        if time is not None and fall is not None:
            if self.is_sorted:
                raise ValueError(
                    f"the times of {self.name} must ascend inside a neighbour list, and edges {fall} and {fall + 1} do not"
                )
            target = torch.repeat_interleave(torch.arange(indptr.numel() - 1, device="cpu"), indptr.diff())
            edge_id = _narrow_ids(order_by(time, target))
            indices, time = indices[edge_id], time[edge_id]
            weight = None if weight is None else weight[edge_id]
        times = _times(time, edge_time is not None)
        _use_huge_pages(None if edge_id is None else indices, edge_id, weight, *times)
        return indptr, indices, edge_id, weight, *times

    def _checked(
        self, weight: Tensor | None, source: Tensor, node_time: Tensor | None, edge_time: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Checks weights and times. Returns the weights, and the times by which lists are sorted: those of the edges, or else of their sources."""
        weight = None if weight is None else self._checked_weight(weight, source.numel())
        if edge_time is not None:
            return weight, one_each(edge_time, source.numel(), f"the time of {self.name}")
        return weight, None if node_time is None else node_time[source]

    def _ends(self, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        edge_index = read_edge_index(edge_index, f"edge_index of {self.name}")
        for row, size in ((0, self.num_sources), (1, self.num_targets)):
            at = first_outside(edge_index[row], size)
            if at is not None:
                raise ValueError(
                    f"edge_index[{row}, {at}] of {self.name} must be in [0, {size}), got {int(edge_index[row, at])}"
                )
        return edge_index[0], edge_index[1]

    def _ends_of_lists(self, indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
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
                f"the weight of {self.name} must have a finite sum; divide the weights by the largest, {float(weight.max()):g}"
            )
        return weight


def _first_fall(indptr: Tensor, time: Tensor) -> int | None:
    """Returns the first position whose successor in the same list has a smaller time; None if all lists ascend."""
    falls = time[1:] < time[:-1]  # differences of far apart times would overflow
    starts = indptr[1:-1]
    starts = starts[(starts > 0) & (starts < time.numel())]
    falls[starts - 1] = False
    return int(falls.nonzero()[0]) if bool(falls.any()) else None


def _narrow_ids(edge_id: Tensor) -> Tensor:
    """Returns edge ids as int32 if they fit, so that a batch reads half as many bytes of them."""
    return edge_id.to(torch.int32) if edge_id.numel() < 2**31 else edge_id


def _times(time: Tensor | None, of_edges: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns ``edge_time`` and ``source_time`` for :class:`Relation`: ``time`` is the first if it belongs to edges, else the second. The other is None.

    Source times become int32 if they fit.
    """
    if time is None or of_edges:
        return time, None
    least, most = time.aminmax() if time.numel() else (-(2**31), 2**31)
    return None, time.to(torch.int32) if int(least) >= -(2**31) and int(most) < 2**31 else time


def _use_huge_pages(*arrays: Tensor | None) -> None:
    for array in arrays:
        if array is not None:
            ops.use_huge_pages(array)


def one_each(values: object, size: int, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 1 or values.numel() != size:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a tensor of shape [{size}], got {got}")
    return values
