"""A graph as one of several ranks sees it when they compute a model together.

Every rank computes the rows of its own vertices. Edges into them also come from vertices of other ranks (the halo), whose rows arrive before each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Ranks, Route

#: A function of edges int64 [2, e], their weights [e] or None, and a number n of vertices. It returns a value of each vertex, [n].
Summing: TypeAlias = Callable[[Tensor, "Tensor | None", int], Tensor]


@dataclass(frozen=True, eq=False)
class Hop:
    """Says which rows of other ranks a rank fetches before it aggregates along the edges of one hop.

    Attributes:
        route: brings rows of the halo.
        slots: int64 [route.num_received], the position of each received row in the table of the rows of all sources.
        level: first hop that fetches these rows. At this hop, a kept row is available here if at least ``level`` of its layers are recomputed.
        has_sums: True if some rank gets sums instead of some rows at this hop. Only layers that are matrix products can use sums. Other layers then fetch
            the whole halo.
    """

    route: Route
    slots: Tensor
    level: int = 0
    has_sums: bool = False


class RankGraph:
    """Graph as a distributed model sees it on one rank: own vertices, the edges into them, and how halo rows arrive.

    Attributes:
        ranks: the ranks that exchange rows of vertices in a step.
        n_id: int64, global ids of this rank's vertices.
        inner: int64 [r], global ids of other ranks' vertices whose rows are kept here. They follow the rank's own in every table of rows.
        outer: int64 [h], global ids of the halo's other vertices.
        edge_index: int64 [2, e], edges into the rank's own and the kept vertices, in the local numbers of the tables of rows.
        edge_tensors: edge attributes that were read so far, by name.
        hops: for each hop, the rows to fetch; the last entry serves all further hops.
        whole_halo: fetches the rows of all vertices of ``inner`` and ``outer``.
    """

    ranks: Ranks
    n_id: Tensor
    inner: Tensor
    outer: Tensor
    edge_index: Tensor
    edge_tensors: dict[str, Tensor]
    hops: list[Hop]
    whole_halo: Hop

    @property
    def job(self) -> Ranks:
        """The ranks that train the model together. Losses and gradients of parameters are summed over them."""
        return self.ranks

    @property
    def averaging(self) -> Ranks:
        """The ranks over whose vertices batch normalisation takes means and variances."""
        return self.job

    @property
    def num_counted(self) -> int:
        """Number of this rank's rows that count in statistics. They come first. Each vertex counts on one rank only."""
        return self.n_id.numel()

    @property
    def num_seeds(self) -> int | None:
        """Number of this rank's seeds in a batch; None in full-graph training. The rows of the seeds come first."""
        return None

    @property
    def num_vertices(self) -> int:
        """Number of vertices that count in statistics, on all ranks of :attr:`averaging` together."""
        raise NotImplementedError

    def over_all_edges(
        self, compute: Summing, edge_index: Tensor, edge_weight: Tensor | None, what: Hashable
    ) -> Tensor:
        """Computes a value for each vertex from all edges into it, such as its degree. Collective.

        Args:
            what: name of the computation, under which its result may be kept and used again.
            compute: function of edges, their weights (or None) and a number of vertices; returns one value per vertex.
            edge_index, edge_weight: edges of this graph, and their weights.

        Returns:
            The values [num_inner]. They are correct for the rank's own vertices.
        """
        return compute(edge_index, edge_weight, self.num_inner)

    @property
    def is_planned(self) -> bool:
        """True if this rank may keep rows of other ranks' vertices, or get sums instead of rows."""
        return False

    @property
    def num_own(self) -> int:
        """Number of this rank's own rows in a table: one for each of its vertices, or 1 for a rank without vertices."""
        return max(1, self.n_id.numel())

    @property
    def num_inner(self) -> int:
        """Number of rows that the model computes here: rows of this rank's vertices, and of kept ones."""
        return self.num_own + self.inner.numel()

    @property
    def num_targets(self) -> int:
        """Number of rows that the running layer computes. It may be less than :attr:`num_inner` in a trimmed model."""
        return self.num_inner

    @property
    def num_rows(self) -> int:
        """Number of rows in the table of sources: :attr:`num_inner`, and the rest of the halo."""
        return self.num_inner + self.outer.numel()

    def with_halo(self, rows: Tensor, hop: Hop, arrived: Tensor) -> Tensor:
        """Returns the table of sources [num_rows, ...]: ``rows`` [num_inner, ...], and ``arrived`` at ``hop.slots``."""
        if arrived.size(0) == self.outer.numel() and not self.inner.numel():
            return torch.cat([rows, arrived])  # then the fetched rows fill all slots, in order
        empty = rows.new_zeros((self.outer.numel(), *rows.shape[1:]))
        return torch.cat([rows, empty]).index_copy(0, hop.slots, arrived)

    def in_plan(self, value: Any) -> Any:
        """Returns the value to use under this graph's plan.

        ``edge_index`` and edge attributes of the same part as it was before the plan are replaced by this graph's.
        Any other value is returned as it is.
        """
        return value

    def own_rows(self, out: Tensor) -> Tensor:
        """Returns the first rows of a model's result: without the rows of other ranks' vertices that a plan keeps."""
        if not self.inner.numel() or self.num_inner not in out.shape:
            return out
        if out.size(0) != self.num_inner:
            raise ValueError(
                f"under a plan the model must return rows of vertices in the first dimension, got {list(out.shape)}, which has the {self.num_inner} vertices "
                f"here ({self.num_own} of them this rank's) in another dimension"
            )
        return out[: self.num_own]

    def of_whole_halo(self, rows: Tensor) -> Tensor:
        """Returns the table of sources, [num_rows, ...]: this rank's ``rows``, and rows of all others. Collective."""
        arrived = self.ranks.fetch(rows, self.whole_halo.route, "normalisation")
        return self.with_halo(rows, self.whole_halo, arrived)
