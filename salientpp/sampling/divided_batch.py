"""Divides a sampled batch among the ranks of a host, which then compute it together.

Each rank gets a share: its vertices, the edges into them, and lists of the rows that it sends and receives; see :mod:`salientpp.sampling.host_share`. Every
vertex and every edge of the batch is in exactly one share. The method is known as cooperative batching (GraNNDis; Song et al., PACT 2024, arXiv:2311.06837)
and split parallelism (GSplit; Polisetty et al., MLSys 2025, arXiv:2303.13775).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.sampling.host_share import LISTED_SEEDS, HostShare, WholeBatch
from salientpp.sampling.topology import Mfg


@dataclass
class BatchShare(SamplerOutput):
    """Part of a sampled batch that one rank of a host computes. ``node`` and ``edge`` have only this rank's vertices and edges.

    Attributes:
        share: the rows that the rank sends and receives, the numbering of ``row`` and ``col``, and a description of the whole batch.
    """

    share: HostShare | None = None


def shares_of(mfg: Mfg, owner: Tensor, ranks: int) -> list[BatchShare]:
    """Divides a batch among the ranks of a host.

    Args:
        mfg: sampled batch with one vertex type, without trees, whose edges were sampled hop by hop. Its metadata are
            the ids and the times of the seeds, or None.
        owner: for each vertex of the batch, the index on the host of the rank that it belongs to, in [0, ranks); any integer dtype [n].
        ranks: number of ranks of the host.

    Returns:
        The share of each rank, by its index on the host. A share may have no vertices.

    Raises:
        ValueError: the batch cannot be divided, or ``owner`` does not fit it.
    """
    return _divide(mfg, owner, ranks, range(ranks))


def share_of(mfg: Mfg, owner: Tensor, ranks: int, place: int) -> BatchShare:
    """Returns the entry ``place`` of :func:`shares_of`, without the work for the other ranks. ``place`` is the index of a rank on its host."""
    return _divide(mfg, owner, ranks, range(place, place + 1))[0]


def _divide(mfg: Any, owner: Tensor, ranks: int, places: range) -> list[BatchShare]:
    """Returns the shares of the ranks with the indices ``places`` on the host: all ranks, or one."""
    _check(mfg, owner, ranks)
    edges_within = list(accumulate(mfg.num_sampled_edges))
    divided = ops.divide_batch(
        mfg.node,
        mfg.row.contiguous(),
        mfg.col.contiguous(),
        mfg.edge,
        owner.to(torch.int64),
        list(accumulate(mfg.num_sampled_nodes)),
        [*edges_within, edges_within[-1] if edges_within else 0],  # no edges lead to the vertices of the last hop
        ranks,
        -1 if len(places) == ranks else places[0],
    )
    own, edges, sent = divided.own.tolist(), divided.edges.tolist(), divided.sent.tolist()
    of_seeds, seeds = owner[: mfg.num_sampled_nodes[0]], mfg.node[: mfg.num_sampled_nodes[0]]
    digest = zlib.crc32(repr((own, edges, sent)).encode(), zlib.crc32(seeds.contiguous().numpy().data))
    whole = WholeBatch(seeds.numel(), tuple(seeds[:LISTED_SEEDS].tolist()), digest)
    shares = []
    for number, place in enumerate(places):
        metadata = mfg.metadata
        if metadata is not None:
            metadata = tuple(None if value is None else value[of_seeds == place] for value in metadata)
        shares.append(
            BatchShare(
                node=divided.node[number],
                row=divided.row[number],
                col=divided.col[number],
                edge=None if mfg.edge is None else divided.edge[number],
                num_sampled_nodes=steps(own[place]),
                num_sampled_edges=steps(edges[place])[:-1],
                metadata=metadata,
                share=HostShare(
                    mfg.node.numel(),
                    tuple(own[place]),
                    tuple(edges[place]),
                    divided.send[number],
                    tuple(map(tuple, sent[place])),
                    tuple(tuple(of_rank[place]) for of_rank in sent),
                    whole,
                ),
            )
        )
    return shares


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
            "only a batch whose edges were sampled hop by hop can be divided among the ranks of a host; use subgraph_type='directional'"
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


def steps(totals: Sequence[int]) -> list[int]:
    """Returns the numbers that were added up to running totals: [2, 3, 4] for [2, 5, 9]."""
    return [after - before for before, after in zip([0, *totals], totals)]
