"""Laws of shares: the shares of a batch are the batch, with every vertex and every edge once, and ranks agree on the rows that travel between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import random_data, random_hetero
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp import NeighborSampler
from salientpp.sampling.divided_batch import BatchShare, share_of, shares_of

RANKS = (1, 2, 3, 4, 7)
FANOUTS = ([4, 3, 2], [-1, -1], [5], [0, 3])


def batch_of(fanouts: list[int], seed: int, **options: Any) -> Any:
    data = random_data(300, 1500, seed=seed)
    seeds = torch.randint(300, (20,), generator=torch.Generator().manual_seed(seed))  # some seeds are given twice
    sampler = NeighborSampler(data, fanouts, **options)
    mfg = sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=seed)
    mfg.metadata = (torch.arange(1000, 1020), None)
    return mfg


def owners(mfg: Any, ranks: int, seed: int) -> Tensor:
    """Random places. Each third owner map leaves one rank without vertices."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(ranks, (300,), generator=generator)
    return (some.clamp(max=max(ranks - 2, 0)) if seed % 3 == 2 else some)[mfg.node]


def cases() -> list[tuple[list[int], int, int]]:
    return [(fanouts, ranks, 7 * i + ranks) for i, fanouts in enumerate(FANOUTS) for ranks in RANKS]


def halo_of(share: BatchShare, place: int, shares: list[BatchShare]) -> Tensor:
    """Ids of the vertices in the numbering of a share: own ones, and then those that the other ranks say they send."""
    ids = [share.node]
    for other in shares:
        begin = sum(other.share.send_counts[:place])
        ids.append(other.node[other.share.send[begin : begin + other.share.send_counts[place]]])
    return torch.cat(ids)


@pytest.mark.parametrize("fanouts, ranks, seed", cases())
def test_shares_are_the_batch_with_every_vertex_and_edge_once(fanouts, ranks, seed):
    mfg = batch_of(fanouts, seed)
    owner = owners(mfg, ranks, seed)
    shares = shares_of(mfg, owner, ranks)
    for place, share in enumerate(shares):
        mine, targets = owner == place, owner[mfg.col] == place
        assert torch.equal(share.node, mfg.node[mine])
        assert torch.equal(share.edge, mfg.edge[targets])
        ids = halo_of(share, place, shares)
        assert torch.equal(ids[share.row], mfg.node[mfg.row[targets]])
        assert torch.equal(ids[share.col], mfg.node[mfg.col[targets]])
        # Repeated seeds have the same id, so also compare the positions of the targets.
        assert torch.equal(mine.nonzero().view(-1)[share.col], mfg.col[targets])
        assert torch.equal(share.metadata[0], mfg.metadata[0][mine[:20]])
        assert share.metadata[1] is None
        assert share.share.num_vertices == mfg.node.numel()
        for tensor in (share.node, share.row, share.col, share.edge, share.share.send):
            assert tensor.dtype == torch.int64 and tensor.is_contiguous()


@pytest.mark.parametrize("fanouts, ranks, seed", cases())
def test_ranks_agree_on_the_rows_that_travel_and_send_only_those_that_edges_need(fanouts, ranks, seed):
    mfg = batch_of(fanouts, seed)
    owner = owners(mfg, ranks, seed)
    shares = shares_of(mfg, owner, ranks)
    for place, share in enumerate(shares):
        targets = owner[mfg.col] == place
        sources = mfg.row[targets].unique()
        at = [0]
        for other, theirs in enumerate(shares):
            assert share.share.received[other] == theirs.share.sent[place]
            needed = (
                sources[owner[sources] == other] if other != place else sources[:0]
            )  # ascending: in the order of the batch
            assert share.share.recv_counts[other] == needed.numel()
            positions = (owner == other).nonzero().view(-1)
            begin = sum(theirs.share.send_counts[:place])
            assert torch.equal(positions[theirs.share.send[begin : begin + needed.numel()]], needed)
            at.append(at[-1] + needed.numel())
        assert share.share.send.numel() == sum(share.share.send_counts)


@pytest.mark.parametrize("fanouts, ranks, seed", cases())
def test_numbers_within_hops_count_vertices_edges_and_rows_of_the_first_hops(fanouts, ranks, seed):
    mfg = batch_of(fanouts, seed)
    owner = owners(mfg, ranks, seed)
    hop = torch.arange(len(fanouts) + 1).repeat_interleave(torch.tensor(mfg.num_sampled_nodes))
    shares = shares_of(mfg, owner, ranks)
    for place, share in enumerate(shares):
        mine, targets = hop[owner == place], hop[mfg.col[owner[mfg.col] == place]]
        hops = range(len(fanouts) + 1)
        assert share.share.own == tuple(int((mine <= h).sum()) for h in hops)
        assert share.share.num_own == mine.numel()
        assert share.share.edges == tuple(int((targets <= h).sum()) for h in hops)
        assert share.num_sampled_nodes == [int((mine == h).sum()) for h in hops]
        assert share.num_sampled_edges == [int((targets == h).sum()) for h in hops[:-1]]
        begin = 0
        for other in range(ranks):
            of_rows = mine[share.share.send[begin : begin + share.share.send_counts[other]]]
            begin += share.share.send_counts[other]
            assert share.share.sent[other] == tuple(int((of_rows <= h).sum()) for h in hops)
            assert bool((of_rows.diff() >= 0).all())


def test_one_share_alone_equals_the_share_among_all():
    for fanouts, ranks, seed in cases():
        mfg = batch_of(fanouts, seed)
        owner = owners(mfg, ranks, seed).to(torch.int8)
        for place, expected in enumerate(shares_of(mfg, owner, ranks)):
            found = share_of(mfg, owner, ranks, place)
            for name in ("node", "row", "col", "edge"):
                assert torch.equal(getattr(found, name), getattr(expected, name))
            assert torch.equal(found.share.send, expected.share.send)
            for name in ("num_vertices", "own", "edges", "sent", "received"):
                assert getattr(found.share, name) == getattr(expected.share, name)


def test_one_rank_has_the_whole_batch():
    mfg = batch_of([4, 3, 2], 1)
    (share,) = shares_of(mfg, torch.zeros_like(mfg.node), 1)
    for name in ("node", "row", "col", "edge"):
        assert torch.equal(getattr(share, name), getattr(mfg, name))
    assert (share.num_sampled_nodes, share.num_sampled_edges) == (mfg.num_sampled_nodes, mfg.num_sampled_edges)
    assert share.share.send.numel() == 0 and share.share.sent == share.share.received == ((0, 0, 0, 0),)


def test_a_batch_without_seeds_has_empty_shares():
    mfg = batch_of([4, 3], 1)
    mfg.node, mfg.row, mfg.col, mfg.edge = (tensor[:0] for tensor in (mfg.node, mfg.row, mfg.col, mfg.edge))
    mfg.num_sampled_nodes, mfg.num_sampled_edges, mfg.metadata = [0, 0, 0], [0, 0], None
    for share in shares_of(mfg, mfg.node, 2):
        assert share.share.own == share.share.edges == (0, 0, 0)
        assert share.metadata is None


def test_batches_that_cannot_be_divided_are_errors():
    def divide(mfg: Any, owner: Tensor | None = None) -> None:
        shares_of(mfg, torch.zeros_like(mfg.node) if owner is None else owner, 2)

    with pytest.raises(
        ValueError, match="a batch with trees cannot be divided .* leave out disjoint=True and time_attr"
    ):
        divide(batch_of([2, 2], 0, disjoint=True))
    for kind in ("induced", "bidirectional"):
        with pytest.raises(ValueError, match="edges were sampled hop by hop .* use subgraph_type='directional'"):
            divide(batch_of([2, 2], 0, subgraph_type=kind))
    mfg = batch_of([2, 2], 0)
    n = mfg.node.numel()
    with pytest.raises(ValueError, match=f"one place for each of the {n} vertices of the batch, got \\(3,\\)"):
        divide(mfg, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="places from 0 to 1, got 0 to 2"):
        divide(mfg, torch.arange(n) % 3)
    mfg.metadata = (torch.arange(3), None)
    with pytest.raises(ValueError, match="entry for each of the 20 seeds of the batch, got \\(3,\\)"):
        divide(mfg)
    mfg.metadata, mfg.row, mfg.col = None, mfg.row[:0], mfg.col[:0]
    with pytest.raises(ValueError, match="edges of its hops to be divided, got 0; draw it with only_vertices=False"):
        divide(mfg)
    data = random_hetero()
    typed = NeighborSampler(data, [2]).sample_from_nodes(
        NodeSamplerInput(None, torch.arange(3), None, data.node_types[0]), key=1
    )
    with pytest.raises(ValueError, match="only a batch with one vertex type can be divided"):
        shares_of(typed, torch.zeros(3), 2)
