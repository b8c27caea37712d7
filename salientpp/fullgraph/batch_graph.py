"""Makes a graph for a distributed model from one rank's share of a batch that several ranks compute together."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from salientpp.batch.edges import BatchEdges
from salientpp.fullgraph.exchange import Ranks, Route
from salientpp.fullgraph.normalise import Helpers
from salientpp.fullgraph.rank_graph import Hop, RankGraph, Summing
from salientpp.sampling.edge_lists import EdgeLists, group_edges
from salientpp.sampling.host_share import HostShare


@dataclass(eq=False)
class BatchGraph(RankGraph):
    """One rank's share of a batch that a host's ranks compute together: the rank's vertices, and the edges into them.

    The graph may have only the vertices within some hops of the seeds. Many layers cannot be called without rows. So a
    share without vertices gets one vertex with a self-loop; its row is removed from the output. If a share has
    vertices, but none within the hops, the graph has the first vertex of the share. No other rank receives the row of
    this vertex.

    Attributes:
        ranks: the ranks of the host.
        all_ranks: the ranks that train the model together.
        share: this rank's share.
        edge_index: int64 [2, e], edges into own vertices, in the numbers of the share; for a share without vertices,
            the self-loop.
        within: number of hops of the graph around the seeds; None: the whole share.
        whole: the graph of the whole share, which holds this one; None: this graph.
        edge_weight: the weights of all edges of the share. A layer that gets only the edges within some hops takes
            their weights from here.
        targets: number of own vertices that the running layer computes, if it takes rows of sources and of targets separately; None: all.
    """

    ranks: Ranks
    all_ranks: Ranks
    share: HostShare
    edge_index: Tensor
    within: int | None = None
    whole: weakref.ref[BatchGraph] | None = None
    edge_weight: Tensor | None = None
    targets: int | None = None
    _smaller: dict[int, BatchGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        share, hop, device = self.share, -1 if self.within is None else self.within, self.edge_index.device
        self.inner = torch.empty(0, dtype=torch.int64, device="cpu")
        self.edge_tensors = {}
        send_counts = [of_rank[hop] for of_rank in share.sent]
        self.recv_counts = [of_rank[hop] for of_rank in share.received]
        self.num_edges = self.edges_within(len(share.edges) if self.within is None else hop - 1)
        send = share.send
        if self.within is not None:
            pieces = zip(send.split(share.send_counts), send_counts, strict=True)
            send = torch.cat([rows[:number] for rows, number in pieces])
            if share.num_own:
                self.edge_index = self._renumbered(self.edge_index[:, : self.num_edges])
        route = Route(send.to(device), send_counts, self.recv_counts)
        self.whole_halo = Hop(route, torch.arange(sum(self.recv_counts), device=device))
        self.hops = [self.whole_halo]
        self.helpers = Helpers(self)

    def _renumbered(self, edges: Tensor) -> Tensor:
        """Renumbers edges [2, e]: from rows of the whole share to rows of this graph, whose halo is smaller."""
        share = self.share
        begins = torch.tensor([*accumulate(share.recv_counts, initial=0)][:-1], device=edges.device)
        now = torch.tensor([*accumulate(self.recv_counts, initial=0)][:-1], device=edges.device)
        in_halo = edges[0] - share.num_own
        group = torch.bucketize(in_halo, begins, right=True).sub_(1).clamp_(min=0)
        source = torch.where(in_halo < 0, edges[0], in_halo + (now - begins + self.num_own)[group])
        return torch.stack([source, edges[1]])

    def within_hops(self, hops: int) -> BatchGraph:
        """Returns a smaller graph, for a layer whose input rows are needed only within ``hops`` >= 1 hops of the seeds.

        It has own and halo vertices within ``hops`` hops, and edges into own vertices within ``hops - 1`` hops.
        """
        if hops >= len(self.share.own) - 1:
            return self
        if hops not in self._smaller:
            self._smaller[hops] = BatchGraph(
                self.ranks, self.all_ranks, self.share, self.edge_index, hops, weakref.ref(self)
            )
        return self._smaller[hops]

    def own_within(self, hops: int) -> int:
        """Returns the number of own rows within ``hops`` hops of the seeds."""
        return max(1, self.share.own[min(hops, len(self.share.own) - 1)])

    def edges_within(self, hops: int) -> int:
        """Returns the number of edges into those own vertices that lie within ``hops`` hops of the seeds."""
        return self.share.edges[min(hops, len(self.share.edges) - 1)] if self.share.num_own else 1

    def lists_of(self, edges: Tensor) -> tuple[EdgeLists, Tensor | None]:
        """Groups edges [2, e] by target. Also returns the column of each grouped edge in ``edges``, or None if no edge moved."""
        if isinstance(edges, BatchEdges) and edges.is_given:
            made = edges.hops.lists(edges.relation)  # threads of the loader may have made them
            if made is not None and made.num_sources == self.num_rows:
                return made.to(edges.device), None
        host, order = edges.cpu(), None
        lists = group_edges(host, self.num_rows, self.num_own)
        if lists is None:
            order = self._with_loops_last(host)
            order = host[1].argsort(stable=True) if order is None else order
            lists, order = group_edges(host[:, order], self.num_rows, self.num_own), order.to(edges.device)
        if lists is None:
            raise ValueError(
                f"edges of a layer must lead from 0 to {self.num_rows - 1} to 0 to {self.num_own - 1}, the vertices of this rank's share, got "
                f"{int(host.min())} to {int(host.max())}; pass batch.edge_index as the loader returned it"
            )
        return lists.to(edges.device), order

    def _with_loops_last(self, edges: Tensor) -> Tensor | None:
        """Returns the order by target of edges [2, e], if they are sorted edges and then one self-loop for each target. Else None.

        It saves a sort: layers that add self-loops append them.
        """
        number = self.num_targets
        first, loops = edges[:, :-number], edges[:, -number:]
        own = torch.arange(number, device="cpu")
        if not bool((loops == own).all()) or not bool((first[1].diff() >= 0).all()):
            return None
        place = torch.cat([torch.arange(first.size(1), device="cpu") + first[1], own])
        place[first.size(1) :] += torch.bincount(first[1], minlength=number).cumsum(0)
        order = torch.empty_like(place)
        order[place] = torch.arange(place.numel(), device="cpu")
        return order

    def over_all_edges(
        self, compute: Summing, edge_index: Tensor, edge_weight: Tensor | None, what: Hashable
    ) -> Tensor:
        whole = None if self.whole is None else self.whole()
        if whole is None:
            return compute(edge_index, edge_weight, self.num_inner)
        make = lambda: compute(whole.edge_index, self.edge_weight, whole.num_inner)  # noqa: E731
        values = make() if self.edge_weight is not None else whole.helpers.kept.of([None], ("all edges", what), make)
        return values[: self.num_inner]

    @property
    def job(self) -> Ranks:
        return self.all_ranks

    @property
    def averaging(self) -> Ranks:
        """The ranks of the host, whose vertices batch normalisation averages over.

        These ranks compute one batch together, and in one process too, batch normalisation takes its statistics from one batch.
        """
        return self.ranks

    @property
    def num_counted(self) -> int:
        return self.share.own[-1 if self.within is None else self.within]

    @property
    def num_seeds(self) -> int:
        return self.share.own[0]

    @property
    def num_vertices(self) -> int:
        return self.share.num_vertices

    @property
    def num_own(self) -> int:
        return max(1, self.num_counted)

    @property
    def num_targets(self) -> int:
        return self.num_inner if self.targets is None else self.targets

    @property
    def num_rows(self) -> int:
        return self.num_own + sum(self.recv_counts)

    def with_halo(self, rows: Tensor, hop: Hop, arrived: Tensor) -> Tensor:
        # Among several ranks the result must depend on `arrived` even without rows, so that this rank takes part in the exchange of gradients.
        return rows if self.ranks.size == 1 else torch.cat([rows, arrived])
