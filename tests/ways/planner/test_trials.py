"""Prices of copies of lists: no list is copied before the price is known."""

from __future__ import annotations

import distributed
import pytest
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.ways.planner.trials import Trials
from salientpp.ways.topology_cache import TopologyCache, bytes_of_all_lists

FANOUTS, BATCH = [8, 6], 128


def _compare(rank: int, root: str, budgets: list[int], options: dict) -> list[tuple]:
    """Returns, for each budget, the bytes of copies and of packets per batch: of a plan, of an engine, and as counted."""
    part, found = salientpp.load(root), []
    for budget in budgets:
        same = {"batch_size": BATCH, "seed": 0, **options}
        plain = NeighborLoader(part, FANOUTS, "train", **same).engine.basis
        way = TopologyCache(budget)
        with plain.remembering():
            chosen, _ = Trials(plain).price([way], 1e-7)
            everything = bytes_of_all_lists(plain)
        loader = NeighborLoader(part, FANOUTS, "train", topology_cache=budget, **same)
        placed = loader.engine.price().lists
        number = sum(1 for _ in loader)
        # A rank's own requests and answers are in both directions; the mean over the ranks is the same.
        counted = (loader.stats().list_bytes_sent + loader.stats().list_bytes_received) / 2 / number
        held = loader.memory_used().get("topology_cache", 0)
        found.append((way.memory().get("topology_cache", 0), held, chosen.lists, placed, counted, everything))
    return found


@pytest.mark.parametrize("options", [{}, {"subgraph_type": "induced"}, {"ranks_per_host": 2}], ids=str)
def test_copies_that_are_only_chosen_have_the_bytes_and_the_price_of_real_copies(tmp_path, options):
    data = random_data(6000, 60000, seed=2)
    num_ranks = 4 if "ranks_per_host" in options else 2
    salientpp.partition(data, num_ranks, tmp_path / "parts", FANOUTS, BATCH, refine=False, topology="parts")
    budgets = [10_000, 60_000, 120_000, 10**8]
    # The request for induced edges names all vertices of the batch, which copies do not change.
    band = 0.35 if "subgraph_type" in options else 0.15
    ranks = distributed.run(_compare, num_ranks, str(tmp_path / "parts"), budgets, options)
    for of_budget in zip(*ranks):
        chosen_bytes, held = zip(*(each[:2] for each in of_budget))
        assert chosen_bytes == held
        means = [sum(numbers) / num_ranks for numbers in list(zip(*of_budget))[2:5]]
        assert means[0] == pytest.approx(means[2], rel=band, abs=256)
        assert means[1] == pytest.approx(means[2], rel=0.15, abs=256)
    lists = [of_budget[0][2] for of_budget in zip(*ranks)]
    assert lists[0] > 1.1 * lists[1] > 0 and lists[-1] == 0
    assert all(each[0] <= each[-1] for of_rank in ranks for each in of_rank)
