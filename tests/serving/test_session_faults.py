"""Laws of sessions when something is lost: a rank that trains, a storage host, or a server; and of jobs that share storage."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from forked_python import python
from storage_hosts import ROOT, TOKEN, Hosts, free_ports, serving
from storage_server import until
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.failure import RankFailure
from salientpp.sessions import opening
from salientpp.sessions.opening import open_session
from salientpp.sessions.protocol import StorageError
from salientpp.store.directory import load as loading
from salientpp.testing.topology import directories

PARTS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories(tmp_path_factory.mktemp("stored"), PARTS, "parts") / "one" / "parts"


@pytest.fixture(scope="module")
def shared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving(root, 2, tmp_path_factory.mktemp("hosts")) as started:
        yield started


@pytest.fixture
def hosts(shared: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    if not shared.are_alive:
        shared.stop(signal.SIGKILL)
        shared.start()
    yield shared
    gc.collect()
    if shared.are_alive:
        until(lambda: not shared.sessions())


def loader_of(part: Any, **options: Any) -> NeighborLoader:
    arguments: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3, "logical_ranks": PARTS, **options}
    return NeighborLoader(part, [2, 2], "train", **arguments)


def ids_of(batches: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in batches]


SCRIPT = """
import hashlib, json, os, sys, time
import salientpp
from salientpp import NeighborLoader
if "RANK" in os.environ:
    salientpp.init_process_group("gloo")
address, epochs, sleep, fanout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
part = salientpp.load(address)
loader = NeighborLoader(part, [fanout, fanout], "train", batch_size=2, shuffle=True, seed=3, logical_ranks=4)
print(json.dumps("ready"), flush=True)
for epoch in range(epochs):
    digest, last, stall = hashlib.sha256(), time.monotonic(), 0.0
    for batch in loader:
        now = time.monotonic()
        stall, last = max(stall, now - last), now
        digest.update(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes())
        time.sleep(sleep)
    print(json.dumps([epoch, digest.hexdigest(), stall]), flush=True)
"""


class Job:
    """A job of one rank in a process of its own, and the lines that it printed."""

    def __init__(self, address: str, epochs: int, sleep: float = 0.0, fanout: int = 2) -> None:
        command = [python(), "-c", SCRIPT, address, str(epochs), str(sleep), str(fanout)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SALIENTPP_TOKEN": TOKEN}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        text = self.process.stdout.readline()
        assert text, self.process.stderr.read()
        return json.loads(text)

    def lines(self) -> list[Any]:
        out, err = self.process.communicate(timeout=distributed.HANG)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


# --- jobs that share storage --------------------------------------------------------------------------------------


def test_a_killed_job_changes_nothing_for_the_others(hosts: Hosts) -> None:
    """One job trains while others begin, are killed at some moment, and another is admitted."""
    epochs = 40
    alone = Job(hosts.address, 2)
    expected = {epoch: digest for epoch, digest, _ in alone.lines()[1:]}
    lasting = Job(hosts.address, epochs, sleep=0.01)
    assert lasting.line() == "ready"
    for moment in (0.0, 0.05, 0.3):
        killed = Job(hosts.address, 100)
        assert killed.line() == "ready"
        time.sleep(moment)
        killed.kill()
        admitted = Job(hosts.address, 2)
        assert {epoch: digest for epoch, digest, _ in admitted.lines()[1:]} == expected
    found = lasting.lines()
    assert len(found) == epochs and {epoch: digest for epoch, digest, _ in found[:2]} == expected
    until(lambda: not hosts.sessions(), 20)
    assert "was lost: rank 0 of the job went away" in hosts.log()


def test_a_job_that_ends_well_is_no_failure_on_any_host(hosts: Hosts) -> None:
    before = hosts.log().count("failed")
    for _ in range(3):
        assert len(Job(hosts.address, 1).lines()) == 2
    until(lambda: not hosts.sessions())
    assert hosts.log().count("failed") == before, hosts.log()


def test_a_slow_job_delays_no_other(hosts: Hosts) -> None:
    slow = Job(hosts.address, 1, sleep=1.0, fanout=50)
    assert slow.line() == "ready"
    begin = time.monotonic()
    assert len(Job(hosts.address, 3).lines()) == 4
    assert len(hosts.sessions()) == 2, f"the slow job trains on, after {time.monotonic() - begin:.1f} s"
    slow.kill()


def test_a_process_may_have_several_sessions(hosts: Hosts) -> None:
    parts = [salientpp.load(hosts.address) for _ in range(2)]
    first, second = (loader_of(part) for part in parts)
    for one, two in zip(first, second, strict=True):
        assert one.n_id.equal(two.n_id) and one.x.equal(two.x)
    assert len(hosts.status()["sessions"]) == 2
    assert sum(session["rows"] for session in hosts.sessions()) >= 0


def test_a_session_ends_when_nothing_uses_its_graph(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    loader = loader_of(part)
    expected = ids_of(loader)
    del part
    gc.collect()
    assert hosts.sessions() and ids_of(loader_of(loader.data)) == expected
    del loader
    gc.collect()
    until(lambda: not hosts.sessions(), 10)


def test_rows_and_bytes_are_reported(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    loader = loader_of(part)
    rows = sum(len(batch.n_id) for batch in loader)
    until(lambda: sum(session["rows"] for session in hosts.sessions()) == rows)
    stats = loader.stats()
    assert stats.rows_remote == rows
    row_bytes = 4 * next(iter(loader)).x.size(1)
    assert sum(session["bytes"] for session in hosts.sessions()) >= rows * row_bytes


# --- losses -----------------------------------------------------------------------------------------------------


def _is_lost(rank: int, address: str, how: int) -> str:
    os.environ["SALIENTPP_TOKEN"] = TOKEN
    loading.open_session = partial(open_session, timeout=timedelta(seconds=6))  # type: ignore[attr-defined]
    loader = loader_of(salientpp.load(address))
    iterator = iter(loader)
    next(iterator)
    if rank == 1:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        for _ in range(100):
            ids_of(iterator)
            iterator = iter(loader)
    return f"{time.monotonic() - begin:.1f} s: {raised.value}"


def test_a_killed_rank_is_named_by_the_others_and_by_the_storage(hosts: Hosts) -> None:
    found = distributed.run(_is_lost, 2, hosts.address, signal.SIGKILL, may_fail=True)
    assert "rank 1" in found[0], found
    until(lambda: not hosts.sessions(), 20)


def test_a_stopped_rank_is_named_after_the_timeout(hosts: Hosts, tmp_path: Path) -> None:
    """The storage hosts name it, because it sends no beats. It has the only process of its job."""
    script = SCRIPT.replace(
        "part = salientpp.load(address)",
        "print(os.getpid(), flush=True)\n"
        "from salientpp.store.directory import load as loading; from functools import partial; from datetime import timedelta\n"
        "loading.open_session = partial(loading.open_session, timeout=timedelta(seconds=5)); part = salientpp.load(address)",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SALIENTPP_TOKEN": TOKEN}
    command = [python(), "-c", script, hosts.address, "1000", "0.05", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as job:
        try:
            assert job.stdout is not None and job.stderr is not None
            pid = int(job.stdout.readline())
            assert json.loads(job.stdout.readline()) == "ready"
            os.kill(pid, signal.SIGSTOP)
            until(lambda: not hosts.sessions(), 30)
            assert "did not answer for 5 s; it may be stopped" in hosts.log()
            os.kill(pid, signal.SIGCONT)
            job.wait(distributed.HANG)
            assert "RankFailure" in job.stderr.read()
        finally:
            job.kill()


def _resumes(address: str, state: Any) -> list[list[int]]:
    loader = loader_of(salientpp.load(address))
    if state is not None:
        loader.load_state_dict(state)
    return ids_of(loader)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_resume_after_a_restart_of_the_storage(hosts: Hosts, root: Path, tmp_path: Path, how: int) -> None:
    """Every job names the storage host that was lost. The storage starts again, with one host, and the job goes on from its state."""
    expected = _resumes(hosts.address, None)
    loader = loader_of(salientpp.load(hosts.address))
    iterator = iter(loader)
    first = [next(iterator).n_id.tolist() for _ in range(2)]
    state = loader.state_dict()
    pids = [session["pid"] for session in hosts.sessions()]
    if how == signal.SIGKILL:
        hosts.send_signal(1, how)
    else:
        hosts.stop()
    with pytest.raises(RuntimeError, match="storage host") as raised:
        while True:
            ids_of(iterator)
            iterator = iter(loader)
    assert hosts.addresses[1] in str(raised.value) or hosts.addresses[0] in str(raised.value)
    del iterator, loader
    gc.collect()
    hosts.stop()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    with serving(root, 1, tmp_path) as restarted:
        assert first + _resumes(restarted.address, state) == expected


def test_no_process_of_a_killed_server_is_left(hosts: Hosts) -> None:
    part = salientpp.load(hosts.address)
    loader = loader_of(part)
    ids_of(loader)
    pids = [session["pid"] for session in hosts.sessions()]
    hosts.stop(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    with pytest.raises(RuntimeError):
        ids_of(loader)
        ids_of(loader)


@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_process_of_a_session_is_named_before_the_first_loader(hosts: Hosts, index: int) -> None:
    """No connection between the ranks exists yet. The first storage host's process also has the key-value store."""
    part = salientpp.load(hosts.address)
    pids = [session["pid"] for session in hosts.sessions()]
    os.kill(hosts.status(index)["sessions"][0]["pid"], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=f"^rank {1 + index} of "):
        loader_of(part)
    assert time.monotonic() < begin + 60, "it did not wait for the time-out"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


def test_a_rank_that_computes_names_the_rank_that_was_lost(hosts: Hosts) -> None:
    """The whole session has ended when this rank calls the package again."""
    found = distributed.run(_computes_while_rank_1_is_lost, 2, hosts.address, may_fail=True)
    assert found[0].startswith("rank 1 of the job went away"), found


def _computes_while_rank_1_is_lost(rank: int, address: str) -> str:
    os.environ["SALIENTPP_TOKEN"] = TOKEN
    part = salientpp.load(address)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4)
    with pytest.raises(RankFailure) as raised:
        loader_of(part)
    return str(raised.value)


def test_no_rank_waits_for_a_session_that_has_ended() -> None:
    """torch's own client would try to connect for the whole time-out."""
    begin = time.monotonic()
    with pytest.raises(StorageError, match="the process of this session on storage host node7:29500 has ended"):
        opening.meet("a", ("127.0.0.1", free_ports(1)[0]), timedelta(minutes=5), "node7:29500")
    assert time.monotonic() < begin + 60


def test_storage_hosts_hear_why_a_session_was_not_opened(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> None:
        raise OSError("no descriptors are left")

    monkeypatch.setattr(opening, "meet", cannot)
    with pytest.raises(OSError, match="no descriptors"):
        salientpp.load(hosts.address)
    until(lambda: not hosts.sessions(), 20)
    assert "rank 0 of the job could not open the session (OSError: no descriptors are left)" in hosts.log()


# --- mistakes -----------------------------------------------------------------------------------------------------


def _misses(rank: int, address: str) -> str:
    os.environ["SALIENTPP_TOKEN"] = TOKEN if rank == 0 else "another token, which is wrong"
    with pytest.raises((ValueError, OSError)) as raised:
        salientpp.load(address)
    return str(raised.value)


def test_a_rank_with_another_token_is_named(hosts: Hosts) -> None:
    found = distributed.run(_misses, 2, hosts.address)
    assert "token" in found[0] and "rank 1" in found[0], found
    assert "SALIENTPP_TOKEN" in found[1], found


def test_mistakes_are_named(hosts: Hosts, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave part_id, process_group and storage_ranks out"):
        salientpp.load(hosts.address, storage_ranks=1)
    with pytest.raises(ValueError, match="HOST:PORT"):
        salientpp.load("salientpp://nowhere")
    with pytest.raises(StorageError, match="cannot be reached"):
        salientpp.load("salientpp://127.0.0.1:9")
    part = salientpp.load(hosts.address)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(part)
    with pytest.raises(ValueError, match="neighbor_sampler="):
        loader_of(part, neighbor_sampler=object())
    with serving(root, 1, tmp_path) as other:
        hosts_of_other = f"salientpp://{other.addresses[0]}"
        assert ids_of(loader_of(salientpp.load(hosts_of_other))) == ids_of(loader_of(part))
    monkeypatch.delenv("SALIENTPP_TOKEN")
    with pytest.raises(ValueError, match="SALIENTPP_TOKEN is not set"):
        salientpp.load(hosts.address)


def test_hosts_may_serve_copies_of_their_parts(hosts: Hosts, root: Path, tmp_path: Path) -> None:
    expected = ids_of(loader_of(salientpp.load(hosts.address)))
    (tmp_path / "disk").mkdir()
    with serving(root, 1, tmp_path, "--copy-to", str(tmp_path / "disk"), is_command=True) as copied:
        assert ids_of(loader_of(salientpp.load(copied.address))) == expected


def test_hosts_with_different_directories_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the hosts the address names, the first one is compared too."""
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    roots = root, root.parents[1] / "typed" / "parts"
    each = [
        Hosts(path, [address], [tmp_path / address], ["--hosts", *addresses]) for path, address in zip(roots, addresses)
    ]
    try:
        for hosts in each:
            hosts.start()
        for address in addresses:
            with pytest.raises(StorageError, match="must have the same fingerprint"):
                salientpp.load(f"salientpp://{address}")
    finally:
        for hosts in each:
            hosts.stop()


# --- work without a loader ----------------------------------------------------------------------------------------


def _computes(rank: int, address: str, root: Path) -> bool:
    os.environ["SALIENTPP_TOKEN"] = TOKEN
    torch.manual_seed(0)
    there, here = salientpp.load(address), salientpp.load(root)
    model = GraphSAGE(there.num_features, 4, 1, 4)
    one, other = (salientpp.inference(model, part) for part in (there, here))
    assert here.part_id is None or one.shape[0] == there.split("all").numel()
    return one.equal(other) and len(ids_of(loader_of(there))) > 0


@pytest.mark.parametrize("trainers", [1, 2])
def test_inference_equals_that_of_ranks_with_the_directory(hosts: Hosts, root: Path, trainers: int) -> None:
    assert all(distributed.run(_computes, trainers, hosts.address, root))
