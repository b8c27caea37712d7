"""Laws of the choice between rows and sums, and of the kernel that computes sums.

Sums never take more bytes than rows, and at most twice the minimum. A batch together with its sums equals the sample.
"""

from __future__ import annotations

import pytest
import reference
import torch
from graphs import random_data
from samplers import Sampler
from torch import Tensor

from salientpp import Graph, ops
from salientpp.ways.sums.plan import REDUCTIONS, Wire, plan_sums


def random_hop(seed: int, num_sources: int, num_edges: int) -> tuple[list[int], list[int], list[int], int]:
    """Makes edges of a hop into four targets, with repetitions: row, col, owner and first."""
    generator = torch.Generator().manual_seed(seed)
    first = 4
    row = torch.randint(first + num_sources, (num_edges,), generator=generator)
    row[:num_sources] = torch.arange(first, first + num_sources)[:num_edges]
    col = torch.randint(first, (num_edges,), generator=generator).sort().values
    row = row[torch.randperm(num_edges, generator=generator)]
    owner = torch.randint(-1, 3, (num_sources,), generator=generator)
    return row.tolist(), col.tolist(), owner.tolist(), first


def planned(
    row: list[int], col: list[int], owner: list[int], first: int, row_bytes: int, source_bytes: int = 4
) -> list[list[int]]:
    """Returns the operator's result, with the sources of the summed edges instead of the edges."""
    found = ops.plan_sums(
        torch.tensor(row), torch.tensor(col), torch.tensor(owner), first, 3, row_bytes, 4, source_bytes
    )
    lists = [each.tolist() for each in found]
    lists[5] = [row[edge] - first for edge in lists[5]]
    return lists


@pytest.mark.parametrize("weight_bytes", [0, 8])
@pytest.mark.parametrize("row_bytes", [0, 4, 16, 512])
def test_sums_take_at_most_the_bytes_of_rows_and_twice_the_minimum(row_bytes, weight_bytes):
    ours, fewest, better = 0, 0, 0
    for seed in range(150):
        row, col, owner, first = random_hop(seed, 9, 9 + seed % 20)
        kept, _, _, _, size, _, _, _ = planned(row, col, owner, first, row_bytes, 4 + weight_bytes)
        rows, wire = sum(owner[s] >= 0 for s in kept), Wire(row_bytes, 4, weight_bytes)
        taken = wire.bytes_of(rows, len(size), sum(size))
        all_rows = wire.bytes_of(sum(part >= 0 for part in owner))
        least = reference.fewest_bytes(row, col, owner, first, row_bytes, 4, 4 + weight_bytes)
        assert least <= taken <= min(all_rows, 2 * least), f"seed {seed}"
        ours, fewest, better = ours + taken, fewest + least, better + (taken < all_rows)
    assert ours <= 1.05 * fewest
    assert (better > 50) == (row_bytes > 4 + 2 * weight_bytes)


def test_a_plan_serves_every_edge_once():
    for seed in range(100):
        row, col, owner, first = random_hop(seed, 30, 90)
        kept, kept_edge, kept_row, target, size, source, groups, sources = planned(row, col, owner, first, 64)
        assert kept == sorted(kept) and kept_edge == sorted(kept_edge)
        assert [part for part in range(30) if owner[part] < 0 and part not in kept] == []
        names = [*range(first), *(first + s for s in kept)]
        assert [names[r] for r in kept_row] == [row[k] for k in kept_edge]
        assert sum(groups) == len(target) == len(size) and sum(sources) == len(source) == sum(size)
        part_of = [part for part in range(3) for _ in range(groups[part])]
        pairs = list(zip(part_of, target))
        assert pairs == sorted(set(pairs)), "groups are sorted by owner and target, without repeats"
        summed, at = [], 0
        for part, to, number in zip(part_of, target, size):
            assert number > 0
            for s in source[at : at + number]:
                assert owner[s] == part and s not in kept
                summed.append((first + s, to))
            at += number
        assert sorted(summed + [(row[k], col[k]) for k in kept_edge]) == sorted(zip(row, col)), f"seed {seed}"


def test_a_vertex_whose_neighbours_have_one_owner_gets_one_sum():
    row, col = [1, 2, 3, 4], [0, 0, 0, 0]
    assert planned(row, col, [1, 1, 1, 1], 1, 100)[3:6] == [[0], [4], [0, 1, 2, 3]]
    assert planned(row, col, [0, 1, 2, -1], 1, 100)[3:6] == [[], [], []], "a sum of one row saves nothing"
    assert planned(row, col, [0, 1, 1, -1], 1, 100)[:6] == [[0, 3], [0, 3], [1, 2], [0], [2], [1, 2]]


@pytest.mark.parametrize("fanouts", [[25], [5, 4], [4, 3, 3], [4, 0]], ids=str)
@pytest.mark.parametrize("replace", [False, True])
def test_a_batch_and_its_sums_equal_the_sample(fanouts, replace):
    graph = Graph.from_data(random_data(2000, 8000))
    mfg = Sampler(graph, fanouts, replace).sample(torch.arange(0, 2000, 200), 5)
    part = mfg.node[mfg.node.numel() - mfg.num_sampled_nodes[-1] :] * 4 // 2000
    left, sums = plan_sums(mfg, torch.where(part > 0, part, -1), 4, Wire(64, 4))
    assert torch.equal(left.node, mfg.node[torch.isin(mfg.node, left.node)]), "in the same order"
    assert sum(left.num_sampled_nodes) == left.node.numel() and sum(left.num_sampled_edges) == left.row.numel()
    assert left.num_sampled_nodes[:-1] == mfg.num_sampled_nodes[:-1]
    assert (sums.size.numel() > 0) == (fanouts[-1] > 0)

    def pairs(source: Tensor, target: Tensor) -> list[tuple[int, int]]:
        return list(zip(source.tolist(), target.tolist()))

    ends = pairs(left.node[left.row], left.node[left.col])
    ends += pairs(sums.source, left.node[sums.target].repeat_interleave(sums.size))
    assert sorted(ends) == sorted(pairs(mfg.node[mfg.row], mfg.node[mfg.col]))
    found = dict(zip(mfg.edge.tolist(), pairs(mfg.node[mfg.row], mfg.node[mfg.col])))
    summed = pairs(sums.source, left.node[sums.target].repeat_interleave(sums.size))
    assert [found[edge] for edge in sums.edge.tolist()] == summed
    assert torch.equal(sums.source * 4 // 2000, torch.arange(4).repeat_interleave(sums.sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_reduced_as_torch_does_in_the_wider_dtype(dtype, reduction, weighted):
    generator = torch.Generator().manual_seed(3)
    source = torch.randn(50, 3, 5, generator=generator).to(dtype)
    size = torch.tensor([3, 0, 1, 40, 16])
    index = torch.randint(50, (60,), generator=generator)
    out = torch.full((5, 3, 5), 7.0, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.randn(60, generator=generator).to(wide) if weighted else None
    ops.reduce_rows(source, index, size, weight, out, REDUCTIONS.index(reduction))
    times = torch.ones(60) if weight is None else weight
    for group, rows in enumerate((source[index].to(wide) * times.view(-1, 1, 1)).split(size.tolist())):
        if not len(rows):
            assert not out[group].any()
            continue
        total = rows[0]
        for row in rows[1:]:  # in this order, so that each sum is rounded in the same way
            total = torch.maximum(total, row) if reduction == "max" else total + row
        assert torch.equal(out[group], (total / len(rows) if reduction == "mean" else total).to(dtype))


def test_16_bit_rows_are_added_in_32_bits_and_nan_is_largest():
    out = torch.zeros(1, 2, dtype=torch.float16)
    source = torch.tensor([[2048.0, 1.0]] + 3 * [[1.0, float("nan")]] + [[1.0, 5.0]], dtype=torch.float16)
    ops.reduce_rows(source, torch.arange(5), torch.tensor([5]), None, out, 0)
    assert out[0, 0] == 2052  # in 16 bits, 2048 + 1 would be 2048
    ops.reduce_rows(source, torch.arange(5), torch.tensor([5]), None, out, 2)
    assert out[0, 0] == 2048 and out[0, 1].isnan()


@pytest.mark.parametrize(
    "change, error",
    [
        ({"size": torch.tensor([2, 2])}, r"size\[1\] must be in \[0, 1\], the rows that are left, got 2"),
        ({"size": torch.tensor([1, 1])}, "size must add up to the number of rows, 3, got 2"),
        ({"source_index": torch.tensor([0, 1, 4])}, r"source_index\[2\] must be in \[0, 4\), got 4"),
        ({"out": torch.zeros(3, 2)}, "out must have a row for each group, expected 2, got 3"),
        ({"weight": torch.ones(2)}, "weight must have an entry for each row, expected 3, got 2"),
        ({"weight": torch.ones(3).double()}, "weight must have dtype Float, got Double"),
        ({"reduction": 3}, r"reduction must be 0 \(sum\), 1 \(mean\) or 2 \(max\), got 3"),
        (
            {"source": torch.zeros(4, 2).int(), "out": torch.zeros(2, 2).int()},
            "source must have dtype float32, float64",
        ),
    ],
)
def test_wrong_groups_raise_a_clear_error(change, error):
    arguments = {
        "source": torch.zeros(4, 2), "source_index": torch.tensor([0, 1, 3]), "size": torch.tensor([2, 1]), "weight": None,
        "out": torch.zeros(2, 2), "reduction": 0,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=error):
        ops.reduce_rows(**{**arguments, **change})
