"""Laws of whole scripts: however a script ends, its process ends, and so do the other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from graphs import random_data

import salientpp

HEAD = """
import os, sys, time
import torch.distributed as dist
rank, root, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
from salientpp import NeighborLoader, load
"""
MAKE = 'loader = NeighborLoader(load(root), [5, 3], "train", batch_size=8, shuffle=True, seed=1, timeout=20)\n'


def _run_script(tmp_path: Path, body: str, seconds: float = 60) -> list[subprocess.CompletedProcess]:
    salientpp.partition(random_data(), 2, tmp_path / "parts", [5, 3], 8)
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "parts"), str(tmp_path / "meet")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=seconds)
            done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, err))
    except subprocess.TimeoutExpired:
        pytest.fail("a script did not end")
    finally:
        for rank in ranks:
            rank.kill()
    return done


@pytest.mark.parametrize("which", ["True", "rank == 0", "rank == 1"])
@pytest.mark.parametrize("destroy", ["", "dist.destroy_process_group()"])
def test_a_script_may_end_with_an_iterator_alive(tmp_path, which, destroy):
    body = MAKE + f"iterator = iter(loader)\nnext(iterator)\nif not ({which}):\n    print(sum(1 for _ in iterator) + 1, len(loader))\n{destroy}\n"
    for rank, done in enumerate(_run_script(tmp_path, body)):
        assert done.returncode == 0, done.stderr
        if done.stdout:
            given, length = done.stdout.split()
            assert given == length, rank


@pytest.mark.parametrize("depth", [1, 10])
def test_an_uncaught_exception_on_one_rank_ends_the_other_with_its_text(tmp_path, depth):
    body = MAKE.replace("timeout=20", f"timeout=20, depth={depth}") + """
import torch
for epoch in range(3):
    for index, batch in enumerate(loader):
        if rank == 0 and (epoch, index) == (1, 2):
            raise LookupError("the user's mistake")
"""
    failing, waiting = _run_script(tmp_path, body, seconds=15)
    assert failing.returncode == 1 and "LookupError: the user's mistake" in failing.stderr
    assert waiting.returncode == 1
    assert "rank 0 ended in mid-epoch: LookupError: the user's mistake" in waiting.stderr


def test_an_uncaught_exception_does_not_keep_ranks_that_wait_for_the_process(tmp_path):
    body = MAKE + """
import torch
for index, batch in enumerate(loader):
    if rank == 0 and index == 2:
        raise LookupError("the user's mistake")
    dist.all_reduce(torch.ones(1))  # as DDP does in every step
"""
    failing, waiting = _run_script(tmp_path, body, seconds=15)
    assert failing.returncode == 1 and "LookupError: the user's mistake" in failing.stderr
    assert waiting.returncode == 1


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_a_failed_stage_ends_every_process_at_once(tmp_path, end):
    body = MAKE.replace("timeout=20", "timeout=60, transform=fail") + f"""
import torch
try:
    for batch in loader:
        pass
finally:
    {end or "pass"}
"""
    fail = "def fail(batch):\n    if rank == 0 and batch.n_id.numel() % 3 == 0:\n        1 / 0\n    return batch\n"
    for done in _run_script(tmp_path, fail + body, seconds=20):
        assert done.returncode == 1
        assert "stage assemble: division by zero" in done.stderr and "rank 0, batch" in done.stderr


def test_wrong_arguments_on_one_rank_are_every_ranks_error(tmp_path):
    body = 'NeighborLoader(load(root), [5, 3], "train", depth=rank, timeout=20)\n'
    for done in _run_script(tmp_path, body, seconds=15):
        assert done.returncode == 1 and "depth must be an integer >= 1 (batches in flight), got 0" in done.stderr
