"""Check with two ranks of this machine: they load a small partitioned graph, and their batches must equal those of one process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli.checks.finding import Finding, Machine

if TYPE_CHECKING:
    from salientpp.store.directory.opened import PartitionedGraph

RANKS, FANOUTS, BATCH_SIZE, SEED = 2, (5, 3), 64, 0

#: File that appears when the dataset directory is complete.
READY = "ready"

#: Command that a rank runs; the folder and the rank follow.
COMMAND = (sys.executable, "-m", "salientpp.cli.checks.self_test_rank")

#: Variables of the job in which the doctor may run. Its ranks must not take them for their own.
_OF_A_JOB = re.compile(
    r"SLURM_\w+|TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SALIENTPP_TRACE_DIR"
)


class RanksFailed(Exception):
    """A rank ended with an error or did not end. The text gives the reason."""


def check_ranks(machine: Machine) -> Finding:
    """Runs two ranks of this machine. Compares their batches with those of one process, and measures the speed of messages."""
    from salientpp.datasets import synthetic
    from salientpp.store.directory.writer import partition

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="salientpp-doctor-") as name:
        folder = Path(name)
        try:
            with _ranks(folder, machine) as ranks:  # they import torch meanwhile
                data = synthetic(num_vertices=2000, num_features=32, seed=SEED)
                part = partition(data, RANKS, folder / "parts", list(FANOUTS), BATCH_SIZE, method="random", seed=SEED)
                (folder / READY).touch()
                expected = digests_of(part, logical_ranks=RANKS)
                codes = _codes(ranks, folder, machine.seconds)
            reports = _reports(codes, folder)
        except RanksFailed as error:
            advice = f"Look into the ranks that cannot work together: {error}. If a firewall separates processes of this machine, GLOO_SOCKET_IFNAME=lo helps."
            return Finding("two ranks of this machine failed", {"error": str(error)}, problems=[advice])
    speed = min(report["bytes_per_second"] for report in reports)
    values = {"batches": len(expected), "bytes_per_second": speed, "seconds": time.perf_counter() - started}
    for way in ("messages", "shared"):
        if any(report[way] != expected[rank::RANKS] for rank, report in enumerate(reports)):
            advice = f"Report this as a bug: the batches of two ranks ({way}) differ from those of one process."
            return Finding("two ranks of this machine load wrong batches", values, problems=[advice])
    text = f"two ranks load the batches of one process; {speed / 1e6:,.0f} MB/s between them; {values['seconds']:.1f} s"
    return Finding(text, values)


def digests_of(part: PartitionedGraph, **options: Any) -> list[str]:
    """Loads one epoch of a small graph. Returns a digest of each batch, by which batches of different runs are compared."""
    from salientpp.loader.node_loader import NeighborLoader

    loader = NeighborLoader(
        part,
        list(FANOUTS),
        "train",
        batch_size=BATCH_SIZE,
        shuffle=True,
        seed=SEED,
        uneven="wrap",
        device="cpu",
        **options,
    )
    return [
        hashlib.sha256(
            b"".join(values.numpy().tobytes() for values in (batch.n_id, batch.edge_index, batch.x))
        ).hexdigest()
        for batch in loader
    ]


@contextlib.contextmanager
def _ranks(folder: Path, machine: Machine) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the ranks for a ``with`` block. Ranks that still run at its end are killed."""
    environ = {name: value for name, value in machine.environ.items() if not _OF_A_JOB.fullmatch(name)}
    path = os.pathsep.join(filter(None, [*sys.path, environ.get("PYTHONPATH")]))
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    options: dict[str, Any] = {"env": environ, "stdin": subprocess.DEVNULL, "start_new_session": True}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            with (folder / f"{rank}.txt").open("wb") as said:
                words = [*COMMAND, str(folder), str(rank), str(machine.seconds)]
                ranks.append(subprocess.Popen(words, stdout=said, stderr=said, **options))
        yield ranks
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own, so its group has its number
            process.wait()


def _codes(ranks: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> list[int | None]:
    """Waits until all ranks have ended, or one has failed. Returns their exit codes, None for a rank that still runs.

    Raises:
        RanksFailed: neither happens within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        if time.monotonic() > deadline:
            raise RanksFailed(f"they had not ended after {seconds:g} s{_last_words(folder)}")
        time.sleep(0.02)
    return codes


def _reports(codes: list[int | None], folder: Path) -> list[dict[str, Any]]:
    """Returns the reports of ranks. Raises RanksFailed if one failed."""
    for rank, code in enumerate(codes):
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            raise RanksFailed(f"rank {rank} {how}{_last_words(folder)}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _last_words(folder: Path) -> str:
    """Returns text to append to an error: the last line that each rank printed."""
    said = {
        rank: (folder / f"{rank}.txt").read_text(errors="replace").split("\n")
        for rank in range(RANKS)
        if (folder / f"{rank}.txt").exists()
    }
    last = {rank: next((line.strip() for line in reversed(lines) if line.strip()), "") for rank, lines in said.items()}
    return "".join(f"; rank {rank} said: {line[:300]}" for rank, line in last.items() if line)
