"""Plans of full-graph training: for each vertex of another rank, fetch its row at every hop, cache its input row, or also recompute some of its layers.

Hop h is the h-th aggregation of the model, counted from 0. A row of hop h is available if the vertex is this rank's, or if h of its layers are computed here.
Otherwise the row is fetched, which takes ``w_h`` words. Its gradient takes as many again if the row depends on parameters. To recompute a vertex, its edges are
aggregated, and the rows of its in-neighbours must be available or fetched. A row that several recomputed vertices need is paid for once.

The choice between fetching and recomputing follows NeutronStar ("NeutronStar: distributed GNN training with hybrid dependency management", Wang et al.,
SIGMOD 2022).

The cheapest plan is a minimum cut: a vertex is a chain of yes-or-no choices, and a fetch is paid for a row that is needed but not kept. A memory
budget becomes a price on memory, which is raised until the plan fits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

import torch
from torch import Tensor

from salientpp.fullgraph.distribute import DistributedModel
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.measure import Constants, calibrate
from salientpp.fullgraph.trial import StepTimes, in_turns, step_times
from salientpp.store.target_lists import Edges

#: Number of choices (vertices times hops) up to which a minimum cut is computed.
_EXACT = 4000

#: Number of bisection steps for the price on memory.
_PRICES = 24

_FETCH = -1
_UNIT = Constants(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds that a vertex of another rank costs in a training step."""

    widths: Sequence[int]  # words of a row at each hop
    backward: Sequence[bool]  # True for hops at which a row's gradient travels back
    constants: Constants

    @property
    def num_hops(self) -> int:
        return len(self.widths)

    def words(self, hop: int) -> int:
        """Returns the number of words that travel for a fetched row: its own and those of its gradient, if that travels."""
        return self.widths[hop] * (2 if self.backward[hop] else 1)

    def fetch(self, hop: int) -> float:
        return self.words(hop) * self.constants.word

    @property
    def vertex(self) -> float:
        """Seconds of a kept vertex. Its row takes part in every layer's product with the weights, once in the forward and twice in the backward."""
        after = [*self.widths[1:], self.widths[-1]]
        return sum(3 * a * b for a, b in zip(self.widths, after, strict=True)) * self.constants.vertex

    @property
    def edge(self) -> float:
        """Seconds of an edge into a recomputed vertex. The edge is aggregated at every hop, in the forward and in the backward."""
        return 2 * sum(self.widths) * self.constants.edge

    def timed(self, times: StepTimes, alone: Constants) -> Costs:
        """Returns costs with constants fitted to timed steps. Vertices and edges cost at least as much as in ``alone``, the times of single kernels."""
        constants = Constants(
            edge=max(alone.edge, times.edge * self.constants.edge / self.edge),
            vertex=max(alone.vertex, times.vertex * self.constants.vertex / self.vertex),
            word=max(0.0, times.word),
            exchange=alone.exchange,
            kept=max(0.0, times.kept),
        )
        return replace(self, constants=constants)

    @property
    def kept_words(self) -> int:
        """Words of memory of a kept vertex: its rows at all hops."""
        return sum(self.widths)


@dataclass(frozen=True, eq=False)
class Problem:
    """Decision of one rank: which vertices of other ranks it keeps.

    Attributes:
        candidates: int64 [m], ascending: global ids of other ranks' vertices that may be kept.
        is_named: bool [m]: True if an edge leads from the candidate to one of this rank's own vertices.
        sources, targets: int64 [e], ends of the edges between candidates, as places in ``candidates``.
        in_degree: int64 [m], number of all edges into each candidate; 0 if no candidate may be recomputed.
    """

    costs: Costs
    candidates: Tensor
    is_named: Tensor
    sources: Tensor
    targets: Tensor
    in_degree: Tensor

    @classmethod
    def of(
        cls,
        own: range,
        named: Tensor,
        edges_into: Callable[[Tensor], Edges],
        costs: Costs,
        may_recompute: bool = True,
    ) -> Problem:
        """Makes the problem of the rank with the vertices ``own``. Candidates are at most as many hops away as the model has hops.

        Args:
            named: ascending global ids of other ranks' vertices from which edges lead to own vertices, int64.
            edges_into: returns the edges into vertices of other ranks. It is called once for each hop, and once for each candidate.
            may_recompute: False: no candidate is recomputed. Then the candidates are ``named``, and no edges are read.
        """
        candidates = latest = named
        found = [(named[:0], named[:0])]  # ends of edges into candidates, as global ids
        for hop in range(costs.num_hops if may_recompute else 0):
            edges = edges_into(latest)
            found.append((edges.source, latest[edges.target]))
            if hop + 1 < costs.num_hops:
                latest = edges.source[(edges.source < own.start) | (edges.source >= own.stop)].unique()
                latest = latest[~torch.isin(latest, candidates)]
                candidates = torch.cat([candidates, latest])
        candidates = candidates.sort().values
        sources, targets = (torch.cat(ends) for ends in zip(*found))
        targets = torch.searchsorted(candidates, targets)
        degrees = torch.bincount(targets, minlength=candidates.numel())
        is_candidate = torch.isin(sources, candidates)
        place = torch.searchsorted(candidates, sources[is_candidate])
        # A repeated edge needs the row only once.
        pairs = torch.stack([place, targets[is_candidate]]).unique(dim=1)
        return cls(costs, candidates, torch.isin(candidates, named), pairs[0], pairs[1], degrees)

    def fetched(self, depths: Tensor) -> list[Tensor]:
        """Returns, for each hop, True for candidates that are fetched: bool [..., m]. ``depths`` is [..., m], see :class:`Plan`."""
        found = []
        for hop in range(self.costs.num_hops):
            named = self.is_named.to(torch.uint8).expand(depths.shape).clone()
            deep = (depths > hop)[..., self.targets].to(torch.uint8)
            named.scatter_reduce_(-1, self.sources.expand(deep.shape), deep, "amax")
            found.append(named.bool() & (depths < hop))
        return found

    def seconds(self, depths: Tensor) -> Tensor:
        """Returns the seconds that a step takes because of the plan, float64 [...]."""
        costs = self.costs
        total = (depths >= 0).sum(-1) * costs.vertex + (depths >= 0).any(-1) * costs.constants.kept
        total = total + ((depths > 0) * self.in_degree).sum(-1) * costs.edge
        for hop, fetched in enumerate(self.fetched(depths)):
            total = total + fetched.sum(-1) * costs.fetch(hop)
        return total.to(torch.float64)

    def memory(self, depths: Tensor) -> Tensor:
        """Returns the words [...] of memory for kept rows and edges; an edge takes three, for its ends and its weight."""
        return (depths >= 0).sum(-1) * self.costs.kept_words + ((depths > 0) * self.in_degree).sum(-1) * 3

    # --- solutions ------------------------------------------------------------------------------------------

    def pure(self, kind: str) -> Tensor:
        """Returns a pure plan. 'fetch' keeps nothing. 'cache' keeps all input rows that this rank's vertices need. 'recompute' fetches nothing."""
        depths = torch.full_like(self.candidates, _FETCH)
        if kind == "cache":
            depths[self.is_named] = 0
        elif kind == "recompute":
            depths[self.is_named] = self.costs.num_hops - 1
            for depth in range(self.costs.num_hops - 2, -1, -1):
                needed = self.sources[depths[self.targets] == depth + 1]
                depths[needed] = depths[needed].clamp(min=depth)
        return depths

    def solve(self, budget: float = inf) -> Tensor:
        """Returns the depths int64 [m] of a plan that fits ``budget`` words of memory. It is at least as fast as each pure plan that fits."""
        is_exact = self.candidates.numel() * self.costs.num_hops <= _EXACT
        plan = self._cut(0.0) if is_exact else self._greedy(budget)
        if float(self.memory(plan)) > budget:
            plan = self._within(budget)
        pure = map(self.pure, ("fetch", "cache", "recompute"))
        fitting = [plan, *(each for each in pure if float(self.memory(each)) <= budget)]
        return min(fitting, key=lambda depths: float(self.seconds(depths)))

    def _within(self, budget: float) -> Tensor:
        """Finds the lowest price of memory at which the cheapest plan fits. Returns this plan, extended by the vertices that still fit."""
        low, high = 0.0, max(self.costs.fetch(hop) for hop in range(self.costs.num_hops)) * self.costs.num_hops
        best = self.pure("fetch")
        for _ in range(_PRICES):
            price = (low + high) / 2
            plan = self._cut(price)
            if float(self.memory(plan)) <= budget:
                best, high = plan, price
            else:
                low = price
        return self._greedy(budget, best)

    def _cut(self, price: float) -> Tensor:
        """Returns the depths with the lowest total cost, if a word of memory costs ``price`` seconds."""
        costs, number, hops = self.costs, self.candidates.numel(), self.costs.num_hops
        source, sink = 2 * number * hops, 2 * number * hops + 1
        flow = _Flow(sink + 1)
        keeps = lambda vertex, depth: vertex * hops + depth  # noqa: E731
        needs = lambda vertex, hop: (number + vertex) * hops + hop  # noqa: E731
        degrees, named = self.in_degree.tolist(), self.is_named.tolist()
        for vertex in range(number):
            flow.add(keeps(vertex, 0), sink, costs.vertex + price * costs.kept_words)
            if hops > 1:
                flow.add(keeps(vertex, 1), sink, degrees[vertex] * (costs.edge + 3 * price))
            for depth in range(1, hops):
                flow.add(keeps(vertex, depth), keeps(vertex, depth - 1), inf)
            for hop in range(hops):
                flow.add(source if named[vertex] else needs(vertex, hop), keeps(vertex, hop), costs.fetch(hop))
        for u, v in zip(self.sources.tolist(), self.targets.tolist()):
            if not named[u]:
                for hop in range(hops - 1):
                    flow.add(keeps(v, hop + 1), needs(u, hop), inf)
        on_side = flow.cut(source, sink)
        depths = [sum(on_side[keeps(vertex, depth)] for depth in range(hops)) - 1 for vertex in range(number)]
        return torch.tensor(depths, dtype=torch.int64, device="cpu")

    def _greedy(self, budget: float = inf, start: Tensor | None = None) -> Tensor:
        """Adds one layer at a time to the vertex where it saves most, while any saves. A vertex's saving is computed again when its turn comes."""
        costs, hops = self.costs, self.costs.num_hops
        start = self.pure("fetch") if start is None else start
        spare, depths = budget - float(self.memory(start)), start.tolist()
        degrees, named = self.in_degree.tolist(), self.is_named.tolist()
        into: list[list[int]] = [[] for _ in depths]
        uses = [
            [0] * hops for _ in depths
        ]  # for each row and hop, the number of vertices that need it; all of this rank's own count as one
        for u, v in zip(self.sources.tolist(), self.targets.tolist()):
            into[v].append(u)
            for hop in range(max(0, depths[v])):
                uses[u][hop] += 1
        for vertex, is_named in enumerate(named):
            for hop in range(hops):
                uses[vertex][hop] += is_named

        def saving(v: int) -> tuple[float, int]:
            """Returns the seconds saved and the words of memory taken if ``v`` is kept one step deeper: cached, then recomputed by one more layer."""
            depth = depths[v] + 1
            saved = costs.fetch(depth) if uses[v][depth] else 0.0
            if depth == 0:
                return saved - costs.vertex, costs.kept_words
            # The rows of the in-neighbours are needed one hop earlier.
            hop = depth - 1
            more = sum(costs.fetch(hop) for u in into[v] if depths[u] < hop and not uses[u][hop])
            edges = degrees[v] if depth == 1 else 0
            return saved - more - edges * costs.edge, 3 * edges

        heap = [(-saving(v)[0], v) for v, depth in enumerate(depths) if depth + 1 < hops]
        heapq.heapify(heap)
        while heap:
            guessed, v = heapq.heappop(heap)
            if depths[v] + 1 >= hops:
                continue
            now, words = saving(v)
            if now <= 0 or words > spare:
                continue
            if heap and -now > heap[0][0] and -now != guessed:
                heapq.heappush(heap, (-now, v))
                continue
            spare -= words
            depths[v] += 1
            if depths[v] > 0:
                for u in into[v]:
                    uses[u][depths[v] - 1] += 1
                    if depths[u] + 1 < hops:
                        heapq.heappush(heap, (-saving(u)[0], u))
            if depths[v] + 1 < hops:
                heapq.heappush(heap, (-saving(v)[0], v))
        return torch.tensor(depths, dtype=torch.int64, device="cpu")


class _Flow:
    """Maximum flow (Dinic), and the minimum cut that follows from it."""

    def __init__(self, number: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(number)]
        self.to: list[int] = []
        self.left: list[float] = []

    def add(self, begin: int, end: int, capacity: float) -> None:
        for a, b, size in ((begin, end, capacity), (end, begin, 0.0)):
            self.edges[a].append(len(self.to))
            self.to.append(b)
            self.left.append(size)

    def cut(self, source: int, sink: int) -> list[bool]:
        """Returns True for each node on the source's side."""
        finite = [size for size in self.left if size not in (0.0, inf)]
        least = 1e-12 * max(finite, default=1.0)
        while True:
            level = self._levels(source, least)
            if level[sink] < 0:
                return [each >= 0 for each in level]
            at = [0] * len(self.edges)
            while self._push(source, sink, level, at, least):
                pass

    def _levels(self, source: int, least: float) -> list[int]:
        level = [-1] * len(self.edges)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                if self.left[edge] > least and level[self.to[edge]] < 0:
                    level[self.to[edge]] = level[node] + 1
                    waiting.append(self.to[edge])
        return level

    def _push(self, source: int, sink: int, level: list[int], at: list[int], least: float) -> bool:
        """Pushes flow along one path; returns False if no path exists."""
        path: list[int] = []
        node = source
        while node != sink:
            if at[node] == len(self.edges[node]):
                if not path:
                    return False
                node = self.to[path.pop() ^ 1]
                at[node] += 1
                continue
            edge = self.edges[node][at[node]]
            if self.left[edge] > least and level[self.to[edge]] == level[node] + 1:
                path.append(edge)
                node = self.to[edge]
            else:
                at[node] += 1
        size = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= size
            self.left[edge ^ 1] += size
        return True


@dataclass(frozen=True, eq=False)
class Plan:
    """Vertices of other ranks that one rank keeps.

    Attributes:
        depths: int64 [m], for the candidates: -1 if fetched at every hop, 0 if cached, l if l layers are recomputed.
        graph: the rank's part without a plan.
    """

    problem: Problem
    depths: Tensor
    graph: LocalGraph = field(repr=False)

    def apply(self) -> LocalGraph:
        """Returns the part under this plan, for :func:`salientpp.distribute`. Collective."""
        kept = self.depths >= 0
        return self.graph.planned(self.problem.candidates[kept], self.depths[kept])

    def summary(self) -> dict[str, float]:
        """Returns this rank's forecast of a step.

        It holds the numbers of rows and words that arrive, of cached and of recomputed vertices, and of recomputed edges. It also holds the words of memory,
        and the seconds that the step takes because of the plan.
        """
        costs = self.problem.costs
        rows = [int(fetched.sum()) for fetched in self.problem.fetched(self.depths)]
        is_recomputed = self.depths > 0
        return {
            "rows": sum(rows),
            "words": sum(number * width for number, width in zip(rows, costs.widths, strict=True)),
            "words with gradients": sum(number * costs.words(hop) for hop, number in enumerate(rows)),
            "cached vertices": int((self.depths == 0).sum()),
            "recomputed vertices": int(is_recomputed.sum()),
            "recomputed edges": int(self.problem.in_degree[is_recomputed].sum()),
            "memory": int(self.problem.memory(self.depths)),
            "seconds": float(self.problem.seconds(self.depths)),
        }


def plan_for(
    model: DistributedModel,
    *model_arguments: Tensor,
    kind: str = "hybrid",
    budget: float | None = None,
    constants: Constants | None = None,
) -> Plan:
    """Decides for each vertex of other ranks whether its rows are fetched, cached or recomputed. Collective.

    Args:
        model: from :func:`salientpp.distribute`, with layout='halo' and without a plan. It is called in evaluation mode, to measure the widths of rows and the
            times of steps. Parameters and their gradients stay as they are.
        model_arguments: arguments of the model; none: ``(graph.x, graph.edge_index)``.
        kind: 'hybrid', or a pure plan: 'fetch', 'cache' or 'recompute'.
        budget: words of memory for vertices kept on this rank; None: unlimited.
        constants: times of basic operations on the machines; None: they are measured, by steps of this model
            (:mod:`salientpp.fullgraph.trial`). Steps are then timed under the hybrid plan and under the plans that fetch or cache everything, and the
            fastest of the three is taken.

    Raises:
        ValueError: an argument is wrong.
    """
    if kind not in ("hybrid", "fetch", "cache", "recompute"):
        raise ValueError(f"kind must be 'hybrid', 'fetch', 'cache' or 'recompute', got {kind!r}")
    graph = model.graph
    if graph.is_planned or model.layout != "halo":
        raise ValueError("plan_for needs a model with layout='halo' and without a plan; distribute it again")
    arguments = model_arguments or (graph.x, graph.edge_index)
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()(*arguments)
        costs = Costs([width for width, _ in model.seen], [backward for _, backward in model.seen], constants or _UNIT)
        if constants is None:
            costs = costs.timed(step_times(model, arguments), calibrate(graph))
        own = range(*graph.offsets[graph.ranks.rank : graph.ranks.rank + 2])
        may_recompute = kind in ("hybrid", "recompute")
        problem = Problem.of(own, graph.outer, graph.others.into, costs, may_recompute)
        if kind != "hybrid":
            return Plan(problem, problem.pure(kind), graph)
        limit = inf if budget is None else budget
        plan = Plan(problem, problem.solve(limit), graph)
        return plan if constants else _fastest(plan, model, arguments, limit)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _fastest(plan: Plan, model: DistributedModel, arguments: Sequence[Tensor], budget: float) -> Plan:
    """Returns the fastest of ``plan`` and the plans that fetch or cache everything. Recomputing all may need much memory, and is not tried. Collective."""
    problem, graph = plan.problem, plan.graph
    pure = [Plan(problem, problem.pure(kind), graph) for kind in ("fetch", "cache")]
    fits = [float(problem.memory(each.depths)) <= budget for each in pure]
    everyone = graph.ranks.gather_numbers("plan_for", fits)
    plans = [plan] + [each for each, on_ranks in zip(pure, zip(*everyone), strict=True) if all(on_ranks)]
    medians = [median(column) for column in zip(*in_turns(model, arguments, [each.apply() for each in plans]))]
    return plans[medians.index(min(medians))]
