"""Laws of loaders with one memory budget, on 1, 2 and 4 ranks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from batches import differences, make
from graphs import random_data
from rare import rare

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.testing.way import BATCH, FANOUTS, directory
from salientpp.ways.planner.choices import Choice
from salientpp.ways.planner.machines import Link, Machines, Step
from salientpp.ways.planner.result import COPIES, MemoryPlan

#: With a link that is free, only the work of the cores counts; with a slow one, only the bytes.
FREE = Machines(between=Link(1e12, 0), row=1e-6, look_ahead=1e-5, sum=1e-5)
SLOW = Machines(between=Link(1e4, 1e-6))

#: A budget for all remote rows, one for some of them, one for their index only, and none.
BUDGETS = [10**8, 5000, 300, 0]


@dataclasses.dataclass(frozen=True)
class Found:
    """Observations of one rank about a loader with a budget.

    Attributes:
        plan, memory: the plan, and the memory that the loader holds.
        wrong: differences of its batches from those of a plain loader.
        received: bytes per batch.
        shared: bytes of its cache in another loader.
    """

    plan: MemoryPlan
    memory: dict[str, int]
    wrong: list[str]
    received: float
    shared: int


def _loader(part: salientpp.PartitionedGraph, **options: Any) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 3, "ranks_per_host": 1, **options}
    if "memory" in options:
        memory = options["memory"] if isinstance(options["memory"], dict) else {"host": options["memory"]}
        options["memory"] = {"machines": SLOW, **memory}
    return NeighborLoader(part, FANOUTS, "train", **options)


def _observe(rank: int, root: str, several: list[dict[str, Any]]) -> list[Found]:
    part, found = salientpp.load(root), []
    for options in several:
        of_host = {"ranks_per_host": options["ranks_per_host"]} if "ranks_per_host" in options else {}
        plain, loader = _loader(part, **of_host), _loader(part, **options)
        wrong, number = [], 0
        for _ in range(2):
            for ours, want in zip(loader, plain, strict=True):
                # With sums, the law of sums compares the outputs of a model (salientpp/testing/way.py).
                wrong += [] if "partial" in ours else differences(ours, want)
                number += 1
        stats = loader.stats()
        # A row is requested by its id of 4 bytes.
        requests = 4 * stats.rows_remote if "sums" not in str(options.get("memory")) else 0
        received = (stats.by_type[None]["bytes_received"] + requests + stats.list_bytes_received) / number
        other = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, cache=loader.cache, **of_host)
        shared = other.memory_used()["cache"]
        found.append(Found(loader.plan(), loader.memory_used(), wrong, received, shared))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{budget} bytes": {"memory": budget} for budget in BUDGETS},
    "free link": {"memory": {"host": 5000, "machines": FREE}},
    "sums": {"memory": {"host": 5000, "allow": ["sums"]}},
    "hosts": {"memory": 5000, "ranks_per_host": 2},
    "alpha": {"memory": 5000, "replication_factor": 0.1, "lookahead": 3},
    "no lookahead": {"memory": 5000, "policy": "degree"},
}


@pytest.fixture(
    scope="module",
    params=[(1, "whole"), (4, "whole"), (2, "parts"), *rare(((2, "whole"),), ((4, "parts"),))],
    ids=lambda given: f"{given[0]} ranks, {given[1]}",
)
def found(request, tmp_path_factory) -> dict[str, list[Found]]:
    """Observations of all ranks, for each entry of OPTIONS."""
    num_ranks, topology = request.param
    root = directory(tmp_path_factory.mktemp("plan") / "parts", num_ranks, topology)
    several = [dict(options) for options in OPTIONS.values()]
    for options in several:
        if "ranks_per_host" in options:
            options["ranks_per_host"] = min(2, num_ranks)
    ranks = distributed.run(_observe, num_ranks, root, several)
    return dict(zip(OPTIONS, map(list, zip(*ranks))))


def _copies(memory: dict[str, int]) -> int:
    return sum(memory.get(name, 0) for name in COPIES)


def test_batches_do_not_depend_on_the_plan(found):
    assert {name: [each.wrong for each in ranks] for name, ranks in found.items()} == {
        name: [[]] * len(ranks) for name, ranks in found.items()
    }


def test_all_ranks_have_the_same_plan(found):
    for name, ranks in found.items():
        assert all(each.plan.lines == ranks[0].plan.lines for each in ranks), name
        assert all(each.plan.chosen == ranks[0].plan.chosen for each in ranks), name


def test_copies_stay_within_the_budget(found):
    for name, ranks in found.items():
        sharing = min(2, len(ranks)) if name == "hosts" else 1
        for each in ranks:
            shared = each.memory["cache"] if not each.memory.get("lookahead") else sharing * each.memory["cache"]
            held = shared + sharing * each.memory.get("lookahead", 0)
            assert held <= each.plan.memory, name
            assert held <= each.plan.chosen.copies


def test_another_loader_may_take_the_cache_of_any_plan(found):
    """A cache that looks ahead follows the batches of its own loader, so another loader takes an empty one."""
    for name, ranks in found.items():
        for each in ranks:
            looks_ahead = each.plan.chosen.choice.lookahead
            assert each.shared == (0 if looks_ahead else each.memory["cache"]), name
    assert len(found["alpha"]) == 1 or any(each.memory["cache"] for each in found["alpha"])


def test_a_large_budget_is_used_and_none_is_not(found):
    for name, ranks in found.items():
        used = max(_copies(each.memory) for each in ranks)
        if ranks[0].plan.memory < 376 or len(ranks) == 1:
            assert used == 0, name
        elif name == "5000 bytes":
            assert used > 4500


def test_expected_bytes_equal_received_bytes(found):
    for name, ranks in found.items():
        for each in ranks:
            line, number = each.plan.chosen, each.plan.batch.number
            slowest = max(other.received for other in ranks)
            expected = line.cost.bytes_in / number
            # The line is the slowest rank's. With sums, it contains their requests too.
            assert expected >= 0.85 * each.received - 100, name
            assert expected <= 1.15 * slowest + 100 or name == "sums", name


def test_the_link_decides_between_bytes_and_work(found):
    for ranks in found.values():
        for each in ranks:
            lines = each.plan.lines
            assert each.plan.chosen.cost.seconds <= min(line.cost.seconds for line in lines) / 0.97
    if len(found["free link"]) > 1:
        free = found["free link"][0].plan
        assert (free.chosen.choice.lookahead, free.chosen.choice.sums) == (0, None) and free.chosen.choice.cache > 0
        slow = found["sums"][0].plan
        assert slow.chosen.cost.bytes_in <= min(line.cost.bytes_in for line in slow.lines) / 0.97


def test_given_options_are_not_chosen(found):
    choice = found["alpha"][0].plan.chosen.choice
    assert (choice.cache, choice.lookahead) == (0.1, 3)
    assert all(line.choice.lookahead == 3 for line in found["alpha"][0].plan.lines)
    assert not any(line.choice.lookahead for line in found["no lookahead"][0].plan.lines)


def test_more_memory_or_a_faster_link_never_predicts_a_slower_epoch(found):
    seconds = [found[f"{budget} bytes"][0].plan.chosen.cost.seconds for budget in BUDGETS]
    assert all(more <= less / 0.97 for more, less in itertools.pairwise(seconds))
    assert found["free link"][0].plan.chosen.cost.link <= found["5000 bytes"][0].plan.chosen.cost.link
    for ranks in found.values():
        assert all(each.plan.saves >= 0 for each in ranks)


# --- the table ----------------------------------------------------------------------------------------------


def test_the_table_fits_a_terminal_and_marks_the_chosen_line(found):
    for ranks in found.values():
        text = str(ranks[0].plan)
        assert max(map(len, text.splitlines())) <= 80
        assert len(re.findall("^ *> ", text, re.MULTILINE)) == 1
        for part in (
            "seconds training loading waiting network copies",
            "own rows",
            "topology",
            "batches in flight",
            "one more GiB",
            "MB/s between hosts",
            "no training step",
        ):
            assert part in " ".join(text.split()), part


def test_the_table_says_that_one_host_fetches_nothing(found):
    for name, ranks in found.items():
        if name == "alpha":
            continue  # a given cache is in every combination
        is_one_host = len(ranks) == 1 or (name == "hosts" and len(ranks) == 2)
        assert ("all ranks share one host" in " ".join(str(ranks[0].plan).split())) == is_one_host, name


def test_the_loader_warns_if_given_options_exceed_the_budget_and_if_a_step_was_measured(tmp_path):
    distributed.run(_check_notes, 2, directory(tmp_path / "parts", 2))


def _check_notes(rank: int, root: str) -> None:
    part = salientpp.load(root)
    machines = dataclasses.replace(SLOW, step=Step(seconds=0.1, edges=100))
    with pytest.warns(
        UserWarning, match="than the budget of 500 B; pass a larger memory=, or leave the options"
    ) as told:
        loader = _loader(part, memory={"host": 500, "machines": machines}, replication_factor=0.3)
    assert all(Path(each.filename) == Path(__file__) for each in told)
    text = " ".join(str(loader.plan()).split())
    assert "per host for copies of rows, more than the budget of 500 B" in text
    assert "no training step" not in text
    assert "the options that were given" not in str(_loader(part, memory=5000).plan())
    plain = _loader(part)
    with pytest.raises(ValueError, match="this loader has no plan, because it has no memory budget; pass memory="):
        plain.plan()


def test_constants_are_measured_if_none_are_given(tmp_path):
    machines = distributed.run(_measured, 2, directory(tmp_path / "parts", 2))
    assert machines[0] == machines[1]
    default = Machines(between=Link(1.25e9, 5e-5))
    assert machines[0].between not in (default.between, machines[0].within) and machines[0].cores != default.cores
    assert machines[0].batch == default.batch


def _measured(rank: int, root: str) -> Machines:
    loader = _loader(salientpp.load(root), memory={"host": 5000, "machines": None})
    assert len(list(loader)) == len(loader)
    return loader.plan().machines


# --- saved states ---------------------------------------------------------------------------------------------


def _check_states(rank: int, root: str) -> None:
    part = salientpp.load(root)
    want = [list(loader) for loader in [_loader(part)] for _ in range(3)]
    small, large = _loader(part, memory=1000), _loader(part, memory=20000)
    first = iter(small)
    for number in range(3):
        assert differences(next(first), want[0][number]) == []
    state = small.state_dict()
    assert Choice.of(state["plan"]) == small.plan().chosen.choice
    del first
    before = large.plan().chosen.choice
    large.load_state_dict(state)
    assert large.state_dict()["plan"] == state["plan"], "a state that is saved again before the epoch has the same plan"
    for ours, theirs in zip(large, want[0][3:], strict=True):
        assert differences(ours, theirs) == []
    plan = large.plan()
    assert plan.chosen.choice == small.plan().chosen.choice != before
    assert "the loaded state was saved under this plan" in " ".join(str(plan).split())
    assert _copies(large.memory_used()) <= 1000
    for ours, theirs in zip(large, want[1], strict=True):
        assert differences(ours, theirs) == []
    # A plan that does not fit is not taken, and a loader without a budget ignores it.
    greedy = _loader(part, memory=20000).state_dict()
    small.load_state_dict(greedy)
    next(iter(small))
    assert small.plan().chosen.choice == Choice.of(state["plan"])
    plain = _loader(part)
    plain.load_state_dict(state)
    for ours, theirs in zip(plain, want[0][3:], strict=True):
        assert differences(ours, theirs) == []
    assert "plan" not in plain.state_dict()
    # Options that this loader was given stay.
    given = _loader(part, memory=20000, lookahead=0, replication_factor=0.05)
    given.load_state_dict(state)
    next(iter(given))
    assert given.plan().chosen.choice.cache == 0.05


@pytest.mark.parametrize(("num_ranks", "topology"), [(1, "whole"), (2, "parts"), *rare((2, "whole"))])
def test_a_loader_continues_under_the_plan_of_its_state(tmp_path, num_ranks, topology):
    distributed.run(
        _check_states if num_ranks > 1 else _check_state_alone,
        num_ranks,
        directory(tmp_path / "parts", num_ranks, topology),
    )


def _check_state_alone(rank: int, root: str) -> None:
    loader = _loader(salientpp.load(root), memory=1000)
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == len(loader)


def _load_on_one_rank(rank: int, root: str) -> str:
    part = salientpp.load(root)
    state, loader = _loader(part, memory=1000).state_dict(), _loader(part, memory=20000)
    if rank == 1:
        loader.load_state_dict(state)
    with pytest.raises(RuntimeError) as raised:
        next(iter(loader))
    return str(raised.value)


def test_a_plan_that_only_one_rank_has_loaded_ends_all_ranks(tmp_path):
    texts = distributed.run(_load_on_one_rank, 2, directory(tmp_path / "parts", 2))
    assert texts[0] == texts[1]
    assert texts[0].startswith("all ranks or none must resume, but rank 1 has loaded a state and rank 0 has not")


def _load_two_plans(rank: int, root: str) -> str:
    part = salientpp.load(root)
    states, loader = [_loader(part, memory=size).state_dict() for size in (1000, 20000)], _loader(part, memory=20000)
    loader.load_state_dict(states[rank])
    with pytest.raises(RuntimeError) as raised:
        next(iter(loader))
    return str(raised.value)


def test_plans_that_differ_between_ranks_end_all_ranks(tmp_path):
    texts = distributed.run(_load_two_plans, 2, directory(tmp_path / "parts", 2))
    assert texts[0] == texts[1]
    assert texts[0].startswith("all ranks must load states of the same plan, got ")


def _load_damaged(rank: int, root: str) -> None:
    part = salientpp.load(root)
    loader = _loader(part, memory=5000)
    state = loader.state_dict()
    for plan, text in [
        ({**state["plan"], "lookahead": -1}, "cannot load this state: lookahead must be an integer"),
        (
            {**state["plan"], "replication_factor": "all"},
            "replication_factor of a plan must be a number >= 0, got 'all'",
        ),
        ({**state["plan"], "partial_aggregation": "median"}, "partial_aggregation of a plan must be one of sum"),
        (
            {**state["plan"], "partial_aggregation": "mean"},
            "its plan uses sums, which change batches; make the loader with",
        ),
        ("cache", "cannot load this state: a plan must have the entries replication_factor, lookahead"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            loader.load_state_dict({**state, "plan": plan, "epoch": 5})
        assert loader.state_dict()["epoch"] == 0, "the loader is unchanged"
    next(iter(loader))


def test_a_damaged_plan_is_refused(tmp_path):
    distributed.run(_load_damaged, 2, directory(tmp_path / "parts", 2))


# --- errors ---------------------------------------------------------------------------------------------------


def _refused(options: dict[str, Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        make(random_data(), **options)
    return str(raised.value)


def test_wrong_values_are_refused(tmp_path):
    assert "memory=1000 is for copies of other ranks' rows, but an object in memory" in _refused({"memory": 1000})
    assert _refused({"memory": -1}).startswith(
        "memory must be a number of bytes >= 0 and < 2^63 of a host's memory, such as '8GiB'"
    )
    assert "got '8 gigs'" in _refused({"memory": "8 gigs"})
    assert "memory['device']=1000 is memory of an accelerator, but device is the CPU" in _refused(
        {"memory": {"device": 1000}}
    )
    assert "memory['allow'] applies only to a plan within a memory budget" in _refused({"memory": {"allow": ["sums"]}})
    assert "memory['machines'] applies only to a plan within a memory budget" in _refused(
        {"memory": {"machines": SLOW}}
    )
    assert "memory['machines'] must be the path of a file" in _refused(
        {"memory": {"host": 1, "machines": 3}}, TypeError
    )
    assert "memory['allow'] may contain 'sums' (methods that change batches), got 'int2'" in _refused(
        {"memory": {"host": 1, "allow": ["int2"]}}
    )
    assert "memory['allow'] must be a list of methods ('sums'), got 'sums'" in _refused(
        {"memory": {"host": 1, "allow": "sums"}}, TypeError
    )
    damaged = tmp_path / "machines.json"
    damaged.write_text("{}")
    assert f"{damaged} must have an entry 'between'" in _refused({"memory": {"host": 1, "machines": damaged}})


def test_links_have_no_sums(tmp_path):
    salientpp.partition(random_data(), 1, Path(tmp_path) / "parts", FANOUTS, BATCH)
    part = salientpp.load(Path(tmp_path) / "parts")
    edges = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(
        ValueError, match=re.escape("memory['allow']=('sums',) is for a NeighborLoader; LinkNeighborLoader makes")
    ):
        LinkNeighborLoader(
            part,
            FANOUTS,
            edge_label_index=edges,
            memory={"host": 1000, "allow": ["sums"], "machines": SLOW},
        )
    memory = {"host": 1000, "machines": SLOW}
    assert len(list(LinkNeighborLoader(part, FANOUTS, edge_label_index=edges, memory=memory))) == 2


def test_sums_of_rows_without_columns_take_no_bytes(tmp_path):
    data = random_data(60, 300)
    data.x = torch.zeros(60, 0)
    part = salientpp.partition(data, 1, tmp_path / "parts", [2, 2], 8)
    loader = NeighborLoader(part, [2, 2], "train", batch_size=8, partial_aggregation="max", memory=0)
    assert loader.engine.price().fetched == {None: 0}
    plain = NeighborLoader(part, [2, 2], "train", batch_size=8)
    for ours, want in zip(loader, plain, strict=True):
        assert torch.equal(ours.n_id[: ours.batch_size], want.n_id[: want.batch_size])
