"""Division of a sampled batch into the shares of the ranks of a host.

Each rank gets its vertices, the edges into them, and lists of the rows that it sends and receives; see :mod:`salientpp.sampling.host_share`. Every vertex
and every edge of the batch is in exactly one share. The method is known as cooperative batching (GraNNDis; Song et al., PACT 2024, arXiv:2311.06837) and
split parallelism (GSplit; Polisetty et al., MLSys 2025, arXiv:2303.13775).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp.sampling.host_share import HostShare
from salientpp.sampling.topology import Mfg


@dataclass
class BatchShare(SamplerOutput):
    """One rank's share of a sampled batch. ``node`` and ``edge`` have only this rank's vertices and edges.

    Attributes:
        share: the place of the share in the whole batch, and the numbering of ``row`` and ``col``.
    """

    share: HostShare | None = None


def shares_of(mfg: Mfg, owner: Tensor, ranks: int) -> list[BatchShare]:
    """Divides a batch among the ranks of a host.

    Args:
        mfg: batch with one vertex type, hop by hop, as a topology samples it without trees. Its metadata are the ids and the times of the seeds, or None.
        owner: place of the rank that each vertex of the batch belongs to, in [0, ranks), of any integer dtype [n].
        ranks: number of ranks of the host.

    Returns:
        The share of each rank, in the order of the places. A share may have no vertices.

    Raises:
        ValueError: the batch cannot be divided, or ``owner`` does not fit it.
    """
    batch = _Batch.of(mfg, owner, ranks)
    return [batch.share(place) for place in range(ranks)]


def share_of(mfg: Mfg, owner: Tensor, ranks: int, place: int) -> BatchShare:
    """Returns one of the shares that :func:`shares_of` returns, with less work."""
    return _Batch.of(mfg, owner, ranks).share(place)


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch with the data that all shares need.

    Attributes:
        owner: int64 [n], place of each vertex.
        nodes_within, edges_within: numbers of vertices, and of edges into these vertices, within 0, 1, 2, ... hops of the seeds.
        owner_of_edge: uint8 or int16 [e], place of each edge's target.
        needed: bool [ranks, n], True if the rank has an edge from the vertex.
        placed: by place, own vertices int64 [m], ascending.
    """

    mfg: SamplerOutput
    ranks: int
    owner: Tensor
    nodes_within: Sequence[int]
    edges_within: Sequence[int]
    owner_of_edge: Tensor
    needed: Tensor
    placed: Sequence[Tensor]

    @classmethod
    def of(cls, mfg: Any, owner: Tensor, ranks: int) -> _Batch:
        _check(mfg, owner, ranks)
        num_vertices = mfg.node.numel()
        small = owner.to(torch.uint8 if ranks <= 256 else torch.int16)
        owner = owner.to(torch.int64)
        placed = owner.argsort(stable=True).split(owner.bincount(minlength=ranks).tolist())
        needed = torch.zeros(ranks * num_vertices, dtype=torch.bool, device="cpu")
        # The number of a pair (rank, source) is rank * n + source.
        needed[(owner * num_vertices).index_select(0, mfg.col).add_(mfg.row)] = True
        edges_within = list(accumulate(mfg.num_sampled_edges))
        return cls(
            mfg,
            ranks,
            owner,
            list(accumulate(mfg.num_sampled_nodes)),
            [*edges_within, edges_within[-1] if edges_within else 0],  # no edges lead to the vertices of the last hop
            small.index_select(0, mfg.col),
            needed.view(ranks, num_vertices),
            placed,
        )

    def share(self, place: int) -> BatchShare:
        mfg, own = self.mfg, self.placed[place]
        edges = (self.owner_of_edge == place).nonzero().view(-1)
        sent = [own[self.needed[other][own]] if other != place else own[:0] for other in range(self.ranks)]
        needed = self.needed[place]
        halo = [of_other[needed[of_other]] if other != place else own[:0] for other, of_other in enumerate(self.placed)]
        number = torch.empty_like(self.owner)
        members = torch.cat([own, *halo])
        number[members] = torch.arange(members.numel(), device="cpu")
        own_within, edges_within = self._within(own), _count_below(edges, self.edges_within)
        metadata = mfg.metadata
        if metadata is not None:
            seeds = own[: own_within[0]]
            metadata = tuple(None if value is None else value[seeds] for value in metadata)
        return BatchShare(
            node=mfg.node[own],
            row=number[mfg.row[edges]],
            col=number[mfg.col[edges]],
            edge=None if mfg.edge is None else mfg.edge[edges],
            batch=None,
            num_sampled_nodes=steps(own_within),
            num_sampled_edges=steps(edges_within)[: len(own_within) - 1],
            metadata=metadata,
            share=HostShare(
                self.mfg.node.numel(),
                own_within,
                edges_within,
                number[torch.cat(sent)],
                tuple(map(self._within, sent)),
                tuple(map(self._within, halo)),
            ),
        )

    def _within(self, vertices: Tensor) -> tuple[int, ...]:
        """Returns how many of some ascending vertices of the batch are within 0, 1, 2, ... hops of the seeds."""
        return _count_below(vertices, self.nodes_within)


def _check(mfg: Any, owner: Tensor, ranks: int) -> None:
    """Raises ValueError unless a batch can be divided by ``owner``."""
    if not isinstance(mfg, SamplerOutput):
        raise ValueError(
            f"only a batch with one vertex type can be divided among the ranks of a host, got {type(mfg).__name__}"
        )
    if mfg.batch is not None:
        raise ValueError(
            "a batch with trees cannot be divided among the ranks of a host, because a vertex may be in several trees; leave out disjoint=True and "
            "time_attr"
        )
    if mfg.num_sampled_nodes is None or mfg.num_sampled_edges is None or mfg.orig_row is not None:
        raise ValueError(
            "only a batch whose edges follow the hops can be divided among the ranks of a host; use subgraph_type='directional'"
        )
    edges, in_hops = mfg.row.numel(), sum(mfg.num_sampled_edges)
    if edges != in_hops:
        raise ValueError(
            f"the batch must have the {in_hops} edges of its hops to be divided, got {edges}; draw it with only_vertices=False"
        )
    if owner.shape != mfg.node.shape:
        raise ValueError(
            f"owner must have one place for each of the {mfg.node.numel()} vertices of the batch, got {tuple(owner.shape)}"
        )
    if owner.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < ranks:
        raise ValueError(f"owner must have places from 0 to {ranks - 1}, got {int(owner.min())} to {int(owner.max())}")
    for value in mfg.metadata or ():
        if value is not None and value.shape[:1] != (mfg.num_sampled_nodes[0],):
            raise ValueError(
                f"the metadata must have an entry for each of the {mfg.num_sampled_nodes[0]} seeds of the batch, got {tuple(value.shape)}; a batch of "
                "edges as seeds cannot be divided"
            )


def _count_below(ascending: Tensor, limits: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each limit, how many of some ascending numbers are below it."""
    return tuple(torch.searchsorted(ascending, torch.tensor(limits, dtype=torch.int64, device="cpu")).tolist())


def steps(totals: Sequence[int]) -> list[int]:
    """Returns the differences between running totals; the first total counts from 0."""
    return [after - before for before, after in zip([0, *totals], totals)]
