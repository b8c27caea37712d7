"""Laws of link scores: the k best targets of each source, as a product of all rows gives them, in any blocks and on any number of ranks."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from keyed import known_keys, numbers_in
from pyarrow import parquet
from torch import Tensor
from torch_geometric.data import HeteroData

import salientpp
from salientpp.predictions import link_scores as module

USERS, ITEMS = 40, 70
TYPES = ("user", "item")


def graph() -> HeteroData:
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = USERS, ITEMS
    data["user"].x, data["item"].x = torch.ones(USERS, 1), torch.ones(ITEMS, 1)
    ends = torch.stack([torch.arange(ITEMS) % USERS, torch.arange(ITEMS)])
    data["user", "buys", "item"].edge_index = ends
    data["item", "rev_buys", "user"].edge_index = ends.flip(0)
    return data


def embeddings(number: int, seed: int) -> Tensor:
    """Rows of small integers, so that scores are exact and many are equal."""
    return torch.randint(-3, 4, (number, 5), generator=torch.Generator().manual_seed(seed)).float()


def slow(users: Tensor, items: Tensor, ids: list[int], k: int, excluded: set[tuple[int, int]] = frozenset()) -> Any:
    """Best items of each user by sorting all pairs: the largest score first, then the smallest id."""
    best = []
    for user, row in enumerate((users @ items.T).tolist()):
        pairs = [(-row[at], item) for at, item in enumerate(ids) if (user, item) not in excluded]
        best.append([(item, -score) for score, item in sorted(pairs)[:k]])
    return best


def as_lists(found: Any) -> list[list[tuple[int, float]]]:
    return [
        [(item, score) for item, score in zip(items, scores) if item >= 0]
        for items, scores in zip(found.target.tolist(), found.score.tolist())
    ]


@pytest.mark.parametrize("memory", ["1GiB", "1B", 60_000])
@pytest.mark.parametrize("k", [1, 7, ITEMS + 5])
def test_the_best_targets_equal_those_of_a_full_sort_in_any_blocks(monkeypatch, memory, k):
    monkeypatch.setattr(module, "_BLOCK", 16)
    users, items = embeddings(USERS, 0), embeddings(ITEMS, 1)
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(2))
    exclude = torch.stack([torch.arange(ITEMS) % USERS, torch.arange(ITEMS)])
    for excluded in None, exclude:
        found = salientpp.link_scores(
            graph(),
            (torch.arange(USERS), users),
            (order, items[order]),
            k,
            types=TYPES,
            memory=memory,
            exclude=excluded,
        )
        pairs = set() if excluded is None else set(zip(*excluded.tolist()))
        assert found.target.shape == found.score.shape == (USERS, k)
        assert as_lists(found) == slow(users, items, list(range(ITEMS)), k, pairs)
        assert torch.equal(found.source, torch.arange(USERS))
        assert torch.equal(found.target < 0, found.score == -torch.inf)


def test_a_vertex_is_no_target_of_itself(tmp_path):
    data, rows = random_data(num_vertices=20, num_edges=40), embeddings(20, 0)
    ids = torch.arange(20)
    found = salientpp.link_scores(data, (ids, rows), (ids, rows), 19, out=tmp_path / "similar")
    assert as_lists(found) == slow(rows, rows, ids.tolist(), 19, {(i, i) for i in range(20)})
    table = parquet.read_table(tmp_path / "similar")
    assert table.schema.names == ["source_id", "target_id", "score"] and table.num_rows == 20 * 19


def test_links_are_written_under_both_keys(tmp_path):
    data = graph()
    data["user"].key_table = known_keys(tmp_path, USERS)
    users, items, some = embeddings(USERS, 0), embeddings(ITEMS, 1), torch.tensor([3, 1])
    found = salientpp.link_scores(
        data, (some, users[some]), (torch.arange(ITEMS), items), 2, types=TYPES, out=tmp_path / "links"
    )
    table = parquet.read_table(tmp_path / "links")
    assert table.schema.names == ["shop", "customer_id", "id", "score"]
    assert numbers_in(table) == [3, 3, 1, 1] and table.column("shop").to_pylist() == [0, 0, 1, 1]
    assert table.column("id").to_pylist() == found.target.flatten().tolist()
    assert table.column("score").to_pylist() == found.score.flatten().tolist()


def score(rank: int, root: str, out: str, mistake: bool = False) -> list[Any]:
    part = salientpp.load(root)
    if part.part_id is None:  # a single process
        part = part.joined((0, part.num_parts), 0)
    ends = []
    for number, type_ in enumerate(TYPES):
        ids = part.split("all", type_=type_)
        ends.append((ids, embeddings((USERS, ITEMS)[number], number)[part.original_id(ids, type_)]))
    if mistake and rank:
        ends[1] = (ends[1][0], ends[1][1] * torch.nan)
    found = salientpp.link_scores(part, *ends, 3, types=TYPES, out=out, memory=20_000)
    source, target = part.original_id(found.source, "user"), part.original_id(found.target.flatten(), "item")
    return list(zip(source.tolist(), target.reshape(-1, 3).tolist(), found.score.tolist()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_targets_of_all_ranks_are_candidates(tmp_path, world_size):
    data = graph()
    data["user"].key_table, data["item"].key_table = known_keys(tmp_path, USERS), known_keys(tmp_path, ITEMS)
    salientpp.partition(data, 3, tmp_path / "graph", [2], 8, seeds=("user", "all"))
    root, out = str(tmp_path / "graph"), tmp_path / "links"
    found = [links for rank in distributed.run(score, world_size, root, str(out)) for links in rank]
    scores = embeddings(USERS, 0) @ embeddings(ITEMS, 1).T
    assert sorted(user for user, _, _ in found) == list(range(USERS))
    for (
        user,
        targets,
        best,
    ) in found:  # which of several targets with equal scores is found depends on the ids of the directory
        assert best == scores[user].topk(3).values.tolist() == scores[user, targets].tolist()
    table = parquet.read_table(out)
    assert table.schema.names == ["source_shop", "source_customer_id", "target_shop", "target_customer_id", "score"]
    assert numbers_in(table, "source_customer_id") == [user for user, _, _ in found for _ in range(3)]
    assert numbers_in(table, "target_customer_id") == [target for _, targets, _ in found for target in targets]
    assert sorted(path.name for path in out.iterdir()) == [f"part-{k:05d}.parquet" for k in range(world_size)]


def test_a_mistake_on_one_rank_reaches_the_other_and_leaves_no_file(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "graph", [2], 8, seeds=("user", "all"))
    failed = distributed.run(score, 2, str(tmp_path / "graph"), str(tmp_path / "links"), True, may_fail=True)
    assert all("rows of targets must be finite, but some have NaN" in each.text for each in failed), failed
    assert not (tmp_path / "links").exists()


def score_all_everywhere(rank: int, root: str) -> None:
    part, ids = salientpp.load(root), torch.arange(ITEMS)
    salientpp.link_scores(part, (ids[:2], torch.ones(2, 5)), (ids, torch.ones(ITEMS, 5)), 3, types=TYPES)


def test_a_target_on_two_ranks_is_refused(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "graph", [2], 8, seeds=("user", "all"))
    failed = distributed.run(score_all_everywhere, 2, str(tmp_path / "graph"), may_fail=True)
    assert all("each target must be given on one rank, but 0 is given on two" in each.text for each in failed), failed


def score_shared(rank: int, root: str, mistake: str) -> list[list[int]]:
    """The ranks share one target, which comes in different blocks; or only one rank writes files."""
    part, width = salientpp.load(root), 5
    ids = torch.arange(40 + rank) if rank == 0 else torch.arange(39, ITEMS)
    out = f"{root}-links" if mistake == "files" and rank else None
    if mistake == "files":
        ids = torch.arange(rank, ITEMS, 2)
    found = salientpp.link_scores(
        part, (torch.arange(2), torch.ones(2, width)), (ids, torch.ones(len(ids), width)), ITEMS,
        types=TYPES, memory="1B", out=out,
    )  # fmt: skip
    return found.target.tolist()


@pytest.mark.parametrize(
    ("mistake", "text"), [("target", "each target must be given on one rank, but 39 is given on two"), ("files", "out= or none")]
)  # fmt: skip
def test_ranks_that_disagree_are_refused_in_any_blocks(tmp_path, mistake, text):
    salientpp.partition(graph(), 2, tmp_path / "graph", [2], 8, seeds=("user", "all"))
    failed = distributed.run(score_shared, 2, str(tmp_path / "graph"), mistake, may_fail=True)
    assert all(text in each.text for each in failed), failed


def test_no_sources_and_no_targets_give_no_links():
    none, ids, rows = torch.arange(0), torch.arange(USERS), torch.ones(USERS, 5)
    for sources, targets in (none, ids), (ids, none), (none, none):
        found = salientpp.link_scores(
            graph(), (sources, rows[: len(sources)]), (targets, rows[: len(targets)]), 2, types=TYPES,
            exclude=torch.zeros((2, 1), dtype=torch.int64),
        )  # fmt: skip
        assert found.target.tolist() == [[-1, -1]] * len(sources)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": 0}, "k must be an integer >= 1, got 0"),
        ({"memory": "much"}, "memory must be a number of bytes or text such as '2GiB', got 'much'"),
        ({"types": "user"}, "types must be the vertex types of sources and targets"),
        ({"types": ("user", "itm")}, "type_ must be one of user, item, got 'itm'. Did you mean item?"),
        ({"sources": torch.ones(3)}, "sources must be a pair (ids, rows) of tensors, got Tensor"),
        ({"sources": (torch.ones(3), torch.ones(3, 5))}, "ids of sources must be integers [n], got torch.float32 [3]"),
        ({"sources": (torch.arange(3), torch.ones(2, 5))}, "rows of sources must be floating-point numbers [3, d]"),
        ({"sources": (torch.tensor([1, 1]), torch.ones(2, 5))}, "sources must have each id once, but 1 comes twice"),
        ({"sources": (torch.arange(2), torch.ones(2, 4))}, "must have equally many columns, got 4 and 5"),
        ({"targets": (torch.tensor([ITEMS]), torch.ones(1, 5))}, "targets must have ids of type 'item', from 0 to 69"),
        (
            {"sources": (torch.arange(2), torch.full((2, 5), 1e39, dtype=torch.float64))},
            "rows of sources must be finite, but some have NaN, or infinity in float32",
        ),
        (
            {"sources": (torch.arange(2), torch.full((2, 5), -1e38))},
            "scores must be finite in float32, but rows of sources reach 1e+38",
        ),
        ({"exclude": torch.zeros(2)}, "exclude must be integers [2, p] with ids of sources and targets"),
        (
            {"exclude": torch.tensor([[60], [3]])},
            "exclude must have ids of type 'user', from 0 to 39, got 60; pass ids of sources, then",
        ),
        (
            {"exclude": torch.ones(2, 3, dtype=torch.bool)},
            "exclude must be integers [2, p] with ids of sources and targets",
        ),
        ({"exclude": torch.zeros(2, 3)}, "exclude must be integers [2, p] with ids of sources and targets"),
    ],
)
def test_wrong_arguments_are_refused(changes, text):
    arguments: dict[str, Any] = {
        "sources": (torch.arange(2), torch.ones(2, 5)), "targets": (torch.arange(3), 2 * torch.ones(3, 5)), "k": 2, "types": TYPES,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as raised:
        salientpp.link_scores(graph(), **{**arguments, **changes})
    assert text in str(raised.value)


def test_memory_bounds_the_blocks(monkeypatch):
    """The largest matrix of scores and the largest block of targets, in bytes, stay below the bound."""
    found: list[int] = []

    def add_candidates(best: Any, first: int, scores: Tensor, targets: Tensor) -> None:
        found.append(scores.numel() * module._SCORE_BYTES + targets.numel() * (8 + 4 * 64) * 3)

    monkeypatch.setattr(module, "add_candidates", add_candidates)
    data = random_data(num_vertices=5000, num_edges=10)
    ids, rows = torch.arange(5000), torch.ones(5000, 64)
    salientpp.link_scores(data, (ids, rows), (ids, rows), 2, memory="8MiB")
    assert len(found) > 5 and max(found) <= 2**23


def test_memory_bounds_the_best_targets_that_are_sorted(monkeypatch):
    """A source has k places. Their ids, scores and orders are held while candidates are added, 96 bytes for each place."""
    found: list[int] = []
    monkeypatch.setattr(module, "add_candidates", lambda best, first, scores, targets: found.append(len(scores)))
    data, ids, rows = random_data(num_vertices=3000, num_edges=10), torch.arange(3000), torch.ones(3000, 4)
    salientpp.link_scores(data, (ids, rows), (ids, rows), 2500, memory="8MiB")
    assert max(found) * 2500 * 96 <= 2**23
