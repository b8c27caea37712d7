"""Decides which rows that a batch lacks come whole, and which as sums that their owners make.

Only rows of vertices that were first found in the last hop may be summed up, since no layer needs these rows but for those of their neighbours. Every edge to
one that this rank lacks is served by its source's row or by a sum of its target's: a vertex cover of least bytes of the bipartite graph of rows and sums.
``csrc/ways/plan_sums.cpp`` says how it is chosen. docs/concepts.md (sums in the place of rows) has the method and its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops

#: How rows are put into one, in the order of the kernel's numbers.
REDUCTIONS = ("sum", "mean", "max")

#: What a loader may be asked for; 'auto' is 'mean' where it is worth it.
PartialAggregation = Literal["auto", "sum", "mean", "max"] | None

#: 'auto' asks for sums where they leave less than this part of the bytes: choosing them, and summing up, takes time too.
WORTH_IT = 0.97


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums that a rank asks for in a batch, int64 vectors; all but the last two by owner, and in it by target.

    Attributes:
        target: positions in the batch of the vertices whose neighbours they are; once for each owner that has some.
        size: how many rows each sums up.
        source: global ids of these rows, one sum's after the other's.
        edge: ids of the edges that they came by; None where edges have none.
        groups, sources: [K], how many sums, and rows in them, each part makes.
    """

    target: Tensor
    size: Tensor
    source: Tensor
    edge: Tensor | None
    groups: Tensor
    sources: Tensor


@dataclass(frozen=True)
class Wire:
    """What travels for a row: its bytes, those of an id, and of the weight of a row in a sum, 0 without weights."""

    row_bytes: int
    id_bytes: int
    weight_bytes: int = 0

    @property
    def source_bytes(self) -> int:
        """What is asked for a row in a sum."""
        return self.id_bytes + self.weight_bytes

    @property
    def of_copies(self) -> Wire:
        """To a device: what is copied is not asked for."""
        return Wire(self.row_bytes, 0)

    def bytes_of(self, rows: int, sums: int = 0, sources: int = 0) -> int:
        """Of so many rows, sums, and rows in sums: what is asked for and what is answered."""
        return (self.row_bytes + self.id_bytes) * (rows + sums) + self.source_bytes * sources


def plan_sums(mfg: SamplerOutput, owner: Tensor, num_parts: int, wire: Wire) -> tuple[SamplerOutput, Sums]:
    """What is left of a batch when sums have replaced what they may.

    Args:
        mfg: of vertices of one type, with counts per hop; edges by target, in the order in which targets were found.
        owner: int64 [d], the part that the rows of vertices first found in the last hop are fetched from, -1 for none; or which of so many kinds of memory
            has them.

    Returns:
        The MFG without the vertices and edges that sums replace, whose other vertices keep their order; and the sums.
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
    return left, Sums(
        target, size, mfg.node[mfg.row[summed]], None if mfg.edge is None else mfg.edge[summed], groups, sources
    )
