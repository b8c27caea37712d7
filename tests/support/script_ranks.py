"""Runs a script on several ranks with the variables of torchrun, without torchrun's agent and without new interpreters.

The ranks are forked from the server of tests/support/distributed.py. So a script of two ranks costs a fraction of what
torchrun costs. The store of the default group is in the calling process, as it is in torchrun's agent.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import HANG, forks


def run_script(script: Path, world_size: int) -> None:
    """Runs a script in its folder, and checks that each rank ends without an error."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [script.with_suffix(f".{rank}.log") for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        variables = {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        process = forks().Process(
            target=_run, args=(str(script.resolve()), {name: str(value) for name, value in variables.items()}, str(log))
        )
        process.start()
        processes.append(process)
    running, end = list(processes), time.monotonic() + HANG
    while running and not any(process.exitcode for process in processes) and time.monotonic() < end:
        multiprocessing.connection.wait([process.sentinel for process in running], end - time.monotonic())
        running = [process for process in running if process.exitcode is None]
    for process in running:  # another rank failed, or these hang
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    texts = "\n".join(f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs) if log.exists())
    assert codes == [0] * world_size, f"{script.name} ended with {codes}\n{texts}"


def _run(script: str, variables: dict[str, str], log: str) -> None:
    os.chdir(os.path.dirname(script))
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
