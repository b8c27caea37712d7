"""Storage servers of a dataset directory for tests, each a process that runs ``salientpp serve``.

The process is a fork of one that has done the imports, and so is its fork server: the imports of both take ten seconds of a core.
"""

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

from forked_python import fork_helpers, python

from salientpp.sessions.connection import Connection

TOKEN = "a token of these tests"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: Code of a server that is a fork. It prints the process id, because the process that a test starts only asks for the fork.
FORK = "import storage_hosts; storage_hosts.main()"


def main() -> None:
    from salientpp.cli.main import main as command

    print(os.getpid(), flush=True)
    fork_helpers()
    sys.exit(command())


@dataclass
class Hosts:
    """Running servers of one directory.

    Attributes:
        addresses: their addresses, in order.
        logs: their logs.
        is_command: start the command as users do. Otherwise the servers are forks.
        pids: process ids of the servers, by their places among the addresses.
    """

    root: Path
    addresses: list[str]
    logs: list[Path]
    options: list[str]
    is_command: bool = False
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)

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
        self.send_signal(index, signal.SIGKILL)
        self.processes[index].communicate()
        self.pids.pop(index)
        self.processes[index] = self._begin(index)
        self._await(index)

    def send_signal(self, index: int, number: int) -> None:
        """Sends a server a signal, unless it has ended."""
        if self.processes[index].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids.get(index, self.processes[index].pid), number)

    def _begin(self, index: int) -> subprocess.Popen[str]:
        start = [sys.executable, "-m", "salientpp"] if self.is_command else [python(), "-c", FORK]
        command = [*start, "serve", str(self.root), "--listen", self.addresses[index]]
        with self.logs[index].open("a") as stderr:
            return subprocess.Popen(
                [*command, "--hosts", *self.addresses, *self.options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "SALIENTPP_TOKEN": TOKEN, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
            )

    def _await(self, index: int) -> None:
        """Waits until a server is ready."""
        process = self.processes[index]
        assert process.stdout is not None
        self.pids[index] = process.pid if self.is_command else int(process.stdout.readline() or process.pid)
        assert process.stdout.readline(), self.logs[index].read_text()

    def stop(self, how: int = signal.SIGTERM) -> list[int]:
        """Ends the servers. Returns their exit codes."""
        for index in range(len(self.processes)):
            self.send_signal(index, how)
        codes = [process.wait(60) for process in self.processes]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()
        self.processes.clear()
        self.pids.clear()
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
def serving(root: Path, number: int, folder: Path, *options: str, is_command: bool = False) -> Iterator[Hosts]:
    """Starts ``number`` servers of a directory, and stops them at the end. Their logs are in ``folder``."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(number)]
    hosts = Hosts(root, addresses, [folder / f"{index}.log" for index in range(number)], [*options], is_command)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
