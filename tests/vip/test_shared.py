"""Laws of inclusion probabilities of shared draws, checked against known integrals and against counts."""

from __future__ import annotations

import pytest
import torch
from graphs import random_data
from samplers import Sampler

from salientpp import Graph
from salientpp.ops import join_key
from salientpp.vip import shared as shared_vip
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.shared import block_probability, shared_inclusion_probability


def complete(num_centres: int, num_leaves: int) -> Graph:
    """Makes a graph in which every centre lists all leaves; leaves come after the centres."""
    centre = torch.arange(num_centres).repeat_interleave(num_leaves)
    leaf = num_centres + torch.arange(num_leaves).repeat(num_centres)
    return Graph.from_edge_index(torch.stack([leaf, centre]), num_centres + num_leaves)


@pytest.mark.parametrize("degree, fanout", [(2, 1), (7, 3), (40, 5), (500, 5), (1000, 15)])
def test_the_mean_draw_probability_is_fanout_over_degree(degree, fanout):
    nodes, weights = shared_vip._quadrature()
    chance = [shared_vip._draw_probability(torch.tensor([degree]), fanout, r).item() for r in nodes.tolist()]
    assert sum(w * g for w, g in zip(weights.tolist(), chance)) == pytest.approx(fanout / degree, rel=0.01)
    assert chance == sorted(chance, reverse=True)  # the nodes ascend
    for r, g in zip(nodes.tolist(), chance):
        exact = torch.distributions.Binomial(degree - 1, torch.tensor(r).double())
        assert g == pytest.approx(exact.log_prob(torch.arange(fanout).double()).exp().sum().item(), abs=1e-9)


def test_centres_with_the_same_list_draw_hardly_more_than_one_of_them():
    # Either all 30 centres draw a leaf, or none does. The formula gives a little more than one centre's draws, because it takes draws given r as independent.
    shared = shared_inclusion_probability(complete(30, 20), torch.arange(30), [2], 30)[30:]
    alone = inclusion_probability(complete(30, 20), torch.arange(30), [2], 30)[30:]
    assert alone.min() > 0.9 and shared.max() < 0.35 and shared.min() >= 0.1


def test_one_centre_is_exact_and_unshared_lists_equal_plain_draws():
    one = complete(1, 20)
    assert shared_inclusion_probability(one, torch.tensor([0]), [5], 1)[1:] == pytest.approx(0.25, rel=0.01)
    for graph, fanouts in ((complete(3, 1001), [5]), (complete(3, 20), [-1]), (complete(3, 20), [20]), (one, [0])):
        seeds = torch.arange(3 if graph is not one else 1)
        want = inclusion_probability(graph, seeds, fanouts, 2, include_seeds=True)
        got = shared_inclusion_probability(graph, seeds, fanouts, 2, include_seeds=True)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)


def counts(graph: Graph, seeds: torch.Tensor, fanouts: list[int], batch: int, block: int, shared: bool, number: int):
    """Counts how often a block needs each row, over ``number`` blocks, without the seeds of its batches."""
    seen = torch.zeros(graph.num_vertices)
    for k in range(number):
        generator = torch.Generator().manual_seed(k)
        order = seeds[torch.randperm(seeds.numel(), generator=generator)[: batch * block]]
        needed = torch.zeros(graph.num_vertices, dtype=torch.bool)
        for ids in order.split(batch):
            out = Sampler(graph, fanouts, shared=shared).sample(ids, join_key(9, k))
            needed[out.node[ids.numel() :]] = True
        seen += needed
    return seen / number


@pytest.mark.parametrize("shared, block", [(None, 1), ("batch", 1), (None, 6), ("batch", 6)])
def test_expected_rows_are_near_the_counted_rows(shared, block):
    graph = Graph.from_data(random_data(800, 12_000))
    seeds = torch.randperm(800, generator=torch.Generator().manual_seed(1))[:300]
    fanouts, batch = [4, 3], 12
    counted = counts(graph, seeds, fanouts, batch, block, shared is not None, 250)
    expected = block_probability(graph, seeds, fanouts, batch, block, shared)
    ratio = (expected.sum() / counted.sum()).item()
    print(shared, block, ratio)
    assert 0.85 < ratio < 1.2
    order = expected.argsort().view(8, -1)  # starts with the rows that are needed least
    by_group = expected[order].sum(1) / counted[order].sum(1)
    print(by_group.tolist())
    assert (by_group > 0.75).all() and (by_group < 1.35).all()
    if shared:  # a forecast that ignores sharing is farther off
        other = block_probability(graph, seeds, fanouts, batch, block, None).sum() / counted.sum()
        assert other > 1.1 * ratio


@pytest.mark.parametrize("fanouts", [[5, 3, 2], [4, 4], [6]])
def test_a_block_with_shared_numbers_needs_as_many_rows_as_one_batch(fanouts):
    graph = Graph.from_data(random_data(800, 12_000))
    for key in range(10):
        seeds = torch.randperm(800)[:60]
        sampler = Sampler(graph, fanouts, shared=True)
        together = set(sampler.sample(seeds, key).node.tolist())
        one_by_one = set().union(*(sampler.sample(ids, key).node.tolist() for ids in seeds.split(12)))
        assert together == one_by_one


def test_bad_arguments_are_refused():
    graph = complete(2, 3)
    for wrong in (dict(seeds=torch.tensor([9])), dict(batch_size=0), dict(num_neighbors=[-2]), dict(draw_block=0)):
        given = dict(seeds=torch.tensor([0]), num_neighbors=[2], batch_size=1, draw_block=2, shared_draws="batch")
        with pytest.raises(ValueError):
            block_probability(graph, **{**given, **wrong})
