"""Laws on emulated hosts: a slow link changes no batch, a cut link ends every rank, and a cluster leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cluster
import distributed
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, LinkCounts, link_counts
from distributed import HANG, NEVER
from graphs import random_data
from rare import rare

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches

FANOUTS, BATCH, ALPHA, SEED = [5, 3, 2], 5, 0.2, 7
CUT_TIMEOUT = 5  # time-out in seconds of ranks whose link is cut


@pytest.fixture(scope="module", autouse=True)
def _only_where_hosts_can_be_emulated() -> None:
    reason = cluster.unavailable()
    if reason is not None:
        pytest.skip(reason)
    # Otherwise the first cluster starts a fork server without preloaded imports, also for the test files that follow.
    distributed.forks()


def _partition(root: Path, num_parts: int) -> str:
    salientpp.partition(random_data(), num_parts, root, FANOUTS, BATCH)
    return str(root)


def _loader(root: str, **options) -> NeighborLoader:
    options = {
        "batch_size": BATCH,
        "shuffle": True,
        "seed": SEED,
        "replication_factor": ALPHA,
        "num_workers": 1,
        **options,
    }
    return NeighborLoader(salientpp.load(root), FANOUTS, "train", **options)


def _send(rank: int, hosts: Cluster, num_bytes: int) -> tuple[float, float]:
    """Seconds in which rank 0 sends to rank 1 over the slow link, and the inode of this rank's network namespace."""
    here, there = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    started = time.monotonic()
    dist.send(here, 1) if rank == 0 else dist.recv(there, 0)
    dist.barrier()
    one_way = time.monotonic() - started
    if rank == 0:
        hosts.set_rate(50e6)
    dist.barrier()
    dist.all_to_all_single(there, here)
    return one_way, os.stat("/proc/self/ns/net").st_ino


def test_a_link_keeps_its_rate_and_ranks_have_their_own_networks():
    with Cluster(2, bytes_per_second=4e6) as hosts:
        (seconds, first), (_, second) = hosts.run(_send, hosts, 2_000_000, seconds=HANG)
    # At either end of the link, a full token bucket passes at once.
    assert seconds > (2_000_000 - 2 * cluster._BURST_BYTES) / 4e6
    assert len({first, second, os.stat("/proc/self/ns/net").st_ino}) == 3


def _digests(rank: int, root: str) -> tuple[list, int]:
    loader = _loader(root)
    given = [(batch.n_id.tolist(), batch.edge_index.tolist(), batch.x.tolist()) for _ in range(2) for batch in loader]
    return given, loader.stats().rows_remote


def test_a_slow_link_changes_no_batch_and_traffic_equals_the_prediction(tmp_path):
    root = _partition(tmp_path / "parts", 3)
    with Cluster(3, bytes_per_second=0.2e6) as hosts:
        slow = hosts.run(_digests, root, seconds=HANG)
    assert slow == distributed.run(_digests, 3, root)
    predicted = analyze(
        salientpp.load(root),
        Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=2, seed=SEED),
        Ways(replication_factors=[ALPHA], policies=["vip"]),
    )
    assert [rows for _, rows in slow] == [2 * rows for rows in predicted.results[0].remote_rows_per_rank]


def _counted(rank: int, root: str) -> tuple[int, int, LinkCounts]:
    """Bytes that a loader counts in an epoch as received and as sent, and what crossed the link of its host."""
    part = salientpp.load(root, storage_ranks=1)
    if part.only_stores:
        salientpp.serve(part)
        return 0, 0, LinkCounts(0, 0, 0, 0)
    loader = NeighborLoader(part, FANOUTS, "all", batch_size=64, seed=SEED)
    for _ in loader:
        pass
    loader.reset_stats()
    dist.barrier(part.trainers)
    before = link_counts()
    for _ in loader:
        pass
    dist.barrier(part.trainers)
    counted = link_counts().since(before)
    return loader.stats().bytes_received, loader.stats().bytes_sent, counted


def test_the_links_of_ranks_that_train_carry_the_bytes_that_loaders_count(tmp_path):
    """The loader counts all requests to storage ranks and all answers, and little else travels."""
    data = salientpp.datasets.synthetic(num_vertices=2000, num_features=256)
    salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, 64, topology="parts")
    with Cluster(3) as hosts:
        ranks = hosts.start(_counted, str(tmp_path / "parts"), seconds=HANG)
        for received, sent, on_link in [rank.result(HANG) for rank in ranks[:2]]:
            assert received > 1e6
            assert received < on_link.received_bytes < 1.05 * received
            assert sent < on_link.sent_bytes


def _round_trip(rank: int, repeats: int) -> float:
    """Seconds in which a short message goes from rank 0 to rank 1 and back."""
    token = torch.zeros(1)
    dist.barrier()
    started = time.monotonic()
    for sender in [0, 1] * repeats:
        dist.send(token, 1 - sender) if rank == sender else dist.recv(token, sender)
    return (time.monotonic() - started) / repeats


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs tap devices")
def test_a_link_with_a_delay_changes_no_batch(tmp_path):
    root, delay = _partition(tmp_path / "parts", 3), 0.01
    with Cluster(2, bytes_per_second=50e6, delay=delay) as hosts:
        assert min(hosts.run(_round_trip, 5, seconds=HANG)) >= 2 * delay
        for change in (lambda: hosts.cut(1), lambda: hosts.set_rate(1e6)):
            with pytest.raises(RuntimeError, match=r"links with a delay \(0.01 s\) cannot be changed"):
                change()
    with Cluster(3, bytes_per_second=50e6, delay=delay) as hosts:
        assert hosts.run(_digests, root, seconds=HANG) == distributed.run(_digests, 3, root)


def _until_cut(
    rank: int, root: str, hosts: Cluster, victim: int, depth: int, seconds_cut: float | None
) -> tuple[str, float, list]:
    """Iterates while the victim cuts its own link in mid-epoch.

    Returns the error's text, the seconds since the cut, and the batches.
    """
    loader = _loader(root, depth=depth, timeout=CUT_TIMEOUT if seconds_cut is None else NEVER)
    cut, batches = None, []
    try:
        for epoch in range(3):
            for index, batch in enumerate(loader):
                batches.append(batch.n_id.tolist())
                if (epoch, index) == (1, 2):
                    cut = time.monotonic()
                    if rank == victim:
                        hosts.cut(victim)
                        if seconds_cut is not None:
                            time.sleep(seconds_cut)
                            hosts.restore(victim)
    except RuntimeError as error:
        return str(error), time.monotonic() - cut, batches
    return "", 0.0, batches


@pytest.mark.parametrize(("victim", "depth"), [(0, 10), (2, 1), *rare((1, 10))])
def test_after_a_cut_link_every_rank_names_rank_batch_and_stage(tmp_path, victim, depth):
    root = _partition(tmp_path / "parts", 3)
    with Cluster(3, bytes_per_second=2e6) as hosts:
        ranks = hosts.start(_until_cut, root, hosts, victim, depth, None, seconds=NEVER)
        results = [rank.result(timeout=HANG) for rank in ranks]
    for rank, (text, seconds, batches) in enumerate(results):
        print(f"{seconds:.2f} s, {len(batches)} batches: {text}")
        assert text.startswith(f"rank {rank}, batch ") and ", stage " in text
        # The bound allows the loader's time-out and two requests to the store, which may be behind the cut link. It is
        # shorter than the default group's time-out.
        assert seconds < CUT_TIMEOUT + 60


def test_a_link_that_is_restored_within_the_timeout_changes_no_batch(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    with Cluster(2, bytes_per_second=2e6) as hosts:
        for text, _, batches in hosts.run(_until_cut, root, hosts, 1, 10, 1.0, seconds=HANG):
            assert text == "" and len(batches) > 3
        assert [batches for _, _, batches in hosts.run(_until_cut, root, hosts, -1, 10, 0.0, seconds=HANG)] != []


_ABANDONED = """
import time
from cluster import Cluster
def wait(rank):
    time.sleep(600)
if __name__ == "__main__":
    hosts = Cluster(2, bytes_per_second=1e6).__enter__()
    hosts.start(wait)
    print(*hosts._namespaces, *(pid for pool in hosts._pools for pid in pool._processes), flush=True)
    time.sleep(600)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_cluster_leaves_no_process_and_no_namespace(tmp_path):
    script = tmp_path / "abandoned.py"
    script.write_text(_ABANDONED)
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        left = [int(pid) for pid in process.stdout.readline().split()]
        assert len(left) == 5 and all(map(_is_running, left))
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + HANG
        while any(map(_is_running, left)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in left if _is_running(pid)]


def _fail(rank: int, seconds: float) -> None:
    dist.barrier()  # otherwise rank 1 may end while rank 0 still connects to it
    if rank == 1:
        raise LookupError("the user's mistake")
    time.sleep(seconds)


def test_a_rank_that_raises_or_does_not_end_is_an_error():
    with Cluster(2) as hosts:
        with pytest.raises(LookupError, match="the user's mistake"):
            hosts.run(_fail, 0.0)
        with pytest.raises(TimeoutError, match="rank 0 did not end within 8 s"):
            hosts.run(_fail, NEVER, seconds=8)


def test_errors_name_missing_requirements(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert cluster.unavailable() == "network namespaces need root"
    monkeypatch.setattr(cluster.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert cluster.unavailable() == "tc not found; install iproute2 and util-linux"
    with pytest.raises(ValueError, match="num_hosts must be 1 to 200, got 0"):
        Cluster(0)
