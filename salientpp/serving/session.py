"""Process of one session on one storage host: it is a storage rank of the session's job.

The server (:mod:`salientpp.serving.server`) starts it, tells it when a rank that trains is lost, and reads how much it has sent. It shares nothing with other
sessions but the pages of the files that it maps.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from salientpp.loader.serve import Storage
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.job import Job
from salientpp.serving.spec import SessionSpec
from salientpp.sessions.opening import meet, words_of_hosts
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.load import check_files, part_of_rank
from salientpp.store.directory.manifest import read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.roles import OpenedBy

#: Seconds between two reports of what was sent.
_REPORT_SECONDS = 1.0

#: Seconds that the process stays after a failure, so that the ranks that train can end their own waits, and name the reason.
_STAY_SECONDS = 2.0


def run(pipe: Pipe, spec: SessionSpec) -> None:
    """Serves one session, in a process of its own. Returns when the scripts of the ranks that train have ended.

    Raises:
        RankFailure: a rank that trains failed or is lost. Also any error with which the directory cannot be opened.
    """
    sending = threading.Lock()

    def told(message: dict[str, Any]) -> None:
        with sending:
            pipe.send(message)

    try:
        store, place = _meeting(spec)
        number = len(spec.hosts)
        of = words_of_hosts(spec.trainers, spec.hosts)
        rank, size = spec.trainers + spec.index, spec.trainers + number
        job = Job(store, rank, size, spec.session, spec.host, of=of, keeper=f"rank {spec.trainers}{of}")
        root = Path(spec.root)
        opened_by = OpenedBy(number, job)
        whole = PartitionedGraph(root, read_manifest(root), None, opened_by=opened_by)
        if whole.fingerprint != spec.fingerprint:
            raise DatasetError(f"{root} was replaced since `salientpp serve` began to serve it; start it again")
        part, stored = part_of_rank(whole, job.rank, job.size)
        check_files(part, stored, "quick")
        storage = Storage({part.fingerprint: part}, job, part.roles)
        told({"store": place})
        watch = _Watch(pipe, told, storage)
        try:
            storage.serve()
        except Exception as error:
            if isinstance(error, RankFailure) and isinstance(error.__cause__, dist.DistError):
                raise RankFailure(job.reason_of_lost_store()) from error
            time.sleep(_STAY_SECONDS)
            raise
        watch.report()
    except Exception as error:
        with contextlib.suppress(OSError):
            told({"failed": f"{type(error).__name__}: {error}"})
        if isinstance(error, RankFailure):
            sys.exit(1)  # the server's log has the reason, and a traceback would say no more
        raise


def _meeting(spec: SessionSpec) -> tuple[dist.Store, list[object]]:
    """Returns the session's key-value store, and where others reach it: host and port. The process of the first storage host makes it."""
    timeout = timedelta(seconds=spec.timeout)
    if spec.store is not None:
        return meet(spec.session, spec.store, timeout, spec.hosts[0]), [*spec.store]
    # Without a socket of its own, the store would listen on all interfaces.
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((spec.host, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        spec.host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return dist.PrefixStore(spec.session, store), [spec.host, port]


class _Watch:
    """Thread that reads what the server says, and reports what was sent."""

    def __init__(self, pipe: Pipe, tell: Callable[[dict[str, Any]], None], storage: Storage) -> None:
        self._pipe, self._tell, self._storage = pipe, tell, storage
        threading.Thread(target=self._follow, name="salientpp-server", daemon=True).start()

    def report(self) -> None:
        """Tells the server how much this process has sent."""
        rows, bytes_ = self._storage.sent
        self._tell({"rows": rows, "bytes": bytes_})

    def _follow(self) -> None:
        try:
            while True:
                if self._pipe.poll(_REPORT_SECONDS):
                    self._lose(self._pipe.recv()["lost"])
                self.report()
        except (EOFError, OSError):
            os._exit(1)  # the server was killed, and nobody would end this process

    def _lose(self, text: str) -> None:
        """Ends all waits of this process, and of the other ranks, for a rank that is lost."""
        self._storage.job.tell_lost(text)
        for loader in [*self._storage.loaders.values()]:
            loader.engine.basis.comm.report_failure(text)
