"""Connections by which the ranks of a job with storage ranks notice at once that a process is gone.

Each rank keeps a connection to each storage rank, as long as its process runs. Nothing is sent over it but a greeting and its answer. The kernel closes the
connections of a process that ends, also if it is killed. gloo's connections do not tell this: there are none before the first loader, and a script may
destroy its process groups and go on.

A storage rank writes to the job's key-value store where it listens. It listens on the network interface that leads to the host of the store. If the store is
on the same host, the others reach this host by the name by which they reach the store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from typing import Any

import torch.distributed as dist

_PREFIX = "salientpp/lifeline"

#: Bytes of a greeting: a secret in hexadecimal digits, and the number of the rank in decimal ones.
_SECRET_BYTES, _RANK_BYTES = 32, 10

#: Answer of a storage rank to a greeting. A connection without an answer shows nothing: another process may listen on the port.
_ANSWER = b"1"

#: Connections that the kernel keeps until they are accepted.
_BACKLOG = 1024

#: Connections that have not sent a greeting. If there are more, the oldest is closed, and a rank connects again. A process often may open 1024 files only.
_MOST_UNKNOWN = 128

#: Seconds between two attempts to accept a connection while no file can be opened.
_NO_FILE_PAUSE = 0.02

#: Longest time, in seconds, of an attempt to connect.
_CONNECT_SECONDS = 2.0

#: Ends of connections. A forked child closes its copies: otherwise they would stay open when the parent is killed.
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lifelines:
    """Holds the ends of the connections of one rank. A context manager, which closes them.

    Args:
        store: the job's key-value store.
        rank: number of this rank.
        storage: numbers of the storage ranks. Of two storage ranks, the later one connects to the earlier one.

    Attributes:
        store: the job's key-value store.
        rank: number of this rank.
        ranks: ranks with a connection.
        closed: ranks whose connections have closed.
    """

    def __init__(self, store: dist.Store, rank: int, storage: range) -> None:
        self.store, self.rank = store, rank
        self._missing = [other for other in storage if rank not in storage or other < rank]
        self._selector = selectors.DefaultSelector()
        self._listening: socket.socket | None = None
        self._unknown: dict[socket.socket, bytes] = {}
        self._unanswered: dict[socket.socket, int] = {}
        self._reached: set[int] = set()
        self.ranks: dict[int, socket.socket] = {}
        self.closed: set[int] = set()
        if rank in storage:
            self._listen()

    def __enter__(self) -> Lifelines:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._unknown, *self._unanswered, *self.ranks.values(), *filter(None, [self._listening])):
            each.close()
        self._selector.close()

    @property
    def are_all(self) -> bool:
        """True if there is a connection to every storage rank to which this rank connects."""
        return not self._missing and not self._unanswered

    def wait(self, seconds: float, connects: bool = True) -> list[int]:
        """Waits until something happens to a connection, at most for ``seconds``. Returns the ranks whose connections have closed.

        Args:
            connects: connect to missing storage ranks before. Without it, the store is not needed.

        Raises:
            RuntimeError: the store is gone.
        """
        missing = [*self._missing] if connects else []
        closed = [other for other in missing if self.store.check([_key(other)]) and self._connect(other)]
        for event, _ in self._selector.select(0 if closed else seconds):
            found: Any = event.fileobj
            if found is self._listening:
                self._accept()
            elif found.fileno() < 0 or (received := _received(found)) is None:
                continue  # it was closed for an earlier event, or nothing has arrived
            elif found in self._unknown:
                self._read_greeting(found, received)
            elif received == _ANSWER and found in self._unanswered:
                self.ranks[self._unanswered.pop(found)] = found
            elif not received:
                self._missing += [other for each, other in self._unanswered.items() if each is found]
                self._forget(found)
                closed += [rank for rank, each in self.ranks.items() if each is found]
        for rank in closed:
            self.ranks.pop(rank, None)
        self.closed.update(closed)
        return closed

    # --- storage ranks --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        own = _own_address(self.store)
        # The others may reach this host by an address of either kind.
        is_both = own == "" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_both or ":" in own else socket.AF_INET
        self._listening = socket.create_server((own, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=is_both)
        _open.add(self._listening)
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._secret = secrets.token_hex(_SECRET_BYTES // 2).encode()
        place = {"host": own, "port": self._listening.getsockname()[1], "secret": self._secret.decode()}
        self.store.set(_key(self.rank), json.dumps(place))

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            made = self._listening.accept()[0]
            self._unknown[self._watched(made)] = b""
        except OSError:  # it has gone again, or no file can be opened
            time.sleep(_NO_FILE_PAUSE)
        if len(self._unknown) > _MOST_UNKNOWN:
            self._forget(next(iter(self._unknown)))

    def _read_greeting(self, connection: socket.socket, received: bytes) -> None:
        self._unknown[connection] += received
        greeting = self._unknown[connection]
        if received and len(greeting) < _SECRET_BYTES + _RANK_BYTES:
            return
        secret, number = greeting[:_SECRET_BYTES], greeting[_SECRET_BYTES:]
        if secrets.compare_digest(secret, self._secret) and number.isdigit():
            del self._unknown[connection]
            self.ranks[int(number)] = connection
            with contextlib.suppress(OSError):  # it has closed, which the next call of `wait` sees
                connection.send(_ANSWER)
        else:
            self._forget(connection)

    # --- all ranks ------------------------------------------------------------------------------------------

    def _connect(self, other: int) -> bool:
        """Connects to a storage rank that listens. If it cannot be reached, the next call of :meth:`wait` tries again.

        Returns True if the rank is gone: it was reached earlier, and nothing listens there any more.
        """
        place = json.loads(self.store.get(_key(other)))
        try:
            made = _connected(place["host"] or _host_of(self.store) or "localhost", place["port"])
            self._reached.add(other)
            made.sendall(f"{place['secret']}{self.rank:0{_RANK_BYTES}d}".encode())
            self._unanswered[self._watched(made)] = other
            self._missing.remove(other)
        except ConnectionRefusedError:
            if other in self._reached:
                self._missing.remove(other)
                return True
        except OSError:
            pass
        return False

    def _watched(self, connection: socket.socket) -> socket.socket:
        _open.add(connection)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        return connection

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._unknown.pop(connection, None)
        self._unanswered.pop(connection, None)
        connection.close()


def _received(connection: socket.socket) -> bytes | None:
    """Returns what has arrived; b"": the connection is closed; None: nothing has arrived."""
    try:
        return connection.recv(_SECRET_BYTES + _RANK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _connected(host: str, port: int) -> socket.socket:
    """Connects to a port. Raises OSError."""
    last = OSError(f"{host} has no address")
    for family, kind, number, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, number)
        _open.add(made)
        made.settimeout(_CONNECT_SECONDS)
        try:
            made.connect(place)
            return made
        except OSError as error:
            made.close()
            last = error
    raise last


def _host_of(store: dist.Store) -> str | None:
    """Returns the name by which this process reaches the host of a store; None if the store has no host, such as a file."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return getattr(inner, "host", None)


def _own_address(store: dist.Store) -> str:
    """Returns the address of the interface that leads to the store's host; '' for all interfaces, if that host is this one."""
    host = _host_of(store)
    if host is None:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        family, kind, number, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
        is_for_others = not _is_loopback(own) and "%" not in own  # an address with a zone is of one link
        if is_for_others or _is_loopback(host):
            return own
    return ""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"


def _close_in_child() -> None:
    for each in [*_open]:
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
