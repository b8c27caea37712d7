"""Laws of the operators for lists of a part: they equal the slow references, and refuse bad input with a clear error."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference
import torch
from draws import BOTH_MAPS, as_lists
from operator_cases import NONE, ints, long
from torch import Tensor

from salientpp import ops

#: Lengths around the limits of the draws: 64 places in a word, shared draws up to 1,000, and blocks of 64 lists.
DEGREES = [0, 1, 5, 30, 64, 65, 200, 1000, 1001, 2500]
NUM_SOURCES = 400


def some_lists(seed: int, degrees: list[int]) -> dict[str, Tensor]:
    """Lists with repeated sources, and times with ties that ascend in each list."""
    generator = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    time = [np.sort(generator.integers(10, size=degree)) for degree in degrees]
    weight = generator.random(indptr[-1])
    return {
        "indptr": torch.from_numpy(indptr),
        "indices": torch.from_numpy(generator.integers(NUM_SOURCES, size=indptr[-1])),
        "edge_weight": torch.from_numpy(np.where(weight < 0.1, 0.0, weight)),
        "edge_time": torch.from_numpy(np.concatenate([*time, np.empty(0, np.int64)])),
    }


def as_reference(lists: dict[str, Tensor | None], source_type: int = 0) -> reference.Relation:
    indptr, indices, weight, time = (
        None if lists[name] is None else lists[name].tolist()
        for name in ("indptr", "indices", "edge_weight", "edge_time")
    )
    return reference.Relation(source_type, 0, indptr, indices, None, weight, time)


def flat(output: Any) -> list:
    """Lists of lists, and no tensors."""
    return [each.tolist() if isinstance(each, Tensor) else as_lists(each) for each in output]


# --- draws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times, kind, trees",
    [  # each value is in half of the cases
        pytest.param(times, kind, trees, id=f"{times}-{kind}-{trees}", marks=[pytest.mark.rare] * ((i + j + trees) % 2))
        for i, times in enumerate(["", "times", "last", "narrow times"])
        for j, kind in enumerate(["uniform", "replace", "weights", "weights-replace", "shared"])
        for trees in (False, True)
    ],
)
def test_draws_from_lists_equal_the_slow_reference(kind, times, trees):
    generator = torch.Generator().manual_seed(1)
    lists = some_lists(1, DEGREES)
    given = {**lists, "edge_weight": lists["edge_weight"] if "weights" in kind else None}
    if not times:
        given["edge_time"] = None
    place = torch.randint(len(DEGREES), (90,), generator=generator)
    vertex = place + 10**10
    tree = torch.randint(7, place.shape, generator=generator) if trees else None
    now = torch.randint(-1, 11, place.shape, generator=generator) if times else None
    options = {"replace": "replace" in kind, "last": times == "last", "shared": kind == "shared"}
    narrow = {"indices": given["indices"].int(), "edge_weight": given["edge_weight"], "indptr": given["indptr"]}
    narrow["edge_time"] = given["edge_time"].int() if times == "narrow times" else given["edge_time"]
    for fanout, (key, hop, relation, source_type) in itertools.product(
        (0, 1, 10, 48, 49, 130, -1), [(7, 0, 0, 0), (-5, 2, 3, 1)]
    ):
        where = (fanout, key, hop, relation)
        drawn = reference.draw_from_lists(
            as_reference(given, source_type),
            place.tolist(),
            vertex.tolist(),
            None if tree is None else tree.tolist(),
            None if now is None else now.tolist(),
            *where,
            **options,
        )
        for arrays in (given, narrow):
            got = ops.draw_from_lists(
                **arrays, place=place, vertex=vertex, tree=tree, now=now, fanout=fanout, batch_key=key, hop=hop,
                relation=relation, source_type=source_type, **options,
            )  # fmt: skip
            assert all(each.dtype == torch.int64 for each in got)
            assert as_lists(got) == list(map(list, drawn)), where


def test_times_without_now_and_now_without_times_hide_nothing():
    lists = some_lists(2, [5, 0, 80])
    rows = long(0, 1, 2)
    draw = lambda time, now, last=False: ops.draw_from_lists(  # noqa: E731
        lists["indptr"], lists["indices"], None, time, rows, rows, None, now, 3, 7, 0, 0, 0, last=last
    )
    want = as_lists(draw(None, None))
    assert as_lists(draw(lists["edge_time"], None, last=True)) == want
    assert as_lists(draw(None, long(-9, -9, -9))) == want
    assert draw(None, long(-9, -9, -9), last=True)[2].tolist() == [2, 3, 4, 82, 83, 84]


def test_a_list_draws_the_same_wherever_its_part_holds_it():
    lists = some_lists(3, DEGREES)
    vertex = torch.arange(100, 100 + len(DEGREES))
    rows = torch.arange(len(DEGREES))
    whole = ops.draw_from_lists(lists["indptr"], lists["indices"], None, None, rows, vertex, None, None, 9, 5, 1, 0, 0)
    sources = whole[1].split(whole[0].tolist())
    for row in rows.tolist():
        begin, end = lists["indptr"][row : row + 2].tolist()
        alone = ops.draw_from_lists(
            long(0, end - begin), lists["indices"][begin:end].clone(), None, None, long(0), vertex[row : row + 1],
            None, None, 9, 5, 1, 0, 0,
        )  # fmt: skip
        assert torch.equal(alone[1], sources[row])


# --- the join ---------------------------------------------------------------------------------------------


@BOTH_MAPS
@pytest.mark.parametrize("trees", [False, True], ids=["", "trees"])
@pytest.mark.parametrize("sizes", [(50, 30), (2**32 + 5, 2**33)], ids=["", "wide ids"])
def test_joined_hops_equal_the_slow_reference(sizes, trees, budget):
    generator = torch.Generator().manual_seed(2)
    draw = lambda most, size: torch.randint(most, (size,), generator=generator)  # noqa: E731
    some = [draw(size, 40) for size in sizes]  # few different ids, so that many are known
    for length in (0, 1, 40, 150):  # of the frontier
        n_id = [some[0][draw(40, length + 9)], some[1][draw(40, length)]]
        tree = [draw(5, ids.numel()).sort().values for ids in n_id] if trees else []
        first = [9, 0]
        source_type, target_type = [0, 1, 0, 0], [1, 0, 0, 1]
        count = [draw(4, n_id[target].numel() - first[target]) for target in target_type]
        count[2].zero_()
        source = [some[s][draw(40, int(number.sum()))] for s, number in zip(source_type, count)]
        arguments = (n_id, tree, first, count, source, source_type, target_type)
        for earlier in ([], [draw(9, 2 * size).view(2, size) for size in (0, 1, 7, 3)]):
            want = reference.join_drawn(
                *[[each.tolist() if isinstance(each, Tensor) else each for each in of] for of in (*arguments, earlier)]
            )
            got = ops.join_drawn(*arguments, sizes, 5, budget, edge_index=earlier)
            assert flat(got) == list(want)


@BOTH_MAPS
def test_a_join_of_many_edges_gives_each_vertex_one_place(budget):
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(20_000, (50_000,), generator=generator)
    count = torch.full((10_000,), 5)
    n_id = torch.randperm(20_000, generator=generator)[:10_000]
    (joined,), _, ((row, col),) = ops.join_drawn([n_id], [], [0], [count], [source], [0], [0], [20_000], 0, budget)
    assert torch.equal(joined[:10_000], n_id) and torch.equal(joined[row], source)
    assert torch.equal(col, torch.arange(10_000).repeat_interleave(5))
    assert joined.unique().numel() == joined.numel()
    new = row[row >= 10_000]
    assert torch.equal(new.cummax(0).values.unique(), torch.arange(10_000, joined.numel()))


# --- edges between members --------------------------------------------------------------------------------


@BOTH_MAPS
@pytest.mark.parametrize("trees", [False, True], ids=["", "trees"])
@pytest.mark.parametrize("times", [False, True], ids=["", "times"])
def test_edges_between_members_equal_the_slow_reference(times, trees, budget):
    generator = torch.Generator().manual_seed(4)
    lists = some_lists(4, [0, 3, 40, 70, 0])
    place = torch.randint(5, (70,), generator=generator)
    tree = torch.randint(3, place.shape, generator=generator) if trees else None
    now = torch.randint(-1, 11, place.shape, generator=generator) if times else None
    given = {**lists, "edge_weight": None, "edge_time": lists["edge_time"] if times else None}
    for size in (0, 1, 60, 200):
        member = torch.randint(NUM_SOURCES, (size,), generator=generator)
        member_tree = torch.randint(3, (size,), generator=generator) if trees else None
        of = [None if each is None else each.tolist() for each in (place, tree, now, member, member_tree)]
        want = reference.edges_between(as_reference(given), *of)
        for indices in (lists["indices"], lists["indices"].int()):
            got = ops.edges_between(
                lists["indptr"],
                indices,
                given["edge_time"],
                place,
                tree,
                now,
                member,
                member_tree,
                NUM_SOURCES,
                3,
                budget,
            )
            assert as_lists(got) == list(want)


# --- bad input --------------------------------------------------------------------------------------------

INDPTR, INDICES = long(0, 1, 3, 3), long(1, 0, 2)
LISTS = dict(indptr=INDPTR, indices=INDICES, edge_time=None, place=long(0, 1), tree=None, now=None)
DRAW = dict(**LISTS, edge_weight=None, vertex=long(0, 1), fanout=2, batch_key=0, hop=0, relation=0, source_type=0)
JOIN = dict(
    n_id=[long(2, 0), long(1)], tree=[], first=[0, 1], count=[long(1, 0)], source=[long(3)], source_type=[1], target_type=[0],
    num_vertices=[3, 4], num_trees=2,
)  # fmt: skip
BETWEEN = dict(**LISTS, member=long(2, 0), member_tree=None, num_sources=3, num_trees=2)

BAD_LISTS = [
    (dict(indptr=INDPTR.int()), "indptr must have dtype Long, got Int"),
    (dict(indptr=NONE), r"indptr must have N \+ 1 >= 1 entries, got 0"),
    (dict(indptr=long(0)), r"place\[0\] must be in \[0, 0\), got 0"),
    (dict(indptr=long(0, 9, 9, 9)), "indptr is corrupt at row 0"),
    (dict(indptr=long(0, 3, 1, 3)), "indptr is corrupt at row 1"),
    (dict(indptr=long(-1, 3, 3, 3)), "indptr is corrupt at row 0"),
    (dict(indptr=long(-(2**63), 2**63 - 1, 3, 3)), "indptr is corrupt at row 0"),
    (dict(indices=torch.zeros(3)), "indices must have dtype int32 or int64, got Float"),
    (dict(place=long(0, 3)), r"place\[1\] must be in \[0, 3\), got 3"),
    (dict(place=long(-1, 0)), r"place\[0\] must be in \[0, 3\), got -1"),
    (dict(place=ints(0, 1)), "place must have dtype Long, got Int"),
    (dict(place=long(0, 0, 1, 1)[::2]), "place must be contiguous"),
    (dict(now=long(1)), "now must have one entry per list, expected 2, got 1"),
    (dict(now=torch.ones(2)), "now must have dtype Long, got Float"),
    (dict(edge_time=long(1, 2)), "edge_time must have one entry per edge, expected 3, got 2"),
    (dict(edge_time=torch.ones(3)), "edge_time must have dtype int32 or int64, got Float"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *BAD_LISTS,
        (dict(tree=long(1)), "tree must have one entry per list, expected 2, got 1"),
        (dict(tree=ints(1, 0)), "tree must have dtype Long, got Int"),
        (dict(vertex=long(1)), "vertex must have one entry per list, expected 2, got 1"),
        (dict(vertex=ints(1, 0)), "vertex must have dtype Long, got Int"),
        (dict(edge_weight=torch.ones(2)), "edge_weight must have one entry per edge, expected 3, got 2"),
        (dict(edge_weight=torch.ones(3).half()), "edge_weight must have dtype float32 or float64, got Half"),
        (dict(edge_weight=torch.ones(3), shared=True), "shared draws are uniform; pass edge_weight=None"),
        (dict(shared=True, replace=True), "shared draws are without replacement; pass replace=False"),
        (dict(fanout=-2), r"fanout must be in \[0, 2\^31\), or -1 for all neighbours, got -2"),
        (dict(fanout=2**31), r"fanout must be in \[0, 2\^31\), or -1 for all neighbours, got 2147483648"),
        (dict(hop=-1), "hop, relation and source_type must be >= 0, got -1, 0 and 0"),
    ],
)
def test_draw_from_lists_refuses_bad_arguments(change, text):
    want = as_lists(ops.draw_from_lists(**DRAW))
    with pytest.raises(RuntimeError, match=text):
        ops.draw_from_lists(**DRAW | change)
    assert as_lists(ops.draw_from_lists(**DRAW)) == want


@BOTH_MAPS
@pytest.mark.parametrize("trees", [False, True], ids=["", "trees"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(n_id=[long(2, 3), long(1)]), r"n_id\[1\] must be in \[0, 3\), got 3"),
        (dict(n_id=[long(2, -1), long(1)]), r"n_id\[1\] must be in \[0, 3\), got -1"),
        (dict(n_id=[ints(2, 0), long(1)]), "n_id must have dtype Long, got Int"),
        (dict(n_id=[long(2, 0)]), "must have one entry per vertex type, 1"),
        (dict(first=[0]), "must have one entry per vertex type, 2"),
        (dict(first=[3, 1]), r"first\[0\] must be in \[0, 2\], got 3"),
        (dict(first=[-1, 1]), r"first\[0\] must be in \[0, 2\], got -1"),
        (dict(first=[1, 1]), r"count\[0\] must have one entry per vertex of the frontier, expected 1, got 2"),
        (dict(num_vertices=[3]), "must have one entry per vertex type, 2"),
        (dict(num_vertices=[3, -4]), r"num_vertices\[1\] must be >= 0, got -4"),
        (dict(count=[long(1, 1)]), r"count\[0\] must be >= 0 and have the sum 1, the number of sources, got 1 at place 1"),
        (dict(count=[long(2, -1)]), r"count\[0\] must be >= 0 and have the sum 1, the number of sources, got 2 at place 0"),
        (dict(count=[long(-1, 2)]), r"count\[0\] must be >= 0 and have the sum 1, the number of sources, got -1 at place 0"),
        (dict(count=[long(0, 0)]), r"count\[0\] must have the sum 1, the number of sources, got 0"),
        (dict(count=[ints(1, 0)]), "count must have dtype Long, got Int"),
        (dict(count=[]), "must have one entry per relation, 0"),
        (dict(source=[]), "must have one entry per relation, 1"),
        (dict(source=[ints(3)]), "source must have dtype Long, got Int"),
        (dict(source=[long(4)]), r"indices is corrupt: it holds 4, expected ids in \[0, 4\)"),
        (dict(source=[long(-1)]), "indices is corrupt: it holds -1"),
        (dict(source_type=[2]), r"source_type and target_type must be in \[0, 2\)"),
        (dict(target_type=[-1]), r"source_type and target_type must be in \[0, 2\)"),
        (dict(num_trees=-1), r"num_trees must be in \[0, 2\^31\), got -1"),
        (dict(num_trees=2**31), r"num_trees must be in \[0, 2\^31\), got 2147483648"),
        (dict(edge_index=[NONE.view(2, 0)] * 2), "edge_index must be empty or have one entry per relation, 1, got 2"),
        (dict(edge_index=[long(1, 2)]), r"edge_index\[0\] must have shape \[2, e\]"),
        (dict(edge_index=[torch.ones(2, 1)]), "edge_index must have dtype int64, got Float"),
        (dict(edge_index=[long(1, 2, 3, 4).view(2, 2).t()]), "edge_index must be contiguous"),
    ],
)  # fmt: skip
def test_join_drawn_refuses_bad_arguments(change, text, trees, budget):
    given = JOIN | {"tree": [long(0, 1), long(1)] if trees else [], "map_budget_bytes": budget}
    want = flat(ops.join_drawn(**given))
    with pytest.raises(RuntimeError, match=text):
        ops.join_drawn(**given | change)
    assert flat(ops.join_drawn(**given)) == want


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ([long(0, 2), long(1)], r"tree\[1\] must be in \[0, 2\), got 2"),
        ([long(-1, 0), long(1)], r"tree\[0\] must be in \[0, 2\), got -1"),
        ([ints(0, 1), long(1)], "tree must have dtype Long, got Int"),
        ([long(0), long(1)], "tree must have one entry per vertex, expected 2, got 1"),
        ([long(0, 1)], "with trees, tree must have one entry per vertex type, 2"),
    ],
)
def test_join_drawn_refuses_bad_trees(tree, text):
    with pytest.raises(RuntimeError, match=text):
        ops.join_drawn(**JOIN | {"tree": tree})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *BAD_LISTS,
        (dict(member=long(2, 3)), r"member\[1\] must be in \[0, 3\), got 3"),
        (dict(member=long(-1)), r"member\[0\] must be in \[0, 3\), got -1"),
        (dict(member=ints(1)), "member must have dtype Long, got Int"),
        (dict(tree=long(0, 1)), "tree and member_tree must be given both or not at all"),
        (dict(member_tree=long(0, 1)), "tree and member_tree must be given both or not at all"),
        (dict(tree=long(0, 2), member_tree=long(0, 1)), r"tree\[1\] must be in \[0, 2\), got 2"),
        (dict(tree=long(0, 1), member_tree=long(0, -1)), r"member_tree\[1\] must be in \[0, 2\), got -1"),
        (dict(tree=long(0, 1), member_tree=long(0)), "member_tree must have one entry per vertex, expected 2, got 1"),
        (dict(tree=long(0), member_tree=long(0, 1)), "tree must have one entry per list, expected 2, got 1"),
        (dict(indices=long(1, 0, 5)), r"indices is corrupt: it holds 5, expected ids in \[0, 3\)"),
        (dict(indices=long(-1, 0, 2)), "indices is corrupt: it holds -1"),
        (dict(num_sources=-1), "num_sources must be >= 0, got -1"),
        (dict(num_trees=2**31), r"num_trees must be in \[0, 2\^31\), got 2147483648"),
    ],
)
@BOTH_MAPS
def test_edges_between_refuses_bad_arguments(change, text, budget):
    want = as_lists(ops.edges_between(**BETWEEN, map_budget_bytes=budget))
    with pytest.raises(RuntimeError, match=text):
        ops.edges_between(**BETWEEN | change, map_budget_bytes=budget)
    assert as_lists(ops.edges_between(**BETWEEN, map_budget_bytes=budget)) == want
