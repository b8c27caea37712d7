"""Runs several ranks in a test: real processes, gloo on the loopback interface, and a time-out that only a hang reaches.

Processes are forked from a server that has imported torch once, so a run costs a fraction of a second. If torch finds a
GPU, each process is a new interpreter, because CUDA does not work in a process that was forked from a user of the driver.

A busy machine can be slow, and no test is about speed. So only a rank that still runs after ``HANG`` seconds counts as hung.
Waits inside a test have the time-out ``NEVER``, which is longer, unless the time-out itself is tested.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

#: Seconds after which a rank counts as hung, and a time-out that no test reaches.
HANG = 300.0
NEVER = 3600.0

#: Number of attempts to connect the ranks. Under a load of 12 on two cores, torch's own first connections between ranks
#: were closed about once in a thousand starts, before any code of this package had run.
_MEETINGS = 3
_NOT_MET = "NotMet"

#: Modules that the server imports before it forks. A test suite may add slow imports of its own before its first run.
PRELOADED = ["salientpp.testing.ranks"]


@dataclass(frozen=True)
class Failed:
    """Result of a rank that raised an exception or did not answer."""

    kind: str
    text: str

    def __bool__(self) -> bool:
        return False


def forks() -> multiprocessing.context.ForkServerContext:
    """Returns the multiprocessing context by which a test starts ranks: forks of a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")  # before Python 3.13 the server does not receive sys.path
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, before]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _new_processes() -> multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext:
    """Returns the multiprocessing context in which ranks are started."""
    return multiprocessing.get_context("spawn") if torch.cuda.is_available() else forks()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float = HANG,
    may_fail: bool = False,
    group_seconds: float = NEVER,
    rank_0_hosts: bool = False,
) -> list[Any]:
    """Calls a function on several ranks, each a process whose default process group is initialised. Returns their results by rank.

    Args:
        function: called as ``function(rank, *args)`` on every rank. Function, arguments and results must support ``pickle``.
        world_size: number of ranks.
        args: further arguments of the function.
        seconds: time after which a rank that has not ended is killed and the test fails.
        may_fail: return a :class:`Failed` for a rank that raised, instead of failing the test.
        group_seconds: time-out of the default process group.
        rank_0_hosts: keep the key-value store in rank 0, as without torchrun, so that it dies with rank 0. Otherwise it
            is in the calling process.
    """
    for _ in range(_MEETINGS):
        results = _start(function, world_size, args, seconds, group_seconds, rank_0_hosts)
        if not any(isinstance(result, Failed) and result.kind == _NOT_MET for result in results):
            break
        print(f"restarting ranks that could not connect: {results}")
    hung = [result for result in results if isinstance(result, Failed) and result.kind == "Hang"]
    failed = [result for result in results if isinstance(result, Failed)]
    if hung or (failed and not may_fail):
        raise AssertionError("\n\n".join(f"{f.kind}: {f.text}" for f in failed))
    return results


def _start(
    function: Callable[..., Any], world_size: int, args: tuple, seconds: float, group_seconds: float, rank_0_hosts: bool
) -> list[Any]:
    context = _new_processes()
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = master.port
    if rank_0_hosts:
        del master
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_main,
            args=(there, function, rank, world_size, port, group_seconds, rank_0_hosts and rank == 0, args),
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + seconds
    results: list[Any] = [
        Failed("Hang", f"rank {rank} did not answer within {seconds:g} s") for rank in range(world_size)
    ]
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (ready := multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in cast("list[multiprocessing.connection.Connection]", ready):
            rank = waiting.pop(pipe)
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                results[rank] = Failed("Died", f"rank {rank} ended with exit code {processes[rank].exitcode}")
            if isinstance(results[rank], Failed) and results[rank].kind == _NOT_MET:
                waiting, deadline = {}, 0.0  # the other ranks wait for this one; none has called the function
                break
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            if deadline:
                results[rank] = Failed("Hang", f"rank {rank} did not end within {seconds:g} s")
    return results


def _main(
    pipe: Any, function: Callable, rank: int, world_size: int, port: int, group_seconds: float, hosts: bool, args: tuple
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # A shell starts background processes with Ctrl-C ignored, and Python keeps that setting.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=group_seconds)
        )
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_seconds)
            )
        except RuntimeError as error:
            pipe.send_bytes(pickle.dumps(Failed(_NOT_MET, str(error))))
            return
        store.set(f"met/{rank}", "")
        store.wait([f"met/{other}" for other in range(world_size)])
        result = function(rank, *args)
    except Exception as error:
        result = Failed(type(error).__name__, f"{error}\n{traceback.format_exc()}")
    # Not send(), which shares the memory of tensors: the process would have to live until the receiver has opened it.
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    # The process exits as a user's script would, without being killed.
    if dist.is_initialized():
        dist.destroy_process_group()
