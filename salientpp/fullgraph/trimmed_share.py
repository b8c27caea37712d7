"""Trims models that the ranks of a host compute together: a layer computes and exchanges only rows that the batch's seeds need.

:mod:`salientpp.nn.trim` finds the hops that each layer needs. A rank's share is the part of the batch that it computes. The share is ordered by hops. So the
vertices and edges within some hops are its first ones, and the halo rows within them are the first ones from each rank. The model calls each layer on the
graph of the hops that the layer needs. This graph exchanges rows as the whole share does.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp.batch.edges import BatchEdges
from salientpp.fullgraph.batch_graph import BatchGraph
from salientpp.fullgraph.model import DistributedModel
from salientpp.nn.layer_call import FUSED, SCORES, LayerCall, first_rows
from salientpp.nn.layers import Replaced, pair_of, with_helpers
from salientpp.nn.planned import most
from salientpp.nn.record import record
from salientpp.nn.rehearsal import rehearsal
from salientpp.nn.run import TrimmedRun
from salientpp.nn.trace import Call, TrimPlan
from salientpp.nn.trim import MAX_PLANS, keys_of, trimming_of
from salientpp.sampling.edge_lists import EdgeLists
from salientpp.sampling.hops import Hops, Relation

#: Packages whose modules hold all parameters as attributes.
_KNOWN = ("torch.", "torch_geometric.")


@contextlib.contextmanager
def trimmed(
    model: DistributedModel, plans: dict[Any, TrimPlan | None], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Wraps a model's call on this rank's share of a batch, so that a trimmed module computes only needed rows.

    Collective among the ranks of the host. The first call of each mode, and the first with new numbers among the
    arguments, runs the model twice: once to find the plan, which ``plans`` keeps, and once trimmed.

    Raises:
        ValueError: the model was trimmed with norms="needed rows", or its layers differ between the ranks.
    """
    trimming, graph = trimming_of(model.module), cast(BatchGraph, model.graph)
    if trimming is None or graph.share.num_vertices == 0:
        yield
        return
    if trimming.norms != "all rows":
        raise ValueError(
            f"over the ranks of a host, salientpp.nn.trim supports norms='all rows', got {trimming.norms!r}; pass norms='all rows'"
        )
    hops = cast(BatchEdges, graph.edge_index).hops
    key = _key(model, (x, *args), kwargs)
    if key not in plans and len(plans) >= MAX_PLANS:
        warnings.warn(
            f"{type(model.module).__name__} was called with more than {MAX_PLANS} combinations of modes and of numbers among its arguments; for further ones "
            "it runs untrimmed; results are right; to keep it trimmed, pass no numbers that differ from batch to batch",
            RuntimeWarning,
            stacklevel=2,
        )
        yield
        return
    if key not in plans:
        plans[key] = _agreed_plan(model, hops, (x, *args), kwargs)
    plan = plans[key]
    if plan is None:
        yield
        return
    # Layers compute different numbers of rows here, so rows are followed in the call that finds the plan only.
    with model.rows.paused(), ShareRun(model, plan, hops):
        yield


def _key(model: DistributedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the key by which ``plans`` holds a call's plan, equal on all ranks of a host. It has a digest of each rank's numeric arguments."""
    key, numbers = keys_of(model.module, args, kwargs)
    if not numbers:
        return key
    digest = hashlib.blake2b(numbers.encode(), digest_size=8).digest()
    told = model.ranks.gather_numbers("to trim a model: its numbers", [int.from_bytes(digest, "little", signed=True)])
    return key, tuple(number for (number,) in told)


def _agreed_plan(model: DistributedModel, hops: Hops, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrimPlan | None:
    """Records a call's plan on each rank of the host.

    Returns one plan for all, in which a layer has the most hops that any rank found for it. None: the model compares
    numbers of rows, so a rank must not compute fewer rows.
    """
    graph, ranks = cast(BatchGraph, model.graph), model.ranks

    def follow(_: Any, __: Any, out: Any) -> None:
        with torch._C.DisableTorchFunction():  # its questions about sizes are none of the model's
            model.rows.follow_layer(out)

    with rehearsal(model.module, args, kwargs) as effects:  # whose end removes the hooks
        for layer in model.module.modules():
            if isinstance(layer, MessagePassing):
                layer.register_forward_hook(follow)
        plan = record(model.module, hops, False, sys._getframe(), effects.args, effects.kwargs).plan
    model._hop = 0
    ranks.agree("to trim a model")
    # A rank without vertices has a row that is none of the batch's. It cannot tell which rows are needed.
    mine = [vars(call) for call in plan] if graph.share.num_own else None
    everyone = ranks.comm.gather_facts({"plan": mine, "compares": model.rows.compares}, task="trim its model")
    if any(facts["compares"] for facts in everyone):
        warnings.warn(
            f"{type(model.module).__name__} compares numbers of rows (size(0)), which trimming changes; it runs untrimmed; results are right; to trim it, "
            "leave the comparison out",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    found = [facts["plan"] for facts in everyone]
    plans = [[Call(**call) for call in each] for each in found if each is not None]
    for each in plans:
        if [call.layer for call in each] != [call.layer for call in plans[0]]:
            raise ValueError(
                "a trimmed model must call the same layers in the same order on all ranks of a host; do not use salientpp.nn.trim on this model"
            )
    return [most(calls) for calls in zip(*plans, strict=True)]


class ShareRun(TrimmedRun):
    def __init__(self, model: DistributedModel, plan: TrimPlan, hops: Hops) -> None:
        super().__init__(model.module, plan, hops, sys._getframe())
        self._distributed = model
        self._graph = cast(BatchGraph, model.graph)
        self._numbers = {max(1, number) for number in self._graph.share.own}
        self._numbers_but_1 = self._numbers - {1}

    def _layer(self, conv: MessagePassing, call: Call, arguments: dict[str, Any]) -> LayerCall:
        return ShareCall(conv, call, arguments, self._distributed, self._graph)


class _ShareHops(Hops):
    """Tells a layer's call how many rows and edges of this rank's share of the batch lie within a number of hops."""

    def __init__(self, graph: BatchGraph) -> None:
        self.graph = graph
        self.num_edges = {None: [graph.num_edges]}
        self.asked = set()

    def nodes_within(self, type_: str | None, hops: int) -> int:
        return self.graph.own_within(hops)

    def edges_into(self, relation: Relation, hops: int) -> int:
        return self.graph.edges_within(max(0, hops))


class ShareCall(LayerCall):
    """Runs one call of a layer on the needed rows of this rank's share of a batch."""

    def __init__(
        self, conv: MessagePassing, call: Call, arguments: dict[str, Any], model: DistributedModel, whole: BatchGraph
    ) -> None:
        self._model = model
        self.graph = whole.within_hops(max(1, call.in_hops))
        super().__init__(conv, call, arguments, _ShareHops(whole))
        # A module of the user's may hold parameters in lists, whose stand-ins only torch functions get.
        self.is_aligned &= all(type(each).__module__.startswith(_KNOWN) for each in conv.modules())

    def _edges(self, given: BatchEdges, number: int) -> Tensor:
        return self.graph.edge_index

    def run(self, forward: Callable[..., Any]) -> Any:
        conv, graph, model = self.conv, self.graph, self._model
        is_paired = any(isinstance(value, tuple) for value in self.arguments.values())
        graph.edge_weight = self._whole.get("edge_weight")
        helpers = graph.helpers.by_name()
        inside = [module for module in conv.modules() if isinstance(module, MessagePassing)]
        placed: list[tuple[dict[str, Any], str, Any]] = []
        placed += [(vars(each), *item) for each in inside for item in with_helpers(each, helpers).items()]
        if is_paired and self._is_attention and type(conv).message in FUSED:
            placed += [(vars(conv), "propagate", self._weighted_rows), (vars(conv), "edge_updater", self._scores)]
        placed += [(vars(model), "graph", graph), (vars(graph), "targets", self.num_targets if is_paired else None)]
        with Replaced(placed):
            return first_rows((with_helpers(conv, helpers).get("forward") or forward)(**self.arguments), self.num_out)

    def _scores(self, edge_index: Any, size: Any = None, **given: Any) -> Tensor:
        """Computes an attention layer's ``edge_updater``: the weights of the edges, in the order of :meth:`_listed`."""
        conv = self.conv
        given = self._extended(True, given)
        alpha = SCORES[type(conv).edge_update](self, self._listed(edge_index), given)
        return F.dropout(alpha, p=conv.dropout, training=conv.training)

    def _weighted_rows(self, edge_index: Any, size: Any = None, **given: Any) -> Tensor | None:
        """Computes an attention layer's ``propagate``: each target's weighted sum of its sources' rows."""
        conv = self.conv
        given = self._extended(False, given)
        if "query" in given:
            given |= {name: pair_of(given[name])[0] for name in ("query", "key", "value")}
        return FUSED[type(conv).message](self, self._listed(edge_index), given)

    def _extended(self, is_edge_level: bool, given: dict[str, Any]) -> dict[str, Any]:
        self.graph.ranks.agreement.place = (
            f"{type(self.conv).__name__} ({self.call.layer})"  # errors of exchanges name it
        )
        return self._model._extended(self.conv, is_edge_level, given)

    def _listed(self, edge_index: Tensor) -> EdgeLists:
        graph = self.graph
        return graph.helpers.kept.of([edge_index], "lists", lambda: graph.lists_of(edge_index))[0]
