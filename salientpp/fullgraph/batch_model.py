"""Model for a loader with ``cooperate="host"``: the ranks of a host compute each batch together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

from salientpp.batch.edges import BatchEdges, mark
from salientpp.containers import mapped
from salientpp.fullgraph.batch_graph import BatchGraph
from salientpp.fullgraph.exchange import Ranks
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.normalise import Helpers
from salientpp.fullgraph.outputs import mapped_output
from salientpp.fullgraph.recompute import Recompute
from salientpp.fullgraph.trimmed_share import trimmed
from salientpp.nn.layers import linear_form, pair_of, product_of, source_names
from salientpp.nn.products import reduce_sources
from salientpp.nn.trace import TrimPlan
from salientpp.ranks.cooperation import Cooperation
from salientpp.sampling.host_share import HostShare


class BatchModel(DistributedModel):
    """Model that the ranks of a host compute together, one batch after the other.

    :func:`salientpp.distribute` makes it. Every call belongs to the batch whose ``edge_index`` it gets. Rows travel
    between the ranks of a host. Losses and gradients of parameters are summed over all ranks.
    """

    graph: BatchGraph

    def __init__(
        self, module: torch.nn.Module, job: Ranks, host: Ranks, recompute: Recompute, error: Exception | None
    ) -> None:
        super().__init__(module, _empty(job, host), recompute=recompute, error=error)
        self._plans: dict[Any, TrimPlan | None] = {}  # of a trimmed model

    def _run(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with trimmed(self, self._plans, x, args, kwargs):
            return super()._run(x, args, kwargs)

    def _own_facts(self) -> dict[str, str]:
        return {"the batch": str(self.graph.share.whole)}

    @property
    def _helpers(self) -> Helpers:
        return self.graph.helpers

    @_helpers.setter
    def _helpers(self, _: Helpers) -> None:
        """Ignores the base class's replacements of PyG's functions, such as ``gcn_norm``. Each batch's graph has its own, because degrees differ."""

    def _placed(
        self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        edges = _edges_of([args, kwargs])
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x, args, kwargs  # the caller refuses it
        if edges is None:
            raise ValueError(
                "a model that was distributed over a loader needs the edges of one batch of a loader with cooperate='host', and found none in its arguments; "
                "pass batch.edge_index as the loader returned it, or call model.module on other graphs"
            )
        share = edges.hops.share
        assert share is not None  # _edges_of finds only edges of shares
        if len(share.sent) != self.ranks.size:
            raise ValueError(
                f"the batch belongs to a loader whose hosts have {len(share.sent)} ranks, but the model was distributed over hosts with {self.ranks.size} "
                "ranks; distribute a model over this loader too"
            )
        given: Tensor | None = edges
        if share.num_own == 0:
            x, args, kwargs = _with_row([x, args, kwargs])
            given = _edges_of([args, kwargs])
        assert given is not None  # marked again
        for ranks in (self.job, self.ranks):
            ranks.device = x.device
        self.graph = BatchGraph(self.ranks, self.job, share, given)
        return x, args, kwargs

    def _extended(self, conv: MessagePassing, edge_level: bool, given: dict[str, Any]) -> dict[str, Any]:
        """Appends halo rows as the base class does, and cuts tables of targets to the rows that the layer computes."""
        number = self.graph.num_targets
        given = super()._extended(conv, edge_level, given)
        for name in source_names(conv, edge_level):
            source, target = pair_of(given.get(name))
            if isinstance(target, Tensor) and target.size(conv.node_dim) > number:
                given[name] = source, target.narrow(conv.node_dim, 0, number)
        return given

    def _product(self, conv: MessagePassing, edge_index: Any, given: dict[str, Any]) -> Tensor | None:
        terms = product_of(linear_form(conv), given)
        if terms is None or not isinstance(edge_index, Tensor):
            return None
        source, weight, reduce = terms
        if weight is not None and (weight.dim() != 1 or reduce in ("max", "min")):
            return None
        rows = source.movedim(conv.node_dim, 0)
        number = self.graph.num_targets
        lists, order = self._helpers.kept.of([edge_index], "lists", lambda: self.graph.lists_of(edge_index))
        if weight is not None and order is not None:
            weight = weight[order]
        (table,) = self._with_halo([rows])
        out = reduce_sources(
            lists, table.flatten(1), number, reduce, weight if weight is None else weight[: lists.num_places(number)]
        )
        return out.view(number, *rows.shape[1:]).movedim(0, conv.node_dim)

    def _returned(self, out: Any) -> Any:
        has_vertices = self.graph.share.num_own > 0
        self.graph = _empty(self.job, self.ranks)  # frees the batch
        return out if has_vertices else mapped_output(out, lambda rows: rows[:0] if rows.dim() else rows)


def of_loader(
    module: torch.nn.Module, cooperation: Cooperation, recompute: Recompute, error: Exception | None
) -> BatchModel:
    """Distributes a model over the ranks of a loader. All models of one loader share connections. Collective.

    ``error``: a mistake that this rank has found in the user's arguments. Every rank then raises an error.
    """
    if cooperation not in _connections:
        job = Ranks(cooperation.comm.among(range(cooperation.comm.size), between_devices=True))
        _connections[cooperation] = job, job.among(cooperation.ranks_of_host)
    return BatchModel(module, *_connections[cooperation], recompute, error)


#: Ranks of the job and of the host, by the loader's cooperation. They have their own connections, because the loader's threads use its at any time.
_connections: weakref.WeakKeyDictionary[Cooperation, tuple[Ranks, Ranks]] = weakref.WeakKeyDictionary()


def _empty(job: Ranks, host: Ranks) -> BatchGraph:
    """Returns a graph without vertices, for a model that has not seen a batch yet."""
    none = ((0,),) * host.size
    ids = torch.empty(0, dtype=torch.int64, device="cpu")
    return BatchGraph(host, job, HostShare(0, (0,), (0,), ids, none, none), ids.view(2, 0))


def _edges_of(value: Any) -> BatchEdges | None:
    """Finds ``batch.edge_index`` in a call's arguments, also in containers and in ``Data``. Returns None if it is missing."""
    if isinstance(value, BatchEdges):
        return value if value.is_given and value.hops.share is not None else None
    return next((edges for edges in map(_edges_of, _items(value)) if edges is not None), None)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return [each for store in value.stores for each in store.values()] if isinstance(value, Data) else ()


def _with_row(value: Any) -> Any:
    """Adds a row to each empty tensor in the arguments, for a rank without vertices. Edges become one self-loop."""
    if isinstance(value, BatchEdges):
        return mark(torch.zeros((2, 1), dtype=value.dtype, device=value.device), value.hops, value.relation)
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.size(0):
            return value
        fill = 1 if value.is_floating_point() else 0  # 0 is a class or a type that exists
        return torch.cat([value, value.new_full((1, *value.shape[1:]), fill)])
    if isinstance(value, Data):
        value = copy.copy(value)
        for store in value.stores:
            for name, each in [*store.items()]:
                store[name] = _with_row(each)
        return value
    if isinstance(value, Mapping):
        return {name: _with_row(each) for name, each in value.items()}
    return mapped(value, _with_row) if isinstance(value, (list, tuple)) else value
