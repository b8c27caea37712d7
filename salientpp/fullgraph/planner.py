"""Plans full-graph training: decides which rows a rank fetches, caches, recomputes or gets as sums.

:mod:`salientpp.fullgraph.problem` has the formulas of the costs and the minimum cut. This module times steps of the model to find the constants in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from salientpp.arguments import as_amount
from salientpp.containers import tensors_of
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.opening import local
from salientpp.fullgraph.preload import PreloadedGraph
from salientpp.fullgraph.problem import MOST_ARCS, Constants, Costs, Decision, Problem
from salientpp.fullgraph.trial import can_recompute, kernel_constants, step_times
from salientpp.nn.rehearsal import State
from salientpp.ranks.facts import check_same
from salientpp.store.directory.opened import PartitionedGraph

_KINDS = ("cut", "fetch", "cache", "recompute", "sum")
_UNIT = Constants(1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of one rank, for :func:`salientpp.distribute`: which rows of other ranks it fetches, caches, recomputes or gets as sums.

    Attributes:
        name: the argument ``kind`` of :func:`plan_for`, the same on all ranks.
        graph: the rank's part under this plan.
    """

    name: str
    graph: LocalGraph = field(repr=False)
    problem: Problem = field(repr=False)
    choice: Decision = field(repr=False)

    def summary(self) -> dict[str, float]:
        """Returns a forecast of this rank's training step under the plan.

        It gives the numbers of rows, sums and words that arrive, of cached and recomputed vertices, and of recomputed
        edges. It also gives the bytes of memory for kept vertices, and the seconds that the plan adds to a step.
        """
        return self.problem.forecast(self.choice)


def plan_for(
    model: torch.nn.Module,
    part: LocalGraph | PartitionedGraph,
    *arguments: Any,
    kind: str = "cut",
    memory: int | str | None = None,
    constants: Constants | None = None,
) -> Plan:
    """Finds the plan with the shortest step: rows of other ranks are fetched, cached, recomputed or summed. Collective.

    Args:
        model: the model to distribute. It is called in evaluation mode, to measure the widths of rows and the times of steps. All parameters are set to
            rank 0's values, as in :func:`salientpp.distribute`; otherwise they, their gradients, buffers and attributes stay as they are.
        part: this rank's part, without a plan.
        arguments: arguments of the model; none: ``(part.x, part.edge_index)``.
        kind: 'cut' takes the minimum cut. 'fetch', 'cache', 'recompute' and 'sum' take one option for all vertices.
        memory: bytes for vertices of other ranks that are kept on this rank, as an integer or as text such as "1GiB"; None: unlimited. All ranks give the same.
        constants: times of basic operations on the machines; None: they are measured, by steps of this model (:mod:`salientpp.fullgraph.trial`).

    Raises:
        ValueError: an argument is wrong.
    """
    graph = local(part) if isinstance(part, PartitionedGraph) else part
    if not isinstance(graph, LocalGraph):
        raise TypeError(f"part must come from salientpp.fullgraph.local or salientpp.load, got {type(part).__name__}")
    budget = _checked(graph, kind, memory, constants)
    arguments = arguments or (graph.x, graph.edge_index)
    base = DistributedModel(model, graph, asked="a plan")
    with _evaluating(model), graph.ranks.reporting("plan_for"):
        given = [*tensors_of([arguments, graph.node_rows, graph.edge_tensors])]
        before = [*map(_version, given)]
        base(*arguments)
        if [*map(_version, given)] != before:
            raise ValueError(
                "the model's forward writes to its arguments in place, so plan_for, which calls the model, has changed them; make the forward write to a "
                "copy (such as x.clone()), and open the part again"
            )
        widths, backward, products = ([*each] for each in zip(*base.seen)) if base.seen else ([1], [False], [False])
        itemsize = graph.x.element_size() if "x" in graph.node_rows else 4
        costs = Costs(widths, backward, products, constants or _UNIT, itemsize)
        if constants is None and graph.ranks.size > 1:
            costs = costs.timed(step_times(base, arguments), kernel_constants(graph))
        problem = _problem(graph, costs, can_recompute(graph, arguments) and kind in ("cut", "recompute"))
        return _planned(graph, problem, kind, problem.solve(budget) if kind == "cut" else problem.pure(kind))


def _version(tensor: torch.Tensor) -> int | None:
    """Returns a number that changes when the tensor is written to; None for tensors of inference mode, which have none."""
    return None if tensor.is_inference() else tensor._version


def _checked(graph: LocalGraph, kind: str, memory: int | str | None, constants: Constants | None) -> float:
    """Checks the arguments of :func:`plan_for` on all ranks. Returns ``memory`` in bytes. Collective."""
    comm = graph.job.comm
    graph.job.agree("plan_for")
    with comm.together("plan") as facts:
        facts.mine = {"kind": repr(kind), "memory": repr(memory), "constants": repr(constants)}
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}")
        amount = inf if memory is None else as_amount(memory)
        if amount is None or 0 < amount < 1:
            raise ValueError(f'memory must be a number of bytes, text such as "1GiB", or None, got {memory!r}')
        if constants is not None and not isinstance(constants, Constants):
            raise TypeError(f"constants must be a Constants or None, got {type(constants).__name__}")
        if isinstance(graph, PreloadedGraph):
            raise ValueError(
                "plan_for needs a part without preload, because a preloaded part has the rows of other hosts already; pass another layout to distribute, "
                "or open the part without preload"
            )
        if graph.is_planned:
            raise ValueError(
                "plan_for needs a part without a plan; pass the part that salientpp.fullgraph.local returned"
            )
    check_same(facts.everyone, comm.of, "call plan_for with")
    return float(amount)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode, with gradients. Restores the model and random states at the end of the context, because a forward may change both."""
    state = State(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    values = [(tensor, tensor.detach().clone(), _version(tensor)) for tensor in tensors]
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        state.restore()
        for tensor, value, version in values:
            is_dense = tensor.layout == torch.strided  # torch compares no others
            if not (torch.equal(tensor, value) if is_dense else _version(tensor) == version):
                # Only then, because a write would invalidate what autograd keeps for a backward of the user's.
                with torch.no_grad():  # not detach(), whose result has values of its own if the tensor is sparse
                    tensor.copy_(value)


def _problem(graph: LocalGraph, costs: Costs, may_recompute: bool) -> Problem:
    """Makes this rank's :class:`Problem` from the edges that lead here from other ranks, and the costs. Collective."""
    source, target = graph.edge_index.cpu()
    is_far = source >= graph.num_own
    edges = graph.global_ids[source[is_far]], target[is_far]
    # Candidates for recomputation may be all vertices of the graph. All ranks see the same number of edges.
    may_recompute &= graph.lists.num_edges * costs.num_hops <= MOST_ARCS
    return Problem.of(graph.offsets, graph.ranks.rank, edges, graph.others.into, costs, may_recompute)


def _planned(graph: LocalGraph, problem: Problem, name: str, choice: Decision) -> Plan:
    """Turns a choice into a plan, with this rank's part under the plan. Collective."""
    rows = [problem.candidates[each] for each in problem.fetched(choice)[: problem.num_levels]]
    is_kept = choice.depths >= 0
    planned = graph.planned(problem.candidates[is_kept], choice.depths[is_kept], rows)
    return Plan(name, planned, problem, choice)
