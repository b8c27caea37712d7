"""A pool of ranks: processes that live through a whole run and take jobs over pipes, so that a job costs milliseconds.

``shared_pool().run(function, world_size, *args)`` calls ``function(place, *args)`` on ranks 0, ..., ``world_size`` - 1 and returns their results in order::

    def total(place, addend):
        value = torch.tensor([place.rank + addend])
        dist.all_reduce(value, group=place.group)
        return int(value)

    assert shared_pool().run(total, 3, 10) == [33, 33, 33]

* The default process group has all ranks of the pool. So a job gives ``place.group`` to everything that takes a process group: ``salientpp.load``, loaders,
  ``distribute``, ``inference`` (``process_group=place.group``), torch's collectives and DDP. For a job of one rank it is a group of one.
* The function must be at the top level of a module. Arguments and results are pickled by value, so tensors are copied.
* A rank that raises gives a :class:`Failed` with the exception's type, text and traceback. A job that expects exceptions catches them itself and returns
  what it wants to know. After a :class:`Failed`, the processes are killed, and the next job gets new ones, because ranks may be out of step.
* If a rank dies, or has not answered after ``seconds``, all ranks that have not answered give a :class:`Failed` with the stacks of their threads.
* A change of the process (modules, environment, threads) stays for the next jobs. So a job undoes its changes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import distributed
import torch
import torch.distributed as dist
from distributed import Failed

#: Ranks of a pool.
SIZE = 4

#: Tasks of the same processes. Process groups on which a collective failed are never reused, and keep their connections and threads.
MOST_TASKS = 400

#: Seconds after which a rank that has not answered counts as hung. The dearest job took 168 s on two cores with a load of 30.
HANG = 240.0

#: Seconds for the others to notice that a rank has died, and seconds for a rank to write its stacks.
_NOTICE, _WRITE = 10.0, 5.0

#: Attempts to connect the processes; see ``distributed``.
_MEETINGS = 3


@dataclass(frozen=True)
class Place:
    """A rank's place in a job: number, number of ranks, and their process group (None: the default group)."""

    rank: int
    size: int
    group: Any = None


class Pool:
    """Processes that take jobs. They start with the first job, and after a failure with the next job."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.starts = 0  # number of times that the processes were started
        self._processes: list[Any] = []
        self._tasks = 0  # of these processes
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._stacks: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pool")

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, seconds: float = HANG
    ) -> list[Any | Failed]:
        """Results of ``function(place, *args)`` on each rank."""
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be in [1, {self.size}], got {world_size}")
        if self._tasks == MOST_TASKS:
            self.close()
        if not self._processes:
            self._start()
        self._tasks += 1
        task = pickle.dumps((function, world_size, args))
        results = self._answers(task, world_size, seconds)
        if any(isinstance(result, Failed) for result in results):
            self.close()
        return results

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._tasks = [], [], 0

    def _start(self) -> None:
        context = distributed.forks()
        for _ in range(_MEETINGS):
            self.starts += 1
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._stacks = [Path(self._folder.name) / f"{self.starts}-{rank}" for rank in range(self.size)]
            for rank in range(self.size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(there, rank, self.size, self._store.port, str(self._stacks[rank]))
                )
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
            failed = [answer for answer in self._answers(None, self.size, HANG) if isinstance(answer, Failed)]
            if not failed:
                return
            self.close()
        raise AssertionError(f"the ranks of a pool could not connect in {_MEETINGS} attempts: {failed}")

    def _answers(self, task: bytes | None, world_size: int, seconds: float) -> list[Any]:
        """Sends a task to the first ranks, if there is one, and waits for an answer of each."""
        results: list[Any] = [None] * world_size
        waiting = {self._pipes[rank]: rank for rank in range(world_size)}
        deadline = time.monotonic() + seconds
        for rank in range(world_size if task is not None else 0):
            with contextlib.suppress(OSError):  # the rank died after its last job; reading its pipe says so below
                self._pipes[rank].send_bytes(task)
        died = False
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    exitcode = self._processes[rank].exitcode
                    results[rank] = Failed("Died", f"rank {rank} ended with exit code {exitcode}\n{self._stack(rank)}")
                    if not died:
                        died, deadline = True, min(deadline, time.monotonic() + _NOTICE)
        late = f"rank {{}} did not answer within {seconds:g} s" if not died else "rank {} waits for a rank that died"
        for rank in waiting.values():
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        for rank in waiting.values():
            results[rank] = Failed("Hang", f"{late.format(rank)}\n{self._stack(rank, _WRITE)}")
        return results

    def _stack(self, rank: int, seconds: float = 0.0) -> str:
        """Text that faulthandler wrote for a rank. It gets this time to begin."""
        end = time.monotonic() + seconds
        while True:
            text = self._stacks[rank].read_text() if self._stacks[rank].exists() else ""
            if text or time.monotonic() > end:
                if seconds and text:
                    time.sleep(0.1)  # the rest of the stacks
                    text = self._stacks[rank].read_text()
                return text
            time.sleep(0.01)


_pool: Pool | None = None


def shared_pool() -> Pool:
    """The pool of this process. It ends with the process."""
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool


# --- in the ranks -----------------------------------------------------------------------------------------


def _serve(pipe: multiprocessing.connection.Connection, rank: int, size: int, port: int, stacks: str) -> None:
    """Calls the functions that the pipe brings until it is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the pipe
    torch.set_num_threads(1)
    file = open(stacks, "w")
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    try:
        groups = _connect(rank, size, port)
    except RuntimeError as error:
        pipe.send_bytes(pickle.dumps(Failed("NotMet", str(error))))
        return
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the pool is over, and other ranks may be gone
        try:
            function, world_size, args = pickle.loads(task)
            # Jobs collect garbage, which takes a quarter of a second if it visits all that was imported.
            gc.collect()
            gc.freeze()
            answer = pickle.dumps(function(Place(rank, world_size, groups[world_size]), *args))
        except Exception as error:
            answer = pickle.dumps(Failed(type(error).__name__, f"{error}\n{traceback.format_exc()}"))
        try:
            pipe.send_bytes(answer)
        except OSError:
            os._exit(0)


def _connect(rank: int, size: int, port: int) -> dict[int, Any]:
    """Makes the default group, and a group of the first ranks for each number of ranks."""
    forever = timedelta(seconds=distributed.NEVER)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=forever)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=forever)
    groups = {some: dist.new_group(list(range(some)), timeout=forever) for some in range(1, size)}
    return {**groups, size: None}
