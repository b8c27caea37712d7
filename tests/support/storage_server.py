"""Storage servers for tests, whose sessions run a body without a graph; and raw connections to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from forked_python import python

from salientpp.serving.directory import open_directory
from salientpp.serving.server import Server, listen
from salientpp.serving.spec import SessionSpec
from salientpp.sessions.connection import Connection
from salientpp.sessions.protocol import Address, parse_address

TOKEN = "a token of the tests"
ROOT = Path(__file__).parents[2]


def body(pipe: Pipe, spec: SessionSpec) -> None:
    """Acts as the first digit of the session's id says, and writes what the server tells it beside the directory."""
    kind = spec.session[0]
    if kind == "f":
        pipe.send({"failed": "the part is missing"})
        sys.exit(1)
    if kind == "d":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "c":
        time.sleep(60)
    pipe.send({"store": [spec.host, 4321 if spec.store is None else spec.store[1]]})
    pipe.send({"rows": 10, "bytes": 1000})
    time.sleep(0.1)
    pipe.send({"rows": 30, "bytes": 3000})
    if kind == "e":
        time.sleep(0.3)
        return
    try:
        while not pipe.poll(0.5):
            pipe.send({})
        told = pipe.recv()
    except (EOFError, OSError):
        return
    with open(f"{spec.root}.{spec.session}", "a") as file:
        file.write(told["lost"])
    if kind == "b":
        time.sleep(60)  # does not end by itself


def main() -> None:
    """Serves the directory of the first argument on the address of the second; the others are all hosts."""
    root, address, *hosts = sys.argv[1:]
    with listen(parse_address(address)) as listening:
        real = Address(parse_address(address).host, listening.getsockname()[1])
        server = Server(
            open_directory(Path(root)),
            listening,
            real,
            [parse_address(host) for host in hosts],
            TOKEN,
            body,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        which = server.serve(lambda: print(os.getpid(), real, flush=True))
    sys.exit(100 + which)


@dataclass
class Running:
    """A server in a process of its own.

    Attributes:
        pid: process id of the server.
        log: file with its stderr.
    """

    process: subprocess.Popen[str]
    pid: int
    address: Address
    root: Path
    log: Path
    open_sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, token: str = TOKEN, timeout: float = 120.0) -> Connection:
        return Connection(self.address, token, timeout)

    def raw(self) -> socket.socket:
        """A connection that sends nothing by itself. It is closed at the end of the test."""
        made = socket.create_connection(self.address, 20)
        self.open_sockets.append(made)
        return made

    def open(self, connection: Connection, session: str, trainers: int = 1, timeout: float = 30) -> list:
        asked = {"do": "open", "session": session, "trainers": trainers, "store": None, "timeout": timeout}
        return connection.request(**asked)["store"]

    def sessions(self) -> list[dict]:
        with self.connect() as connection:
            return connection.request(do="status")["sessions"]

    def told(self, session: str) -> str:
        """Text that the server told a session's process, or ''."""
        path = Path(f"{self.root}.{session}")
        return path.read_text() if path.exists() else ""

    def said(self, text: str) -> bool:
        return text in self.log.read_text()


def until(holds: Callable[[], object], seconds: float = 60.0) -> float:
    """Waits until ``holds()`` is true. Returns the seconds that it took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - begin


def is_alive(pid: int) -> bool:
    """True if a process runs. A process that has ended and waits for its parent does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def running(
    root: Path, folder: Path, *hosts: str, address: str = "127.0.0.1:0", files: int = 0, is_new: bool = False
) -> Iterator[Running]:
    """Starts a server, and kills it at the end.

    Args:
        files: number of files that it may open; 0: the usual one.
        is_new: start the server and its fork server as new interpreters. Otherwise both are forks of a process that has done the imports.
    """
    script = "import forked_python, storage_server; {}storage_server.main()".format(
        "" if is_new else "forked_python.fork_helpers(); "
    )
    if files:
        script = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files})); {script}"
    log = folder / "server.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable if is_new else python(), "-c", script, str(root), address, *hosts],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    server = None
    try:
        line = process.stdout.readline().strip()
        assert line, log.read_text()
        pid, place = line.split()
        server = Running(process, int(pid), parse_address(place), root, log)
        yield server
    finally:
        for each in [] if server is None else server.open_sockets:
            each.close()
        process.kill()
        process.wait()
        process.stdout.close()
