"""Decides which of a batch's missing rows arrive whole, and which arrive as sums that their owners compute.

Only rows of vertices that were first found in the last hop may be summed, because layers use these rows only to aggregate them into their neighbours. Each edge
from a vertex whose row is missing needs either this row or the sum for the edge's target. The choice is a vertex cover with the fewest bytes in the
bipartite graph of rows and sums. ``csrc/ways/plan_sums.cpp`` says how the cover is found. docs/explanation/traffic.md has the method and its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops

#: Reductions of rows, in the order of the kernel's numbers.
REDUCTIONS = ("sum", "mean", "max")

#: Values of the option ``partial_aggregation``; 'auto' is 'mean' if sums save enough.
PartialAggregation = Literal["auto", "sum", "mean", "max"] | None

#: 'auto' asks for sums if they need less than this fraction of the bytes. Choosing and computing sums takes time too.
WORTH_IT = 0.97


@dataclass(frozen=True, eq=False)
class AskedSums:
    """Requests for the sums that replace rows of a batch, as int64 vectors.

    All except the last two are grouped by the part that computes the sum, then by target.

    Attributes:
        target: positions in the batch of the vertices whose neighbours are summed; a vertex whose neighbours have several owners occurs once per owner.
        size: number of rows in each sum.
        source: global ids of these rows, sum after sum.
        edge: for each entry of ``source``, the id of the edge from it to the target; None if edges have no ids.
        groups, sources: [K], for each part, the number of sums that it computes, and the number of rows in these sums.
    """

    target: Tensor
    size: Tensor
    source: Tensor
    edge: Tensor | None
    groups: Tensor
    sources: Tensor


@dataclass(frozen=True)
class Wire:
    """Sizes in bytes, by which rows and sums are compared: of a row, of an id, and of a row's weight in a sum (0 without weights)."""

    row_bytes: int
    id_bytes: int
    weight_bytes: int = 0

    @property
    def source_bytes(self) -> int:
        """Bytes of the request for one row in a sum."""
        return self.id_bytes + self.weight_bytes

    @property
    def of_copies(self) -> Wire:
        """Sizes for sums that the host computes for its device: no ids and no weights travel."""
        return Wire(self.row_bytes, 0)

    def bytes_of(self, rows: int, sums: int = 0, sources: int = 0) -> int:
        """Returns the bytes of requests and answers for these numbers of rows, of sums, and of rows in sums."""
        return (self.row_bytes + self.id_bytes) * (rows + sums) + self.source_bytes * sources


def plan_sums(mfg: SamplerOutput, owner: Tensor, num_parts: int, wire: Wire) -> tuple[SamplerOutput, AskedSums]:
    """Replaces rows of a batch by sums where that saves bytes.

    Args:
        mfg: an MFG with one vertex type and with counts per hop; edges by target, in the order in which targets were found.
        owner: int64 [d], the part that owns the row of each vertex first found in the last hop, or -1 if the row is not fetched. It may also be
            the number of the tier that holds the row; ``num_parts`` is then the number of tiers.

    Returns:
        The MFG without the vertices and edges that sums replace, its other vertices in the same order; and the sums.
    """
    nodes, edges = mfg.num_sampled_nodes, mfg.num_sampled_edges
    first, first_edge = mfg.node.numel() - nodes[-1], mfg.row.numel() - edges[-1]
    kept_vertex, kept_edge, kept_row, target, size, summed_edge, groups, sources = ops.plan_sums(
        mfg.row[first_edge:].contiguous(), mfg.col[first_edge:].contiguous(), owner, first, num_parts, wire.row_bytes, wire.id_bytes,
        wire.source_bytes,
    )  # fmt: skip
    place = torch.cat([torch.arange(first, device="cpu"), kept_vertex + first])
    edge = torch.cat([torch.arange(first_edge, device="cpu"), kept_edge + first_edge])
    ends = torch.stack([torch.cat([mfg.row[:first_edge], kept_row]), mfg.col[edge]])
    left = SamplerOutput(
        node=mfg.node[place],
        row=ends.select(0, 0),
        col=ends.select(0, 1),
        edge=None if mfg.edge is None else mfg.edge[edge],
        num_sampled_nodes=[*nodes[:-1], kept_vertex.numel()],
        num_sampled_edges=[*edges[:-1], kept_edge.numel()],
        metadata=mfg.metadata,
    )
    summed = summed_edge + first_edge
    return left, AskedSums(
        target, size, mfg.node[mfg.row[summed]], None if mfg.edge is None else mfg.edge[summed], groups, sources
    )
