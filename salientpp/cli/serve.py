"""``salientpp serve``: serves a dataset directory to training jobs that start and end, or shows the state of such a server."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, adder, files_of
from salientpp.ranks.greeting import DifferentVersions
from salientpp.sessions.connection import Connection
from salientpp.sessions.protocol import Address, parse_address
from salientpp.sessions.token import VARIABLE, find_token

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "store the rows of a graph for training jobs that come and go"
EXAMPLE = "salientpp serve DIR --listen 10.0.0.5:29500"

#: Help of each argument.
TEXTS = {
    "root": "dataset directory that `salientpp partition` wrote",
    "--listen": "address of one interface of this host, which training jobs reach. Port 0 takes a free port",
    "--hosts": "addresses of all storage hosts in order, this one among them (default: this one only)",
    "--token-file": f"file with the shared token, which only its owner may read (default: the environment variable {VARIABLE})",
    "--copy-to": "directory of a local disk. The parts of this host are copied there first, and the copy is served",
    "--status": "show the sessions of the server with this address, instead of serving",
}

#: Seconds that a server may take to tell its status.
_STATUS_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    parser.usage = "salientpp serve root --listen HOST:PORT [options]\n       salientpp serve --status HOST:PORT [--token-file FILE] [--json FILE]"
    parser.description = (
        "Store the rows of a graph on this host for training jobs, which open it with salientpp.load('salientpp://HOST:PORT'). Any number of jobs may train "
        "at once. The server runs until it gets SIGTERM or Ctrl-C, and a job that fails ends nothing but itself. Server and jobs need the same token "
        f"in {VARIABLE}. The traffic is not encrypted."
    )
    add = adder(parser, TEXTS)
    add("root", type=Path, nargs="?")
    add("--listen", type=_address, metavar="HOST:PORT")
    add("--hosts", type=_address, nargs="+", default=[], metavar="HOST:PORT")
    add("--token-file", type=Path, metavar="FILE")
    add("--copy-to", type=Path, metavar="DISK")
    add("--status", type=_address, metavar="HOST:PORT")
    add_json(parser, "the state that --status shows")


def run(arguments: argparse.Namespace) -> int:
    serving = [name for name in ("root", "listen", "hosts", "copy_to") if getattr(arguments, name)]
    if arguments.status is not None:
        if serving:
            raise ValueError(
                f"--status asks another server and serves nothing, but {_named(serving[0])} was given too; leave one out"
            )
        return _show_status(arguments)
    if missing := [_named(name) for name in ("root", "listen") if name not in serving]:
        arguments.parser.error(f"the following arguments are required: {', '.join(missing)}")
    if arguments.json is not None:
        raise ValueError("--json writes what --status shows; give --status, or leave --json out")
    return _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from salientpp.serving.directory import check_hosts, open_directory
    from salientpp.serving.server import Server, listen
    from salientpp.serving.session import run as run_session

    token, root, hosts = find_token(arguments.token_file), arguments.root, arguments.hosts
    directory = open_directory(root)
    with listen(arguments.listen) as listening:
        address = Address(arguments.listen.host, listening.getsockname()[1])
        index = check_hosts(hosts or [address], address, directory.num_parts)
        if arguments.copy_to is not None:
            root = _copied(root, arguments.copy_to, index, len(hosts) or 1, directory.num_parts)
            directory = open_directory(root)
        server = Server(directory, listening, address, hosts, token, run_session, _log)
        line = f"salientpp serves {terminal.printable(str(root))} on {address}"
        stopped_by = server.serve(lambda: terminal.print_whole(f"{line}\n"))
    _log(f"stopped by {stopped_by.name}")
    if stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _copied(root: Path, to: Path, index: int, hosts: int, num_parts: int) -> Path:
    from salientpp.cli.progress import shown_progress
    from salientpp.serving.directory import parts_of_host
    from salientpp.store.directory.local_copy import copy_to_disk

    with shown_progress() as progress:
        return copy_to_disk(root, to, parts=parts_of_host(index, hosts, num_parts), progress=progress)


def _show_status(arguments: argparse.Namespace) -> int:
    files = files_of(arguments, "json")
    try:
        with Connection(arguments.status, find_token(arguments.token_file), _STATUS_SECONDS) as connection:
            status = connection.request(do="status")
    except DifferentVersions as error:
        raise ValueError(str(error)) from None
    contents = {"json": lambda: (json.dumps(status, indent=1) + "\n").encode()}
    terminal.finish(files, contents, arguments.written, lambda: _status(arguments.status, status))
    return 0


def _status(address: Address, status: dict[str, Any]) -> Sequence[RenderableType]:
    from salientpp.tables import simple_table

    number, hours = len(status["sessions"]), status["since"] / 3600
    about = f"{address} has served {terminal.printable(status['directory'])} for {hours:,.1f} h; {number} session{'s' * (number != 1)}"
    if not status["sessions"]:
        return [about]
    headings = ("session", "client", "ranks", "minutes", "rows sent", "GB sent", "MB/s", "process")
    table = simple_table("Sessions", headings, ("session", "client"))
    for each in status["sessions"]:
        table.add_row(
            each["session"][:12],
            each["peer"],
            f"{len(each['attending'])} of {each['trainers']}",
            f"{each['since'] / 60:,.1f}",
            f"{each['rows']:,}",
            f"{each['bytes'] / 1e9:,.3f}",
            f"{each['bytes_per_second'] / 1e6:,.1f}",
            f"{each['pid']}",
        )
    return [about, table]


def _named(name: str) -> str:
    return name if name == "root" else f"--{name.replace('_', '-')}"


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _log(text: str) -> None:
    terminal.complain(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
