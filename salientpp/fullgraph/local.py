"""One rank's part of a graph in full-graph training.

In the ``edge_index`` of a :class:`LocalGraph`, 0 to n - 1 are the rank's own vertices. Numbers from n on are vertices of other ranks that edges come from (the
halo). A rank without vertices has one row of ones in every table of rows, because many layers cannot be called without rows. No edge and no mask refers to it:
in tables of bools it is False.

With a plan, the rank keeps some vertices of other ranks too. It caches the input rows of all of them. If it recomputes layers of a vertex, it also has the
edges into this vertex. Kept vertices follow the rank's own in every table of rows, those with the most recomputed layers first. At some hops the rank may get
sums of other ranks' rows instead of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Ranks, Route
from salientpp.fullgraph.kept import Kept
from salientpp.fullgraph.lists import OtherLists
from salientpp.fullgraph.rank_graph import Hop, RankGraph
from salientpp.store.target_lists import TargetLists


@dataclass(eq=False)
class LocalGraph(RankGraph):
    """One rank's part of a graph in full-graph training, made by :func:`local`.

    Attributes:
        ranks: all ranks, their collectives and counters.
        lists: the neighbour lists of this rank's vertices, with the attributes of the edges. If the graph is a
            ``Data``: the lists of all vertices.
        others: object that gets neighbour lists of other ranks' vertices from their owners.
        offsets: the first global id of each rank, and N at the end.
        node_rows: name -> rows [n, ...] of this rank's vertices.
        splits: name -> local numbers of this rank's vertices in the split, int64, ascending.
        n_id: int64, global ids of this rank's vertices.
        inner: int64 [r], global ids of other ranks' vertices whose input rows are kept here; most recomputed layers first.
        depths: int64 [r]: for each vertex of ``inner``, the number of layers that are recomputed here; 0 if it is only cached.
        rows: for each hop, the vertices whose rows this rank fetches, ascending int64 global ids. For the other rows
            that it needs, it gets sums. None: it fetches all needed rows. The last entry also serves later hops at
            which no kept vertex is available.
        base: the part without the plan; None if this part has no plan.
        outer: int64 [h], ascending, global ids of the halo's vertices that are not in ``inner``.
        edge_index: int64 [2, e], edges into the rank's own and the recomputed vertices, in the local numbers that the module describes.
        e_id: int64 [e], ids of these edges.
        row_depths: int64 [num_rows], for each row that edges refer to, the number of layers whose result is available here; -1 for none.
        hops: for each hop, how its rows are fetched and where they are put. The last entry also serves all later hops.
        whole_halo: the rows of all vertices of ``inner`` and ``outer``, even of cached ones.
    """

    ranks: Ranks
    lists: TargetLists
    offsets: tuple[int, ...]
    node_rows: dict[str, Tensor]
    splits: dict[str, Tensor]
    others: OtherLists = field(init=False)
    inner: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    depths: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    rows: Sequence[Tensor] | None = None
    base: LocalGraph | None = field(default=None, repr=False)
    n_id: Tensor = field(init=False)
    outer: Tensor = field(init=False)
    edge_index: Tensor = field(init=False)
    e_id: Tensor = field(init=False)
    row_depths: Tensor = field(init=False)
    hops: list[Hop] = field(init=False)
    whole_halo: Hop = field(init=False)

    def __post_init__(self) -> None:
        begin, end = self.offsets[self.ranks.rank : self.ranks.rank + 2]
        self.n_id = torch.arange(begin, end, device="cpu")
        if begin == end and self.base is None:
            self.node_rows = {
                name: rows.new_full((1, *rows.shape[1:]), rows.dtype != torch.bool)
                for name, rows in self.node_rows.items()
            }
        self.others = OtherLists(self.ranks, self.lists, self.offsets)
        self._edges = [self.lists.into(self.n_id)]
        if self.is_planned:  # on every rank
            self._edges.append(self.others.into(self.inner[self.depths > 0], with_rows=True))
        sources = torch.cat([edges.source for edges in self._edges])
        self.e_id = torch.cat([edges.e_id for edges in self._edges])
        target = torch.cat([first + edges.target for first, edges in zip((0, self.num_own), self._edges)])
        others = sources[(sources < begin) | (sources >= end)].unique()
        self.outer = others[~torch.isin(others, self.inner)]
        self._known, self._order = torch.cat([self.inner, self.outer]).sort()
        self.edge_index = torch.stack([self._place(sources), target]).to(self.ranks.device)
        self.hops = self._hops_of(sources, target)
        self.whole_halo = self.fetching(self._known)
        self._kept = Kept()
        self._inner_route: Route | None = None
        self.edge_tensors = {}

    def _place(self, ids: Tensor) -> Tensor:
        """Returns the local numbers of vertices, given their global ids."""
        own = ids - self.offsets[self.ranks.rank]
        if not self._known.numel():
            return own
        at = torch.searchsorted(self._known, ids).clamp_(max=self._known.numel() - 1)
        return torch.where((own >= 0) & (own < self.n_id.numel()), own, self._order[at] + self.num_own)

    def _hops_of(self, sources: Tensor, target: Tensor) -> list[Hop]:
        """Finds the rows to fetch at each hop. Collective.

        Args:
            sources, target: the edges, [e]: global ids of their sources, local numbers of their targets.
        """
        ranks, planned = self.ranks, self.rows or ()
        deepest = int(self.depths.max()) + 1 if self.depths.numel() else 0
        last = max(numbers[0] for numbers in ranks.gather_numbers("to make a part", [deepest]))
        number = max(last + 1, len(planned))
        depths = torch.nn.functional.pad(self.depths, (self.num_own, 0), value=number + 1)
        self.row_depths = depths = torch.nn.functional.pad(depths, (0, self.outer.numel()), value=-1)
        wanted: list[Tensor] = []
        facts: list[int] = []
        for hop in range(number):
            named = sources[depths[target] > hop].unique()
            needed = named[depths[self._place(named)] < hop]
            wanted.append(planned[hop] if hop < len(planned) else needed)
            has_sums = not bool(torch.isin(needed, wanted[hop]).all())
            is_new = hop == 0 or bool(((self.depths == hop) | (self.depths == hop - 1)).any())
            facts += [has_sums, is_new or not torch.equal(wanted[hop], wanted[hop - 1])]
        everyone = [max(column) for column in zip(*ranks.gather_numbers("the hops of a part", facts))]
        hops: list[Hop] = []
        for hop, (rows, has_sums, is_new) in enumerate(zip(wanted, everyone[::2], everyone[1::2], strict=True)):
            hops.append(self.fetching(rows, hop, bool(has_sums)) if is_new else hops[-1])
        return hops

    def fetching(self, wanted: Tensor, level: int = 0, has_sums: bool = False) -> Hop:
        """Makes the :class:`Hop` that fetches the rows of ``wanted``, ascending global ids int64. Collective."""
        route = Route.asking(self.ranks, wanted, self.offsets)
        return Hop(route, self._place(wanted).to(self.ranks.device), level, has_sums)

    # --- sizes ----------------------------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        return self.base is not None

    @property
    def num_vertices(self) -> int:
        """Number of vertices of the whole graph, N."""
        return self.offsets[-1]

    @property
    def num_classes(self) -> int:
        """Number of classes in all ranks' ``y``, as :attr:`salientpp.PartitionedGraph.num_classes`. Collective."""
        y = self.node_rows.get("y")
        if y is not None and y.shape[1:].numel() != 1:
            return y.size(-1)
        if y is not None:
            y = y[: self.n_id.numel()]  # without the row of a rank without vertices
        if y is not None and y.is_floating_point():
            values = y[~y.isnan()].unique().tolist()
            self.job.agree("num_classes")
            told = self.job.comm.gather_facts({"values": values}, task="count its classes")
            return len({value for theirs in told for value in theirs["values"]})
        largest = int(y.max()) if y is not None and y.numel() and not y.is_complex() else -1
        return max(0, 1 + max(numbers[0] for numbers in self.job.gather_numbers("num_classes", [largest])))

    @property
    def global_ids(self) -> Tensor:
        """Global ids, int64 [num_rows], by local number. -1 marks the extra row of a rank without vertices."""
        begin, end = self.offsets[self.ranks.rank : self.ranks.rank + 2]
        none = torch.full((self.num_own - (end - begin),), -1, device="cpu")
        return torch.cat([torch.arange(begin, end, device="cpu"), none, self.inner, self.outer])

    def owner(self, ids: Tensor) -> Tensor:
        """Returns the rank that owns each of the global ids, int64 [n]."""
        return torch.searchsorted(torch.tensor(self.offsets, device="cpu"), ids, right=True) - 1

    # --- rows -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: rows of vertices, rows of edges, and masks of splits.
        rows, splits = (self.__dict__.get(each, {}) for each in ("node_rows", "splits"))
        columns = self.__dict__["lists"].columns if "lists" in self.__dict__ else {}
        if name in rows:
            return rows[name]
        if name in columns:
            if name not in self.edge_tensors:
                with torch.inference_mode(False):  # training needs these tensors too
                    pieces = [edges.rows(name) for edges in self._edges]
                    self.edge_tensors[name] = torch.cat(pieces).to(self.ranks.device)
            return self.edge_tensors[name]
        masks = {f"{split}_mask": numbers for split, numbers in splits.items()}
        if name in masks:
            mask = torch.zeros(self.num_own, dtype=torch.bool, device=self.ranks.device)
            mask[masks[name]] = True
            return mask
        known = "".join(f", {word}" for word in (*rows, *columns, *masks))
        raise AttributeError(f"this graph has no {name!r}; it has edge_index, n_id{known}")

    def in_plan(self, value: Any) -> Any:
        """Returns the value to use under this graph's plan, as the base class says.

        Raises:
            ValueError: ``value`` is another tensor with a row per edge of the part before the plan, and the plan adds
                edges.
        """
        base = self.base
        if base is None or not isinstance(value, Tensor):
            return value
        if value is base.edge_index:
            return self.edge_index
        for name, column in base.edge_tensors.items():
            if value is column:
                return getattr(self, name)
        edges, number = base.edge_index.size(1), self.edge_index.size(1)
        if edges != number and value.dim() and value.size(0) == edges and edges != self.num_own:
            raise ValueError(
                f"a tensor of edges needs {number} rows: {edges} for this rank's edges, and the others for edges of vertices that the plan recomputes "
                f"here. Got {list(value.shape)}; pass an attribute of the part, or give this tensor to plan_for as an argument"
            )
        return value

    def rows_of_inner(self, rows: Tensor) -> Tensor:
        """Returns [num_inner, ...]: this rank's ``rows`` [num_own, ...], then those of the vertices of other ranks that a plan keeps here. Collective.

        If ``rows`` is an attribute of the part, such as ``x``, the kept rows are fetched once, and again after a write. If it is another tensor, or needs a
        gradient, they are fetched at each call.
        """
        is_stored = any(rows is each for each in self.node_rows.values())
        if not is_stored or (rows.requires_grad and torch.is_grad_enabled()):
            return self._with_inner(rows)
        return self._kept.of([rows], "rows of inner", lambda: self._with_inner(rows))

    def _with_inner(self, rows: Tensor) -> Tensor:
        if self._inner_route is None:
            self._inner_route = Route.asking(self.ranks, self.inner.sort().values, self.offsets)
        fetched = self.ranks.fetch(rows, self._inner_route, "cached")
        return torch.cat([rows, fetched[self.inner.argsort().argsort().to(fetched.device)]])

    def planned(self, inner: Tensor, depths: Tensor, rows: Sequence[Tensor] | None = None) -> LocalGraph:
        """Returns this part under a plan: some vertices of other ranks are kept here. Collective.

        Args:
            inner, depths, rows: see the class; ``inner`` may be in any order. All ranks give ``rows`` for the same number of hops.
        """
        begin, end = self.offsets[self.ranks.rank : self.ranks.rank + 2]
        if bool(((inner >= begin) & (inner < end)).any()) or inner.unique().numel() != inner.numel():
            text = "inner must be ids of vertices of other ranks, without repetition"
            self.ranks.comm.report_failure(f"rank {self.ranks.rank}{self.ranks.comm.of}: {text}")
            raise ValueError(text)
        order = depths.argsort(descending=True, stable=True)
        return replace(self, inner=inner[order], depths=depths[order], rows=rows, base=self.base or self)
