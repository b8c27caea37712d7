"""Laws of caches of neighbour lists: they change what travels and never the batches, and they keep to their budget."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from batches import differences
from graphs import random_data
from one_process import TYPED_FANOUTS, homogeneous, typed_data
from torch import Tensor

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.arguments import as_amount
from salientpp.datasets import synthetic
from salientpp.vip.policies import densest

FANOUTS, BATCH = [4, 3, 2], 8
NODES: dict[str, Any] = {"num_neighbors": FANOUTS, "input_nodes": "train", "batch_size": BATCH, "shuffle": True}
LINKS: dict[str, Any] = {
    "num_neighbors": [3, 2],
    "edge_label_index": "all",
    "batch_size": 150,
    "neg_sampling": "binary",
}
TYPED: dict[str, Any] = {**NODES, "num_neighbors": TYPED_FANOUTS, "input_nodes": ("paper", "train")}

#: Draws that read lists in different ways.
CASES = [
    NODES,
    {**NODES, "weight_attr": "weight", "num_workers": 2},
    {**NODES, "weight_attr": "weight", "replace": True, "disjoint": True},
    {**NODES, "time_attr": "time"},
    {**NODES, "time_attr": "time", "subgraph_type": "induced", "depth": 1},
    {**NODES, "subgraph_type": "induced"},
    {**NODES, "shared_draws": "batch", "logical_ranks": 12, "join_logical_ranks": True},
    LINKS,
]
TYPED_CASES = [
    TYPED,
    {**TYPED, "time_attr": "edge_time", "temporal_strategy": "last", "input_time": "zeros"},
    {**TYPED, "subgraph_type": "induced", "disjoint": True},
    {**TYPED, "weight_attr": "weight"},
]
BUDGETS, TYPED_BUDGETS = [2000, "12kB", "1GB"], [700, "1.6kB", "1GB"]


def make(root: str, case: dict[str, Any], **options: Any) -> Any:
    part = salientpp.load(root)
    options = {**case, "seed": 3, **options}
    if "input_time" in options:
        options["input_time"] = torch.full((part.split("train", type_="paper").numel(),), 5)
    return (LinkNeighborLoader if "edge_label_index" in case else NeighborLoader)(part, **options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    return a == b


def compare(rank: int, root: str, cases: list[dict[str, Any]], budgets: list, ranks_per_host: int) -> list[tuple]:
    """Statistics and bytes of copies without a cache and with each budget, case by case."""
    found = []
    for case in cases:
        expected: list[Any] = []
        for budget in [0, *budgets]:
            loader = make(root, case, topology_cache=budget, ranks_per_host=ranks_per_host)
            batches = list(loader)
            expected = expected or batches
            for one, other in zip(expected, batches, strict=True):
                assert same(one.to_dict(), other.to_dict()), (case, budget)
            found.append((loader.stats(), loader.memory_used().get("topology_cache", 0)))
    return found


@pytest.mark.parametrize("num_parts, world, ranks_per_host", [(2, 2, 1), (4, 4, 2), (3, 2, 1)])
@pytest.mark.parametrize("typed", [False, True])
def test_copies_change_what_travels_and_never_the_batches(tmp_path, num_parts, world, ranks_per_host, typed):
    data, cases, budgets = (typed_data(), TYPED_CASES, TYPED_BUDGETS) if typed else (homogeneous(), CASES, BUDGETS)
    order: dict[str, Any] = {"num_neighbors": FANOUTS}
    if typed:
        fill_weights(data)
        order = {"num_neighbors": TYPED_FANOUTS, "seeds": ("paper", "train")}
    salientpp.partition(data, num_parts, tmp_path / "d", batch_size=BATCH, topology="parts", **order)
    found = distributed.run(compare, world, str(tmp_path / "d"), cases, budgets, ranks_per_host)
    some = [0, 0]
    for of_rank in found:
        for at, case in zip(range(0, len(of_rank), 1 + len(budgets)), cases):
            (without, none), *cached = of_rank[at : at + 1 + len(budgets)]
            assert none == 0 and without.expansions_copied == 0
            last = without
            for (stats, held), limit in zip(cached, [int(as_amount(budget)) for budget in budgets]):
                assert held <= limit
                read = stats.expansions_own + stats.expansions_copied + stats.expansions_remote
                assert read == without.expansions_own + without.expansions_remote, case
                assert stats.expansions_own == without.expansions_own
                assert stats.expansions_remote <= last.expansions_remote
                last = stats
            some[0] += cached[1][0].expansions_copied
            some[1] += cached[1][0].expansions_remote
            assert (
                last.expansions_remote == last.list_rounds == last.list_bytes_sent == last.list_bytes_received == 0
            ), case
            assert without.expansions_remote > 0 and without.list_rounds > 0
    assert min(some) > 0, "the middle budget must hold some of the lists"


def fill_weights(data: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for store in data.edge_stores:
        store.weight = torch.rand(store.num_edges, generator=generator)


def refusals(rank: int, root: str) -> list[str]:
    texts = []
    for budget in (1.5, -1, "3", True, [0, 1000][rank]):
        try:
            make(root, NODES, topology_cache=budget, timeout=60)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_wrong_budgets_are_refused(tmp_path):
    salientpp.partition(homogeneous(), 2, tmp_path / "d", FANOUTS, BATCH, topology="parts")
    first, second = distributed.run(refusals, 2, str(tmp_path / "d"))
    for text in first[:4]:
        assert "topology_cache must be a number of bytes >= 0 per host, such as 2_000_000 or '2GiB', got" in text
    assert first[4] == second[4] == "all ranks must have the same topology_cache, got 0 on rank 0 and 1000 on rank 1"


def test_a_cache_of_lists_needs_a_topology_in_parts(tmp_path):
    data = synthetic(num_vertices=200, num_features=2)
    with pytest.raises(ValueError, match="topology_cache= applies only to a partitioned graph, whose topology"):
        NeighborLoader(data, [2], topology_cache="1MB")
    salientpp.partition(random_data(), 2, tmp_path / "d", [3], BATCH)
    with pytest.raises(ValueError, match="every rank has the whole topology of .*partition with topology='parts'"):
        NeighborLoader(salientpp.load(tmp_path / "d"), [3], "train", topology_cache=1000)


def _edges_of_any_dtype(rank: int, root: str) -> list[list[str]]:
    fanouts = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 3, "uneven": "exact"}
    want = list(NeighborLoader(salientpp.load(f"{root}/whole"), input_nodes="all", **fanouts))
    found = []
    for num_bytes in (0, 3000, 10**6):
        loader = NeighborLoader(salientpp.load(f"{root}/parts"), input_nodes="all", topology_cache=num_bytes, **fanouts)
        found.append([names for ours, theirs in zip(loader, want, strict=True) if (names := differences(ours, theirs))])
    return found


def test_edges_have_attributes_of_every_width_and_alignment(tmp_path):
    """A width of 0, and dtypes that need an alignment of 16 bytes, beside others."""
    data = random_data(200, 1200, directed=True)
    number = data.num_edges
    data.edge_none = torch.zeros(number, 0)
    data.edge_small = torch.arange(number).to(torch.uint8)
    data.edge_complex = torch.randn(number, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    data.edge_nothing = torch.zeros(number, 2, 0, dtype=torch.complex128)
    data.edge_odd = torch.arange(number * 3).view(number, 3).to(torch.int16)
    data.edge_last = torch.randn(number, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    for topology in ("whole", "parts"):
        method = torch.arange(200) % 2
        salientpp.partition(data, 2, tmp_path / topology, [4, 3], 16, method=method, topology=topology)
    assert distributed.run(_edges_of_any_dtype, 2, str(tmp_path)) == [[[], [], []]] * 2


def test_a_list_that_does_not_fit_leaves_its_bytes_to_others():
    """The second densest row does not fit beside the densest one; narrower rows use the rest."""
    width = {None: torch.tensor([100, 950, 30, 20, 60, 10])}
    scores = {None: torch.tensor([1000.0, 5000.0, 20.0, 10.0, 25.0, 1.0], dtype=torch.float64)}
    chosen = densest(scores, width, 1000)[None]
    assert chosen.tolist() == [0, 2, 3, 4, 5]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        width = {None: torch.randint(1, 300, (60,), generator=generator)}
        scores = {None: torch.rand(60, dtype=torch.float64, generator=generator)}
        chosen = densest(scores, width, 2000)[None]
        left = 2000 - int(width[None][chosen].sum())
        others = torch.ones(60, dtype=torch.bool)
        others[chosen] = False
        assert 0 <= left < int(width[None][others].min()), "no other row would fit into the rest"
