"""Laws of ranks that wait for each other in different collectives: all of them raise, and ranks that are only slow raise no alarm.

All mistakes are made in the same processes, each with connections of its own. Time-outs are longer than a test may take.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from torch import Tensor

import salientpp
from salientpp import NeighborLoader, PartitionedGraph, inference
from salientpp.engine.run import Run
from salientpp.fullgraph import distribute, local, loss_mean
from salientpp.nn import trim
from salientpp.ranks import roll, standstill, waiting
from salientpp.ranks.comm import Comm
from salientpp.ranks.failure import RankFailure

NUMBER, WIDTH, CLASSES = 120, 6, 5

#: Seconds of a slice of a wait, and seconds that a slow rank computes.
SLICE, LONG = 0.05, 0.6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = pyg.SAGEConv(WIDTH, 8), pyg.SAGEConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[int, str]:
    data = random_data(NUMBER, 4 * NUMBER, train_fraction=0.8)
    data.x = torch.ones(NUMBER, WIDTH)
    data.y = torch.arange(NUMBER) % CLASSES
    folder = tmp_path_factory.mktemp("standstill")
    for number in (2, 4):
        salientpp.partition(data, number, folder / str(number), [3, 3], 16)
    return {number: str(folder / str(number)) for number in (2, 4)}


def loader_of(part: PartitionedGraph, split: str = "train", **options: Any) -> NeighborLoader:
    return NeighborLoader(part, [3, 3], split, batch_size=6, seed=1, timeout=distributed.NEVER, **options)


def together(part: PartitionedGraph) -> NeighborLoader:
    return loader_of(part, ranks_per_host=2, cooperate="host")


def step(model: Any, batch: Any, here: bool = False) -> None:
    out = model(batch.x, batch.edge_index)[: batch.y.numel()]
    losses = F.cross_entropy(out, batch.y, reduction="none")
    if here:
        raise LookupError("no label of this batch is known")
    loss_mean(losses, model).backward()


# --- mistakes -----------------------------------------------------------------------------------------------


def skips(part: PartitionedGraph, here: bool, trims: bool = False) -> None:
    loader = together(part)
    model = distribute(trim(Net()) if trims else Net(), loader)
    for number, batch in enumerate(loader):
        if not here or number > 4:
            step(model, batch)


def catches(part: PartitionedGraph, here: bool, at: int = 1) -> None:
    loader = together(part)
    model = distribute(Net(), loader)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            with contextlib.suppress(LookupError):
                step(model, batch, here and number == at and epoch == 0)
    torch.distributed.barrier()  # all ranks have ended


def leaves(part: PartitionedGraph, here: bool) -> None:
    loader = together(part)
    model = distribute(Net(), loader)
    for _ in range(2):
        for batch in loader:
            if here:
                break
            step(model, batch)


def other_model(part: PartitionedGraph, here: bool) -> None:
    loader, whole = together(part), local(part, timeout=distributed.NEVER)
    over_batches, over_all = distribute(Net(), loader), distribute(Net(), whole)
    for batch in loader:
        if here:
            over_all(whole.x, whole.edge_index)
        else:
            over_batches(batch.x, batch.edge_index)


def infers(part: PartitionedGraph, here: bool) -> None:
    loader = loader_of(part)
    for batch in loader:
        if here:
            inference([Net().first], part, timeout=distributed.NEVER)
        assert batch.x.size(0)


def makes_a_loader(part: PartitionedGraph, here: bool) -> None:
    loader = together(part)
    model = distribute(Net(), loader)
    for batch in loader:
        if here:
            loader_of(part, "val")
        else:
            step(model, batch)


def other_order(part: PartitionedGraph, here: bool) -> None:
    train, val = loader_of(part), loader_of(part, "val")
    for loader in [train, val] if here else [val, train]:
        assert sum(1 for _ in loader)


#: Name -> (function of the part, and whether this rank makes the mistake; words about rank 0; words about rank 1, which makes the mistake).
MISTAKES: dict[str, tuple[Callable[[PartitionedGraph, bool], Any], str, str]] = {
    "batches skipped": (
        skips,
        "rank 0 waits for exchange 1 (layer 1, SAGEConv: ",
        "rank 1 waits for batch 3 of epoch 0 of its loader",
    ),
    "batches skipped by a trimmed model": (
        partial(skips, trims=True),
        "call 1 of the model, batch 0 of epoch 0",
        "batch 3",
    ),
    "an exception that one caught": (catches, "loss_mean (float32 [2]) in call 2", "call 3 of the model, batch 2"),
    "an exception in the last batch": (partial(catches, at=7), "loss_mean", "batch 0 of epoch 1"),
    "an epoch left early": (leaves, "call 1 of the model", "rank 1 waits for the end of epoch 0"),
    "another model": (other_model, "call 1 of the model, batch 0 of epoch 0", "call 1 of the model; "),
    "inference": (infers, "batch 3 of epoch 0", "rank 1 waits to make a loader, open a part or begin inference"),
    "another loader": (makes_a_loader, "call 1 of the model", "rank 1 waits to make a loader"),
    "epochs in another order": (other_order, "of its loader (connection ", "of its loader (connection "),
}


def mistakes(rank: int, root: str) -> dict[str, str]:
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    part, found = salientpp.load(root), {}
    for name, (make, *_) in MISTAKES.items():
        try:
            make(part, rank == 1)
            found[name] = "no error"
        except Exception as error:
            found[name] = str(error)
        torch.distributed.barrier()  # the other rank lives on
    assert sum(1 for _ in together(part))  # new connections work
    return found


def meets_in_turns(rank: int) -> list[str]:
    """Each rank once waits to make a Comm while the other one waits elsewhere. Both then use the number of the Comm that was not made."""
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    seconds, said = timedelta(seconds=distributed.NEVER), []
    comms = [Comm.create(timeout=seconds) for _ in range(2)]
    for first in (1, 0):
        with pytest.raises(RankFailure) as raised:
            Comm.create(timeout=seconds) if rank == first else comms[first].gather_numbers([0])
        said.append(str(raised.value))
        torch.distributed.barrier()  # otherwise the next call of this rank may be the one for which the other rank waits
    assert Comm.create(timeout=seconds).gather_numbers([rank]) == [[0], [1]]
    return said


def test_ranks_can_meet_after_one_has_waited_for_the_others_to_come():
    for first, second in distributed.run(meets_in_turns, 2):
        assert "rank 1 waits to make a loader" in first and "rank 0 waits to make a loader" in second


def test_ranks_that_wait_for_each_other_all_say_for_what(roots):
    first, second = distributed.run(mistakes, 2, roots[2])
    for name, (_, *words) in MISTAKES.items():
        for said in (first[name], second[name]):
            text = said[said.find("the ranks wait for each other: ") :]
            assert all(each in text for each in words), (name, said)


def skips_on_a_host(rank: int, root: str) -> str:
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    with pytest.raises(RuntimeError) as raised:
        skips(salientpp.load(root), rank == 3)
    return str(raised.value)


def test_other_hosts_hear_of_ranks_that_wait_for_each_other(roots):
    said = distributed.run(skips_on_a_host, 4, roots[4])
    for text in said:
        assert "ranks 0, 1 wait for loss_mean" in text and "rank 2 waits for exchange 1" in text, said
        assert "rank 3 waits for batch " in text, said


# --- notes --------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch):
    """Looks of this process, as rank 0, at its own notes and at those of a rank 1 that does the same."""
    for name, empty in [("_threads", set()), ("_waits", {}), ("_made", {})]:
        monkeypatch.setattr(standstill, name, empty)
    store = dist.HashStore()

    def look(wait: standstill.Wait) -> str | None:
        store.set("salientpp/waits/1", standstill._note("").replace('"turns": ', '"turns": 1'))
        return wait.turn(store)

    return store, look


def progress_of(number: int) -> standstill.Progress:
    return standstill.Progress(f"salientpp/all/{number}", (0, 1), 0, (0, 1), f"salientpp/all/{number}/failure")


def test_connections_of_an_earlier_job_do_not_count(looks):
    """New connections after `destroy_process_group` have the numbers of earlier ones, which may still exist."""
    store, look = looks
    connections = [progress_of(1) for _ in range(5)]
    for now in connections:
        now.started = 3
        wait = standstill.Wait(now, 3)  # both ranks have started it, and the rows take long to arrive
        assert [look(wait) for _ in range(3)] == [None] * 3
        now.started = 2
        assert look(wait) is not None
        now.started = 0
        store.delete_key("salientpp/all/1/failure")


def test_a_failure_that_was_told_comes_first(looks):
    store, look = looks
    now = progress_of(2)
    wait = standstill.Wait(now, 1)
    store.set("salientpp/all/2/failure", "told")
    assert [look(wait) for _ in range(4)] == [None] * 4 and store.get("salientpp/all/2/failure") == b"told"
    store.delete_key("salientpp/all/2/failure")
    assert look(wait) is not None


# --- slow ranks ---------------------------------------------------------------------------------------------


def slow(rank: int, root: str) -> list[str]:
    """Every rank is slow once at each place, so that the other one waits there."""
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    part, places = salientpp.load(root), []

    def pause(place: str, who: int) -> None:
        if (place, who) not in places:
            places.append((place, who))
            time.sleep(LONG * (rank == who))

    for who in range(2):
        pause("before a loader", who)
        loader = together(part)
        pause("before a model", who)
        model = distribute(Net(), loader)
        for epoch in range(2):
            pause(f"before epoch {epoch}", who)
            for number, batch in enumerate(loader):
                pause("in a batch", who)
                if number == 3 and epoch == 0 and rank == who:
                    time.sleep(LONG)
                    break
                if number < 3:
                    out = model(batch.x, batch.edge_index)[: batch.y.numel()]
                    pause("after the forward", who)
                    loss = loss_mean(F.cross_entropy(out, batch.y, reduction="none"), model)
                    pause("before the backward", who)
                    loss.backward()
        pause("before inference", who)
        inference([Net().first], part, timeout=distributed.NEVER)
    return [place for place, _ in places]


def late_answers(rank: int, root: str) -> list[int]:
    """Rank 1 leaves one epoch and waits in another, while the thread that answers for it has not answered yet."""
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    part = salientpp.load(root)
    train, val = loader_of(part), loader_of(part, "val")
    assert sum(1 for _ in zip(train, val, strict=False))
    answer, taken = Run._answer, []

    def late(run: Run) -> None:
        time.sleep(LONG)
        answer(run)

    if rank == 1:
        Run._answer = late
    for loader in (train, val):
        for number, _ in enumerate(loader):
            if rank == 1 and loader is train and number == 1:
                break
        taken.append(number)
    return taken


def test_a_rank_that_answers_late_raises_no_alarm(roots):
    (most, _), (few, _) = distributed.run(late_answers, 2, roots[2])
    assert most > few == 1


def test_slow_ranks_raise_no_alarm(roots):
    first, second = distributed.run(slow, 2, roots[2])
    assert first == second and len(first) == 16, first


def prefetched(rank: int, root: str) -> int:
    """The loader runs in a thread that waits for the main thread, which waits for the other rank's main thread."""
    waiting.SLICE_SECONDS = roll.SLICE_SECONDS = SLICE
    loader = together(salientpp.load(root))
    model = distribute(Net(), loader)
    ready: queue.Queue[Any] = queue.Queue(1)

    def fill() -> None:
        for batch in loader:
            if rank == 1:
                time.sleep(LONG / 5)
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    steps = 0
    while (batch := ready.get()) is not None:
        step(model, batch)
        steps += 1
    thread.join()
    return steps


def test_a_thread_that_fetches_batches_raises_no_alarm(roots):
    first, second = distributed.run(prefetched, 2, roots[2])
    assert first == second > 4
