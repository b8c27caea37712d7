"""Laws of counted requests for neighbour lists: the counts equal those of a run, and the predictions are sums of probabilities."""

from __future__ import annotations

import json
from typing import Any

import distributed
import pytest
from one_process import TYPED_FANOUTS, homogeneous, typed_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.result import ListTraffic
from salientpp.cli import main

FANOUTS, BATCH, EPOCHS = [4, 3, 2], 8, 2
BUDGETS = [0, 2500, 10**7]


def run(rank: int, root: str, link: bool, budgets: list[int], ranks_per_host: int, options: dict[str, Any]) -> list:
    found = []
    for budget in budgets:
        part = salientpp.load(root)
        made: Any = LinkNeighborLoader if link else NeighborLoader
        given = {"shuffle": True, "seed": 4, "topology_cache": budget, "ranks_per_host": ranks_per_host, **options}
        loader = made(part, **given)
        for _ in range(EPOCHS):
            for _ in loader:
                pass
        found.append(loader.stats())
    return found


def check(lists: list[ListTraffic], by_rank: list[list[Any]]) -> None:
    """The counts of each budget equal the statistics of all ranks."""
    for number, figures in enumerate(lists):
        stats = [of_rank[number] for of_rank in by_rank]
        expansions = [(each.expansions_own, each.expansions_copied, each.expansions_remote) for each in stats]
        assert [tuple(EPOCHS * each for each in own) for own in figures.expansions_per_rank or ()] == expansions
        assert [EPOCHS * each for each in figures.bytes_sent_per_rank or ()] == [each.list_bytes_sent for each in stats]
        received = [EPOCHS * each for each in figures.bytes_received_per_rank or ()]
        assert received == [each.list_bytes_received for each in stats]
        assert [EPOCHS * each for each in figures.rounds_per_rank or ()] == [each.list_rounds for each in stats]
        assert EPOCHS * (figures.list_bytes_per_epoch or 0) == sum(each.list_bytes_sent for each in stats)
        assert figures.expansions_remote == sum(own[2] for own in expansions) / EPOCHS


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {"num_neighbors": FANOUTS}, {}),
    ("one hop", {"num_neighbors": [5]}, {}),
    ("weights", {"num_neighbors": FANOUTS, "weight_attr": "weight", "disjoint": True}, {}),
    ("times", {"num_neighbors": FANOUTS, "time_attr": "time"}, {}),
    ("links", {"num_neighbors": [3, 2], "neg_sampling": "binary", "batch_size": 200}, {"link": True, "seeds": "all"}),
]


@pytest.mark.parametrize("num_parts, world, ranks_per_host", [(2, 2, 1), (4, 4, 1), (4, 4, 2), (2, 4, 1), (3, 2, 1)])
def test_counts_equal_those_of_a_run(tmp_path, num_parts, world, ranks_per_host):
    salientpp.partition(homogeneous(), num_parts, tmp_path / "d", FANOUTS, BATCH, topology="parts")
    for name, options, of_batches in CASES if (num_parts, world) == (2, 2) else CASES[:1]:
        options = {"batch_size": BATCH, **options}
        batches = Batches(epochs=EPOCHS, seed=4, **options, **of_batches)
        ways = Ways(["vip"], [0], topology_cache=BUDGETS)
        lists = analyze(salientpp.load(tmp_path / "d"), batches, ways, ranks=world, ranks_per_host=ranks_per_host).lists
        link = "link" in of_batches
        given = {"edge_label_index" if link else "input_nodes": "all" if link else "train", **options}
        found = distributed.run(run, world, str(tmp_path / "d"), link, BUDGETS, ranks_per_host, given)
        check(list(lists), found)
        none, some, whole = lists
        assert none.copied_bytes == (0,) * len(none.copied_bytes) and all(each <= 2500 for each in some.copied_bytes)
        assert whole.expansions_remote == whole.list_bytes_per_epoch == whole.list_rounds_per_batch == 0, name
        assert whole.local_share == 1 and abs(whole.predicted_local_share - 1) < 1e-6
        if len(options["num_neighbors"]) > 1:
            assert (some.expansions_copied or 0) > 0 and (some.list_rounds_per_batch or 0) > 0, name
            assert none.predicted_remote > some.predicted_remote > 0


def test_a_whole_topology_is_counted_as_if_it_were_in_parts(tmp_path):
    found = []
    for topology in ("whole", "parts"):
        salientpp.partition(homogeneous(), 2, tmp_path / topology, FANOUTS, BATCH, topology=topology)
        for predict_only in (False, True):
            ways = Ways(["vip"], [0], topology_cache=["2.5kB", 0, 0])
            analysis = analyze(salientpp.load(tmp_path / topology), Batches(epochs=1), ways, predict_only=predict_only)
            found.append(analysis.lists)
    assert found[:2] == found[2:] and [each.topology_cache for each in found[0]] == [0, 2500]
    for counted, predicted in zip(*found[:2]):
        assert predicted.expansions_remote is predicted.list_bytes_per_epoch is predicted.local_share is None
        assert predicted.predicted_remote == counted.predicted_remote and predicted.copied_bytes == counted.copied_bytes
        assert 0.7 < counted.predicted_remote / (counted.expansions_remote or 0) < 1.6


def test_what_cannot_be_counted_is_refused(tmp_path):
    with pytest.raises(ValueError, match="requests for neighbour lists are counted only on a dataset directory"):
        analyze(homogeneous(), Batches([2], 8), Ways(topology_cache=[1000]), parts=2)
    with pytest.raises(ValueError, match="topology_cache must be a number of bytes >= 0 per host"):
        Ways(topology_cache=["1.5"]).checked(False)


def test_the_command_shows_requests_for_lists(tmp_path, capsys):
    salientpp.partition(homogeneous(), 2, tmp_path / "d", FANOUTS, BATCH)
    arguments = ["analyze", str(tmp_path / "d"), "--epochs", "1", "--topology-cache", "0,3kB", "--json"]
    assert main([*arguments, str(tmp_path / "out.json")]) == 0
    lists = json.loads((tmp_path / "out.json").read_text())["lists"]
    assert [each["topology_cache"] for each in lists] == [0, 3000]
    assert lists[0]["list_bytes_per_epoch"] > lists[1]["list_bytes_per_epoch"] > 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bytes of requests and answers" in out and "rounds with requests per batch" in out and "3 kB" in out


@pytest.mark.parametrize("num_parts, world", [(2, 2), (4, 4)])
def test_counts_of_several_types_equal_those_of_a_run(tmp_path, num_parts, world):
    seeds = ("paper", "train")
    salientpp.partition(typed_data(), num_parts, tmp_path / "d", TYPED_FANOUTS, BATCH, seeds=seeds, topology="parts")
    budgets = [0, 900, 10**7]
    batches = Batches(TYPED_FANOUTS, BATCH, seeds, EPOCHS, 4)
    lists = analyze(salientpp.load(tmp_path / "d"), batches, Ways(["vip"], [0], topology_cache=budgets)).lists
    given = {"num_neighbors": TYPED_FANOUTS, "input_nodes": seeds, "batch_size": BATCH}
    check(list(lists), distributed.run(run, world, str(tmp_path / "d"), False, budgets, 1, given))
    assert lists[0].expansions_remote and lists[1].expansions_copied and not lists[2].expansions_remote
