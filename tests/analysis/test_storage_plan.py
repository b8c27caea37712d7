"""Laws of a plan with storage hosts: it agrees with loaders and counts, storage hosts limit an epoch, and both kinds of hosts are paid."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import distributed
import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.plan import Question, plan
from salientpp.datasets import synthetic
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.planner.machines import Link, Machines, Step

FANOUTS, BATCH, ROWS, WIDTH = [10, 5], 64, 6000, 64
BATCHES = Batches(num_neighbors=FANOUTS, batch_size=BATCH, seed=3, seeds="train")
FAST, SLOW = Link(1e12, 0.0), Link(1e6, 1e-4)
#: Constants with which a storage host that has a fast link is never busy.
FREE = {"row": 0.0, "byte": 0.0, "wire": 0.0}


@pytest.fixture(scope="module")
def graph() -> Data:
    return synthetic(num_vertices=ROWS, num_features=WIDTH // 4, seed=0)


@pytest.fixture(scope="module")
def directory(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> PartitionedGraph:
    return salientpp.partition(graph, 4, tmp_path_factory.mktemp("plan") / "d", FANOUTS, BATCH, seed=3)


def _planned_by_loader(rank: int, root: str, storage: int, machines: Path) -> dict[str, Any] | None:
    part = salientpp.load(root, storage_ranks=storage)
    if part.only_stores:
        salientpp.serve(part)
        return None
    options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "memory": {"host": 50_000, "machines": str(machines)}}
    found = NeighborLoader(part, FANOUTS, "train", **options).plan()
    return {line.choice.words: (line.cost.seconds, line.memory, line is found.chosen) for line in found.lines}


@pytest.mark.parametrize("storage", [1, 2])
def test_loaders_with_the_same_memory_make_the_same_plan(
    directory: PartitionedGraph, storage: int, tmp_path: Path
) -> None:
    machines, file = Machines(SLOW, step=Step(0.001)), tmp_path / "machines.json"
    machines.write(file)
    by_loaders = distributed.run(_planned_by_loader, 2 + storage, str(directory.root), storage, file)
    question = Question([2], memory=[50_000], storage_hosts=[storage], storage_link=FAST)
    planned = plan(directory, machines, question, BATCHES)
    predicted = {each.ways: each for each in planned.predictions if each.ways != "no cache"}
    assert by_loaders[2:] == [None] * storage and set(predicted) == {"cache", "lookahead"}
    for by_loader in by_loaders[:2]:
        assert set(by_loader) == set(predicted)
        for ways, (seconds, memory, chosen) in by_loader.items():
            found = predicted[ways]
            assert found.seconds == pytest.approx(seconds, rel=1e-9) and found.chosen == chosen
            assert {name: found.memory.get(name) for name in memory} == memory


def test_predicted_bytes_are_close_to_the_bytes_that_the_analysis_counts(directory: PartitionedGraph) -> None:
    budgets = [0, ROWS * WIDTH // 20, ROWS * WIDTH // 4]
    planned = plan(directory, Machines(SLOW), Question([4], memory=budgets, storage_hosts=[2]), BATCHES)
    found = {each.budget: each for each in planned.predictions if each.ways == ("cache" if each.budget else "no cache")}
    # A budget is also for seeds and tables, and cached rows have an index: 8 bytes for 32 vertices.
    cached = [found[each].memory["cache"] - 8 * ROWS // 32 if each else 0 for each in budgets]
    assert 0 < cached[1] < budgets[1]
    ways = Ways(["vip"], [4 * each / (ROWS * WIDTH) for each in cached])
    counted = analyze(directory, dataclasses.replace(BATCHES, epochs=4), ways, storage_hosts=2)
    for budget, volume in zip(budgets, counted.of(way="cache", policy="vip"), strict=True):
        assert found[budget].network_bytes == pytest.approx(volume.rows * (WIDTH + 4), rel=0.15)


def test_storage_hosts_limit_an_epoch_and_more_of_them_make_it_shorter(directory: PartitionedGraph) -> None:
    machines = Machines(FAST, cores=1000, step=Step(0.001), **FREE)
    question = Question([2, 4], memory=[0], storage_hosts=[1, 2, 4], storage_link=Link(1e6))
    planned = plan(directory, machines, question, BATCHES)
    for each in planned.predictions:
        assert each.storage_seconds == pytest.approx(each.network_bytes / each.storage_hosts / 1e6)
        assert each.seconds == pytest.approx(max(each.storage_seconds, each.training), rel=0.08)
        assert each.training + each.loading + each.waiting == pytest.approx(each.seconds)
    by_number = {(each.hosts, each.storage_hosts): each.seconds for each in planned.predictions}
    for hosts in (2, 4):
        assert by_number[hosts, 1] > by_number[hosts, 2] > by_number[hosts, 4]
    # One core that gathers and sends limits too.
    busy = dataclasses.replace(machines, byte=1e-6)
    (found,) = plan(directory, busy, Question([4], memory=[0], storage_hosts=[1]), BATCHES).predictions
    assert found.seconds >= found.storage_seconds == pytest.approx(found.network_bytes * 1e-6)


def test_rows_are_in_the_memory_of_storage_hosts(directory: PartitionedGraph, graph: Data) -> None:
    for data, numbers, groups in ((directory, [1, 2, 4, 8], [1, 2, 4, 4]), (graph, [1, 3, 8], [1, 3, 8])):
        planned = plan(data, Machines(SLOW), Question([4], memory=[0], storage_hosts=[0, *numbers]), BATCHES)
        both, *stored = planned.chosen
        assert both.memory["host"] > 0 == both.storage_bytes == both.storage_hosts
        assert [each.storage_hosts for each in stored] == numbers
        assert [each.storage_bytes for each in stored] == [-(-ROWS * WIDTH // number) for number in groups]
        for each in stored:
            assert each.memory == {**both.memory, "host": 0} and each.network_bytes > both.network_bytes


def test_a_topology_in_parts_is_in_the_memory_of_storage_hosts(graph: Data, tmp_path: Path) -> None:
    part = salientpp.partition(graph, 4, tmp_path / "d", FANOUTS, BATCH, topology="parts")
    planned = plan(part, Machines(SLOW), Question([4], memory=[0], storage_hosts=[0, 2]), BATCHES)
    both, stored = planned.chosen
    assert stored.memory["graph"] == 0 < both.memory["graph"]
    assert stored.storage_bytes == pytest.approx(ROWS * WIDTH / 2 + both.memory["graph"] * 2, abs=2)


def test_both_kinds_of_hosts_are_paid(directory: PartitionedGraph) -> None:
    machines = Machines(FAST, cores=1000, step=Step(0.1), price=3.6)
    question = Question([2, 4], memory=[0], epochs=10, storage_hosts=[0, 1, 2], storage_price=0.4)
    planned = plan(directory, machines, question, BATCHES)
    for each in planned.chosen:
        price = each.hosts * 3.6 + each.storage_hosts * 0.4
        assert each.cost == pytest.approx(price * each.seconds * 10 / 3600)
    assert len(planned.chosen) == 6
    # Training dominates, so storage hosts save nothing and only cost.
    assert (planned.recommended.hosts, planned.recommended.storage_hosts) == (4, 0)
    assert planned.cheapest is not None and planned.cheapest.storage_hosts == 0


def test_without_storage_hosts_a_plan_is_as_before(directory: PartitionedGraph) -> None:
    machines, both = Machines(SLOW), Question([2, 4], memory=[0, 50_000])
    with_storage = plan(directory, machines, dataclasses.replace(both, storage_hosts=[0, 1]), BATCHES)
    left = [each for each in with_storage.predictions if not each.storage_hosts]
    assert left == list(plan(directory, machines, both, BATCHES).predictions)


@pytest.mark.parametrize(
    ("question", "machines", "text"),
    [
        (Question([4], storage_hosts=[-1]), Machines(FAST), "storage_hosts must be integers >= 0, got -1"),
        (Question([4], storage_hosts=[5]), Machines(FAST), "storage_ranks=5 does not fit 4 parts"),
        (Question([4], storage_hosts=[1]), Machines(FAST, price=1.0), "storage_price is missing, and price alone"),
        (Question([4], storage_hosts=[1], storage_price=1.0), Machines(FAST), "price is missing, and storage_price"),
        (Question([4], storage_price=1.0), Machines(FAST, price=1.0), "there are none; pass storage_hosts too"),
        (Question([4], storage_hosts=[1], storage_price=-1.0), Machines(FAST), "storage_price must be a number >= 0"),
        (Question([4], storage_hosts=[1], allow=["sums"]), Machines(FAST), "allow sums does not work with storage"),
        (
            Question([4], storage_hosts=[1], device_memory=[9]),
            Machines(FAST, to_device=1e9),
            "device_memory does not work with storage hosts",
        ),
    ],
)
def test_wrong_questions_are_refused(
    directory: PartitionedGraph, question: Question, machines: Machines, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        plan(directory, machines, question)


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_compares_storage_hosts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, directory: PartitionedGraph, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = "--hosts", "2,4", "--storage-hosts", "0,1,2", "--memory", "0B,50kB", "--price", 2, "--storage-price", 0.5
    files = "--json", tmp_path / "plan.json", "--plot", tmp_path / "plan.svg"
    link = "--machines", "1GbE", "--storage-link", "10GbE"
    code, out, err = run(capsys, "plan", directory.root, *link, *options, *files)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    words, values = " ".join(out.split()), json.loads((tmp_path / "plan.json").read_text())
    assert "hosts storage copies" in words and "network per host stored cost" in words
    assert "storage hosts were not measured. Each is taken to have a link of 1.25 GB/s, one core" in words
    assert {(each["hosts"], each["storage_hosts"]) for each in values["predictions"]} == {
        (hosts, storage) for hosts in (2, 4) for storage in (0, 1, 2)
    }
    best = values["predictions"][values["recommended"]]
    assert ("storage_ranks=" in words.partition("Recommended: ")[2].partition("Cheapest")[0]) == (
        best["storage_hosts"] > 0
    )
    assert b"2+1" in (tmp_path / "plan.svg").read_bytes() or (tmp_path / "plan.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--storage-hosts", "-1"], "storage_hosts must be integers >= 0, got -1"),
        (["--storage-hosts", "1", "--storage-link", "slow"], "--storage-link must be one of 1GbE, 10GbE,"),
        (["--storage-hosts", "1", "--price", "1"], "storage_price is missing"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], directory: PartitionedGraph, options: list[str], text: str
) -> None:
    assert text in mistake(capsys, "plan", directory.root, "--machines", "10GbE", *options)
