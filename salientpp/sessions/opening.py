"""Opens a session: the ranks of a job and one process on each storage host become the ranks of a new :class:`~salientpp.ranks.job.Job`.

Rank 0 asks every storage host to start a process for the session. The process of the first host makes a key-value store, over which all ranks then meet. The
ranks that train keep their numbers, and those of the storage hosts follow.

Every rank that trains keeps a connection to every storage host. A rank that is killed loses it, and a rank that is stopped is silent on it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ranks.facts import check_same
from salientpp.ranks.job import Job
from salientpp.ranks.roles import Roles
from salientpp.sessions.connection import Connection
from salientpp.sessions.protocol import StorageError
from salientpp.sessions.token import find_token

#: Longest time of one attempt to connect to a session's key-value store. Between two attempts, a rank looks whether the store is still there.
_CONNECTING = timedelta(seconds=5)


@dataclass(frozen=True)
class Session:
    """Session of this process with storage hosts.

    Attributes:
        job: the ranks that train, and after them one rank for each storage host.
        hosts: addresses of the storage hosts, in the order of their ranks.
        manifest: manifest of the directory that the hosts serve.
        files: connection over which files of the directory can be fetched.
    """

    job: Job
    hosts: tuple[str, ...]
    manifest: dict[str, Any]
    files: Files


class _News:
    """Hears from the servers why a session cannot go on.

    Attributes:
        job: the job of the session; None before it exists.
        text: the first reason that was heard; None: none so far.
    """

    def __init__(self, attended: Sequence[Connection]) -> None:
        self._attended = attended
        self.job: weakref.ref[Job] | None = None
        self.text: str | None = None

    def lose(self, text: str) -> None:
        """Runs when a storage server says that a process of the session is lost, or when this server itself is lost. Tells the other servers."""
        self.text = self.text or text
        if (there := None if self.job is None else self.job()) is not None:
            there.heard = there.heard or text
        for connection in [*self._attended]:
            with contextlib.suppress(StorageError):
                connection.tell_lost(text)


class Files:
    """Fetches files of the directory that storage hosts serve. A host that serves a copy of some parts lacks the files of others."""

    def __init__(self, hosts: Sequence[str], token: str, seconds: float) -> None:
        self._connect = functools.partial(Connection, token=token, timeout=seconds)
        self._hosts, self._open = hosts, dict[str, Connection]()

    def fetch(self, name: str, file: Any) -> None:
        """Writes a file to ``file``. Raises StorageError if no storage host can send it."""
        last: StorageError | None = None
        for host in self._hosts:
            try:
                if host not in self._open or self._open[host].has_ended:
                    self._open[host] = self._connect(host)
                self._open[host].fetch(name, file)
                return
            except StorageError as error:
                last = error
                file.seek(0)
                file.truncate()
        raise StorageError(f"no storage host sends {name}: {last}") from last

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


def open_session(address: str, timeout: timedelta = DEFAULT_TIMEOUT) -> Session:
    """Opens a session with the storage hosts of which ``address`` names one. All ranks of the default process group call it, or a single process.

    The session ends when its job is not used any more, or with the process.

    Args:
        address: ``salientpp://host:port``.
        timeout: longest wait for a storage host, and for its ranks among each other. A process that is silent for longer counts as lost.

    Raises:
        StorageError: a storage host cannot be reached or refuses the session.
        DifferentVersions: a storage host runs another version of this package.
        ValueError: there is no token, the address is not one, the storage hosts serve different directories, or another rank could not open the session.
    """
    own = Job.default()
    comm, task, seconds = Comm.create(None, timeout), f"open a session with {address}", timeout.total_seconds()
    attended: list[Connection] = []
    news = _News(attended)
    try:
        with comm.together(task) as told:
            token = find_token()
            with Connection(address, token, seconds) as connection:
                described = connection.request(do="describe")
            told.mine = {name: described[name] for name in ("fingerprint", "hosts")}
        check_same(told.everyone, comm.of, "reach storage hosts with")
        hosts, name, store = described["hosts"], secrets.token_hex(16), None
        with comm.together(task) as told:
            if comm.rank == 0:
                for host in hosts:
                    store = _begin(Connection(host, token, seconds), attended, described, name, comm.size, store)
                    attended[-1].keep_beating(news.lose)  # while it waits for the other hosts and ranks, too
            told.mine = {"session": name, "store": store}
        name, store = (told.everyone[0][key] for key in ("session", "store"))
        with comm.together(task):
            if comm.rank > 0:
                for host in hosts:
                    attended.append(Connection(host, token, seconds))
                    attended[-1].request(do="attend", session=name, rank=comm.rank)
                    attended[-1].keep_beating(news.lose)
            meeting = meet(name, store, timeout, hosts[0])
    except BaseException as error:
        for connection in attended:
            connection.close(why=f"could not open the session ({type(error).__name__}: {error})")
        raise
    of = words_of_hosts(comm.size, hosts)
    launched = (0, 1) if own is None else own.launched
    job = Job(
        meeting, comm.rank, comm.size + len(hosts), name, attended[0].own_host, launched, of, f"rank {comm.size}{of}"
    )
    files, unused = Files(hosts, token, seconds), queue.SimpleQueue[None]()
    news.job = weakref.ref(job)
    job.heard = news.text
    threading.Thread(target=_await_end, args=(unused, attended, files), name="salientpp-end", daemon=True).start()
    # After the end of the roles, which tells the storage ranks that this script has ended. So the roles are made later.
    multiprocessing.util.Finalize(job, _end, (unused, attended, files), exitpriority=-1)
    Roles.of_job(job, len(hosts))
    return Session(job, tuple(hosts), described["manifest"], files)


def meet(name: str, place: Sequence[Any], timeout: timedelta, first: str) -> dist.Store:
    """Connects to the key-value store of a session.

    Args:
        name: the session's id.
        place: host and port of the store.
        timeout: longest wait for the store, now and later.
        first: address of the first storage host, whose process of the session has made the store.

    Raises:
        StorageError: this process has ended, or does not answer.
    """
    host, port = place
    until, of = time.monotonic() + timeout.total_seconds(), f"the process of this session on storage host {first}"
    while time.monotonic() < until:
        try:
            socket.create_connection((host, port), max(until - time.monotonic(), 1e-3)).close()
            # torch's client tries for its whole timeout to reach a process that has ended.
            patience = min(timeout, _CONNECTING)
            store = dist.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
        except (TimeoutError, dist.DistError):
            continue
        except OSError as error:
            why = error.strerror or error
            raise StorageError(f"{of} has ended ({why}); look at the log of its server first") from None
        store.set_timeout(timeout)
        # A prefix that only this session knows, because the store asks for no token.
        return dist.PrefixStore(name, store)
    raise StorageError(f"{of} did not answer for {timeout.total_seconds():g} s; it may be stopped")


def words_of_hosts(trainers: int, hosts: Sequence[str]) -> str:
    """Returns the text that errors append to a rank's number in a session."""
    named = ", ".join(f"{trainers + index} is {host}" for index, host in enumerate(hosts))
    return f" of a session with storage hosts (rank {named})"


def _begin(
    connection: Connection,
    attended: list[Connection],
    described: dict[str, Any],
    name: str,
    trainers: int,
    store: list[Any] | None,
) -> list[Any]:
    """Starts the session on one storage host. Returns host and port of the session's store."""
    attended.append(connection)
    theirs = connection.request(do="describe")  # also of the first host, because the address may name another one
    for fact in ("fingerprint", "hosts"):
        if theirs[fact] != described[fact]:
            raise StorageError(
                f"all storage hosts of a session must have the same {fact}, got {described[fact]}, and {theirs[fact]} on {connection.address}; start them "
                "with the same directory and the same --hosts"
            )
    seconds = connection.timeout
    return connection.request(do="open", session=name, trainers=trainers, store=store, timeout=seconds)["store"]


def _end(unused: queue.SimpleQueue[None], attended: Sequence[Connection], files: Files) -> None:
    """Runs when nothing uses a session any more, or at the end of the process."""
    if multiprocessing.util.is_exiting():
        _close(attended, files)
    else:
        # The garbage collector may run this in any thread, also in one that holds the lock of a connection. So this thread takes no lock and waits for nobody.
        multiprocessing.util.Finalize(
            None, _close, (attended, files), exitpriority=-1
        )  # if the process ends before the thread has done it
        unused.put(None)


def _await_end(unused: queue.SimpleQueue[None], attended: Sequence[Connection], files: Files) -> None:
    unused.get()
    _close(attended, files)


def _close(attended: Sequence[Connection], files: Files) -> None:
    for connection in attended:
        connection.close()
    files.close()
