"""Storage servers of a dataset directory for tests, each a process that runs ``salientpp serve``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salientpp.sessions.connection import Connection

TOKEN = "a token of these tests"
ROOT = Path(__file__).parents[2]


@dataclass
class Hosts:
    """Running servers of one directory.

    Attributes:
        addresses: their addresses, in order.
        logs: their logs.
    """

    root: Path
    addresses: list[str]
    logs: list[Path]
    options: list[str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"salientpp://{self.addresses[0]}"

    @property
    def are_alive(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def start(self) -> None:
        self.processes += [self._begin(index) for index in range(len(self.addresses))]
        for index in range(len(self.addresses)):
            self._await(index)

    def restart(self, index: int) -> None:
        """Kills one server, and starts it again."""
        process = self.processes[index]
        process.kill()
        process.communicate()
        self.processes[index] = self._begin(index)
        self._await(index)

    def _begin(self, index: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "salientpp", "serve", str(self.root), "--listen", self.addresses[index]]
        with self.logs[index].open("a") as stderr:
            return subprocess.Popen(
                [*command, "--hosts", *self.addresses, *self.options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "SALIENTPP_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
            )

    def _await(self, index: int) -> None:
        """Waits until a server is ready."""
        ready = self.processes[index].stdout
        assert ready is not None and ready.readline(), self.logs[index].read_text()

    def stop(self, how: int = signal.SIGTERM) -> list[int]:
        """Ends the servers. Returns their exit codes."""
        for process in self.processes:
            process.send_signal(how)
        codes = [process.wait(60) for process in self.processes]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()
        self.processes.clear()
        return codes

    def status(self, index: int = 0) -> dict[str, Any]:
        with Connection(self.addresses[index], TOKEN, 20) as connection:
            return connection.request(do="status")

    def sessions(self) -> list[dict[str, Any]]:
        return [session for index in range(len(self.addresses)) for session in self.status(index)["sessions"]]

    def log(self) -> str:
        return "".join(log.read_text() for log in self.logs)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def serving(root: Path, number: int, folder: Path, *options: str) -> Iterator[Hosts]:
    """Starts ``number`` servers of a directory, and stops them at the end. Their logs are in ``folder``."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(number)]
    hosts = Hosts(root, addresses, [folder / f"{index}.log" for index in range(number)], [*options])
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
