"""Decides how one rank gets rows of other ranks in full-graph training: fetched, cached, recomputed or as sums.

Hop h is the h-th aggregation of the model, counted from 0. An edge from a vertex u of another rank to an own vertex t needs one of three things at hop h:

* the row of u is kept here: the input row is cached, and h layers of u are recomputed;
* the row of u is fetched, which takes ``w_h`` words (elements of a row);
* the owner of u adds up its rows for t and sends the sum, which takes ``w_h`` words too.

Gradients take as many words again if the rows depend on parameters. To recompute a vertex, its edges are aggregated here, and the rows of its in-neighbours
must be kept or fetched. A row that several edges need is paid for once. A sum needs a layer that is a product with a constant matrix.

The choice between fetching and recomputing follows NeutronStar ("NeutronStar: distributed GNN training with hybrid dependency management", Wang et al.,
SIGMOD 2022). The cheapest choice is a minimum cut (:mod:`salientpp.fullgraph.cut`). A budget of memory becomes a price on memory, which is raised until
the choice fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from salientpp.fullgraph.cut import least_cut
from salientpp.store.target_lists import Edges

#: Number of arcs up to which a minimum cut is computed. A cut of ten million arcs takes about ten seconds and 1 GB.
MOST_ARCS = 10_000_000

#: Number of bisection steps for the price on memory, and the share of the budget that is enough.
_PRICES, _FULL = 12, 0.98

FETCH = -1


@dataclass(frozen=True)
class Constants:
    """Seconds that basic operations take on these machines. Forward and backward take equally long.

    Attributes:
        edge: time to add one word of a row along an edge (T_e).
        vertex: time of one multiplication and addition in the product of a vertex's row and a layer's weights (T_v).
        word: time for a word to arrive from another rank (T_c).
        kept: fixed extra time of a training step in which a rank keeps at least one vertex of another rank.
    """

    edge: float
    vertex: float
    word: float
    kept: float = 0.0


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of a training step, in seconds and bytes, of fetching, keeping, recomputing and summing other ranks' rows.

    Attributes:
        widths: for each hop, the number of words of a row.
        backward: for each hop, True if a row's gradient travels back.
        products: for each hop, True if its layer is a product with a constant matrix, so that sums may travel.
        itemsize: bytes of a word.
    """

    widths: Sequence[int]
    backward: Sequence[bool]
    products: Sequence[bool]
    constants: Constants
    itemsize: int = 4

    @property
    def num_hops(self) -> int:
        return len(self.widths)

    def words(self, hop: int) -> int:
        """Returns the number of words that travel for a row, including its gradient if that travels back."""
        return self.widths[hop] * (2 if self.backward[hop] else 1)

    def fetch(self, hop: int) -> float:
        return self.words(hop) * self.constants.word

    def sum(self, hop: int) -> float:
        """Returns the seconds that a sum costs: it travels as a row does, and is added up in forward and backward."""
        return self.fetch(hop) + 2 * self.widths[hop] * self.constants.edge

    @property
    def vertex(self) -> float:
        """Seconds that a kept vertex adds to a step. Each layer multiplies its row by weights, once forward and twice backward."""
        after = [*self.widths[1:], self.widths[-1]]
        return sum(3 * a * b for a, b in zip(self.widths, after, strict=True)) * self.constants.vertex

    def edge(self, depth: int) -> float:
        """Returns the seconds that an edge adds to a step if ``depth`` layers of its target are recomputed instead of ``depth - 1``.

        A layer that is a matrix product adds up the edge's row only at hops that need it. Other layers add it up at
        every hop, as soon as the rank has the edge. So the seconds of ``depth`` 1 include all these hops.
        """
        words = self.widths[depth - 1] if depth == 1 or self.products[depth - 1] else 0
        if depth == 1:
            words += sum(width for width, is_product in zip(self.widths[1:], self.products[1:]) if not is_product)
        return 2 * words * self.constants.edge

    def timed(self, times: Constants, alone: Constants) -> Costs:
        """Returns costs that agree with timed steps of the model.

        Args:
            times: seconds that a whole vertex, edge and word add to a step, from :func:`salientpp.fullgraph.trial.step_times`.
            alone: the times of single kernels. An edge and a vertex cost at least these.
        """
        constants = Constants(
            edge=max(alone.edge, times.edge * self.constants.edge / self.edge(1)),
            vertex=max(alone.vertex, times.vertex * self.constants.vertex / self.vertex),
            word=max(0.0, times.word),
            kept=max(0.0, times.kept),
        )
        return replace(self, constants=constants)

    @property
    def vertex_bytes(self) -> int:
        """Bytes of a kept vertex: its rows at all hops."""
        return sum(self.widths) * self.itemsize

    @property
    def edge_bytes(self) -> int:
        """Bytes of an edge into a recomputed vertex: its ends, and an entry of a matrix and of its transpose."""
        return 2 * 8 + 2 * (8 + self.itemsize)


@dataclass(frozen=True, eq=False)
class Decision:
    """Says how one rank gets the rows of other ranks. If the tensors have leading dimensions [...], they hold several decisions.

    Attributes:
        depths: int64 [..., m], for each candidate: -1 if it is not kept, 0 if cached, l if l layers are recomputed.
        summed: bool [..., hops, g], for each hop and each group of a :class:`Problem`: True if a sum replaces the rows that are neither kept nor fetched.
    """

    depths: Tensor
    summed: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Facts from which a rank decides how it gets each row of other ranks.

    The edges from one other rank to one own vertex form a group: one sum can replace the rows of their sources.

    Attributes:
        candidates: int64 [m], ascending global ids: other ranks' vertices that may be kept here.
        named: int64 [2, e], distinct edges from candidates to own vertices: index in ``candidates``, number of group.
        num_groups: number of groups, g.
        pairs: int64 [2, f], distinct edges between candidates: index of the source, index of the target.
        in_degree: int64 [m], number of all edges into each candidate; 0 if no candidate may be recomputed.
        may_recompute: True if candidates may be recomputed.
    """

    costs: Costs
    candidates: Tensor
    named: Tensor
    num_groups: int
    pairs: Tensor
    in_degree: Tensor
    may_recompute: bool

    @classmethod
    def of(
        cls,
        offsets: Sequence[int],
        rank: int,
        edges: tuple[Tensor, Tensor],
        edges_into: Callable[[Tensor], Edges],
        costs: Costs,
        may_recompute: bool = True,
    ) -> Problem:
        """Collects the facts of one rank. Vertices of other ranks are candidates if they are at most as many hops away as the model has hops.

        Args:
            offsets: the first vertex of each rank, and N at the end.
            edges: int64 [k] each, the sources (global ids of other ranks' vertices) and the targets (numbers of own vertices) of edges.
            edges_into: function that returns the edges into vertices of other ranks. It is called once for each hop.
            may_recompute: False: no candidate is recomputed. Then no edges are read.
        """
        begin, end = offsets[rank : rank + 2]
        source, target = edges
        candidates = latest = named = source.unique()
        found = [(named[:0], named[:0])]  # ends of edges into candidates, as global ids
        for hop in range(costs.num_hops if may_recompute else 0):
            into = edges_into(latest)
            found.append((into.source, latest[into.target]))
            if hop + 1 < costs.num_hops:
                latest = into.source[(into.source < begin) | (into.source >= end)].unique()
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
        owner = torch.searchsorted(torch.tensor(offsets, device="cpu"), source, right=True)
        groups, group = (owner * (end - begin + 1) + target).unique(return_inverse=True)
        to_own = torch.stack([torch.searchsorted(candidates, source), group]).unique(dim=1)
        return cls(costs, candidates, to_own, groups.numel(), pairs, degrees, may_recompute)

    @property
    def num_levels(self) -> int:
        """Number of hops for which a rank chooses separately.

        Without recomputation it may be 2, because all hops after the first need the same rows, so that one choice serves them.
        """
        costs = self.costs
        alike = {*zip(costs.backward[1:], costs.products[1:])}
        return costs.num_hops if self.may_recompute or len(alike) > 1 else min(2, costs.num_hops)

    # --- what a choice costs --------------------------------------------------------------------------------

    def fetched(self, choice: Decision) -> list[Tensor]:
        """Returns which candidates are fetched under a choice: for each hop, bool [..., m]."""
        found = []
        for hop in range(self.costs.num_hops):
            wanted = ~choice.summed[..., hop, :][..., self.named[1]]
            by_own = self._any(wanted, self.named[0], self.candidates.numel())
            by_recomputed = self._any((choice.depths > hop)[..., self.pairs[1]], self.pairs[0], by_own.size(-1))
            found.append((by_own | by_recomputed) & (choice.depths < hop))
        return found

    def sums(self, choice: Decision) -> list[Tensor]:
        """Returns which groups (see the class) get a sum under a choice: for each hop, bool [..., g]."""
        found = []
        for hop, fetched in enumerate(self.fetched(choice)):
            missing = ((choice.depths < hop) & ~fetched)[..., self.named[0]]
            found.append(self._any(missing, self.named[1], self.num_groups))
        return found

    @staticmethod
    def _any(values: Tensor, index: Tensor, size: int) -> Tensor:
        """Returns bool [..., size]: entry i is True if any of the ``values`` whose ``index`` is i is True."""
        none = torch.zeros((*values.shape[:-1], size), dtype=torch.uint8, device="cpu")
        return none.scatter_reduce_(-1, index.expand(values.shape), values.to(torch.uint8), "amax").bool()

    def seconds(self, choice: Decision) -> Tensor:
        """Returns the seconds that a choice adds to a step, float64 [...]."""
        costs, depths = self.costs, choice.depths
        total = (depths >= 0).sum(-1) * costs.vertex + (depths >= 0).any(-1) * costs.constants.kept
        for depth in range(1, costs.num_hops):
            total = total + ((depths >= depth) * self.in_degree).sum(-1) * costs.edge(depth)
        for hop, (fetched, summed) in enumerate(zip(self.fetched(choice), self.sums(choice), strict=True)):
            total = total + fetched.sum(-1) * costs.fetch(hop) + summed.sum(-1) * costs.sum(hop)
        return total.to(torch.float64)

    def memory(self, depths: Tensor) -> Tensor:
        """Returns the bytes of memory, [...], that kept rows and edges take."""
        return self._bytes(depths).sum(-1)

    def forecast(self, choice: Decision) -> dict[str, float]:
        """Returns what a choice means for a step, by name: arriving rows, kept vertices, memory in bytes, seconds."""
        costs = self.costs
        rows = [int(each.sum()) for each in self.fetched(choice)]
        sums = [int(each.sum()) for each in self.sums(choice)]
        arriving = [a + b for a, b in zip(rows, sums, strict=True)]
        is_recomputed = choice.depths > 0
        return {
            "rows": sum(rows),
            "sums": sum(sums),
            "words": sum(number * width for number, width in zip(arriving, costs.widths, strict=True)),
            "words with gradients": sum(number * costs.words(hop) for hop, number in enumerate(arriving)),
            "cached vertices": int((choice.depths == 0).sum()),
            "recomputed vertices": int(is_recomputed.sum()),
            "recomputed edges": int(self.in_degree[is_recomputed].sum()),
            "memory": int(self.memory(choice.depths)),
            "seconds": float(self.seconds(choice)),
        }

    # --- solutions ------------------------------------------------------------------------------------------

    def pure(self, kind: str) -> Decision:
        """Returns a simple choice, which treats all rows alike, for comparison with the minimum cut.

        Args:
            kind: 'fetch' keeps nothing. 'cache' keeps all input rows that this rank's vertices need. 'recompute' fetches nothing. 'sum' keeps nothing, and
                takes only sums at hops that allow it. All but 'sum' fetch what they do not keep.
        """
        depths = torch.full_like(self.candidates, FETCH)
        named = self.named[0]
        if kind == "cache":
            depths[named] = 0
        elif kind == "recompute":
            depths[named] = self.costs.num_hops - 1
            for depth in range(self.costs.num_hops - 2, -1, -1):
                needed = self.pairs[0][depths[self.pairs[1]] == depth + 1]
                depths[needed] = depths[needed].clamp(min=depth)
        may_sum = torch.tensor(self.costs.products, dtype=torch.bool, device="cpu") & (kind == "sum")
        return Decision(depths, may_sum[:, None].expand(-1, self.num_groups))

    def cut(self, price: float = 0.0, depths: Tensor | None = None) -> Decision:
        """Returns the cheapest choice if a byte of memory costs ``price`` seconds. It ignores the fixed time ``kept``.

        Args:
            depths: int64 [m], the depths that the choice must have; None: the cheapest.
        """
        costs, levels = self.costs, self.num_levels
        deepest = costs.num_hops if self.may_recompute else 1
        keep = [
            torch.full((self.candidates.numel(),), costs.vertex + price * costs.vertex_bytes, device="cpu").double()
        ]
        for depth in range(1, deepest):
            keep.append(self.in_degree * (costs.edge(depth) + (price * costs.edge_bytes if depth == 1 else 0.0)))
        sums = [costs.sum(hop) if costs.products[hop] else inf for hop in range(levels)]
        found, summed = least_cut(
            self.named, self.num_groups, self.pairs, keep, [*map(costs.fetch, range(levels))], sums, depths
        )
        further = summed[-1:].expand(costs.num_hops - levels, -1)
        return Decision(found, torch.cat([summed, further]))

    @property
    def num_arcs(self) -> int:
        levels, kept = self.num_levels, self.costs.num_hops if self.may_recompute else 1
        of_hop = self.named.size(1) + self.num_groups + self.candidates.numel()
        return levels * of_hop + kept * (self.pairs.size(1) + 2 * self.candidates.numel())

    def solve(self, budget: float = inf) -> Decision:
        """Returns a choice within ``budget`` bytes of memory, not slower than any :meth:`pure` choice within it."""
        pure = [*map(self.pure, ("fetch", "cache", "recompute", "sum"))]
        if not self.may_recompute:
            del pure[2]
        if self.num_arcs > MOST_ARCS:
            found = pure
        else:
            best = self.cut()
            if float(self.memory(best.depths)) > budget:
                best = self._within(budget)
            found = [best, self.cut(depths=pure[0].depths), *pure]
        fitting = [each for each in found if float(self.memory(each.depths)) <= budget]
        return min(fitting, key=lambda choice: float(self.seconds(choice)))

    def _within(self, budget: float) -> Decision:
        """Finds a choice within ``budget`` bytes: raises the price of memory until the cheapest choice fits, then adds vertices while there is room."""
        low, high = 0.0, sum(map(self.costs.fetch, range(self.costs.num_hops))) / self.costs.vertex_bytes
        depths, above = self.pure("fetch").depths, self.cut().depths
        for _ in range(_PRICES):
            price = (low + high) / 2
            found = self.cut(price).depths
            if float(self.memory(found)) <= budget:
                depths, high = found, price
                if float(self.memory(found)) >= _FULL * budget:
                    break
            else:
                above, low = found, price
        # Vertices that cost the same enter and leave together. Some of them are added, as far as memory allows.
        deeper = torch.maximum(depths, above)
        more = self._bytes(deeper) - self._bytes(depths)
        order = more.argsort(stable=True)
        fits = torch.empty_like(order, dtype=torch.bool)
        fits[order] = more[order].cumsum(0) <= budget - float(self.memory(depths))
        extended = self.cut(depths=torch.where(fits, deeper, depths))
        return min(self.cut(depths=depths), extended, key=lambda choice: float(self.seconds(choice)))

    def _bytes(self, depths: Tensor) -> Tensor:
        return (depths >= 0) * self.costs.vertex_bytes + (depths > 0) * self.in_degree * self.costs.edge_bytes
