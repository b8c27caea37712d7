"""Laws of sessions in unusual uses: forked processes, results that are written to, errors after the session began, and ends of sessions."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from storage_hosts import TOKEN, Hosts, serving
from storage_server import until

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.job import Job
from salientpp.sessions import connection
from salientpp.sessions.connection import Connection
from salientpp.sessions.protocol import StorageError
from salientpp.store.directory import load as loading
from salientpp.store.directory.files import DatasetError
from salientpp.testing.topology import directories
from salientpp.ways.cache import Cache

PARTS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories(tmp_path_factory.mktemp("stored"), PARTS, "parts") / "one" / "parts"


@pytest.fixture(scope="module")
def shared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    served = shutil.copytree(root, tmp_path_factory.mktemp("served") / "parts")
    with serving(served, 2, tmp_path_factory.mktemp("hosts")) as started:
        yield started


@pytest.fixture
def hosts(shared: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    yield shared
    gc.collect()
    until(lambda: not shared.sessions())


def loader_of(part: Any, **options: Any) -> NeighborLoader:
    arguments: dict[str, Any] = {"batch_size": 2, "seed": 3, "logical_ranks": PARTS, **options}
    return NeighborLoader(part, [2, 2], "train", **arguments)


def ids_of(loader: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in loader]


def _raise(kind: type[BaseException], *_: Any) -> None:
    raise kind("only here")


def in_child(function: Callable[[], Any]) -> str:
    """Returns the text of what a function returns or raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    return text


# --- forks ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_session_to_its_parent(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    loader, other = loader_of(part), loader_of(part)
    held: list[Any] = [salientpp.load(hosts.address), loader]
    folders = [of.root for of in (part, held[0])]
    del loader
    assert ids_of(held[1]) == ids_of(other)

    def drops() -> int:
        held.clear()
        return 0 * gc.collect()

    assert in_child(drops) == "0"
    assert all(folder.exists() for folder in folders)
    assert "whose session with storage hosts it cannot use" in in_child(lambda: loader_of(part))
    assert in_child(lambda: part.take("x", torch.arange(5)).tolist()) == str(part.take("x", torch.arange(5)).tolist())
    time.sleep(0.5)  # the time in which a storage rank would read a message of the child
    assert ids_of(held[1]) == ids_of(other) and ids_of(loader_of(part))


def test_a_forked_child_may_open_a_session(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    expected = ids_of(loader_of(part))
    assert in_child(lambda: ids_of(loader_of(salientpp.load(hosts.address)))) == str(expected)
    assert ids_of(loader_of(part)) == expected


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_write_into_a_result_changes_no_other(hosts: Hosts, root: Path) -> None:
    part, stored = salientpp.load(hosts.address).whole, salientpp.load(root, part_id=0)
    for read in (lambda of: of.split("train", 0), lambda of: of.rows(0)[None]["y"], lambda of: of.vip(1)):
        read(part)[:] = 1
        assert torch.equal(read(part), read(stored))


def test_results_made_in_inference_mode_take_part_in_training(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address).whole
    with torch.inference_mode():
        part.rows(0)
    rows = part.rows(0)[None]["x"]
    weight = torch.ones_like(rows, requires_grad=True)
    (rows * weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, rows)


def test_a_copy_of_a_graph_belongs_to_the_same_session(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    expected = ids_of(loader_of(part))
    for copied in (copy.copy(part), copy.deepcopy({"data": part})["data"]):
        assert ids_of(loader_of(copied)) == expected
    assert len(hosts.status()["sessions"]) == 1


def test_a_full_disk_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    part = salientpp.load(hosts.address)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "w+b"))
        with pytest.raises(OSError, match=r"bytes\) from storage hosts cannot be kept in .*No space left.*TMPDIR"):
            part.rows()
    assert part.rows()[None]["x"].shape[1] == 3


def test_storage_hosts_read_ahead_for_a_graph_with_replicated_rows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    with serving(root.parents[1] / "typed" / "parts", 1, tmp_path) as typed:
        part = salientpp.load(typed.address)
        fanouts = {edges: [2, 2] for edges in part.edge_types}
        found = [
            NeighborLoader(part, fanouts, ("paper", "train"), batch_size=4, seed=1, **more)
            for more in ({}, {"read_ahead": "100kB"})
        ]
        for one, two in zip(*found, strict=True):
            assert all(one[name].x.equal(two[name].x) for name in part.node_types if "x" in one[name])


# --- mistakes --------------------------------------------------------------------------------------------------------


def _fails_late(rank: int, address: str) -> str:
    os.environ["SALIENTPP_TOKEN"] = TOKEN
    if rank == 1:

        def fails(session: Any) -> None:
            raise OSError("this disk is full")

        loading.FetchedArrays = fails  # type: ignore[assignment, misc]
    with pytest.raises((ValueError, OSError)) as raised:
        loader_of(salientpp.load(address))
    return str(raised.value)


def test_an_error_after_the_session_began_reaches_the_other_ranks(hosts: Hosts) -> None:
    found = distributed.run(_fails_late, 2, hosts.address)
    assert "rank 1" in found[0] and "this disk is full" in found[0], found


def test_a_session_outlives_an_error_in_the_construction_of_a_loader(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only the rank that trains has the error, as with a device that is full, or Ctrl-C in a notebook."""
    part = salientpp.load(hosts.address)
    expected = ids_of(loader_of(part))
    for error in (MemoryError, KeyboardInterrupt):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Cache, "place", partial(_raise, error))
            loader_of(part, replication_factor=0.2)
        assert ids_of(loader_of(part)) == expected


def test_a_session_that_an_error_has_ended_says_so(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)

    def fails(batch: Any) -> None:
        raise ValueError("in the transform")

    with pytest.raises(RuntimeError, match="in the transform"):
        ids_of(loader_of(part, transform=fails))
    until(lambda: not hosts.sessions())
    with pytest.raises(RankFailure, match=r"in the transform.*call salientpp.load again"):
        loader_of(part)
    assert ids_of(loader_of(salientpp.load(hosts.address)))


def test_a_graph_that_one_process_loaded_serves_no_job_of_several(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = salientpp.load(hosts.address)
    expected = ids_of(loader_of(part))
    with monkeypatch.context() as patch:
        patch.setattr(Job, "default", lambda: Job(part.job.store, 0, 2))
        with pytest.raises(ValueError, match="loaded before torch.distributed was initialised for 2 ranks"):
            loader_of(part)
    assert ids_of(loader_of(part)) == expected


def test_a_replaced_directory_is_named(hosts: Hosts, root: Path, tmp_path: Path) -> None:
    shutil.copytree(hosts.root, tmp_path / "before")
    part = salientpp.load(hosts.address)
    try:
        shutil.rmtree(hosts.root)
        shutil.copytree(root.parent / "whole", hosts.root)
        with pytest.raises(StorageError, match="was replaced since"):
            salientpp.load(hosts.address)
        with pytest.raises(
            (StorageError, DatasetError), match="missing on the storage host|does not match the manifest"
        ):
            part.rows()
    finally:
        shutil.rmtree(hosts.root)
        shutil.copytree(tmp_path / "before", hosts.root)
    assert part.rows()[None]["y"].numel() > 0


# --- ends ------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_session_is_no_failure(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that the script survived, such as one of an earlier cell of a notebook, is not why the session ends."""
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    for _ in range(4):
        loader = loader_of(salientpp.load(hosts.address))
        (name,) = {session["session"] for session in hosts.sessions()}
        try:
            raise ValueError("on the way")
        except ValueError:
            del loader
            gc.collect()
        until(lambda: not hosts.sessions())
        ends = [line for line in hosts.log().splitlines() if name in line and "begins" not in line]
        assert len(ends) == 2 and all(line.endswith(" ended") for line in ends), ends


def test_the_garbage_collector_may_end_a_session_in_any_thread(hosts: Hosts) -> None:
    """Also in a thread that is sending a beat, or asks for a file."""
    part = salientpp.load(hosts.address)
    part.split("train")
    held = [lock for each in connection._open for lock in (each._asking, each._sending)]
    assert len(held) >= 6, "two hosts, and a connection for files"
    for lock in held:
        assert lock.acquire(timeout=10)
    del part
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()
    for lock in held:
        lock.release()
    until(lambda: not hosts.sessions())


def test_a_stopped_storage_host_delays_the_end_of_a_process_by_seconds(hosts: Hosts) -> None:
    with Connection(hosts.addresses[0], TOKEN, 300) as opened:
        opened.request(do="status")
        hosts.send_signal(0, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            opened.close()
        finally:
            hosts.send_signal(0, signal.SIGCONT)
        assert time.monotonic() - begin < 60
