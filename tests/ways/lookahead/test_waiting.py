"""Laws of batches that are drawn in rounds and wait: they are drawn once, their ids are known within the epoch, and a rank that leaves gives them up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from rare import some_of

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws
from salientpp.engine.way import Way
from salientpp.engine.workers import SamplingWorkers
from salientpp.store.fetch import Fetch
from salientpp.ways.lookahead.shape import group_of, reach_of
from salientpp.ways.lookahead.waiting import Waiting
from salientpp.ways.lookahead.way import Lookahead

FANOUTS, BATCH = [4, 3], 8


# --- the batches that are known -----------------------------------------------------------------------------


def _filled(*ticks: int) -> tuple[Waiting, Draws]:
    waiting, draws = Waiting(), Draws(0, 1, 0)
    for tick in ticks:
        waiting.add(draws, tick, {None: SimpleNamespace(remote_id=torch.tensor([tick]))})
    return waiting, draws


def _known(waiting: Waiting, reach: int) -> list[int]:
    found = []
    while (ids := waiting.after(len(found) + 1, reach, None)) is not None:
        found += ids.tolist()
    return found


def test_the_batches_after_the_entering_one_are_known_in_order():
    waiting, draws = _filled(*range(6))
    follows = []
    for tick in range(6):
        follows.append(waiting.enter(draws, tick))
        assert _known(waiting, 3) == list(range(tick + 1, min(6, tick + 4)))
    assert follows == [False, True, True, True, True, True], "nothing was known about the first batch"


def test_the_reach_counts_ticks_so_that_the_speed_of_threads_changes_nothing():
    waiting, draws = _filled(0, 1, 5, 6)
    waiting.enter(draws, 0)
    assert [_known(waiting, reach) for reach in (0, 1, 4, 5, 6)] == [[], [1], [1], [1, 5], [1, 5, 6]]


def test_after_a_batch_that_was_given_up_the_known_batches_do_not_follow():
    waiting, draws = _filled(0, 1, 2, 3)
    assert [waiting.enter(draws, tick) for tick in (0, 2, 3)] == [False, False, True]


def test_no_batch_of_an_earlier_epoch_is_known():
    waiting, draws = _filled(0, 1, 2)
    waiting.enter(draws, 0)
    waiting.forget()
    later = replace(draws, epoch=1)
    waiting.add(later, 0, {None: SimpleNamespace(remote_id=torch.tensor([7]))})
    assert not waiting.enter(later, 0) and _known(waiting, 9) == []


@pytest.mark.parametrize("window", [1, 2, 8, 9, 16, 17, 100, 2**13])
def test_the_reach_is_the_last_batch_that_a_planner_reads(window):
    group = group_of(window)
    assert reach_of(window) == max(known for known in range(group + window))


# --- loaders ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[tuple[str, int], str]:
    """Makes directories by (form of the topology, number of parts)."""
    data = random_data(600, 3600)
    data.x = torch.arange(600, dtype=torch.float32).unsqueeze(1) * torch.ones(64)
    data.train_mask = torch.arange(600) % 3 != 0
    found = {}
    for topology in ("whole", "parts"):
        for num_parts in (1, 2, 4):
            root = tmp_path_factory.mktemp("waiting") / "directory"
            salientpp.partition(data, num_parts, root, FANOUTS, BATCH, topology=topology)
            found[topology, num_parts] = str(root)
    return found


def _loader(root: str, **options: Any) -> NeighborLoader:
    options = {"shuffle": True, "seed": 3, "replication_factor": 0.3, "lookahead": 5, "ranks_per_host": 1, **options}
    return NeighborLoader(salientpp.load(root), FANOUTS, "train", batch_size=BATCH, **options)


def _equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ("n_id", "x", "edge_index", "e_id"))


def _rows(rank: int, root: str, window: int) -> tuple[int, int, int, int]:
    """Compares three epochs with those without lookahead. Returns rows with and without it, and bytes of requests for lists."""
    ours, plain = _loader(root, lookahead=window, num_workers=rank % 2), _loader(root, lookahead=0)
    for _ in range(3):
        for one, other in zip(ours, plain, strict=True):
            assert _equal(one, other)
    sent = [loader.engine.basis.source.exchange.traffic.list_bytes_sent for loader in (ours, plain)]
    return ours.stats().rows_remote, plain.stats().rows_remote, *sent


SOME = [(1, 5), (2, 1), (4, 30)]
EVERY = [*itertools.product((1, 2, 4), (1, 5, 30))]


@pytest.mark.parametrize(("num_ranks", "window"), some_of(SOME, EVERY))
def test_batches_are_drawn_once_and_fewer_rows_travel(roots, num_ranks, window):
    whole = distributed.run(_rows, num_ranks, roots["whole", num_ranks], window)
    parts = distributed.run(_rows, num_ranks, roots["parts", num_ranks], window)
    assert [rows[1] for rows in parts] == [rows[1] for rows in whole]
    assert all(ours == plain for _, _, ours, plain in parts)
    fetched, static, most = (
        sum(rows) for rows in ([r[0] for r in whole], [r[1] for r in whole], [r[0] for r in parts])
    )
    # A window that ends with the epoch knows a little less.
    assert fetched <= most <= fetched + 0.15 * (static - fetched)
    assert num_ranks == 1 or most < static


def _in_flight(rank: int, root: str, window: int) -> tuple[int, int]:
    """Leaves an epoch after two batches. Returns the rows of all assembled batches, and of a whole epoch."""
    loader = _loader(root, lookahead=window, replication_factor=0.8, depth=2)
    for index, _ in enumerate(loader):
        if index == 1:
            break
    loader.engine.close()
    left = loader.stats().rows
    loader.reset_stats()
    for _ in loader:
        pass
    return left, loader.stats().rows


def test_a_rank_that_leaves_gives_up_the_waiting_batches(roots):
    for left, epoch in distributed.run(_in_flight, 2, roots["parts", 2], 12):
        assert 0 < left < epoch / 2


def _memory(rank: int, root: str) -> dict[int, int]:
    found = {}
    for window in (0, 4, 8):
        loader = _loader(root, lookahead=window, replication_factor=0.8)
        for _ in loader:
            pass
        found[window] = loader.memory_used()["batches"]
    return found


def test_memory_counts_the_waiting_batches(roots):
    for batches in distributed.run(_memory, 2, roots["parts", 2]):
        assert batches[0] < batches[4] and batches[8] - batches[0] == 2 * (batches[4] - batches[0])


def _auto(rank: int, root: str) -> tuple[int, int, int]:
    loader = _loader(root, lookahead="auto", replication_factor=0.8)
    static = _loader(root, lookahead=0, replication_factor=0.8)
    for _ in loader:
        pass
    return loader.engine.producer.waits, loader.memory_used()["batches"], static.memory_used()["cache"]


def test_auto_lets_waiting_batches_take_about_as_much_memory_as_the_cache(roots):
    for waits, batches, cache in distributed.run(_auto, 2, roots["parts", 2]):
        assert waits > 1 and 0.4 * cache < batches < 1.3 * cache


def _differs(rank: int, root: str, name: str, value: Any) -> str | None:
    try:
        _loader(root, **({name: value} if rank else {}))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "value"), [("lookahead", 0), ("replication_factor", 0.0)])
def test_options_of_caches_agree_on_all_ranks_because_the_ranks_plan_together(roots, name, value):
    for failed in distributed.run(_differs, 2, roots["parts", 2], name, value):
        assert failed is not None and f"all ranks must have the same {name}" in failed
    assert distributed.run(_differs, 2, roots["whole", 2], name, value) == [None, None]


class Waits(Way):
    """Way that lets batches wait for a number of ticks that differs between ranks."""

    name = "waits"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def attach(self, basis: Basis, fetch: Fetch, workers: SamplingWorkers) -> None:
        self.waits = 3 * basis.comm.rank

    def on_waiting(self, draws: Draws, tick: int, places: Any) -> None:
        self.seen.append(tick)


def _waits(rank: int, root: str) -> int:
    way = Waits()
    ours, plain = _loader(root, lookahead=0, ways=[way]), _loader(root, lookahead=0)
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert _equal(one, other)
        assert len(way.seen) >= min(len(ours), number + 1 + 3)
    assert way.seen == list(range(len(ours)))
    return ours.engine.producer.waits


def test_all_ranks_wait_for_the_same_number_of_ticks(roots):
    assert distributed.run(_waits, 2, roots["parts", 2]) == [3, 3]


def _types(rank: int, root: str) -> int:
    part = salientpp.load(root)
    options: dict[str, Any] = dict(
        input_nodes=("paper", "train"), shuffle=True, seed=3, batch_size=4, replication_factor=0.4
    )
    ours, plain = (NeighborLoader(part, [3, 2], lookahead=window, **options) for window in (3, 0))
    for _ in range(3):
        for one, other in zip(ours, plain, strict=True):
            for type_ in part.node_types:
                assert torch.equal(one[type_].n_id, other[type_].n_id)
                assert "x" not in other[type_] or torch.equal(one[type_].x, other[type_].x)
            for type_ in part.edge_types:
                assert torch.equal(one[type_].edge_index, other[type_].edge_index)
    return len(ours.engine.way(Lookahead).planners)


def test_every_type_has_a_window_of_its_own(tmp_path):
    data = random_hetero()
    for type_ in data.node_types:
        data[type_].x = torch.rand(data[type_].num_nodes, 40 if type_ == "paper" else 24)
    data["paper"].train_mask = torch.arange(data["paper"].num_nodes) % 2 == 0
    salientpp.partition(data, 2, tmp_path / "types", [3, 2], 4, replicate=(), topology="parts")
    assert any(number > 1 for number in distributed.run(_types, 2, str(tmp_path / "types")))
