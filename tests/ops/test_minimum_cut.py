"""Laws of minimum cuts: they equal the reference's, keep infinite arcs whole, and are found in graphs of many arcs."""

from __future__ import annotations

import pytest
import reference
import torch
from operator_cases import NONE, long
from rare import rare

from salientpp import ops


def random_graph(seed: int, nodes: int, arcs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tail, head = torch.randint(nodes, (2, arcs), generator=draw)
    return tail, head, torch.randint(0, 6, (arcs,), generator=draw).double()


@pytest.mark.parametrize("seed", range(60))
def test_a_cut_equals_the_cheapest_of_all_sets(seed):
    nodes = 3 + seed % 8
    tail, head, capacity = random_graph(seed, nodes, 4 + 3 * nodes)
    # Arcs from the source to other nodes are cut if need be; some arcs elsewhere must stay whole.
    capacity[(tail != 0) & (head != nodes - 1) & (torch.arange(tail.numel()) % 3 == 0)] = torch.inf
    arcs = [*zip(tail.tolist(), head.tolist(), capacity.tolist())]
    expected = reference.minimum_cut(arcs, nodes, 0, nodes - 1)
    assert ops.minimum_cut(tail, head, capacity, nodes, 0, nodes - 1).tolist() == expected, seed


def test_fractions_of_very_different_sizes_are_cut_exactly():
    # A thousand paths of two arcs. Each is cut at the smaller arc, although the sizes differ by factors of millions.
    draw = torch.Generator().manual_seed(0)
    first, second = 10 ** (-9 + 6 * torch.rand(2, 1000, generator=draw, dtype=torch.float64))
    middle = torch.arange(1000) + 2
    tail = torch.cat([torch.zeros_like(middle), middle])
    head = torch.cat([middle, torch.ones_like(middle)])
    side = ops.minimum_cut(tail, head, torch.cat([first, second]), 1002, 0, 1)
    assert torch.equal(side[2:], first > second) and side[:2].tolist() == [True, False]


@pytest.mark.parametrize("size", [20_000, *rare(200_000)])
def test_a_cut_is_at_most_that_of_either_side_in_a_large_graph(size):
    # Random sources and targets with a cost each. The cut is a cover of least cost; its dual is a flow through the edges.
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randint(size, (2, 7 * size // 2), generator=draw)
    costs = torch.rand(2 * size, generator=draw, dtype=torch.float64)
    every = torch.arange(size)
    tail = torch.cat([torch.full((size,), 2 * size), left, every + size])
    head = torch.cat([every, right + size, torch.full((size,), 2 * size + 1)])
    capacity = torch.cat([costs[:size], torch.full(left.shape, torch.inf).double(), costs[size:]])
    side = ops.minimum_cut(tail, head, capacity, 2 * size + 2, 2 * size, 2 * size + 1)
    assert bool((~side[left] | side[right + size]).all()), "an edge is covered at neither end"
    cost = float(costs[:size][~side[:size]].sum() + costs[size:][side[size : 2 * size]].sum())
    used = torch.zeros(2 * size, dtype=torch.bool).index_fill_(0, torch.cat([left, right + size]), True)
    assert cost < 0.95 * min(float(costs[:size][used[:size]].sum()), float(costs[size:][used[size:]].sum()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head": NONE}, "tail, head and capacity must have one entry per arc, got 2, 0 and 2"),
        ({"capacity": torch.tensor([1.0, -1.0]).double()}, r"capacity\[1\] must be >= 0, got -1"),
        ({"capacity": torch.tensor([1.0, torch.nan]).double()}, r"capacity\[1\] must be >= 0, got nan"),
        ({"capacity": torch.ones(2)}, "capacity must have dtype Double, got Float"),
        ({"capacity": torch.full((2,), torch.inf).double()}, "every cut has infinite capacity"),
        ({"tail": long(0, 3)}, r"tail\[1\] must be in \[0, 3\), got 3"),
        ({"sink": 0}, "source and sink must be different nodes, got 0 for both"),
        ({"source": -1}, r"source must be in \[0, 3\), got -1"),
        ({"num_nodes": 2**31}, r"num_nodes must be in \[0, 2\^31 - 1\)"),
    ],
)
def test_wrong_arguments_of_cuts_are_refused(change, text):
    right = {"tail": long(0, 1), "head": long(1, 2), "capacity": torch.ones(2).double()}
    with pytest.raises(RuntimeError, match=text):
        ops.minimum_cut(**{**right, "num_nodes": 3, "source": 0, "sink": 2, **change})
