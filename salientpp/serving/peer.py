"""Server's end of a connection: :class:`Peer` reads lines within limits, and sends lines and files without blocking others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any, BinaryIO

from salientpp.serving.child import Session
from salientpp.sessions.protocol import line_of, values_of

_BLOCK_BYTES = 2**20

#: Seconds until the network's silence ends a connection: idle time before the first probe, time between probes, and their number.
_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))

#: Seconds that the last bytes of a connection have to leave.
_LAST_SECONDS = 5.0


class LineTooLong(ValueError):
    """A line has more bytes than it may have. The connection cannot go on, because the next line cannot be found."""


class Peer:
    """A connection that a client made.

    Attributes:
        name: address of the client.
        session, rank: the session that the connection opened or attends, and its rank there; None before.
        why: how the connection ended, for the others of its session. None: intended, or it has not ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = (writer.get_extra_info("peername") or ("unknown", 0))[:2]
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.session: Session | None = None
        self.rank = 0
        self.why: str | None = "went away"
        self._reader, self._writer = reader, writer
        self._left = bytearray()  # bytes that were received and not yet read
        with contextlib.suppress(OSError, AttributeError):
            connected = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _PROBES:
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    async def receive(self, most: int) -> dict[str, Any]:
        """Receives the object of the next line.

        Raises:
            EOFError: the client has closed the connection.
            LineTooLong: the line has more than ``most`` bytes.
            ValueError: the line holds no object.
        """
        searched = 0
        while (end := self._left.find(b"\n", searched)) < 0:
            searched = len(self._left)
            if searched > most:
                raise LineTooLong(f"expected a line of at most {most:,} bytes, got a longer one")
            received = await self._reader.read(most)
            if not received:
                raise EOFError
            self._left += received
        line = bytes(self._left[:end])
        del self._left[: end + 1]
        if end > most:
            raise LineTooLong(f"expected a line of at most {most:,} bytes, got one of {end:,}")
        return values_of(line)

    async def send(self, values: dict[str, Any]) -> None:
        await self.send_bytes(line_of(values))

    async def send_bytes(self, content: bytes) -> None:
        """Sends bytes, and waits until the client has taken most of them. A client in a session has the session's timeout for this."""
        self._writer.write(content)
        await asyncio.wait_for(self._writer.drain(), None if self.session is None else self.session.spec.timeout)

    async def send_file(self, file: BinaryIO) -> None:
        """Sends ``{"bytes": n}`` and the n bytes of a file. A thread reads them, so that a slow disk delays this client only.

        Raises:
            OSError: the file cannot be read any more, or the connection fails.
        """
        left = os.fstat(file.fileno()).st_size
        await self.send({"bytes": left})
        while left:
            block = await asyncio.to_thread(file.read, min(left, _BLOCK_BYTES))
            if not block:
                raise OSError(f"{file.name} has become shorter while it was sent")
            await self.send_bytes(block)
            left -= len(block)

    def tell(self, values: dict[str, Any]) -> None:
        """Sends a short line, and does not wait until the client takes it."""
        self._writer.write(line_of(values))

    def abort(self) -> None:
        """Closes the connection at once. A call that waits for its bytes ends with EOFError or OSError."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection when the bytes that wait have left, or a few seconds later."""
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _LAST_SECONDS)
            return
        self.abort()
