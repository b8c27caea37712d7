"""Plans of full-graph training: what each rank fetches, caches, recomputes or gets as sums, or a layout of the whole matrix; the fastest one is taken.

:mod:`salientpp.ways.planner.full_graph` has the costs and the minimum cut. Here the costs come from timed steps of the model, and so does the last decision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch

from salientpp.arguments import as_amount
from salientpp.fullgraph.layouts import Layout, words_of_product
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.measure import calibrate
from salientpp.fullgraph.model import DistributedModel, reductions_of
from salientpp.fullgraph.opening import local
from salientpp.fullgraph.preload import PreloadedGraph
from salientpp.fullgraph.trial import can_recompute, in_turns, step_times
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.planner.full_graph import MOST_ARCS, Choice, Constants, Costs, Problem

#: Candidates that take longer than this multiple of the fastest one are not timed again.
_SLOW = 1.5

#: Candidates that are not the cut are timed only if kept vertices take at most this multiple of the memory of the rank's own vertices and edges.
_MOST_MEMORY = 4

#: Layouts with blocks of the matrix that are timed, at most.
_MOST_LAYOUTS = 2

_KINDS = ("auto", "cut", "fetch", "cache", "recompute", "sum")
_UNIT = Constants(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of one rank, for :func:`salientpp.distribute`.

    Attributes:
        name: 'cut' for the minimum cut, the name of a layout, or one option for all vertices: 'fetch', 'cache', 'recompute', 'sum'. 'cache, sum' caches all
            rows that own vertices need, and takes the cheapest sums. All ranks have the same name.
        graph: the rank's part under this plan.
        layout: the layout to distribute over; 'halo' for plans of single vertices.
    """

    name: str
    graph: LocalGraph = field(repr=False)
    layout: str
    problem: Problem = field(repr=False)
    choice: Choice | None = field(default=None, repr=False)

    def summary(self) -> dict[str, float]:
        """Returns this rank's forecast of a step.

        It holds the numbers of rows, sums and words that arrive, of cached and of recomputed vertices, and of recomputed edges. It also holds the bytes
        of memory for kept vertices, and the seconds that the step takes because of the plan. For a layout it holds words and seconds only.
        """
        if self.choice is not None:
            return self.problem.forecast(self.choice)
        words, both, seconds = _traffic(self.graph, self.problem.costs, self.layout)[self.graph.ranks.rank]
        return {"words": words, "words with gradients": both, "seconds": seconds}


def plan_for(
    model: torch.nn.Module,
    part: LocalGraph | PartitionedGraph,
    *arguments: Any,
    kind: str = "auto",
    memory: int | str | None = None,
    constants: Constants | None = None,
) -> Plan:
    """Decides which rows of other ranks are fetched, cached, recomputed or replaced by sums, so that a step takes the least time. Collective.

    Args:
        model: the model to distribute. It is called in evaluation mode, to measure the widths of rows and the times of steps. All parameters are set to
            rank 0's values, as in :func:`salientpp.distribute`; otherwise they and their gradients stay as they are.
        part: this rank's part, without a plan.
        arguments: arguments of the model; none: ``(part.x, part.edge_index)``.
        kind: 'auto' times steps under the best candidates and takes the fastest. 'cut' takes the minimum cut without this comparison. 'fetch', 'cache',
            'recompute' and 'sum' take one option for all vertices.
        memory: bytes for vertices of other ranks that are kept on this rank, as an integer or as text such as "1GiB"; None: unlimited. All ranks give the same.
        constants: times of basic operations on the machines; None: they are measured, by steps of this model (:mod:`salientpp.fullgraph.trial`). With
            constants no step is timed, and 'auto' does the same as 'cut'.

    Raises:
        ValueError: an argument is wrong.
    """
    graph = local(part) if isinstance(part, PartitionedGraph) else part
    if not isinstance(graph, LocalGraph):
        raise TypeError(f"part must come from salientpp.fullgraph.local or salientpp.load, got {type(part).__name__}")
    budget = _checked(graph, kind, memory, constants)
    arguments = arguments or (graph.x, graph.edge_index)
    base = DistributedModel(model, graph, asked="a plan")
    with _evaluating(base), graph.ranks.reporting("plan_for"):
        base(*arguments)
        widths, backward, products = ([*each] for each in zip(*base.seen)) if base.seen else ([1], [False], [False])
        itemsize = graph.x.element_size() if "x" in graph.node_rows else 4
        costs = Costs(widths, backward, products, constants or _UNIT, itemsize)
        if constants is None and graph.ranks.size > 1:
            costs = costs.timed(step_times(base, arguments), calibrate(graph))
        problem = _problem(graph, costs, can_recompute(graph, arguments) and kind in ("auto", "cut", "recompute"))
        if kind not in ("auto", "cut"):
            return _planned(graph, problem, kind, problem.pure(kind))
        choice = problem.solve(budget)
        cut = _planned(graph, problem, "cut", choice)
        if constants is not None or kind == "cut" or graph.ranks.size == 1:
            return cut
        return _fastest(base, arguments, [lambda: cut, *_others(cut, choice, budget, model)])


def _checked(graph: LocalGraph, kind: str, memory: int | str | None, constants: Constants | None) -> float:
    """Returns the budget in bytes. Checks the arguments of :func:`plan_for`, and that all ranks gave the same. Collective."""
    error: Exception | None = None
    amount: float | None = inf
    try:
        amount = inf if memory is None else as_amount(memory)
    except Exception as raised:
        error = raised
    if kind not in _KINDS:
        error = ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}")
    elif error is None and (amount is None or 0 < amount < 1):
        error = ValueError(f'memory must be a number of bytes, text such as "1GiB", or None, got {memory!r}')
    elif constants is not None and not isinstance(constants, Constants):
        error = TypeError(f"constants must be a Constants or None, got {type(constants).__name__}")
    elif isinstance(graph, PreloadedGraph):
        error = ValueError(
            "plan_for needs a part without preload, because a preloaded part has the rows of other hosts already; pass another layout to distribute, or open "
            "the part without preload"
        )
    elif graph.is_planned:
        error = ValueError(
            "plan_for needs a part without a plan; pass the part that salientpp.fullgraph.local returned"
        )
    given = {"kind": repr(kind), "memory": repr(memory), "constants": repr(constants)}
    try:
        graph.job.agree("plan_for")
        everyone = graph.job.comm.gather_facts(given, error, "plan")
    finally:
        error = None  # otherwise this frame and the traceback would reference each other
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"all ranks must call plan_for with the same {name}, got {everyone[0][name]} on rank 0 and {value} on rank "
                    f"{rank}{graph.job.comm.of}"
                )
    return float(amount or 0)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode, with gradients, and restores modes and random numbers after it."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _problem(graph: LocalGraph, costs: Costs, may_recompute: bool) -> Problem:
    """Makes this rank's problem. Collective."""
    source, target = graph.edge_index.cpu()
    is_far = source >= graph.num_own
    edges = graph.global_ids[source[is_far]], target[is_far]
    # Candidates for recomputation may be all vertices of the graph. All ranks see the same number of edges.
    may_recompute &= graph.lists.num_edges * costs.num_hops <= MOST_ARCS
    return Problem.of(graph.offsets, graph.ranks.rank, edges, graph.others.into, costs, may_recompute)


def _planned(graph: LocalGraph, problem: Problem, name: str, choice: Choice) -> Plan:
    """Returns the plan of a choice. Collective."""
    rows = [problem.candidates[each] for each in problem.fetched(choice)[: problem.num_levels]]
    is_kept = choice.depths >= 0
    planned = graph.planned(problem.candidates[is_kept], choice.depths[is_kept], rows)
    return Plan(name, planned, "halo", problem, choice)


def _traffic(graph: LocalGraph, costs: Costs, layout: str) -> list[tuple[float, float, float]]:
    """Returns, for each rank under a layout with blocks: the words that arrive in the forward, those in both directions, and the seconds of communication."""
    found = []
    for rank in range(graph.ranks.size):
        of = [
            words_of_product(layout, graph.offsets, width, rank, nonzeros=graph.lists.num_edges)
            for width in costs.widths
        ]
        both = sum(words * (2 if back else 1) for words, back in zip(of, costs.backward, strict=True))
        exchanges = Layout.of(layout, graph.ranks.size).num_exchanges * sum(1 + back for back in costs.backward)
        seconds = both * costs.constants.word + exchanges * costs.constants.exchange
        found.append((sum(of), both, seconds))
    return found


def _others(cut: Plan, taken: Choice, budget: float, model: torch.nn.Module) -> list[Callable[[], Plan]]:
    """Returns functions that make the plans to compare with the cut, the same on all ranks. Collective, and so are the functions.

    Args:
        taken: the choice of the cut.
    """
    problem, graph = cut.problem, cut.graph.base or cut.graph
    ranks = graph.ranks
    costs = problem.costs
    kept = {name: problem.pure(name).depths for name in ("fetch", "cache")}
    choices = {"fetch": problem.pure("fetch"), "cache": problem.pure("cache")}
    if problem.may_recompute:
        choices["recompute"] = problem.pure("recompute")
    if any(costs.products) and problem.num_arcs <= MOST_ARCS:
        choices |= {"sum": problem.cut(depths=kept["fetch"]), "cache, sum": problem.cut(depths=kept["cache"])}
    own = graph.num_own * costs.vertex_bytes + graph.edge_index.size(1) * costs.edge_bytes
    limit = min(budget, _MOST_MEMORY * own)
    facts = [
        fact
        for each in choices.values()
        for fact in (float(problem.memory(each.depths)) <= limit, not problem.same(each, taken))
    ]
    everyone = [*zip(*ranks.gather_numbers("plan_for", facts))]
    found: list[Callable[[], Plan]] = []
    for (name, choice), fits, is_new in zip(choices.items(), everyone[::2], everyone[1::2], strict=True):
        if all(fits) and any(is_new):
            found.append(partial(_planned, graph, problem, name, choice))
    # A layout is timed only if its communication takes less time than that of the cut.
    words = cut.summary()["words with gradients"]
    most = max(numbers[0] for numbers in ranks.gather_numbers("plan_for", [int(words)]))
    least = most * costs.constants.word + sum(1 + back for back in costs.backward) * costs.constants.exchange
    reductions = set(reductions_of(model).values())
    names = [] if None in reductions else _layouts(ranks.size, "max" not in reductions)
    seconds = {name: max(each[2] for each in _traffic(graph, costs, name)) for name in names}
    for name in sorted((each for each in names if seconds[each] < least), key=seconds.__getitem__)[:_MOST_LAYOUTS]:
        found.append(partial(Plan, name, graph, name, problem))
    return found


def _layouts(size: int, adds_up: bool) -> list[str]:
    """Returns the layouts with blocks of the matrix that exist for ``size`` ranks. ``adds_up``: no layer takes a maximum."""
    names = ["1d", *(f"grid:{rows}x{size // rows}" for rows in range(2, size) if size % rows == 0)]
    names += [f"1.5d:{copies}" for copies in range(2, size) if size % copies**2 == 0]
    return names + [f"{power}d" for power in (2, 3) if adds_up and round(size ** (1 / power)) ** power == size]


def _fastest(model: DistributedModel, arguments: Sequence[Any], candidates: Sequence[Callable[[], Plan]]) -> Plan:
    """Returns the candidate whose steps take the least time on the slowest rank. Collective."""
    # Two plans exist at a time, because each may keep as many rows as the budget allows.
    best = candidates[0]()
    fastest = DistributedModel(model.module, best.graph, best.layout, "a plan")
    for make in candidates[1:]:
        plan = make()
        other = DistributedModel(model.module, plan.graph, plan.layout, "a plan")
        ((first, second),) = in_turns([fastest, other], arguments, most=1)
        if max(first, second) <= _SLOW * min(first, second):
            first, second = (median(column) for column in zip(*in_turns([fastest, other], arguments)))
        if second < first:
            best, fastest = plan, other
        del plan, other
    return best
