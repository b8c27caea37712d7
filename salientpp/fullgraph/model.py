"""Wraps a PyG model so that several ranks compute what it computes on the whole graph. Its layers exchange rows."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn.conv import APPNP, MessagePassing
from torch_geometric.nn.norm import BatchNorm

from salientpp.fullgraph.agreement import facts_of
from salientpp.fullgraph.edge_trials import EdgeTrials
from salientpp.fullgraph.exchange import Flight, Ranks, width_of
from salientpp.fullgraph.layers import refusals
from salientpp.fullgraph.layouts import DistAdjacency, Layout, check_plan
from salientpp.fullgraph.normalise import Helpers, batch_norm
from salientpp.fullgraph.outputs import mapped_output, output_tensors
from salientpp.fullgraph.parameters import Substituted, check_gradients
from salientpp.fullgraph.pieces import EdgeCall
from salientpp.fullgraph.rank_graph import Hop, RankGraph
from salientpp.fullgraph.recompute import Recompute, refuse_checkpoint_of_model
from salientpp.fullgraph.row_check import RowCheck, checked_hooks
from salientpp.fullgraph.row_counts import without_counts
from salientpp.fullgraph.watch import watch_backward
from salientpp.graph.quantiles import corrected
from salientpp.nn.layers import (
    Replaced,
    linear_form,
    name_of,
    pair_of,
    product_of,
    source_names,
    uncached,
    with_helpers,
)
from salientpp.nn.trim import trimming_of
from salientpp.ranks.facts import check_same


class DistributedModel(torch.nn.Module):
    """Model over several ranks, made by :func:`salientpp.distribute`. It has ``module``'s parameters and state.

    Args:
        graph: this rank's part, with or without a plan.
        layout: name of a layout, see :mod:`salientpp.fullgraph.layouts`; 'halo' for a part with a plan.
        asked: what the user gave as layout, or the name of a plan; the ranks check that all gave the same. None: ``layout``.
            If a plan has chosen ``layout``, a layer whose edges or weights change at each step fetches the halo.
        recompute: decides what is kept for the backward; None: everything.
        error: a mistake that this rank has found in other arguments. It is raised here, after the other ranks were told.

    Attributes:
        module, graph: the model, and this rank's part.
        layout: the layout in use.
        rows: object that checks that the module computes the row of each vertex separately between its layers.
        seen: three facts for each hop of the last call. The first is the number of words (elements) of a row that travels. The second is True if a gradient
            of the row travels back. The third is True if the layer was a product with a constant matrix.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        graph: RankGraph,
        layout: str = "halo",
        asked: str | None = None,
        recompute: Recompute | None = None,
        error: Exception | None = None,
    ) -> None:
        super().__init__()
        self._recompute = recompute or Recompute()
        try:
            _agree(module, graph, layout, asked or layout, self._recompute, error)
        finally:
            error = None  # otherwise this frame and the traceback would reference each other
        graph.job.agreement.models += 1
        self._number = graph.job.agreement.models
        self.layout = layout
        self._is_chosen = asked not in (None, layout)
        self.module = module
        self.graph: Any = graph  # a LocalGraph; graphs of other types support layers, but neither plans nor layouts
        self._helpers = Helpers(graph)
        self.rows = RowCheck(module)
        self._edge_trials = EdgeTrials()
        self._hop, self._sums_edges_first = 0, False
        self.seen: list[tuple[int, bool, bool]] = []

    @property
    def ranks(self) -> Ranks:
        """The ranks that exchange rows of vertices."""
        return self.graph.ranks

    @property
    def job(self) -> Ranks:
        """The ranks that train the model together."""
        return self.graph.job

    # --- a step ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes the model for this rank's vertices.

        Args:
            x: [n, ...], rows of this rank's vertices.
            args, kwargs: the model's other arguments. Tensors with a row for each edge have them in the order of
                ``graph.edge_index``. With a plan from ``plan_for``, the caller may still pass ``edge_index`` and edge
                attributes of the part that was given to ``plan_for``. The model uses those of the planned part instead.
        """
        with self.job.reporting("the model's forward"):
            refuse_checkpoint_of_model()
            for refusal in refusals(self.module):  # some refusals depend on the mode
                raise ValueError(f"this model cannot be trained over ranks: {refusal}")
            x, args, kwargs = self._placed(x, args, kwargs)
            given = _rows_of_inner(x, self.graph)
            trained = [value for value in self.module.parameters() if value.requires_grad]
            stand_ins = {id(value): stand_in for value, stand_in in zip(trained, self.job.replicated(trained))}
            facts = facts_of(self.module, self._number, x)
            self._hop, self.seen = 0, []
            storing = self._recompute.storing(given, self.graph.num_inner)
            with self.job.calling(facts, self.ranks, self._own_facts()), storing:
                args = tuple(map(self.graph.in_plan, args))
                kwargs = {key: self.graph.in_plan(each) for key, each in kwargs.items()}
                with self.rows.calling(given, (args, kwargs), self.graph):
                    with self._substituting(stand_ins):
                        out = self._run(given, args, kwargs)
                    self.rows.check_functions(check_gradients(out, self.module, stand_ins))
            out = self._returned(out)
            watch_backward(output_tensors(out), self.job)
            return out

    def _placed(
        self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Sets :attr:`graph` for a call, and returns the arguments to use. In this class, one graph serves all calls; subclasses override it."""
        return x, args, kwargs

    def _own_facts(self) -> dict[str, str]:
        """Describes a call by facts (name -> text), which the ranks that exchange rows in it compare."""
        return {}

    def _run(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module, whose layers exchange rows."""
        return self.module(x, *args, **kwargs)

    def _returned(self, out: Any) -> Any:
        """Returns the module's output without the rows of vertices that other ranks own."""
        return mapped_output(out, self.graph.own_rows) if self.graph.is_planned else out

    @contextlib.contextmanager
    def _substituting(self, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
        """Makes the module use stand-ins instead of parameters, and its layers exchange rows, inside the context."""
        with Replaced(self._replacements(stand_ins)), Substituted(stand_ins):
            yield

    def _replacements(self, stand_ins: Mapping[int, Tensor]) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yields what a call replaces, as (attributes of a module, name, value): parameters, and methods of layers."""
        helpers = {name: self.rows.unfollowed(function) for name, function in self._helpers.by_name().items()}
        for module in self.module.modules():
            own = module.__dict__
            # torch.func.functional_call does the same, but loses a parameter of a module that occurs in two places.
            for name, value in module._parameters.items():
                if id(value) in stand_ins:
                    yield module._parameters, name, stand_ins[id(value)]
            yield from checked_hooks(self.rows, own)
            if isinstance(module, MessagePassing):
                yield own, "propagate", functools.partial(self._call, module, module.propagate, False)
                yield own, "edge_updater", functools.partial(self._call, module, module.edge_updater, True)
                methods = with_helpers(module, helpers)
                for name, method in methods.items():
                    yield own, name, method
                forward = methods.get("forward", module.forward)
                if self._recompute.kind is not None:
                    forward = functools.partial(self._call_layer, module, forward, stand_ins)
                if trimming_of(self.module) is None:  # trimming needs the class's own method
                    yield own, "forward", functools.partial(_call_followed, self.rows, forward)
                yield from uncached(own)
            elif isinstance(module, _BatchNorm):
                yield own, "forward", functools.partial(self._batch_norm, module)
            elif isinstance(module, BatchNorm) and module.allow_single_element:
                yield own, "allow_single_element", self.graph.num_vertices <= 1  # PyG asks for this rank's rows only
            elif (forward := corrected(module)) is not None:
                yield own, "forward", forward

    # --- a layer --------------------------------------------------------------------------------------------

    def _call_layer(
        self,
        conv: MessagePassing,
        forward: Callable[..., Any],
        stand_ins: Mapping[int, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a layer for ``recompute='layers'``: keeps only its inputs, and the backward calls it again."""
        self._recompute.refuse_checkpoint(conv, self.module)
        again = functools.partial(self._again, stand_ins, self.graph, self._hop)
        return self._recompute.layer(conv, forward, stand_ins, self._substituting, again, args, kwargs)

    @contextlib.contextmanager
    def _again(self, stand_ins: Mapping[int, Tensor], graph: RankGraph, hop: int) -> Iterator[None]:
        """Restores, inside the context, the forward's state for a layer that the backward calls again: ``graph``, and ``hop`` hops before it."""
        own, place = vars(self), (vars(graph.ranks.agreement), "place", "")
        state = [(own, "graph", graph), (own, "_hop", hop), (own, "seen", []), place]
        with Replaced(state), self._substituting(stand_ins):
            yield

    def _batch_norm(self, norm: _BatchNorm, rows: Tensor) -> Tensor:
        self._recompute.refuse_checkpoint(norm, self.module)
        if self._edge_trials.is_running:
            return rows  # over all ranks, it does not depend on which rows a rank has
        with self.rows.paused():
            out = batch_norm(norm, rows, self.graph, self._recompute.is_again)
        self.rows.follow(out)
        return out

    def _call(
        self,
        conv: MessagePassing,
        original: Callable[..., Any],
        is_edge_level: bool,
        edge_index: Any,
        size: Any = None,
        **given: Any,
    ) -> Any:
        """Computes a layer's ``propagate`` or ``edge_updater`` over the ranks."""
        if self._edge_trials.is_running:
            raise RuntimeError(
                f"{type(conv).__name__} is a layer inside another layer, which the trial of the outer layer does not support"
            )
        self._recompute.refuse_checkpoint(conv, self.module)
        graph, given = self.graph, without_counts(given)
        graph.ranks.agreement.place = f"layer {self._hop + 1}, {type(conv).__name__}"  # errors of exchanges name it
        self._sums_edges_first |= graph.is_planned and not self._hop and self.rows.sums_edges
        with self.rows.paused():
            out = None if is_edge_level or self._lacks_kept_rows else self._product(conv, edge_index, given)
            if out is None:
                given = self._extended(conv, is_edge_level, given)
                call = EdgeCall(conv, original, is_edge_level, edge_index, (graph.num_rows, graph.num_targets), given)
                if graph.averaging.size > 1 and not self._recompute.is_again:
                    self._edge_trials.check(self.module, call)
                out = self._recompute.over_edges(call)
        if not is_edge_level:
            self.rows.follow(out, conv.node_dim)
        self._hop += not is_edge_level
        return out

    @property
    def _hop_now(self) -> Hop:
        return self.graph.hops[min(self._hop, len(self.graph.hops) - 1)]

    @property
    def _lacks_kept_rows(self) -> bool:
        """True if the rows of vertices that a plan only caches may be wrong, because the model has summed over edges before its first layer.

        This rank lacks the edges into these vertices.
        """
        return self._sums_edges_first and not self._hop

    def _extended(self, conv: MessagePassing, edge_level: bool, given: dict[str, Any]) -> dict[str, Any]:
        """Appends rows of the halo to those arguments of a layer that edges look up by source."""
        given, names = dict(given), source_names(conv, edge_level)
        pairs = {name: pair_of(given[name]) for name in names if given.get(name) is not None}
        sources = {name: pair[0] for name, pair in pairs.items() if isinstance(pair[0], Tensor)}
        rows = {name: source.movedim(conv.node_dim, 0) for name, source in sources.items()}
        tables = self._with_halo(list(rows.values()))
        for name, table in zip(rows, tables, strict=True):
            given[name] = (table.movedim(0, conv.node_dim), pairs[name][1])
        for name, value in given.items():
            if name not in names and isinstance(value, (tuple, list)) and len(value) == 2:
                given[name] = (None, value[1])  # looked up by targets only, so the sources' rows need not be fetched
        return given

    def _with_halo(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Extends each table [num_inner, ...] by the rows of the halo, to [num_rows, ...]."""
        # If a plan has sums for a product at this hop, its rows do not suffice here.
        fetches_all = self._hop_now.has_sums or self._lacks_kept_rows
        hop = self.graph.whole_halo if fetches_all else self._hop_now
        distinct = {id(table): table for table in tables}.values()
        self._see(distinct, False)
        arrived = _arrived([*distinct], hop, self.ranks)
        found = {id(table): self.graph.with_halo(table, hop, rows) for table, rows in zip(distinct, arrived)}
        return [found[id(table)] for table in tables]

    def _see(self, tables: Collection[Tensor], is_product: bool) -> None:
        """Records in :attr:`seen` that rows of these tables travel at this hop. Raises ValueError if a table lacks rows."""
        for table in tables:
            if table.size(0) != self.graph.num_inner:
                raise ValueError(
                    f"{self.graph.ranks.agreement.place} must pass on one row for each of the {self.graph.num_inner} vertices here (under a plan, only x has a "
                    f"row for each of them), got shape {list(table.shape)}"
                )
        before, back, product = self.seen.pop() if len(self.seen) > self._hop else (0, False, True)
        back |= any(table.requires_grad for table in tables)
        self.seen.append((before + sum(map(width_of, tables)), back, product and is_product))

    def _product(self, conv: MessagePassing, edge_index: Any, given: dict[str, Any]) -> Tensor | None:
        """Computes a layer's aggregation as a product with a constant sparse matrix. None if it is no such product."""
        terms, is_halo = product_of(_form(conv), given), self.layout == "halo"
        if terms is None or not isinstance(edge_index, Tensor) or (is_halo and terms[2] == "max"):
            return None
        source, weight, reduce = terms
        if not (self._helpers.is_static(edge_index) and self._helpers.is_static(weight)):
            if is_halo or self._is_chosen:
                return None  # then the rows of the halo are fetched, under any layout
            raise ValueError(
                f"layout={self.layout!r} needs constant edges and weights, but {type(conv).__name__} gets different ones at each step; pass "
                "graph.edge_index and an attribute of the graph's edges, or use layout='halo'"
            )
        rows = source.movedim(conv.node_dim, 0)
        self._see([rows], True)
        hop = self._hop_now
        part = functools.partial(DistAdjacency, self.graph, self.layout, edge_index=edge_index, weight=weight)
        make = functools.partial(part, reduce=reduce, dtype=rows.dtype, hop=hop.level)
        operand = self._helpers.kept.of([edge_index, weight], ("product", reduce, rows.dtype, hop.level), make)
        out = operand.spmm(rows.flatten(1))
        return out.view(out.size(0), *rows.shape[1:]).movedim(0, conv.node_dim)

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of :attr:`module`, which a model in one process can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state, which any number of ranks may have saved. Every rank must call this method."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # torch calls this if the model is inside another module. `state_dict` names the tensors without "module.".
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModel:
        """Copies the model with its own parameters, for the same part and over the same connections. Not collective."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self.graph)] = self.graph
        memo[id(self._helpers)] = Helpers(self.graph)
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied


def _call_followed(rows: RowCheck, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer, and tells the check of rows which rows its results have."""
    out = forward(*args, **kwargs)
    rows.follow_layer(out)
    return out


def _agree(
    module: torch.nn.Module,
    graph: RankGraph,
    layout: str,
    asked: str,
    recompute: Recompute,
    error: Exception | None,
) -> None:
    """Checks that the model can be distributed and is equal on all ranks. Then gives all ranks rank 0's values."""
    comm = graph.job.comm
    try:
        graph.job.agree("distribute")
        with comm.together("distribute its model") as facts:
            if error is not None:
                raise error
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
            arguments = {"layout": repr(asked), **recompute.prepare()}
            _check(module, graph, layout)
            tensors = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in _tensors(module).items()}
            facts.mine = {"model": tensors, **arguments}
    finally:
        error = None  # otherwise this frame and the traceback would reference each other
    check_same(facts.everyone, comm.of, by_entry="model")
    with torch.no_grad():
        for tensor in _tensors(module).values():
            _from_rank_0(tensor, graph.job)


def _check(module: torch.nn.Module, graph: Any, layout: str) -> None:
    if found := [*refusals(module)]:
        raise ValueError(f"this model cannot be trained over ranks: {'; '.join(found)}")
    if layout == "halo":
        return
    kind = Layout.of(layout, graph.ranks.size).kind
    for path, reduce in reductions_of(module).items():
        if reduce is None:
            raise ValueError(
                f"layout={layout!r} multiplies rows by a constant matrix, but {path} does more with its in-neighbours' rows; use layout='halo'"
            )
        if reduce == "max" and kind in ("summa", "cover"):
            raise ValueError(
                f"layout={layout!r} adds up products, but {path} takes the maximum; use '1d', '1.5d', 'grid:RxC' or 'halo'"
            )
    check_plan(graph, layout)


def _rows_of_inner(x: Tensor, graph: Any) -> Tensor:
    """Returns ``x`` (this rank's rows), then the rows of vertices that a plan keeps here. Collective under a plan."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.size(0) != graph.num_own:
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"the model's first argument must have a row for each of this rank's {graph.num_own} vertices (graph.x), got {shape}"
        )
    return graph.rows_of_inner(x) if graph.is_planned else x


def _arrived(tables: Sequence[Tensor], hop: Hop, ranks: Ranks) -> list[Tensor]:
    """Fetches a hop's rows of each table [n, ...]. Tables alike in dtype and gradient share an exchange. Collective."""
    alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for table in tables:
        alike.setdefault((table.dtype, table.requires_grad), []).append(table)
    flights: list[Flight] = []
    for group in alike.values():
        flat = [table.reshape(table.size(0), width_of(table)) for table in group]
        flights.append(Flight(ranks, group[0] if len(group) == 1 else torch.cat(flat, 1), hop.route))
    found: dict[int, Tensor] = {}
    for group, flight in zip(alike.values(), flights, strict=True):
        widths = [width_of(table) for table in group]
        rows = flight.rows().view(hop.route.num_received, sum(widths))
        for table, piece in zip(group, rows.split(widths, 1), strict=True):
            found[id(table)] = piece.reshape(piece.size(0), *table.shape[1:])
    return [found[id(table)] for table in tables]


def _form(conv: MessagePassing) -> tuple[str | None, str] | None:
    """Returns the layer's aggregation as a product (:func:`linear_form`). None if no layout can compute it, as for a minimum."""
    form = linear_form(conv)
    return None if form is None or form[1] == "min" else form


def reductions_of(module: torch.nn.Module) -> dict[str, str | None]:
    """Returns, for each layer (class and path), the reduction of its matrix product; None if it is no such product."""
    found: dict[str, str | None] = {}
    for path, conv in module.named_modules():
        if isinstance(conv, MessagePassing):
            form = _form(conv)
            draws = isinstance(conv, APPNP) and conv.dropout > 0  # its weights differ at each step
            found[name_of(conv, path)] = None if form is None or draws else form[1]
    return found


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _from_rank_0(tensor: Tensor, ranks: Ranks) -> None:
    """Overwrites a tensor with rank 0's values, in place."""
    if ranks.size == 1 or not tensor.numel():
        return
    rows = tensor.reshape(-1) if ranks.rank == 0 else tensor.new_empty(0)
    from_0 = [tensor.numel(), *[0] * (ranks.size - 1)]
    pending = ranks.begin(rows.repeat(ranks.size), [rows.numel()] * ranks.size, from_0, "model")
    tensor.copy_(ranks.arrived(pending).view(tensor.shape))
