"""Edge weights for layers that divide by degrees, in batches that lack most edges of the graph.

``GCNConv`` and similar layers weight an edge u → v with w / sqrt(d(u) d(v)). Here d is the sum of the weights of all edges into a vertex, including added
self-loops. A rank sums up the degrees of its part's vertices, once. Degrees of other vertices come from their owners.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, LGConv, TAGConv
from torch_geometric.utils import add_remaining_self_loops

from salientpp.graph.csc import runs_of_vertices
from salientpp.store.target_lists import Edges, TargetLists

#: Layers that normalise in ``forward``, with PyG's ``gcn_norm``, unless their ``normalize`` is False.
_NORMALISING = (GCNConv, LGConv, TAGConv)

#: Number of edges that are read at once while degrees are summed.
_CHUNK_EDGES = 2**22


@dataclass(frozen=True, eq=False)
class LayerEdges:
    """All edges into some vertices, the targets, of a graph or of a batch.

    Attributes:
        edge_index: int64 [2, e], sources and targets as positions in the batch; targets are 0 to ``num_targets`` - 1.
        n_id: int64 [n], ids in the graph of the batch's vertices, targets first.
        weight, attr: weights and attributes of the edges, [e, ...], or None.
    """

    edge_index: Tensor
    n_id: Tensor
    num_targets: int
    weight: Tensor | None = None
    attr: Tensor | None = None


class Kind(NamedTuple):
    """Kind of degrees that a layer divides by: with added self-loops or without.

    Attributes:
        adds_loops: every vertex without a self-loop gets one.
        loop: weight of these loops.
    """

    adds_loops: bool
    loop: float


def kinds_of(convs: Iterable[Callable[..., Tensor]], has_weights: bool) -> list[Kind]:
    """Returns the kinds of degrees that some layers divide by, each once. ``has_weights``: edges have weights."""
    kinds = [kind_of(conv, has_weights) for conv in convs if normalises(conv)]
    return list(dict.fromkeys(kinds))


def normalises(conv: Callable[..., Tensor]) -> bool:
    """Returns True if a layer divides by degrees that :class:`Normalisation` counts."""
    return isinstance(conv, _NORMALISING) and bool(conv.normalize)


def kind_of(conv: Any, has_weights: bool) -> Kind:
    """Returns the kind of degrees that a normalising layer divides by. ``has_weights``: edges have weights."""
    # PyG uses `improved` for the weight of a loop only if edges have weights.
    return Kind(
        bool(getattr(conv, "add_self_loops", False)), 2.0 if getattr(conv, "improved", False) and has_weights else 1.0
    )


class Normalisation:
    """Degrees of vertices, as normalising layers count them.

    Args:
        lists: the neighbour lists of the vertices that layers compute. Their columns may have the weights of the edges, named 'edge_weight'.
        kinds: the kinds of degrees to count, from :func:`kinds_of`.

    Attributes:
        kinds: see above.
        halo: int64 [h], ascending: the vertices without lists here that edges come from.
        own: float64 [n, len(kinds)], 1 / sqrt(degree) of the vertices with lists; 0 for a degree of 0.
    """

    def __init__(self, lists: TargetLists, kinds: Sequence[Kind]) -> None:
        self.kinds, self._lists = list(kinds), lists
        num_targets = lists.indptr.numel() - 1
        self.own = torch.zeros((num_targets, len(kinds)), dtype=torch.float64, device="cpu")
        halo = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for first, last in runs_of_vertices(lists.indptr, _CHUNK_EDGES) if kinds else ():
            targets = torch.arange(first, last, device="cpu") + lists.first_target
            edges = lists.into(targets)
            outside = (edges.source < lists.first_target) | (edges.source >= lists.first_target + num_targets)
            halo = [torch.cat([*halo, edges.source[outside]]).unique()]
            for number, kind in enumerate(kinds):
                self.own[first:last, number] = _degrees(edges, targets, kind)
        self.halo = halo[0]
        root = self.own.pow_(-0.5)
        root.masked_fill_(root == float("inf"), 0)
        self._root = root
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def add_halo(self, rows: Tensor) -> None:
        """Sets 1 / sqrt(degree) of the vertices in ``halo``, float64 [h, len(kinds)]. The ranks that own them have these rows in ``own``."""
        self._root = torch.cat([self.own, rows])

    def roots(self, kind: Kind, others: Tensor) -> Tensor:
        """Returns 1 / sqrt(degree) of the vertices with lists, then of ``others`` (ids that are in ``halo``), float64; 0 for a degree of 0."""
        place = torch.searchsorted(self.halo, others) + self.own.size(0)
        column = self._root[:, self.kinds.index(kind)]
        return torch.cat([column[: self.own.size(0)], column[place]])

    def applied(
        self, conv: Callable[..., Tensor], edges: LayerEdges, dtype: torch.dtype
    ) -> tuple[Callable[..., Tensor], LayerEdges]:
        """Makes a layer give the targets of a batch the same rows as on the whole graph: puts the degrees into edge weights.

        Returns a copy of ``conv`` that does not count degrees, and the edges with these weights. Rows have the dtype ``dtype``.
        """
        if not normalises(conv):
            return conv, edges
        kind = kind_of(conv, edges.weight is not None)
        if edges.weight is None:
            weight = torch.ones(edges.edge_index.size(1), dtype=dtype, device=edges.edge_index.device)
        else:
            weight = edges.weight if edges.weight.is_floating_point() else edges.weight.to(dtype)
        edge_index = edges.edge_index
        if kind.adds_loops:
            edge_index, weight = add_remaining_self_loops(edge_index, weight, kind.loop, edges.num_targets)
        factor = self._inverse_roots(edges.n_id, kind).to(weight.dtype)
        weight = factor[edge_index[0]] * weight * factor[edge_index[1]]
        plain: Any = copy.copy(conv)  # shares the parameters
        plain.normalize = False
        return plain, dataclasses.replace(edges, edge_index=edge_index, weight=weight)

    def _inverse_roots(self, n_id: Tensor, kind: Kind) -> Tensor:
        """Returns 1 / sqrt(degree) of some vertices, float64 [n]; 0 for a degree of 0."""
        if n_id.device not in self._on_device:
            self._on_device[n_id.device] = self._root.to(n_id.device), self.halo.to(n_id.device)
        root, halo = self._on_device[n_id.device]
        place, num_own = n_id - self._lists.first_target, self.own.size(0)
        if halo.numel():
            is_own = (place >= 0) & (place < num_own)
            place = torch.where(is_own, place, torch.searchsorted(halo, n_id) + num_own)
        return root[place, self.kinds.index(kind)]


def _degrees(edges: Edges, targets: Tensor, kind: Kind) -> Tensor:
    """Returns the sums of the weights of all edges into consecutive ``targets``, float64 [n]."""
    edge_index = torch.stack([edges.source - targets[0], edges.target])
    if "edge_weight" in edges.columns:
        weight = edges.rows("edge_weight").to(torch.float64)
    else:
        weight = torch.ones(edges.target.numel(), dtype=torch.float64, device="cpu")
    if kind.adds_loops:
        edge_index, weight = add_remaining_self_loops(edge_index, weight, kind.loop, targets.numel())
    return torch.zeros(targets.numel(), dtype=torch.float64, device="cpu").index_add_(0, edge_index[1], weight)
