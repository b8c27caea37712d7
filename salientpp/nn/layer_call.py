"""Runs one call of a layer on the needed rows only.

It cuts the arguments, computes products over edges grouped by target, and replaces PyG's helper functions.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing

from salientpp.batch.contents import is_sparse_tensor
from salientpp.batch.edges import BatchEdges, edges_of
from salientpp.containers import leaves, tensors_of
from salientpp.nn import forwards, products
from salientpp.nn.layers import (
    LINEAR_MESSAGES,
    Layer,
    Replaced,
    layer_of,
    linear_form,
    pair_of,
    product_of,
    reduction_of,
    with_helpers,
)
from salientpp.nn.trace import ALL, Call
from salientpp.nn.unchanged import change_inside, change_of, is_plain
from salientpp.sampling.edge_lists import EdgeLists
from salientpp.sampling.hops import Hops, Relation


@functools.cache
def _parameters(kind: Any) -> tuple[dict[str, None], set[str]]:
    """Returns the names of a ``forward``'s parameters, in order, and the names of those without a default."""
    own = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {each.name: None for each in named}, {each.name for each in named if each.default is each.empty}


def arguments_of(conv: MessagePassing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a call's arguments by name, in order; an ``adj_t`` becomes an ``edge_index``.

    Returns None if they do not fit the signature, so that the layer's own call raises, or if the layer takes some of them as ``*args`` or ``**kwargs``.
    """
    names, required = _parameters(cast(Any, type(conv)))
    given = {**dict(zip(names, args)), **kwargs}
    if len(given) != len(args) + len(kwargs) or not required <= given.keys() <= names.keys():
        return None
    return {name: edges_of(given[name]) for name in names if name in given}


def edges_in(value: Any) -> list[BatchEdges]:
    """Finds the edges of batches with known hops in ``value``, which may be nested. Edges that were written to are left out."""
    return [edges for edges in map(edges_of, leaves(value)) if isinstance(edges, BatchEdges) and edges.is_given]


def can_cut(conv: MessagePassing, forward: Callable[..., Any], arguments: Mapping[str, Any] | None, hops: Hops) -> bool:
    """Returns True if a layer computes the same for some targets when it gets only the rows and edges that these
    targets need.

    ``forward`` may be the copy of the class's method that :func:`~salientpp.nn.layers.with_helpers` makes.
    """
    kind = type(conv)
    facts = layer_of(conv)
    if arguments is None or facts is None or facts.needs_all is not None:
        return False
    if conv.flow != "source_to_target" or conv.decomposed_layers != 1:
        return False
    if getattr(getattr(forward, "__func__", None), "__code__", None) is not kind.forward.__code__:
        return False
    if change_of(conv) is not None or change_inside(conv) is not None:
        return False
    own = vars(conv)
    if own.get("cached") or any(arguments.get(name) is not None for name in _EXCLUDING):
        return False
    weight = arguments.get("edge_weight")
    if isinstance(weight, Tensor) and weight.dim() != 1:  # some layers take [E, 1]
        return False
    edges = [each for value in arguments.values() for each in _edge_indices(value)]
    if not edges or not all(isinstance(each, BatchEdges) and each.is_given and each.hops is hops for each in edges):
        return False
    if any(each.adj_t_version is not None for each in edges) and not _takes_adj_t(conv, facts, arguments, edges):
        return False
    relations = {each.relation for each in edges}
    if own.get("add_self_loops") and any(each is not None and each[0] != each[-1] for each in relations):
        return False  # PyG adds an edge from the source i to the target i, which no hop reaches
    return (len(relations) == 1 or facts.is_typed) and all(hops.lists(relation) is not None for relation in relations)


def _takes_adj_t(conv: MessagePassing, facts: Layer, arguments: Mapping[str, Any], edges: Sequence[BatchEdges]) -> bool:
    """True if the batch's edges, in their order, can replace the ``adj_t`` given to a layer with equal results."""
    if any(
        name.startswith("edge") and value is not None and value is not edges[0] for name, value in arguments.items()
    ):
        return False
    if facts.degrees and edges[0].adj_t_version != -1:  # PyG adds self-loops to those already in a CSR tensor
        return False
    return linear_form(conv) is not None or type(conv).message in FUSED


#: Number of multiplications of a dense product that take as long as one multiplication in a sum over edges.
_SUM = 10

#: Arguments that exclude cutting. A layer that is given one returns more than rows of targets, or reads more rows than its targets need.
_EXCLUDING = ("return_attention_weights", "return_attention", "size", "batch")

#: Arguments with a row for each vertex.
_OF_VERTICES = ("x", "x_0", "pos", "normal", "node_type")


def _edge_indices(value: Any) -> list[Any]:
    values = list(value.values()) if isinstance(value, dict) else [value]
    return [each for each in values if _is_edge_index(each)]


def _is_edge_index(value: Any) -> bool:
    """Returns True if an argument is an ``edge_index`` or a sparse adjacency matrix."""
    if not isinstance(value, Tensor):
        return is_sparse_tensor(value)
    return value.layout != torch.strided or (value.dtype == torch.int64 and value.dim() == 2 and value.size(0) == 2)


def first_rows(rows: Tensor, number: int) -> Tensor:
    """Returns the first ``number`` rows of a table. Does not slice a table without more rows, to save memory."""
    return rows if rows.size(0) == number else rows[:number]


class LayerCall:
    """Runs one call of a layer with arguments that are cut to the needed rows.

    Args:
        conv: the layer; :func:`can_cut` must hold for it.
        call: this call in the plan, with the numbers of hops that are needed.
        arguments: the layer's arguments, by name.
        hops: hops of the batch.
    """

    def __init__(self, conv: MessagePassing, call: Call, arguments: dict[str, Any], hops: Hops) -> None:
        self.conv, self.call, self.hops = conv, call, hops
        given = edges_in(list(arguments.values()))[0]
        self.relation: Relation = given.relation
        self._types = (None, None) if given.relation is None else (given.relation[0], given.relation[-1])
        self._whole = arguments  # as given by the model
        self._reduction = reduction_of(conv, is_unchanged=True)  # can_cut has asked
        facts = LINEAR_MESSAGES.get(type(conv).message)
        self._form = None if facts is None or self._reduction is None else (facts.weight, self._reduction)
        self._lists: dict[int, EdgeLists] = {}  # by the id of an edge_index, kept in `_tensors`
        self._tensors: list[Tensor] = []
        self._cut(arguments)

    # --- arguments ------------------------------------------------------------------------------------------

    def _cut(self, arguments: dict[str, Any]) -> None:
        source, target = self._types
        hops, call = self.hops, self.call
        self.num_out = hops.nodes_within(target, call.out_hops)
        self.num_in = hops.nodes_within(source, call.in_hops)
        # A layer that mixes rows of targets computes more of them than it returns.
        self.num_targets = hops.nodes_within(target, max(call.out_hops, call.in_hops - 1))
        num_edges = hops.edges_into(self.relation, call.in_hops - 1)
        total = hops.num_edges[self.relation][-1]
        facts = layer_of(self.conv)
        is_one_hop = call.in_hops == min(ALL, call.out_hops + 1)
        pairs = facts.pairs if facts is not None and is_one_hop else ()
        once = [getattr(self.conv, name) for name in facts.once] if facts is not None else []
        if not all(module is None or is_plain(module) for module in once):
            pairs = ()  # a module may count its calls
        # Inside the layer, tensors with different numbers of rows meet only as pairs.
        self.is_aligned = bool(pairs) or (type(self.conv) is pyg.GCNConv and is_one_hop)
        self._is_paired = bool(pairs) or any(isinstance(value, (tuple, list)) for value in arguments.values())
        self.arguments: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, dict):
                value = {key: self._of_type(key, each) for key, each in value.items()}
            elif isinstance(value, BatchEdges):
                value = self._edges(value, num_edges)
            elif isinstance(value, (tuple, list)) and len(value) == 2:
                numbers = self.num_in, self.num_targets
                value = tuple(each if each is None else first_rows(each, n) for each, n in zip(value, numbers))
            elif isinstance(value, Tensor) and value.dim():
                if name.startswith("edge") or (value.size(0) == total and name not in _OF_VERTICES):
                    value = first_rows(value, num_edges)
                else:
                    value = self._rows(name, value)
                    if name in pairs:
                        value = products.with_first_rows(value, self.num_out)
            self.arguments[name] = value

    def _edges(self, given: BatchEdges, number: int) -> Tensor:
        """Cuts the batch's ``edge_index`` to its first ``number`` edges. Remembers it, so that :meth:`_lists_of` can return its edges by target."""
        return self._know(given.plain()[:, :number], self.hops.lists(self.relation))

    def _of_type(self, key: Any, value: Tensor) -> Tensor:
        """Cuts one entry of a dictionary argument: the edges of a relation, or the rows of a vertex type."""
        if isinstance(value, BatchEdges):
            return value.plain()[:, : self.hops.edges_into(value.relation, self.call.in_hops - 1)]
        return first_rows(value, self.hops.nodes_within(key, self.call.in_hops))

    def _rows(self, name: str, value: Tensor) -> Tensor:
        if value.size(0) < self.num_in:
            raise RuntimeError(
                f"{type(self.conv).__name__} ({self.call.layer}) needs {self.num_in} rows of {name} for the seeds of this batch, got {value.size(0)}; "
                "a model with salientpp.nn.trim must pass on the rows that its layers gave, or the rows of all vertices"
            )
        return first_rows(value, self.num_in)

    def _know(self, edge_index: Tensor, lists: EdgeLists | None) -> Tensor:
        if lists is not None:
            self._lists[id(edge_index)] = lists
            self._tensors.append(edge_index)  # a reference, so that no other tensor gets its id
        return edge_index

    # --- the call -------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any]) -> Any:
        """Returns the layer's output for the needed rows of targets."""
        conv, cheaper = self.conv, self._cheaper_forward()
        if cheaper is not None:
            return first_rows(cheaper(**self.arguments), self.num_out)
        placed = {
            "propagate": self._propagate,
            "edge_updater": self._edge_updater,
            **with_helpers(conv, self._helpers()),
        }
        forward = placed.pop("forward", forward)
        with Replaced([(vars(conv), name, method) for name, method in placed.items()]):
            out = forward(**self.arguments)
        if isinstance(out, dict):
            return {
                type_: first_rows(rows, self.hops.nodes_within(type_, self.call.out_hops))
                for type_, rows in out.items()
            }
        return first_rows(out, self.num_out)

    def _cheaper_forward(self) -> Callable[..., Any] | None:
        """Returns a cheaper forward with the same results, if there is one for the layer and these sizes; else None."""
        conv, x = self.conv, cast(Any, self.arguments.get("x"))
        form = self._form
        is_pair = isinstance(x, tuple) and all(isinstance(each, Tensor) and each.dim() == 2 for each in x)
        if type(conv) is pyg.GCNConv and form is not None and form[1] in ("sum", "mean") and isinstance(x, Tensor):
            is_cheaper = x.dim() == 2 and self._sums_first(x.size(1), conv.out_channels)
            return self._gcn if is_cheaper and forwards.has_plain_map(conv, x) else None
        if type(conv) is pyg.SAGEConv and form is not None and is_pair and forwards.can_add_in_place(conv, x):
            return self._sage
        if type(conv) is pyg.GATConv and is_pair and self._is_attention and forwards.has_plain_map(conv, x[0]):
            return self._gat_of_inputs
        return None

    def _sums_first(self, columns: int, out: int) -> bool:
        """True if it is cheaper to sum rows first, and to multiply the fewer rows that remain by the weights."""
        num_edges = self.hops.edges_into(self.relation, self.call.out_hops)
        return (self.num_in - self.num_out) * columns * out > _SUM * num_edges * (columns - out)

    def _gcn(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        conv, edges, weight = self.conv, edge_index, edge_weight
        if conv.normalize:
            edges, weight = self._gcn_norm(
                edge_index, edge_weight, None, conv.improved, conv.add_self_loops, conv.flow, x.dtype
            )
        return forwards.gcn(conv, x, lambda rows: self._propagate(edges, x=rows, edge_weight=weight))

    def _sage(self, x: tuple[Tensor, Tensor], edge_index: Tensor, **_: None) -> Tensor:
        return forwards.sage(self.conv, x, lambda rows: self._propagate(edge_index, x=rows))

    def _gat_of_inputs(self, x: tuple[Tensor, Tensor], edge_index: Tensor, **_: None) -> Tensor:
        edges = self._looped() if self.conv.add_self_loops else edge_index

        def attend(rows: Tensor, scores: tuple[Tensor, Tensor]) -> Tensor:
            alpha = self._edge_updater(edges, alpha=scores, edge_attr=None)
            return self._propagate(edges, x=(rows, None), alpha=alpha)

        return forwards.gat(self.conv, x, attend)

    @property
    def _is_attention(self) -> bool:
        """True if the layer only weights rows by scores (:data:`FUSED`), so that one kernel computes it."""
        return self._whole.get("edge_attr") is None and self._reduction is not None

    def _helpers(self) -> dict[str, Callable[..., Any]]:
        helpers: dict[str, Callable[..., Any]] = {"gcn_norm": self._gcn_norm}
        if type(self.conv).edge_update in SCORES and self._is_attention:
            helpers |= {"remove_self_loops": lambda edge_index, edge_attr=None: (edge_index, edge_attr)}
            helpers |= {"add_self_loops": lambda edge_index, edge_attr=None, **_: (self._looped(), edge_attr)}
        return helpers

    def _looped(self) -> Tensor:
        """Returns an empty tensor that stands for an ``edge_index`` with self-loops. Products use the edges grouped by target instead."""
        lists = self._of_batch(self_loops=True)
        return self._know(torch.empty((2, 0), dtype=torch.int64, device=self._device), lists)

    def _of_batch(self, self_loops: bool) -> EdgeLists:
        lists = self.hops.lists(self.relation, self_loops)
        assert lists is not None  # can_cut requires lists
        return lists.to(self._device)

    @property
    def _device(self) -> torch.device:
        return self._tensors[0].device

    def _gcn_norm(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replaces PyG's ``gcn_norm``: computes the same weights from the degrees in the whole batch."""
        lists = self._of_batch(add_self_loops)
        weight = self._whole.get("edge_weight")
        fill = 2.0 if improved else 1.0
        key = ("gcn_norm", self.relation, add_self_loops, dtype, self._device)
        norm = self.hops.kept.get(key) if weight is None else None
        if norm is None:
            # A norm without weights is kept, and a later training step may save it for its backward.
            with torch.inference_mode(torch.is_inference_mode_enabled() and weight is not None):
                norm = _symmetric(lists, weight, fill, dtype, self.hops.edge_index[self.relation])
        if weight is None:
            self.hops.kept[key] = norm
        if self._form is not None:
            return (self._looped() if add_self_loops else edge_index), norm
        number = self.hops.nodes_within(self._types[1], self.call.in_hops - 1)
        target = lists.targets(number)
        return torch.stack([lists.source[: target.numel()].to(torch.int64), target]), norm[: target.numel()]

    # --- propagate ------------------------------------------------------------------------------------------

    def _num_targets(self, rows: Any) -> int:
        """Returns the number of targets in a pair, or else the number of targets whose sources are all in ``rows``."""
        source, target = pair_of(rows)
        if source is not target and self._is_paired:
            return target.size(self.conv.node_dim) if isinstance(target, Tensor) else self.num_targets
        counts, number = self.hops.num_nodes[self._types[0]], source.size(self.conv.node_dim)
        if self.call.in_hops >= len(counts) and number == counts[-1]:
            return self.hops.num_nodes[self._types[1]][-1]
        hop = min(bisect.bisect_right(counts, number) - 1, self.call.in_hops)  # the last hops may add no vertex
        return max(self.num_out, self.hops.nodes_within(self._types[1], hop - 1) if hop else 0)

    def _propagate(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        lists = self._lists_of(edge_index, given)
        out = None if lists is None else self._product(lists.to(self._device), given)
        if out is not None:
            return out
        return type(self.conv).propagate(self.conv, edge_index, size=size, **given)

    def _lists_of(self, edge_index: Any, given: dict[str, Any]) -> EdgeLists | None:
        """Returns the edges of an ``edge_index`` grouped by target, or None if it is unknown.

        If gradients are needed, it asks the sampler to group later batches by source too.
        """
        lists = self._lists.get(id(edge_index))
        if lists is not None and any(tensor.requires_grad for tensor in tensors_of(given)):
            self.hops.asked.add((self.relation, lists.edge is not None, True))
        return lists

    def _product(self, lists: EdgeLists, given: dict[str, Any]) -> Tensor | None:
        conv = self.conv
        fused = FUSED.get(type(conv).message)
        if fused is not None:
            return fused(self, lists, given)
        terms = product_of(self._form, given)
        if terms is None:
            return None
        source, weight, reduction = terms
        if weight is not None and weight.dim() != 1:
            return None
        number = self._num_targets(given["x"])
        if weight is not None:
            weight = weight[: lists.num_places(number)]
        if source.dim() == 2:
            return _reduced(lists, source, number, reduction, weight)
        rows = source.movedim(conv.node_dim, 0)
        out = _reduced(lists, rows.flatten(1), number, reduction, weight).view(number, *rows.shape[1:])
        if conv.node_dim % source.dim():  # the layer continues with the number of rows that it passed in
            out = torch.cat([out, rows.new_zeros(rows.size(0) - number, *rows.shape[1:])])
        return out.movedim(0, conv.node_dim)

    def _edge_updater(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        lists, score = self._lists_of(edge_index, given), SCORES.get(type(self.conv).edge_update)
        if lists is None or score is None or not self._is_attention:
            return type(self.conv).edge_updater(self.conv, edge_index, size=size, **given)
        alpha = score(self, lists.to(self._device), given)
        return F.dropout(alpha, p=self.conv.dropout, training=self.conv.training)

    # --- attention: scores of edges [e, H], and weighted rows [n, H, C] -------------------------------------------

    def _weighted(self, lists: EdgeLists, given: dict[str, Any]) -> Tensor | None:
        rows, reduction = given["x"], self._reduction
        if reduction is None or not self._is_attention:
            return None
        return _reduced(lists, pair_of(rows)[0], self._num_targets(rows), reduction, given["alpha"])

    def _gat(self, lists: EdgeLists, given: dict[str, Any]) -> Tensor:
        source, target = given["alpha"]
        number = self._num_targets((source, target))
        scores = products.take_sources(lists, source, number)
        if target is not None:
            scores = scores + products.take_targets(lists, target, number)
        return products.softmax_by_target(lists, F.leaky_relu(scores, self.conv.negative_slope), number)

    def _gatv2(self, lists: EdgeLists, given: dict[str, Any]) -> Tensor:
        source, target = given["x"]
        conv, number = self.conv, self._num_targets(given["x"])
        scores = products.additive_scores(lists, target, source, conv.att.squeeze(0), conv.negative_slope, number)
        return products.softmax_by_target(lists, scores, number)

    def _transformer(self, lists: EdgeLists, given: dict[str, Any]) -> Tensor | None:
        reduction = self._reduction
        if reduction is None or not self._is_attention:
            return None
        conv, query, key, value = self.conv, given["query"], given["key"], given["value"]
        number = query.size(0)
        scores = products.dot_edges(lists, query, key, number) / math.sqrt(conv.out_channels)
        alpha = products.softmax_by_target(lists, scores, number)
        conv._alpha = alpha
        alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
        return _reduced(lists, value, number, reduction, alpha)


def _reduced(lists: EdgeLists, rows: Tensor, number: int, reduction: str, weight: Tensor | None) -> Tensor:
    """Reduces rows of sources by target. Extremes of weighted rows have no kernel and store a row per edge."""
    if weight is None or reduction in ("sum", "mean"):
        return products.reduce_sources(lists, rows, number, reduction, weight)
    values = products.take_sources(lists, rows, number) * weight.unsqueeze(-1)
    return products.reduce_edges(lists, values, number, reduction)


def _with_repeated_loops(lists: EdgeLists, own: Tensor, weight: Tensor, edge_index: Tensor) -> Tensor:
    """Makes autograd give equal gradients to the weights of all self-loops of a vertex, as PyG does.

    PyG uses only the last loop's weight. ``own`` has the weights of the grouped edges; the result has the same values.
    """
    assert lists.edge is not None  # lists with self-loops number their edges
    loops = (edge_index[0] == edge_index[1]).nonzero().view(-1)
    vertices, loops = edge_index[1, loops].to(weight.device), loops.to(weight.device)
    place = lists.indptr[vertices + 1] - 1
    others = lists.edge[place] != loops
    more = weight[loops[others]]
    return own.index_add(0, place[others], more - more.detach())


def _symmetric(
    lists: EdgeLists, weight: Tensor | None, fill: float, dtype: torch.dtype | None, edge_index: Tensor
) -> Tensor:
    """Returns GCN's edge weights, weight / sqrt(degree of source * degree of target), [E] in the order of ``lists``."""
    number = lists.indptr.numel() - 1
    if weight is None:
        # Without weights, PyG ignores the fill value.
        own = torch.ones(lists.source.numel(), dtype=dtype, device=lists.indptr.device)
    elif lists.edge is None:
        own = weight
    else:
        edge = torch.where(lists.edge >= 0, lists.edge, weight.numel())
        own = torch.cat([weight, weight.new_full((1,), fill)])[edge]
        if weight.requires_grad:
            own = _with_repeated_loops(lists, own, weight, edge_index)
    root = products.reduce_edges(lists, own, number, "sum").pow(-0.5)
    root = root.masked_fill(root == float("inf"), 0)
    return products.take_sources(lists, root, number) * own * products.take_targets(lists, root, number)


#: ``edge_update`` of an attention layer -> its scores of edges, from the arguments of ``edge_updater``.
SCORES: Mapping[Any, Callable[[LayerCall, EdgeLists, dict[str, Any]], Tensor]] = {
    pyg.GATConv.edge_update: LayerCall._gat,
    pyg.GATv2Conv.edge_update: LayerCall._gatv2,
}
#: ``message`` of an attention layer -> its weighted sums, from the arguments of ``propagate``.
FUSED: Mapping[Any, Callable[[LayerCall, EdgeLists, dict[str, Any]], Tensor | None]] = {
    pyg.GATConv.message: LayerCall._weighted,
    pyg.GATv2Conv.message: LayerCall._weighted,
    pyg.TransformerConv.message: LayerCall._transformer,
}
