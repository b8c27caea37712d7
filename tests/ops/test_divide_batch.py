"""Laws of the operator that divides a batch: its shares equal those of a slow reference, and it refuses arguments that do not fit each other."""

from __future__ import annotations

import pytest
import reference
import torch
from operator_cases import NONE, ints, long
from torch import Tensor

from salientpp import ops
from salientpp.ops.sampling import DividedBatch


def as_lists(divided: DividedBatch) -> list:
    return [of.tolist() if isinstance(of, Tensor) else [each.tolist() for each in of] for of in divided]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped by target", "in any order"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 70])
@pytest.mark.parametrize("seed", range(3))
def test_shares_equal_the_slow_reference(seed, ranks, grouped):
    generator = torch.Generator().manual_seed(seed)

    def numbers(below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=generator)

    for size, num_edges in ((60, 200), (9, 4), (3, 0)):
        node, edge, owner = numbers(10**6, size), numbers(10**6, num_edges), numbers(ranks, size)
        row, col = numbers(size, num_edges), numbers(size, num_edges)
        if grouped:
            col = col.sort().values
        limits = [[*sorted(numbers(count + 1, 3).tolist()), count] for count in (size, num_edges)]
        for place in (-1, 0, ranks - 1):
            given = (node, row, col, edge if seed else None, owner)
            want = reference.divide_batch(*(None if of is None else of.tolist() for of in given), *limits, ranks, place)
            assert as_lists(ops.divide_batch(*given, *limits, ranks, place)) == want


GIVEN = dict(
    node=long(7, 8, 9), row=long(1, 2, 0), col=long(0, 0, 1), edge=long(4, 5, 6), owner=long(0, 1, 0),
    nodes_within=[1, 3], edges_within=[2, 3], ranks=2, place=-1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(node=ints(7, 8, 9)), "node must have dtype Long, got Int"),
        (dict(row=long(1, 2, 3)), r"row\[2\] must be in \[0, 3\), got 3"),
        (dict(row=long(-1, 2, 0)), r"row\[0\] must be in \[0, 3\), got -1"),
        (dict(col=long(0, 3, 1)), r"col\[1\] must be in \[0, 3\), got 3"),
        (dict(col=long(0, 0)), "col must have one entry per edge, expected 3, got 2"),
        (dict(edge=NONE), "edge must have one entry per edge, expected 3, got 0"),
        (dict(edge=torch.ones(3)), "edge must have dtype Long, got Float"),
        (dict(row=long(1, 9, 2, 9, 0, 9)[::2]), "row must be contiguous"),
        (dict(owner=long(0, 1)), "owner must have one entry per vertex, expected 3, got 2"),
        (dict(owner=long(0, 1, 2)), r"owner\[2\] must be in \[0, 2\), got 2"),
        (dict(owner=long(0, -1, 0)), r"owner\[1\] must be in \[0, 2\), got -1"),
        (dict(nodes_within=[1, 2]), "nodes_within must end with the number of vertices, 3, got 2"),
        (dict(nodes_within=[]), "nodes_within must have one entry per number of hops"),
        (dict(nodes_within=[4, 3]), "nodes_within must not decrease from 0, got 3 after 4"),
        (dict(edges_within=[-1, 3]), "edges_within must not decrease from 0, got -1 after 0"),
        (dict(edges_within=[2, 4]), "edges_within must end with the number of edges, 3, got 4"),
        (dict(edges_within=[3]), "edges_within must have one entry per number of hops, expected 2, got 1"),
        (dict(ranks=0), r"ranks must be in \[1, 32768\], got 0"),
        (dict(ranks=2**40), r"ranks must be in \[1, 32768\], got 1099511627776"),
        (dict(place=2), r"place must be in \[-1, 2\), got 2"),
        (dict(place=-2), r"place must be in \[-1, 2\), got -2"),
    ],
)
def test_bad_arguments_are_refused(change, text):
    want = as_lists(ops.divide_batch(**GIVEN))
    with pytest.raises(RuntimeError, match=text):
        ops.divide_batch(**GIVEN | change)
    assert as_lists(ops.divide_batch(**GIVEN)) == want
