"""Laws of edge lists: they hold the edges of a batch, by target and by source, and with PyG's self-loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops

from salientpp import ops
from salientpp.sampling.edge_lists import EdgeLists, group_by_source_composed, group_edges, with_self_loops


def random_edges(seed: int, num_sources: int, num_targets: int, num_edges: int) -> Tensor:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(max(num_targets, 1), (num_edges,), generator=generator).sort().values
    return torch.stack([torch.randint(max(num_sources, 1), (num_edges,), generator=generator), target])


SIZES = [(9, 6, 20), (1, 1, 3), (5, 3, 0), (0, 0, 0), (300, 200, 1000), (4, 4, 60)]


def grouped(edge_index: Tensor, num_sources: int, num_targets: int) -> EdgeLists:
    lists = group_edges(edge_index, num_sources, num_targets)
    assert lists is not None
    return lists


@pytest.mark.parametrize("num_sources, num_targets, num_edges", SIZES)
def test_lists_hold_the_edges_by_target_and_by_source(num_sources, num_targets, num_edges):
    source, target = edge_index = random_edges(1, num_sources, num_targets, num_edges)
    lists = grouped(edge_index, num_sources, num_targets)
    assert (lists.num_targets, lists.num_sources, lists.edge) == (num_targets, num_sources, None)
    assert lists.source.data_ptr() == source.data_ptr() and torch.equal(lists.source, source), "no copy"
    assert lists.indptr.tolist() == [int((target < t).sum()) for t in range(num_targets + 1)]
    assert [lists.num_places(t) for t in range(num_targets + 1)] == lists.indptr.tolist()

    indptr, by_target, place = lists.by_source
    order = source.argsort(stable=True)
    assert indptr.tolist() == [int((source < s).sum()) for s in range(num_sources + 1)]
    assert torch.equal(place, order.int()) and torch.equal(by_target, target[order].int())
    assert lists.by_source[2] is place, "made once"
    for narrow in (lists.source, lists.source.int()):
        composed = group_by_source_composed(lists.indptr, narrow, num_sources)
        for a, b in zip(composed, ops.group_by_source(lists.indptr, narrow, num_sources)):
            assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (0, 0)],  # targets do not ascend
        [(0, 0), (0, 3)],  # a target is too large
        [(0, -1), (0, 0)],
        [(4, 0)],  # a source is too large
        [(-1, 0), (0, 1)],
        [(0, 0), (-(2**63), 1)],
        [(2**63 - 1, 0), (0, 1)],
        [(0, -(2**63)), (0, 2**63 - 1)],
        [(0, 2**63 - 1), (0, -(2**63))],
    ],
)
def test_edges_in_other_orders_are_not_grouped(edges):
    assert group_edges(torch.tensor(edges).t(), 4, 3) is None


@pytest.mark.parametrize("num_sources, num_targets", [(0, 0), (0, 3), (3, 0)])
def test_edges_between_no_vertices_are_not_grouped(num_sources, num_targets):
    assert group_edges(torch.zeros(2, 1, dtype=torch.int64), num_sources, num_targets) is None


@pytest.mark.parametrize("num_sources, num_targets, num_edges", SIZES)
def test_self_loops_equal_pygs(num_sources, num_targets, num_edges):
    edge_index = random_edges(2, num_sources, num_targets, num_edges)
    lists = with_self_loops(grouped(edge_index, num_sources, num_targets))
    number = torch.arange(num_edges)
    # PyG puts its loops behind all edges; a vertex without a loop of its own gets the number -1.
    expected, numbers = add_remaining_self_loops(edge_index, number, -1, num_targets)
    order = expected[1].argsort(stable=True)
    assert torch.equal(lists.source, expected[0, order].int()) and torch.equal(lists.edge, numbers[order].int())
    assert lists.indptr.tolist() == [int((expected[1] < t).sum()) for t in range(num_targets + 1)]
    again = with_self_loops(lists)
    assert all(map(torch.equal, (again.indptr, again.source, again.edge), (lists.indptr, lists.source, lists.edge)))


def test_self_loops_need_targets_that_are_sources():
    lists = grouped(torch.tensor([[0], [1]]), 1, 2)
    with pytest.raises(ValueError, match="each target to be a source, got 2 targets and 1 sources"):
        with_self_loops(lists)


def test_a_source_out_of_range_is_refused():
    with pytest.raises(RuntimeError, match=r"source\[1\] must be in \[0, 3\), got 3"):
        ops.group_by_source(torch.tensor([0, 2]), torch.tensor([0, 3]), 3)
    with pytest.raises(RuntimeError, match=r"source\[0\] must be in \[0, 2\*\*31\), got -1"):
        ops.add_self_loops(torch.tensor([0, 2]), torch.tensor([-1, 3]), None)


def test_lists_move_once_to_each_device():
    lists = grouped(random_edges(3, 9, 6, 20), 9, 6)
    assert lists.to("cpu") is lists
    for made in (False, True):
        moved = lists.to("meta")
        assert moved is lists.to(torch.device("meta")) and moved.source.device.type == "meta"
        assert moved.num_places(4) == lists.num_places(4), "read on the host"
        assert not made or moved.by_source[1].device.type == "meta"
        lists = copy.deepcopy(lists)
        assert lists.by_source[0].numel() == 10 and lists.to("meta") is not moved, "a copy moves again"
