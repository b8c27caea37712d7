"""Process of one session on one storage host, seen by the server: it starts, reports, is told about losses, and ends.

Processes are forked from a fork server that has imported the package and has no connections. So a session starts fast and holds no socket of another
one. The process sends messages through a pipe: ``{"store": [host, port]}`` first, then ``{"rows": total, "bytes": total}`` about once a second,
and ``{"failed": text}`` before it fails. The server sends ``{"lost": text}``. If the server is killed, the process sees the end of the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from salientpp.serving.directory import Mistake
from salientpp.serving.spec import SessionSpec

#: Function that a session's process runs. It must be importable by its name.
Body = Callable[[Pipe, SessionSpec], None]

#: Seconds that a process has to end: after a loss, and after its ranks have left.
LOST_SECONDS, LEFT_SECONDS = 0.3, 60.0

#: Share of a session's timeout within which its process must send its first message. The rank that waits for it is silent on its other connections.
_SHARE_OF_START = 0.5

#: Seconds between two looks whether a process has reported, and least seconds of silence after which it counts as stopped, also in a session with a shorter
#: timeout.
_LOOK_SECONDS, _LEAST_SILENCE = 1.0, 5.0

#: Held while a process starts, or its end is read. The module `multiprocessing` reads the end of any process when it starts another, and the second
#: reader of an end would take it for a failure.
_beginning = threading.Lock()

#: Seconds over which the rate of sent bytes is averaged.
_RATE_SECONDS = 5.0


def fork_server(run: Body) -> ForkServerContext:
    """Starts the fork server, which imports the module of ``run`` in the background. Returns the context that makes processes."""
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__, "salientpp.cli.main"])
    ensure_running()
    return context


def _begin(run: Body, pipe: Pipe, spec: SessionSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server too, which then ends its sessions in order
    run(pipe, spec)


def _start(process: ForkServerProcess) -> None:
    with _beginning:
        process.start()


class Session:
    """One session's process. All methods are called in the server's event loop.

    Args:
        on_end: called with this object when the process has ended.
        on_silence: called with this object and a text when the process has not reported for the session's timeout.

    Attributes:
        spec: what the process was told.
        peer: address of the client that opened the session.
        attending: ranks that have a connection to the server.
        lost: why the session was ended, or None.
        ended: set when the process has ended.
    """

    def __init__(
        self,
        spec: SessionSpec,
        peer: str,
        on_end: Callable[[Session], None],
        on_silence: Callable[[Session, str], None],
    ) -> None:
        self.spec, self.peer, self._on_end, self._on_silence = spec, peer, on_end, on_silence
        self._has_reported, self._silent, self._has_left = True, 0.0, False
        self.attending: set[int] = set()
        self.lost: str | None = None
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._since = time.monotonic()
        self._first: asyncio.Future[list[Any]] = self._loop.create_future()
        self._started = asyncio.Event()
        self._process: ForkServerProcess | None = None
        self._pipe: Pipe | None = None
        self._totals: deque[tuple[float, int]] = deque([(self._since, 0)])
        self._rows = 0
        self._failed: str | None = None
        self._was_killed = False

    async def begin(self, run: Body, context: ForkServerContext) -> list[Any]:
        """Starts the process. Returns host and port of the job's key-value store, which its first message has.

        Raises:
            Mistake: the process cannot be started, fails before its first message, or sends none within half of the session's timeout.
        """
        pipe, theirs = None, None
        try:
            pipe, theirs = context.Pipe()
            process = context.Process(target=_begin, args=(run, theirs, self.spec), name=f"session {self.spec.session}")
            await asyncio.to_thread(_start, process)
        except (OSError, EOFError) as error:
            self._pipe = pipe
            self._end()
            raise Mistake(f"the session's process cannot be started ({error})") from None
        finally:
            self._started.set()
            if theirs is not None:
                theirs.close()  # otherwise the end of the process would not end the pipe
        self._process, self._pipe = process, pipe
        threading.Thread(target=self._watch, args=(pipe, process), name="salientpp-session", daemon=True).start()
        if self.lost is not None:  # while the process started
            self._tell()
        patience = self.spec.timeout * _SHARE_OF_START
        try:
            first = await asyncio.wait_for(asyncio.shield(self._first), patience)
            self._look()
            return first
        except asyncio.TimeoutError:
            self.lost = f"{self.process_name} did not report for {patience:g} s; it may be stopped"
            self.kill()
            raise Mistake(self.lost) from None

    def lose(self, why: str) -> None:
        """Tells the process that the session cannot go on, and kills it if it has not ended soon after."""
        if self.lost is None and not self.ended.is_set():
            self.lost = why
            self._tell()

    def leave(self) -> None:
        """Gives the process time to end by itself, because all ranks that train have said bye."""
        self._has_left = True
        self._loop.call_later(LEFT_SECONDS, self.kill)

    async def stop(self, why: str) -> None:
        """Ends the session, and waits until its process has ended."""
        self.lose(why)
        await self._started.wait()
        if self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ended.wait(), LOST_SECONDS)
            self.kill()
            await self.ended.wait()

    def kill(self) -> None:
        """Kills the process, if it lives."""
        if self._process is not None and not self.ended.is_set():
            self._was_killed = True
            self._process.kill()

    def status(self) -> dict[str, Any]:
        """Returns the session's numbers: rows and bytes that it sent, bytes a second over the last seconds, and others."""
        now = time.monotonic()
        (first, before), (last, total) = self._totals[0], self._totals[-1]
        is_silent = now - last > _RATE_SECONDS or last <= first
        return {
            "session": self.spec.session,
            "trainers": self.spec.trainers,
            "attending": sorted(self.attending),
            "since": round(now - self._since, 3),
            "rows": self._rows,
            "bytes": total,
            "bytes_per_second": 0.0 if is_silent else (total - before) / (last - first),
            "pid": None if self._process is None else self._process.pid,
            "peer": self.peer,
        }

    @property
    def process_name(self) -> str:
        """Words for the process, for errors of other ranks."""
        spec = self.spec
        return (
            f"rank {spec.trainers + spec.index} of the session, its process on storage host {spec.hosts[spec.index]},"
        )

    @property
    def has_succeeded(self) -> bool:
        """True if the process has ended by itself and without an error."""
        return self._process is not None and self._process.exitcode == 0

    def outcome(self) -> str:
        """Returns how the session ended, for the log."""
        code = None if self._process is None else self._process.exitcode
        if self.lost is not None:
            return f"was lost: {self.lost}"
        if self._failed is not None:
            return f"failed: {self._failed}"
        if self._was_killed:
            return "was killed by the server, because it did not end in time"
        if code is not None and code < 0:
            return f"was killed by signal {-code}" + ("; memory may have run out" if code == -signal.SIGKILL else "")
        if code is None:
            return "did not start"
        return "ended" if code == 0 else f"failed with exit code {code}"

    # --- the process --------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the process has ended
                self._pipe.send({"lost": self.lost})
        self._loop.call_later(LOST_SECONDS, self.kill)

    def _watch(self, pipe: Pipe, process: ForkServerProcess) -> None:
        """Passes messages to the event loop until the process has ended. Runs in a thread of its own, because it waits."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._loop.call_soon_threadsafe(self._read, pipe.recv())
            wait([process.sentinel])
            with _beginning:
                process.join()
            self._loop.call_soon_threadsafe(self._end)

    def _look(self) -> None:
        """Counts the seconds without a report. While the server is stopped itself, it does not count."""
        self._silent = 0.0 if self._has_reported else self._silent + _LOOK_SECONDS
        self._has_reported = False
        if self.ended.is_set() or self._has_left:
            return
        if self._silent < (longest := max(self.spec.timeout, _LEAST_SILENCE)):
            self._loop.call_later(_LOOK_SECONDS, self._look)
        else:
            self._on_silence(self, f"{self.process_name} did not report for {longest:g} s; it may be stopped")

    def _read(self, message: dict[str, Any]) -> None:
        self._has_reported = True
        if "store" in message and not self._first.done():
            self._first.set_result([*message["store"]])
        if "rows" in message:
            now = time.monotonic()
            self._rows = message["rows"]
            self._totals.append((now, message["bytes"]))
            while len(self._totals) > 2 and self._totals[1][0] < now - _RATE_SECONDS:
                self._totals.popleft()
        self._failed = message.get("failed", self._failed)

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self.ended.set()
        if not self._first.done():
            self._first.set_exception(Mistake(f"the session {self.outcome()}"))
            self._first.exception()  # nobody may wait for it any more
        self._on_end(self)
