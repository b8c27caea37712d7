"""Jobs that train from storage hosts or have storage ranks, as processes that can be killed, for ``bench_sessions.py`` and ``bench_losses.py``.

A job has one or several ranks. Each rank is forked from a process that has imported torch and the package, so a job starts in a fraction of a second. A rank
tells what it does, and when, through a pipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks import roles
from salientpp.sessions.opening import open_session
from salientpp.store.directory import load as loading
from salientpp.testing.ranks import PRELOADED, forks

PRELOADED[:] = ["common", "session_jobs"]

#: The job goes back to its first epoch after this many, so that one short run has all digests of a long one.
PERIOD = 8

#: Number of the batch in an epoch at which a rank says that it is inside the epoch.
INSIDE = 3


@dataclass(frozen=True)
class JobSpec:
    """Description of a job.

    Attributes:
        address: of a storage host, or the directory of a job with storage ranks.
        token: of the storage host.
        fanouts, batch_size: of its loader.
        ranks: number of its ranks.
        storage_ranks: number of them that only store, the last ones; 0: the job trains from storage hosts.
        epochs: number of epochs.
        sleep: seconds for which a rank computes after each batch.
        pause: seconds for which a rank computes before its loader, and after each epoch.
        timeout: seconds after which a silent process counts as lost; None: the package's.
    """

    address: str
    token: str
    fanouts: tuple[int, ...] = (10, 5)
    batch_size: int = 64
    ranks: int = 1
    storage_ranks: int = 0
    epochs: int = 10**6
    sleep: float = 0.0
    pause: float = 0.0
    timeout: float | None = None


@dataclass(frozen=True)
class Said:
    """Message of a rank: a word, the time of ``time.monotonic()``, which all processes share, and values."""

    word: str
    time: float
    values: tuple[Any, ...]


class Rank:
    """A rank of a job, seen by the process that started it. ``messages`` are what it has said so far."""

    def __init__(self, spec: JobSpec, rank: int, port: int) -> None:
        context = forks()
        here, there = context.Pipe()
        self.messages: list[Said] = []
        self._pipe = here
        self.process = context.Process(target=_train, args=(there, spec, rank, port), daemon=True)
        self.process.start()
        there.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def said(self, word: str) -> Said | None:
        """Returns the first message with a word, or None."""
        return next((each for each in [*self.messages] if each.word == word), None)

    def wait_for(self, word: str, seconds: float = 120.0) -> Said:
        """Waits for a message. Raises RuntimeError if the rank fails before, or does not send it."""
        until = time.monotonic() + seconds
        while (found := self.said(word)) is None:
            if (failed := self.said("raised")) is not None or time.monotonic() > until or not self._reader.is_alive():
                raise RuntimeError(f"expected a rank to say {word!r} within {seconds:g} s, got {failed or 'nothing'}")
            time.sleep(0.002)
        return found

    def end(self) -> None:
        """Lets the rank end after its epoch, and waits until it has ended."""
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send(None)
        self._join(60)

    def kill(self) -> None:
        self.process.kill()
        self._join(10)

    def _join(self, seconds: float) -> None:
        self.process.join(seconds)
        self._reader.join(seconds)

    def _read(self) -> None:
        try:
            while True:
                word, at, *values = self._pipe.recv()
                self.messages.append(Said(word, at, (*values,)))
        except (EOFError, OSError):
            pass


class Job:
    """A job whose ranks have started. The key-value store of its default group is in this process, as torchrun has it: ``store``."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = dist.PrefixStore("0/", server)  # as torch names its first group
        port = server.port if spec.ranks > 1 else 0
        self.ranks = [Rank(spec, rank, port) for rank in range(spec.ranks)]

    def wait_for(self, word: str, seconds: float = 120.0) -> None:
        for rank in self.ranks:
            rank.wait_for(word, seconds)

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


def epochs_of(rank: Rank) -> list[tuple[int, str, float, float]]:
    """Returns number in its period, digest, longest gap between two batches and seconds of each epoch of a rank."""
    return [each.values for each in rank.messages if each.word == "epoch"]  # type: ignore[misc]


def _train(pipe: Connection, spec: JobSpec, rank: int, port: int) -> None:
    """Trains as a script would, in a process of its own."""
    os.environ |= {"SALIENTPP_TOKEN": spec.token, "GLOO_SOCKET_IFNAME": "lo"}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    script = _Script(pipe, spec)
    try:
        if spec.ranks > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.ranks)
        script.run()
    except Exception as error:
        # The traceback would appear between the lines of progress. The process ends as that of a failed script.
        script.say("raised", script.called, type(error).__name__, str(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise


class _Script:
    """Script of a rank. ``called`` is the time at which it last called the package, or began to."""

    def __init__(self, pipe: Connection, spec: JobSpec) -> None:
        self._pipe, self._spec = pipe, spec
        self.called = time.monotonic()
        self._last = self.called

    def say(self, word: str, *values: Any) -> None:
        self._pipe.send((word, time.monotonic(), *values))

    def run(self) -> None:
        spec = self._spec
        if spec.timeout is not None:
            patience = timedelta(seconds=spec.timeout)
            loading.open_session = partial(open_session, timeout=patience)  # type: ignore[assignment]
            roles._SILENT_SECONDS = spec.timeout
        self._call("load")
        part = (
            salientpp.load(spec.address, verify="full", storage_ranks=spec.storage_ranks)
            if spec.storage_ranks
            else salientpp.load(spec.address)
        )
        if part.only_stores:
            self._call("loaded")
            salientpp.serve(part)
            return
        self._compute("loaded")
        self._call("make")
        options: dict[str, Any] = {"batch_size": spec.batch_size, "shuffle": True, "seed": 3, "logical_ranks": 4}
        if spec.timeout is not None:
            options["timeout"] = spec.timeout
        loader = NeighborLoader(part, [*spec.fanouts], "train", **options)
        self.say("made")
        self._last = time.monotonic()
        for epoch in range(spec.epochs):
            loader.set_epoch(epoch % PERIOD)
            self._epoch(epoch, loader)
            if self._pipe.poll():
                break
        self.say("end")

    def _epoch(self, epoch: int, loader: NeighborLoader) -> None:
        digest, gap, begin = hashlib.sha256(), 0.0, time.monotonic()
        self.called = begin
        for number, batch in enumerate(loader):
            now = time.monotonic()
            gap, self._last = max(gap, now - self._last), now
            digest.update(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes())
            self.say("batch", batch.num_nodes)
            if epoch == 1 and number == INSIDE:
                self.say("inside")
            time.sleep(self._spec.sleep)
            self.called = time.monotonic()
        self.say("epoch", epoch % PERIOD, digest.hexdigest(), gap, time.monotonic() - begin)
        self._compute("between" if epoch else "ready")
        self._last += self._spec.pause

    def _call(self, word: str) -> None:
        self.say(word)
        self.called = time.monotonic()

    def _compute(self, word: str) -> None:
        """Says a word, and does not call the package for a while."""
        self.say(word)
        time.sleep(self._spec.pause)
