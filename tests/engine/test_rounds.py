"""Laws of faults, misuse and early ends while ranks draw from each other's lists."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import distributed
import pytest
import torch
from distributed import NEVER
from graphs import random_data
from rare import rare
from silence import note_said, stay_silent, suspend_self

import salientpp
from salientpp import NeighborLoader, NeighborSampler
from salientpp.engine.drawing.on_device import draw_on_device
from salientpp.engine.pipeline import Stage

FANOUTS, BATCH = [4, 3], 8

#: Seconds after which a silent rank is named.
TIMEOUT = 3

#: Stages of a loader of vertices with these fanouts: one round, then the ten stages.
STAGES = [
    *(f"{name}_1" for name in ("ask_sizes", "ask_lists", "draw_for_others", "answer_sizes", "answer_lists", "join_lists")),
    "sample", "exchange_counts", "read_counts", "exchange_ids", "localize_ids", "gather_host_rows", "copy_to_device", "gather_device_rows", "exchange_rows",
    "assemble",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("rounds")
    for form in ("whole", "parts"):
        data = random_data(edge_attributes=True)
        salientpp.partition(data, 3, folder / form, FANOUTS, BATCH, refine=False, topology=form)
    return str(folder)


def loader_of(root: str, form: str = "parts", **options: Any) -> NeighborLoader:
    options = {"input_nodes": "train", "batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": NEVER, **options}
    return NeighborLoader(salientpp.load(f"{root}/{form}"), options.pop("num_neighbors", FANOUTS), **options)


def error_of(loop: Any) -> str:
    """Runs a loop until its error, or until all ranks have left it, and returns the text of the error."""
    try:
        for _ in loop:
            pass
        if isinstance(loop, NeighborLoader):
            loop.engine.close()
    except RuntimeError as error:
        return str(error)
    return "none"


def at_stage(loader: NeighborLoader, name: str, index: int, action: Any) -> None:
    """Arranges that ``action()`` runs when batch ``index`` enters a stage."""
    producer = loader.engine.producer
    assert producer.stage_names == STAGES

    def changed(stages: list[Stage]) -> list[Stage]:
        def with_action(stage: Stage) -> Stage:
            def run(state: Any) -> Any:
                if state.index == index:
                    action()
                return stage.run(state)

            return Stage(stage.name, run, stage.stream) if stage.name == name else stage

        return list(map(with_action, stages))

    producer._rounds = list(map(changed, producer._rounds))
    ten = producer.stages.list()
    producer.stages.list = lambda: changed(ten)


# --- ranks that go away -----------------------------------------------------------------------------------


def _killed(rank: int, root: str, stage: str, depth: int) -> str:
    """Kills rank 1 in a stage. Returns the error of this rank."""
    loader = loader_of(root, depth=depth, num_workers=depth % 2)
    if rank == 1:
        at_stage(loader, stage, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return error_of(loader)


#: Stages in which ``make test`` kills a rank: one of most exchanges, and those between or after them.
KILLED = ["ask_lists_1", "draw_for_others_1", "answer_sizes_1", "sample", "exchange_ids", "exchange_rows", "assemble"]


@pytest.mark.parametrize("stage", [*KILLED, *rare(*(name for name in STAGES if name not in KILLED))])
def test_a_rank_killed_in_any_stage_is_named_by_all_others(root, stage):
    depth = 1 + 9 * (STAGES.index(stage) % 2)
    results = distributed.run(_killed, 3, root, stage, depth, may_fail=True)
    assert results[1].kind == "Died"
    for rank in (0, 2):
        text = results[rank]
        assert re.match(rf"rank {rank}, batch \d, stage \w+: rank 1 went away, its connection is closed", text), text


def _silent(rank: int, root: str, how: str, said: str) -> tuple[str, float]:
    """Rank 1 stops between a request and its answer, until the other ranks have named it."""
    loader, begin = loader_of(root, timeout=TIMEOUT, depth=10, num_workers=1), time.monotonic()
    if rank == 1 and how == "stopped":
        at_stage(loader, "draw_for_others_1", 2, lambda: suspend_self(said, [0, 2], distributed.HANG))
    elif rank == 1:
        loader.node_sampler.topology.answer = lambda packet: stay_silent(said, [0, 2], distributed.HANG)
    text, seconds = error_of(loader), time.monotonic() - begin
    note_said(said, rank)
    return text, seconds


@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_rank_that_does_not_answer_a_request_is_named_after_the_timeout(root, how, tmp_path):
    results = distributed.run(_silent, 3, root, how, str(tmp_path), may_fail=True)
    for rank in (0, 2):
        text, seconds = results[rank]
        # The other rank waits for rank 1 too, so on a slow machine it may owe an answer.
        silent = {0: "rank 1|ranks 1, 2", 2: "rank 1|ranks 0, 1"}[rank]
        assert re.match(rf"rank {rank}, batch \d, stage \w+: no answer from ({silent}) within {TIMEOUT} s", text), text
        assert seconds >= TIMEOUT


# --- errors -----------------------------------------------------------------------------------------------


def _damaged(rank: int, root: str, name: str, workers: int) -> str:
    """Damages the lists of rank 1 after its loader was made. It has no batches, so that it only answers."""
    begin, end = salientpp.load(f"{root}/parts").book.range_of(rank)
    seeds = torch.arange(begin, begin if rank == 1 else end)
    loader = loader_of(root, input_nodes=seeds, num_workers=workers, uneven="exact")
    if rank == 1:
        topology = loader.node_sampler.topology
        lists = topology._lists[0][0]
        array = getattr(lists.relation, name).clone()
        array[1:] = 10**6
        topology._lists[0][0] = replace(lists, relation=replace(lists.relation, **{name: array}))
    return error_of(loader)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("name", "reason"), [("indptr", "indptr is corrupt at row "), ("indices", "1000000")])
def test_damaged_lists_of_one_rank_are_an_error_on_all_ranks(root, name, reason, workers):
    for rank, text in enumerate(distributed.run(_damaged, 3, root, name, workers)):
        ours = "" if rank == 1 else rf"rank {rank}, batch \d, stage \w+: "
        assert re.match(rf"{ours}rank 1, batch 0, stage answer_sizes_1: .*{reason}", text), text


def _users_mistake(rank: int, root: str, where: str, workers: int) -> str:
    def fail(batch: Any) -> Any:
        if rank == 1:
            raise LookupError("the user's mistake")
        return batch

    return error_of(loader_of(root, num_workers=workers, **{where: fail}))


@pytest.mark.parametrize(
    ("where", "workers", "stage"), [("transform", 0, "assemble"), ("transform_sampler_output", 0, "sample"), ("transform_sampler_output", 1, "sample")]
)  # fmt: skip
def test_a_users_mistake_while_others_draw_reaches_all_ranks(root, where, workers, stage):
    for rank, text in enumerate(distributed.run(_users_mistake, 3, root, where, workers)):
        ours = "" if rank == 1 else rf"rank {rank}, batch \d, stage \w+: "
        assert re.fullmatch(rf"{ours}rank 1, batch 0, stage {stage}: the user's mistake", text), text


# --- leaving ----------------------------------------------------------------------------------------------


def _leave(rank: int, root: str, depth: int, workers: int) -> tuple[list[str], list[int]]:
    """Rank 0 leaves its loop after a batch. Returns the threads in which its function ran after that, and the sizes of the epochs."""
    after, left = [], False

    def note(mfg: Any) -> Any:
        if left:
            after.append(threading.current_thread().name)
            raise LookupError("the user's mistake after the loop")
        return mfg

    loader, sizes = loader_of(root, depth=depth, num_workers=workers, transform_sampler_output=note), []
    for stop in (1 if rank == 0 else 100, 100):
        epoch = iter(loader)
        sizes.append(sum(1 for _ in itertools.islice(epoch, stop)))
        left = stop == 1
        del epoch
        loader.engine.close()
        left = False
    return after, sizes


@pytest.mark.parametrize(("depth", "workers"), [(1, 0), (4, 0), (10, 0)])
def test_after_its_loop_a_rank_answers_the_others_and_runs_none_of_the_users_code(root, depth, workers):
    results = distributed.run(_leave, 3, root, depth, workers)
    assert [after for after, _ in results] == [[]] * 3
    full = results[1][1][0]
    assert full > 3 and [sizes for _, sizes in results] == [[1, full], [full, full], [full, full]]


# --- misuse -----------------------------------------------------------------------------------------------


def _made_differently(rank: int, root: str, how: str) -> str:
    options: dict[str, Any] = {}
    if how == "sampler" and rank == 2:
        options["neighbor_sampler"] = NeighborSampler(salientpp.load(f"{root}/parts").graph, FANOUTS)
    elif how == "fanouts" and rank == 2:
        options["num_neighbors"] = [4, 3, 2]
    try:
        loader_of(root, **options)
    except ValueError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("sampler", "all ranks must have the same topology, got parts on rank 0 and whole on rank 2"),
        ("fanouts", "all ranks must have the same num_neighbors, got [4, 3] on rank 0 and [4, 3, 2] on rank 2"),
    ],
)
def test_ranks_that_would_draw_in_different_rounds_make_no_loader(root, how, reason):
    assert distributed.run(_made_differently, 3, root, how) == [reason] * 3


def _fanouts_changed(rank: int, root: str) -> tuple[bool, str, str]:
    """Changes the fanouts of every rank's sampler: to other numbers, to fewer hops and to more."""
    found = []
    for form in ("parts", "whole"):
        loader, sizes = loader_of(root, form), []
        for fanouts in ([2, 5], [3], []):
            loader.node_sampler.num_neighbors = fanouts
            sizes.append([batch.n_id.tolist() for batch in loader])
        found.append(sizes)
    loader, one_hop = loader_of(root), loader_of(root, num_neighbors=[3])
    loader.node_sampler.num_neighbors = one_hop.node_sampler.num_neighbors = [3, 2, 2]
    return found[0] == found[1], error_of(loader), error_of(one_hop)


def test_fanouts_may_change_after_construction_but_not_get_more_hops(root):
    for rank, (same, more, first) in enumerate(distributed.run(_fanouts_changed, 3, root)):
        assert same
        for text in (more, first):
            assert text.startswith(f"rank {rank}, batch 0, stage "), text
            assert "a batch needs more exchanges between the ranks than when the loader was made" in text, text


def _single_batch(rank: int, root: str) -> list[str]:
    loader = loader_of(root)
    return [error_of(make([0]) for _ in "1") for make in (loader, loader.collate_fn)]


def test_single_batches_on_several_ranks_are_refused(root):
    reason = "cannot make a single batch on several ranks, because the other ranks would not take part; iterate over the loader instead"
    assert distributed.run(_single_batch, 3, root) == [[reason] * 2] * 3


def _edges_added(rank: int, root: str) -> str:
    def last_edge(mfg: Any) -> Any:
        mfg.edge = torch.full_like(mfg.edge, 0 if rank == 2 else salientpp.load(f"{root}/parts").num_edges - 1)
        return mfg

    return error_of(loader_of(root, transform_sampler_output=last_edge if rank != 1 else None))


def test_edges_that_were_not_drawn_are_refused(root):
    texts = distributed.run(_edges_added, 3, root)
    assert all("which was not drawn for it, and another rank has its 'edge_attr'" in text for text in texts), texts


def _on_device(rank: int, root: str) -> str:
    loader = loader_of(root)
    try:
        draw_on_device(loader.node_sampler, torch.device("cuda"), loader.data)
    except ValueError as error:
        return str(error)
    return "drawn"


def test_a_device_does_not_draw_from_lists_in_parts(root):
    reason = "neighbor_sampler='device' excludes a dataset directory with topology='parts': the kernels need all neighbour lists, and a rank "
    reason += "has those of its part; "
    assert distributed.run(_on_device, 3, root) == [f"{reason}leave one of them out"] * 3


# --- memory -----------------------------------------------------------------------------------------------


def _trials(rank: int, root: str) -> tuple[set[str], list[str]]:
    """Returns the names of the threads that draw trial batches, and those of all threads afterwards."""
    basis = loader_of(root).engine.basis
    batches = [basis.epochs.pieces(0, turn) for turn in basis.trial_turns]
    drew = basis.source.drawing.draw_each(batches, lambda mfg: threading.current_thread().name)
    end = time.monotonic() + 60
    while any(each.name.startswith("salientpp-draw") for each in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    return set(drew), [each.name for each in threading.enumerate()]


def test_trial_batches_are_drawn_in_a_thread_that_ends_with_its_tables(root):
    for drew, alive in distributed.run(_trials, 3, root):
        assert drew == {"salientpp-draw_0"}
        assert not any(name.startswith("salientpp-draw") for name in alive)
