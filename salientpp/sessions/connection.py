"""Client's end of a connection to a storage server: :class:`Connection`. Its calls block; its beats run in a thread."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, BinaryIO

from salientpp.ranks.greeting import DifferentVersions
from salientpp.sessions.protocol import (
    BEAT_SECONDS,
    MOST_GREETING,
    MOST_REPLY,
    Address,
    StorageError,
    describe_difference,
    greeting,
    line_of,
    parse_address,
    readable,
    shown,
    values_of,
)
from salientpp.sessions.token import is_proof, new_nonce, proof

_BLOCK_BYTES = 2**20

#: Seconds that a server may take to answer a bye. A stopped one delays the end of a process by this time.
_BYE_SECONDS = 5.0
#: Largest number of characters of a reason that a client gives.
_MOST_WHY = 1000

#: Open connections of this process. A forked child closes its copies: otherwise a server would not notice that the parent was killed.
_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """Connection to a storage server, on which both sides have proved that they know the token. A context manager, which says bye unless it fails.

    Any thread may call any method. Requests run one after the other. After a failure of the connection, every further request fails too.

    Args:
        address: ``host:port``, also with ``salientpp://`` in front.
        token: from :func:`~salientpp.sessions.token.find_token`.
        timeout: seconds that the server may be silent.

    Attributes:
        address: the server's address.
        timeout: seconds that the server may be silent.

    Raises:
        StorageError: the server cannot be reached, is no storage server, or does not know the token.
        DifferentVersions: the server runs another version of this package.
        ValueError: ``address`` is not an address.
    """

    def __init__(self, address: str | Address, token: str, timeout: float = 60.0) -> None:
        self.address = parse_address(address) if isinstance(address, str) else address
        self.timeout = timeout
        self._left = bytearray()  # bytes that were received and not yet read
        self._asking, self._sending = threading.Lock(), threading.Lock()
        self._ended, self._was_closed = threading.Event(), False
        self._socket = self._connect()
        try:
            self._greet(token)
        except BaseException:
            self.close(bye=False)
            raise
        _open.add(self)

    @property
    def has_ended(self) -> bool:
        """True if the connection has failed or was closed."""
        return self._ended.is_set()

    @property
    def own_host(self) -> str:
        """Address of this side's network interface."""
        return str(self._socket.getsockname()[0])

    def request(self, **what: Any) -> dict[str, Any]:
        """Sends a request, such as ``request(do="status")``. Returns the reply.

        Raises:
            StorageError: the server refuses the request, or the connection fails.
        """
        with self._asking:
            return self._ask(what)

    def fetch(self, name: str, file: BinaryIO) -> int:
        """Writes a file of the served directory to ``file``. Returns its number of bytes.

        Args:
            name: its name in the manifest, relative to the directory.
            file: an open file, which is written from its current position.

        Raises:
            StorageError: the server refuses the request, or the connection fails.
            OSError: ``file`` cannot be written. The connection is then closed.
        """
        with self._asking:
            number = self._ask({"do": "file", "name": name}).get("bytes")
            if not isinstance(number, int) or number < 0:
                raise self._failed(f"sent {number!r:.40} as the number of bytes of {name}")
            left = number
            try:
                while left:
                    block = self._left or self._receive(f"{name} of {number:,} bytes")
                    self._left = bytearray()
                    file.write(memoryview(block)[:left])
                    self._left += block[left:]
                    left -= min(left, len(block))
            except BaseException:
                self._end()  # the rest of the file would be read as a reply
                raise
        return number

    def beat(self) -> None:
        """Tells the server that this process lives. The server sends no reply.

        Raises:
            StorageError: the connection has failed.
        """
        self._send({"do": "beat"})

    def tell_lost(self, why: str) -> None:
        """Tells the server that the session cannot go on, because another storage host has said so. The server sends no reply.

        Raises:
            StorageError: the connection has failed.
        """
        self._send({"do": "lost", "why": why[:_MOST_WHY]})

    def keep_beating(self, lost: Callable[[str], None]) -> None:
        """Starts a daemon thread that beats until the connection ends, several times within the timeout, and listens.

        Args:
            lost: called in that thread, at most once, with a text that says why the session cannot go on. Not called after :meth:`close`.
        """
        seconds = min(BEAT_SECONDS, self.timeout / 4)

        def beat() -> None:
            try:
                while not self._ended.is_set():
                    if not self._is_readable(seconds):
                        self.beat()
                    elif (news := self._news()) is not None:
                        return lost(news) if news else None
            except StorageError:
                if not self._was_closed:
                    lost(
                        f"the storage host {self.address} is lost: its server has closed the connection; look at its log first"
                    )

        threading.Thread(target=beat, name="salientpp-beat", daemon=True).start()

    def _news(self) -> str | None:
        """Returns why the session cannot go on; '' if it has ended well; None if what arrived was the reply to another thread's request."""
        with self._asking:
            if self._ended.is_set() or not self._is_readable(0):
                return None
            news = self._parsed(self._line(MOST_REPLY, "news")).get("lost")
            return None if news is None else readable(news, 500)

    def _is_readable(self, seconds: float) -> bool:
        """Waits until bytes arrive or the connection ends, at most for ``seconds``."""
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # it was closed
            return True
        return bool(waiting.poll(1e3 * seconds))

    def close(self, bye: bool = True, why: str | None = None) -> None:
        """Ends the connection. A second call does nothing.

        Args:
            bye: tell the server that this end is intended. Without it, the server tells the others of a session that this process was lost.
            why: reason for which this process leaves a session that then cannot go on. None: the session has ended.
        """
        self._was_closed = True
        if bye and not self._ended.is_set():
            self.timeout = min(self.timeout, _BYE_SECONDS)
            with contextlib.suppress(StorageError):
                if why is None:
                    self.request(do="bye")
                else:
                    self._send({"do": "bye", "why": why[:_MOST_WHY]})  # does not wait for a server that may be stopped
        self._end()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(bye=error is None)

    # --- greeting ---------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        try:
            made = socket.create_connection(self.address, self.timeout)
        except TimeoutError:
            raise self._failed(
                f"did not answer for {self.timeout:g} s; check the address, and that no firewall lies between"
            ) from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise self._failed(
                f"cannot be reached ({why}); check the address, and that `salientpp serve` runs there"
            ) from None
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return made

    def _greet(self, token: str) -> None:
        until = time.monotonic() + self.timeout
        line = self._line(MOST_GREETING, "a greeting", until)
        try:
            theirs = values_of(line)
            nonce = theirs["nonce"]
        except (ValueError, KeyError):
            raise self._failed(
                f"is not a salientpp storage: expected a greeting, got {shown(line)}; check the address"
            ) from None
        own = greeting(new_nonce())
        if (difference := describe_difference(theirs, own)) is not None:
            raise DifferentVersions(f"{self.address}: {difference}")
        self._send({**own, "proof": proof(token, "client", nonce, own["nonce"])})
        answer = self._parsed(self._line(MOST_GREETING, "the proof of the token", until))
        if "error" in answer:
            raise self._failed(f"refused this client: {readable(answer['error'], 500)}")
        if not is_proof(answer.get("proof"), proof(token, "server", nonce, own["nonce"])):
            raise self._failed("does not know the token of this client, so it is another server; check the address")

    # --- bytes ------------------------------------------------------------------------------------------------

    def _ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        self._send(what)
        reply = {"lost": ""}
        while "lost" in reply:  # said unasked, before the server had read the request
            reply = self._parsed(self._line(MOST_REPLY, f"the reply to {what.get('do')!r}"))
        if "error" in reply:
            raise StorageError(f"the storage server {self.address} refused {what.get('do')!r}: {reply['error']}")
        return reply

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return values_of(line)
        except ValueError as error:
            raise self._failed(f"sent a wrong line: {error}") from None

    def _send(self, what: Mapping[str, Any]) -> None:
        line = line_of(what)
        if self._ended.is_set():
            raise StorageError(f"the connection to the storage server {self.address} has ended; make another one")
        try:
            with self._sending:
                self._socket.sendall(line)
        except TimeoutError:
            raise self._failed(f"received nothing for {self.timeout:g} s; it may be stopped") from None
        except OSError as error:
            raise self._failed(f"has closed the connection ({error.strerror or error})") from None

    def _line(self, most: int, what: str, until: float | None = None) -> bytes:
        """Receives a line of at most ``most`` bytes, without its newline. ``until`` bounds the time for the whole line; without it, only silence is bounded."""
        searched = 0
        while (end := self._left.find(b"\n", searched)) < 0:
            searched = len(self._left)
            if searched > most:
                raise self._failed(
                    f"is not a salientpp storage: expected {what}, got more than {most:,} bytes without a newline"
                )
            self._left += self._receive(what, until)
        line = bytes(self._left[:end])
        del self._left[: end + 1]
        return line

    def _receive(self, what: str, until: float | None = None) -> bytes:
        """Receives the next bytes, at least one."""
        try:
            self._socket.settimeout(self.timeout if until is None else max(until - time.monotonic(), 1e-3))
            received = self._socket.recv(_BLOCK_BYTES)
        except TimeoutError:
            raise self._failed(
                f"did not send {what} for {self.timeout:g} s; it may be stopped, or no storage server"
            ) from None
        except OSError as error:
            raise self._failed(f"has not sent {what} ({error.strerror or error}); its log may say why") from None
        if not received:
            raise self._failed(f"closed the connection before it sent {what}; its log may say why")
        return received

    def _failed(self, text: str) -> StorageError:
        """Ends the connection. Returns the error that says why."""
        if hasattr(self, "_socket"):
            self._end()
        return StorageError(f"the storage server {self.address} {text}")

    def _end(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        self._socket.close()


def _close_in_child() -> None:
    for connection in list(_open):
        connection._ended = threading.Event()  # the old one may be locked, by a thread that does not exist here
        connection._ended.set()
        connection._socket.close()  # closes the copy; the parent's connection goes on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
