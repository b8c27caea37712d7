"""Storage server: listens on one interface, sends the files of a directory, and runs a process for each session.

One thread runs everything here, and nothing in it waits for one client, a disk or a process. Bytes that come from outside are bounded: in length and
time before a client has proved that it knows the token, and in length afterwards. So nobody without the token ends or delays the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from salientpp.serving.child import Body, Session, fork_server
from salientpp.serving.directory import Mistake, ServedDirectory, check_hosts
from salientpp.serving.peer import LineTooLong, Peer
from salientpp.serving.spec import SessionSpec
from salientpp.sessions.protocol import (
    MOST_GREETING,
    MOST_REQUEST,
    Address,
    describe_difference,
    greeting,
    line_of,
    readable,
)
from salientpp.sessions.token import VARIABLE, is_proof, new_nonce, proof

#: Seconds that a client has to prove that it knows the token. At most this many connections, and this share of all files that the process may open, are at
#: this point at once. The number is high, because all ranks of a large job connect in the same moment.
GREETING_SECONDS, MOST_WAITING, SHARE_WAITING = 10.0, 4096, 0.25

#: Connections that are accepted in one turn of the event loop, so that a flood of them delays no client; and connections that wait for this turn.
_ACCEPTED_AT_ONCE, _BACKLOG = 8, 1024

#: Seconds between two lines in the log about refused connections.
_REFUSED_SECONDS = 1.0

#: Seconds after the timeout of a client in which the server reads what arrived before.
_LATE_SECONDS = 0.5


class Refused(Exception):
    """A connection that the server ends before the proof of the token. The client gets the text."""


class Server:
    """Storage server of one directory.

    Args:
        directory: what it serves.
        listening: a bound socket, from :func:`listen`.
        address: address of the server as clients name it, with the real port.
        hosts: addresses of all storage hosts in order, this one among them. Empty: this one only.
        token: the shared token.
        run: function that a session's process runs.
        log: receives one line for each event.

    Raises:
        ValueError: ``hosts`` lacks the address, or does not fit the parts of the directory.
    """

    def __init__(
        self,
        directory: ServedDirectory,
        listening: socket.socket,
        address: Address,
        hosts: Sequence[Address],
        token: str,
        run: Body,
        log: Callable[[str], None],
    ) -> None:
        hosts = hosts or [address]
        self._index, self._hosts = check_hosts(hosts, address, directory.num_parts), tuple(map(str, hosts))
        self._directory, self._listening, self._address = directory, listening, address
        self._token, self._run, self._log = token, run, log
        self._greeting = greeting("")
        # Encoded once, because a large manifest takes a while.
        self._described = line_of(
            {
                "manifest": directory.manifest,
                "fingerprint": directory.fingerprint,
                "hosts": [*self._hosts],
                "index": self._index,
                "parts": None if directory.parts is None else [*directory.parts],
            }
        )
        self._is_stopping = False
        self._waiting: dict[Peer, None] = {}  # in the order of their arrival
        self._sessions: dict[str, Session] = {}
        self._peers: set[Peer] = set()  # of sessions
        self._refused, self._refused_at = 0, -math.inf

    def serve(self, ready: Callable[[], None]) -> signal.Signals:
        """Serves until SIGTERM or SIGINT. Returns this signal, after all sessions have ended.

        Args:
            ready: called when clients can connect.
        """
        self._most_waiting = max(1, min(MOST_WAITING, int(_allow_many_files() * SHARE_WAITING)))
        self._context = fork_server(self._run)
        return asyncio.run(self._serve(ready))

    async def _serve(self, ready: Callable[[], None]) -> signal.Signals:
        loop = asyncio.get_running_loop()
        self._since = time.monotonic()
        stopped: asyncio.Future[signal.Signals] = loop.create_future()

        def stop(which: signal.Signals) -> None:
            if not stopped.done():
                stopped.set_result(which)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        loop.set_exception_handler(lambda _, context: self._note(f"{context['message']}: {context.get('exception')}"))
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=MOST_GREETING, backlog=_ACCEPTED_AT_ONCE
        )
        self._listening.listen(_BACKLOG)
        ready()
        which = await stopped
        self._is_stopping = True
        server.close()
        why = f"the storage host {self._address} was stopped"
        for session in self._sessions.values():
            self._tell_lost(session, why)
        await asyncio.gather(*(session.stop(why) for session in self._sessions.values()))
        return which

    # --- connections --------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        if len(self._waiting) >= self._most_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[peer] = None
        try:
            try:
                await asyncio.wait_for(self._greet(peer), GREETING_SECONDS)
            finally:
                self._waiting.pop(peer, None)
            await self._answer_all(peer)
        except Refused as error:
            self._note(f"refused {peer.name}: {error}")
            with contextlib.suppress(OSError):
                await peer.send({"error": str(error)})
        except asyncio.TimeoutError:  # before OSError, because newer Pythons derive it from OSError
            self._note(f"closed {peer.name}: it did not greet or receive in time")
        except (EOFError, OSError) as error:
            if peer.why is not None:
                self._note(f"closed {peer.name}: {str(error) or 'it went away'}")
        finally:
            self._leave(peer)
            await peer.close()

    async def _greet(self, peer: Peer) -> None:
        """Exchanges greetings and proofs with a client. Raises Refused."""
        nonce = new_nonce()
        own = {**self._greeting, "nonce": nonce}
        await peer.send(own)
        try:
            theirs = await peer.receive(MOST_GREETING)
        except ValueError as error:
            raise Refused(f"this is a salientpp storage server; {error}") from None
        if (difference := describe_difference(own, theirs)) is not None:
            raise Refused(difference)
        other = f"{theirs.get('nonce')}"
        if not is_proof(theirs.get("proof"), proof(self._token, "client", nonce, other)):
            raise Refused(
                f"the client's token differs from the server's; set {VARIABLE} to the same text on both, or give both the same --token-file"
            )
        await peer.send({"proof": proof(self._token, "server", nonce, other)})

    async def _answer_all(self, peer: Peer) -> None:
        """Answers a client's requests until it says bye, goes away, or is silent for too long in a session."""
        while True:
            patience = None if peer.session is None else peer.session.spec.timeout
            try:
                what = await _next(peer, patience)
                if (do := what.get("do")) == "beat":
                    continue
                if do == "lost":
                    self._lose(peer.session, readable(what.get("why"), 1000))
                    continue
                if do == "bye":
                    peer.why = readable(what["why"], 1000) if "why" in what else None
                    await peer.send({})
                    return
                if not isinstance(do, str) or do not in self._REQUESTS:
                    raise Mistake(f"do must be one of {', '.join(self._REQUESTS)}, beat, lost and bye, got {do!r:.40}")
                await self._REQUESTS[do](self, peer, what)
            except asyncio.TimeoutError:
                if patience is not None:
                    peer.why = f"did not answer for {patience:g} s; it may be stopped"
                raise
            except ValueError as error:  # the client's mistake
                await peer.send({"error": str(error)})
                if isinstance(error, LineTooLong):
                    return

    def _leave(self, peer: Peer) -> None:
        """Tells the session of a connection that ended, unless the client has said bye."""
        session = peer.session
        if session is None:
            return
        session.attending.discard(peer.rank)
        if peer.why is not None:
            self._lose(session, f"rank {peer.rank} of the job {peer.why}")
        elif not session.attending:
            session.leave()
        self._peers.discard(peer)

    # --- requests -----------------------------------------------------------------------------------------------

    async def _describe(self, peer: Peer, what: dict[str, Any]) -> None:
        await peer.send_bytes(self._described)

    async def _send_file(self, peer: Peer, what: dict[str, Any]) -> None:
        name = what.get("name")
        file = await asyncio.to_thread(self._directory.open, name)
        with file:
            await peer.send_file(file)

    async def _status(self, peer: Peer, what: dict[str, Any]) -> None:
        await peer.send(
            {
                "sessions": [session.status() for session in self._sessions.values()],
                "directory": str(self._directory.root),
                "fingerprint": self._directory.fingerprint,
                "since": round(time.monotonic() - self._since, 3),
            }
        )

    async def _open(self, peer: Peer, what: dict[str, Any]) -> None:
        spec = SessionSpec(
            root=str(self._directory.root),
            fingerprint=self._directory.fingerprint,
            host=self._listening.getsockname()[0],
            session=_id_of(what),
            trainers=_whole_number(what, "trainers", 1, 2**20),
            index=self._index,
            hosts=self._hosts,
            store=_store_of(what),
            timeout=_seconds_of(what),
        )
        if peer.session is not None:
            raise Mistake(f"this connection belongs to session {peer.session.spec.session} already; make another one")
        if spec.session in self._sessions:
            raise Mistake(f"session {spec.session} is open already; choose another id")
        if self._is_stopping:
            raise Mistake("this server is being stopped")
        session = self._sessions[spec.session] = Session(spec, peer.name, self._end, self._lose)
        first = await session.begin(self._run, self._context)
        _check_goes_on(session)
        self._join(peer, session, 0)
        self._log(f"session {spec.session} of {peer.name} begins; ranks that train: {spec.trainers}")
        await peer.send({"store": first})

    async def _attend(self, peer: Peer, what: dict[str, Any]) -> None:
        session = self._sessions.get(_id_of(what))
        if session is None:
            raise Mistake(f"there is no session {what['session']} here; it has ended, or rank 0 has not opened it yet")
        rank = _whole_number(what, "rank", 0, session.spec.trainers - 1)
        if peer.session is not None:
            raise Mistake(f"this connection belongs to session {peer.session.spec.session} already; make another one")
        if rank in session.attending:
            raise Mistake(f"rank {rank} attends session {session.spec.session} already")
        _check_goes_on(session)
        self._join(peer, session, rank)
        await peer.send({})

    _REQUESTS: ClassVar[dict[str, Callable[[Server, Peer, dict[str, Any]], Awaitable[None]]]] = {
        "describe": _describe,
        "file": _send_file,
        "open": _open,
        "attend": _attend,
        "status": _status,
    }

    # --- sessions -----------------------------------------------------------------------------------------------

    def _join(self, peer: Peer, session: Session, rank: int) -> None:
        peer.session, peer.rank = session, rank
        session.attending.add(rank)
        self._peers.add(peer)

    def _lose(self, session: Session | None, why: str) -> None:
        """Ends a session, and tells its ranks. Only the first reason counts."""
        if session is not None and session.lost is None:
            self._tell_lost(session, why)
            session.lose(why)

    def _tell_lost(self, session: Session, why: str) -> None:
        """Tells the ranks that attend a session why it cannot go on."""
        for peer in self._peers:
            if peer.session is session:
                peer.tell({"lost": why})

    def _end(self, session: Session) -> None:
        """Forgets a session whose process has ended, and closes the connections of its ranks."""
        del self._sessions[session.spec.session]
        outcome = session.outcome()
        self._log(f"session {session.spec.session} of {session.peer} {outcome}")
        if session.lost is None:
            self._tell_lost(session, "" if session.has_succeeded else f"{session.process_name} {outcome}")
        for peer in self._peers:
            if peer.session is session:
                peer.why = None
                peer.abort()

    def _note(self, text: str) -> None:
        """Writes a line about a connection to the log, at most one a second."""
        now = time.monotonic()
        if now - self._refused_at < _REFUSED_SECONDS:
            self._refused += 1
            return
        more = f" (and {self._refused:,} more such events before)" if self._refused else ""
        self._refused, self._refused_at = 0, now
        self._log(f"{text}{more}")


async def _next(peer: Peer, patience: float | None) -> dict[str, Any]:
    """Receives a client's next request, within ``patience`` seconds; None: without a limit. Raises what ``peer.receive`` raises, and asyncio.TimeoutError."""
    try:
        return await asyncio.wait_for(peer.receive(MOST_REQUEST), patience)
    except asyncio.TimeoutError:
        if patience is None:
            raise
        # If this server was stopped itself, the client's beats have arrived and were not read.
        return await asyncio.wait_for(peer.receive(MOST_REQUEST), _LATE_SECONDS)


def _check_goes_on(session: Session) -> None:
    """Raises Mistake if a session is lost or has ended. Its ranks have been told why, and a rank that comes later would not hear it."""
    if session.lost is not None or session.ended.is_set():
        raise Mistake(f"session {session.spec.session} {session.outcome()}")


def listen(address: Address) -> socket.socket:
    """Binds a socket to one interface. Port 0 takes a free port.

    Raises:
        ValueError: the host stands for all interfaces.
        OSError: the host is unknown, or the port is not free.
    """
    import ipaddress

    try:
        family, kind, number, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        found = ipaddress.ip_address(place[0])
        if found.is_unspecified or getattr(found, "ipv4_mapped", None) == ipaddress.ip_address("0.0.0.0"):
            raise ValueError(
                f"--listen must name one interface, because everyone who reaches the port may try to connect; got {address}, which means all of them; give "
                "the address that the training hosts reach, such as 10.0.0.5:29500"
            )
        made = socket.socket(family, kind, number)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
        except BaseException:
            made.close()
            raise
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"{address} cannot be listened on ({getattr(error, 'strerror', None) or error}); choose an address of this host and a free port"
        ) from None
    return made


def _allow_many_files() -> int:
    """Raises the number of files that this process may open to the highest allowed one, if it can. Returns the number."""
    try:
        import resource
    except ImportError:
        return MOST_WAITING
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MOST_WAITING * 4 if soft == resource.RLIM_INFINITY else soft


# --- values of requests -----------------------------------------------------------------------------------------


def _id_of(what: dict[str, Any]) -> str:
    value = what.get("session")
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not set(value) <= set("0123456789abcdef"):
        raise Mistake(f"session must be 1 to 64 hexadecimal digits, got {value!r:.80}")
    return value


def _whole_number(what: dict[str, Any], name: str, least: int, most: int) -> int:
    value = what.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Mistake(f"{name} must be an integer in [{least}, {most}], got {value!r:.40}")
    return value


def _store_of(what: dict[str, Any]) -> tuple[str, int] | None:
    value = what.get("store")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise Mistake(f"store must be null or [host, port], got {value!r:.80}")
    return value[0], _whole_number({"port of store": value[1]}, "port of store", 1, 65535)


def _seconds_of(what: dict[str, Any]) -> float:
    value = what.get("timeout")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise Mistake(f"timeout must be a number of seconds in (0, 1000000), got {value!r:.40}")
    return float(value)
