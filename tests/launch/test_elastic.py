"""Laws of a job that changes its size: killed at any moment, it continues with fewer or more ranks, and takes the same steps."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from distributed import HANG
from graphs import random_data
from rare import rare

import salientpp

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

LOGICAL_RANKS, EPOCHS, ROUNDS = 6, 3, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    data = random_data(400, 2400)
    data.x = data.x / 400
    assignment = torch.arange(400) % LOGICAL_RANKS
    train = torch.cat([(assignment == part).nonzero().flatten()[: 15 + part] for part in range(LOGICAL_RANKS)])
    path = tmp_path_factory.mktemp("elastic") / "parts"
    test = torch.arange(350, 400)
    salientpp.partition(data, LOGICAL_RANKS, path, [4, 3], 4, method=assignment, split={"train": train, "test": test})
    return str(path)


def arguments(root: str, checkpoint: Path) -> list[str]:
    words = f"{root} --checkpoint {checkpoint} --every 2 --epochs {EPOCHS} --num-neighbors 4,3 --batch-size 4 --hidden 8 --alpha 0.1"
    return words.split()


def watch(log: Path, rank: int, die_at: int | None) -> None:
    """Makes the example record each batch that it trains on, and kills the process at one of them, like a lost machine."""
    import train_elastic

    forward, count = train_elastic.forward, 0

    def noted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        if model.training:
            with log.open("a") as out:
                out.write(json.dumps([rank, batch.n_id.tolist(), batch.e_id.tolist(), batch.y.tolist()]) + "\n")
        return forward(model, batch)

    train_elastic.forward = noted


def _train(rank: int, root: str, folder: str, attempt: str, victim: int, die_at: int | None) -> float:
    import train_elastic

    where = Path(folder)
    watch(where / f"{attempt}-{rank}.jsonl", rank, die_at if rank == victim else None)
    return train_elastic.train(
        train_elastic.parse_arguments(arguments(root, where / "checkpoint.pt")), torch.device("cpu")
    )


def noted(folder: Path, attempt: str) -> list[str]:
    """Returns everything that the ranks of an attempt trained on, without the ranks."""
    files = sorted(folder.glob(f"{attempt}-*.jsonl"))
    return [json.dumps(json.loads(line)[1:]) for file in files for line in file.read_text().splitlines()]


def whole_run(root: str, folder: Path) -> tuple[list[str], dict[str, torch.Tensor], float]:
    """Returns the batches of an uninterrupted run, in order, its final parameters, and its accuracy."""
    folder.mkdir()
    (found,) = distributed.run(_train, 1, root, str(folder), "whole", 0, None)
    return noted(folder, "whole"), torch.load(folder / "checkpoint.pt", weights_only=True)["model"], found


@pytest.mark.parametrize(
    "sizes", [(2, 1), (4, 3, 2), *rare(((3, 2),)), pytest.param((2, 6), marks=pytest.mark.faults)], ids=str
)
def test_a_job_that_loses_a_rank_continues_without_it(root, tmp_path, sizes):
    batches, parameters, right = whole_run(root, tmp_path / "whole")
    assert len(batches) == EPOCHS * ROUNDS * LOGICAL_RANKS
    rng = random.Random(str(sizes))
    for attempt, size in enumerate(sizes):
        checkpoint, done = tmp_path / "checkpoint.pt", 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)["loader"]
            done = state["epoch"] * ROUNDS + state["round"]
        is_last = attempt == len(sizes) - 1
        # The killed rank has at least one logical rank, and the job has completed some rounds.
        die_at = None if is_last else rng.randint(3, 6)
        victim = rng.randrange(size)
        print(f"attempt {attempt}: {size} ranks from round {done}, rank {victim} dies at its batch {die_at}")
        ends = distributed.run(
            _train, size, root, str(tmp_path), str(attempt), victim, die_at, may_fail=not is_last, group_seconds=60.0
        )
        found, expected = Counter(noted(tmp_path, str(attempt))), batches[done * LOGICAL_RANKS :]
        if is_last:
            assert found == Counter(expected)
            assert ends == pytest.approx([right] * size)
        else:
            assert not any(ends), "every rank ends"
            assert found <= Counter(expected)
    ended = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    for name, value in parameters.items():
        torch.testing.assert_close(ended[name], value, rtol=1e-4, atol=1e-5)


JOB = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {folders!r}
import train_elastic
from tests.launch import test_elastic
rank = os.environ["RANK"]
test_elastic.watch(Path(f"{{rank}}-{{os.getpid()}}.jsonl"), int(rank), None)
noted = train_elastic.forward
def slowly(model, batch):
    time.sleep(0.15)
    return noted(model, batch)
train_elastic.forward = slowly
train_elastic.main()
"""


def _agent(number: int, port: int, root: str, folder: Path) -> subprocess.Popen:
    """Starts torchrun on one host of up to three; the first has the store."""
    words = f"--nnodes 2:3 --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.2 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
    words += f" --rdzv-conf last_call_timeout=20,is_host={int(number == 0)} job.py"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words.split()]
    with (folder / f"host-{number}.log").open("w") as log:
        return subprocess.Popen(
            [*command, *arguments(root, folder / "checkpoint.pt")],
            cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _workers(agent: subprocess.Popen) -> list[int]:
    tasks = Path(f"/proc/{agent.pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


@pytest.mark.faults
def test_torchrun_continues_with_the_remaining_hosts(root, tmp_path):
    batches, parameters, right = whole_run(root, tmp_path / "whole")
    (tmp_path / "job.py").write_text(JOB.format(folders=[str(EXAMPLES), *sys.path]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    try:
        for number in range(3):
            agents.append(_agent(number, port, root, tmp_path))
            time.sleep(1)
        _wait_for(lambda: (tmp_path / "checkpoint.pt").exists(), tmp_path)
        # torchrun's restart number may stay 0, so new files show that the ranks have started again.
        first, lost = set(tmp_path.glob("*.jsonl")), agents[2]
        for pid in [lost.pid, *_workers(lost)]:
            os.kill(pid, signal.SIGKILL)
        _wait_for(lambda: "test accuracy" in _said(tmp_path), tmp_path)
    finally:
        for agent in agents:
            # After the work, the agents wait minutes for the lost agent.
            pids = _workers(agent) if agent.poll() is None else []
            for pid in [*pids, *([agent.pid] if agent.poll() is None else [])]:
                os.kill(pid, signal.SIGKILL)
            agent.wait()
    starts = re.findall(r"(\d) ranks, 6 logical ranks, from epoch (\d), round (\d)", _said(tmp_path))
    assert starts[0] == ("3", "0", "0") and starts[-1][0] == "2"
    done = int(starts[-1][1]) * ROUNDS + int(starts[-1][2])
    again = {json.dumps(json.loads(line)[1:]) for file in {*tmp_path.glob("*.jsonl")} - first for line in file.open()}
    assert done >= 2 and set(batches[done * LOGICAL_RANKS :]) <= again <= set(batches)
    ended = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    for name, value in parameters.items():
        torch.testing.assert_close(ended[name], value, rtol=1e-4, atol=1e-5)
    assert f"test accuracy {right:.3f}" in _said(tmp_path)


def _said(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.glob("host-*.log")))


def _wait_for(happened: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < deadline, _said(folder)
        time.sleep(0.2)
