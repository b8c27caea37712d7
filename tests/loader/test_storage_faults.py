"""Laws of storage ranks when a job does something unusual: a rank is slow or gone, a loader is short-lived, an entry point cannot work with them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from rare import rare
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler.base import NumNeighbors

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks import roles, roll
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.job import Job
from salientpp.testing.topology import directories

PARTS = 4


@pytest.fixture(scope="module", params=["parts", *rare("whole")])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories(tmp_path_factory.mktemp("stored"), PARTS, request.param) / "one" / request.param


def loader_of(part: Any, **options: Any) -> NeighborLoader:
    arguments: dict[str, Any] = {
        "num_neighbors": [2],
        "input_nodes": "train",
        "batch_size": 2,
        "shuffle": True,
        "seed": 3,
    }
    return NeighborLoader(part, **{**arguments, **options})


def ids_of(batches: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in batches]


def on_ranks(rank: int, num_storage_ranks: int, of_trainer: Callable[..., Any], root: Path, *args: Any) -> Any:
    """Serves on a storage rank; on any other calls ``of_trainer``."""
    part = salientpp.load(root, storage_ranks=num_storage_ranks)
    if part.only_stores:
        salientpp.serve(part)
        return "stored"
    return of_trainer(rank, part, *args)


def run(of_trainer: Callable[..., Any], trainers: int, storage: int, *args: Any, **how: Any) -> list[Any]:
    """Returns the results of the ranks that train."""
    found = distributed.run(on_ranks, trainers + storage, storage, of_trainer, *args, **how)
    assert found[trainers:] == ["stored"] * storage, found[trainers:]
    return found[:trainers]


# --- scripts ------------------------------------------------------------------------------------------------


def _makes_no_loader(rank: int, part: Any) -> int:
    return part.part_id


@pytest.mark.parametrize("rank_0_hosts", [False, True])
def test_a_job_that_makes_no_loader_ends(stored: Path, rank_0_hosts: bool) -> None:
    assert run(_makes_no_loader, 2, 1, stored, rank_0_hosts=rank_0_hosts) == [0, 1]


def _is_slow(rank: int, part: Any) -> int:
    loader, found = loader_of(part, timeout=timedelta(seconds=2)), 0
    iterator = iter(loader)
    time.sleep(3)
    for number, _ in enumerate(iterator):
        found += 1
        if number == 1:
            time.sleep(3)
    time.sleep(3)
    return found + len(ids_of(loader))


def test_ranks_that_train_may_compute_for_longer_than_the_timeout(stored: Path) -> None:
    assert run(_is_slow, 1, 1, stored)[0] > 10


def _renumbers(rank: int, part: Any) -> bool:
    loader, other = loader_of(part), loader_of(part)
    iterator = iter(loader)
    loader.set_next_epoch(5)
    other.set_epoch(5)
    return ids_of(iterator) == ids_of(other) and loader.state_dict()["epoch"] == other.state_dict()["epoch"]


def test_an_epoch_that_was_begun_can_be_renumbered(stored: Path) -> None:
    assert run(_renumbers, 2, 1, stored) == [True, True]


def _outlives_its_loader(rank: int, part: Any) -> bool:
    expected = ids_of(loader_of(part))
    return all(ids_of(iter(loader_of(part))) == expected for _ in range(3))


def _leaves_at_once(rank: int, part: Any) -> int:
    loader, found = loader_of(part), 0
    for _ in range(5):
        if rank == 0:
            iter(loader)  # leaves in a thread, and goes on here
        else:
            found += len(ids_of(loader))
        found += len(ids_of(loader_of(part, input_nodes="val", batch_size=16)))
    return found


def test_a_left_epoch_is_told_before_the_next_loader(stored: Path) -> None:
    assert all(run(_leaves_at_once, 2, 1, stored))


def _mends(rank: int, part: Any) -> int:
    loader = loader_of(part)
    state = loader.state_dict()
    if rank:
        loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="all ranks or none must resume"):
        ids_of(loader)
    loader.load_state_dict(state)
    return len(ids_of(loader))


def test_after_a_disagreement_the_next_epoch_goes_on(stored: Path) -> None:
    assert run(_mends, 2, 1, stored, seconds=60)[0] > 2


def test_an_epoch_outlives_its_loader(stored: Path) -> None:
    assert run(_outlives_its_loader, 2, 2, stored) == [True, True]


def _differ(rank: int, root: Path) -> str:
    part = salientpp.load(root, storage_ranks=1)
    with pytest.raises(ValueError) as raised:
        salientpp.load(root, storage_ranks=2)
    if part.only_stores:
        assert part.rows()[None]["x"].shape[0] == 0, "a storage rank visits no seeds, so its own part is empty"
        salientpp.serve(part)
    return str(raised.value)


def test_a_job_has_one_number_of_storage_ranks(stored: Path) -> None:
    for text in distributed.run(_differ, 3, stored):
        assert "storage_ranks must be equal for all graphs of a job, got 2 after 1" in text


# --- arguments and entry points -----------------------------------------------------------------------------


def _takes_values(rank: int, part: Any) -> bool:
    expected = ids_of(loader_of(part))
    same: list[dict[str, Any]] = [
        {"num_neighbors": NumNeighbors([2])},
        {"shuffle": np.bool_(True)},
        {"batch_size": np.int64(2)},
    ]
    return all(ids_of(loader_of(part, **each)) == expected for each in same)


def test_arguments_may_be_values_of_numpy_and_pyg(stored: Path) -> None:
    assert run(_takes_values, 2, 1, stored) == [True, True]


def _enters(rank: int, part: Any) -> bool:
    torch.manual_seed(0)
    model = GraphSAGE(part.num_features, 4, 1, 4)
    with pytest.raises(ValueError, match=r"memory\['device'\] does not work with storage_ranks"):
        loader_of(part, memory={"host": "4kB", "device": "4kB"})
    with pytest.raises(ValueError, match="process_group= does not work with storage ranks"):
        salientpp.inference(model, part, process_group=part.trainers)
    again = salientpp.load(part.root, process_group=part.trainers)
    assert part.split("all").equal(again.split("all"))
    expected = salientpp.inference(model, again, process_group=part.trainers)
    assert salientpp.inference(model, part).equal(expected)
    assert ids_of(loader_of(part)), "the storage goes on"
    local = salientpp.fullgraph.distribute(model, part)
    torch.testing.assert_close(local(local.graph.x, local.graph.edge_index).detach(), expected, rtol=1e-4, atol=1e-4)
    return True


def test_inference_and_full_graph_training_run_on_the_ranks_that_train(stored: Path) -> None:
    assert all(run(_enters, 2, 1, stored))


def _makes_a_module(rank: int, part: Any) -> int:
    lightning = pytest.importorskip("salientpp.lightning")
    module = lightning.LightningNodeData(part, num_neighbors=[2], batch_size=2)
    module.setup("fit")
    return len(ids_of(module.train_dataloader()))


def test_a_lightning_module_does_not_count_storage_ranks(stored: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    assert all(run(_makes_a_module, 2, 1, stored))


def _copies(rank: int, root: Path, to: Path) -> tuple[list[str], Any]:
    copy = salientpp.copy_to_disk(root, to / str(rank), storage_ranks=1)
    part = salientpp.load(copy, storage_ranks=1)
    parts = sorted(path.name[-1] for path in copy.glob("part-*"))
    if part.only_stores:
        salientpp.serve(part)
        return parts, None
    return parts, len(ids_of(loader_of(part)))


def test_each_rank_copies_the_parts_that_it_needs(stored: Path, tmp_path: Path) -> None:
    (first, one), (second, two), (last, _) = distributed.run(_copies, 3, stored, tmp_path)
    assert (first, second, last) == (["0", "1"], ["2", "3"], ["0", "1", "2", "3"])
    assert one and two


# --- faults -------------------------------------------------------------------------------------------------


def _goes_on_alone(rank: int, part: Any) -> int:
    number = len(list(loader_of(part)))
    dist.destroy_process_group()
    time.sleep(2.5)  # saves a model, for example
    return number


def _looks_often(rank: int, num_storage_ranks: int, *args: Any) -> Any:
    roles._FAILURE_PAUSE = 0.1
    return on_ranks(rank, num_storage_ranks, *args)


def test_a_script_may_go_on_after_it_has_destroyed_its_process_groups(stored: Path) -> None:
    """Its connections over gloo are closed then, but its process lives."""
    found = distributed.run(_looks_often, 3, 1, _goes_on_alone, stored)
    assert found[0] == found[1] > 0


def _are_killed(rank: int, part: Any) -> None:
    loader = loader_of(part)
    ids_of(loader)
    os.kill(os.getpid(), signal.SIGKILL)


def test_storage_ends_if_ranks_that_train_are_killed_between_epochs(stored: Path) -> None:
    found = distributed.run(on_ranks, 3, 1, _are_killed, stored, may_fail=True)
    assert found[2].kind == "RankFailure", found
    assert re.search(r"rank [01] went away; look at its output first", found[2].text), found


def _is_killed_early(rank: int, root: Path, victim: int, others_connect: bool) -> str:
    """Kills a rank before the first loader, or while the others connect theirs."""
    part = salientpp.load(root, storage_ranks=2)
    while not part.roles.lifelines.are_all or len(part.roles.lifelines.ranks) < (3 if part.only_stores else 2):
        time.sleep(0.01)
    if rank == victim and others_connect:
        roll._gloo_options = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailure) as raised:
        if part.only_stores:
            salientpp.serve(part)
        else:
            loader_of(part)
    return str(raised.value)


@pytest.mark.parametrize(("victim", "others_connect"), [(1, False), (1, True), (2, False), (3, True)])
def test_a_rank_that_is_killed_before_there_is_a_loader_is_named_by_all(
    stored: Path, victim: int, others_connect: bool
) -> None:
    """No connection over gloo exists yet, and the time-out of the roll call has not passed."""
    found = distributed.run(_is_killed_early, 4, stored, victim, others_connect, may_fail=True)
    assert found.pop(victim).kind == "Died"
    for text in found:
        assert text == f"rank {victim} went away; look at its output first", found


def _serves_until_ctrl_c(rank: int, root: Path) -> str:
    part = salientpp.load(root, storage_ranks=1)
    if part.only_stores:
        part.roles.messages = _interrupt
        with pytest.raises(KeyboardInterrupt):
            salientpp.serve(part)
        return "interrupted"
    with pytest.raises(RankFailure) as raised:
        loader_of(part)
    return str(raised.value)


def _interrupt(look: Callable[[], None]) -> Any:
    raise KeyboardInterrupt


def test_a_storage_rank_that_is_interrupted_is_named(stored: Path) -> None:
    assert distributed.run(_serves_until_ctrl_c, 2, stored) == [
        "rank 1 ended early: KeyboardInterrupt: ",
        "interrupted",
    ]


def _rank_0_is_killed(rank: int, part: Any) -> None:
    loader_of(part)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)


def test_storage_names_a_killed_rank_that_hosts_the_store(stored: Path) -> None:
    found = distributed.run(on_ranks, 3, 1, _rank_0_is_killed, stored, may_fail=True, rank_0_hosts=True)
    text = "rank 0 went away, and with it the job's key-value store; look at its output first"
    assert text in found[2].text, found


def _ends_later(rank: int, part: Any) -> bool:
    roles._STAY_SECONDS = 0.1
    time.sleep(rank)
    return True


def test_the_host_of_the_store_stays_until_the_last_script_has_ended(stored: Path) -> None:
    """However long this takes."""
    assert run(_ends_later, 2, 1, stored, rank_0_hosts=True) == [True, True]


_SCRIPT = """
import sys
import salientpp
import torch.distributed as dist
from salientpp.ranks import roles

roles._WATCH_PAUSE = 0.0
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
part = salientpp.load(sys.argv[3], storage_ranks=1)
if part.only_stores:
    salientpp.serve(part)
"""


def test_a_script_ends_well_while_its_process_watches_the_others(stored: Path) -> None:
    """The interpreter aborts if a thread is in the store when it ends. So the watch must be over by then."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", _SCRIPT]
    ranks = [subprocess.Popen([*command, str(rank), str(store.port), str(stored)]) for rank in range(2)]
    assert [rank.wait(distributed.HANG) for rank in ranks] == [0, 0]


def _breaks(batch: Any) -> Any:
    raise KeyError("a mistake in transform")


def _goes_on(rank: int, part: Any) -> str:
    with pytest.raises(RuntimeError):
        ids_of(loader_of(part, transform=_breaks if rank else None))
    time.sleep(2)  # until the storage has noticed
    with pytest.raises(ValueError) as raised:
        loader_of(part)
    return str(raised.value)


def test_after_a_failure_the_storage_says_why_it_is_gone(stored: Path) -> None:
    found = distributed.run(on_ranks, 3, 1, _goes_on, stored, may_fail=True)
    for text in found[:2]:
        assert "rank 2 could not make its loader: RankFailure: rank 1" in text and "a mistake in transform" in text
    assert found[2].kind == "RankFailure"


def _is_interrupted(rank: int, part: Any) -> int:
    loader = loader_of(part)
    ids_of(loader)
    if rank == 1:
        raise KeyboardInterrupt
    return rank


def test_an_error_that_ends_a_process_is_told_to_the_storage(stored: Path) -> None:
    found = distributed.run(on_ranks, 3, 1, _is_interrupted, stored, may_fail=True)
    assert found[0] == 0
    assert found[2].kind == "RankFailure" and "rank 1 ended early: KeyboardInterrupt" in found[2].text, found


def test_a_message_that_interrupts_another_has_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may drop a loader while a message is being written."""

    class Store(dict):
        def set(self, key: str, value: str) -> None:
            assert key not in self, key
            self[key] = value
            if len(self) == 1:
                made.drop(7)

    store = Store()
    monkeypatch.setattr(roles.multiprocessing.util, "Finalize", lambda *_, **__: None)
    made = roles.Roles(Job(store, 0, 2), 1)
    made.post({"do": "make"})
    made.post({"do": "epoch"})
    assert len(store) == 3


# --- stopped ranks ------------------------------------------------------------------------------------------------


def _is_stopped(rank: int, root: Path) -> str:
    roles._BEAT_SECONDS, roles._SILENT_SECONDS = 0.2, 3.0
    part = salientpp.load(root, storage_ranks=1)
    if not part.only_stores:
        next(iter(loader_of(part)))
        part.job.store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError) as raised:
        salientpp.serve(part)
    os.kill(int(part.job.store.get("pid")), signal.SIGKILL)
    return str(raised.value)


def test_the_storage_names_a_stopped_rank(stored: Path) -> None:
    """The only rank that trains is stopped in mid-epoch, so no other rank that trains could name it."""
    assert (
        "rank 0 has not answered for 3 s; it may be stopped"
        in distributed.run(_is_stopped, 2, stored, may_fail=True)[1]
    )
